/* What is computed row by row between products: embedding, norm, SwiGLU, rotary and the KV write,
 * and the merge of attention's parts; each ends by quantising what the next product reads. */
#include "common/model/cuda/td_cuda_math.cuh"

#define THREADS 128u
#define CHAINS 8u /* of a sum of squares */

/* --- embedding -------------------------------------------------------------------------------- */

DEV float weight_of(const td_cuda_matrix_t &w, uint32_t output, uint32_t k)
{
    const uint8_t *const pair = w.bytes + output / TD_CUDA_PAIR * w.pair_bytes;
    const uint32_t r = output % TD_CUDA_PAIR;
    const uint32_t g = k / TD_CUDA_GROUP;
    const uint32_t in_group = k % TD_CUDA_GROUP;
    const size_t at = (size_t)k * TD_CUDA_PAIR + r;

    switch (w.form) {
    case TD_CUDA_NIBBLE: {
        const uint8_t *const group = pair + (size_t)g * TD_CUDA_NIBBLE_BYTES;
        const uint16_t *const scales = reinterpret_cast<const uint16_t *>(group + 256) + 2 * r;
        const uint32_t byte = group[r * 16 + in_group % 16];
        const uint32_t q = in_group < 16 ? byte & 15u : byte >> 4;
        return fmaf(static_cast<float>(q), dev_float_from_half(scales[0]),
                    dev_float_from_half(scales[1]));
    }
    case TD_CUDA_BYTE: {
        const uint8_t *const group = pair + (size_t)g * TD_CUDA_BYTE_BYTES;
        const uint16_t *const scales = reinterpret_cast<const uint16_t *>(group + 512);
        const int8_t q = static_cast<int8_t>(group[in_group / 16 * 256 + r * 16 + in_group % 16]);
        return dev_float_from_half(scales[r]) * static_cast<float>(q);
    }
    case TD_CUDA_F32:
        return reinterpret_cast<const float *>(pair)[at];
    case TD_CUDA_F16:
        return dev_float_from_half(reinterpret_cast<const uint16_t *>(pair)[at]);
    default:
        return dev_float_from_bits(
            static_cast<uint32_t>(reinterpret_cast<const uint16_t *>(pair)[at]) << 16);
    }
}

DEV_KERNEL __launch_bounds__(THREADS, 1) td_cuda_embed(const td_cuda_embed_t p)
{
    const uint32_t row = blockIdx.x;
    const uint32_t output = p.tokens[row] - p.first; /* wraps around before it */

    if (output >= p.w.outputs) {
        return; /* another device's */
    }
    for (uint32_t k = threadIdx.x; k < p.w.inputs; k += THREADS) {
        p.x[(size_t)row * p.w.inputs + k] = weight_of(p.w, output, k);
    }
}
DEV_REGISTER(td_cuda_embed);

/* --- norm ------------------------------------------------------------------------------------- */

/* The row lies in shared memory: groups of it, a warp each. */
DEV void quantise_row(const td_cuda_quantise_t &to, uint32_t row, const float *values, uint32_t dim)
{
    if (!is_quantised(to)) {
        return;
    }
    for (uint32_t g = threadIdx.x / 32; g < dim / TD_CUDA_GROUP; g += THREADS / 32) {
        quantise_element(to, row, g, values[g * TD_CUDA_GROUP + dev_lane()]);
    }
}

DEV_KERNEL __launch_bounds__(THREADS, 1) td_cuda_norm(const td_cuda_norm_t p)
{
    const uint32_t row = blockIdx.x;
    const size_t at = (size_t)(p.pick == nullptr ? row : p.pick[row]) * p.dim;
    float sum = 0;
    DEV_SHARED(float, values); /* [dim], then the chains */
    float *const chains = values + p.dim;

    for (uint32_t i = threadIdx.x; i < p.dim; i += THREADS) {
        float x = p.x[at + i];
        if (p.y != nullptr) {
            x += p.y[at + i];
            p.x[at + i] = x;
        }
        values[i] = x;
    }
    __syncthreads();
    if (threadIdx.x < CHAINS) {
        float chain = 0;
        for (uint32_t i = threadIdx.x; i < p.dim; i += CHAINS) {
            chain = fmaf(values[i], values[i], chain);
        }
        chains[threadIdx.x] = chain;
    }
    __syncthreads();
    for (uint32_t i = 0; i < CHAINS; i++) {
        sum += chains[i];
    }
    const float inverse = 1.0f / sqrtf(sum / static_cast<float>(p.dim) + p.eps);
    for (uint32_t i = threadIdx.x; i < p.dim; i += THREADS) {
        const float out = values[i] * inverse * p.weight[i];
        values[i] = out;
        p.out[(size_t)row * p.dim + i] = out;
    }
    __syncthreads();
    quantise_row(p.quantise, row, values, p.dim);
}
DEV_REGISTER(td_cuda_norm);

/* --- SwiGLU ----------------------------------------------------------------------------------- */

DEV_KERNEL __launch_bounds__(THREADS, 1) td_cuda_swiglu(const td_cuda_swiglu_t p)
{
    const uint32_t row = blockIdx.x;
    const uint32_t i = blockIdx.y * THREADS + threadIdx.x;
    const size_t at = (size_t)row * p.dim + i;
    float out = 0;

    if (i < p.dim) {
        const float gate = p.gate[at];
        out = gate / (1.0f + exp_clamped(0.0f - gate)) * p.up[at];
        p.gate[at] = out;
    }
    /* A warp is a group, and groups are whole wherever something is quantised. */
    if (is_quantised(p.quantise) && i / TD_CUDA_GROUP < p.dim / TD_CUDA_GROUP) {
        quantise_element(p.quantise, row, i / TD_CUDA_GROUP, out);
    }
}
DEV_REGISTER(td_cuda_swiglu);

/* --- rotary and the KV write -------------------------------------------------------------------
 */

#define PAIRS_MAX (TD_CUDA_HEAD_DIM_MAX / 64u) /* of a lane */
#define CODEC_F16 0u
#define CODEC_F8 1u
#define CODEC_I8 2u

/* td_kv_codec.c, small_float(). */
DEV uint32_t small_float(uint32_t magnitude, uint32_t mantissa, uint32_t bias, uint32_t largest)
{
    const uint32_t cut = 23 - mantissa;

    if (magnitude < (128 - bias) << 23) {
        const uint32_t base = (127 + 1 - bias - mantissa + 23) << 23;
        const float rounded = dev_float_from_bits(magnitude) + dev_float_from_bits(base);
        return dev_bits_from_float(rounded) - base;
    }
    magnitude += (1u << (cut - 1)) - 1 + (magnitude >> cut & 1u);
    const uint32_t code = (magnitude >> cut) - ((127 - bias) << mantissa);
    return code < largest ? code : largest;
}

/* A number's code; it is finite. */
DEV uint32_t encode_value(uint32_t codec, float x)
{
    const uint32_t bits = dev_bits_from_float(x);

    if (codec == CODEC_I8) {
        return static_cast<uint32_t>(dev_round(fminf(fmaxf(x, -127.0f), 127.0f))) & 0xffu;
    }
    if (codec == CODEC_F8) {
        return (bits >> 24 & 0x80u) | small_float(bits & 0x7fffffffu, 3, 7, 0x7e);
    }
    return (bits >> 28 & 8u) | small_float(bits & 0x7fffffffu, 1, 1, 7);
}

/* td_kv_row_scale(). */
DEV float row_scale(uint32_t codec, uint32_t largest_bits, float *factor)
{
    const float limit = codec == CODEC_I8 ? 127.0f : codec == CODEC_F8 ? 448.0f : 6.0f;
    const float largest = dev_float_from_bits(largest_bits);

    *factor = 0;
    if (largest_bits >= 0x7f800000u) {
        return dev_float_from_bits(0x7fc00000u);
    }
    if (largest < TINY) {
        return 0;
    }
    *factor = limit / largest;
    return largest / limit;
}

/* Stores one head of one token. A lane has elements 2 * (lane + 32 * j) and the one behind. */
DEV void store_row(const td_cuda_kv_t &kv, const float (*pairs)[2], uint8_t *values, uint8_t *scale)
{
    uint32_t largest = 0;
    float factor = 0;

    for (uint32_t j = 0; kv.codec != CODEC_F16 && j < PAIRS_MAX; j++) {
        for (int e = 0; e < 2; e++) {
            const uint32_t magnitude = dev_bits_from_float(pairs[j][e]) & 0x7fffffffu;
            largest = magnitude > largest ? magnitude : largest;
        }
    }
    if (kv.codec != CODEC_F16) {
        const float found = row_scale(kv.codec, dev_warp_max_bits(largest), &factor);
        if (dev_lane() == 0) {
            *reinterpret_cast<float *>(scale) = found;
        }
    }
    for (uint32_t j = 0; j < PAIRS_MAX; j++) {
        const uint32_t pair = dev_lane() + 32 * j;
        uint32_t codes[2] = {0, 0};
        if (pair * 2 >= kv.head_dim) {
            break;
        }
        for (int e = 0; e < 2; e++) {
            if (kv.codec == CODEC_F16) {
                codes[e] = dev_half_from_float(pairs[j][e]);
            } else if (factor != 0) {
                codes[e] = encode_value(kv.codec, pairs[j][e] * factor);
            }
        }
        if (kv.codec == CODEC_F16) {
            reinterpret_cast<uint32_t *>(values)[pair] = codes[0] | codes[1] << 16;
        } else if (kv.codec == CODEC_F8 || kv.codec == CODEC_I8) {
            reinterpret_cast<uint16_t *>(values)[pair] =
                static_cast<uint16_t>(codes[0] | codes[1] << 8);
        } else {
            values[pair] = static_cast<uint8_t>(codes[0] | codes[1] << 4);
        }
    }
}

DEV void store_in_block(const td_cuda_kv_t &kv, uint32_t block, uint32_t layer, bool is_v,
                        uint32_t head, uint32_t slot, const float (*pairs)[2])
{
    const size_t place = (size_t)head * kv.block_tokens + slot;
    uint8_t *const half =
        kv.pool + block * kv.block_bytes + (2 * (size_t)layer + (is_v ? 1 : 0)) * kv.half_bytes;

    store_row(kv, pairs, half + place * kv.row_bytes, half + kv.values_bytes + place * 4);
}

/* A warp has one head: of q, which is turned in place, of k, which is turned and stored, or of v.
 */
DEV_KERNEL __launch_bounds__(THREADS, 1) td_cuda_place(const td_cuda_place_t p)
{
    const uint32_t row = blockIdx.x;
    const uint32_t unit = blockIdx.y * (THREADS / 32) + threadIdx.x / 32;
    const uint32_t kv_heads = p.kv.kv_heads;
    const uint32_t dim = p.kv.head_dim;
    const bool is_q = unit < p.heads;
    const bool is_v = unit >= p.heads + kv_heads;
    const uint32_t head = is_q ? unit : (unit - p.heads) % kv_heads;
    const float *const rope = p.rope + (size_t)row * p.rope_dim;
    const float *from = nullptr;
    float pairs[PAIRS_MAX][2];

    if (unit >= p.heads + 2 * kv_heads) {
        return;
    }
    from = is_q ? p.q + ((size_t)row * p.heads + head) * dim
                : (is_v ? p.v : p.k) + ((size_t)row * kv_heads + head) * dim;
    for (uint32_t j = 0; j < PAIRS_MAX; j++) {
        const uint32_t i = 2 * (dev_lane() + 32 * j);
        const float even = i < dim ? from[i] : 0;
        const float odd = i < dim ? from[i + 1] : 0;
        pairs[j][0] = even;
        pairs[j][1] = odd;
        if (!is_v && i < p.rope_dim) {
            pairs[j][0] = fmaf(odd, -rope[i + 1], even * rope[i]);
            pairs[j][1] = fmaf(even, rope[i + 1], odd * rope[i]);
        }
    }
    if (is_q) {
        for (uint32_t j = 0; j < PAIRS_MAX; j++) {
            const uint32_t i = 2 * (dev_lane() + 32 * j);
            if (i < p.rope_dim) {
                float *const to = p.q + ((size_t)row * p.heads + head) * dim + i;
                to[0] = pairs[j][0];
                to[1] = pairs[j][1];
            }
        }
        return;
    }
    for (uint32_t b = p.blocks_begin[row]; b < p.blocks_begin[row + 1]; b++) {
        store_in_block(p.kv, p.blocks[b], p.layer, is_v, head, p.slot[row], pairs);
        if (p.host.pool != nullptr) {
            store_in_block(p.host, p.host_blocks[b], p.layer, is_v, p.host_head + head, p.slot[row],
                           pairs);
        }
    }
}
DEV_REGISTER(td_cuda_place);

/* --- merge ------------------------------------------------------------------------------------ */

/* Adds a part to a total, both of one query: td_cpu_portable.c, merge_part(). */
DEV void merge_head(const td_cuda_merge_t &p, const float *parts, uint32_t count, float *out)
{
    const uint32_t stride = TD_CUDA_PART_ELEMENTS + p.head_dim;
    const uint32_t lane = dev_lane();
    float total[TD_CUDA_HEAD_DIM_MAX / 32];
    float maximum = 0;
    float sum = 0;

    for (uint32_t i = 0; i < count; i++) {
        const float *const part = parts + (size_t)i * p.heads * stride;
        if (part[1] == 0) {
            continue; /* it sees nothing there */
        }
        const bool first = sum == 0;
        const float highest = first || part[0] > maximum ? part[0] : maximum;
        const float a = exp_clamped(maximum - highest);
        const float b = exp_clamped(part[0] - highest);
        sum = first ? part[1] : fmaf(sum, a, part[1] * b);
        maximum = highest;
        DEV_UNROLL
        for (uint32_t j = 0; j < TD_CUDA_HEAD_DIM_MAX / 32; j++) {
            if (lane + 32 * j < p.head_dim) {
                const float element = part[TD_CUDA_PART_ELEMENTS + lane + 32 * j];
                total[j] = first ? element : fmaf(total[j], a, element * b);
            }
        }
    }
    const float inverse = 1.0f / sum;
    DEV_UNROLL
    for (uint32_t j = 0; j < TD_CUDA_HEAD_DIM_MAX / 32; j++) {
        if (lane + 32 * j < p.head_dim) {
            out[lane + 32 * j] = total[j] * inverse;
        }
    }
}

DEV_KERNEL __launch_bounds__(THREADS, 1) td_cuda_merge(const td_cuda_merge_t p)
{
    const uint32_t row = blockIdx.x;
    const uint32_t dim = p.heads * p.head_dim;
    float *const attn = p.attn + (size_t)row * dim;

    if (p.parts != nullptr) {
        const float *const parts =
            p.parts + (size_t)p.part_begin[row] * p.heads * (TD_CUDA_PART_ELEMENTS + p.head_dim);
        for (uint32_t h = threadIdx.x / 32; h < p.heads; h += THREADS / 32) {
            merge_head(p, parts + (size_t)h * (TD_CUDA_PART_ELEMENTS + p.head_dim),
                       p.part_count[row], attn + (size_t)h * p.head_dim);
        }
        __syncthreads(); /* groups may cross heads */
    }
    quantise_row(p.quantise, row, attn, dim);
}
DEV_REGISTER(td_cuda_merge);

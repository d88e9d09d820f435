/* y = W x, for quantised and float weights, at any number of rows. A warp has 16 outputs (a pair)
 * and takes K in ascending order; weights and activations come through a ring of stages in shared
 * memory, filled by asynchronous copies. Products of a group of 32 are exact integers, so the only
 * rounding is one fp32 chain for each (row, output) over ascending groups: the CPU's bits, whatever
 * else is in the block. */
#include "common/model/cuda/dev.h"
#include "common/model/cuda/td_cuda_kernels.h"

#define CHUNK_K (TD_CUDA_CHUNK * TD_CUDA_GROUP)
#define X_ROW_BYTES (CHUNK_K + 16) /* 16 more, so that eight rows lie in different banks */
#define FLOAT_CHUNK 32u            /* k of float weights in flight together */

/* Which matrix and pair a warp works on. */
struct place {
    const td_cuda_matrix_t *w;
    float *y;
    uint32_t pair;
    bool there;
};

template <uint32_t WARPS> DEV place find_place(const td_cuda_product_t &p, uint32_t warp)
{
    uint32_t tile = blockIdx.x * WARPS + warp;
    place found = {&p.w[0], p.y[0], 0, false};

    for (uint32_t i = 0; i < p.count; i++) {
        const uint32_t pairs = (p.w[i].outputs + TD_CUDA_PAIR - 1) / TD_CUDA_PAIR;
        if (!found.there && tile < pairs) {
            found = {&p.w[i], p.y[i], tile, true};
        }
        tile -= pairs; /* wraps around where it was found: not looked at again */
    }
    return found;
}

/* Starts the copies of a chunk: each warp its own weights, all threads the rows' activations. */
template <uint32_t GROUP_BYTES, bool WIDE, uint32_t ROWS, uint32_t WARPS>
DEV void load_chunk(const td_cuda_product_t &p, const place &at, uint8_t *stage, uint32_t row_begin,
                    uint32_t chunk, uint32_t groups)
{
    const uint32_t warp = threadIdx.x / 32;
    const uint32_t first = chunk * TD_CUDA_CHUNK;
    const uint32_t count = groups - first < TD_CUDA_CHUNK ? groups - first : TD_CUDA_CHUNK;
    const uint32_t planes = WIDE ? 2 : 1;
    const uint32_t rows = p.rows - row_begin < ROWS ? p.rows - row_begin : ROWS;
    uint8_t *const x = stage + WARPS * TD_CUDA_CHUNK * GROUP_BYTES;
    uint8_t *const scales = x + planes * ROWS * X_ROW_BYTES;

    if (at.there) {
        const uint8_t *const from =
            at.w->bytes + at.pair * at.w->pair_bytes + (size_t)first * GROUP_BYTES;
        uint8_t *const to = stage + warp * TD_CUDA_CHUNK * GROUP_BYTES;
        for (uint32_t i = dev_lane() * 16; i < count * GROUP_BYTES; i += 32 * 16) {
            dev_copy_async16(to + i, from + i);
        }
    }
    for (uint32_t i = threadIdx.x; i < planes * rows * (CHUNK_K / 16); i += WARPS * 32) {
        const uint32_t piece = i % (CHUNK_K / 16);
        const uint32_t row = i / (CHUNK_K / 16) % rows;
        const uint32_t plane = i / (CHUNK_K / 16) / rows;
        const uint8_t *const from =
            plane == 0 ? reinterpret_cast<const uint8_t *>(p.acts.high) : p.acts.low;
        dev_copy_async16(x + (plane * ROWS + row) * X_ROW_BYTES + piece * 16,
                         from + (size_t)(row_begin + row) * p.acts.stride + first * TD_CUDA_GROUP +
                             piece * 16);
    }
    for (uint32_t i = threadIdx.x; i < 2 * rows; i += WARPS * 32) {
        const uint32_t row = i % rows;
        const float *const from = i < rows ? p.acts.scale : p.acts.sum;
        dev_copy_async16(scales + (i / rows * ROWS + row) * 16,
                         from + (size_t)(row_begin + row) * (p.acts.stride / TD_CUDA_GROUP) +
                             first);
    }
}

/* One group's weights of a lane: fragments of a, and scales of its two outputs. */
template <bool BYTES>
DEV void load_weights(const uint8_t *group, uint32_t lane, uint32_t a[4], float scale[2],
                      float minimum[2])
{
    const uint32_t *const words = reinterpret_cast<const uint32_t *>(group);

    if (BYTES) {
        const uint16_t *const scales = reinterpret_cast<const uint16_t *>(group + 512);
        a[0] = words[lane];
        a[1] = words[32 + lane];
        a[2] = words[64 + lane];
        a[3] = words[96 + lane];
        scale[0] = dev_float_from_half(scales[lane / 4]);
        scale[1] = dev_float_from_half(scales[lane / 4 + 8]);
    } else {
        const uint32_t upper = words[lane];
        const uint32_t lower = words[32 + lane];
        const uint32_t pairs[2] = {words[64 + lane / 4], words[64 + lane / 4 + 8]};
        a[0] = upper & 0x0f0f0f0fu;
        a[1] = lower & 0x0f0f0f0fu;
        a[2] = upper >> 4 & 0x0f0f0f0fu;
        a[3] = lower >> 4 & 0x0f0f0f0fu;
        DEV_UNROLL
        for (int i = 0; i < 2; i++) {
            scale[i] = dev_float_from_half(static_cast<uint16_t>(pairs[i] & 0xffffu));
            minimum[i] = dev_float_from_half(static_cast<uint16_t>(pairs[i] >> 16));
        }
    }
}

template <bool BYTES, bool WIDE, uint32_t TILES, uint32_t WARPS, uint32_t STAGES>
DEV void product_quantised(const td_cuda_product_t &p)
{
    constexpr uint32_t group_bytes = BYTES ? TD_CUDA_BYTE_BYTES : TD_CUDA_NIBBLE_BYTES;
    constexpr uint32_t rows = TILES * TD_CUDA_ROW_TILE;
    constexpr uint32_t weights = WARPS * TD_CUDA_CHUNK * group_bytes;
    constexpr uint32_t planes = WIDE ? 2 : 1;
    constexpr uint32_t stage_bytes = weights + planes * rows * X_ROW_BYTES + 2 * rows * 16;
    const uint32_t lane = dev_lane();
    const uint32_t warp = threadIdx.x / 32;
    const uint32_t row_begin = blockIdx.y * rows;
    const place at = find_place<WARPS>(p, warp);
    const uint32_t groups = p.w[0].inputs / TD_CUDA_GROUP;
    const uint32_t chunks = (groups + TD_CUDA_CHUNK - 1) / TD_CUDA_CHUNK;
    float acc[TILES][4];
    DEV_SHARED(uint8_t, stages);

    DEV_UNROLL
    for (uint32_t t = 0; t < TILES; t++) {
        acc[t][0] = acc[t][1] = acc[t][2] = acc[t][3] = 0;
    }
    for (uint32_t c = 0; c + 1 < STAGES; c++) {
        if (c < chunks) {
            load_chunk<group_bytes, WIDE, rows, WARPS>(p, at, stages + c * stage_bytes, row_begin,
                                                       c, groups);
        }
        dev_copy_commit();
    }
    for (uint32_t c = 0; c < chunks; c++) {
        const uint8_t *const stage = stages + c % STAGES * stage_bytes;
        const uint32_t left = groups - c * TD_CUDA_CHUNK;
        /* Behind it all copies of this chunk are there, and all are done with the last one. */
        dev_copy_wait<STAGES - 2>();
        __syncthreads();
        if (c + STAGES - 1 < chunks) {
            load_chunk<group_bytes, WIDE, rows, WARPS>(
                p, at, stages + (c + STAGES - 1) % STAGES * stage_bytes, row_begin, c + STAGES - 1,
                groups);
        }
        dev_copy_commit(); /* also of nothing, so that counting groups counts chunks */
        for (uint32_t g = 0; at.there && g < (left < TD_CUDA_CHUNK ? left : TD_CUDA_CHUNK); g++) {
            uint32_t a[4];
            float scale[2];
            float minimum[2] = {0, 0};
            load_weights<BYTES>(stage + (warp * TD_CUDA_CHUNK + g) * group_bytes, lane, a, scale,
                                minimum);
            DEV_UNROLL
            for (uint32_t t = 0; t < TILES; t++) {
                const uint8_t *const x = stage + weights +
                                         (t * TD_CUDA_ROW_TILE + lane / 4) * X_ROW_BYTES +
                                         g * TD_CUDA_GROUP + lane % 4 * 4;
                const float *const scales =
                    reinterpret_cast<const float *>(stage + weights + planes * rows * X_ROW_BYTES) +
                    (t * TD_CUDA_ROW_TILE + lane % 4 * 2) * TD_CUDA_CHUNK + g;
                const float *const sums = scales + rows * TD_CUDA_CHUNK;
                uint32_t b[2] = {*reinterpret_cast<const uint32_t *>(x),
                                 *reinterpret_cast<const uint32_t *>(x + 16)};
                int32_t sum[4];
                dev_mma_s8<true>(sum, a, b);
                if (WIDE) {
                    int32_t low[4];
                    b[0] = *reinterpret_cast<const uint32_t *>(x + rows * X_ROW_BYTES);
                    b[1] = *reinterpret_cast<const uint32_t *>(x + rows * X_ROW_BYTES + 16);
                    dev_mma_s8<false>(low, a, b);
                    DEV_UNROLL
                    for (int i = 0; i < 4; i++) {
                        sum[i] = 256 * sum[i] + low[i];
                    }
                }
                DEV_UNROLL
                for (int i = 0; i < 4; i++) {
                    const uint32_t column = (i & 1) * TD_CUDA_CHUNK;
                    acc[t][i] =
                        fmaf(static_cast<float>(sum[i]), scale[i >> 1] * scales[column], acc[t][i]);
                    if (!BYTES) {
                        acc[t][i] = fmaf(minimum[i >> 1], sums[column], acc[t][i]);
                    }
                }
            }
        }
    }
    DEV_UNROLL
    for (uint32_t t = 0; t < TILES; t++) {
        DEV_UNROLL
        for (int i = 0; i < 4; i++) {
            const uint32_t row = row_begin + t * TD_CUDA_ROW_TILE + lane % 4 * 2 + (i & 1);
            const uint32_t output = at.pair * TD_CUDA_PAIR + lane / 4 + (i >> 1) * 8;
            if (at.there && row < p.rows && output < at.w->outputs) {
                at.y[(size_t)row * at.w->outputs + output] = acc[t][i];
            }
        }
    }
}

#define PRODUCT_QUANTISED(name, bytes, wide)                                                       \
    DEV_KERNEL __launch_bounds__(TD_CUDA_FEW_WARPS * 32, 1) name##_few(const td_cuda_product_t p)  \
    {                                                                                              \
        product_quantised<bytes, wide, 1, TD_CUDA_FEW_WARPS, 6>(p);                                \
    }                                                                                              \
    DEV_REGISTER(name##_few);                                                                      \
    DEV_KERNEL __launch_bounds__(TD_CUDA_MANY_WARPS * 32, 1)                                       \
        name##_many(const td_cuda_product_t p)                                                     \
    {                                                                                              \
        product_quantised<bytes, wide, TD_CUDA_ROW_TILES, TD_CUDA_MANY_WARPS, 2>(p);               \
    }                                                                                              \
    DEV_REGISTER(name##_many)

PRODUCT_QUANTISED(td_cuda_product_nibble8, false, false);
PRODUCT_QUANTISED(td_cuda_product_nibble16, false, true);
PRODUCT_QUANTISED(td_cuda_product_byte, true, true);

/* --- float weights: one chain over ascending k -------------------------------------------------
 */

template <uint32_t FORM> DEV float load_float(const uint8_t *at)
{
    if (FORM == TD_CUDA_F32) {
        return *reinterpret_cast<const float *>(at);
    }
    const uint16_t bits = *reinterpret_cast<const uint16_t *>(at);
    return FORM == TD_CUDA_F16 ? dev_float_from_half(bits)
                               : dev_float_from_bits(static_cast<uint32_t>(bits) << 16);
}

template <uint32_t WIDTH, uint32_t ROWS, uint32_t WARPS>
DEV void load_float_chunk(const td_cuda_product_t &p, const place &at, uint8_t *stage,
                          uint32_t row_begin, uint32_t first)
{
    const uint32_t inputs = p.w[0].inputs;
    const uint32_t count = inputs - first < FLOAT_CHUNK ? inputs - first : FLOAT_CHUNK;
    const uint32_t rows = p.rows - row_begin < ROWS ? p.rows - row_begin : ROWS;
    const uint32_t pieces = count / 4;

    if (at.there) {
        const uint8_t *const from =
            at.w->bytes + at.pair * at.w->pair_bytes + (size_t)first * TD_CUDA_PAIR * WIDTH;
        uint8_t *const to = stage + threadIdx.x / 32 * (FLOAT_CHUNK * TD_CUDA_PAIR * WIDTH);
        for (uint32_t i = dev_lane() * 16; i < count * TD_CUDA_PAIR * WIDTH; i += 32 * 16) {
            dev_copy_async16(to + i, from + i);
        }
    }
    for (uint32_t i = threadIdx.x; i < rows * pieces; i += WARPS * 32) {
        const uint32_t row = i / pieces;
        dev_copy_async16(stage + WARPS * FLOAT_CHUNK * TD_CUDA_PAIR * WIDTH +
                             row * FLOAT_CHUNK * 4 + i % pieces * 16,
                         p.f32 + (size_t)(row_begin + row) * p.f32_stride + first + i % pieces * 4);
    }
}

/* Half of a warp has the even rows of its 16 outputs, the other half the odd ones. */
template <uint32_t FORM, uint32_t TILES, uint32_t WARPS, uint32_t STAGES>
DEV void product_float(const td_cuda_product_t &p)
{
    constexpr uint32_t width = FORM == TD_CUDA_F32 ? 4 : 2;
    constexpr uint32_t rows = TILES * TD_CUDA_ROW_TILE;
    constexpr uint32_t weights = WARPS * FLOAT_CHUNK * TD_CUDA_PAIR * width;
    constexpr uint32_t stage_bytes = weights + rows * FLOAT_CHUNK * 4;
    const uint32_t warp = threadIdx.x / 32;
    const uint32_t output = dev_lane() % 16;
    const uint32_t odd = dev_lane() / 16;
    const uint32_t row_begin = blockIdx.y * rows;
    const place at = find_place<WARPS>(p, warp);
    const uint32_t inputs = p.w[0].inputs;
    const uint32_t chunks = (inputs + FLOAT_CHUNK - 1) / FLOAT_CHUNK;
    float acc[rows / 2];
    DEV_SHARED(uint8_t, stages);

    DEV_UNROLL
    for (uint32_t i = 0; i < rows / 2; i++) {
        acc[i] = 0;
    }
    for (uint32_t c = 0; c + 1 < STAGES; c++) {
        if (c < chunks) {
            load_float_chunk<width, rows, WARPS>(p, at, stages + c * stage_bytes, row_begin,
                                                 c * FLOAT_CHUNK);
        }
        dev_copy_commit();
    }
    for (uint32_t c = 0; c < chunks; c++) {
        const uint8_t *const stage = stages + c % STAGES * stage_bytes;
        const float *const x = reinterpret_cast<const float *>(stage + weights);
        const uint32_t left = inputs - c * FLOAT_CHUNK;
        /* Behind it all copies of this chunk are there, and all are done with the last one. */
        dev_copy_wait<STAGES - 2>();
        __syncthreads();
        if (c + STAGES - 1 < chunks) {
            load_float_chunk<width, rows, WARPS>(p, at,
                                                 stages + (c + STAGES - 1) % STAGES * stage_bytes,
                                                 row_begin, (c + STAGES - 1) * FLOAT_CHUNK);
        }
        dev_copy_commit();
        for (uint32_t k = 0; at.there && k < (left < FLOAT_CHUNK ? left : FLOAT_CHUNK); k++) {
            const float w = load_float<FORM>(
                stage + ((warp * FLOAT_CHUNK + k) * TD_CUDA_PAIR + output) * width);
            DEV_UNROLL
            for (uint32_t i = 0; i < rows / 2; i++) {
                acc[i] = fmaf(w, x[(2 * i + odd) * FLOAT_CHUNK + k], acc[i]);
            }
        }
    }
    DEV_UNROLL
    for (uint32_t i = 0; i < rows / 2; i++) {
        const uint32_t row = row_begin + 2 * i + odd;
        const uint32_t o = at.pair * TD_CUDA_PAIR + output;
        if (at.there && row < p.rows && o < at.w->outputs) {
            at.y[(size_t)row * at.w->outputs + o] = acc[i];
        }
    }
}

#define PRODUCT_FLOAT(name, form)                                                                  \
    DEV_KERNEL __launch_bounds__(TD_CUDA_FEW_WARPS * 32, 1) name##_few(const td_cuda_product_t p)  \
    {                                                                                              \
        product_float<form, 1, TD_CUDA_FEW_WARPS, 6>(p);                                           \
    }                                                                                              \
    DEV_REGISTER(name##_few);                                                                      \
    DEV_KERNEL __launch_bounds__(TD_CUDA_MANY_WARPS * 32, 1)                                       \
        name##_many(const td_cuda_product_t p)                                                     \
    {                                                                                              \
        product_float<form, TD_CUDA_ROW_TILES, TD_CUDA_MANY_WARPS, 2>(p);                          \
    }                                                                                              \
    DEV_REGISTER(name##_many)

PRODUCT_FLOAT(td_cuda_product_f32, TD_CUDA_F32);
PRODUCT_FLOAT(td_cuda_product_f16, TD_CUDA_F16);
PRODUCT_FLOAT(td_cuda_product_bf16, TD_CUDA_BF16);

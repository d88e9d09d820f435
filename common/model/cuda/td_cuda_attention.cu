/* Attention over paged KV, for few queries (decoding) and many (prompts): one text. A block has
 * some rows of one sequence and the query heads of one KV head, and goes through tiles of 32
 * absolute positions; spans of 512 are a softmax each, merged in ascending order, or written as
 * parts where several blocks share a row's spans. The order of every sum is the CPU's: a lane of a
 * warp is a token in the scores, so the eight chains of a score stay in one thread; a thread is an
 * element of the head in the outputs, where tokens are added one after another. */
#include "common/model/cuda/td_cuda_math.cuh"

#define CHAINS 8
#define CODEC_F16 0u
#define CODEC_F8 1u
#define CODEC_I8 2u

DEV float float_from_f8(uint32_t code)
{
    const uint32_t sign = (code & 0x80u) << 24;
    const uint32_t magnitude = code & 0x7fu;

    if (magnitude == 0x7f) {
        return dev_float_from_bits(sign | 0x7ff00000u);
    }
    if (magnitude < 8) {
        return dev_float_from_bits(
            sign | dev_bits_from_float(static_cast<float>(magnitude) * 0.001953125f));
    }
    return dev_float_from_bits(sign | ((magnitude << 20) + (120u << 23)));
}

DEV float float_from_f4(uint32_t code)
{
    const uint32_t magnitude = code & 7u;
    /* 0, 0.5, 1, 1.5, 2, 3, 4, 6: exponent and one bit of mantissa above the subnormal. */
    const float value = magnitude < 2 ? 0.5f * static_cast<float>(magnitude)
                                      : dev_float_from_bits((magnitude << 22) + (126u << 23));
    return (code & 8u) != 0 ? -value : value;
}

/* Eight numbers of a row, from element 8 * eighth on. */
DEV void load_eight(const td_cuda_kv_t &kv, const uint8_t *row, const uint8_t *scale_at,
                    uint32_t eighth, float out[8])
{
    if (kv.codec == CODEC_F16) {
        const uint4 words = *reinterpret_cast<const uint4 *>(row + eighth * 16);
        const uint32_t halves[4] = {words.x, words.y, words.z, words.w};
        DEV_UNROLL
        for (int i = 0; i < 4; i++) {
            out[2 * i] = dev_float_from_half(static_cast<uint16_t>(halves[i] & 0xffffu));
            out[2 * i + 1] = dev_float_from_half(static_cast<uint16_t>(halves[i] >> 16));
        }
        return;
    }
    const float scale = *reinterpret_cast<const float *>(scale_at);
    DEV_UNROLL
    for (int i = 0; i < 8; i++) {
        float value = 0;
        if (kv.codec == CODEC_F8) {
            value = float_from_f8(row[eighth * 8 + i]);
        } else if (kv.codec == CODEC_I8) {
            value = static_cast<float>(static_cast<int8_t>(row[eighth * 8 + i]));
        } else {
            value = float_from_f4(static_cast<uint32_t>(row[eighth * 4 + i / 2]) >> i % 2 * 4);
        }
        out[i] = value * scale;
    }
}

/* What a block works on, and its shared memory. */
struct work {
    td_cuda_item_t item;
    uint32_t kv_head;
    uint32_t last;    /* position of the last row */
    uint32_t queries; /* rows * group */
    float *keys;      /* [tile][head_dim + 4] */
    float *values;    /* [tile][head_dim] */
    float *scaled;    /* [query][head_dim] */
    float *weights;   /* [query][tile]; 0: not seen, which no weight of a seen token is */
    float *rescale;   /* [query] */
    float *maximum;   /* [query], of the span's part, once it is complete */
    float *sum;
    float *factor_total; /* [query]: what totals and parts are multiplied by in a merge */
    float *factor_part;
    float *total_sum; /* [query] */
};

template <int DIM, int QUERIES> DEV work begin_work(const td_cuda_attention_t &p, float *shared)
{
    work w;

    w.item = p.items[blockIdx.x];
    w.kv_head = blockIdx.y;
    w.last = w.item.position + w.item.rows - 1;
    w.queries = w.item.rows * p.group;
    w.keys = shared;
    w.values = w.keys + TD_CUDA_TILE * (DIM + 4);
    w.scaled = w.values + TD_CUDA_TILE * DIM;
    w.weights = w.scaled + QUERIES * DIM;
    w.rescale = w.weights + QUERIES * TD_CUDA_TILE;
    w.maximum = w.rescale + QUERIES;
    w.sum = w.maximum + QUERIES;
    w.factor_total = w.sum + QUERIES;
    w.factor_part = w.factor_total + QUERIES;
    w.total_sum = w.factor_part + QUERIES;
    return w;
}

/* Keys and values of the tile's tokens that some row sees: other tokens' blocks may be gone. */
template <int DIM, int THREADS>
DEV void load_tile(const td_cuda_attention_t &p, const work &w, uint32_t tile)
{
    const size_t layer = (size_t)p.layer * 2 * p.kv.half_bytes;

    for (uint32_t unit = threadIdx.x; unit < 2 * TD_CUDA_TILE * (DIM / 8); unit += THREADS) {
        const uint32_t eighth = unit % (DIM / 8);
        const uint32_t token = unit / (DIM / 8) % TD_CUDA_TILE;
        const bool is_v = unit / (DIM / 8) / TD_CUDA_TILE != 0;
        const uint32_t position = tile + token;
        float eight[8];
        if (mask_next(p.mask, w.item.position, w.last, position) != position) {
            continue;
        }
        const uint32_t block = p.tables[w.item.table + position / p.kv.block_tokens];
        const uint8_t *const half =
            p.kv.pool + block * p.kv.block_bytes + layer + (is_v ? p.kv.half_bytes : 0);
        const size_t place = (size_t)w.kv_head * p.kv.block_tokens + position % p.kv.block_tokens;
        load_eight(p.kv, half + place * p.kv.row_bytes, half + p.kv.values_bytes + place * 4,
                   eighth, eight);
        float *const to =
            is_v ? w.values + token * DIM + eighth * 8 : w.keys + token * (DIM + 4) + eighth * 8;
        reinterpret_cast<float4 *>(to)[0] = {eight[0], eight[1], eight[2], eight[3]};
        reinterpret_cast<float4 *>(to)[1] = {eight[4], eight[5], eight[6], eight[7]};
    }
}

/* A query's state, the same in all lanes of the warp that has it. */
struct softmax {
    float maximum;
    float sum;
};

/* Scores of the tile, a token in each lane, for every WARPS-th query from the warp's own on. */
template <int DIM, int OWN, int WARPS>
DEV void score_tile(const td_cuda_attention_t &p, const work &w, uint32_t tile, softmax state[OWN])
{
    const uint32_t lane = dev_lane();
    const uint32_t warp = threadIdx.x / 32;
    float chains[OWN][CHAINS];

    for (int d = 0; d < DIM; d += CHAINS) {
        const float4 *const k = reinterpret_cast<const float4 *>(w.keys + lane * (DIM + 4) + d);
        const float key[CHAINS] = {k[0].x, k[0].y, k[0].z, k[0].w, k[1].x, k[1].y, k[1].z, k[1].w};
        DEV_UNROLL
        for (int i = 0; i < OWN; i++) {
            if (warp + i * WARPS >= w.queries) {
                break;
            }
            const float4 *const q =
                reinterpret_cast<const float4 *>(w.scaled + (warp + i * WARPS) * DIM + d);
            const float query[CHAINS] = {q[0].x, q[0].y, q[0].z, q[0].w,
                                         q[1].x, q[1].y, q[1].z, q[1].w};
            DEV_UNROLL
            for (int c = 0; c < CHAINS; c++) {
                chains[i][c] = d == 0 ? query[c] * key[c] : fmaf(query[c], key[c], chains[i][c]);
            }
        }
    }
    DEV_UNROLL
    for (int i = 0; i < OWN; i++) {
        const uint32_t query = warp + i * WARPS;
        if (query >= w.queries) {
            break;
        }
        const float *const l = chains[i];
        const bool seen = mask_sees(p.mask, w.item.position + query / p.group, tile + lane);
        const float score = ((l[0] + l[1]) + (l[2] + l[3])) + ((l[4] + l[5]) + (l[6] + l[7]));
        const float highest = fmaxf(state[i].maximum, dev_warp_max(seen ? score : MASKED_SCORE));
        const float weight = seen ? exp_clamped(score - highest) : 0;
        const bool any = __ballot_sync(DEV_ALL_LANES, seen) != 0;
        const float rescale = any ? exp_clamped(state[i].maximum - highest) : 1.0f;
        float lanes = weight;
        float sum = 0;
        /* Lanes 0 to 7 have the sums of tokens of their remainder, in ascending order. */
        lanes += __shfl_sync(DEV_ALL_LANES, weight, lane + 8);
        lanes += __shfl_sync(DEV_ALL_LANES, weight, lane + 16);
        lanes += __shfl_sync(DEV_ALL_LANES, weight, lane + 24);
        DEV_UNROLL
        for (int c = 0; c < CHAINS; c++) {
            sum += __shfl_sync(DEV_ALL_LANES, lanes, c);
        }
        if (any) {
            state[i].sum = fmaf(state[i].sum, rescale, sum);
            state[i].maximum = highest;
        }
        w.weights[query * TD_CUDA_TILE + lane] = weight;
        if (lane == 0) {
            w.rescale[query] = rescale;
        }
    }
}

/* Which elements of which queries' outputs a thread has. */
template <int DIM, int QUERIES, int THREADS> struct outputs {
    static constexpr int elements = (DIM + THREADS - 1) / THREADS;  /* THREADS apart */
    static constexpr int lanes = DIM < THREADS ? THREADS / DIM : 1; /* queries at once */
    static constexpr int own = (QUERIES + lanes - 1) / lanes;       /* lanes apart */
    float acc[elements][own];
    float total[elements][own];
    uint32_t d;
    uint32_t first; /* query */
};

/* Adds the tile's values. Whole: every query sees every token. */
template <bool WHOLE, int DIM, int QUERIES, int THREADS>
DEV void add_values(const work &w, outputs<DIM, QUERIES, THREADS> &o)
{
    using out_t = outputs<DIM, QUERIES, THREADS>;

    DEV_UNROLL
    for (int i = 0; i < out_t::own; i++) {
        const uint32_t query = o.first + i * out_t::lanes;
        DEV_UNROLL
        for (int e = 0; query < w.queries && e < out_t::elements; e++) {
            o.acc[e][i] *= w.rescale[query];
        }
    }
    for (uint32_t t = 0; t < TD_CUDA_TILE; t += 4) {
        float value[4][out_t::elements];
        DEV_UNROLL
        for (uint32_t j = 0; j < 4; j++) {
            DEV_UNROLL
            for (int e = 0; e < out_t::elements; e++) {
                value[j][e] = w.values[(t + j) * DIM + o.d + e * THREADS];
            }
        }
        DEV_UNROLL
        for (int i = 0; i < out_t::own; i++) {
            const uint32_t query = o.first + i * out_t::lanes;
            if (query >= w.queries) {
                break;
            }
            const float4 four =
                *reinterpret_cast<const float4 *>(w.weights + query * TD_CUDA_TILE + t);
            const float weight[4] = {four.x, four.y, four.z, four.w};
            DEV_UNROLL
            for (uint32_t j = 0; j < 4; j++) {
                DEV_UNROLL
                for (int e = 0; (WHOLE || weight[j] != 0) && e < out_t::elements; e++) {
                    o.acc[e][i] = fmaf(weight[j], value[j][e], o.acc[e][i]);
                }
            }
        }
    }
}

/* The span's part of each query joins its total: td_cpu_spans.h, td_cpu_end_span(). The warp that
 * has a query's state works out the factors, then every thread applies them. */
template <int OWN, int WARPS>
DEV void end_states(const work &w, softmax state[OWN], softmax total[OWN])
{
    const uint32_t warp = threadIdx.x / 32;

    DEV_UNROLL
    for (int i = 0; i < OWN; i++) {
        const uint32_t query = warp + i * WARPS;
        if (query >= w.queries) {
            break;
        }
        const bool empty = state[i].sum == 0;
        const bool first = total[i].sum == 0;
        float a = 1;
        float b = 0;
        if (!empty && first) {
            total[i] = state[i];
            a = 0;
            b = 1;
        } else if (!empty) {
            const float highest =
                state[i].maximum > total[i].maximum ? state[i].maximum : total[i].maximum;
            a = exp_clamped(total[i].maximum - highest);
            b = exp_clamped(state[i].maximum - highest);
            total[i].sum = fmaf(total[i].sum, a, state[i].sum * b);
            total[i].maximum = highest;
        }
        if (dev_lane() == 0) {
            w.maximum[query] = state[i].maximum;
            w.sum[query] = state[i].sum;
            w.factor_total[query] = a; /* no exp is 0: that means the part is the first */
            w.factor_part[query] = b;  /* and here, that there is none */
            w.total_sum[query] = total[i].sum;
        }
    }
}

template <int DIM, int QUERIES, int THREADS>
DEV void end_outputs(const td_cuda_attention_t &p, const work &w, uint32_t span,
                     outputs<DIM, QUERIES, THREADS> &o)
{
    using out_t = outputs<DIM, QUERIES, THREADS>;

    DEV_UNROLL
    for (int i = 0; i < out_t::own; i++) {
        const uint32_t query = o.first + i * out_t::lanes;
        if (query >= w.queries) {
            break;
        }
        const uint32_t row = query / p.group;
        const uint32_t head = w.kv_head * p.group + query % p.group;
        const float a = w.factor_total[query];
        const float b = w.factor_part[query];
        float *const part =
            p.parts == nullptr
                ? nullptr
                : p.parts + ((size_t)(w.item.part + row * w.item.part_stride) * p.heads + head) *
                                (TD_CUDA_PART_ELEMENTS + DIM);
        if (part != nullptr && w.item.position + row < span) {
            continue; /* has no place for its part */
        }
        DEV_UNROLL
        for (int e = 0; e < out_t::elements; e++) {
            const uint32_t d = o.d + e * THREADS;
            if (part != nullptr) {
                part[TD_CUDA_PART_ELEMENTS + d] = o.acc[e][i];
            } else if (b != 0) {
                o.total[e][i] = a == 0 ? o.acc[e][i] : fmaf(o.total[e][i], a, o.acc[e][i] * b);
            }
        }
        if (part != nullptr && o.d == 0) {
            part[0] = w.maximum[query];
            part[1] = w.sum[query];
        }
    }
}

template <int DIM, int QUERIES, int THREADS>
DEV void write_outputs(const td_cuda_attention_t &p, const work &w,
                       const outputs<DIM, QUERIES, THREADS> &o)
{
    using out_t = outputs<DIM, QUERIES, THREADS>;

    DEV_UNROLL
    for (int i = 0; i < out_t::own; i++) {
        const uint32_t query = o.first + i * out_t::lanes;
        if (query >= w.queries) {
            break;
        }
        const uint32_t row = w.item.row + query / p.group;
        const uint32_t head = w.kv_head * p.group + query % p.group;
        const float inverse = 1.0f / w.total_sum[query];
        DEV_UNROLL
        for (int e = 0; e < out_t::elements; e++) {
            p.out[((size_t)row * p.heads + head) * DIM + o.d + e * THREADS] =
                o.total[e][i] * inverse;
        }
    }
}

template <int DIM, int QUERIES, int THREADS> DEV void attend(const td_cuda_attention_t &p)
{
    using out_t = outputs<DIM, QUERIES, THREADS>;
    constexpr int warps = THREADS / 32;
    constexpr int own = QUERIES / warps;
    DEV_SHARED(float, shared);
    const work w = begin_work<DIM, QUERIES>(p, shared);
    const uint32_t end = w.last + 1 < w.item.end ? w.last + 1 : w.item.end;
    const bool has_outputs = threadIdx.x < out_t::lanes * DIM;
    softmax state[own];
    softmax total[own];
    out_t o;

    o.d = threadIdx.x % DIM;
    o.first = threadIdx.x / DIM;
    DEV_UNROLL
    for (int i = 0; i < own; i++) {
        total[i] = {MASKED_SCORE, 0};
    }
    for (uint32_t i = threadIdx.x; i < w.queries * DIM; i += THREADS) {
        const uint32_t row = w.item.row + i / DIM / p.group;
        const uint32_t head = w.kv_head * p.group + i / DIM % p.group;
        w.scaled[i] = p.q[((size_t)row * p.heads + head) * DIM + i % DIM] * p.scale;
    }
    for (uint32_t span =
             mask_next_part(p.mask, w.item.position, w.last, w.item.begin, TD_CUDA_SPAN, end);
         span < end; span = mask_next_part(p.mask, w.item.position, w.last, span + TD_CUDA_SPAN,
                                           TD_CUDA_SPAN, end)) {
        const uint32_t span_end = span + TD_CUDA_SPAN < end ? span + TD_CUDA_SPAN : end;
        DEV_UNROLL
        for (int i = 0; i < own; i++) {
            state[i] = {MASKED_SCORE, 0};
        }
        DEV_UNROLL
        for (int i = 0; i < out_t::own; i++) {
            DEV_UNROLL
            for (int e = 0; e < out_t::elements; e++) {
                o.acc[e][i] = 0;
            }
        }
        for (uint32_t tile =
                 mask_next_part(p.mask, w.item.position, w.last, span, TD_CUDA_TILE, span_end);
             tile < span_end; tile = mask_next_part(p.mask, w.item.position, w.last,
                                                    tile + TD_CUDA_TILE, TD_CUDA_TILE, span_end)) {
            const bool whole =
                p.mask.kind == MASK_FULL && w.item.position >= tile + TD_CUDA_TILE - 1;
            load_tile<DIM, THREADS>(p, w, tile);
            __syncthreads();
            score_tile<DIM, own, warps>(p, w, tile, state);
            __syncthreads();
            if (has_outputs && whole) {
                add_values<true>(w, o);
            } else if (has_outputs) {
                add_values<false>(w, o);
            }
            __syncthreads(); /* the next tile takes the place of this one */
        }
        end_states<own, warps>(w, state, total);
        __syncthreads();
        if (has_outputs) {
            end_outputs(p, w, span, o);
        }
        __syncthreads(); /* the next span's factors take the place of these */
    }
    if (has_outputs && p.parts == nullptr) {
        write_outputs(p, w, o);
    }
}

#define ATTENTION(dim)                                                                             \
    DEV_KERNEL __launch_bounds__(TD_CUDA_FEW_THREADS, 1)                                           \
        td_cuda_attention_few_##dim(const td_cuda_attention_t p)                                   \
    {                                                                                              \
        attend<dim, TD_CUDA_FEW_QUERIES, TD_CUDA_FEW_THREADS>(p);                                  \
    }                                                                                              \
    DEV_REGISTER(td_cuda_attention_few_##dim);                                                     \
    DEV_KERNEL __launch_bounds__(TD_CUDA_MANY_THREADS, 1)                                          \
        td_cuda_attention_many_##dim(const td_cuda_attention_t p)                                  \
    {                                                                                              \
        attend<dim, TD_CUDA_MANY_QUERIES, TD_CUDA_MANY_THREADS>(p);                                \
    }                                                                                              \
    DEV_REGISTER(td_cuda_attention_many_##dim);
TD_CUDA_HEAD_DIMS(ATTENTION)

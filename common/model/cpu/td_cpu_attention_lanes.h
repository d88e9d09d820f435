/* td_cpu_attention_lanes.h - attention of many queries over KV tiles, a lane being a query: no sum
 * runs across lanes, a key or value is loaded once for several queries, and each number is computed
 * in the order of td_cpu_portable.c, whatever the vector's length.
 *
 * Included once by each file of vector kernels, which defines before: vec_t, vec_mask_t, VEC_LANES,
 * vec_load, vec_store, vec_set1, vec_mul, vec_add,
 * vec_sub, vec_fma, vec_max, vec_exp, vec_sees (of lanes' bits and a token: which lanes see it),
 * vec_keep (zero elsewhere), vec_select. Threads: any; the scratch belongs to one thread. */
#pragma once

#include "common/base/td_base.h"
#include "common/model/cpu/td_cpu_avx2.h"
#include "common/model/cpu/td_cpu_spans.h"

#define CHAINS 8u        /* over d mod 8, of a score */
#define LEVELS 3u        /* of the tree that adds them */
#define SCORE_VECTORS 3u /* with 4 tokens: 12 chains at once */
#define MIX_VECTORS 4u   /* of a value, for VEC_MIX_QUERIES queries at once */

/* Gathers runs of up to 16 tokens of which some are seen: blocks hold 16 or a multiple. What is
 * left out keeps old numbers, which are never used. Shape: out [tokens][head_dim]. */
static void load_tile(const td_cpu_attention_t *job, bool is_v, uint32_t tile, uint32_t tokens,
                      uint32_t seen, float *out)
{
    const uint32_t head_dim = job->kv->head_dim;

    for (uint32_t t = 0; t < tokens; t += 16) {
        if (!td_cpu_has_run(seen, t)) {
            continue;
        }
        const uint8_t *values = td_cpu_kv_at(job, is_v, tile + t);
        const uint8_t *scales = td_cpu_kv_scale_at(job, is_v, tile + t);
        const uint32_t count = TD_MIN(16u, tokens - t);
        float *to = out + (size_t)t * head_dim;
        switch (job->kv->codec) {
        case TD_KV_F16:
            load_run_f16(values, (size_t)count * head_dim, to);
            break;
        case TD_KV_F8_E4M3:
            load_run(values, scales, count, head_dim, to, TD_KV_F8_E4M3);
            break;
        case TD_KV_I8:
            load_run(values, scales, count, head_dim, to, TD_KV_I8);
            break;
        default:
            load_run(values, scales, count, head_dim, to, TD_KV_F4_E2M1);
            break;
        }
    }
}

/* Chains of up to 8 tokens and SCORE_VECTORS vectors of queries. */
typedef vec_t score_chains_t[8][SCORE_VECTORS];

/* One element of the head further. begins: the chains' first. */
ALWAYS_INLINE void score_step(const float *keys, uint32_t head_dim, const float *queries,
                              score_chains_t a, const bool begins, const uint32_t vectors,
                              const uint32_t tokens)
{
    vec_t q[SCORE_VECTORS];

    UNROLL(3)
    for (uint32_t v = 0; v < vectors; v++) {
        q[v] = vec_load(queries + v * VEC_LANES);
    }
    UNROLL(8)
    for (uint32_t i = 0; i < tokens; i++) {
        vec_t k = vec_set1(keys[(size_t)i * head_dim]);
        UNROLL(3)
        for (uint32_t v = 0; v < vectors; v++) {
            a[i][v] = begins ? vec_mul(q[v], k) : vec_fma(q[v], k, a[i][v]);
        }
    }
}

/* Scores of `tokens` tokens from t on for `vectors` vectors of queries from lane `first` on. Eight
 * chains one after another; sums that wait for their sister in the tree ((0+1)+(2+3))+((4+5)+(6+7))
 * are kept by level. */
ALWAYS_INLINE void score_block(const td_cpu_scratch_t *s, uint32_t lanes, uint32_t head_dim,
                               uint32_t first, uint32_t t, const uint32_t vectors,
                               const uint32_t tokens)
{
    const float *keys = s->keys + (size_t)t * head_dim;
    const float *queries = s->queries + first;
    score_chains_t waiting[LEVELS];
    score_chains_t a;

    UNROLL(8)
    for (uint32_t r = 0; r < CHAINS; r++) {
        score_step(keys + r, head_dim, queries + (size_t)r * lanes, a, true, vectors, tokens);
        for (size_t d = r + CHAINS; d < head_dim; d += CHAINS) {
            score_step(keys + d, head_dim, queries + d * lanes, a, false, vectors, tokens);
        }
        UNROLL(3)
        for (uint32_t level = 0; level < LEVELS; level++) {
            const uint32_t place = (r + 1) & ((2u << level) - 1); /* in a pair of this level */
            UNROLL(8)
            for (uint32_t i = 0; i < tokens; i++) {
                UNROLL(3)
                for (uint32_t v = 0; v < vectors; v++) {
                    if (place == 0) {
                        a[i][v] = vec_add(waiting[level][i][v], a[i][v]);
                    } else if (place == 1u << level) {
                        waiting[level][i][v] = a[i][v];
                    }
                }
            }
        }
    }
    UNROLL(8)
    for (uint32_t i = 0; i < tokens; i++) {
        UNROLL(3)
        for (uint32_t v = 0; v < vectors; v++) {
            vec_store(s->weights + (size_t)(t + i) * lanes + first + v * VEC_LANES, a[i][v]);
        }
    }
}

static __attribute__((noinline)) void score_tile_3(const td_cpu_scratch_t *s, uint32_t lanes,
                                                   uint32_t head_dim, uint32_t first,
                                                   uint32_t begin, uint32_t end)
{
    for (uint32_t t = begin; t < end; t += 4) {
        score_block(s, lanes, head_dim, first, t, 3, 4);
    }
}

static __attribute__((noinline)) void score_tile_2(const td_cpu_scratch_t *s, uint32_t lanes,
                                                   uint32_t head_dim, uint32_t first,
                                                   uint32_t begin, uint32_t end)
{
    for (uint32_t t = begin; t < end; t += 4) {
        score_block(s, lanes, head_dim, first, t, 2, 4);
    }
}

static __attribute__((noinline)) void score_tile_1(const td_cpu_scratch_t *s, uint32_t lanes,
                                                   uint32_t head_dim, uint32_t first,
                                                   uint32_t begin, uint32_t end)
{
    for (uint32_t t = begin; t < end; t += 8) {
        score_block(s, lanes, head_dim, first, t, 1, 8);
    }
}

/* Scores from the first to the last token that is seen, in eights; what nobody sees there is scored
 * from old keys, and never used. */
static void score_tile(const td_cpu_scratch_t *s, uint32_t lanes, uint32_t head_dim, uint32_t seen)
{
    const uint32_t begin = (uint32_t)__builtin_ctz(seen) / 8 * 8;
    const uint32_t end = 32 - (uint32_t)__builtin_clz(seen);
    uint32_t first = 0;

    for (; first + 3 * VEC_LANES <= lanes; first += 3 * VEC_LANES) {
        score_tile_3(s, lanes, head_dim, first, begin, end);
    }
    if (first + 2 * VEC_LANES <= lanes) {
        score_tile_2(s, lanes, head_dim, first, begin, end);
    } else if (first < lanes) {
        score_tile_1(s, lanes, head_dim, first, begin, end);
    }
}

/* Turns a vector of queries' scores into weights. partial: some query does not see every token. */
ALWAYS_INLINE void weigh_vector(const td_cpu_scratch_t *s, uint32_t lanes, uint32_t first,
                                uint32_t tokens, const bool partial)
{
    const vec_t masked = vec_set1(TD_CPU_MASKED_SCORE);
    const vec_t before = vec_load(s->maxima + first);
    float *weights = s->weights + first;
    vec_t maximum = before;
    vec_t rescale;
    vec_t total;
    vec_t sums[8];

    for (uint32_t t = 0; t < tokens; t++) {
        vec_t score = vec_load(weights + (size_t)t * lanes);
        if (partial) {
            score = vec_select(vec_sees(s->seen + first, t), score, masked);
        }
        maximum = vec_max(score, maximum);
    }
    UNROLL(8)
    for (uint32_t i = 0; i < 8; i++) {
        sums[i] = vec_set1(0);
    }
    for (uint32_t t = 0; t < tokens; t += 8) {
        UNROLL(8)
        for (uint32_t i = 0; i < 8; i++) {
            float *at = weights + (size_t)(t + i) * lanes;
            vec_t w = vec_exp(vec_sub(vec_load(at), maximum));
            if (partial) {
                w = vec_keep(vec_sees(s->seen + first, t + i), w); /* exactly zero */
            }
            sums[i] = vec_add(sums[i], w);
            vec_store(at, w);
        }
    }
    total = vec_add(vec_set1(0), sums[0]);
    UNROLL(8)
    for (uint32_t i = 1; i < 8; i++) {
        total = vec_add(total, sums[i]);
    }
    rescale = vec_exp(vec_sub(before, maximum));
    vec_store(s->sums + first, vec_fma(vec_load(s->sums + first), rescale, total));
    vec_store(s->maxima + first, maximum);
    vec_store(s->rescale + first, rescale);
}

static __attribute__((noinline)) void weigh_tile(const td_cpu_scratch_t *s, uint32_t lanes)
{
    for (uint32_t first = 0; first < lanes; first += VEC_LANES) {
        weigh_vector(s, lanes, first, TD_CPU_TILE_TOKENS, false);
    }
}

static __attribute__((noinline)) void weigh_part(const td_cpu_scratch_t *s, uint32_t lanes)
{
    for (uint32_t first = 0; first < lanes; first += VEC_LANES) {
        weigh_vector(s, lanes, first, TD_CPU_TILE_TOKENS, true);
    }
}

/* out = out * rescale + sum of weights * values over tokens [begin, end), for `queries` queries
 * from i on and `vectors` vectors of the head from d on. */
ALWAYS_INLINE void mix_block(const td_cpu_scratch_t *s, uint32_t lanes, uint32_t head_dim,
                             uint32_t i, uint32_t d, uint32_t begin, uint32_t end,
                             const uint32_t queries, const uint32_t vectors)
{
    const size_t stride = td_cpu_output_stride(head_dim);
    const float *weights = s->weights + i;
    float *out = s->outputs + i * stride + d;
    vec_t acc[VEC_MIX_QUERIES][MIX_VECTORS];

    UNROLL(8)
    for (uint32_t q = 0; q < queries; q++) {
        vec_t r = vec_set1(s->rescale[i + q]);
        UNROLL(4)
        for (uint32_t v = 0; v < vectors; v++) {
            acc[q][v] = vec_mul(vec_load(out + q * stride + v * VEC_LANES), r);
        }
    }
    for (uint32_t t = begin; t < end; t++) {
        const float *values = s->values + (size_t)t * head_dim + d;
        vec_t value[MIX_VECTORS];
        UNROLL(4)
        for (uint32_t v = 0; v < vectors; v++) {
            value[v] = vec_load(values + v * VEC_LANES);
        }
        UNROLL(8)
        for (uint32_t q = 0; q < queries; q++) {
            vec_t w = vec_set1(weights[(size_t)t * lanes + q]);
            UNROLL(4)
            for (uint32_t v = 0; v < vectors; v++) {
                acc[q][v] = vec_fma(w, value[v], acc[q][v]);
            }
        }
    }
    UNROLL(8)
    for (uint32_t q = 0; q < queries; q++) {
        UNROLL(4)
        for (uint32_t v = 0; v < vectors; v++) {
            vec_store(out + q * stride + v * VEC_LANES, acc[q][v]);
        }
    }
}

/* After a query's first tokens of a tile nothing is left to rescale. */
static void end_rescale(const td_cpu_scratch_t *s, uint32_t i, uint32_t queries)
{
    for (uint32_t q = i; q < i + queries; q++) {
        s->rescale[q] = 1.0f;
    }
}

static __attribute__((noinline)) void mix_many(const td_cpu_scratch_t *s, uint32_t lanes,
                                               uint32_t head_dim, uint32_t i, uint32_t begin,
                                               uint32_t end)
{
    uint32_t d = 0;
    for (; d + MIX_VECTORS * VEC_LANES <= head_dim; d += MIX_VECTORS * VEC_LANES) {
        mix_block(s, lanes, head_dim, i, d, begin, end, VEC_MIX_QUERIES, MIX_VECTORS);
    }
    for (; d < head_dim; d += VEC_LANES) {
        mix_block(s, lanes, head_dim, i, d, begin, end, VEC_MIX_QUERIES, 1);
    }
    end_rescale(s, i, VEC_MIX_QUERIES);
}

static __attribute__((noinline)) void mix_one(const td_cpu_scratch_t *s, uint32_t lanes,
                                              uint32_t head_dim, uint32_t i, uint32_t begin,
                                              uint32_t end)
{
    uint32_t d = 0;
    for (; d + MIX_VECTORS * VEC_LANES <= head_dim; d += MIX_VECTORS * VEC_LANES) {
        mix_block(s, lanes, head_dim, i, d, begin, end, 1, MIX_VECTORS);
    }
    for (; d < head_dim; d += VEC_LANES) {
        mix_block(s, lanes, head_dim, i, d, begin, end, 1, 1);
    }
    end_rescale(s, i, 1);
}

/* Some tokens for one query, in ascending order. */
static void mix_alone(const td_cpu_scratch_t *s, uint32_t lanes, uint32_t head_dim, uint32_t i,
                      uint32_t bits)
{
    while (bits != 0) {
        uint32_t begin = 0;
        uint32_t end = 0;
        td_cpu_take_run(&bits, &begin, &end);
        mix_one(s, lanes, head_dim, i, begin, end);
    }
}

/* What all queries of a block see is mixed for all of them together, what lies before and behind
 * for each alone; so is everything where it lies in between, as at the end of a stride. Masked
 * tokens are left out, not added as zero: a value there may be infinite. */
static void mix_queries(const td_cpu_scratch_t *s, uint32_t lanes, uint32_t head_dim, uint32_t i)
{
    uint32_t common = UINT32_MAX;
    uint32_t any = 0;
    uint32_t between = 0; /* from the first to the last common token */

    for (uint32_t q = i; q < i + VEC_MIX_QUERIES; q++) {
        common &= s->seen[q];
        any |= s->seen[q];
    }
    if (common != 0) {
        between = UINT32_MAX << __builtin_ctz(common) & UINT32_MAX >> __builtin_clz(common);
        common = (any & between) == common ? common : 0;
    }
    for (uint32_t q = i; common != any && q < i + VEC_MIX_QUERIES; q++) {
        const uint32_t before = common == 0 ? UINT32_MAX : (common & -common) - 1;
        mix_alone(s, lanes, head_dim, q, s->seen[q] & before);
    }
    for (uint32_t left = common; left != 0;) {
        uint32_t begin = 0;
        uint32_t end = 0;
        td_cpu_take_run(&left, &begin, &end);
        mix_many(s, lanes, head_dim, i, begin, end);
    }
    for (uint32_t q = i; common != 0 && common != any && q < i + VEC_MIX_QUERIES; q++) {
        const uint32_t behind = ~(UINT32_MAX >> __builtin_clz(common));
        mix_alone(s, lanes, head_dim, q, s->seen[q] & behind);
    }
}

/* whole: all queries see all of the tile. */
static void mix_tile(const td_cpu_scratch_t *s, uint32_t lanes, uint32_t head_dim, uint32_t queries,
                     bool whole)
{
    uint32_t i = 0;

    for (; i + VEC_MIX_QUERIES <= queries; i += VEC_MIX_QUERIES) {
        if (whole) {
            mix_many(s, lanes, head_dim, i, 0, TD_CPU_TILE_TOKENS);
        } else {
            mix_queries(s, lanes, head_dim, i);
        }
    }
    for (; i < queries; i++) {
        mix_alone(s, lanes, head_dim, i, whole ? UINT32_MAX : s->seen[i]);
    }
}

/* Fills in what each lane sees; lanes behind the last query are as that one. Answers whether all
 * see all of the tile. */
static bool see_tile(const td_cpu_attention_t *job, const td_cpu_scratch_t *s, uint32_t lanes,
                     const td_cpu_tile_view_t *view, uint32_t tile)
{
    uint32_t common = UINT32_MAX;
    uint32_t bits = 0;
    uint32_t lane = 0;

    if (view->whole) {
        return true; /* nobody asks */
    }
    for (uint32_t row = 0; row < job->rows; row++) {
        bits = td_cpu_row_bits(job, view, row, tile);
        common &= bits;
        for (uint32_t i = 0; i < job->group; i++) {
            s->seen[lane++] = bits;
        }
    }
    while (lane < lanes) {
        s->seen[lane++] = bits;
    }
    return common == UINT32_MAX;
}

static uint32_t lanes_of(const td_cpu_attention_t *job)
{
    return (job->rows * job->group + VEC_LANES - 1) / VEC_LANES * VEC_LANES;
}

static void begin_lanes(const td_cpu_attention_t *job, td_cpu_scratch_t *s)
{
    const uint32_t head_dim = job->kv->head_dim;
    const uint32_t queries = job->rows * job->group;
    const uint32_t lanes = lanes_of(job);

    for (uint32_t i = 0; i < lanes; i++) {
        const float *q = job->q + i / job->group * job->q_stride + i % job->group * head_dim;
        for (uint32_t d = 0; d < head_dim; d++) {
            s->queries[(size_t)d * lanes + i] = i < queries ? q[d] * job->scale : 0;
        }
    }
}

static void attend_lanes(const td_cpu_attention_t *job, td_cpu_scratch_t *s, uint32_t begin,
                         uint32_t end)
{
    const uint32_t head_dim = job->kv->head_dim;
    const uint32_t queries = job->rows * job->group;
    const uint32_t lanes = lanes_of(job);

    for (uint32_t tile = td_cpu_next_seen(job, begin, TD_CPU_TILE_TOKENS, end); tile < end;
         tile = td_cpu_next_seen(job, tile + TD_CPU_TILE_TOKENS, TD_CPU_TILE_TOKENS, end)) {
        const uint32_t tokens = TD_MIN(TD_CPU_TILE_TOKENS, end - tile);
        const td_cpu_tile_view_t view = td_cpu_view_tile(job, tile);
        const bool whole = see_tile(job, s, lanes, &view, tile);
        load_tile(job, false, tile, tokens, view.any, s->keys);
        load_tile(job, true, tile, tokens, view.any, s->values);
        score_tile(s, lanes, head_dim, view.any);
        if (whole) {
            weigh_tile(s, lanes);
        } else {
            weigh_part(s, lanes);
        }
        mix_tile(s, lanes, head_dim, queries, whole);
    }
}

static const td_cpu_span_ops_t lanes_ops = {begin_lanes, attend_lanes, td_cpu_avx2_merge_part,
                                            td_cpu_avx2_finish};

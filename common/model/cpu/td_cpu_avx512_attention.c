/* Attention for AVX-512. */
#if defined(__x86_64__)
#include "common/model/cpu/td_cpu_avx512.h"

#include "common/base/td_base.h"

/* Below, a lane is an element of the head. Measured: with heads that go together (FEW_HEADS) 12
 * queries take 25 % less time than as lanes, 36 take 10 % less, 48 as much. */
#define FEW_QUERIES 40u
#define FEW_QUERIES_APART 9u /* heads that do not: more than half a vector would be empty */
#define FEW_HEADS 3          /* of a row that share converted keys and values */
#define FEW_TOGETHER 6       /* two rows' heads, or so many of one */
#define FEW_TOKENS 8u        /* scored at once: four vectors of two */
#define FEW_MIX 4            /* vectors of a value */

/* --- attention of many queries ---------------------------------------------------------------- */

static void load_run_f16(const uint8_t *src, size_t count, float *out)
{
    size_t i = 0;

    for (; i + AVX512_LANES <= count; i += AVX512_LANES) {
        _mm512_storeu_ps(out + i, load_kv_wide(src + 2 * i, TD_KV_F16));
    }
    if (i < count) {
        _mm256_storeu_ps(out + i, load_f16(src + 2 * i));
    }
}

/* Rows with scales. */
ALWAYS_INLINE void load_run(const uint8_t *values, const uint8_t *scales, uint32_t tokens,
                            uint32_t head_dim, float *out, const td_kv_codec_t codec)
{
    const size_t row_bytes = (size_t)head_dim * td_kv_value_bits(codec) / 8;

    for (uint32_t t = 0; t < tokens; t++) {
        float scale = 0;
        uint32_t d = 0;
        memcpy(&scale, scales + (size_t)t * TD_KV_SCALE_BYTES, sizeof(scale));
        scale *= kv_unit(codec);
        for (; d + AVX512_LANES <= head_dim; d += AVX512_LANES) {
            const uint8_t *at = values + (size_t)d * td_kv_value_bits(codec) / 8;
            _mm512_storeu_ps(out + d,
                             _mm512_mul_ps(load_kv_wide(at, codec), _mm512_set1_ps(scale)));
        }
        if (d < head_dim) {
            const uint8_t *at = values + (size_t)d * td_kv_value_bits(codec) / 8;
            _mm256_storeu_ps(out + d, _mm256_mul_ps(load_kv(at, codec), _mm256_set1_ps(scale)));
        }
        values += row_bytes;
        out += head_dim;
    }
}

typedef __m512 vec_t;
typedef __mmask16 vec_mask_t;
#define VEC_LANES 16u
#define VEC_MIX_QUERIES 6u
#define vec_load _mm512_loadu_ps
#define vec_store _mm512_storeu_ps
#define vec_set1 _mm512_set1_ps
#define vec_mul _mm512_mul_ps
#define vec_add _mm512_add_ps
#define vec_sub _mm512_sub_ps
#define vec_fma _mm512_fmadd_ps
#define vec_max _mm512_max_ps
#define vec_exp avx512_exp
#define vec_keep _mm512_maskz_mov_ps

ALWAYS_INLINE vec_mask_t vec_sees(const uint32_t *seen, uint32_t token)
{
    return _mm512_test_epi32_mask(_mm512_loadu_si512(seen),
                                  _mm512_set1_epi32((int32_t)(1u << token)));
}

ALWAYS_INLINE vec_t vec_select(vec_mask_t mask, vec_t then, vec_t otherwise)
{
    return _mm512_mask_mov_ps(otherwise, mask, then);
}

#include "common/model/cpu/td_cpu_attention_lanes.h"

/* --- attention of few queries over f16 ----------------------------------------------------------
 * A lane is an element of the head. Keys and values are converted where they are used. */

/* Rows t and t+1 of a key tile, eight elements each: the eight chains of two tokens. */
ALWAYS_INLINE __m512 load_two_keys(const uint8_t *key, size_t row_bytes)
{
    __m128i first = _mm_loadu_si128((const __m128i *)(const void *)key);
    __m128i second = _mm_loadu_si128((const __m128i *)(const void *)(key + row_bytes));
    return _mm512_cvtph_ps(_mm256_inserti128_si256(_mm256_castsi128_si256(first), second, 1));
}

/* The trees ((0+1)+(2+3))+((4+5)+(6+7)) of eight tokens' chains, two tokens a vector. */
ALWAYS_INLINE __m256 add_chains(const __m512 a[4])
{
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    __m512 pairs[2];
    __m512 quads;
    __m512 halves[2];

    UNROLL(2)
    for (uint32_t i = 0; i < 2; i++) {
        pairs[i] = _mm512_add_ps(_mm512_shuffle_ps(a[2 * i], a[2 * i + 1], 0x88),
                                 _mm512_shuffle_ps(a[2 * i], a[2 * i + 1], 0xDD));
    }
    quads = _mm512_add_ps(_mm512_shuffle_ps(pairs[0], pairs[1], 0x88),
                          _mm512_shuffle_ps(pairs[0], pairs[1], 0xDD));
    /* 128-bit lanes of quads: low half of even tokens, high half, low half of odd ones, high half.
     */
    halves[0] = _mm512_shuffle_f32x4(quads, quads, 0x88);
    halves[1] = _mm512_shuffle_f32x4(quads, quads, 0xDD);
    return _mm256_permutevar8x32_ps(_mm512_castps512_ps256(_mm512_add_ps(halves[0], halves[1])),
                                    order);
}

/* The queries that go together: query j of them is `first` + j, behind FEW_HEADS of them `skip`
 * more, where the others are those of the next row. */
typedef struct few {
    uint32_t first;
    uint32_t skip;
} few_t;

ALWAYS_INLINE uint32_t few_query(few_t few, uint32_t j)
{
    return few.first + j + (j < FEW_HEADS ? 0 : few.skip);
}

/* Eight elements of the head further, for the chains of eight tokens. begins: the chains' first. */
ALWAYS_INLINE void score_few_step(const float *q, few_t few, uint32_t head_dim, const uint8_t *keys,
                                  __m512 a[FEW_TOGETHER][4], const bool begins,
                                  const uint32_t queries)
{
    const size_t row_bytes = (size_t)head_dim * 2;
    __m512 k[4];

    UNROLL(4)
    for (uint32_t p = 0; p < 4; p++) {
        k[p] = load_two_keys(keys + 2 * p * row_bytes, row_bytes);
    }
    UNROLL(6)
    for (uint32_t i = 0; i < queries; i++) {
        __m512 qi =
            _mm512_broadcast_f32x8(_mm256_loadu_ps(q + (size_t)few_query(few, i) * head_dim));
        UNROLL(4)
        for (uint32_t p = 0; p < 4; p++) {
            a[i][p] = begins ? _mm512_mul_ps(qi, k[p]) : _mm512_fmadd_ps(qi, k[p], a[i][p]);
        }
    }
}

/* Scores of eight tokens for `queries` queries. Shape: q [query][head_dim], scores
 * [query][TD_CPU_TILE_TOKENS]. */
ALWAYS_INLINE void score_few(const float *q, few_t few, uint32_t head_dim, const uint8_t *keys,
                             float (*scores)[TD_CPU_TILE_TOKENS], uint32_t t,
                             const uint32_t queries)
{
    __m512 a[FEW_TOGETHER][4];

    score_few_step(q, few, head_dim, keys, a, true, queries);
    for (size_t d = 8; d < head_dim; d += 8) {
        score_few_step(q + d, few, head_dim, keys + 2 * d, a, false, queries);
    }
    UNROLL(6)
    for (uint32_t i = 0; i < queries; i++) {
        _mm256_store_ps(scores[i] + t, add_chains(a[i]));
    }
}

/* Turns a query's scores into weights, zero for what it does not see; answers by how much to
 * rescale. */
ALWAYS_INLINE float weigh_few(td_cpu_scratch_t *s, uint32_t i, float *scores, uint32_t seen)
{
    const __m512 masked = _mm512_set1_ps(TD_CPU_MASKED_SCORE);
    const __mmask16 see[2] = {(__mmask16)(seen & 0xffffu), (__mmask16)(seen >> 16)};
    const __m512 score[2] = {_mm512_mask_loadu_ps(masked, see[0], scores),
                             _mm512_mask_loadu_ps(masked, see[1], scores + 16)};
    const float before = s->maxima[i];
    const float largest = _mm512_reduce_max_ps(_mm512_max_ps(score[0], score[1]));
    const float maximum = largest > before ? largest : before;
    const float rescale = _mm256_cvtss_f32(avx2_exp(_mm256_set1_ps(before - maximum)));
    __m256 sums = _mm256_setzero_ps();

    UNROLL(2)
    for (uint32_t h = 0; h < 2; h++) {
        __m512 w = _mm512_maskz_mov_ps(
            see[h], avx512_exp(_mm512_sub_ps(score[h], _mm512_set1_ps(maximum))));
        _mm512_store_ps(scores + 16 * h, w);
        sums = _mm256_add_ps(sums, _mm512_castps512_ps256(w));
        sums = _mm256_add_ps(sums, _mm512_extractf32x8_ps(w, 1));
    }
    s->maxima[i] = maximum;
    s->sums[i] = fmaf(s->sums[i], rescale, avx2_sum(sums));
    return rescale;
}

/* out = out * rescale + sum of weights * values of the tokens seen, over `vectors` vectors of the
 * head. */
ALWAYS_INLINE void mix_few(const float (*weights)[TD_CPU_TILE_TOKENS], const float *rescale,
                           const uint8_t *const values[2], size_t row_bytes, uint32_t seen,
                           float *out, few_t few, size_t stride, const uint32_t queries,
                           const uint32_t vectors, __mmask16 lanes)
{
    __m512 acc[FEW_TOGETHER][FEW_MIX];

    UNROLL(6)
    for (uint32_t i = 0; i < queries; i++) {
        UNROLL(4)
        for (uint32_t v = 0; v < vectors; v++) {
            acc[i][v] =
                _mm512_mul_ps(_mm512_loadu_ps(out + few_query(few, i) * stride + v * AVX512_LANES),
                              _mm512_set1_ps(rescale[i]));
        }
    }
    while (seen != 0) {
        uint32_t t = 0;
        uint32_t end = 0;
        td_cpu_take_run(&seen, &t, &end);
        for (; t < end; t++) {
            const uint8_t *row = values[t / 16] + t % 16 * row_bytes;
            __m512 value[FEW_MIX];
            UNROLL(4)
            for (uint32_t v = 0; v < vectors; v++) {
                value[v] = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(lanes, row + v * 32));
            }
            UNROLL(6)
            for (uint32_t i = 0; i < queries; i++) {
                __m512 w = _mm512_set1_ps(weights[i][t]);
                UNROLL(4)
                for (uint32_t v = 0; v < vectors; v++) {
                    acc[i][v] = _mm512_fmadd_ps(w, value[v], acc[i][v]);
                }
            }
        }
    }
    UNROLL(6)
    for (uint32_t i = 0; i < queries; i++) {
        UNROLL(4)
        for (uint32_t v = 0; v < vectors; v++) {
            _mm512_storeu_ps(out + few_query(few, i) * stride + v * AVX512_LANES, acc[i][v]);
        }
    }
}

/* A tile's keys or values: those of its first and second half, which may lie in different blocks;
 * of one that is not seen they are anything. */
typedef struct few_tile {
    const uint8_t *keys[2];
    const uint8_t *values[2];
} few_tile_t;

/* mix_few() over all of the head. */
ALWAYS_INLINE void mix_few_heads(td_cpu_scratch_t *s, uint32_t head_dim, few_t few,
                                 const few_tile_t *tile, const float (*weights)[TD_CPU_TILE_TOKENS],
                                 const float *rescale, uint32_t seen, const uint32_t queries)
{
    const size_t row_bytes = (size_t)head_dim * 2;
    const size_t stride = td_cpu_output_stride(head_dim);
    uint32_t d = 0;

    for (; d + FEW_MIX * AVX512_LANES <= head_dim; d += FEW_MIX * AVX512_LANES) {
        const uint8_t *const at[2] = {tile->values[0] + 2 * (size_t)d,
                                      tile->values[1] + 2 * (size_t)d};
        mix_few(weights, rescale, at, row_bytes, seen, s->outputs + d, few, stride, queries,
                FEW_MIX, 0xffff);
    }
    for (; d < head_dim; d += AVX512_LANES) {
        const uint8_t *const at[2] = {tile->values[0] + 2 * (size_t)d,
                                      tile->values[1] + 2 * (size_t)d};
        mix_few(weights, rescale, at, row_bytes, seen, s->outputs + d, few, stride, queries, 1,
                head_dim - d >= AVX512_LANES ? 0xffff : 0xff);
    }
}

/* True when tokens of `all` that are not in `common` are behind all of those that are: a sum over
 * `common` can then go on with them. */
ALWAYS_INLINE bool goes_on(uint32_t all, uint32_t common)
{
    const uint32_t rest = all & ~common;
    return (rest & -rest) > common || rest == 0;
}

/* One tile for `queries` queries. The first FEW_HEADS of them see seen[0], the others seen[1];
 * neither is empty. */
ALWAYS_INLINE void attend_few(td_cpu_scratch_t *s, uint32_t head_dim, few_t few,
                              const few_tile_t *tile, const uint32_t seen[2],
                              const uint32_t queries)
{
    static const float keep[FEW_HEADS] = {1, 1, 1};
    const uint32_t any = queries > FEW_HEADS ? seen[0] | seen[1] : seen[0];
    const uint32_t common = queries > FEW_HEADS ? seen[0] & seen[1] : seen[0];
    const uint32_t first = (uint32_t)__builtin_ctz(any) / FEW_TOKENS * FEW_TOKENS;
    const uint32_t end = 32 - (uint32_t)__builtin_clz(any);
    const size_t row_bytes = (size_t)head_dim * 2;
    const bool together = goes_on(seen[0], common) && goes_on(seen[1], common);
    _Alignas(64) float scores[FEW_TOGETHER][TD_CPU_TILE_TOKENS];
    float rescale[FEW_TOGETHER];

    for (uint32_t t = first; t < end; t += FEW_TOKENS) {
        score_few(s->queries, few, head_dim, tile->keys[t / 16] + t % 16 * row_bytes, scores, t,
                  queries);
    }
    UNROLL(6)
    for (uint32_t j = 0; j < queries; j++) {
        rescale[j] = weigh_few(s, few_query(few, j), scores[j], seen[j / FEW_HEADS]);
    }
    if (queries <= FEW_HEADS || together) {
        mix_few_heads(s, head_dim, few, tile, scores, rescale, common, queries);
    }
    for (uint32_t h = 0; queries > FEW_HEADS && h < 2; h++) { /* what only one of both rows sees */
        const few_t half = {.first = few_query(few, h * FEW_HEADS)};
        if (!together) {
            mix_few_heads(s, head_dim, half, tile, scores + h * FEW_HEADS, rescale + h * FEW_HEADS,
                          seen[h], FEW_HEADS);
        } else if (seen[h] != common) {
            mix_few_heads(s, head_dim, half, tile, scores + h * FEW_HEADS, keep, seen[h] & ~common,
                          FEW_HEADS);
        }
    }
}

static __attribute__((noinline)) void attend_few_6(td_cpu_scratch_t *s, uint32_t head_dim,
                                                   few_t few, const few_tile_t *tile,
                                                   const uint32_t seen[2])
{
    attend_few(s, head_dim, few, tile, seen, FEW_TOGETHER);
}

static __attribute__((noinline)) void attend_few_3(td_cpu_scratch_t *s, uint32_t head_dim,
                                                   uint32_t i, const few_tile_t *tile,
                                                   uint32_t seen)
{
    attend_few(s, head_dim, (few_t){.first = i}, tile, (const uint32_t[2]){seen, seen}, FEW_HEADS);
}

static __attribute__((noinline)) void attend_few_1(td_cpu_scratch_t *s, uint32_t head_dim,
                                                   uint32_t i, const few_tile_t *tile,
                                                   uint32_t seen)
{
    attend_few(s, head_dim, (few_t){.first = i}, tile, (const uint32_t[2]){seen, seen}, 1);
}

static void attend_row(td_cpu_scratch_t *s, const td_cpu_attention_t *job, uint32_t row,
                       const few_tile_t *tile, uint32_t seen)
{
    const uint32_t head_dim = job->kv->head_dim;
    const uint32_t end = (row + 1) * job->group;
    uint32_t i = row * job->group;

    for (; i + FEW_TOGETHER <= end; i += FEW_TOGETHER) {
        attend_few_6(s, head_dim, (few_t){.first = i}, tile, (const uint32_t[2]){seen, seen});
    }
    for (; i + FEW_HEADS <= end; i += FEW_HEADS) {
        attend_few_3(s, head_dim, i, tile, seen);
    }
    for (; i < end; i++) {
        attend_few_1(s, head_dim, i, tile, seen);
    }
}

/* Two rows: keys and values are converted once for both. */
static void attend_two_rows(td_cpu_scratch_t *s, const td_cpu_attention_t *job, uint32_t row,
                            const few_tile_t *tile, const uint32_t seen[2])
{
    const uint32_t head_dim = job->kv->head_dim;
    const few_t few = {.first = row * job->group, .skip = job->group - FEW_HEADS};
    uint32_t i = 0;

    for (; i + FEW_HEADS <= job->group; i += FEW_HEADS) {
        attend_few_6(s, head_dim, (few_t){.first = few.first + i, .skip = few.skip}, tile, seen);
    }
    for (; i < job->group; i++) {
        attend_few_1(s, head_dim, few.first + i, tile, seen[0]);
        attend_few_1(s, head_dim, few.first + job->group + i, tile, seen[1]);
    }
}

/* Keys or values of what is seen of a tile: blocks lie anywhere, which no hardware foresees. */
static void prefetch_tile(const td_cpu_attention_t *job, bool is_v, uint32_t tile, uint32_t end)
{
    const size_t row_bytes = (size_t)job->kv->head_dim * 2;

    for (uint32_t t = tile; t < end && t < tile + TD_CPU_TILE_TOKENS; t += 16) {
        if (td_cpu_next_seen(job, t, 16, end) != t) {
            continue;
        }
        const char *run = (const char *)td_cpu_kv_at(job, is_v, t);
        for (size_t at = 0; at < TD_MIN(16u, end - t) * row_bytes; at += TD_CACHE_LINE_BYTES) {
            _mm_prefetch(run + at, _MM_HINT_T0);
        }
    }
}

static void attend_few_rows(const td_cpu_attention_t *job, td_cpu_scratch_t *s, uint32_t begin,
                            uint32_t end)
{
    uint32_t tile = td_cpu_next_seen(job, begin, TD_CPU_TILE_TOKENS, end);

    prefetch_tile(job, false, tile, end);
    while (tile < end) {
        const uint32_t next =
            td_cpu_next_seen(job, tile + TD_CPU_TILE_TOKENS, TD_CPU_TILE_TOKENS, end);
        const td_cpu_tile_view_t view = td_cpu_view_tile(job, tile);
        /* Where a half is not seen it may have no block: then the other stands for it. */
        const uint32_t first = td_cpu_has_run(view.any, 0) ? tile : tile + 16;
        const uint32_t second = td_cpu_has_run(view.any, 16) ? tile + 16 : tile;
        const few_tile_t at = {
            .keys = {td_cpu_kv_at(job, false, first), td_cpu_kv_at(job, false, second)},
            .values = {td_cpu_kv_at(job, true, first), td_cpu_kv_at(job, true, second)}};
        prefetch_tile(job, true, tile, end);
        prefetch_tile(job, false, next, end);
        for (uint32_t row = 0; row < job->rows; row++) {
            const uint32_t seen[2] = {
                td_cpu_row_bits(job, &view, row, tile),
                row + 1 < job->rows ? td_cpu_row_bits(job, &view, row + 1, tile) : 0};
            if (job->group >= FEW_HEADS && seen[0] != 0 && seen[1] != 0) {
                attend_two_rows(s, job, row, &at, seen);
                row++;
            } else if (seen[0] != 0) {
                attend_row(s, job, row, &at, seen[0]);
            }
        }
        tile = next;
    }
}

void td_cpu_avx512_attention(const td_cpu_attention_t *job, td_cpu_scratch_t *s)
{
    static const td_cpu_span_ops_t few_ops = {td_cpu_avx2_begin_queries, attend_few_rows,
                                              td_cpu_avx2_merge_part, td_cpu_avx2_finish};
    const uint32_t queries = job->rows * job->group;

    if (job->kv->codec != TD_KV_F16 && queries < FEW_QUERIES_APART) {
        td_cpu_avx2_attention(job, s); /* converts a tile once; its vectors are fuller */
    } else if (job->kv->codec == TD_KV_F16 &&
               queries < (job->group % FEW_HEADS == 0 ? FEW_QUERIES : FEW_QUERIES_APART)) {
        td_cpu_attend_spans(&few_ops, job, s);
    } else {
        td_cpu_attend_spans(&lanes_ops, job, s);
    }
}
#else
typedef int td_cpu_avx512_attention_empty_t; /* a translation unit needs a declaration */
#endif

/* What works on single rows, and attention, for AVX2 + FMA + F16C. */
#if defined(__x86_64__)
#include "common/model/cpu/td_cpu_avx2.h"

#include "common/base/td_base.h"

#define LANES 8u
#define FEW_QUERIES 6u    /* below, most lanes of a vector of queries would be empty */
#define FAST_HEAD_DIM 64u /* gets a copy of the attention kernel with constant trip counts */

ALWAYS_INLINE float sum_lanes(__m256 v)
{
    float lanes[LANES];
    float sum = 0;

    _mm256_storeu_ps(lanes, v);
    for (uint32_t i = 0; i < LANES; i++) {
        sum += lanes[i];
    }
    return sum;
}

ALWAYS_INLINE float max_lanes(__m256 v)
{
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    m = _mm_max_ss(m, _mm_movehdup_ps(m));
    return _mm_cvtss_f32(m);
}

ALWAYS_INLINE int32_t sum_lanes_i(__m256i v)
{
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4E));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0xB1));
    return _mm_cvtsi128_si32(s);
}

ALWAYS_INLINE __m256 exp_clamped(__m256 x)
{
    __m256 power;
    __m256 whole;
    __m256 rest;
    __m256 poly = _mm256_set1_ps(TD_CPU_EXP_C6);
    __m256i exponent;

    x = _mm256_max_ps(x, _mm256_set1_ps(TD_CPU_EXP_MIN));
    x = _mm256_min_ps(x, _mm256_set1_ps(TD_CPU_EXP_MAX));
    power = _mm256_mul_ps(x, _mm256_set1_ps(TD_CPU_LOG2_E));
    whole = _mm256_round_ps(power, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    rest = _mm256_sub_ps(power, whole);
    poly = _mm256_fmadd_ps(poly, rest, _mm256_set1_ps(TD_CPU_EXP_C5));
    poly = _mm256_fmadd_ps(poly, rest, _mm256_set1_ps(TD_CPU_EXP_C4));
    poly = _mm256_fmadd_ps(poly, rest, _mm256_set1_ps(TD_CPU_EXP_C3));
    poly = _mm256_fmadd_ps(poly, rest, _mm256_set1_ps(TD_CPU_EXP_C2));
    poly = _mm256_fmadd_ps(poly, rest, _mm256_set1_ps(TD_CPU_EXP_C1));
    poly = _mm256_fmadd_ps(poly, rest, _mm256_set1_ps(1.0f));
    exponent = _mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127));
    return _mm256_mul_ps(poly, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}

void td_cpu_avx2_rms_norm(const float *x, const float *weight, uint32_t dim, float eps, float *out)
{
    __m256 squares = _mm256_setzero_ps();
    __m256 inverse;

    for (uint32_t i = 0; i < dim; i += LANES) {
        __m256 v = _mm256_loadu_ps(x + i);
        squares = _mm256_fmadd_ps(v, v, squares);
    }
    inverse = _mm256_set1_ps(1.0f / sqrtf(sum_lanes(squares) / (float)dim + eps));
    for (uint32_t i = 0; i < dim; i += LANES) {
        __m256 v = _mm256_mul_ps(_mm256_loadu_ps(x + i), inverse);
        _mm256_storeu_ps(out + i, _mm256_mul_ps(v, _mm256_loadu_ps(weight + i)));
    }
}

/* Integers of a group as two vectors of 16 in order; answers its scale and sum. */
ALWAYS_INLINE void quantise_group(const float *x, int limit, __m256i out[2], float *scale,
                                  float *sum)
{
    const __m256 sign = _mm256_set1_ps(-0.0f);
    __m256 v[4];
    __m256i q[4];
    __m256 largest = _mm256_setzero_ps();
    __m256i total = _mm256_setzero_si256();
    __m256 inverse = _mm256_setzero_ps();
    float magnitude = 0;

    UNROLL(4)
    for (uint32_t i = 0; i < 4; i++) {
        v[i] = _mm256_loadu_ps(x + LANES * i);
        largest = _mm256_max_ps(largest, _mm256_andnot_ps(sign, v[i]));
    }
    magnitude = max_lanes(largest);
    *scale = 0;
    if (magnitude > TD_CPU_TINY) {
        inverse = _mm256_set1_ps((float)limit / magnitude);
        *scale = magnitude / (float)limit;
    }
    UNROLL(4)
    for (uint32_t i = 0; i < 4; i++) {
        q[i] = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], inverse));
        total = _mm256_add_epi32(total, q[i]);
    }
    out[0] = _mm256_permute4x64_epi64(_mm256_packs_epi32(q[0], q[1]), 0xD8);
    out[1] = _mm256_permute4x64_epi64(_mm256_packs_epi32(q[2], q[3]), 0xD8);
    *sum = *scale * (float)sum_lanes_i(total);
}

void td_cpu_avx2_quantise8(const float *x, uint32_t dim, int8_t *q, float *scale, float *sum)
{
    for (uint32_t g = 0; g < dim / TD_CPU_GROUP; g++) {
        __m256i wide[2];
        quantise_group(x + g * TD_CPU_GROUP, TD_CPU_INT8_MAX, wide, scale + g, sum + g);
        __m256i bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(wide[0], wide[1]), 0xD8);
        _mm256_storeu_si256((__m256i *)(void *)(q + g * TD_CPU_GROUP), bytes);
    }
}

void td_cpu_avx2_quantise16(const float *x, uint32_t dim, int limit, int16_t *q, float *scale,
                            float *sum)
{
    for (uint32_t g = 0; g < dim / TD_CPU_GROUP; g++) {
        __m256i wide[2];
        quantise_group(x + g * TD_CPU_GROUP, limit, wide, scale + g, sum + g);
        _mm256_storeu_si256((__m256i *)(void *)(q + g * TD_CPU_GROUP), wide[0]);
        _mm256_storeu_si256((__m256i *)(void *)(q + g * TD_CPU_GROUP + 16), wide[1]);
    }
}

void td_cpu_avx2_add(float *x, const float *y, uint32_t n)
{
    for (uint32_t i = 0; i < n; i += LANES) {
        _mm256_storeu_ps(x + i, _mm256_add_ps(_mm256_loadu_ps(x + i), _mm256_loadu_ps(y + i)));
    }
}

static void swiglu(float *gate, const float *up, uint32_t n)
{
    for (uint32_t i = 0; i < n; i += LANES) {
        __m256 g = _mm256_loadu_ps(gate + i);
        __m256 e = exp_clamped(_mm256_sub_ps(_mm256_setzero_ps(), g));
        __m256 silu = _mm256_div_ps(g, _mm256_add_ps(_mm256_set1_ps(1.0f), e));
        _mm256_storeu_ps(gate + i, _mm256_mul_ps(silu, _mm256_loadu_ps(up + i)));
    }
}

void td_cpu_avx2_rotate(float *head, const float *table, uint32_t n)
{
    const __m256 even_sign = _mm256_setr_ps(-0.0f, 0, -0.0f, 0, -0.0f, 0, -0.0f, 0);

    for (uint32_t i = 0; i < n; i += LANES) {
        __m256 x = _mm256_loadu_ps(head + i);
        __m256 t = _mm256_loadu_ps(table + i);
        __m256 cosine = _mm256_moveldup_ps(t);
        __m256 sine = _mm256_xor_ps(_mm256_movehdup_ps(t), even_sign);
        __m256 other = _mm256_permute_ps(x, 0xB1); /* the other of each pair */
        _mm256_storeu_ps(head + i, _mm256_fmadd_ps(other, sine, _mm256_mul_ps(x, cosine)));
    }
}

void td_cpu_avx2_to_f16(const float *src, uint8_t *dst, uint32_t n)
{
    for (uint32_t i = 0; i < n; i += LANES) {
        __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(src + i),
                                       _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        _mm_storeu_si128((__m128i *)(void *)(dst + (size_t)i * 2), half);
    }
}

/* --- attention of many queries ---------------------------------------------------------------- */

typedef __m256 vec_t;
typedef __m256 vec_mask_t;
#define VEC_LANES 8u
#define VEC_MIX_QUERIES 3u
#define vec_load _mm256_loadu_ps
#define vec_store _mm256_storeu_ps
#define vec_set1 _mm256_set1_ps
#define vec_mul _mm256_mul_ps
#define vec_add _mm256_add_ps
#define vec_sub _mm256_sub_ps
#define vec_fma _mm256_fmadd_ps
#define vec_max _mm256_max_ps
#define vec_exp exp_clamped

ALWAYS_INLINE vec_mask_t vec_above(const int32_t *reach, uint32_t token)
{
    return _mm256_castsi256_ps(
        _mm256_cmpgt_epi32(_mm256_loadu_si256((const __m256i *)(const void *)reach),
                           _mm256_set1_epi32((int32_t)token)));
}

ALWAYS_INLINE vec_t vec_keep(vec_mask_t mask, vec_t value)
{
    return _mm256_and_ps(mask, value);
}

ALWAYS_INLINE vec_t vec_select(vec_mask_t mask, vec_t then, vec_t otherwise)
{
    return _mm256_blendv_ps(otherwise, then, mask);
}

#include "common/model/cpu/td_cpu_attention_lanes.h"

/* --- attention of few queries: a lane is an element of the head ------------------------------- */

/* Gathers runs of up to 16 tokens: blocks hold 16 or a multiple. */
void td_cpu_avx2_load_tile(const td_cpu_attention_t *job, bool is_v, uint32_t tile, uint32_t tokens,
                           float *out)
{
    size_t head_dim = job->kv->head_dim;

    for (uint32_t t = 0; t < tokens; t += 16) {
        const uint8_t *src = td_cpu_kv_at(job, is_v, tile + t);
        size_t count = TD_MIN(16u, tokens - t) * head_dim;
        for (size_t i = 0; i < count; i += LANES) {
            _mm256_store_ps(out + t * head_dim + i, load_f16(src + 2 * i));
        }
    }
}

/* Scores of eight tokens: a chain over d in each lane, lanes added as a tree. */
ALWAYS_INLINE __m256 score8(const float *q, const float *keys, const uint32_t head_dim)
{
    __m256 a[8];

    UNROLL(8)
    for (uint32_t t = 0; t < 8; t++) {
        const float *k = keys + t * head_dim;
        __m256 chain = _mm256_mul_ps(_mm256_load_ps(q), _mm256_load_ps(k));
        UNROLL(8)
        for (uint32_t d = LANES; d < head_dim; d += LANES) {
            chain = _mm256_fmadd_ps(_mm256_load_ps(q + d), _mm256_load_ps(k + d), chain);
        }
        a[t] = chain;
    }
    __m256 b0 = _mm256_hadd_ps(a[0], a[1]);
    __m256 b1 = _mm256_hadd_ps(a[2], a[3]);
    __m256 b2 = _mm256_hadd_ps(a[4], a[5]);
    __m256 b3 = _mm256_hadd_ps(a[6], a[7]);
    __m256 c0 = _mm256_hadd_ps(b0, b1);
    __m256 c1 = _mm256_hadd_ps(b2, b3);
    return _mm256_add_ps(_mm256_permute2f128_ps(c0, c1, 0x20),
                         _mm256_permute2f128_ps(c0, c1, 0x31));
}

/* out = out * rescale + sum of weights * values, for up to 64 elements of the head at a time. */
ALWAYS_INLINE void mix_values(const float *weight, const float *values, uint32_t visible,
                              float rescale, size_t head_dim, const uint32_t vectors, float *out)
{
    __m256 acc[8];
    __m256 r = _mm256_set1_ps(rescale);

    UNROLL(8)
    for (uint32_t d = 0; d < vectors; d++) {
        acc[d] = _mm256_mul_ps(_mm256_load_ps(out + LANES * d), r);
    }
    for (uint32_t t = 0; t < visible; t++) {
        __m256 w = _mm256_broadcast_ss(weight + t);
        UNROLL(8)
        for (uint32_t d = 0; d < vectors; d++) {
            acc[d] = _mm256_fmadd_ps(w, _mm256_load_ps(values + t * head_dim + LANES * d), acc[d]);
        }
    }
    UNROLL(8)
    for (uint32_t d = 0; d < vectors; d++) {
        _mm256_store_ps(out + LANES * d, acc[d]);
    }
}

/* Adds `visible` tokens of the tile in the scratch to query i. */
ALWAYS_INLINE void attend_tile(td_cpu_scratch_t *s, uint32_t i, const uint32_t head_dim,
                               uint32_t visible)
{
    _Alignas(32) float weight[TD_CPU_TILE_TOKENS];
    const float *q = s->queries + (size_t)i * head_dim;
    float *out = s->outputs + (size_t)i * head_dim;
    const __m256 masked = _mm256_set1_ps(TD_CPU_MASKED_SCORE);
    __m256 largest = masked;
    __m256 sums = _mm256_setzero_ps();
    float maximum = 0;
    float rescale = 0;
    uint32_t d = 0;

    for (uint32_t t = 0; t < visible; t += LANES) {
        __m256 mask = _mm256_castsi256_ps(lane_mask(visible - t));
        __m256 scores = score8(q, s->keys + (size_t)t * head_dim, head_dim);
        scores = _mm256_blendv_ps(masked, scores, mask);
        largest = _mm256_max_ps(scores, largest);
        _mm256_store_ps(weight + t, scores);
    }
    maximum = max_lanes(largest);
    maximum = maximum > s->maxima[i] ? maximum : s->maxima[i];
    rescale = _mm256_cvtss_f32(exp_clamped(_mm256_set1_ps(s->maxima[i] - maximum)));
    for (uint32_t t = 0; t < visible; t += LANES) {
        __m256 mask = _mm256_castsi256_ps(lane_mask(visible - t));
        __m256 w = exp_clamped(_mm256_sub_ps(_mm256_load_ps(weight + t), _mm256_set1_ps(maximum)));
        w = _mm256_and_ps(w, mask); /* exactly zero where masked */
        sums = _mm256_add_ps(sums, w);
        _mm256_store_ps(weight + t, w);
    }
    s->sums[i] = fmaf(s->sums[i], rescale, sum_lanes(sums));
    s->maxima[i] = maximum;
    for (; d + 64 <= head_dim; d += 64) {
        mix_values(weight, s->values + d, visible, rescale, head_dim, 8, out + d);
    }
    for (; d < head_dim; d += LANES) {
        mix_values(weight, s->values + d, visible, rescale, head_dim, 1, out + d);
    }
}

ALWAYS_INLINE void attention_tiles(const td_cpu_attention_t *job, td_cpu_scratch_t *s,
                                   const uint32_t head_dim)
{
    uint32_t queries = job->rows * job->group;
    uint32_t end = job->position + job->rows;

    for (uint32_t tile = 0; tile < end; tile += TD_CPU_TILE_TOKENS) {
        uint32_t tokens = TD_MIN(TD_CPU_TILE_TOKENS, end - tile);
        td_cpu_avx2_load_tile(job, false, tile, tokens, s->keys);
        td_cpu_avx2_load_tile(job, true, tile, tokens, s->values);
        for (uint32_t i = 0; i < queries; i++) {
            uint32_t position = job->position + i / job->group;
            if (position >= tile) {
                attend_tile(s, i, head_dim, TD_MIN(position + 1 - tile, tokens));
            }
        }
    }
}

static __attribute__((noinline)) void attention_tiles_any(const td_cpu_attention_t *job,
                                                          td_cpu_scratch_t *s)
{
    attention_tiles(job, s, job->kv->head_dim);
}

static __attribute__((noinline)) void attention_tiles_64(const td_cpu_attention_t *job,
                                                         td_cpu_scratch_t *s)
{
    attention_tiles(job, s, FAST_HEAD_DIM);
}

void td_cpu_avx2_attention(const td_cpu_attention_t *job, td_cpu_scratch_t *s)
{
    uint32_t head_dim = job->kv->head_dim;
    uint32_t queries = job->rows * job->group;

    if (queries >= FEW_QUERIES) {
        attention_lanes(job, s);
        return;
    }
    for (uint32_t i = 0; i < queries; i++) {
        const float *q = job->q + i / job->group * job->q_stride + i % job->group * head_dim;
        float *scaled = s->queries + (size_t)i * head_dim;
        s->maxima[i] = TD_CPU_MASKED_SCORE;
        s->sums[i] = 0;
        for (uint32_t d = 0; d < head_dim; d += LANES) {
            _mm256_store_ps(scaled + d,
                            _mm256_mul_ps(_mm256_loadu_ps(q + d), _mm256_set1_ps(job->scale)));
            _mm256_store_ps(s->outputs + (size_t)i * head_dim + d, _mm256_setzero_ps());
        }
    }
    if (head_dim == FAST_HEAD_DIM) {
        attention_tiles_64(job, s);
    } else {
        attention_tiles_any(job, s);
    }
    for (uint32_t i = 0; i < queries; i++) {
        float *out = job->out + i / job->group * job->q_stride + i % job->group * head_dim;
        __m256 inverse = _mm256_set1_ps(1.0f / s->sums[i]);
        for (uint32_t d = 0; d < head_dim; d += LANES) {
            __m256 sum = _mm256_load_ps(s->outputs + (size_t)i * head_dim + d);
            _mm256_storeu_ps(out + d, _mm256_mul_ps(sum, inverse));
        }
    }
}

const td_cpu_ops_t td_cpu_avx2_ops = {
    .name = "avx2",
    .product = td_cpu_avx2_product,
    .rms_norm = td_cpu_avx2_rms_norm,
    .quantise8 = td_cpu_avx2_quantise8,
    .quantise16 = td_cpu_avx2_quantise16,
    .add = td_cpu_avx2_add,
    .swiglu = swiglu,
    .rotate = td_cpu_avx2_rotate,
    .to_f16 = td_cpu_avx2_to_f16,
    .attention = td_cpu_avx2_attention,
};
#else
typedef int td_cpu_avx2_rows_empty_t; /* a translation unit needs a declaration */
#endif

/* Attention for AVX2 + FMA + F16C. */
#if defined(__x86_64__)
#include "common/model/cpu/td_cpu_avx2.h"

#include "common/base/td_base.h"

#define FEW_QUERIES 6u    /* below, most lanes of a vector of queries would be empty */
#define FAST_HEAD_DIM 64u /* gets a copy of the attention kernel with constant trip counts */

/* --- attention of many queries ---------------------------------------------------------------- */

static void load_run_f16(const uint8_t *src, size_t count, float *out)
{
    for (size_t i = 0; i < count; i += AVX2_LANES) {
        _mm256_store_ps(out + i, load_f16(src + 2 * i));
    }
}

/* Rows with scales. */
ALWAYS_INLINE void load_run(const uint8_t *values, const uint8_t *scales, uint32_t tokens,
                            uint32_t head_dim, float *out, const td_kv_codec_t codec)
{
    for (uint32_t t = 0; t < tokens; t++) {
        float value = 0;
        memcpy(&value, scales + (size_t)t * TD_KV_SCALE_BYTES, sizeof(value));
        const __m256 scale = _mm256_set1_ps(value * kv_unit(codec));
        for (uint32_t d = 0; d < head_dim; d += AVX2_LANES) {
            _mm256_store_ps(out + d, _mm256_mul_ps(load_kv(values, codec), scale));
            values += AVX2_LANES * td_kv_value_bits(codec) / 8;
        }
        out += head_dim;
    }
}

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
#define vec_exp avx2_exp

ALWAYS_INLINE vec_mask_t vec_sees(const uint32_t *seen, uint32_t token)
{
    const __m256i bit = _mm256_set1_epi32((int32_t)(1u << token));
    const __m256i bits = _mm256_loadu_si256((const __m256i *)(const void *)seen);
    return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(bits, bit), bit));
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

/* Scores of eight tokens: a chain over d in each lane, lanes added as a tree. */
ALWAYS_INLINE __m256 score8(const float *q, const float *keys, const uint32_t head_dim)
{
    __m256 a[8];

    UNROLL(8)
    for (uint32_t t = 0; t < 8; t++) {
        const float *k = keys + t * head_dim;
        __m256 chain = _mm256_mul_ps(_mm256_load_ps(q), _mm256_load_ps(k));
        UNROLL(8)
        for (uint32_t d = AVX2_LANES; d < head_dim; d += AVX2_LANES) {
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
        acc[d] = _mm256_mul_ps(_mm256_load_ps(out + AVX2_LANES * d), r);
    }
    for (uint32_t t = 0; t < visible; t++) {
        __m256 w = _mm256_broadcast_ss(weight + t);
        UNROLL(8)
        for (uint32_t d = 0; d < vectors; d++) {
            acc[d] =
                _mm256_fmadd_ps(w, _mm256_load_ps(values + t * head_dim + AVX2_LANES * d), acc[d]);
        }
    }
    UNROLL(8)
    for (uint32_t d = 0; d < vectors; d++) {
        _mm256_store_ps(out + AVX2_LANES * d, acc[d]);
    }
}

/* Of eight tokens, those whose bits are set. */
ALWAYS_INLINE __m256 token_mask(uint32_t bits)
{
    const __m256i each = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i all = _mm256_set1_epi32((int32_t)bits);
    return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(all, each), each));
}

/* As mix_values(), for all of a head. */
ALWAYS_INLINE void mix_run(const float *weight, const float *values, uint32_t count, float rescale,
                           const uint32_t head_dim, float *out)
{
    uint32_t d = 0;

    for (; d + 64 <= head_dim; d += 64) {
        mix_values(weight, values + d, count, rescale, head_dim, 8, out + d);
    }
    for (; d < head_dim; d += AVX2_LANES) {
        mix_values(weight, values + d, count, rescale, head_dim, 1, out + d);
    }
}

/* Adds the tokens of the tile in the scratch that query i sees: some of them. */
ALWAYS_INLINE void attend_tile(td_cpu_scratch_t *s, uint32_t i, const uint32_t head_dim,
                               uint32_t seen)
{
    _Alignas(32) float weight[TD_CPU_TILE_TOKENS];
    const float *q = s->queries + (size_t)i * head_dim;
    float *out = s->outputs + i * td_cpu_output_stride(head_dim);
    const __m256 masked = _mm256_set1_ps(TD_CPU_MASKED_SCORE);
    __m256 largest = masked;
    __m256 sums = _mm256_setzero_ps();
    float maximum = 0;
    float rescale = 0;
    uint32_t left = seen;
    const uint32_t first = (uint32_t)__builtin_ctz(seen) / AVX2_LANES * AVX2_LANES;
    const uint32_t end = 32 - (uint32_t)__builtin_clz(seen);

    for (uint32_t t = first; t < end; t += AVX2_LANES) {
        __m256 mask = token_mask(seen >> t);
        __m256 scores = score8(q, s->keys + (size_t)t * head_dim, head_dim);
        scores = _mm256_blendv_ps(masked, scores, mask);
        largest = _mm256_max_ps(scores, largest);
        _mm256_store_ps(weight + t, scores);
    }
    maximum = avx2_max(largest);
    maximum = maximum > s->maxima[i] ? maximum : s->maxima[i];
    rescale = _mm256_cvtss_f32(avx2_exp(_mm256_set1_ps(s->maxima[i] - maximum)));
    for (uint32_t t = first; t < end; t += AVX2_LANES) {
        __m256 mask = token_mask(seen >> t);
        __m256 w = avx2_exp(_mm256_sub_ps(_mm256_load_ps(weight + t), _mm256_set1_ps(maximum)));
        w = _mm256_and_ps(w, mask); /* exactly zero where masked */
        sums = _mm256_add_ps(sums, w);
        _mm256_store_ps(weight + t, w);
    }
    s->sums[i] = fmaf(s->sums[i], rescale, avx2_sum(sums));
    s->maxima[i] = maximum;
    while (left != 0) {
        uint32_t run = 0;
        uint32_t run_end = 0;
        td_cpu_take_run(&left, &run, &run_end);
        mix_run(weight + run, s->values + (size_t)run * head_dim, run_end - run, rescale, head_dim,
                out);
        rescale = 1.0f;
    }
}

ALWAYS_INLINE void attend_tiles(const td_cpu_attention_t *job, td_cpu_scratch_t *s, uint32_t begin,
                                uint32_t end, const uint32_t head_dim)
{
    for (uint32_t tile = td_cpu_next_seen(job, begin, TD_CPU_TILE_TOKENS, end); tile < end;
         tile = td_cpu_next_seen(job, tile + TD_CPU_TILE_TOKENS, TD_CPU_TILE_TOKENS, end)) {
        const uint32_t tokens = TD_MIN(TD_CPU_TILE_TOKENS, end - tile);
        const td_cpu_tile_view_t view = td_cpu_view_tile(job, tile);
        load_tile(job, false, tile, tokens, view.any, s->keys);
        load_tile(job, true, tile, tokens, view.any, s->values);
        for (uint32_t i = 0; i < job->rows * job->group; i++) {
            const uint32_t seen = td_cpu_row_bits(job, &view, i / job->group, tile);
            if (seen != 0) {
                attend_tile(s, i, head_dim, seen);
            }
        }
    }
}

static void attend_few(const td_cpu_attention_t *job, td_cpu_scratch_t *s, uint32_t begin,
                       uint32_t end)
{
    if (job->kv->head_dim == FAST_HEAD_DIM) {
        attend_tiles(job, s, begin, end, FAST_HEAD_DIM);
    } else {
        attend_tiles(job, s, begin, end, job->kv->head_dim);
    }
}

void td_cpu_avx2_begin_queries(const td_cpu_attention_t *job, td_cpu_scratch_t *s)
{
    const uint32_t head_dim = job->kv->head_dim;

    for (uint32_t i = 0; i < job->rows * job->group; i++) {
        const float *q = job->q + i / job->group * job->q_stride + i % job->group * head_dim;
        for (uint32_t d = 0; d < head_dim; d += AVX2_LANES) {
            _mm256_store_ps(s->queries + (size_t)i * head_dim + d,
                            _mm256_mul_ps(_mm256_loadu_ps(q + d), _mm256_set1_ps(job->scale)));
        }
    }
}

/* --- spans ------------------------------------------------------------------------------------ */

void td_cpu_avx2_merge_part(float *total, const float *part, uint32_t head_dim)
{
    const float before = total[TD_CPU_PART_MAXIMUM];
    const float maximum = part[TD_CPU_PART_MAXIMUM] > before ? part[TD_CPU_PART_MAXIMUM] : before;
    const __m256 a = avx2_exp(_mm256_set1_ps(before - maximum));
    const __m256 b = avx2_exp(_mm256_set1_ps(part[TD_CPU_PART_MAXIMUM] - maximum));

    total[TD_CPU_PART_MAXIMUM] = maximum;
    total[TD_CPU_PART_SUM] = fmaf(total[TD_CPU_PART_SUM], _mm256_cvtss_f32(a),
                                  part[TD_CPU_PART_SUM] * _mm256_cvtss_f32(b));
    for (uint32_t d = 0; d < head_dim; d += AVX2_LANES) {
        float *at = total + TD_CPU_PART_ELEMENTS + d;
        __m256 more = _mm256_mul_ps(_mm256_loadu_ps(part + TD_CPU_PART_ELEMENTS + d), b);
        _mm256_storeu_ps(at, _mm256_fmadd_ps(_mm256_loadu_ps(at), a, more));
    }
}

void td_cpu_avx2_finish(const float *elements, float sum, uint32_t head_dim, float *out)
{
    const __m256 inverse = _mm256_set1_ps(1.0f / sum);
    for (uint32_t d = 0; d < head_dim; d += AVX2_LANES) {
        _mm256_storeu_ps(out + d, _mm256_mul_ps(_mm256_loadu_ps(elements + d), inverse));
    }
}

void td_cpu_avx2_attention(const td_cpu_attention_t *job, td_cpu_scratch_t *s)
{
    static const td_cpu_span_ops_t few_ops = {td_cpu_avx2_begin_queries, attend_few,
                                              td_cpu_avx2_merge_part, td_cpu_avx2_finish};
    bool few = job->rows * job->group < FEW_QUERIES;

    td_cpu_attend_spans(few ? &few_ops : &lanes_ops, job, s);
}

void td_cpu_avx2_merge(float *parts, size_t part_stride, uint32_t count, uint32_t head_dim,
                       float *out)
{
    td_cpu_merge_parts(&lanes_ops, parts, part_stride, count, head_dim, out);
}
#else
typedef int td_cpu_avx2_attention_empty_t; /* a translation unit needs a declaration */
#endif

/* td_cpu_avx2.h - small helpers of the AVX2 files, which alone are compiled for AVX2.
 * Threads: any. */
#pragma once

#include <immintrin.h>

#include "common/model/cpu/td_cpu_ops.h"

#define AVX2_LANES 8u
#define ALWAYS_INLINE static inline __attribute__((always_inline))
#define UNROLL_TEXT(x) _Pragma(#x)
#define UNROLL(n) UNROLL_TEXT(GCC unroll n)

/** One product, as its kernels see it. */
typedef struct product_job {
    const td_cpu_matrix_t *w;
    const td_cpu_acts_t *x;
    float *y;
    uint32_t groups;
    const uint8_t *bytes; /* of few int16 activations, as an instruction set wants them, or NULL */
} product_job_t;

/** As in td_cpu_ops_t; longer vectors use those that would not gain. */
void td_cpu_avx2_product(const td_cpu_matrix_t *w, const td_cpu_acts_t *x, uint32_t rows, float *y,
                         uint32_t panel_begin, uint32_t panel_end, td_cpu_scratch_t *scratch);
void td_cpu_avx2_rms_norm(const float *x, const float *weight, uint32_t dim, float eps, float *out);
void td_cpu_avx2_quantise8(const float *x, uint32_t dim, int8_t *q, float *scale, float *sum);
void td_cpu_avx2_quantise16(const float *x, uint32_t dim, int limit, int16_t *q, float *scale,
                            float *sum);
void td_cpu_avx2_add(float *x, const float *y, uint32_t n);
void td_cpu_avx2_rotate(float *head, const float *table, uint32_t n);
void td_cpu_avx2_kv_encode(td_kv_codec_t codec, const float *src, uint32_t head_dim,
                           uint8_t *values, uint8_t *scale);
void td_cpu_avx2_attention(const td_cpu_attention_t *job, td_cpu_scratch_t *scratch);
void td_cpu_avx2_merge(float *parts, size_t part_stride, uint32_t count, uint32_t head_dim,
                       float *out);
/** As in td_cpu_span_ops_t. Shape: scratch->queries [query][head_dim]. */
void td_cpu_avx2_begin_queries(const td_cpu_attention_t *job, td_cpu_scratch_t *scratch);
void td_cpu_avx2_merge_part(float *total, const float *part, uint32_t head_dim);
void td_cpu_avx2_finish(const float *elements, float sum, uint32_t head_dim, float *out);

ALWAYS_INLINE __m256i load_i(const void *ptr)
{
    return _mm256_load_si256((const __m256i *)ptr);
}

ALWAYS_INLINE void store_i(void *ptr, __m256i value)
{
    _mm256_store_si256((__m256i *)ptr, value);
}

/** Eight f16, unaligned. */
ALWAYS_INLINE __m256 load_f16(const void *ptr)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)ptr));
}

/** What load_kv() gives is too small by this, for the scale to make up for: scales of rows are far
 * from overflow, so both are exact. */
ALWAYS_INLINE float kv_unit(const td_kv_codec_t codec)
{
    return codec == TD_KV_F8_E4M3 ? 256.0f : 1.0f;
}

/** f8_e4m3 codes, sign-extended, as halves 2^8 too small; exact. NaN stays NaN. */
ALWAYS_INLINE __m128i half_from_f8(__m128i code)
{
    const __m128i half = _mm_and_si128(_mm_slli_epi16(code, 7), _mm_set1_epi16((int16_t)0xbfff));
    const __m128i nan =
        _mm_cmpeq_epi16(_mm_and_si128(half, _mm_set1_epi16(0x7fff)), _mm_set1_epi16(0x7f << 7));
    return _mm_or_si128(half, _mm_and_si128(nan, _mm_set1_epi16(0x7e00)));
}

/** The upper bytes of f4_e2m1 codes as halves; the lower ones are zero. */
ALWAYS_INLINE __m128i half_bytes_from_f4(__m128i code)
{
    return _mm_shuffle_epi8(_mm_setr_epi8(0x00, 0x38, 0x3c, 0x3e, 0x40, 0x42, 0x44, 0x46, -0x80,
                                          -0x48, -0x44, -0x42, -0x40, -0x3e, -0x3c, -0x3a),
                            code);
}

/** Eight values of a row in the KV pool, without their scale and in kv_unit()s. at: of the first,
 * unaligned. */
ALWAYS_INLINE __m256 load_kv(const uint8_t *at, const td_kv_codec_t codec)
{
    __m128i code;
    uint32_t pairs = 0;

    switch (codec) {
    case TD_KV_F16:
        return load_f16(at);
    case TD_KV_F8_E4M3:
        code = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)(const void *)at));
        return _mm256_cvtph_ps(half_from_f8(code));
    case TD_KV_I8:
        code = _mm_loadl_epi64((const __m128i *)(const void *)at);
        return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(code));
    default:
        memcpy(&pairs, at, sizeof(pairs));
        code = _mm_cvtsi32_si128((int32_t)pairs);
        code = _mm_unpacklo_epi8(_mm_and_si128(code, _mm_set1_epi8(15)),
                                 _mm_and_si128(_mm_srli_epi16(code, 4), _mm_set1_epi8(15)));
        return _mm256_cvtph_ps(_mm_unpacklo_epi8(_mm_setzero_si128(), half_bytes_from_f4(code)));
    }
}

/** Four bytes in every 32-bit lane, unaligned. */
ALWAYS_INLINE __m256i broadcast4(const void *ptr)
{
    int32_t value = 0;
    memcpy(&value, ptr, sizeof(value));
    return _mm256_set1_epi32(value);
}

/** All bits in lanes [0, count). */
ALWAYS_INLINE __m256i lane_mask(uint32_t count)
{
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int32_t)count),
                              _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

/** In ascending order of lanes. */
ALWAYS_INLINE float avx2_sum(__m256 v)
{
    float lanes[AVX2_LANES];
    float sum = 0;

    _mm256_storeu_ps(lanes, v);
    for (uint32_t i = 0; i < AVX2_LANES; i++) {
        sum += lanes[i];
    }
    return sum;
}

ALWAYS_INLINE float avx2_max(__m256 v)
{
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    m = _mm_max_ss(m, _mm_movehdup_ps(m));
    return _mm_cvtss_f32(m);
}

/** exp(x) as td_cpu_ops.h fixes it. */
ALWAYS_INLINE __m256 avx2_exp(__m256 x)
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

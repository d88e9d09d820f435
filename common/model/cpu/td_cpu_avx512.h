/* td_cpu_avx512.h - small helpers of the AVX-512 files, which alone are compiled for AVX-512 F, BW,
 * DQ, VL and VNNI. A vector holds a pair of panels: sixteen output rows. Threads: any. */
#pragma once

#include "common/model/cpu/td_cpu_avx2.h"

#define AVX512_LANES 16u

/** As in td_cpu_ops_t. */
void td_cpu_avx512_product(const td_cpu_matrix_t *w, const td_cpu_acts_t *x, uint32_t rows,
                           float *y, uint32_t panel_begin, uint32_t panel_end,
                           td_cpu_scratch_t *scratch);
const uint8_t *td_cpu_avx512_prepare(const td_cpu_matrix_t *w, const td_cpu_acts_t *x,
                                     uint32_t rows, td_cpu_scratch_t *scratch);
void td_cpu_avx512_attention(const td_cpu_attention_t *job, td_cpu_scratch_t *scratch);

ALWAYS_INLINE __m512i load_wide(const void *ptr)
{
    return _mm512_load_si512(ptr);
}

/** Sixteen f16. */
ALWAYS_INLINE __m512 load_f16_wide(const uint8_t *ptr)
{
    return _mm512_cvtph_ps(load_i(ptr));
}

/** As half_from_f8(), of sixteen codes. */
ALWAYS_INLINE __m256i half_from_f8_wide(__m128i codes)
{
    const __m256i code = _mm256_cvtepi8_epi16(codes);
    const __m256i half =
        _mm256_and_si256(_mm256_slli_epi16(code, 7), _mm256_set1_epi16((int16_t)0xbfff));
    const __mmask16 nan = _mm256_cmpeq_epi16_mask(_mm256_and_si256(half, _mm256_set1_epi16(0x7fff)),
                                                  _mm256_set1_epi16(0x7f << 7));
    return _mm256_mask_blend_epi16(nan, half, _mm256_or_si256(half, _mm256_set1_epi16(0x7e00)));
}

/** As load_kv(), of sixteen values. */
ALWAYS_INLINE __m512 load_kv_wide(const uint8_t *at, const td_kv_codec_t codec)
{
    const __m128i low = _mm_set1_epi8(15);
    __m128i code;
    __m256i half;

    switch (codec) {
    case TD_KV_F16:
        return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)at));
    case TD_KV_F8_E4M3:
        half = half_from_f8_wide(_mm_loadu_si128((const __m128i *)(const void *)at));
        return _mm512_cvtph_ps(half);
    case TD_KV_I8:
        code = _mm_loadu_si128((const __m128i *)(const void *)at);
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(code));
    default:
        code = _mm_loadl_epi64((const __m128i *)(const void *)at);
        code = _mm_unpacklo_epi8(_mm_and_si128(code, low),
                                 _mm_and_si128(_mm_srli_epi16(code, 4), low));
        half = _mm256_slli_epi16(_mm256_cvtepu8_epi16(half_bytes_from_f4(code)), 8);
        return _mm512_cvtph_ps(half);
    }
}

/** Four bytes in every 32-bit lane, unaligned. */
ALWAYS_INLINE __m512i broadcast4_wide(const void *ptr)
{
    int32_t value = 0;
    memcpy(&value, ptr, sizeof(value));
    return _mm512_set1_epi32(value);
}

/** exp(x) as td_cpu_ops.h fixes it. */
ALWAYS_INLINE __m512 avx512_exp(__m512 x)
{
    __m512 power;
    __m512 whole;
    __m512 rest;
    __m512 poly = _mm512_set1_ps(TD_CPU_EXP_C6);
    __m512i exponent;

    x = _mm512_max_ps(x, _mm512_set1_ps(TD_CPU_EXP_MIN));
    x = _mm512_min_ps(x, _mm512_set1_ps(TD_CPU_EXP_MAX));
    power = _mm512_mul_ps(x, _mm512_set1_ps(TD_CPU_LOG2_E));
    whole = _mm512_roundscale_ps(power, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    rest = _mm512_sub_ps(power, whole);
    poly = _mm512_fmadd_ps(poly, rest, _mm512_set1_ps(TD_CPU_EXP_C5));
    poly = _mm512_fmadd_ps(poly, rest, _mm512_set1_ps(TD_CPU_EXP_C4));
    poly = _mm512_fmadd_ps(poly, rest, _mm512_set1_ps(TD_CPU_EXP_C3));
    poly = _mm512_fmadd_ps(poly, rest, _mm512_set1_ps(TD_CPU_EXP_C2));
    poly = _mm512_fmadd_ps(poly, rest, _mm512_set1_ps(TD_CPU_EXP_C1));
    poly = _mm512_fmadd_ps(poly, rest, _mm512_set1_ps(1.0f));
    exponent = _mm512_add_epi32(_mm512_cvtps_epi32(whole), _mm512_set1_epi32(127));
    return _mm512_mul_ps(poly, _mm512_castsi512_ps(_mm512_slli_epi32(exponent, 23)));
}

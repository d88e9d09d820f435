/* td_cpu_avx512.h - small helpers of the AVX-512 files, which alone are compiled for AVX-512 F, BW,
 * DQ, VL and VNNI. A vector holds a pair of panels: sixteen output rows. Threads: any. */
#pragma once

#include "common/model/cpu/td_cpu_avx2.h"

/** As td_cpu_ops_t.product. */
void td_cpu_avx512_product(const td_cpu_matrix_t *w, const td_cpu_acts_t *x, uint32_t rows,
                           float *y, uint32_t panel_begin, uint32_t panel_end,
                           td_cpu_scratch_t *scratch);

ALWAYS_INLINE __m512i load_wide(const void *ptr)
{
    return _mm512_load_si512(ptr);
}

/** 32 bytes of each panel of a pair. */
ALWAYS_INLINE __m512i load_pair(const uint8_t *first, const uint8_t *second)
{
    return _mm512_inserti64x4(_mm512_castsi256_si512(load_i(first)), load_i(second), 1);
}

/** Eight f16 of each panel of a pair. */
ALWAYS_INLINE __m512 load_pair_f16(const uint8_t *first, const uint8_t *second)
{
    __m256i halves =
        _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_load_si128((const __m128i *)first)),
                                _mm_load_si128((const __m128i *)second), 1);
    return _mm512_cvtph_ps(halves);
}

/** Four bytes in every 32-bit lane, unaligned. */
ALWAYS_INLINE __m512i broadcast4_wide(const void *ptr)
{
    int32_t value = 0;
    memcpy(&value, ptr, sizeof(value));
    return _mm512_set1_epi32(value);
}

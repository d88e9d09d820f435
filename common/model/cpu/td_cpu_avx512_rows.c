/* What works on single rows, for AVX-512. Operations whose order is fixed by eight
 * lanes, and those that are too short to gain, are the AVX2 ones. */
#if defined(__x86_64__)
#include "common/model/cpu/td_cpu_avx512.h"

#include "common/base/td_base.h"

/* n is a multiple of 8: the last vector may be half. */
static void swiglu(float *gate, const float *up, uint32_t n)
{
    for (uint32_t i = 0; i < n; i += AVX512_LANES) {
        __mmask16 mask = n - i >= AVX512_LANES ? 0xffff : 0xff;
        __m512 g = _mm512_maskz_loadu_ps(mask, gate + i);
        __m512 e = avx512_exp(_mm512_sub_ps(_mm512_setzero_ps(), g));
        __m512 silu = _mm512_div_ps(g, _mm512_add_ps(_mm512_set1_ps(1.0f), e));
        _mm512_mask_storeu_ps(gate + i, mask,
                              _mm512_mul_ps(silu, _mm512_maskz_loadu_ps(mask, up + i)));
    }
}

const td_cpu_ops_t td_cpu_avx512_ops = {
    .name = "avx512",
    .product = td_cpu_avx512_product,
    .prepare = td_cpu_avx512_prepare,
    .rms_norm = td_cpu_avx2_rms_norm,
    .quantise8 = td_cpu_avx2_quantise8,
    .quantise16 = td_cpu_avx2_quantise16,
    .add = td_cpu_avx2_add,
    .swiglu = swiglu,
    .rotate = td_cpu_avx2_rotate,
    .kv_encode = td_cpu_avx2_kv_encode,
    .attention = td_cpu_avx512_attention,
    .merge = td_cpu_avx2_merge,
};
#else
typedef int td_cpu_avx512_rows_empty_t; /* a translation unit needs a declaration */
#endif

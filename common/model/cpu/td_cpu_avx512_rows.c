/* What works on single rows, and attention, for AVX-512. Operations whose order is fixed by eight
 * lanes, and those that are too short to gain, are the AVX2 ones. */
#if defined(__x86_64__)
#include "common/model/cpu/td_cpu_avx512.h"

#include "common/base/td_base.h"

#define LANES 16u
#define FEW_QUERIES 9u /* below, more than half a vector of queries would be empty */

ALWAYS_INLINE __m512 exp_clamped(__m512 x)
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

/* n is a multiple of 8: the last vector may be half. */
static void swiglu(float *gate, const float *up, uint32_t n)
{
    for (uint32_t i = 0; i < n; i += LANES) {
        __mmask16 mask = n - i >= LANES ? 0xffff : 0xff;
        __m512 g = _mm512_maskz_loadu_ps(mask, gate + i);
        __m512 e = exp_clamped(_mm512_sub_ps(_mm512_setzero_ps(), g));
        __m512 silu = _mm512_div_ps(g, _mm512_add_ps(_mm512_set1_ps(1.0f), e));
        _mm512_mask_storeu_ps(gate + i, mask,
                              _mm512_mul_ps(silu, _mm512_maskz_loadu_ps(mask, up + i)));
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
#define vec_exp exp_clamped
#define vec_keep _mm512_maskz_mov_ps

ALWAYS_INLINE vec_mask_t vec_above(const int32_t *reach, uint32_t token)
{
    return _mm512_cmpgt_epi32_mask(_mm512_loadu_si512(reach), _mm512_set1_epi32((int32_t)token));
}

ALWAYS_INLINE vec_t vec_select(vec_mask_t mask, vec_t then, vec_t otherwise)
{
    return _mm512_mask_mov_ps(otherwise, mask, then);
}

#include "common/model/cpu/td_cpu_attention_lanes.h"

static void attention(const td_cpu_attention_t *job, td_cpu_scratch_t *s)
{
    if (job->rows * job->group < FEW_QUERIES) {
        td_cpu_avx2_attention(job, s);
        return;
    }
    attention_lanes(job, s);
}

const td_cpu_ops_t td_cpu_avx512_ops = {
    .name = "avx512",
    .product = td_cpu_avx512_product,
    .rms_norm = td_cpu_avx2_rms_norm,
    .quantise8 = td_cpu_avx2_quantise8,
    .quantise16 = td_cpu_avx2_quantise16,
    .add = td_cpu_avx2_add,
    .swiglu = swiglu,
    .rotate = td_cpu_avx2_rotate,
    .to_f16 = td_cpu_avx2_to_f16,
    .attention = attention,
};
#else
typedef int td_cpu_avx512_rows_empty_t; /* a translation unit needs a declaration */
#endif

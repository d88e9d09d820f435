/* What works on single rows, for AVX2 + FMA + F16C. */
#if defined(__x86_64__)
#include "common/model/cpu/td_cpu_avx2.h"

#include "common/base/td_base.h"

ALWAYS_INLINE int32_t sum_lanes_i(__m256i v)
{
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4E));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0xB1));
    return _mm_cvtsi128_si32(s);
}

void td_cpu_avx2_rms_norm(const float *x, const float *weight, uint32_t dim, float eps, float *out)
{
    __m256 squares = _mm256_setzero_ps();
    __m256 inverse;

    for (uint32_t i = 0; i < dim; i += AVX2_LANES) {
        __m256 v = _mm256_loadu_ps(x + i);
        squares = _mm256_fmadd_ps(v, v, squares);
    }
    inverse = _mm256_set1_ps(1.0f / sqrtf(avx2_sum(squares) / (float)dim + eps));
    for (uint32_t i = 0; i < dim; i += AVX2_LANES) {
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
        v[i] = _mm256_loadu_ps(x + AVX2_LANES * i);
        largest = _mm256_max_ps(largest, _mm256_andnot_ps(sign, v[i]));
    }
    magnitude = avx2_max(largest);
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
    for (uint32_t i = 0; i < n; i += AVX2_LANES) {
        _mm256_storeu_ps(x + i, _mm256_add_ps(_mm256_loadu_ps(x + i), _mm256_loadu_ps(y + i)));
    }
}

static void swiglu(float *gate, const float *up, uint32_t n)
{
    for (uint32_t i = 0; i < n; i += AVX2_LANES) {
        __m256 g = _mm256_loadu_ps(gate + i);
        __m256 e = avx2_exp(_mm256_sub_ps(_mm256_setzero_ps(), g));
        __m256 silu = _mm256_div_ps(g, _mm256_add_ps(_mm256_set1_ps(1.0f), e));
        _mm256_storeu_ps(gate + i, _mm256_mul_ps(silu, _mm256_loadu_ps(up + i)));
    }
}

void td_cpu_avx2_rotate(float *head, const float *table, uint32_t n)
{
    const __m256 even_sign = _mm256_setr_ps(-0.0f, 0, -0.0f, 0, -0.0f, 0, -0.0f, 0);

    for (uint32_t i = 0; i < n; i += AVX2_LANES) {
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
    for (uint32_t i = 0; i < n; i += AVX2_LANES) {
        __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(src + i),
                                       _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        _mm_storeu_si128((__m128i *)(void *)(dst + (size_t)i * 2), half);
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
    .merge = td_cpu_avx2_merge,
};
#else
typedef int td_cpu_avx2_rows_empty_t; /* a translation unit needs a declaration */
#endif

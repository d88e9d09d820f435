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

static void to_f16(const float *src, uint32_t n, uint8_t *dst)
{
    for (uint32_t i = 0; i < n; i += AVX2_LANES) {
        __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(src + i),
                                       _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        _mm_storeu_si128((__m128i *)(void *)(dst + (size_t)i * 2), half);
    }
}

static uint32_t largest_magnitude(const float *x, uint32_t n)
{
    __m256i largest = _mm256_setzero_si256();
    uint32_t lanes[AVX2_LANES];
    uint32_t all = 0;

    for (uint32_t i = 0; i < n; i += AVX2_LANES) {
        __m256i bits = _mm256_castps_si256(_mm256_loadu_ps(x + i));
        largest = _mm256_max_epu32(_mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff)), largest);
    }
    _mm256_storeu_si256((__m256i *)(void *)lanes, largest);
    for (uint32_t i = 0; i < AVX2_LANES; i++) {
        all = lanes[i] > all ? lanes[i] : all;
    }
    return all;
}

/* As small_float() of td_kv_codec.c, with the sign in the code's highest bit. No NaN comes here. */
ALWAYS_INLINE __m256i small_float(__m256 x, const int32_t mantissa, const int32_t bias,
                                  const int32_t largest, const int32_t sign_shift)
{
    const int32_t cut = 23 - mantissa;
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
    const __m256i sign = _mm256_slli_epi32(_mm256_srli_epi32(bits, 31), 31 - sign_shift);
    const __m256i base = _mm256_set1_epi32((127 + 1 - bias - mantissa + 23) << 23);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(magnitude, cut), _mm256_set1_epi32(1));
    const __m256i is_small = _mm256_cmpgt_epi32(_mm256_set1_epi32((128 - bias) << 23), magnitude);
    __m256i subnormal = _mm256_castps_si256(
        _mm256_add_ps(_mm256_castsi256_ps(magnitude), _mm256_castsi256_ps(base)));
    __m256i normal =
        _mm256_add_epi32(magnitude, _mm256_add_epi32(odd, _mm256_set1_epi32((1 << (cut - 1)) - 1)));

    subnormal = _mm256_sub_epi32(subnormal, base);
    normal = _mm256_sub_epi32(_mm256_srli_epi32(normal, cut),
                              _mm256_set1_epi32((127 - bias) << mantissa));
    normal = _mm256_min_epi32(normal, _mm256_set1_epi32(largest));
    return _mm256_or_si256(_mm256_blendv_epi8(normal, subnormal, is_small), sign);
}

/* The low bytes of eight lanes, in order. */
ALWAYS_INLINE __m128i low_bytes(__m256i lanes)
{
    const __m128i words =
        _mm_packs_epi32(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256(lanes, 1));
    return _mm_packus_epi16(words, words);
}

ALWAYS_INLINE void encode_scaled(const float *src, uint32_t head_dim, float factor, uint8_t *values,
                                 const td_kv_codec_t codec)
{
    for (uint32_t i = 0; i < head_dim; i += AVX2_LANES) {
        const __m256 x = _mm256_mul_ps(_mm256_loadu_ps(src + i), _mm256_set1_ps(factor));
        __m128i bytes;
        int32_t pairs = 0;
        switch (codec) {
        case TD_KV_F8_E4M3:
            bytes = low_bytes(small_float(x, 3, 7, 0x7e, 24));
            _mm_storel_epi64((__m128i *)(void *)(values + i), bytes);
            break;
        case TD_KV_I8: /* no magnitude is above 127 when rounded: no byte's sign is cut off */
            bytes = low_bytes(_mm256_and_si256(_mm256_cvtps_epi32(x), _mm256_set1_epi32(255)));
            _mm_storel_epi64((__m128i *)(void *)(values + i), bytes);
            break;
        default:
            bytes = low_bytes(small_float(x, 1, 1, 7, 28));
            bytes = _mm_or_si128(bytes, _mm_srli_epi16(bytes, 4)); /* pairs, in the even bytes */
            bytes = _mm_and_si128(bytes, _mm_set1_epi16(255));
            pairs = _mm_cvtsi128_si32(_mm_packus_epi16(bytes, bytes));
            memcpy(values + i / 2, &pairs, sizeof(pairs));
            break;
        }
    }
}

void td_cpu_avx2_kv_encode(td_kv_codec_t codec, const float *src, uint32_t head_dim,
                           uint8_t *values, uint8_t *scale)
{
    float factor = 0;
    float scale_value = 0;

    if (codec == TD_KV_F16) {
        to_f16(src, head_dim, values);
        return;
    }
    scale_value = td_kv_row_scale(codec, largest_magnitude(src, head_dim), &factor);
    memcpy(scale, &scale_value, sizeof(scale_value));
    if (factor == 0) {
        memset(values, 0, (size_t)head_dim * td_kv_value_bits(codec) / 8);
    } else if (codec == TD_KV_F8_E4M3) {
        encode_scaled(src, head_dim, factor, values, TD_KV_F8_E4M3);
    } else if (codec == TD_KV_I8) {
        encode_scaled(src, head_dim, factor, values, TD_KV_I8);
    } else {
        encode_scaled(src, head_dim, factor, values, TD_KV_F4_E2M1);
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
    .kv_encode = td_cpu_avx2_kv_encode,
    .attention = td_cpu_avx2_attention,
    .merge = td_cpu_avx2_merge,
};
#else
typedef int td_cpu_avx2_rows_empty_t; /* a translation unit needs a declaration */
#endif

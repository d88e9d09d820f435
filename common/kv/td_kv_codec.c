#include "common/kv/td_kv_codec.h"

#include <math.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_float.h"

static const char *const names[TD_KV_CODECS] = {"f16", "f8_e4m3", "i8", "f4_e2m1"};

td_status_t td_kv_codec_parse(const char *text, td_kv_codec_t *out)
{
    for (size_t i = 0; i < TD_ARRAY_LEN(names); i++) {
        if (strcmp(text, names[i]) == 0) {
            *out = (td_kv_codec_t)i;
            return TD_OK;
        }
    }
    return TD_ERR_INVALID;
}

const char *td_kv_codec_name(td_kv_codec_t codec)
{
    TD_ASSERT((uint32_t)codec < TD_KV_CODECS);
    return names[codec];
}

/* --- single values ---------------------------------------------------------------------------- */

/* A small float's code without its sign, from the bits of a finite magnitude: `mantissa` bits of
 * mantissa, and exponent 1 for [2^(1 - bias), 2^(2 - bias)). */
static uint32_t small_float(uint32_t magnitude, uint32_t mantissa, uint32_t bias, uint32_t largest)
{
    const uint32_t cut = 23 - mantissa; /* bits that go */
    uint32_t code = 0;

    if (magnitude < (128 - bias) << 23) { /* subnormal: multiples of 2^(1 - bias - mantissa) */
        /* The addition rounds: what is added has that distance between neighbours. */
        const uint32_t base = (127 + 1 - bias - mantissa + 23) << 23;
        float rounded = td_float_from_bits(magnitude) + td_float_from_bits(base);
        return td_bits_from_float(rounded) - base;
    }
    /* The carry of the rounding runs into the exponent. */
    magnitude += (1u << (cut - 1)) - 1 + (magnitude >> cut & 1u);
    code = (magnitude >> cut) - ((127 - bias) << mantissa);
    return TD_MIN(code, largest);
}

uint8_t td_kv_f8_from_f32(float value)
{
    const uint32_t bits = td_bits_from_float(value);
    const uint32_t magnitude = bits & 0x7fffffffu;
    const uint32_t code = magnitude > 0x7f800000u ? 0x7f : small_float(magnitude, 3, 7, 0x7e);

    return (uint8_t)(bits >> 24 & 0x80u) | (uint8_t)code;
}

float td_kv_f32_from_f8(uint8_t code)
{
    const uint32_t sign = (uint32_t)(code & 0x80u) << 24;
    const uint32_t magnitude = code & 0x7fu;

    if (magnitude == 0x7f) {
        return td_float_from_bits(sign | 0x7ff00000u);
    }
    if (magnitude < 8) {
        return td_float_from_bits(sign | td_bits_from_float((float)magnitude * 0x1p-9f));
    }
    return td_float_from_bits(sign | ((magnitude << 20) + (120u << 23)));
}

int8_t td_kv_i8_from_f32(float value)
{
    if (isnan(value)) {
        return 0;
    }
    return (int8_t)lrintf(TD_MIN(TD_MAX(value, -TD_KV_I8_MAX), TD_KV_I8_MAX));
}

uint8_t td_kv_f4_from_f32(float value)
{
    const uint32_t bits = td_bits_from_float(value);
    const uint32_t magnitude = bits & 0x7fffffffu;

    if (magnitude > 0x7f800000u) {
        return 0;
    }
    return (uint8_t)((bits >> 28 & 8u) | small_float(magnitude, 1, 1, 7));
}

float td_kv_f32_from_f4(uint8_t code)
{
    static const float magnitudes[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    const float magnitude = magnitudes[code & 7];

    return (code & 8) != 0 ? -magnitude : magnitude;
}

/* --- rows ------------------------------------------------------------------------------------- */

float td_kv_row_scale(td_kv_codec_t codec, uint32_t largest_bits, float *factor_out)
{
    const float limit = codec == TD_KV_I8        ? TD_KV_I8_MAX
                        : codec == TD_KV_F8_E4M3 ? TD_KV_F8_MAX
                                                 : TD_KV_F4_MAX;
    const float largest = td_float_from_bits(largest_bits);

    *factor_out = 0;
    if (largest_bits >= 0x7f800000u) {
        return td_float_from_bits(TD_KV_NOT_A_NUMBER);
    }
    if (largest < TD_KV_TINY) {
        return 0;
    }
    *factor_out = limit / largest;
    return largest / limit;
}

static void encode_f16(const float *src, uint32_t head_dim, uint8_t *values)
{
    for (uint32_t i = 0; i < head_dim; i++) {
        const uint16_t half = td_f16_from_f32(src[i]);
        memcpy(values + 2 * (size_t)i, &half, sizeof(half));
    }
}

void td_kv_row_encode(td_kv_codec_t codec, const float *src, uint32_t head_dim, uint8_t *values,
                      uint8_t *scale)
{
    uint32_t largest_bits = 0;
    float factor = 0;
    float scale_value = 0;

    if (codec == TD_KV_F16) {
        encode_f16(src, head_dim, values);
        return;
    }
    for (uint32_t i = 0; i < head_dim; i++) {
        largest_bits = TD_MAX(largest_bits, td_bits_from_float(src[i]) & 0x7fffffffu);
    }
    scale_value = td_kv_row_scale(codec, largest_bits, &factor);
    memcpy(scale, &scale_value, sizeof(scale_value));
    memset(values, 0, (size_t)head_dim * td_kv_value_bits(codec) / 8);
    for (uint32_t i = 0; factor != 0 && i < head_dim; i++) {
        const float x = src[i] * factor;
        if (codec == TD_KV_F8_E4M3) {
            values[i] = td_kv_f8_from_f32(x);
        } else if (codec == TD_KV_I8) {
            values[i] = (uint8_t)td_kv_i8_from_f32(x);
        } else {
            values[i / 2] |= (uint8_t)(td_kv_f4_from_f32(x) << i % 2 * 4);
        }
    }
}

void td_kv_row_decode(td_kv_codec_t codec, const uint8_t *values, const uint8_t *scale,
                      uint32_t head_dim, float *out)
{
    float scale_value = 0;

    if (codec != TD_KV_F16) {
        memcpy(&scale_value, scale, sizeof(scale_value));
    }
    for (uint32_t i = 0; i < head_dim; i++) {
        uint16_t half = 0;
        switch (codec) {
        case TD_KV_F16:
            memcpy(&half, values + 2 * (size_t)i, sizeof(half));
            out[i] = td_f32_from_f16(half);
            break;
        case TD_KV_F8_E4M3:
            out[i] = td_kv_f32_from_f8(values[i]) * scale_value;
            break;
        case TD_KV_I8:
            out[i] = (float)(int8_t)values[i] * scale_value;
            break;
        default:
            out[i] = td_kv_f32_from_f4((uint8_t)(values[i / 2] >> i % 2 * 4)) * scale_value;
            break;
        }
    }
}

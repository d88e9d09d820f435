/* td_kv_codec.h - how the numbers of one head of one token (a row) are stored in a KV block. Every
 * implementation gives exactly these bits (I1). Design: common/kv/DESIGN.md, "Codecs".
 * Threads: any. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "common/base/td_status.h"

/** One for a whole cluster. Values are positions in TD_KV_CODEC_NAMES. */
typedef enum td_kv_codec {
    TD_KV_F16 = 0,
    TD_KV_F8_E4M3, /* sign, 4 exponent bits, 3 of mantissa; the OCP format without infinities */
    TD_KV_I8,
    TD_KV_F4_E2M1 /* sign, 2 exponent bits, 1 of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4, 6 */
} td_kv_codec_t;

#define TD_KV_CODECS 4u
#define TD_KV_CODEC_NAMES "f16|f8_e4m3|i8|f4_e2m1" /* as TD_OPTION_CHOICE wants them */
#define TD_KV_CODEC_DEFAULT "f16"
/** Bytes of a row's scale, an f32: with 16 tokens or a multiple of it in a block, the scales of a
 * head are whole cache lines, and no scale that a row needs is out of range. f16 has none. */
#define TD_KV_SCALE_BYTES 4u

/* The largest magnitudes: a row's largest is stored as this. */
#define TD_KV_F8_MAX 448.0f
#define TD_KV_I8_MAX 127.0f
#define TD_KV_F4_MAX 6.0f
/** A row whose largest magnitude is below is stored as zeros: its reciprocal would overflow. */
#define TD_KV_TINY 1e-30f
#define TD_KV_NOT_A_NUMBER 0x7fc00000u /* the scale of a row that holds a NaN or an infinity */

/** A name of TD_KV_CODEC_NAMES. Errors: TD_ERR_INVALID. */
TD_MUST_CHECK td_status_t td_kv_codec_parse(const char *text, td_kv_codec_t *out);
/** As block keys name it. */
const char *td_kv_codec_name(td_kv_codec_t codec);

/** Units: bits of a value in a block. */
static inline uint32_t td_kv_value_bits(td_kv_codec_t codec)
{
    return codec == TD_KV_F16 ? 16 : codec == TD_KV_F4_E2M1 ? 4 : 8;
}

/** Units: bytes of a row's scale in a block. */
static inline uint32_t td_kv_scale_bytes(td_kv_codec_t codec)
{
    return codec == TD_KV_F16 ? 0 : TD_KV_SCALE_BYTES;
}

/* Single values, without a scale. From f32: nearest, ties to even; too large becomes the largest.
 * To f32: exact. NaN: f8 has one of each sign (never in a row), i8 and f4 store it as 0. */
uint8_t td_kv_f8_from_f32(float value);
float td_kv_f32_from_f8(uint8_t code);
int8_t td_kv_i8_from_f32(float value);
uint8_t td_kv_f4_from_f32(float value); /* 0..15 */
float td_kv_f32_from_f4(uint8_t code);  /* of the low four bits */

/** The scale of a row by its largest magnitude, and the factor for its numbers before they are
 * rounded: scale = largest / limit and *factor_out = limit / largest, each one fp32 division. A
 * factor of 0 means that all codes are 0: below TD_KV_TINY the scale is 0, and with a NaN or an
 * infinity in the row it is TD_KV_NOT_A_NUMBER, so that nothing broken reads back as a number.
 * Units:  largest_bits, the bits of the largest magnitude (as integers they have the same order,
 *         NaN above all). */
float td_kv_row_scale(td_kv_codec_t codec, uint32_t largest_bits, float *factor_out);

/** Stores a row. Code = nearest(x * factor), see td_kv_row_scale(); f16 has no scale.
 * Units:  head_dim in values, a multiple of 8.
 * Shape:  src [head_dim]; values [head_dim] codes, two of f4 in a byte, the first in its low half;
 *         scale [TD_KV_SCALE_BYTES], not looked at by f16. */
void td_kv_row_encode(td_kv_codec_t codec, const float *src, uint32_t head_dim, uint8_t *values,
                      uint8_t *scale);
/** Reads a row: value = decoded code * scale, one fp32 multiplication. Shape: as stored. */
void td_kv_row_decode(td_kv_codec_t codec, const uint8_t *values, const uint8_t *scale,
                      uint32_t head_dim, float *out);

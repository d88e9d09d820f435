/* td_float.h - the bits of a float, and halves (IEEE 754 binary16). The same results everywhere, on
 * every CPU. Threads: any. */
#pragma once

#include <stdint.h>
#include <string.h>

static inline float td_float_from_bits(uint32_t bits)
{
    float value = 0;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

static inline uint32_t td_bits_from_float(float value)
{
    uint32_t bits = 0;
    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

/** Exact. NaN becomes quiet, as the F16C instruction makes it. */
static inline float td_f32_from_f16(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16;
    uint32_t exponent = (half >> 10) & 31u;
    uint32_t mantissa = half & 0x3ffu;

    if (exponent == 31) {
        uint32_t quiet = mantissa != 0 ? 0x400000u : 0;
        return td_float_from_bits(sign | 0x7f800000u | quiet | mantissa << 13);
    }
    if (exponent == 0) { /* zero or subnormal: mantissa * 2^-24, exact */
        float magnitude = (float)mantissa * 0x1p-24f;
        return td_float_from_bits(sign | td_bits_from_float(magnitude));
    }
    return td_float_from_bits(sign | (exponent + 112) << 23 | mantissa << 13);
}

/** Round to nearest even; too large becomes infinite. */
static inline uint16_t td_f16_from_f32(float value)
{
    uint32_t bits = td_bits_from_float(value);
    uint32_t sign = bits >> 16 & 0x8000u;
    uint32_t magnitude = bits & 0x7fffffffu;

    if (magnitude > 0x7f800000u) { /* NaN: quiet, payload cut */
        return (uint16_t)(sign | 0x7e00u | (magnitude >> 13 & 0x3ffu));
    }
    if (magnitude >= 0x47800000u) { /* >= 65536 */
        return (uint16_t)(sign | 0x7c00u);
    }
    if (magnitude < 0x38800000u) { /* below 2^-14: a multiple of 2^-24, rounded by the addition */
        float rounded = td_float_from_bits(magnitude) + 0.5f;
        return (uint16_t)(sign | (td_bits_from_float(rounded) - 0x3f000000u));
    }
    /* The carry of the rounding runs into the exponent, and to infinity at its end. */
    magnitude += 0xfffu + (magnitude >> 13 & 1u);
    return (uint16_t)(sign | (magnitude - 0x38000000u) >> 13);
}

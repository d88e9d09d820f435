#include "common/model/td_sampler_math_internal.h"

#include <stdint.h>
#include <string.h>

#define LN2_HIGH 0x1.62e42feep-1 /* 32 bits: its product with an exponent is exact */
#define LN2_LOW 0x1.a39ef35793c76p-33
#define INV_LN2 0x1.71547652b82fep+0
#define SQRT2 0x1.6a09e667f3bcdp+0

static double from_bits(uint64_t bits)
{
    double x = 0;

    memcpy(&x, &bits, sizeof(x));
    return x;
}

/* log(m * 2^e) = e * ln2 + 2 * atanh((m - 1) / (m + 1)) with m in [sqrt(1/2), sqrt(2)]. */
double td_sampler_log(double x)
{
    uint64_t bits = 0;
    int64_t exponent = 0;
    double m = 0;
    double s = 0;
    double z = 0;
    double sum = 0;

    if (x < 0x1p-1022) {
        x *= 0x1p54; /* subnormal */
        exponent = -54;
    }
    memcpy(&bits, &x, sizeof(bits));
    exponent += (int64_t)(bits >> 52) - 1023;
    m = from_bits((bits & 0xfffffffffffffu) | 0x3ff0000000000000u);
    if (m > SQRT2) {
        m *= 0.5;
        exponent++;
    }
    s = (m - 1.0) / (m + 1.0);
    z = s * s;
    for (int n = 21; n >= 3; n -= 2) {
        sum = (sum + 1.0 / (double)n) * z;
    }
    sum = 2.0 * s * sum + 2.0 * s;
    return (double)exponent * LN2_HIGH + ((double)exponent * LN2_LOW + sum);
}

/* e^x = 2^k * e^r with |r| <= ln2 / 2. */
double td_sampler_exp(double x)
{
    static const double inverse_factorial[] = {1.0,
                                               1.0,
                                               1.0 / 2,
                                               1.0 / 6,
                                               1.0 / 24,
                                               1.0 / 120,
                                               1.0 / 720,
                                               1.0 / 5040,
                                               1.0 / 40320,
                                               1.0 / 362880,
                                               1.0 / 3628800,
                                               1.0 / 39916800,
                                               1.0 / 479001600,
                                               1.0 / 6227020800.0};
    int64_t k = 0;
    double r = 0;
    double sum = 0;

    if (!(x >= -708.0)) {
        return 0.0;
    }
    k = (int64_t)(x * INV_LN2 + (x < 0 ? -0.5 : 0.5));
    r = x - (double)k * LN2_HIGH - (double)k * LN2_LOW;
    for (int n = 13; n >= 0; n--) {
        sum = sum * r + inverse_factorial[n];
    }
    return sum * from_bits((uint64_t)(k + 1023) << 52);
}

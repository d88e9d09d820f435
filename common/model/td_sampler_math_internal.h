/* td_sampler_math_internal.h - logarithm and exponential in plain double arithmetic, and the
 * noise. The C library's own differ in their last bits from version to version, and a token could
 * change with them (I1). Threads: any. */
#pragma once

#include "common/model/td_sampler.h"

/** Natural logarithm of a finite x > 0, to about 2 units in the last place. */
double td_sampler_log(double x);
/** e^x for x <= 709; 0 below -708 and for -infinity; to about 2 units in the last place. */
double td_sampler_exp(double x);
/** The key of the noise that td_sampler_pick() draws a position's token with. */
uint64_t td_sampler_token_key(const td_sampling_t *params, uint32_t position);

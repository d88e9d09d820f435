/* td_cuda_math.cuh - what several kernels compute: exp, quantised groups, masks. The formulas are
 * those of td_cpu_ops.h and td_attention_mask.h, operation by operation (I1). */
#pragma once

#include "common/model/cuda/dev.h"
#include "common/model/cuda/td_cuda_kernels.h"

#define MASKED_SCORE (-1e30f)
#define TINY 1e-30f
#define NO_POSITION 0xffffffffu

/* As TD_CPU_EXP_*. */
DEV float exp_clamped(float x)
{
    x = x > -87.0f ? x : -87.0f;
    x = x < 88.0f ? x : 88.0f;
    const float power = x * 1.44269504f;
    const float whole = rintf(power);
    const float rest = power - whole;
    float poly = 1.5403530e-4f;
    poly = fmaf(poly, rest, 1.3333558e-3f);
    poly = fmaf(poly, rest, 9.6181291e-3f);
    poly = fmaf(poly, rest, 5.5504109e-2f);
    poly = fmaf(poly, rest, 2.4022651e-1f);
    poly = fmaf(poly, rest, 6.9314718e-1f);
    poly = fmaf(poly, rest, 1.0f);
    return poly *
           dev_float_from_bits(static_cast<uint32_t>(static_cast<int32_t>(whole) + 127) << 23);
}

/* One group of 32, an element in each lane of the warp. */
DEV void quantise_group(float x, float limit, int32_t *q, float *scale, float *sum)
{
    const float largest = dev_warp_max(fabsf(x));
    float inverse = 0;

    *scale = 0;
    if (largest > TINY) {
        inverse = limit / largest;
        *scale = largest / limit;
    }
    *q = dev_round(x * inverse);
    *sum = *scale * static_cast<float>(dev_warp_sum(*q));
}

/* The forms that the row's users want; element is the lane's, of the group. */
DEV void quantise_element(const td_cuda_quantise_t &to, uint32_t row, uint32_t group, float x)
{
    int32_t q = 0;
    float scale = 0;
    float sum = 0;

    if (to.int8.high != nullptr) {
        quantise_group(x, 127.0f, &q, &scale, &sum);
        to.int8.high[(size_t)row * to.int8.stride + group * TD_CUDA_GROUP + dev_lane()] =
            static_cast<int8_t>(q);
        if (dev_lane() == 0) {
            const size_t at = (size_t)row * (to.int8.stride / TD_CUDA_GROUP) + group;
            to.int8.scale[at] = scale;
            to.int8.sum[at] = sum;
        }
    }
    if (to.int16.high != nullptr) {
        quantise_group(x, static_cast<float>(to.limit16), &q, &scale, &sum);
        const size_t place = (size_t)row * to.int16.stride + group * TD_CUDA_GROUP + dev_lane();
        to.int16.high[place] = static_cast<int8_t>(q >> 8);
        to.int16.low[place] = static_cast<uint8_t>(q & 0xff);
        if (dev_lane() == 0) {
            const size_t at = (size_t)row * (to.int16.stride / TD_CUDA_GROUP) + group;
            to.int16.scale[at] = scale;
            to.int16.sum[at] = sum;
        }
    }
}

DEV bool is_quantised(const td_cuda_quantise_t &to)
{
    return to.int8.high != nullptr || to.int16.high != nullptr;
}

/* --- masks, as td_attention_mask.h -------------------------------------------------------------
 */

#define MASK_FULL 0u
#define MASK_STRIDED 2u

DEV uint32_t mask_window(const td_cuda_mask_t &mask, uint32_t query)
{
    return mask.kind == MASK_FULL || query < mask.local ? 0 : query - mask.local + 1;
}

DEV bool mask_sees(const td_cuda_mask_t &mask, uint32_t q, uint32_t p)
{
    if (p > q) {
        return false;
    }
    return p >= mask_window(mask, q) || p < mask.sinks ||
           (mask.kind == MASK_STRIDED && p % mask.stride >= mask.stride - mask.summary);
}

/* The first position from `at` on that some query of [first, last] sees, or NO_POSITION. */
DEV uint32_t mask_next(const td_cuda_mask_t &mask, uint32_t first, uint32_t last, uint32_t at)
{
    const uint32_t window = mask_window(mask, first);

    if (at < window && at >= mask.sinks) {
        uint32_t lasting = NO_POSITION;
        if (mask.kind == MASK_STRIDED) {
            const uint32_t in_stride = at % mask.stride;
            const uint32_t summary = mask.stride - mask.summary;
            lasting = in_stride >= summary ? at : at + (summary - in_stride);
        }
        at = lasting < window ? lasting : window;
    }
    return at <= last ? at : NO_POSITION;
}

/* The first multiple of size from `at` on behind which, up to the next, some query sees anything;
 * `end` or more: none. */
DEV uint32_t mask_next_part(const td_cuda_mask_t &mask, uint32_t first, uint32_t last, uint32_t at,
                            uint32_t size, uint32_t end)
{
    if (mask.kind == MASK_FULL || at >= end) {
        return at;
    }
    at = mask_next(mask, first, last, at);
    return at == NO_POSITION ? end : at / size * size;
}

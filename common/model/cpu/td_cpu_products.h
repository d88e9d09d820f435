/* td_cpu_products.h - which kernel computes which rows and panels of a product: few rows unpack
 * weights on the fly, many share two panels unpacked into L1, in blocks of rows whose activations
 * stay in L2.
 *
 * Included once by each file of product kernels, behind them: {a8,a16}_{small,unpack,big},
 * bytes_small, float_{unpack,big}; SMALL_PANELS and SMALL_TILES, BIG_ROWS_MIN, BIG_ROWS, FLOAT_ROWS
 * and BIG_TILES, BLOCK_ACT_BYTES and BLOCK_ROWS_MIN.
 * Threads: any; the scratch belongs to one thread. */
#pragma once

#include "common/base/td_base.h"
#include "common/model/cpu/td_cpu_avx2.h"

/* Whole tiles, so that only the last block has a rest. */
static uint32_t block_rows(const td_cpu_matrix_t *w, size_t act_bytes)
{
    size_t rows = BLOCK_ACT_BYTES / (w->inputs * act_bytes);
    return (uint32_t)TD_MAX(rows, BLOCK_ROWS_MIN) / BIG_ROWS * BIG_ROWS;
}

/* product_<form>() of 4-bit weights, from the kernels <form>_small, _unpack and _big. One function
 * each, so that the compiler allots registers to each on its own. */
#define NIBBLE_PRODUCT(form, act_bytes)                                                            \
    static __attribute__((noinline)) void product_##form(const product_job_t *job, uint32_t rows,  \
                                                         uint32_t panel_begin, uint32_t panel_end, \
                                                         td_cpu_scratch_t *s)                      \
    {                                                                                              \
        const uint32_t block = block_rows(job->w, act_bytes);                                      \
                                                                                                   \
        for (uint32_t p = panel_begin; rows < BIG_ROWS_MIN && p < panel_end; p += SMALL_PANELS) {  \
            SMALL_TILES(rows, form##_SMALL);                                                       \
        }                                                                                          \
        for (uint32_t r0 = 0; rows >= BIG_ROWS_MIN && r0 < rows; r0 += block) {                    \
            const uint32_t r1 = TD_MIN(r0 + block, rows);                                          \
            for (uint32_t p = panel_begin; p < panel_end; p += 2) {                                \
                for (uint32_t g0 = 0; g0 < job->groups; g0 += TD_CPU_GROUPS_CHUNK) {               \
                    const uint32_t g1 = TD_MIN(g0 + TD_CPU_GROUPS_CHUNK, job->groups);             \
                    form##_unpack(job, p, g0, g1, s);                                              \
                    BIG_TILES(r0, r1, BIG_ROWS, form##_BIG);                                       \
                }                                                                                  \
            }                                                                                      \
        }                                                                                          \
    }

#define a8_SMALL(row, tile) a8_small(job, p, row, tile)
#define a8_BIG(row, tile) a8_big(job, s, p, g0, g1, row, tile)
NIBBLE_PRODUCT(a8, 1)
#define a16_SMALL(row, tile) a16_small(job, p, row, tile)
#define a16_BIG(row, tile) a16_big(job, s, p, g0, g1, row, tile)
NIBBLE_PRODUCT(a16, 2)

static __attribute__((noinline)) void product_bytes(const product_job_t *job, uint32_t rows,
                                                    uint32_t panel_begin, uint32_t panel_end)
{
    for (uint32_t p = panel_begin; p < panel_end; p += SMALL_PANELS) {
#define CALL(row, tile) bytes_small(job, p, row, tile)
        SMALL_TILES(rows, CALL);
#undef CALL
    }
}

ALWAYS_INLINE void product_float(const product_job_t *job, uint32_t rows, uint32_t panel_begin,
                                 uint32_t panel_end, td_cpu_scratch_t *s, const td_cpu_form_t form)
{
    const uint32_t block = block_rows(job->w, 4);

    for (uint32_t r0 = 0; r0 < rows; r0 += block) {
        const uint32_t r1 = TD_MIN(r0 + block, rows);
        for (uint32_t p = panel_begin; p < panel_end; p += 2) {
            for (uint32_t k0 = 0; k0 < job->w->inputs; k0 += TD_CPU_FLOATS_CHUNK) {
                const uint32_t k1 = TD_MIN(k0 + TD_CPU_FLOATS_CHUNK, job->w->inputs);
                float_unpack(job, p, k0, k1, s, form);
#define CALL(row, tile) float_big(job, s, p, k0, k1, row, tile)
                BIG_TILES(r0, r1, FLOAT_ROWS, CALL);
#undef CALL
            }
        }
    }
}

#define FLOAT_PRODUCT(name, form)                                                                  \
    static __attribute__((noinline)) void product_##name(const product_job_t *job, uint32_t rows,  \
                                                         uint32_t panel_begin, uint32_t panel_end, \
                                                         td_cpu_scratch_t *s)                      \
    {                                                                                              \
        product_float(job, rows, panel_begin, panel_end, s, form);                                 \
    }

FLOAT_PRODUCT(f32, TD_CPU_F32)
FLOAT_PRODUCT(f16, TD_CPU_F16)
FLOAT_PRODUCT(bf16, TD_CPU_BF16)

/* Any form; of floats many rows. */
static void product_form(const product_job_t *job, uint32_t rows, uint32_t panel_begin,
                         uint32_t panel_end, td_cpu_scratch_t *s)
{
    switch (job->w->form) {
    case TD_CPU_NIBBLE_A8:
        product_a8(job, rows, panel_begin, panel_end, s);
        break;
    case TD_CPU_NIBBLE_A16:
        product_a16(job, rows, panel_begin, panel_end, s);
        break;
    case TD_CPU_BYTE_A16:
        product_bytes(job, rows, panel_begin, panel_end);
        break;
    case TD_CPU_F32:
        product_f32(job, rows, panel_begin, panel_end, s);
        break;
    case TD_CPU_F16:
        product_f16(job, rows, panel_begin, panel_end, s);
        break;
    case TD_CPU_BF16:
        product_bf16(job, rows, panel_begin, panel_end, s);
        break;
    }
}

#include "common/model/cuda/td_cuda_pack.h"

#include "common/base/td_base.h"

#define SCALES 256u /* of a group of nibbles: where pairs of scale and minimum begin */

td_cuda_matrix_t td_cuda_pack_plan(const td_cpu_matrix_t *m)
{
    const size_t groups = m->inputs / TD_CUDA_GROUP;
    td_cuda_matrix_t plan = {.outputs = m->outputs, .inputs = m->inputs};

    switch (m->form) {
    case TD_CPU_NIBBLE_A8:
    case TD_CPU_NIBBLE_A16:
        plan.form = TD_CUDA_NIBBLE;
        plan.wide = m->form == TD_CPU_NIBBLE_A16;
        plan.pair_bytes = groups * TD_CUDA_NIBBLE_BYTES;
        break;
    case TD_CPU_BYTE_A16:
        plan.form = TD_CUDA_BYTE;
        plan.wide = 1;
        plan.pair_bytes = groups * TD_CUDA_BYTE_BYTES;
        break;
    default:
        plan.form = m->form == TD_CPU_F32   ? TD_CUDA_F32
                    : m->form == TD_CPU_F16 ? TD_CUDA_F16
                                            : TD_CUDA_BF16;
        plan.pair_bytes = m->pair_bytes;
        break;
    }
    return plan;
}

/* The CPU's places of a nibble: td_cpu_pack.c. */
static uint8_t nibble_at(td_cpu_form_t form, const uint8_t *group, uint32_t r, uint32_t k)
{
    if (form == TD_CPU_NIBBLE_A8) {
        return (uint8_t)(group[k % 16 / 4 * 64 + r * 4 + k % 4] >> (k < 16 ? 0 : 4) & 15);
    }
    return (uint8_t)(td_cpu_load_u16(group + k / 8 * 64 + r * 4 + k % 2 * 2) >> (k % 8 / 2 * 4) &
                     15);
}

static void pack_nibbles(td_cpu_form_t form, const uint8_t *from, uint8_t *to)
{
    for (uint32_t r = 0; r < TD_CUDA_PAIR; r++) {
        for (uint32_t k = 0; k < 16; k++) {
            to[r * 16 + k] =
                (uint8_t)(nibble_at(form, from, r, k) | nibble_at(form, from, r, k + 16) << 4);
        }
        memcpy(to + SCALES + 4 * r, from + TD_CPU_NIBBLE_SCALES + 2 * r, 2);
        memcpy(to + SCALES + 4 * r + 2, from + TD_CPU_NIBBLE_MINIMA + 2 * r, 2);
    }
}

static void pack_bytes(const uint8_t *from, uint8_t *to)
{
    for (uint32_t r = 0; r < TD_CUDA_PAIR; r++) {
        for (uint32_t k = 0; k < TD_CUDA_GROUP; k++) {
            to[k / 16 * 256 + r * 16 + k % 16] = from[k / 2 * 32 + 2 * r + k % 2];
        }
    }
    memcpy(to + 512, from + TD_CPU_BYTE_SCALES, 2 * TD_CUDA_PAIR);
}

void td_cuda_pack_pairs(const td_cpu_matrix_t *m, const td_cuda_matrix_t *plan, uint32_t begin,
                        uint32_t end, uint8_t *out)
{
    const uint32_t groups = m->inputs / TD_CUDA_GROUP;

    for (uint32_t pair = begin; pair < end; pair++, out += plan->pair_bytes) {
        const uint8_t *from = m->bytes + pair * m->pair_bytes;
        if (plan->form > TD_CUDA_BYTE) {
            memcpy(out, from, plan->pair_bytes);
            continue;
        }
        for (uint32_t g = 0; g < groups; g++) {
            if (plan->form == TD_CUDA_NIBBLE) {
                pack_nibbles(m->form, from + (size_t)g * TD_CPU_NIBBLE_BYTES,
                             out + (size_t)g * TD_CUDA_NIBBLE_BYTES);
            } else {
                pack_bytes(from + (size_t)g * TD_CPU_BYTE_BYTES,
                           out + (size_t)g * TD_CUDA_BYTE_BYTES);
            }
        }
    }
}

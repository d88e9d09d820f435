/* td_cuda_pack.h - a packed matrix in the device's layout (td_cuda_form_t).
 * Threads: any. */
#pragma once

#include "common/model/cpu/td_cpu_ops.h"
#include "common/model/cuda/td_cuda_kernels.h"

/** The device's form of a matrix; bytes is left NULL. */
td_cuda_matrix_t td_cuda_pack_plan(const td_cpu_matrix_t *matrix);
/** Writes pairs [begin, end). Shape: out [end - begin][plan->pair_bytes]. */
void td_cuda_pack_pairs(const td_cpu_matrix_t *matrix, const td_cuda_matrix_t *plan, uint32_t begin,
                        uint32_t end, uint8_t *out);

static inline uint32_t td_cuda_pairs(const td_cuda_matrix_t *matrix)
{
    return (matrix->outputs + TD_CUDA_PAIR - 1) / TD_CUDA_PAIR;
}

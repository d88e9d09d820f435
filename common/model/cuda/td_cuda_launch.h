/* td_cuda_launch.h - kernels with their grids and shared memory. A launch that is refused is
 * logged; one that fails later shows at the next synchronisation. Threads: one stream's, its
 * owner's. */
#pragma once

#include <stdbool.h>
#include <cuda_runtime_api.h>

#include "common/base/td_status.h"
#include "common/kv/td_kv_layout.h"
#include "common/model/cuda/td_cuda_kernels.h"

/** Logs a runtime call's failure. Errors: TD_ERR_NO_MEMORY, TD_ERR_IO. */
TD_MUST_CHECK td_status_t td_cuda_check(cudaError_t error, const char *what);
/** Lets kernels take the shared memory they need. Once for each device, before launches.
 * Units:  head_dim: of the attention that is wanted; embed_dim: of the norms.
 * Errors: TD_ERR_UNSUPPORTED (the device has less: a line says so), TD_ERR_IO. */
TD_MUST_CHECK td_status_t td_cuda_launch_init(int device, uint32_t head_dim, uint32_t embed_dim);

/** Is there an attention kernel for this size of a head, and so many heads of a KV head? */
bool td_cuda_attention_has(uint32_t head_dim, uint32_t group);

TD_MUST_CHECK td_status_t td_cuda_launch_embed(cudaStream_t stream, const td_cuda_embed_t *p,
                                               uint32_t rows);
TD_MUST_CHECK td_status_t td_cuda_launch_norm(cudaStream_t stream, const td_cuda_norm_t *p,
                                              uint32_t rows);
TD_MUST_CHECK td_status_t td_cuda_launch_swiglu(cudaStream_t stream, const td_cuda_swiglu_t *p,
                                                uint32_t rows);
TD_MUST_CHECK td_status_t td_cuda_launch_place(cudaStream_t stream, const td_cuda_place_t *p,
                                               uint32_t rows);
TD_MUST_CHECK td_status_t td_cuda_launch_merge(cudaStream_t stream, const td_cuda_merge_t *p,
                                               uint32_t rows);
TD_MUST_CHECK td_status_t td_cuda_launch_gather(cudaStream_t stream, const td_cuda_gather_t *p,
                                                uint32_t rows);
TD_MUST_CHECK td_status_t td_cuda_launch_gather_acts(cudaStream_t stream,
                                                     const td_cuda_gather_acts_t *p, uint32_t rows);
/** many: items of up to TD_CUDA_MANY_QUERIES queries, else TD_CUDA_FEW_QUERIES. */
TD_MUST_CHECK td_status_t td_cuda_launch_attention(cudaStream_t stream, bool many,
                                                   const td_cuda_attention_t *p, uint32_t items);
/** Rows decide between two kernels of the same bits. All matrices are of one form. */
TD_MUST_CHECK td_status_t td_cuda_launch_product(cudaStream_t stream, const td_cuda_product_t *p);
TD_MUST_CHECK td_status_t td_cuda_launch_move(cudaStream_t stream, const td_cuda_move_t *p,
                                              uint32_t blocks);
TD_MUST_CHECK td_status_t td_cuda_launch_draw(cudaStream_t stream, const td_cuda_draw_t *p,
                                              uint32_t rows);

/** The kernels' view of a layout. */
td_cuda_kv_t td_cuda_kv_of(const td_kv_layout_t *layout, uint8_t *pool);

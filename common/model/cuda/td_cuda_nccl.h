/* td_cuda_nccl.h - the calls of NCCL that links make, found when they are first wanted: a program
 * that was built with NCCL's header starts where there is no library, and goes without. Without the
 * header it knows of none. Threads: init. */
#pragma once

#if defined(__has_include) && !defined(TD_CUDA_NO_NCCL)
#if __has_include(<nccl.h>) && __has_include(<cuda_fp16.h>) && __has_include(<cuda_bf16.h>)
#define TD_CUDA_HAS_NCCL 1
#endif
#endif

#ifdef TD_CUDA_HAS_NCCL
#include <nccl.h>

typedef struct td_cuda_nccl {
    ncclResult_t (*get_version)(int *version);
    ncclResult_t (*get_unique_id)(ncclUniqueId *id);
    ncclResult_t (*init_rank_config)(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank,
                                     ncclConfig_t *config);
    ncclResult_t (*get_async_error)(ncclComm_t comm, ncclResult_t *error);
    ncclResult_t (*abort)(ncclComm_t comm);
    ncclResult_t (*send)(const void *from, size_t count, ncclDataType_t type, int peer,
                         ncclComm_t comm, cudaStream_t stream);
    ncclResult_t (*recv)(void *to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                         cudaStream_t stream);
    ncclResult_t (*group_start)(void);
    ncclResult_t (*group_end)(void);
    const char *(*get_error_string)(ncclResult_t result);
} td_cuda_nccl_t;

/** NULL: there is no library, or one that lacks a call; *why_out says so then. Owner: static. */
const td_cuda_nccl_t *td_cuda_nccl_load(const char **why_out);
#endif

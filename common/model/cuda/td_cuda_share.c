#include "common/model/cuda/td_cuda_share.h"

#include "common/base/td_base.h"
#include "common/model/cuda/td_cuda_kernels.h"
#include "common/model/td_threads.h"

/* Units of `unit` are dealt out; the last one of all may be cut short. */
static td_cuda_range_t deal(uint32_t count, uint32_t unit, uint32_t rank, uint32_t ranks)
{
    const uint32_t units = (count + unit - 1) / unit;

    return (td_cuda_range_t){TD_MIN(td_threads_share(units, rank, ranks) * unit, count),
                             TD_MIN(td_threads_share(units, rank + 1, ranks) * unit, count)};
}

td_cuda_share_t td_cuda_share_of(const td_model_info_t *info, uint32_t rank, uint32_t ranks)
{
    const uint32_t group = info->heads / info->kv.kv_heads;
    const td_cuda_range_t kv_heads = deal(info->kv.kv_heads, 1, rank, ranks);

    return (td_cuda_share_t){
        .kv_heads = kv_heads,
        .heads = {kv_heads.begin * group, kv_heads.end * group},
        .ff = deal(info->ff_dim, TD_CUDA_GROUP, rank, ranks),
        .embed = deal(info->embed_dim, TD_CUDA_PAIR, rank, ranks),
        .vocab = deal(info->vocab_size, TD_CUDA_PAIR, rank, ranks),
    };
}

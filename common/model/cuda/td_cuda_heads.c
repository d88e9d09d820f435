/* A rank's heads of a block: the host has whole blocks, each device only its own KV heads of them.
 * Within K or V of a layer a block has head behind head, so a share of them is one run of bytes,
 * and another of scales; from half to half both lie the same distance apart. */
#include "common/base/td_base.h"
#include "common/model/cuda/td_cuda_device.h"

/* One run of bytes of each half. */
typedef struct runs {
    uint8_t *host;
    uint8_t *device;
    size_t bytes;
    size_t host_pitch;
    size_t device_pitch;
    size_t count;
} runs_t;

static td_status_t copy_runs(const runs_t *r, bool to_host, cudaStream_t stream)
{
    return td_cuda_check(
        to_host ? cudaMemcpy2DAsync(r->host, r->host_pitch, r->device, r->device_pitch, r->bytes,
                                    r->count, cudaMemcpyDeviceToHost, stream)
                : cudaMemcpy2DAsync(r->device, r->device_pitch, r->host, r->host_pitch, r->bytes,
                                    r->count, cudaMemcpyHostToDevice, stream),
        "cudaMemcpy2DAsync");
}

td_status_t td_cuda_copy_heads(const td_cuda_rank_t *rank, const td_kv_layout_t *whole,
                               uint8_t *host_block, uint32_t place, uint32_t begin, uint32_t end,
                               bool to_host, cudaStream_t stream)
{
    const td_kv_layout_t *own = &rank->kv;
    const uint32_t first = rank->share.kv_heads.begin;
    uint8_t *device_block = rank->pool + place * td_kv_block_bytes(own);
    runs_t runs = {
        .host = host_block + td_kv_offset(whole, begin, false, first, 0),
        .device = device_block + td_kv_offset(own, begin, false, 0, 0),
        .bytes = td_kv_values_bytes(own),
        .host_pitch = td_kv_half_bytes(whole),
        .device_pitch = td_kv_half_bytes(own),
        .count = 2 * (size_t)(end - begin),
    };

    if (own->kv_heads == whole->kv_heads) { /* one run */
        const size_t bytes = (end - begin) * td_kv_layer_bytes(whole);
        return td_cuda_check(
            to_host
                ? cudaMemcpyAsync(runs.host, runs.device, bytes, cudaMemcpyDeviceToHost, stream)
                : cudaMemcpyAsync(runs.device, runs.host, bytes, cudaMemcpyHostToDevice, stream),
            "cudaMemcpyAsync");
    }
    TD_TRY(copy_runs(&runs, to_host, stream));
    if (td_kv_scale_bytes(own->codec) == 0) {
        return TD_OK;
    }
    runs.host = host_block + td_kv_scale_offset(whole, begin, false, first, 0);
    runs.device = device_block + td_kv_scale_offset(own, begin, false, 0, 0);
    runs.bytes = (size_t)own->kv_heads * own->block_tokens * td_kv_scale_bytes(own->codec);
    return copy_runs(&runs, to_host, stream);
}

/* The backend: the devices that run a model together, from opening to closing, and their memory for
 * KV. */
#include "common/model/cuda/td_cuda_device.h"

#include "common/base/td_base.h"
#include "common/base/td_log.h"
#include "common/kv/td_pool.h"

/* --- opening and closing -----------------------------------------------------------------------
 */

static void sync_all(const td_model_device_t *d)
{
    for (uint32_t r = 0; r < d->rank_count; r++) {
        if (d->ranks[r].compute != NULL) {
            (void)cudaStreamSynchronize(d->ranks[r].compute);
        }
    }
}

static void device_destroy(td_model_device_t *d)
{
    if (!td_cuda_exchange_destroy(d->exchange)) {
        return;
    }
    sync_all(d); /* one reads the others' memory */
    td_cuda_graphs_clear(&d->graphs);
    for (uint32_t r = 0; d->ranks != NULL && r < d->rank_count; r++) {
        td_cuda_rank_fini(&d->ranks[r]);
    }
    for (size_t i = 0; i < TD_ARRAY_LEN(d->pinned); i++) {
        if (d->pinned[i] != NULL) {
            (void)cudaHostUnregister(d->pinned[i]);
        }
    }
    (void)cudaFreeHost(d->pass_host);
    if (d->registered != NULL) {
        (void)cudaHostUnregister(d->registered);
    }
    td_cuda_mirror_destroy(d->mirror);
    td_free(d->ranks);
    td_free(d);
}

static td_status_t check_shapes(const td_model_t *m, uint32_t ranks)
{
    const td_model_info_t *info = &m->info;

    if (!td_cuda_attention_has(info->kv.head_dim, info->heads / info->kv.kv_heads)) {
        TD_LOG_ERROR("no attention kernel for this model",
                     "head_dim=%u heads_of_a_kv_head=%u supported=\"" TD_CUDA_HEAD_DIM_NAMES
                     ", up to %u heads\"",
                     info->kv.head_dim, info->heads / info->kv.kv_heads, TD_CUDA_MANY_QUERIES);
        return TD_ERR_UNSUPPORTED;
    }
    if (ranks > info->kv.kv_heads) {
        TD_LOG_ERROR("more devices than the model has KV heads",
                     "devices=%u kv_heads=%u why=\"a KV head is one device's\"", ranks,
                     info->kv.kv_heads);
        return TD_ERR_UNSUPPORTED;
    }
    return TD_OK;
}

/* One host side, which every device gets a copy of. */
static td_status_t take_pass(td_model_device_t *d, const td_model_t *m)
{
    const uint64_t blocks = m->info.context_max / m->info.kv.block_tokens + 1;
    td_cuda_pass_t unused;
    void *pinned = NULL;

    d->tables_max = (uint32_t)TD_MIN(blocks * m->options.rows_max, (uint64_t)TD_CUDA_TABLES_MAX);
    d->pass_bytes = td_cuda_pass_lay(m, d->tables_max, NULL, &unused);
    TD_TRY(td_cuda_check(cudaHostAlloc(&pinned, d->pass_bytes, cudaHostAllocPortable),
                         "cudaHostAlloc"));
    d->pass_host = pinned;
    (void)td_cuda_pass_lay(m, d->tables_max, d->pass_host, &d->host);
    for (uint32_t r = 0; r < d->rank_count; r++) {
        td_cuda_rank_t *rank = &d->ranks[r];
        TD_TRY(td_cuda_rank_choose(rank));
        TD_TRY(td_cuda_take(rank, d->pass_bytes, "the plan of a pass", &rank->pass_device));
        (void)td_cuda_pass_lay(m, d->tables_max, rank->pass_device, &rank->pass);
    }
    return TD_OK;
}

static td_status_t device_fill(td_model_device_t *d, const td_model_t *m)
{
    TD_TRY(check_shapes(m, d->rank_count));
    for (uint32_t r = 0; r < d->rank_count; r++) {
        TD_TRY(td_cuda_rank_init(d, &d->ranks[r], m));
    }
    TD_TRY(td_cuda_connect(d, m));
    return take_pass(d, m);
}

static td_status_t device_create(const td_model_t *m, td_model_device_t **out)
{
    td_status_t status = TD_ERR_NO_MEMORY;
    td_model_device_t *d = td_calloc(1, sizeof(*d));

    if (d == NULL) {
        goto err;
    }
    d->rank_count = TD_MAX(m->options.devices.count, 1u);
    d->ranks = td_calloc(d->rank_count, sizeof(*d->ranks));
    if (d->ranks == NULL) {
        d->rank_count = 0;
        goto err_destroy;
    }
    status = device_fill(d, m);
    if (status != TD_OK) {
        goto err_destroy;
    }
    *out = d;
    return TD_OK;

err_destroy:
    device_destroy(d);
err:
    TD_LOG_ERROR("device not usable", "status=%s", td_status_name(status));
    return status;
}

static td_status_t device_load(td_model_device_t *d, const td_model_t *m, uint32_t layer)
{
    for (uint32_t r = 0; r < d->rank_count; r++) {
        TD_TRY(td_cuda_rank_load(&d->ranks[r], m, layer));
    }
    return layer == 0 ? td_cuda_self_test(d, m) : TD_OK;
}

/* --- memory for KV ---------------------------------------------------------------------------- */

/* Copies to the host go faster, and beside kernels, where it cannot move the memory. */
static void pin(td_model_device_t *d, size_t i, void *address, size_t bytes)
{
    if (cudaHostRegister(address, bytes, cudaHostRegisterPortable) == cudaSuccess) {
        d->pinned[i] = address;
    } else {
        TD_LOG_WARN("results not pinned: no pass is kept as a graph", "bytes=%zu error=%s", bytes,
                    cudaGetErrorName(cudaGetLastError()));
    }
}

/* How many ranks share this one's device: more than one only where a list names it twice. */
static uint32_t ranks_of_device(const td_model_device_t *d, int index)
{
    uint32_t count = 0;

    for (uint32_t r = 0; r < d->rank_count; r++) {
        count += d->ranks[r].index == index ? 1 : 0;
    }
    return count;
}

/* All ranks have the same blocks, so the one with the least room decides. */
static td_status_t count_places(td_model_device_t *d, const td_model_t *m)
{
    d->places = TD_POOL_BLOCKS_MAX;
    for (uint32_t r = 0; r < d->rank_count; r++) {
        const td_cuda_rank_t *rank = &d->ranks[r];
        const size_t block_bytes = td_kv_block_bytes(&rank->kv);
        size_t free_bytes = 0;
        size_t total_bytes = 0;
        uint64_t kv_bytes = m->options.device_kv_bytes;
        TD_TRY(td_cuda_rank_choose(rank));
        TD_TRY(td_cuda_check(cudaMemGetInfo(&free_bytes, &total_bytes), "cudaMemGetInfo"));
        free_bytes /= ranks_of_device(d, rank->index);
        if (kv_bytes == 0) {
            kv_bytes = free_bytes / 100 * (100 - TD_CUDA_LEFT_PERCENT);
        }
        d->places = (uint32_t)TD_MIN(kv_bytes / block_bytes, (uint64_t)d->places);
        if (d->places == 0 || kv_bytes > free_bytes) {
            TD_LOG_ERROR("device memory does not hold the KV that is asked for",
                         "device=%d kv_bytes=%llu block_bytes=%zu free_bytes=%zu total_bytes=%zu",
                         rank->index, (unsigned long long)kv_bytes, block_bytes, free_bytes,
                         total_bytes);
            return TD_ERR_NO_MEMORY;
        }
    }
    return TD_OK;
}

static td_status_t device_start(td_model_device_t *d, const td_model_t *m)
{
    TD_TRY(count_places(d, m));
    for (uint32_t r = 0; r < d->rank_count; r++) {
        td_cuda_rank_t *rank = &d->ranks[r];
        const size_t block_bytes = td_kv_block_bytes(&rank->kv);
        size_t free_bytes = 0;
        size_t total_bytes = 0;
        TD_TRY(td_cuda_rank_choose(rank));
        TD_TRY(td_cuda_take(rank, d->places * block_bytes, "kv", &rank->pool));
        TD_TRY(td_cuda_check(cudaMemGetInfo(&free_bytes, &total_bytes), "cudaMemGetInfo"));
        TD_LOG_INFO("device kv",
                    "device=%d blocks=%u block_bytes=%zu bytes=%zu free_bytes=%zu total_bytes=%zu",
                    rank->index, d->places, block_bytes, d->places * block_bytes, free_bytes,
                    total_bytes);
    }
    TD_TRY(td_cuda_mirror_create(d->places, TD_POOL_BLOCKS_MAX, &d->mirror));
    if (d->rank_count == 1) { /* of several each has some heads of every block */
        TD_TRY(td_cuda_exchange_create(d->ranks[0].index, d->ranks[0].pool,
                                       td_kv_block_bytes(&m->info.kv), d->mirror, &d->exchange));
    }
    pin(d, 0, m->logits,
        (size_t)m->options.logit_rows_max * m->info.vocab_size * sizeof(*m->logits));
    pin(d, 1, m->normed, (size_t)m->options.rows_max * m->info.embed_dim * sizeof(*m->normed));
    return TD_OK;
}

static void unmap(td_model_device_t *d)
{
    d->mapped = false;
    for (uint32_t r = 0; r < d->rank_count; r++) {
        d->ranks[r].mapped = NULL;
    }
}

/* All ranks or none: what is copied behind a pass is what none has written. */
static bool map(td_model_device_t *d, void *base, size_t bytes)
{
    if (cudaHostRegister(base, bytes, cudaHostRegisterMapped | cudaHostRegisterPortable) !=
        cudaSuccess) {
        return false;
    }
    d->registered = base;
    for (uint32_t r = 0; r < d->rank_count; r++) {
        void *address = NULL;
        if (cudaSetDevice(d->ranks[r].index) != cudaSuccess ||
            cudaHostGetDevicePointer(&address, base, 0) != cudaSuccess) {
            unmap(d);
            return false;
        }
        d->ranks[r].mapped = address;
    }
    d->mapped = true;
    return true;
}

/* With the host's pool mapped, a token's KV goes straight where it belongs, and not with a whole
 * block behind the pass. */
static void device_use_pool(td_model_device_t *d, const td_pool_t *pool)
{
    size_t total = 0;
    size_t bytes = 0;

    (void)cudaSetDevice(d->ranks[0].index);
    td_cuda_graphs_clear(&d->graphs); /* they have the pool's address */
    if (d->registered != NULL) {
        (void)cudaHostUnregister(d->registered);
    }
    d->registered = NULL;
    unmap(d);
    if (d->mirror != NULL) {
        td_cuda_mirror_forget_all(d->mirror); /* epochs of another pool begin anew */
    }
    if (pool == NULL) {
        return;
    }
    total = td_pool_counts(pool).total;
    if (total > d->places) {
        TD_LOG_WARN("the device holds fewer blocks than the pool",
                    "device_blocks=%u blocks=%llu why=\"a pass over more ends its requests\" "
                    "try=\"less --kv-memory, or more --device-kv\"",
                    d->places, (unsigned long long)total);
    }
    bytes = total * td_pool_block_bytes(pool);
    if (!map(d, td_pool_base(pool), bytes)) {
        TD_LOG_WARN("kv memory not mapped into the device: blocks are copied behind each pass",
                    "bytes=%zu error=%s", bytes, cudaGetErrorName(cudaGetLastError()));
    }
}

static void device_changed(td_model_device_t *d, uint32_t block)
{
    td_cuda_mirror_forget(d->mirror, block);
}

static td_kv_device_t *device_kv(td_model_device_t *d)
{
    return td_cuda_exchange_device(d->exchange);
}

const td_model_device_ops_t td_cuda_device_ops = {
    .create = device_create,
    .load = device_load,
    .start = device_start,
    .forward = td_cuda_forward,
    .changed = device_changed,
    .use_pool = device_use_pool,
    .kv_device = device_kv,
    .destroy = device_destroy,
};

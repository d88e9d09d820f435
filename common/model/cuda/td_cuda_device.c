/* The backend: opening a device, its memory and weights. */
#include "common/model/cuda/td_cuda_device.h"

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/base/td_log.h"
#include "common/kv/td_pool.h"
#include "common/model/cuda/td_cuda_pack.h"

#define ALLOCATIONS_OF_LAYER 9u
#define ALLOCATIONS_OTHER 64u
#define CAPABILITY_LEAST 8 /* asynchronous copies and integer products of the tensor cores */

/* --- memory ----------------------------------------------------------------------------------- */

static td_status_t device_take(td_model_device_t *d, size_t bytes, const char *what, void *out)
{
    void *address = NULL;
    size_t free_bytes = 0;
    size_t total_bytes = 0;

    TD_ASSERT(d->owned_count < d->owned_max);
    if (cudaMalloc(&address, bytes) != cudaSuccess) {
        (void)cudaGetLastError();
        (void)cudaMemGetInfo(&free_bytes, &total_bytes);
        TD_LOG_ERROR("device memory exhausted",
                     "what=\"%s\" needed_bytes=%zu free_bytes=%zu total_bytes=%zu", what, bytes,
                     free_bytes, total_bytes);
        return TD_ERR_NO_MEMORY;
    }
    d->owned[d->owned_count++] = address;
    memcpy(out, &address, sizeof(address)); /* out is the address of a pointer of any type */
    return TD_OK;
}

static td_status_t take_floats(td_model_device_t *d, uint32_t rows, size_t width, void *out)
{
    size_t bytes = 0;

    if (!td_size_mul(width, sizeof(float), &bytes) || !td_size_mul(bytes, rows, &bytes)) {
        return TD_ERR_INVALID;
    }
    return device_take(d, bytes, "buffers of a pass", out);
}

static td_status_t take_acts(td_model_device_t *d, uint32_t rows, size_t widest,
                             td_cuda_acts_t *out)
{
    const size_t stride = (widest + TD_CUDA_CHUNK * TD_CUDA_GROUP - 1) /
                          (TD_CUDA_CHUNK * TD_CUDA_GROUP) * (TD_CUDA_CHUNK * TD_CUDA_GROUP);

    TD_TRY(device_take(d, rows * stride, "activations", &out->high));
    TD_TRY(device_take(d, rows * stride, "activations", &out->low));
    TD_TRY(take_floats(d, rows, stride / TD_CUDA_GROUP, &out->scale));
    return take_floats(d, rows, stride / TD_CUDA_GROUP, &out->sum);
}

static td_status_t take_buffers(td_model_device_t *d, const td_model_t *m)
{
    const td_model_info_t *info = &m->info;
    const uint32_t rows = m->options.rows_max;
    const size_t widest = TD_MAX(TD_MAX(info->embed_dim, info->ff_dim), m->q_dim);

    TD_TRY(take_floats(d, rows, info->embed_dim, &d->x));
    TD_TRY(take_floats(d, rows, info->embed_dim, &d->normed));
    TD_TRY(take_floats(d, rows, info->embed_dim, &d->y));
    TD_TRY(take_floats(d, rows, m->q_dim, &d->q));
    TD_TRY(take_floats(d, rows, m->kv_dim, &d->k));
    TD_TRY(take_floats(d, rows, m->kv_dim, &d->v));
    TD_TRY(take_floats(d, rows, m->q_dim, &d->attn));
    TD_TRY(take_floats(d, rows, info->ff_dim, &d->gate));
    TD_TRY(take_floats(d, rows, info->ff_dim, &d->up));
    TD_TRY(take_floats(d, TD_MAX(m->options.logit_rows_max, 1u), info->vocab_size, &d->logits));
    TD_TRY(take_floats(d, TD_CUDA_PARTS_MAX,
                       (size_t)info->heads * (TD_CUDA_PART_ELEMENTS + info->kv.head_dim),
                       &d->parts));
    TD_TRY(take_acts(d, rows, widest, &d->acts8));
    return take_acts(d, rows, widest, &d->acts16);
}

static td_status_t take_pass(td_model_device_t *d, const td_model_t *m)
{
    const uint64_t blocks = m->info.context_max / m->info.kv.block_tokens + 1;
    td_cuda_pass_t unused;
    void *pinned = NULL;

    d->tables_max = (uint32_t)TD_MIN(blocks * m->options.rows_max, (uint64_t)TD_CUDA_TABLES_MAX);
    d->pass_bytes = td_cuda_pass_lay(m, d->tables_max, NULL, &unused);
    TD_TRY(td_cuda_check(cudaHostAlloc(&pinned, d->pass_bytes, cudaHostAllocDefault),
                         "cudaHostAlloc"));
    d->pass_host = pinned;
    TD_TRY(device_take(d, d->pass_bytes, "the plan of a pass", &d->pass_device));
    (void)td_cuda_pass_lay(m, d->tables_max, d->pass_host, &d->host);
    (void)td_cuda_pass_lay(m, d->tables_max, d->pass_device, &d->device);
    return TD_OK;
}

/* --- opening and closing -----------------------------------------------------------------------
 */

static td_status_t open_device(td_model_device_t *d, const td_model_t *m)
{
    int count = 0;
    int major = 0;
    int minor = 0;
    int multiprocessors = 0;
    const cudaError_t error = cudaGetDeviceCount(&count);

    d->index = (int)m->options.device;
    if (error != cudaSuccess || d->index >= count) {
        (void)cudaGetLastError();
        TD_LOG_ERROR("no such device", "device=%d devices=%d error=%s", d->index, count,
                     cudaGetErrorName(error));
        return TD_ERR_UNSUPPORTED;
    }
    TD_TRY(td_cuda_check(cudaSetDevice(d->index), "cudaSetDevice"));
    TD_TRY(
        td_cuda_check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, d->index),
                      "cudaDeviceGetAttribute"));
    TD_TRY(
        td_cuda_check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, d->index),
                      "cudaDeviceGetAttribute"));
    TD_TRY(td_cuda_check(
        cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, d->index),
        "cudaDeviceGetAttribute"));
    d->multiprocessors = (uint32_t)multiprocessors;
    if (major < CAPABILITY_LEAST) {
        TD_LOG_ERROR("device too old", "device=%d capability=%d.%d least=%d.0", d->index, major,
                     minor, CAPABILITY_LEAST);
        return TD_ERR_UNSUPPORTED;
    }
    TD_LOG_INFO("device opened", "device=%d capability=%d.%d multiprocessors=%u", d->index, major,
                minor, d->multiprocessors);
    return td_cuda_launch_init(d->index, m->info.kv.head_dim, m->info.embed_dim);
}

static td_status_t make_streams(td_model_device_t *d)
{
    cudaEvent_t *const events[] = {d->computed, d->left, d->staged};

    TD_TRY(td_cuda_check(cudaStreamCreateWithFlags(&d->compute, cudaStreamNonBlocking),
                         "cudaStreamCreate"));
    TD_TRY(td_cuda_check(cudaStreamCreateWithFlags(&d->out, cudaStreamNonBlocking),
                         "cudaStreamCreate"));
    for (size_t i = 0; i < 2 * TD_ARRAY_LEN(events); i++) {
        TD_TRY(
            td_cuda_check(cudaEventCreateWithFlags(&events[i / 2][i % 2], cudaEventDisableTiming),
                          "cudaEventCreate"));
    }
    for (size_t i = 0; i < TD_ARRAY_LEN(d->staging); i++) {
        void *pinned = NULL;
        TD_TRY(td_cuda_check(cudaHostAlloc(&pinned, TD_CUDA_STAGING_BYTES, cudaHostAllocDefault),
                             "cudaHostAlloc"));
        d->staging[i] = pinned;
    }
    return TD_OK;
}

static void device_destroy(td_model_device_t *d)
{
    cudaEvent_t *const events[] = {d->computed, d->left, d->staged};

    td_cuda_exchange_destroy(d->exchange);
    if (d->compute != NULL) {
        (void)cudaStreamSynchronize(d->compute);
    }
    td_cuda_graphs_clear(&d->graphs);
    for (uint32_t i = 0; i < d->owned_count; i++) {
        (void)cudaFree(d->owned[i]);
    }
    for (size_t i = 0; i < 2; i++) {
        (void)cudaFreeHost(d->staging[i]);
        if (d->pinned[i] != NULL) {
            (void)cudaHostUnregister(d->pinned[i]);
        }
    }
    (void)cudaFreeHost(d->pass_host);
    if (d->registered != NULL) {
        (void)cudaHostUnregister(d->registered);
    }
    for (size_t i = 0; i < 2 * TD_ARRAY_LEN(events); i++) {
        if (events[i / 2][i % 2] != NULL) {
            (void)cudaEventDestroy(events[i / 2][i % 2]);
        }
    }
    if (d->compute != NULL) {
        (void)cudaStreamDestroy(d->compute);
    }
    if (d->out != NULL) {
        (void)cudaStreamDestroy(d->out);
    }
    td_cuda_mirror_destroy(d->mirror);
    td_free(d->owned);
    td_free(d->layers);
    td_free(d);
}

static td_status_t check_shapes(const td_model_t *m)
{
    const td_model_info_t *info = &m->info;

    if (!td_cuda_attention_has(info->kv.head_dim, info->heads / info->kv.kv_heads)) {
        TD_LOG_ERROR("no attention kernel for this model",
                     "head_dim=%u heads_of_a_kv_head=%u supported=\"" TD_CUDA_HEAD_DIM_NAMES
                     ", up to %u heads\"",
                     info->kv.head_dim, info->heads / info->kv.kv_heads, TD_CUDA_MANY_QUERIES);
        return TD_ERR_UNSUPPORTED;
    }
    return TD_OK;
}

static td_status_t device_fill(td_model_device_t *d, const td_model_t *m)
{
    TD_TRY(check_shapes(m));
    TD_TRY(open_device(d, m));
    TD_TRY(make_streams(d));
    TD_TRY(take_buffers(d, m));
    return take_pass(d, m);
}

static td_status_t device_create(const td_model_t *m, td_model_device_t **out)
{
    td_status_t status = TD_ERR_NO_MEMORY;
    td_model_device_t *d = td_calloc(1, sizeof(*d));

    if (d == NULL) {
        goto err;
    }
    d->owned_max = m->info.kv.layers * ALLOCATIONS_OF_LAYER + ALLOCATIONS_OTHER;
    d->owned = td_calloc(d->owned_max, sizeof(*d->owned));
    d->layers = td_calloc(m->info.kv.layers, sizeof(*d->layers));
    if (d->owned == NULL || d->layers == NULL) {
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

/* --- weights ---------------------------------------------------------------------------------- */

/* In pieces through two staging buffers: one is packed while the other travels. */
static td_status_t load_matrix(td_model_device_t *d, const td_cpu_matrix_t *matrix,
                               td_cuda_matrix_t *out)
{
    td_cuda_matrix_t plan = td_cuda_pack_plan(matrix);
    const uint32_t pairs = td_cuda_pairs(&plan);
    const uint32_t step = (uint32_t)TD_MIN(TD_CUDA_STAGING_BYTES / plan.pair_bytes, (size_t)pairs);
    uint8_t *bytes = NULL;
    uint32_t turn = 0;

    if (step == 0) {
        TD_LOG_ERROR("matrix too wide", "inputs=%u", plan.inputs);
        return TD_ERR_UNSUPPORTED;
    }
    TD_TRY(device_take(d, pairs * plan.pair_bytes, "weights", &bytes));
    for (uint32_t begin = 0; begin < pairs; begin += step, turn ^= 1) {
        const uint32_t end = TD_MIN(begin + step, pairs);
        TD_TRY(td_cuda_check(cudaEventSynchronize(d->staged[turn]), "cudaEventSynchronize"));
        td_cuda_pack_pairs(matrix, &plan, begin, end, d->staging[turn]);
        TD_TRY(td_cuda_check(cudaMemcpyAsync(bytes + begin * plan.pair_bytes, d->staging[turn],
                                             (end - begin) * plan.pair_bytes,
                                             cudaMemcpyHostToDevice, d->compute),
                             "cudaMemcpyAsync"));
        TD_TRY(td_cuda_check(cudaEventRecord(d->staged[turn], d->compute), "cudaEventRecord"));
    }
    plan.bytes = bytes;
    *out = plan;
    /* The next matrix begins with the first buffer again. */
    return td_cuda_check(cudaStreamSynchronize(d->compute), "cudaStreamSynchronize");
}

static td_status_t load_vector(td_model_device_t *d, const float *values, uint32_t count,
                               const float **out)
{
    float *bytes = NULL;

    TD_TRY(take_floats(d, 1, count, &bytes));
    TD_TRY(td_cuda_check(
        cudaMemcpyAsync(bytes, values, count * sizeof(*bytes), cudaMemcpyHostToDevice, d->compute),
        "cudaMemcpyAsync"));
    *out = bytes;
    return td_cuda_check(cudaStreamSynchronize(d->compute), "cudaStreamSynchronize");
}

static td_status_t device_load(td_model_device_t *d, const td_model_t *m, uint32_t layer)
{
    if (layer == TD_KV_LAYERS_MAX) {
        TD_TRY(load_matrix(d, &m->embed, &d->embed));
        d->head = d->embed;
        if (m->head != &m->embed) {
            TD_TRY(load_matrix(d, m->head, &d->head));
        }
        return load_vector(d, m->output_norm, m->info.embed_dim, &d->output_norm);
    }
    const td_model_layer_t *from = &m->layers[layer];
    td_cuda_layer_t *to = &d->layers[layer];
    TD_TRY(load_matrix(d, &from->q, &to->q));
    TD_TRY(load_matrix(d, &from->k, &to->k));
    TD_TRY(load_matrix(d, &from->v, &to->v));
    TD_TRY(load_matrix(d, &from->o, &to->o));
    TD_TRY(load_matrix(d, &from->gate, &to->gate));
    TD_TRY(load_matrix(d, &from->up, &to->up));
    TD_TRY(load_matrix(d, &from->down, &to->down));
    TD_TRY(load_vector(d, from->attn_norm, m->info.embed_dim, &to->attn_norm));
    TD_TRY(load_vector(d, from->ffn_norm, m->info.embed_dim, &to->ffn_norm));
    return layer == 0 ? td_cuda_self_test(d, m) : TD_OK;
}

/* Copies to the host go faster, and beside kernels, where it cannot move the memory. */
static void pin(td_model_device_t *d, size_t i, void *address, size_t bytes)
{
    if (cudaHostRegister(address, bytes, cudaHostRegisterDefault) == cudaSuccess) {
        d->pinned[i] = address;
    } else {
        TD_LOG_WARN("results not pinned: no pass is kept as a graph", "bytes=%zu error=%s", bytes,
                    cudaGetErrorName(cudaGetLastError()));
    }
}

static td_status_t device_start(td_model_device_t *d, const td_model_t *m)
{
    const size_t block_bytes = td_kv_block_bytes(&m->info.kv);
    size_t free_bytes = 0;
    size_t total_bytes = 0;
    uint64_t kv_bytes = m->options.device_kv_bytes;

    TD_TRY(td_cuda_check(cudaMemGetInfo(&free_bytes, &total_bytes), "cudaMemGetInfo"));
    if (kv_bytes == 0) {
        kv_bytes = free_bytes / 100 * (100 - TD_CUDA_LEFT_PERCENT);
    }
    d->places = (uint32_t)TD_MIN(kv_bytes / block_bytes, (uint64_t)TD_POOL_BLOCKS_MAX);
    if (d->places == 0 || kv_bytes > free_bytes) {
        TD_LOG_ERROR("device memory does not hold the KV that is asked for",
                     "kv_bytes=%llu block_bytes=%zu free_bytes=%zu total_bytes=%zu",
                     (unsigned long long)kv_bytes, block_bytes, free_bytes, total_bytes);
        return TD_ERR_NO_MEMORY;
    }
    TD_TRY(device_take(d, d->places * block_bytes, "kv", &d->pool));
    TD_TRY(td_cuda_mirror_create(d->places, TD_POOL_BLOCKS_MAX, &d->mirror));
    TD_TRY(td_cuda_exchange_create(d->index, d->pool, block_bytes, d->mirror, &d->exchange));
    pin(d, 0, m->logits,
        (size_t)m->options.logit_rows_max * m->info.vocab_size * sizeof(*m->logits));
    pin(d, 1, m->normed, (size_t)m->options.rows_max * m->info.embed_dim * sizeof(*m->normed));
    TD_LOG_INFO("device kv", "blocks=%u block_bytes=%zu bytes=%zu free_bytes=%zu total_bytes=%zu",
                d->places, block_bytes, d->places * block_bytes,
                free_bytes - d->places * block_bytes, total_bytes);
    return TD_OK;
}

/* With the host's pool mapped, a token's KV goes straight where it belongs, and not with a whole
 * block behind the pass. */
static void device_use_pool(td_model_device_t *d, const td_pool_t *pool)
{
    void *address = NULL;
    size_t total = 0;
    size_t bytes = 0;

    (void)cudaSetDevice(d->index);
    td_cuda_graphs_clear(&d->graphs); /* they have the pool's address */
    if (d->registered != NULL) {
        (void)cudaHostUnregister(d->registered);
    }
    d->registered = NULL;
    d->mapped = NULL;
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
    if (cudaHostRegister(td_pool_base(pool), bytes, cudaHostRegisterMapped) == cudaSuccess) {
        d->registered = td_pool_base(pool);
        if (cudaHostGetDevicePointer(&address, d->registered, 0) == cudaSuccess) {
            d->mapped = address;
        }
    }
    if (d->mapped == NULL) {
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

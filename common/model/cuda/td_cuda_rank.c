/* One device: opening it, its memory, and its share of the weights. */
#include "common/model/cuda/td_cuda_device.h"

#include "common/base/td_base.h"
#include "common/base/td_log.h"
#include "common/model/cuda/td_cuda_pack.h"

#define ALLOCATIONS_OF_LAYER 9u
#define ALLOCATIONS_OTHER 64u
#define CAPABILITY_LEAST 8 /* asynchronous copies and integer products of the tensor cores */

/* --- memory ----------------------------------------------------------------------------------- */

td_status_t td_cuda_take(td_cuda_rank_t *rank, size_t bytes, const char *what, void *out)
{
    void *address = NULL;
    size_t free_bytes = 0;
    size_t total_bytes = 0;

    if (bytes == 0) {
        return TD_OK; /* of an empty share; the pointer stays NULL */
    }
    TD_ASSERT(rank->owned_count < rank->owned_max);
    if (cudaMalloc(&address, bytes) != cudaSuccess) {
        (void)cudaGetLastError();
        (void)cudaMemGetInfo(&free_bytes, &total_bytes);
        TD_LOG_ERROR("device memory exhausted",
                     "device=%d what=\"%s\" needed_bytes=%zu free_bytes=%zu total_bytes=%zu",
                     rank->index, what, bytes, free_bytes, total_bytes);
        return TD_ERR_NO_MEMORY;
    }
    rank->owned[rank->owned_count++] = address;
    memcpy(out, &address, sizeof(address)); /* out is the address of a pointer of any type */
    return TD_OK;
}

static td_status_t take_floats(td_cuda_rank_t *rank, uint32_t rows, size_t width, void *out)
{
    size_t bytes = 0;

    if (!td_size_mul(width, sizeof(float), &bytes) || !td_size_mul(bytes, rows, &bytes)) {
        return TD_ERR_INVALID;
    }
    return td_cuda_take(rank, bytes, "buffers of a pass", out);
}

static td_status_t take_acts(td_cuda_rank_t *rank, uint32_t rows, size_t widest,
                             td_cuda_acts_t *out)
{
    const size_t stride = (widest + TD_CUDA_CHUNK * TD_CUDA_GROUP - 1) /
                          (TD_CUDA_CHUNK * TD_CUDA_GROUP) * (TD_CUDA_CHUNK * TD_CUDA_GROUP);

    TD_TRY(td_cuda_take(rank, rows * stride, "activations", &out->high));
    TD_TRY(td_cuda_take(rank, rows * stride, "activations", &out->low));
    TD_TRY(take_floats(rank, rows, stride / TD_CUDA_GROUP, &out->scale));
    return take_floats(rank, rows, stride / TD_CUDA_GROUP, &out->sum);
}

/* What is gathered has room for all; with one device it is where that device computes it. */
static td_status_t take_whole(td_cuda_rank_t *rank, const td_model_t *m, bool alone)
{
    const uint32_t rows = m->options.rows_max;
    const size_t own = TD_MAX(td_cuda_width(rank->share.heads) * m->info.kv.head_dim,
                              td_cuda_width(rank->share.ff));

    if (alone) {
        rank->y_own = rank->y;
        rank->attn_all = rank->attn;
        rank->gate_all = rank->gate;
        return TD_OK;
    }
    /* As wide as an embedding: those go there before any product does. */
    TD_TRY(take_floats(rank, rows, m->info.embed_dim, &rank->y_own));
    /* The one is read before the other is gathered. */
    TD_TRY(take_floats(rank, rows, TD_MAX(m->q_dim, m->info.ff_dim), &rank->attn_all));
    rank->gate_all = rank->attn_all;
    return td_cuda_take(rank, td_cuda_own_acts_bytes(rows, own, true), "activations",
                        &rank->acts_own);
}

static td_status_t take_buffers(td_cuda_rank_t *rank, const td_model_t *m)
{
    const td_model_info_t *info = &m->info;
    const td_cuda_share_t *share = &rank->share;
    const uint32_t rows = m->options.rows_max;
    const size_t widest = TD_MAX(TD_MAX(info->embed_dim, info->ff_dim), m->q_dim);
    const size_t q_dim = (size_t)td_cuda_width(share->heads) * info->kv.head_dim;
    const size_t kv_dim = (size_t)td_cuda_width(share->kv_heads) * info->kv.head_dim;

    TD_TRY(take_floats(rank, rows, info->embed_dim, &rank->x));
    TD_TRY(take_floats(rank, rows, info->embed_dim, &rank->normed));
    TD_TRY(take_floats(rank, rows, info->embed_dim, &rank->y));
    TD_TRY(take_floats(rank, rows, q_dim, &rank->q));
    TD_TRY(take_floats(rank, rows, kv_dim, &rank->k));
    TD_TRY(take_floats(rank, rows, kv_dim, &rank->v));
    TD_TRY(take_floats(rank, rows, q_dim, &rank->attn));
    TD_TRY(take_floats(rank, rows, td_cuda_width(share->ff), &rank->gate));
    TD_TRY(take_floats(rank, rows, td_cuda_width(share->ff), &rank->up));
    TD_TRY(take_floats(rank, TD_MAX(m->options.logit_rows_max, 1u), td_cuda_width(share->vocab),
                       &rank->logits));
    TD_TRY(take_floats(rank, TD_CUDA_PARTS_MAX,
                       td_cuda_width(share->heads) *
                           ((size_t)TD_CUDA_PART_ELEMENTS + info->kv.head_dim),
                       &rank->parts));
    TD_TRY(take_acts(rank, rows, widest, &rank->acts8));
    return take_acts(rank, rows, widest, &rank->acts16);
}

/* --- opening and closing -----------------------------------------------------------------------
 */

td_status_t td_cuda_rank_choose(const td_cuda_rank_t *rank)
{
    return td_cuda_check(cudaSetDevice(rank->index), "cudaSetDevice");
}

static td_status_t open_device(td_cuda_rank_t *rank, const td_model_t *m)
{
    int count = 0;
    int major = 0;
    int minor = 0;
    int multiprocessors = 0;
    const cudaError_t error = cudaGetDeviceCount(&count);

    if (error != cudaSuccess || rank->index >= count) {
        (void)cudaGetLastError();
        TD_LOG_ERROR("no such device", "device=%d devices=%d error=%s", rank->index, count,
                     cudaGetErrorName(error));
        return TD_ERR_UNSUPPORTED;
    }
    TD_TRY(td_cuda_rank_choose(rank));
    TD_TRY(td_cuda_check(
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, rank->index),
        "cudaDeviceGetAttribute"));
    TD_TRY(td_cuda_check(
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, rank->index),
        "cudaDeviceGetAttribute"));
    TD_TRY(td_cuda_check(
        cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, rank->index),
        "cudaDeviceGetAttribute"));
    rank->multiprocessors = (uint32_t)multiprocessors;
    if (major < CAPABILITY_LEAST) {
        TD_LOG_ERROR("device too old", "device=%d capability=%d.%d least=%d.0", rank->index, major,
                     minor, CAPABILITY_LEAST);
        return TD_ERR_UNSUPPORTED;
    }
    TD_LOG_INFO("device opened", "device=%d capability=%d.%d multiprocessors=%u kv_heads=%u-%u",
                rank->index, major, minor, rank->multiprocessors, rank->share.kv_heads.begin,
                rank->share.kv_heads.end - 1);
    return td_cuda_launch_init(rank->index, m->info.kv.head_dim, m->info.embed_dim);
}

#define EVENTS(rank)                                                                               \
    {                                                                                              \
        (rank)->computed, (rank)->left, (rank)->staged, (rank)->ready, (rank)->joined              \
    }

static td_status_t make_streams(td_cuda_rank_t *rank)
{
    cudaEvent_t *const events[] = EVENTS(rank);

    TD_TRY(td_cuda_check(cudaStreamCreateWithFlags(&rank->compute, cudaStreamNonBlocking),
                         "cudaStreamCreate"));
    TD_TRY(td_cuda_check(cudaStreamCreateWithFlags(&rank->out, cudaStreamNonBlocking),
                         "cudaStreamCreate"));
    for (size_t i = 0; i < 2 * TD_ARRAY_LEN(events); i++) {
        TD_TRY(
            td_cuda_check(cudaEventCreateWithFlags(&events[i / 2][i % 2], cudaEventDisableTiming),
                          "cudaEventCreate"));
    }
    for (size_t i = 0; i < TD_ARRAY_LEN(rank->staging); i++) {
        void *pinned = NULL;
        TD_TRY(td_cuda_check(cudaHostAlloc(&pinned, TD_CUDA_STAGING_BYTES, cudaHostAllocDefault),
                             "cudaHostAlloc"));
        rank->staging[i] = pinned;
    }
    return TD_OK;
}

td_status_t td_cuda_rank_init(td_model_device_t *d, td_cuda_rank_t *rank, const td_model_t *m)
{
    const uint32_t number = (uint32_t)(rank - d->ranks);

    rank->index = (int)m->options.devices.ids[number];
    rank->share = td_cuda_share_of(&m->info, number, d->rank_count);
    rank->kv = m->info.kv;
    rank->kv.kv_heads = td_cuda_width(rank->share.kv_heads);
    rank->owned_max = m->info.kv.layers * ALLOCATIONS_OF_LAYER + ALLOCATIONS_OTHER;
    rank->owned = td_calloc(rank->owned_max, sizeof(*rank->owned));
    rank->layers = td_calloc(m->info.kv.layers, sizeof(*rank->layers));
    if (rank->owned == NULL || rank->layers == NULL) {
        TD_LOG_ERROR("no memory for a device's lists", "device=%d layers=%u", rank->index,
                     m->info.kv.layers);
        return TD_ERR_NO_MEMORY;
    }
    TD_TRY(open_device(rank, m));
    TD_TRY(make_streams(rank));
    TD_TRY(take_buffers(rank, m));
    return take_whole(rank, m, d->rank_count == 1);
}

void td_cuda_rank_fini(td_cuda_rank_t *rank)
{
    cudaEvent_t *const events[] = EVENTS(rank);

    for (uint32_t i = 0; i < rank->owned_count; i++) {
        (void)cudaFree(rank->owned[i]);
    }
    for (size_t i = 0; i < TD_ARRAY_LEN(rank->staging); i++) {
        (void)cudaFreeHost(rank->staging[i]);
    }
    for (size_t i = 0; i < 2 * TD_ARRAY_LEN(events); i++) {
        if (events[i / 2][i % 2] != NULL) {
            (void)cudaEventDestroy(events[i / 2][i % 2]);
        }
    }
    if (rank->compute != NULL) {
        (void)cudaStreamDestroy(rank->compute);
    }
    if (rank->out != NULL) {
        (void)cudaStreamDestroy(rank->out);
    }
    td_free(rank->owned);
    td_free(rank->layers);
}

/* --- weights ---------------------------------------------------------------------------------- */

/* Outputs of a matrix, in pieces through two staging buffers: one is packed while the other
 * travels. */
static td_status_t load_matrix(td_cuda_rank_t *rank, const td_cpu_matrix_t *matrix,
                               td_cuda_range_t outputs, td_cuda_matrix_t *out)
{
    td_cuda_matrix_t plan = td_cuda_pack_plan(matrix);
    const uint32_t first = outputs.begin / TD_CUDA_PAIR;
    const uint32_t step =
        (uint32_t)TD_MIN(TD_CUDA_STAGING_BYTES / plan.pair_bytes, (size_t)td_cuda_pairs(&plan));
    uint8_t *bytes = NULL;
    uint32_t pairs = 0;
    uint32_t turn = 0;

    if (step == 0) {
        TD_LOG_ERROR("matrix too wide", "inputs=%u", plan.inputs);
        return TD_ERR_UNSUPPORTED;
    }
    TD_ASSERT(outputs.begin % TD_CUDA_PAIR == 0 || outputs.begin == outputs.end);
    plan.outputs = td_cuda_width(outputs);
    pairs = td_cuda_pairs(&plan);
    TD_TRY(td_cuda_take(rank, pairs * plan.pair_bytes, "weights", &bytes));
    for (uint32_t begin = 0; begin < pairs; begin += step, turn ^= 1) {
        const uint32_t end = TD_MIN(begin + step, pairs);
        TD_TRY(td_cuda_check(cudaEventSynchronize(rank->staged[turn]), "cudaEventSynchronize"));
        td_cuda_pack_pairs(matrix, &plan, first + begin, first + end, rank->staging[turn]);
        TD_TRY(td_cuda_check(cudaMemcpyAsync(bytes + begin * plan.pair_bytes, rank->staging[turn],
                                             (end - begin) * plan.pair_bytes,
                                             cudaMemcpyHostToDevice, rank->compute),
                             "cudaMemcpyAsync"));
        TD_TRY(
            td_cuda_check(cudaEventRecord(rank->staged[turn], rank->compute), "cudaEventRecord"));
    }
    plan.bytes = bytes;
    *out = plan;
    /* The next matrix begins with the first buffer again. */
    return td_cuda_check(cudaStreamSynchronize(rank->compute), "cudaStreamSynchronize");
}

static td_status_t load_vector(td_cuda_rank_t *rank, const float *values, uint32_t count,
                               const float **out)
{
    float *bytes = NULL;

    TD_TRY(take_floats(rank, 1, count, &bytes));
    TD_TRY(td_cuda_check(cudaMemcpyAsync(bytes, values, count * sizeof(*bytes),
                                         cudaMemcpyHostToDevice, rank->compute),
                         "cudaMemcpyAsync"));
    *out = bytes;
    return td_cuda_check(cudaStreamSynchronize(rank->compute), "cudaStreamSynchronize");
}

static td_cuda_range_t times(td_cuda_range_t heads, uint32_t head_dim)
{
    return (td_cuda_range_t){heads.begin * head_dim, heads.end * head_dim};
}

td_status_t td_cuda_rank_load(td_cuda_rank_t *rank, const td_model_t *m, uint32_t layer)
{
    const td_cuda_share_t *share = &rank->share;
    const uint32_t head_dim = m->info.kv.head_dim;

    TD_TRY(td_cuda_rank_choose(rank));
    if (layer == TD_KV_LAYERS_MAX) {
        TD_TRY(load_matrix(rank, &m->embed, share->vocab, &rank->embed));
        rank->head = rank->embed;
        if (m->head != &m->embed) {
            TD_TRY(load_matrix(rank, m->head, share->vocab, &rank->head));
        }
        return load_vector(rank, m->output_norm, m->info.embed_dim, &rank->output_norm);
    }
    const td_model_layer_t *from = &m->layers[layer];
    td_cuda_layer_t *to = &rank->layers[layer];
    TD_TRY(load_matrix(rank, &from->q, times(share->heads, head_dim), &to->q));
    TD_TRY(load_matrix(rank, &from->k, times(share->kv_heads, head_dim), &to->k));
    TD_TRY(load_matrix(rank, &from->v, times(share->kv_heads, head_dim), &to->v));
    TD_TRY(load_matrix(rank, &from->o, share->embed, &to->o));
    TD_TRY(load_matrix(rank, &from->gate, share->ff, &to->gate));
    TD_TRY(load_matrix(rank, &from->up, share->ff, &to->up));
    TD_TRY(load_matrix(rank, &from->down, share->embed, &to->down));
    TD_TRY(load_vector(rank, from->attn_norm, m->info.embed_dim, &to->attn_norm));
    return load_vector(rank, from->ffn_norm, m->info.embed_dim, &to->ffn_norm);
}

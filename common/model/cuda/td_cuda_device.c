/* The backend: opening a device, its memory and weights, and passes over it. */
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
    return td_cuda_launch_init(m->info.kv.head_dim, m->info.embed_dim);
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
        (void)cudaGetLastError(); /* slower, nothing else */
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
    size_t bytes = 0;

    (void)cudaSetDevice(d->index);
    td_cuda_graphs_clear(&d->graphs); /* they have the pool's address */
    if (d->registered != NULL) {
        (void)cudaHostUnregister(d->registered);
    }
    d->registered = NULL;
    d->mapped = NULL;
    if (pool == NULL) {
        return;
    }
    bytes = td_pool_counts(pool).total * td_pool_block_bytes(pool);
    if (cudaHostRegister(td_pool_base(pool), bytes, cudaHostRegisterMapped) != cudaSuccess) {
        TD_LOG_WARN("kv memory not mapped into the device: blocks are copied behind each pass",
                    "bytes=%zu error=%s", bytes, cudaGetErrorName(cudaGetLastError()));
        return;
    }
    d->registered = td_pool_base(pool);
    if (cudaHostGetDevicePointer(&address, d->registered, 0) == cudaSuccess) {
        d->mapped = address;
    }
}

static void device_changed(td_model_device_t *d, uint32_t block)
{
    td_cuda_mirror_forget(d->mirror, block);
}

/* --- a pass ----------------------------------------------------------------------------------- */

td_cuda_acts_t td_cuda_acts_of(const td_cuda_acts_t *buffer, uint32_t dim)
{
    const uint32_t step = TD_CUDA_CHUNK * TD_CUDA_GROUP;
    td_cuda_acts_t acts = *buffer;

    acts.stride = (dim + step - 1) / step * step;
    return acts;
}

/* What the products of these matrices read. */
td_cuda_quantise_t td_cuda_quantise_for(const td_model_device_t *d, const td_model_t *m,
                                        uint32_t dim, const td_cuda_matrix_t *const *users,
                                        size_t count)
{
    td_cuda_quantise_t to = {.limit16 = m->limit16};

    for (size_t i = 0; i < count; i++) {
        if (users[i]->form > TD_CUDA_BYTE) {
            continue;
        }
        if (users[i]->wide) {
            to.int16 = td_cuda_acts_of(&d->acts16, dim);
        } else {
            to.int8 = td_cuda_acts_of(&d->acts8, dim);
        }
    }
    return to;
}

/* Products that read the same rows: one launch for each run of matrices of one form. */
static td_status_t products(const td_model_device_t *d, const td_cuda_matrix_t *const *matrices,
                            float *const *y, size_t count, const float *f32, uint32_t rows)
{
    for (size_t begin = 0; begin < count;) {
        td_cuda_product_t p = {.rows = rows, .f32 = f32, .f32_stride = matrices[begin]->inputs};
        p.acts = td_cuda_acts_of(matrices[begin]->wide ? &d->acts16 : &d->acts8,
                                 matrices[begin]->inputs);
        while (begin < count && p.count < TD_CUDA_PRODUCTS_MAX &&
               (p.count == 0 ||
                (matrices[begin]->form == p.w[0].form && matrices[begin]->wide == p.w[0].wide))) {
            p.w[p.count] = *matrices[begin];
            p.y[p.count++] = y[begin++];
        }
        TD_TRY(td_cuda_launch_product(d->compute, &p));
    }
    return TD_OK;
}

static td_status_t norm(const td_model_device_t *d, const td_model_t *m, const float *weight,
                        bool add, const td_cuda_matrix_t *const *users, size_t count)
{
    const td_cuda_norm_t p = {
        .x = d->x,
        .y = add ? d->y : NULL,
        .weight = weight,
        .out = d->normed,
        .dim = m->info.embed_dim,
        .eps = m->norm_eps,
        .quantise = td_cuda_quantise_for(d, m, m->info.embed_dim, users, count),
    };
    return td_cuda_launch_norm(d->compute, &p, m->pass.row_count);
}

static td_status_t attend(const td_model_device_t *d, const td_model_t *m, uint32_t layer)
{
    const td_attention_mask_t *mask = &m->info.attention;
    const td_cuda_matrix_t *const o[] = {&d->layers[layer].o};
    td_cuda_attention_t p = {
        .kv = td_cuda_kv_of(&m->info.kv, d->pool),
        .mask = {(uint32_t)mask->kind, mask->local, mask->sinks, mask->stride, mask->summary},
        .tables = d->device.tables,
        .q = d->q,
        .out = d->attn,
        .parts = d->split ? d->parts : NULL,
        .layer = layer,
        .heads = m->info.heads,
        .group = m->info.heads / m->info.kv.kv_heads,
        .scale = m->attn_scale,
    };
    const td_cuda_merge_t merge = {
        .parts = p.parts,
        .part_begin = d->device.part_begin,
        .part_count = d->device.part_count,
        .attn = d->attn,
        .heads = m->info.heads,
        .head_dim = m->info.kv.head_dim,
        .quantise = td_cuda_quantise_for(d, m, m->q_dim, o, 1),
    };

    p.items = d->device.many;
    TD_TRY(td_cuda_launch_attention(d->compute, true, &p, d->many_count));
    p.items = d->device.few;
    TD_TRY(td_cuda_launch_attention(d->compute, false, &p, d->few_count));
    return td_cuda_launch_merge(d->compute, &merge, m->pass.row_count);
}

static td_status_t attention_block(const td_model_device_t *d, const td_model_t *m, uint32_t layer)
{
    const td_cuda_layer_t *l = &d->layers[layer];
    const td_cuda_matrix_t *const qkv[] = {&l->q, &l->k, &l->v};
    const td_cuda_matrix_t *const o[] = {&l->o};
    float *const out[] = {d->q, d->k, d->v};
    float *const y[] = {d->y};
    const td_cuda_place_t place = {
        .kv = td_cuda_kv_of(&m->info.kv, d->pool),
        .q = d->q,
        .k = d->k,
        .v = d->v,
        .rope = d->device.rope,
        .slot = d->device.slots,
        .blocks = d->device.blocks,
        .blocks_begin = d->device.blocks_begin,
        .host_pool = d->mapped,
        .host_blocks = d->device.host_blocks,
        .layer = layer,
        .heads = m->info.heads,
        .rope_dim = m->rope_dim,
    };

    TD_TRY(norm(d, m, l->attn_norm, layer > 0, qkv, TD_ARRAY_LEN(qkv)));
    TD_TRY(products(d, qkv, out, TD_ARRAY_LEN(qkv), d->normed, m->pass.row_count));
    TD_TRY(td_cuda_launch_place(d->compute, &place, m->pass.row_count));
    TD_TRY(attend(d, m, layer));
    return products(d, o, y, 1, d->attn, m->pass.row_count);
}

static td_status_t feed_forward_block(const td_model_device_t *d, const td_model_t *m,
                                      uint32_t layer)
{
    const td_cuda_layer_t *l = &d->layers[layer];
    const td_cuda_matrix_t *const users[] = {&l->gate, &l->up};
    const td_cuda_matrix_t *const down[] = {&l->down};
    float *const out[] = {d->gate, d->up};
    float *const y[] = {d->y};
    const td_cuda_swiglu_t swiglu = {
        .gate = d->gate,
        .up = d->up,
        .dim = m->info.ff_dim,
        .quantise = td_cuda_quantise_for(d, m, m->info.ff_dim, down, 1),
    };

    TD_TRY(norm(d, m, l->ffn_norm, true, users, TD_ARRAY_LEN(users)));
    TD_TRY(products(d, users, out, TD_ARRAY_LEN(users), d->normed, m->pass.row_count));
    TD_TRY(td_cuda_launch_swiglu(d->compute, &swiglu, m->pass.row_count));
    return products(d, down, y, 1, d->gate, m->pass.row_count);
}

static td_status_t output_head(const td_model_device_t *d, const td_model_t *m)
{
    const td_cuda_matrix_t *const head[] = {&d->head};
    float *const logits[] = {d->logits};
    const uint32_t count = m->pass.logit_count;
    const td_cuda_norm_t p = {
        .x = d->x,
        .y = d->y,
        .weight = d->output_norm,
        .pick = d->device.pick,
        .out = d->normed,
        .dim = m->info.embed_dim,
        .eps = m->norm_eps,
        .quantise = td_cuda_quantise_for(d, m, m->info.embed_dim, head, 1),
    };

    if (count == 0) {
        return TD_OK;
    }
    TD_TRY(td_cuda_launch_norm(d->compute, &p, count));
    TD_TRY(products(d, head, logits, 1, d->normed, count));
    TD_TRY(td_cuda_check(cudaMemcpyAsync(m->normed, d->normed,
                                         (size_t)count * m->info.embed_dim * sizeof(*m->normed),
                                         cudaMemcpyDeviceToHost, d->compute),
                         "cudaMemcpyAsync"));
    return td_cuda_check(cudaMemcpyAsync(m->logits, d->logits,
                                         (size_t)count * m->info.vocab_size * sizeof(*m->logits),
                                         cudaMemcpyDeviceToHost, d->compute),
                         "cudaMemcpyAsync");
}

/* Layers [begin, end) of the blocks that the pass writes, to the host, once they are computed.
 * Where kernels write the host's blocks themselves they are there already. */
static td_status_t send_layers(td_model_device_t *d, const td_model_t *m, uint32_t begin,
                               uint32_t end, uint32_t turn)
{
    const size_t block_bytes = td_kv_block_bytes(&m->info.kv);
    const size_t layer_bytes = td_kv_layer_bytes(&m->info.kv);
    const uint32_t *blocks = d->host.host_blocks;

    TD_TRY(td_cuda_check(cudaEventRecord(d->computed[turn], d->compute), "cudaEventRecord"));
    TD_TRY(td_cuda_check(cudaStreamWaitEvent(d->out, d->computed[turn], 0), "cudaStreamWaitEvent"));
    for (uint32_t i = 0; d->mapped == NULL && i < d->written_count; i++) {
        if (i + 1 < d->written_count && blocks[i] == blocks[i + 1]) {
            continue; /* rows of a block follow each other: it is sent with the last one */
        }
        TD_TRY(td_cuda_check(
            cudaMemcpyAsync(m->pass.pool + blocks[i] * block_bytes + begin * layer_bytes,
                            d->pool + d->host.blocks[i] * block_bytes + begin * layer_bytes,
                            (end - begin) * layer_bytes, cudaMemcpyDeviceToHost, d->out),
            "cudaMemcpyAsync"));
    }
    return td_cuda_check(cudaEventRecord(d->left[turn], d->out), "cudaEventRecord");
}

static td_status_t report_layers(const td_model_device_t *d, const td_model_t *m, uint32_t begin,
                                 uint32_t end, uint32_t turn)
{
    TD_TRY(td_cuda_check(cudaEventSynchronize(d->left[turn]), "cudaEventSynchronize"));
    if (m->pass.on_layers != NULL) {
        m->pass.on_layers(m->pass.ctx, begin, end);
    }
    return TD_OK;
}

/* A device and the model that it runs a pass of. */
typedef struct pass_launch {
    td_model_device_t *d;
    const td_model_t *m;
} pass_launch_t;

/* The kernels of a whole pass, and what it hands out. */
static td_status_t launch_pass(void *ctx)
{
    const pass_launch_t *p = ctx;
    const td_cuda_embed_t embed = {.w = p->d->embed, .tokens = p->d->device.tokens, .x = p->d->x};

    TD_TRY(td_cuda_launch_embed(p->d->compute, &embed, p->m->pass.row_count));
    for (uint32_t layer = 0; layer < p->m->pass.layers; layer++) {
        TD_TRY(attention_block(p->d, p->m, layer));
        TD_TRY(feed_forward_block(p->d, p->m, layer));
    }
    return output_head(p->d, p->m);
}

/* Nobody waits for layers, and nothing is copied behind them: all of it at once. */
static bool is_kept(const td_model_device_t *d, const td_model_t *m)
{
    return m->pass.on_layers == NULL && d->mapped != NULL && d->pinned[0] != NULL &&
           d->pinned[1] != NULL && m->pass.row_count <= TD_CUDA_GRAPH_ROWS_MAX;
}

/* A step of layers after the other; what is announced of one leaves while the next is computed. */
static td_status_t run_steps(td_model_device_t *d, const td_model_t *m)
{
    const td_model_pass_t *p = &m->pass;
    const uint32_t step = p->layers_step == 0 ? p->layers : p->layers_step;
    const td_cuda_embed_t embed = {.w = d->embed, .tokens = d->device.tokens, .x = d->x};
    uint32_t turn = 0;
    uint32_t begin = 0;

    TD_TRY(td_cuda_launch_embed(d->compute, &embed, p->row_count));
    for (; begin < p->layers; begin += step, turn ^= 1) {
        const uint32_t end = TD_MIN(begin + step, p->layers);
        for (uint32_t layer = begin; layer < end; layer++) {
            TD_TRY(attention_block(d, m, layer));
            TD_TRY(feed_forward_block(d, m, layer));
        }
        TD_TRY(send_layers(d, m, begin, end, turn));
        if (begin > 0) {
            TD_TRY(report_layers(d, m, begin - step, begin, turn ^ 1));
        }
    }
    TD_TRY(output_head(d, m));
    return report_layers(d, m, begin - step, p->layers, turn ^ 1);
}

static td_status_t run_pass(td_model_device_t *d, const td_model_t *m)
{
    /* The tables are last: only what there is of them. */
    const size_t bytes = (size_t)((uint8_t *)(d->host.tables + d->table_count) - d->pass_host);
    const td_cuda_shape_t shape = {
        .rows = m->pass.row_count,
        .few_items = d->few_count,
        .many_items = d->many_count,
        .logit_rows = m->pass.logit_count,
        .layers = m->pass.layers,
        .split = d->split ? 1 : 0,
    };
    pass_launch_t launch = {d, m};

    TD_TRY(td_cuda_check(
        cudaMemcpyAsync(d->pass_device, d->pass_host, bytes, cudaMemcpyHostToDevice, d->compute),
        "cudaMemcpyAsync"));
    TD_TRY(is_kept(d, m) ? td_cuda_graphs_run(&d->graphs, d->compute, &shape, launch_pass, &launch)
                         : run_steps(d, m));
    return td_cuda_check(cudaStreamSynchronize(d->compute), "cudaStreamSynchronize");
}

static td_status_t device_forward(td_model_device_t *d, td_model_t *m)
{
    td_status_t status = TD_OK;

    /* Each thread of a process chooses its device anew. */
    TD_TRY(td_cuda_check(cudaSetDevice(d->index), "cudaSetDevice"));
    status = td_cuda_plan(d, m);
    if (status == TD_OK) {
        status = run_pass(d, m);
    }
    if (status != TD_OK) {
        /* What was under way is let end, and no copy is trusted. */
        (void)cudaStreamSynchronize(d->compute);
        (void)cudaStreamSynchronize(d->out);
        td_cuda_mirror_forget_all(d->mirror);
    }
    return status;
}

const td_model_device_ops_t td_cuda_device_ops = {
    .name = "cuda",
    .create = device_create,
    .load = device_load,
    .start = device_start,
    .forward = device_forward,
    .changed = device_changed,
    .use_pool = device_use_pool,
    .destroy = device_destroy,
};

#include <math.h>

#include "common/base/td_base.h"
#include "common/base/td_log.h"
#include "common/model/cuda/td_cuda_device.h"

/* More than one tile of rows of the products for few and of those for many, where the pass's
 * buffers have so many. */
static const uint32_t row_counts[] = {12, 40};

/* Rows of the CPU; what the device computes is compared with them. */
typedef struct rows {
    uint32_t count;
    float *x;      /* [row][embed_dim] */
    float *normed; /* as x */
    float *gate;   /* [row][ff_dim] */
    float *up;     /* as gate */
    float *got;    /* [row][ff_dim or embed_dim] */
    td_cpu_acts_t acts;
    td_cpu_scratch_t *scratch;
} rows_t;

static td_status_t rows_init(rows_t *r, const td_model_t *m, uint32_t wanted)
{
    const size_t count = TD_MIN(TD_MIN(wanted, m->options.rows_max), m->info.vocab_size);
    const size_t dim = m->info.embed_dim;
    const size_t ff = m->info.ff_dim;
    const size_t groups = (dim + TD_CPU_GROUP - 1) / TD_CPU_GROUP;

    *r = (rows_t){.count = (uint32_t)count};
    r->x = td_calloc(count * dim, sizeof(float));
    r->normed = td_calloc(count * dim, sizeof(float));
    r->gate = td_calloc(count * ff, sizeof(float));
    r->up = td_calloc(count * ff, sizeof(float));
    r->got = td_calloc(count * TD_MAX(dim, ff), sizeof(float));
    r->acts.q8 = td_calloc(count * dim, sizeof(int8_t));
    r->acts.q16 = td_calloc(count * dim, sizeof(int16_t));
    r->acts.scale8 = td_calloc(count * groups, sizeof(float));
    r->acts.sum8 = td_calloc(count * groups, sizeof(float));
    r->acts.scale16 = td_calloc(count * groups, sizeof(float));
    r->acts.sum16 = td_calloc(count * groups, sizeof(float));
    r->acts.f32 = r->normed;
    if (r->x == NULL || r->normed == NULL || r->gate == NULL || r->up == NULL || r->got == NULL ||
        r->acts.q8 == NULL || r->acts.q16 == NULL || r->acts.scale8 == NULL ||
        r->acts.sum8 == NULL || r->acts.scale16 == NULL || r->acts.sum16 == NULL) {
        TD_LOG_ERROR("no memory for the device's self-test", "rows=%u", r->count);
        return TD_ERR_NO_MEMORY;
    }
    return td_cpu_scratch_create(m->info.kv.head_dim, m->info.heads / m->info.kv.kv_heads,
                                 m->info.embed_dim, &r->scratch);
}

static void rows_fini(rows_t *r)
{
    void *const owned[] = {r->x,         r->normed,     r->gate,         r->up,
                           r->got,       r->acts.q8,    r->acts.q16,     r->acts.scale8,
                           r->acts.sum8, r->acts.sum16, r->acts.scale16, r->scratch};

    for (size_t i = 0; i < TD_ARRAY_LEN(owned); i++) {
        td_free(owned[i]);
    }
}

/* Embedding, norm, gate and up with SwiGLU: of tokens spread over the vocabulary. */
static void compute_here(rows_t *r, const td_model_t *m, const uint32_t *tokens)
{
    const td_model_layer_t *l = &m->layers[0];
    const uint32_t dim = m->info.embed_dim;
    const size_t groups = dim / TD_CPU_GROUP;

    for (size_t i = 0; i < r->count; i++) {
        td_cpu_unpack_row(&m->embed, tokens[i], r->x + i * dim);
        m->ops->rms_norm(r->x + i * dim, l->ffn_norm, dim, m->norm_eps, r->normed + i * dim);
        if (dim % TD_CPU_GROUP == 0) {
            m->ops->quantise8(r->normed + i * dim, dim, r->acts.q8 + i * dim,
                              r->acts.scale8 + i * groups, r->acts.sum8 + i * groups);
            m->ops->quantise16(r->normed + i * dim, dim, m->limit16, r->acts.q16 + i * dim,
                               r->acts.scale16 + i * groups, r->acts.sum16 + i * groups);
        }
    }
    m->ops->product(&l->gate, &r->acts, r->count, r->gate, 0, l->gate.panels, r->scratch);
    m->ops->product(&l->up, &r->acts, r->count, r->up, 0, l->up.panels, r->scratch);
    m->ops->swiglu(r->gate, r->up, r->count * m->info.ff_dim);
}

static td_status_t upload(const td_cuda_rank_t *rank, void *to, const void *from, size_t bytes)
{
    return td_cuda_check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, rank->compute),
                         "cudaMemcpyAsync");
}

/* The rank's share of it: its part of the vocabulary (the CPU's embeddings of other tokens are sent
 * there), all of the norm, and its elements of the feed-forward. */
static td_status_t compute_there(const td_cuda_rank_t *rank, const td_model_t *m, const rows_t *r,
                                 const uint32_t *tokens)
{
    const td_cuda_layer_t *l = &rank->layers[0];
    const td_cuda_matrix_t *const users[] = {&l->gate, &l->up};
    float *const outputs[] = {rank->gate, rank->up};
    const uint32_t dim = m->info.embed_dim;
    const td_cuda_embed_t embed = {.w = rank->embed,
                                   .first = rank->share.vocab.begin,
                                   .tokens = rank->pass.tokens,
                                   .x = rank->x};
    const td_cuda_norm_t norm = {
        .x = rank->x,
        .weight = l->ffn_norm,
        .out = rank->normed,
        .dim = dim,
        .eps = m->norm_eps,
        .quantise = td_cuda_quantise_for(rank, m, dim, users, TD_ARRAY_LEN(users)),
    };
    const td_cuda_swiglu_t swiglu = {
        .gate = rank->gate, .up = rank->up, .dim = td_cuda_width(rank->share.ff)};

    TD_TRY(upload(rank, rank->x, r->x, r->count * dim * sizeof(float)));
    for (uint32_t i = 0; i < r->count; i++) {
        const bool own = tokens[i] >= rank->share.vocab.begin && tokens[i] < rank->share.vocab.end;
        if (own) { /* NaN, unless the kernel writes it */
            TD_TRY(td_cuda_check(cudaMemsetAsync(rank->x + (size_t)i * dim, 0xff,
                                                 dim * sizeof(float), rank->compute),
                                 "cudaMemsetAsync"));
        }
    }
    TD_TRY(upload(rank, rank->pass.tokens, tokens, r->count * sizeof(*tokens)));
    TD_TRY(td_cuda_launch_embed(rank->compute, &embed, r->count));
    TD_TRY(td_cuda_launch_norm(rank->compute, &norm, r->count));
    for (size_t i = 0; i < TD_ARRAY_LEN(users); i++) {
        const td_cuda_product_t p = {
            .w = {*users[i]},
            .y = {outputs[i]},
            .count = 1,
            .rows = r->count,
            .acts = td_cuda_acts_of(users[i]->wide ? &rank->acts16 : &rank->acts8, dim),
            .f32 = rank->normed,
            .f32_stride = dim,
        };
        TD_TRY(td_cuda_launch_product(rank->compute, &p));
    }
    return td_cuda_launch_swiglu(rank->compute, &swiglu, r->count);
}

/* Columns of the CPU's rows, which are `stride` wide. */
static td_status_t compare(const td_cuda_rank_t *rank, rows_t *r, const float *there,
                           const float *here, td_cuda_range_t columns, size_t stride,
                           const char *what)
{
    const size_t width = td_cuda_width(columns);

    if (width == 0) {
        return TD_OK;
    }
    TD_TRY(td_cuda_check(cudaMemcpyAsync(r->got, there, r->count * width * sizeof(float),
                                         cudaMemcpyDeviceToHost, rank->compute),
                         "cudaMemcpyAsync"));
    TD_TRY(td_cuda_check(cudaStreamSynchronize(rank->compute), "cudaStreamSynchronize"));
    for (size_t i = 0; i < r->count * width; i++) {
        const float *const got = &r->got[i];
        const float *const want = &here[i / width * stride + columns.begin + i % width];
        if (memcmp(got, want, sizeof(*got)) != 0 && !(isnan(*got) && isnan(*want))) {
            TD_LOG_ERROR("device does not compute the bits of the CPU",
                         "device=%d operation=%s row=%zu element=%zu device_value=%.9g cpu=%.9g",
                         rank->index, what, i / width, columns.begin + i % width, (double)*got,
                         (double)*want);
            return TD_ERR_UNSUPPORTED;
        }
    }
    return TD_OK;
}

/* --- what the ranks get of each other ----------------------------------------------------------
 */

static td_status_t nothing(const td_model_device_t *d, td_cuda_rank_t *rank, const td_model_t *m,
                           uint32_t layer)
{
    (void)d;
    (void)rank;
    (void)m;
    (void)layer;
    return TD_OK;
}

/* Here the layer is a number of rows. */
static td_status_t gather(const td_model_device_t *d, td_cuda_rank_t *rank, const td_model_t *m,
                          uint32_t rows)
{
    return td_cuda_gather_rows(d, rank, m, TD_CUDA_GATED, rows, rank->gate_all, NULL);
}

static td_status_t test_gather(td_model_device_t *d, const td_model_t *m, rows_t *r)
{
    const td_cuda_range_t all = {0, m->info.ff_dim};

    d->phases = 0;
    TD_TRY(td_cuda_phase(d, m, nothing, 0)); /* behind what each has computed */
    TD_TRY(td_cuda_phase(d, m, gather, r->count));
    for (uint32_t i = 0; i < d->rank_count; i++) {
        TD_TRY(compare(&d->ranks[i], r, d->ranks[i].gate_all, r->gate, all, m->info.ff_dim,
                       "gathering"));
    }
    return TD_OK;
}

/* --- all of it -------------------------------------------------------------------------------- */

static td_status_t test_rank(const td_cuda_rank_t *rank, const td_model_t *m, rows_t *r,
                             const uint32_t *tokens)
{
    const uint32_t dim = m->info.embed_dim;
    const td_cuda_range_t all = {0, dim};

    TD_TRY(td_cuda_rank_choose(rank));
    TD_TRY(compute_there(rank, m, r, tokens));
    TD_TRY(compare(rank, r, rank->x, r->x, all, dim, "embedding"));
    TD_TRY(compare(rank, r, rank->normed, r->normed, all, dim, "norm"));
    return compare(rank, r, rank->gate, r->gate, rank->share.ff, m->info.ff_dim,
                   "product and swiglu");
}

static td_status_t test_rows(td_model_device_t *d, const td_model_t *m, uint32_t wanted)
{
    td_status_t status = TD_OK;
    rows_t r;

    status = rows_init(&r, m, wanted);
    if (status != TD_OK) {
        goto done;
    }
    for (uint32_t i = 0; i < r.count; i++) {
        d->host.tokens[i] = (uint32_t)((uint64_t)i * (m->info.vocab_size - 1) / r.count);
    }
    compute_here(&r, m, d->host.tokens);
    for (uint32_t i = 0; status == TD_OK && i < d->rank_count; i++) {
        status = test_rank(&d->ranks[i], m, &r, d->host.tokens);
    }
    if (status == TD_OK && d->rank_count > 1) {
        status = test_gather(d, m, &r);
    }

done:
    rows_fini(&r);
    return status;
}

td_status_t td_cuda_self_test(td_model_device_t *d, const td_model_t *m)
{
    for (size_t i = 0; i < TD_ARRAY_LEN(row_counts); i++) {
        TD_TRY(test_rows(d, m, row_counts[i]));
    }
    return TD_OK;
}

/* The network of the heads before the first batch: its memory, its shortlist, and weights that
 * change nothing yet. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_log.h"
#include "decode_node/train_heads_internal.h"

#define DIMS_SAMPLED 4096u

/* --- memory ----------------------------------------------------------------------------------- */

static td_status_t take(size_t rows, size_t width, size_t bytes, void *out)
{
    size_t count = 0;
    size_t all = 0;
    void *ptr = NULL;

    if (!td_size_mul(rows, width, &count) || !td_size_mul(count, bytes, &all)) {
        return TD_ERR_INVALID;
    }
    ptr = td_alloc_aligned(TD_CACHE_LINE_BYTES, TD_MAX(all, 1u)); /* as the kernels want it */
    if (ptr == NULL) {
        TD_LOG_ERROR("no memory to train with", "bytes=%zu", all);
        return TD_ERR_NO_MEMORY;
    }
    memset(ptr, 0, all);
    memcpy(out, &ptr, sizeof(ptr)); /* the address of a pointer of any type */
    return TD_OK;
}

static td_status_t take_params(train_net_t *n)
{
    n->param_count = (size_t)n->o.hidden_dim * (TD_HEADS_INPUTS * n->dim + 1) +
                     (size_t)n->dim * (n->o.hidden_dim + 1);
    for (size_t i = 0; i < TD_ARRAY_LEN(n->memory); i++) {
        TD_TRY(take(n->param_count, 1, sizeof(float), &n->memory[i]));
    }
    n->w = train_params_in(n, n->memory[0]);
    n->g = train_params_in(n, n->memory[1]);
    return TD_OK;
}

static td_status_t take_buffers(train_net_t *n)
{
    const train_options_t *o = &n->o;
    const size_t f = sizeof(float);
    const size_t positions = (size_t)o->steps * o->batch;
    const size_t inputs = (size_t)TD_HEADS_INPUTS * n->dim;
    const size_t widest = TD_MAX(inputs, o->hidden_dim);
    const size_t listed = TD_MAX(o->candidates, o->shortlist);

    TD_TRY(take(o->shortlist, 1, sizeof(uint32_t), &n->tokens));
    TD_TRY(take(n->vocab, 1, sizeof(uint32_t), &n->place));
    TD_TRY(take(o->shortlist, n->dim, f, &n->head));
    TD_TRY(take(TD_MAX(listed * n->dim, widest * TD_MAX(positions, widest)) + 16 * widest, 1, f,
                &n->packed));
    TD_TRY(take(positions, widest, f, &n->flipped));
    TD_TRY(take(o->batch, 1, sizeof(uint32_t), &n->starts));
    TD_TRY(take(o->candidates, 1, sizeof(uint32_t), &n->candidates));
    TD_TRY(take(o->shortlist, 1, 1, &n->taken));
    TD_TRY(take(o->candidates, n->dim, f, &n->picked_head));
    TD_TRY(take(n->teacher_rows, o->candidates, f, &n->teacher));
    TD_TRY(take(n->teacher_rows, n->dim, f, &n->goals));
    TD_TRY(take(positions, inputs, f, &n->x));
    TD_TRY(take(positions, o->hidden_dim, f, &n->a));
    TD_TRY(take(positions, o->hidden_dim, f, &n->u));
    TD_TRY(take(positions, n->dim, f, &n->z));
    TD_TRY(take(positions, n->dim, f, &n->dz));
    TD_TRY(take(positions, o->hidden_dim, f, &n->da));
    TD_TRY(take(o->batch, n->dim, f, &n->dx));
    TD_TRY(take(o->batch, listed, f, &n->logits));
    TD_TRY(take(o->batch, 1, sizeof(train_loss_t), &n->losses));
    TD_TRY(take(o->batch, 1, sizeof(bool), &n->alive));
    return take(o->threads, 1, sizeof(td_cpu_scratch_t *), &n->scratch);
}

void train_net_destroy(train_net_t *n)
{
    if (n == NULL) {
        return;
    }
    for (size_t i = 0; i < TD_ARRAY_LEN(n->memory); i++) {
        td_free(n->memory[i]);
    }
    for (uint32_t t = 0; n->scratch != NULL && t < n->o.threads; t++) {
        td_free(n->scratch[t]);
    }
    {
        void *const owned[] = {n->tokens, n->place,       n->head,    n->packed, n->flipped,
                               n->starts, n->candidates,  n->taken,   n->x,      n->a,
                               n->u,      n->z,           n->dz,      n->da,     n->dx,
                               n->logits, n->picked_head, n->teacher, n->goals,  n->losses,
                               n->alive,  n->scratch};
        for (size_t i = 0; i < TD_ARRAY_LEN(owned); i++) {
            td_free(owned[i]);
        }
    }
    td_threads_destroy(n->threads);
    td_free(n);
}

/* --- what is known before the first batch ----------------------------------------------------- */

typedef struct count {
    uint32_t token;
    uint32_t times;
} count_t;

static int most_first(const void *a, const void *b)
{
    const count_t *one = a;
    const count_t *other = b;

    if (one->times != other->times) {
        return one->times > other->times ? -1 : 1;
    }
    return one->token < other->token ? -1 : one->token > other->token;
}

/* The tokens that came or would have come most often. */
static td_status_t choose_shortlist(train_net_t *n)
{
    const train_data_t *d = n->data;
    count_t *counts = td_calloc(n->vocab, sizeof(*counts));
    uint32_t listed = 0;

    if (counts == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    for (uint32_t i = 0; i < n->vocab; i++) {
        counts[i].token = i;
        n->place[i] = TRAIN_NOT_LISTED;
    }
    for (uint32_t i = 0; i < d->rows; i++) {
        counts[d->tokens[i]].times++;
        counts[d->best[i]].times++;
    }
    qsort(counts, n->vocab, sizeof(*counts), most_first);
    for (uint32_t i = 0; i < n->o.shortlist; i++) {
        n->place[counts[i].token] = 0;
    }
    td_free(counts);
    for (uint32_t i = 0; i < n->vocab; i++) {
        if (n->place[i] != TRAIN_NOT_LISTED) {
            n->place[i] = listed;
            n->tokens[listed++] = i;
        }
    }
    return TD_OK;
}

/* Of some rows of the data, which are like all others. */
static void measure_scales(train_net_t *n)
{
    const train_data_t *d = n->data;
    const uint32_t rows = TD_MIN(d->rows, DIMS_SAMPLED);
    float *embedding = n->x;
    double states = 0;
    double embeddings = 0;

    for (uint32_t r = 0; r < rows; r++) {
        const size_t row = (size_t)d->rows * r / rows;
        td_model_embedding(n->model, (uint32_t)d->tokens[row], embedding);
        for (uint32_t i = 0; i < n->dim; i++) {
            const double h = (double)train_hidden(d, row, i);
            states += h * h;
            embeddings += (double)embedding[i] * (double)embedding[i];
        }
    }
    n->state_scale = (float)(1 / sqrt(states / ((double)rows * n->dim) + 1e-20));
    n->embed_scale = (float)(1 / sqrt(embeddings / ((double)rows * n->dim) + 1e-20));
}

static void begin_weights(train_net_t *n)
{
    const size_t count = (size_t)n->o.hidden_dim * TD_HEADS_INPUTS * n->dim;
    const float most = sqrtf(3.0f / (float)(TD_HEADS_INPUTS * n->dim)); /* of variance 1 / inputs */

    /* With nothing added at first, a chain's states are the one that it begins with. */
    for (size_t i = 0; i < count; i++) {
        n->w.in_weight[i] = most * ((float)(train_random(~n->o.seed, i) >> 40) * 0x1p-23f - 1);
    }
    for (uint32_t i = 0; i < n->o.shortlist; i++) {
        float *row = n->head + (size_t)i * n->dim;
        td_model_head_row(n->model, n->tokens[i], row);
        for (uint32_t k = 0; k < n->dim; k++) {
            row[k] /= n->state_scale;
        }
    }
}

static bool has_runs(const train_net_t *n)
{
    for (uint32_t i = 0; i < n->data->rows; i++) {
        if (n->data->follow[i] >= (int32_t)(TRAIN_RUN - 1 + n->o.steps)) {
            return true;
        }
    }
    return false;
}

/* The data may come from a file. */
static bool data_is_sound(const train_net_t *n)
{
    const train_data_t *d = n->data;

    for (uint32_t i = 0; i < d->rows; i++) {
        if (d->tokens[i] < 0 || (uint32_t)d->tokens[i] >= n->vocab || d->best[i] < 0 ||
            (uint32_t)d->best[i] >= n->vocab || d->follow[i] < 0 ||
            (uint32_t)d->follow[i] >= d->rows - i) {
            return false;
        }
    }
    return d->embed_dim == n->dim;
}

static td_status_t open_net(train_net_t *n)
{
    TD_TRY(take_params(n));
    TD_TRY(take_buffers(n));
    n->ops = td_cpu_ops_find(TD_CPU_OPS_BEST);
    TD_TRY(td_threads_create(n->o.threads, &n->threads));
    for (uint32_t t = 0; t < n->o.threads; t++) {
        TD_TRY(td_cpu_scratch_create(8, 1, 8, &n->scratch[t])); /* float products need no more */
    }
    TD_TRY(choose_shortlist(n));
    measure_scales(n);
    begin_weights(n);
    return TD_OK;
}

td_status_t train_net_create(const td_model_t *model, const train_data_t *data,
                             const train_options_t *options, train_net_t **out)
{
    const td_model_info_t *info = td_model_info(model);
    train_net_t *n = td_calloc(1, sizeof(*n));
    td_status_t status = TD_ERR_INVALID;

    if (n == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    n->model = model;
    n->data = data;
    n->o = *options;
    n->dim = info->embed_dim;
    n->vocab = info->vocab_size;
    n->o.shortlist = TD_MIN(n->o.shortlist, n->vocab);
    n->o.candidates = TD_MIN(n->o.candidates, n->o.shortlist);
    n->teacher_rows = n->o.batch / TRAIN_RUN * (TRAIN_RUN + n->o.steps);
    if (!data_is_sound(n) || !has_runs(n)) {
        TD_LOG_ERROR("data not fit to train with", "rows=%u expected=\"texts of %u rows and more\"",
                     data->rows, TRAIN_RUN + n->o.steps);
    } else {
        status = open_net(n);
    }
    if (status != TD_OK) {
        train_net_destroy(n);
        return status;
    }
    *out = n;
    return TD_OK;
}

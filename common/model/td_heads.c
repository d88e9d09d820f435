#include "common/model/td_heads.h"

#include <math.h>
#include <sodium.h>
#include <string.h>

#include "common/base/td_arena.h"
#include "common/base/td_base.h"
#include "common/base/td_log.h"
#include "common/model/td_model_internal.h"

#define Q8_0_BYTES 34u /* of 32 weights: f16 scale, int8 */
#define VECTOR 8u      /* dims are multiples: td_cpu_ops.h */

struct td_heads {
    td_model_t *model;
    uint32_t embed_dim;
    uint32_t hidden_dim;
    uint32_t token_count;
    uint32_t rows_max;
    uint32_t *tokens;           /* owned */
    td_arena_t *weights;        /* owned */
    td_cpu_matrix_t in;         /* [hidden_dim][3 * embed_dim] */
    td_cpu_matrix_t out;        /* [embed_dim][hidden_dim] */
    td_cpu_matrix_t head;       /* [token_count][embed_dim] */
    float *in_bias;             /* owned */
    float *out_bias;            /* owned */
    float *ones;                /* owned, [hidden_dim]: the gate is let through */
    float *x;                   /* owned, [row][3 * embed_dim] */
    float *u;                   /* owned, [row][hidden_dim] */
    float *y;                   /* owned, [row][embed_dim]: what is added, then the states */
    float *logits;              /* owned, [row][token_count] */
    td_cpu_acts_t acts;         /* owned; of the widest input, 8-bit forms unused */
    td_cpu_scratch_t **scratch; /* owned, [threads] */
    const td_heads_row_t *rows; /* borrowed: of the step */
    uint32_t row_count;
};

/* --- file ------------------------------------------------------------------------------------- */

static td_status_t bad(const char *what)
{
    TD_LOG_ERROR("heads file not usable", "why=\"%s\"", what);
    return TD_ERR_INVALID;
}

static uint32_t token_of(const td_heads_file_t *f, uint32_t i)
{
    uint32_t token = 0;
    memcpy(&token, (const uint8_t *)f->tokens->bytes + 4 * (size_t)i, sizeof(token));
    return token;
}

static td_status_t check_values(const td_safetensor_t *t)
{
    for (size_t i = 0; i < t->byte_count / sizeof(float); i++) {
        float value = 0;
        memcpy(&value, (const uint8_t *)t->bytes + i * sizeof(value), sizeof(value));
        if (!isfinite(value)) {
            return bad("a weight is no number");
        }
    }
    return TD_OK;
}

static td_status_t read_metadata(const td_safetensors_t *file, td_heads_file_t *out)
{
    const char *format = td_safetensors_text(file, TD_HEADS_FORMAT_KEY);
    const char *print = td_safetensors_text(file, TD_HEADS_FINGERPRINT_KEY);
    size_t len = 0;

    if (format == NULL || strcmp(format, TD_HEADS_FORMAT) != 0) {
        return bad("its format is not " TD_HEADS_FORMAT);
    }
    if (print == NULL || strlen(print) != 2 * sizeof(out->fingerprint) ||
        sodium_hex2bin(out->fingerprint, sizeof(out->fingerprint), print, strlen(print), NULL, &len,
                       NULL) != 0 ||
        len != sizeof(out->fingerprint)) {
        return bad("model_fingerprint is no 64 hexadecimal digits");
    }
    return TD_OK;
}

td_status_t td_heads_read(const td_safetensors_t *file, td_heads_file_t *out)
{
    td_heads_file_t f = {0};
    uint64_t dims[2] = {0, 0};

    TD_TRY(read_metadata(file, &f));
    TD_TRY(td_safetensors_need(file, "out.weight", TD_SAFETENSORS_F32, dims, 2, &f.out_weight));
    memcpy(dims, f.out_weight->dims, sizeof(dims));
    if (dims[0] == 0 || dims[1] == 0 || dims[0] > TD_HEADS_HIDDEN_MAX ||
        dims[1] > TD_HEADS_HIDDEN_MAX || dims[0] % VECTOR != 0 || dims[1] % VECTOR != 0) {
        return bad("its sizes are not multiples of 8 up to 65536");
    }
    f.embed_dim = (uint32_t)dims[0];
    f.hidden_dim = (uint32_t)dims[1];
    TD_TRY(td_safetensors_need(file, "out.bias", TD_SAFETENSORS_F32, &dims[0], 1, &f.out_bias));
    TD_TRY(td_safetensors_need(file, "in.bias", TD_SAFETENSORS_F32, &dims[1], 1, &f.in_bias));
    dims[0] = f.hidden_dim;
    dims[1] = (uint64_t)TD_HEADS_INPUTS * f.embed_dim;
    TD_TRY(td_safetensors_need(file, "in.weight", TD_SAFETENSORS_F32, dims, 2, &f.in_weight));
    dims[0] = 0;
    TD_TRY(td_safetensors_need(file, "tokens", TD_SAFETENSORS_I32, dims, 1, &f.tokens));
    if (f.tokens->dims[0] == 0 || f.tokens->dims[0] > INT32_MAX) {
        return bad("its shortlist is empty");
    }
    f.token_count = (uint32_t)f.tokens->dims[0];
    for (uint32_t i = 0; i < f.token_count; i++) {
        if (token_of(&f, i) > INT32_MAX || (i > 0 && token_of(&f, i) <= token_of(&f, i - 1))) {
            return bad("its shortlist is not ascending");
        }
    }
    TD_TRY(check_values(f.in_weight));
    TD_TRY(check_values(f.in_bias));
    TD_TRY(check_values(f.out_weight));
    TD_TRY(check_values(f.out_bias));
    *out = f;
    return TD_OK;
}

/* --- loading ---------------------------------------------------------------------------------- */

/* As the file format has it: an int8 for each weight, a scale for each group. */
static void to_q8_0(const float *row, uint32_t inputs, uint8_t *out)
{
    for (uint32_t g = 0; g < inputs; g += TD_CPU_GROUP, out += Q8_0_BYTES) {
        float most = 0;
        uint16_t scale = 0;
        for (uint32_t i = 0; i < TD_CPU_GROUP; i++) {
            most = fmaxf(most, fabsf(row[g + i]));
        }
        scale = td_f16_from_f32(most / TD_CPU_INT8_MAX);
        most = td_f32_from_f16(scale);
        memcpy(out, &scale, sizeof(scale));
        for (uint32_t i = 0; i < TD_CPU_GROUP; i++) {
            const float q = most > 0 ? rintf(row[g + i] / most) : 0;
            const int8_t weight = (int8_t)fmaxf(-TD_CPU_INT8_MAX, fminf(TD_CPU_INT8_MAX, q));
            memcpy(out + 2 + i, &weight, 1);
        }
    }
}

/* Rows come from fill(ctx, row, out). Eight bits are enough to draft with, and read fast. */
static td_status_t pack(td_heads_t *h, uint32_t outputs, uint32_t inputs,
                        void (*fill)(const void *ctx, uint32_t row, float *out), const void *ctx,
                        td_cpu_matrix_t *out)
{
    const bool small = inputs % TD_CPU_GROUP == 0;
    const size_t row_bytes =
        small ? (size_t)inputs / TD_CPU_GROUP * Q8_0_BYTES : inputs * sizeof(float);
    td_gguf_tensor_t tensor = {.name = "heads",
                               .dim_count = 2,
                               .dims = {inputs, outputs, 1, 1},
                               .type = small ? TD_GGUF_Q8_0 : TD_GGUF_F32,
                               .byte_count = row_bytes * outputs};
    uint8_t *bytes = td_alloc(tensor.byte_count);
    float *row = td_calloc(inputs, sizeof(*row));
    td_status_t status = TD_ERR_NO_MEMORY;

    if (bytes != NULL && row != NULL) {
        for (uint32_t i = 0; i < outputs; i++) {
            fill(ctx, i, row);
            if (small) {
                to_q8_0(row, inputs, bytes + i * row_bytes);
            } else {
                memcpy(bytes + i * row_bytes, row, row_bytes);
            }
        }
        tensor.bytes = bytes;
        status = td_cpu_pack(&tensor, false, h->weights, out);
    }
    td_free(row);
    td_free(bytes);
    return status;
}

static void fill_from_tensor(const void *ctx, uint32_t row, float *out)
{
    const td_safetensor_t *t = ctx;
    const size_t bytes = (size_t)t->dims[1] * sizeof(*out);
    memcpy(out, (const uint8_t *)t->bytes + row * bytes, bytes);
}

static void fill_from_head(const void *ctx, uint32_t row, float *out)
{
    const td_heads_t *h = ctx;
    td_model_head_row(h->model, h->tokens[row], out);
}

static td_status_t take(size_t rows, size_t width, float **out)
{
    *out = td_alloc_aligned(TD_CACHE_LINE_BYTES, TD_MAX(rows * width, 1u) * sizeof(**out));
    if (*out != NULL) {
        memset(*out, 0, rows * width * sizeof(**out));
    }
    return *out == NULL ? TD_ERR_NO_MEMORY : TD_OK;
}

static td_status_t take_buffers(td_heads_t *h)
{
    const uint32_t rows = h->rows_max;
    const uint32_t inputs = TD_HEADS_INPUTS * h->embed_dim;
    const uint32_t widest = TD_MAX(inputs, h->hidden_dim);
    const uint32_t groups = (widest + TD_CPU_GROUP - 1) / TD_CPU_GROUP;
    const td_model_info_t *info = &h->model->info;
    const uint32_t threads = h->model->options.threads;

    TD_TRY(take(1, h->hidden_dim, &h->in_bias));
    TD_TRY(take(1, h->embed_dim, &h->out_bias));
    TD_TRY(take(1, h->hidden_dim, &h->ones));
    TD_TRY(take(rows, inputs, &h->x));
    TD_TRY(take(rows, h->hidden_dim, &h->u));
    TD_TRY(take(rows, h->embed_dim, &h->y));
    TD_TRY(take(rows, h->token_count, &h->logits));
    TD_TRY(take(rows, groups, &h->acts.scale16));
    TD_TRY(take(rows, groups, &h->acts.sum16));
    h->acts.q16 = td_alloc_aligned(TD_CACHE_LINE_BYTES, (size_t)rows * widest * sizeof(int16_t));
    h->scratch = td_calloc(threads, sizeof(td_cpu_scratch_t *));
    if (h->acts.q16 == NULL || h->scratch == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    for (uint32_t t = 0; t < threads; t++) {
        TD_TRY(td_cpu_scratch_create(info->kv.head_dim, info->heads / info->kv.kv_heads, widest,
                                     &h->scratch[t]));
    }
    return TD_OK;
}

static td_status_t take_weights(td_heads_t *h, const td_heads_file_t *f)
{
    TD_TRY(take_buffers(h));
    memcpy(h->in_bias, f->in_bias->bytes, f->in_bias->byte_count);
    memcpy(h->out_bias, f->out_bias->bytes, f->out_bias->byte_count);
    for (uint32_t i = 0; i < h->hidden_dim; i++) {
        h->ones[i] = 1;
    }
    h->tokens = td_calloc(h->token_count, sizeof(*h->tokens));
    h->weights = td_arena_create();
    if (h->tokens == NULL || h->weights == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    memcpy(h->tokens, f->tokens->bytes, f->tokens->byte_count);
    TD_TRY(pack(h, h->hidden_dim, TD_HEADS_INPUTS * h->embed_dim, fill_from_tensor, f->in_weight,
                &h->in));
    TD_TRY(pack(h, h->embed_dim, h->hidden_dim, fill_from_tensor, f->out_weight, &h->out));
    return pack(h, h->token_count, h->embed_dim, fill_from_head, h, &h->head);
}

static td_status_t check_model(const td_heads_file_t *f, const td_model_info_t *info)
{
    if (memcmp(f->fingerprint, info->fingerprint, sizeof(f->fingerprint)) != 0) {
        return bad("it was made for another model file");
    }
    if (f->embed_dim != info->embed_dim) {
        return bad("the model's hidden states are of another size");
    }
    if (token_of(f, f->token_count - 1) >= info->vocab_size) {
        return bad("its shortlist has tokens that the model lacks");
    }
    return TD_OK;
}

static td_status_t create(const td_heads_file_t *f, td_model_t *model, uint32_t rows_max,
                          td_heads_t **out)
{
    td_heads_t *h = NULL;
    td_status_t status = check_model(f, &model->info);

    if (status != TD_OK) {
        return status;
    }
    h = td_calloc(1, sizeof(*h));
    if (h == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    h->model = model;
    h->embed_dim = f->embed_dim;
    h->hidden_dim = f->hidden_dim;
    h->token_count = f->token_count;
    h->rows_max = rows_max;
    status = take_weights(h, f);
    if (status != TD_OK) {
        td_heads_destroy(h);
        return status;
    }
    *out = h;
    return TD_OK;
}

td_status_t td_heads_load(const char *path, td_model_t *model, uint32_t rows_max, td_heads_t **out)
{
    td_safetensors_t *file = NULL;
    td_heads_file_t f = {0};
    td_status_t status = td_safetensors_open(path, &file);

    if (status != TD_OK) {
        return status;
    }
    status = td_heads_read(file, &f);
    if (status == TD_OK) {
        status = create(&f, model, rows_max, out);
    }
    if (status != TD_OK) {
        TD_LOG_ERROR("heads not loaded", "file=%s status=%s", path, td_status_name(status));
    }
    td_safetensors_close(file);
    return status;
}

void td_heads_destroy(td_heads_t *heads)
{
    if (heads == NULL) {
        return;
    }
    for (uint32_t t = 0; heads->scratch != NULL && t < heads->model->options.threads; t++) {
        td_free(heads->scratch[t]);
    }
    td_free(heads->scratch);
    td_free(heads->acts.q16);
    td_free(heads->acts.scale16);
    td_free(heads->acts.sum16);
    td_free(heads->logits);
    td_free(heads->y);
    td_free(heads->u);
    td_free(heads->x);
    td_free(heads->ones);
    td_free(heads->out_bias);
    td_free(heads->in_bias);
    td_free(heads->tokens);
    td_arena_destroy(heads->weights);
    td_free(heads);
}

const uint32_t *td_heads_tokens(const td_heads_t *heads, uint32_t *count_out)
{
    *count_out = heads->token_count;
    return heads->tokens;
}

/* --- a step ----------------------------------------------------------------------------------- */

/* The rows that this thread prepares. */
typedef struct worker {
    td_heads_t *h;
    uint32_t thread;
    uint32_t threads;
    uint32_t begin;
    uint32_t end;
} worker_t;

static void quantise(const worker_t *w, const td_cpu_matrix_t *user, const float *src)
{
    const td_heads_t *h = w->h;
    const uint32_t dim = user->inputs;

    for (size_t row = w->begin; user->form == TD_CPU_BYTE_A16 && row < w->end; row++) {
        h->model->ops->quantise16(src + row * dim, dim, h->model->limit16, h->acts.q16 + row * dim,
                                  h->acts.scale16 + row * (dim / TD_CPU_GROUP),
                                  h->acts.sum16 + row * (dim / TD_CPU_GROUP));
    }
}

/* Every thread's rows are ready before the first one multiplies, and done before the next writes.
 */
static void product(const worker_t *w, const td_cpu_matrix_t *matrix, float *src, float *y)
{
    const td_heads_t *h = w->h;
    const uint32_t pairs = matrix->panels / 2;
    td_cpu_acts_t acts = h->acts;

    quantise(w, matrix, src);
    td_threads_barrier(h->model->threads, w->thread);
    acts.f32 = src;
    h->model->ops->product(
        matrix, &acts, h->row_count, y, 2 * td_threads_share(pairs, w->thread, w->threads),
        2 * td_threads_share(pairs, w->thread + 1, w->threads), h->scratch[w->thread]);
    td_threads_barrier(h->model->threads, w->thread);
}

static void step_thread(void *ctx, uint32_t thread, uint32_t threads)
{
    td_heads_t *h = ctx;
    const uint32_t dim = h->embed_dim;
    const worker_t w = {.h = h,
                        .thread = thread,
                        .threads = threads,
                        .begin = td_threads_share(h->row_count, thread, threads),
                        .end = td_threads_share(h->row_count, thread + 1, threads)};

    for (size_t i = w.begin; i < w.end; i++) {
        float *x = h->x + i * TD_HEADS_INPUTS * dim;
        memcpy(x, h->rows[i].state, dim * sizeof(*x));
        td_model_embedding(h->model, h->rows[i].newest, x + dim);
        td_model_embedding(h->model, h->rows[i].before, x + 2 * (size_t)dim);
    }
    product(&w, &h->in, h->x, h->u);
    for (size_t i = w.begin; i < w.end; i++) {
        float *u = h->u + i * h->hidden_dim;
        h->model->ops->add(u, h->in_bias, h->hidden_dim);
        h->model->ops->swiglu(u, h->ones, h->hidden_dim);
    }
    product(&w, &h->out, h->u, h->y);
    for (size_t i = w.begin; i < w.end; i++) {
        float *y = h->y + i * dim;
        h->model->ops->add(y, h->out_bias, dim);
        h->model->ops->add(y, h->rows[i].state, dim);
        memcpy(h->rows[i].state, y, dim * sizeof(*y));
    }
    product(&w, &h->head, h->y, h->logits);
}

void td_heads_step(td_heads_t *heads, const td_heads_row_t *rows, uint32_t count,
                   const float **logits_out)
{
    TD_ASSERT(count > 0 && count <= heads->rows_max);
    heads->rows = rows;
    heads->row_count = count;
    td_threads_run(heads->model->threads, step_thread, heads);
    *logits_out = heads->logits;
}

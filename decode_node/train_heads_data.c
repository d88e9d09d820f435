/* Texts of the model's own, many at once: each sequence is a prompt and what the model makes of it;
 * one that ends makes room for the next prompt. */
#include <string.h>
#include <unistd.h>

#include "common/base/td_base.h"
#include "common/base/td_float.h"
#include "common/base/td_log.h"
#include "common/model/td_chat.h"
#include "common/model/td_safetensors.h"
#include "common/model/td_sampler.h"
#include "common/model/td_tokenizer.h"
#include "decode_node/train_heads.h"

#define PROMPT_BYTES_MAX 512u
#define PROMPT_TOKENS_MAX 192u

static const float temperatures[] = {0, 0.5f, 0.8f, 1};

typedef struct sequence {
    td_sampler_t *sampler; /* owned; NULL: the next prompt's turn */
    uint32_t *blocks;      /* borrowed */
    uint32_t position;     /* of the token that goes in next */
    uint32_t token;
    uint32_t count; /* rows so far */
    bool is_chat;   /* ends where the model says so; a plain text goes on */
    int32_t *tokens;
    int32_t *best;
    uint16_t *hidden; /* owned, all three: [tokens_max] rows */
} sequence_t;

typedef struct generator {
    const train_source_t *source;
    const td_model_info_t *info;
    train_data_t *data;
    td_tokenizer_t *tok;  /* owned */
    td_chat_t *chat;      /* owned; NULL: the file has no template */
    uint8_t *pool;        /* owned */
    uint32_t *blocks;     /* owned, [sequence][sequence_blocks] */
    td_model_row_t *rows; /* owned */
    sequence_t *sequences;
    bool held_out;
    uint64_t prompts; /* begun */
} generator_t;

/* --- memory ----------------------------------------------------------------------------------- */

void train_data_fini(train_data_t *data)
{
    td_free(data->tokens);
    td_free(data->best);
    td_free(data->follow);
    td_free(data->hidden);
    *data = (train_data_t){0};
}

static td_status_t data_init(train_data_t *data, uint32_t embed_dim, uint32_t rows_max)
{
    *data = (train_data_t){.embed_dim = embed_dim, .rows_max = rows_max};
    data->tokens = td_calloc(rows_max, sizeof(*data->tokens));
    data->best = td_calloc(rows_max, sizeof(*data->best));
    data->follow = td_calloc(rows_max, sizeof(*data->follow));
    data->hidden = td_alloc_large((size_t)rows_max * embed_dim * sizeof(*data->hidden));
    return data->tokens == NULL || data->best == NULL || data->follow == NULL ||
                   data->hidden == NULL
               ? TD_ERR_NO_MEMORY
               : TD_OK;
}

static td_status_t sequence_init(const generator_t *g, uint32_t index, uint32_t sequence_blocks)
{
    sequence_t *s = &g->sequences[index];
    const uint32_t rows = g->source->tokens_max;

    s->blocks = g->blocks + (size_t)index * sequence_blocks;
    s->tokens = td_calloc(rows, sizeof(*s->tokens));
    s->best = td_calloc(rows, sizeof(*s->best));
    s->hidden = td_calloc((size_t)rows * g->info->embed_dim, sizeof(*s->hidden));
    return s->tokens == NULL || s->best == NULL || s->hidden == NULL ? TD_ERR_NO_MEMORY : TD_OK;
}

static td_status_t take_memory(generator_t *g)
{
    const uint32_t sequences = g->source->sequences;
    const uint32_t each = td_kv_blocks_for(&g->info->kv, PROMPT_TOKENS_MAX + g->source->tokens_max);

    g->pool = td_calloc_large((size_t)sequences * each, td_kv_block_bytes(&g->info->kv));
    g->blocks = td_calloc((size_t)sequences * each, sizeof(*g->blocks));
    g->rows = td_calloc(TD_MAX(sequences, PROMPT_TOKENS_MAX), sizeof(*g->rows));
    g->sequences = td_calloc(sequences, sizeof(*g->sequences));
    if (g->pool == NULL || g->blocks == NULL || g->rows == NULL || g->sequences == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    for (uint32_t i = 0; i < sequences * each; i++) {
        g->blocks[i] = i;
    }
    for (uint32_t i = 0; i < sequences; i++) {
        TD_TRY(sequence_init(g, i, each));
    }
    return TD_OK;
}

static td_status_t open_generator(generator_t *g)
{
    td_status_t status = TD_OK;

    TD_TRY(td_tokenizer_create(g->source->gguf, &g->tok));
    status = td_chat_create(g->source->gguf, &g->chat);
    if (status != TD_OK && status != TD_ERR_NOT_FOUND && status != TD_ERR_UNSUPPORTED) {
        return status;
    }
    return take_memory(g);
}

static void close_generator(generator_t *g)
{
    for (uint32_t i = 0; g->sequences != NULL && i < g->source->sequences; i++) {
        td_sampler_destroy(g->sequences[i].sampler);
        td_free(g->sequences[i].tokens);
        td_free(g->sequences[i].best);
        td_free(g->sequences[i].hidden);
    }
    td_free(g->sequences);
    td_free(g->rows);
    td_free(g->blocks);
    td_free(g->pool);
    td_chat_destroy(g->chat);
    td_tokenizer_destroy(g->tok);
}

/* --- generating ------------------------------------------------------------------------------- */

/* The text is whole: its rows go to the others, as many as are still wanted. */
static void end_sequence(generator_t *g, sequence_t *s)
{
    train_data_t *d = g->data;
    const uint32_t count = TD_MIN(s->count, d->rows_max - d->rows);

    for (uint32_t i = 0; i < count; i++) {
        d->tokens[d->rows + i] = s->tokens[i];
        d->best[d->rows + i] = s->best[i];
        d->follow[d->rows + i] = (int32_t)(count - 1 - i);
    }
    memcpy(d->hidden + (size_t)d->rows * d->embed_dim, s->hidden,
           (size_t)count * d->embed_dim * sizeof(*s->hidden));
    d->rows += count;
    td_sampler_destroy(s->sampler);
    s->sampler = NULL;
    s->count = 0;
    if (g->source->progress != NULL && count > 0) {
        g->source->progress(d->rows, d->rows_max);
    }
}

/* What a pass says of a sequence's row, and the token that follows it. */
static td_status_t take_row(generator_t *g, sequence_t *s, const float *hidden, const float *logits)
{
    const uint32_t dim = g->info->embed_dim;
    td_sampled_t picked;

    TD_TRY(td_sampler_pick(s->sampler, logits, s->position + 1, NULL, 0, false, 0, &picked));
    td_sampler_accept(s->sampler, picked.token);
    s->tokens[s->count] = (int32_t)s->token;
    s->best[s->count] = (int32_t)td_logits_argmax(logits, g->info->vocab_size);
    for (uint32_t i = 0; i < dim; i++) {
        s->hidden[(size_t)s->count * dim + i] = td_f16_from_f32(hidden[i]);
    }
    s->count++;
    s->position++;
    s->token = picked.token;
    if (s->count == g->source->tokens_max ||
        (s->is_chat && td_tokenizer_is_stop(g->tok, picked.token))) {
        end_sequence(g, s);
    }
    return TD_OK;
}

static td_status_t encode(generator_t *g, const char *text, bool is_chat, uint32_t **ids_out,
                          size_t *count_out)
{
    const td_chat_message_t message = {"user", text, strlen(text)};

    if (is_chat && g->chat != NULL) {
        return td_chat_encode(g->chat, g->tok, &message, 1, true, ids_out, count_out);
    }
    return td_tokenizer_encode(g->tok, text, strlen(text), false, ids_out, count_out);
}

static td_status_t begin_sampler(const generator_t *g, sequence_t *s, uint64_t number)
{
    td_sampling_t params;

    td_sampling_init(&params);
    params.temperature =
        g->held_out
            ? 0
            : temperatures[train_random(g->source->seed, ~number) % TD_ARRAY_LEN(temperatures)];
    params.seed = train_random(g->source->seed, number);
    return td_sampler_create(&params, g->info->vocab_size, NULL, 0, &s->sampler);
}

static td_status_t begin_sequence(generator_t *g, sequence_t *s)
{
    const uint64_t number = g->prompts++;
    char text[PROMPT_BYTES_MAX];
    uint32_t *ids = NULL;
    size_t count = 0;
    const float *logits = NULL;
    td_status_t status = TD_OK;

    /* Of what is held out each once; in training every turn another one. */
    train_prompt(
        (uint32_t)(g->held_out ? number * 31 : train_random(~g->source->seed, number) >> 8),
        g->held_out, text, sizeof(text), &s->is_chat);
    TD_TRY(encode(g, text, s->is_chat, &ids, &count));
    count = TD_MIN(count, (size_t)PROMPT_TOKENS_MAX);
    for (uint32_t i = 0; i < count; i++) {
        g->rows[i] = (td_model_row_t){
            .token = ids[i], .position = i, .blocks = s->blocks, .want_logits = i + 1 == count};
    }
    s->position = (uint32_t)count - 1;
    s->token = ids[count - 1];
    td_free(ids);
    status = begin_sampler(g, s, number);
    if (status == TD_OK) {
        status = td_model_forward(g->source->model, g->pool, g->rows, (uint32_t)count, 0, NULL,
                                  NULL, &logits);
    }
    return status != TD_OK ? status : take_row(g, s, td_model_hidden(g->source->model), logits);
}

static td_status_t step(generator_t *g)
{
    const uint32_t sequences = g->source->sequences;
    const float *logits = NULL;
    const float *hidden = NULL;

    for (uint32_t i = 0; i < sequences; i++) {
        while (g->sequences[i].sampler == NULL) { /* one may end with its first token */
            TD_TRY(begin_sequence(g, &g->sequences[i]));
        }
    }
    for (uint32_t i = 0; i < sequences; i++) {
        const sequence_t *s = &g->sequences[i];
        g->rows[i] = (td_model_row_t){
            .token = s->token, .position = s->position, .blocks = s->blocks, .want_logits = true};
    }
    TD_TRY(td_model_forward(g->source->model, g->pool, g->rows, sequences, 0, NULL, NULL, &logits));
    hidden = td_model_hidden(g->source->model);
    for (uint32_t i = 0; i < sequences; i++) {
        TD_TRY(take_row(g, &g->sequences[i], hidden + (size_t)i * g->info->embed_dim,
                        logits + (size_t)i * g->info->vocab_size));
    }
    return TD_OK;
}

td_status_t train_generate(const train_source_t *source, bool held_out, uint32_t rows,
                           train_data_t *out)
{
    generator_t g = {
        .source = source, .info = td_model_info(source->model), .data = out, .held_out = held_out};
    td_status_t status = data_init(out, g.info->embed_dim, rows);

    if (status == TD_OK) {
        status = open_generator(&g);
    }
    while (status == TD_OK && out->rows < rows) {
        status = step(&g);
    }
    close_generator(&g);
    if (status != TD_OK) {
        TD_LOG_ERROR("texts not generated", "status=%s rows=%u", td_status_name(status), out->rows);
    }
    return status;
}

/* --- files ------------------------------------------------------------------------------------ */

td_status_t train_file_open(const char *path, const char *name, td_safetensors_t **out)
{
    const char *got = NULL;

    if (access(path, F_OK) != 0) {
        return TD_ERR_NOT_FOUND;
    }
    TD_TRY(td_safetensors_open(path, out));
    got = td_safetensors_text(*out, TRAIN_NAME_KEY);
    if (got == NULL || strcmp(got, name) != 0) {
        td_safetensors_close(*out);
        *out = NULL;
        return TD_ERR_NOT_FOUND;
    }
    return TD_OK;
}

td_status_t train_data_save(const char *path, const char *name, const train_data_t *data)
{
    const td_safetensors_text_t text = {TRAIN_NAME_KEY, name};
    const td_safetensor_t tensors[] = {
        {"tokens", TD_SAFETENSORS_I32, 1, {data->rows}, data->tokens, 0},
        {"best", TD_SAFETENSORS_I32, 1, {data->rows}, data->best, 0},
        {"follow", TD_SAFETENSORS_I32, 1, {data->rows}, data->follow, 0},
        {"hidden", TD_SAFETENSORS_F16, 2, {data->rows, data->embed_dim}, data->hidden, 0},
    };
    return td_safetensors_write(path, tensors, TD_ARRAY_LEN(tensors), &text, 1);
}

static td_status_t read_data(const td_safetensors_t *file, uint32_t embed_dim, train_data_t *out)
{
    const td_safetensor_t *t[4] = {NULL};
    const uint64_t any = 0;
    uint64_t dims[2] = {0, embed_dim};

    TD_TRY(td_safetensors_need(file, "tokens", TD_SAFETENSORS_I32, &any, 1, &t[0]));
    dims[0] = t[0]->dims[0];
    TD_TRY(td_safetensors_need(file, "best", TD_SAFETENSORS_I32, dims, 1, &t[1]));
    TD_TRY(td_safetensors_need(file, "follow", TD_SAFETENSORS_I32, dims, 1, &t[2]));
    TD_TRY(td_safetensors_need(file, "hidden", TD_SAFETENSORS_F16, dims, 2, &t[3]));
    if (dims[0] > UINT32_MAX) {
        return TD_ERR_INVALID;
    }
    TD_TRY(data_init(out, embed_dim, (uint32_t)dims[0]));
    out->rows = out->rows_max;
    memcpy(out->tokens, t[0]->bytes, t[0]->byte_count);
    memcpy(out->best, t[1]->bytes, t[1]->byte_count);
    memcpy(out->follow, t[2]->bytes, t[2]->byte_count);
    memcpy(out->hidden, t[3]->bytes, t[3]->byte_count);
    return TD_OK;
}

td_status_t train_data_load(const char *path, const char *name, uint32_t embed_dim,
                            train_data_t *out)
{
    td_safetensors_t *file = NULL;
    td_status_t status = train_file_open(path, name, &file);

    if (status == TD_OK) {
        status = read_data(file, embed_dim, out);
    }
    td_safetensors_close(file);
    return status;
}

/* A training's state, and the heads that come of it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_log.h"
#include "decode_node/train_heads_internal.h"

#define BATCHES_KEY "batches"

/* --- files ------------------------------------------------------------------------------------ */

static const char *const memory_names[] = {"weights", NULL, "mean", "square"};

td_status_t train_net_save(const train_net_t *n, const char *path, const char *name,
                           uint64_t batches_done)
{
    td_safetensor_t tensors[3];
    uint32_t count = 0;
    char batches[32];
    td_safetensors_text_t texts[] = {{TRAIN_NAME_KEY, name}, {BATCHES_KEY, batches}};

    (void)snprintf(batches, sizeof(batches), "%llu", (unsigned long long)batches_done);
    for (size_t i = 0; i < TD_ARRAY_LEN(memory_names); i++) {
        if (memory_names[i] != NULL) {
            tensors[count++] = (td_safetensor_t){.name = memory_names[i],
                                                 .type = TD_SAFETENSORS_F32,
                                                 .dim_count = 1,
                                                 .dims = {n->param_count},
                                                 .bytes = n->memory[i]};
        }
    }
    return td_safetensors_write(path, tensors, count, texts, TD_ARRAY_LEN(texts));
}

static td_status_t read_state(train_net_t *n, const td_safetensors_t *file, uint64_t *batches_out)
{
    const char *batches = td_safetensors_text(file, BATCHES_KEY);
    const uint64_t dims[] = {n->param_count};
    char *end = NULL;
    const td_safetensor_t *t[TD_ARRAY_LEN(memory_names)] = {NULL};

    for (size_t i = 0; i < TD_ARRAY_LEN(memory_names); i++) {
        if (memory_names[i] != NULL) {
            TD_TRY(td_safetensors_need(file, memory_names[i], TD_SAFETENSORS_F32, dims, 1, &t[i]));
        }
    }
    if (batches == NULL || batches[0] < '0' || batches[0] > '9') {
        return TD_ERR_INVALID;
    }
    *batches_out = strtoull(batches, &end, 10);
    for (size_t i = 0; i < TD_ARRAY_LEN(memory_names); i++) {
        if (t[i] != NULL) {
            memcpy(n->memory[i], t[i]->bytes, t[i]->byte_count);
        }
    }
    return TD_OK;
}

td_status_t train_net_load(train_net_t *n, const char *path, const char *name,
                           uint64_t *batches_done_out)
{
    td_safetensors_t *file = NULL;
    td_status_t status = train_file_open(path, name, &file);

    if (status == TD_OK) {
        status = read_state(n, file, batches_done_out);
    }
    td_safetensors_close(file);
    return status;
}

/* The weights as they are for states and embeddings of the model's own size. */
static void unscale(const train_net_t *n, const train_params_t *to)
{
    const uint32_t inputs = TD_HEADS_INPUTS * n->dim;

    for (size_t i = 0; i < n->o.hidden_dim; i++) {
        for (uint32_t k = 0; k < inputs; k++) {
            to->in_weight[i * inputs + k] =
                n->w.in_weight[i * inputs + k] * (k < n->dim ? n->state_scale : n->embed_scale);
        }
        to->in_bias[i] = n->w.in_bias[i];
    }
    for (size_t i = 0; i < n->dim; i++) {
        for (uint32_t k = 0; k < n->o.hidden_dim; k++) {
            to->out_weight[i * n->o.hidden_dim + k] =
                n->w.out_weight[i * n->o.hidden_dim + k] / n->state_scale;
        }
        to->out_bias[i] = n->w.out_bias[i] / n->state_scale;
    }
}

static void say_score(const train_score_t *score, uint32_t steps, char *out, size_t cap)
{
    size_t len = 0;

    for (uint32_t i = 0; i < steps; i++) {
        const double share_right =
            score->alive[i] == 0 ? 0 : (double)score->right[i] / (double)score->alive[i];
        len += (size_t)snprintf(out + len, cap - len, "%s%.4f", i == 0 ? "" : " ", share_right);
    }
}

td_status_t train_net_export(const train_net_t *n, const char *path, const uint8_t fingerprint[32],
                             const train_score_t *score)
{
    float *memory = td_calloc_large(n->param_count, sizeof(*memory));
    const train_params_t p = train_params_in(n, memory);
    const uint32_t hidden = n->o.hidden_dim;
    char print[65];
    char seed[32];
    char acceptance[16 * TRAIN_STEPS_MAX];
    const td_safetensors_text_t texts[] = {{TD_HEADS_FORMAT_KEY, TD_HEADS_FORMAT},
                                           {TD_HEADS_FINGERPRINT_KEY, print},
                                           {TD_HEADS_SEED_KEY, seed},
                                           {TD_HEADS_ACCEPTANCE_KEY, acceptance}};
    td_status_t status = TD_ERR_NO_MEMORY;

    if (memory == NULL) {
        return status;
    }
    for (uint32_t i = 0; i < 32; i++) {
        (void)snprintf(print + 2 * (size_t)i, 3, "%02x", fingerprint[i]);
    }
    (void)snprintf(seed, sizeof(seed), "%llu", (unsigned long long)n->o.seed);
    say_score(score, n->o.steps, acceptance, sizeof(acceptance));
    unscale(n, &p);
    {
        const td_safetensor_t tensors[] = {
            {"in.weight",
             TD_SAFETENSORS_F32,
             2,
             {hidden, TD_HEADS_INPUTS * n->dim},
             p.in_weight,
             0},
            {"in.bias", TD_SAFETENSORS_F32, 1, {hidden}, p.in_bias, 0},
            {"out.weight", TD_SAFETENSORS_F32, 2, {n->dim, hidden}, p.out_weight, 0},
            {"out.bias", TD_SAFETENSORS_F32, 1, {n->dim}, p.out_bias, 0},
            {"tokens", TD_SAFETENSORS_I32, 1, {n->o.shortlist}, n->tokens, 0},
        };
        status =
            td_safetensors_write(path, tensors, TD_ARRAY_LEN(tensors), texts, TD_ARRAY_LEN(texts));
    }
    td_free(memory);
    return status;
}

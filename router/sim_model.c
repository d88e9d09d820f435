#include "router/sim_model.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "common/base/td_base.h"

#define FILE_BYTES_MAX 65536u

static const struct {
    const char *name;
    const char *help;
    size_t at;
    double min;
    double max;
} fields[] = {
    {"prefill_prompt_ms", "prefill: of each prompt", offsetof(sim_model_t, prefill_prompt_ms), 0,
     1e6},
    {"prefill_token_us", "prefill: of each computed token", offsetof(sim_model_t, prefill_token_us),
     1e-6, 1e9},
    {"prefill_pair_ns", "prefill: of each token that a computed one sees",
     offsetof(sim_model_t, prefill_pair_ns), 0, 1e9},
    {"decode_step_ms", "decode: of each step", offsetof(sim_model_t, decode_step_ms), 1e-6, 1e6},
    {"decode_sequence_us", "decode: of each sequence in a step",
     offsetof(sim_model_t, decode_sequence_us), 0, 1e9},
    {"decode_kv_token_ns", "decode: of each token of context in a step",
     offsetof(sim_model_t, decode_kv_token_ns), 0, 1e9},
    {"decode_kv_tokens", "decode: tokens of KV that a node has room for",
     offsetof(sim_model_t, decode_kv_tokens), 1, 1e12},
    {"kv_token_bytes", "KV of a token", offsetof(sim_model_t, kv_token_bytes), 1, 1e9},
    {"layers", "layers, which leave one after the other", offsetof(sim_model_t, layers), 1, 1e4},
    {"link_gb_s", "a node's link, each way", offsetof(sim_model_t, link_gb_s), 1e-6, 1e6},
};
_Static_assert(TD_ARRAY_LEN(fields) == SIM_MODEL_FIELDS, "every field has a row");
_Static_assert(sizeof(sim_model_t) == SIM_MODEL_FIELDS * sizeof(double), "every field is listed");

static const struct {
    const char *name;
    sim_model_t model;
} presets[] = {
    {"llama70b-8xa800",
     {.prefill_prompt_ms = 10,
      .prefill_token_us = 112,
      .prefill_pair_ns = 2.1,
      .decode_step_ms = 14.6,
      .decode_sequence_us = 100,
      .decode_kv_token_ns = 34,
      .decode_kv_tokens = 1.2e6,
      .kv_token_bytes = 2 * 80 * 8 * 128 * 2,
      .layers = 80,
      .link_gb_s = 100}},
    {"smollm2-135m-2cores",
     {.prefill_prompt_ms = 2,
      .prefill_token_us = 533,
      .prefill_pair_ns = 352,
      .decode_step_ms = 1.4,
      .decode_sequence_us = 650,
      .decode_kv_token_ns = 350,
      .decode_kv_tokens = 46592,
      .kv_token_bytes = 2 * 30 * 3 * 64 * 2,
      .layers = 30,
      .link_gb_s = 4}},
};

td_status_t sim_model_preset(const char *name, sim_model_t *out)
{
    for (size_t i = 0; i < TD_ARRAY_LEN(presets); i++) {
        if (strcmp(presets[i].name, name) == 0) {
            *out = presets[i].model;
            return TD_OK;
        }
    }
    return TD_ERR_INVALID;
}

const char *sim_model_field(uint32_t index)
{
    return fields[index].name;
}

const char *sim_model_help(uint32_t index)
{
    return fields[index].help;
}

td_status_t sim_model_set(sim_model_t *model, uint32_t index, double value,
                          char why[SIM_MODEL_WHY_CHARS_MAX + 1])
{
    TD_ASSERT(index < SIM_MODEL_FIELDS);
    if (!(value >= fields[index].min && value <= fields[index].max)) {
        (void)snprintf(why, SIM_MODEL_WHY_CHARS_MAX + 1, "%s must be a number of %g to %g",
                       fields[index].name, fields[index].min, fields[index].max);
        return TD_ERR_INVALID;
    }
    *(double *)(void *)((char *)model + fields[index].at) = value;
    return TD_OK;
}

static td_status_t set_named(sim_model_t *model, const char *name, const json_t *value, char *why)
{
    for (uint32_t i = 0; i < SIM_MODEL_FIELDS; i++) {
        if (strcmp(name, fields[i].name) == 0) {
            return sim_model_set(model, i, json_is_number(value) ? json_number_value(value) : NAN,
                                 why);
        }
    }
    (void)snprintf(why, SIM_MODEL_WHY_CHARS_MAX + 1, "%.60s is no parameter of a node", name);
    return TD_ERR_INVALID;
}

td_status_t sim_model_load(sim_model_t *model, const char *path,
                           char why[SIM_MODEL_WHY_CHARS_MAX + 1])
{
    json_error_t error = {0};
    FILE *file = fopen(path, "rb");
    sim_model_t changed = *model;
    static char bytes[FILE_BYTES_MAX];
    json_t *object = NULL;
    const char *name = NULL;
    json_t *value = NULL;
    td_status_t status = TD_OK;
    size_t len = 0;

    if (file == NULL) {
        (void)snprintf(why, SIM_MODEL_WHY_CHARS_MAX + 1, "cannot be read: %m");
        return TD_ERR_IO;
    }
    len = fread(bytes, 1, sizeof(bytes), file);
    (void)fclose(file);
    object = json_loadb(bytes, len, JSON_REJECT_DUPLICATES, &error);
    if (!json_is_object(object)) {
        (void)snprintf(why, SIM_MODEL_WHY_CHARS_MAX + 1, "line %d: %.100s", error.line,
                       object == NULL ? error.text : "an object is expected");
        json_decref(object);
        return TD_ERR_INVALID;
    }
    json_object_foreach(object, name, value)
    {
        if (status == TD_OK) {
            status = set_named(&changed, name, value, why);
        }
    }
    json_decref(object);
    if (status == TD_OK) {
        *model = changed;
    }
    return status;
}

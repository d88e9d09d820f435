#include "router/rtr_api.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/model/td_sampler.h"
#include "router/rtr_api_internal.h"

static const char *error_type(int http)
{
    switch (http) {
    case 401:
        return "authentication_error";
    case 429:
        return "rate_limit_error";
    default:
        return http >= 500 ? "server_error" : "invalid_request_error";
    }
}

static void error_fill(rtr_error_t *error, int http, const char *code, const char *param,
                       const char *fmt, va_list args)
{
    *error = (rtr_error_t){.http = http, .type = error_type(http), .code = code};
    (void)snprintf(error->param, sizeof(error->param), "%s", param != NULL ? param : "");
    (void)vsnprintf(error->message, sizeof(error->message), fmt, args);
}

void rtr_error_set(rtr_error_t *error, int http, const char *code, const char *param,
                   const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    error_fill(error, http, code, param, fmt, args);
    va_end(args);
}

td_status_t rtr_refuse(const rtr_parse_t *ps, const char *name, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    error_fill(ps->error, 400, NULL, name, fmt, args);
    va_end(args);
    return TD_ERR_INVALID;
}

td_status_t rtr_no_memory(const rtr_parse_t *ps)
{
    rtr_error_set(ps->error, 500, NULL, NULL, "out of memory");
    return TD_ERR_NO_MEMORY;
}

const char *rtr_json_type(const json_t *value)
{
    switch (json_typeof(value)) {
    case JSON_OBJECT:
        return "an object";
    case JSON_ARRAY:
        return "an array";
    case JSON_STRING:
        return "a string";
    case JSON_INTEGER:
        return "an integer";
    case JSON_REAL:
        return "a number";
    case JSON_TRUE:
    case JSON_FALSE:
        return "a boolean";
    case JSON_NULL:
        break;
    }
    return "null";
}

td_status_t rtr_refuse_type(const rtr_parse_t *ps, const char *name, const char *expected,
                            const json_t *got)
{
    return rtr_refuse(ps, name, "%s must be %s, got %s", name, expected, rtr_json_type(got));
}

const json_t *rtr_field(const rtr_parse_t *ps, const char *name)
{
    const json_t *value = json_object_get(ps->root, name);
    return value == NULL || json_is_null(value) ? NULL : value;
}

td_status_t rtr_field_bool(const rtr_parse_t *ps, const char *name, bool *out)
{
    const json_t *value = rtr_field(ps, name);

    if (value == NULL) {
        return TD_OK;
    }
    if (!json_is_boolean(value)) {
        return rtr_refuse_type(ps, name, "a boolean", value);
    }
    *out = json_is_true(value);
    return TD_OK;
}

static td_status_t value_int(const rtr_parse_t *ps, const char *name, const json_t *value,
                             int64_t lo, int64_t hi, int64_t *out)
{
    double real = json_number_value(value);
    int64_t got = 0;

    if (json_is_integer(value)) {
        got = json_integer_value(value);
    } else if (json_is_real(value) && real == trunc(real) && fabs(real) < 9e15) {
        got = (int64_t)real;
    } else {
        return rtr_refuse_type(ps, name, "an integer", value);
    }
    if (got < lo || got > hi) {
        return rtr_refuse(ps, name, "%s must be between %lld and %lld, got %lld", name,
                          (long long)lo, (long long)hi, (long long)got);
    }
    *out = got;
    return TD_OK;
}

td_status_t rtr_field_int(const rtr_parse_t *ps, const char *name, int64_t lo, int64_t hi,
                          int64_t *out, bool *present_out)
{
    const json_t *value = rtr_field(ps, name);

    if (value == NULL) {
        return TD_OK;
    }
    TD_TRY(value_int(ps, name, value, lo, hi, out));
    if (present_out != NULL) {
        *present_out = true;
    }
    return TD_OK;
}

static td_status_t field_u32(const rtr_parse_t *ps, const char *name, int64_t lo, int64_t hi,
                             uint32_t *out)
{
    int64_t value = *out;
    TD_TRY(rtr_field_int(ps, name, lo, hi, &value, NULL));
    *out = (uint32_t)value;
    return TD_OK;
}

/* Ranges as the sampler takes them. */
static td_status_t read_floats(const rtr_parse_t *ps)
{
    const struct {
        const char *name;
        double lo;
        double hi;
        bool lo_open;
        bool hi_open;
        float *out;
    } fields[] = {
        {"temperature", 0, 2, false, false, &ps->p->temperature},
        {"top_p", 0, 1, true, false, &ps->p->top_p},
        {"min_p", 0, 1, false, true, &ps->p->min_p},
        {"presence_penalty", -2, 2, false, false, &ps->p->presence_penalty},
        {"frequency_penalty", -2, 2, false, false, &ps->p->frequency_penalty},
        {"repetition_penalty", 0, 10, true, false, &ps->p->repetition_penalty},
    };

    for (size_t i = 0; i < TD_ARRAY_LEN(fields); i++) {
        const json_t *value = rtr_field(ps, fields[i].name);
        double got = json_number_value(value);
        float kept = (float)got;
        if (value == NULL) {
            continue;
        }
        if (!json_is_number(value)) {
            return rtr_refuse_type(ps, fields[i].name, "a number", value);
        }
        if (!(got >= fields[i].lo && got <= fields[i].hi) ||
            (fields[i].lo_open && kept <= (float)fields[i].lo) ||
            (fields[i].hi_open && kept >= (float)fields[i].hi)) {
            return rtr_refuse(ps, fields[i].name, "%s must be %s %g and %s %g, got %g",
                              fields[i].name, fields[i].lo_open ? "above" : "at least",
                              fields[i].lo, fields[i].hi_open ? "below" : "at most", fields[i].hi,
                              got);
        }
        *fields[i].out = kept;
    }
    if (ps->p->temperature < RTR_TEMPERATURE_MIN) {
        ps->p->temperature = 0;
    }
    return TD_OK;
}

static td_status_t read_counts(const rtr_parse_t *ps)
{
    rtr_params_t *p = ps->p;
    int64_t top_k = 0;
    int64_t priority = 0;
    int64_t value = 0;
    bool has_seed = false;
    bool completion_tokens = false;

    TD_TRY(field_u32(ps, "n", 1, RTR_N_MAX, &p->n));
    TD_TRY(rtr_field_int(ps, "max_tokens", 1, UINT32_MAX, &value, &p->has_max_tokens));
    if (p->kind == RTR_KIND_CHAT) {
        TD_TRY(
            rtr_field_int(ps, "max_completion_tokens", 1, UINT32_MAX, &value, &completion_tokens));
        p->has_max_tokens = p->has_max_tokens || completion_tokens;
    }
    p->max_tokens = (uint32_t)value;
    TD_TRY(field_u32(ps, "min_tokens", 0, UINT32_MAX, &p->min_tokens));
    TD_TRY(rtr_field_int(ps, "priority", INT32_MIN, INT32_MAX, &priority, NULL));
    p->priority = (int32_t)priority;
    TD_TRY(rtr_field_int(ps, "top_k", -1, UINT32_MAX, &top_k, NULL));
    p->top_k = top_k > 0 ? (uint32_t)top_k : 0;
    value = 0;
    TD_TRY(rtr_field_int(ps, "seed", INT64_MIN, INT64_MAX, &value, &has_seed));
    p->seed = has_seed ? (uint64_t)value : td_random_u64();
    if (p->has_max_tokens && p->min_tokens > p->max_tokens) {
        return rtr_refuse(ps, "min_tokens", "min_tokens must be at most max_tokens (%u), got %u",
                          p->max_tokens, p->min_tokens);
    }
    return TD_OK;
}

static td_status_t read_logprobs(const rtr_parse_t *ps)
{
    rtr_params_t *p = ps->p;
    int64_t top = 0;
    bool present = false;

    if (p->kind == RTR_KIND_COMPLETION) {
        TD_TRY(rtr_field_int(ps, "logprobs", 0, TD_TOP_LOGPROBS_MAX, &top, &p->want_logprobs));
    } else {
        TD_TRY(rtr_field_bool(ps, "logprobs", &p->want_logprobs));
        TD_TRY(rtr_field_int(ps, "top_logprobs", 0, TD_TOP_LOGPROBS_MAX, &top, &present));
        if (top > 0 && !p->want_logprobs) {
            return rtr_refuse(ps, "top_logprobs", "top_logprobs needs logprobs to be true");
        }
    }
    p->top_logprobs = (uint32_t)top;
    return TD_OK;
}

static td_status_t add_stop(const rtr_parse_t *ps, const json_t *value)
{
    rtr_params_t *p = ps->p;
    size_t len = json_string_length(value);

    if (!json_is_string(value)) {
        return rtr_refuse(ps, "stop", "stop must be a string or an array of strings, got %s in it",
                          rtr_json_type(value));
    }
    if (len == 0 || len > TD_MSG_STOP_BYTES_MAX) {
        return rtr_refuse(ps, "stop", "a stop string must have 1 to %u bytes, got %zu",
                          TD_MSG_STOP_BYTES_MAX, len);
    }
    if (td_str_append(&p->stop_text, json_string_value(value), len) != TD_OK) {
        return rtr_no_memory(ps);
    }
    p->stops[p->stop_count++].len = len;
    return TD_OK;
}

static td_status_t read_stops(const rtr_parse_t *ps)
{
    rtr_params_t *p = ps->p;
    const json_t *value = rtr_field(ps, "stop");
    const uint8_t *at = NULL;

    if (value == NULL) {
        return TD_OK;
    }
    if (json_is_string(value)) {
        TD_TRY(add_stop(ps, value));
    } else if (!json_is_array(value)) {
        return rtr_refuse_type(ps, "stop", "a string or an array of strings", value);
    } else if (json_array_size(value) > TD_MSG_STOPS_MAX) {
        return rtr_refuse(ps, "stop", "stop must have at most %u strings, got %zu",
                          TD_MSG_STOPS_MAX, json_array_size(value));
    }
    for (size_t i = 0; json_is_array(value) && i < json_array_size(value); i++) {
        TD_TRY(add_stop(ps, json_array_get(value, i)));
    }
    at = (const uint8_t *)p->stop_text.bytes;
    for (uint32_t i = 0; i < p->stop_count; i++) {
        p->stops[i].at = at;
        at += p->stops[i].len;
    }
    return TD_OK;
}

static td_status_t read_bias_entry(const rtr_parse_t *ps, const char *key, const json_t *value)
{
    rtr_params_t *p = ps->p;
    uint32_t vocab = td_tokenizer_vocab_size(ps->model->tok);
    uint64_t token = 0;
    double bias = json_number_value(value);
    size_t len = strlen(key);

    for (size_t i = 0; i < len && i < 10; i++) {
        token = token * 10 + (uint64_t)(key[i] - '0');
    }
    if (len == 0 || len > 10 || strspn(key, "0123456789") != len || token >= vocab) {
        return rtr_refuse(ps, "logit_bias", "logit_bias: token ids are 0 to %u, got \"%.32s\"",
                          vocab - 1, key);
    }
    if (!json_is_number(value)) {
        return rtr_refuse(ps, "logit_bias", "logit_bias: a bias must be a number, got %s",
                          rtr_json_type(value));
    }
    if (!(bias >= -100 && bias <= 100)) {
        return rtr_refuse(ps, "logit_bias",
                          "logit_bias: a bias must be between -100 and 100, got %g", bias);
    }
    p->bias_tokens[p->bias_count] = (uint32_t)token;
    p->bias_values[p->bias_count] = (float)bias;
    p->bias_count++;
    return TD_OK;
}

static td_status_t read_bias(const rtr_parse_t *ps)
{
    rtr_params_t *p = ps->p;
    json_t *object = json_object_get(ps->root, "logit_bias");
    const char *key = NULL;
    json_t *value = NULL;
    size_t count = json_object_size(object);

    if (rtr_field(ps, "logit_bias") == NULL) {
        return TD_OK;
    }
    if (!json_is_object(object)) {
        return rtr_refuse_type(ps, "logit_bias", "an object of token ids and numbers", object);
    }
    if (count > TD_LOGIT_BIAS_MAX) {
        return rtr_refuse(ps, "logit_bias", "logit_bias must have at most %u entries, got %zu",
                          TD_LOGIT_BIAS_MAX, count);
    }
    p->bias_tokens = td_calloc(count, sizeof(*p->bias_tokens));
    p->bias_values = td_calloc(count, sizeof(*p->bias_values));
    if (p->bias_tokens == NULL || p->bias_values == NULL) {
        return rtr_no_memory(ps);
    }
    json_object_foreach(object, key, value)
    {
        TD_TRY(read_bias_entry(ps, key, value));
    }
    return TD_OK;
}

static td_status_t read_model_name(const rtr_parse_t *ps)
{
    const json_t *value = rtr_field(ps, "model");

    if (value == NULL) {
        return TD_OK;
    }
    if (!json_is_string(value)) {
        return rtr_refuse_type(ps, "model", "a string", value);
    }
    if (json_string_length(value) != strlen(ps->model->name) ||
        strcmp(json_string_value(value), ps->model->name) != 0) {
        rtr_error_set(ps->error, 404, "model_not_found", "model",
                      "The model `%.128s` does not exist; this server has `%s`.",
                      json_string_value(value), ps->model->name);
        return TD_ERR_INVALID;
    }
    return TD_OK;
}

static td_status_t read_salt(const rtr_parse_t *ps)
{
    const json_t *value = rtr_field(ps, "cache_salt");

    if (value == NULL) {
        return TD_OK;
    }
    if (!json_is_string(value)) {
        return rtr_refuse_type(ps, "cache_salt", "a string", value);
    }
    if (json_string_length(value) > TD_CACHE_SALT_BYTES_MAX) {
        return rtr_refuse(ps, "cache_salt", "cache_salt must have at most %u bytes, got %zu",
                          TD_CACHE_SALT_BYTES_MAX, json_string_length(value));
    }
    if (td_str_append(&ps->p->cache_salt, json_string_value(value), json_string_length(value)) !=
        TD_OK) {
        return rtr_no_memory(ps);
    }
    return TD_OK;
}

static td_status_t read_place(const rtr_parse_t *ps, const json_t *from, const char *name,
                              char out[TD_MSG_ID_CHARS_MAX + 1])
{
    const json_t *value = json_object_get(from, name);

    if (value == NULL || json_is_null(value)) {
        return TD_OK;
    }
    if (!json_is_string(value) || json_string_length(value) > TD_MSG_ID_CHARS_MAX) {
        return rtr_refuse(ps, "tandem", "tandem.%s must be a node's id, got %s", name,
                          json_is_string(value) ? "a longer string" : rtr_json_type(value));
    }
    (void)snprintf(out, TD_MSG_ID_CHARS_MAX + 1, "%s", json_string_value(value));
    return TD_OK;
}

static td_status_t read_placement(const rtr_parse_t *ps)
{
    const json_t *value = rtr_field(ps, "tandem");

    if (value == NULL) {
        return TD_OK;
    }
    if (!ps->model->allow_placement) {
        return rtr_refuse(ps, "tandem",
                          "tandem is not allowed: the server runs without "
                          "--allow-placement");
    }
    if (!json_is_object(value)) {
        return rtr_refuse_type(ps, "tandem", "an object", value);
    }
    TD_TRY(read_place(ps, value, "prefill", ps->p->place_prefill));
    return read_place(ps, value, "decode", ps->p->place_decode);
}

static td_status_t read_stream_options(const rtr_parse_t *ps)
{
    const json_t *value = rtr_field(ps, "stream_options");
    rtr_parse_t inner = *ps;

    if (value == NULL) {
        return TD_OK;
    }
    if (!json_is_object(value)) {
        return rtr_refuse_type(ps, "stream_options", "an object", value);
    }
    if (!ps->p->stream) {
        return rtr_refuse(ps, "stream_options", "stream_options needs stream to be true");
    }
    inner.root = value;
    return rtr_field_bool(&inner, "include_usage", &ps->p->include_usage);
}

static bool is_empty(const json_t *value)
{
    return json_is_false(value) || (json_is_array(value) && json_array_size(value) == 0) ||
           (json_is_object(value) && json_object_size(value) == 0) ||
           (json_is_string(value) && json_string_length(value) == 0);
}

/* What would change the answer and is not done is refused, never ignored. */
static td_status_t refuse_unsupported(const rtr_parse_t *ps)
{
    static const char *const names[] = {"tools",
                                        "functions",
                                        "function_call",
                                        "logit_processors",
                                        "logits_processors",
                                        "suffix",
                                        "use_beam_search",
                                        "stop_token_ids",
                                        "guided_json",
                                        "guided_regex",
                                        "guided_choice",
                                        "guided_grammar",
                                        "audio",
                                        "prompt_logprobs",
                                        "continue_final_message",
                                        "structured_outputs",
                                        "bad_words",
                                        "allowed_token_ids",
                                        "prompt_embeds"};
    const json_t *format = rtr_field(ps, "response_format");
    const char *type = json_string_value(json_object_get(format, "type"));
    const json_t *choice = rtr_field(ps, "tool_choice");
    int64_t best_of = 0;

    for (size_t i = 0; i < TD_ARRAY_LEN(names); i++) {
        const json_t *value = rtr_field(ps, names[i]);
        if (value != NULL && !is_empty(value)) {
            return rtr_refuse(ps, names[i], "%s is not supported", names[i]);
        }
    }
    if (format != NULL && (type == NULL || strcmp(type, "text") != 0)) {
        return rtr_refuse(ps, "response_format",
                          "response_format other than {\"type\": \"text\"} is not supported");
    }
    if (choice != NULL &&
        (!json_is_string(choice) || (strcmp(json_string_value(choice), "none") &&
                                     strcmp(json_string_value(choice), "auto")))) {
        return rtr_refuse(ps, "tool_choice", "tool_choice other than none is not supported");
    }
    TD_TRY(rtr_field_int(ps, "best_of", 1, UINT32_MAX, &best_of, NULL));
    if (best_of > (int64_t)ps->p->n) {
        return rtr_refuse(ps, "best_of", "best_of above n (%u) is not supported, got %lld",
                          ps->p->n, (long long)best_of);
    }
    return TD_OK;
}

static td_status_t read_generation(const rtr_parse_t *ps)
{
    rtr_params_t *p = ps->p;

    TD_TRY(read_counts(ps));
    TD_TRY(refuse_unsupported(ps));
    TD_TRY(read_floats(ps));
    TD_TRY(rtr_field_bool(ps, "stream", &p->stream));
    TD_TRY(read_stream_options(ps));
    TD_TRY(read_logprobs(ps));
    TD_TRY(read_stops(ps));
    TD_TRY(read_bias(ps));
    TD_TRY(rtr_field_bool(ps, "include_stop_str_in_output", &p->include_stop));
    TD_TRY(rtr_field_bool(ps, "ignore_eos", &p->ignore_eos));
    TD_TRY(rtr_field_bool(ps, "skip_special_tokens", &p->skip_special));
    if (p->kind == RTR_KIND_COMPLETION) {
        TD_TRY(rtr_field_bool(ps, "echo", &p->echo));
    }
    TD_TRY(read_salt(ps));
    TD_TRY(rtr_speculation_read(ps));
    return read_placement(ps);
}

static td_status_t parse_object(const rtr_parse_t *ps)
{
    rtr_params_t *p = ps->p;

    TD_TRY(read_model_name(ps));
    if (p->kind == RTR_KIND_CHAT || p->kind == RTR_KIND_COMPLETION) {
        TD_TRY(read_generation(ps));
    }
    return rtr_prompts_read(ps);
}

td_status_t rtr_api_parse(const rtr_model_t *model, rtr_kind_t kind, const char *body, size_t len,
                          rtr_params_t *out, rtr_error_t *error_out)
{
    rtr_parse_t ps = {.model = model, .p = out, .error = error_out};
    td_status_t status = TD_ERR_INVALID;
    json_error_t where;
    json_t *root = NULL;

    *out = (rtr_params_t){.kind = kind,
                          .n = 1,
                          .temperature = 1,
                          .top_p = 1,
                          .repetition_penalty = 1,
                          .skip_special = true};
    rtr_error_set(error_out, 500, NULL, NULL, "the request could not be read");
    root = json_loadb(body != NULL ? body : "", len, JSON_DECODE_ANY | JSON_ALLOW_NUL, &where);
    if (root == NULL && (json_error_code(&where) == json_error_out_of_memory ||
                         where.text[0] == '\0')) { /* it names every other reason */
        return rtr_no_memory(&ps);
    }
    if (root == NULL) {
        return rtr_refuse(&ps, NULL, "the body is not valid JSON: line %d, column %d: %s",
                          where.line, where.column, where.text);
    }
    ps.root = root;
    if (json_is_object(root)) {
        status = parse_object(&ps);
    } else {
        (void)rtr_refuse(&ps, NULL, "the body must be a JSON object, got %s", rtr_json_type(root));
    }
    json_decref(root);
    return status;
}

void rtr_params_fini(rtr_params_t *params)
{
    for (uint32_t i = 0; params->prompts != NULL && i < params->prompt_count; i++) {
        td_free(params->prompts[i].tokens);
        td_str_fini(&params->prompts[i].text);
    }
    td_free(params->prompts);
    td_free(params->bias_tokens);
    td_free(params->bias_values);
    td_free(params->prediction);
    td_str_fini(&params->stop_text);
    td_str_fini(&params->cache_salt);
    *params = (rtr_params_t){0};
}

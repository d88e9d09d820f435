#include <stdio.h>
#include <string.h>

#include "common/base/td_base.h"
#include "router/rtr_api_internal.h"

static td_status_t encode_failed(const rtr_parse_t *ps, const char *name, td_status_t status)
{
    if (status == TD_ERR_NO_MEMORY) {
        return rtr_no_memory(ps);
    }
    if (status == TD_ERR_TOO_LARGE) {
        return rtr_refuse(ps, name, "%s must have at most %u bytes of text", name,
                          TD_TOKENIZER_TEXT_BYTES_MAX);
    }
    return rtr_refuse(ps, name, "%s cannot be encoded for this model (%s)", name,
                      td_status_name(status));
}

static td_status_t alloc_prompts(const rtr_parse_t *ps, size_t count)
{
    ps->p->prompts = td_calloc(count, sizeof(*ps->p->prompts));
    if (ps->p->prompts == NULL) {
        return rtr_no_memory(ps);
    }
    ps->p->prompt_count = (uint32_t)count;
    return TD_OK;
}

td_status_t rtr_encode_text(const rtr_parse_t *ps, const char *name, const char *text, size_t len,
                            uint32_t **ids_out, uint32_t *count_out)
{
    size_t count = 0;
    td_status_t status = td_tokenizer_encode(ps->model->tok, text, len, true, ids_out, &count);

    if (status != TD_OK) {
        return encode_failed(ps, name, status);
    }
    *count_out = (uint32_t)count;
    return TD_OK;
}

static td_status_t read_text(const rtr_parse_t *ps, const json_t *value, bool bos,
                             rtr_prompt_t *out)
{
    const td_tokenizer_t *tok = ps->model->tok;
    uint32_t *ids = NULL;

    TD_TRY(rtr_encode_text(ps, "prompt", json_string_value(value), json_string_length(value),
                           &out->tokens, &out->count));
    if (bos && td_tokenizer_bos(tok) != UINT32_MAX) {
        ids = td_alloc((out->count + 1) * sizeof(*ids));
        if (ids == NULL) {
            return rtr_no_memory(ps);
        }
        ids[0] = td_tokenizer_bos(tok);
        memcpy(ids + 1, out->tokens, out->count * sizeof(*ids));
        td_free(out->tokens);
        out->tokens = ids;
        out->count++;
    }
    if (ps->p->echo &&
        td_str_append(&out->text, json_string_value(value), json_string_length(value)) != TD_OK) {
        return rtr_no_memory(ps);
    }
    return TD_OK;
}

static td_status_t echo_text(const rtr_parse_t *ps, rtr_prompt_t *prompt)
{
    td_detok_t detok = {0};

    for (uint32_t i = 0; i < prompt->count; i++) {
        if (td_detok_push(&detok, ps->model->tok, prompt->tokens[i], false, &prompt->text) !=
            TD_OK) {
            return rtr_no_memory(ps);
        }
    }
    return td_detok_finish(&detok, &prompt->text) == TD_OK ? TD_OK : rtr_no_memory(ps);
}

static td_status_t read_ids(const rtr_parse_t *ps, const char *name, const json_t *array,
                            rtr_prompt_t *out)
{
    size_t count = json_array_size(array);
    uint32_t vocab = td_tokenizer_vocab_size(ps->model->tok);

    out->tokens = td_calloc(count, sizeof(*out->tokens));
    if (out->tokens == NULL) {
        return rtr_no_memory(ps);
    }
    out->count = (uint32_t)count;
    for (size_t i = 0; i < count; i++) {
        const json_t *value = json_array_get(array, i);
        json_int_t id = json_integer_value(value);
        if (!json_is_integer(value)) {
            return rtr_refuse(ps, name, "%s: a token id must be an integer, got %s at index %zu",
                              name, rtr_json_type(value), i);
        }
        if (id < 0 || id >= (json_int_t)vocab) {
            return rtr_refuse(ps, name, "%s: token ids are 0 to %u, got %lld at index %zu", name,
                              vocab - 1, (long long)id, i);
        }
        out->tokens[i] = (uint32_t)id;
    }
    return ps->p->echo ? echo_text(ps, out) : TD_OK;
}

static td_status_t read_prompt(const rtr_parse_t *ps)
{
    const json_t *value = rtr_field(ps, "prompt");
    const json_t *first = json_array_get(value, 0);
    bool bos = td_tokenizer_add_bos(ps->model->tok);
    size_t count = json_array_size(value);

    if (value == NULL) {
        return rtr_refuse(ps, "prompt", "prompt is missing");
    }
    if (json_is_string(value)) {
        TD_TRY(alloc_prompts(ps, 1));
        return read_text(ps, value, bos, &ps->p->prompts[0]);
    }
    if (!json_is_array(value)) {
        return rtr_refuse_type(ps, "prompt", "a string, or an array of strings or token ids",
                               value);
    }
    if (first == NULL) {
        return rtr_refuse(ps, "prompt", "prompt is an empty array");
    }
    if (json_is_number(first)) {
        TD_TRY(alloc_prompts(ps, 1));
        return read_ids(ps, "prompt", value, &ps->p->prompts[0]);
    }
    if (count > RTR_PROMPTS_MAX) {
        return rtr_refuse(ps, "prompt", "prompt must have at most %u prompts, got %zu",
                          RTR_PROMPTS_MAX, count);
    }
    TD_TRY(alloc_prompts(ps, count));
    for (size_t i = 0; i < count; i++) {
        const json_t *item = json_array_get(value, i);
        if (json_is_string(item)) {
            TD_TRY(read_text(ps, item, bos, &ps->p->prompts[i]));
        } else if (json_is_array(item)) {
            TD_TRY(read_ids(ps, "prompt", item, &ps->p->prompts[i]));
        } else {
            return rtr_refuse(ps, "prompt",
                              "prompt must hold strings or arrays of token ids, got %s at index "
                              "%zu",
                              rtr_json_type(item), i);
        }
    }
    return TD_OK;
}

/* --- chat ------------------------------------------------------------------------------------- */

static td_status_t append_part(const rtr_parse_t *ps, const json_t *part, size_t at, td_str_t *out)
{
    const char *type = json_string_value(json_object_get(part, "type"));
    const json_t *text = json_object_get(part, "text");

    if (type == NULL || strcmp(type, "text") != 0) {
        return rtr_refuse(ps, "messages",
                          "messages[%zu].content: only parts of type text are supported, got %.32s",
                          at, type != NULL ? type : "none");
    }
    if (!json_is_string(text)) {
        return rtr_refuse(ps, "messages", "messages[%zu].content: a part's text must be a string",
                          at);
    }
    if (td_str_append(out, json_string_value(text), json_string_length(text)) != TD_OK) {
        return rtr_no_memory(ps);
    }
    return TD_OK;
}

/* Parts are joined into joined; a plain string is borrowed from the JSON. */
static td_status_t read_content(const rtr_parse_t *ps, const json_t *content, size_t at,
                                td_str_t *joined, td_chat_message_t *out)
{
    if (json_is_string(content)) {
        out->content = json_string_value(content);
        out->content_len = json_string_length(content);
        return TD_OK;
    }
    if (json_is_array(content)) {
        for (size_t i = 0; i < json_array_size(content); i++) {
            TD_TRY(append_part(ps, json_array_get(content, i), at, joined));
        }
        out->content = joined->bytes != NULL ? joined->bytes : "";
        out->content_len = joined->len;
        return TD_OK;
    }
    if ((content == NULL || json_is_null(content)) && strcmp(out->role, "assistant") == 0) {
        out->content = "";
        return TD_OK;
    }
    return rtr_refuse(ps, "messages",
                      "messages[%zu].content must be a string or an array of text parts, got %s",
                      at, content == NULL ? "nothing" : rtr_json_type(content));
}

static td_status_t read_message(const rtr_parse_t *ps, const json_t *message, size_t at,
                                td_str_t *joined, td_chat_message_t *out)
{
    static const char *const roles[] = {"system", "user", "assistant", "tool"};
    const char *role = json_string_value(json_object_get(message, "role"));
    const json_t *calls = json_object_get(message, "tool_calls");

    if (!json_is_object(message)) {
        return rtr_refuse(ps, "messages", "messages[%zu] must be an object, got %s", at,
                          rtr_json_type(message));
    }
    if (role == NULL) {
        return rtr_refuse(ps, "messages", "messages[%zu].role must be a string", at);
    }
    if (calls != NULL && !json_is_null(calls) &&
        !(json_is_array(calls) && json_array_size(calls) == 0)) {
        return rtr_refuse(ps, "messages", "messages[%zu].tool_calls is not supported", at);
    }
    if (strcmp(role, "developer") == 0) {
        role = "system"; /* OpenAI's newer name of the same */
    }
    for (size_t i = 0; i < TD_ARRAY_LEN(roles); i++) {
        if (strcmp(role, roles[i]) == 0) {
            out->role = roles[i];
            return read_content(ps, json_object_get(message, "content"), at, joined, out);
        }
    }
    return rtr_refuse(ps, "messages",
                      "messages[%zu].role must be system, developer, user, assistant or tool, got "
                      "\"%.32s\"",
                      at, role);
}

typedef struct chat_text {
    td_chat_message_t *messages; /* owned */
    td_str_t *joined;            /* owned, one for each message */
} chat_text_t;

static td_status_t encode_messages(const rtr_parse_t *ps, const json_t *array,
                                   const chat_text_t *text)
{
    size_t count = json_array_size(array);
    rtr_prompt_t *prompt = ps->p->prompts;
    bool generation_prompt = true;
    size_t tokens = 0;
    td_status_t status = TD_OK;

    TD_TRY(rtr_field_bool(ps, "add_generation_prompt", &generation_prompt));
    for (size_t i = 0; i < count; i++) {
        TD_TRY(read_message(ps, json_array_get(array, i), i, &text->joined[i], &text->messages[i]));
    }
    status = td_chat_encode(ps->model->chat, ps->model->tok, text->messages, count,
                            generation_prompt, &prompt->tokens, &tokens);
    if (status != TD_OK) {
        return encode_failed(ps, "messages", status);
    }
    prompt->count = (uint32_t)tokens;
    return TD_OK;
}

static td_status_t read_messages(const rtr_parse_t *ps)
{
    const json_t *array = rtr_field(ps, "messages");
    size_t count = json_array_size(array);
    chat_text_t text = {0};
    td_status_t status = TD_OK;

    if (array == NULL) {
        return rtr_refuse(ps, "messages", "messages is missing");
    }
    if (!json_is_array(array)) {
        return rtr_refuse_type(ps, "messages", "an array of messages", array);
    }
    if (count == 0 || count > RTR_MESSAGES_MAX) {
        return rtr_refuse(ps, "messages", "messages must have 1 to %u messages, got %zu",
                          RTR_MESSAGES_MAX, count);
    }
    if (ps->model->chat == NULL) {
        return rtr_refuse(ps, "messages", "this model has no chat template that is supported");
    }
    TD_TRY(alloc_prompts(ps, 1));
    text.messages = td_calloc(count, sizeof(*text.messages));
    text.joined = td_calloc(count, sizeof(*text.joined));
    status = text.messages != NULL && text.joined != NULL ? encode_messages(ps, array, &text)
                                                          : rtr_no_memory(ps);
    for (size_t i = 0; text.joined != NULL && i < count; i++) {
        td_str_fini(&text.joined[i]);
    }
    td_free(text.messages);
    td_free(text.joined);
    return status;
}

/* --- limits ----------------------------------------------------------------------------------- */

static td_status_t fit_context(const rtr_parse_t *ps, rtr_prompt_t *prompt)
{
    const char *name = ps->p->kind == RTR_KIND_CHAT ? "messages" : "prompt";
    uint32_t limit = ps->model->context_max;

    if (prompt->count == 0) {
        return rtr_refuse(ps, name, "%s gives no tokens; at least one is needed", name);
    }
    if (prompt->count >= limit) {
        rtr_error_set(ps->error, 400, "context_length_exceeded", name,
                      "This model's maximum context length is %u tokens, and your prompt has %u; "
                      "at least one must be left for the answer.",
                      limit, prompt->count);
        return TD_ERR_INVALID;
    }
    prompt->max_tokens = limit - prompt->count;
    if (ps->p->has_max_tokens) {
        prompt->max_tokens = TD_MIN(prompt->max_tokens, ps->p->max_tokens);
    }
    if (ps->p->min_tokens > prompt->max_tokens) {
        return rtr_refuse(ps, "min_tokens",
                          "min_tokens must be at most %u, what the context leaves, got %u",
                          prompt->max_tokens, ps->p->min_tokens);
    }
    return TD_OK;
}

static td_status_t read_tokenize(const rtr_parse_t *ps)
{
    const json_t *prompt = rtr_field(ps, "prompt");
    bool bos = false;

    if (rtr_field(ps, "messages") != NULL) {
        return read_messages(ps);
    }
    if (prompt == NULL) {
        return rtr_refuse(ps, "prompt", "prompt or messages is needed");
    }
    if (!json_is_string(prompt)) {
        return rtr_refuse_type(ps, "prompt", "a string", prompt);
    }
    TD_TRY(rtr_field_bool(ps, "add_special_tokens", &bos));
    TD_TRY(alloc_prompts(ps, 1));
    return read_text(ps, prompt, bos && td_tokenizer_add_bos(ps->model->tok), ps->p->prompts);
}

static td_status_t read_detokenize(const rtr_parse_t *ps)
{
    const json_t *tokens = rtr_field(ps, "tokens");

    if (tokens == NULL) {
        return rtr_refuse(ps, "tokens", "tokens is missing");
    }
    if (!json_is_array(tokens)) {
        return rtr_refuse_type(ps, "tokens", "an array of token ids", tokens);
    }
    TD_TRY(alloc_prompts(ps, 1));
    TD_TRY(read_ids(ps, "tokens", tokens, ps->p->prompts));
    return echo_text(ps, ps->p->prompts);
}

td_status_t rtr_prompts_read(const rtr_parse_t *ps)
{
    switch (ps->p->kind) {
    case RTR_KIND_TOKENIZE:
        return read_tokenize(ps);
    case RTR_KIND_DETOKENIZE:
        return read_detokenize(ps);
    case RTR_KIND_CHAT:
        TD_TRY(read_messages(ps));
        break;
    case RTR_KIND_COMPLETION:
        TD_TRY(read_prompt(ps));
        break;
    }
    for (uint32_t i = 0; i < ps->p->prompt_count; i++) {
        rtr_prompt_t *prompt = &ps->p->prompts[i];
        TD_TRY(fit_context(ps, prompt));
        prompt->prompt_class = rtr_prompt_class_of(ps->model->tok, prompt->tokens, prompt->count,
                                                   ps->p->prediction_tokens > 0);
        prompt->hash = rtr_prompt_hash(prompt->tokens, prompt->count);
    }
    return TD_OK;
}

#include "common/model/td_chat.h"

#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_log.h"
#include "common/model/td_tokenizer_internal.h"

#define KEY_TEMPLATE "tokenizer.chat_template"
#define TURN_BEGIN "<|im_start|>"
#define TURN_END "<|im_end|>"
/* SmolLM2's template: when the first message is no system message, this text goes first. */
#define DEFAULT_CONDITION "messages[0]['role'] != 'system'"
#define DEFAULT_BEGIN "{{ '" TURN_BEGIN "system"

static const char *const roles[] = {"system", "user", "assistant", "tool"};

struct td_chat {
    char *default_system; /* owned; NULL = the template has none */
    size_t default_system_len;
};

static const char *find(const char *text, size_t len, const char *what)
{
    return memmem(text, len, what, strlen(what));
}

/* A string inside the template may hold a line end as it is, or written as \n. */
static size_t unescape(const char *text, size_t len, char *out)
{
    size_t n = 0;

    for (size_t i = 0; i < len; i++) {
        char c = text[i];
        if (c == '\\' && i + 1 < len) {
            c = text[++i];
            c = c == 'n' ? '\n' : c == 't' ? '\t' : c == 'r' ? '\r' : c;
        }
        out[n++] = c;
    }
    return n;
}

static td_status_t load_default_system(td_chat_t *chat, const char *text, size_t len)
{
    const char *end = text + len;
    const char *at = find(text, len, DEFAULT_CONDITION);
    const char *stop = NULL;
    size_t n = 0;

    if (at != NULL) {
        at = find(at, (size_t)(end - at), DEFAULT_BEGIN);
    }
    if (at == NULL) {
        return TD_OK;
    }
    at += strlen(DEFAULT_BEGIN);
    stop = find(at, (size_t)(end - at), TURN_END);
    if (stop == NULL) {
        return TD_OK;
    }
    chat->default_system = td_alloc((size_t)(stop - at));
    if (chat->default_system == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    n = unescape(at, (size_t)(stop - at), chat->default_system);
    /* The line end after the role belongs to the format. */
    if (n == 0 || chat->default_system[0] != '\n') {
        td_free(chat->default_system);
        chat->default_system = NULL;
        return TD_OK;
    }
    memmove(chat->default_system, chat->default_system + 1, n - 1);
    chat->default_system_len = n - 1;
    return TD_OK;
}

td_status_t td_chat_create(const td_gguf_t *gguf, td_chat_t **out)
{
    const char *text = NULL;
    size_t len = 0;
    td_chat_t *chat = NULL;
    td_status_t status = TD_OK;

    TD_ASSERT(gguf != NULL && out != NULL);
    status = td_gguf_get_str(gguf, KEY_TEMPLATE, &text, &len);
    if (status == TD_ERR_NOT_FOUND) {
        TD_LOG_ERROR("chat template missing", "key=%s", KEY_TEMPLATE);
        return status;
    }
    if (status != TD_OK || find(text, len, TURN_BEGIN) == NULL ||
        find(text, len, TURN_END) == NULL) {
        TD_LOG_ERROR("chat template unknown", "key=%s bytes=%zu expected=\"ChatML: %s and %s\"",
                     KEY_TEMPLATE, len, TURN_BEGIN, TURN_END);
        return TD_ERR_UNSUPPORTED;
    }
    chat = td_calloc(1, sizeof(*chat));
    if (chat == NULL || load_default_system(chat, text, len) != TD_OK) {
        td_chat_destroy(chat);
        TD_LOG_ERROR("chat template not loaded", "key=%s bytes=%zu status=no_memory", KEY_TEMPLATE,
                     len);
        return TD_ERR_NO_MEMORY;
    }
    *out = chat;
    return TD_OK;
}

void td_chat_destroy(td_chat_t *chat)
{
    if (chat == NULL) {
        return;
    }
    td_free(chat->default_system);
    td_free(chat);
}

/* Where the parts of a prompt go: to text or to tokens. */
typedef struct sink {
    td_str_t *text; /* NULL: to ids */
    const td_tokenizer_t *tok;
    td_token_ids_t *ids;
    td_str_t turn;       /* owned; a turn's text on its way to tokens */
    uint32_t turn_begin; /* ids */
    uint32_t turn_end;
} sink_t;

static td_status_t put_special(sink_t *sink, const char *text, uint32_t id)
{
    if (sink->text != NULL) {
        return td_str_append_text(sink->text, text);
    }
    return td_token_ids_append(sink->ids, &id, 1);
}

/* Text between two special tokens must reach the tokenizer in one piece: words may span parts. */
static td_status_t put_turn_text(sink_t *sink, const char *role, const char *content,
                                 size_t content_len)
{
    td_str_t *str = sink->text;

    if (str == NULL) {
        str = &sink->turn;
        td_str_clear(str);
    }
    TD_TRY(td_str_append_text(str, role));
    TD_TRY(td_str_append(str, "\n", 1));
    TD_TRY(td_str_append(str, content, content_len));
    if (sink->text != NULL) {
        return TD_OK;
    }
    return td_tokenizer_encode_append(sink->tok, str->bytes, str->len, false, sink->ids);
}

static td_status_t put_turn(sink_t *sink, const char *role, const char *content, size_t content_len)
{
    TD_TRY(put_special(sink, TURN_BEGIN, sink->turn_begin));
    TD_TRY(put_turn_text(sink, role, content, content_len));
    TD_TRY(put_special(sink, TURN_END, sink->turn_end));
    if (sink->text != NULL) {
        return td_str_append(sink->text, "\n", 1);
    }
    return td_tokenizer_encode_append(sink->tok, "\n", 1, false, sink->ids);
}

static td_status_t put_all(const td_chat_t *chat, sink_t *sink, const td_chat_message_t *messages,
                           size_t count, bool add_generation_prompt)
{
    if (count > 0 && strcmp(messages[0].role, "system") != 0 && chat->default_system != NULL) {
        TD_TRY(put_turn(sink, "system", chat->default_system, chat->default_system_len));
    }
    for (size_t i = 0; i < count; i++) {
        TD_TRY(put_turn(sink, messages[i].role, messages[i].content, messages[i].content_len));
    }
    if (!add_generation_prompt) {
        return TD_OK;
    }
    TD_TRY(put_special(sink, TURN_BEGIN, sink->turn_begin));
    return put_turn_text(sink, "assistant", "", 0);
}

static td_status_t check_messages(const td_chat_message_t *messages, size_t count)
{
    size_t total = 0;

    for (size_t i = 0; i < count; i++) {
        bool known = false;
        for (size_t r = 0; r < TD_ARRAY_LEN(roles); r++) {
            known = known || strcmp(messages[i].role, roles[r]) == 0;
        }
        if (!known) {
            TD_LOG_DEBUG("chat role unknown", "message=%zu expected=system,user,assistant,tool", i);
            return TD_ERR_INVALID;
        }
        if (!td_size_add(total, messages[i].content_len, &total) ||
            total > TD_TOKENIZER_TEXT_BYTES_MAX) {
            TD_LOG_DEBUG("chat too long", "message=%zu bytes_max=%u", i,
                         TD_TOKENIZER_TEXT_BYTES_MAX);
            return TD_ERR_TOO_LARGE;
        }
    }
    return TD_OK;
}

td_status_t td_chat_render(const td_chat_t *chat, const td_chat_message_t *messages, size_t count,
                           bool add_generation_prompt, td_str_t *out)
{
    sink_t sink = {.text = out};
    const size_t old_len = out->len;
    td_status_t status = TD_OK;

    TD_TRY(check_messages(messages, count));
    status = put_all(chat, &sink, messages, count, add_generation_prompt);
    if (status != TD_OK && out->bytes != NULL) {
        out->len = old_len;
        out->bytes[old_len] = '\0';
    }
    return status;
}

td_status_t td_chat_encode(const td_chat_t *chat, const td_tokenizer_t *tok,
                           const td_chat_message_t *messages, size_t count,
                           bool add_generation_prompt, uint32_t **ids_out, size_t *count_out)
{
    td_token_ids_t ids = {0};
    td_status_t status = TD_OK;
    sink_t sink = {
        .tok = tok,
        .ids = &ids,
        .turn_begin = td_tokenizer_find(tok, TURN_BEGIN, strlen(TURN_BEGIN)),
        .turn_end = td_tokenizer_find(tok, TURN_END, strlen(TURN_END)),
    };

    TD_TRY(check_messages(messages, count));
    if (sink.turn_begin == TD_TOKEN_NONE || sink.turn_end == TD_TOKEN_NONE) {
        TD_LOG_ERROR("chat markers are no tokens", "expected=\"%s and %s in the vocabulary\"",
                     TURN_BEGIN, TURN_END);
        return TD_ERR_UNSUPPORTED;
    }
    status = put_all(chat, &sink, messages, count, add_generation_prompt);
    td_str_fini(&sink.turn);
    if (status == TD_OK && ids.ids == NULL) {
        ids.ids = td_alloc(sizeof(*ids.ids)); /* no message, no prompt: still something to free */
        status = ids.ids == NULL ? TD_ERR_NO_MEMORY : TD_OK;
    }
    if (status != TD_OK) {
        td_token_ids_fini(&ids);
        return status;
    }
    *ids_out = ids.ids;
    *count_out = ids.count;
    return TD_OK;
}

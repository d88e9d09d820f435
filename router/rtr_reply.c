#include "router/rtr_reply.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "common/base/td_base.h"

#define REPLACEMENT "\xef\xbf\xbd"
#define LOGPROB_FLOOR (-9999.0) /* JSON has no infinity */

/* A writer whose first failure sticks, so that shapes read top to bottom. */
typedef struct writer {
    td_str_t *out;
    td_status_t status;
} writer_t;

static void put(writer_t *w, const char *bytes, size_t len)
{
    if (w->status == TD_OK) {
        w->status = td_str_append(w->out, bytes, len);
    }
}

static void puts_(writer_t *w, const char *text)
{
    put(w, text, strlen(text));
}

#define PUTF(w, ...)                                                                               \
    do {                                                                                           \
        if ((w)->status == TD_OK) {                                                                \
            (w)->status = td_str_printf((w)->out, __VA_ARGS__);                                    \
        }                                                                                          \
    } while (0)

/* Of every event: no format is read for it. */
static void put_number(writer_t *w, uint64_t value)
{
    char digits[20];
    size_t at = sizeof(digits);

    do {
        digits[--at] = (char)('0' + value % 10);
        value /= 10;
    } while (value > 0);
    put(w, digits + at, sizeof(digits) - at);
}

/* Length of the UTF-8 character at `at`, 0 when there is none; *skip_out: bytes of the longest
 * prefix that could have begun one (at least 1). */
static size_t utf8_len(const uint8_t *at, size_t left, size_t *skip_out)
{
    uint8_t lo = 0x80;
    uint8_t hi = 0xbf;
    size_t need = at[0] < 0x80                     ? 1
                  : at[0] >= 0xc2 && at[0] <= 0xdf ? 2
                  : at[0] >= 0xe0 && at[0] <= 0xef ? 3
                  : at[0] >= 0xf0 && at[0] <= 0xf4 ? 4
                                                   : 0;

    *skip_out = 1;
    lo = at[0] == 0xe0 ? 0xa0 : at[0] == 0xf0 ? 0x90 : lo;
    hi = at[0] == 0xed ? 0x9f : at[0] == 0xf4 ? 0x8f : hi;
    for (size_t i = 1; i < need; i++) {
        if (i == left || at[i] < lo || at[i] > hi) {
            return 0;
        }
        lo = 0x80;
        hi = 0xbf;
        *skip_out = i + 1;
    }
    return need;
}

static void put_string_body(writer_t *w, const void *bytes, size_t len)
{
    const uint8_t *at = bytes;
    size_t plain = 0; /* start of the run not yet written */

    for (size_t i = 0; i < len;) {
        size_t skip = 1;
        size_t n = utf8_len(at + i, len - i, &skip);
        bool escape = n == 1 && (at[i] < 0x20 || at[i] == '"' || at[i] == '\\' || at[i] == 0x7f);
        if (n > 0 && !escape) {
            i += n;
            continue;
        }
        put(w, (const char *)at + plain, i - plain);
        if (n == 0) {
            puts_(w, REPLACEMENT);
        } else if (at[i] == '"' || at[i] == '\\') {
            const char pair[2] = {'\\', (char)at[i]};
            put(w, pair, 2);
        } else if (at[i] == '\n') {
            puts_(w, "\\n");
        } else {
            PUTF(w, "\\u%04x", at[i]);
        }
        i += skip;
        plain = i;
    }
    put(w, (const char *)at + plain, len - plain);
}

static void put_string(writer_t *w, const void *bytes, size_t len)
{
    puts_(w, "\"");
    if (len > 0) {
        put_string_body(w, bytes, len);
    }
    puts_(w, "\"");
}

static void put_text(writer_t *w, const char *text)
{
    put_string(w, text, strlen(text));
}

bool rtr_reply_is_utf8(const char *bytes, size_t len)
{
    size_t skip = 0;
    for (size_t i = 0; i < len; i += skip) {
        if (utf8_len((const uint8_t *)bytes + i, len - i, &skip) == 0) {
            return false;
        }
    }
    return true;
}

/* Characters as put_string() shows them. */
static uint32_t count_chars(const char *bytes, size_t len)
{
    uint32_t chars = 0;
    size_t skip = 0;
    for (size_t i = 0; i < len; i += skip) {
        (void)utf8_len((const uint8_t *)bytes + i, len - i, &skip);
        chars++;
    }
    return chars;
}

static void put_real(writer_t *w, double value)
{
    if (isnan(value)) {
        puts_(w, "null");
    } else {
        PUTF(w, "%.9g", value < LOGPROB_FLOOR ? LOGPROB_FLOOR : value);
    }
}

/* --- log-probabilities ------------------------------------------------------------------------ */

static void token_text(const rtr_head_t *h, uint32_t id, const char **bytes, size_t *len)
{
    if (!td_tokenizer_bytes(h->model->tok, id, bytes, len)) {
        *bytes = "";
        *len = 0;
    }
}

static bool has_logprob(const rtr_piece_t *piece, uint32_t i)
{
    return i < piece->logprobs.count && !(piece->is_prompt && i == 0);
}

static void put_chat_token(writer_t *w, const rtr_head_t *h, uint32_t id, double logprob)
{
    const char *bytes = NULL;
    size_t len = 0;

    token_text(h, id, &bytes, &len);
    puts_(w, "{\"token\":");
    put_string(w, bytes, len);
    puts_(w, ",\"logprob\":");
    put_real(w, logprob);
    puts_(w, ",\"bytes\":[");
    for (size_t i = 0; i < len; i++) {
        PUTF(w, "%s%u", i > 0 ? "," : "", (unsigned)(uint8_t)bytes[i]);
    }
    puts_(w, "]");
}

static void put_chat_logprobs(writer_t *w, const rtr_head_t *h, const rtr_piece_t *pieces,
                              uint32_t piece_count)
{
    bool first = true;

    puts_(w, "{\"content\":[");
    for (uint32_t p = 0; p < piece_count; p++) {
        const td_msg_logprobs_t *lp = &pieces[p].logprobs;
        uint32_t top = 0;
        for (uint32_t i = 0; i < pieces[p].count; i++) {
            uint32_t tops = lp->top_counts != NULL && i < lp->count ? lp->top_counts[i] : 0;
            puts_(w, first ? "" : ",");
            first = false;
            put_chat_token(w, h, pieces[p].tokens[i],
                           has_logprob(&pieces[p], i) ? (double)lp->token_logprobs[i] : NAN);
            puts_(w, ",\"top_logprobs\":[");
            for (uint32_t k = 0; k < tops; k++, top++) {
                puts_(w, k > 0 ? "," : "");
                put_chat_token(w, h, lp->top_tokens[top], (double)lp->top_logprobs[top]);
                puts_(w, "}");
            }
            puts_(w, "]}");
        }
    }
    puts_(w, "],\"refusal\":null}");
}

/* One entry of a map from token text to log-probability. Several tokens that are no UTF-8 would all
 * have the same name, so only the first of them is listed. */
static void put_map_entry(writer_t *w, const rtr_head_t *h, uint32_t id, double logprob, bool *any,
                          bool *torn)
{
    const char *bytes = NULL;
    size_t len = 0;

    token_text(h, id, &bytes, &len);
    if (!rtr_reply_is_utf8(bytes, len)) {
        if (*torn) {
            return;
        }
        *torn = true;
    }
    puts_(w, *any ? "," : "");
    *any = true;
    put_string(w, bytes, len);
    puts_(w, ":");
    put_real(w, logprob);
}

static void put_top_map(writer_t *w, const rtr_head_t *h, const rtr_piece_t *piece, uint32_t i,
                        uint32_t *top)
{
    const td_msg_logprobs_t *lp = &piece->logprobs;
    uint32_t tops = lp->top_counts != NULL && i < lp->count ? lp->top_counts[i] : 0;
    bool any = false;
    bool torn = false;
    bool listed = false;

    if (!has_logprob(piece, i)) {
        *top += tops;
        puts_(w, "null");
        return;
    }
    puts_(w, "{");
    for (uint32_t k = 0; k < tops; k++, (*top)++) {
        listed = listed || lp->top_tokens[*top] == piece->tokens[i];
        put_map_entry(w, h, lp->top_tokens[*top], (double)lp->top_logprobs[*top], &any, &torn);
    }
    if (!listed) {
        put_map_entry(w, h, piece->tokens[i], (double)lp->token_logprobs[i], &any, &torn);
    }
    puts_(w, "}");
}

static void put_completion_logprobs(writer_t *w, const rtr_head_t *h, const rtr_piece_t *pieces,
                                    uint32_t piece_count, uint32_t *text_offset)
{
    static const char *const lists[] = {"{\"tokens\":[", "],\"token_logprobs\":[",
                                        "],\"top_logprobs\":[", "],\"text_offset\":["};

    for (size_t list = 0; list < TD_ARRAY_LEN(lists); list++) {
        bool first = true;
        puts_(w, lists[list]);
        for (uint32_t p = 0; p < piece_count; p++) {
            uint32_t top = 0;
            for (uint32_t i = 0; i < pieces[p].count; i++) {
                const char *bytes = NULL;
                size_t len = 0;
                token_text(h, pieces[p].tokens[i], &bytes, &len);
                puts_(w, first ? "" : ",");
                first = false;
                if (list == 0) {
                    put_string(w, bytes, len);
                } else if (list == 1) {
                    put_real(w, has_logprob(&pieces[p], i)
                                    ? (double)pieces[p].logprobs.token_logprobs[i]
                                    : NAN);
                } else if (list == 2) {
                    put_top_map(w, h, &pieces[p], i, &top);
                } else {
                    PUTF(w, "%u", *text_offset);
                    *text_offset += count_chars(bytes, len);
                }
            }
        }
    }
    puts_(w, "]}");
}

/* --- choices ---------------------------------------------------------------------------------- */

static void put_joined_text(writer_t *w, const rtr_piece_t *pieces, uint32_t piece_count)
{
    puts_(w, "\"");
    for (uint32_t p = 0; p < piece_count; p++) {
        if (pieces[p].text_len > 0) {
            put_string_body(w, pieces[p].text, pieces[p].text_len);
        }
    }
    puts_(w, "\"");
}

static void put_finish(writer_t *w, const rtr_piece_t *last)
{
    puts_(w, ",\"finish_reason\":");
    puts_(w, last->finish == TD_FINISH_STOP     ? "\"stop\""
             : last->finish == TD_FINISH_LENGTH ? "\"length\""
                                                : "null");
    if (last->finish != TD_FINISH_NONE && last->stop_match.len > 0) {
        puts_(w, ",\"stop_reason\":");
        put_string(w, last->stop_match.at, last->stop_match.len);
    }
}

static void put_choice(writer_t *w, const rtr_head_t *h, uint32_t index, bool is_chunk, bool opened,
                       const rtr_piece_t *pieces, uint32_t piece_count, uint32_t *text_offset)
{
    puts_(w, "{\"index\":");
    put_number(w, index);
    puts_(w, ",");
    if (h->kind == RTR_KIND_COMPLETION) {
        puts_(w, "\"text\":");
        put_joined_text(w, pieces, piece_count);
    } else if (is_chunk) {
        puts_(w, opened ? "\"delta\":{\"content\":"
                        : "\"delta\":{\"role\":\"assistant\",\"content\":");
        put_joined_text(w, pieces, piece_count);
        puts_(w, "}");
    } else {
        puts_(w, "\"message\":{\"role\":\"assistant\",\"content\":");
        put_joined_text(w, pieces, piece_count);
        puts_(w, ",\"refusal\":null}");
    }
    puts_(w, ",\"logprobs\":");
    if (!h->want_logprobs) {
        puts_(w, "null");
    } else if (h->kind == RTR_KIND_COMPLETION) {
        put_completion_logprobs(w, h, pieces, piece_count, text_offset);
    } else {
        put_chat_logprobs(w, h, pieces, piece_count);
    }
    put_finish(w, &pieces[piece_count - 1]);
    puts_(w, "}");
}

static void put_hashes(writer_t *w, const rtr_piece_t *pieces, uint32_t piece_count)
{
    bool first = true;

    puts_(w, "[");
    for (uint32_t p = 0; p < piece_count; p++) {
        for (uint32_t i = 0; i < pieces[p].hash_count; i++) {
            PUTF(w, "%s\"%016" PRIx64 "\"", first ? "" : ",", pieces[p].hashes[i]);
            first = false;
        }
    }
    puts_(w, "]");
}

/* Ids of what was generated, so that a next turn can repeat them exactly. */
static void put_token_ids(writer_t *w, const rtr_piece_t *pieces, uint32_t piece_count)
{
    bool first = true;

    puts_(w, "[");
    for (uint32_t p = 0; p < piece_count; p++) {
        for (uint32_t i = 0; !pieces[p].is_prompt && i < pieces[p].count; i++) {
            puts_(w, first ? "" : ",");
            put_number(w, pieces[p].tokens[i]);
            first = false;
        }
    }
    puts_(w, "]");
}

static void put_usage(writer_t *w, const td_msg_usage_t *u)
{
    puts_(w, "\"usage\":{\"prompt_tokens\":");
    put_number(w, u->prompt_tokens);
    puts_(w, ",\"completion_tokens\":");
    put_number(w, u->completion_tokens);
    puts_(w, ",\"total_tokens\":");
    put_number(w, u->prompt_tokens + u->completion_tokens);
    puts_(w, ",\"prompt_tokens_details\":{\"cached_tokens\":");
    put_number(w, u->cached_local_tokens + u->cached_store_tokens);
    puts_(w, "},\"completion_tokens_details\":{\"accepted_prediction_tokens\":");
    put_number(w, u->accepted_draft_tokens);
    puts_(w, ",\"rejected_prediction_tokens\":");
    put_number(w, u->rejected_draft_tokens);
    puts_(w, "}}");
}

static void put_head(writer_t *w, const rtr_head_t *h, bool is_chunk)
{
    const char *object = h->kind == RTR_KIND_COMPLETION ? "text_completion"
                         : is_chunk                     ? "chat.completion.chunk"
                                                        : "chat.completion";
    puts_(w, "{\"id\":");
    put_text(w, h->id);
    puts_(w, ",\"object\":\"");
    puts_(w, object);
    puts_(w, "\",\"created\":");
    put_number(w, h->created_s);
    puts_(w, ",\"model\":");
    put_text(w, h->model->name);
    puts_(w, ",\"system_fingerprint\":");
    put_text(w, h->model->fingerprint);
    puts_(w, ",\"choices\":[");
}

static td_status_t finish(writer_t *w, size_t before)
{
    if (w->status != TD_OK && w->out->len > before) {
        w->out->len = before;
        w->out->bytes[before] = '\0';
    }
    return w->status;
}

td_status_t rtr_reply_string(const void *bytes, size_t len, td_str_t *out)
{
    writer_t w = {.out = out};
    size_t before = out->len;
    put_string(&w, bytes, len);
    return finish(&w, before);
}

td_status_t rtr_reply_chunk_head(const rtr_head_t *head, td_str_t *out)
{
    writer_t w = {.out = out};
    size_t before = out->len;

    puts_(&w, "data: ");
    put_head(&w, head, true);
    return finish(&w, before);
}

td_status_t rtr_reply_chunk(const rtr_head_t *head, uint32_t index, bool opened,
                            const rtr_piece_t *pieces, uint32_t piece_count, uint32_t *text_offset,
                            td_str_t *out)
{
    writer_t w = {.out = out};
    size_t before = out->len;

    if (head->chunk_head != NULL && head->chunk_head->len > 0) {
        put(&w, head->chunk_head->bytes, head->chunk_head->len);
    } else {
        w.status = rtr_reply_chunk_head(head, out);
    }
    put_choice(&w, head, index, true, opened, pieces, piece_count, text_offset);
    puts_(&w, head->usage_null ? "],\"usage\":null" : "]");
    if (head->tandem) {
        puts_(&w, ",\"tandem\":{\"logits_xxh\":");
        put_hashes(&w, pieces, piece_count);
        puts_(&w, ",\"tokens\":");
        put_token_ids(&w, pieces, piece_count);
        puts_(&w, "}");
    }
    puts_(&w, "}\n\n");
    return finish(&w, before);
}

td_status_t rtr_reply_usage_chunk(const rtr_head_t *head, const td_msg_usage_t *usage,
                                  td_str_t *out)
{
    writer_t w = {.out = out};
    size_t before = out->len;

    puts_(&w, "data: ");
    put_head(&w, head, true);
    puts_(&w, "],");
    put_usage(&w, usage);
    puts_(&w, "}\n\n");
    return finish(&w, before);
}

td_status_t rtr_reply_full(const rtr_head_t *head, const rtr_choice_view_t *choices, uint32_t count,
                           const td_msg_usage_t *usage, td_str_t *out)
{
    writer_t w = {.out = out};
    size_t before = out->len;

    put_head(&w, head, false);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t text_offset = 0;
        puts_(&w, i > 0 ? "," : "");
        put_choice(&w, head, i, false, false, choices[i].pieces, choices[i].piece_count,
                   &text_offset);
    }
    puts_(&w, "],");
    put_usage(&w, usage);
    if (head->tandem) {
        puts_(&w, ",\"tandem\":{\"prefill\":");
        put_text(&w, head->prefill_id);
        puts_(&w, ",\"decode\":");
        put_text(&w, head->decode_id);
        puts_(&w, ",\"logits_xxh\":[");
        for (uint32_t i = 0; i < count; i++) {
            puts_(&w, i > 0 ? "," : "");
            put_hashes(&w, choices[i].pieces, choices[i].piece_count);
        }
        puts_(&w, "],\"tokens\":[");
        for (uint32_t i = 0; i < count; i++) {
            puts_(&w, i > 0 ? "," : "");
            put_token_ids(&w, choices[i].pieces, choices[i].piece_count);
        }
        puts_(&w, "]}");
    }
    puts_(&w, "}\n");
    return finish(&w, before);
}

/* --- the rest --------------------------------------------------------------------------------- */

static void put_error(writer_t *w, const rtr_error_t *error)
{
    puts_(w, "{\"error\":{\"message\":");
    put_text(w, error->message);
    puts_(w, ",\"type\":");
    put_text(w, error->type);
    puts_(w, ",\"param\":");
    if (error->param[0] != '\0') {
        put_text(w, error->param);
    } else {
        puts_(w, "null");
    }
    puts_(w, ",\"code\":");
    if (error->code != NULL) {
        put_text(w, error->code);
    } else {
        puts_(w, "null");
    }
    puts_(w, "}}");
}

td_status_t rtr_reply_error(const rtr_error_t *error, td_str_t *out)
{
    writer_t w = {.out = out};
    size_t before = out->len;
    put_error(&w, error);
    puts_(&w, "\n");
    return finish(&w, before);
}

td_status_t rtr_reply_error_event(const rtr_error_t *error, td_str_t *out)
{
    writer_t w = {.out = out};
    size_t before = out->len;
    puts_(&w, "data: ");
    put_error(&w, error);
    puts_(&w, "\n\n");
    return finish(&w, before);
}

td_status_t rtr_reply_tokenized(const rtr_model_t *model, const rtr_prompt_t *prompt, td_str_t *out)
{
    writer_t w = {.out = out};
    size_t before = out->len;

    PUTF(&w, "{\"count\":%u,\"max_model_len\":%u,\"tokens\":[", prompt->count, model->context_max);
    for (uint32_t i = 0; i < prompt->count; i++) {
        PUTF(&w, "%s%u", i > 0 ? "," : "", prompt->tokens[i]);
    }
    puts_(&w, "]}\n");
    return finish(&w, before);
}

td_status_t rtr_reply_detokenized(const rtr_prompt_t *prompt, td_str_t *out)
{
    writer_t w = {.out = out};
    size_t before = out->len;
    puts_(&w, "{\"prompt\":");
    put_string(&w, prompt->text.bytes, prompt->text.len);
    puts_(&w, "}\n");
    return finish(&w, before);
}

td_status_t rtr_reply_model(const rtr_model_t *model, bool as_list, td_str_t *out)
{
    writer_t w = {.out = out};
    size_t before = out->len;

    puts_(&w, as_list ? "{\"object\":\"list\",\"data\":[{\"id\":" : "{\"id\":");
    put_text(&w, model->name);
    PUTF(&w,
         ",\"object\":\"model\",\"created\":%" PRIu64
         ",\"owned_by\":\"tandem\",\"max_model_len\":%u}",
         model->created_s, model->context_max);
    puts_(&w, as_list ? "]}\n" : "\n");
    return finish(&w, before);
}

#include "tests/bench/bench_stream.h"

#include <ctype.h>
#include <jansson.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "tests/bench/bench.h"

#define GET_TIMEOUT_MS 20000u
#define SHOWN_BYTES 120 /* of what a server sent, in an error */

/* --- errors ----------------------------------------------------------------------------------- */

/* The first error stays. Texts of a server may hold anything: only printable ones get through. */
static void fail(bench_stream_t *s, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
static void fail(bench_stream_t *s, const char *fmt, ...)
{
    va_list args;

    if (s->error[0] != '\0') {
        return;
    }
    va_start(args, fmt);
    (void)vsnprintf(s->error, sizeof(s->error), fmt, args);
    va_end(args);
    for (char *c = s->error; *c != '\0'; c++) {
        if (!isprint((unsigned char)*c)) {
            *c = '?';
        }
    }
}

/* "error": {"message": "..."} or "error": "...", as servers write it; NULL if there is none. */
static const char *error_text(const json_t *event)
{
    const json_t *error = json_object_get(event, "error");
    const char *text = json_string_value(error);

    if (text == NULL) {
        text = json_string_value(json_object_get(error, "message"));
    }
    return error == NULL || json_is_null(error) ? NULL : text == NULL ? "without a message" : text;
}

/* --- events ----------------------------------------------------------------------------------- */

static void take_text(bench_stream_t *s, const json_t *text)
{
    size_t len = json_string_length(text);
    uint64_t now_ns = 0;

    if (len == 0) { /* a role, a finish reason, or a token that shows no text yet */
        return;
    }
    if (s->text.len + len > BENCH_TEXT_BYTES_MAX ||
        td_str_append(&s->text, json_string_value(text), len) != TD_OK) {
        fail(s, "the answer is longer than %u bytes", BENCH_TEXT_BYTES_MAX);
        return;
    }
    now_ns = td_now_ns();
    if (s->on_piece != NULL) {
        s->on_piece(s->ctx, now_ns, s->last_ns);
    }
    if (s->first_ns == 0) {
        s->first_ns = now_ns;
    }
    s->last_ns = now_ns;
    s->pieces++;
}

static bool take_count(bench_stream_t *s, const json_t *value, uint32_t *out)
{
    json_int_t count = json_integer_value(value);

    if (!json_is_integer(value) || count < 0 || count > BENCH_TOKENS_MAX) {
        fail(s, "the usage holds something that is no count of tokens");
        return false;
    }
    *out = (uint32_t)count;
    return true;
}

/* Servers that draft nothing leave them out. */
static void take_drafts(bench_stream_t *s, const json_t *details)
{
    const json_t *accepted = json_object_get(details, "accepted_prediction_tokens");
    const json_t *rejected = json_object_get(details, "rejected_prediction_tokens");

    if (accepted != NULL && take_count(s, accepted, &s->accepted_tokens) && rejected != NULL) {
        (void)take_count(s, rejected, &s->rejected_tokens);
    }
}

static void take_usage(bench_stream_t *s, const json_t *usage)
{
    const json_t *cached =
        json_object_get(json_object_get(usage, "prompt_tokens_details"), "cached_tokens");
    const json_t *drafts = json_object_get(usage, "completion_tokens_details");

    if (!json_is_object(usage)) { /* null in all events but the last */
        return;
    }
    s->has_usage =
        take_count(s, json_object_get(usage, "prompt_tokens"), &s->prompt_tokens) &&
        take_count(s, json_object_get(usage, "completion_tokens"), &s->completion_tokens);
    if (drafts != NULL && !json_is_null(drafts)) {
        take_drafts(s, drafts);
    }
    if (cached != NULL && !json_is_null(cached)) {
        s->has_cached = take_count(s, cached, &s->cached_tokens);
    }
}

static void take_event(bench_stream_t *s, const char *data, size_t len)
{
    json_t *event = NULL;
    const json_t *choice = NULL;
    const json_t *delta = NULL;
    const char *text = NULL;

    s->event_ns = s->event_ns == 0 ? td_now_ns() : s->event_ns;
    if (len == 6 && memcmp(data, "[DONE]", 6) == 0) {
        s->done = true;
        return;
    }
    event = json_loadb(data, len, JSON_ALLOW_NUL, NULL);
    if (!json_is_object(event)) {
        fail(s, "an event is not a JSON object: %.*s", (int)TD_MIN(len, SHOWN_BYTES), data);
        json_decref(event);
        return;
    }
    text = error_text(event);
    if (text != NULL) {
        fail(s, "the stream holds an error: %.*s", SHOWN_BYTES, text);
    }
    choice = json_array_get(json_object_get(event, "choices"), 0);
    delta = json_object_get(choice, "delta");
    take_text(s, json_object_get(choice, "text"));
    take_text(s, json_object_get(delta, "reasoning_content"));
    take_text(s, json_object_get(delta, "content"));
    take_usage(s, json_object_get(event, "usage"));
    json_decref(event);
}

static bool starts_with(const char *line, size_t len, const char *word)
{
    size_t word_len = strlen(word);
    return len >= word_len && memcmp(line, word, word_len) == 0;
}

static void take_line(bench_stream_t *s, const char *line, size_t len)
{
    if (len > 0 && line[len - 1] == '\r') {
        len--;
    }
    if (starts_with(line, len, "data:")) {
        line += 5;
        len -= 5;
        if (len > 0 && line[0] == ' ') {
            line++;
            len--;
        }
        take_event(s, line, len);
    } else if (len > 0 && line[0] != ':' && !starts_with(line, len, "event:") &&
               !starts_with(line, len, "id:") && !starts_with(line, len, "retry:")) {
        fail(s, "not an event stream: %.*s", (int)TD_MIN(len, SHOWN_BYTES), line);
    }
}

void bench_stream_take(bench_stream_t *s, const char *bytes, size_t len)
{
    while (len > 0 && s->error[0] == '\0') {
        const char *newline = memchr(bytes, '\n', len);
        size_t part = newline == NULL ? len : (size_t)(newline - bytes);

        if (s->line.len + part > BENCH_LINE_BYTES_MAX) {
            fail(s, "a line of the stream is longer than %u bytes", BENCH_LINE_BYTES_MAX);
        } else if (newline != NULL && s->line.len == 0) {
            take_line(s, bytes, part); /* the usual case: no copy */
        } else if (td_str_append(&s->line, bytes, part) != TD_OK) {
            fail(s, "no memory");
        } else if (newline != NULL) {
            take_line(s, s->line.bytes, s->line.len);
            td_str_clear(&s->line);
        }
        part += newline == NULL ? 0 : 1;
        bytes += part;
        len -= part;
    }
}

/* --- requests --------------------------------------------------------------------------------- */

static size_t on_body(char *bytes, size_t size, size_t count, void *ctx)
{
    bench_stream_t *s = ctx;
    size_t len = size * count;

    (void)curl_easy_getinfo(s->curl, CURLINFO_RESPONSE_CODE, &s->http_status);
    if (s->http_status == 200) {
        bench_stream_take(s, bytes, len);
    } else if (s->line.len + len > BENCH_BODY_BYTES_MAX ||
               td_str_append(&s->line, bytes, len) != TD_OK) {
        fail(s, "HTTP %ld with a body of more than %u bytes", s->http_status, BENCH_BODY_BYTES_MAX);
    }
    return s->error[0] == '\0' ? len : CURL_WRITEFUNC_ERROR;
}

static bool add_header(struct curl_slist **list, const char *header)
{
    struct curl_slist *longer = curl_slist_append(*list, header);
    if (longer != NULL) {
        *list = longer;
    }
    return longer != NULL;
}

static bool add_key(struct curl_slist **list, const char *key)
{
    td_str_t header = {0};
    bool ok = td_str_printf(&header, "Authorization: Bearer %s", key) == TD_OK &&
              add_header(list, header.bytes);
    td_str_fini(&header);
    return ok;
}

int bench_stream_init(bench_stream_t *stream, const char *url, const char *key, uint32_t timeout_ms)
{
    bool ok = false;

    *stream = (bench_stream_t){.curl = curl_easy_init()};
    ok = stream->curl != NULL && add_header(&stream->headers, "Content-Type: application/json") &&
         add_header(&stream->headers, "Expect:") && /* no waiting for "100 Continue" */
         (key == NULL || add_key(&stream->headers, key)) &&
         curl_easy_setopt(stream->curl, CURLOPT_URL, url) == CURLE_OK &&
         curl_easy_setopt(stream->curl, CURLOPT_PROTOCOLS_STR, "http,https") == CURLE_OK &&
         curl_easy_setopt(stream->curl, CURLOPT_HTTPHEADER, stream->headers) == CURLE_OK &&
         curl_easy_setopt(stream->curl, CURLOPT_NOPROXY, "*") == CURLE_OK &&
         curl_easy_setopt(stream->curl, CURLOPT_NOSIGNAL, 1L) == CURLE_OK &&
         curl_easy_setopt(stream->curl, CURLOPT_TIMEOUT_MS, (long)timeout_ms) == CURLE_OK &&
         curl_easy_setopt(stream->curl, CURLOPT_ERRORBUFFER, stream->curl_error) == CURLE_OK &&
         curl_easy_setopt(stream->curl, CURLOPT_WRITEFUNCTION, on_body) == CURLE_OK &&
         curl_easy_setopt(stream->curl, CURLOPT_WRITEDATA, stream) == CURLE_OK;
    if (!ok) {
        (void)bench_usage_error("cannot make requests to \"%s\"", url);
    }
    return ok ? BENCH_EXIT_OK : BENCH_EXIT_FAILED;
}

void bench_stream_fini(bench_stream_t *stream)
{
    curl_easy_cleanup(stream->curl);
    curl_slist_free_all(stream->headers);
    td_free(stream->body);
    td_str_fini(&stream->line);
    td_str_fini(&stream->text);
    *stream = (bench_stream_t){0};
}

void bench_stream_begin(bench_stream_t *stream, char *body)
{
    bench_stream_t fresh = {.curl = stream->curl,
                            .headers = stream->headers,
                            .on_piece = stream->on_piece,
                            .ctx = stream->ctx,
                            .body = body,
                            .line = stream->line,
                            .text = stream->text};
    td_free(stream->body);
    *stream = fresh;
    td_str_clear(&stream->line);
    td_str_clear(&stream->text);
    (void)curl_easy_setopt(stream->curl, CURLOPT_POSTFIELDSIZE_LARGE, (curl_off_t)strlen(body));
    (void)curl_easy_setopt(stream->curl, CURLOPT_POSTFIELDS, body);
    stream->sent_ns = td_now_ns();
}

/* HTTP 4xx and 5xx: the message of the body, or how it begins. */
static void fail_with_body(bench_stream_t *s)
{
    json_t *body = json_loadb(s->line.bytes == NULL ? "" : s->line.bytes, s->line.len, 0, NULL);
    const char *text = error_text(body);

    if (text != NULL) {
        fail(s, "HTTP %ld: %.*s", s->http_status, SHOWN_BYTES, text);
    } else {
        fail(s, "HTTP %ld: %.*s", s->http_status, (int)TD_MIN(s->line.len, SHOWN_BYTES),
             s->line.len == 0 ? "" : s->line.bytes);
    }
    json_decref(body);
}

void bench_stream_end(bench_stream_t *stream, CURLcode code)
{
    stream->end_ns = td_now_ns();
    if (code != CURLE_OK) {
        /* Ours, if there is one, came first. */
        fail(stream, "%s",
             stream->curl_error[0] != '\0' ? stream->curl_error : curl_easy_strerror(code));
        return;
    }
    (void)curl_easy_getinfo(stream->curl, CURLINFO_RESPONSE_CODE, &stream->http_status);
    if (stream->http_status != 200) {
        fail_with_body(stream);
        return;
    }
    if (stream->line.len > 0) { /* a last line without its end: it may say what this is */
        take_line(stream, stream->line.bytes, stream->line.len);
    }
    if (!stream->done) {
        fail(stream, "the stream ended without [DONE]");
    } else if (!stream->has_usage && stream->pieces == 0) {
        fail(stream, "the stream held neither text nor a usage");
    }
}

bool bench_stream_run(bench_stream_t *stream, char *body)
{
    bench_stream_begin(stream, body);
    bench_stream_end(stream, curl_easy_perform(stream->curl));
    return stream->error[0] == '\0';
}

uint32_t bench_stream_tokens(const bench_stream_t *stream)
{
    return stream->has_usage ? stream->completion_tokens : stream->pieces;
}

/* --- what else is asked ----------------------------------------------------------------------- */

char *bench_api_url(const char *base, const char *path)
{
    td_str_t url = {0};
    size_t len = strlen(base);

    while (len > 0 && base[len - 1] == '/') {
        len--;
    }
    if (len >= 3 && memcmp(base + len - 3, "/v1", 3) == 0) {
        len -= 3;
    }
    if (td_str_append(&url, base, len) != TD_OK || td_str_append_text(&url, "/v1") != TD_OK ||
        td_str_append_text(&url, path) != TD_OK) {
        td_str_fini(&url);
        return NULL;
    }
    return url.bytes;
}

static size_t on_whole_body(char *bytes, size_t size, size_t count, void *ctx)
{
    td_str_t *body = ctx;
    size_t len = size * count;

    if (body->len + len > BENCH_BODY_BYTES_MAX || td_str_append(body, bytes, len) != TD_OK) {
        return CURL_WRITEFUNC_ERROR;
    }
    return len;
}

/* The body of a GET; CURLE_OK and *body, or what went wrong. */
static CURLcode get_body(const char *url, const char *key, td_str_t *body)
{
    bench_stream_t stream = {0};
    CURLcode code = CURLE_OUT_OF_MEMORY;

    if (bench_stream_init(&stream, url, key, GET_TIMEOUT_MS) == BENCH_EXIT_OK) {
        (void)curl_easy_setopt(stream.curl, CURLOPT_WRITEFUNCTION, on_whole_body);
        (void)curl_easy_setopt(stream.curl, CURLOPT_WRITEDATA, body);
        code = curl_easy_perform(stream.curl);
    }
    bench_stream_fini(&stream);
    return code;
}

int bench_model_name(const char *base, const char *key, char **out)
{
    td_str_t body = {0};
    json_t *models = NULL;
    const char *name = NULL;
    char *url = bench_api_url(base, "/models");
    CURLcode code = url == NULL ? CURLE_OUT_OF_MEMORY : get_body(url, key, &body);

    models = json_loadb(body.bytes == NULL ? "" : body.bytes, body.len, 0, NULL);
    name = json_string_value(
        json_object_get(json_array_get(json_object_get(models, "data"), 0), "id"));
    *out = name == NULL ? NULL : td_strdup(name);
    if (*out == NULL) {
        (void)bench_usage_error(
            "%s does not name a model (%s): is the server up? Else say --model NAME",
            url == NULL ? base : url,
            code != CURLE_OK ? curl_easy_strerror(code) : "an answer of another shape");
    }
    json_decref(models);
    td_str_fini(&body);
    td_free(url);
    return *out == NULL ? BENCH_EXIT_FAILED : BENCH_EXIT_OK;
}

bool bench_metric(const char *address, const char *series, double *out)
{
    td_str_t url = {0};
    td_str_t body = {0};
    td_str_t line = {0};
    const char *at = NULL;

    if (td_str_printf(&url, "http://%s/metrics", address) == TD_OK &&
        td_str_printf(&line, "\n%s ", series) == TD_OK &&
        get_body(url.bytes, NULL, &body) == CURLE_OK && td_str_append(&body, "", 1) == TD_OK) {
        at = strstr(body.bytes, line.bytes);
    }
    if (at != NULL) {
        *out = strtod(at + line.len, NULL);
    }
    td_str_fini(&line);
    td_str_fini(&body);
    td_str_fini(&url);
    return at != NULL;
}

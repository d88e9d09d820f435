/* bench_stream.h - one streamed completion of an OpenAI-compatible server, over libcurl: what came
 * when, and what was wrong with it. Nothing the server sends is trusted: lines, texts and counts
 * have limits, and whatever breaks them ends the stream with an error. Threads: owner. */
#pragma once

#include <curl/curl.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/td_buf.h"

#define BENCH_LINE_BYTES_MAX (256u * 1024u)  /* one line of an event stream */
#define BENCH_TEXT_BYTES_MAX (1024u * 1024u) /* one answer */
#define BENCH_BODY_BYTES_MAX (1024u * 1024u) /* an answer that is no stream */
#define BENCH_TOKENS_MAX 100000000u          /* a believable count in a usage */
#define BENCH_ERROR_BYTES 240u

/** Called for each piece of text: previous_ns is 0 for the first one. */
typedef void (*bench_piece_fn)(void *ctx, uint64_t now_ns, uint64_t previous_ns);

typedef struct bench_stream {
    /* set by bench_stream_init() */
    CURL *curl;                 /* owned; CURLOPT_PRIVATE is the caller's */
    struct curl_slist *headers; /* owned */
    bench_piece_fn on_piece;    /* may be NULL */
    void *ctx;
    /* of the request under way, or the last one */
    char *body;    /* owned: what was asked */
    td_str_t line; /* the unfinished line; the whole body when the status is not 200 */
    td_str_t text; /* the answer so far */
    long http_status;
    uint64_t sent_ns;
    uint64_t event_ns; /* first event of any kind, 0 = none yet */
    uint64_t first_ns; /* first piece of text, 0 = none yet */
    uint64_t last_ns;  /* last piece of text */
    uint64_t end_ns;
    uint32_t pieces; /* with text */
    uint32_t prompt_tokens;
    uint32_t completion_tokens;
    uint32_t cached_tokens;
    uint32_t accepted_tokens; /* drafts; 0 when the server says nothing of them */
    uint32_t rejected_tokens;
    bool has_usage;
    bool has_cached;
    bool done; /* [DONE] has come */
    char curl_error[CURL_ERROR_SIZE];
    char error[BENCH_ERROR_BYTES]; /* printable; empty = nothing wrong */
} bench_stream_t;

/** Prepares requests to one address. key may be NULL. Answers an exit code; what went wrong was
 * said. Owner: the caller ends it with bench_stream_fini(), also after a failure. */
int bench_stream_init(bench_stream_t *stream, const char *url, const char *key,
                      uint32_t timeout_ms);
void bench_stream_fini(bench_stream_t *stream);
/** Makes the next request ready to be performed or added to a multi handle.
 * Owner: body becomes the stream's (td_free). */
void bench_stream_begin(bench_stream_t *stream, char *body);
/** Takes whole lines out of what has come of an event stream; the rest waits in line. */
void bench_stream_take(bench_stream_t *stream, const char *bytes, size_t len);
/** Judges a transfer that has ended; error is empty if the answer is whole. */
void bench_stream_end(bench_stream_t *stream, CURLcode code);
/** Both, and the transfer between them. False when the answer is not whole. */
bool bench_stream_run(bench_stream_t *stream, char *body);
/** Tokens of the answer: the server's count, or the pieces. */
uint32_t bench_stream_tokens(const bench_stream_t *stream);

/** "http://host/v1" or "http://host" and a path like "/chat/completions" to the whole address.
 * NULL when memory is out. Owner: the caller (td_free). */
char *bench_api_url(const char *base, const char *path);
/** Name of the first model the server lists. Answers an exit code; what went wrong was said.
 * Owner: the caller (td_free). */
int bench_model_name(const char *base, const char *key, char **out);
/** A series of a process's status page, by its name with labels as it stands there. address:
 * host:port. False: no answer, or none of that name. */
bool bench_metric(const char *address, const char *series, double *out);

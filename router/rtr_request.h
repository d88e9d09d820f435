/* rtr_request.h - one HTTP request from its body to its last byte.
 * It is shared (reference count) by the connection, the worker and the loop. Its answer grows in a
 * bounded buffer under its mutex; whoever writes wakes the suspended connection under the same
 * mutex. Threads: each field says whose it is; functions: any, unless they say otherwise. Lock
 * order: request mutex, then what MHD takes inside wake(). */
#pragma once

#include <pthread.h>
#include <stdatomic.h>
#include <sys/queue.h>

#include "common/trace/td_tracer.h"
#include "router/rtr_access.h"
#include "router/rtr_api.h"
#include "router/rtr_metrics.h"
#include "router/rtr_placement.h"
#include "router/rtr_reply.h"
#include "router/rtr_tenants.h"

#define RTR_OUT_BYTES_MAX (4u << 20) /* unread bytes of a stream; past it the client is cut off */
#define RTR_REQUEST_ID_CHARS_MAX 64u
#define RTR_DRAFT_CHARS_MAX 63u

typedef struct rtr_ticket rtr_ticket_t;

/** What a choice has got so far. Arrays live in growing byte strings. */
typedef struct rtr_choice {
    td_str_t ids;    /* u32; all that came, also what a stream has given away: for a successor */
    td_str_t tokens; /* u32 */
    td_str_t text;
    td_str_t token_logprobs; /* f32 */
    td_str_t top_counts;     /* u32 */
    td_str_t top_tokens;     /* u32 */
    td_str_t top_logprobs;   /* f32 */
    td_str_t hashes;         /* u64 */
    td_str_t stop_match;
    td_finish_t finish;
    bool is_prompt;
    bool opened;          /* streaming: a chunk of it was given to the client */
    uint32_t received;    /* tokens, given away or kept */
    uint32_t attempt;     /* that the last one came from */
    uint32_t text_offset; /* characters */
    uint64_t last_ns;     /* time of the last token */
} rtr_choice_t;
TD_MUST_CHECK td_status_t rtr_choice_append(rtr_choice_t *choice, const rtr_piece_t *piece);
/** Lends all that was appended. */
rtr_piece_t rtr_choice_piece(const rtr_choice_t *choice);
void rtr_choice_reset(rtr_choice_t *choice);

typedef struct rtr_request {
    atomic_uint refs; /* acq_rel on the last release, so that all writes precede the free */
    atomic_int
        outcome;      /* -1 until ended; the exchange that sets it counts it (relaxed: a counter) */
    atomic_bool gone; /* release by whoever notices, acquire by the loop and workers */
    rtr_kind_t kind;
    char id[48];                                   /* chatcmpl-... */
    char request_id[RTR_REQUEST_ID_CHARS_MAX + 1]; /* x-request-id */
    uint64_t created_s;
    uint64_t arrived_ns;
    uint64_t deadline_ns;
    uint64_t ended_ns;        /* who ended it; 0: not ended */
    rtr_metrics_t *metrics;   /* borrowed; NULL: not counted (TOKENIZE, DETOKENIZE) */
    td_str_t body;            /* connection's, then the worker's */
    rtr_params_t params;      /* worker's, then the loop's */
    rtr_slo_t slo;            /* connection's, then the loop's */
    rtr_tenant_t *tenant;     /* borrowed, whose key it came with; NULL: nobody counts it */
    td_tracer_t *tracer;      /* borrowed; NULL: no spans are sent */
    td_trace_context_t trace; /* its own span: others stand below it */
    uint8_t trace_above[TD_SPAN_ID_BYTES]; /* the client's span; zero: none */
    rtr_access_t *access;                  /* borrowed; told at the very end; NULL: nobody */
    rtr_access_entry_t entry;              /* connection's: who asked for what */

    pthread_mutex_t mu; /* guards what follows, up to the next group */
    td_str_t out;
    size_t out_pos; /* bytes of out already read */
    bool ready;     /* HTTP status and headers are decided */
    bool done;      /* nothing more will be written */
    bool torn;      /* ended without its end: the connection is closed */
    bool suspended; /* the connection waits for wake() */
    bool is_stream; /* the answer is an event stream */
    int http_status;
    uint32_t retry_after_s; /* 0: says nothing */
    char prefill_id[TD_MSG_ID_CHARS_MAX + 1];
    char decode_id[TD_MSG_ID_CHARS_MAX + 1];
    char draft[RTR_DRAFT_CHARS_MAX + 1]; /* how it drafts, for people to read */
    rtr_limits_view_t limits;            /* of its tenant, once it was admitted or refused */
    void (*wake)(void *ctx);             /* called under mu when suspended */
    void *wake_ctx;

    TAILQ_ENTRY(rtr_request) link;          /* the loop's, as is the rest */
    rtr_ticket_t *tickets[RTR_PROMPTS_MAX]; /* NULL: not begun, or ended well */
    uint32_t tickets_left;
    td_str_t chunk_head;   /* how each event of its stream begins */
    rtr_choice_t *choices; /* owned [prompt_count * n] */
    rtr_choice_t *echoes;  /* owned [prompt_count]: the prompt with its log-probabilities */
    uint32_t choice_count;
    uint64_t first_token_ns; /* 0: there was none yet */
    rtr_grant_t grant;       /* what it has taken of its tenant's limits */
    uint64_t placed_tokens;  /* of prompts that were placed */
    td_msg_usage_t usage;
} rtr_request_t;

/** Errors: TD_ERR_NO_MEMORY. Owner: the caller holds one reference. */
TD_MUST_CHECK td_status_t rtr_request_create(rtr_kind_t kind, rtr_metrics_t *metrics,
                                             rtr_request_t **out);
rtr_request_t *rtr_request_ref(rtr_request_t *req);
void rtr_request_unref(rtr_request_t *req); /* NULL is allowed */

/** Puts it under the client's span, where the header names one, else at the head of a trace of its
 * own, of which so many percent are sampled. NULL tracer: nothing happens. Threads: connection,
 * before others know of it. */
void rtr_request_begin_trace(rtr_request_t *req, td_tracer_t *tracer, const char *traceparent,
                             uint32_t sample_percent);

/** Takes room for the choices once the parameters are known. Threads: loop. */
TD_MUST_CHECK td_status_t rtr_request_open_choices(rtr_request_t *req);
/** Names the nodes for the headers; has no effect once the headers are decided. */
void rtr_request_set_nodes(rtr_request_t *req, const char *prefill_id, const char *decode_id);
/** The same of how the first prompt drafts. */
void rtr_request_set_draft(rtr_request_t *req, const char *text);
/** The same of its tenant's limits. */
void rtr_request_set_limits(rtr_request_t *req, const rtr_limits_view_t *limits);
/** Appends bytes of the event stream; the first ones decide the headers.
 * Errors: TD_ERR_BUSY (the client does not read), TD_ERR_NO_MEMORY. */
TD_MUST_CHECK td_status_t rtr_request_give(rtr_request_t *req, const char *bytes, size_t len);
/** True when bytes of a stream went to the client already: its HTTP status is then 200 for good. */
bool rtr_request_streaming(rtr_request_t *req);
/** Ends the request well with the last bytes (text is taken over). Once only; later ends are
 * ignored. */
void rtr_request_complete(rtr_request_t *req, td_str_t *text);
/** Ends it with a refusal: an HTTP error, or an event inside a stream that has begun. */
void rtr_request_fail(rtr_request_t *req, rtr_outcome_t outcome, const rtr_error_t *error,
                      uint32_t retry_after_s);
bool rtr_request_ended(const rtr_request_t *req);
/** The client has left: marks it and wakes the connection. The loop sees the mark and ends it. */
void rtr_request_mark_gone(rtr_request_t *req);

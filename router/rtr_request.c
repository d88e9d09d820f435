#include "router/rtr_request.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/base/td_log.h"

td_status_t rtr_choice_append(rtr_choice_t *c, const rtr_piece_t *p)
{
    const td_msg_logprobs_t *lp = &p->logprobs;

    TD_TRY(td_str_append(&c->tokens, p->tokens, p->count * sizeof(uint32_t)));
    TD_TRY(td_str_append(&c->text, p->text, p->text_len));
    TD_TRY(td_str_append(&c->hashes, p->hashes, p->hash_count * sizeof(uint64_t)));
    TD_TRY(td_str_append(&c->token_logprobs, lp->token_logprobs, lp->count * sizeof(float)));
    for (uint32_t i = 0; i < lp->count; i++) {
        uint32_t tops = lp->top_counts != NULL ? lp->top_counts[i] : 0;
        TD_TRY(td_str_append(&c->top_counts, &tops, sizeof(tops)));
    }
    TD_TRY(td_str_append(&c->top_tokens, lp->top_tokens, lp->top_total * sizeof(uint32_t)));
    TD_TRY(td_str_append(&c->top_logprobs, lp->top_logprobs, lp->top_total * sizeof(float)));
    if (p->stop_match.len > 0) {
        TD_TRY(td_str_append(&c->stop_match, p->stop_match.at, p->stop_match.len));
    }
    if (p->finish != TD_FINISH_NONE) {
        c->finish = p->finish;
    }
    return TD_OK;
}

rtr_piece_t rtr_choice_piece(const rtr_choice_t *c)
{
    return (rtr_piece_t){
        .tokens = (const uint32_t *)(const void *)c->tokens.bytes,
        .count = (uint32_t)(c->tokens.len / sizeof(uint32_t)),
        .text = c->text.bytes,
        .text_len = c->text.len,
        .hashes = (const uint64_t *)(const void *)c->hashes.bytes,
        .hash_count = (uint32_t)(c->hashes.len / sizeof(uint64_t)),
        .finish = c->finish,
        .stop_match = {(const uint8_t *)c->stop_match.bytes, c->stop_match.len},
        .is_prompt = c->is_prompt,
        .logprobs = {.count = (uint32_t)(c->token_logprobs.len / sizeof(float)),
                     .token_logprobs = (const float *)(const void *)c->token_logprobs.bytes,
                     .top_counts = (const uint32_t *)(const void *)c->top_counts.bytes,
                     .top_total = (uint32_t)(c->top_tokens.len / sizeof(uint32_t)),
                     .top_tokens = (const uint32_t *)(const void *)c->top_tokens.bytes,
                     .top_logprobs = (const float *)(const void *)c->top_logprobs.bytes},
    };
}

static void choice_fini(rtr_choice_t *c)
{
    td_str_fini(&c->ids);
    td_str_fini(&c->tokens);
    td_str_fini(&c->text);
    td_str_fini(&c->token_logprobs);
    td_str_fini(&c->top_counts);
    td_str_fini(&c->top_tokens);
    td_str_fini(&c->top_logprobs);
    td_str_fini(&c->hashes);
    td_str_fini(&c->stop_match);
}

void rtr_choice_reset(rtr_choice_t *c)
{
    bool is_prompt = c->is_prompt;
    choice_fini(c);
    *c = (rtr_choice_t){.is_prompt = is_prompt};
}

td_status_t rtr_request_create(rtr_kind_t kind, rtr_metrics_t *metrics, rtr_request_t **out)
{
    rtr_request_t *req = td_calloc(1, sizeof(*req));

    if (req == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    atomic_init(&req->refs, 1);
    atomic_init(&req->outcome, -1);
    atomic_init(&req->gone, false);
    req->kind = kind;
    req->metrics = metrics;
    req->created_s = td_wall_s();
    req->arrived_ns = td_now_ns();
    req->http_status = 200;
    (void)snprintf(req->id, sizeof(req->id), "%s-%016" PRIx64 "%08x",
                   kind == RTR_KIND_CHAT ? "chatcmpl" : "cmpl", td_random_u64(),
                   (unsigned)td_random_u64());
    (void)snprintf(req->request_id, sizeof(req->request_id), "%s", req->id);
    (void)pthread_mutex_init(&req->mu, NULL);
    *out = req;
    return TD_OK;
}

rtr_request_t *rtr_request_ref(rtr_request_t *req)
{
    (void)atomic_fetch_add_explicit(&req->refs, 1, memory_order_relaxed);
    return req;
}

void rtr_request_begin_trace(rtr_request_t *req, td_tracer_t *tracer, const char *traceparent,
                             uint32_t sample_percent)
{
    td_trace_context_t above;
    td_span_t span;

    if (tracer == NULL) {
        return;
    }
    req->tracer = tracer;
    if (!td_trace_parse(traceparent, &above)) {
        td_trace_begin(&above, td_random_u64() % 100 < sample_percent);
    }
    td_span_begin(&span, &above, "", req->arrived_ns);
    if (span.context.sampled) {
        req->trace = span.context;
        memcpy(req->trace_above, span.parent_id, sizeof(req->trace_above));
    }
}

/* Its own span, and the one from its first token on. */
static void tell_tracer(rtr_request_t *req)
{
    const rtr_access_entry_t *e = &req->entry;
    const uint64_t end_ns = req->ended_ns == 0 ? td_now_ns() : req->ended_ns;
    td_span_t span;

    if (!req->trace.sampled) {
        return;
    }
    if (req->first_token_ns != 0) {
        td_span_begin(&span, &req->trace, "stream", req->first_token_ns);
        td_span_number(&span, "gen_ai.usage.output_tokens", e->usage.completion_tokens);
        td_tracer_end(req->tracer, &span, end_ns);
    }
    td_span_begin(&span, &req->trace,
                  req->kind == RTR_KIND_CHAT ? "POST /v1/chat/completions" : "POST /v1/completions",
                  req->arrived_ns);
    span.context = req->trace;
    memcpy(span.parent_id, req->trace_above, sizeof(span.parent_id));
    span.kind = TD_SPAN_SERVER;
    span.failed = e->outcome != RTR_OUTCOME_OK;
    td_span_number(&span, "http.response.status_code", e->http_status);
    td_span_text(&span, "tandem.request", e->request);
    td_span_text(&span, "tandem.outcome", rtr_outcome_name(e->outcome));
    td_span_text(&span, "tandem.tenant", e->tenant == NULL ? "" : e->tenant->name);
    td_span_number(&span, "gen_ai.usage.input_tokens", e->usage.prompt_tokens);
    td_span_number(&span, "gen_ai.usage.output_tokens", e->usage.completion_tokens);
    td_span_number(&span, "tandem.cached_tokens",
                   (int64_t)e->usage.cached_local_tokens + e->usage.cached_store_tokens);
    td_span_number(&span, "tandem.accepted_drafts", e->usage.accepted_draft_tokens);
    td_tracer_end(req->tracer, &span, end_ns);
}

/* By the last who holds it, so all that is to be known of it is known. */
static void tell_access(rtr_request_t *req)
{
    rtr_access_entry_t *e = &req->entry;
    const int outcome = atomic_load_explicit(&req->outcome, memory_order_relaxed);

    e->outcome = outcome < 0 ? RTR_OUTCOME_CLIENT_GONE : (rtr_outcome_t)outcome;
    e->is_generation = req->metrics != NULL;
    e->is_stream = req->is_stream;
    e->http_status = e->outcome == RTR_OUTCOME_CLIENT_GONE && !req->is_stream
                         ? RTR_STATUS_CLIENT_GONE
                         : req->http_status;
    e->took_us = ((req->ended_ns == 0 ? td_now_ns() : req->ended_ns) - req->arrived_ns) / 1000;
    e->ttft_us = req->first_token_ns == 0 ? 0 : (req->first_token_ns - req->arrived_ns) / 1000;
    e->tenant = req->tenant;
    e->usage = req->usage;
    (void)snprintf(e->request, sizeof(e->request), "%s", req->request_id);
    (void)snprintf(e->prefill, sizeof(e->prefill), "%s", req->prefill_id);
    (void)snprintf(e->decode, sizeof(e->decode), "%s", req->decode_id);
    (void)snprintf(e->draft, sizeof(e->draft), "%s", req->draft);
    rtr_access_add(req->access, e);
}

void rtr_request_unref(rtr_request_t *req)
{
    if (req == NULL || atomic_fetch_sub_explicit(&req->refs, 1, memory_order_acq_rel) != 1) {
        return;
    }
    tell_access(req);
    tell_tracer(req);
    for (uint32_t i = 0; req->choices != NULL && i < req->choice_count; i++) {
        choice_fini(&req->choices[i]);
    }
    for (uint32_t i = 0; req->echoes != NULL && i < req->params.prompt_count; i++) {
        choice_fini(&req->echoes[i]);
    }
    td_free(req->choices);
    td_free(req->echoes);
    rtr_params_fini(&req->params);
    td_str_fini(&req->body);
    td_str_fini(&req->out);
    td_str_fini(&req->chunk_head);
    (void)pthread_mutex_destroy(&req->mu);
    td_free(req);
}

td_status_t rtr_request_open_choices(rtr_request_t *req)
{
    req->choice_count = req->params.prompt_count * req->params.n;
    req->choices = td_calloc(req->choice_count, sizeof(*req->choices));
    req->echoes = td_calloc(req->params.prompt_count, sizeof(*req->echoes));
    if (req->choices == NULL || req->echoes == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    for (uint32_t i = 0; i < req->params.prompt_count; i++) {
        req->echoes[i].is_prompt = true;
    }
    return TD_OK;
}

static void wake_locked(rtr_request_t *req)
{
    if (req->suspended) {
        req->suspended = false;
        req->wake(req->wake_ctx);
    }
}

void rtr_request_set_nodes(rtr_request_t *req, const char *prefill_id, const char *decode_id)
{
    (void)pthread_mutex_lock(&req->mu);
    if (!req->ready) {
        (void)snprintf(req->prefill_id, sizeof(req->prefill_id), "%s", prefill_id);
        (void)snprintf(req->decode_id, sizeof(req->decode_id), "%s", decode_id);
    }
    (void)pthread_mutex_unlock(&req->mu);
}

void rtr_request_set_draft(rtr_request_t *req, const char *text)
{
    (void)pthread_mutex_lock(&req->mu);
    if (!req->ready) {
        (void)snprintf(req->draft, sizeof(req->draft), "%s", text);
    }
    (void)pthread_mutex_unlock(&req->mu);
}

void rtr_request_set_limits(rtr_request_t *req, const rtr_limits_view_t *limits)
{
    (void)pthread_mutex_lock(&req->mu);
    if (!req->ready) {
        req->limits = *limits;
    }
    (void)pthread_mutex_unlock(&req->mu);
}

td_status_t rtr_request_give(rtr_request_t *req, const char *bytes, size_t len)
{
    td_status_t status = TD_ERR_BUSY;

    (void)pthread_mutex_lock(&req->mu);
    if (req->out_pos > 0 && req->out_pos == req->out.len) {
        td_str_clear(&req->out);
        req->out_pos = 0;
    }
    if (req->out.len - req->out_pos + len <= RTR_OUT_BYTES_MAX) {
        if (req->out_pos > RTR_OUT_BYTES_MAX / 4) {
            td_str_consume(&req->out, req->out_pos); /* a client that is never quite done reading */
            req->out_pos = 0;
        }
        status = td_str_append(&req->out, bytes, len);
    }
    if (status == TD_OK) {
        req->is_stream = true;
        req->ready = true;
        wake_locked(req);
    }
    (void)pthread_mutex_unlock(&req->mu);
    return status;
}

bool rtr_request_streaming(rtr_request_t *req)
{
    bool streaming = false;
    (void)pthread_mutex_lock(&req->mu);
    streaming = req->is_stream;
    (void)pthread_mutex_unlock(&req->mu);
    return streaming;
}

bool rtr_request_ended(const rtr_request_t *req)
{
    return atomic_load_explicit(&req->outcome, memory_order_relaxed) >= 0;
}

/* True for the one caller that ends it. */
static bool end_once(rtr_request_t *req, rtr_outcome_t outcome)
{
    int none = -1;
    if (!atomic_compare_exchange_strong_explicit(&req->outcome, &none, (int)outcome,
                                                 memory_order_relaxed, memory_order_relaxed)) {
        return false;
    }
    req->ended_ns = td_now_ns();
    if (req->metrics != NULL) {
        td_metric_add(req->metrics->requests[outcome], 1);
        rtr_tenant_count_end(req->tenant, outcome);
        td_metric_observe_ns(req->metrics->request_time, req->ended_ns - req->arrived_ns);
        TD_LOG_DEBUG("request ended", "req=%s outcome=%s ms=%llu", req->request_id,
                     rtr_outcome_name(outcome),
                     (unsigned long long)((req->ended_ns - req->arrived_ns) / TD_NS_PER_MS));
    }
    return true;
}

void rtr_request_complete(rtr_request_t *req, td_str_t *text)
{
    td_status_t status = TD_OK;

    if (!end_once(req, RTR_OUTCOME_OK)) {
        return;
    }
    (void)pthread_mutex_lock(&req->mu);
    if (req->out.len == 0) {
        td_str_fini(&req->out);
        req->out = *text;
        req->out_pos = 0;
        *text = (td_str_t){0};
    } else {
        status = td_str_append(&req->out, text->bytes, text->len);
    }
    req->is_stream = req->params.stream;
    req->torn = req->torn || status != TD_OK;
    req->ready = true;
    req->done = true;
    wake_locked(req);
    (void)pthread_mutex_unlock(&req->mu);
}

void rtr_request_fail(rtr_request_t *req, rtr_outcome_t outcome, const rtr_error_t *error,
                      uint32_t retry_after_s)
{
    td_status_t status = TD_OK;

    if (!end_once(req, outcome)) {
        return;
    }
    (void)pthread_mutex_lock(&req->mu);
    if (req->is_stream) {
        status = rtr_reply_error_event(error, &req->out);
    } else {
        td_str_clear(&req->out);
        status = rtr_reply_error(error, &req->out);
        req->http_status = error->http;
        req->retry_after_s = retry_after_s;
    }
    req->torn = req->torn || (status != TD_OK && req->is_stream);
    req->ready = true;
    req->done = true;
    wake_locked(req);
    (void)pthread_mutex_unlock(&req->mu);
}

void rtr_request_mark_gone(rtr_request_t *req)
{
    atomic_store_explicit(&req->gone, true, memory_order_release);
    (void)pthread_mutex_lock(&req->mu);
    req->torn = true;
    wake_locked(req);
    (void)pthread_mutex_unlock(&req->mu);
}

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/base/td_log.h"
#include "router/rtr_tickets_internal.h"

/* What it had of its tenant's limits comes back, but for what it used. */
static void release_limits(rtr_request_t *req)
{
    uint64_t answered = 0;

    if (req->tenant == NULL) {
        return;
    }
    for (uint32_t i = 0; req->choices != NULL && i < req->choice_count; i++) {
        answered += req->choices[i].received;
    }
    (void)atomic_fetch_add_explicit(&req->tenant->prompt_tokens, req->placed_tokens,
                                    memory_order_relaxed);
    (void)atomic_fetch_add_explicit(&req->tenant->completion_tokens, answered,
                                    memory_order_relaxed);
    rtr_tenant_release(req->tenant, &req->grant, req->placed_tokens + answered, td_now_ns());
}

/* After this the request may be freed. */
static void request_drop(rtr_tickets_t *ts, rtr_request_t *req)
{
    release_limits(req);
    for (uint32_t i = 0; i < req->params.prompt_count; i++) {
        if (req->tickets[i] != NULL) {
            rtr_ticket_destroy(ts, req->tickets[i], true);
        }
    }
    TAILQ_REMOVE(&ts->requests, req, link);
    ts->running--;
    td_metric_set(ts->config.metrics->running, ts->running);
    rtr_request_unref(req);
}

void rtr_end_failed_for(rtr_tickets_t *ts, rtr_request_t *req, rtr_outcome_t outcome, int http,
                        const char *code, const char *message, uint32_t retry_after_s)
{
    rtr_error_t error;

    rtr_error_set(&error, http, code, NULL, "%s", message);
    TD_LOG_INFO("request failed", "req=%s outcome=%s http=%d why=\"%s\"", req->request_id,
                rtr_outcome_name(outcome), http, message);
    rtr_events_add(ts->config.events, RTR_EVENT_REQUEST_FAILED, "", req->request_id, message);
    rtr_request_fail(req, outcome, &error, retry_after_s);
    request_drop(ts, req);
}

void rtr_end_failed(rtr_tickets_t *ts, rtr_request_t *req, rtr_outcome_t outcome, int http,
                    const char *code, const char *message)
{
    rtr_end_failed_for(ts, req, outcome, http, code, message, http == 429 || http == 503 ? 1 : 0);
}

void rtr_end_limited(rtr_tickets_t *ts, rtr_request_t *req, const char *message,
                     uint32_t retry_after_s)
{
    rtr_error_t error;

    rtr_error_set(&error, 429, "rate_limit_exceeded", NULL, "%s", message);
    TD_LOG_DEBUG("request limited", "req=%s why=\"%s\"", req->request_id, message);
    rtr_request_fail(req, RTR_OUTCOME_REJECTED, &error, retry_after_s);
    request_drop(ts, req);
}

void rtr_end_client_gone(rtr_tickets_t *ts, rtr_request_t *req)
{
    rtr_error_t error;

    rtr_error_set(&error, 499, NULL, NULL, "the client is gone");
    rtr_request_mark_gone(req);
    rtr_request_fail(req, RTR_OUTCOME_CLIENT_GONE, &error, 0);
    request_drop(ts, req);
}

rtr_head_t rtr_ticket_head(const rtr_tickets_t *ts, const rtr_request_t *req)
{
    return (rtr_head_t){.model = ts->config.model,
                        .kind = req->kind,
                        .id = req->id,
                        .created_s = req->created_s,
                        .want_logprobs = req->params.want_logprobs,
                        .usage_null = req->params.include_usage,
                        .tandem = ts->config.model->allow_placement,
                        .prefill_id = req->prefill_id,
                        .decode_id = req->decode_id,
                        .chunk_head = &req->chunk_head};
}

static td_status_t write_full(const rtr_head_t *head, const rtr_request_t *req, td_str_t *out)
{
    rtr_choice_view_t *views = td_calloc(req->choice_count, sizeof(*views));
    td_status_t status = TD_ERR_NO_MEMORY;

    if (views == NULL) {
        return status;
    }
    for (uint32_t i = 0; i < req->choice_count; i++) {
        if (req->params.echo) {
            views[i].pieces[views[i].piece_count++] =
                rtr_choice_piece(&req->echoes[i / req->params.n]);
        }
        views[i].pieces[views[i].piece_count++] = rtr_choice_piece(&req->choices[i]);
    }
    status = rtr_reply_full(head, views, req->choice_count, &req->usage, out);
    td_free(views);
    return status;
}

void rtr_end_complete(rtr_tickets_t *ts, rtr_request_t *req)
{
    rtr_head_t head = rtr_ticket_head(ts, req);
    rtr_metrics_t *m = ts->config.metrics;
    td_str_t text = {0};
    td_status_t status = TD_OK;

    if (!req->params.stream) {
        status = write_full(&head, req, &text);
    } else {
        if (req->params.include_usage) {
            status = rtr_reply_usage_chunk(&head, &req->usage, &text);
        }
        if (status == TD_OK) {
            status = td_str_append_text(&text, "data: [DONE]\n\n");
        }
    }
    if (status != TD_OK) {
        td_str_fini(&text);
        rtr_end_failed(ts, req, RTR_OUTCOME_UPSTREAM_ERROR, 500, NULL, "out of memory");
        return;
    }
    td_metric_add(m->prompt_tokens, req->usage.prompt_tokens);
    td_metric_add(m->cached_tokens,
                  req->usage.cached_local_tokens + req->usage.cached_store_tokens);
    rtr_request_complete(req, &text);
    td_str_fini(&text);
    request_drop(ts, req);
}

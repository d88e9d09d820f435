#include "router/rtr_worker.h"

#include <poll.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/base/td_log.h"
#include "common/base/td_ring.h"

typedef struct worker {
    pthread_t thread;
    td_ring_t *ring; /* owned */
    rtr_workers_t *all;
    atomic_uint large; /* bodies that it has, or will take up. Relaxed: small ones go elsewhere */
    bool started;
} worker_t;

struct rtr_workers {
    const rtr_model_t *model;
    rtr_loop_t *loop;
    worker_t *workers; /* owned [count] */
    uint32_t count;
    atomic_uint turn;     /* relaxed: any distribution will do */
    atomic_bool stopping; /* release before the wake-up, acquire after it */
};

static void answer_here(const rtr_workers_t *ws, rtr_request_t *req)
{
    td_str_t text = {0};
    rtr_error_t error;
    td_status_t status = req->kind == RTR_KIND_TOKENIZE
                             ? rtr_reply_tokenized(ws->model, &req->params.prompts[0], &text)
                             : rtr_reply_detokenized(&req->params.prompts[0], &text);

    if (status == TD_OK) {
        rtr_request_complete(req, &text);
    } else {
        rtr_error_set(&error, 500, NULL, NULL, "out of memory");
        rtr_request_fail(req, RTR_OUTCOME_UPSTREAM_ERROR, &error, 0);
    }
    td_str_fini(&text);
}

/* Takes over one reference. */
static void work(const rtr_workers_t *ws, rtr_request_t *req)
{
    rtr_error_t error;
    td_span_t span;
    td_status_t status = TD_OK;

    if (atomic_load_explicit(&req->gone, memory_order_acquire)) {
        rtr_error_set(&error, 499, NULL, NULL, "the client is gone");
        rtr_request_fail(req, RTR_OUTCOME_CLIENT_GONE, &error, 0);
        rtr_request_unref(req);
        return;
    }
    td_span_begin(&span, &req->trace, "tokenize", td_now_ns());
    td_span_number(&span, "tandem.body_bytes", (int64_t)req->body.len);
    status =
        rtr_api_parse(ws->model, req->kind, req->body.bytes, req->body.len, &req->params, &error);
    span.failed = status != TD_OK;
    td_tracer_end(req->tracer, &span, td_now_ns());
    td_str_fini(&req->body);
    if (status != TD_OK) {
        rtr_request_fail(
            req, status == TD_ERR_INVALID ? RTR_OUTCOME_BAD_REQUEST : RTR_OUTCOME_UPSTREAM_ERROR,
            &error, 0);
    } else if (req->kind == RTR_KIND_TOKENIZE || req->kind == RTR_KIND_DETOKENIZE) {
        answer_here(ws, req);
    } else if (rtr_loop_submit(ws->loop, req) == TD_OK) {
        return; /* the reference went along */
    } else {
        rtr_error_set(&error, 429, "too_many_requests", NULL,
                      "The server has too many requests under way. Try again later.");
        rtr_request_fail(req, RTR_OUTCOME_REJECTED, &error, 1);
    }
    rtr_request_unref(req);
}

static bool is_large(const rtr_request_t *req)
{
    return req->body.len > RTR_WORKER_LARGE_BYTES;
}

static void work_off(worker_t *w, rtr_request_t *req)
{
    const bool large = is_large(req);

    work(w->all, req);
    if (large) {
        (void)atomic_fetch_sub_explicit(&w->large, 1, memory_order_relaxed);
    }
}

static void *worker_main(void *arg)
{
    worker_t *w = arg;
    struct pollfd wait = {.fd = td_ring_fd(w->ring), .events = POLLIN};

    for (;;) {
        void *item = NULL;
        td_ring_drain_fd(w->ring);
        while (td_ring_pop(w->ring, &item)) {
            work_off(w, item);
        }
        if (atomic_load_explicit(&w->all->stopping, memory_order_acquire)) {
            return NULL;
        }
        (void)poll(&wait, 1, -1);
    }
}

td_status_t rtr_workers_create(uint32_t count, const rtr_model_t *model, rtr_loop_t *loop,
                               rtr_workers_t **out)
{
    rtr_workers_t *ws = td_calloc(1, sizeof(*ws));
    td_status_t status = TD_ERR_NO_MEMORY;

    TD_ASSERT(count >= 1 && count <= RTR_WORKERS_MAX);
    if (ws == NULL) {
        return status;
    }
    ws->model = model;
    ws->loop = loop;
    atomic_init(&ws->turn, 0);
    atomic_init(&ws->stopping, false);
    ws->workers = td_calloc(count, sizeof(*ws->workers));
    if (ws->workers == NULL) {
        goto err;
    }
    ws->count = count;
    for (uint32_t i = 0; i < count; i++) {
        worker_t *w = &ws->workers[i];
        w->all = ws;
        atomic_init(&w->large, 0);
        status = td_ring_create(RTR_WORKER_QUEUE_MAX, &w->ring);
        if (status != TD_OK) {
            goto err;
        }
        td_ring_wake_once(w->ring);
        if (pthread_create(&w->thread, NULL, worker_main, w) != 0) {
            status = TD_ERR_BUSY;
            TD_LOG_ERROR("worker thread not started", "err=\"%m\"");
            goto err;
        }
        w->started = true;
    }
    *out = ws;
    return TD_OK;

err:
    rtr_workers_destroy(ws);
    return status;
}

void rtr_workers_destroy(rtr_workers_t *ws)
{
    if (ws == NULL) {
        return;
    }
    atomic_store_explicit(&ws->stopping, true, memory_order_release);
    for (uint32_t i = 0; ws->workers != NULL && i < ws->count; i++) {
        worker_t *w = &ws->workers[i];
        if (w->started) {
            td_ring_wake(w->ring);
            (void)pthread_join(w->thread, NULL);
        }
        if (w->ring != NULL) {
            td_ring_destroy(w->ring);
        }
    }
    td_free(ws->workers);
    td_free(ws);
}

/* Nobody waits for the caller meanwhile, as far as is known. */
static bool has_router_alone(const rtr_request_t *req)
{
    return req->body.len <= RTR_WORKER_HERE_BYTES && req->metrics != NULL &&
           td_metric_get(req->metrics->running) == 0;
}

/* Counted before it is there for the taking. */
static bool give(worker_t *w, rtr_request_t *req)
{
    const bool large = is_large(req);

    if (large) {
        (void)atomic_fetch_add_explicit(&w->large, 1, memory_order_relaxed);
    }
    if (td_ring_push(w->ring, req) == TD_OK) {
        return true;
    }
    if (large) {
        (void)atomic_fetch_sub_explicit(&w->large, 1, memory_order_relaxed);
    }
    return false;
}

/* A large body takes its worker up to a second. Those go to the later half, so that somebody is
 * there for small ones, which keep away from whoever has one. */
static bool give_any(rtr_workers_t *ws, rtr_request_t *req, bool choosy)
{
    const uint32_t turn = atomic_fetch_add_explicit(&ws->turn, 1, memory_order_relaxed);
    const uint32_t first = is_large(req) ? ws->count / 2 : 0;
    const uint32_t count = ws->count - first;

    for (uint32_t i = 0; i < count; i++) {
        worker_t *w = &ws->workers[first + (turn + i) % count];
        if (choosy && atomic_load_explicit(&w->large, memory_order_relaxed) > 0) {
            continue;
        }
        if (give(w, req)) {
            return true;
        }
    }
    return false;
}

td_status_t rtr_workers_submit(rtr_workers_t *ws, rtr_request_t *req)
{
    if (has_router_alone(req)) {
        work(ws, req);
        return TD_OK;
    }
    return give_any(ws, req, true) || give_any(ws, req, false) ? TD_OK : TD_ERR_BUSY;
}

#include "router/rtr_tickets.h"

#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/base/td_log.h"
#include "router/rtr_tickets_internal.h"

#define DEADLINES_MS 20u
#define PROBE_MS 50u

td_status_t rtr_tickets_create(const rtr_tickets_config_t *config, rtr_tickets_t **out)
{
    rtr_tickets_t *ts = td_calloc(1, sizeof(*ts));
    const uint32_t one = 1;
    td_status_t status = TD_OK;

    if (ts == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    ts->config = *config;
    TAILQ_INIT(&ts->requests);
    TAILQ_INIT(&ts->begun);
    status = config->tenants != NULL ? rtr_tenants_queue(config->tenants, &ts->fair)
                                     : rtr_fair_create(&one, 1, &ts->fair);
    if (status != TD_OK) {
        td_free(ts);
        return status;
    }
    *out = ts;
    return TD_OK;
}

void rtr_tickets_destroy(rtr_tickets_t *ts)
{
    if (ts == NULL) {
        return;
    }
    rtr_tickets_end_all(ts);
    rtr_fair_destroy(ts->fair);
    td_str_fini(&ts->scratch);
    td_free(ts);
}

void rtr_tickets_set_policy(rtr_tickets_t *ts, rtr_policy_t policy)
{
    ts->config.policy = policy;
}

rtr_policy_t rtr_tickets_policy(const rtr_tickets_t *ts)
{
    return ts->config.policy;
}

const rtr_estimate_t *rtr_tickets_prefill_time(const rtr_tickets_t *ts)
{
    return &ts->prefill_time;
}

const rtr_estimate_t *rtr_tickets_tbt(const rtr_tickets_t *ts)
{
    return &ts->tbt;
}

uint32_t rtr_tickets_running(const rtr_tickets_t *ts)
{
    return ts->running;
}

uint32_t rtr_tickets_queued(const rtr_tickets_t *ts)
{
    return ts->queued;
}

/* --- the table of tickets --------------------------------------------------------------------- */

rtr_ticket_t *rtr_ticket_find(const rtr_tickets_t *ts, uint64_t id)
{
    rtr_ticket_t *t = ts->buckets[id % RTR_TICKET_BUCKETS];
    while (t != NULL && t->id != id) {
        t = t->chain;
    }
    return t;
}

/* Tokens that one of its prompts may take at most, with all answers to it. */
static uint64_t cost_of(const rtr_request_t *req, uint32_t prompt_idx)
{
    const rtr_prompt_t *p = &req->params.prompts[prompt_idx];
    return p->count + (uint64_t)p->max_tokens * req->params.n;
}

static rtr_ticket_t *ticket_create(rtr_tickets_t *ts, rtr_request_t *req, uint32_t prompt_idx)
{
    rtr_ticket_t *t = ts->count < RTR_TICKETS_MAX ? td_calloc(1, sizeof(*t)) : NULL;

    if (t == NULL) {
        return NULL;
    }
    do {
        t->id = td_random_u64();
    } while (t->id == 0 || rtr_ticket_find(ts, t->id) != NULL);
    t->attempt = 1;
    t->req = req;
    t->prompt_idx = prompt_idx;
    t->tenant = rtr_drafters_tenant(ts->config.secret, req->params.cache_salt.bytes,
                                    req->params.cache_salt.len);
    t->prompt_class = rtr_drafters_class(ts->config.drafters, t->tenant, rtr_ticket_prompt(t)->hash,
                                         rtr_ticket_prompt(t)->prompt_class);
    t->prefill.slot = RTR_PLACE_NONE;
    t->decode.slot = RTR_PLACE_NONE;
    t->turn = (rtr_fair_item_t){.owner = t,
                                .flow = req->tenant == NULL ? 0 : req->tenant->index,
                                .priority = req->params.priority,
                                .cost = cost_of(req, prompt_idx)};
    t->queue_deadline_ns = td_now_ns() + ts->config.queue_ms * TD_NS_PER_MS;
    t->chain = ts->buckets[t->id % RTR_TICKET_BUCKETS];
    ts->buckets[t->id % RTR_TICKET_BUCKETS] = t;
    ts->count++;
    req->tickets[prompt_idx] = t;
    req->tickets_left++;
    return t;
}

void rtr_ticket_destroy(rtr_tickets_t *ts, rtr_ticket_t *t, bool cancel)
{
    rtr_ticket_t **link = &ts->buckets[t->id % RTR_TICKET_BUCKETS];

    t->req->usage.prompt_tokens += rtr_ticket_prompt(t)->count;
    t->req->usage.completion_tokens += rtr_ticket_received(t);
    rtr_attempt_end(ts, t, cancel);
    rtr_queue_leave(ts, t);
    while (*link != t) {
        link = &(*link)->chain;
    }
    *link = t->chain;
    ts->count--;
    ts->room = true;
    t->req->tickets[t->prompt_idx] = NULL;
    t->req->tickets_left--;
    td_free(t->keys);
    td_free(t);
}

/* --- the queue ------------------------------------------------------------------------------- */

static void end_queue_full(rtr_tickets_t *ts, const rtr_ticket_t *t)
{
    rtr_end_failed(ts, t->req, RTR_OUTCOME_REJECTED, 429, "queue_full",
                   "The server is full, and so is its queue. Try again later.");
}

static void set_queued(rtr_tickets_t *ts, rtr_ticket_t *t, bool queued)
{
    rtr_tenant_t *tenant = t->req->tenant;

    t->in_queue = queued;
    ts->queued = queued ? ts->queued + 1 : ts->queued - 1;
    td_metric_set(ts->config.metrics->queued, ts->queued);
    if (queued) {
        t->queued_ns = td_now_ns();
    } else if (t->req->trace.sampled) {
        td_span_t span;
        td_span_begin(&span, &t->req->trace, "queue", t->queued_ns);
        td_span_number(&span, "tandem.prompt", t->prompt_idx);
        td_tracer_end(t->req->tracer, &span, td_now_ns());
    }
    if (tenant != NULL && queued) {
        (void)atomic_fetch_add_explicit(&tenant->queued, 1, memory_order_relaxed);
    } else if (tenant != NULL) {
        (void)atomic_fetch_sub_explicit(&tenant->queued, 1, memory_order_relaxed);
        (void)atomic_fetch_add_explicit(&tenant->waits, 1, memory_order_relaxed);
        (void)atomic_fetch_add_explicit(&tenant->wait_ns, td_now_ns() - t->queued_ns,
                                        memory_order_relaxed);
    }
}

void rtr_queue_leave(rtr_tickets_t *ts, rtr_ticket_t *t)
{
    if (!t->in_queue) {
        return;
    }
    if (t->turn.waits) {
        rtr_fair_leave(ts->fair, &t->turn);
    } else {
        TAILQ_REMOVE(&ts->begun, t, begun_link);
    }
    set_queued(ts, t, false);
}

void rtr_queue_serve(rtr_tickets_t *ts, rtr_ticket_t *t)
{
    if (!t->charged) {
        t->charged = true;
        t->req->placed_tokens += rtr_ticket_prompt(t)->count;
        rtr_fair_charge(ts->fair, t->turn.flow, t->turn.cost);
    }
    t->displaced = false; /* it was asking for room, and has got it */
    rtr_queue_leave(ts, t);
}

/* Room for one more in a queue that is full: the last of whoever has most of it goes. It is only
 * marked here, since the caller may be going through all requests. */
static bool displace(rtr_tickets_t *ts, const rtr_ticket_t *t)
{
    rtr_fair_item_t *last = rtr_fair_victim(ts->fair, t->turn.flow, ts->config.queue_max);
    rtr_ticket_t *victim = last == NULL ? NULL : last->owner;

    if (victim == NULL) {
        return false;
    }
    rtr_queue_leave(ts, victim);
    victim->displaced = true;
    ts->next_tick_ns = 0;
    return true;
}

/* All nodes that might have room were asked: the ticket waits its turn, or is refused. Whose client
 * has part of the answer is never refused, and is the first. */
void rtr_queue_join(rtr_tickets_t *ts, rtr_ticket_t *t)
{
    const bool begun = rtr_ticket_has_begun(t);

    memset(&t->tried, 0, sizeof(t->tried));
    t->state = RTR_TICKET_QUEUED;
    if (t->in_queue || t->displaced) {
        return; /* at its old place, or to be refused */
    }
    if (ts->queued >= ts->config.queue_max && !begun && !displace(ts, t)) {
        end_queue_full(ts, t);
        return;
    }
    if (t->retries > 0) { /* what it took until then is not its wait */
        t->queue_deadline_ns = td_now_ns() + ts->config.queue_ms * TD_NS_PER_MS;
    }
    if (begun) {
        TAILQ_INSERT_HEAD(&ts->begun, t, begun_link);
    } else {
        t->turn.cost = t->charged ? 0 : t->turn.cost;
        rtr_fair_join(ts->fair, &t->turn);
    }
    set_queued(ts, t, true);
}

/* --- requests --------------------------------------------------------------------------------- */

static td_status_t begin_echo(rtr_request_t *req)
{
    for (uint32_t i = 0;
         req->params.echo && !req->params.want_logprobs && i < req->params.prompt_count; i++) {
        TD_TRY(td_str_append(&req->echoes[i].text, req->params.prompts[i].text.bytes,
                             req->params.prompts[i].text.len));
    }
    return TD_OK;
}

/* False: a limit of its tenant is in the way, and it was refused. */
static bool admit(rtr_tickets_t *ts, rtr_request_t *req)
{
    rtr_limits_view_t view = {0};
    uint64_t tokens = 0;
    char text[160];

    if (req->tenant == NULL) {
        return true;
    }
    for (uint32_t i = 0; i < req->params.prompt_count; i++) {
        tokens += cost_of(req, i);
    }
    rtr_tenant_admit(req->tenant, tokens, td_now_ns(), &req->grant, &view);
    rtr_request_set_limits(req, &view);
    if (view.refused_by == RTR_LIMIT_NONE) {
        return true;
    }
    rtr_limits_explain(&req->tenant->terms, &view, tokens, text, sizeof(text));
    rtr_end_limited(ts, req, text, view.retry_after_s);
    return false;
}

void rtr_tickets_submit(rtr_tickets_t *ts, rtr_request_t *req)
{
    rtr_ticket_t *t = NULL;
    uint32_t prompt_count = req->params.prompt_count;
    uint64_t ids[RTR_PROMPTS_MAX];

    TAILQ_INSERT_TAIL(&ts->requests, req, link);
    ts->running++;
    td_metric_set(ts->config.metrics->running, ts->running);
    req->deadline_ns = req->arrived_ns + ts->config.request_timeout_ms * TD_NS_PER_MS;
    if (atomic_load_explicit(&req->gone, memory_order_acquire)) {
        rtr_end_client_gone(ts, req);
        return;
    }
    if (!admit(ts, req)) {
        return;
    }
    if (rtr_tenant_salt(req->tenant, ts->config.secret, &req->params.cache_salt) != TD_OK ||
        rtr_request_open_choices(req) != TD_OK || begin_echo(req) != TD_OK) {
        rtr_end_failed(ts, req, RTR_OUTCOME_UPSTREAM_ERROR, 500, NULL, "out of memory");
        return;
    }
    for (uint32_t i = 0; i < prompt_count; i++) {
        t = ticket_create(ts, req, i);
        if (t == NULL) {
            rtr_end_failed(ts, req, RTR_OUTCOME_REJECTED, 429, "too_many_requests",
                           "The server has too many requests under way. Try again later.");
            return;
        }
        ids[i] = t->id;
    }
    for (uint32_t i = 0; i < prompt_count; i++) {
        t = rtr_ticket_find(ts, ids[i]); /* gone when the request has failed over an earlier one */
        if (t == NULL) {
            return;
        }
        if (ts->queued > 0 && !rtr_attempt_refused(ts, t)) {
            rtr_queue_join(ts, t); /* behind those that came first */
        } else if (rtr_ticket_find(ts, ids[i]) != NULL) {
            rtr_attempt_begin(ts, t);
        }
    }
}

/* Calls fn for every ticket; fn may end any number of them. */
static void each_ticket(rtr_tickets_t *ts, void (*fn)(rtr_tickets_t *, rtr_ticket_t *, uint32_t),
                        uint32_t arg)
{
    rtr_request_t *req = TAILQ_FIRST(&ts->requests);

    while (req != NULL) {
        rtr_request_t *next = TAILQ_NEXT(req, link);
        uint32_t prompt_count = req->params.prompt_count;
        (void)rtr_request_ref(req); /* fn may end it */
        for (uint32_t i = 0; i < prompt_count; i++) {
            if (req->tickets[i] != NULL) {
                fn(ts, req->tickets[i], arg);
            }
        }
        rtr_request_unref(req);
        req = next;
    }
}

static void ticket_node_down(rtr_tickets_t *ts, rtr_ticket_t *t, uint32_t slot)
{
    if (t->decode_done) {
        if (slot == t->prefill.slot) {
            rtr_attempt_failed(ts, t, TD_ERR_PEER_DEAD, slot, "prefill node died");
        }
        return;
    }
    if (t->decode.slot == slot) {
        rtr_attempt_failed(ts, t, TD_ERR_PEER_DEAD, slot, "decode node died");
    } else if (t->prefill.slot == slot && rtr_ticket_has_left_prefill(t)) {
        rtr_prefill_release(ts, t);
    } else if (t->prefill.slot == slot && t->prefill.held) {
        rtr_attempt_failed(ts, t, TD_ERR_PEER_DEAD, slot, "prefill node died");
    }
}

static void ticket_voided(rtr_tickets_t *ts, rtr_ticket_t *t, uint32_t slot)
{
    if (t->prefill.slot == slot && rtr_ticket_has_left_prefill(t)) {
        rtr_prefill_release(ts, t);
    } else if ((t->decode.slot == slot && !t->decode_done) ||
               (t->prefill.slot == slot && t->prefill.held)) {
        rtr_attempt_voided(ts, t, slot);
    }
}

void rtr_tickets_voided(rtr_tickets_t *ts, uint32_t slot)
{
    each_ticket(ts, ticket_voided, slot);
}

void rtr_tickets_node_down(rtr_tickets_t *ts, uint32_t slot)
{
    rtr_index_purge(ts->config.index, slot);
    each_ticket(ts, ticket_node_down, slot);
}

static void ticket_tick(rtr_tickets_t *ts, rtr_ticket_t *t, uint32_t arg)
{
    uint64_t now = td_now_ns();
    (void)arg;

    if (now >= t->req->deadline_ns) {
        rtr_end_failed(ts, t->req, RTR_OUTCOME_TIMEOUT, 504, "timeout",
                       "The request took longer than the server allows.");
    } else if (t->in_queue && now >= t->queue_deadline_ns && rtr_ticket_has_begun(t)) {
        rtr_end_failed(ts, t->req, RTR_OUTCOME_UPSTREAM_ERROR, 503, "no_successor",
                       "The node that served this request has failed, and no other took over.");
    } else if (t->in_queue && now >= t->queue_deadline_ns) {
        rtr_end_failed(ts, t->req, RTR_OUTCOME_REJECTED, 429, "queue_timeout",
                       "No room on the nodes came free in time. Try again later.");
    } else if (t->displaced) {
        end_queue_full(ts, t);
    } else if (t->state == RTR_TICKET_RESTING && now >= t->rest_until_ns) {
        t->state = RTR_TICKET_PLACING;
        rtr_attempt_begin(ts, t);
    } else if (t->state == RTR_TICKET_RESERVING && now >= t->reserve_deadline_ns) {
        uint32_t slot = t->decode.slot;
        TD_LOG_WARN("no answer to reserve", "req=%s node=%s", t->req->request_id,
                    rtr_registry_node(ts->config.registry, slot)->id);
        rtr_attempt_blame(ts, slot, "no answer to reserve");
        rtr_attempt_end(ts, t, true);
        rtr_slot_add(&t->tried, slot);
        t->retries++;
        if (!rtr_ticket_has_begun(t) && !rtr_ticket_any(ts, t, TD_ROLE_DECODE, true, now)) {
            rtr_end_failed(ts, t->req, RTR_OUTCOME_UPSTREAM_ERROR, 503, "no_answer",
                           "No decode node answers.");
        } else {
            rtr_attempt_begin(ts, t);
        }
    }
}

/* The first in the queue, by their ids: a call for one may end another. */
static uint32_t queue_first(const rtr_tickets_t *ts, uint64_t ids[RTR_QUEUE_PROBES_MAX])
{
    rtr_fair_item_t *items[RTR_QUEUE_PROBES_MAX];
    const rtr_ticket_t *t = NULL;
    uint32_t count = 0;
    uint32_t more = 0;

    TAILQ_FOREACH(t, &ts->begun, begun_link)
    {
        if (count == RTR_QUEUE_PROBES_MAX) {
            return count;
        }
        ids[count++] = t->id;
    }
    if (count < RTR_QUEUE_PROBES_MAX) {
        more = rtr_fair_first(ts->fair, RTR_QUEUE_PROBES_MAX - count, items);
    }
    for (uint32_t i = 0; i < more; i++) {
        t = items[i]->owner;
        ids[count++] = t->id;
    }
    return count;
}

/* They ask for room again; those behind them wait for their turn. */
static void queue_probe(rtr_tickets_t *ts)
{
    uint64_t ids[RTR_QUEUE_PROBES_MAX];
    const uint32_t count = queue_first(ts, ids);

    for (uint32_t i = 0; i < count; i++) {
        rtr_ticket_t *t = rtr_ticket_find(ts, ids[i]);
        if (t != NULL && t->state == RTR_TICKET_QUEUED) {
            rtr_attempt_begin(ts, t);
        }
    }
}

void rtr_tickets_tick(rtr_tickets_t *ts)
{
    uint64_t now = td_now_ns();

    if (now >= ts->next_tick_ns) {
        ts->next_tick_ns = now + DEADLINES_MS * TD_NS_PER_MS;
        each_ticket(ts, ticket_tick, 0);
    }
    if (ts->room || now >= ts->next_probe_ns) {
        ts->room = false;
        ts->next_probe_ns = now + PROBE_MS * TD_NS_PER_MS;
        queue_probe(ts);
    }
}

void rtr_tickets_drop_gone(rtr_tickets_t *ts)
{
    rtr_request_t *req = TAILQ_FIRST(&ts->requests);
    while (req != NULL) {
        rtr_request_t *next = TAILQ_NEXT(req, link);
        if (atomic_load_explicit(&req->gone, memory_order_acquire)) {
            rtr_end_client_gone(ts, req);
        }
        req = next;
    }
}

void rtr_tickets_end_all(rtr_tickets_t *ts)
{
    while (!TAILQ_EMPTY(&ts->requests)) {
        rtr_end_failed(ts, TAILQ_FIRST(&ts->requests), RTR_OUTCOME_SHUTDOWN, 503, "shutting_down",
                       "The server is shutting down.");
    }
}

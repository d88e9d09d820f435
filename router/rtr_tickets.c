#include "router/rtr_tickets.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/base/td_log.h"
#include "common/wire/td_member.h"

#define BUCKETS 4096u
#define DEADLINES_MS 20u
#define PROBE_MS 50u
#define TBT_EVERY_TOKENS 16u /* of a choice: what is learned from */
#define STALE_MS 1600u       /* three heartbeats missed: the node counts as saturated */

typedef enum ticket_state {
    STATE_PLACING = 0, /* inside a call only */
    STATE_QUEUED,      /* waits for room */
    STATE_RESERVING,   /* the decode node was asked */
    STATE_RUNNING      /* the prefill node was started */
} ticket_state_t;

typedef struct leg {
    uint32_t slot; /* RTR_PLACE_NONE: none */
    uint64_t incarnation;
    bool held; /* its load is counted */
} leg_t;

struct rtr_ticket {
    uint64_t id;
    uint32_t attempt;
    ticket_state_t state;
    rtr_request_t *req; /* borrowed: the request outlives its tickets */
    uint32_t prompt_idx;
    leg_t prefill;
    leg_t decode;
    rtr_slot_set_t avoid; /* failed this ticket: only when there is no other */
    rtr_slot_set_t tried; /* had no room in this round */
    uint32_t retries;
    uint32_t failures; /* in a row, since a token came */
    bool flows;        /* tokens of this attempt came: the decode node has all it needs */
    bool cached_known; /* what the first attempt found of the prompt is what counts */
    bool echo_seen;    /* the prompt's log-probabilities came */
    bool decode_done;  /* END of the decode leg came, the echo did not */
    bool in_queue;
    td_msg_usage_t usage;
    td_msg_drafts_t report; /* of the decode leg, once it ended */
    uint64_t tenant;
    uint32_t prompt_class; /* rtr_prompt_class_t */
    rtr_draft_choice_t draft;
    uint64_t decision;     /* its number in the trace, of this attempt; 0: none */
    uint32_t given_before; /* tokens that earlier attempts gave */
    td_block_key_t *keys;  /* owned; full blocks of the prompt */
    uint32_t key_count;
    rtr_work_t work;      /* counted on the prefill node */
    uint64_t need_blocks; /* counted on the decode node */
    uint32_t decoding;    /* choices that are counted there as giving tokens */
    uint64_t start_ns;
    uint64_t reserve_deadline_ns;
    uint64_t queue_deadline_ns;
    rtr_ticket_t *chain;
    TAILQ_ENTRY(rtr_ticket) queue_link;
};

TAILQ_HEAD(request_list, rtr_request);
TAILQ_HEAD(ticket_list, rtr_ticket);

struct rtr_tickets {
    rtr_tickets_config_t config;
    rtr_ticket_t *buckets[BUCKETS]; /* owned */
    uint32_t count;
    struct request_list requests;
    uint32_t running;
    struct ticket_list queue; /* in order of arrival; those that ask for room stay in it */
    uint32_t queued;
    uint64_t turn;
    bool room; /* a ticket has ended: the queue is looked at without delay */
    uint64_t next_tick_ns;
    uint64_t next_probe_ns;
    td_str_t scratch;
    uint32_t match[RTR_SLOTS_MAX];
    uint32_t match_best;         /* blocks */
    rtr_estimate_t prefill_time; /* of all nodes: what a new one is taken for */
    rtr_estimate_t tbt;
    rtr_prefill_view_t prefills[RTR_SLOTS_MAX];
    rtr_decode_view_t decodes[RTR_SLOTS_MAX];
};

static void ticket_place(rtr_tickets_t *ts, rtr_ticket_t *t);

td_status_t rtr_tickets_create(const rtr_tickets_config_t *config, rtr_tickets_t **out)
{
    rtr_tickets_t *ts = td_calloc(1, sizeof(*ts));
    if (ts == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    ts->config = *config;
    TAILQ_INIT(&ts->requests);
    TAILQ_INIT(&ts->queue);
    *out = ts;
    return TD_OK;
}

void rtr_tickets_destroy(rtr_tickets_t *ts)
{
    if (ts == NULL) {
        return;
    }
    rtr_tickets_end_all(ts);
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

uint32_t rtr_tickets_running(const rtr_tickets_t *ts)
{
    return ts->running;
}

uint32_t rtr_tickets_queued(const rtr_tickets_t *ts)
{
    return ts->queued;
}

static const rtr_prompt_t *prompt_of(const rtr_ticket_t *t)
{
    return &t->req->params.prompts[t->prompt_idx];
}

static rtr_choice_t *choices_of(const rtr_ticket_t *t)
{
    return &t->req->choices[t->prompt_idx * t->req->params.n];
}

static void ticket_succeeded(rtr_tickets_t *ts, rtr_ticket_t *t);

/* Tokens of it came, of whichever attempt: another goes on behind them. */
static bool has_begun(const rtr_ticket_t *t)
{
    for (uint32_t i = 0; i < t->req->params.n; i++) {
        if (choices_of(t)[i].received > 0) {
            return true;
        }
    }
    return false;
}

static bool holds_for_echo(const rtr_ticket_t *t)
{
    return t->req->params.echo && t->req->params.want_logprobs && !t->echo_seen;
}

static bool has_all_tokens(const rtr_ticket_t *t)
{
    for (uint32_t i = 0; i < t->req->params.n; i++) {
        if (choices_of(t)[i].finish == TD_FINISH_NONE) {
            return false;
        }
    }
    return true;
}

/* --- the table of tickets --------------------------------------------------------------------- */

static rtr_ticket_t *ticket_find(const rtr_tickets_t *ts, uint64_t id)
{
    rtr_ticket_t *t = ts->buckets[id % BUCKETS];
    while (t != NULL && t->id != id) {
        t = t->chain;
    }
    return t;
}

static rtr_ticket_t *ticket_create(rtr_tickets_t *ts, rtr_request_t *req, uint32_t prompt_idx)
{
    rtr_ticket_t *t = ts->count < RTR_TICKETS_MAX ? td_calloc(1, sizeof(*t)) : NULL;

    if (t == NULL) {
        return NULL;
    }
    do {
        t->id = td_random_u64();
    } while (t->id == 0 || ticket_find(ts, t->id) != NULL);
    t->attempt = 1;
    t->req = req;
    t->prompt_idx = prompt_idx;
    t->tenant = rtr_drafters_tenant(ts->config.secret, req->params.cache_salt.bytes,
                                    req->params.cache_salt.len);
    t->prompt_class = rtr_drafters_class(ts->config.drafters, t->tenant, prompt_of(t)->hash,
                                         prompt_of(t)->prompt_class);
    t->prefill.slot = RTR_PLACE_NONE;
    t->decode.slot = RTR_PLACE_NONE;
    t->queue_deadline_ns = td_now_ns() + ts->config.queue_ms * TD_NS_PER_MS;
    t->chain = ts->buckets[t->id % BUCKETS];
    ts->buckets[t->id % BUCKETS] = t;
    ts->count++;
    req->tickets[prompt_idx] = t;
    req->tickets_left++;
    return t;
}

static void queue_leave(rtr_tickets_t *ts, rtr_ticket_t *t)
{
    if (t->in_queue) {
        TAILQ_REMOVE(&ts->queue, t, queue_link);
        t->in_queue = false;
        ts->queued--;
        td_metric_set(ts->config.metrics->queued, ts->queued);
    }
}

static void prefill_release(rtr_tickets_t *ts, rtr_ticket_t *t)
{
    if (t->prefill.held) {
        rtr_node_t *node = rtr_registry_node(ts->config.registry, t->prefill.slot);
        t->prefill.held = false;
        rtr_backlog_remove(&node->backlog, &t->work);
    }
}

static void decode_release(rtr_tickets_t *ts, rtr_ticket_t *t)
{
    if (t->decode.held) {
        rtr_node_t *node = rtr_registry_node(ts->config.registry, t->decode.slot);
        t->decode.held = false;
        node->sequences -= t->req->params.n;
        node->decoding -= t->decoding;
        t->decoding = 0;
        node->promised_blocks -= t->need_blocks;
    }
}

/* Does that very life of its node live? */
static bool is_live(const rtr_tickets_t *ts, const leg_t *leg)
{
    const rtr_node_t *node =
        leg->slot == RTR_PLACE_NONE ? NULL : rtr_registry_node(ts->config.registry, leg->slot);

    return node != NULL && node->live && node->incarnation == leg->incarnation;
}

static void send_cancel(rtr_tickets_t *ts, const rtr_ticket_t *t, const leg_t *leg)
{
    td_msg_t msg = {.type = TD_MSG_CANCEL, .u.ticket = {.ticket = t->id, .attempt = t->attempt}};
    const rtr_node_t *node = NULL;

    if (!is_live(ts, leg)) {
        return;
    }
    node = rtr_registry_node(ts->config.registry, leg->slot);
    if (td_bus_send(ts->config.bus, node->id, &msg) != TD_OK) {
        TD_LOG_WARN("cancel not sent", "req=%s node=%s", t->req->request_id, node->id);
    }
}

/* All choices'. */
static uint32_t received_tokens(const rtr_ticket_t *t)
{
    uint32_t tokens = 0;
    for (uint32_t i = 0; i < t->req->params.n; i++) {
        tokens += choices_of(t)[i].received;
    }
    return tokens;
}

static void trace_end(rtr_tickets_t *ts, rtr_ticket_t *t, const char *end)
{
    if (ts->config.trace != NULL) {
        rtr_trace_end(ts->config.trace, t->decision, end, received_tokens(t) - t->given_before);
    }
    t->decision = 0;
}

/* Takes the attempt back from both nodes; later messages of it are then stale. */
static void attempt_end(rtr_tickets_t *ts, rtr_ticket_t *t, bool cancel)
{
    trace_end(ts, t, "taken back");
    if (cancel) {
        send_cancel(ts, t, &t->prefill);
        send_cancel(ts, t, &t->decode);
    }
    prefill_release(ts, t);
    decode_release(ts, t);
    t->prefill.slot = RTR_PLACE_NONE;
    t->decode.slot = RTR_PLACE_NONE;
    t->attempt++;
    t->state = STATE_PLACING;
    t->flows = false;
}

static void ticket_destroy(rtr_tickets_t *ts, rtr_ticket_t *t, bool cancel)
{
    rtr_ticket_t **link = &ts->buckets[t->id % BUCKETS];

    attempt_end(ts, t, cancel);
    queue_leave(ts, t);
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

/* --- the ends of a request -------------------------------------------------------------------- */

/* After this the request may be freed. */
static void request_drop(rtr_tickets_t *ts, rtr_request_t *req)
{
    for (uint32_t i = 0; i < req->params.prompt_count; i++) {
        if (req->tickets[i] != NULL) {
            ticket_destroy(ts, req->tickets[i], true);
        }
    }
    TAILQ_REMOVE(&ts->requests, req, link);
    ts->running--;
    td_metric_set(ts->config.metrics->running, ts->running);
    rtr_request_unref(req);
}

static void request_fail_for(rtr_tickets_t *ts, rtr_request_t *req, rtr_outcome_t outcome, int http,
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

static void request_fail(rtr_tickets_t *ts, rtr_request_t *req, rtr_outcome_t outcome, int http,
                         const char *code, const char *message)
{
    request_fail_for(ts, req, outcome, http, code, message, http == 429 || http == 503 ? 1 : 0);
}

static void request_client_gone(rtr_tickets_t *ts, rtr_request_t *req)
{
    rtr_error_t error;

    rtr_error_set(&error, 499, NULL, NULL, "the client is gone");
    rtr_request_mark_gone(req);
    rtr_request_fail(req, RTR_OUTCOME_CLIENT_GONE, &error, 0);
    request_drop(ts, req);
}

static rtr_head_t head_of(const rtr_tickets_t *ts, const rtr_request_t *req)
{
    return (rtr_head_t){.model = ts->config.model,
                        .kind = req->kind,
                        .id = req->id,
                        .created_s = req->created_s,
                        .want_logprobs = req->params.want_logprobs,
                        .usage_null = req->params.include_usage,
                        .tandem = ts->config.model->allow_placement,
                        .prefill_id = req->prefill_id,
                        .decode_id = req->decode_id};
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

static void request_complete(rtr_tickets_t *ts, rtr_request_t *req)
{
    rtr_head_t head = head_of(ts, req);
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
        request_fail(ts, req, RTR_OUTCOME_UPSTREAM_ERROR, 500, NULL, "out of memory");
        return;
    }
    td_metric_add(m->prompt_tokens, req->usage.prompt_tokens);
    td_metric_add(m->completion_tokens, req->usage.completion_tokens);
    td_metric_add(m->cached_tokens,
                  req->usage.cached_local_tokens + req->usage.cached_store_tokens);
    rtr_request_complete(req, &text);
    td_str_fini(&text);
    request_drop(ts, req);
}

/* --- placement -------------------------------------------------------------------------------- */

void rtr_tickets_root(const rtr_tickets_t *ts, const void *salt, size_t salt_len,
                      td_block_root_t *out)
{
    const td_block_root_fields_t fields = {.fingerprint = ts->config.fingerprint,
                                           .numerics_class =
                                               rtr_registry_numerics(ts->config.registry),
                                           .layout_version = TD_KV_LAYOUT_VERSION,
                                           .codec = ts->config.kv_codec,
                                           .block_tokens = ts->config.block_tokens,
                                           .adapter = "",
                                           .salt = salt_len > 0 ? salt : "",
                                           .salt_len = salt_len};

    td_block_root_make(ts->config.secret, &fields, out);
}

static void ticket_hash(rtr_tickets_t *ts, rtr_ticket_t *t)
{
    const rtr_prompt_t *prompt = prompt_of(t);
    const td_str_t *salt = &t->req->params.cache_salt;
    uint32_t count = TD_MIN(prompt->count / ts->config.block_tokens, RTR_HINT_BLOCKS_MAX);
    td_block_root_t root;

    if (t->keys != NULL || count == 0) {
        return;
    }
    t->keys = td_calloc(count, sizeof(*t->keys));
    if (t->keys == NULL) {
        return; /* only the hints miss it */
    }
    rtr_tickets_root(ts, salt->bytes, salt->len, &root);
    td_block_keys(&root, prompt->tokens, (size_t)count * ts->config.block_tokens,
                  ts->config.block_tokens, t->keys);
    t->key_count = count;
}

/* The node a client named. It binds the first try only: when that has failed, others may serve. */
static const char *pinned_of(const rtr_ticket_t *t, td_role_t role)
{
    if (t->retries > 0) {
        return "";
    }
    return role == TD_ROLE_PREFILL ? t->req->params.place_prefill : t->req->params.place_decode;
}

static bool node_allowed(const rtr_ticket_t *t, const rtr_node_t *node, uint32_t slot,
                         td_role_t role, bool also_avoided, uint64_t now)
{
    const char *pinned = pinned_of(t, role);

    if (!node->live || rtr_node_drains(node) || node->role != role ||
        rtr_slot_has(&t->tried, slot)) {
        return false;
    }
    if (pinned[0] != '\0') {
        return strcmp(pinned, node->id) == 0;
    }
    return also_avoided ||
           (!rtr_slot_has(&t->avoid, slot) && !rtr_breaker_is_open(&node->breaker, now) &&
            now - node->seen_ns < STALE_MS * TD_NS_PER_MS);
}

static rtr_place_ask_t ask_of(const rtr_tickets_t *ts, const rtr_ticket_t *t)
{
    const bool pulls = rtr_registry_live(ts->config.registry, TD_ROLE_KVSTORE) > 0;

    return (rtr_place_ask_t){
        .policy = ts->config.policy,
        .now_ns = td_now_ns(),
        .turn = ts->turn,
        .draw = t->id, /* drawn at random, and once */
        .prompt_tokens = prompt_of(t)->count,
        .granule_tokens = ts->config.block_tokens,
        .pool_tokens = pulls ? ts->match_best * ts->config.block_tokens : 0,
        .keep_local = RTR_KEEP_LOCAL_DEFAULT,
        .typical = &ts->prefill_time,
        .sequences = t->req->params.n,
        .need_blocks = (uint32_t)TD_MIN(t->need_blocks, UINT32_MAX),
        .typical_tbt = &ts->tbt,
    };
}

static rtr_prefill_choice_t choose_prefill(rtr_tickets_t *ts, const rtr_ticket_t *t,
                                           const rtr_place_ask_t *ask, bool also_avoided)
{
    uint32_t slots = rtr_registry_slots(ts->config.registry);

    for (uint32_t i = 0; i < slots; i++) {
        const rtr_node_t *node = rtr_registry_node(ts->config.registry, i);
        ts->prefills[i] = (rtr_prefill_view_t){
            .allowed = node_allowed(t, node, i, TD_ROLE_PREFILL, also_avoided, ask->now_ns),
            .match_tokens = ts->match[i] * ts->config.block_tokens,
            .lately = rtr_backlog_lately(&node->backlog, ask->now_ns),
            .backlog = &node->backlog,
            .estimate = &node->prefill_time,
        };
    }
    return rtr_place_prefill(ask, ts->prefills, slots);
}

static rtr_decode_choice_t choose_decode(rtr_tickets_t *ts, const rtr_ticket_t *t,
                                         const rtr_place_ask_t *ask, bool also_avoided)
{
    uint32_t slots = rtr_registry_slots(ts->config.registry);

    for (uint32_t i = 0; i < slots; i++) {
        const rtr_node_t *node = rtr_registry_node(ts->config.registry, i);
        ts->decodes[i] = (rtr_decode_view_t){
            .allowed = node_allowed(t, node, i, TD_ROLE_DECODE, also_avoided, ask->now_ns),
            .running = node->sequences,
            .promised = node->promised_blocks,
            .free_blocks = node->beat.free_blocks,
            .total_blocks = node->beat.total_blocks,
            .match_blocks = ts->match[i],
            .tbt = &node->tbt,
        };
    }
    return rtr_place_decode(ask, ts->decodes, slots);
}

static void hold(rtr_tickets_t *ts, rtr_ticket_t *t, const rtr_prefill_choice_t *prefill,
                 uint32_t decode, uint64_t now)
{
    rtr_node_t *p = rtr_registry_node(ts->config.registry, prefill->node);
    rtr_node_t *d = rtr_registry_node(ts->config.registry, decode);

    t->work = prefill->work;
    t->prefill = (leg_t){.slot = prefill->node, .incarnation = p->incarnation, .held = true};
    rtr_backlog_add(&p->backlog, &t->work, now);
    t->decode = (leg_t){.slot = decode, .incarnation = d->incarnation, .held = true};
    d->sequences += t->req->params.n;
    d->promised_blocks += t->need_blocks;
    rtr_breaker_placed(&p->breaker, now);
    rtr_breaker_placed(&d->breaker, now);
}

/* For the decode node that was found: others offer other drafters, at other costs. */
static void choose_draft(rtr_tickets_t *ts, rtr_ticket_t *t)
{
    const rtr_params_t *p = &t->req->params;
    const rtr_node_t *node = rtr_registry_node(ts->config.registry, t->decode.slot);
    const rtr_draft_ask_t ask = {.ticket = t->id,
                                 .tenant = t->tenant,
                                 .prompt_class = t->prompt_class,
                                 .is_auto = p->drafter_auto,
                                 .drafter = p->drafter,
                                 .has_k = p->has_k,
                                 .k_min = p->k_min,
                                 .k_max = p->k_max};

    t->draft = rtr_drafters_choose(ts->config.drafters, &ask, node->drafters, &node->beat);
}

/* What earlier attempts gave of each choice. Answers how many there are: none before the first
 * token. */
static uint32_t list_generated(const rtr_ticket_t *t, td_msg_generated_t out[TD_MSG_CHOICES_MAX])
{
    const uint32_t n = t->req->params.n;

    if (!has_begun(t)) {
        return 0;
    }
    for (uint32_t i = 0; i < n; i++) {
        const rtr_choice_t *c = &choices_of(t)[i];
        const bool ended = c->finish != TD_FINISH_NONE;
        out[i] = (td_msg_generated_t){.tokens = (const uint32_t *)(const void *)c->ids.bytes,
                                      .count = ended ? 0 : c->received,
                                      .ended = ended};
    }
    return n;
}

/* Of the views up to so many that are allowed, the chosen one first. first: of the first view.
 * Answers how many; *allowed_out: of how many. */
static uint32_t list_allowed(const bool *first, size_t stride, uint32_t count, uint32_t chosen,
                             uint32_t nodes[RTR_TRACE_CANDIDATES_MAX], uint32_t *allowed_out)
{
    uint32_t listed = 1;

    nodes[0] = chosen;
    *allowed_out = 0;
    for (uint32_t i = 0; i < count; i++) {
        const bool allowed = *(const bool *)((const uint8_t *)first + i * stride);
        *allowed_out += allowed;
        if (allowed && i != chosen && listed < RTR_TRACE_CANDIDATES_MAX) {
            nodes[listed++] = i;
        }
    }
    return listed;
}

static void trace_nodes(const rtr_tickets_t *ts, const rtr_place_ask_t *ask, const rtr_ticket_t *t,
                        rtr_trace_decision_t *d)
{
    const uint32_t slots = rtr_registry_slots(ts->config.registry);
    rtr_prefill_explained_t why[RTR_TRACE_CANDIDATES_MAX];
    uint32_t nodes[RTR_TRACE_CANDIDATES_MAX];

    d->prefill_count = list_allowed(&ts->prefills[0].allowed, sizeof(ts->prefills[0]), slots,
                                    t->prefill.slot, nodes, &d->prefill_nodes);
    rtr_explain_prefill(ask, ts->prefills, slots, nodes, d->prefill_count, why);
    for (uint32_t i = 0; i < d->prefill_count; i++) {
        (void)snprintf(d->prefills[i].node, sizeof(d->prefills[i].node), "%s",
                       rtr_registry_node(ts->config.registry, nodes[i])->id);
        d->prefills[i].why = why[i];
    }
    d->decode_count = list_allowed(&ts->decodes[0].allowed, sizeof(ts->decodes[0]), slots,
                                   t->decode.slot, nodes, &d->decode_nodes);
    for (uint32_t i = 0; i < d->decode_count; i++) {
        const rtr_decode_view_t *v = &ts->decodes[nodes[i]];
        (void)snprintf(d->decodes[i].node, sizeof(d->decodes[i].node), "%s",
                       rtr_registry_node(ts->config.registry, nodes[i])->id);
        d->decodes[i].running = v->running;
        d->decodes[i].free_blocks = v->free_blocks;
        d->decodes[i].why = rtr_explain_decode(ask, v);
    }
}

/* As the views stand that the choice was made from. */
static void trace_decision(rtr_tickets_t *ts, rtr_ticket_t *t, const rtr_place_ask_t *ask)
{
    rtr_trace_decision_t *d = NULL;

    if (ts->config.trace == NULL) {
        return;
    }
    d = rtr_trace_open(ts->config.trace);
    t->decision = d->number;
    t->given_before = received_tokens(t);
    (void)snprintf(d->request, sizeof(d->request), "%s", t->req->request_id);
    d->prompt = t->prompt_idx;
    d->attempt = t->attempt;
    d->prompt_tokens = prompt_of(t)->count;
    d->generated_tokens = t->given_before;
    d->policy = ask->policy;
    d->draft = t->draft;
    d->prompt_class = t->prompt_class;
    trace_nodes(ts, ask, t, d);
}

static td_status_t send_work(rtr_tickets_t *ts, const rtr_ticket_t *t, td_msg_type_t type,
                             const leg_t *to, const leg_t *peer, uint32_t have_blocks)
{
    const rtr_params_t *p = &t->req->params;
    const rtr_prompt_t *prompt = prompt_of(t);
    td_msg_generated_t generated[TD_MSG_CHOICES_MAX];
    uint64_t left_ms = td_remaining_ns(t->req->deadline_ns) / TD_NS_PER_MS;
    char request_id[TD_MSG_ID_CHARS_MAX + 1];
    td_msg_t msg = {.type = type,
                    .u.work = {
                        .ticket = t->id,
                        .attempt = t->attempt,
                        .budget_ms = (uint32_t)TD_MIN(left_ms + 1, UINT32_MAX),
                        .prompt = prompt->tokens,
                        .prompt_tokens = prompt->count,
                        .cache_salt = {(const uint8_t *)p->cache_salt.bytes, p->cache_salt.len},
                        .temperature = p->temperature,
                        .top_k = p->top_k,
                        .top_p = p->top_p,
                        .min_p = p->min_p,
                        .presence_penalty = p->presence_penalty,
                        .frequency_penalty = p->frequency_penalty,
                        .repetition_penalty = p->repetition_penalty,
                        .seed = p->seed,
                        .bias_count = p->bias_count,
                        .bias_tokens = p->bias_tokens,
                        .bias_values = p->bias_values,
                        .n = p->n,
                        .max_tokens = prompt->max_tokens,
                        .min_tokens = p->min_tokens,
                        .priority = p->priority,
                        .drafter = t->draft.drafter,
                        .k_min = t->draft.k_min,
                        .k_max = t->draft.k_max,
                        .draft_rule = p->draft_rule,
                        .tenant = t->tenant,
                        .prompt_class = t->prompt_class,
                        .prediction = p->prediction,
                        .prediction_tokens = p->prediction_tokens,
                        .ignore_eos = p->ignore_eos,
                        .want_logprobs = p->want_logprobs,
                        .top_logprobs = p->top_logprobs,
                        .prompt_logprobs = p->echo && p->want_logprobs,
                        .want_hashes = ts->config.model->allow_placement,
                        .stop_count = p->stop_count,
                        .stops = p->stops,
                        .include_stop = p->include_stop,
                        .skip_special = p->skip_special,
                        .peer_id = rtr_registry_node(ts->config.registry, peer->slot)->id,
                        .peer_incarnation = peer->incarnation,
                        .have_blocks = have_blocks,
                        .request_id = request_id,
                        .generated = generated,
                    }};

    (void)snprintf(request_id, sizeof(request_id), "%.63s", t->req->request_id);
    msg.u.work.generated_count = type == TD_MSG_RESERVE ? list_generated(t, generated) : 0;
    return td_bus_send(ts->config.bus, rtr_registry_node(ts->config.registry, to->slot)->id, &msg);
}

/* All nodes that might have room were asked: the ticket waits its turn, or is refused. Whose client
 * has part of the answer is never refused, and is the first. */
static void ticket_wait(rtr_tickets_t *ts, rtr_ticket_t *t)
{
    const bool begun = has_begun(t);

    memset(&t->tried, 0, sizeof(t->tried));
    t->state = STATE_QUEUED;
    if (t->in_queue) {
        return; /* at its old place */
    }
    if (ts->queued >= ts->config.queue_max && !begun) {
        request_fail(ts, t->req, RTR_OUTCOME_REJECTED, 429, "queue_full",
                     "The server is full, and so is its queue. Try again later.");
        return;
    }
    if (t->retries > 0) { /* what it took until then is not its wait */
        t->queue_deadline_ns = td_now_ns() + ts->config.queue_ms * TD_NS_PER_MS;
    }
    if (begun) {
        TAILQ_INSERT_HEAD(&ts->queue, t, queue_link);
    } else {
        TAILQ_INSERT_TAIL(&ts->queue, t, queue_link);
    }
    t->in_queue = true;
    ts->queued++;
    td_metric_set(ts->config.metrics->queued, ts->queued);
}

static bool pinned_is_missing(const rtr_tickets_t *ts, td_role_t role, const char *pinned)
{
    for (uint32_t i = 0; pinned[0] != '\0' && i < rtr_registry_slots(ts->config.registry); i++) {
        const rtr_node_t *node = rtr_registry_node(ts->config.registry, i);
        if (node->live && node->role == role && strcmp(node->id, pinned) == 0) {
            return false;
        }
    }
    return pinned[0] != '\0';
}

/* True when the request was refused: a role has no live node, or not the one asked for. One that
 * has begun waits for a node to come. */
static bool refuse_if_none_live(rtr_tickets_t *ts, const rtr_ticket_t *t)
{
    bool prefill = rtr_registry_live(ts->config.registry, TD_ROLE_PREFILL) > 0;
    bool decode = rtr_registry_live(ts->config.registry, TD_ROLE_DECODE) > 0;

    if (has_begun(t)) {
        return false;
    }
    if (!prefill || !decode) {
        request_fail(ts, t->req, RTR_OUTCOME_UPSTREAM_ERROR, 503, "no_nodes",
                     !prefill ? "No prefill node is live." : "No decode node is live.");
        return true;
    }
    if (pinned_is_missing(ts, TD_ROLE_PREFILL, pinned_of(t, TD_ROLE_PREFILL)) ||
        pinned_is_missing(ts, TD_ROLE_DECODE, pinned_of(t, TD_ROLE_DECODE))) {
        request_fail(ts, t->req, RTR_OUTCOME_BAD_REQUEST, 400, "no_such_node",
                     "tandem: a node that was named is not live, or has another role.");
        return true;
    }
    return false;
}

/* Blocks that a request may hold at once on its decode node. */
static uint64_t count_need(const rtr_tickets_t *ts, const rtr_ticket_t *t)
{
    const td_attention_mask_t *mask = rtr_registry_mask(ts->config.registry);
    const uint64_t count = prompt_of(t)->count;
    const uint64_t max_tokens = prompt_of(t)->max_tokens;
    const uint64_t n = t->req->params.n;
    const uint64_t all = (count + max_tokens * n) / ts->config.block_tokens + n;

    if (mask->kind == TD_ATTENTION_FULL) {
        return all;
    }
    return TD_MIN(all, n * td_attention_blocks_max(mask, ts->config.block_tokens,
                                                   (uint32_t)(count + max_tokens), 1));
}

/* True when the request was refused: it is predicted to miss its objective. Only before its first
 * try, so also while it waits: then the time that is left is shorter. Not one that has part of its
 * answer, if of another of its prompts. */
static bool refuse_by_slo(rtr_tickets_t *ts, const rtr_ticket_t *t,
                          const rtr_prefill_choice_t *prefill, const rtr_decode_choice_t *decode)
{
    const double waited_ns = (double)(td_now_ns() - t->req->arrived_ns);
    const rtr_admit_ask_t ask = {
        .slo = t->req->slo,
        .ttft_ns = prefill->ttft_ns < 0 ? -1 : prefill->ttft_ns + waited_ns,
        .tbt_ns = decode->tbt_ns,
        .answer_ns = decode->tbt_ns < 0 ? -1 : decode->tbt_ns * prompt_of(t)->max_tokens};
    uint32_t retry_after_s = 0;
    rtr_admission_t verdict = RTR_ADMIT;
    char text[160];

    if (t->retries > 0 || t->req->first_token_seen) {
        return false;
    }
    verdict = rtr_admit(&ask, &retry_after_s);
    if (verdict == RTR_ADMIT) {
        return false;
    }
    if (verdict == RTR_REFUSE_TTFT) {
        td_metric_add(ts->config.metrics->slo_ttft, 1);
        (void)snprintf(text, sizeof(text),
                       "The first token would come after about %.0f ms; %u ms are asked for.",
                       ask.ttft_ns / (double)TD_NS_PER_MS, ask.slo.ttft_ms);
    } else {
        td_metric_add(ts->config.metrics->slo_tbt, 1);
        (void)snprintf(text, sizeof(text),
                       "Tokens would come every %.1f ms or so; %u ms are asked for.",
                       ask.tbt_ns / (double)TD_NS_PER_MS, ask.slo.tbt_ms);
    }
    request_fail_for(ts, t->req, RTR_OUTCOME_REJECTED, 429,
                     verdict == RTR_REFUSE_TTFT ? "slo_ttft" : "slo_tbt", text, retry_after_s);
    return true;
}

static void ticket_place(rtr_tickets_t *ts, rtr_ticket_t *t)
{
    ticket_hash(ts, t);
    t->need_blocks = count_need(ts, t);
    ts->match_best = rtr_hints_match(ts->config.hints, t->keys, t->key_count, ts->match);
    if (refuse_if_none_live(ts, t)) {
        return;
    }
    for (;;) {
        const rtr_place_ask_t ask = ask_of(ts, t);
        rtr_prefill_choice_t prefill = choose_prefill(ts, t, &ask, false);
        rtr_decode_choice_t decode = choose_decode(ts, t, &ask, false);

        prefill = prefill.node != RTR_PLACE_NONE ? prefill : choose_prefill(ts, t, &ask, true);
        decode = decode.node != RTR_PLACE_NONE ? decode : choose_decode(ts, t, &ask, true);
        if (prefill.node == RTR_PLACE_NONE || decode.node == RTR_PLACE_NONE) {
            ticket_wait(ts, t);
            return;
        }
        if (refuse_by_slo(ts, t, &prefill, &decode)) {
            return;
        }
        ts->turn++;
        hold(ts, t, &prefill, decode.node, ask.now_ns);
        choose_draft(ts, t);
        trace_decision(ts, t, &ask);
        if (send_work(ts, t, TD_MSG_RESERVE, &t->decode, &t->prefill, 0) == TD_OK) {
            t->state = STATE_RESERVING;
            t->reserve_deadline_ns = td_now_ns() + RTR_RESERVE_MS * TD_NS_PER_MS;
            return;
        }
        rtr_slot_add(&t->tried, decode.node);
        attempt_end(ts, t, false);
    }
}

/* --- failures --------------------------------------------------------------------------------- */

/* Takes the attempt back. What it gave stays: the next one goes on behind it, with the same tokens
 * (I1, I9). Only where nothing is left to go on with, but the prompt's own log-probabilities have
 * not come, all begins anew; nothing was shown then. */
static void attempt_undo(rtr_tickets_t *ts, rtr_ticket_t *t)
{
    attempt_end(ts, t, true);
    for (uint32_t i = 0; t->decode_done && i < t->req->params.n; i++) {
        rtr_choice_reset(&choices_of(t)[i]);
    }
    t->decode_done = false;
    t->cached_known = has_begun(t);
    if (!t->cached_known) {
        t->usage = (td_msg_usage_t){0};
    }
}

static bool is_request_fault(td_status_t status)
{
    return status == TD_ERR_INVALID || status == TD_ERR_TOO_LARGE || status == TD_ERR_UNSUPPORTED;
}

static void note_failure(rtr_tickets_t *ts, uint32_t slot, const char *what)
{
    rtr_node_t *node = rtr_registry_node(ts->config.registry, slot);

    if (rtr_breaker_failed(&node->breaker, td_now_ns())) {
        TD_LOG_WARN("node shunned", "node=%s failures=%u for_ms=%" PRIu64, node->id,
                    node->breaker.failures, node->breaker.open_ms);
        td_metric_add(ts->config.metrics->breakers_opened, 1);
        rtr_events_add(ts->config.events, RTR_EVENT_BREAKER, node->id, "", what);
    }
}

static void note_success(rtr_tickets_t *ts, const leg_t *leg)
{
    rtr_node_t *node = NULL;

    if (leg->slot == RTR_PLACE_NONE) {
        return;
    }
    node = rtr_registry_node(ts->config.registry, leg->slot);
    if (node->incarnation == leg->incarnation && rtr_breaker_succeeded(&node->breaker)) {
        TD_LOG_INFO("node forgiven", "node=%s", node->id);
        rtr_events_add(ts->config.events, RTR_EVENT_BREAKER, node->id, "", "forgiven");
    }
}

/* An attempt has failed. culprit: the slot to keep away from, or RTR_PLACE_NONE. */
static void ticket_failed(rtr_tickets_t *ts, rtr_ticket_t *t, td_status_t status, uint32_t culprit,
                          const char *what)
{
    trace_end(ts, t, what);
    TD_LOG_WARN("attempt failed", "req=%s attempt=%u what=\"%s\" status=%s", t->req->request_id,
                t->attempt, what, td_status_name(status));
    if (is_request_fault(status) && !has_begun(t)) { /* else others can, if not this one */
        request_fail(ts, t->req, RTR_OUTCOME_BAD_REQUEST, 400, NULL,
                     "The model cannot serve this request as it is.");
        return;
    }
    if (has_all_tokens(t) && !holds_for_echo(t)) {
        ticket_succeeded(ts, t); /* only word of its end was lost */
        return;
    }
    if (culprit != RTR_PLACE_NONE) {
        rtr_slot_add(&t->avoid, culprit);
        note_failure(ts, culprit, what);
    }
    if (t->failures >= RTR_RETRIES_MAX || t->retries >= RTR_FAILOVERS_MAX) {
        request_fail(ts, t->req, RTR_OUTCOME_UPSTREAM_ERROR, 502, "upstream_error",
                     "The request failed on the nodes that were tried.");
        return;
    }
    t->failures++;
    t->retries++;
    td_metric_add(ts->config.metrics->retries, 1);
    attempt_undo(ts, t);
    if (has_begun(t)) {
        td_metric_add(ts->config.metrics->failovers, 1);
        rtr_events_add(
            ts->config.events, RTR_EVENT_FAILOVER,
            culprit == RTR_PLACE_NONE ? "" : rtr_registry_node(ts->config.registry, culprit)->id,
            t->req->request_id, what);
    }
    memset(&t->tried, 0, sizeof(t->tried));
    ticket_place(ts, t);
}

/* A node had no room: another one is asked, and if there is none the ticket waits. */
static void ticket_busy(rtr_tickets_t *ts, rtr_ticket_t *t, uint32_t slot)
{
    rtr_slot_add(&t->tried, slot);
    attempt_undo(ts, t);
    ticket_place(ts, t);
}

/* --- messages --------------------------------------------------------------------------------- */

static bool from_leg(const rtr_tickets_t *ts, const leg_t *leg, const td_msg_t *msg)
{
    return leg->slot != RTR_PLACE_NONE && leg->incarnation == msg->sender_incarnation &&
           strcmp(rtr_registry_node(ts->config.registry, leg->slot)->id, msg->sender_id) == 0;
}

static void handle_reserved(rtr_tickets_t *ts, rtr_ticket_t *t, const td_msg_t *msg)
{
    const td_msg_reserved_t *m = &msg->u.reserved;

    if (t->state != STATE_RESERVING || !from_leg(ts, &t->decode, msg)) {
        return;
    }
    if (m->status == TD_ERR_BUSY) {
        ticket_busy(ts, t, t->decode.slot);
        return;
    }
    if (m->status != TD_OK) {
        ticket_failed(ts, t, m->status, t->decode.slot, "reserve refused");
        return;
    }
    queue_leave(ts, t);
    t->state = STATE_RUNNING;
    t->start_ns = td_now_ns();
    rtr_drafters_count(ts->config.drafters, &t->draft);
    if (send_work(ts, t, TD_MSG_START, &t->prefill, &t->decode, m->have_blocks) != TD_OK) {
        ticket_failed(ts, t, TD_ERR_PEER_DEAD, t->prefill.slot, "start not sent");
        return;
    }
    /* Before it is computed: what comes next with this prefix shall go to the same node. */
    rtr_hints_add(ts->config.hints, t->keys, t->key_count, t->prefill.slot);
    td_metric_set(ts->config.metrics->hint_blocks, rtr_hints_count(ts->config.hints));
}

/* What a token took, at what its node has to do. Blocks are counted as they are promised. */
static void learn_tbt(rtr_tickets_t *ts, const rtr_ticket_t *t, double ns)
{
    rtr_node_t *node = rtr_registry_node(ts->config.registry, t->decode.slot);
    const uint64_t blocks = node->sequences > 0
                                ? node->promised_blocks * node->decoding / node->sequences
                                : node->promised_blocks;

    rtr_tbt_observe(&node->tbt, &ts->tbt, node->decoding, blocks, ns);
    rtr_tbt_observe(&ts->tbt, NULL, node->decoding, blocks, ns);
}

static void observe_token(rtr_tickets_t *ts, rtr_ticket_t *t, rtr_choice_t *choice, uint32_t count)
{
    rtr_request_t *req = t->req;
    const uint32_t before = choice->received - count;
    const bool is_first = choice->attempt != t->attempt; /* of this attempt */
    uint64_t now = td_now_ns();

    if (is_first && t->decode.held) {
        t->decoding++;
        rtr_registry_node(ts->config.registry, t->decode.slot)->decoding++;
    }
    choice->attempt = t->attempt;
    if (!is_first && t->decode.held &&
        choice->received / TBT_EVERY_TOKENS != before / TBT_EVERY_TOKENS) {
        learn_tbt(ts, t, (double)(now - choice->last_ns) / count);
    }
    if (!req->first_token_seen) {
        req->first_token_seen = true;
        td_metric_observe_ns(ts->config.metrics->ttft, now - req->arrived_ns);
    }
    for (uint32_t i = 0; choice->last_ns != 0 && i < count; i++) { /* of one step, one message */
        td_metric_observe_ns(ts->config.metrics->tbt, (now - choice->last_ns) / count);
    }
    choice->last_ns = now;
}

/* Gives one event of a choice to the client; opens the choice with the echoed prompt. False when
 * the request has ended over it. */
static bool stream_piece(rtr_tickets_t *ts, rtr_ticket_t *t, uint32_t index,
                         const rtr_piece_t *piece)
{
    rtr_request_t *req = t->req;
    rtr_choice_t *choice = &req->choices[index];
    rtr_head_t head = head_of(ts, req);
    rtr_piece_t pieces[2];
    uint32_t count = 0;
    bool opened = choice->opened;
    td_status_t status = TD_OK;

    if (opened && piece->text_len == 0 && piece->finish == TD_FINISH_NONE &&
        !(piece->count > 0 && (head.want_logprobs || head.tandem))) {
        return true; /* nothing to show yet: half a character, a possible stop string */
    }
    if (!opened && req->params.echo) {
        pieces[count++] = rtr_choice_piece(&req->echoes[t->prompt_idx]);
    }
    pieces[count++] = *piece;
    td_str_clear(&ts->scratch);
    status =
        rtr_reply_chunk(&head, index, opened, pieces, count, &choice->text_offset, &ts->scratch);
    if (status == TD_OK) {
        status = rtr_request_give(req, ts->scratch.bytes, ts->scratch.len);
    }
    if (status == TD_ERR_BUSY) {
        TD_LOG_INFO("client does not read", "req=%s bytes=%u", req->request_id, RTR_OUT_BYTES_MAX);
        request_client_gone(ts, req);
        return false;
    }
    if (status != TD_OK) {
        request_fail(ts, req, RTR_OUTCOME_UPSTREAM_ERROR, 500, NULL, "out of memory");
        return false;
    }
    choice->opened = true;
    return true;
}

static void ticket_succeeded(rtr_tickets_t *ts, rtr_ticket_t *t)
{
    rtr_request_t *req = t->req;
    td_msg_usage_t *u = &req->usage;

    u->prompt_tokens += prompt_of(t)->count;
    u->completion_tokens += received_tokens(t);
    note_success(ts, &t->prefill);
    note_success(ts, &t->decode);
    trace_end(ts, t, "ok");
    u->cached_local_tokens += t->usage.cached_local_tokens;
    u->cached_store_tokens += t->usage.cached_store_tokens;
    u->accepted_draft_tokens += t->usage.accepted_draft_tokens;
    u->rejected_draft_tokens += t->usage.rejected_draft_tokens;
    if (is_live(ts, &t->decode)) { /* else what it held was forgotten, and is gone */
        rtr_hints_add(ts->config.hints, t->keys, t->key_count, t->decode.slot);
    }
    rtr_drafters_answered(ts->config.drafters, t->tenant, t->prompt_class, prompt_of(t)->hash,
                          &t->report);
    ticket_destroy(ts, t, false);
    if (req->tickets_left == 0) {
        request_complete(ts, req);
    }
}

static void handle_prompt_logprobs(rtr_tickets_t *ts, rtr_ticket_t *t, const rtr_piece_t *piece)
{
    const rtr_prompt_t *prompt = prompt_of(t);
    rtr_choice_t *echo = &t->req->echoes[t->prompt_idx];
    uint32_t first = t->prompt_idx * t->req->params.n;

    if (t->echo_seen || !t->req->params.echo) {
        return;
    }
    if (piece->count != prompt->count) {
        ticket_failed(ts, t, TD_ERR_PROTOCOL, t->prefill.slot, "prompt logprobs incomplete");
        return;
    }
    if (rtr_choice_append(echo, piece) != TD_OK ||
        td_str_append(&echo->text, prompt->text.bytes, prompt->text.len) != TD_OK) {
        request_fail(ts, t->req, RTR_OUTCOME_UPSTREAM_ERROR, 500, NULL, "out of memory");
        return;
    }
    t->echo_seen = true;
    for (uint32_t i = 0; t->req->params.stream && i < t->req->params.n; i++) {
        rtr_piece_t held = rtr_choice_piece(&t->req->choices[first + i]);
        if (held.count > 0 && !stream_piece(ts, t, first + i, &held)) {
            return;
        }
    }
    if (t->decode_done) {
        ticket_succeeded(ts, t);
    }
}

static void name_draft(rtr_ticket_t *t)
{
    char text[RTR_DRAFT_CHARS_MAX + 1];

    (void)snprintf(text, sizeof(text), "%s k=%u-%u %s %s", td_drafter_name(t->draft.drafter),
                   t->draft.k_min, t->draft.k_max, rtr_draft_why_name(t->draft.why),
                   rtr_prompt_class_name(t->prompt_class));
    rtr_request_set_draft(t->req, text);
}

static void handle_tokens(rtr_tickets_t *ts, rtr_ticket_t *t, const td_msg_t *msg)
{
    const td_msg_tokens_t *m = &msg->u.tokens;
    rtr_request_t *req = t->req;
    rtr_piece_t piece = {.tokens = m->tokens,
                         .count = m->count,
                         .text = (const char *)m->text.at,
                         .text_len = m->text.len,
                         .logprobs = m->logprobs,
                         .hashes = m->hashes,
                         .hash_count = m->hash_count,
                         .finish = m->finish,
                         .stop_match = m->stop_match,
                         .is_prompt = m->is_prompt};
    rtr_choice_t *choice = NULL;

    if (t->state != STATE_RUNNING || !from_leg(ts, m->is_prompt ? &t->prefill : &t->decode, msg)) {
        return;
    }
    if (m->is_prompt) {
        handle_prompt_logprobs(ts, t, &piece);
        return;
    }
    if (m->choice >= req->params.n || m->offset != choices_of(t)[m->choice].received ||
        choices_of(t)[m->choice].finish != TD_FINISH_NONE) {
        ticket_failed(ts, t, TD_ERR_PROTOCOL, t->decode.slot, "tokens out of order");
        return;
    }
    choice = &choices_of(t)[m->choice];
    if (td_str_append(&choice->ids, m->tokens, m->count * sizeof(*m->tokens)) != TD_OK) {
        request_fail(ts, req, RTR_OUTCOME_UPSTREAM_ERROR, 500, NULL, "out of memory");
        return;
    }
    choice->received += m->count;
    t->flows = true;
    t->failures = 0;
    observe_token(ts, t, choice, m->count);
    if (t->prompt_idx == 0 && choice->received == m->count) {
        rtr_request_set_nodes(req, rtr_registry_node(ts->config.registry, t->prefill.slot)->id,
                              msg->sender_id);
        name_draft(t);
    }
    if (!req->params.stream || holds_for_echo(t)) {
        if (rtr_choice_append(choice, &piece) != TD_OK) {
            request_fail(ts, req, RTR_OUTCOME_UPSTREAM_ERROR, 500, NULL, "out of memory");
        }
        return;
    }
    choice->finish = m->finish;
    (void)stream_piece(ts, t, t->prompt_idx * req->params.n + m->choice, &piece);
}

/* What the first attempt that gave tokens has found of the prompt: a successor finds more. */
static void note_cached(rtr_ticket_t *t, const td_msg_usage_t *found)
{
    td_msg_usage_t *u = &t->usage;

    if (!t->cached_known) {
        u->cached_local_tokens = TD_MAX(u->cached_local_tokens, found->cached_local_tokens);
        u->cached_store_tokens = TD_MAX(u->cached_store_tokens, found->cached_store_tokens);
    }
}

/* The prefill node has nothing more that this attempt needs. */
static bool has_left_prefill(const rtr_ticket_t *t)
{
    return t->flows && !holds_for_echo(t);
}

/* What the prompt took, by what the node says it computed and pulled. */
static void learn_prefill(rtr_tickets_t *ts, const rtr_ticket_t *t, const td_msg_usage_t *usage)
{
    rtr_node_t *node = rtr_registry_node(ts->config.registry, t->prefill.slot);
    const uint64_t cached = (uint64_t)usage->cached_local_tokens + usage->cached_store_tokens;
    const rtr_work_t work =
        rtr_work_of(prompt_of(t)->count, (uint32_t)TD_MIN(cached, UINT32_MAX),
                    (uint32_t)TD_MIN(usage->cached_store_tokens, prompt_of(t)->count));
    const double ns = (double)rtr_backlog_end(&node->backlog, t->start_ns, td_now_ns());

    rtr_work_observe(&node->prefill_time, &ts->prefill_time, &work, ns);
    rtr_work_observe(&ts->prefill_time, NULL, &work, ns);
}

static void prefill_ended(rtr_tickets_t *ts, rtr_ticket_t *t, const td_msg_end_t *m)
{
    if (m->status != TD_OK && has_left_prefill(t)) {
        prefill_release(ts, t);
        return;
    }
    if (m->status == TD_ERR_BUSY && !t->flows) {
        ticket_busy(ts, t, t->prefill.slot);
        return;
    }
    if (m->status != TD_OK) {
        ticket_failed(ts, t, m->status, t->prefill.slot, "prefill leg failed");
        return;
    }
    if (t->prefill.held) {
        learn_prefill(ts, t, &m->usage);
    }
    prefill_release(ts, t);
    note_cached(t, &m->usage);
}

static void decode_ended(rtr_tickets_t *ts, rtr_ticket_t *t, const td_msg_end_t *m)
{
    if (m->status != TD_OK) {
        ticket_failed(ts, t, m->status, t->decode.slot, "decode leg failed");
        return;
    }
    if (!has_all_tokens(t)) {
        ticket_failed(ts, t, TD_ERR_PROTOCOL, t->decode.slot, "ended without a finish reason");
        return;
    }
    t->usage.accepted_draft_tokens = m->usage.accepted_draft_tokens;
    t->usage.rejected_draft_tokens = m->usage.rejected_draft_tokens;
    t->report = m->drafts;
    note_cached(t, &m->usage);
    if (holds_for_echo(t)) {
        t->decode_done = true;
        decode_release(ts, t);
        return;
    }
    ticket_succeeded(ts, t);
}

static void handle_end(rtr_tickets_t *ts, rtr_ticket_t *t, const td_msg_t *msg)
{
    const td_msg_end_t *m = &msg->u.end;
    bool is_prefill = m->leg == TD_ROLE_PREFILL;

    if (!from_leg(ts, is_prefill ? &t->prefill : &t->decode, msg)) {
        return;
    }
    if (t->state == STATE_RESERVING && m->status == TD_OK) {
        return; /* nothing was started */
    }
    if (is_prefill) {
        prefill_ended(ts, t, m);
    } else {
        decode_ended(ts, t, m);
    }
}

static void ticket_message(rtr_tickets_t *ts, const td_msg_t *msg, uint64_t id, uint32_t attempt)
{
    rtr_ticket_t *t = ticket_find(ts, id);

    if (t == NULL || t->attempt != attempt || t->state == STATE_QUEUED) {
        TD_LOG_DEBUG("late message ignored", "from=%s type=%d attempt=%u", msg->sender_id,
                     (int)msg->type, attempt);
        return;
    }
    switch (msg->type) {
    case TD_MSG_RESERVED:
        handle_reserved(ts, t, msg);
        break;
    case TD_MSG_TOKENS:
        handle_tokens(ts, t, msg);
        break;
    case TD_MSG_END:
        handle_end(ts, t, msg);
        break;
    default: /* KV_FAILED: what the prefill node has cannot be read, or is not what it should be */
        if (from_leg(ts, &t->decode, msg)) {
            ticket_failed(ts, t,
                          msg->u.ticket.status == TD_OK ? TD_ERR_CORRUPT : msg->u.ticket.status,
                          t->prefill.slot, "hand-off failed");
        }
        break;
    }
}

bool rtr_tickets_handle(rtr_tickets_t *ts, const td_msg_t *msg)
{
    switch (msg->type) {
    case TD_MSG_RESERVED:
        ticket_message(ts, msg, msg->u.reserved.ticket, msg->u.reserved.attempt);
        return true;
    case TD_MSG_TOKENS:
        ticket_message(ts, msg, msg->u.tokens.ticket, msg->u.tokens.attempt);
        return true;
    case TD_MSG_END:
        ticket_message(ts, msg, msg->u.end.ticket, msg->u.end.attempt);
        return true;
    case TD_MSG_KV_FAILED:
        ticket_message(ts, msg, msg->u.ticket.ticket, msg->u.ticket.attempt);
        return true;
    default:
        return false;
    }
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
        request_client_gone(ts, req);
        return;
    }
    if (rtr_request_open_choices(req) != TD_OK || begin_echo(req) != TD_OK) {
        request_fail(ts, req, RTR_OUTCOME_UPSTREAM_ERROR, 500, NULL, "out of memory");
        return;
    }
    for (uint32_t i = 0; i < prompt_count; i++) {
        t = ticket_create(ts, req, i);
        if (t == NULL) {
            request_fail(ts, req, RTR_OUTCOME_REJECTED, 429, "too_many_requests",
                         "The server has too many requests under way. Try again later.");
            return;
        }
        ids[i] = t->id;
    }
    for (uint32_t i = 0; i < prompt_count; i++) {
        t = ticket_find(ts, ids[i]); /* gone when the request has failed over an earlier one */
        if (t == NULL) {
            return;
        }
        if (ts->queued > 0 && !refuse_if_none_live(ts, t)) {
            ticket_wait(ts, t); /* behind those that came first */
        } else if (ticket_find(ts, ids[i]) != NULL) {
            ticket_place(ts, t);
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
            ticket_failed(ts, t, TD_ERR_PEER_DEAD, slot, "prefill node died");
        }
        return;
    }
    if (t->decode.slot == slot) {
        ticket_failed(ts, t, TD_ERR_PEER_DEAD, slot, "decode node died");
    } else if (t->prefill.slot == slot && has_left_prefill(t)) {
        prefill_release(ts, t);
    } else if (t->prefill.slot == slot && t->prefill.held) {
        ticket_failed(ts, t, TD_ERR_PEER_DEAD, slot, "prefill node died");
    }
}

void rtr_tickets_node_down(rtr_tickets_t *ts, uint32_t slot)
{
    rtr_hints_purge(ts->config.hints, slot);
    each_ticket(ts, ticket_node_down, slot);
}

static void ticket_tick(rtr_tickets_t *ts, rtr_ticket_t *t, uint32_t arg)
{
    uint64_t now = td_now_ns();
    (void)arg;

    if (now >= t->req->deadline_ns) {
        request_fail(ts, t->req, RTR_OUTCOME_TIMEOUT, 504, "timeout",
                     "The request took longer than the server allows.");
    } else if (t->in_queue && now >= t->queue_deadline_ns && has_begun(t)) {
        request_fail(ts, t->req, RTR_OUTCOME_UPSTREAM_ERROR, 503, "no_successor",
                     "The node that served this request has failed, and no other took over.");
    } else if (t->in_queue && now >= t->queue_deadline_ns) {
        request_fail(ts, t->req, RTR_OUTCOME_REJECTED, 429, "queue_timeout",
                     "No room on the nodes came free in time. Try again later.");
    } else if (t->state == STATE_RESERVING && now >= t->reserve_deadline_ns) {
        uint32_t slot = t->decode.slot;
        uint32_t left = 0;
        TD_LOG_WARN("no answer to reserve", "req=%s node=%s", t->req->request_id,
                    rtr_registry_node(ts->config.registry, slot)->id);
        note_failure(ts, slot, "no answer to reserve");
        attempt_end(ts, t, true);
        rtr_slot_add(&t->tried, slot);
        t->retries++;
        for (uint32_t i = 0; i < rtr_registry_slots(ts->config.registry); i++) {
            left += node_allowed(t, rtr_registry_node(ts->config.registry, i), i, TD_ROLE_DECODE,
                                 true, now);
        }
        if (left == 0 && !has_begun(t)) {
            request_fail(ts, t->req, RTR_OUTCOME_UPSTREAM_ERROR, 503, "no_answer",
                         "No decode node answers.");
        } else {
            ticket_place(ts, t);
        }
    }
}

/* The first in the queue ask for room again; those behind them wait for their turn. */
static void queue_probe(rtr_tickets_t *ts)
{
    rtr_ticket_t *t = TAILQ_FIRST(&ts->queue);
    uint32_t probes = 0;

    while (t != NULL && probes < RTR_QUEUE_PROBES_MAX) {
        rtr_ticket_t *next = TAILQ_NEXT(t, queue_link);
        uint64_t next_id = next != NULL ? next->id : 0;
        probes++;
        if (t->state == STATE_QUEUED) {
            ticket_place(ts, t);
        }
        t = next_id != 0 ? ticket_find(ts, next_id) : NULL; /* the call may have ended it */
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
            request_client_gone(ts, req);
        }
        req = next;
    }
}

void rtr_tickets_end_all(rtr_tickets_t *ts)
{
    while (!TAILQ_EMPTY(&ts->requests)) {
        request_fail(ts, TAILQ_FIRST(&ts->requests), RTR_OUTCOME_SHUTDOWN, 503, "shutting_down",
                     "The server is shutting down.");
    }
}

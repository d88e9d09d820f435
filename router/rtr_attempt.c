#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/base/td_log.h"
#include "router/rtr_tickets_internal.h"

void rtr_prefill_release(rtr_tickets_t *ts, rtr_ticket_t *t)
{
    if (t->prefill.held) {
        rtr_node_t *node = rtr_registry_node(ts->config.registry, t->prefill.slot);
        t->prefill.held = false;
        rtr_backlog_remove(&node->backlog, &t->work);
    }
}

void rtr_decode_release(rtr_tickets_t *ts, rtr_ticket_t *t)
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
bool rtr_leg_is_live(const rtr_tickets_t *ts, const rtr_leg_t *leg)
{
    const rtr_node_t *node =
        leg->slot == RTR_PLACE_NONE ? NULL : rtr_registry_node(ts->config.registry, leg->slot);

    return node != NULL && node->live && node->incarnation == leg->incarnation;
}

static void send_cancel(rtr_tickets_t *ts, const rtr_ticket_t *t, const rtr_leg_t *leg)
{
    td_msg_t msg = {.type = TD_MSG_CANCEL, .u.ticket = {.ticket = t->id, .attempt = t->attempt}};
    const rtr_node_t *node = NULL;

    if (!rtr_leg_is_live(ts, leg)) {
        return;
    }
    node = rtr_registry_node(ts->config.registry, leg->slot);
    if (td_bus_send(ts->config.bus, node->id, &msg) != TD_OK) {
        TD_LOG_WARN("cancel not sent", "req=%s node=%s", t->req->request_id, node->id);
    }
}

void rtr_attempt_note_end(rtr_tickets_t *ts, rtr_ticket_t *t, const char *end)
{
    if (ts->config.trace != NULL) {
        rtr_trace_end(ts->config.trace, t->decision, end, rtr_ticket_received(t) - t->given_before);
    }
    t->decision = 0;
}

/* Takes the attempt back from both nodes; later messages of it are then stale. */
void rtr_attempt_end(rtr_tickets_t *ts, rtr_ticket_t *t, bool cancel)
{
    rtr_attempt_note_end(ts, t, "taken back");
    if (cancel) {
        send_cancel(ts, t, &t->prefill);
        send_cancel(ts, t, &t->decode);
    }
    rtr_prefill_release(ts, t);
    rtr_decode_release(ts, t);
    t->prefill.slot = RTR_PLACE_NONE;
    t->decode.slot = RTR_PLACE_NONE;
    t->attempt++;
    t->state = RTR_TICKET_PLACING;
    t->flows = false;
}

/* What earlier attempts gave of each choice. Answers how many there are: none before the first
 * token. */
static uint32_t list_generated(const rtr_ticket_t *t, td_msg_generated_t out[TD_MSG_CHOICES_MAX])
{
    const uint32_t n = t->req->params.n;

    if (!rtr_ticket_has_begun(t)) {
        return 0;
    }
    for (uint32_t i = 0; i < n; i++) {
        const rtr_choice_t *c = &rtr_ticket_choices(t)[i];
        const bool ended = c->finish != TD_FINISH_NONE;
        out[i] = (td_msg_generated_t){.tokens = (const uint32_t *)(const void *)c->ids.bytes,
                                      .count = ended ? 0 : c->received,
                                      .ended = ended};
    }
    return n;
}

td_status_t rtr_attempt_send(rtr_tickets_t *ts, const rtr_ticket_t *t, td_msg_type_t type,
                             const rtr_leg_t *to, const rtr_leg_t *peer, uint32_t have_blocks)
{
    const rtr_params_t *p = &t->req->params;
    const rtr_prompt_t *prompt = rtr_ticket_prompt(t);
    const bool has_peer = peer->slot != RTR_PLACE_NONE;
    td_msg_generated_t generated[TD_MSG_CHOICES_MAX];
    uint64_t left_ms = td_remaining_ns(t->req->deadline_ns) / TD_NS_PER_MS;
    char request_id[TD_MSG_ID_CHARS_MAX + 1];
    td_msg_t msg = {
        .type = type,
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
            .peer_id = has_peer ? rtr_registry_node(ts->config.registry, peer->slot)->id : "",
            .self_prefill = !has_peer,
            .peer_incarnation = peer->incarnation,
            .have_blocks = have_blocks,
            .request_id = request_id,
            .trace = t->req->trace,
            .generated = generated,
        }};

    (void)snprintf(request_id, sizeof(request_id), "%.63s", t->req->request_id);
    msg.u.work.generated_count = type == TD_MSG_RESERVE ? list_generated(t, generated) : 0;
    rtr_registry_tell(ts->config.registry, to->slot); /* whom it is to work with */
    return td_bus_send(ts->config.bus, rtr_registry_node(ts->config.registry, to->slot)->id, &msg);
}

static bool pinned_is_missing(const rtr_tickets_t *ts, const rtr_ticket_t *t, td_role_t role)
{
    const char *pinned = rtr_ticket_pinned(t, role);

    return pinned[0] != '\0' && rtr_ticket_find_named(ts, pinned, role) == RTR_PLACE_NONE;
}

/* True when the request was refused: a role has no live node, or not the one asked for. One that
 * has begun waits for a node to come. */
bool rtr_attempt_refused(rtr_tickets_t *ts, const rtr_ticket_t *t)
{
    bool prefill = rtr_registry_live(ts->config.registry, TD_ROLE_PREFILL) > 0;
    bool decode = rtr_registry_live(ts->config.registry, TD_ROLE_DECODE) > 0;

    if (rtr_ticket_has_begun(t)) {
        return false;
    }
    if (!prefill || !decode) {
        rtr_end_failed(ts, t->req, RTR_OUTCOME_UPSTREAM_ERROR, 503, "no_nodes",
                       !prefill ? "No prefill node is live." : "No decode node is live.");
        return true;
    }
    if ((rtr_ticket_named_self(ts, t) == RTR_PLACE_NONE &&
         pinned_is_missing(ts, t, TD_ROLE_PREFILL)) ||
        pinned_is_missing(ts, t, TD_ROLE_DECODE)) {
        rtr_end_failed(ts, t->req, RTR_OUTCOME_BAD_REQUEST, 400, "no_such_node",
                       "tandem: a node that was named is not live, or has another role.");
        return true;
    }
    return false;
}

/* Blocks that a request may hold at once on its decode node. */
static uint64_t count_need(const rtr_tickets_t *ts, const rtr_ticket_t *t)
{
    const td_attention_mask_t *mask = rtr_registry_mask(ts->config.registry);
    const uint64_t count = rtr_ticket_prompt(t)->count;
    const uint64_t max_tokens = rtr_ticket_prompt(t)->max_tokens;
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
        .answer_ns = decode->tbt_ns < 0 ? -1 : decode->tbt_ns * rtr_ticket_prompt(t)->max_tokens};
    uint32_t retry_after_s = 0;
    rtr_admission_t verdict = RTR_ADMIT;
    char text[160];

    if (t->retries > 0 || t->req->first_token_ns != 0) {
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
    rtr_end_failed_for(ts, t->req, RTR_OUTCOME_REJECTED, 429,
                       verdict == RTR_REFUSE_TTFT ? "slo_ttft" : "slo_tbt", text, retry_after_s);
    return true;
}

static void trace_place(const rtr_tickets_t *ts, const rtr_ticket_t *t, uint64_t begin_ns)
{
    td_span_t span;

    if (!t->req->trace.sampled) {
        return;
    }
    td_span_begin(&span, &t->req->trace, "place", begin_ns);
    td_span_number(&span, "tandem.prompt", t->prompt_idx);
    td_span_number(&span, "tandem.attempt", t->attempt);
    td_span_text(&span, "tandem.policy", rtr_policy_name(ts->config.policy));
    td_span_text(&span, "tandem.prefill",
                 t->self ? "" : rtr_registry_node(ts->config.registry, t->prefill.slot)->id);
    td_span_text(&span, "tandem.decode",
                 rtr_registry_node(ts->config.registry, t->decode.slot)->id);
    td_span_text(&span, "tandem.drafter", td_drafter_name((td_drafter_t)t->draft.drafter));
    td_span_number(&span, "tandem.k_max", t->draft.k_max);
    td_tracer_end(t->req->tracer, &span, td_now_ns());
}

/* Chooses nodes and counts the attempt on them; begin_ns: when that began. False: it waits, or was
 * refused and is gone. */
static bool place(rtr_tickets_t *ts, rtr_ticket_t *t, uint64_t begin_ns)
{
    const rtr_place_ask_t ask = rtr_ticket_ask(ts, t);
    rtr_prefill_choice_t prefill = rtr_ticket_choose_prefill(ts, t, &ask, false);
    rtr_decode_choice_t decode = rtr_ticket_choose_decode(ts, t, &ask, false);
    rtr_self_choice_t self;

    if (prefill.node == RTR_PLACE_NONE) {
        prefill = rtr_ticket_choose_prefill(ts, t, &ask, true);
    }
    if (decode.node == RTR_PLACE_NONE) {
        decode = rtr_ticket_choose_decode(ts, t, &ask, true);
    }
    self = rtr_ticket_choose_self(ts, t, &ask, &prefill, &decode);
    td_metric_observe_ns(ts->config.metrics->place_time, td_now_ns() - begin_ns);
    if (self.node != RTR_PLACE_NONE) {
        prefill.ttft_ns = self.ttft_ns;
    } else if (prefill.node == RTR_PLACE_NONE || decode.node == RTR_PLACE_NONE) {
        rtr_queue_join(ts, t);
        return false;
    }
    if (refuse_by_slo(ts, t, &prefill, &decode)) {
        return false;
    }
    ts->turn++;
    if (self.node != RTR_PLACE_NONE) {
        rtr_attempt_hold_self(ts, t, &self, ask.now_ns);
    } else {
        rtr_attempt_hold(ts, t, &prefill, decode.node, ask.now_ns);
    }
    rtr_ticket_choose_draft(ts, t);
    rtr_attempt_note_decision(ts, t, &ask);
    trace_place(ts, t, begin_ns);
    return true;
}

void rtr_attempt_begin(rtr_tickets_t *ts, rtr_ticket_t *t)
{
    uint64_t begin_ns = 0;

    rtr_ticket_hash(ts, t);
    t->need_blocks = count_need(ts, t);
    begin_ns = td_now_ns();
    rtr_ticket_match(ts, t);
    if (rtr_attempt_refused(ts, t)) {
        return;
    }
    while (place(ts, t, begin_ns)) {
        if (rtr_attempt_send(ts, t, TD_MSG_RESERVE, &t->decode, &t->prefill, 0) == TD_OK) {
            t->state = RTR_TICKET_RESERVING;
            t->reserve_deadline_ns = td_now_ns() + RTR_RESERVE_MS * TD_NS_PER_MS;
            return;
        }
        rtr_slot_add(&t->tried, t->decode.slot);
        rtr_attempt_end(ts, t, false);
        begin_ns = td_now_ns();
    }
}

/* --- failures --------------------------------------------------------------------------------- */

/* Takes the attempt back. What it gave stays: the next one goes on behind it, with the same tokens
 * (I1, I9). Only where nothing is left to go on with, but the prompt's own log-probabilities have
 * not come, all begins anew; nothing was shown then. */
static void attempt_undo(rtr_tickets_t *ts, rtr_ticket_t *t)
{
    rtr_attempt_end(ts, t, true);
    for (uint32_t i = 0; t->decode_done && i < t->req->params.n; i++) {
        rtr_choice_reset(&rtr_ticket_choices(t)[i]);
    }
    t->decode_done = false;
    t->cached_known = rtr_ticket_has_begun(t);
    if (!t->cached_known) {
        t->usage = (td_msg_usage_t){0};
    }
}

static void note_failover(rtr_tickets_t *ts, const rtr_ticket_t *t, uint32_t slot, const char *what)
{
    const char *node =
        slot == RTR_PLACE_NONE ? "" : rtr_registry_node(ts->config.registry, slot)->id;

    td_metric_add(ts->config.metrics->failovers, 1);
    rtr_events_add(ts->config.events, RTR_EVENT_FAILOVER, node, t->req->request_id, what);
}

/* The next attempt, with every node open to it again. slot: where this one was given up, or
 * RTR_PLACE_NONE. */
static void attempt_renew(rtr_tickets_t *ts, rtr_ticket_t *t, uint32_t slot, const char *what)
{
    attempt_undo(ts, t);
    if (rtr_ticket_has_begun(t)) {
        note_failover(ts, t, slot, what);
    }
    memset(&t->tried, 0, sizeof(t->tried));
}

static bool is_request_fault(td_status_t status)
{
    return status == TD_ERR_INVALID || status == TD_ERR_TOO_LARGE || status == TD_ERR_UNSUPPORTED;
}

void rtr_attempt_blame(rtr_tickets_t *ts, uint32_t slot, const char *what)
{
    rtr_node_t *node = rtr_registry_node(ts->config.registry, slot);

    if (rtr_breaker_failed(&node->breaker, td_now_ns())) {
        TD_LOG_WARN("node shunned", "node=%s failures=%u for_ms=%" PRIu64, node->id,
                    node->breaker.failures, node->breaker.open_ms);
        td_metric_add(ts->config.metrics->breakers_opened, 1);
        rtr_events_add(ts->config.events, RTR_EVENT_BREAKER, node->id, "", what);
    }
}

void rtr_attempt_credit(rtr_tickets_t *ts, const rtr_leg_t *leg)
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

/* Can another node than this one, which has just failed, do its part? None of its role is live, if
 * it was the only one and has died: then the ticket waits for one to come, as any other. */
static bool has_other(const rtr_tickets_t *ts, const rtr_ticket_t *t, uint32_t culprit)
{
    const rtr_node_t *failed = rtr_registry_node(ts->config.registry, culprit);

    return !failed->live || rtr_ticket_any(ts, t, failed->role, false, td_now_ns());
}

/* By chance up to half as long again, so that those that failed together do not come back so. */
static void rest(rtr_ticket_t *t)
{
    const uint64_t ns = ((uint64_t)RTR_REST_MS << (t->failures - 1)) * TD_NS_PER_MS;

    t->state = RTR_TICKET_RESTING;
    t->rest_until_ns = td_now_ns() + ns + td_random_u64() % (ns / 2);
}

/* An attempt has failed. culprit: the slot to keep away from, or RTR_PLACE_NONE. */
void rtr_attempt_failed(rtr_tickets_t *ts, rtr_ticket_t *t, td_status_t status, uint32_t culprit,
                        const char *what)
{
    rtr_attempt_note_end(ts, t, what);
    TD_LOG_WARN("attempt failed", "req=%s attempt=%u what=\"%s\" status=%s", t->req->request_id,
                t->attempt, what, td_status_name(status));
    if (is_request_fault(status) &&
        !rtr_ticket_has_begun(t)) { /* else others can, if not this one */
        rtr_end_failed(ts, t->req, RTR_OUTCOME_BAD_REQUEST, 400, NULL,
                       "The model cannot serve this request as it is.");
        return;
    }
    if (rtr_ticket_has_all_tokens(t) && !rtr_ticket_holds_for_echo(t)) {
        rtr_ticket_succeeded(ts, t); /* only word of its end was lost */
        return;
    }
    if (culprit != RTR_PLACE_NONE) {
        rtr_slot_add(&t->avoid, culprit);
        rtr_attempt_blame(ts, culprit, what);
    }
    if (t->failures >= RTR_RETRIES_MAX || t->retries >= RTR_FAILOVERS_MAX) {
        rtr_end_failed(ts, t->req, RTR_OUTCOME_UPSTREAM_ERROR, 502, "upstream_error",
                       "The request failed on the nodes that were tried.");
        return;
    }
    t->failures++;
    t->retries++;
    td_metric_add(ts->config.metrics->retries, 1);
    attempt_renew(ts, t, culprit, what);
    if (culprit != RTR_PLACE_NONE && !has_other(ts, t, culprit)) {
        rest(t);
        return;
    }
    rtr_attempt_begin(ts, t);
}

void rtr_attempt_voided(rtr_tickets_t *ts, rtr_ticket_t *t, uint32_t slot)
{
    static const char what[] = "its lease was over";

    rtr_attempt_note_end(ts, t, what);
    attempt_renew(ts, t, slot, what);
    rtr_attempt_begin(ts, t);
}

/* A node had no room: another one is asked, and if there is none the ticket waits. */
void rtr_attempt_busy(rtr_tickets_t *ts, rtr_ticket_t *t, uint32_t slot)
{
    rtr_slot_add(&t->tried, slot);
    attempt_undo(ts, t);
    rtr_attempt_begin(ts, t);
}

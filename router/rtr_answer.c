#include <stdio.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/base/td_log.h"
#include "router/rtr_tickets_internal.h"

#define TBT_EVERY_TOKENS 16u /* of a choice: what is learned from */

static bool from_leg(const rtr_tickets_t *ts, const rtr_leg_t *leg, const td_msg_t *msg)
{
    return leg->slot != RTR_PLACE_NONE && leg->incarnation == msg->sender_incarnation &&
           strcmp(rtr_registry_node(ts->config.registry, leg->slot)->id, msg->sender_id) == 0;
}

static void handle_reserved(rtr_tickets_t *ts, rtr_ticket_t *t, const td_msg_t *msg)
{
    const td_msg_reserved_t *m = &msg->u.reserved;

    if (t->state != RTR_TICKET_RESERVING || !from_leg(ts, &t->decode, msg)) {
        return;
    }
    if (m->status == TD_ERR_BUSY) {
        rtr_attempt_busy(ts, t, t->decode.slot);
        return;
    }
    if (m->status != TD_OK) {
        rtr_attempt_failed(ts, t, m->status, t->decode.slot, "reserve refused");
        return;
    }
    rtr_queue_serve(ts, t);
    t->state = RTR_TICKET_RUNNING;
    t->start_ns = td_now_ns();
    rtr_drafters_count(ts->config.drafters, &t->draft);
    if (t->self) {
        td_metric_add(ts->config.metrics->self_prefills, 1);
        rtr_index_expect(ts->config.index, t->keys, t->key_count, t->decode.slot);
        return;
    }
    if (rtr_attempt_send(ts, t, TD_MSG_START, &t->prefill, &t->decode, m->have_blocks) != TD_OK) {
        rtr_attempt_failed(ts, t, TD_ERR_PEER_DEAD, t->prefill.slot, "start not sent");
        return;
    }
    /* Before it is computed: what comes next with this prefix shall go to the same node. */
    rtr_index_expect(ts->config.index, t->keys, t->key_count, t->prefill.slot);
}

/* What a token took, at what its node has to do. Blocks are counted as they are promised. */
static void learn_tbt(rtr_tickets_t *ts, const rtr_ticket_t *t, double ns)
{
    rtr_node_t *node = rtr_registry_node(ts->config.registry, t->decode.slot);
    const uint64_t promised = node->promised_blocks + node->beat.other_blocks;
    const uint32_t sequences = node->sequences + node->beat.other_requests;
    const uint32_t decoding = node->decoding + node->beat.other_tokens;
    const uint64_t blocks = sequences > 0 ? promised * decoding / sequences : promised;

    rtr_tbt_observe(&node->tbt, &ts->tbt, decoding, blocks, ns);
    rtr_tbt_observe(&ts->tbt, NULL, decoding, blocks, ns);
}

/* What the prompt took a decode node that had the rest of its step's rows for it. */
static void learn_self(rtr_tickets_t *ts, const rtr_ticket_t *t, double ns)
{
    rtr_node_t *node = rtr_registry_node(ts->config.registry, t->decode.slot);

    rtr_work_observe(&node->self, &ts->self, &t->work, ns);
    rtr_work_observe(&ts->self, NULL, &t->work, ns);
}

static void observe_token(rtr_tickets_t *ts, rtr_ticket_t *t, rtr_choice_t *choice, uint32_t count)
{
    rtr_request_t *req = t->req;
    const uint32_t before = choice->received - count;
    const bool is_first = choice->attempt != t->attempt; /* of this attempt */
    uint64_t now = td_now_ns();

    td_metric_add(ts->config.metrics->completion_tokens, count);
    if (is_first && t->self && t->decode.held && t->decoding == 0) {
        learn_self(ts, t, (double)(now - t->start_ns));
    }
    if (is_first && t->decode.held) {
        t->decoding++;
        rtr_registry_node(ts->config.registry, t->decode.slot)->decoding++;
    }
    choice->attempt = t->attempt;
    if (!is_first && t->decode.held &&
        choice->received / TBT_EVERY_TOKENS != before / TBT_EVERY_TOKENS) {
        learn_tbt(ts, t, (double)(now - choice->last_ns) / count);
    }
    if (req->first_token_ns == 0) {
        req->first_token_ns = now;
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
    rtr_head_t head = rtr_ticket_head(ts, req);
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
    if (req->chunk_head.len == 0) {
        status = rtr_reply_chunk_head(&head, &req->chunk_head);
    }
    if (status == TD_OK) {
        status = rtr_reply_chunk(&head, index, opened, pieces, count, &choice->text_offset,
                                 &ts->scratch);
    }
    if (status == TD_OK) {
        status = rtr_request_give(req, ts->scratch.bytes, ts->scratch.len);
    }
    if (status == TD_ERR_BUSY) {
        TD_LOG_INFO("client does not read", "req=%s bytes=%u", req->request_id, RTR_OUT_BYTES_MAX);
        rtr_end_client_gone(ts, req);
        return false;
    }
    if (status != TD_OK) {
        rtr_end_failed(ts, req, RTR_OUTCOME_UPSTREAM_ERROR, 500, NULL, "out of memory");
        return false;
    }
    choice->opened = true;
    return true;
}

void rtr_ticket_succeeded(rtr_tickets_t *ts, rtr_ticket_t *t)
{
    rtr_request_t *req = t->req;
    td_msg_usage_t *u = &req->usage;

    rtr_attempt_credit(ts, &t->prefill);
    rtr_attempt_credit(ts, &t->decode);
    rtr_attempt_note_end(ts, t, "ok");
    u->cached_local_tokens += t->usage.cached_local_tokens;
    u->cached_store_tokens += t->usage.cached_store_tokens;
    u->accepted_draft_tokens += t->usage.accepted_draft_tokens;
    u->rejected_draft_tokens += t->usage.rejected_draft_tokens;
    if (rtr_leg_is_live(ts, &t->decode)) { /* else what it held was forgotten, and is gone */
        rtr_index_expect(ts->config.index, t->keys, t->key_count, t->decode.slot);
    }
    rtr_drafters_answered(ts->config.drafters, t->tenant, t->prompt_class,
                          rtr_ticket_prompt(t)->hash, &t->report);
    rtr_ticket_destroy(ts, t, false);
    if (req->tickets_left == 0) {
        rtr_end_complete(ts, req);
    }
}

static void handle_prompt_logprobs(rtr_tickets_t *ts, rtr_ticket_t *t, const rtr_piece_t *piece)
{
    const rtr_prompt_t *prompt = rtr_ticket_prompt(t);
    rtr_choice_t *echo = &t->req->echoes[t->prompt_idx];
    uint32_t first = t->prompt_idx * t->req->params.n;

    if (t->echo_seen || !t->req->params.echo) {
        return;
    }
    if (piece->count != prompt->count) {
        rtr_attempt_failed(ts, t, TD_ERR_PROTOCOL, t->prefill.slot, "prompt logprobs incomplete");
        return;
    }
    if (rtr_choice_append(echo, piece) != TD_OK ||
        td_str_append(&echo->text, prompt->text.bytes, prompt->text.len) != TD_OK) {
        rtr_end_failed(ts, t->req, RTR_OUTCOME_UPSTREAM_ERROR, 500, NULL, "out of memory");
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
        rtr_ticket_succeeded(ts, t);
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

    if (t->state != RTR_TICKET_RUNNING ||
        !from_leg(ts, m->is_prompt ? &t->prefill : &t->decode, msg)) {
        return;
    }
    if (m->is_prompt) {
        handle_prompt_logprobs(ts, t, &piece);
        return;
    }
    if (m->choice >= req->params.n || m->offset != rtr_ticket_choices(t)[m->choice].received ||
        rtr_ticket_choices(t)[m->choice].finish != TD_FINISH_NONE) {
        rtr_attempt_failed(ts, t, TD_ERR_PROTOCOL, t->decode.slot, "tokens out of order");
        return;
    }
    choice = &rtr_ticket_choices(t)[m->choice];
    if (td_str_append(&choice->ids, m->tokens, m->count * sizeof(*m->tokens)) != TD_OK) {
        rtr_end_failed(ts, req, RTR_OUTCOME_UPSTREAM_ERROR, 500, NULL, "out of memory");
        return;
    }
    choice->received += m->count;
    t->flows = true;
    t->failures = 0;
    observe_token(ts, t, choice, m->count);
    if (t->prompt_idx == 0 && choice->received == m->count) {
        rtr_request_set_nodes(req,
                              t->self ? msg->sender_id
                                      : rtr_registry_node(ts->config.registry, t->prefill.slot)->id,
                              msg->sender_id);
        name_draft(t);
    }
    if (!req->params.stream || rtr_ticket_holds_for_echo(t)) {
        if (rtr_choice_append(choice, &piece) != TD_OK) {
            rtr_end_failed(ts, req, RTR_OUTCOME_UPSTREAM_ERROR, 500, NULL, "out of memory");
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

/* What the prompt took, by what the node says it computed and pulled. */
static void learn_prefill(rtr_tickets_t *ts, const rtr_ticket_t *t, const td_msg_end_t *m)
{
    const td_msg_usage_t *usage = &m->usage;
    rtr_node_t *node = rtr_registry_node(ts->config.registry, t->prefill.slot);
    const uint64_t cached = (uint64_t)usage->cached_local_tokens + usage->cached_store_tokens;
    const rtr_work_t work =
        rtr_work_of(rtr_ticket_prompt(t)->count, (uint32_t)TD_MIN(cached, UINT32_MAX),
                    (uint32_t)TD_MIN(usage->cached_store_tokens, rtr_ticket_prompt(t)->count));
    const uint64_t now_ns = td_now_ns();
    const uint64_t seen_ns = rtr_backlog_end(&node->backlog, t->start_ns, now_ns);
    /* The node knows better: between our prompts it may have had other routers'. But what it says
     * becomes part of what new nodes are taken for, so it is believed within what can be. */
    const double ns = (double)(m->busy_ns > 0 ? TD_MIN(m->busy_ns, now_ns - t->start_ns) : seen_ns);

    rtr_work_observe(&node->prefill_time, &ts->prefill_time, &work, ns);
    rtr_work_observe(&ts->prefill_time, NULL, &work, ns);
}

static void prefill_ended(rtr_tickets_t *ts, rtr_ticket_t *t, const td_msg_end_t *m)
{
    if (m->status != TD_OK && rtr_ticket_has_left_prefill(t)) {
        rtr_prefill_release(ts, t);
        return;
    }
    if (m->status == TD_ERR_BUSY && !t->flows) {
        rtr_attempt_busy(ts, t, t->prefill.slot);
        return;
    }
    if (m->status != TD_OK) {
        rtr_attempt_failed(ts, t, m->status, t->prefill.slot, "prefill leg failed");
        return;
    }
    if (t->prefill.held) {
        learn_prefill(ts, t, m);
    }
    rtr_prefill_release(ts, t);
    note_cached(t, &m->usage);
}

static void decode_ended(rtr_tickets_t *ts, rtr_ticket_t *t, const td_msg_end_t *m)
{
    if (m->status != TD_OK) {
        rtr_attempt_failed(ts, t, m->status, t->decode.slot, "decode leg failed");
        return;
    }
    if (!rtr_ticket_has_all_tokens(t)) {
        rtr_attempt_failed(ts, t, TD_ERR_PROTOCOL, t->decode.slot, "ended without a finish reason");
        return;
    }
    t->usage.accepted_draft_tokens = m->usage.accepted_draft_tokens;
    t->usage.rejected_draft_tokens = m->usage.rejected_draft_tokens;
    t->report = m->drafts;
    note_cached(t, &m->usage);
    if (rtr_ticket_holds_for_echo(t)) {
        t->decode_done = true;
        rtr_decode_release(ts, t);
        return;
    }
    rtr_ticket_succeeded(ts, t);
}

static void handle_end(rtr_tickets_t *ts, rtr_ticket_t *t, const td_msg_t *msg)
{
    const td_msg_end_t *m = &msg->u.end;
    bool is_prefill = m->leg == TD_ROLE_PREFILL;

    if (!from_leg(ts, is_prefill ? &t->prefill : &t->decode, msg)) {
        return;
    }
    if (t->state == RTR_TICKET_RESERVING && m->status == TD_OK) {
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
    rtr_ticket_t *t = rtr_ticket_find(ts, id);

    if (t == NULL || t->attempt != attempt || t->state == RTR_TICKET_QUEUED) {
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
            rtr_attempt_failed(
                ts, t, msg->u.ticket.status == TD_OK ? TD_ERR_CORRUPT : msg->u.ticket.status,
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

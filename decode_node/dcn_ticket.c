/* A decode ticket's life: reservation, and its one end. */
#include "decode_node/dcn_node.h"

#include <stdio.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/base/td_fault.h"
#include "common/base/td_log.h"

dcn_ticket_t *dcn_ticket_find(dcn_node_t *d, uint64_t ticket, uint32_t attempt)
{
    for (dcn_ticket_t *t = d->tickets; t != NULL; t = t->next) {
        if (t->ticket == ticket && t->attempt == attempt) {
            return t;
        }
    }
    return NULL;
}

static void send_reserved(dcn_node_t *d, const char *router, const td_msg_work_t *w,
                          td_status_t status, uint32_t have_blocks)
{
    td_msg_t msg = {.type = TD_MSG_RESERVED};
    msg.u.reserved = (td_msg_reserved_t){
        .ticket = w->ticket, .attempt = w->attempt, .status = status, .have_blocks = have_blocks};
    if (td_bus_send(d->node.proc.bus, router, &msg) != TD_OK) {
        TD_LOG_WARN("reservation not answered", "req=%s", w->request_id);
    }
}

static void send_end(dcn_node_t *d, const dcn_ticket_t *t, td_status_t status)
{
    td_msg_t msg = {.type = TD_MSG_END};
    uint32_t generated = 0;

    for (uint32_t i = 0; t->choices != NULL && i < t->work.n; i++) {
        generated += t->choices[i].given;
    }
    msg.u.end = (td_msg_end_t){
        .ticket = t->ticket, .attempt = t->attempt, .leg = TD_ROLE_DECODE, .status = status};
    if (t->ready_arena != NULL || t->work.self_prefill) {
        msg.u.end.usage = t->ready.usage; /* where the prompt's KV came from */
    }
    msg.u.end.usage.prompt_tokens = t->work.prompt_tokens;
    msg.u.end.usage.completion_tokens = generated;
    msg.u.end.drafts = t->drafts;
    msg.u.end.usage.rejected_draft_tokens += t->sides; /* of which the accepted ones count below */
    for (uint32_t i = 0; i < t->drafts.k_max; i++) {
        msg.u.end.usage.accepted_draft_tokens += t->drafts.accepted[i];
        msg.u.end.usage.rejected_draft_tokens += t->drafts.drafted[i] - t->drafts.accepted[i];
    }
    if (td_bus_send(d->node.proc.bus, t->router, &msg) != TD_OK) {
        TD_LOG_WARN("end not reported", "req=%s", t->work.request_id);
    }
}

static void release_choices(dcn_node_t *d, dcn_ticket_t *t)
{
    for (uint32_t i = t->work.n; t->choices != NULL && i > 0; i--) {
        dcn_choice_t *c = &t->choices[i - 1];
        td_seq_fini(&c->seq);
        td_sampler_destroy(c->sampler);
        dcn_speculate_close(c);
        td_stop_fini(&c->stop);
        td_free(c->tokens);
    }
    td_free(t->choices);
    t->choices = NULL;
    td_pool_unreserve(d->node.pool, t->reserve_choices);
    t->reserve_choices = 0;
}

static void ticket_free(dcn_node_t *d, dcn_ticket_t *t)
{
    dcn_ticket_t **link = &d->tickets;
    while (*link != NULL && *link != t) {
        link = &(*link)->next;
    }
    if (*link == t) {
        *link = t->next;
        d->ticket_count--;
    }
    dcn_return_fini(t);
    release_choices(d, t);
    td_seq_fini(&t->seq);
    td_free(t->keys);
    td_free(t->asked);
    td_free(t->layers);
    td_free(t->hashes);
    td_free(t->quarantined);
    td_msg_arena_free(t->ready_arena);
    td_msg_arena_free(t->arena);
    td_free(t);
}

void dcn_ticket_settle(dcn_node_t *d, dcn_ticket_t *t)
{
    if (t->state != DCN_DRAIN || t->computing || t->fetches > 0) {
        return;
    }
    for (uint32_t i = 0; i < t->quarantined_count; i++) {
        td_pool_release_quarantine(d->node.pool, t->quarantined[i]);
    }
    t->quarantined_count = 0;
    ticket_free(d, t);
}

static void end_span(dcn_node_t *d, dcn_ticket_t *t, td_status_t status)
{
    const uint64_t now = td_now_ns();
    uint32_t generated = 0;
    uint32_t accepted = 0;
    td_span_t span;

    if (!t->span.context.sampled) {
        return;
    }
    for (uint32_t i = 0; t->choices != NULL && i < t->work.n; i++) {
        generated += t->choices[i].given;
    }
    for (uint32_t i = 0; i < t->drafts.k_max; i++) {
        accepted += t->drafts.accepted[i];
    }
    if (t->running_ns != 0) {
        td_span_begin(&span, &t->span.context, "generate", t->running_ns);
        td_span_number(&span, "tandem.tokens", generated);
        td_span_number(&span, "tandem.steps", t->drafts.steps);
        td_span_number(&span, "tandem.accepted_drafts", accepted);
        td_tracer_end(d->node.proc.tracer, &span, now);
    }
    td_span_text(&t->span, "tandem.request", t->work.request_id);
    td_span_number(&t->span, "tandem.attempt", t->attempt);
    td_span_text(&t->span, "tandem.prefill", t->work.peer_id);
    td_span_number(&t->span, "tandem.held_blocks", t->held_blocks);
    td_span_text(&t->span, "tandem.status", td_status_name(status));
    t->span.failed = status != TD_OK;
    td_tracer_end(d->node.proc.tracer, &t->span, now);
}

void dcn_ticket_end(dcn_node_t *d, dcn_ticket_t *t, td_status_t status)
{
    if (t->state == DCN_DRAIN) {
        return;
    }
    td_metric_add(status == TD_OK              ? d->requests_ok
                  : status == TD_ERR_CANCELLED ? d->requests_cancelled
                                               : d->requests_failed,
                  1);
    if (status != TD_OK && status != TD_ERR_CANCELLED) {
        TD_LOG_INFO("decode failed", "req=%s attempt=%u status=%s", t->work.request_id, t->attempt,
                    td_status_name(status));
    }
    td_node_forget(&d->node, t->ticket, t->attempt);
    end_span(d, t, status);
    if (status == TD_OK) {
        dcn_worth_end(d, t);
    }
    if (status !=
        TD_ERR_STALE) { /* else its router goes by another attempt, or is told by Register */
        send_end(d, t, status);
    }
    t->state = DCN_DRAIN;
    if (t->fetches > 0) {
        td_node_fetch_cancel(&d->node, t->ticket, t->attempt);
        t->quarantined_count = td_seq_fini_quarantine(&t->seq, t->quarantined);
    }
    dcn_ticket_settle(d, t);
}

static bool are_tokens(const dcn_node_t *d, const uint32_t *tokens, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        if (tokens[i] >= d->node.info->vocab_size) {
            return false;
        }
    }
    return true;
}

static td_status_t check_work(const dcn_node_t *d, const td_msg_work_t *w)
{
    if ((w->peer_id[0] == '\0') != w->self_prefill ||
        w->prompt_tokens >= d->node.info->context_max ||
        w->max_tokens > d->node.info->context_max - w->prompt_tokens) {
        return TD_ERR_INVALID;
    }
    if (!are_tokens(d, w->prompt, w->prompt_tokens)) {
        return TD_ERR_INVALID;
    }
    for (uint32_t i = 0; i < w->generated_count; i++) {
        if (!are_tokens(d, w->generated[i].tokens, w->generated[i].count)) {
            return TD_ERR_INVALID;
        }
    }
    return TD_OK;
}

static td_status_t alloc_ticket(dcn_node_t *d, dcn_ticket_t *t)
{
    const td_kv_layout_t *layout = td_node_layout(&d->node);
    const td_msg_work_t *w = &t->work;

    t->blocks = td_kv_blocks_for(layout, w->prompt_tokens);
    t->full_blocks = w->prompt_tokens / layout->block_tokens;
    t->keys = td_calloc(t->blocks, sizeof(*t->keys));
    t->asked = td_calloc(t->blocks, sizeof(*t->asked));
    t->layers = td_calloc(t->blocks, sizeof(*t->layers));
    t->hashes = td_calloc(t->blocks, sizeof(*t->hashes));
    t->quarantined = td_calloc(t->blocks, sizeof(*t->quarantined));
    if (t->keys == NULL || t->asked == NULL || t->layers == NULL || t->hashes == NULL ||
        t->quarantined == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    td_node_root(&d->node, w->cache_salt.at, w->cache_salt.len, &t->root);
    td_block_keys(&t->root, w->prompt, w->prompt_tokens, layout->block_tokens, t->keys);
    if (t->blocks > t->full_blocks) {
        uint32_t start = t->full_blocks * layout->block_tokens;
        td_block_key_partial(&t->root, t->full_blocks > 0 ? &t->keys[t->full_blocks - 1] : NULL,
                             w->prompt + start, w->prompt_tokens - start, &t->keys[t->full_blocks]);
    }
    return td_seq_init(&t->seq, d->node.pool, layout, td_node_mask(&d->node),
                       w->prompt_tokens + w->max_tokens);
}

uint32_t dcn_ticket_blocks_max(const dcn_node_t *d, const dcn_ticket_t *t)
{
    return td_attention_blocks_max(td_node_mask(&d->node), td_node_layout(&d->node)->block_tokens,
                                   t->work.prompt_tokens + t->work.max_tokens, 1);
}

/* Blocks by which each of several choices may grow at once, beyond the prompt's full ones. */
static uint32_t choice_blocks(const dcn_node_t *d, const dcn_ticket_t *t, uint32_t growth_tokens)
{
    const uint32_t tokens = t->work.prompt_tokens + growth_tokens;
    return TD_MIN(td_kv_blocks_for(td_node_layout(&d->node), tokens) - t->full_blocks,
                  dcn_ticket_blocks_max(d, t));
}

bool dcn_ticket_needs(const dcn_ticket_t *t, uint32_t block)
{
    return td_seq_needs(&t->seq, t->work.prompt_tokens, block);
}

/* Those of the prompt's blocks, from one on, that generation needs. */
static uint32_t prompt_blocks(const dcn_node_t *d, const dcn_ticket_t *t, uint32_t from_block)
{
    const uint32_t block_tokens = td_node_layout(&d->node)->block_tokens;
    return td_attention_blocks_needed(td_node_mask(&d->node), block_tokens, t->work.prompt_tokens,
                                      from_block * block_tokens, t->work.prompt_tokens);
}

/* Blocks of the first choice (of the only one: all that it needs at once): those of the prompt from
 * one on that generation needs, and growth of so many tokens. */
static uint32_t first_choice_blocks(const dcn_node_t *d, const dcn_ticket_t *t, uint32_t from_block,
                                    uint32_t growth_tokens)
{
    const td_kv_layout_t *layout = td_node_layout(&d->node);
    const td_msg_work_t *w = &t->work;
    const uint32_t prompt = prompt_blocks(d, t, from_block);
    const uint32_t growth = td_kv_blocks_for(layout, w->prompt_tokens + growth_tokens) - t->blocks;
    const uint32_t most = dcn_ticket_blocks_max(d, t);

    /* Blocks that it gives up make room for its growth, unless other choices still need them. */
    return w->n == 1 ? TD_MIN(prompt + growth, most) : prompt + TD_MIN(growth, most);
}

/* What is not needed counts as here. */
static void note_held(dcn_node_t *d, dcn_ticket_t *t)
{
    const uint32_t layers = td_node_layout(&d->node)->layers;

    for (uint32_t i = 0; i < t->blocks; i++) {
        if (i < t->held_blocks || !dcn_ticket_needs(t, i)) {
            t->asked[i] = layers;
            t->layers[i] = layers;
        }
        if (i < t->held_blocks && t->seq.blocks[i] != TD_POOL_NONE) {
            t->hashes[i] = td_pool_content_hash(d->node.pool, t->seq.blocks[i]);
        }
    }
}

/* Blocks of the choices behind the first when each grows by so many tokens: *each_out of each, and
 * one more. Whoever writes into a shared partial block first copies it, and that may be choice 0
 * too. */
static uint64_t others_blocks(const dcn_node_t *d, const dcn_ticket_t *t, uint32_t growth_tokens,
                              uint32_t *each_out)
{
    const uint64_t copy = t->work.n > 1 && t->blocks > t->full_blocks ? 1 : 0;

    *each_out = choice_blocks(d, t, growth_tokens);
    return (uint64_t)*each_out * (t->work.n - 1) + copy;
}

/* All that the request may ever need at once. When it comes back after giving way, what choices
 * share is computed again, which may take more blocks than generation needs of it. */
static uint64_t most_blocks(const dcn_node_t *d, const dcn_ticket_t *t)
{
    const uint32_t needed = prompt_blocks(d, t, 0);
    const uint32_t computing = td_attention_blocks_max(
        td_node_mask(&d->node), td_node_layout(&d->node)->block_tokens, t->work.prompt_tokens, 1);
    uint32_t each = 0;

    return first_choice_blocks(d, t, 0, t->work.max_tokens) +
           others_blocks(d, t, t->work.max_tokens, &each) +
           (t->work.n > 1 ? computing - TD_MIN(computing, needed) : 0);
}

uint32_t dcn_ticket_promise(const dcn_node_t *d, const dcn_ticket_t *t)
{
    const uint64_t tokens = t->work.prompt_tokens + (uint64_t)t->work.max_tokens * t->work.n;
    const uint64_t all = tokens / td_node_layout(&d->node)->block_tokens + t->work.n;

    return (uint32_t)TD_MIN(all, (uint64_t)t->work.n * dcn_ticket_blocks_max(d, t));
}

/* Pins what is here and needed of the prompt and promises the rest of the prompt and the growth
 * that is expected of each choice; whoever needs more may give way (dcn_preempt.c). Choices after
 * the first share the prompt's full blocks and copy the partial one when they write. */
static td_status_t reserve_blocks(dcn_node_t *d, dcn_ticket_t *t)
{
    const uint32_t growth = dcn_output_expected(d, t->work.max_tokens);
    uint32_t first = 0;
    uint32_t others = 0;
    td_status_t status = TD_OK;

    if (most_blocks(d, t) > td_pool_counts(d->node.pool).total) {
        return TD_ERR_TOO_LARGE;
    }
    if (dcn_preempt_someone_waits(d)) {
        return TD_ERR_BUSY; /* who was here before comes back first */
    }
    t->held_blocks = td_seq_hold(&t->seq, t->work.prompt_tokens, t->keys, t->full_blocks);
    note_held(d, t);
    first = first_choice_blocks(d, t, t->held_blocks, growth);
    others = (uint32_t)others_blocks(d, t, growth, &t->reserve_each);
    kvs_client_make_room(d->store, first + others);
    status = td_seq_reserve(&t->seq, first);
    if (status == TD_OK && others > 0) {
        status = td_pool_reserve(d->node.pool, others);
        t->reserve_choices = status == TD_OK ? others : 0;
    }
    return status;
}

static dcn_ticket_t *ticket_new(dcn_node_t *d, const td_msg_t *msg, td_msg_arena_t **arena)
{
    dcn_ticket_t *t = td_calloc(1, sizeof(*t));
    dcn_ticket_t **link = &d->tickets;

    if (t == NULL) {
        return NULL;
    }
    t->ticket = msg->u.work.ticket;
    t->attempt = msg->u.work.attempt;
    t->work = msg->u.work;
    (void)snprintf(t->router, sizeof(t->router), "%s", msg->sender_id);
    t->deadline_ns = td_now_ns() + t->work.budget_ms * TD_NS_PER_MS;
    td_span_begin(&t->span, &t->work.trace, "decode", td_now_ns());
    t->arena = *arena;
    *arena = NULL;
    while (*link != NULL) {
        link = &(*link)->next;
    }
    *link = t;
    d->ticket_count++;
    return t;
}

void dcn_ticket_reserve(dcn_node_t *d, const td_msg_t *msg, td_msg_arena_t **arena)
{
    const td_msg_work_t *w = &msg->u.work;
    dcn_ticket_t *t = NULL;
    td_status_t status = TD_OK;

    if (td_node_is_forgotten(&d->node, w->ticket, w->attempt)) {
        return; /* cancelled before it came, or an older attempt */
    }
    for (t = d->tickets; t != NULL; t = t->next) {
        if (t->ticket == w->ticket && t->state != DCN_DRAIN) {
            if (t->attempt >= w->attempt) {
                return; /* a duplicate */
            }
            dcn_ticket_end(d, t, TD_ERR_STALE);
            break;
        }
    }
    if (d->node.draining || d->ticket_count >= DCN_TICKETS_MAX) {
        send_reserved(d, msg->sender_id, w, TD_ERR_BUSY, 0);
        return;
    }
    t = ticket_new(d, msg, arena);
    if (t == NULL) {
        send_reserved(d, msg->sender_id, w, TD_ERR_BUSY, 0);
        return;
    }
    status = check_work(d, &t->work);
    if (status == TD_OK) {
        status = alloc_ticket(d, t);
    }
    if (status == TD_OK) {
        status = reserve_blocks(d, t);
    }
    send_reserved(d, t->router, &t->work, status, status == TD_OK ? t->held_blocks : 0);
    if (status != TD_OK) {
        ticket_free(d, t); /* never was a ticket: the answer is its end */
        return;
    }
    dcn_memo_ask(d, t);
    TD_LOG_DEBUG("decode reserved", "req=%s attempt=%u prompt_tokens=%u held_blocks=%u",
                 t->work.request_id, t->attempt, t->work.prompt_tokens, t->held_blocks);
    TD_FAULT_POINT("decode_reserve");
    if (t->work.self_prefill) {
        dcn_batch_admit_whole(d, t);
    }
}

void dcn_ticket_tick(dcn_node_t *d)
{
    uint64_t now = td_now_ns();
    dcn_ticket_t *next = NULL;

    for (dcn_ticket_t *t = d->tickets; t != NULL; t = next) {
        next = t->next;
        if (t->state != DCN_DRAIN && now >= t->deadline_ns) {
            dcn_ticket_end(d, t, TD_ERR_TIMEOUT);
        }
    }
}

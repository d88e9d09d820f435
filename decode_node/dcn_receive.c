/* The hand-off's receiving side: fetch layers as they are announced, hash each block once it is
 * whole, compare when the checksums come, acknowledge. */
#include "decode_node/dcn_node.h"

#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/base/td_fault.h"
#include "common/base/td_log.h"

/* The hand-off did not work out: both legs and the router hear of it, and the router tries again.
 */
static void fail(dcn_node_t *d, dcn_ticket_t *t, td_status_t status)
{
    td_msg_t msg = {.type = TD_MSG_KV_FAILED};

    td_metric_add(d->kv_failed, 1);
    TD_LOG_WARN("hand-off failed", "req=%s attempt=%u status=%s", t->work.request_id, t->attempt,
                td_status_name(status));
    msg.u.ticket = (td_msg_ticket_t){.ticket = t->ticket, .attempt = t->attempt, .status = status};
    if (td_bus_send(d->node.proc.bus, t->work.peer_id, &msg) != TD_OK) {
        TD_LOG_DEBUG("prefill not told", "req=%s", t->work.request_id);
    }
    if (td_bus_send(d->node.proc.bus, t->router, &msg) != TD_OK) {
        TD_LOG_WARN("router not told", "req=%s", t->work.request_id);
    }
    dcn_ticket_end(d, t, status);
}

static td_status_t submit_range(dcn_node_t *d, dcn_ticket_t *t, uint32_t layer_begin,
                                uint32_t layer_end, uint32_t first, uint32_t count,
                                const uint32_t *blocks, const uint64_t *epochs)
{
    size_t layer_bytes = td_kv_layer_bytes(td_node_layout(&d->node));
    td_node_fetch_t *job = td_node_fetch_new(&d->node, t->work.peer_incarnation, count);

    if (job == NULL) {
        return TD_ERR_BUSY;
    }
    job->ticket = t->ticket;
    job->attempt = t->attempt;
    job->first = first;
    job->layers = layer_end - layer_begin;
    for (uint32_t i = 0; i < count; i++) {
        job->pieces[i] =
            (td_fetch_piece_t){.epoch = epochs[i],
                               .block = blocks[i],
                               .offset = (uint32_t)(layer_begin * layer_bytes),
                               .bytes = (uint32_t)((layer_end - layer_begin) * layer_bytes),
                               .dest = td_pool_bytes(d->node.pool, t->seq.blocks[first + i]) +
                                       layer_begin * layer_bytes};
        t->asked[first + i] = layer_end;
    }
    TD_TRY(td_node_fetch_submit(job));
    t->fetches++;
    t->transfer_ns = t->transfer_ns == 0 ? td_now_ns() : t->transfer_ns;
    TD_FAULT_POINT("decode_fetch");
    return TD_OK;
}

/* Takes blocks from the reservation up to a logical index, for those that generation needs. */
static void grow_to(dcn_ticket_t *t, uint32_t blocks)
{
    while (t->seq.block_count < blocks) {
        if (dcn_ticket_needs(t, t->seq.block_count)) {
            (void)td_seq_grow_raw(&t->seq); /* fetched whole: every byte is written */
        } else {
            td_seq_skip(&t->seq);
        }
    }
}

/* KvReady lists the blocks that generation needs, from first_block on: where those from `block` on
 * begin in it. */
static uint32_t listed_before(const dcn_node_t *d, const dcn_ticket_t *t, uint32_t first_block,
                              uint32_t block)
{
    const uint32_t tokens = td_node_layout(&d->node)->block_tokens;
    return td_attention_blocks_needed(td_node_mask(&d->node), tokens, t->work.prompt_tokens,
                                      first_block * tokens,
                                      TD_MIN(block * tokens, t->work.prompt_tokens));
}

/* No byte of a block is fetched twice: it may be hashed already, and must stay what was hashed. Nor
 * is any of a block that is not needed. */
static bool is_news(const dcn_ticket_t *t, const td_msg_layers_ready_t *m)
{
    for (uint32_t i = 0; i < m->count; i++) {
        if (m->layer_begin < t->asked[m->first_block + i]) {
            return false;
        }
    }
    return true;
}

void dcn_receive_layers(dcn_node_t *d, const td_msg_t *msg)
{
    const td_msg_layers_ready_t *m = &msg->u.layers;
    dcn_ticket_t *t = dcn_ticket_find(d, m->ticket, m->attempt);
    td_status_t status = TD_OK;

    if (t == NULL || t->state != DCN_FETCHING || t->ready_arena != NULL ||
        msg->sender_incarnation != t->work.peer_incarnation) {
        return; /* after KvReady only what that one lists is fetched */
    }
    if (m->layer_end > td_node_layout(&d->node)->layers || m->first_block < t->held_blocks ||
        m->first_block > t->blocks || m->count > t->blocks - m->first_block || !is_news(t, m)) {
        fail(d, t, TD_ERR_PROTOCOL);
        return;
    }
    grow_to(t, m->first_block + m->count);
    status = submit_range(d, t, m->layer_begin, m->layer_end, m->first_block, m->count, m->blocks,
                          m->epochs);
    if (status != TD_OK) {
        fail(d, t, status);
    }
}

/* Asks for blocks of which not every layer was announced (a lost announcement). */
static td_status_t fetch_missing(dcn_node_t *d, dcn_ticket_t *t)
{
    uint32_t layers = td_node_layout(&d->node)->layers;
    uint32_t at = listed_before(d, t, t->ready.first_block, t->held_blocks);

    t->refetched = true;
    grow_to(t, t->blocks);
    for (uint32_t i = t->held_blocks; i < t->blocks;) {
        uint32_t end = i;
        while (end < t->blocks && t->layers[end] < layers) {
            t->layers[end++] = 0;
        }
        if (end > i) { /* one fetch for each run: there may be more blocks than fetches under way */
            TD_TRY(submit_range(d, t, 0, layers, i, end - i, &t->ready.blocks[at],
                                &t->ready.epochs[at]));
            at += end - i;
        } else {
            at += dcn_ticket_needs(t, i) ? 1 : 0;
        }
        i = TD_MAX(end, i + 1);
    }
    return TD_OK;
}

static bool all_layers_here(const dcn_node_t *d, const dcn_ticket_t *t)
{
    for (uint32_t i = t->held_blocks; i < t->blocks; i++) {
        if (t->layers[i] < td_node_layout(&d->node)->layers) {
            return false;
        }
    }
    return true;
}

/* Compares every fetched block's hash, found over our own copy, with its checksum; right ones are
 * kept even when another one is wrong, so that a retry finds them. */
static td_status_t compare(dcn_node_t *d, dcn_ticket_t *t)
{
    td_status_t status = TD_OK;
    uint32_t next = listed_before(d, t, t->ready.first_block, t->held_blocks);

    TD_FAULT_POINT("decode_verify");
    for (uint32_t i = t->held_blocks; i < t->blocks; i++) {
        if (!dcn_ticket_needs(t, i)) {
            continue;
        }
        uint32_t at = next++;
        uint64_t sum = td_block_checksum(t->hashes[i], &t->keys[i], t->ready.epochs[at]);
        if (!td_block_key_equal(&t->ready.keys[at], &t->keys[i])) {
            return TD_ERR_PROTOCOL; /* other tokens, model, secret or salt than ours */
        }
        if (sum != t->ready.checksums[at]) {
            td_metric_add(d->node.checksum_failures, 1);
            status = TD_ERR_CORRUPT;
            continue;
        }
        if (i <
            t->full_blocks) { /* a concurrent request may have brought it too: ours is private */
            (void)!td_seq_index(&t->seq, i, i > 0 ? &t->keys[i - 1] : NULL, &t->keys[i],
                                t->hashes[i]);
        }
    }
    return status;
}

/* A request that ends with its first tokens needs no KV at all. */
static bool needs_kv(const dcn_node_t *d, const dcn_ticket_t *t)
{
    for (uint32_t i = 0; i < t->ready.choice_count; i++) {
        bool stops = !t->work.ignore_eos && t->work.min_tokens <= 1 &&
                     td_tokenizer_is_stop(d->node.tokenizer, t->ready.first_tokens[i]);
        if (!stops && t->work.max_tokens > 1) {
            return true;
        }
    }
    return false;
}

static void acknowledge(dcn_node_t *d, dcn_ticket_t *t)
{
    td_msg_t msg = {.type = TD_MSG_KV_ACK};
    td_span_t span;

    if (t->transfer_ns != 0) {
        td_span_begin(&span, &t->span.context, "transfer", t->transfer_ns);
        td_span_number(&span, "tandem.blocks", t->blocks - t->held_blocks);
        td_span_text(&span, "tandem.prefill", t->work.peer_id);
        td_tracer_end(d->node.proc.tracer, &span, td_now_ns());
    }
    msg.u.ticket = (td_msg_ticket_t){.ticket = t->ticket, .attempt = t->attempt};
    TD_FAULT_POINT("decode_before_ack");
    if (td_bus_send(d->node.proc.bus, t->work.peer_id, &msg) != TD_OK) {
        TD_LOG_DEBUG("ack not sent", "req=%s", t->work.request_id); /* its pins end by time */
    }
    TD_FAULT_POINT("decode_ack");
}

/* Goes on as far as what has come allows. */
static void advance(dcn_node_t *d, dcn_ticket_t *t)
{
    td_status_t status = TD_OK;

    if (t->state != DCN_FETCHING || t->ready_arena == NULL) {
        return;
    }
    if (t->fetches > 0) {
        return; /* also when KV is not needed: choices take the sequence, so nothing may write into
                   it. What was fetched whole has been hashed when none is left. */
    }
    if (!needs_kv(d, t)) {
        acknowledge(d, t);
        dcn_batch_admit(d, t);
        return;
    }
    if (!all_layers_here(d, t)) {
        status = t->refetched ? TD_ERR_PROTOCOL : fetch_missing(d, t);
        if (status != TD_OK) {
            fail(d, t, status);
        }
        return;
    }
    status = compare(d, t);
    if (status != TD_OK) {
        fail(d, t, status);
        return;
    }
    acknowledge(d, t);
    dcn_batch_admit(d, t);
}

/* How much of the transfer was hidden behind computing. */
static void count_early(dcn_node_t *d, const dcn_ticket_t *t)
{
    const td_kv_layout_t *layout = td_node_layout(&d->node);
    uint64_t here = 0; /* layers of blocks */
    uint64_t wanted = 0;

    for (uint32_t i = t->held_blocks; i < t->blocks; i++) {
        if (dcn_ticket_needs(t, i)) {
            here += t->layers[i];
            wanted += layout->layers;
        }
    }
    td_metric_add(d->bytes_early, here * td_kv_layer_bytes(layout));
    td_metric_add(d->bytes_late, (wanted - here) * td_kv_layer_bytes(layout));
}

void dcn_receive_ready(dcn_node_t *d, const td_msg_t *msg, td_msg_arena_t **arena)
{
    const td_msg_kv_ready_t *m = &msg->u.kv_ready;
    dcn_ticket_t *t = dcn_ticket_find(d, m->ticket, m->attempt);

    if (t == NULL || t->state != DCN_FETCHING || t->ready_arena != NULL ||
        msg->sender_incarnation != t->work.peer_incarnation) {
        return;
    }
    if (m->first_block > t->held_blocks ||
        m->count != listed_before(d, t, m->first_block, t->blocks) ||
        m->choice_count != t->work.n) {
        fail(d, t, TD_ERR_PROTOCOL);
        return;
    }
    for (uint32_t i = 0; i < m->choice_count; i++) {
        if (m->first_tokens[i] >= d->node.info->vocab_size) {
            fail(d, t, TD_ERR_PROTOCOL);
            return;
        }
    }
    t->ready = *m;
    t->ready_arena = *arena;
    *arena = NULL;
    count_early(d, t);
    advance(d, t);
}

/* Counts the layers that a fetch has brought. Returns how many of its blocks are whole now; the
 * other pieces are emptied, so that the verifier passes over them. */
static uint32_t count_layers(const dcn_node_t *d, dcn_ticket_t *t, td_node_fetch_t *job)
{
    uint32_t whole = 0;

    for (uint32_t i = 0; i < job->fetch.piece_count; i++) {
        t->layers[job->first + i] += job->layers;
        if (t->layers[job->first + i] == td_node_layout(&d->node)->layers) {
            whole++;
        } else {
            job->pieces[i].bytes = 0;
        }
    }
    return whole;
}

static void take_hashes(dcn_ticket_t *t, const td_node_fetch_t *job)
{
    for (uint32_t i = 0; i < job->fetch.piece_count; i++) {
        if (job->pieces[i].bytes > 0) {
            t->hashes[job->first + i] = job->hashes[i];
        }
    }
}

void dcn_receive_fetched(dcn_node_t *d, td_node_fetch_t *job)
{
    dcn_ticket_t *t = dcn_ticket_find(d, job->ticket, job->attempt);
    bool wanted = false;

    TD_ASSERT(t != NULL); /* a ticket stays until its fetches have come back */
    t->fetches--;
    if (t->state == DCN_RETURNING) {
        dcn_return_fetched(d, t, job);
        return;
    }
    if (t->state != DCN_FETCHING) {
        td_node_fetch_free(job);
        dcn_ticket_settle(d, t);
        return;
    }
    wanted = t->ready_arena == NULL || needs_kv(d, t);
    if (wanted && job->fetch.status != TD_OK) {
        td_status_t status = job->fetch.status;
        td_node_fetch_free(job);
        fail(d, t, status);
        return;
    }
    if (wanted && !job->hashed && count_layers(d, t, job) > 0) {
        t->fetches++;
        td_node_fetch_verify(job);
        return;
    }
    if (job->hashed) {
        take_hashes(t, job);
    }
    td_node_fetch_free(job);
    advance(d, t);
}

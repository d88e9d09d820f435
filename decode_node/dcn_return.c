/* A request that gave way comes back: what is here of its blocks, then what the store holds, and
 * the rest is computed again, some rows a step, until only the newest token is left. */
#include "decode_node/dcn_node.h"

#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/base/td_fault.h"
#include "common/base/td_log.h"

#define RETURN_GROWTH 16u /* tokens that there must be room for beyond what it had */

uint32_t dcn_choice_token(const dcn_choice_t *c, uint32_t position)
{
    const td_msg_work_t *w = &c->ticket->work;
    return position < w->prompt_tokens ? w->prompt[position]
                                       : c->tokens[position - w->prompt_tokens];
}

void dcn_choice_block_key(const dcn_choice_t *c, const td_block_root_t *root, uint32_t block_tokens,
                          uint32_t block, const td_block_key_t *parent, td_block_key_t *out)
{
    uint32_t tokens[1024]; /* the most of --block-tokens */

    for (uint32_t i = 0; i < block_tokens; i++) {
        tokens[i] = dcn_choice_token(c, block * block_tokens + i);
    }
    td_block_key_next(root, parent, tokens, block_tokens, out);
}

/* Positions whose KV had been written. */
static uint32_t written_tokens(const dcn_ticket_t *t)
{
    return t->work.prompt_tokens + t->choices[0].token_count - 1;
}

static td_status_t make_keys(const dcn_node_t *d, dcn_ticket_t *t)
{
    const uint32_t block_tokens = td_node_layout(&d->node)->block_tokens;
    const uint32_t tokens = written_tokens(t);
    uint32_t *ids = td_calloc(tokens, sizeof(*ids));

    t->return_blocks = tokens / block_tokens;
    t->return_keys = td_calloc(t->return_blocks, sizeof(*t->return_keys));
    t->return_sums = td_calloc(t->return_blocks, sizeof(*t->return_sums));
    t->return_right = td_calloc(t->return_blocks, sizeof(*t->return_right));
    if (ids == NULL || t->return_keys == NULL || t->return_sums == NULL ||
        t->return_right == NULL) {
        td_free(ids);
        return TD_ERR_NO_MEMORY;
    }
    for (uint32_t i = 0; i < tokens; i++) {
        ids[i] = dcn_choice_token(&t->choices[0], i);
    }
    td_block_keys(&t->root, ids, tokens, block_tokens, t->return_keys);
    td_free(ids);
    return TD_OK;
}

void dcn_return_fini(dcn_ticket_t *t)
{
    td_free(t->return_keys);
    td_free(t->return_sums);
    td_free(t->return_right);
    t->return_keys = NULL;
    t->return_sums = NULL;
    t->return_right = NULL;
    t->return_serial = 0;
}

/* The ticket's sequence holds a prefix of what it had. */
static void run_again(dcn_node_t *d, dcn_ticket_t *t)
{
    dcn_choice_t *c = &t->choices[0];

    c->seq = t->seq;
    memset(&t->seq, 0, sizeof(t->seq));
    c->published = c->seq.block_count;
    if (c->published > 0) {
        c->last_key = t->return_keys[c->published - 1];
    }
    c->kv_tokens = c->published * td_node_layout(&d->node)->block_tokens;
    td_seq_forget(&c->seq, c->kv_tokens); /* what only a shorter prefix needed */
    td_seq_trim(&c->seq, dcn_ticket_blocks_max(d, t));
    c->has_room = true; /* of its own promise */
    t->state = DCN_RUNNING;
    td_metric_add(d->returned_computed, written_tokens(t) - c->kv_tokens);
    TD_LOG_INFO("resumed", "req=%s tokens=%u kept=%u", t->work.request_id, written_tokens(t) + 1,
                c->kv_tokens);
    dcn_return_fini(t);
}

void dcn_return_fetched(dcn_node_t *d, dcn_ticket_t *t, td_node_fetch_t *job)
{
    if (job->fetch.status == TD_OK && !job->hashed) {
        t->fetches++;
        td_node_fetch_verify(job);
        return;
    }
    if (job->hashed) {
        td_node_fetch_compare(job, t->return_keys, t->return_sums, t->return_right,
                              t->work.request_id);
    }
    td_node_fetch_free(job);
    if (t->fetches == 0) {
        const uint32_t kept = td_node_fetch_keep(&d->node, &t->seq, t->return_held, t->return_keys,
                                                 t->return_sums, t->return_right);
        td_metric_add(d->returned_fetched, (uint64_t)kept * td_node_layout(&d->node)->block_tokens);
        run_again(d, t);
    }
}

static void on_found(void *ctx, uint64_t tag, td_status_t status,
                     const td_msg_lookup_result_t *found)
{
    dcn_node_t *d = ctx;
    dcn_ticket_t *t = d->tickets;
    uint32_t jobs = 0;
    (void)status; /* a miss, a late answer and a dead master all mean: compute */

    while (t != NULL && (t->state != DCN_RETURNING || t->return_serial != tag)) {
        t = t->next;
    }
    if (t == NULL) {
        return; /* it has ended */
    }
    t->return_serial = 0;
    if (found != NULL &&
        td_node_fetch_found(&d->node, &t->seq, t->ticket, t->attempt,
                            td_now_ns() + TD_TRANSFER_DEADLINE_MS * TD_NS_PER_MS, found,
                            t->return_sums + t->seq.block_count, &jobs) > 0) {
        t->fetches += jobs;
        TD_FAULT_POINT("decode_return");
        return;
    }
    run_again(d, t);
}

/* Blocks of a sequence that something may still write into when it ends. */
static td_status_t make_quarantine(dcn_ticket_t *t, uint32_t blocks)
{
    td_free(t->quarantined);
    t->quarantined = td_calloc(blocks, sizeof(*t->quarantined));
    return t->quarantined != NULL ? TD_OK : TD_ERR_NO_MEMORY;
}

static td_status_t take_room(dcn_node_t *d, dcn_ticket_t *t)
{
    const td_kv_layout_t *layout = td_node_layout(&d->node);
    const td_msg_work_t *w = &t->work;
    const uint32_t left = w->max_tokens - t->choices[0].token_count + 1;
    const uint32_t blocks =
        td_kv_blocks_for(layout, written_tokens(t) + TD_MIN(left, RETURN_GROWTH));
    const uint32_t most = dcn_ticket_blocks_max(d, t);
    uint32_t room = 0;

    TD_TRY(td_seq_init(&t->seq, d->node.pool, layout, td_node_mask(&d->node),
                       w->prompt_tokens + w->max_tokens));
    TD_TRY(make_quarantine(t, t->seq.block_cap));
    t->return_held = td_seq_match(&t->seq, t->return_keys, t->return_blocks);
    /* Under a mask what it holds makes room as it goes. */
    room = TD_MIN(blocks - t->return_held, most - TD_MIN(most, t->seq.held));
    kvs_client_make_room(d->store, room);
    return td_seq_reserve(&t->seq, room);
}

td_status_t dcn_return_begin(dcn_node_t *d, dcn_ticket_t *t)
{
    td_status_t status = make_keys(d, t);

    if (status == TD_OK) {
        status = take_room(d, t);
    }
    if (status != TD_OK) {
        td_seq_fini(&t->seq);
        dcn_return_fini(t);
        return status;
    }
    td_metric_add(d->returned_cached,
                  (uint64_t)t->return_held * td_node_layout(&d->node)->block_tokens);
    if (t->return_held < t->return_blocks &&
        kvs_client_lookup(d->store, t->return_keys + t->return_held,
                          t->return_blocks - t->return_held, on_found, d,
                          d->returns + 1) == TD_OK) {
        t->return_serial = ++d->returns;
        t->state = DCN_RETURNING;
        return TD_OK;
    }
    run_again(d, t);
    return TD_OK;
}

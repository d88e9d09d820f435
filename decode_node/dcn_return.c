/* A request that gave way comes back: what is here of its blocks, then what the store holds, and
 * the rest is computed again, some rows a step, until of each choice only the newest token is left.
 *
 * Choices that still generate take turns. They share the prompt's full blocks, and the request has
 * room for those only once: where not every choice finds them here, the first one brings or
 * computes just them, and the others take them over, as at admission. */
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
static uint32_t written_tokens(const dcn_choice_t *c)
{
    return c->ticket->work.prompt_tokens + c->token_count - 1;
}

/* The first choice from one on that still generates, or n. */
static uint32_t next_choice(const dcn_ticket_t *t, uint32_t from)
{
    while (from < t->work.n && t->choices[from].finish != TD_FINISH_NONE) {
        from++;
    }
    return from;
}

static td_status_t make_keys(const dcn_node_t *d, dcn_choice_t *c)
{
    const uint32_t block_tokens = td_node_layout(&d->node)->block_tokens;
    const uint32_t tokens = written_tokens(c);
    uint32_t *ids = td_calloc(tokens, sizeof(*ids));

    c->return_blocks = tokens / block_tokens;
    c->return_keys = td_calloc(c->return_blocks, sizeof(*c->return_keys));
    if (ids == NULL || c->return_keys == NULL) {
        td_free(ids);
        return TD_ERR_NO_MEMORY;
    }
    for (uint32_t i = 0; i < tokens; i++) {
        ids[i] = dcn_choice_token(c, i);
    }
    td_block_keys(&c->ticket->root, ids, tokens, block_tokens, c->return_keys);
    td_free(ids);
    return TD_OK;
}

/* What every attempt to come back needs; made for the first. */
static td_status_t prepare(const dcn_node_t *d, dcn_ticket_t *t)
{
    const uint32_t tokens = t->work.prompt_tokens + t->work.max_tokens;
    const uint32_t blocks = td_kv_blocks_for(td_node_layout(&d->node), tokens);

    if (t->return_sums != NULL) {
        return TD_OK;
    }
    for (uint32_t i = next_choice(t, 0); i < t->work.n; i = next_choice(t, i + 1)) {
        TD_TRY(make_keys(d, &t->choices[i]));
    }
    /* Blocks of a sequence that something may still write into when it ends. */
    td_free(t->quarantined);
    t->quarantined = td_calloc(blocks, sizeof(*t->quarantined));
    t->return_right = td_calloc(blocks, sizeof(*t->return_right));
    if (t->quarantined == NULL || t->return_right == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    t->return_sums = td_calloc(blocks, sizeof(*t->return_sums));
    return t->return_sums != NULL ? TD_OK : TD_ERR_NO_MEMORY;
}

void dcn_return_fini(dcn_ticket_t *t)
{
    for (uint32_t i = 0; t->choices != NULL && i < t->work.n; i++) {
        td_free(t->choices[i].return_keys);
        t->choices[i].return_keys = NULL;
    }
    td_free(t->return_sums);
    td_free(t->return_right);
    t->return_sums = NULL;
    t->return_right = NULL;
    t->return_serial = 0;
    t->shared_tokens = 0;
}

/* --- where it comes from ---------------------------------------------------------------------- */

static bool is_prompt(const dcn_ticket_t *t)
{
    return t->work.self_prefill && !t->began && t->work.generated_count == 0;
}

static void count_cached(dcn_node_t *d, dcn_ticket_t *t, uint64_t tokens)
{
    td_metric_add(is_prompt(t) ? d->prompt_cached : d->returned_cached, tokens);
    t->ready.usage.cached_local_tokens += is_prompt(t) ? (uint32_t)tokens : 0;
}

static void count_fetched(dcn_node_t *d, dcn_ticket_t *t, uint64_t tokens)
{
    td_metric_add(is_prompt(t) ? d->prompt_fetched : d->returned_fetched, tokens);
    t->ready.usage.cached_store_tokens += is_prompt(t) ? (uint32_t)tokens : 0;
}

static void count_computed(dcn_node_t *d, dcn_ticket_t *t, uint64_t tokens)
{
    td_metric_add(is_prompt(t) ? d->prompt_computed : d->returned_computed, tokens);
}

/* --- turns ------------------------------------------------------------------------------------ */

static void on_found(void *ctx, uint64_t tag, td_status_t status,
                     const td_msg_lookup_result_t *found);

/* The choice whose turn it is takes what is here of its first `blocks` blocks, and the store is
 * asked for the others. False: there is nothing to wait for. */
static bool ask(dcn_node_t *d, dcn_ticket_t *t, uint32_t blocks)
{
    dcn_choice_t *c = &t->choices[t->return_choice];
    uint32_t held = 0;

    t->seq = c->seq;
    memset(&c->seq, 0, sizeof(c->seq));
    held = td_seq_extend(&t->seq, c->return_keys, blocks);
    t->return_held = held;
    memset(t->return_right, 0, blocks * sizeof(*t->return_right)); /* those of earlier turns */
    count_cached(d, t,
                 (uint64_t)(held - t->counted_blocks) * td_node_layout(&d->node)->block_tokens);
    t->counted_blocks = t->shared_blocks; /* no other choice brings these */
    if (held >= blocks || t->return_alone ||
        kvs_client_lookup(d->store, c->return_keys + held, blocks - held, on_found, d,
                          d->returns + 1) != TD_OK) {
        return false;
    }
    t->return_serial = ++d->returns;
    t->state = DCN_RETURNING;
    return true;
}

/* Its sequence holds a prefix of what it had: it goes on from there. */
static void settle(dcn_node_t *d, dcn_ticket_t *t)
{
    dcn_choice_t *c = &t->choices[t->return_choice];

    c->seq = t->seq;
    memset(&t->seq, 0, sizeof(t->seq));
    c->published = c->seq.block_count;
    if (c->published > 0) {
        c->last_key = c->return_keys[c->published - 1];
    }
    c->kv_tokens = c->published * td_node_layout(&d->node)->block_tokens;
    td_seq_forget(&c->seq, c->kv_tokens); /* what only a shorter prefix needed */
    td_seq_trim(&c->seq, dcn_ticket_blocks_max(d, t));
    c->has_room = true; /* of its own promise */
}

static void run_again(dcn_node_t *d, dcn_ticket_t *t)
{
    uint32_t tokens = 0;
    uint32_t kept = 0;

    for (uint32_t i = next_choice(t, 0); i < t->work.n; i = next_choice(t, i + 1)) {
        tokens += written_tokens(&t->choices[i]);
        kept += t->choices[i].kv_tokens;
    }
    t->state = DCN_RUNNING;
    count_computed(d, t, tokens - kept);
    if (!is_prompt(t)) {
        TD_LOG_INFO("resumed", "req=%s choices=%u tokens=%u kept=%u", t->work.request_id, t->live,
                    tokens + t->live, kept);
    }
    dcn_return_fini(t);
}

static void bring_choices(dcn_node_t *d, dcn_ticket_t *t)
{
    for (; t->return_choice < t->work.n; t->return_choice = next_choice(t, t->return_choice + 1)) {
        if (ask(d, t, t->choices[t->return_choice].return_blocks)) {
            return;
        }
        settle(d, t);
    }
    run_again(d, t);
}

void dcn_return_share(dcn_node_t *d, dcn_ticket_t *t)
{
    const dcn_choice_t *from = &t->choices[t->return_choice];

    if (t->shared_tokens == 0 || from->kv_tokens < t->shared_tokens) {
        return;
    }
    for (uint32_t i = next_choice(t, 0); i < t->work.n; i = next_choice(t, i + 1)) {
        if (i != t->return_choice) {
            td_seq_fork(&t->choices[i].seq, &from->seq);
        }
    }
    t->shared_tokens = 0;
    bring_choices(d, t); /* from the first on: it may have more behind what is shared */
}

/* All that could be brought in this turn is here. */
static void end_turn(dcn_node_t *d, dcn_ticket_t *t)
{
    const dcn_choice_t *c = &t->choices[t->return_choice];

    settle(d, t);
    if (t->shared_tokens == 0) {
        t->return_choice = next_choice(t, t->return_choice + 1);
        bring_choices(d, t);
    } else if (c->kv_tokens < t->shared_tokens) {
        count_computed(d, t, t->shared_tokens - c->kv_tokens);
        if (!is_prompt(t)) {
            TD_LOG_INFO("prompt computed again", "req=%s choices=%u tokens=%u kept=%u",
                        t->work.request_id, t->live, t->shared_tokens, c->kv_tokens);
        }
        t->state = DCN_RUNNING; /* the others wait for it */
    } else {
        dcn_return_share(d, t);
    }
}

void dcn_return_fetched(dcn_node_t *d, dcn_ticket_t *t, td_node_fetch_t *job)
{
    const td_block_key_t *keys = t->choices[t->return_choice].return_keys;

    if (job->fetch.status == TD_OK && !job->hashed) {
        t->fetches++;
        td_node_fetch_verify(job);
        return;
    }
    t->return_alone = t->return_alone || job->fetch.status != TD_OK;
    if (job->hashed) {
        td_node_fetch_compare(job, keys, t->return_sums, t->return_right, t->work.request_id);
    }
    td_node_fetch_free(job);
    if (t->fetches == 0) {
        const uint32_t kept = td_node_fetch_keep(&d->node, &t->seq, t->return_held, keys,
                                                 t->return_sums, t->return_right);
        count_fetched(d, t, (uint64_t)kept * td_node_layout(&d->node)->block_tokens);
        end_turn(d, t);
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
    end_turn(d, t);
}

/* --- room ------------------------------------------------------------------------------------- */

/* Blocks for what a choice had, from one on, and a little more. Under a mask what it holds makes
 * room as it goes. */
static uint32_t room_behind(const dcn_node_t *d, const dcn_choice_t *c, uint32_t block)
{
    const uint32_t left = c->ticket->work.max_tokens - c->token_count + 1;
    const uint32_t blocks =
        td_kv_blocks_for(td_node_layout(&d->node), written_tokens(c) + TD_MIN(left, RETURN_GROWTH));
    const uint32_t most = dcn_ticket_blocks_max(d, c->ticket);

    return TD_MIN(blocks - block, most - TD_MIN(most, c->seq.held));
}

static td_status_t reserve(dcn_node_t *d, td_seq_t *seq, uint32_t room)
{
    kvs_client_make_room(d->store, room);
    return td_seq_reserve(seq, room);
}

/* The prompt's full blocks. Who has no token yet computes the prompt's last position by itself. */
static uint32_t shared_blocks(const dcn_node_t *d, const dcn_ticket_t *t)
{
    uint32_t blocks = t->full_blocks;

    for (uint32_t i = next_choice(t, 0); i < t->work.n; i = next_choice(t, i + 1)) {
        if (t->choices[i].token_count == 0) {
            blocks = (t->work.prompt_tokens - 1) / td_node_layout(&d->node)->block_tokens;
        }
    }
    return blocks;
}

/* Does each choice find all here that it shares with others? Then it holds what it found. */
static bool find_choices(dcn_ticket_t *t, uint32_t blocks)
{
    bool all = true;

    for (uint32_t i = next_choice(t, 0); i < t->work.n; i = next_choice(t, i + 1)) {
        dcn_choice_t *c = &t->choices[i];
        all = td_seq_match(&c->seq, c->return_keys, c->return_blocks) >= blocks && all;
    }
    return all;
}

/* The first choice takes what is here of the prompt's full blocks, and room for the others. */
static td_status_t take_shared(dcn_node_t *d, dcn_ticket_t *t)
{
    dcn_choice_t *c = &t->choices[next_choice(t, 0)];
    const uint32_t tokens = t->shared_blocks * td_node_layout(&d->node)->block_tokens;
    const uint32_t most = td_attention_blocks_max(
        td_node_mask(&d->node), td_node_layout(&d->node)->block_tokens, tokens, 1);
    uint32_t held = 0;

    for (uint32_t i = 0; i < t->work.n; i++) {
        td_seq_release(&t->choices[i].seq);
    }
    held = td_seq_match(&c->seq, c->return_keys, t->shared_blocks);
    t->shared_tokens = tokens;
    return reserve(d, &c->seq, TD_MIN(t->shared_blocks - held, most - TD_MIN(most, c->seq.held)));
}

static td_status_t take_room(dcn_node_t *d, dcn_ticket_t *t)
{
    const uint32_t tokens = t->work.prompt_tokens + t->work.max_tokens;

    for (uint32_t i = next_choice(t, 0); i < t->work.n; i = next_choice(t, i + 1)) {
        TD_TRY(td_seq_init(&t->choices[i].seq, d->node.pool, td_node_layout(&d->node),
                           td_node_mask(&d->node), tokens));
    }
    t->shared_blocks = shared_blocks(d, t);
    if (!find_choices(t, t->live > 1 ? t->shared_blocks : 0)) {
        TD_TRY(take_shared(d, t));
    }
    for (uint32_t i = next_choice(t, 0); i < t->work.n; i = next_choice(t, i + 1)) {
        dcn_choice_t *c = &t->choices[i];
        const uint32_t from = t->shared_tokens > 0 ? t->shared_blocks : c->seq.block_count;
        TD_TRY(reserve(d, &c->seq, room_behind(d, c, from)));
    }
    return TD_OK;
}

td_status_t dcn_return_begin(dcn_node_t *d, dcn_ticket_t *t)
{
    td_status_t status = prepare(d, t);

    t->shared_tokens = 0;
    if (is_prompt(t)) {
        t->ready.usage = (td_msg_usage_t){0}; /* of an attempt that gave way */
    }
    if (status != TD_OK) {
        dcn_return_fini(t);
        return status;
    }
    status = take_room(d, t);
    if (status != TD_OK) {
        for (uint32_t i = t->work.n; i > 0; i--) {
            td_seq_fini(&t->choices[i - 1].seq);
        }
        return status;
    }
    for (uint32_t i = 0; i < t->work.n; i++) {
        t->choices[i].has_room = false;
    }
    t->return_choice = next_choice(t, 0);
    t->counted_blocks = 0;
    t->return_alone = false;
    if (t->shared_tokens == 0) {
        bring_choices(d, t);
    } else if (!ask(d, t, t->shared_blocks)) {
        end_turn(d, t);
    }
    return TD_OK;
}

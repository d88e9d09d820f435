#include "prefill_node/pfn_node.h"

#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/base/td_fault.h"
#include "common/base/td_log.h"

/* --- what pays ----------------------------------------------------------------------------------
 */

void pfn_rate_add(pfn_rate_t *rate, double amount, uint64_t ns)
{
    rate->amount = rate->amount * 0.75 + amount;
    rate->ns = rate->ns * 0.75 + (double)ns;
    rate->at_ns = td_now_ns();
}

/* Time for so many blocks, or 0: not known. A rate of nothing at all: as long as it gets. */
static double time_for(const pfn_rate_t *rate, uint32_t blocks)
{
    if (rate->at_ns == 0 || td_now_ns() - rate->at_ns > PFN_RATE_AGE_MS * TD_NS_PER_MS) {
        return 0;
    }
    return rate->ns * blocks / TD_MAX(rate->amount, 1e-9);
}

/* Are so many blocks more here sooner from the store (of which a mask needs some only) than by
 * computing them? By what both took lately;
 * where that is not known, the store is tried. */
static bool fetching_pays(const pfn_node_t *p, const pfn_request_t *r, uint32_t blocks)
{
    const uint32_t tokens = td_node_layout(&p->node)->block_tokens;
    const uint32_t begin = r->seq.block_count * tokens;
    const uint32_t end = begin + blocks * tokens;
    const uint32_t fetched =
        td_attention_blocks_needed(td_node_mask(&p->node), tokens, end, begin, end);
    double fetch_ns = time_for(&p->fetch_rate, fetched);
    double compute_ns = time_for(&p->compute_rate, blocks);

    return fetch_ns <= 0 || compute_ns <= 0 || fetch_ns <= compute_ns;
}

/* A fetch that takes longer than computing would have taken is given up: the store at its worst
 * makes the first token twice as late, once. */
static uint64_t fetch_deadline(const pfn_node_t *p, uint32_t blocks)
{
    double compute_ns = time_for(&p->compute_rate, blocks);
    uint64_t limit_ns = TD_TRANSFER_DEADLINE_MS * TD_NS_PER_MS;

    if (compute_ns > 0 && compute_ns < (double)limit_ns) {
        limit_ns = TD_MAX((uint64_t)compute_ns, PFN_FETCH_MS_MIN * TD_NS_PER_MS);
    }
    return td_now_ns() + limit_ns;
}

/* --- own cache, store, computing ----------------------------------------------------------------
 */

/* The rest of the prompt is computed; what is cached goes to the decode node at once. */
static void begin_compute(pfn_node_t *p, pfn_request_t *r)
{
    const td_kv_layout_t *layout = td_node_layout(&p->node);

    td_metric_add(p->tokens_local, (uint64_t)r->local_blocks * layout->block_tokens);
    td_metric_add(p->tokens_store, (uint64_t)r->store_blocks * layout->block_tokens);
    r->done_tokens = (r->local_blocks + r->store_blocks) * layout->block_tokens;
    td_seq_forget(&r->seq, r->done_tokens); /* what only a shorter prefix needed */
    td_seq_trim(&r->seq, pfn_request_blocks_max(p, &r->work));
    while (r->seq.block_count < r->blocks && r->seq.reserved > 0) {
        (void)td_seq_grow(&r->seq); /* zeroed: the last one may be sent partly filled */
    }
    r->announced_blocks = r->local_blocks + r->store_blocks;
    r->published_blocks = r->announced_blocks;
    pfn_handoff_layers(p, r, 0, layout->layers, 0, r->announced_blocks);
    r->state = PFN_COMPUTE;
}

void pfn_prefix_fetched(pfn_node_t *p, td_node_fetch_t *job)
{
    pfn_request_t *r = pfn_request_find(p, job->ticket, job->attempt);

    TD_ASSERT(r != NULL); /* a request stays until its fetches have come back */
    if (r->state == PFN_WAIT_FETCH && job->fetch.status == TD_OK && !job->hashed) {
        td_node_fetch_verify(job); /* still under way: the verifier reads the blocks */
        return;
    }
    r->fetches--;
    r->fetched_blocks += job->hashed ? job->fetch.piece_count : 0;
    r->fetch_counts |= job->hashed || job->fetch.status == TD_ERR_TIMEOUT;
    if (r->state == PFN_WAIT_FETCH && r->fetches == 0 &&
        r->fetch_counts) { /* jobs of a prefix run side by side */
        pfn_rate_add(&p->fetch_rate, r->fetched_blocks, td_now_ns() - r->fetch_ns);
    }
    if (r->state == PFN_WAIT_FETCH && r->fetches == 0) {
        td_span_t span;
        td_span_begin(&span, &r->span.context, "store fetch", r->fetch_ns);
        td_span_number(&span, "tandem.blocks", r->fetched_blocks);
        td_tracer_end(p->node.proc.tracer, &span, td_now_ns());
    }
    if (r->state == PFN_WAIT_FETCH && job->hashed) {
        td_node_fetch_compare(job, r->keys, r->hashes, r->verified, r->work.request_id);
    } else if (job->fetch.status != TD_OK) {
        TD_LOG_INFO("store fetch failed", "req=%s status=%s", r->work.request_id,
                    td_status_name(job->fetch.status));
    }
    td_node_fetch_free(job);
    if (r->state == PFN_WAIT_FETCH && r->fetches == 0) {
        /* A recomputed block can never differ from a cached one (I1), so a shorter prefix costs
         * time, nothing else. */
        r->store_blocks =
            td_node_fetch_keep(&p->node, &r->seq, r->local_blocks, r->keys, r->hashes, r->verified);
        begin_compute(p, r);
    } else {
        pfn_request_settle(p, r);
    }
}

static void lookup_done(void *ctx, uint64_t tag, td_status_t status,
                        const td_msg_lookup_result_t *found)
{
    pfn_node_t *p = ctx;
    pfn_request_t *r = p->requests;

    /* A miss, a late answer and a dead master all mean: compute. */
    td_metric_add(status == TD_OK            ? p->lookups_hit
                  : status == TD_ERR_TIMEOUT ? p->lookups_timeout
                                             : p->lookups_miss,
                  1);
    while (r != NULL && r->serial != tag) {
        r = r->next;
    }
    if (r == NULL || r->state != PFN_WAIT_LOOKUP) {
        return;
    }
    if (found != NULL && !fetching_pays(p, r, found->count)) {
        td_metric_add(p->fetches_skipped, 1);
        found = NULL;
    }
    if (found != NULL && td_node_fetch_found(&p->node, &r->seq, r->ticket, r->attempt,
                                             fetch_deadline(p, found->count), found,
                                             r->hashes + r->local_blocks, &r->fetches) > 0) {
        r->state = PFN_WAIT_FETCH;
        r->fetch_ns = td_now_ns();
        TD_FAULT_POINT("prefill_fetch");
        return;
    }
    begin_compute(p, r);
}

/* Asks the store for the rest of the prefix. False: the request goes on without it. */
static bool ask_store(pfn_node_t *p, pfn_request_t *r)
{
    uint32_t from = r->local_blocks;
    td_status_t status = TD_OK;

    if (from >= r->match_max) {
        return false;
    }
    status =
        kvs_client_lookup(p->store, r->keys + from, r->match_max - from, lookup_done, p, r->serial);
    if (status == TD_ERR_TIMEOUT) {
        td_metric_add(p->lookups_skipped, 1);
    }
    return status == TD_OK;
}

void pfn_prefix_begin(pfn_node_t *p, pfn_request_t *r)
{
    td_pool_t *pool = p->node.pool;
    const uint32_t matched = td_seq_match(&r->seq, r->keys, r->match_max);
    const uint32_t most = pfn_request_blocks_max(p, &r->work);
    /* Under a mask what it holds makes room as it goes. */
    const uint32_t room = TD_MIN(r->blocks - matched, most - TD_MIN(most, r->seq.held));

    kvs_client_make_room(p->store, room);
    if (td_seq_reserve(&r->seq, room) != TD_OK) {
        td_seq_release(&r->seq);
        r->state = PFN_WAIT_BLOCKS;
        return;
    }
    for (uint32_t i = 0; i < matched; i++) {
        if (r->seq.blocks[i] != TD_POOL_NONE) {
            r->hashes[i] = td_pool_content_hash(pool, r->seq.blocks[i]);
        }
    }
    r->local_blocks = matched;
    if (ask_store(p, r)) {
        r->state = PFN_WAIT_LOOKUP;
        TD_FAULT_POINT("prefill_lookup");
        return;
    }
    begin_compute(p, r);
}

void pfn_prefix_drop_wrong(pfn_node_t *p, pfn_request_t *r)
{
    size_t block_bytes = td_pool_block_bytes(p->node.pool);

    for (uint32_t i = 0; i < r->seq.block_count; i++) {
        uint32_t idx = r->seq.blocks[i];
        if (idx != TD_POOL_NONE && td_pool_is_indexed(p->node.pool, idx) &&
            td_block_content_hash(td_pool_bytes(p->node.pool, idx), block_bytes) !=
                td_pool_content_hash(p->node.pool, idx)) {
            td_metric_add(p->node.checksum_failures, 1);
            TD_LOG_ERROR("cached block is not what was computed", "req=%s block=%u",
                         r->work.request_id, i);
            td_pool_unindex(p->node.pool, idx);
        }
    }
}

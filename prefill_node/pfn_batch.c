/* Batches of the prefill node: which rows run next, the pass on the worker's thread, and what
 * follows. */
#include "prefill_node/pfn_node.h"

#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/base/td_fault.h"
#include "common/base/td_log.h"

/* --- the worker's thread -----------------------------------------------------------------------
 */

static void on_layers(void *ctx, uint32_t layer_begin, uint32_t layer_end)
{
    pfn_node_t *p = ctx;
    (void)layer_begin;
    atomic_store_explicit(&p->batch.layers_done, layer_end, memory_order_release);
    td_worker_poke(p->node.worker);
}

/* The first token of every choice, from the prompt's last row. */
static td_status_t sample_first(pfn_node_t *p, pfn_request_t *r, const float *logits)
{
    td_logit_bias_t bias[TD_LOGIT_BIAS_MAX];
    uint32_t vocab = p->node.info->vocab_size;
    bool ban = r->work.min_tokens > 0;

    r->logits_hash = td_logits_hash(logits, vocab);
    for (uint32_t c = 0; c < r->work.n; c++) {
        td_sampling_t params;
        td_sampler_t *sampler = NULL;
        td_status_t status = TD_OK;
        td_node_sampling(&r->work, c, bias, &params);
        TD_TRY(td_sampler_create(&params, vocab, r->work.prompt, r->work.prompt_tokens, &sampler));
        status = td_sampler_pick(sampler, logits, r->work.prompt_tokens, p->node.stop_ids,
                                 ban ? p->node.stop_count : 0, r->work.want_logprobs,
                                 r->work.want_logprobs ? r->work.top_logprobs : 0, &r->first[c]);
        td_sampler_destroy(sampler);
        TD_TRY(status);
    }
    return TD_OK;
}

/* Log-probabilities of the prompt's own tokens: row i says how likely token i+1 was. */
static td_status_t prompt_logprobs(pfn_node_t *p, const pfn_part_t *part, const float *logits)
{
    pfn_request_t *r = part->request;
    uint32_t vocab = p->node.info->vocab_size;

    for (uint32_t i = 0; i < part->row_count; i++) {
        uint32_t at = r->done_tokens + i + 1;
        td_sampled_t data;
        if (at >= r->work.prompt_tokens) {
            break;
        }
        memset(&data, 0, sizeof(data));
        data.token = r->work.prompt[at];
        TD_TRY(td_logprobs_of(logits + (size_t)i * vocab, vocab, r->work.top_logprobs, &data));
        r->prompt_logprob[at] = data.logprob;
        r->prompt_top_count[at] = data.top_count;
        memcpy(r->prompt_top + (size_t)at * r->work.top_logprobs, data.top,
               data.top_count * sizeof(data.top[0]));
    }
    return TD_OK;
}

static void finish_parts(pfn_node_t *p, const float *logits)
{
    uint32_t vocab = p->node.info->vocab_size;
    size_t block_bytes = td_pool_block_bytes(p->node.pool);
    uint32_t logit_row = 0;

    for (uint32_t i = 0; i < p->batch.part_count; i++) {
        pfn_part_t *part = &p->batch.parts[i];
        pfn_request_t *r = part->request;
        uint32_t logit_rows = r->work.prompt_logprobs ? part->row_count : part->last ? 1 : 0;
        for (uint32_t b = part->block_begin; b < part->block_end; b++) {
            r->hashes[b] =
                td_block_content_hash(td_pool_bytes(p->node.pool, r->seq.blocks[b]), block_bytes);
        }
        if (r->work.prompt_logprobs) {
            part->status = prompt_logprobs(p, part, logits + (size_t)logit_row * vocab);
        }
        logit_row += logit_rows;
        if (part->last && part->status == TD_OK) {
            part->status = sample_first(p, r, logits + (size_t)(logit_row - 1) * vocab);
        }
    }
}

static void run_batch(void *ctx)
{
    pfn_node_t *p = ctx;
    const float *logits = NULL;

    p->batch.status =
        td_model_forward(p->node.model, td_pool_base(p->node.pool), p->batch.rows,
                         p->batch.row_count, p->batch.layers_step, on_layers, p, &logits);
    if (p->batch.status == TD_OK) {
        finish_parts(p, logits);
    }
}

/* --- the loop's thread --------------------------------------------------------------------------
 */

/* Blocks for positions up to `end`; answers up to where there are some. Only under a mask may there
 * be none for the moment: where others still hold, or the store still reads, what the request has
 * given up. */
static uint32_t grow_to(pfn_node_t *p, pfn_request_t *r, uint32_t end)
{
    const uint32_t block_tokens = td_node_layout(&p->node)->block_tokens;

    while (r->seq.block_count * block_tokens < end) {
        if (r->seq.reserved == 0) {
            kvs_client_make_room(p->store, 1);
        }
        /* Zeroed: the last one may be sent partly filled. */
        if (td_seq_prepare_write(&r->seq, r->seq.block_count * block_tokens) != TD_OK) {
            return r->seq.block_count * block_tokens;
        }
    }
    return end;
}

/* Adds a request's next rows to the batch, within the budgets of rows and of rows with logits. */
static void add_part(pfn_node_t *p, pfn_request_t *r, uint32_t *rows_left, uint32_t *logits_left)
{
    uint32_t block_tokens = td_node_layout(&p->node)->block_tokens;
    uint32_t left = r->work.prompt_tokens - r->done_tokens;
    uint32_t count = TD_MIN(left, *rows_left);
    pfn_part_t *part = &p->batch.parts[p->batch.part_count];
    uint32_t end = 0;
    bool last = false;

    if (r->work.prompt_logprobs) {
        count = TD_MIN(count, *logits_left);
    } else if (count == left && *logits_left == 0) {
        count--; /* its last row waits for the next batch */
    }
    count = grow_to(p, r, r->done_tokens + count) - r->done_tokens;
    if (count == 0) {
        return;
    }
    last = count == left;
    end = r->done_tokens + count;
    *part = (pfn_part_t){.request = r,
                         .row_count = count,
                         .block_begin = r->announced_blocks,
                         .block_end = last ? r->blocks : end / block_tokens,
                         .last = last};
    for (uint32_t i = 0; i < count; i++) {
        uint32_t position = r->done_tokens + i;
        p->batch.rows[p->batch.row_count++] =
            (td_model_row_t){.token = r->work.prompt[position],
                             .position = position,
                             .blocks = r->seq.blocks,
                             .want_logits = r->work.prompt_logprobs || (last && i + 1 == count)};
    }
    *rows_left -= count;
    *logits_left -= r->work.prompt_logprobs ? count : last ? 1 : 0;
    p->batch.part_count++;
    r->computing = true;
}

/* Layers of a part that are worth an announcement: at least PFN_ANNOUNCE_BYTES of blocks that the
 * decode node needs and doesn't have, or all layers. 0: there is nothing to announce. */
static uint32_t layers_worth(const pfn_node_t *p, const pfn_part_t *part)
{
    const td_kv_layout_t *layout = td_node_layout(&p->node);
    const td_msg_work_t *w = &part->request->work;
    const uint32_t begin = TD_MAX(part->block_begin, w->have_blocks) * layout->block_tokens;
    const uint32_t end = part->block_end * layout->block_tokens;
    const size_t layer_bytes =
        td_attention_blocks_needed(td_node_mask(&p->node), layout->block_tokens, w->prompt_tokens,
                                   begin, TD_MAX(begin, end)) *
        td_kv_layer_bytes(layout);

    if (layer_bytes == 0) {
        return 0;
    }
    return (uint32_t)TD_MIN((PFN_ANNOUNCE_BYTES + layer_bytes - 1) / layer_bytes,
                            (size_t)layout->layers);
}

/* How often the pass reports: as often as the part with most blocks needs it. */
static uint32_t choose_layers_step(const pfn_node_t *p)
{
    uint32_t step = 0;

    for (uint32_t i = 0; i < p->batch.part_count; i++) {
        uint32_t worth = layers_worth(p, &p->batch.parts[i]);
        step = worth == 0 ? step : step == 0 ? worth : TD_MIN(step, worth);
    }
    return step;
}

uint32_t pfn_batch_room(const pfn_batch_t *b, uint32_t rows_left)
{
    bool ends = false;

    for (uint32_t i = 0; i < b->part_count; i++) {
        ends = ends || b->parts[i].last;
    }
    return ends ? TD_MIN(rows_left, PFN_FILL_ROWS - TD_MIN(b->row_count, PFN_FILL_ROWS))
                : rows_left;
}

void pfn_batch_schedule(pfn_node_t *p)
{
    uint32_t rows_left = p->chunk_tokens;
    uint32_t logits_left = PFN_LOGIT_ROWS_MAX;

    if (td_worker_is_busy(p->node.worker)) {
        return;
    }
    p->batch.row_count = 0;
    p->batch.part_count = 0;
    for (pfn_request_t *r = p->requests; r != NULL && rows_left > 0; r = r->next) {
        if (r->state == PFN_COMPUTE && p->batch.part_count < PFN_PARTS_MAX) {
            add_part(p, r, &rows_left, &logits_left);
            rows_left = pfn_batch_room(&p->batch, rows_left);
        }
    }
    if (p->batch.part_count == 0) {
        return;
    }
    p->batch.layers_step = choose_layers_step(p);
    p->batch.started_ns = td_now_ns();
    atomic_store_explicit(&p->batch.layers_done, 0, memory_order_relaxed);
    td_worker_submit(p->node.worker, run_batch, p);
}

static void announce_layers(pfn_node_t *p)
{
    uint32_t done = (uint32_t)atomic_load_explicit(&p->batch.layers_done, memory_order_acquire);
    bool all = done == td_node_layout(&p->node)->layers;

    for (uint32_t i = 0; i < p->batch.part_count; i++) {
        pfn_part_t *part = &p->batch.parts[i];
        uint32_t count = done - part->layers_announced;
        if (count > 0 && (all || count >= layers_worth(p, part))) {
            if (part->request->state == PFN_COMPUTE) {
                pfn_handoff_layers(p, part->request, part->layers_announced, done,
                                   part->block_begin, part->block_end);
            }
            part->layers_announced = done;
        }
    }
}

static void offer_blocks(pfn_node_t *p, const pfn_request_t *r, uint32_t count)
{
    td_status_t status = count > 0 ? kvs_client_put(p->store, p->scratch_blocks, count) : TD_OK;

    if (status != TD_OK) {
        TD_LOG_DEBUG("blocks not offered", "req=%s status=%s", r->work.request_id,
                     td_status_name(status));
    }
}

/* New full blocks up to `end` become a prefix for others, here and, if offered, through the store.
 */
static void publish_blocks(pfn_node_t *p, pfn_request_t *r, uint32_t end, bool offered)
{
    uint32_t count = 0;

    for (; r->published_blocks < end; r->published_blocks++) {
        const uint32_t b = r->published_blocks;
        uint32_t idx = r->seq.blocks[b];
        if (td_seq_index(&r->seq, b, b > 0 ? &r->keys[b - 1] : NULL, &r->keys[b], r->hashes[b]) !=
                TD_OK ||
            !offered) {
            continue;
        }
        p->scratch_blocks[count++] = idx;
        if (count == KVS_PUT_BLOCKS_MAX) {
            offer_blocks(p, r, count);
            count = 0;
        }
    }
    offer_blocks(p, r, count);
}

/* Under a mask a prompt gives up what it has left behind, chunk by chunk. It is published before,
 * and offered to the store while the pool has as many blocks to spare as the offer pins. */
static void leave_behind(pfn_node_t *p, pfn_request_t *r)
{
    const uint32_t full =
        TD_MIN(r->done_tokens / td_node_layout(&p->node)->block_tokens, r->full_blocks);
    const td_pool_counts_t c = td_pool_counts(p->node.pool);

    if (td_node_mask(&p->node)->kind == TD_ATTENTION_FULL) {
        return;
    }
    publish_blocks(p, r, full, c.free + c.cached > full - TD_MIN(full, r->published_blocks));
    td_seq_forget(&r->seq, r->done_tokens);
}

static void finish_part(pfn_node_t *p, const pfn_part_t *part)
{
    pfn_request_t *r = part->request;
    td_span_t span;

    r->computing = false;
    td_span_begin(&span, &r->span.context, "prefill chunk", p->batch.started_ns);
    td_span_number(&span, "tandem.rows", part->row_count);
    td_span_number(&span, "tandem.batch_rows", p->batch.row_count);
    td_tracer_end(p->node.proc.tracer, &span, td_now_ns());
    if (r->state == PFN_DRAIN) {
        pfn_request_settle(p, r);
        return;
    }
    if (p->batch.status != TD_OK || part->status != TD_OK) {
        pfn_request_end(p, r, p->batch.status != TD_OK ? p->batch.status : part->status);
        return;
    }
    r->done_tokens += part->row_count;
    r->announced_blocks = part->block_end;
    td_metric_add(p->tokens_computed, part->row_count);
    if (!part->last) {
        leave_behind(p, r);
    } else if (pfn_handoff_ready(p, r)) {
        /* After the hand-off: store traffic never delays a first token. */
        publish_blocks(p, r, r->full_blocks, true);
        td_seq_forget(&r->seq, r->done_tokens);
    }
}

void pfn_batch_progress(pfn_node_t *p)
{
    bool done = td_worker_take_done(p->node.worker);
    uint64_t took_ns = 0;

    announce_layers(p);
    if (!done) {
        return;
    }
    took_ns = td_now_ns() - p->batch.started_ns;
    td_metric_observe_ns(p->batch_seconds, took_ns);
    if (p->batch.status == TD_OK) {
        p->tokens_per_s = p->batch.row_count * TD_NS_PER_S / TD_MAX(took_ns, 1ull);
        pfn_rate_add(&p->compute_rate,
                     (double)p->batch.row_count / td_node_layout(&p->node)->block_tokens, took_ns);
    } else {
        TD_LOG_ERROR("forward pass failed", "status=%s rows=%u", td_status_name(p->batch.status),
                     p->batch.row_count);
    }
    if (p->batch.status == TD_ERR_IO) {
        td_node_fail(&p->node); /* a device that has failed once fails ever after */
    }
    for (uint32_t i = 0; i < p->batch.part_count; i++) {
        finish_part(p, &p->batch.parts[i]);
    }
    TD_FAULT_POINT("prefill_chunk");
}

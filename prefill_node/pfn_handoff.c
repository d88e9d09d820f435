#include "prefill_node/pfn_node.h"

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/base/td_fault.h"
#include "common/base/td_log.h"

/* One run of blocks that the decode node needs. */
static void announce_run(pfn_node_t *p, const pfn_request_t *r, uint32_t layer_begin,
                         uint32_t layer_end, uint32_t begin, uint32_t count)
{
    td_msg_t msg = {.type = TD_MSG_LAYERS_READY};
    td_status_t status = TD_OK;

    for (uint32_t i = 0; i < count; i++) {
        p->scratch_blocks[i] = r->seq.blocks[begin + i];
        p->scratch_epochs[i] = td_pool_epoch(p->node.pool, p->scratch_blocks[i]);
    }
    msg.u.layers = (td_msg_layers_ready_t){.ticket = r->ticket,
                                           .attempt = r->attempt,
                                           .layer_begin = layer_begin,
                                           .layer_end = layer_end,
                                           .first_block = begin,
                                           .count = count,
                                           .blocks = p->scratch_blocks,
                                           .epochs = p->scratch_epochs};
    status = td_bus_send(p->node.proc.bus, r->work.peer_id, &msg);
    if (status != TD_OK) {
        /* Not lost: what was not announced is fetched after KvReady, or that fails for good. */
        TD_LOG_DEBUG("layers not announced", "req=%s status=%s", r->work.request_id,
                     td_status_name(status));
    }
    TD_FAULT_POINT("prefill_layers");
}

void pfn_handoff_layers(pfn_node_t *p, pfn_request_t *r, uint32_t layer_begin, uint32_t layer_end,
                        uint32_t block_begin, uint32_t block_end)
{
    uint32_t begin = TD_MAX(block_begin, r->work.have_blocks); /* it holds the first ones itself */

    while (begin < block_end) {
        uint32_t end = begin;
        while (end < block_end && pfn_request_needs(r, end)) {
            end++;
        }
        if (end > begin) {
            announce_run(p, r, layer_begin, layer_end, begin, end - begin);
        }
        begin = end + 1; /* that one is not needed, or not there */
    }
}

/* Logprob data of the first tokens, in the message's joined form. */
typedef struct first_logprobs {
    float logprobs[TD_MSG_CHOICES_MAX];
    uint32_t counts[TD_MSG_CHOICES_MAX];
    uint32_t tokens[TD_MSG_CHOICES_MAX * TD_TOP_LOGPROBS_MAX];
    float tops[TD_MSG_CHOICES_MAX * TD_TOP_LOGPROBS_MAX];
} first_logprobs_t;

static void join_logprobs(const pfn_request_t *r, first_logprobs_t *joined, td_msg_logprobs_t *out)
{
    uint32_t total = 0;

    for (uint32_t c = 0; c < r->work.n; c++) {
        joined->logprobs[c] = r->first[c].logprob;
        joined->counts[c] = r->first[c].top_count;
        for (uint32_t i = 0; i < r->first[c].top_count; i++, total++) {
            joined->tokens[total] = r->first[c].top[i].token;
            joined->tops[total] = r->first[c].top[i].logprob;
        }
    }
    *out = (td_msg_logprobs_t){.count = r->work.n,
                               .token_logprobs = joined->logprobs,
                               .top_counts = joined->counts,
                               .top_total = total,
                               .top_tokens = joined->tokens,
                               .top_logprobs = joined->tops};
}

static void send_prompt_logprobs(pfn_node_t *p, pfn_request_t *r)
{
    td_msg_t msg = {.type = TD_MSG_TOKENS};
    uint32_t prompt = r->work.prompt_tokens;
    uint32_t *tokens =
        td_calloc((size_t)prompt * TD_MAX(r->work.top_logprobs, 1u), sizeof(*tokens));
    float *tops = td_calloc((size_t)prompt * TD_MAX(r->work.top_logprobs, 1u), sizeof(*tops));
    uint32_t total = 0;

    if (tokens != NULL && tops != NULL) {
        for (uint32_t i = 0; i < prompt; i++) {
            for (uint32_t k = 0; k < r->prompt_top_count[i]; k++, total++) {
                const td_logprob_t *top = &r->prompt_top[(size_t)i * r->work.top_logprobs + k];
                tokens[total] = top->token;
                tops[total] = top->logprob;
            }
        }
        msg.u.tokens = (td_msg_tokens_t){.ticket = r->ticket,
                                         .attempt = r->attempt,
                                         .count = prompt,
                                         .tokens = r->work.prompt,
                                         .is_prompt = true,
                                         .logprobs = {.count = prompt,
                                                      .token_logprobs = r->prompt_logprob,
                                                      .top_counts = r->prompt_top_count,
                                                      .top_total = total,
                                                      .top_tokens = tokens,
                                                      .top_logprobs = tops}};
        if (td_bus_send(p->node.proc.bus, r->router, &msg) != TD_OK) {
            TD_LOG_WARN("prompt logprobs not sent", "req=%s", r->work.request_id);
        }
    }
    td_free(tops);
    td_free(tokens);
}

bool pfn_handoff_ready(pfn_node_t *p, pfn_request_t *r)
{
    static first_logprobs_t joined; /* the loop's thread only */
    uint32_t begin = TD_MIN(r->work.have_blocks, r->blocks);
    uint32_t count = 0;
    uint32_t tokens[TD_MSG_CHOICES_MAX];
    uint64_t hashes[TD_MSG_CHOICES_MAX];
    td_msg_t msg = {.type = TD_MSG_KV_READY};
    td_msg_kv_ready_t *m = &msg.u.kv_ready;
    td_status_t status = TD_OK;

    if (r->work.prompt_logprobs) {
        send_prompt_logprobs(p, r);
    }
    for (uint32_t b = begin; b < r->blocks; b++) {
        if (pfn_request_needs(r, b)) {
            p->scratch_blocks[count] = r->seq.blocks[b];
            p->scratch_epochs[count] = td_pool_epoch(p->node.pool, r->seq.blocks[b]);
            p->scratch_keys[count] = r->keys[b];
            p->scratch_sums[count] =
                td_block_checksum(r->hashes[b], &r->keys[b], p->scratch_epochs[count]);
            count++;
        }
    }
    for (uint32_t c = 0; c < r->work.n; c++) {
        tokens[c] = r->first[c].token;
        hashes[c] = r->logits_hash; /* one row of logits gives every choice its first token */
    }
    *m = (td_msg_kv_ready_t){.ticket = r->ticket,
                             .attempt = r->attempt,
                             .first_block = begin,
                             .count = count,
                             .blocks = p->scratch_blocks,
                             .epochs = p->scratch_epochs,
                             .checksums = p->scratch_sums,
                             .keys = p->scratch_keys,
                             .choice_count = r->work.n,
                             .first_tokens = tokens,
                             .hash_count = r->work.want_hashes ? r->work.n : 0,
                             .hashes = r->work.want_hashes ? hashes : NULL};
    if (r->work.want_logprobs) {
        join_logprobs(r, &joined, &m->logprobs);
    }
    m->usage.prompt_tokens = r->work.prompt_tokens;
    m->usage.cached_local_tokens = r->local_blocks * td_node_layout(&p->node)->block_tokens;
    m->usage.cached_store_tokens = r->store_blocks * td_node_layout(&p->node)->block_tokens;
    m->usage.computed_tokens =
        r->work.prompt_tokens - m->usage.cached_local_tokens - m->usage.cached_store_tokens;
    TD_FAULT_POINT("prefill_before_ready");
    status = td_bus_send(p->node.proc.bus, r->work.peer_id, &msg);
    if (status != TD_OK) {
        pfn_request_end(p, r, TD_ERR_PEER_DEAD);
        return false;
    }
    r->state = PFN_WAIT_ACK;
    r->ack_deadline_ns = td_now_ns() + PFN_ACK_MS * TD_NS_PER_MS;
    TD_FAULT_POINT("prefill_ready");
    return true;
}

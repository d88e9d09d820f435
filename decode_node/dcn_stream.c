/* From a sampled token to what the client reads: text, stop conditions, the message to the router,
 * and blocks that became full and are worth keeping. */
#include "decode_node/dcn_node.h"

#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_fault.h"
#include "common/base/td_log.h"

/* Their tokens are all final (I4). */
void dcn_stream_publish(dcn_node_t *d, dcn_choice_t *c)
{
    dcn_ticket_t *t = c->ticket;
    uint32_t block_tokens = td_node_layout(&d->node)->block_tokens;

    while ((c->published + 1) * block_tokens <= c->kv_tokens) {
        uint32_t idx = c->seq.blocks[c->published];
        td_block_key_t key;
        uint64_t hash = 0;
        dcn_choice_block_key(c, &t->root, block_tokens, c->published,
                             c->published > 0 ? &c->last_key : NULL, &key);
        hash = td_block_content_hash(td_pool_bytes(d->node.pool, idx),
                                     td_pool_block_bytes(d->node.pool));
        if (!td_pool_is_indexed(d->node.pool, idx) &&
            td_seq_index(&c->seq, c->published, c->published > 0 ? &c->last_key : NULL, &key,
                         hash) == TD_OK) {
            td_status_t status = kvs_client_put(d->store, &idx, 1);
            if (status != TD_OK) {
                TD_LOG_DEBUG("block not offered", "req=%s status=%s", t->work.request_id,
                             td_status_name(status));
            }
        }
        c->last_key = key;
        c->published++;
    }
}

/* Text that is final now; sets the finish reason. */
static td_status_t make_text(dcn_node_t *d, dcn_choice_t *c, uint32_t token, bool is_stop_token)
{
    const td_msg_work_t *w = &c->ticket->work;
    bool may_stop = c->token_count >= w->min_tokens;

    td_str_clear(&d->raw);
    td_str_clear(&d->text);
    if (!(is_stop_token && !w->ignore_eos && w->skip_special)) {
        TD_TRY(td_detok_push(&c->detok, d->node.tokenizer, token, w->skip_special, &d->raw));
    }
    if (is_stop_token && !w->ignore_eos && may_stop) {
        c->finish = TD_FINISH_STOP;
    } else if (c->token_count >= w->max_tokens) {
        c->finish = TD_FINISH_LENGTH;
    }
    if (c->finish != TD_FINISH_NONE) {
        TD_TRY(td_detok_finish(&c->detok, &d->raw));
    }
    TD_TRY(td_stop_push(&c->stop, d->raw.bytes, d->raw.len, may_stop, &d->text));
    if (c->stop.matched) {
        c->finish = TD_FINISH_STOP;
    }
    if (c->finish != TD_FINISH_NONE) {
        TD_TRY(td_stop_finish(&c->stop, &d->text));
    }
    return TD_OK;
}

static td_status_t send_token(dcn_node_t *d, const dcn_choice_t *c, const td_sampled_t *sampled,
                              uint64_t hash)
{
    const td_msg_work_t *w = &c->ticket->work;
    uint32_t top_tokens[TD_TOP_LOGPROBS_MAX];
    float top_logprobs[TD_TOP_LOGPROBS_MAX];
    td_msg_t msg = {.type = TD_MSG_TOKENS};
    td_msg_tokens_t *m = &msg.u.tokens;

    *m = (td_msg_tokens_t){.ticket = c->ticket->ticket,
                           .attempt = c->ticket->attempt,
                           .choice = c->index,
                           .offset = c->token_count - 1,
                           .count = 1,
                           .tokens = &sampled->token,
                           .text = {(const uint8_t *)d->text.bytes, d->text.len},
                           .finish = c->finish,
                           .hash_count = w->want_hashes ? 1 : 0,
                           .hashes = w->want_hashes ? &hash : NULL};
    if (w->want_logprobs) {
        for (uint32_t i = 0; i < sampled->top_count; i++) {
            top_tokens[i] = sampled->top[i].token;
            top_logprobs[i] = sampled->top[i].logprob;
        }
        m->logprobs = (td_msg_logprobs_t){.count = 1,
                                          .token_logprobs = &sampled->logprob,
                                          .top_counts = &sampled->top_count,
                                          .top_total = sampled->top_count,
                                          .top_tokens = top_tokens,
                                          .top_logprobs = top_logprobs};
    }
    if (c->stop.matched) {
        m->stop_match = w->stops[c->stop.which];
    }
    return td_bus_send(d->node.proc.bus, TD_ROUTER_ID, &msg);
}

bool dcn_stream_token(dcn_node_t *d, dcn_choice_t *c, const td_sampled_t *sampled,
                      uint64_t logits_hash)
{
    dcn_ticket_t *t = c->ticket;
    td_status_t status = TD_OK;

    c->tokens[c->token_count++] = sampled->token;
    dcn_speculate_token(c, sampled->token);
    td_metric_add(d->tokens, 1);
    status =
        make_text(d, c, sampled->token, td_tokenizer_is_stop(d->node.tokenizer, sampled->token));
    if (status == TD_OK) {
        status = send_token(d, c, sampled, logits_hash);
    }
    TD_FAULT_POINT("decode_token");
    if (status != TD_OK) {
        /* A router that does not take tokens any more: its requests end here. */
        dcn_ticket_end(d, t, status);
        return false;
    }
    if (t->fetches == 0) {
        dcn_stream_publish(d, c);
    }
    if (c->finish == TD_FINISH_NONE) {
        return true;
    }
    dcn_memo_learn(d, c);
    td_seq_fini(&c->seq);
    dcn_speculate_close(c);
    dcn_output_ended(d, c->token_count);
    if (--t->live == 0) {
        dcn_ticket_end(d, t, TD_OK);
        return false;
    }
    return true;
}

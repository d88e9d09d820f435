/* From a sampled token to what the client reads: text, stop conditions, the message to the router
 * (one for all that a step gives a choice), and blocks that became full and are worth keeping.
 *
 * A token is taken as soon as its step is done: what comes next depends on it. Its text is made
 * while the next step runs. So a stop string is found when a step more of its choice is under way,
 * which then counts for nothing. What a token's id or its number ends is not computed further. */
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

    /* While a fetch may still write into the prompt's blocks nothing of the sequence is offered. */
    while (t->fetches == 0 && (c->published + 1) * block_tokens <= c->kv_tokens) {
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

/* What a token ends whose number is count, whatever its text is. */
static td_finish_t finish_by_id(const dcn_node_t *d, const td_msg_work_t *w, uint32_t token,
                                uint32_t count)
{
    if (!w->ignore_eos && count >= w->min_tokens &&
        td_tokenizer_is_stop(d->node.tokenizer, token)) {
        return TD_FINISH_STOP;
    }
    return count >= w->max_tokens ? TD_FINISH_LENGTH : TD_FINISH_NONE;
}

/* Text that is final now; sets the finish reason. */
static td_status_t make_text(dcn_node_t *d, dcn_choice_t *c, uint32_t token)
{
    const td_msg_work_t *w = &c->ticket->work;
    const bool is_stop_token = td_tokenizer_is_stop(d->node.tokenizer, token);
    const bool may_stop = c->given >= w->min_tokens;

    td_str_clear(&d->raw);
    td_str_clear(&d->text);
    if (!(is_stop_token && !w->ignore_eos && w->skip_special)) {
        TD_TRY(td_detok_push(&c->detok, d->node.tokenizer, token, w->skip_special, &d->raw));
    }
    c->finish = finish_by_id(d, w, token, c->given);
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

/* --- the message ------------------------------------------------------------------------------ */

/* Behind what the step has given the choice so far. */
static td_status_t out_add(dcn_out_t *out, const td_sampled_t *sampled, uint64_t hash,
                           const td_str_t *text)
{
    const uint32_t at = out->count++;

    TD_ASSERT(at < TD_ARRAY_LEN(out->tokens));
    out->tokens[at] = sampled->token;
    out->hashes[at] = hash;
    out->logprobs[at] = sampled->logprob;
    out->top_counts[at] = sampled->top_count;
    for (uint32_t i = 0; i < sampled->top_count; i++, out->top_total++) {
        out->top_tokens[out->top_total] = sampled->top[i].token;
        out->top_logprobs[out->top_total] = sampled->top[i].logprob;
    }
    return text->len > 0 ? td_str_append(&out->text, text->bytes, text->len) : TD_OK;
}

static void out_clear(dcn_out_t *out)
{
    out->count = 0;
    out->top_total = 0;
    td_str_clear(&out->text);
}

static td_status_t send_out(dcn_node_t *d, const dcn_choice_t *c)
{
    const td_msg_work_t *w = &c->ticket->work;
    const dcn_out_t *out = &d->out;
    td_msg_t msg = {.type = TD_MSG_TOKENS};
    td_msg_tokens_t *m = &msg.u.tokens;

    *m = (td_msg_tokens_t){.ticket = c->ticket->ticket,
                           .attempt = c->ticket->attempt,
                           .choice = c->index,
                           .offset = c->given - out->count,
                           .count = out->count,
                           .tokens = out->tokens,
                           .text = {(const uint8_t *)out->text.bytes, out->text.len},
                           .finish = c->finish,
                           .hash_count = w->want_hashes ? out->count : 0,
                           .hashes = w->want_hashes ? out->hashes : NULL};
    if (w->want_logprobs) {
        m->logprobs = (td_msg_logprobs_t){.count = out->count,
                                          .token_logprobs = out->logprobs,
                                          .top_counts = out->top_counts,
                                          .top_total = out->top_total,
                                          .top_tokens = out->top_tokens,
                                          .top_logprobs = out->top_logprobs};
    }
    if (c->stop.matched) {
        m->stop_match = w->stops[c->stop.which];
    }
    return td_bus_send(d->node.proc.bus, c->ticket->router, &msg);
}

/* --- tokens ----------------------------------------------------------------------------------- */

void dcn_stream_release(dcn_choice_t *c)
{
    td_seq_fini(&c->seq);
    dcn_speculate_close(c);
}

/* One choice less generates. False when that was the last: the ticket has ended. */
static bool count_out(dcn_node_t *d, dcn_ticket_t *t)
{
    if (--t->live == 0) {
        dcn_ticket_end(d, t, TD_OK);
        return false;
    }
    return true;
}

/* The last of a choice's tokens is on its way. False when its ticket has ended. */
static bool end_choice(dcn_node_t *d, dcn_choice_t *c)
{
    dcn_stream_publish(d, c);
    dcn_memo_learn(d, c);
    if (!c->in_step) {
        dcn_stream_release(c);
    }
    dcn_output_ended(d, c->given);
    return count_out(d, c->ticket);
}

bool dcn_stream_take(dcn_node_t *d, dcn_choice_t *c, uint32_t token)
{
    c->tokens[c->token_count++] = token;
    dcn_speculate_token(c, token);
    return finish_by_id(d, &c->ticket->work, token, c->token_count) != TD_FINISH_NONE;
}

bool dcn_stream_give(dcn_node_t *d, dcn_choice_t *c, const td_sampled_t *tokens,
                     const uint64_t *hashes, uint32_t count)
{
    td_status_t status = TD_OK;

    for (uint32_t i = 0; i < count && status == TD_OK && c->finish == TD_FINISH_NONE; i++) {
        c->given++;
        td_metric_add(d->tokens, 1);
        status = make_text(d, c, tokens[i].token);
        if (status == TD_OK) {
            status = out_add(&d->out, &tokens[i], hashes[i], &d->text);
        }
        TD_FAULT_POINT("decode_token");
    }
    if (status == TD_OK) {
        status = send_out(d, c); /* a router that does not take tokens: its requests end here */
    }
    out_clear(&d->out);
    if (status != TD_OK) {
        dcn_ticket_end(d, c->ticket, status);
        return false;
    }
    return c->finish == TD_FINISH_NONE || end_choice(d, c);
}

td_status_t dcn_stream_replay(dcn_node_t *d, dcn_choice_t *c, uint32_t token)
{
    const bool ends = dcn_stream_take(d, c, token);

    c->given++;
    TD_TRY(make_text(d, c, token));
    return ends || c->finish != TD_FINISH_NONE ? TD_ERR_CORRUPT : TD_OK;
}

bool dcn_stream_skip(dcn_node_t *d, dcn_choice_t *c)
{
    c->finish = TD_FINISH_STOP; /* whichever it was: the client knows */
    dcn_stream_release(c);
    return count_out(d, c->ticket);
}

/* --- what waits until the next step runs -------------------------------------------------------
 */

void dcn_stream_keep(dcn_node_t *d, dcn_choice_t *c, uint32_t count)
{
    const uint32_t first = d->unsent_token_count;

    /* Each of them was drawn behind a row of the step. */
    TD_ASSERT(d->unsent_count < TD_ARRAY_LEN(d->unsent) &&
              first + count <= TD_ARRAY_LEN(d->unsent_tokens));
    d->unsent[d->unsent_count++] =
        (dcn_unsent_t){.choice = c, .ticket = c->ticket, .first = first, .count = count};
    memcpy(d->unsent_tokens + first, c->sampled, count * sizeof(*c->sampled));
    memcpy(d->unsent_hashes + first, c->logits_hashes, count * sizeof(*c->logits_hashes));
    d->unsent_token_count += count;
}

void dcn_stream_drop_kept(dcn_node_t *d, const dcn_ticket_t *t)
{
    while (d->unsent_count > 0 && d->unsent[d->unsent_count - 1].ticket == t) {
        d->unsent_count--;
    }
}

void dcn_stream_give_kept(dcn_node_t *d)
{
    const dcn_ticket_t *ended = NULL;

    for (uint32_t i = 0; i < d->unsent_count; i++) {
        const dcn_unsent_t *u = &d->unsent[i];
        if (u->ticket != ended && !dcn_stream_give(d, u->choice, d->unsent_tokens + u->first,
                                                   d->unsent_hashes + u->first, u->count)) {
            ended = u->ticket;
        }
    }
    d->unsent_count = 0;
    d->unsent_token_count = 0;
}

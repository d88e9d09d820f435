/* Continuous batching: every step runs the newest token of each running choice, whichever request
 * it is of, with drafts of what may follow, and what has to be computed again of those that came
 * back.
 */
#include "decode_node/dcn_node.h"

#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/base/td_fault.h"
#include "common/base/td_log.h"

/* --- admission ----------------------------------------------------------------------------------
 */

static td_status_t init_choice(dcn_node_t *d, dcn_ticket_t *t, uint32_t index)
{
    dcn_choice_t *c = &t->choices[index];
    const td_msg_work_t *w = &t->work;
    td_logit_bias_t bias[TD_LOGIT_BIAS_MAX];
    td_sampling_t params;

    c->ticket = t;
    c->index = index;
    c->stop.strings = (const td_stop_string_t *)w->stops; /* the same shape, see below */
    c->stop.count = w->stop_count;
    c->stop.include = w->include_stop;
    c->published = t->full_blocks;
    c->kv_tokens = w->prompt_tokens;
    if (t->full_blocks > 0) {
        c->last_key = t->keys[t->full_blocks - 1];
    }
    c->tokens = td_calloc(w->max_tokens, sizeof(*c->tokens));
    if (c->tokens == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    td_node_sampling(w, index, bias, &params);
    params.judge_seed = w->draft_rule == TD_DRAFT_RULE_REJECTION ? td_random_u64() : 0;
    TD_TRY(dcn_speculate_open(d, c));
    dcn_worth_begin(c);
    return td_sampler_create(&params, d->node.info->vocab_size, w->prompt, w->prompt_tokens,
                             &c->sampler);
}

_Static_assert(sizeof(td_stop_string_t) == sizeof(td_bytes_t) &&
                   offsetof(td_stop_string_t, len) == offsetof(td_bytes_t, len),
               "stop strings are lent as they came");

/* Choice 0 takes the ticket's sequence; the others share the prompt's blocks. */
static td_status_t init_sequences(dcn_node_t *d, dcn_ticket_t *t)
{
    const td_kv_layout_t *layout = td_node_layout(&d->node);
    uint32_t tokens_max = t->work.prompt_tokens + t->work.max_tokens;

    for (uint32_t i = 1; i < t->work.n; i++) {
        dcn_choice_t *c = &t->choices[i];
        TD_TRY(td_seq_init(&c->seq, d->node.pool, layout, td_node_mask(&d->node), tokens_max));
        td_seq_fork(&c->seq, &t->seq);
        c->seq.reserved = t->reserve_each; /* moved from the ticket's promise */
        t->reserve_choices -= t->reserve_each;
    }
    t->choices[0].seq = t->seq;
    memset(&t->seq, 0, sizeof(t->seq));
    t->choices[0].seq.reserved += t->reserve_choices; /* the copy of a shared partial block */
    t->reserve_choices = 0;
    return TD_OK;
}

static td_sampled_t first_token(const dcn_ticket_t *t, uint32_t choice)
{
    td_sampled_t s;
    uint32_t at = 0;

    memset(&s, 0, sizeof(s));
    s.token = t->ready.first_tokens[choice];
    if (t->ready.logprobs.count > 0) {
        const td_msg_logprobs_t *lp = &t->ready.logprobs;
        s.logprob = lp->token_logprobs[choice];
        for (uint32_t i = 0; lp->top_counts != NULL && i < choice; i++) {
            at += lp->top_counts[i];
        }
        s.top_count = lp->top_counts != NULL ? lp->top_counts[choice] : 0;
        for (uint32_t i = 0; i < s.top_count; i++) {
            s.top[i] = (td_logprob_t){lp->top_tokens[at + i], lp->top_logprobs[at + i]};
        }
    }
    return s;
}

/* It was drawn once more, and is the same, or the nodes are not as equal as they say. */
static td_status_t check_first(const dcn_choice_t *c, const td_msg_generated_t *given,
                               uint32_t first)
{
    if (given->tokens[0] == first) {
        return TD_OK;
    }
    TD_LOG_ERROR("nodes differ", "req=%s choice=%u token=%u there=%u", c->ticket->work.request_id,
                 c->index, first, given->tokens[0]);
    return TD_ERR_CORRUPT;
}

/* With what an earlier attempt has given of it. */
static td_status_t replay(dcn_node_t *d, dcn_choice_t *c, const td_msg_generated_t *given)
{
    for (uint32_t i = 0; i < given->count; i++) {
        td_sampler_accept(c->sampler, given->tokens[i]);
        TD_TRY(dcn_stream_replay(d, c, given->tokens[i]));
    }
    return TD_OK;
}

/* What an earlier attempt has given of each. False: the ticket has ended. */
static bool replay_all(dcn_node_t *d, dcn_ticket_t *t)
{
    for (uint32_t i = 0; i < t->work.generated_count; i++) {
        const td_msg_generated_t *given = &t->work.generated[i];
        td_status_t status = TD_OK;
        if (given->ended && !dcn_stream_skip(d, &t->choices[i])) {
            return false;
        }
        if (!given->ended && given->count > 0) {
            status = replay(d, &t->choices[i], given);
        }
        if (status != TD_OK) {
            dcn_ticket_end(d, t, status);
            return false;
        }
    }
    return true;
}

/* False: the ticket has ended. */
static bool begin_choice(dcn_node_t *d, dcn_ticket_t *t, uint32_t index)
{
    const td_msg_generated_t none = {0};
    const td_msg_generated_t *given =
        t->work.generated_count > 0 ? &t->work.generated[index] : &none;
    dcn_choice_t *c = &t->choices[index];
    const td_sampled_t first = first_token(t, index);
    const uint64_t hash = t->ready.hash_count > 0 ? t->ready.hashes[index] : 0;
    td_status_t status = TD_OK;

    if (given->ended) {
        return dcn_stream_skip(d, c);
    }
    if (given->count > 0) {
        status = check_first(c, given, first.token);
        status = status == TD_OK ? replay(d, c, given) : status;
        if (status != TD_OK) {
            dcn_ticket_end(d, t, status);
        }
        return status == TD_OK;
    }
    td_sampler_accept(c->sampler, first.token);
    (void)dcn_stream_take(d, c, first.token);
    return dcn_stream_give(d, c, &first, &hash, 1);
}

static td_status_t open_choices(dcn_node_t *d, dcn_ticket_t *t)
{
    t->choices = td_calloc(t->work.n, sizeof(*t->choices));
    if (t->choices == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    for (uint32_t i = 0; i < t->work.n; i++) {
        TD_TRY(init_choice(d, t, i));
    }
    return TD_OK;
}

void dcn_batch_admit_whole(dcn_node_t *d, dcn_ticket_t *t)
{
    const td_status_t status = open_choices(d, t);

    if (status != TD_OK) {
        dcn_ticket_end(d, t, status);
        return;
    }
    /* It takes all that again in its turn, which may be now. */
    td_seq_fini(&t->seq);
    td_pool_unreserve(d->node.pool, t->reserve_choices);
    t->reserve_choices = 0;
    t->running_ns = td_now_ns();
    t->live = t->work.n;
    td_metric_add(d->prompts_computed, 1);
    if (replay_all(d, t)) {
        td_metric_add(d->continued, t->work.generated_count > 0);
        dcn_preempt_wait(t);
    }
}

void dcn_batch_admit(dcn_node_t *d, dcn_ticket_t *t)
{
    td_status_t status = open_choices(d, t);
    uint32_t n = t->work.n;

    if (status == TD_OK) {
        status = init_sequences(d, t);
    }
    if (status != TD_OK) {
        dcn_ticket_end(d, t, status);
        return;
    }
    t->state = DCN_RUNNING;
    t->running_ns = td_now_ns();
    t->live = n;
    for (uint32_t i = 0; i < n; i++) {
        if (!begin_choice(d, t, i)) {
            return; /* the ticket has ended */
        }
    }
    if (t->work.generated_count > 0) {
        /* What was generated so far is brought or computed as of one that gave way: the node before
         * has offered it to the store. */
        td_metric_add(d->continued, 1);
        dcn_preempt_wait(t);
        TD_FAULT_POINT("decode_continue");
    }
}

/* --- the worker's thread ------------------------------------------------------------------------
 */

/* The token behind row i of those that sample. */
static td_status_t draw_one(const dcn_node_t *d, const dcn_part_t *part, uint32_t i,
                            const float *row)
{
    dcn_choice_t *c = part->choice;
    const td_msg_work_t *w = &c->ticket->work;
    const uint32_t at = c->token_count + i;
    const uint32_t banned = at < w->min_tokens ? d->node.stop_count : 0;
    const uint32_t tops = w->want_logprobs ? w->top_logprobs : 0;

    if (w->draft_rule == TD_DRAFT_RULE_REJECTION && i < part->drafts) {
        const float *chances =
            part->job == NULL ? NULL : part->job->chances + (size_t)i * d->node.info->vocab_size;
        return td_sampler_judge(c->sampler, row, w->prompt_tokens + at, d->node.stop_ids, banned,
                                w->want_logprobs, tops, c->drafts[i], chances, &c->sampled[i]);
    }
    return td_sampler_pick(c->sampler, row, w->prompt_tokens + at, d->node.stop_ids, banned,
                           w->want_logprobs, tops, &c->sampled[i]);
}

/* What the model says behind a draft that was wrong, and those that stood behind it: no answer's
 * tokens, but hints for the drafter. */
static void look_behind(const dcn_node_t *d, const dcn_part_t *part, const float *logits)
{
    dcn_choice_t *c = part->choice;

    for (uint32_t i = c->sampled_count; i <= part->drafts; i++) {
        td_sampled_t hint;
        if (td_sampler_pick(c->sampler, logits + (size_t)i * d->node.info->vocab_size,
                            c->ticket->work.prompt_tokens + c->token_count + i, NULL, 0, false, 0,
                            &hint) != TD_OK) {
            return;
        }
        c->behind[c->behind_count++] = hint.token;
    }
}

/* Token i of the step, from a row's logits. */
static bool draw_from(dcn_node_t *d, const dcn_part_t *part, uint32_t i, const float *row)
{
    dcn_choice_t *c = part->choice;

    c->status = draw_one(d, part, i, row);
    if (c->status != TD_OK) {
        return false;
    }
    td_sampler_accept(c->sampler, c->sampled[i].token);
    c->logits_hashes[i] =
        c->ticket->work.want_hashes ? td_logits_hash(row, d->node.info->vocab_size) : 0;
    c->sampled_count = i + 1;
    return true;
}

/* Draws the token behind each row, as if one after the other; the first that neither a draft nor a
 * leaf beside it has foreseen ends it: the rows behind it saw a token that never came. Answers the
 * row that the last one came from. */
static uint32_t draw(dcn_node_t *d, dcn_part_t *part, const float *logits)
{
    dcn_choice_t *c = part->choice;
    const size_t vocab = d->node.info->vocab_size;
    uint32_t row = 0;

    c->sampled_count = 0;
    c->behind_count = 0;
    while (draw_from(d, part, row, logits + row * vocab) && row < part->drafts) {
        const uint32_t token = c->sampled[row].token;
        if (token == c->drafts[row]) {
            row++;
            continue;
        }
        part->side_taken = dcn_tree_find(d, part, row, token);
        if (part->side_taken != NULL) {
            const uint32_t leaf = (uint32_t)(part->side_taken - d->tree.sides) - part->side_first;
            const uint32_t behind = part->drafts + 1 + leaf;
            (void)draw_from(d, part, row + 1, logits + behind * vocab);
            return behind;
        }
        if (c->draft != NULL && td_draft_observes(c->draft)) {
            look_behind(d, part, logits);
        }
        break;
    }
    return row;
}

/* Behind the newest token's row those of the drafts, which are all known by now, and of the leaves
 * beside them. */
static void add_rows(dcn_node_t *d, const dcn_part_t *part)
{
    const dcn_choice_t *c = part->choice;
    dcn_batch_t *b = &d->batch;

    for (uint32_t i = 0; i < part->rows + part->drafts; i++) {
        const uint32_t position = c->kv_tokens + i;
        td_model_row_t *row = &b->rows[b->row_count++];
        *row = (td_model_row_t){.token = i < part->rows ? dcn_choice_token(c, position)
                                                        : c->drafts[i - part->rows],
                                .position = position,
                                .blocks = c->seq.blocks,
                                .want_logits = part->samples && i + 1 >= part->rows};
        dcn_tree_link(d, part, row);
    }
    b->row_count += dcn_tree_rows(d, part, &b->rows[b->row_count]);
}

static void draw_part(dcn_node_t *d, dcn_part_t *part, const float *logits, uint32_t logit_row)
{
    const uint32_t last = draw(d, part, logits + (size_t)logit_row * d->node.info->vocab_size);

    if (part->choice->status == TD_OK) {
        dcn_draft_medusa_keep(d, part->choice, logit_row + last);
        dcn_tree_settle(d, part);
    }
}

static void run_batch(void *ctx)
{
    dcn_node_t *d = ctx;
    dcn_batch_t *b = &d->batch;
    const float *logits = NULL;
    uint32_t logit_row = 0;

    b->draft_ns = dcn_draft_propose(d);
    b->row_count = 0;
    dcn_tree_grow(d);
    for (uint32_t i = 0; i < b->part_count; i++) {
        add_rows(d, &b->parts[i]);
    }
    b->status = td_model_forward(d->node.model, td_pool_base(d->node.pool), b->rows, b->row_count,
                                 0, NULL, NULL, &logits);
    for (uint32_t i = 0; b->status == TD_OK && i < b->part_count; i++) {
        dcn_part_t *part = &b->parts[i];
        part->choice->status = TD_OK;
        if (part->samples) {
            draw_part(d, part, logits, logit_row);
            logit_row += part->drafts + 1 + part->sides;
        }
    }
}

/* --- the loop's thread --------------------------------------------------------------------------
 */

/* The newest token is the last one whose KV is written, and whose logits give the next. Mostly it
 * is the only one; after giving way, tokens before it are computed again first, some a step. */
static void add_part(dcn_node_t *d, dcn_choice_t *c)
{
    dcn_batch_t *b = &d->batch;
    const uint32_t newest = c->ticket->work.prompt_tokens + c->token_count - 1;
    const uint32_t shared = c->ticket->shared_tokens; /* others wait for just those */
    const uint32_t last = shared > 0 ? shared - 1 : newest;
    dcn_part_t *part = &b->parts[b->part_count];

    *part = (dcn_part_t){.choice = c, .ticket = c->ticket};
    for (uint32_t position = c->kv_tokens; position <= last; position++) {
        const bool samples = position == newest;
        if (b->row_count == d->rows_max || (!samples && b->replayed == DCN_REPLAY_ROWS_MAX) ||
            td_seq_prepare_write(&c->seq, position) != TD_OK) {
            break; /* the rest waits for the next step, or for a block */
        }
        b->row_count++;
        b->replayed += !samples;
        part->samples = samples;
        part->rows++;
    }
    if (part->rows > 0) {
        b->part_count++;
        c->in_step = true;
        c->ticket->computing = true;
    }
}

/* A draft never makes anybody give way: without a free block for it, there are fewer. */
static void fit_drafts(dcn_part_t *part)
{
    dcn_choice_t *c = part->choice;

    for (uint32_t i = 0; i < part->drafts; i++) {
        if (td_seq_prepare_write(&c->seq, c->kv_tokens + part->rows + i) != TD_OK) {
            part->drafts = i;
        }
    }
}

static void submit(dcn_node_t *d)
{
    dcn_batch_t *b = &d->batch;

    dcn_speculate_plan(d);
    dcn_tree_begin(d);
    dcn_draft_begin(d);
    for (uint32_t i = 0; i < b->part_count; i++) {
        fit_drafts(&b->parts[i]);
        dcn_draft_prepare(d, &b->parts[i]);
    }
    for (uint32_t i = 0; i < b->part_count; i++) {
        dcn_tree_prepare(d, &b->parts[i]);
    }
    b->started_ns = td_now_ns();
    td_worker_submit(d->node.worker, run_batch, d);
}

void dcn_batch_schedule(dcn_node_t *d)
{
    uint32_t seen = 0;

    if (td_worker_is_busy(d->node.worker)) {
        return;
    }
    dcn_preempt_make_room(d);
    d->batch.row_count = 0;
    d->batch.part_count = 0;
    d->batch.replayed = 0;
    /* Starts behind where the last full batch ended, so nobody starves when more run than fit. */
    for (uint32_t pass = 0; pass < 2; pass++) {
        seen = 0;
        for (dcn_ticket_t *t = d->tickets; t != NULL; t = t->next, seen++) {
            bool turn = pass == 0 ? seen >= d->next_ticket_turn : seen < d->next_ticket_turn;
            if (!turn || t->state != DCN_RUNNING) {
                continue;
            }
            if (d->batch.part_count + t->live > d->batch_max && d->batch.part_count > 0) {
                d->next_ticket_turn = seen;
                goto full;
            }
            for (uint32_t i = 0; i < t->work.n && d->batch.row_count < d->rows_max; i++) {
                if (t->choices[i].finish == TD_FINISH_NONE && t->choices[i].has_room) {
                    add_part(d, &t->choices[i]);
                }
            }
        }
    }
    d->next_ticket_turn = 0;
full:
    if (d->batch.part_count > 0) {
        submit(d);
    }
}

/* What a step has drawn for a choice, up to the token that ends it. False when its ticket has
 * ended. */
static bool take_tokens(dcn_node_t *d, const dcn_part_t *part)
{
    dcn_choice_t *c = part->choice;
    uint32_t taken = 0;
    bool ends = false;

    c->kv_tokens += part->rows;
    if (!part->samples) {
        dcn_stream_publish(d, c);
        td_seq_forget(&c->seq, c->kv_tokens);
        dcn_return_share(d, c->ticket);
        return true;
    }
    c->ticket->began = true;
    d->batch.tokens += c->sampled_count;
    dcn_speculate_observe(d, part, c->sampled_count - 1);
    while (taken < c->sampled_count && !ends) {
        c->kv_tokens += taken > 0 ? 1 : 0; /* the row of the draft that this token follows */
        ends = dcn_stream_take(d, c, c->sampled[taken++].token);
    }
    if (ends) {
        return dcn_stream_give(d, c, c->sampled, c->logits_hashes, taken);
    }
    dcn_stream_keep(d, c, taken);
    dcn_stream_publish(d, c);
    dcn_speculate_look_behind(c);
    td_seq_truncate(&c->seq, c->kv_tokens);
    td_seq_forget(&c->seq, c->kv_tokens); /* after what it had filled was published */
    dcn_draft_settle(d, part);
    return true;
}

/* One part of a step that is done. False when its ticket has ended. */
static bool take_part(dcn_node_t *d, const dcn_part_t *part)
{
    dcn_choice_t *c = part->choice;
    dcn_ticket_t *t = part->ticket;
    const td_status_t status = d->batch.status != TD_OK ? d->batch.status : c->status;

    if (t->state != DCN_RUNNING) { /* it has ended meanwhile */
        dcn_ticket_settle(d, t);
        return false;
    }
    if (c->finish != TD_FINISH_NONE) { /* by a stop string in tokens before these */
        dcn_stream_release(c);
        return true;
    }
    if (status != TD_OK) {
        dcn_ticket_end(d, t, status);
        return false;
    }
    return take_tokens(d, part);
}

/* Of a step that has just been made: what it took, and what it would have taken without drafts. */
static void measure(dcn_node_t *d)
{
    dcn_batch_t *b = &d->batch;
    uint32_t rows = 0;

    b->took_ns = td_now_ns() - b->started_ns;
    td_metric_observe_ns(d->batch_seconds, b->took_ns);
    if (b->status == TD_OK) {
        td_step_cost_observe(&d->step_cost, b->row_count, b->took_ns - b->draft_ns);
    }
    dcn_draft_measure(d);
    for (uint32_t i = 0; i < b->part_count; i++) {
        rows += b->parts[i].rows;
    }
    if (rows < b->row_count || b->draft_ns > 0) {
        b->plain_ns = (uint64_t)td_step_cost_ns(&d->step_cost, rows);
    }
}

void dcn_batch_progress(dcn_node_t *d)
{
    dcn_batch_t *b = &d->batch;

    if (!td_worker_take_done(d->node.worker)) {
        return;
    }
    measure(d);
    dcn_tree_release(d);
    b->tokens = 0;
    if (b->status != TD_OK) {
        TD_LOG_ERROR("decode step failed", "status=%s rows=%u", td_status_name(b->status),
                     b->row_count);
    }
    if (b->status == TD_ERR_IO) {
        td_node_fail(&d->node); /* a device that has failed once fails ever after */
    }
    for (uint32_t i = 0; i < b->part_count; i++) {
        b->parts[i].ticket->computing = false;
        b->parts[i].choice->in_step = false;
    }
    for (uint32_t i = 0; i < b->part_count; i++) {
        const dcn_ticket_t *t = b->parts[i].ticket;
        if (!take_part(d, &b->parts[i])) {
            /* The ticket is gone: pass over its other rows, and what they gave. */
            dcn_stream_drop_kept(d, t);
            while (i + 1 < b->part_count && b->parts[i + 1].ticket == t) {
                i++;
            }
        }
    }
    d->tokens_per_s = b->tokens * TD_NS_PER_S / TD_MAX(b->took_ns, 1ull);
    TD_FAULT_POINT("decode_step");
    dcn_batch_schedule(d);
    td_metric_add(d->overlapped, d->unsent_count > 0 && td_worker_is_busy(d->node.worker) ? 1 : 0);
    dcn_stream_give_kept(d);
}

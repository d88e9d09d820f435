/* Memory that running requests share: how much one is promised when it comes, who gives way when
 * that was too little, and how those come back.
 *
 * A request of one choice is promised its prompt and what outputs have lately been long; the rest
 * of its growth it takes as it goes. When none is left, whoever ranks last (higher priority number,
 * then younger) gives up all its blocks. What it had verified is indexed and has been offered to
 * the store, so most of it is found again; the rest is computed again, with the same bits (I1).
 * Whoever ranks first always gets what it needs, so every request ends. Requests of several choices
 * share blocks: they are promised everything, and never give way. */
#include "decode_node/dcn_node.h"

#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_log.h"

#define OUTPUT_PRIOR 256u   /* tokens, until some outputs have ended */
#define OUTPUT_SHARE 16.0   /* how many outputs the estimate goes back, about */
#define OUTPUT_DEVIATIONS 2 /* above the mean: few outputs are longer */
#define OUTPUT_MIN 16u      /* tokens promised at least */

/* --- how long outputs are --------------------------------------------------------------------- */

void dcn_output_ended(dcn_node_t *d, uint32_t tokens)
{
    double error = (double)tokens - d->output_mean;

    if (d->outputs_ended++ == 0) {
        d->output_mean = tokens;
        d->output_deviation = (double)tokens / 2;
        return;
    }
    d->output_mean += error / OUTPUT_SHARE;
    d->output_deviation += ((error < 0 ? -error : error) - d->output_deviation) / OUTPUT_SHARE;
}

uint32_t dcn_output_expected(const dcn_node_t *d, uint32_t max_tokens)
{
    double expected = d->output_mean + OUTPUT_DEVIATIONS * d->output_deviation;

    if (d->outputs_ended == 0) {
        return TD_MIN(max_tokens, OUTPUT_PRIOR);
    }
    return TD_MIN(max_tokens, TD_MAX((uint32_t)expected, OUTPUT_MIN));
}

/* --- giving way ------------------------------------------------------------------------------- */

static bool may_give_way(const dcn_ticket_t *t)
{
    return t->state == DCN_RUNNING && t->work.n == 1;
}

/* a is served before b. Tickets stand in the list in the order in which they came. */
static bool ranks_before(const dcn_ticket_t *a, const dcn_ticket_t *b, bool a_is_older)
{
    return a->work.priority != b->work.priority ? a->work.priority < b->work.priority : a_is_older;
}

/* Of those that may give way: the one that ranks last; NULL when there is none. */
static dcn_ticket_t *last_ranked(const dcn_node_t *d)
{
    dcn_ticket_t *last = NULL;

    for (dcn_ticket_t *t = d->tickets; t != NULL; t = t->next) {
        if (may_give_way(t) && (last == NULL || ranks_before(last, t, true))) {
            last = t;
        }
    }
    return last;
}

static void give_way(dcn_node_t *d, dcn_ticket_t *t)
{
    dcn_choice_t *c = &t->choices[0];

    TD_LOG_INFO("preempted", "req=%s tokens=%u blocks=%u", t->work.request_id,
                t->work.prompt_tokens + c->token_count, c->seq.block_count);
    td_seq_fini(&c->seq);
    c->kv_tokens = 0;
    t->state = DCN_WAITING;
    td_metric_add(d->preemptions, 1);
}

/* The one ticket that runs, or NULL when several or none do: giving way to itself would help
 * nobody. */
static const dcn_ticket_t *only_running(const dcn_node_t *d)
{
    const dcn_ticket_t *only = NULL;

    for (const dcn_ticket_t *t = d->tickets; t != NULL; t = t->next) {
        if (t->state == DCN_RUNNING) {
            if (only != NULL) {
                return NULL;
            }
            only = t;
        }
    }
    return only;
}

/* A block for the position, from others if there is none. False: not now; the choice's ticket may
 * have given way itself. */
static bool make_room(dcn_node_t *d, dcn_choice_t *c, uint32_t position)
{
    while (td_seq_prepare_write(&c->seq, position) != TD_OK) {
        dcn_ticket_t *last = last_ranked(d);
        kvs_client_make_room(d->store, 1);
        if (td_pool_counts(d->node.pool).cached > 0) {
            continue; /* blocks that an offer had pinned */
        }
        if (last == NULL || last == only_running(d)) {
            return false; /* hand-offs and offers under way hold the rest: they end */
        }
        give_way(d, last);
        if (last == c->ticket) {
            return false;
        }
    }
    return true;
}

/* Answers whether somebody had to give way. */
static bool grow(dcn_node_t *d)
{
    const uint64_t before = td_metric_get(d->preemptions);

    for (dcn_ticket_t *t = d->tickets; t != NULL; t = t->next) {
        for (uint32_t i = 0; t->state == DCN_RUNNING && i < t->work.n; i++) {
            dcn_choice_t *c = &t->choices[i];
            c->has_room = c->finish == TD_FINISH_NONE && make_room(d, c, c->kv_tokens);
        }
    }
    return td_metric_get(d->preemptions) != before;
}

/* --- coming back ------------------------------------------------------------------------------ */

uint32_t dcn_choice_token(const dcn_choice_t *c, uint32_t position)
{
    const td_msg_work_t *w = &c->ticket->work;
    return position < w->prompt_tokens ? w->prompt[position]
                                       : c->tokens[position - w->prompt_tokens];
}

/* Keys of the full blocks among the first `tokens` tokens of a choice's sequence. */
static td_status_t choice_keys(const dcn_node_t *d, const dcn_choice_t *c, uint32_t tokens,
                               td_block_key_t **out)
{
    uint32_t *ids = td_calloc(tokens, sizeof(*ids));
    td_block_key_t *keys =
        td_calloc(tokens / td_node_layout(&d->node)->block_tokens + 1, sizeof(*keys));

    if (ids == NULL || keys == NULL) {
        td_free(ids);
        td_free(keys);
        return TD_ERR_NO_MEMORY;
    }
    for (uint32_t i = 0; i < tokens; i++) {
        ids[i] = dcn_choice_token(c, i);
    }
    td_block_keys(&c->ticket->root, ids, tokens, td_node_layout(&d->node)->block_tokens, keys);
    td_free(ids);
    *out = keys;
    return TD_OK;
}

/* Takes what is still here of its sequence and the promise of the rest, with some growth. */
static td_status_t come_back(dcn_node_t *d, dcn_ticket_t *t)
{
    const td_kv_layout_t *layout = td_node_layout(&d->node);
    const td_msg_work_t *w = &t->work;
    dcn_choice_t *c = &t->choices[0];
    const uint32_t written = w->prompt_tokens + c->token_count - 1;
    const uint32_t growth = TD_MIN(w->max_tokens - c->token_count + 1, OUTPUT_MIN);
    const uint32_t blocks = td_kv_blocks_for(layout, written + growth);
    td_block_key_t *keys = NULL;
    td_status_t status = TD_OK;

    TD_TRY(choice_keys(d, c, written, &keys));
    status = td_seq_init(&c->seq, d->node.pool, layout, w->prompt_tokens + w->max_tokens);
    if (status == TD_OK) {
        c->seq.block_count =
            td_pool_match(d->node.pool, keys, written / layout->block_tokens, c->seq.blocks);
        kvs_client_make_room(d->store, blocks - c->seq.block_count);
        status = td_seq_reserve(&c->seq, blocks - c->seq.block_count);
    }
    if (status == TD_OK) {
        c->published = c->seq.block_count;
        if (c->published > 0) {
            c->last_key = keys[c->published - 1];
        }
        c->kv_tokens = c->published * layout->block_tokens;
        c->has_room = true; /* of its own promise */
        t->state = DCN_RUNNING;
        td_metric_add(d->recomputed, written - c->kv_tokens);
        TD_LOG_INFO("resumed", "req=%s tokens=%u kept=%u", w->request_id, written + 1,
                    c->kv_tokens);
    } else {
        td_seq_fini(&c->seq);
    }
    td_free(keys);
    return status;
}

bool dcn_preempt_someone_waits(const dcn_node_t *d)
{
    for (const dcn_ticket_t *t = d->tickets; t != NULL; t = t->next) {
        if (t->state == DCN_WAITING) {
            return true;
        }
    }
    return false;
}

static void resume(dcn_node_t *d)
{
    for (;;) {
        dcn_ticket_t *first = NULL;
        for (dcn_ticket_t *t = d->tickets; t != NULL; t = t->next) {
            if (t->state == DCN_WAITING && (first == NULL || !ranks_before(first, t, true))) {
                first = t;
            }
        }
        if (first == NULL || come_back(d, first) != TD_OK) {
            return; /* who ranks behind it does not overtake it */
        }
    }
}

void dcn_preempt_make_room(dcn_node_t *d)
{
    if (!grow(d)) {
        resume(d);
    }
}

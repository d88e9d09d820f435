/* Memory that running requests share: how much one is promised when it comes, who gives way when
 * that was too little, and how those come back.
 *
 * A request is promised its prompt and, for each choice, what outputs have lately been long; the
 * rest of its growth it takes as it goes. When none is left, whoever ranks last (higher priority
 * number, then younger) gives up all blocks of all its choices. What it had verified is indexed and
 * has been offered to the store, so most of it is found again; the rest is computed again, with the
 * same bits (I1; dcn_return.c). Whoever ranks first always gets what it needs, so every request
 * ends. */
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

/* a is served before b. Tickets stand in the list in the order in which they came. */
static bool ranks_before(const dcn_ticket_t *a, const dcn_ticket_t *b, bool a_is_older)
{
    return a->work.priority != b->work.priority ? a->work.priority < b->work.priority : a_is_older;
}

/* Of those that run: the one that ranks last; NULL when there is none. */
static dcn_ticket_t *last_ranked(const dcn_node_t *d)
{
    dcn_ticket_t *last = NULL;

    for (dcn_ticket_t *t = d->tickets; t != NULL; t = t->next) {
        if (t->state == DCN_RUNNING && (last == NULL || ranks_before(last, t, true))) {
            last = t;
        }
    }
    return last;
}

/* All its choices: what they share is only free when the last one lets go of it. Those that have
 * ended hold nothing. */
void dcn_preempt_wait(dcn_ticket_t *t)
{
    for (uint32_t i = t->work.n; i > 0; i--) {
        dcn_choice_t *c = &t->choices[i - 1];
        td_seq_fini(&c->seq);
        dcn_draft_model_release(c);
        c->kv_tokens = 0;
    }
    dcn_return_fini(t); /* of an earlier return that had not come to its end */
    t->state = DCN_WAITING;
}

static void give_way(dcn_node_t *d, dcn_ticket_t *t)
{
    uint32_t tokens = t->work.prompt_tokens;
    uint32_t blocks = 0;

    for (uint32_t i = 0; i < t->work.n; i++) {
        const dcn_choice_t *c = &t->choices[i];
        tokens += c->finish == TD_FINISH_NONE ? c->token_count : 0;
        blocks += c->seq.held;
    }
    TD_LOG_INFO("preempted", "req=%s choices=%u tokens=%u blocks=%u", t->work.request_id, t->live,
                tokens, blocks);
    dcn_preempt_wait(t);
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

/* Does it still generate, or compute what it had? While one choice computes what all share, the
 * others wait for it. */
static bool works(const dcn_choice_t *c)
{
    return c->finish == TD_FINISH_NONE &&
           (c->ticket->shared_tokens == 0 || c->index == c->ticket->return_choice);
}

/* Answers whether somebody had to give way. */
static bool grow(dcn_node_t *d)
{
    const uint64_t before = td_metric_get(d->preemptions);

    for (dcn_ticket_t *t = d->tickets; t != NULL; t = t->next) {
        for (uint32_t i = 0; t->state == DCN_RUNNING && i < t->work.n; i++) {
            dcn_choice_t *c = &t->choices[i];
            c->has_room = works(c) && make_room(d, c, c->kv_tokens);
        }
    }
    return td_metric_get(d->preemptions) != before;
}

/* --- coming back ------------------------------------------------------------------------------ */

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
        if (first == NULL || dcn_return_begin(d, first) != TD_OK) {
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

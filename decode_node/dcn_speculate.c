/* Speculation: what each choice drafts for the step being made, how much of it the step verifies,
 * and what came of it. Nothing here decides a token (I1): a draft is accepted iff it is what would
 * have been drawn. */
#include "decode_node/dcn_node.h"

#include "common/base/td_base.h"
#include "common/base/td_log.h"

#define ACCEPTANCE_PRIOR 0.5 /* of a drafter that has found something to say */

/* Without a model for it the answer is the same, only not faster. */
static td_status_t open_model_drafter(dcn_node_t *d, dcn_choice_t *c)
{
    const td_msg_work_t *w = &c->ticket->work;

    c->drafter = w->drafter;
    if (dcn_draft_of(d, c) == NULL) {
        c->drafter = TD_DRAFTER_NONE;
        if (!d->draft_model_missed) {
            d->draft_model_missed = true;
            TD_LOG_WARN("drafter not possible here", "req=%s drafter=%s try=\"--draft-model\"",
                        w->request_id, td_drafter_name((td_drafter_t)w->drafter));
        }
        return TD_OK;
    }
    return w->drafter == TD_DRAFTER_DRAFT_MODEL ? dcn_draft_model_admit(d, c) : TD_OK;
}

td_status_t dcn_speculate_open(dcn_node_t *d, dcn_choice_t *c)
{
    const td_msg_work_t *w = &c->ticket->work;
    const td_draft_config_t config = {.tokens_max = w->prompt_tokens + w->max_tokens,
                                      .prediction = w->prediction,
                                      .prediction_tokens = w->prediction_tokens};
    td_status_t status = TD_OK;

    td_acceptance_init(&c->acceptance, ACCEPTANCE_PRIOR);
    if (w->k_max == 0 || w->drafter == TD_DRAFTER_NONE) {
        return TD_OK;
    }
    if (dcn_drafter_needs_passes(w->drafter)) {
        return open_model_drafter(d, c);
    }
    status = td_draft_create((td_drafter_t)w->drafter, &config, &c->draft);
    if (status == TD_ERR_INVALID) { /* a newer router's: without it the answer is the same */
        TD_LOG_WARN("drafter not known here", "req=%s drafter=%u", w->request_id, w->drafter);
        c->draft = NULL;
        return TD_OK;
    }
    if (status == TD_OK) {
        c->drafter = w->drafter;
        td_draft_append(c->draft, w->prompt, w->prompt_tokens, false);
    }
    return status;
}

void dcn_speculate_close(dcn_choice_t *c)
{
    td_draft_destroy(c->draft);
    c->draft = NULL;
    dcn_draft_model_leave(c);
}

void dcn_speculate_token(dcn_choice_t *c, uint32_t token)
{
    if (c->draft != NULL) {
        td_draft_append(c->draft, &token, 1, true);
    }
}

/* More than the output may still have would be drawn in vain: its last token needs no draft. What
 * needs passes of a model is planned before it is drafted, also where the draft model has not
 * caught up with the context yet: whether drafting would pay decides whether it does. */
static uint32_t propose(dcn_node_t *d, dcn_choice_t *c)
{
    const td_msg_work_t *w = &c->ticket->work;
    const uint32_t k = TD_MIN(w->k_max, w->max_tokens - c->token_count - 1);

    if (dcn_drafter_needs_passes(c->drafter)) {
        return dcn_draft_offer(d, c, k);
    }
    return c->draft == NULL ? 0 : td_draft_propose(c->draft, k, c->drafts);
}

/* How many parts of the step share the passes of each drafter. */
typedef struct sharers {
    uint32_t offered[TD_DRAFTER_KINDS];
    uint32_t planned[TD_DRAFTER_KINDS];
} sharers_t;

/* A pass is shared by the choices that draft, so each pays its part. Nothing is known before the
 * first: then it is tried. */
static double draft_ns(dcn_node_t *d, const dcn_choice_t *c, const sharers_t *sharers)
{
    const dcn_drafter_t *p = dcn_draft_of(d, c);
    const uint32_t rows = sharers->offered[c->drafter];

    return p == NULL || p->cost.measured == 0 || rows == 0 ? 0
                                                           : td_step_cost_ns(&p->cost, rows) / rows;
}

static void forget_costs(dcn_node_t *d, const sharers_t *sharers)
{
    if (sharers->offered[TD_DRAFTER_DRAFT_MODEL] > 0 &&
        sharers->planned[TD_DRAFTER_DRAFT_MODEL] == 0) {
        td_step_cost_forget(&d->draft_passes.cost);
    }
    if (sharers->offered[TD_DRAFTER_EARLY_EXIT] > 0 &&
        sharers->planned[TD_DRAFTER_EARLY_EXIT] == 0) {
        td_step_cost_forget(&d->exit_passes.cost);
    }
}

void dcn_speculate_plan(dcn_node_t *d)
{
    dcn_batch_t *b = &d->batch;
    td_spec_offer_t offers[DCN_BATCH_ROWS_MAX];
    sharers_t sharers = {0};
    uint32_t count = 0;
    uint32_t rows = 0;
    uint32_t at = 0;

    for (uint32_t i = 0; i < b->part_count; i++) {
        dcn_choice_t *c = b->parts[i].choice;
        rows += b->parts[i].rows;
        if (b->parts[i].samples) {
            const uint32_t proposed = propose(d, c);
            sharers.offered[c->drafter] += proposed > 0;
            offers[count++] = (td_spec_offer_t){.alpha = td_acceptance_rate(&c->acceptance),
                                                .proposed = proposed,
                                                .k_min = TD_MIN(c->ticket->work.k_min, proposed)};
        }
    }
    for (uint32_t i = 0; i < b->part_count; i++) {
        if (b->parts[i].samples) {
            offers[at++].draft_ns = draft_ns(d, b->parts[i].choice, &sharers);
        }
    }
    td_spec_plan(&d->step_cost, offers, count, rows - count, d->rows_max);
    at = 0;
    for (uint32_t i = 0; i < b->part_count; i++) {
        dcn_choice_t *c = b->parts[i].choice;
        if (b->parts[i].samples) {
            if (offers[at].k == 0 && offers[at].proposed > 0) {
                td_acceptance_pass(&c->acceptance);
            }
            sharers.planned[c->drafter] += offers[at].k > 0;
            b->parts[i].drafts = offers[at++].k;
        }
    }
    forget_costs(d, &sharers);
}

void dcn_speculate_observe(dcn_node_t *d, const dcn_part_t *part, uint32_t accepted)
{
    dcn_choice_t *c = part->choice;
    /* A draft that its drafter has cut short has cost a pass for a token that was none. */
    const uint32_t tried = part->job != NULL ? part->job->k : part->drafts;

    if (tried == 0) {
        return;
    }
    td_acceptance_observe(&c->acceptance, tried, accepted);
    c->ticket->drafts_accepted += accepted;
    c->ticket->drafts_rejected += part->drafts - accepted;
    td_metric_add(d->drafts_accepted, accepted);
    td_metric_add(d->drafts_rejected, part->drafts - accepted);
}

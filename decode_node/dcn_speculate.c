/* Speculation: what each choice drafts for the step being made, how much of it the step verifies,
 * and what came of it. Nothing here decides a token (I1): a draft is accepted iff it is what would
 * have been drawn, or by chances that leave the distribution as it is (the rejection rule). */
#include "decode_node/dcn_node.h"

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/base/td_log.h"

/* A choice's own experience soon counts for more than what all others have seen, and is soon
 * forgotten: texts change as they go on. */
#define CHOICE_MEMORY 0.9
#define CHOICE_PRIOR_TRIALS 3.0
#define NODE_MEMORY 0.99
#define NODE_PRIOR_TRIALS 4.0
/* What is not tried is tried again: by a choice after some 30 steps, by others later. */
#define CHOICE_PASS_MEMORY 0.97
#define NODE_PASS_MEMORY 0.998

/* Without a model for it the answer is the same, only not faster. */
static td_status_t open_model_drafter(dcn_node_t *d, dcn_choice_t *c)
{
    const td_msg_work_t *w = &c->ticket->work;

    if (dcn_draft_passes(d, w->drafter) == NULL) {
        if (!d->draft_model_missed) {
            d->draft_model_missed = true;
            TD_LOG_WARN("drafter not possible here", "req=%s drafter=%s try=\"%s\"", w->request_id,
                        td_drafter_name((td_drafter_t)w->drafter),
                        w->drafter == TD_DRAFTER_MEDUSA ? "--medusa-heads" : "--draft-model");
        }
        return TD_OK;
    }
    c->drafter = w->drafter;
    if (w->draft_rule == TD_DRAFT_RULE_REJECTION) {
        TD_TRY(dcn_draft_need_chances(d));
    }
    switch (w->drafter) {
    case TD_DRAFTER_DRAFT_MODEL:
        return dcn_draft_model_admit(d, c);
    case TD_DRAFTER_MEDUSA:
        return dcn_draft_medusa_admit(d, c);
    default:
        return TD_OK;
    }
}

td_status_t dcn_speculate_open(dcn_node_t *d, dcn_choice_t *c)
{
    const td_msg_work_t *w = &c->ticket->work;
    const td_memo_start_t start = dcn_memo_start(d, c->ticket);
    const td_draft_config_t config = {.tokens_max = w->prompt_tokens + w->max_tokens,
                                      .prediction = w->prediction,
                                      .prediction_tokens = w->prediction_tokens,
                                      .memo = d->memo,
                                      .start = &start};
    td_status_t status = TD_OK;

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
    dcn_draft_medusa_leave(c);
}

void dcn_speculate_token(dcn_choice_t *c, uint32_t token)
{
    if (c->draft != NULL) {
        td_draft_append(c->draft, &token, 1, true);
    }
}

void dcn_speculate_look_behind(dcn_choice_t *c)
{
    if (c->behind_count > 0) {
        td_draft_observe(c->draft, c->drafts + c->sampled_count - 1, c->behind, c->behind_count);
    }
}

/* Both experiences with drafts of which the drafter is as sure as of the choice's newest ones. */
static td_acceptance_t *node_acceptance(dcn_node_t *d, const dcn_choice_t *c)
{
    return &d->acceptance[c->drafter][c->confidence];
}

static double acceptance_of(dcn_node_t *d, const dcn_choice_t *c)
{
    const double prior = td_acceptance_rate(
        node_acceptance(d, c), td_draft_confidence_prior(c->confidence), NODE_PRIOR_TRIALS);
    return td_acceptance_rate(&c->acceptance[c->confidence], prior, CHOICE_PRIOR_TRIALS);
}

/* More than the output may still have would be drawn in vain: its last token needs no draft. What
 * needs passes of a model is planned before it is drafted, also where the draft model has not
 * caught up with the context yet: whether drafting would pay decides whether it does. */
static uint32_t propose(dcn_node_t *d, dcn_choice_t *c)
{
    const td_msg_work_t *w = &c->ticket->work;
    const uint32_t k = TD_MIN(w->k_max, w->max_tokens - c->token_count - 1);
    uint32_t proposed = 0;

    if (dcn_drafter_needs_passes(c->drafter)) {
        return dcn_draft_offer(d, c, k);
    }
    if (c->draft != NULL) {
        proposed = td_draft_propose(c->draft, k, c->drafts);
        c->confidence = td_draft_confidence(c->draft);
    }
    return proposed;
}

/* How many parts of the step a drafter's passes could be shared by, and how many share them. */
typedef struct sharers {
    uint32_t offered;
    uint32_t planned;
    double draft_ns; /* of a draft of each, as part of a pass */
    double dropped;  /* part of the drafts that the drafter drops, not sure enough of them */
} sharers_t;

/* A pass is shared by the choices that draft, so each pays its part. Nothing is known before the
 * first: then it is tried. */
static void cost_of_drafts(dcn_node_t *d, sharers_t sharers[TD_DRAFTER_KINDS])
{
    for (uint32_t kind = 0; kind < TD_DRAFTER_KINDS; kind++) {
        const dcn_drafter_t *p = dcn_draft_passes(d, kind);
        sharers_t *s = &sharers[kind];
        s->draft_ns =
            p == NULL || s->offered == 0 ? 0 : td_step_cost_ns(&p->cost, s->offered) / s->offered;
        s->dropped =
            p == NULL ? 0 : 1 - td_acceptance_rate(&d->drafts_made[kind], 1, NODE_PRIOR_TRIALS);
    }
}

static void age_costs(dcn_node_t *d, const sharers_t sharers[TD_DRAFTER_KINDS])
{
    for (uint32_t kind = 0; kind < TD_DRAFTER_KINDS; kind++) {
        dcn_drafter_t *p = dcn_draft_passes(d, kind);
        if (p != NULL && sharers[kind].offered > 0 && sharers[kind].planned == 0) {
            td_step_cost_pass(&p->cost);
        }
    }
}

void dcn_speculate_plan(dcn_node_t *d)
{
    dcn_batch_t *b = &d->batch;
    td_spec_offer_t offers[DCN_BATCH_ROWS_MAX];
    sharers_t sharers[TD_DRAFTER_KINDS] = {0};
    uint32_t count = 0;
    uint32_t rows = 0;
    uint32_t at = 0;

    for (uint32_t i = 0; i < b->part_count; i++) {
        dcn_choice_t *c = b->parts[i].choice;
        rows += b->parts[i].rows;
        if (b->parts[i].samples) {
            const uint32_t proposed = propose(d, c);
            sharers[c->drafter].offered += proposed > 0;
            offers[count++] = (td_spec_offer_t){.alpha = proposed == 0 ? 0 : acceptance_of(d, c),
                                                .proposed = proposed,
                                                .k_min = TD_MIN(c->ticket->work.k_min, proposed)};
        }
    }
    cost_of_drafts(d, sharers);
    for (uint32_t i = 0; i < b->part_count; i++) {
        if (b->parts[i].samples) {
            offers[at].draft_ns = sharers[b->parts[i].choice->drafter].draft_ns;
            offers[at++].dropped = sharers[b->parts[i].choice->drafter].dropped;
        }
    }
    td_spec_plan(&d->step_cost, offers, count, rows - count, d->rows_max);
    at = 0;
    for (uint32_t i = 0; i < b->part_count; i++) {
        dcn_choice_t *c = b->parts[i].choice;
        if (b->parts[i].samples) {
            if (offers[at].k == 0 && offers[at].proposed > 0) {
                td_acceptance_pass(&c->acceptance[c->confidence], CHOICE_PASS_MEMORY);
                td_acceptance_pass(node_acceptance(d, c), NODE_PASS_MEMORY);
            }
            sharers[c->drafter].planned += offers[at].k > 0;
            b->parts[i].proposed = offers[at].proposed;
            b->parts[i].alpha = offers[at].alpha;
            b->parts[i].draft_ns = offers[at].draft_ns;
            b->parts[i].drafts = offers[at++].k;
        }
    }
    age_costs(d, sharers);
}

void dcn_speculate_observe(dcn_node_t *d, const dcn_part_t *part, uint32_t accepted)
{
    dcn_choice_t *c = part->choice;
    /* A draft that its drafter has cut short has cost a pass for a token that was none. */
    const uint32_t tried = part->job == NULL       ? part->drafts
                           : part->job->passes > 0 ? part->job->passes
                                                   : part->job->k;
    const uint32_t verified = part->drafts + part->sides;
    const uint32_t beside = part->side_taken != NULL ? 1 : 0;

    dcn_worth_step(d, part, accepted);
    if (tried == 0) {
        return;
    }
    td_acceptance_observe(&c->acceptance[c->confidence], tried, accepted - beside, CHOICE_MEMORY);
    td_acceptance_observe(node_acceptance(d, c), tried, accepted - beside, NODE_MEMORY);
    dcn_tree_observe(d, part, accepted - beside);
    if (part->job != NULL) {
        td_acceptance_observe(&d->drafts_made[c->drafter], tried, part->drafts, NODE_MEMORY);
    }
    if (part->drafts > 0) {
        td_metric_add(d->drafter_steps[c->drafter], 1);
        td_metric_add(d->drafter_accepted[c->drafter], accepted);
        td_metric_add(d->drafter_rejected[c->drafter], verified - accepted);
    }
    td_metric_add(d->drafts_accepted, accepted);
    td_metric_add(d->drafts_rejected, verified - accepted);
    td_metric_add(d->sides_accepted, beside);
    td_metric_add(d->sides_rejected, part->sides - beside);
}

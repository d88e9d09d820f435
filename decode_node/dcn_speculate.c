/* Speculation: what each choice drafts for the step being made, how much of it the step verifies,
 * and what came of it. Nothing here decides a token (I1): a draft is accepted iff it is what would
 * have been drawn. */
#include "decode_node/dcn_node.h"

#include "common/base/td_base.h"
#include "common/base/td_log.h"

#define ACCEPTANCE_PRIOR 0.5 /* of a drafter that has found something to say */

td_status_t dcn_speculate_open(dcn_choice_t *c)
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
    status = td_draft_create((td_drafter_t)w->drafter, &config, &c->draft);
    if (status == TD_ERR_INVALID) { /* a newer router's: without it the answer is the same */
        TD_LOG_WARN("drafter not known here", "req=%s drafter=%u", w->request_id, w->drafter);
        c->draft = NULL;
        return TD_OK;
    }
    if (status == TD_OK) {
        td_draft_append(c->draft, w->prompt, w->prompt_tokens, false);
    }
    return status;
}

void dcn_speculate_token(dcn_choice_t *c, uint32_t token)
{
    if (c->draft != NULL) {
        td_draft_append(c->draft, &token, 1, true);
    }
}

/* More than the output may still have would be drawn in vain: its last token needs no draft. */
static uint32_t propose(dcn_choice_t *c)
{
    const td_msg_work_t *w = &c->ticket->work;
    const uint32_t k = TD_MIN(w->k_max, w->max_tokens - c->token_count - 1);

    return c->draft == NULL ? 0 : td_draft_propose(c->draft, k, c->drafts);
}

void dcn_speculate_plan(dcn_node_t *d)
{
    dcn_batch_t *b = &d->batch;
    td_spec_offer_t offers[DCN_BATCH_ROWS_MAX];
    uint32_t count = 0;
    uint32_t rows = 0;
    uint32_t at = 0;

    for (uint32_t i = 0; i < b->part_count; i++) {
        dcn_choice_t *c = b->parts[i].choice;
        rows += b->parts[i].rows;
        if (b->parts[i].samples) {
            const uint32_t proposed = propose(c);
            offers[count++] = (td_spec_offer_t){.alpha = td_acceptance_rate(&c->acceptance),
                                                .proposed = proposed,
                                                .k_min = TD_MIN(c->ticket->work.k_min, proposed)};
        }
    }
    td_spec_plan(&d->step_cost, offers, count, rows - count, d->rows_max);
    for (uint32_t i = 0; i < b->part_count; i++) {
        dcn_choice_t *c = b->parts[i].choice;
        if (b->parts[i].samples) {
            if (offers[at].k == 0 && offers[at].proposed > 0) {
                td_acceptance_pass(&c->acceptance);
            }
            b->parts[i].drafts = offers[at++].k;
        }
    }
}

void dcn_speculate_observe(dcn_node_t *d, dcn_choice_t *c, uint32_t drafted, uint32_t accepted)
{
    if (drafted == 0) {
        return;
    }
    td_acceptance_observe(&c->acceptance, drafted, accepted);
    c->ticket->drafts_accepted += accepted;
    c->ticket->drafts_rejected += drafted - accepted;
    td_metric_add(d->drafts_accepted, accepted);
    td_metric_add(d->drafts_rejected, drafted - accepted);
}

/* Drafting with passes of a model: which drafter a choice has, and the passes themselves. */
#include "decode_node/dcn_draft.h"

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/base/td_log.h"
#include "decode_node/dcn_node.h"

/* --- the loop's thread ------------------------------------------------------------------------ */

dcn_drafter_t *dcn_draft_passes(dcn_node_t *d, uint32_t drafter)
{
    dcn_drafter_t *passes = NULL;

    if (drafter == TD_DRAFTER_DRAFT_MODEL) {
        passes = &d->draft_passes;
    } else if (drafter == TD_DRAFTER_EARLY_EXIT) {
        passes = &d->exit_passes;
    } else if (drafter == TD_DRAFTER_MEDUSA) {
        passes = &d->head_passes;
    }
    return passes == NULL || passes->model == NULL ? NULL : passes;
}

uint32_t dcn_draft_offer(dcn_node_t *d, const dcn_choice_t *c, uint32_t k)
{
    if (dcn_draft_passes(d, c->drafter) == NULL) {
        return 0;
    }
    switch (c->drafter) {
    case TD_DRAFTER_DRAFT_MODEL:
        return dcn_draft_model_offer(d, c, k);
    case TD_DRAFTER_MEDUSA:
        return dcn_draft_medusa_offer(c, k);
    default:
        return k;
    }
}

void dcn_draft_begin(dcn_node_t *d)
{
    dcn_drafter_t *const drafters[] = {&d->draft_passes, &d->exit_passes, &d->head_passes};

    for (size_t i = 0; i < TD_ARRAY_LEN(drafters); i++) {
        drafters[i]->job_count = 0;
        drafters[i]->row_count = 0;
        drafters[i]->fill_rows = 0;
        drafters[i]->pass_count = 0;
    }
    d->chances_used = 0;
}

/* Not where they are made: heartbeats tell of costs during a step. */
void dcn_draft_measure(dcn_node_t *d)
{
    dcn_drafter_t *const drafters[] = {&d->draft_passes, &d->exit_passes, &d->head_passes};

    for (size_t i = 0; i < TD_ARRAY_LEN(drafters); i++) {
        dcn_drafter_t *p = drafters[i];
        for (uint32_t pass = 0; pass < p->pass_count; pass++) {
            td_step_cost_observe(&p->cost, p->passes[pass].rows, p->passes[pass].took_ns);
        }
    }
}

void dcn_draft_prepare(dcn_node_t *d, dcn_part_t *part)
{
    const dcn_choice_t *c = part->choice;

    if (part->drafts > 0 && c->drafter == TD_DRAFTER_DRAFT_MODEL) {
        dcn_draft_model_prepare(d, part);
    } else if (part->drafts > 0 && c->drafter == TD_DRAFTER_EARLY_EXIT) {
        dcn_draft_exit_prepare(d, part);
    } else if (part->drafts > 0 && c->drafter == TD_DRAFTER_MEDUSA) {
        dcn_draft_medusa_prepare(d, part);
    }
    if (part->job != NULL && c->ticket->work.draft_rule == TD_DRAFT_RULE_REJECTION) {
        part->job->chances = d->chances + (size_t)d->chances_used * d->node.info->vocab_size;
        d->chances_used += part->job->k; /* all of a step's drafts are fewer than its rows */
    }
}

td_status_t dcn_draft_need_chances(dcn_node_t *d)
{
    if (d->chances == NULL) {
        d->chances =
            td_calloc_large((size_t)d->rows_max * d->node.info->vocab_size, sizeof(*d->chances));
    }
    return d->chances == NULL ? TD_ERR_NO_MEMORY : TD_OK;
}

dcn_draft_job_t *dcn_draft_add_job(dcn_drafter_t *p, dcn_part_t *part, uint32_t rows)
{
    dcn_draft_job_t *job = NULL;

    if (p->job_count == DCN_DRAFT_JOBS_MAX || rows > p->rows_max - p->row_count) {
        return NULL;
    }
    job = &p->jobs[p->job_count++];
    *job = (dcn_draft_job_t){.part = part};
    part->job = job;
    p->row_count += rows;
    return job;
}

void dcn_draft_settle(dcn_node_t *d, const dcn_part_t *part)
{
    if (part->job != NULL && part->choice->drafter == TD_DRAFTER_DRAFT_MODEL) {
        dcn_draft_model_settle(d, part->job);
    }
}

/* --- the worker's thread ---------------------------------------------------------------------- */

/* Rows of a job in a pass: the context's first, then the draft of the pass before. */
static uint32_t add_rows(const dcn_draft_job_t *job, uint32_t pass, td_model_row_t *rows)
{
    const dcn_choice_t *c = job->part->choice;
    uint32_t count = 0;

    if (!job->goes_on) {
        return 0;
    }
    if (pass > 0) {
        rows[0] = (td_model_row_t){.token = c->drafts[pass - 1],
                                   .position = job->end + pass - 1,
                                   .blocks = job->blocks,
                                   .want_logits = true};
        return 1;
    }
    for (uint32_t at = job->from; at < job->end; at++) {
        rows[count++] = (td_model_row_t){.token = dcn_choice_token(c, at),
                                         .position = at,
                                         .blocks = job->blocks,
                                         .want_logits = job->k > 0 && at + 1 == job->end};
    }
    return count;
}

/* The token that the choice's own noise picks from the drafter's logits: what it would pick from
 * the model's, as far as the two agree. One that the drafter itself finds unlikely is none. */
static bool pick_coupled(const dcn_node_t *d, dcn_choice_t *c, const float *logits,
                         uint32_t position, uint32_t banned, uint32_t *token_out)
{
    td_sampled_t picked;

    if (td_sampler_pick(c->sampler, logits, position, d->node.stop_ids, banned, true, 0, &picked) !=
        TD_OK) {
        return false;
    }
    *token_out = picked.token;
    return picked.logprob >= d->draft_logprob_min;
}

/* Under the rejection rule it is drawn with noise of its own, and its chances are kept. Whether the
 * drafter is sure enough is asked of its best token: by the one drawn, the chances would be
 * others. */
static bool draw_by_chance(const dcn_node_t *d, dcn_draft_job_t *job, const float *logits,
                           uint32_t position, uint32_t banned, uint32_t *token_out)
{
    dcn_choice_t *c = job->part->choice;
    const uint32_t vocab = d->node.info->vocab_size;
    float *chances = job->chances + (size_t)job->count * vocab;
    float most = 0;

    if (td_sampler_draft(c->sampler, logits, position, job->end, d->node.stop_ids, banned,
                         token_out, chances) != TD_OK) {
        return false;
    }
    for (uint32_t i = 0; i < vocab; i++) {
        most = TD_MAX(most, chances[i]);
    }
    return most >= (c->drafter == TD_DRAFTER_MEDUSA ? d->heads_chance_min : d->draft_chance_min);
}

uint32_t dcn_draft_banned(const dcn_node_t *d, const dcn_choice_t *c, uint32_t position)
{
    const td_msg_work_t *w = &c->ticket->work;

    return position - w->prompt_tokens < w->min_tokens ? d->node.stop_count : 0;
}

/* Penalties are those before the drafts; the sampler stays as it is. */
void dcn_draft_pick(dcn_node_t *d, dcn_draft_job_t *job, const float *logits)
{
    dcn_choice_t *c = job->part->choice;
    const uint32_t position = job->end + job->count;
    const uint32_t banned = dcn_draft_banned(d, c, position);
    uint32_t *token = &c->drafts[job->count];

    job->goes_on = false;
    if (job->chances != NULL ? draw_by_chance(d, job, logits, position, banned, token)
                             : pick_coupled(d, c, logits, position, banned, token)) {
        job->count++;
        job->goes_on = job->count < job->k;
    }
}

static td_status_t pass_of(dcn_node_t *d, dcn_drafter_t *p, uint32_t pass, uint32_t *rows_out)
{
    const float *logits = NULL;
    uint32_t rows = 0;

    for (uint32_t i = 0; i < p->job_count; i++) {
        rows += add_rows(&p->jobs[i], pass, d->draft_rows + rows);
    }
    *rows_out = rows;
    if (rows == 0) {
        return TD_OK;
    }
    TD_TRY(
        td_model_forward_first(p->model, p->layers, p->pool_bytes, d->draft_rows, rows, &logits));
    for (uint32_t i = 0; i < p->job_count; i++) {
        dcn_draft_job_t *job = &p->jobs[i];
        if (!job->goes_on) {
            continue;
        }
        job->written = job->end + pass;
        if (job->k == 0) {
            job->goes_on = false;
            continue;
        }
        dcn_draft_pick(d, job, logits);
        logits += td_model_info(p->model)->vocab_size;
    }
    return TD_OK;
}

static void run(dcn_node_t *d, dcn_drafter_t *p)
{
    td_status_t status = TD_OK;
    uint32_t rows = 1;

    for (uint32_t i = 0; i < p->job_count; i++) {
        p->jobs[i].goes_on = true;
        p->jobs[i].written = p->jobs[i].from;
    }
    for (uint32_t pass = 0; status == TD_OK && rows > 0; pass++) {
        const uint64_t started_ns = td_now_ns();
        if (p == &d->head_passes) {
            rows = dcn_draft_medusa_pass(d, p, pass);
        } else {
            status = pass_of(d, p, pass, &rows);
        }
        if (status != TD_OK) { /* the step goes on with the drafts that there are */
            TD_LOG_ERROR("drafting failed", "status=%s rows=%u", td_status_name(status), rows);
        } else if (rows > 0 && p->pass_count < TD_ARRAY_LEN(p->passes)) {
            p->passes[p->pass_count++] =
                (dcn_draft_pass_t){.rows = rows, .took_ns = td_now_ns() - started_ns};
        }
    }
    for (uint32_t i = 0; i < p->job_count; i++) {
        p->jobs[i].part->drafts = p->jobs[i].count;
    }
}

uint64_t dcn_draft_propose(dcn_node_t *d)
{
    const uint64_t started_ns = td_now_ns();

    if (d->draft_passes.job_count + d->exit_passes.job_count + d->head_passes.job_count == 0) {
        return 0;
    }
    run(d, &d->draft_passes);
    run(d, &d->exit_passes);
    run(d, &d->head_passes);
    return td_now_ns() - started_ns;
}

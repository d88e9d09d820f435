/* medusa: heads on the model's own hidden state (common/model/td_heads.h). What a choice needs to
 * draft is the state that selected its newest token, which the pass that verified it has left; so
 * there is no KV, no context to catch up with, and nothing to do for who gave way and is back. */
#include <math.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_log.h"
#include "decode_node/dcn_node.h"

#define NEGLIGIBLE                                                                                 \
    (-18.0f) /* its exponential is below half a unit of a float's last place at 1                  \
              */

static td_status_t take_buffers(dcn_node_t *d)
{
    dcn_medusa_t *m = &d->medusa;
    const td_model_info_t *info = d->node.info;

    m->states = td_calloc((size_t)d->rows_max * info->embed_dim, sizeof(*m->states));
    m->rows = td_calloc(d->rows_max, sizeof(*m->rows));
    m->logits = td_calloc(info->vocab_size, sizeof(*m->logits));
    if (m->states == NULL || m->rows == NULL || m->logits == NULL) {
        TD_LOG_ERROR("no memory for heads", "rows=%u", d->rows_max);
        return TD_ERR_NO_MEMORY;
    }
    for (uint32_t i = 0; i < info->vocab_size; i++) {
        m->logits[i] = -INFINITY; /* stays where the shortlist has no token */
    }
    return TD_OK;
}

td_status_t dcn_draft_medusa_open(dcn_node_t *d)
{
    const char *path = td_config_text(d->node.proc.config, "medusa-heads");
    const uint64_t percent = td_config_u64(d->node.proc.config, "medusa-confidence");
    uint32_t tokens = 0;

    if (path == NULL) {
        return TD_OK;
    }
    TD_TRY(td_heads_load(path, d->node.model, d->rows_max, &d->medusa.heads));
    d->heads_chance_min = (float)percent / 100;
    d->heads_logprob_min = percent == 0 ? -INFINITY : logf((float)percent / 100);
    TD_TRY(take_buffers(d));
    TD_TRY(dcn_tree_open(d));
    (void)td_heads_tokens(d->medusa.heads, &tokens);
    TD_LOG_INFO("heads loaded", "file=%s tokens=%u", path, tokens);
    d->head_passes.model = d->node.model;
    d->head_passes.rows_max = d->rows_max;
    return TD_OK;
}

void dcn_draft_medusa_close(dcn_node_t *d)
{
    td_heads_destroy(d->medusa.heads);
    td_free(d->medusa.states);
    td_free(d->medusa.rows);
    td_free(d->medusa.logits);
    memset(&d->medusa, 0, sizeof(d->medusa));
}

td_status_t dcn_draft_medusa_admit(const dcn_node_t *d, dcn_choice_t *c)
{
    c->hidden = td_calloc(d->node.info->embed_dim, sizeof(*c->hidden));
    return c->hidden == NULL ? TD_ERR_NO_MEMORY : TD_OK;
}

void dcn_draft_medusa_leave(dcn_choice_t *c)
{
    td_free(c->hidden);
    c->hidden = NULL;
}

/* The first token comes from the prefill node, without its state. */
uint32_t dcn_draft_medusa_offer(const dcn_choice_t *c, uint32_t k)
{
    return c->has_hidden ? k : 0;
}

void dcn_draft_medusa_prepare(dcn_node_t *d, dcn_part_t *part)
{
    const dcn_choice_t *c = part->choice;
    dcn_draft_job_t *job = dcn_draft_add_job(&d->head_passes, part, 1);

    if (job == NULL) {
        part->drafts = 0;
        return;
    }
    job->end = c->ticket->work.prompt_tokens + c->token_count;
    job->from = job->end - 1;
    job->k = part->drafts;
    job->k_min = c->ticket->work.k_min;
}

/* --- the worker's thread ---------------------------------------------------------------------- */

void dcn_draft_medusa_keep(const dcn_node_t *d, dcn_choice_t *c, uint32_t logit_row)
{
    const size_t dim = d->node.info->embed_dim;

    if (c->hidden != NULL) {
        memcpy(c->hidden, td_model_hidden(d->node.model) + logit_row * dim,
               dim * sizeof(*c->hidden));
        c->has_hidden = true;
    }
}

/* The token that a chain ends with so far, or so many before it. */
static uint32_t token_before(const dcn_draft_job_t *job, uint32_t back)
{
    const dcn_choice_t *c = job->part->choice;

    return back < job->count ? c->drafts[job->count - 1 - back]
                             : dcn_choice_token(c, job->end - 1 - (back - job->count));
}

static uint32_t add_rows(dcn_node_t *d, dcn_drafter_t *p, uint32_t pass)
{
    const size_t dim = d->node.info->embed_dim;
    uint32_t rows = 0;

    for (uint32_t i = 0; i < p->job_count; i++) {
        const dcn_draft_job_t *job = &p->jobs[i];
        float *state = d->medusa.states + i * dim;
        if (!job->goes_on) {
            continue;
        }
        if (pass == 0) {
            memcpy(state, job->part->choice->hidden, dim * sizeof(*state));
        }
        d->medusa.rows[rows++] = (td_heads_row_t){
            .state = state, .newest = token_before(job, 0), .before = token_before(job, 1)};
    }
    return rows;
}

/* The logarithm of the sum of exponentials; terms that add nothing to a float are left out. */
static float log_sum_of(const float *logits, uint32_t count, float *most_out)
{
    float most = logits[0];
    float sum = 0;

    for (uint32_t i = 1; i < count; i++) {
        most = logits[i] > most ? logits[i] : most;
    }
    for (uint32_t i = 0; i < count; i++) {
        if (logits[i] - most > NEGLIGIBLE) {
            sum += expf(logits[i] - most);
        }
    }
    *most_out = most;
    return most + logf(sum);
}

/* The likeliest under the choice's own noise is the draft, the one behind it may stand beside it.
 */
static bool pick_coupled(const dcn_node_t *d, dcn_draft_job_t *job, const float *logits,
                         float logit_min)
{
    dcn_choice_t *c = job->part->choice;
    const uint32_t position = job->end + job->count;
    uint32_t count = 0;
    const uint32_t *tokens = td_heads_tokens(d->medusa.heads, &count);
    td_candidates_t best;

    if (td_sampler_candidates(c->sampler, tokens, logits, count, position, d->node.stop_ids,
                              dcn_draft_banned(d, c, position), TD_CANDIDATES_MAX,
                              &best) != TD_OK ||
        best.logits[0] < logit_min) {
        return false;
    }
    c->drafts[job->count] = best.tokens[0];
    job->places[job->count++] =
        best.count < 2
            ? (dcn_place_t){.gap_class = DCN_GAP_CLASSES - 1}
            : (dcn_place_t){.second = best.tokens[1],
                            .has_second = true,
                            .gap_class = dcn_tree_gap_class(best.scores[0] - best.scores[1])};
    return true;
}

/* A place whose likeliest token isn't likely enough is the chain's end, without a look at each of
 * its tokens. What isn't finite is for the sampler to refuse. */
static void pick(dcn_node_t *d, dcn_draft_job_t *job, const float *logits)
{
    uint32_t count = 0;
    const uint32_t *tokens = td_heads_tokens(d->medusa.heads, &count);
    float logit_min = -INFINITY;
    float most = 0;

    job->goes_on = false;
    job->passes++;
    if (d->heads_logprob_min > -INFINITY) {
        logit_min = d->heads_logprob_min + log_sum_of(logits, count, &most);
        if (most < logit_min) {
            return;
        }
    }
    if (job->chances == NULL) {
        job->goes_on = pick_coupled(d, job, logits, logit_min) && job->count < job->k &&
                       (job->count < job->k_min || dcn_tree_goes_on(d, job));
        return;
    }
    for (uint32_t i = 0; i < count; i++) {
        d->medusa.logits[tokens[i]] = logits[i];
    }
    dcn_draft_pick(d, job, d->medusa.logits);
}

uint32_t dcn_draft_medusa_pass(dcn_node_t *d, dcn_drafter_t *p, uint32_t pass)
{
    const uint32_t rows = add_rows(d, p, pass);
    const float *logits = NULL;
    uint32_t count = 0;

    if (rows == 0) { /* also where there are no heads */
        return 0;
    }
    (void)td_heads_tokens(d->medusa.heads, &count);
    td_heads_step(d->medusa.heads, d->medusa.rows, rows, &logits);
    for (uint32_t i = 0; i < p->job_count; i++) {
        if (!p->jobs[i].goes_on) {
            continue;
        }
        pick(d, &p->jobs[i], logits);
        logits += count;
    }
    return rows;
}

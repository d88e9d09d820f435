#include "common/spec/td_spec_cost.h"

#include <stdbool.h>

#include "common/base/td_base.h"

#define ROW_COST_PRIOR 0.25 /* of one row's step, for each further row */
#define COST_MEMORY 0.9     /* of the old mean */
#define COST_FADES 0.999    /* half in some 700 steps */
#define HITS_MEMORY 0.9     /* of what was before, for each step that tried */
#define PRIOR_TRIALS 2.0    /* what the prior counts for */
#define PASS_MEMORY 0.97    /* some 30 steps, and a choice is tried again */

double td_spec_expected_tokens(double alpha, uint32_t k)
{
    double power = 1;
    double sum = 1;

    for (uint32_t i = 0; i < k; i++) { /* the geometric sum, also for alpha = 1 */
        power *= alpha;
        sum += power;
    }
    return sum;
}

/* --- what a step takes ------------------------------------------------------------------------ */

void td_step_cost_observe(td_step_cost_t *c, uint32_t rows, uint64_t ns)
{
    double *mean = &c->ns[TD_MIN(rows, TD_STEP_COST_ROWS_MAX)];

    if (*mean == 0) {
        *mean = (double)ns;
        c->measured++;
    } else {
        *mean = *mean * COST_MEMORY + (double)ns * (1 - COST_MEMORY);
    }
}

double td_step_cost_ns(const td_step_cost_t *c, uint32_t rows)
{
    const uint32_t at = TD_MIN(rows, TD_STEP_COST_ROWS_MAX);
    uint32_t below = at;
    uint32_t above = at;

    if (c->measured == 0) {
        return 1 + ROW_COST_PRIOR * (rows - 1.0);
    }
    while (below > 0 && c->ns[below] == 0) {
        below--;
    }
    while (above < TD_STEP_COST_ROWS_MAX && c->ns[above] == 0) {
        above++;
    }
    if (below == at) {
        return c->ns[at];
    }
    if (below > 0 && c->ns[above] > 0) {
        const double share = (double)(at - below) / (above - below);
        return c->ns[below] + share * (c->ns[above] - c->ns[below]);
    }
    below = below > 0 ? below : above; /* the one that is there, and the prior's slope from it */
    return c->ns[below] * (1 + ROW_COST_PRIOR * (at - 1.0)) / (1 + ROW_COST_PRIOR * (below - 1.0));
}

void td_step_cost_forget(td_step_cost_t *c)
{
    for (uint32_t i = 0; i <= TD_STEP_COST_ROWS_MAX; i++) {
        c->ns[i] *= COST_FADES;
    }
}

/* --- what drafts give ------------------------------------------------------------------------- */

void td_acceptance_init(td_acceptance_t *a, double prior)
{
    *a = (td_acceptance_t){.prior = prior, .hits = prior * PRIOR_TRIALS, .trials = PRIOR_TRIALS};
}

void td_acceptance_observe(td_acceptance_t *a, uint32_t drafted, uint32_t accepted)
{
    a->hits = a->hits * HITS_MEMORY + accepted;
    a->trials = a->trials * HITS_MEMORY + accepted + (accepted < drafted ? 1 : 0);
}

void td_acceptance_pass(td_acceptance_t *a)
{
    a->hits = a->hits * PASS_MEMORY + a->prior * PRIOR_TRIALS * (1 - PASS_MEMORY);
    a->trials = a->trials * PASS_MEMORY + PRIOR_TRIALS * (1 - PASS_MEMORY);
}

double td_acceptance_rate(const td_acceptance_t *a)
{
    return a->hits / a->trials;
}

/* --- the plan --------------------------------------------------------------------------------- */

/* The offer of which one draft more gives the most tokens in the step's time, and that ratio. */
static td_spec_offer_t *best_offer(td_spec_offer_t *offers, uint32_t count, double tokens,
                                   double ns, double *ratio_out)
{
    td_spec_offer_t *best = NULL;

    for (uint32_t i = 0; i < count; i++) {
        td_spec_offer_t *o = &offers[i];
        const double more =
            td_spec_expected_tokens(o->alpha, o->k + 1) - td_spec_expected_tokens(o->alpha, o->k);
        const double ratio = (tokens + more) / (ns + o->draft_ns);
        if (o->k < o->proposed && (best == NULL || ratio > *ratio_out)) {
            *ratio_out = ratio;
            best = o;
        }
    }
    return best;
}

void td_spec_plan(const td_step_cost_t *cost, td_spec_offer_t *offers, uint32_t count,
                  uint32_t other_rows, uint32_t rows_max)
{
    uint32_t rows = other_rows + count;
    double tokens = count;
    double draft_ns = 0;

    for (uint32_t i = 0; i < count; i++) {
        td_spec_offer_t *o = &offers[i];
        o->k = rows < rows_max ? TD_MIN(o->k_min, rows_max - rows) : 0;
        rows += o->k;
        tokens += td_spec_expected_tokens(o->alpha, o->k) - 1;
        draft_ns += o->k * o->draft_ns;
    }
    while (rows < rows_max) {
        double ratio = 0;
        td_spec_offer_t *best =
            best_offer(offers, count, tokens, td_step_cost_ns(cost, rows + 1) + draft_ns, &ratio);
        if (best == NULL || ratio * (td_step_cost_ns(cost, rows) + draft_ns) <= tokens) {
            return;
        }
        tokens += td_spec_expected_tokens(best->alpha, best->k + 1) -
                  td_spec_expected_tokens(best->alpha, best->k);
        draft_ns += best->draft_ns;
        best->k++;
        rows++;
    }
}

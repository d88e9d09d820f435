#include "common/spec/td_spec_cost.h"

#include "common/base/td_base.h"

#define ROW_COST_PRIOR 0.15 /* of one row's step, for each further row */
#define COST_DOWN 0.5       /* of the way to a shorter time, and to a longer one: */
#define COST_UP 0.02        /* nine in ten times are longer than the estimate */
#define SEEN_MAX 64u
#define STEPS_FOR_EACH_SEEN 32u /* that an entry is believed for */
#define CONFIRMED 0.8           /* of what an entry said: no better than that */
#define FOLLOWED_MAX 1.25       /* times what it said; more is noise until it is seen again */
#define TRIALS_MIN 1e-3

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

static bool is_believed(const td_step_cost_t *c, uint32_t rows)
{
    return c->seen[rows] > 0 &&
           c->steps - c->last[rows] <= (uint64_t)STEPS_FOR_EACH_SEEN * c->seen[rows];
}

void td_step_cost_observe(td_step_cost_t *c, uint32_t rows, uint64_t ns)
{
    const uint32_t at = TD_MIN(rows, TD_STEP_COST_ROWS_MAX);
    const double time = (double)ns;

    c->steps++;
    if (c->seen[at] == 0) {
        c->ns[at] = time;
        c->seen[at] = 1;
    } else if (!is_believed(c, at)) {
        /* Tried again: whatever came of it, it is asked half as often from now on. */
        c->ns[at] = TD_MIN(time, c->ns[at] * FOLLOWED_MAX);
        c->seen[at] = (uint8_t)TD_MIN(c->seen[at] * 2u, SEEN_MAX);
    } else {
        c->ns[at] += (time - c->ns[at]) * (time < c->ns[at] ? COST_DOWN : COST_UP);
        c->seen[at] = (uint8_t)TD_MIN(c->seen[at] + 1u, SEEN_MAX);
    }
    c->last[at] = c->steps;
}

static double by_prior(uint32_t rows)
{
    return 1 + ROW_COST_PRIOR * (rows - 1.0);
}

/* Between two entries a line; before the first and behind the last the prior's slope from it. */
static void fill(double *out, uint32_t below, uint32_t above, uint32_t rows_max)
{
    const uint32_t end = above == 0 ? rows_max : above - 1;

    for (uint32_t r = below + 1; r <= end; r++) {
        if (below > 0 && above > 0) {
            out[r] = out[below] + (out[above] - out[below]) * (r - below) / (above - below);
        } else {
            const uint32_t from = below > 0 ? below : above;
            out[r] = (from > 0 ? out[from] / by_prior(from) : 1) * by_prior(r);
        }
    }
}

void td_step_cost_curve(const td_step_cost_t *c, uint32_t rows_max, double *out)
{
    double least = 0;
    uint32_t below = 0;

    TD_ASSERT(rows_max <= TD_STEP_COST_ROWS_MAX);
    /* Fewer rows never take longer: of a time and a shorter one of more rows, one is wrong, and
     * wrong ones are too long. */
    for (uint32_t r = TD_STEP_COST_ROWS_MAX; r > 0; r--) {
        const bool believed = is_believed(c, r);
        least = !believed ? least : least == 0 || c->ns[r] < least ? c->ns[r] : least;
        if (r <= rows_max) {
            out[r] = believed ? least : 0;
        }
    }
    for (uint32_t r = 1; r <= rows_max; r++) {
        if (out[r] > 0) {
            /* Nor do rows ever take more than in proportion: passes could be made one by one. */
            out[r] = below > 0 ? TD_MIN(out[r], out[below] * r / below) : out[r];
            fill(out, below, r, rows_max);
            below = r;
        }
    }
    fill(out, below, 0, rows_max);
}

void td_step_cost_pass(td_step_cost_t *c)
{
    c->steps++;
}

double td_step_cost_ns(const td_step_cost_t *c, uint32_t rows)
{
    double curve[TD_STEP_COST_ROWS_MAX + 1];
    const uint32_t at = TD_MIN(rows, TD_STEP_COST_ROWS_MAX);

    td_step_cost_curve(c, at, curve);
    return curve[at];
}

/* --- what drafts give ------------------------------------------------------------------------- */

static void forget(td_acceptance_t *a, double memory)
{
    a->hits *= memory;
    a->trials *= memory;
    if (a->trials < TRIALS_MIN) { /* no numbers that are slow to compute with */
        *a = (td_acceptance_t){0};
    }
}

void td_acceptance_observe(td_acceptance_t *a, uint32_t drafted, uint32_t accepted, double memory)
{
    forget(a, memory);
    a->hits += accepted;
    a->trials += accepted + (accepted < drafted ? 1 : 0);
}

void td_acceptance_pass(td_acceptance_t *a, double memory)
{
    forget(a, memory);
}

double td_acceptance_rate(const td_acceptance_t *a, double prior, double prior_trials)
{
    return (a->hits + prior * prior_trials) / (a->trials + prior_trials);
}

/* --- the plan --------------------------------------------------------------------------------- */

typedef struct plan {
    double curve[TD_STEP_COST_ROWS_MAX + 1];
    uint32_t rows;    /* at most: with every draft that is planned */
    double rows_mean; /* without those that drafters drop themselves */
    double tokens;    /* expected */
    double draft_ns;
} plan_t;

/* Of rows in the mean: between two numbers of rows a line. */
static double cost_of(const plan_t *p, double rows)
{
    const uint32_t below = (uint32_t)rows;
    const uint32_t above = TD_MIN(below + 1, TD_STEP_COST_ROWS_MAX);

    return p->curve[below] + (p->curve[above] - p->curve[below]) * (rows - below);
}

/* The choice of which one draft more gives the most tokens in the step's time. */
static td_spec_offer_t *next_of(const plan_t *p, td_spec_offer_t *offers, uint32_t count)
{
    td_spec_offer_t *best = NULL;
    double most = 0;

    for (uint32_t i = 0; i < count; i++) {
        td_spec_offer_t *o = &offers[i];
        const double ratio = (p->tokens + o->gain) / (cost_of(p, p->rows_mean + 1 - o->dropped) +
                                                      p->draft_ns + o->draft_ns);
        if (o->k < o->proposed && o->gain > 0 && ratio > most) {
            most = ratio;
            best = o;
        }
    }
    return best;
}

static void take(plan_t *p, td_spec_offer_t *o)
{
    p->tokens += o->gain;
    p->draft_ns += o->draft_ns;
    p->rows++;
    p->rows_mean += 1 - o->dropped;
    o->k++;
    o->gain *= o->alpha;
}

/* Every choice without drafts, then those that were asked for. */
static void begin(plan_t *p, td_spec_offer_t *offers, uint32_t count, uint32_t other_rows,
                  uint32_t rows_max)
{
    p->rows = other_rows + count;
    p->rows_mean = p->rows;
    p->tokens = count;
    p->draft_ns = 0;
    for (uint32_t i = 0; i < count; i++) {
        td_spec_offer_t *o = &offers[i];
        o->k = 0;
        o->gain = o->alpha;
        while (o->k < TD_MIN(o->k_min, o->proposed) && p->rows < rows_max) {
            take(p, o);
        }
    }
}

void td_spec_plan(const td_step_cost_t *cost, td_spec_offer_t *offers, uint32_t count,
                  uint32_t other_rows, uint32_t rows_max)
{
    plan_t p = {0};
    td_spec_offer_t *next = NULL;
    uint32_t worth = 0; /* drafts of the best beginning */
    double most = 0;

    rows_max = TD_MIN(rows_max, TD_STEP_COST_ROWS_MAX);
    begin(&p, offers, count, other_rows, rows_max);
    if (count == 0 || p.rows >= rows_max) {
        return;
    }
    td_step_cost_curve(cost, rows_max, p.curve);
    most = TD_SPEC_GAIN_MIN * p.tokens / (cost_of(&p, p.rows_mean) + p.draft_ns);
    for (uint32_t n = 1; p.rows < rows_max && (next = next_of(&p, offers, count)) != NULL; n++) {
        take(&p, next);
        if (p.tokens / (cost_of(&p, p.rows_mean) + p.draft_ns) > most) {
            most = p.tokens / (cost_of(&p, p.rows_mean) + p.draft_ns);
            worth = n;
        }
    }
    begin(&p, offers, count, other_rows, rows_max); /* once more, as far as it was worth it */
    for (uint32_t n = 0; n < worth && (next = next_of(&p, offers, count)) != NULL; n++) {
        take(&p, next);
    }
}

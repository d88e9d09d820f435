/* td_spec_cost.h - how many drafted tokens a step should verify: what they are expected to give,
 * and what the step takes longer for them. Nothing here changes a token; it changes time only.
 * Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023), eq.
 * 1; Liu et al., "Optimizing Speculative Decoding for Serving Large Language Models Using Goodput"
 * (2024). Threads: owner. Nothing allocates. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

/** Tokens a step gives when each of k drafts is accepted with probability alpha, and the rest is
 * void after the first that is not: (1 - alpha^(k+1)) / (1 - alpha). alpha in [0, 1]. */
double td_spec_expected_tokens(double alpha, uint32_t k);

/** How long a step takes by its rows. Measured times of a machine that others use too are mostly
 * too long, never too short: each entry stays near the shortest of late. What was seen rarely, or
 * not for many steps, is not believed any more, so that a wrong first measurement can't last; then,
 * and between and beyond entries, there are lines, and more rows never take less.
 * Zeroed memory knows nothing yet. */
#define TD_STEP_COST_ROWS_MAX 256u
typedef struct td_step_cost {
    double ns[TD_STEP_COST_ROWS_MAX + 1];     /* by rows; valid where seen > 0 */
    uint64_t last[TD_STEP_COST_ROWS_MAX + 1]; /* step that it was last seen in */
    uint8_t seen[TD_STEP_COST_ROWS_MAX + 1];  /* times, up to a limit */
    uint64_t steps;
} td_step_cost_t;

void td_step_cost_observe(td_step_cost_t *cost, uint32_t rows, uint64_t ns);
/** A step in which nothing of the kind was done: what is known of it grows old. */
void td_step_cost_pass(td_step_cost_t *cost);
/** Cost of one step. Units: as below. rows > 0. */
double td_step_cost_ns(const td_step_cost_t *cost, uint32_t rows);
/** Costs of all steps of 1 to rows_max rows. Units: ns, in proportion only as long as nothing was
 * measured. Shape: out [rows_max + 1]; [0] is unused. rows_max <= TD_STEP_COST_ROWS_MAX. */
void td_step_cost_curve(const td_step_cost_t *cost, uint32_t rows_max, double *out);

/** How often drafts are accepted. Knows nothing when zeroed, forgets what is long past, and where
 * nothing is tried forgets too: a text that can't be guessed now can be later. */
typedef struct td_acceptance {
    double hits;
    double trials;
} td_acceptance_t;

/** Of drafted tokens, from the first, so many were accepted; drafted > 0. memory: what the past
 * counts for, for each trial; in (0, 1). */
void td_acceptance_observe(td_acceptance_t *acceptance, uint32_t drafted, uint32_t accepted,
                           double memory);
/** A step in which nothing was tried although there was something. */
void td_acceptance_pass(td_acceptance_t *acceptance, double memory);
/** The rate where a prior counts like so many trials. */
double td_acceptance_rate(const td_acceptance_t *acceptance, double prior, double prior_trials);

#define TD_SPEC_GAIN_MIN 1.02

/** One choice of a step. */
typedef struct td_spec_offer {
    double alpha;      /* probability that a draft is accepted when those before it were */
    uint32_t proposed; /* drafts there are */
    uint32_t k_min;    /* verified whatever it costs, as far as there are rows */
    double draft_ns;   /* to draft one of them; 0: they are there */
    double dropped;    /* part of them that its drafter drops itself, so no row; in [0, 1) */
    uint32_t k;        /* out */
    double gain;       /* of the next draft; scratch */
} td_spec_offer_t;

/** Chooses every k so that the step gives the most tokens in its time: of all beginnings of the
 * drafts in order, the likeliest first, the best one. Drafts that nobody asked for must be worth
 * TD_SPEC_GAIN_MIN: less is lost in what they cost besides the pass.
 * Shape: offers [count], a row each besides their drafts; other_rows: rows that give no tokens. */
void td_spec_plan(const td_step_cost_t *cost, td_spec_offer_t *offers, uint32_t count,
                  uint32_t other_rows, uint32_t rows_max);

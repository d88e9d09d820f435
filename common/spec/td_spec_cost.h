/* td_spec_cost.h - how many drafted tokens a step should verify: what they are expected to give,
 * and what the step takes longer for them. Nothing here changes a token; it changes time only.
 * Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023), eq.
 * 1; Liu et al., "Optimizing Speculative Decoding for Serving Large Language Models Using Goodput"
 * (2024). Threads: owner. Nothing allocates. */
#pragma once

#include <stdint.h>

/** Tokens a step gives when each of k drafts is accepted with probability alpha, and the rest is
 * void after the first that is not: (1 - alpha^(k+1)) / (1 - alpha). alpha in [0, 1]. */
double td_spec_expected_tokens(double alpha, uint32_t k);

/** How long a step takes by its rows: what was measured, and between and beyond that a line.
 * Zeroed memory knows nothing yet. */
#define TD_STEP_COST_ROWS_MAX 256u
typedef struct td_step_cost {
    double ns[TD_STEP_COST_ROWS_MAX + 1]; /* by rows; 0: not measured */
    uint32_t measured;                    /* entries that are */
} td_step_cost_t;

void td_step_cost_observe(td_step_cost_t *cost, uint32_t rows, uint64_t ns);
/** Units: ns, in proportion only as long as nothing was measured. rows > 0. */
double td_step_cost_ns(const td_step_cost_t *cost, uint32_t rows);
/** A step in which nothing was measured because it seemed too dear: what is known counts a little
 * less, so that what one odd measurement has put off is tried again. */
void td_step_cost_forget(td_step_cost_t *cost);

/** How often a choice's drafts are accepted. Starts with a prior, forgets what is long past, and
 * when nothing is tried comes back to the prior: a text that can't be guessed now can be later. */
typedef struct td_acceptance {
    double prior;
    double hits;
    double trials;
} td_acceptance_t;

void td_acceptance_init(td_acceptance_t *acceptance, double prior);
/** Of drafted tokens, from the first, so many were accepted; drafted > 0. */
void td_acceptance_observe(td_acceptance_t *acceptance, uint32_t drafted, uint32_t accepted);
/** A step in which nothing was tried although there was something. */
void td_acceptance_pass(td_acceptance_t *acceptance);
double td_acceptance_rate(const td_acceptance_t *acceptance);

/** One choice of a step. */
typedef struct td_spec_offer {
    double alpha;      /* probability that a draft is accepted when those before it were */
    uint32_t proposed; /* drafts there are */
    uint32_t k_min;    /* verified whatever it costs; <= proposed */
    double draft_ns;   /* to draft one of them; 0: they are there, or it is not known yet */
    uint32_t k;        /* out */
} td_spec_offer_t;

/** Chooses every k so that the step gives the most tokens in its time, drafting and verifying:
 * draft after draft, the one that pays most first, for as long as the ratio rises and rows are
 * left. Shape: offers [count], a row each besides their drafts; other_rows: rows that give no
 * tokens. */
void td_spec_plan(const td_step_cost_t *cost, td_spec_offer_t *offers, uint32_t count,
                  uint32_t other_rows, uint32_t rows_max);

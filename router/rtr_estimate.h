/* rtr_estimate.h - what something will take, learned from what it took: nanoseconds regressed over
 * RTR_FEATURES quantities, forgetting slowly. Nothing is known from constants: before the first
 * observation an estimate says so, and a new node begins with what its peers took (the prior).
 * Design: router/DESIGN.md, "Estimates". Threads: any (plain values). */
#pragma once

#include <stdint.h>

#define RTR_FEATURES 4u

/** Zero-initialise. */
typedef struct rtr_estimate {
    double xx[RTR_FEATURES]
             [RTR_FEATURES]; /* sums over observations, each 1 % less after the next */
    double xy[RTR_FEATURES];
    double weights[RTR_FEATURES]; /* ns for one of each quantity, none below 0 */
    double n;                     /* observations that count */
    double spread_ns;             /* mean distance of observations from predictions */
    double error;                 /* mean relative error of predictions, 0..1 */
    uint64_t outliers;            /* observations that counted only as far as was credible */
} rtr_estimate_t;

/** Learns that quantities x took ns. An observation much farther off than most is moved to the
 * farthest credible time: one of them changes little, many of them are believed.
 * prior: what a node without observations is taken for, NULL for none.
 * Shape: x [RTR_FEATURES], all >= 0. Of the first one a single observation is enough; the others
 * need several. */
void rtr_estimate_observe(rtr_estimate_t *estimate, const rtr_estimate_t *prior, const double *x,
                          double ns);
/** Predicted ns; negative while nothing was observed. Shape: x [RTR_FEATURES]. Inline: it is asked
 * for every node and prompt. */
static inline double rtr_estimate_ns(const rtr_estimate_t *estimate, const double *x)
{
    const double *w = estimate->weights;

    if (estimate->n <= 0) {
        return -1;
    }
    return (w[0] * x[0] + w[1] * x[1]) + (w[2] * x[2] + w[3] * x[3]);
}
_Static_assert(RTR_FEATURES == 4, "all quantities are added up");

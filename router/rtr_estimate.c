#include "router/rtr_estimate.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "common/base/td_base.h"

#define FORGET 0.99      /* each observation weighs this much after the next: about 100 count */
#define SMOOTH 0.05      /* of what is told about errors, the newest one's share */
#define CREDIBLE 6.0     /* times the mean distance */
#define CREDIBLE_MIN 0.5 /* of the prediction: what is off by less is never an outlier */
#define JUDGE_MIN 8.0    /* observations before any is called an outlier */
/* Observations that knowledge from elsewhere weighs as many as: that of the peers; and, without
 * peers, that a quantity costs nothing: little for the first one, which gets what is unexplained.
 */
#define PRIOR_PEERS 1.0
#define PRIOR_FIRST 0.001
#define PRIOR_OTHERS 0.03

/* One system of linear equations; quantities that are left out keep weight 0. */
typedef struct system {
    double m[RTR_FEATURES][RTR_FEATURES + 1]; /* the last column is the right side */
    bool in[RTR_FEATURES];
} system_t;

/* Elimination without pivoting: the matrix is positive definite by its diagonal. */
static void solve(system_t *s, double *out)
{
    for (uint32_t i = 0; i < RTR_FEATURES; i++) {
        for (uint32_t j = i + 1; s->in[i] && j < RTR_FEATURES; j++) {
            const double factor = s->in[j] ? s->m[j][i] / s->m[i][i] : 0;
            for (uint32_t k = i; k <= RTR_FEATURES; k++) {
                s->m[j][k] -= factor * s->m[i][k];
            }
        }
    }
    for (uint32_t i = RTR_FEATURES; i-- > 0;) {
        out[i] = s->m[i][RTR_FEATURES];
        for (uint32_t k = i + 1; k < RTR_FEATURES; k++) {
            out[i] -= s->in[k] ? s->m[i][k] * out[k] : 0;
        }
        out[i] = s->in[i] ? out[i] / s->m[i][i] : 0;
    }
}

/* Scaled so that all quantities have a mean square of 1: they differ by many orders. */
static void system_fill(const rtr_estimate_t *e, const rtr_estimate_t *prior, const double *scale,
                        system_t *s)
{
    for (uint32_t i = 0; i < RTR_FEATURES; i++) {
        const double known = prior != NULL ? PRIOR_PEERS : i == 0 ? PRIOR_FIRST : PRIOR_OTHERS;
        for (uint32_t j = 0; j < RTR_FEATURES && s->in[i]; j++) {
            s->m[i][j] = s->in[j] ? e->xx[i][j] / (e->n * scale[i] * scale[j]) : 0;
        }
        if (s->in[i]) {
            s->m[i][i] += known / e->n;
            s->m[i][RTR_FEATURES] = e->xy[i] / (e->n * scale[i]);
            s->m[i][RTR_FEATURES] +=
                prior != NULL ? known / e->n * prior->weights[i] * scale[i] : 0;
        }
    }
}

/* Least squares with no weight below 0: the most negative one is left out until none is. */
static void refit(rtr_estimate_t *e, const rtr_estimate_t *prior)
{
    system_t s = {0};
    double scale[RTR_FEATURES];
    double scaled[RTR_FEATURES] = {0};
    bool again = true;

    for (uint32_t i = 0; i < RTR_FEATURES; i++) {
        scale[i] = sqrt(e->xx[i][i] / e->n);
        s.in[i] = scale[i] > 0;
    }
    while (again) {
        uint32_t worst = 0;
        system_fill(e, prior, scale, &s);
        solve(&s, scaled);
        for (uint32_t i = 1; i < RTR_FEATURES; i++) {
            worst = scaled[i] < scaled[worst] ? i : worst;
        }
        again = scaled[worst] < 0;
        s.in[worst] = s.in[worst] && !again;
    }
    for (uint32_t i = 0; i < RTR_FEATURES; i++) {
        const double unseen = prior != NULL ? prior->weights[i] : 0;
        e->weights[i] = scale[i] > 0 ? scaled[i] / scale[i] : unseen;
    }
}

/* Counts the error of the prediction, and answers how long it credibly took. */
static double judge(rtr_estimate_t *e, const rtr_estimate_t *prior, const double *x, double ns)
{
    const double predicted = rtr_estimate_ns(e->n > 0 || prior == NULL ? e : prior, x);
    double far = 0;
    double off = 0;

    if (predicted < 0) {
        return ns;
    }
    off = ns - predicted;
    far = fmax(CREDIBLE * e->spread_ns, CREDIBLE_MIN * predicted);
    if (ns > 0 || predicted > 0) {
        e->error += SMOOTH * (fabs(off) / fmax(ns, predicted) - e->error);
    }
    if (e->n >= JUDGE_MIN && fabs(off) > far) {
        off = copysign(far, off);
        e->outliers++;
    }
    e->spread_ns += SMOOTH * (fabs(off) - e->spread_ns);
    return fmax(predicted + off, 0);
}

void rtr_estimate_observe(rtr_estimate_t *e, const rtr_estimate_t *prior, const double *x,
                          double ns)
{
    const rtr_estimate_t *known = prior != NULL && prior->n > 0 ? prior : NULL;
    const double credible = judge(e, known, x, ns);

    for (uint32_t i = 0; i < RTR_FEATURES; i++) {
        TD_ASSERT(x[i] >= 0);
        for (uint32_t j = 0; j < RTR_FEATURES; j++) {
            e->xx[i][j] = e->xx[i][j] * FORGET + x[i] * x[j];
        }
        e->xy[i] = e->xy[i] * FORGET + x[i] * credible;
    }
    e->n = e->n * FORGET + 1;
    refit(e, known);
}

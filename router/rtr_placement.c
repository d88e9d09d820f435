#include "router/rtr_placement.h"

#include <math.h>

#include "common/base/td_base.h"

#define FORGET 0.97         /* each observation weighs this much after the next: about 33 count */
#define PRESSURE_WEIGHT 4.0 /* a node that would be full counts as five times as busy */
#define TIE 1e-9

void rtr_rate_observe(rtr_rate_t *rate, uint64_t tokens, uint64_t ns)
{
    double x = (double)tokens;
    double y = (double)ns;

    rate->n = rate->n * FORGET + 1;
    rate->x = rate->x * FORGET + x;
    rate->y = rate->y * FORGET + y;
    rate->xx = rate->xx * FORGET + x * x;
    rate->xy = rate->xy * FORGET + x * y;
}

double rtr_rate_predict(const rtr_rate_t *rate, uint64_t tokens)
{
    double mean_x = 0;
    double mean_y = 0;
    double var = 0;
    double slope = 0;
    double at_zero = 0;

    if (rate->n <= 0) {
        return -1;
    }
    mean_x = rate->x / rate->n;
    mean_y = rate->y / rate->n;
    var = rate->xx / rate->n - mean_x * mean_x;
    if (var > 1e-3 * mean_x * mean_x && var > 0) {
        slope = (rate->xy / rate->n - mean_x * mean_y) / var;
        at_zero = mean_y - slope * mean_x;
    }
    if (slope <= 0 || at_zero < 0) { /* too little spread, or noise: a line through the origin */
        slope = mean_x > 0 ? mean_y / mean_x : 0;
        at_zero = 0;
    }
    return at_zero + slope * (double)tokens;
}

static bool better(double score, double best, double tie_score, double tie_best)
{
    double slack = TIE * fmax(fabs(score), fabs(best));
    if (score < best - slack) {
        return true;
    }
    return score <= best + slack && tie_score < tie_best;
}

/* A node without observations is taken for one like the others: the mean of those that have some.
 */
static double typical_ns(const rtr_prefill_view_t *views, uint32_t count, uint64_t tokens)
{
    double sum = 0;
    uint32_t known = 0;

    for (uint32_t i = 0; i < count; i++) {
        double ns = views[i].allowed ? rtr_rate_predict(views[i].rate, tokens) : -1;
        if (ns >= 0) {
            sum += ns;
            known++;
        }
    }
    return known > 0 ? sum / known : (double)tokens;
}

uint32_t rtr_place_prefill(const rtr_prefill_view_t *views, uint32_t count, uint32_t prompt_tokens,
                           uint32_t granule_tokens, uint32_t turn)
{
    uint32_t best = RTR_PLACE_NONE;
    double best_score = INFINITY;
    double best_ahead = INFINITY;

    for (uint32_t k = 0; k < count; k++) {
        uint32_t i = (turn + k) % count;
        uint32_t match = TD_MIN(views[i].match_tokens, prompt_tokens);
        uint64_t work = views[i].ahead_tokens + TD_MAX(prompt_tokens - match, granule_tokens);
        double score = 0;
        if (!views[i].allowed) {
            continue;
        }
        score = rtr_rate_predict(views[i].rate, work);
        if (score < 0) {
            score = typical_ns(views, count, work);
        }
        if (better(score, best_score, (double)views[i].ahead_tokens, best_ahead)) {
            best = i;
            best_score = score;
            best_ahead = (double)views[i].ahead_tokens;
        }
    }
    return best;
}

uint32_t rtr_place_decode(const rtr_decode_view_t *views, uint32_t count, uint32_t sequences,
                          uint32_t need_blocks, uint32_t turn)
{
    uint32_t best = RTR_PLACE_NONE;
    double best_score = INFINITY;
    double best_match = INFINITY;
    bool best_fits = false;

    for (uint32_t k = 0; k < count; k++) {
        const rtr_decode_view_t *v = &views[(turn + k) % count];
        double total = v->total_blocks > 0 ? (double)v->total_blocks : 1;
        double promised = (double)v->promised + (double)need_blocks;
        double fill = v->total_blocks > 0 ? fmin(promised / total, 1.0) : 0;
        bool fits = v->total_blocks == 0 || (promised <= total && need_blocks <= v->free_blocks);
        double score =
            ((double)v->running + sequences) * (1 + PRESSURE_WEIGHT * fill * fill * fill);
        if (!v->allowed || (best_fits && !fits)) {
            continue;
        }
        if ((fits && !best_fits) ||
            better(score, best_score, -(double)v->match_blocks, best_match)) {
            best = (turn + k) % count;
            best_score = score;
            best_match = -(double)v->match_blocks;
            best_fits = fits;
        }
    }
    return best;
}

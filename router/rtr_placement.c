#include "router/rtr_placement.h"

#include <math.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"

/* Of the square of a node's load above the mean, in times of the whole prompt: next to nothing for
 * a few percent, which the queues see to, and more than any match soon after. */
#define LOAD_WEIGHT 8.0
#define PRESSURE_WEIGHT 4.0 /* a node that would be full counts as five times as busy */
#define PULL_GUESS 0.5
#define LATELY_HALVES_MAX 40    /* then it is nothing */
#define DECODE_MATCH_WEIGHT 0.1 /* a prompt that is all there is worth so much of the time */
#define TIE 1e-9

static const char *const policy_names[RTR_POLICIES] = {"kv_aware", "local_aware", "least_loaded",
                                                       "round_robin", "random"};

const char *rtr_policy_name(rtr_policy_t policy)
{
    TD_ASSERT(policy < RTR_POLICIES);
    return policy_names[policy];
}

td_status_t rtr_policy_parse(const char *name, rtr_policy_t *out)
{
    for (uint32_t i = 0; i < RTR_POLICIES; i++) {
        if (strcmp(name, policy_names[i]) == 0) {
            *out = (rtr_policy_t)i;
            return TD_OK;
        }
    }
    return TD_ERR_INVALID;
}

/* --- work of prefill nodes -------------------------------------------------------------------- */

rtr_work_t rtr_work_of(uint32_t prompt_tokens, uint32_t cached_tokens, uint32_t pulled_tokens)
{
    const uint64_t cached = TD_MIN(cached_tokens, prompt_tokens);
    const uint64_t own = prompt_tokens - cached;

    return (rtr_work_t){.prompts = 1,
                        .tokens = own,
                        .pairs = own * cached + own * (own + 1) / 2,
                        .pulled = pulled_tokens};
}

static void work_features(const rtr_work_t *work, double *out)
{
    out[RTR_WORK_TOKENS] =
        (double)work->tokens; /* first: the one that a single observation tells of */
    out[RTR_WORK_PROMPTS] = (double)work->prompts;
    out[RTR_WORK_PAIRS] = (double)work->pairs;
    out[RTR_WORK_PULLED] = (double)work->pulled;
}

/* Before a pull was seen it is taken to cost half of computing: little enough to be tried where a
 * queue is long, and not so little that prompts leave the node that has them. */
static void assume_pulling(rtr_estimate_t *e)
{
    if (e->xx[RTR_WORK_PULLED][RTR_WORK_PULLED] <= 0 && e->weights[RTR_WORK_PULLED] <= 0) {
        e->weights[RTR_WORK_PULLED] = PULL_GUESS * e->weights[0];
    }
}

void rtr_work_observe(rtr_estimate_t *estimate, const rtr_estimate_t *prior, const rtr_work_t *work,
                      double ns)
{
    double x[RTR_FEATURES];

    work_features(work, x);
    rtr_estimate_observe(estimate, prior, x, ns);
    assume_pulling(estimate);
}

double rtr_work_ns(const rtr_estimate_t *estimate, const rtr_work_t *work)
{
    double x[RTR_FEATURES];

    work_features(work, x);
    return rtr_estimate_ns(estimate, x);
}

double rtr_backlog_lately(const rtr_backlog_t *b, uint64_t now_ns)
{
    const double age =
        now_ns > b->lately_ns ? (double)(now_ns - b->lately_ns) * (1 / RTR_LATELY_HALF_NS) : 0;
    uint32_t halves = 0;

    if (age >= LATELY_HALVES_MAX) {
        return 0;
    }
    halves = (uint32_t)age;
    /* Halves are exact, and between two of them it falls in a line. */
    return b->lately * (1 - (age - halves) / 2) / (double)(1ull << halves);
}

void rtr_backlog_add(rtr_backlog_t *b, const rtr_work_t *work, uint64_t now_ns)
{
    if (b->work.prompts == 0) {
        b->since_ns = now_ns;
    }
    b->work.prompts += work->prompts;
    b->work.tokens += work->tokens;
    b->work.pairs += work->pairs;
    b->work.pulled += work->pulled;
    b->lately = rtr_backlog_lately(b, now_ns) + (double)work->tokens;
    b->lately_ns = now_ns;
}

void rtr_backlog_remove(rtr_backlog_t *b, const rtr_work_t *work)
{
    TD_ASSERT(b->work.prompts >= work->prompts && b->work.tokens >= work->tokens);
    b->work.prompts -= work->prompts;
    b->work.tokens -= work->tokens;
    b->work.pairs -= work->pairs;
    b->work.pulled -= work->pulled;
}

uint64_t rtr_backlog_end(rtr_backlog_t *b, uint64_t start_ns, uint64_t now_ns)
{
    const uint64_t from = TD_MAX(b->since_ns, start_ns);

    b->since_ns = now_ns;
    return now_ns > from ? now_ns - from : 0;
}

/* --- placing ---------------------------------------------------------------------------------- */

static bool better(double score, double best, double tie_score, double tie_best)
{
    const double larger = fabs(score) > fabs(best) ? fabs(score) : fabs(best);
    const double slack = TIE * larger;
    if (score < best - slack) {
        return true;
    }
    return score <= best + slack && tie_score < tie_best;
}

/* The index after this one, round and round. */
static uint32_t next_of(uint32_t at, uint32_t count)
{
    return at + 1 < count ? at + 1 : 0;
}

/* While nothing at all is known a token is the unit of time: shares are then still right. */
static const rtr_estimate_t unknown = {.weights = {1, 0, 0, PULL_GUESS}, .n = 1};

static const rtr_estimate_t *known_of(const rtr_estimate_t *own, const rtr_estimate_t *typical)
{
    if (own != NULL && own->n > 0) {
        return own;
    }
    return typical != NULL && typical->n > 0 ? typical : &unknown;
}

/* What is under way takes this much longer; its first prompt has been at it for some time. A node
 * that should have ended by now is taken to need as long again as it is late: one that is stuck
 * must not look idle. */
static double queue_ns(const rtr_estimate_t *known, const rtr_prefill_view_t *v, uint64_t now_ns)
{
    const rtr_backlog_t *b = v->backlog;
    double left = 0;

    if (v->others != NULL && v->others->prompts > 0) {
        left = rtr_work_ns(known, v->others); /* as old as a heartbeat */
    }
    if (b->work.prompts == 0) {
        return left;
    }
    left += rtr_work_ns(known, &b->work);
    if (known != &unknown && now_ns > b->since_ns) {
        left -= (double)(now_ns - b->since_ns);
    }
    return fabs(left);
}

/* What is the same for all nodes: the prompt computed whole, and with all that can be pulled. */
typedef struct common {
    uint32_t most; /* tokens that may come from a cache */
    uint32_t pool;
    double whole[RTR_FEATURES];
    double pulled[RTR_FEATURES]; /* without the pulling */
} common_t;

static void work_fill(uint32_t prompt_tokens, uint32_t cached_tokens, double *out)
{
    const rtr_work_t work = rtr_work_of(prompt_tokens, cached_tokens, 0);
    work_features(&work, out);
}

static uint32_t cacheable_tokens(const rtr_place_ask_t *ask)
{
    const uint32_t before_last = ask->prompt_tokens > 0 ? ask->prompt_tokens - 1 : 0;

    TD_ASSERT(ask->granule_tokens > 0);
    return before_last / ask->granule_tokens * ask->granule_tokens;
}

static common_t common_of(const rtr_place_ask_t *ask)
{
    common_t c = {.most = cacheable_tokens(ask)};

    c.pool = ask->policy == RTR_POLICY_KV_AWARE ? TD_MIN(ask->pool_tokens, c.most) : 0;
    work_fill(ask->prompt_tokens, 0, c.whole);
    work_fill(ask->prompt_tokens, c.pool, c.pulled);
    return c;
}

/* Of a prompt on one node: it computes what it hasn't, or pulls first, whichever is faster. */
typedef struct plan {
    uint32_t own;    /* tokens */
    uint32_t pulled; /* tokens */
    double ns;
    double kept_ns; /* computing the pulled tokens: what the copy takes from others */
} plan_t;

static plan_t plan_of(const rtr_place_ask_t *ask, const common_t *c, const rtr_prefill_view_t *v,
                      const rtr_estimate_t *known)
{
    plan_t plan = {.own = TD_MIN(v->match_tokens, c->most)};
    double x[RTR_FEATURES];
    double with_pull = 0;

    if (plan.own == 0) {
        plan.ns = rtr_estimate_ns(known, c->whole);
    } else {
        work_fill(ask->prompt_tokens, plan.own, x);
        plan.ns = rtr_estimate_ns(known, x);
    }
    if (c->pool <= plan.own) {
        return plan;
    }
    with_pull = rtr_estimate_ns(known, c->pulled);
    if (with_pull + known->weights[RTR_WORK_PULLED] * (c->pool - plan.own) < plan.ns) {
        plan.kept_ns = known->weights[0] * (c->pool - plan.own);
        plan.pulled = c->pool - plan.own;
        plan.ns = with_pull + known->weights[RTR_WORK_PULLED] * plan.pulled;
    }
    return plan;
}

static double mean_lately(const rtr_prefill_view_t *views, uint32_t count)
{
    double sum = 0;
    uint32_t allowed = 0;

    for (uint32_t i = 0; i < count; i++) {
        sum += views[i].allowed ? views[i].lately : 0;
        allowed += views[i].allowed;
    }
    return allowed > 0 ? sum / allowed : 0;
}

/* What a node's load above the mean costs it. */
static double above_ns(const common_t *c, const rtr_prefill_view_t *v, double mean,
                       const rtr_estimate_t *known)
{
    double above = 0;

    if (mean <= 0 || v->lately <= mean) {
        return 0;
    }
    above = v->lately / mean - 1;
    return LOAD_WEIGHT * above * above * rtr_estimate_ns(known, c->whole);
}

/* mean: of what all got lately. */
static double prefill_score(const rtr_place_ask_t *ask, const common_t *c,
                            const rtr_prefill_view_t *v, double mean)
{
    const rtr_estimate_t *known = known_of(v->estimate, ask->typical);
    const double queue = queue_ns(known, v, ask->now_ns);
    plan_t plan = {0};

    if (ask->policy == RTR_POLICY_LEAST_LOADED) {
        return queue;
    }
    plan = plan_of(ask, c, v, known);
    return queue + plan.ns + ask->keep_local * plan.kept_ns + above_ns(c, v, mean, known);
}

/* The nth of the views that are allowed, round and round. first: of the first view. */
static uint32_t nth_allowed(const bool *first, size_t stride, uint32_t count, uint64_t nth)
{
    const uint8_t *at = (const uint8_t *)first;
    uint32_t allowed = 0;
    uint64_t left = 0;

    for (uint32_t i = 0; i < count; i++) {
        allowed += *(const bool *)(at + i * stride);
    }
    left = allowed > 0 ? nth % allowed : 0;
    for (uint32_t i = 0; i < count && allowed > 0; i++) {
        if (*(const bool *)(at + i * stride) && left-- == 0) {
            return i;
        }
    }
    return RTR_PLACE_NONE;
}

/* Policies that look at nothing: the number that they go by. */
static bool is_blind(const rtr_place_ask_t *ask, uint64_t *nth_out)
{
    *nth_out = ask->policy == RTR_POLICY_RANDOM ? ask->draw : ask->turn;
    return ask->policy == RTR_POLICY_RANDOM || ask->policy == RTR_POLICY_ROUND_ROBIN;
}

static rtr_prefill_choice_t prefill_choice(const rtr_place_ask_t *ask,
                                           const rtr_prefill_view_t *views, uint32_t at)
{
    const rtr_estimate_t *known = known_of(views[at].estimate, ask->typical);
    const common_t common = common_of(ask);
    const plan_t plan = plan_of(ask, &common, &views[at], known);
    const double ttft = plan.ns + queue_ns(known, &views[at], ask->now_ns);

    return (rtr_prefill_choice_t){
        .node = at,
        .work = rtr_work_of(ask->prompt_tokens, plan.own + plan.pulled, plan.pulled),
        .cached_tokens = plan.own + plan.pulled,
        .ttft_ns = known == &unknown ? -1 : ttft};
}

static uint32_t best_prefill(const rtr_place_ask_t *ask, const rtr_prefill_view_t *views,
                             uint32_t count)
{
    const double mean = mean_lately(views, count);
    const common_t common = common_of(ask);
    uint32_t best = RTR_PLACE_NONE;
    double best_score = INFINITY;
    double best_lately = INFINITY;
    uint32_t i = count > 0 ? (uint32_t)(ask->turn % count) : 0;

    for (uint32_t k = 0; k < count; k++, i = next_of(i, count)) {
        const rtr_prefill_view_t *v = &views[i];
        double score = 0;
        if (!v->allowed) {
            continue;
        }
        score = prefill_score(ask, &common, v, mean);
        if (better(score, best_score, v->lately, best_lately)) {
            best = i;
            best_score = score;
            best_lately = v->lately;
        }
    }
    return best;
}

rtr_prefill_choice_t rtr_place_prefill(const rtr_place_ask_t *ask, const rtr_prefill_view_t *views,
                                       uint32_t count)
{
    uint64_t nth = 0;
    const uint32_t best = is_blind(ask, &nth)
                              ? nth_allowed(&views->allowed, sizeof(*views), count, nth)
                              : best_prefill(ask, views, count);

    if (best == RTR_PLACE_NONE) {
        return (rtr_prefill_choice_t){.node = best, .ttft_ns = -1};
    }
    return prefill_choice(ask, views, best);
}

void rtr_explain_prefill(const rtr_place_ask_t *ask, const rtr_prefill_view_t *views,
                         uint32_t count, const uint32_t *nodes, uint32_t node_count,
                         rtr_prefill_explained_t *out)
{
    const double mean = mean_lately(views, count);
    const common_t common = common_of(ask);

    for (uint32_t i = 0; i < node_count; i++) {
        const rtr_prefill_view_t *v = &views[nodes[i]];
        const rtr_estimate_t *known = known_of(v->estimate, ask->typical);
        const plan_t plan = plan_of(ask, &common, v, known);
        const double queue = queue_ns(known, v, ask->now_ns);
        out[i] = (rtr_prefill_explained_t){.score_ns = prefill_score(ask, &common, v, mean),
                                           .queue_ns = queue,
                                           .ttft_ns = known == &unknown ? -1 : plan.ns + queue,
                                           .own_tokens = plan.own,
                                           .pulled_tokens = plan.pulled};
    }
}

static void tbt_features(uint32_t sequences, uint64_t blocks, double *out)
{
    out[RTR_TBT_STEPS] = 1; /* a step: first, since a single observation tells of it */
    out[RTR_TBT_SEQUENCES] = (double)sequences;
    out[RTR_TBT_BLOCKS] = (double)blocks;
    out[3] = 0;
}

void rtr_tbt_observe(rtr_estimate_t *estimate, const rtr_estimate_t *prior, uint32_t sequences,
                     uint64_t blocks, double ns)
{
    double x[RTR_FEATURES];

    tbt_features(sequences, blocks, x);
    rtr_estimate_observe(estimate, prior, x, ns);
}

double rtr_tbt_ns(const rtr_estimate_t *estimate, uint32_t sequences, uint64_t blocks)
{
    double x[RTR_FEATURES];

    tbt_features(sequences, blocks, x);
    return rtr_estimate_ns(estimate, x);
}

static bool decode_fits(const rtr_place_ask_t *ask, const rtr_decode_view_t *v)
{
    return v->total_blocks == 0 || (v->promised + ask->need_blocks <= v->total_blocks &&
                                    ask->need_blocks <= v->free_blocks);
}

/* Without observations a step is taken to cost as much as there are sequences in it. */
static double decode_tbt(const rtr_place_ask_t *ask, const rtr_decode_view_t *v)
{
    const uint64_t blocks = v->promised + ask->need_blocks;
    const uint32_t sequences = v->running + ask->sequences;

    if (v->tbt != NULL && v->tbt->n > 0) {
        return rtr_tbt_ns(v->tbt, sequences, blocks);
    }
    return ask->typical_tbt != NULL ? rtr_tbt_ns(ask->typical_tbt, sequences, blocks) : -1;
}

static double decode_score(const rtr_place_ask_t *ask, const rtr_decode_view_t *v)
{
    const double total = v->total_blocks;
    const double promised = (double)(v->promised + ask->need_blocks);
    const double fill = total <= 0 ? 0 : promised < total ? promised / total : 1;
    const double sequences = (double)v->running + ask->sequences;
    const double tbt = decode_tbt(ask, v);
    double there = 0; /* of the blocks, what needn't come */

    if (ask->policy == RTR_POLICY_LEAST_LOADED) {
        return sequences;
    }
    if (v->match_blocks > 0) {
        there = v->match_blocks < ask->need_blocks ? (double)v->match_blocks / ask->need_blocks : 1;
    }
    return (tbt >= 0 ? tbt : sequences) * (1 + PRESSURE_WEIGHT * fill * fill * fill) *
           (1 - DECODE_MATCH_WEIGHT * there);
}

static uint32_t best_decode(const rtr_place_ask_t *ask, const rtr_decode_view_t *views,
                            uint32_t count)
{
    uint32_t best = RTR_PLACE_NONE;
    bool best_fits = false;
    double best_score = INFINITY;
    uint32_t i = count > 0 ? (uint32_t)(ask->turn % count) : 0;

    for (uint32_t k = 0; k < count; k++, i = next_of(i, count)) {
        const rtr_decode_view_t *v = &views[i];
        const bool fits = decode_fits(ask, v);
        double score = 0;
        if (!v->allowed || (best_fits && !fits)) {
            continue;
        }
        score = decode_score(ask, v);
        if (best == RTR_PLACE_NONE || (fits && !best_fits) || better(score, best_score, 0, 0)) {
            best = i;
            best_fits = fits;
            best_score = score;
        }
    }
    return best;
}

rtr_decode_choice_t rtr_place_decode(const rtr_place_ask_t *ask, const rtr_decode_view_t *views,
                                     uint32_t count)
{
    uint64_t nth = 0;
    const uint32_t best = is_blind(ask, &nth)
                              ? nth_allowed(&views->allowed, sizeof(*views), count, nth)
                              : best_decode(ask, views, count);

    if (best == RTR_PLACE_NONE) {
        return (rtr_decode_choice_t){.node = best, .tbt_ns = -1};
    }
    return (rtr_decode_choice_t){.node = best,
                                 .fits = decode_fits(ask, &views[best]),
                                 .tbt_ns = decode_tbt(ask, &views[best])};
}

/* --- prompts that a decode node computes --------------------------------------------------------
 */

/* Times the best node's time between tokens: no reason to crowd there. */
#define SELF_TBT_SLACK 1.25
#define SELF_GAIN 1.1      /* equal times: it saves a prefill node's time, and the hand-over */
#define SELF_TRY_EVERY 64u /* what was slow is tried again, */
#define SELF_TRY_COST 3.0  /* where it was not far slower */

rtr_work_t rtr_self_work(const rtr_place_ask_t *ask, const rtr_decode_view_t *view)
{
    const uint64_t match = (uint64_t)view->match_blocks * ask->granule_tokens;

    return rtr_work_of(ask->prompt_tokens, (uint32_t)TD_MIN(match, cacheable_tokens(ask)), 0);
}

/* What the rest of the prompt takes a node, alone; negative: not known, or too much. */
static double self_ns(const rtr_place_ask_t *ask, const rtr_decode_view_t *v,
                      const rtr_work_t *work)
{
    const rtr_estimate_t *known = known_of(v->self, ask->typical_self);

    if (work->tokens > ask->self_tokens_max) {
        return -1;
    }
    if (known == &unknown) {
        known = known_of(NULL, ask->typical); /* until it is tried: as fast as prefill nodes */
    }
    return known == &unknown ? -1 : rtr_work_ns(known, work);
}

rtr_self_choice_t rtr_place_self(const rtr_place_ask_t *ask, const rtr_decode_view_t *views,
                                 uint32_t count, const rtr_prefill_choice_t *prefill,
                                 const rtr_decode_choice_t *decode)
{
    rtr_self_choice_t best = {.node = RTR_PLACE_NONE};
    const double slack = ask->draw % SELF_TRY_EVERY == 0 ? SELF_TRY_COST : SELF_GAIN;
    double best_cost = prefill->ttft_ns * slack;
    uint64_t nth = 0;

    if (ask->self_tokens_max == 0 || prefill->ttft_ns < 0 || is_blind(ask, &nth)) {
        return best;
    }
    for (uint32_t i = 0; i < count; i++) {
        const rtr_decode_view_t *v = &views[i];
        rtr_work_t work = {0};
        double alone = 0;
        double cost = 0;
        if (!v->allowed || !decode_fits(ask, v) ||
            (decode->tbt_ns >= 0 && decode_tbt(ask, v) > SELF_TBT_SLACK * decode->tbt_ns)) {
            continue;
        }
        work = rtr_self_work(ask, v);
        alone = self_ns(ask, v, &work);
        cost = alone * (1 + (double)v->running); /* who generates there waits as long */
        if (alone >= 0 && cost <= best_cost) {
            best = (rtr_self_choice_t){.node = i, .work = work, .ttft_ns = alone};
            best_cost = cost;
        }
    }
    return best;
}

rtr_decode_explained_t rtr_explain_decode(const rtr_place_ask_t *ask, const rtr_decode_view_t *v)
{
    return (rtr_decode_explained_t){
        .score = decode_score(ask, v), .tbt_ns = decode_tbt(ask, v), .fits = decode_fits(ask, v)};
}

/* --- admission -------------------------------------------------------------------------------- */

static uint32_t retry_after_s(double ns)
{
    const double s = ceil(ns / (double)TD_NS_PER_S);
    return (uint32_t)fmin(fmax(s, 1), RTR_RETRY_AFTER_S_MAX);
}

rtr_admission_t rtr_admit(const rtr_admit_ask_t *ask, uint32_t *retry_after_s_out)
{
    const double ttft_max = (double)ask->slo.ttft_ms * (double)TD_NS_PER_MS;
    const double tbt_max = (double)ask->slo.tbt_ms * (double)TD_NS_PER_MS;

    *retry_after_s_out = 0;
    if (ttft_max > 0 && ask->ttft_ns > ttft_max) {
        *retry_after_s_out = retry_after_s(ask->ttft_ns - ttft_max);
        return RTR_REFUSE_TTFT;
    }
    if (tbt_max > 0 && ask->tbt_ns > tbt_max) {
        /* As many of the sequences must end as are too many; they end evenly over an answer. */
        *retry_after_s_out = retry_after_s(fmax(ask->answer_ns, 0) * (1 - tbt_max / ask->tbt_ns));
        return RTR_REFUSE_TBT;
    }
    return RTR_ADMIT;
}

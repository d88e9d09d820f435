#include "common/model/td_sampler.h"

#include <float.h>
#include <math.h>
#include <string.h>
#include <xxhash.h>

#include "common/base/td_base.h"
#include "common/base/td_log.h"
#include "common/model/td_sampler_math_internal.h"

#define TEMPERATURE_MAX 100.0f
#define PENALTY_MAX 2.0f
#define REPETITION_PENALTY_MAX 10.0f
#define LOGIT_BIAS_HIGH 1e9f
#define MAX_LANES 16u
#define LN2 0.6931471805599453
/* The order key of an entry is cut into digits; one level of the selection looks at one digit. */
#define DIGIT_BITS 11u
#define DIGIT_COUNT (1u << DIGIT_BITS)

typedef struct token_state {
    uint32_t generated; /* times generated */
    bool seen;          /* in the prompt or generated: listed in sampler->seen */
} token_state_t;

struct td_sampler {
    td_sampling_t params;  /* logit_bias is our copy */
    td_logit_bias_t *bias; /* owned; [params.logit_bias_count] */
    float *work;           /* owned; [vocab_size] a pick's logits on their way to scores */
    token_state_t *states; /* owned; [vocab_size]; NULL while no penalty is set */
    uint32_t *seen;        /* owned; [vocab_size], the first seen_count are the distinct tokens */
    uint32_t seen_count;
    uint32_t vocab_size;
    const uint32_t *ids; /* borrowed, during a pick: the tokens of work's entries, ascending; NULL:
                            entry i is token i */
    uint32_t count;      /* of those entries */
    double log_min_p;    /* -infinity = off */
    double sums[DIGIT_COUNT];    /* scratch: weight of the entries with each digit */
    uint32_t tally[DIGIT_COUNT]; /* scratch: their count */
};

void td_sampling_init(td_sampling_t *params)
{
    *params = (td_sampling_t){.temperature = 1.0f, .top_p = 1.0f, .repetition_penalty = 1.0f};
}

static bool in_range(float value, float low, float high)
{
    return value >= low && value <= high; /* false for NaN */
}

/* Names the first parameter that is out of its range; NULL when all are fine. */
static const char *bad_parameter(const td_sampling_t *params, uint32_t vocab_size)
{
    if (!in_range(params->temperature, 0.0f, TEMPERATURE_MAX)) {
        return "temperature";
    }
    if (!(params->top_p > 0.0f && params->top_p <= 1.0f)) {
        return "top_p";
    }
    if (!(params->min_p >= 0.0f && params->min_p < 1.0f)) {
        return "min_p";
    }
    if (!in_range(params->presence_penalty, -PENALTY_MAX, PENALTY_MAX)) {
        return "presence_penalty";
    }
    if (!in_range(params->frequency_penalty, -PENALTY_MAX, PENALTY_MAX)) {
        return "frequency_penalty";
    }
    if (!(params->repetition_penalty > 0.0f &&
          params->repetition_penalty <= REPETITION_PENALTY_MAX)) {
        return "repetition_penalty";
    }
    if (params->logit_bias_count > TD_LOGIT_BIAS_MAX) {
        return "logit_bias_count";
    }
    for (uint32_t i = 0; i < params->logit_bias_count; i++) {
        float bias = params->logit_bias[i].bias;
        if (params->logit_bias[i].token >= vocab_size || !(bias <= LOGIT_BIAS_HIGH)) {
            return "logit_bias";
        }
    }
    return vocab_size == 0 ? "vocab_size" : NULL;
}

static bool has_penalty(const td_sampling_t *params)
{
    return params->presence_penalty != 0.0f || params->frequency_penalty != 0.0f ||
           params->repetition_penalty != 1.0f;
}

static void mark_seen(td_sampler_t *sampler, uint32_t token)
{
    if (!sampler->states[token].seen) {
        sampler->states[token].seen = true;
        sampler->seen[sampler->seen_count++] = token;
    }
}

td_status_t td_sampler_create(const td_sampling_t *params, uint32_t vocab_size,
                              const uint32_t *prompt, size_t prompt_tokens, td_sampler_t **out)
{
    td_sampler_t *sampler = NULL;
    const char *bad = NULL;
    size_t bad_at = 0;

    TD_ASSERT(params != NULL && out != NULL);
    bad = bad_parameter(params, vocab_size);
    while (bad == NULL && bad_at < prompt_tokens && prompt[bad_at] < vocab_size) {
        bad_at++;
    }
    if (bad != NULL || bad_at < prompt_tokens) {
        TD_LOG_DEBUG("sampling parameter refused", "parameter=%s", bad == NULL ? "prompt" : bad);
        return TD_ERR_INVALID;
    }
    sampler = td_calloc(1, sizeof(*sampler));
    if (sampler == NULL) {
        goto err;
    }
    sampler->params = *params;
    sampler->vocab_size = vocab_size;
    sampler->log_min_p = params->min_p > 0 ? td_sampler_log((double)params->min_p) : -INFINITY;
    sampler->bias = td_calloc(params->logit_bias_count, sizeof(*sampler->bias));
    sampler->work = td_calloc(vocab_size, sizeof(*sampler->work));
    if (sampler->bias == NULL || sampler->work == NULL) {
        goto err_destroy;
    }
    if (params->logit_bias_count > 0) {
        memcpy(sampler->bias, params->logit_bias,
               params->logit_bias_count * sizeof(*sampler->bias));
    }
    sampler->params.logit_bias = sampler->bias;
    if (has_penalty(params)) {
        sampler->states = td_calloc(vocab_size, sizeof(*sampler->states));
        sampler->seen = td_calloc(vocab_size, sizeof(*sampler->seen));
        if (sampler->states == NULL || sampler->seen == NULL) {
            goto err_destroy;
        }
        for (size_t i = 0; i < prompt_tokens; i++) {
            mark_seen(sampler, prompt[i]);
        }
    }
    *out = sampler;
    return TD_OK;

err_destroy:
    td_sampler_destroy(sampler);
err:
    TD_LOG_ERROR("sampler not created", "status=no_memory vocab_size=%u", vocab_size);
    return TD_ERR_NO_MEMORY;
}

void td_sampler_destroy(td_sampler_t *sampler)
{
    if (sampler == NULL) {
        return;
    }
    td_free(sampler->bias);
    td_free(sampler->work);
    td_free(sampler->states);
    td_free(sampler->seen);
    td_free(sampler);
}

void td_sampler_accept(td_sampler_t *sampler, uint32_t token)
{
    TD_ASSERT(token < sampler->vocab_size);
    if (sampler->states != NULL) {
        mark_seen(sampler, token);
        sampler->states[token].generated++;
    }
}

/* --- the model's own distribution --------------------------------------------------------------
 */

/* The largest entry, in as many chains as the processor takes vectors of: NaN is passed over. */
static float max_of(const float *row, uint32_t count)
{
    float lanes[MAX_LANES];
    uint32_t i = 0;

    for (uint32_t l = 0; l < MAX_LANES; l++) {
        lanes[l] = -INFINITY;
    }
    for (; i + MAX_LANES <= count; i += MAX_LANES) {
        for (uint32_t l = 0; l < MAX_LANES; l++) {
            lanes[l] = row[i + l] > lanes[l] ? row[i + l] : lanes[l];
        }
    }
    for (; i < count; i++) {
        lanes[0] = row[i] > lanes[0] ? row[i] : lanes[0];
    }
    for (uint32_t l = 1; l < MAX_LANES; l++) {
        lanes[0] = lanes[l] > lanes[0] ? lanes[l] : lanes[0];
    }
    return lanes[0];
}

/* Is there NaN or +infinity? */
static bool has_bad(const float *row, uint32_t count)
{
    uint32_t bad[MAX_LANES] = {0};
    uint32_t any = 0;
    uint32_t i = 0;

    for (; i + MAX_LANES <= count; i += MAX_LANES) {
        for (uint32_t l = 0; l < MAX_LANES; l++) {
            bad[l] |= row[i + l] < INFINITY ? 0u : 1u;
        }
    }
    for (; i < count; i++) {
        any |= row[i] < INFINITY ? 0u : 1u;
    }
    for (uint32_t l = 0; l < MAX_LANES; l++) {
        any |= bad[l];
    }
    return any != 0;
}

/* Fails on a row that no model in order can give: NaN, +infinity or nothing finite. */
static td_status_t row_max(const float *logits, uint32_t count, float *out)
{
    const float max = max_of(logits, count);

    if (has_bad(logits, count) || max == -INFINITY) {
        TD_LOG_ERROR("logits are broken", "vocab_size=%u expected=\"no NaN or +inf, one finite\"",
                     count);
        return TD_ERR_INTERNAL;
    }
    *out = max;
    return TD_OK;
}

/* Keeps the best `limit` entries, highest first; a later id never passes an equal one. */
static void top_insert(td_sampled_t *out, uint32_t limit, uint32_t token, float logit)
{
    uint32_t at = out->top_count;

    if (at == limit) {
        if (logit <= out->top[at - 1].logprob) {
            return;
        }
        at--;
    } else {
        out->top_count++;
    }
    while (at > 0 && out->top[at - 1].logprob < logit) {
        out->top[at] = out->top[at - 1];
        at--;
    }
    out->top[at] = (td_logprob_t){.token = token, .logprob = logit};
}

static void fill_logprobs(const float *logits, uint32_t count, float max, uint32_t top_logprobs,
                          td_sampled_t *out)
{
    double sum = 0;
    double log_sum = 0;

    for (uint32_t i = 0; i < count; i++) {
        sum += td_sampler_exp((double)logits[i] - (double)max);
        if (top_logprobs > 0 && logits[i] > -INFINITY) {
            top_insert(out, top_logprobs, i, logits[i]);
        }
    }
    log_sum = td_sampler_log(sum);
    for (uint32_t i = 0; i < out->top_count; i++) {
        out->top[i].logprob = (float)((double)out->top[i].logprob - (double)max - log_sum);
    }
    out->logprob = (float)((double)logits[out->token] - (double)max - log_sum);
}

/* --- bias and penalties --------------------------------------------------------------------------
 */

/* A token's entry; NULL: it has none. */
static float *entry_of(const td_sampler_t *sampler, uint32_t token)
{
    uint32_t low = 0;
    uint32_t high = sampler->count;

    if (sampler->ids == NULL) {
        return token < sampler->count ? &sampler->work[token] : NULL;
    }
    while (low < high) {
        const uint32_t middle = low + (high - low) / 2;
        if (sampler->ids[middle] < token) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low < sampler->count && sampler->ids[low] == token ? &sampler->work[low] : NULL;
}

static uint32_t token_of(const td_sampler_t *sampler, uint32_t entry)
{
    return sampler->ids == NULL ? entry : sampler->ids[entry];
}

static void apply_bias_and_penalties(td_sampler_t *sampler)
{
    const td_sampling_t *params = &sampler->params;

    for (uint32_t i = 0; i < params->logit_bias_count; i++) {
        float *logit = entry_of(sampler, sampler->bias[i].token);
        if (logit != NULL) {
            *logit = TD_MIN(*logit + sampler->bias[i].bias, FLT_MAX);
        }
    }
    for (uint32_t i = 0; i < sampler->seen_count; i++) {
        uint32_t token = sampler->seen[i];
        uint32_t generated = sampler->states[token].generated;
        float *entry = entry_of(sampler, token);
        float logit = entry == NULL ? 0 : *entry;
        if (entry == NULL) {
            continue;
        }
        logit = logit > 0 ? logit / params->repetition_penalty : logit * params->repetition_penalty;
        logit -= params->frequency_penalty * (float)generated;
        logit -= generated > 0 ? params->presence_penalty : 0.0f;
        *entry = TD_MIN(logit, FLT_MAX); /* a tiny repetition penalty must not give inf */
    }
}

uint32_t td_logits_argmax(const float *logits, uint32_t count)
{
    const float max = max_of(logits, count);
    uint32_t at = 0;

    while (at < count && logits[at] != max) {
        at++;
    }
    return at < count ? at : 0; /* nothing but NaN has no best */
}

/* --- filters
 * --------------------------------------------------------------------------------------- */

/* A key that orders the entries: by value, and the lower id above the higher among equals. All
 * keys of a row differ, so every filter keeps exactly the keys from some threshold upwards. */
static uint64_t order_key(float value, uint32_t id)
{
    uint32_t bits = 0;

    memcpy(&bits, &value, sizeof(bits));
    bits = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
    return (uint64_t)bits << 32 | (UINT32_MAX - id);
}

/* Finds the key of the first entry, from the highest down, with which the count reaches count_goal
 * (by_weight false) or the weight e^value reaches weight_goal. Looks at keys >= floor_key only. One
 * pass for each digit until the entry stands alone. */
static uint64_t select_threshold(td_sampler_t *sampler, uint64_t floor_key, bool by_weight,
                                 uint32_t count_goal, double weight_goal)
{
    uint64_t prefix = 0; /* the digits found so far */
    uint32_t prefix_shift = 64;
    uint32_t count = 0; /* of what lies above the prefix */
    double weight = 0;

    while (prefix_shift > 0) {
        uint32_t bits = TD_MIN(DIGIT_BITS, prefix_shift);
        uint32_t shift = prefix_shift - bits;
        uint32_t mask = (1u << bits) - 1;
        uint32_t lowest = 0;
        bool found = false;
        memset(sampler->tally, 0, sizeof(sampler->tally));
        memset(sampler->sums, 0, sizeof(sampler->sums));
        for (uint32_t i = 0; i < sampler->count; i++) {
            uint64_t key = order_key(sampler->work[i], i);
            uint32_t digit = (uint32_t)(key >> shift) & mask;
            if (key < floor_key || (prefix_shift < 64 && key >> prefix_shift != prefix)) {
                continue;
            }
            sampler->tally[digit]++;
            if (by_weight) {
                sampler->sums[digit] += td_sampler_exp((double)sampler->work[i]);
            }
        }
        for (uint32_t n = mask + 1; n > 0 && !found; n--) {
            uint32_t digit = n - 1;
            if (sampler->tally[digit] == 0) {
                continue;
            }
            lowest = digit;
            /* Sums of parts round otherwise than the whole: then the lowest part is the one. */
            found = by_weight ? weight + sampler->sums[digit] >= weight_goal
                              : sampler->tally[digit] >= count_goal - count;
            if (!found) {
                count += sampler->tally[digit];
                weight += sampler->sums[digit];
            }
        }
        if (!found) { /* take the lowest part as a whole, and its lowest entry below */
            count -= sampler->tally[lowest];
            weight -= sampler->sums[lowest];
        }
        prefix = prefix << bits | lowest;
        prefix_shift = shift;
        if (sampler->tally[lowest] == 1) {
            break;
        }
    }
    /* A lone entry is the only key >= prefix inside its digit. */
    return prefix_shift == 0 ? prefix : prefix << prefix_shift;
}

/* The lowest order key that top_k, top_p and min_p let through. work holds (logit - max) / T. */
static uint64_t filter_threshold(td_sampler_t *sampler)
{
    const td_sampling_t *params = &sampler->params;
    uint64_t threshold = order_key(-INFINITY, 0) + 1; /* above every entry of -infinity */

    if (params->top_k > 0 && params->top_k < sampler->count) {
        uint64_t key = select_threshold(sampler, 0, false, params->top_k, 0);
        threshold = TD_MAX(threshold, key);
    }
    if (params->top_p < 1.0f) {
        double total = 0;
        uint64_t key = 0;
        for (uint32_t i = 0; i < sampler->count; i++) {
            if (order_key(sampler->work[i], i) >= threshold) {
                total += td_sampler_exp((double)sampler->work[i]);
            }
        }
        key = select_threshold(sampler, threshold, true, 0, (double)params->top_p * total);
        threshold = TD_MAX(threshold, key);
    }
    return threshold;
}

/* --- noise
 * ------------------------------------------------------------------------------------------- */

/* Source: Stafford's variant 13 of the MurmurHash3 finaliser, as in SplitMix64. */
static uint64_t mix(uint64_t x)
{
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* What a position's noise is for. Streams of different purposes are independent. */
#define NOISE_TOKEN 0u   /* the token itself */
#define NOISE_JUDGE 1u   /* whether a draft is accepted */
#define NOISE_RESIDUE 2u /* the token in place of one that was not */
#define NOISE_DRAFT 3u   /* drafts: a stream for each place that drafting began at, above this */

static uint64_t noise_key(const td_sampling_t *params, uint32_t position, uint64_t purpose)
{
    const uint64_t seed = purpose == NOISE_TOKEN ? params->seed : params->judge_seed;
    uint64_t key = mix(seed + 0x9e3779b97f4a7c15u);

    key = mix(key ^ ((uint64_t)params->choice << 32 | position));
    key = purpose == NOISE_TOKEN ? key : mix(key + purpose * 0xd1342543de82ef95u);
    return mix(key + 0x2545f4914f6cdd1du);
}

uint64_t td_sampler_token_key(const td_sampling_t *params, uint32_t position)
{
    return noise_key(params, position, NOISE_TOKEN);
}

/* SplitMix64's stream that starts at the key, at its id-th place. */
static uint64_t noise_bits(uint64_t key, uint32_t id)
{
    return mix(key + ((uint64_t)id + 1) * 0x9e3779b97f4a7c15u);
}

/* In (0, 1) with 52 bits, never 0 or 1. */
static double unit(uint64_t bits)
{
    return ((double)(bits >> 12) + 0.5) * 0x1p-52;
}

static double gumbel(uint64_t bits)
{
    return -td_sampler_log(-td_sampler_log(unit(bits)));
}

/* No less than gumbel(bits): -log(u) >= 1 - u, and 1 - u > 2^-(n + 1) where u starts with n ones.
 * The margin covers rounding. */
static double gumbel_bound(uint64_t bits)
{
    uint64_t zeros = ~bits | 1u << 11;

    return (double)(__builtin_clzll(zeros) + 1) * LN2 + 1e-9;
}

/* Of the entries that the filters keep; max_at is one of them. Answers the best one's. */
static uint32_t gumbel_argmax(const td_sampler_t *sampler, uint32_t max_at, uint64_t threshold,
                              double floor, uint64_t key, double *score_out)
{
    uint32_t best = max_at;
    double best_score =
        (double)sampler->work[max_at] + gumbel(noise_bits(key, token_of(sampler, max_at)));

    for (uint32_t i = 0; i < sampler->count; i++) {
        double value = (double)sampler->work[i];
        uint64_t bits = noise_bits(key, token_of(sampler, i));
        double score = 0;
        /* Few can pass the best so far, so few need logarithms. */
        if (value + gumbel_bound(bits) < best_score || i == max_at ||
            order_key(sampler->work[i], i) < threshold || value < floor) {
            continue;
        }
        score = value + gumbel(bits);
        if (score > best_score || (score == best_score && i < best)) {
            best = i;
            best_score = score;
        }
    }
    *score_out = best_score;
    return best;
}

/* --- drawing -------------------------------------------------------------------------------------
 */

/* The scores of one row: work holds (logit - max) / temperature, or logits at temperature 0. */
typedef struct scores {
    uint32_t max_at;    /* the best entry */
    uint64_t threshold; /* order keys below it are filtered out */
    float row_max;      /* of the logits as they came */
} scores_t;

/* Shape: logits [count], of the tokens ids, or of all. */
static td_status_t make_scores_of(td_sampler_t *sampler, const uint32_t *ids, uint32_t count,
                                  const float *logits, const uint32_t *banned,
                                  uint32_t banned_count, scores_t *out)
{
    const float temperature = sampler->params.temperature;
    float work_max = 0;

    sampler->ids = ids;
    sampler->count = count;
    TD_TRY(row_max(logits, count, &out->row_max));
    memcpy(sampler->work, logits, count * sizeof(*logits));
    apply_bias_and_penalties(sampler);
    for (uint32_t i = 0; i < banned_count; i++) {
        float *entry = entry_of(sampler, banned[i]);
        if (entry != NULL) {
            *entry = -INFINITY;
        }
    }
    out->max_at = td_logits_argmax(sampler->work, count);
    work_max = sampler->work[out->max_at];
    if (work_max == -INFINITY) {
        TD_LOG_ERROR("no token may be picked", "vocab_size=%u banned=%u", count, banned_count);
        return TD_ERR_INVALID;
    }
    if (temperature > 0) {
        for (uint32_t i = 0; i < count; i++) {
            /* Subtracting first keeps a tiny temperature from overflowing. */
            sampler->work[i] = (sampler->work[i] - work_max) / temperature;
        }
        out->threshold = filter_threshold(sampler);
    }
    return TD_OK;
}

static td_status_t make_scores(td_sampler_t *sampler, const float *logits, const uint32_t *banned,
                               uint32_t banned_count, scores_t *out)
{
    return make_scores_of(sampler, NULL, sampler->vocab_size, logits, banned, banned_count, out);
}

/* Answers the entry. */
static uint32_t draw(const td_sampler_t *sampler, const scores_t *scores, uint32_t position,
                     uint64_t purpose, double *score_out)
{
    if (sampler->params.temperature > 0) {
        return gumbel_argmax(sampler, scores->max_at, scores->threshold, sampler->log_min_p,
                             noise_key(&sampler->params, position, purpose), score_out);
    }
    *score_out = (double)sampler->work[scores->max_at];
    return scores->max_at;
}

td_status_t td_sampler_pick(td_sampler_t *sampler, const float *logits, uint32_t position,
                            const uint32_t *banned, uint32_t banned_count, bool want_logprob,
                            uint32_t top_logprobs, td_sampled_t *out)
{
    td_sampled_t result = {0};
    scores_t scores = {0};
    double score = 0;

    TD_ASSERT(top_logprobs <= TD_TOP_LOGPROBS_MAX);
    TD_TRY(make_scores(sampler, logits, banned, banned_count, &scores));
    result.token = draw(sampler, &scores, position, NOISE_TOKEN, &score);
    if (want_logprob || top_logprobs > 0) {
        fill_logprobs(logits, sampler->vocab_size, scores.row_max, top_logprobs, &result);
    }
    *out = result;
    return TD_OK;
}

td_status_t td_sampler_candidates(td_sampler_t *sampler, const uint32_t *tokens,
                                  const float *logits, uint32_t count, uint32_t position,
                                  const uint32_t *banned, uint32_t banned_count, uint32_t wanted,
                                  td_candidates_t *out)
{
    td_candidates_t found = {0};
    scores_t scores = {0};

    TD_ASSERT(count > 0 && count <= sampler->vocab_size && wanted <= TD_CANDIDATES_MAX);
    TD_TRY(make_scores_of(sampler, tokens, count, logits, banned, banned_count, &scores));
    while (found.count < wanted) {
        const float most = sampler->work[scores.max_at];
        uint32_t at = 0;
        if (sampler->params.temperature > 0 ? order_key(most, scores.max_at) < scores.threshold ||
                                                  (double)most < sampler->log_min_p
                                            : most == -INFINITY) {
            break; /* the filters keep no more */
        }
        at = draw(sampler, &scores, position, NOISE_TOKEN, &found.scores[found.count]);
        found.tokens[found.count] = tokens[at];
        found.logits[found.count++] = logits[at];
        sampler->work[at] = -INFINITY;
        if (at == scores.max_at && found.count < wanted) {
            scores.max_at = td_logits_argmax(sampler->work, count);
        }
    }
    *out = found;
    return TD_OK;
}

/* --- the rejection rule --------------------------------------------------------------------------
 */

/* Turns scores into what each token is drawn with: work holds probabilities afterwards. */
static void make_probabilities(td_sampler_t *sampler, const scores_t *scores)
{
    float *work = sampler->work;
    double sum = 0;

    for (uint32_t i = 0; i < sampler->vocab_size; i++) {
        const bool kept = sampler->params.temperature > 0
                              ? order_key(work[i], i) >= scores->threshold &&
                                    (double)work[i] >= sampler->log_min_p
                              : i == scores->max_at;
        const double weight = !kept                             ? 0
                              : sampler->params.temperature > 0 ? td_sampler_exp((double)work[i])
                                                                : 1;
        work[i] = (float)weight;
        sum += weight;
    }
    for (uint32_t i = 0; i < sampler->vocab_size; i++) {
        work[i] = (float)((double)work[i] / sum);
    }
}

td_status_t td_sampler_draft(td_sampler_t *sampler, const float *logits, uint32_t position,
                             uint32_t first, const uint32_t *banned, uint32_t banned_count,
                             uint32_t *token_out, float *chances_out)
{
    scores_t scores = {0};
    double score = 0;

    TD_TRY(make_scores(sampler, logits, banned, banned_count, &scores));
    *token_out = draw(sampler, &scores, position, NOISE_DRAFT + (uint64_t)first, &score);
    make_probabilities(sampler, &scores);
    memcpy(chances_out, sampler->work, sampler->vocab_size * sizeof(*chances_out));
    return TD_OK;
}

/* work holds p: what of it the draft's q leaves is drawn from, by any noise of its own. */
static uint32_t draw_residue(td_sampler_t *sampler, uint32_t draft, const float *chances,
                             uint64_t key)
{
    float *work = sampler->work;
    uint32_t best = 0;
    double score = 0;

    for (uint32_t i = 0; i < sampler->vocab_size; i++) {
        const float q = chances != NULL ? chances[i] : i == draft ? 1.0f : 0.0f;
        work[i] = work[i] > q ? (float)td_sampler_log((double)work[i] - (double)q) : -INFINITY;
        best = work[i] > work[best] ? i : best;
    }
    if (work[best] == -INFINITY) {
        return draft; /* p is q but for rounding: the draft is as good a draw as any */
    }
    return gumbel_argmax(sampler, best, order_key(-INFINITY, 0) + 1, -INFINITY, key, &score);
}

td_status_t td_sampler_judge(td_sampler_t *sampler, const float *logits, uint32_t position,
                             const uint32_t *banned, uint32_t banned_count, bool want_logprob,
                             uint32_t top_logprobs, uint32_t draft, const float *chances,
                             td_sampled_t *out)
{
    const double u = unit(noise_bits(noise_key(&sampler->params, position, NOISE_JUDGE), 0));
    const uint64_t residue_key = noise_key(&sampler->params, position, NOISE_RESIDUE);
    td_sampled_t result = {0};
    scores_t scores = {0};

    TD_ASSERT(top_logprobs <= TD_TOP_LOGPROBS_MAX && draft < sampler->vocab_size);
    TD_TRY(make_scores(sampler, logits, banned, banned_count, &scores));
    make_probabilities(sampler, &scores);
    result.token = draft;
    if (u * (chances != NULL ? (double)chances[draft] : 1.0) >= (double)sampler->work[draft]) {
        result.token = draw_residue(sampler, draft, chances, residue_key);
    }
    if (want_logprob || top_logprobs > 0) {
        fill_logprobs(logits, sampler->vocab_size, scores.row_max, top_logprobs, &result);
    }
    *out = result;
    return TD_OK;
}
td_status_t td_logprobs_of(const float *logits, uint32_t vocab_size, uint32_t top_logprobs,
                           td_sampled_t *out)
{
    float max = 0.0f;

    TD_ASSERT(top_logprobs <= TD_TOP_LOGPROBS_MAX);
    if (out->token >= vocab_size) {
        return TD_ERR_INVALID;
    }
    TD_TRY(row_max(logits, vocab_size, &max));
    out->top_count = 0;
    fill_logprobs(logits, vocab_size, max, top_logprobs, out);
    return TD_OK;
}

uint64_t td_logits_hash(const float *logits, uint32_t vocab_size)
{
    return XXH3_64bits(logits, (size_t)vocab_size * sizeof(*logits));
}

/* The rejection rule draws from the model's distribution, whatever the drafts are. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>

#include "common/base/td_base.h"
#include "common/model/td_sampler.h"

#define VOCAB 8u
#define DRAWS 240000u
#define LENGTH 3u
#define PATHS (VOCAB * VOCAB * VOCAB)

static const float target[VOCAB] = {0.5f, -1, 2, 1.5f, 0, 2, -0.5f, 1};
static const float drafter[VOCAB] = {1.5f, 0, 1, -1.5f, 0.5f, 2.5f, -0.5f, -3};

static td_sampler_t *create(const td_sampling_t *params)
{
    td_sampler_t *sampler = NULL;
    assert_int_equal(td_sampler_create(params, VOCAB, NULL, 0, &sampler), TD_OK);
    return sampler;
}

/* What pick draws with, by draft(), whose chances are exact. */
static void chances_of(td_sampler_t *sampler, const float *logits, float *out)
{
    uint32_t token = 0;
    assert_int_equal(td_sampler_draft(sampler, logits, 0, 0, NULL, 0, &token, out), TD_OK);
}

/* limit: what chi-square passes once in a thousand with that many degrees of freedom. */
static void assert_chi_square(const uint32_t *counts, const double *want, uint32_t count,
                              double limit)
{
    double chi2 = 0;

    for (uint32_t i = 0; i < count; i++) {
        if (want[i] == 0) {
            assert_int_equal(counts[i], 0);
        } else {
            chi2 += (counts[i] - want[i]) * (counts[i] - want[i]) / want[i];
        }
    }
    assert_true(chi2 < limit);
}

typedef enum draft_kind { DRAFT_FIXED, DRAFT_DRAWN } draft_kind_t;

static void assert_judged_as_picked(const td_sampling_t *params, draft_kind_t kind, uint32_t fixed)
{
    td_sampler_t *sampler = create(params);
    uint32_t counts[VOCAB] = {0};
    double want[VOCAB];
    float p[VOCAB];
    float q[VOCAB];

    chances_of(sampler, target, p);
    for (uint32_t i = 0; i < DRAWS; i++) {
        uint32_t draft = fixed;
        td_sampled_t out;
        if (kind == DRAFT_DRAWN) {
            assert_int_equal(td_sampler_draft(sampler, drafter, i, i, NULL, 0, &draft, q), TD_OK);
        }
        assert_int_equal(td_sampler_judge(sampler, target, i, NULL, 0, false, 0, draft,
                                          kind == DRAFT_DRAWN ? q : NULL, &out),
                         TD_OK);
        counts[out.token]++;
    }
    for (uint32_t i = 0; i < VOCAB; i++) {
        want[i] = DRAWS * (double)p[i];
    }
    assert_chi_square(counts, want, VOCAB, 24.3);
    td_sampler_destroy(sampler);
}

static void test_sampler_rejection_draws_the_distribution(void **state)
{
    (void)state;
    for (uint32_t variant = 0; variant < 5; variant++) {
        td_sampling_t params;
        td_sampling_init(&params);
        params.seed = variant;
        params.judge_seed = variant;
        params.temperature = variant == 1 ? 0.6f : 1.0f;
        params.top_k = variant == 2 ? 4 : 0;
        params.top_p = variant == 3 ? 0.8f : 1.0f;
        params.min_p = variant == 4 ? 0.3f : 0.0f;
        assert_judged_as_picked(&params, DRAFT_DRAWN, 0);
        assert_judged_as_picked(&params, DRAFT_FIXED, 2); /* likely */
        assert_judged_as_picked(&params, DRAFT_FIXED, 1); /* filtered out, or not likely */
    }
}

/* A draft is accepted as often as can be: with the sum of min(p, q). */
static void test_sampler_rejection_accepts_what_it_can(void **state)
{
    td_sampling_t params;
    td_sampler_t *sampler = NULL;
    uint32_t accepted = 0;
    double want = 0;
    float p[VOCAB];
    float q[VOCAB];
    (void)state;

    td_sampling_init(&params);
    sampler = create(&params);
    chances_of(sampler, target, p);
    chances_of(sampler, drafter, q);
    for (uint32_t i = 0; i < VOCAB; i++) {
        want += (double)fminf(p[i], q[i]);
    }
    for (uint32_t i = 0; i < DRAWS; i++) {
        uint32_t draft = 0;
        td_sampled_t out;
        assert_int_equal(td_sampler_draft(sampler, drafter, i, i, NULL, 0, &draft, q), TD_OK);
        assert_int_equal(td_sampler_judge(sampler, target, i, NULL, 0, false, 0, draft, q, &out),
                         TD_OK);
        accepted += out.token == draft; /* what is drawn instead is another token */
    }
    assert_true(fabs(accepted / (double)DRAWS - want) < 4 * sqrt(want * (1 - want) / DRAWS));
    td_sampler_destroy(sampler);
}

static void test_sampler_rejection_at_temperature_zero_is_greedy(void **state)
{
    td_sampling_t params;
    td_sampler_t *sampler = NULL;
    (void)state;

    td_sampling_init(&params);
    params.temperature = 0;
    sampler = create(&params);
    for (uint32_t draft = 0; draft < VOCAB; draft++) {
        float q[VOCAB];
        uint32_t drawn = 0;
        td_sampled_t out;
        assert_int_equal(
            td_sampler_judge(sampler, target, draft, NULL, 0, true, 0, draft, NULL, &out), TD_OK);
        assert_int_equal(out.token, 2);
        assert_true(out.logprob < 0);
        assert_int_equal(td_sampler_draft(sampler, drafter, draft, 0, NULL, 0, &drawn, q), TD_OK);
        assert_int_equal(drawn, 5);
        assert_true(q[5] == 1.0f && q[2] == 0.0f);
        assert_int_equal(
            td_sampler_judge(sampler, target, draft, NULL, 0, false, 0, drawn, q, &out), TD_OK);
        assert_int_equal(out.token, 2);
    }
    td_sampler_destroy(sampler);
}

/* --- whole texts ------------------------------------------------------------------------------ */

/* Rows of a chain: what follows depends on the token before. */
static void fill_chain(float rows[VOCAB][VOCAB], uint64_t seed)
{
    for (uint32_t i = 0; i < VOCAB * VOCAB; i++) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        rows[i / VOCAB][i % VOCAB] = (float)(seed >> 40) * (4.0f / 16777216.0f);
    }
}

static float most(const float *chances)
{
    float best = 0;

    for (uint32_t i = 0; i < VOCAB; i++) {
        best = fmaxf(best, chances[i]);
    }
    return best;
}

/* One text as decoding makes it: drafts, cut where the drafter is not sure of any (never by what it
 * has drawn: then what is left would not be drawn by those chances), are judged one by one; the
 * first that is not accepted ends a step, and behind the last comes a token without a draft. */
static uint32_t speculate(td_sampler_t *sampler, float p[VOCAB][VOCAB], float q[VOCAB][VOCAB],
                          uint32_t k)
{
    uint32_t tokens[LENGTH + 1] = {0};
    uint32_t count = 1;

    while (count < LENGTH + 1) {
        uint32_t drafts[LENGTH];
        float chances[LENGTH][VOCAB];
        uint32_t drafted = 0;
        uint32_t before = tokens[count - 1];
        bool goes_on = true;
        while (drafted < TD_MIN(k, LENGTH - count)) {
            uint32_t *draft = &drafts[drafted];
            assert_int_equal(td_sampler_draft(sampler, q[before], count + drafted, count, NULL, 0,
                                              draft, chances[drafted]),
                             TD_OK);
            if (most(chances[drafted]) < 0.4f) {
                break;
            }
            before = *draft;
            drafted++;
        }
        for (uint32_t i = 0; i <= drafted && goes_on; i++) {
            td_sampled_t out;
            const float *row = p[tokens[count - 1]];
            if (i < drafted) {
                assert_int_equal(td_sampler_judge(sampler, row, count, NULL, 0, false, 0, drafts[i],
                                                  chances[i], &out),
                                 TD_OK);
                goes_on = out.token == drafts[i];
            } else {
                assert_int_equal(td_sampler_pick(sampler, row, count, NULL, 0, false, 0, &out),
                                 TD_OK);
            }
            tokens[count++] = out.token;
        }
    }
    return (tokens[1] * VOCAB + tokens[2]) * VOCAB + tokens[3];
}

static void test_sampler_rejection_of_whole_texts(void **state)
{
    static uint32_t counts[PATHS];
    static double want[PATHS];
    float p[VOCAB][VOCAB];
    float q[VOCAB][VOCAB];
    double chance[VOCAB][VOCAB];
    td_sampling_t params;
    (void)state;

    fill_chain(p, 1);
    fill_chain(q, 2);
    td_sampling_init(&params);
    for (uint32_t i = 0; i < VOCAB; i++) {
        double sum = 0;
        for (uint32_t j = 0; j < VOCAB; j++) {
            sum += exp((double)p[i][j]);
        }
        for (uint32_t j = 0; j < VOCAB; j++) {
            chance[i][j] = exp((double)p[i][j]) / sum;
        }
    }
    for (uint32_t path = 0; path < PATHS; path++) {
        const uint32_t a = path / VOCAB / VOCAB;
        const uint32_t b = path / VOCAB % VOCAB;
        want[path] = DRAWS * chance[0][a] * chance[a][b] * chance[b][path % VOCAB];
    }
    for (uint32_t i = 0; i < DRAWS; i++) {
        td_sampler_t *sampler = NULL;
        params.seed = i;
        params.judge_seed = i;
        sampler = create(&params);
        counts[speculate(sampler, p, q, i % 4)]++;
        td_sampler_destroy(sampler);
    }
    assert_chi_square(counts, want, PATHS, 613.0); /* 511 degrees of freedom */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sampler_rejection_draws_the_distribution),
        cmocka_unit_test(test_sampler_rejection_accepts_what_it_can),
        cmocka_unit_test(test_sampler_rejection_at_temperature_zero_is_greedy),
        cmocka_unit_test(test_sampler_rejection_of_whole_texts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

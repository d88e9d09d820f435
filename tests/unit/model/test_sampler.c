#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/model/td_sampler.h"
#include "common/model/td_sampler_math_internal.h"

#define VOCAB 8u
#define BIG_VOCAB 49152u

static const float ramp[VOCAB] = {0, 1, 2, 3, 4, 5, 6, 7};

static td_sampler_t *create_sized(const td_sampling_t *params, uint32_t vocab_size,
                                  const uint32_t *prompt, size_t prompt_tokens)
{
    td_sampler_t *sampler = NULL;
    assert_int_equal(td_sampler_create(params, vocab_size, prompt, prompt_tokens, &sampler), TD_OK);
    return sampler;
}

static td_sampler_t *create(const td_sampling_t *params)
{
    return create_sized(params, VOCAB, NULL, 0);
}

static uint32_t pick(td_sampler_t *sampler, const float *logits, uint32_t position)
{
    td_sampled_t out;
    assert_int_equal(td_sampler_pick(sampler, logits, position, NULL, 0, false, 0, &out), TD_OK);
    return out.token;
}

static td_sampling_t defaults(void)
{
    td_sampling_t params;
    td_sampling_init(&params);
    return params;
}

static td_sampling_t greedy(void)
{
    td_sampling_t params = defaults();
    params.temperature = 0;
    return params;
}

/* Logits of about a model's spread, the same on every machine. */
static void fill_big(float *logits, uint64_t seed)
{
    for (uint32_t i = 0; i < BIG_VOCAB; i++) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        logits[i] = (float)(seed >> 40) * (24.0f / 16777216.0f) - 12.0f;
    }
}

static void test_sampler_math_is_close_to_libm(void **state)
{
    (void)state;
    for (double x = 1e-300; x < 1e300; x *= 1.37) {
        double want = log(x);
        assert_true(fabs(td_sampler_log(x) - want) <= 4e-16 * fmax(1.0, fabs(want)));
    }
    for (double x = 0.5; x < 1.5; x += 1.0 / 4099) {
        assert_true(fabs(td_sampler_log(x) - log(x)) <= 4e-16 * fabs(log(x)) + 1e-18);
    }
    for (double x = -700; x < 700; x += 0.377) {
        assert_true(fabs(td_sampler_exp(x) - exp(x)) <= 1e-15 * exp(x));
    }
    assert_true(td_sampler_exp(0) == 1.0);
    assert_true(td_sampler_exp(-INFINITY) == 0.0);
    assert_true(fabs(td_sampler_log(1e-310) - log(1e-310)) < 1e-12);
}

/* The distribution that softmax(logits / T) says, over the kept tokens. */
static void assert_distribution(const td_sampling_t *params, const float *logits,
                                const bool kept[VOCAB])
{
    enum { DRAWS = 40000 };
    td_sampler_t *sampler = create(params);
    uint32_t counts[VOCAB] = {0};
    double weights[VOCAB];
    double total = 0;
    double chi2 = 0;

    for (uint32_t i = 0; i < DRAWS; i++) {
        counts[pick(sampler, logits, i)]++;
    }
    for (uint32_t i = 0; i < VOCAB; i++) {
        weights[i] = kept[i] ? exp((double)logits[i] / (double)params->temperature) : 0;
        total += weights[i];
    }
    for (uint32_t i = 0; i < VOCAB; i++) {
        double want = DRAWS * weights[i] / total;
        if (!kept[i]) {
            assert_int_equal(counts[i], 0);
        } else {
            chi2 += (counts[i] - want) * (counts[i] - want) / want;
        }
    }
    /* Seven degrees of freedom at most: 24.3 is passed once in a thousand; the seeds are fixed. */
    assert_true(chi2 < 24.3);
    td_sampler_destroy(sampler);
}

static void test_sampler_draws_the_softmax(void **state)
{
    static const bool all[VOCAB] = {true, true, true, true, true, true, true, true};
    static const float logits[VOCAB] = {0.5f, -1, 2, 1.5f, 0, 2, -0.5f, 1};
    td_sampling_t params = defaults();
    (void)state;

    for (uint64_t seed = 0; seed < 3; seed++) {
        params.seed = seed;
        params.choice = (uint32_t)seed;
        params.temperature = 1.0f;
        assert_distribution(&params, logits, all);
        params.temperature = 2.5f;
        assert_distribution(&params, logits, all);
    }
}

static void test_sampler_filters_keep_the_right_tokens(void **state)
{
    /* Of ramp: top_k 3 keeps 5 6 7. softmax of ramp: 7 has .632, 6 .233, 5 .086, 4 .031. */
    static const bool top2[VOCAB] = {false, false, false, false, false, false, true, true};
    static const bool top3[VOCAB] = {false, false, false, false, false, true, true, true};
    td_sampling_t params = defaults();
    (void)state;

    params.top_k = 3;
    assert_distribution(&params, ramp, top3);
    params = defaults();
    params.top_p = 0.9f;
    assert_distribution(&params, ramp, top3);
    params.top_p = 0.8f;
    assert_distribution(&params, ramp, top2);
    params = defaults();
    params.min_p = 0.13f; /* e^-2 = .135 */
    assert_distribution(&params, ramp, top3);
    params.min_p = 0.14f;
    assert_distribution(&params, ramp, top2);
    params = defaults(); /* top_p counts within what top_k left: .731 of 6 and 7 is 7 */
    params.top_k = 2;
    params.top_p = 0.74f;
    assert_distribution(&params, ramp, top2);
}

static void test_sampler_extreme_filters_are_greedy(void **state)
{
    td_sampling_t cases[] = {defaults(), defaults(), defaults(), defaults()};
    (void)state;

    cases[0].top_k = 1;
    cases[1].top_p = 1e-6f;
    cases[2].min_p = 0.999f;
    cases[3].temperature = 1e-30f;
    for (size_t i = 0; i < TD_ARRAY_LEN(cases); i++) {
        td_sampler_t *sampler = create(&cases[i]);
        for (uint32_t position = 0; position < 200; position++) {
            assert_int_equal(pick(sampler, ramp, position), 7);
        }
        td_sampler_destroy(sampler);
    }
}

static void test_sampler_ties_go_to_the_lower_id(void **state)
{
    static const float tied[VOCAB] = {1, 3, 3, 3, 2, 3, 0, 3};
    static const bool kept[VOCAB] = {false, true, true, false, false, false, false, false};
    td_sampling_t params = greedy();
    td_sampler_t *sampler = create(&params);
    (void)state;

    assert_int_equal(pick(sampler, tied, 0), 1);
    td_sampler_destroy(sampler);
    params = defaults();
    params.top_k = 2;
    assert_distribution(&params, tied, kept);
    params = defaults();
    params.top_p = 0.3f; /* five share about .93: two reach .3 */
    assert_distribution(&params, tied, kept);
}

static void test_sampler_top_k_is_exact_on_a_big_vocabulary(void **state)
{
    static float logits[BIG_VOCAB];
    static const uint32_t limits[] = {1, 2, 7, 40, 1000};
    (void)state;

    fill_big(logits, 7);
    for (size_t k = 0; k < TD_ARRAY_LEN(limits); k++) {
        td_sampling_t params = defaults();
        td_sampler_t *sampler = NULL;
        params.top_k = limits[k];
        params.temperature = 100; /* nearly uniform: reaches all that is kept */
        sampler = create_sized(&params, BIG_VOCAB, NULL, 0);
        for (uint32_t position = 0; position < 100; position++) {
            uint32_t token = pick(sampler, logits, position);
            uint32_t above = 0;
            for (uint32_t i = 0; i < BIG_VOCAB; i++) {
                above += logits[i] > logits[token] || (logits[i] == logits[token] && i < token);
            }
            assert_true(above < limits[k]);
        }
        td_sampler_destroy(sampler);
    }
}

static void test_sampler_golden_tokens(void **state)
{
    /* From a separate implementation that sorts and uses the C library's log and exp. */
    static const uint32_t want[4][6] = {{44806, 10193, 3854, 41257, 19381, 2172},
                                        {30794, 11676, 25258, 30312, 38684, 36193},
                                        {42625, 8006, 39577, 9951, 19490, 21646},
                                        {36838, 36838, 31381, 27016, 31435, 45402}};
    static float logits[BIG_VOCAB];
    td_sampling_t cases[] = {defaults(), defaults(), defaults(), defaults()};
    (void)state;

    fill_big(logits, 1);
    cases[0].seed = 42;
    cases[1].seed = 42;
    cases[1].choice = 1;
    cases[2].seed = 0xfedcba9876543210u;
    cases[2].temperature = 0.7f;
    cases[2].top_p = 0.95f;
    cases[3].seed = 7;
    cases[3].temperature = 1.3f;
    cases[3].top_k = 50;
    cases[3].min_p = 0.01f;
    for (size_t i = 0; i < TD_ARRAY_LEN(cases); i++) {
        td_sampler_t *sampler = create_sized(&cases[i], BIG_VOCAB, NULL, 0);
        for (uint32_t position = 0; position < 6; position++) {
            assert_int_equal(pick(sampler, logits, 1000 * position), want[i][position]);
        }
        td_sampler_destroy(sampler);
    }
}

/* The noise depends on seed, choice, position and id only: not on what was picked before. */
static void test_sampler_is_independent_of_history(void **state)
{
    static float logits[BIG_VOCAB];
    td_sampling_t params = defaults();
    td_sampler_t *forward = NULL;
    td_sampler_t *backward = NULL;
    uint32_t tokens[50];
    (void)state;

    fill_big(logits, 3);
    params.seed = 5;
    params.top_p = 0.99f;
    forward = create_sized(&params, BIG_VOCAB, NULL, 0);
    backward = create_sized(&params, BIG_VOCAB, NULL, 0);
    for (uint32_t i = 0; i < 50; i++) {
        tokens[i] = pick(forward, logits, i);
        td_sampler_accept(forward, tokens[i]);
    }
    for (uint32_t i = 50; i > 0; i--) {
        assert_int_equal(pick(backward, logits, i - 1), tokens[i - 1]);
    }
    td_sampler_destroy(forward);
    td_sampler_destroy(backward);
}

static void test_sampler_penalties(void **state)
{
    static const float row[VOCAB] = {-1, 0, 0, 0, 0, 0, 1.0f, 1.5f};
    static const float below[VOCAB] = {-3, -1, -2, -3, -3, -3, -3, -3};
    const uint32_t prompt[] = {7, 7};
    td_sampling_t params = greedy();
    td_sampler_t *sampler = NULL;
    (void)state;

    params.presence_penalty = 1.0f; /* the prompt does not count */
    sampler = create_sized(&params, VOCAB, prompt, 2);
    assert_int_equal(pick(sampler, row, 0), 7);
    td_sampler_accept(sampler, 7);
    assert_int_equal(pick(sampler, row, 1), 6);
    td_sampler_accept(sampler, 6); /* 0.5 and 0 */
    assert_int_equal(pick(sampler, row, 2), 7);
    td_sampler_destroy(sampler);

    params = greedy();
    params.frequency_penalty = 0.3f;
    sampler = create(&params);
    td_sampler_accept(sampler, 7);
    assert_int_equal(pick(sampler, row, 1), 7); /* 1.2 */
    td_sampler_accept(sampler, 7);
    assert_int_equal(pick(sampler, row, 2), 6); /* 0.9 */
    td_sampler_destroy(sampler);

    params = greedy();
    params.repetition_penalty = 2.0f; /* the prompt counts: 0.75 */
    sampler = create_sized(&params, VOCAB, prompt, 2);
    assert_int_equal(pick(sampler, row, 0), 6);
    td_sampler_destroy(sampler);
    params.repetition_penalty = 3.0f; /* negative logits move down too: -3 */
    sampler = create(&params);
    td_sampler_accept(sampler, 1);
    assert_int_equal(pick(sampler, below, 0), 2);
    td_sampler_destroy(sampler);
    params.repetition_penalty = 1e-42f; /* no infinity, no NaN */
    sampler = create_sized(&params, VOCAB, prompt, 2);
    td_sampler_accept(sampler, 6);
    assert_int_equal(pick(sampler, row, 0), 6);
    td_sampler_destroy(sampler);
}

static void test_sampler_bias_and_bans(void **state)
{
    static const td_logit_bias_t bias[] = {{2, 10.0f}, {7, -INFINITY}};
    static const uint32_t banned[] = {2, 6, 99};
    td_sampling_t params = greedy();
    td_sampler_t *sampler = NULL;
    td_sampled_t out;
    uint32_t all[VOCAB];
    (void)state;

    params.logit_bias = bias;
    params.logit_bias_count = 2;
    sampler = create(&params);
    assert_int_equal(pick(sampler, ramp, 0), 2);
    assert_int_equal(td_sampler_pick(sampler, ramp, 0, banned, 3, false, 0, &out), TD_OK);
    assert_int_equal(out.token, 5);
    for (uint32_t i = 0; i < VOCAB; i++) {
        all[i] = i;
    }
    out.token = 77;
    assert_int_equal(td_sampler_pick(sampler, ramp, 0, all, VOCAB, false, 0, &out), TD_ERR_INVALID);
    assert_int_equal(out.token, 77);
    td_sampler_destroy(sampler);

    params = defaults();
    params.top_k = 7; /* more than what the bans leave */
    params.top_p = 0.9999f;
    sampler = create(&params);
    for (uint32_t position = 0; position < 500; position++) {
        assert_int_equal(
            td_sampler_pick(sampler, ramp, position, all + 1, VOCAB - 2, false, 0, &out), TD_OK);
        assert_true(out.token == 0 || out.token == 7);
    }
    td_sampler_destroy(sampler);
}

static void test_sampler_refuses_broken_rows(void **state)
{
    float row[VOCAB];
    td_sampling_t params = defaults();
    td_sampler_t *sampler = create(&params);
    td_sampled_t out = {.token = 77};
    (void)state;

    for (uint32_t i = 0; i < VOCAB; i++) {
        memcpy(row, ramp, sizeof(row));
        row[i] = NAN;
        assert_int_equal(td_sampler_pick(sampler, row, 0, NULL, 0, false, 0, &out),
                         TD_ERR_INTERNAL);
        row[i] = INFINITY;
        assert_int_equal(td_sampler_pick(sampler, row, 0, NULL, 0, false, 0, &out),
                         TD_ERR_INTERNAL);
        row[i] = -INFINITY; /* masked by the model: fine */
        assert_int_equal(td_sampler_pick(sampler, row, 0, NULL, 0, false, 0, &out), TD_OK);
        assert_true(out.token != i);
        out.token = 77;
    }
    for (uint32_t i = 0; i < VOCAB; i++) {
        row[i] = -INFINITY;
    }
    assert_int_equal(td_sampler_pick(sampler, row, 0, NULL, 0, false, 0, &out), TD_ERR_INTERNAL);
    assert_int_equal(out.token, 77);
    td_sampler_destroy(sampler);
}

static void test_sampler_logprobs_are_the_models_own(void **state)
{
    static const float row[VOCAB] = {1, 3, 2, 3, -INFINITY, 0, 1, 2};
    static const uint32_t order[] = {1, 3, 2, 7, 0, 6, 5};
    static const td_logit_bias_t bias[] = {{0, 50.0f}};
    td_sampling_t params = defaults();
    td_sampler_t *sampler = NULL;
    td_sampled_t out;
    double total = 0;
    (void)state;

    for (uint32_t i = 0; i < VOCAB; i++) {
        total += exp((double)row[i]);
    }
    params.temperature = 0.1f;
    params.logit_bias = bias;
    params.logit_bias_count = 1;
    sampler = create(&params);
    assert_int_equal(td_sampler_pick(sampler, row, 0, NULL, 0, true, 0, &out), TD_OK);
    assert_int_equal(out.token, 0);
    assert_int_equal(out.top_count, 0);
    assert_true(fabs((double)out.logprob - (1 - log(total))) < 1e-6);
    assert_int_equal(td_sampler_pick(sampler, row, 0, NULL, 0, false, 3, &out), TD_OK);
    assert_int_equal(out.top_count, 3);
    assert_int_equal(td_sampler_pick(sampler, row, 0, NULL, 0, false, TD_TOP_LOGPROBS_MAX, &out),
                     TD_OK);
    assert_int_equal(out.top_count, TD_ARRAY_LEN(order));
    for (uint32_t i = 0; i < out.top_count; i++) {
        assert_int_equal(out.top[i].token, order[i]);
        assert_true(fabs((double)out.top[i].logprob - ((double)row[order[i]] - log(total))) < 1e-6);
    }
    assert_int_equal(td_sampler_pick(sampler, row, 0, NULL, 0, false, 0, &out), TD_OK);
    assert_true(out.logprob == 0);
    td_sampler_destroy(sampler);
}

static void assert_refused(td_sampling_t params)
{
    td_sampler_t *sampler = NULL;
    assert_int_equal(td_sampler_create(&params, VOCAB, NULL, 0, &sampler), TD_ERR_INVALID);
    assert_null(sampler);
}

#define ASSERT_FIELD_REFUSED(field, value)                                                         \
    do {                                                                                           \
        td_sampling_t params_ = defaults();                                                        \
        params_.field = (value);                                                                   \
        assert_refused(params_);                                                                   \
    } while (0)

static void test_sampler_create_checks_every_range(void **state)
{
    static const td_logit_bias_t outside = {VOCAB, 1};
    static const td_logit_bias_t infinite = {0, INFINITY};
    const uint32_t prompt[] = {0, VOCAB};
    td_sampling_t params = defaults();
    td_sampler_t *sampler = NULL;
    (void)state;

    ASSERT_FIELD_REFUSED(temperature, -0.1f);
    ASSERT_FIELD_REFUSED(temperature, 100.1f);
    ASSERT_FIELD_REFUSED(temperature, NAN);
    ASSERT_FIELD_REFUSED(top_p, 0.0f);
    ASSERT_FIELD_REFUSED(top_p, 1.1f);
    ASSERT_FIELD_REFUSED(top_p, NAN);
    ASSERT_FIELD_REFUSED(min_p, -0.1f);
    ASSERT_FIELD_REFUSED(min_p, 1.0f);
    ASSERT_FIELD_REFUSED(presence_penalty, 2.1f);
    ASSERT_FIELD_REFUSED(frequency_penalty, -2.1f);
    ASSERT_FIELD_REFUSED(repetition_penalty, 0.0f);
    ASSERT_FIELD_REFUSED(repetition_penalty, 10.5f);
    ASSERT_FIELD_REFUSED(logit_bias_count, TD_LOGIT_BIAS_MAX + 1);
    params.logit_bias_count = 1;
    params.logit_bias = &outside;
    assert_refused(params);
    params.logit_bias = &infinite;
    assert_refused(params);
    params = defaults();
    assert_int_equal(td_sampler_create(&params, VOCAB, prompt, 2, &sampler), TD_ERR_INVALID);
    assert_int_equal(td_sampler_create(&params, 0, NULL, 0, &sampler), TD_ERR_INVALID);
    assert_null(sampler);
}

static void test_sampler_pick_allocates_nothing_and_keeps_logits(void **state)
{
    static float logits[BIG_VOCAB];
    static float before[BIG_VOCAB];
    td_sampling_t params = defaults();
    td_sampler_t *sampler = NULL;
    td_sampled_t out;
    uint64_t allocs = 0;
    uint64_t begin_ns = 0;
    (void)state;

    fill_big(logits, 11);
    memcpy(before, logits, sizeof(before));
    params.top_k = 1000;
    params.top_p = 0.95f;
    params.min_p = 0.001f;
    params.repetition_penalty = 1.1f;
    sampler = create_sized(&params, BIG_VOCAB, NULL, 0);
    allocs = td_alloc_count();
    begin_ns = td_now_ns();
    for (uint32_t position = 0; position < 100; position++) {
        assert_int_equal(td_sampler_pick(sampler, logits, position, NULL, 0, true, 20, &out),
                         TD_OK);
        td_sampler_accept(sampler, out.token);
    }
    print_message("all filters and 20 tops: %llu us a pick\n",
                  (unsigned long long)((td_now_ns() - begin_ns) / 100 / TD_NS_PER_US));
    assert_int_equal(td_alloc_count(), allocs);
    assert_memory_equal(logits, before, sizeof(before));
    td_sampler_destroy(sampler);
    params = defaults();
    sampler = create_sized(&params, BIG_VOCAB, NULL, 0);
    begin_ns = td_now_ns();
    for (uint32_t position = 0; position < 100; position++) {
        (void)pick(sampler, logits, position);
    }
    print_message("temperature alone: %llu us a pick\n",
                  (unsigned long long)((td_now_ns() - begin_ns) / 100 / TD_NS_PER_US));
    td_sampler_destroy(sampler);
}

/* Among some tokens: what a pick takes of a row that has only those, then what it takes without
 * it. */
static void test_sampler_candidates_are_what_picks_take(void **state)
{
    enum { ROWS = 200 };
    const uint32_t banned[] = {6, 9};
    uint32_t fewer = 0;
    (void)state;

    for (uint32_t turn = 0; turn < 6 * ROWS; turn++) {
        td_sampling_t params = defaults();
        td_sampler_t *sampler = NULL;
        td_logit_bias_t bias[] = {{2, 3.0f}, {3, -1.0f}, {5, -INFINITY}};
        uint32_t prompt[] = {1, 2, 7};
        uint32_t tokens[VOCAB];
        float some[VOCAB];
        float row[VOCAB];
        uint32_t count = 0;
        td_candidates_t got;
        td_sampled_t want;

        params.seed = turn;
        params.temperature = turn % 6 == 0 ? 0 : 0.8f;
        params.top_k = turn % 6 == 1 ? 1 + turn % 4 : 0;
        params.top_p = turn % 6 == 2 ? 0.6f : 1;
        params.min_p = turn % 6 == 3 ? 0.3f : 0;
        params.frequency_penalty = turn % 6 >= 4 ? 0.7f : 0;
        params.repetition_penalty = turn % 6 == 5 ? 1.3f : 1;
        params.logit_bias = turn % 2 == 1 ? bias : NULL;
        params.logit_bias_count = turn % 2 == 1 ? TD_ARRAY_LEN(bias) : 0;
        sampler = create_sized(&params, VOCAB, prompt, TD_ARRAY_LEN(prompt));
        td_sampler_accept(sampler, 7);
        for (uint32_t i = 0; i < VOCAB; i++) {
            row[i] = -INFINITY;
            if ((i * 7 + turn) % 3 != 0) {
                row[i] = (float)((i * 2654435761u + turn * 40503u) >> 8 & 1023u) / 256;
                tokens[count] = i;
                some[count++] = row[i];
            }
        }
        assert_int_equal(
            td_sampler_candidates(sampler, tokens, some, count, turn, banned, 2, 2, &got), TD_OK);
        assert_true(got.count >= 1 && got.count <= 2);
        fewer += got.count < 2;
        assert_int_equal(td_sampler_pick(sampler, row, turn, banned, 2, false, 0, &want), TD_OK);
        assert_int_equal(got.tokens[0], want.token);
        assert_true(got.logits[0] == row[want.token]);
        if (got.count == 2 && turn % 6 != 1 && turn % 6 != 2 && turn % 6 != 3) {
            /* Filters look at the row, and the row without it is another one. */
            row[want.token] = -INFINITY;
            assert_int_equal(td_sampler_pick(sampler, row, turn, banned, 2, false, 0, &want),
                             TD_OK);
            assert_int_equal(got.tokens[1], want.token);
            assert_true(got.scores[0] >= got.scores[1]);
        }
        td_sampler_destroy(sampler);
    }
    assert_true(fewer > ROWS / 8);
}

static void test_logits_hash_sees_every_bit(void **state)
{
    float row[VOCAB];
    uint64_t hash = td_logits_hash(ramp, VOCAB);
    (void)state;

    memcpy(row, ramp, sizeof(row));
    assert_true(td_logits_hash(row, VOCAB) == hash);
    row[0] = -0.0f;
    assert_true(td_logits_hash(row, VOCAB) != hash);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sampler_math_is_close_to_libm),
        cmocka_unit_test(test_sampler_draws_the_softmax),
        cmocka_unit_test(test_sampler_filters_keep_the_right_tokens),
        cmocka_unit_test(test_sampler_extreme_filters_are_greedy),
        cmocka_unit_test(test_sampler_ties_go_to_the_lower_id),
        cmocka_unit_test(test_sampler_top_k_is_exact_on_a_big_vocabulary),
        cmocka_unit_test(test_sampler_golden_tokens),
        cmocka_unit_test(test_sampler_is_independent_of_history),
        cmocka_unit_test(test_sampler_penalties),
        cmocka_unit_test(test_sampler_bias_and_bans),
        cmocka_unit_test(test_sampler_refuses_broken_rows),
        cmocka_unit_test(test_sampler_logprobs_are_the_models_own),
        cmocka_unit_test(test_sampler_create_checks_every_range),
        cmocka_unit_test(test_sampler_pick_allocates_nothing_and_keeps_logits),
        cmocka_unit_test(test_sampler_candidates_are_what_picks_take),
        cmocka_unit_test(test_logits_hash_sees_every_bit),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

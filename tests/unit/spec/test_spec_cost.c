/* What drafts are expected to give, what they cost, and how many are chosen. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "common/base/td_base.h"
#include "common/spec/td_spec_cost.h"

static void assert_near(double got, double wanted, double within)
{
    assert_true(got > wanted - within && got < wanted + within);
}

static void test_spec_expected_tokens(void **state)
{
    (void)state;
    assert_near(td_spec_expected_tokens(0.8, 5), 3.689, 0.0005);
    assert_near(td_spec_expected_tokens(0.8, 0), 1, 1e-12);
    assert_near(td_spec_expected_tokens(0, 7), 1, 1e-12);
    assert_near(td_spec_expected_tokens(1, 7), 8, 1e-12);
}

static double cost_of(const td_step_cost_t *cost, uint32_t rows)
{
    double curve[TD_STEP_COST_ROWS_MAX + 1];
    td_step_cost_curve(cost, TD_STEP_COST_ROWS_MAX, curve);
    return curve[rows];
}

static void test_step_cost_is_measured_between_and_beyond(void **state)
{
    td_step_cost_t cost;
    (void)state;

    memset(&cost, 0, sizeof(cost));
    assert_true(cost_of(&cost, 4) > cost_of(&cost, 1));
    td_step_cost_observe(&cost, 1, 1000);
    assert_near(cost_of(&cost, 1), 1000, 1e-6);
    assert_true(cost_of(&cost, 5) > 1300);
    td_step_cost_observe(&cost, 5, 1800);
    assert_near(cost_of(&cost, 3), 1400, 1e-6);
    assert_true(cost_of(&cost, 9) > 1800);
    td_step_cost_observe(&cost, TD_STEP_COST_ROWS_MAX + 50, 9000); /* counts as the last */
    assert_near(cost_of(&cost, TD_STEP_COST_ROWS_MAX), 9000, 1e-6);
    memset(&cost, 0, sizeof(cost)); /* also before the first entry */
    td_step_cost_observe(&cost, 8, 4000);
    assert_true(cost_of(&cost, 1) < 4000 && cost_of(&cost, 1) > 500);
}

/* Every third step takes four times as long, as on a machine that has other work too. */
static void test_step_cost_is_near_the_shortest(void **state)
{
    td_step_cost_t cost;
    (void)state;

    memset(&cost, 0, sizeof(cost));
    for (uint32_t i = 0; i < 300; i++) {
        td_step_cost_observe(&cost, 1, i % 3 == 0 ? 4000 : 1000);
    }
    assert_near(cost_of(&cost, 1), 1050, 60);
    for (uint32_t i = 0; i < 400; i++) { /* longer for good: it follows */
        td_step_cost_observe(&cost, 1, 2000);
    }
    assert_near(cost_of(&cost, 1), 2000, 20);
}

static void test_step_cost_of_fewer_rows_is_never_more(void **state)
{
    td_step_cost_t cost;
    (void)state;

    memset(&cost, 0, sizeof(cost));
    td_step_cost_observe(&cost, 1, 1000);
    td_step_cost_observe(&cost, 2, 9000); /* somebody else ran just then */
    td_step_cost_observe(&cost, 6, 1500);
    assert_near(cost_of(&cost, 2), 1500, 1e-6);
    td_step_cost_observe(&cost, 8, 70000); /* nor more than in proportion */
    assert_near(cost_of(&cost, 8), 2000, 1e-6);
    for (uint32_t rows = 1; rows < TD_STEP_COST_ROWS_MAX; rows++) {
        assert_true(cost_of(&cost, rows) <= cost_of(&cost, rows + 1));
    }
}

/* A wrong first measurement: it is not asked again, so it must be forgotten by itself. */
static void test_step_cost_that_was_wrong_does_not_last(void **state)
{
    td_step_cost_t cost;
    uint32_t steps = 0;
    (void)state;

    memset(&cost, 0, sizeof(cost));
    td_step_cost_observe(&cost, 5, 50000);
    for (; cost_of(&cost, 5) > 2000 && steps < 1000; steps++) {
        td_step_cost_observe(&cost, 1, 1000);
    }
    assert_in_range(steps, 10, 64);
    for (uint32_t i = 0; i < 16; i++) { /* what was seen often lasts longer */
        td_step_cost_observe(&cost, 5, 3000);
    }
    for (uint32_t i = 0; i < 300; i++) {
        td_step_cost_observe(&cost, 1, 1000);
    }
    assert_near(cost_of(&cost, 5), 3000, 1e-6);
}

/* Steps of one row until five rows, which cost so much, look cheap again; then they are tried. */
static uint32_t steps_until_tried(td_step_cost_t *cost, uint64_t ns)
{
    uint32_t steps = 0;

    for (; cost_of(cost, 5) > 2000 && steps < 5000; steps++) {
        td_step_cost_observe(cost, 1, 1000);
    }
    td_step_cost_observe(cost, 5, ns);
    return steps;
}

static void test_step_cost_that_was_right_is_tried_ever_less(void **state)
{
    td_step_cost_t cost;
    uint32_t before = 0;
    (void)state;

    memset(&cost, 0, sizeof(cost));
    td_step_cost_observe(&cost, 5, 3000);
    for (uint32_t i = 0; i < 7; i++) {
        const uint32_t steps = steps_until_tried(&cost, 3000 + 400 * (i % 2));
        assert_true(steps > before);
        before = steps;
    }
    assert_in_range(before, 1000, 4000); /* but not for ever */
    (void)steps_until_tried(&cost, 1200);
    assert_near(cost_of(&cost, 5), 1200, 1e-6);
}

static void test_acceptance_learns_and_forgets(void **state)
{
    td_acceptance_t a = {0};
    (void)state;

    assert_near(td_acceptance_rate(&a, 0.6, 3), 0.6, 1e-9);
    for (uint32_t i = 0; i < 40; i++) {
        td_acceptance_observe(&a, 4, 4, 0.9);
    }
    assert_true(td_acceptance_rate(&a, 0.6, 3) > 0.95);
    for (uint32_t i = 0; i < 60; i++) {
        td_acceptance_observe(&a, 4, 0, 0.9);
    }
    assert_true(td_acceptance_rate(&a, 0.6, 3) < 0.2);
    for (uint32_t i = 0; i < 200; i++) {
        td_acceptance_pass(&a, 0.97);
    }
    assert_near(td_acceptance_rate(&a, 0.6, 3), 0.6, 0.05);
    for (uint32_t i = 0; i < 1000; i++) {
        td_acceptance_pass(&a, 0.97);
    }
    assert_true(a.hits == 0 && a.trials == 0);
}

static void measure(td_step_cost_t *cost, double slope)
{
    memset(cost, 0, sizeof(*cost));
    for (uint32_t rows = 1; rows <= 64; rows++) {
        td_step_cost_observe(cost, rows, (uint64_t)(1e6 * (1 + slope * (rows - 1))));
    }
}

static void test_spec_plan_takes_what_pays(void **state)
{
    td_step_cost_t cost = {0};
    td_spec_offer_t one = {.alpha = 0.9, .proposed = 8};
    td_spec_offer_t batch[32];
    (void)state;

    td_spec_plan(&cost, &one, 0, 3, 64); /* nobody samples */
    measure(&cost, 0.1);                 /* a row costs a tenth of a step */
    td_spec_plan(&cost, &one, 1, 0, 64);
    assert_in_range(one.k, 4, 8);
    one.alpha = 0.05;
    td_spec_plan(&cost, &one, 1, 0, 64);
    assert_int_equal(one.k, 0);
    one.k_min = 3; /* asked for */
    td_spec_plan(&cost, &one, 1, 0, 64);
    assert_int_equal(one.k, 3);
    one = (td_spec_offer_t){.alpha = 1, .proposed = 8};
    td_spec_plan(&cost, &one, 1, 0, 4);
    assert_int_equal(one.k, 3);

    measure(&cost, 1); /* bound by arithmetic: a row costs a step, so guesses never pay */
    for (uint32_t i = 0; i < TD_ARRAY_LEN(batch); i++) {
        batch[i] = (td_spec_offer_t){.alpha = 0.9, .proposed = 8};
    }
    td_spec_plan(&cost, batch, TD_ARRAY_LEN(batch), 0, 256);
    for (uint32_t i = 0; i < TD_ARRAY_LEN(batch); i++) {
        assert_int_equal(batch[i].k, 0);
    }

    measure(&cost, 0.05);
    batch[0] = (td_spec_offer_t){.alpha = 0.95, .proposed = 8};
    batch[1] = (td_spec_offer_t){.alpha = 0.3, .proposed = 8};
    td_spec_plan(&cost, batch, 2, 0, 64);
    assert_true(batch[0].k > batch[1].k);
}

/* Costs that rise by leaps, as tiles of rows do: a draft alone doesn't pay, four do. */
/* What a drafter drops itself is no row, but was drafted. */
static void test_spec_plan_counts_rows_in_the_mean(void **state)
{
    td_step_cost_t cost;
    td_spec_offer_t offer = {.alpha = 0.35, .proposed = 1, .draft_ns = 100};
    (void)state;

    memset(&cost, 0, sizeof(cost));
    td_step_cost_observe(&cost, 1, 1000);
    td_step_cost_observe(&cost, 2, 1300);
    td_spec_plan(&cost, &offer, 1, 0, 2);
    assert_int_equal(offer.k, 0); /* 1.35 / 1400 */
    offer.dropped = 0.5;
    td_spec_plan(&cost, &offer, 1, 0, 2);
    assert_int_equal(offer.k, 1); /* 1.35 / 1250 */
    offer.draft_ns = 200;
    td_spec_plan(&cost, &offer, 1, 0, 2);
    assert_int_equal(offer.k, 0); /* 1.35 / 1350: less than TD_SPEC_GAIN_MIN */
}

static void test_spec_plan_looks_beyond_a_leap(void **state)
{
    td_step_cost_t cost;
    td_spec_offer_t one = {.alpha = 0.9, .proposed = 8};
    (void)state;

    memset(&cost, 0, sizeof(cost));
    td_step_cost_observe(&cost, 1, 1000);
    for (uint32_t rows = 2; rows <= 9; rows++) {
        td_step_cost_observe(&cost, rows, rows <= 5 ? 2000 : 3500);
    }
    td_spec_plan(&cost, &one, 1, 0, 64);
    assert_int_equal(one.k, 4);
    one.draft_ns = 1000; /* unless drafting itself is dear */
    td_spec_plan(&cost, &one, 1, 0, 64);
    assert_int_equal(one.k, 0);
}

/* The plan against every other choice of both k. */
static void test_spec_plan_is_the_best(void **state)
{
    td_step_cost_t cost;
    (void)state;

    for (uint32_t round = 0; round < 50; round++) {
        td_spec_offer_t o[2] = {{.alpha = (round % 10) / 10.0 + 0.05, .proposed = 6},
                                {.alpha = (round % 7) / 7.0 + 0.1, .proposed = 4}};
        double best = 0;
        double got = 0;
        double none = 0;
        measure(&cost, 0.04 * (round % 8 + 1));
        td_spec_plan(&cost, o, 2, round % 3, 64);
        for (uint32_t a = 0; a <= 6; a++) {
            for (uint32_t b = 0; b <= 4; b++) {
                const double ratio = (td_spec_expected_tokens(o[0].alpha, a) +
                                      td_spec_expected_tokens(o[1].alpha, b)) /
                                     cost_of(&cost, 2 + a + b + round % 3);
                none = a == 0 && b == 0 ? ratio : none;
                best = ratio > best ? ratio : best;
                got = a == o[0].k && b == o[1].k ? ratio : got;
            }
        }
        /* Or none at all, where all that could be won is too little. */
        assert_true(got >= best * 0.999999 ||
                    (o[0].k == 0 && o[1].k == 0 && best <= TD_SPEC_GAIN_MIN * none));
    }
}

static void test_step_cost_that_is_not_seen_grows_old(void **state)
{
    td_step_cost_t cost;
    (void)state;

    memset(&cost, 0, sizeof(cost));
    td_step_cost_observe(&cost, 2, 1000000);
    td_step_cost_pass(&cost);
    assert_near(td_step_cost_ns(&cost, 2), 1000000, 1);
    for (uint32_t i = 0; i < 40; i++) {
        td_step_cost_pass(&cost);
    }
    assert_true(td_step_cost_ns(&cost, 2) < 10); /* in proportion only: as good as nothing */
}

/* --- a node that is simulated -------------------------------------------------------------------
 * Its steps take what was measured of a real one; what it sees of that is noise three times in ten,
 * up to five times as long. Tokens are counted over the times without the noise. */

#define SIM_STEPS 3000u
#define SIM_K 8u
#define SIM_AUTO UINT32_MAX

static double sim_random(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (double)(*state >> 11) * 0x1p-53;
}

static double sim_cost(uint32_t rows)
{
    return rows == 1 ? 2.05e6 : 1.3e6 + 0.66e6 * rows;
}

/* Tokens a ms of a batch whose drafts, there in a part of the steps, are accepted so often. */
static double simulate(uint32_t batch, double alpha, double part, uint32_t k)
{
    td_step_cost_t cost = {0};
    td_acceptance_t seen = {0};
    td_spec_offer_t offers[16];
    uint64_t state = 7;
    double tokens = 0;
    double ns = 0;

    for (uint32_t step = 0; step < SIM_STEPS; step++) {
        uint32_t rows = 0;
        double noise = 1;
        for (uint32_t i = 0; i < batch; i++) {
            offers[i] = (td_spec_offer_t){.alpha = td_acceptance_rate(&seen, 0.5, 4),
                                          .proposed = sim_random(&state) < part ? SIM_K : 0};
            offers[i].k = TD_MIN(k, offers[i].proposed);
        }
        if (k == SIM_AUTO) {
            td_spec_plan(&cost, offers, batch, 0, 192);
        }
        for (uint32_t i = 0; i < batch; i++) {
            uint32_t accepted = 0;
            while (accepted < offers[i].k && sim_random(&state) < alpha) {
                accepted++;
            }
            if (offers[i].k > 0) {
                td_acceptance_observe(&seen, offers[i].k, accepted, 0.99);
            } else if (offers[i].proposed > 0) {
                td_acceptance_pass(&seen, 0.998);
            }
            tokens += 1 + accepted;
            rows += 1 + offers[i].k;
        }
        if (sim_random(&state) < 0.3) {
            noise += 4 * sim_random(&state);
        }
        td_step_cost_observe(&cost, rows, (uint64_t)(sim_cost(rows) * noise));
        ns += sim_cost(rows);
    }
    return tokens / ns * 1e6;
}

static void test_spec_plan_of_a_noisy_node_is_near_the_best(void **state)
{
    static const uint32_t batches[] = {1, 4, 16};
    static const double alphas[] = {0, 0.2, 0.4, 0.6, 0.8, 0.9, 1};
    static const double parts[] = {0.2, 1};
    double logs = 0;
    uint32_t cells = 0;
    (void)state;

    for (uint32_t c = 0; c < TD_ARRAY_LEN(batches) * TD_ARRAY_LEN(parts); c++) {
        for (uint32_t a = 0; a < TD_ARRAY_LEN(alphas); a++) {
            const uint32_t batch = batches[c / 2];
            const double none = simulate(batch, alphas[a], parts[c % 2], 0);
            const double got = simulate(batch, alphas[a], parts[c % 2], SIM_AUTO);
            double best = none;
            for (uint32_t k = 1; k <= SIM_K; k++) {
                best = fmax(best, simulate(batch, alphas[a], parts[c % 2], k));
            }
            print_message("batch %2u, drafts in %.1f of the steps, accepted %.1f: "
                          "%.3f of none, %.3f of the best k\n",
                          batch, parts[c % 2], alphas[a], got / none, got / best);
            assert_true(got >= 0.95 * none);
            logs += log(got / best);
            cells++;
        }
    }
    print_message("%.3f of the best k in the geometric mean\n", exp(logs / cells));
    assert_true(exp(logs / cells) >= 0.97);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_spec_expected_tokens),
        cmocka_unit_test(test_step_cost_is_measured_between_and_beyond),
        cmocka_unit_test(test_step_cost_is_near_the_shortest),
        cmocka_unit_test(test_step_cost_of_fewer_rows_is_never_more),
        cmocka_unit_test(test_step_cost_that_was_wrong_does_not_last),
        cmocka_unit_test(test_step_cost_that_was_right_is_tried_ever_less),
        cmocka_unit_test(test_acceptance_learns_and_forgets),
        cmocka_unit_test(test_spec_plan_takes_what_pays),
        cmocka_unit_test(test_spec_plan_counts_rows_in_the_mean),
        cmocka_unit_test(test_spec_plan_looks_beyond_a_leap),
        cmocka_unit_test(test_spec_plan_is_the_best),
        cmocka_unit_test(test_step_cost_that_is_not_seen_grows_old),
        cmocka_unit_test(test_spec_plan_of_a_noisy_node_is_near_the_best),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

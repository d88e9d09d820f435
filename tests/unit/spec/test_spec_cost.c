/* What drafts are expected to give, what they cost, and how many are chosen. */
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

static void test_step_cost_is_measured_between_and_beyond(void **state)
{
    td_step_cost_t cost;
    (void)state;

    memset(&cost, 0, sizeof(cost));
    assert_true(td_step_cost_ns(&cost, 4) > td_step_cost_ns(&cost, 1));
    td_step_cost_observe(&cost, 1, 1000);
    assert_near(td_step_cost_ns(&cost, 1), 1000, 1e-6);
    assert_true(td_step_cost_ns(&cost, 5) > 1500);
    td_step_cost_observe(&cost, 5, 1800);
    assert_near(td_step_cost_ns(&cost, 3), 1400, 1e-6);
    assert_true(td_step_cost_ns(&cost, 9) > 1800);
    for (uint32_t i = 0; i < 100; i++) {
        td_step_cost_observe(&cost, 1, 2000);
    }
    assert_near(td_step_cost_ns(&cost, 1), 2000, 1);
    td_step_cost_observe(&cost, TD_STEP_COST_ROWS_MAX + 50, 9000); /* counts as the last */
    assert_near(td_step_cost_ns(&cost, TD_STEP_COST_ROWS_MAX), 9000, 1e-6);
}

static void test_acceptance_learns_forgets_and_tries_again(void **state)
{
    td_acceptance_t a;
    double low = 0;
    (void)state;

    td_acceptance_init(&a, 0.6);
    assert_near(td_acceptance_rate(&a), 0.6, 1e-9);
    for (uint32_t i = 0; i < 40; i++) {
        td_acceptance_observe(&a, 4, 4);
    }
    assert_true(td_acceptance_rate(&a) > 0.97);
    for (uint32_t i = 0; i < 40; i++) {
        td_acceptance_observe(&a, 4, 0);
    }
    low = td_acceptance_rate(&a);
    assert_true(low < 0.1);
    for (uint32_t i = 0; i < 200; i++) {
        td_acceptance_pass(&a);
    }
    assert_near(td_acceptance_rate(&a), 0.6, 0.05);
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
    td_step_cost_t cost;
    td_spec_offer_t one = {.alpha = 0.9, .proposed = 8};
    td_spec_offer_t batch[32];
    (void)state;

    measure(&cost, 0.1); /* a row costs a tenth of a step */
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

/* A step costs 1 ms, and a row more next to nothing: what drafting takes decides. */
static void test_spec_plan_counts_drafting(void **state)
{
    td_step_cost_t cost;
    td_spec_offer_t one = {.alpha = 0.7, .proposed = 8};
    td_spec_offer_t two[2];
    uint32_t free_k = 0;
    (void)state;

    measure(&cost, 0.01);
    td_spec_plan(&cost, &one, 1, 0, 64);
    free_k = one.k;
    one.draft_ns = 2e5; /* a fifth of a step */
    td_spec_plan(&cost, &one, 1, 0, 64);
    assert_in_range(one.k, 1, free_k - 1);
    one.draft_ns = 8e5; /* more than it is expected to save */
    td_spec_plan(&cost, &one, 1, 0, 64);
    assert_int_equal(one.k, 0);
    one.k_min = 2; /* asked for */
    td_spec_plan(&cost, &one, 1, 0, 64);
    assert_int_equal(one.k, 2);
    /* Drafts that are there come before likelier ones that are yet to be made. */
    two[0] = (td_spec_offer_t){.alpha = 0.7, .proposed = 8, .draft_ns = 8e5};
    two[1] = (td_spec_offer_t){.alpha = 0.6, .proposed = 8};
    td_spec_plan(&cost, two, 2, 0, 64);
    assert_int_equal(two[0].k, 0);
    assert_true(two[1].k > 0);
}

/* What seemed too dear is tried again. */
static void test_step_cost_is_forgotten(void **state)
{
    td_step_cost_t cost = {0};
    (void)state;

    td_step_cost_observe(&cost, 2, 1000000);
    td_step_cost_forget(&cost);
    assert_in_range(td_step_cost_ns(&cost, 2), 990000, 999999);
    for (uint32_t i = 0; i < 1000; i++) {
        td_step_cost_forget(&cost);
    }
    assert_true(td_step_cost_ns(&cost, 2) < 500000 && td_step_cost_ns(&cost, 2) > 0);
}

/* The plan against every other choice of both k. */
static void test_spec_plan_is_the_best(void **state)
{
    td_step_cost_t cost;
    (void)state;

    for (uint32_t round = 0; round < 50; round++) {
        td_spec_offer_t o[2] = {
            {.alpha = (round % 10) / 10.0 + 0.05, .proposed = 6},
            {.alpha = (round % 7) / 7.0 + 0.1, .proposed = 4, .draft_ns = round % 4 * 1e5}};
        double best = 0;
        double got = 0;
        measure(&cost, 0.04 * (round % 8 + 1));
        td_spec_plan(&cost, o, 2, round % 3, 64);
        for (uint32_t a = 0; a <= 6; a++) {
            for (uint32_t b = 0; b <= 4; b++) {
                const double ratio =
                    (td_spec_expected_tokens(o[0].alpha, a) +
                     td_spec_expected_tokens(o[1].alpha, b)) /
                    (td_step_cost_ns(&cost, 2 + a + b + round % 3) + b * o[1].draft_ns);
                best = ratio > best ? ratio : best;
                got = a == o[0].k && b == o[1].k ? ratio : got;
            }
        }
        assert_true(got >= best * 0.999999);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_spec_expected_tokens),
        cmocka_unit_test(test_step_cost_is_measured_between_and_beyond),
        cmocka_unit_test(test_acceptance_learns_forgets_and_tries_again),
        cmocka_unit_test(test_spec_plan_takes_what_pays),
        cmocka_unit_test(test_spec_plan_counts_drafting),
        cmocka_unit_test(test_step_cost_is_forgotten),
        cmocka_unit_test(test_spec_plan_is_the_best),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>

#include "router/rtr_placement.h"

#define TOKEN_NS 1000.0
#define PROMPT_NS 50000.0
#define PAIR_NS 0.5

static double near(double value, double of)
{
    return fabs(value - of) / of;
}

static double took(const rtr_work_t *w)
{
    return PROMPT_NS * (double)w->prompts + TOKEN_NS * (double)w->tokens +
           PAIR_NS * (double)w->pairs;
}

/* Work of all kinds, the same each time. */
static rtr_work_t work_at(uint32_t i)
{
    const uint32_t prompt = 100 + i * 7919 % 4000;
    return rtr_work_of(prompt, i * 104729 % prompt, 0);
}

static rtr_estimate_t learned(uint32_t count, double factor)
{
    rtr_estimate_t e = {0};
    for (uint32_t i = 0; i < count; i++) {
        const rtr_work_t w = work_at(i);
        rtr_work_observe(&e, NULL, &w, factor * took(&w));
    }
    return e;
}

static void test_work_counts_what_computed_tokens_see(void **state)
{
    const rtr_work_t w = rtr_work_of(10, 4, 3);
    uint64_t pairs = 0;
    (void)state;

    for (uint32_t q = 4; q < 10; q++) {
        pairs += q + 1;
    }
    assert_int_equal(w.prompts, 1);
    assert_int_equal(w.tokens, 6);
    assert_int_equal(w.pairs, pairs);
    assert_int_equal(w.pulled, 3);
    assert_int_equal(rtr_work_of(10, 99, 0).tokens, 0);
}

static void test_estimate_knows_nothing_before_the_first_observation(void **state)
{
    const rtr_estimate_t none = {0};
    const rtr_work_t w = rtr_work_of(10, 0, 0);
    (void)state;
    assert_true(rtr_work_ns(&none, &w) < 0);
    assert_true(rtr_tbt_ns(&none, 3, 40) < 0);
}

static void test_estimate_finds_what_each_quantity_costs(void **state)
{
    const rtr_estimate_t e = learned(200, 1);
    const rtr_work_t far = rtr_work_of(16000, 0, 0);
    (void)state;

    assert_true(near(e.weights[0], TOKEN_NS) < 0.02);
    assert_true(near(e.weights[2], PAIR_NS) < 0.05);
    assert_true(near(rtr_work_ns(&e, &far), took(&far)) < 0.05);
    assert_true(e.error < 0.05);
    assert_int_equal(e.outliers, 0);
}

static void test_estimate_takes_one_observation_for_a_line_through_nothing(void **state)
{
    rtr_estimate_t e = {0};
    const rtr_work_t once = rtr_work_of(100, 0, 0);
    const rtr_work_t twice = rtr_work_of(200, 0, 0);
    (void)state;

    rtr_work_observe(&e, NULL, &once, 100000);
    assert_true(near(rtr_work_ns(&e, &once), 100000) < 0.02);
    assert_true(near(rtr_work_ns(&e, &twice), 200000) < 0.05);
}

static void test_estimate_moves_outliers_but_believes_a_change(void **state)
{
    rtr_estimate_t e = learned(200, 1);
    const rtr_work_t w = rtr_work_of(2000, 0, 0);
    const double before = rtr_work_ns(&e, &w);
    (void)state;

    rtr_work_observe(&e, NULL, &w, 1000 * took(&w));
    assert_int_equal(e.outliers, 1);
    assert_true(near(rtr_work_ns(&e, &w), before) < 0.05);
    for (uint32_t i = 0; i < 400; i++) {
        const rtr_work_t next = work_at(i);
        rtr_work_observe(&e, NULL, &next, 3 * took(&next));
    }
    assert_true(near(rtr_work_ns(&e, &w), 3 * took(&w)) < 0.05);
}

static void test_estimate_of_a_new_node_begins_with_its_peers(void **state)
{
    const rtr_estimate_t peers = learned(200, 1);
    rtr_estimate_t e = {0};
    const rtr_work_t w = rtr_work_of(1000, 0, 0);
    const rtr_work_t far = rtr_work_of(8000, 0, 0);
    (void)state;

    rtr_work_observe(&e, &peers, &w, took(&w));
    assert_true(near(rtr_work_ns(&e, &far), took(&far)) < 0.05);
    for (uint32_t i = 0; i < 200; i++) {
        const rtr_work_t next = work_at(i);
        rtr_work_observe(&e, &peers, &next, 2 * took(&next));
    }
    assert_true(near(rtr_work_ns(&e, &far), 2 * took(&far)) < 0.1); /* its own count in the end */
}

static void test_estimate_never_answers_below_nothing(void **state)
{
    rtr_estimate_t e = {0};
    const rtr_work_t tiny = rtr_work_of(1, 0, 0);
    (void)state;

    for (uint32_t i = 0; i < 50; i++) { /* long prompts took less: only noise can say so */
        const rtr_work_t w = rtr_work_of(100 + 100 * (i % 10), 0, 0);
        rtr_work_observe(&e, NULL, &w, 1e6 - 1e5 * (i % 10));
    }
    assert_true(rtr_work_ns(&e, &tiny) >= 0);
    for (uint32_t i = 0; i < RTR_FEATURES; i++) {
        assert_true(e.weights[i] >= 0);
    }
}

static void test_estimate_guesses_what_pulling_costs_until_it_saw_some(void **state)
{
    rtr_estimate_t e = learned(100, 1);
    (void)state;

    assert_true(e.weights[3] == e.weights[0] / 2);
    for (uint32_t i = 0; i < 300; i++) {
        rtr_work_t w = work_at(i);
        w.pulled = i * 31 % 1000;
        rtr_work_observe(&e, NULL, &w, took(&w) + 10.0 * (double)w.pulled);
    }
    assert_true(e.weights[3] > 5 && e.weights[3] < 20);
}

static void test_tbt_grows_with_sequences_and_blocks(void **state)
{
    rtr_estimate_t e = {0};
    (void)state;

    for (uint32_t i = 0; i < 300; i++) {
        const uint32_t sequences = 1 + i % 40;
        const uint64_t blocks = i * 37 % 5000;
        rtr_tbt_observe(&e, NULL, sequences, blocks, 1e7 + 1e5 * sequences + 2e3 * (double)blocks);
    }
    assert_true(near(rtr_tbt_ns(&e, 50, 6000), 1e7 + 5e6 + 12e6) < 0.05);
}

static void test_backlog_times_add_up_to_the_busy_time(void **state)
{
    rtr_backlog_t b = {0};
    const rtr_work_t w = rtr_work_of(100, 0, 0);
    (void)state;

    rtr_backlog_add(&b, &w, 1000);
    rtr_backlog_add(&b, &w, 1500);
    assert_int_equal(b.work.tokens, 200);
    assert_int_equal(rtr_backlog_end(&b, 1200, 4000), 2800); /* it was told at 1200 */
    rtr_backlog_remove(&b, &w);
    assert_int_equal(rtr_backlog_end(&b, 1500, 5000), 1000); /* it waited for the first */
    rtr_backlog_remove(&b, &w);
    assert_int_equal(b.work.prompts, 0);
    assert_int_equal(b.work.pairs, 0);
    rtr_backlog_add(&b, &w, 9000); /* idle in between */
    assert_int_equal(rtr_backlog_end(&b, 9000, 9500), 500);
}

static void test_backlog_forgets_old_load_by_halves(void **state)
{
    rtr_backlog_t b = {0};
    const rtr_work_t w = rtr_work_of(100, 0, 0);
    const uint64_t half_ns = (uint64_t)RTR_LATELY_HALF_NS;
    (void)state;

    rtr_backlog_add(&b, &w, 1);
    assert_true(near(rtr_backlog_lately(&b, 1 + half_ns / 2), 75) < 1e-6);
    assert_true(near(rtr_backlog_lately(&b, 1 + half_ns), 50) < 1e-6);
    assert_true(rtr_backlog_lately(&b, 1 + 100 * half_ns) == 0);
    rtr_backlog_add(&b, &w, 1 + half_ns);
    assert_true(near(rtr_backlog_lately(&b, 1 + 2 * half_ns), 75) < 1e-6);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_work_counts_what_computed_tokens_see),
        cmocka_unit_test(test_estimate_knows_nothing_before_the_first_observation),
        cmocka_unit_test(test_estimate_finds_what_each_quantity_costs),
        cmocka_unit_test(test_estimate_takes_one_observation_for_a_line_through_nothing),
        cmocka_unit_test(test_estimate_moves_outliers_but_believes_a_change),
        cmocka_unit_test(test_estimate_of_a_new_node_begins_with_its_peers),
        cmocka_unit_test(test_estimate_never_answers_below_nothing),
        cmocka_unit_test(test_estimate_guesses_what_pulling_costs_until_it_saw_some),
        cmocka_unit_test(test_tbt_grows_with_sequences_and_blocks),
        cmocka_unit_test(test_backlog_times_add_up_to_the_busy_time),
        cmocka_unit_test(test_backlog_forgets_old_load_by_halves),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

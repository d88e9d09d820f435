#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <string.h>

#include "router/rtr_placement.h"

#define BLOCK 16u

static rtr_rate_t rate_of(double ns_per_token, double at_zero)
{
    rtr_rate_t rate = {0};
    for (uint32_t i = 1; i <= 20; i++) {
        rtr_rate_observe(&rate, i * 100, (uint64_t)(at_zero + ns_per_token * i * 100));
    }
    return rate;
}

static void test_rate_finds_slope_and_start(void **state)
{
    rtr_rate_t rate = rate_of(1000, 50000);
    rtr_rate_t one = {0};
    (void)state;

    assert_true(rtr_rate_predict(&(rtr_rate_t){0}, 10) < 0);
    assert_true(rtr_rate_predict(&rate, 500) > 540000 && rtr_rate_predict(&rate, 500) < 560000);
    rtr_rate_observe(&one, 100, 7000); /* a single point: a line through the origin */
    assert_true(rtr_rate_predict(&one, 200) > 13999 && rtr_rate_predict(&one, 200) < 14001);
}

static void test_rate_forgets_what_is_long_ago(void **state)
{
    rtr_rate_t rate = rate_of(1000, 0);
    (void)state;

    for (uint32_t i = 0; i < 300; i++) {
        rtr_rate_observe(&rate, 100 + i % 7 * 100, (100 + i % 7 * 100) * 3000ull);
    }
    assert_true(rtr_rate_predict(&rate, 1000) > 2.9e6);
}

static void test_place_prefill_prefers_the_match_when_load_is_even(void **state)
{
    rtr_rate_t rate = rate_of(1000, 0);
    const rtr_prefill_view_t views[] = {
        {.allowed = true, .rate = &rate},
        {.allowed = true, .rate = &rate, .match_tokens = 480},
        {.allowed = true, .rate = &rate, .match_tokens = 160},
    };
    (void)state;
    assert_int_equal(rtr_place_prefill(views, 3, 512, BLOCK, 0), 1);
}

static void
test_f11_place_prefill_leaves_a_hot_node_when_its_queue_outweighs_the_match(void **state)
{
    rtr_rate_t rate = rate_of(1000, 0);
    rtr_prefill_view_t views[] = {
        {.allowed = true, .rate = &rate, .ahead_tokens = 300, .match_tokens = 480},
        {.allowed = true, .rate = &rate},
    };
    (void)state;
    assert_int_equal(rtr_place_prefill(views, 2, 512, BLOCK, 0), 0);
    views[0].ahead_tokens = 600;
    assert_int_equal(rtr_place_prefill(views, 2, 512, BLOCK, 0), 1);
}

static void test_place_prefill_on_a_miss_takes_the_least_loaded(void **state)
{
    rtr_rate_t none = {0};
    const rtr_prefill_view_t views[] = {
        {.allowed = true, .rate = &none, .ahead_tokens = 900},
        {.allowed = true, .rate = &none, .ahead_tokens = 100},
        {.allowed = false, .rate = &none},
    };
    (void)state;
    assert_int_equal(rtr_place_prefill(views, 3, 512, BLOCK, 2), 1);
}

static void test_place_prefill_knows_slow_nodes(void **state)
{
    rtr_rate_t fast = rate_of(1000, 0);
    rtr_rate_t slow = rate_of(4000, 0);
    rtr_rate_t none = {0};
    const rtr_prefill_view_t views[] = {
        {.allowed = true, .rate = &slow},
        {.allowed = true, .rate = &fast, .ahead_tokens = 512},
        {.allowed = true, .rate = &none, .ahead_tokens = 512}, /* taken for typical */
    };
    (void)state;
    assert_int_equal(rtr_place_prefill(views, 3, 512, BLOCK, 0), 1);
}

static void test_place_prefill_rotates_over_equals_and_says_none(void **state)
{
    rtr_rate_t none = {0};
    rtr_prefill_view_t views[3] = {{.allowed = true, .rate = &none},
                                   {.allowed = true, .rate = &none},
                                   {.allowed = true, .rate = &none}};
    (void)state;
    for (uint32_t turn = 0; turn < 6; turn++) {
        assert_int_equal(rtr_place_prefill(views, 3, 100, BLOCK, turn), turn % 3);
    }
    memset(views, 0, sizeof(views));
    assert_int_equal(rtr_place_prefill(views, 3, 100, BLOCK, 0), RTR_PLACE_NONE);
    assert_int_equal(rtr_place_prefill(views, 0, 100, BLOCK, 0), RTR_PLACE_NONE);
}

static void test_place_decode_takes_the_fewest_sequences(void **state)
{
    const rtr_decode_view_t views[] = {
        {.allowed = true, .running = 4, .free_blocks = 100, .total_blocks = 100},
        {.allowed = true, .running = 2, .free_blocks = 100, .total_blocks = 100},
        {.allowed = false, .running = 0, .free_blocks = 100, .total_blocks = 100},
    };
    (void)state;
    assert_int_equal(rtr_place_decode(views, 3, 1, 4, 0), 1);
}

static void test_place_decode_sees_growth(void **state)
{
    const rtr_decode_view_t views[] = {
        {.allowed = true, .running = 2, .promised = 95, .free_blocks = 60, .total_blocks = 100},
        {.allowed = true, .running = 6, .promised = 10, .free_blocks = 90, .total_blocks = 100},
    };
    (void)state;
    assert_int_equal(rtr_place_decode(views, 2, 1, 10, 0), 1); /* the first could not hold it */
    assert_int_equal(rtr_place_decode(views, 2, 1, 4, 0), 1);  /* nearly full counts as busy */
}

static void test_place_decode_prefers_a_match_among_equals(void **state)
{
    const rtr_decode_view_t views[] = {
        {.allowed = true, .running = 1, .free_blocks = 50, .total_blocks = 100},
        {.allowed = true, .running = 1, .free_blocks = 50, .total_blocks = 100, .match_blocks = 9},
    };
    (void)state;
    assert_int_equal(rtr_place_decode(views, 2, 1, 4, 0), 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rate_finds_slope_and_start),
        cmocka_unit_test(test_rate_forgets_what_is_long_ago),
        cmocka_unit_test(test_place_prefill_prefers_the_match_when_load_is_even),
        cmocka_unit_test(
            test_f11_place_prefill_leaves_a_hot_node_when_its_queue_outweighs_the_match),
        cmocka_unit_test(test_place_prefill_on_a_miss_takes_the_least_loaded),
        cmocka_unit_test(test_place_prefill_knows_slow_nodes),
        cmocka_unit_test(test_place_prefill_rotates_over_equals_and_says_none),
        cmocka_unit_test(test_place_decode_takes_the_fewest_sequences),
        cmocka_unit_test(test_place_decode_sees_growth),
        cmocka_unit_test(test_place_decode_prefers_a_match_among_equals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

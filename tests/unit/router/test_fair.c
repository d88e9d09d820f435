/* The fair queue: shares, order, who gives way; by costs alone, without time. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <string.h>

#include "common/base/td_base.h"
#include "router/rtr_fair.h"
#include "router/sim_random.h"

#define FLOWS 4u
#define WAITING 64u /* of a flow */

typedef struct fixture {
    rtr_fair_t *fair;
    uint32_t weights[FLOWS];
    rtr_fair_item_t items[FLOWS][WAITING];
    uint64_t got[FLOWS];
    uint64_t random;
} fixture_t;

static fixture_t fx;

static void open_fair(const uint32_t weights[FLOWS])
{
    fx = (fixture_t){.random = 7};
    memcpy(fx.weights, weights, sizeof(fx.weights));
    assert_int_equal(rtr_fair_create(weights, FLOWS, &fx.fair), TD_OK);
}

static int teardown(void **state)
{
    (void)state;
    rtr_fair_destroy(fx.fair);
    fx.fair = NULL;
    return 0;
}

static rtr_fair_item_t *join(uint32_t flow, uint32_t i, int32_t priority, uint64_t cost)
{
    rtr_fair_item_t *item = &fx.items[flow][i];
    *item = (rtr_fair_item_t){.owner = item, .flow = flow, .priority = priority, .cost = cost};
    rtr_fair_join(fx.fair, item);
    return item;
}

static rtr_fair_item_t *first(void)
{
    rtr_fair_item_t *item = NULL;
    return rtr_fair_first(fx.fair, 1, &item) == 1 ? item : NULL;
}

static void serve(rtr_fair_item_t *item)
{
    rtr_fair_charge(fx.fair, item->flow, item->cost);
    rtr_fair_leave(fx.fair, item);
    fx.got[item->flow] += item->cost;
}

/* What two flows got by their weights, cross-multiplied, differs by an item of each at most. */
static void assert_shares(const uint64_t since[FLOWS], uint32_t flows, uint64_t cost_max)
{
    for (uint32_t a = 0; a < flows; a++) {
        for (uint32_t b = 0; b < flows; b++) {
            const uint64_t left = (fx.got[a] - since[a]) * fx.weights[b];
            const uint64_t right = (fx.got[b] - since[b]) * fx.weights[a];
            assert_true(left <= right + cost_max * (fx.weights[a] + fx.weights[b]));
        }
    }
}

/* All flows always have items; costs are random, and each flow's of another size. */
static void test_shares_are_as_the_weights_within_a_request(void **state)
{
    const uint32_t weights[FLOWS] = {1, 3, 7, 1000};
    const uint64_t none[FLOWS] = {0};
    (void)state;

    open_fair(weights);
    for (uint32_t flow = 0; flow < FLOWS; flow++) {
        for (uint32_t i = 0; i < WAITING; i++) {
            (void)join(flow, i, 0, 1 + sim_random(&fx.random) % (1000 << flow));
        }
    }
    for (uint32_t round = 0; round < 200000; round++) {
        rtr_fair_item_t *item = first();
        const uint32_t flow = item->flow;
        const uint32_t at = (uint32_t)(item - fx.items[flow]);
        serve(item);
        (void)join(flow, at, 0, 1 + sim_random(&fx.random) % (1000 << flow));
        assert_shares(none, FLOWS, 8000);
    }
    assert_true(fx.got[0] > 50000); /* the lightest, too, in the long run */
}

/* What is listed as next is what comes next. */
static void test_the_first_are_those_that_are_served_one_by_one(void **state)
{
    const uint32_t weights[FLOWS] = {1, 2, 3, 4};
    rtr_fair_item_t *listed[RTR_FAIR_FIRST_MAX];
    (void)state;

    open_fair(weights);
    for (uint32_t i = 0; i < 200; i++) {
        const uint32_t flow = (uint32_t)(sim_random(&fx.random) % FLOWS);
        if (!fx.items[flow][i % WAITING].waits) {
            (void)join(flow, i % WAITING, (int32_t)(sim_random(&fx.random) % 3) - 1,
                       1 + sim_random(&fx.random) % 500);
        }
    }
    while (rtr_fair_count(fx.fair) > 0) {
        const uint32_t count = rtr_fair_first(fx.fair, RTR_FAIR_FIRST_MAX, listed);
        assert_int_equal(count, TD_MIN(rtr_fair_count(fx.fair), RTR_FAIR_FIRST_MAX));
        for (uint32_t i = 0; i < count; i++) {
            assert_ptr_equal(first(), listed[i]);
            serve(listed[i]);
        }
    }
}

static void test_a_flow_that_comes_waits_for_nobodys_past(void **state)
{
    const uint32_t weights[FLOWS] = {1, 1, 1, 1};
    uint64_t since[FLOWS];
    (void)state;

    open_fair(weights);
    for (uint32_t i = 0; i < WAITING; i++) {
        (void)join(0, i, 0, 100);
    }
    for (uint32_t i = 0; i < 40; i++) {
        assert_int_equal(first()->flow, 0);
        serve(first());
    }
    for (uint32_t i = 0; i < 20; i++) {
        (void)join(1, i, 0, 100);
    }
    memcpy(since, fx.got, sizeof(since));
    for (uint32_t i = 0; i < 20; i++) { /* from now on in turn: no credit for what it did not use */
        serve(first());
        assert_shares(since, 2, 100);
    }
}

/* Served without waiting, as long as there is room: that counts as well. */
static void test_what_did_not_wait_is_paid_for(void **state)
{
    const uint32_t weights[FLOWS] = {1, 1, 1, 1};
    (void)state;

    open_fair(weights);
    for (uint32_t i = 0; i < 10; i++) {
        rtr_fair_charge(fx.fair, 0, 1000);
    }
    (void)join(0, 0, 0, 10);
    (void)join(1, 0, 0, 600);
    (void)join(1, 1, 0, 600);
    (void)join(1, 2, 0, 600);
    assert_int_equal(first()->flow, 1); /* flow 0 has just had 1000 */
    serve(first());
    assert_int_equal(first()->flow, 1);
    serve(first());
    assert_int_equal(first()->flow, 0);
}

static void test_what_leaves_unserved_costs_nothing(void **state)
{
    const uint32_t weights[FLOWS] = {1, 1, 1, 1};
    (void)state;

    open_fair(weights);
    for (uint32_t i = 0; i < 10; i++) {
        (void)join(0, i, 0, 1000);
    }
    (void)join(1, 0, 0, 1000);
    for (uint32_t i = 0; i < 9; i++) {
        rtr_fair_leave(fx.fair, &fx.items[0][i]);
    }
    assert_int_equal(rtr_fair_flow_count(fx.fair, 0), 1);
    assert_ptr_equal(first(), &fx.items[0][9]); /* the older one of equal tags */
    serve(first());
    (void)join(0, 0, 0, 1000);
    assert_ptr_equal(first(), &fx.items[1][0]);
    serve(first());
    (void)join(1, 0, 0, 1000);
    assert_ptr_equal(first(), &fx.items[0][0]);
}

static void test_lower_priorities_come_first_and_cost_the_same(void **state)
{
    const uint32_t weights[FLOWS] = {1, 1, 1, 1};
    rtr_fair_item_t *listed[4];
    (void)state;

    open_fair(weights);
    (void)join(0, 0, 0, 10);
    (void)join(0, 1, -1, 10);
    (void)join(0, 2, -1, 10);
    (void)join(1, 0, 0, 10);
    assert_int_equal(rtr_fair_first(fx.fair, 4, listed), 4);
    assert_ptr_equal(listed[0], &fx.items[0][1]);
    assert_ptr_equal(listed[1], &fx.items[0][2]);
    assert_ptr_equal(listed[2], &fx.items[1][0]); /* flow 0 has had two */
    assert_ptr_equal(listed[3], &fx.items[0][0]);
}

/* Priorities let one flow pass, while another waits: who comes then is held up by neither. */
static void test_no_starvation_behind_priorities(void **state)
{
    const uint32_t weights[FLOWS] = {1, 1, 1, 1};
    (void)state;

    open_fair(weights);
    for (uint32_t i = 0; i < WAITING; i++) {
        (void)join(1, i, 0, 100);
    }
    for (uint32_t i = 0; i < 30; i++) {
        (void)join(0, i, -1, 100);
    }
    for (uint32_t i = 0; i < 30; i++) {
        assert_int_equal(first()->flow, 0);
        serve(first());
    }
    (void)join(2, 0, 0, 100);
    assert_int_equal(first()->flow, 1);
    serve(first());
    assert_int_equal(first()->flow, 2);
}

static void test_who_has_most_gives_way_to_who_has_less_than_its_share(void **state)
{
    const uint32_t weights[FLOWS] = {1, 3, 1, 1};
    const uint32_t victims[] = {3, 7, 6, 5, 4, 2}; /* the last of its order */
    (void)state;

    open_fair(weights);
    for (uint32_t i = 0; i < 8; i++) {
        (void)join(0, i, i == 3 ? 1 : 0, 10);
    }
    assert_null(rtr_fair_victim(fx.fair, 0, 8));
    for (uint32_t i = 0; i < 6; i++) { /* 3 of 4 shares: 6 places of 8 */
        rtr_fair_item_t *victim = rtr_fair_victim(fx.fair, 1, 8);
        assert_ptr_equal(victim, &fx.items[0][victims[i]]);
        rtr_fair_leave(fx.fair, victim);
        (void)join(1, i, 0, 10);
    }
    assert_null(rtr_fair_victim(fx.fair, 1, 8));
    assert_null(rtr_fair_victim(fx.fair, 0, 8));
    assert_ptr_equal(rtr_fair_victim(fx.fair, 2, 8), &fx.items[0][1]); /* equal: who came first */
    assert_null(rtr_fair_victim(fx.fair, 2, 0));
}

static void test_nobody_takes_more_than_its_share_or_is_driven_out_in_turn(void **state)
{
    const uint32_t weights[FLOWS] = {1, 1, 1, 1};
    const uint32_t counts[3] = {5, 3, 1};
    (void)state;

    open_fair(weights);
    for (uint32_t flow = 0; flow < 3; flow++) {
        for (uint32_t i = 0; i < counts[flow]; i++) {
            (void)join(flow, i, 0, 10);
        }
    }
    assert_null(rtr_fair_victim(fx.fair, 1, 9)); /* it has its 3 of 9, though another has 5 */
    assert_ptr_equal(rtr_fair_victim(fx.fair, 2, 9), &fx.items[0][4]);
    rtr_fair_destroy(fx.fair);
    open_fair(weights);
    (void)join(0, 0, 0, 10);
    assert_null(rtr_fair_victim(fx.fair, 1, 1)); /* else each would drive out the other */
}

static void test_weights_are_checked(void **state)
{
    const uint32_t zero[2] = {1, 0};
    const uint32_t over[2] = {1, RTR_FAIR_WEIGHT_MAX + 1};
    rtr_fair_t *fair = NULL;
    (void)state;

    assert_int_equal(rtr_fair_create(zero, 2, &fair), TD_ERR_INVALID);
    assert_int_equal(rtr_fair_create(over, 2, &fair), TD_ERR_INVALID);
    assert_int_equal(rtr_fair_create(over, 0, &fair), TD_ERR_INVALID);
    assert_int_equal(rtr_fair_create(over, RTR_FAIR_FLOWS_MAX + 1, &fair), TD_ERR_INVALID);
    assert_null(fair);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_shares_are_as_the_weights_within_a_request, teardown),
        cmocka_unit_test_teardown(test_the_first_are_those_that_are_served_one_by_one, teardown),
        cmocka_unit_test_teardown(test_a_flow_that_comes_waits_for_nobodys_past, teardown),
        cmocka_unit_test_teardown(test_what_did_not_wait_is_paid_for, teardown),
        cmocka_unit_test_teardown(test_what_leaves_unserved_costs_nothing, teardown),
        cmocka_unit_test_teardown(test_lower_priorities_come_first_and_cost_the_same, teardown),
        cmocka_unit_test_teardown(test_no_starvation_behind_priorities, teardown),
        cmocka_unit_test_teardown(test_who_has_most_gives_way_to_who_has_less_than_its_share,
                                  teardown),
        cmocka_unit_test_teardown(test_nobody_takes_more_than_its_share_or_is_driven_out_in_turn,
                                  teardown),
        cmocka_unit_test(test_weights_are_checked),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

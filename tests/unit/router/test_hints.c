#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <string.h>

#include "router/rtr_hints.h"

static uint32_t match[RTR_SLOTS_MAX];

static void keys_fill(td_block_key_t *keys, uint32_t count, uint8_t chain)
{
    for (uint32_t i = 0; i < count; i++) {
        memset(&keys[i], 0, sizeof(keys[i]));
        keys[i].bytes[0] = (uint8_t)i;
        keys[i].bytes[1] = chain;
        keys[i].bytes[15] = 1;
    }
}

static void test_hints_match_is_the_longest_prefix_of_each_slot(void **state)
{
    rtr_hints_t *hints = NULL;
    td_block_key_t keys[8];
    (void)state;

    keys_fill(keys, 8, 0);
    assert_int_equal(rtr_hints_create(64, RTR_SLOTS_MAX, &hints), TD_OK);
    rtr_hints_match(hints, keys, 8, match);
    assert_int_equal(match[3], 0);
    rtr_hints_add(hints, keys, 5, 3);
    rtr_hints_add(hints, keys, 8, 200);
    rtr_hints_add(hints, keys + 1, 7, 7); /* without the first block it is no prefix */
    rtr_hints_match(hints, keys, 8, match);
    assert_int_equal(match[3], 5);
    assert_int_equal(match[200], 8);
    assert_int_equal(match[7], 0);
    rtr_hints_match(hints, keys, 2, match);
    assert_int_equal(match[3], 2);
    assert_int_equal(rtr_hints_count(hints), 8);
    rtr_hints_destroy(hints);
}

static void test_hints_purge_forgets_one_slot_alone(void **state)
{
    rtr_hints_t *hints = NULL;
    td_block_key_t keys[4];
    (void)state;

    keys_fill(keys, 4, 0);
    assert_int_equal(rtr_hints_create(64, RTR_SLOTS_MAX, &hints), TD_OK);
    rtr_hints_add(hints, keys, 4, 1);
    rtr_hints_add(hints, keys, 4, 2);
    rtr_hints_purge(hints, 1);
    rtr_hints_match(hints, keys, 4, match);
    assert_int_equal(match[1], 0);
    assert_int_equal(match[2], 4);
    rtr_hints_destroy(hints);
}

static void test_hints_are_bounded_and_drop_the_oldest(void **state)
{
    rtr_hints_t *hints = NULL;
    td_block_key_t a[8];
    td_block_key_t b[8];
    td_block_key_t c[8];
    (void)state;

    keys_fill(a, 8, 1);
    keys_fill(b, 8, 2);
    keys_fill(c, 8, 3);
    assert_int_equal(rtr_hints_create(16, RTR_SLOTS_MAX, &hints), TD_OK);
    rtr_hints_add(hints, a, 8, 1);
    rtr_hints_add(hints, b, 8, 1);
    rtr_hints_add(hints, a, 8, 2); /* used again: newer than b */
    rtr_hints_add(hints, c, 8, 1);
    assert_int_equal(rtr_hints_count(hints), 16);
    rtr_hints_match(hints, a, 8, match);
    assert_int_equal(match[1], 8);
    assert_int_equal(match[2], 8);
    rtr_hints_match(hints, b, 8, match);
    assert_int_equal(match[1], 0);
    rtr_hints_match(hints, c, 8, match);
    assert_int_equal(match[1], 8);
    rtr_hints_destroy(hints);
}

static void test_hints_evict_the_end_of_a_chain_first(void **state)
{
    rtr_hints_t *hints = NULL;
    td_block_key_t a[8];
    td_block_key_t b[2];
    (void)state;

    keys_fill(a, 8, 1);
    keys_fill(b, 2, 2);
    assert_int_equal(rtr_hints_create(8, RTR_SLOTS_MAX, &hints), TD_OK);
    rtr_hints_add(hints, a, 8, 1);
    rtr_hints_add(hints, b, 2, 1);
    rtr_hints_match(hints, a, 8, match);
    assert_int_equal(match[1], 6);
    rtr_hints_destroy(hints);
}

static void test_hints_match_answers_the_longest_and_forgets_one_block(void **state)
{
    rtr_hints_t *hints = NULL;
    td_block_key_t keys[8];
    static uint32_t wide[1000];
    (void)state;

    keys_fill(keys, 8, 0);
    assert_int_equal(rtr_hints_create(64, 1000, &hints), TD_OK);
    assert_int_equal(rtr_hints_match(hints, keys, 8, wide), 0);
    rtr_hints_add(hints, keys, 8, 999);
    rtr_hints_add(hints, keys, 6, 0);
    assert_int_equal(rtr_hints_match(hints, keys, 8, wide), 8);
    assert_int_equal(wide[999], 8);
    assert_int_equal(wide[0], 6);
    rtr_hints_remove(hints, &keys[3], 999);
    assert_int_equal(rtr_hints_match(hints, keys, 8, wide), 6);
    assert_int_equal(wide[999], 3);
    rtr_hints_remove(hints, &keys[3], 0); /* the entry stays, nobody's */
    assert_int_equal(rtr_hints_match(hints, keys, 8, wide), 3);
    assert_int_equal(wide[0], 3);
    assert_int_equal(rtr_hints_match(hints, keys, 0, wide), 0);
    rtr_hints_destroy(hints);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_hints_match_answers_the_longest_and_forgets_one_block),
        cmocka_unit_test(test_hints_match_is_the_longest_prefix_of_each_slot),
        cmocka_unit_test(test_hints_purge_forgets_one_slot_alone),
        cmocka_unit_test(test_hints_are_bounded_and_drop_the_oldest),
        cmocka_unit_test(test_hints_evict_the_end_of_a_chain_first),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

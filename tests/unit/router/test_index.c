#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <string.h>

#include "router/rtr_index.h"
#include "router/rtr_slots.h"

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

static void test_index_match_is_the_longest_prefix_of_each_slot(void **state)
{
    rtr_index_t *index = NULL;
    td_block_key_t keys[8];
    (void)state;

    keys_fill(keys, 8, 0);
    assert_int_equal(rtr_index_create(64, RTR_SLOTS_MAX, &index), TD_OK);
    rtr_index_match(index, keys, 8, match);
    assert_int_equal(match[3], 0);
    rtr_index_stored(index, keys, 5, 3);
    rtr_index_stored(index, keys, 8, 200);
    rtr_index_stored(index, keys + 1, 7, 7); /* without the first block it is no prefix */
    rtr_index_match(index, keys, 8, match);
    assert_int_equal(match[3], 5);
    assert_int_equal(match[200], 8);
    assert_int_equal(match[7], 0);
    rtr_index_match(index, keys, 2, match);
    assert_int_equal(match[3], 2);
    assert_int_equal(rtr_index_blocks(index), 8);
    rtr_index_destroy(index);
}

static void test_index_purge_forgets_one_slot_alone(void **state)
{
    rtr_index_t *index = NULL;
    td_block_key_t keys[4];
    (void)state;

    keys_fill(keys, 4, 0);
    assert_int_equal(rtr_index_create(64, RTR_SLOTS_MAX, &index), TD_OK);
    rtr_index_stored(index, keys, 4, 1);
    rtr_index_stored(index, keys, 4, 2);
    rtr_index_purge(index, 1);
    rtr_index_match(index, keys, 4, match);
    assert_int_equal(match[1], 0);
    assert_int_equal(match[2], 4);
    rtr_index_destroy(index);
}

static void test_index_are_bounded_and_drop_the_oldest(void **state)
{
    rtr_index_t *index = NULL;
    td_block_key_t a[8];
    td_block_key_t b[8];
    td_block_key_t c[8];
    (void)state;

    keys_fill(a, 8, 1);
    keys_fill(b, 8, 2);
    keys_fill(c, 8, 3);
    assert_int_equal(rtr_index_create(16, RTR_SLOTS_MAX, &index), TD_OK);
    rtr_index_stored(index, a, 8, 1);
    rtr_index_stored(index, b, 8, 1);
    rtr_index_stored(index, a, 8, 2); /* used again: newer than b */
    rtr_index_stored(index, c, 8, 1);
    assert_int_equal(rtr_index_blocks(index), 16);
    rtr_index_match(index, a, 8, match);
    assert_int_equal(match[1], 8);
    assert_int_equal(match[2], 8);
    rtr_index_match(index, b, 8, match);
    assert_int_equal(match[1], 0);
    rtr_index_match(index, c, 8, match);
    assert_int_equal(match[1], 8);
    rtr_index_destroy(index);
}

static void test_index_evict_the_end_of_a_chain_first(void **state)
{
    rtr_index_t *index = NULL;
    td_block_key_t a[8];
    td_block_key_t b[2];
    (void)state;

    keys_fill(a, 8, 1);
    keys_fill(b, 2, 2);
    assert_int_equal(rtr_index_create(8, RTR_SLOTS_MAX, &index), TD_OK);
    rtr_index_stored(index, a, 8, 1);
    rtr_index_stored(index, b, 2, 1);
    rtr_index_match(index, a, 8, match);
    assert_int_equal(match[1], 6);
    rtr_index_destroy(index);
}

static void test_index_match_answers_the_longest_and_forgets_one_block(void **state)
{
    rtr_index_t *index = NULL;
    td_block_key_t keys[8];
    static uint32_t wide[1000];
    (void)state;

    keys_fill(keys, 8, 0);
    assert_int_equal(rtr_index_create(64, 1000, &index), TD_OK);
    assert_int_equal(rtr_index_match(index, keys, 8, wide), 0);
    rtr_index_stored(index, keys, 8, 999);
    rtr_index_stored(index, keys, 6, 0);
    assert_int_equal(rtr_index_match(index, keys, 8, wide), 8);
    assert_int_equal(wide[999], 8);
    assert_int_equal(wide[0], 6);
    rtr_index_removed(index, &keys[3], 999);
    assert_int_equal(rtr_index_match(index, keys, 8, wide), 6);
    assert_int_equal(wide[999], 3);
    rtr_index_removed(index, &keys[3], 0); /* the entry stays, nobody's */
    assert_int_equal(rtr_index_match(index, keys, 8, wide), 3);
    assert_int_equal(wide[0], 3);
    assert_int_equal(rtr_index_match(index, keys, 0, wide), 0);
    rtr_index_destroy(index);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_index_match_answers_the_longest_and_forgets_one_block),
        cmocka_unit_test(test_index_match_is_the_longest_prefix_of_each_slot),
        cmocka_unit_test(test_index_purge_forgets_one_slot_alone),
        cmocka_unit_test(test_index_are_bounded_and_drop_the_oldest),
        cmocka_unit_test(test_index_evict_the_end_of_a_chain_first),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

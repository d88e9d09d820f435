#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/kv/td_kv_events.h"
#include "common/kv/td_pool.h"

static td_block_key_t key_of(uint32_t n)
{
    td_block_key_t key = {{0}};
    memcpy(key.bytes, &n, sizeof(n));
    key.bytes[15] = 1;
    return key;
}

static void stored(td_kv_events_t *e, uint32_t n)
{
    const td_block_key_t key = key_of(n);
    td_kv_events_stored(e, &key);
}

static void removed(td_kv_events_t *e, uint32_t n)
{
    const td_block_key_t key = key_of(n);
    td_kv_events_removed(e, &key);
}

static void test_events_are_numbered_and_kept_while_there_is_room(void **state)
{
    td_kv_events_t *e = NULL;
    td_block_key_t keys[8];
    uint32_t runs[9];
    uint32_t run_count = 0;
    bool cleared = true;
    (void)state;

    assert_int_equal(td_kv_events_create(8, &e), TD_OK);
    assert_int_equal(td_kv_events_oldest(e), 1);
    assert_int_equal(td_kv_events_read(e, 1, 8, keys, runs, &run_count, &cleared), 0);
    assert_true(run_count == 0 && !cleared);
    for (uint32_t i = 1; i <= 5; i++) {
        stored(e, i);
    }
    removed(e, 2);
    removed(e, 3);
    stored(e, 3);
    assert_int_equal(td_kv_events_oldest(e), 1);
    assert_int_equal(td_kv_events_read(e, 1, 8, keys, runs, &run_count, &cleared), 8);
    assert_true(run_count == 3 && runs[0] == 5 && runs[1] == 2 && runs[2] == 1);
    assert_int_equal(keys[7].bytes[0], 3);
    assert_int_equal(td_kv_events_read(e, 6, 8, keys, runs, &run_count, &cleared), 3);
    assert_true(run_count == 3 && runs[0] == 0 && runs[1] == 2 && runs[2] == 1);
    assert_int_equal(td_kv_events_read(e, 2, 3, keys, runs, &run_count, &cleared), 3);
    assert_true(run_count == 1 && runs[0] == 3 && keys[0].bytes[0] == 2);
    stored(e, 9); /* the first goes */
    assert_int_equal(td_kv_events_oldest(e), 2);
    assert_int_equal(e->next, 10);
    td_kv_events_destroy(e);
}

static void test_events_that_clear_stand_alone(void **state)
{
    td_kv_events_t *e = NULL;
    td_block_key_t keys[8];
    uint32_t runs[9];
    uint32_t run_count = 0;
    bool cleared = false;
    (void)state;

    assert_int_equal(td_kv_events_create(8, &e), TD_OK);
    stored(e, 1);
    stored(e, 2);
    td_kv_events_cleared(e);
    assert_true(e->blocks == 0 && e->digest == 0);
    stored(e, 3);
    assert_int_equal(td_kv_events_read(e, 1, 8, keys, runs, &run_count, &cleared), 2);
    assert_true(!cleared && run_count == 1 && runs[0] == 2);
    assert_int_equal(td_kv_events_read(e, 3, 8, keys, runs, &run_count, &cleared), 1);
    assert_true(cleared);
    assert_int_equal(td_kv_events_read(e, 4, 8, keys, runs, &run_count, &cleared), 1);
    assert_true(!cleared && keys[0].bytes[0] == 3);
    td_kv_events_destroy(e);
}

/* I7: what a pool says came and went is what can be found in it. */
static void test_pool_tells_what_can_be_found(void **state)
{
    static uint8_t bytes[8 * 64];
    td_kv_events_t *e = NULL;
    td_pool_t *pool = NULL;
    td_block_key_t keys[8];
    uint32_t cursor = 0;
    uint32_t idx[8];
    uint64_t digest = 0;
    uint32_t count = 0;
    (void)state;

    assert_int_equal(td_kv_events_create(64, &e), TD_OK);
    assert_int_equal(td_pool_create(bytes, 8, 64, &pool), TD_OK);
    td_pool_watch(pool, e);
    for (uint32_t i = 0; i < 8; i++) {
        const td_block_key_t key = key_of(i);
        assert_int_equal(td_pool_take(pool, &idx[i]), TD_OK);
        assert_int_equal(td_pool_index(pool, idx[i], &key, 0), TD_OK);
    }
    assert_true(e->blocks == 8 && e->next == 9);
    for (uint32_t i = 0; i < 4; i++) {
        td_pool_unref(pool, idx[i]);
    }
    assert_int_equal(td_pool_reserve(pool, 3), TD_OK); /* three are evicted */
    td_pool_unreserve(pool, 3);
    td_pool_unindex(pool, idx[7]);
    assert_true(e->blocks == 4 && e->next == 13);
    while (cursor != UINT32_MAX) {
        count += td_pool_walk(pool, &cursor, 3, keys + count);
    }
    assert_int_equal(count, 4);
    for (uint32_t i = 0; i < count; i++) {
        assert_int_not_equal(td_pool_find(pool, &keys[i]), TD_POOL_NONE);
        digest ^= td_block_key_word(&keys[i]);
    }
    assert_true(digest == e->digest);
    for (uint32_t i = 4; i < 8; i++) {
        td_pool_unref(pool, idx[i]);
    }
    td_pool_destroy(pool);
    td_kv_events_destroy(e);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_events_are_numbered_and_kept_while_there_is_room),
        cmocka_unit_test(test_events_that_clear_stand_alone),
        cmocka_unit_test(test_pool_tells_what_can_be_found),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

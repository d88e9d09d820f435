/* Answers that nodes remember for each other: found by their key, bounded, forgotten. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <string.h>

#include "common/base/td_base.h"
#include "kvstore/kvs_memo.h"

#define BYTES 4096u
#define AGE_NS 1000u

static td_block_key_t key_of(uint32_t n)
{
    td_block_key_t key = {{0}};
    memcpy(key.bytes, &n, sizeof(n));
    return key;
}

static kvs_memo_t *create(uint64_t bytes)
{
    kvs_memo_t *memo = NULL;
    assert_int_equal(kvs_memo_create(bytes, AGE_NS, &memo), TD_OK);
    return memo;
}

static void put(kvs_memo_t *memo, uint32_t n, uint32_t count, uint64_t now_ns)
{
    static uint32_t tokens[4096];
    const td_block_key_t key = key_of(n);

    for (uint32_t i = 0; i < count; i++) {
        tokens[i] = 1000 * n + i;
    }
    kvs_memo_put(memo, &key, tokens, count, now_ns);
}

/* How many tokens are found; each is checked. */
static uint32_t get(kvs_memo_t *memo, uint32_t n, uint64_t now_ns)
{
    const td_block_key_t key = key_of(n);
    uint32_t count = 0;
    const uint32_t *tokens = kvs_memo_get(memo, &key, now_ns, &count);

    for (uint32_t i = 0; i < count; i++) {
        assert_int_equal(tokens[i], 1000 * n + i);
    }
    return count;
}

static void test_store_memo_keeps_the_newest_answer(void **state)
{
    kvs_memo_t *memo = create(BYTES);
    (void)state;

    assert_int_equal(get(memo, 1, 0), 0);
    put(memo, 1, 20, 0);
    put(memo, 2, 5, 0);
    assert_int_equal(get(memo, 1, 0), 20);
    put(memo, 1, 7, 0);
    assert_int_equal(get(memo, 1, 0), 7);
    assert_int_equal(get(memo, 2, 0), 5);
    assert_int_equal(kvs_memo_count(memo), 2);
    kvs_memo_destroy(memo);
}

static void test_store_memo_forgets_by_age(void **state)
{
    kvs_memo_t *memo = create(BYTES);
    (void)state;

    put(memo, 1, 3, 100);
    assert_int_equal(get(memo, 1, 100 + AGE_NS), 3);
    assert_int_equal(get(memo, 1, 101 + AGE_NS), 0);
    assert_int_equal(kvs_memo_count(memo), 0);
    assert_int_equal(kvs_memo_bytes(memo), 0);
    kvs_memo_destroy(memo);
}

/* I6: bytes in all are bounded; who was used least lately goes. */
static void test_i6_store_memo_is_bounded(void **state)
{
    kvs_memo_t *memo = create(BYTES);
    kvs_memo_t *none = create(0);
    (void)state;

    for (uint32_t i = 0; i < 5000; i++) {
        put(memo, i, 1 + i % 60, 0);
        assert_true(kvs_memo_bytes(memo) <= BYTES);
        assert_int_equal(get(memo, i, 0), 1 + i % 60);
        assert_true(i == 0 || get(memo, i - 1, 0) > 0); /* used again and again */
    }
    assert_in_range(kvs_memo_count(memo), 10, BYTES / 64);
    put(memo, 9999, 2000, 0); /* larger than all room: nobody goes for it */
    assert_int_equal(get(memo, 9999, 0), 0);
    assert_int_equal(get(memo, 4999, 0), 1 + 4999 % 60);
    put(none, 1, 1, 0);
    assert_int_equal(get(none, 1, 0), 0);
    kvs_memo_destroy(memo);
    kvs_memo_destroy(none);
}

static void test_store_memo_least_used_goes_first(void **state)
{
    kvs_memo_t *memo = create(BYTES);
    uint32_t kept = 0;
    (void)state;

    for (uint32_t i = 0; i < 40; i++) {
        put(memo, i, 100, 0);
        kept = get(memo, 0, 0);
        assert_int_equal(kept, 100);
    }
    assert_int_equal(get(memo, 1, 0), 0);
    assert_int_equal(get(memo, 39, 0), 100);
    kvs_memo_destroy(memo);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_store_memo_keeps_the_newest_answer),
        cmocka_unit_test(test_store_memo_forgets_by_age),
        cmocka_unit_test(test_i6_store_memo_is_bounded),
        cmocka_unit_test(test_store_memo_least_used_goes_first),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

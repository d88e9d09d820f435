#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/kv/td_pool.h"
#include "common/kv/td_seq.h"

#define BLOCKS 8u
#define BLOCK_BYTES 64u

static uint8_t memory[BLOCKS * BLOCK_BYTES];

static int setup(void **state)
{
    td_pool_t *pool = NULL;
    memset(memory, 0xab, sizeof(memory));
    assert_int_equal(td_pool_create(memory, BLOCKS, BLOCK_BYTES, &pool), TD_OK);
    *state = pool;
    return 0;
}

static int teardown(void **state)
{
    td_pool_destroy(*state);
    return 0;
}

static td_block_key_t key_of(uint32_t n)
{
    const uint32_t hash[2] = {n % 5, n * 2654435761u}; /* where the index looks: many probes */
    td_block_key_t key;
    memset(&key, 0, sizeof(key));
    memcpy(key.bytes, hash, sizeof(hash));
    memcpy(key.bytes + sizeof(hash), &n, sizeof(n));
    return key;
}

static void assert_counts(const td_pool_t *pool, uint32_t free_, uint32_t reserved, uint32_t cached,
                          uint32_t active, uint32_t quarantined)
{
    td_pool_counts_t c = td_pool_counts(pool);
    assert_int_equal(c.free, free_);
    assert_int_equal(c.reserved, reserved);
    assert_int_equal(c.cached, cached);
    assert_int_equal(c.active, active);
    assert_int_equal(c.quarantined, quarantined);
}

static void test_pool_take_is_busy_when_empty(void **state)
{
    td_pool_t *pool = *state;
    uint32_t idx[BLOCKS];
    uint32_t more = 77;

    for (uint32_t i = 0; i < BLOCKS; i++) {
        assert_int_equal(td_pool_take(pool, &idx[i]), TD_OK);
    }
    assert_int_equal(td_pool_take(pool, &more), TD_ERR_BUSY);
    assert_int_equal(more, 77);
    assert_counts(pool, 0, 0, 0, BLOCKS, 0);
    for (uint32_t i = 0; i < BLOCKS; i++) {
        td_pool_unref(pool, idx[i]);
    }
    assert_counts(pool, BLOCKS, 0, 0, 0, 0);
}

static void test_pool_reservation_is_all_or_nothing(void **state)
{
    td_pool_t *pool = *state;

    assert_int_equal(td_pool_reserve(pool, 5), TD_OK);
    assert_int_equal(td_pool_reserve(pool, 4), TD_ERR_BUSY);
    assert_counts(pool, 3, 5, 0, 0, 0);
    td_pool_unreserve(pool, 5);
    assert_counts(pool, BLOCKS, 0, 0, 0, 0);
}

static void test_pool_cached_blocks_are_found_and_evicted_oldest_first(void **state)
{
    td_pool_t *pool = *state;
    td_block_key_t keys[3] = {key_of(1), key_of(2), key_of(3)};
    uint32_t idx[3];
    uint32_t matched[3];

    for (uint32_t i = 0; i < 3; i++) {
        assert_int_equal(td_pool_take(pool, &idx[i]), TD_OK);
        assert_int_equal(td_pool_index(pool, idx[i], &keys[i], i), TD_OK);
    }
    for (uint32_t i = 3; i > 0; i--) {
        td_pool_unref(pool, idx[i - 1]); /* leaf first */
    }
    assert_counts(pool, 5, 0, 3, 0, 0);
    assert_int_equal(td_pool_match(pool, keys, 3, matched), 3);
    assert_counts(pool, 5, 0, 0, 3, 0);
    for (uint32_t i = 3; i > 0; i--) {
        td_pool_unref(pool, matched[i - 1]);
    }
    /* Six are wanted, five are free: the leaf goes, the shorter prefix stays. */
    assert_int_equal(td_pool_reserve(pool, 6), TD_OK);
    assert_int_equal(td_pool_find(pool, &keys[2]), TD_POOL_NONE);
    assert_int_equal(td_pool_match(pool, keys, 3, matched), 2);
    td_pool_unref(pool, matched[1]);
    td_pool_unref(pool, matched[0]);
    td_pool_unreserve(pool, 6);
}

static void test_pool_second_block_of_a_key_stays_private(void **state)
{
    td_pool_t *pool = *state;
    td_block_key_t key = key_of(1);
    uint32_t a = 0;
    uint32_t b = 0;

    assert_int_equal(td_pool_take(pool, &a), TD_OK);
    assert_int_equal(td_pool_take(pool, &b), TD_OK);
    assert_int_equal(td_pool_index(pool, a, &key, 5), TD_OK);
    assert_int_equal(td_pool_index(pool, b, &key, 5), TD_ERR_EXISTS);
    assert_int_equal(td_pool_find(pool, &key), a);
    td_pool_unref(pool, b);
    td_pool_unref(pool, a);
    assert_counts(pool, 7, 0, 1, 0, 0);
}

static void test_pool_epoch_changes_when_memory_changes_hands(void **state)
{
    td_pool_t *pool = *state;
    uint32_t a = 0;
    uint32_t b = 0;
    uint64_t epoch = 0;

    assert_int_equal(td_pool_take(pool, &a), TD_OK);
    epoch = td_pool_epoch(pool, a);
    td_pool_unref(pool, a);
    assert_int_not_equal(td_pool_epoch(pool, a), epoch);
    assert_int_equal(td_pool_take(pool, &b), TD_OK);
    assert_int_equal(a, b);
    assert_int_not_equal(td_pool_epoch(pool, b), epoch);
    td_pool_unref(pool, b);
}

/* I2: a block that a transfer may still write into is nobody's until that is over. */
static void test_i2_quarantined_block_is_not_reused(void **state)
{
    td_pool_t *pool = *state;
    uint32_t idx = 0;

    assert_int_equal(td_pool_take(pool, &idx), TD_OK);
    td_pool_quarantine(pool, idx);
    assert_counts(pool, 7, 0, 0, 0, 1);
    assert_int_equal(td_pool_reserve(pool, 8), TD_ERR_BUSY);
    assert_int_equal(td_pool_reserve(pool, 7), TD_OK);
    for (uint32_t i = 0; i < 7; i++) {
        assert_int_not_equal(td_pool_take_reserved(pool), idx);
    }
    td_pool_release_quarantine(pool, idx);
    assert_counts(pool, 1, 0, 0, 7, 0);
    for (uint32_t i = 0; i < BLOCKS; i++) {
        if (i != idx) {
            td_pool_unref(pool, i);
        }
    }
}

/* I5: whatever happens, the states add up (td_pool_counts asserts it) and everything comes back. */
static void test_i5_random_use_always_adds_up(void **state)
{
    td_pool_t *pool = *state;
    uint32_t held[BLOCKS];
    uint32_t held_count = 0;
    unsigned seed = 12345;

    for (uint32_t step = 0; step < 20000; step++) {
        uint32_t what = (uint32_t)rand_r(&seed) % 4;
        uint32_t n = (uint32_t)rand_r(&seed);
        if (what == 0 && held_count < BLOCKS) {
            if (td_pool_take(pool, &held[held_count]) == TD_OK) {
                td_block_key_t key = key_of(n % 12);
                if (n % 3 != 0) {
                    const td_block_key_t parent = key_of(n / 16 % 12);
                    (void)!td_pool_index_after(pool, held[held_count], &parent, &key, n);
                }
                held_count++;
            }
        } else if (what == 1 && held_count > 0) {
            uint32_t at = n % held_count;
            td_pool_unref(pool, held[at]);
            held[at] = held[--held_count];
        } else if (what == 2 && held_count < BLOCKS) {
            td_block_key_t key = key_of(n % 12);
            held_count += td_pool_match(pool, &key, 1, &held[held_count]);
        } else if (what == 3) {
            td_block_key_t key = key_of(n % 12);
            uint32_t idx = td_pool_find(pool, &key);
            if (idx != TD_POOL_NONE && n % 5 == 0) {
                td_pool_unindex(pool, idx);
                assert_int_equal(td_pool_find(pool, &key), TD_POOL_NONE);
            }
        }
        (void)td_pool_counts(pool);
    }
    while (held_count > 0) {
        td_pool_unref(pool, held[--held_count]);
    }
    assert_int_equal(td_pool_counts(pool).active, 0);
}

static const td_attention_mask_t full_mask;
static const td_kv_layout_t layout = {
    .layers = 1, .kv_heads = 1, .head_dim = 8, .block_tokens = 16};

static void test_seq_fork_copies_only_the_written_block(void **state)
{
    td_pool_t *pool = *state;
    td_seq_t a;
    td_seq_t b;

    assert_int_equal(td_seq_init(&a, pool, &layout, &full_mask, 48), TD_OK);
    assert_int_equal(td_seq_init(&b, pool, &layout, &full_mask, 48), TD_OK);
    assert_int_equal(td_seq_reserve(&a, 2), TD_OK);
    (void)td_seq_grow(&a);
    (void)td_seq_grow(&a);
    td_pool_bytes(pool, a.blocks[1])[3] = 42;
    td_seq_fork(&b, &a);
    assert_counts(pool, 6, 0, 0, 2, 0);
    assert_int_equal(td_seq_prepare_write(&b, 20), TD_OK); /* in block 1 */
    assert_int_equal(a.blocks[0], b.blocks[0]);
    assert_int_not_equal(a.blocks[1], b.blocks[1]);
    assert_int_equal(td_pool_bytes(pool, b.blocks[1])[3], 42);
    assert_counts(pool, 5, 0, 0, 3, 0);
    assert_int_equal(td_seq_prepare_write(&a, 20), TD_OK); /* alone by now: no copy */
    assert_counts(pool, 5, 0, 0, 3, 0);
    td_seq_fini(&b);
    td_seq_fini(&a);
    assert_counts(pool, BLOCKS, 0, 0, 0, 0);
}

/* A fork goes on with what is indexed behind what it shares, and needs no promise for that. */
static void test_seq_extend_takes_what_is_here(void **state)
{
    td_pool_t *pool = *state;
    td_block_key_t keys[4];
    td_seq_t a;
    td_seq_t b;

    for (uint32_t i = 0; i < 4; i++) {
        keys[i] = key_of(i);
    }
    assert_int_equal(td_seq_init(&a, pool, &layout, &full_mask, 64), TD_OK);
    assert_int_equal(td_seq_init(&b, pool, &layout, &full_mask, 64), TD_OK);
    assert_int_equal(td_seq_reserve(&a, 3), TD_OK);
    (void)td_seq_grow(&a);
    td_seq_fork(&b, &a);
    for (uint32_t i = 1; i < 3; i++) {
        (void)td_seq_grow(&a);
        assert_int_equal(td_seq_index(&a, i, NULL, &keys[i], i), TD_OK);
    }
    assert_int_equal(td_seq_reserve(&b, 3), TD_OK);
    assert_int_equal(td_seq_extend(&b, keys, 2), 2); /* no further than it is told */
    assert_int_equal(td_seq_extend(&b, keys, 4), 3);
    assert_int_equal(b.blocks[1], a.blocks[1]);
    assert_int_equal(b.blocks[2], a.blocks[2]);
    assert_int_equal(b.reserved, 1);
    assert_counts(pool, BLOCKS - 4, 1, 0, 3, 0);
    assert_int_equal(td_seq_extend(&b, keys, 4), 3);
    td_seq_fini(&b);
    td_seq_fini(&a);
    assert_counts(pool, BLOCKS - 2, 0, 2, 0, 0);
}

static void test_seq_grow_zeroes_the_block(void **state)
{
    td_pool_t *pool = *state;
    td_seq_t a;
    uint8_t zero[BLOCK_BYTES] = {0};

    assert_int_equal(td_seq_init(&a, pool, &layout, &full_mask, 16), TD_OK);
    assert_int_equal(td_seq_reserve(&a, 1), TD_OK);
    assert_memory_equal(td_pool_bytes(pool, td_seq_grow(&a)), zero, BLOCK_BYTES);
    td_seq_fini(&a);
}

/* I4: rolled back positions leave nothing behind, without an allocation. */
static void test_i4_truncate_returns_blocks_to_the_reservation(void **state)
{
    td_pool_t *pool = *state;
    td_seq_t a;
    uint64_t allocs = 0;

    assert_int_equal(td_seq_init(&a, pool, &layout, &full_mask, 128), TD_OK);
    assert_int_equal(td_seq_reserve(&a, 4), TD_OK);
    allocs = td_alloc_count();
    for (uint32_t round = 0; round < 1000; round++) {
        for (uint32_t p = 0; p < 64; p += 16) {
            assert_int_equal(td_seq_prepare_write(&a, p), TD_OK);
        }
        assert_counts(pool, 4, 0, 0, 4, 0);
        td_seq_truncate(&a, 17);
        assert_counts(pool, 4, 2, 0, 2, 0);
        td_seq_truncate(&a, 0);
        assert_counts(pool, 4, 4, 0, 0, 0);
    }
    assert_int_equal(td_alloc_count(), allocs);
    td_seq_fini(&a);
}

/* A million steps that draft k tokens, of which some are accepted: memory comes and goes without
 * the allocator, and what was rolled back is promised again. */
static void test_seq_speculative_steps_never_allocate(void **state)
{
    enum { STEPS = 1000000, TOKENS = 100, K_MAX = 8 };
    td_pool_t *pool = *state;
    td_seq_t a;
    unsigned seed = 1;
    uint32_t written = 0;
    uint64_t allocs = 0;

    assert_int_equal(td_seq_init(&a, pool, &layout, &full_mask, TOKENS + K_MAX + 1), TD_OK);
    assert_int_equal(td_seq_reserve(&a, 7), TD_OK);
    allocs = td_alloc_count();
    for (uint32_t step = 0; step < STEPS; step++) {
        const uint32_t k = (uint32_t)rand_r(&seed) % (K_MAX + 1);
        for (uint32_t i = 0; i <= k; i++) {
            if (td_seq_prepare_write(&a, written + i) != TD_OK) {
                fail();
            }
        }
        written += 1 + (uint32_t)rand_r(&seed) % (k + 1);
        written = written > TOKENS ? 0 : written;
        td_seq_truncate(&a, written);
        if (a.block_count + a.reserved != 7) {
            fail();
        }
    }
    assert_int_equal(td_alloc_count(), allocs);
    td_seq_fini(&a);
    assert_counts(pool, BLOCKS, 0, 0, 0, 0);
}

/* Takes a block, indexes it behind another one and lets go of it: cached. */
static uint32_t cache_after(td_pool_t *pool, uint32_t parent, uint32_t n)
{
    const td_block_key_t parent_key = key_of(parent);
    const td_block_key_t key = key_of(n);
    uint32_t idx = 0;

    assert_int_equal(td_pool_take(pool, &idx), TD_OK);
    assert_int_equal(td_pool_index_after(pool, idx, parent != 0 ? &parent_key : NULL, &key, n),
                     TD_OK);
    td_pool_unref(pool, idx);
    return idx;
}

static bool has(const td_pool_t *pool, uint32_t n)
{
    const td_block_key_t key = key_of(n);
    return td_pool_find(pool, &key) != TD_POOL_NONE;
}

/* Whatever the order in which blocks were let go of, none goes before what follows it. */
static void test_pool_evicts_leaves_first(void **state)
{
    td_pool_t *pool = *state;

    (void)cache_after(pool, 0, 1); /* the oldest */
    (void)cache_after(pool, 1, 2);
    (void)cache_after(pool, 2, 3);
    (void)cache_after(pool, 2, 4);
    (void)cache_after(pool, 0, 5);
    assert_int_equal(td_pool_reserve(pool, 4), TD_OK);
    assert_false(has(pool, 3));
    assert_int_equal(td_pool_reserve(pool, 1), TD_OK);
    assert_false(has(pool, 4));
    assert_int_equal(td_pool_reserve(pool, 2), TD_OK);
    assert_true(has(pool, 1)); /* 5 and 2 went */
    assert_false(has(pool, 2));
    assert_int_equal(td_pool_reserve(pool, 1), TD_OK);
    assert_false(has(pool, 1));
    assert_counts(pool, 0, 8, 0, 0, 0);
    td_pool_unreserve(pool, 8);
}

/* A block whose follower is in use and cannot go is evicted all the same when nothing else can be,
 * and one whose bytes proved wrong leaves its followers alone. */
static void test_pool_blocks_that_go_before_their_children(void **state)
{
    td_pool_t *pool = *state;
    const td_block_key_t first = key_of(1);
    const td_block_key_t second = key_of(2);
    uint32_t child = 0;

    (void)cache_after(pool, 0, 1);
    assert_int_equal(td_pool_take(pool, &child), TD_OK);
    assert_int_equal(td_pool_index_after(pool, child, &first, &second, 1), TD_OK);
    assert_int_equal(td_pool_reserve(pool, BLOCKS - 1), TD_OK);
    assert_false(has(pool, 1));
    td_pool_unreserve(pool, BLOCKS - 1);
    td_pool_unref(pool, child);
    (void)cache_after(pool, 0, 1); /* perhaps in the memory of the old one */
    td_pool_unindex(pool, td_pool_find(pool, &second));
    assert_int_equal(td_pool_reserve(pool, BLOCKS), TD_OK);
    td_pool_unreserve(pool, BLOCKS);

    (void)cache_after(pool, 0, 1);
    (void)cache_after(pool, 1, 2);
    td_pool_unindex(pool, td_pool_find(pool, &first));
    assert_true(has(pool, 2));
    (void)cache_after(pool, 0, 3); /* in the memory of 1, which 2 followed */
    (void)cache_after(pool, 0, 4);
    assert_int_equal(td_pool_reserve(pool, BLOCKS - 1), TD_OK); /* 2 and 3 go: 3 has no children */
    assert_true(has(pool, 4));
    td_pool_unreserve(pool, BLOCKS - 1);
}

/* A prefix longer than what is looked at ahead, with a hole. */
static void test_pool_match_ends_at_the_first_hole(void **state)
{
    enum { MANY = 200 };
    static uint8_t bytes[MANY];
    td_block_key_t keys[MANY];
    uint32_t idx[MANY];
    td_pool_t *pool = NULL;
    (void)state;

    assert_int_equal(td_pool_create(bytes, MANY, 1, &pool), TD_OK);
    for (uint32_t n = 0; n < MANY; n++) {
        keys[n] = key_of(n + 1);
        if (n != 150) {
            idx[n] = cache_after(pool, n, n + 1);
        }
    }
    {
        uint32_t found[MANY];
        assert_int_equal(td_pool_match(pool, keys, MANY, found), 150);
        assert_memory_equal(found, idx, 150 * sizeof(*idx));
        assert_int_equal(td_pool_counts(pool).active, 150);
        for (uint32_t n = 150; n > 0; n--) {
            td_pool_unref(pool, found[n - 1]);
        }
        assert_int_equal(td_pool_match(pool, keys + 150, 1, found), 0);
        assert_int_equal(td_pool_match(pool, keys + 151, 3, found), 3);
        for (uint32_t n = 3; n > 0; n--) {
            td_pool_unref(pool, found[n - 1]);
        }
    }
    td_pool_destroy(pool);
}

static void test_seq_fini_quarantine_keeps_what_may_be_written(void **state)
{
    td_pool_t *pool = *state;
    td_block_key_t key = key_of(9);
    td_seq_t a;
    uint32_t quarantined[4];

    assert_int_equal(td_seq_init(&a, pool, &layout, &full_mask, 64), TD_OK);
    assert_int_equal(td_seq_reserve(&a, 4), TD_OK);
    assert_int_equal(td_pool_index(pool, td_seq_grow(&a), &key, 1), TD_OK);
    (void)td_seq_grow_raw(&a);
    assert_int_equal(td_seq_fini_quarantine(&a, quarantined), 1);
    assert_counts(pool, 6, 0, 1, 0, 1);
    td_pool_release_quarantine(pool, quarantined[0]);
    td_seq_fini(&a);
    assert_counts(pool, 7, 0, 1, 0, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_pool_evicts_leaves_first, setup, teardown),
        cmocka_unit_test_setup_teardown(test_pool_blocks_that_go_before_their_children, setup,
                                        teardown),
        cmocka_unit_test(test_pool_match_ends_at_the_first_hole),
        cmocka_unit_test_setup_teardown(test_seq_speculative_steps_never_allocate, setup, teardown),
        cmocka_unit_test_setup_teardown(test_pool_take_is_busy_when_empty, setup, teardown),
        cmocka_unit_test_setup_teardown(test_pool_reservation_is_all_or_nothing, setup, teardown),
        cmocka_unit_test_setup_teardown(test_pool_cached_blocks_are_found_and_evicted_oldest_first,
                                        setup, teardown),
        cmocka_unit_test_setup_teardown(test_pool_second_block_of_a_key_stays_private, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_pool_epoch_changes_when_memory_changes_hands, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_i2_quarantined_block_is_not_reused, setup, teardown),
        cmocka_unit_test_setup_teardown(test_i5_random_use_always_adds_up, setup, teardown),
        cmocka_unit_test_setup_teardown(test_seq_fork_copies_only_the_written_block, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_seq_extend_takes_what_is_here, setup, teardown),
        cmocka_unit_test_setup_teardown(test_seq_grow_zeroes_the_block, setup, teardown),
        cmocka_unit_test_setup_teardown(test_i4_truncate_returns_blocks_to_the_reservation, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_seq_fini_quarantine_keeps_what_may_be_written, setup,
                                        teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

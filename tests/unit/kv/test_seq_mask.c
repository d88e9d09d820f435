/* Sequences under a mask: what they give up, what they keep, and from what they can go on. */
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

enum { BLOCKS = 64, BLOCK_BYTES = 64, TOKENS = 16, KEYS = 40 };

static const td_kv_layout_t layout = {
    .layers = 1, .kv_heads = 1, .head_dim = 8, .block_tokens = TOKENS};
static const td_attention_mask_t window512 = {.kind = TD_ATTENTION_WINDOW, .local = 512};
static const td_attention_mask_t masks[] = {
    {0},
    {.kind = TD_ATTENTION_WINDOW, .local = 1},
    {.kind = TD_ATTENTION_WINDOW, .local = 40},
    {.kind = TD_ATTENTION_WINDOW, .local = 64, .sinks = 20},
    {.kind = TD_ATTENTION_STRIDED, .local = 50, .stride = 96, .summary = 16},
    {.kind = TD_ATTENTION_STRIDED, .local = 10, .stride = 70, .summary = 3},
};

static uint8_t memory[BLOCKS * BLOCK_BYTES];

static int setup(void **state)
{
    td_pool_t *pool = NULL;
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
    td_block_key_t key = {{0}};
    n = (n + 1) * 2654435761u;
    memcpy(key.bytes, &n, sizeof(n));
    memcpy(key.bytes + 8, &n, sizeof(n));
    return key;
}

static void publish(td_pool_t *pool, const td_seq_t *seq, uint32_t block)
{
    const td_block_key_t key = key_of(block);
    assert_int_equal(td_pool_index(pool, seq->blocks[block], &key, block), TD_OK);
}

/* 100,000 tokens through 34 blocks: never more, never one that could not be had, and without the
 * allocator. The blocks it has left behind serve others for as long as nobody needs the room. */
static void test_seq_memory_of_a_long_stream_is_flat(void **state)
{
    enum { STREAM = 100000, MOST = 33 };
    td_pool_t *pool = *state;
    td_seq_t seq;
    uint64_t allocs = 0;
    uint32_t taken = 0;

    assert_int_equal(td_attention_blocks_max(&window512, TOKENS, STREAM, 1), MOST);
    assert_int_equal(td_seq_init(&seq, pool, &layout, &window512, STREAM), TD_OK);
    assert_int_equal(td_seq_reserve(&seq, MOST), TD_OK);
    /* All else is somebody's: what is promised must do. */
    while (td_pool_counts(pool).free > 0) {
        assert_int_equal(td_pool_take(pool, &taken), TD_OK);
    }
    allocs = td_alloc_count();
    for (uint32_t p = 0; p < STREAM; p++) {
        td_pool_counts_t c;
        if (td_seq_prepare_write(&seq, p) != TD_OK) {
            fail();
        }
        if (p % TOKENS == TOKENS - 1) {
            publish(pool, &seq, p / TOKENS);
        }
        td_seq_forget(&seq, p + 1);
        if (seq.block_count < seq.block_cap && td_pool_reserve(pool, 1) == TD_OK) {
            fail_msg("what was given up was not promised again at position %u", p);
        }
        c = td_pool_counts(pool);
        if (seq.held > MOST || c.active != BLOCKS - MOST + seq.held ||
            c.active + c.reserved + c.cached != BLOCKS || c.quarantined != 0) {
            fail();
        }
    }
    assert_int_equal(td_alloc_count(), allocs);
    assert_int_equal(seq.block_count, STREAM / TOKENS);
    td_seq_fini(&seq);
    for (uint32_t i = 0; i < BLOCKS; i++) {
        if (td_pool_refs(pool, i) > 0) {
            td_pool_unref(pool, i);
        }
    }
}

/* Everything that is needed is there, everything else is gone, whatever the steps. */
static void test_seq_forgets_exactly_what_nobody_needs(void **state)
{
    static const uint32_t steps[] = {1, 7, 16, 33, 100};
    td_pool_t *pool = *state;

    for (size_t m = 0; m < TD_ARRAY_LEN(masks); m++) {
        for (size_t s = 0; s < TD_ARRAY_LEN(steps); s++) {
            td_seq_t seq;
            assert_int_equal(td_seq_init(&seq, pool, &layout, &masks[m], 800), TD_OK);
            for (uint32_t p = 0; p < 800; p++) {
                assert_int_equal(td_seq_prepare_write(&seq, p), TD_OK);
                if ((p + 1) % steps[s] != 0) {
                    continue;
                }
                td_seq_forget(&seq, p + 1);
                for (uint32_t b = 0; b < seq.block_count; b++) {
                    assert_int_equal(
                        seq.blocks[b] != TD_POOL_NONE,
                        td_attention_needs(&masks[m], p + 1, b * TOKENS, (b + 1) * TOKENS));
                }
                assert_int_equal(td_pool_counts(pool).active, seq.held);
            }
            td_seq_fini(&seq);
            assert_int_equal(td_pool_counts(pool).free, BLOCKS);
        }
    }
}

/* Fills the index with some of the blocks of a sequence, by bits. */
static void cache_blocks(td_pool_t *pool, uint64_t present)
{
    for (uint32_t i = 0; i < KEYS; i++) {
        const td_block_key_t key = key_of(i);
        uint32_t idx = td_pool_find(pool, &key);
        if ((present >> i & 1) != 0 && idx == TD_POOL_NONE) {
            assert_int_equal(td_pool_take(pool, &idx), TD_OK);
            assert_int_equal(td_pool_index(pool, idx, &key, i), TD_OK);
            td_pool_unref(pool, idx);
        } else if ((present >> i & 1) == 0 && idx != TD_POOL_NONE) {
            td_pool_unindex(pool, idx);
        }
    }
}

/* By definition: the longest prefix of which everything is here that later positions see. */
static uint32_t longest(const td_attention_mask_t *mask, uint64_t present)
{
    uint32_t best = 0;

    for (uint32_t n = 1; n <= KEYS; n++) {
        bool whole = true;
        for (uint32_t b = 0; b < n; b++) {
            whole = whole && ((present >> b & 1) != 0 ||
                              !td_attention_needs(mask, n * TOKENS, b * TOKENS, (b + 1) * TOKENS));
        }
        best = whole ? n : best;
    }
    return best;
}

static void test_seq_match_is_the_longest_that_can_go_on(void **state)
{
    td_pool_t *pool = *state;
    td_block_key_t keys[KEYS];
    unsigned seed = 1;

    for (uint32_t i = 0; i < KEYS; i++) {
        keys[i] = key_of(i);
    }
    for (size_t m = 0; m < TD_ARRAY_LEN(masks); m++) {
        for (uint32_t round = 0; round < 500; round++) {
            td_seq_t seq;
            uint32_t found = 0;
            uint64_t present = UINT64_MAX;
            for (uint32_t holes = round % 6; holes > 0; holes--) {
                present &= ~(1ull << (uint32_t)rand_r(&seed) % KEYS);
            }
            cache_blocks(pool, present);
            assert_int_equal(td_seq_init(&seq, pool, &layout, &masks[m], KEYS * TOKENS), TD_OK);
            found = td_seq_match(&seq, keys, KEYS);
            assert_int_equal(found, longest(&masks[m], present));
            assert_int_equal(seq.block_count, found);
            assert_int_equal(td_pool_counts(pool).active, seq.held);
            for (uint32_t b = 0; b < found; b++) {
                const bool needed =
                    td_attention_needs(&masks[m], found * TOKENS, b * TOKENS, (b + 1) * TOKENS);
                assert_int_equal(seq.blocks[b],
                                 needed ? td_pool_find(pool, &keys[b]) : TD_POOL_NONE);
            }
            td_seq_fini(&seq);
        }
    }
    cache_blocks(pool, 0);
}

static void test_seq_hold_ends_at_the_first_that_is_needed_and_not_here(void **state)
{
    td_pool_t *pool = *state;
    td_block_key_t keys[KEYS];
    unsigned seed = 1;

    for (uint32_t i = 0; i < KEYS; i++) {
        keys[i] = key_of(i);
    }
    for (size_t m = 0; m < TD_ARRAY_LEN(masks); m++) {
        for (uint32_t round = 0; round < 200; round++) {
            const uint32_t from = KEYS * TOKENS + round % 20;
            const uint64_t present = ~(1ull << (uint32_t)rand_r(&seed) % KEYS);
            uint32_t want = 0;
            td_seq_t seq;
            while (want < KEYS &&
                   ((present >> want & 1) != 0 ||
                    !td_attention_needs(&masks[m], from, want * TOKENS, (want + 1) * TOKENS))) {
                want++;
            }
            cache_blocks(pool, present);
            assert_int_equal(td_seq_init(&seq, pool, &layout, &masks[m], KEYS * TOKENS), TD_OK);
            assert_int_equal(td_seq_hold(&seq, from, keys, KEYS), want);
            for (uint32_t b = 0; b < want; b++) {
                assert_int_equal(
                    seq.blocks[b] == TD_POOL_NONE,
                    !td_attention_needs(&masks[m], from, b * TOKENS, (b + 1) * TOKENS));
            }
            td_seq_fini(&seq);
        }
    }
    cache_blocks(pool, 0);
}

/* What a sequence has left behind is a prefix for the next one, until its room is needed; the parts
 * that nobody sees may be gone. */
static void test_seq_blocks_left_behind_are_found_again(void **state)
{
    td_pool_t *pool = *state;
    td_block_key_t keys[KEYS];
    td_seq_t a;
    td_seq_t b;

    for (uint32_t i = 0; i < KEYS; i++) {
        keys[i] = key_of(i);
    }
    assert_int_equal(td_seq_init(&a, pool, &layout, &masks[2], KEYS * TOKENS), TD_OK);
    for (uint32_t p = 0; p < KEYS * TOKENS; p++) {
        assert_int_equal(td_seq_prepare_write(&a, p), TD_OK);
        if (p % TOKENS == TOKENS - 1) {
            publish(pool, &a, p / TOKENS);
        }
        td_seq_forget(&a, p + 1);
    }
    assert_int_equal(a.held, 3); /* 40 positions, ending with a block */
    assert_int_equal(td_pool_counts(pool).cached, KEYS - 3);
    assert_int_equal(td_seq_init(&b, pool, &layout, &masks[2], KEYS * TOKENS), TD_OK);
    assert_int_equal(td_seq_match(&b, keys, KEYS - 10), KEYS - 10);
    assert_int_equal(b.held, 3);
    assert_int_equal(td_seq_reserve(&b, 2), TD_OK);
    assert_int_equal(td_seq_extend(&b, keys, KEYS - 5), KEYS - 5); /* what it leaves behind goes */
    assert_int_equal(b.held, 3);
    assert_int_equal(b.reserved, 2);
    td_seq_fini(&b);
    td_pool_unindex(pool, td_pool_find(pool, &keys[5]));
    assert_int_equal(td_seq_init(&b, pool, &layout, &masks[2], KEYS * TOKENS), TD_OK);
    assert_int_equal(td_seq_match(&b, keys, KEYS), KEYS);
    td_seq_fini(&b);
    td_pool_unindex(pool, td_pool_find(pool, &keys[KEYS - 1]));
    assert_int_equal(td_seq_init(&b, pool, &layout, &masks[2], KEYS * TOKENS), TD_OK);
    assert_int_equal(td_seq_match(&b, keys, KEYS), KEYS - 1);
    td_seq_fini(&b);
    td_seq_fini(&a);
}

/* n > 1: what a fork shares goes when the last choice's window has passed it, and each can always
 * take what it was promised. */
static void test_seq_forks_forget_each_for_itself(void **state)
{
    enum { PROMPT = 10 * TOKENS, STREAM = 60 * TOKENS, MOST = 4 };
    td_pool_t *pool = *state;
    td_seq_t seqs[3];

    for (uint32_t i = 0; i < 3; i++) {
        assert_int_equal(td_seq_init(&seqs[i], pool, &layout, &masks[2], STREAM), TD_OK);
    }
    for (uint32_t p = 0; p < PROMPT; p++) {
        assert_int_equal(td_seq_prepare_write(&seqs[0], p), TD_OK);
    }
    td_seq_forget(&seqs[0], PROMPT);
    td_seq_trim(&seqs[0], seqs[0].held);
    td_seq_fork(&seqs[1], &seqs[0]);
    td_seq_fork(&seqs[2], &seqs[0]);
    assert_int_equal(td_pool_counts(pool).active, 3);
    for (uint32_t i = 0; i < 3; i++) {
        assert_int_equal(td_seq_reserve(&seqs[i], MOST), TD_OK);
    }
    assert_int_equal(td_pool_reserve(pool, td_pool_counts(pool).free), TD_OK); /* nothing is left */
    for (uint32_t p = PROMPT; p < STREAM; p++) {
        for (uint32_t i = 0; i < 3; i++) {
            assert_int_equal(td_seq_prepare_write(&seqs[i], p), TD_OK);
            td_seq_forget(&seqs[i], p + 1);
            assert_true(seqs[i].held <= MOST);
        }
    }
    assert_true(td_pool_counts(pool).active <= 3 * MOST);
    for (uint32_t i = 0; i < 3; i++) {
        td_seq_fini(&seqs[i]);
    }
    td_pool_unreserve(pool, td_pool_counts(pool).reserved);
    assert_int_equal(td_pool_counts(pool).free, BLOCKS);
}

/* Rolling back, and ending with something under way, pass over what is gone. */
static void test_seq_ends_and_rolls_back_over_holes(void **state)
{
    td_pool_t *pool = *state;
    uint32_t quarantined[BLOCKS];
    td_seq_t seq;
    uint32_t count = 0;

    assert_int_equal(td_seq_init(&seq, pool, &layout, &masks[4], 50 * TOKENS), TD_OK);
    for (uint32_t p = 0; p < 40 * TOKENS; p++) {
        assert_int_equal(td_seq_prepare_write(&seq, p), TD_OK);
        td_seq_forget(&seq, p + 1);
    }
    assert_int_equal(seq.held, 6 + 4); /* summaries 5, 11 .. 35, and the window */
    td_seq_truncate(&seq, 38 * TOKENS);
    assert_int_equal(seq.held, 6 + 2);
    td_seq_truncate(&seq, 20 * TOKENS);
    assert_int_equal(seq.held, 3);
    assert_int_equal(td_pool_counts(pool).active, 3);
    count = td_seq_fini_quarantine(&seq, quarantined);
    assert_int_equal(count, 3);
    assert_int_equal(seq.held, 0);
    for (uint32_t i = 0; i < count; i++) {
        td_pool_release_quarantine(pool, quarantined[i]);
    }
    td_seq_fini(&seq);
    assert_int_equal(td_pool_counts(pool).free, BLOCKS);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_seq_memory_of_a_long_stream_is_flat, setup, teardown),
        cmocka_unit_test_setup_teardown(test_seq_forgets_exactly_what_nobody_needs, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_seq_match_is_the_longest_that_can_go_on, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_seq_hold_ends_at_the_first_that_is_needed_and_not_here,
                                        setup, teardown),
        cmocka_unit_test_setup_teardown(test_seq_blocks_left_behind_are_found_again, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_seq_forks_forget_each_for_itself, setup, teardown),
        cmocka_unit_test_setup_teardown(test_seq_ends_and_rolls_back_over_holes, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

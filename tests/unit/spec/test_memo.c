/* Remembered continuations: found by the text before them, bounded, forgotten; and the drafter that
 * follows them. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/spec/td_draft.h"
#include "common/spec/td_memo.h"

#define BLOCK 4u
#define AGE_NS (10 * TD_NS_PER_S)

/* A prompt, and what names it. */
typedef struct text {
    td_block_root_t root;
    uint32_t tokens[64];
    uint32_t count;
    td_memo_start_t start;
} text_t;

static void make_text(text_t *t, const char *salt, uint32_t first, uint32_t count)
{
    static const uint8_t secret[TD_CLUSTER_SECRET_BYTES];
    static const uint8_t fingerprint[32];
    const td_block_root_fields_t fields = {.fingerprint = fingerprint,
                                           .numerics_class = "n",
                                           .layout_version = TD_KV_LAYOUT_VERSION,
                                           .codec = "f16",
                                           .block_tokens = BLOCK,
                                           .adapter = "",
                                           .salt = salt,
                                           .salt_len = strlen(salt)};
    td_block_key_t keys[16];

    memset(t, 0, sizeof(*t));
    td_block_root_make(secret, &fields, &t->root);
    for (uint32_t i = 0; i < count; i++) {
        t->tokens[i] = first + i;
    }
    t->count = count;
    t->start.root = &t->root;
    t->start.tail_tokens = count % BLOCK;
    t->start.tail = t->tokens + count - t->start.tail_tokens;
    t->start.has_parent = count >= BLOCK;
    td_block_keys(&t->root, t->tokens, count, BLOCK, keys);
    if (t->start.has_parent) {
        t->start.parent = keys[count / BLOCK - 1];
    }
    t->start.key = t->start.parent;
    if (t->start.tail_tokens > 0) {
        td_block_key_partial(&t->root, t->start.has_parent ? &t->start.parent : NULL, t->start.tail,
                             t->start.tail_tokens, &t->start.key);
    }
}

static td_memo_t *make_memo(uint64_t bytes)
{
    td_memo_t *memo = NULL;
    assert_int_equal(td_memo_create(bytes, BLOCK, AGE_NS, &memo), TD_OK);
    return memo;
}

static void learn(td_memo_t *memo, const text_t *t, uint32_t first, uint32_t count, uint64_t now_ns)
{
    uint32_t output[64];

    assert_true(count <= TD_ARRAY_LEN(output));
    for (uint32_t i = 0; i < count; i++) {
        output[i] = first + i;
    }
    td_memo_learn(memo, &t->start, output, count, now_ns);
}

static void test_memo_finds_what_followed(void **state)
{
    td_memo_t *memo = make_memo(1 << 20);
    uint32_t out[BLOCK + TD_MEMO_AHEAD];
    text_t prompt;
    text_t longer; /* the prompt, and outputs up to a block's end */
    (void)state;

    assert_int_equal(td_memo_path_max(memo), TD_ARRAY_LEN(out));
    for (uint32_t count = 1; count <= 9; count++) { /* with and without full blocks and tails */
        make_text(&prompt, "", 1000 * count, count);
        assert_int_equal(td_memo_find(memo, &prompt.start.key, 1, out), 0);
        learn(memo, &prompt, 1000 * count + count, 40, 1);
        assert_int_equal(td_memo_find(memo, &prompt.start.key, 1, out), TD_ARRAY_LEN(out));
        assert_int_equal(out[0], 1000 * count + count);
        make_text(&longer, "", 1000 * count, (count / BLOCK + 3) * BLOCK);
        assert_int_equal(td_memo_find(memo, &longer.start.key, 1, out), TD_ARRAY_LEN(out));
        assert_int_equal(out[0], 1000 * count + longer.count);
    }
    td_memo_destroy(memo);
}

static void test_memo_newest_answer_counts_unless_it_is_a_beginning(void **state)
{
    td_memo_t *memo = make_memo(1 << 20);
    uint32_t out[BLOCK + TD_MEMO_AHEAD];
    text_t prompt;
    (void)state;

    make_text(&prompt, "", 1, 6);
    learn(memo, &prompt, 100, 12, 1);
    learn(memo, &prompt, 100, 2, 2);
    assert_int_equal(td_memo_find(memo, &prompt.start.key, 2, out), 12);
    learn(memo, &prompt, 200, 2, 3);
    assert_int_equal(td_memo_find(memo, &prompt.start.key, 3, out), 2);
    assert_int_equal(out[1], 201);
    learn(memo, &prompt, 300, 0, 4); /* nothing followed: nothing changes */
    assert_int_equal(td_memo_find(memo, &prompt.start.key, 4, out), 2);
    td_memo_destroy(memo);
}

static void test_memo_tenants_share_nothing(void **state)
{
    td_memo_t *memo = make_memo(1 << 20);
    uint32_t out[BLOCK + TD_MEMO_AHEAD];
    text_t ours;
    text_t theirs;
    (void)state;

    for (uint32_t count = 1; count <= 9; count++) {
        make_text(&ours, "ours", 1, count);
        make_text(&theirs, "theirs", 1, count);
        learn(memo, &ours, 50, 20, 1);
        assert_int_equal(td_memo_find(memo, &theirs.start.key, 1, out), 0);
        assert_true(td_memo_find(memo, &ours.start.key, 1, out) > 0);
    }
    td_memo_destroy(memo);
}

static void test_memo_forgets_the_least_used(void **state)
{
    td_memo_t *memo = make_memo(4096);
    const uint32_t capacity = td_memo_capacity(memo);
    uint32_t out[BLOCK + TD_MEMO_AHEAD];
    text_t first;
    text_t t;
    (void)state;

    /* All of it within the bytes: entry, path, slot. */
    assert_in_range(capacity, 16, 4096 / (4 * (BLOCK + TD_MEMO_AHEAD)));
    make_text(&first, "", 7, 4);
    learn(memo, &first, 70, 2, 1);
    for (uint32_t i = 0; i < 5 * capacity; i++) {
        make_text(&t, "", 100 * (i + 1), 4);
        learn(memo, &t, 9, 2, 1);
        assert_true(td_memo_count(memo) <= capacity);
        assert_int_equal(td_memo_find(memo, &t.start.key, 1, out), 2);
        assert_int_equal(td_memo_find(memo, &first.start.key, 1, out), 2); /* used: it stays */
        assert_int_equal(out[0], 70);
    }
    assert_int_equal(td_memo_count(memo), capacity);
    make_text(&t, "", 100, 4);
    assert_int_equal(td_memo_find(memo, &t.start.key, 1, out), 0);
    td_memo_destroy(memo);
}

static void test_memo_forgets_what_is_old(void **state)
{
    td_memo_t *memo = make_memo(1 << 16);
    uint32_t out[BLOCK + TD_MEMO_AHEAD];
    text_t t;
    (void)state;

    make_text(&t, "", 1, 4);
    learn(memo, &t, 70, 3, 5);
    assert_int_equal(td_memo_find(memo, &t.start.key, 5 + AGE_NS, out), 3);
    assert_int_equal(td_memo_find(memo, &t.start.key, 6 + AGE_NS, out), 0);
    assert_int_equal(td_memo_count(memo), 0);
    learn(memo, &t, 70, 3, 7 + AGE_NS); /* and it is learned again */
    assert_int_equal(td_memo_find(memo, &t.start.key, 8 + AGE_NS, out), 3);
    td_memo_destroy(memo);
}

static void test_memo_never_allocates(void **state)
{
    td_memo_t *memo = make_memo(1 << 14);
    uint32_t out[BLOCK + TD_MEMO_AHEAD];
    text_t t;
    uint64_t before = 0;
    (void)state;

    before = td_alloc_count();
    for (uint32_t i = 0; i < 1000; i++) {
        make_text(&t, "", i, 1 + i % 9);
        learn(memo, &t, i, 30, i);
        (void)td_memo_find(memo, &t.start.key, i, out);
    }
    assert_int_equal(td_alloc_count(), before);
    td_memo_destroy(memo);
}

static void test_memo_limits(void **state)
{
    td_memo_t *memo = NULL;
    (void)state;

    assert_int_equal(td_memo_create(16, BLOCK, AGE_NS, &memo), TD_ERR_INVALID);
    assert_int_equal(td_memo_create(1 << 20, 0, AGE_NS, &memo), TD_ERR_INVALID);
    assert_int_equal(td_memo_create(1 << 20, TD_MEMO_BLOCK_TOKENS_MAX + 1, AGE_NS, &memo),
                     TD_ERR_INVALID);
    assert_int_equal(td_memo_create(TD_MEMO_BYTES_MAX + 1, BLOCK, AGE_NS, &memo), TD_ERR_INVALID);
    td_memo_destroy(NULL);
}

/* --- the drafter ------------------------------------------------------------------------------ */

static td_draft_t *open_draft(td_memo_t *memo, const text_t *t)
{
    const td_draft_config_t config = {.tokens_max = 128, .memo = memo, .start = &t->start};
    td_draft_t *draft = NULL;

    assert_int_equal(td_draft_create(TD_DRAFTER_MEMO, &config, &draft), TD_OK);
    td_draft_append(draft, t->tokens, t->count, false);
    return draft;
}

static void test_drafter_follows_the_path(void **state)
{
    td_memo_t *memo = make_memo(1 << 20);
    uint32_t out[TD_DRAFT_TOKENS_MAX];
    text_t t;
    (void)state;

    for (uint32_t count = 1; count <= 9; count++) {
        td_draft_t *draft = NULL;
        make_text(&t, "", 1000 * count, count);
        learn(memo, &t, 5000, 40, td_now_ns());
        draft = open_draft(memo, &t);
        for (uint32_t at = 0; at < 40; at++) { /* k drafts everywhere, up to what is known */
            const uint32_t token = 5000 + at;
            const uint32_t k = TD_MIN(TD_DRAFT_TOKENS_MAX, 40 - at);
            assert_int_equal(td_draft_propose(draft, TD_DRAFT_TOKENS_MAX, out), k);
            assert_int_equal(td_draft_confidence(draft), TD_DRAFT_CONFIDENCE_MEMO);
            for (uint32_t i = 0; i < k; i++) {
                assert_int_equal(out[i], token + i);
            }
            td_draft_append(draft, &token, 1, true);
        }
        assert_int_equal(td_draft_propose(draft, 4, out), 0); /* all that was remembered */
        td_draft_destroy(draft);
    }
    td_memo_destroy(memo);
}

static void test_drafter_leaves_a_path_that_was_wrong(void **state)
{
    td_memo_t *memo = make_memo(1 << 20);
    uint32_t out[TD_DRAFT_TOKENS_MAX];
    uint32_t token = 5000;
    text_t t;
    td_draft_t *draft = NULL;
    (void)state;

    make_text(&t, "", 1, 8);
    learn(memo, &t, 5000, 40, td_now_ns());
    draft = open_draft(memo, &t);
    td_draft_append(draft, &token, 1, true);
    token = 2; /* another way, which stands in the prompt: 2, 3 ... */
    td_draft_append(draft, &token, 1, true);
    assert_int_equal(td_draft_propose(draft, 4, out), 0); /* one token is no match */
    token = 3;
    td_draft_append(draft, &token, 1, true);
    assert_int_equal(td_draft_propose(draft, 4, out), 2); /* prompt_lookup's */
    assert_int_equal(out[0], 4);
    assert_int_equal(td_draft_confidence(draft), TD_DRAFT_CONFIDENCE_LOOKUP);
    td_draft_destroy(draft);

    /* Without a table it is prompt_lookup. */
    draft = open_draft(NULL, &t);
    token = 3;
    td_draft_append(draft, (const uint32_t[]){2, 3}, 2, true);
    assert_int_equal(td_draft_propose(draft, 4, out), 2);
    assert_int_equal(out[0], 4);
    td_draft_destroy(draft);
    td_memo_destroy(memo);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_memo_finds_what_followed),
        cmocka_unit_test(test_memo_newest_answer_counts_unless_it_is_a_beginning),
        cmocka_unit_test(test_memo_tenants_share_nothing),
        cmocka_unit_test(test_memo_forgets_the_least_used),
        cmocka_unit_test(test_memo_forgets_what_is_old),
        cmocka_unit_test(test_memo_never_allocates),
        cmocka_unit_test(test_memo_limits),
        cmocka_unit_test(test_drafter_follows_the_path),
        cmocka_unit_test(test_drafter_leaves_a_path_that_was_wrong),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include "common/base/td_base.h"
#include "common/spec/td_draft.h"

static td_draft_t *create(const uint32_t *context, uint32_t count)
{
    const td_draft_config_t config = {.tokens_max = 1000};
    td_draft_t *draft = NULL;

    assert_int_equal(td_draft_create(TD_DRAFTER_LOOKAHEAD, &config, &draft), TD_OK);
    td_draft_append(draft, context, count, false);
    return draft;
}

static void assert_proposes(td_draft_t *draft, uint32_t k, const uint32_t *tokens, uint32_t count)
{
    uint32_t out[TD_DRAFT_TOKENS_MAX];

    assert_int_equal(td_draft_propose(draft, k, out), count);
    for (uint32_t i = 0; i < count; i++) {
        assert_int_equal(out[i], tokens[i]);
    }
}

static void test_lookahead_chains_what_followed_in_the_context(void **state)
{
    static const uint32_t context[] = {1, 2, 3, 4, 5, 9, 2, 3};
    static const uint32_t next[] = {4, 5, 9, 2, 3, 4, 5, 9};
    td_draft_t *draft = create(context, TD_ARRAY_LEN(context));
    (void)state;

    assert_proposes(draft, 8, next, 8);
    assert_proposes(draft, 3, next, 3);
    assert_in_range(td_draft_confidence(draft), TD_DRAFT_CONFIDENCE_LOOKUP,
                    TD_DRAFT_CONFIDENCE_LOOKUP + 5);
    td_draft_destroy(draft);
}

static void test_lookahead_says_nothing_of_what_it_has_not_seen(void **state)
{
    static const uint32_t context[] = {1, 2, 3};
    td_draft_t *draft = create(context, 3);
    td_draft_t *empty = create(NULL, 0);
    (void)state;

    assert_proposes(draft, 8, NULL, 0);
    assert_proposes(empty, 8, NULL, 0);
    td_draft_destroy(draft);
    td_draft_destroy(empty);
}

/* Rows behind a wrong draft: what they say of the positions to come is the next draft, and what
 * they say of their own tokens is known from then on. */
static void test_lookahead_goes_on_from_rows_behind_a_wrong_draft(void **state)
{
    static const uint32_t context[] = {1, 2};
    static const uint32_t drafts[] = {50, 51, 52};
    static const uint32_t nexts[] = {60, 61, 62};
    static const uint32_t right = 3;
    static const uint32_t known[] = {50, 51};
    td_draft_t *draft = create(context, 2);
    (void)state;

    assert_true(td_draft_observes(draft));
    td_draft_append(draft, &right, 1, true); /* 50 was wrong, 3 is right */
    td_draft_observe(draft, drafts, nexts, 3);
    assert_proposes(draft, 8, nexts, 3);
    assert_int_equal(td_draft_confidence(draft), TD_DRAFT_CONFIDENCE_ANY);
    td_draft_append(draft, known, 2, true);  /* the guess is gone, the pool is not */
    assert_proposes(draft, 8, &nexts[1], 1); /* behind 50, 51 */
    td_draft_destroy(draft);
}

/* A pair counts where a triple is not known; the newest of either. */
static void test_lookahead_prefers_triples_and_what_is_newer(void **state)
{
    static const uint32_t context[] = {7, 8, 20, 6, 8, 30, 7, 8};
    static const uint32_t triple = 20;
    static const uint32_t other[] = {5, 8};
    static const uint32_t pair = 20;
    td_draft_t *draft = create(context, TD_ARRAY_LEN(context));
    (void)state;

    assert_proposes(draft, 1, &triple, 1);
    td_draft_append(draft, &triple, 1, true);
    td_draft_append(draft, other, 2, true); /* 5, 8: a pair that was never there */
    assert_proposes(draft, 1, &pair, 1);
    td_draft_destroy(draft);
}

static void test_lookahead_others_do_not_ask(void **state)
{
    const td_draft_config_t config = {.tokens_max = 10};
    td_draft_t *draft = NULL;
    const uint32_t token = 1;
    (void)state;

    assert_int_equal(td_draft_create(TD_DRAFTER_PROMPT_LOOKUP, &config, &draft), TD_OK);
    assert_false(td_draft_observes(draft));
    td_draft_observe(draft, &token, &token, 1); /* nothing becomes of it */
    td_draft_destroy(draft);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_lookahead_chains_what_followed_in_the_context),
        cmocka_unit_test(test_lookahead_says_nothing_of_what_it_has_not_seen),
        cmocka_unit_test(test_lookahead_goes_on_from_rows_behind_a_wrong_draft),
        cmocka_unit_test(test_lookahead_prefers_triples_and_what_is_newer),
        cmocka_unit_test(test_lookahead_others_do_not_ask),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

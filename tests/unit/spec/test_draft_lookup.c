/* The drafter that copies what followed before. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "common/base/td_base.h"
#include "common/spec/td_draft.h"

static td_draft_t *open_draft(const uint32_t *prediction, uint32_t count)
{
    const td_draft_config_t config = {
        .tokens_max = 64, .prediction = prediction, .prediction_tokens = count};
    td_draft_t *draft = NULL;
    assert_int_equal(td_draft_create(TD_DRAFTER_PROMPT_LOOKUP, &config, &draft), TD_OK);
    return draft;
}

static void test_drafters_have_names(void **state)
{
    td_drafter_t drafter = TD_DRAFTER_NONE;
    td_draft_t *draft = NULL;
    const td_draft_config_t config = {.tokens_max = 8};
    (void)state;

    for (uint32_t i = 0; i < TD_DRAFTER_KINDS; i++) {
        if (strcmp(td_drafter_name((td_drafter_t)i), "unknown") == 0) {
            continue; /* a number without a drafter */
        }
        assert_int_equal(td_drafter_parse(td_drafter_name((td_drafter_t)i), &drafter), TD_OK);
        assert_int_equal(drafter, i);
    }
    assert_int_equal(td_drafter_parse("oracle", &drafter), TD_ERR_INVALID);
    assert_string_equal(td_drafter_name(TD_DRAFTER_KINDS), "unknown");
    assert_int_equal(td_draft_create(TD_DRAFTER_NONE, &config, &draft), TD_ERR_INVALID);
    assert_int_equal(td_draft_create(TD_DRAFTER_DRAFT_MODEL, &config, &draft), TD_ERR_INVALID);
    assert_int_equal(td_draft_create(TD_DRAFTER_EARLY_EXIT, &config, &draft), TD_ERR_INVALID);
    assert_int_equal(td_draft_create(TD_DRAFTER_KINDS, &config, &draft), TD_ERR_INVALID);
}

static void test_lookup_copies_what_followed(void **state)
{
    static const uint32_t prompt[] = {5, 6, 7, 8, 9, 10, 11, 12, 99, 5, 6};
    td_draft_t *draft = open_draft(NULL, 0);
    uint32_t out[8];
    (void)state;

    assert_int_equal(td_draft_propose(draft, 4, out), 0); /* nothing is known */
    td_draft_append(draft, prompt, TD_ARRAY_LEN(prompt), false);
    /* Two tokens match: no more than two are risked. */
    assert_int_equal(td_draft_propose(draft, 4, out), 2);
    assert_int_equal(out[0], 7);
    assert_int_equal(out[1], 8);
    for (uint32_t token = 7; token < 10; token++) {
        td_draft_append(draft, &token, 1, true);
    }
    assert_int_equal(td_draft_confidence(draft), TD_DRAFT_CONFIDENCE_LOOKUP);
    assert_int_equal(td_draft_propose(draft, 8, out), 8); /* five: as many as wanted */
    assert_int_equal(td_draft_confidence(draft), TD_DRAFT_CONFIDENCE_LOOKUP + 3);
    assert_true(td_draft_confidence_prior(TD_DRAFT_CONFIDENCE_LOOKUP) <
                td_draft_confidence_prior(TD_DRAFT_CONFIDENCE_LOOKUP + 3));
    assert_int_equal(out[0], 10);
    assert_int_equal(out[2], 12);
    assert_int_equal(out[3], 99);
    assert_int_equal(td_draft_propose(draft, 0, out), 0);
    td_draft_destroy(draft);
}

static void test_lookup_goes_on_with_what_repeats(void **state)
{
    static const uint32_t prompt[] = {1, 2, 3, 1, 2, 3, 1, 2, 3};
    td_draft_t *draft = open_draft(NULL, 0);
    uint32_t out[TD_DRAFT_TOKENS_MAX];
    (void)state;

    td_draft_append(draft, prompt, TD_ARRAY_LEN(prompt), false);
    assert_int_equal(td_draft_propose(draft, TD_DRAFT_TOKENS_MAX, out), TD_DRAFT_TOKENS_MAX);
    for (uint32_t i = 0; i < TD_DRAFT_TOKENS_MAX; i++) {
        assert_int_equal(out[i], 1 + i % 3);
    }
    td_draft_destroy(draft);
}

static void test_lookup_follows_a_prediction(void **state)
{
    static const uint32_t prediction[] = {20, 21, 22, 23, 24, 25, 26, 27};
    static const uint32_t prompt[] = {1, 2, 3};
    static const uint32_t output[] = {50, 51, 22, 23, 24};
    td_draft_t *draft = open_draft(prediction, TD_ARRAY_LEN(prediction));
    uint32_t out[8];
    (void)state;

    td_draft_append(draft, prompt, TD_ARRAY_LEN(prompt), false);
    assert_int_equal(td_draft_propose(draft, 3, out), 3); /* its beginning */
    assert_int_equal(out[0], 20);
    td_draft_append(draft, output, TD_ARRAY_LEN(output), true); /* another one, then back to it */
    assert_int_equal(td_draft_propose(draft, 8, out), 3);
    assert_int_equal(out[0], 25);
    assert_int_equal(out[2], 27); /* never across its end */
    td_draft_destroy(draft);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_drafters_have_names),
        cmocka_unit_test(test_lookup_copies_what_followed),
        cmocka_unit_test(test_lookup_goes_on_with_what_repeats),
        cmocka_unit_test(test_lookup_follows_a_prediction),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

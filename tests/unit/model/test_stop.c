#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/model/td_stop.h"

/* Feeds text in pieces of n bytes; the result is what a client would have read. */
static void run(const char *text, size_t n, const td_stop_string_t *strings, uint32_t count,
                bool include, const char *expected, bool matched)
{
    td_stop_t stop = {.strings = strings, .count = count, .include = include};
    td_str_t out = {0};

    for (size_t at = 0; at < strlen(text); at += n) {
        size_t len = TD_MIN(n, strlen(text) - at);
        assert_int_equal(td_stop_push(&stop, text + at, len, true, &out), TD_OK);
    }
    assert_int_equal(td_stop_finish(&stop, &out), TD_OK);
    assert_string_equal(out.bytes != NULL ? out.bytes : "", expected);
    assert_int_equal(stop.matched, matched);
    td_str_fini(&out);
    td_stop_fini(&stop);
}

#define STRING(text)                                                                               \
    {                                                                                              \
        (const uint8_t *)(text), sizeof(text) - 1                                                  \
    }

static void test_stop_string_ends_text_before_it_however_it_is_cut(void **state)
{
    const td_stop_string_t strings[] = {STRING("END"), STRING("\n\n")};
    (void)state;

    for (size_t n = 1; n <= 12; n++) {
        run("hello ENEND world", n, strings, 2, false, "hello EN", true);
        run("a\nb\n\nc", n, strings, 2, false, "a\nb", true);
        run("a\nb\n\nc", n, strings, 2, true, "a\nb\n\n", true);
    }
}

/* F15: what was held back as a possible beginning is given out at the end. */
static void test_f15_held_text_is_flushed_at_the_end(void **state)
{
    const td_stop_string_t strings[] = {STRING("STOP")};
    (void)state;

    for (size_t n = 1; n <= 8; n++) {
        run("say STO", n, strings, 1, false, "say STO", false);
    }
}

/* F15: no prefix of a stop string is given out before it is certain. */
static void test_f15_stop_prefix_is_held_back(void **state)
{
    const td_stop_string_t strings[] = {STRING("STOP")};
    td_stop_t stop = {.strings = strings, .count = 1};
    td_str_t out = {0};
    (void)state;

    assert_int_equal(td_stop_push(&stop, "x STO", 5, true, &out), TD_OK);
    assert_string_equal(out.bytes, "x ");
    assert_int_equal(td_stop_push(&stop, "O", 1, true, &out), TD_OK);
    assert_string_equal(out.bytes, "x STOO");
    td_str_fini(&out);
    td_stop_fini(&stop);
}

static void test_stop_earliest_match_wins(void **state)
{
    const td_stop_string_t strings[] = {STRING("late"), STRING("early")};
    (void)state;
    run("an early and a late", 100, strings, 2, false, "an ", true);
}

static void test_stop_is_not_looked_for_before_the_minimum(void **state)
{
    const td_stop_string_t strings[] = {STRING("x")};
    td_stop_t stop = {.strings = strings, .count = 1};
    td_str_t out = {0};
    (void)state;

    assert_int_equal(td_stop_push(&stop, "axb", 3, false, &out), TD_OK);
    assert_string_equal(out.bytes, "axb");
    assert_int_equal(td_stop_push(&stop, "cxd", 3, true, &out), TD_OK);
    assert_string_equal(out.bytes, "axbc");
    assert_true(stop.matched);
    td_str_fini(&out);
    td_stop_fini(&stop);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_stop_string_ends_text_before_it_however_it_is_cut),
        cmocka_unit_test(test_f15_held_text_is_flushed_at_the_end),
        cmocka_unit_test(test_f15_stop_prefix_is_held_back),
        cmocka_unit_test(test_stop_earliest_match_wins),
        cmocka_unit_test(test_stop_is_not_looked_for_before_the_minimum),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

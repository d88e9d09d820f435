/* The suffix automaton against looking at every place. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "common/base/td_base.h"
#include "common/spec/td_suffix.h"

#define TEXT_MAX 600u
#define MARK UINT32_MAX

/* Length of the longest end of text that ends earlier as well, not across a mark. */
static uint32_t slow_match(const uint32_t *text, uint32_t count)
{
    uint32_t best = 0;

    for (uint32_t end = 1; end < count; end++) {
        uint32_t len = 0;
        while (len < end && text[end - 1 - len] == text[count - 1 - len] &&
               text[count - 1 - len] != MARK) {
            len++;
        }
        best = TD_MAX(best, len);
    }
    return best;
}

static uint32_t next_random(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return *state >> 16;
}

static void check(const td_suffix_t *s, const uint32_t *text, uint32_t count)
{
    uint32_t next = 0;
    const uint32_t len = td_suffix_match(s, &next);

    assert_int_equal(td_suffix_count(s), count);
    assert_int_equal(len, slow_match(text, count));
    if (len > 0) {
        assert_in_range(next, len, count - 1);
        assert_memory_equal(text + next - len, text + count - len, len * sizeof(*text));
    }
}

static void test_suffix_matches_what_a_search_finds(void **state)
{
    static const uint32_t alphabets[] = {1, 2, 3, 10, 1000};
    uint32_t random = 7;
    (void)state;

    for (uint32_t round = 0; round < 60; round++) {
        const uint32_t alphabet = alphabets[round % TD_ARRAY_LEN(alphabets)];
        const uint32_t marks_of_100 = round % 3 == 0 ? 0 : 4;
        uint32_t text[TEXT_MAX];
        td_suffix_t *s = NULL;
        assert_int_equal(td_suffix_create(TEXT_MAX, &s), TD_OK);
        for (uint32_t i = 0; i < TEXT_MAX; i++) {
            if (next_random(&random) % 100 < marks_of_100) {
                text[i] = MARK;
                td_suffix_append_mark(s);
                continue;
            }
            /* Copies of what was before, now and then: long matches. */
            text[i] = i > 20 && next_random(&random) % 4 > 0 ? text[i - 17]
                                                             : next_random(&random) % alphabet;
            if (text[i] == MARK) {
                text[i] = 0;
            }
            td_suffix_append(s, text[i]);
            check(s, text, i + 1);
            assert_int_equal(td_suffix_token(s, i), text[i]);
        }
        td_suffix_destroy(s);
    }
}

/* The newest of the occurrences asked for before: what a text did lately, it will rather do again.
 */
static void test_suffix_names_a_recent_place(void **state)
{
    static const uint32_t text[] = {1, 2, 3, 9, 1, 2, 4, 9, 1, 2};
    td_suffix_t *s = NULL;
    uint32_t next = 0;
    (void)state;

    assert_int_equal(td_suffix_create(64, &s), TD_OK);
    for (uint32_t i = 0; i < TD_ARRAY_LEN(text); i++) {
        td_suffix_append(s, text[i]);
    }
    assert_int_equal(td_suffix_match(s, &next), 3); /* 9 1 2 */
    assert_int_equal(next, 6);
    td_suffix_destroy(s);
}

static void test_suffix_is_bounded(void **state)
{
    enum { COUNT = 5000 };
    td_suffix_t *s = NULL;
    uint32_t next = 0;
    uint64_t allocations = 0;
    (void)state;

    assert_int_equal(td_suffix_create(0, &s), TD_ERR_INVALID);
    assert_int_equal(td_suffix_create(TD_SUFFIX_TOKENS_MAX + 1, &s), TD_ERR_INVALID);
    assert_int_equal(td_suffix_create(COUNT, &s), TD_OK);
    allocations = td_alloc_count();
    for (uint32_t i = 0; i < COUNT + 10; i++) { /* a text with many states: abb abb ... */
        td_suffix_append(s, i % 3 == 0 ? i % 7 : i % 2);
    }
    assert_int_equal(td_alloc_count(), allocations);
    assert_int_equal(td_suffix_count(s), COUNT);
    assert_int_equal(td_suffix_match(s, &next), 0);
    td_suffix_append_mark(s);
    assert_int_equal(td_suffix_count(s), COUNT);
    td_suffix_destroy(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_suffix_matches_what_a_search_finds),
        cmocka_unit_test(test_suffix_names_a_recent_place),
        cmocka_unit_test(test_suffix_is_bounded),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

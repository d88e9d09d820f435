/* Names against a plain list of them, in a random order of setting, removing and finding. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>

#include "common/base/td_names.h"

#define NAMES 300u
#define STEPS 20000u

static char names[NAMES][8];
static uint32_t numbers[NAMES]; /* TD_NAMES_NONE: isn't there */

static uint32_t next_random(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*state >> 33);
}

static void check_all(const td_names_t *table)
{
    for (uint32_t i = 0; i < NAMES; i++) {
        assert_int_equal(td_names_find(table, names[i]), numbers[i]);
    }
}

static void test_names_are_what_a_list_says(void **state)
{
    uint64_t random = 1;
    td_names_t table;
    uint32_t there = 0;
    (void)state;

    assert_int_equal(td_names_init(&table, NAMES / 2), TD_OK);
    for (uint32_t i = 0; i < NAMES; i++) {
        (void)snprintf(names[i], sizeof(names[i]), "n-%u", i);
        numbers[i] = TD_NAMES_NONE;
    }
    for (uint32_t step = 0; step < STEPS; step++) {
        const uint32_t i = next_random(&random) % NAMES;
        if (numbers[i] == TD_NAMES_NONE && there < NAMES / 2) {
            numbers[i] = step;
            td_names_set(&table, names[i], step);
            there++;
        } else if (numbers[i] != TD_NAMES_NONE && next_random(&random) % 4 == 0) {
            numbers[i] = step;
            td_names_set(&table, names[i], step); /* another number */
        } else {
            td_names_remove(&table, names[i]); /* also what isn't there */
            there -= numbers[i] != TD_NAMES_NONE;
            numbers[i] = TD_NAMES_NONE;
        }
        assert_int_equal(table.count, there);
        if (step % 64 == 0) {
            check_all(&table);
        }
    }
    check_all(&table);
    td_names_fini(&table);
}

static void test_a_valid_name_is_short_and_plain(void **state)
{
    (void)state;

    assert_true(td_name_is_valid("a", 4));
    assert_true(td_name_is_valid("-_.9", 4));
    assert_false(td_name_is_valid("", 4));
    assert_false(td_name_is_valid("abcde", 4));
    assert_false(td_name_is_valid("a b", 4));
    assert_false(td_name_is_valid("a/b", 4));
    assert_false(td_name_is_valid("\xc3\xa4", 4));
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_names_are_what_a_list_says),
                                       cmocka_unit_test(test_a_valid_name_is_short_and_plain)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}

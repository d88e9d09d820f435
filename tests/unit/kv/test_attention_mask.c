/* Masks against their definitions, position by position. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/kv/td_attention_mask.h"

enum { POSITIONS = 200 };

static const td_attention_mask_t masks[] = {
    {0},
    {.kind = TD_ATTENTION_WINDOW, .local = 1},
    {.kind = TD_ATTENTION_WINDOW, .local = 17},
    {.kind = TD_ATTENTION_WINDOW, .local = 40, .sinks = 5},
    {.kind = TD_ATTENTION_WINDOW, .local = 16, .sinks = 64},
    {.kind = TD_ATTENTION_WINDOW, .local = 1000},
    {.kind = TD_ATTENTION_STRIDED, .local = 20, .stride = 64, .summary = 16},
    {.kind = TD_ATTENTION_STRIDED, .local = 1, .stride = 2, .summary = 1},
    {.kind = TD_ATTENTION_STRIDED, .local = 33, .stride = 50, .summary = 3},
    {.kind = TD_ATTENTION_STRIDED, .local = 5, .stride = 300, .summary = 299},
};

/* The definition, without any of the code's words for it. */
static bool sees(const td_attention_mask_t *m, uint32_t q, uint32_t p)
{
    if (p > q) {
        return false;
    }
    switch (m->kind) {
    case TD_ATTENTION_WINDOW:
        return q - p < m->local || p < m->sinks;
    case TD_ATTENTION_STRIDED:
        return q - p < m->local || p % m->stride + m->summary >= m->stride;
    default:
        return true;
    }
}

static void test_mask_sees_what_its_definition_says(void **state)
{
    (void)state;
    for (size_t m = 0; m < TD_ARRAY_LEN(masks); m++) {
        for (uint32_t q = 0; q < POSITIONS; q++) {
            for (uint32_t p = 0; p < POSITIONS; p++) {
                assert_int_equal(td_attention_sees(&masks[m], q, p), sees(&masks[m], q, p));
            }
        }
    }
}

static void test_mask_bits_of_a_tile_are_what_is_seen(void **state)
{
    (void)state;
    for (size_t m = 0; m < TD_ARRAY_LEN(masks); m++) {
        for (uint32_t tile = 0; tile < POSITIONS; tile += 32) {
            const uint32_t lasting = td_attention_lasting_bits(&masks[m], tile);
            for (uint32_t q = 0; q < POSITIONS; q++) {
                uint32_t want = 0;
                for (uint32_t i = 0; i < 32; i++) {
                    want |= (uint32_t)sees(&masks[m], q, tile + i) << i;
                }
                assert_int_equal(td_attention_bits(&masks[m], q, tile, lasting), want);
            }
        }
    }
}

static uint32_t next_by_definition(const td_attention_mask_t *m, uint32_t first, uint32_t last,
                                   uint32_t at)
{
    for (uint32_t p = at; p <= last; p++) {
        for (uint32_t q = first; q <= last; q++) {
            if (sees(m, q, p)) {
                return p;
            }
        }
    }
    return TD_ATTENTION_NONE;
}

static void test_mask_next_is_the_first_that_some_query_sees(void **state)
{
    static const uint32_t rows[] = {1, 2, 16, 40};
    (void)state;
    for (size_t m = 0; m < TD_ARRAY_LEN(masks); m++) {
        for (uint32_t first = 0; first < POSITIONS; first += 7) {
            for (uint32_t at = 0; at < POSITIONS; at++) {
                for (size_t r = 0; r < TD_ARRAY_LEN(rows); r++) {
                    const uint32_t last = first + rows[r] - 1;
                    assert_int_equal(td_attention_next(&masks[m], first, last, at),
                                     next_by_definition(&masks[m], first, last, at));
                }
            }
        }
    }
}

/* What may go is exactly what no later position sees (POSITIONS more are enough to tell). */
static void test_mask_needs_a_block_while_a_later_position_sees_it(void **state)
{
    (void)state;
    for (size_t m = 0; m < TD_ARRAY_LEN(masks); m++) {
        for (uint32_t from = 0; from < POSITIONS; from++) {
            for (uint32_t begin = 0; begin < POSITIONS; begin += 16) {
                bool want = false;
                for (uint32_t p = begin; p < begin + 16; p++) {
                    for (uint32_t q = TD_MAX(from, p); q < TD_MAX(from, p) + 2 && !want; q++) {
                        want = sees(&masks[m], q, p);
                    }
                }
                assert_int_equal(td_attention_needs(&masks[m], from, begin, begin + 16), want);
            }
        }
    }
}

static void test_mask_counts_the_blocks_that_are_needed(void **state)
{
    (void)state;
    for (size_t m = 0; m < TD_ARRAY_LEN(masks); m++) {
        for (uint32_t rows = 1; rows < 70; rows += 17) {
            const uint32_t most = td_attention_blocks_max(&masks[m], 16, POSITIONS, rows);
            uint32_t reached = 0;
            /* At the beginning of each pass: what it writes, and what it needs of before. */
            for (uint32_t from = 0; from < POSITIONS; from++) {
                const uint32_t end = TD_MIN(from + rows, (uint32_t)POSITIONS);
                uint32_t count = 0;
                for (uint32_t block = 0; block < (end + 15) / 16; block++) {
                    bool need = false;
                    for (uint32_t p = block * 16; p < TD_MIN(block * 16 + 16, end); p++) {
                        need = need || p >= from || sees(&masks[m], from, p);
                    }
                    count += need;
                }
                assert_int_equal(td_attention_blocks_needed(&masks[m], 16, from, 0, end), count);
                assert_true(count <= most);
                reached = TD_MAX(reached, count);
            }
            assert_true(reached + 1 >= most || masks[m].kind == TD_ATTENTION_STRIDED ||
                        masks[m].sinks > 0);
        }
    }
}

static void test_mask_lasting_blocks_are_needed_for_good(void **state)
{
    static const td_attention_mask_t strided = {
        .kind = TD_ATTENTION_STRIDED, .local = 256, .stride = 128, .summary = 16};
    static const td_attention_mask_t window = {
        .kind = TD_ATTENTION_WINDOW, .local = 512, .sinks = 4};

    (void)state;
    for (uint32_t b = 0; b < 10000; b++) { /* one block in eight stays */
        assert_int_equal(td_attention_lasts(&strided, 16 * b, 16 * b + 16), b % 8 == 7);
        assert_int_equal(td_attention_lasts(&window, 16 * b, 16 * b + 16), b == 0);
        assert_true(td_attention_lasts(&masks[0], 16 * b, 16 * b + 16));
    }
    assert_int_equal(td_attention_blocks_max(&window, 16, 100000, 1), 34);
    assert_int_equal(td_attention_blocks_max(&strided, 16, 100000, 1), 781 + 17);
}

static void test_mask_texts_are_read_and_named(void **state)
{
    static const struct {
        const char *text;
        const char *name; /* NULL: refused */
    } cases[] = {
        {"full", "full"},
        {"window:512", "window:512"},
        {"window:512,4", "window:512,4"},
        {"window:0512,0", "window:512"},
        {"window:16777216", "window:16777216"},
        {"strided:256,128", "strided:256,128,16"},
        {"strided:256,128,1", "strided:256,128,1"},
        {"strided:16777216,16777216,16777215", "strided:16777216,16777216,16777215"},
        {"", NULL},
        {"Full", NULL},
        {"full:1", NULL},
        {"window", NULL},
        {"window:", NULL},
        {"window:0", NULL},
        {"window:-1", NULL},
        {"window: 5", NULL},
        {"window:5,", NULL},
        {"window:5,1,1", NULL},
        {"window:5x", NULL},
        {"window:16777217", NULL},
        {"window:99999999999999999999", NULL},
        {"strided:5", NULL},
        {"strided:0,128", NULL},
        {"strided:5,16", NULL}, /* 16 summaries of 16 would be full attention */
        {"strided:5,16,16", NULL},
        {"strided:5,16,0", NULL},
        {"strided:5,16,1,1", NULL},
    };

    (void)state;
    for (size_t i = 0; i < TD_ARRAY_LEN(cases); i++) {
        td_attention_mask_t mask = {.kind = TD_ATTENTION_WINDOW, .local = 77};
        char name[TD_ATTENTION_TEXT_MAX];
        if (cases[i].name == NULL) {
            assert_int_equal(td_attention_mask_parse(cases[i].text, &mask), TD_ERR_INVALID);
            assert_int_equal(mask.local, 77);
        } else {
            assert_int_equal(td_attention_mask_parse(cases[i].text, &mask), TD_OK);
            td_attention_mask_name(&mask, name);
            assert_string_equal(name, cases[i].name);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_mask_sees_what_its_definition_says),
        cmocka_unit_test(test_mask_bits_of_a_tile_are_what_is_seen),
        cmocka_unit_test(test_mask_next_is_the_first_that_some_query_sees),
        cmocka_unit_test(test_mask_needs_a_block_while_a_later_position_sees_it),
        cmocka_unit_test(test_mask_counts_the_blocks_that_are_needed),
        cmocka_unit_test(test_mask_lasting_blocks_are_needed_for_good),
        cmocka_unit_test(test_mask_texts_are_read_and_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

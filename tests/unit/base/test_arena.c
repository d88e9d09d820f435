#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <string.h>

#include "common/base/td_arena.h"
#include "common/base/td_base.h"

enum { PIECES = 300, BIG = 40 << 20 }; /* over one chunk */

static void test_pieces_are_aligned_and_apart(void **state)
{
    td_arena_t *arena = td_arena_create();
    uint8_t *pieces[PIECES];
    (void)state;

    assert_non_null(arena);
    for (size_t i = 0; i < PIECES; i++) {
        pieces[i] = td_arena_alloc(arena, i * 1000 + 1);
        assert_non_null(pieces[i]);
        assert_int_equal((uintptr_t)pieces[i] % TD_CACHE_LINE_BYTES, 0);
        memset(pieces[i], (int)(i % 251), i * 1000 + 1);
    }
    for (size_t i = 0; i < PIECES; i++) {
        assert_int_equal(pieces[i][0], i % 251);
        assert_int_equal(pieces[i][i * 1000], i % 251);
    }
    td_arena_destroy(arena);
}

static void test_a_piece_larger_than_a_chunk_gets_its_own(void **state)
{
    td_arena_t *arena = td_arena_create();
    uint8_t *big = NULL;
    (void)state;

    assert_non_null(arena);
    assert_non_null(td_arena_alloc(arena, 1));
    big = td_arena_alloc(arena, BIG);
    assert_non_null(big);
    big[0] = big[BIG - 1] = 1;
    assert_non_null(td_arena_alloc(arena, 1));
    td_arena_destroy(arena);
}

static void test_no_memory_is_null_and_the_arena_goes_on(void **state)
{
    td_arena_t *arena = td_arena_create();
    (void)state;

    assert_non_null(arena);
    assert_null(td_arena_alloc(arena, SIZE_MAX));
    for (uint64_t nth = 1; nth <= 2; nth++) {
        td_alloc_fail_at(nth);
        assert_null(td_arena_alloc(arena, 1));
        td_alloc_fail_at(0);
    }
    assert_non_null(td_arena_alloc(arena, 1));
    td_arena_destroy(arena);
    td_arena_destroy(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pieces_are_aligned_and_apart),
        cmocka_unit_test(test_a_piece_larger_than_a_chunk_gets_its_own),
        cmocka_unit_test(test_no_memory_is_null_and_the_arena_goes_on),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

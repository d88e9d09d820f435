#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_buf.h"

static void test_buf_get_fails_and_keeps_position_when_short(void **state)
{
    const uint8_t bytes[] = {1, 2, 3, 4, 5};
    td_buf_t buf;
    uint32_t u32 = 0;
    uint64_t u64 = 77;
    (void)state;

    td_buf_init(&buf, bytes, sizeof(bytes));
    assert_true(td_buf_get_u32(&buf, &u32));
    assert_int_equal(u32, 0x04030201);
    assert_false(td_buf_get_u64(&buf, &u64));
    assert_int_equal(u64, 77);
    assert_int_equal(td_buf_left(&buf), 1);
}

static void test_str_append_printf_and_consume(void **state)
{
    td_str_t str = {0};
    (void)state;

    assert_int_equal(td_str_append_text(&str, "abc"), TD_OK);
    assert_int_equal(td_str_printf(&str, "-%d-%s", 42, "x"), TD_OK);
    assert_string_equal(str.bytes, "abc-42-x");
    td_str_consume(&str, 4);
    assert_string_equal(str.bytes, "42-x");
    td_str_fini(&str);
}

static void test_str_unchanged_when_memory_is_out(void **state)
{
    td_str_t str = {0};
    char big[500];
    (void)state;

    memset(big, 'x', sizeof(big));
    assert_int_equal(td_str_append_text(&str, "keep"), TD_OK);
    td_alloc_fail_at(1);
    assert_int_equal(td_str_append(&str, big, sizeof(big)), TD_ERR_NO_MEMORY);
    td_alloc_fail_at(0);
    assert_string_equal(str.bytes, "keep");
    td_str_fini(&str);
}

static void test_size_arithmetic_refuses_overflow(void **state)
{
    size_t out = 5;
    (void)state;

    assert_false(td_size_mul(SIZE_MAX, 2, &out));
    assert_false(td_size_add(SIZE_MAX, 1, &out));
    assert_int_equal(out, 5);
    assert_true(td_size_mul(6, 7, &out));
    assert_int_equal(out, 42);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_buf_get_fails_and_keeps_position_when_short),
        cmocka_unit_test(test_str_append_printf_and_consume),
        cmocka_unit_test(test_str_unchanged_when_memory_is_out),
        cmocka_unit_test(test_size_arithmetic_refuses_overflow),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

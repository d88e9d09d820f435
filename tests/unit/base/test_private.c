#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include "common/base/td_base.h"
#include "common/base/td_private.h"

static void test_private_is_what_nobody_else_reads(void **state)
{
    static const struct {
        mode_t mode;
        uid_t owner;
        uid_t self;
        bool is_private;
    } cases[] = {
        {0600, 7, 7, true},  {0400, 7, 7, true},    {0640, 7, 7, false},    {0604, 7, 7, false},
        {0620, 7, 7, false}, {0600, 0, 0, true},    {0640, 0, 0, false},    {0440, 0, 7, true},
        {0640, 0, 7, true},  {0644, 0, 7, false},   {0660, 0, 7, false},    {0450, 0, 7, true},
        {0640, 8, 7, false}, {0100600, 7, 7, true}, {0100644, 0, 7, false},
    };
    (void)state;

    for (size_t i = 0; i < TD_ARRAY_LEN(cases); i++) {
        assert_int_equal(td_is_private(cases[i].mode, cases[i].owner, cases[i].self),
                         cases[i].is_private);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_private_is_what_nobody_else_reads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

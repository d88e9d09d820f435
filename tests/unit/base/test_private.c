#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "common/base/td_base.h"
#include "common/base/td_file.h"
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

static void test_only_regular_files_are_opened(void **state)
{
    char folder[] = "/tmp/tandem-test-XXXXXX";
    char path[64];
    struct stat st;
    int fd = -1;
    (void)state;

    assert_non_null(mkdtemp(folder));
    (void)snprintf(path, sizeof(path), "%s/it", folder);
    assert_int_equal(td_file_open("test", path, true, &fd, &st), TD_ERR_IO);

    assert_int_equal(mkfifo(path, 0600), 0); /* nobody writes: it must not be waited for */
    assert_int_equal(td_file_open("test", path, true, &fd, &st), TD_ERR_INVALID);
    assert_int_equal(unlink(path), 0);
    assert_int_equal(td_file_open("test", folder, false, &fd, &st), TD_ERR_INVALID);

    fd = open(path, O_CREAT | O_WRONLY, 0600);
    assert_int_equal(write(fd, "secret", 6), 6);
    assert_int_equal(close(fd), 0);
    assert_int_equal(td_file_open("test", path, true, &fd, &st), TD_OK);
    assert_int_equal(st.st_size, 6);
    assert_int_equal(close(fd), 0);
    assert_int_equal(chmod(path, 0644), 0);
    assert_int_equal(td_file_open("test", path, true, &fd, &st), TD_ERR_INVALID);
    assert_int_equal(td_file_open("test", path, false, &fd, &st), TD_OK);
    assert_int_equal(close(fd), 0);

    assert_int_equal(unlink(path), 0);
    assert_int_equal(rmdir(folder), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_private_is_what_nobody_else_reads),
        cmocka_unit_test(test_only_regular_files_are_opened),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

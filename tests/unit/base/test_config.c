#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "common/base/td_base.h"
#include "common/base/td_config.h"

static const td_option_t options[] = {
    {"name", TD_OPTION_TEXT, "def", "a text"},
    {"count", TD_OPTION_COUNT, "5", "a number", 1, 100},
    {"size", TD_OPTION_BYTES, "1M", "a size", 1, 0},
    {"wait", TD_OPTION_MS, "2s", "a time", 0, 0},
    {"on", TD_OPTION_BOOL, "false", "a switch"},
    {"mode", TD_OPTION_CHOICE, "a", "a choice", 0, 0, "a|bc|d"},
};

static td_config_next_t parse(int argc, char **argv, td_config_t **config)
{
    return td_config_parse("prog", "summary", options, TD_ARRAY_LEN(options), argc, argv, config);
}

static void expect_usage(char *flag)
{
    char *argv[] = {"prog", flag, NULL};
    td_config_t *config = NULL;
    assert_int_equal(parse(2, argv, &config), TD_CONFIG_EXIT_USAGE);
    td_config_destroy(config);
}

static void test_config_defaults_and_units(void **state)
{
    char *argv[] = {"prog", NULL};
    td_config_t *c = NULL;
    (void)state;

    assert_int_equal(parse(1, argv, &c), TD_CONFIG_RUN);
    assert_string_equal(td_config_text(c, "name"), "def");
    assert_int_equal(td_config_u64(c, "size"), 1 << 20);
    assert_int_equal(td_config_u64(c, "wait"), 2000);
    assert_false(td_config_bool(c, "on"));
    td_config_destroy(c);
}

static void test_config_flags_beat_environment_beats_file(void **state)
{
    char path[] = "build/config-test-XXXXXX";
    int fd = mkstemp(path);
    const char yaml[] = "name: from-file\ncount: \"7\"\nmode: bc\n";
    char *argv[] = {"prog", "--config", path, "--count=9", "--on", NULL};
    td_config_t *c = NULL;
    (void)state;

    assert_int_equal(write(fd, yaml, sizeof(yaml) - 1), (ssize_t)sizeof(yaml) - 1);
    assert_int_equal(setenv("TANDEM_NAME", "from-env", 1), 0);
    assert_int_equal(setenv("TANDEM_COUNT", "8", 1), 0);
    assert_int_equal(parse(5, argv, &c), TD_CONFIG_RUN);
    assert_string_equal(td_config_text(c, "name"), "from-env");
    assert_int_equal(td_config_u64(c, "count"), 9);
    assert_string_equal(td_config_text(c, "mode"), "bc");
    assert_true(td_config_bool(c, "on"));
    td_config_destroy(c);
    (void)unsetenv("TANDEM_NAME");
    (void)unsetenv("TANDEM_COUNT");
    (void)close(fd);
    (void)unlink(path);
}

static void test_config_refuses_what_it_does_not_know(void **state)
{
    (void)state;
    expect_usage("--nope=1");
    expect_usage("positional");
    expect_usage("--count=0");
    expect_usage("--count=101");
    expect_usage("--count=5x");
    expect_usage("--count=-1");
    expect_usage("--size=99999999999999999999");
    expect_usage("--mode=b");
    expect_usage("--mode=bc|d"); /* two of them are none */
    expect_usage("--on=maybe");
    expect_usage("--config=/does/not/exist");
    expect_usage("--name"); /* without a value */
}

static void test_config_refuses_unknown_yaml_key(void **state)
{
    char path[] = "build/config-test-XXXXXX";
    int fd = mkstemp(path);
    char *argv[] = {"prog", "--config", path, NULL};
    td_config_t *c = NULL;
    (void)state;

    assert_int_equal(write(fd, "nope: 1\n", 8), 8);
    assert_int_equal(parse(3, argv, &c), TD_CONFIG_EXIT_USAGE);
    td_config_destroy(c);
    (void)close(fd);
    (void)unlink(path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_config_defaults_and_units),
        cmocka_unit_test(test_config_flags_beat_environment_beats_file),
        cmocka_unit_test(test_config_refuses_what_it_does_not_know),
        cmocka_unit_test(test_config_refuses_unknown_yaml_key),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

/* The access log where its file takes nothing more, or takes it late. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "router/rtr_access.h"

#define ENDS_MS 5000u

typedef struct fixture {
    char folder[64];
    char path[96];
    td_metrics_t *registry;
    rtr_metrics_t metrics;
    rtr_access_t *access;
} fixture_t;

static int setup(void **state)
{
    fixture_t *f = calloc(1, sizeof(*f));

    assert_non_null(f);
    (void)snprintf(f->folder, sizeof(f->folder), "/tmp/tandem-access-XXXXXX");
    assert_non_null(mkdtemp(f->folder));
    (void)snprintf(f->path, sizeof(f->path), "%s/log", f->folder);
    assert_int_equal(td_metrics_create(&f->registry), TD_OK);
    rtr_metrics_declare(f->registry, &f->metrics);
    *state = f;
    return 0;
}

static int teardown(void **state)
{
    fixture_t *f = *state;

    rtr_access_destroy(f->access);
    td_metrics_destroy(f->registry);
    (void)unlink(f->path);
    (void)rmdir(f->folder);
    free(f);
    return 0;
}

static void add(fixture_t *f, const char *method, const char *path)
{
    rtr_access_entry_t entry = {.http_status = 200, .client = "127.0.0.1"};

    (void)snprintf(entry.method, sizeof(entry.method), "%s", method);
    (void)snprintf(entry.path, sizeof(entry.path), "%s", path);
    rtr_access_add(f->access, &entry);
}

static size_t read_all(const fixture_t *f, char *out, size_t room)
{
    FILE *file = fopen(f->path, "re");
    size_t len = 0;

    assert_non_null(file);
    len = fread(out, 1, room - 1, file);
    (void)fclose(file);
    out[len] = '\0';
    return len;
}

static void test_access_ends_though_nobody_reads_its_pipe(void **state)
{
    fixture_t *f = *state;
    uint64_t begun = 0;
    int reader = -1;

    assert_int_equal(mkfifo(f->path, 0600), 0);
    assert_int_equal(rtr_access_create(f->path, &f->metrics, &f->access), TD_ERR_IO);
    reader = open(f->path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    assert_true(reader >= 0);
    assert_int_equal(rtr_access_create(f->path, &f->metrics, &f->access), TD_OK);
    for (uint32_t i = 0; i < 20000; i++) {
        add(f, "GET", "/of-a-pipe-that-is-full-at-some-time");
    }
    begun = td_now_ns();
    rtr_access_destroy(f->access);
    f->access = NULL;
    assert_true(td_now_ns() - begun < ENDS_MS * TD_NS_PER_MS);
    assert_true(td_metric_get(f->metrics.access_dropped) > 0);
    (void)close(reader);
}

/* Waits until so many lines were dropped. */
static void wait_dropped(const fixture_t *f, uint64_t count)
{
    const uint64_t until = td_now_ns() + ENDS_MS * TD_NS_PER_MS;

    while (td_metric_get(f->metrics.access_dropped) < count && td_remaining_ns(until) > 0) {
        (void)usleep(1000);
    }
    assert_int_equal(td_metric_get(f->metrics.access_dropped), count);
}

/* A limit of the file's size stands for a disk that is full, and then is not. */
static void test_access_counts_each_line_and_tears_none_where_the_disk_was_full(void **state)
{
    fixture_t *f = *state;
    const struct rlimit full = {.rlim_cur = 150, .rlim_max = RLIM_INFINITY};
    const struct rlimit free_again = {.rlim_cur = RLIM_INFINITY, .rlim_max = RLIM_INFINITY};
    char text[1024];
    const char *last = NULL;

    (void)signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(rtr_access_create(f->path, &f->metrics, &f->access), TD_OK);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &full), 0);
    for (uint32_t i = 0; i < 4; i++) {
        add(f, "GET", "/no-room");
    }
    wait_dropped(f, 3);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &free_again), 0);
    add(f, "GET", "/room");
    rtr_access_destroy(f->access);
    f->access = NULL;
    assert_int_equal(td_metric_get(f->metrics.access_dropped), 3);
    assert_true(read_all(f, text, sizeof(text)) > full.rlim_cur);
    last = strstr(text, "path=\"/room\"");
    assert_non_null(last);
    while (last > text && last[-1] != '\n') {
        last--;
    }
    assert_int_equal(strncmp(last, "time=", 5), 0);
    assert_null(strstr(last + 1, "time="));
}

static void test_access_keeps_a_line_one_line_whatever_it_was_asked(void **state)
{
    fixture_t *f = *state;
    char text[1024];

    assert_int_equal(rtr_access_create(f->path, &f->metrics, &f->access), TD_OK);
    add(f, "G\x1b[1m\"", "/a\"b\nc\\d e\xff");
    rtr_access_destroy(f->access);
    f->access = NULL;
    assert_true(read_all(f, text, sizeof(text)) > 0);
    assert_non_null(strstr(text, " method=G?[1m? path=\"/a?b?c?d?e?\" status=200 "));
    assert_ptr_equal(strchr(text, '\n'), text + strlen(text) - 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_access_ends_though_nobody_reads_its_pipe, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(
            test_access_counts_each_line_and_tears_none_where_the_disk_was_full, setup, teardown),
        cmocka_unit_test_setup_teardown(test_access_keeps_a_line_one_line_whatever_it_was_asked,
                                        setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

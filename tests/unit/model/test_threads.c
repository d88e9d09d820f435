#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <sched.h>
#include <stdatomic.h>
#include <time.h>

#include "common/base/td_base.h"
#include "common/model/td_threads.h"

enum { THREADS = 4, RUNS = 200, STEPS = 20 };

typedef struct work {
    td_threads_t *threads;
    uint32_t ran[THREADS];
    uint32_t step_of[THREADS]; /* plain: the barrier must order it */
    atomic_uint wrong;
} work_t;

static void count_run(void *ctx, uint32_t idx, uint32_t count)
{
    work_t *w = ctx;
    if (count != THREADS || idx >= THREADS) {
        atomic_fetch_add(&w->wrong, 1);
        return;
    }
    w->ran[idx]++;
}

static void test_threads_run_calls_each_thread_once(void **state)
{
    work_t w = {0};
    (void)state;

    assert_int_equal(td_threads_create(THREADS, &w.threads), TD_OK);
    assert_int_equal(td_threads_count(w.threads), THREADS);
    for (uint32_t r = 1; r <= RUNS; r++) {
        td_threads_run(w.threads, count_run, &w);
        for (int i = 0; i < THREADS; i++) {
            assert_int_equal(w.ran[i], r); /* all have returned, and their writes are seen */
        }
    }
    assert_int_equal(w.wrong, 0);
    td_threads_destroy(w.threads);
}

static void step_together(void *ctx, uint32_t idx, uint32_t count)
{
    work_t *w = ctx;
    for (uint32_t step = 1; step <= STEPS; step++) {
        w->step_of[idx] = step;
        if ((step + idx) % 7 == 0) {
            (void)sched_yield();
        }
        td_threads_barrier(w->threads, idx);
        for (uint32_t i = 0; i < count; i++) {
            if (w->step_of[i] != step) {
                atomic_fetch_add(&w->wrong, 1);
            }
        }
        td_threads_barrier(w->threads, idx);
    }
}

static void test_threads_barrier_lets_none_ahead(void **state)
{
    work_t w = {0};
    (void)state;

    assert_int_equal(td_threads_create(THREADS, &w.threads), TD_OK);
    for (int r = 0; r < RUNS / 10; r++) {
        td_threads_run(w.threads, step_together, &w);
    }
    assert_int_equal(w.wrong, 0);
    td_threads_destroy(w.threads);
}

static double cpu_seconds(void)
{
    struct timespec t;
    (void)clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* The workers sleep between runs and still wake: 200 ms idle must cost far less than 200 ms. */
static void test_threads_sleep_when_idle(void **state)
{
    const struct timespec idle = {.tv_nsec = 200000000};
    work_t w = {0};
    double before = 0;
    (void)state;

    assert_int_equal(td_threads_create(THREADS, &w.threads), TD_OK);
    td_threads_run(w.threads, count_run, &w);
    before = cpu_seconds();
    (void)nanosleep(&idle, NULL); /* the time itself is what is tested */
    assert_true(cpu_seconds() - before < 0.1);
    td_threads_run(w.threads, count_run, &w);
    assert_int_equal(w.ran[THREADS - 1], 2);
    td_threads_destroy(w.threads);
}

static void count_one(void *ctx, uint32_t idx, uint32_t count)
{
    uint32_t *ran = ctx;
    *ran += count + idx;
}

static void test_threads_of_one_runs_in_place(void **state)
{
    td_threads_t *threads = NULL;
    uint32_t ran = 0;
    (void)state;

    assert_int_equal(td_threads_create(1, &threads), TD_OK);
    td_threads_run(threads, count_one, &ran);
    td_threads_barrier(threads, 0);
    assert_int_equal(ran, 1);
    td_threads_destroy(threads);
    td_threads_destroy(NULL);
}

static void test_threads_create_refuses_bad_counts(void **state)
{
    td_threads_t *threads = NULL;
    (void)state;

    assert_int_equal(td_threads_create(0, &threads), TD_ERR_INVALID);
    assert_int_equal(td_threads_create(TD_THREADS_MAX + 1, &threads), TD_ERR_INVALID);
    assert_null(threads);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_threads_run_calls_each_thread_once),
        cmocka_unit_test(test_threads_barrier_lets_none_ahead),
        cmocka_unit_test(test_threads_sleep_when_idle),
        cmocka_unit_test(test_threads_of_one_runs_in_place),
        cmocka_unit_test(test_threads_create_refuses_bad_counts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

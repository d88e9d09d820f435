#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <poll.h>
#include <pthread.h>

#include "common/base/td_base.h"
#include "common/base/td_ring.h"
#include "common/base/td_worker.h"

static void test_ring_is_busy_when_full_and_keeps_order(void **state)
{
    td_ring_t *ring = NULL;
    int items[3] = {0, 1, 2};
    void *got = NULL;
    (void)state;

    assert_int_equal(td_ring_create(2, &ring), TD_OK);
    assert_false(td_ring_pop(ring, &got));
    assert_int_equal(td_ring_push(ring, &items[0]), TD_OK);
    assert_int_equal(td_ring_push(ring, &items[1]), TD_OK);
    assert_int_equal(td_ring_push(ring, &items[2]), TD_ERR_BUSY);
    assert_true(td_ring_pop(ring, &got));
    assert_ptr_equal(got, &items[0]);
    assert_int_equal(td_ring_push(ring, &items[2]), TD_OK);
    assert_true(td_ring_pop(ring, &got));
    assert_true(td_ring_pop(ring, &got));
    assert_ptr_equal(got, &items[2]);
    td_ring_destroy(ring);
}

enum { PRODUCED = 20000 };

static void *produce(void *arg)
{
    static char item;
    for (int i = 0; i < PRODUCED;) {
        i += td_ring_push(arg, &item) == TD_OK;
    }
    return NULL;
}

static void test_ring_wakes_its_reader_and_loses_nothing(void **state)
{
    td_ring_t *ring = NULL;
    pthread_t threads[2];
    int got = 0;
    (void)state;

    assert_int_equal(td_ring_create(64, &ring), TD_OK);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(pthread_create(&threads[i], NULL, produce, ring), 0);
    }
    while (got < 2 * PRODUCED) {
        struct pollfd fd = {.fd = td_ring_fd(ring), .events = POLLIN};
        void *item = NULL;
        assert_int_equal(poll(&fd, 1, 10000), 1);
        td_ring_drain_fd(ring);
        while (td_ring_pop(ring, &item)) {
            got++;
        }
    }
    for (int i = 0; i < 2; i++) {
        (void)pthread_join(threads[i], NULL);
    }
    td_ring_destroy(ring);
}

static void add_one(void *ctx)
{
    ++*(int *)ctx;
}

static void test_worker_runs_jobs_one_after_the_other(void **state)
{
    td_worker_t *worker = NULL;
    int value = 0;
    (void)state;

    assert_int_equal(td_worker_create(&worker), TD_OK);
    for (int i = 1; i <= 100; i++) {
        struct pollfd fd = {.fd = td_worker_fd(worker), .events = POLLIN};
        td_worker_submit(worker, add_one, &value);
        assert_true(td_worker_is_busy(worker));
        do {
            assert_int_equal(poll(&fd, 1, 10000), 1);
        } while (!td_worker_take_done(worker));
        assert_int_equal(value, i);
        assert_false(td_worker_take_done(worker));
    }
    td_worker_destroy(worker);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ring_is_busy_when_full_and_keeps_order),
        cmocka_unit_test(test_ring_wakes_its_reader_and_loses_nothing),
        cmocka_unit_test(test_worker_runs_jobs_one_after_the_other),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

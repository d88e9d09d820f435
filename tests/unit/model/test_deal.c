#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <sched.h>
#include <stdatomic.h>

#include "common/base/td_base.h"
#include "common/model/td_deal.h"
#include "common/model/td_threads.h"

enum { THREADS = 4, PIECES_MAX = 100, STEPS = 40, RUNS = 25 };

typedef struct work {
    td_threads_t *threads;
    td_deal_t *deal;
    atomic_uint taken[STEPS][PIECES_MAX];
} work_t;

static uint32_t count_of(uint32_t step)
{
    return step * 7 % (PIECES_MAX + 1);
}

static void take_steps(void *ctx, uint32_t idx, uint32_t count)
{
    work_t *w = ctx;
    (void)count;

    td_deal_next(w->deal, idx, count_of(0)); /* the first to come meets shares not dealt out yet */
    for (uint32_t step = 0; step < STEPS; step++) {
        uint32_t begin = 0;
        uint32_t end = 0;
        if ((step + idx) % 5 == 0) {
            (void)sched_yield();
        }
        while (td_deal_take(w->deal, idx, &begin, &end)) {
            for (uint32_t i = begin; i < end; i++) {
                (void)atomic_fetch_add(&w->taken[step][i], 1);
            }
        }
        if (step + 1 < STEPS) { /* others may still take pieces of this step */
            td_deal_next(w->deal, idx, count_of(step + 1));
        }
        td_threads_barrier(w->threads, idx);
    }
}

static void test_deal_gives_every_piece_to_one_thread(void **state)
{
    static work_t w;
    (void)state;

    w = (work_t){.threads = NULL};
    assert_int_equal(td_threads_create(THREADS, &w.threads), TD_OK);
    assert_int_equal(td_deal_create(THREADS, &w.deal), TD_OK);
    for (uint32_t run = 1; run <= RUNS; run++) {
        td_threads_run(w.threads, take_steps, &w);
        for (uint32_t step = 0; step < STEPS; step++) {
            for (uint32_t i = 0; i < PIECES_MAX; i++) {
                assert_int_equal(w.taken[step][i], i < count_of(step) ? run : 0);
            }
        }
    }
    td_deal_destroy(w.deal);
    td_threads_destroy(w.threads);
}

/* One thread alone takes its own share from the front and then what the others have, from the end
 * of each. */
static void test_deal_takes_what_others_leave(void **state)
{
    uint32_t begins[64];
    uint32_t ends[64];
    bool taken[40] = {false};
    uint32_t count = 0;
    td_deal_t *deal = NULL;
    (void)state;

    assert_int_equal(td_deal_create(THREADS, &deal), TD_OK);
    for (uint32_t i = 0; i < THREADS; i++) {
        td_deal_next(deal, i, TD_ARRAY_LEN(taken));
    }
    while (td_deal_take(deal, 1, &begins[count], &ends[count])) {
        assert_true(begins[count] < ends[count]);
        for (uint32_t i = begins[count]; i < ends[count]; i++) {
            assert_false(taken[i]);
            taken[i] = true;
        }
        count++;
        assert_true(count < TD_ARRAY_LEN(begins));
    }
    for (uint32_t i = 0; i < TD_ARRAY_LEN(taken); i++) {
        assert_true(taken[i]);
    }
    assert_int_equal(begins[0], 10); /* its share is [10, 20) */
    assert_int_equal(ends[0], 15);
    assert_int_equal(begins[1], 15);
    for (uint32_t i = 0; i < count && ends[i] <= 20 && begins[i] >= 10; i++) {
        assert_true(i == 0 || begins[i] == ends[i - 1]); /* one linear stream */
    }
    for (uint32_t i = 0; i < THREADS; i++) {
        assert_false(td_deal_take(deal, i, &begins[0], &ends[0]));
    }
    td_deal_destroy(deal);
}

static void test_deal_keeps_the_next_step_from_who_is_late(void **state)
{
    uint32_t begin = 0;
    uint32_t end = 0;
    td_deal_t *deal = NULL;
    (void)state;

    assert_int_equal(td_deal_create(2, &deal), TD_OK);
    for (uint32_t step = 0; step < 3; step++) {
        td_deal_next(deal, 0, 8);
        assert_true(td_deal_take(deal, 0, &begin, &end)); /* thread 1 has not come: its own only */
        assert_int_equal(begin, 0);
        assert_int_equal(end, 2);
        td_deal_next(deal, 1, 8);
        while (td_deal_take(deal, 0, &begin, &end)) {
        }
        td_deal_next(deal, 0, 8);
        assert_false(td_deal_take(deal, 1, &begin, &end)); /* still in the step before */
        td_deal_next(deal, 1, 8);
        while (td_deal_take(deal, 1, &begin, &end)) {
        }
    }
    td_deal_destroy(deal);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_deal_gives_every_piece_to_one_thread),
        cmocka_unit_test(test_deal_takes_what_others_leave),
        cmocka_unit_test(test_deal_keeps_the_next_step_from_who_is_late),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

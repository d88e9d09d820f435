/* The breaker's states, by the time that is passed in. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include "common/base/td_clock.h"
#include "router/rtr_breaker.h"

static uint64_t ms(uint64_t value)
{
    return value * TD_NS_PER_MS;
}

static void test_it_opens_after_failures_in_a_row(void **state)
{
    rtr_breaker_t b = {0};
    (void)state;

    for (uint32_t round = 0; round < 3; round++) { /* a success in between: none is in a row */
        for (uint32_t i = 1; i < RTR_BREAKER_FAILURES; i++) {
            assert_false(rtr_breaker_failed(&b, ms(1)));
            assert_false(rtr_breaker_is_open(&b, ms(1)));
        }
        assert_false(rtr_breaker_succeeded(&b));
    }
    for (uint32_t i = 1; i < RTR_BREAKER_FAILURES; i++) {
        (void)rtr_breaker_failed(&b, ms(2));
    }
    assert_true(rtr_breaker_failed(&b, ms(2)));
    assert_true(rtr_breaker_is_open(&b, ms(2 + RTR_BREAKER_OPEN_MS) - 1));
    assert_false(rtr_breaker_is_open(&b, ms(2 + RTR_BREAKER_OPEN_MS)));
    assert_false(rtr_breaker_failed(&b, ms(3))); /* placed before: it makes nothing longer */
    assert_false(rtr_breaker_is_open(&b, ms(2 + RTR_BREAKER_OPEN_MS)));
    assert_true(rtr_breaker_succeeded(&b));
    assert_false(rtr_breaker_is_open(&b, ms(4)));
}

static void test_one_tries_and_each_failure_doubles_the_time(void **state)
{
    rtr_breaker_t b = {0};
    uint64_t now = ms(1000);
    uint64_t open = RTR_BREAKER_OPEN_MS;
    (void)state;

    for (uint32_t i = 0; i < RTR_BREAKER_FAILURES; i++) {
        (void)rtr_breaker_failed(&b, now);
    }
    for (uint32_t i = 0; i < 8; i++) {
        now += ms(open);
        assert_false(rtr_breaker_is_open(&b, now));
        rtr_breaker_placed(&b, now);
        assert_true(rtr_breaker_is_open(&b, now)); /* the others wait for it */
        assert_true(rtr_breaker_failed(&b, now + ms(1)));
        now += ms(1);
        open = 2 * open < RTR_BREAKER_OPEN_MS_MAX ? 2 * open : RTR_BREAKER_OPEN_MS_MAX;
        assert_int_equal(b.open_ms, open);
    }
    now += ms(open);
    rtr_breaker_placed(&b, now);
    assert_false(rtr_breaker_is_open(&b, now + ms(RTR_BREAKER_PROBE_MS))); /* no word: the next */
    assert_true(rtr_breaker_succeeded(&b));
    assert_int_equal(b.failures, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_it_opens_after_failures_in_a_row),
        cmocka_unit_test(test_one_tries_and_each_failure_doubles_the_time),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

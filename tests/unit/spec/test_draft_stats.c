/* What drafts were worth: kept by tenant, class and drafter, forgotten, bounded, and judged. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "common/base/td_base.h"
#include "common/spec/td_draft_stats.h"
#include "common/spec/td_spec_cost.h"

static const td_draft_key_t key = {.tenant = 7, .prompt_class = 1, .drafter = TD_DRAFTER_MEMO};

static td_draft_stats_t *make(uint32_t entries)
{
    td_draft_stats_t *s = NULL;
    assert_int_equal(td_draft_stats_create(entries, &s), TD_OK);
    return s;
}

/* Each step drafts k tokens, and each is accepted with this probability when those before were. */
static td_draft_report_t report_of(uint32_t steps, uint32_t k, double alpha)
{
    td_draft_report_t r = {.k_max = k, .steps = steps, .tokens = steps, .decode_ns = 1000000000};
    double accepted = steps;

    for (uint32_t i = 0; i < k; i++) {
        accepted *= alpha;
        r.drafted[i] = steps;
        r.accepted[i] = (uint32_t)(accepted + 0.5);
        r.tokens += r.accepted[i];
    }
    return r;
}

static td_draft_costs_t costs_of(double row, double pass)
{
    td_draft_costs_t c = {.pass = pass};
    for (uint32_t k = 0; k <= TD_DRAFT_TOKENS_MAX; k++) {
        c.step[k] = 1 + row * k;
    }
    return c;
}

static void assert_near(double got, double wanted, double within)
{
    if (!(fabs(got - wanted) <= within)) {
        fail_msg("%.9f is not %.9f", got, wanted);
    }
}

static void test_draft_worth_is_expected_tokens_over_cost(void **state)
{
    static const double alphas[] = {0, 0.2, 0.5, 0.8, 0.9, 1};
    (void)state;

    for (size_t a = 0; a < TD_ARRAY_LEN(alphas); a++) {
        for (int dear = 0; dear < 2; dear++) {
            td_draft_stats_t *s = make(4);
            const td_draft_report_t r = report_of(1000000, TD_DRAFT_TOKENS_MAX, alphas[a]);
            const td_draft_costs_t c = costs_of(0.15, dear ? 0.3 : 0);
            const td_draft_past_t *past = NULL;
            uint32_t best = 0;
            double most = 0;
            double worth = 0;
            td_draft_stats_add(s, &key, &r);
            past = td_draft_stats_find(s, &key);
            assert_non_null(past);
            for (uint32_t k = 0; k <= TD_DRAFT_TOKENS_MAX; k++) {
                const double expected =
                    td_spec_expected_tokens(alphas[a], k) / (c.step[k] + k * c.pass);
                assert_near(td_draft_worth(past, &c, k), expected, 1e-4);
                best = expected >= most ? k : best;
                most = TD_MAX(most, expected);
            }
            assert_int_equal(td_draft_best_k(past, &c, TD_DRAFT_TOKENS_MAX, &worth), best);
            assert_near(worth, most, 1e-4);
            td_draft_stats_destroy(s);
        }
    }
}

/* A few drafts that failed are no reason yet; many are. */
static void test_draft_positions_of_few_drafts_are_not_judged(void **state)
{
    td_draft_stats_t *s = make(4);
    const td_draft_costs_t c = costs_of(0.15, 0);
    td_draft_report_t r = {.k_max = TD_DRAFT_TOKENS_MAX, .steps = 40, .drafted = {5, 5}};
    double worth = 0;
    (void)state;

    td_draft_stats_add(s, &key, &r);
    assert_int_equal(td_draft_best_k(td_draft_stats_find(s, &key), &c, 9, &worth), 9);
    assert_near(worth, 1, 0);
    td_draft_stats_add(s, &key, &r);
    assert_int_equal(td_draft_best_k(td_draft_stats_find(s, &key), &c, 9, &worth), 0);
    assert_near(worth, 1, 0);
    r = (td_draft_report_t){.k_max = 9, .steps = 100, .drafted = {50, 10}, .accepted = {50}};
    td_draft_stats_add(s, &key, &r); /* the first position pays again, the second never did */
    assert_int_equal(td_draft_best_k(td_draft_stats_find(s, &key), &c, 9, &worth), 1);
    td_draft_stats_destroy(s);
}

/* However it was measured, a row is never free: what is never accepted ends the draft. */
static void test_draft_rows_are_never_free(void **state)
{
    td_draft_stats_t *s = make(4);
    const td_draft_costs_t c = costs_of(0, 0);
    const td_draft_report_t r = {
        .k_max = 16, .steps = 100, .drafted = {50, 40, 30}, .accepted = {20, 1}};
    double worth = 0;
    (void)state;

    td_draft_stats_add(s, &key, &r);
    assert_int_equal(td_draft_best_k(td_draft_stats_find(s, &key), &c, 16, &worth), 2);
    td_draft_stats_destroy(s);
}

static void test_draft_stats_forget(void **state)
{
    td_draft_stats_t *s = make(4);
    td_draft_report_t good = report_of(3000, 4, 1);
    td_draft_report_t bad = report_of(1, 4, 0);
    const td_draft_past_t *past = NULL;
    (void)state;

    td_draft_stats_add(s, &key, &good);
    past = td_draft_stats_find(s, &key);
    assert_near(past->steps[0], TD_DRAFT_STATS_STEPS, 2); /* no more, however many */
    for (uint32_t i = 0; i < TD_DRAFT_STATS_STEPS; i++) {
        td_draft_stats_add(s, &key, &bad);
    }
    assert_near(past->accepted[0] / past->steps[0], exp(-1), 0.01);
    bad = report_of(TD_DRAFT_STATS_STEPS, 2, 0); /* as one report: the same, of what was tried */
    td_draft_stats_add(s, &key, &bad);
    assert_near(past->accepted[1] / past->steps[1], exp(-2), 0.01);
    assert_near(past->accepted[3] / past->steps[3], exp(-1), 0.01);
    td_draft_stats_destroy(s);
}

static void test_draft_stats_of_nothing_say_nothing(void **state)
{
    td_draft_stats_t *s = make(4);
    const td_draft_report_t none = {.k_max = 4};
    const td_draft_report_t forbidden = {.steps = 9};
    (void)state;

    td_draft_stats_add(s, &key, &none);
    td_draft_stats_add(s, &key, &forbidden);
    assert_null(td_draft_stats_find(s, &key));
    assert_null(td_draft_stats_oldest(s));
    assert_int_equal(td_draft_stats_count(s), 0);
    td_draft_stats_destroy(s);
}

/* Nobody's entry is another's, and the one that was silent for longest goes. */
static void test_draft_stats_keep_the_newest(void **state)
{
    const td_draft_key_t keys[] = {{1, 0, TD_DRAFTER_MEMO},
                                   {1, 1, TD_DRAFTER_MEMO},
                                   {1, 0, TD_DRAFTER_EARLY_EXIT},
                                   {2, 0, TD_DRAFTER_MEMO},
                                   {3, 0, TD_DRAFTER_MEMO}};
    td_draft_stats_t *s = make(4);
    const td_draft_past_t *past = NULL;
    (void)state;

    for (uint32_t i = 0; i < TD_ARRAY_LEN(keys); i++) {
        const td_draft_report_t r = report_of(10 * (i + 1), 1, 1);
        if (i == 4) {
            const td_draft_report_t again = report_of(1, 1, 1);
            td_draft_stats_add(s, &keys[0], &again);
        }
        td_draft_stats_add(s, &keys[i], &r);
        assert_int_equal(td_draft_stats_count(s), TD_MIN(i + 1, 4));
    }
    assert_null(td_draft_stats_find(s, &keys[1]));
    assert_near(td_draft_stats_find(s, &keys[0])->steps[0], 11, 0.2);
    assert_near(td_draft_stats_find(s, &keys[2])->steps[0], 30, 1);
    assert_near(td_draft_stats_find(s, &keys[3])->steps[0], 40, 2);
    past = td_draft_stats_oldest(s);
    assert_true(past == td_draft_stats_find(s, &keys[2]));
    past = td_draft_stats_newer(s, past);
    assert_true(past == td_draft_stats_find(s, &keys[3]));
    past = td_draft_stats_newer(s, past);
    assert_true(past == td_draft_stats_find(s, &keys[0]));
    past = td_draft_stats_newer(s, past);
    assert_true(past == td_draft_stats_find(s, &keys[4]));
    assert_null(td_draft_stats_newer(s, past));
    td_draft_stats_destroy(s);
}

/* Many entries, of which the buckets' chains must stay whole. */
static void test_draft_stats_are_bounded(void **state)
{
    td_draft_stats_t *s = make(100);
    const td_draft_report_t r = report_of(3, 2, 0.5);
    uint32_t listed = 0;
    (void)state;

    for (uint64_t i = 0; i < 5000; i++) {
        const td_draft_key_t k = {.tenant = i / 3, .prompt_class = (uint32_t)i % 3, .drafter = 4};
        td_draft_stats_add(s, &k, &r);
    }
    for (uint64_t i = 0; i < 5000; i++) {
        const td_draft_key_t k = {.tenant = i / 3, .prompt_class = (uint32_t)i % 3, .drafter = 4};
        assert_true((td_draft_stats_find(s, &k) != NULL) == (i >= 4900));
    }
    for (const td_draft_past_t *p = td_draft_stats_oldest(s); p != NULL;
         p = td_draft_stats_newer(s, p)) {
        listed++;
    }
    assert_int_equal(listed, 100);
    td_draft_stats_destroy(s);
}

/* What one table knows, another can begin with; two together weigh no more than one. */
static void test_draft_stats_merge(void **state)
{
    td_draft_stats_t *a = make(4);
    td_draft_stats_t *b = make(4);
    const td_draft_report_t few = report_of(50, 4, 0.5);
    const td_draft_report_t many = report_of(5000, 4, 1);
    const td_draft_past_t *pa = NULL;
    const td_draft_past_t *pb = NULL;
    (void)state;

    td_draft_stats_add(a, &key, &few);
    pa = td_draft_stats_find(a, &key);
    td_draft_stats_merge(b, pa);
    pb = td_draft_stats_find(b, &key);
    assert_memory_equal(pa, pb, sizeof(*pa));
    td_draft_stats_add(a, &key, &many);
    td_draft_stats_merge(b, pa);
    assert_true(pb->steps[0] <= TD_DRAFT_STATS_STEPS && pb->steps[0] > TD_DRAFT_STATS_STEPS - 1);
    assert_true(pb->accepted[3] / pb->steps[3] < pa->accepted[3] / pa->steps[3]);
    assert_true(pb->accepted[3] / pb->steps[3] > 0.8);
    assert_near(pb->steps[9], 0, 0);
    td_draft_stats_destroy(a);
    td_draft_stats_destroy(b);
}

static void test_draft_stats_create_survives_every_failing_allocation(void **state)
{
    td_status_t status = TD_ERR_NO_MEMORY;
    uint64_t nth = 0;
    (void)state;

    while (status != TD_OK) {
        td_draft_stats_t *s = NULL;
        assert_true(++nth < 10);
        td_alloc_fail_at(nth);
        status = td_draft_stats_create(8, &s);
        td_alloc_fail_at(0);
        assert_true(status == TD_OK || (status == TD_ERR_NO_MEMORY && s == NULL));
        td_draft_stats_destroy(s);
    }
    assert_int_equal(nth, 4);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_draft_worth_is_expected_tokens_over_cost),
        cmocka_unit_test(test_draft_positions_of_few_drafts_are_not_judged),
        cmocka_unit_test(test_draft_rows_are_never_free),
        cmocka_unit_test(test_draft_stats_forget),
        cmocka_unit_test(test_draft_stats_of_nothing_say_nothing),
        cmocka_unit_test(test_draft_stats_keep_the_newest),
        cmocka_unit_test(test_draft_stats_are_bounded),
        cmocka_unit_test(test_draft_stats_merge),
        cmocka_unit_test(test_draft_stats_create_survives_every_failing_allocation),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

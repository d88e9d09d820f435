/* Which drafts of trees a step verifies: the best choice of all, forced ones, and bounds. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include "common/base/td_base.h"
#include "common/spec/td_spec_tree.h"

enum { ROWS_MAX = 40, PLACES = 4 };

static void fill_curve(double *curve, double first, double more)
{
    for (uint32_t r = 0; r <= ROWS_MAX; r++) {
        curve[r] = r == 0 ? 0 : first + more * (r - 1);
    }
}

static uint64_t random_of(uint64_t *state)
{
    *state = *state * 6364136223846793005ull + 1442695040888963407ull;
    return *state >> 33;
}

/* Tokens that a tree gives with k drafts and these leaves. */
static double tokens_of(const td_spec_tree_t *t, uint32_t k, uint32_t leaves)
{
    double reached = 1;
    double tokens = 0;

    for (uint32_t i = 0; i < k; i++) {
        tokens += (leaves & 1u << i) != 0 ? reached * t->leaves[i] : 0;
        reached *= t->chain[i];
        tokens += reached;
    }
    return tokens;
}

/* Where rows cost the same each, no choice of nodes is better than the likeliest ones. */
static void test_choose_is_the_best_of_all(void **state)
{
    uint64_t seed = 5;
    uint32_t with_leaves = 0;
    (void)state;

    for (uint32_t round = 0; round < 2000; round++) {
        double curve[ROWS_MAX + 1];
        td_spec_tree_t t = {.places = PLACES, .leaves_max = PLACES};
        double most = 0;
        double got = 0;
        fill_curve(curve, 1000, (double)(50 + random_of(&seed) % 400));
        for (uint32_t i = 0; i < PLACES; i++) {
            t.chain[i] = (double)(1 + random_of(&seed) % 99) / 100;
            t.leaves[i] = (1 - t.chain[i]) * (double)(random_of(&seed) % 100) / 100;
            t.leaves[i] = TD_MIN(t.leaves[i], t.chain[i]); /* the second choice */
        }
        td_spec_choose(curve, ROWS_MAX, 1, 1, 200, &t, 1);
        for (uint32_t k = 0; k <= PLACES; k++) {
            for (uint32_t leaves = 0; leaves < 1u << k; leaves++) {
                const uint32_t rows = 1 + k + (uint32_t)__builtin_popcount(leaves);
                const double worth = (1 + tokens_of(&t, k, leaves)) / (curve[rows] + 200);
                most = TD_MAX(most, worth);
            }
        }
        got = (1 + tokens_of(&t, t.k, t.leaf_places)) / (curve[1 + t.k + t.leaf_count] + 200);
        assert_int_equal(t.leaf_count, __builtin_popcount(t.leaf_places));
        assert_true(t.leaf_places >> t.k == 0);
        assert_true(got > most / TD_SPEC_GAIN_MIN * (1 - 1e-9));
        with_leaves += t.leaf_count > 0;
    }
    assert_true(with_leaves > 100);
}

static void test_choose_keeps_to_bounds(void **state)
{
    double curve[ROWS_MAX + 1];
    td_spec_tree_t t[3] = {0};
    (void)state;

    fill_curve(curve, 1000, 5000); /* nothing pays */
    for (uint32_t i = 0; i < 3; i++) {
        t[i] = (td_spec_tree_t){.chain = {0.5, 0.5, 0.5},
                                .leaves = {0.2, 0, 0.2},
                                .places = 3,
                                .chain_min = i,
                                .leaves_min = 4,
                                .leaves_max = 4};
    }
    td_spec_choose(curve, ROWS_MAX, 3, 3, 0, t, 3);
    for (uint32_t i = 0; i < 3; i++) {
        assert_int_equal(t[i].k, i);
        assert_int_equal(t[i].leaf_places, i > 0 ? 1 : 0); /* the second place has none */
    }
    fill_curve(curve, 1000, 0); /* everything pays */
    td_spec_choose(curve, 10, 3, 3, 0, t, 3);
    assert_int_equal(
        3 + t[0].k + t[1].k + t[2].k + t[0].leaf_count + t[1].leaf_count + t[2].leaf_count, 10);
    td_spec_choose(curve, ROWS_MAX, 3, 3, 0, t, 3);
    for (uint32_t i = 0; i < 3; i++) {
        assert_int_equal(t[i].k, 3);
        assert_int_equal(t[i].leaf_places, 5);
        t[i].leaves_max = 1;
    }
    td_spec_choose(curve, ROWS_MAX, 3, 3, 0, t, 3);
    assert_int_equal(t[0].leaf_count, 1);
    td_spec_choose(curve, 3, 3, 3, 0, t, 3); /* no room at all */
    assert_int_equal(t[2].k + t[2].leaf_count, 0);
    td_spec_choose(curve, 4, 3, 3, 0, t, 3); /* for one of the two that were asked for */
    assert_int_equal(t[1].k + t[2].k, 1);
}

/* Of two choices the surer one's drafts come first. */
static void test_choose_takes_the_likeliest(void **state)
{
    double curve[ROWS_MAX + 1];
    td_spec_tree_t t[2] = {{.chain = {0.9, 0.9}, .places = 2, .leaves_max = 2},
                           {.chain = {0.2, 0.9}, .leaves = {0.19}, .places = 2, .leaves_max = 2}};
    (void)state;

    fill_curve(curve, 2000, 300);
    td_spec_choose(curve, ROWS_MAX, 2, 2, 0, t, 2);
    assert_int_equal(t[0].k, 2);
    assert_int_equal(t[1].k, 0);
    curve[3] = 3000; /* a leap, behind which the next rows are cheap */
    curve[4] = curve[5] = curve[6] = 3001;
    td_spec_choose(curve, 6, 2, 2, 0, t, 2);
    assert_int_equal(t[0].k, 2);
    assert_int_equal(t[1].k + t[1].leaf_count, 2);
}

static void test_going_on_is_worth_its_time(void **state)
{
    double curve[ROWS_MAX + 1];
    (void)state;

    fill_curve(curve, 2000, 200);
    assert_true(td_spec_goes_on(curve, ROWS_MAX, 1, 1, 0, 0.11, 0));
    assert_false(td_spec_goes_on(curve, ROWS_MAX, 1, 1, 0, 0.09, 0));
    assert_false(td_spec_goes_on(curve, ROWS_MAX, 1, 1, 0, 0.11, 100));
    assert_true(td_spec_goes_on(curve, ROWS_MAX, 1, 1, 2000, 0.11, 100));
    assert_false(td_spec_goes_on(curve, ROWS_MAX, ROWS_MAX, 1, 0, 1, 0));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_choose_is_the_best_of_all),
        cmocka_unit_test(test_choose_keeps_to_bounds),
        cmocka_unit_test(test_choose_takes_the_likeliest),
        cmocka_unit_test(test_going_on_is_worth_its_time),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

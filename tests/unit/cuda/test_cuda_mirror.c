/* Which blocks the device has copies of. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include "common/base/td_base.h"
#include "common/model/cuda/td_cuda_mirror.h"

static uint64_t epoch = 5; /* of all blocks */

static td_cuda_mirror_t *make(uint32_t places)
{
    td_cuda_mirror_t *m = NULL;
    assert_int_equal(td_cuda_mirror_create(places, 100, &m), TD_OK);
    return m;
}

static uint32_t take(td_cuda_mirror_t *m, uint32_t block, bool want_valid)
{
    uint32_t place = 0;
    bool valid = false;
    assert_int_equal(td_cuda_mirror_take(m, block, epoch, &place, &valid), TD_OK);
    assert_int_equal(valid, want_valid);
    return place;
}

static void test_a_copy_stays_until_its_place_is_needed(void **state)
{
    td_cuda_mirror_t *m = make(3);
    uint32_t place = 0;

    (void)state;
    td_cuda_mirror_begin(m);
    place = take(m, 50, false);
    td_cuda_mirror_validate(m, 50, false);
    take(m, 51, false);
    td_cuda_mirror_validate(m, 51, false);
    td_cuda_mirror_begin(m);
    assert_int_equal(take(m, 50, true), place); /* 51 is older now */
    take(m, 52, false);
    take(m, 53, false); /* in 51's place */
    td_cuda_mirror_begin(m);
    take(m, 50, true);
    take(m, 51, false);
    td_cuda_mirror_destroy(m);
}

static void test_a_pass_keeps_what_it_took(void **state)
{
    td_cuda_mirror_t *m = make(2);
    uint32_t place = 7;
    bool valid = true;

    (void)state;
    td_cuda_mirror_begin(m);
    take(m, 1, false);
    take(m, 2, false);
    assert_int_equal(td_cuda_mirror_take(m, 3, epoch, &place, &valid), TD_ERR_NO_MEMORY);
    assert_int_equal(place, 7);
    take(m, 1, false); /* it has that one */
    td_cuda_mirror_begin(m);
    take(m, 3, false);
    td_cuda_mirror_destroy(m);
}

static void test_what_the_host_changed_is_not_valid(void **state)
{
    td_cuda_mirror_t *m = make(4);

    (void)state;
    td_cuda_mirror_begin(m);
    for (uint32_t b = 0; b < 3; b++) {
        take(m, b, false);
        td_cuda_mirror_validate(m, b, false);
    }
    td_cuda_mirror_forget(m, 1);
    td_cuda_mirror_forget(m, 99); /* which is not there */
    take(m, 0, true);
    take(m, 1, false);
    td_cuda_mirror_forget_all(m);
    take(m, 0, false);
    take(m, 2, false);
    td_cuda_mirror_destroy(m);
}

/* A block that was given out anew holds what somebody else has put there. */
static void test_a_new_epoch_is_another_block(void **state)
{
    td_cuda_mirror_t *m = make(4);

    (void)state;
    td_cuda_mirror_begin(m);
    take(m, 1, false);
    td_cuda_mirror_validate(m, 1, false);
    take(m, 1, true);
    epoch++;
    take(m, 1, false);
    take(m, 1, false); /* still nobody has made a copy */
    td_cuda_mirror_validate(m, 1, false);
    take(m, 1, true);
    td_cuda_mirror_destroy(m);
}

/* What transfers send has every byte of the host's block, and is there. */
static void test_only_whole_copies_are_sent(void **state)
{
    td_cuda_mirror_t *m = make(32);
    uint32_t place = 0;
    uint32_t sent = 0;

    (void)state;
    td_cuda_mirror_begin(m);
    place = take(m, 1, false); /* a block that the pass begins: only some tokens are written */
    td_cuda_mirror_validate(m, 1, false);
    assert_false(td_cuda_mirror_pin(m, 1, epoch, &sent));
    td_cuda_mirror_filled(m, 1);
    assert_true(td_cuda_mirror_pin(m, 1, epoch, &sent));
    assert_int_equal(sent, place);
    td_cuda_mirror_unpin(m, sent);
    assert_false(td_cuda_mirror_pin(m, 1, epoch + 1, &sent));
    assert_false(td_cuda_mirror_pin(m, 7, epoch, &sent));
    take(m, 2, false); /* one that is uploaded: who knows when */
    td_cuda_mirror_validate(m, 2, true);
    assert_false(td_cuda_mirror_pin(m, 2, epoch, &sent));
    take(m, 2, true); /* of another table of the pass */
    assert_false(td_cuda_mirror_pin(m, 2, epoch, &sent));
    td_cuda_mirror_end(m);
    assert_true(td_cuda_mirror_pin(m, 2, epoch, &sent));
    td_cuda_mirror_unpin(m, sent);
    td_cuda_mirror_begin(m);
    take(m, 2, true);
    assert_true(td_cuda_mirror_pin(m, 2, epoch, &sent));
    td_cuda_mirror_unpin(m, sent);
    td_cuda_mirror_forget(m, 2);
    assert_false(td_cuda_mirror_pin(m, 2, epoch, &sent));
    td_cuda_mirror_destroy(m);
}

/* Passes and transfers do not take each other's places, and transfers not too many. */
static void test_pinned_places_stay(void **state)
{
    enum { PLACES = 8 };
    td_cuda_mirror_t *m = make(PLACES);
    uint32_t pinned = 0;
    uint32_t other = 0;

    (void)state;
    td_cuda_mirror_begin(m);
    for (uint32_t b = 0; b < PLACES; b++) {
        take(m, b, false);
        td_cuda_mirror_validate(m, b, true);
    }
    assert_false(td_cuda_mirror_pin_for(m, 50, epoch, 0, &other)); /* all are the pass's */
    td_cuda_mirror_end(m);
    assert_true(td_cuda_mirror_pin(m, 0, epoch, &pinned));
    assert_false(td_cuda_mirror_pin(m, 1, epoch, &other)); /* an eighth, not more */
    td_cuda_mirror_begin(m);
    for (uint32_t b = 10; b < 10 + PLACES - 1; b++) {
        assert_int_not_equal(take(m, b, false), pinned);
    }
    td_cuda_mirror_end(m);
    td_cuda_mirror_unpin(m, pinned);
    td_cuda_mirror_begin(m);
    take(m, 0, true);
    td_cuda_mirror_end(m);
    td_cuda_mirror_destroy(m);
}

static bool land(td_cuda_mirror_t *m, uint32_t offset, uint32_t bytes, bool well)
{
    uint32_t place = 0;

    if (!td_cuda_mirror_pin_for(m, 3, epoch, offset, &place)) {
        return false;
    }
    td_cuda_mirror_landed(m, 3, epoch, place, offset, well ? bytes : 0, 96);
    return true;
}

/* A copy that comes in pieces is one when all of them have come, each once and in order. */
static void test_copies_that_come_in_pieces(void **state)
{
    td_cuda_mirror_t *m = make(8);
    uint32_t place = 0;

    (void)state;
    assert_false(land(m, 32, 32, true)); /* the first bytes came another way */
    assert_true(land(m, 0, 32, true));
    assert_true(land(m, 32, 32, true));
    assert_false(td_cuda_mirror_pin(m, 3, epoch, &place));
    assert_false(land(m, 32, 32, true)); /* once more */
    assert_true(land(m, 64, 32, true));
    assert_true(td_cuda_mirror_pin(m, 3, epoch, &place));
    td_cuda_mirror_unpin(m, place);
    assert_false(land(m, 0, 32, true)); /* it is whole */
    td_cuda_mirror_begin(m);
    take(m, 3, true);
    td_cuda_mirror_end(m);
    /* Of the next allocation, where a piece does not come. */
    epoch++;
    assert_true(land(m, 0, 32, true));
    assert_true(land(m, 32, 32, false));
    assert_false(land(m, 64, 32, true));
    td_cuda_mirror_begin(m);
    take(m, 3, false);
    td_cuda_mirror_end(m);
    /* A pass makes it meanwhile. */
    epoch++;
    assert_true(land(m, 0, 32, true));
    td_cuda_mirror_begin(m);
    take(m, 3, false);
    td_cuda_mirror_end(m);
    assert_false(land(m, 32, 64, true));
    td_cuda_mirror_destroy(m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_copy_stays_until_its_place_is_needed),
        cmocka_unit_test(test_a_pass_keeps_what_it_took),
        cmocka_unit_test(test_what_the_host_changed_is_not_valid),
        cmocka_unit_test(test_a_new_epoch_is_another_block),
        cmocka_unit_test(test_only_whole_copies_are_sent),
        cmocka_unit_test(test_pinned_places_stay),
        cmocka_unit_test(test_copies_that_come_in_pieces),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

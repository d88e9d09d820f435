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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_copy_stays_until_its_place_is_needed),
        cmocka_unit_test(test_a_pass_keeps_what_it_took),
        cmocka_unit_test(test_what_the_host_changed_is_not_valid),
        cmocka_unit_test(test_a_new_epoch_is_another_block),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

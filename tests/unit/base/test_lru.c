#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include "common/base/td_base.h"
#include "common/base/td_lru.h"

#define ENTRIES 8u

typedef struct entry {
    uint32_t other;
    td_lru_link_t use;
} entry_t;

static void assert_order(const td_lru_t *lru, const uint32_t *order, uint32_t count)
{
    uint32_t at = lru->oldest;

    for (uint32_t i = 0; i < count; i++) {
        assert_int_equal(at, order[i]);
        assert_int_equal(td_lru_link(lru, at)->older, i > 0 ? order[i - 1] : TD_LRU_NONE);
        at = td_lru_newer(lru, at);
    }
    assert_int_equal(at, TD_LRU_NONE);
    assert_int_equal(lru->newest, count > 0 ? order[count - 1] : TD_LRU_NONE);
}

static void test_lru_orders_by_last_use(void **state)
{
    entry_t entries[ENTRIES];
    td_lru_t lru;
    (void)state;

    td_lru_init(&lru, &entries[0].use, sizeof(*entries));
    assert_order(&lru, NULL, 0);
    td_lru_add(&lru, 5);
    assert_order(&lru, (uint32_t[]){5}, 1);
    td_lru_use(&lru, 5);
    assert_order(&lru, (uint32_t[]){5}, 1);
    td_lru_add(&lru, 0);
    td_lru_add(&lru, 7);
    assert_order(&lru, (uint32_t[]){5, 0, 7}, 3);
    td_lru_use(&lru, 0); /* from the middle */
    assert_order(&lru, (uint32_t[]){5, 7, 0}, 3);
    td_lru_use(&lru, 5); /* the oldest */
    assert_order(&lru, (uint32_t[]){7, 0, 5}, 3);
    td_lru_remove(&lru, 5); /* the newest */
    td_lru_remove(&lru, 7);
    assert_order(&lru, (uint32_t[]){0}, 1);
    td_lru_remove(&lru, 0);
    assert_order(&lru, NULL, 0);
}

/* Against the plain meaning of it: a number of last use each. */
static void test_lru_random_use(void **state)
{
    entry_t entries[ENTRIES];
    uint64_t used[ENTRIES] = {0}; /* 0: not in it */
    uint64_t random = 1;
    td_lru_t lru;
    (void)state;

    td_lru_init(&lru, &entries[0].use, sizeof(*entries));
    for (uint64_t now = 1; now < 20000; now++) {
        uint32_t order[ENTRIES];
        uint32_t count = 0;
        uint32_t at = 0;
        random = random * 6364136223846793005u + 1442695040888963407u;
        at = (uint32_t)(random >> 33) % ENTRIES;
        if (used[at] == 0) {
            td_lru_add(&lru, at);
        } else if ((random >> 60) < 8) {
            td_lru_use(&lru, at);
        } else {
            td_lru_remove(&lru, at);
        }
        used[at] = used[at] == 0 || (random >> 60) < 8 ? now : 0;
        for (uint32_t i = 0; i < ENTRIES; i++) {
            uint32_t place = count;
            if (used[i] == 0) {
                continue;
            }
            for (; place > 0 && used[order[place - 1]] > used[i]; place--) {
                order[place] = order[place - 1];
            }
            order[place] = i;
            count++;
        }
        assert_order(&lru, order, count);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_lru_orders_by_last_use),
        cmocka_unit_test(test_lru_random_use),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

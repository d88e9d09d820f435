/* The master's index: no messages, no clock of its own. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "kvstore/kvs_index.h"
#include "kvstore/kvs_removed.h"

#define KEYS 64u
#define MS TD_NS_PER_MS

typedef struct world {
    kvs_index_t *x;
    td_kv_events_t *events;
    kvs_list_t order;
    uint64_t now;
} world_t;

static td_block_key_t key_of(uint32_t n)
{
    td_block_key_t key = {{0}};
    memcpy(key.bytes, &n, sizeof(n));
    return key;
}

static int setup(void **state)
{
    static world_t w;
    kvs_policy_t policy = kvs_policy_default();

    policy.replicas = 2;
    policy.hot_hits = 4;
    w = (world_t){.order = KVS_LIST_EMPTY, .now = 1000 * TD_NS_PER_S};
    assert_int_equal(kvs_index_create(KEYS, &policy, &w.x), TD_OK);
    assert_int_equal(td_kv_events_create(64, &w.events), TD_OK);
    w.x->events = w.events;
    *state = &w;
    return 0;
}

/* I7: what events say can be read is what a walk finds. */
static void check_events(const world_t *w)
{
    td_block_key_t keys[KEYS];
    uint32_t cursor = 0;
    uint32_t count = 0;
    uint64_t digest = 0;

    while (cursor != UINT32_MAX) {
        count += kvs_index_walk(w->x, &cursor, 5, keys + count);
    }
    for (uint32_t i = 0; i < count; i++) {
        digest ^= td_block_key_word(&keys[i]);
    }
    assert_int_equal(count, w->x->readable);
    assert_int_equal(count, w->events->blocks);
    assert_true(digest == w->events->digest);
}

/* Every replica is on one list, counts add up, keys and entries agree. */
static void check(world_t *w)
{
    uint32_t entries = 0;
    uint32_t replicas = 0;
    uint32_t readable = 0;
    uint32_t listed = 0;

    for (uint32_t i = 0; i < w->x->keys_max; i++) {
        const kvs_entry_t *e = &w->x->entries[i];
        uint32_t ready = 0;
        uint32_t storing = 0;
        if (e->first == KVS_NONE) {
            continue;
        }
        assert_ptr_equal(kvs_index_find(w->x, &e->key), e);
        for (uint32_t at = e->first; at != KVS_NONE; at = w->x->replicas[at].next) {
            assert_int_equal(w->x->replicas[at].entry, i);
            ready += w->x->replicas[at].state == KVS_READY;
            storing += w->x->replicas[at].state == KVS_STORING;
        }
        assert_int_equal(ready, e->ready);
        assert_int_equal(storing, e->storing);
        replicas += ready + storing;
        readable += ready > 0;
        entries++;
    }
    assert_int_equal(entries, w->x->keys_max - w->x->free_entry_count);
    assert_int_equal(replicas, w->x->replicas_max - w->x->free_replica_count);
    assert_int_equal(readable, w->x->readable);
    check_events(w);
    for (uint32_t s = 0; s < KVS_SEGMENTS_MAX; s++) {
        uint32_t used = 0;
        for (uint32_t pin = 0; w->x->shares[s].mounted && pin < KVS_PIN_KINDS; pin++) {
            for (uint32_t at = w->x->shares[s].lists[pin].oldest; at != KVS_NONE;
                 at = w->x->replicas[at].next_in_list) {
                assert_int_equal(w->x->replicas[at].segment, s);
                assert_int_equal(w->x->entries[w->x->replicas[at].entry].pin, pin);
                used++;
            }
        }
        for (uint32_t at = w->order.oldest; at != KVS_NONE; at = w->x->replicas[at].next_in_list) {
            used += w->x->replicas[at].segment == s;
        }
        assert_int_equal(used, w->x->shares[s].used);
        listed += used;
    }
    assert_int_equal(listed, replicas);
}

static int teardown(void **state)
{
    world_t *w = *state;
    check(w);
    kvs_index_destroy(w->x);
    td_kv_events_destroy(w->events);
    return 0;
}

static kvs_entry_t *put(world_t *w, uint32_t n, uint32_t segment)
{
    td_block_key_t key = key_of(n);
    kvs_entry_t *e = NULL;

    assert_int_equal(kvs_index_begin(w->x, &key, segment, 0, &w->order), TD_OK);
    e = kvs_index_find(w->x, &key);
    kvs_index_stored(w->x, kvs_index_on(w->x, e, segment), &w->order, n, 1, 2);
    return e;
}

static uint32_t evict(world_t *w, uint32_t segment, uint32_t want, uint32_t *names)
{
    td_block_key_t keys[KEYS];
    uint32_t count = kvs_index_evict(w->x, segment, want, w->now, keys);

    for (uint32_t i = 0; i < count; i++) {
        memcpy(&names[i], keys[i].bytes, sizeof(names[i]));
    }
    return count;
}

static bool holds(world_t *w, uint32_t n)
{
    td_block_key_t key = key_of(n);
    return kvs_index_find(w->x, &key) != NULL;
}

static void test_index_evicts_what_was_unused_longest(void **state)
{
    world_t *w = *state;
    uint32_t names[KEYS];
    uint32_t s = kvs_index_mount(w->x, 16);

    for (uint32_t n = 0; n < 4; n++) {
        (void)put(w, n, s);
    }
    kvs_index_touch(w->x, kvs_index_find(w->x, &(td_block_key_t){{0}}), w->now);
    w->now += 60000 * MS; /* the lease is over */
    assert_int_equal(evict(w, s, 3, names), 3);
    assert_int_equal(names[0], 1);
    assert_int_equal(names[2], 3);
    assert_true(holds(w, 0));
    check(w);
}

static void test_index_lease_blocks_eviction_until_it_is_over(void **state)
{
    world_t *w = *state;
    uint32_t names[KEYS];
    uint32_t s = kvs_index_mount(w->x, 16);

    kvs_index_touch(w->x, put(w, 0, s), w->now);
    w->now += w->x->policy.lease_ms * MS - 1;
    assert_int_equal(evict(w, s, 1, names), 0);
    w->now += 1;
    assert_int_equal(evict(w, s, 1, names), 1);
}

static void test_index_soft_pins_go_last_and_hard_ones_never(void **state)
{
    world_t *w = *state;
    uint32_t names[KEYS];
    uint32_t s = kvs_index_mount(w->x, 16);

    kvs_index_pin(w->x, put(w, 0, s), KVS_PIN_HARD, w->now);
    kvs_index_pin(w->x, put(w, 1, s), KVS_PIN_SOFT, w->now);
    (void)put(w, 2, s);
    check(w);
    assert_int_equal(evict(w, s, 1, names), 1);
    assert_int_equal(names[0], 2);
    assert_int_equal(evict(w, s, 3, names), 1);
    assert_int_equal(names[0], 1);
    assert_true(holds(w, 0));
    kvs_index_pin(w->x, kvs_index_find(w->x, &(td_block_key_t){{0}}), KVS_PIN_NONE, w->now);
    assert_int_equal(evict(w, s, 3, names), 1);
}

/* A soft pin that is over is worth no more than none. */
static void test_index_soft_pin_ends_by_itself(void **state)
{
    world_t *w = *state;
    uint32_t names[KEYS];
    uint32_t s = kvs_index_mount(w->x, 16);

    kvs_index_pin(w->x, put(w, 0, s), KVS_PIN_SOFT, w->now);
    (void)put(w, 1, s);
    w->now += w->x->policy.soft_pin_ms * MS + 1;
    assert_int_equal(evict(w, s, 1, names), 1);
    assert_int_equal(names[0], 0);
}

static void test_index_replicas_lie_on_different_segments(void **state)
{
    world_t *w = *state;
    td_block_key_t key = key_of(7);
    uint32_t a = kvs_index_mount(w->x, 4);
    uint32_t b = kvs_index_mount(w->x, 8);
    uint32_t c = kvs_index_mount(w->x, 6);
    uint32_t chosen[KVS_REPLICAS_MAX];

    assert_int_equal(kvs_index_choose(w->x, 2, KVS_NONE, chosen), 2);
    assert_int_equal(chosen[0], b);
    assert_int_equal(chosen[1], c);
    assert_int_equal(kvs_index_choose(w->x, 3, b, chosen), 2);
    assert_int_equal(chosen[0], c);
    assert_int_equal(chosen[1], a);
    (void)put(w, 7, b);
    assert_int_equal(kvs_index_begin(w->x, &key, b, 0, &w->order), TD_ERR_EXISTS);
    (void)put(w, 7, a);
    kvs_index_unmount(w->x, b);
    assert_true(holds(w, 7)); /* the other one is still there */
    kvs_index_unmount(w->x, a);
    assert_false(holds(w, 7));
}

static void test_index_what_is_on_its_way_holds_its_room(void **state)
{
    world_t *w = *state;
    uint32_t s = kvs_index_mount(w->x, 1);
    td_block_key_t keys[2] = {key_of(0), key_of(1)};
    const kvs_entry_t *e = NULL;

    assert_int_equal(kvs_index_begin(w->x, &keys[0], s, 5, &w->order), TD_OK);
    assert_int_equal(kvs_index_begin(w->x, &keys[1], s, 5, &w->order), TD_ERR_BUSY);
    e = kvs_index_find(w->x, &keys[0]);
    assert_null(kvs_index_serve(w->x, e));
    check(w);
    assert_false(kvs_index_drop(w->x, kvs_index_on(w->x, e, s), &w->order));
    assert_int_equal(kvs_index_begin(w->x, &keys[1], s, 5, &w->order), TD_OK);
    assert_false(kvs_index_drop(w->x, &w->x->replicas[w->order.oldest], &w->order));
}

static void test_index_what_is_being_copied_stays(void **state)
{
    world_t *w = *state;
    uint32_t names[KEYS];
    td_block_key_t key = key_of(0);
    uint32_t a = kvs_index_mount(w->x, 4);
    uint32_t b = kvs_index_mount(w->x, 4);
    kvs_entry_t *e = put(w, 0, a);

    assert_int_equal(kvs_index_begin(w->x, &key, b, 0, &w->order), TD_OK);
    assert_int_equal(evict(w, a, 1, names), 0);
    assert_true(kvs_index_drop(w->x, kvs_index_on(w->x, e, b), &w->order));
    assert_int_equal(evict(w, a, 1, names), 1);
}

static void test_index_readers_are_spread_and_hot_keys_known(void **state)
{
    world_t *w = *state;
    uint32_t a = kvs_index_mount(w->x, 8);
    uint32_t b = kvs_index_mount(w->x, 8);
    kvs_entry_t *e = put(w, 0, a);

    for (int i = 0; i < 3; i++) {
        kvs_index_touch(w->x, e, w->now);
    }
    assert_false(kvs_index_is_hot(w->x, e));
    kvs_index_touch(w->x, e, w->now);
    assert_true(kvs_index_is_hot(w->x, e));
    (void)put(w, 0, b);
    assert_false(kvs_index_is_hot(w->x, e)); /* twice as many lookups for a third */
    for (int i = 0; i < 10; i++) {
        (void)kvs_index_serve(w->x, e);
    }
    assert_int_equal(w->x->shares[a].served, 5);
    assert_int_equal(w->x->shares[b].served, 5);
}

static void test_index_cooled_keys_lose_what_they_have_beyond_the_policy(void **state)
{
    world_t *w = *state;
    td_block_key_t key = key_of(9);
    uint32_t segments[3];
    kvs_entry_t *e = NULL;

    for (int i = 0; i < 3; i++) {
        segments[i] = kvs_index_mount(w->x, 8);
        e = put(w, 0, segments[i]);
    }
    (void)put(w, 1, segments[1]);
    for (int i = 0; i < 8; i++) {
        kvs_index_touch(w->x, e, w->now);
    }
    w->now += w->x->policy.lease_ms * MS + 1;
    assert_int_equal(kvs_index_cool(w->x, KEYS, w->now, &key), KVS_NONE); /* 4 hits left */
    w->now += 4ull * w->x->policy.hot_half_ms * MS;
    assert_int_equal(kvs_index_cool(w->x, KEYS, w->now, &key), segments[1]); /* the fullest */
    assert_int_equal(key.bytes[0], 0);
    assert_int_equal(kvs_index_cool(w->x, KEYS, w->now, &key), KVS_NONE);
    assert_int_equal(e->ready, 2);
}

/* What a segment tells of is readable, as if it had been ordered; up to the limits. */
static void test_index_adopts_what_segments_tell(void **state)
{
    world_t *w = *state;
    const td_block_key_t key = key_of(1);
    const td_block_key_t coming = key_of(2);
    const td_block_key_t late = key_of(KEYS + 1);
    kvs_entry_t *e = NULL;
    uint32_t segments[KVS_REPLICAS_MAX + 1];
    uint32_t left = KVS_NONE;

    for (uint32_t i = 0; i <= KVS_REPLICAS_MAX; i++) {
        segments[i] = kvs_index_mount(w->x, 1);
        assert_int_equal(kvs_index_adopt(w->x, &key, segments[i], 4, 5 + i, 6, &e),
                         i < KVS_REPLICAS_MAX ? TD_OK : TD_ERR_BUSY);
    }
    assert_int_equal(e->ready, KVS_REPLICAS_MAX);
    assert_int_equal(kvs_index_on(w->x, e, segments[0])->epoch, 5);
    assert_int_equal(kvs_index_adopt(w->x, &key, segments[0], 4, 50, 6, &e), TD_OK); /* again */
    assert_int_equal(e->ready, KVS_REPLICAS_MAX);
    assert_int_equal(kvs_index_on(w->x, e, segments[0])->epoch, 50);
    check(w);
    kvs_index_forget(w->x, segments[0]);
    assert_int_equal(e->ready, KVS_REPLICAS_MAX - 1);
    assert_int_equal(kvs_index_begin(w->x, &coming, segments[0], 0, &w->order), TD_OK);
    assert_int_equal(kvs_index_adopt(w->x, &coming, segments[0], 1, 1, 1, &e), TD_ERR_EXISTS);
    for (uint32_t n = 3; n <= KEYS; n++) { /* more than the segment said it has */
        const td_block_key_t next = key_of(n);
        assert_int_equal(kvs_index_adopt(w->x, &next, segments[1], n, 1, 1, &e), TD_OK);
    }
    assert_int_equal(kvs_index_adopt(w->x, &late, segments[1], 1, 1, 1, &e), TD_ERR_BUSY);
    check(w);
    assert_int_equal(kvs_index_choose(w->x, 1, KVS_NONE, &left), 1);
    assert_int_equal(left, segments[KVS_REPLICAS_MAX]); /* the others are full, or fuller */
}

static void test_index_refuses_a_policy_out_of_range(void **state)
{
    kvs_policy_t bad[4];
    kvs_index_t *x = NULL;
    (void)state;

    for (size_t i = 0; i < TD_ARRAY_LEN(bad); i++) {
        bad[i] = kvs_policy_default();
    }
    bad[0].replicas = 0;
    bad[1].hot_replicas = KVS_REPLICAS_MAX + 1;
    bad[2].evict_from_percent = 101;
    bad[3].hot_half_ms = 0;
    for (size_t i = 0; i < TD_ARRAY_LEN(bad); i++) {
        assert_int_equal(kvs_index_create(4, &bad[i], &x), TD_ERR_INVALID);
    }
}

/* Anything in any order keeps counts and lists right. */
static void test_index_random_changes_keep_everything_consistent(void **state)
{
    world_t *w = *state;
    uint32_t seed = 1;
    uint32_t names[KEYS];
    uint32_t segments[3];

    for (int i = 0; i < 3; i++) {
        segments[i] = kvs_index_mount(w->x, 24);
    }
    for (int step = 0; step < 20000; step++) {
        uint32_t r = (seed = seed * 1664525u + 1013904223u) >> 8;
        td_block_key_t key = key_of(r % 80);
        kvs_entry_t *e = kvs_index_find(w->x, &key);
        uint32_t segment = segments[r / 128 % 3];
        kvs_replica_t *on = e != NULL ? kvs_index_on(w->x, e, segment) : NULL;
        w->now += r % 2000 * MS;
        switch (r / 1024 % 8) {
        case 0:
        case 1:
            if (kvs_index_begin(w->x, &key, segment, 0, &w->order) != TD_OK) {
                assert_true(on != NULL || w->x->shares[segment].used == 24 ||
                            w->x->free_replica_count == 0 || w->x->free_entry_count == 0);
            }
            break;
        case 2:
        case 3:
            if (on != NULL && on->state == KVS_STORING) {
                kvs_index_stored(w->x, on, &w->order, r, r, r);
            }
            break;
        case 4:
            if (on != NULL) {
                (void)kvs_index_drop(w->x, on, on->state == KVS_STORING ? &w->order : NULL);
            }
            break;
        case 5:
            if (e != NULL) {
                kvs_index_touch(w->x, e, w->now);
            }
            break;
        case 6:
            if (e != NULL) {
                kvs_index_pin(w->x, e, r / 4096 % KVS_PIN_KINDS, w->now);
            }
            break;
        default:
            (void)evict(w, segment, r % 4, names);
            (void)kvs_index_cool(w->x, 8, w->now, &key);
            break;
        }
        if (step % 64 == 0) {
            check(w);
        }
    }
}

static void test_removed_keys_are_remembered_for_a_while(void **state)
{
    kvs_removed_t *removed = NULL;
    td_block_key_t keys[8];
    (void)state;

    assert_int_equal(kvs_removed_create(4, &removed), TD_OK);
    for (uint32_t i = 0; i < TD_ARRAY_LEN(keys); i++) {
        memset(keys[i].bytes, (int)(17 * i + 1), sizeof(keys[i].bytes));
    }
    assert_int_equal(kvs_removed_at(removed, &keys[0]), 0);
    for (uint32_t i = 0; i < 4; i++) {
        kvs_removed_add(removed, &keys[i], 10 + i);
    }
    kvs_removed_add(removed, &keys[0], 20); /* again: in the place of the oldest, its own */
    assert_int_equal(kvs_removed_at(removed, &keys[0]), 20);
    assert_int_equal(kvs_removed_at(removed, &keys[1]), 11);
    kvs_removed_add(removed, &keys[3], 21); /* in the place of keys[1], and its own falls empty */
    assert_int_equal(kvs_removed_at(removed, &keys[1]), 0);
    assert_int_equal(kvs_removed_at(removed, &keys[3]), 21);
    for (uint32_t i = 4; i < 8; i++) {
        kvs_removed_add(removed, &keys[i], 30 + i);
    }
    for (uint32_t i = 0; i < 8; i++) {
        assert_int_equal(kvs_removed_at(removed, &keys[i]), i < 4 ? 0 : 30 + i);
    }
    kvs_removed_destroy(removed);
    kvs_removed_destroy(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_index_evicts_what_was_unused_longest, setup, teardown),
        cmocka_unit_test_setup_teardown(test_index_lease_blocks_eviction_until_it_is_over, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_index_soft_pins_go_last_and_hard_ones_never, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_index_soft_pin_ends_by_itself, setup, teardown),
        cmocka_unit_test_setup_teardown(test_index_replicas_lie_on_different_segments, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_index_what_is_on_its_way_holds_its_room, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_index_what_is_being_copied_stays, setup, teardown),
        cmocka_unit_test_setup_teardown(test_index_readers_are_spread_and_hot_keys_known, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(
            test_index_cooled_keys_lose_what_they_have_beyond_the_policy, setup, teardown),
        cmocka_unit_test_setup_teardown(test_index_adopts_what_segments_tell, setup, teardown),
        cmocka_unit_test(test_index_refuses_a_policy_out_of_range),
        cmocka_unit_test_setup_teardown(test_index_random_changes_keep_everything_consistent, setup,
                                        teardown),
        cmocka_unit_test(test_removed_keys_are_remembered_for_a_while),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/transfer/td_transfer.h"

#define BLOCKS 64u
#define BLOCK_BYTES (96u * 1024u)
#define BIG_BYTES (2u * TD_TRANSFER_GATHER_BYTES + 777u)

/* Two ends in one process: each has its own UCX context, worker, thread and memory. */
typedef struct ends {
    td_transfer_t *owner;
    td_transfer_t *reader;
    td_pool_t *owner_pool;
} ends_t;

static pthread_mutex_t done_mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t done_cond = PTHREAD_COND_INITIALIZER;
static int done_count;

static void on_complete(td_fetch_t *fetch)
{
    (void)fetch;
    pthread_mutex_lock(&done_mutex);
    done_count++;
    pthread_cond_signal(&done_cond);
    pthread_mutex_unlock(&done_mutex);
}

static void wait_done(int count)
{
    pthread_mutex_lock(&done_mutex);
    while (done_count < count) {
        pthread_cond_wait(&done_cond, &done_mutex);
    }
    pthread_mutex_unlock(&done_mutex);
}

static void add_peer(td_transfer_t *to, const td_transfer_t *of, uint64_t incarnation,
                     uint32_t block_bytes)
{
    td_transfer_peer_t peer = {
        .incarnation = incarnation, .block_count = BLOCKS, .block_bytes = block_bytes};
    td_transfer_address(of, &peer.address, &peer.address_len, &peer.rkey, &peer.rkey_len,
                        &peer.base);
    assert_int_equal(td_transfer_peer_add(to, &peer), TD_OK);
}

static int setup_with(void **state, const char *tls, uint32_t block_bytes)
{
    ends_t *ends = test_calloc(1, sizeof(*ends));
    td_transfer_config_t config = {.block_count = BLOCKS, .block_bytes = block_bytes};

    setenv("UCX_TLS", tls, 1);
    config.incarnation = 11;
    assert_int_equal(td_transfer_create(&config, &ends->owner), TD_OK);
    config.incarnation = 22;
    assert_int_equal(td_transfer_create(&config, &ends->reader), TD_OK);
    assert_int_equal(
        td_pool_create(td_transfer_memory(ends->owner), BLOCKS, block_bytes, &ends->owner_pool),
        TD_OK);
    td_transfer_set_pool(ends->owner, ends->owner_pool);
    for (uint32_t i = 0; i < BLOCKS; i++) {
        memset(td_pool_bytes(ends->owner_pool, i), (int)i + 1, block_bytes);
    }
    add_peer(ends->reader, ends->owner, 11, block_bytes);
    add_peer(ends->owner, ends->reader, 22, block_bytes);
    done_count = 0;
    *state = ends;
    return 0;
}

static int setup_shm(void **state)
{
    return setup_with(state, "tcp,posix,sysv", BLOCK_BYTES);
}

static int setup_tcp(void **state)
{
    return setup_with(state, "tcp", BLOCK_BYTES);
}

static int setup_tcp_big(void **state)
{
    return setup_with(state, "tcp", BIG_BYTES);
}

static int teardown(void **state)
{
    ends_t *ends = *state;
    td_transfer_destroy(ends->reader);
    td_transfer_destroy(ends->owner);
    td_pool_destroy(ends->owner_pool);
    test_free(ends);
    return 0;
}

static td_fetch_t fetch_of(td_fetch_piece_t *pieces, uint32_t count)
{
    return (td_fetch_t){.peer = 11,
                        .deadline_ns = td_now_ns() + 5 * TD_NS_PER_S,
                        .complete = on_complete,
                        .pieces = pieces,
                        .piece_count = count};
}

static void check_all_blocks(ends_t *ends, td_carrier_t carrier)
{
    td_fetch_piece_t pieces[BLOCKS];
    td_fetch_t fetch = fetch_of(pieces, BLOCKS);
    uint8_t *mine = td_transfer_memory(ends->reader);

    for (uint32_t i = 0; i < BLOCKS; i++) {
        /* scattered: block i of the owner lands in block BLOCKS-1-i here */
        pieces[i] = (td_fetch_piece_t){.epoch = td_pool_epoch(ends->owner_pool, i),
                                       .block = i,
                                       .offset = 0,
                                       .bytes = BLOCK_BYTES,
                                       .dest = mine + (size_t)(BLOCKS - 1 - i) * BLOCK_BYTES};
    }
    assert_int_equal(td_transfer_fetch(ends->reader, &fetch), TD_OK);
    wait_done(1);
    assert_int_equal(fetch.status, TD_OK);
    assert_int_equal(fetch.carrier, carrier);
    assert_int_equal(fetch.bytes, BLOCKS * BLOCK_BYTES);
    for (uint32_t i = 0; i < BLOCKS; i++) {
        assert_memory_equal(mine + (size_t)(BLOCKS - 1 - i) * BLOCK_BYTES,
                            td_pool_bytes(ends->owner_pool, i), BLOCK_BYTES);
    }
}

static void test_fetch_brings_scattered_blocks_by_shm(void **state)
{
    check_all_blocks(*state, TD_CARRIER_SHM);
}

static void test_fetch_brings_scattered_blocks_by_tcp(void **state)
{
    check_all_blocks(*state, TD_CARRIER_TCP);
}

/* Pieces longer and shorter than an answer, at odd places: answers begin and end inside them. */
static void test_fetch_of_big_and_small_pieces_by_tcp(void **state)
{
    ends_t *ends = *state;
    td_fetch_piece_t pieces[BLOCKS];
    td_fetch_t fetch = fetch_of(pieces, BLOCKS);
    uint8_t *mine = td_transfer_memory(ends->reader);
    uint64_t sum = 0;

    for (uint32_t i = 0; i < BLOCKS; i++) {
        uint8_t *bytes = td_pool_bytes(ends->owner_pool, i);
        pieces[i] = (td_fetch_piece_t){.epoch = td_pool_epoch(ends->owner_pool, i),
                                       .block = i,
                                       .offset = 13 * i,
                                       .bytes = i % 3 == 1 ? 1 + i : BIG_BYTES - 13 * i - i % 5,
                                       .dest = mine + (size_t)i * BIG_BYTES};
        for (uint32_t at = 0; at < BIG_BYTES; at++) {
            bytes[at] = (uint8_t)(at * 7 + (at >> 10) + i);
        }
        sum += pieces[i].bytes;
    }
    assert_int_equal(td_transfer_fetch(ends->reader, &fetch), TD_OK);
    wait_done(1);
    assert_int_equal(fetch.status, TD_OK);
    assert_int_equal(fetch.bytes, sum);
    for (uint32_t i = 0; i < BLOCKS; i++) {
        assert_memory_equal(pieces[i].dest, td_pool_bytes(ends->owner_pool, i) + pieces[i].offset,
                            pieces[i].bytes);
    }
}

static void test_f6_fetch_of_a_reused_block_is_stale(void **state)
{
    ends_t *ends = *state;
    uint32_t idx = 0;
    td_fetch_piece_t piece;
    td_fetch_t fetch = fetch_of(&piece, 1);
    uint8_t *mine = td_transfer_memory(ends->reader);

    assert_int_equal(td_pool_take(ends->owner_pool, &idx), TD_OK);
    piece = (td_fetch_piece_t){.epoch = td_pool_epoch(ends->owner_pool, idx),
                               .block = idx,
                               .bytes = BLOCK_BYTES,
                               .dest = mine};
    td_pool_unref(ends->owner_pool, idx); /* given to another use before the fetch */
    assert_int_equal(td_transfer_fetch(ends->reader, &fetch), TD_OK);
    wait_done(1);
    assert_int_equal(fetch.status, TD_ERR_STALE);
    assert_int_equal(mine[0], 0);
}

static void test_fetch_from_unknown_peer_is_peer_dead(void **state)
{
    ends_t *ends = *state;
    td_fetch_piece_t piece = {.bytes = 1, .dest = td_transfer_memory(ends->reader)};
    td_fetch_t fetch = fetch_of(&piece, 1);

    fetch.peer = 99;
    assert_int_equal(td_transfer_fetch(ends->reader, &fetch), TD_OK);
    wait_done(1);
    assert_int_equal(fetch.status, TD_ERR_PEER_DEAD);
}

static void test_fetch_outside_the_peers_pool_is_invalid(void **state)
{
    ends_t *ends = *state;
    td_fetch_piece_t piece = {
        .block = BLOCKS, .bytes = 8, .dest = td_transfer_memory(ends->reader)};
    td_fetch_t fetch = fetch_of(&piece, 1);

    assert_int_equal(td_transfer_fetch(ends->reader, &fetch), TD_OK);
    wait_done(1);
    assert_int_equal(fetch.status, TD_ERR_INVALID);
    piece.block = 0;
    piece.offset = BLOCK_BYTES - 4;
    assert_int_equal(td_transfer_fetch(ends->reader, &fetch), TD_OK);
    wait_done(2);
    assert_int_equal(fetch.status, TD_ERR_INVALID);
}

static void test_fetch_past_its_deadline_times_out(void **state)
{
    ends_t *ends = *state;
    td_fetch_piece_t piece = {.bytes = 8, .dest = td_transfer_memory(ends->reader)};
    td_fetch_t fetch = fetch_of(&piece, 1);

    fetch.deadline_ns = 1;
    assert_int_equal(td_transfer_fetch(ends->reader, &fetch), TD_OK);
    wait_done(1);
    assert_int_equal(fetch.status, TD_ERR_TIMEOUT);
}

static void test_fetch_ends_when_its_peer_is_removed(void **state)
{
    ends_t *ends = *state;
    td_fetch_piece_t piece = {.epoch = td_pool_epoch(ends->owner_pool, 0),
                              .bytes = BLOCK_BYTES,
                              .dest = td_transfer_memory(ends->reader)};
    td_fetch_t fetch = fetch_of(&piece, 1);

    td_transfer_peer_remove(ends->owner, 22); /* so it will not answer */
    td_transfer_peer_remove(ends->reader, 11);
    assert_int_equal(td_transfer_fetch(ends->reader, &fetch), TD_OK);
    wait_done(1);
    assert_int_equal(fetch.status, TD_ERR_PEER_DEAD);
}

/* I6: a peer that answers nothing holds its share of the fetches under way, not all of them. */
static void test_i6_fetches_from_one_peer_are_bounded(void **state)
{
    enum { MANY = TD_TRANSFER_PEER_OPS_MAX + 40 };
    ends_t *ends = *state;
    td_fetch_piece_t piece = {.epoch = td_pool_epoch(ends->owner_pool, 0),
                              .bytes = 8,
                              .dest = td_transfer_memory(ends->reader)};
    td_fetch_t *fetches = test_calloc(MANY, sizeof(*fetches));
    uint32_t busy = 0;

    td_transfer_peer_remove(ends->owner, 22); /* so it will not answer */
    for (uint32_t i = 0; i < MANY; i++) {
        fetches[i] = fetch_of(&piece, 1);
        while (td_transfer_fetch(ends->reader, &fetches[i]) != TD_OK) {
            (void)sched_yield(); /* its queue of commands is bounded as well */
        }
    }
    wait_done(40);
    td_transfer_peer_remove(ends->reader, 11);
    wait_done(MANY);
    for (uint32_t i = 0; i < MANY; i++) {
        busy += fetches[i].status == TD_ERR_BUSY;
    }
    assert_int_equal(busy, 40);
    test_free(fetches);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_fetch_brings_scattered_blocks_by_shm, setup_shm,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_fetch_brings_scattered_blocks_by_tcp, setup_tcp,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_fetch_of_big_and_small_pieces_by_tcp, setup_tcp_big,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_f6_fetch_of_a_reused_block_is_stale, setup_tcp,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_fetch_from_unknown_peer_is_peer_dead, setup_shm,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_fetch_outside_the_peers_pool_is_invalid, setup_tcp,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_fetch_past_its_deadline_times_out, setup_tcp,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_fetch_ends_when_its_peer_is_removed, setup_tcp,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_i6_fetches_from_one_peer_are_bounded, setup_tcp,
                                        teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

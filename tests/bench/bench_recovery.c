#include "tests/bench/bench_recovery.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/coord/td_coord_internal.h"
#include "common/transfer/td_transfer.h"
#include "kvstore/kvs_master_internal.h"
#include "kvstore/kvs_segment.h"
#include "tests/bench/bench.h"
#include "tests/bench/bench_fork.h"

#define BLOCK_BYTES 64u
#define BATCH 1024u
#define REPEAT_MAX 16u
#define LEADER 1u /* incarnations */
#define SEGMENT 2u
#define ADDRESS_BYTES_MAX 16384u
#define WAIT_NS (60 * TD_NS_PER_S)

/* What one process tells the other. */
typedef struct hello {
    char endpoint[128];
    uint64_t base;
    uint32_t address_bytes;
    uint32_t rkey_bytes;
    uint8_t address[ADDRESS_BYTES_MAX];
    uint8_t rkey[ADDRESS_BYTES_MAX];
} hello_t;

static const uint8_t secret[TD_CLUSTER_SECRET_BYTES] = {3};

static td_bus_t *open_bus(const char *id, uint64_t incarnation)
{
    const td_bus_config_t config = {
        .bind = "tcp://127.0.0.1:*", .id = id, .incarnation = incarnation, .secret = secret};
    td_bus_t *bus = NULL;
    return td_bus_create(&config, &bus) == TD_OK ? bus : NULL;
}

static td_transfer_t *open_transfer(uint64_t incarnation, uint32_t blocks)
{
    const td_transfer_config_t config = {
        .block_count = blocks, .block_bytes = BLOCK_BYTES, .incarnation = incarnation};
    td_transfer_t *transfer = NULL;
    return td_transfer_create(&config, &transfer) == TD_OK ? transfer : NULL;
}

static bool meet(int socket, td_bus_t *bus, const char *id, uint64_t incarnation,
                 td_transfer_t *transfer, uint32_t blocks)
{
    static hello_t hello;
    const void *address = NULL;
    const void *rkey = NULL;
    size_t address_len = 0;
    size_t rkey_len = 0;
    td_transfer_peer_t peer = {
        .incarnation = incarnation, .block_count = blocks, .block_bytes = BLOCK_BYTES};

    td_transfer_address(transfer, &address, &address_len, &rkey, &rkey_len, &hello.base);
    if (address_len > ADDRESS_BYTES_MAX || rkey_len > ADDRESS_BYTES_MAX) {
        return false;
    }
    (void)snprintf(hello.endpoint, sizeof(hello.endpoint), "%s", td_bus_endpoint(bus));
    memcpy(hello.address, address, address_len);
    memcpy(hello.rkey, rkey, rkey_len);
    hello.address_bytes = (uint32_t)address_len;
    hello.rkey_bytes = (uint32_t)rkey_len;
    if (!bench_send_all(socket, &hello, sizeof(hello)) ||
        !bench_receive_all(socket, &hello, sizeof(hello))) {
        return false;
    }
    peer.address = hello.address;
    peer.address_len = hello.address_bytes;
    peer.rkey = hello.rkey;
    peer.rkey_len = hello.rkey_bytes;
    peer.base = hello.base;
    return td_bus_connect(bus, id, hello.endpoint, incarnation) == TD_OK &&
           td_transfer_peer_add(transfer, &peer) == TD_OK;
}

/* --- the segment's process -------------------------------------------------------------------- */

static bool serve_segment(int socket, uint32_t blocks)
{
    td_bus_t *bus = open_bus("segment", SEGMENT);
    td_transfer_t *transfer = open_transfer(SEGMENT, blocks);
    td_metrics_t *metrics = NULL;
    kvs_segment_t *segment = NULL;
    bool ok = bus != NULL && transfer != NULL && td_metrics_create(&metrics) == TD_OK &&
              kvs_segment_create(bus, transfer, metrics, blocks, BLOCK_BYTES, &segment) == TD_OK &&
              meet(socket, bus, "leader", LEADER, transfer, BATCH);

    for (bool here = ok; here;) {
        const int fds[2] = {kvs_segment_fd(segment), socket};
        bool readable[2] = {false, false};
        td_msg_arena_t *arena = NULL;
        td_msg_t msg;
        td_bus_wait(bus, fds, 2, kvs_segment_wait_ms(segment, 100), readable);
        while (td_bus_recv(bus, &msg, &arena) == TD_OK) {
            (void)kvs_segment_handle(segment, &msg);
            td_msg_arena_free(arena);
        }
        kvs_segment_completions(segment);
        kvs_segment_tick(segment);
        here = !readable[1]; /* nothing is said there: the leader has gone */
    }
    td_transfer_destroy(transfer);
    kvs_segment_destroy(segment);
    if (bus != NULL) {
        td_bus_destroy(bus);
    }
    td_metrics_destroy(metrics);
    return ok;
}

/* --- the leaders' process --------------------------------------------------------------------- */

typedef struct leader {
    td_bus_t *bus;
    td_transfer_t *transfer;
    td_pool_t *pool;
    td_metrics_t *metrics;
    td_coord_t coord; /* played */
    kvs_master_t *master;
    uint32_t blocks;
} leader_t;

/* As spread as real keys, which are hashes. Source: splitmix64 (Steele et al. 2014). */
static void key_of(uint32_t n, td_block_key_t *key)
{
    for (uint32_t half = 0; half < 2; half++) {
        uint64_t z = (2ull * n + half + 1) * 0x9e3779b97f4a7c15ull;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
        z ^= z >> 31;
        memcpy(key->bytes + 8 * (size_t)half, &z, sizeof(z));
    }
}

static void turn(leader_t *l, uint32_t wait_ms)
{
    td_msg_arena_t *arena = NULL;
    td_msg_t msg;

    td_bus_wait(l->bus, NULL, 0, wait_ms, NULL);
    while (td_bus_recv(l->bus, &msg, &arena) == TD_OK) {
        (void)kvs_master_handle(l->master, &msg);
        td_msg_arena_free(arena);
    }
    kvs_master_tick(l->master);
}

/* A new leader, which knows nothing. */
static bool lead(leader_t *l, uint64_t term)
{
    kvs_policy_t policy = kvs_policy_default();

    kvs_master_destroy(l->master);
    l->master = NULL;
    policy.evict_from_percent = 100;
    l->coord = (td_coord_t){.term = term, .valid_until_ns = UINT64_MAX};
    if (kvs_master_create(l->bus, l->metrics, 2 * l->blocks, &policy, &l->coord, &l->master) !=
        TD_OK) {
        return false;
    }
    kvs_master_segment_up(l->master, "segment", SEGMENT, l->blocks);
    return true;
}

/* Has the segment store all its blocks, from a writer whose few ones bear many names. */
static bool fill(leader_t *l)
{
    static td_block_key_t keys[BATCH];
    static uint32_t blocks[BATCH];
    static uint64_t numbers[2][BATCH];
    const uint64_t until = td_now_ns() + WAIT_NS;
    uint64_t hash = 0;

    memset(td_transfer_memory(l->transfer), 7, (size_t)BATCH * BLOCK_BYTES);
    hash = td_block_content_hash(td_transfer_memory(l->transfer), BLOCK_BYTES);
    for (uint32_t i = 0; i < BATCH; i++) {
        if (td_pool_take(l->pool, &blocks[i]) != TD_OK) {
            return false;
        }
        numbers[0][i] = td_pool_epoch(l->pool, blocks[i]);
    }
    for (uint32_t first = 0; first < l->blocks; first += BATCH) {
        const uint32_t count = TD_MIN(BATCH, l->blocks - first);
        const td_msg_t put = {.type = TD_MSG_PUT_START,
                              .sender_id = "leader",
                              .sender_incarnation = LEADER,
                              .u.blocks = {.request = 1 + first,
                                           .count = count,
                                           .keys = keys,
                                           .blocks = blocks,
                                           .epochs = numbers[0],
                                           .checksums = numbers[1]}};
        for (uint32_t i = 0; i < count; i++) {
            key_of(first + i, &keys[i]);
            numbers[1][i] = td_block_checksum(hash, &keys[i], numbers[0][i]);
        }
        (void)kvs_master_handle(l->master, &put);
        while (l->master->index->readable < first + count && td_now_ns() < until) {
            turn(l, 10);
        }
    }
    return l->master->index->readable == l->blocks;
}

/* Looks every key up, as nodes do. */
static bool all_found(const leader_t *l)
{
    for (uint32_t i = 0; i < l->blocks; i++) {
        td_block_key_t key;
        const kvs_entry_t *e = NULL;
        key_of(i, &key);
        e = kvs_index_find(l->master->index, &key);
        if (e == NULL || e->ready != 1) {
            return false;
        }
    }
    return true;
}

static int compare(const void *a, const void *b)
{
    const double x = *(const double *)a;
    const double y = *(const double *)b;
    return (x > y) - (x < y);
}

static bool measure(leader_t *l, uint32_t repeat, double *seconds_out)
{
    double times[REPEAT_MAX];

    if (!lead(l, 1)) {
        return false;
    }
    kvs_master_lead(l->master, 1);
    if (!fill(l)) {
        return false;
    }
    for (uint32_t i = 0; i < repeat; i++) {
        const uint64_t until = td_now_ns() + WAIT_NS;
        uint64_t began = 0;
        if (!lead(l, 2 + i)) {
            return false;
        }
        began = td_now_ns();
        kvs_master_lead(l->master, 2 + i);
        while (!kvs_master_is_complete(l->master) && td_now_ns() < until) {
            turn(l, 10);
        }
        if (!all_found(l)) {
            return false;
        }
        times[i] = (double)(td_now_ns() - began) / 1e9;
    }
    qsort(times, repeat, sizeof(*times), compare);
    *seconds_out = times[repeat / 2];
    return true;
}

static bool serve_leader(int socket, uint32_t blocks, uint32_t repeat, double *seconds_out)
{
    leader_t l = {.bus = open_bus("leader", LEADER), .blocks = blocks};
    bool ok = false;

    l.transfer = open_transfer(LEADER, BATCH);
    ok = l.bus != NULL && l.transfer != NULL && td_metrics_create(&l.metrics) == TD_OK &&
         td_pool_create(td_transfer_memory(l.transfer), BATCH, BLOCK_BYTES, &l.pool) == TD_OK;
    if (ok) {
        td_transfer_set_pool(l.transfer, l.pool);
        ok = meet(socket, l.bus, "segment", SEGMENT, l.transfer, blocks) &&
             td_bus_connect(l.bus, "leader", td_bus_endpoint(l.bus), LEADER) == TD_OK &&
             measure(&l, repeat, seconds_out);
    }
    td_transfer_destroy(l.transfer);
    kvs_master_destroy(l.master);
    for (uint32_t i = 0; l.pool != NULL && i < BATCH && td_pool_refs(l.pool, i) > 0; i++) {
        td_pool_unref(l.pool, i);
    }
    td_pool_destroy(l.pool);
    if (l.bus != NULL) {
        td_bus_destroy(l.bus);
    }
    td_metrics_destroy(l.metrics);
    return ok;
}

bool bench_recovery(uint32_t blocks, uint32_t repeat, double *seconds_out)
{
    int pair[2] = {-1, -1};
    int result[2] = {-1, -1};
    pid_t segment = -1;
    pid_t leader = -1;
    bool ok = repeat >= 1 && repeat <= REPEAT_MAX &&
              socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0 &&
              socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, result) == 0;

    if (!ok) {
        return false;
    }
    segment = bench_fork();
    if (segment == 0) {
        (void)close(pair[0]);
        exit(serve_segment(pair[1], blocks) ? BENCH_EXIT_OK : BENCH_EXIT_FAILED);
    }
    (void)close(pair[1]);
    leader = bench_fork();
    if (leader == 0) {
        double seconds = 0;
        ok = serve_leader(pair[0], blocks, repeat, &seconds) &&
             bench_send_all(result[1], &seconds, sizeof(seconds));
        exit(ok ? BENCH_EXIT_OK : BENCH_EXIT_FAILED);
    }
    (void)close(pair[0]);
    (void)close(result[1]);
    ok = bench_receive_all(result[0], seconds_out, sizeof(*seconds_out));
    ok = bench_ended_well(leader) && ok;
    ok = bench_ended_well(segment) && ok;
    (void)close(result[0]);
    return ok;
}

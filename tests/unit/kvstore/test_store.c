/* Master, segment and client together in one process: real buses, real transfers, a played router.
 */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <stdio.h>
#include <unistd.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/coord/td_coord_internal.h"
#include "common/transfer/td_transfer.h"
#include "common/wire/td_member.h"
#include "kvstore/kvs_client.h"
#include "kvstore/kvs_master.h"
#include "kvstore/kvs_segment.h"

#define WRITER_BLOCKS 32u
#define SEGMENT_BLOCKS 20u
#define BLOCK_BYTES 4096u
#define WRITER 11u
#define STORE 22u
#define ROUTER 33u
#define SECOND 44u
#define NEXT 55u

typedef struct world {
    td_metrics_t *metrics;
    td_bus_t *router;
    td_bus_t *writer;
    td_bus_t *store;
    td_member_t *member; /* the writer's */
    td_transfer_t *writer_transfer;
    td_transfer_t *store_transfer;
    td_pool_t *pool; /* the writer's */
    kvs_client_t *client;
    td_coord_t coord; /* played: who leads is what a test says */
    kvs_master_t *master;
    kvs_segment_t *segment;
    td_bus_t *second; /* NULL, or a second segment's */
    td_transfer_t *second_transfer;
    kvs_segment_t *second_segment;
    td_status_t results[WRITER_BLOCKS]; /* of the last pin or removal */
    uint32_t result_count;
    uint32_t puts_stored; /* results of puts, each key one */
    uint32_t puts_refused;
    td_bus_t *next_bus; /* NULL, or that of the next leader */
    td_coord_t next_coord;
    kvs_master_t *next;
    bool store_frozen;
    bool second_frozen;
    bool with_ticks;   /* the master's */
    char tier_dir[64]; /* "": no cold tier */
    uint64_t second_mount;
    int lookups;
    uint32_t found;
    td_status_t lookup_status;
    uint32_t where[WRITER_BLOCKS];
    uint64_t epochs[WRITER_BLOCKS];
    uint64_t checksums[WRITER_BLOCKS];
} world_t;

static uint8_t secret[TD_CLUSTER_SECRET_BYTES] = {5};

static td_bus_t *bus_of(const char *id, uint64_t incarnation)
{
    td_bus_config_t config = {
        .bind = "tcp://127.0.0.1:*", .id = id, .incarnation = incarnation, .secret = secret};
    td_bus_t *bus = NULL;
    assert_int_equal(td_bus_create(&config, &bus), TD_OK);
    return bus;
}

static td_transfer_t *transfer_of(uint64_t incarnation, uint32_t blocks)
{
    td_transfer_config_t config = {
        .block_count = blocks, .block_bytes = BLOCK_BYTES, .incarnation = incarnation};
    td_transfer_t *transfer = NULL;
    assert_int_equal(td_transfer_create(&config, &transfer), TD_OK);
    return transfer;
}

/* One turn of everybody's loop. */
static void turn(world_t *w)
{
    td_msg_arena_t *arena = NULL;
    td_msg_t msg;
    td_msg_heartbeat_t load = {0};
    td_bus_t *buses[] = {w->router, w->writer, w->store};

    for (int i = 0; i < 3; i++) {
        td_bus_wait(buses[i], NULL, 0, i == 0 ? 1 : 0, NULL);
    }
    if (w->second != NULL && !w->second_frozen) {
        td_bus_wait(w->second, NULL, 0, 0, NULL);
        while (td_bus_recv(w->second, &msg, &arena) == TD_OK) {
            assert_true(kvs_segment_handle(w->second_segment, &msg));
            td_msg_arena_free(arena);
        }
        kvs_segment_completions(w->second_segment);
    }
    while (td_bus_recv(w->router, &msg, &arena) == TD_OK) {
        td_msg_arena_free(arena);
    }
    while (td_bus_recv(w->writer, &msg, &arena) == TD_OK) {
        if (msg.type == TD_MSG_STORE_RESULT) {
            w->result_count = msg.u.blocks.count;
            memcpy(w->results, msg.u.blocks.statuses, msg.u.blocks.count * sizeof(*w->results));
        } else if (!td_member_handle(w->member, &msg)) {
            for (uint32_t i = 0; msg.type == TD_MSG_PUT_RESULT && i < msg.u.blocks.count; i++) {
                w->puts_stored += msg.u.blocks.statuses[i] == TD_OK;
                w->puts_refused += msg.u.blocks.statuses[i] != TD_OK;
            }
            (void)kvs_client_handle(w->client, &msg);
        }
        td_msg_arena_free(arena);
    }
    while (!w->store_frozen && td_bus_recv(w->store, &msg, &arena) == TD_OK) {
        assert_true(kvs_master_handle(w->master, &msg) || kvs_segment_handle(w->segment, &msg));
        td_msg_arena_free(arena);
    }
    if (!w->store_frozen) {
        kvs_segment_completions(w->segment);
        kvs_segment_tick(w->segment);
    }
    if (w->with_ticks) {
        kvs_master_tick(w->master);
    }
    if (w->next_bus != NULL) {
        td_bus_wait(w->next_bus, NULL, 0, 0, NULL);
        while (td_bus_recv(w->next_bus, &msg, &arena) == TD_OK) {
            assert_true(kvs_master_handle(w->next, &msg));
            td_msg_arena_free(arena);
        }
        kvs_master_tick(w->next);
    }
    kvs_client_tick(w->client);
    td_member_tick(w->member, &load);
}

#define TURN_UNTIL(w, cond)                                                                        \
    do {                                                                                           \
        uint64_t until_ = td_now_ns() + 10 * TD_NS_PER_S;                                          \
        while (!(cond)) {                                                                          \
            assert_true(td_now_ns() < until_);                                                     \
            turn(w);                                                                               \
        }                                                                                          \
    } while (0)

/* Takes a mounting's message from under the second segment, which is frozen. Turns go on: what
 * could not be sent at once is sent in the sender's turns. */
static uint64_t take_mount_of_second(world_t *w)
{
    td_msg_arena_t *arena = NULL;
    td_msg_t msg;
    uint64_t mount = 0;

    assert_true(w->second_frozen);
    TURN_UNTIL(w, td_bus_recv(w->second, &msg, &arena) == TD_OK);
    assert_int_equal(msg.type, TD_MSG_MOUNT);
    mount = msg.u.blocks.mount;
    td_msg_arena_free(arena);
    return mount;
}

static void send_peers(world_t *w, bool with_store)
{
    td_msg_t msg = {.type = TD_MSG_PEERS};
    td_msg_peer_t peer = {.id = "store",
                          .role = TD_ROLE_KVSTORE,
                          .incarnation = STORE,
                          .endpoint = td_bus_endpoint(w->store),
                          .store_master = true};
    msg.u.peers = (td_msg_peers_t){.version = 1, .count = with_store ? 1 : 0, .peers = &peer};
    assert_int_equal(td_bus_send(w->router, "writer", &msg), TD_OK);
    TURN_UNTIL(w, (td_member_store_master(w->member) != NULL) == with_store);
}

static void join_writer(world_t *w)
{
    td_member_events_t events = {0};
    td_msg_register_t self = {
        .self = {.id = "writer", .role = TD_ROLE_PREFILL, .endpoint = td_bus_endpoint(w->writer)},
        .http = "",
        .numerics_class = "",
        .version = ""};
    td_msg_t msg = {.type = TD_MSG_REGISTERED, .u.registered = {.accepted = true, .error = ""}};

    assert_int_equal(
        td_member_create(w->writer, td_bus_endpoint(w->router), &self, &events, &w->member), TD_OK);
    assert_int_equal(td_bus_connect(w->router, "writer", td_bus_endpoint(w->writer), WRITER),
                     TD_OK);
    assert_int_equal(td_bus_connect(w->store, "writer", td_bus_endpoint(w->writer), WRITER), TD_OK);
    assert_int_equal(td_bus_connect(w->store, "store", td_bus_endpoint(w->store), STORE), TD_OK);
    assert_int_equal(td_bus_send(w->router, "writer", &msg), TD_OK);
}

static void add_peer(td_transfer_t *to, const td_transfer_t *of, uint64_t incarnation,
                     uint32_t blocks)
{
    td_transfer_peer_t peer = {
        .incarnation = incarnation, .block_count = blocks, .block_bytes = BLOCK_BYTES};
    td_transfer_address(of, &peer.address, &peer.address_len, &peer.rkey, &peer.rkey_len,
                        &peer.base);
    assert_int_equal(td_transfer_peer_add(to, &peer), TD_OK);
}

static int setup_with(void **state, uint32_t keys_max, kvs_policy_t policy)
{
    world_t *w = calloc(1, sizeof(*w));

    assert_non_null(w);
    assert_int_equal(td_metrics_create(&w->metrics), TD_OK);
    w->router = bus_of("router", ROUTER);
    w->writer = bus_of("writer", WRITER);
    w->store = bus_of("store", STORE);
    w->writer_transfer = transfer_of(WRITER, WRITER_BLOCKS);
    w->store_transfer = transfer_of(STORE, SEGMENT_BLOCKS);
    add_peer(w->store_transfer, w->writer_transfer, WRITER, WRITER_BLOCKS);
    add_peer(w->writer_transfer, w->store_transfer, STORE, SEGMENT_BLOCKS);
    assert_int_equal(td_pool_create(td_transfer_memory(w->writer_transfer), WRITER_BLOCKS,
                                    BLOCK_BYTES, &w->pool),
                     TD_OK);
    td_transfer_set_pool(w->writer_transfer, w->pool);
    w->coord = (td_coord_t){.term = 1, .valid_until_ns = UINT64_MAX};
    assert_int_equal(
        kvs_master_create(w->store, w->metrics, keys_max, &policy, &w->coord, &w->master), TD_OK);
    kvs_master_lead(w->master, 1);
    assert_int_equal(kvs_segment_create(w->store, w->store_transfer, w->metrics, SEGMENT_BLOCKS,
                                        BLOCK_BYTES, &w->segment),
                     TD_OK);
    kvs_master_segment_up(w->master, "store", STORE, SEGMENT_BLOCKS);
    join_writer(w);
    assert_int_equal(kvs_client_create(w->writer, w->member, w->pool, &w->client), TD_OK);
    send_peers(w, true);
    *state = w;
    return 0;
}

static int setup(void **state)
{
    return setup_with(state, 64, kvs_policy_default());
}

static int setup_small_index(void **state)
{
    return setup_with(state, 8, kvs_policy_default());
}

static int setup_two(void **state, kvs_policy_t policy)
{
    world_t *w = NULL;

    (void)setup_with(state, 64, policy);
    w = *state;
    w->second = bus_of("second", SECOND);
    w->second_transfer = transfer_of(SECOND, SEGMENT_BLOCKS);
    add_peer(w->second_transfer, w->writer_transfer, WRITER, WRITER_BLOCKS);
    add_peer(w->second_transfer, w->store_transfer, STORE, SEGMENT_BLOCKS);
    add_peer(w->store_transfer, w->second_transfer, SECOND, SEGMENT_BLOCKS);
    add_peer(w->writer_transfer, w->second_transfer, SECOND, SEGMENT_BLOCKS);
    assert_int_equal(kvs_segment_create(w->second, w->second_transfer, w->metrics, SEGMENT_BLOCKS,
                                        BLOCK_BYTES, &w->second_segment),
                     TD_OK);
    assert_int_equal(td_bus_connect(w->store, "second", td_bus_endpoint(w->second), SECOND), TD_OK);
    assert_int_equal(td_bus_connect(w->second, "store", td_bus_endpoint(w->store), STORE), TD_OK);
    kvs_master_segment_up(w->master, "second", SECOND, SEGMENT_BLOCKS);
    return 0;
}

static int setup_two_replicas(void **state)
{
    kvs_policy_t policy = kvs_policy_default();
    policy.replicas = 2;
    return setup_two(state, policy);
}

static int setup_hot(void **state)
{
    kvs_policy_t policy = kvs_policy_default();
    policy.hot_hits = 4;
    return setup_two(state, policy);
}

static int setup_no_lease(void **state)
{
    kvs_policy_t policy = kvs_policy_default();
    policy.lease_ms = 0;
    return setup_with(state, 64, policy);
}

static void open_segment_with_tier(world_t *w)
{
    const kvs_tier_config_t config = {
        .dir = w->tier_dir, .bytes = 1 << 20, .block_bytes = BLOCK_BYTES, .metrics = w->metrics};
    assert_int_equal(kvs_segment_create(w->store, w->store_transfer, w->metrics, SEGMENT_BLOCKS,
                                        BLOCK_BYTES, &w->segment),
                     TD_OK);
    assert_int_equal(kvs_segment_open_tier(w->segment, &config), TD_OK);
}

/* The segment begins anew, as after the end of its process: only its disk is left. */
static void restart_segment(world_t *w)
{
    kvs_master_peer_down(w->master, "store", STORE);
    kvs_segment_destroy(w->segment);
    memset(td_transfer_memory(w->store_transfer), 0, (size_t)SEGMENT_BLOCKS * BLOCK_BYTES);
    open_segment_with_tier(w);
    kvs_master_segment_up(w->master, "store", STORE, SEGMENT_BLOCKS);
}

static int setup_tier(void **state)
{
    kvs_policy_t policy = kvs_policy_default();
    world_t *w = NULL;

    policy.lease_ms = 0;
    (void)setup_with(state, 64, policy);
    w = *state;
    w->with_ticks = true;
    (void)snprintf(w->tier_dir, sizeof(w->tier_dir), "/tmp/tandem-cold-XXXXXX");
    assert_non_null(mkdtemp(w->tier_dir));
    kvs_segment_destroy(w->segment);
    open_segment_with_tier(w);
    return 0;
}

static int teardown(void **state)
{
    world_t *w = *state;
    static const char *const tier_files[] = {"tier.data", "tier.index", "tier.reading"};
    td_transfer_destroy(w->writer_transfer);
    td_transfer_destroy(w->store_transfer);
    td_transfer_destroy(w->second_transfer);
    kvs_segment_destroy(w->second_segment);
    if (w->second != NULL) {
        td_bus_destroy(w->second);
    }
    kvs_client_destroy(w->client);
    kvs_segment_destroy(w->segment);
    kvs_master_destroy(w->master);
    kvs_master_destroy(w->next);
    if (w->next_bus != NULL) {
        td_bus_destroy(w->next_bus);
    }
    td_member_destroy(w->member);
    td_pool_destroy(w->pool);
    td_bus_destroy(w->router);
    td_bus_destroy(w->writer);
    td_bus_destroy(w->store);
    td_metrics_destroy(w->metrics);
    for (uint32_t i = 0; w->tier_dir[0] != '\0' && i < TD_ARRAY_LEN(tier_files); i++) {
        char path[96];
        (void)snprintf(path, sizeof(path), "%s/%s", w->tier_dir, tier_files[i]);
        (void)unlink(path);
    }
    (void)rmdir(w->tier_dir);
    free(w);
    return 0;
}

static td_block_key_t key_of(uint32_t n)
{
    td_block_key_t key = {{0}};
    memcpy(key.bytes, &n, sizeof(n));
    key.bytes[12] = 7;
    return key;
}

/* Fills and indexes blocks first..first+count-1 of the writer (cached afterwards) and offers them.
 */
static void put_blocks(world_t *w, uint32_t first, uint32_t count)
{
    uint32_t idx[WRITER_BLOCKS] = {0};

    for (uint32_t i = 0; i < count; i++) {
        td_block_key_t key = key_of(first + i);
        assert_int_equal(td_pool_take(w->pool, &idx[i]), TD_OK);
        memset(td_pool_bytes(w->pool, idx[i]), (int)(first + i + 1), BLOCK_BYTES);
        assert_int_equal(
            td_pool_index(w->pool, idx[i], &key,
                          td_block_content_hash(td_pool_bytes(w->pool, idx[i]), BLOCK_BYTES)),
            TD_OK);
    }
    assert_int_equal(kvs_client_put(w->client, idx, count), TD_OK);
    for (uint32_t i = count; i > 0; i--) {
        td_pool_unref(w->pool, idx[i - 1]);
    }
}

/* Blocks first..end-1, each stored before the next is offered. */
static void put_one_by_one(world_t *w, uint32_t first, uint32_t end)
{
    for (uint32_t i = first; i < end; i++) {
        put_blocks(w, i, 1);
        TURN_UNTIL(w, kvs_client_pinned(w->client) == 0);
    }
}

static void on_lookup(void *ctx, uint64_t tag, td_status_t status,
                      const td_msg_lookup_result_t *found)
{
    world_t *w = ctx;
    (void)tag;
    w->lookups++;
    w->lookup_status = status;
    w->found = found != NULL ? found->count : 0;
    for (uint32_t i = 0; i < w->found; i++) {
        w->where[i] = found->blocks[i];
        w->epochs[i] = found->epochs[i];
        w->checksums[i] = found->checksums[i];
    }
}

/* On a busy machine an answer may be too late: then it is asked for again, of a store that answers.
 */
static void lookup(world_t *w, uint32_t first, uint32_t count)
{
    td_block_key_t keys[WRITER_BLOCKS];
    int before = w->lookups;

    for (uint32_t i = 0; i < count; i++) {
        keys[i] = key_of(first + i);
    }
    assert_int_equal(kvs_client_lookup(w->client, keys, count, on_lookup, w, 0), TD_OK);
    TURN_UNTIL(w, w->lookups > before);
    while (w->lookup_status == TD_ERR_TIMEOUT && !w->store_frozen) {
        before = w->lookups;
        TURN_UNTIL(w, kvs_client_lookup(w->client, keys, count, on_lookup, w, 0) == TD_OK);
        TURN_UNTIL(w, w->lookups > before);
    }
}

/* What a lookup named is the writer's block. */
static void assert_bytes_of(world_t *w, uint32_t first)
{
    for (uint32_t i = 0; i < w->found; i++) {
        td_block_key_t key = key_of(first + i);
        const uint8_t *stored =
            td_transfer_memory(w->store_transfer) + (size_t)w->where[i] * BLOCK_BYTES;
        assert_int_equal(stored[0], (uint8_t)(first + i + 1));
        assert_int_equal(
            td_block_checksum(td_block_content_hash(stored, BLOCK_BYTES), &key, w->epochs[i]),
            w->checksums[i]);
    }
}

static void test_store_put_then_lookup_finds_the_longest_prefix(void **state)
{
    world_t *w = *state;

    put_blocks(w, 0, 4);
    assert_int_equal(kvs_client_pinned(w->client), 4);
    TURN_UNTIL(w, kvs_client_pinned(w->client) == 0);
    assert_int_equal(td_pool_counts(w->pool).active, 0);
    lookup(w, 0, 6);
    assert_int_equal(w->found, 4);
    lookup(w, 3, 2);
    assert_int_equal(w->found, 1);
    lookup(w, 9, 1);
    assert_int_equal(w->found, 0);
    assert_int_equal(w->lookup_status, TD_ERR_NOT_FOUND);
}

static void test_store_holds_the_writers_bytes(void **state)
{
    world_t *w = *state;
    td_block_key_t key = key_of(2);

    put_blocks(w, 0, 3);
    TURN_UNTIL(w, kvs_client_pinned(w->client) == 0);
    lookup(w, 0, 3);
    assert_int_equal(w->found, 3);
    {
        const uint8_t *stored =
            td_transfer_memory(w->store_transfer) + (size_t)w->where[2] * BLOCK_BYTES;
        assert_int_equal(stored[0], 3);
        assert_int_equal(
            td_block_checksum(td_block_content_hash(stored, BLOCK_BYTES), &key, w->epochs[2]),
            w->checksums[2]);
    }
}

static void test_store_second_put_of_a_key_stores_nothing(void **state)
{
    world_t *w = *state;
    uint32_t idx = 0;

    put_blocks(w, 0, 1);
    TURN_UNTIL(w, kvs_client_pinned(w->client) == 0);
    {
        td_block_key_t key = key_of(0);
        idx = td_pool_find(w->pool, &key);
    }
    assert_int_equal(kvs_client_put(w->client, &idx, 1), TD_OK);
    TURN_UNTIL(w, kvs_client_pinned(w->client) == 0);
    lookup(w, 0, 1);
    assert_int_equal(w->found, 1);
}

/* I3, F6: bytes that are not the named ones are revoked, never readable. */
static void test_i3_store_revokes_a_block_whose_bytes_changed(void **state)
{
    world_t *w = *state;
    td_block_key_t key = key_of(0);

    put_blocks(w, 0, 1);
    td_pool_bytes(w->pool, td_pool_find(w->pool, &key))[100] ^= 1; /* before the segment fetches */
    TURN_UNTIL(w, kvs_client_pinned(w->client) == 0);
    lookup(w, 0, 1);
    assert_int_equal(w->found, 0);
    put_blocks(w, 1, 1); /* and the space is free for the next one */
    TURN_UNTIL(w, kvs_client_pinned(w->client) == 0);
    lookup(w, 1, 1);
    assert_int_equal(w->found, 1);
}

/* F7: a writer that dies after PutStart blocks nobody: its keys are free for the next writer at
 * once. */
static void test_f7_dead_writers_keys_are_revoked(void **state)
{
    world_t *w = *state;
    td_block_key_t key = key_of(0);
    uint32_t idx = 0;

    td_transfer_peer_remove(w->store_transfer, WRITER); /* it will never be fetched from */
    put_blocks(w, 0, 1);
    TURN_UNTIL(w, kvs_client_pinned(w->client) == 0);
    add_peer(w->store_transfer, w->writer_transfer, WRITER, WRITER_BLOCKS);
    kvs_master_peer_down(w->master, "writer", WRITER);
    lookup(w, 0, 1);
    assert_int_equal(w->found, 0);
    idx = td_pool_find(w->pool, &key);
    assert_int_equal(kvs_client_put(w->client, &idx, 1), TD_OK);
    TURN_UNTIL(w, kvs_client_pinned(w->client) == 0);
    lookup(w, 0, 1);
    assert_int_equal(w->found, 1);
}

/* F7: a segment that reports on some of an order's keys only leaves none of the others in progress.
 */
static void test_f7_keys_without_a_result_are_revoked(void **state)
{
    world_t *w = *state;
    td_block_key_t keys[2] = {key_of(0), key_of(1)};
    const uint32_t blocks[2] = {0, 1};
    const uint64_t numbers[2] = {1, 1};
    const td_status_t statuses[2] = {TD_OK, TD_OK};
    td_str_t text = {0};
    td_msg_t msg = {.type = TD_MSG_PUT_START,
                    .sender_id = "writer",
                    .sender_incarnation = WRITER,
                    .u.blocks = {.request = KVS_ORDERS_MAX, /* then the first order's id */
                                 .term = 1,
                                 .count = 2,
                                 .keys = keys,
                                 .blocks = blocks,
                                 .epochs = numbers,
                                 .checksums = numbers,
                                 .statuses = statuses}};

    assert_true(kvs_master_handle(w->master, &msg)); /* order 1, which the segment never sees */
    msg.type = TD_MSG_STORE_DONE;
    msg.sender_id = "store";
    msg.sender_incarnation = STORE;
    msg.u.blocks.count = 1;
    assert_true(kvs_master_handle(w->master, &msg));
    assert_int_equal(td_metrics_render(w->metrics, &text), TD_OK);
    assert_non_null(strstr(text.bytes, "puts_total{result=\"stored\"} 1\n"));
    assert_non_null(strstr(text.bytes, "puts_total{result=\"revoked\"} 1\n"));
    td_str_fini(&text);
}

/* F8: a segment that fills up evicts the oldest and goes on taking new ones. */
static void test_f8_full_segment_evicts_and_takes_new_blocks(void **state)
{
    world_t *w = *state;

    put_one_by_one(w, 0, WRITER_BLOCKS);
    lookup(w, WRITER_BLOCKS - 1, 1);
    assert_int_equal(w->found, 1);
    lookup(w, 0, 1);
    assert_int_equal(w->found, 0);
}

/* F8: so does one that a large put has filled to the last block, before it was full enough for
 * eviction to begin. */
static void test_f8_segment_without_a_free_block_takes_new_ones(void **state)
{
    world_t *w = *state;

    put_blocks(w, 0, 16);
    TURN_UNTIL(w, kvs_client_pinned(w->client) == 0);
    put_blocks(w, 16, 8); /* four more than there is room for */
    TURN_UNTIL(w, kvs_client_pinned(w->client) == 0);
    lookup(w, 16, 8);
    assert_int_equal(w->found, 8);
    put_blocks(w, 24, 8);
    TURN_UNTIL(w, kvs_client_pinned(w->client) == 0);
    lookup(w, 24, 8);
    assert_int_equal(w->found, 8);
}

/* What is there already needs no room: offering it again (another node computed it, too) costs
 * nobody its blocks. */
static void test_store_blocks_offered_again_evict_nothing(void **state)
{
    world_t *w = *state;
    uint32_t idx[8];

    put_blocks(w, 0, 8);
    TURN_UNTIL(w, kvs_client_pinned(w->client) == 0);
    put_blocks(w, 8, 8);
    TURN_UNTIL(w, kvs_client_pinned(w->client) == 0);
    for (uint32_t i = 0; i < 8; i++) {
        const td_block_key_t key = key_of(8 + i);
        idx[i] = td_pool_find(w->pool, &key);
    }
    assert_int_equal(kvs_client_put(w->client, idx, 8), TD_OK); /* twice what is free */
    TURN_UNTIL(w, kvs_client_pinned(w->client) == 0);
    lookup(w, 0, 8);
    assert_int_equal(w->found, 8);
}

/* F8: so does an index that is smaller than the segments. */
static void test_f8_full_index_evicts_and_takes_new_keys(void **state)
{
    world_t *w = *state;

    put_one_by_one(w, 0, 16);
    lookup(w, 15, 1);
    assert_int_equal(w->found, 1);
}

/* A segment that the master has lost and mounts again tells what it holds: all of it is found, and
 * gives way to what comes, so none of it stays where nobody knows of it. */
static void test_store_segment_mounted_again_keeps_its_blocks(void **state)
{
    world_t *w = *state;

    for (uint32_t i = 0; i < 12; i++) {
        put_blocks(w, i, 1);
    }
    TURN_UNTIL(w, kvs_client_pinned(w->client) == 0);
    kvs_master_peer_down(w->master, "store", STORE);
    kvs_master_segment_up(w->master, "store", STORE, SEGMENT_BLOCKS);
    TURN_UNTIL(w, kvs_master_is_complete(w->master));
    lookup(w, 0, 12);
    assert_int_equal(w->found, 12);
    assert_bytes_of(w, 0);
    for (uint32_t i = 12; i < 28; i++) {
        put_blocks(w, i, 1);
    }
    TURN_UNTIL(w, kvs_client_pinned(w->client) == 0);
    lookup(w, 12, 16);
    assert_int_equal(w->found, 16);
}

/* The writer's pins end with the segment that was to store its blocks. */
static void test_store_dead_segment_ends_the_writers_pins(void **state)
{
    world_t *w = *state;
    td_msg_t msg;
    td_msg_arena_t *arena = NULL;

    put_blocks(w, 0, 1);
    for (int i = 0; td_bus_recv(w->store, &msg, &arena) != TD_OK; i++) {
        assert_true(i < 1000);
        td_bus_wait(w->writer, NULL, 0, 0, NULL);
        td_bus_wait(w->store, NULL, 0, 10, NULL);
    }
    assert_true(kvs_master_handle(w->master, &msg)); /* its PutStart; the order is never handled */
    td_msg_arena_free(arena);
    kvs_master_peer_down(w->master, "store", STORE);
    w->store_frozen = true;
    TURN_UNTIL(w, kvs_client_pinned(w->client) == 0);
}

/* A writer that was cut off and declared dead: nobody answers offers of its former life. */
static void test_store_new_life_of_the_writer_ends_its_pins(void **state)
{
    world_t *w = *state;

    w->store_frozen = true;
    put_blocks(w, 0, 3);
    assert_int_equal(kvs_client_pinned(w->client), 3);
    kvs_client_tick(w->client);
    assert_int_equal(kvs_client_pinned(w->client), 3);
    td_bus_set_incarnation(w->writer, WRITER + 100);
    kvs_client_tick(w->client);
    assert_int_equal(kvs_client_pinned(w->client), 0);
}

static void test_store_lease_blocks_eviction(void **state)
{
    world_t *w = *state;

    put_blocks(w, 0, 1);
    TURN_UNTIL(w, kvs_client_pinned(w->client) == 0);
    lookup(w, 0, 1);
    assert_int_equal(w->found, 1); /* leased for KVS_LEASE_MS */
    put_one_by_one(w, 1, WRITER_BLOCKS);
    lookup(w, 0, 1);
    assert_int_equal(w->found, 1);
}

static void test_store_silent_master_is_a_timeout_and_a_dead_one_ends_pins(void **state)
{
    world_t *w = *state;

    w->store_frozen = true;
    put_blocks(w, 0, 2);
    lookup(w, 0, 1);
    assert_int_equal(w->lookup_status, TD_ERR_TIMEOUT);
    assert_int_equal(kvs_client_pinned(w->client), 2);
    send_peers(w, false);
    TURN_UNTIL(w, kvs_client_pinned(w->client) == 0);
    assert_int_equal(td_pool_counts(w->pool).active, 0);
    {
        td_block_key_t key = key_of(0);
        assert_int_equal(kvs_client_lookup(w->client, &key, 1, on_lookup, w, 0), TD_ERR_PEER_DEAD);
    }
}

static td_status_t ask(world_t *w)
{
    td_block_key_t key = key_of(0);
    return kvs_client_lookup(w->client, &key, 1, on_lookup, w, 0);
}

/* A lookup without an answer says of all that nobody need wait; one in time, that they may again.
 */
static void test_store_slow_master_is_waited_for_once(void **state)
{
    world_t *w = *state;
    uint32_t idx = 0;
    int before = 0;

    put_blocks(w, 0, 1);
    TURN_UNTIL(w, kvs_client_pinned(w->client) == 0);
    w->store_frozen = true;
    assert_int_equal(ask(w), TD_OK);
    turn(w);
    assert_int_equal(ask(w), TD_OK);
    TURN_UNTIL(w, w->lookups > 0);
    assert_int_equal(w->lookups, 2); /* the younger one does not wait for its own limit */
    assert_int_equal(w->lookup_status, TD_ERR_TIMEOUT);
    before = w->lookups;
    assert_int_equal(ask(w), TD_ERR_TIMEOUT);
    {
        td_block_key_t key = key_of(0);
        idx = td_pool_find(w->pool, &key);
    }
    assert_int_equal(kvs_client_put(w->client, &idx, 1), TD_ERR_TIMEOUT);
    w->store_frozen = false;
    /* A probe is answered in time. */
    TURN_UNTIL(w, ask(w) == TD_OK);
    TURN_UNTIL(w, w->lookups > before);
    assert_int_equal(w->lookups, before + 1);
    assert_int_equal(w->found, 1);
}

/* Who needs blocks gets those that an offer pins and the store leaves lying. */
static void test_store_slow_offers_pins_yield_to_who_needs_blocks(void **state)
{
    world_t *w = *state;

    w->store_frozen = true;
    put_blocks(w, 0, 20);
    put_blocks(w, 20, 10);
    kvs_client_make_room(w->client, WRITER_BLOCKS);
    assert_int_equal(kvs_client_pinned(w->client), 30); /* they are young */
    assert_int_equal(ask(w), TD_OK);
    TURN_UNTIL(w, w->lookups > 0); /* now they are older than a lookup may take */
    kvs_client_make_room(w->client, 2);
    assert_int_equal(kvs_client_pinned(w->client), 30); /* there is room */
    kvs_client_make_room(w->client, 10);
    assert_int_equal(kvs_client_pinned(w->client), 10); /* the oldest offer first */
    assert_int_equal(td_pool_reserve(w->pool, 22), TD_OK);
    td_pool_unreserve(w->pool, 22);
}

static void change(world_t *w, td_msg_type_t type, uint32_t pin, uint32_t first, uint32_t count)
{
    td_block_key_t keys[WRITER_BLOCKS];
    td_msg_t msg = {.type = type};

    for (uint32_t i = 0; i < count; i++) {
        keys[i] = key_of(first + i);
    }
    w->result_count = 0;
    msg.u.blocks = (td_msg_blocks_t){.request = 1, .pin = pin, .count = count, .keys = keys};
    assert_int_equal(td_bus_send(w->writer, "store", &msg), TD_OK);
    TURN_UNTIL(w, w->result_count > 0);
    assert_int_equal(w->result_count, count);
}

/* --- readers and floods -------------------------------------------------------------------------
 */

static void on_read(td_fetch_t *fetch)
{
    atomic_store_explicit((atomic_bool *)fetch->ctx, true, memory_order_release);
}

/* What a reader makes of a block that it was told of some time ago: its own copy, or a miss. */
static bool read_block(world_t *w, uint32_t n, uint32_t block, uint64_t epoch, uint64_t checksum,
                       uint8_t *out)
{
    const td_block_key_t key = key_of(n);
    atomic_bool done = false;
    td_fetch_piece_t piece = {.epoch = epoch, .block = block, .bytes = BLOCK_BYTES};
    td_fetch_t fetch = {.peer = STORE,
                        .deadline_ns = td_now_ns() + TD_NS_PER_S,
                        .complete = on_read,
                        .ctx = &done,
                        .pieces = &piece,
                        .piece_count = 1};
    uint32_t idx = 0;

    assert_int_equal(td_pool_take(w->pool, &idx), TD_OK);
    piece.dest = td_pool_bytes(w->pool, idx);
    assert_int_equal(td_transfer_fetch(w->writer_transfer, &fetch), TD_OK);
    TURN_UNTIL(w, atomic_load_explicit(&done, memory_order_acquire));
    memcpy(out, piece.dest, BLOCK_BYTES);
    td_pool_unref(w->pool, idx);
    return fetch.status == TD_OK &&
           td_block_checksum(td_block_content_hash(out, BLOCK_BYTES), &key, epoch) == checksum;
}

/* F6: space that is given to another block under a slow reader is a miss to it, never other bytes.
 */
static void test_f6_store_space_reused_under_a_slow_reader_is_a_miss(void **state)
{
    world_t *w = *state;
    uint32_t misses = 0;
    uint32_t hits = 0;

    for (uint32_t n = 0; n < 120; n++) {
        uint8_t bytes[BLOCK_BYTES];
        uint32_t block = 0;
        uint64_t epoch = 0;
        uint64_t checksum = 0;
        put_blocks(w, n, 1);
        TURN_UNTIL(w, kvs_client_pinned(w->client) == 0);
        lookup(w, n, 1);
        assert_int_equal(w->found, 1);
        block = w->where[0];
        epoch = w->epochs[0];
        checksum = w->checksums[0];
        /* The lease has no length here: its space goes at once, to whoever comes. */
        change(w, TD_MSG_STORE_REMOVE, 0, n, 1);
        if (n % 3 > 0) {
            put_blocks(w, 1000 + n, 1); /* on its way while the reader reads */
        }
        if (n % 3 == 2) {
            TURN_UNTIL(w, kvs_client_pinned(w->client) == 0); /* or there before it */
        }
        if (read_block(w, n, block, epoch, checksum, bytes)) {
            assert_int_equal(bytes[0], (uint8_t)(n + 1));
            assert_int_equal(bytes[BLOCK_BYTES - 1], (uint8_t)(n + 1));
            hits++;
        } else {
            misses++;
        }
        TURN_UNTIL(w, kvs_client_pinned(w->client) == 0);
    }
    assert_true(misses >= 40); /* by shm those that came too late; by tcp all */
    assert_int_equal(hits + misses, 120);
}

/* I6: a flood of puts is answered, each key once, and holds no more than the store has. */
static void test_i6_store_flood_of_puts_is_answered(void **state)
{
    enum { PUTS = 1000, KEYS = 3 };
    world_t *w = *state;
    td_block_key_t keys[KEYS];
    const uint32_t blocks[KEYS] = {0, 1, 2};
    const uint64_t numbers[KEYS] = {1, 1, 1}; /* of no epoch: nothing will be there to fetch */
    uint32_t sent = 0;

    while (sent < PUTS) {
        td_msg_t msg = {.type = TD_MSG_PUT_START};
        for (uint32_t i = 0; i < KEYS; i++) {
            keys[i] = key_of(100 + sent * KEYS + i);
        }
        msg.u.blocks = (td_msg_blocks_t){.request = 1000000 + sent,
                                         .count = KEYS,
                                         .keys = keys,
                                         .blocks = blocks,
                                         .epochs = numbers,
                                         .checksums = numbers};
        if (td_bus_send(w->writer, "store", &msg) == TD_OK) {
            sent++;
        } else {
            turn(w); /* the writer's own queue is bounded */
        }
    }
    TURN_UNTIL(w, w->puts_refused == PUTS * KEYS);
    assert_int_equal(w->puts_stored, 0);
    put_blocks(w, 0, 2); /* and the store is as it was */
    TURN_UNTIL(w, kvs_client_pinned(w->client) == 0);
    lookup(w, 0, 2);
    assert_int_equal(w->found, 2);
}

static const uint8_t *second_bytes(const world_t *w, uint32_t block)
{
    return td_transfer_memory(w->second_transfer) + (size_t)block * BLOCK_BYTES;
}

static bool second_holds(const world_t *w, uint32_t n)
{
    for (uint32_t b = 0; b < SEGMENT_BLOCKS; b++) {
        if (second_bytes(w, b)[0] == n + 1 && second_bytes(w, b)[BLOCK_BYTES - 1] == n + 1) {
            return true;
        }
    }
    return false;
}

/* The writer's pins end when the last segment has its copy; a segment's death leaves the other's.
 */
static void test_store_replicas_lie_on_two_segments(void **state)
{
    world_t *w = *state;

    put_blocks(w, 0, 3);
    TURN_UNTIL(w, kvs_client_pinned(w->client) == 0);
    for (uint32_t n = 0; n < 3; n++) {
        assert_true(second_holds(w, n));
    }
    assert_int_equal(w->puts_stored, 3);
    lookup(w, 0, 3);
    assert_int_equal(w->found, 3);
    kvs_master_peer_down(w->master, "second", SECOND);
    lookup(w, 0, 3);
    assert_int_equal(w->found, 3);
}

/* A segment that dies before it has stored its copy: the put is good by the other one's. */
static void test_store_put_is_good_with_one_replica(void **state)
{
    world_t *w = *state;

    w->second_frozen = true;
    put_blocks(w, 0, 2);
    TURN_UNTIL(w, (lookup(w, 0, 2), w->found == 2));
    assert_int_equal(kvs_client_pinned(w->client), 2); /* one copy is still to come */
    kvs_master_peer_down(w->master, "second", SECOND);
    TURN_UNTIL(w, kvs_client_pinned(w->client) == 0);
    lookup(w, 0, 2);
    assert_int_equal(w->found, 2);
    assert_false(second_holds(w, 0));
    assert_int_equal(w->puts_stored, 2); /* each key one result, and a good one */
    assert_int_equal(w->puts_refused, 0);
}

static bool metric_says(const world_t *w, const char *text)
{
    td_str_t all = {0};
    bool says = false;

    assert_int_equal(td_metrics_render(w->metrics, &all), TD_OK);
    says = strstr(all.bytes, text) != NULL;
    td_str_fini(&all);
    return says;
}

/* What is read often is copied to another segment, by the segments themselves. */
static void test_store_hot_keys_are_replicated(void **state)
{
    world_t *w = *state;

    w->with_ticks = true;
    TURN_UNTIL(w, kvs_master_is_complete(w->master)); /* copies go only to who is there */
    w->with_ticks = false;
    put_blocks(w, 0, 3);
    TURN_UNTIL(w, kvs_client_pinned(w->client) == 0);
    for (int i = 0; i < 4; i++) {
        lookup(w, 0, 2);
        assert_int_equal(w->found, 2);
    }
    TURN_UNTIL(w, metric_says(w, "hot_replicas_total{change=\"made\"} 2\n"));
    assert_true(second_holds(w, 0) && second_holds(w, 1));
    lookup(w, 0, 3);
    assert_int_equal(w->found, 3);
    assert_false(second_holds(w, 2));
    kvs_master_peer_down(w->master, "store", STORE);
    lookup(w, 0, 3);
    assert_int_equal(w->found, 2); /* the copies live on */
}

static void test_store_hard_pins_survive_any_pressure(void **state)
{
    world_t *w = *state;

    put_blocks(w, 0, 2);
    TURN_UNTIL(w, kvs_client_pinned(w->client) == 0);
    change(w, TD_MSG_STORE_PIN, KVS_PIN_HARD, 1, 2);
    assert_int_equal(w->results[0], TD_OK);
    assert_int_equal(w->results[1], TD_ERR_NOT_FOUND);
    put_one_by_one(w, 2, WRITER_BLOCKS);
    lookup(w, 0, 1);
    assert_int_equal(w->found, 0);
    lookup(w, 1, 1);
    assert_int_equal(w->found, 1);
}

static void test_store_removal_waits_for_readers_and_frees_space(void **state)
{
    world_t *w = *state;
    uint32_t used = 0;

    put_blocks(w, 0, 3);
    TURN_UNTIL(w, kvs_client_pinned(w->client) == 0);
    lookup(w, 0, 1);
    change(w, TD_MSG_STORE_REMOVE, 0, 0, 4);
    assert_int_equal(w->results[0], TD_ERR_BUSY); /* leased */
    assert_int_equal(w->results[1], TD_OK);
    assert_int_equal(w->results[3], TD_ERR_NOT_FOUND);
    lookup(w, 1, 1);
    assert_int_equal(w->found, 0);
    for (uint32_t i = 3; i < 3 + SEGMENT_BLOCKS - 3; i++) { /* all of it but the leased one */
        put_blocks(w, i, 1);
        TURN_UNTIL(w, kvs_client_pinned(w->client) == 0);
        used++;
    }
    assert_int_equal(used, SEGMENT_BLOCKS - 3);
}

/* A prefix loses its end first: without its beginning the rest would be of no use. */
static void test_store_prefixes_are_evicted_from_the_end(void **state)
{
    world_t *w = *state;

    put_blocks(w, 0, 8);
    TURN_UNTIL(w, kvs_client_pinned(w->client) == 0);
    put_one_by_one(w, 8, 22);
    lookup(w, 0, 8);
    assert_in_range(w->found, 1, 7);
}

/* --- cold tier -------------------------------------------------------------------------------- */

/* The last of a series: a segment that began anew declares its own again. */
static uint64_t metric(world_t *w, const char *series)
{
    td_str_t text = {0};
    char line[128];
    uint64_t value = UINT64_MAX;

    (void)snprintf(line, sizeof(line), "\n%s ", series);
    assert_int_equal(td_metrics_render(w->metrics, &text), TD_OK);
    for (const char *at = strstr(text.bytes, line); at != NULL; at = strstr(at + 1, line)) {
        value = strtoull(at + strlen(line), NULL, 10);
    }
    td_str_fini(&text);
    return value;
}

#define COLD_KEYS(w) metric(w, "tandem_kvstore_cold_keys")

/* Until so many are found: on a busy machine the disk may take longer than a lookup waits, and the
 * next one finds what has come since. */
static void lookup_until(world_t *w, uint32_t first, uint32_t count, uint32_t want)
{
    td_block_key_t keys[WRITER_BLOCKS];
    uint64_t until = td_now_ns() + 10 * TD_NS_PER_S;

    for (uint32_t i = 0; i < count; i++) {
        keys[i] = key_of(first + i);
    }
    do {
        int before = w->lookups;
        assert_true(td_now_ns() < until);
        if (kvs_client_lookup(w->client, keys, count, on_lookup, w, 0) == TD_OK) {
            TURN_UNTIL(w, w->lookups > before);
        } else {
            turn(w);
        }
    } while (w->found != want);
}

/* Blocks that gave way come back, with those that did not, as one prefix. */
static void test_store_cold_blocks_come_back(void **state)
{
    world_t *w = *state;

    put_one_by_one(w, 0, 30);
    TURN_UNTIL(w, COLD_KEYS(w) == 12); /* at 18 of 20 one goes for each that comes */
    lookup_until(w, 8, 16, 16);        /* four cold ones, the rest in memory */
    assert_bytes_of(w, 8);
    assert_int_equal(metric(w, "tandem_kvstore_promoted_blocks_total"), 4);
    lookup_until(w, 0, 8, 8);
    assert_bytes_of(w, 0);
}

/* After the segment's end its disk is told of, and read from. */
static void test_store_cold_blocks_survive_the_segment(void **state)
{
    world_t *w = *state;

    put_one_by_one(w, 0, 30);
    TURN_UNTIL(w, COLD_KEYS(w) == 12);
    restart_segment(w);
    assert_int_equal(COLD_KEYS(w), 0); /* until the manifest comes */
    lookup(w, 20, 1);
    assert_int_equal(w->found, 0); /* it was in memory only */
    TURN_UNTIL(w, COLD_KEYS(w) == 12);
    lookup_until(w, 0, 20, 12);
    assert_bytes_of(w, 0);
}

/* A master that mounts a living segment anew: what is in memory stays there, and is found. */
static void test_store_blocks_survive_the_master(void **state)
{
    world_t *w = *state;

    put_one_by_one(w, 0, 10);
    kvs_master_peer_down(w->master, "store", STORE);
    kvs_master_segment_up(w->master, "store", STORE, SEGMENT_BLOCKS);
    TURN_UNTIL(w, kvs_master_is_complete(w->master));
    lookup(w, 0, 12);
    assert_int_equal(w->found, 10);
    assert_bytes_of(w, 0);
    assert_int_equal(COLD_KEYS(w), 0);
}

/* What was removed is gone from the disk too. */
static void test_store_removed_blocks_do_not_come_back(void **state)
{
    world_t *w = *state;
    uint64_t left = 0;

    put_one_by_one(w, 0, 30);
    TURN_UNTIL(w, COLD_KEYS(w) == 12);
    lookup_until(w, 0, 1, 1); /* in memory and on the disk */
    change(w, TD_MSG_STORE_REMOVE, 0, 0, 2);
    assert_int_equal(w->results[0], TD_OK);
    assert_int_equal(w->results[1], TD_OK);
    TURN_UNTIL(w, metric(w, "tandem_kvstore_tier_blocks") == COLD_KEYS(w));
    left = COLD_KEYS(w);
    assert_in_range(left, 10, 12);
    restart_segment(w);
    TURN_UNTIL(w, COLD_KEYS(w) == left);
    lookup(w, 0, 2);
    assert_int_equal(w->found, 0);
    lookup_until(w, 2, 1, 1);
}

/* I3: a block that is damaged on the disk is a miss, and the master hears that it is gone. */
static void test_i3_store_damaged_cold_block_is_a_miss(void **state)
{
    world_t *w = *state;
    char path[96];
    FILE *file = NULL;

    put_one_by_one(w, 0, 30);
    TURN_UNTIL(w, COLD_KEYS(w) == 12);
    (void)snprintf(path, sizeof(path), "%s/tier.data", w->tier_dir);
    file = fopen(path, "r+b");
    assert_non_null(file);
    for (long slot = 0; slot < 12; slot++) {
        assert_int_equal(fseek(file, 4096 + slot * 8192 + 1000, SEEK_SET), 0);
        assert_true(fputc(255, file) == 255);
    }
    assert_int_equal(fclose(file), 0);
    lookup(w, 0, 4);
    assert_int_equal(w->found, 0);
    assert_int_equal(w->lookup_status, TD_ERR_NOT_FOUND);
    TURN_UNTIL(w, metric(w, "tandem_kvstore_tier_gets_total{result=\"corrupt\"}") == 4);
    lookup(w, 0, 4); /* and is not asked for again */
    assert_int_equal(w->found, 0);
    assert_int_equal(metric(w, "tandem_kvstore_tier_gets_total{result=\"miss\"}"), 0);
}

/* A cold tier that does not answer costs a lookup KVS_PROMOTE_MS, for a while; then nothing. */
static void test_i6_store_silent_cold_tier_is_waited_for_briefly(void **state)
{
    world_t *w = *state;
    td_block_key_t keys[2] = {key_of(1), key_of(2)};
    uint64_t hashes[2] = {1, 2};
    td_msg_t msg;
    uint64_t began = 0;

    w->second_frozen = true;
    w->with_ticks = true;
    w->second_mount = take_mount_of_second(w);
    msg = (td_msg_t){.type = TD_MSG_STORE_MANIFEST, .sender_incarnation = SECOND};
    msg.u.blocks = (td_msg_blocks_t){
        .term = 1, .mount = w->second_mount, .count = 2, .keys = keys, .checksums = hashes};
    assert_true(kvs_master_handle(w->master, &msg));
    assert_int_equal(COLD_KEYS(w), 2);
    msg.u.blocks.how = TD_MSG_MANIFEST_RESET; /* of the two only one is left */
    msg.u.blocks.count = 1;
    assert_true(kvs_master_handle(w->master, &msg));
    assert_int_equal(COLD_KEYS(w), 1);
    msg.u.blocks.mount++; /* another mounting's: not heard */
    assert_true(kvs_master_handle(w->master, &msg));
    msg.u.blocks.how = TD_MSG_MANIFEST_GONE;
    assert_true(kvs_master_handle(w->master, &msg));
    assert_int_equal(COLD_KEYS(w), 1);
    began = td_now_ns();
    lookup(w, 1, 2);
    assert_int_equal(w->lookup_status, TD_ERR_NOT_FOUND); /* an answer, in time */
    assert_in_range((td_now_ns() - began) / TD_NS_PER_MS, 45, KVS_LOOKUP_MS);
    assert_int_equal(metric(w, "tandem_kvstore_held_lookups_total{result=\"timeout\"}"), 1);
    while (td_now_ns() - began < (KVS_PROMOTE_ABANDONED_MS + 100) * TD_NS_PER_MS) {
        turn(w);
    }
    began = td_now_ns();
    lookup(w, 1, 2);
    assert_in_range((td_now_ns() - began) / TD_NS_PER_MS, 0, 40);
    assert_int_equal(metric(w, "tandem_kvstore_held_lookups_total{result=\"timeout\"}"), 1);
}

/* --- leadership ------------------------------------------------------------------------------- */

#define IN_SEGMENT(w) metric(w, "tandem_kvstore_kv_blocks{state=\"cached\"}")
#define KNOWN(w) metric(w, "tandem_kvstore_replicas") /* to the master made last */
#define REFUSED_ORDERS(w) metric(w, "tandem_kvstore_old_orders_refused_total")

/* Another process leads, with a higher term; the one before is still there and may not know. */
static void next_leader(world_t *w, uint32_t keys_max, kvs_policy_t policy)
{
    td_msg_peer_t peers[2] = {{.id = "store",
                               .role = TD_ROLE_KVSTORE,
                               .incarnation = STORE,
                               .endpoint = td_bus_endpoint(w->store),
                               .store_master = true,
                               .store_term = 1},
                              {.id = "next",
                               .role = TD_ROLE_KVSTORE,
                               .incarnation = NEXT,
                               .store_master = true,
                               .store_term = 2}};
    td_msg_t msg = {.type = TD_MSG_PEERS};

    w->next_bus = bus_of("next", NEXT);
    peers[1].endpoint = td_bus_endpoint(w->next_bus);
    assert_int_equal(td_bus_connect(w->next_bus, "store", td_bus_endpoint(w->store), STORE), TD_OK);
    assert_int_equal(td_bus_connect(w->next_bus, "writer", td_bus_endpoint(w->writer), WRITER),
                     TD_OK);
    assert_int_equal(td_bus_connect(w->store, "next", td_bus_endpoint(w->next_bus), NEXT), TD_OK);
    w->next_coord = (td_coord_t){.term = 2, .valid_until_ns = UINT64_MAX};
    assert_int_equal(
        kvs_master_create(w->next_bus, w->metrics, keys_max, &policy, &w->next_coord, &w->next),
        TD_OK);
    kvs_master_segment_up(w->next, "store", STORE, SEGMENT_BLOCKS);
    kvs_master_lead(w->next, 2);
    msg.u.peers = (td_msg_peers_t){.version = 2, .count = 2, .peers = peers};
    assert_int_equal(td_bus_send(w->router, "writer", &msg), TD_OK);
    TURN_UNTIL(w, strcmp(td_member_store_master(w->member)->id, "next") == 0);
}

static void ask_put(world_t *w, kvs_master_t *master, uint32_t n)
{
    td_block_key_t key = key_of(n);
    const uint32_t block = 0;
    const uint64_t number = 1;
    const td_msg_t msg = {.type = TD_MSG_PUT_START,
                          .sender_id = "writer",
                          .sender_incarnation = WRITER,
                          .u.blocks = {.request = 1,
                                       .count = 1,
                                       .keys = &key,
                                       .blocks = &block,
                                       .epochs = &number,
                                       .checksums = &number}};
    (void)w;
    assert_true(kvs_master_handle(master, &msg));
}

/* F9: what segments hold is found under the next leader; the one before is refused by them. */
static void test_f9_store_blocks_outlive_the_leader(void **state)
{
    world_t *w = *state;

    put_one_by_one(w, 0, 10);
    next_leader(w, 64, kvs_policy_default());
    TURN_UNTIL(w, kvs_master_is_complete(w->next));
    lookup(w, 0, 12);
    assert_int_equal(w->found, 10);
    assert_bytes_of(w, 0);
    put_blocks(w, 10, 2); /* and it stores on */
    TURN_UNTIL(w, kvs_client_pinned(w->client) == 0);
    lookup(w, 0, 12);
    assert_int_equal(w->found, 12);
    assert_bytes_of(w, 0);
    assert_int_equal(IN_SEGMENT(w), 12);
}

/* F9: two leaders, one of which slept through its end: no order of its is carried out, though it
 * still believes in itself, so no range is ever given out by both. */
static void test_f9_store_orders_of_an_old_leader_are_refused(void **state)
{
    world_t *w = *state;

    put_one_by_one(w, 0, 10);
    next_leader(w, 64, kvs_policy_default());
    TURN_UNTIL(w, kvs_master_is_complete(w->next));
    ask_put(w, w->master, 20);                         /* a store order */
    kvs_master_peer_down(w->master, "writer", WRITER); /* which it takes back: an evict order */
    kvs_master_peer_down(w->master, "store", STORE);
    kvs_master_segment_up(w->master, "store", STORE, SEGMENT_BLOCKS); /* a mounting */
    TURN_UNTIL(w, REFUSED_ORDERS(w) == 3);
    lookup(w, 0, 12);
    assert_int_equal(w->found, 10);
    assert_bytes_of(w, 0);
    assert_int_equal(IN_SEGMENT(w), 10);
    assert_int_equal(KNOWN(w), 10);
}

/* F9: a leader whose time is over gives no order from that moment on, whatever it believes; what it
 * knows still answers lookups. */
static void test_f9_store_overdue_leader_gives_no_orders(void **state)
{
    world_t *w = *state;

    put_one_by_one(w, 0, 10);
    w->with_ticks = true;
    w->coord.valid_until_ns = td_now_ns();
    put_blocks(w, 10, 1);
    TURN_UNTIL(w, kvs_client_pinned(w->client) == 0);
    assert_int_equal(w->puts_refused, 1); /* busy */
    change(w, TD_MSG_STORE_REMOVE, 0, 0, 1);
    assert_int_equal(w->results[0], TD_ERR_BUSY);
    change(w, TD_MSG_STORE_PIN, KVS_PIN_HARD, 0, 1);
    assert_int_equal(w->results[0], TD_ERR_BUSY);
    lookup(w, 0, 12);
    assert_int_equal(w->found, 10);
    assert_int_equal(IN_SEGMENT(w), 10);
    w->coord.valid_until_ns = UINT64_MAX; /* renewed: as if nothing had been */
    put_blocks(w, 11, 1);
    TURN_UNTIL(w, kvs_client_pinned(w->client) == 0);
    lookup(w, 11, 1);
    assert_int_equal(w->found, 1);
}

/* F9: an order that could not be given leaves nothing behind that nobody knows of. */
static void test_f9_store_order_not_given_is_made_up_for(void **state)
{
    world_t *w = *state;

    w->with_ticks = true;
    put_blocks(w, 0, 1);
    TURN_UNTIL(w, kvs_client_pinned(w->client) == 0);
    put_blocks(w, 1, 1);
    TURN_UNTIL(w, KNOWN(w) == 2); /* promised */
    w->coord.valid_until_ns = td_now_ns();
    kvs_master_peer_down(w->master, "writer", WRITER); /* revoked, but who tells the segment? */
    TURN_UNTIL(w, IN_SEGMENT(w) == 2);
    w->coord.valid_until_ns = UINT64_MAX;
    TURN_UNTIL(w, kvs_master_is_complete(w->master) && KNOWN(w) == 2);
    lookup(w, 0, 2);
    assert_int_equal(w->found, 2);
}

/* The next message to the store, which nothing else is done about. */
static void take_in(world_t *w, td_msg_t *msg, td_msg_arena_t **arena)
{
    const uint64_t until = td_now_ns() + 10 * TD_NS_PER_S;

    while (td_bus_recv(w->store, msg, arena) != TD_OK) {
        assert_true(td_now_ns() < until);
        td_bus_flush(w->writer);
        td_bus_wait(w->store, NULL, 0, 1, NULL);
    }
}

/* F9: a put under way when the leader falls ends, on the segment and on the writer. */
static void test_f9_store_put_under_way_ends_with_its_leader(void **state)
{
    world_t *w = *state;
    td_msg_arena_t *arena = NULL;
    td_msg_t msg;

    w->with_ticks = true;
    TURN_UNTIL(w, kvs_master_is_complete(w->master));
    put_blocks(w, 0, 4);
    take_in(w, &msg, &arena);
    assert_true(kvs_master_handle(w->master, &msg)); /* PutStart */
    td_msg_arena_free(arena);
    take_in(w, &msg, &arena);
    assert_int_equal(msg.type, TD_MSG_STORE_ORDER);
    assert_true(kvs_segment_handle(w->segment, &msg)); /* it fetches now */
    msg.type = TD_MSG_MOUNT;
    msg.sender_id = "next";
    msg.u.blocks.term = 2;
    assert_true(kvs_segment_handle(w->segment, &msg));
    td_msg_arena_free(arena);
    next_leader(w, 64, kvs_policy_default());
    TURN_UNTIL(w, kvs_master_is_complete(w->next) && kvs_client_pinned(w->client) == 0);
    TURN_UNTIL(w, metric(w, "tandem_kvstore_kv_blocks{state=\"free\"}") == SEGMENT_BLOCKS);
    assert_int_equal(KNOWN(w), 0);
    {
        td_block_key_t key = key_of(0);
        const uint32_t idx = td_pool_find(w->pool, &key);
        assert_int_equal(kvs_client_put(w->client, &idx, 1), TD_OK); /* and may be put again */
    }
    TURN_UNTIL(w, kvs_client_pinned(w->client) == 0);
    lookup(w, 0, 1);
    assert_int_equal(w->found, 1);
}

/* F9: what a leader's index has no room for, no segment keeps. */
static void test_f9_store_next_leader_with_a_smaller_index(void **state)
{
    world_t *w = *state;

    put_one_by_one(w, 0, 12);
    next_leader(w, 8, kvs_policy_default());
    TURN_UNTIL(w, kvs_master_is_complete(w->next) && IN_SEGMENT(w) == 8);
    assert_int_equal(KNOWN(w), 8);
    lookup(w, 0, 8);
    assert_int_equal(w->found, 8);
    assert_bytes_of(w, 0);
}

/* A prefix under one leader, then more than there is room for under the next. */
static void fill_under_next_leader(world_t *w, uint32_t lease_ms)
{
    kvs_policy_t policy = kvs_policy_default();

    policy.lease_ms = lease_ms;
    put_blocks(w, 0, 8);
    TURN_UNTIL(w, kvs_client_pinned(w->client) == 0);
    next_leader(w, 64, policy);
    TURN_UNTIL(w, kvs_master_is_complete(w->next));
    put_one_by_one(w, 8, 22);
    lookup(w, 21, 1);
    assert_int_equal(w->found, 1);
    lookup(w, 0, 8);
}

/* F9: readers whom the one before told of a block have a lease's time. */
static void test_f9_store_next_leader_evicts_nothing_for_a_lease(void **state)
{
    world_t *w = *state;

    fill_under_next_leader(w, 10000);
    assert_int_equal(w->found, 8);
}

/* F9: then blocks go in the order in which they were stored, of a prefix the end first. */
static void test_f9_store_next_leader_knows_the_order_of_eviction(void **state)
{
    world_t *w = *state;

    fill_under_next_leader(w, 0);
    assert_in_range(w->found, 1, 7);
}

/* F9: what was pinned stays pinned under the next leader. */
static void test_f9_store_pins_outlive_the_leader(void **state)
{
    world_t *w = *state;
    kvs_policy_t policy = kvs_policy_default();

    policy.lease_ms = 0;
    put_one_by_one(w, 0, 3);
    change(w, TD_MSG_STORE_PIN, KVS_PIN_HARD, 0, 2);
    change(w, TD_MSG_STORE_PIN, KVS_PIN_NONE, 0, 1); /* and taken off */
    next_leader(w, 64, policy);
    TURN_UNTIL(w, kvs_master_is_complete(w->next));
    put_one_by_one(w, 3, WRITER_BLOCKS);
    lookup(w, 0, 1);
    assert_int_equal(w->found, 0);
    lookup(w, 1, 1);
    assert_int_equal(w->found, 1);
    lookup(w, 2, 1);
    assert_int_equal(w->found, 0);
}

/* A manifest that was sent before an order took a key away does not bring it back. */
static void test_f9_store_manifest_overtaken_by_an_order(void **state)
{
    world_t *w = *state;
    td_block_key_t keys[2] = {key_of(0), key_of(1)};
    const uint32_t blocks[2] = {3, 4};
    const uint64_t numbers[2] = {5, 6};
    td_msg_t msg;

    w->second_frozen = true;
    put_blocks(w, 0, 1); /* to be on both */
    TURN_UNTIL(w, (lookup(w, 0, 1), w->found == 1));
    kvs_master_peer_down(w->master, "writer", WRITER); /* the second one shall drop it */
    msg = (td_msg_t){.type = TD_MSG_STORE_MANIFEST,
                     .sender_incarnation = SECOND,
                     .u.blocks = {.term = 1,
                                  .mount = take_mount_of_second(w),
                                  .how = TD_MSG_MANIFEST_MEMORY,
                                  .count = 2,
                                  .keys = keys,
                                  .blocks = blocks,
                                  .epochs = numbers,
                                  .checksums = numbers,
                                  .is_last = true}};
    assert_int_equal(KNOWN(w), 1);
    assert_true(kvs_master_handle(w->master, &msg));
    assert_int_equal(KNOWN(w), 2);
    lookup(w, 0, 2);
    assert_int_equal(w->found, 2);
    assert_int_not_equal(w->epochs[0], 5);
    assert_int_equal(w->epochs[1], 6);
}

static void ask_removal(kvs_master_t *master, uint32_t n)
{
    const td_block_key_t key = key_of(n);
    const td_msg_t msg = {.type = TD_MSG_STORE_REMOVE,
                          .sender_id = "writer",
                          .sender_incarnation = WRITER,
                          .u.blocks = {.request = 1, .count = 1, .keys = &key}};
    assert_true(kvs_master_handle(master, &msg));
}

/* I5: a master that was declared dead while it slept goes on with the life before until it hears of
 * it. What it ordered then went nowhere, so in its new life it asks what there is. */
static void test_i5_store_master_woken_after_its_death(void **state)
{
    world_t *w = *state;
    kvs_policy_t policy = kvs_policy_default();

    policy.lease_ms = 0;
    put_one_by_one(w, 0, 10);
    next_leader(w, 64, policy);
    TURN_UNTIL(w, kvs_master_is_complete(w->next));
    td_bus_disconnect(w->store, "next"); /* the segment has heard of its death */
    ask_removal(w->next, 0);
    ask_removal(w->next, 1);
    TURN_UNTIL(w, td_bus_refused(w->store) == 2);
    assert_int_equal(KNOWN(w), 8);
    assert_int_equal(IN_SEGMENT(w), 10);
    td_bus_set_incarnation(w->next_bus, NEXT + 1);
    TURN_UNTIL(w, td_bus_refused(w->store) == 3); /* the segment does not know that life yet */
    assert_int_equal(td_bus_connect(w->store, "next", td_bus_endpoint(w->next_bus), NEXT + 1),
                     TD_OK);
    TURN_UNTIL(w, kvs_master_is_complete(w->next) && IN_SEGMENT(w) == 8);
    assert_int_equal(KNOWN(w), 8);
}

/* Removes a key; the order of it is lost on the way to the segment, or comes after such a loss. */
static void remove_with_loss(world_t *w, uint32_t n, bool comes)
{
    td_msg_arena_t *arena = NULL;
    td_msg_t msg;

    ask_removal(w->master, n);
    take_in(w, &msg, &arena);
    assert_int_equal(msg.type, TD_MSG_EVICT_ORDER);
    msg.gap = true;
    assert_true(!comes || kvs_segment_handle(w->segment, &msg));
    td_msg_arena_free(arena);
}

/* I5: what was lost with a connection is noticed on both ends: a segment has the master mount it
 * again, and so does what the master misses of a segment. */
static void test_i5_store_lost_messages_are_made_up_for(void **state)
{
    world_t *w = *state;
    td_msg_t done = {
        .type = TD_MSG_STORE_DONE, .sender_id = "store", .sender_incarnation = STORE, .gap = true};

    w->with_ticks = true;
    put_one_by_one(w, 0, 10);
    TURN_UNTIL(w, kvs_master_is_complete(w->master));
    remove_with_loss(w, 0, false);
    remove_with_loss(w, 1, true);
    TURN_UNTIL(w, kvs_master_is_complete(w->master) && IN_SEGMENT(w) == 8);
    assert_int_equal(KNOWN(w), 8);
    assert_true(kvs_master_handle(w->master, &done));
    kvs_master_tick(w->master);
    assert_false(kvs_master_is_complete(w->master));
    TURN_UNTIL(w, kvs_master_is_complete(w->master));
    assert_int_equal(KNOWN(w), 8);
    lookup(w, 2, 8);
    assert_int_equal(w->found, 8);
}

/* A removal that a segment has missed does not make it keep what it has for what is put later. */
static void test_store_put_after_a_lost_removal_counts(void **state)
{
    world_t *w = *state;
    const td_block_key_t key = key_of(0);
    uint32_t idx = 0;

    put_one_by_one(w, 0, 1);
    remove_with_loss(w, 0, false);
    idx = td_pool_find(w->pool, &key);
    td_pool_unindex(w->pool, idx);
    assert_int_equal(td_pool_take(w->pool, &idx), TD_OK);
    memset(td_pool_bytes(w->pool, idx), 77, BLOCK_BYTES);
    assert_int_equal(td_pool_index(w->pool, idx, &key,
                                   td_block_content_hash(td_pool_bytes(w->pool, idx), BLOCK_BYTES)),
                     TD_OK);
    assert_int_equal(kvs_client_put(w->client, &idx, 1), TD_OK);
    td_pool_unref(w->pool, idx);
    TURN_UNTIL(w, kvs_client_pinned(w->client) == 0);
    lookup(w, 0, 1);
    assert_int_equal(w->found, 1);
    assert_int_equal(td_transfer_memory(w->store_transfer)[(size_t)w->where[0] * BLOCK_BYTES], 77);
    assert_int_equal(IN_SEGMENT(w), 1);
}

/* Nor does a segment that comes back with a removed block, when its key is on its way in again. */
static void test_store_removed_block_told_while_its_key_is_put(void **state)
{
    world_t *w = *state;
    const td_block_key_t key = key_of(0);
    const uint32_t block = 3;
    const uint64_t number = 5;
    td_msg_arena_t *arena = NULL;
    td_msg_t msg;

    put_one_by_one(w, 0, 1);
    remove_with_loss(w, 0, false);
    kvs_master_peer_down(w->master, "store", STORE);
    kvs_master_segment_up(w->master, "store", STORE, SEGMENT_BLOCKS);
    ask_put(w, w->master, 0);
    assert_int_equal(KNOWN(w), 1);
    take_in(w, &msg, &arena);
    assert_int_equal(msg.type, TD_MSG_MOUNT);
    msg = (td_msg_t){.type = TD_MSG_STORE_MANIFEST,
                     .sender_incarnation = STORE,
                     .u.blocks = {.term = 1,
                                  .mount = msg.u.blocks.mount,
                                  .how = TD_MSG_MANIFEST_MEMORY,
                                  .count = 1,
                                  .keys = &key,
                                  .blocks = &block,
                                  .epochs = &number,
                                  .checksums = &number}};
    td_msg_arena_free(arena);
    assert_true(kvs_master_handle(w->master, &msg));
    assert_int_equal(KNOWN(w), 0);
}

/* A segment that is silent in the middle of what it tells is mounted again. */
static void test_store_broken_off_manifest_begins_again(void **state)
{
    world_t *w = *state;
    td_msg_t msg;
    uint64_t mount = 0;

    w->with_ticks = true;
    w->second_frozen = true;
    mount = take_mount_of_second(w);
    msg = (td_msg_t){.type = TD_MSG_STORE_MANIFEST,
                     .sender_incarnation = SECOND,
                     .u.blocks = {.term = 1, .mount = mount, .how = TD_MSG_MANIFEST_MEMORY}};
    assert_true(kvs_master_handle(w->master, &msg)); /* the rest is lost */
    while (take_mount_of_second(w) == mount) {
    }
    w->second_frozen = false;
    TURN_UNTIL(w, kvs_master_is_complete(w->master));
}

static int setup_two_default(void **state)
{
    return setup_two(state, kvs_policy_default());
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_store_put_then_lookup_finds_the_longest_prefix, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_store_holds_the_writers_bytes, setup, teardown),
        cmocka_unit_test_setup_teardown(test_store_second_put_of_a_key_stores_nothing, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_i3_store_revokes_a_block_whose_bytes_changed, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_f7_dead_writers_keys_are_revoked, setup, teardown),
        cmocka_unit_test_setup_teardown(test_f7_keys_without_a_result_are_revoked, setup, teardown),
        cmocka_unit_test_setup_teardown(test_f8_full_segment_evicts_and_takes_new_blocks, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_f8_segment_without_a_free_block_takes_new_ones, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_store_blocks_offered_again_evict_nothing, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_f8_full_index_evicts_and_takes_new_keys,
                                        setup_small_index, teardown),
        cmocka_unit_test_setup_teardown(test_store_segment_mounted_again_keeps_its_blocks,
                                        setup_no_lease, teardown),
        cmocka_unit_test_setup_teardown(test_store_dead_segment_ends_the_writers_pins, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_store_new_life_of_the_writer_ends_its_pins, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_store_lease_blocks_eviction, setup, teardown),
        cmocka_unit_test_setup_teardown(
            test_store_silent_master_is_a_timeout_and_a_dead_one_ends_pins, setup, teardown),
        cmocka_unit_test_setup_teardown(test_f6_store_space_reused_under_a_slow_reader_is_a_miss,
                                        setup_no_lease, teardown),
        cmocka_unit_test_setup_teardown(test_i6_store_flood_of_puts_is_answered, setup, teardown),
        cmocka_unit_test_setup_teardown(test_store_replicas_lie_on_two_segments, setup_two_replicas,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_store_put_is_good_with_one_replica, setup_two_replicas,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_store_hot_keys_are_replicated, setup_hot, teardown),
        cmocka_unit_test_setup_teardown(test_store_hard_pins_survive_any_pressure, setup_no_lease,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_store_removal_waits_for_readers_and_frees_space, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_store_prefixes_are_evicted_from_the_end,
                                        setup_no_lease, teardown),
        cmocka_unit_test_setup_teardown(test_store_slow_master_is_waited_for_once, setup, teardown),
        cmocka_unit_test_setup_teardown(test_store_slow_offers_pins_yield_to_who_needs_blocks,
                                        setup, teardown),
        cmocka_unit_test_setup_teardown(test_store_cold_blocks_come_back, setup_tier, teardown),
        cmocka_unit_test_setup_teardown(test_store_cold_blocks_survive_the_segment, setup_tier,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_store_blocks_survive_the_master, setup_tier, teardown),
        cmocka_unit_test_setup_teardown(test_store_removed_blocks_do_not_come_back, setup_tier,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_i3_store_damaged_cold_block_is_a_miss, setup_tier,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_i6_store_silent_cold_tier_is_waited_for_briefly,
                                        setup_two_default, teardown),
        cmocka_unit_test_setup_teardown(test_f9_store_blocks_outlive_the_leader, setup, teardown),
        cmocka_unit_test_setup_teardown(test_f9_store_orders_of_an_old_leader_are_refused, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_f9_store_overdue_leader_gives_no_orders, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_f9_store_order_not_given_is_made_up_for, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_f9_store_put_under_way_ends_with_its_leader, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_f9_store_next_leader_with_a_smaller_index, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_f9_store_next_leader_evicts_nothing_for_a_lease, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_f9_store_next_leader_knows_the_order_of_eviction,
                                        setup, teardown),
        cmocka_unit_test_setup_teardown(test_f9_store_pins_outlive_the_leader, setup_no_lease,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_i5_store_master_woken_after_its_death, setup_no_lease,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_i5_store_lost_messages_are_made_up_for, setup_no_lease,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_store_put_after_a_lost_removal_counts, setup_no_lease,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_store_removed_block_told_while_its_key_is_put,
                                        setup_no_lease, teardown),
        cmocka_unit_test_setup_teardown(test_store_broken_off_manifest_begins_again,
                                        setup_two_default, teardown),
        cmocka_unit_test_setup_teardown(test_f9_store_manifest_overtaken_by_an_order,
                                        setup_two_replicas, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

/* tandem-bench store - the store as a node sees it: putting blocks, looking them up, reading them.
 *
 * The store, master and segment, is a process of its own, forked before UCX is touched; this one is
 * the node, and plays the router as far as telling the node who the store's master is. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/transfer/td_transfer.h"
#include "common/wire/td_member.h"
#include "kvstore/kvs_client.h"
#include "kvstore/kvs_master.h"
#include "kvstore/kvs_segment.h"
#include "tests/bench/bench.h"
#include "tests/bench/bench_fork.h"
#include "tests/bench/bench_options.h"
#include "tests/bench/bench_reader.h"
#include "tests/bench/bench_recovery.h"

#define STORE_NODE 1u /* incarnations */
#define STORE_STORE 2u
#define STORE_ROUTER 3u
#define STORE_TEXT_BYTES 256u
#define STORE_ADDRESS_BYTES_MAX 65536u
#define STORE_POOL_BYTES_MAX ((size_t)1 << 34)
#define STORE_LOOKUP_KEYS 512u
#define STORE_LOOKUPS 400u /* of a sample */
#define STORE_LOOKUPS_OPEN 8u
#define STORE_ROUNDS 4u /* that the store has room for */
#define STORE_WAIT_NS (60 * TD_NS_PER_S)
#define STORE_RECOVERED_BLOCKS 100000u

typedef struct store_options {
    const char *carrier;
    uint32_t block_bytes;
    uint32_t blocks;
    uint32_t batch;
    uint32_t repeat;
    bool json;
} store_options_t;

/* What one process tells the other. */
typedef struct hello {
    char endpoint[STORE_TEXT_BYTES];
    uint64_t base;
    uint32_t address_bytes;
    uint32_t rkey_bytes;
    uint8_t address[STORE_ADDRESS_BYTES_MAX];
    uint8_t rkey[STORE_ADDRESS_BYTES_MAX];
} hello_t;

static const uint8_t secret[TD_CLUSTER_SECRET_BYTES] = {3};

static void print_help(void)
{
    (void)puts("Usage: tandem-bench store [options]\n"
               "\n"
               "Starts a store (master and segment, one process) and measures, as a node: putting\n"
               "distinct blocks in batches until each is readable there, reading them (look up,\n"
               "fetch, checksum; two batches at a time), and looking up keys in batches of 512, "
               "eight at a time.\n"
               "Each figure is the best of the repeats. Then, with processes of their own, how\n"
               "long a new leader takes until it knows 100,000 blocks (the median).\n"
               "\n"
               "Options:\n"
               "  --carrier C   auto, tcp or shm; default auto\n"
               "  --size B      bytes of a block, default 1048576\n"
               "  --blocks N    default 256\n"
               "  --batch N     blocks of a put and of a read, default 16\n"
               "  --repeat N    default 5\n"
               "  --json        one JSON object instead of a table\n"
               "  --help        this text");
}

/* --- meeting ---------------------------------------------------------------------------------- */

static td_bus_t *open_bus(const char *id, uint64_t incarnation)
{
    const td_bus_config_t config = {
        .bind = "tcp://127.0.0.1:*", .id = id, .incarnation = incarnation, .secret = secret};
    td_bus_t *bus = NULL;
    return td_bus_create(&config, &bus) == TD_OK ? bus : NULL;
}

static td_transfer_t *open_transfer(const store_options_t *o, uint64_t incarnation,
                                    uint32_t block_count)
{
    const td_transfer_config_t config = {
        .block_count = block_count, .block_bytes = o->block_bytes, .incarnation = incarnation};
    td_transfer_t *transfer = NULL;

    if (strcmp(o->carrier, "tcp") == 0) {
        (void)setenv("UCX_TLS", "tcp", 1);
    } else if (strcmp(o->carrier, "shm") == 0) {
        (void)setenv("UCX_TLS", "tcp,posix,sysv", 1);
    } /* auto: what a node would choose */
    return td_transfer_create(&config, &transfer) == TD_OK ? transfer : NULL;
}

/* Exchanges addresses: each end tells, then hears. */
static bool meet(int socket, td_bus_t *bus, const char *peer_id, uint64_t peer_incarnation,
                 td_transfer_t *transfer, const td_transfer_peer_t *shape)
{
    hello_t *hello = td_calloc(1, sizeof(*hello));
    const void *address = NULL;
    const void *rkey = NULL;
    size_t address_len = 0;
    size_t rkey_len = 0;
    td_transfer_peer_t peer = *shape;
    bool ok = hello != NULL;

    if (ok) {
        td_transfer_address(transfer, &address, &address_len, &rkey, &rkey_len, &hello->base);
        ok = address_len <= STORE_ADDRESS_BYTES_MAX && rkey_len <= STORE_ADDRESS_BYTES_MAX;
    }
    if (ok) {
        (void)snprintf(hello->endpoint, sizeof(hello->endpoint), "%s", td_bus_endpoint(bus));
        memcpy(hello->address, address, address_len);
        memcpy(hello->rkey, rkey, rkey_len);
        hello->address_bytes = (uint32_t)address_len;
        hello->rkey_bytes = (uint32_t)rkey_len;
        ok = bench_send_all(socket, hello, sizeof(*hello)) &&
             bench_receive_all(socket, hello, sizeof(*hello));
    }
    if (ok) {
        peer.incarnation = peer_incarnation;
        peer.address = hello->address;
        peer.address_len = hello->address_bytes;
        peer.rkey = hello->rkey;
        peer.rkey_len = hello->rkey_bytes;
        peer.base = hello->base;
        ok = td_bus_connect(bus, peer_id, hello->endpoint, peer_incarnation) == TD_OK &&
             td_transfer_peer_add(transfer, &peer) == TD_OK;
    }
    td_free(hello);
    return ok;
}

/* --- the store's process ---------------------------------------------------------------------- */

/* Serves until the node has gone. There is room for some rounds; then the oldest is evicted, which
 * no lease shall hold up. */
static bool serve_store(const store_options_t *o, int socket)
{
    kvs_policy_t policy = kvs_policy_default();
    const uint32_t block_count = STORE_ROUNDS * o->blocks;
    const td_transfer_peer_t shape = {.block_count = o->blocks, .block_bytes = o->block_bytes};
    const td_coord_config_t alone = {.cluster = "bench", .election = "store-master", .id = "store"};
    td_coord_t *coord = NULL;
    td_metrics_t *metrics = NULL;
    kvs_master_t *master = NULL;
    kvs_segment_t *segment = NULL;
    td_transfer_t *transfer = open_transfer(o, STORE_STORE, block_count);
    td_bus_t *bus = open_bus("store", STORE_STORE);
    bool ok = true;

    policy.lease_ms = 0;
    policy.evict_percent = 100 / STORE_ROUNDS;
    ok = transfer != NULL && bus != NULL && td_metrics_create(&metrics) == TD_OK &&
         td_coord_create(&alone, &coord) == TD_OK &&
         kvs_master_create(bus, metrics, 4 * block_count, &policy, coord, &master) == TD_OK &&
         kvs_segment_create(bus, transfer, metrics, block_count, o->block_bytes, &segment) ==
             TD_OK &&
         meet(socket, bus, "node", STORE_NODE, transfer, &shape) &&
         td_bus_connect(bus, "store", td_bus_endpoint(bus), STORE_STORE) == TD_OK;

    if (ok) {
        td_coord_campaign(coord);
        kvs_master_lead(master, td_coord_term(coord));
        kvs_master_segment_up(master, "store", STORE_STORE, block_count);
    }
    for (bool here = ok; here;) {
        const int fds[2] = {kvs_segment_fd(segment), socket};
        bool readable[2] = {false, false};
        td_msg_arena_t *arena = NULL;
        td_msg_t msg;
        td_bus_wait(bus, fds, 2, 100, readable);
        while (td_bus_recv(bus, &msg, &arena) == TD_OK) {
            (void)(kvs_master_handle(master, &msg) || kvs_segment_handle(segment, &msg));
            td_msg_arena_free(arena);
        }
        kvs_segment_completions(segment);
        kvs_segment_tick(segment);
        kvs_master_tick(master);
        here = !readable[1]; /* it says nothing but that it has gone */
    }
    if (transfer != NULL) {
        td_transfer_destroy(transfer);
    }
    kvs_segment_destroy(segment);
    kvs_master_destroy(master);
    td_coord_destroy(coord);
    if (bus != NULL) {
        td_bus_destroy(bus);
    }
    td_metrics_destroy(metrics);
    return ok;
}

/* --- the node's process ----------------------------------------------------------------------- */

typedef struct node {
    const store_options_t *options;
    td_bus_t *router; /* played */
    td_bus_t *bus;
    td_transfer_t *transfer;
    td_member_t *member;
    td_pool_t *pool;
    kvs_client_t *client;
    uint32_t *blocks; /* owned; [blocks]: those put, cached in the pool */
    uint32_t round;
    uint32_t lookups_open;
    uint64_t keys_found;
    bool failed;
    td_block_key_t *keys; /* owned; [blocks]: to read */
    bench_reader_t *reader;
} node_t;

static void turn(node_t *n, uint32_t timeout_ms)
{
    const td_msg_heartbeat_t load = {0};
    const int fd = n->reader == NULL ? -1 : bench_reader_fd(n->reader);
    bool readable = false;
    td_msg_arena_t *arena = NULL;
    td_msg_t msg;

    td_bus_wait(n->bus, &fd, n->reader == NULL ? 0 : 1, timeout_ms, &readable);
    while (td_bus_recv(n->bus, &msg, &arena) == TD_OK) {
        if (!td_member_handle(n->member, &msg)) {
            (void)kvs_client_handle(n->client, &msg);
        }
        td_msg_arena_free(arena);
    }
    while (td_bus_recv(n->router, &msg, &arena) == TD_OK) {
        td_msg_arena_free(arena);
    }
    kvs_client_tick(n->client);
    td_member_tick(n->member, &load);
}

/* Tells the node that the store is its master; its endpoint it knows. */
static bool join(node_t *n)
{
    const td_member_events_t events = {0};
    const td_msg_register_t self = {
        .self = {.id = "node", .role = TD_ROLE_PREFILL, .endpoint = td_bus_endpoint(n->bus)},
        .http = "",
        .numerics_class = "",
        .version = ""};
    td_msg_t registered = {.type = TD_MSG_REGISTERED,
                           .u.registered = {.accepted = true, .error = ""}};
    td_msg_t peers = {.type = TD_MSG_PEERS};
    const td_msg_peer_t store = {.id = "store",
                                 .role = TD_ROLE_KVSTORE,
                                 .incarnation = STORE_STORE,
                                 .endpoint = "tcp://127.0.0.1:1",
                                 .store_master = true};
    const uint64_t until = td_now_ns() + STORE_WAIT_NS;

    peers.u.peers = (td_msg_peers_t){.version = 1, .count = 1, .peers = &store};
    if (td_member_create(n->bus, td_bus_endpoint(n->router), &self, &events, &n->member) != TD_OK ||
        td_bus_connect(n->router, "node", td_bus_endpoint(n->bus), STORE_NODE) != TD_OK ||
        kvs_client_create(n->bus, n->member, n->pool, &n->client) != TD_OK ||
        td_bus_send(n->router, "node", &registered) != TD_OK ||
        td_bus_send(n->router, "node", &peers) != TD_OK) {
        return false;
    }
    while (td_member_store_master(n->member) == NULL && td_now_ns() < until) {
        td_bus_wait(n->router, NULL, 0, 0, NULL);
        turn(n, 1);
    }
    return td_member_store_master(n->member) != NULL;
}

static td_block_key_t key_of(uint32_t round, uint32_t i)
{
    td_block_key_t key = {{0}};
    const uint32_t name[2] = {i * 2654435761u, round + 1}; /* the index hashes the first bytes */
    memcpy(key.bytes, name, sizeof(name));
    memcpy(key.bytes + sizeof(name), &i, sizeof(i));
    return key;
}

/* Names the same blocks anew: what is put is distinct from all that was. */
static bool name_blocks(node_t *n)
{
    n->round++;
    for (uint32_t i = 0; i < n->options->blocks; i++) {
        const td_block_key_t key = key_of(n->round, i);
        uint8_t *bytes = NULL;
        if (n->round > 1) {
            td_pool_unindex(n->pool, n->blocks[i]);
            td_pool_unref(n->pool, n->blocks[i]);
        }
        if (td_pool_take(n->pool, &n->blocks[i]) != TD_OK) {
            return false;
        }
        bytes = td_pool_bytes(n->pool, n->blocks[i]);
        memset(bytes, (int)(i + n->round), n->options->block_bytes);
        if (td_pool_index(n->pool, n->blocks[i], &key,
                          td_block_content_hash(bytes, n->options->block_bytes)) != TD_OK) {
            return false;
        }
    }
    return true;
}

/* Until every block is readable in the store. */
static bool put_all(node_t *n, uint64_t *best_ns)
{
    const store_options_t *o = n->options;
    const uint64_t begin_ns = td_now_ns();
    uint32_t at = 0;

    while (at < o->blocks || kvs_client_pinned(n->client) > 0) {
        const uint32_t count = TD_MIN(o->batch, o->blocks - at);
        if (td_now_ns() - begin_ns > STORE_WAIT_NS) {
            (void)bench_usage_error("the store does not take the blocks");
            return false;
        }
        if (at < o->blocks && kvs_client_put(n->client, n->blocks + at, count) == TD_OK) {
            at += count;
            turn(n, 0);
        } else {
            turn(n, 1);
        }
    }
    *best_ns = TD_MIN(*best_ns, td_now_ns() - begin_ns);
    return true;
}

static void on_found(void *ctx, uint64_t tag, td_status_t status,
                     const td_msg_lookup_result_t *found)
{
    node_t *n = ctx;
    (void)tag;
    (void)status;

    n->lookups_open--;
    n->keys_found += found != NULL ? found->count : 0;
}

/* All blocks, into the memory behind the node's own. */
static bool read_all(node_t *n, uint64_t *best_ns)
{
    const store_options_t *o = n->options;
    const uint64_t begin_ns = td_now_ns();
    td_status_t status = TD_OK;

    for (uint32_t i = 0; i < o->blocks; i++) {
        n->keys[i] = key_of(n->round, i);
    }
    bench_reader_begin(n->reader, n->keys, o->blocks);
    while ((status = bench_reader_step(n->reader)) == TD_INPROGRESS) {
        turn(n, 1);
    }
    if (status != TD_OK) {
        (void)bench_usage_error("a block came wrong, or not at all: %s", td_status_name(status));
        return false;
    }
    *best_ns = TD_MIN(*best_ns, td_now_ns() - begin_ns);
    return true;
}

/* Prefixes of the stored keys, or keys that nobody has put: a miss is answered at the first. */
static bool look_up(node_t *n, bool stored, uint64_t *best_ns)
{
    static td_block_key_t keys[STORE_LOOKUP_KEYS];
    const uint64_t begin_ns = td_now_ns();
    uint32_t sent = 0;

    for (uint32_t i = 0; i < STORE_LOOKUP_KEYS; i++) {
        keys[i] = key_of(stored ? n->round : UINT32_MAX - 1, i % n->options->blocks);
    }
    n->keys_found = 0;
    while (sent < STORE_LOOKUPS || n->lookups_open > 0) {
        while (sent < STORE_LOOKUPS && n->lookups_open < STORE_LOOKUPS_OPEN &&
               kvs_client_lookup(n->client, keys, STORE_LOOKUP_KEYS, on_found, n, 0) == TD_OK) {
            sent++;
            n->lookups_open++;
        }
        if (td_now_ns() - begin_ns > STORE_WAIT_NS) {
            (void)bench_usage_error("the store does not answer");
            return false;
        }
        turn(n, 1);
    }
    *best_ns = TD_MIN(*best_ns, td_now_ns() - begin_ns);
    return !stored || n->keys_found == (uint64_t)STORE_LOOKUPS * STORE_LOOKUP_KEYS;
}

static bool measure(node_t *n, json_t *figures)
{
    const store_options_t *o = n->options;
    const double bytes = (double)o->blocks * o->block_bytes;
    const double keys = (double)STORE_LOOKUPS * STORE_LOOKUP_KEYS;
    uint64_t put_ns = UINT64_MAX;
    uint64_t get_ns = UINT64_MAX;
    uint64_t lookup_ns = UINT64_MAX;

    for (uint32_t r = 0; r < o->repeat; r++) {
        if (!name_blocks(n) || !put_all(n, &put_ns) || !read_all(n, &get_ns) ||
            !look_up(n, true, &lookup_ns)) {
            return false;
        }
        (void)fprintf(stderr, "tandem-bench: %u/%u: put %.2f GB/s, get %.2f GB/s\n", r + 1,
                      o->repeat, bytes / (double)put_ns, bytes / (double)get_ns);
    }
    (void)json_object_set_new(figures, "put_gb_s", json_real(bytes / (double)put_ns));
    (void)json_object_set_new(figures, "get_gb_s", json_real(bytes / (double)get_ns));
    (void)json_object_set_new(figures, "put_ops_s", json_real(o->blocks * 1e9 / (double)put_ns));
    (void)json_object_set_new(figures, "get_ops_s", json_real(o->blocks * 1e9 / (double)get_ns));
    (void)json_object_set_new(figures, "lookup_keys_s", json_real(keys * 1e9 / (double)lookup_ns));
    return true;
}

static bool open_reader(node_t *n)
{
    const store_options_t *o = n->options;
    const bench_reader_config_t config = {.client = n->client,
                                          .transfer = n->transfer,
                                          .segment = STORE_STORE,
                                          .batch = o->batch,
                                          .block_bytes = o->block_bytes,
                                          .into = td_transfer_memory(n->transfer) +
                                                  (size_t)o->blocks * o->block_bytes};

    return bench_reader_create(&config, &n->reader) == TD_OK;
}

static bool use_store(const store_options_t *o, int socket, json_t *figures)
{
    /* Read into memory of its own: no block is copied onto itself. */
    const uint32_t block_count = o->blocks + BENCH_READER_DEPTH * o->batch;
    const td_transfer_peer_t shape = {.block_count = STORE_ROUNDS * o->blocks,
                                      .block_bytes = o->block_bytes};
    node_t n = {.options = o};
    bool ok = false;

    n.transfer = open_transfer(o, STORE_NODE, block_count);
    n.router = open_bus("router", STORE_ROUTER);
    n.bus = open_bus("node", STORE_NODE);
    n.blocks = td_calloc(o->blocks, sizeof(*n.blocks));
    n.keys = td_calloc(o->blocks, sizeof(*n.keys));
    ok =
        n.transfer != NULL && n.router != NULL && n.bus != NULL && n.blocks != NULL &&
        n.keys != NULL &&
        td_pool_create(td_transfer_memory(n.transfer), o->blocks, o->block_bytes, &n.pool) == TD_OK;
    if (ok) {
        td_transfer_set_pool(n.transfer, n.pool);
        ok = join(&n) && meet(socket, n.bus, "store", STORE_STORE, n.transfer, &shape) &&
             open_reader(&n) && measure(&n, figures);
    }
    if (n.transfer != NULL) {
        td_transfer_destroy(n.transfer);
    }
    bench_reader_destroy(n.reader);
    kvs_client_destroy(n.client);
    for (uint32_t i = 0; n.round > 0 && i < o->blocks; i++) {
        td_pool_unref(n.pool, n.blocks[i]);
    }
    td_pool_destroy(n.pool);
    td_member_destroy(n.member);
    if (n.bus != NULL) {
        td_bus_destroy(n.bus);
    }
    if (n.router != NULL) {
        td_bus_destroy(n.router);
    }
    td_free(n.keys);
    td_free(n.blocks);
    return ok;
}

/* --- options ---------------------------------------------------------------------------------- */

static bool parse_carrier(char *text, void *out)
{
    if (strcmp(text, "auto") != 0 && strcmp(text, "tcp") != 0 && strcmp(text, "shm") != 0) {
        (void)bench_usage_error("--carrier wants auto, tcp or shm, not \"%s\"", text);
        return false;
    }
    *(const char **)out = text;
    return true;
}

static int parse_options(int argc, char **argv, store_options_t *o)
{
    const bench_option_t options[] = {
        {.name = "carrier", .kind = BENCH_OWN, .out = &o->carrier, .parse = parse_carrier},
        {.name = "size", .kind = BENCH_NUMBER, .out = &o->block_bytes, .min = 64, .max = 1u << 30},
        {.name = "blocks",
         .kind = BENCH_NUMBER,
         .out = &o->blocks,
         .min = 1,
         .max = TD_TRANSFER_PIECES_MAX},
        {.name = "batch",
         .kind = BENCH_NUMBER,
         .out = &o->batch,
         .min = 1,
         .max = KVS_PUT_BLOCKS_MAX},
        BENCH_REPEAT_OPTION(&o->repeat),
        BENCH_JSON_OPTION(&o->json),
    };
    size_t bytes = 0;
    int rc = bench_parse_options(argc, argv, "store", print_help, options, TD_ARRAY_LEN(options));

    if (rc != BENCH_EXIT_OK) {
        return rc;
    }
    o->batch = TD_MIN(o->batch, o->blocks);
    if (!td_size_mul((1 + STORE_ROUNDS) * (size_t)o->blocks + BENCH_READER_DEPTH * o->batch,
                     o->block_bytes, &bytes) ||
        bytes > STORE_POOL_BYTES_MAX) {
        return bench_usage_error("--size times five times --blocks is more than %zu bytes",
                                 STORE_POOL_BYTES_MAX);
    }
    return BENCH_EXIT_OK;
}

int bench_store(int argc, char **argv)
{
    store_options_t o = {
        .carrier = "auto", .block_bytes = 1u << 20, .blocks = 256, .batch = 16, .repeat = 5};
    int pair[2] = {-1, -1};
    pid_t store = -1;
    double recovery_s = 0;
    json_t *figures = NULL;
    bool ok = false;
    int rc = parse_options(argc, argv, &o);

    if (rc != BENCH_EXIT_OK) {
        return rc < 0 ? BENCH_EXIT_OK : rc;
    }
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0 ||
        !bench_recovery(STORE_RECOVERED_BLOCKS, TD_MIN(o.repeat, 5u), &recovery_s)) {
        return BENCH_EXIT_FAILED;
    }
    store = bench_fork();
    if (store == 0) {
        (void)close(pair[0]);
        exit(serve_store(&o, pair[1]) ? BENCH_EXIT_OK : BENCH_EXIT_FAILED);
    }
    (void)close(pair[1]);
    figures = json_object();
    ok = store > 0 && figures != NULL && use_store(&o, pair[0], figures);
    (void)close(pair[0]);
    ok = bench_ended_well(store) && ok &&
         json_object_set_new(figures, "recovery_100k_s", json_real(recovery_s)) == 0;
    if (ok) {
        bench_print_figures(figures, o.json);
    }
    json_decref(figures);
    return ok ? BENCH_EXIT_OK : BENCH_EXIT_FAILED;
}

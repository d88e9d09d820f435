/* store_worker - one of many clients of a store whose histories test_histories.py compares.
 *
 * Joins a cluster as a prefill node that computes nothing. It puts, looks up, reads and removes
 * keys that all workers share, in an order that its seed gives. A block's bytes are made from the
 * key and from a content number that is written only once; so a block that was read tells which put
 * it comes from, and whether every byte of it does. Each step is a line of the history file, with
 * begin and end in ns of the machine's monotonic clock, written before the next step begins:
 *
 *     put KEY CONTENT BEGIN          before it is offered
 *     end CONTENT END                nothing of it is pinned any more
 *     read KEY CONTENT BEGIN END     what was read, after its checksum was found right
 *     miss KEY BEGIN END             looked up in vain, or not the block that was announced
 *     remove KEY STATUS BEGIN END    the store's answer
 *     wrong KEY CONTENT BEGIN END    a checksum was right over bytes that nobody wrote
 *     lives COUNT                    at the end: blocks of the pool that are still held
 */
#include <fcntl.h>
#include <inttypes.h>
#include <sched.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/base/td_log.h"
#include "common/kv/td_block_key.h"
#include "common/wire/td_proc.h"
#include "tests/bench/bench_node.h"

#define RUN_MAX 8u /* keys of one step */
#define POOL_BLOCKS (4u * RUN_MAX)
#define KEYS_MAX 65536u
#define REMOVE_WAIT_NS (2 * TD_NS_PER_S)
#define READ_WAIT_NS (2 * TD_NS_PER_S)

typedef struct worker {
    td_proc_t proc;
    bench_node_t node;
    int history;
    uint64_t random;
    uint32_t keys;
    uint32_t block_bytes;
    bool stopping;
    /* of the step under way */
    uint64_t begin_ns;
    bool looked_up;
    uint32_t found;
    td_fetch_piece_t pieces[RUN_MAX];
    uint64_t sums[RUN_MAX];
    uint64_t peers[RUN_MAX]; /* incarnations of the segments */
    uint64_t remove_request; /* 0 = answered */
    uint32_t removed;
    td_status_t statuses[RUN_MAX];
} worker_t;

static const td_option_t options[] = {
    TD_PROC_OPTIONS,
    {"router", TD_OPTION_TEXT, NULL, "ZeroMQ endpoint of the router"},
    {"model", TD_OPTION_TEXT, NULL, "the cluster's GGUF file"},
    {"numerics", TD_OPTION_TEXT, "", "the cluster's numerics class"},
    {"kv-codec", TD_OPTION_TEXT, "f16", "the cluster's KV codec"},
    {"block-bytes", TD_OPTION_COUNT, "368640", "the cluster's", 64, UINT32_MAX},
    {"keys", TD_OPTION_COUNT, "64", "keys that all workers use", RUN_MAX, KEYS_MAX},
    {"seed", TD_OPTION_COUNT, "1", "of the order of steps"},
    {"history", TD_OPTION_TEXT, NULL, "file that steps are appended to"},
};

static uint64_t mix(uint64_t *state) /* splitmix64 */
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static uint32_t below(worker_t *w, uint32_t limit)
{
    return (uint32_t)(mix(&w->random) % limit);
}

static td_block_key_t key_of(uint32_t i)
{
    td_block_key_t key = {{0}};
    uint64_t state = i;

    for (size_t at = 0; at < sizeof(key.bytes); at += sizeof(state)) {
        const uint64_t word = mix(&state);
        memcpy(key.bytes + at, &word, TD_MIN(sizeof(word), sizeof(key.bytes) - at));
    }
    return key;
}

static void fill(uint8_t *bytes, size_t len, uint32_t key, uint64_t content)
{
    uint64_t state = content ^ ((uint64_t)key << 40);

    memcpy(bytes, &content, sizeof(content));
    for (size_t at = sizeof(content); at + sizeof(uint64_t) <= len; at += sizeof(uint64_t)) {
        const uint64_t word = mix(&state);
        memcpy(bytes + at, &word, sizeof(word));
    }
}

static bool is_filled(const uint8_t *bytes, size_t len, uint32_t key, uint64_t content)
{
    uint64_t state = content ^ ((uint64_t)key << 40);
    bool same = true;

    for (size_t at = sizeof(content); at + sizeof(uint64_t) <= len; at += sizeof(uint64_t)) {
        const uint64_t word = mix(&state);
        same = memcmp(bytes + at, &word, sizeof(word)) == 0 && same;
    }
    return same;
}

__attribute__((format(printf, 2, 3))) static void record(worker_t *w, const char *fmt, ...)
{
    char line[160];
    va_list args;
    int len = 0;

    va_start(args, fmt);
    len = vsnprintf(line, sizeof(line) - 1, fmt, args);
    va_end(args);
    line[len++] = '\n';
    if (write(w->history, line, (size_t)len) != len) { /* whole, or a later kill leaves half */
        TD_LOG_ERROR("history not written", "bytes=%d", len);
        exit(1);
    }
}

/* --- the loop --------------------------------------------------------------------------------- */

static void handle(worker_t *w, const td_msg_t *msg)
{
    if (msg->type == TD_MSG_STORE_RESULT) {
        if (w->remove_request != 0 && msg->u.blocks.request == w->remove_request) {
            w->removed = TD_MIN(msg->u.blocks.count, RUN_MAX);
            memcpy(w->statuses, msg->u.blocks.statuses, w->removed * sizeof(*w->statuses));
            w->remove_request = 0;
        }
    } else {
        (void)bench_node_handle(&w->node, msg);
    }
}

static void turn(worker_t *w)
{
    const int fds[1] = {w->proc.signal_fd};
    bool readable[1] = {false};
    td_msg_arena_t *arena = NULL;
    td_msg_t msg;

    td_bus_wait(w->proc.bus, fds, w->stopping ? 0 : 1, 1, readable);
    w->stopping = w->stopping || readable[0];
    while (td_bus_recv(w->proc.bus, &msg, &arena) == TD_OK) {
        handle(w, &msg);
        td_msg_arena_free(arena);
    }
    bench_node_tick(&w->node);
}

/* --- steps ------------------------------------------------------------------------------------ */

static void put(worker_t *w, uint32_t first, uint32_t count)
{
    uint32_t blocks[RUN_MAX];
    uint64_t contents[RUN_MAX];
    uint32_t offered = 0;

    for (uint32_t i = 0; i < count; i++) {
        const td_block_key_t key = key_of(first + i);
        uint8_t *bytes = NULL;
        if (td_pool_take(w->node.pool, &blocks[offered]) != TD_OK) {
            break;
        }
        bytes = td_pool_bytes(w->node.pool, blocks[offered]);
        contents[offered] = td_random_u64();
        fill(bytes, w->block_bytes, first + i, contents[offered]);
        if (td_pool_index(w->node.pool, blocks[offered], &key,
                          td_block_content_hash(bytes, w->block_bytes)) != TD_OK) {
            TD_LOG_ERROR("a key is indexed already", "key=%u", first + i);
            exit(1);
        }
        record(w, "put %u %" PRIu64 " %" PRIu64, first + i, contents[offered], td_now_ns());
        offered++;
    }
    if (offered > 0 && kvs_client_put(w->node.client, blocks, offered) == TD_OK) {
        while (kvs_client_pinned(w->node.client) > 0) {
            turn(w);
        }
    }
    for (uint32_t i = 0; i < offered; i++) {
        record(w, "end %" PRIu64 " %" PRIu64, contents[i], td_now_ns());
        td_pool_unindex(w->node.pool, blocks[i]);
        td_pool_unref(w->node.pool, blocks[i]);
    }
}

static void on_found(void *ctx, uint64_t tag, td_status_t status,
                     const td_msg_lookup_result_t *found)
{
    worker_t *w = ctx;
    (void)tag;
    (void)status;

    w->looked_up = true;
    for (uint32_t i = 0; found != NULL && i < found->count; i++) {
        const td_member_peer_t *peer =
            td_member_find(w->node.member, found->segment_ids[found->segment_of[i]]);
        w->pieces[i].block = found->blocks[i];
        w->pieces[i].epoch = found->epochs[i];
        w->pieces[i].bytes = w->block_bytes;
        w->pieces[i].offset = 0;
        w->sums[i] = found->checksums[i];
        w->peers[i] = peer == NULL ? 0 : peer->incarnation;
        w->found = i + 1;
    }
}

static void on_read(td_fetch_t *fetch)
{
    atomic_store_explicit((atomic_bool *)fetch->ctx, true, memory_order_release);
}

static void read_one(worker_t *w, uint32_t key_idx, uint32_t i)
{
    const td_block_key_t key = key_of(key_idx);
    atomic_bool done = false;
    uint32_t block = 0;
    uint64_t content = 0;
    const uint8_t *bytes = NULL;
    bool right = false;
    td_fetch_t fetch = {.peer = w->peers[i],
                        .deadline_ns = td_now_ns() + READ_WAIT_NS,
                        .complete = on_read,
                        .ctx = &done,
                        .pieces = &w->pieces[i],
                        .piece_count = 1};

    if (w->peers[i] == 0 || td_pool_take(w->node.pool, &block) != TD_OK) {
        return;
    }
    w->pieces[i].dest = td_pool_bytes(w->node.pool, block);
    if (td_transfer_fetch(w->node.transfer, &fetch) == TD_OK) {
        while (!atomic_load_explicit(&done, memory_order_acquire)) {
            turn(w);
        }
        bytes = td_pool_bytes(w->node.pool, block);
        memcpy(&content, bytes, sizeof(content));
        right =
            fetch.status == TD_OK && td_block_checksum(td_block_content_hash(bytes, w->block_bytes),
                                                       &key, w->pieces[i].epoch) == w->sums[i];
    }
    if (right) {
        record(w, "%s %u %" PRIu64 " %" PRIu64 " %" PRIu64,
               is_filled(bytes, w->block_bytes, key_idx, content) ? "read" : "wrong", key_idx,
               content, w->begin_ns, td_now_ns());
    } else {
        record(w, "miss %u %" PRIu64 " %" PRIu64, key_idx, w->begin_ns, td_now_ns());
    }
    td_pool_unref(w->node.pool, block);
}

static void read_run(worker_t *w, uint32_t first, uint32_t count)
{
    td_block_key_t keys[RUN_MAX];
    const uint32_t late = below(w, 4) == 0 ? below(w, 50) : 0;

    for (uint32_t i = 0; i < count; i++) {
        keys[i] = key_of(first + i);
    }
    w->looked_up = false;
    w->found = 0;
    if (kvs_client_lookup(w->node.client, keys, count, on_found, w, 0) == TD_OK) {
        while (!w->looked_up) {
            turn(w);
        }
    }
    for (uint32_t i = 0; i < late; i++) { /* a slow reader: the space may be another key's by now */
        turn(w);
    }
    for (uint32_t i = 0; i < w->found; i++) {
        read_one(w, first + i, i);
    }
    for (uint32_t i = w->found; i < count; i++) {
        record(w, "miss %u %" PRIu64 " %" PRIu64, first + i, w->begin_ns, td_now_ns());
    }
}

static void remove_run(worker_t *w, uint32_t first, uint32_t count)
{
    const td_member_peer_t *master = td_member_store_master(w->node.member);
    td_block_key_t keys[RUN_MAX];
    td_msg_t msg = {.type = TD_MSG_STORE_REMOVE};

    for (uint32_t i = 0; i < count; i++) {
        keys[i] = key_of(first + i);
    }
    msg.u.blocks.request = td_random_u64() | 1;
    msg.u.blocks.count = count;
    msg.u.blocks.keys = keys;
    w->remove_request = msg.u.blocks.request;
    w->removed = 0;
    if (master == NULL || td_bus_send(w->proc.bus, master->id, &msg) != TD_OK) {
        w->remove_request = 0;
        return;
    }
    while (w->remove_request != 0 && td_now_ns() - w->begin_ns < REMOVE_WAIT_NS) {
        turn(w);
    }
    w->remove_request = 0;
    for (uint32_t i = 0; i < w->removed; i++) {
        record(w, "remove %u %s %" PRIu64 " %" PRIu64, first + i, td_status_name(w->statuses[i]),
               w->begin_ns, td_now_ns());
    }
}

static void run(worker_t *w)
{
    while (!w->stopping) {
        const uint32_t count = 1 + below(w, RUN_MAX);
        const uint32_t first = below(w, w->keys - count + 1);
        const uint32_t what = below(w, 100);

        turn(w);
        w->begin_ns = td_now_ns();
        if (what < 40) {
            put(w, first, count);
        } else if (what < 85) {
            read_run(w, first, count);
        } else {
            remove_run(w, first, TD_MIN(count, 3u));
        }
    }
}

/* --- life ------------------------------------------------------------------------------------- */

static td_status_t start(worker_t *w)
{
    const td_config_t *config = w->proc.config;
    bench_node_config_t node = {
        .router = td_config_text(config, "router"),
        .secret = w->proc.secret,
        .model = td_config_text(config, "model"),
        .numerics = td_config_text(config, "numerics"),
        .kv_codec = td_config_text(config, "kv-codec"),
        .block_bytes = (uint32_t)td_config_u64(config, "block-bytes"),
        .block_count = POOL_BLOCKS,
    };

    if (node.router == NULL || node.model == NULL || td_config_text(config, "history") == NULL) {
        TD_LOG_ERROR("option missing", "expected=\"--router, --model, --history\"");
        return TD_ERR_INVALID;
    }
    w->block_bytes = node.block_bytes;
    w->keys = (uint32_t)td_config_u64(config, "keys");
    w->random = td_config_u64(config, "seed");
    w->history =
        open(td_config_text(config, "history"), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (w->history < 0) {
        TD_LOG_ERROR("history cannot be opened", "file=%s", td_config_text(config, "history"));
        return TD_ERR_IO;
    }
    TD_TRY(td_proc_open(&w->proc, true));
    node.bus = w->proc.bus;
    node.http = td_statusd_address(w->proc.statusd);
    TD_TRY(bench_node_join(&node, &w->node));
    td_proc_announce(&w->proc, node.http);
    return TD_OK;
}

int main(int argc, char **argv)
{
    static worker_t w = {.history = -1};
    const td_config_next_t next =
        td_proc_init(&w.proc, "store_worker", "prefill", "One of many clients of a store.", options,
                     TD_ARRAY_LEN(options), argc, argv);
    int rc = next == TD_CONFIG_EXIT_USAGE ? 2 : 0;

    if (next == TD_CONFIG_RUN) {
        rc = start(&w) == TD_OK ? 0 : 1;
        if (rc == 0) {
            run(&w);
            record(&w, "lives %u",
                   td_pool_counts(w.node.pool).active + td_pool_counts(w.node.pool).reserved);
        }
    }
    bench_node_leave(&w.node);
    if (w.history >= 0) {
        (void)close(w.history);
    }
    td_proc_fini(&w.proc);
    return rc;
}

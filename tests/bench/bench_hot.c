/* tandem-bench hot - what replicas of hot prefixes do for the busiest segment of a store.
 *
 * Two real clusters, one after the other: in the first no key gets further replicas, in the second
 * hot ones do. This process joins each as a node, puts prefixes, and reads whole ones, the r-th of
 * them with a probability as 1/r^s (Zipf). A segment's share is the part of the blocks read from
 * it. Then nobody reads for a while, and what has cooled goes again. */
#include <limits.h>
#include <math.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "tests/bench/bench.h"
#include "tests/bench/bench_cluster.h"
#include "tests/bench/bench_node.h"
#include "tests/bench/bench_options.h"
#include "tests/bench/bench_stream.h"
#include "tests/bench/bench_words.h"

#define HOT_PREFIX_BLOCKS_MAX 64u
#define HOT_SEGMENTS_MAX 16u
#define HOT_WAIT_NS (30 * TD_NS_PER_S)
#define HOT_KEPT_NS (500 * TD_NS_PER_MS) /* what is read before is not counted */
#define HOT_REST_S 10u      /* for the busiest keys: of 1,500 lookups half ten times forgotten */
#define HOT_CODEC "f4_e2m1" /* small blocks: it is not about bytes */

typedef struct hot_options {
    const char *model;
    const char *local_sh;
    char bin[PATH_MAX];
    uint32_t segments;
    uint32_t prefixes;
    uint32_t blocks;  /* of a prefix */
    uint32_t percent; /* 100 times the exponent */
    uint32_t seconds;
    bool json;
} hot_options_t;

typedef struct hot {
    const hot_options_t *options;
    bench_cluster_t cluster;
    td_bus_t *bus;
    bench_node_t node;
    uint32_t block_bytes;
    double *below; /* owned; [prefixes]: probability of one up to here */
    uint64_t random;
    /* of the read under way */
    bool answered;
    uint32_t found;
    uint32_t segment_count;
    char segments[HOT_SEGMENTS_MAX][TD_MSG_ID_CHARS_MAX + 1];
    uint64_t served[HOT_SEGMENTS_MAX]; /* blocks read from each */
    bool counted;
    uint64_t blocks_read;
    td_fetch_piece_t pieces[HOT_PREFIX_BLOCKS_MAX];
    uint64_t peers[HOT_PREFIX_BLOCKS_MAX];
    uint32_t dest[HOT_PREFIX_BLOCKS_MAX]; /* [taken] */
    uint32_t taken;
} hot_t;

static void print_help(void)
{
    (void)puts("Usage: tandem-bench hot --model FILE [options]\n"
               "\n"
               "Starts a cluster with several segments and reads prefixes of its store, some much\n"
               "more often than others (Zipf): without replicas of hot prefixes, and with them.\n"
               "Reports the busiest segment's part of the blocks read, and the replicas above one\n"
               "a key then, and after nobody has read for a while.\n"
               "\n"
               "Options:\n"
               "  --model FILE     GGUF file (required)\n"
               "  --segments N     default 4\n"
               "  --prefixes N     default 64\n"
               "  --blocks N       of a prefix, default 8\n"
               "  --zipf N         hundred times the exponent, default 100\n"
               "  --seconds N      of reading, default 6\n"
               "  --local-sh FILE  starts clusters; default deploy/local.sh\n"
               "  --bin DIR        programs of the cluster; default: this program's folder\n"
               "  --json           one JSON object instead of a table\n"
               "  --help           this text");
}

/* --- joining ---------------------------------------------------------------------------------- */

static bool read_file(const char *dir, const char *name, char *out, size_t len)
{
    char path[BENCH_DIR_BYTES + 128];
    FILE *file = NULL;
    size_t got = 0;

    (void)snprintf(path, sizeof(path), "%s/run/%s", dir, name);
    file = fopen(path, "r");
    if (file != NULL) {
        got = fread(out, 1, len, file);
        (void)fclose(file);
    }
    return got > 0;
}

static bool join(hot_t *h)
{
    const hot_options_t *o = h->options;
    uint8_t secret[TD_CLUSTER_SECRET_BYTES];
    char path[BENCH_DIR_BYTES + 32];
    char ready[512] = {0};
    char numerics[128];
    char bytes[32];
    bench_node_config_t config = {.secret = secret,
                                  .http = "",
                                  .model = o->model,
                                  .numerics = numerics,
                                  .kv_codec = HOT_CODEC,
                                  .block_count = o->prefixes * o->blocks + o->blocks};
    const td_bus_config_t bus = {.bind = "tcp://127.0.0.1:*",
                                 .id = "bench",
                                 .incarnation = td_random_u64(),
                                 .secret = secret};
    const uint64_t until = td_now_ns() + HOT_WAIT_NS;

    (void)snprintf(path, sizeof(path), "%s/run/cluster.secret", h->cluster.dir);
    if (td_cluster_secret_load(path, secret) != TD_OK ||
        !read_file(h->cluster.dir, "router.ready", ready, sizeof(ready) - 1) ||
        !bench_cluster_log_word(&h->cluster, "prefill-1", "numerics=", numerics,
                                sizeof(numerics)) ||
        !bench_cluster_log_word(&h->cluster, "kvstore-2", "block_bytes=", bytes, sizeof(bytes)) ||
        strchr(ready, ' ') == NULL) {
        (void)bench_usage_error("the cluster does not say what it is");
        return false;
    }
    ready[strcspn(ready, "\n")] = '\0';
    config.router = strchr(ready, ' ') + 1;
    config.block_bytes = (uint32_t)strtoul(bytes, NULL, 10);
    h->block_bytes = config.block_bytes;
    if (td_bus_create(&bus, &h->bus) != TD_OK) {
        return false;
    }
    config.bus = h->bus;
    if (bench_node_join(&config, &h->node) != TD_OK) {
        return false;
    }
    for (uint32_t i = 0; i < o->blocks; i++) { /* what is read goes there, and is not kept */
        if (td_pool_take(h->node.pool, &h->dest[i]) != TD_OK) {
            return false;
        }
        h->pieces[i].dest = td_pool_bytes(h->node.pool, h->dest[i]);
        h->taken = i + 1;
    }
    while (td_member_store_master(h->node.member) == NULL && td_now_ns() < until) {
        bench_node_turn(&h->node, 10);
    }
    return td_member_store_master(h->node.member) != NULL;
}

static void leave(hot_t *h)
{
    while (h->taken > 0) {
        td_pool_unref(h->node.pool, h->dest[--h->taken]);
    }
    bench_node_leave(&h->node);
    if (h->bus != NULL) {
        td_bus_destroy(h->bus);
        h->bus = NULL;
    }
    bench_cluster_stop(&h->cluster);
}

/* --- work ------------------------------------------------------------------------------------- */

static td_block_key_t key_of(uint32_t prefix, uint32_t block)
{
    td_block_key_t key = {{0}};
    const uint32_t name[2] = {prefix * 2654435761u ^ block * 40503u, block + 1};

    memcpy(key.bytes, name, sizeof(name));
    memcpy(key.bytes + sizeof(name), &prefix, sizeof(prefix));
    return key;
}

static bool put_prefixes(hot_t *h)
{
    const hot_options_t *o = h->options;
    uint32_t blocks[HOT_PREFIX_BLOCKS_MAX];
    const uint64_t until = td_now_ns() + HOT_WAIT_NS;
    uint32_t prefix = 0;

    while (prefix < o->prefixes || kvs_client_pinned(h->node.client) > 0) {
        if (td_now_ns() > until) {
            (void)bench_usage_error("the store does not take the blocks");
            return false;
        }
        for (uint32_t i = 0; prefix < o->prefixes && i < o->blocks; i++) {
            const td_block_key_t key = key_of(prefix, i);
            uint8_t *bytes = NULL;
            blocks[i] = td_pool_find(h->node.pool, &key);
            if (blocks[i] != TD_POOL_NONE) {
                continue; /* the offer found the client busy */
            }
            if (td_pool_take(h->node.pool, &blocks[i]) != TD_OK) {
                return false;
            }
            bytes = td_pool_bytes(h->node.pool, blocks[i]);
            memset(bytes, (int)(prefix + i), h->block_bytes);
            if (td_pool_index(h->node.pool, blocks[i], &key,
                              td_block_content_hash(bytes, h->block_bytes)) != TD_OK) {
                return false;
            }
            td_pool_unref(h->node.pool, blocks[i]);
        }
        if (prefix < o->prefixes && kvs_client_put(h->node.client, blocks, o->blocks) == TD_OK) {
            prefix++;
        }
        bench_node_turn(&h->node, 1);
    }
    return true;
}

static uint32_t segment_of(hot_t *h, const char *id)
{
    uint32_t i = 0;

    while (i < h->segment_count && strcmp(h->segments[i], id) != 0) {
        i++;
    }
    if (i == h->segment_count && i < HOT_SEGMENTS_MAX) {
        (void)snprintf(h->segments[i], sizeof(h->segments[i]), "%s", id);
        h->segment_count++;
    }
    return TD_MIN(i, HOT_SEGMENTS_MAX - 1);
}

static void on_found(void *ctx, uint64_t tag, td_status_t status,
                     const td_msg_lookup_result_t *found)
{
    hot_t *h = ctx;
    (void)tag;
    (void)status;

    h->answered = true;
    for (uint32_t i = 0; found != NULL && i < found->count; i++) {
        const char *id = found->segment_ids[found->segment_of[i]];
        const td_member_peer_t *peer = td_member_find(h->node.member, id);
        h->pieces[i].block = found->blocks[i];
        h->pieces[i].epoch = found->epochs[i];
        h->pieces[i].bytes = h->block_bytes;
        h->peers[i] = peer == NULL ? 0 : peer->incarnation;
        h->served[segment_of(h, id)] += h->counted ? 1 : 0;
        h->found = i + 1;
    }
}

static void on_read(td_fetch_t *fetch)
{
    atomic_store_explicit((atomic_bool *)fetch->ctx, true, memory_order_release);
}

/* Blocks [first, end) of the last lookup, all on one segment. */
static bool fetch(hot_t *h, uint32_t first, uint32_t end)
{
    atomic_bool done = false;
    td_fetch_t fetch = {.peer = h->peers[first],
                        .deadline_ns = td_now_ns() + HOT_WAIT_NS,
                        .complete = on_read,
                        .ctx = &done,
                        .pieces = h->pieces + first,
                        .piece_count = end - first};

    if (td_transfer_fetch(h->node.transfer, &fetch) != TD_OK) {
        return false;
    }
    while (!atomic_load_explicit(&done, memory_order_acquire)) {
        (void)sched_yield();
    }
    h->blocks_read += fetch.status == TD_OK ? end - first : 0;
    return true;
}

static bool read_prefix(hot_t *h, uint32_t prefix)
{
    td_block_key_t keys[HOT_PREFIX_BLOCKS_MAX];
    uint32_t at = 0;

    for (uint32_t i = 0; i < h->options->blocks; i++) {
        keys[i] = key_of(prefix, i);
    }
    h->answered = false;
    h->found = 0;
    if (kvs_client_lookup(h->node.client, keys, h->options->blocks, on_found, h, 0) != TD_OK) {
        bench_node_turn(&h->node, 1);
        return true;
    }
    while (!h->answered) {
        bench_node_turn(&h->node, 1);
    }
    while (at < h->found) {
        uint32_t end = at + 1;
        while (end < h->found && h->peers[end] == h->peers[at]) {
            end++;
        }
        if (!fetch(h, at, end)) {
            return false;
        }
        at = end;
    }
    return true;
}

static uint32_t draw(hot_t *h)
{
    const double x = (double)(bench_random(&h->random) >> 11) * 0x1p-53;
    uint32_t prefix = 0;

    while (prefix + 1 < h->options->prefixes && h->below[prefix] < x) {
        prefix++;
    }
    return prefix;
}

static bool read_for(hot_t *h, uint64_t ns)
{
    const uint64_t begin_ns = td_now_ns();

    while (td_now_ns() - begin_ns < ns) {
        h->counted = td_now_ns() - begin_ns >= HOT_KEPT_NS;
        if (!read_prefix(h, draw(h))) {
            return false;
        }
    }
    return true;
}

static void rest_for(hot_t *h, uint64_t ns)
{
    const uint64_t begin_ns = td_now_ns();

    while (td_now_ns() - begin_ns < ns) {
        bench_node_turn(&h->node, 50);
    }
}

static double busiest_share(const hot_t *h)
{
    uint64_t most = 0;
    uint64_t total = 0;

    for (uint32_t i = 0; i < h->segment_count; i++) {
        most = TD_MAX(most, h->served[i]);
        total += h->served[i];
    }
    return total == 0 ? 0 : (double)most / (double)total;
}

/* --- clusters --------------------------------------------------------------------------------- */

static bool start(hot_t *h, const char *replicas)
{
    const hot_options_t *o = h->options;
    char stores[16];
    char flags[128];
    const char *arguments[] = {
        "--port",      "0",         "--bin",         o->bin,    "--model",        o->model,
        "--timeout",   "240",       "--kvstore",     stores,    "--threads",      "1",
        "--kv-memory", "64M",       "--kv-codec",    HOT_CODEC, "--kvstore-args", flags,
        "--args-of",   "kvstore-1", "--role master", NULL};
    const bench_cluster_options_t options = {
        .local_sh = o->local_sh, .ucx_tls = "tcp,posix,sysv", .arguments = arguments};

    (void)snprintf(stores, sizeof(stores), "%u", o->segments + 1);
    /* Ten times as fast as by default, and a small index to look through: cooling is waited for. */
    (void)snprintf(
        flags, sizeof(flags),
        "--hot-replicas %s --hot-half-ms 1000 --lease-ms 1000 --keys-max %u --capacity 256M",
        replicas, TD_MAX(16, 2 * o->prefixes * o->blocks));
    (void)fprintf(stderr, "tandem-bench: a cluster with up to %s replicas of a key\n", replicas);
    return bench_cluster_start(&options, &h->cluster) == BENCH_EXIT_OK && join(h) &&
           put_prefixes(h);
}

/* Replicas above one a key, as the master counts them. */
static bool extra_replicas(const hot_t *h, double *out)
{
    double replicas = 0;
    double keys = 0;
    char ready[512] = {0};

    if (!read_file(h->cluster.dir, "kvstore-1.ready", ready, sizeof(ready) - 1)) {
        return false;
    }
    ready[strcspn(ready, " \n")] = '\0';
    if (!bench_metric(ready, "tandem_kvstore_replicas", &replicas) ||
        !bench_metric(ready, "tandem_kvstore_keys", &keys)) {
        (void)bench_usage_error("the store's master does not say how many replicas there are");
        return false;
    }
    *out = replicas - keys;
    return true;
}

static bool measure(const hot_options_t *o, double *below, json_t *figures)
{
    static const char *const replicas[] = {"1", "3"};
    static const char *const names[] = {"one", "hot"};
    double shares[2] = {0, 0};
    double extra = 0;
    double cooled = 0;
    bool ok = true;

    for (uint32_t i = 0; ok && i < 2; i++) {
        hot_t h = {.options = o, .below = below, .random = 1, .cluster = {.control = -1}};
        char key[32];
        ok = start(&h, replicas[i]) && read_for(&h, o->seconds * TD_NS_PER_S);
        shares[i] = busiest_share(&h);
        (void)snprintf(key, sizeof(key), "busiest_share_%s", names[i]);
        (void)json_object_set_new(figures, key, json_real(shares[i]));
        (void)snprintf(key, sizeof(key), "read_blocks_s_%s", names[i]);
        (void)json_object_set_new(figures, key, json_real((double)h.blocks_read / o->seconds));
        if (ok && i == 1) {
            ok = extra_replicas(&h, &extra);
            rest_for(&h, (HOT_REST_S + o->seconds) * TD_NS_PER_S);
            ok = ok && extra_replicas(&h, &cooled);
        }
        leave(&h);
        (void)fprintf(stderr, "tandem-bench: busiest segment %.0f %%\n", 100 * shares[i]);
    }
    (void)json_object_set_new(figures, "busiest_ratio",
                              json_real(shares[0] > 0 ? shares[1] / shares[0] : 0));
    (void)json_object_set_new(figures, "hot_replicas", json_real(extra));
    (void)json_object_set_new(figures, "hot_replicas_cooled", json_real(cooled));
    return ok;
}

static int parse_options(int argc, char **argv, hot_options_t *o)
{
    const bench_option_t options[] = {
        BENCH_MODEL_OPTION(&o->model),
        {.name = "segments",
         .kind = BENCH_NUMBER,
         .out = &o->segments,
         .min = 1,
         .max = HOT_SEGMENTS_MAX},
        {.name = "prefixes", .kind = BENCH_NUMBER, .out = &o->prefixes, .min = 1, .max = 4096},
        {.name = "blocks",
         .kind = BENCH_NUMBER,
         .out = &o->blocks,
         .min = 1,
         .max = HOT_PREFIX_BLOCKS_MAX},
        {.name = "zipf", .kind = BENCH_NUMBER, .out = &o->percent, .min = 0, .max = 1000},
        {.name = "seconds", .kind = BENCH_NUMBER, .out = &o->seconds, .min = 1, .max = 3600},
        {.name = "bin", .kind = BENCH_OWN, .out = o->bin, .parse = bench_cluster_parse_bin},
        {.name = "local-sh", .kind = BENCH_TEXT, .out = &o->local_sh},
        BENCH_JSON_OPTION(&o->json),
    };
    int rc = bench_parse_options(argc, argv, "hot", print_help, options, TD_ARRAY_LEN(options));

    if (rc == BENCH_EXIT_OK && !bench_cluster_has_local_sh(o->local_sh)) {
        rc = BENCH_EXIT_USAGE;
    }
    return rc;
}

int bench_hot(int argc, char **argv)
{
    hot_options_t o = {.local_sh = "deploy/local.sh",
                       .segments = 4,
                       .prefixes = 64,
                       .blocks = 8,
                       .percent = 100,
                       .seconds = 6};
    double *below = NULL;
    json_t *figures = NULL;
    bool ok = false;
    double sum = 0;
    int rc = parse_options(argc, argv, &o);

    if (rc != BENCH_EXIT_OK) {
        return rc < 0 ? BENCH_EXIT_OK : rc;
    }
    bench_cluster_find_bin(o.bin);
    below = td_calloc(o.prefixes, sizeof(*below));
    figures = json_object();
    for (uint32_t i = 0; below != NULL && i < o.prefixes; i++) {
        sum += pow(i + 1.0, -(double)o.percent / 100);
        below[i] = sum;
    }
    for (uint32_t i = 0; below != NULL && i < o.prefixes; i++) {
        below[i] /= sum;
    }
    ok = below != NULL && figures != NULL && measure(&o, below, figures);
    if (ok) {
        bench_print_figures(figures, o.json);
    }
    json_decref(figures);
    td_free(below);
    return ok ? BENCH_EXIT_OK : BENCH_EXIT_FAILED;
}

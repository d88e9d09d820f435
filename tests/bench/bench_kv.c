/* tandem-bench kv - the prefix cache and the block tables alone: no bytes of KV are touched. */
#include <stdio.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/kv/td_pool.h"
#include "common/kv/td_seq.h"
#include "tests/bench/bench.h"
#include "tests/bench/bench_options.h"

#define KV_PROMPT_BLOCKS 512u
#define KV_MATCHES 64u /* prompts matched for one sample */
#define KV_EVICTIONS 65536u
#define KV_STEPS 1000000u
#define KV_DRAFT 4u

typedef struct kv_options {
    uint32_t blocks;
    uint32_t repeat;
    bool json;
} kv_options_t;

typedef struct kv_bench {
    kv_options_t options;
    td_pool_t *pool;      /* of blocks of one byte */
    uint8_t *bytes;       /* owned */
    td_block_key_t *keys; /* owned; [blocks]: chains of KV_PROMPT_BLOCKS */
    uint32_t prompts;
    json_t *figures;
} kv_bench_t;

static void print_help(void)
{
    (void)puts("Usage: tandem-bench kv [options]\n"
               "\n"
               "Fills a prefix cache with prompts of 512 blocks, whose keys are chained hashes as\n"
               "they are in a node, then measures: matching a prompt (a reference to each block\n"
               "included), taking and indexing one block, evicting one, the bookkeeping's memory,\n"
               "and allocations of a speculative step (draft 4, accept some, roll back).\n"
               "Times are the best of the repeats.\n"
               "\n"
               "Options:\n"
               "  --blocks N    of the cache, default 1000000\n"
               "  --repeat N    default 5\n"
               "  --json        one JSON object instead of a table\n"
               "  --help        this text");
}

static void add_figure(kv_bench_t *b, const char *key, double value)
{
    (void)json_object_set_new(b->figures, key, json_real(value));
    (void)fprintf(stderr, "tandem-bench: %s %.3f\n", key, value);
}

static void make_keys(kv_bench_t *b)
{
    static const uint8_t secret[TD_CLUSTER_SECRET_BYTES] = {1};
    static const uint8_t fingerprint[32] = {2};
    const td_block_root_fields_t fields = {.fingerprint = fingerprint,
                                           .numerics_class = "bench",
                                           .layout_version = TD_KV_LAYOUT_VERSION,
                                           .codec = TD_KV_CODEC_DEFAULT,
                                           .block_tokens = 1,
                                           .adapter = "",
                                           .salt = ""};
    td_block_root_t root;

    td_block_root_make(secret, &fields, &root);
    for (uint32_t i = 0; i < b->prompts * KV_PROMPT_BLOCKS; i++) {
        td_block_key_next(&root, i % KV_PROMPT_BLOCKS == 0 ? NULL : &b->keys[i - 1], &i, 1,
                          &b->keys[i]);
    }
}

/* A prompt is computed, indexed and given back, as a request does it. */
static bool fill(kv_bench_t *b, uint64_t *ns)
{
    uint32_t idx[KV_PROMPT_BLOCKS];
    uint64_t begin_ns = td_now_ns();

    for (uint32_t p = 0; p < b->prompts; p++) {
        const td_block_key_t *keys = b->keys + (size_t)p * KV_PROMPT_BLOCKS;
        for (uint32_t i = 0; i < KV_PROMPT_BLOCKS; i++) {
            if (td_pool_take(b->pool, &idx[i]) != TD_OK ||
                td_pool_index_after(b->pool, idx[i], i > 0 ? &keys[i - 1] : NULL, &keys[i], i) !=
                    TD_OK) {
                return false;
            }
        }
        for (uint32_t i = KV_PROMPT_BLOCKS; i > 0; i--) {
            td_pool_unref(b->pool, idx[i - 1]);
        }
    }
    *ns = TD_MIN(*ns, td_now_ns() - begin_ns);
    return true;
}

/* Prompts far from each other: none of it is in a CPU's cache. */
static bool match(kv_bench_t *b, uint32_t round, uint64_t *ns)
{
    uint32_t idx[KV_PROMPT_BLOCKS];
    uint64_t sum_ns = 0;

    for (uint32_t m = 0; m < KV_MATCHES; m++) {
        const uint32_t p = (uint32_t)(((uint64_t)m * 2654435761u + round * 40503u) % b->prompts);
        const uint64_t begin_ns = td_now_ns();
        if (td_pool_match(b->pool, b->keys + (size_t)p * KV_PROMPT_BLOCKS, KV_PROMPT_BLOCKS, idx) !=
            KV_PROMPT_BLOCKS) {
            return false;
        }
        sum_ns += td_now_ns() - begin_ns;
        for (uint32_t i = KV_PROMPT_BLOCKS; i > 0; i--) {
            td_pool_unref(b->pool, idx[i - 1]);
        }
    }
    *ns = TD_MIN(*ns, sum_ns);
    return true;
}

static bool evict(kv_bench_t *b, uint32_t count, uint64_t *ns)
{
    uint32_t free_blocks = td_pool_counts(b->pool).free;
    uint64_t begin_ns = td_now_ns();

    if (td_pool_reserve(b->pool, free_blocks + count) != TD_OK) {
        return false;
    }
    *ns = TD_MIN(*ns, td_now_ns() - begin_ns);
    td_pool_unreserve(b->pool, free_blocks + count);
    return true;
}

static bool speculate(kv_bench_t *b)
{
    static const td_attention_mask_t full_mask;
    static const td_kv_layout_t layout = {
        .layers = 1, .kv_heads = 1, .head_dim = 8, .block_tokens = 16};
    td_seq_t seq;
    uint32_t written = 0;
    uint64_t allocs = 0;
    uint64_t begin_ns = 0;
    bool ok = td_seq_init(&seq, b->pool, &layout, &full_mask, 2048) == TD_OK &&
              td_seq_reserve(&seq, 128) == TD_OK;

    allocs = td_alloc_count();
    begin_ns = td_now_ns();
    for (uint32_t step = 0; ok && step < KV_STEPS; step++) {
        for (uint32_t i = 0; ok && i <= KV_DRAFT; i++) {
            ok = td_seq_prepare_write(&seq, written + i) == TD_OK;
        }
        written = (written + 1 + step % (KV_DRAFT + 1)) % 2000;
        td_seq_truncate(&seq, written);
    }
    add_figure(b, "step_ns", (double)(td_now_ns() - begin_ns) / KV_STEPS);
    add_figure(b, "allocs_per_step", (double)(td_alloc_count() - allocs) / KV_STEPS);
    td_seq_fini(&seq);
    return ok;
}

static bool measure(kv_bench_t *b)
{
    const uint32_t evictions = TD_MIN(KV_EVICTIONS, b->prompts * KV_PROMPT_BLOCKS);
    uint64_t insert_ns = UINT64_MAX;
    uint64_t match_ns = UINT64_MAX;
    uint64_t evict_ns = UINT64_MAX;

    for (uint32_t r = 0; r < b->options.repeat; r++) {
        td_pool_destroy(b->pool);
        b->pool = NULL;
        if (td_pool_create(b->bytes, b->options.blocks, 1, &b->pool) != TD_OK ||
            !fill(b, &insert_ns) || !match(b, r, &match_ns) || !evict(b, evictions, &evict_ns)) {
            return false;
        }
    }
    add_figure(b, "match_us", (double)match_ns / 1e3 / KV_MATCHES);
    add_figure(b, "insert_us", (double)insert_ns / 1e3 / (b->prompts * KV_PROMPT_BLOCKS));
    add_figure(b, "evict_us", (double)evict_ns / 1e3 / evictions);
    add_figure(b, "bytes_per_block", (double)td_pool_own_bytes(b->pool) / b->options.blocks);
    return speculate(b);
}

static int parse_options(int argc, char **argv, kv_options_t *o)
{
    const bench_option_t options[] = {
        {.name = "blocks",
         .kind = BENCH_NUMBER,
         .out = &o->blocks,
         .min = 2 * KV_PROMPT_BLOCKS,
         .max = TD_POOL_BLOCKS_MAX},
        BENCH_REPEAT_OPTION(&o->repeat),
        BENCH_JSON_OPTION(&o->json),
    };

    return bench_parse_options(argc, argv, "kv", print_help, options, TD_ARRAY_LEN(options));
}

int bench_kv(int argc, char **argv)
{
    kv_bench_t b = {.options = {.blocks = 1000000, .repeat = 5}};
    int rc = parse_options(argc, argv, &b.options);

    if (rc != BENCH_EXIT_OK) {
        return rc < 0 ? BENCH_EXIT_OK : rc;
    }
    b.prompts = b.options.blocks / KV_PROMPT_BLOCKS;
    b.keys = td_calloc((size_t)b.prompts * KV_PROMPT_BLOCKS, sizeof(*b.keys));
    b.bytes = td_calloc(b.options.blocks, 1);
    b.figures = json_object();
    rc = BENCH_EXIT_FAILED;
    if (b.keys != NULL && b.bytes != NULL && b.figures != NULL) {
        make_keys(&b);
        if (measure(&b)) {
            bench_print_figures(b.figures, b.options.json);
            rc = BENCH_EXIT_OK;
        }
    }
    json_decref(b.figures);
    td_pool_destroy(b.pool);
    td_free(b.bytes);
    td_free(b.keys);
    return rc;
}

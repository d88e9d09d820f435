/* tandem-bench router - the router's index of blocks and its placement alone: events of many nodes,
 * prompts matched and placed. */
#include <stdio.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "router/rtr_index.h"
#include "router/rtr_placement.h"
#include "tests/bench/bench.h"
#include "tests/bench/bench_options.h"
#include "tests/bench/bench_samples.h"

#define ROUTER_PROMPT_BLOCKS 128u
#define ROUTER_SHARED_BLOCKS 8u /* the first ones of all prompts, which every node has */
#define ROUTER_MATCHES 4096u
#define ROUTER_BLOCK_TOKENS 16u
#define ROUTER_COPIES 2u /* nodes that have a prompt: of one role and of the other */

typedef struct router_options {
    uint32_t nodes;
    uint32_t blocks;
    uint32_t repeat;
    bool json;
} router_options_t;

typedef struct router_bench {
    router_options_t options;
    rtr_index_t *index;
    td_block_key_t *keys; /* owned [prompts][ROUTER_PROMPT_BLOCKS]; the first ones are all alike */
    uint64_t *next;       /* owned [nodes]: number of its next event */
    uint32_t *matches;    /* owned [nodes] */
    rtr_backlog_t *backlogs;     /* owned [nodes] */
    rtr_prefill_view_t *prefill; /* owned [nodes]: half of them are allowed */
    rtr_decode_view_t *decode;   /* owned [nodes]: the others are */
    uint32_t prompts;
    json_t *figures;
} router_bench_t;

static void print_help(void)
{
    (void)puts("Usage: tandem-bench router [options]\n"
               "\n"
               "Fills the router's index with prompts of 128 blocks, each on two nodes and with 8\n"
               "blocks that all nodes have, then measures: applying events while every prompt\n"
               "goes and comes back (each message decoded from its bytes, as the router gets it),\n"
               "matching a prompt with all nodes, and the index's memory; and placing prompts on\n"
               "one half of the nodes for prefill and on the other for decode, the match and the\n"
               "views of all nodes included. Best of the repeats.\n"
               "\n"
               "Options:\n"
               "  --nodes N     default 1000\n"
               "  --blocks N    different ones, default 1000000\n"
               "  --repeat N    default 3\n"
               "  --json        one JSON object instead of a table\n"
               "  --help        this text");
}

static void add_figure(router_bench_t *b, const char *key, double value)
{
    (void)json_object_set_new(b->figures, key, json_real(value));
    (void)fprintf(stderr, "tandem-bench: %s %.3f\n", key, value);
}

static void make_keys(router_bench_t *b)
{
    for (uint32_t p = 0; p < b->prompts; p++) {
        for (uint32_t i = 0; i < ROUTER_PROMPT_BLOCKS; i++) {
            const uint64_t n = i < ROUTER_SHARED_BLOCKS ? i : (uint64_t)p * 4096 + i;
            const uint64_t half = td_block_content_hash(&n, sizeof(n));
            const uint64_t rest = td_block_content_hash(&half, sizeof(half));
            td_block_key_t *key = &b->keys[(size_t)p * ROUTER_PROMPT_BLOCKS + i];
            memcpy(key->bytes, &half, sizeof(half));
            memcpy(key->bytes + sizeof(half), &rest, sizeof(rest));
        }
    }
}

/* One message, through its bytes. */
static bool tell(router_bench_t *b, uint32_t node, uint32_t came, uint32_t went,
                 const td_block_key_t *keys)
{
    const uint32_t runs[2] = {came, went};
    td_msg_t msg = {.type = TD_MSG_KV_EVENTS, .sender_id = "n"};
    td_msg_arena_t *arena = NULL;
    td_str_t bytes = {0};
    td_msg_t got;
    uint64_t from = 0;
    bool ok = false;

    msg.u.kv_events = (td_msg_kv_events_t){.first = b->next[node],
                                           .count = came + went,
                                           .keys = keys,
                                           .run_count = went > 0 ? 2 : 1,
                                           .runs = runs};
    b->next[node] += came + went;
    if (td_msg_encode(&msg, &bytes) == TD_OK &&
        td_msg_decode(bytes.bytes, bytes.len, &got, &arena) == TD_OK) {
        ok = !rtr_index_apply(b->index, node, &got.u.kv_events, td_now_ns(), &from);
        td_msg_arena_free(arena);
    }
    td_str_fini(&bytes);
    return ok;
}

/* What comes before its first event: it has nothing. */
static void begin(router_bench_t *b, uint32_t node)
{
    td_msg_kv_events_t m = {.kind = TD_MSG_KV_SNAPSHOT, .first = 1, .snapshot = 1};
    uint64_t from = 0;

    (void)rtr_index_apply(b->index, node, &m, td_now_ns(), &from);
    m.kind = TD_MSG_KV_END;
    (void)rtr_index_apply(b->index, node, &m, td_now_ns(), &from);
    b->next[node] = 1;
}

static uint32_t node_of(const router_bench_t *b, uint32_t prompt, uint32_t copy)
{
    return (prompt * ROUTER_COPIES + copy) % b->options.nodes;
}

static const td_block_key_t *own_blocks(const router_bench_t *b, uint32_t prompt)
{
    return b->keys + (size_t)prompt * ROUTER_PROMPT_BLOCKS + ROUTER_SHARED_BLOCKS;
}

static bool fill(router_bench_t *b)
{
    const uint32_t own = ROUTER_PROMPT_BLOCKS - ROUTER_SHARED_BLOCKS;
    bool ok = true;

    for (uint32_t n = 0; ok && n < b->options.nodes; n++) {
        begin(b, n);
        ok = tell(b, n, ROUTER_SHARED_BLOCKS, 0, b->keys);
    }
    for (uint32_t p = 0; ok && p < b->prompts; p++) {
        for (uint32_t copy = 0; ok && copy < ROUTER_COPIES; copy++) {
            ok = tell(b, node_of(b, p, copy), own, 0, own_blocks(b, p));
        }
    }
    return ok;
}

/* Every prompt leaves all its nodes and comes back when many others have left, in an order that no
 * cache likes. */
static bool churn(router_bench_t *b, double *blocks_s)
{
    const uint32_t own = ROUTER_PROMPT_BLOCKS - ROUTER_SHARED_BLOCKS;
    const uint32_t away = b->prompts / 8; /* at a time */
    const uint64_t begin_ns = td_now_ns();
    uint64_t events = 0;
    bool ok = true;

    for (uint32_t i = 0; ok && i < b->prompts + away; i++) {
        const uint32_t leaves = (uint32_t)((uint64_t)i * 2654435761u % b->prompts);
        const uint32_t comes = (uint32_t)((uint64_t)(i - away) * 2654435761u % b->prompts);
        for (uint32_t copy = 0; ok && i < b->prompts && copy < ROUTER_COPIES; copy++) {
            ok = tell(b, node_of(b, leaves, copy), 0, own, own_blocks(b, leaves));
            events += own;
        }
        for (uint32_t copy = 0; ok && i >= away && copy < ROUTER_COPIES; copy++) {
            ok = tell(b, node_of(b, comes, copy), own, 0, own_blocks(b, comes));
            events += own;
        }
    }
    *blocks_s = TD_MAX(*blocks_s, (double)events * 1e9 / (double)(td_now_ns() - begin_ns));
    return ok;
}

/* Prompts far from each other: none of it is in a CPU's cache. */
static bool match(router_bench_t *b, uint32_t round, double *us)
{
    const uint64_t begin_ns = td_now_ns();

    for (uint32_t m = 0; m < ROUTER_MATCHES; m++) {
        const uint32_t p = (uint32_t)(((uint64_t)m * 2654435761u + round * 40503u) % b->prompts);
        if (rtr_index_match(b->index, b->keys + (size_t)p * ROUTER_PROMPT_BLOCKS,
                            ROUTER_PROMPT_BLOCKS, b->matches) != ROUTER_PROMPT_BLOCKS) {
            return false;
        }
    }
    *us = TD_MIN(*us, (double)(td_now_ns() - begin_ns) / 1e3 / ROUTER_MATCHES);
    return true;
}

/* As the router does it: each node's view is filled anew for each prompt. */
static bool place_one(router_bench_t *b, uint32_t prompt, uint64_t turn)
{
    static const rtr_estimate_t estimate = {.weights = {2e5, 1e6, 1, 1e5}, .n = 100};
    static const rtr_estimate_t tbt = {.weights = {1e7, 1e5, 10, 0}, .n = 100};
    const uint64_t now_ns = td_now_ns();
    const uint32_t best = rtr_index_match(b->index, b->keys + (size_t)prompt * ROUTER_PROMPT_BLOCKS,
                                          ROUTER_PROMPT_BLOCKS, b->matches);
    const rtr_place_ask_t ask = {.policy = RTR_POLICY_KV_AWARE,
                                 .now_ns = now_ns,
                                 .turn = turn,
                                 .draw = turn * 2654435761u,
                                 .prompt_tokens = (ROUTER_PROMPT_BLOCKS + 1) * ROUTER_BLOCK_TOKENS,
                                 .granule_tokens = ROUTER_BLOCK_TOKENS,
                                 .pool_tokens = best * ROUTER_BLOCK_TOKENS,
                                 .keep_local = RTR_KEEP_LOCAL_DEFAULT,
                                 .typical = &estimate,
                                 .sequences = 1,
                                 .need_blocks = ROUTER_PROMPT_BLOCKS + 64,
                                 .typical_tbt = &tbt};
    rtr_prefill_choice_t choice;

    for (uint32_t i = 0; i < b->options.nodes; i++) {
        b->prefill[i] = (rtr_prefill_view_t){.allowed = i % 2 == 0,
                                             .match_tokens = b->matches[i] * ROUTER_BLOCK_TOKENS,
                                             .lately = rtr_backlog_lately(&b->backlogs[i], now_ns),
                                             .backlog = &b->backlogs[i],
                                             .estimate = &estimate};
        b->decode[i] = (rtr_decode_view_t){.allowed = i % 2 == 1,
                                           .running = i % 13,
                                           .promised = i % 13 * 200,
                                           .free_blocks = 60000 - i % 13 * 200,
                                           .total_blocks = 60000,
                                           .match_blocks = b->matches[i],
                                           .tbt = &tbt};
    }
    choice = rtr_place_prefill(&ask, b->prefill, b->options.nodes);
    if (choice.node == RTR_PLACE_NONE ||
        rtr_place_decode(&ask, b->decode, b->options.nodes).node == RTR_PLACE_NONE) {
        return false;
    }
    rtr_backlog_add(&b->backlogs[choice.node], &choice.work, now_ns);
    return true;
}

static bool place(router_bench_t *b, double *us_p50, double *us_p99)
{
    bench_samples_t samples = {0};
    bool ok = true;

    memset(b->backlogs, 0, b->options.nodes * sizeof(*b->backlogs));
    for (uint32_t m = 0; ok && m < ROUTER_MATCHES; m++) {
        const uint64_t begin_ns = td_now_ns();
        ok = place_one(b, (uint32_t)((uint64_t)m * 2654435761u % b->prompts), m);
        bench_samples_add_ns(&samples, td_now_ns() - begin_ns);
    }
    *us_p50 = TD_MIN(*us_p50, bench_samples_percentile(&samples, 50) * 1e3);
    *us_p99 = TD_MIN(*us_p99, bench_samples_percentile(&samples, 99) * 1e3);
    bench_samples_fini(&samples);
    return ok;
}

static bool measure(router_bench_t *b)
{
    double blocks_s = 0;
    double us = 1e9;
    double us_p50 = 1e9;
    double us_p99 = 1e9;

    for (uint32_t r = 0; r < b->options.repeat; r++) {
        rtr_index_destroy(b->index);
        b->index = NULL;
        if (rtr_index_create(b->options.blocks, b->options.nodes, &b->index) != TD_OK || !fill(b) ||
            !churn(b, &blocks_s) || !match(b, r, &us) || !place(b, &us_p50, &us_p99)) {
            return false;
        }
    }
    add_figure(b, "match_us", us);
    add_figure(b, "place_us_p50", us_p50);
    add_figure(b, "place_us_p99", us_p99);
    add_figure(b, "event_blocks_s", blocks_s);
    add_figure(b, "index_mb", (double)rtr_index_bytes(b->index) / 1e6);
    return true;
}

static int parse_options(int argc, char **argv, router_options_t *o)
{
    const bench_option_t options[] = {
        {.name = "nodes",
         .kind = BENCH_NUMBER,
         .out = &o->nodes,
         .min = ROUTER_COPIES,
         .max = RTR_INDEX_SLOTS_MAX},
        {.name = "blocks",
         .kind = BENCH_NUMBER,
         .out = &o->blocks,
         .min = 2 * ROUTER_PROMPT_BLOCKS,
         .max = RTR_INDEX_BLOCKS_MAX},
        BENCH_REPEAT_OPTION(&o->repeat),
        BENCH_JSON_OPTION(&o->json),
    };

    return bench_parse_options(argc, argv, "router", print_help, options, TD_ARRAY_LEN(options));
}

int bench_router(int argc, char **argv)
{
    router_bench_t b = {.options = {.nodes = 1000, .blocks = 1000000, .repeat = 3}};
    int rc = parse_options(argc, argv, &b.options);

    if (rc != BENCH_EXIT_OK) {
        return rc < 0 ? BENCH_EXIT_OK : rc;
    }
    b.prompts =
        (b.options.blocks - ROUTER_SHARED_BLOCKS) / (ROUTER_PROMPT_BLOCKS - ROUTER_SHARED_BLOCKS);
    b.keys = td_calloc((size_t)b.prompts * ROUTER_PROMPT_BLOCKS, sizeof(*b.keys));
    b.next = td_calloc(b.options.nodes, sizeof(*b.next));
    b.matches = td_calloc(b.options.nodes, sizeof(*b.matches));
    b.backlogs = td_calloc(b.options.nodes, sizeof(*b.backlogs));
    b.prefill = td_calloc(b.options.nodes, sizeof(*b.prefill));
    b.decode = td_calloc(b.options.nodes, sizeof(*b.decode));
    b.figures = json_object();
    rc = BENCH_EXIT_FAILED;
    if (b.keys != NULL && b.next != NULL && b.matches != NULL && b.backlogs != NULL &&
        b.prefill != NULL && b.decode != NULL && b.figures != NULL) {
        make_keys(&b);
        if (measure(&b)) {
            bench_print_figures(b.figures, b.options.json);
            rc = BENCH_EXIT_OK;
        }
    }
    json_decref(b.figures);
    rtr_index_destroy(b.index);
    td_free(b.keys);
    td_free(b.next);
    td_free(b.matches);
    td_free(b.backlogs);
    td_free(b.prefill);
    td_free(b.decode);
    return rc;
}

/* Trees of tokens in one pass: every row's logits are those of its path alone, bit for bit, and so
 * is the KV of a path that is copied into place (I1). */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include "tests/unit/model/test_model_rig.h"

enum {
    NODES = 13,
    BRANCHES_MAX = 8,
    TABLE_MAX = 64,
    SCRATCH_MAX = 64, /* blocks behind those of the sequences */
    CONTEXT = 600,
    LONGEST = 540
};

/* Node 0 is the newest token; the first child of a node goes on with its path. */
static const int parents[NODES] = {-1, 0, 1, 2, 3, 0, 0, 5, 1, 8, 8, 3, 5};

typedef struct node {
    uint32_t depth;
    uint32_t branch; /* 0: the trunk */
} node_t;

typedef struct tree {
    rig_t *rig;
    uint32_t sequence;
    uint32_t root; /* position */
    node_t nodes[NODES];
    uint32_t tables[BRANCHES_MAX][TABLE_MAX];
    uint32_t from[BRANCHES_MAX]; /* the node that a branch begins with */
    uint32_t copies[NODES][BRANCHES_MAX];
    uint32_t copy_counts[NODES];
} tree_t;

static const char *const isas[] = {"portable", "avx2", "avx512"};
static const td_isa_t isa_values[] = {TD_ISA_PORTABLE, TD_ISA_AVX2, TD_ISA_AVX512};

/* A rig with room for scratch blocks behind the sequences' own. */
static void rig_init_scratch(rig_t *rig, const td_gguf_t *gguf, const td_model_options_t *options,
                             uint32_t sequences)
{
    rig_init(rig, gguf, options, sequences, LONGEST);
    td_free(rig->pool);
    rig->pool_bytes += SCRATCH_MAX * td_kv_block_bytes(&rig->info->kv);
    rig->pool = td_calloc(rig->pool_bytes, 1);
    assert_non_null(rig->pool);
    memset(rig->pool, 0xff, rig->pool_bytes); /* what is read and was not written is NaN */
}

static uint8_t *block_at(const rig_t *rig, uint32_t block)
{
    return rig->pool + block * td_kv_block_bytes(&rig->info->kv);
}

static uint32_t node_token(const tree_t *t, uint32_t node)
{
    return node == 0 ? token_at(t->rig, t->sequence, t->root)
                     : (node * 31u + t->root * 7u + t->sequence) % TINY_VOCAB;
}

static uint32_t position_of(const tree_t *t, uint32_t node)
{
    return t->root + t->nodes[node].depth;
}

static bool is_ancestor(int ancestor, int node)
{
    for (node = parents[node]; node >= 0 && node != ancestor; node = parents[node]) {
    }
    return node == ancestor;
}

/* A branch's table: its parent's up to where it begins, then blocks of its own. */
static void begin_branch(tree_t *t, uint32_t branch, uint32_t node, uint32_t *scratch)
{
    const uint32_t block_tokens = t->rig->info->kv.block_tokens;
    const uint32_t first = position_of(t, node) / block_tokens;
    const uint32_t last = (t->root + NODES) / block_tokens;
    const uint32_t *own = t->rig->blocks + t->sequence * t->rig->sequence_blocks;

    t->from[branch] = node;
    memcpy(t->tables[branch], t->tables[t->nodes[parents[node]].branch], sizeof(t->tables[0]));
    for (uint32_t b = first; b <= last; b++) {
        t->tables[branch][b] = (*scratch)++;
    }
    if (t->root > first * block_tokens) {
        td_kv_copy_tokens(&t->rig->info->kv, block_at(t->rig, t->tables[branch][first]),
                          block_at(t->rig, own[first]), 0, t->root - first * block_tokens);
    }
}

static void plan_copies(tree_t *t, uint32_t branches)
{
    const uint32_t block_tokens = t->rig->info->kv.block_tokens;

    for (uint32_t i = 0; i < NODES; i++) {
        for (uint32_t b = 1; b < branches; b++) {
            const uint32_t first = position_of(t, t->from[b]) / block_tokens;
            if (is_ancestor((int)i, (int)t->from[b]) && position_of(t, i) / block_tokens == first) {
                t->copies[i][t->copy_counts[i]++] = t->tables[b][first];
            }
        }
    }
}

static void tree_init(tree_t *t, rig_t *rig, uint32_t sequence, uint32_t root, uint32_t *scratch)
{
    uint32_t branches = 1;
    bool has_child[NODES] = {false};

    *t = (tree_t){.rig = rig, .sequence = sequence, .root = root};
    memcpy(t->tables[0], rig->blocks + sequence * rig->sequence_blocks,
           rig->sequence_blocks * sizeof(uint32_t));
    for (uint32_t i = 1; i < NODES; i++) {
        const uint32_t parent = (uint32_t)parents[i];
        t->nodes[i].depth = t->nodes[parent].depth + 1;
        t->nodes[i].branch = t->nodes[parent].branch;
        if (has_child[parent]) {
            t->nodes[i].branch = branches;
            begin_branch(t, branches++, i, scratch);
        }
        has_child[parent] = true;
    }
    plan_copies(t, branches);
}

/* Branch after branch, so that a sequence's rows stand together. Answers how many rows; nodes_out:
 * whose they are. */
static uint32_t tree_rows(const tree_t *t, uint32_t at, uint32_t *nodes_out)
{
    uint32_t count = 0;

    for (uint32_t branch = 0; branch < BRANCHES_MAX; branch++) {
        for (uint32_t i = 0; i < NODES; i++) {
            if (t->nodes[i].branch != branch) {
                continue;
            }
            nodes_out[count] = i;
            t->rig->rows[at + count++] = (td_model_row_t){.token = node_token(t, i),
                                                          .position = position_of(t, i),
                                                          .blocks = t->tables[branch],
                                                          .copies = t->copies[i],
                                                          .copy_count = t->copy_counts[i],
                                                          .is_branch = branch > 0,
                                                          .want_logits = true};
        }
    }
    assert_int_equal(count, NODES);
    return count;
}

/* The path to a node as if nothing else had ever been there: in plain, token by token. */
static void compute_path(rig_t *plain, const tree_t *t, uint32_t node, float *out)
{
    uint32_t path[NODES];
    uint32_t len = 0;
    const float *logits = NULL;

    for (int at = (int)node; at >= 0; at = parents[at]) {
        path[len++] = (uint32_t)at;
    }
    while (len > 0) {
        len--;
        plain->rows[0] =
            (td_model_row_t){.token = node_token(t, path[len]),
                             .position = position_of(t, path[len]),
                             .blocks = plain->blocks + t->sequence * plain->sequence_blocks,
                             .want_logits = true};
        assert_int_equal(
            td_model_forward(plain->model, plain->pool, plain->rows, 1, 0, NULL, NULL, &logits),
            TD_OK);
    }
    memcpy(out, logits, TINY_VOCAB * sizeof(*out));
}

/* A path is accepted: what it has outside its sequence's blocks goes into them. */
static void accept_path(const tree_t *t, uint32_t node)
{
    const td_kv_layout_t *kv = &t->rig->info->kv;

    for (int at = (int)node; at >= 0; at = parents[at]) {
        const uint32_t position = position_of(t, (uint32_t)at);
        const uint32_t block = position / kv->block_tokens;
        const uint32_t from = t->tables[t->nodes[at].branch][block];
        const uint32_t to = t->tables[0][block];
        if (from != to) {
            td_kv_copy_tokens(kv, block_at(t->rig, to), block_at(t->rig, from),
                              position % kv->block_tokens, position % kv->block_tokens + 1);
        }
    }
}

/* The token behind an accepted path. */
static void compute_next(rig_t *rig, const tree_t *t, uint32_t node, float *out)
{
    const float *logits = NULL;

    rig->rows[0] = (td_model_row_t){.token = 3,
                                    .position = position_of(t, node) + 1,
                                    .blocks = rig->blocks + t->sequence * rig->sequence_blocks,
                                    .want_logits = true};
    assert_int_equal(td_model_forward(rig->model, rig->pool, rig->rows, 1, 0, NULL, NULL, &logits),
                     TD_OK);
    memcpy(out, logits, TINY_VOCAB * sizeof(*out));
}

static void fill(rig_t *rig, uint32_t sequence, uint32_t tokens)
{
    float last[TINY_VOCAB];

    prefill(rig, sequence, tokens, 128, last);
}

/* Two trees and a plain row between them. */
static void compare_trees(const td_model_options_t *options, const tiny_spec_t *spec,
                          uint32_t root_a, uint32_t root_b)
{
    uint32_t nodes[2][NODES];
    uint32_t scratch = 0;
    const float *logits = NULL;
    float kept[2 * NODES + 1][TINY_VOCAB];
    float want[TINY_VOCAB];
    float got[TINY_VOCAB];
    td_gguf_t *gguf = NULL;
    tiny_t tiny;
    rig_t rig;
    rig_t plain;
    tree_t trees[2];

    tiny_init(&tiny, spec);
    assert_int_equal(td_gguf_open_bytes(tiny.bytes, tiny.len, &gguf), TD_OK);
    rig_init_scratch(&rig, gguf, options, 3);
    rig_init_scratch(&plain, gguf, options, 3);
    scratch = 3 * rig.sequence_blocks;
    for (uint32_t s = 0; s < 3; s++) {
        fill(&rig, s, s == 0 ? root_a : s == 1 ? root_b : 20);
        fill(&plain, s, s == 0 ? root_a : s == 1 ? root_b : 20);
    }
    tree_init(&trees[0], &rig, 0, root_a, &scratch);
    tree_init(&trees[1], &rig, 1, root_b, &scratch);
    assert_true(scratch <= 3 * rig.sequence_blocks + SCRATCH_MAX);
    (void)tree_rows(&trees[0], 0, nodes[0]);
    set_row(&rig, NODES, 2, 20, true);
    (void)tree_rows(&trees[1], NODES + 1, nodes[1]);
    assert_int_equal(
        td_model_forward(rig.model, rig.pool, rig.rows, 2 * NODES + 1, 0, NULL, NULL, &logits),
        TD_OK);
    memcpy(kept, logits, sizeof(kept));
    for (uint32_t s = 0; s < 2; s++) {
        for (uint32_t i = 0; i < NODES; i++) {
            compute_path(&plain, &trees[s], nodes[s][i], want);
            assert_same_bits(want, kept[s * (NODES + 1) + i], TINY_VOCAB);
        }
    }
    set_row(&plain, 0, 2, 20, true);
    assert_int_equal(
        td_model_forward(plain.model, plain.pool, plain.rows, 1, 0, NULL, NULL, &logits), TD_OK);
    assert_same_bits(logits, kept[NODES], TINY_VOCAB);
    for (uint32_t s = 0; s < 2; s++) {
        const uint32_t end = (root_a * 5u + s) % NODES; /* any node */
        compute_path(&plain, &trees[s], end, want);
        compute_next(&plain, &trees[s], end, want);
        accept_path(&trees[s], end);
        compute_next(&rig, &trees[s], end, got);
        assert_same_bits(want, got, TINY_VOCAB);
    }
    rig_fini(&rig);
    rig_fini(&plain);
    td_gguf_close(gguf);
    tiny_fini(&tiny);
}

static td_model_options_t tree_options(void)
{
    td_model_options_t options = default_options();

    options.logit_rows_max = 64;
    return options;
}

static void test_trees_at_every_offset_have_their_paths_bits(void **state)
{
    const tiny_spec_t spec = {.type = TD_GGUF_Q4_1, .context = CONTEXT};
    td_model_options_t options = tree_options();
    (void)state;

    for (uint32_t offset = 0; offset < 32; offset++) {
        options.threads = 1 + offset % 2;
        options.kv_codec = (td_kv_codec_t)(offset / 2 % TD_KV_CODECS);
        options.block_tokens = offset % 3 == 2 ? 32 : 16;
        compare_trees(&options, &spec, 17 + offset, 40 - offset);
    }
}

static void test_trees_on_every_isa_and_codec(void **state)
{
    const tiny_spec_t spec = {.type = TD_GGUF_Q8_0, .context = CONTEXT};
    td_model_options_t options = tree_options();
    (void)state;

    for (size_t i = 0; i < TD_ARRAY_LEN(isas); i++) {
        for (uint32_t turn = 0; td_cpu_ops_find(isas[i]) != NULL && turn < 2 * TD_KV_CODECS;
             turn++) {
            options.isa = isa_values[i];
            options.kv_codec = (td_kv_codec_t)(turn / 2);
            options.threads = 1 + turn % 2;
            compare_trees(&options, &spec, 29 + turn, 1);
        }
    }
}

/* Contexts of several spans, whose parts are merged; and a tree on both sides of a span's end. */
static void test_trees_behind_long_contexts(void **state)
{
    const tiny_spec_t spec = {.type = TD_GGUF_Q4_0, .context = CONTEXT};
    td_model_options_t options = tree_options();
    (void)state;

    for (uint32_t root = 505; root < 515; root++) {
        options.threads = 1 + root % 2;
        compare_trees(&options, &spec, root, 520);
    }
}

static void test_trees_under_masks(void **state)
{
    static const char *const masks[] = {"window:1", "window:20", "window:50,3", "strided:24,64,8",
                                        "strided:7,10,1"};
    const tiny_spec_t spec = {.type = TD_GGUF_Q4_1, .context = CONTEXT};
    td_model_options_t options = tree_options();
    (void)state;

    for (size_t m = 0; m < TD_ARRAY_LEN(masks); m++) {
        options.attention = masks[m];
        options.threads = 1 + m % 2;
        options.kv_codec = (td_kv_codec_t)(m % TD_KV_CODECS);
        for (uint32_t root = 30; root < 36; root++) {
            compare_trees(&options, &spec, root, 100 + root);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_trees_at_every_offset_have_their_paths_bits),
        cmocka_unit_test(test_trees_on_every_isa_and_codec),
        cmocka_unit_test(test_trees_behind_long_contexts),
        cmocka_unit_test(test_trees_under_masks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

/* The forward pass: equal to a textbook one, and the same bits whatever is done to it (I1). Runs
 * from the repository root; the tests on a real model want build/models. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include "common/model/td_threads.h"
#include "tests/unit/model/test_model_rig.h"

#define REAL_MODEL "build/models/SmolLM2-135M-Instruct.Q4_1.gguf"

static const td_gguf_type_t all_types[] = {TD_GGUF_F32,  TD_GGUF_F16,  TD_GGUF_BF16,
                                           TD_GGUF_Q8_0, TD_GGUF_Q4_0, TD_GGUF_Q4_1};

/* --- tiny models -------------------------------------------------------------------------------
 */

enum { TINY_TOKENS = 75 }; /* three attention tiles, the last one partial */

static double worst_relative_error(const tiny_t *tiny, rig_t *rig)
{
    static tiny_cache_t cache;
    double want[TINY_VOCAB];
    double worst = 0;

    cache.codec = rig->info->kv.codec;
    for (uint32_t p = 0; p < TINY_TOKENS; p++) {
        const float *logits = NULL;
        double largest = 0;
        double difference = 0;
        tiny_forward(tiny, &cache, token_at(rig, 0, p), p, want);
        set_row(rig, 0, 0, p, true);
        assert_int_equal(
            td_model_forward(rig->model, rig->pool, rig->rows, 1, 0, NULL, NULL, &logits), TD_OK);
        for (int i = 0; i < TINY_VOCAB; i++) {
            largest = fmax(largest, fabs(want[i]));
            difference = fmax(difference, fabs(want[i] - (double)logits[i]));
        }
        worst = fmax(worst, difference / largest);
    }
    return worst;
}

static void compare_with_textbook(const tiny_spec_t *spec, td_precision_t precision,
                                  td_kv_codec_t codec, double limit)
{
    td_model_options_t options = default_options();
    td_gguf_t *gguf = NULL;
    double worst = 0;
    tiny_t tiny;
    rig_t rig;

    options.precision = precision;
    options.kv_codec = codec;
    tiny_init(&tiny, spec);
    assert_int_equal(td_gguf_open_bytes(tiny.bytes, tiny.len, &gguf), TD_OK);
    rig_init(&rig, gguf, &options, 1, TINY_TOKENS);
    worst = worst_relative_error(&tiny, &rig);
    print_message("type %d precision %d %s: worst relative error %.2e\n", (int)spec->type,
                  (int)precision, td_kv_codec_name(codec), worst);
    assert_true(worst < limit);
    rig_fini(&rig);
    td_gguf_close(gguf);
    tiny_fini(&tiny);
}

static void test_tiny_models_match_the_textbook(void **state)
{
    (void)state;
    for (size_t i = 0; i < TD_ARRAY_LEN(all_types); i++) {
        bool is_float = all_types[i] != TD_GGUF_Q8_0 && all_types[i] != TD_GGUF_Q4_0 &&
                        all_types[i] != TD_GGUF_Q4_1;
        tiny_spec_t spec = {.type = all_types[i], .untied = i % 2 == 1};
        for (int precision = TD_PRECISION_FAST; precision <= TD_PRECISION_EXACT; precision++) {
            bool int8 = !is_float && precision != TD_PRECISION_EXACT;
            compare_with_textbook(&spec, (td_precision_t)precision, TD_KV_F16, int8 ? 0.1 : 1e-3);
        }
    }
    compare_with_textbook(&(tiny_spec_t){.type = TD_GGUF_F32, .rope_dim = 8}, TD_PRECISION_EXACT,
                          TD_KV_F16, 1e-3);
}

static void test_codecs_match_the_textbook(void **state)
{
    const tiny_spec_t spec = {.type = TD_GGUF_F32};
    (void)state;

    for (uint32_t codec = 0; codec < TD_KV_CODECS; codec++) {
        compare_with_textbook(&spec, TD_PRECISION_EXACT, (td_kv_codec_t)codec, 1e-3);
    }
}

/* Loads the same bytes twice and compares KV and logits of chunked prefills. */
static void compare_rigs(const tiny_spec_t *spec, const td_model_options_t *a,
                         const td_model_options_t *b, uint32_t chunk_a, uint32_t chunk_b)
{
    float logits_a[TINY_VOCAB];
    float logits_b[TINY_VOCAB];
    td_gguf_t *gguf = NULL;
    tiny_t tiny;
    rig_t rig_a;
    rig_t rig_b;

    tiny_init(&tiny, spec);
    assert_int_equal(td_gguf_open_bytes(tiny.bytes, tiny.len, &gguf), TD_OK);
    rig_init(&rig_a, gguf, a, 1, TINY_TOKENS);
    rig_init(&rig_b, gguf, b, 1, TINY_TOKENS);
    td_gguf_close(gguf); /* nothing of the file is needed any more */
    tiny_fini(&tiny);
    prefill(&rig_a, 0, TINY_TOKENS, chunk_a, logits_a);
    prefill(&rig_b, 0, TINY_TOKENS, chunk_b, logits_b);
    assert_same_bits(logits_a, logits_b, TINY_VOCAB);
    if (a->block_tokens == b->block_tokens) {
        assert_memory_equal(rig_a.pool, rig_b.pool, rig_a.pool_bytes);
    }
    rig_fini(&rig_a);
    rig_fini(&rig_b);
}

static void test_tiny_models_have_the_same_bits_on_every_isa(void **state)
{
    static const td_isa_t isas[] = {TD_ISA_AVX2, TD_ISA_AVX512};
    static const char *const names[] = {"avx2", "avx512"};
    uint32_t turn = 0;
    (void)state;
    for (size_t v = 0; v < TD_ARRAY_LEN(isas); v++) {
        for (size_t i = 0; td_cpu_ops_find(names[v]) != NULL && i < TD_ARRAY_LEN(all_types); i++) {
            for (int precision = TD_PRECISION_FAST; precision <= TD_PRECISION_EXACT; precision++) {
                tiny_spec_t spec = {.type = all_types[i], .untied = i % 2 == 0, .rope_dim = 8};
                td_model_options_t portable = default_options();
                td_model_options_t vectors = default_options();
                portable.precision = vectors.precision = (td_precision_t)precision;
                portable.isa = TD_ISA_PORTABLE;
                vectors.isa = isas[v];
                portable.threads = 1;
                portable.kv_codec = vectors.kv_codec = (td_kv_codec_t)(turn++ % TD_KV_CODECS);
                compare_rigs(&spec, &portable, &vectors, 1, 37);
                compare_rigs(&spec, &portable, &vectors, TINY_TOKENS, 5);
            }
        }
    }
}

static void test_block_size_and_threads_change_no_bit(void **state)
{
    tiny_spec_t spec = {.type = TD_GGUF_Q4_0};
    td_model_options_t a = default_options();
    td_model_options_t b = default_options();
    (void)state;

    b.block_tokens = 48; /* tiles of 32 then cross blocks */
    b.threads = 5;       /* more than heads, panels or rows in places */
    for (uint32_t codec = 0; codec < TD_KV_CODECS; codec++) {
        a.kv_codec = b.kv_codec = (td_kv_codec_t)codec;
        compare_rigs(&spec, &a, &b, 16, 29);
    }
}

/* --- refusals ----------------------------------------------------------------------------------
 */

static td_status_t try_load(const tiny_spec_t *spec, const td_model_options_t *options)
{
    td_model_t *model = NULL;
    td_gguf_t *gguf = NULL;
    td_status_t status = TD_OK;
    tiny_t tiny;

    tiny_init(&tiny, spec);
    assert_int_equal(td_gguf_open_bytes(tiny.bytes, tiny.len, &gguf), TD_OK);
    status = td_model_load(gguf, options, &model);
    if (status != TD_OK) {
        assert_null(model);
    }
    td_model_destroy(model);
    td_gguf_close(gguf);
    tiny_fini(&tiny);
    return status;
}

static void test_load_refuses_malformed_models(void **state)
{
    static const char *const tensors[] = {
        "token_embd.weight",      "output_norm.weight",    "blk.1.attn_q.weight",
        "blk.0.attn_k.weight",    "blk.0.attn_v.weight",   "blk.1.attn_output.weight",
        "blk.0.ffn_gate.weight",  "blk.1.ffn_up.weight",   "blk.1.ffn_down.weight",
        "blk.0.attn_norm.weight", "blk.1.ffn_norm.weight",
    };
    static const char *const keys[] = {
        "llama.block_count",          "llama.context_length",
        "llama.embedding_length",     "llama.feed_forward_length",
        "llama.attention.head_count", "llama.attention.layer_norm_rms_epsilon"};
    const td_model_options_t options = default_options();
    (void)state;

    for (size_t i = 0; i < TD_ARRAY_LEN(tensors); i++) {
        tiny_spec_t shape = {.type = TD_GGUF_F16, .misshapen = tensors[i], .untied = true};
        tiny_spec_t missing = {.type = TD_GGUF_F16, .leave_out = tensors[i]};
        assert_int_equal(try_load(&shape, &options), TD_ERR_INVALID);
        assert_int_equal(try_load(&missing, &options), TD_ERR_INVALID);
    }
    for (size_t i = 0; i < TD_ARRAY_LEN(keys); i++) {
        tiny_spec_t missing = {.type = TD_GGUF_F16, .leave_out = keys[i]};
        assert_int_equal(try_load(&missing, &options), TD_ERR_INVALID);
    }
    tiny_spec_t architecture = {.architecture = "mamba"};
    tiny_spec_t bias = {.extra_tensor = "blk.0.attn_q.bias"};
    tiny_spec_t heads = {.heads = 5};
    tiny_spec_t rope = {.rope_dim = 24};
    tiny_spec_t more_blocks = {.blocks = 3};
    tiny_spec_t fewer_blocks = {.blocks = 1};
    assert_int_equal(try_load(&architecture, &options), TD_ERR_UNSUPPORTED);
    assert_int_equal(try_load(&bias, &options), TD_ERR_UNSUPPORTED);
    assert_int_equal(try_load(&heads, &options), TD_ERR_UNSUPPORTED);
    assert_int_equal(try_load(&rope, &options), TD_ERR_UNSUPPORTED);
    assert_int_equal(try_load(&more_blocks, &options), TD_ERR_INVALID);
    assert_int_equal(try_load(&fewer_blocks, &options), TD_ERR_UNSUPPORTED);
}

static void test_load_refuses_bad_options(void **state)
{
    const tiny_spec_t spec = {.type = TD_GGUF_F32};
    td_model_options_t bad[11];
    (void)state;

    for (size_t i = 0; i < TD_ARRAY_LEN(bad); i++) {
        bad[i] = default_options();
    }
    bad[0].threads = 0;
    bad[1].threads = TD_THREADS_MAX + 1;
    bad[2].rows_max = 0;
    bad[3].rows_max = TD_MODEL_ROWS_MAX + 1;
    bad[4].logit_rows_max = bad[4].rows_max + 1;
    bad[5].block_tokens = 0;
    bad[6].block_tokens = 24;
    bad[7].context_max = TINY_CONTEXT + 1;
    bad[8].precision = (td_precision_t)3;
    bad[9].kv_codec = (td_kv_codec_t)TD_KV_CODECS;
    bad[10].backend = (td_backend_t)2;
    for (size_t i = 0; i < TD_ARRAY_LEN(bad); i++) {
        assert_int_equal(try_load(&spec, &bad[i]), TD_ERR_INVALID);
    }
}

/* This program is linked without it. */
static void test_load_refuses_a_backend_that_is_not_there(void **state)
{
    td_model_options_t options = default_options();
    (void)state;

    assert_int_equal(td_backend_parse("cuda", &options.backend), TD_OK);
    assert_int_equal(options.backend, TD_BACKEND_CUDA);
    assert_int_equal(try_load(&(tiny_spec_t){.type = TD_GGUF_F32}, &options), TD_ERR_UNSUPPORTED);
    assert_int_equal(td_backend_parse("cpu", &options.backend), TD_OK);
    assert_int_equal(options.backend, TD_BACKEND_CPU);
    assert_int_equal(td_backend_parse("gpu", &options.backend), TD_ERR_INVALID);
}

static void test_lists_of_devices(void **state)
{
    static const char *const bad[] = {"",           ",",    "0,",  ",0",
                                      "0,,1",       "a",    "0 1", "0, 1",
                                      "-1",         "1024", "0-3", "0,1,2,3,4,5,6,7,8",
                                      "4294967296", "0x1"};
    td_devices_t devices = {.count = 77};
    (void)state;

    for (size_t i = 0; i < TD_ARRAY_LEN(bad); i++) {
        assert_int_equal(td_devices_parse(bad[i], &devices), TD_ERR_INVALID);
        assert_int_equal(devices.count, 77);
    }
    assert_int_equal(td_devices_parse("3", &devices), TD_OK);
    assert_int_equal(devices.count, 1);
    assert_int_equal(devices.ids[0], 3);
    assert_int_equal(td_devices_parse("7,0,1023,2,4,5,6,1", &devices), TD_OK);
    assert_int_equal(devices.count, TD_MODEL_DEVICES_MAX);
    assert_int_equal(devices.ids[0], 7);
    assert_int_equal(devices.ids[2], 1023);
    assert_int_equal(devices.ids[7], 1);
}

#define TINY_RIG(rig, gguf, tiny)                                                                  \
    tiny_init(&(tiny), &(tiny_spec_t){.type = TD_GGUF_Q8_0});                                      \
    assert_int_equal(td_gguf_open_bytes((tiny).bytes, (tiny).len, &(gguf)), TD_OK);                \
    rig_init(&(rig), (gguf), &options, 2, TINY_CONTEXT);                                           \
    td_gguf_close(gguf);                                                                           \
    tiny_fini(&(tiny))

static void test_info_says_what_was_loaded(void **state)
{
    const td_model_options_t options = default_options();
    td_gguf_t *gguf = NULL;
    tiny_t tiny;
    rig_t rig;
    (void)state;

    TINY_RIG(rig, gguf, tiny);
    assert_string_equal(rig.info->name, "tiny?? model");
    assert_string_equal(rig.info->numerics_class, "cpu/mixed/r2");
    assert_int_equal(rig.info->vocab_size, TINY_VOCAB);
    assert_int_equal(rig.info->context_max, TINY_CONTEXT);
    assert_int_equal(rig.info->kv.layers, TINY_LAYERS);
    assert_int_equal(rig.info->kv.kv_heads, TINY_KV_HEADS);
    assert_int_equal(rig.info->kv.head_dim, TINY_HEAD_DIM);
    rig_fini(&rig);
}

static void test_forward_refuses_bad_rows_and_writes_nothing(void **state)
{
    td_model_options_t options = default_options();
    const float *logits = NULL;
    td_gguf_t *gguf = NULL;
    tiny_t tiny;
    rig_t rig;
    (void)state;

    options.rows_max = 8;
    options.logit_rows_max = 2;
    TINY_RIG(rig, gguf, tiny);
    for (int bad = 0; bad < 7; bad++) {
        uint32_t count = 4;
        for (uint32_t i = 0; i < 4; i++) {
            set_row(&rig, i, 0, i, i == 3);
        }
        switch (bad) {
        case 0:
            rig.rows[2].token = TINY_VOCAB;
            break;
        case 1:
            rig.rows[3].position = TINY_CONTEXT;
            break;
        case 2:
            rig.rows[1].blocks = NULL;
            break;
        case 3:
            rig.rows[2].position = 1; /* twice */
            break;
        case 4:
            count = 0;
            break;
        case 5:
            count = 9;
            break;
        default:
            rig.rows[0].want_logits = rig.rows[1].want_logits = true;
            break;
        }
        assert_int_equal(
            td_model_forward(rig.model, rig.pool, rig.rows, count, 0, NULL, NULL, &logits),
            TD_ERR_INVALID);
        assert_null(logits);
    }
    for (size_t i = 0; i < rig.pool_bytes; i++) {
        assert_int_equal(rig.pool[i], 0);
    }
    rig_fini(&rig);
}

typedef struct reports {
    uint32_t end;
    uint32_t count;
    bool in_order;
} reports_t;

static void on_layers(void *ctx, uint32_t begin, uint32_t end)
{
    reports_t *r = ctx;
    r->in_order = r->in_order && begin == r->end && end > begin;
    r->end = end;
    r->count++;
}

static void test_forward_reports_layers_in_order_and_never_allocates(void **state)
{
    static const uint32_t counts[] = {1, TINY_LAYERS, 1, 1}; /* by layers_step */
    const td_model_options_t options = default_options();
    const float *logits = NULL;
    uint64_t allocations = 0;
    td_gguf_t *gguf = NULL;
    tiny_t tiny;
    rig_t rig;
    (void)state;

    TINY_RIG(rig, gguf, tiny);
    allocations = td_alloc_count();
    for (uint32_t step = 0; step < TD_ARRAY_LEN(counts); step++) {
        reports_t reports = {.in_order = true};
        for (uint32_t i = 0; i < 40; i++) {
            set_row(&rig, i, 0, i, i >= 30);
        }
        assert_int_equal(
            td_model_forward(rig.model, rig.pool, rig.rows, 40, step, on_layers, &reports, &logits),
            TD_OK);
        assert_true(reports.in_order);
        assert_int_equal(reports.end, TINY_LAYERS);
        assert_int_equal(reports.count, counts[step]);
    }
    assert_true(td_alloc_count() == allocations);
    rig_fini(&rig);
}

/* Prefill chunks of one sequence, decode rows of another, and a gap, in one pass. */
static void test_mixed_pass_equals_separate_passes(void **state)
{
    const td_model_options_t options = default_options();
    const float *logits = NULL;
    float alone[2][TINY_VOCAB];
    float ignored[TINY_VOCAB];
    td_gguf_t *gguf = NULL;
    tiny_t tiny;
    rig_t rig;
    (void)state;

    TINY_RIG(rig, gguf, tiny);
    prefill(&rig, 0, 60, 60, alone[0]);
    prefill(&rig, 1, 34, 34, alone[1]);
    memset(rig.pool, 0, rig.pool_bytes);
    prefill(&rig, 0, 35, 35, ignored);
    prefill(&rig, 1, 33, 33, ignored);
    set_row(&rig, 0, 1, 33, true);
    for (uint32_t i = 0; i < 25; i++) {
        set_row(&rig, 1 + i, 0, 35 + i, i == 24);
    }
    assert_int_equal(td_model_forward(rig.model, rig.pool, rig.rows, 26, 0, NULL, NULL, &logits),
                     TD_OK);
    assert_same_bits(logits, alone[1], TINY_VOCAB);
    assert_same_bits(logits + TINY_VOCAB, alone[0], TINY_VOCAB);
    rig_fini(&rig);
}

/* --- the real model -----------------------------------------------------------------------------
 */

/* Sanitizers make a pass many times slower; the shorter prompt still fills several tiles. */
#if defined(__SANITIZE_ADDRESS__)
enum { REAL_TOKENS = 70, REAL_SEQUENCES = 8, PORTABLE_TOKENS = 2, SCRAMBLED_TOKENS = 50 };
#else
enum { REAL_TOKENS = 260, REAL_SEQUENCES = 8, PORTABLE_TOKENS = 6, SCRAMBLED_TOKENS = 100 };
#endif
enum { CODEC_TOKENS = 45 }; /* two tiles, three blocks */

typedef struct real {
    td_gguf_t *gguf;
    rig_t rig; /* 2 threads, best instruction set */
    float *a;  /* [vocab_size] */
    float *b;  /* [vocab_size] */
} real_t;

static int real_setup(void **state)
{
    static real_t real;
    td_model_options_t options = default_options();

    if (td_gguf_open(REAL_MODEL, &real.gguf) != TD_OK) {
        print_message("no model at " REAL_MODEL " (run from the repository root, `make model`)\n");
        return -1;
    }
    rig_init(&real.rig, real.gguf, &options, REAL_SEQUENCES, REAL_TOKENS + 8);
    real.a = td_calloc(real.rig.info->vocab_size, sizeof(float));
    real.b = td_calloc(real.rig.info->vocab_size, sizeof(float));
    *state = &real;
    return real.a != NULL && real.b != NULL ? 0 : -1;
}

static int real_teardown(void **state)
{
    real_t *real = *state;
    rig_fini(&real->rig);
    td_gguf_close(real->gguf);
    td_free(real->a);
    td_free(real->b);
    return 0;
}

static void test_chunk_size_changes_no_bit(void **state)
{
    static const uint32_t chunks[] = {1, 7, 16, 64, 512};
    real_t *real = *state;
    rig_t *rig = &real->rig;

    prefill(rig, 0, REAL_TOKENS, 128, real->a);
    for (size_t i = 0; i < TD_ARRAY_LEN(chunks); i++) {
        size_t half = rig->sequence_blocks * td_kv_block_bytes(&rig->info->kv);
        memset(rig->pool + half, 0, half);
        /* The same tokens into another sequence's blocks. */
        for (uint32_t at = 0; at < REAL_TOKENS; at += chunks[i]) {
            uint32_t count = TD_MIN(chunks[i], REAL_TOKENS - at);
            const float *logits = NULL;
            for (uint32_t r = 0; r < count; r++) {
                set_row(rig, r, 0, at + r, at + r + 1 == REAL_TOKENS);
                rig->rows[r].blocks = rig->blocks + rig->sequence_blocks;
            }
            assert_int_equal(
                td_model_forward(rig->model, rig->pool, rig->rows, count, 0, NULL, NULL, &logits),
                TD_OK);
            if (at + count == REAL_TOKENS) {
                assert_same_bits(real->a, logits, rig->info->vocab_size);
            }
        }
        assert_memory_equal(rig->pool, rig->pool + half, half);
    }
}

static void test_batch_changes_no_bit(void **state)
{
    real_t *real = *state;
    rig_t *rig = &real->rig;
    const size_t vocab = rig->info->vocab_size;
    float *alone = td_calloc(REAL_SEQUENCES * vocab, sizeof(float));
    const float *logits = NULL;

    assert_non_null(alone);
    for (uint32_t s = 0; s < REAL_SEQUENCES; s++) {
        uint32_t tokens = 5 + 9 * s; /* different lengths, across tiles */
        prefill(rig, s, tokens, 64, real->a);
        set_row(rig, 0, s, tokens, true);
        assert_int_equal(
            td_model_forward(rig->model, rig->pool, rig->rows, 1, 0, NULL, NULL, &logits), TD_OK);
        memcpy(alone + s * vocab, logits, vocab * sizeof(float));
    }
    for (uint32_t s = 0; s < REAL_SEQUENCES; s++) {
        set_row(rig, s, s, 5 + 9 * s, true);
    }
    assert_int_equal(
        td_model_forward(rig->model, rig->pool, rig->rows, REAL_SEQUENCES, 0, NULL, NULL, &logits),
        TD_OK);
    assert_same_bits(alone, logits, REAL_SEQUENCES * vocab);
    td_free(alone);
}

static void test_scrambled_blocks_change_no_bit(void **state)
{
    real_t *real = *state;
    rig_t *rig = &real->rig;
    const uint32_t count = REAL_SEQUENCES * rig->sequence_blocks;

    prefill(rig, 0, SCRAMBLED_TOKENS, 64, real->a);
    for (uint32_t i = 0; i < count; i++) {
        rig->blocks[i] = (i * 37 + 11) % count; /* a permutation: count is no multiple of 37 */
    }
    assert_true(count % 37 != 0);
    memset(rig->pool, 0x7e, rig->pool_bytes); /* NaN where nothing is written */
    prefill(rig, 0, SCRAMBLED_TOKENS, 33, real->b);
    assert_same_bits(real->a, real->b, rig->info->vocab_size);
    for (uint32_t i = 0; i < count; i++) {
        rig->blocks[i] = i;
    }
    memset(rig->pool, 0, rig->pool_bytes);
}

/* Single rows at long contexts are split into spans over the threads; chunks are not. */
static void test_split_contexts_change_no_bit(void **state)
{
    enum { LONG = 2 * 512 + 40, SINGLE = 3 };
    real_t *real = *state;
    td_model_options_t options = default_options();
    const float *logits = NULL;
    rig_t split;

    rig_init(&split, real->gguf, &options, 1, LONG);
    prefill(&split, 0, LONG, 512, real->a);
    rig_fini(&split);
    options.threads = 3;
    rig_init(&split, real->gguf, &options, 1, LONG);
    prefill(&split, 0, LONG - SINGLE, 300, real->b);
    for (uint32_t p = LONG - SINGLE; p < LONG; p++) {
        set_row(&split, 0, 0, p, true);
        assert_int_equal(
            td_model_forward(split.model, split.pool, split.rows, 1, 0, NULL, NULL, &logits),
            TD_OK);
    }
    assert_same_bits(real->a, logits, real->rig.info->vocab_size);
    rig_fini(&split);
}

/* Few rows of one sequence: heads that would leave threads idle are cut by rows. */
static void test_cut_heads_change_no_bit(void **state)
{
    enum { TOKENS = 44 };
    static const uint32_t chunks[] = {2, 3, 4, 7, 8, 16};
    static const uint32_t threads[] = {2, 4, 5}; /* 3 KV heads: cut 1, 3 and 3 */
    real_t *real = *state;
    td_model_options_t options = default_options();
    rig_t cut;

    options.threads = 1;
    rig_init(&cut, real->gguf, &options, 1, TOKENS);
    prefill(&cut, 0, TOKENS, TOKENS, real->a);
    rig_fini(&cut);
    for (size_t t = 0; t < TD_ARRAY_LEN(threads); t++) {
        options.threads = threads[t];
        rig_init(&cut, real->gguf, &options, 1, TOKENS);
        for (size_t c = 0; c < TD_ARRAY_LEN(chunks); c++) {
            prefill(&cut, 0, TOKENS, chunks[c], real->b);
            assert_same_bits(real->a, real->b, real->rig.info->vocab_size);
        }
        rig_fini(&cut);
    }
}

static void test_threads_and_isa_change_no_bit(void **state)
{
    real_t *real = *state;
    td_model_options_t options = default_options();
    rig_t other;

    prefill(&real->rig, 0, 40, 40, real->a);
    options.threads = 1;
    rig_init(&other, real->gguf, &options, 1, 40);
    prefill(&other, 0, 40, 40, real->b);
    assert_same_bits(real->a, real->b, real->rig.info->vocab_size);
    rig_fini(&other);

    prefill(&real->rig, 0, PORTABLE_TOKENS, PORTABLE_TOKENS, real->a);
    options.threads = 2;
    options.isa = TD_ISA_PORTABLE;
    rig_init(&other, real->gguf, &options, 1, 40);
    prefill(&other, 0, PORTABLE_TOKENS, 4, real->b);
    assert_same_bits(real->a, real->b, real->rig.info->vocab_size);
    rig_fini(&other);
}

/* I1 within each codec: a sequence's tokens in any chunks, by any number of threads and any
 * instruction set; blocks and logits. */
static void codec_changes_no_bit(const real_t *real, td_kv_codec_t codec)
{
    static const uint32_t chunks[] = {1, 4, 29};
    static const uint32_t threads[] = {1, 3};
    td_model_options_t options = default_options();
    float *logits = td_calloc(real->rig.info->vocab_size, sizeof(*logits));
    rig_t want;
    rig_t got;

    assert_non_null(logits);
    options.kv_codec = codec;
    rig_init(&want, real->gguf, &options, 1, CODEC_TOKENS);
    prefill(&want, 0, CODEC_TOKENS, CODEC_TOKENS, real->a);
    for (size_t i = 0; i < TD_ARRAY_LEN(chunks); i++) {
        options.threads = threads[i % TD_ARRAY_LEN(threads)];
        options.isa = i > 0 && td_cpu_ops_find("avx2") != NULL ? TD_ISA_AVX2 : TD_ISA_AUTO;
        rig_init(&got, real->gguf, &options, 1, CODEC_TOKENS);
        memset(got.pool, 0x7e, got.pool_bytes); /* what is not written must not be looked at */
        prefill(&got, 0, CODEC_TOKENS, chunks[i], logits);
        assert_same_bits(real->a, logits, want.info->vocab_size);
        rig_fini(&got);
    }
    prefill(&want, 0, PORTABLE_TOKENS, 1, real->a);
    options.isa = TD_ISA_PORTABLE;
    rig_init(&got, real->gguf, &options, 1, CODEC_TOKENS);
    prefill(&got, 0, PORTABLE_TOKENS, PORTABLE_TOKENS, logits);
    assert_same_bits(real->a, logits, want.info->vocab_size);
    rig_fini(&got);
    rig_fini(&want);
    td_free(logits);
}

/* ... and whatever runs beside it. */
static void codec_batch_changes_no_bit(const real_t *real, td_kv_codec_t codec)
{
    enum { TOGETHER = 5 };
    const size_t vocab = real->rig.info->vocab_size;
    td_model_options_t options = default_options();
    float *alone = td_calloc(TOGETHER * vocab, sizeof(float));
    const float *logits = NULL;
    rig_t rig;

    assert_non_null(alone);
    options.kv_codec = codec;
    rig_init(&rig, real->gguf, &options, TOGETHER, CODEC_TOKENS);
    for (uint32_t s = 0; s < TOGETHER; s++) {
        prefill(&rig, s, 6 + 8 * s, 64, real->a);
        set_row(&rig, 0, s, 6 + 8 * s, true);
        assert_int_equal(td_model_forward(rig.model, rig.pool, rig.rows, 1, 0, NULL, NULL, &logits),
                         TD_OK);
        memcpy(alone + s * vocab, logits, vocab * sizeof(float));
    }
    for (uint32_t s = 0; s < TOGETHER; s++) {
        set_row(&rig, s, s, 6 + 8 * s, true);
    }
    assert_int_equal(
        td_model_forward(rig.model, rig.pool, rig.rows, TOGETHER, 0, NULL, NULL, &logits), TD_OK);
    assert_same_bits(alone, logits, TOGETHER * vocab);
    rig_fini(&rig);
    td_free(alone);
}

static void test_every_codec_keeps_its_bits(void **state)
{
    const real_t *real = *state;

    for (uint32_t codec = 0; codec < TD_KV_CODECS; codec++) {
        codec_changes_no_bit(real, (td_kv_codec_t)codec);
        codec_batch_changes_no_bit(real, (td_kv_codec_t)codec);
    }
}

/* Codecs are different numbers: a mistake that ignores the option would pass the test above. */
static void test_codecs_differ(void **state)
{
    real_t *real = *state;
    td_model_options_t options = default_options();
    double distance[TD_KV_CODECS] = {0};
    rig_t rig;

    prefill(&real->rig, 0, 40, 40, real->a);
    for (uint32_t codec = 1; codec < TD_KV_CODECS; codec++) {
        options.kv_codec = (td_kv_codec_t)codec;
        rig_init(&rig, real->gguf, &options, 1, 40);
        prefill(&rig, 0, 40, 40, real->b);
        for (uint32_t i = 0; i < rig.info->vocab_size; i++) {
            distance[codec] += fabs((double)real->a[i] - (double)real->b[i]);
        }
        rig_fini(&rig);
    }
    assert_true(distance[TD_KV_I8] > 0);
    assert_true(distance[TD_KV_F8_E4M3] > distance[TD_KV_I8]);
    assert_true(distance[TD_KV_F4_E2M1] > distance[TD_KV_F8_E4M3]);
}

int main(void)
{
    const struct CMUnitTest tiny[] = {
        cmocka_unit_test(test_tiny_models_match_the_textbook),
        cmocka_unit_test(test_codecs_match_the_textbook),
        cmocka_unit_test(test_tiny_models_have_the_same_bits_on_every_isa),
        cmocka_unit_test(test_block_size_and_threads_change_no_bit),
        cmocka_unit_test(test_load_refuses_malformed_models),
        cmocka_unit_test(test_load_refuses_bad_options),
        cmocka_unit_test(test_load_refuses_a_backend_that_is_not_there),
        cmocka_unit_test(test_lists_of_devices),
        cmocka_unit_test(test_info_says_what_was_loaded),
        cmocka_unit_test(test_forward_refuses_bad_rows_and_writes_nothing),
        cmocka_unit_test(test_forward_reports_layers_in_order_and_never_allocates),
        cmocka_unit_test(test_mixed_pass_equals_separate_passes),
    };
    const struct CMUnitTest real[] = {
        cmocka_unit_test(test_chunk_size_changes_no_bit),
        cmocka_unit_test(test_batch_changes_no_bit),
        cmocka_unit_test(test_scrambled_blocks_change_no_bit),
        cmocka_unit_test(test_cut_heads_change_no_bit),
        cmocka_unit_test(test_threads_and_isa_change_no_bit),
        cmocka_unit_test(test_split_contexts_change_no_bit),
        cmocka_unit_test(test_every_codec_keeps_its_bits),
        cmocka_unit_test(test_codecs_differ),
    };
    int failed = cmocka_run_group_tests(tiny, NULL, NULL);
#if defined(__SANITIZE_THREAD__)
    (void)real; /* minutes of arithmetic; the tiny models share memory in the same places */
    (void)real_setup;
    (void)real_teardown;
#else
    failed += cmocka_run_group_tests(real, real_setup, real_teardown);
#endif
    return failed;
}

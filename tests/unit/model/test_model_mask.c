/* The forward pass under masks: equal to a textbook one, and the same bits whatever is done to it
 * (I1), also over tables whose unneeded blocks are gone. Runs from the repository root; one test
 * wants build/models. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include "tests/unit/model/test_model_rig.h"

#define REAL_MODEL "build/models/SmolLM2-135M-Instruct.Q4_1.gguf"

enum { TEXTBOOK_TOKENS = 110, LONG_TOKENS = 700, LONG_CONTEXT = 800 };

static const char *const masks[] = {"window:1",     "window:20",        "window:50,3",
                                    "window:600",   "strided:24,64,8",  "strided:7,10,1",
                                    "window:33,40", "strided:100,300,5"};

static const char *const isas[] = {"portable", "avx2", "avx512"};
static const td_isa_t isa_values[] = {TD_ISA_PORTABLE, TD_ISA_AVX2, TD_ISA_AVX512};

static void test_masked_models_match_the_textbook(void **state)
{
    static tiny_cache_t cache;
    (void)state;

    for (size_t m = 0; m < TD_ARRAY_LEN(masks); m++) {
        td_model_options_t options = default_options();
        double worst = 0;
        tiny_t tiny;
        rig_t rig;
        td_gguf_t *gguf = open_tiny(&tiny, &(tiny_spec_t){.type = TD_GGUF_F32});

        options.precision = TD_PRECISION_EXACT;
        options.kv_codec = (td_kv_codec_t)(m % TD_KV_CODECS);
        options.attention = masks[m];
        rig_init(&rig, gguf, &options, 1, TEXTBOOK_TOKENS);
        cache.codec = options.kv_codec;
        cache.mask = rig.info->attention;
        for (uint32_t p = 0; p < TEXTBOOK_TOKENS; p++) {
            const float *logits = NULL;
            double want[TINY_VOCAB];
            double largest = 0;
            double difference = 0;
            tiny_forward(&tiny, &cache, token_at(&rig, 0, p), p, want);
            set_row(&rig, 0, 0, p, true);
            assert_int_equal(
                td_model_forward(rig.model, rig.pool, rig.rows, 1, 0, NULL, NULL, &logits), TD_OK);
            for (int i = 0; i < TINY_VOCAB; i++) {
                largest = fmax(largest, fabs(want[i]));
                difference = fmax(difference, fabs(want[i] - (double)logits[i]));
            }
            worst = fmax(worst, difference / largest);
        }
        print_message("%s: worst relative error %.2e\n", masks[m], worst);
        assert_true(worst < 1e-3);
        rig_fini(&rig);
        td_gguf_close(gguf);
        tiny_fini(&tiny);
    }
}

/* As prefill(), but before each chunk the blocks that no position from there on needs are gone: to
 * read one would end the test. */
static void prefill_freeing(rig_t *rig, uint32_t tokens, uint32_t chunk, float *out)
{
    const uint32_t block_tokens = rig->info->kv.block_tokens;
    const float *logits = NULL;

    for (uint32_t at = 0; at < tokens; at += chunk) {
        const uint32_t count = TD_MIN(chunk, tokens - at);
        for (uint32_t b = 0; b < at / block_tokens; b++) {
            if (!td_attention_needs(&rig->info->attention, at, b * block_tokens,
                                    (b + 1) * block_tokens)) {
                rig->blocks[b] = UINT32_MAX;
            }
        }
        for (uint32_t i = 0; i < count; i++) {
            set_row(rig, i, 0, at + i, at + i + 1 == tokens);
        }
        assert_int_equal(
            td_model_forward(rig->model, rig->pool, rig->rows, count, 0, NULL, NULL, &logits),
            TD_OK);
    }
    memcpy(out, logits, rig->info->vocab_size * sizeof(*out));
}

/* Chunks, threads, instruction sets, codecs, kept or gone: one answer, and the same KV. */
static void test_masked_models_have_the_same_bits(void **state)
{
    static const uint32_t chunks[] = {1, 16, 37, 512};
    uint32_t turn = 0;
    (void)state;

    for (size_t m = 0; m < TD_ARRAY_LEN(masks); m++) {
        td_model_options_t options = default_options();
        float want[TINY_VOCAB];
        float got[TINY_VOCAB];
        tiny_t tiny;
        rig_t kept;
        td_gguf_t *gguf =
            open_tiny(&tiny, &(tiny_spec_t){.type = TD_GGUF_Q4_1, .context = LONG_CONTEXT});

        options.attention = masks[m];
        options.isa = TD_ISA_PORTABLE;
        options.kv_codec = (td_kv_codec_t)(m % TD_KV_CODECS);
        rig_init(&kept, gguf, &options, 1, LONG_TOKENS);
        prefill(&kept, 0, LONG_TOKENS, 300, want);
        for (size_t i = 0; i < TD_ARRAY_LEN(isas); i++) {
            for (size_t c = 0; td_cpu_ops_find(isas[i]) != NULL && c < TD_ARRAY_LEN(chunks); c++) {
                rig_t freed;
                options.isa = isa_values[i];
                options.threads = 1 + turn++ % 3;
                rig_init(&freed, gguf, &options, 1, LONG_TOKENS);
                prefill_freeing(&freed, LONG_TOKENS, chunks[c], got);
                assert_same_bits(want, got, TINY_VOCAB);
                assert_memory_equal(kept.pool, freed.pool, kept.pool_bytes);
                rig_fini(&freed);
            }
        }
        rig_fini(&kept);
        td_gguf_close(gguf);
        tiny_fini(&tiny);
    }
}

/* Rows of several sequences, far apart in position, in one pass: as each alone. */
static void test_masked_batches_have_the_same_bits(void **state)
{
    enum { SEQUENCES = 5 };
    static const uint32_t lengths[SEQUENCES] = {3, 100, 530, 690, 17};
    (void)state;

    for (size_t m = 0; m < TD_ARRAY_LEN(masks); m++) {
        td_model_options_t options = default_options();
        float want[SEQUENCES][TINY_VOCAB];
        const float *logits = NULL;
        tiny_t tiny;
        rig_t rig;
        td_gguf_t *gguf =
            open_tiny(&tiny, &(tiny_spec_t){.type = TD_GGUF_Q8_0, .context = LONG_CONTEXT});

        options.attention = masks[m];
        rig_init(&rig, gguf, &options, SEQUENCES, LONG_TOKENS);
        for (uint32_t s = 0; s < SEQUENCES; s++) {
            prefill(&rig, s, lengths[s], 512, want[s]);
            set_row(&rig, 0, s, lengths[s], true);
            assert_int_equal(
                td_model_forward(rig.model, rig.pool, rig.rows, 1, 0, NULL, NULL, &logits), TD_OK);
            memcpy(want[s], logits, sizeof(want[s]));
        }
        for (uint32_t s = 0; s < SEQUENCES; s++) {
            set_row(&rig, s, s, lengths[s], true);
        }
        assert_int_equal(
            td_model_forward(rig.model, rig.pool, rig.rows, SEQUENCES, 0, NULL, NULL, &logits),
            TD_OK);
        assert_same_bits(want[0], logits, SEQUENCES * TINY_VOCAB);
        rig_fini(&rig);
        td_gguf_close(gguf);
        tiny_fini(&tiny);
    }
}

/* Rows on both sides of a span's end in one pass, whose parts are merged after other passes have
 * left theirs: as one after the other. */
static void test_masked_rows_across_a_span_have_the_same_bits(void **state)
{
    enum { FIRST = 506, ROWS = 12 };
    (void)state;

    for (size_t m = 0; m < TD_ARRAY_LEN(masks); m++) {
        td_model_options_t options = default_options();
        float want[ROWS][TINY_VOCAB];
        const float *logits = NULL;
        tiny_t tiny;
        rig_t rig;
        td_gguf_t *gguf =
            open_tiny(&tiny, &(tiny_spec_t){.type = TD_GGUF_Q4_0, .context = LONG_CONTEXT});

        options.attention = masks[m];
        rig_init(&rig, gguf, &options, 1, LONG_TOKENS);
        prefill(&rig, 0, LONG_TOKENS - 20, 512, want[0]);
        for (uint32_t i = 0; i < 20; i++) { /* fills the parts */
            set_row(&rig, 0, 0, LONG_TOKENS - 20 + i, true);
            assert_int_equal(
                td_model_forward(rig.model, rig.pool, rig.rows, 1, 0, NULL, NULL, &logits), TD_OK);
        }
        for (uint32_t together = 0; together < 2; together++) {
            for (uint32_t i = 0; i < ROWS; i++) {
                set_row(&rig, together * i, 0, FIRST + i, true);
                if (!together) {
                    assert_int_equal(
                        td_model_forward(rig.model, rig.pool, rig.rows, 1, 0, NULL, NULL, &logits),
                        TD_OK);
                    memcpy(want[i], logits, sizeof(want[i]));
                }
            }
        }
        assert_int_equal(
            td_model_forward(rig.model, rig.pool, rig.rows, ROWS, 0, NULL, NULL, &logits), TD_OK);
        assert_same_bits(want[0], logits, ROWS * TINY_VOCAB);
        rig_fini(&rig);
        td_gguf_close(gguf);
        tiny_fini(&tiny);
    }
}

static void compare_attention(const tiny_spec_t *spec_a, const td_model_options_t *a,
                              const tiny_spec_t *spec_b, const td_model_options_t *b, bool same)
{
    float logits_a[TINY_VOCAB];
    float logits_b[TINY_VOCAB];
    tiny_t tiny_a;
    tiny_t tiny_b;
    rig_t rig_a;
    rig_t rig_b;
    td_gguf_t *gguf_a = open_tiny(&tiny_a, spec_a);
    td_gguf_t *gguf_b = open_tiny(&tiny_b, spec_b);

    rig_init(&rig_a, gguf_a, a, 1, LONG_TOKENS);
    rig_init(&rig_b, gguf_b, b, 1, LONG_TOKENS);
    prefill(&rig_a, 0, LONG_TOKENS, 512, logits_a);
    prefill(&rig_b, 0, LONG_TOKENS, 100, logits_b);
    if (same) {
        assert_same_bits(logits_a, logits_b, TINY_VOCAB);
        assert_memory_equal(rig_a.pool, rig_b.pool, rig_a.pool_bytes);
    } else {
        assert_memory_not_equal(logits_a, logits_b, sizeof(logits_a));
        assert_string_not_equal(rig_a.info->numerics_class, rig_b.info->numerics_class);
    }
    rig_fini(&rig_a);
    rig_fini(&rig_b);
    td_gguf_close(gguf_a);
    td_gguf_close(gguf_b);
    tiny_fini(&tiny_a);
    tiny_fini(&tiny_b);
}

static void test_a_window_over_everything_is_full_attention(void **state)
{
    const tiny_spec_t spec = {.type = TD_GGUF_Q4_1, .context = LONG_CONTEXT};
    td_model_options_t full = default_options();
    td_model_options_t wide = default_options();
    (void)state;

    wide.attention = "window:700";
    compare_attention(&spec, &full, &spec, &wide, true);
    wide.attention = "strided:700,64";
    compare_attention(&spec, &full, &spec, &wide, true);
    wide.attention = "window:1,700";
    compare_attention(&spec, &full, &spec, &wide, true);
    wide.attention = "window:512";
    compare_attention(&spec, &full, &spec, &wide, false);
}

/* The model's window is that of the option, and the option overrides it. */
static void test_the_window_comes_from_the_model_or_the_option(void **state)
{
    const tiny_spec_t plain = {.type = TD_GGUF_Q4_1, .context = LONG_CONTEXT};
    const tiny_spec_t windowed = {.type = TD_GGUF_Q4_1, .context = LONG_CONTEXT, .window = 64};
    td_model_options_t model = default_options();
    td_model_options_t option = default_options();
    (void)state;

    option.attention = "window:64";
    compare_attention(&windowed, &model, &plain, &option, true);
    option.attention = "full";
    compare_attention(&windowed, &option, &plain, &model, true);
    compare_attention(&windowed, &model, &plain, &model, false);
}

/* Angles behind the model's own context are those that a longer table has. */
static void test_a_context_longer_than_the_models_has_the_same_angles(void **state)
{
    const tiny_spec_t wide = {.type = TD_GGUF_Q4_1, .context = LONG_CONTEXT};
    const tiny_spec_t narrow = {.type = TD_GGUF_Q4_1};
    td_model_options_t a = default_options();
    td_model_options_t b = default_options();
    (void)state;

    a.attention = b.attention = "window:40,4";
    b.context_max = LONG_CONTEXT;
    compare_attention(&wide, &a, &narrow, &b, true);
}

static td_status_t try_load(const tiny_spec_t *spec, const char *attention, uint32_t context_max,
                            char numerics[64])
{
    td_model_options_t options = default_options();
    td_model_t *model = NULL;
    tiny_t tiny;
    td_gguf_t *gguf = open_tiny(&tiny, spec);
    td_status_t status = TD_OK;

    options.attention = attention;
    options.context_max = context_max;
    status = td_model_load(gguf, &options, &model);
    if (status == TD_OK) {
        memcpy(numerics, td_model_info(model)->numerics_class, 64);
        assert_int_equal(td_model_info(model)->context_max,
                         context_max != 0 ? context_max : TINY_CONTEXT);
    }
    td_model_destroy(model);
    td_gguf_close(gguf);
    tiny_fini(&tiny);
    return status;
}

static void test_load_reads_and_refuses_masks(void **state)
{
    const tiny_spec_t plain = {.type = TD_GGUF_F16};
    const tiny_spec_t windowed = {.type = TD_GGUF_F16, .window = 30};
    const tiny_spec_t some_layers = {
        .type = TD_GGUF_F16, .window = 30, .window_pattern = "every second"};
    char numerics[64];
    (void)state;

    assert_int_equal(try_load(&plain, NULL, 0, numerics), TD_OK);
    assert_string_equal(numerics, "cpu/mixed/r2"); /* keys of full attention stay what they were */
    assert_int_equal(try_load(&windowed, "full", 0, numerics), TD_OK);
    assert_string_equal(numerics, "cpu/mixed/r2");
    assert_int_equal(try_load(&windowed, NULL, 0, numerics), TD_OK);
    assert_string_equal(numerics, "cpu/mixed/r2/window:30");
    assert_int_equal(try_load(&plain, "strided:16777216,16777216,16777215", 0, numerics), TD_OK);
    assert_string_equal(numerics, "cpu/mixed/r2/strided:16777216,16777216,16777215");
    assert_int_equal(try_load(&plain, "window:0", 0, numerics), TD_ERR_INVALID);
    assert_int_equal(try_load(&plain, "sliding", 0, numerics), TD_ERR_INVALID);
    assert_int_equal(try_load(&some_layers, NULL, 0, numerics), TD_ERR_UNSUPPORTED);
    assert_int_equal(try_load(&some_layers, "window:30", 0, numerics), TD_OK);
    assert_int_equal(try_load(&plain, NULL, TINY_CONTEXT + 1, numerics), TD_ERR_INVALID);
    assert_int_equal(try_load(&plain, "window:30", 100000, numerics), TD_OK);
    assert_int_equal(try_load(&plain, "strided:30,64", 100000, numerics), TD_OK);
    assert_int_equal(try_load(&plain, "window:30", (1u << 24) + 1, numerics), TD_ERR_INVALID);
}

/* The quick start's model, whose heads take every kernel: 9 heads on 3 KV heads of 64. */
static void test_real_model_has_the_same_bits_under_a_window(void **state)
{
    enum { TOKENS = 560, TAIL = 6 };
    static const char *const real_masks[] = {"window:100", "strided:64,128"};
    float *want = NULL;
    float *got = NULL;
    td_gguf_t *gguf = NULL;
    (void)state;

    assert_int_equal(td_gguf_open(REAL_MODEL, &gguf), TD_OK);
    for (size_t m = 0; m < TD_ARRAY_LEN(real_masks); m++) {
        td_model_options_t options = default_options();
        rig_t kept;
        options.attention = real_masks[m];
        rig_init(&kept, gguf, &options, 1, TOKENS);
        want = td_calloc(kept.info->vocab_size, sizeof(*want));
        got = td_calloc(kept.info->vocab_size, sizeof(*got));
        assert_non_null(want);
        assert_non_null(got);
        prefill(&kept, 0, TOKENS, 512, want);
        for (size_t i = 1; i < TD_ARRAY_LEN(isas); i++) {
            rig_t freed;
            if (td_cpu_ops_find(isas[i]) == NULL) {
                continue;
            }
            options.isa = isa_values[i];
            options.threads = (uint32_t)i + 1;
            rig_init(&freed, gguf, &options, 1, TOKENS);
            prefill_freeing(&freed, TOKENS - TAIL, 60, got);
            for (uint32_t p = TOKENS - TAIL; p < TOKENS; p++) { /* decoding */
                const float *logits = NULL;
                set_row(&freed, 0, 0, p, true);
                assert_int_equal(td_model_forward(freed.model, freed.pool, freed.rows, 1, 0, NULL,
                                                  NULL, &logits),
                                 TD_OK);
                memcpy(got, logits, freed.info->vocab_size * sizeof(*got));
            }
            assert_same_bits(want, got, freed.info->vocab_size);
            assert_memory_equal(kept.pool, freed.pool, kept.pool_bytes);
            rig_fini(&freed);
        }
        td_free(want);
        td_free(got);
        rig_fini(&kept);
    }
    td_gguf_close(gguf);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_masked_models_match_the_textbook),
        cmocka_unit_test(test_masked_models_have_the_same_bits),
        cmocka_unit_test(test_masked_batches_have_the_same_bits),
        cmocka_unit_test(test_masked_rows_across_a_span_have_the_same_bits),
        cmocka_unit_test(test_a_window_over_everything_is_full_attention),
        cmocka_unit_test(test_the_window_comes_from_the_model_or_the_option),
        cmocka_unit_test(test_a_context_longer_than_the_models_has_the_same_angles),
        cmocka_unit_test(test_load_reads_and_refuses_masks),
        cmocka_unit_test(test_real_model_has_the_same_bits_under_a_window),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

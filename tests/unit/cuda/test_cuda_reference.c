/* The real model on the device: logits and text of the CPU's backend bit for bit, and the
 * reference's tokens wherever its margin says that they are not a matter of rounding. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <jansson.h>

#include "common/model/td_sampler.h"
#include "tests/unit/cuda/test_cuda_model_rig.h"

#define MODEL "build/models/SmolLM2-135M-Instruct.Q4_1.gguf"
#define REFERENCE "tests/data/reference_smollm2.jsonl"
#define MARGIN 0.5 /* below it the reference's own choice is too close to demand */

enum { TOKENS_MAX = 64, ROWS_MAX = 48, AT_ONCE = 4, STEPS = 3 };

/* A prompt and the reference's greedy answer to it. */
typedef struct reference {
    uint32_t tokens[TOKENS_MAX]; /* prompt, then answer */
    double margins[TOKENS_MAX];  /* of each token of the answer */
    uint32_t prompt;
    uint32_t answer;
} reference_t;

static void read_reference(reference_t *r)
{
    char line[1 << 16];
    FILE *file = fopen(REFERENCE, "r");
    json_t *json = NULL;
    const json_t *ids = NULL;
    const json_t *greedy = NULL;

    assert_non_null(file);
    assert_non_null(fgets(line, sizeof(line), file));
    (void)fclose(file);
    json = json_loads(line, 0, NULL);
    assert_non_null(json);
    ids = json_object_get(json, "ids");
    greedy = json_object_get(json, "greedy");
    r->prompt = (uint32_t)json_array_size(ids);
    r->answer = (uint32_t)json_array_size(greedy);
    assert_in_range(r->prompt + AT_ONCE, 1, ROWS_MAX);
    assert_in_range(r->answer, AT_ONCE + STEPS, TOKENS_MAX - r->prompt);
    for (uint32_t i = 0; i < r->prompt + r->answer; i++) {
        const json_t *id =
            i < r->prompt ? json_array_get(ids, i) : json_array_get(greedy, i - r->prompt);
        r->tokens[i] = (uint32_t)json_integer_value(id);
    }
    for (uint32_t i = 0; i < r->answer; i++) {
        r->margins[i] = json_number_value(json_array_get(json_object_get(json, "margin"), i));
    }
    json_decref(json);
}

/* Prompt and the first tokens of the answer in one pass, further ones one by one. Shape: out
 * [AT_ONCE
 * + 1 + STEPS][vocab]: from the prompt's last position on. */
static void run(rig_t *rig, const reference_t *r, float *out)
{
    const size_t vocab = rig->info->vocab_size;
    const uint32_t first = r->prompt + AT_ONCE;
    const float *logits = NULL;

    for (uint32_t i = 0; i < first + STEPS; i++) {
        rig->rows[i < first ? i : 0] = (td_model_row_t){.token = r->tokens[i],
                                                        .position = i,
                                                        .blocks = rig->blocks,
                                                        .want_logits = i + 1 >= r->prompt};
        if (i + 1 == first) {
            assert_int_equal(
                td_model_forward(rig->model, rig->pool, rig->rows, first, 0, NULL, NULL, &logits),
                TD_OK);
            memcpy(out, logits, (AT_ONCE + 1) * vocab * sizeof(*out));
        } else if (i >= first) {
            assert_int_equal(
                td_model_forward(rig->model, rig->pool, rig->rows, 1, 0, NULL, NULL, &logits),
                TD_OK);
            memcpy(out + (AT_ONCE + 1 + i - first) * vocab, logits, vocab * sizeof(*out));
        }
    }
}

static void test_the_model_writes_the_references_text(void **state)
{
    static reference_t reference;
    float *out[2] = {NULL, NULL};
    uint32_t checked = 0;
    td_gguf_t *gguf = NULL;

    (void)state;
    if (td_gguf_open(MODEL, &gguf) != TD_OK) {
        print_message("no model at " MODEL " (run from the repository root, `make model`)\n");
        fail();
    }
    read_reference(&reference);
    for (int side = 0; side < 2; side++) {
        td_model_options_t options = default_options();
        uint32_t vocab = 0;
        rig_t rig;
        options.rows_max = ROWS_MAX;
        options.context_max = 512;
        options.device_kv_bytes = 64u << 20;
        options.backend = side == 0 ? TD_BACKEND_CPU : TD_BACKEND_CUDA;
        rig_init(&rig, gguf, &options, 1, TOKENS_MAX);
        vocab = rig.info->vocab_size;
        out[side] = malloc((AT_ONCE + 1 + STEPS) * sizeof(float) * vocab);
        assert_non_null(out[side]);
        run(&rig, &reference, out[side]);
        for (uint32_t i = 0; side == 1 && i < AT_ONCE + 1 + STEPS; i++) {
            const float *row = out[1] + (size_t)i * vocab;
            cuda_assert_same_bits(out[0] + (size_t)i * vocab, row, vocab, "logits");
            if (i < reference.answer && reference.margins[i] >= MARGIN) {
                assert_int_equal(td_logits_argmax(row, vocab),
                                 reference.tokens[reference.prompt + i]);
                checked++;
            }
        }
        rig_fini(&rig);
    }
    assert_true(checked >= 5);
    print_message("%u tokens of the reference's\n", checked);
    free(out[0]);
    free(out[1]);
    td_gguf_close(gguf);
}

/* A short text only: three KV heads on two devices, one and two. */
static void test_two_devices_have_the_bits_of_the_cpu(void **state)
{
    enum { PROMPT = 9, MORE = 2 };
    static reference_t reference;
    float *want[1 + MORE] = {NULL};
    td_gguf_t *gguf = NULL;

    (void)state;
    assert_int_equal(td_gguf_open(MODEL, &gguf), TD_OK);
    read_reference(&reference);
    for (int side = 0; side < 2; side++) {
        td_model_options_t options = default_options();
        const float *logits = NULL;
        rig_t rig;
        options.rows_max = PROMPT;
        options.logit_rows_max = 1;
        options.context_max = 512;
        options.device_kv_bytes = 64u << 20;
        options.backend = side == 0 ? TD_BACKEND_CPU : TD_BACKEND_CUDA;
        rig_on_devices(&options, 2);
        rig_init(&rig, gguf, &options, 1, TOKENS_MAX);
        for (uint32_t i = 0; i < PROMPT + MORE; i++) {
            const uint32_t step = i < PROMPT ? 0 : i + 1 - PROMPT;
            rig.rows[i < PROMPT ? i : 0] = (td_model_row_t){.token = reference.tokens[i],
                                                            .position = i,
                                                            .blocks = rig.blocks,
                                                            .want_logits = i + 1 >= PROMPT};
            if (i + 1 < PROMPT) {
                continue;
            }
            assert_int_equal(td_model_forward(rig.model, rig.pool, rig.rows, step == 0 ? PROMPT : 1,
                                              0, NULL, NULL, &logits),
                             TD_OK);
            if (side == 0) {
                want[step] = malloc(rig.info->vocab_size * sizeof(float));
                assert_non_null(want[step]);
                memcpy(want[step], logits, rig.info->vocab_size * sizeof(float));
            } else {
                cuda_assert_same_bits(want[step], logits, rig.info->vocab_size, "logits");
                free(want[step]);
            }
        }
        rig_fini(&rig);
    }
    td_gguf_close(gguf);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_two_devices_have_the_bits_of_the_cpu),
    cmocka_unit_test(test_the_model_writes_the_references_text),
};
CUDA_TEST_MAIN(tests)

/* Every call of the runtime, and every allocation, fails in turn: loading and passes say so, leave
 * nothing behind, and the next pass is right. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include "common/base/td_log.h"
#include "tests/unit/cuda/test_cuda_model_rig.h"

uint32_t emu_fail_at(uint32_t nth) __attribute__((weak));

enum { TRIES_MAX = 2000, TOKENS = 20 };

static const tiny_spec_t tiny_spec = {.type = TD_GGUF_Q4_1, .untied = true};

static td_model_options_t device_options(void)
{
    td_model_options_t options = cuda_options(32, 1u << 20);

    rig_on_devices(&options, rig_devices);
    return options;
}

static bool can_fail(void)
{
    if (emu_fail_at == NULL) {
        skip(); /* a device fails when it likes */
    }
    return true;
}

/* which: 0 calls of the runtime, 1 allocations. */
static void fail_at(int which, uint32_t nth)
{
    if (which == 0) {
        (void)emu_fail_at(nth);
    } else {
        td_alloc_fail_at(nth);
    }
}

static void test_loading_survives_every_failure(void **state)
{
    const td_model_options_t options = device_options();
    tiny_t tiny;
    td_gguf_t *gguf = NULL;

    (void)state;
    (void)can_fail();
    gguf = open_tiny(&tiny, &tiny_spec);
    for (int which = 0; which < 2; which++) {
        td_model_t *model = NULL;
        td_status_t status = TD_ERR_INTERNAL;
        uint32_t nth = 0;
        while (status != TD_OK) {
            assert_true(++nth < TRIES_MAX);
            fail_at(which, nth);
            status = td_model_load(gguf, &options, &model);
            fail_at(which, 0);
            assert_true(status == TD_OK || status == TD_ERR_NO_MEMORY || status == TD_ERR_IO ||
                        status == TD_ERR_UNSUPPORTED);
            if (status != TD_OK) {
                assert_null(model);
                assert_int_equal(emu_memory_used(), 0);
            }
        }
        assert_true(nth > (which == 0 ? 50 : 20)); /* the sweep went through all of it */
        td_model_destroy(model);
        assert_int_equal(emu_memory_used(), 0);
    }
    td_gguf_close(gguf);
    tiny_fini(&tiny);
}

static void ignore_layers(void *ctx, uint32_t begin, uint32_t end)
{
    (void)ctx;
    (void)begin;
    (void)end;
}

/* Blocks copied behind the pass, written by kernels, and kept as a graph. */
static void test_a_pass_survives_every_failure(void **state)
{
    const td_model_options_t options = device_options();
    float want[TINY_VOCAB];
    tiny_t tiny;
    td_gguf_t *gguf = NULL;

    (void)state;
    (void)can_fail();
    gguf = open_tiny(&tiny, &tiny_spec);
    for (int kind = 0; kind < 3; kind++) {
        const int kept = kind == 2;
        td_pool_t *pool = NULL;
        const float *logits = NULL;
        uint32_t nth = 0;
        td_status_t status = TD_OK;
        rig_t rig;
        rig_init(&rig, gguf, &options, 1, TOKENS);
        if (kind > 0) {
            pool = rig_use_pool(&rig, rig.sequence_blocks);
        }
        prefill(&rig, 0, TOKENS, 32, want);
        for (bool reached = true; reached;) {
            assert_true(++nth < TRIES_MAX);
            for (uint32_t i = 0; i < TOKENS; i++) {
                set_row(&rig, i, 0, i, i + 1 == TOKENS);
            }
            (void)emu_fail_at(nth);
            status = td_model_forward(rig.model, rig.pool, rig.rows, TOKENS, 1,
                                      kept == 1 ? NULL : ignore_layers, NULL, &logits);
            reached = emu_fail_at(0) == 0;
            /* A pass that cannot be kept as a graph is launched as it is. */
            assert_true(status == TD_ERR_IO || (status == TD_OK && (!reached || kept == 1)));
            if (status == TD_OK) {
                cuda_assert_same_bits(want, logits, TINY_VOCAB, "in spite of a failure");
            }
            assert_int_equal(
                td_model_forward(rig.model, rig.pool, rig.rows, TOKENS, 0, NULL, NULL, &logits),
                TD_OK);
            cuda_assert_same_bits(want, logits, TINY_VOCAB, "behind a failure");
            if (kept == 1) {
                td_model_use_pool(rig.model, pool); /* forgets the graphs: the next is made anew */
            }
        }
        assert_true(nth > (kept == 1 ? 5 : 30));
        td_model_use_pool(rig.model, NULL);
        td_pool_destroy(pool);
        rig_fini(&rig);
    }
    td_gguf_close(gguf);
    tiny_fini(&tiny);
}

/* A pool that cannot be mapped is copied from. */
static void test_a_pool_that_cannot_be_mapped(void **state)
{
    const td_model_options_t options = device_options();
    float want[TINY_VOCAB];
    float got[TINY_VOCAB];
    tiny_t tiny;
    td_gguf_t *gguf = NULL;

    (void)state;
    (void)can_fail();
    gguf = open_tiny(&tiny, &tiny_spec);
    for (uint32_t nth = 0; nth <= 6; nth++) { /* choosing devices, registering, mapping */
        td_pool_t *pool = NULL;
        rig_t rig;
        rig_init(&rig, gguf, &options, 1, TOKENS);
        pool = rig_pool(&rig, rig.sequence_blocks);
        (void)emu_fail_at(nth);
        td_model_use_pool(rig.model, pool);
        (void)emu_fail_at(0);
        prefill(&rig, 0, TOKENS, 7, nth == 0 ? want : got);
        if (nth > 0) {
            cuda_assert_same_bits(want, got, TINY_VOCAB, "without a mapped pool");
        }
        td_model_use_pool(rig.model, NULL);
        td_pool_destroy(pool);
        rig_fini(&rig);
    }
    td_gguf_close(gguf);
    tiny_fini(&tiny);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        RIG_ON_DEVICES(test_loading_survives_every_failure),
        RIG_ON_DEVICES(test_a_pass_survives_every_failure),
        RIG_ON_TWO_APART(test_a_pass_survives_every_failure),
        RIG_ON_DEVICES(test_a_pool_that_cannot_be_mapped),
    };

    td_log_init("test", TD_LOG_LEVEL_ERROR);
    if (argc > 1) {
        cmocka_set_test_filter(argv[1]);
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}

/* Fails allocation 1, 2, 3... of everything between a model file's bytes and the next token's id:
 * each time the status must say so, the outputs must be untouched and nothing may leak. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "common/model/td_chat.h"
#include "common/model/td_sampler.h"
#include "common/model/td_tokenizer.h"
#include "tests/fuzz/gguf_build.h"

#define STEPS_MAX 10000u

typedef struct fixture {
    td_str_t file;
    td_gguf_t *gguf;
    td_tokenizer_t *tok;
    td_chat_t *chat;
    int saved_stderr;
} fixture_t;

/* Runs a step with the n-th allocation failing until it succeeds; the step itself checks its
 * outputs. At least `steps_min` allocations must have been reached. */
typedef td_status_t (*step_fn)(const fixture_t *fx);
static void sweep(const fixture_t *fx, step_fn step, uint64_t steps_min)
{
    td_status_t status = TD_ERR_NO_MEMORY;
    uint64_t nth = 0;

    while (status != TD_OK && nth < STEPS_MAX) {
        nth++;
        td_alloc_fail_at(nth);
        status = step(fx);
        td_alloc_fail_at(0);
        if (status != TD_OK) {
            assert_int_equal(status, TD_ERR_NO_MEMORY);
        }
    }
    assert_int_equal(status, TD_OK);
    assert_true(nth > steps_min);
}

static int setup(void **state)
{
    static fixture_t fx;
    int null = open("/dev/null", O_WRONLY | O_CLOEXEC);

    fx = (fixture_t){0};
    *state = &fx;
    gb_tokenizer(&fx.file);
    if (td_gguf_open_bytes(fx.file.bytes, fx.file.len, &fx.gguf) != TD_OK ||
        td_tokenizer_create(fx.gguf, &fx.tok) != TD_OK ||
        td_chat_create(fx.gguf, &fx.chat) != TD_OK) {
        return -1;
    }
    fx.saved_stderr = dup(STDERR_FILENO); /* one line for each failure */
    (void)dup2(null, STDERR_FILENO);
    (void)close(null);
    return 0;
}

static int teardown(void **state)
{
    fixture_t *fx = *state;

    (void)dup2(fx->saved_stderr, STDERR_FILENO);
    (void)close(fx->saved_stderr);
    td_alloc_fail_at(0);
    td_chat_destroy(fx->chat);
    td_tokenizer_destroy(fx->tok);
    td_gguf_close(fx->gguf);
    td_str_fini(&fx->file);
    return 0;
}

static td_status_t step_gguf_open(const fixture_t *fx)
{
    td_gguf_t *gguf = NULL;
    td_status_t status = td_gguf_open_bytes(fx->file.bytes, fx->file.len, &gguf);

    assert_true((status == TD_OK) == (gguf != NULL));
    td_gguf_close(gguf);
    return status;
}

static td_status_t step_tokenizer_create(const fixture_t *fx)
{
    td_tokenizer_t *tok = NULL;
    td_status_t status = td_tokenizer_create(fx->gguf, &tok);

    assert_true((status == TD_OK) == (tok != NULL));
    td_tokenizer_destroy(tok);
    return status;
}

static td_status_t step_chat_create(const fixture_t *fx)
{
    td_chat_t *chat = NULL;
    td_status_t status = td_chat_create(fx->gguf, &chat);

    assert_true((status == TD_OK) == (chat != NULL));
    td_chat_destroy(chat);
    return status;
}

static const td_chat_message_t messages[] = {{"user", "ab c", 4}, {"assistant", "abc", 3}};

static td_status_t step_chat_render(const fixture_t *fx)
{
    td_str_t out = {0};
    td_status_t status = td_chat_render(fx->chat, messages, 2, true, &out);

    assert_true((status == TD_OK) == (out.len > 0));
    td_str_fini(&out);
    return status;
}

static td_status_t step_chat_encode(const fixture_t *fx)
{
    uint32_t *ids = NULL;
    size_t count = 77;
    td_status_t status = td_chat_encode(fx->chat, fx->tok, messages, 2, true, &ids, &count);

    assert_true((status == TD_OK) == (ids != NULL));
    assert_true(status == TD_OK || count == 77);
    td_free(ids);
    return status;
}

static td_status_t step_encode(const fixture_t *fx)
{
    /* A word longer than the scratch starts with, and more ids than the list starts with. */
    static const char text[] = "ab<|im_end|>abcabcabcabcabcabcabcabcabcabcabcabcabcabcabcabcabc"
                               "abcabcabcabcabcabcabcabcabcabcabcabcabcabcabcabcabcabcabcabcabc";
    uint32_t *ids = NULL;
    size_t count = 77;
    td_status_t status = td_tokenizer_encode(fx->tok, text, sizeof(text) - 1, true, &ids, &count);

    assert_true((status == TD_OK) == (ids != NULL));
    assert_true(status == TD_OK || count == 77);
    td_free(ids);
    return status;
}

static td_status_t step_encode_empty(const fixture_t *fx)
{
    uint32_t *ids = NULL;
    size_t count = 77;
    td_status_t status = td_tokenizer_encode(fx->tok, "", 0, true, &ids, &count);

    assert_true((status == TD_OK) == (ids != NULL));
    assert_int_equal(count, status == TD_OK ? 0 : 77);
    td_free(ids);
    return status;
}

static td_status_t step_detok(const fixture_t *fx)
{
    td_detok_t detok = {0};
    td_str_t text = {0};
    td_status_t status = td_detok_push(&detok, fx->tok, GB_C3, true, &text);

    assert_int_equal(status, TD_OK); /* held back: no memory needed */
    status = td_detok_push(&detok, fx->tok, GB_AB, true, &text);
    if (status != TD_OK) {
        assert_int_equal(text.len, 0);
        assert_int_equal(detok.held_len, 1); /* the push may be repeated */
    } else {
        assert_string_equal(text.bytes, "\xef\xbf\xbd"
                                        "ab");
    }
    td_str_fini(&text);
    return status;
}

static td_status_t step_sampler_create(const fixture_t *fx)
{
    static const td_logit_bias_t bias = {1, 1.0f};
    const uint32_t prompt[] = {GB_A, GB_B};
    td_sampling_t params;
    td_sampler_t *sampler = NULL;
    td_status_t status = TD_OK;

    td_sampling_init(&params);
    params.logit_bias = &bias;
    params.logit_bias_count = 1;
    params.presence_penalty = 1;
    status = td_sampler_create(&params, td_tokenizer_vocab_size(fx->tok), prompt, 2, &sampler);
    assert_true((status == TD_OK) == (sampler != NULL));
    td_sampler_destroy(sampler);
    return status;
}

static void test_fault_gguf_open(void **state)
{
    sweep(*state, step_gguf_open, 5);
}

static void test_fault_tokenizer_create(void **state)
{
    sweep(*state, step_tokenizer_create, 12);
}

static void test_fault_chat_create(void **state)
{
    sweep(*state, step_chat_create, 2);
}

static void test_fault_chat_render(void **state)
{
    sweep(*state, step_chat_render, 1);
}

static void test_fault_chat_encode(void **state)
{
    sweep(*state, step_chat_encode, 5);
}

static void test_fault_encode(void **state)
{
    sweep(*state, step_encode, 5);
    sweep(*state, step_encode_empty, 1);
}

static void test_fault_detok(void **state)
{
    sweep(*state, step_detok, 1);
}

static void test_fault_sampler_create(void **state)
{
    sweep(*state, step_sampler_create, 5);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_fault_gguf_open, setup, teardown),
        cmocka_unit_test_setup_teardown(test_fault_tokenizer_create, setup, teardown),
        cmocka_unit_test_setup_teardown(test_fault_chat_create, setup, teardown),
        cmocka_unit_test_setup_teardown(test_fault_chat_render, setup, teardown),
        cmocka_unit_test_setup_teardown(test_fault_chat_encode, setup, teardown),
        cmocka_unit_test_setup_teardown(test_fault_encode, setup, teardown),
        cmocka_unit_test_setup_teardown(test_fault_detok, setup, teardown),
        cmocka_unit_test_setup_teardown(test_fault_sampler_create, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

/* Makes every allocation of loading fail in turn: each failure is reported as such, changes no
 * output and leaks nothing (the sanitizer build sees to that). */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include "common/base/td_log.h"
#include "common/model/td_threads.h"
#include "tests/unit/model/test_heads_file.h"
#include "tests/unit/model/test_model_tiny.h"

enum { TRIES_MAX = 1000 };

static void sweep_load(const tiny_spec_t *spec)
{
    const td_model_options_t options = {.precision = TD_PRECISION_MIXED,
                                        .threads = 2,
                                        .rows_max = 4,
                                        .logit_rows_max = 2,
                                        .block_tokens = 16};
    td_gguf_t *gguf = NULL;
    td_model_t *model = NULL;
    td_status_t status = TD_ERR_NO_MEMORY;
    tiny_t tiny;
    uint64_t nth = 0;

    tiny_init(&tiny, spec);
    assert_int_equal(td_gguf_open_bytes(tiny.bytes, tiny.len, &gguf), TD_OK);
    while (status != TD_OK) {
        nth++;
        assert_true(nth < TRIES_MAX);
        td_alloc_fail_at(nth);
        status = td_model_load(gguf, &options, &model);
        td_alloc_fail_at(0);
        if (status != TD_OK) {
            assert_int_equal(status, TD_ERR_NO_MEMORY);
            assert_null(model);
        }
    }
    assert_true(nth > 30); /* matrices and buffers: the sweep went through them */
    td_model_destroy(model);
    td_gguf_close(gguf);
    tiny_fini(&tiny);
}

static void test_model_load_survives_every_failed_allocation(void **state)
{
    (void)state;
    sweep_load(&(tiny_spec_t){.type = TD_GGUF_Q4_1});
    sweep_load(&(tiny_spec_t){.type = TD_GGUF_F16, .untied = true});
}

static void test_heads_load_survives_every_failed_allocation(void **state)
{
    const td_model_options_t options = {
        .threads = 2, .rows_max = 4, .logit_rows_max = 2, .block_tokens = 16};
    static parts_t parts;
    td_gguf_t *gguf = NULL;
    td_model_t *model = NULL;
    td_heads_t *heads = NULL;
    td_status_t status = TD_ERR_NO_MEMORY;
    char path[64];
    tiny_t tiny;
    uint64_t nth = 0;
    (void)state;

    tiny_init(&tiny, &(tiny_spec_t){.type = TD_GGUF_F16});
    assert_int_equal(td_gguf_open_bytes(tiny.bytes, tiny.len, &gguf), TD_OK);
    assert_int_equal(td_model_load(gguf, &options, &model), TD_OK);
    make_parts(td_model_info(model), &parts);
    temporary(path);
    write_parts(&parts, path);
    while (status != TD_OK) {
        nth++;
        assert_true(nth < TRIES_MAX);
        td_alloc_fail_at(nth);
        status = td_heads_load(path, model, 4, &heads);
        td_alloc_fail_at(0);
        if (status != TD_OK) {
            assert_int_equal(status, TD_ERR_NO_MEMORY);
            assert_null(heads);
        }
    }
    assert_true(nth > 15); /* the file's tensors, weights and buffers */
    assert_int_equal(remove(path), 0);
    td_heads_destroy(heads);
    td_model_destroy(model);
    td_gguf_close(gguf);
    tiny_fini(&tiny);
}

static void test_threads_create_survives_every_failed_allocation(void **state)
{
    td_threads_t *threads = NULL;
    td_status_t status = TD_ERR_NO_MEMORY;
    uint64_t nth = 0;
    (void)state;

    while (status != TD_OK) {
        nth++;
        assert_true(nth < TRIES_MAX);
        td_alloc_fail_at(nth);
        status = td_threads_create(3, &threads);
        td_alloc_fail_at(0);
        if (status != TD_OK) {
            assert_int_equal(status, TD_ERR_NO_MEMORY);
            assert_null(threads);
        }
    }
    assert_true(nth > 1);
    td_threads_destroy(threads);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_model_load_survives_every_failed_allocation),
        cmocka_unit_test(test_heads_load_survives_every_failed_allocation),
        cmocka_unit_test(test_threads_create_survives_every_failed_allocation),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

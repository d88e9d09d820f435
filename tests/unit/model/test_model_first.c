/* The first layers of a model alone: as a pass of it, and as a model file of their own. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include "common/model/td_gguf_truncate.h"
#include "tests/unit/model/test_model_rig.h"

#define TOKENS 40u

/* A file with the first layers, in memory. Shape: *bytes_out: the caller frees it. */
static td_gguf_t *truncated(const td_gguf_t *gguf, uint32_t layers, char **bytes_out)
{
    td_gguf_t *first = NULL;
    size_t len = 0;
    FILE *file = open_memstream(bytes_out, &len);

    assert_non_null(file);
    assert_int_equal(td_gguf_truncate(gguf, layers, file), TD_OK);
    assert_int_equal(fclose(file), 0);
    assert_int_equal(td_gguf_open_bytes(*bytes_out, len, &first), TD_OK);
    return first;
}

static void forward_first(rig_t *rig, uint32_t layers, uint32_t from, uint32_t end, float *out)
{
    const float *logits = NULL;

    for (uint32_t i = from; i < end; i++) {
        set_row(rig, i - from, 0, i, i + 1 == end);
    }
    assert_int_equal(
        td_model_forward_first(rig->model, layers, rig->pool, rig->rows, end - from, &logits),
        TD_OK);
    memcpy(out, logits, TINY_VOCAB * sizeof(*out));
}

/* Bytes of a layer of all blocks, one after the other. */
static bool same_layer(const rig_t *a, const rig_t *b, uint32_t layer)
{
    const size_t layer_bytes = td_kv_layer_bytes(&a->info->kv);
    const size_t at = td_kv_half_offset(&a->info->kv, layer, false);

    for (uint32_t i = 0; i < 2 * a->sequence_blocks; i++) {
        if (memcmp(a->pool + i * td_kv_block_bytes(&a->info->kv) + at,
                   b->pool + i * td_kv_block_bytes(&b->info->kv) + at, layer_bytes) != 0) {
            return false;
        }
    }
    return true;
}

static void test_first_layers_are_those_of_the_model(void **state)
{
    const td_model_options_t options = default_options();
    const tiny_spec_t specs[] = {{.type = TD_GGUF_Q8_0}, {.type = TD_GGUF_Q4_1, .untied = true}};
    (void)state;

    for (size_t s = 0; s < TD_ARRAY_LEN(specs); s++) {
        float whole[TINY_VOCAB];
        float again[TINY_VOCAB];
        float first[TINY_VOCAB];
        float alone[TINY_VOCAB];
        td_gguf_t *gguf = NULL;
        td_gguf_t *one = NULL;
        char *bytes = NULL;
        tiny_t tiny;
        rig_t rig;
        rig_t early;
        rig_t small;

        tiny_init(&tiny, &specs[s]);
        assert_int_equal(td_gguf_open_bytes(tiny.bytes, tiny.len, &gguf), TD_OK);
        one = truncated(gguf, 1, &bytes);
        rig_init(&rig, gguf, &options, 2, TINY_CONTEXT);
        rig_init(&early, gguf, &options, 2, TINY_CONTEXT);
        rig_init(&small, one, &options, 2, TINY_CONTEXT);
        assert_int_equal(small.info->kv.layers, 1);
        assert_int_equal(small.info->vocab_size, TINY_VOCAB);

        /* Prefilled at once, or one by one: the first layer's numbers, and nothing of the second.
         */
        prefill(&rig, 0, TOKENS, TOKENS, whole);
        prefill(&small, 0, TOKENS, TOKENS, alone);
        forward_first(&early, 1, 0, TOKENS - 3, first);
        for (uint32_t i = TOKENS - 3; i < TOKENS; i++) {
            forward_first(&early, 1, i, i + 1, first);
        }
        assert_same_bits(first, alone, TINY_VOCAB);
        assert_true(memcmp(first, whole, sizeof(first)) != 0);
        assert_true(same_layer(&early, &rig, 0));
        assert_false(same_layer(&early, &rig, 1));

        /* A whole pass over the same positions leaves what it would have left without. */
        prefill(&early, 0, TOKENS, TOKENS, again);
        assert_same_bits(again, whole, TINY_VOCAB);
        assert_true(same_layer(&early, &rig, 0) && same_layer(&early, &rig, 1));
        /* All layers are the whole model. */
        forward_first(&early, TINY_LAYERS, TOKENS - 1, TOKENS, again);
        assert_same_bits(again, whole, TINY_VOCAB);

        rig_fini(&rig);
        rig_fini(&early);
        rig_fini(&small);
        td_gguf_close(one);
        td_gguf_close(gguf);
        tiny_fini(&tiny);
        free(bytes);
    }
}

static void test_truncated_file_keeps_the_rest(void **state)
{
    td_gguf_raw_t raw[2];
    td_gguf_t *gguf = NULL;
    td_gguf_t *one = NULL;
    char *bytes = NULL;
    uint32_t count = 0;
    tiny_t tiny;
    (void)state;

    tiny_init(&tiny, &(tiny_spec_t){.type = TD_GGUF_Q8_0, .untied = true});
    assert_int_equal(td_gguf_open_bytes(tiny.bytes, tiny.len, &gguf), TD_OK);
    one = truncated(gguf, 1, &bytes);
    assert_int_equal(td_gguf_get_u32(one, "llama.block_count", &count), TD_OK);
    assert_int_equal(count, 1);
    td_gguf_raw(gguf, &raw[0]);
    td_gguf_raw(one, &raw[1]);
    assert_int_equal(raw[0].key_count, raw[1].key_count);
    assert_int_equal(raw[0].keys_len, raw[1].keys_len);
    count = 0;
    for (size_t i = 0; i < raw[0].keys_len; i++) {
        count += raw[0].keys[i] != raw[1].keys[i];
    }
    assert_int_equal(count, 1); /* the number of layers: one byte of it */
    count = 0;
    for (uint32_t i = 0; i < td_gguf_tensor_count(gguf); i++) {
        const td_gguf_tensor_t *t = td_gguf_tensor_at(gguf, i);
        const td_gguf_tensor_t *kept = td_gguf_tensor_find(one, t->name);
        assert_int_equal(kept == NULL, strncmp(t->name, "blk.1.", 6) == 0);
        if (kept != NULL) {
            assert_int_equal(kept->type, t->type);
            assert_int_equal(kept->byte_count, t->byte_count);
            assert_memory_equal(kept->dims, t->dims, sizeof(t->dims));
            assert_memory_equal(kept->bytes, t->bytes, t->byte_count);
            count++;
        }
    }
    assert_int_equal(count, td_gguf_tensor_count(one));
    td_gguf_close(one);
    td_gguf_close(gguf);
    tiny_fini(&tiny);
    free(bytes);
}

static void test_truncate_refuses(void **state)
{
    td_gguf_t *gguf = NULL;
    FILE *file = fopen("/dev/null", "wb");
    FILE *full = fopen("/dev/full", "wb");
    tiny_t tiny;
    (void)state;

    assert_non_null(file);
    assert_non_null(full);
    tiny_init(&tiny, &(tiny_spec_t){.type = TD_GGUF_Q8_0});
    assert_int_equal(td_gguf_open_bytes(tiny.bytes, tiny.len, &gguf), TD_OK);
    assert_int_equal(td_gguf_truncate(gguf, 0, file), TD_ERR_INVALID);
    assert_int_equal(td_gguf_truncate(gguf, TINY_LAYERS + 1, file), TD_ERR_INVALID);
    assert_int_equal(td_gguf_truncate(gguf, TINY_LAYERS, file), TD_OK);
    assert_int_equal(td_gguf_truncate(gguf, 1, full), TD_ERR_IO);
    td_gguf_close(gguf);
    tiny_fini(&tiny);

    tiny_init(&tiny, &(tiny_spec_t){.type = TD_GGUF_Q8_0, .leave_out = "llama.block_count"});
    assert_int_equal(td_gguf_open_bytes(tiny.bytes, tiny.len, &gguf), TD_OK);
    assert_int_equal(td_gguf_truncate(gguf, 1, file), TD_ERR_INVALID);
    td_gguf_close(gguf);
    tiny_fini(&tiny);
    (void)fclose(full);
    (void)fclose(file);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_first_layers_are_those_of_the_model),
        cmocka_unit_test(test_truncated_file_keeps_the_rest),
        cmocka_unit_test(test_truncate_refuses),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/kv/td_kv_layout.h"

/* SmolLM2-135M's shape, and an awkward one. */
static const td_kv_layout_t shapes[] = {
    {.layers = 30, .kv_heads = 3, .head_dim = 64, .block_tokens = 16},
    {.layers = 3, .kv_heads = 5, .head_dim = 24, .block_tokens = 48},
};

static void test_token_bytes_by_codec(void **state)
{
    static const size_t bytes[2][TD_KV_CODECS] = {{23040, 12240, 12240, 6480},
                                                  {1440, 840, 840, 480}};
    (void)state;

    for (size_t s = 0; s < TD_ARRAY_LEN(shapes); s++) {
        for (uint32_t codec = 0; codec < TD_KV_CODECS; codec++) {
            td_kv_layout_t l = shapes[s];
            l.codec = (td_kv_codec_t)codec;
            assert_int_equal(td_kv_layout_check(&l), TD_OK);
            assert_int_equal(td_kv_token_bytes(&l), bytes[s][codec]);
            assert_int_equal(td_kv_block_bytes(&l), bytes[s][codec] * l.block_tokens);
        }
    }
}

static void claim(uint8_t *taken, size_t at, size_t bytes)
{
    for (size_t i = at; i < at + bytes; i++) {
        assert_int_equal(taken[i], 0);
        taken[i] = 1;
    }
}

/* A layer's values and scales, none of them twice, all inside the layer. */
static void claim_layer(const td_kv_layout_t *l, uint32_t layer, uint8_t *taken)
{
    const size_t begin = layer * td_kv_layer_bytes(l);
    const size_t scale_bytes = td_kv_scale_bytes(l->codec);

    for (uint32_t i = 0; i < 2 * l->kv_heads * l->block_tokens; i++) {
        const bool is_v = i % 2 == 1;
        const uint32_t head = i / 2 % l->kv_heads;
        const uint32_t token = i / 2 / l->kv_heads;
        const size_t at = td_kv_offset(l, layer, is_v, head, token);
        const size_t scale_at = td_kv_scale_offset(l, layer, is_v, head, token);

        assert_true(at >= begin && at + td_kv_row_bytes(l) <= begin + td_kv_layer_bytes(l));
        claim(taken, at, td_kv_row_bytes(l));
        assert_true(scale_at >= begin && scale_at + scale_bytes <= begin + td_kv_layer_bytes(l));
        claim(taken, scale_at, scale_bytes);
        if (token % 16 == 0) { /* what attention loads together */
            assert_int_equal(at % 64, 0);
            assert_int_equal(scale_at % 64, 0);
            assert_int_equal(td_kv_offset(l, layer, is_v, head, token + 15),
                             at + 15 * td_kv_row_bytes(l));
            assert_int_equal(td_kv_scale_offset(l, layer, is_v, head, token + 15),
                             scale_at + 15 * scale_bytes);
        }
    }
}

static void test_each_byte_of_a_block_has_one_meaning(void **state)
{
    (void)state;
    for (size_t s = 0; s < TD_ARRAY_LEN(shapes); s++) {
        for (uint32_t codec = 0; codec < TD_KV_CODECS; codec++) {
            td_kv_layout_t l = shapes[s];
            uint8_t *taken = NULL;
            l.codec = (td_kv_codec_t)codec;
            taken = calloc(1, td_kv_block_bytes(&l));
            assert_non_null(taken);
            for (uint32_t layer = 0; layer < l.layers; layer++) {
                claim_layer(&l, layer, taken);
            }
            assert_null(memchr(taken, 0, td_kv_block_bytes(&l)));
            free(taken);
        }
    }
}

static void test_a_codec_out_of_range_is_refused(void **state)
{
    td_kv_layout_t l = shapes[0];
    (void)state;

    l.codec = (td_kv_codec_t)TD_KV_CODECS;
    assert_int_equal(td_kv_layout_check(&l), TD_ERR_INVALID);
}

/* Nothing but the tokens' bytes, and all of them. */
static void test_copy_tokens_copies_their_slots(void **state)
{
    (void)state;

    for (uint32_t turn = 0; turn < TD_ARRAY_LEN(shapes) * TD_KV_CODECS; turn++) {
        td_kv_layout_t l = shapes[turn / TD_KV_CODECS];
        const uint32_t begin = turn % 3;
        const uint32_t end = l.block_tokens - turn % 2 * 5;
        uint8_t *from = NULL;
        uint8_t *to = NULL;
        uint8_t *want = NULL;
        l.codec = (td_kv_codec_t)(turn % TD_KV_CODECS);
        from = malloc(td_kv_block_bytes(&l));
        to = calloc(1, td_kv_block_bytes(&l));
        want = calloc(1, td_kv_block_bytes(&l));
        for (size_t i = 0; i < td_kv_block_bytes(&l); i++) {
            from[i] = (uint8_t)(1 + i % 251);
        }
        for (uint32_t i = 0; i < 2 * l.layers * l.kv_heads * l.block_tokens; i++) {
            const uint32_t token = i % l.block_tokens;
            const uint32_t head = i / l.block_tokens % l.kv_heads;
            const uint32_t half = i / l.block_tokens / l.kv_heads;
            const size_t at = td_kv_offset(&l, half / 2, half % 2 == 1, head, token);
            const size_t scale_at = td_kv_scale_offset(&l, half / 2, half % 2 == 1, head, token);
            if (token >= begin && token < end) {
                memcpy(want + at, from + at, td_kv_row_bytes(&l));
                memcpy(want + scale_at, from + scale_at, td_kv_scale_bytes(l.codec));
            }
        }
        td_kv_copy_tokens(&l, to, from, begin, end);
        assert_memory_equal(to, want, td_kv_block_bytes(&l));
        free(from);
        free(to);
        free(want);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_token_bytes_by_codec),
        cmocka_unit_test(test_each_byte_of_a_block_has_one_meaning),
        cmocka_unit_test(test_a_codec_out_of_range_is_refused),
        cmocka_unit_test(test_copy_tokens_copies_their_slots),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

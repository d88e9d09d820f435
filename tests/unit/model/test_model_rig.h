/* test_model_rig.h - a model with a pool of its own, run by hand.
 * Include <cmocka.h> and what it needs first. Threads: owner. */
#pragma once

#include "tests/unit/model/test_model_tiny.h"

typedef struct rig {
    td_model_t *model;
    const td_model_info_t *info;
    uint8_t *pool;
    size_t pool_bytes;
    uint32_t *blocks; /* [sequence][sequence_blocks] */
    uint32_t sequence_blocks;
    td_model_row_t *rows;
} rig_t;

static inline td_model_options_t default_options(void)
{
    return (td_model_options_t){.precision = TD_PRECISION_MIXED,
                                .threads = 2,
                                .rows_max = 512,
                                .logit_rows_max = 16,
                                .block_tokens = 16};
}

/** Owner: the caller closes it, and ends the tiny model behind it. */
static inline td_gguf_t *open_tiny(tiny_t *tiny, const tiny_spec_t *spec)
{
    td_gguf_t *gguf = NULL;

    tiny_init(tiny, spec);
    assert_int_equal(td_gguf_open_bytes(tiny->bytes, tiny->len, &gguf), TD_OK);
    return gguf;
}

static inline void rig_init(rig_t *rig, const td_gguf_t *gguf, const td_model_options_t *options,
                            uint32_t sequences, uint32_t tokens)
{
    uint32_t blocks = 0;

    *rig = (rig_t){0};
    assert_int_equal(td_model_load(gguf, options, &rig->model), TD_OK);
    rig->info = td_model_info(rig->model);
    rig->sequence_blocks = td_kv_blocks_for(&rig->info->kv, tokens);
    blocks = sequences * rig->sequence_blocks;
    rig->pool_bytes = blocks * td_kv_block_bytes(&rig->info->kv);
    rig->pool = td_calloc(rig->pool_bytes, 1);
    rig->blocks = td_calloc(blocks, sizeof(*rig->blocks));
    rig->rows = td_calloc(options->rows_max, sizeof(*rig->rows));
    assert_non_null(rig->pool);
    assert_non_null(rig->blocks);
    assert_non_null(rig->rows);
    for (uint32_t i = 0; i < blocks; i++) {
        rig->blocks[i] = i;
    }
}

static inline void rig_fini(rig_t *rig)
{
    td_model_destroy(rig->model);
    td_free(rig->pool);
    td_free(rig->blocks);
    td_free(rig->rows);
}

static inline uint32_t token_at(const rig_t *rig, uint32_t sequence, uint32_t position)
{
    return (position * 7919u + sequence * 104729u + 17u) % rig->info->vocab_size;
}

static inline void set_row(rig_t *rig, uint32_t row, uint32_t sequence, uint32_t position,
                           bool want_logits)
{
    rig->rows[row] = (td_model_row_t){.token = token_at(rig, sequence, position),
                                      .position = position,
                                      .blocks = rig->blocks + sequence * rig->sequence_blocks,
                                      .want_logits = want_logits};
}

/* Positions [0, tokens) of a sequence in chunks; logits of the last one of each chunk are asked
 * for, those of the last position copied. Shape: out [vocab_size]. */
static inline void prefill(rig_t *rig, uint32_t sequence, uint32_t tokens, uint32_t chunk,
                           float *out)
{
    const float *logits = NULL;

    for (uint32_t at = 0; at < tokens; at += chunk) {
        uint32_t count = TD_MIN(chunk, tokens - at);
        for (uint32_t i = 0; i < count; i++) {
            set_row(rig, i, sequence, at + i, at + i + 1 == tokens);
        }
        assert_int_equal(
            td_model_forward(rig->model, rig->pool, rig->rows, count, 0, NULL, NULL, &logits),
            TD_OK);
    }
    memcpy(out, logits, rig->info->vocab_size * sizeof(*out));
}

static inline void assert_same_bits(const float *a, const float *b, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        if (memcmp(a + i, b + i, sizeof(*a)) != 0) {
            fail_msg("entry %zu differs: %.9g %.9g", i, (double)a[i], (double)b[i]);
        }
    }
}

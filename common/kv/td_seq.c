#include "common/kv/td_seq.h"

#include <string.h>

#include "common/base/td_base.h"

td_status_t td_seq_init(td_seq_t *seq, td_pool_t *pool, const td_kv_layout_t *layout,
                        uint32_t tokens_max)
{
    uint32_t cap = TD_MAX(td_kv_blocks_for(layout, tokens_max), 1u);
    uint32_t *blocks = td_calloc(cap, sizeof(*blocks));
    if (blocks == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    *seq = (td_seq_t){.pool = pool, .layout = layout, .blocks = blocks, .block_cap = cap};
    return TD_OK;
}

void td_seq_fini(td_seq_t *seq)
{
    if (seq->blocks == NULL) {
        return;
    }
    while (seq->block_count > 0) {
        td_pool_unref(seq->pool, seq->blocks[--seq->block_count]);
    }
    td_pool_unreserve(seq->pool, seq->reserved);
    td_free(seq->blocks);
    memset(seq, 0, sizeof(*seq));
}

td_status_t td_seq_reserve(td_seq_t *seq, uint32_t n)
{
    TD_TRY(td_pool_reserve(seq->pool, n));
    seq->reserved += n;
    return TD_OK;
}

void td_seq_adopt(td_seq_t *seq, uint32_t block_idx)
{
    TD_ASSERT(seq->block_count < seq->block_cap);
    seq->blocks[seq->block_count++] = block_idx;
}

uint32_t td_seq_fini_quarantine(td_seq_t *seq, uint32_t *quarantined_out)
{
    uint32_t count = 0;

    if (seq->blocks == NULL) {
        return 0;
    }
    while (seq->block_count > 0) {
        uint32_t idx = seq->blocks[--seq->block_count];
        if (td_pool_refs(seq->pool, idx) == 1 && !td_pool_is_indexed(seq->pool, idx)) {
            td_pool_quarantine(seq->pool, idx);
            quarantined_out[count++] = idx;
        } else {
            td_pool_unref(seq->pool, idx);
        }
    }
    td_pool_unreserve(seq->pool, seq->reserved);
    seq->reserved = 0;
    return count;
}

uint32_t td_seq_grow_raw(td_seq_t *seq)
{
    uint32_t idx = 0;
    TD_ASSERT(seq->reserved > 0);
    seq->reserved--;
    idx = td_pool_take_reserved(seq->pool);
    td_seq_adopt(seq, idx);
    return idx;
}

uint32_t td_seq_grow(td_seq_t *seq)
{
    uint32_t idx = td_seq_grow_raw(seq);
    /* Unused slots travel with a partial block, and must not carry another request's numbers. */
    memset(td_pool_bytes(seq->pool, idx), 0, td_pool_block_bytes(seq->pool));
    return idx;
}

void td_seq_fork(td_seq_t *seq, const td_seq_t *src)
{
    for (uint32_t i = 0; i < src->block_count; i++) {
        td_pool_ref(src->pool, src->blocks[i]);
        td_seq_adopt(seq, src->blocks[i]);
    }
}

td_status_t td_seq_prepare_write(td_seq_t *seq, uint32_t position)
{
    uint32_t at = position / seq->layout->block_tokens;
    uint32_t fresh = 0;

    TD_ASSERT(at <= seq->block_count && at < seq->block_cap);
    if (at < seq->block_count && td_pool_refs(seq->pool, seq->blocks[at]) == 1 &&
        !td_pool_is_indexed(seq->pool, seq->blocks[at])) {
        return TD_OK;
    }
    if (seq->reserved == 0) {
        TD_TRY(td_seq_reserve(seq, 1));
    }
    if (at == seq->block_count) {
        (void)td_seq_grow(seq);
        return TD_OK;
    }
    seq->reserved--;
    fresh = td_pool_take_reserved(seq->pool);
    memcpy(td_pool_bytes(seq->pool, fresh), td_pool_bytes(seq->pool, seq->blocks[at]),
           td_pool_block_bytes(seq->pool));
    td_pool_unref(seq->pool, seq->blocks[at]);
    seq->blocks[at] = fresh;
    return TD_OK;
}

void td_seq_truncate(td_seq_t *seq, uint32_t tokens)
{
    uint32_t keep = td_kv_blocks_for(seq->layout, tokens);
    while (seq->block_count > keep) {
        uint32_t idx = seq->blocks[--seq->block_count];
        td_pool_unref(seq->pool, idx);
        /* What was ours alone is free now, so the promise for it can be renewed at once. */
        if (td_pool_reserve(seq->pool, 1) == TD_OK) {
            seq->reserved++;
        }
    }
}

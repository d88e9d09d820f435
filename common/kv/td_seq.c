#include "common/kv/td_seq.h"

#include <string.h>

#include "common/base/td_base.h"

td_status_t td_seq_init(td_seq_t *seq, td_pool_t *pool, const td_kv_layout_t *layout,
                        const td_attention_mask_t *mask, uint32_t tokens_max)
{
    uint32_t cap = TD_MAX(td_kv_blocks_for(layout, tokens_max), 1u);
    uint32_t *blocks = td_calloc(cap, sizeof(*blocks));
    if (blocks == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    *seq = (td_seq_t){
        .pool = pool, .layout = layout, .mask = mask, .blocks = blocks, .block_cap = cap};
    return TD_OK;
}

/* Takes the last entry off the table; TD_POOL_NONE: it had no block. The caller has the reference.
 */
static uint32_t pop(td_seq_t *seq)
{
    const uint32_t idx = seq->blocks[--seq->block_count];

    seq->held -= idx != TD_POOL_NONE;
    seq->passed = TD_MIN(seq->passed, seq->block_count);
    return idx;
}

void td_seq_release(td_seq_t *seq)
{
    while (seq->block_count > 0) {
        const uint32_t idx = pop(seq);
        if (idx != TD_POOL_NONE) {
            td_pool_unref(seq->pool, idx);
        }
    }
}

void td_seq_fini(td_seq_t *seq)
{
    if (seq->blocks == NULL) {
        return;
    }
    td_seq_release(seq);
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
    seq->held++;
}

void td_seq_skip(td_seq_t *seq)
{
    TD_ASSERT(seq->block_count < seq->block_cap);
    seq->blocks[seq->block_count++] = TD_POOL_NONE;
}

/* Adopts or skips entries [0, count), whose needed blocks are all here. */
static void take_known(td_seq_t *seq, uint32_t from, const td_block_key_t *keys, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        if (td_seq_needs(seq, from, i)) {
            const uint32_t idx = td_pool_find(seq->pool, &keys[i]);
            td_pool_ref(seq->pool, idx);
            td_seq_adopt(seq, idx);
        } else {
            td_seq_skip(seq);
        }
    }
}

static uint32_t match_all(td_seq_t *seq, const td_block_key_t *keys, uint32_t count)
{
    seq->block_count = td_pool_match(seq->pool, keys, count, seq->blocks);
    seq->held = seq->block_count;
    return seq->block_count;
}

uint32_t td_seq_match(td_seq_t *seq, const td_block_key_t *keys, uint32_t count)
{
    const uint32_t tokens = seq->layout->block_tokens;
    uint32_t missing = TD_POOL_NONE; /* the last block that is not here */
    uint32_t best = 0;

    TD_ASSERT(seq->block_count == 0 && count <= seq->block_cap);
    if (seq->mask->kind == TD_ATTENTION_FULL) {
        return match_all(seq, keys, count);
    }
    for (uint32_t i = 0; i < count; i++) {
        if (td_pool_find(seq->pool, &keys[i]) == TD_POOL_NONE) {
            missing = i;
            if (td_attention_lasts(seq->mask, i * tokens, (i + 1) * tokens)) {
                break; /* whoever comes behind it needs it */
            }
        }
        /* Of blocks that don't last a prefix needs those near its end: if not the last one that is
         * missing, then none that is. */
        if (missing == TD_POOL_NONE || !td_seq_needs(seq, (i + 1) * tokens, missing)) {
            best = i + 1;
        }
    }
    take_known(seq, best * tokens, keys, best);
    return best;
}

uint32_t td_seq_hold(td_seq_t *seq, uint32_t from, const td_block_key_t *keys, uint32_t count)
{
    uint32_t found = 0;

    TD_ASSERT(seq->block_count == 0 && count <= seq->block_cap);
    if (seq->mask->kind == TD_ATTENTION_FULL) {
        return match_all(seq, keys, count);
    }
    while (found < count && (!td_seq_needs(seq, from, found) ||
                             td_pool_find(seq->pool, &keys[found]) != TD_POOL_NONE)) {
        found++;
    }
    take_known(seq, from, keys, found);
    return found;
}

/* What was ours alone is free or evictable now, so the promise for it can be renewed at once. */
static void renew_promise(td_seq_t *seq)
{
    if (td_pool_reserve(seq->pool, 1) == TD_OK) {
        seq->reserved++;
    }
}

void td_seq_forget(td_seq_t *seq, uint32_t from)
{
    const uint32_t tokens = seq->layout->block_tokens;
    /* The block in which the window begins stays. */
    const uint32_t end = TD_MIN(td_attention_window(seq->mask, from) / tokens, seq->block_count);

    for (; seq->passed < end; seq->passed++) {
        const uint32_t at = seq->passed;
        if (seq->blocks[at] == TD_POOL_NONE ||
            td_attention_lasts(seq->mask, at * tokens, (at + 1) * tokens)) {
            continue;
        }
        td_pool_unref(seq->pool, seq->blocks[at]);
        seq->blocks[at] = TD_POOL_NONE;
        seq->held--;
        if (seq->reserved < seq->block_cap - seq->block_count) {
            renew_promise(seq);
        }
    }
}

uint32_t td_seq_extend(td_seq_t *seq, const td_block_key_t *keys, uint32_t count)
{
    TD_ASSERT(count <= seq->block_cap);
    while (seq->block_count < count) {
        const uint32_t idx = td_pool_find(seq->pool, &keys[seq->block_count]);
        if (idx == TD_POOL_NONE) {
            break;
        }
        td_pool_ref(seq->pool, idx);
        td_seq_adopt(seq, idx);
        if (seq->reserved > 0) {
            td_pool_unreserve(seq->pool, 1);
            seq->reserved--;
        }
        td_seq_forget(seq, seq->block_count * seq->layout->block_tokens);
    }
    return seq->block_count;
}

uint32_t td_seq_fini_quarantine(td_seq_t *seq, uint32_t *quarantined_out)
{
    uint32_t count = 0;

    if (seq->blocks == NULL) {
        return 0;
    }
    while (seq->block_count > 0) {
        const uint32_t idx = pop(seq);
        if (idx == TD_POOL_NONE) {
            continue;
        }
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

td_status_t td_seq_index(td_seq_t *seq, uint32_t block, const td_block_key_t *parent_key,
                         const td_block_key_t *key, uint64_t content_hash)
{
    const bool is_full = seq->mask->kind == TD_ATTENTION_FULL;

    return td_pool_index_after(seq->pool, seq->blocks[block], is_full ? parent_key : NULL, key,
                               content_hash);
}

void td_seq_fork(td_seq_t *seq, const td_seq_t *src)
{
    for (uint32_t i = 0; i < src->block_count; i++) {
        if (src->blocks[i] == TD_POOL_NONE) {
            td_seq_skip(seq);
        } else {
            td_pool_ref(src->pool, src->blocks[i]);
            td_seq_adopt(seq, src->blocks[i]);
        }
    }
    seq->passed = src->passed;
}

void td_seq_trim(td_seq_t *seq, uint32_t most)
{
    const uint32_t wanted = most - TD_MIN(most, seq->held);

    if (seq->reserved > wanted) {
        td_pool_unreserve(seq->pool, seq->reserved - wanted);
        seq->reserved = wanted;
    }
}

td_status_t td_seq_prepare_write(td_seq_t *seq, uint32_t position)
{
    uint32_t at = position / seq->layout->block_tokens;
    uint32_t fresh = 0;

    TD_ASSERT(at <= seq->block_count && at < seq->block_cap &&
              (at == seq->block_count || seq->blocks[at] != TD_POOL_NONE));
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
        const uint32_t idx = pop(seq);
        if (idx != TD_POOL_NONE) {
            td_pool_unref(seq->pool, idx);
            renew_promise(seq);
        }
    }
}

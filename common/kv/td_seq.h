/* td_seq.h - one sequence's block table over the pool: growth, sharing (n > 1), copy-on-write, and
 * giving up what its mask shows to no later position. An entry whose block is gone, or was never
 * needed, is TD_POOL_NONE. Design: common/kv/DESIGN.md, "Sequences" and "Masks".
 * Threads: owner (the pool's). No call after init allocates. */
#pragma once

#include <stdint.h>

#include "common/kv/td_attention_mask.h"
#include "common/kv/td_kv_layout.h"
#include "common/kv/td_pool.h"

typedef struct td_seq {
    td_pool_t *pool;                 /* borrowed */
    const td_kv_layout_t *layout;    /* borrowed */
    const td_attention_mask_t *mask; /* borrowed */
    uint32_t *blocks;                /* owned; [block_cap] block table */
    uint32_t block_cap;              /* blocks */
    uint32_t block_count;            /* blocks that hold tokens, those that are gone too */
    uint32_t held;                   /* of them, those that we hold a reference to */
    uint32_t passed;   /* entries that the window has left: gone, or lasting (td_seq_forget()) */
    uint32_t reserved; /* blocks of the pool's reservation that are ours */
} td_seq_t;

/** Makes an empty table for at most tokens_max tokens. Errors: TD_ERR_NO_MEMORY. */
TD_MUST_CHECK td_status_t td_seq_init(td_seq_t *seq, td_pool_t *pool, const td_kv_layout_t *layout,
                                      const td_attention_mask_t *mask, uint32_t tokens_max);
/** Releases every block (last to first) and the reservation. Safe on a zeroed seq. */
void td_seq_fini(td_seq_t *seq);
/** Gives every block back (last to first), but neither the reservation nor the table. */
void td_seq_release(td_seq_t *seq);
/** Gives everything back but the table itself (a pass may still read it; td_seq_fini() ends it),
 * and blocks that are ours alone and not indexed become quarantined: something may still write into
 * them. Shape: quarantined_out [block_cap]; returns how many. */
uint32_t td_seq_fini_quarantine(td_seq_t *seq, uint32_t *quarantined_out);
/** Adds n blocks to the sequence's reservation. Errors: TD_ERR_BUSY. */
TD_MUST_CHECK td_status_t td_seq_reserve(td_seq_t *seq, uint32_t n);
/** Appends a block that the caller already holds a reference to (a prefix hit, a fetched block). */
void td_seq_adopt(td_seq_t *seq, uint32_t block_idx);
/** Appends an entry without a block: no position that is still to come needs it. */
void td_seq_skip(td_seq_t *seq);
/** For an empty sequence: the longest prefix of keys from which the sequence can go on with what is
 * here, which is everything that positions behind it see. Takes a reference to each block of that,
 * and skips the others. Answers its length in blocks. Cost: O(count). */
uint32_t td_seq_match(td_seq_t *seq, const td_block_key_t *keys, uint32_t count);
/** For an empty sequence: adopts, from the first key on, what is here of all that positions from
 * `from` on need, and skips the others, up to the first that is needed and not here. Answers how
 * many entries there are. Cost: O(count). */
uint32_t td_seq_hold(td_seq_t *seq, uint32_t from, const td_block_key_t *keys, uint32_t count);
/** Goes on with what is here: appends the blocks of keys from the next entry on, up to the first
 * that is not here; what was promised for them is given back, and what nobody needs behind them is
 * given up as by td_seq_forget(). Answers how many entries there are. Cost: O(count). */
uint32_t td_seq_extend(td_seq_t *seq, const td_block_key_t *keys, uint32_t count);
/** Does any position from `from` on need the block? */
static inline bool td_seq_needs(const td_seq_t *seq, uint32_t from, uint32_t block)
{
    const uint32_t tokens = seq->layout->block_tokens;
    return td_attention_needs(seq->mask, from, block * tokens, (block + 1) * tokens);
}
/** Gives up every block that no position from `from` on needs; the promise for it is renewed as
 * long as the sequence still grows. Positions before `from` must never be computed again, and no
 * pass may be reading the table. Cost: O(1) per block, each is looked at once; allocates nothing.
 */
void td_seq_forget(td_seq_t *seq, uint32_t from);
/** Gives back what is promised beyond `most` blocks, those that are held counted. */
void td_seq_trim(td_seq_t *seq, uint32_t most);
/** Takes the next block from the reservation: zeroed, or as it is for one that a fetch fills whole.
 */
uint32_t td_seq_grow(td_seq_t *seq);
uint32_t td_seq_grow_raw(td_seq_t *seq);
/** Indexes an entry's block under its key; parent_key: that of the entry before it, NULL: it is the
 * first. Under a mask blocks don't need those before them for long, so no block names what it
 * follows. Errors: as td_pool_index(). */
TD_MUST_CHECK td_status_t td_seq_index(td_seq_t *seq, uint32_t block,
                                       const td_block_key_t *parent_key, const td_block_key_t *key,
                                       uint64_t content_hash);
/** Shares all blocks of src, including a partial last one; both may go on growing. */
void td_seq_fork(td_seq_t *seq, const td_seq_t *src);
/** Makes the block of a position exist and be ours alone before a write there: grows, or copies a
 * shared block (only that one). Uses the reservation.
 * Errors: TD_ERR_BUSY (nothing reserved and the pool is full). */
TD_MUST_CHECK td_status_t td_seq_prepare_write(td_seq_t *seq, uint32_t position);
/** Rolls back to the first n tokens' blocks (speculation); freed blocks return to the reservation.
 */
void td_seq_truncate(td_seq_t *seq, uint32_t tokens);

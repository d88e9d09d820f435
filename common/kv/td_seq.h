/* td_seq.h - one sequence's block table over the pool: growth, sharing (n > 1) and copy-on-write.
 * Threads: owner (the pool's). No call after init allocates. */
#pragma once

#include <stdint.h>

#include "common/kv/td_kv_layout.h"
#include "common/kv/td_pool.h"

typedef struct td_seq {
    td_pool_t *pool;              /* borrowed */
    const td_kv_layout_t *layout; /* borrowed */
    uint32_t *blocks;             /* owned; [block_cap] block table */
    uint32_t block_cap;           /* blocks */
    uint32_t block_count;         /* blocks that hold tokens */
    uint32_t reserved;            /* blocks of the pool's reservation that are ours */
} td_seq_t;

/** Makes an empty table for at most tokens_max tokens. Errors: TD_ERR_NO_MEMORY. */
TD_MUST_CHECK td_status_t td_seq_init(td_seq_t *seq, td_pool_t *pool, const td_kv_layout_t *layout,
                                      uint32_t tokens_max);
/** Releases every block (last to first) and the reservation. Safe on a zeroed seq. */
void td_seq_fini(td_seq_t *seq);
/** Gives everything back but the table itself (a pass may still read it; td_seq_fini() ends it),
 * and blocks that are ours alone and not indexed become quarantined: something may still write into
 * them. Shape: quarantined_out [block_cap]; returns how many. */
uint32_t td_seq_fini_quarantine(td_seq_t *seq, uint32_t *quarantined_out);
/** Adds n blocks to the sequence's reservation. Errors: TD_ERR_BUSY. */
TD_MUST_CHECK td_status_t td_seq_reserve(td_seq_t *seq, uint32_t n);
/** Appends a block that the caller already holds a reference to (a prefix hit, a fetched block). */
void td_seq_adopt(td_seq_t *seq, uint32_t block_idx);
/** Takes the next block from the reservation: zeroed, or as it is for one that a fetch fills whole.
 */
uint32_t td_seq_grow(td_seq_t *seq);
uint32_t td_seq_grow_raw(td_seq_t *seq);
/** Shares all blocks of src, including a partial last one; both may go on growing. */
void td_seq_fork(td_seq_t *seq, const td_seq_t *src);
/** Makes the block of a position exist and be ours alone before a write there: grows, or copies a
 * shared block (only that one). Uses the reservation.
 * Errors: TD_ERR_BUSY (nothing reserved and the pool is full). */
TD_MUST_CHECK td_status_t td_seq_prepare_write(td_seq_t *seq, uint32_t position);
/** Rolls back to the first n tokens' blocks (speculation); freed blocks return to the reservation.
 */
void td_seq_truncate(td_seq_t *seq, uint32_t tokens);

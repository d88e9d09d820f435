/* td_memo.h - memoised continuations: which tokens followed a text the last time that it was
 * answered. Named by block keys, so a text is the whole text from its beginning, of one tenant,
 * model and numerics class (I8); nobody finds what another tenant's request has left. What is
 * found is a guess: the model may go on otherwise now.
 * Threads: owner. All memory is taken in td_memo_create(); later calls never allocate. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/td_status.h"
#include "common/kv/td_block_key.h"

#define TD_MEMO_BYTES_MAX ((uint64_t)1 << 36)
#define TD_MEMO_BLOCK_TOKENS_MAX 1024u
#define TD_MEMO_AHEAD 16u /* tokens that a path has beyond the next block's end */
#define TD_MEMO_PATH_MAX (TD_MEMO_BLOCK_TOKENS_MAX + TD_MEMO_AHEAD)

typedef struct td_memo td_memo_t;

/** Where an output begins: the text before it. */
typedef struct td_memo_start {
    const td_block_root_t *root;
    bool has_parent;
    td_block_key_t parent; /* of the prompt's last full block; valid if has_parent */
    td_block_key_t key;    /* of the whole prompt: as parent, or td_block_key_partial() */
    const uint32_t *tail;  /* [tail_tokens]: behind the last full block */
    uint32_t tail_tokens;
} td_memo_start_t;

/** Units: bytes in all, at most TD_MEMO_BYTES_MAX; block_tokens 1..TD_MEMO_BLOCK_TOKENS_MAX;
 * max_age_ns after which a path is gone.
 * Errors: TD_ERR_INVALID (out of range, or not one path fits), TD_ERR_NO_MEMORY.
 * Owner:  the caller ends it with td_memo_destroy(). */
TD_MUST_CHECK td_status_t td_memo_create(uint64_t bytes, uint32_t block_tokens, uint64_t max_age_ns,
                                         td_memo_t **out);
/** NULL is allowed. */
void td_memo_destroy(td_memo_t *memo);
/** Keeps an output: a path from its start, and from each block's end inside it. What is there of a
 * text is replaced, unless it begins with the new one. Cost: O(count); a hash each block. */
void td_memo_learn(td_memo_t *memo, const td_memo_start_t *start, const uint32_t *output,
                   uint32_t count, uint64_t now_ns);
/** The tokens that followed a text. Answers how many, 0 = nothing is known.
 * Shape: out [td_memo_path_max()]. */
uint32_t td_memo_find(td_memo_t *memo, const td_block_key_t *key, uint64_t now_ns, uint32_t *out);
/** block_tokens + TD_MEMO_AHEAD: from a block's end, to drafts behind the next one's. */
uint32_t td_memo_path_max(const td_memo_t *memo);
uint32_t td_memo_block_tokens(const td_memo_t *memo);
/** Paths that are there, and for how many there is room. */
uint32_t td_memo_count(const td_memo_t *memo);
uint32_t td_memo_capacity(const td_memo_t *memo);

/* kvs_memo.h - answers that nodes have remembered for each other: for the key of a whole prompt the
 * tokens that followed it the last time. Hints for drafting, never more (the drafter memo). Keys
 * hold tenant, model and numerics class, so nobody finds another's (I8). Bounded in bytes and in
 * age; the least recently used goes. Lost with its process, like all that can be learned again.
 * Threads: owner. */
#pragma once

#include <stdint.h>

#include "common/base/td_status.h"
#include "common/kv/td_block_key.h"

#define KVS_MEMO_BYTES_MAX ((uint64_t)1 << 36)

typedef struct kvs_memo kvs_memo_t;

/** Units: bytes of all that it holds, 0: it keeps nothing; max_age_ns.
 * Errors: TD_ERR_NO_MEMORY. Owner: the caller ends it with kvs_memo_destroy(). */
TD_MUST_CHECK td_status_t kvs_memo_create(uint64_t bytes_max, uint64_t max_age_ns,
                                          kvs_memo_t **out);
void kvs_memo_destroy(kvs_memo_t *memo); /* NULL is allowed */
/** Keeps an answer, in place of the one that was there. One that is larger than all room, or for
 * which there is no memory, is not kept. */
void kvs_memo_put(kvs_memo_t *memo, const td_block_key_t *key, const uint32_t *tokens,
                  uint32_t count, uint64_t now_ns);
/** NULL: there is none. Owner: the table, until the next put. */
const uint32_t *kvs_memo_get(kvs_memo_t *memo, const td_block_key_t *key, uint64_t now_ns,
                             uint32_t *count_out);
uint32_t kvs_memo_count(const kvs_memo_t *memo);
uint64_t kvs_memo_bytes(const kvs_memo_t *memo);

/* td_pool.h - the node's KV blocks: who holds each, which are cached under a key, which may be
 * evicted. Design: common/kv/DESIGN.md, "Pool" and "Prefix cache".
 *
 * Every block is in exactly one state, so free + reserved + cached + active + quarantined = total
 * (I5): free         on the free stack reserved     promised to a request as a count; no particular
 * block yet active       held by at least one reference (it may be indexed as well) cached indexed
 * under a key, no reference; evicted least recently used first quarantined  a transfer into it may
 * still be under way; nobody may use it (I2) Threads: owner, but td_pool_epoch() may be read by
 * any. No call after create allocates. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/td_status.h"
#include "common/kv/td_block_key.h"
#include "common/kv/td_kv_events.h"

#define TD_POOL_BLOCKS_MAX (1u << 22)
#define TD_POOL_NONE UINT32_MAX

typedef struct td_pool td_pool_t;

typedef struct td_pool_counts { /* blocks */
    uint32_t free;
    uint32_t reserved;
    uint32_t cached;
    uint32_t active;
    uint32_t quarantined;
    uint32_t total;
} td_pool_counts_t;

/** Creates a pool over memory that the caller provides (so that it can be mapped by others).
 * Units:  block_count in blocks, 1..TD_POOL_BLOCKS_MAX; block_bytes in bytes, > 0.
 * Shape:  bytes [block_count][block_bytes].
 * Errors: TD_ERR_INVALID, TD_ERR_NO_MEMORY.
 * Owner:  the caller ends *out with td_pool_destroy(); bytes are borrowed until then. */
TD_MUST_CHECK td_status_t td_pool_create(uint8_t *bytes, uint32_t block_count, size_t block_bytes,
                                         td_pool_t **out);
/** NULL is allowed. Logs a warning when blocks are still held. */
void td_pool_destroy(td_pool_t *pool);

/** Promises n blocks, evicting cached ones if needed. All or nothing.
 * Errors: TD_ERR_BUSY (not that many free or evictable). Cost: O(evicted). */
TD_MUST_CHECK td_status_t td_pool_reserve(td_pool_t *pool, uint32_t n);
void td_pool_unreserve(td_pool_t *pool, uint32_t n);
/** Turns one reserved block into an active one with one reference and a new epoch. O(1); cannot
 * fail while the caller holds a reservation. */
uint32_t td_pool_take_reserved(td_pool_t *pool);
/** Reserves and takes one. Errors: TD_ERR_BUSY. */
TD_MUST_CHECK td_status_t td_pool_take(td_pool_t *pool, uint32_t *idx_out);

void td_pool_ref(td_pool_t *pool, uint32_t idx);
/** Drops a reference; the last one makes the block cached (if indexed) or free. Dropping a
 * sequence's blocks last to first lets eviction start at the leaves. */
void td_pool_unref(td_pool_t *pool, uint32_t idx);
uint32_t td_pool_refs(const td_pool_t *pool, uint32_t idx);

/** Indexes an active block under its key, with the hash of its content. When the key is there
 * already the block stays as it is and TD_ERR_EXISTS comes back. O(1). */
TD_MUST_CHECK td_status_t td_pool_index(td_pool_t *pool, uint32_t idx, const td_block_key_t *key,
                                        uint64_t content_hash);
/** The same for a block that follows another in a sequence: while the block is indexed, eviction
 * passes over the indexed one of parent_key (NULL or not indexed: as td_pool_index()). O(1). */
TD_MUST_CHECK td_status_t td_pool_index_after(td_pool_t *pool, uint32_t idx,
                                              const td_block_key_t *parent_key,
                                              const td_block_key_t *key, uint64_t content_hash);
/** Takes a block out of the index (its bytes proved wrong); a cached one becomes free.
 * Cost: O(1), or O(blocks) where others follow it. */
void td_pool_unindex(td_pool_t *pool, uint32_t idx);
bool td_pool_is_indexed(const td_pool_t *pool, uint32_t idx);
/** The block of a key, or TD_POOL_NONE; takes no reference. */
uint32_t td_pool_find(const td_pool_t *pool, const td_block_key_t *key);
/** Longest prefix of keys that is here; takes a reference to each. Returns its length in blocks. */
uint32_t td_pool_match(td_pool_t *pool, const td_block_key_t *keys, uint32_t count,
                       uint32_t *idx_out);
uint64_t td_pool_content_hash(const td_pool_t *pool, uint32_t idx); /* of an indexed block */
const td_block_key_t *td_pool_key(const td_pool_t *pool, uint32_t idx);

/** An active block with one reference that a transfer may still write into leaves use. */
void td_pool_quarantine(td_pool_t *pool, uint32_t idx);
/** The transfer is proven over: the block is free again. */
void td_pool_release_quarantine(td_pool_t *pool, uint32_t idx);

/** The allocation a block's bytes belong to; changes whenever its memory is given to another use.
 * Threads: any (acquire; pairs with the release in take and free). */
uint64_t td_pool_epoch(const td_pool_t *pool, uint32_t idx);
uint8_t *td_pool_bytes(const td_pool_t *pool, uint32_t idx);
uint8_t *td_pool_base(const td_pool_t *pool);
size_t td_pool_block_bytes(const td_pool_t *pool);
td_pool_counts_t td_pool_counts(const td_pool_t *pool);
/** Units: bytes of bookkeeping, without the blocks themselves. */
size_t td_pool_own_bytes(const td_pool_t *pool);
uint64_t td_pool_evictions(const td_pool_t *pool);
/** From now on events are told which keys are indexed and which no longer; NULL: nobody. Nothing is
 * indexed yet. Owner: events are borrowed until the pool ends. */
void td_pool_watch(td_pool_t *pool, td_kv_events_t *events);
/** Keys that are indexed, some of them: as td_kv_walk_t (td_kv_events.h) of blocks. */
uint32_t td_pool_walk(const td_pool_t *pool, uint32_t *cursor, uint32_t max, td_block_key_t *out);

/* kvs_cold.h - which keys lie in the cold tier of which segment, as the segments told. Of several
 * segments the one that told last. A hint, as all of the index. Design: kvstore/DESIGN.md, "Cold
 * keys". Threads: owner. Nothing allocates after create. */
#pragma once

#include <stdint.h>

#include "common/base/td_status.h"
#include "common/kv/td_block_key.h"

#define KVS_COLD_KEYS_MAX (1u << 26)

typedef struct kvs_cold kvs_cold_t;

/** Units: keys_max, 1..KVS_COLD_KEYS_MAX. Errors: TD_ERR_INVALID, TD_ERR_NO_MEMORY.
 * Owner:  the caller ends *out with kvs_cold_destroy(). */
TD_MUST_CHECK td_status_t kvs_cold_create(uint32_t keys_max, kvs_cold_t **out);
void kvs_cold_destroy(kvs_cold_t *cold);
/** The segment has the key. Where the table is full nothing is learnt. */
void kvs_cold_add(kvs_cold_t *cold, const td_block_key_t *key, uint32_t segment);
/** The segment has it no more; nothing changes where another has told of it since. */
void kvs_cold_remove(kvs_cold_t *cold, const td_block_key_t *key, uint32_t segment);
/** Forgets all keys of a segment. Cost: O(keys known). */
void kvs_cold_forget(kvs_cold_t *cold, uint32_t segment);
/** The segment that has the key, or KVS_NONE. */
uint32_t kvs_cold_find(const kvs_cold_t *cold, const td_block_key_t *key);
uint32_t kvs_cold_count(const kvs_cold_t *cold);

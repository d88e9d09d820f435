/* kvs_removed.h - which keys were removed lately, and when: a segment that was away meanwhile still
 * has them, and will tell of them when it is mounted again. The oldest are forgotten first.
 * Threads: owner. Nothing allocates after create. */
#pragma once

#include <stdint.h>

#include "common/base/td_status.h"
#include "common/kv/td_block_key.h"

#define KVS_REMOVED_MAX 65536u /* keys remembered by the master */

typedef struct kvs_removed kvs_removed_t;

/** Units: keys_max > 0. Errors: TD_ERR_NO_MEMORY.
 * Owner:  the caller ends *out with kvs_removed_destroy(). */
TD_MUST_CHECK td_status_t kvs_removed_create(uint32_t keys_max, kvs_removed_t **out);
/** NULL is allowed. */
void kvs_removed_destroy(kvs_removed_t *removed);
/** Units: now_ns > 0, ascending. */
void kvs_removed_add(kvs_removed_t *removed, const td_block_key_t *key, uint64_t now_ns);
/** When a key was removed last, 0: not lately. Units: ns. */
uint64_t kvs_removed_at(const kvs_removed_t *removed, const td_block_key_t *key);

/* kvs_segment_manifest.h - tells a leader that has mounted the segment (again) which blocks are
 * readable in its memory, in the order in which they were stored, so that it may evict in that
 * order. Design: kvstore/DESIGN.md, "Leadership". Threads: loop. Nothing allocates after create. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "common/base/td_status.h"
#include "common/kv/td_pool.h"
#include "common/wire/td_bus.h"

#define KVS_MANIFEST_BATCHES_MAX 32u /* of TD_MSG_MANIFEST_KEYS_MAX keys, in one turn */

typedef struct kvs_segment_manifest kvs_segment_manifest_t;

/** Errors: TD_ERR_NO_MEMORY. bus and pool are borrowed until destroy. */
TD_MUST_CHECK td_status_t kvs_segment_manifest_create(td_bus_t *bus, const td_pool_t *pool,
                                                      kvs_segment_manifest_t **out);
/** NULL is allowed. */
void kvs_segment_manifest_destroy(kvs_segment_manifest_t *manifest);
/** A block has become readable, and nothing is pinned there: it is the newest one. Of a prefix the
 * last block comes first. O(1). */
void kvs_segment_manifest_stored(kvs_segment_manifest_t *manifest, uint32_t idx);
/** From now on all is told to this master, from the beginning. */
void kvs_segment_manifest_mounted(kvs_segment_manifest_t *manifest, const char *master,
                                  uint64_t term, uint64_t mount);
/** What the leader has pinned is told to the next one. */
void kvs_segment_manifest_pin(kvs_segment_manifest_t *manifest, uint32_t idx, uint32_t pin);
/** Is something still to be told? */
/** Orders of the master did not arrive: asks it, before anything else is told, to mount us again.
 */
void kvs_segment_manifest_lost(kvs_segment_manifest_t *m);
bool kvs_segment_manifest_is_telling(const kvs_segment_manifest_t *manifest);
/** Tells a bounded number of blocks. */
void kvs_segment_manifest_turn(kvs_segment_manifest_t *manifest);

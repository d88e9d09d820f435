/* kvs_segment_tier.h - what goes between a segment's memory and its cold tier: blocks that gave
 * way, on their way to the disk; ordered ones, on their way back; and what the master is told of
 * the tier. Design: kvstore/DESIGN.md, "Cold keys". Threads: loop. Nothing allocates after create,
 * and nothing waits for the disk. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "common/base/td_status.h"
#include "common/kv/td_pool.h"
#include "common/wire/td_bus.h"
#include "kvstore/kvs_segment_manifest.h"
#include "kvstore/kvs_tier.h"

#define KVS_PROMOTE_BLOCKS_MAX 16u /* of one order */
#define KVS_PROMOTIONS_MAX 256u    /* orders under way */
#define KVS_REMOVALS_MAX 4096u     /* waiting for the tier */

typedef struct kvs_segment_tier kvs_segment_tier_t;

/** Errors: as kvs_tier_create(). bus, pool and manifest are borrowed until destroy. */
TD_MUST_CHECK td_status_t kvs_segment_tier_create(td_bus_t *bus, td_pool_t *pool,
                                                  kvs_segment_manifest_t *manifest,
                                                  const kvs_tier_config_t *config,
                                                  kvs_segment_tier_t **out);
/** Before the pool. NULL is allowed. */
void kvs_segment_tier_destroy(kvs_segment_tier_t *tier);

/** A leader has mounted the segment (again): it is told all that the tier holds. */
void kvs_segment_tier_mounted(kvs_segment_tier_t *tier, const char *master, uint64_t term,
                              uint64_t mount);
/** Takes over an indexed block and its reference; it is written as soon as the tier takes it. */
void kvs_segment_tier_demote(kvs_segment_tier_t *tier, uint32_t idx);
/** Whoever needs a block of the pool gets the one that waits longest to be written. False: none
 * waits. */
bool kvs_segment_tier_yield(kvs_segment_tier_t *tier);
/** Forgets a key here and on the disk. */
void kvs_segment_tier_remove(kvs_segment_tier_t *tier, const td_block_key_t *key);
/** Carries out a PromoteOrder of the leader. */
void kvs_segment_tier_promote(kvs_segment_tier_t *tier, const td_msg_t *msg);
/** What is on its way back under this key (NULL: under any) is dropped when it comes. */
void kvs_segment_tier_cancel(kvs_segment_tier_t *tier, const td_block_key_t *key);
/** Readable when kvs_segment_tier_turn() has something to do. */
int kvs_segment_tier_fd(const kvs_segment_tier_t *tier);
/** Takes what the tier has done and gives it more; call also at least every 100 ms. */
void kvs_segment_tier_turn(kvs_segment_tier_t *tier);

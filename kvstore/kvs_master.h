/* kvs_master.h - the store's index on the wire: puts, lookups, pins, removal, eviction, and the
 * segments' and writers' deaths. Design: section 5. The master never touches data; segments own
 * their memory and epochs, so two masters could never hand out one range. Index entries are hints:
 * readers check epoch and checksum. Threads: loop. */
#pragma once

#include <stdint.h>

#include "common/base/td_metrics.h"
#include "common/base/td_status.h"
#include "common/coord/td_coord.h"
#include "common/wire/td_bus.h"
#include "common/wire/td_member.h"
#include "kvstore/kvs_index.h"

#define KVS_ORDERS_MAX 4096u           /* under way, copies included */
#define KVS_COPIES_MAX 16u             /* of hot keys, under way */
#define KVS_COPY_BLOCKS_MAX 64u        /* of one copy */
#define KVS_HELD_MAX 256u              /* lookups that wait for cold tiers */
#define KVS_PROMOTIONS_ORDERED_MAX 64u /* orders under way, of KVS_PROMOTE_BLOCKS_MAX blocks */
#define KVS_PROMOTE_ABANDONED_MS 2000u /* then the segment's cold tier is stuck */
#define KVS_PROMOTE_PAUSE_MS 10000u    /* and is not asked for so long */

typedef struct kvs_master kvs_master_t;

/** A standby, until kvs_master_lead(): it answers lookups from what it knows, and is busy for all
 * else. coord is borrowed; each order asks it whether we still lead.
 * Units: keys_max: entries of the index, all memory taken here.
 * Errors: as kvs_index_create(). */
TD_MUST_CHECK td_status_t kvs_master_create(td_bus_t *bus, td_metrics_t *metrics, uint32_t keys_max,
                                            const kvs_policy_t *policy, const td_coord_t *coord,
                                            kvs_master_t **out);
/** A new term has begun: mounts every segment, which then tell what they hold. */
void kvs_master_lead(kvs_master_t *master, uint64_t term);
/** The term is over for certain. What is known still answers lookups, as hints. */
void kvs_master_follow(kvs_master_t *master);
/** Has every segment told all it holds? */
bool kvs_master_is_complete(const kvs_master_t *master);
void kvs_master_destroy(kvs_master_t *master);
void kvs_master_segment_up(kvs_master_t *master, const char *id, uint64_t incarnation,
                           uint32_t block_count);
/** A segment's replicas are dropped; a writer's unfinished puts are revoked. */
void kvs_master_peer_down(kvs_master_t *master, const char *id, uint64_t incarnation);
bool kvs_master_handle(kvs_master_t *master, const td_msg_t *msg);
/** Call at least every 100 ms, and after kvs_master_wait_ms(). */
void kvs_master_tick(kvs_master_t *master);
/** Tells the member's routers which keys can be read; call after each tick. */
void kvs_master_tell(kvs_master_t *master, const td_member_t *member);
/** How long the loop may sleep: most_ms, or less while a lookup or events for routers wait. */
uint32_t kvs_master_wait_ms(const kvs_master_t *master, uint32_t most_ms);

/* kvs_master.h - the store's index: which key lies where, who is writing it, leases, eviction.
 * Design: section 5. The master never touches data; segments own their memory and epochs, so two
 * masters could never hand out one range. Index entries are hints: readers check epoch and
 * checksum. Threads: loop. */
#pragma once

#include <stdint.h>

#include "common/base/td_metrics.h"
#include "common/base/td_status.h"
#include "common/wire/td_bus.h"

#define KVS_LEASE_MS 10000u /* read lease: blocks eviction */
#define KVS_PUT_ABANDONED_MS 30000u
#define KVS_EVICT_FROM_PERCENT 90u /* of a segment */
#define KVS_EVICT_PERCENT 5u       /* at a time */
#define KVS_ORDERS_MAX 4096u
#define KVS_KEYS_MAX (1u << 22)

typedef struct kvs_master kvs_master_t;

/** Units: keys_max: entries of the index, all memory taken here. Errors: TD_ERR_NO_MEMORY. */
TD_MUST_CHECK td_status_t kvs_master_create(td_bus_t *bus, td_metrics_t *metrics, uint32_t keys_max,
                                            uint64_t term, kvs_master_t **out);
void kvs_master_destroy(kvs_master_t *master);
void kvs_master_segment_up(kvs_master_t *master, const char *id, uint64_t incarnation,
                           uint32_t block_count);
/** A segment's replicas are dropped; a writer's unfinished puts are revoked. */
void kvs_master_peer_down(kvs_master_t *master, const char *id, uint64_t incarnation);
bool kvs_master_handle(kvs_master_t *master, const td_msg_t *msg);
void kvs_master_tick(kvs_master_t *master);

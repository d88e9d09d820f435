/* kvs_index.h - what the master knows: where each key's replicas lie, who reads them, which are
 * pinned, and in what order they may go. State in, decision out: no messages and no clock.
 * Source: design, section 5; the rules are Mooncake's (Qin et al. 2024, section 3), with data that
 * the segment pulls. Threads: owner. Nothing allocates after create. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "common/base/td_status.h"
#include "common/kv/td_key_index.h"
#include "common/kv/td_kv_events.h"

#define KVS_NONE UINT32_MAX
#define KVS_SEGMENTS_MAX 256u
#define KVS_KEYS_MAX (1u << 22)
#define KVS_REPLICAS_MAX 8u /* of a key, each on a segment of its own */

/** What may be configured. Milliseconds; percents of a segment's blocks. */
typedef struct kvs_policy {
    uint32_t lease_ms; /* of a reader; blocks eviction and removal */
    uint32_t soft_pin_ms;
    uint32_t put_abandoned_ms;
    uint32_t evict_from_percent; /* full */
    uint32_t evict_percent;      /* at a time */
    uint32_t replicas;           /* of a new key, best effort, at least one */
    uint32_t hot_replicas;       /* of a key that is often read, at most */
    uint32_t hot_hits; /* lookups, of which half are forgotten every hot_half_ms, that each
                        * further replica needs */
    uint32_t hot_half_ms;
    uint32_t promote_ms;    /* a lookup waits for blocks of a cold tier at most so long */
    uint32_t cold_keys_max; /* known of in cold tiers */
    uint64_t memo_bytes;    /* of answers that nodes remember for each other; 0: none */
    uint64_t memo_age_ms;
} kvs_policy_t;

/** Order of eviction: first those without a pin, then soft pins, never hard ones. */
typedef enum kvs_pin { KVS_PIN_NONE = 0, KVS_PIN_SOFT, KVS_PIN_HARD, KVS_PIN_KINDS } kvs_pin_t;

/** Replicas from the one unused longest to the one used last. */
typedef struct kvs_list {
    uint32_t oldest; /* KVS_NONE: empty */
    uint32_t newest;
} kvs_list_t;
#define KVS_LIST_EMPTY ((kvs_list_t){KVS_NONE, KVS_NONE})

typedef enum kvs_replica_state { KVS_REPLICA_FREE = 0, KVS_STORING, KVS_READY } kvs_replica_state_t;

/** One copy of a key's block, there or on its way. */
typedef struct kvs_replica {
    uint32_t entry;
    uint32_t next; /* of the entry */
    uint32_t prev_in_list;
    uint32_t next_in_list;
    uint32_t segment;
    uint32_t order; /* STORING: by which; the list is that order's. READY: the segment's */
    uint32_t block; /* READY: where */
    uint8_t state;
    uint64_t epoch;
    uint64_t checksum;
} kvs_replica_t;

typedef struct kvs_entry {
    td_block_key_t key;
    uint32_t first;   /* replica; KVS_NONE: the entry is free */
    uint8_t ready;    /* replicas that can be read */
    uint8_t storing;  /* replicas on their way */
    uint8_t pin;      /* kvs_pin_t */
    uint32_t hits;    /* lookups lately */
    uint64_t hits_ns; /* when half of them were last forgotten */
    uint64_t lease_until_ns;
    uint64_t pin_until_ns; /* SOFT */
} kvs_entry_t;

/** A segment's share of the index; who it is, the master knows. */
typedef struct kvs_share {
    bool mounted;
    uint32_t block_count;
    uint32_t used;   /* replicas, ready or on their way */
    uint32_t served; /* replicas named to readers lately */
    kvs_list_t lists[KVS_PIN_KINDS];
} kvs_share_t;

typedef struct kvs_index {
    kvs_policy_t policy;
    uint32_t keys_max;
    uint32_t replicas_max;
    kvs_entry_t *entries;    /* owned; [keys_max] */
    uint32_t *free_entries;  /* owned; stack */
    kvs_replica_t *replicas; /* owned; [replicas_max] */
    uint32_t *free_replicas; /* owned; stack */
    uint32_t free_entry_count;
    uint32_t free_replica_count;
    uint32_t readable;      /* keys with a replica that is ready */
    uint32_t cooling;       /* next entry to look at */
    td_key_index_t keys;    /* owned */
    td_kv_events_t *events; /* borrowed, or NULL: told which keys can be read */
    kvs_share_t shares[KVS_SEGMENTS_MAX];
} kvs_index_t;

/** Defaults as in the design's table. */
kvs_policy_t kvs_policy_default(void);
/** Units: keys_max entries, 1..KVS_KEYS_MAX. Errors: TD_ERR_INVALID (a policy out of its ranges; a
 * line says which), TD_ERR_NO_MEMORY.
 * Owner:  the caller ends it with kvs_index_destroy(). */
TD_MUST_CHECK td_status_t kvs_index_create(uint32_t keys_max, const kvs_policy_t *policy,
                                           kvs_index_t **out);
void kvs_index_destroy(kvs_index_t *index);

/** A place for a segment of so many blocks, or KVS_NONE. */
uint32_t kvs_index_mount(kvs_index_t *index, uint32_t block_count);
/** Forgets its readable replicas; those on their way must be gone before. Cost: O(its replicas). */
void kvs_index_unmount(kvs_index_t *index, uint32_t segment);
/** The same, and it stays mounted. */
void kvs_index_forget(kvs_index_t *index, uint32_t segment);
/** Free blocks; none where it told of more than it said it has. */
uint32_t kvs_index_room(const kvs_index_t *index, uint32_t segment);
/** The emptiest segments, full ones too, not counting `without`; answers how many. */
uint32_t kvs_index_choose(const kvs_index_t *index, uint32_t want, uint32_t without,
                          uint32_t *segments_out);
bool kvs_index_is_full(const kvs_index_t *index, uint32_t segment); /* as the policy says */

/** NULL: no replica, and none on its way. */
kvs_entry_t *kvs_index_find(const kvs_index_t *index, const td_block_key_t *key);
const td_block_key_t *kvs_index_key(const kvs_index_t *index, const kvs_replica_t *replica);
/** The entry's replica on a segment, or NULL. */
kvs_replica_t *kvs_index_on(const kvs_index_t *index, const kvs_entry_t *entry, uint32_t segment);

/** Promises a block of the segment to a key and puts the replica on the order's list.
 * Errors: TD_ERR_BUSY (no room), TD_ERR_EXISTS (that segment has one). */
TD_MUST_CHECK td_status_t kvs_index_begin(kvs_index_t *index, const td_block_key_t *key,
                                          uint32_t segment, uint32_t order, kvs_list_t *order_list);
/** A replica on its way has come. */
void kvs_index_stored(kvs_index_t *index, kvs_replica_t *replica, kvs_list_t *order_list,
                      uint32_t block, uint64_t epoch, uint64_t checksum);
/** A segment tells of a block that it has: a readable replica, though nobody here ordered it. More
 * of them than the segment was said to have blocks are taken.
 * Errors: TD_ERR_EXISTS (its replica of that key is on its way: the order's result says where),
 *         TD_ERR_BUSY (no room in the index, or the key has replicas enough). */
TD_MUST_CHECK td_status_t kvs_index_adopt(kvs_index_t *index, const td_block_key_t *key,
                                          uint32_t segment, uint32_t block, uint64_t epoch,
                                          uint64_t checksum, kvs_entry_t **entry_out);
/** Forgets a replica; with its last one the entry goes. order_list: of one on its way, else NULL.
 * Answers whether the key can still be read or is still on its way. */
bool kvs_index_drop(kvs_index_t *index, kvs_replica_t *replica, kvs_list_t *order_list);

/** A reader was told of the key: leased, used last, counted. Call for a prefix from its last block
 * to its first, so that eviction takes leaves before what they hang on. */
void kvs_index_touch(kvs_index_t *index, kvs_entry_t *entry, uint64_t now_ns);
/** The readable replica on the segment that serves least, which then serves one more. */
const kvs_replica_t *kvs_index_serve(kvs_index_t *index, const kvs_entry_t *entry);
/** Is the key read so often that another replica would help? */
bool kvs_index_is_hot(const kvs_index_t *index, const kvs_entry_t *entry);
/** Counts what is read lately; call every second. */
void kvs_index_forget_half_served(kvs_index_t *index);

void kvs_index_pin(kvs_index_t *index, kvs_entry_t *entry, kvs_pin_t pin, uint64_t now_ns);

/** Forgets up to `want` replicas of a segment, unused longest first: without a pin, then softly
 * pinned ones. What is leased or being copied stays. Shape: keys_out [want]. Answers how many. */
uint32_t kvs_index_evict(kvs_index_t *index, uint32_t segment, uint32_t want, uint64_t now_ns,
                         td_block_key_t *keys_out);
/** Looks at some entries further and forgets one replica too many of a key that is not often read
 * any more; answers its segment and key, or KVS_NONE once `looks` were in vain. */
uint32_t kvs_index_cool(kvs_index_t *index, uint32_t looks, uint64_t now_ns,
                        td_block_key_t *key_out);

/** Keys that can be read, some of them: as td_kv_walk_t (td_kv_events.h), of the index. */
uint32_t kvs_index_walk(const void *index, uint32_t *cursor, uint32_t max, td_block_key_t *out);

/* kvs_master_internal.h - what the parts of the master share: the state, and orders.
 * Threads: loop. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "common/node/td_kv_feed.h"
#include "kvstore/kvs_cold.h"
#include "kvstore/kvs_master.h"
#include "kvstore/kvs_memo.h"
#include "kvstore/kvs_removed.h"

#define KVS_TAKEN_MAX 64u /* keys; past it the segment is mounted again */

typedef struct segment {
    bool telling;    /* what it holds in memory is not all known yet */
    bool heard;      /* of this mounting, from it */
    bool must_mount; /* it may hold what nobody here knows of: an order did not reach it */
    uint64_t mounted_ns;
    uint64_t talked_ns; /* while telling: when it was last told of the mounting, or last told us */
    uint32_t taken_count; /* keys ordered away since, while it is telling: a manifest that was sent
                           * before the order may still name them */
    td_block_key_t taken[KVS_TAKEN_MAX];
    uint64_t slow_until_ns;           /* its cold tier did not answer: no promotions till then */
    char id[TD_MSG_ID_CHARS_MAX + 1]; /* "" = slot free */
    uint64_t incarnation;
    uint64_t mount; /* names this mounting, which begins with nothing known */
} kvs_segment_info_t;

/* Blocks that one segment was told to fetch from one writer, or from another segment. */
typedef struct order {
    uint64_t id; /* 0 = slot free; id % KVS_ORDERS_MAX is the slot */
    uint64_t deadline_ns;
    uint64_t writer_request;
    uint64_t writer_incarnation; /* of whom the segment fetches from */
    char writer_id[TD_MSG_ID_CHARS_MAX + 1];
    bool is_copy;      /* of a hot key: nobody waits for the result */
    bool is_promotion; /* from the segment's cold tier; lookups may wait */
    uint32_t segment;
    kvs_list_t storing; /* its keys without a result */
} kvs_order_t;

/** A lookup that waits for blocks of a cold tier. */
typedef struct held {
    uint64_t request; /* of the asker */
    uint64_t deadline_ns;
    char to[TD_MSG_ID_CHARS_MAX + 1];
    uint32_t count;
    uint32_t seen;        /* leading keys that were readable when last looked at */
    td_block_key_t *keys; /* owned, [count]; NULL = slot free */
} held_t;

struct kvs_master {
    td_bus_t *bus;           /* borrowed */
    const td_coord_t *coord; /* borrowed */
    uint64_t term;           /* 0: of a standby, or a leader that was */
    uint64_t incarnation;    /* that the segments were mounted with */
    uint64_t next_order;
    uint64_t served_ns;  /* when reading was last forgotten by half */
    uint32_t copies;     /* under way */
    uint32_t promotions; /* orders under way */
    uint32_t held_count;
    kvs_cold_t *cold;       /* owned */
    kvs_removed_t *removed; /* owned */
    kvs_memo_t *memo;       /* owned */
    held_t held[KVS_HELD_MAX];
    kvs_index_t *index;                            /* owned */
    td_kv_events_t *events;                        /* owned: of the index */
    td_kv_feed_t *feed;                            /* owned: tells routers, while we lead */
    kvs_segment_info_t segments[KVS_SEGMENTS_MAX]; /* by their number in the index */
    kvs_order_t orders[KVS_ORDERS_MAX];
    uint32_t free_orders[KVS_ORDERS_MAX]; /* stack */
    uint32_t free_order_count;
    td_metric_t *keys;
    td_metric_t *replicas;
    td_metric_t *hits;
    td_metric_t *misses;
    td_metric_t *stored;
    td_metric_t *revoked;
    td_metric_t *evicted;
    td_metric_t *copied;
    td_metric_t *cooled;
    td_metric_t *cold_keys;
    td_metric_t *promoted;
    td_metric_t *held_over;
    td_metric_t *held_time_out;
    td_metric_t *adopted;
    td_metric_t *telling;
    td_metric_t *memo_answers;
    td_metric_t *memo_bytes;
    td_metric_t *memo_found;
    td_metric_t *memo_missed;
};

/** May this process give orders now? Whatever it was a moment ago: it may have slept. */
static inline bool kvs_master_leads(const kvs_master_t *m)
{
    return td_coord_leads(m->coord, m->term);
}

/** Shows how much is known. */
void kvs_master_count_keys(kvs_master_t *m);

/* --- orders (kvs_master.c)
 * ------------------------------------------------------------------------ */

/** NULL: too many are under way. */
kvs_order_t *kvs_order_new(kvs_master_t *m, uint32_t segment, const char *writer_id,
                           uint64_t writer_incarnation);
/** Takes back what an order has not finished: the segment drops what it may have stored since, and
 * the writer's pins end. segment_knows_nothing: it is gone, never got the order, or gives it up
 * when it is mounted again. */
void kvs_order_revoke(kvs_master_t *m, kvs_order_t *order, bool segment_knows_nothing);
/** Evicts up to `want` replicas of a segment, for space. */
void kvs_master_evict(kvs_master_t *m, uint32_t segment, uint32_t want);
/** Evicts what so many blocks lack there, and a share of it where it is nearly full. */
void kvs_master_make_room(kvs_master_t *m, uint32_t segment, uint32_t blocks);
/** Orders keys away that a segment has just told of: the index has no room for them, or they were
 * removed while it was away. */
void kvs_master_evict_told(kvs_master_t *m, uint32_t segment, td_msg_evict_t how,
                           const td_block_key_t *keys, uint32_t count);
/** Has one segment more fetch those of the keys that are read so often that it helps. */
void kvs_master_copy_hot(kvs_master_t *m, const td_msg_lookup_result_t *found,
                         const td_block_key_t *keys, const uint32_t *segments);

/* --- lookups and cold keys (kvs_master_lookup.c)
 * -------------------------------------------------- */

void kvs_master_handle_lookup(kvs_master_t *m, const td_msg_t *msg);
void kvs_master_handle_manifest(kvs_master_t *m, const td_msg_t *msg);
/** Answers the lookups that wait for nothing any more. Call when an order has ended. */
void kvs_master_look_at_held(kvs_master_t *m, uint64_t now_ns);
void kvs_master_forget_held(kvs_master_t *m);

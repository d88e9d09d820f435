/* td_kv_events.h - which blocks came to an index and which went, as numbered events; the last ones
 * are kept in a ring, so that whoever missed some gets them again. Who tells others is
 * common/node/td_kv_feed. Design: section 2, I7; common/kv/DESIGN.md, "Events".
 * Threads: owner. No call after create allocates. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "common/base/td_status.h"
#include "common/kv/td_block_key.h"

#define TD_KV_EVENTS_RING (1u << 16) /* events kept, 1.1 MB */

typedef enum td_kv_event { TD_KV_STORED = 0, TD_KV_REMOVED, TD_KV_CLEARED } td_kv_event_t;

typedef struct td_kv_events {
    td_block_key_t *keys; /* owned, [mask + 1] */
    uint8_t *kinds;       /* owned, [mask + 1]: td_kv_event_t */
    uint32_t mask;
    uint64_t next;   /* number of the event to come, from 1 */
    uint32_t blocks; /* that are there now */
    uint64_t digest; /* of their keys: td_block_key_word() by exclusive or */
} td_kv_events_t;

/** Looks on from *cursor, which begins at 0, and gives up to max keys that are there; UINT32_MAX:
 * there are no more. A call has a bound of its own, so it may give none and yet not be the last.
 * What comes or goes meanwhile is given or not; events tell of it. */
typedef uint32_t (*td_kv_walk_t)(const void *ctx, uint32_t *cursor, uint32_t max,
                                 td_block_key_t *out);

/** Units: ring, events kept, a power of two. Errors: TD_ERR_NO_MEMORY. Owner: the caller. */
TD_MUST_CHECK td_status_t td_kv_events_create(uint32_t ring, td_kv_events_t **out);
void td_kv_events_destroy(td_kv_events_t *events); /* NULL is allowed */
/** A key can be found that could not; events NULL: nobody wants to know. O(1). */
void td_kv_events_stored(td_kv_events_t *events, const td_block_key_t *key);
/** A key that could be found no longer can. */
void td_kv_events_removed(td_kv_events_t *events, const td_block_key_t *key);
/** All went at once. */
void td_kv_events_cleared(td_kv_events_t *events);
/** Number of the oldest event that is kept; as many as `next` when none is. */
uint64_t td_kv_events_oldest(const td_kv_events_t *events);
/** Events from a kept number on, or none at `next`, up to max and up to one that cleared all: that
 * is given alone, and *cleared_out is true.
 * Shape: keys_out [max]; runs_out [max + 1], *run_count_out of them: keys that came, that went,
 * that came... Answers how many events. */
uint32_t td_kv_events_read(const td_kv_events_t *events, uint64_t from, uint32_t max,
                           td_block_key_t *keys_out, uint32_t *runs_out, uint32_t *run_count_out,
                           bool *cleared_out);

/* rtr_index.h - which node, and the store, holds which blocks: block key to a set of slots, kept
 * exact by the events that nodes send (KvEvents), with what was placed and is not computed yet
 * beside it. Hints only (I7): a wrong one costs time, never a result. Bounded; the least recently
 * used entry goes first. Design: section 2, I7; router/DESIGN.md, "The index of blocks". Threads:
 * loop. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/td_status.h"
#include "common/kv/td_block_key.h"
#include "common/wire/td_msg.h"

#define RTR_INDEX_BLOCKS_MAX (1u << 24)
#define RTR_INDEX_BLOCKS_DEFAULT (1u << 20) /* of a router */
#define RTR_INDEX_SLOTS_MAX 12288u
#define RTR_INDEX_EXPECT_MS                                                                        \
    30000u /* what was placed and no event confirms is over after once to                          \
            * twice this */
#define RTR_INDEX_SILENT_MS                                                                        \
    5000u                     /* without a word of events: whoever sends any does so each second */
#define RTR_INDEX_ASK_MS 500u /* between two requests for events that are missing */
#define RTR_INDEX_RESYNC_MS 5000u   /* between two snapshots that nothing but doubt asks for */
#define RTR_INDEX_SNAPSHOT_MS 2000u /* without progress: it is asked for again */

typedef enum rtr_index_state {
    RTR_INDEX_FALLBACK = 0, /* no events come: what was placed there is all that is known */
    RTR_INDEX_DEGRADED,     /* some are missing, or there was no room: what is known is a hint */
    RTR_INDEX_EXACT,        /* as its node says, but for what is on its way */
    RTR_INDEX_STATES
} rtr_index_state_t;
const char *rtr_index_state_name(rtr_index_state_t state); /* "fallback", "degraded", "exact" */

/** Since the index began; events in blocks. */
typedef struct rtr_index_counts {
    uint64_t events;
    uint64_t gaps;       /* events found missing */
    uint64_t replays;    /* asked for */
    uint64_t snapshots;  /* asked for */
    uint64_t mismatches; /* what we had was not what the node has: a snapshot follows */
    uint64_t dropped;    /* blocks that were forgotten for want of room */
} rtr_index_counts_t;

typedef struct rtr_index_slot {
    rtr_index_state_t state;
    uint32_t blocks; /* confirmed by events */
    uint64_t digest; /* of their keys, as KvEvents has it */
    uint64_t gaps;   /* of this life of the node */
} rtr_index_slot_t;

typedef struct rtr_index rtr_index_t;

/** Units: entries_max, blocks, 1..RTR_INDEX_BLOCKS_MAX; slots_max, 1..RTR_INDEX_SLOTS_MAX. Errors:
 * TD_ERR_NO_MEMORY. All memory is taken here: rtr_index_bytes(). */
TD_MUST_CHECK td_status_t rtr_index_create(uint32_t entries_max, uint32_t slots_max,
                                           rtr_index_t **out);
void rtr_index_destroy(rtr_index_t *index); /* NULL is allowed */

/** Leading blocks that each slot probably holds. Answers the longest. Shape: blocks_out
 * [slots_max]. Cost: O(count), whatever the number of nodes, and once O(slots_max). */
uint32_t rtr_index_match(rtr_index_t *index, const td_block_key_t *keys, uint32_t count,
                         uint32_t *blocks_out);
/** These blocks (a chain: the first is the prompt's first) will be computed there. Ends by itself
 * (RTR_INDEX_EXPECT_MS), unless the slot is in fallback; an event that says otherwise ends it too.
 */
void rtr_index_expect(rtr_index_t *index, const td_block_key_t *keys, uint32_t count,
                      uint32_t slot);
/** Blocks that are there; chains as above. What rtr_index_apply() does by events. */
void rtr_index_stored(rtr_index_t *index, const td_block_key_t *keys, uint32_t count,
                      uint32_t slot);
void rtr_index_removed(rtr_index_t *index, const td_block_key_t *key, uint32_t slot);
/** Forgets all of a slot and its stream: its node has ended, or began a new life. O(1); what it
 * held is taken out of the entries later (rtr_index_tick()), and never found again. */
void rtr_index_purge(rtr_index_t *index, uint32_t slot);

/** The same, of a slot that has told anything: it is no longer listened to. */
void rtr_index_purge_heard(rtr_index_t *index, uint32_t slot);

/** Takes a message of the life that the slot stands for (others the caller refuses: late events of
 * a dead incarnation). True: the node is to be asked for events from *from_out on, 0: for a
 * snapshot. */
bool rtr_index_apply(rtr_index_t *index, uint32_t slot, const td_msg_kv_events_t *events,
                     uint64_t now_ns, uint64_t *from_out);
/** Call now and then: is the node to be asked, since what was asked for has not come? */
bool rtr_index_due(rtr_index_t *index, uint32_t slot, uint64_t now_ns, uint64_t *from_out);
/** Ends expectations, takes out what was purged: a bounded part of it. */
void rtr_index_tick(rtr_index_t *index, uint64_t now_ns);

void rtr_index_look(const rtr_index_t *index, uint32_t slot, uint64_t now_ns,
                    rtr_index_slot_t *out);
const rtr_index_counts_t *rtr_index_counts(const rtr_index_t *index);
/** Entries: blocks that somebody holds, or is expected to. */
uint32_t rtr_index_blocks(const rtr_index_t *index);
size_t rtr_index_bytes(const rtr_index_t *index);

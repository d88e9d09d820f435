/* rtr_hints.h - which node probably holds which prefix: block key to a set of node slots.
 * Hints only (I7): a wrong one costs time, never a result. Bounded; the least recently used entry
 * goes first. A node's bits are purged when its life ends.
 * Threads: loop. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "common/base/td_status.h"
#include "common/kv/td_block_key.h"

#define RTR_SLOTS_MAX 256u /* nodes a router knows, dead ones among them */
#define RTR_HINTS_MAX_DEFAULT 65536u
#define RTR_HINT_SLOTS_MAX 16384u

typedef struct rtr_slot_set {
    uint64_t bits[RTR_SLOTS_MAX / 64];
} rtr_slot_set_t;

static inline void rtr_slot_add(rtr_slot_set_t *set, uint32_t slot)
{
    set->bits[slot / 64] |= 1ull << (slot % 64);
}
static inline void rtr_slot_remove(rtr_slot_set_t *set, uint32_t slot)
{
    set->bits[slot / 64] &= ~(1ull << (slot % 64));
}
static inline bool rtr_slot_has(const rtr_slot_set_t *set, uint32_t slot)
{
    return (set->bits[slot / 64] >> (slot % 64) & 1) != 0;
}

typedef struct rtr_hints rtr_hints_t;

/** Units: entries_max, 1..2^24; slots_max, 1..RTR_HINT_SLOTS_MAX. Errors: TD_ERR_NO_MEMORY. All
 * memory is taken here. */
TD_MUST_CHECK td_status_t rtr_hints_create(uint32_t entries_max, uint32_t slots_max,
                                           rtr_hints_t **out);
void rtr_hints_destroy(rtr_hints_t *hints);
/** Notes that a node holds these blocks (a chain: the first is the prompt's first). */
void rtr_hints_add(rtr_hints_t *hints, const td_block_key_t *keys, uint32_t count, uint32_t slot);
/** A node holds this block no longer. */
void rtr_hints_remove(rtr_hints_t *hints, const td_block_key_t *key, uint32_t slot);
/** Leading blocks that each slot probably holds. Answers the longest. Shape: blocks_out
 * [slots_max]. Cost: O(count * slots_max / 64 + slots_max), however many hold how much. */
uint32_t rtr_hints_match(rtr_hints_t *hints, const td_block_key_t *keys, uint32_t count,
                         uint32_t *blocks_out);
/** Forgets all of a slot: its node has ended, or began a new life. Cost: O(entries). */
void rtr_hints_purge(rtr_hints_t *hints, uint32_t slot);
uint32_t rtr_hints_count(const rtr_hints_t *hints);

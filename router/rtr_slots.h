/* rtr_slots.h - the nodes of a router by number, and sets of them. Threads: owner. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#define RTR_SLOTS_MAX 2048u /* nodes a router knows, dead ones among them */

typedef struct rtr_slot_set {
    uint64_t bits[(RTR_SLOTS_MAX + 63) / 64];
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

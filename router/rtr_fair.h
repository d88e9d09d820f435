/* rtr_fair.h - who of those that wait is next: start-time fair queueing among flows.
 * Each flow has a start tag: what it was served, by its weight. The flow with the lowest tag is
 * next; one that comes, or comes back, begins at the lowest tag of those that wait, so it neither
 * saves up time that it did not use nor pays for it. Within a flow, and before the tags between
 * flows, lower priorities come first, then the older item. Whatever two flows that both have items
 * waiting got, by their weights, differs by no more than one item of each.
 * Items lie in what they are of; nothing is allocated after rtr_fair_create(). No clock, no I/O.
 * Threads: owner. Design: router/DESIGN.md, "The queue".
 * Source: Goyal, Vin, Cheng, "Start-time fair queueing", SIGCOMM 1996; but work is placed out of
 * order where what is next has no room, so virtual time is the lowest tag that waits. */
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <sys/queue.h>

#include "common/base/td_status.h"

#define RTR_FAIR_FLOWS_MAX 1025u
#define RTR_FAIR_WEIGHT_MAX 1000u
#define RTR_FAIR_COST_MAX (1ull << 40) /* of an item; more counts as that */
#define RTR_FAIR_FIRST_MAX 16u

/** One that waits. The caller sets owner, flow, priority and cost before it joins. */
typedef struct rtr_fair_item {
    void *owner; /* the caller's */
    uint32_t flow;
    int32_t priority; /* lower is first */
    uint64_t cost;    /* any unit, the same for all */
    bool waits;       /* the queue's, as is the rest */
    uint64_t number;  /* in order of arrival */
    TAILQ_ENTRY(rtr_fair_item) link;
} rtr_fair_item_t;

typedef struct rtr_fair rtr_fair_t;

/** Shape: weights [count], each 1..RTR_FAIR_WEIGHT_MAX: of flows 0, 1, ...
 * Errors: TD_ERR_INVALID (count or a weight out of range), TD_ERR_NO_MEMORY. */
TD_MUST_CHECK td_status_t rtr_fair_create(const uint32_t *weights, uint32_t count,
                                          rtr_fair_t **out);
/** Items that still wait are forgotten. NULL is allowed. */
void rtr_fair_destroy(rtr_fair_t *fair);
/** Joins. Cost: O(1) behind items of the same flow and of no higher priority number; else the
 * number of those that have one. Owner: the item is borrowed until it leaves or is served. */
void rtr_fair_join(rtr_fair_t *fair, rtr_fair_item_t *item);
/** Leaves. Its flow pays nothing; what was served is charged first. Cost: O(1). */
void rtr_fair_leave(rtr_fair_t *fair, rtr_fair_item_t *item);
/** The flow has got that much: for an item that waits, before it leaves, or without waiting.
 * Cost: O(flows that wait). */
void rtr_fair_charge(rtr_fair_t *fair, uint32_t flow, uint64_t cost);
/** Lists the items that are next, if each is served in turn; answers how many, `most` at most.
 * Units:  most, 1..RTR_FAIR_FIRST_MAX.
 * Cost:   O(most x flows that wait). */
uint32_t rtr_fair_first(const rtr_fair_t *fair, uint32_t most, rtr_fair_item_t **out);
/** Of a queue of `room` items that is full: the one that gives way to another item of `flow`, the
 * last of the flow that has the most by its weight. NULL: flow has its share already, or would then
 * have as much as that one. */
rtr_fair_item_t *rtr_fair_victim(const rtr_fair_t *fair, uint32_t flow, uint32_t room);
uint32_t rtr_fair_count(const rtr_fair_t *fair);
uint32_t rtr_fair_flow_count(const rtr_fair_t *fair, uint32_t flow);

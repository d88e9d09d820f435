/* sim_events.h - what will happen in a simulated cluster, the earliest first; of one instant in the
 * order in which it was planned. Threads: owner. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "common/base/td_status.h"

typedef struct sim_event {
    uint64_t at_ns;
    uint64_t order; /* set by sim_events_add() */
    uint32_t kind;  /* the user's */
    uint32_t id;
    uint32_t version; /* of what it was planned for: another one now means that it is off */
} sim_event_t;

/** Zero-initialise. */
typedef struct sim_events {
    sim_event_t *heap; /* owned [cap] */
    uint32_t count;
    uint32_t cap;
    uint64_t planned;
} sim_events_t;

/** Errors: TD_ERR_NO_MEMORY. */
TD_MUST_CHECK td_status_t sim_events_add(sim_events_t *events, sim_event_t event);
/** False when there is none. */
bool sim_events_next(const sim_events_t *events, uint64_t *at_ns_out);
/** There must be one. */
sim_event_t sim_events_take(sim_events_t *events);
void sim_events_fini(sim_events_t *events);

/* rtr_events.h - what happened lately, for operators: the newest are kept, numbered from 1 in this
 * life of the router. Never prompts or tokens. Threads: loop. */
#pragma once

#include <stdint.h>

#include "common/base/td_status.h"
#include "common/wire/td_msg.h"

#define RTR_EVENTS_MAX 1024u /* kept */
#define RTR_EVENT_TEXT_MAX 127u
#define RTR_EVENT_REQUEST_MAX 64u

typedef enum rtr_event_kind {
    RTR_EVENT_NODE_UP,
    RTR_EVENT_NODE_DOWN,
    RTR_EVENT_NODE_DRAINS, /* of its own will */
    RTR_EVENT_DRAINED,     /* by an operator */
    RTR_EVENT_UNDRAINED,
    RTR_EVENT_FAILOVER,
    RTR_EVENT_REQUEST_FAILED,
    RTR_EVENT_BREAKER, /* opened, or forgiven */
    RTR_EVENT_POLICY,  /* of placement, set by an operator */
    RTR_EVENT_KINDS
} rtr_event_kind_t;

typedef struct rtr_event {
    uint64_t number;
    uint64_t time_ms; /* since 1970 */
    rtr_event_kind_t kind;
    char node[TD_MSG_ID_CHARS_MAX + 1];
    char request[RTR_EVENT_REQUEST_MAX + 1];
    char text[RTR_EVENT_TEXT_MAX + 1];
} rtr_event_t;

typedef struct rtr_events rtr_events_t;

TD_MUST_CHECK td_status_t rtr_events_create(rtr_events_t **out);
void rtr_events_destroy(rtr_events_t *events); /* NULL is allowed */
/** node, request and text: copied, cut where too long; "" where there is none. NULL events: not
 * kept. */
void rtr_events_add(rtr_events_t *events, rtr_event_kind_t kind, const char *node,
                    const char *request, const char *text);
/** Number of the newest; 0: there was none. */
uint64_t rtr_events_newest(const rtr_events_t *events);
/** Number of the oldest that is kept; 1 before the first. */
uint64_t rtr_events_oldest(const rtr_events_t *events);
/** One that is kept. */
const rtr_event_t *rtr_events_get(const rtr_events_t *events, uint64_t number);
const char *rtr_event_kind_name(rtr_event_kind_t kind);

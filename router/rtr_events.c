#include "router/rtr_events.h"

#include <stdio.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"

struct rtr_events {
    uint64_t newest;
    rtr_event_t ring[RTR_EVENTS_MAX]; /* number n is at n modulo the size */
};

td_status_t rtr_events_create(rtr_events_t **out)
{
    *out = td_calloc(1, sizeof(**out));
    return *out == NULL ? TD_ERR_NO_MEMORY : TD_OK;
}

void rtr_events_destroy(rtr_events_t *events)
{
    td_free(events);
}

void rtr_events_add(rtr_events_t *events, rtr_event_kind_t kind, const char *node,
                    const char *request, const char *text)
{
    rtr_event_t *e = NULL;

    if (events == NULL) {
        return;
    }
    e = &events->ring[++events->newest % RTR_EVENTS_MAX];
    *e = (rtr_event_t){.number = events->newest, .time_ms = td_wall_ms(), .kind = kind};
    (void)snprintf(e->node, sizeof(e->node), "%s", node);
    (void)snprintf(e->request, sizeof(e->request), "%s", request);
    (void)snprintf(e->text, sizeof(e->text), "%s", text);
}

uint64_t rtr_events_newest(const rtr_events_t *events)
{
    return events->newest;
}

uint64_t rtr_events_oldest(const rtr_events_t *events)
{
    return events->newest < RTR_EVENTS_MAX ? 1 : events->newest - RTR_EVENTS_MAX + 1;
}

const rtr_event_t *rtr_events_get(const rtr_events_t *events, uint64_t number)
{
    TD_ASSERT(number >= rtr_events_oldest(events) && number <= events->newest);
    return &events->ring[number % RTR_EVENTS_MAX];
}

const char *rtr_event_kind_name(rtr_event_kind_t kind)
{
    static const char *const names[RTR_EVENT_KINDS] = {"node_up",        "node_down", "node_drains",
                                                       "drained",        "undrained", "failover",
                                                       "request_failed", "breaker",   "policy"};
    return names[kind];
}

#include "router/rtr_trace.h"

#include <stdio.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"

struct rtr_trace {
    uint64_t newest;
    rtr_trace_decision_t ring[RTR_TRACE_MAX]; /* number n is at n modulo the size */
};

td_status_t rtr_trace_create(rtr_trace_t **out)
{
    *out = td_calloc(1, sizeof(**out));
    return *out == NULL ? TD_ERR_NO_MEMORY : TD_OK;
}

void rtr_trace_destroy(rtr_trace_t *trace)
{
    td_free(trace);
}

rtr_trace_decision_t *rtr_trace_open(rtr_trace_t *trace)
{
    rtr_trace_decision_t *d = &trace->ring[++trace->newest % RTR_TRACE_MAX];

    *d = (rtr_trace_decision_t){.number = trace->newest, .time_ms = td_wall_ms()};
    return d;
}

void rtr_trace_end(rtr_trace_t *trace, uint64_t number, const char *end, uint32_t tokens)
{
    rtr_trace_decision_t *d = &trace->ring[number % RTR_TRACE_MAX];
    const uint64_t now_ms = td_wall_ms();

    if (number == 0 || d->number != number || d->end[0] != '\0') {
        return;
    }
    (void)snprintf(d->end, sizeof(d->end), "%s", end);
    d->took_ms = now_ms - TD_MIN(d->time_ms, now_ms); /* clocks are set, too */
    d->tokens = tokens;
}

uint64_t rtr_trace_newest(const rtr_trace_t *trace)
{
    return trace->newest;
}

const rtr_trace_decision_t *rtr_trace_get(const rtr_trace_t *trace, uint64_t number)
{
    const rtr_trace_decision_t *d = &trace->ring[number % RTR_TRACE_MAX];
    return number > 0 && d->number == number ? d : NULL;
}

#include "router/sim_events.h"

#include "common/base/td_base.h"

static bool is_before(const sim_event_t *a, const sim_event_t *b)
{
    return a->at_ns != b->at_ns ? a->at_ns < b->at_ns : a->order < b->order;
}

static void swap(sim_event_t *a, sim_event_t *b)
{
    const sim_event_t kept = *a;
    *a = *b;
    *b = kept;
}

td_status_t sim_events_add(sim_events_t *e, sim_event_t event)
{
    uint32_t at = e->count;

    if (e->count == e->cap) {
        const uint32_t cap = e->cap * 2 + 256;
        sim_event_t *grown = td_realloc(e->heap, cap * sizeof(*grown));
        if (grown == NULL) {
            return TD_ERR_NO_MEMORY;
        }
        e->heap = grown;
        e->cap = cap;
    }
    event.order = e->planned++;
    e->heap[e->count++] = event;
    while (at > 0 && is_before(&e->heap[at], &e->heap[(at - 1) / 2])) {
        swap(&e->heap[at], &e->heap[(at - 1) / 2]);
        at = (at - 1) / 2;
    }
    return TD_OK;
}

bool sim_events_next(const sim_events_t *e, uint64_t *at_ns_out)
{
    if (e->count == 0) {
        return false;
    }
    *at_ns_out = e->heap[0].at_ns;
    return true;
}

sim_event_t sim_events_take(sim_events_t *e)
{
    const sim_event_t first = e->heap[0];
    uint32_t at = 0;

    TD_ASSERT(e->count > 0);
    e->heap[0] = e->heap[--e->count];
    for (;;) {
        uint32_t least = at;
        for (uint32_t child = 2 * at + 1; child <= 2 * at + 2 && child < e->count; child++) {
            least = is_before(&e->heap[child], &e->heap[least]) ? child : least;
        }
        if (least == at) {
            return first;
        }
        swap(&e->heap[at], &e->heap[least]);
        at = least;
    }
}

void sim_events_fini(sim_events_t *e)
{
    td_free(e->heap);
    *e = (sim_events_t){0};
}

#include "router/rtr_fair.h"

#include "common/base/td_base.h"

/* Tags count cost / weight in steps of 1 / 1024; what a division leaves is carried on, so nothing
 * is lost however long it goes. 2^54 of cost last for centuries. */
#define TAG_SHIFT 10u

TAILQ_HEAD(item_list, rtr_fair_item);

typedef struct tag {
    uint64_t start;
    uint64_t rest; /* below the weight */
} tag_t;

typedef struct flow {
    uint32_t weight;
    uint32_t count;
    tag_t tag; /* of its next item; once nothing waits, where its last one ended */
    struct item_list items;
    TAILQ_ENTRY(flow) link; /* while items wait */
} flow_t;

TAILQ_HEAD(flow_list, flow);

struct rtr_fair {
    flow_t *flows; /* owned [flow_count] */
    uint32_t flow_count;
    uint32_t count;
    uint64_t now;    /* virtual: never goes back */
    uint64_t number; /* of the last item that joined */
    struct flow_list waiting;
    uint64_t waiting_weight;
};

td_status_t rtr_fair_create(const uint32_t *weights, uint32_t count, rtr_fair_t **out)
{
    rtr_fair_t *f = NULL;

    if (count == 0 || count > RTR_FAIR_FLOWS_MAX) {
        return TD_ERR_INVALID;
    }
    for (uint32_t i = 0; i < count; i++) {
        if (weights[i] == 0 || weights[i] > RTR_FAIR_WEIGHT_MAX) {
            return TD_ERR_INVALID;
        }
    }
    f = td_calloc(1, sizeof(*f));
    if (f == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    f->flows = td_calloc(count, sizeof(*f->flows));
    if (f->flows == NULL) {
        td_free(f);
        return TD_ERR_NO_MEMORY;
    }
    for (uint32_t i = 0; i < count; i++) {
        f->flows[i].weight = weights[i];
        TAILQ_INIT(&f->flows[i].items);
    }
    f->flow_count = count;
    TAILQ_INIT(&f->waiting);
    *out = f;
    return TD_OK;
}

void rtr_fair_destroy(rtr_fair_t *f)
{
    if (f == NULL) {
        return;
    }
    td_free(f->flows);
    td_free(f);
}

static void tag_advance(tag_t *tag, uint64_t cost, uint32_t weight)
{
    const uint64_t all = (TD_MIN(cost, RTR_FAIR_COST_MAX) << TAG_SHIFT) + tag->rest;

    tag->start += all / weight;
    tag->rest = all % weight;
}

/* One that has nothing waiting begins now, not where it left off. */
static void flow_catch_up(const rtr_fair_t *f, flow_t *flow)
{
    if (flow->count == 0 && flow->tag.start < f->now) {
        flow->tag = (tag_t){.start = f->now};
    }
}

/* Time goes on to the lowest tag that waits, or that is served just now. */
static void clock_advance(rtr_fair_t *f, uint64_t served)
{
    const flow_t *flow = NULL;
    uint64_t lowest = served;

    TAILQ_FOREACH(flow, &f->waiting, link)
    {
        lowest = TD_MIN(lowest, flow->tag.start);
    }
    f->now = TD_MAX(f->now, lowest);
}

void rtr_fair_join(rtr_fair_t *f, rtr_fair_item_t *item)
{
    flow_t *flow = &f->flows[item->flow];
    rtr_fair_item_t *before = TAILQ_LAST(&flow->items, item_list);

    TD_ASSERT(item->flow < f->flow_count && !item->waits);
    flow_catch_up(f, flow);
    item->number = ++f->number;
    while (before != NULL && before->priority > item->priority) {
        before = TAILQ_PREV(before, item_list, link);
    }
    if (before != NULL) {
        TAILQ_INSERT_AFTER(&flow->items, before, item, link);
    } else {
        TAILQ_INSERT_HEAD(&flow->items, item, link);
    }
    item->waits = true;
    f->count++;
    if (flow->count++ == 0) {
        TAILQ_INSERT_TAIL(&f->waiting, flow, link);
        f->waiting_weight += flow->weight;
    }
}

void rtr_fair_leave(rtr_fair_t *f, rtr_fair_item_t *item)
{
    flow_t *flow = &f->flows[item->flow];

    TD_ASSERT(item->waits);
    TAILQ_REMOVE(&flow->items, item, link);
    item->waits = false;
    f->count--;
    if (--flow->count == 0) {
        TAILQ_REMOVE(&f->waiting, flow, link);
        f->waiting_weight -= flow->weight;
    }
}

void rtr_fair_charge(rtr_fair_t *f, uint32_t index, uint64_t cost)
{
    flow_t *flow = &f->flows[index];

    TD_ASSERT(index < f->flow_count);
    flow_catch_up(f, flow);
    clock_advance(f, flow->tag.start);
    tag_advance(&flow->tag, cost, flow->weight);
}

/* --- who is next ------------------------------------------------------------------------------ */

/* A flow of which some items are taken as served. */
typedef struct ahead {
    const flow_t *flow;
    rtr_fair_item_t *next; /* NULL: none is left */
    tag_t tag;
} ahead_t;

typedef struct walk {
    ahead_t ahead[RTR_FAIR_FIRST_MAX];
    uint32_t count;
} walk_t;

static ahead_t look(const walk_t *w, const flow_t *flow)
{
    for (uint32_t i = 0; i < w->count; i++) {
        if (w->ahead[i].flow == flow) {
            return w->ahead[i];
        }
    }
    return (ahead_t){.flow = flow, .next = TAILQ_FIRST(&flow->items), .tag = flow->tag};
}

static bool comes_before(const ahead_t *a, const ahead_t *b)
{
    if (a->next->priority != b->next->priority) {
        return a->next->priority < b->next->priority;
    }
    if (a->tag.start != b->tag.start) {
        return a->tag.start < b->tag.start;
    }
    return a->next->number < b->next->number;
}

static void step(walk_t *w, const ahead_t *taken)
{
    uint32_t i = 0;

    while (i < w->count && w->ahead[i].flow != taken->flow) {
        i++;
    }
    w->ahead[i] = *taken;
    w->count = TD_MAX(w->count, i + 1);
    tag_advance(&w->ahead[i].tag, taken->next->cost, taken->flow->weight);
    w->ahead[i].next = TAILQ_NEXT(taken->next, link);
}

uint32_t rtr_fair_first(const rtr_fair_t *f, uint32_t most, rtr_fair_item_t **out)
{
    walk_t w = {.count = 0};
    uint32_t count = 0;

    TD_ASSERT(most >= 1 && most <= RTR_FAIR_FIRST_MAX);
    for (; count < most; count++) {
        const flow_t *flow = NULL;
        ahead_t best = {.next = NULL};
        TAILQ_FOREACH(flow, &f->waiting, link)
        {
            const ahead_t at = look(&w, flow);
            if (at.next != NULL && (best.next == NULL || comes_before(&at, &best))) {
                best = at;
            }
        }
        if (best.next == NULL) {
            break;
        }
        out[count] = best.next;
        step(&w, &best);
    }
    return count;
}

rtr_fair_item_t *rtr_fair_victim(const rtr_fair_t *f, uint32_t index, uint32_t room)
{
    const flow_t *own = &f->flows[index];
    const flow_t *most = NULL;
    const flow_t *flow = NULL;
    const uint64_t weights = f->waiting_weight + (own->count == 0 ? own->weight : 0);

    TD_ASSERT(index < f->flow_count);
    if (own->count * weights >= (uint64_t)room * own->weight) {
        return NULL;
    }
    TAILQ_FOREACH(flow, &f->waiting, link)
    {
        if (most == NULL ||
            (uint64_t)flow->count * most->weight > (uint64_t)most->count * flow->weight) {
            most = flow;
        }
    }
    if (most == NULL || most == own ||
        (uint64_t)(own->count + 1) * most->weight >= (uint64_t)most->count * own->weight) {
        return NULL;
    }
    return TAILQ_LAST(&most->items, item_list);
}

uint32_t rtr_fair_count(const rtr_fair_t *f)
{
    return f->count;
}

uint32_t rtr_fair_flow_count(const rtr_fair_t *f, uint32_t flow)
{
    return f->flows[flow].count;
}

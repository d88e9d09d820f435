#include "router/rtr_index_link.h"

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/base/td_log.h"

#define LOOK_MS 100u /* between two looks at all nodes */

static void ask(const rtr_index_link_t *l, const rtr_node_t *node, uint64_t from)
{
    td_msg_t msg = {.type = TD_MSG_KV_REPLAY, .u.kv_replay = {.from = from}};

    TD_LOG_DEBUG("events of blocks asked for", "node=%s from=%llu", node->id,
                 (unsigned long long)from);
    if (td_bus_send(l->bus, node->id, &msg) != TD_OK) {
        TD_LOG_DEBUG("events of blocks not asked for", "node=%s", node->id);
    }
}

/* Of the stores only the one that is asked speaks for the store. */
static bool tells(const rtr_node_t *node, const rtr_node_t *master)
{
    return node->live && (node->role != TD_ROLE_KVSTORE || node == master);
}

bool rtr_index_link_handle(rtr_index_link_t *l, const td_msg_t *msg)
{
    uint32_t slot = RTR_PLACE_NONE;
    uint64_t from = 0;

    if (msg->type != TD_MSG_KV_EVENTS) {
        return false;
    }
    slot = rtr_registry_find(l->registry, msg->sender_id, msg->sender_incarnation);
    if (slot == RTR_PLACE_NONE ||
        !tells(rtr_registry_node(l->registry, slot), rtr_registry_store_master(l->registry))) {
        td_metric_add(l->metrics->index_stale, 1);
        return true;
    }
    if (rtr_index_apply(l->index, slot, &msg->u.kv_events, td_now_ns(), &from)) {
        ask(l, rtr_registry_node(l->registry, slot), from);
    }
    return true;
}

static void show(const rtr_index_link_t *l, const uint32_t states[RTR_INDEX_STATES])
{
    const rtr_index_counts_t *c = rtr_index_counts(l->index);
    rtr_metrics_t *m = l->metrics;

    for (uint32_t i = 0; i < RTR_INDEX_STATES; i++) {
        td_metric_set(m->index_nodes[i], states[i]);
    }
    td_metric_set(m->index_blocks, rtr_index_blocks(l->index));
    td_metric_set(m->index_bytes, rtr_index_bytes(l->index));
    td_metric_set(m->index_events, c->events);
    td_metric_set(m->index_gaps, c->gaps);
    td_metric_set(m->index_replays, c->replays);
    td_metric_set(m->index_snapshots, c->snapshots);
    td_metric_set(m->index_mismatches, c->mismatches);
    td_metric_set(m->index_dropped, c->dropped);
}

void rtr_index_link_tick(rtr_index_link_t *l)
{
    const uint64_t now = td_now_ns();
    const rtr_node_t *master = NULL;
    uint32_t states[RTR_INDEX_STATES] = {0};

    rtr_index_tick(l->index, now);
    if (now < l->next_look_ns) {
        return;
    }
    l->next_look_ns = now + LOOK_MS * TD_NS_PER_MS;
    master = rtr_registry_store_master(l->registry);
    for (uint32_t i = 0; i < rtr_registry_slots(l->registry); i++) {
        const rtr_node_t *node = rtr_registry_node(l->registry, i);
        rtr_index_slot_t is;
        uint64_t from = 0;
        if (!tells(node, master)) {
            rtr_index_purge_heard(l->index, i); /* a store that was the master */
            continue;
        }
        if (rtr_index_due(l->index, i, now, &from)) {
            ask(l, node, from);
        }
        rtr_index_look(l->index, i, now, &is);
        states[is.state]++;
    }
    show(l, states);
}

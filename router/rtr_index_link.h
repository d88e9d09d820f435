/* rtr_index_link.h - between the index of blocks and the nodes: takes their events, asks for those
 * that are missing, shows how exact it is. Threads: loop. */
#pragma once

#include "router/rtr_index.h"
#include "router/rtr_registry.h"

typedef struct rtr_index_link {
    rtr_index_t *index; /* borrowed, as all */
    rtr_registry_t *registry;
    td_bus_t *bus;
    rtr_metrics_t *metrics;
    uint64_t next_look_ns;
} rtr_index_link_t;

/** True when the message was for the index. */
bool rtr_index_link_handle(rtr_index_link_t *link, const td_msg_t *msg);
void rtr_index_link_tick(rtr_index_link_t *link);

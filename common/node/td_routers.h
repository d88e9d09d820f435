/* td_routers.h - which routers a process belongs to: those that --router names, or, without it,
 * those that have registered in etcd, whoever comes and goes. Design: sections 1 and 9;
 * common/node/DESIGN.md. Threads: loop (the member's). */
#pragma once

#include "common/base/td_config.h"
#include "common/wire/td_member.h"

#define TD_ROUTERS_FOLDER "routers" /* in etcd: name and ZeroMQ endpoint of each */

/** Of a program that belongs to routers; with TD_ETCD_OPTIONS. */
#define TD_ROUTERS_OPTION                                                                          \
    {                                                                                              \
        "router", TD_OPTION_TEXT, NULL,                                                            \
            "ZeroMQ endpoint of the router; several: ID=ENDPOINT by comma; none: those in etcd"    \
    }

typedef struct td_routers td_routers_t;

/** Creates the membership too. *out is NULL where the routers are named.
 * Errors: TD_ERR_INVALID (neither --router nor --etcd, or a bad one: logged), TD_ERR_NO_MEMORY,
 *         TD_ERR_IO. */
TD_MUST_CHECK td_status_t td_routers_open(const td_config_t *config, td_bus_t *bus,
                                          const td_msg_register_t *self,
                                          const td_member_events_t *events,
                                          td_member_t **member_out, td_routers_t **out);
/** Tells the member who there is. NULL is allowed. Call at least every 100 ms. */
void td_routers_tick(td_routers_t *routers, td_member_t *member);
void td_routers_destroy(td_routers_t *routers);

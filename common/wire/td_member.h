/* td_member.h - a node's membership of the cluster: registers with each router, sends heartbeats,
 * learns the other processes, notices when a router is gone or has declared this node dead. Each
 * router is a registry of its own; which there are is said at the start, or found in etcd
 * (common/node/td_routers). Design: sections 1 and 4; DESIGN.md, "Membership".
 * Threads: loop (the bus's). */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "common/base/td_status.h"
#include "common/wire/td_bus.h"
#include "common/wire/td_msg.h"

#define TD_ROUTER_ID "router" /* of a router that is not named */
#define TD_ROUTERS_MAX 8u
#define TD_DEAD_TEXT "declared dead" /* why a life that has ended is refused */
#define TD_HEARTBEAT_MS 500u
#define TD_PEER_DEAD_MS 2000u
#define TD_TICKET_LEASE_MS 5000u

typedef struct td_member td_member_t;

/** What the node does when something changes, NULL: nothing; all on the loop's thread. */
typedef struct td_member_events {
    void *ctx;
    void (*registered)(void *ctx, const td_msg_registered_t *info);
    /* Adds to a heartbeat for that router what the node does for others (td_msg_heartbeat_t). */
    void (*share)(void *ctx, const char *router, td_msg_heartbeat_t *load);
    void (*peer_up)(void *ctx, const td_msg_peer_t *peer);
    void (*peer_down)(void *ctx, const char *id, uint64_t incarnation);
    /* That router is gone for a ticket lease, or has come back as another process: its tickets are
     * void. Or, router NULL, one had declared us dead: every ticket is void. When incarnation
     * differs from before, it is our new name (the bus knows it already). */
    void (*fenced)(void *ctx, const char *router, uint64_t incarnation);
} td_member_events_t;

/** A router that there is. */
typedef struct td_member_router {
    char id[TD_MSG_ID_CHARS_MAX + 1];
    char endpoint[256];
} td_member_router_t;

/** Reads "ENDPOINT" (its id is TD_ROUTER_ID) or "ID=ENDPOINT,ID=ENDPOINT".
 * Shape: out [TD_ROUTERS_MAX]. Errors: TD_ERR_INVALID (logged: what was expected). */
TD_MUST_CHECK td_status_t td_member_routers_parse(const char *text, td_member_router_t *out,
                                                  uint32_t *count_out);

/** routers: as td_member_routers_parse() reads them; NULL: none yet. self is copied: its region may
 * be empty (a store that does not know its block size yet).
 * Errors: TD_ERR_INVALID (endpoint), TD_ERR_NO_MEMORY. */
TD_MUST_CHECK td_status_t td_member_create(td_bus_t *bus, const char *routers,
                                           const td_msg_register_t *self,
                                           const td_member_events_t *events, td_member_t **out);
void td_member_destroy(td_member_t *member);
/** These are the routers now. One that is not among them is left once it is silent: until then it
 * finishes what it has. */
void td_member_set_routers(td_member_t *member, const td_member_router_t *routers, uint32_t count);
/** Changes what is registered (e.g. the region) and registers again. */
TD_MUST_CHECK td_status_t td_member_update(td_member_t *member, const td_msg_register_t *self);
/** Sends what is due. Call at least every 100 ms. */
void td_member_tick(td_member_t *member, const td_msg_heartbeat_t *load);
/** True when the message was for the membership. */
bool td_member_handle(td_member_t *member, const td_msg_t *msg);
bool td_member_is_router(const td_member_t *member, const char *id);
/** Id of the router at a place below TD_ROUTERS_MAX, which it keeps while it is one; "": none.
 * Owner: the member. */
const char *td_member_router_at(const td_member_t *member, uint32_t at);
/** So many routers know us now. */
uint32_t td_member_registered(const td_member_t *member);
/** A peer that is up, or NULL. Owner: the member, until the next handle or tick. */
typedef struct td_member_peer {
    char id[TD_MSG_ID_CHARS_MAX + 1];
    td_role_t role;
    uint64_t incarnation;
    bool store_master;
    uint64_t store_term;
    uint32_t seen_by; /* a bit of each router whose last list had it */
} td_member_peer_t;
const td_member_peer_t *td_member_find(const td_member_t *member, const char *id);
/** The store's master, of several the one with the highest term, or NULL when the cluster has none
 * now. */
const td_member_peer_t *td_member_store_master(const td_member_t *member);

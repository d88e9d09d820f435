/* rtr_gone.h - notices clients that leave while their connection is suspended: MHD does not look at
 * a suspended connection, so its descriptor is watched by an epoll set of our own, too. The very
 * descriptor, no dup: that would hold the socket open. A half-closed connection counts as gone.
 * It also cuts clients off that take too long to say what they want (slowloris): MHD's own timeout
 * begins anew with every byte.
 * Threads: watch and unwatch: the connection's; collect, cut_slow: loop; wake_all: any. Lock order:
 * table, then the request's mutex. */
#pragma once

#include <stdint.h>

#include "router/rtr_request.h"

typedef struct rtr_gone rtr_gone_t;

/** Units: connections_max, watched at one time. Errors: TD_ERR_NO_MEMORY, TD_ERR_IO. */
TD_MUST_CHECK td_status_t rtr_gone_create(uint32_t connections_max, rtr_gone_t **out);
void rtr_gone_destroy(rtr_gone_t *gone);
/** A connection has begun: it is watched until it ends, whatever requests it brings. until_ns: when
 * the headers of its first one must be there.
 * Errors: TD_ERR_BUSY (table full), TD_ERR_IO. */
TD_MUST_CHECK td_status_t rtr_gone_open(rtr_gone_t *gone, int fd, uint64_t until_ns,
                                        uint32_t *slot_out);
/** Its headers have come, and its body has until then, on td_now_ns()'s clock. */
void rtr_gone_expect(rtr_gone_t *gone, uint32_t slot, uint64_t until_ns);
/** Its request is complete: the client waits for us now. */
void rtr_gone_has_asked(rtr_gone_t *gone, uint32_t slot);
/** Cuts off those whose time is up; looks at a part of the table in each call. Answers how many. */
uint32_t rtr_gone_cut_slow(rtr_gone_t *gone, uint64_t now_ns);
/** Before its descriptor is closed. */
void rtr_gone_close(rtr_gone_t *gone, uint32_t slot);
/** The connection's request, until unwatch; it is marked now if its client has left already. */
void rtr_gone_watch(rtr_gone_t *gone, uint32_t slot, rtr_request_t *req);
/** Before the connection gives its request up. */
void rtr_gone_unwatch(rtr_gone_t *gone, uint32_t slot);
/** Readable when somebody has left. */
int rtr_gone_fd(const rtr_gone_t *gone);
/** Marks the requests of those who have left; the number of them. */
uint32_t rtr_gone_collect(rtr_gone_t *gone);
/** Wakes every suspended connection (before MHD is stopped). Units: the number still watched. */
uint32_t rtr_gone_wake_all(rtr_gone_t *gone);
uint32_t rtr_gone_watched(rtr_gone_t *gone);

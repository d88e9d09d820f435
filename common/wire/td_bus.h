/* td_bus.h - messages between processes over ZeroMQ. Design: sections 1 and 9;
 * common/wire/DESIGN.md. Each process binds one ROUTER socket to receive on and connects one DEALER
 * for each peer it sends to, so a slow or dead peer can hold up only its own queue. Nothing here
 * blocks: what cannot be sent at once waits in a bounded outbox for each peer, and past that
 * td_bus_send() answers TD_ERR_BUSY (I6). Off loopback all sockets use CURVE with a key pair
 * derived from the cluster secret: who does not know the secret cannot find the server's public
 * key, so cannot speak to it. Threads: loop (one thread creates and uses it). */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "common/base/td_status.h"
#include "common/wire/td_msg.h"

#define TD_BUS_OUTBOX_MAX 4096u                   /* messages waiting for one peer */
#define TD_BUS_HWM 4096                           /* messages inside ZeroMQ, each direction */
#define TD_BUS_PEERS_MAX (TD_MSG_PEERS_MAX + 64u) /* those of a list, routers, who is refused */
#define TD_BUS_WAIT_FDS_MAX 8

typedef struct td_bus td_bus_t;

/** ZeroMQ's threads and sockets of several buses in one process. */
typedef struct td_bus_io td_bus_io_t;
/** Units: threads, 1 or more; sockets_max: one for each bus and one for each of its peers.
 * Errors: TD_ERR_NO_MEMORY, TD_ERR_INVALID (more than ZeroMQ can have).
 * Owner: the caller ends it with td_bus_io_destroy(), after its buses. */
TD_MUST_CHECK td_status_t td_bus_io_create(uint32_t threads, uint32_t sockets_max,
                                           td_bus_io_t **out);
void td_bus_io_destroy(td_bus_io_t *io);

typedef struct td_bus_config {
    const char *bind;      /* "tcp://127.0.0.1:*" or with a port */
    const char *advertise; /* host that others connect to; NULL = the one of bind */
    const char *id;
    uint64_t incarnation;
    const uint8_t *secret; /* [TD_CLUSTER_SECRET_BYTES] */
    bool curve;            /* also forced by an endpoint off loopback */
    td_bus_io_t *io;       /* borrowed until td_bus_destroy(); NULL: one of its own */
} td_bus_config_t;

/** Errors: TD_ERR_IO (cannot bind: logged), TD_ERR_NO_MEMORY. Owner: the caller. */
TD_MUST_CHECK td_status_t td_bus_create(const td_bus_config_t *config, td_bus_t **out);
void td_bus_destroy(td_bus_t *bus);
/** Destroying the bus waits so long for what was sent to leave; else it drops that. */
void td_bus_linger(td_bus_t *bus, uint32_t ms);
/** What others connect to. Owner: the bus. */
const char *td_bus_endpoint(const td_bus_t *bus);
const char *td_bus_id(const td_bus_t *bus);
uint64_t td_bus_incarnation(const td_bus_t *bus);
/** A new life of this process (after it was declared dead): later messages carry it. */
void td_bus_set_incarnation(td_bus_t *bus, uint64_t incarnation);

/** Connects, or reconnects when endpoint or incarnation differ. incarnation 0: not known yet.
 * Errors: TD_ERR_INVALID (endpoint), TD_ERR_BUSY (too many peers), TD_ERR_NO_MEMORY. */
TD_MUST_CHECK td_status_t td_bus_connect(td_bus_t *bus, const char *id, const char *endpoint,
                                         uint64_t incarnation);
/** Drops the connection and what waits in its outbox; late messages of that incarnation are
 * refused. */
void td_bus_disconnect(td_bus_t *bus, const char *id);
/** 0 when not connected or not known. */
uint64_t td_bus_peer_incarnation(const td_bus_t *bus, const char *id);

/** Sends, or queues, one message; sender, receiver incarnation and sequence are filled in here.
 * Errors: TD_ERR_NOT_FOUND (no such peer), TD_ERR_BUSY (its outbox is full), TD_ERR_TOO_LARGE,
 *         TD_ERR_NO_MEMORY. */
TD_MUST_CHECK td_status_t td_bus_send(td_bus_t *bus, const char *id, td_msg_t *msg);
/** Waits until a message has come, one of the descriptors is readable, or the time is over.
 * Shape: readable_out [fd_count]. Units: timeout_ms, 0 = look only. */
void td_bus_wait(td_bus_t *bus, const int *fds, uint32_t fd_count, uint32_t timeout_ms,
                 bool *readable_out);
/** Becomes readable when messages have come; it stays so until td_bus_recv() has found none. For
 * whoever waits for many buses at once, in place of td_bus_wait(). Owner: the bus. */
int td_bus_fd(const td_bus_t *bus);
/** Tries again to send what waits. td_bus_wait() does it too. */
void td_bus_flush(td_bus_t *bus);
/** Takes the next message. Foreign, stale and malformed ones are counted and skipped, a bounded
 * number in one call. Errors: TD_ERR_NOT_FOUND (none waiting, or none among those looked at).
 * Owner:  as td_msg_decode(). */
TD_MUST_CHECK td_status_t td_bus_recv(td_bus_t *bus, td_msg_t *msg_out, td_msg_arena_t **arena_out);
uint64_t td_bus_refused(const td_bus_t *bus);

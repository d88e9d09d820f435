/* rtr_admin_socket.h - the admin RPC's socket: a ROUTER with CURVE keys that only clients on the
 * list get through. Nothing is known here of what the messages say. A folder holds the keys, each
 * file mode 0600: router.key (its secret; made with the others when it is missing), router.pub,
 * admin.key (a first client's secret), allow (clients' public keys, one a line, read at the start),
 * all in Z85 (ZeroMQ RFC 32); and endpoint, where the socket is bound. Source: ZeroMQ RFC 26
 * (CURVE). Threads: loop. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/td_buf.h"
#include "common/base/td_status.h"

#define RTR_ADMIN_REQUEST_BYTES_MAX (256u << 10)
#define RTR_ADMIN_CLIENTS_MAX 64u /* on the list */
#define RTR_ADMIN_NAME_MAX 255u

/** Names a client's connection, for replies. */
typedef struct rtr_admin_name {
    uint8_t bytes[RTR_ADMIN_NAME_MAX];
    size_t len;
} rtr_admin_name_t;

typedef struct rtr_admin_socket rtr_admin_socket_t;

/** Errors: TD_ERR_INVALID (endpoint, folder, keys: logged with what was expected), TD_ERR_IO,
 * TD_ERR_NO_MEMORY. Owner: the caller ends it with rtr_admin_socket_close(). */
TD_MUST_CHECK td_status_t rtr_admin_socket_open(const char *endpoint, const char *folder,
                                                rtr_admin_socket_t **out);
void rtr_admin_socket_close(rtr_admin_socket_t *socket); /* NULL is allowed */
/** Where it is bound. */
const char *rtr_admin_socket_endpoint(const rtr_admin_socket_t *socket);
/** A descriptor that becomes readable when there may be something; look until there is nothing. */
int rtr_admin_socket_fd(const rtr_admin_socket_t *socket);
/** The next request's bytes replace those of body. Errors: TD_ERR_NOT_FOUND (none),
 * TD_ERR_PROTOCOL (not one part; it was dropped), TD_ERR_NO_MEMORY. */
TD_MUST_CHECK td_status_t rtr_admin_socket_recv(rtr_admin_socket_t *socket, rtr_admin_name_t *from,
                                                td_str_t *body);
/** Errors: TD_ERR_BUSY (the client does not read), TD_ERR_NOT_FOUND (it is gone), TD_ERR_IO. */
TD_MUST_CHECK td_status_t rtr_admin_socket_send(rtr_admin_socket_t *socket,
                                                const rtr_admin_name_t *to, const void *bytes,
                                                size_t len);

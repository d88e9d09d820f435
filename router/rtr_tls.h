/* rtr_tls.h - the certificate of the HTTP API, read from files and read again when they change, so
 * that whoever renews it need not restart the router. A pair that is no good leaves the one that is
 * in use where it is. One for a process: GnuTLS's callback knows no other.
 * Threads: open, close: init; tick: loop; the callback: MHD's. */
#pragma once

#include <stdint.h>

#include "common/base/td_status.h"

#define RTR_TLS_PRIORITIES "SECURE128:-VERS-ALL:+VERS-TLS1.3:+VERS-TLS1.2"

typedef struct rtr_tls rtr_tls_t;

/** cert_file: PEM, the server's certificate first, then those that lead to its root. key_file: PEM,
 * the owner's alone. Borrowed. handshake_ms: the longest time that a handshake may take, in which
 * it may use the key of its begin. Errors: TD_ERR_INVALID (not such, or no pair: logged),
 * TD_ERR_IO, TD_ERR_NO_MEMORY. */
TD_MUST_CHECK td_status_t rtr_tls_open(const char *cert_file, const char *key_file,
                                       uint32_t handshake_ms, rtr_tls_t **out);
/** After the HTTP server has ended. NULL is allowed. */
void rtr_tls_close(rtr_tls_t *tls);
/** Looks whether the files have changed, now and then. NULL is allowed. */
void rtr_tls_tick(rtr_tls_t *tls, uint64_t now_ns);
/** What MHD_OPTION_HTTPS_CERT_CALLBACK takes. */
void *rtr_tls_callback(void);

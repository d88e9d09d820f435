/* td_zap.h - who may connect to the CURVE sockets of a ZeroMQ context: for each handshake ZeroMQ
 * asks (ZAP, RFC 27), and a list of public keys answers. A thread of its own does, so that a
 * handshake never waits for a loop; it sleeps when nobody connects.
 * Threads: create, destroy: init; allow: any. */
#pragma once

#include <stdint.h>

#include "common/base/td_status.h"

#define TD_ZAP_KEYS_MAX 64u
#define TD_ZAP_KEY_BYTES 32u

typedef struct td_zap td_zap_t;

/** One for a context, before its first CURVE socket is bound, and the only one of that context.
 * domain: of the sockets that are asked for (ZMQ_ZAP_DOMAIN), borrowed for ever; others get no.
 * Errors: TD_ERR_IO, TD_ERR_NO_MEMORY. */
TD_MUST_CHECK td_status_t td_zap_create(void *context, const char *domain, td_zap_t **out);
/** Lets holders of the private key in. Errors: TD_ERR_NO_MEMORY (too many keys). */
TD_MUST_CHECK td_status_t td_zap_allow(td_zap_t *zap, const uint8_t key[TD_ZAP_KEY_BYTES]);
/** Shuts the context down (zmq_ctx_shutdown); its sockets are still to be closed, and it is still
 * to be ended (zmq_ctx_term). NULL is allowed: nothing happens. */
void td_zap_destroy(td_zap_t *zap);

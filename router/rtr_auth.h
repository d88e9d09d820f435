/* rtr_auth.h - API keys, of a file that only its owner may read. A line is a key and, behind it,
 * who has it and what they may use: KEY [name=NAME] [weight=N] [requests=N] [requests-per-minute=N]
 * [tokens-per-minute=N] [cache=own|shared] Lines that begin with '#', and blank ones, say nothing.
 * KEY is the key itself, or blake2b:HEX, its unkeyed BLAKE2b-256 (b2sum -l 256), so that nobody who
 * reads the file has a key. Without a name, a tenant is called by a keyed hash of that hash. Keys
 * of one name are one tenant's: the first line of it says its terms, the others say the same or
 * nothing. Keys are kept and compared as hashes, every one of them each time, so the time says
 * nothing about a near miss. Threads: load: init; check: any. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "common/base/td_status.h"
#include "router/rtr_tenants.h"

#define RTR_KEYS_MAX 1024u
#define RTR_KEY_LINE_BYTES_MAX 1022u
#define RTR_KEY_HASH_PREFIX "blake2b:" /* of a line that has the hash of its key */

typedef struct rtr_auth rtr_auth_t;

/** Adds the tenants of its keys to `tenants`.
 * Shape:  secret [TD_CLUSTER_SECRET_BYTES].
 * Errors: TD_ERR_IO, TD_ERR_INVALID (readable by others, no key, too many, a line that is not as
 * above: the log names it, never the key), TD_ERR_NO_MEMORY.
 * Owner:  tenants is borrowed and outlives what is loaded. */
TD_MUST_CHECK td_status_t rtr_auth_load(const char *path, const uint8_t *secret,
                                        rtr_tenants_t *tenants, rtr_auth_t **out);
void rtr_auth_destroy(rtr_auth_t *auth);
/** Whose key that is, or NULL: nobody's. header: the value of Authorization, or NULL. */
rtr_tenant_t *rtr_auth_check(const rtr_auth_t *auth, const char *header);

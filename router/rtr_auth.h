/* rtr_auth.h - API keys: one a line of a file that only its owner may read. Keys are kept and
 * compared as hashes, every one of them each time, so the time says nothing about a near miss.
 * Threads: load: init; check: any. */
#pragma once

#include <stdbool.h>

#include "common/base/td_status.h"

#define RTR_KEYS_MAX 1024u

typedef struct rtr_auth rtr_auth_t;

/** Errors: TD_ERR_IO, TD_ERR_INVALID (readable by others, no key, too many), TD_ERR_NO_MEMORY. */
TD_MUST_CHECK td_status_t rtr_auth_load(const char *path, rtr_auth_t **out);
void rtr_auth_destroy(rtr_auth_t *auth);
/** header: the value of Authorization, or NULL. */
bool rtr_auth_check(const rtr_auth_t *auth, const char *header);

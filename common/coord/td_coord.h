/* td_coord.h - who leads: one process of several that may. Two backends run the same code of their
 * users: embedded (one machine, nothing to start: whoever campaigns leads at once) and etcd (one
 * leader in the cluster, by a lease). Design: section 5; common/coord/DESIGN.md.
 * Threads: loop. Nothing here blocks but td_coord_resign_wait(). */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "common/base/td_metrics.h"
#include "common/base/td_status.h"

#define TD_COORD_NAME_CHARS_MAX 64u /* of a cluster, an election, a candidate */
#define TD_COORD_VALUE_CHARS_MAX 128u
#define TD_COORD_LEASE_MS_DEFAULT 5000u
#define TD_COORD_LEASE_MS_MIN 2000u /* etcd grants nothing shorter */
#define TD_COORD_LEASE_MS_MAX 600000u

typedef struct td_coord td_coord_t;

typedef struct td_coord_config {
    const char *etcd;      /* endpoints, by comma; NULL or "": embedded */
    const char *cluster;   /* part of the key: clusters on one etcd do not meet */
    const char *election;  /* what is led, e.g. "store-master" */
    const char *id;        /* of this candidate */
    const char *folder;    /* of the key; NULL: "leader" */
    const char *value;     /* of the key, what others see; NULL: the id */
    uint32_t lease_ms;     /* without a renewal the leader is over after so long */
    const char *ca_file;   /* https: who signed etcd's certificate; NULL: the system's */
    const char *cert_file; /* https: our certificate and its key, or NULL */
    const char *key_file;
    const char *user; /* etcd's own authentication, or NULL */
    const char *password;
    td_metrics_t *metrics;
    const char *name_prefix; /* of metrics, e.g. "tandem_kvstore" */
} td_coord_config_t;

/** Errors: TD_ERR_INVALID (a name, an endpoint or the lease: logged), TD_ERR_NO_MEMORY, TD_ERR_IO.
 * Owner:  the texts are copied; metrics are borrowed; the caller ends it with td_coord_destroy().
 */
TD_MUST_CHECK td_status_t td_coord_create(const td_coord_config_t *config, td_coord_t **out);
/** Without resigning: others hear of it when the lease ends. NULL is allowed. */
void td_coord_destroy(td_coord_t *coord);

/** From now on this process wants to lead. */
void td_coord_campaign(td_coord_t *coord);
/** It does not any more, and leads no longer when this returns; etcd is told while the loop goes
 * on. The embedded backend has nobody to give way to and leads on. */
void td_coord_resign(td_coord_t *coord);
/** The same at the end of the process: returns once etcd has heard it, or after so long. */
void td_coord_resign_wait(td_coord_t *coord, uint32_t limit_ms);

/** The term that is ours, 0: none. It stays ours while etcd cannot be asked, also past the lease:
 * whether it is good for anything, td_coord_leads() says. A later leader's is higher. */
uint64_t td_coord_term(const td_coord_t *coord);
/** Do we lead, with this term, at this very moment? Reads the clock: ask right before each act that
 * only a leader may do. */
bool td_coord_leads(const td_coord_t *coord, uint64_t term);
/** Who leads, as last seen; "": nobody, or not known. Owner: coord, until the next call. */
const char *td_coord_leader(const td_coord_t *coord);

/** A descriptor to wait for, or -1. */
int td_coord_fd(const td_coord_t *coord);
/** How long the loop may sleep: most_ms, or less. */
uint32_t td_coord_wait_ms(const td_coord_t *coord, uint32_t most_ms);
/** Does what is due. */
void td_coord_tick(td_coord_t *coord);

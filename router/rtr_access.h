/* rtr_access.h - what was asked over HTTP, once it ended: a line each in the access log, and the
 * newest generations for the status page. Never prompts, tokens or keys.
 * A thread of its own writes the file, so no request waits for a disk; lines that it cannot keep up
 * with are dropped and counted. A file that was renamed or removed is opened anew. The end waits
 * for nobody who does not read a pipe. Threads: create, destroy: init; the rest: any. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "common/base/td_status.h"
#include "common/wire/td_msg.h"
#include "router/rtr_metrics.h"
#include "router/rtr_tenants.h"

#define RTR_ACCESS_RECENT 64u            /* generations kept */
#define RTR_ACCESS_BUFFER_MAX (1u << 20) /* bytes of lines that wait to be written */
#define RTR_ACCESS_PATH_MAX 64u
#define RTR_ACCESS_REQUEST_MAX 64u
#define RTR_ACCESS_CLIENT_MAX 46u
#define RTR_ACCESS_DRAFT_MAX 64u
#define RTR_STATUS_CLIENT_GONE 499 /* as nginx has it; never sent */

typedef struct rtr_access_entry {
    uint64_t time_ms;                   /* of its end, since 1970; set by rtr_access_add() */
    char client[RTR_ACCESS_CLIENT_MAX]; /* IP address */
    char method[8];
    char path[RTR_ACCESS_PATH_MAX + 1]; /* cut; what isn't printable is '?' */
    int http_status;                    /* 499: the client left before it was decided */
    uint64_t took_us;                   /* from its headers, a generation: from its body's end */
    bool is_generation;                 /* the rest is of those alone */
    bool is_stream;
    rtr_outcome_t outcome;
    const rtr_tenant_t *tenant; /* borrowed; NULL: nobody's */
    char request[RTR_ACCESS_REQUEST_MAX + 1];
    uint64_t ttft_us; /* 0: there was no token */
    td_msg_usage_t usage;
    char prefill[TD_MSG_ID_CHARS_MAX + 1];
    char decode[TD_MSG_ID_CHARS_MAX + 1];
    char draft[RTR_ACCESS_DRAFT_MAX];
} rtr_access_entry_t;

typedef struct rtr_access rtr_access_t;

/** path: NULL: no log; "-": standard output; else a file that is appended to.
 * Errors: TD_ERR_IO (not to be opened: logged), TD_ERR_NO_MEMORY. */
TD_MUST_CHECK td_status_t rtr_access_create(const char *path, rtr_metrics_t *metrics,
                                            rtr_access_t **out);
/** Writes what waits. NULL is allowed. */
void rtr_access_destroy(rtr_access_t *access);
/** NULL access: nothing is kept. */
void rtr_access_add(rtr_access_t *access, rtr_access_entry_t *entry);
/** The newest generations, the newest first; of one tenant, or NULL: of all.
 * Shape: out [RTR_ACCESS_RECENT]. Answers how many. */
uint32_t rtr_access_recent(rtr_access_t *access, const rtr_tenant_t *tenant,
                           rtr_access_entry_t *out);

/* rtr_status.h - the state of the cluster as JSON, for the status page and for scripts.
 * Threads: any. */
#pragma once

#include "router/rtr_access.h"
#include "router/rtr_api.h"
#include "router/rtr_registry.h"

typedef struct rtr_status {
    const rtr_model_t *model;
    const rtr_metrics_t *metrics;
    rtr_registry_t *registry;
    rtr_access_t *access;
    const char *router;         /* its id */
    const rtr_tenant_t *tenant; /* whose requests are shown; NULL: all of them */
    const char *state;          /* "ready", "waiting", "draining" */
    uint64_t uptime_ms;
} rtr_status_t;

/** Appends one JSON object (its shape: router/DESIGN.md, "Status"). Errors: TD_ERR_NO_MEMORY. */
TD_MUST_CHECK td_status_t rtr_status_json(const rtr_status_t *status, td_str_t *out);

/* rtr_http.h - the HTTP server: routes, bodies, answers and event streams (libmicrohttpd, one epoll
 * thread). A request's connection is suspended until its answer, or the first part of it, is there.
 * Threads: create, drain, stop, destroy: init; the rest runs on the server's own thread. */
#pragma once

#include "router/rtr_access.h"
#include "router/rtr_auth.h"
#include "router/rtr_loop.h"
#include "router/rtr_tls.h"
#include "router/rtr_worker.h"

typedef struct rtr_http_config {
    const char *listen; /* host:port */
    const char *router; /* this process's id */
    rtr_tls_t *tls;     /* NULL: plain HTTP */
    uint32_t connections_max;
    uint32_t connections_per_ip; /* 0: as many as there may be */
    uint32_t receive_ms;         /* for a request's headers, and again for its body */
    uint64_t body_bytes_max;
    const rtr_slo_live_t *slo; /* of requests that say nothing of it */
    const rtr_model_t *model;
    const rtr_auth_t *auth; /* NULL: open to all */
    rtr_access_t *access;
    td_tracer_t *tracer;     /* NULL: no spans are sent */
    uint32_t sample_percent; /* of the requests that bring no trace */
    rtr_tenants_t *tenants;  /* without keys all requests are the first one's */
    td_metrics_t *registry;
    rtr_metrics_t *metrics;
    rtr_gone_t *gone;
    rtr_loop_t *loop;
    rtr_workers_t *workers;
} rtr_http_config_t;

typedef struct rtr_http rtr_http_t;

/** Errors: TD_ERR_INVALID (address), TD_ERR_IO (port taken), TD_ERR_NO_MEMORY. */
TD_MUST_CHECK td_status_t rtr_http_create(const rtr_http_config_t *config, rtr_http_t **out);
/** New generation requests are refused from now on. */
void rtr_http_drain(rtr_http_t *http);
/** No connection is taken any more: who comes is refused, and asks another router, instead of being
 * cut off at the end. Once. */
void rtr_http_close_door(rtr_http_t *http);
/** Wakes what is suspended and ends the server's thread. */
void rtr_http_stop(rtr_http_t *http);
void rtr_http_destroy(rtr_http_t *http);
/** "host:port" as bound. */
const char *rtr_http_address(const rtr_http_t *http);

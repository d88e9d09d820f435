/* rtr_loop.h - the router's loop: bus messages, new requests, clients gone, time. One step: wait,
 * take what has come, tick. No step blocks and each has a work limit. Threads: loop, but for
 * submit, wake and the live counts: any. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "router/rtr_gone.h"
#include "router/rtr_registry.h"
#include "router/rtr_tickets.h"

#define RTR_INBOX_MAX 4096u

typedef struct rtr_loop_config {
    td_bus_t *bus;
    rtr_metrics_t *metrics;
    rtr_tenants_t *tenants; /* NULL: all requests are one tenant's, without limits */
    const rtr_model_t *model;
    rtr_gone_t *gone;
    const uint8_t *secret;      /* [TD_CLUSTER_SECRET_BYTES] */
    const uint8_t *fingerprint; /* [32] */
    uint32_t block_tokens;
    const char *kv_codec; /* borrowed; td_kv_codec_name() */
    uint32_t block_bytes;
    uint32_t layers;
    rtr_slo_live_t *slo; /* of requests that bring none; shared with the API */
    rtr_policy_t policy;
    uint32_t self_tokens_max;
    uint32_t queue_max;
    uint32_t queue_ms;
    uint32_t request_timeout_ms;
    uint32_t draft_explore_percent;
    const char *admin_endpoint; /* of the admin RPC; NULL: there is none */
    const char *admin_keys;     /* its folder of keys */
} rtr_loop_config_t;

typedef struct rtr_loop rtr_loop_t;

TD_MUST_CHECK td_status_t rtr_loop_create(const rtr_loop_config_t *config, rtr_loop_t **out);
void rtr_loop_destroy(rtr_loop_t *loop);
/** Hands a parsed request over, with one reference. Errors: TD_ERR_BUSY (nothing taken over). */
TD_MUST_CHECK td_status_t rtr_loop_submit(rtr_loop_t *loop, rtr_request_t *req);
/** A request was marked gone by somebody else than the loop. */
void rtr_loop_wake_gone(rtr_loop_t *loop);
/** One step. signal_fd: -1 or a descriptor to look at, too; true when it is readable.
 * Units: timeout_ms, longest wait. */
bool rtr_loop_step(rtr_loop_t *loop, int signal_fd, uint32_t timeout_ms);
/** No further requests come; ends those under way after drain_ms. Returns when none is left. */
void rtr_loop_drain(rtr_loop_t *loop, uint32_t drain_ms);
rtr_registry_t *rtr_loop_registry(rtr_loop_t *loop);
rtr_tickets_t *rtr_loop_tickets(rtr_loop_t *loop);
rtr_drafters_t *rtr_loop_drafters(rtr_loop_t *loop);
/** Where the admin RPC is bound; "" where there is none. */
const char *rtr_loop_admin_endpoint(const rtr_loop_t *loop);

/* rtr_admin.h - the admin RPC (proto/admin.proto): what operators ask and order, answered from the
 * loop's own state. What the store has to be asked comes back later, by its message. Everything is
 * bounded: a request's bytes, those that wait, subscribers. Threads: loop. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "router/rtr_events.h"
#include "router/rtr_registry.h"
#include "router/rtr_tickets.h"

#define RTR_ADMIN_ASKS_MAX 32u        /* that wait for the store; past it: busy */
#define RTR_ADMIN_SUBSCRIBERS_MAX 16u /* past it: busy */
#define RTR_ADMIN_ENTRIES_MAX 256u    /* of what drafts were worth, in a reply */
#define RTR_ADMIN_EVENTS_MAX 128u     /* in a reply */
#define RTR_ADMIN_DECISIONS_MAX 64u   /* in a reply */
#define RTR_ADMIN_KEYS_MAX 4096u      /* blocks of an order to the store */

typedef struct rtr_admin_config {
    const char *endpoint; /* ZeroMQ endpoint to bind */
    const char *folder;   /* of keys, see rtr_admin_socket.h */
    td_bus_t *bus;
    rtr_registry_t *registry;
    rtr_tickets_t *tickets;
    rtr_drafters_t *drafters;
    rtr_index_t *index;
    rtr_events_t *events;
    const rtr_trace_t *trace;
    const rtr_metrics_t *metrics;
    rtr_tenants_t *tenants; /* NULL: there are none */
    const uint8_t *secret;  /* [TD_CLUSTER_SECRET_BYTES] */
    const rtr_model_t *model;
    rtr_slo_live_t *slo;  /* of requests that bring none */
    uint32_t block_bytes; /* of KV */
    uint32_t layers;
    const char *kv_codec;
    uint32_t block_tokens;
} rtr_admin_config_t;

typedef struct rtr_admin rtr_admin_t;

/** Errors: as rtr_admin_socket_open(). */
TD_MUST_CHECK td_status_t rtr_admin_create(const rtr_admin_config_t *config, rtr_admin_t **out);
void rtr_admin_destroy(rtr_admin_t *admin); /* NULL is allowed */
const char *rtr_admin_endpoint(const rtr_admin_t *admin);
/** A descriptor to wait for. */
int rtr_admin_fd(const rtr_admin_t *admin);
/** Takes what clients sent, a bounded part of it, and tells subscribers what is new. True: there
 * may be more, so the next step shall come at once. */
bool rtr_admin_step(rtr_admin_t *admin);
/** True when the message answers what was asked for a client. */
bool rtr_admin_handle(rtr_admin_t *admin, const td_msg_t *msg);

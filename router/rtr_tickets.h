/* rtr_tickets.h - carries each prompt of each request through a prefill and a decode node to its
 * end. States, failures and limits: router/DESIGN.md. Every request ends exactly once (I5); load is
 * counted here alone and released on every exit. Threads: loop. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "common/wire/td_bus.h"
#include "router/rtr_drafters.h"
#include "router/rtr_index.h"
#include "router/rtr_registry.h"
#include "router/rtr_request.h"
#include "router/rtr_trace.h"

#define RTR_TICKETS_MAX 8192u
#define RTR_RETRIES_MAX 2u    /* of a ticket in a row, without a token in between */
#define RTR_FAILOVERS_MAX 16u /* of a ticket in all */
#define RTR_RESERVE_MS 2000u
#define RTR_REST_MS                                                                                \
    50u /* before the same node is asked again, doubled by each failure in a row                   \
         */
#define RTR_QUEUE_PROBES_MAX 4u /* tickets of the queue that may ask for room at one time */
#define RTR_HINT_BLOCKS_MAX 4096u
#define RTR_SELF_TOKENS_MAX 4096u

typedef struct rtr_tickets rtr_tickets_t;

typedef struct rtr_tickets_config {
    td_bus_t *bus;
    rtr_registry_t *registry;
    rtr_index_t *index;
    rtr_drafters_t *drafters;
    rtr_events_t *events; /* NULL: nobody wants to know */
    rtr_trace_t *trace;   /* the same */
    rtr_metrics_t *metrics;
    const rtr_model_t *model;
    const uint8_t *secret;      /* [TD_CLUSTER_SECRET_BYTES] */
    const uint8_t *fingerprint; /* [32] */
    uint32_t block_tokens;
    const char *kv_codec;     /* borrowed; td_kv_codec_name() */
    rtr_policy_t policy;      /* at first */
    uint32_t self_tokens_max; /* that a decode node may compute of a prompt; 0: none does */
    uint32_t queue_max;
    uint32_t queue_ms;
    uint32_t request_timeout_ms;
} rtr_tickets_config_t;

TD_MUST_CHECK td_status_t rtr_tickets_create(const rtr_tickets_config_t *config,
                                             rtr_tickets_t **out);
/** Ends what is left (outcome shutdown). */
void rtr_tickets_destroy(rtr_tickets_t *ts);
/** Takes over one reference; the request ends through its own functions. */
void rtr_tickets_submit(rtr_tickets_t *ts, rtr_request_t *req);
/** True when the message was for a ticket, or for one that has ended. */
bool rtr_tickets_handle(rtr_tickets_t *ts, const td_msg_t *msg);
void rtr_tickets_node_down(rtr_tickets_t *ts, uint32_t slot);
/** The node has let go of all its tickets: it had not heard of this router for a ticket lease. */
void rtr_tickets_voided(rtr_tickets_t *ts, uint32_t slot);
/** Deadlines, and the queue. */
void rtr_tickets_tick(rtr_tickets_t *ts);
/** Ends the requests whose client has left. */
void rtr_tickets_drop_gone(rtr_tickets_t *ts);
void rtr_tickets_end_all(rtr_tickets_t *ts);
/** Root of the block keys of a tenant's prompts, as the nodes have it. */
void rtr_tickets_root(const rtr_tickets_t *ts, const void *salt, size_t salt_len,
                      td_block_root_t *out);
/** How prompts are placed from now on. */
void rtr_tickets_set_policy(rtr_tickets_t *ts, rtr_policy_t policy);
rtr_policy_t rtr_tickets_policy(const rtr_tickets_t *ts);
/** What prompts and tokens take, of all nodes together. */
const rtr_estimate_t *rtr_tickets_prefill_time(const rtr_tickets_t *ts);
const rtr_estimate_t *rtr_tickets_tbt(const rtr_tickets_t *ts);
uint32_t rtr_tickets_running(const rtr_tickets_t *ts); /* requests */
uint32_t rtr_tickets_queued(const rtr_tickets_t *ts);

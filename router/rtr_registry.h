/* rtr_registry.h - the cluster's members (the router is the registry): who is live, what it may do.
 * A node is live from its accepted Register until it is silent for TD_PEER_DEAD_MS or a new life of
 * it registers. Dead stays dead: a heartbeat of a dead life is answered with a refusal, upon which
 * the process takes a new incarnation.
 * Threads: loop; rtr_registry_views() and the live counts: any. */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "common/kv/td_attention_mask.h"
#include "common/wire/td_bus.h"
#include "router/rtr_breaker.h"
#include "router/rtr_events.h"
#include "router/rtr_metrics.h"
#include "router/rtr_placement.h"
#include "router/rtr_slots.h"

typedef struct rtr_node {
    /* What every placement looks at comes first, in a few cache lines. */
    bool known; /* the slot is taken, by a live or a dead life */
    bool live;
    bool drained; /* by an operator: nothing new is placed there, whatever life it is in */
    td_role_t role;
    uint64_t incarnation;
    uint64_t seen_ns; /* last heartbeat or registration */
    rtr_breaker_t breaker;
    /* Load, counted by rtr_tickets alone. */
    uint32_t sequences; /* decode */
    uint32_t decoding;  /* of the sequences: those that have given a token */
    uint64_t promised_blocks;
    rtr_backlog_t backlog; /* prefill */
    rtr_work_t others;     /* prefill: for other routers, as it last said */
    td_msg_heartbeat_t beat;
    /* What its work takes, learned by rtr_tickets. */
    rtr_estimate_t prefill_time;
    rtr_estimate_t tbt;
    rtr_estimate_t self; /* decode: prompts that it computed */
    char id[TD_MSG_ID_CHARS_MAX + 1];
    uint64_t ticket_epoch; /* of the tickets that it has of us */
    char endpoint[256];
    char http[256];
    td_str_t ucx_address;
    td_str_t ucx_rkey;
    char device[TD_MSG_DEVICE_CHARS_MAX + 1];
    uint64_t base;
    uint32_t block_count;
    uint32_t block_bytes;
    bool store_master;
    uint64_t store_term; /* of several masters the one with the highest is named */
    uint32_t context_max;
    uint32_t drafters;       /* decode: bits of td_drafter_t that it offers; 0: it doesn't say */
    uint64_t next_lease_ns;  /* when it is told again that its tickets are good */
    uint64_t peers_version;  /* of the list it was sent last; 0: none */
    bool peer_changes;       /* it takes changes of a list alone */
    uint64_t listed_version; /* of the list when its entry last changed */
} rtr_node_t;

/** Does it take nothing new, of its own will or by order? What is under way there goes on. */
static inline bool rtr_node_drains(const rtr_node_t *node)
{
    return node->drained || node->beat.draining;
}

/** Of a node what the status page shows. */
typedef struct rtr_node_view {
    char id[TD_MSG_ID_CHARS_MAX + 1];
    td_role_t role;
    const char *state; /* "live", "draining", "dead" */
    uint64_t incarnation;
    char endpoint[256];
    uint64_t silent_ms;
    uint32_t free_blocks;
    uint32_t total_blocks;
    uint64_t prefills;
    uint32_t sequences;
    uint64_t ahead_tokens;
    uint64_t promised_blocks;
    uint64_t tokens_per_s;
    uint64_t fetched_bytes;
    bool shunned;
    bool store_master;
} rtr_node_view_t;

typedef struct rtr_registry_config {
    td_bus_t *bus;
    rtr_metrics_t *metrics;
    rtr_events_t *events;       /* NULL: nobody wants to know */
    const uint8_t *secret;      /* [TD_CLUSTER_SECRET_BYTES] */
    const uint8_t *fingerprint; /* [32] of the router's own model file */
    uint32_t block_tokens;
    uint32_t context_max; /* tokens that a request may have */
    const char *kv_codec; /* borrowed; td_kv_codec_name() */
    uint32_t block_bytes;
    void *ctx;
    /* A life has ended: its tickets must leave the slot, which is dead or a new life's by now. */
    void (*node_down)(void *ctx, uint32_t slot);
    /* This life has let go of all tickets: it had not heard of us for longer than they live. */
    void (*tickets_void)(void *ctx, uint32_t slot);
} rtr_registry_config_t;

typedef struct rtr_registry rtr_registry_t;

TD_MUST_CHECK td_status_t rtr_registry_create(const rtr_registry_config_t *config,
                                              rtr_registry_t **out);
void rtr_registry_destroy(rtr_registry_t *reg);
/** True when the message was for the registry. */
bool rtr_registry_handle(rtr_registry_t *reg, const td_msg_t *msg);
/** Declares the silent dead, renews leases, sends peers lists that are due. True: more of them are
 * due, so the next tick should come at once. */
bool rtr_registry_tick(rtr_registry_t *reg);
/** Before work is sent to a node: it knows by now whom the work names. */
void rtr_registry_tell(rtr_registry_t *reg, uint32_t slot);
/** Slots [0, rtr_registry_slots()) may be known. Never NULL. */
rtr_node_t *rtr_registry_node(rtr_registry_t *reg, uint32_t slot);
uint32_t rtr_registry_slots(const rtr_registry_t *reg);
/** Of a node that the registry has given. */
uint32_t rtr_registry_slot(const rtr_registry_t *reg, const rtr_node_t *node);
/** Slots of the live nodes of a role. Owner: the registry, until a node comes or goes. */
const uint32_t *rtr_registry_of_role(const rtr_registry_t *reg, td_role_t role,
                                     uint32_t *count_out);
/** Its slot when a life of it is live, else RTR_PLACE_NONE. O(1). */
uint32_t rtr_registry_find_live(const rtr_registry_t *reg, const char *id);
/** Its slot when that very life is live, else RTR_PLACE_NONE. */
uint32_t rtr_registry_find(const rtr_registry_t *reg, const char *id, uint64_t incarnation);
/** Of the store's live masters the one that is asked, or NULL. */
const rtr_node_t *rtr_registry_store_master(const rtr_registry_t *reg);
/** "" until a prefill or decode node is live. */
const char *rtr_registry_numerics(const rtr_registry_t *reg);
/** What a token of the live prefill and decode nodes sees. */
const td_attention_mask_t *rtr_registry_mask(const rtr_registry_t *reg);
uint32_t rtr_registry_live(const rtr_registry_t *reg, td_role_t role); /* any thread */
/** All known nodes as they were at most TD_HEARTBEAT_MS ago. Owner: the caller, td_free(*out).
 * Errors: TD_ERR_NO_MEMORY. */
TD_MUST_CHECK td_status_t rtr_registry_views(rtr_registry_t *reg, rtr_node_view_t **out,
                                             uint32_t *count_out);

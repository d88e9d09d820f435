/* sim_internal.h - a simulated cluster while it runs, for the files that make it: sim_run (events,
 * the begin and the end), sim_place (the router), sim_nodes (prefill and decode nodes, links),
 * sim_faults. Threads: owner. */
#pragma once

#include "common/base/td_base.h"
#include "router/rtr_index.h"
#include "router/sim_batch.h"
#include "router/sim_cache.h"
#include "router/sim_events.h"
#include "router/sim_run.h"
#include "router/sim_stats.h"

#define SIM_NONE UINT32_MAX
#define SIM_NEVER UINT64_MAX

typedef enum sim_event_kind {
    SIM_EVENT_PREFILLED, /* id: prefill node; version: its service */
    SIM_EVENT_HANDED,    /* id: request; version: its attempt */
    SIM_EVENT_STEPS,     /* id: decode node; version: its plan */
    SIM_EVENT_FAULT,     /* id: of the schedule */
    SIM_EVENT_UP         /* the same */
} sim_event_kind_t;

typedef enum sim_phase {
    SIM_PHASE_NEW = 0,
    SIM_PHASE_WAITING, /* in the router's queue */
    SIM_PHASE_PREFILL, /* in a node's queue, or being computed */
    SIM_PHASE_HANDOFF,
    SIM_PHASE_DECODE,
    SIM_PHASE_ENDED
} sim_phase_t;

typedef struct sim_state {
    sim_phase_t phase;
    uint32_t attempt;
    uint32_t prefill;
    uint32_t decode;
    uint32_t next;  /* in the queue that it is in */
    uint32_t given; /* tokens, of earlier attempts too */
    rtr_work_t counted;
    bool prefill_held;
    bool decode_held;
    uint32_t need_blocks;
    uint32_t cached_tokens; /* what the node found */
    uint32_t pulled_tokens;
    uint64_t placed_ns;
    uint64_t pulled_ns; /* when what is pulled has come */
    uint64_t first_ns;  /* of the first token; 0: not yet */
    double predicted_ns;
} sim_state_t;

typedef struct sim_fifo {
    uint32_t first;
    uint32_t last;
} sim_fifo_t;

typedef struct sim_prefill {
    bool up;
    uint32_t service; /* version of what is being computed */
    uint32_t current; /* request, or SIM_NONE */
    sim_fifo_t queue;
    uint64_t egress_ns; /* its link is free from then on */
    uint64_t ingress_ns;
    uint64_t service_ns;
    uint64_t computed_tokens;
    uint64_t busy_ns;
    rtr_backlog_t backlog; /* as the router counts it */
    rtr_estimate_t estimate;
} sim_prefill_t;

typedef struct sim_decode {
    bool up;
    uint32_t plan; /* version of the next boundary that was planned */
    uint32_t plan_steps;
    uint64_t plan_ns; /* SIM_NEVER: none */
    sim_fifo_t joining;
    uint64_t ingress_ns;
    sim_batch_t batch;
    uint32_t sequences; /* as the router counts it */
    uint32_t decoding;
    uint64_t promised;
    rtr_estimate_t tbt;
} sim_decode_t;

typedef struct sim {
    const sim_config_t *config;
    const sim_trace_t *trace;
    uint64_t now_ns;
    sim_events_t events;
    sim_state_t *states;     /* owned [trace->count] */
    sim_prefill_t *prefills; /* owned [prefill_count] */
    sim_decode_t *decodes;   /* owned [decode_count] */
    rtr_prefill_view_t *prefill_views;
    rtr_decode_view_t *decode_views;
    uint32_t *match;      /* owned [slots]: blocks */
    td_block_key_t *keys; /* owned [blocks of the longest prompt] */
    sim_cache_t *cache;
    rtr_index_t *index;
    rtr_estimate_t typical;
    rtr_estimate_t typical_tbt;
    sim_fifo_t waiting;
    uint64_t store_egress_ns;
    uint64_t turn;
    uint64_t random;
    double answer_ns; /* mean, or negative */
    uint64_t blocks_total;
    uint64_t blocks_local;
    uint64_t blocks_pulled;
    uint64_t pulled_bytes;
    double retry_s;
    uint32_t refused;
    uint32_t ended;
    sim_samples_t ttft;
    sim_samples_t tbt;
    sim_samples_t error;
    sim_samples_t place_us;
    sim_result_t *result; /* borrowed */
} sim_t;

static inline const sim_request_t *sim_request_of(const sim_t *s, uint32_t r)
{
    return &s->trace->requests[r];
}

static inline const uint64_t *sim_blocks_of(const sim_t *s, uint32_t r)
{
    return &s->trace->blocks[sim_request_of(s, r)->first_block];
}

static inline uint32_t sim_full_blocks(const sim_t *s, uint32_t r)
{
    return sim_request_of(s, r)->input_tokens / s->trace->block_tokens;
}

/** The store is one more holder of blocks; with a pooled cache the nodes are one. */
static inline uint32_t sim_store_slot(const sim_t *s)
{
    return s->config->prefill_count;
}

static inline uint32_t sim_cache_slot(const sim_t *s, uint32_t node)
{
    return s->config->pooled ? 0 : node;
}

/* --- sim_run ---------------------------------------------------------------------------------- */

/** version: what it must still be then, or the event is off. */
TD_MUST_CHECK td_status_t sim_plan(sim_t *s, uint64_t at_ns, sim_event_kind_t kind, uint32_t id,
                                   uint32_t version);
/** Queues of requests; each is in one at most. */
void sim_fifo_put(sim_t *s, sim_fifo_t *q, uint32_t r);
/** SIM_NONE of an empty one. */
uint32_t sim_fifo_take(sim_t *s, sim_fifo_t *q);
/** Does nothing where it isn't in it. */
void sim_fifo_remove(sim_t *s, sim_fifo_t *q, uint32_t r);
/** The key that the router would see; any of its bits are as good as another's. */
td_block_key_t sim_key_of(uint64_t block);
/** What the router counts for an attempt; done once, however often it is called. */
void sim_prefill_release(sim_t *s, sim_state_t *t);
void sim_decode_release(sim_t *s, sim_state_t *t);
/** The ends of a request: in any way, with its last token, and refused (0: not to come again). */
void sim_request_end(sim_t *s, uint32_t r);
void sim_request_complete(sim_t *s, uint32_t r);
void sim_request_refuse(sim_t *s, uint32_t r, uint32_t retry_s);

/* --- sim_nodes -------------------------------------------------------------------------------- */

/** What a link needs for so many bytes when nothing else is on it. */
uint64_t sim_link_ns(const sim_t *s, double bytes);
double sim_kv_bytes(const sim_t *s, uint64_t tokens);
/** What a prefill node needs for this work. */
double sim_service_ns(const sim_t *s, const rtr_work_t *work);
/** Begins with the next prompt, where the node is up and idle. */
TD_MUST_CHECK td_status_t sim_prefill_begin(sim_t *s, uint32_t node);
/** Events: a prompt is computed; its KV has come to the decode node; a batch is at a boundary. */
TD_MUST_CHECK td_status_t sim_prefill_done(sim_t *s, uint32_t node);
TD_MUST_CHECK td_status_t sim_handed(sim_t *s, uint32_t r);
TD_MUST_CHECK td_status_t sim_decode_steps(sim_t *s, uint32_t node);

/* --- sim_place -------------------------------------------------------------------------------- */

/** A request comes. */
TD_MUST_CHECK td_status_t sim_arrive(sim_t *s, uint32_t r);
/** There may be room: the first in the queue are placed until one finds none. */
TD_MUST_CHECK td_status_t sim_queue_probe(sim_t *s);
/** Puts it at the end of the queue. */
void sim_wait_for_room(sim_t *s, uint32_t r);

/* --- sim_faults ------------------------------------------------------------------------------- */

/** Events of the schedule of failures. */
TD_MUST_CHECK td_status_t sim_node_down(sim_t *s, uint32_t fault);
TD_MUST_CHECK td_status_t sim_node_up(sim_t *s, uint32_t fault);

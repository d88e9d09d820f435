/* pfn_node.h - the prefill node's state: its requests and what they wait for.
 * A request goes through the states below in this order; every exit is pfn_request_end() (I5).
 * Design: section 4, "Hand-off"; prefill_node/DESIGN.md.
 * Threads: loop. While a batch computes, its requests are not released (computing). */
#pragma once

#include <stdatomic.h>

#include "common/node/td_node.h"
#include "kvstore/kvs_client.h"
#include "kvstore/kvs_donor.h"

#define PFN_REQUESTS_MAX 1024u /* past it: busy */
#define PFN_PARTS_MAX 64u      /* requests in one batch */
#define PFN_LOGIT_ROWS_MAX 64u /* rows of one batch whose logits are wanted */
#define PFN_ACK_MS 60000u /* the decode node gives up by itself 2 s after the last bytes came */
#define PFN_ANNOUNCE_BYTES                                                                         \
    (256u * 1024u) /* a request's layers are gathered to announcements of at least this */

/* A pass that ends a prompt is filled with others' rows up to so many: more rows take longer,
 * nearly in proportion, and its first token would wait for all of them. */
#define PFN_FILL_ROWS 16u
#define PFN_RATE_AGE_MS 10000u /* a rate measured longer ago says nothing any more */
#define PFN_FETCH_MS_MIN 100u  /* a fetch from the store has at least this long */

typedef enum pfn_state {
    PFN_WAIT_BLOCKS, /* the pool is full; the oldest is tried again when blocks come free */
    PFN_WAIT_LOOKUP, /* the store was asked for the rest of the prefix */
    PFN_WAIT_FETCH,  /* prefix blocks are on their way from the store */
    PFN_COMPUTE,     /* in the queue for batches, or in one */
    PFN_WAIT_ACK,    /* KvReady is sent; blocks stay pinned */
    PFN_DRAIN        /* ended; fetches or the batch still hold memory */
} pfn_state_t;

typedef struct pfn_request {
    uint64_t ticket;
    uint32_t attempt;
    char router[TD_MSG_ID_CHARS_MAX + 1]; /* whose it is */
    uint64_t serial; /* unique in this process: names it to the store's client */
    pfn_state_t state;
    td_msg_work_t work;    /* borrows from arena */
    td_msg_arena_t *arena; /* owned */
    uint64_t start_ns;
    uint64_t deadline_ns; /* of the whole leg */
    uint64_t ack_deadline_ns;
    td_seq_t seq;         /* owned */
    td_block_key_t *keys; /* owned, [blocks]: full ones, then the partial one's */
    uint64_t *hashes;     /* owned, [blocks]: content, once complete */
    bool *verified;       /* owned, [blocks]: fetched, and proved right */
    uint32_t blocks;      /* of the prompt, with a partial last one */
    uint32_t full_blocks;
    uint32_t match_max;        /* leading blocks that may come from a cache */
    uint32_t local_blocks;     /* of those: from our pool */
    uint32_t store_blocks;     /* from the store, verified */
    uint32_t done_tokens;      /* positions whose KV is in the blocks */
    uint32_t announced_blocks; /* completely announced to the decode node, where it needs them */
    uint32_t published_blocks; /* full ones that are indexed, or were there before */
    bool computing;            /* a batch has rows of it now */
    uint32_t fetches;          /* under way, or being hashed */
    uint32_t fetched_blocks;   /* hashed */
    bool fetch_counts;         /* as a measurement: it came, or took too long */
    uint64_t fetch_ns;         /* when fetching began */
    uint32_t *quarantined;     /* owned, [blocks]; while PFN_DRAIN */
    uint32_t quarantined_count;
    td_sampled_t *first; /* owned, [n]: first token of each choice */
    uint64_t logits_hash;
    td_logprob_t *prompt_top;   /* owned, [prompt][top_logprobs]; only for prompt_logprobs */
    float *prompt_logprob;      /* owned, [prompt] */
    uint32_t *prompt_top_count; /* owned, [prompt] */
    td_span_t span;             /* of the leg */
    struct pfn_request *next;   /* queue order: oldest first */
} pfn_request_t;

typedef struct pfn_part { /* one request's rows in a batch */
    pfn_request_t *request;
    uint32_t row_count;
    uint32_t block_begin; /* blocks that this batch completes */
    uint32_t block_end;
    uint32_t layers_announced; /* of those blocks; the loop's */
    bool last;                 /* holds the prompt's last position */
    td_status_t status;        /* of its tokens: one request's bad numbers end no other one */
} pfn_part_t;

typedef struct pfn_batch {
    td_model_row_t *rows; /* owned, [chunk_tokens] */
    uint32_t row_count;
    pfn_part_t parts[PFN_PARTS_MAX];
    uint32_t part_count;
    uint32_t layers_step;
    td_status_t status;
    uint64_t started_ns;
    atomic_uint_fast32_t layers_done; /* release by the pass, acquire by the loop */
} pfn_batch_t;

/** Rows that the batch may still take, of those left of a chunk. */
uint32_t pfn_batch_room(const pfn_batch_t *batch, uint32_t rows_left);

/** How fast something went lately: both sums lose a quarter with each new measurement. */
typedef struct pfn_rate {
    double amount;
    double ns;
    uint64_t at_ns; /* of the last measurement; 0 = none */
} pfn_rate_t;

typedef struct pfn_node {
    td_node_t node;
    kvs_client_t *store;
    kvs_donor_t *donor; /* NULL: gives no memory to the store */
    uint32_t chunk_tokens;
    pfn_request_t *requests; /* list, oldest first */
    uint32_t request_count;
    pfn_batch_t batch;
    uint64_t next_serial;
    uint64_t last_end_ns;         /* of a request that was computed */
    uint64_t tokens_per_s;        /* measured over batches */
    pfn_rate_t compute_rate;      /* blocks' worth of rows */
    pfn_rate_t fetch_rate;        /* blocks from the store, hashed */
    uint32_t *scratch_blocks;     /* owned, [TD_MSG_BLOCKS_MAX] */
    uint64_t *scratch_epochs;     /* owned */
    uint64_t *scratch_sums;       /* owned */
    td_block_key_t *scratch_keys; /* owned */
    td_metric_t *tokens_computed;
    td_metric_t *tokens_local;
    td_metric_t *tokens_store;
    td_metric_t *lookups_hit;
    td_metric_t *lookups_miss;
    td_metric_t *lookups_timeout;
    td_metric_t *lookups_skipped;
    td_metric_t *fetches_skipped;
    td_metric_t *requests_ok;
    td_metric_t *requests_failed;
    td_metric_t *requests_cancelled;
    td_metric_t *running;
    td_metric_t *batch_seconds;
} pfn_node_t;

/* pfn_request.c */
void pfn_request_start(pfn_node_t *pfn, const td_msg_t *msg, td_msg_arena_t **arena);
/** The only end: tells the router, releases or drains everything. */
void pfn_request_end(pfn_node_t *pfn, pfn_request_t *request, td_status_t status);
pfn_request_t *pfn_request_find(pfn_node_t *pfn, uint64_t ticket, uint32_t attempt);
/** Frees a drained request once nothing holds its memory any more. */
void pfn_request_settle(pfn_node_t *pfn, pfn_request_t *request);
void pfn_request_tick(pfn_node_t *pfn);

/** Does the decode node need a block? */
bool pfn_request_needs(const pfn_request_t *request, uint32_t block);
/** The most blocks that the request needs at once. */
uint32_t pfn_request_blocks_max(const pfn_node_t *pfn, const td_msg_work_t *work);

/* pfn_prefix.c */
/** Takes what is cached here, asks the store for more, then queues the rest for computing. */
void pfn_prefix_begin(pfn_node_t *pfn, pfn_request_t *request);
/** After a reader found wrong bytes: cached blocks that no longer match their hash leave the index,
 * so that the next attempt computes them (I3). */
void pfn_prefix_drop_wrong(pfn_node_t *pfn, pfn_request_t *request);
/** Takes over the job: it is freed, or goes on to the verifier. */
void pfn_prefix_fetched(pfn_node_t *pfn, td_node_fetch_t *job);

/** Adds a measurement; what came before fades. */
void pfn_rate_add(pfn_rate_t *rate, double amount, uint64_t ns);

/* pfn_batch.c */
/** Starts the next batch if the worker is free and there is work. */
void pfn_batch_schedule(pfn_node_t *pfn);
/** Announces finished layers; ends the batch when the worker says so. */
void pfn_batch_progress(pfn_node_t *pfn);

/* pfn_handoff.c */
/** Tells the decode node that layers of a range of blocks are complete, of those that it needs. */
void pfn_handoff_layers(pfn_node_t *pfn, pfn_request_t *request, uint32_t layer_begin,
                        uint32_t layer_end, uint32_t block_begin, uint32_t block_end);
/** Sends KvReady. Returns false when the request has ended instead: it may be gone. */
bool pfn_handoff_ready(pfn_node_t *pfn, pfn_request_t *request);

/* pfn_metrics.c */
void pfn_metrics_declare(pfn_node_t *pfn);

/* rtr_metrics.h - every series of the router, in one table.
 * Threads: create: init; the series themselves: any. */
#pragma once

#include "common/base/td_metrics.h"
#include "common/spec/td_draft.h"

typedef enum rtr_outcome { /* how a request ended: exactly one for each (I5) */
                           RTR_OUTCOME_OK = 0,
                           RTR_OUTCOME_CLIENT_GONE,
                           RTR_OUTCOME_REJECTED,
                           RTR_OUTCOME_BAD_REQUEST,
                           RTR_OUTCOME_UPSTREAM_ERROR,
                           RTR_OUTCOME_TIMEOUT,
                           RTR_OUTCOME_SHUTDOWN,
                           RTR_OUTCOME_COUNT
} rtr_outcome_t;

typedef enum rtr_draft_why { /* how a request came to its drafter and bound of k */
                             RTR_DRAFT_ASKED = 0, /* it, or the server's options, said so */
                             RTR_DRAFT_DEFAULT,   /* too little is known */
                             RTR_DRAFT_LEARNED,
                             RTR_DRAFT_EXPLORED, /* to learn */
                             RTR_DRAFT_WHYS
} rtr_draft_why_t;

/** By drafter; none of TD_DRAFTER_NONE. */
typedef struct rtr_draft_metrics {
    td_metric_t *choices[RTR_DRAFT_WHYS];
    td_metric_t *entries;
    td_metric_t *steps[TD_DRAFTER_KINDS];
    td_metric_t *saved[TD_DRAFTER_KINDS];
    td_metric_t *lost[TD_DRAFTER_KINDS];
    td_metric_t *accepted[TD_DRAFTER_KINDS][TD_DRAFT_TOKENS_MAX];
    td_metric_t *rejected[TD_DRAFTER_KINDS][TD_DRAFT_TOKENS_MAX];
} rtr_draft_metrics_t;

typedef struct rtr_metrics {
    td_metric_t *requests[RTR_OUTCOME_COUNT];
    td_metric_t *ttft;
    td_metric_t *tbt;
    td_metric_t *request_time;
    td_metric_t *place_time;
    td_metric_t *running;
    td_metric_t *queued;
    td_metric_t *nodes_prefill;
    td_metric_t *nodes_decode;
    td_metric_t *nodes_kvstore;
    td_metric_t *node_deaths;
    td_metric_t *registrations_refused;
    td_metric_t *retries;
    td_metric_t *failovers;
    td_metric_t *self_prefills;
    td_metric_t *breakers_opened;
    td_metric_t *slo_ttft;
    td_metric_t *slo_tbt;
    td_metric_t *prompt_tokens;
    td_metric_t *cached_tokens;
    td_metric_t *completion_tokens;
    td_metric_t *index_blocks;
    td_metric_t *index_bytes;
    td_metric_t *index_nodes[3]; /* by rtr_index_state_t */
    td_metric_t *index_events;
    td_metric_t *index_gaps;
    td_metric_t *index_replays;
    td_metric_t *index_snapshots;
    td_metric_t *index_mismatches;
    td_metric_t *index_dropped;
    td_metric_t *index_stale;
    td_metric_t *prefill_error;
    td_metric_t *tbt_error;
    td_metric_t *bus_refused;
    td_metric_t *access_dropped;
    td_metric_t *slow_clients;
    rtr_draft_metrics_t drafts; /* the last: declared apart */
} rtr_metrics_t;

void rtr_metrics_declare(td_metrics_t *registry, rtr_metrics_t *out);
/** "ok", "client_gone", ... */
const char *rtr_outcome_name(rtr_outcome_t outcome);

/* sim_run.h - a cluster in discrete events: requests of a trace are placed and admitted by the code
 * that the router runs (rtr_placement, rtr_index), on nodes of a sim_model. The same configuration
 * and seed give the same figures. Design: router/DESIGN.md, "Simulator". Threads: owner. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "common/base/td_status.h"
#include "router/rtr_placement.h"
#include "router/sim_model.h"
#include "router/sim_trace.h"

#define SIM_NODES_MAX 4096u /* of a role */
#define SIM_FAULTS_MAX 256u
#define SIM_ATTEMPTS_MAX 4u

typedef struct sim_fault {
    uint64_t at_ns;
    uint64_t up_ns; /* UINT64_MAX: never again */
    bool is_prefill;
    uint32_t node;
} sim_fault_t;

typedef struct sim_config {
    sim_model_t model;
    rtr_policy_t policy;
    bool pooled;       /* one prefix cache of the total size: the bound */
    bool exact_index;  /* the router hears of evictions; else of nothing but its own decisions */
    bool admission;    /* early, by the predictions */
    rtr_slo_t slo;     /* also what counts as good */
    double keep_local; /* RTR_KEEP_LOCAL_DEFAULT */
    uint32_t prefill_count;
    uint32_t decode_count;
    uint64_t node_cache_tokens;
    uint64_t store_tokens; /* 0: no store */
    uint32_t hints_max;    /* blocks; 0: as many as nodes and store can hold */
    uint64_t seed;
    bool timing; /* measure how long placing takes: the only figures that differ between runs */
    const sim_fault_t *faults; /* borrowed */
    uint32_t fault_count;
    void *ctx;
    void (*progress)(void *ctx, uint32_t done, uint32_t count); /* NULL: none */
} sim_config_t;

typedef struct sim_result {
    uint32_t requests;
    uint32_t completed;
    uint32_t rejected; /* admission, and what fits nowhere */
    uint32_t failed;   /* after SIM_ATTEMPTS_MAX nodes have died under it */
    uint32_t moved;    /* attempts beyond the first */
    uint32_t good;     /* within the SLO */
    double hit_rate;   /* of prompt blocks: local */
    double hit_rate_pulled;
    double hit_rate_infinite;
    double load_max_over_mean; /* of computed prefill tokens */
    double prefill_busy;       /* share of the nodes' time */
    double ttft_mean_s;
    double ttft_p50_s;
    double ttft_p90_s;
    double ttft_p99_s;
    double tbt_mean_s; /* over requests, of each one's mean */
    double tbt_p90_s;
    double goodput_rps;
    double retry_after_mean_s;
    double ttft_error; /* mean of |predicted - actual| / the larger one */
    double span_s;     /* from the first arrival to the last */
    double pulled_gb;
    double place_us_p50; /* with timing */
    double place_us_p99;
} sim_result_t;

/** Runs the trace to its end. Units: block_tokens of the trace are those of the caches.
 * Errors: TD_ERR_INVALID (a number of nodes out of bounds), TD_ERR_NO_MEMORY, TD_ERR_TOO_LARGE
 * (it lasts longer than SIM_TIME_NS_MAX). */
TD_MUST_CHECK td_status_t sim_run(const sim_config_t *config, const sim_trace_t *trace,
                                  sim_result_t *out);

/* sim_sweep.h - how many nodes a load needs: a run for each pair of counts. Threads: owner. */
#pragma once

#include "common/base/td_buf.h"
#include "router/sim_run.h"

#define SIM_SWEEP_CELLS_MAX 1024u

/** first, first + step, ... up to last; all >= 1. */
typedef struct sim_range {
    uint32_t first;
    uint32_t last;
    uint32_t step;
} sim_range_t;

typedef struct sim_sweep {
    sim_range_t prefill;
    sim_range_t decode;
    double share;          /* of the requests that must be within the SLO */
    double *shares;        /* owned [prefill][decode]; of requests within the SLO */
    uint32_t best_prefill; /* of the cells that reach it the one with the fewest nodes; 0: none */
    uint32_t best_decode;
} sim_sweep_t;

/** "A", "A:B" or "A:B:STEP". Errors: TD_ERR_INVALID. */
TD_MUST_CHECK td_status_t sim_range_parse(const char *text, sim_range_t *out);
uint32_t sim_range_count(const sim_range_t *range);

/** Runs all pairs; config's counts of nodes and progress are not used. progress: after each run,
 * NULL for none. Errors: as sim_run(); TD_ERR_INVALID (more than SIM_SWEEP_CELLS_MAX pairs).
 * Owner: the caller ends *sweep with sim_sweep_fini(), also after a failure. */
TD_MUST_CHECK td_status_t sim_sweep_run(sim_sweep_t *sweep, const sim_config_t *config,
                                        const sim_trace_t *trace, void *ctx,
                                        void (*progress)(void *ctx, uint32_t done, uint32_t count));
TD_MUST_CHECK td_status_t sim_sweep_table(const sim_sweep_t *sweep, td_str_t *out);
TD_MUST_CHECK td_status_t sim_sweep_json(const sim_sweep_t *sweep, td_str_t *out);
/** A script for gnuplot that draws the table; it holds the figures and names image. */
TD_MUST_CHECK td_status_t sim_sweep_plot(const sim_sweep_t *sweep, const char *image,
                                         td_str_t *out);
void sim_sweep_fini(sim_sweep_t *sweep);

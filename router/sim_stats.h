/* sim_stats.h - what comes out of a simulated run. Threads: owner. */
#pragma once

#include "router/sim_run.h"

typedef struct sim_samples {
    double *values; /* owned [cap] */
    uint32_t count;
    uint32_t cap;
    double sum;
} sim_samples_t;

/** Errors: TD_ERR_NO_MEMORY. */
TD_MUST_CHECK td_status_t sim_samples_create(uint32_t cap, sim_samples_t *out);
/** Past its size a value is not kept. */
void sim_samples_add(sim_samples_t *samples, double value);
double sim_samples_mean(const sim_samples_t *samples); /* 0 of none */
/** The value that a share of 0..1 is not above: nearest rank. Sorts. 0 of none. */
double sim_samples_at(sim_samples_t *samples, double share);
void sim_samples_fini(sim_samples_t *samples);

/* sim_batch.h - the sequences that a simulated decode node works on: in each step each gives a
 * token, and reads all of its context. Steps between two changes are jumped over: their times are
 * an arithmetic series, since each step adds a token of context for each sequence.
 * Threads: owner. */
#pragma once

#include <stdint.h>

#include "common/base/td_status.h"
#include "router/sim_model.h"

typedef struct sim_batch_seq {
    uint32_t request;
    uint32_t left;    /* tokens to give */
    uint64_t context; /* tokens, as of its start */
    uint32_t given;
} sim_batch_seq_t;

/** Zero-initialise. */
typedef struct sim_batch {
    sim_batch_seq_t *seqs; /* owned [cap] */
    uint32_t count;
    uint32_t cap;
    uint64_t context;  /* tokens of all of them */
    uint64_t stamp_ns; /* the boundary between steps that this is the state of */
} sim_batch_t;

/** Units: ns of the next step. */
double sim_batch_step_ns(const sim_batch_t *batch, const sim_model_t *model);
/** Units: ns of the next so many steps. */
uint64_t sim_batch_steps_ns(const sim_batch_t *batch, const sim_model_t *model, uint32_t steps);
/** Steps until the first sequence ends; 0: there is none. Cost: O(count). */
uint32_t sim_batch_until_end(const sim_batch_t *batch);
/** Steps until the first boundary that is not before now_ns, at most until the first end. */
uint32_t sim_batch_until(const sim_batch_t *batch, const sim_model_t *model, uint64_t now_ns);
/** Goes on by so many steps, at most until the first end. */
void sim_batch_advance(sim_batch_t *batch, const sim_model_t *model, uint32_t steps);
/** A sequence begins at the boundary. Errors: TD_ERR_NO_MEMORY. */
TD_MUST_CHECK td_status_t sim_batch_add(sim_batch_t *batch, uint32_t request, uint64_t context,
                                        uint32_t left);
/** Takes out [at]; the last one takes its place. */
sim_batch_seq_t sim_batch_remove(sim_batch_t *batch, uint32_t at);
void sim_batch_fini(sim_batch_t *batch);

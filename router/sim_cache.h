/* sim_cache.h - which blocks simulated nodes hold: for each node the least recently used go first.
 * A block is known from when its request is placed; it can be read by others once it is ready.
 * Threads: owner. All memory is taken in sim_cache_create(). */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "common/base/td_status.h"

typedef struct sim_cache sim_cache_t;

typedef struct sim_cache_config {
    uint32_t node_count;
    uint32_t entries_max; /* blocks of all nodes together */
    void *ctx;
    /* NULL, or: a node has given up a block. */
    void (*evicted)(void *ctx, uint32_t node, uint64_t block);
} sim_cache_config_t;

/** Errors: TD_ERR_NO_MEMORY. */
TD_MUST_CHECK td_status_t sim_cache_create(const sim_cache_config_t *config, sim_cache_t **out);
void sim_cache_destroy(sim_cache_t *cache);
/** Units: blocks. 0 at first. */
void sim_cache_set_capacity(sim_cache_t *cache, uint32_t node, uint32_t blocks);
/** Leading blocks that a node holds; ready_only: those that others can read. */
uint32_t sim_cache_match(const sim_cache_t *cache, uint32_t node, const uint64_t *blocks,
                         uint32_t count, bool ready_only);
/** A node holds these blocks from now on, as the ones used last; new ones are not ready. */
void sim_cache_use(sim_cache_t *cache, uint32_t node, const uint64_t *blocks, uint32_t count);
/** What the node still holds of them is ready. */
void sim_cache_set_ready(sim_cache_t *cache, uint32_t node, const uint64_t *blocks, uint32_t count);
/** A node has lost everything; evicted() is not called. */
void sim_cache_clear(sim_cache_t *cache, uint32_t node);
uint32_t sim_cache_count(const sim_cache_t *cache, uint32_t node);

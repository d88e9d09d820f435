/* rtr_placement.h - which nodes a prompt goes to. Pure functions: what they need is passed in.
 * Prefill: the least predicted time to first token, TTFT = a + b * (tokens ahead + own uncached
 * tokens), with a and b regressed for each node from what it really took. A match thus weighs as
 * much as the work it saves, and a hot node loses as soon as its queue outweighs the match. Decode:
 * the fewest running sequences, weighed by how full its memory will be. Source: design, section 6.
 * Threads: any (plain values). */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#define RTR_PLACE_NONE UINT32_MAX

/** Exponentially forgetting regression of nanoseconds over tokens. Zero-initialise. */
typedef struct rtr_rate {
    double n;
    double x;
    double y;
    double xx;
    double xy;
} rtr_rate_t;
void rtr_rate_observe(rtr_rate_t *rate, uint64_t tokens, uint64_t ns);
/** Predicted ns; negative while nothing was observed. */
double rtr_rate_predict(const rtr_rate_t *rate, uint64_t tokens);

typedef struct rtr_prefill_view {
    bool allowed;          /* live, of the role, its telemetry fresh, not excluded */
    uint64_t ahead_tokens; /* uncached tokens under way there, as the router counts them */
    uint32_t match_tokens; /* of this prompt */
    const rtr_rate_t *rate;
} rtr_prefill_view_t;

/** Index of the best, or RTR_PLACE_NONE. turn: a running number that breaks ties in rotation.
 * Units: granule_tokens, least work a prompt is (a block: its last position is always computed). */
uint32_t rtr_place_prefill(const rtr_prefill_view_t *views, uint32_t count, uint32_t prompt_tokens,
                           uint32_t granule_tokens, uint32_t turn);

typedef struct rtr_decode_view {
    bool allowed;
    uint32_t running;      /* sequences under way there, as the router counts them */
    uint64_t promised;     /* blocks those may grow to */
    uint32_t free_blocks;  /* as the node last said */
    uint32_t total_blocks; /* 0 = not known yet */
    uint32_t match_blocks; /* of this prompt */
} rtr_decode_view_t;

/** Index of the best, or RTR_PLACE_NONE. Units: need_blocks, what this prompt may grow to. */
uint32_t rtr_place_decode(const rtr_decode_view_t *views, uint32_t count, uint32_t sequences,
                          uint32_t need_blocks, uint32_t turn);

/* sim_trace.h - recorded requests, one JSON object a line: {"timestamp": ms, "input_length":
 * tokens, "output_length": tokens, "hash_ids": [names of chained blocks]}; other fields are
 * ignored. The form of the public Mooncake traces. Nothing of a line is trusted. Threads: owner. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "common/base/td_status.h"

#define SIM_REQUESTS_MAX (1u << 22)
#define SIM_LINE_BYTES_MAX (4u << 20)
#define SIM_FILE_BYTES_MAX (1u << 30)
#define SIM_INPUT_TOKENS_MAX (1u << 24)
#define SIM_OUTPUT_TOKENS_MAX (1u << 20)
#define SIM_TIME_MS_MAX 1e12
#define SIM_TIME_NS_MAX 4e18 /* of a simulation: no sum of times overflows */
#define SIM_BLOCK_ID_BITS                                                                          \
    40 /* of a name in a file; what is above tells repeats of a trace apart                        \
        */
#define SIM_WHY_CHARS_MAX 159

typedef struct sim_request {
    uint64_t arrival_ns;
    uint64_t first_block; /* its blocks are blocks[first_block .. + block_count) */
    uint32_t block_count; /* the last one may be partial */
    uint32_t input_tokens;
    uint32_t output_tokens;
} sim_request_t;

typedef struct sim_trace {
    sim_request_t *requests; /* owned [count], in order of arrival */
    uint64_t *blocks;        /* owned [block_count] */
    uint32_t count;
    uint32_t requests_cap;
    uint64_t block_count;
    uint64_t blocks_cap;
    uint32_t block_tokens;
} sim_trace_t;

/** Reads a trace. block_tokens: of the blocks that hash_ids name.
 * Errors: TD_ERR_INVALID (why says which line and field), TD_ERR_NO_MEMORY.
 * Owner: the caller ends *out with sim_trace_fini(). */
TD_MUST_CHECK td_status_t sim_trace_parse(const char *bytes, size_t len, uint32_t block_tokens,
                                          sim_trace_t *out, char why[SIM_WHY_CHARS_MAX + 1]);
/** The same from a file. Errors: also TD_ERR_IO. */
TD_MUST_CHECK td_status_t sim_trace_load(const char *path, uint32_t block_tokens, sim_trace_t *out,
                                         char why[SIM_WHY_CHARS_MAX + 1]);
void sim_trace_fini(sim_trace_t *trace);

typedef enum sim_arrivals {
    SIM_ARRIVALS_RECORDED = 0,
    SIM_ARRIVALS_SPREAD, /* those of one instant evenly until the next: for coarse clocks */
    SIM_ARRIVALS_POISSON /* of the trace's mean rate */
} sim_arrivals_t;

typedef struct sim_load {
    sim_arrivals_t arrivals;
    double rate_scale;     /* > 0: times as many a second */
    uint32_t requests_max; /* 0: the trace's; more: the trace again and again, with other blocks */
    uint64_t seed;
} sim_load_t;

/** What is to be simulated, of a recorded trace. Errors: TD_ERR_NO_MEMORY, TD_ERR_TOO_LARGE (it
 * would last longer than SIM_TIME_NS_MAX).
 * Owner: the caller ends *out with sim_trace_fini(). */
TD_MUST_CHECK td_status_t sim_trace_shape(const sim_trace_t *trace, const sim_load_t *load,
                                          sim_trace_t *out);
/** Share of blocks that a cache without end would hit. Errors: TD_ERR_NO_MEMORY. */
TD_MUST_CHECK td_status_t sim_trace_bound(const sim_trace_t *trace, double *hit_rate_out);

/** Blocks of a request that may come from a cache: its last token is always computed. */
static inline uint32_t sim_request_reusable(const sim_request_t *r, uint32_t block_tokens)
{
    return (r->input_tokens - 1) / block_tokens;
}

/* td_cuda_graphs.h - passes of a shape that came before are started at once: what was launched
 * kernel by kernel is kept as a graph. Only the launches are kept; what kernels read is written
 * anew for each pass. Threads: owner. */
#pragma once

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stdint.h>

#include "common/base/td_status.h"

#define TD_CUDA_GRAPHS_MAX 64u

/** All that grids and parameters of a pass depend on. */
typedef struct td_cuda_shape {
    uint32_t rows;
    uint32_t few_items;
    uint32_t many_items;
    uint32_t logit_rows;
    uint32_t layers;
    uint32_t split;
} td_cuda_shape_t;

typedef struct td_cuda_graph {
    td_cuda_shape_t shape;
    cudaGraphExec_t exec; /* owned; NULL: the shape was seen once, or cannot be kept */
    uint64_t used;        /* turn; 0: empty */
    bool broken;
} td_cuda_graph_t;

typedef struct td_cuda_graphs {
    td_cuda_graph_t entries[TD_CUDA_GRAPHS_MAX];
    uint64_t turn;
    uint64_t kept; /* passes that a graph has run */
} td_cuda_graphs_t;

/** Launches what a pass consists of. */
typedef td_status_t (*td_cuda_launch_fn)(void *ctx);

/** Runs launch(ctx) on the stream: the first time as it is, the second time kept as a graph, and
 * from then on by the graph. Launches that cannot be kept are done as they are. Errors: those of
 * launch(), TD_ERR_IO. */
TD_MUST_CHECK td_status_t td_cuda_graphs_run(td_cuda_graphs_t *graphs, cudaStream_t stream,
                                             const td_cuda_shape_t *shape, td_cuda_launch_fn launch,
                                             void *ctx);
/** Forgets all: an address that launches have has changed. The stream is idle. */
void td_cuda_graphs_clear(td_cuda_graphs_t *graphs);

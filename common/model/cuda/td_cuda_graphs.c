#include "common/model/cuda/td_cuda_graphs.h"

#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_log.h"
#include "common/model/cuda/td_cuda_launch.h"

static void entry_fini(td_cuda_graph_t *e)
{
    if (e->exec != NULL) {
        (void)cudaGraphExecDestroy(e->exec);
    }
    *e = (td_cuda_graph_t){0};
}

/* The shape's entry, or the least recently used one, emptied. */
static td_cuda_graph_t *find(td_cuda_graphs_t *g, const td_cuda_shape_t *shape)
{
    td_cuda_graph_t *oldest = &g->entries[0];

    for (uint32_t i = 0; i < TD_CUDA_GRAPHS_MAX; i++) {
        td_cuda_graph_t *e = &g->entries[i];
        if (e->used != 0 && memcmp(&e->shape, shape, sizeof(*shape)) == 0) {
            return e;
        }
        oldest = e->used < oldest->used ? e : oldest;
    }
    entry_fini(oldest);
    oldest->shape = *shape;
    return oldest;
}

/* The launches as a graph; NULL where the runtime does not want to. */
static cudaGraphExec_t keep(cudaStream_t stream, td_cuda_launch_fn launch, void *ctx)
{
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    td_status_t status = TD_OK;

    if (cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) != cudaSuccess) {
        goto err;
    }
    status = launch(ctx);
    if (cudaStreamEndCapture(stream, &graph) != cudaSuccess || status != TD_OK) {
        goto err_destroy;
    }
    if (cudaGraphInstantiate(&exec, graph, 0) != cudaSuccess) {
        exec = NULL;
        goto err_destroy;
    }
    (void)cudaGraphDestroy(graph);
    return exec;

err_destroy:
    if (graph != NULL) {
        (void)cudaGraphDestroy(graph);
    }
err:
    TD_LOG_WARN("passes of a shape are launched kernel by kernel", "error=%s",
                cudaGetErrorName(cudaGetLastError()));
    return NULL;
}

td_status_t td_cuda_graphs_run(td_cuda_graphs_t *g, cudaStream_t stream,
                               const td_cuda_shape_t *shape, td_cuda_launch_fn launch, void *ctx)
{
    td_cuda_graph_t *e = find(g, shape);
    const bool seen = e->used != 0;
    td_status_t status = TD_OK;

    e->used = ++g->turn;
    if (seen && e->exec == NULL && !e->broken) {
        e->exec = keep(stream, launch, ctx);
        e->broken = e->exec == NULL;
    }
    if (e->exec == NULL) {
        return launch(ctx);
    }
    status = td_cuda_check(cudaGraphLaunch(e->exec, stream), "cudaGraphLaunch");
    if (status == TD_OK) {
        g->kept++;
    } else {
        entry_fini(e); /* what failed is made anew */
    }
    return status;
}

void td_cuda_graphs_clear(td_cuda_graphs_t *g)
{
    for (uint32_t i = 0; i < TD_CUDA_GRAPHS_MAX; i++) {
        entry_fini(&g->entries[i]);
    }
}

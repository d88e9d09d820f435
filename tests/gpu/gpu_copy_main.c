/* How fast a device's memory is, and what moves KV blocks: copies on the device, to and from pinned
 * host memory, and the kernel that gathers blocks. Prints one JSON object: GB/s, the best of some
 * rounds.
 *
 * usage: gpu_copy [DEVICE]. Exit code 3 where there is no device, 1 where a call fails. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cuda_runtime_api.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/model/cuda/td_cuda_launch.h"

#define BYTES ((size_t)1 << 30)
#define BLOCK_BYTES ((size_t)2 << 20) /* of a model of 8 billion parameters, about */
#define ROUNDS 7

typedef struct copies {
    uint8_t *from;
    uint8_t *to;
    uint8_t *host;
    uint32_t *blocks;
} copies_t;

typedef enum kind { ON_DEVICE = 0, TO_DEVICE, TO_HOST, GATHER } kind_t;

static cudaError_t copy(const copies_t *c, kind_t kind)
{
    const td_cuda_move_t move = {.pool = c->from,
                                 .block_bytes = BLOCK_BYTES,
                                 .blocks = c->blocks,
                                 .staging = c->to,
                                 .bytes = BLOCK_BYTES};

    switch (kind) {
    case ON_DEVICE:
        return cudaMemcpyAsync(c->to, c->from, BYTES, cudaMemcpyDeviceToDevice, NULL);
    case TO_DEVICE:
        return cudaMemcpyAsync(c->to, c->host, BYTES, cudaMemcpyHostToDevice, NULL);
    case TO_HOST:
        return cudaMemcpyAsync(c->host, c->to, BYTES, cudaMemcpyDeviceToHost, NULL);
    case GATHER:
        return td_cuda_launch_move(NULL, &move, (uint32_t)(BYTES / BLOCK_BYTES)) == TD_OK
                   ? cudaSuccess
                   : cudaErrorUnknown;
    }
    return cudaErrorInvalidValue;
}

/* GB/s; negative where a call fails. */
static double measure(const copies_t *c, kind_t kind)
{
    uint64_t best_ns = UINT64_MAX;

    for (int round = 0; round < ROUNDS; round++) {
        const uint64_t begin_ns = td_now_ns();
        if (copy(c, kind) != cudaSuccess || cudaStreamSynchronize(NULL) != cudaSuccess) {
            return -1;
        }
        best_ns = TD_MIN(best_ns, td_now_ns() - begin_ns);
    }
    return (double)BYTES / (double)best_ns;
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        kind_t kind;
        double touched; /* bytes of the device's memory for each that is copied */
    } figures[] = {
        {"device_memory_gb_s", ON_DEVICE, 2},
        {"host_to_device_gb_s", TO_DEVICE, 1},
        {"device_to_host_gb_s", TO_HOST, 1},
        {"gather_blocks_gb_s", GATHER, 1},
    };
    const int device = argc > 1 ? atoi(argv[1]) : 0;
    uint32_t order[BYTES / BLOCK_BYTES];
    void *addresses[4] = {NULL};
    copies_t c;
    int count = 0;

    if (cudaGetDeviceCount(&count) != cudaSuccess || device >= count) {
        (void)fprintf(stderr, "gpu_copy: no device %d: %s\n", device,
                      cudaGetErrorString(cudaGetLastError()));
        return 3;
    }
    for (uint32_t i = 0; i < TD_ARRAY_LEN(order); i++) {
        order[i] = (i * 7 + 3) % TD_ARRAY_LEN(order);
    }
    if (cudaSetDevice(device) != cudaSuccess || cudaMalloc(&addresses[0], BYTES) != cudaSuccess ||
        cudaMalloc(&addresses[1], BYTES) != cudaSuccess ||
        cudaHostAlloc(&addresses[2], BYTES, cudaHostAllocDefault) != cudaSuccess ||
        cudaMalloc(&addresses[3], sizeof(order)) != cudaSuccess ||
        cudaMemcpyAsync(addresses[3], order, sizeof(order), cudaMemcpyHostToDevice, NULL) !=
            cudaSuccess) {
        (void)fprintf(stderr, "gpu_copy: memory: %s\n", cudaGetErrorString(cudaGetLastError()));
        return 1;
    }
    c = (copies_t){addresses[0], addresses[1], addresses[2], addresses[3]};
    memset(c.host, 1, BYTES);
    (void)printf("{");
    for (size_t i = 0; i < TD_ARRAY_LEN(figures); i++) {
        const double gb_s = measure(&c, figures[i].kind);
        if (gb_s < 0) {
            (void)fprintf(stderr, "gpu_copy: %s: %s\n", figures[i].name,
                          cudaGetErrorString(cudaGetLastError()));
            return 1;
        }
        (void)printf("%s\"%s\": %.1f", i == 0 ? "" : ", ", figures[i].name,
                     gb_s * figures[i].touched);
    }
    (void)printf("}\n");
    return 0;
}

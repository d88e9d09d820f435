/* Blocks from one device to another as transfers move them, in one process: gathered into staging
 * memory, sent and received by NCCL, brought to the host. With a single device the copies are
 * checked, and NCCL is asked for a link of the device to itself, which it may refuse. Prints one
 * JSON object.
 *
 * usage: gpu_nccl [ROUNDS]. Exit code 3: no device; 4: no NCCL; 5: the copies are right, and NCCL
 * refuses the link; 1: a call failed, or bytes are wrong. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cuda_runtime_api.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/model/cuda/td_cuda_exchange.h"

#define BLOCK_BYTES ((size_t)2 << 20) /* of a model of 8 billion parameters, about */
#define BLOCKS 4u
#define BYTES (BLOCKS * BLOCK_BYTES)
#define ROUNDS 20
#define LIMIT_S 60u

enum { EXIT_NO_DEVICE = 3, EXIT_NO_NCCL = 4, EXIT_REFUSED = 5 };

typedef struct end {
    td_cuda_mirror_t *mirror;
    td_cuda_exchange_t *exchange;
    td_kv_device_t *device;
    td_kv_link_t *link;
    uint8_t *host; /* pinned; [BLOCKS][BLOCK_BYTES] */
    td_kv_part_t parts[BLOCKS];
} end_t;

static int end_open(end_t *e, int index, uint8_t seed)
{
    void *address = NULL;
    void *copies = NULL;
    td_status_t status = TD_OK;

    if (cudaSetDevice(index) != cudaSuccess || cudaMalloc(&copies, BYTES) != cudaSuccess ||
        cudaHostAlloc(&address, BYTES, cudaHostAllocDefault) != cudaSuccess ||
        td_cuda_mirror_create(BLOCKS, BLOCKS, &e->mirror) != TD_OK ||
        td_cuda_exchange_create(index, copies, BLOCK_BYTES, e->mirror, &e->exchange) != TD_OK) {
        return EXIT_FAILURE;
    }
    e->host = address;
    e->device = td_cuda_exchange_device(e->exchange);
    if (e->device == NULL) {
        return EXIT_NO_NCCL;
    }
    status = e->device->ops->start(e->device, 1, BYTES, BLOCKS);
    if (status != TD_OK) {
        return status == TD_ERR_UNSUPPORTED ? EXIT_NO_NCCL : EXIT_FAILURE;
    }
    for (uint32_t b = 0; b < BLOCKS; b++) {
        e->parts[b] = (td_kv_part_t){
            .host = e->host + b * BLOCK_BYTES, .block = b, .bytes = (uint32_t)BLOCK_BYTES};
    }
    for (size_t i = 0; i < BYTES; i++) {
        e->host[i] = (uint8_t)(i * 7 + i / 4093 + seed);
    }
    return EXIT_SUCCESS;
}

static bool wait_slot(const end_t *e)
{
    const uint64_t deadline = td_now_ns() + LIMIT_S * TD_NS_PER_S;
    td_status_t status = TD_INPROGRESS;

    while (status == TD_INPROGRESS && td_now_ns() < deadline) {
        status = e->device->ops->poll(e->device, 0);
    }
    return status == TD_OK;
}

/* Until what both have posted is over; each is asked, since asking is what lets it go on. */
static bool wait_both(const end_t *ends)
{
    const uint64_t deadline = td_now_ns() + LIMIT_S * TD_NS_PER_S;
    bool over[2] = {false, false};
    td_status_t status = TD_OK;

    while (!(over[0] && over[1]) && status >= 0 && td_now_ns() < deadline) {
        for (uint32_t rank = 0; rank < 2 && status >= 0; rank++) {
            if (!over[rank]) {
                status = ends[rank].device->ops->poll(ends[rank].device, 0);
                over[rank] = status == TD_OK;
            }
        }
    }
    return over[0] && over[1];
}

/* From the host's blocks to the device, twice: from its copies the second time; and back. */
static bool check_copies(end_t *e)
{
    uint8_t *want = malloc(BYTES);
    bool right = want != NULL;

    for (int turn = 0; turn < 2 && right; turn++) {
        memcpy(want, e->host, BYTES);
        right = e->device->ops->gather(e->device, 0, e->parts, BLOCKS) == TD_OK && wait_slot(e);
        memset(e->host, 0, BYTES);
        right = right && e->device->ops->scatter(e->device, 0, e->parts, BLOCKS) == TD_OK &&
                wait_slot(e) && memcmp(e->host, want, BYTES) == 0;
    }
    free(want);
    return right;
}

/* Both ends of a link, opened. */
static bool open_link(end_t *ends)
{
    const uint64_t deadline = td_now_ns() + LIMIT_S * TD_NS_PER_S;
    uint8_t id[TD_KV_LINK_ID_BYTES];
    td_status_t status = ends[0].device->ops->link_id(ends[0].device, id);

    for (uint32_t rank = 0; rank < 2 && status == TD_OK; rank++) {
        status = ends[rank].device->ops->link_open(ends[rank].device, id, rank, &ends[rank].link);
    }
    for (uint32_t rank = 0; rank < 2 && status == TD_OK;) {
        status = ends[rank].device->ops->link_poll(ends[rank].link);
        if (status == TD_OK) {
            rank++;
        } else if (status == TD_INPROGRESS && td_now_ns() < deadline) {
            status = TD_OK;
        }
    }
    return status == TD_OK;
}

/* GB/s from one host's blocks to the other's, with NCCL between, the best of the rounds; negative
 * where bytes are wrong. */
static double check_link(end_t *ends, int rounds)
{
    const td_kv_device_ops_t *ops = ends[0].device->ops;
    uint64_t best_ns = UINT64_MAX;

    for (int round = 0; round < rounds; round++) {
        uint64_t begin_ns = 0;
        memset(ends[1].host, round, BYTES);
        td_cuda_mirror_forget_all(ends[1].mirror);
        begin_ns = td_now_ns();
        if (ops->gather(ends[0].device, 0, ends[0].parts, BLOCKS) != TD_OK || !wait_slot(ends) ||
            ops->link_post(ends[0].link, 0, BYTES, true) != TD_OK ||
            ops->link_post(ends[1].link, 0, BYTES, false) != TD_OK) {
            return -1;
        }
        if (!wait_both(ends) || ops->scatter(ends[1].device, 0, ends[1].parts, BLOCKS) != TD_OK ||
            !wait_slot(&ends[1]) || memcmp(ends[0].host, ends[1].host, BYTES) != 0) {
            return -1;
        }
        best_ns = TD_MIN(best_ns, td_now_ns() - begin_ns);
    }
    return (double)BYTES / (double)best_ns;
}

static void close_link(end_t *ends)
{
    const uint64_t deadline = td_now_ns() + LIMIT_S * TD_NS_PER_S;

    for (uint32_t rank = 0; rank < 2; rank++) {
        if (ends[rank].link != NULL) {
            ends[rank].device->ops->link_close(ends[rank].link);
        }
    }
    for (uint32_t rank = 0; rank < 2; rank++) {
        while (ends[rank].link != NULL && !ends[rank].device->ops->link_gone(ends[rank].link) &&
               td_now_ns() < deadline) {
        }
    }
}

int main(int argc, char **argv)
{
    end_t ends[2] = {{0}};
    int count = 0;
    double gb_s = 0;

    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
        (void)fprintf(stderr, "gpu_nccl: no device\n");
        return EXIT_NO_DEVICE;
    }
    for (int i = 0; i < 2; i++) {
        const int code = end_open(&ends[i], i % count, (uint8_t)i);
        if (code != EXIT_SUCCESS) {
            (void)fprintf(stderr, "gpu_nccl: %s\n",
                          code == EXIT_NO_NCCL ? "no NCCL" : "a device failed");
            return code;
        }
        if (!check_copies(&ends[i])) {
            (void)fprintf(stderr, "gpu_nccl: copies are wrong\n");
            return EXIT_FAILURE;
        }
    }
    (void)printf("{\"name\": \"%s\", \"devices\": %d", ends[0].device->ops->name(ends[0].device),
                 count);
    if (!open_link(ends)) {
        close_link(ends);
        (void)printf(", \"linked\": false}\n");
        return count < 2 ? EXIT_REFUSED : EXIT_FAILURE;
    }
    gb_s = check_link(ends, argc > 1 ? atoi(argv[1]) : ROUNDS);
    close_link(ends);
    (void)printf(", \"linked\": true, \"host_to_host_gb_s\": %.2f}\n", gb_s);
    return gb_s > 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}

/* Doubles of the CUDA runtime calls that common/model/cuda makes. Everything is done when it is
 * asked for, in the order of the calls. A device address ends at a page that nobody may touch. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <cuda_runtime_api.h>

#include "tests/emu/emu_run.h"

#define PAGE ((size_t)4096)
#define ALLOCATIONS_MAX 4096
#define MEMORY_TOTAL ((size_t)8 << 30)

typedef struct allocation {
    unsigned char *address;
    size_t bytes;
    unsigned char *map;
    size_t map_bytes;
} allocation_t;

static allocation_t allocations[ALLOCATIONS_MAX];
static size_t memory_limit;
static size_t memory_used;
static uint64_t launches;
static cudaError_t last_error = cudaSuccess;

void emu_set_memory(size_t bytes)
{
    memory_limit = bytes;
}

size_t emu_memory_used(void)
{
    return memory_used;
}

uint64_t emu_launches(void)
{
    return launches;
}

static cudaError_t set_error(cudaError_t error)
{
    if (error != cudaSuccess) {
        last_error = error;
    }
    return error;
}

cudaError_t cudaMalloc(void **out, size_t bytes)
{
    const size_t limit = memory_limit == 0 ? MEMORY_TOTAL : memory_limit;
    const size_t data = (bytes + 15) / 16 * 16;
    const size_t pages = (data + PAGE - 1) / PAGE * PAGE;

    if (bytes > limit || memory_used > limit - bytes) {
        return set_error(cudaErrorMemoryAllocation);
    }
    for (size_t i = 0; i < ALLOCATIONS_MAX; i++) {
        allocation_t *a = &allocations[i];
        if (a->map != NULL) {
            continue;
        }
        a->map_bytes = pages + PAGE;
        a->map = mmap(NULL, a->map_bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (a->map == MAP_FAILED) {
            a->map = NULL;
            return set_error(cudaErrorMemoryAllocation);
        }
        (void)mprotect(a->map + pages, PAGE, PROT_NONE);
        a->address = a->map + pages - data;
        a->bytes = bytes;
        memory_used += bytes;
        if (bytes <= (size_t)64 << 20) {
            memset(a->map, 0xff, pages); /* NaN, as what nobody has written may be */
        }
        *out = a->address;
        return cudaSuccess;
    }
    return set_error(cudaErrorMemoryAllocation);
}

cudaError_t cudaFree(void *address)
{
    for (size_t i = 0; i < ALLOCATIONS_MAX && address != NULL; i++) {
        allocation_t *a = &allocations[i];
        if (a->map != NULL && a->address == address) {
            (void)munmap(a->map, a->map_bytes);
            memory_used -= a->bytes;
            memset(a, 0, sizeof(*a));
            return cudaSuccess;
        }
    }
    return address == NULL ? cudaSuccess : set_error(cudaErrorInvalidValue);
}

cudaError_t cudaHostAlloc(void **out, size_t bytes, unsigned int flags)
{
    (void)flags;
    *out = aligned_alloc(64, (bytes + 63) / 64 * 64);
    return *out == NULL ? set_error(cudaErrorMemoryAllocation) : cudaSuccess;
}

cudaError_t cudaFreeHost(void *address)
{
    free(address);
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream)
{
    (void)kind;
    (void)stream;
    memcpy(to, from, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream)
{
    (void)stream;
    memset(to, value, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *free_out, size_t *total_out)
{
    *total_out = memory_limit == 0 ? MEMORY_TOTAL : memory_limit;
    *free_out = *total_out - (memory_used < *total_out ? memory_used : *total_out);
    return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int *out)
{
    *out = 1;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device)
{
    return device == 0 ? cudaSuccess : set_error(cudaErrorInvalidDevice);
}

cudaError_t cudaDeviceGetAttribute(int *out, enum cudaDeviceAttr attribute, int device)
{
    (void)device;
    switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
        *out = 9;
        return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
        *out = 0;
        return cudaSuccess;
    case cudaDevAttrMultiProcessorCount:
        *out = 4; /* few, so that small tests cut work as large ones do on a device */
        return cudaSuccess;
    default:
        return set_error(cudaErrorInvalidValue);
    }
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned int flags)
{
    (void)flags;
    *out = malloc(1);
    return *out == NULL ? set_error(cudaErrorMemoryAllocation) : cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    free(stream);
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    (void)stream;
    return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags)
{
    (void)stream;
    (void)event;
    (void)flags;
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned int flags)
{
    (void)flags;
    *out = malloc(1);
    return *out == NULL ? set_error(cudaErrorMemoryAllocation) : cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    free(event);
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    (void)event;
    (void)stream;
    return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    (void)event;
    return cudaSuccess;
}

cudaError_t cudaHostRegister(void *address, size_t bytes, unsigned int flags)
{
    (void)flags;
    return address == NULL || bytes == 0 ? set_error(cudaErrorInvalidValue) : cudaSuccess;
}

cudaError_t cudaHostUnregister(void *address)
{
    (void)address;
    return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void *kernel, enum cudaFuncAttribute attribute, int value)
{
    (void)kernel;
    (void)attribute;
    return value <= 227 * 1024 ? cudaSuccess : set_error(cudaErrorInvalidValue);
}

cudaError_t cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **args,
                             size_t shared_bytes, cudaStream_t stream)
{
    const unsigned grid_of[3] = {grid.x, grid.y, grid.z};
    const unsigned block_of[3] = {block.x, block.y, block.z};

    (void)stream;
    launches++;
    switch (emu_launch(kernel, grid_of, block_of, args, shared_bytes)) {
    case 0:
        return cudaSuccess;
    case EMU_ERROR_KERNEL:
        return set_error(cudaErrorInvalidDeviceFunction);
    default:
        return set_error(cudaErrorInvalidConfiguration);
    }
}

cudaError_t cudaGetLastError(void)
{
    const cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

const char *cudaGetErrorName(cudaError_t error)
{
    return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaError";
}

const char *cudaGetErrorString(cudaError_t error)
{
    return error == cudaErrorMemoryAllocation ? "out of memory" : "error";
}

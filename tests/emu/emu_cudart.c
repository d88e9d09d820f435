/* Doubles of the CUDA runtime calls that common/model/cuda makes: devices, memory, copies, kernels.
 *
 * Memory that is not pinned is copied as the runtime does it: from it when it is asked for, to it
 * at once. A device address ends at a page that nobody may touch.
 *
 * There are several devices, each with memory of its own: a kernel or copy that touches another's
 * ends the process, unless its device was given access to it, and so does a launch to a stream of a
 * device that the thread has not chosen. Threads: one at a time in the process. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tests/emu/emu_cudart_internal.h"

#define PAGE ((size_t)4096)
#define ALLOCATIONS_MAX 4096
#define PINNED_MAX 256
#define ATTRIBUTES_MAX 1024
#define SHARED_BYTES_PLAIN ((size_t)48 * 1024) /* more wants cudaFuncSetAttribute() */
#define MEMORY_TOTAL ((size_t)8 << 30)
#define POISONED_MAX ((size_t)64 << 20) /* larger ones stay zero, and need no memory until used */

typedef struct allocation {
    unsigned char *address;
    size_t bytes;
    unsigned char *map;
    size_t map_bytes;
    int device;
} allocation_t;

/* Shared memory of a kernel, of which each device is told. */
typedef struct attribute {
    const void *kernel;
    int device;
    size_t bytes;
} attribute_t;

typedef struct pinned {
    const unsigned char *address;
    size_t bytes;
} pinned_t;

static allocation_t allocations[ALLOCATIONS_MAX];
static size_t allocation_end; /* behind the last one that was ever used */
static pinned_t pinned[PINNED_MAX];
static attribute_t attributes[ATTRIBUTES_MAX];
static size_t memory_limits[EMU_DEVICES];
static size_t memory_used[EMU_DEVICES];
static int device_count;                /* 0: not asked for yet */
static bool peers_possible = true;      /* devices can be given access to each other */
static unsigned access_of[EMU_DEVICES]; /* devices whose memory this one reaches, as bits */
static unsigned open_devices = ~0u;     /* whose memory is not protected just now */
static _Thread_local int current;       /* device */
static cudaError_t last_error = cudaSuccess;
static uint32_t fail_in; /* calls; 0 = none fails */

void emu_set_memory(size_t bytes)
{
    for (int d = 0; d < EMU_DEVICES; d++) {
        memory_limits[d] = bytes;
    }
}

void emu_set_memory_of(int device, size_t bytes)
{
    memory_limits[device] = bytes;
}

size_t emu_memory_used(void)
{
    size_t sum = 0;

    for (int d = 0; d < EMU_DEVICES; d++) {
        sum += memory_used[d];
    }
    return sum;
}

size_t emu_memory_used_of(int device)
{
    return memory_used[device];
}

void emu_set_devices(int count, bool peers)
{
    device_count = count;
    peers_possible = peers;
    for (int d = 0; d < EMU_DEVICES; d++) {
        access_of[d] = 1u << d;
    }
}

uint32_t emu_fail_at(uint32_t nth)
{
    const uint32_t left = fail_in;
    fail_in = nth;
    return left;
}

cudaError_t emu_set_error(cudaError_t error)
{
    if (error != cudaSuccess) {
        last_error = error;
    }
    return error;
}

/* A device that has failed fails ever after: from when there is the file that EMU_DEAD_FILE names.
 */
static bool is_dead(void)
{
    static const char *path;
    static const char *which; /* one device only */
    static bool asked;

    if (!asked) {
        path = getenv("EMU_DEAD_FILE");
        which = getenv("EMU_DEAD_DEVICE");
        asked = true;
    }
    if (which != NULL && atoi(which) != current) {
        return false;
    }
    return path != NULL && access(path, F_OK) == 0;
}

/* What the environment says, where nobody has said it before. */
static void find_devices(void)
{
    const char *count = getenv("EMU_DEVICES");
    const char *peers = getenv("EMU_PEERS");

    if (device_count == 0) {
        emu_set_devices(count == NULL ? EMU_DEVICES : atoi(count),
                        peers == NULL || atoi(peers) != 0);
    }
}

bool emu_fails(void)
{
    find_devices();
    if (!is_dead() && (fail_in == 0 || --fail_in > 0)) {
        return false;
    }
    last_error = cudaErrorUnknown;
    return true;
}

int emu_device(void)
{
    return current;
}

unsigned emu_access_of(int device)
{
    return access_of[device];
}

/* --- memory ----------------------------------------------------------------------------------- */

void emu_fault(const char *why)
{
    (void)fprintf(stderr, "emu: %s\n", why);
    _Exit(EMU_EXIT_FAULT);
}

static const allocation_t *allocation_of(const void *address)
{
    const unsigned char *at = address;

    for (size_t i = 0; i < allocation_end; i++) {
        if (allocations[i].map != NULL && at >= allocations[i].map &&
            at < allocations[i].map + allocations[i].map_bytes) {
            return &allocations[i];
        }
    }
    return NULL;
}

static void protect(const allocation_t *a)
{
    const int how = (open_devices >> a->device & 1u) != 0 ? PROT_READ | PROT_WRITE : PROT_NONE;

    (void)mprotect(a->map, a->map_bytes - PAGE, how);
}

void emu_open_memory(unsigned devices)
{
    const unsigned before = open_devices;

    open_devices = devices;
    for (size_t i = 0; i < allocation_end && before != devices; i++) {
        const allocation_t *a = &allocations[i];
        if (a->map != NULL && ((before ^ devices) >> a->device & 1u) != 0) {
            protect(a);
        }
    }
}

void emu_check_reach(unsigned devices, const void *address)
{
    const allocation_t *a = allocation_of(address);

    if (a != NULL && (devices >> a->device & 1u) == 0) {
        emu_fault("a copy touches the memory of a device that has not been opened to it");
    }
}

cudaError_t cudaMalloc(void **out, size_t bytes)
{
    const size_t limit = memory_limits[current] == 0 ? MEMORY_TOTAL : memory_limits[current];
    const size_t data = (bytes + 15) / 16 * 16;
    const size_t pages = (data + PAGE - 1) / PAGE * PAGE;

    if (emu_fails()) {
        return cudaErrorUnknown;
    }
    if (bytes > limit || memory_used[current] > limit - bytes) {
        return emu_set_error(cudaErrorMemoryAllocation);
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
            return emu_set_error(cudaErrorMemoryAllocation);
        }
        (void)mprotect(a->map + pages, PAGE, PROT_NONE);
        a->address = a->map + pages - data;
        a->bytes = bytes;
        a->device = current;
        allocation_end = i + 1 > allocation_end ? i + 1 : allocation_end;
        memory_used[current] += bytes;
        if (bytes <= POISONED_MAX) {
            memset(a->map, 0xff, pages); /* NaN, as what nobody has written may be */
        }
        protect(a);
        *out = a->address;
        return cudaSuccess;
    }
    return emu_set_error(cudaErrorMemoryAllocation);
}

cudaError_t cudaFree(void *address)
{
    emu_run_all(); /* as the runtime does */
    for (size_t i = 0; i < ALLOCATIONS_MAX && address != NULL; i++) {
        allocation_t *a = &allocations[i];
        if (a->map != NULL && a->address == address) {
            (void)munmap(a->map, a->map_bytes);
            memory_used[a->device] -= a->bytes;
            memset(a, 0, sizeof(*a));
            return cudaSuccess;
        }
    }
    return address == NULL ? cudaSuccess : emu_set_error(cudaErrorInvalidValue);
}

static bool add_pinned(const void *address, size_t bytes)
{
    for (size_t i = 0; i < PINNED_MAX; i++) {
        if (pinned[i].address == NULL) {
            pinned[i] = (pinned_t){address, bytes};
            return true;
        }
    }
    return false;
}

static bool remove_pinned(const void *address)
{
    for (size_t i = 0; i < PINNED_MAX; i++) {
        if (address != NULL && pinned[i].address == address) {
            pinned[i].address = NULL;
            return true;
        }
    }
    return false;
}

static bool is_pinned(const void *address)
{
    const unsigned char *at = address;

    for (size_t i = 0; i < PINNED_MAX; i++) {
        if (pinned[i].address != NULL && at >= pinned[i].address &&
            at < pinned[i].address + pinned[i].bytes) {
            return true;
        }
    }
    return false;
}

cudaError_t cudaHostAlloc(void **out, size_t bytes, unsigned int flags)
{
    if (emu_fails()) {
        return cudaErrorUnknown;
    }
    (void)flags;
    *out = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (*out == NULL || !add_pinned(*out, bytes)) {
        return emu_set_error(cudaErrorMemoryAllocation);
    }
    memset(*out, 0xff, bytes);
    return cudaSuccess;
}

cudaError_t cudaFreeHost(void *address)
{
    emu_run_all();
    (void)remove_pinned(address);
    free(address);
    return cudaSuccess;
}

cudaError_t cudaHostRegister(void *address, size_t bytes, unsigned int flags)
{
    if (emu_fails()) {
        return cudaErrorUnknown;
    }
    (void)flags;
    if (address == NULL || bytes == 0) {
        return emu_set_error(cudaErrorInvalidValue);
    }
    return add_pinned(address, bytes) ? cudaSuccess : emu_set_error(cudaErrorMemoryAllocation);
}

cudaError_t cudaHostUnregister(void *address)
{
    emu_run_all();
    return remove_pinned(address) ? cudaSuccess : emu_set_error(cudaErrorHostMemoryNotRegistered);
}

cudaError_t cudaHostGetDevicePointer(void **out, void *address, unsigned int flags)
{
    if (emu_fails()) {
        return cudaErrorUnknown;
    }
    (void)flags;
    *out = address;
    return is_pinned(address) ? cudaSuccess : emu_set_error(cudaErrorInvalidValue);
}

/* What is not pinned is read at once, its rows one behind the other. */
static bool snapshot(op_t *op)
{
    op->owned_bytes = op->rows * op->bytes;
    op->owned = malloc(op->owned_bytes == 0 ? 1 : op->owned_bytes);
    for (size_t row = 0; op->owned != NULL && row < op->rows; row++) {
        memcpy(op->owned + row * op->bytes, (const unsigned char *)op->from + row * op->from_pitch,
               op->bytes);
    }
    op->from_pitch = op->bytes;
    return op->owned != NULL;
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch,
                              size_t bytes, size_t rows, enum cudaMemcpyKind kind,
                              cudaStream_t stream)
{
    op_t op = {.kind = OP_COPY,
               .to = to,
               .from = from,
               .bytes = bytes,
               .rows = rows,
               .to_pitch = to_pitch,
               .from_pitch = from_pitch};
    cudaError_t error = cudaSuccess;

    if (emu_fails()) {
        return cudaErrorUnknown;
    }
    if (rows > 1 && (bytes > to_pitch || bytes > from_pitch)) {
        return emu_set_error(cudaErrorInvalidPitchValue);
    }
    if (kind == cudaMemcpyHostToDevice && !is_pinned(from) && !snapshot(&op)) {
        return emu_set_error(cudaErrorMemoryAllocation);
    }
    error = emu_add_op(stream, &op);
    if (error == cudaSuccess && kind == cudaMemcpyDeviceToHost && !is_pinned(to)) {
        if (emu_is_captured(stream)) {
            return emu_set_error(cudaErrorStreamCaptureUnsupported);
        }
        emu_run_stream(emu_stream_of(stream));
    }
    return error;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream)
{
    return cudaMemcpy2DAsync(to, bytes, from, bytes, bytes, 1, kind, stream);
}

/* Needs nobody's access, since it may go through the host. */
cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device,
                                size_t bytes, cudaStream_t stream)
{
    const op_t op = {.kind = OP_COPY,
                     .devices = 1u << to_device | 1u << from_device,
                     .to = to,
                     .from = from,
                     .bytes = bytes,
                     .rows = 1,
                     .to_pitch = bytes,
                     .from_pitch = bytes};

    if (emu_fails()) {
        return cudaErrorUnknown;
    }
    if (allocation_of(to) == NULL || allocation_of(to)->device != to_device ||
        allocation_of(from) == NULL || allocation_of(from)->device != from_device) {
        return emu_set_error(cudaErrorInvalidValue);
    }
    return emu_add_op(stream, &op);
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream)
{
    const op_t op = {.kind = OP_SET, .to = to, .value = value, .bytes = bytes};

    if (emu_fails()) {
        return cudaErrorUnknown;
    }
    return emu_add_op(stream, &op);
}

cudaError_t cudaMemGetInfo(size_t *free_out, size_t *total_out)
{
    if (emu_fails()) {
        return cudaErrorUnknown;
    }
    *total_out = memory_limits[current] == 0 ? MEMORY_TOTAL : memory_limits[current];
    *free_out =
        *total_out - (memory_used[current] < *total_out ? memory_used[current] : *total_out);
    return cudaSuccess;
}

/* --- device and kernels ------------------------------------------------------------------------
 */

cudaError_t cudaGetDeviceCount(int *out)
{
    if (emu_fails()) {
        return cudaErrorUnknown;
    }
    *out = device_count;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device)
{
    if (emu_fails()) {
        return cudaErrorUnknown;
    }
    if (device < 0 || device >= device_count) {
        return emu_set_error(cudaErrorInvalidDevice);
    }
    current = device;
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *out, int device, int peer)
{
    if (emu_fails()) {
        return cudaErrorUnknown;
    }
    if (device < 0 || device >= device_count || peer < 0 || peer >= device_count) {
        return emu_set_error(cudaErrorInvalidDevice);
    }
    *out = peers_possible && device != peer ? 1 : 0;
    return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned int flags)
{
    if (emu_fails()) {
        return cudaErrorUnknown;
    }
    if (flags != 0) {
        return emu_set_error(cudaErrorInvalidValue);
    }
    if (!peers_possible || peer < 0 || peer >= device_count || peer == current) {
        return emu_set_error(cudaErrorInvalidDevice);
    }
    if ((access_of[current] >> peer & 1u) != 0) {
        return emu_set_error(cudaErrorPeerAccessAlreadyEnabled);
    }
    access_of[current] |= 1u << peer;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *out, enum cudaDeviceAttr attribute, int device)
{
    if (emu_fails()) {
        return cudaErrorUnknown;
    }
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
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
        *out = 227 * 1024;
        return cudaSuccess;
    default:
        return emu_set_error(cudaErrorInvalidValue);
    }
}

cudaError_t cudaFuncSetAttribute(const void *kernel, enum cudaFuncAttribute attribute, int value)
{
    if (emu_fails()) {
        return cudaErrorUnknown;
    }
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value > 227 * 1024) {
        return emu_set_error(cudaErrorInvalidValue);
    }
    for (size_t i = 0; i < ATTRIBUTES_MAX; i++) {
        attribute_t *a = &attributes[i];
        if (a->kernel == NULL || (a->kernel == kernel && a->device == current)) {
            *a = (attribute_t){kernel, current, (size_t)value};
            return cudaSuccess;
        }
    }
    return emu_set_error(cudaErrorMemoryAllocation);
}

/* So much shared memory is what this kernel was given on the device that is chosen. */
static bool may_share(const void *kernel, size_t bytes)
{
    for (size_t i = 0; i < ATTRIBUTES_MAX && bytes > SHARED_BYTES_PLAIN; i++) {
        if (attributes[i].kernel == kernel && attributes[i].device == current) {
            return bytes <= attributes[i].bytes;
        }
    }
    return bytes <= SHARED_BYTES_PLAIN;
}

cudaError_t cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **args,
                             size_t shared_bytes, cudaStream_t stream)
{
    op_t op = {.kind = OP_LAUNCH,
               .from = kernel,
               .bytes = shared_bytes,
               .grid = {grid.x, grid.y, grid.z},
               .block = {block.x, block.y, block.z}};
    size_t param_bytes = 0;

    if (emu_fails()) {
        return cudaErrorUnknown;
    }
    if (emu_stream_device(stream) != current) {
        return emu_set_error(cudaErrorInvalidResourceHandle);
    }
    if (!may_share(kernel, shared_bytes)) {
        return emu_set_error(cudaErrorInvalidValue);
    }
    switch (emu_check(kernel, op.grid, op.block, shared_bytes, &param_bytes)) {
    case 0:
        break;
    case EMU_ERROR_KERNEL:
        return emu_set_error(cudaErrorInvalidDeviceFunction);
    default:
        return emu_set_error(cudaErrorInvalidConfiguration);
    }
    op.owned = malloc(param_bytes);
    if (op.owned == NULL) {
        return emu_set_error(cudaErrorMemoryAllocation);
    }
    op.owned_bytes = param_bytes;
    memcpy(op.owned, args[0], param_bytes);
    return emu_add_op(stream, &op);
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

/* Doubles of the CUDA runtime calls that common/model/cuda makes: devices, memory, copies, kernels.
 *
 * Memory that is not pinned is copied as the runtime does it: from it when it is asked for, to it
 * at once. A device address ends at a page that nobody may touch.
 *
 * There are several devices, each with memory of its own: a kernel or copy that touches another's
 * ends the process, unless its device was given access to it, and so does a launch to a stream of a
 * device that the thread has not chosen.
 *
 * Threads: any. One lock guards the tables and lists, for no longer than a call; see emu_streams.c
 * for who does what a stream was asked. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tests/emu/emu_cudart_internal.h"

#define PAGE ((size_t)4096)
#define ALLOCATIONS_MAX 4096
#define PINNED_MAX 1024
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
static _Thread_local cudaError_t last_error = cudaSuccess;
static uint32_t fail_in; /* calls; 0 = none fails */
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

void emu_lock(void)
{
    (void)pthread_mutex_lock(&mutex);
}

void emu_unlock(void)
{
    (void)pthread_mutex_unlock(&mutex);
}

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
    uint32_t left = 0;

    emu_lock();
    left = fail_in;
    fail_in = nth;
    emu_unlock();
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

/* What the environment says, where nobody has said it before. Locked. */
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
    bool now = false;

    emu_lock();
    find_devices();
    now = fail_in > 0 && --fail_in == 0;
    emu_unlock();
    if (!now && !is_dead()) {
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

/* Locked. */
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

/* Locked. */
static void protect(const allocation_t *a)
{
    const int how = (open_devices >> a->device & 1u) != 0 ? PROT_READ | PROT_WRITE : PROT_NONE;

    (void)mprotect(a->map, a->map_bytes - PAGE, how);
}

void emu_open_memory(unsigned devices)
{
    unsigned before = 0;

    emu_lock();
    before = open_devices;
    open_devices = devices;
    for (size_t i = 0; i < allocation_end && before != devices; i++) {
        const allocation_t *a = &allocations[i];
        if (a->map != NULL && ((before ^ devices) >> a->device & 1u) != 0) {
            protect(a);
        }
    }
    emu_unlock();
}

/* The device whose memory an address is in; -1: none's. */
static int device_of(const void *address)
{
    const allocation_t *a = NULL;
    int device = -1;

    emu_lock();
    a = allocation_of(address);
    device = a == NULL ? -1 : a->device;
    emu_unlock();
    return device;
}

void emu_check_reach(unsigned devices, const void *address)
{
    const int device = device_of(address);

    if (device >= 0 && (devices >> device & 1u) == 0) {
        emu_fault("a copy touches the memory of a device that has not been opened to it");
    }
}

/* Gives a piece of the device's memory that ends at a page nobody may touch; NULL: there is none.
 * Locked. */
static unsigned char *allocate(size_t bytes)
{
    const size_t limit = memory_limits[current] == 0 ? MEMORY_TOTAL : memory_limits[current];
    const size_t data = (bytes + 15) / 16 * 16;
    const size_t pages = (data + PAGE - 1) / PAGE * PAGE;

    if (bytes > limit || memory_used[current] > limit - bytes) {
        return NULL;
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
            return NULL;
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
        return a->address;
    }
    return NULL;
}

cudaError_t cudaMalloc(void **out, size_t bytes)
{
    unsigned char *address = NULL;

    if (emu_fails()) {
        return cudaErrorUnknown;
    }
    emu_lock();
    address = allocate(bytes);
    emu_unlock();
    if (address == NULL) {
        return emu_set_error(cudaErrorMemoryAllocation);
    }
    *out = address;
    return cudaSuccess;
}

/* Locked. */
static bool release(const void *address)
{
    for (size_t i = 0; i < ALLOCATIONS_MAX && address != NULL; i++) {
        allocation_t *a = &allocations[i];
        if (a->map != NULL && a->address == address) {
            (void)munmap(a->map, a->map_bytes);
            memory_used[a->device] -= a->bytes;
            memset(a, 0, sizeof(*a));
            return true;
        }
    }
    return address == NULL;
}

cudaError_t cudaFree(void *address)
{
    bool released = false;

    emu_run_all(); /* as the runtime does */
    emu_lock();
    released = release(address);
    emu_unlock();
    return released ? cudaSuccess : emu_set_error(cudaErrorInvalidValue);
}

static bool add_pinned(const void *address, size_t bytes)
{
    bool added = false;

    emu_lock();
    for (size_t i = 0; i < PINNED_MAX && !added; i++) {
        if (pinned[i].address == NULL) {
            pinned[i] = (pinned_t){address, bytes};
            added = true;
        }
    }
    emu_unlock();
    return added;
}

static bool remove_pinned(const void *address)
{
    bool removed = false;

    emu_lock();
    for (size_t i = 0; i < PINNED_MAX && !removed; i++) {
        if (address != NULL && pinned[i].address == address) {
            pinned[i].address = NULL;
            removed = true;
        }
    }
    emu_unlock();
    return removed;
}

static bool is_pinned(const void *address)
{
    const unsigned char *at = address;
    bool found = false;

    emu_lock();
    for (size_t i = 0; i < PINNED_MAX && !found; i++) {
        found = pinned[i].address != NULL && at >= pinned[i].address &&
                at < pinned[i].address + pinned[i].bytes;
    }
    emu_unlock();
    return found;
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
    if (device_of(to) != to_device || device_of(from) != from_device) {
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
    emu_lock();
    *total_out = memory_limits[current] == 0 ? MEMORY_TOTAL : memory_limits[current];
    *free_out =
        *total_out - (memory_used[current] < *total_out ? memory_used[current] : *total_out);
    emu_unlock();
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

/* Each process is a device of its own, and so is each that a test names: links know no two on one.
 */
cudaError_t cudaDeviceGetPCIBusId(char *out, int len, int device)
{
    const char *named = getenv("EMU_BUS");

    if (emu_fails()) {
        return cudaErrorUnknown;
    }
    if (named != NULL) {
        (void)snprintf(out, (size_t)len, "%s", named);
    } else {
        (void)snprintf(out, (size_t)len, "emu-%d-%d", (int)getpid(), device);
    }
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
    bool known = false;

    if (emu_fails()) {
        return cudaErrorUnknown;
    }
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value > 227 * 1024) {
        return emu_set_error(cudaErrorInvalidValue);
    }
    emu_lock();
    for (size_t i = 0; i < ATTRIBUTES_MAX && !known; i++) {
        attribute_t *a = &attributes[i];
        if (a->kernel == NULL || (a->kernel == kernel && a->device == current)) {
            *a = (attribute_t){kernel, current, (size_t)value};
            known = true;
        }
    }
    emu_unlock();
    return known ? cudaSuccess : emu_set_error(cudaErrorMemoryAllocation);
}

/* So much shared memory is what this kernel was given on the device that is chosen. */
static bool may_share(const void *kernel, size_t bytes)
{
    size_t most = SHARED_BYTES_PLAIN;

    emu_lock();
    for (size_t i = 0; i < ATTRIBUTES_MAX && attributes[i].kernel != NULL; i++) {
        if (attributes[i].kernel == kernel && attributes[i].device == current) {
            most = attributes[i].bytes > most ? attributes[i].bytes : most;
        }
    }
    emu_unlock();
    return bytes <= most;
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

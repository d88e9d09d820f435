/* Doubles of the CUDA runtime calls that common/model/cuda makes.
 *
 * Streams are as lazy as they may be: what is asked of one is done when somebody waits for it, and
 * of the others only what it waits for. So whoever reads without waiting, or fills a buffer again
 * that is still to be read, is found out. Memory that is not pinned is copied as the runtime does
 * it: from it when it is asked for, to it at once. A device address ends at a page that nobody may
 * touch. Threads: one at a time in the process. */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cuda_runtime_api.h>

#include "tests/emu/emu_run.h"

#define PAGE ((size_t)4096)
#define ALLOCATIONS_MAX 4096
#define PINNED_MAX 256
#define STREAMS_MAX 16
#define MEMORY_TOTAL ((size_t)8 << 30)
#define POISONED_MAX ((size_t)64 << 20) /* larger ones stay zero, and need no memory until used */

typedef struct allocation {
    unsigned char *address;
    size_t bytes;
    unsigned char *map;
    size_t map_bytes;
} allocation_t;

typedef struct pinned {
    const unsigned char *address;
    size_t bytes;
} pinned_t;

typedef enum op_kind { OP_COPY, OP_SET, OP_LAUNCH, OP_RECORD, OP_WAIT } op_kind_t;

typedef struct op {
    op_kind_t kind;
    struct op *next;
    void *to;
    const void *from; /* of a launch: the kernel */
    size_t bytes;     /* of a launch: of shared memory */
    int value;
    unsigned grid[3];
    unsigned block[3];
    struct CUevent_st *event;
    uint64_t ticket;      /* of the record that is waited for */
    unsigned char *owned; /* what is copied from, or the kernel's parameter */
    size_t owned_bytes;
} op_t;

typedef struct op_list {
    op_t *first;
    op_t *last;
} op_list_t;

struct CUgraph_st {
    op_list_t ops;
};

struct CUgraphExec_st {
    op_list_t ops;
};

struct CUstream_st {
    op_list_t ops;
    struct CUgraph_st *captured; /* what it is asked goes there, and is not done */
    bool used;                   /* its place in the list */
};

struct CUevent_st {
    struct CUstream_st *stream; /* of the last record */
    uint64_t asked;             /* ticket of the last record; 0: none */
    uint64_t done;              /* of the last one that was reached */
};

static allocation_t allocations[ALLOCATIONS_MAX];
static pinned_t pinned[PINNED_MAX];
static struct CUstream_st streams[STREAMS_MAX] = {
    {.used = true}}; /* the first is the default one */
static size_t memory_limit;
static size_t memory_used;
static uint64_t launches;
static uint64_t graphs; /* launched */
static uint64_t tickets;
static cudaError_t last_error = cudaSuccess;
static uint32_t fail_in; /* calls; 0 = none fails */

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

uint32_t emu_fail_at(uint32_t nth)
{
    const uint32_t left = fail_in;
    fail_in = nth;
    return left;
}

uint64_t emu_graphs(void)
{
    return graphs;
}

static cudaError_t set_error(cudaError_t error)
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
    static bool asked;

    if (!asked) {
        path = getenv("EMU_DEAD_FILE");
        asked = true;
    }
    return path != NULL && access(path, F_OK) == 0;
}

/* Is this the call that a test wants to fail? */
static bool fails(void)
{
    if (!is_dead() && (fail_in == 0 || --fail_in > 0)) {
        return false;
    }
    last_error = cudaErrorUnknown;
    return true;
}

/* --- streams ---------------------------------------------------------------------------------- */

static struct CUstream_st *stream_of(cudaStream_t stream)
{
    return stream == NULL ? &streams[0] : stream;
}

static void run_until(struct CUevent_st *event, uint64_t ticket);

static void run_op(op_t *op)
{
    switch (op->kind) {
    case OP_COPY:
        memcpy(op->to, op->owned != NULL ? op->owned : op->from, op->bytes);
        break;
    case OP_SET:
        memset(op->to, op->value, op->bytes);
        break;
    case OP_LAUNCH:
        launches++;
        emu_launch(op->from, op->grid, op->block, op->owned, op->bytes);
        break;
    case OP_RECORD:
        op->event->done = op->ticket;
        break;
    case OP_WAIT:
        run_until(op->event, op->ticket);
        break;
    }
}

static bool run_next(struct CUstream_st *s)
{
    op_t *op = s->ops.first;

    if (op == NULL) {
        return false;
    }
    s->ops.first = op->next;
    s->ops.last = s->ops.first == NULL ? NULL : s->ops.last;
    run_op(op);
    free(op->owned);
    free(op);
    return true;
}

static void run_stream(struct CUstream_st *s)
{
    while (run_next(s)) {
    }
}

static void run_until(struct CUevent_st *event, uint64_t ticket)
{
    while (event->done < ticket) {
        if (!run_next(event->stream)) {
            (void)fprintf(stderr, "emu: a stream waits for an event that does not come\n");
            _Exit(EMU_EXIT_FAULT);
        }
    }
}

/* The last one first: they should not depend on each other. */
static void run_all(void)
{
    for (size_t i = STREAMS_MAX; i-- > 0;) {
        run_stream(&streams[i]);
    }
}

static bool append(op_list_t *list, const op_t *wanted)
{
    op_t *op = malloc(sizeof(*op));

    if (op == NULL) {
        return false;
    }
    *op = *wanted;
    op->next = NULL;
    if (list->last == NULL) {
        list->first = op;
    } else {
        list->last->next = op;
    }
    list->last = op;
    return true;
}

static void free_ops(op_list_t *list)
{
    while (list->first != NULL) {
        op_t *op = list->first;
        list->first = op->next;
        free(op->owned);
        free(op);
    }
    list->last = NULL;
}

static bool append_copies(op_list_t *list, const op_list_t *from)
{
    for (const op_t *op = from->first; op != NULL; op = op->next) {
        op_t copy = *op;
        if (op->owned != NULL) {
            copy.owned = malloc(op->owned_bytes);
            if (copy.owned == NULL) {
                return false;
            }
            memcpy(copy.owned, op->owned, op->owned_bytes);
        }
        if (!append(list, &copy)) {
            free(copy.owned);
            return false;
        }
    }
    return true;
}

static cudaError_t add_op(cudaStream_t stream, const op_t *wanted)
{
    struct CUstream_st *s = stream_of(stream);

    if (!append(s->captured != NULL ? &s->captured->ops : &s->ops, wanted)) {
        free(wanted->owned);
        return set_error(cudaErrorMemoryAllocation);
    }
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned int flags)
{
    if (fails()) {
        return cudaErrorUnknown;
    }
    (void)flags;
    for (size_t i = 0; i < STREAMS_MAX; i++) {
        if (!streams[i].used) {
            streams[i] = (struct CUstream_st){.used = true};
            *out = &streams[i];
            return cudaSuccess;
        }
    }
    return set_error(cudaErrorMemoryAllocation);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    run_stream(stream);
    stream->used = false;
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    if (fails()) {
        return cudaErrorUnknown;
    }
    if (stream_of(stream)->captured != NULL) {
        return set_error(cudaErrorStreamCaptureUnsupported);
    }
    run_stream(stream_of(stream));
    return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags)
{
    const op_t op = {.kind = OP_WAIT, .event = event, .ticket = event->asked};

    if (fails()) {
        return cudaErrorUnknown;
    }
    (void)flags;
    return add_op(stream, &op);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned int flags)
{
    if (fails()) {
        return cudaErrorUnknown;
    }
    (void)flags;
    *out = calloc(1, sizeof(**out));
    return *out == NULL ? set_error(cudaErrorMemoryAllocation) : cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    run_all(); /* nobody refers to it any more */
    free(event);
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    const op_t op = {.kind = OP_RECORD, .event = event, .ticket = ++tickets};

    if (fails()) {
        return cudaErrorUnknown;
    }
    event->stream = stream_of(stream);
    event->asked = op.ticket;
    return add_op(stream, &op);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    if (fails()) {
        return cudaErrorUnknown;
    }
    run_until(event, event->asked);
    return cudaSuccess;
}

/* --- graphs: what is captured is done at each launch --------------------------------------------
 */

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode)
{
    struct CUstream_st *s = stream_of(stream);

    (void)mode;
    if (fails()) {
        return cudaErrorUnknown;
    }
    if (s == &streams[0] || s->captured != NULL) {
        return set_error(cudaErrorStreamCaptureUnsupported);
    }
    s->captured = calloc(1, sizeof(*s->captured));
    return s->captured == NULL ? set_error(cudaErrorMemoryAllocation) : cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *out)
{
    *out = stream->captured; /* also where it fails, so that it is not lost */
    stream->captured = NULL;
    if (fails()) {
        return cudaErrorUnknown;
    }
    return *out == NULL ? set_error(cudaErrorStreamCaptureUnsupported) : cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *out, cudaGraph_t graph, unsigned long long flags)
{
    struct CUgraphExec_st *exec = NULL;

    (void)flags;
    if (fails()) {
        return cudaErrorUnknown;
    }
    exec = calloc(1, sizeof(*exec));
    if (exec == NULL || !append_copies(&exec->ops, &graph->ops)) {
        return set_error(cudaErrorMemoryAllocation);
    }
    *out = exec;
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream)
{
    if (fails()) {
        return cudaErrorUnknown;
    }
    graphs++;
    return append_copies(&stream_of(stream)->ops, &exec->ops)
               ? cudaSuccess
               : set_error(cudaErrorMemoryAllocation);
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    free_ops(&graph->ops);
    free(graph);
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec)
{
    free_ops(&exec->ops);
    free(exec);
    return cudaSuccess;
}

/* --- memory ----------------------------------------------------------------------------------- */

cudaError_t cudaMalloc(void **out, size_t bytes)
{
    const size_t limit = memory_limit == 0 ? MEMORY_TOTAL : memory_limit;
    const size_t data = (bytes + 15) / 16 * 16;
    const size_t pages = (data + PAGE - 1) / PAGE * PAGE;

    if (fails()) {
        return cudaErrorUnknown;
    }
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
        if (bytes <= POISONED_MAX) {
            memset(a->map, 0xff, pages); /* NaN, as what nobody has written may be */
        }
        *out = a->address;
        return cudaSuccess;
    }
    return set_error(cudaErrorMemoryAllocation);
}

cudaError_t cudaFree(void *address)
{
    run_all(); /* as the runtime does */
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
    if (fails()) {
        return cudaErrorUnknown;
    }
    (void)flags;
    *out = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (*out == NULL || !add_pinned(*out, bytes)) {
        return set_error(cudaErrorMemoryAllocation);
    }
    memset(*out, 0xff, bytes);
    return cudaSuccess;
}

cudaError_t cudaFreeHost(void *address)
{
    run_all();
    (void)remove_pinned(address);
    free(address);
    return cudaSuccess;
}

cudaError_t cudaHostRegister(void *address, size_t bytes, unsigned int flags)
{
    if (fails()) {
        return cudaErrorUnknown;
    }
    (void)flags;
    if (address == NULL || bytes == 0) {
        return set_error(cudaErrorInvalidValue);
    }
    return add_pinned(address, bytes) ? cudaSuccess : set_error(cudaErrorMemoryAllocation);
}

cudaError_t cudaHostUnregister(void *address)
{
    run_all();
    return remove_pinned(address) ? cudaSuccess : set_error(cudaErrorHostMemoryNotRegistered);
}

cudaError_t cudaHostGetDevicePointer(void **out, void *address, unsigned int flags)
{
    if (fails()) {
        return cudaErrorUnknown;
    }
    (void)flags;
    *out = address;
    return is_pinned(address) ? cudaSuccess : set_error(cudaErrorInvalidValue);
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream)
{
    op_t op = {.kind = OP_COPY, .to = to, .from = from, .bytes = bytes};
    cudaError_t error = cudaSuccess;

    if (fails()) {
        return cudaErrorUnknown;
    }
    if (kind == cudaMemcpyHostToDevice && !is_pinned(from)) {
        op.owned = malloc(bytes == 0 ? 1 : bytes);
        if (op.owned == NULL) {
            return set_error(cudaErrorMemoryAllocation);
        }
        op.owned_bytes = bytes;
        memcpy(op.owned, from, bytes);
    }
    error = add_op(stream, &op);
    if (error == cudaSuccess && kind == cudaMemcpyDeviceToHost && !is_pinned(to)) {
        if (stream_of(stream)->captured != NULL) {
            return set_error(cudaErrorStreamCaptureUnsupported);
        }
        run_stream(stream_of(stream));
    }
    return error;
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream)
{
    const op_t op = {.kind = OP_SET, .to = to, .value = value, .bytes = bytes};

    return add_op(stream, &op);
}

cudaError_t cudaMemGetInfo(size_t *free_out, size_t *total_out)
{
    if (fails()) {
        return cudaErrorUnknown;
    }
    *total_out = memory_limit == 0 ? MEMORY_TOTAL : memory_limit;
    *free_out = *total_out - (memory_used < *total_out ? memory_used : *total_out);
    return cudaSuccess;
}

/* --- device and kernels ------------------------------------------------------------------------
 */

cudaError_t cudaGetDeviceCount(int *out)
{
    if (fails()) {
        return cudaErrorUnknown;
    }
    *out = 1;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device)
{
    if (fails()) {
        return cudaErrorUnknown;
    }
    return device == 0 ? cudaSuccess : set_error(cudaErrorInvalidDevice);
}

cudaError_t cudaDeviceGetAttribute(int *out, enum cudaDeviceAttr attribute, int device)
{
    if (fails()) {
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
        return set_error(cudaErrorInvalidValue);
    }
}

cudaError_t cudaFuncSetAttribute(const void *kernel, enum cudaFuncAttribute attribute, int value)
{
    if (fails()) {
        return cudaErrorUnknown;
    }
    (void)kernel;
    (void)attribute;
    return value <= 227 * 1024 ? cudaSuccess : set_error(cudaErrorInvalidValue);
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

    if (fails()) {
        return cudaErrorUnknown;
    }
    switch (emu_check(kernel, op.grid, op.block, shared_bytes, &param_bytes)) {
    case 0:
        break;
    case EMU_ERROR_KERNEL:
        return set_error(cudaErrorInvalidDeviceFunction);
    default:
        return set_error(cudaErrorInvalidConfiguration);
    }
    op.owned = malloc(param_bytes);
    if (op.owned == NULL) {
        return set_error(cudaErrorMemoryAllocation);
    }
    op.owned_bytes = param_bytes;
    memcpy(op.owned, args[0], param_bytes);
    return add_op(stream, &op);
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

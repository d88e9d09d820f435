/* Doubles of the CUDA runtime calls that common/model/cuda makes.
 *
 * Streams are as lazy as they may be: what is asked of one is done when somebody waits for it, and
 * of the others only what it waits for. So whoever reads without waiting, or fills a buffer again
 * that is still to be read, is found out. Memory that is not pinned is copied as the runtime does
 * it: from it when it is asked for, to it at once. A device address ends at a page that nobody may
 * touch.
 *
 * Threads: any. `lock` guards the tables and lists, for no longer than a call; who does what a
 * stream was asked holds `turn`, one operation at a time, so a thread that only asks or looks never
 * waits for a kernel. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <cuda_runtime_api.h>

#include "tests/emu/emu_run.h"

#define PAGE ((size_t)4096)
#define ALLOCATIONS_MAX 4096
#define PINNED_MAX 1024
#define STREAMS_MAX 256
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

typedef enum op_kind { OP_COPY, OP_SET, OP_LAUNCH, OP_RECORD, OP_WAIT, OP_WORK } op_kind_t;

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
    bool (*run)(void *ctx); /* of another library */
    void (*drop)(void *ctx);
    void *ctx;
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
static _Thread_local cudaError_t last_error = cudaSuccess;
static uint32_t fail_in; /* calls; 0 = none fails */
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;
static atomic_bool turn_wanted; /* by who does not wait for it: relaxed, only a hint */

static void lock(void)
{
    (void)pthread_mutex_lock(&mutex);
}

static void unlock(void)
{
    (void)pthread_mutex_unlock(&mutex);
}

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
    bool now = false;

    lock();
    now = fail_in > 0 && --fail_in == 0;
    unlock();
    if (!now && !is_dead()) {
        return false;
    }
    last_error = cudaErrorUnknown;
    return true;
}

bool emu_fails(void)
{
    return fails();
}

/* --- streams ---------------------------------------------------------------------------------- */

typedef enum progress { STREAM_EMPTY, STREAM_STUCK, STREAM_WENT_ON } progress_t;

static void nap(long ns)
{
    const struct timespec time = {.tv_nsec = ns};
    (void)nanosleep(&time, NULL);
}

static void turn_begin(void)
{
    (void)pthread_mutex_lock(&turn);
}

/* For who does not wait: NULL is no answer yet, so it shall have the next one. */
static bool turn_try(void)
{
    if (pthread_mutex_trylock(&turn) == 0) {
        return true;
    }
    atomic_store_explicit(&turn_wanted, true, memory_order_relaxed);
    return false;
}

static void turn_end(void)
{
    (void)pthread_mutex_unlock(&turn);
    if (atomic_exchange_explicit(&turn_wanted, false, memory_order_relaxed)) {
        nap(200000);
    }
}

static struct CUstream_st *stream_of(cudaStream_t stream)
{
    return stream == NULL ? &streams[0] : stream;
}

static bool run_until(struct CUevent_st *event, uint64_t ticket);

/* False: it has to be tried again later. */
static bool run_op(op_t *op)
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
        lock();
        op->event->done = op->ticket;
        unlock();
        break;
    case OP_WAIT:
        return run_until(op->event, op->ticket);
    case OP_WORK:
        return op->run(op->ctx);
    }
    return true;
}

static void op_free(op_t *op)
{
    if (op->drop != NULL) {
        op->drop(op->ctx);
    }
    free(op->owned);
    free(op);
}

/* Does what is first in a stream. It stays there until it is done: whoever finds the stream empty
 * has waited for all of it. The caller has the turn. */
static progress_t run_next(struct CUstream_st *s)
{
    op_t *op = NULL;

    lock();
    op = s->ops.first;
    unlock();
    if (op == NULL) {
        return STREAM_EMPTY;
    }
    if (!run_op(op)) {
        return STREAM_STUCK;
    }
    lock();
    s->ops.first = op->next;
    s->ops.last = s->ops.first == NULL ? NULL : s->ops.last;
    unlock();
    op_free(op);
    return STREAM_WENT_ON;
}

/* Waits for all of it. */
static void run_stream(struct CUstream_st *s)
{
    progress_t progress = STREAM_WENT_ON;

    while (progress != STREAM_EMPTY) {
        turn_begin();
        progress = run_next(s);
        turn_end();
        if (progress == STREAM_STUCK) {
            nap(50000);
        }
    }
}

static bool is_reached(const struct CUevent_st *event, uint64_t ticket)
{
    bool reached = false;

    lock();
    reached = event->done >= ticket;
    unlock();
    return reached;
}

static progress_t run_towards(const struct CUevent_st *event)
{
    const progress_t progress = run_next(event->stream);

    if (progress == STREAM_EMPTY) {
        (void)fprintf(stderr, "emu: a stream waits for an event that does not come\n");
        _Exit(EMU_EXIT_FAULT);
    }
    return progress;
}

/* The caller has the turn. */
static bool run_until(struct CUevent_st *event, uint64_t ticket)
{
    while (!is_reached(event, ticket)) {
        if (run_towards(event) == STREAM_STUCK) {
            return false;
        }
    }
    return true;
}

/* The last one first: they should not depend on each other. */
static void run_all(void)
{
    for (size_t i = STREAMS_MAX; i-- > 0;) {
        run_stream(&streams[i]);
    }
}

/* As far as it goes without waiting for others than us. */
static void run_all_there_is(void)
{
    turn_begin();
    for (size_t i = STREAMS_MAX; i-- > 0;) {
        while (run_next(&streams[i]) == STREAM_WENT_ON) {
        }
    }
    turn_end();
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
        op_free(op);
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
    bool added = false;

    lock();
    added = append(s->captured != NULL ? &s->captured->ops : &s->ops, wanted);
    unlock();
    if (!added) {
        free(wanted->owned);
        return set_error(cudaErrorMemoryAllocation);
    }
    return cudaSuccess;
}

bool emu_add_work(struct CUstream_st *stream, bool (*run)(void *ctx), void (*drop)(void *ctx),
                  void *ctx)
{
    const op_t op = {.kind = OP_WORK, .run = run, .drop = drop, .ctx = ctx};

    return add_op(stream, &op) == cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned int flags)
{
    struct CUstream_st *found = NULL;

    if (fails()) {
        return cudaErrorUnknown;
    }
    (void)flags;
    lock();
    for (size_t i = 0; i < STREAMS_MAX && found == NULL; i++) {
        if (!streams[i].used) {
            streams[i] = (struct CUstream_st){.used = true};
            found = &streams[i];
        }
    }
    unlock();
    if (found == NULL) {
        return set_error(cudaErrorMemoryAllocation);
    }
    *out = found;
    return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    run_stream(stream);
    lock();
    stream->used = false;
    unlock();
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

/* Whoever looks is waiting for it: a little of it is done, if nobody else does something. */
cudaError_t cudaStreamQuery(cudaStream_t stream)
{
    progress_t progress = STREAM_STUCK;

    if (fails()) {
        return cudaErrorUnknown;
    }
    if (turn_try()) {
        progress = run_next(stream_of(stream));
        turn_end();
    }
    return progress == STREAM_EMPTY ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags)
{
    op_t op = {.kind = OP_WAIT, .event = event};

    if (fails()) {
        return cudaErrorUnknown;
    }
    (void)flags;
    lock();
    op.ticket = event->asked;
    unlock();
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
    run_all_there_is(); /* nobody refers to it any more */
    free(event);
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    op_t op = {.kind = OP_RECORD, .event = event};

    if (fails()) {
        return cudaErrorUnknown;
    }
    lock();
    op.ticket = ++tickets;
    event->stream = stream_of(stream);
    event->asked = op.ticket;
    unlock();
    return add_op(stream, &op);
}

cudaError_t cudaEventQuery(cudaEvent_t event)
{
    if (fails()) {
        return cudaErrorUnknown;
    }
    if (!is_reached(event, event->asked) && turn_try()) {
        (void)run_next(event->stream);
        turn_end();
    }
    return is_reached(event, event->asked) ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    if (fails()) {
        return cudaErrorUnknown;
    }
    while (!is_reached(event, event->asked)) {
        progress_t progress = STREAM_WENT_ON;
        turn_begin();
        if (!is_reached(event, event->asked)) {
            progress = run_towards(event);
        }
        turn_end();
        if (progress == STREAM_STUCK) {
            nap(50000);
        }
    }
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
    bool copied = false;

    if (fails()) {
        return cudaErrorUnknown;
    }
    lock();
    graphs++;
    copied = append_copies(&stream_of(stream)->ops, &exec->ops);
    unlock();
    return copied ? cudaSuccess : set_error(cudaErrorMemoryAllocation);
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

/* Gives a piece of memory that ends at a page nobody may touch; NULL: there is none. Locked. */
static unsigned char *allocate(size_t bytes)
{
    const size_t limit = memory_limit == 0 ? MEMORY_TOTAL : memory_limit;
    const size_t data = (bytes + 15) / 16 * 16;
    const size_t pages = (data + PAGE - 1) / PAGE * PAGE;

    if (bytes > limit || memory_used > limit - bytes) {
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
        memory_used += bytes;
        if (bytes <= POISONED_MAX) {
            memset(a->map, 0xff, pages); /* NaN, as what nobody has written may be */
        }
        return a->address;
    }
    return NULL;
}

cudaError_t cudaMalloc(void **out, size_t bytes)
{
    unsigned char *address = NULL;

    if (fails()) {
        return cudaErrorUnknown;
    }
    lock();
    address = allocate(bytes);
    unlock();
    if (address == NULL) {
        return set_error(cudaErrorMemoryAllocation);
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
            memory_used -= a->bytes;
            memset(a, 0, sizeof(*a));
            return true;
        }
    }
    return address == NULL;
}

cudaError_t cudaFree(void *address)
{
    bool released = false;

    run_all(); /* as the runtime does */
    lock();
    released = release(address);
    unlock();
    return released ? cudaSuccess : set_error(cudaErrorInvalidValue);
}

static bool add_pinned(const void *address, size_t bytes)
{
    bool added = false;

    lock();
    for (size_t i = 0; i < PINNED_MAX && !added; i++) {
        if (pinned[i].address == NULL) {
            pinned[i] = (pinned_t){address, bytes};
            added = true;
        }
    }
    unlock();
    return added;
}

static bool remove_pinned(const void *address)
{
    bool removed = false;

    lock();
    for (size_t i = 0; i < PINNED_MAX && !removed; i++) {
        if (address != NULL && pinned[i].address == address) {
            pinned[i].address = NULL;
            removed = true;
        }
    }
    unlock();
    return removed;
}

static bool is_pinned(const void *address)
{
    const unsigned char *at = address;
    bool found = false;

    lock();
    for (size_t i = 0; i < PINNED_MAX && !found; i++) {
        found = pinned[i].address != NULL && at >= pinned[i].address &&
                at < pinned[i].address + pinned[i].bytes;
    }
    unlock();
    return found;
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
    lock();
    *total_out = memory_limit == 0 ? MEMORY_TOTAL : memory_limit;
    *free_out = *total_out - (memory_used < *total_out ? memory_used : *total_out);
    unlock();
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

/* Each process is a device of its own, and so is each that a test names: links know no two on one.
 */
cudaError_t cudaDeviceGetPCIBusId(char *out, int len, int device)
{
    const char *named = getenv("EMU_BUS");

    if (fails()) {
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

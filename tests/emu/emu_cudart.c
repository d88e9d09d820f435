/* Doubles of the CUDA runtime calls that common/model/cuda makes.
 *
 * Streams are as lazy as they may be: what is asked of one is done when somebody waits for it, and
 * of the others only what it waits for. So whoever reads without waiting, or fills a buffer again
 * that is still to be read, is found out. Memory that is not pinned is copied as the runtime does
 * it: from it when it is asked for, to it at once. A device address ends at a page that nobody may
 * touch.
 *
 * There are several devices, each with memory of its own: a kernel or copy that touches another's
 * ends the process, unless its device was given access to it, and so does a launch to a stream of a
 * device that the thread has not chosen. Threads: one at a time in the process. */
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
#define STREAMS_MAX 64
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

typedef enum op_kind { OP_COPY, OP_SET, OP_LAUNCH, OP_RECORD, OP_WAIT } op_kind_t;

typedef struct op {
    op_kind_t kind;
    struct op *next;
    unsigned devices; /* whose memory it may touch, as bits */
    void *to;
    const void *from; /* of a launch: the kernel */
    size_t bytes;     /* of a launch: of shared memory; of a copy: of a row */
    size_t rows;      /* of a copy; [pitch] bytes apart */
    size_t to_pitch;
    size_t from_pitch;
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
    int device;
    bool busy;                   /* an op of it is being done */
    struct CUgraph_st *captured; /* what it is asked goes there, and is not done */
    bool used;                   /* its place in the list */
};

struct CUevent_st {
    int device;
    struct CUstream_st *stream; /* of the last record */
    uint64_t asked;             /* ticket of the last record; 0: none */
    uint64_t done;              /* of the last one that was reached */
};

static allocation_t allocations[ALLOCATIONS_MAX];
static size_t allocation_end; /* behind the last one that was ever used */
static pinned_t pinned[PINNED_MAX];
static attribute_t attributes[ATTRIBUTES_MAX];
static struct CUstream_st streams[STREAMS_MAX]; /* the first ones: the devices' default ones */
static size_t memory_limits[EMU_DEVICES];
static size_t memory_used[EMU_DEVICES];
static int device_count;                /* 0: not asked for yet */
static bool peers_possible = true;      /* devices can be given access to each other */
static unsigned access_of[EMU_DEVICES]; /* devices whose memory this one reaches, as bits */
static unsigned open_devices = ~0u;     /* whose memory is not protected just now */
static _Thread_local int current;       /* device */
static uint32_t stream_order;           /* random state; 0: lazy */
static uint64_t launches;
static uint64_t graphs; /* launched */
static uint64_t tickets;
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

void emu_set_devices(int count, bool peers)
{
    device_count = count;
    peers_possible = peers;
    for (int d = 0; d < EMU_DEVICES; d++) {
        access_of[d] = 1u << d;
    }
}

void emu_set_streams(uint32_t seed)
{
    stream_order = seed;
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

/* Is this the call that a test wants to fail? */
static bool fails(void)
{
    find_devices();
    if (!is_dead() && (fail_in == 0 || --fail_in > 0)) {
        return false;
    }
    last_error = cudaErrorUnknown;
    return true;
}

/* --- streams ---------------------------------------------------------------------------------- */

static struct CUstream_st *stream_of(cudaStream_t stream)
{
    if (stream != NULL) {
        return stream;
    }
    streams[current].device = current;
    streams[current].used = true;
    return &streams[current];
}

static void run_until(struct CUevent_st *event, uint64_t ticket);

static void fault(const char *why)
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

/* Memory of these devices can be touched, and of others it cannot. */
static void open_memory(unsigned devices)
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

static void check_reach(const op_t *op, const void *address)
{
    const allocation_t *a = allocation_of(address);

    if (a != NULL && (op->devices >> a->device & 1u) == 0) {
        fault("a copy touches the memory of a device that has not been opened to it");
    }
}

static void run_copy(const op_t *op)
{
    const unsigned char *from = op->owned != NULL ? op->owned : op->from;
    unsigned char *to = op->to;

    check_reach(op, op->to);
    check_reach(op, op->from);
    for (size_t row = 0; row < op->rows; row++) {
        memcpy(to + row * op->to_pitch, from + row * op->from_pitch, op->bytes);
    }
}

static void run_op(op_t *op)
{
    if (op->kind != OP_WAIT && op->kind != OP_RECORD) {
        open_memory(op->devices);
    }
    switch (op->kind) {
    case OP_COPY:
        run_copy(op);
        break;
    case OP_SET:
        check_reach(op, op->to);
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
    if (s->busy) {
        fault("streams wait for each other");
    }
    s->busy = true;
    s->ops.first = op->next;
    s->ops.last = s->ops.first == NULL ? NULL : s->ops.last;
    run_op(op);
    free(op->owned);
    free(op);
    s->busy = false;
    return true;
}

/* In a random order, streams that nobody waits for go on, too. */
static void run_others(void)
{
    while (stream_order != 0) {
        struct CUstream_st *s = NULL;
        const op_t *op = NULL;
        stream_order = stream_order * 1664525u + 1013904223u;
        stream_order += stream_order == 0 ? 1 : 0;
        if ((stream_order >> 16) % 4 == 0) {
            return;
        }
        s = &streams[(stream_order >> 20) % STREAMS_MAX];
        op = s->ops.first;
        if (op != NULL && !s->busy && (op->kind != OP_WAIT || op->event->done >= op->ticket)) {
            (void)run_next(s);
        }
    }
}

static void run_stream(struct CUstream_st *s)
{
    do {
        run_others();
    } while (run_next(s));
}

static void run_until(struct CUevent_st *event, uint64_t ticket)
{
    while (event->done < ticket) {
        run_others();
        if (event->done < ticket && !run_next(event->stream)) {
            fault("a stream waits for an event that does not come");
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
    op_t op = *wanted;

    op.devices |= access_of[s->device];
    if (!append(s->captured != NULL ? &s->captured->ops : &s->ops, &op)) {
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
    for (size_t i = EMU_DEVICES; i < STREAMS_MAX; i++) {
        if (!streams[i].used) {
            streams[i] = (struct CUstream_st){.device = current, .used = true};
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
    if (*out == NULL) {
        return set_error(cudaErrorMemoryAllocation);
    }
    (*out)->device = current;
    return cudaSuccess;
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
    if (event->device != stream_of(stream)->device) {
        return set_error(cudaErrorInvalidResourceHandle);
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
    if (stream == NULL || s->captured != NULL) {
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
    const size_t limit = memory_limits[current] == 0 ? MEMORY_TOTAL : memory_limits[current];
    const size_t data = (bytes + 15) / 16 * 16;
    const size_t pages = (data + PAGE - 1) / PAGE * PAGE;

    if (fails()) {
        return cudaErrorUnknown;
    }
    if (bytes > limit || memory_used[current] > limit - bytes) {
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
    return set_error(cudaErrorMemoryAllocation);
}

cudaError_t cudaFree(void *address)
{
    run_all(); /* as the runtime does */
    for (size_t i = 0; i < ALLOCATIONS_MAX && address != NULL; i++) {
        allocation_t *a = &allocations[i];
        if (a->map != NULL && a->address == address) {
            (void)munmap(a->map, a->map_bytes);
            memory_used[a->device] -= a->bytes;
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

    if (fails()) {
        return cudaErrorUnknown;
    }
    if (rows > 1 && (bytes > to_pitch || bytes > from_pitch)) {
        return set_error(cudaErrorInvalidPitchValue);
    }
    if (kind == cudaMemcpyHostToDevice && !is_pinned(from) && !snapshot(&op)) {
        return set_error(cudaErrorMemoryAllocation);
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

    if (fails()) {
        return cudaErrorUnknown;
    }
    if (allocation_of(to) == NULL || allocation_of(to)->device != to_device ||
        allocation_of(from) == NULL || allocation_of(from)->device != from_device) {
        return set_error(cudaErrorInvalidValue);
    }
    return add_op(stream, &op);
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream)
{
    const op_t op = {.kind = OP_SET, .to = to, .value = value, .bytes = bytes};

    if (fails()) {
        return cudaErrorUnknown;
    }
    return add_op(stream, &op);
}

cudaError_t cudaMemGetInfo(size_t *free_out, size_t *total_out)
{
    if (fails()) {
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
    if (fails()) {
        return cudaErrorUnknown;
    }
    *out = device_count;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device)
{
    if (fails()) {
        return cudaErrorUnknown;
    }
    if (device < 0 || device >= device_count) {
        return set_error(cudaErrorInvalidDevice);
    }
    current = device;
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *out, int device, int peer)
{
    if (fails()) {
        return cudaErrorUnknown;
    }
    if (device < 0 || device >= device_count || peer < 0 || peer >= device_count) {
        return set_error(cudaErrorInvalidDevice);
    }
    *out = peers_possible && device != peer ? 1 : 0;
    return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned int flags)
{
    if (fails()) {
        return cudaErrorUnknown;
    }
    if (flags != 0) {
        return set_error(cudaErrorInvalidValue);
    }
    if (!peers_possible || peer < 0 || peer >= device_count || peer == current) {
        return set_error(cudaErrorInvalidDevice);
    }
    if ((access_of[current] >> peer & 1u) != 0) {
        return set_error(cudaErrorPeerAccessAlreadyEnabled);
    }
    access_of[current] |= 1u << peer;
    return cudaSuccess;
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
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value > 227 * 1024) {
        return set_error(cudaErrorInvalidValue);
    }
    for (size_t i = 0; i < ATTRIBUTES_MAX; i++) {
        attribute_t *a = &attributes[i];
        if (a->kernel == NULL || (a->kernel == kernel && a->device == current)) {
            *a = (attribute_t){kernel, current, (size_t)value};
            return cudaSuccess;
        }
    }
    return set_error(cudaErrorMemoryAllocation);
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

    if (fails()) {
        return cudaErrorUnknown;
    }
    if (stream_of(stream)->device != current) {
        return set_error(cudaErrorInvalidResourceHandle);
    }
    if (!may_share(kernel, shared_bytes)) {
        return set_error(cudaErrorInvalidValue);
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

/* Streams, events and graphs of the CUDA runtime's doubles.
 *
 * Streams are as lazy as they may be: what is asked of one is done when somebody waits for it, and
 * of the others only what it waits for; or (emu_set_streams()) others go ahead in a random order.
 * So whoever reads without waiting, or fills a buffer again that is still to be read, is found out.
 * A graph has the streams that it was captured from: at a launch the first one's part goes to the
 * stream that is launched to, and the others' to streams of their own.
 *
 * Threads: any. Who does what a stream was asked holds `turn`, one operation at a time, so a thread
 * that only asks or looks never waits for a kernel. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "tests/emu/emu_cudart_internal.h"

#define STREAMS_MAX 256
/* The first ones are the devices' default ones, the next those of graphs. */
#define STREAMS_OF_GRAPHS EMU_DEVICES
#define STREAMS_FIRST (2 * EMU_DEVICES)
#define STREAMS_DRAWN 64 /* that may go on by themselves: tests of order have fewer */

typedef struct op_list {
    op_t *first;
    op_t *last;
} op_list_t;

struct CUgraph_st {
    op_list_t ops;
    struct CUstream_st *origin; /* that is captured; others join it */
    uint64_t capture;           /* its number */
};

struct CUgraphExec_st {
    op_list_t ops;
    struct CUstream_st *origin;
    struct CUevent_st *events; /* owned; one for each record */
};

struct CUstream_st {
    op_list_t ops;
    int device;
    bool busy;                   /* an op of it is being done */
    struct CUgraph_st *captured; /* what it is asked goes there, and is not done */
    uint64_t work;               /* captured, ever; records do not count */
    uint64_t joined;             /* so much of it the first stream of the graph waits for */
    bool used;                   /* its place in the list */
};

struct CUevent_st {
    int device;
    struct CUstream_st *stream; /* of the last record */
    uint64_t capture;           /* that the last record is a part of; 0: none */
    uint64_t covers;            /* work of its stream, in the last record */
    uint64_t asked;             /* ticket of the last record; 0: none */
    uint64_t done;              /* of the last one that was reached */
    struct CUevent_st *next;    /* in a graph */
    uint64_t captured;          /* in a graph: the record's ticket there */
};

static struct CUstream_st streams[STREAMS_MAX];
static uint32_t stream_order; /* random state; 0: lazy */
static uint64_t launches;
static uint64_t graphs; /* launched */
static uint64_t tickets;
static uint64_t captures;
static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;
static atomic_bool turn_wanted; /* by who does not wait for it: relaxed, only a hint */

void emu_set_streams(uint32_t seed)
{
    stream_order = seed;
}

uint64_t emu_launches(void)
{
    return launches;
}

uint64_t emu_graphs(void)
{
    return graphs;
}

/* --- streams ---------------------------------------------------------------------------------- */

struct CUstream_st *emu_stream_of(cudaStream_t stream)
{
    if (stream != NULL) {
        return stream;
    }
    streams[emu_device()].device = emu_device();
    streams[emu_device()].used = true;
    return &streams[emu_device()];
}

/* What became of looking at a stream. STUCK: its first op has to be tried again later. */
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

/* For who does not wait: no answer yet, so it shall have the next one. */
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

static bool run_until(struct CUevent_st *event, uint64_t ticket);

static void run_copy(const op_t *op)
{
    const unsigned char *from = op->owned != NULL ? op->owned : op->from;
    unsigned char *to = op->to;

    emu_check_reach(op->devices, op->to);
    emu_check_reach(op->devices, op->from);
    for (size_t row = 0; row < op->rows; row++) {
        memcpy(to + row * op->to_pitch, from + row * op->from_pitch, op->bytes);
    }
}

/* False: it has to be tried again later. */
static bool run_op(op_t *op)
{
    if (op->kind != OP_WAIT && op->kind != OP_RECORD) {
        emu_open_memory(op->devices);
    }
    switch (op->kind) {
    case OP_COPY:
        run_copy(op);
        break;
    case OP_SET:
        emu_check_reach(op->devices, op->to);
        memset(op->to, op->value, op->bytes);
        break;
    case OP_LAUNCH:
        launches++;
        emu_launch(op->from, op->grid, op->block, op->owned, op->bytes);
        break;
    case OP_RECORD:
        emu_lock();
        op->event->done = op->ticket;
        emu_unlock();
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

static op_t *first_of(const struct CUstream_st *s)
{
    op_t *op = NULL;

    emu_lock();
    op = s->ops.first;
    emu_unlock();
    return op;
}

/* Does what is first in a stream. It stays there until it is done: whoever finds the stream empty
 * has waited for all of it. The caller has the turn. */
static progress_t run_next(struct CUstream_st *s)
{
    op_t *op = first_of(s);
    bool done = false;

    if (op == NULL) {
        return STREAM_EMPTY;
    }
    if (s->busy) {
        emu_fault("streams wait for each other");
    }
    s->busy = true;
    done = run_op(op);
    s->busy = false;
    if (!done) {
        return STREAM_STUCK;
    }
    emu_lock();
    s->ops.first = op->next;
    s->ops.last = s->ops.first == NULL ? NULL : s->ops.last;
    emu_unlock();
    op_free(op);
    return STREAM_WENT_ON;
}

static bool is_reached(const struct CUevent_st *event, uint64_t ticket)
{
    bool reached = false;

    emu_lock();
    reached = event->done >= ticket;
    emu_unlock();
    return reached;
}

/* In a random order, streams that nobody waits for go on, too. The caller has the turn. */
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
        s = &streams[(stream_order >> 20) % STREAMS_DRAWN];
        op = first_of(s);
        if (op != NULL && !s->busy && (op->kind != OP_WAIT || is_reached(op->event, op->ticket))) {
            (void)run_next(s);
        }
    }
}

void emu_run_stream(struct CUstream_st *s)
{
    progress_t progress = STREAM_WENT_ON;

    while (progress != STREAM_EMPTY) {
        turn_begin();
        run_others();
        progress = run_next(s);
        turn_end();
        if (progress == STREAM_STUCK) {
            nap(50000);
        }
    }
}

static progress_t run_towards(const struct CUevent_st *event)
{
    const progress_t progress = run_next(event->stream);

    if (progress == STREAM_EMPTY) {
        emu_fault("a stream waits for an event that does not come");
    }
    return progress;
}

/* False: it is stuck. The caller has the turn. */
static bool run_until(struct CUevent_st *event, uint64_t ticket)
{
    while (!is_reached(event, ticket)) {
        run_others();
        if (!is_reached(event, ticket) && run_towards(event) == STREAM_STUCK) {
            return false;
        }
    }
    return true;
}

/* The last one first: they should not depend on each other. */
void emu_run_all(void)
{
    for (size_t i = STREAMS_MAX; i-- > 0;) {
        emu_run_stream(&streams[i]);
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

static bool append_copy(op_list_t *list, const op_t *op)
{
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
    return true;
}

static bool append_copies(op_list_t *list, const op_list_t *from)
{
    for (const op_t *op = from->first; op != NULL; op = op->next) {
        if (!append_copy(list, op)) {
            return false;
        }
    }
    return true;
}

/* Locked. */
static bool add_op(struct CUstream_st *s, const op_t *wanted)
{
    op_t op = *wanted;

    op.lane = s;
    s->work += s->captured != NULL && op.kind != OP_RECORD ? 1 : 0;
    op.devices |= emu_access_of(s->device);
    return append(s->captured != NULL ? &s->captured->ops : &s->ops, &op);
}

cudaError_t emu_add_op(cudaStream_t stream, const op_t *wanted)
{
    struct CUstream_st *s = emu_stream_of(stream);
    bool added = false;

    emu_lock();
    added = add_op(s, wanted);
    emu_unlock();
    if (!added) {
        free(wanted->owned);
        return emu_set_error(cudaErrorMemoryAllocation);
    }
    return cudaSuccess;
}

bool emu_add_work(struct CUstream_st *stream, bool (*run)(void *ctx), void (*drop)(void *ctx),
                  void *ctx)
{
    const op_t op = {.kind = OP_WORK, .run = run, .drop = drop, .ctx = ctx};

    return emu_add_op(stream, &op) == cudaSuccess;
}

int emu_stream_device(cudaStream_t stream)
{
    return emu_stream_of(stream)->device;
}

bool emu_is_captured(cudaStream_t stream)
{
    return emu_stream_of(stream)->captured != NULL;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned int flags)
{
    struct CUstream_st *found = NULL;

    if (emu_fails()) {
        return cudaErrorUnknown;
    }
    (void)flags;
    emu_lock();
    for (size_t i = STREAMS_FIRST; i < STREAMS_MAX && found == NULL; i++) {
        if (!streams[i].used) {
            streams[i] = (struct CUstream_st){.device = emu_device(), .used = true};
            found = &streams[i];
        }
    }
    emu_unlock();
    if (found == NULL) {
        return emu_set_error(cudaErrorMemoryAllocation);
    }
    *out = found;
    return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    emu_run_stream(stream);
    emu_lock();
    stream->used = false;
    emu_unlock();
    return cudaSuccess;
}

/* Whoever looks is waiting for it: a little of it is done, if nobody else does something. */
cudaError_t cudaStreamQuery(cudaStream_t stream)
{
    progress_t progress = STREAM_STUCK;

    if (emu_fails()) {
        return cudaErrorUnknown;
    }
    if (turn_try()) {
        progress = run_next(emu_stream_of(stream));
        turn_end();
    }
    return progress == STREAM_EMPTY ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    if (emu_fails()) {
        return cudaErrorUnknown;
    }
    if (emu_is_captured(stream)) {
        return emu_set_error(cudaErrorStreamCaptureUnsupported);
    }
    emu_run_stream(emu_stream_of(stream));
    return cudaSuccess;
}

static uint64_t capture_of(const struct CUstream_st *s)
{
    return s->captured == NULL ? 0 : s->captured->capture;
}

/* Locked. */
static struct CUgraph_st *find_capture(uint64_t capture)
{
    for (size_t i = 0; capture != 0 && i < STREAMS_MAX; i++) {
        if (capture_of(&streams[i]) == capture) {
            return streams[i].captured;
        }
    }
    return NULL;
}

/* Locked. */
static cudaError_t add_wait(struct CUstream_st *s, struct CUevent_st *event)
{
    const op_t op = {.kind = OP_WAIT, .event = event, .ticket = event->asked};

    if (s->captured == NULL) {
        s->captured = find_capture(event->capture); /* joins it */
    }
    if (capture_of(s) != event->capture) {
        return cudaErrorStreamCaptureIsolation;
    }
    if (s->captured != NULL && s == s->captured->origin) {
        event->stream->joined = event->covers;
    }
    return add_op(s, &op) ? cudaSuccess : cudaErrorMemoryAllocation;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags)
{
    struct CUstream_st *s = emu_stream_of(stream);
    cudaError_t error = cudaSuccess;

    if (emu_fails()) {
        return cudaErrorUnknown;
    }
    (void)flags;
    emu_lock();
    error = add_wait(s, event);
    emu_unlock();
    return emu_set_error(error);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned int flags)
{
    if (emu_fails()) {
        return cudaErrorUnknown;
    }
    (void)flags;
    *out = calloc(1, sizeof(**out));
    if (*out == NULL) {
        return emu_set_error(cudaErrorMemoryAllocation);
    }
    (*out)->device = emu_device();
    return cudaSuccess;
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
    struct CUstream_st *s = emu_stream_of(stream);
    bool added = false;

    if (emu_fails()) {
        return cudaErrorUnknown;
    }
    if (event->device != s->device) {
        return emu_set_error(cudaErrorInvalidResourceHandle);
    }
    emu_lock();
    op.ticket = ++tickets;
    event->stream = s;
    event->capture = capture_of(s);
    event->covers = s->work;
    event->asked = op.ticket;
    added = add_op(s, &op);
    emu_unlock();
    return added ? cudaSuccess : emu_set_error(cudaErrorMemoryAllocation);
}

cudaError_t cudaEventQuery(cudaEvent_t event)
{
    if (emu_fails()) {
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
    if (emu_fails()) {
        return cudaErrorUnknown;
    }
    while (!is_reached(event, event->asked)) {
        progress_t progress = STREAM_WENT_ON;
        turn_begin();
        run_others();
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
    (void)mode;
    if (emu_fails()) {
        return cudaErrorUnknown;
    }
    if (stream == NULL || emu_is_captured(stream)) {
        return emu_set_error(cudaErrorStreamCaptureUnsupported);
    }
    stream->captured = calloc(1, sizeof(*stream->captured));
    if (stream->captured == NULL) {
        return emu_set_error(cudaErrorMemoryAllocation);
    }
    stream->captured->origin = stream;
    stream->captured->capture = ++captures;
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *out)
{
    bool unjoined = false;

    *out = stream->captured; /* also where it fails, so that it is not lost */
    for (size_t i = 0; i < STREAMS_MAX; i++) {
        struct CUstream_st *s = &streams[i];
        if (*out != NULL && s->captured == *out) {
            unjoined = unjoined || (s != stream && s->joined != s->work);
            s->captured = NULL;
        }
    }
    if (emu_fails()) {
        return cudaErrorUnknown;
    }
    if (unjoined) {
        return emu_set_error(cudaErrorStreamCaptureUnjoined);
    }
    return *out == NULL ? emu_set_error(cudaErrorStreamCaptureUnsupported) : cudaSuccess;
}

/* Records have events of their own in a graph: those that were captured are used elsewhere, too. */
static bool own_events(struct CUgraphExec_st *exec)
{
    for (op_t *op = exec->ops.first; op != NULL; op = op->next) {
        struct CUevent_st *event = exec->events;
        if (op->kind == OP_RECORD) {
            event = calloc(1, sizeof(*event));
            if (event == NULL) {
                return false;
            }
            event->captured = op->ticket;
            event->next = exec->events;
            exec->events = event;
        } else if (op->kind == OP_WAIT) {
            while (event != NULL && event->captured != op->ticket) {
                event = event->next;
            }
            if (event == NULL) {
                emu_fault("a graph waits for an event that is not in it");
            }
        }
        op->event = event;
    }
    return true;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *out, cudaGraph_t graph, unsigned long long flags)
{
    struct CUgraphExec_st *exec = NULL;

    (void)flags;
    if (emu_fails()) {
        return cudaErrorUnknown;
    }
    exec = calloc(1, sizeof(*exec));
    if (exec == NULL || !append_copies(&exec->ops, &graph->ops) || !own_events(exec)) {
        return emu_set_error(cudaErrorMemoryAllocation);
    }
    exec->origin = graph->origin;
    *out = exec;
    return cudaSuccess;
}

/* Where a stream's part of a graph goes. lanes: those of other streams so far. */
static struct CUstream_st *target_of(const struct CUgraphExec_st *exec,
                                     struct CUstream_st *launched, const struct CUstream_st *lane,
                                     const struct CUstream_st *lanes[EMU_DEVICES])
{
    size_t i = 0;

    if (lane == exec->origin) {
        return launched;
    }
    while (i < EMU_DEVICES && lanes[i] != NULL && lanes[i] != lane) {
        i++;
    }
    if (i == EMU_DEVICES) {
        emu_fault("a graph has too many streams for the emulator");
    }
    lanes[i] = lane;
    return &streams[STREAMS_OF_GRAPHS + i];
}

/* Locked. */
static bool add_graph(const struct CUgraphExec_st *exec, struct CUstream_st *launched)
{
    const struct CUstream_st *lanes[EMU_DEVICES] = {NULL};

    for (op_t *op = exec->ops.first; op != NULL; op = op->next) {
        struct CUstream_st *target = target_of(exec, launched, op->lane, lanes);
        if (op->kind == OP_RECORD) {
            op->event->stream = target;
            op->event->asked = ++tickets;
        }
        if (op->kind == OP_RECORD || op->kind == OP_WAIT) {
            op->ticket = op->event->asked;
        }
        if (!append_copy(&target->ops, op)) {
            return false;
        }
    }
    return true;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream)
{
    struct CUstream_st *s = emu_stream_of(stream);
    bool added = false;

    if (emu_fails()) {
        return cudaErrorUnknown;
    }
    emu_lock();
    graphs++;
    added = add_graph(exec, s);
    emu_unlock();
    return added ? cudaSuccess : emu_set_error(cudaErrorMemoryAllocation);
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    free_ops(&graph->ops);
    free(graph);
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec)
{
    run_all_there_is(); /* nobody refers to its events any more */
    free_ops(&exec->ops);
    while (exec->events != NULL) {
        struct CUevent_st *event = exec->events;
        exec->events = event->next;
        free(event);
    }
    free(exec);
    return cudaSuccess;
}

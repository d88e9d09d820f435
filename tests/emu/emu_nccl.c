/* Doubles of the NCCL calls that common/model/cuda makes: two ranks, in one process or two, over a
 * socket that the unique id names.
 *
 * A post is work on an emulated stream, done when somebody looks at the stream. It is there only
 * once ncclCommGetAsyncError() says so, as in a communicator that does not block: who records an
 * event before does not wait for it. As on a device: it is over when the other end has taken part;
 * what an aborted communicator had posted ends only when the stream is looked at again, and writes
 * into the memory of a receive until then. A receive that meets a send of another size ends the
 * process: both must post the same things in one order. Threads: any; one at a time of one
 * communicator. */
#include "common/model/cuda/td_cuda_nccl.h"

#ifdef TD_CUDA_HAS_NCCL

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "tests/emu/emu_nccl.h"
#include "tests/emu/emu_run.h"

#define VERSION 22809
#define ID_CHARS 32u
#define STEP_BYTES ((size_t)256 << 10) /* of a post at a time, so that it has a middle */

struct ncclComm {
    int rank;
    int listener; /* rank 0, until the other one has come; else -1 */
    int fd;       /* -1: not connected */
    struct sockaddr_un address;
    socklen_t address_len;
    bool hangs;             /* it does not come up */
    atomic_int error;       /* ncclInProgress, ncclSuccess, or what has failed */
    atomic_bool aborted;    /* release by abort, acquire by posts */
    atomic_uint references; /* of its owner and of posts */
    struct post *waiting;   /* posted, and not with the stream before it was asked for twice */
    cudaStream_t waiting_for;
    uint32_t asked;
};

static void post_drop(void *ctx);
static bool post_run(void *ctx);

typedef struct post {
    ncclComm_t comm;
    unsigned char *bytes;
    size_t count;
    size_t done;
    bool send;
    bool greeted; /* the size is across */
    bool hangs;
    bool waits; /* until nothing lags */
    bool breaks;
} post_t;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static uint32_t fault_in[EMU_NCCL_FAULTS]; /* occasions until it comes; 0: never */
static bool environment_read;
static bool lags; /* whatever does, until emu_nccl_goes_on() */
static uint32_t open_count;
static uint64_t sent_count;
static _Thread_local int group_depth;

/* --- what goes wrong -------------------------------------------------------------------------- */

void emu_nccl_fail(emu_nccl_fault_t fault, uint32_t nth)
{
    (void)pthread_mutex_lock(&mutex);
    fault_in[fault] = nth;
    (void)pthread_mutex_unlock(&mutex);
}

static bool is_lagging(void)
{
    bool now = false;

    (void)pthread_mutex_lock(&mutex);
    now = lags;
    (void)pthread_mutex_unlock(&mutex);
    return now;
}

void emu_nccl_goes_on(void)
{
    (void)pthread_mutex_lock(&mutex);
    lags = false;
    (void)pthread_mutex_unlock(&mutex);
}

uint32_t emu_nccl_open(void)
{
    uint32_t count = 0;

    (void)pthread_mutex_lock(&mutex);
    count = open_count;
    (void)pthread_mutex_unlock(&mutex);
    return count;
}

uint64_t emu_nccl_sent(void)
{
    uint64_t count = 0;

    (void)pthread_mutex_lock(&mutex);
    count = sent_count;
    (void)pthread_mutex_unlock(&mutex);
    return count;
}

/* The environment's fault, before the first occasion. */
static void read_environment(void)
{
    static const char *const names[EMU_NCCL_FAULTS] = {"",           "init_hangs",  "init_fails",
                                                       "send_hangs", "send_breaks", "recv_hangs",
                                                       "post_fails", "abort_lags",  "post_lags"};
    const char *text = getenv("EMU_NCCL_FAULT");
    const char *colon = text == NULL ? NULL : strchr(text, ':');

    environment_read = true;
    for (size_t i = 1; colon != NULL && i < EMU_NCCL_FAULTS; i++) {
        if (strlen(names[i]) == (size_t)(colon - text) &&
            strncmp(names[i], text, (size_t)(colon - text)) == 0) {
            fault_in[i] = (uint32_t)strtoul(colon + 1, NULL, 10);
        }
    }
}

static bool goes_wrong(emu_nccl_fault_t fault)
{
    bool now = false;

    (void)pthread_mutex_lock(&mutex);
    if (!environment_read) {
        read_environment();
    }
    now = fault_in[fault] > 0 && --fault_in[fault] == 0;
    lags = lags || (now && (fault == EMU_NCCL_ABORT_LAGS || fault == EMU_NCCL_POST_LAGS));
    (void)pthread_mutex_unlock(&mutex);
    return now;
}

/* --- communicators -----------------------------------------------------------------------------
 */

static ncclResult_t get_version(int *version)
{
    *version = VERSION;
    return emu_fails() ? ncclSystemError : ncclSuccess;
}

static ncclResult_t get_unique_id(ncclUniqueId *id)
{
    unsigned char bytes[ID_CHARS / 2];

    if (emu_fails() || getrandom(bytes, sizeof(bytes), 0) != (ssize_t)sizeof(bytes)) {
        return ncclSystemError;
    }
    memset(id, 0, sizeof(*id));
    for (size_t i = 0; i < sizeof(bytes); i++) {
        (void)snprintf(id->internal + 2 * i, 3, "%02x", bytes[i]);
    }
    return ncclSuccess;
}

static void comm_release(ncclComm_t comm)
{
    if (atomic_fetch_sub(&comm->references, 1) == 1) {
        if (comm->fd >= 0) {
            (void)close(comm->fd);
        }
        free(comm);
    }
}

static bool listens(struct ncclComm *comm)
{
    comm->listener = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    return comm->listener >= 0 &&
           bind(comm->listener, (const struct sockaddr *)&comm->address, comm->address_len) == 0 &&
           listen(comm->listener, 1) == 0;
}

static ncclResult_t init_rank_config(ncclComm_t *out, int ranks, ncclUniqueId id, int rank,
                                     ncclConfig_t *config)
{
    struct ncclComm *comm = NULL;

    if (emu_fails()) {
        return ncclSystemError;
    }
    if (ranks != 2 || rank < 0 || rank > 1 || config->blocking != 0) {
        return ncclInvalidArgument;
    }
    comm = calloc(1, sizeof(*comm));
    if (comm == NULL) {
        return ncclSystemError;
    }
    comm->rank = rank;
    comm->fd = -1;
    comm->listener = -1;
    comm->hangs = goes_wrong(EMU_NCCL_INIT_HANGS);
    atomic_init(&comm->error, ncclInProgress);
    atomic_init(&comm->references, 1);
    comm->address.sun_family = AF_UNIX; /* in no folder: the first byte is 0 */
    (void)snprintf(comm->address.sun_path + 1, sizeof(comm->address.sun_path) - 1, "emu-nccl-%.*s",
                   (int)ID_CHARS, id.internal);
    comm->address_len = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 +
                                    strlen(comm->address.sun_path + 1));
    if ((rank == 0 && !listens(comm)) || goes_wrong(EMU_NCCL_INIT_FAILS)) {
        atomic_store(&comm->error, ncclSystemError);
    }
    (void)pthread_mutex_lock(&mutex);
    open_count++;
    (void)pthread_mutex_unlock(&mutex);
    *out = comm;
    return ncclInProgress;
}

/* Goes on coming up. */
static void connect_more(struct ncclComm *comm)
{
    int fd = -1;

    if (comm->rank == 0) {
        fd = accept4(comm->listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd >= 0) {
            (void)close(comm->listener);
            comm->listener = -1;
        }
    } else {
        fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
        if (fd >= 0 &&
            connect(fd, (const struct sockaddr *)&comm->address, comm->address_len) != 0) {
            (void)close(fd);
            fd = -1; /* the other one is not there yet */
        }
    }
    if (fd >= 0) {
        comm->fd = fd;
        atomic_store(&comm->error, ncclSuccess);
    }
}

static ncclResult_t get_async_error(ncclComm_t comm, ncclResult_t *error)
{
    if (emu_fails()) {
        return ncclSystemError;
    }
    if (atomic_load(&comm->error) == ncclInProgress && !comm->hangs) {
        connect_more(comm);
    }
    if (comm->waiting != NULL && comm->asked++ == 0) {
        *error = ncclInProgress;
        return ncclSuccess;
    }
    if (comm->waiting != NULL) {
        if (!emu_add_work(comm->waiting_for, post_run, post_drop, comm->waiting)) {
            return ncclSystemError;
        }
        comm->waiting = NULL;
    }
    *error = (ncclResult_t)atomic_load(&comm->error);
    return ncclSuccess;
}

static ncclResult_t comm_abort(ncclComm_t comm)
{
    const struct timespec nap = {.tv_nsec = 1000000};
    const bool waits = goes_wrong(EMU_NCCL_ABORT_LAGS);

    while (waits && is_lagging()) {
        (void)nanosleep(&nap, NULL);
    }
    if (comm->listener >= 0) {
        (void)close(comm->listener);
    }
    if (comm->fd >= 0) {
        (void)shutdown(comm->fd, SHUT_RDWR);
    }
    if (comm->waiting != NULL) {
        post_drop(comm->waiting);
    }
    atomic_store_explicit(&comm->aborted, true, memory_order_release);
    (void)pthread_mutex_lock(&mutex);
    open_count--;
    (void)pthread_mutex_unlock(&mutex);
    comm_release(comm);
    return ncclSuccess;
}

/* --- posts --------------------------------------------------------------------------------------
 */

/* The other end is gone: nothing ends any more before an abort. */
static bool breaks(post_t *p)
{
    atomic_store(&p->comm->error, ncclRemoteError);
    return false;
}

static ssize_t move_bytes(const post_t *p, void *bytes, size_t count)
{
    return p->send ? send(p->comm->fd, bytes, count, MSG_DONTWAIT | MSG_NOSIGNAL)
                   : recv(p->comm->fd, bytes, count, MSG_DONTWAIT);
}

/* What both say before the bytes: how many they are. 8 bytes are in a socket whole or not at all.
 */
static bool greet(post_t *p)
{
    uint64_t count = p->count;
    const ssize_t moved = move_bytes(p, &count, sizeof(count));

    if (moved == (ssize_t)sizeof(count)) {
        if (count != p->count) {
            (void)fprintf(stderr, "emu: a receive of %zu bytes meets a send of %llu\n", p->count,
                          (unsigned long long)count);
            _Exit(EMU_EXIT_FAULT);
        }
        p->greeted = true;
        return true;
    }
    if (moved == 0 || (moved < 0 && errno != EAGAIN)) {
        (void)breaks(p);
    }
    return false;
}

static bool post_run(void *ctx)
{
    post_t *p = ctx;
    ssize_t moved = 0;

    if (atomic_load_explicit(&p->comm->aborted, memory_order_acquire)) {
        if (!p->send) {
            memset(p->bytes, 0xee, p->count); /* a kernel writes until it has left */
        }
        return true;
    }
    if (p->hangs || (p->waits && is_lagging()) || atomic_load(&p->comm->error) != ncclSuccess ||
        (!p->greeted && !greet(p))) {
        return false;
    }
    if (p->breaks && p->done > p->count / 2) {
        return breaks(p);
    }
    moved = move_bytes(p, p->bytes + p->done,
                       p->count - p->done < STEP_BYTES ? p->count - p->done : STEP_BYTES);
    if (moved == 0 || (moved < 0 && errno != EAGAIN)) {
        return breaks(p);
    }
    p->done += moved < 0 ? 0 : (size_t)moved;
    if (p->done < p->count) {
        return false;
    }
    if (p->send) {
        (void)pthread_mutex_lock(&mutex);
        sent_count++;
        (void)pthread_mutex_unlock(&mutex);
    }
    return true;
}

static void post_drop(void *ctx)
{
    post_t *p = ctx;

    comm_release(p->comm);
    free(p);
}

static ncclResult_t post(void *bytes, size_t count, int peer, ncclComm_t comm, cudaStream_t stream,
                         bool send)
{
    post_t *p = NULL;

    if (emu_fails() || goes_wrong(EMU_NCCL_POST_FAILS)) {
        return ncclSystemError;
    }
    if (peer != 1 - comm->rank || count == 0 || group_depth == 0 || comm->waiting != NULL ||
        atomic_load(&comm->error) == ncclInProgress) {
        return ncclInvalidUsage;
    }
    p = calloc(1, sizeof(*p));
    if (p == NULL) {
        return ncclSystemError;
    }
    p->comm = comm;
    p->bytes = bytes;
    p->count = count;
    p->send = send;
    p->hangs = goes_wrong(send ? EMU_NCCL_SEND_HANGS : EMU_NCCL_RECV_HANGS);
    p->waits = goes_wrong(EMU_NCCL_POST_LAGS) || is_lagging();
    p->breaks = send && goes_wrong(EMU_NCCL_SEND_BREAKS);
    atomic_fetch_add(&comm->references, 1);
    comm->waiting = p;
    comm->waiting_for = stream;
    comm->asked = 0;
    return ncclSuccess;
}

static ncclResult_t post_send(const void *from, size_t count, ncclDataType_t type, int peer,
                              ncclComm_t comm, cudaStream_t stream)
{
    void *bytes = NULL;

    memcpy(&bytes, &from, sizeof(bytes)); /* only read */
    return type == ncclUint8 ? post(bytes, count, peer, comm, stream, true) : ncclInvalidArgument;
}

static ncclResult_t post_recv(void *to, size_t count, ncclDataType_t type, int peer,
                              ncclComm_t comm, cudaStream_t stream)
{
    return type == ncclUint8 ? post(to, count, peer, comm, stream, false) : ncclInvalidArgument;
}

static ncclResult_t group_start(void)
{
    group_depth++;
    return ncclSuccess;
}

static ncclResult_t group_end(void)
{
    group_depth--;
    return ncclInProgress; /* as a communicator that does not block may say */
}

static const char *get_error_string(ncclResult_t result)
{
    return result == ncclRemoteError ? "remote process exited or there was a network error"
                                     : "unhandled system error";
}

const td_cuda_nccl_t *td_cuda_nccl_load(const char **why_out)
{
    static const td_cuda_nccl_t calls = {.get_version = get_version,
                                         .get_unique_id = get_unique_id,
                                         .init_rank_config = init_rank_config,
                                         .get_async_error = get_async_error,
                                         .abort = comm_abort,
                                         .send = post_send,
                                         .recv = post_recv,
                                         .group_start = group_start,
                                         .group_end = group_end,
                                         .get_error_string = get_error_string};

    if (getenv("EMU_NO_NCCL") != NULL) {
        *why_out = "EMU_NO_NCCL";
        return NULL;
    }
    return &calls;
}

#endif

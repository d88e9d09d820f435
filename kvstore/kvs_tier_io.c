#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/base/td_base.h"
#include "common/base/td_fault.h"
#include "common/base/td_log.h"
#include "kvstore/kvs_tier_internal.h"

/* A file system may refuse O_DIRECT at open, or only when it is used. */
static int open_direct(kvs_tier_io_t *io, const char *path)
{
    int flags = O_RDWR | O_CREAT | O_CLOEXEC;
    void *page = NULL;
    int error = 0;

    io->direct = true;
    io->fd = open(path, flags | O_DIRECT, 0600);
    if (io->fd < 0 && errno == EINVAL) {
        io->direct = false;
        io->fd = open(path, flags, 0600);
    }
    if (io->fd < 0) {
        return errno;
    }
    if (!io->direct) {
        return 0;
    }
    page = td_alloc_aligned(KVS_TIER_PAGE_BYTES, KVS_TIER_PAGE_BYTES);
    if (page == NULL) {
        return ENOMEM;
    }
    if (pread(io->fd, page, KVS_TIER_PAGE_BYTES, 0) < 0) {
        error = errno;
    }
    td_free(page);
    if (error == EINVAL) {
        io->direct = false;
        flags = fcntl(io->fd, F_GETFL);
        error = flags < 0 || fcntl(io->fd, F_SETFL, flags & ~O_DIRECT) != 0 ? errno : 0;
    }
    return error;
}

int kvs_tier_io_open(kvs_tier_io_t *io, const char *path, bool pread_only)
{
    int error = open_direct(io, path);

    io->uring = false;
    if (error == 0 && flock(io->fd, LOCK_EX | LOCK_NB) != 0) {
        error = errno;
    }
    if (error != 0) {
        kvs_tier_io_close(io);
        return error;
    }
    if (!pread_only) {
        /* Containers' system call filters often refuse it: EPERM or ENOSYS. */
        int got = io_uring_queue_init(KVS_TIER_OPS_MAX, &io->ring, 0);
        io->uring = got == 0;
        if (got != 0) {
            TD_LOG_INFO("no io_uring, the cold tier uses pread and pwrite", "errno=%d what=\"%s\"",
                        -got, strerror(-got));
        }
    }
    if (!io->direct) {
        TD_LOG_INFO("the cold tier's file system has no O_DIRECT, its cache is used", "file=%s",
                    path);
    }
    return 0;
}

void kvs_tier_io_close(kvs_tier_io_t *io)
{
    if (io->uring) {
        io_uring_queue_exit(&io->ring);
        io->uring = false;
    }
    if (io->fd >= 0) {
        (void)close(io->fd);
        io->fd = -1;
    }
}

int kvs_tier_io_resize(kvs_tier_io_t *io, uint64_t bytes)
{
    struct stat st;
    int error = 0;

    if (fstat(io->fd, &st) != 0) {
        return errno;
    }
    if ((uint64_t)st.st_size < bytes) {
        if (fallocate(io->fd, 0, 0, (off_t)bytes) == 0) {
            return 0;
        }
        error = errno;
        if (error == ENOSPC) {
            TD_LOG_WARN("the cold tier's disk is smaller than the tier", "bytes=%llu",
                        (unsigned long long)bytes);
            /* What was taken before it was full is everybody's again. */
            (void)!ftruncate(io->fd, st.st_size);
        } else if (error != EOPNOTSUPP && error != ENOSYS) {
            return error;
        }
    }
    return (uint64_t)st.st_size != bytes && ftruncate(io->fd, (off_t)bytes) != 0 ? errno : 0;
}

/* From `done` bytes on, until all of it is there or an error. */
static void run_rest(const kvs_tier_io_t *io, kvs_tier_op_t *op, size_t done)
{
    op->error = 0;
    while (done < op->len && op->error == 0) {
        ssize_t n =
            op->is_write
                ? pwrite(io->fd, op->bytes + done, op->len - done, (off_t)(op->offset + done))
                : pread(io->fd, op->bytes + done, op->len - done, (off_t)(op->offset + done));
        if (n > 0) {
            done += (size_t)n;
        } else if (n == 0) {
            op->error = op->is_write ? EIO : ENODATA;
        } else if (errno != EINTR) {
            op->error = errno;
        }
    }
}

static void uring_result(const kvs_tier_io_t *io, kvs_tier_op_t *op, int res)
{
    if (res >= 0 || res == -EINTR || res == -EAGAIN) {
        run_rest(io, op, res > 0 ? (size_t)res : 0); /* nothing to do when it was done whole */
    } else {
        op->error = -res;
    }
}

/* Hands the operations to the kernel and takes their results. Returns how many it has taken, from
 * the first on; fewer than count only when the ring does not work any more. */
static uint32_t run_uring(kvs_tier_io_t *io, kvs_tier_op_t *ops, uint32_t count)
{
    uint32_t submitted = 0;

    for (uint32_t i = 0; i < count; i++) {
        struct io_uring_sqe *sqe = io_uring_get_sqe(&io->ring); /* the ring has room for all */
        TD_ASSERT(sqe != NULL);
        if (ops[i].is_write) {
            io_uring_prep_write(sqe, io->fd, ops[i].bytes, (unsigned)ops[i].len, ops[i].offset);
        } else {
            io_uring_prep_read(sqe, io->fd, ops[i].bytes, (unsigned)ops[i].len, ops[i].offset);
        }
        io_uring_sqe_set_data(sqe, &ops[i]);
    }
    while (submitted < count) {
        int n = io_uring_submit(&io->ring);
        if (n > 0) {
            submitted += (uint32_t)n;
        } else if (n != -EINTR && n != -EAGAIN) {
            TD_LOG_WARN("io_uring refused operations, the cold tier goes on with pread and pwrite",
                        "errno=%d", -n);
            break;
        }
    }
    for (uint32_t left = submitted; left > 0;) {
        struct io_uring_cqe *cqe = NULL;
        int got = io_uring_wait_cqe(&io->ring, &cqe);
        if (got != 0) {
            /* The buffers are the kernel's until it has answered: nothing else can be done. */
            TD_ASSERT(got == -EINTR || got == -EAGAIN);
            continue;
        }
        uring_result(io, io_uring_cqe_get_data(cqe), cqe->res);
        io_uring_cqe_seen(&io->ring, cqe);
        left--;
    }
    return submitted;
}

void kvs_tier_io_run(kvs_tier_io_t *io, kvs_tier_op_t *ops, uint32_t count)
{
    uint32_t done = 0;

    TD_ASSERT(count <= KVS_TIER_OPS_MAX);
    TD_FAULT_POINT("tier_io");
    if (io->uring) {
        done = run_uring(io, ops, count);
        if (done < count) { /* what it has not taken would be sent with the next ones */
            io_uring_queue_exit(&io->ring);
            io->uring = false;
        }
    }
    for (; done < count; done++) {
        run_rest(io, &ops[done], 0);
    }
}

int kvs_tier_io_sync(kvs_tier_io_t *io)
{
    return fdatasync(io->fd) == 0 ? 0 : errno;
}

bool kvs_tier_io_is_gone(const kvs_tier_io_t *io)
{
    struct stat st;
    return fstat(io->fd, &st) != 0 || st.st_nlink == 0;
}

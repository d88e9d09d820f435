/* fuzz_file.h - any bytes as a file that has a path, for what takes no bytes. Threads: owner. */
#pragma once

#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/base/td_base.h"

typedef struct fuzz_file {
    int fd;
    char path[64];
} fuzz_file_t;

/** A file in memory, that its owner alone may read. */
static inline void fuzz_file_make(fuzz_file_t *file, const uint8_t *bytes, size_t len)
{
    file->fd = memfd_create("fuzz", MFD_CLOEXEC);
    TD_ASSERT(file->fd >= 0 && fchmod(file->fd, 0600) == 0);
    TD_ASSERT(write(file->fd, bytes, len) == (ssize_t)len);
    (void)snprintf(file->path, sizeof(file->path), "/proc/self/fd/%d", file->fd);
}

static inline void fuzz_file_end(const fuzz_file_t *file)
{
    (void)close(file->fd);
}

#include "common/base/td_file.h"

#include <fcntl.h>
#include <unistd.h>

#include "common/base/td_log.h"
#include "common/base/td_private.h"

td_status_t td_file_open(const char *what, const char *path, bool is_secret, int *fd_out,
                         struct stat *stat_out)
{
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    const char *expected = NULL;

    if (fd < 0 || fstat(fd, stat_out) != 0) {
        TD_LOG_ERROR("file not opened", "what=\"%s\" file=%s err=\"%m\"", what, path);
        if (fd >= 0) {
            (void)close(fd);
        }
        return TD_ERR_IO;
    }
    if (!S_ISREG(stat_out->st_mode)) {
        expected = "a regular file";
    } else if (is_secret && !td_file_is_private(stat_out)) {
        expected = TD_PRIVATE_EXPECTED;
    }
    if (expected != NULL) {
        TD_LOG_ERROR("file refused", "what=\"%s\" file=%s mode=%03o expected=\"%s\"", what, path,
                     (unsigned)stat_out->st_mode & 0777u, expected);
        (void)close(fd);
        return TD_ERR_INVALID;
    }
    *fd_out = fd;
    return TD_OK;
}

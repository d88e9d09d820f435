/* td_file.h - opening the files that a configuration names. Threads: any. */
#pragma once

#include <stdbool.h>
#include <sys/stat.h>

#include "common/base/td_status.h"

/** Opens a file for reading. It must be a regular one: a FIFO would keep the process waiting for
 * whoever writes into it. is_secret: nobody else may read it (td_private.h). what: names it in the
 * log, where an error is told. Errors: TD_ERR_IO (not there, not ours), TD_ERR_INVALID.
 * Owner: the caller closes *fd_out. */
TD_MUST_CHECK td_status_t td_file_open(const char *what, const char *path, bool is_secret,
                                       int *fd_out, struct stat *stat_out);

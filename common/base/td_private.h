/* td_private.h - may a file with a secret be trusted? Threads: any. */
#pragma once

#include <stdbool.h>
#include <sys/stat.h>
#include <unistd.h>

#define TD_PRIVATE_EXPECTED "mode 0600, or 0640 where root owns it and we are not root"

/** Nobody else reads it: it is the owner's alone; or root's, who gave it to a group that we are in,
 * as Kubernetes mounts secrets for a pod that does not run as root. */
static inline bool td_is_private(mode_t mode, uid_t owner, uid_t self)
{
    return owner == 0 && self != 0 ? (mode & 027) == 0 : (mode & 077) == 0;
}

static inline bool td_file_is_private(const struct stat *st)
{
    return td_is_private(st->st_mode, st->st_uid, geteuid());
}

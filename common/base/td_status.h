/* td_status.h - one result type for every call that can fail. Design: common/base/DESIGN.md.
 * Threads: any. */
#pragma once

#define TD_MUST_CHECK __attribute__((warn_unused_result))

/** Failures are negative, in bands by what the caller does next. */
typedef enum td_status {
    TD_OK = 0,
    TD_INPROGRESS = 1, /* accepted; the completion comes later */

    /* -1..-19: the request is wrong; retrying it unchanged cannot help */
    TD_ERR_INVALID = -1,     /* a value is out of range or malformed */
    TD_ERR_NOT_FOUND = -2,   /* no such object */
    TD_ERR_EXISTS = -3,      /* an object of that name is there already */
    TD_ERR_TOO_LARGE = -4,   /* over a named limit */
    TD_ERR_UNSUPPORTED = -5, /* well formed, but not something we do */
    TD_ERR_CANCELLED = -6,   /* the requester took it back */

    /* -20..-39: the same request may succeed later */
    TD_ERR_BUSY = -20,    /* a bounded resource is full */
    TD_ERR_TIMEOUT = -21, /* the deadline passed */

    /* -40..-59: drop this peer */
    TD_ERR_PEER_DEAD = -40, /* the peer is gone or unreachable */
    TD_ERR_PROTOCOL = -41,  /* the peer sent what the protocol forbids */
    TD_ERR_STALE = -42,     /* an older incarnation, attempt or epoch */
    TD_ERR_CORRUPT = -43,   /* a checksum does not match */

    /* -60..: this process is unwell */
    TD_ERR_NO_MEMORY = -60,
    TD_ERR_IO = -61,
    TD_ERR_INTERNAL = -62
} td_status_t;

/** Names a status for logs, e.g. "busy". Never NULL.
 * Owner: static. */
const char *td_status_name(td_status_t status);

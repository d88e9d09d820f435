#include "common/base/td_status.h"

const char *td_status_name(td_status_t status)
{
    switch (status) {
    case TD_OK:
        return "ok";
    case TD_INPROGRESS:
        return "in_progress";
    case TD_ERR_INVALID:
        return "invalid";
    case TD_ERR_NOT_FOUND:
        return "not_found";
    case TD_ERR_EXISTS:
        return "exists";
    case TD_ERR_TOO_LARGE:
        return "too_large";
    case TD_ERR_UNSUPPORTED:
        return "unsupported";
    case TD_ERR_CANCELLED:
        return "cancelled";
    case TD_ERR_BUSY:
        return "busy";
    case TD_ERR_TIMEOUT:
        return "timeout";
    case TD_ERR_PEER_DEAD:
        return "peer_dead";
    case TD_ERR_PROTOCOL:
        return "protocol";
    case TD_ERR_STALE:
        return "stale";
    case TD_ERR_CORRUPT:
        return "corrupt";
    case TD_ERR_NO_MEMORY:
        return "no_memory";
    case TD_ERR_IO:
        return "io";
    case TD_ERR_INTERNAL:
        return "internal";
    }
    return "unknown";
}

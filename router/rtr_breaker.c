#include "router/rtr_breaker.h"

#include "common/base/td_base.h"
#include "common/base/td_clock.h"

bool rtr_breaker_is_open(const rtr_breaker_t *b, uint64_t now_ns)
{
    return now_ns < b->until_ns;
}

bool rtr_breaker_failed(rtr_breaker_t *b, uint64_t now_ns)
{
    b->failures = TD_MIN(b->failures + 1, RTR_BREAKER_FAILURES);
    if (b->failures < RTR_BREAKER_FAILURES) {
        return false;
    }
    if (rtr_breaker_is_open(b, now_ns) && !b->probing) {
        return false; /* it was placed before, and is one of those that have opened it */
    }
    b->probing = false;
    b->open_ms = b->open_ms == 0 ? RTR_BREAKER_OPEN_MS
                                 : TD_MIN(2 * b->open_ms, (uint64_t)RTR_BREAKER_OPEN_MS_MAX);
    b->until_ns = now_ns + b->open_ms * TD_NS_PER_MS;
    return true;
}

bool rtr_breaker_succeeded(rtr_breaker_t *b)
{
    const bool was_open = b->open_ms > 0;

    *b = (rtr_breaker_t){0};
    return was_open;
}

void rtr_breaker_placed(rtr_breaker_t *b, uint64_t now_ns)
{
    if (b->open_ms > 0) {
        b->probing = true;
        b->until_ns = now_ns + RTR_BREAKER_PROBE_MS * TD_NS_PER_MS;
    }
}

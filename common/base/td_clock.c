#include "common/base/td_clock.h"

#include <errno.h>
#include <sys/random.h>
#include <time.h>

#include "common/base/td_base.h"

uint64_t td_now_ns(void)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * TD_NS_PER_S + (uint64_t)now.tv_nsec;
}

uint64_t td_wall_s(void)
{
    return (uint64_t)time(NULL);
}

uint64_t td_wall_ms(void)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_REALTIME, &now);
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / TD_NS_PER_MS;
}

uint64_t td_remaining_ns(uint64_t deadline_ns)
{
    uint64_t now = td_now_ns();
    return deadline_ns > now ? deadline_ns - now : 0;
}

void td_random_bytes(void *bytes, unsigned long len)
{
    uint8_t *at = bytes;
    while (len > 0) {
        ssize_t got = getrandom(at, len, 0);
        if (got < 0) {
            TD_ASSERT(errno == EINTR);
            continue;
        }
        at += got;
        len -= (unsigned long)got;
    }
}

uint64_t td_random_u64(void)
{
    uint64_t value = 0;
    td_random_bytes(&value, sizeof(value));
    return value;
}

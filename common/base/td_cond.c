#include "common/base/td_cond.h"

#include <time.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"

void td_cond_init(pthread_cond_t *cond)
{
    pthread_condattr_t attr;

    (void)pthread_condattr_init(&attr);
    (void)pthread_condattr_setclock(&attr, CLOCK_MONOTONIC); /* td_now_ns()'s */
    (void)pthread_cond_init(cond, &attr);
    (void)pthread_condattr_destroy(&attr);
}

bool td_cond_wait_until(pthread_cond_t *cond, pthread_mutex_t *mu, uint64_t deadline_ns)
{
    const struct timespec until = {.tv_sec = (time_t)(deadline_ns / TD_NS_PER_S),
                                   .tv_nsec = (long)(deadline_ns % TD_NS_PER_S)};

    return pthread_cond_timedwait(cond, mu, &until) == 0;
}

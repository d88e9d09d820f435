/* td_cond.h - a condition that is waited for until a time of td_now_ns()'s clock, which nobody
 * sets. Threads: init: one; wait_until: any, with the mutex held. */
#pragma once

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

/** End it with pthread_cond_destroy(). */
void td_cond_init(pthread_cond_t *cond);
/** As pthread_cond_timedwait(): it may wake without reason. False: the time has come. */
bool td_cond_wait_until(pthread_cond_t *cond, pthread_mutex_t *mu, uint64_t deadline_ns);

/* td_threads.h - a pool that runs one function on every thread and waits for all.
 * Waiters spin briefly, then sleep on a futex, so an idle node uses no CPU. Where spinning does not
 * pay, since more threads are runnable than there are cores, they soon spin hardly at all. The
 * calling thread is thread 0. Threads: owner (one caller at a time). */
#pragma once

#include <stdint.h>

#include "common/base/td_status.h"

#define TD_THREADS_MAX 256u

typedef struct td_threads td_threads_t;
typedef void (*td_threads_fn)(void *ctx, uint32_t thread_idx, uint32_t thread_count);

TD_MUST_CHECK td_status_t td_threads_create(uint32_t count, td_threads_t **out);
void td_threads_destroy(td_threads_t *threads);
uint32_t td_threads_count(const td_threads_t *threads);
/** Where a thread's even share of count things begins; it ends where the next one's does. */
static inline uint32_t td_threads_share(uint32_t count, uint32_t part, uint32_t parts)
{
    return (uint32_t)((uint64_t)count * part / parts);
}
/** Runs fn(ctx, i, count) on each thread; returns when all have. */
void td_threads_run(td_threads_t *threads, td_threads_fn fn, void *ctx);
/** Called from inside fn by every thread: none leaves before all have come. */
void td_threads_barrier(td_threads_t *threads, uint32_t thread_idx);

/* td_worker.h - a thread that runs one job at a time for a loop: submit, then an fd says it is
 * done. Threads: submit, done: the loop; the job runs on the worker's own thread. */
#pragma once

#include <stdbool.h>

#include "common/base/td_status.h"

typedef struct td_worker td_worker_t;
typedef void (*td_worker_fn)(void *ctx);

/** Errors: TD_ERR_NO_MEMORY, TD_ERR_IO. */
TD_MUST_CHECK td_status_t td_worker_create(td_worker_t **out);
/** Waits for the running job. */
void td_worker_destroy(td_worker_t *worker);
/** Starts a job; none may be running. */
void td_worker_submit(td_worker_t *worker, td_worker_fn fn, void *ctx);
/** Readable when the job has ended, or td_worker_poke() was called. */
int td_worker_fd(const td_worker_t *worker);
/** From inside the job: makes the loop look (progress). */
void td_worker_poke(td_worker_t *worker);
bool td_worker_is_busy(const td_worker_t *worker);
/** True once for each job that has ended; its writes are visible afterwards. Clears the fd. */
bool td_worker_take_done(td_worker_t *worker);

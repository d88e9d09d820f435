/* rtr_worker.h - threads that parse bodies, render chats and tokenise, so that neither the HTTP
 * thread nor the loop waits for a long prompt. Each has a bounded queue of its own. Threads:
 * create, destroy: init; submit: any. */
#pragma once

#include "router/rtr_loop.h"
#include "router/rtr_request.h"

#define RTR_WORKERS_MAX 64u
#define RTR_WORKER_QUEUE_MAX 512u
#define RTR_WORKER_HERE_BYTES 4096u /* of a body that the caller may parse itself: some 100 us */
#define RTR_WORKER_LARGE_BYTES (64u << 10) /* of a body that small ones shall not wait behind */

typedef struct rtr_workers rtr_workers_t;

TD_MUST_CHECK td_status_t rtr_workers_create(uint32_t count, const rtr_model_t *model,
                                             rtr_loop_t *loop, rtr_workers_t **out);
/** Ends the threads; what still waits is ended as shutdown. */
void rtr_workers_destroy(rtr_workers_t *workers);
/** Hands a request with its body over, with one reference. A small one that has the router to
 * itself is parsed here and now: that is faster than to wake a thread. Errors: TD_ERR_BUSY. */
TD_MUST_CHECK td_status_t rtr_workers_submit(rtr_workers_t *workers, rtr_request_t *req);

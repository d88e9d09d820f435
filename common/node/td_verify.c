#include "common/node/td_verify.h"

#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>

#include "common/base/td_base.h"
#include "common/base/td_fault.h"
#include "common/base/td_ring.h"
#include "common/kv/td_block_key.h"

struct td_verify {
    td_ring_t *jobs; /* owned: submitted, oldest first */
    size_t block_bytes;
    atomic_bool stop; /* release by destroy, acquire by the thread, before each job */
    pthread_t thread;
};

static void hash_blocks(const td_verify_t *v, td_verify_job_t *job)
{
    for (uint32_t i = 0; i < job->piece_count; i++) {
        const td_fetch_piece_t *piece = &job->pieces[i];
        if (piece->bytes > 0) {
            TD_FAULT_POINT("verify_block");
            job->hashes[i] = td_block_content_hash(piece->dest - piece->offset, v->block_bytes);
        }
    }
}

static void *verify_main(void *arg)
{
    td_verify_t *v = arg;
    struct pollfd waiting = {.fd = td_ring_fd(v->jobs), .events = POLLIN};
    void *item = NULL;

    for (;;) {
        /* Looked at before the queue: what was submitted before stop is completed after it. */
        bool stop = atomic_load_explicit(&v->stop, memory_order_acquire);
        while (td_ring_pop(v->jobs, &item)) {
            td_verify_job_t *job = item;
            stop = atomic_load_explicit(&v->stop, memory_order_acquire);
            job->status = stop ? TD_ERR_CANCELLED : TD_OK;
            if (!stop) {
                hash_blocks(v, job);
            }
            job->complete(job);
        }
        if (stop) {
            return NULL;
        }
        (void)poll(&waiting, 1, -1); /* a signal only makes it look */
        td_ring_drain_fd(v->jobs);
    }
}

td_status_t td_verify_create(uint32_t jobs_max, size_t block_bytes, td_verify_t **out)
{
    td_status_t status = TD_OK;
    td_verify_t *v = td_calloc(1, sizeof(*v));

    if (v == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    v->block_bytes = block_bytes;
    status = td_ring_create(jobs_max, &v->jobs);
    if (status != TD_OK) {
        goto err_free;
    }
    if (pthread_create(&v->thread, NULL, verify_main, v) != 0) {
        status = TD_ERR_IO;
        goto err_destroy_ring;
    }
    *out = v;
    return TD_OK;

err_destroy_ring:
    td_ring_destroy(v->jobs);
err_free:
    td_free(v);
    return status;
}

void td_verify_destroy(td_verify_t *v)
{
    if (v == NULL) {
        return;
    }
    atomic_store_explicit(&v->stop, true, memory_order_release);
    td_ring_wake(v->jobs);
    (void)pthread_join(v->thread, NULL);
    td_ring_destroy(v->jobs);
    td_free(v);
}

void td_verify_submit(td_verify_t *v, td_verify_job_t *job)
{
    /* The queue holds as many as may be under way. */
    TD_ASSERT(td_ring_push(v->jobs, job) == TD_OK);
}

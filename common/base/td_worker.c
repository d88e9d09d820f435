#include "common/base/td_worker.h"

#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "common/base/td_base.h"

typedef enum worker_state { WORKER_IDLE, WORKER_RUNNING, WORKER_DONE, WORKER_STOP } worker_state_t;

struct td_worker {
    pthread_mutex_t mutex; /* guards state, fn, ctx */
    pthread_cond_t changed;
    worker_state_t state;
    td_worker_fn fn;
    void *ctx;
    int fd;
    bool busy; /* the loop's own view */
    pthread_t thread;
};

void td_worker_poke(td_worker_t *w)
{
    uint64_t one = 1;
    ssize_t n = write(w->fd, &one, sizeof(one));
    (void)n; /* saturated: readable anyway */
}

static void *worker_main(void *arg)
{
    td_worker_t *w = arg;
    (void)pthread_mutex_lock(&w->mutex);
    for (;;) {
        while (w->state != WORKER_RUNNING && w->state != WORKER_STOP) {
            (void)pthread_cond_wait(&w->changed, &w->mutex);
        }
        if (w->state == WORKER_STOP) {
            break;
        }
        (void)pthread_mutex_unlock(&w->mutex);
        w->fn(w->ctx);
        (void)pthread_mutex_lock(&w->mutex);
        if (w->state == WORKER_RUNNING) {
            w->state = WORKER_DONE;
        }
        td_worker_poke(w);
    }
    (void)pthread_mutex_unlock(&w->mutex);
    return NULL;
}

td_status_t td_worker_create(td_worker_t **out)
{
    td_worker_t *w = td_calloc(1, sizeof(*w));
    if (w == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    w->fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    (void)pthread_mutex_init(&w->mutex, NULL);
    (void)pthread_cond_init(&w->changed, NULL);
    if (w->fd < 0 || pthread_create(&w->thread, NULL, worker_main, w) != 0) {
        if (w->fd >= 0) {
            (void)close(w->fd);
        }
        td_free(w);
        return TD_ERR_IO;
    }
    *out = w;
    return TD_OK;
}

void td_worker_destroy(td_worker_t *w)
{
    if (w == NULL) {
        return;
    }
    (void)pthread_mutex_lock(&w->mutex);
    w->state = WORKER_STOP;
    (void)pthread_cond_signal(&w->changed);
    (void)pthread_mutex_unlock(&w->mutex);
    (void)pthread_join(w->thread, NULL);
    (void)pthread_cond_destroy(&w->changed);
    (void)pthread_mutex_destroy(&w->mutex);
    (void)close(w->fd);
    td_free(w);
}

void td_worker_submit(td_worker_t *w, td_worker_fn fn, void *ctx)
{
    (void)pthread_mutex_lock(&w->mutex);
    TD_ASSERT(w->state == WORKER_IDLE);
    w->fn = fn;
    w->ctx = ctx;
    w->state = WORKER_RUNNING;
    w->busy = true;
    (void)pthread_cond_signal(&w->changed);
    (void)pthread_mutex_unlock(&w->mutex);
}

int td_worker_fd(const td_worker_t *w)
{
    return w->fd;
}

bool td_worker_is_busy(const td_worker_t *w)
{
    return w->busy;
}

bool td_worker_take_done(td_worker_t *w)
{
    uint64_t seen = 0;
    ssize_t n = read(w->fd, &seen, sizeof(seen));
    bool done = false;
    (void)n;
    (void)pthread_mutex_lock(&w->mutex);
    if (w->state == WORKER_DONE) {
        w->state = WORKER_IDLE;
        w->busy = false;
        done = true;
    }
    (void)pthread_mutex_unlock(&w->mutex);
    return done;
}

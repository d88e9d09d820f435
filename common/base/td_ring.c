#include "common/base/td_ring.h"

#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "common/base/td_base.h"

struct td_ring {
    pthread_mutex_t mutex; /* guards head, count, items */
    int fd;
    bool wake_once; /* fixed before the first push */
    uint32_t capacity;
    uint32_t head;
    uint32_t count;
    void *items[];
};

td_status_t td_ring_create(uint32_t capacity, td_ring_t **out)
{
    td_ring_t *ring = td_calloc(1, sizeof(*ring) + (size_t)capacity * sizeof(void *));
    if (ring == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    ring->fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (ring->fd < 0) {
        td_free(ring);
        return TD_ERR_IO;
    }
    (void)pthread_mutex_init(&ring->mutex, NULL);
    ring->capacity = capacity;
    *out = ring;
    return TD_OK;
}

void td_ring_wake_once(td_ring_t *ring)
{
    ring->wake_once = true;
}

void td_ring_destroy(td_ring_t *ring)
{
    if (ring == NULL) {
        return;
    }
    (void)close(ring->fd);
    (void)pthread_mutex_destroy(&ring->mutex);
    td_free(ring);
}

void td_ring_wake(td_ring_t *ring)
{
    uint64_t one = 1;
    /* Fails only when the counter is saturated: then the reader is awake anyway. */
    ssize_t n = write(ring->fd, &one, sizeof(one));
    (void)n;
}

td_status_t td_ring_push(td_ring_t *ring, void *item)
{
    td_status_t status = TD_OK;
    bool wake = true;
    (void)pthread_mutex_lock(&ring->mutex);
    if (ring->count == ring->capacity) {
        status = TD_ERR_BUSY;
    } else {
        ring->items[(ring->head + ring->count) % ring->capacity] = item;
        ring->count++;
        /* Who finds it empty looks again after a wake-up; until then it pops what is behind. */
        wake = !ring->wake_once || ring->count == 1;
    }
    (void)pthread_mutex_unlock(&ring->mutex);
    if (status == TD_OK && wake) {
        td_ring_wake(ring);
    }
    return status;
}

bool td_ring_pop(td_ring_t *ring, void **item_out)
{
    bool got = false;
    (void)pthread_mutex_lock(&ring->mutex);
    if (ring->count > 0) {
        *item_out = ring->items[ring->head];
        ring->head = (ring->head + 1) % ring->capacity;
        ring->count--;
        got = true;
    }
    (void)pthread_mutex_unlock(&ring->mutex);
    return got;
}

int td_ring_fd(const td_ring_t *ring)
{
    return ring->fd;
}

void td_ring_drain_fd(td_ring_t *ring)
{
    uint64_t seen = 0;
    ssize_t n = read(ring->fd, &seen, sizeof(seen));
    (void)n; /* EAGAIN: nothing was signalled */
}

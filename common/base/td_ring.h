/* td_ring.h - a bounded queue of pointers with an eventfd, to hand work to a loop's thread.
 * Threads: any (many producers, one consumer). A mutex guards the slots: items are whole requests
 * or batches, never single tokens, so the lock is never hot. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "common/base/td_status.h"

typedef struct td_ring td_ring_t;

/** Units: capacity in items, > 0. Errors: TD_ERR_NO_MEMORY, TD_ERR_IO. */
TD_MUST_CHECK td_status_t td_ring_create(uint32_t capacity, td_ring_t **out);
/** For a reader that pops until the ring is empty whenever it is woken, or wakes itself: only an
 * item that comes into an empty ring wakes it. Call before the first push. */
void td_ring_wake_once(td_ring_t *ring);
/** Items left inside are the caller's loss: drain first. */
void td_ring_destroy(td_ring_t *ring);
/** Errors: TD_ERR_BUSY (full). */
TD_MUST_CHECK td_status_t td_ring_push(td_ring_t *ring, void *item);
/** false when empty. */
bool td_ring_pop(td_ring_t *ring, void **item_out);
/** Readable while items may be waiting; td_ring_drain_fd() before popping. */
int td_ring_fd(const td_ring_t *ring);
void td_ring_drain_fd(td_ring_t *ring);
/** Makes the fd readable without an item. */
void td_ring_wake(td_ring_t *ring);

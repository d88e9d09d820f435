#include "common/model/td_threads.h"

#include <linux/futex.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/base/td_log.h"

/* How long a waiter spins before it sleeps. At most longer than the gap between two steps of a pass
 * and than a sleeper takes to wake up, else one that slept would send the others to sleep in turn.
 * At least next to nothing: when the one that is waited for has no core, because this spinning
 * takes it or another process does, spinning only makes it later. In time, not in pauses: one is 40
 * cycles on one CPU and 140 on another. */
#define THREADS_SPIN_NS_MAX 100000u
#define THREADS_SPIN_NS_MIN 1000u
#define THREADS_PROBE_WAITS 64u /* one in so many spins as long as may be */
#define THREADS_PAUSES 16u      /* between two looks at the clock */

/* A number that only grows and that threads can wait on. */
typedef struct gate {
    _Alignas(TD_CACHE_LINE_BYTES) atomic_uint_fast64_t value;
    _Alignas(TD_CACHE_LINE_BYTES) atomic_uint sleepers;
} gate_t;

/* What a thread has learned from its waits. */
typedef struct patience {
    _Alignas(TD_CACHE_LINE_BYTES) uint64_t spin_ns; /* its own thread's */
    uint32_t waits;
} patience_t;

typedef struct worker {
    td_threads_t *threads; /* borrowed: the pool outlives its workers */
    pthread_t thread;
    uint32_t idx;
} worker_t;

struct td_threads {
    gate_t start;   /* runs so far, and one more to end */
    gate_t barrier; /* arrivals so far: count of them complete a barrier */
    uint32_t count;
    uint32_t started;  /* workers that exist, without thread 0 */
    bool stop;         /* written before a step of start, read after it */
    td_threads_fn fn;  /* as stop */
    void *ctx;         /* as stop */
    worker_t *workers; /* owned; [count - 1] */
    patience_t patience[TD_THREADS_MAX];
};

static void cpu_relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* True when the value has come to `goal` in time. The acquire pairs with the additions: what the
 * adding threads wrote before is visible after. */
static bool gate_spin(gate_t *gate, uint64_t goal, uint64_t spin_ns)
{
    uint64_t begin_ns = 0;

    for (uint32_t i = 1;; i++) {
        if (atomic_load_explicit(&gate->value, memory_order_acquire) >= goal) {
            return true;
        }
        cpu_relax();
        if (i % THREADS_PAUSES == 0) {
            uint64_t now_ns = td_now_ns();
            if (begin_ns == 0) {
                begin_ns = now_ns;
            } else if (now_ns - begin_ns >= spin_ns) {
                return false;
            }
        }
    }
}

/* The half of the value that changes always: a futex has 32 bits. */
static const uint32_t *gate_word(const gate_t *gate)
{
    const bool big_endian = __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__;
    return (const uint32_t *)(const void *)&gate->value + (big_endian ? 1 : 0);
}

/* Sequentially consistent with the additions and gate_wake(): either the adder sees this sleeper,
 * or the sleeper sees the new value (here or in the kernel's comparison). Only the addition that
 * makes the value come to a goal wakes; those before it change the word, too, which at worst wakes
 * nobody. */
static void gate_sleep(gate_t *gate, uint64_t goal)
{
    uint64_t seen = 0;

    (void)atomic_fetch_add(&gate->sleepers, 1);
    while ((seen = atomic_load(&gate->value)) < goal) {
        (void)syscall(SYS_futex, gate_word(gate), FUTEX_WAIT_PRIVATE, (uint32_t)seen, NULL, NULL,
                      0);
    }
    (void)atomic_fetch_sub(&gate->sleepers, 1);
}

/* Returns when the value has come to `goal`; ordered as gate_spin(). Whoever spun in vain spins
 * half as long next time, who didn't twice as long. Now and then one spins as long as may be: were
 * all others running, it would see them come, and then trusts them again. Else waits a little
 * longer than the shortest spin would be slept through for ever, also on a machine that is quiet
 * again. */
static void gate_wait(gate_t *gate, uint64_t goal, patience_t *patience)
{
    bool probe = ++patience->waits % THREADS_PROBE_WAITS == 0;

    if (gate_spin(gate, goal, probe ? THREADS_SPIN_NS_MAX : patience->spin_ns)) {
        patience->spin_ns =
            probe ? THREADS_SPIN_NS_MAX : TD_MIN(patience->spin_ns * 2, THREADS_SPIN_NS_MAX);
        return;
    }
    patience->spin_ns = TD_MAX(patience->spin_ns / 2, THREADS_SPIN_NS_MIN);
    gate_sleep(gate, goal);
}

static void gate_wake(gate_t *gate)
{
    if (atomic_load(&gate->sleepers) != 0) {
        (void)syscall(SYS_futex, gate_word(gate), FUTEX_WAKE_PRIVATE, TD_THREADS_MAX, NULL, NULL,
                      0);
    }
}

/* One addition both says that a thread has come and, of the last one, that all have: a flag of its
 * own would cost a second trip of a cache line between the cores, and there are a hundred barriers
 * and more in a pass of 2 ms. */
void td_threads_barrier(td_threads_t *threads, uint32_t thread_idx)
{
    uint64_t before = 0;
    uint64_t goal = 0;

    TD_ASSERT(thread_idx < threads->count);
    if (threads->count == 1) {
        return;
    }
    /* Release and, for the last one, acquire; sequentially consistent for those who sleep. */
    before = atomic_fetch_add(&threads->barrier.value, 1);
    goal = (before / threads->count + 1) * threads->count;
    if (before + 1 == goal) {
        gate_wake(&threads->barrier);
    } else {
        gate_wait(&threads->barrier, goal, &threads->patience[thread_idx]);
    }
}

static void *worker_main(void *arg)
{
    const worker_t *self = arg;
    td_threads_t *threads = self->threads;

    for (uint64_t runs = 1;; runs++) {
        gate_wait(&threads->start, runs, &threads->patience[self->idx]);
        if (threads->stop) {
            return NULL;
        }
        threads->fn(threads->ctx, self->idx, threads->count);
        td_threads_barrier(threads, self->idx);
    }
}

static void start_workers(td_threads_t *threads)
{
    (void)atomic_fetch_add(&threads->start.value, 1);
    gate_wake(&threads->start);
}

void td_threads_run(td_threads_t *threads, td_threads_fn fn, void *ctx)
{
    threads->fn = fn;
    threads->ctx = ctx;
    if (threads->count > 1) {
        start_workers(threads);
    }
    fn(ctx, 0, threads->count);
    td_threads_barrier(threads, 0);
}

uint32_t td_threads_count(const td_threads_t *threads)
{
    return threads->count;
}

void td_threads_destroy(td_threads_t *threads)
{
    if (threads == NULL) {
        return;
    }
    threads->stop = true;
    start_workers(threads);
    for (uint32_t i = 0; i < threads->started; i++) {
        if (pthread_join(threads->workers[i].thread, NULL) != 0) {
            TD_LOG_WARN("worker thread not joined", "thread=%u", i + 1);
        }
    }
    td_free(threads->workers);
    td_free(threads);
}

td_status_t td_threads_create(uint32_t count, td_threads_t **out)
{
    td_status_t status = TD_ERR_NO_MEMORY;
    td_threads_t *threads = NULL;

    TD_ASSERT(out != NULL);
    if (count == 0 || count > TD_THREADS_MAX) {
        TD_LOG_ERROR("thread count out of range", "threads=%u max=%u", count, TD_THREADS_MAX);
        return TD_ERR_INVALID;
    }
    threads = td_alloc_aligned(TD_CACHE_LINE_BYTES, sizeof(*threads));
    if (threads == NULL) {
        goto err;
    }
    *threads = (td_threads_t){.count = count};
    for (uint32_t i = 0; i < count; i++) {
        threads->patience[i].spin_ns = THREADS_SPIN_NS_MAX;
    }
    threads->workers = td_calloc(count, sizeof(*threads->workers));
    if (threads->workers == NULL) {
        goto err_destroy;
    }
    for (uint32_t i = 0; i + 1 < count; i++) {
        worker_t *worker = &threads->workers[i];
        worker->threads = threads;
        worker->idx = i + 1;
        if (pthread_create(&worker->thread, NULL, worker_main, worker) != 0) {
            status = TD_ERR_BUSY;
            goto err_destroy;
        }
        threads->started++;
    }
    *out = threads;
    return TD_OK;

err_destroy:
    td_threads_destroy(threads);
err:
    TD_LOG_ERROR("thread pool not created", "status=%s threads=%u", td_status_name(status), count);
    return status;
}

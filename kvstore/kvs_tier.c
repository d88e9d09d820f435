#include "kvstore/kvs_tier.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/base/td_fault.h"
#include "common/base/td_log.h"
#include "common/base/td_ring.h"
#include "kvstore/kvs_tier_internal.h"

#define BLOCK_BYTES_MAX (1u << 30)
#define KINDS 4u /* of kvs_tier_kind_t */

typedef struct job_list { /* oldest first */
    kvs_tier_job_t *first;
    kvs_tier_job_t *last;
} job_list_t;

struct kvs_tier {
    td_ring_t *submitted; /* owned: jobs for the thread */
    td_ring_t *ended;     /* owned: jobs for the loop; both have room for all there are */
    kvs_tier_job_t *jobs; /* owned: of all kinds, one kind after the other */
    uint32_t job_count;
    kvs_tier_job_t *idle[KINDS]; /* loop: lists of those to be had */
    td_block_key_t *listed;      /* owned, [KVS_TIER_LIST_MAX]; whoever has the LIST job */
    uint64_t *listed_hashes;     /* owned, the same */
    atomic_bool stop;            /* release by destroy, acquire by the thread */
    /* Relaxed: hints of the thread's to the loop; what they speak of travels by the rings. */
    atomic_bool writable;
    atomic_uint_fast64_t life;
    job_list_t gets; /* thread: waiting, as those below */
    job_list_t puts;
    kvs_tier_disk_t disk; /* thread, after create */
    pthread_t thread;
};

/* --- thread ----------------------------------------------------------------------------------- */

static void list_push(job_list_t *list, kvs_tier_job_t *job)
{
    job->next = NULL;
    if (list->first == NULL) {
        list->first = job;
    } else {
        list->last->next = job;
    }
    list->last = job;
}

static uint32_t list_take(job_list_t *list, kvs_tier_job_t **jobs, uint32_t max)
{
    uint32_t count = 0;
    for (; list->first != NULL && count < max; count++) {
        jobs[count] = list->first;
        list->first = list->first->next;
    }
    return count;
}

static void end_job(kvs_tier_t *t, kvs_tier_job_t *job)
{
    TD_ASSERT(td_ring_push(t->ended, job) == TD_OK);
}

static void run_drop(kvs_tier_t *t, kvs_tier_job_t *drop)
{
    job_list_t rest = {0};
    kvs_tier_job_t *job = NULL;

    while (list_take(&t->puts, &job, 1) == 1) {
        if (td_block_key_equal(&job->done.key, &drop->done.key)) {
            job->done.status = TD_ERR_CANCELLED;
            end_job(t, job);
        } else {
            list_push(&rest, job);
        }
    }
    t->puts = rest;
    if (t->disk.is_open) {
        kvs_tier_disk_drop(&t->disk, &drop->done.key);
    }
    /* What is closed cannot forget: it may come back with the next opening. */
    drop->done.status = t->disk.is_open ? TD_OK : TD_ERR_BUSY;
    end_job(t, drop);
}

static void run_list(kvs_tier_t *t, kvs_tier_job_t *job)
{
    const kvs_tier_slots_t *slots = &t->disk.slots;
    uint32_t slot = job->from;
    uint32_t count = 0;

    for (; t->disk.is_open && slot < slots->count && count < KVS_TIER_LIST_MAX; slot++) {
        if (slots->at[slot].generation != 0) {
            t->listed[count] = slots->at[slot].key;
            t->listed_hashes[count++] = slots->at[slot].content_hash;
        }
    }
    job->done.status = TD_OK;
    job->done.count = count;
    job->done.keys = t->listed;
    job->done.hashes = t->listed_hashes;
    job->done.next = t->disk.is_open && slot < slots->count ? slot : 0;
    end_job(t, job);
}

static void take_submitted(kvs_tier_t *t)
{
    void *item = NULL;

    while (td_ring_pop(t->submitted, &item)) {
        kvs_tier_job_t *job = item;
        switch (job->done.kind) {
        case KVS_TIER_PUT:
            list_push(&t->puts, job);
            break;
        case KVS_TIER_GET:
            list_push(&t->gets, job);
            break;
        case KVS_TIER_DROP:
            run_drop(t, job);
            break;
        case KVS_TIER_LIST:
            run_list(t, job);
            break;
        }
    }
}

/* Somebody may be waiting for these: before any write. */
static void run_gets(kvs_tier_t *t)
{
    kvs_tier_job_t *jobs[KVS_TIER_OPS_MAX];
    uint32_t count = list_take(&t->gets, jobs, KVS_TIER_OPS_MAX);

    if (count > 0) {
        kvs_tier_disk_get(&t->disk, jobs, count); /* closed: it knows no key */
    }
    for (uint32_t i = 0; i < count; i++) {
        end_job(t, jobs[i]);
    }
}

/* One batch, so that reads wait for no more than that. */
static void run_puts(kvs_tier_t *t)
{
    kvs_tier_job_t *jobs[KVS_TIER_PUT_BATCH_MAX];
    uint32_t count = list_take(&t->puts, jobs, KVS_TIER_PUT_BATCH_MAX);

    if (count == 0) {
        return;
    }
    if (kvs_tier_disk_is_writable(&t->disk, td_now_ns())) {
        kvs_tier_disk_put(&t->disk, jobs, count);
    } else {
        for (uint32_t i = 0; i < count; i++) {
            jobs[i]->done.status = TD_ERR_BUSY;
            td_metric_add(t->disk.metrics.dropped, 1);
        }
    }
    for (uint32_t i = 0; i < count; i++) {
        end_job(t, jobs[i]);
    }
}

static bool is_stopped(const kvs_tier_t *t)
{
    return atomic_load_explicit(&t->stop, memory_order_acquire);
}

/* Sleeps until there is a job or something to look after. */
static void sleep_until_needed(kvs_tier_t *t)
{
    struct pollfd waiting = {.fd = td_ring_fd(t->submitted), .events = POLLIN};
    const kvs_tier_disk_t *d = &t->disk;
    uint64_t until_ns = d->is_open ? d->check_ns : d->retry_ns;

    if (d->is_open && !kvs_tier_disk_is_writable(d, td_now_ns())) {
        until_ns = TD_MIN(until_ns, d->retry_ns);
    }
    if (t->gets.first == NULL && t->puts.first == NULL) {
        (void)poll(&waiting, 1, (int)(td_remaining_ns(until_ns) / TD_NS_PER_MS) + 1);
    }
    td_ring_drain_fd(t->submitted);
}

static void *tier_main(void *arg)
{
    kvs_tier_t *t = arg;
    uint64_t life = 0;

    while (!is_stopped(t)) {
        uint64_t now_ns = td_now_ns();
        if (!t->disk.is_open && now_ns >= t->disk.retry_ns && kvs_tier_disk_open(&t->disk)) {
            atomic_store_explicit(&t->life, ++life, memory_order_relaxed);
        }
        take_submitted(t);
        run_gets(t);
        if (is_stopped(t)) {
            break;
        }
        run_puts(t);
        kvs_tier_disk_maintain(&t->disk, now_ns);
        atomic_store_explicit(&t->writable, kvs_tier_disk_is_writable(&t->disk, td_now_ns()),
                              memory_order_relaxed);
        sleep_until_needed(t);
    }
    return NULL;
}

/* --- loop ------------------------------------------------------------------------------------- */

static td_status_t jobs_create(kvs_tier_t *t)
{
    uint32_t slot_bytes = t->disk.slot_bytes;
    uint32_t staged =
        TD_MAX(TD_MIN(KVS_TIER_STAGING_BYTES_MAX / slot_bytes, KVS_TIER_PUTS_MAX), 2u);
    const uint32_t counts[KINDS] = {[KVS_TIER_PUT] = staged,
                                    [KVS_TIER_GET] = staged,
                                    [KVS_TIER_DROP] = KVS_TIER_DROPS_MAX,
                                    [KVS_TIER_LIST] = 1};
    uint32_t at = 0;

    t->jobs = td_calloc(2 * (size_t)staged + KVS_TIER_DROPS_MAX + 1, sizeof(*t->jobs));
    if (t->jobs == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    t->job_count = 2 * staged + KVS_TIER_DROPS_MAX + 1;
    for (uint32_t kind = 0; kind < KINDS; kind++) {
        for (uint32_t i = 0; i < counts[kind]; i++) {
            kvs_tier_job_t *job = &t->jobs[at++];
            job->done.kind = (kvs_tier_kind_t)kind;
            job->next = t->idle[kind];
            t->idle[kind] = job;
            if (kind == KVS_TIER_PUT || kind == KVS_TIER_GET) {
                job->slot_bytes = td_alloc_aligned(KVS_TIER_PAGE_BYTES, slot_bytes);
                if (job->slot_bytes == NULL) {
                    return TD_ERR_NO_MEMORY;
                }
                memset(job->slot_bytes, 0, slot_bytes);
            }
        }
    }
    return TD_OK;
}

static void tier_free(kvs_tier_t *t)
{
    for (uint32_t i = 0; i < t->job_count; i++) {
        td_free(t->jobs[i].slot_bytes);
    }
    td_free(t->jobs);
    td_free(t->listed);
    td_free(t->listed_hashes);
    td_ring_destroy(t->submitted);
    td_ring_destroy(t->ended);
    kvs_tier_disk_fini(&t->disk);
    td_free(t);
}

/* Signals are the loop's; one for a file that may not grow (SIGXFSZ) is an error of the write. */
static td_status_t thread_start(kvs_tier_t *t)
{
    sigset_t all;
    sigset_t before;
    int rc = 0;

    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_SETMASK, &all, &before);
    rc = pthread_create(&t->thread, NULL, tier_main, t);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    return rc == 0 ? TD_OK : TD_ERR_IO;
}

td_status_t kvs_tier_create(const kvs_tier_config_t *config, kvs_tier_t **out)
{
    kvs_tier_t *t = NULL;
    td_status_t status = TD_ERR_NO_MEMORY;

    if (config->block_bytes == 0 || config->block_bytes > BLOCK_BYTES_MAX ||
        kvs_tier_slot_count(config->bytes, config->block_bytes) == 0) {
        TD_LOG_ERROR("cold tier below one block", "bytes=%llu block_bytes=%u",
                     (unsigned long long)config->bytes, config->block_bytes);
        return TD_ERR_INVALID;
    }
    t = td_calloc(1, sizeof(*t));
    if (t == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    status = kvs_tier_disk_init(&t->disk, config);
    if (status != TD_OK) {
        td_free(t);
        return status;
    }
    atomic_init(&t->stop, false);
    atomic_init(&t->writable, true); /* what is put before the files are open waits for them */
    atomic_init(&t->life, 0);
    t->listed = td_calloc(KVS_TIER_LIST_MAX, sizeof(*t->listed));
    t->listed_hashes = td_calloc(KVS_TIER_LIST_MAX, sizeof(*t->listed_hashes));
    status = t->listed == NULL || t->listed_hashes == NULL ? TD_ERR_NO_MEMORY : jobs_create(t);
    if (status == TD_OK) {
        status = td_ring_create(t->job_count, &t->submitted);
    }
    if (status == TD_OK) {
        status = td_ring_create(t->job_count, &t->ended);
    }
    if (status == TD_OK) {
        status = thread_start(t);
    }
    if (status != TD_OK) {
        tier_free(t);
        return status;
    }
    *out = t;
    return TD_OK;
}

void kvs_tier_destroy(kvs_tier_t *t)
{
    struct timespec until;

    if (t == NULL) {
        return;
    }
    atomic_store_explicit(&t->stop, true, memory_order_release);
    td_ring_wake(t->submitted);
    (void)clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += KVS_TIER_STOP_MS / 1000;
    if (pthread_timedjoin_np(t->thread, NULL, &until) != 0) {
        TD_LOG_ERROR("the cold tier's disk does not answer, its thread is left behind",
                     "waited_ms=%u", KVS_TIER_STOP_MS);
        return;
    }
    tier_free(t);
}

static kvs_tier_job_t *idle_take(kvs_tier_t *t, kvs_tier_kind_t kind)
{
    kvs_tier_job_t *job = t->idle[kind];
    if (job != NULL) {
        t->idle[kind] = job->next;
        job->done = (kvs_tier_done_t){.kind = kind};
    }
    return job;
}

static void submit(kvs_tier_t *t, kvs_tier_job_t *job)
{
    TD_ASSERT(td_ring_push(t->submitted, job) == TD_OK);
}

bool kvs_tier_can_put(const kvs_tier_t *t)
{
    return t->idle[KVS_TIER_PUT] != NULL &&
           atomic_load_explicit(&t->writable, memory_order_relaxed);
}

void kvs_tier_count_dropped(kvs_tier_t *t)
{
    td_metric_add(t->disk.metrics.dropped, 1);
}

td_status_t kvs_tier_put(kvs_tier_t *t, const td_block_key_t *key, uint64_t content_hash,
                         const uint8_t *bytes)
{
    kvs_tier_job_t *job = kvs_tier_can_put(t) ? idle_take(t, KVS_TIER_PUT) : NULL;

    if (job == NULL) {
        td_metric_add(t->disk.metrics.dropped, 1);
        return TD_ERR_BUSY;
    }
    job->done.key = *key;
    job->done.hash = content_hash;
    memcpy(job->slot_bytes + KVS_TIER_HEADER_BYTES, bytes, t->disk.block_bytes);
    submit(t, job);
    return TD_OK;
}

td_status_t kvs_tier_get(kvs_tier_t *t, const td_block_key_t *key, uint64_t tag)
{
    kvs_tier_job_t *job = idle_take(t, KVS_TIER_GET);

    if (job == NULL) {
        return TD_ERR_BUSY;
    }
    job->done.key = *key;
    job->done.tag = tag;
    submit(t, job);
    return TD_OK;
}

td_status_t kvs_tier_drop(kvs_tier_t *t, const td_block_key_t *key)
{
    kvs_tier_job_t *job = idle_take(t, KVS_TIER_DROP);

    if (job == NULL) {
        return TD_ERR_BUSY;
    }
    job->done.key = *key;
    submit(t, job);
    return TD_OK;
}

td_status_t kvs_tier_list(kvs_tier_t *t, uint32_t from)
{
    kvs_tier_job_t *job = idle_take(t, KVS_TIER_LIST);

    if (job == NULL) {
        return TD_ERR_BUSY;
    }
    job->from = from;
    submit(t, job);
    return TD_OK;
}

int kvs_tier_fd(const kvs_tier_t *t)
{
    return td_ring_fd(t->ended);
}

const kvs_tier_done_t *kvs_tier_next(kvs_tier_t *t)
{
    void *item = NULL;

    if (!td_ring_pop(t->ended, &item)) {
        td_ring_drain_fd(t->ended);
        if (!td_ring_pop(t->ended, &item)) { /* one may have come in between */
            return NULL;
        }
    }
    return &((kvs_tier_job_t *)item)->done;
}

void kvs_tier_release(kvs_tier_t *t, const kvs_tier_done_t *done)
{
    /* done is the first member of its job. */
    kvs_tier_job_t *job = (kvs_tier_job_t *)(void *)(uintptr_t)done;

    job->next = t->idle[done->kind];
    t->idle[done->kind] = job;
}

uint64_t kvs_tier_life(const kvs_tier_t *t)
{
    return atomic_load_explicit(&t->life, memory_order_relaxed);
}

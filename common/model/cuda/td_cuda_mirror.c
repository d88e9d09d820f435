#include "common/model/cuda/td_cuda_mirror.h"

#include <pthread.h>
#include <sys/queue.h>

#include "common/base/td_base.h"
#include "common/base/td_log.h"

/* Of all places, how many transfers may keep: the rest is for passes. */
#define PINNED_PART 8u
#define NEVER_WHOLE SIZE_MAX

typedef struct place {
    uint32_t block; /* TD_CUDA_NO_PLACE: none */
    uint64_t epoch; /* of the block, when it was taken last */
    uint64_t pass;  /* that used it last */
    bool valid;
    bool exact;    /* every byte is the host's, also those that no pass reads */
    bool uploaded; /* by the pass that used it last: not there before that one's end */
    uint32_t pins; /* transfers that read or write it */
    size_t landed; /* bytes of a copy that transfers bring, from the first on; or NEVER_WHOLE */
    TAILQ_ENTRY(place) link;
} place_t;

struct td_cuda_mirror {
    place_t *places;    /* owned; [place_count] */
    uint32_t *place_of; /* owned; [block_count] */
    uint32_t place_count;
    uint32_t block_count;
    uint64_t pass;
    bool running;    /* a pass */
    uint32_t pinned; /* places with pins */
    pthread_mutex_t mutex;
    TAILQ_HEAD(, place) by_use; /* the least recently used first */
};

td_status_t td_cuda_mirror_create(uint32_t places, uint32_t blocks, td_cuda_mirror_t **out)
{
    td_cuda_mirror_t *m = td_calloc(1, sizeof(*m));

    if (m == NULL) {
        goto err;
    }
    m->places = td_calloc(places, sizeof(*m->places));
    m->place_of = td_calloc(blocks, sizeof(*m->place_of));
    if (m->places == NULL || m->place_of == NULL) {
        goto err_destroy;
    }
    (void)pthread_mutex_init(&m->mutex, NULL);
    m->place_count = places;
    m->block_count = blocks;
    TAILQ_INIT(&m->by_use);
    for (uint32_t i = 0; i < places; i++) {
        m->places[i].block = TD_CUDA_NO_PLACE;
        TAILQ_INSERT_TAIL(&m->by_use, &m->places[i], link);
    }
    for (uint32_t i = 0; i < blocks; i++) {
        m->place_of[i] = TD_CUDA_NO_PLACE;
    }
    *out = m;
    return TD_OK;

err_destroy:
    td_cuda_mirror_destroy(m);
err:
    TD_LOG_ERROR("no memory for the list of device blocks", "places=%u blocks=%u", places, blocks);
    return TD_ERR_NO_MEMORY;
}

void td_cuda_mirror_destroy(td_cuda_mirror_t *m)
{
    if (m == NULL) {
        return;
    }
    if (m->place_count > 0) {
        (void)pthread_mutex_destroy(&m->mutex);
    }
    td_free(m->places);
    td_free(m->place_of);
    td_free(m);
}

static void lock(td_cuda_mirror_t *m)
{
    (void)pthread_mutex_lock(&m->mutex);
}

static void unlock(td_cuda_mirror_t *m)
{
    (void)pthread_mutex_unlock(&m->mutex);
}

void td_cuda_mirror_begin(td_cuda_mirror_t *m)
{
    lock(m);
    m->pass++;
    m->running = true;
    unlock(m);
}

void td_cuda_mirror_end(td_cuda_mirror_t *m)
{
    lock(m);
    m->running = false;
    unlock(m);
}

/* The least recently used place that neither this pass nor a transfer uses, or NULL. */
static place_t *find_unused(const td_cuda_mirror_t *m)
{
    place_t *p = NULL;

    TAILQ_FOREACH(p, &m->by_use, link)
    {
        if (p->pins == 0 && !(m->running && p->pass == m->pass)) {
            return p;
        }
    }
    return NULL;
}

/* The block's place: the one it has, or another block's. Not valid where that is so. */
static place_t *place_for(td_cuda_mirror_t *m, uint32_t block)
{
    place_t *p = NULL;

    if (m->place_of[block] != TD_CUDA_NO_PLACE) {
        return &m->places[m->place_of[block]];
    }
    p = find_unused(m);
    if (p == NULL) {
        return NULL;
    }
    if (p->block != TD_CUDA_NO_PLACE) {
        m->place_of[p->block] = TD_CUDA_NO_PLACE;
    }
    p->block = block;
    p->valid = false;
    m->place_of[block] = (uint32_t)(p - m->places);
    return p;
}

td_status_t td_cuda_mirror_take(td_cuda_mirror_t *m, uint32_t block, uint64_t epoch,
                                uint32_t *place_out, bool *valid_out)
{
    place_t *p = NULL;

    TD_ASSERT(block < m->block_count);
    lock(m);
    p = place_for(m, block);
    if (p == NULL) {
        unlock(m);
        return TD_ERR_NO_MEMORY;
    }
    p->valid = p->valid && p->epoch == epoch;
    p->uploaded = p->uploaded && p->valid && p->pass == m->pass;
    p->landed = NEVER_WHOLE; /* a pass makes the copy, if there is none */
    p->epoch = epoch;
    p->pass = m->pass;
    TAILQ_REMOVE(&m->by_use, p, link);
    TAILQ_INSERT_TAIL(&m->by_use, p, link);
    *place_out = m->place_of[block];
    *valid_out = p->valid;
    unlock(m);
    return TD_OK;
}

void td_cuda_mirror_validate(td_cuda_mirror_t *m, uint32_t block, bool uploaded)
{
    place_t *p = NULL;

    lock(m);
    TD_ASSERT(block < m->block_count && m->place_of[block] != TD_CUDA_NO_PLACE);
    p = &m->places[m->place_of[block]];
    if (!p->valid) {
        p->valid = true;
        p->exact = uploaded;
        p->uploaded = uploaded;
    }
    unlock(m);
}

void td_cuda_mirror_filled(td_cuda_mirror_t *m, uint32_t block)
{
    lock(m);
    if (block < m->block_count && m->place_of[block] != TD_CUDA_NO_PLACE) {
        m->places[m->place_of[block]].exact = true;
    }
    unlock(m);
}

void td_cuda_mirror_forget(td_cuda_mirror_t *m, uint32_t block)
{
    lock(m);
    if (block < m->block_count && m->place_of[block] != TD_CUDA_NO_PLACE) {
        m->places[m->place_of[block]].valid = false;
        m->places[m->place_of[block]].landed = NEVER_WHOLE;
    }
    unlock(m);
}

void td_cuda_mirror_forget_all(td_cuda_mirror_t *m)
{
    lock(m);
    for (uint32_t i = 0; i < m->place_count; i++) {
        m->places[i].valid = false;
        m->places[i].landed = NEVER_WHOLE;
    }
    unlock(m);
}

/* --- transfers -------------------------------------------------------------------------------- */

static bool may_pin(const td_cuda_mirror_t *m)
{
    return m->pinned < TD_MAX(m->place_count / PINNED_PART, 1u);
}

static bool pin(td_cuda_mirror_t *m, place_t *p)
{
    if (p->pins == 0 && !may_pin(m)) {
        return false;
    }
    m->pinned += p->pins == 0;
    p->pins++;
    return true;
}

static void unpin(td_cuda_mirror_t *m, place_t *p)
{
    TD_ASSERT(p->pins > 0);
    p->pins--;
    m->pinned -= p->pins == 0;
}

bool td_cuda_mirror_pin(td_cuda_mirror_t *m, uint32_t block, uint64_t epoch, uint32_t *place_out)
{
    place_t *p = NULL;
    bool pinned = false;

    lock(m);
    if (block < m->block_count && m->place_of[block] != TD_CUDA_NO_PLACE) {
        p = &m->places[m->place_of[block]];
        pinned = p->valid && p->exact && p->epoch == epoch &&
                 !(m->running && p->uploaded && p->pass == m->pass) && pin(m, p);
        *place_out = m->place_of[block];
    }
    unlock(m);
    return pinned;
}

bool td_cuda_mirror_pin_for(td_cuda_mirror_t *m, uint32_t block, uint64_t epoch, uint32_t offset,
                            uint32_t *place_out)
{
    place_t *p = NULL;
    bool pinned = false;

    lock(m);
    /* A copy that could not be pinned anyway throws no other one out. */
    if (block < m->block_count &&
        (m->place_of[block] != TD_CUDA_NO_PLACE || (offset == 0 && may_pin(m)))) {
        p = place_for(m, block);
    }
    if (p != NULL && !(m->running && p->pass == m->pass)) {
        if (offset == 0 && (!p->valid || p->epoch != epoch) && p->pins == 0) {
            p->valid = false;
            p->epoch = epoch;
            p->landed = 0;
            TAILQ_REMOVE(&m->by_use, p, link); /* it will be used soon */
            TAILQ_INSERT_TAIL(&m->by_use, p, link);
        }
        pinned = !p->valid && p->epoch == epoch && p->landed == offset && pin(m, p);
        *place_out = m->place_of[block];
    }
    unlock(m);
    return pinned;
}

void td_cuda_mirror_landed(td_cuda_mirror_t *m, uint32_t block, uint64_t epoch, uint32_t place,
                           uint32_t offset, uint32_t bytes, size_t block_bytes)
{
    place_t *p = &m->places[place];

    lock(m);
    if (p->block == block && p->epoch == epoch && p->landed == offset && bytes > 0) {
        p->landed += bytes;
        if (p->landed == block_bytes) {
            p->valid = true;
            p->exact = true;
            p->uploaded = false;
        }
    } else {
        p->landed = NEVER_WHOLE;
    }
    unpin(m, p);
    unlock(m);
}

void td_cuda_mirror_unpin(td_cuda_mirror_t *m, uint32_t place)
{
    lock(m);
    unpin(m, &m->places[place]);
    unlock(m);
}

#include "common/model/cuda/td_cuda_mirror.h"

#include <sys/queue.h>

#include "common/base/td_base.h"
#include "common/base/td_log.h"

typedef struct place {
    uint32_t block; /* TD_CUDA_NO_PLACE: none */
    uint64_t epoch; /* of the block, when it was taken last */
    uint64_t pass;  /* that used it last */
    bool valid;
    TAILQ_ENTRY(place) link;
} place_t;

struct td_cuda_mirror {
    place_t *places;    /* owned; [place_count] */
    uint32_t *place_of; /* owned; [block_count] */
    uint32_t place_count;
    uint32_t block_count;
    uint64_t pass;
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
    td_free(m->places);
    td_free(m->place_of);
    td_free(m);
}

void td_cuda_mirror_begin(td_cuda_mirror_t *m)
{
    m->pass++;
}

td_status_t td_cuda_mirror_take(td_cuda_mirror_t *m, uint32_t block, uint64_t epoch,
                                uint32_t *place_out, bool *valid_out)
{
    place_t *p = NULL;

    TD_ASSERT(block < m->block_count);
    if (m->place_of[block] != TD_CUDA_NO_PLACE) {
        p = &m->places[m->place_of[block]];
    } else {
        p = TAILQ_FIRST(&m->by_use);
        if (p == NULL || p->pass == m->pass) {
            return TD_ERR_NO_MEMORY;
        }
        if (p->block != TD_CUDA_NO_PLACE) {
            m->place_of[p->block] = TD_CUDA_NO_PLACE;
        }
        p->block = block;
        p->valid = false;
        m->place_of[block] = (uint32_t)(p - m->places);
    }
    p->valid = p->valid && p->epoch == epoch;
    p->epoch = epoch;
    p->pass = m->pass;
    TAILQ_REMOVE(&m->by_use, p, link);
    TAILQ_INSERT_TAIL(&m->by_use, p, link);
    *place_out = m->place_of[block];
    *valid_out = p->valid;
    return TD_OK;
}

void td_cuda_mirror_validate(td_cuda_mirror_t *m, uint32_t block)
{
    TD_ASSERT(block < m->block_count && m->place_of[block] != TD_CUDA_NO_PLACE);
    m->places[m->place_of[block]].valid = true;
}

void td_cuda_mirror_forget(td_cuda_mirror_t *m, uint32_t block)
{
    if (block < m->block_count && m->place_of[block] != TD_CUDA_NO_PLACE) {
        m->places[m->place_of[block]].valid = false;
    }
}

void td_cuda_mirror_forget_all(td_cuda_mirror_t *m)
{
    for (uint32_t i = 0; i < m->place_count; i++) {
        m->places[i].valid = false;
    }
}

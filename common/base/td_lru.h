/* td_lru.h - the order of last use of a table's entries, as links inside them: whoever has a table
 * of a bounded size finds the entry to give up in O(1). Nothing here owns or allocates anything.
 * Threads: the table's. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#define TD_LRU_NONE UINT32_MAX

/** A member of each entry. */
typedef struct td_lru_link {
    uint32_t newer; /* TD_LRU_NONE: none */
    uint32_t older;
} td_lru_link_t;

typedef struct td_lru {
    uint32_t oldest; /* TD_LRU_NONE: no entry is in it */
    uint32_t newest;
    uint8_t *links; /* borrowed: the link of entry i at links + i * stride */
    size_t stride;  /* bytes */
} td_lru_t;

/** first: the link of entry 0. */
static inline void td_lru_init(td_lru_t *lru, td_lru_link_t *first, size_t stride)
{
    *lru = (td_lru_t){
        .oldest = TD_LRU_NONE, .newest = TD_LRU_NONE, .links = (uint8_t *)first, .stride = stride};
}

static inline td_lru_link_t *td_lru_link(const td_lru_t *lru, uint32_t at)
{
    return (td_lru_link_t *)(void *)(lru->links + at * lru->stride);
}

/** Adds an entry that is not in it, as the newest. */
static inline void td_lru_add(td_lru_t *lru, uint32_t at)
{
    *td_lru_link(lru, at) = (td_lru_link_t){.newer = TD_LRU_NONE, .older = lru->newest};
    *(lru->newest == TD_LRU_NONE ? &lru->oldest : &td_lru_link(lru, lru->newest)->newer) = at;
    lru->newest = at;
}

/** Takes out an entry that is in it. */
static inline void td_lru_remove(td_lru_t *lru, uint32_t at)
{
    const td_lru_link_t link = *td_lru_link(lru, at);

    *(link.newer == TD_LRU_NONE ? &lru->newest : &td_lru_link(lru, link.newer)->older) = link.older;
    *(link.older == TD_LRU_NONE ? &lru->oldest : &td_lru_link(lru, link.older)->newer) = link.newer;
}

/** An entry that is in it was used. */
static inline void td_lru_use(td_lru_t *lru, uint32_t at)
{
    td_lru_remove(lru, at);
    td_lru_add(lru, at);
}

/** The next one that was used later; TD_LRU_NONE: none. */
static inline uint32_t td_lru_newer(const td_lru_t *lru, uint32_t at)
{
    return td_lru_link(lru, at)->newer;
}

#include "common/kv/td_pool.h"

#include <stdatomic.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_log.h"
#include "common/kv/td_key_index.h"
#include "common/kv/td_kv_events.h"

_Static_assert(TD_POOL_NONE == TD_KEY_INDEX_NONE, "one value says none");

/* Free is 0: where the free stack begins. */
typedef enum block_state {
    BLOCK_FREE = 0,
    BLOCK_ACTIVE,
    BLOCK_CACHED,
    BLOCK_QUARANTINED
} block_state_t;

#define WALK_LOOKS 65536u /* at blocks, of one call */
#define REFS_MAX ((1u << 29) - 1)

/* 36 bytes: a match touches one or two cache lines a block. */
typedef struct block_meta {
    td_block_key_t key; /* valid while indexed */
    uint32_t refs : 29;
    uint32_t state : 2;
    uint32_t indexed : 1;
    uint32_t lru_prev; /* towards the least recently used; valid while cached */
    uint32_t lru_next; /* valid while cached; free: the next free block */
    uint32_t parent;   /* the indexed block it follows, or TD_POOL_NONE; valid while indexed */
    uint32_t children; /* indexed blocks that follow it */
} block_meta_t;

struct td_pool {
    uint8_t *bytes; /* borrowed */
    size_t block_bytes;
    uint32_t block_count;
    block_meta_t *meta;           /* owned, [block_count] */
    atomic_uint_fast64_t *epochs; /* owned, [block_count]; release on change, acquire on read */
    uint64_t *content_hashes;     /* owned, [block_count]; valid while indexed */
    uint32_t free_first;          /* of the stack through lru_next */
    uint32_t free_total;          /* blocks on the stack: free and reserved together */
    uint32_t reserved;            /* of those, promised */
    uint32_t cached;
    uint32_t active;
    uint32_t quarantined;
    uint32_t lru_oldest; /* TD_POOL_NONE when no block is cached */
    uint32_t lru_newest;
    td_key_index_t index; /* owned: key -> block */
    uint64_t evictions;
    td_kv_events_t *events; /* borrowed, or NULL */
};

td_status_t td_pool_create(uint8_t *bytes, uint32_t block_count, size_t block_bytes,
                           td_pool_t **out)
{
    td_status_t status = TD_ERR_NO_MEMORY;
    td_pool_t *pool = NULL;
    size_t total = 0;

    TD_ASSERT(out != NULL);
    if (block_count == 0 || block_count > TD_POOL_BLOCKS_MAX || block_bytes == 0 ||
        !td_size_mul(block_count, block_bytes, &total)) {
        status = TD_ERR_INVALID;
        goto err;
    }
    pool = td_calloc(1, sizeof(*pool));
    if (pool == NULL) {
        goto err;
    }
    pool->meta = td_calloc_large(block_count, sizeof(*pool->meta));
    pool->epochs = td_calloc_large(block_count, sizeof(*pool->epochs));
    pool->content_hashes = td_calloc_large(block_count, sizeof(*pool->content_hashes));
    if (pool->meta == NULL || pool->epochs == NULL || pool->content_hashes == NULL ||
        td_key_index_init(&pool->index, block_count, &pool->meta[0].key, sizeof(*pool->meta)) !=
            TD_OK) {
        goto err_free;
    }
    pool->bytes = bytes;
    pool->block_bytes = block_bytes;
    pool->block_count = block_count;
    pool->lru_oldest = TD_POOL_NONE;
    pool->lru_newest = TD_POOL_NONE;
    for (uint32_t i = 0; i < block_count; i++) {
        pool->meta[i].lru_next = i + 1 < block_count ? i + 1 : TD_POOL_NONE;
        atomic_init(&pool->epochs[i], 1); /* 0 is never a live epoch */
    }
    pool->free_total = block_count;
    *out = pool;
    return TD_OK;

err_free:
    td_free(pool->meta);
    td_free(pool->epochs);
    td_free(pool->content_hashes);
    td_key_index_fini(&pool->index);
    td_free(pool);
err:
    TD_LOG_ERROR("kv pool not created", "status=%s blocks=%u block_bytes=%zu",
                 td_status_name(status), block_count, block_bytes);
    return status;
}

void td_pool_destroy(td_pool_t *pool)
{
    if (pool == NULL) {
        return;
    }
    if (pool->active + pool->reserved + pool->quarantined != 0) {
        TD_LOG_WARN("kv pool ended with blocks held", "active=%u reserved=%u quarantined=%u",
                    pool->active, pool->reserved, pool->quarantined);
    }
    td_free(pool->meta);
    td_free(pool->epochs);
    td_free(pool->content_hashes);
    td_key_index_fini(&pool->index);
    td_free(pool);
}

/* --- list of cached blocks ------------------------------------------------------------------- */

static void lru_push(td_pool_t *pool, uint32_t idx)
{
    block_meta_t *m = &pool->meta[idx];
    m->lru_prev = pool->lru_newest;
    m->lru_next = TD_POOL_NONE;
    if (pool->lru_newest != TD_POOL_NONE) {
        pool->meta[pool->lru_newest].lru_next = idx;
    } else {
        pool->lru_oldest = idx;
    }
    pool->lru_newest = idx;
    pool->cached++;
}

static void lru_remove(td_pool_t *pool, uint32_t idx)
{
    block_meta_t *m = &pool->meta[idx];
    if (m->lru_prev != TD_POOL_NONE) {
        pool->meta[m->lru_prev].lru_next = m->lru_next;
    } else {
        pool->lru_oldest = m->lru_next;
    }
    if (m->lru_next != TD_POOL_NONE) {
        pool->meta[m->lru_next].lru_prev = m->lru_prev;
    } else {
        pool->lru_newest = m->lru_prev;
    }
    pool->cached--;
}

/* --- states ---------------------------------------------------------------------------------- */

static void block_to_free(td_pool_t *pool, uint32_t idx)
{
    pool->meta[idx].state = BLOCK_FREE;
    pool->meta[idx].lru_next = pool->free_first;
    pool->free_first = idx;
    pool->free_total++;
    /* Whoever still reads by the old descriptor sees the change and drops what it read. */
    atomic_fetch_add_explicit(&pool->epochs[idx], 1, memory_order_release);
}

/* Blocks know what they follow, not what follows them: only a block that goes before its children
 * (its bytes proved wrong, or nothing else can be evicted) has to look for them. */
static void leave_children(td_pool_t *pool, uint32_t idx)
{
    for (uint32_t i = 0; i < pool->block_count && pool->meta[idx].children > 0; i++) {
        if (pool->meta[i].indexed && pool->meta[i].parent == idx) {
            pool->meta[i].parent = TD_POOL_NONE;
            pool->meta[idx].children--;
        }
    }
}

static void index_drop(td_pool_t *pool, uint32_t idx)
{
    block_meta_t *m = &pool->meta[idx];

    leave_children(pool, idx);
    if (m->parent != TD_POOL_NONE) {
        pool->meta[m->parent].children--;
    }
    td_key_index_remove(&pool->index, idx);
    m->indexed = false;
    td_kv_events_removed(pool->events, &m->key);
}

/* Leaves first: what others follow is as young as they are. Sequences give blocks back last to
 * first, so the oldest block hardly ever has children. When all have (sequences that hold copies of
 * their own go on behind cached blocks), the oldest goes all the same. */
static void evict_oldest(td_pool_t *pool)
{
    uint32_t idx = pool->lru_oldest;

    for (uint32_t i = pool->cached; i > 0 && pool->meta[idx].children > 0; i--) {
        lru_remove(pool, idx);
        lru_push(pool, idx);
        idx = pool->lru_oldest;
    }
    lru_remove(pool, idx);
    index_drop(pool, idx);
    block_to_free(pool, idx);
    pool->evictions++;
}

td_status_t td_pool_reserve(td_pool_t *pool, uint32_t n)
{
    if ((uint64_t)pool->free_total - pool->reserved + pool->cached < n) {
        return TD_ERR_BUSY;
    }
    while (pool->free_total - pool->reserved < n) {
        evict_oldest(pool);
    }
    pool->reserved += n;
    return TD_OK;
}

void td_pool_unreserve(td_pool_t *pool, uint32_t n)
{
    TD_ASSERT(n <= pool->reserved);
    pool->reserved -= n;
}

uint32_t td_pool_take_reserved(td_pool_t *pool)
{
    uint32_t idx = 0;
    TD_ASSERT(pool->reserved > 0 && pool->free_total >= pool->reserved);
    pool->reserved--;
    idx = pool->free_first;
    pool->free_first = pool->meta[idx].lru_next;
    pool->free_total--;
    pool->meta[idx].state = BLOCK_ACTIVE;
    pool->meta[idx].refs = 1;
    pool->meta[idx].indexed = false;
    pool->active++;
    atomic_fetch_add_explicit(&pool->epochs[idx], 1, memory_order_release);
    return idx;
}

td_status_t td_pool_take(td_pool_t *pool, uint32_t *idx_out)
{
    TD_TRY(td_pool_reserve(pool, 1));
    *idx_out = td_pool_take_reserved(pool);
    return TD_OK;
}

void td_pool_ref(td_pool_t *pool, uint32_t idx)
{
    block_meta_t *m = &pool->meta[idx];
    TD_ASSERT(idx < pool->block_count);
    if (m->state == BLOCK_CACHED) {
        lru_remove(pool, idx);
        m->state = BLOCK_ACTIVE;
        pool->active++;
    }
    TD_ASSERT(m->state == BLOCK_ACTIVE && m->refs < REFS_MAX);
    m->refs++;
}

void td_pool_unref(td_pool_t *pool, uint32_t idx)
{
    block_meta_t *m = &pool->meta[idx];
    TD_ASSERT(idx < pool->block_count && m->state == BLOCK_ACTIVE && m->refs > 0);
    if (--m->refs > 0) {
        return;
    }
    pool->active--;
    if (m->indexed) {
        m->state = BLOCK_CACHED;
        lru_push(pool, idx);
    } else {
        block_to_free(pool, idx);
    }
}

uint32_t td_pool_refs(const td_pool_t *pool, uint32_t idx)
{
    return pool->meta[idx].refs;
}

td_status_t td_pool_index(td_pool_t *pool, uint32_t idx, const td_block_key_t *key,
                          uint64_t content_hash)
{
    return td_pool_index_after(pool, idx, NULL, key, content_hash);
}

td_status_t td_pool_index_after(td_pool_t *pool, uint32_t idx, const td_block_key_t *parent_key,
                                const td_block_key_t *key, uint64_t content_hash)
{
    block_meta_t *m = &pool->meta[idx];

    TD_ASSERT(idx < pool->block_count && m->state == BLOCK_ACTIVE && !m->indexed);
    if (td_key_index_find(&pool->index, key) != TD_KEY_INDEX_NONE) {
        return TD_ERR_EXISTS;
    }
    m->parent = parent_key == NULL ? TD_POOL_NONE : td_key_index_find(&pool->index, parent_key);
    m->key = *key;
    td_key_index_add(&pool->index, idx);
    m->indexed = true;
    m->children = 0;
    if (m->parent != TD_POOL_NONE) {
        pool->meta[m->parent].children++;
    }
    pool->content_hashes[idx] = content_hash;
    td_kv_events_stored(pool->events, key);
    return TD_OK;
}

void td_pool_unindex(td_pool_t *pool, uint32_t idx)
{
    block_meta_t *m = &pool->meta[idx];
    if (!m->indexed) {
        return;
    }
    index_drop(pool, idx);
    if (m->state == BLOCK_CACHED) {
        lru_remove(pool, idx);
        block_to_free(pool, idx);
    }
}

bool td_pool_is_indexed(const td_pool_t *pool, uint32_t idx)
{
    return pool->meta[idx].indexed;
}

uint32_t td_pool_find(const td_pool_t *pool, const td_block_key_t *key)
{
    return td_key_index_find(&pool->index, key);
}

uint32_t td_pool_match(td_pool_t *pool, const td_block_key_t *keys, uint32_t count,
                       uint32_t *idx_out)
{
    const uint32_t found = td_key_index_find_run(&pool->index, keys, count, idx_out);

    for (uint32_t i = 0; i < found; i++) {
        td_pool_ref(pool, idx_out[i]);
    }
    return found;
}

uint64_t td_pool_content_hash(const td_pool_t *pool, uint32_t idx)
{
    TD_ASSERT(pool->meta[idx].indexed);
    return pool->content_hashes[idx];
}

const td_block_key_t *td_pool_key(const td_pool_t *pool, uint32_t idx)
{
    TD_ASSERT(pool->meta[idx].indexed);
    return &pool->meta[idx].key;
}

void td_pool_quarantine(td_pool_t *pool, uint32_t idx)
{
    block_meta_t *m = &pool->meta[idx];
    TD_ASSERT(m->state == BLOCK_ACTIVE && m->refs == 1 && !m->indexed);
    m->refs = 0;
    m->state = BLOCK_QUARANTINED;
    pool->active--;
    pool->quarantined++;
}

void td_pool_release_quarantine(td_pool_t *pool, uint32_t idx)
{
    TD_ASSERT(pool->meta[idx].state == BLOCK_QUARANTINED);
    pool->quarantined--;
    block_to_free(pool, idx);
}

uint64_t td_pool_epoch(const td_pool_t *pool, uint32_t idx)
{
    return atomic_load_explicit(&pool->epochs[idx], memory_order_acquire);
}

uint8_t *td_pool_bytes(const td_pool_t *pool, uint32_t idx)
{
    TD_ASSERT(idx < pool->block_count);
    return pool->bytes + (size_t)idx * pool->block_bytes;
}

uint8_t *td_pool_base(const td_pool_t *pool)
{
    return pool->bytes;
}

size_t td_pool_block_bytes(const td_pool_t *pool)
{
    return pool->block_bytes;
}

td_pool_counts_t td_pool_counts(const td_pool_t *pool)
{
    td_pool_counts_t c = {
        .free = pool->free_total - pool->reserved,
        .reserved = pool->reserved,
        .cached = pool->cached,
        .active = pool->active,
        .quarantined = pool->quarantined,
        .total = pool->block_count,
    };
    TD_ASSERT(c.free + c.reserved + c.cached + c.active + c.quarantined == c.total);
    return c;
}

size_t td_pool_own_bytes(const td_pool_t *pool)
{
    const size_t block =
        sizeof(*pool->meta) + sizeof(*pool->epochs) + sizeof(*pool->content_hashes);
    return sizeof(*pool) + pool->block_count * block + td_key_index_bytes(&pool->index);
}

uint64_t td_pool_evictions(const td_pool_t *pool)
{
    return pool->evictions;
}

void td_pool_watch(td_pool_t *pool, td_kv_events_t *events)
{
    TD_ASSERT(events == NULL || events->blocks == 0);
    pool->events = events;
}

uint32_t td_pool_walk(const td_pool_t *pool, uint32_t *cursor, uint32_t max, td_block_key_t *out)
{
    const uint32_t end = (uint32_t)TD_MIN((uint64_t)*cursor + WALK_LOOKS, pool->block_count);
    uint32_t count = 0;

    while (*cursor < end && count < max) {
        const block_meta_t *m = &pool->meta[(*cursor)++];
        if (m->indexed) {
            out[count++] = m->key;
        }
    }
    if (*cursor >= pool->block_count) {
        *cursor = TD_POOL_NONE;
    }
    return count;
}

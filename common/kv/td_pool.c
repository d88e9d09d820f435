#include "common/kv/td_pool.h"

#include <stdatomic.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_log.h"
#include "common/kv/td_key_index.h"

_Static_assert(TD_POOL_NONE == TD_KEY_INDEX_NONE, "one value says none");

typedef enum block_state {
    BLOCK_FREE,
    BLOCK_ACTIVE,
    BLOCK_CACHED,
    BLOCK_QUARANTINED
} block_state_t;

typedef struct block_meta {
    td_block_key_t key;    /* valid while indexed */
    uint64_t content_hash; /* valid while indexed */
    uint32_t refs;
    uint32_t lru_prev; /* towards the least recently used; valid while cached */
    uint32_t lru_next;
    uint8_t state;
    bool indexed;
} block_meta_t;

struct td_pool {
    uint8_t *bytes; /* borrowed */
    size_t block_bytes;
    uint32_t block_count;
    block_meta_t *meta;           /* owned, [block_count] */
    atomic_uint_fast64_t *epochs; /* owned, [block_count]; release on change, acquire on read */
    uint32_t *free_stack;         /* owned; [0, free_count) plus the reserved ones, see below */
    uint32_t free_total;          /* blocks on the stack: free and reserved together */
    uint32_t reserved;            /* of those, promised */
    uint32_t cached;
    uint32_t active;
    uint32_t quarantined;
    uint32_t lru_oldest; /* TD_POOL_NONE when no block is cached */
    uint32_t lru_newest;
    td_key_index_t index; /* owned: key -> block */
    uint64_t evictions;
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
    pool->meta = td_calloc(block_count, sizeof(*pool->meta));
    pool->epochs = td_calloc(block_count, sizeof(*pool->epochs));
    pool->free_stack = td_calloc(block_count, sizeof(*pool->free_stack));
    if (pool->meta == NULL || pool->epochs == NULL || pool->free_stack == NULL ||
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
        pool->free_stack[i] = block_count - 1 - i; /* block 0 on top */
        atomic_init(&pool->epochs[i], 1);          /* 0 is never a live epoch */
    }
    pool->free_total = block_count;
    *out = pool;
    return TD_OK;

err_free:
    td_free(pool->meta);
    td_free(pool->epochs);
    td_free(pool->free_stack);
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
    td_free(pool->free_stack);
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
    /* Whoever still reads by the old descriptor sees the change and drops what it read. */
    atomic_fetch_add_explicit(&pool->epochs[idx], 1, memory_order_release);
    pool->free_stack[pool->free_total++] = idx;
}

static void index_drop(td_pool_t *pool, uint32_t idx)
{
    td_key_index_remove(&pool->index, idx);
    pool->meta[idx].indexed = false;
}

static void evict_oldest(td_pool_t *pool)
{
    uint32_t idx = pool->lru_oldest;
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
    idx = pool->free_stack[--pool->free_total];
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
    TD_ASSERT(m->state == BLOCK_ACTIVE);
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
    block_meta_t *m = &pool->meta[idx];

    TD_ASSERT(idx < pool->block_count && m->state == BLOCK_ACTIVE && !m->indexed);
    if (td_key_index_find(&pool->index, key) != TD_KEY_INDEX_NONE) {
        return TD_ERR_EXISTS;
    }
    m->key = *key;
    td_key_index_add(&pool->index, idx);
    m->content_hash = content_hash;
    m->indexed = true;
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
    uint32_t n = 0;
    while (n < count) {
        uint32_t idx = td_pool_find(pool, &keys[n]);
        if (idx == TD_POOL_NONE) {
            break;
        }
        td_pool_ref(pool, idx);
        idx_out[n++] = idx;
    }
    return n;
}

uint64_t td_pool_content_hash(const td_pool_t *pool, uint32_t idx)
{
    TD_ASSERT(pool->meta[idx].indexed);
    return pool->meta[idx].content_hash;
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

uint64_t td_pool_evictions(const td_pool_t *pool)
{
    return pool->evictions;
}

#include "router/sim_cache.h"

#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_lru.h"
#include "router/sim_random.h"

#define NONE TD_LRU_NONE

typedef struct entry {
    uint64_t block;
    uint32_t node;
    uint32_t chain; /* next in the bucket, or of the free ones */
    td_lru_link_t use;
    bool ready;
} entry_t;

typedef struct node_cache {
    td_lru_t use;
    uint32_t count;
    uint32_t capacity;
} node_cache_t;

struct sim_cache {
    sim_cache_config_t config;
    entry_t *entries;    /* owned [entries_max] */
    uint32_t *buckets;   /* owned [bucket_mask + 1] */
    node_cache_t *nodes; /* owned [node_count] */
    uint32_t bucket_mask;
    uint32_t touched; /* entries from here on were never used */
    uint32_t free;    /* the first free one below, or NONE */
};

td_status_t sim_cache_create(const sim_cache_config_t *config, sim_cache_t **out)
{
    sim_cache_t *c = td_calloc(1, sizeof(*c));
    size_t buckets = 1;

    TD_ASSERT(config->entries_max >= 1 && config->node_count >= 1);
    if (c == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    while (buckets < config->entries_max && buckets < 1u << 31) {
        buckets *= 2;
    }
    c->config = *config;
    c->free = NONE;
    c->bucket_mask = (uint32_t)(buckets - 1);
    c->entries = td_calloc(config->entries_max, sizeof(*c->entries));
    c->buckets = td_alloc(buckets * sizeof(*c->buckets));
    c->nodes = td_calloc(config->node_count, sizeof(*c->nodes));
    if (c->entries == NULL || c->buckets == NULL || c->nodes == NULL) {
        sim_cache_destroy(c);
        return TD_ERR_NO_MEMORY;
    }
    memset(c->buckets, 0xff, buckets * sizeof(*c->buckets));
    for (uint32_t i = 0; i < config->node_count; i++) {
        td_lru_init(&c->nodes[i].use, &c->entries[0].use, sizeof(*c->entries));
    }
    *out = c;
    return TD_OK;
}

void sim_cache_destroy(sim_cache_t *c)
{
    if (c == NULL) {
        return;
    }
    td_free(c->entries);
    td_free(c->buckets);
    td_free(c->nodes);
    td_free(c);
}

void sim_cache_set_capacity(sim_cache_t *c, uint32_t node, uint32_t blocks)
{
    c->nodes[node].capacity = blocks;
}

static uint32_t *bucket_of(const sim_cache_t *c, uint32_t node, uint64_t block)
{
    uint64_t state = block ^ (uint64_t)node << 44;
    return &c->buckets[(uint32_t)sim_random(&state) & c->bucket_mask];
}

static uint32_t find(const sim_cache_t *c, uint32_t node, uint64_t block)
{
    uint32_t at = *bucket_of(c, node, block);
    while (at != NONE && (c->entries[at].block != block || c->entries[at].node != node)) {
        at = c->entries[at].chain;
    }
    return at;
}

static void drop(sim_cache_t *c, uint32_t at)
{
    entry_t *e = &c->entries[at];
    uint32_t *link = bucket_of(c, e->node, e->block);

    while (*link != at) {
        link = &c->entries[*link].chain;
    }
    *link = e->chain;
    td_lru_remove(&c->nodes[e->node].use, at);
    c->nodes[e->node].count--;
    e->chain = c->free;
    c->free = at;
}

static void evict(sim_cache_t *c, uint32_t node)
{
    const uint32_t at = c->nodes[node].use.oldest;
    const uint64_t block = c->entries[at].block;

    drop(c, at);
    if (c->config.evicted != NULL) {
        c->config.evicted(c->config.ctx, node, block);
    }
}

static uint32_t take(sim_cache_t *c)
{
    const uint32_t at = c->free;

    if (at != NONE) {
        c->free = c->entries[at].chain;
        return at;
    }
    TD_ASSERT(c->touched < c->config.entries_max);
    return c->touched++;
}

static void add(sim_cache_t *c, uint32_t node, uint64_t block)
{
    uint32_t *bucket = bucket_of(c, node, block);
    uint32_t at = 0;

    if (c->nodes[node].count == c->nodes[node].capacity) {
        evict(c, node);
    }
    at = take(c);
    c->entries[at] = (entry_t){.block = block, .node = node, .chain = *bucket};
    *bucket = at;
    td_lru_add(&c->nodes[node].use, at);
    c->nodes[node].count++;
}

uint32_t sim_cache_match(const sim_cache_t *c, uint32_t node, const uint64_t *blocks,
                         uint32_t count, bool ready_only)
{
    uint32_t depth = 0;

    for (; depth < count; depth++) {
        const uint32_t at = find(c, node, blocks[depth]);
        if (at == NONE || (ready_only && !c->entries[at].ready)) {
            break;
        }
    }
    return depth;
}

void sim_cache_use(sim_cache_t *c, uint32_t node, const uint64_t *blocks, uint32_t count)
{
    /* From the end: the first block, which all longer prefixes need, ends up the newest. */
    for (uint32_t i = TD_MIN(count, c->nodes[node].capacity); i > 0; i--) {
        const uint32_t at = find(c, node, blocks[i - 1]);
        if (at != NONE) {
            td_lru_use(&c->nodes[node].use, at);
        } else {
            add(c, node, blocks[i - 1]);
        }
    }
}

void sim_cache_set_ready(sim_cache_t *c, uint32_t node, const uint64_t *blocks, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t at = find(c, node, blocks[i]);
        if (at != NONE) {
            c->entries[at].ready = true;
        }
    }
}

void sim_cache_clear(sim_cache_t *c, uint32_t node)
{
    while (c->nodes[node].count > 0) {
        drop(c, c->nodes[node].use.oldest);
    }
}

uint32_t sim_cache_count(const sim_cache_t *c, uint32_t node)
{
    return c->nodes[node].count;
}

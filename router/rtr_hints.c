#include "router/rtr_hints.h"

#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_lru.h"

#define NONE TD_LRU_NONE

typedef struct entry {
    td_block_key_t key;
    rtr_slot_set_t slots;
    uint32_t chain; /* next in the bucket */
    td_lru_link_t use;
} entry_t;

struct rtr_hints {
    entry_t *entries;  /* owned [entries_max] */
    uint32_t *buckets; /* owned [bucket_mask + 1] */
    uint32_t entries_max;
    uint32_t bucket_mask;
    uint32_t count; /* entries [0, count) are in use */
    td_lru_t use;
};

td_status_t rtr_hints_create(uint32_t entries_max, rtr_hints_t **out)
{
    rtr_hints_t *h = td_calloc(1, sizeof(*h));
    uint32_t buckets = 1;

    TD_ASSERT(entries_max >= 1 && entries_max <= 1u << 24);
    if (h == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    while (buckets < entries_max) {
        buckets *= 2;
    }
    h->entries = td_calloc(entries_max, sizeof(*h->entries));
    h->buckets = td_calloc(buckets, sizeof(*h->buckets));
    if (h->entries == NULL || h->buckets == NULL) {
        rtr_hints_destroy(h);
        return TD_ERR_NO_MEMORY;
    }
    memset(h->buckets, 0xff, buckets * sizeof(*h->buckets));
    h->entries_max = entries_max;
    h->bucket_mask = buckets - 1;
    td_lru_init(&h->use, &h->entries[0].use, sizeof(*h->entries));
    *out = h;
    return TD_OK;
}

void rtr_hints_destroy(rtr_hints_t *h)
{
    if (h == NULL) {
        return;
    }
    td_free(h->entries);
    td_free(h->buckets);
    td_free(h);
}

/* Keys are outputs of a keyed hash: any of their bits will do. */
static uint32_t *bucket_of(const rtr_hints_t *h, const td_block_key_t *key)
{
    uint32_t word = 0;
    memcpy(&word, key->bytes, sizeof(word));
    return &h->buckets[word & h->bucket_mask];
}

static uint32_t find(const rtr_hints_t *h, const td_block_key_t *key)
{
    uint32_t at = *bucket_of(h, key);
    while (at != NONE && !td_block_key_equal(&h->entries[at].key, key)) {
        at = h->entries[at].chain;
    }
    return at;
}

static void bucket_remove(rtr_hints_t *h, uint32_t at)
{
    uint32_t *link = bucket_of(h, &h->entries[at].key);
    while (*link != at) {
        link = &h->entries[*link].chain;
    }
    *link = h->entries[at].chain;
}

static uint32_t take_entry(rtr_hints_t *h)
{
    uint32_t at = h->use.oldest;
    if (h->count < h->entries_max) {
        return h->count++;
    }
    bucket_remove(h, at);
    td_lru_remove(&h->use, at);
    return at;
}

void rtr_hints_add(rtr_hints_t *h, const td_block_key_t *keys, uint32_t count, uint32_t slot)
{
    /* From the end: the first block, which all longer prefixes need, ends up the newest. */
    for (uint32_t i = TD_MIN(count, h->entries_max); i > 0; i--) {
        const td_block_key_t *key = &keys[i - 1];
        uint32_t at = find(h, key);
        if (at == NONE) {
            uint32_t *bucket = NULL;
            at = take_entry(h);
            bucket = bucket_of(h, key);
            h->entries[at] = (entry_t){.key = *key, .chain = *bucket};
            *bucket = at;
        } else {
            td_lru_remove(&h->use, at);
        }
        td_lru_add(&h->use, at);
        rtr_slot_add(&h->entries[at].slots, slot);
    }
}

void rtr_hints_match(rtr_hints_t *h, const td_block_key_t *keys, uint32_t count,
                     uint32_t *blocks_out)
{
    rtr_slot_set_t all;

    memset(blocks_out, 0, RTR_SLOTS_MAX * sizeof(*blocks_out));
    memset(&all, 0xff, sizeof(all));
    for (uint32_t i = 0; i < count; i++) {
        uint32_t at = find(h, &keys[i]);
        if (at == NONE) {
            return;
        }
        for (uint32_t w = 0; w < TD_ARRAY_LEN(all.bits); w++) {
            all.bits[w] &= h->entries[at].slots.bits[w];
            for (uint64_t left = all.bits[w]; left != 0; left &= left - 1) {
                blocks_out[w * 64 + (uint32_t)__builtin_ctzll(left)] = i + 1;
            }
        }
    }
}

void rtr_hints_purge(rtr_hints_t *h, uint32_t slot)
{
    for (uint32_t i = 0; i < h->count; i++) {
        rtr_slot_remove(&h->entries[i].slots, slot);
    }
}

uint32_t rtr_hints_count(const rtr_hints_t *h)
{
    return h->count;
}

#include "router/rtr_hints.h"

#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_lru.h"

#define NONE TD_LRU_NONE

typedef struct entry {
    td_block_key_t key;
    uint32_t chain; /* next in the bucket */
    td_lru_link_t use;
} entry_t;

struct rtr_hints {
    entry_t *entries;  /* owned [entries_max] */
    uint64_t *slots;   /* owned [entries_max][words]: a bit for each slot that holds the entry */
    uint64_t *holders; /* owned [words], of rtr_hints_match() */
    uint32_t *buckets; /* owned [bucket_mask + 1] */
    uint32_t entries_max;
    uint32_t bucket_mask;
    uint32_t slots_max;
    uint32_t words; /* of a set of slots */
    uint32_t count; /* entries [0, count) are in use */
    td_lru_t use;
};

td_status_t rtr_hints_create(uint32_t entries_max, uint32_t slots_max, rtr_hints_t **out)
{
    rtr_hints_t *h = td_calloc(1, sizeof(*h));
    uint32_t buckets = 1;

    TD_ASSERT(entries_max >= 1 && entries_max <= 1u << 24);
    TD_ASSERT(slots_max >= 1 && slots_max <= RTR_HINT_SLOTS_MAX);
    if (h == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    while (buckets < entries_max) {
        buckets *= 2;
    }
    h->entries = td_calloc(entries_max, sizeof(*h->entries));
    h->buckets = td_calloc(buckets, sizeof(*h->buckets));
    h->slots_max = slots_max;
    h->words = (slots_max + 63) / 64;
    h->slots = td_calloc((size_t)entries_max * h->words, sizeof(*h->slots));
    h->holders = td_calloc(h->words, sizeof(*h->holders));
    if (h->entries == NULL || h->buckets == NULL || h->slots == NULL || h->holders == NULL) {
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
    td_free(h->slots);
    td_free(h->holders);
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

static uint64_t *slots_of(const rtr_hints_t *h, uint32_t at)
{
    return &h->slots[(size_t)at * h->words];
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
    TD_ASSERT(slot < h->slots_max);
    /* From the end: the first block, which all longer prefixes need, ends up the newest. */
    for (uint32_t i = TD_MIN(count, h->entries_max); i > 0; i--) {
        const td_block_key_t *key = &keys[i - 1];
        uint32_t at = find(h, key);
        if (at == NONE) {
            uint32_t *bucket = NULL;
            at = take_entry(h);
            bucket = bucket_of(h, key);
            h->entries[at] = (entry_t){.key = *key, .chain = *bucket};
            memset(slots_of(h, at), 0, h->words * sizeof(*h->slots));
            *bucket = at;
        } else {
            td_lru_remove(&h->use, at);
        }
        td_lru_add(&h->use, at);
        slots_of(h, at)[slot / 64] |= 1ull << (slot % 64);
    }
}

void rtr_hints_remove(rtr_hints_t *h, const td_block_key_t *key, uint32_t slot)
{
    const uint32_t at = find(h, key);

    TD_ASSERT(slot < h->slots_max);
    if (at != NONE) {
        slots_of(h, at)[slot / 64] &= ~(1ull << (slot % 64));
    }
}

static void mark(uint64_t bits, uint32_t word, uint32_t blocks, uint32_t *blocks_out)
{
    for (uint64_t left = bits; left != 0; left &= left - 1) {
        blocks_out[word * 64 + (uint32_t)__builtin_ctzll(left)] = blocks;
    }
}

uint32_t rtr_hints_match(rtr_hints_t *h, const td_block_key_t *keys, uint32_t count,
                         uint32_t *blocks_out)
{
    uint64_t left = 1; /* whether any slot holds all blocks so far */
    uint32_t depth = 0;

    memset(blocks_out, 0, h->slots_max * sizeof(*blocks_out));
    memset(h->holders, 0xff, h->words * sizeof(*h->holders));
    for (; depth < count && left != 0; depth++) {
        const uint32_t at = find(h, &keys[depth]);
        if (at == NONE) {
            break;
        }
        left = 0;
        for (uint32_t w = 0; w < h->words; w++) {
            const uint64_t now = h->holders[w] & slots_of(h, at)[w];
            if (depth > 0) { /* who ends here is written once, not at each block before */
                mark(h->holders[w] & ~now, w, depth, blocks_out);
            }
            h->holders[w] = now;
            left |= now;
        }
    }
    if (left == 0 && depth > 0) {
        return depth - 1; /* the last block was nobody's */
    }
    for (uint32_t w = 0; w < h->words && depth > 0; w++) {
        mark(h->holders[w], w, depth, blocks_out);
    }
    return depth;
}

void rtr_hints_purge(rtr_hints_t *h, uint32_t slot)
{
    TD_ASSERT(slot < h->slots_max);
    for (uint32_t i = 0; i < h->count; i++) {
        slots_of(h, i)[slot / 64] &= ~(1ull << (slot % 64));
    }
}

uint32_t rtr_hints_count(const rtr_hints_t *h)
{
    return h->count;
}

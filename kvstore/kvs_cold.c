#include "kvstore/kvs_cold.h"

#include "common/base/td_base.h"
#include "common/kv/td_key_index.h"
#include "kvstore/kvs_index.h"

typedef struct cold_key {
    td_block_key_t key;
    uint32_t segment;
} cold_key_t;

struct kvs_cold {
    cold_key_t *keys; /* owned, [keys_max]; entries [0, count) are there */
    uint32_t keys_max;
    uint32_t count;
    td_key_index_t index; /* owned */
};

td_status_t kvs_cold_create(uint32_t keys_max, kvs_cold_t **out)
{
    kvs_cold_t *c = NULL;

    if (keys_max == 0 || keys_max > KVS_COLD_KEYS_MAX) {
        return TD_ERR_INVALID;
    }
    c = td_calloc(1, sizeof(*c));
    if (c == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    c->keys_max = keys_max;
    c->keys = td_calloc_large(keys_max, sizeof(*c->keys));
    if (c->keys == NULL ||
        td_key_index_init(&c->index, keys_max, &c->keys[0].key, sizeof(*c->keys)) != TD_OK) {
        kvs_cold_destroy(c);
        return TD_ERR_NO_MEMORY;
    }
    *out = c;
    return TD_OK;
}

void kvs_cold_destroy(kvs_cold_t *c)
{
    if (c == NULL) {
        return;
    }
    td_free(c->keys);
    td_key_index_fini(&c->index);
    td_free(c);
}

void kvs_cold_add(kvs_cold_t *c, const td_block_key_t *key, uint32_t segment)
{
    uint32_t at = td_key_index_find(&c->index, key);

    if (at == TD_KEY_INDEX_NONE) {
        if (c->count == c->keys_max) {
            return;
        }
        at = c->count++;
        c->keys[at].key = *key;
        td_key_index_add(&c->index, at);
    }
    c->keys[at].segment = segment;
}

/* The last one moves into the gap. */
static void remove_at(kvs_cold_t *c, uint32_t at)
{
    uint32_t last = c->count - 1;

    td_key_index_remove(&c->index, at);
    if (at != last) {
        td_key_index_remove(&c->index, last);
        c->keys[at] = c->keys[last];
        td_key_index_add(&c->index, at);
    }
    c->count--;
}

void kvs_cold_remove(kvs_cold_t *c, const td_block_key_t *key, uint32_t segment)
{
    uint32_t at = td_key_index_find(&c->index, key);
    if (at != TD_KEY_INDEX_NONE && c->keys[at].segment == segment) {
        remove_at(c, at);
    }
}

void kvs_cold_forget(kvs_cold_t *c, uint32_t segment)
{
    for (uint32_t at = c->count; at > 0; at--) {
        if (c->keys[at - 1].segment == segment) {
            remove_at(c, at - 1);
        }
    }
}

uint32_t kvs_cold_find(const kvs_cold_t *c, const td_block_key_t *key)
{
    uint32_t at = td_key_index_find(&c->index, key);
    return at == TD_KEY_INDEX_NONE ? KVS_NONE : c->keys[at].segment;
}

uint32_t kvs_cold_count(const kvs_cold_t *c)
{
    return c->count;
}

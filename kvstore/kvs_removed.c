#include "kvstore/kvs_removed.h"

#include "common/base/td_base.h"
#include "common/kv/td_key_index.h"

typedef struct removed_key {
    td_block_key_t key;
    uint64_t at_ns;
    bool there; /* not where a key was removed again: its newer place counts */
} removed_key_t;

struct kvs_removed {
    removed_key_t *keys; /* owned, [keys_max]: a ring */
    uint32_t keys_max;
    uint32_t next;
    td_key_index_t index; /* owned; of those that are there */
};

td_status_t kvs_removed_create(uint32_t keys_max, kvs_removed_t **out)
{
    kvs_removed_t *r = td_calloc(1, sizeof(*r));

    if (r == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    r->keys_max = keys_max;
    r->keys = td_calloc_large(keys_max, sizeof(*r->keys));
    if (r->keys == NULL ||
        td_key_index_init(&r->index, keys_max, &r->keys[0].key, sizeof(*r->keys)) != TD_OK) {
        kvs_removed_destroy(r);
        return TD_ERR_NO_MEMORY;
    }
    *out = r;
    return TD_OK;
}

void kvs_removed_destroy(kvs_removed_t *r)
{
    if (r != NULL) {
        td_free(r->keys);
        td_key_index_fini(&r->index);
        td_free(r);
    }
}

static void forget(kvs_removed_t *r, uint32_t at)
{
    td_key_index_remove(&r->index, at);
    r->keys[at].there = false;
}

void kvs_removed_add(kvs_removed_t *r, const td_block_key_t *key, uint64_t now_ns)
{
    const uint32_t before = td_key_index_find(&r->index, key);
    const uint32_t at = r->next;

    if (before != TD_KEY_INDEX_NONE) {
        forget(r, before);
    }
    if (r->keys[at].there) {
        forget(r, at);
    }
    r->keys[at] = (removed_key_t){.key = *key, .at_ns = now_ns, .there = true};
    td_key_index_add(&r->index, at);
    r->next = (at + 1) % r->keys_max;
}

uint64_t kvs_removed_at(const kvs_removed_t *r, const td_block_key_t *key)
{
    const uint32_t at = td_key_index_find(&r->index, key);
    return at == TD_KEY_INDEX_NONE ? 0 : r->keys[at].at_ns;
}

#include "kvstore/kvs_memo.h"

#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_lru.h"
#include "common/kv/td_key_index.h"

#define NONE TD_LRU_NONE
#define ANSWER_BYTES 256u /* so many entries there are room for, of answers of such a size */

typedef struct answer {
    td_block_key_t key;
    uint32_t *tokens; /* owned; NULL: the place is free */
    uint32_t count;
    td_lru_link_t use; /* of a free place: newer is the next free one */
    uint64_t put_ns;
} answer_t;

struct kvs_memo {
    uint64_t bytes_max;
    uint64_t max_age_ns;
    uint64_t bytes;
    answer_t *answers; /* owned, [answers_max] */
    uint32_t answers_max;
    uint32_t count;
    uint32_t free; /* NONE: none */
    td_lru_t use;
    td_key_index_t index; /* owned */
};

td_status_t kvs_memo_create(uint64_t bytes_max, uint64_t max_age_ns, kvs_memo_t **out)
{
    kvs_memo_t *m = td_calloc(1, sizeof(*m));

    TD_ASSERT(bytes_max <= KVS_MEMO_BYTES_MAX);
    if (m == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    m->bytes_max = bytes_max;
    m->max_age_ns = max_age_ns;
    m->answers_max = (uint32_t)TD_MIN(bytes_max / ANSWER_BYTES + 1, TD_KEY_INDEX_CAPACITY_MAX);
    m->answers = td_calloc_large(m->answers_max, sizeof(*m->answers));
    if (m->answers == NULL || td_key_index_init(&m->index, m->answers_max, &m->answers[0].key,
                                                sizeof(*m->answers)) != TD_OK) {
        td_free(m->answers);
        td_free(m);
        return TD_ERR_NO_MEMORY;
    }
    for (uint32_t i = 0; i < m->answers_max; i++) {
        m->answers[i].use.newer = i + 1 < m->answers_max ? i + 1 : NONE;
    }
    td_lru_init(&m->use, &m->answers[0].use, sizeof(*m->answers));
    *out = m;
    return TD_OK;
}

void kvs_memo_destroy(kvs_memo_t *m)
{
    if (m == NULL) {
        return;
    }
    for (uint32_t at = m->use.oldest; at != NONE; at = td_lru_newer(&m->use, at)) {
        td_free(m->answers[at].tokens);
    }
    td_key_index_fini(&m->index);
    td_free(m->answers);
    td_free(m);
}

static uint64_t bytes_of(uint32_t count)
{
    return sizeof(answer_t) + count * sizeof(uint32_t);
}

static void forget(kvs_memo_t *m, uint32_t at)
{
    answer_t *a = &m->answers[at];

    td_key_index_remove(&m->index, at);
    td_lru_remove(&m->use, at);
    m->bytes -= bytes_of(a->count);
    m->count--;
    td_free(a->tokens);
    *a = (answer_t){.use = {.newer = m->free}};
    m->free = at;
}

void kvs_memo_put(kvs_memo_t *m, const td_block_key_t *key, const uint32_t *tokens, uint32_t count,
                  uint64_t now_ns)
{
    const uint32_t before = td_key_index_find(&m->index, key);
    uint32_t *copy = NULL;
    uint32_t at = 0;

    if (before != TD_KEY_INDEX_NONE) {
        forget(m, before);
    }
    if (count == 0 || bytes_of(count) > m->bytes_max) {
        return;
    }
    copy = td_calloc(count, sizeof(*copy));
    if (copy == NULL) {
        return;
    }
    memcpy(copy, tokens, count * sizeof(*copy));
    while (m->bytes + bytes_of(count) > m->bytes_max || m->free == NONE) {
        forget(m, m->use.oldest);
    }
    at = m->free;
    m->free = m->answers[at].use.newer;
    m->answers[at] = (answer_t){.key = *key, .tokens = copy, .count = count, .put_ns = now_ns};
    td_lru_add(&m->use, at);
    td_key_index_add(&m->index, at);
    m->bytes += bytes_of(count);
    m->count++;
}

const uint32_t *kvs_memo_get(kvs_memo_t *m, const td_block_key_t *key, uint64_t now_ns,
                             uint32_t *count_out)
{
    const uint32_t at = td_key_index_find(&m->index, key);

    if (at == TD_KEY_INDEX_NONE) {
        return NULL;
    }
    if (now_ns - m->answers[at].put_ns > m->max_age_ns) {
        forget(m, at);
        return NULL;
    }
    td_lru_use(&m->use, at);
    *count_out = m->answers[at].count;
    return m->answers[at].tokens;
}

uint32_t kvs_memo_count(const kvs_memo_t *m)
{
    return m->count;
}

uint64_t kvs_memo_bytes(const kvs_memo_t *m)
{
    return m->bytes;
}

#include "common/spec/td_memo.h"

#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_lru.h"

#define NONE UINT32_MAX

/* In a chain of its slot, and in the list of all by use. */
typedef struct entry {
    td_block_key_t key;
    uint64_t learned_ns;
    uint32_t tokens;
    uint32_t chain;
    td_lru_link_t use;
} entry_t;

struct td_memo {
    uint32_t block_tokens;
    uint32_t path_max;
    uint64_t max_age_ns;
    uint32_t capacity;
    uint32_t count;
    td_lru_t use;
    uint32_t free; /* chain of entries that were given up */
    uint32_t used; /* entries that ever were in use: beyond them memory is untouched */
    uint32_t slot_mask;
    uint32_t *slots;  /* owned; [slot_mask + 1]: first of the chain, + 1; 0 = empty */
    entry_t *entries; /* owned; [capacity] */
    uint32_t *paths;  /* owned; [capacity][path_max] */
};

td_status_t td_memo_create(uint64_t bytes, uint32_t block_tokens, uint64_t max_age_ns,
                           td_memo_t **out)
{
    const uint32_t path_max = block_tokens + TD_MEMO_AHEAD;
    /* A slot each at most: their number is a power of two that is not above. */
    const uint64_t each = sizeof(entry_t) + (uint64_t)path_max * 4 + 4;
    td_memo_t *m = NULL;

    if (block_tokens == 0 || block_tokens > TD_MEMO_BLOCK_TOKENS_MAX || bytes > TD_MEMO_BYTES_MAX ||
        bytes < each + sizeof(*m)) {
        return TD_ERR_INVALID;
    }
    m = td_calloc(1, sizeof(*m));
    if (m == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    m->block_tokens = block_tokens;
    m->path_max = path_max;
    m->max_age_ns = max_age_ns;
    m->capacity = (uint32_t)TD_MIN((bytes - sizeof(*m)) / each, (uint64_t)NONE - 1);
    m->free = NONE;
    m->slot_mask = 1;
    while (m->slot_mask * 2ull <= m->capacity) {
        m->slot_mask *= 2;
    }
    m->slot_mask--;
    m->slots = td_calloc(m->slot_mask + 1ull, sizeof(*m->slots));
    m->entries = td_calloc(m->capacity, sizeof(*m->entries));
    m->paths = td_calloc((size_t)m->capacity * path_max, sizeof(*m->paths));
    if (m->slots == NULL || m->entries == NULL || m->paths == NULL) {
        td_memo_destroy(m);
        return TD_ERR_NO_MEMORY;
    }
    td_lru_init(&m->use, &m->entries[0].use, sizeof(*m->entries));
    *out = m;
    return TD_OK;
}

void td_memo_destroy(td_memo_t *m)
{
    if (m != NULL) {
        td_free(m->paths);
        td_free(m->entries);
        td_free(m->slots);
        td_free(m);
    }
}

/* Keys are hashes already. */
static uint32_t *slot_of(const td_memo_t *m, const td_block_key_t *key)
{
    uint32_t hash = 0;
    memcpy(&hash, key->bytes, sizeof(hash));
    return &m->slots[hash & m->slot_mask];
}

static void give_up(td_memo_t *m, uint32_t idx)
{
    entry_t *e = &m->entries[idx];
    uint32_t *link = slot_of(m, &e->key);

    while (*link != idx + 1) {
        link = &m->entries[*link - 1].chain;
    }
    *link = e->chain;
    td_lru_remove(&m->use, idx);
    e->chain = m->free;
    m->free = idx;
    m->count--;
}

/* What is too old is given up where it is met. */
static uint32_t find(td_memo_t *m, const td_block_key_t *key, uint64_t now_ns)
{
    for (uint32_t at = *slot_of(m, key); at != 0; at = m->entries[at - 1].chain) {
        const entry_t *e = &m->entries[at - 1];
        if (td_block_key_equal(&e->key, key)) {
            if (now_ns - e->learned_ns <= m->max_age_ns) {
                return at - 1;
            }
            give_up(m, at - 1);
            return NONE;
        }
    }
    return NONE;
}

static uint32_t add(td_memo_t *m, const td_block_key_t *key)
{
    uint32_t *slot = slot_of(m, key);
    uint32_t idx = 0;

    if (m->count == m->capacity) {
        give_up(m, m->use.oldest);
    }
    if (m->free != NONE) {
        idx = m->free;
        m->free = m->entries[idx].chain;
    } else {
        idx = m->used++;
    }
    m->entries[idx] = (entry_t){.key = *key, .chain = *slot};
    *slot = idx + 1;
    td_lru_add(&m->use, idx);
    m->count++;
    return idx;
}

static void put(td_memo_t *m, const td_block_key_t *key, const uint32_t *tokens, uint32_t count,
                uint64_t now_ns)
{
    const uint32_t kept = TD_MIN(count, m->path_max);
    uint32_t idx = find(m, key, now_ns);
    uint32_t *path = NULL;

    if (kept == 0) {
        return;
    }
    if (idx == NONE) {
        idx = add(m, key);
    } else {
        td_lru_use(&m->use, idx);
    }
    path = m->paths + (size_t)idx * m->path_max;
    m->entries[idx].learned_ns = now_ns;
    if (m->entries[idx].tokens > kept && memcmp(path, tokens, kept * sizeof(*path)) == 0) {
        return; /* a shorter answer of the same kind */
    }
    memcpy(path, tokens, kept * sizeof(*path));
    m->entries[idx].tokens = kept;
}

void td_memo_learn(td_memo_t *m, const td_memo_start_t *start, const uint32_t *output,
                   uint32_t count, uint64_t now_ns)
{
    uint32_t block[TD_MEMO_BLOCK_TOKENS_MAX];
    uint32_t filled = start->tail_tokens;
    td_block_key_t key = start->parent;
    bool has_key = start->has_parent;

    TD_ASSERT(filled < m->block_tokens);
    if (filled > 0) {
        memcpy(block, start->tail, filled * sizeof(*block));
    }
    put(m, &start->key, output, count, now_ns);
    for (uint32_t i = 0; i < count; i++) {
        block[filled++] = output[i];
        if (filled == m->block_tokens) {
            td_block_key_t next;
            td_block_key_next(start->root, has_key ? &key : NULL, block, filled, &next);
            key = next;
            has_key = true;
            filled = 0;
            put(m, &key, output + i + 1, count - i - 1, now_ns);
        }
    }
}

uint32_t td_memo_find(td_memo_t *m, const td_block_key_t *key, uint64_t now_ns, uint32_t *out)
{
    const uint32_t idx = find(m, key, now_ns);

    if (idx == NONE) {
        return 0;
    }
    td_lru_use(&m->use, idx);
    memcpy(out, m->paths + (size_t)idx * m->path_max, m->entries[idx].tokens * sizeof(*out));
    return m->entries[idx].tokens;
}

uint32_t td_memo_path_max(const td_memo_t *m)
{
    return m->path_max;
}

uint32_t td_memo_block_tokens(const td_memo_t *m)
{
    return m->block_tokens;
}

uint32_t td_memo_count(const td_memo_t *m)
{
    return m->count;
}

uint32_t td_memo_capacity(const td_memo_t *m)
{
    return m->capacity;
}

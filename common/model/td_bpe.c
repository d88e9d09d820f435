#include "common/model/td_tokenizer_internal.h"

#include <string.h>

#include "common/base/td_base.h"

#define BPE_MERGES_MAX (1u << 28)

typedef struct bpe_merge {
    uint64_t pair; /* left << 32 | right */
    uint32_t rank;
    uint32_t merged; /* TD_TOKEN_NONE = empty slot */
} bpe_merge_t;

struct td_bpe {
    uint32_t byte_ids[256];
    bpe_merge_t *merges; /* owned; [mask + 1], open addressing, at least half empty */
    uint32_t mask;
    uint32_t merge_count;
};

typedef struct td_bpe_symbol {
    uint32_t id;
    uint32_t prev; /* positions of the neighbours; BPE_END beyond the ends */
    uint32_t next;
    uint32_t pair_rank; /* of (this, next): what a heap entry must show to be current */
    uint32_t pair_merged;
} bpe_symbol_t;

#define BPE_END UINT32_MAX
#define BPE_NO_RANK UINT32_MAX

td_status_t td_token_ids_append(td_token_ids_t *list, const uint32_t *ids, size_t count)
{
    size_t need = 0;

    if (!td_size_add(list->count, count, &need)) {
        return TD_ERR_NO_MEMORY;
    }
    if (need > list->cap) {
        size_t cap = TD_MAX(need, TD_MAX(list->cap * 2, (size_t)32));
        size_t bytes = 0;
        uint32_t *grown = NULL;
        if (td_size_mul(cap, sizeof(*grown), &bytes)) {
            grown = td_realloc(list->ids, bytes);
        }
        if (grown == NULL) {
            return TD_ERR_NO_MEMORY;
        }
        list->ids = grown;
        list->cap = cap;
    }
    if (count > 0) {
        memcpy(list->ids + list->count, ids, count * sizeof(*ids));
    }
    list->count = need;
    return TD_OK;
}

void td_token_ids_fini(td_token_ids_t *list)
{
    td_free(list->ids);
    *list = (td_token_ids_t){0};
}

td_status_t td_bpe_create(const uint32_t byte_ids[256], uint32_t merge_count, td_bpe_t **out)
{
    td_bpe_t *bpe = NULL;
    uint32_t slot_count = 16;

    if (merge_count > BPE_MERGES_MAX) {
        return TD_ERR_TOO_LARGE;
    }
    while (slot_count < 2 * merge_count) {
        slot_count *= 2;
    }
    bpe = td_calloc(1, sizeof(*bpe));
    if (bpe == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    bpe->merges = td_calloc(slot_count, sizeof(*bpe->merges));
    if (bpe->merges == NULL) {
        td_free(bpe);
        return TD_ERR_NO_MEMORY;
    }
    for (uint32_t i = 0; i < slot_count; i++) {
        bpe->merges[i].merged = TD_TOKEN_NONE;
    }
    memcpy(bpe->byte_ids, byte_ids, sizeof(bpe->byte_ids));
    bpe->mask = slot_count - 1;
    *out = bpe;
    return TD_OK;
}

void td_bpe_destroy(td_bpe_t *bpe)
{
    if (bpe == NULL) {
        return;
    }
    td_free(bpe->merges);
    td_free(bpe);
}

static bpe_merge_t *merge_slot(const td_bpe_t *bpe, uint64_t pair)
{
    uint64_t hash = pair * 0x9e3779b97f4a7c15u;
    uint32_t at = (uint32_t)((hash ^ (hash >> 32)) * 0xd6e8feb86659fd93u >> 32) & bpe->mask;

    while (bpe->merges[at].merged != TD_TOKEN_NONE && bpe->merges[at].pair != pair) {
        at = (at + 1) & bpe->mask;
    }
    return &bpe->merges[at];
}

bool td_bpe_add(td_bpe_t *bpe, uint32_t left, uint32_t right, uint32_t merged)
{
    uint64_t pair = (uint64_t)left << 32 | right;
    bpe_merge_t *slot = merge_slot(bpe, pair);

    TD_ASSERT(bpe->merge_count <= bpe->mask / 2);
    if (slot->merged != TD_TOKEN_NONE) {
        return false;
    }
    *slot = (bpe_merge_t){.pair = pair, .rank = bpe->merge_count, .merged = merged};
    bpe->merge_count++;
    return true;
}

void td_bpe_scratch_fini(td_bpe_scratch_t *scratch)
{
    td_free(scratch->symbols);
    td_free(scratch->heap);
    *scratch = (td_bpe_scratch_t){0};
}

static td_status_t scratch_reserve(td_bpe_scratch_t *scratch, size_t len)
{
    size_t cap = TD_MAX(len, (size_t)64);
    bpe_symbol_t *symbols = NULL;
    uint64_t *heap = NULL;

    if (len <= scratch->cap) {
        return TD_OK;
    }
    cap = TD_MAX(cap, 2 * scratch->cap);
    symbols = td_alloc(cap * sizeof(*symbols)); /* no overflow: cap <= 2 texts */
    heap = td_alloc(2 * cap * sizeof(*heap));
    if (symbols == NULL || heap == NULL) {
        td_free(symbols);
        td_free(heap);
        return TD_ERR_NO_MEMORY;
    }
    td_bpe_scratch_fini(scratch);
    scratch->symbols = symbols;
    scratch->heap = heap;
    scratch->cap = cap;
    return TD_OK;
}

static void heap_push(td_bpe_scratch_t *scratch, uint64_t key)
{
    uint64_t *heap = scratch->heap;
    size_t at = scratch->heap_len++;

    /* At most one entry for each of the first pairs, and two more for each merge that took one. */
    TD_ASSERT(at < 2 * scratch->cap);
    while (at > 0 && heap[(at - 1) / 2] > key) {
        heap[at] = heap[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    heap[at] = key;
}

static uint64_t heap_pop(td_bpe_scratch_t *scratch)
{
    uint64_t *heap = scratch->heap;
    uint64_t top = heap[0];
    uint64_t key = heap[--scratch->heap_len];
    size_t len = scratch->heap_len;
    size_t at = 0;

    for (size_t child = 1; child < len; child = 2 * at + 1) {
        if (child + 1 < len && heap[child + 1] < heap[child]) {
            child++;
        }
        if (heap[child] >= key) {
            break;
        }
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = key;
    return top;
}

/* Looks up the pair that starts at a position and queues it when it can merge. */
static void pair_update(const td_bpe_t *bpe, td_bpe_scratch_t *scratch, uint32_t pos)
{
    bpe_symbol_t *symbol = &scratch->symbols[pos];
    const bpe_merge_t *merge = NULL;

    symbol->pair_rank = BPE_NO_RANK;
    if (symbol->next == BPE_END || symbol->id == TD_TOKEN_NONE ||
        scratch->symbols[symbol->next].id == TD_TOKEN_NONE) {
        return;
    }
    merge = merge_slot(bpe, (uint64_t)symbol->id << 32 | scratch->symbols[symbol->next].id);
    if (merge->merged == TD_TOKEN_NONE) {
        return;
    }
    symbol->pair_rank = merge->rank;
    symbol->pair_merged = merge->merged;
    heap_push(scratch, (uint64_t)merge->rank << 32 | pos);
}

static void merge_at(const td_bpe_t *bpe, td_bpe_scratch_t *scratch, uint32_t pos)
{
    bpe_symbol_t *symbol = &scratch->symbols[pos];
    bpe_symbol_t *gone = &scratch->symbols[symbol->next];

    symbol->id = symbol->pair_merged;
    symbol->next = gone->next;
    gone->pair_rank = BPE_NO_RANK; /* its queued pair is stale */
    if (symbol->next != BPE_END) {
        scratch->symbols[symbol->next].prev = pos;
    }
    pair_update(bpe, scratch, pos);
    if (symbol->prev != BPE_END) {
        pair_update(bpe, scratch, symbol->prev);
    }
}

td_status_t td_bpe_encode(const td_bpe_t *bpe, td_bpe_scratch_t *scratch, const uint8_t *word,
                          size_t len, td_token_ids_t *out)
{
    TD_ASSERT(len <= TD_TOKENIZER_TEXT_BYTES_MAX);
    if (len == 0) {
        return TD_OK;
    }
    if (len == 1) {
        return td_token_ids_append(out, &bpe->byte_ids[word[0]], 1);
    }
    TD_TRY(scratch_reserve(scratch, len));
    scratch->heap_len = 0;
    for (uint32_t i = 0; i < len; i++) {
        scratch->symbols[i] = (bpe_symbol_t){.id = bpe->byte_ids[word[i]],
                                             .prev = i == 0 ? BPE_END : i - 1,
                                             .next = i + 1 == len ? BPE_END : i + 1,
                                             .pair_rank = BPE_NO_RANK,
                                             .pair_merged = TD_TOKEN_NONE};
    }
    for (uint32_t i = 0; i < len; i++) {
        pair_update(bpe, scratch, i);
    }
    while (scratch->heap_len > 0) {
        uint64_t top = heap_pop(scratch);
        uint32_t pos = (uint32_t)top;
        if (scratch->symbols[pos].pair_rank == (uint32_t)(top >> 32)) {
            merge_at(bpe, scratch, pos);
        }
    }
    for (uint32_t pos = 0; pos != BPE_END; pos = scratch->symbols[pos].next) {
        TD_TRY(td_token_ids_append(out, &scratch->symbols[pos].id, 1));
    }
    return TD_OK;
}

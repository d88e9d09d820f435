/* td_key_index.h - finds which of an array of entries has a block key: open addressing with linear
 * probing and backward-shift deletion. The keys stay in the caller's entries.
 * Threads: owner. No call after init allocates. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "common/base/td_status.h"
#include "common/kv/td_block_key.h"

#define TD_KEY_INDEX_NONE UINT32_MAX
#define TD_KEY_INDEX_CAPACITY_MAX (1u << 28)

typedef struct td_key_index {
    uint32_t *slots; /* owned; entry, and above it a tag of its key, or TD_KEY_INDEX_NONE */
    uint32_t mask;
    uint32_t entry_bits; /* of a slot */
    const uint8_t *keys; /* borrowed: key of entry i at keys + i * stride */
    size_t stride;       /* bytes */
} td_key_index_t;

/** Makes an empty index for at most capacity entries, <= TD_KEY_INDEX_CAPACITY_MAX (a third of the
 * slots or more stay free). Errors: TD_ERR_NO_MEMORY; the index is then as td_key_index_fini()
 * leaves it. */
TD_MUST_CHECK td_status_t td_key_index_init(td_key_index_t *index, uint32_t capacity,
                                            const td_block_key_t *first_key, size_t stride);
void td_key_index_fini(td_key_index_t *index);
/** The entry of a key, or TD_KEY_INDEX_NONE. O(1) expected. */
uint32_t td_key_index_find(const td_key_index_t *index, const td_block_key_t *key);
/** Finds many keys at once, up to the first that is not there: their slots and entries are asked of
 * memory ahead of time, so that a long prefix waits for it a few times, not twice a key.
 * Shape: out [count]. Answers how many. */
uint32_t td_key_index_find_run(const td_key_index_t *index, const td_block_key_t *keys,
                               uint32_t count, uint32_t *out);
/** Asks memory for where a key is looked for; some keys later for the entry that it finds there.
 * For loops that know what they will look for next. */
void td_key_index_ask_slot(const td_key_index_t *index, const td_block_key_t *key);
void td_key_index_ask_entry(const td_key_index_t *index, const td_block_key_t *key);
/** Units: bytes it holds. */
size_t td_key_index_bytes(const td_key_index_t *index);
/** Adds an entry whose key is not there yet. */
void td_key_index_add(td_key_index_t *index, uint32_t entry);
/** Removes an entry that is there; its key must still be in place. */
void td_key_index_remove(td_key_index_t *index, uint32_t entry);

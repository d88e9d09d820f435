#include "common/kv/td_key_index.h"

#include <string.h>

#include "common/base/td_base.h"

#define SLOTS_AHEAD 24u   /* keys whose slot is asked for before it is read */
#define ENTRIES_AHEAD 12u /* and whose entry is */
/* A slot holds an entry in its low bits, as many as the capacity asks for, and a tag of the key
 * above: probing past another key costs no look at that one's entry, which lies anywhere in memory.
 * The highest bit is never set, so no slot with an entry looks empty. */
#define TAG_BITS 0x7fffffffu

static const td_block_key_t *key_at(const td_key_index_t *x, uint32_t entry)
{
    return (const td_block_key_t *)(const void *)(x->keys + (size_t)entry * x->stride);
}

static uint32_t home_of(const td_key_index_t *x, const td_block_key_t *key)
{
    uint32_t hash = 0;
    memcpy(&hash, key->bytes, sizeof(hash)); /* keys are keyed hashes: any four bytes will do */
    return hash & x->mask;
}

static uint32_t tag_of(const td_key_index_t *x, const td_block_key_t *key)
{
    uint32_t hash = 0;
    memcpy(&hash, key->bytes + sizeof(hash), sizeof(hash));
    return hash << x->entry_bits & TAG_BITS;
}

static uint32_t entry_mask(const td_key_index_t *x)
{
    return (1u << x->entry_bits) - 1;
}

static uint32_t entry_of(const td_key_index_t *x, uint32_t slot_value)
{
    return slot_value == TD_KEY_INDEX_NONE ? TD_KEY_INDEX_NONE : slot_value & entry_mask(x);
}

td_status_t td_key_index_init(td_key_index_t *x, uint32_t capacity, const td_block_key_t *first_key,
                              size_t stride)
{
    uint64_t slots = 4;

    TD_ASSERT(capacity <= TD_KEY_INDEX_CAPACITY_MAX);
    while (slots * 2 < (uint64_t)capacity * 3) {
        slots *= 2;
    }
    x->slots = td_alloc_large(slots * sizeof(*x->slots));
    if (x->slots == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    memset(x->slots, 0xff, slots * sizeof(*x->slots));
    x->mask = (uint32_t)(slots - 1);
    x->entry_bits = 1;
    while (1u << x->entry_bits < capacity) {
        x->entry_bits++;
    }
    x->keys = (const uint8_t *)first_key;
    x->stride = stride;
    return TD_OK;
}

void td_key_index_fini(td_key_index_t *x)
{
    td_free(x->slots);
    x->slots = NULL;
}

/* From a slot on, the first that is empty or has the key's tag. */
static uint32_t likely_slot(const td_key_index_t *x, uint32_t tag, uint32_t slot)
{
    while (x->slots[slot] != TD_KEY_INDEX_NONE && (x->slots[slot] & ~entry_mask(x)) != tag) {
        slot = (slot + 1) & x->mask;
    }
    return slot;
}

static uint32_t slot_of(const td_key_index_t *x, const td_block_key_t *key)
{
    const uint32_t tag = tag_of(x, key);
    uint32_t slot = likely_slot(x, tag, home_of(x, key));

    while (x->slots[slot] != TD_KEY_INDEX_NONE &&
           !td_block_key_equal(key_at(x, entry_of(x, x->slots[slot])), key)) {
        slot = likely_slot(x, tag, (slot + 1) & x->mask);
    }
    return slot;
}

uint32_t td_key_index_find(const td_key_index_t *x, const td_block_key_t *key)
{
    return entry_of(x, x->slots[slot_of(x, key)]);
}

void td_key_index_ask_slot(const td_key_index_t *x, const td_block_key_t *key)
{
    __builtin_prefetch(&x->slots[home_of(x, key)]);
}

void td_key_index_ask_entry(const td_key_index_t *x, const td_block_key_t *key)
{
    const uint32_t slot = likely_slot(x, tag_of(x, key), home_of(x, key));

    if (x->slots[slot] != TD_KEY_INDEX_NONE) {
        __builtin_prefetch(key_at(x, entry_of(x, x->slots[slot])), 1);
    }
}

uint32_t td_key_index_find_run(const td_key_index_t *x, const td_block_key_t *keys, uint32_t count,
                               uint32_t *out)
{
    for (uint32_t i = 0; i < count + SLOTS_AHEAD; i++) {
        if (i < count) {
            td_key_index_ask_slot(x, &keys[i]);
        }
        if (i >= SLOTS_AHEAD - ENTRIES_AHEAD && i - (SLOTS_AHEAD - ENTRIES_AHEAD) < count) {
            td_key_index_ask_entry(x, &keys[i - (SLOTS_AHEAD - ENTRIES_AHEAD)]);
        }
        if (i >= SLOTS_AHEAD) {
            out[i - SLOTS_AHEAD] = td_key_index_find(x, &keys[i - SLOTS_AHEAD]);
            if (out[i - SLOTS_AHEAD] == TD_KEY_INDEX_NONE) {
                return i - SLOTS_AHEAD;
            }
        }
    }
    return count;
}

size_t td_key_index_bytes(const td_key_index_t *x)
{
    return ((size_t)x->mask + 1) * sizeof(*x->slots);
}

void td_key_index_add(td_key_index_t *x, uint32_t entry)
{
    uint32_t slot = slot_of(x, key_at(x, entry));
    TD_ASSERT(x->slots[slot] == TD_KEY_INDEX_NONE);
    x->slots[slot] = tag_of(x, key_at(x, entry)) | entry;
}

void td_key_index_remove(td_key_index_t *x, uint32_t entry)
{
    uint32_t hole = slot_of(x, key_at(x, entry));
    uint32_t at = hole;

    TD_ASSERT(entry_of(x, x->slots[hole]) == entry);
    for (;;) {
        uint32_t home = 0;
        at = (at + 1) & x->mask;
        if (x->slots[at] == TD_KEY_INDEX_NONE) {
            break;
        }
        home = home_of(x, key_at(x, entry_of(x, x->slots[at])));
        /* Move the entry back unless its home lies cyclically in (hole, at]. */
        if (((at - home) & x->mask) >= ((at - hole) & x->mask)) {
            x->slots[hole] = x->slots[at];
            hole = at;
        }
    }
    x->slots[hole] = TD_KEY_INDEX_NONE;
}

#include <stdlib.h>
#include <string.h>

#include "common/base/td_base.h"
#include "kvstore/kvs_tier_internal.h"

td_status_t kvs_tier_slots_init(kvs_tier_slots_t *slots, uint32_t count)
{
    memset(slots, 0, sizeof(*slots));
    slots->at = td_calloc(count, sizeof(*slots->at));
    slots->free = td_calloc(count, sizeof(*slots->free));
    if (slots->at == NULL || slots->free == NULL ||
        td_key_index_init(&slots->index, count, &slots->at[0].key, sizeof(*slots->at)) != TD_OK) {
        kvs_tier_slots_fini(slots);
        return TD_ERR_NO_MEMORY;
    }
    slots->count = count;
    kvs_tier_slots_clear(slots);
    return TD_OK;
}

void kvs_tier_slots_fini(kvs_tier_slots_t *slots)
{
    td_free(slots->at);
    td_free(slots->free);
    td_key_index_fini(&slots->index);
    memset(slots, 0, sizeof(*slots));
}

static void fill_free_stack(kvs_tier_slots_t *slots)
{
    slots->free_count = 0;
    for (uint32_t i = slots->count; i > 0; i--) { /* slot 0 on top: a new file is filled in order */
        if (slots->at[i - 1].generation == 0) {
            slots->free[slots->free_count++] = i - 1;
        }
    }
}

void kvs_tier_slots_clear(kvs_tier_slots_t *slots)
{
    for (uint32_t i = 0; i < slots->count; i++) {
        if (slots->at[i].generation != 0) {
            td_key_index_remove(&slots->index, i);
        }
    }
    memset(slots->at, 0, slots->count * sizeof(*slots->at));
    slots->used_count = 0;
    slots->oldest = KVS_TIER_NONE;
    slots->newest = KVS_TIER_NONE;
    fill_free_stack(slots);
}

uint32_t kvs_tier_slots_find(const kvs_tier_slots_t *slots, const td_block_key_t *key)
{
    return td_key_index_find(&slots->index, key);
}

static void unlink_use(kvs_tier_slots_t *slots, uint32_t slot)
{
    const kvs_tier_slot_t *s = &slots->at[slot];
    if (s->older != KVS_TIER_NONE) {
        slots->at[s->older].newer = s->newer;
    } else {
        slots->oldest = s->newer;
    }
    if (s->newer != KVS_TIER_NONE) {
        slots->at[s->newer].older = s->older;
    } else {
        slots->newest = s->older;
    }
}

static void link_newest(kvs_tier_slots_t *slots, uint32_t slot)
{
    kvs_tier_slot_t *s = &slots->at[slot];
    s->older = slots->newest;
    s->newer = KVS_TIER_NONE;
    if (slots->newest != KVS_TIER_NONE) {
        slots->at[slots->newest].newer = slot;
    } else {
        slots->oldest = slot;
    }
    slots->newest = slot;
}

void kvs_tier_slots_remove(kvs_tier_slots_t *slots, uint32_t slot)
{
    unlink_use(slots, slot);
    td_key_index_remove(&slots->index, slot);
    memset(&slots->at[slot], 0, sizeof(slots->at[slot]));
    slots->free[slots->free_count++] = slot;
    slots->used_count--;
}

uint32_t kvs_tier_slots_take(kvs_tier_slots_t *slots, bool *evicted_out, td_block_key_t *key_out)
{
    if (slots->free_count == 0) {
        if (slots->oldest == KVS_TIER_NONE) {
            return KVS_TIER_NONE;
        }
        *key_out = slots->at[slots->oldest].key;
        *evicted_out = true;
        kvs_tier_slots_remove(slots, slots->oldest);
    }
    return slots->free[--slots->free_count];
}

void kvs_tier_slots_give_back(kvs_tier_slots_t *slots, uint32_t slot)
{
    slots->free[slots->free_count++] = slot;
}

static void set(kvs_tier_slots_t *slots, const kvs_tier_record_t *record)
{
    slots->at[record->slot] = (kvs_tier_slot_t){.key = record->key,
                                                .generation = record->generation,
                                                .used = record->used,
                                                .content_hash = record->content_hash,
                                                .older = KVS_TIER_NONE,
                                                .newer = KVS_TIER_NONE};
    td_key_index_add(&slots->index, record->slot);
    slots->used_count++;
}

void kvs_tier_slots_fill(kvs_tier_slots_t *slots, const kvs_tier_record_t *record)
{
    set(slots, record);
    link_newest(slots, record->slot);
}

void kvs_tier_slots_touch(kvs_tier_slots_t *slots, uint32_t slot)
{
    slots->at[slot].used = ++slots->clock;
    unlink_use(slots, slot);
    link_newest(slots, slot);
}

/* While loading there is no order of uses yet. */
static void unload(kvs_tier_slots_t *slots, uint32_t slot)
{
    td_key_index_remove(&slots->index, slot);
    memset(&slots->at[slot], 0, sizeof(slots->at[slot]));
    slots->used_count--;
}

bool kvs_tier_slots_load(kvs_tier_slots_t *slots, const kvs_tier_record_t *record)
{
    uint32_t other = kvs_tier_slots_find(slots, &record->key);

    if (slots->at[record->slot].generation >= record->generation ||
        (other != KVS_TIER_NONE && slots->at[other].generation >= record->generation)) {
        return false;
    }
    if (other != KVS_TIER_NONE) {
        unload(slots, other);
    }
    if (slots->at[record->slot].generation != 0) {
        unload(slots, record->slot);
    }
    set(slots, record);
    return true;
}

static int by_use(const void *a, const void *b)
{
    const uint64_t *x = a;
    const uint64_t *y = b;
    return (*x > *y) - (*x < *y);
}

td_status_t kvs_tier_slots_loaded(kvs_tier_slots_t *slots)
{
    uint64_t(*order)[2] = td_calloc(slots->used_count, sizeof(*order)); /* last use, slot */
    uint32_t n = 0;

    if (order == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    for (uint32_t i = 0; i < slots->count; i++) {
        if (slots->at[i].generation != 0) {
            order[n][0] = slots->at[i].used;
            order[n++][1] = i;
            slots->clock = TD_MAX(slots->clock, TD_MAX(slots->at[i].used, slots->at[i].generation));
        }
    }
    qsort(order, n, sizeof(*order), by_use);
    slots->oldest = KVS_TIER_NONE;
    slots->newest = KVS_TIER_NONE;
    for (uint32_t i = 0; i < n; i++) {
        link_newest(slots, (uint32_t)order[i][1]);
    }
    td_free(order);
    fill_free_stack(slots);
    return TD_OK;
}

void kvs_tier_slots_record(const kvs_tier_slots_t *slots, uint32_t slot, uint32_t block_bytes,
                           kvs_tier_record_t *out)
{
    const kvs_tier_slot_t *s = &slots->at[slot];
    *out = (kvs_tier_record_t){.key = s->key,
                               .slot = slot,
                               .length = block_bytes,
                               .generation = s->generation,
                               .content_hash = s->content_hash,
                               .used = s->used};
}

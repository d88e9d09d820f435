#include "common/kv/td_kv_events.h"

#include "common/base/td_base.h"

td_status_t td_kv_events_create(uint32_t ring, td_kv_events_t **out)
{
    td_kv_events_t *e = td_calloc(1, sizeof(*e));

    TD_ASSERT(ring > 0 && (ring & (ring - 1)) == 0);
    if (e == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    e->keys = td_calloc(ring, sizeof(*e->keys));
    e->kinds = td_calloc(ring, sizeof(*e->kinds));
    if (e->keys == NULL || e->kinds == NULL) {
        td_kv_events_destroy(e);
        return TD_ERR_NO_MEMORY;
    }
    e->mask = ring - 1;
    e->next = 1;
    *out = e;
    return TD_OK;
}

void td_kv_events_destroy(td_kv_events_t *e)
{
    if (e == NULL) {
        return;
    }
    td_free(e->keys);
    td_free(e->kinds);
    td_free(e);
}

static void add(td_kv_events_t *e, td_kv_event_t kind, const td_block_key_t *key)
{
    const uint32_t at = (uint32_t)e->next & e->mask;

    e->kinds[at] = (uint8_t)kind;
    if (key != NULL) {
        e->keys[at] = *key;
        e->digest ^= td_block_key_word(key);
    }
    e->next++;
}

void td_kv_events_stored(td_kv_events_t *e, const td_block_key_t *key)
{
    if (e != NULL) {
        add(e, TD_KV_STORED, key);
        e->blocks++;
    }
}

void td_kv_events_removed(td_kv_events_t *e, const td_block_key_t *key)
{
    if (e != NULL) {
        TD_ASSERT(e->blocks > 0);
        add(e, TD_KV_REMOVED, key);
        e->blocks--;
    }
}

void td_kv_events_cleared(td_kv_events_t *e)
{
    if (e != NULL) {
        add(e, TD_KV_CLEARED, NULL);
        e->blocks = 0;
        e->digest = 0;
    }
}

uint64_t td_kv_events_oldest(const td_kv_events_t *e)
{
    return e->next > (uint64_t)e->mask + 1 ? e->next - e->mask - 1 : 1;
}

uint32_t td_kv_events_read(const td_kv_events_t *e, uint64_t from, uint32_t max,
                           td_block_key_t *keys_out, uint32_t *runs_out, uint32_t *run_count_out,
                           bool *cleared_out)
{
    const uint32_t count = (uint32_t)TD_MIN(e->next - from, max);
    uint32_t runs = 0;

    TD_ASSERT(from >= td_kv_events_oldest(e) && from <= e->next);
    *cleared_out = false;
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t at = (uint32_t)(from + i) & e->mask;
        if (e->kinds[at] == TD_KV_CLEARED) {
            *cleared_out = i == 0;
            *run_count_out = runs;
            return i == 0 ? 1 : i;
        }
        if (runs == 0) {
            runs_out[runs++] = 0; /* those that came are first, though there be none */
        }
        if ((runs - 1) % 2 != e->kinds[at]) {
            runs_out[runs++] = 0;
        }
        runs_out[runs - 1]++;
        keys_out[i] = e->keys[at];
    }
    *run_count_out = runs;
    return count;
}

#include "kvstore/kvs_segment_manifest.h"

#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_fault.h"
#include "common/base/td_log.h"

#define NOT_LINKED (TD_POOL_NONE - 1u)

typedef struct place { /* of a block in the order of storing */
    uint32_t prev;     /* NOT_LINKED: it was never stored; TD_POOL_NONE: none */
    uint32_t next;
    uint8_t pin; /* as the leader said */
} place_t;

/* Blocks that are readable no more keep their place until they are stored again: whoever walks
 * passes over them. */
struct kvs_segment_manifest {
    td_bus_t *bus;         /* borrowed */
    const td_pool_t *pool; /* borrowed */
    place_t *places;       /* owned, [blocks] */
    uint32_t oldest;
    uint32_t newest;
    char master[TD_MSG_ID_CHARS_MAX + 1];
    uint64_t term;
    uint64_t mount;
    bool telling;
    bool lost;     /* orders: the master is to be asked to mount us again */
    uint32_t next; /* to tell */
    uint32_t last; /* that was there at the mounting: what comes later is told by its order */
    /* One batch. */
    uint32_t count;
    bool any_pin;
    td_block_key_t keys[TD_MSG_MANIFEST_KEYS_MAX];
    uint32_t blocks[TD_MSG_MANIFEST_KEYS_MAX];
    uint64_t epochs[TD_MSG_MANIFEST_KEYS_MAX];
    uint64_t checksums[TD_MSG_MANIFEST_KEYS_MAX];
    uint32_t pins[TD_MSG_MANIFEST_KEYS_MAX];
};

td_status_t kvs_segment_manifest_create(td_bus_t *bus, const td_pool_t *pool,
                                        kvs_segment_manifest_t **out)
{
    const uint32_t blocks = td_pool_counts(pool).total;
    kvs_segment_manifest_t *m = td_calloc(1, sizeof(*m));

    if (m == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    m->places = td_calloc(blocks, sizeof(*m->places));
    if (m->places == NULL) {
        td_free(m);
        return TD_ERR_NO_MEMORY;
    }
    for (uint32_t i = 0; i < blocks; i++) {
        m->places[i] = (place_t){.prev = NOT_LINKED, .next = TD_POOL_NONE};
    }
    m->bus = bus;
    m->pool = pool;
    m->oldest = m->newest = m->next = m->last = TD_POOL_NONE;
    *out = m;
    return TD_OK;
}

void kvs_segment_manifest_destroy(kvs_segment_manifest_t *m)
{
    if (m != NULL) {
        td_free(m->places);
        td_free(m);
    }
}

static void unlink_block(kvs_segment_manifest_t *m, uint32_t idx)
{
    const place_t at = m->places[idx];

    /* The walk goes on as if it had never been there. */
    if (m->next == idx) {
        m->next = m->last == idx ? TD_POOL_NONE : at.next;
    }
    if (m->last == idx) {
        m->last = at.prev;
    }
    if (at.prev != TD_POOL_NONE) {
        m->places[at.prev].next = at.next;
    } else {
        m->oldest = at.next;
    }
    if (at.next != TD_POOL_NONE) {
        m->places[at.next].prev = at.prev;
    } else {
        m->newest = at.prev;
    }
}

void kvs_segment_manifest_stored(kvs_segment_manifest_t *m, uint32_t idx)
{
    if (m->places[idx].prev != NOT_LINKED) {
        unlink_block(m, idx);
    }
    m->places[idx] = (place_t){.prev = m->newest, .next = TD_POOL_NONE};
    if (m->newest != TD_POOL_NONE) {
        m->places[m->newest].next = idx;
    } else {
        m->oldest = idx;
    }
    m->newest = idx;
}

void kvs_segment_manifest_mounted(kvs_segment_manifest_t *m, const char *master, uint64_t term,
                                  uint64_t mount)
{
    memset(m->master, 0, sizeof(m->master));
    memcpy(m->master, master, TD_MIN(strlen(master), (size_t)TD_MSG_ID_CHARS_MAX));
    m->term = term;
    m->mount = mount;
    m->telling = true;
    m->lost = false;
    m->next = m->oldest;
    m->last = m->newest;
}

void kvs_segment_manifest_pin(kvs_segment_manifest_t *m, uint32_t idx, uint32_t pin)
{
    m->places[idx].pin = (uint8_t)pin;
}

void kvs_segment_manifest_lost(kvs_segment_manifest_t *m)
{
    m->lost = true;
}

bool kvs_segment_manifest_is_telling(const kvs_segment_manifest_t *m)
{
    return m->telling || m->lost;
}

static bool tell_lost(kvs_segment_manifest_t *m)
{
    td_msg_t msg = {.type = TD_MSG_STORE_MANIFEST};

    msg.u.blocks =
        (td_msg_blocks_t){.term = m->term, .mount = m->mount, .how = TD_MSG_MANIFEST_LOST};
    m->lost = td_bus_send(m->bus, m->master, &msg) != TD_OK;
    if (!m->lost) {
        TD_LOG_WARN("orders lost on their way", "master=%s", m->master);
    }
    return !m->lost;
}

/* Fills the batch from a place on; answers the place after it. */
static uint32_t gather(kvs_segment_manifest_t *m, uint32_t idx)
{
    m->count = 0;
    m->any_pin = false;
    while (idx != TD_POOL_NONE && m->count < TD_MSG_MANIFEST_KEYS_MAX) {
        if (td_pool_is_indexed(m->pool, idx)) {
            const uint32_t at = m->count++;
            m->keys[at] = *td_pool_key(m->pool, idx);
            m->blocks[at] = idx;
            m->epochs[at] = td_pool_epoch(m->pool, idx);
            m->checksums[at] =
                td_block_checksum(td_pool_content_hash(m->pool, idx), &m->keys[at], m->epochs[at]);
            m->pins[at] = m->places[idx].pin;
            m->any_pin |= m->places[idx].pin != 0;
        }
        idx = idx == m->last ? TD_POOL_NONE : m->places[idx].next;
    }
    return idx;
}

void kvs_segment_manifest_turn(kvs_segment_manifest_t *m)
{
    if (m->lost && !tell_lost(m)) {
        return;
    }
    for (uint32_t i = 0; m->telling && i < KVS_MANIFEST_BATCHES_MAX; i++) {
        const uint32_t after = gather(m, m->next);
        td_msg_t msg = {.type = TD_MSG_STORE_MANIFEST};

        msg.u.blocks = (td_msg_blocks_t){.term = m->term,
                                         .mount = m->mount,
                                         .how = TD_MSG_MANIFEST_MEMORY,
                                         .count = m->count,
                                         .keys = m->keys,
                                         .blocks = m->blocks,
                                         .epochs = m->epochs,
                                         .checksums = m->checksums,
                                         .pins = m->any_pin ? m->pins : NULL,
                                         .is_last = after == TD_POOL_NONE};
        TD_FAULT_POINT("segment_manifest");
        if (td_bus_send(m->bus, m->master, &msg) != TD_OK) {
            TD_LOG_DEBUG("manifest not sent", "master=%s", m->master);
            return; /* the same again next time */
        }
        m->next = after;
        m->telling = after != TD_POOL_NONE;
    }
}

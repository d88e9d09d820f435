#include "kvstore/kvs_master.h"

#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/base/td_fault.h"
#include "common/base/td_log.h"
#include "common/kv/td_key_index.h"

#define NONE UINT32_MAX
#define SEGMENTS_MAX 256u

typedef enum entry_state { ENTRY_FREE, ENTRY_STORING, ENTRY_READY } entry_state_t;

typedef struct entry {
    td_block_key_t key;
    uint8_t state;
    uint32_t segment; /* index */
    uint32_t order;   /* slot of the order that stores it */
    uint32_t block;   /* READY: where */
    uint64_t epoch;
    uint64_t checksum;
    uint64_t lease_until_ns;
    uint32_t lru_prev; /* READY; towards the oldest. STORING: chain of the order's keys */
    uint32_t lru_next;
} entry_t;

typedef struct segment {
    char id[TD_MSG_ID_CHARS_MAX + 1]; /* "" = slot free */
    uint64_t incarnation;
    uint64_t mount; /* names this mounting, which begins with nothing stored */
    uint32_t block_count;
    uint32_t used; /* blocks stored or being stored */
} segment_t;

typedef struct order {
    uint64_t id; /* 0 = slot free */
    uint64_t deadline_ns;
    uint64_t writer_request;
    uint64_t writer_incarnation;
    char writer_id[TD_MSG_ID_CHARS_MAX + 1];
    uint32_t segment;
    uint32_t first; /* chain of its keys without a result */
} order_t;

struct kvs_master {
    td_bus_t *bus; /* borrowed */
    uint64_t term;
    uint64_t next_order;
    uint32_t keys_max;
    entry_t *entries; /* owned, [keys_max] */
    uint32_t *free;   /* owned, stack */
    uint32_t free_count;
    td_key_index_t index; /* owned: key -> entry */
    uint32_t lru_oldest;
    uint32_t lru_newest;
    segment_t segments[SEGMENTS_MAX];
    order_t orders[KVS_ORDERS_MAX];
    td_metric_t *keys_ready;
    td_metric_t *hits;
    td_metric_t *misses;
    td_metric_t *stored;
    td_metric_t *revoked;
    td_metric_t *evicted;
};

td_status_t kvs_master_create(td_bus_t *bus, td_metrics_t *metrics, uint32_t keys_max,
                              uint64_t term, kvs_master_t **out)
{
    kvs_master_t *m = td_calloc(1, sizeof(*m));

    if (m == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    m->entries = td_calloc(keys_max, sizeof(*m->entries));
    m->free = td_calloc(keys_max, sizeof(*m->free));
    if (m->entries == NULL || m->free == NULL ||
        td_key_index_init(&m->index, keys_max, &m->entries[0].key, sizeof(*m->entries)) != TD_OK) {
        kvs_master_destroy(m);
        return TD_ERR_NO_MEMORY;
    }
    for (uint32_t i = 0; i < keys_max; i++) {
        m->free[i] = keys_max - 1 - i;
    }
    m->free_count = keys_max;
    m->keys_max = keys_max;
    m->lru_oldest = NONE;
    m->lru_newest = NONE;
    m->bus = bus;
    m->term = term;
    m->keys_ready = td_metrics_gauge(metrics, "tandem_kvstore_keys", NULL, "readable blocks");
    m->hits = td_metrics_counter(metrics, "tandem_kvstore_lookup_blocks_total", "result=\"hit\"",
                                 "blocks looked up");
    m->misses = td_metrics_counter(metrics, "tandem_kvstore_lookup_blocks_total", "result=\"miss\"",
                                   "blocks looked up");
    m->stored = td_metrics_counter(metrics, "tandem_kvstore_puts_total", "result=\"stored\"",
                                   "blocks offered, by how it ended");
    m->revoked = td_metrics_counter(metrics, "tandem_kvstore_puts_total", "result=\"revoked\"",
                                    "blocks offered, by how it ended");
    m->evicted =
        td_metrics_counter(metrics, "tandem_kvstore_evictions_total", NULL, "blocks evicted");
    *out = m;
    return TD_OK;
}

void kvs_master_destroy(kvs_master_t *m)
{
    if (m == NULL) {
        return;
    }
    td_free(m->entries);
    td_free(m->free);
    td_key_index_fini(&m->index);
    td_free(m);
}

/* --- index ------------------------------------------------------------------------------------ */

static entry_t *entry_find(kvs_master_t *m, const td_block_key_t *key)
{
    uint32_t at = td_key_index_find(&m->index, key);
    return at == TD_KEY_INDEX_NONE ? NULL : &m->entries[at];
}

static entry_t *entry_add(kvs_master_t *m, const td_block_key_t *key)
{
    uint32_t idx = 0;

    if (m->free_count == 0) {
        return NULL;
    }
    idx = m->free[--m->free_count];
    memset(&m->entries[idx], 0, sizeof(m->entries[idx]));
    m->entries[idx].key = *key;
    td_key_index_add(&m->index, idx);
    return &m->entries[idx];
}

static void lru_unlink(kvs_master_t *m, entry_t *e)
{
    if (e->lru_prev != NONE) {
        m->entries[e->lru_prev].lru_next = e->lru_next;
    } else {
        m->lru_oldest = e->lru_next;
    }
    if (e->lru_next != NONE) {
        m->entries[e->lru_next].lru_prev = e->lru_prev;
    } else {
        m->lru_newest = e->lru_prev;
    }
}

static void lru_push(kvs_master_t *m, entry_t *e)
{
    uint32_t idx = (uint32_t)(e - m->entries);
    e->lru_prev = m->lru_newest;
    e->lru_next = NONE;
    if (m->lru_newest != NONE) {
        m->entries[m->lru_newest].lru_next = idx;
    } else {
        m->lru_oldest = idx;
    }
    m->lru_newest = idx;
}

static void order_chain(kvs_master_t *m, entry_t *e, uint32_t order)
{
    uint32_t idx = (uint32_t)(e - m->entries);
    e->order = order;
    e->lru_prev = NONE;
    e->lru_next = m->orders[order].first;
    if (e->lru_next != NONE) {
        m->entries[e->lru_next].lru_prev = idx;
    }
    m->orders[order].first = idx;
}

static void order_unchain(kvs_master_t *m, const entry_t *e)
{
    if (e->lru_prev != NONE) {
        m->entries[e->lru_prev].lru_next = e->lru_next;
    } else {
        m->orders[e->order].first = e->lru_next;
    }
    if (e->lru_next != NONE) {
        m->entries[e->lru_next].lru_prev = e->lru_prev;
    }
}

/* Forgets a key; its segment's block counts as unused from now on. */
static void entry_remove(kvs_master_t *m, entry_t *e)
{
    if (e->state == ENTRY_READY) {
        lru_unlink(m, e);
        td_metric_set(m->keys_ready, td_metric_get(m->keys_ready) - 1);
    } else {
        order_unchain(m, e);
    }
    m->segments[e->segment].used--;
    td_key_index_remove(&m->index, (uint32_t)(e - m->entries));
    e->state = ENTRY_FREE;
    m->free[m->free_count++] = (uint32_t)(e - m->entries);
}

/* --- eviction --------------------------------------------------------------------------------- */

static void send_evict(kvs_master_t *m, const segment_t *segment, const td_block_key_t *keys,
                       uint32_t count)
{
    td_msg_t msg = {.type = TD_MSG_EVICT_ORDER};
    if (count == 0) {
        return;
    }
    msg.u.blocks.term = m->term;
    msg.u.blocks.mount = segment->mount;
    msg.u.blocks.count = count;
    msg.u.blocks.keys = keys;
    if (td_bus_send(m->bus, segment->id, &msg) != TD_OK) {
        TD_LOG_WARN("evict order not sent", "segment=%s blocks=%u", segment->id, count);
    }
}

/* Oldest first; entries under a read lease are passed over. */
static void evict_from(kvs_master_t *m, uint32_t segment, uint32_t want)
{
    td_block_key_t keys[256];
    uint32_t count = 0;
    uint32_t done = 0;
    uint64_t now = td_now_ns();

    for (uint32_t at = m->lru_oldest; at != NONE && done < want;) {
        entry_t *e = &m->entries[at];
        at = e->lru_next;
        if (e->segment != segment || e->lease_until_ns > now) {
            continue;
        }
        keys[count++] = e->key;
        entry_remove(m, e);
        td_metric_add(m->evicted, 1);
        done++;
        if (count == TD_ARRAY_LEN(keys)) {
            send_evict(m, &m->segments[segment], keys, count);
            count = 0;
        }
    }
    send_evict(m, &m->segments[segment], keys, count);
}

static void evict_if_full(kvs_master_t *m, uint32_t segment)
{
    const segment_t *s = &m->segments[segment];
    if ((uint64_t)s->used * 100 >= (uint64_t)s->block_count * KVS_EVICT_FROM_PERCENT) {
        evict_from(m, segment, TD_MAX(s->block_count * KVS_EVICT_PERCENT / 100, 1u));
    }
    /* The index may be the smaller one: then whoever holds the oldest key gives way. */
    if ((uint64_t)(m->keys_max - m->free_count) * 100 >=
            (uint64_t)m->keys_max * KVS_EVICT_FROM_PERCENT &&
        m->lru_oldest != NONE) {
        evict_from(m, m->entries[m->lru_oldest].segment,
                   TD_MAX(m->keys_max * KVS_EVICT_PERCENT / 100, 1u));
    }
}

/* --- segments and writers --------------------------------------------------------------------- */

static uint32_t segment_find(const kvs_master_t *m, const char *id, uint64_t incarnation)
{
    for (uint32_t i = 0; i < SEGMENTS_MAX; i++) {
        if (m->segments[i].incarnation == incarnation && strcmp(m->segments[i].id, id) == 0) {
            return i;
        }
    }
    return NONE;
}

void kvs_master_segment_up(kvs_master_t *m, const char *id, uint64_t incarnation,
                           uint32_t block_count)
{
    for (uint32_t i = 0; i < SEGMENTS_MAX; i++) {
        segment_t *s = &m->segments[i];
        if (s->id[0] == '\0') {
            memset(s, 0, sizeof(*s));
            memcpy(s->id, id, TD_MIN(strlen(id), (size_t)TD_MSG_ID_CHARS_MAX));
            s->incarnation = incarnation;
            s->mount = td_random_u64();
            s->block_count = block_count;
            TD_LOG_INFO("segment mounted", "segment=%s blocks=%u", id, block_count);
            return;
        }
    }
    TD_LOG_WARN("segment not mounted", "segment=%s limit=%u", id, SEGMENTS_MAX);
}

static void send_results(kvs_master_t *m, const char *writer, uint64_t request,
                         const td_block_key_t *keys, const td_status_t *statuses, uint32_t count)
{
    td_msg_t msg = {.type = TD_MSG_PUT_RESULT};
    msg.u.blocks.request = request;
    msg.u.blocks.count = count;
    msg.u.blocks.keys = keys;
    msg.u.blocks.statuses = statuses;
    if (count > 0 && td_bus_send(m->bus, writer, &msg) != TD_OK) {
        TD_LOG_DEBUG("put result not sent", "writer=%s", writer);
    }
}

/* Takes back what an order has not finished: the segment drops what it may have stored since, and
 * the writer's pins end. */
static void order_revoke(kvs_master_t *m, uint32_t slot, bool segment_is_gone)
{
    const order_t *order = &m->orders[slot];
    td_block_key_t keys[256];
    td_status_t statuses[TD_ARRAY_LEN(keys)];

    while (order->first != NONE) {
        uint32_t count = 0;
        for (; order->first != NONE && count < TD_ARRAY_LEN(keys); count++) {
            entry_t *e = &m->entries[order->first];
            keys[count] = e->key;
            statuses[count] = TD_ERR_CANCELLED;
            entry_remove(m, e);
            td_metric_add(m->revoked, 1);
        }
        if (!segment_is_gone) {
            send_evict(m, &m->segments[order->segment], keys, count);
        }
        send_results(m, order->writer_id, order->writer_request, keys, statuses, count);
    }
    m->orders[slot].id = 0;
}

static void segment_down(kvs_master_t *m, uint32_t segment)
{
    for (uint32_t i = 0; i < KVS_ORDERS_MAX; i++) {
        if (m->orders[i].id != 0 && m->orders[i].segment == segment) {
            order_revoke(m, i, true);
        }
    }
    for (uint32_t i = 0; i < m->keys_max; i++) {
        if (m->entries[i].state != ENTRY_FREE && m->entries[i].segment == segment) {
            entry_remove(m, &m->entries[i]);
        }
    }
    m->segments[segment].id[0] = '\0';
    m->segments[segment].incarnation = 0;
}

void kvs_master_peer_down(kvs_master_t *m, const char *id, uint64_t incarnation)
{
    uint32_t segment = segment_find(m, id, incarnation);
    if (segment != NONE) {
        segment_down(m, segment);
    }
    for (uint32_t i = 0; i < KVS_ORDERS_MAX; i++) {
        if (m->orders[i].id != 0 && m->orders[i].writer_incarnation == incarnation) {
            TD_LOG_INFO("put revoked", "writer=%s why=\"writer gone\"", id);
            order_revoke(m, i, false);
        }
    }
}

/* --- messages --------------------------------------------------------------------------------- */

static uint32_t segment_choose(const kvs_master_t *m)
{
    uint32_t best = NONE;
    uint64_t best_free = 0;
    for (uint32_t i = 0; i < SEGMENTS_MAX; i++) {
        const segment_t *s = &m->segments[i];
        if (s->id[0] != '\0' && s->block_count - s->used > best_free) {
            best_free = s->block_count - s->used;
            best = i;
        }
    }
    return best;
}

static uint32_t order_slot(const kvs_master_t *m)
{
    for (uint32_t i = 0; i < KVS_ORDERS_MAX; i++) {
        if (m->orders[i].id == 0) {
            return i;
        }
    }
    return NONE;
}

/* What PutStart says of one key; TD_OK: it is taken into the order. */
static td_status_t put_one(kvs_master_t *m, const td_block_key_t *key, uint32_t segment,
                           uint32_t order)
{
    entry_t *e = entry_find(m, key);
    if (e != NULL) {
        return e->state == ENTRY_READY ? TD_ERR_EXISTS : TD_INPROGRESS;
    }
    if (segment == NONE || order == NONE ||
        m->segments[segment].used >= m->segments[segment].block_count) {
        return TD_ERR_BUSY;
    }
    e = entry_add(m, key);
    if (e == NULL) {
        return TD_ERR_BUSY;
    }
    e->state = ENTRY_STORING;
    e->segment = segment;
    order_chain(m, e, order);
    m->segments[segment].used++;
    return TD_OK;
}

static void handle_put_start(kvs_master_t *m, const td_msg_t *msg)
{
    const td_msg_blocks_t *put = &msg->u.blocks;
    uint32_t segment = segment_choose(m);
    uint32_t slot = order_slot(m);
    td_msg_t out = {.type = TD_MSG_STORE_ORDER};
    td_block_key_t *keys = td_calloc(2 * (size_t)put->count, sizeof(*keys));
    uint64_t *numbers = td_calloc(2 * (size_t)put->count, sizeof(*numbers));
    uint32_t *blocks = td_calloc(put->count, sizeof(*blocks));
    td_status_t *refused = td_calloc(put->count, sizeof(*refused));
    uint32_t taken = 0;
    uint32_t refusals = 0;

    if (keys == NULL || numbers == NULL || blocks == NULL || refused == NULL) {
        goto done; /* no answer: the writer's pins end at its deadline */
    }
    if (segment != NONE) {
        evict_if_full(m, segment);
    }
    if (slot != NONE) {
        m->orders[slot].first = NONE;
    }
    for (uint32_t i = 0; i < put->count; i++) {
        td_status_t status = put_one(m, &put->keys[i], segment, slot);
        if (status != TD_OK) {
            keys[put->count + refusals] = put->keys[i];
            refused[refusals++] = status;
            continue;
        }
        keys[taken] = put->keys[i];
        blocks[taken] = put->blocks[i];
        numbers[taken] = put->epochs[i];
        numbers[put->count + taken] = put->checksums[i];
        taken++;
    }
    send_results(m, msg->sender_id, put->request, keys + put->count, refused, refusals);
    if (taken > 0) {
        order_t *order = &m->orders[slot];
        order->id = ++m->next_order;
        order->deadline_ns = td_now_ns() + KVS_PUT_ABANDONED_MS * TD_NS_PER_MS;
        order->writer_request = put->request;
        order->writer_incarnation = msg->sender_incarnation;
        order->segment = segment;
        memset(order->writer_id, 0, sizeof(order->writer_id));
        memcpy(order->writer_id, msg->sender_id, strlen(msg->sender_id));
        out.u.blocks = (td_msg_blocks_t){.request = order->id,
                                         .term = m->term,
                                         .mount = m->segments[segment].mount,
                                         .writer_id = msg->sender_id,
                                         .writer_incarnation = msg->sender_incarnation,
                                         .count = taken,
                                         .keys = keys,
                                         .blocks = blocks,
                                         .epochs = numbers,
                                         .checksums = numbers + put->count};
        if (td_bus_send(m->bus, m->segments[segment].id, &out) != TD_OK) {
            order_revoke(m, slot, false);
        }
    }
done:
    td_free(refused);
    td_free(blocks);
    td_free(numbers);
    td_free(keys);
}

static void handle_store_done(kvs_master_t *m, const td_msg_t *msg)
{
    const td_msg_blocks_t *done = &msg->u.blocks;
    order_t *order = NULL;
    uint32_t slot = NONE;

    for (uint32_t i = 0; i < KVS_ORDERS_MAX; i++) {
        if (m->orders[i].id == done->request &&
            m->segments[m->orders[i].segment].incarnation == msg->sender_incarnation) {
            slot = i;
        }
    }
    if (slot == NONE || done->term != m->term || done->request == 0) {
        return; /* revoked meanwhile: the segment has its evict order already */
    }
    order = &m->orders[slot];
    for (uint32_t i = 0; i < done->count; i++) {
        entry_t *e = entry_find(m, &done->keys[i]);
        if (e == NULL || e->state != ENTRY_STORING || e->order != slot) {
            continue;
        }
        if (done->statuses[i] != TD_OK) {
            entry_remove(m, e);
            td_metric_add(m->revoked, 1);
            continue;
        }
        order_unchain(m, e);
        e->state = ENTRY_READY;
        e->block = done->blocks[i];
        e->epoch = done->epochs[i];
        e->checksum = done->checksums[i];
        lru_push(m, e);
        td_metric_add(m->stored, 1);
        td_metric_set(m->keys_ready, td_metric_get(m->keys_ready) + 1);
    }
    send_results(m, order->writer_id, order->writer_request, done->keys, done->statuses,
                 done->count);
    TD_FAULT_POINT("store_put_end");
    if (order->first != NONE) {
        order_revoke(m, slot,
                     false); /* a result is missing: no key stays in progress for ever (F7) */
    }
    order->id = 0;
}

/* Adds a segment's id to the answer's list. */
static uint32_t answer_segment(const char **ids, uint32_t *count, const char *id)
{
    for (uint32_t i = 0; i < *count; i++) {
        if (strcmp(ids[i], id) == 0) {
            return i;
        }
    }
    ids[*count] = id;
    return (*count)++;
}

static void handle_lookup(kvs_master_t *m, const td_msg_t *msg)
{
    const td_msg_blocks_t *ask = &msg->u.blocks;
    const char *ids[SEGMENTS_MAX];
    uint32_t id_count = 0;
    uint32_t found = 0;
    td_msg_t out = {.type = TD_MSG_LOOKUP_RESULT};
    uint32_t *small = td_calloc(2 * (size_t)ask->count, sizeof(*small));
    uint64_t *numbers = td_calloc(2 * (size_t)ask->count, sizeof(*numbers));

    if (small == NULL || numbers == NULL) {
        goto done;
    }
    while (found < ask->count) {
        entry_t *e = entry_find(m, &ask->keys[found]);
        if (e == NULL || e->state != ENTRY_READY) {
            break;
        }
        e->lease_until_ns = td_now_ns() + KVS_LEASE_MS * TD_NS_PER_MS;
        lru_unlink(m, e);
        lru_push(m, e);
        small[found] = answer_segment(ids, &id_count, m->segments[e->segment].id);
        small[ask->count + found] = e->block;
        numbers[found] = e->epoch;
        numbers[ask->count + found] = e->checksum;
        found++;
    }
    td_metric_add(m->hits, found);
    td_metric_add(m->misses, ask->count - found);
    out.u.found = (td_msg_lookup_result_t){.request = ask->request,
                                           .status = found > 0 ? TD_OK : TD_ERR_NOT_FOUND,
                                           .lease_ms = KVS_LEASE_MS,
                                           .segment_count = id_count,
                                           .segment_ids = ids,
                                           .count = found,
                                           .segment_of = small,
                                           .blocks = small + ask->count,
                                           .epochs = numbers,
                                           .checksums = numbers + ask->count};
    TD_FAULT_POINT("store_lookup");
    if (td_bus_send(m->bus, msg->sender_id, &out) != TD_OK) {
        TD_LOG_DEBUG("lookup result not sent", "to=%s", msg->sender_id);
    }
done:
    td_free(numbers);
    td_free(small);
}

bool kvs_master_handle(kvs_master_t *m, const td_msg_t *msg)
{
    switch (msg->type) {
    case TD_MSG_PUT_START:
        handle_put_start(m, msg);
        return true;
    case TD_MSG_STORE_DONE:
        handle_store_done(m, msg);
        return true;
    case TD_MSG_LOOKUP:
        handle_lookup(m, msg);
        return true;
    default:
        return false;
    }
}

void kvs_master_tick(kvs_master_t *m)
{
    uint64_t now = td_now_ns();
    for (uint32_t i = 0; i < KVS_ORDERS_MAX; i++) {
        if (m->orders[i].id != 0 && now >= m->orders[i].deadline_ns) {
            TD_LOG_WARN("put revoked", "writer=%s why=\"abandoned\"", m->orders[i].writer_id);
            order_revoke(m, i, false);
        }
    }
}

#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/base/td_fault.h"
#include "common/base/td_log.h"
#include "kvstore/kvs_master_internal.h"
#include "kvstore/kvs_segment_tier.h"

/* --- answers ---------------------------------------------------------------------------------- */

/* Adds a segment's id to the answer's list. */
static uint32_t answer_segment(const char **ids, uint32_t *count, const char *id)
{
    for (uint32_t i = 0; i < *count; i++) {
        if (ids[i] == id) {
            return i;
        }
    }
    ids[*count] = id;
    return (*count)++;
}

/* The longest prefix that can be read now. */
static void answer(kvs_master_t *m, const char *to, uint64_t request, const td_block_key_t *keys,
                   uint32_t count)
{
    const uint64_t now = td_now_ns();
    const char *ids[KVS_SEGMENTS_MAX];
    uint32_t id_count = 0;
    uint32_t found = 0;
    td_msg_t out = {.type = TD_MSG_LOOKUP_RESULT};
    kvs_entry_t **entries = td_calloc(count, sizeof(kvs_entry_t *));
    uint32_t *small = td_calloc(3 * (size_t)count, sizeof(*small));
    uint32_t *segments = small == NULL ? NULL : small + 2 * (size_t)count;
    uint64_t *numbers = td_calloc(2 * (size_t)count, sizeof(*numbers));

    if (entries == NULL || small == NULL || numbers == NULL) {
        goto done;
    }
    for (; found < count; found++) {
        kvs_entry_t *e = kvs_index_find(m->index, &keys[found]);
        const kvs_replica_t *r = e == NULL ? NULL : kvs_index_serve(m->index, e);
        if (r == NULL) {
            break;
        }
        entries[found] = e;
        segments[found] = r->segment;
        small[found] = answer_segment(ids, &id_count, m->segments[r->segment].id);
        small[count + found] = r->block;
        numbers[found] = r->epoch;
        numbers[count + found] = r->checksum;
    }
    for (uint32_t i = found; i > 0; i--) {
        kvs_index_touch(m->index, entries[i - 1], now);
    }
    td_metric_add(m->hits, found);
    td_metric_add(m->misses, count - found);
    out.u.found = (td_msg_lookup_result_t){.request = request,
                                           .status = found > 0 ? TD_OK : TD_ERR_NOT_FOUND,
                                           .lease_ms = m->index->policy.lease_ms,
                                           .segment_count = id_count,
                                           .segment_ids = ids,
                                           .count = found,
                                           .segment_of = small,
                                           .blocks = small + count,
                                           .epochs = numbers,
                                           .checksums = numbers + count};
    TD_FAULT_POINT("store_lookup");
    if (td_bus_send(m->bus, to, &out) != TD_OK) {
        TD_LOG_DEBUG("lookup result not sent", "to=%s", to);
    }
    kvs_master_copy_hot(m, &out.u.found, keys, segments);
done:
    td_free(numbers);
    td_free(small);
    td_free(entries);
}

/* --- promotion -------------------------------------------------------------------------------- */

/* Blocks of one segment's cold tier that are gathered into an order. */
typedef struct gathered {
    kvs_order_t *order; /* NULL: none yet */
    uint32_t count;
    td_block_key_t keys[KVS_PROMOTE_BLOCKS_MAX];
} gathered_t;

static void send_gathered(kvs_master_t *m, gathered_t *g)
{
    td_msg_t msg = {.type = TD_MSG_PROMOTE_ORDER};

    if (g->order == NULL) {
        return;
    }
    msg.u.blocks = (td_msg_blocks_t){.request = g->order->id,
                                     .term = m->term,
                                     .mount = m->segments[g->order->segment].mount,
                                     .count = g->count,
                                     .keys = g->keys};
    if (g->count == 0 || !kvs_master_leads(m) ||
        td_bus_send(m->bus, m->segments[g->order->segment].id, &msg) != TD_OK) {
        kvs_order_revoke(m, g->order, true);
    }
    *g = (gathered_t){0};
}

/* Promises a block, for which others may give way. */
static td_status_t begin(kvs_master_t *m, const gathered_t *g, const td_block_key_t *key)
{
    const uint32_t segment = g->order->segment;
    const uint32_t order = (uint32_t)(g->order - m->orders);
    td_status_t status = kvs_index_begin(m->index, key, segment, order, &g->order->storing);

    if (status == TD_ERR_BUSY) {
        kvs_master_evict(m, segment, KVS_PROMOTE_BLOCKS_MAX - g->count);
        status = kvs_index_begin(m->index, key, segment, order, &g->order->storing);
    }
    return status;
}

/* False: the key stays where it is. */
static bool gather(kvs_master_t *m, gathered_t *g, const td_block_key_t *key, uint32_t segment,
                   uint64_t now)
{
    if (g->order != NULL && (g->order->segment != segment || g->count == KVS_PROMOTE_BLOCKS_MAX)) {
        send_gathered(m, g);
    }
    if (g->order == NULL) {
        if (m->promotions >= KVS_PROMOTIONS_ORDERED_MAX ||
            m->segments[segment].slow_until_ns > now) {
            return false;
        }
        kvs_master_make_room(m, segment, 0);
        g->order = kvs_order_new(m, segment, "", 0);
        if (g->order == NULL) {
            return false;
        }
        g->order->is_promotion = true;
        g->order->deadline_ns = now + KVS_PROMOTE_ABANDONED_MS * TD_NS_PER_MS;
        m->promotions++;
    }
    if (begin(m, g, key) != TD_OK) {
        return false;
    }
    g->keys[g->count++] = *key;
    return true;
}

/* What is readable of the longest prefix that is readable, on its way or cold is leased, so that
 * making room for the rest does not drive it out. */
static void lease(kvs_master_t *m, const td_block_key_t *keys, uint32_t count)
{
    const uint64_t until_ns =
        td_now_ns() + TD_MAX(m->index->policy.lease_ms, KVS_PROMOTE_ABANDONED_MS) * TD_NS_PER_MS;

    for (uint32_t i = 0; i < count; i++) {
        kvs_entry_t *e = kvs_index_find(m->index, &keys[i]);
        if (e == NULL && kvs_cold_find(m->cold, &keys[i]) == KVS_NONE) {
            return;
        }
        if (e != NULL && e->ready > 0) {
            e->lease_until_ns = TD_MAX(e->lease_until_ns, until_ns);
        }
    }
}

/* Orders what is cold of that prefix. */
static void promote(kvs_master_t *m, const td_block_key_t *keys, uint32_t count)
{
    const uint64_t now = td_now_ns();
    gathered_t g = {0};

    for (uint32_t i = 0; i < count; i++) {
        uint32_t segment = KVS_NONE;
        if (kvs_index_find(m->index, &keys[i]) != NULL) {
            continue;
        }
        segment = kvs_cold_find(m->cold, &keys[i]);
        if (segment == KVS_NONE || !gather(m, &g, &keys[i], segment, now)) {
            break;
        }
    }
    send_gathered(m, &g);
}

/* --- lookups that wait ------------------------------------------------------------------------ */

/* Is the key on its way from a cold tier? */
static bool is_coming(const kvs_master_t *m, const td_block_key_t *key)
{
    const kvs_entry_t *e = kvs_index_find(m->index, key);

    for (uint32_t at = e == NULL ? KVS_NONE : e->first; at != KVS_NONE;
         at = m->index->replicas[at].next) {
        const kvs_replica_t *r = &m->index->replicas[at];
        if (r->state == KVS_STORING && m->orders[r->order].is_promotion) {
            return true;
        }
    }
    return false;
}

static uint32_t count_readable(const kvs_master_t *m, const td_block_key_t *keys, uint32_t from,
                               uint32_t count)
{
    for (; from < count; from++) {
        const kvs_entry_t *e = kvs_index_find(m->index, &keys[from]);
        if (e == NULL || e->ready == 0) {
            break;
        }
    }
    return from;
}

static bool hold(kvs_master_t *m, const td_msg_t *msg, uint32_t seen)
{
    const td_msg_blocks_t *ask = &msg->u.blocks;
    held_t *h = m->held;

    if (m->held_count == KVS_HELD_MAX || m->index->policy.promote_ms == 0) {
        return false;
    }
    while (h->keys != NULL) {
        h++;
    }
    h->keys = td_calloc(ask->count, sizeof(*h->keys));
    if (h->keys == NULL) {
        return false;
    }
    memcpy(h->keys, ask->keys, ask->count * sizeof(*h->keys));
    memset(h->to, 0, sizeof(h->to));
    memcpy(h->to, msg->sender_id, TD_MIN(strlen(msg->sender_id), (size_t)TD_MSG_ID_CHARS_MAX));
    h->request = ask->request;
    h->count = ask->count;
    h->seen = seen;
    h->deadline_ns = td_now_ns() + m->index->policy.promote_ms * TD_NS_PER_MS;
    m->held_count++;
    return true;
}

static void release(kvs_master_t *m, held_t *h)
{
    td_free(h->keys);
    h->keys = NULL;
    m->held_count--;
}

void kvs_master_look_at_held(kvs_master_t *m, uint64_t now_ns)
{
    for (uint32_t i = 0; m->held_count > 0 && i < KVS_HELD_MAX; i++) {
        held_t *h = &m->held[i];
        bool is_over = false;
        if (h->keys == NULL) {
            continue;
        }
        h->seen = count_readable(m, h->keys, h->seen, h->count);
        is_over = h->seen == h->count || !is_coming(m, &h->keys[h->seen]);
        if (!is_over && now_ns < h->deadline_ns) {
            continue;
        }
        td_metric_add(is_over ? m->held_over : m->held_time_out, 1);
        answer(m, h->to, h->request, h->keys, h->count);
        release(m, h);
    }
}

void kvs_master_forget_held(kvs_master_t *m)
{
    for (uint32_t i = 0; i < KVS_HELD_MAX; i++) {
        if (m->held[i].keys != NULL) {
            release(m, &m->held[i]);
        }
    }
}

uint32_t kvs_master_wait_ms(const kvs_master_t *m, uint32_t most_ms)
{
    uint64_t wait_ms = most_ms;

    for (uint32_t i = 0; m->held_count > 0 && i < KVS_HELD_MAX; i++) {
        if (m->held[i].keys != NULL) {
            wait_ms = TD_MIN(wait_ms, td_remaining_ns(m->held[i].deadline_ns) / TD_NS_PER_MS + 1);
        }
    }
    return m->term == 0 ? (uint32_t)wait_ms : td_kv_feed_wait_ms(m->feed, (uint32_t)wait_ms);
}

void kvs_master_handle_lookup(kvs_master_t *m, const td_msg_t *msg)
{
    const td_msg_blocks_t *ask = &msg->u.blocks;
    uint32_t seen = count_readable(m, ask->keys, 0, ask->count);

    if (seen < ask->count && kvs_cold_count(m->cold) > 0 && kvs_master_leads(m)) {
        lease(m, ask->keys, ask->count);
        promote(m, ask->keys, ask->count);
        seen = count_readable(m, ask->keys, 0, ask->count);
        if (seen < ask->count && is_coming(m, &ask->keys[seen]) && hold(m, msg, seen)) {
            return;
        }
    }
    answer(m, msg->sender_id, ask->request, ask->keys, ask->count);
}

/* --- what segments tell ----------------------------------------------------------------------- */

static bool was_taken(const kvs_segment_info_t *s, const td_block_key_t *key)
{
    for (uint32_t i = 0; i < s->taken_count; i++) {
        if (td_block_key_equal(&s->taken[i], key)) {
            return true;
        }
    }
    return false;
}

/* Removed while the segment was away: it has not heard of that. */
static bool was_removed(const kvs_master_t *m, uint32_t segment, const td_block_key_t *key)
{
    const uint64_t at_ns = kvs_removed_at(m->removed, key);
    return at_ns != 0 && at_ns <= m->segments[segment].mounted_ns;
}

/* A block that was removed goes, and with it what was put there since under its key: the segment
 * has taken the old one for it. */
static void remove_told(kvs_master_t *m, uint32_t segment, const td_block_key_t *key)
{
    const kvs_entry_t *e = kvs_index_find(m->index, key);
    kvs_replica_t *r = e == NULL ? NULL : kvs_index_on(m->index, e, segment);

    if (r != NULL) {
        (void)kvs_index_drop(m->index, r,
                             r->state == KVS_STORING ? &m->orders[r->order].storing : NULL);
    }
    kvs_master_evict_told(m, segment, TD_MSG_EVICT_REMOVE, key, 1);
}

/* A block of a segment's memory. Readers that another leader told of it may still be at it: it
 * counts as leased from the mounting on. False: there is no room for it. */
static bool adopt_one(kvs_master_t *m, uint32_t segment, const td_msg_blocks_t *told, uint32_t i)
{
    const kvs_segment_info_t *s = &m->segments[segment];
    const uint64_t until_ns = s->mounted_ns + m->index->policy.lease_ms * TD_NS_PER_MS;
    kvs_entry_t *e = NULL;
    td_status_t status = TD_OK;

    if (was_taken(s, &told->keys[i])) {
        return true;
    }
    status = kvs_index_adopt(m->index, &told->keys[i], segment, told->blocks[i], told->epochs[i],
                             told->checksums[i], &e);
    if (status == TD_OK) {
        e->lease_until_ns = TD_MAX(e->lease_until_ns, until_ns);
        td_metric_add(m->adopted, 1);
        if (told->pins != NULL && told->pins[i] > e->pin) {
            kvs_index_pin(m->index, e, (kvs_pin_t)told->pins[i], td_now_ns());
        }
    }
    return status != TD_ERR_BUSY;
}

static void adopt(kvs_master_t *m, uint32_t segment, const td_msg_blocks_t *told)
{
    kvs_segment_info_t *s = &m->segments[segment];
    td_block_key_t surplus[TD_MSG_MANIFEST_KEYS_MAX];
    uint32_t count = 0;

    s->heard = true;
    s->talked_ns = td_now_ns();
    for (uint32_t i = 0; i < told->count; i++) {
        if (was_removed(m, segment, &told->keys[i])) {
            remove_told(m, segment, &told->keys[i]);
        } else if (!adopt_one(m, segment, told, i)) {
            surplus[count++] = told->keys[i];
        }
    }
    /* Nobody would ever know of them. */
    kvs_master_evict_told(m, segment, TD_MSG_EVICT_DEMOTE, surplus, count);
    if (told->is_last) {
        TD_LOG_INFO("segment has told all", "segment=%s keys=%u took_ms=%llu", s->id,
                    m->index->shares[segment].used,
                    (unsigned long long)((td_now_ns() - s->mounted_ns) / TD_NS_PER_MS));
        s->telling = false;
        s->taken_count = 0;
    }
    kvs_master_count_keys(m);
}

void kvs_master_handle_manifest(kvs_master_t *m, const td_msg_t *msg)
{
    const td_msg_blocks_t *told = &msg->u.blocks;

    for (uint32_t segment = 0; segment < KVS_SEGMENTS_MAX; segment++) {
        kvs_segment_info_t *s = &m->segments[segment];
        if (s->id[0] == '\0' || s->incarnation != msg->sender_incarnation ||
            s->mount != told->mount || told->term != m->term) {
            continue;
        }
        if (told->how == TD_MSG_MANIFEST_MEMORY) {
            adopt(m, segment, told);
            return;
        }
        s->must_mount |= told->how == TD_MSG_MANIFEST_LOST;
        if (told->how == TD_MSG_MANIFEST_RESET) {
            kvs_cold_forget(m->cold, segment);
        }
        for (uint32_t i = 0; i < told->count; i++) {
            if (told->how == TD_MSG_MANIFEST_GONE) {
                kvs_cold_remove(m->cold, &told->keys[i], segment);
            } else if (was_removed(m, segment, &told->keys[i])) {
                kvs_master_evict_told(m, segment, TD_MSG_EVICT_REMOVE, &told->keys[i], 1);
            } else {
                kvs_cold_add(m->cold, &told->keys[i], segment);
            }
        }
    }
    kvs_master_count_keys(m);
}

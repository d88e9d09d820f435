#include "kvstore/kvs_master.h"

#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/base/td_fault.h"
#include "common/base/td_log.h"
#include "kvstore/kvs_master_internal.h"

#define EVICT_KEYS_MAX 256u /* of one order */
#define COOL_LOOKS 1024u    /* a tick */
#define COOLED_MAX 64u      /* a tick */
#define TELL_AGAIN_MS 250u  /* a segment that has not answered is told of its mounting again */
#define TOLD_IDLE_MS 2000u  /* one that stopped in the middle of what it tells is mounted again */

static void make_metrics(kvs_master_t *m, td_metrics_t *metrics)
{
    static const char *const puts_help = "blocks offered, by how it ended";
    static const char *const lookups_help = "blocks looked up";
    static const char *const held_help = "lookups that waited for cold tiers";
    static const char *const copies_help = "replicas of hot blocks made, and given up again";

    m->keys = td_metrics_gauge(metrics, "tandem_kvstore_keys", NULL, "readable blocks");
    m->replicas = td_metrics_gauge(metrics, "tandem_kvstore_replicas", NULL,
                                   "blocks of segments that are readable or on their way");
    m->hits = td_metrics_counter(metrics, "tandem_kvstore_lookup_blocks_total", "result=\"hit\"",
                                 lookups_help);
    m->misses = td_metrics_counter(metrics, "tandem_kvstore_lookup_blocks_total", "result=\"miss\"",
                                   lookups_help);
    m->stored =
        td_metrics_counter(metrics, "tandem_kvstore_puts_total", "result=\"stored\"", puts_help);
    m->revoked =
        td_metrics_counter(metrics, "tandem_kvstore_puts_total", "result=\"revoked\"", puts_help);
    m->evicted =
        td_metrics_counter(metrics, "tandem_kvstore_evictions_total", NULL, "blocks evicted");
    m->copied = td_metrics_counter(metrics, "tandem_kvstore_hot_replicas_total", "change=\"made\"",
                                   copies_help);
    m->cooled = td_metrics_counter(metrics, "tandem_kvstore_hot_replicas_total",
                                   "change=\"dropped\"", copies_help);
    m->cold_keys =
        td_metrics_gauge(metrics, "tandem_kvstore_cold_keys", NULL, "blocks that cold tiers hold");
    m->promoted = td_metrics_counter(metrics, "tandem_kvstore_promoted_blocks_total", NULL,
                                     "blocks brought back from cold tiers");
    m->held_over = td_metrics_counter(metrics, "tandem_kvstore_held_lookups_total",
                                      "result=\"answered\"", held_help);
    m->held_time_out = td_metrics_counter(metrics, "tandem_kvstore_held_lookups_total",
                                          "result=\"timeout\"", held_help);
    m->adopted = td_metrics_counter(metrics, "tandem_kvstore_adopted_blocks_total", NULL,
                                    "blocks that segments told of when they were mounted");
    m->memo_answers = td_metrics_gauge(metrics, "tandem_kvstore_memo_answers", NULL,
                                       "answers that nodes remember for each other");
    m->memo_bytes = td_metrics_gauge(metrics, "tandem_kvstore_memo_bytes", NULL, "their memory");
    m->memo_found = td_metrics_counter(metrics, "tandem_kvstore_memo_asks_total",
                                       "result=\"found\"", "answers asked for");
    m->memo_missed = td_metrics_counter(metrics, "tandem_kvstore_memo_asks_total",
                                        "result=\"missed\"", "answers asked for");
    m->telling = td_metrics_gauge(metrics, "tandem_kvstore_segments_telling", NULL,
                                  "segments that have not told all they hold");
}

static td_status_t open_feed(kvs_master_t *m, td_bus_t *bus)
{
    const td_kv_feed_out_t to = td_kv_feed_over_bus(bus);

    TD_TRY(td_kv_events_create(TD_KV_EVENTS_RING, &m->events));
    m->index->events = m->events;
    return td_kv_feed_create(&to, m->events, kvs_index_walk, m->index, &m->feed);
}

td_status_t kvs_master_create(td_bus_t *bus, td_metrics_t *metrics, uint32_t keys_max,
                              const kvs_policy_t *policy, const td_coord_t *coord,
                              kvs_master_t **out)
{
    kvs_master_t *m = td_calloc(1, sizeof(*m));
    td_status_t status = TD_ERR_NO_MEMORY;

    if (m == NULL) {
        return status;
    }
    status = kvs_index_create(keys_max, policy, &m->index);
    if (status == TD_OK) {
        status = kvs_cold_create(policy->cold_keys_max, &m->cold);
    }
    if (status == TD_OK) {
        status = kvs_removed_create(KVS_REMOVED_MAX, &m->removed);
    }
    if (status == TD_OK) {
        status = kvs_memo_create(policy->memo_bytes, policy->memo_age_ms * TD_NS_PER_MS, &m->memo);
    }
    if (status == TD_OK) {
        status = open_feed(m, bus);
    }
    if (status != TD_OK) {
        kvs_master_destroy(m);
        return status;
    }
    for (uint32_t i = 0; i < KVS_ORDERS_MAX; i++) {
        m->free_orders[i] = KVS_ORDERS_MAX - 1 - i;
    }
    m->free_order_count = KVS_ORDERS_MAX;
    m->bus = bus;
    m->incarnation = td_bus_incarnation(bus);
    m->coord = coord;
    make_metrics(m, metrics);
    *out = m;
    return TD_OK;
}

void kvs_master_destroy(kvs_master_t *m)
{
    if (m == NULL) {
        return;
    }
    kvs_master_forget_held(m);
    kvs_cold_destroy(m->cold);
    kvs_removed_destroy(m->removed);
    kvs_memo_destroy(m->memo);
    td_kv_feed_destroy(m->feed);
    kvs_index_destroy(m->index);
    td_kv_events_destroy(m->events);
    td_free(m);
}

void kvs_master_count_keys(kvs_master_t *m)
{
    td_metric_set(m->keys, m->index->readable);
    td_metric_set(m->replicas, m->index->replicas_max - m->index->free_replica_count);
    td_metric_set(m->cold_keys, kvs_cold_count(m->cold));
}

/* --- orders ----------------------------------------------------------------------------------- */

/* Where it does not go out (we do not lead at this moment, or the segment cannot be told), the
 * segment would keep what nobody knows of: it is mounted again as soon as that is possible. */
static bool transmit_evict(kvs_master_t *m, uint32_t segment, td_msg_evict_t how,
                           const td_block_key_t *keys, uint32_t count)
{
    kvs_segment_info_t *to = &m->segments[segment];
    td_msg_t msg = {.type = TD_MSG_EVICT_ORDER};

    msg.u.blocks.term = m->term;
    msg.u.blocks.mount = to->mount;
    msg.u.blocks.how = how;
    msg.u.blocks.count = count;
    msg.u.blocks.keys = keys;
    if (!kvs_master_leads(m)) {
        to->must_mount = true;
    } else if (td_bus_send(m->bus, to->id, &msg) != TD_OK) {
        TD_LOG_WARN("evict order not sent", "segment=%s blocks=%u", to->id, count);
        to->must_mount = true;
    }
    return !to->must_mount;
}

/* False: the segment may keep them. */
static bool send_evict(kvs_master_t *m, uint32_t segment, td_msg_evict_t how,
                       const td_block_key_t *keys, uint32_t count)
{
    kvs_segment_info_t *to = &m->segments[segment];

    bool sent = true;

    if (count == 0) {
        return true;
    }
    sent = transmit_evict(m, segment, how, keys, count);
    if (to->telling && count <= KVS_TAKEN_MAX - to->taken_count) {
        memcpy(&to->taken[to->taken_count], keys, count * sizeof(*keys));
        to->taken_count += count;
    } else if (to->telling) {
        to->must_mount = true;
    }
    return sent;
}

void kvs_master_evict_told(kvs_master_t *m, uint32_t segment, td_msg_evict_t how,
                           const td_block_key_t *keys, uint32_t count)
{
    if (count > 0) {
        (void)transmit_evict(m, segment, how, keys, count);
        td_metric_add(m->evicted, count);
    }
}

static void send_results(kvs_master_t *m, td_msg_type_t type, const char *to, uint64_t request,
                         const td_block_key_t *keys, const td_status_t *statuses, uint32_t count)
{
    td_msg_t msg = {.type = type};

    msg.u.blocks.request = request;
    msg.u.blocks.count = count;
    msg.u.blocks.keys = keys;
    msg.u.blocks.statuses = statuses;
    if (count > 0 && td_bus_send(m->bus, to, &msg) != TD_OK) {
        TD_LOG_DEBUG("results not sent", "to=%s", to);
    }
}

kvs_order_t *kvs_order_new(kvs_master_t *m, uint32_t segment, const char *writer_id,
                           uint64_t writer_incarnation)
{
    kvs_order_t *order = NULL;
    uint32_t slot = 0;

    if (m->free_order_count == 0) {
        return NULL;
    }
    slot = m->free_orders[--m->free_order_count];
    order = &m->orders[slot];
    *order =
        (kvs_order_t){.id = ++m->next_order * KVS_ORDERS_MAX + slot,
                      .deadline_ns = td_now_ns() + m->index->policy.put_abandoned_ms * TD_NS_PER_MS,
                      .writer_incarnation = writer_incarnation,
                      .segment = segment,
                      .storing = KVS_LIST_EMPTY};
    memcpy(order->writer_id, writer_id, strlen(writer_id));
    return order;
}

/* Does anybody wait for a PutResult? */
static bool has_writer(const kvs_order_t *order)
{
    return !order->is_copy && !order->is_promotion;
}

static void order_free(kvs_master_t *m, kvs_order_t *order)
{
    TD_ASSERT(order->storing.oldest == KVS_NONE);
    m->copies -= order->is_copy;
    m->promotions -= order->is_promotion;
    order->id = 0;
    m->free_orders[m->free_order_count++] = (uint32_t)(order - m->orders);
}

/* A key's put is over once no segment is fetching it any more; then it says how it ended: well if
 * it can be read from one of them. */
static bool put_is_over(const kvs_master_t *m, const td_block_key_t *key, td_status_t *status)
{
    const kvs_entry_t *e = kvs_index_find(m->index, key);

    if (e != NULL && e->storing > 0) {
        return false;
    }
    *status = e != NULL ? TD_OK : *status;
    return true;
}

void kvs_order_revoke(kvs_master_t *m, kvs_order_t *order, bool segment_knows_nothing)
{
    td_block_key_t keys[EVICT_KEYS_MAX];
    td_block_key_t over[EVICT_KEYS_MAX];
    td_status_t statuses[EVICT_KEYS_MAX];

    while (order->storing.oldest != KVS_NONE) {
        uint32_t count = 0;
        uint32_t over_count = 0;
        for (; order->storing.oldest != KVS_NONE && count < EVICT_KEYS_MAX; count++) {
            kvs_replica_t *r = &m->index->replicas[order->storing.oldest];
            keys[count] = *kvs_index_key(m->index, r);
            (void)kvs_index_drop(m->index, r, &order->storing);
            td_metric_add(m->revoked, has_writer(order));
            over[over_count] = keys[count];
            statuses[over_count] = TD_ERR_CANCELLED;
            over_count += put_is_over(m, &keys[count], &statuses[over_count]);
        }
        if (!segment_knows_nothing) {
            (void)send_evict(m, order->segment, TD_MSG_EVICT_DROP, keys, count);
        }
        if (has_writer(order)) {
            send_results(m, TD_MSG_PUT_RESULT, order->writer_id, order->writer_request, over,
                         statuses, over_count);
        }
    }
    order_free(m, order);
    kvs_master_count_keys(m);
}

/* Segments remember what is pinned for the next leader. One that does not hear of it costs the pin,
 * should this leader fall. */
static void send_pins(kvs_master_t *m, uint32_t segment, kvs_pin_t pin, const td_block_key_t *keys,
                      uint32_t count)
{
    td_msg_t msg = {.type = TD_MSG_PIN_ORDER};

    msg.u.blocks = (td_msg_blocks_t){.term = m->term,
                                     .mount = m->segments[segment].mount,
                                     .pin = pin,
                                     .count = count,
                                     .keys = keys};
    if (count > 0 && kvs_master_leads(m) &&
        td_bus_send(m->bus, m->segments[segment].id, &msg) != TD_OK) {
        TD_LOG_WARN("pins not sent", "segment=%s blocks=%u", m->segments[segment].id, count);
    }
}

/* --- eviction --------------------------------------------------------------------------------- */

void kvs_master_evict(kvs_master_t *m, uint32_t segment, uint32_t want)
{
    td_block_key_t keys[EVICT_KEYS_MAX];
    uint32_t count = EVICT_KEYS_MAX;

    if (!kvs_master_leads(m) || m->segments[segment].telling) {
        return; /* what lies there is known only in part */
    }
    for (uint32_t done = 0; done < want && count == EVICT_KEYS_MAX; done += count) {
        count = kvs_index_evict(m->index, segment, TD_MIN(want - done, EVICT_KEYS_MAX), td_now_ns(),
                                keys);
        (void)send_evict(m, segment, TD_MSG_EVICT_DEMOTE, keys, count);
        td_metric_add(m->evicted, count);
    }
}

static uint32_t fullest_segment(const kvs_master_t *m)
{
    uint32_t best = KVS_NONE;

    for (uint32_t i = 0; i < KVS_SEGMENTS_MAX; i++) {
        const kvs_share_t *share = &m->index->shares[i];
        if (share->mounted && (best == KVS_NONE || share->used > m->index->shares[best].used)) {
            best = i;
        }
    }
    return best;
}

void kvs_master_make_room(kvs_master_t *m, uint32_t segment, uint32_t blocks)
{
    const kvs_index_t *x = m->index;
    const kvs_share_t *share = &x->shares[segment];
    uint32_t want = blocks - TD_MIN(kvs_index_room(x, segment), blocks);

    if (kvs_index_is_full(x, segment)) {
        want = TD_MAX(want, TD_MAX(share->block_count * x->policy.evict_percent / 100, 1u));
    }
    kvs_master_evict(m, segment, TD_MIN(want, share->block_count));
    /* The index may be the smaller one: then whoever holds most gives way. */
    if ((uint64_t)(x->keys_max - x->free_entry_count) * 100 >=
            (uint64_t)x->keys_max * x->policy.evict_from_percent ||
        x->free_replica_count == 0) {
        kvs_master_evict(m, fullest_segment(m),
                         TD_MAX(x->keys_max * x->policy.evict_percent / 100, 1u));
    }
}

/* --- segments and writers --------------------------------------------------------------------- */

/* So that it says what it holds, in memory and in its cold tier. Told again until it does: it may
 * not know us yet, or know an earlier life of ours. */
static void tell_mounted(kvs_master_t *m, kvs_segment_info_t *s)
{
    td_msg_t msg = {.type = TD_MSG_MOUNT};

    msg.u.blocks.term = m->term;
    msg.u.blocks.mount = s->mount;
    s->talked_ns = td_now_ns();
    if (!kvs_master_leads(m) || td_bus_send(m->bus, s->id, &msg) != TD_OK) {
        TD_LOG_DEBUG("mounting not told", "segment=%s", s->id);
    }
}

/* Nothing is known of what the segment holds, from now on. */
static void begin_mounting(kvs_master_t *m, kvs_segment_info_t *s)
{
    s->mount = td_random_u64();
    s->mounted_ns = td_now_ns();
    s->telling = true;
    s->heard = false;
    s->must_mount = false;
    s->taken_count = 0;
    TD_LOG_INFO("segment mounted", "segment=%s blocks=%u", s->id,
                m->index->shares[s - m->segments].block_count);
    tell_mounted(m, s);
}

void kvs_master_segment_up(kvs_master_t *m, const char *id, uint64_t incarnation,
                           uint32_t block_count)
{
    uint32_t at = kvs_index_mount(m->index, block_count);
    kvs_segment_info_t *s = NULL;

    if (at == KVS_NONE) {
        TD_LOG_WARN("segment not mounted", "segment=%s limit=%u", id, KVS_SEGMENTS_MAX);
        return;
    }
    s = &m->segments[at];
    *s = (kvs_segment_info_t){.incarnation = incarnation};
    memcpy(s->id, id, TD_MIN(strlen(id), (size_t)TD_MSG_ID_CHARS_MAX));
    begin_mounting(m, s);
}

static void segment_forget(kvs_master_t *m, uint32_t segment)
{
    for (uint32_t i = 0; i < KVS_ORDERS_MAX; i++) {
        if (m->orders[i].id != 0 && m->orders[i].segment == segment) {
            kvs_order_revoke(m, &m->orders[i], true);
        }
    }
    kvs_index_forget(m->index, segment);
    kvs_cold_forget(m->cold, segment);
    kvs_master_count_keys(m);
}

static void segment_down(kvs_master_t *m, uint32_t segment)
{
    segment_forget(m, segment);
    kvs_index_unmount(m->index, segment);
    m->segments[segment] = (kvs_segment_info_t){0};
}

/* --- leadership ------------------------------------------------------------------------------- */

void kvs_master_lead(kvs_master_t *m, uint64_t term)
{
    m->term = term;
    m->index->events = NULL; /* routers are told of it in one word */
    for (uint32_t i = 0; i < KVS_SEGMENTS_MAX; i++) {
        if (m->segments[i].id[0] != '\0') {
            segment_forget(m, i);
            begin_mounting(m, &m->segments[i]);
        }
    }
    m->index->events = m->events;
    TD_ASSERT(m->index->readable == 0);
    td_kv_events_cleared(m->events);
}

void kvs_master_follow(kvs_master_t *m)
{
    m->term = 0;
    for (uint32_t i = 0; i < KVS_ORDERS_MAX; i++) {
        if (m->orders[i].id != 0) {
            /* The writers' pins end. Segments give such orders up when the next leader mounts
             * them. */
            kvs_order_revoke(m, &m->orders[i], true);
        }
    }
    kvs_master_look_at_held(m, td_now_ns());
}

static void mount_all_again(kvs_master_t *m)
{
    for (uint32_t i = 0; i < KVS_SEGMENTS_MAX; i++) {
        m->segments[i].must_mount = m->segments[i].id[0] != '\0';
    }
}

static uint32_t count_telling(const kvs_master_t *m)
{
    uint32_t count = 0;

    for (uint32_t i = 0; i < KVS_SEGMENTS_MAX; i++) {
        count += m->segments[i].id[0] != '\0' && m->segments[i].telling;
    }
    return count;
}

bool kvs_master_is_complete(const kvs_master_t *m)
{
    return count_telling(m) == 0;
}

/* KVS_NONE: no segment has this id and life. */
static uint32_t find_segment(const kvs_master_t *m, const char *id, uint64_t incarnation)
{
    uint32_t i = 0;

    while (i < KVS_SEGMENTS_MAX &&
           (m->segments[i].incarnation != incarnation || strcmp(m->segments[i].id, id) != 0)) {
        i++;
    }
    return i < KVS_SEGMENTS_MAX ? i : KVS_NONE;
}

void kvs_master_peer_down(kvs_master_t *m, const char *id, uint64_t incarnation)
{
    const uint32_t segment = find_segment(m, id, incarnation);

    if (segment != KVS_NONE) {
        segment_down(m, segment);
    }
    for (uint32_t i = 0; i < KVS_ORDERS_MAX; i++) {
        if (m->orders[i].id != 0 && m->orders[i].writer_incarnation == incarnation) {
            TD_LOG_INFO("put revoked", "writer=%s why=\"writer gone\"", id);
            kvs_order_revoke(m, &m->orders[i], false);
        }
    }
}

/* --- puts ------------------------------------------------------------------------------------- */

/* One PutStart, while it is handled: an order for each segment that shall have its keys. */
typedef struct put {
    const td_msg_t *msg;
    uint32_t segment_count;
    uint32_t segments[KVS_REPLICAS_MAX];
    kvs_order_t *orders[KVS_REPLICAS_MAX];
    uint32_t taken[KVS_REPLICAS_MAX]; /* keys of each order */
    uint32_t *of[KVS_REPLICAS_MAX];   /* which of the message's keys; [count] */
} put_t;

/* What PutStart says of one key; TD_OK: at least one segment takes it. */
static td_status_t put_one(kvs_master_t *m, put_t *put, uint32_t key)
{
    const td_block_key_t *name = &put->msg->u.blocks.keys[key];
    const kvs_entry_t *e = kvs_index_find(m->index, name);
    td_status_t status = TD_ERR_BUSY;

    if (e != NULL) {
        return e->ready > 0 ? TD_ERR_EXISTS : TD_INPROGRESS;
    }
    for (uint32_t s = 0; s < put->segment_count; s++) {
        kvs_order_t *order = put->orders[s];
        if (kvs_index_begin(m->index, name, put->segments[s], (uint32_t)(order - m->orders),
                            &order->storing) == TD_OK) {
            put->of[s][put->taken[s]++] = key;
            status = TD_OK;
        }
    }
    return status;
}

/* Keys that are neither there nor under way: only they take room. */
static uint32_t put_new_keys(const kvs_master_t *m, const put_t *put)
{
    const td_msg_blocks_t *b = &put->msg->u.blocks;
    uint32_t count = 0;

    for (uint32_t i = 0; i < b->count; i++) {
        count += kvs_index_find(m->index, &b->keys[i]) == NULL;
    }
    return count;
}

/* The emptiest first, which evicts what it lacks: a full one that were left out would stay full
 * for ever. */
static void put_choose(kvs_master_t *m, put_t *put)
{
    const uint32_t blocks = put_new_keys(m, put);
    uint32_t chosen[KVS_REPLICAS_MAX];
    uint32_t count = kvs_index_choose(m->index, KVS_REPLICAS_MAX, KVS_NONE, chosen);

    for (uint32_t s = 0; s < count && put->segment_count < m->index->policy.replicas; s++) {
        kvs_order_t *order = NULL;
        kvs_master_make_room(m, chosen[s], blocks);
        if (kvs_index_room(m->index, chosen[s]) == 0) {
            continue; /* all of it is read or pinned */
        }
        order = kvs_order_new(m, chosen[s], put->msg->sender_id, put->msg->sender_incarnation);
        if (order != NULL) {
            order->writer_request = put->msg->u.blocks.request;
            put->segments[put->segment_count] = chosen[s];
            put->orders[put->segment_count++] = order;
        }
    }
}

/* Sends the orders; a segment that cannot be told is as if it had not been chosen. */
static void put_order(kvs_master_t *m, const put_t *put, uint32_t s, td_block_key_t *keys,
                      uint32_t *blocks, uint64_t *numbers)
{
    const td_msg_blocks_t *from = &put->msg->u.blocks;
    td_msg_t msg = {.type = TD_MSG_STORE_ORDER};

    for (uint32_t i = 0; i < put->taken[s]; i++) {
        const uint32_t key = put->of[s][i];
        keys[i] = from->keys[key];
        blocks[i] = from->blocks[key];
        numbers[i] = from->epochs[key];
        numbers[from->count + i] = from->checksums[key];
    }
    msg.u.blocks = (td_msg_blocks_t){.request = put->orders[s]->id,
                                     .term = m->term,
                                     .mount = m->segments[put->segments[s]].mount,
                                     .writer_id = put->msg->sender_id,
                                     .writer_incarnation = put->msg->sender_incarnation,
                                     .count = put->taken[s],
                                     .keys = keys,
                                     .blocks = blocks,
                                     .epochs = numbers,
                                     .checksums = numbers + from->count};
    if (put->taken[s] == 0) {
        order_free(m, put->orders[s]);
    } else if (!kvs_master_leads(m) ||
               td_bus_send(m->bus, m->segments[put->segments[s]].id, &msg) != TD_OK) {
        kvs_order_revoke(m, put->orders[s], true);
    }
}

static void handle_put_start(kvs_master_t *m, const td_msg_t *msg)
{
    const uint32_t count = msg->u.blocks.count;
    put_t put = {.msg = msg};
    td_block_key_t *keys = td_calloc(count, sizeof(*keys));
    uint64_t *numbers = td_calloc(2 * (size_t)count, sizeof(*numbers));
    uint32_t *blocks = td_calloc(count, sizeof(*blocks));
    td_status_t *refused = td_calloc(count, sizeof(*refused));
    uint32_t *of = td_calloc((size_t)count * KVS_REPLICAS_MAX, sizeof(*of));
    const bool leads = kvs_master_leads(m);
    uint32_t refusals = 0;

    if (keys == NULL || numbers == NULL || blocks == NULL || refused == NULL || of == NULL) {
        goto done; /* no answer: the writer's pins end at its deadline */
    }
    for (uint32_t s = 0; s < KVS_REPLICAS_MAX; s++) {
        put.of[s] = of + (size_t)s * count;
    }
    if (leads) {
        put_choose(m, &put);
    }
    for (uint32_t i = 0; i < count; i++) {
        td_status_t status = leads ? put_one(m, &put, i) : TD_ERR_BUSY;
        if (status != TD_OK) {
            keys[refusals] = msg->u.blocks.keys[i];
            refused[refusals++] = status;
        }
    }
    send_results(m, TD_MSG_PUT_RESULT, msg->sender_id, msg->u.blocks.request, keys, refused,
                 refusals);
    for (uint32_t s = 0; s < put.segment_count; s++) {
        put_order(m, &put, s, keys, blocks, numbers);
    }
    kvs_master_count_keys(m);
done:
    td_free(of);
    td_free(refused);
    td_free(blocks);
    td_free(numbers);
    td_free(keys);
}

/* The order that a segment reports on, or NULL: revoked meanwhile, and the segment has its evict
 * order already. */
static kvs_order_t *order_reported(kvs_master_t *m, const td_msg_t *msg)
{
    kvs_order_t *order = &m->orders[msg->u.blocks.request % KVS_ORDERS_MAX];

    if (order->id == 0 || order->id != msg->u.blocks.request || msg->u.blocks.term != m->term ||
        m->segments[order->segment].incarnation != msg->sender_incarnation) {
        return NULL;
    }
    return order;
}

static void one_done(kvs_master_t *m, kvs_order_t *order, const td_msg_blocks_t *done, uint32_t i)
{
    const kvs_entry_t *e = kvs_index_find(m->index, &done->keys[i]);
    kvs_replica_t *r = e != NULL ? kvs_index_on(m->index, e, order->segment) : NULL;

    if (r == NULL || r->state != KVS_STORING || r->order != (uint32_t)(order - m->orders)) {
        return;
    }
    if (done->statuses[i] == TD_OK) {
        kvs_index_stored(m->index, r, &order->storing, done->blocks[i], done->epochs[i],
                         done->checksums[i]);
        if (e->pin != KVS_PIN_NONE) { /* while it was on its way */
            send_pins(m, order->segment, e->pin, &done->keys[i], 1);
        }
        td_metric_add(order->is_promotion ? m->promoted
                      : order->is_copy    ? m->copied
                                          : m->stored,
                      1);
    } else {
        (void)kvs_index_drop(m->index, r, &order->storing);
        td_metric_add(m->revoked, has_writer(order));
    }
}

static void handle_store_done(kvs_master_t *m, const td_msg_t *msg)
{
    const td_msg_blocks_t *done = &msg->u.blocks;
    kvs_order_t *order = order_reported(m, msg);
    td_block_key_t *keys = NULL;
    td_status_t *statuses = NULL;
    uint32_t over = 0;

    if (order == NULL) {
        return;
    }
    keys = td_calloc(done->count, sizeof(*keys));
    statuses = td_calloc(done->count, sizeof(*statuses));
    /* Last to first: what is stored later counts as used later, and eviction begins at the leaves.
     */
    for (uint32_t i = done->count; i > 0; i--) {
        one_done(m, order, done, i - 1);
    }
    for (uint32_t i = 0; keys != NULL && statuses != NULL && i < done->count; i++) {
        keys[over] = done->keys[i];
        statuses[over] = done->statuses[i];
        over += put_is_over(m, &done->keys[i], &statuses[over]);
    }
    if (has_writer(order)) {
        send_results(m, TD_MSG_PUT_RESULT, order->writer_id, order->writer_request, keys, statuses,
                     over);
    }
    TD_FAULT_POINT("store_put_end");
    /* Without a result no key stays in progress for ever (F7). */
    kvs_order_revoke(m, order, false);
    kvs_master_look_at_held(m, td_now_ns());
    td_free(statuses);
    td_free(keys);
}

/* --- hot keys --------------------------------------------------------------------------------- */

/* Has one segment more fetch those of the keys that are read so often that it helps. They are
 * fetched from the segment that was named to the reader, which keeps them: they are leased. */
void kvs_master_copy_hot(kvs_master_t *m, const td_msg_lookup_result_t *found,
                         const td_block_key_t *keys, const uint32_t *segments)
{
    td_block_key_t names[KVS_COPY_BLOCKS_MAX];
    uint32_t blocks[KVS_COPY_BLOCKS_MAX];
    uint64_t numbers[2][KVS_COPY_BLOCKS_MAX];
    td_msg_t msg = {.type = TD_MSG_STORE_ORDER};
    uint32_t source = KVS_NONE;
    uint32_t dest = KVS_NONE;
    kvs_order_t *order = NULL;
    uint32_t count = 0;

    if (!kvs_master_leads(m)) {
        return;
    }
    for (uint32_t i = 0; i < found->count && count < KVS_COPY_BLOCKS_MAX; i++) {
        const kvs_entry_t *e = kvs_index_find(m->index, &keys[i]);
        if (e == NULL || !kvs_index_is_hot(m->index, e) ||
            (order != NULL && segments[i] != source)) {
            continue;
        }
        if (order == NULL) {
            source = segments[i];
            if (m->copies >= KVS_COPIES_MAX || kvs_index_choose(m->index, 1, source, &dest) == 0 ||
                kvs_index_is_full(m->index, dest)) {
                return; /* a copy never drives out what is there */
            }
            order = kvs_order_new(m, dest, m->segments[source].id, m->segments[source].incarnation);
            if (order == NULL) {
                return;
            }
            order->is_copy = true;
            m->copies++;
        }
        if (kvs_index_begin(m->index, &keys[i], dest, (uint32_t)(order - m->orders),
                            &order->storing) == TD_OK) {
            names[count] = keys[i];
            blocks[count] = found->blocks[i];
            numbers[0][count] = found->epochs[i];
            numbers[1][count++] = found->checksums[i];
        }
    }
    if (order == NULL) {
        return;
    }
    msg.u.blocks = (td_msg_blocks_t){.request = order->id,
                                     .term = m->term,
                                     .mount = m->segments[dest].mount,
                                     .writer_id = order->writer_id,
                                     .writer_incarnation = order->writer_incarnation,
                                     .count = count,
                                     .keys = names,
                                     .blocks = blocks,
                                     .epochs = numbers[0],
                                     .checksums = numbers[1]};
    if (count == 0 || !kvs_master_leads(m) ||
        td_bus_send(m->bus, m->segments[dest].id, &msg) != TD_OK) {
        kvs_order_revoke(m, order, true);
    }
}

static void drop_cooled(kvs_master_t *m)
{
    for (uint32_t i = 0; i < COOLED_MAX; i++) {
        td_block_key_t key;
        uint32_t segment = kvs_index_cool(m->index, COOL_LOOKS, td_now_ns(), &key);
        if (segment == KVS_NONE) {
            return;
        }
        (void)send_evict(m, segment, TD_MSG_EVICT_DROP, &key, 1);
        td_metric_add(m->cooled, 1);
    }
}

/* --- pins and removal ------------------------------------------------------------------------- */

static td_status_t remove_one(kvs_master_t *m, const td_block_key_t *key)
{
    kvs_entry_t *e = kvs_index_find(m->index, key);
    const uint32_t cold = kvs_cold_find(m->cold, key);
    bool left = e != NULL;
    bool sent = true;

    if (!kvs_master_leads(m) || !kvs_master_is_complete(m)) {
        return TD_ERR_BUSY; /* a segment may still tell of it */
    }
    if (e != NULL && e->storing > 0) {
        return TD_INPROGRESS;
    }
    if (e != NULL && e->lease_until_ns > td_now_ns()) {
        return TD_ERR_BUSY;
    }
    kvs_removed_add(m->removed, key, td_now_ns()); /* a segment that is away may have it, too */
    if (e == NULL && cold == KVS_NONE) {
        return TD_ERR_NOT_FOUND;
    }
    while (left) {
        kvs_replica_t *r = &m->index->replicas[e->first];
        const uint32_t segment = r->segment;
        left = kvs_index_drop(m->index, r, NULL);
        sent = send_evict(m, segment, TD_MSG_EVICT_REMOVE, key, 1) && sent;
    }
    if (cold != KVS_NONE) {
        kvs_cold_remove(m->cold, key, cold);
        sent = send_evict(m, cold, TD_MSG_EVICT_REMOVE, key, 1) && sent;
    }
    return sent ? TD_OK : TD_ERR_BUSY; /* it may come back when its segment is mounted again */
}

static td_status_t pin_one(kvs_master_t *m, const td_block_key_t *key, kvs_pin_t pin)
{
    kvs_entry_t *e = kvs_index_find(m->index, key);

    if (!kvs_master_leads(m) || (e == NULL && !kvs_master_is_complete(m))) {
        return TD_ERR_BUSY;
    }
    if (e == NULL) {
        return TD_ERR_NOT_FOUND;
    }
    kvs_index_pin(m->index, e, pin, td_now_ns());
    return TD_OK;
}

/* Tells every segment which of the keys that were pinned (or freed) it has. */
static void spread_pins(kvs_master_t *m, const td_msg_blocks_t *ask, const td_status_t *statuses)
{
    td_block_key_t *keys = td_calloc(ask->count, sizeof(*keys));

    for (uint32_t s = 0; keys != NULL && s < KVS_SEGMENTS_MAX; s++) {
        uint32_t count = 0;
        for (uint32_t i = 0; m->segments[s].id[0] != '\0' && i < ask->count; i++) {
            const kvs_entry_t *e =
                statuses[i] == TD_OK ? kvs_index_find(m->index, &ask->keys[i]) : NULL;
            const kvs_replica_t *r = e == NULL ? NULL : kvs_index_on(m->index, e, s);
            if (r != NULL && r->state == KVS_READY) {
                keys[count++] = ask->keys[i];
            }
        }
        send_pins(m, s, (kvs_pin_t)ask->pin, keys, count);
    }
    td_free(keys);
}

/* StorePin and StoreRemove: one answer for each key. */
static void handle_change(kvs_master_t *m, const td_msg_t *msg)
{
    const td_msg_blocks_t *ask = &msg->u.blocks;
    td_status_t *statuses = td_calloc(ask->count, sizeof(*statuses));

    if (statuses == NULL) {
        return; /* no answer: the asker's deadline */
    }
    for (uint32_t i = 0; i < ask->count; i++) {
        statuses[i] = msg->type == TD_MSG_STORE_REMOVE
                          ? remove_one(m, &ask->keys[i])
                          : pin_one(m, &ask->keys[i], (kvs_pin_t)ask->pin);
    }
    if (msg->type == TD_MSG_STORE_PIN) {
        spread_pins(m, ask, statuses);
    }
    send_results(m, TD_MSG_STORE_RESULT, msg->sender_id, ask->request, ask->keys, statuses,
                 ask->count);
    kvs_master_count_keys(m);
    td_free(statuses);
}

/* --- remembered answers ----------------------------------------------------------------------- */

static void handle_memo(kvs_master_t *m, const td_msg_t *msg)
{
    const td_msg_memo_t *ask = &msg->u.memo;
    td_msg_t found = {.type = TD_MSG_MEMO_FOUND, .u.memo = {.key = ask->key, .tag = ask->tag}};

    if (msg->type == TD_MSG_MEMO_PUT) {
        kvs_memo_put(m->memo, ask->key, ask->tokens, ask->count, td_now_ns());
        td_metric_set(m->memo_answers, kvs_memo_count(m->memo));
        td_metric_set(m->memo_bytes, kvs_memo_bytes(m->memo));
        return;
    }
    found.u.memo.tokens = kvs_memo_get(m->memo, ask->key, td_now_ns(), &found.u.memo.count);
    td_metric_add(found.u.memo.tokens != NULL ? m->memo_found : m->memo_missed, 1);
    if (found.u.memo.tokens != NULL && td_bus_send(m->bus, msg->sender_id, &found) != TD_OK) {
        TD_LOG_DEBUG("memo not sent", "to=%s", msg->sender_id);
    }
}

/* --- loop ------------------------------------------------------------------------------------- */

/* A segment whose words were lost on their way has to say again what it holds. */
static void note_gap(kvs_master_t *m, const td_msg_t *msg)
{
    const uint32_t segment =
        msg->gap ? find_segment(m, msg->sender_id, msg->sender_incarnation) : KVS_NONE;

    if (segment != KVS_NONE) {
        TD_LOG_WARN("messages lost on their way", "segment=%s", m->segments[segment].id);
        m->segments[segment].must_mount = true;
    }
}

bool kvs_master_handle(kvs_master_t *m, const td_msg_t *msg)
{
    note_gap(m, msg);
    switch (msg->type) {
    case TD_MSG_KV_REPLAY:
        return td_kv_feed_handle(m->feed, msg);
    case TD_MSG_PUT_START:
        handle_put_start(m, msg);
        return true;
    case TD_MSG_STORE_DONE:
        handle_store_done(m, msg);
        return true;
    case TD_MSG_LOOKUP:
        kvs_master_handle_lookup(m, msg);
        return true;
    case TD_MSG_STORE_MANIFEST:
        kvs_master_handle_manifest(m, msg);
        return true;
    case TD_MSG_STORE_PIN:
    case TD_MSG_STORE_REMOVE:
        handle_change(m, msg);
        return true;
    case TD_MSG_MEMO_PUT:
    case TD_MSG_MEMO_GET:
        handle_memo(m, msg);
        return true;
    default:
        return false;
    }
}

static void tick_segment(kvs_master_t *m, uint32_t segment, uint64_t now)
{
    kvs_segment_info_t *s = &m->segments[segment];
    const uint64_t silent_ms = s->telling ? (now - s->talked_ns) / TD_NS_PER_MS : 0;

    /* What was ordered away since may not have arrived either: then another mounting is due. */
    s->must_mount |=
        silent_ms >= (s->heard ? TOLD_IDLE_MS : TELL_AGAIN_MS) && (s->heard || s->taken_count > 0);
    if (s->must_mount) {
        segment_forget(m, segment);
        begin_mounting(m, s);
    } else if (silent_ms >= TELL_AGAIN_MS && !s->heard) {
        tell_mounted(m, s);
    }
}

/* Orders that are overdue, segments that must hear from us. While we do not lead that waits: a key
 * that is revoked here and not at its segment would be known to nobody. */
static void tick_orders(kvs_master_t *m, uint64_t now)
{
    for (uint32_t i = 0; i < KVS_ORDERS_MAX; i++) {
        if (m->orders[i].id != 0 && now >= m->orders[i].deadline_ns) {
            if (m->orders[i].is_promotion) {
                m->segments[m->orders[i].segment].slow_until_ns =
                    now + KVS_PROMOTE_PAUSE_MS * TD_NS_PER_MS;
                TD_LOG_WARN("cold tier too slow, not asked for a while", "segment=%s",
                            m->segments[m->orders[i].segment].id);
            } else {
                TD_LOG_WARN("put revoked", "writer=%s why=\"abandoned\"", m->orders[i].writer_id);
            }
            kvs_order_revoke(m, &m->orders[i], false);
        }
    }
    for (uint32_t i = 0; i < KVS_SEGMENTS_MAX; i++) {
        if (m->segments[i].id[0] != '\0') {
            tick_segment(m, i, now);
        }
    }
    drop_cooled(m);
}

void kvs_master_tick(kvs_master_t *m)
{
    const uint64_t now = td_now_ns();

    if (m->incarnation != td_bus_incarnation(m->bus)) {
        m->incarnation = td_bus_incarnation(m->bus);
        mount_all_again(m); /* declared dead, we were not listened to */
    }
    if (kvs_master_leads(m)) {
        tick_orders(m, now);
    }
    kvs_master_look_at_held(m, now);
    if (now - m->served_ns >= TD_NS_PER_S) {
        m->served_ns = now;
        kvs_index_forget_half_served(m->index);
    }
    td_metric_set(m->telling, kvs_master_leads(m) ? count_telling(m) : 0);
    kvs_master_count_keys(m);
}

void kvs_master_tell(kvs_master_t *m, const td_member_t *member)
{
    if (m->term != 0) { /* what a standby still knows is nobody's to be told */
        td_kv_feed_tick(m->feed, member, td_now_ns());
    }
}

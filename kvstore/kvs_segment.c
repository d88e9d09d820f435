#include "kvstore/kvs_segment.h"

#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/base/td_fault.h"
#include "common/base/td_log.h"
#include "common/node/td_verify.h"
#include "kvstore/kvs_segment_manifest.h"
#include "kvstore/kvs_segment_tier.h"

typedef struct store_order { /* one StoreOrder on its way into our blocks */
    uint64_t id;
    uint64_t term;
    char master[TD_MSG_ID_CHARS_MAX + 1];
    uint32_t count;
    td_block_key_t *keys;     /* owned, [count] */
    td_status_t *statuses;    /* owned */
    uint32_t *blocks;         /* owned; ours, TD_POOL_NONE = none taken */
    uint64_t *epochs;         /* owned; the writer's, then ours */
    uint64_t *checksums;      /* owned; the writer's, then ours */
    bool *dropped;            /* owned; evicted before it was here */
    td_fetch_piece_t *pieces; /* owned; of the blocks taken, in their order */
    uint64_t *hashes;         /* owned; of the pieces' blocks, once hashed */
    td_fetch_t fetch;
    td_verify_job_t verify;
    bool hashed;
    kvs_segment_t *segment;
    struct store_order *next;
} store_order_t;

struct kvs_segment {
    td_bus_t *bus;                    /* borrowed */
    td_transfer_t *transfer;          /* borrowed */
    td_pool_t *pool;                  /* owned */
    td_verify_t *verify;              /* owned: hashes what was fetched */
    kvs_segment_tier_t *cold;         /* owned; NULL: no cold tier */
    kvs_segment_manifest_t *manifest; /* owned */
    td_ring_t *inbox;                 /* owned: store_order_t that were fetched or hashed */
    uint64_t term;                    /* the newest seen: orders of an older leader are refused */
    uint64_t mount; /* of that leader: another one knows nothing of what is stored */
    uint32_t fetching;
    uint32_t waiting_count;
    store_order_t *active;  /* list: being fetched or hashed */
    store_order_t *waiting; /* list, oldest first */
    td_metric_t *states[5];
    td_metric_t *corrupt;
    td_metric_t *refused;
};

td_status_t kvs_segment_create(td_bus_t *bus, td_transfer_t *transfer, td_metrics_t *metrics,
                               uint32_t block_count, size_t block_bytes, kvs_segment_t **out)
{
    static const char *const labels[] = {"state=\"free\"", "state=\"reserved\"", "state=\"cached\"",
                                         "state=\"active\"", "state=\"quarantined\""};
    kvs_segment_t *s = td_calloc(1, sizeof(*s));
    td_status_t status = TD_ERR_NO_MEMORY;

    if (s == NULL) {
        return status;
    }
    s->bus = bus;
    s->transfer = transfer;
    status = td_ring_create(KVS_FETCHES_MAX + 1, &s->inbox);
    if (status == TD_OK) {
        status = td_verify_create(KVS_FETCHES_MAX + 1, block_bytes, &s->verify);
    }
    if (status == TD_OK) {
        status = td_pool_create(td_transfer_memory(transfer), block_count, block_bytes, &s->pool);
    }
    if (status == TD_OK) {
        status = kvs_segment_manifest_create(bus, s->pool, &s->manifest);
    }
    if (status != TD_OK) {
        kvs_segment_destroy(s);
        return status;
    }
    td_transfer_set_pool(transfer, s->pool);
    for (uint32_t i = 0; i < TD_ARRAY_LEN(labels); i++) {
        s->states[i] = td_metrics_gauge(metrics, "tandem_kvstore_kv_blocks", labels[i],
                                        "blocks of the segment by state");
    }
    s->corrupt = td_metrics_counter(metrics, "tandem_kvstore_checksum_failures_total", NULL,
                                    "fetched blocks whose bytes were not the named ones");
    s->refused = td_metrics_counter(metrics, "tandem_kvstore_old_orders_refused_total", NULL,
                                    "orders of a leader whose term is over");
    *out = s;
    return TD_OK;
}

td_status_t kvs_segment_open_tier(kvs_segment_t *s, const kvs_tier_config_t *config)
{
    return kvs_segment_tier_create(s->bus, s->pool, s->manifest, config, &s->cold);
}

static void order_free(store_order_t *o)
{
    if (o != NULL) {
        td_free(o->keys);
        td_free(o->statuses);
        td_free(o->blocks);
        td_free(o->epochs);
        td_free(o->checksums);
        td_free(o->dropped);
        td_free(o->pieces);
        td_free(o->hashes);
        td_free(o);
    }
}

void kvs_segment_destroy(kvs_segment_t *s)
{
    void *item = NULL;
    if (s == NULL) {
        return;
    }
    kvs_segment_tier_destroy(s->cold);
    td_verify_destroy(s->verify); /* nobody reads the orders' blocks any more */
    while (s->active != NULL) {
        store_order_t *next = s->active->next;
        order_free(s->active);
        s->active = next;
    }
    while (s->waiting != NULL) {
        store_order_t *next = s->waiting->next;
        order_free(s->waiting);
        s->waiting = next;
    }
    while (s->inbox != NULL && td_ring_pop(s->inbox, &item)) {
    }
    td_ring_destroy(s->inbox);
    for (uint32_t i = 0; s->pool != NULL && i < td_pool_counts(s->pool).total; i++) {
        if (td_pool_is_indexed(s->pool, i)) {
            td_pool_unindex(s->pool, i);
            td_pool_unref(s->pool, i);
        }
    }
    kvs_segment_manifest_destroy(s->manifest);
    td_pool_destroy(s->pool);
    td_free(s);
}

uint32_t kvs_segment_blocks(const kvs_segment_t *s)
{
    return td_pool_counts(s->pool).total;
}

uint32_t kvs_segment_free_blocks(const kvs_segment_t *s)
{
    return td_pool_counts(s->pool).free;
}

static void on_fetched(td_fetch_t *fetch)
{
    store_order_t *o = fetch->ctx;
    /* The inbox has room for every fetch that may be under way. */
    TD_ASSERT(td_ring_push(o->segment->inbox, o) == TD_OK);
}

static void on_hashed(td_verify_job_t *verify)
{
    store_order_t *o = verify->ctx;
    o->hashed = verify->status == TD_OK;
    TD_ASSERT(td_ring_push(o->segment->inbox, o) == TD_OK);
}

static void send_done(kvs_segment_t *s, const store_order_t *o)
{
    td_msg_t msg = {.type = TD_MSG_STORE_DONE};
    msg.u.blocks = (td_msg_blocks_t){.request = o->id,
                                     .term = o->term,
                                     .count = o->count,
                                     .keys = o->keys,
                                     .statuses = o->statuses,
                                     .blocks = o->blocks,
                                     .epochs = o->epochs,
                                     .checksums = o->checksums};
    if (td_bus_send(s->bus, o->master, &msg) != TD_OK) {
        TD_LOG_WARN("store result not sent", "master=%s", o->master);
    }
}

/* What waits for the disk gives way to what comes. */
static td_status_t block_take(kvs_segment_t *s, uint32_t *idx_out)
{
    td_status_t status = td_pool_take(s->pool, idx_out);

    while (status == TD_ERR_BUSY && s->cold != NULL && kvs_segment_tier_yield(s->cold)) {
        status = td_pool_take(s->pool, idx_out);
    }
    return status;
}

static void block_drop(kvs_segment_t *s, uint32_t idx)
{
    td_pool_unindex(s->pool, idx);
    td_pool_unref(s->pool, idx); /* stored blocks hold one reference; the epoch moves on */
}

/* Is the block that is kept under a key the one that the order names? It should be: a key names its
 * content. Where not, a removal was lost on its way to us, and what is offered now counts. */
static bool is_named(const kvs_segment_t *s, uint32_t idx, const store_order_t *o, uint32_t i)
{
    return td_block_checksum(td_pool_content_hash(s->pool, idx), &o->keys[i], o->epochs[i]) ==
           o->checksums[i];
}

/* Takes blocks for what is new and lists the pieces to fetch. */
static uint32_t order_prepare(kvs_segment_t *s, store_order_t *o)
{
    uint32_t pieces = 0;
    size_t block_bytes = td_pool_block_bytes(s->pool);

    for (uint32_t i = 0; i < o->count; i++) {
        uint32_t idx = td_pool_find(s->pool, &o->keys[i]);
        o->blocks[i] = TD_POOL_NONE;
        if (o->dropped[i]) {
            o->statuses[i] = TD_ERR_CANCELLED; /* while it waited */
            continue;
        }
        if (idx != TD_POOL_NONE && is_named(s, idx, o, i)) {
            o->statuses[i] =
                TD_ERR_EXISTS; /* kept under an older order: told with its place below */
            continue;
        }
        if (idx != TD_POOL_NONE) {
            block_drop(s, idx);
        }
        o->statuses[i] = block_take(s, &o->blocks[i]);
        if (o->statuses[i] != TD_OK) {
            o->blocks[i] = TD_POOL_NONE;
            continue;
        }
        o->pieces[pieces++] = (td_fetch_piece_t){.epoch = o->epochs[i],
                                                 .block = o->pieces[i].block,
                                                 .bytes = (uint32_t)block_bytes,
                                                 .dest = td_pool_bytes(s->pool, o->blocks[i])};
    }
    return pieces;
}

/* Makes a block readable, unless another order was faster. *idx: where it is. */
static td_status_t keep_fetched(kvs_segment_t *s, const store_order_t *o, uint32_t i, uint64_t hash,
                                uint32_t *idx)
{
    const uint32_t other = td_pool_find(s->pool, &o->keys[i]);

    if (other != TD_POOL_NONE && is_named(s, other, o, i)) {
        td_pool_unref(s->pool, *idx);
        *idx = other;
        return TD_OK;
    }
    if (other != TD_POOL_NONE) {
        block_drop(s, other);
    }
    return td_pool_index(s->pool, *idx, &o->keys[i], hash);
}

/* Compares what came with its checksums and makes it readable, or gives its space back at once. */
static void order_finish(kvs_segment_t *s, store_order_t *o, td_status_t fetched)
{
    uint32_t pieces = 0; /* of the blocks passed so far */

    TD_FAULT_POINT("segment_fetched");
    for (uint32_t i = 0; i < o->count; i++) {
        uint32_t idx = o->blocks[i];
        if (o->statuses[i] == TD_ERR_EXISTS) {
            idx = td_pool_find(s->pool, &o->keys[i]);
            o->statuses[i] = idx == TD_POOL_NONE ? TD_ERR_BUSY : TD_OK;
        } else if (o->statuses[i] == TD_OK) {
            uint64_t hash = o->hashes[pieces++];
            if (fetched != TD_OK || o->dropped[i]) {
                o->statuses[i] = fetched != TD_OK ? fetched : TD_ERR_CANCELLED;
            } else if (td_block_checksum(hash, &o->keys[i], o->epochs[i]) != o->checksums[i]) {
                td_metric_add(s->corrupt, 1);
                o->statuses[i] = TD_ERR_CORRUPT;
            } else {
                o->statuses[i] = keep_fetched(s, o, i, hash, &idx);
            }
            if (o->statuses[i] != TD_OK) {
                td_pool_unref(s->pool, idx);
            }
        }
        if (o->statuses[i] == TD_OK) {
            o->blocks[i] = idx;
            o->epochs[i] = td_pool_epoch(s->pool, idx);
            o->checksums[i] =
                td_block_checksum(td_pool_content_hash(s->pool, idx), &o->keys[i], o->epochs[i]);
        } else {
            o->blocks[i] = 0;
        }
    }
    for (uint32_t i = o->count; i > 0; i--) {
        if (o->statuses[i - 1] == TD_OK) {
            kvs_segment_manifest_stored(s->manifest, o->blocks[i - 1]);
        }
    }
    send_done(s, o);
    order_free(o);
}

static void order_start(kvs_segment_t *s, store_order_t *o)
{
    uint32_t pieces = order_prepare(s, o);

    if (pieces == 0) {
        order_finish(s, o, TD_OK);
        return;
    }
    o->fetch.silence_ns = TD_TRANSFER_DEADLINE_MS * TD_NS_PER_MS;
    o->fetch.deadline_ns = td_now_ns() + o->fetch.silence_ns;
    o->fetch.complete = on_fetched;
    o->fetch.ctx = o;
    o->fetch.pieces = o->pieces;
    o->fetch.piece_count = pieces;
    if (td_transfer_fetch(s->transfer, &o->fetch) != TD_OK) {
        order_finish(s, o, TD_ERR_BUSY);
        return;
    }
    o->next = s->active;
    s->active = o;
    s->fetching++;
    TD_FAULT_POINT("segment_fetching");
}

static void start_waiting(kvs_segment_t *s)
{
    while (s->waiting != NULL && s->fetching < KVS_FETCHES_MAX) {
        store_order_t *o = s->waiting;
        s->waiting = o->next;
        s->waiting_count--;
        o->next = NULL;
        order_start(s, o);
    }
}

static store_order_t *order_new(kvs_segment_t *s, const td_msg_t *msg)
{
    const td_msg_blocks_t *m = &msg->u.blocks;
    store_order_t *o = td_calloc(1, sizeof(*o));

    if (o == NULL) {
        return NULL;
    }
    o->segment = s;
    o->id = m->request;
    o->term = m->term;
    o->count = m->count;
    o->fetch.peer = m->writer_incarnation;
    memcpy(o->master, msg->sender_id, strlen(msg->sender_id));
    o->keys = td_calloc(m->count, sizeof(*o->keys));
    o->statuses = td_calloc(m->count, sizeof(*o->statuses));
    o->blocks = td_calloc(m->count, sizeof(*o->blocks));
    o->epochs = td_calloc(m->count, sizeof(*o->epochs));
    o->checksums = td_calloc(m->count, sizeof(*o->checksums));
    o->dropped = td_calloc(m->count, sizeof(*o->dropped));
    o->pieces = td_calloc(m->count, sizeof(*o->pieces));
    o->hashes = td_calloc(m->count, sizeof(*o->hashes));
    if (o->keys == NULL || o->statuses == NULL || o->blocks == NULL || o->epochs == NULL ||
        o->checksums == NULL || o->dropped == NULL || o->pieces == NULL || o->hashes == NULL) {
        order_free(o);
        return NULL;
    }
    memcpy(o->keys, m->keys, m->count * sizeof(*o->keys));
    memcpy(o->epochs, m->epochs, m->count * sizeof(*o->epochs));
    memcpy(o->checksums, m->checksums, m->count * sizeof(*o->checksums));
    for (uint32_t i = 0; i < m->count; i++) {
        o->pieces[i].block = m->blocks[i]; /* kept here until order_prepare() */
    }
    return o;
}

/* key NULL: all. */
static void order_drop(store_order_t *o, const td_block_key_t *key)
{
    for (uint32_t i = 0; i < o->count; i++) {
        if (key == NULL || td_block_key_equal(&o->keys[i], key)) {
            o->dropped[i] = true;
        }
    }
}

static bool order_is_dropped(const store_order_t *o)
{
    uint32_t i = 0;

    while (i < o->count && (o->dropped[i] || o->statuses[i] != TD_OK)) {
        i++;
    }
    return i == o->count;
}

static void orders_drop(kvs_segment_t *s, const td_block_key_t *key)
{
    for (store_order_t *o = s->waiting; o != NULL; o = o->next) {
        order_drop(o, key);
    }
    for (store_order_t *o = s->active; o != NULL; o = o->next) {
        const bool was_dropped = order_is_dropped(o);
        order_drop(o, key);
        if (!was_dropped && order_is_dropped(o)) {
            /* Nobody wants what comes, and over a slow link it would keep blocks for minutes. */
            td_transfer_cancel(s->transfer, o->fetch.id);
        }
    }
}

/* Gives up a block for space: to the cold tier, if there is one. */
static void block_demote(kvs_segment_t *s, uint32_t idx)
{
    if (s->cold != NULL) {
        kvs_segment_tier_demote(s->cold, idx);
    } else {
        block_drop(s, idx);
    }
}

/* Is an order of the leader? With its first one after it has mounted us (again) it knows nothing of
 * what is stored: all that is readable is told, so that nothing stays here that nobody knows of.
 * What is on its way in is given up: nobody waits for it any more. */
static bool leader_accepted(kvs_segment_t *s, const td_msg_t *msg)
{
    const td_msg_blocks_t *m = &msg->u.blocks;

    if (m->term < s->term) {
        TD_LOG_WARN("order of an old leader refused", "type=%d from=%s term=%llu newest=%llu",
                    (int)msg->type, msg->sender_id, (unsigned long long)m->term,
                    (unsigned long long)s->term);
        td_metric_add(s->refused, 1);
        return false;
    }
    if (m->term != s->term || m->mount != s->mount) {
        orders_drop(s, NULL);
        s->term = m->term;
        s->mount = m->mount;
        kvs_segment_manifest_mounted(s->manifest, msg->sender_id, m->term, m->mount);
        if (s->cold != NULL) {
            kvs_segment_tier_cancel(s->cold, NULL);
            kvs_segment_tier_mounted(s->cold, msg->sender_id, m->term, m->mount);
        }
    }
    return true;
}

static void handle_store_order(kvs_segment_t *s, const td_msg_t *msg)
{
    store_order_t *o = NULL;
    store_order_t **link = &s->waiting;

    if (!leader_accepted(s, msg)) {
        return;
    }
    if (msg->u.blocks.count > TD_TRANSFER_PIECES_MAX || s->waiting_count >= KVS_WAITING_MAX) {
        return; /* the master revokes it at its deadline */
    }
    o = order_new(s, msg);
    if (o == NULL) {
        return;
    }
    if (s->fetching < KVS_FETCHES_MAX) {
        order_start(s, o);
        return;
    }
    while (*link != NULL) {
        link = &(*link)->next;
    }
    *link = o;
    s->waiting_count++;
}

static void drop_key(kvs_segment_t *s, const td_block_key_t *key, td_msg_evict_t how)
{
    uint32_t idx = td_pool_find(s->pool, key);

    orders_drop(s, key);
    if (s->cold != NULL) {
        kvs_segment_tier_cancel(s->cold, key);
    }
    if (idx != TD_POOL_NONE && how == TD_MSG_EVICT_DEMOTE) {
        block_demote(s, idx);
    } else if (idx != TD_POOL_NONE) {
        block_drop(s, idx);
    }
    if (s->cold != NULL && how == TD_MSG_EVICT_REMOVE) {
        kvs_segment_tier_remove(s->cold, key);
    }
}

static bool handle_order(kvs_segment_t *s, const td_msg_t *msg)
{
    if (msg->type == TD_MSG_STORE_ORDER) {
        handle_store_order(s, msg);
        return true;
    }
    if (msg->type == TD_MSG_EVICT_ORDER) {
        bool accepted = leader_accepted(s, msg);
        for (uint32_t i = 0; accepted && i < msg->u.blocks.count; i++) {
            drop_key(s, &msg->u.blocks.keys[i], (td_msg_evict_t)msg->u.blocks.how);
        }
        return true;
    }
    if (msg->type == TD_MSG_MOUNT) {
        (void)leader_accepted(s, msg);
        return true;
    }
    if (msg->type == TD_MSG_PIN_ORDER) {
        const bool accepted = leader_accepted(s, msg);
        for (uint32_t i = 0; accepted && i < msg->u.blocks.count; i++) {
            const uint32_t idx = td_pool_find(s->pool, &msg->u.blocks.keys[i]);
            if (idx != TD_POOL_NONE) {
                kvs_segment_manifest_pin(s->manifest, idx, msg->u.blocks.pin);
            }
        }
        return true;
    }
    if (msg->type == TD_MSG_PROMOTE_ORDER) {
        if (leader_accepted(s, msg) && s->cold != NULL) {
            kvs_segment_tier_promote(s->cold, msg);
        }
        return true;
    }
    return false;
}

bool kvs_segment_handle(kvs_segment_t *s, const td_msg_t *msg)
{
    const uint64_t mount = s->mount;

    if (!handle_order(s, msg)) {
        return false;
    }
    /* One that mounts us makes up for what was lost before it. */
    if (msg->gap && s->mount == mount && msg->u.blocks.mount == mount) {
        kvs_segment_manifest_lost(s->manifest);
    }
    return true;
}

int kvs_segment_fd(const kvs_segment_t *s)
{
    return td_ring_fd(s->inbox);
}

int kvs_segment_cold_fd(const kvs_segment_t *s)
{
    return s->cold == NULL ? -1 : kvs_segment_tier_fd(s->cold);
}

static void order_verify(kvs_segment_t *s, store_order_t *o)
{
    o->verify = (td_verify_job_t){.pieces = o->pieces,
                                  .piece_count = o->fetch.piece_count,
                                  .hashes = o->hashes,
                                  .complete = on_hashed,
                                  .ctx = o};
    td_verify_submit(s->verify, &o->verify);
}

void kvs_segment_completions(kvs_segment_t *s)
{
    void *item = NULL;

    td_ring_drain_fd(s->inbox);
    while (td_ring_pop(s->inbox, &item)) {
        store_order_t *o = item;
        store_order_t **link = &s->active;
        if (o->fetch.status == TD_OK && !o->hashed) {
            order_verify(s, o); /* it comes back; its blocks stay taken meanwhile */
            continue;
        }
        while (*link != o) {
            link = &(*link)->next;
        }
        *link = o->next;
        s->fetching--;
        order_finish(s, o, o->fetch.status);
    }
    start_waiting(s);
    if (s->cold != NULL) {
        kvs_segment_tier_turn(s->cold);
    }
    kvs_segment_manifest_turn(s->manifest);
}

uint32_t kvs_segment_wait_ms(const kvs_segment_t *s, uint32_t most_ms)
{
    return kvs_segment_manifest_is_telling(s->manifest) ? TD_MIN(most_ms, 1u) : most_ms;
}

void kvs_segment_tick(kvs_segment_t *s)
{
    td_pool_counts_t c = td_pool_counts(s->pool);
    uint32_t fetching = 0;

    for (const store_order_t *o = s->active; o != NULL; o = o->next) {
        for (uint32_t i = 0; i < o->count; i++) {
            fetching += o->blocks[i] != TD_POOL_NONE;
        }
    }
    /* Stored blocks hold a reference for the index, so that only the master's order evicts them; to
     * an onlooker they are cached, and active are those on their way in. */
    td_metric_set(s->states[0], c.free);
    td_metric_set(s->states[1], c.reserved);
    td_metric_set(s->states[2], c.cached + c.active - fetching);
    td_metric_set(s->states[3], fetching);
    td_metric_set(s->states[4], c.quarantined);
}

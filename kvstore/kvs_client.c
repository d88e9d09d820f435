#include "kvstore/kvs_client.h"

#include <stdio.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/base/td_fault.h"
#include "common/base/td_log.h"

typedef struct lookup {
    uint64_t request; /* 0 = slot free */
    uint64_t deadline_ns;
    uint64_t master; /* incarnation asked */
    uint32_t count;  /* keys asked for */
    kvs_lookup_fn on_done;
    void *ctx;
    uint64_t tag;
} lookup_t;

typedef struct put {
    uint64_t request; /* 0 = slot free; ascending with age */
    uint64_t sent_ns;
    uint64_t life; /* our incarnation then */
    uint64_t master;
    uint32_t count;
    uint32_t left;        /* blocks without an answer */
    uint32_t *blocks;     /* owned; pinned ones, TD_POOL_NONE once answered */
    td_block_key_t *keys; /* owned; as offered: a block may leave the index meanwhile */
} put_t;

struct kvs_client {
    td_bus_t *bus;             /* borrowed */
    const td_member_t *member; /* borrowed */
    td_pool_t *pool;           /* borrowed */
    uint64_t next_request;
    uint32_t pinned;
    uint64_t slow_master; /* incarnation that left a lookup without an answer in time; 0 = none */
    uint64_t probe;       /* the lookup by which it is tried whether it still is; 0 = none */
    uint64_t probe_ns;    /* when that was sent */
    lookup_t lookups[KVS_LOOKUPS_MAX];
    put_t puts[KVS_PUTS_MAX];
};

td_status_t kvs_client_create(td_bus_t *bus, const td_member_t *member, td_pool_t *pool,
                              kvs_client_t **out)
{
    kvs_client_t *c = td_calloc(1, sizeof(*c));
    if (c == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    c->bus = bus;
    c->member = member;
    c->pool = pool;
    *out = c;
    return TD_OK;
}

static void put_unpin(kvs_client_t *c, put_t *put, uint32_t at)
{
    if (put->blocks[at] != TD_POOL_NONE) {
        td_pool_unref(c->pool, put->blocks[at]);
        put->blocks[at] = TD_POOL_NONE;
        put->left--;
        c->pinned--;
    }
}

static void put_end(kvs_client_t *c, put_t *put)
{
    for (uint32_t i = put->count; i > 0; i--) {
        put_unpin(c, put, i - 1); /* last to first: eviction starts at the leaves */
    }
    td_free(put->blocks);
    td_free(put->keys);
    memset(put, 0, sizeof(*put));
}

void kvs_client_destroy(kvs_client_t *c)
{
    if (c == NULL) {
        return;
    }
    for (uint32_t i = 0; i < KVS_PUTS_MAX; i++) {
        if (c->puts[i].request != 0) {
            put_end(c, &c->puts[i]);
        }
    }
    td_free(c);
}

static td_status_t send_lookup(kvs_client_t *c, const char *master_id, const td_block_key_t *keys,
                               uint32_t count)
{
    td_msg_t msg = {.type = TD_MSG_LOOKUP};

    msg.u.blocks.request = ++c->next_request;
    msg.u.blocks.count = count;
    msg.u.blocks.keys = keys;
    return td_bus_send(c->bus, master_id, &msg);
}

/* Asks a slow master for a key that nobody has, now and then: nobody waits for the answer. */
static void probe(kvs_client_t *c, const td_member_peer_t *master, uint64_t now)
{
    static const td_block_key_t none;

    if (now - c->probe_ns >= KVS_PROBE_MS * TD_NS_PER_MS &&
        send_lookup(c, master->id, &none, 1) == TD_OK) {
        c->probe = c->next_request;
        c->probe_ns = now;
    }
}

/* Once it has answered in time, lookups wait for it again. */
static void handle_probe(kvs_client_t *c, const td_msg_t *msg)
{
    if (c->probe == 0 || msg->u.found.request != c->probe ||
        msg->sender_incarnation != c->slow_master) {
        return;
    }
    c->probe = 0;
    if (td_now_ns() - c->probe_ns < KVS_LOOKUP_MS * TD_NS_PER_MS) {
        TD_LOG_INFO("store answers in time again", "from=%s", msg->sender_id);
        c->slow_master = 0;
    }
}

td_status_t kvs_client_lookup(kvs_client_t *c, const td_block_key_t *keys, uint32_t count,
                              kvs_lookup_fn on_done, void *ctx, uint64_t tag)
{
    const td_member_peer_t *master = td_member_store_master(c->member);
    lookup_t *slot = NULL;

    TD_ASSERT(count > 0);
    if (master == NULL) {
        return TD_ERR_PEER_DEAD;
    }
    if (master->incarnation == c->slow_master) {
        return TD_ERR_TIMEOUT;
    }
    for (uint32_t i = 0; i < KVS_LOOKUPS_MAX && slot == NULL; i++) {
        slot = c->lookups[i].request == 0 ? &c->lookups[i] : NULL;
    }
    if (slot == NULL) {
        return TD_ERR_BUSY;
    }
    TD_TRY(send_lookup(c, master->id, keys, count));
    *slot = (lookup_t){.request = c->next_request,
                       .deadline_ns = td_now_ns() + KVS_LOOKUP_MS * TD_NS_PER_MS,
                       .master = master->incarnation,
                       .count = count,
                       .on_done = on_done,
                       .ctx = ctx,
                       .tag = tag};
    return TD_OK;
}

static void lookup_end(lookup_t *slot, td_status_t status, const td_msg_lookup_result_t *found)
{
    lookup_t done = *slot;
    memset(slot, 0, sizeof(*slot)); /* before the call, which may ask again */
    done.on_done(done.ctx, done.tag, status, found);
}

td_status_t kvs_client_put(kvs_client_t *c, const uint32_t *blocks, uint32_t count)
{
    const td_member_peer_t *master = td_member_store_master(c->member);
    put_t *slot = NULL;
    td_status_t status = TD_ERR_NO_MEMORY;
    td_block_key_t *keys = NULL;
    uint64_t *numbers = NULL;
    uint32_t *held = NULL;
    td_msg_t msg = {.type = TD_MSG_PUT_START};

    TD_ASSERT(count > 0 && count <= KVS_PUT_BLOCKS_MAX);
    if (master == NULL) {
        return TD_ERR_PEER_DEAD;
    }
    if (master->incarnation == c->slow_master) {
        return TD_ERR_TIMEOUT;
    }
    for (uint32_t i = 0; i < KVS_PUTS_MAX && slot == NULL; i++) {
        slot = c->puts[i].request == 0 ? &c->puts[i] : NULL;
    }
    if (slot == NULL) {
        return TD_ERR_BUSY;
    }
    keys = td_calloc(count, sizeof(*keys));
    numbers = td_calloc(2 * (size_t)count, sizeof(*numbers));
    held = td_calloc(count, sizeof(*held));
    if (keys == NULL || numbers == NULL || held == NULL) {
        goto err;
    }
    for (uint32_t i = 0; i < count; i++) {
        keys[i] = *td_pool_key(c->pool, blocks[i]);
        numbers[i] = td_pool_epoch(c->pool, blocks[i]);
        numbers[count + i] =
            td_block_checksum(td_pool_content_hash(c->pool, blocks[i]), &keys[i], numbers[i]);
        held[i] = blocks[i];
    }
    msg.u.blocks = (td_msg_blocks_t){.request = ++c->next_request,
                                     .count = count,
                                     .keys = keys,
                                     .blocks = held,
                                     .epochs = numbers,
                                     .checksums = numbers + count};
    status = td_bus_send(c->bus, master->id, &msg);
    if (status != TD_OK) {
        goto err;
    }
    TD_FAULT_POINT("store_put_start");
    for (uint32_t i = 0; i < count; i++) {
        td_pool_ref(c->pool, held[i]);
    }
    c->pinned += count;
    *slot = (put_t){.request = c->next_request,
                    .sent_ns = td_now_ns(),
                    .life = td_bus_incarnation(c->bus),
                    .master = master->incarnation,
                    .count = count,
                    .left = count,
                    .blocks = held,
                    .keys = keys};
    td_free(numbers);
    return TD_OK;

err:
    td_free(held);
    td_free(numbers);
    td_free(keys);
    return status;
}

static void handle_put_result(kvs_client_t *c, const td_msg_t *msg)
{
    for (uint32_t p = 0; p < KVS_PUTS_MAX; p++) {
        put_t *put = &c->puts[p];
        if (put->request == 0 || put->request != msg->u.blocks.request ||
            put->master != msg->sender_incarnation) {
            continue;
        }
        for (uint32_t i = 0; i < msg->u.blocks.count; i++) {
            for (uint32_t k = put->count; k > 0; k--) {
                if (put->blocks[k - 1] != TD_POOL_NONE &&
                    td_block_key_equal(&put->keys[k - 1], &msg->u.blocks.keys[i])) {
                    put_unpin(c, put, k - 1);
                    break;
                }
            }
        }
        if (put->left == 0) {
            put_end(c, put);
        }
        return;
    }
}

static void send_memo(kvs_client_t *c, td_msg_type_t type, const td_msg_memo_t *memo)
{
    const td_member_peer_t *master = td_member_store_master(c->member);
    td_msg_t msg = {.type = type};

    msg.u.memo = *memo;
    if (master != NULL && td_bus_send(c->bus, master->id, &msg) != TD_OK) {
        TD_LOG_DEBUG("memo not sent", "type=%d", (int)type);
    }
}

void kvs_client_memo_put(kvs_client_t *c, const td_block_key_t *key, const uint32_t *tokens,
                         uint32_t count)
{
    const td_msg_memo_t memo = {
        .key = key, .count = TD_MIN(count, TD_MSG_MEMO_TOKENS_MAX), .tokens = tokens};

    if (count > 0) {
        send_memo(c, TD_MSG_MEMO_PUT, &memo);
    }
}

void kvs_client_memo_get(kvs_client_t *c, const td_block_key_t *key, uint64_t tag)
{
    send_memo(c, TD_MSG_MEMO_GET, &(td_msg_memo_t){.key = key, .tag = tag});
}

bool kvs_client_handle(kvs_client_t *c, const td_msg_t *msg)
{
    if (msg->type == TD_MSG_PUT_RESULT) {
        handle_put_result(c, msg);
        return true;
    }
    if (msg->type != TD_MSG_LOOKUP_RESULT) {
        return false;
    }
    handle_probe(c, msg);
    for (uint32_t i = 0; i < KVS_LOOKUPS_MAX; i++) {
        lookup_t *slot = &c->lookups[i];
        if (slot->request != 0 && slot->request == msg->u.found.request &&
            slot->master == msg->sender_incarnation && msg->u.found.count <= slot->count) {
            bool hit = msg->u.found.status == TD_OK && msg->u.found.count > 0;
            lookup_end(slot, hit ? TD_OK : TD_ERR_NOT_FOUND, hit ? &msg->u.found : NULL);
            break;
        }
    }
    return true;
}

/* One lookup that was not answered in time says it of all: nobody waits longer. */
static void note_slow(kvs_client_t *c, uint64_t now)
{
    for (uint32_t i = 0; i < KVS_LOOKUPS_MAX; i++) {
        const lookup_t *slot = &c->lookups[i];
        if (slot->request != 0 && now >= slot->deadline_ns && slot->master != c->slow_master) {
            TD_LOG_WARN("store does not answer in time", "limit_ms=%u", KVS_LOOKUP_MS);
            c->slow_master = slot->master;
            c->probe_ns = 0; /* at once */
        }
    }
}

void kvs_client_tick(kvs_client_t *c)
{
    const td_member_peer_t *master = td_member_store_master(c->member);
    uint64_t alive = master != NULL ? master->incarnation : 0;
    uint64_t now = td_now_ns();

    note_slow(c, now);
    if (alive != 0 && alive == c->slow_master) {
        probe(c, master, now);
    }
    for (uint32_t i = 0; i < KVS_LOOKUPS_MAX; i++) {
        lookup_t *slot = &c->lookups[i];
        if (slot->request != 0 && (slot->master == c->slow_master || slot->master != alive)) {
            lookup_end(slot, slot->master != alive ? TD_ERR_PEER_DEAD : TD_ERR_TIMEOUT, NULL);
        }
    }
    for (uint32_t i = 0; i < KVS_PUTS_MAX; i++) {
        put_t *put = &c->puts[i];
        /* What a life offered that is over (fenced) the master has revoked; its word of that is for
         * nobody. */
        if (put->request != 0 &&
            (now - put->sent_ns >= KVS_PUT_MS * TD_NS_PER_MS || put->master != alive ||
             put->life != td_bus_incarnation(c->bus))) {
            TD_LOG_INFO("store offer given up", "blocks=%u master_alive=%d", put->left,
                        put->master == alive);
            put_end(c, put);
        }
    }
}

static bool drop_slow_offer(kvs_client_t *c)
{
    put_t *oldest = NULL;

    for (uint32_t i = 0; i < KVS_PUTS_MAX; i++) {
        put_t *put = &c->puts[i];
        if (put->request != 0 && (oldest == NULL || put->request < oldest->request)) {
            oldest = put;
        }
    }
    if (oldest == NULL || td_now_ns() - oldest->sent_ns < KVS_LOOKUP_MS * TD_NS_PER_MS) {
        return false;
    }
    TD_LOG_INFO("store offer given up", "blocks=%u why=blocks_needed", oldest->left);
    put_end(c, oldest);
    return true;
}

void kvs_client_make_room(kvs_client_t *c, uint32_t blocks)
{
    td_pool_counts_t counts = td_pool_counts(c->pool);

    while (counts.free + counts.cached < blocks && drop_slow_offer(c)) {
        counts = td_pool_counts(c->pool);
    }
}

uint32_t kvs_client_pinned(const kvs_client_t *c)
{
    return c->pinned;
}

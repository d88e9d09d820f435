#include "kvstore/kvs_segment_tier.h"

#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_fault.h"
#include "common/base/td_log.h"

#define SLOT_OF_TAG(tag) ((uint32_t)((tag) >> 32))
#define KEY_OF_TAG(tag) ((uint32_t)(tag))

typedef struct demotion { /* a block that waits to be written; we hold its reference */
    uint32_t idx;         /* TD_POOL_NONE: taken back */
    td_block_key_t key;
    uint64_t hash;
} demotion_t;

typedef struct promotion { /* one PromoteOrder */
    uint64_t id;           /* 0 = free */
    uint64_t term;
    char master[TD_MSG_ID_CHARS_MAX + 1];
    uint32_t count;
    uint32_t asked; /* keys the tier was asked for, or that need not be */
    uint32_t left;  /* keys without a result */
    td_block_key_t keys[KVS_PROMOTE_BLOCKS_MAX];
    td_status_t statuses[KVS_PROMOTE_BLOCKS_MAX];
    bool dropped[KVS_PROMOTE_BLOCKS_MAX];
} promotion_t;

struct kvs_segment_tier {
    td_bus_t *bus;                        /* borrowed */
    td_pool_t *pool;                      /* borrowed */
    kvs_segment_manifest_t *manifest;     /* borrowed */
    kvs_tier_t *tier;                     /* owned */
    char master[TD_MSG_ID_CHARS_MAX + 1]; /* "" = not mounted yet */
    uint64_t term;
    uint64_t mount;

    demotion_t *demotions; /* owned, ring [demotions_max]: as many as the pool has blocks */
    uint32_t demotions_max;
    uint32_t demotion_first;
    uint32_t demotion_count;

    promotion_t promotions[KVS_PROMOTIONS_MAX];
    uint32_t asking[KVS_PROMOTIONS_MAX]; /* ring: promotions with keys to ask for, in order */
    uint32_t asking_first;
    uint32_t asking_count;

    td_block_key_t removals[KVS_REMOVALS_MAX]; /* stack: the tier had no room for these yet */
    uint32_t removal_count;

    uint64_t life;    /* of the tier, when the listing began */
    bool list_wanted; /* from the beginning */
    bool listing;     /* a part is under way */
    bool list_first;  /* and it is the first */

    td_msg_manifest_t telling; /* what the keys below are */
    uint32_t tell_count;
    td_block_key_t tell_keys[TD_MSG_MANIFEST_KEYS_MAX];
    uint64_t tell_hashes[TD_MSG_MANIFEST_KEYS_MAX];
};

td_status_t kvs_segment_tier_create(td_bus_t *bus, td_pool_t *pool,
                                    kvs_segment_manifest_t *manifest,
                                    const kvs_tier_config_t *config, kvs_segment_tier_t **out)
{
    kvs_segment_tier_t *t = td_calloc(1, sizeof(*t));
    td_status_t status = TD_ERR_NO_MEMORY;

    if (t == NULL) {
        return status;
    }
    t->bus = bus;
    t->pool = pool;
    t->manifest = manifest;
    t->demotions_max = td_pool_counts(pool).total;
    t->demotions = td_calloc(t->demotions_max, sizeof(*t->demotions));
    if (t->demotions != NULL) {
        status = kvs_tier_create(config, &t->tier);
    }
    if (status != TD_OK) {
        td_free(t->demotions);
        td_free(t);
        return status;
    }
    *out = t;
    return TD_OK;
}

void kvs_segment_tier_destroy(kvs_segment_tier_t *t)
{
    if (t == NULL) {
        return;
    }
    while (kvs_segment_tier_yield(t)) {
    }
    kvs_tier_destroy(t->tier);
    td_free(t->demotions);
    td_free(t);
}

/* --- what the master is told ------------------------------------------------------------------ */

static bool tell(kvs_segment_tier_t *t, td_msg_manifest_t how, const td_block_key_t *keys,
                 const uint64_t *hashes, uint32_t count)
{
    td_msg_t msg = {.type = TD_MSG_STORE_MANIFEST};

    msg.u.blocks = (td_msg_blocks_t){.term = t->term,
                                     .mount = t->mount,
                                     .how = how,
                                     .count = count,
                                     .keys = keys,
                                     .checksums = hashes};
    if (td_bus_send(t->bus, t->master, &msg) != TD_OK) {
        TD_LOG_DEBUG("manifest not sent", "master=%s", t->master);
        return false;
    }
    return true;
}

static void tell_gathered(kvs_segment_tier_t *t)
{
    if (t->tell_count > 0 && !tell(t, t->telling, t->tell_keys, t->tell_hashes, t->tell_count)) {
        t->list_wanted = true; /* the master has missed something: all again */
    }
    t->tell_count = 0;
}

/* In the order in which it happened: a key may go and come in one turn. */
static void tell_later(kvs_segment_tier_t *t, td_msg_manifest_t how, const td_block_key_t *key,
                       uint64_t hash)
{
    if (t->master[0] == '\0') {
        return;
    }
    if (t->tell_count == TD_MSG_MANIFEST_KEYS_MAX || (t->tell_count > 0 && t->telling != how)) {
        tell_gathered(t);
    }
    t->telling = how;
    t->tell_keys[t->tell_count] = *key;
    t->tell_hashes[t->tell_count++] = hash;
}

void kvs_segment_tier_mounted(kvs_segment_tier_t *t, const char *master, uint64_t term,
                              uint64_t mount)
{
    t->tell_count = 0; /* of the mounting before */
    t->term = term;
    t->mount = mount;
    memset(t->master, 0, sizeof(t->master));
    memcpy(t->master, master, TD_MIN(strlen(master), (size_t)TD_MSG_ID_CHARS_MAX));
    t->list_wanted = true;
}

static void list_pump(kvs_segment_tier_t *t)
{
    if (kvs_tier_life(t->tier) != t->life) {
        t->life = kvs_tier_life(t->tier);
        t->list_wanted = true;
    }
    if (t->list_wanted && !t->listing && t->master[0] != '\0' && t->life > 0 &&
        kvs_tier_list(t->tier, 0) == TD_OK) {
        t->list_wanted = false;
        t->listing = true;
        t->list_first = true;
    }
}

static void on_listed(kvs_segment_tier_t *t, const kvs_tier_done_t *done)
{
    t->listing = false;
    if (t->list_wanted) { /* it is begun again: what this part says is of another mounting */
        return;
    }
    tell_gathered(t);
    if ((t->list_first || done->count > 0) &&
        !tell(t, t->list_first ? TD_MSG_MANIFEST_RESET : TD_MSG_MANIFEST_HERE, done->keys,
              done->hashes, done->count)) {
        t->list_wanted = true;
        return;
    }
    t->list_first = false;
    if (done->next != 0) {
        t->listing = kvs_tier_list(t->tier, done->next) == TD_OK;
        t->list_wanted = !t->listing;
    }
}

/* --- to the disk ------------------------------------------------------------------------------ */

/* The one that waits longest, or NULL. */
static demotion_t *demotion_next(kvs_segment_tier_t *t)
{
    while (t->demotion_count > 0 && t->demotions[t->demotion_first].idx == TD_POOL_NONE) {
        t->demotion_first = (t->demotion_first + 1) % t->demotions_max;
        t->demotion_count--;
    }
    return t->demotion_count > 0 ? &t->demotions[t->demotion_first] : NULL;
}

static void demotion_end(kvs_segment_tier_t *t, demotion_t *d)
{
    td_pool_unref(t->pool, d->idx);
    d->idx = TD_POOL_NONE;
}

bool kvs_segment_tier_yield(kvs_segment_tier_t *t)
{
    demotion_t *d = demotion_next(t);
    if (d == NULL) {
        return false;
    }
    kvs_tier_count_dropped(t->tier);
    demotion_end(t, d);
    return true;
}

/* Copies what the tier takes: as many as it has buffers, so a turn stays short. What a degraded
 * tier does not take waits until its room is needed, or the tier works again. */
static void demote_pump(kvs_segment_tier_t *t)
{
    demotion_t *d = NULL;

    while (kvs_tier_can_put(t->tier) && (d = demotion_next(t)) != NULL) {
        if (kvs_tier_put(t->tier, &d->key, d->hash, td_pool_bytes(t->pool, d->idx)) != TD_OK) {
            return;
        }
        demotion_end(t, d);
    }
}

void kvs_segment_tier_demote(kvs_segment_tier_t *t, uint32_t idx)
{
    demotion_t *d = &t->demotions[(t->demotion_first + t->demotion_count) % t->demotions_max];

    TD_ASSERT(t->demotion_count < t->demotions_max);
    *d = (demotion_t){
        .idx = idx, .key = *td_pool_key(t->pool, idx), .hash = td_pool_content_hash(t->pool, idx)};
    td_pool_unindex(t->pool, idx);
    t->demotion_count++;
    demote_pump(t); /* at once what can: a put follows, and takes the blocks that wait */
}

static void on_put(kvs_segment_tier_t *t, const kvs_tier_done_t *done)
{
    if (done->has_evicted) {
        tell_later(t, TD_MSG_MANIFEST_GONE, &done->evicted, 0);
    }
    if (done->status == TD_OK) {
        tell_later(t, TD_MSG_MANIFEST_HERE, &done->key, done->hash);
    }
}

/* --- removal ---------------------------------------------------------------------------------- */

void kvs_segment_tier_remove(kvs_segment_tier_t *t, const td_block_key_t *key)
{
    for (uint32_t i = 0; i < t->demotion_count; i++) {
        demotion_t *d = &t->demotions[(t->demotion_first + i) % t->demotions_max];
        if (d->idx != TD_POOL_NONE && td_block_key_equal(&d->key, key)) {
            demotion_end(t, d);
        }
    }
    if (kvs_tier_drop(t->tier, key) == TD_OK) {
        return;
    }
    if (t->removal_count == KVS_REMOVALS_MAX) {
        TD_LOG_WARN("a removed block stays in the cold tier", "waiting=%u", t->removal_count);
        return;
    }
    t->removals[t->removal_count++] = *key;
}

static void removal_pump(kvs_segment_tier_t *t)
{
    while (t->removal_count > 0 &&
           kvs_tier_drop(t->tier, &t->removals[t->removal_count - 1]) == TD_OK) {
        t->removal_count--;
    }
}

static void on_dropped(kvs_segment_tier_t *t, const kvs_tier_done_t *done)
{
    if (done->status == TD_OK) {
        tell_later(t, TD_MSG_MANIFEST_GONE, &done->key, 0);
    } else if (t->removal_count < KVS_REMOVALS_MAX) {
        t->removals[t->removal_count++] = done->key; /* the tier is closed: once it is open */
    }
}

/* --- from the disk ---------------------------------------------------------------------------- */

void kvs_segment_tier_promote(kvs_segment_tier_t *t, const td_msg_t *msg)
{
    const td_msg_blocks_t *m = &msg->u.blocks;
    uint32_t slot = 0;
    promotion_t *p = NULL;

    while (slot < KVS_PROMOTIONS_MAX && t->promotions[slot].id != 0) {
        slot++;
    }
    if (slot == KVS_PROMOTIONS_MAX || m->request == 0 || m->count > KVS_PROMOTE_BLOCKS_MAX) {
        return; /* the master revokes it at its deadline */
    }
    p = &t->promotions[slot];
    *p = (promotion_t){.id = m->request, .term = m->term, .count = m->count, .left = m->count};
    memcpy(p->master, msg->sender_id, TD_MIN(strlen(msg->sender_id), (size_t)TD_MSG_ID_CHARS_MAX));
    memcpy(p->keys, m->keys, m->count * sizeof(*p->keys));
    t->asking[(t->asking_first + t->asking_count++) % KVS_PROMOTIONS_MAX] = slot;
}

void kvs_segment_tier_cancel(kvs_segment_tier_t *t, const td_block_key_t *key)
{
    for (uint32_t slot = 0; slot < KVS_PROMOTIONS_MAX; slot++) {
        promotion_t *p = &t->promotions[slot];
        for (uint32_t i = 0; p->id != 0 && i < p->count; i++) {
            p->dropped[i] |= key == NULL || td_block_key_equal(&p->keys[i], key);
        }
    }
}

static void send_done(kvs_segment_tier_t *t, promotion_t *p)
{
    td_msg_t msg = {.type = TD_MSG_STORE_DONE};
    uint32_t blocks[KVS_PROMOTE_BLOCKS_MAX] = {0};
    uint64_t epochs[KVS_PROMOTE_BLOCKS_MAX] = {0};
    uint64_t checksums[KVS_PROMOTE_BLOCKS_MAX] = {0};

    for (uint32_t i = 0; i < p->count; i++) {
        uint32_t idx = p->statuses[i] == TD_OK ? td_pool_find(t->pool, &p->keys[i]) : TD_POOL_NONE;
        if (idx == TD_POOL_NONE) {
            p->statuses[i] = p->statuses[i] == TD_OK ? TD_ERR_BUSY : p->statuses[i];
            continue;
        }
        blocks[i] = idx;
        epochs[i] = td_pool_epoch(t->pool, idx);
        checksums[i] =
            td_block_checksum(td_pool_content_hash(t->pool, idx), &p->keys[i], epochs[i]);
    }
    msg.u.blocks = (td_msg_blocks_t){.request = p->id,
                                     .term = p->term,
                                     .count = p->count,
                                     .keys = p->keys,
                                     .statuses = p->statuses,
                                     .blocks = blocks,
                                     .epochs = epochs,
                                     .checksums = checksums};
    TD_FAULT_POINT("segment_promoted");
    if (td_bus_send(t->bus, p->master, &msg) != TD_OK) {
        TD_LOG_WARN("promotion result not sent", "master=%s", p->master);
    }
    p->id = 0;
}

static void resolve(kvs_segment_tier_t *t, promotion_t *p, uint32_t key, td_status_t status)
{
    p->statuses[key] = status;
    p->left--;
    if (p->left == 0) {
        send_done(t, p);
    }
}

static void promote_pump(kvs_segment_tier_t *t)
{
    while (t->asking_count > 0) {
        uint32_t slot = t->asking[t->asking_first];
        promotion_t *p = &t->promotions[slot];
        const uint32_t count = p->count;

        while (p->asked < count) {
            const uint32_t i = p->asked;
            if (!p->dropped[i] && td_pool_find(t->pool, &p->keys[i]) == TD_POOL_NONE) {
                if (kvs_tier_get(t->tier, &p->keys[i], (uint64_t)slot << 32 | i) != TD_OK) {
                    return; /* those before come first */
                }
                p->asked++;
                continue;
            }
            p->asked++;
            resolve(t, p, i, p->dropped[i] ? TD_ERR_CANCELLED : TD_OK);
        }
        t->asking_first = (t->asking_first + 1) % KVS_PROMOTIONS_MAX;
        t->asking_count--;
    }
}

/* The bytes were checked over the tier's copy, which is this one. */
static td_status_t keep(kvs_segment_tier_t *t, const kvs_tier_done_t *done)
{
    uint32_t idx = 0;
    td_status_t status = td_pool_take(t->pool, &idx);

    while (status == TD_ERR_BUSY && kvs_segment_tier_yield(t)) {
        status = td_pool_take(t->pool, &idx);
    }
    if (status != TD_OK) {
        return status;
    }
    memcpy(td_pool_bytes(t->pool, idx), done->bytes, td_pool_block_bytes(t->pool));
    status = td_pool_index(t->pool, idx, &done->key, done->hash);
    if (status != TD_OK) {
        td_pool_unref(t->pool, idx);
    } else {
        kvs_segment_manifest_stored(t->manifest, idx);
    }
    return status == TD_ERR_EXISTS ? TD_OK : status; /* stored by a writer meanwhile */
}

static void on_got(kvs_segment_tier_t *t, const kvs_tier_done_t *done)
{
    promotion_t *p = &t->promotions[SLOT_OF_TAG(done->tag)];
    uint32_t key = KEY_OF_TAG(done->tag);
    td_status_t status = done->status;

    if (status != TD_OK) {
        tell_later(t, TD_MSG_MANIFEST_GONE, &done->key, 0);
    } else {
        status = p->dropped[key] ? TD_ERR_CANCELLED : keep(t, done);
    }
    resolve(t, p, key, status);
}

/* --- loop ------------------------------------------------------------------------------------- */

int kvs_segment_tier_fd(const kvs_segment_tier_t *t)
{
    return kvs_tier_fd(t->tier);
}

void kvs_segment_tier_turn(kvs_segment_tier_t *t)
{
    const kvs_tier_done_t *done = NULL;

    while ((done = kvs_tier_next(t->tier)) != NULL) {
        switch (done->kind) {
        case KVS_TIER_PUT:
            on_put(t, done);
            break;
        case KVS_TIER_GET:
            on_got(t, done);
            break;
        case KVS_TIER_DROP:
            on_dropped(t, done);
            break;
        case KVS_TIER_LIST:
            on_listed(t, done);
            break;
        }
        kvs_tier_release(t->tier, done);
    }
    promote_pump(t);
    removal_pump(t);
    demote_pump(t);
    list_pump(t);
    tell_gathered(t);
}

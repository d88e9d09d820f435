#include "kvstore/kvs_index.h"

#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/base/td_log.h"

#define EVICT_LOOKS 4096u /* at entries of a list, for one eviction: leased ones cost time too */
#define WALK_LOOKS 65536u /* at entries, of one call */
#define COOL_SHARE 4u     /* a further replica goes when lookups are below 1/4 of what it needed */

kvs_policy_t kvs_policy_default(void)
{
    return (kvs_policy_t){.lease_ms = 10000,
                          .soft_pin_ms = 30 * 60 * 1000,
                          .put_abandoned_ms = 30000,
                          .evict_from_percent = 90,
                          .evict_percent = 5,
                          .replicas = 1,
                          .hot_replicas = 3,
                          .hot_hits = 16,
                          .hot_half_ms = 10000,
                          .promote_ms = 50,
                          .cold_keys_max = 1u << 20,
                          .memo_bytes = 16u << 20,
                          .memo_age_ms = 24 * 60 * 60 * 1000};
}

static td_status_t check_policy(uint32_t keys_max, const kvs_policy_t *p)
{
    const struct {
        const char *name;
        uint32_t value;
        uint32_t min;
        uint32_t max;
    } rules[] = {
        {"keys_max", keys_max, 1, KVS_KEYS_MAX},
        {"evict_from_percent", p->evict_from_percent, 1, 100},
        {"evict_percent", p->evict_percent, 1, 100},
        {"replicas", p->replicas, 1, KVS_REPLICAS_MAX},
        {"hot_replicas", p->hot_replicas, p->replicas, KVS_REPLICAS_MAX},
        {"hot_hits", p->hot_hits, 1, UINT32_MAX},
        {"hot_half_ms", p->hot_half_ms, 1, UINT32_MAX},
    };

    for (size_t i = 0; i < TD_ARRAY_LEN(rules); i++) {
        if (rules[i].value < rules[i].min || rules[i].value > rules[i].max) {
            TD_LOG_ERROR("store policy out of range", "%s=%u expected=%u..%u", rules[i].name,
                         rules[i].value, rules[i].min, rules[i].max);
            return TD_ERR_INVALID;
        }
    }
    return TD_OK;
}

td_status_t kvs_index_create(uint32_t keys_max, const kvs_policy_t *policy, kvs_index_t **out)
{
    kvs_index_t *x = NULL;

    TD_TRY(check_policy(keys_max, policy));
    x = td_calloc(1, sizeof(*x));
    if (x == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    x->policy = *policy;
    x->keys_max = keys_max;
    x->replicas_max = keys_max * policy->replicas + keys_max / 4; /* some keys are hot */
    x->entries = td_calloc_large(keys_max, sizeof(*x->entries));
    x->free_entries = td_calloc_large(keys_max, sizeof(*x->free_entries));
    x->replicas = td_calloc_large(x->replicas_max, sizeof(*x->replicas));
    x->free_replicas = td_calloc_large(x->replicas_max, sizeof(*x->free_replicas));
    if (x->entries == NULL || x->free_entries == NULL || x->replicas == NULL ||
        x->free_replicas == NULL ||
        td_key_index_init(&x->keys, keys_max, &x->entries[0].key, sizeof(*x->entries)) != TD_OK) {
        kvs_index_destroy(x);
        return TD_ERR_NO_MEMORY;
    }
    for (uint32_t i = 0; i < keys_max; i++) {
        x->entries[i].first = KVS_NONE;
        x->free_entries[i] = keys_max - 1 - i;
    }
    for (uint32_t i = 0; i < x->replicas_max; i++) {
        x->free_replicas[i] = x->replicas_max - 1 - i;
    }
    x->free_entry_count = keys_max;
    x->free_replica_count = x->replicas_max;
    *out = x;
    return TD_OK;
}

void kvs_index_destroy(kvs_index_t *x)
{
    if (x == NULL) {
        return;
    }
    td_free(x->entries);
    td_free(x->free_entries);
    td_free(x->replicas);
    td_free(x->free_replicas);
    td_key_index_fini(&x->keys);
    td_free(x);
}

/* --- lists ------------------------------------------------------------------------------------ */

static uint32_t replica_idx(const kvs_index_t *x, const kvs_replica_t *r)
{
    return (uint32_t)(r - x->replicas);
}

static void list_push(kvs_index_t *x, kvs_list_t *list, kvs_replica_t *r)
{
    r->prev_in_list = list->newest;
    r->next_in_list = KVS_NONE;
    if (list->newest != KVS_NONE) {
        x->replicas[list->newest].next_in_list = replica_idx(x, r);
    } else {
        list->oldest = replica_idx(x, r);
    }
    list->newest = replica_idx(x, r);
}

static void list_unlink(kvs_index_t *x, kvs_list_t *list, kvs_replica_t *r)
{
    if (r->prev_in_list != KVS_NONE) {
        x->replicas[r->prev_in_list].next_in_list = r->next_in_list;
    } else {
        list->oldest = r->next_in_list;
    }
    if (r->next_in_list != KVS_NONE) {
        x->replicas[r->next_in_list].prev_in_list = r->prev_in_list;
    } else {
        list->newest = r->prev_in_list;
    }
}

/* Of a readable replica. */
static kvs_list_t *list_of(kvs_index_t *x, const kvs_replica_t *r)
{
    return &x->shares[r->segment].lists[x->entries[r->entry].pin];
}

/* --- segments --------------------------------------------------------------------------------- */

uint32_t kvs_index_mount(kvs_index_t *x, uint32_t block_count)
{
    for (uint32_t i = 0; i < KVS_SEGMENTS_MAX; i++) {
        kvs_share_t *share = &x->shares[i];
        if (!share->mounted) {
            *share = (kvs_share_t){.mounted = true, .block_count = block_count};
            for (uint32_t pin = 0; pin < KVS_PIN_KINDS; pin++) {
                share->lists[pin] = KVS_LIST_EMPTY;
            }
            return i;
        }
    }
    return KVS_NONE;
}

void kvs_index_forget(kvs_index_t *x, uint32_t segment)
{
    kvs_share_t *share = &x->shares[segment];

    for (uint32_t pin = 0; pin < KVS_PIN_KINDS; pin++) {
        while (share->lists[pin].oldest != KVS_NONE) {
            (void)kvs_index_drop(x, &x->replicas[share->lists[pin].oldest], NULL);
        }
    }
    TD_ASSERT(share->used == 0);
}

void kvs_index_unmount(kvs_index_t *x, uint32_t segment)
{
    kvs_index_forget(x, segment);
    x->shares[segment].mounted = false;
}

uint32_t kvs_index_room(const kvs_index_t *x, uint32_t segment)
{
    const kvs_share_t *share = &x->shares[segment];
    return share->block_count - TD_MIN(share->used, share->block_count);
}

uint32_t kvs_index_choose(const kvs_index_t *x, uint32_t want, uint32_t without, uint32_t *out)
{
    uint32_t count = 0;

    for (uint32_t i = 0; i < KVS_SEGMENTS_MAX; i++) {
        uint32_t at = count;
        if (!x->shares[i].mounted || i == without) {
            continue;
        }
        for (; at > 0; at--) {
            if (kvs_index_room(x, out[at - 1]) >= kvs_index_room(x, i)) {
                break;
            }
            if (at < want) {
                out[at] = out[at - 1];
            }
        }
        if (at < want) {
            out[at] = i;
            count = TD_MIN(count + 1, want);
        }
    }
    return count;
}

bool kvs_index_is_full(const kvs_index_t *x, uint32_t segment)
{
    const kvs_share_t *share = &x->shares[segment];
    return (uint64_t)share->used * 100 >=
           (uint64_t)share->block_count * x->policy.evict_from_percent;
}

/* --- keys and replicas ------------------------------------------------------------------------ */

kvs_entry_t *kvs_index_find(const kvs_index_t *x, const td_block_key_t *key)
{
    uint32_t at = td_key_index_find(&x->keys, key);
    return at == TD_KEY_INDEX_NONE ? NULL : &x->entries[at];
}

const td_block_key_t *kvs_index_key(const kvs_index_t *x, const kvs_replica_t *r)
{
    return &x->entries[r->entry].key;
}

kvs_replica_t *kvs_index_on(const kvs_index_t *x, const kvs_entry_t *e, uint32_t segment)
{
    for (uint32_t at = e->first; at != KVS_NONE; at = x->replicas[at].next) {
        if (x->replicas[at].segment == segment) {
            return &x->replicas[at];
        }
    }
    return NULL;
}

static bool has_room(const kvs_index_t *x, const kvs_entry_t *e)
{
    return x->free_replica_count > 0 && (e != NULL || x->free_entry_count > 0);
}

/* A replica on its way, on a list. e: the key's entry, or NULL. */
static kvs_replica_t *replica_new(kvs_index_t *x, const td_block_key_t *key, kvs_entry_t *e,
                                  uint32_t segment, uint32_t order, kvs_list_t *list)
{
    kvs_replica_t *r = NULL;

    if (e == NULL) {
        e = &x->entries[x->free_entries[--x->free_entry_count]];
        *e = (kvs_entry_t){.key = *key, .first = KVS_NONE};
        td_key_index_add(&x->keys, (uint32_t)(e - x->entries));
    }
    r = &x->replicas[x->free_replicas[--x->free_replica_count]];
    *r = (kvs_replica_t){.entry = (uint32_t)(e - x->entries),
                         .next = e->first,
                         .segment = segment,
                         .order = order,
                         .state = KVS_STORING};
    e->first = replica_idx(x, r);
    e->storing++;
    x->shares[segment].used++;
    list_push(x, list, r);
    return r;
}

td_status_t kvs_index_begin(kvs_index_t *x, const td_block_key_t *key, uint32_t segment,
                            uint32_t order, kvs_list_t *order_list)
{
    const kvs_share_t *share = &x->shares[segment];
    kvs_entry_t *e = kvs_index_find(x, key);

    if (e != NULL && kvs_index_on(x, e, segment) != NULL) {
        return TD_ERR_EXISTS;
    }
    if (share->used >= share->block_count || !has_room(x, e)) {
        return TD_ERR_BUSY;
    }
    (void)replica_new(x, key, e, segment, order, order_list);
    return TD_OK;
}

td_status_t kvs_index_adopt(kvs_index_t *x, const td_block_key_t *key, uint32_t segment,
                            uint32_t block, uint64_t epoch, uint64_t checksum,
                            kvs_entry_t **entry_out)
{
    kvs_list_t none = KVS_LIST_EMPTY;
    kvs_entry_t *e = kvs_index_find(x, key);
    kvs_replica_t *r = e == NULL ? NULL : kvs_index_on(x, e, segment);

    if (r != NULL && r->state == KVS_STORING) {
        return TD_ERR_EXISTS;
    }
    if (r != NULL) { /* told twice: the later word counts */
        r->block = block;
        r->epoch = epoch;
        r->checksum = checksum;
    } else if (!has_room(x, e) || (e != NULL && e->ready + e->storing >= (int)KVS_REPLICAS_MAX)) {
        return TD_ERR_BUSY;
    } else {
        r = replica_new(x, key, e, segment, KVS_NONE, &none);
        kvs_index_stored(x, r, &none, block, epoch, checksum);
    }
    *entry_out = &x->entries[r->entry];
    return TD_OK;
}

void kvs_index_stored(kvs_index_t *x, kvs_replica_t *r, kvs_list_t *order_list, uint32_t block,
                      uint64_t epoch, uint64_t checksum)
{
    kvs_entry_t *e = &x->entries[r->entry];

    TD_ASSERT(r->state == KVS_STORING);
    list_unlink(x, order_list, r);
    e->storing--;
    if (e->ready++ == 0) {
        x->readable++;
        td_kv_events_stored(x->events, &e->key);
    }
    r->state = KVS_READY;
    r->order = KVS_NONE;
    r->block = block;
    r->epoch = epoch;
    r->checksum = checksum;
    list_push(x, list_of(x, r), r);
}

bool kvs_index_drop(kvs_index_t *x, kvs_replica_t *r, kvs_list_t *order_list)
{
    kvs_entry_t *e = &x->entries[r->entry];
    uint32_t *link = &e->first;

    TD_ASSERT(r->state == KVS_READY || (r->state == KVS_STORING && order_list != NULL));
    if (r->state == KVS_READY) {
        list_unlink(x, list_of(x, r), r);
        if (--e->ready == 0) {
            x->readable--;
            td_kv_events_removed(x->events, &e->key);
        }
    } else {
        list_unlink(x, order_list, r);
        e->storing--;
    }
    while (*link != replica_idx(x, r)) {
        link = &x->replicas[*link].next;
    }
    *link = r->next;
    x->shares[r->segment].used--;
    r->state = KVS_REPLICA_FREE;
    x->free_replicas[x->free_replica_count++] = replica_idx(x, r);
    if (e->first != KVS_NONE) {
        return true;
    }
    td_key_index_remove(&x->keys, (uint32_t)(e - x->entries));
    x->free_entries[x->free_entry_count++] = (uint32_t)(e - x->entries);
    return false;
}

/* --- readers ---------------------------------------------------------------------------------- */

static void forget_half(const kvs_index_t *x, kvs_entry_t *e, uint64_t now_ns)
{
    const uint64_t half_ns = x->policy.hot_half_ms * TD_NS_PER_MS;
    const uint64_t halves = (now_ns - e->hits_ns) / half_ns;

    if (halves > 0) {
        e->hits = halves < 32 ? e->hits >> halves : 0;
        e->hits_ns += halves * half_ns;
    }
}

void kvs_index_touch(kvs_index_t *x, kvs_entry_t *e, uint64_t now_ns)
{
    e->lease_until_ns = now_ns + x->policy.lease_ms * TD_NS_PER_MS;
    forget_half(x, e, now_ns);
    e->hits += e->hits < UINT32_MAX;
    for (uint32_t at = e->first; at != KVS_NONE; at = x->replicas[at].next) {
        kvs_replica_t *r = &x->replicas[at];
        if (r->state == KVS_READY) {
            list_unlink(x, list_of(x, r), r);
            list_push(x, list_of(x, r), r);
        }
    }
}

const kvs_replica_t *kvs_index_serve(kvs_index_t *x, const kvs_entry_t *e)
{
    const kvs_replica_t *best = NULL;

    for (uint32_t at = e->first; at != KVS_NONE; at = x->replicas[at].next) {
        const kvs_replica_t *r = &x->replicas[at];
        if (r->state == KVS_READY &&
            (best == NULL || x->shares[r->segment].served < x->shares[best->segment].served)) {
            best = r;
        }
    }
    if (best != NULL) {
        x->shares[best->segment].served++;
    }
    return best;
}

bool kvs_index_is_hot(const kvs_index_t *x, const kvs_entry_t *e)
{
    return e->storing == 0 && e->ready > 0 && e->ready < x->policy.hot_replicas &&
           e->hits >= x->policy.hot_hits * e->ready;
}

void kvs_index_forget_half_served(kvs_index_t *x)
{
    for (uint32_t i = 0; i < KVS_SEGMENTS_MAX; i++) {
        x->shares[i].served /= 2;
    }
}

void kvs_index_pin(kvs_index_t *x, kvs_entry_t *e, kvs_pin_t pin, uint64_t now_ns)
{
    const kvs_pin_t before = e->pin;

    for (uint32_t at = e->first; at != KVS_NONE; at = x->replicas[at].next) {
        kvs_replica_t *r = &x->replicas[at];
        if (r->state == KVS_READY) {
            list_unlink(x, &x->shares[r->segment].lists[before], r);
            list_push(x, &x->shares[r->segment].lists[pin], r);
        }
    }
    e->pin = pin;
    e->pin_until_ns = pin == KVS_PIN_SOFT ? now_ns + x->policy.soft_pin_ms * TD_NS_PER_MS : 0;
}

/* --- what goes -------------------------------------------------------------------------------- */

/* From one list; soft pins that are over are treated like the others. */
static uint32_t evict_list(kvs_index_t *x, kvs_list_t *list, uint32_t want, uint64_t now_ns,
                           bool only_over, td_block_key_t *keys_out)
{
    uint32_t count = 0;
    uint32_t looks = 0;

    for (uint32_t at = list->oldest; at != KVS_NONE && count < want && looks < EVICT_LOOKS + want;
         looks++) {
        kvs_replica_t *r = &x->replicas[at];
        const kvs_entry_t *e = &x->entries[r->entry];
        at = r->next_in_list;
        if (e->lease_until_ns > now_ns || e->storing > 0 ||
            (only_over && e->pin_until_ns > now_ns)) {
            continue;
        }
        keys_out[count++] = e->key;
        (void)kvs_index_drop(x, r, NULL);
    }
    return count;
}

uint32_t kvs_index_evict(kvs_index_t *x, uint32_t segment, uint32_t want, uint64_t now_ns,
                         td_block_key_t *keys_out)
{
    kvs_list_t *lists = x->shares[segment].lists;
    uint32_t count = evict_list(x, &lists[KVS_PIN_SOFT], want, now_ns, true, keys_out);

    count += evict_list(x, &lists[KVS_PIN_NONE], want - count, now_ns, false, keys_out + count);
    return count +
           evict_list(x, &lists[KVS_PIN_SOFT], want - count, now_ns, false, keys_out + count);
}

uint32_t kvs_index_cool(kvs_index_t *x, uint32_t looks, uint64_t now_ns, td_block_key_t *key_out)
{
    for (uint32_t i = 0; i < looks; i++) {
        kvs_entry_t *e = &x->entries[x->cooling];
        kvs_replica_t *fullest = NULL;
        x->cooling = (x->cooling + 1) % x->keys_max;
        if (e->first == KVS_NONE || e->storing > 0 || e->ready <= x->policy.replicas ||
            e->lease_until_ns > now_ns || e->pin == KVS_PIN_HARD) {
            continue;
        }
        forget_half(x, e, now_ns);
        if (e->hits >= x->policy.hot_hits * (e->ready - 1u) / COOL_SHARE) {
            continue;
        }
        for (uint32_t at = e->first; at != KVS_NONE; at = x->replicas[at].next) {
            kvs_replica_t *r = &x->replicas[at];
            if (fullest == NULL || x->shares[r->segment].used > x->shares[fullest->segment].used) {
                fullest = r;
            }
        }
        *key_out = e->key;
        i = fullest->segment;
        (void)kvs_index_drop(x, fullest, NULL);
        return i;
    }
    return KVS_NONE;
}

uint32_t kvs_index_walk(const void *index, uint32_t *cursor, uint32_t max, td_block_key_t *out)
{
    const kvs_index_t *x = index;
    const uint32_t end = (uint32_t)TD_MIN((uint64_t)*cursor + WALK_LOOKS, x->keys_max);
    uint32_t count = 0;

    while (*cursor < end && count < max) {
        const kvs_entry_t *e = &x->entries[(*cursor)++];
        if (e->first != KVS_NONE && e->ready > 0) {
            out[count++] = e->key;
        }
    }
    if (*cursor >= x->keys_max) {
        *cursor = UINT32_MAX;
    }
    return count;
}

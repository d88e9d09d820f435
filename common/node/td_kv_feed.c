#include "common/node/td_kv_feed.h"

#include <stdio.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/base/td_log.h"

typedef struct subscriber {
    char id[TD_MSG_ID_CHARS_MAX + 1];
    uint64_t incarnation; /* its life that was told; 0: none */
    uint64_t next;        /* number of the event that it is told next */
    uint64_t sent_ns;
    bool wants_all; /* a snapshot is to begin */
    bool walking;   /* one is under way */
    uint64_t snapshot;
    uint32_t cursor; /* of the walk */
    uint32_t parts;  /* sent */
} subscriber_t;

struct td_kv_feed {
    td_kv_feed_out_t to;
    const td_kv_events_t *events; /* borrowed */
    td_kv_walk_t walk;
    const void *ctx;
    uint64_t incarnation; /* of ours, that subscribers were told in */
    uint64_t snapshots;   /* begun */
    uint64_t now_ns;      /* of the tick */
    subscriber_t subscribers[TD_KV_SUBSCRIBERS_MAX];
    td_block_key_t keys[TD_MSG_KV_KEYS_MAX]; /* scratch */
    uint32_t runs[TD_KV_GATHER_KEYS + 1];    /* scratch */
};

static uint64_t bus_own_life(void *ctx)
{
    return td_bus_incarnation(ctx);
}

static uint64_t bus_life(void *ctx, const char *id)
{
    return td_bus_peer_incarnation(ctx, id);
}

static td_status_t bus_send(void *ctx, const char *id, td_msg_t *msg)
{
    return td_bus_send(ctx, id, msg);
}

td_kv_feed_out_t td_kv_feed_over_bus(td_bus_t *bus)
{
    return (td_kv_feed_out_t){
        .ctx = bus, .own_life = bus_own_life, .life = bus_life, .send = bus_send};
}

td_status_t td_kv_feed_create(const td_kv_feed_out_t *to, const td_kv_events_t *events,
                              td_kv_walk_t walk, const void *ctx, td_kv_feed_t **out)
{
    td_kv_feed_t *f = td_calloc(1, sizeof(*f));

    if (f == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    f->to = *to;
    f->events = events;
    f->walk = walk;
    f->ctx = ctx;
    *out = f;
    return TD_OK;
}

void td_kv_feed_destroy(td_kv_feed_t *f)
{
    td_free(f);
}

static subscriber_t *find(td_kv_feed_t *f, const char *id)
{
    for (uint32_t i = 0; i < TD_KV_SUBSCRIBERS_MAX; i++) {
        if (f->subscribers[i].id[0] != '\0' && strcmp(f->subscribers[i].id, id) == 0) {
            return &f->subscribers[i];
        }
    }
    return NULL;
}

void td_kv_feed_follow(td_kv_feed_t *f, uint32_t at, const char *id)
{
    subscriber_t *s = &f->subscribers[at];

    TD_ASSERT(at < TD_KV_SUBSCRIBERS_MAX);
    if (strcmp(s->id, id) != 0) {
        *s = (subscriber_t){.wants_all = true};
        (void)snprintf(s->id, sizeof(s->id), "%s", id);
    }
}

bool td_kv_feed_handle(td_kv_feed_t *f, const td_msg_t *msg)
{
    const uint64_t from = msg->u.kv_replay.from;
    subscriber_t *s = NULL;

    if (msg->type != TD_MSG_KV_REPLAY) {
        return false;
    }
    s = find(f, msg->sender_id);
    if (s == NULL) {
        return true;
    }
    if (from == 0 || from > s->next) { /* past what it was told: another life's number */
        s->wants_all = true;
    } else if (!s->walking && !s->wants_all) { /* else it asked before it heard of that snapshot */
        s->next = from;
    }
    return true;
}

/* --- sending ---------------------------------------------------------------------------------- */

/* False: its outbox is full, or it is gone; later. */
static bool send_events(td_kv_feed_t *f, subscriber_t *s, td_msg_kv_events_t *m)
{
    td_msg_t msg = {.type = TD_MSG_KV_EVENTS};
    td_status_t status = TD_OK;

    if (m->is_head) {
        m->blocks = f->events->blocks;
        m->digest = f->events->digest;
    }
    msg.u.kv_events = *m;
    status = f->to.send(f->to.ctx, s->id, &msg);
    if (status != TD_OK) {
        TD_LOG_DEBUG("block events not sent", "to=%s status=%s", s->id, td_status_name(status));
        return false;
    }
    s->sent_ns = f->now_ns;
    return true;
}

static bool begin_snapshot(td_kv_feed_t *f, subscriber_t *s)
{
    td_msg_kv_events_t m = {
        .kind = TD_MSG_KV_SNAPSHOT, .first = f->events->next, .snapshot = f->snapshots + 1};

    if (!send_events(f, s, &m)) {
        return false;
    }
    s->snapshot = ++f->snapshots;
    s->next = f->events->next;
    s->wants_all = false;
    s->walking = true;
    s->cursor = 0;
    s->parts = 0;
    return true;
}

/* The next events, one message of them. */
static bool send_changes(td_kv_feed_t *f, subscriber_t *s)
{
    td_msg_kv_events_t m = {.first = s->next, .keys = f->keys, .runs = f->runs};
    bool cleared = false;
    const uint32_t count = td_kv_events_read(f->events, s->next, TD_KV_GATHER_KEYS, f->keys,
                                             f->runs, &m.run_count, &cleared);

    m.kind = cleared ? TD_MSG_KV_CLEARED : TD_MSG_KV_CHANGES;
    m.count = cleared ? 0 : count;
    m.run_count = cleared ? 0 : m.run_count;
    m.is_head = s->next + count == f->events->next;
    if (!send_events(f, s, &m)) {
        return false;
    }
    s->next += count;
    return true;
}

/* A part holds what is there after the events that were sent before it, all there are: so whoever
 * takes both in their order has what we have, and nothing has to be remembered of what went. */
static bool send_part(td_kv_feed_t *f, subscriber_t *s)
{
    td_msg_kv_events_t m = {.kind = TD_MSG_KV_PART,
                            .first = s->next,
                            .snapshot = s->snapshot,
                            .part = s->parts,
                            .keys = f->keys};
    uint32_t cursor = s->cursor;

    if (cursor == UINT32_MAX) {
        m.kind = TD_MSG_KV_END;
        m.is_head = true;
        s->walking = !send_events(f, s, &m);
        return !s->walking;
    }
    m.count = f->walk(f->ctx, &cursor, TD_MSG_KV_KEYS_MAX, f->keys);
    if (m.count > 0 && !send_events(f, s, &m)) {
        return false; /* the same again, as it is then */
    }
    s->parts += m.count > 0;
    s->cursor = cursor;
    return true;
}

static bool is_due(const td_kv_feed_t *f, const subscriber_t *s)
{
    const uint64_t waiting = f->events->next - s->next;

    return waiting >= TD_KV_GATHER_KEYS ||
           (waiting > 0 && f->now_ns - s->sent_ns >= TD_KV_GATHER_MS * TD_NS_PER_MS);
}

/* One message of what is due. False: nothing, or it cannot be sent now. */
static bool step(td_kv_feed_t *f, subscriber_t *s)
{
    if (s->next < td_kv_events_oldest(f->events)) {
        s->wants_all = true; /* it was away, or read too slowly */
    }
    if (s->wants_all) {
        return begin_snapshot(f, s);
    }
    if (s->next < f->events->next && (s->walking || is_due(f, s))) {
        return send_changes(f, s);
    }
    if (s->walking) {
        return send_part(f, s);
    }
    if (f->now_ns - s->sent_ns >= TD_KV_BEAT_MS * TD_NS_PER_MS && s->next == f->events->next) {
        return send_changes(f, s); /* none: what comes last may have been lost as well */
    }
    return false;
}

/* Another life, of the router's or ours, knows nothing of what was told. */
static void look_at_lives(td_kv_feed_t *f, subscriber_t *s, bool ours_is_new)
{
    const uint64_t incarnation = s->id[0] == '\0' ? 0 : f->to.life(f->to.ctx, s->id);

    if (incarnation != s->incarnation || ours_is_new) {
        s->incarnation = incarnation;
        s->wants_all = true;
    }
}

void td_kv_feed_tick(td_kv_feed_t *f, const td_member_t *member, uint64_t now_ns)
{
    const uint64_t own = f->to.own_life(f->to.ctx);
    const bool is_new = f->incarnation != own;

    f->incarnation = own;
    f->now_ns = now_ns;
    for (uint32_t i = 0; i < TD_KV_SUBSCRIBERS_MAX; i++) {
        subscriber_t *s = &f->subscribers[i];
        if (member != NULL) {
            td_kv_feed_follow(f, i, td_member_router_at(member, i));
        }
        look_at_lives(f, s, is_new);
        for (uint32_t n = 0; s->incarnation != 0 && n < TD_KV_MESSAGES_PER_TICK; n++) {
            if (!step(f, s)) {
                break;
            }
        }
    }
}

uint32_t td_kv_feed_wait_ms(const td_kv_feed_t *f, uint32_t most_ms)
{
    uint32_t wait_ms = most_ms;

    for (uint32_t i = 0; i < TD_KV_SUBSCRIBERS_MAX; i++) {
        const subscriber_t *s = &f->subscribers[i];
        if (s->incarnation != 0 && (s->wants_all || s->walking || s->next != f->events->next)) {
            wait_ms = TD_MIN(wait_ms, TD_KV_GATHER_MS);
        }
    }
    return wait_ms;
}

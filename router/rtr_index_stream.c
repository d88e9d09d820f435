/* A slot's stream: numbered events, gaps, snapshots. Nothing of it is ever waited for: what is
 * known counts as a hint until it is exact again. */
#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/base/td_log.h"
#include "router/rtr_index_internal.h"

#define NONE INDEX_NONE

void rtr_index_purge(rtr_index_t *x, uint32_t slot)
{
    stream_t *s = &x->streams[slot];

    TD_ASSERT(slot < x->slots_max);
    if (s->filled != NONE && s->filled != s->lane) {
        index_lane_retire(x, s->filled);
    }
    index_lane_retire(x, s->lane);
    *s = (stream_t){.lane = index_lane_new(x, slot, LANE_SHOWN), .filled = NONE};
    index_lane_keep(x, s->lane, true);
}

void rtr_index_purge_heard(rtr_index_t *x, uint32_t slot)
{
    TD_ASSERT(slot < x->slots_max);
    if (x->streams[slot].heard_ns != 0) {
        rtr_index_purge(x, slot);
    }
}

static rtr_index_state_t state_of(const rtr_index_t *x, const stream_t *s, uint64_t now_ns)
{
    if (s->heard_ns == 0 || now_ns - s->heard_ns > RTR_INDEX_SILENT_MS * TD_NS_PER_MS) {
        return RTR_INDEX_FALLBACK;
    }
    if (s->next == 0 || s->known > s->next || s->wants_all || s->filled != NONE ||
        x->lanes[s->lane].lossy) {
        return RTR_INDEX_DEGRADED;
    }
    return RTR_INDEX_EXACT;
}

void rtr_index_look(const rtr_index_t *x, uint32_t slot, uint64_t now_ns, rtr_index_slot_t *out)
{
    const stream_t *s = &x->streams[slot];

    TD_ASSERT(slot < x->slots_max);
    *out = (rtr_index_slot_t){.state = state_of(x, s, now_ns),
                              .blocks = x->lanes[s->lane].confirmed,
                              .digest = x->lanes[s->lane].digest,
                              .gaps = s->gaps};
}

/* --- snapshots -------------------------------------------------------------------------------- */

/* What was filled so far is worth nothing, unless it is all there is. */
static void give_up_snapshot(rtr_index_t *x, stream_t *s)
{
    if (s->filled != NONE && s->filled != s->lane) {
        index_lane_retire(x, s->filled);
    }
    s->filled = NONE;
}

/* Where what is shown can serve until the snapshot is whole, it does. */
static void begin_snapshot(rtr_index_t *x, stream_t *s, const td_msg_kv_events_t *m,
                           uint64_t now_ns)
{
    const uint32_t slot = x->lanes[s->lane].slot;

    if (m->snapshot <= s->snapshot) {
        return; /* an older one */
    }
    give_up_snapshot(x, s);
    s->filled = x->lanes[s->lane].held == 0 ? s->lane : index_lane_new(x, slot, LANE_FILLED);
    if (s->filled == NONE) {
        index_lane_retire(x, s->lane);
        s->lane = index_lane_new(x, slot, LANE_SHOWN);
        s->filled = s->lane;
    }
    index_lane_keep(x, s->filled, false);
    x->lanes[s->filled].lossy = false;
    s->snapshot = m->snapshot;
    s->parts = 0;
    s->next = m->first;
    s->known = m->first;
    s->wants_all = false;
    s->progress_ns = now_ns;
}

/* Parts and events come in one order; where one is missing the rest is no use. */
static bool continues(rtr_index_t *x, stream_t *s, const td_msg_kv_events_t *m)
{
    if (s->filled == NONE || m->snapshot != s->snapshot || m->part < s->parts) {
        return false; /* of another one, or here already */
    }
    if (m->part == s->parts && m->first == s->next) {
        return true;
    }
    x->counts.gaps++;
    s->gaps++;
    give_up_snapshot(x, s);
    s->wants_all = true;
    return false;
}

static void confirm(rtr_index_t *x, stream_t *s, const td_block_key_t *keys, uint32_t count)
{
    const uint32_t lane = s->filled != NONE ? s->filled : s->lane;

    for (uint32_t i = 0; i < count; i++) {
        index_ahead(x, keys, count, i);
        (void)index_confirm(x, &keys[i], lane);
    }
    x->counts.events += count;
}

static void drop(rtr_index_t *x, stream_t *s, const td_block_key_t *keys, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        index_ahead(x, keys, count, i);
        index_drop(x, &keys[i], s->lane);
        if (s->filled != NONE && s->filled != s->lane) {
            index_drop(x, &keys[i], s->filled);
        }
    }
    x->counts.events += count;
}

/* The sender has told all: is it what we have? */
static void verify(rtr_index_t *x, stream_t *s, const td_msg_kv_events_t *m)
{
    const lane_t *lane = &x->lanes[s->lane];

    if (s->wants_all || s->known > s->next || lane->lossy ||
        (lane->confirmed == m->blocks && lane->digest == m->digest)) {
        return;
    }
    TD_LOG_WARN("index of blocks is not what its node has", "slot=%u here=%u there=%u", lane->slot,
                lane->confirmed, m->blocks);
    x->counts.mismatches++;
    s->wants_all = true;
    s->doubted = true;
}

static void end_snapshot(rtr_index_t *x, stream_t *s, const td_msg_kv_events_t *m, uint64_t now_ns)
{
    if (s->filled != s->lane) {
        index_lane_retire(x, s->lane);
        s->lane = s->filled;
        index_lane_show(x, s->lane);
    }
    s->filled = NONE;
    s->ended_ns = now_ns;
    verify(x, s, m);
}

/* --- events ----------------------------------------------------------------------------------- */

static void clear(rtr_index_t *x, stream_t *s)
{
    const uint32_t slot = x->lanes[s->lane].slot;
    const bool filling = s->filled != NONE;

    give_up_snapshot(x, s); /* what it brought is gone as well */
    index_lane_retire(x, s->lane);
    s->lane = index_lane_new(x, slot, LANE_SHOWN);
    s->filled = filling ? s->lane : NONE;
    x->counts.events++;
}

/* Events of a message without the first `skip`, which are known. */
static void apply_runs(rtr_index_t *x, stream_t *s, const td_msg_kv_events_t *m, uint32_t skip)
{
    uint32_t at = 0;

    for (uint32_t r = 0; r < m->run_count; r++) {
        const uint32_t end = at + m->runs[r];
        const uint32_t begin = TD_MAX(at, TD_MIN(skip, end));
        if (r % 2 == 0) {
            confirm(x, s, m->keys + begin, end - begin);
        } else {
            drop(x, s, m->keys + begin, end - begin);
        }
        at = end;
    }
}

static void take_changes(rtr_index_t *x, stream_t *s, const td_msg_kv_events_t *m)
{
    const uint64_t count = m->kind == TD_MSG_KV_CLEARED ? 1 : m->count;
    const uint64_t end = m->first + count;

    if (s->next == 0) { /* what came before is not known */
        s->wants_all = true;
        return;
    }
    if (m->first > s->next) {
        if (s->known <= s->next) {
            x->counts.gaps++;
            s->gaps++;
        }
        s->known = TD_MAX(s->known, end);
        if (s->filled != NONE) {
            give_up_snapshot(x, s);
            s->wants_all = true;
        }
        return;
    }
    if (end < s->next) {
        return; /* known */
    }
    if (end > s->next && m->kind == TD_MSG_KV_CLEARED) {
        clear(x, s);
    } else if (end > s->next) {
        apply_runs(x, s, m, (uint32_t)(s->next - m->first));
    }
    s->next = end;
    s->known = TD_MAX(s->known, end);
    if (m->is_head && s->filled == NONE) {
        verify(x, s, m);
    }
}

/* --- asking ----------------------------------------------------------------------------------- */

static bool has_waited(uint64_t since_ns, uint64_t now_ns, uint64_t ms)
{
    return now_ns - since_ns >= ms * TD_NS_PER_MS;
}

/* Is there room for what was dropped? */
static bool could_be_whole(const rtr_index_t *x, const stream_t *s)
{
    const uint32_t room = x->entries_max - x->count;

    return room > x->entries_max / 8 && room - x->entries_max / 8 >= s->told_blocks;
}

static bool ask(rtr_index_t *x, stream_t *s, uint64_t now_ns, uint64_t *from_out)
{
    const bool rested = has_waited(s->ended_ns, now_ns, RTR_INDEX_RESYNC_MS);
    const bool stuck =
        s->filled != NONE && has_waited(s->progress_ns, now_ns, RTR_INDEX_SNAPSHOT_MS);
    const bool again = s->filled == NONE && rested && x->lanes[s->lane].lossy && s->next != 0 &&
                       could_be_whole(x, s);
    const bool all = stuck || again || (s->wants_all && (!s->doubted || rested));
    const bool some = s->filled == NONE && !s->wants_all && s->known > s->next;

    if ((!all && !some) || (s->asked && !has_waited(s->asked_ns, now_ns, RTR_INDEX_ASK_MS))) {
        return false;
    }
    s->asked = true;
    s->asked_ns = now_ns;
    s->doubted = false;
    x->counts.snapshots += all;
    x->counts.replays += !all;
    *from_out = all ? 0 : s->next;
    return true;
}

bool rtr_index_apply(rtr_index_t *x, uint32_t slot, const td_msg_kv_events_t *m, uint64_t now_ns,
                     uint64_t *from_out)
{
    stream_t *s = &x->streams[slot];

    TD_ASSERT(slot < x->slots_max);
    s->heard_ns = now_ns;
    switch (m->kind) {
    case TD_MSG_KV_SNAPSHOT:
        begin_snapshot(x, s, m, now_ns);
        break;
    case TD_MSG_KV_PART:
        if (continues(x, s, m)) {
            confirm(x, s, m->keys, m->count);
            s->parts++;
            s->progress_ns = now_ns;
        }
        break;
    case TD_MSG_KV_END:
        if (continues(x, s, m)) {
            end_snapshot(x, s, m, now_ns);
        }
        break;
    default:
        take_changes(x, s, m);
        break;
    }
    if (m->is_head) {
        s->told_blocks = m->blocks;
    }
    return ask(x, s, now_ns, from_out);
}

bool rtr_index_due(rtr_index_t *x, uint32_t slot, uint64_t now_ns, uint64_t *from_out)
{
    stream_t *s = &x->streams[slot];
    const bool falls_back = state_of(x, s, now_ns) == RTR_INDEX_FALLBACK;

    TD_ASSERT(slot < x->slots_max);
    /* Where nothing is ever confirmed, expectations are all there is. */
    if (index_lane_keeps(x, s->lane) != falls_back) {
        index_lane_keep(x, s->lane, falls_back);
    }
    return s->heard_ns != 0 && ask(x, s, now_ns, from_out);
}

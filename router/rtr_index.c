#include "router/rtr_index.h"

#include <string.h>

#include "common/base/td_base.h"
#include "router/rtr_index_internal.h"

#define NONE INDEX_NONE
#define MARK_CONFIRMED 3u /* below: expected, in the epoch of that rest of 3 */
#define LANES_MAX (1u << 14)
#define SETS_SHARE                                                                                 \
    32u /* of the entries have more holders than fit into one; few are so popular                  \
         */
#define SETS_MIN 64u
#define SETS_BYTES_MAX (256u << 20)
#define MAP_CONFIRMED 0u
#define MAP_LATELY 1u /* expected in the set's epoch */
#define MAP_BEFORE 2u /* in the one before */
#define MAPS 3u
#define SWEEP_ENTRIES 8192u /* looked at in one tick */
#define RUN_KEYS 64u        /* found at once */
#define SLOTS_AHEAD 16u     /* keys whose place is asked of memory before it is read */
#define ENTRIES_AHEAD 10u
#define LINKS_AHEAD 5u

static uint32_t lanes_for(uint32_t slots_max)
{
    return slots_max + slots_max / 4 + 16;
}

static td_status_t take_memory(rtr_index_t *x)
{
    const size_t set_bytes = MAPS * x->words * sizeof(*x->bits);
    const uint32_t share = x->entries_max / (x->words == 1 ? 2 : SETS_SHARE);
    const uint32_t sets = (uint32_t)TD_MIN(TD_MAX(share, TD_MIN(SETS_MIN, x->entries_max)),
                                           SETS_BYTES_MAX / set_bytes);

    x->entries = td_calloc_large(x->entries_max, sizeof(*x->entries));
    x->bits = td_calloc_large((size_t)sets * MAPS * x->words, sizeof(*x->bits));
    x->set_epochs = td_calloc(sets, sizeof(*x->set_epochs));
    x->lanes = td_calloc(x->lanes_max, sizeof(*x->lanes));
    x->shown = td_calloc(x->words, sizeof(*x->shown));
    x->keeps = td_calloc(x->words, sizeof(*x->keeps));
    x->active = td_calloc(x->words, sizeof(*x->active));
    x->streams = td_calloc(x->slots_max, sizeof(*x->streams));
    x->sets_max = sets;
    if (x->entries == NULL || x->bits == NULL || x->set_epochs == NULL || x->lanes == NULL ||
        x->shown == NULL || x->keeps == NULL || x->active == NULL || x->streams == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    return td_key_index_init(&x->keys, x->entries_max, &x->entries[0].key, sizeof(*x->entries));
}

td_status_t rtr_index_create(uint32_t entries_max, uint32_t slots_max, rtr_index_t **out)
{
    rtr_index_t *x = td_calloc(1, sizeof(*x));

    TD_ASSERT(entries_max >= 1 && entries_max <= RTR_INDEX_BLOCKS_MAX);
    TD_ASSERT(slots_max >= 1 && slots_max <= RTR_INDEX_SLOTS_MAX);
    _Static_assert(RTR_INDEX_SLOTS_MAX + RTR_INDEX_SLOTS_MAX / 4 + 16 <= LANES_MAX,
                   "a lane and its mark are 16 bits");
    _Static_assert(sizeof(entry_t) == 48, "the memory that is stated");
    if (x == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    x->entries_max = entries_max;
    x->slots_max = slots_max;
    x->lanes_max = lanes_for(slots_max);
    x->words = (x->lanes_max + 63) / 64;
    if (take_memory(x) != TD_OK) {
        rtr_index_destroy(x);
        return TD_ERR_NO_MEMORY;
    }
    x->free_first = NONE;
    x->sets_free = NONE;
    td_lru_init(&x->use, &x->entries[0].use, sizeof(*x->entries));
    for (uint32_t i = x->lanes_max; i > 0; i--) {
        x->lanes[i - 1] = (lane_t){.slot = i < x->lanes_max ? i : NONE};
    }
    for (uint32_t i = 0; i < slots_max; i++) {
        x->streams[i] = (stream_t){.lane = index_lane_new(x, i, LANE_SHOWN), .filled = NONE};
        index_lane_keep(x, x->streams[i].lane, true);
    }
    *out = x;
    return TD_OK;
}

void rtr_index_destroy(rtr_index_t *x)
{
    if (x == NULL) {
        return;
    }
    td_free(x->entries);
    td_free(x->bits);
    td_free(x->set_epochs);
    td_free(x->lanes);
    td_free(x->shown);
    td_free(x->keeps);
    td_free(x->active);
    td_free(x->streams);
    td_key_index_fini(&x->keys);
    td_free(x);
}

size_t rtr_index_bytes(const rtr_index_t *x)
{
    const size_t set = MAPS * x->words * sizeof(*x->bits) + sizeof(*x->set_epochs);

    return sizeof(*x) + x->entries_max * sizeof(*x->entries) + td_key_index_bytes(&x->keys) +
           x->sets_max * set + x->lanes_max * sizeof(*x->lanes) + 3 * x->words * sizeof(*x->shown) +
           x->slots_max * sizeof(*x->streams);
}

uint32_t rtr_index_blocks(const rtr_index_t *x)
{
    return x->count;
}

const rtr_index_counts_t *rtr_index_counts(const rtr_index_t *x)
{
    return &x->counts;
}

const char *rtr_index_state_name(rtr_index_state_t state)
{
    static const char *const names[RTR_INDEX_STATES] = {"fallback", "degraded", "exact"};

    return names[state];
}

/* --- bits of lanes ---------------------------------------------------------------------------- */

static bool bit_has(const uint64_t *bits, uint32_t lane)
{
    return (bits[lane / 64] >> (lane % 64) & 1) != 0;
}

static void bit_set(uint64_t *bits, uint32_t lane)
{
    bits[lane / 64] |= 1ull << (lane % 64);
}

static void bit_clear(uint64_t *bits, uint32_t lane)
{
    bits[lane / 64] &= ~(1ull << (lane % 64));
}

static uint64_t *map_of(const rtr_index_t *x, uint32_t set, uint32_t map)
{
    return &x->bits[((size_t)set * MAPS + map) * x->words];
}

/* --- marks: who holds an entry ---------------------------------------------------------------- */

static uint32_t lane_of(uint16_t holder)
{
    return holder >> 2;
}

static bool is_confirmed(uint16_t holder)
{
    return (holder & 3) == MARK_CONFIRMED;
}

static uint16_t holder_of(const rtr_index_t *x, uint32_t lane, bool confirmed)
{
    return (uint16_t)(lane << 2 | (confirmed ? MARK_CONFIRMED : x->epoch % 3));
}

/* Expected two epochs ago, and neither confirmed nor expected again. */
static bool is_over(const rtr_index_t *x, uint16_t holder)
{
    return (holder & 3) == (x->epoch + 1) % 3 && !bit_has(x->keeps, lane_of(holder));
}

static uint32_t inline_find(const entry_t *e, uint32_t lane)
{
    uint32_t i = 0;

    while (i < e->count && lane_of(e->holders[i]) != lane) {
        i++;
    }
    return i;
}

static void count_out(rtr_index_t *x, const entry_t *e, uint32_t lane, bool confirmed)
{
    x->lanes[lane].held--;
    if (confirmed) {
        x->lanes[lane].confirmed--;
        x->lanes[lane].digest ^= td_block_key_word(&e->key);
    }
}

static void count_confirmed(rtr_index_t *x, const entry_t *e, uint32_t lane)
{
    x->lanes[lane].confirmed++;
    x->lanes[lane].digest ^= td_block_key_word(&e->key);
}

/* Those of a word that a set stands for now, whatever epoch it was last touched in. */
static uint64_t set_word(const rtr_index_t *x, uint32_t set, uint32_t w)
{
    const uint32_t epochs = x->epoch - x->set_epochs[set];
    const uint64_t lately = map_of(x, set, MAP_LATELY)[w];
    const uint64_t before = map_of(x, set, MAP_BEFORE)[w];
    uint64_t bits = map_of(x, set, MAP_CONFIRMED)[w];

    bits |= epochs <= 1 ? lately : lately & x->keeps[w];
    return bits | (epochs == 0 ? before : before & x->keeps[w]);
}

/* Brings a set's expectations into this epoch. May leave it without a holder. */
static void set_turn(rtr_index_t *x, entry_t *e)
{
    const uint32_t epochs = x->epoch - x->set_epochs[e->set];
    uint64_t *lately = map_of(x, e->set, MAP_LATELY);
    uint64_t *before = map_of(x, e->set, MAP_BEFORE);

    for (uint32_t w = 0; epochs > 0 && w < x->words; w++) {
        const uint64_t old = before[w] | (epochs > 1 ? lately[w] : 0);
        before[w] = epochs > 1 ? 0 : lately[w];
        lately[w] = old & x->keeps[w];
        for (uint64_t left = old & ~x->keeps[w]; left != 0; left &= left - 1) {
            count_out(x, e, w * 64 + (uint32_t)__builtin_ctzll(left), false);
            e->count--;
        }
    }
    x->set_epochs[e->set] = x->epoch;
}

static bool set_take(rtr_index_t *x, uint32_t *out)
{
    if (x->sets_free != NONE) {
        *out = x->sets_free;
        x->sets_free = x->set_epochs[*out];
    } else if (x->sets_high < x->sets_max) {
        *out = x->sets_high++;
    } else {
        return false;
    }
    memset(map_of(x, *out, 0), 0, (size_t)MAPS * x->words * sizeof(*x->bits));
    x->set_epochs[*out] = x->epoch;
    return true;
}

static void set_free(rtr_index_t *x, uint32_t set)
{
    x->set_epochs[set] = x->sets_free;
    x->sets_free = set;
}

/* Out of the entry into a set, for one more to find room. */
static bool spread(rtr_index_t *x, entry_t *e)
{
    uint32_t set = 0;

    if (!set_take(x, &set)) {
        return false;
    }
    for (uint32_t i = 0; i < e->count; i++) {
        const uint32_t mark = e->holders[i] & 3;
        const uint32_t map = mark == MARK_CONFIRMED ? MAP_CONFIRMED
                             : mark == x->epoch % 3 ? MAP_LATELY
                                                    : MAP_BEFORE;
        bit_set(map_of(x, set, map), lane_of(e->holders[i]));
    }
    e->set = set;
    return true;
}

/* Back into the entry, where few are left. The set was turned. */
static void gather(rtr_index_t *x, entry_t *e)
{
    uint32_t count = 0;

    for (uint32_t map = 0; map < MAPS; map++) {
        const uint32_t mark = map == MAP_CONFIRMED ? MARK_CONFIRMED
                              : map == MAP_LATELY  ? x->epoch % 3
                                                   : (x->epoch + 2) % 3;
        for (uint32_t w = 0; w < x->words; w++) {
            for (uint64_t left = map_of(x, e->set, map)[w]; left != 0; left &= left - 1) {
                const uint32_t lane = w * 64 + (uint32_t)__builtin_ctzll(left);
                e->holders[count++] = (uint16_t)(lane << 2 | mark);
            }
        }
    }
    TD_ASSERT(count == e->count);
    set_free(x, e->set);
    e->set = NONE;
}

static void entry_free(rtr_index_t *x, uint32_t at)
{
    entry_t *e = &x->entries[at];

    if (e->set != NONE) {
        set_free(x, e->set);
    }
    td_key_index_remove(&x->keys, at);
    td_lru_remove(&x->use, at);
    e->set = x->free_first;
    x->free_first = at;
    x->count--;
}

static void entry_settle(rtr_index_t *x, uint32_t at)
{
    entry_t *e = &x->entries[at];

    if (e->count == 0) {
        entry_free(x, at);
    } else if (e->set != NONE && e->count <= INDEX_HOLDERS_INLINE / 2) {
        gather(x, e);
    }
}

static void set_mark(rtr_index_t *x, entry_t *e, uint32_t lane, bool confirmed)
{
    uint64_t *sure = map_of(x, e->set, MAP_CONFIRMED);
    uint64_t *lately = map_of(x, e->set, MAP_LATELY);
    uint64_t *before = map_of(x, e->set, MAP_BEFORE);

    set_turn(x, e);
    if (bit_has(sure, lane)) {
        return;
    }
    if (!bit_has(lately, lane) && !bit_has(before, lane)) {
        e->count++;
        x->lanes[lane].held++;
    }
    bit_clear(before, lane);
    bit_clear(lately, lane);
    bit_set(confirmed ? sure : lately, lane);
    if (confirmed) {
        count_confirmed(x, e, lane);
    }
}

/* False: there is no room for one more holder. */
static bool mark(rtr_index_t *x, uint32_t at, uint32_t lane, bool confirmed)
{
    entry_t *e = &x->entries[at];
    const uint32_t i = e->set == NONE ? inline_find(e, lane) : 0;

    if (e->set == NONE && i == INDEX_HOLDERS_INLINE && !spread(x, e)) {
        return false;
    }
    if (e->set != NONE) {
        set_mark(x, e, lane, confirmed);
        return true;
    }
    if (i < e->count && is_confirmed(e->holders[i])) {
        return true;
    }
    if (i == e->count) {
        e->count++;
        x->lanes[lane].held++;
    }
    e->holders[i] = holder_of(x, lane, confirmed);
    if (confirmed) {
        count_confirmed(x, e, lane);
    }
    return true;
}

static void inline_remove(rtr_index_t *x, entry_t *e, uint32_t i)
{
    count_out(x, e, lane_of(e->holders[i]), is_confirmed(e->holders[i]));
    e->holders[i] = e->holders[--e->count];
}

/* Takes lanes out of a set: those of the word that are in `out`. */
static void set_remove(rtr_index_t *x, entry_t *e, uint32_t w, uint64_t out)
{
    for (uint32_t map = 0; map < MAPS; map++) {
        uint64_t *bits = &map_of(x, e->set, map)[w];
        for (uint64_t left = *bits & out; left != 0; left &= left - 1) {
            count_out(x, e, w * 64 + (uint32_t)__builtin_ctzll(left), map == MAP_CONFIRMED);
            e->count--;
        }
        *bits &= ~out;
    }
}

static void unmark(rtr_index_t *x, uint32_t at, uint32_t lane)
{
    entry_t *e = &x->entries[at];

    if (e->set != NONE) {
        set_turn(x, e);
        set_remove(x, e, lane / 64, 1ull << (lane % 64));
    } else {
        const uint32_t i = inline_find(e, lane);
        if (i < e->count) {
            inline_remove(x, e, i);
        }
    }
    entry_settle(x, at);
}

/* --- entries ---------------------------------------------------------------------------------- */

/* For want of room: whoever held it is known less well from now on. */
static void entry_evict(rtr_index_t *x, uint32_t at)
{
    entry_t *e = &x->entries[at];

    for (uint32_t i = 0; e->set == NONE && i < e->count; i++) {
        x->lanes[lane_of(e->holders[i])].lossy |= is_confirmed(e->holders[i]);
        x->counts.dropped += is_confirmed(e->holders[i]);
    }
    while (e->set == NONE && e->count > 0) {
        inline_remove(x, e, 0);
    }
    for (uint32_t w = 0; e->set != NONE && w < x->words; w++) {
        for (uint64_t left = map_of(x, e->set, MAP_CONFIRMED)[w]; left != 0; left &= left - 1) {
            x->lanes[w * 64 + (uint32_t)__builtin_ctzll(left)].lossy = true;
            x->counts.dropped++;
        }
        set_remove(x, e, w, UINT64_MAX);
    }
    entry_free(x, at);
}

static uint32_t entry_new(rtr_index_t *x, const td_block_key_t *key)
{
    uint32_t at = NONE;

    if (x->count == x->entries_max) {
        entry_evict(x, x->use.oldest);
    }
    at = x->free_first;
    if (at != NONE) {
        x->free_first = x->entries[at].set;
    } else {
        at = x->high++;
    }
    x->entries[at] = (entry_t){.key = *key, .set = NONE};
    td_key_index_add(&x->keys, at);
    td_lru_add(&x->use, at);
    x->count++;
    return at;
}

/* The key's entry, there from now on and used last. */
static uint32_t entry_use(rtr_index_t *x, const td_block_key_t *key)
{
    const uint32_t at = td_key_index_find(&x->keys, key);

    if (at == NONE) {
        return entry_new(x, key);
    }
    if (x->use.newest != at) {
        td_lru_use(&x->use, at);
    }
    return at;
}

bool index_confirm(rtr_index_t *x, const td_block_key_t *key, uint32_t lane)
{
    if (mark(x, entry_use(x, key), lane, true)) {
        return true;
    }
    x->lanes[lane].lossy = true;
    x->counts.dropped++;
    return false;
}

void index_drop(rtr_index_t *x, const td_block_key_t *key, uint32_t lane)
{
    const uint32_t at = td_key_index_find(&x->keys, key);

    if (at != NONE) {
        unmark(x, at, lane);
    }
}

void index_ahead(const rtr_index_t *x, const td_block_key_t *keys, uint32_t count, uint32_t i)
{
    if (i + SLOTS_AHEAD < count) {
        td_key_index_ask_slot(&x->keys, &keys[i + SLOTS_AHEAD]);
    }
    if (i + ENTRIES_AHEAD < count) {
        td_key_index_ask_entry(&x->keys, &keys[i + ENTRIES_AHEAD]);
    }
    if (i + LINKS_AHEAD < count) {
        const uint32_t at = td_key_index_find(&x->keys, &keys[i + LINKS_AHEAD]);
        if (at != NONE && x->entries[at].use.older != TD_LRU_NONE) {
            __builtin_prefetch(&x->entries[x->entries[at].use.older], 1);
        }
        if (at != NONE && x->entries[at].use.newer != TD_LRU_NONE) {
            __builtin_prefetch(&x->entries[x->entries[at].use.newer], 1);
        }
    }
}

void rtr_index_expect(rtr_index_t *x, const td_block_key_t *keys, uint32_t count, uint32_t slot)
{
    const stream_t *s = &x->streams[slot];

    TD_ASSERT(slot < x->slots_max);
    /* From the end: the first block, which all longer prefixes need, ends up the newest. */
    for (uint32_t i = TD_MIN(count, x->entries_max); i > 0; i--) {
        const uint32_t at = entry_use(x, &keys[i - 1]);
        (void)mark(x, at, s->lane, false); /* without room it is a hint less */
        if (s->filled != NONE && s->filled != s->lane) {
            (void)mark(x, at, s->filled, false);
        }
    }
}

void rtr_index_stored(rtr_index_t *x, const td_block_key_t *keys, uint32_t count, uint32_t slot)
{
    TD_ASSERT(slot < x->slots_max);
    for (uint32_t i = TD_MIN(count, x->entries_max); i > 0; i--) {
        (void)index_confirm(x, &keys[i - 1], x->streams[slot].lane);
    }
}

void rtr_index_removed(rtr_index_t *x, const td_block_key_t *key, uint32_t slot)
{
    TD_ASSERT(slot < x->slots_max);
    index_drop(x, key, x->streams[slot].lane);
}

/* --- matching --------------------------------------------------------------------------------- */

/* Lanes that hold all blocks so far: a few by number, or x->active. */
typedef struct active {
    bool few;
    uint32_t count;
    uint32_t lanes[INDEX_HOLDERS_INLINE];
    uint32_t *blocks_out;
} active_t;

static bool counts_here(const rtr_index_t *x, uint16_t holder)
{
    return bit_has(x->shown, lane_of(holder)) && !is_over(x, holder);
}

static void out_one(const rtr_index_t *x, const active_t *a, uint32_t lane, uint32_t blocks)
{
    a->blocks_out[x->lanes[lane].slot] = blocks;
}

static void out_word(const rtr_index_t *x, const active_t *a, uint32_t w, uint64_t bits,
                     uint32_t blocks)
{
    for (uint64_t left = bits; left != 0; left &= left - 1) {
        out_one(x, a, w * 64 + (uint32_t)__builtin_ctzll(left), blocks);
    }
}

/* Of whom an entry with few holders leaves: they go into a->lanes. */
static void take_few(rtr_index_t *x, const entry_t *e, active_t *a, bool first)
{
    a->few = true;
    a->count = 0;
    for (uint32_t i = 0; i < e->count; i++) {
        const uint32_t lane = lane_of(e->holders[i]);
        if (counts_here(x, e->holders[i]) && (first || bit_has(x->active, lane))) {
            a->lanes[a->count++] = lane;
        }
    }
}

static bool holds(const rtr_index_t *x, const entry_t *e, uint32_t lane)
{
    uint32_t i = 0;

    if (e->set != NONE) {
        return (set_word(x, e->set, lane / 64) >> (lane % 64) & 1) != 0;
    }
    i = inline_find(e, lane);
    return i < e->count && counts_here(x, e->holders[i]);
}

static void begin_with(rtr_index_t *x, const entry_t *e, active_t *a)
{
    if (e->set == NONE) {
        take_few(x, e, a, true);
        return;
    }
    a->few = false;
    for (uint32_t w = 0; w < x->words; w++) {
        x->active[w] = set_word(x, e->set, w) & x->shown[w];
    }
}

/* Who does not hold the block at this depth ends here, and is written once, not at each before. */
static void narrow(rtr_index_t *x, const entry_t *e, active_t *a, uint32_t depth)
{
    uint32_t left = 0;

    if (a->few) {
        for (uint32_t i = 0; i < a->count; i++) {
            if (holds(x, e, a->lanes[i])) {
                a->lanes[left++] = a->lanes[i];
            } else {
                out_one(x, a, a->lanes[i], depth);
            }
        }
        a->count = left;
        return;
    }
    if (e->set == NONE) {
        take_few(x, e, a, false);
        for (uint32_t i = 0; i < a->count; i++) {
            bit_clear(x->active, a->lanes[i]);
        }
    }
    for (uint32_t w = 0; w < x->words; w++) {
        const uint64_t now = a->few ? 0 : x->active[w] & set_word(x, e->set, w);
        out_word(x, a, w, x->active[w] & ~now, depth);
        x->active[w] = now;
    }
}

static bool is_empty(const rtr_index_t *x, const active_t *a)
{
    uint64_t any = 0;

    for (uint32_t w = 0; !a->few && w < x->words; w++) {
        any |= x->active[w];
    }
    return a->few ? a->count == 0 : any == 0;
}

uint32_t rtr_index_match(rtr_index_t *x, const td_block_key_t *keys, uint32_t count,
                         uint32_t *blocks_out)
{
    active_t a = {.few = true, .blocks_out = blocks_out};
    uint32_t found[RUN_KEYS];
    uint32_t depth = 0; /* blocks that those in a hold */

    memset(blocks_out, 0, x->slots_max * sizeof(*blocks_out));
    while (depth < count) {
        const uint32_t run = TD_MIN(count - depth, RUN_KEYS);
        const uint32_t here = td_key_index_find_run(&x->keys, keys + depth, run, found);
        for (uint32_t i = 0; i < here; i++) {
            if (depth == 0) {
                begin_with(x, &x->entries[found[i]], &a);
            } else {
                narrow(x, &x->entries[found[i]], &a, depth);
            }
            if (is_empty(x, &a)) {
                return depth;
            }
            depth++;
        }
        if (here < run) {
            break;
        }
    }
    for (uint32_t i = 0; a.few && i < a.count; i++) {
        out_one(x, &a, a.lanes[i], depth);
    }
    for (uint32_t w = 0; !a.few && w < x->words; w++) {
        out_word(x, &a, w, x->active[w], depth);
    }
    return depth;
}

/* --- lanes ------------------------------------------------------------------------------------ */

void index_lane_keep(rtr_index_t *x, uint32_t lane, bool keeps)
{
    if (keeps) {
        bit_set(x->keeps, lane);
    } else {
        bit_clear(x->keeps, lane);
    }
}

bool index_lane_keeps(const rtr_index_t *x, uint32_t lane)
{
    return bit_has(x->keeps, lane);
}

void index_lane_show(rtr_index_t *x, uint32_t lane)
{
    x->lanes[lane].state = LANE_SHOWN;
    bit_set(x->shown, lane);
}

void index_lane_retire(rtr_index_t *x, uint32_t lane)
{
    x->lanes[lane].state = LANE_RETIRED;
    x->lanes[lane].swept = false;
    bit_clear(x->shown, lane);
    bit_clear(x->keeps, lane);
    x->retired++;
}

static void begin_sweep(rtr_index_t *x)
{
    x->sweeping = true;
    x->sweep_at = 0;
    for (uint32_t i = 0; x->retired > 0 && i < x->lanes_max; i++) {
        x->lanes[i].swept = x->lanes[i].state == LANE_RETIRED;
    }
}

static void end_sweep(rtr_index_t *x)
{
    x->sweeping = false;
    for (uint32_t i = 0; x->retired > 0 && i < x->lanes_max; i++) {
        if (x->lanes[i].state == LANE_RETIRED && x->lanes[i].swept) {
            TD_ASSERT(x->lanes[i].held == 0);
            x->lanes[i] = (lane_t){.slot = x->lanes_free};
            x->lanes_free = i;
            x->retired--;
        }
    }
}

/* Takes out what nobody holds any more, and what was expected in vain. */
static void entry_clean(rtr_index_t *x, uint32_t at)
{
    entry_t *e = &x->entries[at];

    for (uint32_t i = e->set == NONE ? e->count : 0; i > 0; i--) {
        const uint16_t holder = e->holders[i - 1];
        if (x->lanes[lane_of(holder)].state == LANE_RETIRED || is_over(x, holder)) {
            inline_remove(x, e, i - 1);
        }
    }
    if (e->set != NONE) {
        set_turn(x, e);
        for (uint32_t w = 0; x->retired > 0 && w < x->words; w++) {
            uint64_t out = set_word(x, e->set, w) & ~x->shown[w];
            for (uint64_t left = out; left != 0; left &= left - 1) {
                const uint32_t lane = w * 64 + (uint32_t)__builtin_ctzll(left);
                if (x->lanes[lane].state != LANE_RETIRED) { /* a snapshot fills it */
                    out &= ~(left & -left);
                }
            }
            set_remove(x, e, w, out);
        }
    }
    entry_settle(x, at);
}

static void sweep(rtr_index_t *x, uint32_t entries)
{
    const uint32_t end = (uint32_t)TD_MIN((uint64_t)x->sweep_at + entries, x->high);

    for (; x->sweep_at < end; x->sweep_at++) {
        if (x->entries[x->sweep_at].count > 0) {
            entry_clean(x, x->sweep_at);
        }
    }
    if (x->sweep_at >= x->high) {
        end_sweep(x);
    }
}

uint32_t index_lane_new(rtr_index_t *x, uint32_t slot, lane_state_t state)
{
    uint32_t lane = 0;

    while (x->lanes_free == NONE && x->retired > 0) { /* many lives ended at once */
        if (!x->sweeping) {
            begin_sweep(x);
        }
        sweep(x, UINT32_MAX);
    }
    lane = x->lanes_free;
    if (lane == NONE) {
        return NONE;
    }
    x->lanes_free = x->lanes[lane].slot;
    x->lanes[lane] = (lane_t){.slot = slot, .state = (uint8_t)state};
    if (state == LANE_SHOWN) {
        index_lane_show(x, lane);
    }
    return lane;
}

void rtr_index_tick(rtr_index_t *x, uint64_t now_ns)
{
    if (x->epoch_end_ns == 0) {
        x->epoch_end_ns = now_ns + RTR_INDEX_EXPECT_MS * 1000000ull;
    }
    if (!x->sweeping && now_ns >= x->epoch_end_ns) {
        /* All that was over by the last epoch has been taken out: its mark can be used anew. */
        x->epoch++;
        x->epoch_end_ns = now_ns + RTR_INDEX_EXPECT_MS * 1000000ull;
        begin_sweep(x);
    } else if (!x->sweeping && x->retired > 0) {
        begin_sweep(x);
    }
    if (x->sweeping) {
        sweep(x, SWEEP_ENTRIES);
    }
}

#include "common/spec/td_suffix.h"

#include "common/base/td_base.h"

#define ROOT 0u
#define NONE UINT32_MAX

/* A class of substrings that end at the same places; the longest has `len` tokens. */
typedef struct state {
    uint32_t len;
    uint32_t link;  /* state of the longest suffix that ends at more places; NONE: the root's */
    uint32_t end;   /* index behind a place where it ends: the newest that is known of */
    uint32_t edges; /* list, NONE = empty */
} state_t;

typedef struct edge {
    uint32_t from;
    uint32_t token;
    uint32_t to;
    uint32_t next; /* of the same state */
} edge_t;

struct td_suffix {
    uint32_t tokens_max;
    uint32_t count;
    uint32_t state_count;
    uint32_t edge_count;
    uint32_t last;       /* state of the whole sequence */
    uint32_t match_len;  /* of the whole sequence's longest repeated suffix */
    uint32_t match_next; /* what followed it before */
    uint32_t slot_mask;
    uint32_t *tokens; /* owned; [tokens_max] */
    state_t *states;  /* owned; [2 * tokens_max] at most that many */
    edge_t *edges;    /* owned; [4 * tokens_max] */
    uint32_t *slots;  /* owned; [slot_mask + 1]: edge + 1 by state and token, 0 = empty */
};

td_status_t td_suffix_create(uint32_t tokens_max, td_suffix_t **out)
{
    td_suffix_t *s = NULL;
    uint32_t slots = 64;

    if (tokens_max == 0 || tokens_max > TD_SUFFIX_TOKENS_MAX) {
        return TD_ERR_INVALID;
    }
    s = td_calloc(1, sizeof(*s));
    if (s == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    while (slots < 6ull * tokens_max) { /* at most two thirds full */
        slots *= 2;
    }
    s->tokens_max = tokens_max;
    s->slot_mask = slots - 1;
    s->tokens = td_calloc(tokens_max, sizeof(*s->tokens));
    s->states = td_calloc(2 * (size_t)tokens_max + 1, sizeof(*s->states));
    s->edges = td_calloc(4 * (size_t)tokens_max + 1, sizeof(*s->edges));
    s->slots = td_calloc(slots, sizeof(*s->slots));
    if (s->tokens == NULL || s->states == NULL || s->edges == NULL || s->slots == NULL) {
        td_suffix_destroy(s);
        return TD_ERR_NO_MEMORY;
    }
    s->states[ROOT] = (state_t){.link = NONE, .edges = NONE};
    s->state_count = 1;
    *out = s;
    return TD_OK;
}

void td_suffix_destroy(td_suffix_t *s)
{
    if (s != NULL) {
        td_free(s->slots);
        td_free(s->edges);
        td_free(s->states);
        td_free(s->tokens);
        td_free(s);
    }
}

/* The slot of an edge, or the empty one where it would be. */
static uint32_t *slot_of(const td_suffix_t *s, uint32_t from, uint32_t token)
{
    uint64_t hash = ((uint64_t)from << 32 | token) * 0x9e3779b97f4a7c15u;
    uint32_t at = (uint32_t)(hash >> 32) & s->slot_mask;

    while (s->slots[at] != 0) {
        const edge_t *e = &s->edges[s->slots[at] - 1];
        if (e->from == from && e->token == token) {
            break;
        }
        at = (at + 1) & s->slot_mask;
    }
    return &s->slots[at];
}

static edge_t *edge_of(const td_suffix_t *s, uint32_t from, uint32_t token)
{
    const uint32_t slot = *slot_of(s, from, token);
    return slot == 0 ? NULL : &s->edges[slot - 1];
}

static void add_edge(td_suffix_t *s, uint32_t from, uint32_t token, uint32_t to)
{
    const uint32_t idx = s->edge_count++;

    s->edges[idx] = (edge_t){.from = from, .token = token, .to = to, .next = s->states[from].edges};
    s->states[from].edges = idx;
    *slot_of(s, from, token) = idx + 1;
}

/* The part of a state that is not longer than one token more than `from`, as a state of its own. */
static uint32_t split(td_suffix_t *s, uint32_t from, uint32_t token, uint32_t whole)
{
    const uint32_t part = s->state_count++;

    s->states[part] = s->states[whole];
    s->states[part].len = s->states[from].len + 1;
    s->states[part].edges = NONE;
    for (uint32_t e = s->states[whole].edges; e != NONE; e = s->edges[e].next) {
        add_edge(s, part, s->edges[e].token, s->edges[e].to);
    }
    s->states[whole].link = part;
    for (uint32_t at = from; at != NONE; at = s->states[at].link) {
        edge_t *e = edge_of(s, at, token);
        if (e == NULL || e->to != whole) {
            break;
        }
        e->to = part;
    }
    return part;
}

static void append(td_suffix_t *s, uint32_t token)
{
    const uint32_t whole = s->state_count++;
    uint32_t at = s->last;
    uint32_t link = ROOT;

    s->tokens[s->count++] = token;
    s->states[whole] = (state_t){.len = s->states[s->last].len + 1, .end = s->count, .edges = NONE};
    while (at != NONE && edge_of(s, at, token) == NULL) {
        add_edge(s, at, token, whole);
        at = s->states[at].link;
    }
    if (at != NONE) {
        link = edge_of(s, at, token)->to;
        if (s->states[link].len != s->states[at].len + 1) {
            link = split(s, at, token, link);
        }
    }
    s->states[whole].link = link;
    s->last = whole;
    s->match_len = s->states[link].len;
    s->match_next = s->states[link].end;
    s->states[link].end = s->count; /* it ends here as well, and this is newer */
}

void td_suffix_append(td_suffix_t *s, uint32_t token)
{
    if (s->count < s->tokens_max) {
        append(s, token);
    } else {
        s->match_len = 0;
    }
}

/* A mark is written with no edge leading to it: the automaton begins anew behind it, so nothing
 * that spans it is ever a substring. While all that stands behind a mark has been before, append()
 * makes states that nothing leads to, as long as their links; they cost an edge each. */
void td_suffix_append_mark(td_suffix_t *s)
{
    if (s->count < s->tokens_max) {
        s->tokens[s->count++] = TD_SUFFIX_MARK;
        s->last = ROOT;
    }
    s->match_len = 0;
}

uint32_t td_suffix_match(const td_suffix_t *s, uint32_t *next_out)
{
    *next_out = s->match_next;
    return s->match_len;
}

uint32_t td_suffix_count(const td_suffix_t *s)
{
    return s->count;
}

uint32_t td_suffix_token(const td_suffix_t *s, uint32_t idx)
{
    TD_ASSERT(idx < s->count);
    return s->tokens[idx];
}

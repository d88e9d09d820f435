#include "common/spec/td_draft_stats.h"

#include <math.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_lru.h"

#define NONE TD_LRU_NONE
#define ROW_COST_MIN 0.01 /* of a step: no row is free, however measured */

/* In a chain of its bucket, and in the list of all by the last report. */
typedef struct entry {
    td_draft_past_t past; /* first: an entry is found from what was lent */
    uint32_t chain;
    td_lru_link_t use;
} entry_t;

struct td_draft_stats {
    uint32_t entries_max;
    uint32_t bucket_mask;
    uint32_t count; /* entries [0, count) are in use */
    td_lru_t use;
    uint32_t *buckets; /* owned [bucket_mask + 1]: first of the chain */
    entry_t *entries;  /* owned [entries_max] */
};

td_status_t td_draft_stats_create(uint32_t entries_max, td_draft_stats_t **out)
{
    td_draft_stats_t *s = td_calloc(1, sizeof(*s));
    uint32_t buckets = 1;

    TD_ASSERT(entries_max >= 1 && entries_max <= 1u << 20);
    if (s == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    while (buckets < entries_max) {
        buckets *= 2;
    }
    s->entries = td_calloc(entries_max, sizeof(*s->entries));
    s->buckets = td_calloc(buckets, sizeof(*s->buckets));
    if (s->entries == NULL || s->buckets == NULL) {
        td_draft_stats_destroy(s);
        return TD_ERR_NO_MEMORY;
    }
    memset(s->buckets, 0xff, buckets * sizeof(*s->buckets));
    s->entries_max = entries_max;
    s->bucket_mask = buckets - 1;
    td_lru_init(&s->use, &s->entries[0].use, sizeof(*s->entries));
    *out = s;
    return TD_OK;
}

void td_draft_stats_destroy(td_draft_stats_t *s)
{
    if (s != NULL) {
        td_free(s->entries);
        td_free(s->buckets);
        td_free(s);
    }
}

/* --- the table -------------------------------------------------------------------------------- */

/* The tenant is a hash already; its classes and drafters shall not share a bucket. */
static uint32_t *bucket_of(const td_draft_stats_t *s, const td_draft_key_t *key)
{
    const uint64_t mixed =
        (key->tenant ^ (key->prompt_class * 64ull + key->drafter)) * 0x9e3779b97f4a7c15ull;
    return &s->buckets[(uint32_t)(mixed >> 32) & s->bucket_mask];
}

static bool is_key(const td_draft_key_t *a, const td_draft_key_t *b)
{
    return a->tenant == b->tenant && a->prompt_class == b->prompt_class && a->drafter == b->drafter;
}

static uint32_t find(const td_draft_stats_t *s, const td_draft_key_t *key)
{
    uint32_t at = *bucket_of(s, key);

    while (at != NONE && !is_key(&s->entries[at].past.key, key)) {
        at = s->entries[at].chain;
    }
    return at;
}

/* A free entry, or that of whoever was silent for longest. */
static uint32_t take(td_draft_stats_t *s)
{
    const uint32_t at = s->use.oldest;
    uint32_t *link = NULL;

    if (s->count < s->entries_max) {
        return s->count++;
    }
    link = bucket_of(s, &s->entries[at].past.key);
    while (*link != at) {
        link = &s->entries[*link].chain;
    }
    *link = s->entries[at].chain;
    td_lru_remove(&s->use, at);
    return at;
}

/* Found or made, and the newest from now on. */
static td_draft_past_t *open_entry(td_draft_stats_t *s, const td_draft_key_t *key)
{
    uint32_t at = find(s, key);

    if (at != NONE) {
        td_lru_remove(&s->use, at);
    } else {
        uint32_t *bucket = bucket_of(s, key);
        at = take(s);
        s->entries[at] = (entry_t){.past = {.key = *key}, .chain = *bucket};
        *bucket = at;
    }
    td_lru_add(&s->use, at);
    return &s->entries[at].past;
}

const td_draft_past_t *td_draft_stats_find(const td_draft_stats_t *s, const td_draft_key_t *key)
{
    const uint32_t at = find(s, key);
    return at == NONE ? NULL : &s->entries[at].past;
}

uint32_t td_draft_stats_count(const td_draft_stats_t *s)
{
    return s->count;
}

const td_draft_past_t *td_draft_stats_oldest(const td_draft_stats_t *s)
{
    return s->use.oldest == NONE ? NULL : &s->entries[s->use.oldest].past;
}

const td_draft_past_t *td_draft_stats_newer(const td_draft_stats_t *s, const td_draft_past_t *past)
{
    const uint32_t at = ((const entry_t *)past)->use.newer;
    return at == NONE ? NULL : &s->entries[at].past;
}

/* --- what is known, and forgotten ------------------------------------------------------------- */

void td_draft_stats_add(td_draft_stats_t *s, const td_draft_key_t *key, const td_draft_report_t *r)
{
    const double memory = pow(1 - 1.0 / TD_DRAFT_STATS_STEPS, r->steps);
    td_draft_past_t *p = NULL;
    double fresh = 0; /* what each of these steps counts, their own age included */

    TD_ASSERT(r->k_max <= TD_DRAFT_TOKENS_MAX);
    if (r->steps == 0 || r->k_max == 0) {
        return;
    }
    p = open_entry(s, key);
    fresh = (1 - memory) * TD_DRAFT_STATS_STEPS / r->steps;
    for (uint32_t i = 0; i < r->k_max; i++) { /* beyond it nothing could be tried */
        p->steps[i] = p->steps[i] * memory + fresh * r->steps;
        p->drafted[i] = p->drafted[i] * memory + fresh * r->drafted[i];
        p->accepted[i] = p->accepted[i] * memory + fresh * r->accepted[i];
    }
    p->tokens = p->tokens * memory + fresh * r->tokens;
    p->decode_s = p->decode_s * memory + fresh * (double)r->decode_ns / 1e9;
}

void td_draft_stats_merge(td_draft_stats_t *s, const td_draft_past_t *other)
{
    td_draft_past_t *p = open_entry(s, &other->key);
    double most = 0;

    for (uint32_t i = 0; i < TD_DRAFT_TOKENS_MAX; i++) {
        const double steps = p->steps[i] + other->steps[i];
        const double part = steps > TD_DRAFT_STATS_STEPS ? TD_DRAFT_STATS_STEPS / steps : 1;
        p->steps[i] = steps * part;
        p->drafted[i] = (p->drafted[i] + other->drafted[i]) * part;
        p->accepted[i] = (p->accepted[i] + other->accepted[i]) * part;
        most = TD_MAX(most, steps);
    }
    most = most > TD_DRAFT_STATS_STEPS ? TD_DRAFT_STATS_STEPS / most : 1;
    p->tokens = (p->tokens + other->tokens) * most;
    p->decode_s = (p->decode_s + other->decode_s) * most;
}

/* --- what it is worth ------------------------------------------------------------------------- */

double td_draft_worth(const td_draft_past_t *p, const td_draft_costs_t *c, uint32_t k)
{
    double tokens = 1;
    double time = 1;

    TD_ASSERT(k <= TD_DRAFT_TOKENS_MAX);
    for (uint32_t i = 0; i < k; i++) {
        if (p->drafted[i] >= TD_DRAFT_JUDGED_MIN) {
            const double row = TD_MAX(c->step[i + 1] - c->step[i], ROW_COST_MIN);
            tokens += p->accepted[i] / p->steps[i];
            time += p->drafted[i] / p->steps[i] * (row + c->pass);
        }
    }
    return tokens / time;
}

uint32_t td_draft_best_k(const td_draft_past_t *p, const td_draft_costs_t *c, uint32_t k_max,
                         double *worth_out)
{
    uint32_t best = 0;

    *worth_out = 1;
    for (uint32_t k = 1; k <= k_max; k++) {
        const double worth = td_draft_worth(p, c, k);
        if (worth >= *worth_out) {
            *worth_out = worth;
            best = k;
        }
    }
    return best;
}

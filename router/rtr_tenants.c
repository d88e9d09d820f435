#include "router/rtr_tenants.h"

#include <inttypes.h>
#include <sodium.h>
#include <stdio.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/wire/td_bus.h"

#define MINUTE_MS 60000
#define SALT_BYTES 32u

struct rtr_tenants {
    uint32_t count;
    bool everybody; /* the only one stands for all */
    rtr_tenant_t all[RTR_TENANTS_MAX];
};

/* --- the table -------------------------------------------------------------------------------- */

static bool terms_are_valid(const rtr_tenant_terms_t *t)
{
    return t->weight >= 1 && t->weight <= RTR_FAIR_WEIGHT_MAX &&
           t->requests <= RTR_TENANT_LIMIT_MAX && t->requests_per_minute <= RTR_TENANT_LIMIT_MAX &&
           t->tokens_per_minute <= RTR_TENANT_LIMIT_MAX;
}

static rtr_bucket_t bucket(uint32_t size)
{
    return (rtr_bucket_t){.size = size, .level = (int64_t)size * MINUTE_MS};
}

static void tenant_init(rtr_tenants_t *ts, const char *name, const rtr_tenant_terms_t *terms)
{
    rtr_tenant_t *t = &ts->all[ts->count];

    memset(t, 0, sizeof(*t));
    (void)snprintf(t->name, sizeof(t->name), "%s", name);
    t->index = ts->count++;
    t->terms = *terms;
    t->requests = bucket(terms->requests_per_minute);
    t->tokens = bucket(terms->tokens_per_minute);
}

td_status_t rtr_tenants_create(rtr_tenants_t **out)
{
    rtr_tenants_t *ts = td_calloc(1, sizeof(*ts));
    const rtr_tenant_terms_t terms = {.weight = 1};

    if (ts == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    tenant_init(ts, RTR_TENANT_EVERYBODY, &terms);
    ts->everybody = true;
    *out = ts;
    return TD_OK;
}

void rtr_tenants_destroy(rtr_tenants_t *ts)
{
    td_free(ts);
}

td_status_t rtr_tenants_add(rtr_tenants_t *ts, const char *name, const rtr_tenant_terms_t *terms,
                            rtr_tenant_t **out)
{
    const size_t len = strlen(name);

    if (len == 0 || len > RTR_TENANT_NAME_CHARS_MAX || !terms_are_valid(terms)) {
        return TD_ERR_INVALID;
    }
    if (ts->everybody) {
        ts->everybody = false;
        ts->count = 0;
    }
    if (rtr_tenants_find(ts, name) != NULL) {
        return TD_ERR_EXISTS;
    }
    if (ts->count == RTR_TENANTS_MAX) {
        return TD_ERR_TOO_LARGE;
    }
    tenant_init(ts, name, terms);
    *out = &ts->all[ts->count - 1];
    return TD_OK;
}

rtr_tenant_t *rtr_tenants_find(rtr_tenants_t *ts, const char *name)
{
    for (uint32_t i = 0; !ts->everybody && i < ts->count; i++) {
        if (strcmp(ts->all[i].name, name) == 0) {
            return &ts->all[i];
        }
    }
    return NULL;
}

uint32_t rtr_tenants_count(const rtr_tenants_t *ts)
{
    return ts->count;
}

rtr_tenant_t *rtr_tenants_at(rtr_tenants_t *ts, uint32_t index)
{
    TD_ASSERT(index < ts->count);
    return &ts->all[index];
}

td_status_t rtr_tenants_queue(const rtr_tenants_t *ts, rtr_fair_t **out)
{
    uint32_t weights[RTR_TENANTS_MAX];

    for (uint32_t i = 0; i < ts->count; i++) {
        weights[i] = ts->all[i].terms.weight;
    }
    return rtr_fair_create(weights, ts->count, out);
}

td_status_t rtr_tenant_salt(const rtr_tenant_t *tenant, const uint8_t *secret, td_str_t *salt)
{
    static const char purpose[] = "tandem tenant salt";
    crypto_generichash_state state;
    uint8_t hash[SALT_BYTES];

    if (tenant == NULL || tenant->terms.cache != RTR_CACHE_OWN) {
        return TD_OK;
    }
    (void)crypto_generichash_init(&state, secret, TD_CLUSTER_SECRET_BYTES, sizeof(hash));
    (void)crypto_generichash_update(&state, (const uint8_t *)purpose, sizeof(purpose));
    (void)crypto_generichash_update(&state, (const uint8_t *)tenant->name,
                                    strlen(tenant->name) + 1); /* the NUL ends the name */
    if (salt->len > 0) {
        (void)crypto_generichash_update(&state, (const uint8_t *)salt->bytes, salt->len);
    }
    (void)crypto_generichash_final(&state, hash, sizeof(hash));
    td_str_clear(salt);
    return td_str_append(salt, hash, sizeof(hash));
}

/* --- limits ----------------------------------------------------------------------------------- */

/* Whole milliseconds only, so that nothing is lost to division however often it is looked at. */
static void bucket_fill(rtr_bucket_t *b, uint64_t now_ns)
{
    const uint64_t now_ms = now_ns / TD_NS_PER_MS;
    const int64_t full = (int64_t)b->size * MINUTE_MS;
    const int64_t missing = full - b->level;

    if (b->size > 0 && now_ms > b->at_ms) {
        const uint64_t passed = now_ms - b->at_ms;
        b->level =
            passed >= (uint64_t)missing / b->size + 1 ? full : b->level + (int64_t)passed * b->size;
        b->level = TD_MIN(b->level, full);
    }
    b->at_ms = TD_MAX(b->at_ms, now_ms);
}

/* Milliseconds until it holds so much, or is full; 0: it does. */
static uint64_t bucket_wait_ms(const rtr_bucket_t *b, uint64_t units)
{
    const int64_t level = (int64_t)TD_MIN(units, b->size) * MINUTE_MS;

    return b->size == 0 || b->level >= level
               ? 0
               : ((uint64_t)(level - b->level) + b->size - 1) / b->size;
}

static void bucket_take(rtr_bucket_t *b, uint64_t units)
{
    b->level -= b->size == 0 ? 0 : (int64_t)units * MINUTE_MS;
}

static void bucket_give(rtr_bucket_t *b, uint64_t units)
{
    b->level = TD_MIN(b->level + (int64_t)units * MINUTE_MS, (int64_t)b->size * MINUTE_MS);
}

static uint32_t bucket_left(const rtr_bucket_t *b)
{
    return b->level <= 0 ? 0 : (uint32_t)(b->level / MINUTE_MS);
}

rtr_limits_view_t rtr_tenant_view(rtr_tenant_t *t, uint64_t now_ns)
{
    bucket_fill(&t->requests, now_ns);
    bucket_fill(&t->tokens, now_ns);
    return (rtr_limits_view_t){.requests = t->requests.size,
                               .requests_left = bucket_left(&t->requests),
                               .requests_reset_ms = bucket_wait_ms(&t->requests, UINT32_MAX),
                               .tokens = t->tokens.size,
                               .tokens_left = bucket_left(&t->tokens),
                               .tokens_reset_ms = bucket_wait_ms(&t->tokens, UINT32_MAX)};
}

/* Which limit is in the way, and for how long. */
static rtr_limit_t find_limit(const rtr_tenant_t *t, uint64_t tokens, uint64_t *wait_ms_out)
{
    const uint32_t running = atomic_load_explicit(&t->running, memory_order_relaxed);

    *wait_ms_out = 0;
    if (t->terms.requests > 0 && running >= t->terms.requests) {
        *wait_ms_out = 1; /* until one of them ends: nobody knows */
        return RTR_LIMIT_REQUESTS;
    }
    *wait_ms_out = bucket_wait_ms(&t->requests, 1);
    if (*wait_ms_out > 0) {
        return RTR_LIMIT_REQUESTS_PER_MINUTE;
    }
    *wait_ms_out = bucket_wait_ms(&t->tokens, tokens);
    return *wait_ms_out > 0 ? RTR_LIMIT_TOKENS_PER_MINUTE : RTR_LIMIT_NONE;
}

void rtr_tenant_admit(rtr_tenant_t *t, uint64_t tokens, uint64_t now_ns, rtr_grant_t *grant,
                      rtr_limits_view_t *view)
{
    rtr_limit_t limit = RTR_LIMIT_NONE;
    uint64_t wait_ms = 0;

    bucket_fill(&t->requests, now_ns);
    bucket_fill(&t->tokens, now_ns);
    tokens = TD_MIN(tokens, RTR_FAIR_COST_MAX);
    limit = find_limit(t, tokens, &wait_ms);
    *grant = (rtr_grant_t){0};
    if (limit == RTR_LIMIT_NONE) {
        bucket_take(&t->requests, 1);
        bucket_take(&t->tokens, tokens);
        (void)atomic_fetch_add_explicit(&t->running, 1, memory_order_relaxed);
        *grant = (rtr_grant_t){.held = true, .tokens = tokens};
    } else {
        (void)atomic_fetch_add_explicit(&t->limited[limit], 1, memory_order_relaxed);
    }
    *view = rtr_tenant_view(t, now_ns);
    view->refused_by = limit;
    view->retry_after_s = (uint32_t)TD_MIN((wait_ms + 999) / 1000, UINT32_MAX);
}

void rtr_tenant_release(rtr_tenant_t *t, rtr_grant_t *grant, uint64_t used, uint64_t now_ns)
{
    if (!grant->held) {
        return;
    }
    bucket_fill(&t->tokens, now_ns);
    bucket_give(&t->tokens, grant->tokens - TD_MIN(used, grant->tokens));
    (void)atomic_fetch_sub_explicit(&t->running, 1, memory_order_relaxed);
    *grant = (rtr_grant_t){0};
}

void rtr_limits_explain(const rtr_tenant_terms_t *terms, const rtr_limits_view_t *view,
                        uint64_t tokens, char *out, size_t room)
{
    if (view->refused_by == RTR_LIMIT_REQUESTS) {
        (void)snprintf(out, room, "Rate limit reached: %u requests at a time.", terms->requests);
    } else if (view->refused_by == RTR_LIMIT_REQUESTS_PER_MINUTE) {
        (void)snprintf(out, room,
                       "Rate limit reached: %u requests a minute. Try again in %u seconds.",
                       terms->requests_per_minute, view->retry_after_s);
    } else {
        (void)snprintf(out, room,
                       "Rate limit reached: %u tokens a minute. Left: %u, requested: %" PRIu64
                       ". Try again in %u seconds.",
                       terms->tokens_per_minute, view->tokens_left, tokens, view->retry_after_s);
    }
}

const char *rtr_limit_name(rtr_limit_t limit)
{
    static const char *const names[RTR_LIMITS] = {"none", "requests", "requests-per-minute",
                                                  "tokens-per-minute"};
    return names[limit];
}

/* --- counts ----------------------------------------------------------------------------------- */

void rtr_tenant_count_end(rtr_tenant_t *t, rtr_outcome_t outcome)
{
    if (t != NULL) {
        (void)atomic_fetch_add_explicit(&t->ended[outcome], 1, memory_order_relaxed);
    }
}

typedef struct sums {
    const char *name;
    uint64_t running;
    uint64_t queued;
    uint64_t ended[RTR_OUTCOME_COUNT];
    uint64_t limited[RTR_LIMITS];
    uint64_t prompt_tokens;
    uint64_t completion_tokens;
    uint64_t waits;
    uint64_t wait_ns;
} sums_t;

static void sums_add(sums_t *s, rtr_tenant_t *t)
{
    s->running += atomic_load_explicit(&t->running, memory_order_relaxed);
    s->queued += atomic_load_explicit(&t->queued, memory_order_relaxed);
    for (uint32_t i = 0; i < RTR_OUTCOME_COUNT; i++) {
        s->ended[i] += atomic_load_explicit(&t->ended[i], memory_order_relaxed);
    }
    for (uint32_t i = 0; i < RTR_LIMITS; i++) {
        s->limited[i] += atomic_load_explicit(&t->limited[i], memory_order_relaxed);
    }
    s->prompt_tokens += atomic_load_explicit(&t->prompt_tokens, memory_order_relaxed);
    s->completion_tokens += atomic_load_explicit(&t->completion_tokens, memory_order_relaxed);
    s->waits += atomic_load_explicit(&t->waits, memory_order_relaxed);
    s->wait_ns += atomic_load_explicit(&t->wait_ns, memory_order_relaxed);
}

#define SERIES "tandem_router_tenant_"

static td_status_t head(td_str_t *out, const char *name, const char *type, const char *help)
{
    return td_str_printf(out, "# HELP " SERIES "%s %s\n# TYPE " SERIES "%s %s\n", name, help, name,
                         type);
}

/* One number of each tenant; label: "" or `,kind="..."`. */
static td_status_t rows(td_str_t *out, const sums_t *s, uint32_t count, const char *name,
                        const char *label, size_t at)
{
    for (uint32_t i = 0; i < count; i++) {
        uint64_t value = 0;
        memcpy(&value, (const char *)&s[i] + at, sizeof(value));
        TD_TRY(td_str_printf(out, SERIES "%s{tenant=\"%s\"%s} %" PRIu64 "\n", name, s[i].name,
                             label, value));
    }
    return TD_OK;
}

static td_status_t write_series(const sums_t *s, uint32_t count, td_str_t *out)
{
    char label[64];

    TD_TRY(head(out, "requests_total", "counter",
                "Generation requests of a tenant by how they ended."));
    for (uint32_t i = 0; i < RTR_OUTCOME_COUNT; i++) {
        (void)snprintf(label, sizeof(label), ",outcome=\"%s\"", rtr_outcome_name((rtr_outcome_t)i));
        TD_TRY(rows(out, s, count, "requests_total", label,
                    offsetof(sums_t, ended) + i * sizeof(uint64_t)));
    }
    TD_TRY(head(out, "limited_total", "counter", "Requests that a limit of their tenant refused."));
    for (uint32_t i = RTR_LIMIT_NONE + 1; i < RTR_LIMITS; i++) {
        (void)snprintf(label, sizeof(label), ",limit=\"%s\"", rtr_limit_name((rtr_limit_t)i));
        TD_TRY(rows(out, s, count, "limited_total", label,
                    offsetof(sums_t, limited) + i * sizeof(uint64_t)));
    }
    TD_TRY(head(out, "tokens_total", "counter",
                "Tokens of prompts that were placed, and of answers, also of those that failed."));
    TD_TRY(
        rows(out, s, count, "tokens_total", ",kind=\"prompt\"", offsetof(sums_t, prompt_tokens)));
    TD_TRY(rows(out, s, count, "tokens_total", ",kind=\"completion\"",
                offsetof(sums_t, completion_tokens)));
    TD_TRY(head(out, "waits_total", "counter", "Prompts that waited for room on a node."));
    TD_TRY(rows(out, s, count, "waits_total", "", offsetof(sums_t, waits)));
    TD_TRY(
        head(out, "wait_seconds_total", "counter", "How long prompts waited for room on a node."));
    for (uint32_t i = 0; i < count; i++) {
        TD_TRY(td_str_printf(out, SERIES "wait_seconds_total{tenant=\"%s\"} %.6f\n", s[i].name,
                             (double)s[i].wait_ns / (double)TD_NS_PER_S));
    }
    TD_TRY(head(out, "requests_running", "gauge", "Requests admitted and not ended."));
    TD_TRY(rows(out, s, count, "requests_running", "", offsetof(sums_t, running)));
    TD_TRY(head(out, "queue_tickets", "gauge", "Prompts waiting for room on a node."));
    return rows(out, s, count, "queue_tickets", "", offsetof(sums_t, queued));
}

td_status_t rtr_tenants_series(rtr_tenants_t *ts, td_str_t *out)
{
    sums_t sums[RTR_TENANTS_SHOWN + 1] = {{0}};
    uint32_t count = 0;

    for (uint32_t i = 0; i < ts->count; i++) {
        count = TD_MIN(i, RTR_TENANTS_SHOWN);
        sums[count].name = count < RTR_TENANTS_SHOWN ? ts->all[i].name : RTR_TENANT_REST;
        sums_add(&sums[count], &ts->all[i]);
    }
    return write_series(sums, count + 1, out);
}

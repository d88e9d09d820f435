#include "router/rtr_drafters.h"

#include <inttypes.h>
#include <pthread.h>
#include <sodium.h>
#include <stdio.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/kv/td_block_key.h"

#define PUBLISH_MS 250u
#define ROW_COST_PRIOR 0.15 /* of a step, for each draft, until a node says more */

/* A tenant that has series of its own. Counts of what drafts gave since it has them. */
typedef struct tenant_use {
    uint64_t tenant;
    uint64_t requests; /* 0: the place is free */
    uint64_t accepted;
    uint64_t rejected;
} tenant_use_t;

struct rtr_drafters {
    rtr_drafters_config_t config;
    td_draft_stats_t *stats;                       /* owned */
    uint8_t prompt_key[crypto_shorthash_KEYBYTES]; /* drawn at the start */
    uint64_t answered[RTR_DRAFT_PROMPTS_MAX]; /* names of prompts, each in the slot of its name */
    tenant_use_t tenants[RTR_DRAFT_TENANTS_MAX];
    uint64_t reports; /* taken since the start */
    bool changed;     /* since it was shown */
    uint64_t next_publish_ns;
    pthread_mutex_t mu; /* guards the two texts; a leaf */
    td_str_t json;
    td_str_t series;
};

td_status_t rtr_drafters_create(const rtr_drafters_config_t *config, rtr_drafters_t **out)
{
    rtr_drafters_t *ds = td_calloc(1, sizeof(*ds));
    td_status_t status = TD_ERR_NO_MEMORY;

    if (ds == NULL) {
        return status;
    }
    status = td_draft_stats_create(RTR_DRAFT_ENTRIES_MAX, &ds->stats);
    if (status != TD_OK) {
        td_free(ds);
        return status;
    }
    ds->config = *config;
    ds->changed = true;
    crypto_shorthash_keygen(ds->prompt_key);
    (void)pthread_mutex_init(&ds->mu, NULL);
    *out = ds;
    return TD_OK;
}

void rtr_drafters_destroy(rtr_drafters_t *ds)
{
    if (ds == NULL) {
        return;
    }
    td_draft_stats_destroy(ds->stats);
    td_str_fini(&ds->json);
    td_str_fini(&ds->series);
    (void)pthread_mutex_destroy(&ds->mu);
    td_free(ds);
}

uint64_t rtr_drafters_tenant(const uint8_t *secret, const char *salt, size_t salt_len)
{
    uint8_t hash[crypto_generichash_BYTES_MIN];
    uint64_t name = 0;

    if (salt_len == 0) {
        return 0;
    }
    (void)crypto_generichash(hash, sizeof(hash), (const uint8_t *)salt, salt_len, secret,
                             TD_CLUSTER_SECRET_BYTES);
    memcpy(&name, hash, sizeof(name));
    return name == 0 ? 1 : name;
}

const char *rtr_draft_why_name(rtr_draft_why_t why)
{
    static const char *const names[RTR_DRAFT_WHYS] = {"asked", "default", "learned", "explored"};
    return names[why];
}

/* --- the choice ------------------------------------------------------------------------------- */

static bool offers(uint32_t offered, td_drafter_t drafter)
{
    return (offered & 1u << drafter) != 0;
}

/* What an open request may get: first what costs next to nothing where it finds nothing. memo falls
 * back to prompt_lookup, so where there is memo the other is no choice. Answers how many. */
static uint32_t list_drafters(uint32_t offered, td_drafter_t out[TD_DRAFTER_KINDS])
{
    static const td_drafter_t others[] = {TD_DRAFTER_MEDUSA, TD_DRAFTER_DRAFT_MODEL,
                                          TD_DRAFTER_EARLY_EXIT, TD_DRAFTER_LOOKAHEAD};
    uint32_t count = 0;

    out[count++] = offered == 0 || offers(offered, TD_DRAFTER_MEMO) ? TD_DRAFTER_MEMO
                                                                    : TD_DRAFTER_PROMPT_LOOKUP;
    for (size_t i = 0; i < TD_ARRAY_LEN(others); i++) {
        if (offers(offered, others[i])) {
            out[count++] = others[i];
        }
    }
    return count;
}

static td_draft_costs_t costs_of(const td_msg_heartbeat_t *beat, td_drafter_t drafter)
{
    td_draft_costs_t costs = {0};
    const bool told = beat->step_cost_count == TD_DRAFT_TOKENS_MAX + 1;

    for (uint32_t k = 0; k <= TD_DRAFT_TOKENS_MAX; k++) {
        costs.step[k] = told ? (double)beat->step_costs[k] : 1 + ROW_COST_PRIOR * k;
    }
    costs.pass = (uint32_t)drafter < beat->pass_cost_count ? (double)beat->pass_costs[drafter] : 0;
    return costs;
}

/* NULL: too little to judge by. */
static const td_draft_past_t *past_of(const rtr_drafters_t *ds, const rtr_draft_ask_t *ask,
                                      td_drafter_t drafter)
{
    const td_draft_key_t key = {
        .tenant = ask->tenant, .prompt_class = ask->prompt_class, .drafter = drafter};
    const td_draft_past_t *past = td_draft_stats_find(ds->stats, &key);

    return past == NULL || past->steps[0] < RTR_DRAFT_STEPS_MIN ? NULL : past;
}

/* The best of those that were watched for long enough. Until the first of the list was, it is what
 * is chosen, with all of k: the node finds out by itself what pays. */
static void choose_by_past(const rtr_drafters_t *ds, const rtr_draft_ask_t *ask,
                           const td_drafter_t *list, uint32_t count, const td_msg_heartbeat_t *beat,
                           rtr_draft_choice_t *choice)
{
    double most = -1;

    if (past_of(ds, ask, list[0]) == NULL) {
        return;
    }
    for (uint32_t i = 0; i < count; i++) {
        const td_draft_past_t *past = past_of(ds, ask, list[i]);
        const td_draft_costs_t costs = costs_of(beat, list[i]);
        double worth = 0;
        uint32_t k = ask->k_max;
        if (past == NULL) {
            continue;
        }
        if (ask->has_k) {
            worth = td_draft_worth(past, &costs, k);
        } else {
            k = td_draft_best_k(past, &costs, ask->k_max, &worth);
        }
        if (worth > most) {
            most = worth;
            choice->drafter = list[i];
            choice->k_max = k;
            choice->why = RTR_DRAFT_LEARNED;
        }
    }
}

rtr_draft_choice_t rtr_drafters_choose(const rtr_drafters_t *ds, const rtr_draft_ask_t *ask,
                                       uint32_t offered, const td_msg_heartbeat_t *costs)
{
    rtr_draft_choice_t choice = {
        .drafter = ask->drafter, .k_min = ask->k_min, .k_max = ask->k_max, .why = RTR_DRAFT_ASKED};
    td_drafter_t list[TD_DRAFTER_KINDS];
    uint32_t count = 0;

    if (!ask->is_auto || ask->drafter == TD_DRAFTER_NONE || ask->k_max == 0) {
        return choice;
    }
    count = list_drafters(offered, list);
    choice.drafter = list[0];
    choice.why = RTR_DRAFT_DEFAULT;
    if (!ask->has_k && ask->ticket % 100 < ds->config.explore_percent) {
        choice.drafter = list[ask->ticket / 100 % count]; /* with all of k */
        choice.why = RTR_DRAFT_EXPLORED;
    } else {
        choose_by_past(ds, ask, list, count, costs, &choice);
    }
    return choice;
}

void rtr_drafters_count(rtr_drafters_t *ds, const rtr_draft_choice_t *choice)
{
    td_metric_add(ds->config.metrics->drafts.choices[choice->why], 1);
}

/* --- what it goes by -------------------------------------------------------------------------- */

/* The name of a tenant's prompt, and the slot that it has. Keyed: nobody can make a prompt that has
 * the name of another tenant's, and so learn whether that was asked. */
static uint64_t name_prompt(const rtr_drafters_t *ds, uint64_t tenant, uint64_t prompt_hash,
                            uint32_t *slot_out)
{
    const uint64_t both[2] = {tenant, prompt_hash};
    uint8_t hash[crypto_shorthash_BYTES];
    uint64_t name = 0;

    (void)crypto_shorthash(hash, (const uint8_t *)both, sizeof(both), ds->prompt_key);
    memcpy(&name, hash, sizeof(name));
    *slot_out = (uint32_t)(name >> 40) % RTR_DRAFT_PROMPTS_MAX;
    return name | 1; /* 0: free */
}

uint32_t rtr_drafters_class(const rtr_drafters_t *ds, uint64_t tenant, uint64_t prompt_hash,
                            rtr_prompt_class_t by_tokens)
{
    uint32_t slot = 0;
    const uint64_t name = name_prompt(ds, tenant, prompt_hash, &slot);

    return ds->answered[slot] == name ? RTR_PROMPT_HOT : (uint32_t)by_tokens;
}

/* The place of a tenant. One that is new takes that of who asked least, and inherits its count of
 * requests: so whoever asks much stays, and memory is bounded (Metwally et al., "Efficient
 * computation of frequent and top-k elements in data streams", 2005). */
static tenant_use_t *place_of(rtr_drafters_t *ds, uint64_t tenant)
{
    tenant_use_t *least = &ds->tenants[0];

    for (uint32_t i = 0; i < RTR_DRAFT_TENANTS_MAX; i++) {
        tenant_use_t *t = &ds->tenants[i];
        if (t->requests > 0 && t->tenant == tenant) {
            return t;
        }
        least = t->requests < least->requests ? t : least;
    }
    *least = (tenant_use_t){.tenant = tenant, .requests = least->requests};
    return least;
}

static void count_report(rtr_drafters_t *ds, tenant_use_t *use, const td_msg_drafts_t *r)
{
    rtr_draft_metrics_t *m = &ds->config.metrics->drafts;

    td_metric_add(m->steps[r->drafter], r->steps);
    td_metric_add(r->saved_ns < 0 ? m->lost[r->drafter] : m->saved[r->drafter],
                  r->saved_ns < 0 ? 0 - (uint64_t)r->saved_ns : (uint64_t)r->saved_ns);
    for (uint32_t i = 0; i < r->k_max; i++) {
        const uint32_t rejected = r->drafted[i] - r->accepted[i];
        td_metric_add(m->accepted[r->drafter][i], r->accepted[i]);
        td_metric_add(m->rejected[r->drafter][i], rejected);
        use->accepted += r->accepted[i];
        use->rejected += rejected;
    }
}

void rtr_drafters_answered(rtr_drafters_t *ds, uint64_t tenant, uint32_t prompt_class,
                           uint64_t prompt_hash, const td_msg_drafts_t *r)
{
    const td_draft_key_t key = {
        .tenant = tenant, .prompt_class = prompt_class, .drafter = r->drafter};
    td_draft_report_t report = {
        .k_max = r->k_max, .steps = r->steps, .tokens = r->tokens, .decode_ns = r->decode_ns};
    tenant_use_t *use = place_of(ds, tenant);
    uint32_t slot = 0;
    const uint64_t name = name_prompt(ds, tenant, prompt_hash, &slot);

    ds->answered[slot] = name;
    ds->changed = true;
    use->requests++;
    if (r->k_max == 0 || r->drafter == TD_DRAFTER_NONE || r->drafter >= TD_DRAFTER_KINDS) {
        return; /* nothing could be drafted, or by what only a newer node knows */
    }
    memcpy(report.drafted, r->drafted, sizeof(report.drafted));
    memcpy(report.accepted, r->accepted, sizeof(report.accepted));
    ds->reports++;
    td_draft_stats_add(ds->stats, &key, &report);
    count_report(ds, use, r);
    td_metric_set(ds->config.metrics->drafts.entries, td_draft_stats_count(ds->stats));
}

void rtr_drafters_remember(rtr_drafters_t *ds, const td_msg_draft_history_t *history)
{
    for (uint32_t i = 0; i < history->count; i++) {
        const td_msg_draft_past_t *m = &history->past[i];
        td_draft_past_t past = {.key = {m->tenant, m->prompt_class, m->drafter},
                                .tokens = m->tokens,
                                .decode_s = m->decode_s};
        memcpy(past.steps, m->steps, sizeof(past.steps));
        memcpy(past.drafted, m->drafted, sizeof(past.drafted));
        memcpy(past.accepted, m->accepted, sizeof(past.accepted));
        if (past.key.drafter < TD_DRAFTER_KINDS) {
            td_draft_stats_merge(ds->stats, &past);
        }
    }
    ds->changed = true;
    td_metric_set(ds->config.metrics->drafts.entries, td_draft_stats_count(ds->stats));
}

const td_draft_stats_t *rtr_drafters_stats(const rtr_drafters_t *ds)
{
    return ds->stats;
}

uint64_t rtr_drafters_reports(const rtr_drafters_t *ds)
{
    return ds->reports;
}

uint32_t rtr_drafters_explore(const rtr_drafters_t *ds)
{
    return ds->config.explore_percent;
}

void rtr_drafters_set_explore(rtr_drafters_t *ds, uint32_t percent)
{
    TD_ASSERT(percent <= 100);
    ds->config.explore_percent = percent;
}

/* --- what it shows ---------------------------------------------------------------------------- */

static td_status_t write_numbers(const char *name, const double *values, td_str_t *out)
{
    TD_TRY(td_str_printf(out, ",\"%s\":[", name));
    for (uint32_t i = 0; i < TD_DRAFT_TOKENS_MAX; i++) {
        TD_TRY(td_str_printf(out, "%s%.3f", i > 0 ? "," : "", values[i]));
    }
    return td_str_append_text(out, "]");
}

static td_status_t write_entry(const td_draft_past_t *p, bool first, td_str_t *out)
{
    const double rate = p->decode_s > 0 ? p->tokens / p->decode_s : 0;

    TD_TRY(td_str_printf(out,
                         "%s{\"tenant\":\"%016" PRIx64 "\",\"class\":\"%s\",\"drafter\":\"%s\","
                         "\"tokens_per_step\":%.3f,\"tokens_per_s\":%.3f",
                         first ? "\n" : ",\n", p->key.tenant,
                         rtr_prompt_class_name(p->key.prompt_class),
                         td_drafter_name((td_drafter_t)p->key.drafter),
                         p->steps[0] > 0 ? p->tokens / p->steps[0] : 0, rate));
    TD_TRY(write_numbers("steps", p->steps, out));
    TD_TRY(write_numbers("drafted", p->drafted, out));
    TD_TRY(write_numbers("accepted", p->accepted, out));
    return td_str_append_text(out, "}");
}

static td_status_t write_json(const rtr_drafters_t *ds, td_str_t *out)
{
    const uint32_t count = td_draft_stats_count(ds->stats);
    const td_draft_past_t *p = td_draft_stats_oldest(ds->stats);
    bool first = true;

    TD_TRY(td_str_printf(out, "{\"reports\":%" PRIu64 ",\"entries\":%u,\"newest\":[", ds->reports,
                         count));
    for (uint32_t i = 0; p != NULL; i++, p = td_draft_stats_newer(ds->stats, p)) {
        if (i + RTR_DRAFT_SHOWN_MAX >= count) {
            TD_TRY(write_entry(p, first, out));
            first = false;
        }
    }
    return td_str_append_text(out, "]}\n");
}

/* The registry of series takes closed sets of labels only, and these come and go. */
static td_status_t write_series(const rtr_drafters_t *ds, td_str_t *out)
{
    static const char *const results[] = {"accepted", "rejected"};
    const char *name = "tandem_router_tenant_draft_tokens";

    TD_TRY(td_str_printf(out,
                         "# HELP %s Drafts that were verified, of the tenants that ask the most, "
                         "each since it is one of them.\n# TYPE %s gauge\n",
                         name, name));
    for (uint32_t i = 0; i < RTR_DRAFT_TENANTS_MAX; i++) {
        const tenant_use_t *t = &ds->tenants[i];
        const uint64_t values[] = {t->accepted, t->rejected};
        for (size_t r = 0; t->requests > 0 && r < TD_ARRAY_LEN(results); r++) {
            TD_TRY(td_str_printf(out, "%s{tenant=\"%016" PRIx64 "\",result=\"%s\"} %" PRIu64 "\n",
                                 name, t->tenant, results[r], values[r]));
        }
    }
    return TD_OK;
}

void rtr_drafters_tick(rtr_drafters_t *ds)
{
    const uint64_t now = td_now_ns();
    td_str_t json = {0};
    td_str_t series = {0};

    if (!ds->changed || now < ds->next_publish_ns) {
        return;
    }
    ds->next_publish_ns = now + PUBLISH_MS * TD_NS_PER_MS;
    if (write_json(ds, &json) == TD_OK && write_series(ds, &series) == TD_OK) {
        td_str_t old_json = ds->json;
        td_str_t old_series = ds->series;
        ds->changed = false;
        (void)pthread_mutex_lock(&ds->mu);
        ds->json = json;
        ds->series = series;
        (void)pthread_mutex_unlock(&ds->mu);
        json = old_json;
        series = old_series;
    }
    td_str_fini(&json);
    td_str_fini(&series);
}

static td_status_t append(rtr_drafters_t *ds, const td_str_t *text, td_str_t *out)
{
    td_status_t status = TD_OK;

    (void)pthread_mutex_lock(&ds->mu);
    if (text->len > 0) {
        status = td_str_append(out, text->bytes, text->len);
    }
    (void)pthread_mutex_unlock(&ds->mu);
    return status;
}

td_status_t rtr_drafters_json(rtr_drafters_t *ds, td_str_t *out)
{
    return append(ds, &ds->json, out);
}

td_status_t rtr_drafters_series(rtr_drafters_t *ds, td_str_t *out)
{
    return append(ds, &ds->series, out);
}

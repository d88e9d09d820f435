/* rtr_drafters.h - what drafts were worth, and what to choose: for a request that leaves it open,
 * the drafter and the bound of k that give the most tokens for their cost on the node it goes to.
 * What it goes by are the reports of the tenant's own requests of that class of prompt; a small
 * share of requests tries what isn't chosen. No choice changes a token (I1).
 * Threads: loop; rtr_drafters_json() and rtr_drafters_series(): any. Design: router/DESIGN.md,
 * "What drafts were worth". */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "common/base/td_buf.h"
#include "common/spec/td_draft_stats.h"
#include "common/wire/td_msg.h"
#include "router/rtr_metrics.h"
#include "router/rtr_prompt_class.h"

#define RTR_DRAFT_ENTRIES_MAX 4096u /* tenants, classes and drafters; 2 MiB */
#define RTR_DRAFT_PROMPTS_MAX 8192u /* prompts remembered as answered */
#define RTR_DRAFT_TENANTS_MAX 8u    /* with series of their own: those that ask the most */
#define RTR_DRAFT_SHOWN_MAX 64u     /* entries of the JSON view, the newest */
#define RTR_DRAFT_STEPS_MIN 64.0    /* that a drafter was watched before it is judged */

typedef struct rtr_drafters rtr_drafters_t;

typedef struct rtr_drafters_config {
    rtr_metrics_t *metrics;
    uint32_t explore_percent; /* of the requests that leave all open */
} rtr_drafters_config_t;

/** What a prompt's request says, and whose it is. */
typedef struct rtr_draft_ask {
    uint64_t ticket;
    uint64_t tenant;
    uint32_t prompt_class;
    bool is_auto;         /* the drafter is open; else as named here: */
    td_drafter_t drafter; /* TD_DRAFTER_NONE: nothing is drafted */
    bool has_k;           /* k_min and k_max were asked for; else they are open up to k_max */
    uint32_t k_min;
    uint32_t k_max;
} rtr_draft_ask_t;

typedef struct rtr_draft_choice {
    td_drafter_t drafter;
    uint32_t k_min;
    uint32_t k_max; /* 0: nothing is drafted */
    rtr_draft_why_t why;
} rtr_draft_choice_t;

/** Errors: TD_ERR_NO_MEMORY. Owner: the caller ends it with rtr_drafters_destroy(). */
TD_MUST_CHECK td_status_t rtr_drafters_create(const rtr_drafters_config_t *config,
                                              rtr_drafters_t **out);
void rtr_drafters_destroy(rtr_drafters_t *ds); /* NULL is allowed */
/** Names a tenant by its cache salt, which nobody can tell from the name. 0: no salt.
 * secret: [TD_CLUSTER_SECRET_BYTES]. */
uint64_t rtr_drafters_tenant(const uint8_t *secret, const char *salt, size_t salt_len);
/** The choice for a node that offers these drafters (bits; 0: it doesn't say) at these costs. */
rtr_draft_choice_t rtr_drafters_choose(const rtr_drafters_t *ds, const rtr_draft_ask_t *ask,
                                       uint32_t offered, const td_msg_heartbeat_t *costs);
/** Counts a choice; a request that is tried again is counted once for each try. */
void rtr_drafters_count(rtr_drafters_t *ds, const rtr_draft_choice_t *choice);
/** A prompt was answered; report: of its drafts. It may be chosen by from now on. */
void rtr_drafters_answered(rtr_drafters_t *ds, uint64_t tenant, uint32_t prompt_class,
                           uint64_t prompt_hash, const td_msg_drafts_t *report);
/** The class of a prompt, hot if this tenant has had it answered lately. */
uint32_t rtr_drafters_class(const rtr_drafters_t *ds, uint64_t tenant, uint64_t prompt_hash,
                            rtr_prompt_class_t by_tokens);
/** What a node knows of the time before this router began. */
void rtr_drafters_remember(rtr_drafters_t *ds, const td_msg_draft_history_t *history);
/** What is known, for who reads it all; the reports taken since the start; the policy. */
const td_draft_stats_t *rtr_drafters_stats(const rtr_drafters_t *ds);
uint64_t rtr_drafters_reports(const rtr_drafters_t *ds);
uint32_t rtr_drafters_explore(const rtr_drafters_t *ds);
/** percent: 0 to 100. */
void rtr_drafters_set_explore(rtr_drafters_t *ds, uint32_t percent);
/** Refreshes what the next two show. */
void rtr_drafters_tick(rtr_drafters_t *ds);
/** Appends what is known, as JSON. */
TD_MUST_CHECK td_status_t rtr_drafters_json(rtr_drafters_t *ds, td_str_t *out);
/** Appends the tenants' series, as Prometheus text. */
TD_MUST_CHECK td_status_t rtr_drafters_series(rtr_drafters_t *ds, td_str_t *out);
/** "default", "learned", ... */
const char *rtr_draft_why_name(rtr_draft_why_t why);

/* td_draft_stats.h - what drafts have been worth lately: by tenant, class of prompt, drafter, and
 * position in the draft. The router chooses by it; the nodes keep the same of what they did, for a
 * router that begins anew. Nothing here changes a token.
 * Threads: owner. All memory is taken by create. Design: common/spec/DESIGN.md, "What drafts were
 * worth". */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "common/base/td_status.h"
#include "common/spec/td_draft.h"

/* What is known of a position weighs as many steps at most: with each new one, the steps before
 * count for 1 - 1 / this of what they did. */
#define TD_DRAFT_STATS_STEPS 512u

typedef struct td_draft_key {
    uint64_t tenant;
    uint32_t prompt_class; /* the router's; the same number is the same class */
    uint32_t drafter;      /* td_drafter_t */
} td_draft_key_t;

/** Of one request. */
typedef struct td_draft_report {
    uint32_t k_max; /* positions that a draft could have, <= TD_DRAFT_TOKENS_MAX */
    uint32_t steps; /* of all choices */
    uint32_t drafted[TD_DRAFT_TOKENS_MAX];  /* and verified; [i] <= steps */
    uint32_t accepted[TD_DRAFT_TOKENS_MAX]; /* [i] <= drafted[i] */
    uint32_t tokens;                        /* that the steps gave */
    uint64_t decode_ns;
} td_draft_report_t;

/** Of many, the older the less. Index i is the draft's token i + 1. */
typedef struct td_draft_past {
    td_draft_key_t key;
    double steps[TD_DRAFT_TOKENS_MAX]; /* in which a draft could have had this position */
    double drafted[TD_DRAFT_TOKENS_MAX];
    double accepted[TD_DRAFT_TOKENS_MAX];
    double tokens;
    double decode_s;
} td_draft_past_t;

typedef struct td_draft_stats td_draft_stats_t;

/** Errors: TD_ERR_NO_MEMORY. entries_max >= 1; past it the least recently reported goes.
 * Owner:  the caller ends it with td_draft_stats_destroy(). */
TD_MUST_CHECK td_status_t td_draft_stats_create(uint32_t entries_max, td_draft_stats_t **out);
void td_draft_stats_destroy(td_draft_stats_t *stats); /* NULL is allowed */
/** Takes a request's report. One without steps or positions says nothing. */
void td_draft_stats_add(td_draft_stats_t *stats, const td_draft_key_t *key,
                        const td_draft_report_t *report);
/** Adds what somebody else knows of past->key; together it weighs no more than if it was one's own.
 */
void td_draft_stats_merge(td_draft_stats_t *stats, const td_draft_past_t *past);
/** NULL: nothing is known. Owner: the table, until the next add or merge. */
const td_draft_past_t *td_draft_stats_find(const td_draft_stats_t *stats,
                                           const td_draft_key_t *key);
uint32_t td_draft_stats_count(const td_draft_stats_t *stats);
/** The least recently reported, and the next one after an entry; NULL: there is none. */
const td_draft_past_t *td_draft_stats_oldest(const td_draft_stats_t *stats);
const td_draft_past_t *td_draft_stats_newer(const td_draft_stats_t *stats,
                                            const td_draft_past_t *past);

/** Costs of a choice's share of a step, in shares of a step without drafts. */
typedef struct td_draft_costs {
    double step[TD_DRAFT_TOKENS_MAX + 1]; /* with so many drafts; [0] is 1 */
    double pass;                          /* of a draft, besides: its drafter's pass */
} td_draft_costs_t;

/** Tokens in the time of a step without drafts, if drafts end at k; 1 is what no drafts give.
 * It is what was seen: (1 + accepted a step, positions 1..k) / (1 + what the drafted ones cost).
 * Where each step drafts k tokens and each is accepted with probability alpha, that is
 * td_spec_expected_tokens(alpha, k) / (step[k] + k * pass). Of a position of which fewer than
 * TD_DRAFT_JUDGED_MIN drafts are known neither counts. */
#define TD_DRAFT_JUDGED_MIN 8.0
double td_draft_worth(const td_draft_past_t *past, const td_draft_costs_t *costs, uint32_t k);
/** The bound up to k_max that is worth the most; of equals the largest, since a node drafts less by
 * itself. *worth_out: what it is worth. */
uint32_t td_draft_best_k(const td_draft_past_t *past, const td_draft_costs_t *costs, uint32_t k_max,
                         double *worth_out);

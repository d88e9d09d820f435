/* rtr_trace.h - how requests were placed lately, with what was known then: the newest decisions are
 * kept, for operators. Never prompts or tokens. Threads: loop. */
#pragma once

#include <stdint.h>

#include "common/base/td_status.h"
#include "common/wire/td_msg.h"
#include "router/rtr_drafters.h"
#include "router/rtr_placement.h"
#include "router/rtr_request.h"

#define RTR_TRACE_MAX 512u          /* decisions kept */
#define RTR_TRACE_CANDIDATES_MAX 8u /* of a role, in a decision: the chosen one, and others */

typedef struct rtr_trace_prefill {
    char node[TD_MSG_ID_CHARS_MAX + 1];
    rtr_prefill_explained_t why;
} rtr_trace_prefill_t;

typedef struct rtr_trace_decode {
    char node[TD_MSG_ID_CHARS_MAX + 1];
    uint32_t running;
    uint32_t free_blocks;
    rtr_decode_explained_t why;
} rtr_trace_decode_t;

typedef struct rtr_trace_decision {
    uint64_t number; /* 1, 2, ... of this life of the router; 0: none */
    uint64_t time_ms;
    char request[RTR_REQUEST_ID_CHARS_MAX + 1];
    uint32_t prompt; /* of the request's */
    uint32_t attempt;
    uint32_t prompt_tokens;
    bool self_prefill;         /* the decode node computes the prompt: no prefill node was chosen */
    uint32_t generated_tokens; /* given by earlier attempts */
    rtr_policy_t policy;
    uint32_t prefill_nodes; /* that could have been chosen */
    uint32_t decode_nodes;
    uint32_t prefill_count;
    rtr_trace_prefill_t prefills[RTR_TRACE_CANDIDATES_MAX]; /* the chosen one first */
    uint32_t decode_count;
    rtr_trace_decode_t decodes[RTR_TRACE_CANDIDATES_MAX]; /* the same */
    rtr_draft_choice_t draft;
    uint32_t prompt_class;
    /* Once it ended. */
    char end[32]; /* "ok", or why the attempt ended; "": it goes on */
    uint64_t took_ms;
    uint32_t tokens; /* that it gave */
} rtr_trace_decision_t;

typedef struct rtr_trace rtr_trace_t;

TD_MUST_CHECK td_status_t rtr_trace_create(rtr_trace_t **out);
void rtr_trace_destroy(rtr_trace_t *trace); /* NULL is allowed */
/** The place of a new decision, zeroed but for number and time; the oldest one's. Never NULL. */
rtr_trace_decision_t *rtr_trace_open(rtr_trace_t *trace);
/** The attempt of a decision has ended; ignored where it isn't kept any more. */
void rtr_trace_end(rtr_trace_t *trace, uint64_t number, const char *end, uint32_t tokens);
uint64_t rtr_trace_newest(const rtr_trace_t *trace);
/** NULL: not kept, or never made. */
const rtr_trace_decision_t *rtr_trace_get(const rtr_trace_t *trace, uint64_t number);

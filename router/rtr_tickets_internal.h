/* rtr_tickets_internal.h - what the files behind rtr_tickets.h share: a ticket, its attempts, the
 * ends of its request.
 *   rtr_tickets       the table, the queue, new requests, time
 *   rtr_ticket_place  which nodes and drafter an attempt gets, and what of that is traced
 *   rtr_attempt       one try: sent, taken back, failed, repeated
 *   rtr_answer        what nodes send
 *   rtr_ticket_end    the ends of a request
 * Threads: loop. */
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <sys/queue.h>

#include "common/kv/td_block_key.h"
#include "common/wire/td_msg.h"
#include "router/rtr_fair.h"
#include "router/rtr_placement.h"
#include "router/rtr_registry.h"
#include "router/rtr_reply.h"
#include "router/rtr_request.h"
#include "router/rtr_tickets.h"

#define RTR_TICKET_BUCKETS 4096u

typedef enum rtr_ticket_state {
    RTR_TICKET_PLACING = 0, /* inside a call only */
    RTR_TICKET_QUEUED,      /* waits for room */
    RTR_TICKET_RESTING,     /* waits a moment before it asks the node again that has just failed */
    RTR_TICKET_RESERVING,   /* the decode node was asked */
    RTR_TICKET_RUNNING      /* the prefill node was started */
} rtr_ticket_state_t;

typedef struct rtr_leg {
    uint32_t slot; /* RTR_PLACE_NONE: none */
    uint64_t incarnation;
    bool held; /* its load is counted */
} rtr_leg_t;

struct rtr_ticket {
    uint64_t id;
    uint32_t attempt;
    rtr_ticket_state_t state;
    rtr_request_t *req; /* borrowed: the request outlives its tickets */
    uint32_t prompt_idx;
    rtr_leg_t prefill;
    rtr_leg_t decode;
    rtr_slot_set_t avoid; /* failed this ticket: only when there is no other */
    rtr_slot_set_t tried; /* had no room in this round */
    uint32_t retries;
    uint32_t failures; /* in a row, since a token came */
    bool flows;        /* tokens of this attempt came: the decode node has all it needs */
    bool cached_known; /* what the first attempt found of the prompt is what counts */
    bool echo_seen;    /* the prompt's log-probabilities came */
    bool decode_done;  /* END of the decode leg came, the echo did not */
    bool in_queue;
    bool displaced; /* another tenant's has its place in the queue: its request is refused soon */
    bool charged;   /* its tenant has paid for it in the queue: once, whatever tries it takes */
    bool self;      /* this attempt's decode node computes the prompt: there is no other leg */
    td_msg_usage_t usage;
    td_msg_drafts_t report; /* of the decode leg, once it ended */
    uint64_t tenant;
    uint32_t prompt_class; /* rtr_prompt_class_t */
    rtr_draft_choice_t draft;
    uint64_t decision;     /* its number in the trace, of this attempt; 0: none */
    uint32_t given_before; /* tokens that earlier attempts gave */
    td_block_key_t *keys;  /* owned; full blocks of the prompt */
    uint32_t key_count;
    rtr_work_t work;      /* counted on the prefill node */
    uint64_t need_blocks; /* counted on the decode node */
    uint32_t decoding;    /* choices that are counted there as giving tokens */
    uint64_t start_ns;
    uint64_t reserve_deadline_ns;
    uint64_t rest_until_ns;
    uint64_t queue_deadline_ns;
    uint64_t queued_ns; /* when it joined the queue */
    rtr_ticket_t *chain;
    rtr_fair_item_t turn;               /* in the queue, before it has begun */
    TAILQ_ENTRY(rtr_ticket) begun_link; /* likewise, after that */
};

TAILQ_HEAD(rtr_request_list, rtr_request);
TAILQ_HEAD(rtr_ticket_list, rtr_ticket);

struct rtr_tickets {
    rtr_tickets_config_t config;
    rtr_ticket_t *buckets[RTR_TICKET_BUCKETS]; /* owned */
    uint32_t count;
    struct rtr_request_list requests;
    uint32_t running;
    struct rtr_ticket_list begun; /* of the queue, the first: the newest is in front */
    rtr_fair_t *fair;             /* owned; the others. Those that ask for room stay in it */
    uint32_t queued;              /* both */
    uint64_t turn;
    bool room; /* a ticket has ended: the queue is looked at without delay */
    uint64_t next_tick_ns;
    uint64_t next_probe_ns;
    td_str_t scratch;
    td_block_root_t root;   /* of prompts without a salt */
    char root_numerics[64]; /* the class that it is of; "": none yet */
    uint32_t match[RTR_SLOTS_MAX];
    uint32_t match_pool;         /* blocks that a node could pull */
    rtr_estimate_t prefill_time; /* of all nodes: what a new one is taken for */
    rtr_estimate_t tbt;
    rtr_estimate_t self;
    rtr_prefill_view_t prefills[RTR_SLOTS_MAX];
    rtr_decode_view_t decodes[RTR_SLOTS_MAX];
};

static inline const rtr_prompt_t *rtr_ticket_prompt(const rtr_ticket_t *t)
{
    return &t->req->params.prompts[t->prompt_idx];
}

static inline rtr_choice_t *rtr_ticket_choices(const rtr_ticket_t *t)
{
    return &t->req->choices[t->prompt_idx * t->req->params.n];
}

/** Tokens of all its choices. */
static inline uint32_t rtr_ticket_received(const rtr_ticket_t *t)
{
    uint32_t tokens = 0;
    for (uint32_t i = 0; i < t->req->params.n; i++) {
        tokens += rtr_ticket_choices(t)[i].received;
    }
    return tokens;
}

/** Tokens of it came, of whichever attempt: another goes on behind them. */
static inline bool rtr_ticket_has_begun(const rtr_ticket_t *t)
{
    return rtr_ticket_received(t) > 0;
}

/** The prompt's own log-probabilities are asked for, and have not come. */
static inline bool rtr_ticket_holds_for_echo(const rtr_ticket_t *t)
{
    return t->req->params.echo && t->req->params.want_logprobs && !t->echo_seen;
}

static inline bool rtr_ticket_has_all_tokens(const rtr_ticket_t *t)
{
    for (uint32_t i = 0; i < t->req->params.n; i++) {
        if (rtr_ticket_choices(t)[i].finish == TD_FINISH_NONE) {
            return false;
        }
    }
    return true;
}

/** The prefill node has nothing more that this attempt needs. */
static inline bool rtr_ticket_has_left_prefill(const rtr_ticket_t *t)
{
    return t->flows && !rtr_ticket_holds_for_echo(t);
}

/* --- rtr_tickets.c --- */

/** The ticket with that id, or NULL. */
rtr_ticket_t *rtr_ticket_find(const rtr_tickets_t *ts, uint64_t id);
/** Ends its attempt and frees it. cancel: its nodes are told. */
void rtr_ticket_destroy(rtr_tickets_t *ts, rtr_ticket_t *t, bool cancel);
/** All nodes that might have room were asked: the ticket waits its turn, or its request is refused
 * and t gone. One whose client has part of the answer is never refused, and is the first. */
void rtr_queue_join(rtr_tickets_t *ts, rtr_ticket_t *t);
void rtr_queue_leave(rtr_tickets_t *ts, rtr_ticket_t *t);
/** Its nodes have room: it leaves the queue, if it was there, and its tenant has had it. */
void rtr_queue_serve(rtr_tickets_t *ts, rtr_ticket_t *t);

/* --- rtr_ticket_place.c --- */

/** Computes its block keys, once. */
void rtr_ticket_hash(rtr_tickets_t *ts, rtr_ticket_t *t);
bool rtr_ticket_may_use(const rtr_ticket_t *t, const rtr_node_t *node, uint32_t slot,
                        td_role_t role, bool also_avoided, uint64_t now);
/** Is there a node of that role which it may use? */
bool rtr_ticket_any(const rtr_tickets_t *ts, const rtr_ticket_t *t, td_role_t role,
                    bool also_avoided, uint64_t now);
/** The node that its client named, for its first try; "": none. */
const char *rtr_ticket_pinned(const rtr_ticket_t *t, td_role_t role);
/** What nodes and store hold of the prompt: ts->match, ts->match_pool. */
void rtr_ticket_match(rtr_tickets_t *ts, const rtr_ticket_t *t);
/** By what ts->match says. */
rtr_place_ask_t rtr_ticket_ask(const rtr_tickets_t *ts, const rtr_ticket_t *t);
rtr_prefill_choice_t rtr_ticket_choose_prefill(rtr_tickets_t *ts, const rtr_ticket_t *t,
                                               const rtr_place_ask_t *ask, bool also_avoided);
rtr_decode_choice_t rtr_ticket_choose_decode(rtr_tickets_t *ts, const rtr_ticket_t *t,
                                             const rtr_place_ask_t *ask, bool also_avoided);
/** The slot of the live node of that name and role; RTR_PLACE_NONE: there is none, or no name. */
uint32_t rtr_ticket_find_named(const rtr_tickets_t *ts, const char *named, td_role_t role);
/** The decode node that its client has named for the prompt; RTR_PLACE_NONE: none, or it is not
 * live. */
uint32_t rtr_ticket_named_self(const rtr_tickets_t *ts, const rtr_ticket_t *t);
/** Whether the decode node shall compute the prompt; after both were chosen. */
rtr_self_choice_t rtr_ticket_choose_self(rtr_tickets_t *ts, const rtr_ticket_t *t,
                                         const rtr_place_ask_t *ask,
                                         const rtr_prefill_choice_t *prefill,
                                         const rtr_decode_choice_t *decode);
/** Counts it on the nodes that were chosen. */
void rtr_attempt_hold(rtr_tickets_t *ts, rtr_ticket_t *t, const rtr_prefill_choice_t *prefill,
                      uint32_t decode, uint64_t now);
void rtr_attempt_hold_self(rtr_tickets_t *ts, rtr_ticket_t *t, const rtr_self_choice_t *self,
                           uint64_t now);
/** For the decode node that was found: others offer other drafters, at other costs. */
void rtr_ticket_choose_draft(rtr_tickets_t *ts, rtr_ticket_t *t);
/** As the views stand that the choice was made from. */
void rtr_attempt_note_decision(rtr_tickets_t *ts, rtr_ticket_t *t, const rtr_place_ask_t *ask);
void rtr_attempt_note_end(rtr_tickets_t *ts, rtr_ticket_t *t, const char *end);

/* --- rtr_attempt.c: after these t may be gone --- */

/** Places the ticket and asks its decode node, or lets it wait. */
void rtr_attempt_begin(rtr_tickets_t *ts, rtr_ticket_t *t);
/** culprit: the slot to keep away from, or RTR_PLACE_NONE. */
void rtr_attempt_failed(rtr_tickets_t *ts, rtr_ticket_t *t, td_status_t status, uint32_t culprit,
                        const char *what);
/** The node let go of it because this router was silent: nobody failed, all goes on elsewhere. */
void rtr_attempt_voided(rtr_tickets_t *ts, rtr_ticket_t *t, uint32_t slot);
/** That node had no room: another one is asked, and if there is none the ticket waits. */
void rtr_attempt_busy(rtr_tickets_t *ts, rtr_ticket_t *t, uint32_t slot);
/** True when the request was refused: a role has no live node, or not the one asked for. One that
 * has begun waits for a node to come. */
bool rtr_attempt_refused(rtr_tickets_t *ts, const rtr_ticket_t *t);
/** Takes the attempt back from both nodes; later messages of it are then stale. t stays. */
void rtr_attempt_end(rtr_tickets_t *ts, rtr_ticket_t *t, bool cancel);
TD_MUST_CHECK td_status_t rtr_attempt_send(rtr_tickets_t *ts, const rtr_ticket_t *t,
                                           td_msg_type_t type, const rtr_leg_t *to,
                                           const rtr_leg_t *peer, uint32_t have_blocks);
void rtr_attempt_blame(rtr_tickets_t *ts, uint32_t slot, const char *what);
void rtr_attempt_credit(rtr_tickets_t *ts, const rtr_leg_t *leg);
/** Does that very life of its node live? */
bool rtr_leg_is_live(const rtr_tickets_t *ts, const rtr_leg_t *leg);
void rtr_prefill_release(rtr_tickets_t *ts, rtr_ticket_t *t);
void rtr_decode_release(rtr_tickets_t *ts, rtr_ticket_t *t);

/* --- rtr_answer.c --- */

/** All of its answer is there. t is gone afterwards, and its request if it was the last. */
void rtr_ticket_succeeded(rtr_tickets_t *ts, rtr_ticket_t *t);

/* --- rtr_ticket_end.c: after these req may be freed --- */

rtr_head_t rtr_ticket_head(const rtr_tickets_t *ts, const rtr_request_t *req);
void rtr_end_complete(rtr_tickets_t *ts, rtr_request_t *req);
void rtr_end_failed(rtr_tickets_t *ts, rtr_request_t *req, rtr_outcome_t outcome, int http,
                    const char *code, const char *message);
void rtr_end_failed_for(rtr_tickets_t *ts, rtr_request_t *req, rtr_outcome_t outcome, int http,
                        const char *code, const char *message, uint32_t retry_after_s);
/** A limit of its tenant refuses it: nothing that operators are told of, since it may be many. */
void rtr_end_limited(rtr_tickets_t *ts, rtr_request_t *req, const char *message,
                     uint32_t retry_after_s);
void rtr_end_client_gone(rtr_tickets_t *ts, rtr_request_t *req);

/* rtr_placement.h - which nodes a prompt goes to, and whether it is taken at all. Pure functions:
 * what they need is passed in, the time too, so that the router and the simulator run the same
 * code. Prefill: the least predicted time to first token, queue + transfer + prefill of what is
 * uncached. Decode: the least predicted time between tokens with the growth that was promised. What
 * things take is learned (rtr_estimate). Source: design, section 6; DESIGN.md, "Placement".
 * Threads: any (plain values). */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "common/base/td_status.h"
#include "router/rtr_estimate.h"

#define RTR_PLACE_NONE UINT32_MAX

/** A node that holds a match is preferred to pulling it elsewhere as if the pulled tokens cost so
 * many times their computation more: a copy takes memory and network from others. */
#define RTR_KEEP_LOCAL_DEFAULT 4.5

typedef enum rtr_policy {
    RTR_POLICY_KV_AWARE = 0, /* predicted time to first token, with pulling */
    RTR_POLICY_LOCAL_AWARE,  /* the same, of a node's own cache alone */
    RTR_POLICY_LEAST_LOADED, /* the shortest queue, the fewest sequences */
    RTR_POLICY_ROUND_ROBIN,
    RTR_POLICY_RANDOM,
    RTR_POLICIES
} rtr_policy_t;

#define RTR_POLICY_NAMES "kv_aware|local_aware|least_loaded|round_robin|random"
const char *rtr_policy_name(rtr_policy_t policy);
/** Errors: TD_ERR_INVALID (no such name). */
TD_MUST_CHECK td_status_t rtr_policy_parse(const char *name, rtr_policy_t *out);

/* --- work of prefill nodes -------------------------------------------------------------------- */

/** What prompts are made of. pairs: of a computed token and one that it sees. */
typedef struct rtr_work {
    uint64_t prompts;
    uint64_t tokens; /* computed */
    uint64_t pairs;
    uint64_t pulled; /* tokens */
} rtr_work_t;

/** The quantities that prefill time is regressed over, by their index in rtr_estimate_t. */
enum { RTR_WORK_TOKENS = 0, RTR_WORK_PROMPTS, RTR_WORK_PAIRS, RTR_WORK_PULLED };
/** And the time between tokens. */
enum { RTR_TBT_STEPS = 0, RTR_TBT_SEQUENCES, RTR_TBT_BLOCKS };

/** Units: cached_tokens, of the prompt and not computed, the pulled ones among them. */
rtr_work_t rtr_work_of(uint32_t prompt_tokens, uint32_t cached_tokens, uint32_t pulled_tokens);
/** Learns what this work took a node that did nothing else. */
void rtr_work_observe(rtr_estimate_t *estimate, const rtr_estimate_t *prior, const rtr_work_t *work,
                      double ns);
/** Negative while unknown. */
double rtr_work_ns(const rtr_estimate_t *estimate, const rtr_work_t *work);

/** What is under way on a prefill node, as the router counts it, and what it got lately.
 * Zero-initialise. */
typedef struct rtr_backlog {
    rtr_work_t work;
    uint64_t since_ns; /* the last end, or the begin of what is under way */
    double lately;     /* tokens to compute that it was given, halved every RTR_LATELY_HALF_NS */
    uint64_t lately_ns;
} rtr_backlog_t;

#define RTR_LATELY_HALF_NS                                                                         \
    3.6e12 /* an hour: load is to be even over hours, queues see the rest                          \
            */

void rtr_backlog_add(rtr_backlog_t *backlog, const rtr_work_t *work, uint64_t now_ns);
/** Takes out what was added. */
void rtr_backlog_remove(rtr_backlog_t *backlog, const rtr_work_t *work);
/** Its end: for how long the node was busy with it. Prompts follow each other, so these times add
 * up to the time that the node was busy, also where it takes several at once. start_ns: when the
 * node was told. Call rtr_backlog_remove() too. */
uint64_t rtr_backlog_end(rtr_backlog_t *backlog, uint64_t start_ns, uint64_t now_ns);
/** Cost: O(1), without a call of the math library: every node is asked for every prompt. */
double rtr_backlog_lately(const rtr_backlog_t *backlog, uint64_t now_ns);

/* --- placing ---------------------------------------------------------------------------------- */

typedef struct rtr_prefill_view {
    bool allowed; /* live, of the role, its telemetry fresh, not excluded */
    uint32_t match_tokens;
    double lately; /* rtr_backlog_lately() */
    const rtr_backlog_t *backlog;
    const rtr_work_t *others; /* under way for other routers, as the node last said; NULL: none */
    const rtr_estimate_t *estimate;
} rtr_prefill_view_t;

/** What both placements are asked about. */
typedef struct rtr_place_ask {
    rtr_policy_t policy;
    uint64_t now_ns;
    uint64_t turn; /* a running number: breaks ties in rotation */
    uint64_t draw; /* random bits, for RTR_POLICY_RANDOM */
    uint32_t prompt_tokens;
    uint32_t granule_tokens;           /* a block: whole ones are reused, the last token never is */
    uint32_t pool_tokens;              /* longest prefix that a node could pull; 0: none */
    double keep_local;                 /* RTR_KEEP_LOCAL_DEFAULT */
    const rtr_estimate_t *typical;     /* of all prefill nodes */
    uint32_t sequences;                /* that it adds to a decode node */
    uint32_t need_blocks;              /* that they may grow to */
    const rtr_estimate_t *typical_tbt; /* of all decode nodes */
    uint32_t self_tokens_max; /* that a decode node may compute of a prompt; 0: none does */
    const rtr_estimate_t *typical_self; /* of all decode nodes, at computing prompts */
} rtr_place_ask_t;

typedef struct rtr_prefill_choice {
    uint32_t node; /* index, or RTR_PLACE_NONE */
    rtr_work_t work;
    uint32_t cached_tokens; /* own and pulled */
    double ttft_ns;         /* predicted; negative: nothing is known yet */
} rtr_prefill_choice_t;

/** Cost: O(count). */
rtr_prefill_choice_t rtr_place_prefill(const rtr_place_ask_t *ask, const rtr_prefill_view_t *views,
                                       uint32_t count);

typedef struct rtr_decode_view {
    bool allowed;
    uint32_t running;      /* sequences under way there: the router's own count, and others' */
    uint64_t promised;     /* blocks those may grow to */
    uint32_t free_blocks;  /* as the node last said */
    uint32_t total_blocks; /* 0 = not known yet */
    uint32_t match_blocks; /* of this prompt */
    const rtr_estimate_t *tbt;
    const rtr_estimate_t *self; /* what prompts take it */
} rtr_decode_view_t;

typedef struct rtr_decode_choice {
    uint32_t node; /* index, or RTR_PLACE_NONE */
    bool fits;     /* into its memory, as far as is known */
    double tbt_ns; /* predicted with this prompt; negative: nothing is known yet */
} rtr_decode_choice_t;

rtr_decode_choice_t rtr_place_decode(const rtr_place_ask_t *ask, const rtr_decode_view_t *views,
                                     uint32_t count);

/** A decode node that computes the rest of the prompt itself, by the rows that its steps have to
 * spare. */
typedef struct rtr_self_choice {
    uint32_t node; /* index, or RTR_PLACE_NONE: better not */
    rtr_work_t work;
    double ttft_ns; /* predicted */
} rtr_self_choice_t;

/** What a decode node has to compute of the prompt: what it doesn't hold, the last token always. */
rtr_work_t rtr_self_work(const rtr_place_ask_t *ask, const rtr_decode_view_t *view);
/** Conditional disaggregation (design, section 4): is a short rest computed faster where the answer
 * is generated, the delay of those that generate there included? prefill, decode: what was chosen
 * else. Cost: O(count). */
rtr_self_choice_t rtr_place_self(const rtr_place_ask_t *ask, const rtr_decode_view_t *views,
                                 uint32_t count, const rtr_prefill_choice_t *prefill,
                                 const rtr_decode_choice_t *decode);

/** What a node's placement was judged by. Scores: the lowest is chosen, where the policy compares
 * at all. */
typedef struct rtr_prefill_explained {
    double score_ns;
    double queue_ns; /* until it begins */
    double ttft_ns;  /* predicted, the queue included; negative: nothing is known yet */
    uint32_t own_tokens;
    uint32_t pulled_tokens;
} rtr_prefill_explained_t;

typedef struct rtr_decode_explained {
    double score;
    double tbt_ns; /* predicted with the prompt; negative: nothing is known yet */
    bool fits;
} rtr_decode_explained_t;

/** For the nodes of the views whose indexes are given. Shape: nodes, out [node_count]. */
void rtr_explain_prefill(const rtr_place_ask_t *ask, const rtr_prefill_view_t *views,
                         uint32_t count, const uint32_t *nodes, uint32_t node_count,
                         rtr_prefill_explained_t *out);
rtr_decode_explained_t rtr_explain_decode(const rtr_place_ask_t *ask,
                                          const rtr_decode_view_t *view);

/** Learns the time between two tokens at so many sequences, with so many blocks of KV. */
void rtr_tbt_observe(rtr_estimate_t *estimate, const rtr_estimate_t *prior, uint32_t sequences,
                     uint64_t blocks, double ns);
/** Negative while unknown. */
double rtr_tbt_ns(const rtr_estimate_t *estimate, uint32_t sequences, uint64_t blocks);

/* --- admission -------------------------------------------------------------------------------- */

/** What a request must not exceed; 0: no limit. */
typedef struct rtr_slo {
    uint32_t ttft_ms;
    uint32_t tbt_ms;
} rtr_slo_t;

/** The objectives of requests that bring none: an operator may change them while others read.
 * Relaxed: each is a number by itself. */
typedef struct rtr_slo_live {
    atomic_uint ttft_ms;
    atomic_uint tbt_ms;
} rtr_slo_live_t;

typedef enum rtr_admission {
    RTR_ADMIT = 0,
    RTR_REFUSE_TTFT, /* the first token would come too late */
    RTR_REFUSE_TBT   /* tokens would come too slowly */
} rtr_admission_t;

#define RTR_RETRY_AFTER_S_MAX 60u
#define RTR_SLO_MS_MAX 86400000u

typedef struct rtr_admit_ask {
    rtr_slo_t slo;
    double ttft_ns;   /* predicted; negative: unknown, which is no reason to refuse */
    double tbt_ns;    /* likewise */
    double answer_ns; /* how long a request stays on its decode node; negative: unknown */
} rtr_admit_ask_t;

/** Whether to take a request whose prediction this is. retry_after_s_out: when refused, in how many
 * seconds the load will have fallen enough if nothing else comes, 1..RTR_RETRY_AFTER_S_MAX. */
rtr_admission_t rtr_admit(const rtr_admit_ask_t *ask, uint32_t *retry_after_s_out);

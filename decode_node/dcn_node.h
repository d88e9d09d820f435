/* dcn_node.h - the decode node's state: tickets, their choices, and the batch that runs.
 * A ticket goes through the states below in this order; every exit is dcn_ticket_end() (I5).
 * Design: section 4, "Hand-off"; decode_node/DESIGN.md.
 * Threads: loop. While a batch computes, its tickets are not released (computing). */
#pragma once

#include "common/model/td_stop.h"
#include "common/node/td_node.h"
#include "common/spec/td_draft.h"
#include "common/spec/td_draft_stats.h"
#include "common/spec/td_spec_cost.h"
#include "decode_node/dcn_draft.h"
#include "kvstore/kvs_client.h"
#include "kvstore/kvs_donor.h"

#define DCN_TICKETS_MAX 1024u /* past it: busy */
#define DCN_BATCH_ROWS_MAX 256u
#define DCN_DRAFT_PAST_MAX 1024u /* tenants, classes and drafters remembered for the router */
#define DCN_REPLAY_ROWS_MAX                                                                        \
    64u /* rows of a step that compute prompts, or again what was given up */

typedef enum dcn_state {
    DCN_FETCHING,  /* blocks are reserved; layers come in */
    DCN_RUNNING,   /* admitted: choices generate */
    DCN_WAITING,   /* gave its blocks to others; comes back when there is room */
    DCN_RETURNING, /* has room again; what the store still holds of its blocks comes in */
    DCN_DRAIN      /* ended; fetches or the batch still hold memory */
} dcn_state_t;

struct dcn_ticket;

typedef struct dcn_choice {
    struct dcn_ticket *ticket;
    uint32_t index;
    td_seq_t seq;          /* owned */
    td_sampler_t *sampler; /* owned */
    uint32_t *tokens;      /* owned, [max_tokens]: generated */
    uint32_t token_count;
    uint32_t given;          /* of them, those that became text and went out */
    uint32_t kv_tokens;      /* positions whose KV is written, from the first */
    bool has_room;           /* for the next position, in the step being made */
    bool in_step;            /* the worker reads and writes what is its own */
    uint32_t published;      /* full blocks of the sequence that are indexed */
    td_block_key_t last_key; /* of block published - 1 */
    td_detok_t detok;
    td_stop_t stop;
    td_finish_t finish;
    uint32_t drafter;  /* td_drafter_t; TD_DRAFTER_NONE: nothing is drafted */
    td_draft_t *draft; /* owned; NULL: its drafter needs passes of a model, or there is none */
    dcn_draft_kv_t draft_kv; /* of the draft model */
    float *hidden;   /* owned, [embed_dim]: the model's state that selected the newest token; NULL:
                        its drafter doesn't ask for it */
    bool has_hidden; /* the first token's is not here */
    uint32_t drafts[TD_DRAFT_TOKENS_MAX]; /* proposed for the step being made */
    uint32_t confidence;                  /* of that proposal */
    td_acceptance_t acceptance[TD_DRAFT_CONFIDENCES];
    uint32_t return_blocks;      /* full ones of what it had, when it gave way */
    td_block_key_t *return_keys; /* owned, [return_blocks]; NULL unless it is to come back */
    /* Written by the batch, one for each row that samples, up to the first draft that was wrong. */
    td_sampled_t sampled[TD_DRAFT_TOKENS_MAX + 1];
    uint64_t logits_hashes[TD_DRAFT_TOKENS_MAX + 1];
    uint32_t sampled_count;
    uint32_t behind[TD_DRAFT_TOKENS_MAX]; /* what follows the wrong draft and those behind it */
    uint32_t behind_count;                /* 0: its drafter doesn't ask */
    td_status_t status;                   /* of the batch's sampling */
} dcn_choice_t;

typedef struct dcn_ticket {
    uint64_t ticket;
    uint32_t attempt;
    char router[TD_MSG_ID_CHARS_MAX + 1]; /* whose it is */
    dcn_state_t state;
    td_msg_work_t work;    /* borrows from arena */
    td_msg_arena_t *arena; /* owned */
    td_block_root_t root;
    uint64_t deadline_ns;
    uint32_t blocks; /* of the prompt, with a partial last one */
    uint32_t full_blocks;
    uint32_t held_blocks;        /* leading ones that were here before, or that nobody needs */
    td_block_key_t *keys;        /* owned, [blocks] */
    uint32_t *asked;             /* owned, [blocks]: layers asked for so far, from the first */
    uint32_t *layers;            /* owned, [blocks]: layers fetched so far */
    uint64_t *hashes;            /* owned, [blocks]: content, once every layer is here */
    uint32_t fetches;            /* under way, or being hashed */
    td_msg_kv_ready_t ready;     /* borrows from ready_arena; valid once that is set */
    td_msg_arena_t *ready_arena; /* owned */
    bool refetched;              /* what was never announced has been asked for */
    td_seq_t seq;                /* owned until admission: then choice 0 has it */
    uint32_t reserve_choices;    /* blocks reserved for choices 1.. */
    uint32_t reserve_each;       /* of them, for each */
    dcn_choice_t *choices;       /* owned, [n] once admitted */
    uint32_t live;               /* choices that still generate */
    td_msg_drafts_t drafts;      /* k_max 0: nothing can be drafted */
    uint32_t sides;              /* leaves that were verified beside them */
    uint64_t running_ns;         /* since when it generates */
    uint64_t transfer_ns;        /* since when its prompt's KV is fetched; 0: it is not */
    td_span_t span;              /* of the leg */
    bool computing;
    bool began;            /* its first token is drawn */
    uint32_t *quarantined; /* owned, [blocks]; while DCN_DRAIN */
    uint32_t quarantined_count;
    /* Coming back: choices take turns; the one whose turn it is has its sequence in seq while
     * blocks come in. */
    uint32_t return_choice;
    uint32_t shared_tokens;  /* 0; or return_choice brings and computes just so many, for all */
    uint32_t return_held;    /* blocks that were here when its turn came */
    uint32_t shared_blocks;  /* what all choices have in common of the prompt */
    uint32_t counted_blocks; /* of them, those that earlier turns have counted already */
    uint64_t return_serial;  /* names its question to the store; 0 = none is open */
    bool return_alone;       /* a fetch has failed: the store is not asked any more */
    uint64_t *return_sums;   /* owned, [return_blocks max]: announced checksums, then hashes */
    bool *return_right;      /* owned, the same */
    struct dcn_ticket *next;
} dcn_ticket_t;

/* A choice's rows of a step: the newest token's, before it those of tokens whose KV was given up,
 * behind it those of drafts. Without the newest token's row nothing is sampled. */
typedef struct dcn_part {
    dcn_choice_t *choice;
    dcn_ticket_t *ticket; /* its ticket: a choice may be gone before its ticket's turn */
    uint32_t rows;        /* without those of drafts */
    uint32_t drafts; /* 0 unless it samples; those that need passes: until then, how many to make */
    bool samples;
    uint32_t proposed; /* drafts that there are, or could be made */
    double alpha;      /* how likely a draft is right where those before it were; of drafts > 0 */
    double draft_ns;   /* to make one, of a drafter that needs passes */
    dcn_draft_job_t *job; /* those passes; NULL: none */
    uint32_t sides;       /* leaves beside its drafts; until those are made, how many at most */
    uint32_t side_first;  /* among the step's */
    const dcn_side_t *side_taken; /* the one that was right; NULL: none */
} dcn_part_t;

typedef struct dcn_batch {
    td_model_row_t rows[DCN_BATCH_ROWS_MAX];
    dcn_part_t parts[DCN_BATCH_ROWS_MAX];
    uint32_t row_count;
    uint32_t part_count;
    uint32_t replayed; /* rows that no sampling follows */
    uint32_t tokens;   /* that it gave */
    td_status_t status;
    uint64_t started_ns;
    uint64_t draft_ns; /* of the time since then, what drafting took */
    uint64_t took_ns;
    uint64_t plain_ns; /* estimated without drafts; not set where there were none */
} dcn_batch_t;

/* What a step has drawn for a choice that goes on: it becomes text and is sent while the next step
 * runs, which draws into the choice's own array. */
typedef struct dcn_unsent {
    dcn_choice_t *choice;
    dcn_ticket_t *ticket;
    uint32_t first; /* in the node's array */
    uint32_t count;
} dcn_unsent_t;

/* What a step gives a choice, for one message. */
typedef struct dcn_out {
    uint32_t count;
    uint32_t tokens[TD_DRAFT_TOKENS_MAX + 1];
    uint64_t hashes[TD_DRAFT_TOKENS_MAX + 1];
    float logprobs[TD_DRAFT_TOKENS_MAX + 1];
    uint32_t top_counts[TD_DRAFT_TOKENS_MAX + 1];
    uint32_t top_total;
    uint32_t top_tokens[(TD_DRAFT_TOKENS_MAX + 1) * TD_TOP_LOGPROBS_MAX];
    float top_logprobs[(TD_DRAFT_TOKENS_MAX + 1) * TD_TOP_LOGPROBS_MAX];
    td_str_t text; /* owned */
} dcn_out_t;

typedef struct dcn_node {
    td_node_t node;
    kvs_client_t *store;
    kvs_donor_t *donor; /* NULL: gives no memory to the store */
    uint32_t batch_max;
    uint32_t rows_max;     /* of a step */
    dcn_ticket_t *tickets; /* list, oldest first */
    uint32_t ticket_count;
    uint32_t next_ticket_turn; /* rotates, when more choices run than a batch holds */
    uint64_t returns;          /* questions to the store so far */
    uint64_t outputs_ended;
    double output_mean; /* tokens, of outputs that ended lately */
    double output_deviation;
    dcn_batch_t batch;
    td_step_cost_t step_cost; /* without drafting */
    dcn_draft_model_t draft_model;
    dcn_drafter_t draft_passes; /* of the draft model */
    dcn_drafter_t exit_passes;  /* of the model's first layers */
    dcn_medusa_t medusa;
    dcn_drafter_t head_passes; /* of the heads */
    dcn_tree_t tree;
    td_model_row_t draft_rows[DCN_DRAFT_ROWS_MAX];
    float draft_logprob_min; /* below it a drafted token ends the draft */
    float draft_chance_min;  /* the same, where its best token's chance is asked */
    float heads_logprob_min; /* the same of the heads' drafts */
    float heads_chance_min;
    float *chances;          /* owned, [rows_max][vocab]; NULL: nobody has asked for the rule yet */
    uint32_t chances_used;   /* rows, by the step being made */
    bool draft_model_missed; /* a request has asked for one that is not here: said once */
    td_acceptance_t acceptance[TD_DRAFTER_KINDS][TD_DRAFT_CONFIDENCES]; /* of all choices */
    td_acceptance_t
        drafts_made[TD_DRAFTER_KINDS];     /* of those planned: not dropped by the drafter */
    td_memo_t *memo;                       /* owned; NULL: answers are not remembered */
    td_draft_stats_t *past;                /* owned; what drafts were worth here lately */
    uint64_t told_routers[TD_ROUTERS_MAX]; /* ring: incarnations of routers that were told it */
    uint32_t told_next;
    td_msg_heartbeat_t costs; /* only those of steps and passes */
    uint64_t next_costs_ns;
    dcn_unsent_t unsent[DCN_BATCH_ROWS_MAX]; /* choices of a ticket stand together */
    uint32_t unsent_count;
    td_sampled_t unsent_tokens[DCN_BATCH_ROWS_MAX];
    uint64_t unsent_hashes[DCN_BATCH_ROWS_MAX];
    uint32_t unsent_token_count;
    dcn_out_t out; /* scratch */
    td_str_t text; /* scratch */
    td_str_t raw;  /* scratch */
    uint64_t tokens_per_s;
    td_metric_t *tokens;
    td_metric_t *requests_ok;
    td_metric_t *requests_failed;
    td_metric_t *requests_cancelled;
    td_metric_t *running;
    td_metric_t *batch_seconds;
    td_metric_t *overlapped;
    td_metric_t *kv_failed;
    td_metric_t *bytes_early;
    td_metric_t *bytes_late;
    td_metric_t *preemptions;
    td_metric_t *continued;
    td_metric_t *returned_cached;
    td_metric_t *returned_fetched;
    td_metric_t *returned_computed;
    td_metric_t *prompts_computed;
    td_metric_t *prompt_cached;
    td_metric_t *prompt_fetched;
    td_metric_t *prompt_computed;
    td_metric_t *drafts_accepted;
    td_metric_t *drafts_rejected;
    td_metric_t *sides_accepted;
    td_metric_t *sides_rejected;
    td_metric_t *draft_kv_states[4];
    td_metric_t *draft_cached;
    td_metric_t *draft_computed;
    td_metric_t *drafter_steps[TD_DRAFTER_KINDS]; /* [TD_DRAFTER_NONE] is NULL */
    td_metric_t *drafter_accepted[TD_DRAFTER_KINDS];
    td_metric_t *drafter_rejected[TD_DRAFTER_KINDS];
    td_metric_t *memo_paths;
    td_metric_t *memo_told;
} dcn_node_t;

_Static_assert(DCN_DRAFT_JOBS_MAX == DCN_BATCH_ROWS_MAX, "a job for each part of a step");

/* dcn_ticket.c */
void dcn_ticket_reserve(dcn_node_t *dcn, const td_msg_t *msg, td_msg_arena_t **arena);
void dcn_ticket_end(dcn_node_t *dcn, dcn_ticket_t *ticket, td_status_t status);
dcn_ticket_t *dcn_ticket_find(dcn_node_t *dcn, uint64_t ticket, uint32_t attempt);
void dcn_ticket_settle(dcn_node_t *dcn, dcn_ticket_t *ticket);
void dcn_ticket_tick(dcn_node_t *dcn);
/** The most blocks that one choice needs at once: all, or what its mask shows. */
uint32_t dcn_ticket_blocks_max(const dcn_node_t *dcn, const dcn_ticket_t *ticket);
/** Blocks that it may hold at once, as its router counts them. */
uint32_t dcn_ticket_promise(const dcn_node_t *dcn, const dcn_ticket_t *ticket);
/** Does generation need a block of the prompt? */
bool dcn_ticket_needs(const dcn_ticket_t *ticket, uint32_t block);

/* dcn_receive.c: the hand-off's receiving side */
void dcn_receive_layers(dcn_node_t *dcn, const td_msg_t *msg);
void dcn_receive_ready(dcn_node_t *dcn, const td_msg_t *msg, td_msg_arena_t **arena);
/** Takes over the job: it is freed, or goes on to the verifier. */
void dcn_receive_fetched(dcn_node_t *dcn, td_node_fetch_t *job);

/* dcn_batch.c: continuous batching */
/** Makes the choices of a verified ticket, sends their first tokens. */
void dcn_batch_admit(dcn_node_t *dcn, dcn_ticket_t *ticket);
/** Makes the choices of a ticket whose prompt is computed here: it waits as one that comes back. */
void dcn_batch_admit_whole(dcn_node_t *dcn, dcn_ticket_t *ticket);
void dcn_batch_schedule(dcn_node_t *dcn);
void dcn_batch_progress(dcn_node_t *dcn);

/* dcn_memo.c: answers that are remembered */
/** Where a ticket's outputs begin; valid as long as it is. */
td_memo_start_t dcn_memo_start(const dcn_node_t *dcn, const dcn_ticket_t *ticket);
/** Asks the store how the prompt was answered before, where this node doesn't know. */
void dcn_memo_ask(dcn_node_t *dcn, const dcn_ticket_t *ticket);
/** The store's answer, for a ticket that it names. */
void dcn_memo_told(dcn_node_t *dcn, const td_msg_memo_t *found);
/** Remembers a choice's output, which is whole, for those that ask the same, here and elsewhere. */
void dcn_memo_learn(dcn_node_t *dcn, const dcn_choice_t *choice);

/* dcn_preempt.c: memory that running requests share */
/** Tokens to promise an output of at most max_tokens. */
uint32_t dcn_output_expected(const dcn_node_t *dcn, uint32_t max_tokens);
void dcn_output_ended(dcn_node_t *dcn, uint32_t tokens);
/** Sets has_room of every running choice, for which others may have to give way; when nobody had
 * to, those that gave way earlier come back in their rank, as far as there is room. Not during a
 * step. */
void dcn_preempt_make_room(dcn_node_t *dcn);
/** A running ticket gives up all blocks of all its choices, and comes back in its rank. */
void dcn_preempt_wait(dcn_ticket_t *ticket);
bool dcn_preempt_someone_waits(const dcn_node_t *dcn);

/* dcn_return.c: a request that gave way comes back */
/** Takes what is here of its choices' blocks and the promise of the rest; DCN_RETURNING or
 * DCN_RUNNING. Errors: TD_ERR_BUSY, TD_ERR_NO_MEMORY: it waits on. */
td_status_t dcn_return_begin(dcn_node_t *dcn, dcn_ticket_t *ticket);
/** Once the choice that computes what all share has all of it: the others take it over, and each
 * goes on with its own. */
void dcn_return_share(dcn_node_t *dcn, dcn_ticket_t *ticket);
/** As dcn_receive_fetched(), for a job of a DCN_RETURNING ticket. */
void dcn_return_fetched(dcn_node_t *dcn, dcn_ticket_t *ticket, td_node_fetch_t *job);
/** Forgets everything about coming back but the sequences. */
void dcn_return_fini(dcn_ticket_t *ticket);
/** The token at a position of a choice's sequence. */
uint32_t dcn_choice_token(const dcn_choice_t *choice, uint32_t position);
/** The key of a full block of that sequence, under a root; parent: of the block before it, or NULL.
 */
void dcn_choice_block_key(const dcn_choice_t *choice, const td_block_root_t *root,
                          uint32_t block_tokens, uint32_t block, const td_block_key_t *parent,
                          td_block_key_t *out);

/* dcn_speculate.c: drafts of the running choices */
/** Makes the choice's drafter, if its request has one. Errors: TD_ERR_NO_MEMORY. */
td_status_t dcn_speculate_open(dcn_node_t *dcn, dcn_choice_t *choice);
/** Ends it. */
void dcn_speculate_close(dcn_choice_t *choice);
/** Tells the drafter the next token of the output. */
void dcn_speculate_token(dcn_choice_t *choice, uint32_t token);
/** Tells it what the step says behind a draft that was wrong, after the step's tokens. */
void dcn_speculate_look_behind(dcn_choice_t *choice);
/** Has every part of the step that samples propose, or say how much it could, and sets how many of
 * its drafts are made and verified. */
void dcn_speculate_plan(dcn_node_t *dcn);
/** How many of a part's drafts were accepted, the last of them perhaps a leaf beside its draft. */
void dcn_speculate_observe(dcn_node_t *dcn, const dcn_part_t *part, uint32_t accepted);

/* dcn_worth.c: what drafts were worth, and what they cost */
/** The drafters that this node offers, a bit each. */
uint32_t dcn_worth_drafters(const dcn_node_t *dcn);
/** The choice's drafter is open. */
void dcn_worth_begin(dcn_choice_t *choice);
/** A step of a choice that drafts, of whose drafts so many were accepted. */
void dcn_worth_step(dcn_node_t *dcn, const dcn_part_t *part, uint32_t accepted);
/** The ticket ended well: its report is complete, and is remembered. */
void dcn_worth_end(dcn_node_t *dcn, dcn_ticket_t *ticket);
/** Tells a router what is remembered, once. */
void dcn_worth_tell(dcn_node_t *dcn, const char *router, uint64_t incarnation);
/** Adds to a heartbeat what steps and passes cost at the batch of now. */
void dcn_worth_costs(dcn_node_t *dcn, td_msg_heartbeat_t *load);

/* dcn_stream.c: tokens to text to the router */
/** Takes a choice's next token. Answers whether that ends it: a stop token, or the last one. */
bool dcn_stream_take(dcn_node_t *dcn, dcn_choice_t *choice, uint32_t token);
/** Makes text of tokens that were taken, up to a stop string, and sends it in one message. False:
 * the ticket has ended. Shape: [count]; hashes of the logits they were drawn from. */
bool dcn_stream_give(dcn_node_t *dcn, dcn_choice_t *choice, const td_sampled_t *tokens,
                     const uint64_t *hashes, uint32_t count);
/** Takes a choice's next token, whose text an earlier attempt has given.
 * Errors: TD_ERR_CORRUPT: it would have ended the choice. */
td_status_t dcn_stream_replay(dcn_node_t *dcn, dcn_choice_t *choice, uint32_t token);
/** Keeps a copy of the first of the tokens that a choice was drawn, all taken, for
 * dcn_stream_give_kept(). */
void dcn_stream_keep(dcn_node_t *dcn, dcn_choice_t *choice, uint32_t count);
/** Forgets what was kept of a ticket that has ended, the last that anything was kept of. */
void dcn_stream_drop_kept(dcn_node_t *dcn, const dcn_ticket_t *ticket);
/** Gives all that was kept. A choice that this ends may be in the step that runs. */
void dcn_stream_give_kept(dcn_node_t *dcn);
/** Lets go of the blocks and the drafter of a choice that has ended, which no step uses. */
void dcn_stream_release(dcn_choice_t *choice);
/** The choice has ended before this attempt. False: its ticket has ended. */
bool dcn_stream_skip(dcn_node_t *dcn, dcn_choice_t *choice);
/** Indexes and offers the blocks that a choice has filled since last time. */
void dcn_stream_publish(dcn_node_t *dcn, dcn_choice_t *choice);

/* dcn_metrics.c */
void dcn_metrics_declare(dcn_node_t *dcn);

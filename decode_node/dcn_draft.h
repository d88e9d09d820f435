/* dcn_draft.h - drafters that need passes of a model: a draft model (dcn_draft_model.c), the first
 * layers of the model itself (dcn_draft_exit.c) or heads on its hidden state (dcn_draft_medusa.c).
 * All choices of a step that use one draft
 * together, token by token, a row for each, in the worker's thread before the pass that verifies
 * them.
 *
 * The loop plans how many drafts each choice gets and makes a job of it, with blocks for the rows;
 * the worker runs the jobs (dcn_draft.c) and leaves the tokens in the choice; the loop takes note
 * of what was accepted. Design: decode_node/DESIGN.md, "Drafters that need passes".
 * Threads: loop, but dcn_draft_propose(): worker, during a step. Nothing allocates in a step. */
#pragma once

#include "common/kv/td_seq.h"
#include "common/model/td_gguf.h"
#include "common/model/td_heads.h"
#include "common/model/td_model.h"
#include "common/spec/td_draft.h"
#include "common/spec/td_spec_cost.h"
#include "decode_node/dcn_tree.h"

#define DCN_DRAFT_JOBS_MAX 256u
#define DCN_DRAFT_FILL_ROWS_MAX 64u /* rows of a step that catch up with contexts */
#define DCN_DRAFT_ROWS_MAX (DCN_DRAFT_JOBS_MAX + DCN_DRAFT_FILL_ROWS_MAX) /* of a pass */

struct dcn_node;
struct dcn_choice;
struct dcn_part;

/* How a draft's place was decided. */
typedef struct dcn_place {
    uint32_t second; /* what would have been drafted instead */
    bool has_second;
    uint32_t gap_class; /* by how far that was behind (dcn_tree.h) */
} dcn_place_t;

/* What a drafter does for one choice in one step. */
typedef struct dcn_draft_job {
    struct dcn_part *part;
    const uint32_t *blocks; /* borrowed: the table of its rows; NULL: they need none */
    uint32_t from; /* positions [from, end) of the context are computed in the first pass */
    uint32_t end;
    uint32_t k;       /* drafts wanted; 0: the context only */
    uint32_t count;   /* out: drafts made */
    uint32_t written; /* out: positions whose KV is written, from the first, with those of drafts */
    float *chances;   /* borrowed, [k][vocab]: the rejection rule's, written; NULL: coupled */
    bool goes_on;     /* the worker's own: it has a row in the next pass */
    uint32_t k_min;   /* drafts that are made whatever they promise */
    uint32_t passes;  /* out, of heads: places that a token was looked for */
    dcn_place_t places[TD_DRAFT_TOKENS_MAX]; /* out, [count], of heads and not by chances */
} dcn_draft_job_t;

/* A pass that was made. */
typedef struct dcn_draft_pass {
    uint32_t rows;
    uint64_t took_ns;
} dcn_draft_pass_t;

/* The passes of one drafter. */
typedef struct dcn_drafter {
    td_model_t *model;   /* borrowed; NULL: this node has none */
    uint8_t *pool_bytes; /* borrowed: what blocks are indexes of */
    uint32_t layers;     /* that it runs, from the first */
    uint32_t rows_max;   /* of a pass */
    td_step_cost_t cost; /* of a pass, with picking its tokens */
    dcn_draft_job_t jobs[DCN_DRAFT_JOBS_MAX];
    uint32_t job_count;
    uint32_t row_count;                               /* of the first pass */
    uint32_t fill_rows;                               /* of them, those that catch up */
    dcn_draft_pass_t passes[TD_DRAFT_TOKENS_MAX + 1]; /* of the step; the worker's until its end */
    uint32_t pass_count;
} dcn_drafter_t;

/* The draft model and its KV, which never leaves the node. */
typedef struct dcn_draft_model {
    td_gguf_t *gguf;   /* owned */
    td_model_t *model; /* owned; NULL: none */
    const td_model_info_t *info;
    uint8_t *bytes;  /* owned: the pool's */
    td_pool_t *pool; /* owned */
} dcn_draft_model_t;

/* Heads on the model's hidden state, and what their chains are made in. */
typedef struct dcn_medusa {
    td_heads_t *heads;    /* owned; NULL: none */
    float *states;        /* owned, [job][embed_dim] */
    td_heads_row_t *rows; /* owned, [job] */
    float *logits;        /* owned, [vocab]: of one place of one chain, for the rejection rule */
} dcn_medusa_t;

/* What a choice has in the draft model's pool. */
typedef struct dcn_draft_kv {
    td_seq_t seq;         /* owned; without a table where nothing is drafted */
    uint32_t tokens;      /* positions whose KV is written, from the first */
    bool begun;           /* it was promised blocks, and its prefix was looked for */
    td_block_root_t root; /* of its keys */
    td_block_key_t *keys; /* owned, [seq.block_cap]: of full blocks */
    uint32_t key_count;
    uint32_t indexed; /* leading blocks that are, or that others have indexed */
} dcn_draft_kv_t;

/* --- dcn_draft.c: what they share ------------------------------------------------------------- */

static inline bool dcn_drafter_needs_passes(uint32_t drafter)
{
    return drafter == TD_DRAFTER_DRAFT_MODEL || drafter == TD_DRAFTER_EARLY_EXIT ||
           drafter == TD_DRAFTER_MEDUSA;
}
/** The passes of a drafter (td_drafter_t); NULL: it needs none, or this node has no such model. */
dcn_drafter_t *dcn_draft_passes(struct dcn_node *dcn, uint32_t drafter);
/** Up to how many of k tokens could be drafted, if its context was computed. */
uint32_t dcn_draft_offer(struct dcn_node *dcn, const struct dcn_choice *choice, uint32_t k);
/** Before a step's jobs. */
void dcn_draft_begin(struct dcn_node *dcn);
/** Makes the job of a part with drafts planned; leaves in it how many can be drafted. */
void dcn_draft_prepare(struct dcn_node *dcn, struct dcn_part *part);
/** Worker: drafts for every job; a part's drafts become those that were made. Answers how long that
 * took. Units: ns. */
uint64_t dcn_draft_propose(struct dcn_node *dcn);
/** After a step: takes note of how long its passes of drafting took. */
void dcn_draft_measure(struct dcn_node *dcn);
/** After the tokens of a part that goes on were taken, with its job as the worker has left it. */
void dcn_draft_settle(struct dcn_node *dcn, const struct dcn_part *part);
/** There will be drafts that the rejection rule verifies: takes the memory for what they are drawn
 * with, once. Errors: TD_ERR_NO_MEMORY. */
TD_MUST_CHECK td_status_t dcn_draft_need_chances(struct dcn_node *dcn);
/** A job for the part; NULL: the step's passes are full. */
dcn_draft_job_t *dcn_draft_add_job(dcn_drafter_t *drafter, struct dcn_part *part, uint32_t rows);
/** Worker: the next draft of a job from its drafter's logits, and whether it goes on.
 * Shape: logits [vocab_size]. */
void dcn_draft_pick(struct dcn_node *dcn, dcn_draft_job_t *job, const float *logits);
/** How many of the node's stop tokens may not be picked for a position. */
uint32_t dcn_draft_banned(const struct dcn_node *dcn, const struct dcn_choice *choice,
                          uint32_t position);

/* --- dcn_draft_model.c ------------------------------------------------------------------------ */

/** Loads --draft-model, if there is one, and takes the memory of its pool; node.gguf is open.
 * Errors: TD_ERR_INVALID (another vocabulary, no memory for one block), and as td_gguf_open(),
 * td_model_load(). */
TD_MUST_CHECK td_status_t dcn_draft_model_open(struct dcn_node *dcn);
void dcn_draft_model_close(struct dcn_node *dcn);
/** The choice will draft. Errors: TD_ERR_NO_MEMORY. */
TD_MUST_CHECK td_status_t dcn_draft_model_admit(struct dcn_node *dcn, struct dcn_choice *choice);
uint32_t dcn_draft_model_offer(const struct dcn_node *dcn, const struct dcn_choice *choice,
                               uint32_t k);
void dcn_draft_model_prepare(struct dcn_node *dcn, struct dcn_part *part);
/** The choice's KV ends where its context does; full blocks are kept for others. */
void dcn_draft_model_settle(struct dcn_node *dcn, const dcn_draft_job_t *job);
/** Gives the choice's blocks back; it may draft again. */
void dcn_draft_model_release(struct dcn_choice *choice);
void dcn_draft_model_leave(struct dcn_choice *choice);
void dcn_draft_model_update_metrics(struct dcn_node *dcn);

/* --- dcn_draft_exit.c ------------------------------------------------------------------------- */

/** Layers as --early-exit-layers says. Errors: TD_ERR_INVALID (not fewer than the model has). */
TD_MUST_CHECK td_status_t dcn_draft_exit_open(struct dcn_node *dcn);
void dcn_draft_exit_prepare(struct dcn_node *dcn, struct dcn_part *part);

/* --- dcn_draft_medusa.c ----------------------------------------------------------------------- */

/** Loads --medusa-heads, if there is such a file; node.model is loaded.
 * Errors: as td_heads_load(). */
TD_MUST_CHECK td_status_t dcn_draft_medusa_open(struct dcn_node *dcn);
/** Before the model ends. */
void dcn_draft_medusa_close(struct dcn_node *dcn);
/** The choice will draft. Errors: TD_ERR_NO_MEMORY. */
TD_MUST_CHECK td_status_t dcn_draft_medusa_admit(const struct dcn_node *dcn,
                                                 struct dcn_choice *choice);
void dcn_draft_medusa_leave(struct dcn_choice *choice);
uint32_t dcn_draft_medusa_offer(const struct dcn_choice *choice, uint32_t k);
void dcn_draft_medusa_prepare(struct dcn_node *dcn, struct dcn_part *part);
/** Worker: keeps the hidden state of a row that wanted logits, counted from the pass's first: the
 * one that selected the choice's newest token. */
void dcn_draft_medusa_keep(const struct dcn_node *dcn, struct dcn_choice *choice,
                           uint32_t logit_row);
/** Worker: a pass of the heads over the jobs that go on; answers how many rows. */
uint32_t dcn_draft_medusa_pass(struct dcn_node *dcn, dcn_drafter_t *drafter, uint32_t pass);

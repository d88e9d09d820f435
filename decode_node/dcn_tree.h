/* dcn_tree.h - draft trees: beside places of a chain of drafts stands what else may come there, a
 * leaf each, verified in the same pass. A leaf's row has a block table of its own: the sequence's,
 * but for the block that the leaf's position is in. In its place is a scratch block of the pool,
 * with a copy of what is written of that block, and into which the chain's rows before the leaf
 * write too. So the row reads what it would read if the chain had never gone another way (I1).
 *
 * A leaf that is right has its KV copied into its place of the sequence. Scratch blocks are held
 * for one step, and never indexed, published or sent (I4, I5).
 *
 * Design: decode_node/DESIGN.md, "Trees"; common/model/DESIGN.md, "Trees".
 *
 * Threads: loop, but what says worker: in a step. Nothing allocates in a step. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "common/base/td_status.h"
#include "common/model/td_model.h"
#include "common/spec/td_spec_tree.h"

#define DCN_SIDES_MAX 64u     /* leaves of a step */
#define DCN_PART_SIDES_MAX 4u /* of a choice */
#define DCN_TREE_PLACES 4u    /* of a chain that goes on as long as that promises something */
#define DCN_GAP_CLASSES 12u   /* of places: by how far the second choice was behind the first */

#define DCN_TREE_MODES "auto|off|all"
typedef enum dcn_tree_mode {
    DCN_TREE_AUTO = 0, /* leaves that promise more than their row costs */
    DCN_TREE_OFF,
    DCN_TREE_ALL /* every second choice, as far as there is room */
} dcn_tree_mode_t;

struct dcn_node;
struct dcn_part;
struct dcn_draft_job;

/* What may come in a draft's place. */
typedef struct dcn_side {
    uint32_t token;
    uint32_t place;    /* of the draft that it stands beside, from 0 */
    uint32_t position; /* in the sequence */
} dcn_side_t;

/* How often first and second choices are right, by class; those of answers that are drawn apart
 * from those that are not. */
typedef struct dcn_place_stats {
    td_acceptance_t first[DCN_GAP_CLASSES];
    td_acceptance_t second[DCN_GAP_CLASSES];
} dcn_place_stats_t;

typedef struct dcn_place_rates {
    double first[DCN_GAP_CLASSES];
    double second[DCN_GAP_CLASSES];
} dcn_place_rates_t;

/* The trees of a step. */
typedef struct dcn_tree {
    dcn_tree_mode_t mode;
    uint32_t blocks_max; /* of a table */
    uint32_t *tables;    /* owned, [DCN_SIDES_MAX][blocks_max]; NULL: there are chains only */
    uint32_t scratch[DCN_SIDES_MAX]; /* blocks of the pool: of one side each */
    dcn_side_t sides[DCN_SIDES_MAX];
    uint32_t held;      /* scratch blocks, of this step */
    uint32_t used;      /* of them, by leaves */
    uint32_t rows_left; /* that the step has room for, with every draft that may be made */
    uint32_t rows;      /* of the step without the drafts of trees */
    double tokens;      /* that it is expected to give without those */
    double curve[TD_STEP_COST_ROWS_MAX + 1];
    dcn_place_stats_t seen[2];                   /* [is drawn] */
    dcn_place_rates_t rates[2];                  /* what they come to, for the step being made */
    td_spec_tree_t trees[TD_STEP_COST_ROWS_MAX]; /* scratch, of one part each */
} dcn_tree_t;

/** The class of a place whose second choice was so far behind the first, in what was compared; gap
 * >= 0. */
uint32_t dcn_tree_gap_class(double gap);
/** Takes the memory; a drafter that knows second choices is open. Errors: TD_ERR_NO_MEMORY. */
TD_MUST_CHECK td_status_t dcn_tree_open(struct dcn_node *dcn);
void dcn_tree_close(struct dcn_node *dcn);
/** The step is planned; lets chains that know how sure they are go on beyond that. */
void dcn_tree_begin(struct dcn_node *dcn);
/** Takes scratch blocks for as many leaves as the part may have, after every part has what its rows
 * and drafts need. Nobody gives way for it: without blocks there is a chain. */
void dcn_tree_prepare(struct dcn_node *dcn, struct dcn_part *part);
/** Worker: is it worth while to draft one more of the job? */
bool dcn_tree_goes_on(const struct dcn_node *dcn, const struct dcn_draft_job *job);
/** Worker: the drafts are made; chooses which of them and which leaves are verified, and fills the
 * leaves' blocks with what is written. */
void dcn_tree_grow(struct dcn_node *dcn);
/** Worker: has a row of the part's chain write for the leaves behind it. */
void dcn_tree_link(const struct dcn_node *dcn, const struct dcn_part *part, td_model_row_t *row);
/** Worker: the rows of the part's leaves. Answers how many. */
uint32_t dcn_tree_rows(const struct dcn_node *dcn, const struct dcn_part *part,
                       td_model_row_t *rows);
/** Worker: the leaf beside a draft that has this token; NULL: there is none. */
const dcn_side_t *dcn_tree_find(const struct dcn_node *dcn, const struct dcn_part *part,
                                uint32_t place, uint32_t token);
/** Worker: the part's leaf that was right gets its place in the sequence. */
void dcn_tree_settle(const struct dcn_node *dcn, const struct dcn_part *part);
/** Remembers how often choices were right, also those that no row was spent on. chain: drafts of
 * the part that were right, one after the other. */
void dcn_tree_observe(struct dcn_node *dcn, const struct dcn_part *part, uint32_t chain);
/** The step is over: gives the scratch blocks back. */
void dcn_tree_release(struct dcn_node *dcn);

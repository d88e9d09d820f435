#include "decode_node/dcn_tree.h"

#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_log.h"
#include "decode_node/dcn_node.h"

#define SEEN_MEMORY 0.995
#define SEEN_PRIOR_TRIALS 8.0

/* Where classes of gaps end, and how often second choices of each are right until more is known:
 * measured with SmolLM2's heads. */
static const double gap_ends[DCN_GAP_CLASSES - 1] = {0.15, 0.35, 0.6, 1.0, 1.5, 2.2, 3.2};
static const double gap_priors[DCN_GAP_CLASSES] = {0.42, 0.38, 0.33, 0.27, 0.2, 0.13, 0.07, 0.02};

uint32_t dcn_tree_gap_class(double gap)
{
    uint32_t at = 0;

    while (at < DCN_GAP_CLASSES - 1 && gap >= gap_ends[at]) {
        at++;
    }
    return at;
}

/* --- the loop's thread ------------------------------------------------------------------------ */

td_status_t dcn_tree_open(dcn_node_t *d)
{
    const char *mode = td_config_text(d->node.proc.config, "draft-tree");
    dcn_tree_t *t = &d->tree;

    t->mode = strcmp(mode, "off") == 0   ? DCN_TREE_OFF
              : strcmp(mode, "all") == 0 ? DCN_TREE_ALL
                                         : DCN_TREE_AUTO;
    if (t->mode == DCN_TREE_OFF) {
        return TD_OK;
    }
    t->blocks_max = td_kv_blocks_for(&d->node.info->kv, d->node.info->context_max);
    t->tables = td_calloc((size_t)DCN_SIDES_MAX * t->blocks_max, sizeof(*t->tables));
    if (t->tables == NULL) {
        TD_LOG_ERROR("no memory for draft trees", "blocks=%u", t->blocks_max);
        return TD_ERR_NO_MEMORY;
    }
    return TD_OK;
}

void dcn_tree_close(dcn_node_t *d)
{
    td_free(d->tree.tables);
    d->tree.tables = NULL;
}

void dcn_tree_begin(dcn_node_t *d, double price)
{
    dcn_tree_t *t = &d->tree;
    uint32_t rows = 0;

    for (uint32_t i = 0; i < d->batch.part_count; i++) {
        rows += d->batch.parts[i].rows + d->batch.parts[i].drafts;
    }
    t->rows_left = d->rows_max - TD_MIN(rows, d->rows_max);
    t->price = t->mode == DCN_TREE_ALL ? 0 : price;
    t->rate_most = 0;
    for (uint32_t i = 0; i < DCN_GAP_CLASSES; i++) {
        t->rates[i] = td_acceptance_rate(&t->seen[i], gap_priors[i], SEEN_PRIOR_TRIALS);
        t->rate_most = TD_MAX(t->rate_most, t->rates[i]);
    }
}

/* Places of a part's drafts at which a leaf could promise enough. */
static uint32_t places_worth(const dcn_tree_t *t, const dcn_part_t *part)
{
    double reached = 1; /* how likely the drafts before are right */
    uint32_t places = 0;

    while (places < part->drafts && reached * t->rate_most >= t->price) {
        reached *= part->alpha;
        places++;
    }
    return places;
}

void dcn_tree_prepare(dcn_node_t *d, dcn_part_t *part)
{
    dcn_tree_t *t = &d->tree;
    uint32_t most = 0;

    if (t->tables == NULL || part->job == NULL || part->choice->drafter != TD_DRAFTER_MEDUSA ||
        part->ticket->work.draft_rule == TD_DRAFT_RULE_REJECTION || dcn_preempt_someone_waits(d)) {
        return;
    }
    most = TD_MIN(TD_MIN(places_worth(t, part), DCN_PART_SIDES_MAX),
                  TD_MIN(t->rows_left, DCN_SIDES_MAX - t->held));
    part->side_first = t->held;
    while (part->sides < most && td_pool_take(d->node.pool, &t->scratch[t->held]) == TD_OK) {
        t->held++;
        t->rows_left--;
        part->sides++;
    }
}

void dcn_tree_observe(dcn_node_t *d, const dcn_part_t *part, uint32_t chain)
{
    const dcn_choice_t *c = part->choice;

    if (part->job == NULL || !part->job->has_seconds) {
        return;
    }
    for (uint32_t i = 0; i <= chain && i < part->drafts; i++) {
        const dcn_second_t *second = &part->job->seconds[i];
        if (second->gap_class < DCN_GAP_CLASSES) {
            td_acceptance_observe(&d->tree.seen[second->gap_class], 1,
                                  second->token == c->sampled[i].token, SEEN_MEMORY);
        }
    }
}

void dcn_tree_release(dcn_node_t *d)
{
    while (d->tree.held > 0) {
        td_pool_unref(d->node.pool, d->tree.scratch[--d->tree.held]);
    }
}

/* --- the worker's thread ---------------------------------------------------------------------- */

/* The leaf's block: what the sequence has written of its own; the rest comes from this pass. */
static void add_side(dcn_node_t *d, dcn_part_t *part, uint32_t place, uint32_t token)
{
    dcn_tree_t *t = &d->tree;
    const dcn_choice_t *c = part->choice;
    const td_kv_layout_t *kv = &d->node.info->kv;
    const uint32_t at = part->side_first + part->sides++;
    const uint32_t position = c->kv_tokens + part->rows + place;
    const uint32_t block = position / kv->block_tokens;
    uint32_t *table = t->tables + (size_t)at * t->blocks_max;

    t->sides[at] = (dcn_side_t){.token = token, .place = place, .position = position};
    memcpy(table, c->seq.blocks, block * sizeof(*table));
    table[block] = t->scratch[at];
    if (c->kv_tokens > block * kv->block_tokens) {
        td_kv_copy_tokens(kv, td_pool_bytes(d->node.pool, t->scratch[at]),
                          td_pool_bytes(d->node.pool, c->seq.blocks[block]), 0,
                          c->kv_tokens - block * kv->block_tokens);
    }
}

void dcn_tree_grow(dcn_node_t *d, dcn_part_t *part)
{
    const dcn_tree_t *t = &d->tree;
    const uint32_t most = part->sides;
    double reached = 1;

    part->sides = 0;
    for (uint32_t i = 0; i < part->drafts && part->sides < most; i++) {
        const dcn_second_t *second = &part->job->seconds[i];
        if (second->gap_class < DCN_GAP_CLASSES &&
            reached * t->rates[second->gap_class] >= t->price) {
            add_side(d, part, i, second->token);
        }
        reached *= part->alpha;
    }
}

/* Leaves stand in the order of their positions, so those that one row writes for are together. */
void dcn_tree_link(const dcn_node_t *d, const dcn_part_t *part, td_model_row_t *row)
{
    const dcn_tree_t *t = &d->tree;
    const uint32_t block_tokens = d->node.info->kv.block_tokens;
    const uint32_t end = part->side_first + part->sides;
    uint32_t at = part->side_first;

    while (at < end && t->sides[at].position <= row->position) {
        at++;
    }
    row->copies = &t->scratch[at];
    while (at + row->copy_count < end && t->sides[at + row->copy_count].position / block_tokens ==
                                             row->position / block_tokens) {
        row->copy_count++;
    }
}

uint32_t dcn_tree_rows(const dcn_node_t *d, const dcn_part_t *part, td_model_row_t *rows)
{
    const dcn_tree_t *t = &d->tree;

    for (uint32_t i = 0; i < part->sides; i++) {
        const uint32_t at = part->side_first + i;
        rows[i] = (td_model_row_t){.token = t->sides[at].token,
                                   .position = t->sides[at].position,
                                   .blocks = t->tables + (size_t)at * t->blocks_max,
                                   .is_branch = true,
                                   .want_logits = true};
    }
    return part->sides;
}

const dcn_side_t *dcn_tree_find(const dcn_node_t *d, const dcn_part_t *part, uint32_t place,
                                uint32_t token)
{
    for (uint32_t i = 0; i < part->sides; i++) {
        const dcn_side_t *side = &d->tree.sides[part->side_first + i];
        if (side->place == place && side->token == token) {
            return side;
        }
    }
    return NULL;
}

void dcn_tree_settle(const dcn_node_t *d, const dcn_part_t *part)
{
    const td_kv_layout_t *kv = &d->node.info->kv;
    const dcn_side_t *side = part->side_taken;

    if (side != NULL) {
        const uint32_t slot = side->position % kv->block_tokens;
        const uint32_t block = part->choice->seq.blocks[side->position / kv->block_tokens];
        td_kv_copy_tokens(kv, td_pool_bytes(d->node.pool, block),
                          td_pool_bytes(d->node.pool, d->tree.scratch[side - d->tree.sides]), slot,
                          slot + 1);
    }
}

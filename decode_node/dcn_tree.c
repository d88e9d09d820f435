#include "decode_node/dcn_tree.h"

#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/base/td_log.h"
#include "decode_node/dcn_node.h"

#define SEEN_MEMORY 0.998
#define SEEN_PRIOR_TRIALS 8.0

/* Where classes of gaps end, and how often choices of each are right until more is known: measured
 * with SmolLM2's heads. */
static const double gap_ends[DCN_GAP_CLASSES - 1] = {0.15, 0.35, 0.6, 1.0, 1.5, 2.2,
                                                     3.2,  4.5,  6.0, 8.0, 11.0};
static const double first_priors[DCN_GAP_CLASSES] = {0.2, 0.2,  0.24, 0.28, 0.38, 0.46,
                                                     0.6, 0.65, 0.75, 0.88, 0.95, 0.97};
static const double second_priors[DCN_GAP_CLASSES] = {0.14, 0.12, 0.11, 0.09, 0.09, 0.09,
                                                      0.07, 0.04, 0.03, 0.01, 0.01, 0.01};

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

/* Does the part's drafter say how sure it is of what it has drafted? */
static bool is_tree(const dcn_part_t *part)
{
    return part->drafts > 0 && part->choice->drafter == TD_DRAFTER_MEDUSA &&
           part->ticket->work.draft_rule != TD_DRAFT_RULE_REJECTION;
}

static bool is_drawn(const dcn_part_t *part)
{
    return part->ticket->work.temperature > 0;
}

/* What the step comes to without the drafts of trees. */
static void count_others(dcn_tree_t *t, const dcn_part_t *part)
{
    double reached = 1;

    t->rows += part->rows;
    t->tokens += part->samples ? 1 : 0;
    for (uint32_t i = 0; !is_tree(part) && i < part->drafts; i++) {
        reached *= part->alpha;
        t->tokens += reached;
        t->rows++;
    }
}

static void begin_rates(dcn_tree_t *t)
{
    for (uint32_t i = 0; i < 2 * DCN_GAP_CLASSES; i++) {
        const dcn_place_stats_t *seen = &t->seen[i % 2];
        const uint32_t c = i / 2;
        t->rates[i % 2].first[c] =
            td_acceptance_rate(&seen->first[c], first_priors[c], SEEN_PRIOR_TRIALS);
        t->rates[i % 2].second[c] =
            td_acceptance_rate(&seen->second[c], second_priors[c], SEEN_PRIOR_TRIALS);
    }
}

void dcn_tree_begin(dcn_node_t *d)
{
    dcn_tree_t *t = &d->tree;
    dcn_batch_t *b = &d->batch;
    uint32_t rows = 0;

    t->rows = 0;
    t->tokens = 0;
    for (uint32_t i = 0; i < b->part_count; i++) {
        count_others(t, &b->parts[i]);
        rows += b->parts[i].rows + b->parts[i].drafts;
    }
    t->rows_left = d->rows_max - TD_MIN(rows, d->rows_max);
    if (t->rows == rows) {
        return; /* no part has a tree */
    }
    for (uint32_t i = 0; i < b->part_count; i++) {
        dcn_part_t *part = &b->parts[i];
        const uint32_t most = TD_MIN(part->proposed, DCN_TREE_PLACES);
        if (is_tree(part) && part->drafts < most && most - part->drafts <= t->rows_left) {
            t->rows_left -= most - part->drafts;
            part->drafts = most;
        }
    }
    td_step_cost_curve(&d->step_cost, d->rows_max, t->curve);
    begin_rates(t);
}

/* Could the surest second choice be worth its row, beside the draft of a first place? */
static bool leaf_may_pay(const dcn_node_t *d, const dcn_part_t *part)
{
    const dcn_tree_t *t = &d->tree;
    double most = 0;

    for (uint32_t i = 0; i < DCN_GAP_CLASSES; i++) {
        most = TD_MAX(most, t->rates[is_drawn(part)].second[i]);
    }
    return t->mode == DCN_TREE_ALL ||
           td_spec_goes_on(t->curve, d->rows_max, t->rows + 1, t->tokens, part->draft_ns, most, 0);
}

void dcn_tree_prepare(dcn_node_t *d, dcn_part_t *part)
{
    dcn_tree_t *t = &d->tree;
    uint32_t most = 0;

    if (t->tables == NULL || part->job == NULL || !is_tree(part) || dcn_preempt_someone_waits(d) ||
        !leaf_may_pay(d, part)) {
        return;
    }
    most = TD_MIN(TD_MIN(part->drafts, DCN_PART_SIDES_MAX),
                  TD_MIN(t->rows_left, DCN_SIDES_MAX - t->held));
    while (part->sides < most && td_pool_take(d->node.pool, &t->scratch[t->held]) == TD_OK) {
        t->held++;
        t->rows_left--;
        part->sides++;
    }
}

void dcn_tree_observe(dcn_node_t *d, const dcn_part_t *part, uint32_t chain)
{
    const dcn_choice_t *c = part->choice;
    dcn_place_stats_t *seen = &d->tree.seen[is_drawn(part)];

    if (part->job == NULL || part->job->passes == 0 || part->job->chances != NULL) {
        return;
    }
    for (uint32_t i = 0; i <= chain && i < part->job->count; i++) {
        const dcn_place_t *place = &part->job->places[i];
        const uint32_t token = c->sampled[i].token;
        td_acceptance_observe(&seen->first[place->gap_class], 1, token == c->drafts[i],
                              SEEN_MEMORY);
        if (place->has_second) {
            td_acceptance_observe(&seen->second[place->gap_class], 1, token == place->second,
                                  SEEN_MEMORY);
        }
    }
}

void dcn_tree_release(dcn_node_t *d)
{
    while (d->tree.held > 0) {
        td_pool_unref(d->node.pool, d->tree.scratch[--d->tree.held]);
    }
    d->tree.used = 0;
}

/* --- the worker's thread ---------------------------------------------------------------------- */

bool dcn_tree_goes_on(const dcn_node_t *d, const dcn_draft_job_t *job)
{
    const dcn_tree_t *t = &d->tree;
    const dcn_part_t *part = job->part;
    double reached = 1;
    double tokens = t->tokens;

    for (uint32_t i = 0; i < job->count; i++) {
        reached *= t->rates[is_drawn(part)].first[job->places[i].gap_class];
        tokens += reached;
    }
    return td_spec_goes_on(t->curve, d->rows_max, t->rows + job->count, tokens,
                           (double)(td_now_ns() - d->batch.started_ns), reached * part->alpha,
                           part->draft_ns);
}

static void fill_tree(const dcn_tree_t *t, const dcn_part_t *part, td_spec_tree_t *out)
{
    const dcn_place_rates_t *rates = &t->rates[is_drawn(part)];

    *out = (td_spec_tree_t){.places = part->job->count,
                            .chain_min = part->job->k_min,
                            .leaves_min = t->mode == DCN_TREE_ALL ? part->sides : 0,
                            .leaves_max = part->sides};
    for (uint32_t i = 0; i < out->places; i++) {
        const dcn_place_t *place = &part->job->places[i];
        out->chain[i] = rates->first[place->gap_class];
        out->leaves[i] = place->has_second ? rates->second[place->gap_class] : 0;
    }
}

/* The leaf's block: what the sequence has written of its own; the rest comes from this pass. */
static void add_side(dcn_node_t *d, dcn_part_t *part, uint32_t place)
{
    dcn_tree_t *t = &d->tree;
    const dcn_choice_t *c = part->choice;
    const td_kv_layout_t *kv = &d->node.info->kv;
    const uint32_t at = t->used++;
    const uint32_t position = c->kv_tokens + part->rows + place;
    const uint32_t block = position / kv->block_tokens;
    uint32_t *table = t->tables + (size_t)at * t->blocks_max;

    part->sides++;
    t->sides[at] = (dcn_side_t){
        .token = part->job->places[place].second, .place = place, .position = position};
    memcpy(table, c->seq.blocks, block * sizeof(*table));
    table[block] = t->scratch[at];
    if (c->kv_tokens > block * kv->block_tokens) {
        td_kv_copy_tokens(kv, td_pool_bytes(d->node.pool, t->scratch[at]),
                          td_pool_bytes(d->node.pool, c->seq.blocks[block]), 0,
                          c->kv_tokens - block * kv->block_tokens);
        td_model_kv_changed(d->node.model, t->scratch[at]);
    }
}

/* What was chosen of a part's tree: so many rows of its chain, and its leaves. */
static void take_tree(dcn_node_t *d, dcn_part_t *part, const td_spec_tree_t *tree)
{
    part->drafts = tree->k;
    part->side_first = d->tree.used;
    part->sides = 0;
    for (uint32_t place = 0; place < tree->k; place++) {
        if ((tree->leaf_places & 1u << place) != 0) {
            add_side(d, part, place);
        }
    }
}

void dcn_tree_grow(dcn_node_t *d)
{
    dcn_tree_t *t = &d->tree;
    dcn_batch_t *b = &d->batch;
    uint32_t owners[TD_STEP_COST_ROWS_MAX];
    uint32_t count = 0;

    for (uint32_t i = 0; i < b->part_count; i++) {
        dcn_part_t *part = &b->parts[i];
        if (part->job != NULL && is_tree(part)) { /* as long as it has a draft */
            owners[count] = i;
            fill_tree(t, part, &t->trees[count++]);
        } else {
            part->sides = 0;
        }
    }
    if (count > 0) {
        td_spec_choose(t->curve, d->rows_max, t->rows, t->tokens,
                       (double)(td_now_ns() - b->started_ns), t->trees, count);
    }
    for (uint32_t i = 0; i < count; i++) {
        take_tree(d, &b->parts[owners[i]], &t->trees[i]);
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
    while (at + row->copy_count < end &&
           t->sides[at + row->copy_count].position / block_tokens == row->position / block_tokens) {
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
        td_model_kv_changed(d->node.model, block);
    }
}

/* early_exit: the model's first layers, then its output norm and head. What they write is what the
 * pass that verifies the drafts writes there again, so they need no memory of their own. */
#include "common/base/td_base.h"
#include "common/base/td_log.h"
#include "decode_node/dcn_node.h"

/* Too few layers guess badly, and too many cost as much as what they save. */
#define EXIT_SHARE 3u /* a third of the layers */

td_status_t dcn_draft_exit_open(dcn_node_t *d)
{
    const uint32_t all = d->node.info->kv.layers;
    uint32_t layers = (uint32_t)td_config_u64(d->node.proc.config, "early-exit-layers");

    if (layers >= all && layers > 0) {
        TD_LOG_ERROR("option out of range", "early-exit-layers=%u model=%u expected=\"fewer\"",
                     layers, all);
        return TD_ERR_INVALID;
    }
    if (layers == 0) {
        layers = (all + EXIT_SHARE - 1) / EXIT_SHARE;
    }
    d->exit_passes.model = d->node.model;
    d->exit_passes.pool_bytes = td_pool_base(d->node.pool);
    d->exit_passes.layers = layers;
    d->exit_passes.rows_max = d->rows_max;
    return TD_OK;
}

/* The rows of the part itself, through fewer layers; blocks for the drafts are ready. */
void dcn_draft_exit_prepare(dcn_node_t *d, dcn_part_t *part)
{
    const dcn_choice_t *c = part->choice;
    dcn_draft_job_t *job = dcn_draft_add_job(&d->exit_passes, part, part->rows);

    if (job == NULL) {
        part->drafts = 0;
        return;
    }
    job->blocks = c->seq.blocks;
    job->from = c->kv_tokens;
    job->end = c->kv_tokens + part->rows;
    job->k = part->drafts;
}

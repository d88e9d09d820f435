/* draft_model: a second, smaller model with the same vocabulary. Its KV is computed here and stays
 * here: in a pool of its own, with a prefix cache of its own. A choice's context is computed when
 * it first drafts, some rows a step; when the pool is full it doesn't draft, and nobody gives way.
 */
#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_log.h"
#include "decode_node/dcn_node.h"

#define TOKENS_KEY "tokenizer.ggml.tokens"
/* So much of a context is caught up with on the side: what some steps without drafts leave behind.
 */
#define CATCH_UP_MAX (2 * TD_DRAFT_TOKENS_MAX)

/* --- loading ---------------------------------------------------------------------------------- */

/* Drafts are token ids: they must mean the same to both models. */
static td_status_t check_vocabulary(const dcn_node_t *d, const td_gguf_t *draft)
{
    const uint32_t wanted = d->node.info->vocab_size;
    uint32_t got = 0;
    const char *texts[2] = {NULL, NULL};
    size_t lens[2] = {0, 0};

    if (td_gguf_get_array_len(draft, TOKENS_KEY, &got) != TD_OK || got != wanted) {
        TD_LOG_ERROR("draft model has another vocabulary", "tokens=%u expected=%u", got, wanted);
        return TD_ERR_INVALID;
    }
    for (uint32_t id = 0; id < wanted; id++) {
        if (td_gguf_get_array_str(d->node.gguf, TOKENS_KEY, id, &texts[0], &lens[0]) != TD_OK ||
            td_gguf_get_array_str(draft, TOKENS_KEY, id, &texts[1], &lens[1]) != TD_OK ||
            lens[0] != lens[1] || memcmp(texts[0], texts[1], lens[0]) != 0) {
            TD_LOG_ERROR("draft model has another vocabulary",
                         "first_token_that_differs=%u expected=\"the model's texts and ids\"", id);
            return TD_ERR_INVALID;
        }
    }
    return TD_OK;
}

static td_status_t load(dcn_node_t *d, const char *path)
{
    dcn_draft_model_t *m = &d->draft_model;
    td_model_options_t options;

    TD_TRY(td_node_model_options(&d->node, &options));
    options.rows_max = d->rows_max + DCN_DRAFT_FILL_ROWS_MAX;
    options.logit_rows_max = d->rows_max;
    options.attention = td_config_text(d->node.proc.config, "attention");
    options.backend = TD_BACKEND_CPU; /* a device has no room left beside the model and its KV */
    TD_TRY(td_gguf_open(path, &m->gguf));
    TD_TRY(check_vocabulary(d, m->gguf));
    TD_TRY(td_model_load(m->gguf, &options, &m->model));
    m->info = td_model_info(m->model);
    if (m->info->vocab_size != d->node.info->vocab_size) {
        TD_LOG_ERROR("draft model has another vocabulary", "logits=%u expected=%u",
                     m->info->vocab_size, d->node.info->vocab_size);
        return TD_ERR_INVALID;
    }
    return TD_OK;
}

static td_status_t take_pool(dcn_node_t *d)
{
    dcn_draft_model_t *m = &d->draft_model;
    const uint64_t bytes = td_config_u64(d->node.proc.config, "draft-kv-memory");
    const size_t block_bytes = td_kv_block_bytes(&m->info->kv);
    const uint64_t blocks = TD_MIN(bytes / block_bytes, (uint64_t)TD_POOL_BLOCKS_MAX);

    if (blocks == 0) {
        TD_LOG_ERROR("draft kv memory below one block", "draft_kv_memory=%llu block_bytes=%zu",
                     (unsigned long long)bytes, block_bytes);
        return TD_ERR_INVALID;
    }
    m->bytes = td_alloc_aligned(TD_CACHE_LINE_BYTES, (size_t)blocks * block_bytes);
    if (m->bytes == NULL) {
        TD_LOG_ERROR("no memory for the draft model's kv", "bytes=%zu",
                     (size_t)blocks * block_bytes);
        return TD_ERR_NO_MEMORY;
    }
    TD_TRY(td_pool_create(m->bytes, (uint32_t)blocks, block_bytes, &m->pool));
    TD_LOG_INFO("draft model", "name=\"%s\" layers=%u blocks=%llu tokens=%llu context_max=%u",
                m->info->name, m->info->kv.layers, (unsigned long long)blocks,
                (unsigned long long)blocks * m->info->kv.block_tokens, m->info->context_max);
    return TD_OK;
}

td_status_t dcn_draft_model_open(dcn_node_t *d)
{
    const char *path = td_config_text(d->node.proc.config, "draft-model");

    if (path == NULL) {
        return TD_OK;
    }
    TD_TRY(load(d, path));
    TD_TRY(take_pool(d));
    d->draft_passes.model = d->draft_model.model;
    d->draft_passes.pool_bytes = td_pool_base(d->draft_model.pool);
    d->draft_passes.layers = d->draft_model.info->kv.layers;
    d->draft_passes.rows_max = d->rows_max + DCN_DRAFT_FILL_ROWS_MAX;
    return TD_OK;
}

void dcn_draft_model_close(dcn_node_t *d)
{
    dcn_draft_model_t *m = &d->draft_model;

    td_pool_destroy(m->pool);
    td_model_destroy(m->model);
    td_gguf_close(m->gguf);
    td_free(m->bytes);
    memset(m, 0, sizeof(*m));
}

/* --- a choice's KV ---------------------------------------------------------------------------- */

td_status_t dcn_draft_model_admit(dcn_node_t *d, dcn_choice_t *c)
{
    const td_msg_work_t *w = &c->ticket->work;
    const dcn_draft_model_t *m = &d->draft_model;
    dcn_draft_kv_t *kv = &c->draft_kv;

    TD_TRY(td_seq_init(&kv->seq, m->pool, &m->info->kv, &m->info->attention,
                       TD_MIN(w->prompt_tokens + w->max_tokens, m->info->context_max)));
    kv->keys = td_calloc(kv->seq.block_cap, sizeof(*kv->keys));
    if (kv->keys == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    td_node_root_of(&d->node, m->info, w->cache_salt.at, w->cache_salt.len, &kv->root);
    return TD_OK;
}

void dcn_draft_model_release(dcn_choice_t *c)
{
    dcn_draft_kv_t *kv = &c->draft_kv;

    if (kv->seq.blocks != NULL) {
        td_seq_release(&kv->seq);
        td_seq_trim(&kv->seq, 0);
    }
    kv->tokens = 0;
    kv->indexed = 0;
    kv->begun = false;
}

void dcn_draft_model_leave(dcn_choice_t *c)
{
    td_seq_fini(&c->draft_kv.seq);
    td_free(c->draft_kv.keys);
    c->draft_kv.keys = NULL;
    c->draft_kv.begun = false;
}

/* Keys of the full blocks of the first `tokens` tokens. */
static void make_keys(dcn_choice_t *c, uint32_t tokens)
{
    dcn_draft_kv_t *kv = &c->draft_kv;
    const uint32_t block_tokens = kv->seq.layout->block_tokens;

    for (; (kv->key_count + 1) * block_tokens <= tokens; kv->key_count++) {
        dcn_choice_block_key(c, &kv->root, block_tokens, kv->key_count,
                             kv->key_count > 0 ? &kv->keys[kv->key_count - 1] : NULL,
                             &kv->keys[kv->key_count]);
    }
}

/* Blocks for the whole context and what outputs have lately been long are promised at once, so that
 * nobody is left with half a context while others hold the rest. */
static bool begin(dcn_node_t *d, dcn_choice_t *c, uint32_t newest)
{
    dcn_draft_kv_t *kv = &c->draft_kv;
    const td_msg_work_t *w = &c->ticket->work;
    const uint32_t block_tokens = kv->seq.layout->block_tokens;
    const uint32_t expected = w->prompt_tokens + dcn_output_expected(d, w->max_tokens);
    const uint32_t tokens = TD_MIN(TD_MAX(expected, newest + 1), kv->seq.block_cap * block_tokens);
    uint32_t most = 0;
    uint32_t needed = 0;

    make_keys(c, newest);
    kv->indexed = td_seq_match(&kv->seq, kv->keys, TD_MIN(kv->key_count, newest / block_tokens));
    most = td_attention_blocks_max(kv->seq.mask, block_tokens, tokens, DCN_DRAFT_FILL_ROWS_MAX);
    needed = TD_MIN(td_kv_blocks_for(kv->seq.layout, tokens) - kv->indexed, most);
    if (td_seq_reserve(&kv->seq, needed) != TD_OK) {
        td_seq_release(&kv->seq);
        kv->indexed = 0;
        return false;
    }
    kv->tokens = kv->indexed * block_tokens;
    kv->begun = true;
    td_metric_add(d->draft_cached, kv->tokens);
    return true;
}

uint32_t dcn_draft_model_offer(const dcn_node_t *d, const dcn_choice_t *c, uint32_t k)
{
    const uint32_t next = c->ticket->work.prompt_tokens + c->token_count; /* of the first draft */
    const uint32_t context_max = d->draft_model.info->context_max;

    return c->draft_kv.seq.blocks == NULL || next > context_max ? 0
                                                                : TD_MIN(k, context_max - next + 1);
}

/* Positions [from, end) can be written; answers how far from `from` that goes. */
static uint32_t make_room(dcn_draft_kv_t *kv, uint32_t from, uint32_t end)
{
    uint32_t at = from;

    while (at < end && td_seq_prepare_write(&kv->seq, at) == TD_OK) {
        at++;
    }
    return at;
}

/* A context that is here but for a few tokens is computed to its end, and drafts follow. Of another
 * some rows are, and the choice drafts in a later step. */
void dcn_draft_model_prepare(dcn_node_t *d, dcn_part_t *part)
{
    dcn_drafter_t *p = &d->draft_passes;
    dcn_choice_t *c = part->choice;
    dcn_draft_kv_t *kv = &c->draft_kv;
    const uint32_t newest = c->ticket->work.prompt_tokens + c->token_count - 1;
    const uint32_t k = part->drafts;
    const bool begun = kv->begun || begin(d, c, newest);
    const uint32_t behind = newest - kv->tokens; /* without the newest token itself */
    uint32_t rows = behind + 1;
    uint32_t end = 0;
    dcn_draft_job_t *job = NULL;

    part->drafts = 0;
    if (!begun) {
        return;
    }
    if (behind > CATCH_UP_MAX) {
        rows = TD_MIN(rows, DCN_DRAFT_FILL_ROWS_MAX - p->fill_rows);
    }
    end = make_room(kv, kv->tokens, kv->tokens + rows);
    rows = end - kv->tokens;
    job = rows == 0 ? NULL : dcn_draft_add_job(p, part, rows);
    if (job == NULL) {
        return;
    }
    p->fill_rows += behind > CATCH_UP_MAX ? rows : 0;
    job->blocks = kv->seq.blocks;
    job->from = kv->tokens;
    job->end = end;
    if (end == newest + 1) { /* the last draft is never a row */
        job->k = make_room(kv, end, newest + k) - newest;
        part->drafts = job->k;
    }
}

void dcn_draft_model_settle(dcn_node_t *d, const dcn_draft_job_t *job)
{
    dcn_choice_t *c = job->part->choice;
    dcn_draft_kv_t *kv = &c->draft_kv;
    const uint32_t block_tokens = kv->seq.layout->block_tokens;

    td_metric_add(d->draft_computed, job->end - job->from);
    kv->tokens = TD_MIN(job->written, c->kv_tokens); /* what follows was of wrong drafts */
    td_seq_truncate(&kv->seq, kv->tokens);
    make_keys(c, kv->tokens);
    for (; (kv->indexed + 1) * block_tokens <= kv->tokens; kv->indexed++) {
        const uint32_t at = kv->indexed;
        /* Nobody else ever reads them, so nobody asks for their hash. Another choice may have been
         * faster: then ours stays private. */
        (void)!td_seq_index(&kv->seq, at, at > 0 ? &kv->keys[at - 1] : NULL, &kv->keys[at], 0);
    }
    td_seq_forget(&kv->seq, kv->tokens);
}

void dcn_draft_model_update_metrics(dcn_node_t *d)
{
    td_pool_counts_t counts = {0};

    if (d->draft_model.pool != NULL) {
        counts = td_pool_counts(d->draft_model.pool);
    }
    td_metric_set(d->draft_kv_states[0], counts.free);
    td_metric_set(d->draft_kv_states[1], counts.reserved);
    td_metric_set(d->draft_kv_states[2], counts.cached);
    td_metric_set(d->draft_kv_states[3], counts.active);
}

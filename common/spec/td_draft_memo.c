/* memo: what followed this very text the last time that it was answered. Good where the same is
 * asked again and again. It follows the remembered path for as long as the output agrees, and asks
 * anew at each block's end; where there is no path, or it was left, prompt_lookup proposes.
 * Source: design, section 6. */
#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/spec/td_draft_internal.h"

typedef struct memo {
    td_draft_t base;
    td_draft_t *lookup;   /* owned */
    td_memo_t *table;     /* borrowed; NULL: lookup alone */
    td_block_root_t root; /* what follows is of the table's use only */
    bool has_parent;
    td_block_key_t parent; /* of the last full block */
    uint32_t *block;       /* owned; [block_tokens]: behind it */
    uint32_t filled;
    uint32_t *path; /* owned; [td_memo_path_max()] */
    uint32_t path_tokens;
    uint32_t path_at; /* tokens of it that have come */
    bool followed;    /* by the last proposal */
} memo_t;

static void memo_destroy(td_draft_t *draft)
{
    memo_t *m = (memo_t *)draft;

    td_draft_destroy(m->lookup);
    td_free(m->block);
    td_free(m->path);
    td_free(m);
}

static td_status_t begin(memo_t *m, const td_memo_start_t *start)
{
    m->block = td_calloc(td_memo_block_tokens(m->table), sizeof(*m->block));
    m->path = td_calloc(td_memo_path_max(m->table), sizeof(*m->path));
    if (m->block == NULL || m->path == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    m->root = *start->root;
    m->has_parent = start->has_parent;
    m->parent = start->parent;
    m->filled = start->tail_tokens;
    if (m->filled > 0) {
        memcpy(m->block, start->tail, m->filled * sizeof(*m->block));
    }
    m->path_tokens = td_memo_find(m->table, &start->key, td_now_ns(), m->path);
    return TD_OK;
}

static td_status_t memo_create(const td_draft_config_t *config, td_draft_t **out)
{
    memo_t *m = td_calloc(1, sizeof(*m));
    td_status_t status = TD_ERR_NO_MEMORY;

    if (m == NULL) {
        return status;
    }
    m->base.ops = &td_draft_memo_ops;
    status = td_draft_create(TD_DRAFTER_PROMPT_LOOKUP, config, &m->lookup);
    if (status == TD_OK && config->memo != NULL && config->start != NULL) {
        m->table = config->memo;
        status = begin(m, config->start);
    }
    if (status != TD_OK) {
        memo_destroy(&m->base);
        return status;
    }
    *out = &m->base;
    return TD_OK;
}

/* At a block's end what is known of the whole text counts, and reaches further; without it the
 * path before goes on, if it was right so far. */
static void end_block(memo_t *m)
{
    td_block_key_t key;
    uint32_t found = 0;

    td_block_key_next(&m->root, m->has_parent ? &m->parent : NULL, m->block, m->filled, &key);
    m->parent = key;
    m->has_parent = true;
    m->filled = 0;
    found = td_memo_find(m->table, &key, td_now_ns(), m->path);
    if (found > 0) {
        m->path_tokens = found;
        m->path_at = 0;
    }
}

static void memo_append(td_draft_t *draft, const uint32_t *tokens, uint32_t count, bool is_output)
{
    memo_t *m = (memo_t *)draft;

    td_draft_append(m->lookup, tokens, count, is_output);
    for (uint32_t i = 0; m->table != NULL && is_output && i < count; i++) {
        if (m->path_at < m->path_tokens && m->path[m->path_at] == tokens[i]) {
            m->path_at++;
        } else {
            m->path_at = m->path_tokens; /* left */
        }
        m->block[m->filled++] = tokens[i];
        if (m->filled == td_memo_block_tokens(m->table)) {
            end_block(m);
        }
    }
}

static uint32_t memo_propose(td_draft_t *draft, uint32_t k, uint32_t *tokens_out)
{
    memo_t *m = (memo_t *)draft;
    const uint32_t count = TD_MIN(k, m->path_tokens - m->path_at);

    m->followed = count > 0;
    if (!m->followed) {
        return td_draft_propose(m->lookup, k, tokens_out);
    }
    memcpy(tokens_out, m->path + m->path_at, count * sizeof(*tokens_out));
    return count;
}

static uint32_t memo_confidence(const td_draft_t *draft)
{
    const memo_t *m = (const memo_t *)draft;
    return m->followed ? TD_DRAFT_CONFIDENCE_MEMO : td_draft_confidence(m->lookup);
}

const td_draft_ops_t td_draft_memo_ops = {.create = memo_create,
                                          .destroy = memo_destroy,
                                          .append = memo_append,
                                          .propose = memo_propose,
                                          .confidence = memo_confidence};

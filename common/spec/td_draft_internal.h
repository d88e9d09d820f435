/* td_draft_internal.h - what each drafter provides. */
#pragma once

#include "common/spec/td_draft.h"

typedef struct td_draft_ops {
    td_status_t (*create)(const td_draft_config_t *config, td_draft_t **out);
    void (*destroy)(td_draft_t *draft);
    void (*append)(td_draft_t *draft, const uint32_t *tokens, uint32_t count, bool is_output);
    uint32_t (*propose)(td_draft_t *draft, uint32_t k, uint32_t *tokens_out);
    uint32_t (*confidence)(const td_draft_t *draft); /* NULL: it doesn't say */
    void (*observe)(td_draft_t *draft, const uint32_t *drafts, const uint32_t *nexts,
                    uint32_t count); /* NULL: it has no use for it */
} td_draft_ops_t;

/* The first member of every drafter. */
struct td_draft {
    const td_draft_ops_t *ops;
};

extern const td_draft_ops_t td_draft_lookup_ops;
extern const td_draft_ops_t td_draft_memo_ops;
extern const td_draft_ops_t td_draft_lookahead_ops;

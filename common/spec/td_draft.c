#include "common/spec/td_draft.h"

#include <string.h>

#include "common/base/td_base.h"
#include "common/spec/td_draft_internal.h"

static const struct {
    const char *name;
    const td_draft_ops_t *ops;
} drafters[TD_DRAFTER_KINDS] = {
    [TD_DRAFTER_NONE] = {"none", NULL},
    [TD_DRAFTER_PROMPT_LOOKUP] = {"prompt_lookup", &td_draft_lookup_ops},
    [TD_DRAFTER_DRAFT_MODEL] = {"draft_model", NULL},
    [TD_DRAFTER_EARLY_EXIT] = {"early_exit", NULL},
};

const char *td_drafter_name(td_drafter_t drafter)
{
    return (uint32_t)drafter < TD_DRAFTER_KINDS ? drafters[drafter].name : "unknown";
}

td_status_t td_drafter_parse(const char *name, td_drafter_t *out)
{
    for (uint32_t i = 0; i < TD_DRAFTER_KINDS; i++) {
        if (strcmp(name, drafters[i].name) == 0) {
            *out = (td_drafter_t)i;
            return TD_OK;
        }
    }
    return TD_ERR_INVALID;
}

td_status_t td_draft_create(td_drafter_t drafter, const td_draft_config_t *config, td_draft_t **out)
{
    if ((uint32_t)drafter >= TD_DRAFTER_KINDS || drafters[drafter].ops == NULL) {
        return TD_ERR_INVALID;
    }
    return drafters[drafter].ops->create(config, out);
}

void td_draft_destroy(td_draft_t *draft)
{
    if (draft != NULL) {
        draft->ops->destroy(draft);
    }
}

void td_draft_append(td_draft_t *draft, const uint32_t *tokens, uint32_t count, bool is_output)
{
    draft->ops->append(draft, tokens, count, is_output);
}

uint32_t td_draft_propose(td_draft_t *draft, uint32_t k, uint32_t *tokens_out)
{
    TD_ASSERT(k <= TD_DRAFT_TOKENS_MAX);
    return k == 0 ? 0 : draft->ops->propose(draft, k, tokens_out);
}

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
    [TD_DRAFTER_MEMO] = {"memo", &td_draft_memo_ops},
    [TD_DRAFTER_LOOKAHEAD] = {"lookahead", &td_draft_lookahead_ops},
    [TD_DRAFTER_MEDUSA] = {"medusa", NULL},
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

td_status_t td_draft_rule_parse(const char *name, td_draft_rule_t *out)
{
    static const char *const names[TD_DRAFT_RULES] = {"coupled", "rejection"};

    for (uint32_t i = 0; i < TD_DRAFT_RULES; i++) {
        if (strcmp(name, names[i]) == 0) {
            *out = (td_draft_rule_t)i;
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

bool td_draft_observes(const td_draft_t *draft)
{
    return draft->ops->observe != NULL;
}

void td_draft_observe(td_draft_t *draft, const uint32_t *drafts, const uint32_t *nexts,
                      uint32_t count)
{
    TD_ASSERT(count <= TD_DRAFT_TOKENS_MAX);
    if (draft->ops->observe != NULL) {
        draft->ops->observe(draft, drafts, nexts, count);
    }
}

uint32_t td_draft_confidence(const td_draft_t *draft)
{
    return draft->ops->confidence == NULL ? TD_DRAFT_CONFIDENCE_ANY : draft->ops->confidence(draft);
}

double td_draft_confidence_prior(uint32_t confidence)
{
    /* As measured with tandem-bench spec, or a little above: what is tried is soon known. */
    static const double priors[TD_DRAFT_CONFIDENCES] = {0.5, 0.3, 0.4, 0.5, 0.65, 0.8, 0.9, 0.9};
    TD_ASSERT(confidence < TD_DRAFT_CONFIDENCES);
    return priors[confidence];
}

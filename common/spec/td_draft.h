/* td_draft.h - drafters: guesses of what a request's next tokens are, which one batched pass then
 * verifies. A guess costs time if it is wrong, never a token: what is accepted is what would have
 * been drawn without it (design, section 6; I1).
 *
 * One drafter serves one choice of a request. It is told every token of the context once, in order,
 * and nothing that was drafted and not accepted.
 * Threads: owner. Only create allocates. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "common/base/td_status.h"
#include "common/spec/td_memo.h"

#define TD_DRAFT_TOKENS_MAX 16u /* of one proposal */

typedef enum td_drafter {
    TD_DRAFTER_NONE = 0,
    TD_DRAFTER_PROMPT_LOOKUP = 1,
    TD_DRAFTER_DRAFT_MODEL = 2, /* passes of a second, smaller model: the decode node's own */
    TD_DRAFTER_EARLY_EXIT = 3,  /* passes of the model's first layers: as well */
    TD_DRAFTER_MEMO = 4,        /* what followed before on this node, else as prompt_lookup */
    TD_DRAFTER_LOOKAHEAD = 5,   /* what the model said in passing of texts like this one */
    TD_DRAFTER_MEDUSA = 6,      /* heads on the model's hidden state: the decode node's own */
    TD_DRAFTER_KINDS
} td_drafter_t;

#define TD_DRAFTER_NAMES "none, prompt_lookup, draft_model, early_exit, memo, lookahead, medusa"
/** "none", "prompt_lookup", ... */
const char *td_drafter_name(td_drafter_t drafter);
/** Errors: TD_ERR_INVALID. */
TD_MUST_CHECK td_status_t td_drafter_parse(const char *name, td_drafter_t *out);

/* How a draft is verified. */
typedef enum td_draft_rule {
    TD_DRAFT_RULE_COUPLED =
        0, /* accepted iff the seeded noise picks it too: any draft, same text */
    TD_DRAFT_RULE_REJECTION = 1, /* accepted by chance, min(1, p / q): the same distribution */
    TD_DRAFT_RULES
} td_draft_rule_t;

#define TD_DRAFT_RULE_NAMES "coupled, rejection"
/** Errors: TD_ERR_INVALID. */
TD_MUST_CHECK td_status_t td_draft_rule_parse(const char *name, td_draft_rule_t *out);

/* Classes of confidence. */
#define TD_DRAFT_CONFIDENCES 8u
#define TD_DRAFT_CONFIDENCE_ANY 0u    /* it doesn't say */
#define TD_DRAFT_CONFIDENCE_LOOKUP 1u /* up to 6, by length of the match */
#define TD_DRAFT_CONFIDENCE_MEMO 7u   /* this very text went on like this before */

typedef struct td_draft td_draft_t;

typedef struct td_draft_config {
    uint32_t tokens_max; /* of the context: prompt and output */
    /* What the client expects the output to be like, NULL: nothing. */
    const uint32_t *prediction; /* [prediction_tokens]; borrowed during create only */
    uint32_t prediction_tokens;
    /* For TD_DRAFTER_MEMO; NULL: it is prompt_lookup. */
    td_memo_t *memo;              /* borrowed until destroy */
    const td_memo_start_t *start; /* borrowed during create only */
} td_draft_config_t;

/** Errors: TD_ERR_INVALID (a drafter that needs none of this, or passes of a model),
 *         TD_ERR_NO_MEMORY.
 * Owner:  the caller ends it with td_draft_destroy(). */
TD_MUST_CHECK td_status_t td_draft_create(td_drafter_t drafter, const td_draft_config_t *config,
                                          td_draft_t **out);
/** NULL is allowed. */
void td_draft_destroy(td_draft_t *draft);
/** Tells it the next tokens of the context. is_output: they were generated, not asked with. */
void td_draft_append(td_draft_t *draft, const uint32_t *tokens, uint32_t count, bool is_output);
/** What may come next: at most k tokens, fewer (0 too) where it is not confident of more.
 * Shape:  tokens_out [k]; k <= TD_DRAFT_TOKENS_MAX. Answers how many. */
uint32_t td_draft_propose(td_draft_t *draft, uint32_t k, uint32_t *tokens_out);
/** Does it want td_draft_observe()? */
bool td_draft_observes(const td_draft_t *draft);
/** Tells it what the pass that verified its drafts selects behind those of them that nothing became
 * of: drafts[0] is the one that was wrong, drafts[i + 1] stood behind drafts[i]. After the step's
 * tokens were appended.
 * Shape:  drafts, nexts [count]; count <= TD_DRAFT_TOKENS_MAX. */
void td_draft_observe(td_draft_t *draft, const uint32_t *drafts, const uint32_t *nexts,
                      uint32_t count);
/** How sure it was of its last proposal: a class, < TD_DRAFT_CONFIDENCES. Which of them are
 * accepted how often is for experience to say; until then td_draft_confidence_prior(). */
uint32_t td_draft_confidence(const td_draft_t *draft);
double td_draft_confidence_prior(uint32_t confidence);

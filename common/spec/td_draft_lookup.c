/* prompt_lookup: what followed the last time that the context ended like this. Good where answers
 * repeat what they were asked about, or themselves: summaries, edits of code, quotations.
 * Source: Saxena, "Prompt Lookup Decoding" (2023); here with the longest match instead of a fixed
 * n-gram, and with the client's prediction as text that was there before. */
#include "common/base/td_base.h"
#include "common/spec/td_draft_internal.h"
#include "common/spec/td_suffix.h"

#define MATCH_MIN 2u  /* one equal token says little */
#define MATCH_SURE 5u /* from here on as much as is asked for */

typedef struct lookup {
    td_draft_t base;
    td_suffix_t *text;   /* owned: prediction, mark, prompt, output */
    uint32_t prediction; /* its tokens, at the beginning of the text */
    uint32_t outputs;
    uint32_t confidence; /* of the last proposal */
} lookup_t;

static void lookup_destroy(td_draft_t *draft)
{
    lookup_t *l = (lookup_t *)draft;
    td_suffix_destroy(l->text);
    td_free(l);
}

static td_status_t lookup_create(const td_draft_config_t *config, td_draft_t **out)
{
    lookup_t *l = td_calloc(1, sizeof(*l));
    td_status_t status = TD_ERR_NO_MEMORY;

    if (l == NULL) {
        return status;
    }
    l->base.ops = &td_draft_lookup_ops;
    l->prediction = config->prediction_tokens;
    status = td_suffix_create(config->tokens_max + l->prediction + 1, &l->text);
    if (status != TD_OK) {
        td_free(l);
        return status;
    }
    for (uint32_t i = 0; i < l->prediction; i++) {
        td_suffix_append(l->text, config->prediction[i]);
    }
    td_suffix_append_mark(l->text);
    *out = &l->base;
    return TD_OK;
}

static void lookup_append(td_draft_t *draft, const uint32_t *tokens, uint32_t count, bool is_output)
{
    lookup_t *l = (lookup_t *)draft;

    for (uint32_t i = 0; i < count; i++) {
        td_suffix_append(l->text, tokens[i]);
    }
    l->outputs += is_output ? count : 0;
}

/* The text from `at` on. Where it ends, what has just been copied goes on: a text that repeats a
 * short piece repeats it for as long as one likes. */
static uint32_t copy(const lookup_t *l, uint32_t at, uint32_t end, uint32_t k, uint32_t *out)
{
    const uint32_t count = td_suffix_count(l->text);
    uint32_t n = 0;

    for (; n < k && at + n < end; n++) {
        out[n] = at + n < count ? td_suffix_token(l->text, at + n) : out[at + n - count];
        if (out[n] == TD_SUFFIX_MARK) {
            break;
        }
    }
    return n;
}

/* 2, 3, 4, 5 to 8, 9 to 16 and more tokens. */
static uint32_t class_of(uint32_t match)
{
    return TD_DRAFT_CONFIDENCE_LOOKUP + (match < MATCH_SURE ? match - MATCH_MIN
                                         : match <= 8       ? 3
                                         : match <= 16      ? 4
                                                            : 5);
}

static uint32_t lookup_confidence(const td_draft_t *draft)
{
    return ((const lookup_t *)draft)->confidence;
}

static uint32_t lookup_propose(td_draft_t *draft, uint32_t k, uint32_t *tokens_out)
{
    lookup_t *l = (lookup_t *)draft;
    uint32_t next = 0;
    const uint32_t match = td_suffix_match(l->text, &next);

    if (l->outputs == 0 && l->prediction > 0) {
        l->confidence = class_of(MATCH_SURE); /* the client's word */
        return copy(l, 0, l->prediction, k, tokens_out);
    }
    if (match < MATCH_MIN) {
        return 0;
    }
    l->confidence = class_of(match);
    return copy(l, next, UINT32_MAX, match < MATCH_SURE ? TD_MIN(k, match) : k, tokens_out);
}

const td_draft_ops_t td_draft_lookup_ops = {.create = lookup_create,
                                            .destroy = lookup_destroy,
                                            .append = lookup_append,
                                            .propose = lookup_propose,
                                            .confidence = lookup_confidence};

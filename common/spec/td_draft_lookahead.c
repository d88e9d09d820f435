/* lookahead: Jacobi iteration, with a pool of n-grams. The rows of a step that stood behind a wrong
 * draft say nothing about the answer, yet each says what follows its token in a text like this one.
 * Such pairs and triples are kept, beside those of the context, and chained into drafts; where they
 * end, what these rows said for the very positions to come is tried again, which is the iteration.
 * Source: Fu et al., "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding"
 * (2024); here with one window, in the rows that verification has anyway. */
#include "common/base/td_base.h"
#include "common/spec/td_draft_internal.h"

#define POOL_BITS 13u /* entries: 8,192, of 16 bytes */
#define POOL_SIZE (1u << POOL_BITS)
#define NO_TOKEN UINT32_MAX

typedef struct gram { /* what followed two tokens, or one (before: NO_TOKEN), the last time */
    uint32_t before;
    uint32_t token;
    uint32_t next; /* NO_TOKEN: the place is free */
} gram_t;

typedef struct lookahead {
    td_draft_t base;
    gram_t *pool;    /* owned, [POOL_SIZE]; a newer one takes the place of another */
    uint32_t before; /* the context's last two tokens; NO_TOKEN: not so many yet */
    uint32_t last;
    uint32_t guess[TD_DRAFT_TOKENS_MAX]; /* for the positions behind the last token */
    uint32_t guess_count;
    uint32_t confidence; /* of the last proposal */
} lookahead_t;

static void lookahead_destroy(td_draft_t *draft)
{
    lookahead_t *l = (lookahead_t *)draft;
    td_free(l->pool);
    td_free(l);
}

static td_status_t lookahead_create(const td_draft_config_t *config, td_draft_t **out)
{
    lookahead_t *l = td_calloc(1, sizeof(*l));
    (void)config;

    if (l == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    l->pool = td_calloc(POOL_SIZE, sizeof(*l->pool));
    if (l->pool == NULL) {
        td_free(l);
        return TD_ERR_NO_MEMORY;
    }
    l->base.ops = &td_draft_lookahead_ops;
    l->before = l->last = NO_TOKEN;
    for (uint32_t i = 0; i < POOL_SIZE; i++) {
        l->pool[i].next = NO_TOKEN;
    }
    *out = &l->base;
    return TD_OK;
}

static gram_t *place_of(const lookahead_t *l, uint32_t before, uint32_t token)
{
    const uint64_t key = ((uint64_t)before << 32 | token) * 0x9e3779b97f4a7c15u;
    return &l->pool[key >> (64 - POOL_BITS)];
}

static void remember(const lookahead_t *l, uint32_t before, uint32_t token, uint32_t next)
{
    *place_of(l, NO_TOKEN, token) = (gram_t){.before = NO_TOKEN, .token = token, .next = next};
    if (before != NO_TOKEN) {
        *place_of(l, before, token) = (gram_t){.before = before, .token = token, .next = next};
    }
}

static uint32_t recall(const lookahead_t *l, uint32_t before, uint32_t token)
{
    const gram_t *g = place_of(l, before, token);
    return g->before == before && g->token == token ? g->next : NO_TOKEN;
}

static void lookahead_append(td_draft_t *draft, const uint32_t *tokens, uint32_t count,
                             bool is_output)
{
    lookahead_t *l = (lookahead_t *)draft;
    (void)is_output;

    for (uint32_t i = 0; i < count; i++) {
        if (l->last != NO_TOKEN) {
            remember(l, l->before, l->last, tokens[i]);
        }
        l->before = l->last;
        l->last = tokens[i];
    }
    l->guess_count = 0; /* it was for the positions behind another token */
}

static void lookahead_observe(td_draft_t *draft, const uint32_t *drafts, const uint32_t *nexts,
                              uint32_t count)
{
    lookahead_t *l = (lookahead_t *)draft;

    for (uint32_t i = 0; i < count; i++) {
        remember(l, i > 0 ? drafts[i - 1] : NO_TOKEN, drafts[i], nexts[i]);
        l->guess[i] = nexts[i];
    }
    l->guess_count = count;
}

static uint32_t lookahead_propose(td_draft_t *draft, uint32_t k, uint32_t *tokens_out)
{
    lookahead_t *l = (lookahead_t *)draft;
    uint32_t before = l->before;
    uint32_t token = l->last;
    uint32_t sure = 0; /* leading drafts that a triple gave */
    uint32_t n = 0;

    for (; n < k && token != NO_TOKEN; n++) {
        uint32_t next = before == NO_TOKEN ? NO_TOKEN : recall(l, before, token);
        sure += sure == n && next != NO_TOKEN;
        if (next == NO_TOKEN) {
            next = n < l->guess_count ? l->guess[n] : recall(l, NO_TOKEN, token);
        }
        if (next == NO_TOKEN) {
            break;
        }
        tokens_out[n] = next;
        before = token;
        token = next;
    }
    l->confidence =
        sure == 0 ? TD_DRAFT_CONFIDENCE_ANY : TD_DRAFT_CONFIDENCE_LOOKUP + TD_MIN(sure - 1, 5u);
    return n;
}

static uint32_t lookahead_confidence(const td_draft_t *draft)
{
    return ((const lookahead_t *)draft)->confidence;
}

const td_draft_ops_t td_draft_lookahead_ops = {.create = lookahead_create,
                                               .destroy = lookahead_destroy,
                                               .append = lookahead_append,
                                               .propose = lookahead_propose,
                                               .confidence = lookahead_confidence,
                                               .observe = lookahead_observe};

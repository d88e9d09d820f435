/* td_sampler.h - the next token from a row of logits, reproducibly.
 * token = argmax over the kept entries of (logit / temperature + Gumbel(seed, choice, position,
 * id)), which draws exactly from the filtered distribution; the noise is counter-based, so it
 * depends on nothing else (I1). Order of steps: logit_bias, penalties, temperature, top_k, top_p,
 * min_p. Source: design, section 6 (Gumbel-max trick). Threads: owner. No allocation after create.
 * Never sorts the vocabulary. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/td_status.h"

#define TD_LOGIT_BIAS_MAX 1024u
#define TD_TOP_LOGPROBS_MAX 20u

typedef struct td_logit_bias {
    uint32_t token;
    float bias; /* <= 1e9; -infinity bans the token */
} td_logit_bias_t;

typedef struct td_sampling {
    float temperature;        /* 0 = argmax, lowest id on ties; else (0, 100] */
    uint32_t top_k;           /* 0 = off */
    float top_p;              /* (0, 1]; 1 = off */
    float min_p;              /* [0, 1); 0 = off */
    float presence_penalty;   /* [-2, 2] over generated tokens, as OpenAI's */
    float frequency_penalty;  /* [-2, 2] over generated tokens */
    float repetition_penalty; /* (0, 10]; 1 = off; over prompt and generated tokens */
    uint64_t seed;
    uint64_t judge_seed; /* of td_sampler_judge() and td_sampler_draft(): one that what
                          * is drafted from cannot have seen, so never used twice */
    uint32_t choice;     /* index among the n choices */
    const td_logit_bias_t *logit_bias; /* borrowed during create only */
    uint32_t logit_bias_count;
} td_sampling_t;

typedef struct td_logprob {
    uint32_t token;
    float logprob; /* natural log of the model's own softmax: no bias, penalty or temperature */
} td_logprob_t;

typedef struct td_sampled {
    uint32_t token;
    float logprob;                         /* of token; 0 unless logprobs were asked for */
    uint32_t top_count;                    /* entries in top */
    td_logprob_t top[TD_TOP_LOGPROBS_MAX]; /* highest first, lowest id on ties */
} td_sampled_t;

/** A row's likeliest picks under the noise of a position: what td_sampler_pick() would pick, what
 * it would pick without that, and so on. */
#define TD_CANDIDATES_MAX 2u
typedef struct td_candidates {
    uint32_t count;
    uint32_t tokens[TD_CANDIDATES_MAX];
    float logits[TD_CANDIDATES_MAX];  /* as they came */
    double scores[TD_CANDIDATES_MAX]; /* what was compared: descending */
} td_candidates_t;

typedef struct td_sampler td_sampler_t;

/** Defaults: temperature 1, everything else off. */
void td_sampling_init(td_sampling_t *params);
/** Errors: TD_ERR_INVALID (a value out of its range above, or a bias token >= vocab_size);
 *          TD_ERR_NO_MEMORY. */
TD_MUST_CHECK td_status_t td_sampler_create(const td_sampling_t *params, uint32_t vocab_size,
                                            const uint32_t *prompt, size_t prompt_tokens,
                                            td_sampler_t **out);
void td_sampler_destroy(td_sampler_t *sampler);
/** Picks the token for an absolute position (index in prompt + output).
 * Shape:  logits [vocab_size] f32, left unchanged. banned [banned_count]: ids that may not be
 * picked (stop tokens before min_tokens). Units:  top_logprobs 0..TD_TOP_LOGPROBS_MAX; want_logprob
 * fills logprob even with 0 tops. A banned id outside the vocabulary is ignored. Errors:
 * TD_ERR_INTERNAL (a row with NaN or +infinity, or with nothing finite), TD_ERR_INVALID (bans and
 * bias leave no token). */
TD_MUST_CHECK td_status_t td_sampler_pick(td_sampler_t *sampler, const float *logits,
                                          uint32_t position, const uint32_t *banned,
                                          uint32_t banned_count, bool want_logprob,
                                          uint32_t top_logprobs, td_sampled_t *out);
/** Of a row that has logits for some tokens only, and none for the others: the best ones, under the
 * noise, bans, bias, penalties and filters that td_sampler_pick() has there. The first is what that
 * would pick. Fewer than asked for where the filters keep no more.
 * Shape:  tokens, logits [count], tokens ascending; 0 < count <= vocab_size. Units:  wanted
 * 1..TD_CANDIDATES_MAX. Errors: as td_sampler_pick(). Cost: O(count) and the tokens with a penalty.
 */
TD_MUST_CHECK td_status_t td_sampler_candidates(td_sampler_t *sampler, const uint32_t *tokens,
                                                const float *logits, uint32_t count,
                                                uint32_t position, const uint32_t *banned,
                                                uint32_t banned_count, uint32_t wanted,
                                                td_candidates_t *out);
/** The rejection rule: judges a draft for a position, and draws what comes in its place where it is
 * not accepted. Accepted with probability min(1, p / q), else from the normalised max(0, p - q); so
 * the token's distribution is p, that of td_sampler_pick(), but not its very choice.
 * Source: Leviathan et al., Fast Inference from Transformers via Speculative Decoding, 2023, 2.3.
 * Shape:  chances [vocab_size]: what the draft was drawn with (td_sampler_draft()); NULL: it was
 * not drawn, so q is 1. Everything else, and errors, as td_sampler_pick(). */
TD_MUST_CHECK td_status_t td_sampler_judge(td_sampler_t *sampler, const float *logits,
                                           uint32_t position, const uint32_t *banned,
                                           uint32_t banned_count, bool want_logprob,
                                           uint32_t top_logprobs, uint32_t draft,
                                           const float *chances, td_sampled_t *out);
/** Draws a draft from a drafter's logits, for td_sampler_judge(): with noise that the judging does
 * not share, nor other drafts for the same position. Whether it is used may depend on the chances,
 * never on the token. first: the position of the first draft that is made together with it. Shape:
 * chances_out [vocab_size]: probabilities. Errors: as td_sampler_pick(). */
TD_MUST_CHECK td_status_t td_sampler_draft(td_sampler_t *sampler, const float *logits,
                                           uint32_t position, uint32_t first,
                                           const uint32_t *banned, uint32_t banned_count,
                                           uint32_t *token_out, float *chances_out);
/** Records a token as generated (for the penalties). */
void td_sampler_accept(td_sampler_t *sampler, uint32_t token);
/** Log-probability data of a given token (a prompt's own, for echo): out->token is set by the
 * caller. Errors: TD_ERR_INVALID (token outside the vocabulary), TD_ERR_INTERNAL (NaN in the row).
 */
TD_MUST_CHECK td_status_t td_logprobs_of(const float *logits, uint32_t vocab_size,
                                         uint32_t top_logprobs, td_sampled_t *out);
/** The best token of a row, the lowest id on ties. count > 0. */
uint32_t td_logits_argmax(const float *logits, uint32_t count);
/** XXH3-64 over the row's bytes: the hash by which I1 is tested through the whole cluster. */
uint64_t td_logits_hash(const float *logits, uint32_t vocab_size);

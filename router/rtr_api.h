/* rtr_api.h - bodies of the OpenAI-compatible API: JSON to checked parameters and token ids.
 * What the API knows is checked for type and range, and the answer names the parameter, what was
 * expected and what came. Unknown fields are ignored, as OpenAI-compatible servers do.
 * Threads: worker (plain functions; the model is shared and immutable). */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/td_buf.h"
#include "common/base/td_status.h"
#include "common/model/td_chat.h"
#include "common/model/td_tokenizer.h"
#include "common/spec/td_draft.h"
#include "common/wire/td_msg.h"
#include "router/rtr_prompt_class.h"

#define RTR_PROMPTS_MAX 32u
#define RTR_N_MAX 16u
#define RTR_MESSAGES_MAX 4096u
#define RTR_TEMPERATURE_MIN 1e-4f /* below: the argmax, since 1 / t would not be finite */

typedef enum rtr_kind {
    RTR_KIND_CHAT = 0,
    RTR_KIND_COMPLETION,
    RTR_KIND_TOKENIZE,
    RTR_KIND_DETOKENIZE
} rtr_kind_t;

/** One refusal, as the client gets it. */
typedef struct rtr_error {
    int http;
    const char *type; /* static */
    const char *code; /* static, or NULL */
    char param[64];   /* "" = none */
    char message[512];
} rtr_error_t;

/** What the API needs to know of the served model. All borrowed, all immutable. */
typedef struct rtr_model {
    const td_tokenizer_t *tok;
    const td_chat_t *chat; /* NULL: the model has no chat template */
    const char *name;      /* as served */
    char fingerprint[16];  /* "fp_" and 8 hex digits */
    uint32_t context_max;  /* tokens */
    uint64_t created_s;
    bool allow_placement; /* clients may name nodes, and see them with the logits' hashes */
    bool drafter_auto;    /* of requests that name none: the loop chooses (rtr_drafters), or */
    td_drafter_t drafter; /* this one */
    uint32_t draft_max;   /* drafts of a step, at most; 0 = no request drafts */
} rtr_model_t;

typedef struct rtr_prompt {
    uint32_t *tokens; /* owned */
    uint32_t count;
    uint32_t max_tokens;             /* >= 1, clamped to the context */
    rtr_prompt_class_t prompt_class; /* by its tokens */
    uint64_t hash;
    td_str_t text; /* completions with echo: what was given */
} rtr_prompt_t;

typedef struct rtr_params {
    rtr_kind_t kind;
    rtr_prompt_t *prompts; /* owned [prompt_count] */
    uint32_t prompt_count;
    uint32_t n;
    bool stream;
    bool include_usage;
    bool echo;
    bool want_logprobs;
    uint32_t top_logprobs;
    bool has_max_tokens;
    uint32_t max_tokens; /* as asked; each prompt has its own clamped one */
    uint32_t min_tokens;
    int32_t priority;  /* lower is served first, as with other servers */
    bool drafter_auto; /* which one is open; drafter is then anything but TD_DRAFTER_NONE */
    td_drafter_t drafter;
    bool has_k;     /* k was asked for: it is both bounds */
    uint32_t k_min; /* drafts verified in a step, where there are so many */
    uint32_t k_max;
    td_draft_rule_t draft_rule;
    uint32_t *prediction; /* owned; tokens that the client expects, NULL: none */
    uint32_t prediction_tokens;
    float temperature;
    float top_p;
    float min_p;
    float presence_penalty;
    float frequency_penalty;
    float repetition_penalty;
    uint32_t top_k; /* 0 = off */
    uint64_t seed;
    uint32_t bias_count;
    uint32_t *bias_tokens; /* owned */
    float *bias_values;    /* owned */
    uint32_t stop_count;
    td_bytes_t stops[TD_MSG_STOPS_MAX]; /* inside stop_text */
    td_str_t stop_text;
    bool include_stop;
    bool ignore_eos;
    bool skip_special;
    td_str_t cache_salt;
    char place_prefill[TD_MSG_ID_CHARS_MAX + 1]; /* "" = the router chooses */
    char place_decode[TD_MSG_ID_CHARS_MAX + 1];
} rtr_params_t;

/** Reads a body of any kind: for DETOKENIZE and TOKENIZE the ids are prompts[0].
 * Errors: TD_ERR_INVALID (error_out says what to answer), TD_ERR_NO_MEMORY (error_out: a 500).
 * Owner:  *out is written in every case, and ended with rtr_params_fini(). */
TD_MUST_CHECK td_status_t rtr_api_parse(const rtr_model_t *model, rtr_kind_t kind, const char *body,
                                        size_t len, rtr_params_t *out, rtr_error_t *error_out);
void rtr_params_fini(rtr_params_t *params);

/** Fills a refusal; the type follows from the HTTP status. param and code may be NULL. */
void rtr_error_set(rtr_error_t *error, int http, const char *code, const char *param,
                   const char *fmt, ...) __attribute__((format(printf, 5, 6)));

/* rtr_prompt_class.h - what kind of prompt this is, as far as its tokens show cheaply: drafts are
 * worth about the same for prompts of a kind. Design: router/DESIGN.md, "What drafts were worth".
 * Threads: any (plain functions). */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "common/model/td_tokenizer.h"

typedef enum rtr_prompt_class {
    RTR_PROMPT_PLAIN = 0,
    RTR_PROMPT_PREDICTED, /* the client has said what it expects */
    RTR_PROMPT_HOT,       /* this very prompt of this tenant was answered lately */
    RTR_PROMPT_REPEATS,   /* it says things twice */
    RTR_PROMPT_CODE,      /* brackets, operators: code, JSON, tables */
    RTR_PROMPT_CLASSES
} rtr_prompt_class_t;

/** "plain", "predicted", ... */
const char *rtr_prompt_class_name(uint32_t prompt_class);
/** The class by the last RTR_PROMPT_LOOKED_AT tokens; never RTR_PROMPT_HOT, which is for whoever
 * remembers prompts to say. Cost: O(tokens looked at); allocates nothing. */
#define RTR_PROMPT_LOOKED_AT 2048u
rtr_prompt_class_t rtr_prompt_class_of(const td_tokenizer_t *tok, const uint32_t *tokens,
                                       uint32_t count, bool has_prediction);
/** Names the prompt; equal ones have equal names. */
uint64_t rtr_prompt_hash(const uint32_t *tokens, uint32_t count);

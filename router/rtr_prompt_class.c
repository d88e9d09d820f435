#include "router/rtr_prompt_class.h"

#include <string.h>
#include <xxhash.h>

#include "common/base/td_base.h"

#define GRAM 4u           /* tokens that must come again in the same order */
#define GRAM_SLOTS 4096u  /* twice the grams that are looked at */
#define REPEATS_SHARE 10u /* one in so many grams has been there before: it repeats */
#define CODE_SHARE 5u     /* one in so many tokens has a sign of code: code */
#define TOKENS_MIN 16u    /* fewer say nothing */

/* A bracket, an operator, an underscore. */
static const bool is_code_sign[256] = {
    ['{'] = true, ['}'] = true, ['['] = true, [']'] = true, ['('] = true,
    [')'] = true, [';'] = true, ['='] = true, ['<'] = true, ['>'] = true,
    ['_'] = true, ['|'] = true, ['\\'] = true};

const char *rtr_prompt_class_name(uint32_t prompt_class)
{
    static const char *const names[RTR_PROMPT_CLASSES] = {"plain", "predicted", "hot", "repeats",
                                                          "code"};
    return prompt_class < RTR_PROMPT_CLASSES ? names[prompt_class] : "unknown";
}

/* A slot keeps the last gram of its number only, so the count is a little low, never too high but
 * for equal hashes. */
static uint32_t count_repeats(const uint32_t *tokens, uint32_t count)
{
    uint32_t slots[GRAM_SLOTS] = {0};
    uint32_t repeats = 0;

    for (uint32_t i = 0; i + GRAM <= count; i++) {
        const uint64_t hash = XXH3_64bits(tokens + i, GRAM * sizeof(*tokens));
        const uint32_t name = (uint32_t)(hash >> 32) | 1; /* 0: empty */
        uint32_t *slot = &slots[hash % GRAM_SLOTS];
        repeats += *slot == name;
        *slot = name;
    }
    return repeats;
}

static bool has_sign(const td_tokenizer_t *tok, uint32_t id)
{
    const char *bytes = NULL;
    size_t len = 0;

    if (td_tokenizer_is_special(tok, id) || !td_tokenizer_bytes(tok, id, &bytes, &len)) {
        return false; /* a chat template's own brackets say nothing */
    }
    for (size_t i = 0; i < len; i++) {
        if (is_code_sign[(uint8_t)bytes[i]]) {
            return true;
        }
    }
    return false;
}

rtr_prompt_class_t rtr_prompt_class_of(const td_tokenizer_t *tok, const uint32_t *tokens,
                                       uint32_t count, bool has_prediction)
{
    const uint32_t seen = TD_MIN(count, RTR_PROMPT_LOOKED_AT);
    uint32_t signs = 0;

    tokens += count - seen;
    if (has_prediction) {
        return RTR_PROMPT_PREDICTED;
    }
    if (seen < TOKENS_MIN) {
        return RTR_PROMPT_PLAIN;
    }
    if (count_repeats(tokens, seen) * REPEATS_SHARE >= seen) {
        return RTR_PROMPT_REPEATS;
    }
    for (uint32_t i = 0; i < seen; i++) {
        signs += has_sign(tok, tokens[i]);
    }
    return signs * CODE_SHARE >= seen ? RTR_PROMPT_CODE : RTR_PROMPT_PLAIN;
}

uint64_t rtr_prompt_hash(const uint32_t *tokens, uint32_t count)
{
    return XXH3_64bits(tokens, count * sizeof(*tokens));
}

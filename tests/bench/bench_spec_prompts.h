/* bench_spec_prompts.h - what is asked to see what a drafter is worth.
 * Threads: owner. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "common/base/td_buf.h"

typedef enum spec_kind {
    SPEC_CHAT, /* an answer that nothing foretells */
    SPEC_COPY, /* a text, and the beginning of it once more */
    SPEC_CODE, /* a program, and the beginning of it with one name changed */
    SPEC_HOT,  /* free like SPEC_CHAT; asked again and again */
    SPEC_KINDS
} spec_kind_t;

extern const char *const spec_kind_names[SPEC_KINDS];

/** The number-th prompt of a kind, appended; false when memory is out. */
bool spec_prompt(spec_kind_t kind, uint32_t number, td_str_t *out);

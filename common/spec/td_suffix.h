/* td_suffix.h - where the end of a token sequence has been before: a suffix automaton that grows
 * by one token at a time. Appending costs O(1) amortised, asking O(1), whatever the length.
 * Source: Blumer et al., "The smallest automaton recognizing the subwords of a text" (1985).
 * Threads: owner. No call after create allocates. */
#pragma once

#include <stdint.h>

#include "common/base/td_status.h"

#define TD_SUFFIX_TOKENS_MAX (1u << 24)

#define TD_SUFFIX_MARK UINT32_MAX

typedef struct td_suffix td_suffix_t;

/** Units: tokens_max that are ever appended, 1..TD_SUFFIX_TOKENS_MAX; about 130 bytes each,
 * touched as the sequence grows. Errors: TD_ERR_INVALID, TD_ERR_NO_MEMORY. Owner:  the caller ends
 * it with td_suffix_destroy(). */
TD_MUST_CHECK td_status_t td_suffix_create(uint32_t tokens_max, td_suffix_t **out);
/** NULL is allowed. */
void td_suffix_destroy(td_suffix_t *suffix);
/** Appends a token; what goes beyond tokens_max is left out, and nothing matches any more. */
void td_suffix_append(td_suffix_t *suffix, uint32_t token);
/** Appends a mark that equals no token and no other mark: nothing matches across it. */
void td_suffix_append_mark(td_suffix_t *suffix);
/** The longest end of the sequence that has been in it before. Answers its length, 0 = none; and in
 * *next_out the index, counted over tokens and marks, of what followed there: of the occurrence
 * that was last asked for or appended, as far as is known without looking at all of them. */
uint32_t td_suffix_match(const td_suffix_t *suffix, uint32_t *next_out);
/** Tokens and marks so far, and one of them, or TD_SUFFIX_MARK. */
uint32_t td_suffix_count(const td_suffix_t *suffix);
uint32_t td_suffix_token(const td_suffix_t *suffix, uint32_t idx);

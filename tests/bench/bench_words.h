/* bench_words.h - prompts of about a given number of tokens, drawn from a seed.
 * Threads: owner. */
#pragma once

#include <jansson.h>
#include <stdint.h>

/** The next number of a sequence that its state fixes.
 * Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (SplitMix64). */
uint64_t bench_random(uint64_t *state);
/** {"role": role, "content": so many words}, each about one token; NULL when memory is out. */
json_t *bench_message_of_words(const char *role, uint32_t count, uint64_t *state);

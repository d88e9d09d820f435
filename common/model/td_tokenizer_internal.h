/* td_tokenizer_internal.h - the parts of the tokenizer: growing id lists, the pre-tokenizer, the
 * merges. Threads: any after creation; a td_bpe_scratch_t and a td_token_ids_t are per call. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/td_status.h"
#include "common/model/td_tokenizer.h"

#define TD_TOKEN_NONE UINT32_MAX

/** A growing list of token ids. Zero-initialise. */
typedef struct td_token_ids {
    uint32_t *ids; /* owned */
    size_t count;
    size_t cap;
} td_token_ids_t;

/** Errors: TD_ERR_NO_MEMORY; the list is then unchanged. */
TD_MUST_CHECK td_status_t td_token_ids_append(td_token_ids_t *list, const uint32_t *ids,
                                              size_t count);
void td_token_ids_fini(td_token_ids_t *list);

/* --- td_pretok.c: cuts text into words ------------------------------------------------------ */

typedef struct td_pretok td_pretok_t;
typedef td_status_t (*td_pretok_word_fn)(void *ctx, const uint8_t *word, size_t len);

/** Compiles the pattern of a pre-tokenizer.
 * Errors: TD_ERR_UNSUPPORTED (unknown name, logged), TD_ERR_NO_MEMORY, TD_ERR_INTERNAL. */
TD_MUST_CHECK td_status_t td_pretok_create(const char *name, size_t name_len, td_pretok_t **out);
void td_pretok_destroy(td_pretok_t *pretok);
/** Calls on_word for consecutive words that make up the whole text; an invalid UTF-8 byte is a word
 * of its own. Stops at the first failure.
 * Errors: of on_word; TD_ERR_NO_MEMORY, TD_ERR_INTERNAL.
 * Cost:   O(len) beside on_word. */
TD_MUST_CHECK td_status_t td_pretok_split(const td_pretok_t *pretok, const uint8_t *text,
                                          size_t len, td_pretok_word_fn on_word, void *ctx);

/* --- td_bpe.c: merges the bytes of a word --------------------------------------------------- */

typedef struct td_bpe td_bpe_t;

/** Scratch that grows to the longest word. Zero-initialise. */
typedef struct td_bpe_scratch {
    struct td_bpe_symbol *symbols; /* owned; [cap] */
    uint64_t *heap;                /* owned; [2 * cap] rank << 32 | position, smallest first */
    size_t heap_len;
    size_t cap; /* bytes of the longest word so far */
} td_bpe_scratch_t;
void td_bpe_scratch_fini(td_bpe_scratch_t *scratch);

/** An empty table for merge_count merges. byte_ids[b] is the token of byte b or TD_TOKEN_NONE.
 * Errors: TD_ERR_NO_MEMORY, TD_ERR_TOO_LARGE. */
TD_MUST_CHECK td_status_t td_bpe_create(const uint32_t byte_ids[256], uint32_t merge_count,
                                        td_bpe_t **out);
void td_bpe_destroy(td_bpe_t *bpe);
/** Adds the next merge, in rank order; false when the pair is there already. */
bool td_bpe_add(td_bpe_t *bpe, uint32_t left, uint32_t right, uint32_t merged);
/** Appends the tokens of a word: the lowest-ranked pair first, the leftmost among equals. Bytes
 * that have no token give TD_TOKEN_NONE. Errors: TD_ERR_NO_MEMORY. Cost:   O(len log len). */
TD_MUST_CHECK td_status_t td_bpe_encode(const td_bpe_t *bpe, td_bpe_scratch_t *scratch,
                                        const uint8_t *word, size_t len, td_token_ids_t *out);

/* --- td_tokenizer.c -------------------------------------------------------------------------- */

/** td_tokenizer_encode() onto the end of a list; on failure the list may have grown.
 * Errors: as td_tokenizer_encode(). */
TD_MUST_CHECK td_status_t td_tokenizer_encode_append(const td_tokenizer_t *tok, const char *text,
                                                     size_t len, bool parse_special,
                                                     td_token_ids_t *out);
/** A control token: never text of its own (user-defined ones are). */
bool td_tokenizer_is_control(const td_tokenizer_t *tok, uint32_t id);
/** Length of the UTF-8 character at the start of the bytes: 1..4; 0 when the bytes can never become
 * one, or -n when its first n bytes (all that there are) could. For 0, *bad_out is the length of
 * the maximal invalid prefix, at least 1. Source: Unicode, chapter 3, "U+FFFD Substitution of
 * Maximal Subparts". */
int td_utf8_char(const uint8_t *bytes, size_t len, uint32_t *bad_out);

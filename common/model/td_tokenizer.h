/* td_tokenizer.h - byte-level BPE from a model file's vocabulary and merges.
 * Pre-tokenizers: "smollm" (digits split one by one, then the GPT-2 pattern); any other name is
 * refused with its name. Special (control and user-defined) tokens are matched in the text first
 * when parse_special is set.
 * Threads: any after creation; scratch memory is per call. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/td_buf.h"
#include "common/base/td_status.h"
#include "common/model/td_gguf.h"

#define TD_TOKENIZER_TEXT_BYTES_MAX (8u << 20)

typedef struct td_tokenizer td_tokenizer_t;

/** Errors: TD_ERR_INVALID (missing or inconsistent vocabulary), TD_ERR_UNSUPPORTED (tokenizer model
 *          or pre-tokenizer we do not know: logged by name), TD_ERR_NO_MEMORY.
 * Owner:   the caller; copies everything it needs, so the file may be closed afterwards. */
TD_MUST_CHECK td_status_t td_tokenizer_create(const td_gguf_t *gguf, td_tokenizer_t **out);
void td_tokenizer_destroy(td_tokenizer_t *tok);

uint32_t td_tokenizer_vocab_size(const td_tokenizer_t *tok);
/** UINT32_MAX when the model has none. */
uint32_t td_tokenizer_bos(const td_tokenizer_t *tok);
uint32_t td_tokenizer_eos(const td_tokenizer_t *tok);
bool td_tokenizer_add_bos(const td_tokenizer_t *tok);
/** Ends generation: eos, and an end-of-turn token such as <|im_end|> or <|endoftext|> by name. */
bool td_tokenizer_is_stop(const td_tokenizer_t *tok, uint32_t id);
bool td_tokenizer_is_special(const td_tokenizer_t *tok, uint32_t id);
/** UINT32_MAX when the text is not one token of the vocabulary (special tokens by their text). */
uint32_t td_tokenizer_find(const td_tokenizer_t *tok, const char *text, size_t len);

/** Encodes UTF-8 text (invalid bytes are encoded byte by byte and survive decoding; a byte for
 * which the vocabulary has no token becomes U+FFFD). Errors: TD_ERR_TOO_LARGE (over
 * TD_TOKENIZER_TEXT_BYTES_MAX), TD_ERR_NO_MEMORY. Owner:  the caller frees *ids_out with td_free();
 * never NULL on success. Cost:   O(bytes log bytes). */
TD_MUST_CHECK td_status_t td_tokenizer_encode(const td_tokenizer_t *tok, const char *text,
                                              size_t len, bool parse_special, uint32_t **ids_out,
                                              size_t *count_out);
/** Lends the raw bytes of a token (its text for a special token); they may be a part of a UTF-8
 * character. false for an id outside the vocabulary. Owner: the tokenizer. */
bool td_tokenizer_bytes(const td_tokenizer_t *tok, uint32_t id, const char **bytes_out,
                        size_t *len_out);

/** Streaming detokeniser: holds back an incomplete UTF-8 character until it is complete (F15).
 * Zero-initialise; needs no fini. Bytes that can never become a character are given out as U+FFFD,
 * one for each maximal invalid prefix. */
typedef struct td_detok {
    uint8_t held[4];
    uint32_t held_len;
} td_detok_t;
/** Appends the text that became complete with this token. skip_special: control tokens give
 * none; user-defined ones are text like any other.
 * Errors: TD_ERR_INVALID (id outside the vocabulary), TD_ERR_NO_MEMORY. */
TD_MUST_CHECK td_status_t td_detok_push(td_detok_t *detok, const td_tokenizer_t *tok, uint32_t id,
                                        bool skip_special, td_str_t *text);
/** Flushes what is held (as U+FFFD) at the end of a stream. */
TD_MUST_CHECK td_status_t td_detok_finish(td_detok_t *detok, td_str_t *text);

/* td_chat.h - turns chat messages into the model's prompt text.
 * The format is recognised from the file's tokenizer.chat_template; only ChatML is known, any other
 * is refused. ChatML as SmolLM2's template has it: when the first message is no system message, the
 * template's own default system message goes first.
 * Threads: any. */
#pragma once

#include <stddef.h>

#include "common/base/td_buf.h"
#include "common/base/td_status.h"
#include "common/model/td_gguf.h"

typedef struct td_chat td_chat_t;

typedef struct td_chat_message {
    const char *role; /* borrowed, NUL-terminated: system, user, assistant, tool */
    const char *content;
    size_t content_len; /* bytes */
} td_chat_message_t;

/** Errors: TD_ERR_NOT_FOUND (the file has no template), TD_ERR_UNSUPPORTED (unknown template),
 *          TD_ERR_NO_MEMORY. */
TD_MUST_CHECK td_status_t td_chat_create(const td_gguf_t *gguf, td_chat_t **out);
void td_chat_destroy(td_chat_t *chat);
/** Appends the prompt; add_generation_prompt opens the assistant's turn at the end. Special tokens
 * appear as their text, so the result is tokenised with parse_special. A message's own text could
 * then forge a turn; td_chat_encode() exists for that.
 * Errors: TD_ERR_INVALID (unknown role), TD_ERR_TOO_LARGE (contents over
 *         TD_TOKENIZER_TEXT_BYTES_MAX together), TD_ERR_NO_MEMORY; the text is then unchanged. */
TD_MUST_CHECK td_status_t td_chat_render(const td_chat_t *chat, const td_chat_message_t *messages,
                                         size_t count, bool add_generation_prompt, td_str_t *out);
/** Renders and tokenises so that only the template's own special tokens are special: text inside a
 * message that looks like one is encoded as plain text (prompt-injection safe).
 * Errors: as td_chat_render(), and TD_ERR_UNSUPPORTED (the markers are no tokens of the
 * vocabulary). Owner:  the caller frees *ids_out with td_free(). */
typedef struct td_tokenizer td_tokenizer_t;
TD_MUST_CHECK td_status_t td_chat_encode(const td_chat_t *chat, const td_tokenizer_t *tok,
                                         const td_chat_message_t *messages, size_t count,
                                         bool add_generation_prompt, uint32_t **ids_out,
                                         size_t *count_out);

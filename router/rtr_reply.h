/* rtr_reply.h - tokens, text and usage as OpenAI-shaped JSON and server-sent events.
 * Written straight into a growing text: no tree is built for a token.
 * Threads: any (plain functions). Errors of all: TD_ERR_NO_MEMORY; out is then as before. */
#pragma once

#include "router/rtr_api.h"

/** A run of tokens of one choice; everything is borrowed. */
typedef struct rtr_piece {
    const uint32_t *tokens;
    uint32_t count;
    const char *text;
    size_t text_len;
    td_msg_logprobs_t logprobs;
    const uint64_t *hashes;
    uint32_t hash_count;
    td_finish_t finish;
    td_bytes_t stop_match;
    bool is_prompt; /* its first token has no log-probability */
} rtr_piece_t;

typedef struct rtr_head { /* what all parts of one answer share */
    const rtr_model_t *model;
    rtr_kind_t kind;
    const char *id;
    uint64_t created_s;
    bool want_logprobs;
    bool usage_null; /* chunks say "usage": null, since a usage chunk comes at the end */
    bool tandem;     /* with hashes and node names */
    const char *prefill_id;
    const char *decode_id;
    const td_str_t *chunk_head; /* how its chunks begin, made before; NULL or empty: not yet */
} rtr_head_t;

/** A choice of a whole answer: an echoed prompt, if any, and what was generated. */
typedef struct rtr_choice_view {
    rtr_piece_t pieces[2];
    uint32_t piece_count;
} rtr_choice_view_t;

/** May it stand in JSON as it is? */
bool rtr_reply_is_utf8(const char *bytes, size_t len);
/** The bytes of a JSON string, with quotes; what is not UTF-8 becomes U+FFFD. */
TD_MUST_CHECK td_status_t rtr_reply_string(const void *bytes, size_t len, td_str_t *out);
/** How each chunk of this answer begins. */
TD_MUST_CHECK td_status_t rtr_reply_chunk_head(const rtr_head_t *head, td_str_t *out);
/** One event for one choice. opened: a chunk of this choice was given before. text_offset:
 * characters of the choice so far; moved on. */
TD_MUST_CHECK td_status_t rtr_reply_chunk(const rtr_head_t *head, uint32_t index, bool opened,
                                          const rtr_piece_t *pieces, uint32_t piece_count,
                                          uint32_t *text_offset, td_str_t *out);
TD_MUST_CHECK td_status_t rtr_reply_usage_chunk(const rtr_head_t *head, const td_msg_usage_t *usage,
                                                td_str_t *out);
TD_MUST_CHECK td_status_t rtr_reply_full(const rtr_head_t *head, const rtr_choice_view_t *choices,
                                         uint32_t count, const td_msg_usage_t *usage,
                                         td_str_t *out);
TD_MUST_CHECK td_status_t rtr_reply_error(const rtr_error_t *error, td_str_t *out);
TD_MUST_CHECK td_status_t rtr_reply_error_event(const rtr_error_t *error, td_str_t *out);
TD_MUST_CHECK td_status_t rtr_reply_tokenized(const rtr_model_t *model, const rtr_prompt_t *prompt,
                                              td_str_t *out);
TD_MUST_CHECK td_status_t rtr_reply_detokenized(const rtr_prompt_t *prompt, td_str_t *out);
TD_MUST_CHECK td_status_t rtr_reply_model(const rtr_model_t *model, bool as_list, td_str_t *out);

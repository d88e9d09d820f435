/* rtr_model_file.h - what the router needs of the model file: tokenizer, chat format, fingerprint
 * and the size of a KV block. No weights are read into memory. Threads: init. */
#pragma once

#include "common/kv/td_kv_codec.h"
#include "router/rtr_api.h"

typedef struct rtr_model_file {
    rtr_model_t model;
    td_tokenizer_t *tok; /* owned */
    td_chat_t *chat;     /* owned */
    char name[128];
    uint8_t fingerprint[32];
    uint32_t block_bytes;
    uint32_t layers;
} rtr_model_file_t;

/** Units: context_max in tokens, 0 = the model's own. served_name NULL: the file's, without .gguf.
 * Errors: as td_gguf_open() and td_tokenizer_create(); TD_ERR_INVALID (shape). All are logged.
 * Owner:  the caller ends *out with rtr_model_file_fini(), also after a failure. */
TD_MUST_CHECK td_status_t rtr_model_file_load(const char *path, const char *served_name,
                                              uint32_t context_max, uint32_t block_tokens,
                                              td_kv_codec_t codec, rtr_model_file_t *out);
void rtr_model_file_fini(rtr_model_file_t *file);

#include "router/rtr_model_file.h"

#include <stdio.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/base/td_log.h"
#include "common/kv/td_kv_layout.h"
#include "router/rtr_reply.h"

static void name_of(const char *path, char *out, size_t out_len)
{
    const char *slash = strrchr(path, '/');
    char *suffix = NULL;

    (void)snprintf(out, out_len, "%s", slash != NULL ? slash + 1 : path);
    suffix = strstr(out, ".gguf");
    if (suffix != NULL && suffix[5] == '\0') {
        *suffix = '\0';
    }
}

static td_status_t read_shape(const td_gguf_t *gguf, uint32_t block_tokens, td_kv_codec_t codec,
                              rtr_model_file_t *out)
{
    td_kv_layout_t kv = {.block_tokens = block_tokens, .codec = codec};
    uint32_t embed = 0;
    uint32_t heads = 0;
    uint32_t context = 0;
    size_t bytes = 0;

    if (td_gguf_get_u32(gguf, "llama.block_count", &kv.layers) != TD_OK ||
        td_gguf_get_u32(gguf, "llama.embedding_length", &embed) != TD_OK ||
        td_gguf_get_u32(gguf, "llama.attention.head_count", &heads) != TD_OK ||
        td_gguf_get_u32(gguf, "llama.context_length", &context) != TD_OK || heads == 0) {
        TD_LOG_ERROR("model shape not found", "expected=\"llama.* metadata\"");
        return TD_ERR_INVALID;
    }
    kv.kv_heads = heads;
    kv.head_dim = embed / heads;
    if (td_gguf_get_u32(gguf, "llama.attention.head_count_kv", &kv.kv_heads) == TD_ERR_INVALID ||
        td_gguf_get_u32(gguf, "llama.attention.key_length", &kv.head_dim) == TD_ERR_INVALID ||
        td_kv_layout_check(&kv) != TD_OK) {
        TD_LOG_ERROR("kv layout out of range", "layers=%u kv_heads=%u head_dim=%u block_tokens=%u",
                     kv.layers, kv.kv_heads, kv.head_dim, kv.block_tokens);
        return TD_ERR_INVALID;
    }
    bytes = td_kv_block_bytes(&kv);
    if (bytes > UINT32_MAX) {
        TD_LOG_ERROR("kv block too large", "bytes=%zu", bytes);
        return TD_ERR_INVALID;
    }
    out->block_bytes = (uint32_t)bytes;
    out->layers = kv.layers;
    out->model.context_max = context;
    return TD_OK;
}

static td_status_t read_file(const td_gguf_t *gguf, uint32_t context_max, uint32_t block_tokens,
                             td_kv_codec_t codec, rtr_model_file_t *out)
{
    rtr_model_t *model = &out->model;
    td_status_t status = TD_OK;

    TD_TRY(read_shape(gguf, block_tokens, codec, out));
    if (context_max > model->context_max) {
        /* Nodes with a mask can do it, and those without do not start with such an option. */
        TD_LOG_INFO("context-max above the model's",
                    "got=%u model=%u needs=\"nodes with attention "
                    "window or strided\"",
                    context_max, model->context_max);
    }
    model->context_max = context_max > 0 ? context_max : model->context_max;
    model->context_max = TD_MIN(model->context_max, TD_MSG_PROMPT_TOKENS_MAX);
    TD_TRY(td_tokenizer_create(gguf, &out->tok));
    status = td_chat_create(gguf, &out->chat);
    if (status == TD_ERR_NO_MEMORY) {
        return status;
    }
    if (status != TD_OK) {
        TD_LOG_WARN("chat is off", "why=\"no chat template that is known\" status=%s",
                    td_status_name(status));
    }
    td_gguf_fingerprint(gguf, out->fingerprint);
    return TD_OK;
}

td_status_t rtr_model_file_load(const char *path, const char *served_name, uint32_t context_max,
                                uint32_t block_tokens, td_kv_codec_t codec, rtr_model_file_t *out)
{
    td_gguf_t *gguf = NULL;
    td_status_t status = TD_OK;

    *out = (rtr_model_file_t){0};
    TD_TRY(td_gguf_open(path, &gguf));
    status = read_file(gguf, context_max, block_tokens, codec, out);
    td_gguf_close(gguf);
    TD_TRY(status);
    if (served_name != NULL) {
        (void)snprintf(out->name, sizeof(out->name), "%s", served_name);
    } else {
        name_of(path, out->name, sizeof(out->name));
    }
    if (!rtr_reply_is_utf8(out->name, strlen(out->name))) { /* it goes into JSON */
        TD_LOG_ERROR("model name refused", "file=%s expected=\"UTF-8, or --served-model-name\"",
                     path);
        return TD_ERR_INVALID;
    }
    out->model.tok = out->tok;
    out->model.chat = out->chat;
    out->model.name = out->name;
    out->model.created_s = td_wall_s();
    (void)snprintf(out->model.fingerprint, sizeof(out->model.fingerprint), "fp_%02x%02x%02x%02x",
                   out->fingerprint[0], out->fingerprint[1], out->fingerprint[2],
                   out->fingerprint[3]);
    TD_LOG_INFO("model", "name=%s vocab=%u context=%u block_bytes=%u", out->name,
                td_tokenizer_vocab_size(out->tok), out->model.context_max, out->block_bytes);
    return TD_OK;
}

void rtr_model_file_fini(rtr_model_file_t *file)
{
    td_chat_destroy(file->chat);
    td_tokenizer_destroy(file->tok);
    *file = (rtr_model_file_t){0};
}

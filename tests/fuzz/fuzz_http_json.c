/* Reads any bytes as the body of every route that takes one, and writes an answer from what was
 * accepted. Built with a fuzzing engine, or alone: then it replays the corpus and changes of every
 * byte of it. */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/base/td_base.h"
#include "router/rtr_api.h"
#include "router/rtr_reply.h"
#include "tests/fuzz/gguf_build.h"
#include "tests/fuzz/fuzz_replay.h"

#define CORPUS_DIR "tests/fuzz/corpus/http_json"
#define FILE_BYTES_MAX 65536u

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const rtr_model_t *tiny_model(void)
{
    static rtr_model_t model;
    static td_tokenizer_t *tok;
    static td_chat_t *chat;
    td_str_t file = {0};
    td_gguf_t *gguf = NULL;

    if (tok == NULL) {
        gb_tokenizer(&file);
        TD_ASSERT(td_gguf_open_bytes(file.bytes, file.len, &gguf) == TD_OK);
        TD_ASSERT(td_tokenizer_create(gguf, &tok) == TD_OK);
        TD_ASSERT(td_chat_create(gguf, &chat) == TD_OK);
        td_gguf_close(gguf);
        td_str_fini(&file);
        model = (rtr_model_t){
            .tok = tok, .chat = chat, .name = "tiny", .context_max = 64, .allow_placement = true};
    }
    return &model;
}

/* What every accepted request promises to the nodes. */
static void check_params(const rtr_params_t *p)
{
    TD_ASSERT(p->prompt_count >= 1 && p->prompt_count <= RTR_PROMPTS_MAX);
    if (p->kind == RTR_KIND_TOKENIZE || p->kind == RTR_KIND_DETOKENIZE) {
        return;
    }
    TD_ASSERT(p->n >= 1 && p->n <= RTR_N_MAX && p->stop_count <= TD_MSG_STOPS_MAX);
    TD_ASSERT(p->temperature >= 0 && p->temperature <= 2 && p->top_p > 0 && p->top_p <= 1);
    TD_ASSERT(p->min_p >= 0 && p->min_p < 1 && p->repetition_penalty > 0);
    for (uint32_t i = 0; i < p->prompt_count; i++) {
        TD_ASSERT(p->prompts[i].count >= 1 && p->prompts[i].max_tokens >= 1);
        TD_ASSERT(p->prompts[i].count + p->prompts[i].max_tokens <= 64);
        TD_ASSERT(p->min_tokens <= p->prompts[i].max_tokens);
        for (uint32_t k = 0; k < p->prompts[i].count; k++) {
            TD_ASSERT(p->prompts[i].tokens[k] < GB_VOCAB);
        }
    }
    for (uint32_t i = 0; i < p->stop_count; i++) {
        TD_ASSERT(p->stops[i].len >= 1 && p->stops[i].len <= TD_MSG_STOP_BYTES_MAX);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const rtr_model_t *model = tiny_model();

    for (int kind = RTR_KIND_CHAT; kind <= RTR_KIND_DETOKENIZE; kind++) {
        rtr_params_t params;
        rtr_error_t error;
        td_str_t out = {0};
        if (rtr_api_parse(model, (rtr_kind_t)kind, (const char *)data, size, &params, &error) ==
            TD_OK) {
            check_params(&params);
            TD_ASSERT(rtr_reply_tokenized(model, &params.prompts[0], &out) == TD_OK);
            TD_ASSERT(rtr_reply_detokenized(&params.prompts[0], &out) == TD_OK);
        } else {
            TD_ASSERT(error.http == 400 || error.http == 404);
            TD_ASSERT(error.message[0] != '\0' && error.type != NULL);
            TD_ASSERT(rtr_reply_error(&error, &out) == TD_OK);
        }
        td_str_fini(&out);
        rtr_params_fini(&params);
    }
    return 0;
}

#ifndef TD_FUZZ_ENGINE
static bool replay_file(const char *dir, const char *name)
{
    static const uint8_t masks[FUZZ_MASKS] = {0x01, 0x02, 0x10, 0x80};
    static uint8_t bytes[FILE_BYTES_MAX];
    size_t len = 0;

    if (!fuzz_read(dir, name, bytes, sizeof(bytes), &len)) {
        return false;
    }
    fuzz_replay(bytes, len, masks, 1);
    return true;
}

int main(int argc, char **argv)
{
    const int rc = fuzz_replay_folder(argc > 1 ? argv[1] : CORPUS_DIR, replay_file, false);

    td_chat_destroy((td_chat_t *)(uintptr_t)tiny_model()->chat);
    td_tokenizer_destroy((td_tokenizer_t *)(uintptr_t)tiny_model()->tok);
    return rc;
}
#endif

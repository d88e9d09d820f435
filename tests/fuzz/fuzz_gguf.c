/* Opens any bytes as a model file and uses all that opening promised: every tensor's bytes, the
 * typed values, the tokenizer and the chat template. Built with a fuzzing engine, or alone: then
 * it replays the corpus and changes of every byte of it. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/model/td_chat.h"
#include "common/model/td_gguf.h"
#include "common/model/td_tokenizer.h"
#include "tests/fuzz/fuzz_replay.h"

#define CORPUS_DIR "tests/fuzz/corpus/gguf"
#define ARRAY_WALK_MAX 64u

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void use_key(const td_gguf_t *gguf, const char *key)
{
    uint32_t u32 = 0;
    int32_t i32 = 0;
    float f32 = 0;
    bool yes = false;
    const char *text = NULL;
    size_t len = 0;
    uint32_t count = 0;

    if (td_gguf_get_u32(gguf, key, &u32) == TD_ERR_NOT_FOUND) {
        return;
    }
    (void)!td_gguf_get_f32(gguf, key, &f32);
    (void)!td_gguf_get_bool(gguf, key, &yes);
    if (td_gguf_get_str(gguf, key, &text, &len) == TD_OK) {
        fuzz_touch(text, len);
    }
    if (td_gguf_get_array_len(gguf, key, &count) != TD_OK) {
        return;
    }
    for (uint32_t i = 0; i <= count && i < ARRAY_WALK_MAX; i++) {
        if (td_gguf_get_array_str(gguf, key, i, &text, &len) == TD_OK) {
            fuzz_touch(text, len);
        }
        (void)!td_gguf_get_array_i32(gguf, key, i, &i32);
    }
}

static void use_tokenizer(const td_gguf_t *gguf)
{
    static const char text[] = "ab c\n<|im_start|>a1\xc3\xa9\xff  abc<tool>";
    const td_chat_message_t message = {"user", text, sizeof(text) - 1};
    td_tokenizer_t *tok = NULL;
    td_chat_t *chat = NULL;
    uint32_t *ids = NULL;
    size_t count = 0;
    td_detok_t detok = {0};
    td_str_t out = {0};

    if (td_tokenizer_create(gguf, &tok) != TD_OK) {
        return;
    }
    if (td_tokenizer_encode(tok, text, sizeof(text) - 1, true, &ids, &count) == TD_OK) {
        for (size_t i = 0; i < count; i++) {
            TD_ASSERT(td_detok_push(&detok, tok, ids[i], i % 2 == 0, &out) == TD_OK);
        }
        TD_ASSERT(td_detok_finish(&detok, &out) == TD_OK);
        td_free(ids);
    }
    if (td_chat_create(gguf, &chat) == TD_OK) {
        if (td_chat_encode(chat, tok, &message, 1, true, &ids, &count) == TD_OK) {
            td_free(ids);
        }
        td_chat_destroy(chat);
    }
    td_str_fini(&out);
    td_tokenizer_destroy(tok);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char *const keys[] = {"general.alignment",
                                       "general.name",
                                       "f32",
                                       "f64",
                                       "i8",
                                       "yes",
                                       "words",
                                       "ints",
                                       "nested",
                                       "tokenizer.ggml.tokens",
                                       "tokenizer.ggml.token_type",
                                       "tokenizer.ggml.merges"};
    td_gguf_t *gguf = NULL;

    if (td_gguf_open_bytes(data, size, &gguf) != TD_OK) {
        return 0;
    }
    for (uint32_t i = 0; i < td_gguf_tensor_count(gguf); i++) {
        const td_gguf_tensor_t *tensor = td_gguf_tensor_at(gguf, i);
        fuzz_touch(tensor->bytes, tensor->byte_count);
        TD_ASSERT(td_gguf_tensor_find(gguf, tensor->name) == tensor);
    }
    for (size_t i = 0; i < TD_ARRAY_LEN(keys); i++) {
        use_key(gguf, keys[i]);
    }
    use_tokenizer(gguf);
    td_gguf_close(gguf);
    return 0;
}

#ifndef TD_FUZZ_ENGINE
int main(int argc, char **argv)
{
    return fuzz_replay_folder(argc > 1 ? argv[1] : CORPUS_DIR, fuzz_replay_file, true);
}
#endif

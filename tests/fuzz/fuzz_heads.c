/* Opens any bytes as a tensor file and uses all that opening promised; and as heads, as far as they
 * can be read without their model. Built with a fuzzing engine, or alone: then it replays the
 * corpus and changes of every byte of it. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/model/td_heads.h"
#include "common/model/td_safetensors.h"
#include "tests/fuzz/fuzz_replay.h"

#define CORPUS_DIR "tests/fuzz/corpus/heads"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void use_heads(const td_safetensors_t *file)
{
    td_heads_file_t heads;

    if (td_heads_read(file, &heads) != TD_OK) {
        return;
    }
    TD_ASSERT(heads.in_weight->byte_count ==
              (size_t)heads.hidden_dim * TD_HEADS_INPUTS * heads.embed_dim * sizeof(float));
    TD_ASSERT(heads.in_bias->byte_count == heads.hidden_dim * sizeof(float));
    TD_ASSERT(heads.out_weight->byte_count ==
              (size_t)heads.hidden_dim * heads.embed_dim * sizeof(float));
    TD_ASSERT(heads.out_bias->byte_count == heads.embed_dim * sizeof(float));
    TD_ASSERT(heads.tokens->byte_count == heads.token_count * sizeof(int32_t));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    td_safetensors_t *file = NULL;
    const char *text = NULL;

    if (td_safetensors_open_bytes(data, size, &file) != TD_OK) {
        return 0;
    }
    for (uint32_t i = 0; i < td_safetensors_count(file); i++) {
        const td_safetensor_t *tensor = td_safetensors_at(file, i);
        fuzz_touch(tensor->bytes, tensor->byte_count);
        TD_ASSERT(td_safetensors_find(file, tensor->name) == tensor);
    }
    text = td_safetensors_text(file, TD_HEADS_ACCEPTANCE_KEY);
    fuzz_touch(text, text == NULL ? 0 : strlen(text));
    use_heads(file);
    td_safetensors_close(file);
    return 0;
}

#ifndef TD_FUZZ_ENGINE
int main(int argc, char **argv)
{
    return fuzz_replay_folder(argc > 1 ? argv[1] : CORPUS_DIR, fuzz_replay_file, true);
}
#endif

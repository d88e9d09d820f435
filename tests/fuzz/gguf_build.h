/* gguf_build.h - builds small model files in memory for tests. Memory is assumed to be there. */
#pragma once

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_buf.h"

enum {
    GB_U8 = 0,
    GB_I8,
    GB_U16,
    GB_I16,
    GB_U32,
    GB_I32,
    GB_F32,
    GB_BOOL,
    GB_STR,
    GB_ARR,
    GB_U64,
    GB_I64,
    GB_F64
};

static inline void gb_bytes(td_str_t *out, const void *bytes, size_t len)
{
    if (td_str_append(out, bytes, len) != TD_OK) {
        abort();
    }
}

static inline void gb_u32(td_str_t *out, uint32_t value)
{
    gb_bytes(out, &value, sizeof(value));
}

static inline void gb_u64(td_str_t *out, uint64_t value)
{
    gb_bytes(out, &value, sizeof(value));
}

static inline void gb_str(td_str_t *out, const char *text)
{
    gb_u64(out, strlen(text));
    gb_bytes(out, text, strlen(text));
}

static inline void gb_header(td_str_t *out, uint64_t tensor_count, uint64_t kv_count)
{
    gb_bytes(out, "GGUF", 4);
    gb_u32(out, 3);
    gb_u64(out, tensor_count);
    gb_u64(out, kv_count);
}

static inline void gb_kv_scalar(td_str_t *out, const char *key, uint32_t type, const void *value,
                                size_t len)
{
    gb_str(out, key);
    gb_u32(out, type);
    gb_bytes(out, value, len);
}

static inline void gb_kv_u32(td_str_t *out, const char *key, uint32_t value)
{
    gb_kv_scalar(out, key, GB_U32, &value, sizeof(value));
}

static inline void gb_kv_str(td_str_t *out, const char *key, const char *value)
{
    gb_str(out, key);
    gb_u32(out, GB_STR);
    gb_str(out, value);
}

static inline void gb_kv_strs(td_str_t *out, const char *key, const char *const *values,
                              size_t count)
{
    gb_str(out, key);
    gb_u32(out, GB_ARR);
    gb_u32(out, GB_STR);
    gb_u64(out, count);
    for (size_t i = 0; i < count; i++) {
        gb_str(out, values[i]);
    }
}

static inline void gb_kv_i32s(td_str_t *out, const char *key, const int32_t *values, size_t count)
{
    gb_str(out, key);
    gb_u32(out, GB_ARR);
    gb_u32(out, GB_I32);
    gb_u64(out, count);
    gb_bytes(out, values, count * sizeof(*values));
}

static inline void gb_tensor(td_str_t *out, const char *name, uint32_t dim_count,
                             const uint64_t *dims, uint32_t type, uint64_t offset)
{
    gb_str(out, name);
    gb_u32(out, dim_count);
    for (uint32_t i = 0; i < dim_count; i++) {
        gb_u64(out, dims[i]);
    }
    gb_u32(out, type);
    gb_u64(out, offset);
}

static inline void gb_pad(td_str_t *out, size_t alignment)
{
    while (out->len % alignment != 0) {
        gb_bytes(out, "", 1);
    }
}

/* The ids of gb_tokenizer()'s vocabulary. */
enum {
    GB_IM_START = 0,
    GB_IM_END,
    GB_TOOL,
    GB_A,
    GB_B,
    GB_C,
    GB_SPACE,
    GB_LF,
    GB_AB,
    GB_ABC,
    GB_SPACE_A,
    GB_AA,
    GB_C3,
    GB_A9,
    GB_VOCAB
};

#define GB_TEMPLATE                                                                                \
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"         \
    "{{ '<|im_start|>system\nab c<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] "   \
    "+ '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"

/* A whole model file with 14 tokens, 4 merges and a ChatML template, and no tensors. */
static inline void gb_tokenizer(td_str_t *out)
{
    static const char *const tokens[GB_VOCAB] = {"<|im_start|>",
                                                 "<|im_end|>",
                                                 "<tool>",
                                                 "a",
                                                 "b",
                                                 "c",
                                                 "\xc4\xa0",
                                                 "\xc4\x8a",
                                                 "ab",
                                                 "abc",
                                                 "\xc4\xa0"
                                                 "a",
                                                 "aa",
                                                 "\xc3\x83",
                                                 "\xc2\xa9"};
    static const int32_t types[GB_VOCAB] = {3, 3, 4, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    static const char *const merges[] = {"a b", "ab c", "\xc4\xa0 a", "a a"};

    gb_header(out, 0, 8);
    gb_kv_str(out, "tokenizer.ggml.model", "gpt2");
    gb_kv_str(out, "tokenizer.ggml.pre", "smollm");
    gb_kv_strs(out, "tokenizer.ggml.tokens", tokens, GB_VOCAB);
    gb_kv_i32s(out, "tokenizer.ggml.token_type", types, GB_VOCAB);
    gb_kv_strs(out, "tokenizer.ggml.merges", merges, TD_ARRAY_LEN(merges));
    gb_kv_u32(out, "tokenizer.ggml.bos_token_id", GB_IM_START);
    gb_kv_u32(out, "tokenizer.ggml.eos_token_id", GB_IM_END);
    gb_kv_str(out, "tokenizer.chat_template", GB_TEMPLATE);
}

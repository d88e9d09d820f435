/* test_model_tiny.h - writes small Llama models as GGUF bytes, in any weight type, together with
 * the numbers those bytes stand for.
 * Threads: owner. */
#pragma once

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/model/cpu/td_cpu_ops.h"
#include "common/model/td_model.h"

enum {
    TINY_LAYERS = 2,
    TINY_DIM = 64,
    TINY_FF = 96,
    TINY_HEADS = 4,
    TINY_KV_HEADS = 2,
    TINY_HEAD_DIM = 16,
    TINY_Q_DIM = TINY_HEADS * TINY_HEAD_DIM,
    TINY_KV_DIM = TINY_KV_HEADS * TINY_HEAD_DIM,
    TINY_VOCAB = 53, /* no multiple of anything */
    TINY_CONTEXT = 128,
    TINY_TENSORS_MAX = 24
};
#define TINY_EPS 1e-5f
#define TINY_ROPE_BASE 10000.0f

typedef struct tiny_tensor {
    char name[64];
    uint32_t inputs;
    uint32_t outputs; /* 0: a vector */
    td_gguf_type_t type;
    size_t offset;
    double *values; /* owned; [outputs][inputs], exactly what the bytes mean */
} tiny_tensor_t;

/** What to write; zero-initialise for a sound, tied model. */
typedef struct tiny_spec {
    td_gguf_type_t type; /* of the matrices */
    bool untied;
    uint32_t rope_dim;          /* 0 = the head's size */
    const char *architecture;   /* NULL = llama */
    const char *leave_out;      /* a key or tensor that is not written */
    const char *extra_tensor;   /* a vector nobody knows */
    const char *misshapen;      /* a tensor whose outputs are 8 too many */
    uint32_t heads;             /* 0 = TINY_HEADS; metadata only */
    uint32_t kv_heads;          /* 0 = TINY_KV_HEADS; tensors too */
    uint32_t kv_group;          /* 0 = TINY_HEADS / TINY_KV_HEADS: heads of one; tensors too */
    uint32_t ff;                /* 0 = TINY_FF; tensors too */
    uint32_t blocks;            /* 0 = TINY_LAYERS; metadata only */
    uint32_t context;           /* 0 = TINY_CONTEXT; metadata only */
    uint32_t window;            /* llama.attention.sliding_window; 0 = not written */
    const char *window_pattern; /* NULL = not written */
} tiny_spec_t;

typedef struct tiny {
    tiny_spec_t spec;
    uint8_t *bytes; /* owned */
    size_t len;
    size_t cap;
    tiny_tensor_t tensors[TINY_TENSORS_MAX];
    uint32_t tensor_count;
    uint64_t random;
} tiny_t;

static inline void tiny_put(tiny_t *t, const void *bytes, size_t len)
{
    if (t->len + len > t->cap) {
        t->cap = 2 * (t->len + len) + 4096;
        t->bytes = realloc(t->bytes, t->cap);
        TD_ASSERT(t->bytes != NULL);
    }
    memcpy(t->bytes + t->len, bytes, len);
    t->len += len;
}

static inline void tiny_put_u32(tiny_t *t, uint32_t v)
{
    tiny_put(t, &v, sizeof(v));
}

static inline void tiny_put_u64(tiny_t *t, uint64_t v)
{
    tiny_put(t, &v, sizeof(v));
}

static inline void tiny_put_str(tiny_t *t, const char *text)
{
    tiny_put_u64(t, strlen(text));
    tiny_put(t, text, strlen(text));
}

static inline void tiny_align(tiny_t *t)
{
    static const uint8_t zero[32];
    tiny_put(t, zero, (32 - t->len % 32) % 32);
}

static inline double tiny_random(tiny_t *t) /* in [-1, 1) */
{
    t->random = t->random * 6364136223846793005ull + 1442695040888963407ull;
    return (double)(t->random >> 11) * 0x1p-52 - 1.0;
}

static inline void tiny_put_half(tiny_t *t, uint16_t half)
{
    tiny_put(t, &half, sizeof(half));
}

/* Writes 32 numbers quantised, and replaces them by what was written. */
static inline void tiny_put_group(tiny_t *t, td_gguf_type_t type, double *v)
{
    double low = v[0];
    double high = v[0];
    double largest = 0;
    uint8_t q[32];

    for (int i = 0; i < 32; i++) {
        low = fmin(low, v[i]);
        high = fmax(high, v[i]);
        largest = fmax(largest, fabs(v[i]));
    }
    if (type == TD_GGUF_Q8_0) {
        uint16_t half = td_f16_from_f32((float)(largest / 127));
        double d = (double)td_f32_from_f16(half);
        tiny_put_half(t, half);
        for (int i = 0; i < 32; i++) {
            int8_t byte = (int8_t)fmax(-127, fmin(127, rint(v[i] / d)));
            tiny_put(t, &byte, 1);
            v[i] = byte * d;
        }
        return;
    }
    uint16_t scale =
        td_f16_from_f32((float)(type == TD_GGUF_Q4_1 ? (high - low) / 15 : largest / 8));
    uint16_t minimum = td_f16_from_f32((float)low);
    double d = (double)td_f32_from_f16(scale);
    double m = type == TD_GGUF_Q4_1 ? (double)td_f32_from_f16(minimum) : -8 * d;
    tiny_put_half(t, scale);
    if (type == TD_GGUF_Q4_1) {
        tiny_put_half(t, minimum);
    }
    for (int i = 0; i < 32; i++) {
        q[i] = (uint8_t)fmax(0, fmin(15, rint((v[i] - m) / d)));
        v[i] = q[i] * d + m;
    }
    for (int i = 0; i < 16; i++) {
        uint8_t byte = (uint8_t)(q[i] | q[i + 16] << 4);
        tiny_put(t, &byte, 1);
    }
}

static inline void tiny_put_values(tiny_t *t, td_gguf_type_t type, double *v, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        float f = (float)v[i];
        if (type == TD_GGUF_F32) {
            tiny_put(t, &f, sizeof(f));
            v[i] = (double)f;
        } else if (type == TD_GGUF_F16) {
            uint16_t half = td_f16_from_f32(f);
            tiny_put_half(t, half);
            v[i] = (double)td_f32_from_f16(half);
        } else if (type == TD_GGUF_BF16) {
            uint16_t half = (uint16_t)(td_bits_from_float(f) >> 16);
            tiny_put_half(t, half);
            v[i] = (double)td_cpu_f32_from_bf16(half);
        } else if (i % 32 == 0) {
            tiny_put_group(t, type, v + i);
        }
    }
}

static inline bool tiny_left_out(const tiny_t *t, const char *name)
{
    return t->spec.leave_out != NULL && strcmp(t->spec.leave_out, name) == 0;
}

static inline void tiny_plan(tiny_t *t, const char *name, uint32_t inputs, uint32_t outputs)
{
    tiny_tensor_t *tensor = &t->tensors[t->tensor_count];

    if (tiny_left_out(t, name)) {
        return;
    }
    TD_ASSERT(t->tensor_count < TINY_TENSORS_MAX);
    t->tensor_count++;
    *tensor = (tiny_tensor_t){
        .inputs = inputs, .outputs = outputs, .type = outputs == 0 ? TD_GGUF_F32 : t->spec.type};
    (void)snprintf(tensor->name, sizeof(tensor->name), "%s", name);
    if (t->spec.misshapen != NULL && strcmp(t->spec.misshapen, name) == 0) {
        if (outputs == 0) {
            tensor->inputs += 8;
        } else {
            tensor->outputs += 8;
        }
    }
}

static inline uint32_t tiny_kv_heads(const tiny_spec_t *spec)
{
    return spec->kv_heads != 0 ? spec->kv_heads : TINY_KV_HEADS;
}

static inline uint32_t tiny_heads(const tiny_spec_t *spec)
{
    const uint32_t group = spec->kv_group != 0 ? spec->kv_group : TINY_HEADS / TINY_KV_HEADS;

    return tiny_kv_heads(spec) * group;
}

static inline void tiny_plan_all(tiny_t *t)
{
    const uint32_t q_dim = tiny_heads(&t->spec) * TINY_HEAD_DIM;
    const uint32_t kv_dim = tiny_kv_heads(&t->spec) * TINY_HEAD_DIM;
    const uint32_t ff = t->spec.ff != 0 ? t->spec.ff : TINY_FF;
    const struct {
        const char *name;
        uint32_t inputs;
        uint32_t outputs;
    } parts[] = {{"attn_norm", TINY_DIM, 0},       {"attn_q", TINY_DIM, q_dim},
                 {"attn_k", TINY_DIM, kv_dim},     {"attn_v", TINY_DIM, kv_dim},
                 {"attn_output", q_dim, TINY_DIM}, {"ffn_norm", TINY_DIM, 0},
                 {"ffn_gate", TINY_DIM, ff},       {"ffn_up", TINY_DIM, ff},
                 {"ffn_down", ff, TINY_DIM}};
    char name[64];

    tiny_plan(t, "token_embd.weight", TINY_DIM, TINY_VOCAB);
    for (int layer = 0; layer < TINY_LAYERS; layer++) {
        for (size_t i = 0; i < TD_ARRAY_LEN(parts); i++) {
            (void)snprintf(name, sizeof(name), "blk.%d.%s.weight", layer, parts[i].name);
            tiny_plan(t, name, parts[i].inputs, parts[i].outputs);
        }
    }
    tiny_plan(t, "output_norm.weight", TINY_DIM, 0);
    if (t->spec.untied) {
        tiny_plan(t, "output.weight", TINY_DIM, TINY_VOCAB);
    }
    if (t->spec.extra_tensor != NULL) {
        tiny_plan(t, t->spec.extra_tensor, TINY_DIM, 0);
    }
}

static inline void tiny_put_metadata(tiny_t *t)
{
    const struct {
        const char *key;
        uint32_t value;
    } numbers[] = {
        {"llama.block_count", t->spec.blocks != 0 ? t->spec.blocks : TINY_LAYERS},
        {"llama.context_length", t->spec.context != 0 ? t->spec.context : TINY_CONTEXT},
        {"llama.attention.sliding_window", t->spec.window},
        {"llama.embedding_length", TINY_DIM},
        {"llama.attention.key_length", TINY_HEAD_DIM},
        {"llama.feed_forward_length", t->spec.ff != 0 ? t->spec.ff : TINY_FF},
        {"llama.attention.head_count", t->spec.heads != 0 ? t->spec.heads : tiny_heads(&t->spec)},
        {"llama.attention.head_count_kv", tiny_kv_heads(&t->spec)},
        {"llama.rope.dimension_count", t->spec.rope_dim != 0 ? t->spec.rope_dim : TINY_HEAD_DIM}};
    const struct {
        const char *key;
        float value;
    } floats[] = {{"llama.attention.layer_norm_rms_epsilon", TINY_EPS},
                  {"llama.rope.freq_base", TINY_ROPE_BASE}};
    size_t count_at = t->len;
    uint64_t count = 2;

    tiny_put_u64(t, 0);
    tiny_put_str(t, "general.architecture");
    tiny_put_u32(t, 8);
    tiny_put_str(t, t->spec.architecture != NULL ? t->spec.architecture : "llama");
    tiny_put_str(t, "general.name");
    tiny_put_u32(t, 8);
    tiny_put_str(t, "tiny\n\x80 model");
    for (size_t i = 0; i < TD_ARRAY_LEN(numbers); i++) {
        if (!tiny_left_out(t, numbers[i].key) &&
            (numbers[i].value != 0 || strstr(numbers[i].key, "window") == NULL)) {
            tiny_put_str(t, numbers[i].key);
            tiny_put_u32(t, 4);
            tiny_put_u32(t, numbers[i].value);
            count++;
        }
    }
    for (size_t i = 0; i < TD_ARRAY_LEN(floats); i++) {
        if (!tiny_left_out(t, floats[i].key)) {
            tiny_put_str(t, floats[i].key);
            tiny_put_u32(t, 6);
            tiny_put(t, &floats[i].value, 4);
            count++;
        }
    }
    if (t->spec.window_pattern != NULL) {
        tiny_put_str(t, "llama.attention.sliding_window_pattern");
        tiny_put_u32(t, 8);
        tiny_put_str(t, t->spec.window_pattern);
        count++;
    }
    memcpy(t->bytes + count_at, &count, sizeof(count));
}

static inline size_t tiny_tensor_bytes(const tiny_tensor_t *tensor)
{
    size_t count = (size_t)tensor->inputs * TD_MAX(tensor->outputs, 1u);
    switch (tensor->type) {
    case TD_GGUF_Q4_0:
        return count / 32 * 18;
    case TD_GGUF_Q4_1:
        return count / 32 * 20;
    case TD_GGUF_Q8_0:
        return count / 32 * 34;
    case TD_GGUF_F32:
        return count * 4;
    default:
        return count * 2;
    }
}

/** Owner: the caller ends it with tiny_fini(). */
static inline void tiny_init(tiny_t *t, const tiny_spec_t *spec)
{
    size_t offset = 0;

    *t = (tiny_t){.spec = *spec, .random = 42};
    tiny_plan_all(t);
    tiny_put(t, "GGUF", 4);
    tiny_put_u32(t, 3);
    tiny_put_u64(t, t->tensor_count);
    tiny_put_metadata(t);
    for (uint32_t i = 0; i < t->tensor_count; i++) {
        tiny_tensor_t *tensor = &t->tensors[i];
        tiny_put_str(t, tensor->name);
        tiny_put_u32(t, tensor->outputs == 0 ? 1 : 2);
        tiny_put_u64(t, tensor->inputs);
        if (tensor->outputs != 0) {
            tiny_put_u64(t, tensor->outputs);
        }
        tiny_put_u32(t, (uint32_t)tensor->type);
        tiny_put_u64(t, offset);
        offset += (tiny_tensor_bytes(tensor) + 31) / 32 * 32;
    }
    tiny_align(t);
    for (uint32_t i = 0; i < t->tensor_count; i++) {
        tiny_tensor_t *tensor = &t->tensors[i];
        size_t count = (size_t)tensor->inputs * TD_MAX(tensor->outputs, 1u);
        tensor->values = calloc(count, sizeof(double));
        TD_ASSERT(tensor->values != NULL);
        for (size_t j = 0; j < count; j++) {
            double r = tiny_random(t);
            tensor->values[j] = tensor->outputs == 0 ? 1.0 + 0.3 * r : 0.25 * r;
        }
        tiny_put_values(t, tensor->type, tensor->values, count);
        tiny_align(t);
    }
}

static inline void tiny_fini(tiny_t *t)
{
    for (uint32_t i = 0; i < t->tensor_count; i++) {
        free(t->tensors[i].values);
    }
    free(t->bytes);
}

static inline const double *tiny_values(const tiny_t *t, const char *name)
{
    for (uint32_t i = 0; i < t->tensor_count; i++) {
        if (strcmp(t->tensors[i].name, name) == 0) {
            return t->tensors[i].values;
        }
    }
    TD_ASSERT(!"tensor exists");
    return NULL;
}

/* --- the textbook forward pass, in double ------------------------------------------------------
 */

static inline void tiny_matvec(const tiny_t *t, const char *name, const double *x, uint32_t inputs,
                               uint32_t outputs, double *y)
{
    const double *w = tiny_values(t, name);
    for (uint32_t o = 0; o < outputs; o++) {
        y[o] = 0;
        for (uint32_t i = 0; i < inputs; i++) {
            y[o] += w[(size_t)o * inputs + i] * x[i];
        }
    }
}

static inline void tiny_norm(const tiny_t *t, const char *name, const double *x, double *y)
{
    const double *w = tiny_values(t, name);
    double mean = 0;
    for (int i = 0; i < TINY_DIM; i++) {
        mean += x[i] * x[i] / TINY_DIM;
    }
    for (int i = 0; i < TINY_DIM; i++) {
        y[i] = x[i] / sqrt(mean + (double)TINY_EPS) * w[i];
    }
}

static inline void tiny_rotate(double *head, uint32_t rope_dim, uint32_t position)
{
    for (uint32_t i = 0; i < rope_dim; i += 2) {
        double angle = position * pow((double)TINY_ROPE_BASE, -(double)i / rope_dim);
        double even = head[i];
        double odd = head[i + 1];
        head[i] = even * cos(angle) - odd * sin(angle);
        head[i + 1] = even * sin(angle) + odd * cos(angle);
    }
}

static inline double tiny_as_f16(double x)
{
    return (double)td_f32_from_f16(td_f16_from_f32((float)x));
}

/* A row as a codec keeps it, from the formats' definitions alone. */
static inline void tiny_keep(td_kv_codec_t codec, double *row)
{
    const int bits = codec == TD_KV_F8_E4M3 ? 3 : 1; /* of the mantissa */
    const int lowest = codec == TD_KV_F8_E4M3 ? -6 : 0;
    const double limit = codec == TD_KV_F8_E4M3 ? 448 : codec == TD_KV_I8 ? 127 : 6;
    double largest = 0;

    for (int i = 0; i < TINY_HEAD_DIM; i++) {
        largest = fmax(largest, fabs(row[i]));
    }
    for (int i = 0; i < TINY_HEAD_DIM; i++) {
        const double x = row[i] / largest * limit;
        const double step =
            codec == TD_KV_I8 || x == 0 ? 1 : exp2(fmax(floor(log2(fabs(x))), lowest) - bits);
        row[i] = codec == TD_KV_F16 ? tiny_as_f16(row[i]) : rint(x / step) * step * largest / limit;
    }
}

typedef struct tiny_cache {
    td_kv_codec_t codec;
    td_attention_mask_t mask;
    double k[TINY_LAYERS][TINY_CONTEXT][TINY_KV_DIM];
    double v[TINY_LAYERS][TINY_CONTEXT][TINY_KV_DIM];
} tiny_cache_t;

static inline void tiny_attend(const tiny_cache_t *c, int layer, uint32_t position, const double *q,
                               double *out)
{
    for (int h = 0; h < TINY_HEADS; h++) {
        const int kv = h / (TINY_HEADS / TINY_KV_HEADS) * TINY_HEAD_DIM;
        double p[TINY_CONTEXT];
        double sum = 0;
        for (uint32_t t = 0; t <= position; t++) {
            double dot = 0;
            p[t] = 0;
            if (!td_attention_sees(&c->mask, position, t)) {
                continue;
            }
            for (int d = 0; d < TINY_HEAD_DIM; d++) {
                dot += q[h * TINY_HEAD_DIM + d] * c->k[layer][t][kv + d];
            }
            p[t] = exp(dot / sqrt(TINY_HEAD_DIM));
            sum += p[t];
        }
        for (int d = 0; d < TINY_HEAD_DIM; d++) {
            double acc = 0;
            for (uint32_t t = 0; t <= position; t++) {
                acc += p[t] / sum * c->v[layer][t][kv + d];
            }
            out[h * TINY_HEAD_DIM + d] = acc;
        }
    }
}

/** Shape: logits [TINY_VOCAB] after this token. */
static inline void tiny_forward(const tiny_t *t, tiny_cache_t *c, uint32_t token, uint32_t position,
                                double *logits)
{
    const uint32_t rope_dim = t->spec.rope_dim != 0 ? t->spec.rope_dim : TINY_HEAD_DIM;
    double x[TINY_DIM];
    double n[TINY_DIM];
    double q[TINY_Q_DIM];
    double a[TINY_Q_DIM];
    double g[TINY_FF];
    double u[TINY_FF];
    double y[TINY_DIM];
    char name[64];

#define TINY_NAME(part) ((void)snprintf(name, sizeof(name), "blk.%d." part ".weight", layer), name)
    memcpy(x, tiny_values(t, "token_embd.weight") + (size_t)token * TINY_DIM, sizeof(x));
    for (int layer = 0; layer < TINY_LAYERS; layer++) {
        double *k = c->k[layer][position];
        double *v = c->v[layer][position];
        tiny_norm(t, TINY_NAME("attn_norm"), x, n);
        tiny_matvec(t, TINY_NAME("attn_q"), n, TINY_DIM, TINY_Q_DIM, q);
        tiny_matvec(t, TINY_NAME("attn_k"), n, TINY_DIM, TINY_KV_DIM, k);
        tiny_matvec(t, TINY_NAME("attn_v"), n, TINY_DIM, TINY_KV_DIM, v);
        for (int h = 0; h < TINY_HEADS; h++) {
            tiny_rotate(q + h * TINY_HEAD_DIM, rope_dim, position);
        }
        for (int h = 0; h < TINY_KV_HEADS; h++) {
            tiny_rotate(k + h * TINY_HEAD_DIM, rope_dim, position);
        }
        for (int h = 0; h < TINY_KV_HEADS; h++) {
            tiny_keep(c->codec, k + h * TINY_HEAD_DIM);
            tiny_keep(c->codec, v + h * TINY_HEAD_DIM);
        }
        tiny_attend(c, layer, position, q, a);
        tiny_matvec(t, TINY_NAME("attn_output"), a, TINY_Q_DIM, TINY_DIM, y);
        for (int i = 0; i < TINY_DIM; i++) {
            x[i] += y[i];
        }
        tiny_norm(t, TINY_NAME("ffn_norm"), x, n);
        tiny_matvec(t, TINY_NAME("ffn_gate"), n, TINY_DIM, TINY_FF, g);
        tiny_matvec(t, TINY_NAME("ffn_up"), n, TINY_DIM, TINY_FF, u);
        for (int i = 0; i < TINY_FF; i++) {
            g[i] = g[i] / (1 + exp(-g[i])) * u[i];
        }
        tiny_matvec(t, TINY_NAME("ffn_down"), g, TINY_FF, TINY_DIM, y);
        for (int i = 0; i < TINY_DIM; i++) {
            x[i] += y[i];
        }
    }
#undef TINY_NAME
    tiny_norm(t, "output_norm.weight", x, n);
    tiny_matvec(t, t->spec.untied ? "output.weight" : "token_embd.weight", n, TINY_DIM, TINY_VOCAB,
                logits);
}

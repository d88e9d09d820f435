#include <math.h>
#include <stdio.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/base/td_log.h"
#include "common/model/td_model_device_internal.h"
#include "common/model/td_model_internal.h"

#define KERNEL_REVISION "r2" /* raised whenever a change of arithmetic changes bits */
#define TENSOR_NAME_BYTES 64
#define PROGRESS_NS (2 * TD_NS_PER_S)
#define EMBED_DIM_MAX (1u << 20)
#define FF_DIM_MAX (1u << 22)
#define VOCAB_MAX (1u << 24)
#define CONTEXT_MAX (1u << 24)
#define HEADS_MAX 4096u

static const char *const precision_names[] = {"fast", "mixed", "exact"};
static const char *const backend_names[] = {"cpu", "cuda"};
static const char *const isa_names[] = {TD_CPU_OPS_BEST, "portable", "avx2", "avx512"};

static bool find_name(const char *const *names, size_t count, const char *text, size_t *out)
{
    for (size_t i = 0; i < count; i++) {
        if (strcmp(text, names[i]) == 0) {
            *out = i;
            return true;
        }
    }
    return false;
}

td_status_t td_precision_parse(const char *text, td_precision_t *out)
{
    size_t i = 0;
    if (!find_name(precision_names, TD_ARRAY_LEN(precision_names), text, &i)) {
        return TD_ERR_INVALID;
    }
    *out = (td_precision_t)i;
    return TD_OK;
}

td_status_t td_isa_parse(const char *text, td_isa_t *out)
{
    size_t i = 0;
    if (!find_name(isa_names, TD_ARRAY_LEN(isa_names), text, &i)) {
        return TD_ERR_INVALID;
    }
    *out = (td_isa_t)i;
    return TD_OK;
}

td_status_t td_backend_parse(const char *text, td_backend_t *out)
{
    size_t i = 0;
    if (!find_name(backend_names, TD_ARRAY_LEN(backend_names), text, &i)) {
        return TD_ERR_INVALID;
    }
    *out = (td_backend_t)i;
    return TD_OK;
}

td_status_t td_devices_parse(const char *text, td_devices_t *out)
{
    td_devices_t devices = {.count = 0};

    for (const char *at = text;; at++) {
        uint32_t device = 0;
        if (devices.count == TD_MODEL_DEVICES_MAX || *at < '0' || *at > '9') {
            return TD_ERR_INVALID;
        }
        for (; *at >= '0' && *at <= '9'; at++) {
            device = device * 10 + (uint32_t)(*at - '0');
            if (device > TD_MODEL_DEVICE_MAX) {
                return TD_ERR_INVALID;
            }
        }
        devices.ids[devices.count++] = device;
        if (*at == '\0') {
            break;
        }
        if (*at != ',') {
            return TD_ERR_INVALID;
        }
    }
    *out = devices;
    return TD_OK;
}

/* --- metadata ------------------------------------------------------------------------------- */

/* Reads a key; when an optional one is absent, *value keeps its default. */
static td_status_t meta_u32(const td_gguf_t *gguf, const char *key, bool optional, uint32_t min,
                            uint32_t max, uint32_t *value)
{
    uint32_t got = *value;
    td_status_t status = td_gguf_get_u32(gguf, key, &got);

    if (status == TD_ERR_NOT_FOUND && !optional) {
        TD_LOG_ERROR("model file lacks a key", "key=%s", key);
        return TD_ERR_INVALID;
    }
    if ((status != TD_OK && status != TD_ERR_NOT_FOUND) || got < min || got > max) {
        TD_LOG_ERROR("model value out of range", "key=%s value=%u min=%u max=%u status=%s", key,
                     got, min, max, td_status_name(status));
        return TD_ERR_INVALID;
    }
    *value = got;
    return TD_OK;
}

static td_status_t meta_f32(const td_gguf_t *gguf, const char *key, bool optional, float min,
                            float max, float *value)
{
    float got = *value;
    td_status_t status = td_gguf_get_f32(gguf, key, &got);

    if (status == TD_ERR_NOT_FOUND && !optional) {
        TD_LOG_ERROR("model file lacks a key", "key=%s", key);
        return TD_ERR_INVALID;
    }
    if ((status != TD_OK && status != TD_ERR_NOT_FOUND) || !(got >= min && got <= max)) {
        TD_LOG_ERROR("model value out of range", "key=%s value=%g min=%g max=%g status=%s", key,
                     (double)got, (double)min, (double)max, td_status_name(status));
        return TD_ERR_INVALID;
    }
    *value = got;
    return TD_OK;
}

static td_status_t check_architecture(const td_gguf_t *gguf)
{
    const char *text = NULL;
    size_t len = 0;

    if (td_gguf_get_str(gguf, "general.architecture", &text, &len) != TD_OK) {
        TD_LOG_ERROR("model file lacks a key", "key=general.architecture");
        return TD_ERR_INVALID;
    }
    if (len != 5 || memcmp(text, "llama", 5) != 0) {
        TD_LOG_ERROR("model architecture not supported", "architecture=%.*s supported=llama",
                     (int)TD_MIN(len, 64u), text);
        return TD_ERR_UNSUPPORTED;
    }
    if (td_gguf_get_str(gguf, "llama.rope.scaling.type", &text, &len) == TD_OK &&
        !(len == 4 && memcmp(text, "none", 4) == 0)) {
        TD_LOG_ERROR("rotary scaling not supported", "type=%.*s", (int)TD_MIN(len, 64u), text);
        return TD_ERR_UNSUPPORTED;
    }
    return TD_OK;
}

static void read_name(const td_gguf_t *gguf, char out[64])
{
    const char *text = NULL;
    size_t len = 0;

    if (td_gguf_get_str(gguf, "general.name", &text, &len) != TD_OK || len == 0) {
        text = "unnamed";
        len = strlen(text);
    }
    len = TD_MIN(len, (size_t)63);
    for (size_t i = 0; i < len; i++) {
        out[i] = text[i] >= 0x20 && text[i] < 0x7f ? text[i] : '?';
    }
    out[len] = '\0';
}

static td_status_t read_head_dim(td_model_t *m, const td_gguf_t *gguf)
{
    td_model_info_t *info = &m->info;
    uint32_t value_dim = 0;

    info->kv.head_dim = info->embed_dim / info->heads;
    TD_TRY(meta_u32(gguf, "llama.attention.key_length", true, 8, 1024, &info->kv.head_dim));
    value_dim = info->kv.head_dim;
    TD_TRY(meta_u32(gguf, "llama.attention.value_length", true, 8, 1024, &value_dim));
    m->rope_dim = info->kv.head_dim;
    TD_TRY(meta_u32(gguf, "llama.rope.dimension_count", true, 8, 1024, &m->rope_dim));
    if (info->kv.head_dim % 8 != 0 || value_dim != info->kv.head_dim || m->rope_dim % 8 != 0 ||
        m->rope_dim > info->kv.head_dim) {
        TD_LOG_ERROR("head size not supported",
                     "head_dim=%u value_dim=%u rope_dim=%u expected=\"multiples of 8, equal, rope "
                     "not larger\"",
                     info->kv.head_dim, value_dim, m->rope_dim);
        return TD_ERR_UNSUPPORTED;
    }
    return TD_OK;
}

/* The option, or the model's window for all layers. */
static td_status_t read_attention(td_model_t *m, const td_gguf_t *gguf)
{
    td_attention_mask_t *mask = &m->info.attention;
    uint32_t window = 0;
    const char *text = NULL;
    size_t len = 0;

    if (m->options.attention != NULL) {
        if (td_attention_mask_parse(m->options.attention, mask) != TD_OK) {
            TD_LOG_ERROR("attention not understood",
                         "got=\"%s\" expected=\"" TD_ATTENTION_FORMS "\" positions_max=%u",
                         m->options.attention, TD_ATTENTION_POSITIONS_MAX);
            return TD_ERR_INVALID;
        }
        return TD_OK;
    }
    TD_TRY(meta_u32(gguf, "llama.attention.sliding_window", true, 0, TD_ATTENTION_POSITIONS_MAX,
                    &window));
    if (window == 0) {
        return TD_OK; /* none */
    }
    if (td_gguf_get_str(gguf, "llama.attention.sliding_window_pattern", &text, &len) !=
        TD_ERR_NOT_FOUND) {
        TD_LOG_ERROR("window of some layers only not supported",
                     "key=llama.attention.sliding_window_pattern try=\"--attention\"");
        return TD_ERR_UNSUPPORTED;
    }
    *mask = (td_attention_mask_t){.kind = TD_ATTENTION_WINDOW, .local = window};
    return TD_OK;
}

static td_status_t read_hyper_parameters(td_model_t *m, const td_gguf_t *gguf)
{
    td_model_info_t *info = &m->info;
    td_kv_layout_t *kv = &info->kv;

    TD_TRY(meta_u32(gguf, "llama.block_count", false, 1, TD_KV_LAYERS_MAX, &kv->layers));
    TD_TRY(meta_u32(gguf, "llama.context_length", false, 1, CONTEXT_MAX, &info->context_max));
    TD_TRY(meta_u32(gguf, "llama.embedding_length", false, 8, EMBED_DIM_MAX, &info->embed_dim));
    TD_TRY(meta_u32(gguf, "llama.feed_forward_length", false, 8, FF_DIM_MAX, &info->ff_dim));
    TD_TRY(meta_u32(gguf, "llama.attention.head_count", false, 1, HEADS_MAX, &info->heads));
    kv->kv_heads = info->heads;
    TD_TRY(meta_u32(gguf, "llama.attention.head_count_kv", true, 1, info->heads, &kv->kv_heads));
    TD_TRY(meta_f32(gguf, "llama.attention.layer_norm_rms_epsilon", false, 1e-12f, 0.1f,
                    &m->norm_eps));
    if (info->embed_dim % 8 != 0 || info->ff_dim % 8 != 0 || info->heads % kv->kv_heads != 0) {
        TD_LOG_ERROR("model dimensions not supported",
                     "embed_dim=%u ff_dim=%u heads=%u kv_heads=%u expected=\"sizes multiples of 8, "
                     "heads a multiple of kv_heads\"",
                     info->embed_dim, info->ff_dim, info->heads, kv->kv_heads);
        return TD_ERR_UNSUPPORTED;
    }
    TD_TRY(read_head_dim(m, gguf));
    TD_TRY(read_attention(m, gguf));
    m->rope_positions = info->context_max;
    /* With full attention queries would look back further than the model was trained for. */
    if (m->options.context_max > info->context_max && info->attention.kind == TD_ATTENTION_FULL) {
        TD_LOG_ERROR(
            "context longer than the model's",
            "context_max=%u model=%u expected=\"full attention ends there; a longer context "
            "needs --attention window or strided\"",
            m->options.context_max, info->context_max);
        return TD_ERR_INVALID;
    }
    if (m->options.context_max > CONTEXT_MAX) {
        TD_LOG_ERROR("context too long", "context_max=%u max=%u", m->options.context_max,
                     CONTEXT_MAX);
        return TD_ERR_INVALID;
    }
    if (m->options.context_max != 0) {
        info->context_max = m->options.context_max;
    }
    kv->block_tokens = m->options.block_tokens;
    kv->codec = m->options.kv_codec;
    if (td_kv_layout_check(kv) != TD_OK) {
        TD_LOG_ERROR("kv layout out of range",
                     "layers=%u kv_heads=%u head_dim=%u block_tokens=%u codec=%d", kv->layers,
                     kv->kv_heads, kv->head_dim, kv->block_tokens, (int)kv->codec);
        return TD_ERR_INVALID;
    }
    m->q_dim = info->heads * kv->head_dim;
    m->kv_dim = kv->kv_heads * kv->head_dim;
    m->attn_scale = (float)(1.0 / sqrt((double)kv->head_dim));
    return TD_OK;
}

/* --- tensors -------------------------------------------------------------------------------- */

/* Finds a tensor of exactly this shape. Shape: [outputs][inputs]; outputs 1 for a vector. */
static td_status_t find_tensor(const td_gguf_t *gguf, const char *name, uint64_t inputs,
                               uint64_t outputs, const td_gguf_tensor_t **out)
{
    const td_gguf_tensor_t *t = td_gguf_tensor_find(gguf, name);

    if (t == NULL) {
        TD_LOG_ERROR("model file lacks a tensor", "tensor=%s", name);
        return TD_ERR_INVALID;
    }
    if (t->dims[0] != inputs || t->dims[1] != outputs || t->dims[2] != 1 || t->dims[3] != 1) {
        TD_LOG_ERROR("tensor has the wrong shape",
                     "tensor=%s shape=%llux%llux%llux%llu expected=%llux%llu", name,
                     (unsigned long long)t->dims[0], (unsigned long long)t->dims[1],
                     (unsigned long long)t->dims[2], (unsigned long long)t->dims[3],
                     (unsigned long long)inputs, (unsigned long long)outputs);
        return TD_ERR_INVALID;
    }
    *out = t;
    return TD_OK;
}

static td_status_t load_matrix(td_arena_t *arena, const td_gguf_t *gguf, const char *name,
                               uint32_t inputs, uint32_t outputs, bool int8, td_cpu_matrix_t *out)
{
    const td_gguf_tensor_t *tensor = NULL;

    TD_TRY(find_tensor(gguf, name, inputs, outputs, &tensor));
    return td_cpu_pack(tensor, int8, arena, out);
}

/* Norm weights, as floats. */
static td_status_t load_vector(const td_gguf_t *gguf, const char *name, uint32_t count, float **out)
{
    const td_gguf_tensor_t *t = NULL;
    float *values = NULL;

    TD_TRY(find_tensor(gguf, name, count, 1, &t));
    if (t->type != TD_GGUF_F32 && t->type != TD_GGUF_F16 && t->type != TD_GGUF_BF16) {
        TD_LOG_ERROR("vector type not supported", "tensor=%s type=%d", name, (int)t->type);
        return TD_ERR_UNSUPPORTED;
    }
    values = td_alloc(count * sizeof(*values));
    if (values == NULL) {
        TD_LOG_ERROR("no memory for a vector", "tensor=%s", name);
        return TD_ERR_NO_MEMORY;
    }
    for (size_t i = 0; i < count; i++) {
        if (t->type == TD_GGUF_F32) {
            memcpy(values + i, t->bytes + 4 * i, sizeof(*values));
        } else {
            uint16_t bits = td_cpu_load_u16(t->bytes + 2 * i);
            values[i] = t->type == TD_GGUF_F16 ? td_f32_from_f16(bits) : td_cpu_f32_from_bf16(bits);
        }
    }
    *out = values;
    return TD_OK;
}

static td_status_t load_layer(td_model_t *m, const td_gguf_t *gguf, td_arena_t *arena, uint32_t idx)
{
    td_model_layer_t *l = &m->layers[idx];
    const uint32_t dim = m->info.embed_dim;
    const uint32_t ff = m->info.ff_dim;
    const bool fast8 = m->options.precision == TD_PRECISION_FAST;
    const bool mixed8 = m->options.precision != TD_PRECISION_EXACT;
    const struct {
        const char *name;
        uint32_t inputs;
        uint32_t outputs;
        bool int8;
        td_cpu_matrix_t *out;
    } matrices[] = {
        {"attn_q", dim, m->q_dim, fast8, &l->q},  {"attn_k", dim, m->kv_dim, fast8, &l->k},
        {"attn_v", dim, m->kv_dim, fast8, &l->v}, {"attn_output", m->q_dim, dim, fast8, &l->o},
        {"ffn_gate", dim, ff, mixed8, &l->gate},  {"ffn_up", dim, ff, mixed8, &l->up},
        {"ffn_down", ff, dim, fast8, &l->down},
    };
    char name[TENSOR_NAME_BYTES];

    for (size_t i = 0; i < TD_ARRAY_LEN(matrices); i++) {
        (void)snprintf(name, sizeof(name), "blk.%u.%s.weight", idx, matrices[i].name);
        TD_TRY(load_matrix(arena, gguf, name, matrices[i].inputs, matrices[i].outputs,
                           matrices[i].int8, matrices[i].out));
    }
    (void)snprintf(name, sizeof(name), "blk.%u.attn_norm.weight", idx);
    TD_TRY(load_vector(gguf, name, dim, &l->attn_norm));
    (void)snprintf(name, sizeof(name), "blk.%u.ffn_norm.weight", idx);
    return load_vector(gguf, name, dim, &l->ffn_norm);
}

static td_status_t load_embedding_and_head(td_model_t *m, const td_gguf_t *gguf)
{
    const td_gguf_tensor_t *embed = td_gguf_tensor_find(gguf, "token_embd.weight");
    const bool int8 = m->options.precision == TD_PRECISION_FAST;

    if (embed == NULL || embed->dims[1] == 0 || embed->dims[1] > VOCAB_MAX) {
        TD_LOG_ERROR("token embedding missing or too large", "tensor=token_embd.weight max=%u",
                     VOCAB_MAX);
        return TD_ERR_INVALID;
    }
    m->info.vocab_size = (uint32_t)embed->dims[1];
    TD_TRY(load_matrix(m->weights, gguf, "token_embd.weight", m->info.embed_dim, m->info.vocab_size,
                       int8, &m->embed));
    m->head = &m->embed;
    if (td_gguf_tensor_find(gguf, "output.weight") != NULL) {
        TD_TRY(load_matrix(m->weights, gguf, "output.weight", m->info.embed_dim, m->info.vocab_size,
                           int8, &m->head_own));
        m->head = &m->head_own;
    }
    return load_vector(gguf, "output_norm.weight", m->info.embed_dim, &m->output_norm);
}

/* A tensor nobody asked for (a bias, an expert) would be a silent change of the model. */
static td_status_t check_nothing_left(const td_model_t *m, const td_gguf_t *gguf)
{
    static const char *const per_layer[] = {"attn_q",      "attn_k",    "attn_v",
                                            "attn_output", "ffn_gate",  "ffn_up",
                                            "ffn_down",    "attn_norm", "ffn_norm"};
    static const char *const once[] = {"token_embd.weight", "output.weight", "output_norm.weight",
                                       "rope_freqs.weight"};
    char known[TENSOR_NAME_BYTES];

    for (uint32_t i = 0; i < td_gguf_tensor_count(gguf); i++) {
        const char *name = td_gguf_tensor_at(gguf, i)->name;
        unsigned layer = 0;
        bool found = false;
        for (size_t j = 0; j < TD_ARRAY_LEN(once); j++) {
            found = found || strcmp(name, once[j]) == 0;
        }
        if (sscanf(name, "blk.%9u.", &layer) == 1 && layer < m->info.kv.layers) {
            for (size_t j = 0; j < TD_ARRAY_LEN(per_layer); j++) {
                (void)snprintf(known, sizeof(known), "blk.%u.%s.weight", layer, per_layer[j]);
                found = found || strcmp(name, known) == 0;
            }
        }
        if (!found) {
            TD_LOG_ERROR("tensor not supported", "tensor=%s", name);
            return TD_ERR_UNSUPPORTED;
        }
    }
    return TD_OK;
}

void td_model_rope_row(const td_model_t *m, uint32_t position, float *out)
{
    for (uint32_t i = 0; i < m->rope_dim / 2; i++) {
        const double angle = (double)position * m->rope_steps[i];
        out[2 * (size_t)i] = (float)cos(angle);
        out[2 * (size_t)i + 1] = (float)sin(angle);
    }
}

static td_status_t make_rope(td_model_t *m, const td_gguf_t *gguf)
{
    const uint32_t pairs = m->rope_dim / 2;
    float base = 10000.0f;
    float *factors = NULL; /* optional divisors of the frequencies */
    size_t bytes = 0;

    TD_TRY(meta_f32(gguf, "llama.rope.freq_base", true, 1.0f, 1e12f, &base));
    m->rope_positions = TD_MIN(m->rope_positions, m->info.context_max);
    if (!td_size_mul((size_t)m->rope_positions * m->rope_dim, sizeof(float), &bytes)) {
        return TD_ERR_INVALID;
    }
    if (td_gguf_tensor_find(gguf, "rope_freqs.weight") != NULL) {
        TD_TRY(load_vector(gguf, "rope_freqs.weight", pairs, &factors));
    }
    m->rope = td_alloc_aligned(TD_CACHE_LINE_BYTES, bytes);
    m->rope_steps = td_calloc(pairs, sizeof(*m->rope_steps));
    if (m->rope == NULL || m->rope_steps == NULL) {
        TD_LOG_ERROR("no memory for rotary tables", "bytes=%zu", bytes);
        td_free(factors);
        return TD_ERR_NO_MEMORY;
    }
    for (uint32_t i = 0; i < pairs; i++) {
        m->rope_steps[i] = pow((double)base, -2.0 * i / m->rope_dim);
        if (factors != NULL) {
            m->rope_steps[i] /= (double)factors[i];
        }
    }
    td_free(factors);
    for (uint32_t p = 0; p < m->rope_positions; p++) {
        td_model_rope_row(m, p, m->rope + (size_t)p * m->rope_dim);
    }
    return TD_OK;
}

/* --- buffers -------------------------------------------------------------------------------- */

/* Shape: [rows][width] of elem_bytes, zeroed: the memory is touched now, not during a pass. */
static td_status_t take(uint32_t rows, size_t width, size_t elem_bytes, void *out)
{
    size_t bytes = 0;
    void *ptr = NULL;

    if (!td_size_mul(width, elem_bytes, &bytes) || !td_size_mul(bytes, rows, &bytes)) {
        TD_LOG_ERROR("pass buffers too large", "rows=%u width=%zu", rows, width);
        return TD_ERR_INVALID;
    }
    ptr = td_alloc_aligned(TD_CACHE_LINE_BYTES, bytes);
    if (ptr == NULL) {
        TD_LOG_ERROR("no memory for pass buffers", "rows=%u width=%zu bytes=%zu", rows, width,
                     bytes);
        return TD_ERR_NO_MEMORY;
    }
    memset(ptr, 0, bytes);
    memcpy(out, &ptr, sizeof(ptr)); /* out is the address of a pointer of any type */
    return TD_OK;
}

static td_status_t take_acts(uint32_t rows, size_t widest, td_cpu_acts_t *out)
{
    const size_t groups = (widest + TD_CPU_GROUP - 1) / TD_CPU_GROUP;

    TD_TRY(take(rows, widest, sizeof(int8_t), &out->q8));
    TD_TRY(take(rows, widest, sizeof(int16_t), &out->q16));
    TD_TRY(take(rows, groups, sizeof(float), &out->scale8));
    TD_TRY(take(rows, groups, sizeof(float), &out->sum8));
    TD_TRY(take(rows, groups, sizeof(float), &out->scale16));
    return take(rows, groups, sizeof(float), &out->sum16);
}

static void acts_fini(td_cpu_acts_t *acts)
{
    td_free(acts->q8);
    td_free(acts->q16);
    td_free(acts->scale8);
    td_free(acts->sum8);
    td_free(acts->scale16);
    td_free(acts->sum16);
}

static td_status_t take_own(uint32_t dim, td_model_own_t *out)
{
    TD_TRY(take(1, dim, sizeof(float), &out->x));
    TD_TRY(take(1, dim, sizeof(float), &out->normed));
    return take_acts(1, dim, &out->acts);
}

/* Where a device runs the passes: what they hand out. */
static td_status_t take_device_buffers(td_model_t *m)
{
    const uint32_t logit_rows = TD_MAX(m->options.logit_rows_max, 1u);

    TD_TRY(take(m->options.rows_max, m->info.embed_dim, sizeof(float), &m->normed));
    TD_TRY(take(logit_rows, 1, sizeof(*m->logit_rows), &m->logit_rows));
    return take(logit_rows, m->info.vocab_size, sizeof(float), &m->logits);
}

static td_status_t take_buffers(td_model_t *m)
{
    const td_model_info_t *info = &m->info;
    const uint32_t rows = m->options.rows_max;
    const size_t widest = TD_MAX(TD_MAX(info->embed_dim, info->ff_dim), m->q_dim);
    const size_t f = sizeof(float);

    if (info->context_max > m->rope_positions) {
        TD_TRY(take(rows, m->rope_dim, f, &m->rope_far));
    }
    TD_TRY(take(rows, info->embed_dim, f, &m->x));
    TD_TRY(take(rows, info->embed_dim, f, &m->normed));
    TD_TRY(take(rows, info->embed_dim, f, &m->y));
    TD_TRY(take(rows, m->q_dim, f, &m->q));
    TD_TRY(take(rows, m->kv_dim, f, &m->k));
    TD_TRY(take(rows, m->kv_dim, f, &m->v));
    TD_TRY(take(rows, m->q_dim, f, &m->attn));
    TD_TRY(take(rows, info->ff_dim, f, &m->gate));
    TD_TRY(take(rows, info->ff_dim, f, &m->up));
    TD_TRY(take_acts(rows, widest, &m->acts));
    TD_TRY(take_acts(rows, info->ff_dim, &m->acts_ff));
    TD_TRY(take(rows, 1, sizeof(*m->segments), &m->segments));
    TD_TRY(take(rows, 1, sizeof(*m->segment_of), &m->segment_of));
    TD_TRY(take(rows + TD_MODEL_PARTS_MAX, 1, sizeof(*m->items), &m->items));
    TD_TRY(take(TD_MODEL_PARTS_MAX, info->heads * td_cpu_part_stride(info->kv.head_dim), f,
                &m->parts));
    TD_TRY(take(m->options.logit_rows_max, 1, sizeof(*m->logit_rows), &m->logit_rows));
    TD_TRY(take(m->options.logit_rows_max, info->vocab_size, f, &m->logits));
    TD_TRY(take(m->options.threads, 1, sizeof(td_cpu_scratch_t *), &m->scratch));
    TD_TRY(take(m->options.threads, 1, sizeof(*m->own), &m->own));
    for (uint32_t t = 0; t < m->options.threads; t++) {
        TD_TRY(td_cpu_scratch_create(info->kv.head_dim, info->heads / info->kv.kv_heads,
                                     (uint32_t)widest, &m->scratch[t]));
        if (t > 0) { /* thread 0 has x, normed and acts */
            TD_TRY(take_own(info->embed_dim, &m->own[t]));
        }
    }
    return td_deal_create(m->options.threads, &m->deal);
}

/* --- load and destroy ----------------------------------------------------------------------- */

static td_status_t choose_isa(td_isa_t isa, const td_cpu_ops_t **out)
{
    const td_cpu_ops_t *ops = td_cpu_ops_find(isa_names[isa]);
    if (ops == NULL) {
        TD_LOG_ERROR("instruction set not available", "isa=%s", isa_names[isa]);
        return TD_ERR_INVALID;
    }
    *out = ops;
    return TD_OK;
}

static td_status_t check_backend(const td_model_options_t *o)
{
    if ((unsigned)o->backend > TD_BACKEND_CUDA) {
        TD_LOG_ERROR("model options out of range", "backend=%d", (int)o->backend);
        return TD_ERR_INVALID;
    }
    if (o->backend == TD_BACKEND_CUDA && &td_cuda_device_ops == NULL) {
        TD_LOG_ERROR("backend not in this program", "backend=cuda expected=\"built with nvcc\"");
        return TD_ERR_UNSUPPORTED;
    }
    return TD_OK;
}

static td_status_t check_options(const td_model_options_t *o)
{
    TD_TRY(check_backend(o));
    if (o->devices.count > TD_MODEL_DEVICES_MAX) {
        TD_LOG_ERROR("model options out of range", "devices=%u devices_max=%u", o->devices.count,
                     TD_MODEL_DEVICES_MAX);
        return TD_ERR_INVALID;
    }
    if ((unsigned)o->precision > TD_PRECISION_EXACT || (unsigned)o->isa > TD_ISA_AVX512 ||
        o->threads == 0 || o->threads > TD_THREADS_MAX || o->rows_max == 0 ||
        o->rows_max > TD_MODEL_ROWS_MAX || o->logit_rows_max > o->rows_max) {
        TD_LOG_ERROR("model options out of range",
                     "precision=%d isa=%d threads=%u rows_max=%u logit_rows_max=%u",
                     (int)o->precision, (int)o->isa, o->threads, o->rows_max, o->logit_rows_max);
        return TD_ERR_INVALID;
    }
    return TD_OK;
}

/* A device takes copies; what it was packed from goes again, a layer at a time. */
static td_status_t load_device_layer(td_model_t *m, const td_gguf_t *gguf, uint32_t idx)
{
    td_arena_t *arena = td_arena_create();
    td_status_t status = TD_ERR_NO_MEMORY;

    if (arena == NULL) {
        TD_LOG_ERROR("no memory for a layer", "layer=%u", idx);
        return status;
    }
    status = load_layer(m, gguf, arena, idx);
    if (status == TD_OK) {
        status = td_cuda_device_ops.load(m->device, m, idx);
    }
    td_arena_destroy(arena);
    return status;
}

static td_status_t load_layers(td_model_t *m, const td_gguf_t *gguf)
{
    uint64_t said_ns = td_now_ns();

    m->layers = td_calloc(m->info.kv.layers, sizeof(*m->layers));
    if (m->layers == NULL) {
        TD_LOG_ERROR("no memory for layers", "layers=%u", m->info.kv.layers);
        return TD_ERR_NO_MEMORY;
    }
    for (uint32_t i = 0; i < m->info.kv.layers; i++) {
        TD_TRY(m->device != NULL ? load_device_layer(m, gguf, i)
                                 : load_layer(m, gguf, m->weights, i));
        if (td_now_ns() - said_ns > PROGRESS_NS) {
            said_ns = td_now_ns();
            TD_LOG_INFO("loading model", "layer=%u layers=%u", i + 1, m->info.kv.layers);
        }
    }
    return TD_OK;
}

/* A full mask has no name there: what is stored under full attention stays what it was. */
static void name_numerics(td_model_info_t *info, td_precision_t precision)
{
    char mask[TD_ATTENTION_TEXT_MAX];
    const bool full = info->attention.kind == TD_ATTENTION_FULL;

    td_attention_mask_name(&info->attention, mask);
    (void)snprintf(info->numerics_class, sizeof(info->numerics_class), "cpu/%s/%s%s%s",
                   precision_names[precision], KERNEL_REVISION, full ? "" : "/", full ? "" : mask);
}

static td_status_t load_all(td_model_t *m, const td_gguf_t *gguf)
{
    TD_TRY(check_options(&m->options));
    m->limit16 = m->options.precision == TD_PRECISION_FAST ? TD_CPU_INT8_MAX : TD_CPU_INT16_MAX;
    TD_TRY(choose_isa(m->options.isa, &m->ops));
    TD_TRY(check_architecture(gguf));
    TD_TRY(read_hyper_parameters(m, gguf));
    TD_TRY(check_nothing_left(m, gguf));
    m->weights = td_arena_create();
    if (m->weights == NULL) {
        TD_LOG_ERROR("no memory for weights", "layers=%u", m->info.kv.layers);
        return TD_ERR_NO_MEMORY;
    }
    TD_TRY(load_embedding_and_head(m, gguf));
    if (m->options.backend == TD_BACKEND_CUDA) {
        TD_TRY(td_cuda_device_ops.create(m, &m->device));
        TD_TRY(td_cuda_device_ops.load(m->device, m, TD_KV_LAYERS_MAX));
    }
    TD_TRY(load_layers(m, gguf));
    TD_TRY(make_rope(m, gguf));
    TD_TRY(m->device != NULL ? take_device_buffers(m) : take_buffers(m));
    if (m->device != NULL) {
        TD_TRY(td_cuda_device_ops.start(m->device, m));
    }
    m->heads_are_groups =
        m->info.heads / m->info.kv.kv_heads * m->info.kv.head_dim % TD_CPU_GROUP == 0;
    TD_TRY(td_threads_create(m->options.threads, &m->threads));
    read_name(gguf, m->info.name);
    td_gguf_fingerprint(gguf, m->info.fingerprint);
    name_numerics(&m->info, m->options.precision);
    return TD_OK;
}

td_status_t td_model_load(const td_gguf_t *gguf, const td_model_options_t *options,
                          td_model_t **out)
{
    uint64_t begin_ns = td_now_ns();
    td_status_t status = TD_OK;
    td_model_t *m = NULL;

    TD_ASSERT(gguf != NULL && options != NULL && out != NULL);
    m = td_calloc(1, sizeof(*m));
    if (m == NULL) {
        TD_LOG_ERROR("no memory for a model", "bytes=%zu", sizeof(*m));
        return TD_ERR_NO_MEMORY;
    }
    m->options = *options;
    status = load_all(m, gguf);
    if (status != TD_OK) {
        td_model_destroy(m);
        return status;
    }
    TD_LOG_INFO("model loaded",
                "name=\"%s\" numerics=%s backend=%s isa=%s threads=%u layers=%u vocab=%u "
                "context=%u ms=%llu",
                m->info.name, m->info.numerics_class, backend_names[m->options.backend],
                m->ops->name, m->options.threads, m->info.kv.layers, m->info.vocab_size,
                m->info.context_max, (unsigned long long)((td_now_ns() - begin_ns) / TD_NS_PER_MS));
    *out = m;
    return TD_OK;
}

static void layer_fini(td_model_layer_t *l)
{
    td_free(l->attn_norm);
    td_free(l->ffn_norm);
}

void td_model_destroy(td_model_t *m)
{
    if (m == NULL) {
        return;
    }
    td_threads_destroy(m->threads);
    if (m->device != NULL) {
        td_cuda_device_ops.destroy(m->device);
    }
    for (uint32_t i = 0; m->layers != NULL && i < m->info.kv.layers; i++) {
        layer_fini(&m->layers[i]);
    }
    td_free(m->layers);
    td_deal_destroy(m->deal);
    for (uint32_t t = 0; m->scratch != NULL && t < m->options.threads; t++) {
        td_free(m->scratch[t]);
    }
    for (uint32_t t = 0; m->own != NULL && t < m->options.threads; t++) {
        td_free(m->own[t].x);
        td_free(m->own[t].normed);
        acts_fini(&m->own[t].acts);
    }
    void *const owned[] = {
        m->output_norm, m->rope,  m->x,     m->normed,     m->y,          m->q,        m->k,
        m->v,           m->attn,  m->gate,  m->up,         m->logits,     m->scratch,  m->segments,
        m->segment_of,  m->items, m->parts, m->logit_rows, m->rope_steps, m->rope_far, m->own};
    for (size_t i = 0; i < TD_ARRAY_LEN(owned); i++) {
        td_free(owned[i]);
    }
    acts_fini(&m->acts);
    acts_fini(&m->acts_ff);
    td_arena_destroy(m->weights);
    td_free(m);
}

const td_model_info_t *td_model_info(const td_model_t *model)
{
    return &model->info;
}

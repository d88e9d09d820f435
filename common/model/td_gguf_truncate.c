#include "common/model/td_gguf_truncate.h"

#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_log.h"

#define ARCHITECTURE_CHARS_MAX 64

/* What is written, and whether all of it was. */
typedef struct writer {
    FILE *out;
    uint64_t pos;
    bool failed;
} writer_t;

static void put(writer_t *w, const void *bytes, size_t len)
{
    w->failed = w->failed || fwrite(bytes, 1, len, w->out) != len;
    w->pos += len;
}

/* Little-endian, as everything in the file. */
static void put_number(writer_t *w, uint64_t value, size_t width)
{
    uint8_t bytes[8];

    for (size_t i = 0; i < width; i++) {
        bytes[i] = (uint8_t)(value >> (8 * i));
    }
    put(w, bytes, width);
}

static uint64_t aligned(uint64_t pos, uint32_t alignment)
{
    return (pos + alignment - 1) / alignment * alignment;
}

static void pad(writer_t *w, uint32_t alignment)
{
    while (!w->failed && w->pos % alignment != 0) {
        put_number(w, 0, 1);
    }
}

static bool is_kept(const td_gguf_tensor_t *tensor, uint32_t layers)
{
    unsigned layer = 0;

    return sscanf(tensor->name, "blk.%9u.", &layer) != 1 || layer < layers;
}

static void put_keys(writer_t *w, const td_gguf_raw_t *raw, const uint8_t *block_count,
                     size_t block_count_bytes, uint32_t layers)
{
    const size_t before = (size_t)(block_count - raw->keys);
    const uint8_t *behind = block_count + block_count_bytes;

    put(w, raw->keys, before);
    put_number(w, layers, block_count_bytes);
    put(w, behind, raw->keys_len - before - block_count_bytes);
}

static void put_tensors(writer_t *w, const td_gguf_t *gguf, uint32_t layers, uint32_t alignment)
{
    const uint32_t count = td_gguf_tensor_count(gguf);
    uint64_t offset = 0;

    for (uint32_t i = 0; i < count; i++) {
        const td_gguf_tensor_t *t = td_gguf_tensor_at(gguf, i);
        if (!is_kept(t, layers)) {
            continue;
        }
        put_number(w, strlen(t->name), 8);
        put(w, t->name, strlen(t->name));
        put_number(w, t->dim_count, 4);
        for (uint32_t dim = 0; dim < t->dim_count; dim++) {
            put_number(w, t->dims[dim], 8);
        }
        put_number(w, t->type, 4);
        put_number(w, offset, 8);
        offset = aligned(offset + t->byte_count, alignment);
    }
    pad(w, alignment);
    for (uint32_t i = 0; i < count; i++) {
        const td_gguf_tensor_t *t = td_gguf_tensor_at(gguf, i);
        if (is_kept(t, layers)) {
            put(w, t->bytes, t->byte_count);
            pad(w, alignment);
        }
    }
}

/* Finds the number of layers, and checks the new one. */
static td_status_t find_block_count(const td_gguf_t *gguf, uint32_t layers, const uint8_t **at_out,
                                    size_t *len_out)
{
    char key[ARCHITECTURE_CHARS_MAX + 16];
    const char *architecture = "";
    size_t len = 0;
    uint32_t all = 0;

    if (td_gguf_get_str(gguf, "general.architecture", &architecture, &len) != TD_OK ||
        len > ARCHITECTURE_CHARS_MAX) {
        TD_LOG_ERROR("model file lacks a key", "key=general.architecture");
        return TD_ERR_INVALID;
    }
    (void)snprintf(key, sizeof(key), "%.*s.block_count", (int)len, architecture);
    if (td_gguf_get_u32(gguf, key, &all) != TD_OK ||
        td_gguf_raw_number(gguf, key, at_out, len_out) != TD_OK) {
        TD_LOG_ERROR("model file lacks a key", "key=%s", key);
        return TD_ERR_INVALID;
    }
    if (layers == 0 || layers > all || *len_out < 4) {
        TD_LOG_ERROR("number of layers out of range", "layers=%u expected=\"1 to %u\"", layers,
                     all);
        return TD_ERR_INVALID;
    }
    return TD_OK;
}

td_status_t td_gguf_truncate(const td_gguf_t *gguf, uint32_t layers, FILE *out)
{
    writer_t w = {.out = out};
    td_gguf_raw_t raw;
    const uint8_t *block_count = NULL;
    size_t block_count_bytes = 0;
    uint32_t kept = 0;

    TD_TRY(find_block_count(gguf, layers, &block_count, &block_count_bytes));
    td_gguf_raw(gguf, &raw);
    for (uint32_t i = 0; i < td_gguf_tensor_count(gguf); i++) {
        kept += is_kept(td_gguf_tensor_at(gguf, i), layers);
    }
    put(&w, "GGUF", 4);
    put_number(&w, raw.version, 4);
    put_number(&w, kept, 8);
    put_number(&w, raw.key_count, 8);
    put_keys(&w, &raw, block_count, block_count_bytes, layers);
    put_tensors(&w, gguf, layers, raw.alignment);
    if (w.failed || fflush(out) != 0) {
        TD_LOG_ERROR("model file not written", "bytes=%llu", (unsigned long long)w.pos);
        return TD_ERR_IO;
    }
    return TD_OK;
}

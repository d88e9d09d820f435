#include "common/model/td_gguf.h"

#include <fcntl.h>
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <sodium.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/base/td_base.h"
#include "common/base/td_buf.h"
#include "common/base/td_log.h"
#include "common/model/td_gguf_names_internal.h"

#define GGUF_MAGIC 0x46554747u /* "GGUF" */
#define GGUF_VERSION_MIN 2u
#define GGUF_VERSION_MAX 3u
#define GGUF_ALIGNMENT_DEFAULT 32u
#define GGUF_KEY_BYTES_MAX 65535u
#define GGUF_TENSOR_NAME_BYTES_MAX 64u
#define GGUF_ARRAY_DEPTH_MAX 4u
/* The fewest bytes of a key (length, one byte, type, value), a tensor, a string and an array: a
 * count that could not fit in the rest of the file is refused before memory is taken for it. */
#define GGUF_KEY_BYTES_MIN (8u + 1u + 4u + 1u)
#define GGUF_TENSOR_BYTES_MIN (8u + 1u + 4u + 8u + 4u + 8u)
#define GGUF_STRING_BYTES_MIN 8u
#define GGUF_ARRAY_BYTES_MIN 12u

/* Metadata value types, the file's numbers. */
enum value_type {
    VALUE_U8 = 0,
    VALUE_I8,
    VALUE_U16,
    VALUE_I16,
    VALUE_U32,
    VALUE_I32,
    VALUE_F32,
    VALUE_BOOL,
    VALUE_STRING,
    VALUE_ARRAY,
    VALUE_U64,
    VALUE_I64,
    VALUE_F64,
    VALUE_TYPE_COUNT
};

/* 0: of variable length */
static const uint8_t value_bytes[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
_Static_assert(TD_ARRAY_LEN(value_bytes) == VALUE_TYPE_COUNT, "one width for each type");

typedef struct tensor_type {
    uint32_t type;          /* td_gguf_type_t */
    uint32_t block_entries; /* elements of one block; a row is whole blocks */
    uint32_t block_bytes;
} tensor_type_t;

static const tensor_type_t tensor_types[] = {
    {TD_GGUF_F32, 1, 4},    {TD_GGUF_F16, 1, 2},    {TD_GGUF_BF16, 1, 2},
    {TD_GGUF_Q4_0, 32, 18}, {TD_GGUF_Q4_1, 32, 20}, {TD_GGUF_Q8_0, 32, 34},
};

typedef struct gguf_kv {
    const uint8_t *key; /* borrowed from the file, not NUL-terminated */
    uint32_t key_len;
    uint32_t type;      /* enum value_type */
    uint32_t elem_type; /* of an array */
    uint64_t count;     /* elements of an array */
    size_t value_pos;   /* of the value, or of an array's first element */
    size_t *str_pos;    /* owned; [count] positions of an array's strings, else NULL */
} gguf_kv_t;

struct td_gguf {
    const uint8_t *bytes; /* borrowed, or the mapping */
    size_t len;
    bool mapped;       /* bytes is ours to unmap */
    const char *label; /* for log lines while opening */
    gguf_kv_t *kvs;    /* owned; [kv_count] */
    uint32_t kv_count;
    td_gguf_names_t kv_names;
    td_gguf_tensor_t *tensors; /* owned; [tensor_count] */
    uint32_t tensor_count;
    char *tensor_name_bytes; /* owned; the tensors' names */
    td_gguf_names_t tensor_names;
    uint32_t alignment; /* bytes */
    uint32_t version;
    size_t keys_pos; /* of the first key, */
    size_t keys_end; /* and behind the last one's value */
};

/* What is being read, for log lines. */
typedef struct reader {
    td_buf_t buf;
    const char *label;
    const uint8_t *name; /* of the key or tensor; NULL in the header */
    size_t name_len;
} reader_t;

static void printable(const uint8_t *name, size_t name_len, char out[static 80])
{
    size_t n = TD_MIN(name_len, 79u);

    for (size_t i = 0; i < n; i++) {
        out[i] = name[i] > ' ' && name[i] < 0x7f && name[i] != '"' ? (char)name[i] : '?';
    }
    out[n] = '\0';
}

static td_status_t refuse(const reader_t *rd, td_status_t status, const char *field, uint64_t got,
                          const char *expected, ...) __attribute__((format(printf, 5, 6)));
static td_status_t refuse(const reader_t *rd, td_status_t status, const char *field, uint64_t got,
                          const char *expected, ...)
{
    char text[160];
    char name[80] = "-";
    va_list args;

    va_start(args, expected);
    (void)vsnprintf(text, sizeof(text), expected, args);
    va_end(args);
    if (rd->name != NULL) {
        printable(rd->name, rd->name_len, name);
    }
    TD_LOG_ERROR("model file refused",
                 "file=%s status=%s field=\"%s\" of=%s got=%" PRIu64
                 " expected=\"%s\" near_byte=%zu",
                 rd->label, td_status_name(status), field, name, got, text, rd->buf.pos);
    return status;
}

static td_status_t refuse_short(const reader_t *rd, const char *field, uint64_t need)
{
    return refuse(rd, TD_ERR_INVALID, field, td_buf_left(&rd->buf),
                  "at least %" PRIu64 " bytes left in the file", need);
}

static td_status_t read_u32(reader_t *rd, const char *field, uint32_t *out)
{
    return td_buf_get_u32(&rd->buf, out) ? TD_OK : refuse_short(rd, field, 4);
}

static td_status_t read_u64(reader_t *rd, const char *field, uint64_t *out)
{
    return td_buf_get_u64(&rd->buf, out) ? TD_OK : refuse_short(rd, field, 8);
}

static td_status_t read_str(reader_t *rd, const char *field, const uint8_t **out, size_t *len_out)
{
    uint64_t len = 0;

    TD_TRY(read_u64(rd, field, &len));
    if (len > td_buf_left(&rd->buf) || !td_buf_get_bytes(&rd->buf, (size_t)len, out)) {
        return refuse_short(rd, field, len);
    }
    *len_out = (size_t)len;
    return TD_OK;
}

/* Names must be usable as C strings. */
static td_status_t read_name(reader_t *rd, const char *field, uint32_t bytes_max,
                             const uint8_t **out, uint32_t *len_out)
{
    size_t len = 0;

    TD_TRY(read_str(rd, field, out, &len));
    if (len == 0 || len > bytes_max) {
        return refuse(rd, TD_ERR_INVALID, field, len, "a length of 1 to %u bytes", bytes_max);
    }
    rd->name = *out;
    rd->name_len = len;
    if (memchr(*out, 0, len) != NULL) {
        return refuse(rd, TD_ERR_INVALID, field, 0, "no zero byte in it");
    }
    *len_out = (uint32_t)len;
    return TD_OK;
}

static td_status_t skip_fixed(reader_t *rd, uint32_t type, uint64_t count)
{
    const uint8_t *at = NULL;
    size_t need = 0;

    if (!td_size_mul((size_t)count, value_bytes[type], &need) ||
        !td_buf_get_bytes(&rd->buf, need, &at)) {
        return refuse_short(rd, "value", need == 0 ? UINT64_MAX : need);
    }
    for (size_t i = 0; type == VALUE_BOOL && i < need; i++) {
        if (at[i] > 1) {
            return refuse(rd, TD_ERR_INVALID, "bool value", at[i], "0 or 1");
        }
    }
    return TD_OK;
}

static td_status_t skip_strings(reader_t *rd, uint64_t count, size_t *str_pos)
{
    for (uint64_t i = 0; i < count; i++) {
        const uint8_t *at = NULL;
        size_t len = 0;
        if (str_pos != NULL) {
            str_pos[i] = rd->buf.pos;
        }
        TD_TRY(read_str(rd, "string in array", &at, &len));
    }
    return TD_OK;
}

typedef struct array_level {
    uint32_t elem_type;
    uint64_t left; /* elements still to skip */
} array_level_t;

static td_status_t read_array_head(reader_t *rd, array_level_t *out)
{
    size_t elem_bytes = 0;

    TD_TRY(read_u32(rd, "array element type", &out->elem_type));
    TD_TRY(read_u64(rd, "array length", &out->left));
    if (out->elem_type >= VALUE_TYPE_COUNT) {
        return refuse(rd, TD_ERR_INVALID, "array element type", out->elem_type, "0 to %d",
                      VALUE_TYPE_COUNT - 1);
    }
    elem_bytes = out->elem_type == VALUE_STRING  ? GGUF_STRING_BYTES_MIN
                 : out->elem_type == VALUE_ARRAY ? GGUF_ARRAY_BYTES_MIN
                                                 : value_bytes[out->elem_type];
    if (out->left > td_buf_left(&rd->buf) / elem_bytes) {
        return refuse(rd, TD_ERR_INVALID, "array length", out->left,
                      "at most %zu elements in the rest of the file",
                      td_buf_left(&rd->buf) / elem_bytes);
    }
    return TD_OK;
}

/* Nested arrays are checked and skipped; only the strings of an outermost array are indexed. */
static td_status_t read_array(reader_t *rd, gguf_kv_t *kv)
{
    array_level_t levels[GGUF_ARRAY_DEPTH_MAX];
    uint32_t depth = 1;

    TD_TRY(read_array_head(rd, &levels[0]));
    kv->elem_type = levels[0].elem_type;
    kv->count = levels[0].left;
    kv->value_pos = rd->buf.pos;
    if (kv->elem_type == VALUE_STRING) {
        kv->str_pos = td_calloc((size_t)kv->count, sizeof(*kv->str_pos));
        if (kv->str_pos == NULL) {
            return refuse(rd, TD_ERR_NO_MEMORY, "array length", kv->count, "memory for its index");
        }
    }
    while (depth > 0) {
        array_level_t *level = &levels[depth - 1];
        if (level->elem_type == VALUE_STRING) {
            TD_TRY(skip_strings(rd, level->left, depth == 1 ? kv->str_pos : NULL));
            depth--;
        } else if (level->elem_type != VALUE_ARRAY) {
            TD_TRY(skip_fixed(rd, level->elem_type, level->left));
            depth--;
        } else if (level->left == 0) {
            depth--;
        } else if (depth == GGUF_ARRAY_DEPTH_MAX) {
            return refuse(rd, TD_ERR_INVALID, "array depth", depth + 1, "at most %u",
                          GGUF_ARRAY_DEPTH_MAX);
        } else {
            level->left--;
            TD_TRY(read_array_head(rd, &levels[depth]));
            depth++;
        }
    }
    return TD_OK;
}

static td_status_t read_kv(reader_t *rd, gguf_kv_t *kv)
{
    const uint8_t *at = NULL;
    size_t len = 0;

    TD_TRY(read_name(rd, "key", GGUF_KEY_BYTES_MAX, &kv->key, &kv->key_len));
    TD_TRY(read_u32(rd, "value type", &kv->type));
    if (kv->type >= VALUE_TYPE_COUNT) {
        return refuse(rd, TD_ERR_INVALID, "value type", kv->type, "0 to %d", VALUE_TYPE_COUNT - 1);
    }
    kv->value_pos = rd->buf.pos;
    if (kv->type == VALUE_ARRAY) {
        return read_array(rd, kv);
    }
    if (kv->type == VALUE_STRING) {
        return read_str(rd, "string value", &at, &len);
    }
    return skip_fixed(rd, kv->type, 1);
}

static td_status_t read_kvs(reader_t *rd, td_gguf_t *gguf, uint32_t count)
{
    gguf->kvs = td_calloc(count, sizeof(*gguf->kvs));
    if (gguf->kvs == NULL || td_gguf_names_init(&gguf->kv_names, count) != TD_OK) {
        return refuse(rd, TD_ERR_NO_MEMORY, "key count", count, "memory for the keys");
    }
    for (uint32_t i = 0; i < count; i++) {
        gguf_kv_t *kv = &gguf->kvs[i];
        gguf->kv_count = i + 1; /* close() frees what a failed read had begun */
        rd->name = NULL;
        TD_TRY(read_kv(rd, kv));
        if (!td_gguf_names_put(&gguf->kv_names, kv->key, kv->key_len, i)) {
            return refuse(rd, TD_ERR_INVALID, "key", i, "no key twice");
        }
    }
    rd->name = NULL;
    return TD_OK;
}

static td_status_t read_alignment(const reader_t *rd, td_gguf_t *gguf)
{
    uint32_t alignment = GGUF_ALIGNMENT_DEFAULT;
    td_status_t status = td_gguf_get_u32(gguf, "general.alignment", &alignment);

    if (status != TD_OK && status != TD_ERR_NOT_FOUND) {
        return status;
    }
    if (alignment < 8 || (alignment & (alignment - 1)) != 0) {
        return refuse(rd, TD_ERR_INVALID, "general.alignment", alignment,
                      "a power of two, at least 8");
    }
    gguf->alignment = alignment;
    return TD_OK;
}

static td_status_t read_tensor_dims(reader_t *rd, td_gguf_tensor_t *tensor, size_t *entries_out)
{
    size_t entries = 1;

    TD_TRY(read_u32(rd, "tensor dimension count", &tensor->dim_count));
    if (tensor->dim_count == 0 || tensor->dim_count > TD_GGUF_DIMS_MAX) {
        return refuse(rd, TD_ERR_INVALID, "tensor dimension count", tensor->dim_count, "1 to %d",
                      TD_GGUF_DIMS_MAX);
    }
    for (uint32_t i = 0; i < TD_GGUF_DIMS_MAX; i++) {
        tensor->dims[i] = 1;
        if (i < tensor->dim_count) {
            TD_TRY(read_u64(rd, "tensor dimension", &tensor->dims[i]));
        }
        if (tensor->dims[i] == 0 || !td_size_mul(entries, (size_t)tensor->dims[i], &entries)) {
            return refuse(rd, TD_ERR_INVALID, "tensor dimension", tensor->dims[i],
                          "at least 1 and a product of all below 2^64");
        }
    }
    *entries_out = entries;
    return TD_OK;
}

static td_status_t read_tensor_type(reader_t *rd, td_gguf_tensor_t *tensor, size_t entries)
{
    const tensor_type_t *known = NULL;
    uint32_t type = 0;

    TD_TRY(read_u32(rd, "tensor type", &type));
    for (size_t i = 0; i < TD_ARRAY_LEN(tensor_types); i++) {
        if (tensor_types[i].type == type) {
            known = &tensor_types[i];
        }
    }
    if (known == NULL) {
        return refuse(rd, TD_ERR_UNSUPPORTED, "tensor type", type,
                      "F32 0, F16 1, Q4_0 2, Q4_1 3, Q8_0 8 or BF16 30");
    }
    tensor->type = (td_gguf_type_t)type;
    if (tensor->dims[0] % known->block_entries != 0) {
        return refuse(rd, TD_ERR_INVALID, "tensor dimension 0", tensor->dims[0],
                      "a multiple of %u for type %u", known->block_entries, type);
    }
    if (!td_size_mul(entries / known->block_entries, known->block_bytes, &tensor->byte_count)) {
        return refuse(rd, TD_ERR_INVALID, "tensor size", entries, "bytes below 2^64");
    }
    return TD_OK;
}

/* Reads everything but the tensor's place: the data's start is known only after the last one. The
 * offset waits in offset_out. */
static td_status_t read_tensor(reader_t *rd, td_gguf_t *gguf, uint32_t idx, uint64_t *offset_out)
{
    td_gguf_tensor_t *tensor = &gguf->tensors[idx];
    char *name = gguf->tensor_name_bytes + (size_t)idx * (GGUF_TENSOR_NAME_BYTES_MAX + 1);
    const uint8_t *file_name = NULL;
    uint32_t name_len = 0;
    size_t entries = 0;

    rd->name = NULL;
    TD_TRY(read_name(rd, "tensor name", GGUF_TENSOR_NAME_BYTES_MAX, &file_name, &name_len));
    memcpy(name, file_name, name_len); /* zeroed before: stays terminated */
    tensor->name = name;
    TD_TRY(read_tensor_dims(rd, tensor, &entries));
    TD_TRY(read_tensor_type(rd, tensor, entries));
    TD_TRY(read_u64(rd, "tensor offset", offset_out));
    if (*offset_out % gguf->alignment != 0) {
        return refuse(rd, TD_ERR_INVALID, "tensor offset", *offset_out, "a multiple of %u",
                      gguf->alignment);
    }
    if (!td_gguf_names_put(&gguf->tensor_names, file_name, name_len, idx)) {
        return refuse(rd, TD_ERR_INVALID, "tensor name", idx, "no name twice");
    }
    return TD_OK;
}

static td_status_t place_tensors(reader_t *rd, td_gguf_t *gguf, const uint64_t *offsets)
{
    size_t data_pos = 0;
    size_t data_len = 0;

    if (!td_size_add(rd->buf.pos, gguf->alignment - 1, &data_pos)) {
        return refuse(rd, TD_ERR_INVALID, "general.alignment", gguf->alignment, "a smaller one");
    }
    data_pos &= ~((size_t)gguf->alignment - 1);
    data_len = data_pos < gguf->len ? gguf->len - data_pos : 0;
    for (uint32_t i = 0; i < gguf->tensor_count; i++) {
        td_gguf_tensor_t *tensor = &gguf->tensors[i];
        rd->name = (const uint8_t *)tensor->name;
        rd->name_len = strlen(tensor->name);
        if (offsets[i] > data_len || tensor->byte_count > data_len - (size_t)offsets[i]) {
            return refuse(rd, TD_ERR_INVALID, "tensor offset", offsets[i],
                          "%zu bytes from there inside the %zu of data", tensor->byte_count,
                          data_len);
        }
        tensor->bytes = gguf->bytes + data_pos + (size_t)offsets[i];
    }
    return TD_OK;
}

static td_status_t read_tensors(reader_t *rd, td_gguf_t *gguf, uint32_t count)
{
    td_status_t status = TD_OK;
    uint64_t *offsets = td_calloc(count, sizeof(*offsets));

    gguf->tensors = td_calloc(count, sizeof(*gguf->tensors));
    gguf->tensor_name_bytes = td_calloc(count, GGUF_TENSOR_NAME_BYTES_MAX + 1);
    if (offsets == NULL || gguf->tensors == NULL || gguf->tensor_name_bytes == NULL ||
        td_gguf_names_init(&gguf->tensor_names, count) != TD_OK) {
        status = refuse(rd, TD_ERR_NO_MEMORY, "tensor count", count, "memory for the tensors");
        goto out;
    }
    gguf->tensor_count = count;
    for (uint32_t i = 0; i < count; i++) {
        status = read_tensor(rd, gguf, i, &offsets[i]);
        if (status != TD_OK) {
            goto out;
        }
    }
    status = place_tensors(rd, gguf, offsets);
out:
    td_free(offsets);
    return status;
}

static td_status_t read_count(reader_t *rd, const char *field, uint32_t limit, uint32_t elem_bytes,
                              uint32_t *out)
{
    uint64_t count = 0;

    TD_TRY(read_u64(rd, field, &count));
    if (count > limit || count > td_buf_left(&rd->buf) / elem_bytes) {
        return refuse(rd, TD_ERR_INVALID, field, count, "at most %" PRIu64,
                      TD_MIN((uint64_t)limit, (uint64_t)td_buf_left(&rd->buf) / elem_bytes));
    }
    *out = (uint32_t)count;
    return TD_OK;
}

static td_status_t read_file(reader_t *rd, td_gguf_t *gguf)
{
    uint32_t magic = 0;
    uint32_t version = 0;
    uint32_t tensor_count = 0;
    uint32_t kv_count = 0;

    TD_TRY(read_u32(rd, "magic", &magic));
    if (magic != GGUF_MAGIC) {
        return refuse(rd, TD_ERR_INVALID, "magic", magic, "%u (GGUF)", GGUF_MAGIC);
    }
    TD_TRY(read_u32(rd, "version", &version));
    if (version < GGUF_VERSION_MIN || version > GGUF_VERSION_MAX) {
        return refuse(rd, TD_ERR_UNSUPPORTED, "version", version, "%u or %u, little-endian",
                      GGUF_VERSION_MIN, GGUF_VERSION_MAX);
    }
    TD_TRY(
        read_count(rd, "tensor count", TD_GGUF_TENSORS_MAX, GGUF_TENSOR_BYTES_MIN, &tensor_count));
    TD_TRY(read_count(rd, "key count", TD_GGUF_KEYS_MAX, GGUF_KEY_BYTES_MIN, &kv_count));
    gguf->version = version;
    gguf->keys_pos = rd->buf.pos;
    TD_TRY(read_kvs(rd, gguf, kv_count));
    gguf->keys_end = rd->buf.pos;
    TD_TRY(read_alignment(rd, gguf));
    return read_tensors(rd, gguf, tensor_count);
}

static td_status_t open_labelled(const void *bytes, size_t len, const char *label,
                                 td_gguf_t **gguf_out)
{
    td_status_t status = TD_OK;
    reader_t rd = {.label = label};
    td_gguf_t *gguf = td_calloc(1, sizeof(*gguf));

    td_buf_init(&rd.buf, bytes, len);
    if (gguf == NULL) {
        return refuse(&rd, TD_ERR_NO_MEMORY, "file", len, "memory for the file object");
    }
    gguf->bytes = bytes;
    gguf->len = len;
    gguf->label = label;
    status = read_file(&rd, gguf);
    gguf->label = NULL;
    if (status != TD_OK) {
        td_gguf_close(gguf);
        return status;
    }
    *gguf_out = gguf;
    return TD_OK;
}

td_status_t td_gguf_open_bytes(const void *bytes, size_t len, td_gguf_t **gguf_out)
{
    TD_ASSERT(gguf_out != NULL && (bytes != NULL || len == 0));
    return open_labelled(bytes, len, "memory", gguf_out);
}

td_status_t td_gguf_open(const char *path, td_gguf_t **gguf_out)
{
    td_status_t status = TD_ERR_IO;
    struct stat st;
    void *map = MAP_FAILED;
    int fd = -1;

    TD_ASSERT(path != NULL && gguf_out != NULL);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &st) != 0) {
        TD_LOG_ERROR("model file not opened", "file=%s errno=%d", path, errno);
        goto err_close;
    }
    if (!S_ISREG(st.st_mode)) {
        TD_LOG_ERROR("model file not opened", "file=%s got=mode_%o expected=\"a regular file\"",
                     path, (unsigned)st.st_mode);
        goto err_close;
    }
    if (st.st_size <= 0) { /* cannot be mapped; the reader says what is missing */
        status = open_labelled("", 0, path, gguf_out);
        goto err_close;
    }
    map = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    if (map == MAP_FAILED) {
        TD_LOG_ERROR("model file not mapped", "file=%s bytes=%lld errno=%d", path,
                     (long long)st.st_size, errno);
        goto err_close;
    }
    status = open_labelled(map, (size_t)st.st_size, path, gguf_out);
    if (status != TD_OK) {
        goto err_unmap;
    }
    (*gguf_out)->mapped = true;
    (void)close(fd);
    return TD_OK;

err_unmap:
    (void)munmap(map, (size_t)st.st_size);
err_close:
    if (fd >= 0) {
        (void)close(fd);
    }
    return status;
}

void td_gguf_close(td_gguf_t *gguf)
{
    if (gguf == NULL) {
        return;
    }
    for (uint32_t i = 0; i < gguf->kv_count; i++) {
        td_free(gguf->kvs[i].str_pos);
    }
    td_free(gguf->kvs);
    td_gguf_names_fini(&gguf->kv_names);
    td_free(gguf->tensors);
    td_free(gguf->tensor_name_bytes);
    td_gguf_names_fini(&gguf->tensor_names);
    if (gguf->mapped && munmap((void *)(uintptr_t)gguf->bytes, gguf->len) != 0) {
        TD_LOG_WARN("model file not unmapped", "bytes=%zu errno=%d", gguf->len, errno);
    }
    td_free(gguf);
}

uint32_t td_gguf_tensor_count(const td_gguf_t *gguf)
{
    return gguf->tensor_count;
}

const td_gguf_tensor_t *td_gguf_tensor_at(const td_gguf_t *gguf, uint32_t idx)
{
    TD_ASSERT(idx < gguf->tensor_count);
    return &gguf->tensors[idx];
}

const td_gguf_tensor_t *td_gguf_tensor_find(const td_gguf_t *gguf, const char *name)
{
    uint32_t idx = td_gguf_names_find(&gguf->tensor_names, (const uint8_t *)name, strlen(name));

    return idx == TD_GGUF_NAMES_NONE ? NULL : &gguf->tensors[idx];
}

static const gguf_kv_t *kv_find(const td_gguf_t *gguf, const char *key)
{
    uint32_t idx = td_gguf_names_find(&gguf->kv_names, (const uint8_t *)key, strlen(key));

    return idx == TD_GGUF_NAMES_NONE ? NULL : &gguf->kvs[idx];
}

void td_gguf_raw(const td_gguf_t *gguf, td_gguf_raw_t *out)
{
    *out = (td_gguf_raw_t){.keys = gguf->bytes + gguf->keys_pos,
                           .keys_len = gguf->keys_end - gguf->keys_pos,
                           .key_count = gguf->kv_count,
                           .version = gguf->version,
                           .alignment = gguf->alignment};
}

td_status_t td_gguf_raw_number(const td_gguf_t *gguf, const char *key, const uint8_t **at_out,
                               size_t *len_out)
{
    const gguf_kv_t *kv = kv_find(gguf, key);

    if (kv == NULL) {
        return TD_ERR_NOT_FOUND;
    }
    if (value_bytes[kv->type] == 0) {
        return TD_ERR_INVALID;
    }
    *at_out = gguf->bytes + kv->value_pos;
    *len_out = value_bytes[kv->type];
    return TD_OK;
}

/* A value of another type or range than its user needs: as malformed as a bad byte. */
static td_status_t refuse_value(const td_gguf_t *gguf, const char *key, uint32_t type,
                                const char *expected)
{
    TD_LOG_ERROR("model file key refused", "file=%s key=%s got=type_%u expected=\"%s\"",
                 gguf->label == NULL ? "-" : gguf->label, key, type, expected);
    return TD_ERR_INVALID;
}

/* Opening has checked that every value lies inside the file, so these cannot be short. */
static uint64_t load_le(const td_gguf_t *gguf, size_t pos, uint32_t width)
{
    uint64_t value = 0;

    TD_ASSERT(pos <= gguf->len && width <= gguf->len - pos);
    for (uint32_t i = 0; i < width; i++) {
        value |= (uint64_t)gguf->bytes[pos + i] << (8 * i);
    }
    return value;
}

static bool is_integer(uint32_t type)
{
    return type <= VALUE_I32 || type == VALUE_U64 || type == VALUE_I64;
}

static bool is_signed(uint32_t type)
{
    return type == VALUE_I8 || type == VALUE_I16 || type == VALUE_I32 || type == VALUE_I64;
}

/* The integer as sign and 64-bit two's complement. */
static uint64_t load_integer(const td_gguf_t *gguf, size_t pos, uint32_t type, bool *negative_out)
{
    uint32_t bits = 8u * value_bytes[type];
    uint64_t value = load_le(gguf, pos, value_bytes[type]);

    *negative_out = is_signed(type) && (value >> (bits - 1)) != 0;
    if (*negative_out && bits < 64) {
        value |= UINT64_MAX << bits;
    }
    return value;
}

td_status_t td_gguf_get_u32(const td_gguf_t *gguf, const char *key, uint32_t *out)
{
    const gguf_kv_t *kv = kv_find(gguf, key);
    bool negative = false;
    uint64_t value = 0;

    if (kv == NULL) {
        return TD_ERR_NOT_FOUND;
    }
    if (!is_integer(kv->type)) {
        return refuse_value(gguf, key, kv->type, "an integer");
    }
    value = load_integer(gguf, kv->value_pos, kv->type, &negative);
    if (negative || value > UINT32_MAX) {
        return refuse_value(gguf, key, kv->type, "a value of 0 to 4294967295");
    }
    *out = (uint32_t)value;
    return TD_OK;
}

td_status_t td_gguf_get_f32(const td_gguf_t *gguf, const char *key, float *out)
{
    const gguf_kv_t *kv = kv_find(gguf, key);

    if (kv == NULL) {
        return TD_ERR_NOT_FOUND;
    }
    if (kv->type == VALUE_F32) {
        uint32_t bits = (uint32_t)load_le(gguf, kv->value_pos, 4);
        memcpy(out, &bits, sizeof(*out));
        return TD_OK;
    }
    if (kv->type == VALUE_F64) {
        uint64_t bits = load_le(gguf, kv->value_pos, 8);
        double wide = 0;
        memcpy(&wide, &bits, sizeof(wide));
        if (isfinite(wide) && fabs(wide) > 3.4028234663852886e38) {
            return refuse_value(gguf, key, kv->type, "a value in the range of f32");
        }
        *out = (float)wide;
        return TD_OK;
    }
    return refuse_value(gguf, key, kv->type, "f32 or f64");
}

td_status_t td_gguf_get_bool(const td_gguf_t *gguf, const char *key, bool *out)
{
    const gguf_kv_t *kv = kv_find(gguf, key);

    if (kv == NULL) {
        return TD_ERR_NOT_FOUND;
    }
    if (kv->type != VALUE_BOOL) {
        return refuse_value(gguf, key, kv->type, "a bool");
    }
    *out = load_le(gguf, kv->value_pos, 1) != 0;
    return TD_OK;
}

static void load_str(const td_gguf_t *gguf, size_t pos, const char **text_out, size_t *len_out)
{
    size_t len = (size_t)load_le(gguf, pos, 8);

    TD_ASSERT(len <= gguf->len - pos - 8);
    *text_out = (const char *)gguf->bytes + pos + 8;
    *len_out = len;
}

td_status_t td_gguf_get_str(const td_gguf_t *gguf, const char *key, const char **text_out,
                            size_t *len_out)
{
    const gguf_kv_t *kv = kv_find(gguf, key);

    if (kv == NULL) {
        return TD_ERR_NOT_FOUND;
    }
    if (kv->type != VALUE_STRING) {
        return refuse_value(gguf, key, kv->type, "a string");
    }
    load_str(gguf, kv->value_pos, text_out, len_out);
    return TD_OK;
}

static bool is_i32_array(const gguf_kv_t *kv)
{
    return kv->type == VALUE_ARRAY && (kv->elem_type == VALUE_I32 || kv->elem_type == VALUE_U32);
}

td_status_t td_gguf_get_array_len(const td_gguf_t *gguf, const char *key, uint32_t *len_out)
{
    const gguf_kv_t *kv = kv_find(gguf, key);

    if (kv == NULL) {
        return TD_ERR_NOT_FOUND;
    }
    if ((kv->str_pos == NULL && !is_i32_array(kv)) || kv->count > UINT32_MAX) {
        return refuse_value(gguf, key, kv->type, "an array of strings or 32-bit integers");
    }
    *len_out = (uint32_t)kv->count;
    return TD_OK;
}

td_status_t td_gguf_get_array_str(const td_gguf_t *gguf, const char *key, uint32_t idx,
                                  const char **text_out, size_t *len_out)
{
    const gguf_kv_t *kv = kv_find(gguf, key);

    if (kv == NULL) {
        return TD_ERR_NOT_FOUND;
    }
    if (kv->str_pos == NULL || idx >= kv->count) {
        return refuse_value(gguf, key, kv->type, "an array of strings with that index");
    }
    load_str(gguf, kv->str_pos[idx], text_out, len_out);
    return TD_OK;
}

td_status_t td_gguf_get_array_i32(const td_gguf_t *gguf, const char *key, uint32_t idx,
                                  int32_t *out)
{
    const gguf_kv_t *kv = kv_find(gguf, key);
    uint32_t bits = 0;

    if (kv == NULL) {
        return TD_ERR_NOT_FOUND;
    }
    if (!is_i32_array(kv) || idx >= kv->count) {
        return refuse_value(gguf, key, kv->type, "an array of 32-bit integers with that index");
    }
    bits = (uint32_t)load_le(gguf, kv->value_pos + (size_t)idx * 4, 4);
    if (kv->elem_type == VALUE_U32 && bits > INT32_MAX) {
        return refuse_value(gguf, key, kv->type, "values of 0 to 2147483647");
    }
    memcpy(out, &bits, sizeof(*out));
    return TD_OK;
}

void td_gguf_fingerprint(const td_gguf_t *gguf, uint8_t out[32])
{
    if (sodium_init() < 0) { /* it picks the fastest code; the plain code gives the same bytes */
        TD_LOG_WARN("libsodium not initialised", "bytes=%zu", gguf->len);
    }
    TD_ASSERT(crypto_generichash(out, 32, gguf->bytes, gguf->len, NULL, 0) == 0);
}

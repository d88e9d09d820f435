#include "common/model/td_safetensors.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/base/td_base.h"
#include "common/base/td_buf.h"
#include "common/base/td_log.h"

#define METADATA_KEY "__metadata__"
#define HEADER_ALIGN 8u /* what follows the header begins at a multiple */

static const struct {
    const char *name;
    size_t bytes; /* of an element */
} types[TD_SAFETENSORS_TYPES] = {
    [TD_SAFETENSORS_F32] = {"F32", 4},
    [TD_SAFETENSORS_F16] = {"F16", 2},
    [TD_SAFETENSORS_I32] = {"I32", 4},
};

struct td_safetensors {
    json_t *header;           /* owned: names and texts lie in it */
    td_safetensor_t *tensors; /* owned, [count] */
    uint32_t count;
    void *map; /* owned; NULL: the bytes are lent */
    size_t map_len;
};

/* --- reading ---------------------------------------------------------------------------------- */

static td_status_t bad(const char *name, const char *what)
{
    TD_LOG_ERROR("tensor file malformed", "tensor=\"%.64s\" why=\"%s\"", name, what);
    return TD_ERR_INVALID;
}

static bool get_u64(const json_t *value, uint64_t *out)
{
    if (!json_is_integer(value) || json_integer_value(value) < 0) {
        return false;
    }
    *out = (uint64_t)json_integer_value(value);
    return true;
}

static td_status_t read_type(const char *name, const json_t *value, td_safetensors_type_t *out)
{
    const char *text = json_string_value(value);

    for (uint32_t i = 0; text != NULL && i < TD_SAFETENSORS_TYPES; i++) {
        if (strcmp(text, types[i].name) == 0) {
            *out = (td_safetensors_type_t)i;
            return TD_OK;
        }
    }
    if (text == NULL) {
        return bad(name, "dtype is no text");
    }
    TD_LOG_ERROR("tensor type not supported",
                 "tensor=\"%.64s\" dtype=\"%.16s\" expected=\"F32, F16 or I32\"", name, text);
    return TD_ERR_UNSUPPORTED;
}

/* The shape, and with the type how many bytes it wants. */
static td_status_t read_shape(const json_t *shape, td_safetensor_t *t, size_t *bytes_out)
{
    size_t bytes = types[t->type].bytes;

    if (!json_is_array(shape) || json_array_size(shape) > TD_SAFETENSORS_DIMS_MAX) {
        return bad(t->name, "shape is no list of at most 4 sizes");
    }
    t->dim_count = (uint32_t)json_array_size(shape);
    for (uint32_t i = 0; i < TD_SAFETENSORS_DIMS_MAX; i++) {
        t->dims[i] = 1;
        if (i < t->dim_count && !get_u64(json_array_get(shape, i), &t->dims[i])) {
            return bad(t->name, "a size is no number");
        }
        if (t->dims[i] > SIZE_MAX || !td_size_mul(bytes, (size_t)t->dims[i], &bytes)) {
            return bad(t->name, "shape too large");
        }
    }
    *bytes_out = bytes;
    return TD_OK;
}

static td_status_t read_tensor(const char *name, const json_t *value, const uint8_t *data,
                               size_t data_len, td_safetensor_t *t)
{
    const json_t *offsets = json_object_get(value, "data_offsets");
    uint64_t begin = 0;
    uint64_t end = 0;
    size_t bytes = 0;

    *t = (td_safetensor_t){.name = name};
    TD_TRY(read_type(name, json_object_get(value, "dtype"), &t->type));
    TD_TRY(read_shape(json_object_get(value, "shape"), t, &bytes));
    if (json_array_size(offsets) != 2 || !get_u64(json_array_get(offsets, 0), &begin) ||
        !get_u64(json_array_get(offsets, 1), &end)) {
        return bad(name, "data_offsets are no two numbers");
    }
    if (begin > end || end > data_len) {
        return bad(name, "data_offsets outside the file");
    }
    if (end - begin != bytes) {
        return bad(name, "data_offsets and shape disagree");
    }
    t->bytes = data + begin;
    t->byte_count = bytes;
    return TD_OK;
}

static td_status_t read_tensors(td_safetensors_t *f, const uint8_t *data, size_t data_len)
{
    const char *name = NULL;
    json_t *value = NULL;

    if (!json_is_object(f->header) || json_object_size(f->header) > TD_SAFETENSORS_TENSORS_MAX) {
        return bad("", "header is no object, or too many tensors");
    }
    f->tensors = td_calloc(json_object_size(f->header), sizeof(*f->tensors));
    if (f->tensors == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    json_object_foreach(f->header, name, value)
    {
        if (strcmp(name, METADATA_KEY) != 0) {
            TD_TRY(read_tensor(name, value, data, data_len, &f->tensors[f->count]));
            f->count++;
        }
    }
    return TD_OK;
}

td_status_t td_safetensors_open_bytes(const void *bytes, size_t len, td_safetensors_t **out)
{
    td_safetensors_t *f = NULL;
    const uint8_t *header = NULL;
    json_error_t error;
    uint64_t header_len = 0;
    td_buf_t buf;
    td_status_t status = TD_OK;

    td_buf_init(&buf, bytes, len);
    if (!td_buf_get_u64(&buf, &header_len) || header_len > TD_SAFETENSORS_HEADER_BYTES_MAX ||
        !td_buf_get_bytes(&buf, (size_t)header_len, &header)) {
        return bad("", "no header of the length that the file says");
    }
    f = td_calloc(1, sizeof(*f));
    if (f == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    f->header =
        json_loadb((const char *)header, (size_t)header_len, JSON_REJECT_DUPLICATES, &error);
    if (f->header == NULL) {
        status = bad("", error.text);
    } else {
        status = read_tensors(f, header + header_len, td_buf_left(&buf));
    }
    if (status != TD_OK) {
        td_safetensors_close(f);
        return status;
    }
    *out = f;
    return TD_OK;
}

/* NULL with *len_out 0: an empty file, which can't be mapped. */
static td_status_t map_file(const char *path, void **map_out, size_t *len_out)
{
    struct stat st;
    void *map = NULL;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    bool ok = fd >= 0 && fstat(fd, &st) == 0 && S_ISREG(st.st_mode);

    if (ok && st.st_size > 0) {
        map = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
        ok = map != MAP_FAILED;
    }
    if (!ok) {
        TD_LOG_ERROR("tensor file not opened", "file=%s errno=%d expected=\"a regular file\"", path,
                     errno);
    }
    if (fd >= 0) {
        (void)close(fd);
    }
    if (ok) {
        *map_out = map;
        *len_out = (size_t)st.st_size;
    }
    return ok ? TD_OK : TD_ERR_IO;
}

td_status_t td_safetensors_open(const char *path, td_safetensors_t **out)
{
    void *map = NULL;
    size_t len = 0;
    td_status_t status = map_file(path, &map, &len);

    if (status == TD_OK) {
        status = td_safetensors_open_bytes(map, len, out);
        if (status == TD_OK) {
            (*out)->map = map;
            (*out)->map_len = len;
        } else {
            TD_LOG_ERROR("tensor file not read", "file=%s status=%s", path, td_status_name(status));
            if (map != NULL) {
                (void)munmap(map, len);
            }
        }
    }
    return status;
}

void td_safetensors_close(td_safetensors_t *file)
{
    if (file == NULL) {
        return;
    }
    json_decref(file->header);
    td_free(file->tensors);
    if (file->map != NULL) {
        (void)munmap(file->map, file->map_len);
    }
    td_free(file);
}

uint32_t td_safetensors_count(const td_safetensors_t *file)
{
    return file->count;
}

const td_safetensor_t *td_safetensors_at(const td_safetensors_t *file, uint32_t idx)
{
    TD_ASSERT(idx < file->count);
    return &file->tensors[idx];
}

const td_safetensor_t *td_safetensors_find(const td_safetensors_t *file, const char *name)
{
    for (uint32_t i = 0; i < file->count; i++) {
        if (strcmp(file->tensors[i].name, name) == 0) {
            return &file->tensors[i];
        }
    }
    return NULL;
}

td_status_t td_safetensors_need(const td_safetensors_t *file, const char *name,
                                td_safetensors_type_t type, const uint64_t *dims,
                                uint32_t dim_count, const td_safetensor_t **out)
{
    const td_safetensor_t *t = td_safetensors_find(file, name);
    bool fits = t != NULL && t->type == type && t->dim_count == dim_count;

    for (uint32_t i = 0; fits && i < dim_count; i++) {
        fits = dims[i] == 0 || t->dims[i] == dims[i];
    }
    if (!fits) {
        TD_LOG_ERROR("tensor file lacks a tensor of this shape",
                     "tensor=%s expected=%s[%llu][%llu] got=%s[%llu][%llu]", name, types[type].name,
                     (unsigned long long)dims[0], (unsigned long long)(dim_count > 1 ? dims[1] : 1),
                     t == NULL ? "none" : types[t->type].name,
                     (unsigned long long)(t == NULL ? 0 : t->dims[0]),
                     (unsigned long long)(t == NULL ? 0 : t->dims[1]));
        return TD_ERR_INVALID;
    }
    *out = t;
    return TD_OK;
}

const char *td_safetensors_text(const td_safetensors_t *file, const char *key)
{
    return json_string_value(json_object_get(json_object_get(file->header, METADATA_KEY), key));
}

/* --- writing ---------------------------------------------------------------------------------- */

static size_t bytes_of(const td_safetensor_t *t)
{
    size_t bytes = types[t->type].bytes;

    for (uint32_t i = 0; i < t->dim_count; i++) {
        bytes *= (size_t)t->dims[i];
    }
    return bytes;
}

static json_t *describe(const td_safetensor_t *t, size_t begin)
{
    json_t *shape = json_array();

    for (uint32_t i = 0; i < t->dim_count; i++) {
        (void)json_array_append_new(shape, json_integer((json_int_t)t->dims[i]));
    }
    return json_pack("{s:s, s:o, s:[I, I]}", "dtype", types[t->type].name, "shape", shape,
                     "data_offsets", (json_int_t)begin, (json_int_t)(begin + bytes_of(t)));
}

/* Owner: the caller frees the text with free(); NULL: no memory. */
static char *make_header(const td_safetensor_t *tensors, uint32_t tensor_count,
                         const td_safetensors_text_t *texts, uint32_t text_count)
{
    json_t *header = json_object();
    json_t *metadata = json_object();
    char *text = NULL;
    size_t at = 0;
    bool ok = header != NULL && metadata != NULL;

    for (uint32_t i = 0; ok && i < text_count; i++) {
        ok = json_object_set_new(metadata, texts[i].key, json_string(texts[i].value)) == 0;
    }
    ok = json_object_set_new(header, METADATA_KEY, metadata) == 0 && ok;
    for (uint32_t i = 0; ok && i < tensor_count; i++) {
        ok = json_object_set_new(header, tensors[i].name, describe(&tensors[i], at)) == 0;
        at += bytes_of(&tensors[i]);
    }
    text = ok ? json_dumps(header, JSON_COMPACT) : NULL;
    json_decref(header);
    return text;
}

static bool put(FILE *file, const void *bytes, size_t len)
{
    return fwrite(bytes, 1, len, file) == len;
}

static bool put_all(FILE *file, const char *header, const td_safetensor_t *tensors, uint32_t count)
{
    const size_t len = strlen(header);
    const size_t padded = (len + HEADER_ALIGN - 1) / HEADER_ALIGN * HEADER_ALIGN;
    uint8_t number[8];
    bool ok = true;

    for (size_t i = 0; i < sizeof(number); i++) {
        number[i] = (uint8_t)((uint64_t)padded >> (8 * i));
    }
    ok = put(file, number, sizeof(number)) && put(file, header, len) &&
         put(file, "        ", padded - len);
    for (uint32_t i = 0; ok && i < count; i++) {
        ok = put(file, tensors[i].bytes, bytes_of(&tensors[i]));
    }
    return ok;
}

td_status_t td_safetensors_write(const char *path, const td_safetensor_t *tensors,
                                 uint32_t tensor_count, const td_safetensors_text_t *texts,
                                 uint32_t text_count)
{
    char *header = make_header(tensors, tensor_count, texts, text_count);
    char beside[PATH_MAX];
    FILE *file = NULL;
    bool ok = false;

    if (header == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    if (snprintf(beside, sizeof(beside), "%s.tmp", path) < (int)sizeof(beside)) {
        file = fopen(beside, "wb");
    }
    if (file != NULL) {
        ok = put_all(file, header, tensors, tensor_count) && fflush(file) == 0 &&
             fsync(fileno(file)) == 0;
        ok = fclose(file) == 0 && ok && rename(beside, path) == 0;
        if (!ok) {
            (void)remove(beside);
        }
    }
    free(header);
    if (!ok) {
        TD_LOG_ERROR("tensor file not written", "file=%s errno=%d", path, errno);
    }
    return ok ? TD_OK : TD_ERR_IO;
}

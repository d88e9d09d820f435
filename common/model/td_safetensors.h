/* td_safetensors.h - tensors in a file, as Hugging Face's safetensors lays them out: the length of
 * a JSON header in 8 little-endian bytes, the header, the tensors' bytes. Reader and writer.
 * Every offset, shape and type is checked against the file before use; a bad file gets a status
 * and one log line that says what was wrong.
 * Source: the safetensors format of Hugging Face.
 * Threads: any after opening (immutable). */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/td_status.h"

#define TD_SAFETENSORS_HEADER_BYTES_MAX (16u << 20)
#define TD_SAFETENSORS_TENSORS_MAX 65536u
#define TD_SAFETENSORS_DIMS_MAX 4u

typedef enum td_safetensors_type {
    TD_SAFETENSORS_F32 = 0,
    TD_SAFETENSORS_F16,
    TD_SAFETENSORS_I32,
    TD_SAFETENSORS_TYPES
} td_safetensors_type_t;

typedef struct td_safetensor {
    const char *name; /* borrowed from the file object, or by the write */
    td_safetensors_type_t type;
    uint32_t dim_count;
    uint64_t dims[TD_SAFETENSORS_DIMS_MAX]; /* outermost first; unused are 1 */
    const void *bytes;                      /* borrowed; little-endian, of any alignment */
    size_t byte_count;                      /* written: what the dims say */
} td_safetensor_t;

/* An entry of the header's "__metadata__". */
typedef struct td_safetensors_text {
    const char *key;
    const char *value;
} td_safetensors_text_t;

typedef struct td_safetensors td_safetensors_t;

/** Maps and checks a file.
 * Errors: TD_ERR_IO (cannot open or map), TD_ERR_INVALID (malformed), TD_ERR_UNSUPPORTED (a type
 *         we do not read), TD_ERR_NO_MEMORY.
 * Owner:  the caller ends *out with td_safetensors_close(); all borrows end with it. */
TD_MUST_CHECK td_status_t td_safetensors_open(const char *path, td_safetensors_t **out);
/** The same over bytes in memory, which are borrowed until close. */
TD_MUST_CHECK td_status_t td_safetensors_open_bytes(const void *bytes, size_t len,
                                                    td_safetensors_t **out);
/** NULL is allowed. */
void td_safetensors_close(td_safetensors_t *file);
uint32_t td_safetensors_count(const td_safetensors_t *file);
const td_safetensor_t *td_safetensors_at(const td_safetensors_t *file, uint32_t idx);
/** NULL when there is none. */
const td_safetensor_t *td_safetensors_find(const td_safetensors_t *file, const char *name);
/** A tensor of exactly this type and shape; a log line says what is there instead.
 * Shape:  dims [dim_count], outermost first; 0 = any size.
 * Errors: TD_ERR_INVALID. */
TD_MUST_CHECK td_status_t td_safetensors_need(const td_safetensors_t *file, const char *name,
                                              td_safetensors_type_t type, const uint64_t *dims,
                                              uint32_t dim_count, const td_safetensor_t **out);
/** A text of the metadata; NULL when there is none. */
const char *td_safetensors_text(const td_safetensors_t *file, const char *key);

/** Writes a file whole or not at all: beside it first, then in its place.
 * Errors: TD_ERR_IO, TD_ERR_NO_MEMORY; the file that was there is then unchanged. */
TD_MUST_CHECK td_status_t td_safetensors_write(const char *path, const td_safetensor_t *tensors,
                                               uint32_t tensor_count,
                                               const td_safetensors_text_t *texts,
                                               uint32_t text_count);

/* td_gguf.h - reader for GGUF v2/v3 model files over a read-only mapping.
 * Every length, count, offset, type and alignment is checked against the file before use; a bad
 * file gets a status and one log line that says which field was wrong and what was expected.
 * Source: the GGUF specification of the ggml project.
 * Threads: any after opening (immutable). */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/td_status.h"

#define TD_GGUF_TENSORS_MAX (1u << 16)
#define TD_GGUF_KEYS_MAX (1u << 16)
#define TD_GGUF_DIMS_MAX 4

typedef enum td_gguf_type { /* tensor element types, the file's numbers */
                            TD_GGUF_F32 = 0,
                            TD_GGUF_F16 = 1,
                            TD_GGUF_Q4_0 = 2,
                            TD_GGUF_Q4_1 = 3,
                            TD_GGUF_Q8_0 = 8,
                            TD_GGUF_BF16 = 30
} td_gguf_type_t;

typedef struct td_gguf_tensor {
    const char *name; /* borrowed from the file object, NUL-terminated */
    uint32_t dim_count;
    uint64_t dims[TD_GGUF_DIMS_MAX]; /* dims[0] is the contiguous one; unused are 1 */
    td_gguf_type_t type;
    const uint8_t *bytes; /* borrowed: inside the mapping */
    size_t byte_count;    /* checked to lie inside the file */
} td_gguf_tensor_t;

typedef struct td_gguf td_gguf_t;

/** Maps and checks a file.
 * Errors: TD_ERR_IO (cannot open or map), TD_ERR_INVALID (malformed), TD_ERR_UNSUPPORTED (a
 *         version or tensor type we do not read), TD_ERR_NO_MEMORY.
 * Owner:  the caller ends *gguf_out with td_gguf_close(); all borrows end with it. */
TD_MUST_CHECK td_status_t td_gguf_open(const char *path, td_gguf_t **gguf_out);
/** The same over bytes in memory (fuzzing, tests). The bytes are borrowed until close. */
TD_MUST_CHECK td_status_t td_gguf_open_bytes(const void *bytes, size_t len, td_gguf_t **gguf_out);
void td_gguf_close(td_gguf_t *gguf);

uint32_t td_gguf_tensor_count(const td_gguf_t *gguf);
const td_gguf_tensor_t *td_gguf_tensor_at(const td_gguf_t *gguf, uint32_t idx);
/** NULL when there is none. Cost: O(1) or O(log n). */
const td_gguf_tensor_t *td_gguf_tensor_find(const td_gguf_t *gguf, const char *name);

/** Metadata. All answer TD_ERR_NOT_FOUND (no such key) or TD_ERR_INVALID (another type, or the
 * value does not fit). Integers of any width and sign are converted when they fit. */
TD_MUST_CHECK td_status_t td_gguf_get_u32(const td_gguf_t *gguf, const char *key, uint32_t *out);
TD_MUST_CHECK td_status_t td_gguf_get_f32(const td_gguf_t *gguf, const char *key, float *out);
TD_MUST_CHECK td_status_t td_gguf_get_bool(const td_gguf_t *gguf, const char *key, bool *out);
/** Lends len bytes, not NUL-terminated. */
TD_MUST_CHECK td_status_t td_gguf_get_str(const td_gguf_t *gguf, const char *key,
                                          const char **text_out, size_t *len_out);
/** Number of elements of an array of strings (or of 32-bit integers, below). */
TD_MUST_CHECK td_status_t td_gguf_get_array_len(const td_gguf_t *gguf, const char *key,
                                                uint32_t *len_out);
/** Cost: O(1) after the first call on the key's array (element offsets are kept). */
TD_MUST_CHECK td_status_t td_gguf_get_array_str(const td_gguf_t *gguf, const char *key,
                                                uint32_t idx, const char **text_out,
                                                size_t *len_out);
TD_MUST_CHECK td_status_t td_gguf_get_array_i32(const td_gguf_t *gguf, const char *key,
                                                uint32_t idx, int32_t *out);
/** A file's keys as they stand in it, for who writes them again. */
typedef struct td_gguf_raw {
    const uint8_t *keys; /* borrowed: all keys with their values, from the first */
    size_t keys_len;     /* bytes */
    uint32_t key_count;
    uint32_t version;
    uint32_t alignment; /* of tensors, bytes */
} td_gguf_raw_t;
void td_gguf_raw(const td_gguf_t *gguf, td_gguf_raw_t *out);
/** Lends the bytes of a number, inside raw keys. Errors: TD_ERR_NOT_FOUND, TD_ERR_INVALID (no
 * number).
 */
TD_MUST_CHECK td_status_t td_gguf_raw_number(const td_gguf_t *gguf, const char *key,
                                             const uint8_t **at_out, size_t *len_out);
/** BLAKE2b-256 over the whole file: the model fingerprint of block roots (I8).
 * Cost: one read of the file, about 1 GB/s. Shape: out [32]. */
void td_gguf_fingerprint(const td_gguf_t *gguf, uint8_t out[32]);

/* td_buf.h - a bounds-checked reader over untrusted bytes, and a growing writer.
 * Threads: owner. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/td_status.h"

/** A reader: every get fails, and changes nothing, when bytes are short. */
typedef struct td_buf {
    const uint8_t *bytes; /* borrowed */
    size_t len;
    size_t pos; /* <= len */
} td_buf_t;

void td_buf_init(td_buf_t *buf, const void *bytes, size_t len);
size_t td_buf_left(const td_buf_t *buf);
TD_MUST_CHECK bool td_buf_get_u8(td_buf_t *buf, uint8_t *out);
TD_MUST_CHECK bool td_buf_get_u16(td_buf_t *buf, uint16_t *out);
TD_MUST_CHECK bool td_buf_get_u32(td_buf_t *buf, uint32_t *out);
TD_MUST_CHECK bool td_buf_get_u64(td_buf_t *buf, uint64_t *out);
/** Lends len bytes of the underlying memory. */
TD_MUST_CHECK bool td_buf_get_bytes(td_buf_t *buf, size_t len, const uint8_t **out);

/** A growing byte string, always followed by a NUL that len does not count. Zero-initialise. */
typedef struct td_str {
    char *bytes; /* owned; NULL while empty */
    size_t len;
    size_t cap;
} td_str_t;

/** Errors of all: TD_ERR_NO_MEMORY; the text is then unchanged. */
TD_MUST_CHECK td_status_t td_str_append(td_str_t *str, const void *bytes, size_t len);
TD_MUST_CHECK td_status_t td_str_append_text(td_str_t *str, const char *text);
TD_MUST_CHECK td_status_t td_str_printf(td_str_t *str, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));
/** Removes the first n bytes. */
void td_str_consume(td_str_t *str, size_t n);
void td_str_clear(td_str_t *str);
void td_str_fini(td_str_t *str);

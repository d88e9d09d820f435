#include "common/base/td_buf.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "common/base/td_base.h"

void td_buf_init(td_buf_t *buf, const void *bytes, size_t len)
{
    buf->bytes = bytes;
    buf->len = len;
    buf->pos = 0;
}

size_t td_buf_left(const td_buf_t *buf)
{
    return buf->len - buf->pos;
}

bool td_buf_get_bytes(td_buf_t *buf, size_t len, const uint8_t **out)
{
    if (len > td_buf_left(buf)) {
        return false;
    }
    *out = buf->bytes + buf->pos;
    buf->pos += len;
    return true;
}

/* Reads a little-endian integer of n bytes. */
static bool buf_get_le(td_buf_t *buf, size_t n, uint64_t *out)
{
    const uint8_t *at = NULL;
    uint64_t value = 0;
    if (!td_buf_get_bytes(buf, n, &at)) {
        return false;
    }
    for (size_t i = 0; i < n; i++) {
        value |= (uint64_t)at[i] << (8 * i);
    }
    *out = value;
    return true;
}

bool td_buf_get_u8(td_buf_t *buf, uint8_t *out)
{
    uint64_t v = 0;
    if (!buf_get_le(buf, 1, &v)) {
        return false;
    }
    *out = (uint8_t)v;
    return true;
}

bool td_buf_get_u16(td_buf_t *buf, uint16_t *out)
{
    uint64_t v = 0;
    if (!buf_get_le(buf, 2, &v)) {
        return false;
    }
    *out = (uint16_t)v;
    return true;
}

bool td_buf_get_u32(td_buf_t *buf, uint32_t *out)
{
    uint64_t v = 0;
    if (!buf_get_le(buf, 4, &v)) {
        return false;
    }
    *out = (uint32_t)v;
    return true;
}

bool td_buf_get_u64(td_buf_t *buf, uint64_t *out)
{
    return buf_get_le(buf, 8, out);
}

static td_status_t str_reserve(td_str_t *str, size_t extra)
{
    size_t need = 0;
    size_t cap = str->cap == 0 ? 64 : str->cap;
    char *bytes = NULL;

    if (!td_size_add(str->len, extra, &need) || !td_size_add(need, 1, &need)) {
        return TD_ERR_NO_MEMORY;
    }
    if (need <= str->cap) {
        return TD_OK;
    }
    while (cap < need) {
        if (!td_size_mul(cap, 2, &cap)) {
            return TD_ERR_NO_MEMORY;
        }
    }
    bytes = td_realloc(str->bytes, cap);
    if (bytes == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    str->bytes = bytes;
    str->cap = cap;
    return TD_OK;
}

td_status_t td_str_append(td_str_t *str, const void *bytes, size_t len)
{
    TD_TRY(str_reserve(str, len));
    if (len > 0) {
        memcpy(str->bytes + str->len, bytes, len);
    }
    str->len += len;
    str->bytes[str->len] = '\0';
    return TD_OK;
}

td_status_t td_str_append_text(td_str_t *str, const char *text)
{
    return td_str_append(str, text, strlen(text));
}

td_status_t td_str_printf(td_str_t *str, const char *fmt, ...)
{
    va_list args;
    va_list again;
    int len = 0;

    va_start(args, fmt);
    va_copy(again, args);
    len = vsnprintf(NULL, 0, fmt, args);
    va_end(args);
    if (len < 0 || str_reserve(str, (size_t)len) != TD_OK) {
        va_end(again);
        return TD_ERR_NO_MEMORY;
    }
    (void)vsnprintf(str->bytes + str->len, (size_t)len + 1, fmt, again);
    va_end(again);
    str->len += (size_t)len;
    return TD_OK;
}

void td_str_consume(td_str_t *str, size_t n)
{
    TD_ASSERT(n <= str->len);
    if (n == 0) {
        return;
    }
    memmove(str->bytes, str->bytes + n, str->len - n);
    str->len -= n;
    str->bytes[str->len] = '\0';
}

void td_str_clear(td_str_t *str)
{
    str->len = 0;
    if (str->bytes != NULL) {
        str->bytes[0] = '\0';
    }
}

void td_str_fini(td_str_t *str)
{
    td_free(str->bytes);
    str->bytes = NULL;
    str->len = 0;
    str->cap = 0;
}

#include "common/trace/td_span.h"

#include <stdio.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"

#define VERSION_INVALID 0xff
#define FLAG_SAMPLED 0x01

/* Two lower-case hexadecimal digits, as the header has them. -1: they are none. */
static int hex_byte(const char *at)
{
    int value = 0;

    for (int i = 0; i < 2; i++) {
        const char c = at[i];
        if (c >= '0' && c <= '9') {
            value = value * 16 + (c - '0');
        } else if (c >= 'a' && c <= 'f') {
            value = value * 16 + (c - 'a' + 10);
        } else {
            return -1;
        }
    }
    return value;
}

static bool read_hex(const char *at, uint8_t *out, size_t bytes)
{
    uint8_t any = 0;

    for (size_t i = 0; i < bytes; i++) {
        const int value = hex_byte(at + 2 * i);
        if (value < 0) {
            return false;
        }
        out[i] = (uint8_t)value;
        any |= out[i];
    }
    return any != 0; /* an id of zeros is none */
}

/* 00-<32 digits>-<16 digits>-<2 digits>; later versions may have more behind that. */
bool td_trace_parse(const char *text, td_trace_context_t *out)
{
    const size_t len = text == NULL ? 0 : strlen(text);
    int version = 0;
    int flags = 0;

    *out = (td_trace_context_t){0};
    if (len < TD_TRACEPARENT_CHARS || text[2] != '-' || text[35] != '-' || text[52] != '-') {
        return false;
    }
    version = hex_byte(text);
    flags = hex_byte(text + 53);
    if (version < 0 || version == VERSION_INVALID || flags < 0 ||
        (version == 0 ? len != TD_TRACEPARENT_CHARS
                      : len > TD_TRACEPARENT_CHARS && text[TD_TRACEPARENT_CHARS] != '-') ||
        !read_hex(text + 3, out->trace_id, TD_TRACE_ID_BYTES) ||
        !read_hex(text + 36, out->span_id, TD_SPAN_ID_BYTES)) {
        *out = (td_trace_context_t){0};
        return false;
    }
    out->sampled = (flags & FLAG_SAMPLED) != 0;
    return true;
}

void td_trace_begin(td_trace_context_t *out, bool sampled)
{
    *out = (td_trace_context_t){.sampled = sampled};
    if (sampled) {
        td_random_bytes(out->trace_id, sizeof(out->trace_id));
    }
}

void td_span_begin(td_span_t *span, const td_trace_context_t *parent, const char *name,
                   uint64_t begin_ns)
{
    span->context.sampled = parent->sampled;
    if (!parent->sampled) {
        return;
    }
    memcpy(span->context.trace_id, parent->trace_id, sizeof(span->context.trace_id));
    memcpy(span->parent_id, parent->span_id, sizeof(span->parent_id));
    td_random_bytes(span->context.span_id, sizeof(span->context.span_id));
    span->name = name;
    span->kind = TD_SPAN_INTERNAL;
    span->begin_ns = begin_ns;
    span->end_ns = 0;
    span->failed = false;
    span->attribute_count = 0;
}

static td_span_attribute_t *add(td_span_t *span, const char *key)
{
    td_span_attribute_t *a = NULL;

    if (!span->context.sampled || span->attribute_count == TD_SPAN_ATTRIBUTES_MAX) {
        return NULL;
    }
    a = &span->attributes[span->attribute_count++];
    a->key = key;
    return a;
}

void td_span_number(td_span_t *span, const char *key, int64_t value)
{
    td_span_attribute_t *a = add(span, key);

    if (a != NULL) {
        a->is_text = false;
        a->number = value;
    }
}

void td_span_text(td_span_t *span, const char *key, const char *text)
{
    td_span_attribute_t *a = add(span, key);

    if (a != NULL) {
        a->is_text = true;
        (void)snprintf(a->text, sizeof(a->text), "%s", text);
    }
}

void td_trace_to_wire(const td_trace_context_t *context, uint8_t *out)
{
    memcpy(out, context->trace_id, TD_TRACE_ID_BYTES);
    memcpy(out + TD_TRACE_ID_BYTES, context->span_id, TD_SPAN_ID_BYTES);
}

void td_trace_from_wire(const uint8_t *bytes, td_trace_context_t *out)
{
    memcpy(out->trace_id, bytes, TD_TRACE_ID_BYTES);
    memcpy(out->span_id, bytes + TD_TRACE_ID_BYTES, TD_SPAN_ID_BYTES);
    out->sampled = true;
}

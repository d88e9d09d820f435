/* td_span.h - spans of a trace, as OpenTelemetry has them: what took how long, under what. A
 * request carries its context from process to process; each process sends its spans to a collector
 * by itself (td_tracer.h). What isn't sampled costs a test of a flag. Source: W3C Trace Context
 * (level 1) for the header; OpenTelemetry's trace API for the words. Threads: owner. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define TD_TRACE_ID_BYTES 16u
#define TD_SPAN_ID_BYTES 8u
#define TD_TRACE_WIRE_BYTES (TD_TRACE_ID_BYTES + TD_SPAN_ID_BYTES)
#define TD_TRACEPARENT_CHARS 55u
#define TD_SPAN_ATTRIBUTES_MAX 12u
#define TD_SPAN_TEXT_MAX 63u

/** Names a span. */
typedef struct td_trace_context {
    uint8_t trace_id[TD_TRACE_ID_BYTES];
    uint8_t span_id[TD_SPAN_ID_BYTES];
    bool sampled; /* false: nothing is recorded under it, and the ids may be zero */
} td_trace_context_t;

typedef enum td_span_kind { TD_SPAN_INTERNAL = 1, TD_SPAN_SERVER = 2 } td_span_kind_t; /* OTLP's */

typedef struct td_span_attribute {
    const char *key; /* a literal */
    bool is_text;
    int64_t number;
    char text[TD_SPAN_TEXT_MAX + 1];
} td_span_attribute_t;

typedef struct td_span {
    td_trace_context_t context;
    uint8_t parent_id[TD_SPAN_ID_BYTES]; /* zero: it has none */
    const char *name;                    /* a literal */
    td_span_kind_t kind;
    uint64_t begin_ns; /* td_now_ns() */
    uint64_t end_ns;
    bool failed;
    uint32_t attribute_count;
    td_span_attribute_t attributes[TD_SPAN_ATTRIBUTES_MAX];
} td_span_t;

/** Reads a traceparent header. False: it is none, and *out is not sampled. */
bool td_trace_parse(const char *traceparent, td_trace_context_t *out);
/** Begins a span. parent: sampled or not, as the span will be; one with a zero span id has no
 * span above. name: a literal. */
void td_span_begin(td_span_t *span, const td_trace_context_t *parent, const char *name,
                   uint64_t begin_ns);
/** A context of its own, at whose head no span stands yet. */
void td_trace_begin(td_trace_context_t *out, bool sampled);
/** key: a literal. text: copied, cut. Past the limit nothing is kept. */
void td_span_number(td_span_t *span, const char *key, int64_t value);
void td_span_text(td_span_t *span, const char *key, const char *text);
/** Shape: out [TD_TRACE_WIRE_BYTES]; what isn't sampled does not travel. */
void td_trace_to_wire(const td_trace_context_t *context, uint8_t *out);
void td_trace_from_wire(const uint8_t *bytes, td_trace_context_t *out);

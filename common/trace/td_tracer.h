/* td_tracer.h - sends a process's spans to an OpenTelemetry collector (OTLP over HTTP, as JSON).
 * A thread of its own sends what has gathered; who ends a span only copies it. What does not fit,
 * or finds no collector, is dropped and counted: no request ever waits for a trace. Source:
 * OpenTelemetry protocol specification 1.x, "OTLP/HTTP". Threads: create, destroy: init; end: any.
 */
#pragma once

#include "common/base/td_config.h"
#include "common/base/td_metrics.h"
#include "common/base/td_status.h"
#include "common/trace/td_span.h"

#define TD_TRACER_SPANS_MAX 4096u /* that wait */

/** Of every process of a cluster. */
#define TD_TRACER_OPTIONS                                                                          \
    {                                                                                              \
        "otlp-endpoint", TD_OPTION_TEXT, NULL,                                                     \
            "URL of an OpenTelemetry collector, without /v1/traces: then spans are sent to it"     \
    }

typedef struct td_tracer td_tracer_t;

typedef struct td_tracer_config {
    const char *endpoint; /* copied */
    const char *service;  /* "tandem-router"; copied */
    const char *instance; /* the process's id; copied */
    td_metric_t *sent;    /* spans that the collector took */
    td_metric_t *dropped; /* those for which there was no room, or no collector */
} td_tracer_config_t;

/** Errors: TD_ERR_INVALID (no http or https URL: logged), TD_ERR_NO_MEMORY. */
TD_MUST_CHECK td_status_t td_tracer_create(const td_tracer_config_t *config, td_tracer_t **out);
/** Sends what there is, for at most two seconds. NULL is allowed. */
void td_tracer_destroy(td_tracer_t *tracer);
/** Ends a span and takes a copy. NULL tracer, and what isn't sampled: nothing happens. */
void td_tracer_end(td_tracer_t *tracer, td_span_t *span, uint64_t end_ns);

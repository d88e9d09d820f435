/* td_metrics.h - counters, gauges and histograms, rendered as Prometheus text.
 * Series are declared once; updates are lock-free.
 * Threads: declaring: one at a time, others may render; updating and rendering: any. */
#pragma once

#include <stdint.h>

#include "common/base/td_buf.h"
#include "common/base/td_status.h"

#define TD_METRICS_SERIES_MAX 512
#define TD_METRICS_BUCKETS 16

typedef struct td_metrics td_metrics_t;
typedef struct td_metric td_metric_t;

TD_MUST_CHECK td_status_t td_metrics_create(td_metrics_t **out);
void td_metrics_destroy(td_metrics_t *metrics);
/** Declares a series. labels: NULL or e.g. "state=\"free\"" (a closed set, never an id). Series of
 * one name are declared one after the other. Never NULL: past the limit, or out of memory, a spare
 * series is returned that is counted but not shown. Owner: the registry; it copies the name, labels
 * and help are borrowed for ever (literals). */
td_metric_t *td_metrics_counter(td_metrics_t *metrics, const char *name, const char *labels,
                                const char *help);
td_metric_t *td_metrics_gauge(td_metrics_t *metrics, const char *name, const char *labels,
                              const char *help);
/** A counter of time, shown in seconds: td_metric_add() takes ns. */
td_metric_t *td_metrics_seconds(td_metrics_t *metrics, const char *name, const char *labels,
                                const char *help);
/** Histogram over 0.5 ms .. 16 s in factors of two (seconds). */
td_metric_t *td_metrics_histogram(td_metrics_t *metrics, const char *name, const char *labels,
                                  const char *help);
/** The same over 1 us .. 32 ms. */
td_metric_t *td_metrics_histogram_fine(td_metrics_t *metrics, const char *name, const char *labels,
                                       const char *help);
/** Where there is no series (NULL) this and td_metric_set() do nothing. */
void td_metric_add(td_metric_t *metric, uint64_t n);
void td_metric_set(td_metric_t *metric, uint64_t value);
uint64_t td_metric_get(const td_metric_t *metric);
void td_metric_observe_ns(td_metric_t *metric, uint64_t ns);
TD_MUST_CHECK td_status_t td_metrics_render(const td_metrics_t *metrics, td_str_t *out);

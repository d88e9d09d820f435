#include "common/base/td_metrics.h"

#include <stdatomic.h>
#include <string.h>

#include "common/base/td_base.h"

#define BUCKET_NS_FIRST 500000ull /* 0.5 ms; each next one doubles */
#define BUCKET_NS_FIRST_FINE 1000ull

typedef enum metric_kind { KIND_COUNTER, KIND_GAUGE, KIND_HISTOGRAM, KIND_SECONDS } metric_kind_t;

struct td_metric {
    metric_kind_t kind;
    char *name;         /* owned */
    const char *labels; /* borrowed for ever */
    const char *help;   /* borrowed for ever */
    uint64_t first_ns;  /* histogram: limit of the first bucket */
    /* Relaxed: a scrape may see one series a moment older than another. */
    atomic_uint_fast64_t value; /* histogram: count */
    atomic_uint_fast64_t sum_ns;
    atomic_uint_fast64_t buckets[TD_METRICS_BUCKETS];
};

struct td_metrics {
    atomic_uint_fast32_t count; /* release when a series is filled in, acquire by who renders */
    td_metric_t series[TD_METRICS_SERIES_MAX];
    td_metric_t spare;
};

td_status_t td_metrics_create(td_metrics_t **out)
{
    td_metrics_t *metrics = td_calloc(1, sizeof(*metrics));
    if (metrics == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    *out = metrics;
    return TD_OK;
}

void td_metrics_destroy(td_metrics_t *metrics)
{
    if (metrics == NULL) {
        return;
    }
    for (uint32_t i = 0; i < atomic_load_explicit(&metrics->count, memory_order_acquire); i++) {
        td_free(metrics->series[i].name);
    }
    td_free(metrics);
}

static td_metric_t *metric_new(td_metrics_t *metrics, metric_kind_t kind, const char *name,
                               const char *labels, const char *help, uint64_t first_ns)
{
    uint32_t at = (uint32_t)atomic_load_explicit(&metrics->count, memory_order_relaxed);
    char *kept = at < TD_METRICS_SERIES_MAX ? td_strdup(name) : NULL;
    td_metric_t *m = &metrics->spare;

    if (kept != NULL) {
        m = &metrics->series[at];
        m->kind = kind;
        m->name = kept;
        m->labels = labels;
        m->help = help;
        m->first_ns = first_ns;
        /* A store declares when it has joined, and its status page is read by then. */
        atomic_store_explicit(&metrics->count, at + 1, memory_order_release);
    }
    return m;
}

td_metric_t *td_metrics_counter(td_metrics_t *metrics, const char *name, const char *labels,
                                const char *help)
{
    return metric_new(metrics, KIND_COUNTER, name, labels, help, 0);
}

td_metric_t *td_metrics_gauge(td_metrics_t *metrics, const char *name, const char *labels,
                              const char *help)
{
    return metric_new(metrics, KIND_GAUGE, name, labels, help, 0);
}

td_metric_t *td_metrics_seconds(td_metrics_t *metrics, const char *name, const char *labels,
                                const char *help)
{
    return metric_new(metrics, KIND_SECONDS, name, labels, help, 0);
}

td_metric_t *td_metrics_histogram(td_metrics_t *metrics, const char *name, const char *labels,
                                  const char *help)
{
    return metric_new(metrics, KIND_HISTOGRAM, name, labels, help, BUCKET_NS_FIRST);
}

td_metric_t *td_metrics_histogram_fine(td_metrics_t *metrics, const char *name, const char *labels,
                                       const char *help)
{
    return metric_new(metrics, KIND_HISTOGRAM, name, labels, help, BUCKET_NS_FIRST_FINE);
}

void td_metric_add(td_metric_t *metric, uint64_t n)
{
    if (metric != NULL) {
        atomic_fetch_add_explicit(&metric->value, n, memory_order_relaxed);
    }
}

void td_metric_set(td_metric_t *metric, uint64_t value)
{
    if (metric != NULL) {
        atomic_store_explicit(&metric->value, value, memory_order_relaxed);
    }
}

uint64_t td_metric_get(const td_metric_t *metric)
{
    return atomic_load_explicit(&metric->value, memory_order_relaxed);
}

void td_metric_observe_ns(td_metric_t *metric, uint64_t ns)
{
    uint64_t limit = metric->first_ns;
    for (uint32_t i = 0; i < TD_METRICS_BUCKETS; i++, limit *= 2) {
        if (ns <= limit) {
            atomic_fetch_add_explicit(&metric->buckets[i], 1, memory_order_relaxed);
            break;
        }
    }
    atomic_fetch_add_explicit(&metric->sum_ns, ns, memory_order_relaxed);
    td_metric_add(metric, 1);
}

static td_status_t render_histogram(const td_metric_t *m, td_str_t *out)
{
    const char *labels = m->labels != NULL ? m->labels : "";
    const char *comma = m->labels != NULL ? "," : "";
    const char *open = m->labels != NULL ? "{" : "";
    const char *close = m->labels != NULL ? "}" : "";
    uint64_t limit = m->first_ns;
    uint64_t total = 0;

    for (uint32_t i = 0; i < TD_METRICS_BUCKETS; i++, limit *= 2) {
        total += atomic_load_explicit(&m->buckets[i], memory_order_relaxed);
        TD_TRY(td_str_printf(out, "%s_bucket{%s%sle=\"%g\"} %llu\n", m->name, labels, comma,
                             (double)limit / 1e9, (unsigned long long)total));
    }
    TD_TRY(td_str_printf(out, "%s_bucket{%s%sle=\"+Inf\"} %llu\n", m->name, labels, comma,
                         (unsigned long long)td_metric_get(m)));
    TD_TRY(td_str_printf(out, "%s_sum%s%s%s %.9f\n", m->name, open, labels, close,
                         (double)atomic_load_explicit(&m->sum_ns, memory_order_relaxed) / 1e9));
    return td_str_printf(out, "%s_count%s%s%s %llu\n", m->name, open, labels, close,
                         (unsigned long long)td_metric_get(m));
}

static td_status_t render_value(const td_metric_t *m, td_str_t *out)
{
    const char *open = m->labels != NULL ? "{" : "";
    const char *labels = m->labels != NULL ? m->labels : "";
    const char *close = m->labels != NULL ? "}" : "";
    const uint64_t value = td_metric_get(m);

    if (m->kind == KIND_SECONDS) {
        return td_str_printf(out, "%s%s%s%s %.9f\n", m->name, open, labels, close,
                             (double)value / 1e9);
    }
    return td_str_printf(out, "%s%s%s%s %llu\n", m->name, open, labels, close,
                         (unsigned long long)value);
}

td_status_t td_metrics_render(const td_metrics_t *metrics, td_str_t *out)
{
    static const char *const kinds[] = {"counter", "gauge", "histogram", "counter"};
    const char *family = "";
    uint32_t count = (uint32_t)atomic_load_explicit(&metrics->count, memory_order_acquire);

    for (uint32_t i = 0; i < count; i++) {
        const td_metric_t *m = &metrics->series[i];
        if (strcmp(family, m->name) != 0) {
            family = m->name;
            TD_TRY(td_str_printf(out, "# HELP %s %s\n# TYPE %s %s\n", m->name, m->help, m->name,
                                 kinds[m->kind]));
        }
        if (m->kind == KIND_HISTOGRAM) {
            TD_TRY(render_histogram(m, out));
        } else {
            TD_TRY(render_value(m, out));
        }
    }
    return TD_OK;
}

#include "tests/bench/bench_samples.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"

void bench_samples_fini(bench_samples_t *samples)
{
    td_free(samples->ms);
    *samples = (bench_samples_t){0};
}

void bench_samples_add_ns(bench_samples_t *samples, uint64_t ns)
{
    if (samples->count == samples->cap) {
        size_t cap = TD_MAX(1024, samples->cap * 2);
        float *ms = cap > BENCH_SAMPLES_MAX ? NULL : td_realloc(samples->ms, cap * sizeof(*ms));
        if (ms == NULL) {
            samples->dropped++;
            return;
        }
        samples->ms = ms;
        samples->cap = cap;
    }
    samples->ms[samples->count++] = (float)((double)ns / (double)TD_NS_PER_MS);
}

static int compare(const void *a, const void *b)
{
    float x = *(const float *)a;
    float y = *(const float *)b;
    return x < y ? -1 : x > y ? 1 : 0;
}

double bench_samples_percentile(bench_samples_t *samples, double percent)
{
    double rank = ceil(percent / 100 * (double)samples->count);

    if (samples->count == 0) {
        return 0;
    }
    qsort(samples->ms, samples->count, sizeof(*samples->ms), compare);
    return (double)samples->ms[rank < 1 ? 0 : (size_t)rank - 1];
}

void bench_samples_report(bench_samples_t *samples, const char *name, const uint32_t *percents,
                          json_t *figures)
{
    for (; *percents != 0 && samples->count > 0; percents++) {
        char key[64];
        (void)snprintf(key, sizeof(key), "%s_p%u", name, *percents);
        (void)json_object_set_new(figures, key,
                                  json_real(bench_samples_percentile(samples, *percents)));
    }
}

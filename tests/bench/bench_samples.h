/* bench_samples.h - times of one kind, and their percentiles.
 * Threads: owner. */
#pragma once

#include <jansson.h>
#include <stddef.h>
#include <stdint.h>

#define BENCH_SAMPLES_MAX (16u * 1024u * 1024u)

typedef struct bench_samples {
    float *ms; /* owned */
    size_t count;
    size_t cap;
    size_t dropped; /* past BENCH_SAMPLES_MAX, or without memory */
} bench_samples_t;

void bench_samples_fini(bench_samples_t *samples);
void bench_samples_add_ns(bench_samples_t *samples, uint64_t ns);
/** Nearest rank; sorts the samples. 0 without samples. Units: percent in 0..100. */
double bench_samples_percentile(bench_samples_t *samples, double percent);
/** Sets <name>_p<percent> for each of the percents, a list that ends with 0; nothing without
 * samples.
 */
void bench_samples_report(bench_samples_t *samples, const char *name, const uint32_t *percents,
                          json_t *figures);

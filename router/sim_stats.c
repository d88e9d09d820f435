#include "router/sim_stats.h"

#include <math.h>
#include <stdlib.h>

#include "common/base/td_base.h"

td_status_t sim_samples_create(uint32_t cap, sim_samples_t *out)
{
    double *values = td_alloc(cap * sizeof(*values));

    if (values == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    *out = (sim_samples_t){.values = values, .cap = cap};
    return TD_OK;
}

void sim_samples_add(sim_samples_t *s, double value)
{
    if (s->count < s->cap) {
        s->values[s->count++] = value;
        s->sum += value;
    }
}

double sim_samples_mean(const sim_samples_t *s)
{
    return s->count > 0 ? s->sum / s->count : 0;
}

static int compare(const void *a, const void *b)
{
    const double x = *(const double *)a;
    const double y = *(const double *)b;
    return (x > y) - (x < y);
}

double sim_samples_at(sim_samples_t *s, double share)
{
    const double rank = ceil(share * s->count);

    if (s->count == 0) {
        return 0;
    }
    qsort(s->values, s->count, sizeof(*s->values), compare);
    return s->values[(uint32_t)fmax(rank, 1) - 1];
}

void sim_samples_fini(sim_samples_t *s)
{
    td_free(s->values);
    *s = (sim_samples_t){0};
}

#include "router/sim_sweep.h"

#include <stdio.h>
#include <stdlib.h>

#include "common/base/td_base.h"

static bool read_number(const char **at, uint32_t *out)
{
    char *end = NULL;
    const unsigned long value = strtoul(*at, &end, 10);

    if (end == *at || **at < '0' || **at > '9' || value < 1 || value > SIM_NODES_MAX) {
        return false;
    }
    *at = end;
    *out = (uint32_t)value;
    return true;
}

td_status_t sim_range_parse(const char *text, sim_range_t *out)
{
    sim_range_t range = {.step = 1};
    const char *at = text;
    bool ok = read_number(&at, &range.first);

    range.last = range.first;
    if (ok && *at == ':') {
        at++;
        ok = read_number(&at, &range.last);
    }
    if (ok && *at == ':') {
        at++;
        ok = read_number(&at, &range.step);
    }
    if (!ok || *at != '\0' || range.last < range.first) {
        return TD_ERR_INVALID;
    }
    *out = range;
    return TD_OK;
}

uint32_t sim_range_count(const sim_range_t *range)
{
    return (range->last - range->first) / range->step + 1;
}

static uint32_t value_at(const sim_range_t *range, uint32_t at)
{
    return range->first + at * range->step;
}

static double share_at(const sim_sweep_t *s, uint32_t p, uint32_t d)
{
    return s->shares[p * sim_range_count(&s->decode) + d];
}

/* The fewest nodes; of as many those with the greater share. */
static void choose(sim_sweep_t *s)
{
    double best_share = 0;

    for (uint32_t p = 0; p < sim_range_count(&s->prefill); p++) {
        for (uint32_t d = 0; d < sim_range_count(&s->decode); d++) {
            const uint32_t nodes = value_at(&s->prefill, p) + value_at(&s->decode, d);
            const uint32_t best = s->best_prefill + s->best_decode;
            const double share = share_at(s, p, d);
            if (share >= s->share &&
                (best == 0 || nodes < best || (nodes == best && share > best_share))) {
                s->best_prefill = value_at(&s->prefill, p);
                s->best_decode = value_at(&s->decode, d);
                best_share = share;
            }
        }
    }
}

td_status_t sim_sweep_run(sim_sweep_t *s, const sim_config_t *config, const sim_trace_t *trace,
                          void *ctx, void (*progress)(void *ctx, uint32_t done, uint32_t count))
{
    const uint32_t decodes = sim_range_count(&s->decode);
    const uint32_t cells = sim_range_count(&s->prefill) * decodes;
    sim_config_t cell = *config;

    s->shares = NULL;
    s->best_prefill = 0;
    s->best_decode = 0;
    if (cells > SIM_SWEEP_CELLS_MAX) {
        return TD_ERR_INVALID;
    }
    s->shares = td_calloc(cells, sizeof(*s->shares));
    if (s->shares == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    cell.progress = NULL;
    for (uint32_t i = 0; i < cells; i++) {
        sim_result_t result;
        cell.prefill_count = value_at(&s->prefill, i / decodes);
        cell.decode_count = value_at(&s->decode, i % decodes);
        TD_TRY(sim_run(&cell, trace, &result));
        s->shares[i] = (double)result.good / result.requests;
        if (progress != NULL) {
            progress(ctx, i + 1, cells);
        }
    }
    choose(s);
    return TD_OK;
}

td_status_t sim_sweep_table(const sim_sweep_t *s, td_str_t *out)
{
    TD_TRY(td_str_append_text(out, "% of requests within the SLO; rows: prefill nodes, columns: "
                                   "decode nodes\n\n        "));
    for (uint32_t d = 0; d < sim_range_count(&s->decode); d++) {
        TD_TRY(td_str_printf(out, " %7u", value_at(&s->decode, d)));
    }
    for (uint32_t p = 0; p < sim_range_count(&s->prefill); p++) {
        TD_TRY(td_str_printf(out, "\n%8u", value_at(&s->prefill, p)));
        for (uint32_t d = 0; d < sim_range_count(&s->decode); d++) {
            TD_TRY(td_str_printf(out, " %6.1f%s", 100 * share_at(s, p, d),
                                 share_at(s, p, d) >= s->share ? "*" : " "));
        }
    }
    if (s->best_prefill == 0) {
        return td_str_printf(out, "\n\nnone of these has %.1f %% within the SLO\n", 100 * s->share);
    }
    return td_str_printf(out,
                         "\n\nthe fewest nodes with %.1f %% within the SLO: %u prefill, %u "
                         "decode\n",
                         100 * s->share, s->best_prefill, s->best_decode);
}

td_status_t sim_sweep_json(const sim_sweep_t *s, td_str_t *out)
{
    const uint32_t decodes = sim_range_count(&s->decode);
    const uint32_t cells = sim_range_count(&s->prefill) * decodes;

    TD_TRY(td_str_printf(out, "{\"share\": %.6g, \"prefill\": %u, \"decode\": %u, \"cells\": [",
                         s->share, s->best_prefill, s->best_decode));
    for (uint32_t i = 0; i < cells; i++) {
        TD_TRY(td_str_printf(out, "%s{\"prefill\": %u, \"decode\": %u, \"share\": %.6g}",
                             i > 0 ? ", " : "", value_at(&s->prefill, i / decodes),
                             value_at(&s->decode, i % decodes), s->shares[i]));
    }
    return td_str_append_text(out, "]}\n");
}

td_status_t sim_sweep_plot(const sim_sweep_t *s, const char *image, td_str_t *out)
{
    TD_TRY(td_str_printf(out,
                         "set terminal pngcairo size 900,600\nset output '%s'\n"
                         "set xlabel 'decode nodes'\nset ylabel '%% within the SLO'\n"
                         "set key bottom right\nset grid\nset yrange [0:105]\n$shares << END\n",
                         image));
    for (uint32_t d = 0; d < sim_range_count(&s->decode); d++) {
        TD_TRY(td_str_printf(out, "%u", value_at(&s->decode, d)));
        for (uint32_t p = 0; p < sim_range_count(&s->prefill); p++) {
            TD_TRY(td_str_printf(out, " %.3f", 100 * share_at(s, p, d)));
        }
        TD_TRY(td_str_append_text(out, "\n"));
    }
    TD_TRY(td_str_append_text(out, "END\nplot "));
    for (uint32_t p = 0; p < sim_range_count(&s->prefill); p++) {
        TD_TRY(td_str_printf(out, "$shares using 1:%u with linespoints title '%u prefill', \\\n",
                             p + 2, value_at(&s->prefill, p)));
    }
    return td_str_printf(out, "    %.3f with lines dashtype 2 title 'wanted'\n", 100 * s->share);
}

void sim_sweep_fini(sim_sweep_t *s)
{
    td_free(s->shares);
    s->shares = NULL;
}

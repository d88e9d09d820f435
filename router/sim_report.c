#include "router/sim_report.h"

#include <stddef.h>

#include "common/base/td_base.h"

static const struct {
    const char *name;
    size_t at;
    bool is_count;
} fields[] = {
    {"requests", offsetof(sim_result_t, requests), true},
    {"completed", offsetof(sim_result_t, completed), true},
    {"rejected", offsetof(sim_result_t, rejected), true},
    {"failed", offsetof(sim_result_t, failed), true},
    {"moved", offsetof(sim_result_t, moved), true},
    {"good", offsetof(sim_result_t, good), true},
    {"hit_rate", offsetof(sim_result_t, hit_rate), false},
    {"hit_rate_pulled", offsetof(sim_result_t, hit_rate_pulled), false},
    {"hit_rate_infinite", offsetof(sim_result_t, hit_rate_infinite), false},
    {"load_max_over_mean", offsetof(sim_result_t, load_max_over_mean), false},
    {"prefill_busy", offsetof(sim_result_t, prefill_busy), false},
    {"ttft_mean_s", offsetof(sim_result_t, ttft_mean_s), false},
    {"ttft_p50_s", offsetof(sim_result_t, ttft_p50_s), false},
    {"ttft_p90_s", offsetof(sim_result_t, ttft_p90_s), false},
    {"ttft_p99_s", offsetof(sim_result_t, ttft_p99_s), false},
    {"tbt_mean_s", offsetof(sim_result_t, tbt_mean_s), false},
    {"tbt_p90_s", offsetof(sim_result_t, tbt_p90_s), false},
    {"goodput_rps", offsetof(sim_result_t, goodput_rps), false},
    {"retry_after_mean_s", offsetof(sim_result_t, retry_after_mean_s), false},
    {"ttft_error", offsetof(sim_result_t, ttft_error), false},
    {"span_s", offsetof(sim_result_t, span_s), false},
    {"pulled_gb", offsetof(sim_result_t, pulled_gb), false},
};

static td_status_t field_json(const sim_result_t *r, size_t i, td_str_t *out)
{
    const char *at = (const char *)r + fields[i].at;

    if (fields[i].is_count) {
        return td_str_printf(out, ", \"%s\": %u", fields[i].name,
                             *(const uint32_t *)(const void *)at);
    }
    return td_str_printf(out, ", \"%s\": %.6g", fields[i].name, *(const double *)(const void *)at);
}

td_status_t sim_report_json(const sim_row_t *row, bool timing, td_str_t *out)
{
    TD_TRY(td_str_printf(out, "{\"policy\": \"%s\"", row->policy));
    for (size_t i = 0; i < TD_ARRAY_LEN(fields); i++) {
        TD_TRY(field_json(&row->result, i, out));
    }
    if (timing) {
        TD_TRY(td_str_printf(out, ", \"place_us_p50\": %.3f, \"place_us_p99\": %.3f",
                             row->result.place_us_p50, row->result.place_us_p99));
    }
    return td_str_append_text(out, "}\n");
}

static td_status_t table_row(const sim_row_t *row, const sim_config_t *config, td_str_t *out)
{
    const sim_result_t *r = &row->result;

    TD_TRY(td_str_printf(out, "%-12s %7.2f %8.2f %9.3f %9.3f %9.3f %8.1f %8.1f", row->policy,
                         100 * r->hit_rate, 100 * r->hit_rate_pulled, r->load_max_over_mean,
                         r->ttft_mean_s, r->ttft_p90_s, 1000 * r->tbt_mean_s, 1000 * r->tbt_p90_s));
    TD_TRY(td_str_printf(out, " %8.3f %9u %7u", r->goodput_rps, r->rejected, r->failed));
    if (config->timing) {
        TD_TRY(td_str_printf(out, " %10.1f %8.1f", r->place_us_p50, r->place_us_p99));
    }
    return td_str_append_text(out, "\n");
}

td_status_t sim_report_table(const sim_row_t *rows, uint32_t count, const sim_config_t *config,
                             td_str_t *out)
{
    TD_TRY(td_str_printf(out,
                         "%u requests in %.0f s; %u prefill nodes with caches of %llu tokens, %u "
                         "decode nodes\n"
                         "a cache without end would hit %.2f %% of the blocks\n\n",
                         rows[0].result.requests, rows[0].result.span_s, config->prefill_count,
                         (unsigned long long)config->node_cache_tokens, config->decode_count,
                         100 * rows[0].result.hit_rate_infinite));
    TD_TRY(td_str_printf(out, "%-12s %7s %8s %9s %9s %9s %8s %8s %8s %9s %7s%s\n", "policy",
                         "hits %", "+pulled", "load/mean", "TTFT s", "p90 s", "TBT ms", "p90 ms",
                         "good/s", "rejected", "failed",
                         config->timing ? "  place us      p99" : ""));
    for (uint32_t i = 0; i < count; i++) {
        TD_TRY(table_row(&rows[i], config, out));
    }
    return TD_OK;
}

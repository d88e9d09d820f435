/* tandem-sim: a cluster in discrete events, placed and admitted by the router's own code. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/base/td_config.h"
#include "common/base/td_log.h"
#include "router/sim_report.h"
#include "router/sim_sweep.h"

#define POOLED "pooled"
#define ALL "all"

static const td_option_t options[] = {
    {"trace", TD_OPTION_TEXT, NULL, "requests, one JSON object a line (needed)"},
    {"policy", TD_OPTION_CHOICE, "kv_aware",
     "placement; pooled: one cache of the total size, the bound; all: a table of all", 0, 0,
     RTR_POLICY_NAMES "|" POOLED "|" ALL},
    {"prefill", TD_OPTION_COUNT, "10", "prefill nodes", 1, SIM_NODES_MAX},
    {"decode", TD_OPTION_COUNT, "10", "decode nodes", 1, SIM_NODES_MAX},
    {"node-cache-tokens", TD_OPTION_COUNT, "3000000", "prefix cache of a prefill node", 0,
     1u << 31},
    {"store-tokens", TD_OPTION_COUNT, "0", "shared store; 0 = none, nodes pull from each other", 0,
     1ull << 40},
    {"block-tokens", TD_OPTION_COUNT, "512", "tokens of the blocks that the trace names", 1, 65536},
    {"preset", TD_OPTION_CHOICE, "llama70b-8xa800", "what nodes are", 0, 0, SIM_PRESET_NAMES},
    {"calibration", TD_OPTION_TEXT, NULL, "JSON file of node parameters (below, with _ for -)"},
    {"prefill-prompt-ms", TD_OPTION_TEXT, NULL, "prefill time of each prompt [preset]"},
    {"prefill-token-us", TD_OPTION_TEXT, NULL, "of each computed token [preset]"},
    {"prefill-pair-ns", TD_OPTION_TEXT, NULL, "of each token that a computed one sees [preset]"},
    {"decode-step-ms", TD_OPTION_TEXT, NULL, "decode time of each step [preset]"},
    {"decode-sequence-us", TD_OPTION_TEXT, NULL, "of each sequence in it [preset]"},
    {"decode-kv-token-ns", TD_OPTION_TEXT, NULL, "of each token of context in it [preset]"},
    {"decode-kv-tokens", TD_OPTION_TEXT, NULL, "tokens that a decode node has room for [preset]"},
    {"kv-token-bytes", TD_OPTION_TEXT, NULL, "KV of a token [preset]"},
    {"layers", TD_OPTION_TEXT, NULL, "layers of the model [preset]"},
    {"link-gb-s", TD_OPTION_TEXT, NULL, "a node's link, each way, 10^9 bytes a second [preset]"},
    {"arrivals", TD_OPTION_CHOICE, "recorded",
     "spread: those of one instant until the next; poisson: of the mean rate", 0, 0,
     "recorded|spread|poisson"},
    {"rate-scale", TD_OPTION_TEXT, "1", "times as many requests a second"},
    {"requests", TD_OPTION_COUNT, "0",
     "how many; the trace again with other blocks if more; 0 = all", 0, SIM_REQUESTS_MAX},
    {"slo-ttft-ms", TD_OPTION_COUNT, "0", "time to first token that is good; 0 = any", 0, 1u << 30},
    {"slo-tbt-ms", TD_OPTION_COUNT, "0", "mean time between tokens that is good; 0 = any", 0,
     1u << 30},
    {"admission", TD_OPTION_BOOL, "false", "refuse early what is predicted to break the SLO"},
    {"keep-local", TD_OPTION_TEXT, NULL,
     "how much more a pulled token costs than its transfer, in times of its computation [4.5]"},
    {"index", TD_OPTION_CHOICE, "hints",
     "hints: the router knows what it has placed; events: what each node has", 0, 0,
     "hints|events"},
    {"hints-max", TD_OPTION_COUNT, "0", "blocks that the router knows of; 0 = as many as there are",
     0, 1u << 24},
    {"fail", TD_OPTION_TEXT, NULL,
     "failures, by comma: SECONDS:p0|d0[:SECONDS], down and up again"},
    {"seed", TD_OPTION_COUNT, "1", "of arrivals and of the policy random", 0, 0},
    {"timing", TD_OPTION_BOOL, "false", "measure how long placing takes"},
    {"sweep", TD_OPTION_BOOL, "false", "how many nodes are needed: a run for each pair of counts"},
    {"sweep-prefill", TD_OPTION_TEXT, "1:16", "counts of prefill nodes, A:B[:STEP]"},
    {"sweep-decode", TD_OPTION_TEXT, "1:16", "counts of decode nodes, A:B[:STEP]"},
    {"sweep-percent", TD_OPTION_COUNT, "90", "of requests that must be within the SLO", 1, 100},
    {"plot", TD_OPTION_TEXT, NULL, "write a sweep's plot, a script for gnuplot, to this file"},
    {"json", TD_OPTION_BOOL, "false", "one JSON object instead of a table"},
    {"progress", TD_OPTION_CHOICE, "auto", "on standard error; auto: when it is a terminal", 0, 0,
     "auto|on|off"},
};

typedef struct app {
    td_config_t *options;
    sim_config_t config;
    sim_load_t load;
    sim_trace_t recorded;
    sim_trace_t trace;
    sim_fault_t faults[SIM_FAULTS_MAX];
    sim_sweep_t sweep;
    const char *label; /* of the progress */
    bool shows;
} app_t;

static int complain(const char *what, const char *why)
{
    (void)fprintf(stderr, "tandem-sim: %s: %s\n", what, why);
    return -1;
}

static void on_progress(void *ctx, uint32_t done, uint32_t count)
{
    const app_t *app = ctx;

    if (app->shows) {
        (void)fprintf(stderr, "\r%-14s %u/%u ", app->label, done, count);
    }
}

static void progress_end(const app_t *app)
{
    if (app->shows) {
        (void)fprintf(stderr, "\r%40s\r", "");
    }
}

static int read_double(const app_t *app, const char *name, double min, double max, double *out)
{
    const char *text = td_config_text(app->options, name);
    char *end = NULL;
    char why[80];
    double value = 0;

    if (text == NULL) {
        return 0;
    }
    value = strtod(text, &end);
    if (end == text || *end != '\0' || !(value >= min && value <= max)) {
        (void)snprintf(why, sizeof(why), "must be a number of %g to %g", min, max);
        return complain(name, why);
    }
    *out = value;
    return 0;
}

static int read_model(app_t *app)
{
    const char *file = td_config_text(app->options, "calibration");
    char why[SIM_MODEL_WHY_CHARS_MAX + 1];

    TD_ASSERT(sim_model_preset(td_config_text(app->options, "preset"), &app->config.model) ==
              TD_OK); /* one of the choices */
    if (file != NULL && sim_model_load(&app->config.model, file, why) != TD_OK) {
        return complain(file, why);
    }
    for (uint32_t i = 0; i < SIM_MODEL_FIELDS; i++) {
        char name[40];
        double value = NAN;
        (void)snprintf(name, sizeof(name), "%s", sim_model_field(i));
        for (char *at = name; *at != '\0'; at++) {
            *at = *at == '_' ? '-' : *at;
        }
        if (read_double(app, name, -INFINITY, INFINITY, &value) != 0) {
            return -1;
        }
        if (!isnan(value) && sim_model_set(&app->config.model, i, value, why) != TD_OK) {
            return complain(name, why);
        }
    }
    return 0;
}

/* SECONDS:p0|d0[:SECONDS] */
static bool read_fault(const app_t *app, const char *text, sim_fault_t *out)
{
    double at_s = 0;
    double up_s = -1;
    char role = 0;
    uint32_t node = 0;
    int used = 0;
    const int read = sscanf(text, "%lf:%c%u%n:%lf%n", &at_s, &role, &node, &used, &up_s, &used);
    const uint32_t count = role == 'p' ? app->config.prefill_count : app->config.decode_count;

    if (read < 3 || text[used] != '\0' || (role != 'p' && role != 'd') || node >= count ||
        !(at_s >= 0 && at_s <= 1e9) || (read == 4 && !(up_s >= at_s && up_s <= 1e9))) {
        return false;
    }
    *out = (sim_fault_t){.at_ns = (uint64_t)(at_s * (double)TD_NS_PER_S),
                         .up_ns = read == 4 ? (uint64_t)(up_s * (double)TD_NS_PER_S) : UINT64_MAX,
                         .is_prefill = role == 'p',
                         .node = node};
    return true;
}

static int read_faults(app_t *app)
{
    const char *list = td_config_text(app->options, "fail");
    char text[64];

    while (list != NULL && *list != '\0') {
        const size_t len = strcspn(list, ",");
        (void)snprintf(text, sizeof(text), "%.*s", (int)TD_MIN(len, sizeof(text) - 1), list);
        if (app->config.fault_count >= SIM_FAULTS_MAX ||
            !read_fault(app, text, &app->faults[app->config.fault_count])) {
            return complain("fail", "SECONDS:p0|d0[:SECONDS] of nodes that there are, by comma");
        }
        app->config.fault_count++;
        list += len + (list[len] == ',');
    }
    app->config.faults = app->faults;
    return 0;
}

static int read_sweep(app_t *app)
{
    const td_config_t *o = app->options;

    app->sweep.share = (double)td_config_u64(o, "sweep-percent") / 100;
    if (sim_range_parse(td_config_text(o, "sweep-prefill"), &app->sweep.prefill) != TD_OK ||
        sim_range_parse(td_config_text(o, "sweep-decode"), &app->sweep.decode) != TD_OK ||
        sim_range_count(&app->sweep.prefill) * sim_range_count(&app->sweep.decode) >
            SIM_SWEEP_CELLS_MAX) {
        return complain("sweep", "ranges are A:B[:STEP] of 1 to 4096, 1024 pairs at most");
    }
    if (td_config_bool(o, "sweep") &&
        (strcmp(td_config_text(o, "policy"), ALL) == 0 || app->config.fault_count > 0)) {
        return complain("sweep", "takes one policy, and no failures");
    }
    return 0;
}

static int read_options(app_t *app)
{
    const td_config_t *o = app->options;
    const char *progress = td_config_text(o, "progress");
    const char *arrivals = td_config_text(o, "arrivals");

    app->shows = progress[1] == 'n' || (progress[0] == 'a' && isatty(STDERR_FILENO));
    app->load = (sim_load_t){.arrivals = arrivals[0] == 's'   ? SIM_ARRIVALS_SPREAD
                                         : arrivals[0] == 'p' ? SIM_ARRIVALS_POISSON
                                                              : SIM_ARRIVALS_RECORDED,
                             .rate_scale = 1,
                             .requests_max = (uint32_t)td_config_u64(o, "requests"),
                             .seed = td_config_u64(o, "seed")};
    app->config = (sim_config_t){
        .exact_index = strcmp(td_config_text(o, "index"), "events") == 0,
        .admission = td_config_bool(o, "admission"),
        .slo = {.ttft_ms = (uint32_t)td_config_u64(o, "slo-ttft-ms"),
                .tbt_ms = (uint32_t)td_config_u64(o, "slo-tbt-ms")},
        .keep_local = RTR_KEEP_LOCAL_DEFAULT,
        .prefill_count = (uint32_t)td_config_u64(o, "prefill"),
        .decode_count = (uint32_t)td_config_u64(o, "decode"),
        .node_cache_tokens = td_config_u64(o, "node-cache-tokens"),
        .store_tokens = td_config_u64(o, "store-tokens"),
        .hints_max = (uint32_t)td_config_u64(o, "hints-max"),
        .seed = td_config_u64(o, "seed"),
        .timing = td_config_bool(o, "timing"),
        .ctx = app,
        .progress = on_progress,
    };
    if (read_double(app, "rate-scale", 1e-6, 1e6, &app->load.rate_scale) != 0 ||
        read_double(app, "keep-local", 0, 1e6, &app->config.keep_local) != 0 ||
        read_model(app) != 0 || read_faults(app) != 0) {
        return -1;
    }
    return read_sweep(app);
}

static int read_trace(app_t *app)
{
    const char *path = td_config_text(app->options, "trace");
    char why[SIM_WHY_CHARS_MAX + 1];

    if (path == NULL) {
        return complain("trace", "--trace FILE is needed");
    }
    if (sim_trace_load(path, (uint32_t)td_config_u64(app->options, "block-tokens"), &app->recorded,
                       why) != TD_OK) {
        return complain(path, why);
    }
    switch (sim_trace_shape(&app->recorded, &app->load, &app->trace)) {
    case TD_OK:
        return 0;
    case TD_ERR_TOO_LARGE:
        return complain(path, "at this rate it would last for more than a hundred years");
    default:
        return complain(path, "out of memory");
    }
}

static void set_policy(app_t *app, const char *name)
{
    app->label = name;
    app->config.pooled = strcmp(name, POOLED) == 0;
    app->config.policy = RTR_POLICY_KV_AWARE;
    if (!app->config.pooled) {
        TD_ASSERT(rtr_policy_parse(name, &app->config.policy) == TD_OK); /* one of the choices */
    }
}

static int run_policies(app_t *app, td_str_t *out)
{
    const char *chosen = td_config_text(app->options, "policy");
    const bool json = td_config_bool(app->options, "json");
    sim_row_t rows[RTR_POLICIES + 1];
    uint32_t count = 0;
    double infinite = 0;
    td_status_t status = sim_trace_bound(&app->trace, &infinite);

    for (uint32_t i = 0; i <= RTR_POLICIES && status == TD_OK; i++) {
        const char *name = i < RTR_POLICIES ? rtr_policy_name((rtr_policy_t)i) : POOLED;
        if (strcmp(chosen, ALL) != 0 && strcmp(chosen, name) != 0) {
            continue;
        }
        set_policy(app, name);
        rows[count].policy = name;
        status = sim_run(&app->config, &app->trace, &rows[count].result);
        rows[count].result.hit_rate_infinite = infinite;
        if (status == TD_OK && json) {
            status = sim_report_json(&rows[count], app->config.timing, out);
        }
        count++;
    }
    progress_end(app);
    if (status == TD_OK && !json) {
        status = sim_report_table(rows, count, &app->config, out);
    }
    return status == TD_OK ? 0 : complain("not simulated", td_status_name(status));
}

static int write_plot(const sim_sweep_t *sweep, const char *path)
{
    td_str_t text = {0};
    td_str_t image = {0};
    FILE *file = NULL;
    int rc = -1;

    if (td_str_printf(&image, "%s.png", path) == TD_OK &&
        sim_sweep_plot(sweep, image.bytes, &text) == TD_OK) {
        file = fopen(path, "w");
    }
    if (file != NULL) {
        rc = fwrite(text.bytes, 1, text.len, file) == text.len ? 0 : -1;
        rc = fclose(file) == 0 ? rc : -1;
    }
    td_str_fini(&text);
    td_str_fini(&image);
    return rc == 0 ? 0 : complain(path, "cannot be written");
}

static int run_sweep(app_t *app, td_str_t *out)
{
    const td_config_t *o = app->options;
    const char *plot = td_config_text(o, "plot");
    sim_sweep_t *sweep = &app->sweep;
    td_status_t status = TD_OK;
    int rc = 0;

    set_policy(app, td_config_text(o, "policy"));
    app->label = "sweep";
    status = sim_sweep_run(sweep, &app->config, &app->trace, app, on_progress);
    progress_end(app);
    if (status == TD_OK) {
        status =
            td_config_bool(o, "json") ? sim_sweep_json(sweep, out) : sim_sweep_table(sweep, out);
    }
    rc = status == TD_OK ? 0 : complain("not simulated", td_status_name(status));
    if (rc == 0 && plot != NULL) {
        rc = write_plot(sweep, plot);
    }
    sim_sweep_fini(sweep);
    return rc;
}

int main(int argc, char **argv)
{
    static app_t app;
    td_str_t out = {0};
    td_config_next_t next = TD_CONFIG_RUN;
    int rc = 0;

    td_log_init("tandem-sim", TD_LOG_LEVEL_WARN);
    next = td_config_parse("tandem-sim",
                           "Simulates a cluster on recorded requests, with the router's own code.",
                           options, TD_ARRAY_LEN(options), argc, argv, &app.options);
    if (next != TD_CONFIG_RUN) {
        td_config_destroy(app.options);
        return next == TD_CONFIG_EXIT_USAGE ? 2 : 0;
    }
    if (read_options(&app) != 0 || read_trace(&app) != 0) {
        rc = 2;
    } else {
        rc =
            td_config_bool(app.options, "sweep") ? run_sweep(&app, &out) : run_policies(&app, &out);
        rc = rc == 0 ? 0 : 1;
    }
    if (rc == 0 && fwrite(out.bytes, 1, out.len, stdout) != out.len) {
        rc = 1;
    }
    td_str_fini(&out);
    sim_trace_fini(&app.trace);
    sim_trace_fini(&app.recorded);
    td_config_destroy(app.options);
    return rc;
}

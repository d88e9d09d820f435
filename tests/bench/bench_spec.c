/* tandem-bench spec - what each drafter is worth: tokens a second relative to none.
 *
 * A real cluster without a store; prompts of four kinds, so many at once, greedy and of a fixed
 * length. A cell is a kind, a drafter and a batch. Cells take turns: a round runs every drafter of
 * a kind and a batch one right after the other, whoever began last time comes last, and of the
 * rounds each wave's best counts. Prompts are computed before, so that only decoding is timed: from
 * the first token that comes to the last.
 *
 * Of "hot" each cell has asked everything once before it counts. Elsewhere nothing that was
 * answered before may help: each run has a salt of its own. */
#include <jansson.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/spec/td_draft.h"
#include "tests/bench/bench.h"
#include "tests/bench/bench_cluster.h"
#include "tests/bench/bench_options.h"
#include "tests/bench/bench_spec_prompts.h"
#include "tests/bench/bench_stream.h"

#define SPEC_BATCH_MAX 64u
#define SPEC_BATCHES_MAX 8u
#define SPEC_REQUESTS_MIN 4u /* of a cell: one text says little */
#define SPEC_WAVES_MAX SPEC_REQUESTS_MIN
#define SPEC_DRAFTERS (TD_DRAFTER_KINDS + 1u)
#define SPEC_AUTO TD_DRAFTER_KINDS /* behind the drafters themselves */
#define SPEC_TIMEOUT_MS 300000u

typedef struct spec_options {
    const char *model;
    const char *heads; /* NULL: none */
    const char *local_sh;
    char bin[PATH_MAX];
    bool kinds[SPEC_KINDS];
    bool drafters[SPEC_DRAFTERS];
    uint32_t batches[SPEC_BATCHES_MAX];
    uint32_t batch_count;
    uint32_t tokens;
    uint32_t repeat;
    bool json;
} spec_options_t;

typedef struct cell {
    bool begun;
    uint64_t tokens;                  /* of one round, without first ones */
    uint64_t best_ns[SPEC_WAVES_MAX]; /* of each wave */
    uint64_t accepted;                /* of all rounds */
    uint64_t rejected;
    uint64_t steps;
} cell_t;

typedef struct spec {
    const spec_options_t *options;
    bench_cluster_t cluster;
    char *model_name;
    CURLM *multi;
    bench_stream_t streams[SPEC_BATCH_MAX];
    uint32_t stream_count;
    uint32_t salts; /* so far */
    cell_t cells[SPEC_KINDS][SPEC_BATCHES_MAX][SPEC_DRAFTERS];
} spec_t;

static void print_help(void)
{
    (void)puts(
        "Usage: tandem-bench spec --model FILE [options]\n"
        "\n"
        "Starts a cluster and measures decoding with each drafter, relative to none: free answers\n"
        "(chat), texts repeated (copy), programs edited (code), and questions that were asked\n"
        "before (hot). Reports tokens a second, the part of the drafts that was accepted, and how\n"
        "many of them a step brought in the mean.\n"
        "\n"
        "Options:\n"
        "  --model FILE      GGUF file (required)\n"
        "  --kinds LIST      of chat,copy,code,hot; default all\n"
        "  --drafters LIST   of auto, " TD_DRAFTER_NAMES ", with commas between;\n"
        "                    default all; none is always measured\n"
        "  --medusa-heads FILE\n"
        "                    of tandem-train-heads, for the drafter medusa\n"
        "  --batches LIST    requests at once, default 1,4,16\n"
        "  --tokens N        of each answer, default 128\n"
        "  --repeat N        rounds, of which the best counts; default 5\n"
        "  --local-sh FILE   starts clusters; default deploy/local.sh\n"
        "  --bin DIR         programs of the cluster; default: this program's folder\n"
        "  --json            one JSON object instead of a table\n"
        "  --help            this text");
}

static const char *drafter_name(uint32_t drafter)
{
    return drafter == SPEC_AUTO ? "auto" : td_drafter_name((td_drafter_t)drafter);
}

/* --- requests --------------------------------------------------------------------------------- */

static char *request_body(const spec_t *s, const char *prompt, const char *drafter,
                          const char *salt, uint32_t max_tokens)
{
    json_t *body = json_pack(
        "{s:s, s:s, s:b, s:{s:b}, s:i, s:i, s:b, s:s, s:{s:s}}", "model", s->model_name, "prompt",
        prompt, "stream", 1, "stream_options", "include_usage", 1, "temperature", 0, "max_tokens",
        (int)max_tokens, "ignore_eos", 1, "cache_salt", salt, "speculation", "drafter", drafter);
    char *text = body == NULL ? NULL : json_dumps(body, JSON_COMPACT);
    char *copy = text == NULL ? NULL : td_strdup(text);

    free(text);
    json_decref(body);
    return copy;
}

static bool begin(spec_t *s, uint32_t at, spec_kind_t kind, uint32_t number, const char *drafter,
                  const char *salt, uint32_t max_tokens)
{
    td_str_t prompt = {0};
    char *body = NULL;

    if (spec_prompt(kind, number, &prompt)) {
        body = request_body(s, prompt.bytes, drafter, salt, max_tokens);
    }
    td_str_fini(&prompt);
    if (body == NULL) {
        (void)bench_usage_error("no memory");
        return false;
    }
    bench_stream_begin(&s->streams[at], body);
    return curl_multi_add_handle(s->multi, s->streams[at].curl) == CURLM_OK;
}

static bool end_all(spec_t *s)
{
    const CURLMsg *message = NULL;
    int running = 1;
    int left = 0;
    bool ok = true;

    while (ok && running > 0) {
        ok = curl_multi_perform(s->multi, &running) == CURLM_OK;
        while ((message = curl_multi_info_read(s->multi, &left)) != NULL) {
            char *private = NULL;
            bench_stream_t *stream = NULL;
            CURLcode code = message->data.result;
            if (message->msg != CURLMSG_DONE) {
                continue;
            }
            (void)curl_easy_getinfo(message->easy_handle, CURLINFO_PRIVATE, &private);
            stream = (bench_stream_t *)(void *)private;
            (void)curl_multi_remove_handle(s->multi, stream->curl);
            bench_stream_end(stream, code);
            if (stream->error[0] != '\0') {
                (void)bench_usage_error("a request failed: %s", stream->error);
                ok = false;
            }
        }
        ok = ok && (running == 0 || curl_multi_poll(s->multi, NULL, 0, 1000, NULL) == CURLM_OK);
    }
    return ok;
}

/* Requests [first, first + count) at once. */
static bool run_wave(spec_t *s, spec_kind_t kind, uint32_t first, uint32_t count,
                     const char *drafter, const char *salt, uint32_t max_tokens)
{
    for (uint32_t i = 0; i < count; i++) {
        if (!begin(s, i, kind, first + i, drafter, salt, max_tokens)) {
            return false;
        }
    }
    return end_all(s);
}

/* --- cells ------------------------------------------------------------------------------------ */

static bool count_wave(const spec_t *s, cell_t *cell, uint32_t wave, uint32_t batch)
{
    uint64_t first_ns = UINT64_MAX;
    uint64_t last_ns = 0;
    uint64_t ns = 0;

    for (uint32_t i = 0; i < batch; i++) {
        const bench_stream_t *stream = &s->streams[i];
        const uint32_t tokens = bench_stream_tokens(stream);
        if (tokens != s->options->tokens) {
            (void)bench_usage_error("an answer has %u tokens, not %u", tokens, s->options->tokens);
            return false;
        }
        first_ns = TD_MIN(first_ns, stream->event_ns);
        last_ns = TD_MAX(last_ns, stream->end_ns);
        cell->tokens += tokens - 1;
        cell->accepted += stream->accepted_tokens;
        cell->rejected += stream->rejected_tokens;
        cell->steps += tokens - 1 - TD_MIN(tokens - 1, stream->accepted_tokens);
    }
    ns = TD_MAX(last_ns - first_ns, 1);
    cell->best_ns[wave] = cell->best_ns[wave] == 0 ? ns : TD_MIN(cell->best_ns[wave], ns);
    return true;
}

static uint32_t waves_of(uint32_t batch)
{
    return (SPEC_REQUESTS_MIN + batch - 1) / batch;
}

static double tokens_per_s(const cell_t *cell, uint32_t batch)
{
    uint64_t ns = 0;

    for (uint32_t w = 0; w < waves_of(batch); w++) {
        ns += cell->best_ns[w];
    }
    return ns == 0 ? 0 : (double)cell->tokens * (double)TD_NS_PER_S / (double)ns;
}

static bool run_cell(spec_t *s, spec_kind_t kind, uint32_t batch_idx, uint32_t drafter)
{
    const spec_options_t *o = s->options;
    const uint32_t batch = o->batches[batch_idx];
    const uint32_t waves = waves_of(batch);
    const char *name = drafter_name(drafter);
    cell_t *cell = &s->cells[kind][batch_idx][drafter];
    char salt[64];
    bool ok = true;

    if (kind == SPEC_HOT) {
        (void)snprintf(salt, sizeof(salt), "hot %s %u", name, batch);
    } else {
        (void)snprintf(salt, sizeof(salt), "%u", s->salts++);
    }
    for (uint32_t w = 0; ok && w < waves; w++) { /* only the prompt, or the whole answer */
        if (kind != SPEC_HOT || !cell->begun) {
            ok = run_wave(s, kind, w * batch, batch, name, salt, kind == SPEC_HOT ? o->tokens : 1);
        }
    }
    cell->begun = true;
    cell->tokens = 0;
    for (uint32_t w = 0; ok && w < waves; w++) {
        ok = run_wave(s, kind, w * batch, batch, name, salt, o->tokens) &&
             count_wave(s, cell, w, batch);
    }
    return ok;
}

static bool run_round(spec_t *s, uint32_t round)
{
    const spec_options_t *o = s->options;

    for (uint32_t k = 0; k < SPEC_KINDS; k++) {
        for (uint32_t b = 0; o->kinds[k] && b < o->batch_count; b++) {
            (void)fprintf(stderr, "tandem-bench: round %u/%u: %s, batch %u:", round + 1, o->repeat,
                          spec_kind_names[k], o->batches[b]);
            for (uint32_t i = 0; i < SPEC_DRAFTERS; i++) {
                const uint32_t drafter = (i + round) % SPEC_DRAFTERS;
                if (!o->drafters[drafter]) {
                    continue;
                }
                if (!run_cell(s, (spec_kind_t)k, b, drafter)) {
                    return false;
                }
                (void)fprintf(stderr, " %s %.0f", drafter_name(drafter),
                              tokens_per_s(&s->cells[k][b][drafter], o->batches[b]));
            }
            (void)fputs(" tok/s\n", stderr);
        }
    }
    return true;
}

/* --- what is reported ------------------------------------------------------------------------- */

static double part(uint64_t of, uint64_t all)
{
    return all == 0 ? 0 : (double)of / (double)all;
}

static json_t *row_of(const spec_t *s, uint32_t kind, uint32_t batch_idx, uint32_t drafter)
{
    const uint32_t batch = s->options->batches[batch_idx];
    const cell_t *cell = &s->cells[kind][batch_idx][drafter];
    const double tok_s = tokens_per_s(cell, batch);
    const double none = tokens_per_s(&s->cells[kind][batch_idx][TD_DRAFTER_NONE], batch);

    return json_pack("{s:s, s:s, s:i, s:f, s:f, s:f, s:f}", "kind", spec_kind_names[kind],
                     "drafter", drafter_name(drafter), "batch", (int)batch, "tok_s", tok_s, "ratio",
                     none > 0 ? tok_s / none : 0, "acceptance",
                     part(cell->accepted, cell->accepted + cell->rejected), "mean_accepted",
                     part(cell->accepted, cell->steps));
}

static void print_row(const json_t *row)
{
    (void)printf("%-6s %-14s %5d %9.0f %7.2f %11.2f %14.2f\n",
                 json_string_value(json_object_get(row, "kind")),
                 json_string_value(json_object_get(row, "drafter")),
                 (int)json_integer_value(json_object_get(row, "batch")),
                 json_real_value(json_object_get(row, "tok_s")),
                 json_real_value(json_object_get(row, "ratio")),
                 json_real_value(json_object_get(row, "acceptance")),
                 json_real_value(json_object_get(row, "mean_accepted")));
}

/* How good auto is: against none at worst, and against the best single choice in the mean. */
static void say_auto(const spec_t *s)
{
    const spec_options_t *o = s->options;
    double worst = INFINITY;
    double logs = 0;
    uint32_t count = 0;

    for (uint32_t k = 0; k < SPEC_KINDS; k++) {
        for (uint32_t b = 0; o->kinds[k] && b < o->batch_count; b++) {
            const cell_t *cells = s->cells[k][b];
            const double got = tokens_per_s(&cells[SPEC_AUTO], o->batches[b]);
            double best = 0;
            for (uint32_t d = 0; d < SPEC_AUTO; d++) {
                best = fmax(best, o->drafters[d] ? tokens_per_s(&cells[d], o->batches[b]) : 0);
            }
            worst = fmin(worst, got / tokens_per_s(&cells[TD_DRAFTER_NONE], o->batches[b]));
            logs += log(got / best);
            count++;
        }
    }
    (void)fprintf(stderr,
                  "tandem-bench: auto: at worst %.2f of none; %.2f of the best single choice in "
                  "the geometric mean\n",
                  worst, exp(logs / count));
}

static int report(const spec_t *s)
{
    const spec_options_t *o = s->options;
    json_t *rows = json_array();
    json_t *figures = json_pack("{s:o}", "rows", rows);
    const json_t *row = NULL;
    size_t i = 0;

    for (uint32_t k = 0; k < SPEC_KINDS; k++) {
        for (uint32_t b = 0; o->kinds[k] && b < o->batch_count; b++) {
            for (uint32_t d = 0; d < SPEC_DRAFTERS; d++) {
                if (o->drafters[d]) {
                    (void)json_array_append_new(rows, row_of(s, k, b, d));
                }
            }
        }
    }
    if (figures == NULL) {
        return BENCH_EXIT_FAILED;
    }
    if (o->json) {
        (void)json_dumpf(figures, stdout, JSON_COMPACT | JSON_REAL_PRECISION(6));
        (void)putchar('\n');
    } else {
        (void)printf("%-6s %-14s %5s %9s %7s %11s %14s\n", "kind", "drafter", "batch", "tok_s",
                     "ratio", "acceptance", "mean_accepted");
        json_array_foreach(rows, i, row)
        {
            print_row(row);
        }
    }
    if (o->drafters[SPEC_AUTO]) {
        say_auto(s);
    }
    json_decref(figures);
    return BENCH_EXIT_OK;
}

/* --- options ---------------------------------------------------------------------------------- */

/* Words with commas between; take() says what it does not know. */
static bool parse_list(char *text, bool (*take)(const char *word, void *out), void *out)
{
    char *rest = NULL;
    char *word = strtok_r(text, ",", &rest);
    bool ok = word != NULL && take(word, out);

    while (ok && (word = strtok_r(NULL, ",", &rest)) != NULL) {
        ok = take(word, out);
    }
    return ok;
}

static bool take_kind(const char *word, void *out)
{
    for (uint32_t k = 0; k < SPEC_KINDS; k++) {
        if (strcmp(word, spec_kind_names[k]) == 0) {
            ((spec_options_t *)out)->kinds[k] = true;
            return true;
        }
    }
    (void)bench_usage_error("--kinds wants some of chat,copy,code,hot, not \"%s\"", word);
    return false;
}

static bool take_drafter(const char *word, void *out)
{
    td_drafter_t drafter = TD_DRAFTER_NONE;

    if (strcmp(word, "auto") == 0) {
        ((spec_options_t *)out)->drafters[SPEC_AUTO] = true;
        return true;
    }
    if (td_drafter_parse(word, &drafter) != TD_OK) {
        (void)bench_usage_error("--drafters wants some of auto, " TD_DRAFTER_NAMES ", not \"%s\"",
                                word);
        return false;
    }
    ((spec_options_t *)out)->drafters[drafter] = true;
    return true;
}

static bool take_batch(const char *word, void *out)
{
    spec_options_t *o = out;

    if (o->batch_count == SPEC_BATCHES_MAX) {
        (void)bench_usage_error("--batches wants at most %u numbers", SPEC_BATCHES_MAX);
        return false;
    }
    return bench_parse_u32("--batches", word, 1, SPEC_BATCH_MAX, &o->batches[o->batch_count++]);
}

static bool parse_kinds(char *text, void *out)
{
    return parse_list(text, take_kind, out);
}

static bool parse_drafters(char *text, void *out)
{
    return parse_list(text, take_drafter, out);
}

static bool parse_batches(char *text, void *out)
{
    return parse_list(text, take_batch, out);
}

static bool any_of(const bool *flags, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        if (flags[i]) {
            return true;
        }
    }
    return false;
}

static void set_defaults(spec_options_t *o)
{
    if (!any_of(o->kinds, SPEC_KINDS)) {
        memset(o->kinds, true, sizeof(o->kinds));
    }
    if (!any_of(o->drafters, SPEC_DRAFTERS)) {
        for (uint32_t d = 0; d < SPEC_DRAFTERS; d++) {
            td_drafter_t known = TD_DRAFTER_NONE;
            o->drafters[d] = d == SPEC_AUTO || td_drafter_parse(drafter_name(d), &known) == TD_OK;
        }
    }
    o->drafters[TD_DRAFTER_NONE] = true;
    if (o->batch_count == 0) {
        o->batches[o->batch_count++] = 1;
        o->batches[o->batch_count++] = 4;
        o->batches[o->batch_count++] = 16;
    }
}

static int parse_options(int argc, char **argv, spec_options_t *o)
{
    const bench_option_t options[] = {
        BENCH_MODEL_OPTION(&o->model),
        {.name = "kinds", .kind = BENCH_OWN, .out = o, .parse = parse_kinds},
        {.name = "drafters", .kind = BENCH_OWN, .out = o, .parse = parse_drafters},
        {.name = "medusa-heads", .kind = BENCH_TEXT, .out = &o->heads},
        {.name = "batches", .kind = BENCH_OWN, .out = o, .parse = parse_batches},
        {.name = "tokens", .kind = BENCH_NUMBER, .out = &o->tokens, .min = 2, .max = 4096},
        BENCH_REPEAT_OPTION(&o->repeat),
        {.name = "bin", .kind = BENCH_OWN, .out = o->bin, .parse = bench_cluster_parse_bin},
        {.name = "local-sh", .kind = BENCH_TEXT, .out = &o->local_sh},
        BENCH_JSON_OPTION(&o->json),
    };
    int rc = bench_parse_options(argc, argv, "spec", print_help, options, TD_ARRAY_LEN(options));

    if (rc == BENCH_EXIT_OK && !bench_cluster_has_local_sh(o->local_sh)) {
        rc = BENCH_EXIT_USAGE;
    }
    set_defaults(o);
    return rc;
}

/* --- start and end ---------------------------------------------------------------------------- */

static int start(spec_t *s)
{
    const spec_options_t *o = s->options;
    char decode_args[PATH_MAX + 32];
    const char *arguments[] = {"--port",
                               "0",
                               "--bin",
                               o->bin,
                               "--model",
                               o->model,
                               "--timeout",
                               "240",
                               "--kvstore",
                               "0",
                               o->heads == NULL ? NULL : "--decode-args",
                               decode_args,
                               NULL};
    const bench_cluster_options_t options = {
        .local_sh = o->local_sh, .ucx_tls = "tcp,posix,sysv", .arguments = arguments};
    char *url = NULL;
    uint32_t most = 0;
    int rc = BENCH_EXIT_OK;

    (void)snprintf(decode_args, sizeof(decode_args), "--medusa-heads %s",
                   o->heads == NULL ? "" : o->heads);
    (void)fputs("tandem-bench: starting a cluster\n", stderr);
    rc = bench_cluster_start(&options, &s->cluster);
    if (rc == BENCH_EXIT_OK) {
        rc = bench_model_name(s->cluster.url, NULL, &s->model_name);
    }
    if (rc != BENCH_EXIT_OK) {
        return rc;
    }
    s->multi = curl_multi_init();
    url = bench_api_url(s->cluster.url, "/completions");
    for (uint32_t b = 0; b < o->batch_count; b++) {
        most = TD_MAX(most, o->batches[b]);
    }
    while (rc == BENCH_EXIT_OK && s->stream_count < most) {
        bench_stream_t *stream = &s->streams[s->stream_count++];
        rc = s->multi == NULL || url == NULL
                 ? BENCH_EXIT_FAILED
                 : bench_stream_init(stream, url, NULL, SPEC_TIMEOUT_MS);
        if (rc == BENCH_EXIT_OK) {
            (void)curl_easy_setopt(stream->curl, CURLOPT_PRIVATE, (char *)stream);
        }
    }
    td_free(url);
    return rc;
}

static void stop(spec_t *s)
{
    for (uint32_t i = 0; i < s->stream_count; i++) {
        if (s->multi != NULL && s->streams[i].curl != NULL) { /* also of one that was cut off */
            (void)curl_multi_remove_handle(s->multi, s->streams[i].curl);
        }
        bench_stream_fini(&s->streams[i]);
    }
    (void)curl_multi_cleanup(s->multi);
    bench_cluster_stop(&s->cluster);
    td_free(s->model_name);
}

int bench_spec(int argc, char **argv)
{
    static spec_options_t o = {.local_sh = "deploy/local.sh", .tokens = 128, .repeat = 5};
    static spec_t s = {.options = &o, .cluster = {.control = -1}};
    bool ok = true;
    int rc = parse_options(argc, argv, &o);

    if (rc != BENCH_EXIT_OK) {
        return rc < 0 ? BENCH_EXIT_OK : rc;
    }
    bench_cluster_find_bin(o.bin);
    (void)curl_global_init(CURL_GLOBAL_DEFAULT);
    rc = start(&s);
    for (uint32_t r = 0; rc == BENCH_EXIT_OK && ok && r < o.repeat; r++) {
        ok = run_round(&s, r);
    }
    stop(&s);
    if (rc == BENCH_EXIT_OK) {
        rc = ok ? report(&s) : BENCH_EXIT_FAILED;
    }
    return rc;
}

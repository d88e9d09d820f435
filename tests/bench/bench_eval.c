/* tandem-bench eval - likelihood, argmax, best tokens and greedy continuation of token lists. */
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/model/td_sampler.h"
#include "tests/bench/bench.h"
#include "tests/bench/bench_options.h"

#define EVAL_TOPK_MAX 1000u

typedef struct eval_options {
    const char *model;
    uint32_t threads;
    uint32_t chunk;
    td_precision_t precision;
    td_backend_t backend;
    td_devices_t devices;
    td_isa_t isa;
    td_kv_codec_t kv_codec;
    const char *attention; /* borrowed; NULL = the model's */
    uint32_t context_max;  /* 0 = the model's */
} eval_options_t;

typedef struct eval_job {
    const char *id; /* borrowed from the job's JSON */
    uint32_t *ids;  /* owned */
    uint32_t count;
    uint32_t gen;
    uint32_t topk;
    bool hashes; /* "hashes": true asks for the XXH3-64 of each greedy step's logits (I1) */
} eval_job_t;

typedef struct eval {
    eval_options_t options;
    bench_model_run_t run;
    td_model_row_t *rows; /* [chunk] */
    uint32_t line;        /* of the input, from 1 */
} eval_t;

static void print_help(void)
{
    (void)puts("Usage: tandem-bench eval --model FILE [options] < jobs > results\n"
               "\n"
               "Job, one JSON object a line:\n"
               "  {\"id\": text, \"ids\": [token ids], \"gen\": N, \"topk\": K}; other fields are "
               "ignored\n"
               "  (with \"hashes\": true the result has \"logits_xxh\", one for each greedy step)\n"
               "Result, one line a job:\n"
               "  {\"id\", \"nll\": mean negative log-likelihood of ids[1:] in nats (null for one "
               "id),\n"
               "   \"argmax\": best id after each position, \"top\": [[id, log-probability] x K "
               "after the last],\n"
               "   \"greedy\": [up to N ids; stops after id 0 or 2]}\n"
               "\n"
               "Options:\n"
               "  --model FILE      GGUF file (required)\n"
               "  --threads N       default 2\n"
               "  --precision P     fast, mixed (default) or exact\n"
               "  --chunk N         rows of a pass, default 128\n"
               "  --kv-codec C      " BENCH_CODEC_NAMES "; default f16\n"
               "  --attention A     full, window:W[,SINKS] or strided:LOCAL,STRIDE[,SUMMARY];\n"
               "                    default the model's\n"
               "  --context-max N   positions; above the model's only with a window or strides\n"
               "  --backend B       " BENCH_BACKEND_NAMES "; default cpu\n"
               "  --device D[,D]    cuda: which, several with a part of the model each; default 0\n"
               "  --isa I           " BENCH_ISA_NAMES "; default auto; never changes a result\n"
               "  --help            this text");
}

/* --- one row of logits ----------------------------------------------------------------------- */

static double row_log_sum_exp(const float *logits, uint32_t vocab, uint32_t argmax)
{
    double largest = (double)logits[argmax];
    double sum = 0;
    for (uint32_t i = 0; i < vocab; i++) {
        sum += exp((double)logits[i] - largest);
    }
    return largest + log(sum);
}

static json_t *row_top(const float *logits, uint32_t vocab, uint32_t k)
{
    json_t *top = json_array();
    double norm = row_log_sum_exp(logits, vocab, td_logits_argmax(logits, vocab));
    float limit = INFINITY; /* the last one taken, with its id */
    uint32_t limit_id = 0;

    for (uint32_t n = 0; n < TD_MIN(k, vocab); n++) {
        uint32_t best = UINT32_MAX;
        for (uint32_t i = 0; i < vocab; i++) {
            bool left = logits[i] < limit || (logits[i] == limit && i > limit_id);
            if ((n == 0 || left) && (best == UINT32_MAX || logits[i] > logits[best])) {
                best = i;
            }
        }
        if (best == UINT32_MAX) {
            break; /* NaN */
        }
        limit = logits[best];
        limit_id = best;
        (void)json_array_append_new(
            top, json_pack("[I, f]", (json_int_t)best, (double)logits[best] - norm));
    }
    return top;
}

/* --- a job ------------------------------------------------------------------------------------ */

static bool job_field(const eval_t *e, const json_t *root, const char *name, uint32_t max,
                      uint32_t *out)
{
    const json_t *value = json_object_get(root, name);

    *out = 0;
    if (value == NULL) {
        return true;
    }
    if (!json_is_integer(value) || json_integer_value(value) < 0 ||
        json_integer_value(value) > (json_int_t)max) {
        (void)bench_usage_error("line %u: \"%s\" must be an integer from 0 to %u", e->line, name,
                                max);
        return false;
    }
    *out = (uint32_t)json_integer_value(value);
    return true;
}

/* Owner: the caller frees job->ids; job->id is borrowed from root. */
static bool job_read(const eval_t *e, const json_t *root, eval_job_t *job)
{
    const td_model_info_t *info = td_model_info(e->run.model);
    const json_t *ids = json_object_get(root, "ids");
    size_t count = json_array_size(ids);

    *job = (eval_job_t){.id = json_string_value(json_object_get(root, "id"))};
    if (job->id == NULL || count == 0 || count > info->context_max) {
        (void)bench_usage_error(
            "line %u: a job needs \"id\", a text, and \"ids\", 1 to %u token ids", e->line,
            info->context_max);
        return false;
    }
    if (!job_field(e, root, "gen", info->context_max, &job->gen) ||
        !job_field(e, root, "topk", EVAL_TOPK_MAX, &job->topk)) {
        return false;
    }
    job->hashes = json_is_true(json_object_get(root, "hashes"));
    job->count = (uint32_t)count;
    job->ids = td_calloc(count, sizeof(*job->ids));
    if (job->ids == NULL) {
        (void)bench_usage_error("line %u: no memory", e->line);
        return false;
    }
    for (size_t i = 0; i < count; i++) {
        const json_t *id = json_array_get(ids, i);
        if (!json_is_integer(id) || json_integer_value(id) < 0 ||
            json_integer_value(id) >= (json_int_t)info->vocab_size) {
            (void)bench_usage_error("line %u: ids[%zu] is not a token id (0 to %u)", e->line, i,
                                    info->vocab_size - 1);
            td_free(job->ids);
            return false;
        }
        job->ids[i] = (uint32_t)json_integer_value(id);
    }
    return true;
}

static bool forward(eval_t *e, const uint32_t *ids, uint32_t position, uint32_t count,
                    const float **logits)
{
    for (uint32_t i = 0; i < count; i++) {
        e->rows[i] = (td_model_row_t){.token = ids[i],
                                      .position = position + i,
                                      .blocks = e->run.blocks,
                                      .want_logits = true};
    }
    return td_model_forward(e->run.model, e->run.pool, e->rows, count, 0, NULL, NULL, logits) ==
           TD_OK;
}

/* Continues from the last row's logits; ends after id 0 or 2, or at the end of the context. */
static bool generate(eval_t *e, const eval_job_t *job, const float *logits, json_t *greedy,
                     json_t *hashes)
{
    const td_model_info_t *info = td_model_info(e->run.model);

    for (uint32_t n = 0; n < job->gen; n++) {
        uint32_t id = td_logits_argmax(logits, info->vocab_size);
        char hash[17];
        (void)snprintf(hash, sizeof(hash), "%016llx",
                       (unsigned long long)td_logits_hash(logits, info->vocab_size));
        (void)json_array_append_new(hashes, json_string(hash));
        (void)json_array_append_new(greedy, json_integer(id));
        if (id == 0 || id == 2 || n + 1 == job->gen || job->count + n >= info->context_max) {
            return true;
        }
        if (!forward(e, &id, job->count + n, 1, &logits)) {
            return false;
        }
    }
    return true;
}

/* Owner: the caller; NULL after a failure. */
static json_t *job_run(eval_t *e, const eval_job_t *job)
{
    const uint32_t vocab = td_model_info(e->run.model)->vocab_size;
    json_t *argmaxes = json_array();
    json_t *greedy = json_array();
    json_t *hashes = json_array();
    json_t *top = NULL;
    json_t *result = NULL;
    double nll = 0;
    const float *last = NULL;

    for (uint32_t at = 0; at < job->count; at += e->options.chunk) {
        uint32_t count = TD_MIN(e->options.chunk, job->count - at);
        const float *logits = NULL;
        if (!forward(e, job->ids + at, at, count, &logits)) {
            json_decref(argmaxes);
            json_decref(greedy);
            json_decref(hashes);
            return NULL;
        }
        for (uint32_t i = 0; i < count; i++) {
            const float *row = logits + (size_t)i * vocab;
            uint32_t argmax = td_logits_argmax(row, vocab);
            (void)json_array_append_new(argmaxes, json_integer(argmax));
            if (at + i + 1 < job->count) {
                nll += row_log_sum_exp(row, vocab, argmax) - (double)row[job->ids[at + i + 1]];
            }
            last = row;
        }
    }
    top = row_top(last, vocab, job->topk);
    if (!generate(e, job, last, greedy, hashes)) {
        json_decref(argmaxes);
        json_decref(greedy);
        json_decref(hashes);
        json_decref(top);
        return NULL;
    }
    result = json_pack("{s:s, s:o, s:o, s:o, s:o}", "id", job->id, "nll",
                       job->count > 1 ? json_real(nll / (job->count - 1)) : json_null(), "argmax",
                       argmaxes, "top", top, "greedy", greedy);
    if (job->hashes) {
        (void)json_object_set(result, "logits_xxh", hashes);
    }
    json_decref(hashes);
    return result;
}

static int eval_line(eval_t *e, const char *text)
{
    json_error_t error;
    json_t *root = json_loads(text, 0, &error);
    json_t *result = NULL;
    eval_job_t job = {0};

    if (root == NULL) {
        return bench_usage_error("line %u: not JSON: %s", e->line, error.text);
    }
    if (!job_read(e, root, &job)) {
        json_decref(root);
        return BENCH_EXIT_USAGE;
    }
    result = job_run(e, &job);
    td_free(job.ids);
    if (result != NULL) {
        (void)json_dumpf(result, stdout, JSON_COMPACT);
        (void)putchar('\n');
        (void)fflush(stdout);
        (void)fprintf(stderr, "tandem-bench: %s: %u tokens done\n", job.id, job.count);
    }
    json_decref(root);
    json_decref(result);
    return result != NULL ? BENCH_EXIT_OK : BENCH_EXIT_FAILED;
}

static int eval_stream(eval_t *e)
{
    char *line = NULL; /* getline's own malloc */
    size_t cap = 0;
    int rc = BENCH_EXIT_OK;

    while (rc == BENCH_EXIT_OK && getline(&line, &cap, stdin) >= 0) {
        e->line++;
        if (line[strspn(line, " \t\r\n")] != '\0') {
            rc = eval_line(e, line);
        }
    }
    free(line);
    return rc;
}

static int parse_options(int argc, char **argv, eval_options_t *o)
{
    const bench_option_t options[] = {
        BENCH_MODEL_OPTION(&o->model),
        BENCH_THREADS_OPTION(&o->threads),
        {.name = "precision", .kind = BENCH_PRECISION, .out = &o->precision},
        {.name = "backend", .kind = BENCH_BACKEND, .out = &o->backend},
        {.name = "device", .kind = BENCH_DEVICES, .out = &o->devices},
        {.name = "isa", .kind = BENCH_ISA, .out = &o->isa},
        {.name = "kv-codec", .kind = BENCH_CODEC, .out = &o->kv_codec},
        {.name = "attention", .kind = BENCH_ATTENTION, .out = &o->attention},
        {.name = "context-max",
         .kind = BENCH_NUMBER,
         .out = &o->context_max,
         .max = BENCH_CONTEXT_MAX},
        {.name = "chunk",
         .kind = BENCH_NUMBER,
         .out = &o->chunk,
         .min = 1,
         .max = TD_MODEL_ROWS_MAX},
    };

    return bench_parse_options(argc, argv, "eval", print_help, options, TD_ARRAY_LEN(options));
}

int bench_eval(int argc, char **argv)
{
    eval_t e = {.options = {.threads = 2, .chunk = 128, .precision = TD_PRECISION_MIXED}};
    td_model_options_t options = {0};
    uint64_t begin_ns = 0;
    int rc = parse_options(argc, argv, &e.options);

    if (rc != BENCH_EXIT_OK) {
        return rc < 0 ? BENCH_EXIT_OK : rc;
    }
    options = (td_model_options_t){.precision = e.options.precision,
                                   .backend = e.options.backend,
                                   .devices = e.options.devices,
                                   .isa = e.options.isa,
                                   .threads = e.options.threads,
                                   .rows_max = e.options.chunk,
                                   .logit_rows_max = e.options.chunk,
                                   .block_tokens = TD_KV_BLOCK_TOKENS_DEFAULT,
                                   .context_max = e.options.context_max,
                                   .attention = e.options.attention,
                                   .kv_codec = e.options.kv_codec};
    rc = bench_model_open(e.options.model, &options, 1, 0, &e.run);
    if (rc != BENCH_EXIT_OK) {
        return rc;
    }
    begin_ns = td_now_ns();
    e.rows = td_calloc(e.options.chunk, sizeof(*e.rows));
    rc = e.rows == NULL ? BENCH_EXIT_FAILED : eval_stream(&e);
    (void)fprintf(stderr, "tandem-bench: %u lines in %.1f s\n", e.line,
                  (double)(td_now_ns() - begin_ns) / TD_NS_PER_S);
    td_free(e.rows);
    bench_model_close(&e.run);
    return rc;
}

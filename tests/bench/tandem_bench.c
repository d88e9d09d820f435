/* tandem-bench - every figure of the project, as a table or as JSON. */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_log.h"
#include "tests/bench/bench.h"

static const struct {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *summary;
} commands[] = {
    {"eval", bench_eval, "score and continue texts with a model (JSON lines in and out)"},
    {"handoff", bench_handoff, "what splitting prefill and decode costs until the first token"},
    {"hot", bench_hot, "replicas of hot prefixes, and the busiest segment of a store"},
    {"instant", bench_instant, "a back end that answers at once, for what routers cost"},
    {"kv", bench_kv, "prefix cache and block tables alone"},
    {"load", bench_load, "short chats, as many a second as a server answers"},
    {"mock", bench_mock, "nodes that compute nothing, hundreds of them, at a real router"},
    {"model", bench_model, "speed of the forward pass"},
    {"router", bench_router, "the router's index of blocks alone"},
    {"serve", bench_serve, "conversations with an OpenAI-compatible server"},
    {"spec", bench_spec, "what each drafter is worth"},
    {"store", bench_store, "putting, looking up and reading blocks of the store"},
    {"transfer", bench_transfer, "fetching KV blocks from another process"},
};

int bench_usage_error(const char *fmt, ...)
{
    va_list args;
    (void)fputs("tandem-bench: ", stderr);
    va_start(args, fmt);
    (void)vfprintf(stderr, fmt, args);
    va_end(args);
    (void)fputc('\n', stderr);
    return BENCH_EXIT_USAGE;
}

bool bench_parse_u32(const char *option, const char *text, uint32_t min, uint32_t max,
                     uint32_t *out)
{
    char *end = NULL;
    unsigned long value = 0;

    errno = 0;
    value = strtoul(text, &end, 10);
    if (errno != 0 || end == text || *end != '\0' || text[0] == '-' || value < min || value > max) {
        (void)bench_usage_error("%s wants a number from %u to %u, not \"%s\"", option, min, max,
                                text);
        return false;
    }
    *out = (uint32_t)value;
    return true;
}

bool bench_parse_isa(const char *text, td_isa_t *out)
{
    if (td_isa_parse(text, out) == TD_OK) {
        return true;
    }
    (void)bench_usage_error("--isa wants " BENCH_ISA_NAMES ", not \"%s\"", text);
    return false;
}

bool bench_parse_backend(const char *text, td_backend_t *out)
{
    if (td_backend_parse(text, out) == TD_OK) {
        return true;
    }
    (void)bench_usage_error("--backend wants " BENCH_BACKEND_NAMES ", not \"%s\"", text);
    return false;
}

bool bench_parse_devices(const char *text, td_devices_t *out)
{
    if (td_devices_parse(text, out) == TD_OK) {
        return true;
    }
    (void)bench_usage_error("--device wants numbers with commas, at most %u, not \"%s\"",
                            TD_MODEL_DEVICES_MAX, text);
    return false;
}

bool bench_parse_precision(const char *text, td_precision_t *out)
{
    if (td_precision_parse(text, out) == TD_OK) {
        return true;
    }
    (void)bench_usage_error("--precision wants fast, mixed or exact, not \"%s\"", text);
    return false;
}

bool bench_parse_codec(const char *text, td_kv_codec_t *out)
{
    if (td_kv_codec_parse(text, out) == TD_OK) {
        return true;
    }
    (void)bench_usage_error("--kv-codec wants " BENCH_CODEC_NAMES ", not \"%s\"", text);
    return false;
}

bool bench_check_attention(const char *text)
{
    td_attention_mask_t mask;

    if (td_attention_mask_parse(text, &mask) == TD_OK) {
        return true;
    }
    (void)bench_usage_error("--attention wants " TD_ATTENTION_FORMS ", not \"%s\"", text);
    return false;
}

void bench_print_figures(json_t *figures, bool as_json)
{
    const char *key = NULL;
    json_t *value = NULL;

    if (as_json) {
        (void)json_dumpf(figures, stdout, JSON_COMPACT | JSON_REAL_PRECISION(6));
        (void)putchar('\n');
        return;
    }
    json_object_foreach(figures, key, value)
    {
        if (json_is_integer(value)) {
            (void)printf("%-26s %12lld\n", key, (long long)json_integer_value(value));
        } else {
            (void)printf("%-26s %15.2f\n", key, json_real_value(value));
        }
    }
}

int bench_model_open(const char *path, const td_model_options_t *options, uint32_t sequences,
                     uint32_t sequence_tokens, bench_model_run_t *run)
{
    td_gguf_t *gguf = NULL;
    const td_kv_layout_t *kv = NULL;
    td_status_t status = TD_OK;

    *run = (bench_model_run_t){0};
    status = td_gguf_open(path, &gguf);
    if (status != TD_OK) {
        return bench_usage_error("cannot read the model file \"%s\": %s", path,
                                 td_status_name(status));
    }
    status = td_model_load(gguf, options, &run->model);
    td_gguf_close(gguf);
    if (status != TD_OK) {
        return bench_usage_error("cannot load the model \"%s\": %s", path, td_status_name(status));
    }
    kv = &td_model_info(run->model)->kv;
    if (sequence_tokens == 0) {
        sequence_tokens = td_model_info(run->model)->context_max;
    }
    run->block_count = sequences * td_kv_blocks_for(kv, sequence_tokens);
    run->pool = td_calloc(run->block_count, td_kv_block_bytes(kv));
    run->blocks = td_calloc(run->block_count, sizeof(*run->blocks));
    if (run->pool == NULL || run->blocks == NULL ||
        td_pool_create(run->pool, run->block_count, td_kv_block_bytes(kv), &run->mapped) != TD_OK) {
        (void)bench_usage_error("no memory for %u KV blocks", run->block_count);
        bench_model_close(run);
        return BENCH_EXIT_FAILED;
    }
    for (uint32_t i = 0; i < run->block_count; i++) {
        run->blocks[i] = i;
    }
    td_model_use_pool(run->model, run->mapped);
    return BENCH_EXIT_OK;
}

void bench_model_close(bench_model_run_t *run)
{
    if (run->model != NULL) {
        td_model_use_pool(run->model, NULL);
    }
    td_model_destroy(run->model);
    td_pool_destroy(run->mapped);
    td_free(run->pool);
    td_free(run->blocks);
    *run = (bench_model_run_t){0};
}

static void print_help(FILE *to)
{
    (void)fputs("Usage: tandem-bench COMMAND [options]\n\nCommands:\n", to);
    for (size_t i = 0; i < TD_ARRAY_LEN(commands); i++) {
        (void)fprintf(to, "  %-10s %s\n", commands[i].name, commands[i].summary);
    }
    (void)fputs("\nEach command has --help.\n", to);
}

int main(int argc, char **argv)
{
    td_log_init("tandem-bench", TD_LOG_LEVEL_INFO);
    if (argc < 2) {
        print_help(stderr);
        return BENCH_EXIT_USAGE;
    }
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0) {
        print_help(stdout);
        return BENCH_EXIT_OK;
    }
    if (strcmp(argv[1], "--version") == 0) {
        (void)puts("tandem-bench " TD_VERSION);
        return BENCH_EXIT_OK;
    }
    for (size_t i = 0; i < TD_ARRAY_LEN(commands); i++) {
        if (strcmp(argv[1], commands[i].name) == 0) {
            return commands[i].run(argc - 1, argv + 1);
        }
    }
    print_help(stderr);
    return bench_usage_error("unknown command \"%s\"", argv[1]);
}

/* tandem-bench mock - many prefill and decode nodes that compute nothing, at a real router.
 *
 * For what the router alone can do: each node registers, sends heartbeats, and answers RESERVE,
 * START and CANCEL as a real one does, at once or after given times, with tokens of the model's
 * vocabulary. */
#include <sodium.h>
#include <stdio.h>
#include <string.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/base/td_log.h"
#include "common/kv/td_block_key.h"
#include "common/wire/td_proc.h"
#include "tests/bench/bench.h"
#include "tests/bench/bench_mock_nodes.h"
#include "tests/bench/bench_options.h"

#define TIME_US_MAX 60000000u
#define DRAIN_NS (10 * TD_NS_PER_S)

typedef struct mock_options {
    const char *router;
    const char *model;
    const char *secret_file;
    const char *name;
    td_kv_codec_t codec;
    uint32_t prefills;
    uint32_t decodes;
    uint32_t block_tokens;
    uint32_t blocks;
    uint32_t context_max;
    uint32_t io_threads;
    uint32_t message_tokens;
    uint32_t ttft_us;
    uint32_t tbt_us;
    bool json;
} mock_options_t;

static void print_help(void)
{
    (void)puts(
        "Usage: tandem-bench mock --router ENDPOINT --model FILE [options]\n"
        "\n"
        "Registers prefill and decode nodes that compute nothing at a running tandem-router, and\n"
        "plays all of them in one process until SIGINT or SIGTERM: then they drain, and the "
        "counts\n"
        "are printed; a second signal ends them at once. Tokens are words of the model's "
        "vocabulary,\n"
        "drawn from prompt and seed; each answer has max_tokens of them. Log-probabilities are\n"
        "refused.\n"
        "\n"
        "Options:\n"
        "  --router ENDPOINT       tcp://HOST:PORT of its bus (--listen), or "
        "ID=ENDPOINT,ID=ENDPOINT\n"
        "                          (required)\n"
        "  --model FILE            the router's GGUF file (required)\n"
        "  --secret FILE           the cluster's secret (--cluster-secret-file); default: none\n"
        "  --prefill N             default 1\n"
        "  --decode N              default 1; both together at most 4096\n"
        "  --name TEXT             nodes are TEXT-p1, TEXT-p2... and TEXT-d1...; default mock\n"
        "  --ttft-us T             from START to the first token, default 0\n"
        "  --tbt-us T              between two messages of an answer, default 0\n"
        "  --message-tokens N      tokens of a message, default 1: as from nodes that draft "
        "nothing\n"
        "  --blocks N              of each node's KV pool, as it says; default 65536\n"
        "  --block-tokens N        default 16\n"
        "  --kv-codec C            " BENCH_CODEC_NAMES ", default f16\n"
        "  --context-max N         longest request of a node, default 8192\n"
        "  --io-threads N          of ZeroMQ, default 1\n"
        "  --json                  one JSON object at the end instead of a table\n"
        "  --help                  this text");
}

static int parse_options(int argc, char **argv, mock_options_t *o)
{
    const bench_option_t options[] = {
        {.name = "router", .kind = BENCH_TEXT, .out = &o->router, .required = true},
        BENCH_MODEL_OPTION(&o->model),
        {.name = "secret", .kind = BENCH_TEXT, .out = &o->secret_file},
        {.name = "name", .kind = BENCH_TEXT, .out = &o->name},
        {.name = "prefill",
         .kind = BENCH_NUMBER,
         .out = &o->prefills,
         .min = 0,
         .max = BENCH_MOCK_NODES_MAX},
        {.name = "decode",
         .kind = BENCH_NUMBER,
         .out = &o->decodes,
         .min = 0,
         .max = BENCH_MOCK_NODES_MAX},
        {.name = "ttft-us", .kind = BENCH_NUMBER, .out = &o->ttft_us, .min = 0, .max = TIME_US_MAX},
        {.name = "tbt-us", .kind = BENCH_NUMBER, .out = &o->tbt_us, .min = 0, .max = TIME_US_MAX},
        {.name = "message-tokens",
         .kind = BENCH_NUMBER,
         .out = &o->message_tokens,
         .min = 1,
         .max = BENCH_MOCK_MESSAGE_TOKENS_MAX},
        {.name = "blocks", .kind = BENCH_NUMBER, .out = &o->blocks, .min = 1, .max = 1u << 30},
        {.name = "block-tokens",
         .kind = BENCH_NUMBER,
         .out = &o->block_tokens,
         .min = 16,
         .max = 1024},
        {.name = "kv-codec", .kind = BENCH_CODEC, .out = &o->codec},
        {.name = "context-max",
         .kind = BENCH_NUMBER,
         .out = &o->context_max,
         .min = 16,
         .max = TD_MSG_PROMPT_TOKENS_MAX},
        {.name = "io-threads", .kind = BENCH_NUMBER, .out = &o->io_threads, .min = 1, .max = 64},
        BENCH_JSON_OPTION(&o->json),
    };
    int rc = bench_parse_options(argc, argv, "mock", print_help, options, TD_ARRAY_LEN(options));

    if (rc == BENCH_EXIT_OK && o->prefills + o->decodes > BENCH_MOCK_NODES_MAX) {
        return bench_usage_error("--prefill and --decode together are at most %u",
                                 BENCH_MOCK_NODES_MAX);
    }
    return rc;
}

static void show_progress(const bench_mock_counts_t *now, const bench_mock_counts_t *before,
                          double s)
{
    (void)fprintf(stderr,
                  "tandem-bench: %u nodes registered, %u tickets under way, %llu ended "
                  "(%.0f/s), %.0f tokens/s, %.0f messages/s\n",
                  now->registered, now->under_way, (unsigned long long)now->ended,
                  (double)(now->ended - before->ended) / s,
                  (double)(now->tokens - before->tokens) / s,
                  (double)(now->messages_in + now->messages_out - before->messages_in -
                           before->messages_out) /
                      s);
}

static void run(bench_mock_t *mock, int signal_fd)
{
    bench_mock_counts_t before = bench_mock_counts(mock);
    uint64_t shown_ns = td_now_ns();
    uint64_t end_ns = UINT64_MAX; /* of the draining */
    struct signalfd_siginfo info;

    for (;;) {
        const bool signalled = bench_mock_turn(mock, signal_fd);
        const bench_mock_counts_t now = bench_mock_counts(mock);
        const uint64_t now_ns = td_now_ns();

        if (now_ns - shown_ns >= TD_NS_PER_S) {
            show_progress(&now, &before, (double)(now_ns - shown_ns) / TD_NS_PER_S);
            before = now;
            shown_ns = now_ns;
        }
        if (signalled) {
            (void)!read(signal_fd, &info, sizeof(info));
            if (end_ns != UINT64_MAX) {
                return;
            }
            bench_mock_drain(mock);
            end_ns = now_ns + DRAIN_NS;
        } else if (end_ns != UINT64_MAX && (now.under_way == 0 || now_ns >= end_ns)) {
            return;
        }
    }
}

static void set_count(json_t *figures, const char *key, uint64_t value)
{
    (void)json_object_set_new(figures, key, json_integer((json_int_t)value));
}

static void report(const bench_mock_t *mock, bool as_json)
{
    const bench_mock_counts_t c = bench_mock_counts(mock);
    json_t *figures = json_object();

    set_count(figures, "registered", c.registered);
    set_count(figures, "under_way", c.under_way);
    set_count(figures, "reserves", c.reserves);
    set_count(figures, "busy", c.busy);
    set_count(figures, "unsupported", c.unsupported);
    set_count(figures, "starts", c.starts);
    set_count(figures, "selves", c.selves);
    set_count(figures, "ended", c.ended);
    set_count(figures, "cancelled", c.cancelled);
    set_count(figures, "expired", c.expired);
    set_count(figures, "continued", c.continued);
    set_count(figures, "tokens", c.tokens);
    set_count(figures, "messages_in", c.messages_in);
    set_count(figures, "messages_out", c.messages_out);
    set_count(figures, "unsent", c.unsent);
    set_count(figures, "stray", c.stray);
    set_count(figures, "peers_messages", c.peers_messages);
    set_count(figures, "peers_entries", c.peers_entries);
    set_count(figures, "lives", c.lives);
    bench_print_figures(figures, as_json);
    json_decref(figures);
}

static int play(const mock_options_t *o, const td_gguf_t *gguf, const td_tokenizer_t *tokenizer,
                int signal_fd)
{
    uint8_t secret[TD_CLUSTER_SECRET_BYTES];
    uint8_t fingerprint[32];
    bench_mock_t *mock = NULL;
    bench_mock_config_t config = {.router = o->router,
                                  .name = o->name,
                                  .secret = secret,
                                  .fingerprint = fingerprint,
                                  .kv_codec = td_kv_codec_name(o->codec),
                                  .tokenizer = tokenizer,
                                  .prefills = o->prefills,
                                  .decodes = o->decodes,
                                  .block_tokens = o->block_tokens,
                                  .blocks = o->blocks,
                                  .context_max = o->context_max,
                                  .io_threads = o->io_threads,
                                  .message_tokens = o->message_tokens,
                                  .ttft_ns = o->ttft_us * 1000ull,
                                  .tbt_ns = o->tbt_us * 1000ull};

    td_gguf_fingerprint(gguf, fingerprint);
    if (td_cluster_secret_load(o->secret_file, secret) != TD_OK) {
        return bench_usage_error("cannot read the secret \"%s\"", o->secret_file);
    }
    if (bench_mock_create(&config, &mock) != TD_OK) {
        return bench_usage_error("the nodes cannot be opened (the log says why)");
    }
    run(mock, signal_fd);
    report(mock, o->json);
    bench_mock_destroy(mock);
    return BENCH_EXIT_OK;
}

int bench_mock(int argc, char **argv)
{
    mock_options_t o = {.name = "mock",
                        .prefills = 1,
                        .decodes = 1,
                        .block_tokens = 16,
                        .blocks = 65536,
                        .context_max = 8192,
                        .io_threads = 1,
                        .message_tokens = 1};
    td_tokenizer_t *tokenizer = NULL;
    td_gguf_t *gguf = NULL;
    int signal_fd = -1;
    int rc = parse_options(argc, argv, &o);

    if (rc != BENCH_EXIT_OK) {
        return rc < 0 ? BENCH_EXIT_OK : rc;
    }
    td_log_init("tandem-bench", TD_LOG_LEVEL_WARN);
    td_proc_raise_file_limit(); /* some five descriptors a node */
    signal_fd = td_proc_open_signals();
    if (signal_fd < 0 || sodium_init() < 0 || td_gguf_open(o.model, &gguf) != TD_OK) {
        return bench_usage_error("cannot read the model file \"%s\"", o.model);
    }
    rc = td_tokenizer_create(gguf, &tokenizer) == TD_OK
             ? play(&o, gguf, tokenizer, signal_fd)
             : bench_usage_error("cannot read the vocabulary of \"%s\"", o.model);
    td_tokenizer_destroy(tokenizer);
    td_gguf_close(gguf);
    (void)close(signal_fd);
    return rc;
}

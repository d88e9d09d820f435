/* tandem-bench handoff - what splitting prefill and decode costs until the first token.
 *
 * One process: a forward pass over the prompt in the same chunks, and the best token picked. Split:
 * a real cluster for each carrier, asked over HTTP. Both take turns in one run, so that noise hits
 * both. Then what a cached prefix saves, and a turn of a conversation. */
#include <jansson.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "tests/bench/bench.h"
#include "tests/bench/bench_cluster.h"
#include "tests/bench/bench_options.h"
#include "tests/bench/bench_samples.h"
#include "tests/bench/bench_stream.h"
#include "tests/bench/bench_words.h"

#define HANDOFF_CHUNK 256u /* the prefill node's default */
#define HANDOFF_TIMEOUT_MS 300000u
#define HANDOFF_CARRIERS 2u
#define HANDOFF_TAIL_TOKENS 16u /* new ones behind a cached prefix */
#define HANDOFF_ANSWER_TOKENS 8u

typedef struct handoff_options {
    const char *model;
    const char *local_sh;
    const char *precision_name;
    td_precision_t precision;
    char bin[PATH_MAX];
    char threads_text[16];
    uint32_t threads;
    uint32_t tokens;
    uint32_t cached_tokens;
    uint32_t turn_tokens;
    uint32_t repeat;
    bool use_shm;
    bool use_tcp;
    bool json;
} handoff_options_t;

typedef struct split {
    const char *carrier;
    bench_cluster_t cluster;
    bench_stream_t completions; /* /v1/completions, token ids */
    bench_stream_t chat;        /* /v1/chat/completions */
    char *model_name;           /* owned */
    uint64_t best_ns;
} split_t;

typedef struct handoff {
    handoff_options_t options;
    bench_model_run_t run;
    td_model_row_t rows[HANDOFF_CHUNK];
    uint32_t *ids; /* owned; [ids_max] */
    uint32_t ids_max;
    uint64_t random;
    split_t splits[HANDOFF_CARRIERS];
    uint32_t split_count;
    uint64_t one_process_ns;
    bench_samples_t turns;
    json_t *figures;
} handoff_t;

static void print_help(void)
{
    (void)puts(
        "Usage: tandem-bench handoff --model FILE [options]\n"
        "\n"
        "Measures the time to the first token of one process and of clusters (router, prefill,\n"
        "decode, kvstore), whose KV travels through shared memory or by TCP. Then, on the first "
        "of\n"
        "the clusters: the same with and without a cached prefix, and a turn of a conversation.\n"
        "Figures are the best of the repeats, or their median. With both carriers a split's keys\n"
        "begin with the carrier.\n"
        "\n"
        "Options:\n"
        "  --model FILE         GGUF file (required)\n"
        "  --tokens N           prompt, default 512\n"
        "  --cached-tokens N    cached prefix, and history of the conversation; default 1500\n"
        "  --turn-tokens N      new tokens of the turn, default 64\n"
        "  --threads N          of each process, default 2\n"
        "  --precision P        fast, mixed (default) or exact\n"
        "  --carrier LIST       shm, tcp or shm,tcp (default)\n"
        "  --repeat N           default 5\n"
        "  --local-sh FILE      starts clusters; default deploy/local.sh\n"
        "  --bin DIR            programs of the cluster; default: this program's folder\n"
        "  --json               one JSON object instead of a table\n"
        "  --help               this text");
}

static void add_figure(handoff_t *h, const char *carrier, const char *key, double value)
{
    char name[64];
    bool prefixed = carrier != NULL && h->split_count > 1;

    (void)snprintf(name, sizeof(name), "%s%s%s", prefixed ? carrier : "", prefixed ? "_" : "", key);
    (void)json_object_set_new(h->figures, name, json_real(value));
    (void)fprintf(stderr, "tandem-bench: %s %.2f\n", name, value);
}

static double ms(uint64_t ns)
{
    return (double)ns / (double)TD_NS_PER_MS;
}

/* New ids, so that nothing of them is cached anywhere. Neither the first ones of the vocabulary,
 * which are special or single bytes, nor the last ones. */
static void draw_ids(handoff_t *h, uint32_t begin, uint32_t end)
{
    uint32_t vocab = td_model_info(h->run.model)->vocab_size;

    for (uint32_t i = begin; i < end; i++) {
        h->ids[i] = (uint32_t)(vocab / 4 + bench_random(&h->random) % (vocab / 2));
    }
}

/* --- one process ------------------------------------------------------------------------------ */

static uint32_t best_token(const float *logits, uint32_t vocab)
{
    uint32_t best = 0;
    for (uint32_t i = 1; i < vocab; i++) {
        best = logits[i] > logits[best] ? i : best;
    }
    return best;
}

/* Time to the first token of ids [0, tokens); 0 on failure. Units: ns. */
static uint64_t one_process(handoff_t *h, uint32_t tokens)
{
    uint64_t begin_ns = td_now_ns();
    const float *logits = NULL;
    volatile uint32_t token = 0;

    for (uint32_t at = 0; at < tokens; at += HANDOFF_CHUNK) {
        uint32_t count = TD_MIN(HANDOFF_CHUNK, tokens - at);
        for (uint32_t i = 0; i < count; i++) {
            h->rows[i] = (td_model_row_t){.token = h->ids[at + i],
                                          .position = at + i,
                                          .blocks = h->run.blocks,
                                          .want_logits = at + i + 1 == tokens};
        }
        if (td_model_forward(h->run.model, h->run.pool, h->rows, count, 0, NULL, NULL, &logits) !=
            TD_OK) {
            return 0;
        }
    }
    token = best_token(logits, td_model_info(h->run.model)->vocab_size);
    (void)token;
    return td_now_ns() - begin_ns;
}

/* --- a cluster -------------------------------------------------------------------------------- */

static int split_start(handoff_t *h, split_t *split)
{
    const handoff_options_t *o = &h->options;
    const char *arguments[] = {"--port",      "0",
                               "--bin",       o->bin,
                               "--model",     o->model,
                               "--precision", o->precision_name,
                               "--threads",   o->threads_text,
                               "--timeout",   "240",
                               NULL};
    bench_cluster_options_t options = {
        .local_sh = o->local_sh,
        .ucx_tls = strcmp(split->carrier, "tcp") == 0 ? "tcp" : "tcp,posix,sysv",
        .arguments = arguments};
    char *completions = NULL;
    char *chat = NULL;
    int rc = BENCH_EXIT_OK;

    (void)fprintf(stderr, "tandem-bench: starting a cluster for %s\n", split->carrier);
    rc = bench_cluster_start(&options, &split->cluster);
    if (rc == BENCH_EXIT_OK) {
        rc = bench_model_name(split->cluster.url, NULL, &split->model_name);
    }
    if (rc == BENCH_EXIT_OK) {
        completions = bench_api_url(split->cluster.url, "/completions");
        chat = bench_api_url(split->cluster.url, "/chat/completions");
        rc = completions == NULL || chat == NULL ? BENCH_EXIT_FAILED : BENCH_EXIT_OK;
    }
    if (rc == BENCH_EXIT_OK) {
        rc = bench_stream_init(&split->completions, completions, NULL, HANDOFF_TIMEOUT_MS);
    }
    if (rc == BENCH_EXIT_OK) {
        rc = bench_stream_init(&split->chat, chat, NULL, HANDOFF_TIMEOUT_MS);
    }
    td_free(completions);
    td_free(chat);
    return rc;
}

static void split_stop(split_t *split)
{
    bench_stream_fini(&split->completions);
    bench_stream_fini(&split->chat);
    bench_cluster_stop(&split->cluster);
    td_free(split->model_name);
}

/* The parts that all requests share; takes over what is asked. NULL when memory is out. */
static char *request_body(const split_t *split, const char *key, json_t *asked, uint32_t max_tokens)
{
    json_t *body = json_pack("{s:s, s:o, s:b, s:{s:b}, s:i, s:i, s:b}", "model", split->model_name,
                             key, asked, "stream", 1, "stream_options", "include_usage", 1,
                             "temperature", 0, "max_tokens", (int)max_tokens, "ignore_eos", 1);
    char *text = body == NULL ? NULL : json_dumps(body, JSON_COMPACT);
    char *copy = text == NULL ? NULL : td_strdup(text);

    free(text);
    json_decref(body);
    return copy;
}

/* Sends a request and checks how much of it came from a cache. Time to its first event, which comes
 * with the first token; 0 on failure. Units: ns. */
static uint64_t ask(bench_stream_t *stream, char *body, uint32_t cached_min, uint32_t cached_max)
{
    if (body == NULL || !bench_stream_run(stream, body)) {
        (void)bench_usage_error("a request failed: %s", body == NULL ? "no memory" : stream->error);
        return 0;
    }
    if (stream->cached_tokens < cached_min || stream->cached_tokens > cached_max) {
        (void)bench_usage_error("%u of %u prompt tokens came from a cache, not %u to %u",
                                stream->cached_tokens, stream->prompt_tokens, cached_min,
                                cached_max);
        return 0;
    }
    return TD_MAX(stream->event_ns - stream->sent_ns, 1);
}

/* Asks for ids [0, tokens). More than one token, so that decoding takes the prompt over. */
static uint64_t ask_ids(handoff_t *h, split_t *split, uint32_t tokens, uint32_t cached_min,
                        uint32_t cached_max)
{
    json_t *ids = json_array();

    for (uint32_t i = 0; i < tokens; i++) {
        (void)json_array_append_new(ids, json_integer(h->ids[i]));
    }
    return ask(&split->completions, request_body(split, "prompt", ids, 2), cached_min, cached_max);
}

/* --- what is measured ------------------------------------------------------------------------- */

/* Connections are made and code is warm before anything counts; shows that the carrier is the one.
 */
static bool warm_up(handoff_t *h)
{
    if (one_process(h, h->options.tokens) == 0) {
        return false;
    }
    for (uint32_t s = 0; s < h->split_count; s++) {
        split_t *split = &h->splits[s];
        char text[32];
        draw_ids(h, 0, h->options.tokens);
        (void)snprintf(text, sizeof(text), "carrier=%s", split->carrier);
        if (ask_ids(h, split, h->options.tokens, 0, 0) == 0) {
            return false;
        }
        if (!bench_cluster_log_holds(&split->cluster, "decode-1", text)) {
            (void)bench_usage_error("the decode node does not use %s", text);
            return false;
        }
    }
    return true;
}

static bool measure_split(handoff_t *h)
{
    const uint32_t tokens = h->options.tokens;

    h->one_process_ns = UINT64_MAX;
    for (uint32_t r = 0; r < h->options.repeat; r++) {
        uint64_t ns = 0;
        draw_ids(h, 0, tokens);
        ns = one_process(h, tokens);
        if (ns == 0) {
            return false;
        }
        h->one_process_ns = TD_MIN(h->one_process_ns, ns);
        (void)fprintf(stderr, "tandem-bench: %u/%u: one process %.2f ms", r + 1, h->options.repeat,
                      ms(ns));
        for (uint32_t s = 0; s < h->split_count; s++) {
            draw_ids(h, 0, tokens);
            ns = ask_ids(h, &h->splits[s], tokens, 0, 0);
            if (ns == 0) {
                return false;
            }
            h->splits[s].best_ns = TD_MIN(h->splits[s].best_ns, ns);
            (void)fprintf(stderr, ", %s %.2f ms", h->splits[s].carrier, ms(ns));
        }
        (void)fputc('\n', stderr);
    }
    add_figure(h, NULL, "one_process_ttft_ms", ms(h->one_process_ns));
    for (uint32_t s = 0; s < h->split_count; s++) {
        const split_t *split = &h->splits[s];
        add_figure(h, split->carrier, "split_ttft_ms", ms(split->best_ns));
        add_figure(h, split->carrier, "split_ttft_ratio",
                   (double)split->best_ns / (double)h->one_process_ns);
    }
    return true;
}

/* A prefix that is new, then again with another end. */
static bool measure_cached(handoff_t *h)
{
    const uint32_t prefix = h->options.cached_tokens;
    const uint32_t tokens = prefix + HANDOFF_TAIL_TOKENS;
    uint64_t cold_ns = UINT64_MAX;
    uint64_t cached_ns = UINT64_MAX;

    for (uint32_t r = 0; r < h->options.repeat; r++) {
        uint64_t ns = 0;
        draw_ids(h, 0, tokens);
        ns = ask_ids(h, &h->splits[0], tokens, 0, 0);
        if (ns == 0) {
            return false;
        }
        cold_ns = TD_MIN(cold_ns, ns);
        draw_ids(h, prefix, tokens);
        /* Whole blocks only, so less than one is missing. */
        ns = ask_ids(h, &h->splits[0], tokens, prefix - TD_KV_BLOCK_TOKENS_DEFAULT, tokens);
        if (ns == 0) {
            return false;
        }
        cached_ns = TD_MIN(cached_ns, ns);
    }
    add_figure(h, NULL, "cold_ttft_ms", ms(cold_ns));
    add_figure(h, NULL, "cached_ttft_ms", ms(cached_ns));
    add_figure(h, NULL, "cached_ttft_ratio", (double)cached_ns / (double)cold_ns);
    return true;
}

/* A conversation of one question and its answer, then the turn that counts. */
static bool measure_turn(handoff_t *h)
{
    split_t *split = &h->splits[0];
    json_t *messages =
        json_pack("[o]", bench_message_of_words("user", h->options.cached_tokens, &h->random));
    bench_stream_t *chat = &split->chat;
    const uint32_t history = h->options.cached_tokens;
    uint64_t ns = 0;

    if (messages != NULL &&
        ask(chat, request_body(split, "messages", json_deep_copy(messages), HANDOFF_ANSWER_TOKENS),
            0, history) != 0 &&
        json_array_append_new(messages, json_pack("{s:s, s:s%}", "role", "assistant", "content",
                                                  chat->text.bytes == NULL ? "" : chat->text.bytes,
                                                  chat->text.len)) == 0 &&
        json_array_append_new(
            messages, bench_message_of_words("user", h->options.turn_tokens, &h->random)) == 0) {
        /* The question at least, but for what shares a block with its end. */
        uint32_t cached_min = history - TD_KV_BLOCK_TOKENS_DEFAULT;
        ns = ask(chat,
                 request_body(split, "messages", json_deep_copy(messages), HANDOFF_ANSWER_TOKENS),
                 cached_min, UINT32_MAX);
        bench_samples_add_ns(&h->turns, ns);
    }
    json_decref(messages);
    return ns != 0;
}

static bool measure_turns(handoff_t *h)
{
    for (uint32_t r = 0; r < h->options.repeat; r++) {
        if (!measure_turn(h)) {
            return false;
        }
    }
    add_figure(h, NULL, "chat_turn_ttft_ms_p50", bench_samples_percentile(&h->turns, 50));
    return true;
}

/* --- options ---------------------------------------------------------------------------------- */

static bool parse_carriers(char *text, void *out)
{
    handoff_options_t *o = out;

    o->use_shm = strcmp(text, "shm") == 0 || strcmp(text, "shm,tcp") == 0;
    o->use_tcp = strcmp(text, "tcp") == 0 || strcmp(text, "shm,tcp") == 0;
    if (!o->use_shm && !o->use_tcp) {
        (void)bench_usage_error("--carrier wants shm, tcp or shm,tcp, not \"%s\"", text);
        return false;
    }
    return true;
}

static bool parse_precision(char *text, void *out)
{
    handoff_options_t *o = out;
    o->precision_name = text;
    return bench_parse_precision(text, &o->precision);
}

static int parse_options(int argc, char **argv, handoff_options_t *o)
{
    const bench_option_t options[] = {
        BENCH_MODEL_OPTION(&o->model),
        BENCH_THREADS_OPTION(&o->threads),
        {.name = "precision", .kind = BENCH_OWN, .out = o, .parse = parse_precision},
        {.name = "carrier", .kind = BENCH_OWN, .out = o, .parse = parse_carriers},
        {.name = "bin", .kind = BENCH_OWN, .out = o->bin, .parse = bench_cluster_parse_bin},
        {.name = "local-sh", .kind = BENCH_TEXT, .out = &o->local_sh},
        {.name = "tokens", .kind = BENCH_NUMBER, .out = &o->tokens, .min = 1, .max = 1u << 20},
        {.name = "cached-tokens",
         .kind = BENCH_NUMBER,
         .out = &o->cached_tokens,
         .min = 2 * TD_KV_BLOCK_TOKENS_DEFAULT,
         .max = 1u << 20},
        {.name = "turn-tokens",
         .kind = BENCH_NUMBER,
         .out = &o->turn_tokens,
         .min = 1,
         .max = 1u << 20},
        BENCH_REPEAT_OPTION(&o->repeat),
        BENCH_JSON_OPTION(&o->json),
    };
    int rc = bench_parse_options(argc, argv, "handoff", print_help, options, TD_ARRAY_LEN(options));

    if (rc != BENCH_EXIT_OK) {
        return rc;
    }
    return bench_cluster_has_local_sh(o->local_sh) ? BENCH_EXIT_OK : BENCH_EXIT_USAGE;
}

/* --- start and end ---------------------------------------------------------------------------- */

static int start_all(handoff_t *h)
{
    const handoff_options_t *o = &h->options;
    td_model_options_t options = {.precision = o->precision,
                                  .threads = o->threads,
                                  .rows_max = HANDOFF_CHUNK,
                                  .logit_rows_max = 1,
                                  .block_tokens = TD_KV_BLOCK_TOKENS_DEFAULT};
    int rc = BENCH_EXIT_OK;

    /* Clusters before the model, whose threads a fork would not copy. */
    for (uint32_t s = 0; s < h->split_count && rc == BENCH_EXIT_OK; s++) {
        rc = split_start(h, &h->splits[s]);
    }
    if (rc == BENCH_EXIT_OK) {
        rc = bench_model_open(o->model, &options, 1, o->tokens, &h->run);
    }
    if (rc != BENCH_EXIT_OK) {
        return rc;
    }
    h->ids_max = TD_MAX(o->tokens, o->cached_tokens + HANDOFF_TAIL_TOKENS);
    if (h->ids_max + HANDOFF_ANSWER_TOKENS > td_model_info(h->run.model)->context_max) {
        return bench_usage_error("the model's context of %u tokens is too short for that",
                                 td_model_info(h->run.model)->context_max);
    }
    h->ids = td_calloc(h->ids_max, sizeof(*h->ids));
    return h->ids == NULL ? BENCH_EXIT_FAILED : BENCH_EXIT_OK;
}

int bench_handoff(int argc, char **argv)
{
    static handoff_t h = {.options = {.local_sh = "deploy/local.sh",
                                      .precision_name = "mixed",
                                      .precision = TD_PRECISION_MIXED,
                                      .threads = 2,
                                      .tokens = 512,
                                      .cached_tokens = 1500,
                                      .turn_tokens = 64,
                                      .repeat = 5,
                                      .use_shm = true,
                                      .use_tcp = true}};
    int rc = parse_options(argc, argv, &h.options);

    if (rc != BENCH_EXIT_OK) {
        return rc < 0 ? BENCH_EXIT_OK : rc;
    }
    bench_cluster_find_bin(h.options.bin);
    (void)snprintf(h.options.threads_text, sizeof(h.options.threads_text), "%u", h.options.threads);
    h.random = td_random_u64();
    h.figures = json_object();
    if (h.options.use_shm) {
        h.splits[h.split_count++] = (split_t){.carrier = "shm", .best_ns = UINT64_MAX};
    }
    if (h.options.use_tcp) {
        h.splits[h.split_count++] = (split_t){.carrier = "tcp", .best_ns = UINT64_MAX};
    }
    (void)curl_global_init(CURL_GLOBAL_DEFAULT);
    rc = start_all(&h);
    if (rc == BENCH_EXIT_OK) {
        bool ok = warm_up(&h) && measure_split(&h) && measure_cached(&h) && measure_turns(&h);
        rc = ok ? BENCH_EXIT_OK : BENCH_EXIT_FAILED;
    }
    for (uint32_t s = 0; s < h.split_count; s++) {
        split_stop(&h.splits[s]);
    }
    bench_model_close(&h.run);
    td_free(h.ids);
    bench_samples_fini(&h.turns);
    if (rc == BENCH_EXIT_OK) {
        bench_print_figures(h.figures, h.options.json);
    }
    json_decref(h.figures);
    curl_global_cleanup();
    return rc;
}

/* tandem-bench model - speed of the forward pass: prefill, decode batches, verification. */
#include <jansson.h>
#include <stdio.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/model/td_model_internal.h"
#include "tests/bench/bench.h"
#include "tests/bench/bench_options.h"

#define MODEL_CHUNK 512u
#define MODEL_PREFILL_MAX 2048u
#define MODEL_DECODE_CONTEXT 128u
#define MODEL_VERIFY_CONTEXT 256u
#define MODEL_SEQUENCES 16u
#define TURNS 3u        /* a repeat, where figures take turns */
#define READ_SAMPLES 4u /* a turn, and as many before them */
#define DECODE_STEPS 8u /* timed as one sample: a step alone is a few ms */

typedef struct model_options {
    const char *model;
    uint32_t threads;
    uint32_t repeat;
    td_precision_t precision;
    td_backend_t backend;
    td_devices_t devices;
    td_isa_t isa;
    td_kv_codec_t kv_codec;
    const char *attention; /* borrowed; NULL = the model's */
    bool json;
} model_options_t;

typedef struct model_bench {
    model_options_t options;
    bench_model_run_t run;
    uint32_t sequence_blocks; /* blocks of one sequence in run.blocks */
    td_model_row_t rows[MODEL_CHUNK];
    json_t *figures; /* in the order they are measured */
} model_bench_t;

static void print_help(void)
{
    (void)puts(
        "Usage: tandem-bench model --model FILE [options]\n"
        "\n"
        "Measures one model: loading, prefill of 128 to 2048 tokens in chunks of 512, decode\n"
        "steps of 1 to 16 sequences at 128 tokens, passes of 1 to 8 rows of one sequence at\n"
        "256 tokens. Then attention alone over a prefill of 2048 tokens (multiplications and\n"
        "additions a second), how fast as many bytes as the weights have can be read, and which\n"
        "part of that a decode step of one sequence reaches. Each figure is the best of the\n"
        "repeats.\n"
        "\n"
        "Options:\n"
        "  --model FILE      GGUF file (required)\n"
        "  --threads N       default 2\n"
        "  --precision P     fast, mixed (default) or exact\n"
        "  --kv-codec C      " BENCH_CODEC_NAMES "; default f16\n"
        "  --attention A     full, window:W[,SINKS] or strided:LOCAL,STRIDE[,SUMMARY]; default "
        "the\n"
        "                    model's\n"
        "  --backend B       " BENCH_BACKEND_NAMES "; default cpu\n"
        "  --device D[,D]    cuda: which, several with a part of the model each; default 0\n"
        "  --isa I           " BENCH_ISA_NAMES "; default auto\n"
        "  --repeat N        default 5\n"
        "  --json            one JSON object instead of a table\n"
        "  --help            this text");
}

static void add_figure(model_bench_t *b, const char *key, double value)
{
    (void)json_object_set_new(b->figures, key, json_real(value));
    (void)fprintf(stderr, "tandem-bench: %s %.2f\n", key, value);
}

/* Any text does: the time does not depend on what the tokens are. */
static uint32_t some_token(const model_bench_t *b, uint32_t i)
{
    return (i * 7919u + 17u) % td_model_info(b->run.model)->vocab_size;
}

static bool pass(model_bench_t *b, uint32_t rows)
{
    const float *logits = NULL;
    return td_model_forward(b->run.model, b->run.pool, b->rows, rows, 0, NULL, NULL, &logits) ==
           TD_OK;
}

static bool prefill(model_bench_t *b, uint32_t sequence, uint32_t tokens)
{
    for (uint32_t at = 0; at < tokens; at += MODEL_CHUNK) {
        uint32_t count = TD_MIN(MODEL_CHUNK, tokens - at);
        for (uint32_t i = 0; i < count; i++) {
            b->rows[i] = (td_model_row_t){.token = some_token(b, at + i + sequence),
                                          .position = at + i,
                                          .blocks = b->run.blocks + sequence * b->sequence_blocks,
                                          .want_logits = at + i + 1 == tokens};
        }
        if (!pass(b, count)) {
            return false;
        }
    }
    return true;
}

static bool measure_prefill(model_bench_t *b)
{
    static const uint32_t sizes[] = {128, 512, MODEL_PREFILL_MAX};
    for (size_t s = 0; s < TD_ARRAY_LEN(sizes); s++) {
        char key[64];
        uint64_t best_ns = UINT64_MAX;
        if (sizes[s] > td_model_info(b->run.model)->context_max) {
            continue;
        }
        for (uint32_t r = 0; r < b->options.repeat; r++) {
            uint64_t begin_ns = td_now_ns();
            if (!prefill(b, 0, sizes[s])) {
                return false;
            }
            best_ns = TD_MIN(best_ns, td_now_ns() - begin_ns);
        }
        (void)snprintf(key, sizeof(key), "prefill_%u_tok_s", sizes[s]);
        add_figure(b, key, sizes[s] * (double)TD_NS_PER_S / (double)best_ns);
    }
    return true;
}

/* Fills row i of a pass with a row at this position of a sequence. */
static void set_row(model_bench_t *b, uint32_t i, uint32_t sequence, uint32_t position)
{
    b->rows[i] = (td_model_row_t){.token = some_token(b, position + sequence),
                                  .position = position,
                                  .blocks = b->run.blocks + sequence * b->sequence_blocks,
                                  .want_logits = true};
}

/* Decodes DECODE_STEPS tokens of so many sequences. */
static bool decode(model_bench_t *b, uint32_t batch, uint64_t *best_ns)
{
    uint64_t begin_ns = td_now_ns();

    for (uint32_t step = 0; step < DECODE_STEPS; step++) {
        for (uint32_t i = 0; i < batch; i++) {
            set_row(b, i, i, MODEL_DECODE_CONTEXT + step);
        }
        if (!pass(b, batch)) {
            return false;
        }
    }
    *best_ns = TD_MIN(*best_ns, td_now_ns() - begin_ns);
    return true;
}

/* One pass of `rows` rows of one sequence, DECODE_STEPS times. */
static bool verify(model_bench_t *b, uint32_t rows, uint64_t *best_ns)
{
    uint64_t begin_ns = td_now_ns();

    for (uint32_t step = 0; step < DECODE_STEPS; step++) {
        for (uint32_t i = 0; i < rows; i++) {
            set_row(b, i, 0, MODEL_VERIFY_CONTEXT + i);
        }
        if (!pass(b, rows)) {
            return false;
        }
    }
    *best_ns = TD_MIN(*best_ns, td_now_ns() - begin_ns);
    return true;
}

/* The best sample of each size. They take turns: of two that were measured one after the other the
 * ratio would be that of the machine at two times. A turn's first sample finds the caches as
 * another size left them, and is left out. */
static bool measure_sizes(model_bench_t *b, bool (*sample)(model_bench_t *, uint32_t, uint64_t *),
                          const uint32_t *sizes, size_t count, uint64_t *best_ns)
{
    for (size_t s = 0; s < count; s++) {
        best_ns[s] = UINT64_MAX;
    }
    for (uint32_t r = 0; r < TURNS * b->options.repeat; r++) {
        for (size_t s = 0; s < count; s++) {
            uint64_t warm_ns = UINT64_MAX;
            if (!sample(b, sizes[s], &warm_ns) || !sample(b, sizes[s], &best_ns[s])) {
                return false;
            }
        }
    }
    return true;
}

static bool measure_decode(model_bench_t *b)
{
    static const uint32_t batches[] = {1, 2, 4, 8, MODEL_SEQUENCES};
    uint64_t best_ns[TD_ARRAY_LEN(batches)];

    for (uint32_t sequence = 0; sequence < MODEL_SEQUENCES; sequence++) {
        if (!prefill(b, sequence, MODEL_DECODE_CONTEXT)) {
            return false;
        }
    }
    if (!measure_sizes(b, decode, batches, TD_ARRAY_LEN(batches), best_ns)) {
        return false;
    }
    for (size_t s = 0; s < TD_ARRAY_LEN(batches); s++) {
        char key[64];
        (void)snprintf(key, sizeof(key), "decode_b%u_tok_s", batches[s]);
        add_figure(b, key, batches[s] * DECODE_STEPS * (double)TD_NS_PER_S / (double)best_ns[s]);
    }
    return true;
}

static bool measure_verify(model_bench_t *b)
{
    static const uint32_t sizes[] = {1, 2, 4, 6, 8};
    uint64_t best_ns[TD_ARRAY_LEN(sizes)];

    if (!prefill(b, 0, MODEL_VERIFY_CONTEXT) ||
        !measure_sizes(b, verify, sizes, TD_ARRAY_LEN(sizes), best_ns)) {
        return false;
    }
    for (size_t s = 0; s < TD_ARRAY_LEN(sizes); s++) {
        char key[64];
        (void)snprintf(key, sizeof(key), "verify_%u_ms", sizes[s]);
        add_figure(b, key, (double)best_ns[s] / DECODE_STEPS / (double)TD_NS_PER_MS);
    }
    return true;
}

/* --- limits ------------------------------------------------------------------------------------
 */

/* Multiply-adds of attention over so many tokens: scores and sums of what the mask shows, all heads
 * and layers. */
static double attention_macs(const td_model_info_t *info, uint32_t tokens)
{
    double visible = 0;

    for (uint32_t q = 0; q < tokens; q++) {
        for (uint32_t tile = 0; tile <= q; tile += 32) {
            const uint32_t lasting = td_attention_lasting_bits(&info->attention, tile);
            visible += __builtin_popcount(td_attention_bits(&info->attention, q, tile, lasting));
        }
    }
    return visible * 2 * info->kv.head_dim * info->heads * info->kv.layers;
}

/* Over the KV that the last prefill of sequence 0 left. */
static bool attend(model_bench_t *b, uint32_t tokens)
{
    for (uint32_t at = 0; at < tokens; at += MODEL_CHUNK) {
        uint32_t count = TD_MIN(MODEL_CHUNK, tokens - at);
        for (uint32_t i = 0; i < count; i++) {
            set_row(b, i, 0, at + i);
            b->rows[i].want_logits = false;
        }
        if (td_model_attention_only(b->run.model, b->run.pool, b->rows, count) != TD_OK) {
            return false;
        }
    }
    return true;
}

static bool measure_attention(model_bench_t *b)
{
    uint64_t best_ns = UINT64_MAX;
    const td_model_info_t *info = td_model_info(b->run.model);

    if (info->context_max < MODEL_PREFILL_MAX) {
        return true;
    }
    if (!prefill(b, 0, MODEL_PREFILL_MAX)) {
        return false;
    }
    for (uint32_t r = 0; r < b->options.repeat; r++) {
        uint64_t begin_ns = td_now_ns();
        if (!attend(b, MODEL_PREFILL_MAX)) {
            return false;
        }
        best_ns = TD_MIN(best_ns, td_now_ns() - begin_ns);
    }
    add_figure(b, "attention_gmac_s", attention_macs(info, MODEL_PREFILL_MAX) / (double)best_ns);
    return true;
}

static size_t matrix_bytes(const td_cpu_matrix_t *matrix)
{
    return matrix->panels / 2 * matrix->pair_bytes;
}

/* What a pass over one token reads of the weights: everything but the embedding's other rows. */
static size_t token_weight_bytes(const td_model_t *m)
{
    size_t bytes = matrix_bytes(m->head) + m->info.embed_dim * sizeof(float);

    for (uint32_t i = 0; i < m->info.kv.layers; i++) {
        const td_model_layer_t *l = &m->layers[i];
        bytes += matrix_bytes(&l->q) + matrix_bytes(&l->k) + matrix_bytes(&l->v) +
                 matrix_bytes(&l->o) + matrix_bytes(&l->gate) + matrix_bytes(&l->up) +
                 matrix_bytes(&l->down) + 2 * m->info.embed_dim * sizeof(float);
    }
    return bytes;
}

typedef uint64_t reading_t __attribute__((vector_size(64)));

typedef struct reading_pass {
    const reading_t *words; /* borrowed */
    size_t count;
    _Atomic uint64_t sum; /* relaxed: only so that reading is not left out */
} reading_pass_t;

/* With the widest loads that the CPU has: by loads of 16 bytes one core reads a third less. */
__attribute__((target_clones("avx512f", "avx2", "default"))) static uint64_t
read_words(const reading_t *words, size_t count)
{
    reading_t a = {0}; /* one after the other by name: gcc 12 keeps an array of them in memory */
    reading_t b = {0};
    reading_t c = {0};
    reading_t d = {0};

    for (size_t i = 0; i < count; i += 4) {
        a += words[i];
        b += words[i + 1];
        c += words[i + 2];
        d += words[i + 3];
    }
    a += b + c + d;
    return a[0] + a[1] + a[2] + a[3] + a[4] + a[5] + a[6] + a[7];
}

static void read_thread(void *ctx, uint32_t thread_idx, uint32_t thread_count)
{
    reading_pass_t *pass = ctx;
    size_t part = pass->count / thread_count / 4 * 4;

    atomic_fetch_add_explicit(&pass->sum, read_words(pass->words + part * thread_idx, part),
                              memory_order_relaxed);
}

static void read_some(td_threads_t *threads, reading_pass_t *pass)
{
    for (uint32_t step = 0; step < DECODE_STEPS; step++) { /* a sample is as long as decode's */
        td_threads_run(threads, read_thread, pass);
    }
}

/* Reading and decoding take turns: what other guests of the machine leave of its memory's bandwidth
 * changes from one second to the next. Each has run for as long before it is measured: what the
 * other left in the caches is not what it meets where it goes on and on. */
static bool measure_reading(model_bench_t *b)
{
    size_t bytes = token_weight_bytes(b->run.model);
    reading_pass_t pass = {.count = bytes / sizeof(reading_t)};
    uint64_t best_ns = UINT64_MAX;
    uint64_t decode_ns = UINT64_MAX;
    bool ok = true;
    td_threads_t *threads = NULL;
    td_arena_t *arena = td_arena_create(); /* as the weights have */
    reading_t *words = arena == NULL ? NULL : td_arena_alloc(arena, bytes);

    if (words == NULL || td_threads_create(b->options.threads, &threads) != TD_OK) {
        td_arena_destroy(arena);
        return false;
    }
    memset(words, 1, bytes); /* pages of its own, not one page of zeros many times */
    pass.words = words;
    for (uint32_t r = 0; ok && r < TURNS * b->options.repeat; r++) {
        for (uint32_t i = 0; i < 2 * READ_SAMPLES; i++) { /* the first half only warms up */
            uint64_t begin_ns = td_now_ns();
            read_some(threads, &pass);
            best_ns = i < READ_SAMPLES ? best_ns : TD_MIN(best_ns, td_now_ns() - begin_ns);
        }
        for (uint32_t i = 0; ok && i < 2 * READ_SAMPLES; i++) {
            uint64_t warm_ns = UINT64_MAX;
            ok = decode(b, 1, i < READ_SAMPLES ? &warm_ns : &decode_ns);
        }
    }
    td_threads_destroy(threads);
    td_arena_destroy(arena);
    add_figure(b, "weights_mb", (double)bytes / 1e6);
    add_figure(b, "read_limit_gb_s", DECODE_STEPS * (double)bytes / (double)best_ns);
    add_figure(b, "read_fraction", (double)best_ns / (double)decode_ns);
    return ok;
}

static double resident_mb(void)
{
    unsigned long pages_total = 0;
    unsigned long pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");

    if (file == NULL || fscanf(file, "%lu %lu", &pages_total, &pages) != 2) {
        pages = 0;
    }
    if (file != NULL) {
        (void)fclose(file);
    }
    return (double)pages * 4096 / 1e6;
}

static int parse_options(int argc, char **argv, model_options_t *o)
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
        BENCH_REPEAT_OPTION(&o->repeat),
        BENCH_JSON_OPTION(&o->json),
    };

    return bench_parse_options(argc, argv, "model", print_help, options, TD_ARRAY_LEN(options));
}

int bench_model(int argc, char **argv)
{
    static model_bench_t b = {
        .options = {.threads = 2, .repeat = 5, .precision = TD_PRECISION_MIXED}};
    td_model_options_t options = {0};
    uint64_t begin_ns = 0;
    bool ok = false;
    int rc = parse_options(argc, argv, &b.options);

    if (rc != BENCH_EXIT_OK) {
        return rc < 0 ? BENCH_EXIT_OK : rc;
    }
    options = (td_model_options_t){.precision = b.options.precision,
                                   .backend = b.options.backend,
                                   .devices = b.options.devices,
                                   .isa = b.options.isa,
                                   .threads = b.options.threads,
                                   .rows_max = MODEL_CHUNK,
                                   .logit_rows_max = MODEL_SEQUENCES,
                                   .block_tokens = TD_KV_BLOCK_TOKENS_DEFAULT,
                                   .attention = b.options.attention,
                                   .kv_codec = b.options.kv_codec};
    begin_ns = td_now_ns();
    rc = bench_model_open(b.options.model, &options, MODEL_SEQUENCES, MODEL_PREFILL_MAX, &b.run);
    if (rc != BENCH_EXIT_OK) {
        return rc;
    }
    b.sequence_blocks = b.run.block_count / MODEL_SEQUENCES;
    b.figures = json_object();
    add_figure(&b, "load_ms", (double)(td_now_ns() - begin_ns) / (double)TD_NS_PER_MS);
    add_figure(&b, "rss_mb", resident_mb());
    ok = measure_prefill(&b) && measure_decode(&b) && measure_verify(&b);
    if (ok && b.options.backend == TD_BACKEND_CPU) { /* of a device tests/gpu measures the rest */
        ok = measure_attention(&b) && measure_reading(&b);
    }
    if (ok) {
        bench_print_figures(b.figures, b.options.json);
    }
    json_decref(b.figures);
    bench_model_close(&b.run);
    return ok ? BENCH_EXIT_OK : BENCH_EXIT_FAILED;
}

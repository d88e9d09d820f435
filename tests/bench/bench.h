/* bench.h - what the subcommands of tandem-bench share.
 * Threads: owner. */
#pragma once

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#include "common/kv/td_pool.h"
#include "common/model/td_model.h"

#define BENCH_CONTEXT_MAX (1u << 20)
#define BENCH_EXIT_OK 0
#define BENCH_EXIT_FAILED 1 /* the run went wrong */
#define BENCH_EXIT_USAGE 2  /* the input was wrong */

/** Subcommands: arguments from their own name on; they answer the exit code. */
int bench_eval(int argc, char **argv);
int bench_mock(int argc, char **argv);
int bench_model(int argc, char **argv);
int bench_handoff(int argc, char **argv);
int bench_hot(int argc, char **argv);
int bench_instant(int argc, char **argv);
int bench_kv(int argc, char **argv);
int bench_load(int argc, char **argv);
int bench_router(int argc, char **argv);
int bench_serve(int argc, char **argv);
int bench_spec(int argc, char **argv);
int bench_store(int argc, char **argv);
int bench_transfer(int argc, char **argv);

/** Says "tandem-bench: ..." on standard error. Answers BENCH_EXIT_USAGE. */
int bench_usage_error(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
/** Parses a whole decimal number in [min, max]; false after saying what is wrong. */
bool bench_parse_u32(const char *option, const char *text, uint32_t min, uint32_t max,
                     uint32_t *out);
#define BENCH_ISA_NAMES "auto, portable, avx2 or avx512"
/** One of BENCH_ISA_NAMES; false after saying what is wrong. */
bool bench_parse_isa(const char *text, td_isa_t *out);
#define BENCH_BACKEND_NAMES "cpu or cuda"
bool bench_parse_backend(const char *text, td_backend_t *out);
bool bench_parse_devices(const char *text, td_devices_t *out);
bool bench_parse_precision(const char *text, td_precision_t *out);
#define BENCH_CODEC_NAMES "f16, f8_e4m3, i8 or f4_e2m1"
bool bench_parse_codec(const char *text, td_kv_codec_t *out);
/** One of TD_ATTENTION_FORMS; false after saying what is wrong. */
bool bench_check_attention(const char *text);
/** Prints a flat object of numbers to standard output, as one line of JSON or as a table. */
void bench_print_figures(json_t *figures, bool as_json);

/** A model with a KV pool of its own, its blocks in order. */
typedef struct bench_model_run {
    td_model_t *model;
    uint8_t *pool;     /* zeroed; blocks td_kv_block_bytes() apart */
    td_pool_t *mapped; /* over it, as nodes give a device theirs */
    uint32_t *blocks;  /* [block_count]: 0, 1, 2... */
    uint32_t block_count;
} bench_model_run_t;

/** Opens and loads; sequences of context_max tokens fit `sequences` times into the pool.
 * Answers an exit code; what went wrong has been said. */
int bench_model_open(const char *path, const td_model_options_t *options, uint32_t sequences,
                     uint32_t sequence_tokens, bench_model_run_t *run);
void bench_model_close(bench_model_run_t *run);

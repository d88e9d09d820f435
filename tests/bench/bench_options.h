/* bench_options.h - options of the subcommands: a table each, and one reader of it.
 * Threads: owner. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum bench_option_kind {
    BENCH_NUMBER,    /* out: uint32_t, in [min, max] */
    BENCH_TEXT,      /* out: const char * */
    BENCH_FLAG,      /* out: bool; takes no value */
    BENCH_BACKEND,   /* out: td_backend_t */
    BENCH_DEVICES,   /* out: td_devices_t */
    BENCH_PRECISION, /* out: td_precision_t */
    BENCH_ISA,       /* out: td_isa_t */
    BENCH_CODEC,     /* out: td_kv_codec_t */
    BENCH_ATTENTION, /* out: const char *, a mask's text */
    BENCH_OWN        /* parse(text, out) answers false after saying what is wrong */
} bench_option_kind_t;

typedef struct bench_option {
    const char *name; /* without "--" */
    bench_option_kind_t kind;
    void *out;
    uint32_t min;
    uint32_t max;
    bool (*parse)(char *text, void *out); /* may change the text */
    bool required;                        /* a BENCH_TEXT whose *out must not stay NULL */
} bench_option_t;

#define BENCH_OPTIONS_MAX 32u
#define BENCH_EXIT_HELP (-1) /* --help was given and answered */
/* Of most subcommands. */
#define BENCH_MODEL_OPTION(at)                                                                     \
    {                                                                                              \
        .name = "model", .kind = BENCH_TEXT, .out = (at), .required = true                         \
    }
#define BENCH_THREADS_OPTION(at)                                                                   \
    {                                                                                              \
        .name = "threads", .kind = BENCH_NUMBER, .out = (at), .min = 1, .max = 256                 \
    }
#define BENCH_REPEAT_OPTION(at)                                                                    \
    {                                                                                              \
        .name = "repeat", .kind = BENCH_NUMBER, .out = (at), .min = 1, .max = 1000                 \
    }
#define BENCH_JSON_OPTION(at)                                                                      \
    {                                                                                              \
        .name = "json", .kind = BENCH_FLAG, .out = (at)                                            \
    }

/** Reads argv[1..]. Answers BENCH_EXIT_OK, BENCH_EXIT_USAGE after saying in one line what is wrong,
 * or BENCH_EXIT_HELP. */
int bench_parse_options(int argc, char **argv, const char *command, void (*print_help)(void),
                        const bench_option_t *options, size_t count);

/* td_config.h - program options: flags > environment (TANDEM_NAME) > YAML file (--config) >
 * default. One table in each program names them all; unknown flags and YAML keys are errors. Every
 * program has --help, --version, --print-config and --config beside its own. Threads: init; reading
 * values afterwards: any. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "common/base/td_status.h"

#define TD_CONFIG_OPTIONS_MAX 96

typedef enum td_option_type {
    TD_OPTION_TEXT,
    TD_OPTION_COUNT, /* an unsigned integer */
    TD_OPTION_BYTES, /* an unsigned integer with an optional suffix K, M, G (1024-based) */
    TD_OPTION_MS,    /* milliseconds; an optional suffix ms or s */
    TD_OPTION_BOOL,  /* true/false, yes/no, 1/0; a flag without value means true */
    TD_OPTION_CHOICE /* one of the words in choices, split by '|' */
} td_option_type_t;

typedef struct td_option {
    const char *name; /* as in --name; TANDEM_NAME in the environment, name in YAML */
    td_option_type_t type;
    const char *def;  /* default, as text; NULL = required for no one, absent */
    const char *help; /* one line */
    uint64_t min;     /* numbers: smallest and largest value; max 0 = no limit */
    uint64_t max;
    const char *choices;
} td_option_t;

typedef struct td_config td_config_t;

/** What the caller does after parsing. */
typedef enum td_config_next {
    TD_CONFIG_RUN,
    TD_CONFIG_EXIT_OK,
    TD_CONFIG_EXIT_USAGE
} td_config_next_t;

/** Reads all sources; prints help, version, the configuration or an error as asked.
 * Owner: *config_out (also set when the program shall exit; may be NULL then) is the caller's. */
td_config_next_t td_config_parse(const char *program, const char *summary,
                                 const td_option_t *options, size_t count, int argc, char **argv,
                                 td_config_t **config_out);
void td_config_destroy(td_config_t *config);

/** Values by name; asserts that the option exists and has a fitting type. Text is NULL if absent.
 */
const char *td_config_text(const td_config_t *config, const char *name);
uint64_t td_config_u64(const td_config_t *config, const char *name); /* count, bytes, ms */
bool td_config_bool(const td_config_t *config, const char *name);

/** Parses one value by an option's rules (also for tests). Errors: TD_ERR_INVALID. */
TD_MUST_CHECK td_status_t td_option_parse_u64(const td_option_t *option, const char *text,
                                              uint64_t *out);

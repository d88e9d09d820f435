/* td_log.h - one key=value line for each event, on standard error.
 * Line: time=<UTC, ms> level=<l> proc=<name> msg="<constant text>" <key=value ...>
 * Never log prompts, tokens or KV bytes.
 * Threads: any; a line is written with one write(2). */
#pragma once

#include "common/base/td_status.h"

typedef enum td_log_level {
    TD_LOG_LEVEL_ERROR = 0,
    TD_LOG_LEVEL_WARN,
    TD_LOG_LEVEL_INFO,
    TD_LOG_LEVEL_DEBUG
} td_log_level_t;

#define TD_LOG_LINE_BYTES_MAX 2048

/** Names the process in every line and sets the lowest level shown.
 * Threads: init. */
void td_log_init(const char *process_name, td_log_level_t level);
/** Parses "error", "warn", "info" or "debug".
 * Errors: TD_ERR_INVALID. */
TD_MUST_CHECK td_status_t td_log_level_parse(const char *text, td_log_level_t *level_out);
void td_log_write(td_log_level_t level, const char *msg, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

#define TD_LOG_ERROR(msg, ...) td_log_write(TD_LOG_LEVEL_ERROR, msg, __VA_ARGS__)
#define TD_LOG_WARN(msg, ...) td_log_write(TD_LOG_LEVEL_WARN, msg, __VA_ARGS__)
#define TD_LOG_INFO(msg, ...) td_log_write(TD_LOG_LEVEL_INFO, msg, __VA_ARGS__)
#define TD_LOG_DEBUG(msg, ...) td_log_write(TD_LOG_LEVEL_DEBUG, msg, __VA_ARGS__)

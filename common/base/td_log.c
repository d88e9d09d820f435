#include "common/base/td_log.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "common/base/td_base.h"

static char log_process_name[32] = "tandem";
/* Relaxed: a late change of level costs a line, nothing else. */
static atomic_int log_level = TD_LOG_LEVEL_INFO;
static const char *const level_names[] = {"error", "warn", "info", "debug"};

void td_log_init(const char *process_name, td_log_level_t level)
{
    (void)snprintf(log_process_name, sizeof(log_process_name), "%s", process_name);
    atomic_store_explicit(&log_level, (int)level, memory_order_relaxed);
}

td_status_t td_log_level_parse(const char *text, td_log_level_t *level_out)
{
    for (size_t i = 0; i < TD_ARRAY_LEN(level_names); i++) {
        if (strcmp(text, level_names[i]) == 0) {
            *level_out = (td_log_level_t)i;
            return TD_OK;
        }
    }
    return TD_ERR_INVALID;
}

void td_log_write(td_log_level_t level, const char *msg, const char *fmt, ...)
{
    char line[TD_LOG_LINE_BYTES_MAX];
    struct timespec now;
    struct tm utc;
    size_t used = 0;
    int n = 0;
    va_list args;

    if ((int)level > atomic_load_explicit(&log_level, memory_order_relaxed)) {
        return;
    }
    (void)clock_gettime(CLOCK_REALTIME, &now);
    (void)gmtime_r(&now.tv_sec, &utc);
    used = strftime(line, sizeof(line), "time=%Y-%m-%dT%H:%M:%S", &utc);
    n = snprintf(line + used, sizeof(line) - used, ".%03ldZ level=%s proc=%s msg=\"%s\" ",
                 now.tv_nsec / 1000000, level_names[level], log_process_name, msg);
    used = TD_MIN(used + (size_t)TD_MAX(n, 0), sizeof(line) - 2);
    va_start(args, fmt);
    n = vsnprintf(line + used, sizeof(line) - used - 1, fmt, args);
    va_end(args);
    used = TD_MIN(used + (size_t)TD_MAX(n, 0), sizeof(line) - 2);
    for (size_t i = 0; i < used; i++) {
        if ((unsigned char)line[i] < 0x20) {
            line[i] = ' '; /* text from outside never starts a line of its own */
        }
    }
    line[used++] = '\n';
    if (write(STDERR_FILENO, line, used) < 0) {
        return; /* nobody to tell */
    }
}

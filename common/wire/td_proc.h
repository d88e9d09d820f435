/* td_proc.h - what every Tandem process does first: options, log, secret, incarnation, bus, status
 * page, signals. And last: the same backwards. Threads: init. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "common/base/td_config.h"
#include "common/base/td_metrics.h"
#include "common/trace/td_tracer.h"
#include "common/wire/td_bus.h"
#include "common/wire/td_statusd.h"

/** Options of every node; a program puts its own behind them in one table. */
#define TD_PROC_OPTIONS                                                                            \
    {"id", TD_OPTION_TEXT, NULL, "name in the cluster, unique [role-<random>]"},                   \
        {"listen", TD_OPTION_TEXT, "tcp://127.0.0.1:*", "ZeroMQ endpoint to bind"},                \
        {"advertise", TD_OPTION_TEXT, NULL, "host that other processes reach this one by"},        \
        {"http", TD_OPTION_TEXT, "127.0.0.1:0", "address of /metrics and /health"},                \
        {"cluster-secret-file", TD_OPTION_TEXT, NULL,                                              \
         "file with the cluster's secret, mode 0600"},                                             \
        {"curve", TD_OPTION_BOOL, "false", "encrypt ZeroMQ on loopback too (elsewhere always)"},   \
        {"log-level", TD_OPTION_CHOICE,       "info", "lowest level logged", 0,                    \
         0,           "error|warn|info|debug"},                                                    \
        {"ready-file", TD_OPTION_TEXT, NULL, "write the status page's host:port here once bound"}, \
        TD_TRACER_OPTIONS,                                                                         \
    {                                                                                              \
        "fault", TD_OPTION_TEXT, NULL, "test builds: STEP:kill|stop|hang[:N]"                      \
    }

typedef struct td_proc {
    td_config_t *config;
    td_metrics_t *metrics;
    td_tracer_t *tracer; /* NULL: no spans are sent */
    td_bus_t *bus;
    td_statusd_t *statusd; /* NULL when the program serves HTTP itself */
    int signal_fd;         /* readable on SIGTERM or SIGINT */
    const char *program;   /* a literal */
    uint64_t incarnation;
    uint8_t secret[TD_CLUSTER_SECRET_BYTES];
    char id[TD_MSG_ID_CHARS_MAX + 1];
} td_proc_t;

/** Parses and logs; TD_CONFIG_EXIT_* when there is nothing to run. */
td_config_next_t td_proc_init(td_proc_t *proc, const char *program, const char *role,
                              const char *summary, const td_option_t *options, size_t count,
                              int argc, char **argv);
/** Opens the bus and, with_statusd, the status page.
 * Errors: as td_bus_create() and td_statusd_create(). */
TD_MUST_CHECK td_status_t td_proc_open(td_proc_t *proc, bool with_statusd);
/** Writes --ready-file, if asked for. */
void td_proc_announce(const td_proc_t *proc, const char *http_address);
void td_proc_fini(td_proc_t *proc);

/* What td_proc_init() does too, for programs that are no member of a cluster. */

/** Readable on SIGTERM or SIGINT, which then end nothing; SIGPIPE is ignored. Call before the first
 * thread, so that none takes them away. -1: it cannot be. */
int td_proc_open_signals(void);
/** As many descriptors as the system allows us. */
void td_proc_raise_file_limit(void);

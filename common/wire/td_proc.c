#include "common/wire/td_proc.h"

#include <signal.h>
#include <sodium.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/base/td_fault.h"
#include "common/base/td_log.h"
#include "common/base/td_names.h"

int td_proc_open_signals(void)
{
    sigset_t set;
    (void)sigemptyset(&set);
    (void)sigaddset(&set, SIGTERM);
    (void)sigaddset(&set, SIGINT);
    if (sigprocmask(SIG_BLOCK, &set, NULL) != 0) {
        return -1;
    }
    (void)signal(SIGPIPE, SIG_IGN);
    return signalfd(-1, &set, SFD_NONBLOCK | SFD_CLOEXEC);
}

void td_proc_raise_file_limit(void)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
        limit.rlim_cur = limit.rlim_max;
        (void)setrlimit(RLIMIT_NOFILE, &limit);
    }
}

td_config_next_t td_proc_init(td_proc_t *proc, const char *program, const char *role,
                              const char *summary, const td_option_t *options, size_t count,
                              int argc, char **argv)
{
    td_log_level_t level = TD_LOG_LEVEL_INFO;
    td_config_next_t next = TD_CONFIG_RUN;
    const char *id = NULL;

    memset(proc, 0, sizeof(*proc));
    proc->signal_fd = -1;
    proc->program = program;
    next = td_config_parse(program, summary, options, count, argc, argv, &proc->config);
    if (next != TD_CONFIG_RUN) {
        return next;
    }
    id = td_config_text(proc->config, "id");
    if (id != NULL) {
        (void)snprintf(proc->id, sizeof(proc->id), "%s", id);
    } else {
        (void)snprintf(proc->id, sizeof(proc->id), "%s-%06x", role,
                       (unsigned)(td_random_u64() & 0xffffff));
    }
    if (id != NULL && !td_name_is_valid(id, TD_MSG_ID_CHARS_MAX)) {
        (void)fprintf(stderr, "%s: id: '%s' is not 1 to %u letters, digits, '-', '_' or '.'\n",
                      program, id, TD_MSG_ID_CHARS_MAX);
        return TD_CONFIG_EXIT_USAGE;
    }
    if (td_log_level_parse(td_config_text(proc->config, "log-level"), &level) != TD_OK) {
        return TD_CONFIG_EXIT_USAGE;
    }
    td_log_init(proc->id, level);
    if (sodium_init() < 0 || td_fault_init(td_config_text(proc->config, "fault")) != TD_OK) {
        (void)fprintf(stderr, "%s: fault: STEP:kill|stop|hang[:N] expected, in a test build\n",
                      program);
        return TD_CONFIG_EXIT_USAGE;
    }
    if (td_cluster_secret_load(td_config_text(proc->config, "cluster-secret-file"), proc->secret) !=
            TD_OK ||
        td_metrics_create(&proc->metrics) != TD_OK) {
        return TD_CONFIG_EXIT_USAGE;
    }
    proc->signal_fd = td_proc_open_signals();
    if (proc->signal_fd < 0) {
        return TD_CONFIG_EXIT_USAGE;
    }
    td_proc_raise_file_limit();
    proc->incarnation = td_random_u64() | 1; /* 0 means "not known" on the wire */
    return TD_CONFIG_RUN;
}

/* Its counters are there with a collector and without. */
static td_status_t open_tracer(td_proc_t *proc)
{
    const char *role = strrchr(proc->program, '-'); /* tandem-ROLE */
    td_tracer_config_t config = {.endpoint = td_config_text(proc->config, "otlp-endpoint"),
                                 .service = proc->program,
                                 .instance = proc->id};
    char name[96];

    role = role == NULL ? proc->program : role + 1;
    (void)snprintf(name, sizeof(name), "tandem_%s_spans_sent_total", role);
    config.sent = td_metrics_counter(proc->metrics, name, NULL, "Spans that the collector took.");
    (void)snprintf(name, sizeof(name), "tandem_%s_spans_dropped_total", role);
    config.dropped = td_metrics_counter(proc->metrics, name, NULL,
                                        "Spans for which there was no room, or no collector.");
    return config.endpoint == NULL ? TD_OK : td_tracer_create(&config, &proc->tracer);
}

td_status_t td_proc_open(td_proc_t *proc, bool with_statusd)
{
    td_bus_config_t bus = {
        .bind = td_config_text(proc->config, "listen"),
        .advertise = td_config_text(proc->config, "advertise"),
        .id = proc->id,
        .incarnation = proc->incarnation,
        .secret = proc->secret,
        .curve = td_config_bool(proc->config, "curve"),
    };

    TD_TRY(open_tracer(proc));
    TD_TRY(td_bus_create(&bus, &proc->bus));
    if (with_statusd) {
        TD_TRY(
            td_statusd_create(td_config_text(proc->config, "http"), proc->metrics, &proc->statusd));
    }
    TD_LOG_INFO("process up", "id=%s bus=%s http=%s version=%s", proc->id,
                td_bus_endpoint(proc->bus),
                proc->statusd != NULL ? td_statusd_address(proc->statusd) : "own", TD_VERSION);
    return TD_OK;
}

void td_proc_announce(const td_proc_t *proc, const char *http_address)
{
    const char *path = td_config_text(proc->config, "ready-file");
    char partial[4096];
    FILE *file = NULL;

    if (path == NULL) {
        return;
    }
    /* Rename, so that whoever waits for the file never reads half of it. */
    (void)snprintf(partial, sizeof(partial), "%s.partial", path);
    file = fopen(partial, "w");
    if (file == NULL || fprintf(file, "%s %s\n", http_address, td_bus_endpoint(proc->bus)) < 0 ||
        fclose(file) != 0 || rename(partial, path) != 0) {
        TD_LOG_ERROR("ready file not written", "file=%s err=\"%m\"", path);
    }
}

void td_proc_fini(td_proc_t *proc)
{
    td_statusd_destroy(proc->statusd);
    td_bus_destroy(proc->bus);
    td_tracer_destroy(proc->tracer); /* counts into the metrics to its end */
    td_metrics_destroy(proc->metrics);
    td_config_destroy(proc->config);
    if (proc->signal_fd >= 0) {
        (void)close(proc->signal_fd);
    }
    sodium_memzero(proc->secret, sizeof(proc->secret));
}

#include "tests/bench/bench_cluster.h"

#include <fcntl.h>
#include <jansson.h>
#include <libgen.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/base/td_base.h"
#include "common/base/td_buf.h"
#include "tests/bench/bench.h"

#define CLUSTER_ARGUMENTS_MAX 64u
#define CLUSTER_LOG_LINE_BYTES 4096

/* Standard output: "up" when the cluster is; standard input: ends when it may go. */
static const char keeper_script[] =
    "trap : PIPE\n" /* nobody may listen any more: go on, and clean up */
    "local_sh=$1 dir=$2; shift 2\n"
    "if \"$local_sh\" up --dir \"$dir/run\" \"$@\" >\"$dir/up.log\" 2>&1 </dev/null; then\n"
    "    echo up || true\n"
    "    read -r _ || true\n"
    "else\n"
    "    cat \"$dir/up.log\" >&2\n"
    "fi\n"
    "\"$local_sh\" down --dir \"$dir/run\" >/dev/null 2>&1 </dev/null\n"
    "rm -rf \"$dir\"\n";

_Noreturn static void keeper_main(const bench_cluster_options_t *options, const char *dir, int in,
                                  int out)
{
    const char *argv[CLUSTER_ARGUMENTS_MAX + 8] = {
        "bash", "-c", keeper_script, "keeper", options->local_sh, dir};
    size_t count = 6;

    for (size_t i = 0; options->arguments[i] != NULL && i < CLUSTER_ARGUMENTS_MAX; i++) {
        argv[count++] = options->arguments[i];
    }
    (void)setsid(); /* an interrupt from the keyboard is for the bench; the keeper cleans up after
                       it */
    if (dup2(in, STDIN_FILENO) >= 0 && dup2(out, STDOUT_FILENO) >= 0 &&
        setenv("UCX_TLS", options->ucx_tls, 1) == 0) {
        (void)execvp("bash", (char *const *)(uintptr_t)argv);
    }
    _exit(BENCH_EXIT_FAILED);
}

void bench_cluster_find_bin(char *dir)
{
    char path[PATH_MAX] = {0};

    if (dir[0] == '\0' && readlink("/proc/self/exe", path, sizeof(path) - 1) > 0) {
        (void)snprintf(dir, PATH_MAX, "%s", dirname(path));
    }
}

bool bench_cluster_parse_bin(char *text, void *out)
{
    (void)snprintf(out, PATH_MAX, "%s", text);
    return true;
}

bool bench_cluster_has_local_sh(const char *local_sh)
{
    if (access(local_sh, X_OK) != 0) {
        (void)bench_usage_error("no program at %s: say where deploy/local.sh is with --local-sh",
                                local_sh);
        return false;
    }
    return true;
}

static bool start_keeper(const bench_cluster_options_t *options, bench_cluster_t *cluster,
                         int *said_out)
{
    int control[2] = {-1, -1};
    int said[2] = {-1, -1};

    if (pipe2(control, O_CLOEXEC) != 0) {
        return false;
    }
    cluster->control = control[1];
    if (pipe2(said, O_CLOEXEC) != 0) {
        (void)close(control[0]);
        return false;
    }
    (void)fflush(NULL);
    cluster->keeper = fork();
    if (cluster->keeper == 0) {
        keeper_main(options, cluster->dir, control[0], said[1]);
    }
    (void)close(control[0]);
    (void)close(said[1]);
    *said_out = said[0];
    return cluster->keeper > 0;
}

/* The router's address, out of what local.sh wrote. */
static char *router_url(const bench_cluster_t *cluster)
{
    td_str_t text = {0};
    json_t *processes = NULL;
    json_t *process = NULL;
    const char *http = NULL;
    size_t i = 0;

    if (td_str_printf(&text, "%s/run/cluster.json", cluster->dir) == TD_OK) {
        processes = json_load_file(text.bytes, 0, NULL);
    }
    td_str_fini(&text);
    json_array_foreach(processes, i, process)
    {
        const char *role = json_string_value(json_object_get(process, "role"));
        if (role != NULL && strcmp(role, "router") == 0) {
            http = json_string_value(json_object_get(process, "http"));
        }
    }
    if (http != NULL && td_str_printf(&text, "http://%s", http) != TD_OK) {
        td_str_fini(&text);
    }
    json_decref(processes);
    return text.bytes;
}

int bench_cluster_start(const bench_cluster_options_t *options, bench_cluster_t *cluster)
{
    const char *tmp = getenv("TMPDIR");
    char answer[8] = {0};
    int said = -1;

    *cluster = (bench_cluster_t){.control = -1};
    (void)snprintf(cluster->dir, sizeof(cluster->dir), "%s/tandem-bench.XXXXXX",
                   tmp == NULL || strlen(tmp) > BENCH_DIR_BYTES / 2 ? "/tmp" : tmp);
    if (mkdtemp(cluster->dir) == NULL) {
        (void)bench_usage_error("cannot make a folder like %s", cluster->dir);
        return BENCH_EXIT_FAILED;
    }
    if (!start_keeper(options, cluster, &said)) {
        (void)bench_usage_error("cannot start a cluster: no pipe or no process");
        (void)rmdir(cluster->dir);
        return BENCH_EXIT_FAILED;
    }
    if (read(said, answer, sizeof(answer) - 1) > 0) {
        cluster->url = router_url(cluster);
    }
    (void)close(said);
    if (cluster->url == NULL) {
        (void)bench_usage_error("the cluster did not come up (above)");
        return BENCH_EXIT_FAILED;
    }
    return BENCH_EXIT_OK;
}

void bench_cluster_stop(bench_cluster_t *cluster)
{
    if (cluster->keeper <= 0) {
        return;
    }
    if (cluster->control >= 0) {
        (void)close(cluster->control);
    }
    (void)waitpid(cluster->keeper, NULL, 0);
    td_free(cluster->url);
    *cluster = (bench_cluster_t){.control = -1};
}

/* Reads a process's log up to the first line that holds a text; answers where in the line it
 * stands, NULL = nowhere. */
static const char *find_in_log(const bench_cluster_t *cluster, const char *id, const char *text,
                               char *line, int line_bytes)
{
    char path[BENCH_DIR_BYTES + 128];
    const char *at = NULL;
    FILE *file = NULL;

    (void)snprintf(path, sizeof(path), "%s/run/%s.log", cluster->dir, id);
    file = fopen(path, "r");
    while (file != NULL && at == NULL && fgets(line, line_bytes, file) != NULL) {
        at = strstr(line, text);
    }
    if (file != NULL) {
        (void)fclose(file);
    }
    return at;
}

bool bench_cluster_log_holds(const bench_cluster_t *cluster, const char *id, const char *text)
{
    char line[CLUSTER_LOG_LINE_BYTES];

    return find_in_log(cluster, id, text, line, sizeof(line)) != NULL;
}

bool bench_cluster_log_word(const bench_cluster_t *cluster, const char *id, const char *name,
                            char *out, size_t len)
{
    char line[CLUSTER_LOG_LINE_BYTES];
    const char *at = find_in_log(cluster, id, name, line, sizeof(line));

    if (at != NULL) {
        at += strlen(name);
        (void)snprintf(out, len, "%.*s", (int)strcspn(at, " \n"), at);
    }
    return at != NULL;
}

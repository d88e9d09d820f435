/* bench_cluster.h - a cluster for a measurement, on a free port and in a folder of its own.
 * A keeper process starts it through deploy/local.sh and stops it when this process lets go of it,
 * or is gone, in whatever way. Threads: owner; start clusters before the first thread. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

#define BENCH_DIR_BYTES 512u

typedef struct bench_cluster {
    char dir[BENCH_DIR_BYTES]; /* temporary; the keeper removes it */
    char *url;                 /* owned; of the router */
    pid_t keeper;              /* 0 = none */
    int control;               /* the keeper ends the cluster when this closes; -1 = none */
} bench_cluster_t;

typedef struct bench_cluster_options {
    const char *local_sh;         /* path of deploy/local.sh */
    const char *ucx_tls;          /* value of UCX_TLS, which decides carriers */
    const char *const *arguments; /* for "local.sh up", ended by NULL */
} bench_cluster_options_t;

/** Fills dir, if it is empty, with the folder of this program: the cluster's are beside it.
 * Shape: dir [PATH_MAX]. */
void bench_cluster_find_bin(char *dir);
/** Says so in one line when there is no program at a path. */
bool bench_cluster_has_local_sh(const char *local_sh);
/** A parse function of an option: copies the text into out [PATH_MAX]. */
bool bench_cluster_parse_bin(char *text, void *out);
/** Returns when the cluster serves. Answers an exit code; what went wrong was said.
 * Owner: the caller ends it with bench_cluster_stop(), also after a failure. */
int bench_cluster_start(const bench_cluster_options_t *options, bench_cluster_t *cluster);
/** Stops every process and removes the folder. */
void bench_cluster_stop(bench_cluster_t *cluster);
/** Whether a process's log holds a text. id as in deploy/local.sh, e.g. "decode-1". */
bool bench_cluster_log_holds(const bench_cluster_t *cluster, const char *id, const char *text);
/** The word behind a name in a process's log, e.g. "368640" of "block_bytes=368640". out [len] is
 * cut to fit, and not touched where the name doesn't stand. */
bool bench_cluster_log_word(const bench_cluster_t *cluster, const char *id, const char *name,
                            char *out, size_t len);

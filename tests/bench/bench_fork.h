/* bench_fork.h - processes of a measurement that talk over socket pairs, as nodes do through the
 * router. Threads: owner; fork before the first thread. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

/** Answers the pid, 0 in the child, -1 on failure. A child ends with its parent. */
pid_t bench_fork(void);
/** Waits for a child; whether it exited with BENCH_EXIT_OK. */
bool bench_ended_well(pid_t pid);
/** All of it, or false: the other end has gone. */
bool bench_send_all(int fd, const void *bytes, size_t len);
bool bench_receive_all(int fd, void *bytes, size_t len);

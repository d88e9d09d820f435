#include "tests/bench/bench_fork.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/bench/bench.h"

pid_t bench_fork(void)
{
    pid_t parent = getpid();
    pid_t pid = 0;

    (void)fflush(NULL);
    pid = fork();
    if (pid == 0) {
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent) { /* it ended before */
            _exit(BENCH_EXIT_FAILED);
        }
    }
    return pid;
}

bool bench_ended_well(pid_t pid)
{
    int status = 0;
    return pid > 0 && waitpid(pid, &status, 0) == pid && WIFEXITED(status) &&
           WEXITSTATUS(status) == BENCH_EXIT_OK;
}

bool bench_send_all(int fd, const void *bytes, size_t len)
{
    const char *at = bytes;
    while (len > 0) {
        ssize_t n = send(fd, at, len, MSG_NOSIGNAL);
        if (n <= 0) {
            return false;
        }
        at += n;
        len -= (size_t)n;
    }
    return true;
}

bool bench_receive_all(int fd, void *bytes, size_t len)
{
    char *at = bytes;
    while (len > 0) {
        ssize_t n = recv(fd, at, len, 0);
        if (n <= 0) {
            return false; /* the other end has gone */
        }
        at += n;
        len -= (size_t)n;
    }
    return true;
}

/* test_etcd_process.h - a real etcd on loopback, started by the test and stopped with it, and
 * candidates that are driven by hand: one that is not driven is a frozen process. Include cmocka.h
 * before. Threads: owner. */
#pragma once

#include <arpa/inet.h>
#include <poll.h>
#include <signal.h>
#include <sodium.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/coord/td_coord.h"
#include "common/coord/td_etcd.h"

#define LEASE_MS 2000u /* the shortest that etcd grants */
#define LIMIT_S 15u

typedef struct etcd_process {
    char dir[64];
    char url[64];
    char peer[64];
    char cert[80]; /* with e->key: https, and clients must have a certificate too; "": http */
    char key[80];
    pid_t pid;
} etcd_process_t;

static etcd_process_t shared;

/* --- an etcd of our own ----------------------------------------------------------------------- */

static inline int listen_anywhere(uint16_t *port_out)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof(at);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

    assert_true(fd >= 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&at, sizeof(at)), 0);
    assert_int_equal(listen(fd, 16), 0);
    assert_int_equal(getsockname(fd, (struct sockaddr *)&at, &len), 0);
    *port_out = ntohs(at.sin_port);
    return fd;
}

static inline void launch(etcd_process_t *e)
{
    const bool tls = e->cert[0] != '\0';
    char cluster[96];

    (void)snprintf(cluster, sizeof(cluster), "local=%s", e->peer);
    e->pid = fork();
    assert_true(e->pid >= 0);
    if (e->pid == 0) {
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (freopen("/dev/null", "w", stderr) == NULL) {
            _exit(126);
        }
        (void)execlp("etcd", "etcd", "--name", "local", "--data-dir", e->dir,
                     "--listen-client-urls", e->url, "--advertise-client-urls", e->url,
                     "--listen-peer-urls", e->peer, "--initial-advertise-peer-urls", e->peer,
                     "--initial-cluster", cluster, tls ? "--cert-file" : (char *)NULL, e->cert,
                     "--key-file", e->key, "--trusted-ca-file", e->cert, "--client-cert-auth",
                     (char *)NULL);
        _exit(127); /* deploy/setup.sh installs it */
    }
}

typedef struct told {
    bool done;
    td_status_t status;
    td_etcd_answer_t answer;
} told_t;

static inline void on_told(void *ctx, td_status_t status, const td_etcd_answer_t *answer)
{
    told_t *told = ctx;
    told->done = true;
    told->status = status;
    if (answer != NULL) {
        told->answer = *answer;
    }
}

static inline told_t post(td_etcd_t *etcd, const char *path, const char *text)
{
    told_t told = {0};
    td_str_t body = {0};
    const uint64_t until = td_now_ns() + LIMIT_S * TD_NS_PER_S;

    assert_int_equal(td_str_append_text(&body, text), TD_OK);
    assert_int_equal(td_etcd_post(etcd, path, &body, on_told, &told), TD_OK);
    assert_true(td_etcd_is_busy(etcd));
    while (!told.done) {
        struct pollfd fd = {.fd = td_etcd_fd(etcd), .events = POLLIN};
        assert_true(td_now_ns() < until);
        (void)poll(&fd, 1, 5);
        td_etcd_step(etcd);
    }
    td_str_fini(&body);
    return told;
}

static inline td_etcd_t *client_of(const char *endpoints)
{
    const td_etcd_config_t config = {.endpoints = endpoints, .timeout_ms = 700};
    td_etcd_t *etcd = NULL;

    assert_int_equal(td_etcd_create(&config, &etcd), TD_OK);
    return etcd;
}

static inline void wait_serving(const etcd_process_t *e)
{
    td_etcd_t *etcd = client_of(e->url);
    const uint64_t until = td_now_ns() + LIMIT_S * TD_NS_PER_S;

    while (post(etcd, "/v3/kv/range", "{\"key\":\"eA==\"}").status != TD_OK) {
        int status = 0;
        assert_true(td_now_ns() < until);
        assert_int_equal(waitpid(e->pid, &status, WNOHANG), 0); /* 127: no etcd on this machine */
    }
    td_etcd_destroy(etcd);
}

static inline void start_etcd(etcd_process_t *e)
{
    uint16_t ports[2] = {0};
    const int fds[2] = {listen_anywhere(&ports[0]), listen_anywhere(&ports[1])};

    (void)snprintf(e->dir, sizeof(e->dir), "/tmp/tandem-etcd-XXXXXX");
    assert_non_null(mkdtemp(e->dir));
    (void)snprintf(e->url, sizeof(e->url), "%s://127.0.0.1:%u",
                   e->cert[0] != '\0' ? "https" : "http", ports[0]);
    (void)snprintf(e->peer, sizeof(e->peer), "http://127.0.0.1:%u", ports[1]);
    (void)close(fds[0]);
    (void)close(fds[1]);
    launch(e);
    if (e->cert[0] == '\0') {
        wait_serving(e);
    }
}

static inline void stop_etcd(etcd_process_t *e)
{
    char command[96];

    (void)kill(e->pid, SIGKILL);
    (void)waitpid(e->pid, NULL, 0);
    (void)snprintf(command, sizeof(command), "rm -rf %s", e->dir);
    assert_int_equal(system(command), 0);
}

static inline int group_setup(void **state)
{
    (void)state;
    (void)signal(SIGPIPE, SIG_IGN);
    assert_true(sodium_init() >= 0);
    start_etcd(&shared);
    return 0;
}

static inline int group_teardown(void **state)
{
    (void)state;
    stop_etcd(&shared);
    return 0;
}

/* --- candidates ------------------------------------------------------------------------------- */

static inline td_coord_t *candidate_at(const char *endpoints, const char *cluster, const char *id,
                                       const char *user, const char *password)
{
    const td_coord_config_t config = {.etcd = endpoints,
                                      .cluster = cluster,
                                      .election = "store-master",
                                      .id = id,
                                      .lease_ms = LEASE_MS,
                                      .user = user,
                                      .password = password};
    td_coord_t *c = NULL;

    assert_int_equal(td_coord_create(&config, &c), TD_OK);
    td_coord_campaign(c);
    return c;
}

static inline td_coord_t *candidate(const char *cluster, const char *id)
{
    return candidate_at(shared.url, cluster, id, NULL, NULL);
}

static inline bool leads(const td_coord_t *c)
{
    return td_coord_leads(c, td_coord_term(c));
}

/* Drives one or two candidates until cond. */
#define DRIVE_UNTIL(a, b, cond)                                                                    \
    do {                                                                                           \
        const uint64_t until_ = td_now_ns() + LIMIT_S * TD_NS_PER_S;                               \
        td_coord_t *driven_[] = {(a), (b)};                                                        \
        while (!(cond)) {                                                                          \
            struct pollfd fds_[2] = {{.fd = -1}, {.fd = -1}};                                      \
            uint32_t wait_ms_ = 20;                                                                \
            assert_true(td_now_ns() < until_);                                                     \
            for (int i_ = 0; i_ < 2; i_++) {                                                       \
                if (driven_[i_] != NULL) {                                                         \
                    fds_[i_] = (struct pollfd){.fd = td_coord_fd(driven_[i_]), .events = POLLIN};  \
                    wait_ms_ = td_coord_wait_ms(driven_[i_], wait_ms_);                            \
                }                                                                                  \
            }                                                                                      \
            (void)poll(fds_, 2, (int)wait_ms_);                                                    \
            for (int i_ = 0; i_ < 2; i_++) {                                                       \
                if (driven_[i_] != NULL) {                                                         \
                    td_coord_tick(driven_[i_]);                                                    \
                }                                                                                  \
            }                                                                                      \
        }                                                                                          \
    } while (0)

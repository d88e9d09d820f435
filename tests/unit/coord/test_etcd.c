/* What is said to an etcd, what is made of answers that are none, and which endpoint is asked. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <pthread.h>
#include <stdatomic.h>

#include "tests/unit/coord/test_etcd_process.h"

static void test_etcd_grant_keepalive_revoke(void **state)
{
    td_etcd_t *etcd = client_of(shared.url);
    told_t told = post(etcd, "/v3/lease/grant", "{\"TTL\":\"2\"}");
    td_str_t body = {0};
    (void)state;

    assert_int_equal(told.status, TD_OK);
    assert_true(told.answer.lease != 0);
    assert_int_equal(told.answer.ttl_s, 2);
    assert_int_equal(td_etcd_write_lease(&body, told.answer.lease), TD_OK);
    told = post(etcd, "/v3/lease/keepalive", body.bytes);
    assert_int_equal(told.status, TD_OK);
    assert_int_equal(told.answer.ttl_s, 2);
    assert_int_equal(post(etcd, "/v3/lease/revoke", body.bytes).status, TD_OK);
    told = post(etcd, "/v3/lease/keepalive", body.bytes); /* 200, and no TTL */
    assert_int_equal(told.status, TD_OK);
    assert_true(told.answer.lease != 0);
    assert_int_equal(told.answer.ttl_s, 0);
    assert_int_equal(post(etcd, "/v3/lease/revoke", body.bytes).status, TD_ERR_NOT_FOUND);
    /* A 404 that is not etcd's own says nothing of leases. */
    assert_int_equal(post(etcd, "/v3/nothing", body.bytes).status, TD_ERR_PEER_DEAD);
    td_str_fini(&body);
    td_etcd_destroy(etcd);
}

/* --- what is no etcd -------------------------------------------------------------------------- */

typedef struct impostor {
    int listen_fd;
    pthread_t thread;
    atomic_uint served;
    atomic_bool ending;
} impostor_t;

/* Answers each connection with the next of some texts, and closes it. */
static void *impostor_run(void *ctx)
{
    static const char *const bodies[] = {"",
                                         "hello",
                                         "{}",
                                         "[1,2]",
                                         "{\"header\":{\"revision\":\"x\"}}",
                                         "{\"header\":{\"revision\":\"-1\"}}",
                                         "{\"header\":{\"revision\":\"5\"},\"kvs\":7}",
                                         "{\"header\":{\"revision\":\"5\"},\"kvs\":[{}]}",
                                         "{\"header\":{\"revision\":\"5\"}}",
                                         NULL};
    impostor_t *im = ctx;
    static char big[2 * TD_ETCD_ANSWER_BYTES_MAX];

    memset(big, ' ', sizeof(big));
    while (!atomic_load_explicit(&im->ending, memory_order_acquire)) {
        struct pollfd wait = {.fd = im->listen_fd, .events = POLLIN};
        char bytes[4096];
        char head[128];
        int fd = -1;
        if (poll(&wait, 1, 20) <= 0 || (fd = accept(im->listen_fd, NULL, NULL)) < 0) {
            continue;
        }
        if (read(fd, bytes, sizeof(bytes)) > 0) {
            const uint32_t n = atomic_fetch_add_explicit(&im->served, 1, memory_order_acq_rel);
            const char *body = bodies[n % TD_ARRAY_LEN(bodies)];
            const size_t len = body == NULL ? sizeof(big) : strlen(body);
            const int head_len =
                snprintf(head, sizeof(head),
                         "HTTP/1.1 %s\r\nContent-Length: %zu\r\nConnection: close\r\n\r\n",
                         n % 5 == 4 ? "404 Not Found" : "200 OK", len);
            if (write(fd, head, (size_t)head_len) > 0) {
                (void)!write(fd, body == NULL ? big : body, len);
            }
        }
        (void)close(fd);
    }
    return NULL;
}

static void test_etcd_garbage_is_an_error_and_tried_again(void **state)
{
    impostor_t im = {0};
    uint16_t port = 0;
    char url[64];
    char both[160];
    td_etcd_t *etcd = NULL;
    td_coord_t *a = NULL;
    /* Of the impostor's answers in their order; each fifth is a 404. */
    static const td_status_t expected[] = {
        TD_ERR_PROTOCOL, TD_ERR_PROTOCOL, TD_ERR_PROTOCOL, TD_ERR_PROTOCOL, TD_ERR_PEER_DEAD,
        TD_ERR_PROTOCOL, TD_ERR_PROTOCOL, TD_ERR_PROTOCOL, TD_OK,           TD_ERR_TOO_LARGE,
    };
    (void)state;

    im.listen_fd = listen_anywhere(&port);
    assert_int_equal(pthread_create(&im.thread, NULL, impostor_run, &im), 0);
    (void)snprintf(url, sizeof(url), "http://127.0.0.1:%u", port);
    etcd = client_of(url);
    for (uint32_t n = 0; n < TD_ARRAY_LEN(expected); n++) {
        assert_int_equal(post(etcd, "/v3/kv/range", "{}").status, expected[n]);
    }
    td_etcd_destroy(etcd);
    a = candidate_at(url, "garbage", "a", NULL, NULL);
    DRIVE_UNTIL(a, NULL,
                (assert_int_equal(td_coord_term(a), 0),
                 atomic_load_explicit(&im.served, memory_order_acquire) > 20));
    td_coord_destroy(a);
    /* Beside an etcd it costs time only. */
    (void)snprintf(both, sizeof(both), "%s,%s", url, shared.url);
    a = candidate_at(both, "garbage", "a", NULL, NULL);
    DRIVE_UNTIL(a, NULL, leads(a));
    td_coord_resign_wait(a, 2000);
    td_coord_destroy(a);
    atomic_store_explicit(&im.ending, true, memory_order_release);
    (void)pthread_join(im.thread, NULL);
    (void)close(im.listen_fd);
}

/* With nobody there, the next endpoint is used. */
static void test_etcd_next_endpoint_after_a_dead_one(void **state)
{
    uint16_t port = 0;
    char both[160];
    td_coord_t *a = NULL;
    (void)state;

    (void)close(listen_anywhere(&port));
    (void)snprintf(both, sizeof(both), "http://127.0.0.1:%u,%s/", port, shared.url);
    for (int i = 0; i < 4; i++) { /* they begin anywhere */
        a = candidate_at(both, "next", "a", NULL, NULL);
        DRIVE_UNTIL(a, NULL, leads(a));
        td_coord_resign_wait(a, 2000);
        td_coord_destroy(a);
    }
}

/* etcd's own users: without the password nobody leads. */
static void test_etcd_users(void **state)
{
    etcd_process_t e = {0};
    td_etcd_t *etcd = NULL;
    td_coord_t *a = NULL;
    uint64_t until = 0;
    (void)state;

    start_etcd(&e);
    etcd = client_of(e.url);
    assert_int_equal(
        post(etcd, "/v3/auth/user/add", "{\"name\":\"root\",\"password\":\"pw\"}").status, TD_OK);
    assert_int_equal(post(etcd, "/v3/auth/role/add", "{\"name\":\"root\"}").status, TD_OK);
    assert_int_equal(
        post(etcd, "/v3/auth/user/grant", "{\"user\":\"root\",\"role\":\"root\"}").status, TD_OK);
    assert_int_equal(post(etcd, "/v3/auth/enable", "{}").status, TD_OK);
    a = candidate_at(e.url, "users", "a", "root", "wrong");
    until = td_now_ns() + TD_NS_PER_S;
    DRIVE_UNTIL(a, NULL, (assert_int_equal(td_coord_term(a), 0), td_now_ns() > until));
    td_coord_destroy(a);
    a = candidate_at(e.url, "users", "a", "root", "pw");
    DRIVE_UNTIL(a, NULL, leads(a));
    td_coord_resign_wait(a, 2000);
    td_coord_destroy(a);
    td_etcd_destroy(etcd);
    stop_etcd(&e);
}

static td_coord_t *candidate_by_tls(const etcd_process_t *e, const char *ca, bool with_cert)
{
    const td_coord_config_t config = {.etcd = e->url,
                                      .cluster = "tls",
                                      .election = "store-master",
                                      .id = "a",
                                      .lease_ms = LEASE_MS,
                                      .ca_file = ca,
                                      .cert_file = with_cert ? e->cert : NULL,
                                      .key_file = with_cert ? e->key : NULL};
    td_coord_t *c = NULL;

    assert_int_equal(td_coord_create(&config, &c), TD_OK);
    td_coord_campaign(c);
    return c;
}

/* https, both ends with certificates: who does not trust etcd's, or has none, does not lead. */
static void test_etcd_https(void **state)
{
    etcd_process_t e = {0};
    char dir[] = "/tmp/tandem-tls-XXXXXX";
    char command[512];
    td_coord_t *a = NULL;
    (void)state;

    assert_non_null(mkdtemp(dir));
    (void)snprintf(e.cert, sizeof(e.cert), "%s/cert.pem", dir);
    (void)snprintf(e.key, sizeof(e.key), "%s/key.pem", dir);
    (void)snprintf(command, sizeof(command),
                   "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes "
                   "-keyout %s -out %s -days 2 -subj /CN=tandem-test "
                   "-addext subjectAltName=IP:127.0.0.1 2>/dev/null",
                   e.key, e.cert);
    assert_int_equal(system(command), 0);
    start_etcd(&e);
    a = candidate_by_tls(&e, e.cert, true);
    DRIVE_UNTIL(a, NULL, leads(a));
    td_coord_resign_wait(a, 2000);
    td_coord_destroy(a);
    for (int i = 0; i < 2; i++) { /* not trusted, not known */
        const uint64_t until = td_now_ns() + TD_NS_PER_S / 2;
        a = candidate_by_tls(&e, i == 0 ? NULL : e.cert, i == 0);
        DRIVE_UNTIL(a, NULL, (assert_int_equal(td_coord_term(a), 0), td_now_ns() > until));
        td_coord_destroy(a);
    }
    stop_etcd(&e);
    (void)snprintf(command, sizeof(command), "rm -rf %s", dir);
    assert_int_equal(system(command), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_etcd_grant_keepalive_revoke),
        cmocka_unit_test(test_etcd_garbage_is_an_error_and_tried_again),
        cmocka_unit_test(test_etcd_next_endpoint_after_a_dead_one),
        cmocka_unit_test(test_etcd_users),
        cmocka_unit_test(test_etcd_https),
    };
    return cmocka_run_group_tests(tests, group_setup, group_teardown);
}

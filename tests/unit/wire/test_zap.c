#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <sodium.h>
#include <stdio.h>
#include <string.h>
#include <zmq.h>

#include "common/base/td_base.h"
#include "common/wire/td_bus.h"
#include "common/wire/td_zap.h"

#define DOMAIN "test"
#define WAIT_MS 10000

typedef struct keys {
    uint8_t public_key[TD_ZAP_KEY_BYTES];
    uint8_t secret_key[TD_ZAP_KEY_BYTES];
} keys_t;

static keys_t new_keys(void)
{
    keys_t k;
    (void)crypto_box_keypair(k.public_key, k.secret_key);
    return k;
}

static void *server_of(void *context, const keys_t *keys, const char *domain, char endpoint[64])
{
    void *socket = zmq_socket(context, ZMQ_ROUTER);
    size_t len = 64;
    const int yes = 1;
    const int no = 0;

    assert_int_equal(zmq_setsockopt(socket, ZMQ_LINGER, &no, sizeof(no)), 0);
    assert_int_equal(zmq_setsockopt(socket, ZMQ_CURVE_SERVER, &yes, sizeof(yes)), 0);
    assert_int_equal(zmq_setsockopt(socket, ZMQ_CURVE_SECRETKEY, keys->secret_key, 32), 0);
    assert_int_equal(zmq_setsockopt(socket, ZMQ_ZAP_DOMAIN, domain, strlen(domain)), 0);
    assert_int_equal(zmq_bind(socket, "tcp://127.0.0.1:*"), 0);
    assert_int_equal(zmq_getsockopt(socket, ZMQ_LAST_ENDPOINT, endpoint, &len), 0);
    return socket;
}

/* How a handshake with `endpoint` ends: ZMQ_EVENT_HANDSHAKE_SUCCEEDED or one of its failures. */
static int handshake(void *context, const char *endpoint, const uint8_t *server_key,
                     const keys_t *keys)
{
    void *socket = zmq_socket(context, ZMQ_DEALER);
    void *monitor = zmq_socket(context, ZMQ_PAIR);
    const int no = 0;
    const int wait_ms = WAIT_MS;
    static uint32_t number; /* an address is not free at once when its socket is closed */
    char address[32];
    uint16_t event = 0;
    zmq_msg_t part;

    (void)snprintf(address, sizeof(address), "inproc://monitor-%u", number++);
    assert_int_equal(zmq_setsockopt(socket, ZMQ_LINGER, &no, sizeof(no)), 0);
    assert_int_equal(zmq_setsockopt(socket, ZMQ_CURVE_SERVERKEY, server_key, 32), 0);
    assert_int_equal(zmq_setsockopt(socket, ZMQ_CURVE_PUBLICKEY, keys->public_key, 32), 0);
    assert_int_equal(zmq_setsockopt(socket, ZMQ_CURVE_SECRETKEY, keys->secret_key, 32), 0);
    assert_int_equal(zmq_socket_monitor(socket, address,
                                        ZMQ_EVENT_HANDSHAKE_SUCCEEDED |
                                            ZMQ_EVENT_HANDSHAKE_FAILED_AUTH |
                                            ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL |
                                            ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL),
                     0);
    assert_int_equal(zmq_connect(monitor, address), 0);
    assert_int_equal(zmq_setsockopt(monitor, ZMQ_RCVTIMEO, &wait_ms, sizeof(wait_ms)), 0);
    assert_int_equal(zmq_connect(socket, endpoint), 0);
    assert_int_equal(zmq_msg_init(&part), 0);
    assert_true(zmq_msg_recv(&part, monitor, 0) >= (int)sizeof(event));
    memcpy(&event, zmq_msg_data(&part), sizeof(event));
    (void)zmq_msg_close(&part);
    assert_int_equal(zmq_socket_monitor(socket, NULL, 0), 0);
    (void)zmq_close(socket);
    (void)zmq_close(monitor);
    return event;
}

static void test_zap_lets_in_who_is_on_the_list_alone(void **state)
{
    void *context = zmq_ctx_new();
    void *clients = zmq_ctx_new();
    td_zap_t *zap = NULL;
    const keys_t server = new_keys();
    const keys_t friend = new_keys();
    const keys_t late = new_keys();
    const keys_t stranger = new_keys();
    keys_t liar = stranger; /* who knows a name on the list, but not its secret */
    char endpoint[64];
    char elsewhere[64];
    void *socket = NULL;
    void *other = NULL;
    (void)state;

    assert_int_equal(td_zap_create(context, DOMAIN, &zap), TD_OK);
    assert_int_equal(td_zap_allow(zap, friend.public_key), TD_OK);
    socket = server_of(context, &server, DOMAIN, endpoint);
    other = server_of(context, &server, "another", elsewhere);
    assert_int_equal(handshake(clients, endpoint, server.public_key, &friend),
                     ZMQ_EVENT_HANDSHAKE_SUCCEEDED);
    assert_int_not_equal(handshake(clients, endpoint, server.public_key, &stranger),
                         ZMQ_EVENT_HANDSHAKE_SUCCEEDED);
    memcpy(liar.public_key, friend.public_key, sizeof(liar.public_key));
    assert_int_not_equal(handshake(clients, endpoint, server.public_key, &liar),
                         ZMQ_EVENT_HANDSHAKE_SUCCEEDED);
    assert_int_not_equal(handshake(clients, endpoint, server.public_key, &late),
                         ZMQ_EVENT_HANDSHAKE_SUCCEEDED);
    assert_int_equal(td_zap_allow(zap, late.public_key), TD_OK);
    assert_int_equal(handshake(clients, endpoint, server.public_key, &late),
                     ZMQ_EVENT_HANDSHAKE_SUCCEEDED);
    assert_int_not_equal(handshake(clients, elsewhere, server.public_key, &friend),
                         ZMQ_EVENT_HANDSHAKE_SUCCEEDED);
    (void)zmq_close(socket);
    (void)zmq_close(other);
    td_zap_destroy(zap);
    (void)zmq_ctx_term(context);
    (void)zmq_ctx_term(clients);
}

static void test_zap_list_has_an_end(void **state)
{
    void *context = zmq_ctx_new();
    td_zap_t *zap = NULL;
    td_zap_t *second = NULL;
    uint8_t key[TD_ZAP_KEY_BYTES] = {0};
    (void)state;

    assert_int_equal(td_zap_create(context, DOMAIN, &zap), TD_OK);
    assert_int_equal(td_zap_create(context, DOMAIN, &second), TD_ERR_IO); /* one for a context */
    for (uint32_t i = 0; i < TD_ZAP_KEYS_MAX; i++) {
        key[0] = (uint8_t)i;
        assert_int_equal(td_zap_allow(zap, key), TD_OK);
        assert_int_equal(td_zap_allow(zap, key), TD_OK); /* known: it takes no further place */
    }
    key[1] = 1;
    assert_int_equal(td_zap_allow(zap, key), TD_ERR_NO_MEMORY);
    td_zap_destroy(zap);
    (void)zmq_ctx_term(context);
}

/* The bus's own list: the public key of the cluster lets nobody in who has not the private one. */
static void test_zap_bus_refuses_who_has_the_public_key_alone(void **state)
{
    static const char purpose[] = "tandem curve key pair"; /* as td_bus derives it */
    const uint8_t secret[TD_CLUSTER_SECRET_BYTES] = {7};
    const td_bus_config_t config = {
        .bind = "tcp://127.0.0.1:*", .id = "a", .incarnation = 1, .secret = secret, .curve = true};
    void *clients = zmq_ctx_new();
    const keys_t stranger = new_keys();
    keys_t cluster;
    td_bus_t *bus = NULL;
    (void)state;

    (void)crypto_generichash(cluster.secret_key, sizeof(cluster.secret_key),
                             (const uint8_t *)purpose, sizeof(purpose) - 1, secret, sizeof(secret));
    (void)crypto_scalarmult_base(cluster.public_key, cluster.secret_key);
    assert_int_equal(td_bus_create(&config, &bus), TD_OK);
    assert_int_equal(handshake(clients, td_bus_endpoint(bus), cluster.public_key, &cluster),
                     ZMQ_EVENT_HANDSHAKE_SUCCEEDED);
    assert_int_not_equal(handshake(clients, td_bus_endpoint(bus), cluster.public_key, &stranger),
                         ZMQ_EVENT_HANDSHAKE_SUCCEEDED);
    td_bus_destroy(bus);
    (void)zmq_ctx_term(clients);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_zap_lets_in_who_is_on_the_list_alone),
        cmocka_unit_test(test_zap_list_has_an_end),
        cmocka_unit_test(test_zap_bus_refuses_who_has_the_public_key_alone),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

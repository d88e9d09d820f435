#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <string.h>
#include <zmq.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/wire/td_bus.h"

static uint8_t secret[TD_CLUSTER_SECRET_BYTES] = {1, 2, 3};
static uint8_t other_secret[TD_CLUSTER_SECRET_BYTES] = {9, 9, 9};

static td_bus_t *bus_of(const char *id, uint64_t incarnation, const uint8_t *key, bool curve)
{
    td_bus_config_t config = {.bind = "tcp://127.0.0.1:*",
                              .id = id,
                              .incarnation = incarnation,
                              .secret = key,
                              .curve = curve};
    td_bus_t *bus = NULL;
    assert_int_equal(td_bus_create(&config, &bus), TD_OK);
    return bus;
}

/* Waits for the next message; false when none has come in the time. The sender is driven too: what
 * it could not send at once waits in its outbox. */
static bool receive(td_bus_t *to, td_bus_t *from, uint32_t wait_ms, td_msg_t *msg,
                    td_msg_arena_t **arena)
{
    uint64_t deadline = td_now_ns() + wait_ms * TD_NS_PER_MS;
    while (td_bus_recv(to, msg, arena) != TD_OK) {
        if (td_now_ns() > deadline) {
            return false;
        }
        td_bus_wait(from, NULL, 0, 0, NULL);
        td_bus_wait(to, NULL, 0, 5, NULL);
    }
    return true;
}

static void check_pair(bool curve)
{
    td_bus_t *a = bus_of("a", 11, secret, curve);
    td_bus_t *b = bus_of("b", 22, secret, curve);
    td_msg_t msg = {.type = TD_MSG_LEASE, .u.lease = {.lease_ms = 123}};
    td_msg_arena_t *arena = NULL;
    td_msg_t got;

    assert_int_equal(td_bus_connect(a, "b", td_bus_endpoint(b), 22), TD_OK);
    assert_int_equal(td_bus_connect(b, "a", td_bus_endpoint(a), 11), TD_OK);
    assert_int_equal(td_bus_send(a, "b", &msg), TD_OK);
    assert_true(receive(b, a, 5000, &got, &arena));
    assert_string_equal(got.sender_id, "a");
    assert_int_equal(got.u.lease.lease_ms, 123);
    td_msg_arena_free(arena);
    assert_int_equal(td_bus_send(a, "nobody", &msg), TD_ERR_NOT_FOUND);
    td_bus_destroy(a);
    td_bus_destroy(b);
}

static void test_bus_carries_messages(void **state)
{
    (void)state;
    check_pair(false);
}

static void test_bus_carries_messages_with_curve(void **state)
{
    (void)state;
    check_pair(true);
}

static void test_bus_refuses_a_peer_with_another_secret(void **state)
{
    td_bus_t *a = bus_of("a", 11, other_secret, true);
    td_bus_t *b = bus_of("b", 22, secret, true);
    td_msg_t msg = {.type = TD_MSG_REGISTER};
    td_msg_arena_t *arena = NULL;
    td_msg_t got;
    (void)state;

    msg.u.reg.self = (td_msg_peer_t){.id = "a", .role = TD_ROLE_PREFILL, .endpoint = "x"};
    msg.u.reg.http = msg.u.reg.numerics_class = msg.u.reg.version = "";
    assert_int_equal(td_bus_connect(a, "b", td_bus_endpoint(b), 22), TD_OK);
    assert_int_equal(td_bus_send(a, "b", &msg), TD_OK);
    assert_false(receive(b, a, 300, &got, &arena));
    td_bus_destroy(a);
    td_bus_destroy(b);
}

/* I7: a message for, or from, another life of a process is not taken. */
static void test_i7_bus_drops_messages_of_other_incarnations(void **state)
{
    td_bus_t *a = bus_of("a", 11, secret, false);
    td_bus_t *b = bus_of("b", 22, secret, false);
    td_msg_t msg = {.type = TD_MSG_LEASE, .u.lease = {.lease_ms = 1}};
    td_msg_arena_t *arena = NULL;
    td_msg_t got;
    (void)state;

    assert_int_equal(td_bus_connect(a, "b", td_bus_endpoint(b), 21), TD_OK); /* b's life before */
    assert_int_equal(td_bus_connect(b, "a", td_bus_endpoint(a), 11), TD_OK);
    assert_int_equal(td_bus_send(a, "b", &msg), TD_OK);
    assert_false(receive(b, a, 200, &got, &arena));
    assert_int_equal(td_bus_refused(b), 1);
    assert_int_equal(td_bus_connect(a, "b", td_bus_endpoint(b), 22), TD_OK);
    td_bus_set_incarnation(a, 12); /* a's life after: b knows 11 */
    assert_int_equal(td_bus_send(a, "b", &msg), TD_OK);
    assert_false(receive(b, a, 200, &got, &arena));
    td_bus_set_incarnation(a, 11);
    assert_int_equal(td_bus_send(a, "b", &msg), TD_OK);
    assert_true(receive(b, a, 5000, &got, &arena));
    td_msg_arena_free(arena);
    td_bus_destroy(a);
    td_bus_destroy(b);
}

/* A new router lists nodes as they come, so one node may lose and find a peer that knew it all the
 * time. */
static void test_bus_carries_messages_after_one_side_reconnects(void **state)
{
    td_bus_t *a = bus_of("a", 11, secret, false);
    td_bus_t *b = bus_of("b", 22, secret, false);
    td_msg_t msg = {.type = TD_MSG_LEASE, .u.lease = {.lease_ms = 7}};
    td_msg_arena_t *arena = NULL;
    td_msg_t got;
    (void)state;

    assert_int_equal(td_bus_connect(b, "a", td_bus_endpoint(a), 11), TD_OK);
    for (int round = 0; round < 3; round++) {
        assert_int_equal(td_bus_connect(a, "b", td_bus_endpoint(b), 22), TD_OK);
        for (int i = 0; i < 3; i++) {
            assert_int_equal(td_bus_send(a, "b", &msg), TD_OK);
            assert_true(receive(b, a, 5000, &got, &arena));
            /* The first one after a new connection: something may have been lost with the old. */
            assert_int_equal(got.gap, round > 0 && i == 0);
            td_msg_arena_free(arena);
        }
        td_bus_disconnect(a, "b");
    }
    assert_int_equal(td_bus_refused(b), 0);
    td_bus_destroy(a);
    td_bus_destroy(b);
}

/* I6: a peer that is not there fills its outbox and no more. */
static void test_i6_bus_outbox_is_bounded(void **state)
{
    td_bus_t *a = bus_of("a", 11, secret, false);
    td_msg_t msg = {.type = TD_MSG_LEASE, .u.lease = {.lease_ms = 1}};
    uint32_t sent = 0;
    (void)state;

    assert_int_equal(td_bus_connect(a, "b", "tcp://127.0.0.1:1", 22), TD_OK);
    while (td_bus_send(a, "b", &msg) == TD_OK) {
        sent++;
        assert_true(sent <= TD_BUS_OUTBOX_MAX);
    }
    assert_int_equal(sent, TD_BUS_OUTBOX_MAX);
    assert_int_equal(td_bus_send(a, "b", &msg), TD_ERR_BUSY);
    td_bus_destroy(a);
}

/* A router that is away gets one registration when it is back, not one for each half second. */
static void test_i6_bus_keeps_one_registration_waiting(void **state)
{
    td_bus_t *a = bus_of("a", 11, secret, false);
    td_bus_t *b = NULL;
    td_bus_config_t late = {.id = "b", .incarnation = 22, .secret = secret};
    td_msg_t msg = {.type = TD_MSG_REGISTER};
    td_msg_arena_t *arena = NULL;
    char endpoint[256];
    td_msg_t got;
    (void)state;

    b = bus_of("b", 21, secret, false); /* takes a free port, and leaves it */
    (void)snprintf(endpoint, sizeof(endpoint), "%s", td_bus_endpoint(b));
    td_bus_destroy(b);
    msg.u.reg.self = (td_msg_peer_t){.id = "a", .role = TD_ROLE_PREFILL, .endpoint = "x"};
    msg.u.reg.http = msg.u.reg.numerics_class = msg.u.reg.version = "";
    assert_int_equal(td_bus_connect(a, "b", endpoint, 0), TD_OK);
    for (int i = 0; i < 50; i++) {
        assert_int_equal(td_bus_send(a, "b", &msg), TD_OK);
    }
    late.bind = endpoint;
    assert_int_equal(td_bus_create(&late, &b), TD_OK);
    assert_true(receive(b, a, 5000, &got, &arena));
    td_msg_arena_free(arena);
    assert_false(receive(b, a, 200, &got, &arena));
    td_bus_destroy(a);
    td_bus_destroy(b);
}

/* I6: the caller's loop goes on whatever is thrown at the port. */
static void test_i6_bus_looks_at_a_bounded_number_of_garbage_frames(void **state)
{
    td_bus_t *b = bus_of("b", 22, secret, false);
    void *context = zmq_ctx_new();
    void *dealer = zmq_socket(context, ZMQ_DEALER);
    int linger = 0;
    td_msg_arena_t *arena = NULL;
    uint64_t deadline = td_now_ns() + 5 * TD_NS_PER_S;
    uint64_t before = 0;
    td_msg_t got;
    (void)state;

    (void)zmq_setsockopt(dealer, ZMQ_LINGER, &linger, sizeof(linger));
    assert_int_equal(zmq_connect(dealer, td_bus_endpoint(b)), 0);
    for (int i = 0; i < 1000; i++) {
        assert_true(zmq_send(dealer, "junk", 4, 0) >= 0);
    }
    while (td_bus_refused(b) < 1000) {
        assert_true(td_now_ns() < deadline);
        td_bus_wait(b, NULL, 0, 5, NULL);
        before = td_bus_refused(b);
        assert_int_equal(td_bus_recv(b, &got, &arena), TD_ERR_NOT_FOUND);
        assert_true(td_bus_refused(b) - before <= 64);
    }
    (void)zmq_close(dealer);
    (void)zmq_ctx_term(context);
    td_bus_destroy(b);
}

static void test_bus_survives_garbage_frames(void **state)
{
    td_bus_t *b = bus_of("b", 22, secret, false);
    td_bus_t *a = bus_of("a", 11, secret, false);
    void *context = zmq_ctx_new();
    void *dealer = zmq_socket(context, ZMQ_DEALER);
    int linger = 1000;
    char junk[300];
    td_msg_t msg = {.type = TD_MSG_LEASE, .u.lease = {.lease_ms = 9}};
    td_msg_arena_t *arena = NULL;
    td_msg_t got;
    (void)state;

    memset(junk, 0xa7, sizeof(junk));
    (void)zmq_setsockopt(dealer, ZMQ_LINGER, &linger, sizeof(linger));
    assert_int_equal(zmq_connect(dealer, td_bus_endpoint(b)), 0);
    for (int i = 0; i < 50; i++) {
        assert_true(zmq_send(dealer, junk, (size_t)i * 6, i % 3 == 0 ? ZMQ_SNDMORE : 0) >= 0);
    }
    assert_true(zmq_send(dealer, junk, 1, 0) >= 0);
    assert_int_equal(td_bus_connect(a, "b", td_bus_endpoint(b), 22), TD_OK);
    assert_int_equal(td_bus_connect(b, "a", td_bus_endpoint(a), 11), TD_OK);
    assert_int_equal(td_bus_send(a, "b", &msg), TD_OK);
    assert_true(receive(b, a, 5000, &got, &arena));
    assert_int_equal(got.u.lease.lease_ms, 9);
    td_msg_arena_free(arena);
    (void)zmq_close(dealer);
    (void)zmq_ctx_term(context);
    td_bus_destroy(a);
    td_bus_destroy(b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bus_carries_messages),
        cmocka_unit_test(test_bus_carries_messages_with_curve),
        cmocka_unit_test(test_bus_refuses_a_peer_with_another_secret),
        cmocka_unit_test(test_i7_bus_drops_messages_of_other_incarnations),
        cmocka_unit_test(test_bus_carries_messages_after_one_side_reconnects),
        cmocka_unit_test(test_i6_bus_outbox_is_bounded),
        cmocka_unit_test(test_i6_bus_keeps_one_registration_waiting),
        cmocka_unit_test(test_i6_bus_looks_at_a_bounded_number_of_garbage_frames),
        cmocka_unit_test(test_bus_survives_garbage_frames),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

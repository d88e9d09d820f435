/* A node's membership against routers played by the test: each is a bus of its own in this process.
 */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/base/td_log.h"
#include "common/wire/td_member.h"

#define ROUTERS 2u
#define WAIT_MS 5000u

typedef struct fixture {
    td_bus_t *node;
    td_member_t *member;
    td_bus_t *routers[ROUTERS];
    uint64_t epochs[ROUTERS]; /* of the last registration */
    uint32_t registrations[ROUTERS];
    uint32_t beats[ROUTERS];
    td_msg_heartbeat_t beat[ROUTERS];
    bool renews; /* the routers answer heartbeats with leases */
    bool mute[ROUTERS];
    uint32_t fenced[ROUTERS];
    uint32_t new_lives;
    uint32_t ups;
    uint32_t downs;
    uint64_t last_down;
} fixture_t;

static uint8_t secret[TD_CLUSTER_SECRET_BYTES] = {4};

static void router_name(uint32_t i, char out[16])
{
    (void)snprintf(out, 16, "r%u", i);
}

static void on_up(void *ctx, const td_msg_peer_t *peer)
{
    fixture_t *fx = ctx;
    (void)peer;
    fx->ups++;
}

static void on_down(void *ctx, const char *id, uint64_t incarnation)
{
    fixture_t *fx = ctx;
    (void)id;
    fx->downs++;
    fx->last_down = incarnation;
}

static void on_fenced(void *ctx, const char *router, uint64_t incarnation)
{
    fixture_t *fx = ctx;
    (void)incarnation;
    if (router == NULL) {
        fx->new_lives++;
    } else {
        fx->fenced[router[1] - '0']++;
    }
}

static void on_share(void *ctx, const char *router, td_msg_heartbeat_t *load)
{
    (void)ctx;
    load->other_requests = 10 + (uint32_t)(router[1] - '0');
}

static td_bus_t *bus_of(const char *id, uint64_t incarnation)
{
    const td_bus_config_t config = {
        .bind = "tcp://127.0.0.1:*", .id = id, .incarnation = incarnation, .secret = secret};
    td_bus_t *bus = NULL;

    assert_int_equal(td_bus_create(&config, &bus), TD_OK);
    return bus;
}

static void open_router(fixture_t *fx, uint32_t i, uint64_t incarnation)
{
    char name[16];

    router_name(i, name);
    fx->routers[i] = bus_of(name, incarnation);
}

static td_member_router_t router_of(const fixture_t *fx, uint32_t i)
{
    td_member_router_t r;

    router_name(i, r.id);
    (void)snprintf(r.endpoint, sizeof(r.endpoint), "%s", td_bus_endpoint(fx->routers[i]));
    return r;
}

static int setup(void **state)
{
    static fixture_t fx;
    const td_member_events_t events = {
        .ctx = &fx, .peer_up = on_up, .peer_down = on_down, .fenced = on_fenced, .share = on_share};
    td_msg_register_t self = {.self = {.id = "n", .role = TD_ROLE_DECODE, .endpoint = "tcp://x:1"},
                              .http = "",
                              .numerics_class = "c",
                              .version = "1"};
    td_member_router_t routers[ROUTERS];

    fx = (fixture_t){0};
    *state = &fx;
    td_log_init("test", TD_LOG_LEVEL_ERROR);
    fx.node = bus_of("n", 5);
    self.self.incarnation = 5;
    if (td_member_create(fx.node, NULL, &self, &events, &fx.member) != TD_OK) {
        return -1;
    }
    for (uint32_t i = 0; i < ROUTERS; i++) {
        open_router(&fx, i, 100 + i);
        routers[i] = router_of(&fx, i);
    }
    td_member_set_routers(fx.member, routers, ROUTERS);
    return 0;
}

static int teardown(void **state)
{
    fixture_t *fx = *state;

    td_member_destroy(fx->member);
    td_bus_destroy(fx->node);
    for (uint32_t i = 0; i < ROUTERS; i++) {
        td_bus_destroy(fx->routers[i]);
    }
    return 0;
}

static void send_to_node(fixture_t *fx, uint32_t router, td_msg_t *msg)
{
    assert_int_equal(td_bus_send(fx->routers[router], "n", msg), TD_OK);
}

static void send_lease(fixture_t *fx, uint32_t router, uint32_t lease_ms)
{
    td_msg_t msg = {.type = TD_MSG_LEASE, .u.lease = {.lease_ms = lease_ms}};
    send_to_node(fx, router, &msg);
}

static void take(fixture_t *fx, uint32_t i)
{
    td_msg_arena_t *arena = NULL;
    td_msg_t msg;

    while (td_bus_recv(fx->routers[i], &msg, &arena) == TD_OK) {
        if (fx->mute[i]) {
            td_msg_arena_free(arena);
            continue;
        }
        if (msg.type == TD_MSG_REGISTER) {
            td_msg_t answer = {.type = TD_MSG_REGISTERED, .u.registered = {.accepted = true}};
            fx->registrations[i]++;
            fx->epochs[i] = msg.u.reg.ticket_epoch;
            answer.u.registered.error = "";
            assert_int_equal(td_bus_connect(fx->routers[i], "n", msg.u.reg.self.endpoint,
                                            msg.sender_incarnation),
                             TD_OK);
            send_to_node(fx, i, &answer);
        } else if (msg.type == TD_MSG_HEARTBEAT) {
            fx->beats[i]++;
            fx->beat[i] = msg.u.heartbeat;
            if (fx->renews) {
                send_lease(fx, i, 60000);
            }
        }
        td_msg_arena_free(arena);
    }
}

static void spin(fixture_t *fx)
{
    const td_msg_heartbeat_t load = {.queued_requests = 3};
    td_msg_arena_t *arena = NULL;
    td_msg_t msg;

    for (uint32_t i = 0; i < ROUTERS; i++) {
        if (fx->routers[i] != NULL) {
            td_bus_wait(fx->routers[i], NULL, 0, 0, NULL);
            take(fx, i);
        }
    }
    td_bus_wait(fx->node, NULL, 0, 1, NULL);
    while (td_bus_recv(fx->node, &msg, &arena) == TD_OK) {
        assert_true(td_member_handle(fx->member, &msg));
        td_msg_arena_free(arena);
    }
    td_member_tick(fx->member, &load);
}

#define SPIN_UNTIL(fx, condition)                                                                  \
    do {                                                                                           \
        const uint64_t deadline_ns = td_now_ns() + WAIT_MS * TD_NS_PER_MS;                         \
        while (!(condition)) {                                                                     \
            assert_true(td_now_ns() < deadline_ns);                                                \
            spin(fx);                                                                              \
        }                                                                                          \
    } while (0)

/* incarnation 0: an empty list. */
static void send_peers(fixture_t *fx, uint32_t router, const char *endpoint, uint64_t incarnation)
{
    td_msg_peer_t peer = {
        .id = "p", .role = TD_ROLE_PREFILL, .incarnation = incarnation, .endpoint = endpoint};
    td_msg_t msg = {.type = TD_MSG_PEERS,
                    .u.peers = {.count = incarnation != 0 ? 1 : 0, .peers = &peer}};
    send_to_node(fx, router, &msg);
}

static void join_both(fixture_t *fx)
{
    SPIN_UNTIL(fx, td_member_registered(fx->member) == ROUTERS);
}

/* Lets what was sent arrive: heartbeats that are sent behind it have come back. */
static void settle(fixture_t *fx)
{
    uint32_t beats[ROUTERS];

    memcpy(beats, fx->beats, sizeof(beats));
    for (uint32_t i = 0; i < ROUTERS; i++) {
        if (fx->routers[i] != NULL) {
            SPIN_UNTIL(fx, fx->beats[i] >= beats[i] + 2);
        }
    }
}

static void test_member_reads_lists_of_routers(void **state)
{
    static const char *const wrong[] = {"",
                                        ",",
                                        "a=",
                                        "=tcp://x:1",
                                        "a=t,a=u",
                                        "a=t,",
                                        "t,u",
                                        "a=t,b=u,c=v,d=w,e=x,"
                                        "f=y,g=z,h=1,i=2"};
    td_member_router_t out[TD_ROUTERS_MAX];
    uint32_t count = 0;
    (void)state;

    assert_int_equal(td_member_routers_parse("tcp://h:1", out, &count), TD_OK);
    assert_int_equal(count, 1);
    assert_string_equal(out[0].id, TD_ROUTER_ID);
    assert_string_equal(out[0].endpoint, "tcp://h:1");
    assert_int_equal(td_member_routers_parse("a=tcp://h:1,b.2=tcp://[::1]:2", out, &count), TD_OK);
    assert_int_equal(count, 2);
    assert_string_equal(out[1].id, "b.2");
    assert_string_equal(out[1].endpoint, "tcp://[::1]:2");
    for (size_t i = 0; i < TD_ARRAY_LEN(wrong); i++) {
        assert_int_equal(td_member_routers_parse(wrong[i], out, &count), TD_ERR_INVALID);
    }
}

static void test_member_registers_with_every_router(void **state)
{
    fixture_t *fx = *state;

    join_both(fx);
    assert_true(td_member_is_router(fx->member, "r0") && td_member_is_router(fx->member, "r1"));
    assert_false(td_member_is_router(fx->member, "r2") || td_member_is_router(fx->member, ""));
    SPIN_UNTIL(fx, fx->beats[0] > 1 && fx->beats[1] > 1);
    assert_int_equal(fx->beat[0].queued_requests, 3);
    assert_int_equal(fx->beat[0].other_requests, 10); /* each is told what others have here */
    assert_int_equal(fx->beat[1].other_requests, 11);
}

/* A peer is up while any router says so, and changes its life once, whichever of them hears of it
 * first (F10). */
static void test_f10_member_peers_are_those_of_any_router(void **state)
{
    fixture_t *fx = *state;
    td_bus_t *peer = bus_of("p", 1);
    const char *at = td_bus_endpoint(peer);

    fx->renews = true;
    join_both(fx);
    send_peers(fx, 0, at, 1);
    send_peers(fx, 1, at, 1);
    settle(fx);
    assert_int_equal(fx->ups, 1);
    send_peers(fx, 0, at, 0); /* one has lost sight of it */
    settle(fx);
    assert_int_equal(fx->downs, 0);
    assert_non_null(td_member_find(fx->member, "p"));
    send_peers(fx, 0, at, 2); /* one knows its new life */
    settle(fx);
    assert_int_equal(fx->downs, 1);
    assert_int_equal(fx->last_down, 1);
    assert_int_equal(fx->ups, 2);
    send_peers(fx, 1, at, 1); /* the other one not yet */
    settle(fx);
    assert_int_equal(fx->ups, 2);
    assert_int_equal(td_member_find(fx->member, "p")->incarnation, 2);
    send_peers(fx, 1, at, 2);
    settle(fx);
    send_peers(fx, 0, at, 0);
    send_peers(fx, 1, at, 0);
    settle(fx);
    assert_int_equal(fx->downs, 2);
    assert_null(td_member_find(fx->member, "p"));
    td_bus_destroy(peer);
}

/* A silent router voids its own tickets alone, and is told so by its next registration. */
static void test_i5_member_fences_one_router_at_a_time(void **state)
{
    fixture_t *fx = *state;
    uint64_t epochs[ROUTERS];

    join_both(fx);
    memcpy(epochs, fx->epochs, sizeof(epochs));
    assert_true(epochs[0] != 0 && epochs[1] != 0);
    send_lease(fx, 0, 100);
    send_lease(fx, 1, 60000);
    SPIN_UNTIL(fx, fx->fenced[0] == 1);
    assert_int_equal(fx->fenced[1], 0);
    SPIN_UNTIL(fx, fx->registrations[0] > 1); /* it is silent for longer and longer */
    assert_true(fx->epochs[0] != epochs[0]);
    SPIN_UNTIL(fx, fx->registrations[1] > 1);
    assert_true(fx->epochs[1] == epochs[1]);
    assert_int_equal(fx->fenced[1], 0);
    assert_int_equal(fx->new_lives, 0);
}

/* Whom one router has declared dead begins a new life with all of them. */
static void test_member_is_dead_for_all_when_it_is_for_one(void **state)
{
    fixture_t *fx = *state;
    td_msg_t msg = {.type = TD_MSG_REGISTERED,
                    .u.registered = {.accepted = false, .error = TD_DEAD_TEXT}};
    const uint64_t before = td_bus_incarnation(fx->node);

    join_both(fx);
    send_to_node(fx, 1, &msg);
    SPIN_UNTIL(fx, fx->new_lives == 1);
    assert_true(td_bus_incarnation(fx->node) != before);
    SPIN_UNTIL(fx, fx->registrations[0] > 1 && fx->registrations[1] > 1);
    join_both(fx);
    assert_int_equal(fx->new_lives, 1);
}

/* One that is not wanted any more is left when it falls silent, not before. */
static void test_member_leaves_a_router_once_it_is_silent(void **state)
{
    fixture_t *fx = *state;
    td_member_router_t kept = router_of(fx, 1);
    uint32_t beats = 0;

    join_both(fx);
    td_member_set_routers(fx->member, &kept, 1);
    beats = fx->beats[0];
    SPIN_UNTIL(fx, fx->beats[0] > beats + 1);
    assert_true(td_member_is_router(fx->member, "r0"));
    send_lease(fx, 0, 100);
    SPIN_UNTIL(fx, !td_member_is_router(fx->member, "r0"));
    assert_int_equal(fx->fenced[0], 1);
    assert_true(td_member_is_router(fx->member, "r1"));
}

/* Another life of a router, elsewhere under its old name. */
static void test_member_follows_a_router_to_another_endpoint(void **state)
{
    fixture_t *fx = *state;
    td_member_router_t routers[ROUTERS];

    join_both(fx);
    td_bus_destroy(fx->routers[0]);
    fx->registrations[0] = 0;
    open_router(fx, 0, 200);
    routers[0] = router_of(fx, 0);
    routers[1] = router_of(fx, 1);
    td_member_set_routers(fx->member, routers, ROUTERS);
    SPIN_UNTIL(fx, fx->registrations[0] > 0 && td_member_registered(fx->member) == ROUTERS);
}

/* One that came back before its lease ended: nobody else would ever end what its former life had
 * here. Who registers anew with the same life keeps its tickets. */
static void test_i5_member_fences_the_former_life_of_a_router(void **state)
{
    const td_msg_register_t self = {.self = {.id = "n", .role = TD_ROLE_DECODE, .endpoint = "t"},
                                    .http = "",
                                    .numerics_class = "c",
                                    .version = "2"};
    fixture_t *fx = *state;
    td_member_router_t routers[ROUTERS];

    fx->renews = true;
    join_both(fx);
    assert_int_equal(td_member_update(fx->member, &self), TD_OK);
    SPIN_UNTIL(fx, fx->registrations[0] > 1 && fx->registrations[1] > 1);
    join_both(fx);
    assert_int_equal(fx->fenced[0] + fx->fenced[1], 0);
    td_bus_destroy(fx->routers[0]);
    open_router(fx, 0, 200);
    routers[0] = router_of(fx, 0);
    routers[1] = router_of(fx, 1);
    td_member_set_routers(fx->member, routers, ROUTERS);
    SPIN_UNTIL(fx, fx->fenced[0] == 1);
    join_both(fx);
    assert_int_equal(fx->fenced[0], 1);
    assert_int_equal(fx->fenced[1], 0);
    assert_int_equal(fx->new_lives, 0);
}

/* All fell silent, as for a node that slept, and the last one does not come back: what it alone had
 * listed is nobody's word any more once another one is heard. */
static void test_f10_member_forgets_the_list_of_a_router_that_stays_away(void **state)
{
    fixture_t *fx = *state;
    td_bus_t *peer = bus_of("p", 1);
    uint32_t beats = 0;

    fx->renews = true;
    join_both(fx);
    beats = fx->beats[1];
    send_peers(fx, 0, "", 0);
    send_peers(fx, 1, td_bus_endpoint(peer), 1);
    SPIN_UNTIL(fx, fx->ups == 1);
    fx->mute[0] = true;
    SPIN_UNTIL(fx, fx->beats[1] >= beats + 3); /* it is the last one that was heard */
    fx->mute[1] = true;
    SPIN_UNTIL(fx, td_member_registered(fx->member) == 0);
    assert_int_equal(fx->downs, 0); /* nobody says otherwise */
    fx->mute[0] = false;
    SPIN_UNTIL(fx, td_member_registered(fx->member) == 1);
    send_peers(fx, 0, "", 0);
    SPIN_UNTIL(fx, fx->downs == 1);
    assert_null(td_member_find(fx->member, "p"));
    td_bus_destroy(peer);
}

#define T(f) cmocka_unit_test_setup_teardown(f, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_member_reads_lists_of_routers),
        T(test_member_registers_with_every_router),
        T(test_f10_member_peers_are_those_of_any_router),
        T(test_i5_member_fences_one_router_at_a_time),
        T(test_member_is_dead_for_all_when_it_is_for_one),
        T(test_member_leaves_a_router_once_it_is_silent),
        T(test_i5_member_fences_the_former_life_of_a_router),
        T(test_f10_member_forgets_the_list_of_a_router_that_stays_away),
        T(test_member_follows_a_router_to_another_endpoint),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

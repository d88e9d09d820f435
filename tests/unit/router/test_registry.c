/* The registry and real memberships, over real buses in one process: who learns of whom, by whole
 * lists or by changes of them. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <string.h>

#include "common/base/td_clock.h"
#include "common/base/td_log.h"
#include "common/kv/td_block_key.h"
#include "common/kv/td_kv_layout.h"
#include "common/wire/td_member.h"
#include "router/rtr_registry.h"

#define NODES 5u
#define WAIT_MS 8000u
#define BLOCK_TOKENS 16u

typedef struct node {
    td_bus_t *bus;
    td_member_t *member;
    bool mute;      /* neither sends nor hears */
    bool drop_next; /* of the lists that it is sent, one does not arrive */
    bool old;       /* its program knows whole lists alone */
    bool lost;      /* it registers with an endpoint that is none */
    uint32_t registrations;
    uint32_t whole;
    uint32_t changes;
} node_t;

typedef struct fixture {
    td_metrics_t *metrics_registry;
    rtr_metrics_t metrics;
    td_bus_t *bus;
    rtr_registry_t *reg;
    node_t nodes[NODES];
    uint8_t secret[TD_CLUSTER_SECRET_BYTES];
    uint8_t fingerprint[32];
} fixture_t;

static void on_node_down(void *ctx, uint32_t slot)
{
    (void)ctx;
    (void)slot;
}

static td_status_t open_node(fixture_t *fx, uint32_t at)
{
    const td_block_root_fields_t fields = {.fingerprint = fx->fingerprint,
                                           .numerics_class = "test",
                                           .layout_version = TD_KV_LAYOUT_VERSION,
                                           .codec = "f16",
                                           .block_tokens = BLOCK_TOKENS,
                                           .adapter = "",
                                           .salt = ""};
    const td_member_events_t events = {.ctx = NULL};
    node_t *node = &fx->nodes[at];
    char id[8];
    td_bus_config_t bus = {
        .bind = "tcp://127.0.0.1:*", .id = id, .incarnation = 100 + at, .secret = fx->secret};
    td_msg_register_t self = {.http = "",
                              .numerics_class = "test",
                              .kv_codec = "f16",
                              .fingerprint = {fx->fingerprint, 32},
                              .context_max = 4096,
                              .version = ""};
    td_block_root_t root;
    td_block_key_t probe;

    td_block_root_make(fx->secret, &fields, &root);
    td_block_probe_key(&root, BLOCK_TOKENS, &probe);
    self.probe_key = (td_bytes_t){probe.bytes, sizeof(probe.bytes)};
    (void)snprintf(id, sizeof(id), "n%u", at);
    TD_TRY(td_bus_create(&bus, &node->bus));
    self.self = (td_msg_peer_t){.id = td_bus_id(node->bus),
                                .role = at % 2 == 0 ? TD_ROLE_PREFILL : TD_ROLE_DECODE,
                                .endpoint = td_bus_endpoint(node->bus)};
    return td_member_create(node->bus, td_bus_endpoint(fx->bus), &self, &events, &node->member);
}

static int setup(void **state)
{
    static fixture_t fx;
    td_bus_config_t bus = {.bind = "tcp://127.0.0.1:*", .id = TD_ROUTER_ID, .incarnation = 77};
    rtr_registry_config_t config = {.metrics = &fx.metrics,
                                    .secret = fx.secret,
                                    .fingerprint = fx.fingerprint,
                                    .block_tokens = BLOCK_TOKENS,
                                    .context_max = 4096,
                                    .kv_codec = "f16",
                                    .block_bytes = 4096,
                                    .node_down = on_node_down};

    fx = (fixture_t){0};
    *state = &fx;
    td_log_init("test", TD_LOG_LEVEL_ERROR);
    bus.secret = fx.secret;
    if (td_metrics_create(&fx.metrics_registry) != TD_OK || td_bus_create(&bus, &fx.bus) != TD_OK) {
        return -1;
    }
    rtr_metrics_declare(fx.metrics_registry, &fx.metrics);
    config.bus = fx.bus;
    if (rtr_registry_create(&config, &fx.reg) != TD_OK) {
        return -1;
    }
    for (uint32_t i = 0; i < NODES; i++) {
        if (open_node(&fx, i) != TD_OK) {
            return -1;
        }
    }
    return 0;
}

static int teardown(void **state)
{
    fixture_t *fx = *state;

    rtr_registry_destroy(fx->reg);
    for (uint32_t i = 0; i < NODES; i++) {
        td_member_destroy(fx->nodes[i].member);
        td_bus_destroy(fx->nodes[i].bus);
    }
    td_bus_destroy(fx->bus);
    td_metrics_destroy(fx->metrics_registry);
    return 0;
}

static void node_handle(node_t *node, const td_msg_t *msg)
{
    if (msg->type == TD_MSG_PEERS) {
        if (node->drop_next) {
            node->drop_next = false;
            return;
        }
        node->whole += msg->u.peers.since == 0;
        node->changes += msg->u.peers.since != 0;
    }
    (void)td_member_handle(node->member, msg);
}

static void spin(fixture_t *fx)
{
    const td_msg_heartbeat_t load = {0};
    td_msg_arena_t *arena = NULL;
    td_msg_t msg;

    td_bus_wait(fx->bus, NULL, 0, 1, NULL);
    while (td_bus_recv(fx->bus, &msg, &arena) == TD_OK) {
        if (msg.type == TD_MSG_REGISTER) {
            node_t *from = &fx->nodes[msg.sender_id[1] - '0'];
            from->registrations++;
            msg.u.reg.peer_changes = !from->old;
            msg.u.reg.self.endpoint = from->lost ? "nowhere" : msg.u.reg.self.endpoint;
        }
        assert_true(rtr_registry_handle(fx->reg, &msg));
        td_msg_arena_free(arena);
    }
    (void)rtr_registry_tick(fx->reg);
    for (uint32_t i = 0; i < NODES; i++) {
        node_t *node = &fx->nodes[i];
        if (node->mute) {
            continue;
        }
        td_bus_wait(node->bus, NULL, 0, 0, NULL);
        while (td_bus_recv(node->bus, &msg, &arena) == TD_OK) {
            node_handle(node, &msg);
            td_msg_arena_free(arena);
        }
        td_member_tick(node->member, &load);
    }
}

/* Does it know the very lives of all that aren't mute, and of no other? */
static bool knows_all(const fixture_t *fx, const node_t *node)
{
    for (uint32_t i = 0; i < NODES; i++) {
        const node_t *other = &fx->nodes[i];
        const td_member_peer_t *peer = td_member_find(node->member, td_bus_id(other->bus));
        if ((peer != NULL) == other->mute ||
            (peer != NULL && peer->incarnation != td_bus_incarnation(other->bus))) {
            return false;
        }
    }
    return td_member_registered(node->member) == 1;
}

static void spin_until_all_know_all(fixture_t *fx)
{
    const uint64_t deadline_ns = td_now_ns() + WAIT_MS * TD_NS_PER_MS;
    bool done = false;

    while (!done) {
        assert_true(td_remaining_ns(deadline_ns) > 0);
        spin(fx);
        done = true;
        for (uint32_t i = 0; i < NODES; i++) {
            done = done && (fx->nodes[i].mute || knows_all(fx, &fx->nodes[i]));
        }
    }
}

static void begin_new_life(node_t *node, uint64_t incarnation)
{
    td_msg_t refusal = {.type = TD_MSG_REGISTERED,
                        .sender_id = TD_ROUTER_ID,
                        .sender_incarnation = 77,
                        .u.registered = {.accepted = false, .error = TD_DEAD_TEXT}};

    assert_true(td_member_handle(node->member, &refusal));
    assert_int_not_equal(td_bus_incarnation(node->bus), incarnation);
}

static void test_changes_alone_are_told(void **state)
{
    fixture_t *fx = *state;
    uint32_t whole[NODES];

    spin_until_all_know_all(fx);
    for (uint32_t i = 0; i < NODES; i++) {
        whole[i] = fx->nodes[i].whole;
        assert_int_equal(whole[i], 1); /* when it registered */
    }
    begin_new_life(&fx->nodes[3], 103);
    spin_until_all_know_all(fx);
    for (uint32_t i = 0; i < NODES; i++) {
        assert_int_equal(fx->nodes[i].whole, whole[i] + (i == 3));
        assert_true(i == 3 || fx->nodes[i].changes > 0);
    }
    fx->nodes[4].mute = true; /* until it is declared dead */
    spin_until_all_know_all(fx);
    for (uint32_t i = 0; i < 4; i++) {
        assert_int_equal(fx->nodes[i].whole, whole[i] + (i == 3));
    }
}

static void test_a_lost_change_is_followed_by_a_whole_list(void **state)
{
    fixture_t *fx = *state;

    spin_until_all_know_all(fx);
    fx->nodes[1].drop_next = true;
    begin_new_life(&fx->nodes[2], 102);
    while (fx->nodes[1].drop_next) {
        spin(fx);
    }
    assert_int_equal(fx->nodes[1].whole, 1);
    begin_new_life(&fx->nodes[3], 103); /* its change follows upon one that did not arrive */
    spin_until_all_know_all(fx);
    assert_int_equal(fx->nodes[1].whole, 2);
    assert_int_equal(fx->nodes[0].whole, 1);
}

static void test_an_old_program_gets_whole_lists(void **state)
{
    fixture_t *fx = *state;

    fx->nodes[0].old = true;
    spin_until_all_know_all(fx);
    begin_new_life(&fx->nodes[2], 102);
    spin_until_all_know_all(fx);
    assert_int_equal(fx->nodes[0].changes, 0);
    assert_true(fx->nodes[0].whole > 1);
    assert_int_equal(fx->nodes[1].whole, 1);
}

/* Work may name a node that came a moment ago: who gets it is told before. */
static void test_who_gets_work_is_told_first(void **state)
{
    fixture_t *fx = *state;
    td_msg_arena_t *arena = NULL;
    td_msg_t msg;
    uint32_t slot = 0;
    uint32_t fresh = 0;
    uint64_t before = 0;

    spin_until_all_know_all(fx);
    slot = rtr_registry_find(fx->reg, "n1", 101);
    assert_int_not_equal(slot, RTR_PLACE_NONE);
    begin_new_life(&fx->nodes[2], 102);
    td_member_tick(fx->nodes[2].member, &(td_msg_heartbeat_t){0}); /* registers */
    do {
        td_bus_wait(fx->bus, NULL, 0, 1, NULL);
    } while (td_bus_recv(fx->bus, &msg, &arena) != TD_OK || !rtr_registry_handle(fx->reg, &msg) ||
             (td_msg_arena_free(arena), msg.type != TD_MSG_REGISTER));
    /* Nobody is told yet; who is new hears last, since whom it speaks to must know it. */
    before = rtr_registry_node(fx->reg, slot)->peers_version;
    fresh = rtr_registry_find(fx->reg, "n2", td_bus_incarnation(fx->nodes[2].bus));
    assert_int_equal(rtr_registry_node(fx->reg, fresh)->peers_version, 0);
    rtr_registry_tell(fx->reg, slot);
    assert_true(rtr_registry_node(fx->reg, slot)->peers_version > before);
    assert_int_equal(rtr_registry_node(fx->reg, fresh)->peers_version, 0);
    spin_until_all_know_all(fx);
}

static void spin_until_registered_again(fixture_t *fx, const node_t *node, uint32_t times)
{
    const uint64_t deadline_ns = td_now_ns() + WAIT_MS * TD_NS_PER_MS;
    const uint32_t before = node->registrations;

    while (node->registrations < before + times) {
        assert_true(td_remaining_ns(deadline_ns) > 0);
        spin(fx);
    }
}

/* Neither as the life that is known nor as a new one, however often it asks. */
static void test_i6_who_cannot_be_reached_uses_up_no_slots(void **state)
{
    fixture_t *fx = *state;
    node_t *node = &fx->nodes[1];

    spin_until_all_know_all(fx);
    assert_int_equal(rtr_registry_slots(fx->reg), NODES);
    node->drop_next = true; /* so that it registers again */
    begin_new_life(&fx->nodes[2], 102);
    while (node->drop_next) {
        spin(fx);
    }
    node->lost = true;
    begin_new_life(&fx->nodes[3], 103);
    spin_until_registered_again(fx, node, 2);
    assert_int_equal(rtr_registry_live(fx->reg, TD_ROLE_DECODE), 1); /* n3 */
    begin_new_life(node, 101);
    spin_until_registered_again(fx, node, 3);
    node->lost = false;
    spin_until_all_know_all(fx);
    assert_int_equal(rtr_registry_slots(fx->reg), NODES);
    assert_int_equal(rtr_registry_live(fx->reg, TD_ROLE_DECODE), 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_changes_alone_are_told, setup, teardown),
        cmocka_unit_test_setup_teardown(test_a_lost_change_is_followed_by_a_whole_list, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_an_old_program_gets_whole_lists, setup, teardown),
        cmocka_unit_test_setup_teardown(test_who_gets_work_is_told_first, setup, teardown),
        cmocka_unit_test_setup_teardown(test_i6_who_cannot_be_reached_uses_up_no_slots, setup,
                                        teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

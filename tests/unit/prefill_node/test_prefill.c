/* The prefill node's requests with a played router and decode node; no model runs. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "prefill_node/pfn_node.h"

#define BLOCKS 12u

typedef struct world {
    pfn_node_t *pfn;
    td_model_info_t info;
    td_bus_t *router;
    td_bus_t *decode;
    uint8_t *memory;
} world_t;

static uint8_t secret[TD_CLUSTER_SECRET_BYTES] = {8};

static td_bus_t *bus_of(const char *id, uint64_t incarnation)
{
    td_bus_config_t config = {
        .bind = "tcp://127.0.0.1:*", .id = id, .incarnation = incarnation, .secret = secret};
    td_bus_t *bus = NULL;
    assert_int_equal(td_bus_create(&config, &bus), TD_OK);
    return bus;
}

static void pair(td_bus_t *a, td_bus_t *b)
{
    assert_int_equal(td_bus_connect(a, td_bus_id(b), td_bus_endpoint(b), td_bus_incarnation(b)),
                     TD_OK);
    assert_int_equal(td_bus_connect(b, td_bus_id(a), td_bus_endpoint(a), td_bus_incarnation(a)),
                     TD_OK);
}

static int setup_with(void **state, uint32_t layers, uint32_t kv_heads, uint32_t head_dim)
{
    world_t *w = calloc(1, sizeof(*w));
    pfn_node_t *p = calloc(1, sizeof(*p));
    td_node_t *n = &p->node;
    td_member_events_t events = {0};
    td_msg_register_t self = {.self = {.id = "prefill", .role = TD_ROLE_PREFILL, .endpoint = "e"},
                              .http = "",
                              .numerics_class = "",
                              .version = ""};

    assert_non_null(w);
    assert_non_null(p);
    w->pfn = p;
    w->info = (td_model_info_t){
        .vocab_size = 1000,
        .context_max = 512,
        .kv = {.layers = layers, .kv_heads = kv_heads, .head_dim = head_dim, .block_tokens = 16}};
    n->info = &w->info;
    assert_int_equal(td_metrics_create(&n->proc.metrics), TD_OK);
    pfn_metrics_declare(p);
    n->proc.bus = bus_of("prefill", 11);
    w->router = bus_of("router", 22);
    w->decode = bus_of("decode", 33);
    assert_int_equal(
        td_member_create(n->proc.bus, td_bus_endpoint(w->router), &self, &events, &n->member),
        TD_OK);
    pair(n->proc.bus, w->router);
    pair(n->proc.bus, w->decode);
    w->memory = calloc(BLOCKS, td_kv_block_bytes(&w->info.kv));
    assert_int_equal(td_pool_create(w->memory, BLOCKS, td_kv_block_bytes(&w->info.kv), &n->pool),
                     TD_OK);
    assert_int_equal(kvs_client_create(n->proc.bus, n->member, n->pool, &p->store), TD_OK);
    p->scratch_blocks = calloc(TD_MSG_BLOCKS_MAX, sizeof(*p->scratch_blocks));
    p->scratch_epochs = calloc(TD_MSG_BLOCKS_MAX, sizeof(*p->scratch_epochs));
    p->scratch_sums = calloc(TD_MSG_BLOCKS_MAX, sizeof(*p->scratch_sums));
    *state = w;
    return 0;
}

static int setup(void **state)
{
    return setup_with(state, 2, 1, 8);
}

/* The quick start's model: 12 KiB a layer of a block. */
static int setup_real_layout(void **state)
{
    return setup_with(state, 30, 3, 64);
}

static int teardown(void **state)
{
    world_t *w = *state;
    pfn_node_t *p = w->pfn;

    td_worker_destroy(p->node.worker);
    while (p->requests != NULL) { /* also those that a failed test has left computing */
        pfn_request_t *r = p->requests;
        r->computing = false;
        if (r->state == PFN_DRAIN) {
            pfn_request_settle(p, r);
        } else {
            pfn_request_end(p, r, TD_ERR_CANCELLED);
        }
    }
    kvs_client_destroy(p->store);
    td_pool_destroy(p->node.pool);
    td_member_destroy(p->node.member);
    td_bus_destroy(p->node.proc.bus);
    td_bus_destroy(w->router);
    td_bus_destroy(w->decode);
    td_metrics_destroy(p->node.proc.metrics);
    free(p->scratch_blocks);
    free(p->scratch_epochs);
    free(p->scratch_sums);
    free(w->memory);
    free(p);
    free(w);
    return 0;
}

static td_msg_t expect(world_t *w, td_bus_t *bus, td_msg_type_t type, td_msg_arena_t **arena)
{
    uint64_t deadline = td_now_ns() + 5 * TD_NS_PER_S;
    td_msg_t msg;

    for (;;) {
        assert_true(td_now_ns() < deadline);
        td_bus_wait(w->pfn->node.proc.bus, NULL, 0, 0, NULL);
        td_bus_wait(bus, NULL, 0, 5, NULL);
        if (td_bus_recv(bus, &msg, arena) == TD_OK) {
            if (msg.type == type) {
                return msg;
            }
            td_msg_arena_free(*arena);
        }
    }
}

static td_msg_work_t work_of(uint64_t ticket, uint32_t prompt_tokens)
{
    static uint32_t prompt[600];
    for (uint32_t i = 0; i < TD_ARRAY_LEN(prompt); i++) {
        prompt[i] = i;
    }
    return (td_msg_work_t){.ticket = ticket,
                           .attempt = 1,
                           .budget_ms = 60000,
                           .prompt = prompt,
                           .prompt_tokens = prompt_tokens,
                           .top_p = 1.0f,
                           .repetition_penalty = 1.0f,
                           .n = 1,
                           .max_tokens = 5,
                           .peer_id = "decode",
                           .peer_incarnation = 33,
                           .request_id = "r"};
}

static pfn_request_t *start(world_t *w, td_msg_work_t work)
{
    td_msg_t msg = {.type = TD_MSG_START, .sender_id = "router", .u.work = work};
    td_str_t bytes = {0};
    td_msg_arena_t *arena = NULL;
    td_msg_t got;

    assert_int_equal(td_msg_encode(&msg, &bytes), TD_OK);
    assert_int_equal(td_msg_decode(bytes.bytes, bytes.len, &got, &arena), TD_OK);
    pfn_request_start(w->pfn, &got, &arena);
    td_msg_arena_free(arena);
    td_str_fini(&bytes);
    return pfn_request_find(w->pfn, work.ticket, work.attempt);
}

static void expect_end(world_t *w, td_status_t status)
{
    td_msg_arena_t *arena = NULL;
    td_msg_t msg = expect(w, w->router, TD_MSG_END, &arena);
    assert_int_equal(msg.u.end.status, status);
    assert_int_equal(msg.u.end.leg, TD_ROLE_PREFILL);
    td_msg_arena_free(arena);
}

static void assert_nothing_held(const world_t *w)
{
    td_pool_counts_t c = td_pool_counts(w->pfn->node.pool);
    assert_int_equal(c.reserved + c.active + c.quarantined, 0);
}

static void test_prefill_refuses_what_it_cannot_serve(void **state)
{
    world_t *w = *state;
    uint32_t bad[1] = {1000};
    td_msg_work_t work = work_of(1, 1);

    work.prompt = bad;
    assert_null(start(w, work));
    expect_end(w, TD_ERR_INVALID);
    assert_null(start(w, work_of(2, 513))); /* over the context */
    expect_end(w, TD_ERR_INVALID);
    assert_null(start(w, work_of(3, 500))); /* 32 blocks: never in a pool of 12 */
    expect_end(w, TD_ERR_TOO_LARGE);
    work = work_of(4, 20);
    work.peer_incarnation = 34; /* the decode node's life before */
    assert_null(start(w, work));
    expect_end(w, TD_ERR_PEER_DEAD);
    assert_nothing_held(w);
}

static void test_prefill_waits_for_blocks_then_goes_on(void **state)
{
    world_t *w = *state;
    pfn_request_t *a = start(w, work_of(1, 160)); /* 10 blocks */
    pfn_request_t *b = start(w, work_of(2, 80));  /* 5 more than there are */

    assert_int_equal(a->state, PFN_COMPUTE);
    assert_int_equal(b->state, PFN_WAIT_BLOCKS);
    pfn_request_tick(w->pfn);
    assert_int_equal(b->state, PFN_WAIT_BLOCKS);
    pfn_request_end(w->pfn, a, TD_ERR_CANCELLED);
    pfn_request_tick(w->pfn);
    assert_int_equal(b->state, PFN_COMPUTE);
    pfn_request_end(w->pfn, b, TD_ERR_CANCELLED);
    assert_nothing_held(w);
}

/* F14: a long prompt is not passed over for ever by short ones that always fit. */
static void test_f14_prefill_short_prompts_wait_behind_a_long_one(void **state)
{
    world_t *w = *state;
    pfn_request_t *a = start(w, work_of(1, 80));  /* 5 blocks of 12 */
    pfn_request_t *b = start(w, work_of(2, 160)); /* 10 */
    pfn_request_t *c = start(w, work_of(3, 16));  /* 1 */

    assert_int_equal(b->state, PFN_WAIT_BLOCKS);
    assert_int_equal(c->state, PFN_WAIT_BLOCKS);
    pfn_request_tick(w->pfn);
    assert_int_equal(c->state, PFN_WAIT_BLOCKS);
    pfn_request_end(w->pfn, a, TD_ERR_CANCELLED);
    pfn_request_tick(w->pfn);
    assert_int_equal(b->state, PFN_COMPUTE);
    assert_int_equal(c->state, PFN_COMPUTE);
}

/* F2: whichever state it is in, its end gives everything back and is told once. */
static void test_f2_prefill_cancelled_before_it_came_is_never_started(void **state)
{
    world_t *w = *state;

    td_node_forget(&w->pfn->node, 9, 1);
    assert_null(start(w, work_of(9, 20)));
    assert_nothing_held(w);
}

static void test_prefill_higher_attempt_replaces_the_lower(void **state)
{
    world_t *w = *state;
    td_msg_work_t work = work_of(9, 40);

    assert_non_null(start(w, work));
    work.attempt = 2;
    assert_non_null(start(w, work));
    expect_end(w, TD_ERR_STALE);
    assert_null(pfn_request_find(w->pfn, 9, 1));
    work.attempt = 1;
    assert_null(start(w, work)); /* the older one again: refused */
}

/* I2: a batch still writes into its blocks: they are quarantined until it has ended. */
static void test_i2_prefill_ended_during_a_batch_quarantines_its_blocks(void **state)
{
    world_t *w = *state;
    pfn_request_t *r = start(w, work_of(1, 40));

    r->computing = true;
    pfn_request_end(w->pfn, r, TD_ERR_CANCELLED);
    expect_end(w, TD_ERR_CANCELLED);
    assert_int_equal(td_pool_counts(w->pfn->node.pool).quarantined, 3);
    assert_int_equal(td_pool_counts(w->pfn->node.pool).active, 0);
    r->computing = false;
    pfn_request_settle(w->pfn, r);
    assert_null(w->pfn->requests);
    assert_nothing_held(w);
}

static void
test_prefill_cached_prefix_is_announced_at_once_but_never_the_last_position(void **state)
{
    world_t *w = *state;
    pfn_request_t *r = start(w, work_of(1, 48)); /* 3 full blocks */
    td_msg_arena_t *arena = NULL;
    td_msg_t msg;

    for (uint32_t i = 0; i < 3; i++) {
        assert_int_equal(td_pool_index(w->pfn->node.pool, r->seq.blocks[i], &r->keys[i], i), TD_OK);
    }
    pfn_request_end(w->pfn, r, TD_OK);
    r = start(w, work_of(2, 48));
    assert_int_equal(r->local_blocks, 2); /* position 47 is computed: its logits are needed */
    assert_int_equal(r->done_tokens, 32);
    msg = expect(w, w->decode, TD_MSG_LAYERS_READY, &arena);
    assert_int_equal(msg.u.layers.ticket, 2);
    assert_int_equal(msg.u.layers.layer_end, 2);
    assert_int_equal(msg.u.layers.count, 2);
    td_msg_arena_free(arena);
}

static void test_prefill_deadline_ends_the_request(void **state)
{
    world_t *w = *state;
    td_msg_work_t work = work_of(1, 40);

    work.budget_ms = 0;
    assert_non_null(start(w, work));
    pfn_request_tick(w->pfn);
    expect_end(w, TD_ERR_TIMEOUT);
    assert_nothing_held(w);
}

static void no_pass(void *ctx)
{
    (void)ctx;
}

/* Ends a batch as the worker would have left it; its parts are set by the caller. */
static void finish_batch(world_t *w)
{
    pfn_node_t *p = w->pfn;

    assert_int_equal(td_worker_create(&p->node.worker), TD_OK);
    td_worker_submit(p->node.worker, no_pass, p);
    while (td_worker_is_busy(p->node.worker)) {
        td_bus_wait(p->node.proc.bus, (int[]){td_worker_fd(p->node.worker)}, 1, 100, (bool[1]){0});
        pfn_batch_progress(p);
    }
    td_worker_destroy(p->node.worker);
    p->node.worker = NULL;
}

static void add_last_part(world_t *w, pfn_request_t *r)
{
    w->pfn->batch.parts[w->pfn->batch.part_count++] = (pfn_part_t){
        .request = r, .row_count = r->work.prompt_tokens, .block_end = r->blocks, .last = true};
    r->computing = true;
}

/* KvReady cannot be sent: the request ends, and nobody touches it after that. */
static void test_prefill_unsent_kv_ready_ends_the_request(void **state)
{
    world_t *w = *state;
    pfn_request_t *r = start(w, work_of(1, 40));

    add_last_part(w, r);
    td_bus_disconnect(w->pfn->node.proc.bus, "decode");
    finish_batch(w);
    expect_end(w, TD_ERR_PEER_DEAD);
    assert_null(w->pfn->requests);
    assert_nothing_held(w);
}

/* What is wrong with one request's numbers ends that one, and none that shared its batch. */
static void test_prefill_failed_request_leaves_its_batch_alone(void **state)
{
    world_t *w = *state;
    pfn_request_t *bad = start(w, work_of(1, 40));
    pfn_request_t *good = start(w, work_of(2, 40));

    add_last_part(w, bad);
    add_last_part(w, good);
    w->pfn->batch.parts[0].status = TD_ERR_INVALID;
    finish_batch(w);
    expect_end(w, TD_ERR_INVALID);
    assert_null(pfn_request_find(w->pfn, 1, 1));
    assert_int_equal(good->state, PFN_WAIT_ACK);
}

static void expect_layers(world_t *w, uint64_t ticket, uint32_t begin, uint32_t end)
{
    td_msg_arena_t *arena = NULL;
    td_msg_t msg = expect(w, w->decode, TD_MSG_LAYERS_READY, &arena);
    assert_int_equal(msg.u.layers.ticket, ticket);
    assert_int_equal(msg.u.layers.layer_begin, begin);
    assert_int_equal(msg.u.layers.layer_end, end);
    td_msg_arena_free(arena);
}

/* An announcement stands for 256 KiB of its request, however many others share the batch. */
static void test_prefill_gathers_layers_for_each_request(void **state)
{
    world_t *w = *state;
    pfn_node_t *p = w->pfn;
    pfn_request_t *small = start(w, work_of(1, 16));  /* 12 KiB a layer */
    pfn_request_t *large = start(w, work_of(2, 160)); /* 120 KiB */

    add_last_part(w, small);
    add_last_part(w, large);
    assert_int_equal(td_worker_create(&p->node.worker), TD_OK);
    for (uint32_t done = 3; done <= 30; done += 3) {
        atomic_store_explicit(&p->batch.layers_done, done, memory_order_release);
        pfn_batch_progress(p);
        if (done == 24) {
            expect_layers(w, 1, 0, 24); /* 22 layers of one block are the first 256 KiB */
        } else if (done == 30) {
            expect_layers(w, 1, 24, 30); /* what is left */
        }
        expect_layers(w, 2, done - 3, done);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_prefill_refuses_what_it_cannot_serve, setup, teardown),
        cmocka_unit_test_setup_teardown(test_prefill_waits_for_blocks_then_goes_on, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_f2_prefill_cancelled_before_it_came_is_never_started,
                                        setup, teardown),
        cmocka_unit_test_setup_teardown(test_prefill_higher_attempt_replaces_the_lower, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_i2_prefill_ended_during_a_batch_quarantines_its_blocks,
                                        setup, teardown),
        cmocka_unit_test_setup_teardown(
            test_prefill_cached_prefix_is_announced_at_once_but_never_the_last_position, setup,
            teardown),
        cmocka_unit_test_setup_teardown(test_f14_prefill_short_prompts_wait_behind_a_long_one,
                                        setup, teardown),
        cmocka_unit_test_setup_teardown(test_prefill_deadline_ends_the_request, setup, teardown),
        cmocka_unit_test_setup_teardown(test_prefill_unsent_kv_ready_ends_the_request, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_prefill_failed_request_leaves_its_batch_alone, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_prefill_gathers_layers_for_each_request,
                                        setup_real_layout, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

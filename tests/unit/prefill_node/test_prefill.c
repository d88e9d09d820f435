/* The prefill node's requests with a played router, decode node and store; no model runs. */
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
    uint8_t *memory;        /* of the pool; NULL: the transfer's */
    td_bus_t *store;        /* these: only with join_store() */
    td_transfer_t *segment; /* its memory */
    td_pool_t *segment_pool;
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

static td_transfer_t *transfer_of(const world_t *w, uint64_t incarnation)
{
    td_transfer_config_t config = {.block_count = BLOCKS,
                                   .block_bytes = td_kv_block_bytes(&w->info.kv),
                                   .incarnation = incarnation};
    td_transfer_t *transfer = NULL;
    assert_int_equal(td_transfer_create(&config, &transfer), TD_OK);
    return transfer;
}

/* What has come for the node. */
static void pump(world_t *w)
{
    td_node_t *n = &w->pfn->node;
    td_msg_heartbeat_t load = {0};
    td_msg_arena_t *arena = NULL;
    td_msg_t msg;

    td_bus_wait(n->proc.bus, NULL, 0, 5, NULL);
    td_bus_wait(w->router, NULL, 0, 0, NULL);
    while (td_bus_recv(n->proc.bus, &msg, &arena) == TD_OK) {
        if (!td_member_handle(n->member, &msg)) {
            (void)kvs_client_handle(w->pfn->store, &msg);
        }
        td_msg_arena_free(arena);
    }
    td_member_tick(n->member, &load);
}

#define PUMP_UNTIL(w, cond)                                                                        \
    do {                                                                                           \
        uint64_t until_ = td_now_ns() + 10 * TD_NS_PER_S;                                          \
        while (!(cond)) {                                                                          \
            assert_true(td_now_ns() < until_);                                                     \
            pump(w);                                                                               \
        }                                                                                          \
    } while (0)

/* A store with a segment, known to the node. */
static void join_store(world_t *w)
{
    td_node_t *n = &w->pfn->node;
    uint32_t block_bytes = (uint32_t)td_kv_block_bytes(&w->info.kv);
    td_transfer_peer_t to = {.incarnation = 44, .block_count = BLOCKS, .block_bytes = block_bytes};
    td_msg_t msg = {.type = TD_MSG_REGISTERED, .u.registered = {.accepted = true, .error = ""}};
    td_msg_peer_t peer = {
        .id = "store", .role = TD_ROLE_KVSTORE, .incarnation = 44, .store_master = true};

    w->store = bus_of("store", 44);
    pair(n->proc.bus, w->store);
    w->segment = transfer_of(w, 44);
    assert_int_equal(
        td_pool_create(td_transfer_memory(w->segment), BLOCKS, block_bytes, &w->segment_pool),
        TD_OK);
    td_transfer_set_pool(n->transfer, n->pool);
    td_transfer_set_pool(w->segment, w->segment_pool);
    td_transfer_address(w->segment, &to.address, &to.address_len, &to.rkey, &to.rkey_len, &to.base);
    assert_int_equal(td_transfer_peer_add(n->transfer, &to), TD_OK);
    assert_int_equal(td_ring_create(TD_NODE_FETCHES_MAX, &n->fetched), TD_OK);
    assert_int_equal(td_verify_create(TD_NODE_FETCHES_MAX, block_bytes, &n->verify), TD_OK);
    assert_int_equal(td_bus_send(w->router, "prefill", &msg), TD_OK);
    peer.endpoint = td_bus_endpoint(w->store);
    msg = (td_msg_t){.type = TD_MSG_PEERS, .u.peers = {.version = 1, .count = 1, .peers = &peer}};
    assert_int_equal(td_bus_send(w->router, "prefill", &msg), TD_OK);
    PUMP_UNTIL(w, td_member_store_master(n->member) != NULL);
}

static int setup_with(void **state, uint32_t layers, uint32_t kv_heads, uint32_t head_dim,
                      bool with_store)
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
    n->checksum_failures = td_metrics_counter(n->proc.metrics, "failures_total", NULL, "");
    if (with_store) {
        n->transfer = transfer_of(w, 11);
    } else {
        w->memory = calloc(BLOCKS, td_kv_block_bytes(&w->info.kv));
    }
    assert_int_equal(td_pool_create(with_store ? td_transfer_memory(n->transfer) : w->memory,
                                    BLOCKS, td_kv_block_bytes(&w->info.kv), &n->pool),
                     TD_OK);
    assert_int_equal(kvs_client_create(n->proc.bus, n->member, n->pool, &p->store), TD_OK);
    p->scratch_blocks = calloc(TD_MSG_BLOCKS_MAX, sizeof(*p->scratch_blocks));
    p->scratch_epochs = calloc(TD_MSG_BLOCKS_MAX, sizeof(*p->scratch_epochs));
    p->scratch_sums = calloc(TD_MSG_BLOCKS_MAX, sizeof(*p->scratch_sums));
    p->scratch_keys = calloc(TD_MSG_BLOCKS_MAX, sizeof(*p->scratch_keys));
    if (with_store) {
        join_store(w);
    }
    *state = w;
    return 0;
}

static int setup(void **state)
{
    return setup_with(state, 2, 1, 8, false);
}

static int setup_with_store(void **state)
{
    return setup_with(state, 2, 1, 8, true);
}

/* The quick start's model: 12 KiB a layer of a block. */
static int setup_real_layout(void **state)
{
    return setup_with(state, 30, 3, 64, false);
}

static int teardown(void **state)
{
    world_t *w = *state;
    pfn_node_t *p = w->pfn;

    td_node_stop(&p->node);
    while (p->requests != NULL) { /* also those that a failed test has left computing */
        pfn_request_t *r = p->requests;
        r->computing = false;
        r->fetches = 0;
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
    td_bus_destroy(w->store);
    td_ring_destroy(p->node.fetched);
    td_transfer_destroy(w->segment);
    for (uint32_t i = 0; w->segment_pool != NULL && i < BLOCKS; i++) {
        if (td_pool_refs(w->segment_pool, i) > 0) {
            td_pool_unref(w->segment_pool, i);
        }
    }
    td_pool_destroy(w->segment_pool);
    td_metrics_destroy(p->node.proc.metrics);
    free(p->scratch_blocks);
    free(p->scratch_epochs);
    free(p->scratch_sums);
    free(p->scratch_keys);
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
    assert_non_null(start(w, work)); /* its router goes by this one: of the other no end is told */
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

/* A prompt's last rows do not wait for a chunk of another one's. */
static void test_prefill_pass_that_ends_a_prompt_is_not_filled(void **state)
{
    pfn_batch_t b = {.part_count = 1, .row_count = 100};
    (void)state;

    assert_int_equal(pfn_batch_room(&b, 156), 156);
    b.parts[0].last = true;
    assert_int_equal(pfn_batch_room(&b, 156), 0);
    b.row_count = 5;
    assert_int_equal(pfn_batch_room(&b, 251), PFN_FILL_ROWS - 5);
    assert_int_equal(pfn_batch_room(&b, 3), 3);
    b.parts[1] = (pfn_part_t){.last = false}; /* what came behind it changes nothing */
    b.part_count = 2;
    b.row_count = PFN_FILL_ROWS;
    assert_int_equal(pfn_batch_room(&b, 240), 0);
    b.part_count = 0;
    assert_int_equal(pfn_batch_room(&b, 256), 256);
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

/* --- the store ----------------------------------------------------------------------------------
 */

/* Starts a request of 56 tokens, whose three full blocks the store has; its answer has come. */
static pfn_request_t *start_found(world_t *w, uint64_t ticket)
{
    static const char *const ids[] = {"store"};
    static const uint32_t of[3] = {0};
    size_t block_bytes = td_kv_block_bytes(&w->info.kv);
    pfn_request_t *r = start(w, work_of(ticket, 56));
    td_msg_arena_t *arena = NULL;
    uint32_t blocks[3];
    uint64_t epochs[3];
    uint64_t sums[3];
    td_msg_t msg;

    assert_non_null(r);
    assert_int_equal(r->state, PFN_WAIT_LOOKUP);
    for (uint32_t i = 0; i < 3; i++) {
        uint8_t *bytes = NULL;
        assert_int_equal(td_pool_take(w->segment_pool, &blocks[i]), TD_OK);
        bytes = td_pool_bytes(w->segment_pool, blocks[i]);
        memset(bytes, (int)i + 1, block_bytes);
        epochs[i] = td_pool_epoch(w->segment_pool, blocks[i]);
        sums[i] =
            td_block_checksum(td_block_content_hash(bytes, block_bytes), &r->keys[i], epochs[i]);
    }
    msg = expect(w, w->store, TD_MSG_LOOKUP, &arena);
    msg = (td_msg_t){.type = TD_MSG_LOOKUP_RESULT,
                     .u.found = {.request = msg.u.blocks.request,
                                 .segment_count = 1,
                                 .segment_ids = ids,
                                 .count = 3,
                                 .segment_of = of,
                                 .blocks = blocks,
                                 .epochs = epochs,
                                 .checksums = sums}};
    td_msg_arena_free(arena);
    assert_int_equal(td_bus_send(w->store, "prefill", &msg), TD_OK);
    PUMP_UNTIL(w, r->state != PFN_WAIT_LOOKUP);
    return r;
}

static td_node_fetch_t *next_job(world_t *w)
{
    td_node_t *n = &w->pfn->node;
    uint64_t until = td_now_ns() + 10 * TD_NS_PER_S;
    int fd = td_ring_fd(n->fetched);
    td_node_fetch_t *job = NULL;
    bool readable = false;

    while ((job = td_node_fetch_next(n)) == NULL) {
        assert_true(td_now_ns() < until);
        td_bus_wait(n->proc.bus, &fd, 1, 100, &readable);
        td_ring_drain_fd(n->fetched);
    }
    return job;
}

static void receive_all(world_t *w)
{
    while (w->pfn->node.fetches > 0) {
        pfn_prefix_fetched(w->pfn, next_job(w));
    }
}

/* I3: the first wrong block ends the prefix; the right ones before it are used. */
static void test_i3_prefill_uses_the_stores_blocks_up_to_a_wrong_one(void **state)
{
    world_t *w = *state;
    pfn_request_t *r = start_found(w, 1);

    assert_int_equal(r->state, PFN_WAIT_FETCH);
    receive_all(w);
    assert_int_equal(r->state, PFN_COMPUTE);
    assert_int_equal(r->store_blocks, 3);
    assert_int_equal(td_pool_bytes(w->pfn->node.pool, r->seq.blocks[2])[5], 3);
    assert_true(w->pfn->fetch_rate.amount > 2.9);
    for (uint32_t i = 0; i < 3; i++) {
        td_pool_unindex(w->pfn->node.pool, r->seq.blocks[i]);
    }
    pfn_request_end(w->pfn, r, TD_ERR_CANCELLED);
    r = start_found(w, 2);
    td_node_fetch_t *job = next_job(w); /* here, not hashed yet */
    job->pieces[1].dest[9] ^= 1;
    pfn_prefix_fetched(w->pfn, job);
    receive_all(w);
    assert_int_equal(r->store_blocks, 1);
    assert_int_equal(r->done_tokens, 16);
}

/* I2: while the verifier reads a request's blocks, nobody else gets them. */
static void test_i2_prefill_ended_while_blocks_are_hashed_quarantines_them(void **state)
{
    world_t *w = *state;
    pfn_request_t *r = start_found(w, 1);

    pfn_prefix_fetched(w->pfn, next_job(w)); /* fetched: on to the verifier */
    assert_int_equal(r->fetches, 1);
    pfn_request_end(w->pfn, r, TD_ERR_CANCELLED);
    assert_int_equal(td_pool_counts(w->pfn->node.pool).quarantined, 3);
    receive_all(w);
    assert_null(w->pfn->requests);
    assert_nothing_held(w);
}

/* What was measured lately decides between the store and computing; what is old says nothing. */
static void test_prefill_computes_what_the_store_would_bring_later(void **state)
{
    world_t *w = *state;
    pfn_node_t *p = w->pfn;
    uint64_t old = td_now_ns() - (PFN_RATE_AGE_MS + 1) * TD_NS_PER_MS;

    pfn_rate_add(&p->compute_rate, 8, 80 * TD_NS_PER_MS); /* a block in 10 ms */
    pfn_rate_add(&p->fetch_rate, 2, 30 * TD_NS_PER_MS);   /* in 15 ms */
    assert_int_equal(start_found(w, 1)->state, PFN_COMPUTE);
    assert_int_equal(td_metric_get(p->fetches_skipped), 1);
    assert_int_equal(td_metric_get(p->lookups_hit), 1);
    pfn_rate_add(&p->fetch_rate, 6, 30 * TD_NS_PER_MS); /* 7.5 blocks in 52.5 ms */
    assert_int_equal(start_found(w, 2)->state, PFN_WAIT_FETCH);
    receive_all(w);
    pfn_rate_add(&p->fetch_rate, 0, 2000 * TD_NS_PER_MS); /* one that brought nothing */
    td_pool_unindex(p->node.pool, td_pool_find(p->node.pool, &p->requests->keys[0]));
    assert_int_equal(start_found(w, 3)->state, PFN_COMPUTE);
    pfn_request_end(p, pfn_request_find(p, 1, 1), TD_ERR_CANCELLED);
    p->fetch_rate.at_ns = old;
    assert_int_equal(start_found(w, 4)->state, PFN_WAIT_FETCH);
    receive_all(w);
    assert_int_equal(td_metric_get(p->fetches_skipped), 2);
}

/* --- masks ------------------------------------------------------------------------------------ */

/* A chunk's rows, as the worker would have left them. */
static void run_chunk(world_t *w, pfn_request_t *r, uint32_t rows)
{
    pfn_batch_t *b = &w->pfn->batch;
    const uint32_t end = r->done_tokens + rows;
    const bool last = end == r->work.prompt_tokens;

    for (uint32_t p = r->done_tokens; p < end; p++) {
        assert_int_equal(td_seq_prepare_write(&r->seq, p), TD_OK);
    }
    b->parts[0] = (pfn_part_t){.request = r,
                               .row_count = rows,
                               .block_begin = r->announced_blocks,
                               .block_end = last ? r->blocks : end / 16,
                               .last = last};
    b->part_count = 1;
    atomic_store_explicit(&b->layers_done, 2, memory_order_release);
    r->computing = true;
    finish_batch(w);
}

/* 32 blocks through a pool of 12: what is left behind stays cached until its room is needed, and
 * only what position 500 sees goes to the decode node. */
static void test_prefill_long_prompt_needs_a_window_and_a_chunk(void **state)
{
    enum { PROMPT = 500, CHUNK = 64, MOST = 7 };
    world_t *w = *state;
    td_pool_t *pool = w->pfn->node.pool;
    pfn_request_t *r = NULL;
    td_msg_arena_t *arena = NULL;
    td_msg_t msg;

    w->pfn->chunk_tokens = CHUNK;
    w->info.attention = (td_attention_mask_t){.kind = TD_ATTENTION_WINDOW, .local = 32};
    r = start(w, work_of(1, PROMPT));
    assert_non_null(r);
    assert_int_equal(r->state, PFN_COMPUTE);
    while (r->done_tokens < PROMPT) {
        const td_pool_counts_t c = td_pool_counts(pool);
        assert_true(c.active + c.reserved <= MOST);
        run_chunk(w, r, TD_MIN((uint32_t)CHUNK, PROMPT - r->done_tokens));
    }
    assert_int_equal(r->state, PFN_WAIT_ACK);
    assert_int_equal(r->seq.held, 3);
    assert_true(td_pool_counts(pool).cached > 0);
    /* Position 500 sees from 469 on: blocks 29 to 31, which the last chunks complete. */
    msg = expect(w, w->decode, TD_MSG_LAYERS_READY, &arena);
    assert_int_equal(msg.u.layers.first_block, 29);
    assert_int_equal(msg.u.layers.count, 3);
    td_msg_arena_free(arena);
    msg = expect(w, w->decode, TD_MSG_KV_READY, &arena);
    assert_int_equal(msg.u.kv_ready.count, 3);
    for (uint32_t i = 0; i < 3; i++) {
        assert_int_equal(msg.u.kv_ready.blocks[i], r->seq.blocks[29 + i]);
        assert_memory_equal(&msg.u.kv_ready.keys[i], &r->keys[29 + i], sizeof(r->keys[0]));
    }
    td_msg_arena_free(arena);
    pfn_request_end(w->pfn, r, TD_OK);
    assert_nothing_held(w);
    /* The same prompt again goes on where its last full block ends, though most are gone. */
    r = start(w, work_of(2, PROMPT));
    assert_int_equal(r->local_blocks, 31);
    assert_int_equal(r->done_tokens, 496);
    assert_int_equal(r->seq.blocks[28], TD_POOL_NONE);
    pfn_request_end(w->pfn, r, TD_ERR_CANCELLED);
    assert_nothing_held(w);
}

/* The store has three blocks; position 48 sees the last one only. */
static void test_prefill_fetches_from_the_store_only_what_is_seen(void **state)
{
    world_t *w = *state;
    pfn_request_t *r = NULL;
    td_node_fetch_t *job = NULL;

    w->pfn->chunk_tokens = 64;
    w->info.attention = (td_attention_mask_t){.kind = TD_ATTENTION_WINDOW, .local = 16};
    r = start_found(w, 1);
    assert_int_equal(r->state, PFN_WAIT_FETCH);
    assert_int_equal(r->fetches, 1);
    assert_int_equal(td_pool_counts(w->pfn->node.pool).active, 1);
    receive_all(w);
    assert_int_equal(r->state, PFN_COMPUTE);
    assert_int_equal(r->store_blocks, 3);
    assert_int_equal(r->done_tokens, 48);
    assert_int_equal(r->seq.blocks[0], TD_POOL_NONE);
    assert_int_equal(r->seq.blocks[1], TD_POOL_NONE);
    assert_int_equal(td_pool_bytes(w->pfn->node.pool, r->seq.blocks[2])[5], 3);
    td_pool_unindex(w->pfn->node.pool, r->seq.blocks[2]);
    pfn_request_end(w->pfn, r, TD_ERR_CANCELLED);
    /* I3: it is wrong: what lies before was not fetched, so nothing of the store is used. */
    r = start_found(w, 2);
    job = next_job(w);
    job->pieces[0].dest[9] ^= 1;
    pfn_prefix_fetched(w->pfn, job);
    receive_all(w);
    assert_int_equal(r->state, PFN_COMPUTE);
    assert_int_equal(r->store_blocks, 0);
    assert_int_equal(r->done_tokens, 0);
    pfn_request_end(w->pfn, r, TD_ERR_CANCELLED);
    assert_nothing_held(w);
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
        cmocka_unit_test(test_prefill_pass_that_ends_a_prompt_is_not_filled),
        cmocka_unit_test_setup_teardown(test_prefill_failed_request_leaves_its_batch_alone, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_prefill_gathers_layers_for_each_request,
                                        setup_real_layout, teardown),
        cmocka_unit_test_setup_teardown(test_i3_prefill_uses_the_stores_blocks_up_to_a_wrong_one,
                                        setup_with_store, teardown),
        cmocka_unit_test_setup_teardown(
            test_i2_prefill_ended_while_blocks_are_hashed_quarantines_them, setup_with_store,
            teardown),
        cmocka_unit_test_setup_teardown(test_prefill_computes_what_the_store_would_bring_later,
                                        setup_with_store, teardown),
        cmocka_unit_test_setup_teardown(test_prefill_long_prompt_needs_a_window_and_a_chunk, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_prefill_fetches_from_the_store_only_what_is_seen,
                                        setup_with_store, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

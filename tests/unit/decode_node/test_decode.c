/* The decode node's tickets, hand-offs and streams with a played router and prefill node; no model
 * runs. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "decode_node/dcn_node.h"

#define MODEL "build/models/SmolLM2-135M-Instruct.Q4_1.gguf"
#define BLOCKS 40u

typedef struct world {
    dcn_node_t *dcn;
    td_model_info_t info;
    td_bus_t *router;
    td_bus_t *prefill;
    td_transfer_t *source; /* the prefill node's memory */
    td_pool_t *source_pool;
    uint32_t source_blocks[4]; /* blocks of a prompt of 56 tokens; the last one partly filled */
    uint64_t source_epochs[4];
    uint64_t sums[4];
    td_block_key_t keys[4];
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

static td_transfer_t *transfer_of(const td_model_info_t *info, uint64_t incarnation)
{
    td_transfer_config_t config = {.block_count = BLOCKS,
                                   .block_bytes = td_kv_block_bytes(&info->kv),
                                   .incarnation = incarnation};
    td_transfer_t *transfer = NULL;
    assert_int_equal(td_transfer_create(&config, &transfer), TD_OK);
    return transfer;
}

static void open_transfers(world_t *w)
{
    td_node_t *n = &w->dcn->node;
    size_t block_bytes = td_kv_block_bytes(&w->info.kv);
    td_transfer_peer_t peer = {
        .incarnation = 33, .block_count = BLOCKS, .block_bytes = (uint32_t)block_bytes};

    n->transfer = transfer_of(&w->info, 11);
    w->source = transfer_of(&w->info, 33);
    assert_int_equal(td_pool_create(td_transfer_memory(n->transfer), BLOCKS, block_bytes, &n->pool),
                     TD_OK);
    assert_int_equal(
        td_pool_create(td_transfer_memory(w->source), BLOCKS, block_bytes, &w->source_pool), TD_OK);
    td_transfer_set_pool(n->transfer, n->pool);
    td_transfer_set_pool(w->source, w->source_pool);
    td_transfer_address(w->source, &peer.address, &peer.address_len, &peer.rkey, &peer.rkey_len,
                        &peer.base);
    assert_int_equal(td_transfer_peer_add(n->transfer, &peer), TD_OK);
    assert_int_equal(td_ring_create(TD_NODE_FETCHES_MAX, &n->fetched), TD_OK);
    assert_int_equal(td_verify_create(TD_NODE_FETCHES_MAX, block_bytes, &n->verify), TD_OK);
}

static int setup(void **state)
{
    world_t *w = calloc(1, sizeof(*w));
    dcn_node_t *d = calloc(1, sizeof(*d));
    td_node_t *n = &d->node;
    td_member_events_t events = {0};
    td_msg_register_t self = {.self = {.id = "decode", .role = TD_ROLE_DECODE, .endpoint = "e"},
                              .http = "",
                              .numerics_class = "",
                              .version = ""};

    assert_non_null(w);
    assert_non_null(d);
    w->dcn = d;
    w->info =
        (td_model_info_t){.vocab_size = 49152,
                          .context_max = 512,
                          .kv = {.layers = 2, .kv_heads = 1, .head_dim = 8, .block_tokens = 16}};
    n->info = &w->info;
    assert_int_equal(td_metrics_create(&n->proc.metrics), TD_OK);
    dcn_metrics_declare(d);
    n->checksum_failures = td_metrics_counter(n->proc.metrics, "failures_total", NULL, "");
    n->proc.bus = bus_of("decode", 11);
    w->router = bus_of("router", 22);
    w->prefill = bus_of("prefill", 33);
    assert_int_equal(
        td_member_create(n->proc.bus, td_bus_endpoint(w->router), &self, &events, &n->member),
        TD_OK);
    pair(n->proc.bus, w->router);
    pair(n->proc.bus, w->prefill);
    assert_int_equal(td_gguf_open(MODEL, &n->gguf), TD_OK);
    assert_int_equal(td_tokenizer_create(n->gguf, &n->tokenizer), TD_OK);
    open_transfers(w);
    assert_int_equal(kvs_client_create(n->proc.bus, n->member, n->pool, &d->store), TD_OK);
    *state = w;
    return 0;
}

static int teardown(void **state)
{
    world_t *w = *state;
    td_node_t *n = &w->dcn->node;

    td_node_stop(n);
    while (w->dcn->tickets != NULL) {
        w->dcn->tickets->fetches = 0;
        dcn_ticket_end(w->dcn, w->dcn->tickets, TD_ERR_CANCELLED);
    }
    kvs_client_destroy(w->dcn->store);
    td_pool_destroy(n->pool);
    td_ring_destroy(n->fetched);
    td_transfer_destroy(w->source);
    for (uint32_t i = 0; i < TD_ARRAY_LEN(w->source_blocks) && w->source_epochs[0] != 0; i++) {
        td_pool_unref(w->source_pool, w->source_blocks[i]);
    }
    td_pool_destroy(w->source_pool);
    td_member_destroy(n->member);
    td_tokenizer_destroy(n->tokenizer);
    td_gguf_close(n->gguf);
    td_bus_destroy(n->proc.bus);
    td_bus_destroy(w->router);
    td_bus_destroy(w->prefill);
    td_metrics_destroy(n->proc.metrics);
    td_str_fini(&w->dcn->out.text);
    td_str_fini(&w->dcn->text);
    td_str_fini(&w->dcn->raw);
    free(w->dcn);
    free(w);
    return 0;
}

/* The next message of a type that a bus gets. */
static td_msg_t expect(world_t *w, td_bus_t *bus, td_msg_type_t type, td_msg_arena_t **arena)
{
    uint64_t deadline = td_now_ns() + 5 * TD_NS_PER_S;
    td_msg_t msg;

    for (;;) {
        assert_true(td_now_ns() < deadline);
        td_bus_wait(w->dcn->node.proc.bus, NULL, 0, 0, NULL);
        td_bus_wait(bus, NULL, 0, 5, NULL);
        if (td_bus_recv(bus, &msg, arena) == TD_OK) {
            if (msg.type == type) {
                return msg;
            }
            td_msg_arena_free(*arena);
        }
    }
}

/* Reserves as if the message had come from the router. */
static td_status_t reserve(world_t *w, td_msg_work_t work, uint32_t *have_blocks)
{
    td_msg_t msg = {.type = TD_MSG_RESERVE, .sender_id = "router", .u.work = work};
    td_str_t bytes = {0};
    td_msg_arena_t *arena = NULL;
    td_msg_t got;
    td_status_t status = TD_OK;

    assert_int_equal(td_msg_encode(&msg, &bytes), TD_OK);
    assert_int_equal(td_msg_decode(bytes.bytes, bytes.len, &got, &arena), TD_OK);
    dcn_ticket_reserve(w->dcn, &got, &arena);
    td_msg_arena_free(arena);
    td_str_fini(&bytes);
    got = expect(w, w->router, TD_MSG_RESERVED, &arena);
    status = got.u.reserved.status;
    *have_blocks = got.u.reserved.have_blocks;
    td_msg_arena_free(arena);
    return status;
}

static td_msg_work_t work_of(uint64_t ticket, uint32_t prompt_tokens, uint32_t max_tokens)
{
    static uint32_t prompt[512];
    for (uint32_t i = 0; i < TD_ARRAY_LEN(prompt); i++) {
        prompt[i] = 1000 + i;
    }
    return (td_msg_work_t){.ticket = ticket,
                           .attempt = 1,
                           .budget_ms = 60000,
                           .prompt = prompt,
                           .prompt_tokens = prompt_tokens,
                           .top_p = 1.0f,
                           .repetition_penalty = 1.0f,
                           .n = 1,
                           .max_tokens = max_tokens,
                           .skip_special = true,
                           .peer_id = "prefill",
                           .peer_incarnation = 33,
                           .request_id = "r"};
}

static void assert_nothing_held(const world_t *w)
{
    td_pool_counts_t c = td_pool_counts(w->dcn->node.pool);
    assert_int_equal(c.reserved + c.active + c.quarantined, 0);
}

/* KvReady for a request that needs no KV: all its choices end with the first token. */
static void ready_first_tokens(world_t *w, const td_msg_work_t *work, const uint32_t *tokens)
{
    uint32_t blocks = td_kv_blocks_for(&w->info.kv, work->prompt_tokens);
    uint32_t zeros[32] = {0};
    uint64_t numbers[32] = {0};
    td_block_key_t keys[32] = {{{0}}};
    td_msg_t msg = {.type = TD_MSG_KV_READY, .sender_id = "prefill"};
    td_msg_arena_t *arena = NULL;
    td_str_t bytes = {0};
    td_msg_t got;

    msg.u.kv_ready = (td_msg_kv_ready_t){.ticket = work->ticket,
                                         .attempt = work->attempt,
                                         .count = blocks,
                                         .blocks = zeros,
                                         .epochs = numbers,
                                         .checksums = numbers,
                                         .keys = keys,
                                         .choice_count = work->n,
                                         .first_tokens = tokens};
    assert_int_equal(td_msg_encode(&msg, &bytes), TD_OK);
    assert_int_equal(td_msg_decode(bytes.bytes, bytes.len, &got, &arena), TD_OK);
    got.sender_incarnation = 33;
    dcn_receive_ready(w->dcn, &got, &arena);
    td_msg_arena_free(arena);
    td_str_fini(&bytes);
}

static void test_decode_reserves_prompt_and_growth_and_gives_it_back(void **state)
{
    world_t *w = *state;
    td_msg_work_t work = work_of(1, 40, 50); /* 90 tokens: 6 blocks */
    uint32_t have = 9;

    assert_int_equal(reserve(w, work, &have), TD_OK);
    assert_int_equal(have, 0);
    assert_int_equal(td_pool_counts(w->dcn->node.pool).reserved, 6);
    dcn_ticket_end(w->dcn, dcn_ticket_find(w->dcn, 1, 1), TD_ERR_CANCELLED);
    assert_nothing_held(w);
}

static void test_f14_decode_admission_counts_growth_of_every_choice(void **state)
{
    world_t *w = *state;
    td_msg_work_t work = work_of(1, 40, 50);
    uint32_t have = 0;

    work.n = 3; /* 6 blocks, twice 6 - 2 shared full ones, and one copy of the shared partial one */
    assert_int_equal(reserve(w, work, &have), TD_OK);
    assert_int_equal(td_pool_counts(w->dcn->node.pool).reserved, 6 + 2 * 4 + 1);
    work = work_of(2, 200, 250); /* 29 blocks are not left */
    assert_int_equal(reserve(w, work, &have), TD_ERR_BUSY);
    assert_int_equal(td_pool_counts(w->dcn->node.pool).reserved, 15);
    work = work_of(3, 40, 400);
    work.n = 3; /* never */
    assert_int_equal(reserve(w, work, &have), TD_ERR_TOO_LARGE);
}

/* F14: one choice alone is promised what outputs have lately been long; the rest it takes as it
 * goes, and others may have to give way. */
static void test_f14_decode_promises_a_single_choice_what_is_to_be_expected(void **state)
{
    world_t *w = *state;
    dcn_node_t *d = w->dcn;
    td_msg_work_t work = work_of(1, 40, 400);
    uint32_t have = 0;

    assert_int_equal(dcn_output_expected(d, 50), 50);
    assert_int_equal(dcn_output_expected(d, 4000), 256); /* nothing has ended yet */
    assert_int_equal(reserve(w, work, &have), TD_OK);
    assert_int_equal(td_pool_counts(d->node.pool).reserved, 19); /* 296 tokens */
    dcn_ticket_end(d, dcn_ticket_find(d, 1, 1), TD_ERR_CANCELLED);
    for (uint32_t i = 0; i < 100; i++) {
        dcn_output_ended(d, 24 + 4 * (i % 2));
    }
    assert_in_range(dcn_output_expected(d, 4000), 26, 36);
    assert_int_equal(dcn_output_expected(d, 20), 20);
    work.ticket = 2;
    assert_int_equal(reserve(w, work, &have), TD_OK);
    assert_in_range(td_pool_counts(d->node.pool).reserved, 5, 5); /* 66 to 76 tokens */
    for (int i = 0; i < 100; i++) {
        dcn_output_ended(d, 1);
    }
    assert_int_equal(dcn_output_expected(d, 4000), 16); /* at least a little */
}

static void test_decode_refuses_what_the_model_cannot_hold(void **state)
{
    world_t *w = *state;
    td_msg_work_t work = work_of(1, 40, 473); /* 513 of 512 */
    uint32_t have = 0;
    uint32_t bad[2] = {5, 49152};

    assert_int_equal(reserve(w, work, &have), TD_ERR_INVALID);
    work = work_of(2, 2, 5);
    work.prompt = bad;
    assert_int_equal(reserve(w, work, &have), TD_ERR_INVALID);
    assert_nothing_held(w);
}

/* F2: a cancel that overtakes its reservation leaves nothing. */
static void test_f2_decode_ignores_a_reserve_that_was_cancelled_before(void **state)
{
    world_t *w = *state;
    td_msg_work_t work = work_of(7, 40, 50);
    td_msg_t msg = {.type = TD_MSG_RESERVE, .sender_id = "router", .u.work = work};
    td_msg_arena_t *arena = NULL;

    td_node_forget(&w->dcn->node, 7, 1);
    dcn_ticket_reserve(w->dcn, &msg, &arena);
    assert_null(w->dcn->tickets);
    assert_nothing_held(w);
}

static void test_decode_higher_attempt_replaces_the_lower(void **state)
{
    world_t *w = *state;
    td_msg_work_t work = work_of(7, 40, 50);
    uint32_t have = 0;

    assert_int_equal(reserve(w, work, &have), TD_OK);
    work.attempt = 2;
    assert_int_equal(reserve(w, work, &have), TD_OK);
    assert_null(dcn_ticket_find(w->dcn, 7, 1));
    assert_non_null(dcn_ticket_find(w->dcn, 7, 2));
    assert_int_equal(td_pool_counts(w->dcn->node.pool).reserved, 6);
}

/* F16: max_tokens 1 gives one token, without any KV; with n the same for each choice. */
static void test_f16_decode_ends_with_the_first_token(void **state)
{
    world_t *w = *state;
    td_msg_work_t work = work_of(5, 20, 1);
    uint32_t tokens[2] = {19556, 28}; /* "Hello" and "," */
    td_msg_arena_t *arena = NULL;
    td_msg_t msg;
    uint32_t have = 0;

    work.n = 2;
    assert_int_equal(reserve(w, work, &have), TD_OK);
    ready_first_tokens(w, &work, tokens);
    for (uint32_t i = 0; i < 2; i++) {
        msg = expect(w, w->router, TD_MSG_TOKENS, &arena);
        assert_int_equal(msg.u.tokens.choice, i);
        assert_int_equal(msg.u.tokens.count, 1);
        assert_int_equal(msg.u.tokens.finish, TD_FINISH_LENGTH);
        assert_memory_equal(msg.u.tokens.text.at, i == 0 ? "Hello" : ",", msg.u.tokens.text.len);
        td_msg_arena_free(arena);
    }
    msg = expect(w, w->router, TD_MSG_END, &arena);
    assert_int_equal(msg.u.end.status, TD_OK);
    assert_int_equal(msg.u.end.usage.completion_tokens, 2);
    td_msg_arena_free(arena);
    msg = expect(w, w->prefill, TD_MSG_KV_ACK, &arena);
    td_msg_arena_free(arena);
    assert_nothing_held(w);
}

static void test_decode_stop_token_gives_no_text(void **state)
{
    world_t *w = *state;
    td_msg_work_t work = work_of(5, 20, 10);
    uint32_t token = 2; /* <|im_end|> */
    td_msg_arena_t *arena = NULL;
    td_msg_t msg;
    uint32_t have = 0;

    assert_int_equal(reserve(w, work, &have), TD_OK);
    ready_first_tokens(w, &work, &token);
    msg = expect(w, w->router, TD_MSG_TOKENS, &arena);
    assert_int_equal(msg.u.tokens.finish, TD_FINISH_STOP);
    assert_int_equal(msg.u.tokens.text.len, 0);
    td_msg_arena_free(arena);
    assert_nothing_held(w);
}

/* I3: announcements and results that do not fit the reservation fail the hand-off, and nothing
 * else. */
static void test_i3_decode_fails_a_handoff_that_does_not_fit(void **state)
{
    world_t *w = *state;
    td_msg_work_t work = work_of(5, 40, 10);
    uint32_t blocks[4] = {0, 1, 2, 3};
    uint64_t epochs[4] = {1, 1, 1, 1};
    td_msg_t layers = {.type = TD_MSG_LAYERS_READY, .sender_incarnation = 33};
    td_msg_arena_t *arena = NULL;
    td_msg_t msg;
    uint32_t have = 0;

    assert_int_equal(reserve(w, work, &have), TD_OK);
    layers.u.layers = (td_msg_layers_ready_t){.ticket = 5,
                                              .attempt = 1,
                                              .layer_end = 2,
                                              .first_block = 0,
                                              .count = 4, /* the prompt has 3 */
                                              .blocks = blocks,
                                              .epochs = epochs};
    layers.sender_incarnation = 34; /* another life's: ignored */
    dcn_receive_layers(w->dcn, &layers);
    assert_non_null(dcn_ticket_find(w->dcn, 5, 1));
    layers.sender_incarnation = 33;
    dcn_receive_layers(w->dcn, &layers);
    assert_null(dcn_ticket_find(w->dcn, 5, 1));
    msg = expect(w, w->router, TD_MSG_KV_FAILED, &arena);
    assert_int_equal(msg.u.ticket.status, TD_ERR_PROTOCOL);
    td_msg_arena_free(arena);
    assert_nothing_held(w);
}

/* --- the hand-off -------------------------------------------------------------------------------
 */

/* Reserves ticket 5, of a prompt of 56 tokens, whose four blocks the prefill node has. */
static dcn_ticket_t *reserve_work(world_t *w, td_msg_work_t work)
{
    size_t block_bytes = td_kv_block_bytes(&w->info.kv);
    dcn_ticket_t *t = NULL;
    uint32_t have = 0;

    assert_int_equal(reserve(w, work, &have), TD_OK);
    t = dcn_ticket_find(w->dcn, 5, 1);
    assert_non_null(t);
    for (uint32_t i = 0; i < 4; i++) {
        uint8_t *bytes = NULL;
        assert_int_equal(td_pool_take(w->source_pool, &w->source_blocks[i]), TD_OK);
        w->source_epochs[i] = td_pool_epoch(w->source_pool, w->source_blocks[i]);
        bytes = td_pool_bytes(w->source_pool, w->source_blocks[i]);
        for (size_t k = 0; k < block_bytes; k++) {
            bytes[k] = (uint8_t)(k * 31 + i);
        }
        w->keys[i] = t->keys[i];
        w->sums[i] = td_block_checksum(td_block_content_hash(bytes, block_bytes), &w->keys[i],
                                       w->source_epochs[i]);
    }
    return t;
}

static dcn_ticket_t *reserve_choices(world_t *w, uint32_t n, td_msg_work_t *work_out)
{
    *work_out = work_of(5, 56, 10);
    work_out->n = n;
    return reserve_work(w, *work_out);
}

static dcn_ticket_t *reserve_handoff(world_t *w, td_msg_work_t *work_out)
{
    return reserve_choices(w, 1, work_out);
}

static void announce(world_t *w, uint32_t layer_begin, uint32_t layer_end, uint32_t first,
                     uint32_t count)
{
    td_msg_t msg = {.type = TD_MSG_LAYERS_READY, .sender_incarnation = 33};
    msg.u.layers = (td_msg_layers_ready_t){.ticket = 5,
                                           .attempt = 1,
                                           .layer_begin = layer_begin,
                                           .layer_end = layer_end,
                                           .first_block = first,
                                           .count = count,
                                           .blocks = w->source_blocks + first,
                                           .epochs = w->source_epochs + first};
    dcn_receive_layers(w->dcn, &msg);
}

/* The next job that comes back from the transfer or the verifier. */
static td_node_fetch_t *next_job(world_t *w)
{
    td_node_t *n = &w->dcn->node;
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
    while (w->dcn->node.fetches > 0) {
        dcn_receive_fetched(w->dcn, next_job(w));
    }
}

static void kv_ready_of(world_t *w, const td_msg_work_t *work, uint32_t first_block, uint32_t count)
{
    static const uint32_t first[3] = {19556, 28, 19556}; /* "Hello" and "," */
    td_msg_t msg = {.type = TD_MSG_KV_READY, .sender_id = "prefill"};
    td_msg_arena_t *arena = NULL;
    td_str_t bytes = {0};
    td_msg_t got;

    msg.u.kv_ready = (td_msg_kv_ready_t){.ticket = work->ticket,
                                         .attempt = work->attempt,
                                         .first_block = first_block,
                                         .count = count,
                                         .blocks = w->source_blocks,
                                         .epochs = w->source_epochs,
                                         .checksums = w->sums,
                                         .keys = w->keys,
                                         .choice_count = work->n,
                                         .first_tokens = first};
    assert_int_equal(td_msg_encode(&msg, &bytes), TD_OK);
    assert_int_equal(td_msg_decode(bytes.bytes, bytes.len, &got, &arena), TD_OK);
    got.sender_incarnation = 33;
    dcn_receive_ready(w->dcn, &got, &arena);
    td_msg_arena_free(arena);
    td_str_fini(&bytes);
}

static void kv_ready(world_t *w, const td_msg_work_t *work)
{
    kv_ready_of(w, work, 0, 4);
}

static void expect_failed(world_t *w, td_status_t status)
{
    td_msg_arena_t *arena = NULL;
    td_msg_t msg = expect(w, w->router, TD_MSG_KV_FAILED, &arena);
    assert_int_equal(msg.u.ticket.status, status);
    td_msg_arena_free(arena);
}

/* Blocks are hashed when their last layer has come, so at KvReady nothing is left but comparing. */
static void test_decode_hashes_blocks_before_the_prompt_is_ready(void **state)
{
    world_t *w = *state;
    td_msg_work_t work;
    dcn_ticket_t *t = reserve_handoff(w, &work);
    td_msg_arena_t *arena = NULL;
    td_node_fetch_t *jobs[2] = {NULL};

    announce(w, 0, 1, 0, 2);
    announce(w, 1, 2, 0, 1);
    jobs[0] = next_job(w);
    jobs[1] = next_job(w);
    dcn_receive_fetched(w->dcn, jobs[1]); /* they may come back in any order */
    dcn_receive_fetched(w->dcn, jobs[0]); /* block 0 is whole now, and hashed */
    receive_all(w);
    assert_int_not_equal(t->hashes[0], 0);
    assert_int_equal(t->hashes[1], 0); /* half of it is here */
    announce(w, 1, 2, 1, 1);
    announce(w, 0, 2, 2, 2);
    receive_all(w);
    for (uint32_t i = 0; i < 4; i++) {
        assert_int_equal(td_block_checksum(t->hashes[i], &t->keys[i], w->source_epochs[i]),
                         w->sums[i]);
    }
    kv_ready(w, &work);
    assert_int_equal(t->state, DCN_RUNNING);
    (void)expect(w, w->prefill, TD_MSG_KV_ACK, &arena);
    td_msg_arena_free(arena);
    assert_int_equal(td_pool_find(w->dcn->node.pool, &w->keys[2]), t->choices[0].seq.blocks[2]);
}

/* I3: one wrong block fails the hand-off; the right ones stay for the next attempt. */
static void test_i3_decode_keeps_right_blocks_beside_a_wrong_one(void **state)
{
    world_t *w = *state;
    td_msg_work_t work;

    (void)reserve_handoff(w, &work);
    td_pool_bytes(w->source_pool, w->source_blocks[1])[77] ^= 1;
    announce(w, 0, 2, 0, 4);
    kv_ready(w, &work); /* before the fetch has come back */
    receive_all(w);
    expect_failed(w, TD_ERR_CORRUPT);
    assert_null(dcn_ticket_find(w->dcn, 5, 1));
    assert_int_not_equal(td_pool_find(w->dcn->node.pool, &w->keys[0]), TD_POOL_NONE);
    assert_int_equal(td_pool_find(w->dcn->node.pool, &w->keys[1]), TD_POOL_NONE);
    assert_int_not_equal(td_pool_find(w->dcn->node.pool, &w->keys[2]), TD_POOL_NONE);
    assert_nothing_held(w);
}

/* I2: while the verifier reads a ticket's blocks, nobody else gets them. */
static void test_i2_decode_ended_while_blocks_are_hashed_quarantines_them(void **state)
{
    world_t *w = *state;
    td_msg_work_t work;
    dcn_ticket_t *t = reserve_handoff(w, &work);

    announce(w, 0, 2, 0, 4);
    dcn_receive_fetched(w->dcn, next_job(w)); /* fetched: on to the verifier */
    assert_int_equal(t->fetches, 1);
    dcn_ticket_end(w->dcn, t, TD_ERR_CANCELLED);
    assert_int_equal(td_pool_counts(w->dcn->node.pool).quarantined, 4);
    receive_all(w);
    assert_null(w->dcn->tickets);
    assert_nothing_held(w);
}

/* I3: what is hashed cannot be changed any more by another announcement of the same layers. */
static void test_i3_decode_refuses_layers_announced_twice(void **state)
{
    world_t *w = *state;
    td_msg_work_t work;

    (void)reserve_handoff(w, &work);
    announce(w, 0, 2, 0, 4);
    announce(w, 1, 2, 3, 1);
    expect_failed(w, TD_ERR_PROTOCOL);
    receive_all(w);
    assert_nothing_held(w);
}

/* A lost announcement: what is missing is fetched after KvReady, whole, and hashed. */
static void test_decode_fetches_what_was_never_announced(void **state)
{
    world_t *w = *state;
    td_msg_work_t work;
    dcn_ticket_t *t = reserve_handoff(w, &work);

    announce(w, 0, 2, 0, 2);
    announce(w, 0, 1, 2, 2);
    receive_all(w);
    kv_ready(w, &work);
    assert_int_equal(td_metric_get(w->dcn->bytes_early), 6 * td_kv_layer_bytes(&w->info.kv));
    assert_int_equal(td_metric_get(w->dcn->bytes_late), 2 * td_kv_layer_bytes(&w->info.kv));
    assert_int_equal(t->state, DCN_FETCHING);
    announce(w, 1, 2, 2, 2); /* too late: ignored */
    assert_int_equal(t->fetches, 1);
    receive_all(w);
    assert_int_equal(t->state, DCN_RUNNING);
}

/* --- what another node has begun (I9) ----------------------------------------------------------
 */

/* Choice 0 ended in the middle of a character, choices 0 and 2 with what may begin a stop string;
 * nothing is given again, and what was held back comes out whole with the next tokens. */
static void test_i9_decode_goes_on_behind_what_was_given(void **state)
{
    static const td_bytes_t stop = {(const uint8_t *)"Hello!", 6};
    world_t *w = *state;
    dcn_node_t *d = w->dcn;
    td_msg_work_t work = work_of(5, 56, 10);
    uint32_t *character = NULL;
    size_t pieces = 0;
    uint32_t given[2] = {19556, 0};
    td_msg_generated_t generated[3] = {{given, 2, false}, {NULL, 0, true}, {given, 1, false}};
    td_sampled_t next = {0};
    const uint64_t hash = 0;
    td_msg_arena_t *arena = NULL;
    dcn_ticket_t *t = NULL;
    td_msg_t msg;

    assert_int_equal(
        td_tokenizer_encode(d->node.tokenizer, "\xe6\xb0\xb8", 3, false, &character, &pieces),
        TD_OK);
    assert_true(pieces > 1);
    given[1] = character[0];
    work.n = 3;
    work.stop_count = 1;
    work.stops = &stop;
    work.generated_count = 3;
    work.generated = generated;
    t = reserve_work(w, work);
    announce(w, 0, 2, 0, 4);
    receive_all(w);
    kv_ready(w, &work);
    assert_int_equal(t->state, DCN_WAITING);
    assert_int_equal(t->live, 2);
    dcn_preempt_make_room(d);
    assert_int_equal(t->state, DCN_RUNNING);
    assert_null(t->choices[1].seq.blocks);
    assert_int_equal(t->choices[0].kv_tokens, 48); /* the prompt's full blocks were found here */
    assert_int_equal(t->choices[0].token_count, 2);
    for (size_t i = 1; i < pieces; i++) {
        next.token = character[i];
        assert_false(dcn_stream_take(d, &t->choices[0], next.token));
        assert_true(dcn_stream_give(d, &t->choices[0], &next, &hash, 1));
        msg = expect(w, w->router, TD_MSG_TOKENS, &arena);
        assert_int_equal(msg.u.tokens.offset, i + 1); /* the first thing that the router hears */
        assert_int_equal(msg.u.tokens.text.len, i + 1 == pieces ? 5 + 3 : 0);
        td_msg_arena_free(arena);
    }
    next.token = 28; /* "," */
    assert_false(dcn_stream_take(d, &t->choices[2], next.token));
    assert_true(dcn_stream_give(d, &t->choices[2], &next, &hash, 1));
    msg = expect(w, w->router, TD_MSG_TOKENS, &arena);
    assert_int_equal(msg.u.tokens.choice, 2);
    assert_int_equal(msg.u.tokens.text.len, 6);
    assert_memory_equal(msg.u.tokens.text.at, "Hello,", 6);
    td_msg_arena_free(arena);
    assert_int_equal(td_metric_get(d->continued), 1);
    td_free(character);
    dcn_ticket_end(d, t, TD_ERR_CANCELLED);
    assert_nothing_held(w);
}

/* The other node had drawn another first token, or tokens that would have ended the answer. */
static void test_i9_decode_refuses_what_this_node_would_not_have_given(void **state)
{
    static const uint32_t others[2][2] = {{28, 28}, {19556, 2 /* <|im_end|> */}};
    world_t *w = *state;

    for (uint32_t i = 0; i < 2; i++) {
        td_msg_generated_t generated = {others[i], 2, false};
        td_msg_work_t work = work_of(5 + i, i == 0 ? 56 : 48, 10);
        td_msg_arena_t *arena = NULL;
        td_msg_t msg;
        uint32_t have = 0;
        work.generated_count = 1;
        work.generated = &generated;
        if (i == 0) {
            (void)reserve_work(w, work);
            announce(w, 0, 2, 0, 4);
            receive_all(w);
            kv_ready(w, &work);
        } else {
            assert_int_equal(reserve(w, work, &have), TD_OK);
            assert_int_equal(have, 3);
            kv_ready_of(w, &work, 3, 0);
        }
        msg = expect(w, w->router, TD_MSG_END, &arena);
        assert_int_equal(msg.u.end.status, TD_ERR_CORRUPT);
        td_msg_arena_free(arena);
        assert_nothing_held(w);
    }
}

static void test_decode_refuses_generated_tokens_beyond_the_vocabulary(void **state)
{
    static const uint32_t tokens[2] = {19556, 49152};
    static const td_msg_generated_t generated = {tokens, 2, false};
    world_t *w = *state;
    td_msg_work_t work = work_of(5, 56, 10);
    uint32_t have = 0;

    work.generated_count = 1;
    work.generated = &generated;
    assert_int_equal(reserve(w, work, &have), TD_ERR_INVALID);
    assert_nothing_held(w);
}

/* --- several choices give way ----------------------------------------------------------------- */

/* Ticket 5 runs with three choices, each of which has written 64 positions: three blocks that they
 * share, and one of its own that is indexed. */
static dcn_ticket_t *run_three(world_t *w)
{
    dcn_node_t *d = w->dcn;
    td_msg_work_t work;
    dcn_ticket_t *t = reserve_choices(w, 3, &work);

    announce(w, 0, 2, 0, 4);
    receive_all(w);
    kv_ready(w, &work);
    assert_int_equal(t->state, DCN_RUNNING);
    for (uint32_t i = 0; i < 3; i++) {
        dcn_choice_t *c = &t->choices[i];
        assert_int_equal(td_seq_prepare_write(&c->seq, 56), TD_OK);
        memset(td_pool_bytes(d->node.pool, c->seq.blocks[3]), (int)i + 1, 64);
        while (c->token_count < 9) {
            c->tokens[c->token_count++] = 700 + 10 * i;
        }
        c->kv_tokens = 64;
        dcn_stream_publish(d, c);
        assert_int_equal(c->published, 4);
    }
    assert_int_equal(td_pool_counts(d->node.pool).active, 3 + 3);
    return t;
}

/* Ticket 6 runs with two choices of the same first 48 tokens, all of which are here. */
static dcn_ticket_t *run_two_more(world_t *w)
{
    td_msg_work_t work = work_of(6, 48, 100);
    dcn_ticket_t *t = NULL;
    uint32_t have = 0;

    work.n = 2;
    assert_int_equal(reserve(w, work, &have), TD_OK);
    assert_int_equal(have, 3);
    kv_ready_of(w, &work, 3, 0);
    t = dcn_ticket_find(w->dcn, 6, 1);
    assert_int_equal(t->state, DCN_RUNNING);
    return t;
}

/* Takes all that nobody holds: as if others had it. Answers how much. */
static uint32_t take_rest(world_t *w)
{
    const td_pool_counts_t counts = td_pool_counts(w->dcn->node.pool);

    assert_int_equal(td_pool_reserve(w->dcn->node.pool, counts.free + counts.cached), TD_OK);
    return counts.free + counts.cached;
}

/* All choices of the one that ranks last give up everything, for a choice of the other. */
static dcn_ticket_t *preempt_three(world_t *w)
{
    dcn_node_t *d = w->dcn;
    dcn_ticket_t *t = run_three(w);
    dcn_ticket_t *other = run_two_more(w);
    uint32_t rest = 0;

    t->work.priority = 1; /* ranks behind the other, although it is older */
    for (uint32_t i = 0; i < 2; i++) {
        td_pool_unreserve(d->node.pool, other->choices[i].seq.reserved);
        other->choices[i].seq.reserved = 0;
    }
    rest = take_rest(w);
    dcn_preempt_make_room(d);
    assert_int_equal(t->state, DCN_WAITING);
    assert_int_equal(td_metric_get(d->preemptions), 1);
    assert_true(other->choices[0].has_room && other->choices[1].has_room);
    assert_true(dcn_preempt_someone_waits(d));
    td_pool_unreserve(d->node.pool, rest);
    return t;
}

static void end_all(world_t *w)
{
    while (w->dcn->tickets != NULL) {
        dcn_ticket_end(w->dcn, w->dcn->tickets, TD_ERR_CANCELLED);
    }
    assert_nothing_held(w);
}

/* F14: several choices are promised what outputs have lately been long, each, and the prompt once.
 */
static void test_f14_decode_promises_several_choices_what_is_to_be_expected(void **state)
{
    world_t *w = *state;
    dcn_node_t *d = w->dcn;
    td_msg_work_t work = work_of(1, 40, 160); /* 13 blocks, of them 2 shared: 36 for three */
    uint32_t have = 0;

    for (uint32_t i = 0; i < 100; i++) {
        dcn_output_ended(d, 20);
    }
    work.n = 3; /* 60 tokens: 4 blocks, twice 4 - 2, and the copy */
    assert_int_equal(reserve(w, work, &have), TD_OK);
    assert_int_equal(td_pool_counts(d->node.pool).reserved, 4 + 2 * 2 + 1);
    work.ticket = 2;
    work.n = 4; /* 47 blocks in the end */
    assert_int_equal(reserve(w, work, &have), TD_ERR_TOO_LARGE);
    end_all(w);
}

static void test_decode_several_choices_find_all_they_had(void **state)
{
    world_t *w = *state;
    dcn_node_t *d = w->dcn;
    td_pool_t *pool = d->node.pool;
    dcn_ticket_t *t = preempt_three(w);

    t->choices[1].finish = TD_FINISH_STOP; /* as if it had ended before */
    t->live = 2;
    assert_int_equal(dcn_return_begin(d, t), TD_OK);
    assert_int_equal(t->state, DCN_RUNNING);
    assert_null(t->choices[1].seq.blocks);
    for (uint32_t i = 0; i < 3; i += 2) {
        const dcn_choice_t *c = &t->choices[i];
        assert_int_equal(c->kv_tokens, 64);
        assert_int_equal(c->published, 4);
        assert_int_equal(td_pool_bytes(pool, c->seq.blocks[3])[0], i + 1);
        assert_int_equal(c->seq.blocks[2], t->choices[0].seq.blocks[2]);
        assert_true(td_block_key_equal(&c->last_key, td_pool_key(pool, c->seq.blocks[3])));
        assert_int_equal(c->seq.reserved, 1); /* 66 tokens at most */
        assert_null(c->return_keys);
    }
    assert_int_equal(td_metric_get(d->returned_cached), 64 + 16); /* what they share once */
    assert_int_equal(td_metric_get(d->returned_computed), 0);
    end_all(w);
}

/* The prompt is gone: one choice computes it, for all; then each finds its own. */
static void test_decode_one_choice_computes_what_all_share(void **state)
{
    world_t *w = *state;
    dcn_node_t *d = w->dcn;
    td_pool_t *pool = d->node.pool;
    dcn_ticket_t *t = preempt_three(w);

    dcn_ticket_end(d, dcn_ticket_find(d, 6, 1), TD_ERR_CANCELLED);
    td_pool_unindex(pool, td_pool_find(pool, &t->keys[1]));
    dcn_preempt_make_room(d); /* it comes back */
    assert_int_equal(t->state, DCN_RUNNING);
    assert_int_equal(t->shared_tokens, 48);
    assert_int_equal(t->choices[0].kv_tokens, 16);
    assert_true(t->choices[0].has_room);
    assert_false(t->choices[1].has_room || t->choices[2].has_room);
    assert_int_equal(td_metric_get(d->returned_computed), 32);
    dcn_preempt_make_room(d);
    assert_false(t->choices[1].has_room || t->choices[2].has_room);
    assert_int_equal(td_seq_prepare_write(&t->choices[0].seq, 16), TD_OK);
    t->choices[0].kv_tokens = 32;
    dcn_return_share(d, t); /* not yet */
    assert_int_equal(t->choices[1].seq.block_count, 0);
    assert_int_equal(td_seq_prepare_write(&t->choices[0].seq, 32), TD_OK);
    t->choices[0].kv_tokens = 48;
    dcn_return_share(d, t);
    assert_int_equal(t->shared_tokens, 0);
    for (uint32_t i = 0; i < 3; i++) {
        const dcn_choice_t *c = &t->choices[i];
        assert_int_equal(c->kv_tokens, 64);
        assert_int_equal(c->seq.blocks[1], t->choices[0].seq.blocks[1]);
        assert_int_equal(td_pool_bytes(pool, c->seq.blocks[3])[0], i + 1);
        assert_int_equal(c->seq.reserved, 1);
    }
    assert_int_equal(td_pool_counts(pool).active, 3 + 3);
    assert_int_equal(td_metric_get(d->returned_computed), 32);
    assert_int_equal(td_metric_get(d->returned_cached), 16 + 3 * 16);
    end_all(w);
}

/* Whoever finds no room holds nothing, and whoever ends on the way back neither. */
static void test_i5_decode_several_choices_without_room_hold_nothing(void **state)
{
    world_t *w = *state;
    dcn_node_t *d = w->dcn;
    td_pool_t *pool = d->node.pool;
    dcn_ticket_t *t = preempt_three(w);
    uint32_t rest = 0;

    dcn_ticket_end(d, dcn_ticket_find(d, 6, 1), TD_ERR_CANCELLED);
    rest = take_rest(w) - 8; /* all but one of 3 + 3 * 2 */
    td_pool_unreserve(pool, 8);
    assert_int_equal(dcn_return_begin(d, t), TD_ERR_BUSY);
    assert_int_equal(t->state, DCN_WAITING);
    assert_int_equal(td_pool_counts(pool).active, 0);
    assert_int_equal(td_pool_counts(pool).reserved, rest);
    td_pool_unreserve(pool, 1);
    assert_int_equal(dcn_return_begin(d, t), TD_OK);
    assert_int_equal(t->shared_tokens, 48); /* nothing had been left of it */
    assert_int_equal(td_pool_counts(pool).reserved, rest - 1 + 9);
    dcn_ticket_end(d, t, TD_ERR_CANCELLED);
    td_pool_unreserve(pool, rest - 1);
    assert_nothing_held(w);
}

/* --- masks ------------------------------------------------------------------------------------ */

/* F14: a request under a window is promised what the window shows, however long it gets. */
static void test_f14_decode_promises_at_most_the_window(void **state)
{
    world_t *w = *state;
    td_pool_t *pool = w->dcn->node.pool;
    td_msg_work_t work = work_of(1, 200, 90000); /* 12 full blocks and a partial one */
    uint32_t have = 0;

    w->info.context_max = 100000;
    w->info.attention = (td_attention_mask_t){.kind = TD_ATTENTION_WINDOW, .local = 32};
    assert_int_equal(reserve(w, work, &have), TD_OK);
    assert_int_equal(have, 10); /* position 200 sees from 169 on: nobody needs what lies before */
    assert_int_equal(td_pool_counts(pool).reserved, 3);
    dcn_ticket_end(w->dcn, dcn_ticket_find(w->dcn, 1, 1), TD_ERR_CANCELLED);
    work = work_of(2, 200, 90000);
    work.n = 3; /* the prompt's 3, 3 for each choice's growth, a copy of the shared partial one */
    assert_int_equal(reserve(w, work, &have), TD_OK);
    assert_int_equal(td_pool_counts(pool).reserved, 3 + 3 * 3 + 1);
    dcn_ticket_end(w->dcn, dcn_ticket_find(w->dcn, 2, 1), TD_ERR_CANCELLED);
    w->info.attention.local = 700; /* 45 blocks of 40 */
    assert_int_equal(reserve(w, work_of(3, 200, 90000), &have), TD_ERR_TOO_LARGE);
    assert_int_equal(reserve(w, work_of(4, 200, 300), &have), TD_OK); /* never gets so long */
    dcn_ticket_end(w->dcn, dcn_ticket_find(w->dcn, 4, 1), TD_ERR_CANCELLED);
    assert_nothing_held(w);
}

/* Sinks in block 0, the window of position 56 from 41 on: nobody needs block 1. */
static void mask_out_block_1(world_t *w)
{
    w->info.attention = (td_attention_mask_t){.kind = TD_ATTENTION_WINDOW, .local = 16, .sinks = 4};
}

/* KvReady lists what is needed, one after the other. */
static void list_needed(world_t *w)
{
    for (uint32_t i = 1; i < 3; i++) {
        const uint32_t block = w->source_blocks[i];
        w->source_blocks[i] = w->source_blocks[i + 1];
        w->source_blocks[i + 1] = block; /* all are given back in the end */
        w->source_epochs[i] = w->source_epochs[i + 1];
        w->sums[i] = w->sums[i + 1];
        w->keys[i] = w->keys[i + 1];
    }
}

static void test_decode_takes_only_blocks_that_are_seen(void **state)
{
    world_t *w = *state;
    td_msg_work_t work;
    dcn_ticket_t *t = NULL;
    dcn_choice_t *c = NULL;

    mask_out_block_1(w);
    t = reserve_handoff(w, &work);
    assert_int_equal(td_pool_counts(w->dcn->node.pool).reserved, 3);
    announce(w, 0, 2, 0, 1);
    announce(w, 0, 2, 2, 1); /* of block 3 nothing is announced */
    receive_all(w);
    list_needed(w);
    kv_ready_of(w, &work, 0, 3);
    assert_int_equal(td_metric_get(w->dcn->bytes_early), 4 * td_kv_layer_bytes(&w->info.kv));
    assert_int_equal(td_metric_get(w->dcn->bytes_late), 2 * td_kv_layer_bytes(&w->info.kv));
    receive_all(w);
    assert_int_equal(t->state, DCN_RUNNING);
    c = &t->choices[0];
    assert_int_equal(c->seq.block_count, 4);
    assert_int_equal(c->seq.held, 3);
    assert_int_equal(c->seq.blocks[1], TD_POOL_NONE);
    assert_int_equal(td_pool_find(w->dcn->node.pool, &t->keys[2]), c->seq.blocks[2]);
    /* It gives way, and comes back with what position 48 sees. */
    td_seq_fini(&c->seq);
    c->kv_tokens = 0;
    t->state = DCN_WAITING;
    assert_int_equal(dcn_return_begin(w->dcn, t), TD_OK);
    assert_int_equal(t->state, DCN_RUNNING);
    assert_int_equal(c->kv_tokens, 48);
    assert_int_equal(c->published, 3);
    assert_int_equal(c->seq.held, 2); /* the sinks' and block 2, whose positions 33.. are seen */
    assert_true(c->seq.held + c->seq.reserved <= 3);
}

static void test_i3_decode_refuses_blocks_that_are_not_seen(void **state)
{
    world_t *w = *state;
    td_msg_work_t work;

    mask_out_block_1(w);
    (void)reserve_handoff(w, &work);
    announce(w, 0, 2, 0, 2);
    expect_failed(w, TD_ERR_PROTOCOL);
    receive_all(w);
    assert_nothing_held(w);
}

static void test_i3_decode_refuses_a_list_of_other_blocks_than_are_seen(void **state)
{
    world_t *w = *state;
    td_msg_work_t work;

    mask_out_block_1(w);
    (void)reserve_handoff(w, &work);
    kv_ready(w, &work); /* four, of which it needs three */
    expect_failed(w, TD_ERR_PROTOCOL);
    assert_nothing_held(w);
}

/* --- what drafts were worth ------------------------------------------------------------------- */

/* A request of two choices: one step of four drafts and two accepted, one of a draft and none, one
 * without drafts. */
static void run_drafts(const world_t *w, uint64_t tenant)
{
    dcn_node_t *d = w->dcn;
    dcn_ticket_t t = {.work = {.tenant = tenant, .prompt_class = 3, .k_max = 4}};
    dcn_choice_t choices[2] = {{.ticket = &t, .drafter = TD_DRAFTER_MEMO},
                               {.ticket = &t, .drafter = TD_DRAFTER_MEMO}};
    dcn_part_t part = {.ticket = &t, .choice = &choices[0], .drafts = 4};
    const uint32_t drafted[] = {2, 1, 1, 1, 0};
    const uint32_t accepted[] = {1, 1, 0, 0, 0};

    d->batch.plain_ns = 100;
    d->batch.took_ns = 130;
    t.running_ns = td_now_ns();
    dcn_worth_begin(&choices[0]);
    dcn_worth_begin(&choices[1]);
    dcn_worth_step(d, &part, 2); /* three tokens: 170 ns saved */
    part = (dcn_part_t){.ticket = &t, .choice = &choices[1], .drafts = 1};
    dcn_worth_step(d, &part, 0); /* 30 lost */
    part.drafts = 0;
    dcn_worth_step(d, &part, 0);
    dcn_worth_end(d, &t);
    assert_int_equal(t.drafts.drafter, TD_DRAFTER_MEMO);
    assert_int_equal(t.drafts.k_max, 4);
    assert_int_equal(t.drafts.steps, 3);
    assert_int_equal(t.drafts.tokens, 5);
    assert_int_equal(t.drafts.saved_ns, 140);
    assert_memory_equal(t.drafts.drafted, drafted, sizeof(drafted));
    assert_memory_equal(t.drafts.accepted, accepted, sizeof(accepted));
}

/* Each life of the router is told once, oldest first, in messages of a bounded length. */
static void test_a_new_router_is_told_what_drafts_were_worth(void **state)
{
    world_t *w = *state;
    dcn_node_t *d = w->dcn;
    td_msg_arena_t *arena = NULL;
    uint64_t tenant = 0;

    assert_int_equal(td_draft_stats_create(DCN_DRAFT_PAST_MAX, &d->past), TD_OK);
    dcn_worth_tell(d, TD_ROUTER_ID, 5); /* nothing yet, and not asked again */
    for (uint64_t i = 1; i <= 150; i++) {
        run_drafts(w, i);
    }
    dcn_worth_tell(d, TD_ROUTER_ID, 5);
    dcn_worth_tell(d, TD_ROUTER_ID, 6);
    dcn_worth_tell(d, TD_ROUTER_ID, 6);
    while (tenant < 150) {
        const td_msg_t msg = expect(w, w->router, TD_MSG_DRAFT_HISTORY, &arena);
        assert_in_range(msg.u.draft_history.count, 1, TD_MSG_DRAFT_PAST_MAX);
        for (uint32_t i = 0; i < msg.u.draft_history.count; i++) {
            const td_msg_draft_past_t *p = &msg.u.draft_history.past[i];
            assert_int_equal(p->tenant, ++tenant);
            assert_int_equal(p->prompt_class, 3);
            assert_int_equal(p->drafter, TD_DRAFTER_MEMO);
            assert_true(p->steps[3] > 2.98 && p->steps[3] <= 3 && p->steps[4] == 0);
            assert_true(p->drafted[0] > 1.98 && p->accepted[1] > 0.98 && p->accepted[2] == 0);
        }
        td_msg_arena_free(arena);
    }
    run_drafts(w, 151);
    dcn_worth_tell(d, TD_ROUTER_ID, 7); /* what comes next is of this life: all, from the first */
    for (tenant = 0; tenant < 151;) {
        const td_msg_t msg = expect(w, w->router, TD_MSG_DRAFT_HISTORY, &arena);
        const td_msg_draft_history_t *m = &msg.u.draft_history;
        assert_int_equal(m->past[0].tenant, tenant + 1);
        tenant = m->past[m->count - 1].tenant;
        td_msg_arena_free(arena);
    }
    td_draft_stats_destroy(d->past);
    d->past = NULL;
}

/* A choice's share of a step with drafts, in shares of one without. */
static void test_heartbeats_tell_what_drafts_cost(void **state)
{
    world_t *w = *state;
    dcn_node_t *d = w->dcn;
    td_msg_heartbeat_t beat = {0};

    dcn_worth_costs(d, &beat); /* nothing is measured: as the plan assumes */
    assert_int_equal(beat.step_cost_count, TD_DRAFT_TOKENS_MAX + 1);
    assert_int_equal(beat.pass_cost_count, TD_DRAFTER_KINDS);
    assert_true(beat.step_costs[0] == 1 && beat.step_costs[2] > 1.29f &&
                beat.step_costs[2] < 1.31f);
    assert_true(beat.pass_costs[TD_DRAFTER_DRAFT_MODEL] == 0);
    td_step_cost_observe(&d->step_cost, 1, 1000);
    td_step_cost_observe(&d->step_cost, 2, 1500);
    td_step_cost_observe(&d->step_cost, 4, 2000);
    td_step_cost_observe(&d->step_cost, 6, 3000);
    d->next_costs_ns = 0;
    dcn_worth_costs(d, &beat);
    assert_true(beat.step_costs[1] == 1.5f && beat.step_costs[2] == 1.75f);
    beat.queued_tokens = 4; /* choices share a step of 2000: a row more costs a share of 500 */
    d->next_costs_ns = 0;
    dcn_worth_costs(d, &beat);
    assert_true(beat.step_costs[0] == 1 && beat.step_costs[1] == 2 && beat.step_costs[2] == 3);
    d->exit_passes.model = (td_model_t *)(void *)d; /* it is there; nobody runs it */
    td_step_cost_observe(&d->exit_passes.cost, 4, 500);
    d->next_costs_ns = 0;
    dcn_worth_costs(d, &beat);
    assert_true(beat.pass_costs[TD_DRAFTER_EARLY_EXIT] == 0.25f);
    d->exit_passes.model = NULL;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_decode_reserves_prompt_and_growth_and_gives_it_back,
                                        setup, teardown),
        cmocka_unit_test_setup_teardown(test_f14_decode_admission_counts_growth_of_every_choice,
                                        setup, teardown),
        cmocka_unit_test_setup_teardown(
            test_f14_decode_promises_a_single_choice_what_is_to_be_expected, setup, teardown),
        cmocka_unit_test_setup_teardown(test_decode_refuses_what_the_model_cannot_hold, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_f2_decode_ignores_a_reserve_that_was_cancelled_before,
                                        setup, teardown),
        cmocka_unit_test_setup_teardown(test_decode_higher_attempt_replaces_the_lower, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_f16_decode_ends_with_the_first_token, setup, teardown),
        cmocka_unit_test_setup_teardown(test_decode_stop_token_gives_no_text, setup, teardown),
        cmocka_unit_test_setup_teardown(test_i3_decode_fails_a_handoff_that_does_not_fit, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_decode_hashes_blocks_before_the_prompt_is_ready, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_i3_decode_keeps_right_blocks_beside_a_wrong_one, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(
            test_i2_decode_ended_while_blocks_are_hashed_quarantines_them, setup, teardown),
        cmocka_unit_test_setup_teardown(test_i3_decode_refuses_layers_announced_twice, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_decode_fetches_what_was_never_announced, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(
            test_f14_decode_promises_several_choices_what_is_to_be_expected, setup, teardown),
        cmocka_unit_test_setup_teardown(test_i9_decode_goes_on_behind_what_was_given, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_i9_decode_refuses_what_this_node_would_not_have_given,
                                        setup, teardown),
        cmocka_unit_test_setup_teardown(test_decode_refuses_generated_tokens_beyond_the_vocabulary,
                                        setup, teardown),
        cmocka_unit_test_setup_teardown(test_decode_several_choices_find_all_they_had, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_decode_one_choice_computes_what_all_share, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_i5_decode_several_choices_without_room_hold_nothing,
                                        setup, teardown),
        cmocka_unit_test_setup_teardown(test_f14_decode_promises_at_most_the_window, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_decode_takes_only_blocks_that_are_seen, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_i3_decode_refuses_blocks_that_are_not_seen, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_i3_decode_refuses_a_list_of_other_blocks_than_are_seen,
                                        setup, teardown),
        cmocka_unit_test_setup_teardown(test_a_new_router_is_told_what_drafts_were_worth, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_heartbeats_tell_what_drafts_cost, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

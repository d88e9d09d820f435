/* The router's loop against nodes played by the test: each is a bus of its own in this process. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/base/td_log.h"
#include "common/wire/td_member.h"
#include "router/rtr_loop.h"
#include "tests/fuzz/gguf_build.h"

#define WAIT_MS 5000u
#define BLOCK_TOKENS 16u
#define NODES_MAX 6u

typedef struct node {
    td_bus_t *bus;
    td_role_t role;
    bool mute; /* sends no heartbeats */
    uint64_t beat_ns;
    uint64_t store_term;
    uint64_t ticket_epoch;
} node_t;

typedef struct fixture {
    td_str_t file;
    td_gguf_t *gguf;
    td_tokenizer_t *tok;
    td_chat_t *chat;
    rtr_model_t model;
    td_metrics_t *registry;
    rtr_metrics_t metrics;
    rtr_tenants_t *tenants;
    td_bus_t *bus;
    rtr_gone_t *gone;
    rtr_loop_t *loop;
    uint8_t secret[TD_CLUSTER_SECRET_BYTES];
    uint8_t fingerprint[32];
    node_t nodes[NODES_MAX];
    uint32_t node_count;
    td_msg_arena_t *arena; /* of the last message expected */
    rtr_request_t *req;
    uint32_t given_count; /* what the last Reserve said of earlier attempts */
    td_msg_generated_t given[TD_MSG_CHOICES_MAX];
} fixture_t;

/* The first two have no limits, and the same weight; requests of tests that name none are as the
 * first one's in the queue. */
enum { TENANT_A, TENANT_B, TENANT_LIMITED };

static td_status_t add_tenants(rtr_tenants_t *tenants)
{
    const rtr_tenant_terms_t none = {.weight = 1};
    const rtr_tenant_terms_t limited = {.weight = 1, .requests = 1, .tokens_per_minute = 600};
    rtr_tenant_t *tenant = NULL;

    TD_TRY(rtr_tenants_add(tenants, "a", &none, &tenant));
    TD_TRY(rtr_tenants_add(tenants, "b", &none, &tenant));
    return rtr_tenants_add(tenants, "limited", &limited, &tenant);
}

static int setup(void **state)
{
    static fixture_t fx;
    td_bus_config_t bus = {.bind = "tcp://127.0.0.1:*", .id = TD_ROUTER_ID, .incarnation = 77};
    rtr_loop_config_t loop = {.block_tokens = BLOCK_TOKENS,
                              .block_bytes = 4096,
                              .kv_codec = "f16",
                              .queue_max = 2,
                              .queue_ms = 300,
                              .request_timeout_ms = 60000};

    fx = (fixture_t){0};
    *state = &fx;
    td_log_init("test", TD_LOG_LEVEL_ERROR);
    gb_tokenizer(&fx.file);
    bus.secret = fx.secret;
    if (td_gguf_open_bytes(fx.file.bytes, fx.file.len, &fx.gguf) != TD_OK ||
        td_tokenizer_create(fx.gguf, &fx.tok) != TD_OK ||
        td_chat_create(fx.gguf, &fx.chat) != TD_OK || td_metrics_create(&fx.registry) != TD_OK ||
        td_bus_create(&bus, &fx.bus) != TD_OK || rtr_gone_create(8, &fx.gone) != TD_OK ||
        rtr_tenants_create(&fx.tenants) != TD_OK || add_tenants(fx.tenants) != TD_OK) {
        return -1;
    }
    rtr_metrics_declare(fx.registry, &fx.metrics);
    fx.model = (rtr_model_t){.tok = fx.tok,
                             .chat = fx.chat,
                             .name = "tiny",
                             .context_max = 4096,
                             .allow_placement = true};
    loop.bus = fx.bus;
    loop.metrics = &fx.metrics;
    loop.tenants = fx.tenants;
    loop.model = &fx.model;
    loop.gone = fx.gone;
    loop.secret = fx.secret;
    loop.fingerprint = fx.fingerprint;
    return rtr_loop_create(&loop, &fx.loop) == TD_OK ? 0 : -1;
}

static int teardown(void **state)
{
    fixture_t *fx = *state;

    td_msg_arena_free(fx->arena);
    rtr_loop_destroy(fx->loop);
    rtr_request_unref(fx->req);
    rtr_tenants_destroy(fx->tenants);
    rtr_gone_destroy(fx->gone);
    for (uint32_t i = 0; i < fx->node_count; i++) {
        td_bus_destroy(fx->nodes[i].bus);
    }
    td_bus_destroy(fx->bus);
    td_metrics_destroy(fx->registry);
    td_chat_destroy(fx->chat);
    td_tokenizer_destroy(fx->tok);
    td_gguf_close(fx->gguf);
    td_str_fini(&fx->file);
    return 0;
}

/* --- the nodes -------------------------------------------------------------------------------- */

static void send_to_router(node_t *node, td_msg_t *msg)
{
    assert_int_equal(td_bus_send(node->bus, TD_ROUTER_ID, msg), TD_OK);
}

static void beat(node_t *node)
{
    td_msg_t msg = {.type = TD_MSG_HEARTBEAT,
                    .u.heartbeat = {.free_blocks = 1000, .total_blocks = 1000}};
    if (!node->mute && td_now_ns() - node->beat_ns > 300 * TD_NS_PER_MS) {
        node->beat_ns = td_now_ns();
        send_to_router(node, &msg);
    }
}

static void spin(fixture_t *fx, node_t *on)
{
    for (uint32_t i = 0; i < fx->node_count; i++) {
        beat(&fx->nodes[i]);
        td_bus_wait(fx->nodes[i].bus, NULL, 0, 0, NULL);
    }
    (void)rtr_loop_step(fx->loop, -1, 1);
    if (on != NULL) {
        td_bus_wait(on->bus, NULL, 0, 1, NULL);
    }
}

#define SPIN_UNTIL(fx, cond)                                                                       \
    do {                                                                                           \
        const uint64_t until_ns_ = td_now_ns() + WAIT_MS * TD_NS_PER_MS;                           \
        while (!(cond)) {                                                                          \
            assert_true(td_remaining_ns(until_ns_) > 0);                                           \
            spin(fx, NULL);                                                                        \
        }                                                                                          \
    } while (0)

/* The next message of this type to the node; others are dropped. */
static const td_msg_t *expect(fixture_t *fx, node_t *node, td_msg_type_t type)
{
    static td_msg_t msg;
    uint64_t deadline_ns = td_now_ns() + WAIT_MS * TD_NS_PER_MS;

    while (td_remaining_ns(deadline_ns) > 0) {
        td_msg_arena_t *arena = NULL;
        spin(fx, node);
        while (td_bus_recv(node->bus, &msg, &arena) == TD_OK) {
            td_msg_arena_free(fx->arena);
            fx->arena = arena;
            if (msg.type == type) {
                return &msg;
            }
        }
    }
    fail_msg("no message of type %d to %s", (int)type, td_bus_id(node->bus));
    return NULL;
}

/* Of a node whose KV is stored by `codec`; key_codec: the one its key is made with. */
static void register_as(fixture_t *fx, node_t *node, const char *numerics, bool is_master,
                        const char *codec, const char *key_codec)
{
    td_block_root_fields_t fields = {.fingerprint = fx->fingerprint,
                                     .numerics_class = numerics,
                                     .layout_version = TD_KV_LAYOUT_VERSION,
                                     .codec = key_codec,
                                     .block_tokens = BLOCK_TOKENS,
                                     .adapter = "",
                                     .salt = ""};
    td_block_root_t root;
    td_block_key_t probe;
    td_msg_t msg = {.type = TD_MSG_REGISTER};
    td_msg_register_t *r = &msg.u.reg;

    td_block_root_make(fx->secret, &fields, &root);
    td_block_probe_key(&root, BLOCK_TOKENS, &probe);
    r->self = (td_msg_peer_t){.id = td_bus_id(node->bus),
                              .role = node->role,
                              .incarnation = td_bus_incarnation(node->bus),
                              .endpoint = td_bus_endpoint(node->bus),
                              .store_master = is_master,
                              .store_term = node->store_term};
    r->http = "127.0.0.1:1";
    r->numerics_class = numerics;
    r->kv_codec = node->role == TD_ROLE_KVSTORE ? "" : codec;
    r->version = "0";
    r->context_max = 4096;
    r->ticket_epoch = node->ticket_epoch;
    r->drafters = node->role == TD_ROLE_DECODE ? 1u << TD_DRAFTER_MEMO : 0;
    if (node->role != TD_ROLE_KVSTORE) {
        r->fingerprint = (td_bytes_t){fx->fingerprint, 32};
    } else {
        td_block_probe_key_without_model(fx->secret, &probe);
    }
    r->probe_key = (td_bytes_t){probe.bytes, TD_BLOCK_KEY_BYTES};
    send_to_router(node, &msg);
}

static void register_node(fixture_t *fx, node_t *node, const char *numerics, bool is_master)
{
    register_as(fx, node, numerics, is_master, "f16", "f16");
}

static node_t *make_node(fixture_t *fx, td_role_t role, const char *id)
{
    node_t *node = &fx->nodes[fx->node_count++];
    td_bus_config_t bus = {.bind = "tcp://127.0.0.1:*",
                           .id = id,
                           .incarnation = td_random_u64() | 1,
                           .secret = fx->secret};

    *node = (node_t){.role = role, .mute = true};
    assert_int_equal(td_bus_create(&bus, &node->bus), TD_OK);
    assert_int_equal(td_bus_connect(node->bus, TD_ROUTER_ID, td_bus_endpoint(fx->bus), 77), TD_OK);
    return node;
}

static node_t *add_node(fixture_t *fx, td_role_t role, const char *id)
{
    node_t *node = make_node(fx, role, id);
    register_node(fx, node, "cpu/mixed/r1", false);
    assert_true(expect(fx, node, TD_MSG_REGISTERED)->u.registered.accepted);
    node->mute = false;
    return node;
}

/* The process is gone and another life of it came: the quickest death there is. */
static void new_life(fixture_t *fx, node_t *node)
{
    td_bus_set_incarnation(node->bus, td_random_u64() | 1);
    register_node(fx, node, "cpu/mixed/r1", false);
    assert_true(expect(fx, node, TD_MSG_REGISTERED)->u.registered.accepted);
}

static void answer_reserve(node_t *node, const td_msg_work_t *w, td_status_t status)
{
    td_msg_t msg = {
        .type = TD_MSG_RESERVED,
        .u.reserved = {
            .ticket = w->ticket, .attempt = w->attempt, .status = status, .have_blocks = 1}};
    send_to_router(node, &msg);
}

static void send_end(node_t *node, uint64_t ticket, uint32_t attempt, td_status_t status)
{
    td_msg_t msg = {.type = TD_MSG_END,
                    .u.end = {.ticket = ticket,
                              .attempt = attempt,
                              .leg = node->role,
                              .status = status,
                              .usage = {.cached_local_tokens = 3}}};
    send_to_router(node, &msg);
}

static void send_token(node_t *node, uint64_t ticket, uint32_t attempt, uint32_t choice,
                       uint32_t offset, const char *text, td_finish_t finish)
{
    uint32_t token = GB_A;
    uint64_t hash = 0xab;
    float logprob = -1;
    td_msg_t msg = {.type = TD_MSG_TOKENS,
                    .u.tokens = {.ticket = ticket,
                                 .attempt = attempt,
                                 .choice = choice,
                                 .offset = offset,
                                 .count = 1,
                                 .tokens = &token,
                                 .text = {(const uint8_t *)text, strlen(text)},
                                 .finish = finish,
                                 .logprobs = {.count = 1, .token_logprobs = &logprob},
                                 .hash_count = 1,
                                 .hashes = &hash}};
    send_to_router(node, &msg);
}

/* --- requests --------------------------------------------------------------------------------- */

static rtr_request_t *make_request(fixture_t *fx, rtr_kind_t kind, const char *body)
{
    rtr_request_t *req = NULL;
    rtr_error_t error;

    assert_int_equal(rtr_request_create(kind, &fx->metrics, &req), TD_OK);
    if (rtr_api_parse(&fx->model, kind, body, strlen(body), &req->params, &error) != TD_OK) {
        fail_msg("%s", error.message);
    }
    return req;
}

static rtr_request_t *submit(fixture_t *fx, rtr_kind_t kind, const char *body)
{
    rtr_request_unref(fx->req);
    fx->req = make_request(fx, kind, body);
    assert_int_equal(rtr_loop_submit(fx->loop, rtr_request_ref(fx->req)), TD_OK);
    return fx->req;
}

static rtr_request_t *submit_as(fixture_t *fx, uint32_t tenant, const char *body)
{
    rtr_request_unref(fx->req);
    fx->req = make_request(fx, RTR_KIND_COMPLETION, body);
    fx->req->tenant = rtr_tenants_at(fx->tenants, tenant);
    assert_int_equal(rtr_loop_submit(fx->loop, rtr_request_ref(fx->req)), TD_OK);
    return fx->req;
}

static void wait_end(fixture_t *fx, const rtr_request_t *req)
{
    uint64_t deadline_ns = td_now_ns() + WAIT_MS * TD_NS_PER_MS;
    while (!rtr_request_ended(req) && td_remaining_ns(deadline_ns) > 0) {
        spin(fx, NULL);
    }
    assert_true(rtr_request_ended(req));
}

static void assert_ended(fixture_t *fx, rtr_request_t *req, rtr_outcome_t outcome, int http,
                         const char *says)
{
    wait_end(fx, req);
    assert_int_equal(atomic_load(&req->outcome), (int)outcome);
    assert_int_equal(req->http_status, http);
    assert_true(req->done && req->ready);
    if (req->out.bytes == NULL || strstr(req->out.bytes, says) == NULL) {
        fail_msg("\"%s\" not in: %s", says, req->out.bytes);
    }
    assert_int_equal(td_metric_get(fx->metrics.requests[outcome]), 1);
}

/* What nodes have of us: prompts whose end was not heard of yet, and sequences that have given a
 * token. What several nodes send is heard in any order. */
typedef struct under_way {
    uint64_t prompts;
    uint64_t decoding;
} under_way_t;

static under_way_t under_way(fixture_t *fx)
{
    rtr_registry_t *reg = rtr_loop_registry(fx->loop);
    under_way_t sum = {0};

    for (uint32_t i = 0; i < rtr_registry_slots(reg); i++) {
        sum.prompts += rtr_registry_node(reg, i)->backlog.work.prompts;
        sum.decoding += rtr_registry_node(reg, i)->decoding;
    }
    return sum;
}

/* Nothing is counted anywhere (I5). */
static void assert_at_rest(fixture_t *fx)
{
    rtr_registry_t *reg = rtr_loop_registry(fx->loop);

    assert_int_equal(rtr_tickets_running(rtr_loop_tickets(fx->loop)), 0);
    assert_int_equal(rtr_tickets_queued(rtr_loop_tickets(fx->loop)), 0);
    for (uint32_t i = 0; i < rtr_tenants_count(fx->tenants); i++) {
        assert_int_equal(atomic_load(&rtr_tenants_at(fx->tenants, i)->running), 0);
        assert_int_equal(atomic_load(&rtr_tenants_at(fx->tenants, i)->queued), 0);
    }
    for (uint32_t i = 0; i < rtr_registry_slots(reg); i++) {
        const rtr_node_t *node = rtr_registry_node(reg, i);
        assert_int_equal(node->backlog.work.tokens, 0);
        assert_int_equal(node->backlog.work.prompts, 0);
        assert_int_equal(node->backlog.work.pairs, 0);
        assert_int_equal(node->decoding, 0);
        assert_int_equal(node->sequences, 0);
        assert_int_equal(node->promised_blocks, 0);
    }
}

#define PROMPT "\"prompt\":[3,4,5,3,4,5,3,4,5,3,4,5,3,4,5,3,4,5],\"max_tokens\":5"
#define WHOLE "{" PROMPT "}"
#define STREAM "{" PROMPT ",\"stream\":true,\"stream_options\":{\"include_usage\":true}}"

typedef struct running {
    uint64_t ticket;
    uint32_t attempt;
} running_t;

/* Reserve and Start of one attempt. */
static running_t start_attempt(fixture_t *fx, node_t *prefill, node_t *decode)
{
    const td_msg_work_t *w = &expect(fx, decode, TD_MSG_RESERVE)->u.work;
    running_t run = {.ticket = w->ticket, .attempt = w->attempt};

    assert_true(w->ticket != 0);
    fx->given_count = w->generated_count;
    for (uint32_t i = 0; i < w->generated_count; i++) {
        fx->given[i] = w->generated[i];
        for (uint32_t j = 0; j < w->generated[i].count; j++) {
            assert_int_equal(w->generated[i].tokens[j], GB_A);
        }
        fx->given[i].tokens = NULL;
    }
    assert_string_equal(w->peer_id, td_bus_id(prefill->bus));
    assert_true(w->peer_incarnation == td_bus_incarnation(prefill->bus));
    answer_reserve(decode, w, TD_OK);
    w = &expect(fx, prefill, TD_MSG_START)->u.work;
    assert_true(w->ticket == run.ticket && w->attempt == run.attempt);
    assert_string_equal(w->peer_id, td_bus_id(decode->bus));
    assert_int_equal(w->have_blocks, 1);
    assert_int_equal(w->prompt_tokens, 18);
    return run;
}

static void expect_cancel(fixture_t *fx, node_t *node, running_t run)
{
    const td_msg_ticket_t *m = &expect(fx, node, TD_MSG_CANCEL)->u.ticket;
    assert_true(m->ticket == run.ticket);
    assert_int_equal(m->attempt, run.attempt);
}

static void finish_well(node_t *prefill, node_t *decode, running_t run)
{
    send_token(decode, run.ticket, run.attempt, 0, 0, "he", TD_FINISH_NONE);
    send_token(decode, run.ticket, run.attempt, 0, 1, "llo", TD_FINISH_STOP);
    send_end(prefill, run.ticket, run.attempt, TD_OK);
    send_end(decode, run.ticket, run.attempt, TD_OK);
}

/* --- tests ------------------------------------------------------------------------------------ */

static void test_a_request_goes_through_both_legs(void **state)
{
    fixture_t *fx = *state;
    node_t *prefill = add_node(fx, TD_ROLE_PREFILL, "p1");
    node_t *decode = add_node(fx, TD_ROLE_DECODE, "d1");
    rtr_request_t *req = submit(fx, RTR_KIND_COMPLETION, WHOLE);

    finish_well(prefill, decode, start_attempt(fx, prefill, decode));
    assert_ended(fx, req, RTR_OUTCOME_OK, 200, "\"text\":\"hello\"");
    assert_non_null(strstr(req->out.bytes, "\"finish_reason\":\"stop\""));
    assert_non_null(strstr(req->out.bytes, "\"completion_tokens\":2"));
    assert_non_null(strstr(req->out.bytes, "\"cached_tokens\":3"));
    assert_non_null(strstr(req->out.bytes, "[\"00000000000000ab\",\"00000000000000ab\"]"));
    assert_string_equal(req->prefill_id, "p1");
    assert_string_equal(req->decode_id, "d1");
    assert_at_rest(fx);
}

static void test_a_stream_begins_with_its_first_token(void **state)
{
    fixture_t *fx = *state;
    node_t *prefill = add_node(fx, TD_ROLE_PREFILL, "p1");
    node_t *decode = add_node(fx, TD_ROLE_DECODE, "d1");
    rtr_request_t *req = submit(fx, RTR_KIND_CHAT,
                                "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}],"
                                "\"stream\":true,\"stream_options\":{\"include_usage\":true}}");
    const td_msg_work_t *w = &expect(fx, decode, TD_MSG_RESERVE)->u.work;
    running_t run = {w->ticket, w->attempt};

    assert_false(req->ready);
    answer_reserve(decode, w, TD_OK);
    (void)expect(fx, prefill, TD_MSG_START);
    send_token(decode, run.ticket, run.attempt, 0, 0, "he", TD_FINISH_NONE);
    while (!req->ready) {
        spin(fx, NULL);
    }
    assert_true(req->is_stream && !req->done);
    send_token(decode, run.ticket, run.attempt, 0, 1, "llo", TD_FINISH_LENGTH);
    send_end(decode, run.ticket, run.attempt, TD_OK);
    assert_ended(fx, req, RTR_OUTCOME_OK, 200, "{\"role\":\"assistant\",\"content\":\"he\"}");
    assert_non_null(strstr(req->out.bytes, "{\"content\":\"llo\"}"));
    assert_non_null(strstr(req->out.bytes, "\"choices\":[],\"usage\":{"));
    assert_string_equal(req->out.bytes + req->out.len - 14, "data: [DONE]\n\n");
    assert_at_rest(fx);
}

static void test_several_prompts_and_choices_have_one_answer(void **state)
{
    fixture_t *fx = *state;
    node_t *prefill = add_node(fx, TD_ROLE_PREFILL, "p1");
    node_t *decode = add_node(fx, TD_ROLE_DECODE, "d1");
    rtr_request_t *req = submit(fx, RTR_KIND_COMPLETION,
                                "{\"prompt\":[[3],[4,5]],\"n\":2,\"max_tokens\":1,\"echo\":true}");

    for (uint32_t i = 0; i < 2; i++) {
        const td_msg_work_t *w = &expect(fx, decode, TD_MSG_RESERVE)->u.work;
        running_t run = {w->ticket, w->attempt};
        const char *const texts[2][2] = {{"A", "B"}, {"C", "D"}};
        const char *const *text = texts[w->prompt_tokens - 1];
        assert_int_equal(w->n, 2);
        answer_reserve(decode, w, TD_OK);
        (void)expect(fx, prefill, TD_MSG_START);
        send_token(decode, run.ticket, run.attempt, 1, 0, text[1], TD_FINISH_LENGTH);
        send_token(decode, run.ticket, run.attempt, 0, 0, text[0], TD_FINISH_LENGTH);
        send_end(decode, run.ticket, run.attempt, TD_OK);
    }
    assert_ended(fx, req, RTR_OUTCOME_OK, 200, "{\"index\":0,\"text\":\"aA\"");
    assert_non_null(strstr(req->out.bytes, "{\"index\":1,\"text\":\"aB\""));
    assert_non_null(strstr(req->out.bytes, "{\"index\":2,\"text\":\"bcC\""));
    assert_non_null(strstr(req->out.bytes, "{\"index\":3,\"text\":\"bcD\""));
    assert_non_null(strstr(req->out.bytes, "\"prompt_tokens\":3,\"completion_tokens\":4"));
    assert_at_rest(fx);
}

static void test_an_echo_with_logprobs_waits_for_the_prefill_node(void **state)
{
    fixture_t *fx = *state;
    node_t *prefill = add_node(fx, TD_ROLE_PREFILL, "p1");
    node_t *decode = add_node(fx, TD_ROLE_DECODE, "d1");
    rtr_request_t *req = submit(fx, RTR_KIND_COMPLETION,
                                "{" PROMPT ",\"stream\":true,\"echo\":true,\"logprobs\":0}");
    running_t run = start_attempt(fx, prefill, decode);
    uint32_t tokens[18] = {0};
    float logprobs[18] = {0};
    td_msg_t msg = {.type = TD_MSG_TOKENS,
                    .u.tokens = {.ticket = run.ticket,
                                 .attempt = run.attempt,
                                 .count = 18,
                                 .tokens = tokens,
                                 .logprobs = {.count = 18, .token_logprobs = logprobs},
                                 .is_prompt = true}};

    send_token(decode, run.ticket, run.attempt, 0, 0, "END", TD_FINISH_STOP);
    send_end(decode, run.ticket, run.attempt, TD_OK);
    for (uint32_t i = 0; i < 20; i++) {
        spin(fx, NULL);
    }
    assert_false(req->ready);
    send_to_router(prefill, &msg);
    assert_ended(fx, req, RTR_OUTCOME_OK, 200, "\"token_logprobs\":[null,0,");
    assert_non_null(strstr(req->out.bytes, "abcabcabcabcabcabcEND"));
    assert_at_rest(fx);
}

static void test_without_nodes_503(void **state)
{
    fixture_t *fx = *state;
    rtr_request_t *req = submit(fx, RTR_KIND_COMPLETION, WHOLE);

    assert_ended(fx, req, RTR_OUTCOME_UPSTREAM_ERROR, 503, "No prefill node");
    assert_true(req->retry_after_s > 0);
    (void)add_node(fx, TD_ROLE_PREFILL, "p1");
    req = submit(fx, RTR_KIND_COMPLETION, WHOLE);
    wait_end(fx, req);
    assert_non_null(strstr(req->out.bytes, "No decode node"));
    assert_at_rest(fx);
}

static void test_a_busy_node_is_passed_over(void **state)
{
    fixture_t *fx = *state;
    node_t *prefill = add_node(fx, TD_ROLE_PREFILL, "p1");
    node_t *decode[2] = {add_node(fx, TD_ROLE_DECODE, "d1"), add_node(fx, TD_ROLE_DECODE, "d2")};
    rtr_request_t *req =
        submit(fx, RTR_KIND_COMPLETION, "{" PROMPT ",\"tandem\":{\"prefill\":\"p1\"}}");
    const td_msg_work_t *w = NULL;
    uint32_t first = 0;
    td_msg_arena_t *arena = NULL;
    td_msg_t msg;

    /* Either may be asked first. */
    for (;;) {
        spin(fx, decode[first]);
        if (td_bus_recv(decode[first]->bus, &msg, &arena) == TD_OK) {
            td_msg_arena_free(fx->arena);
            fx->arena = arena;
            if (msg.type == TD_MSG_RESERVE) {
                w = &msg.u.work;
                break;
            }
        }
        first = 1 - first;
    }
    answer_reserve(decode[first], w, TD_ERR_BUSY);
    finish_well(prefill, decode[1 - first], start_attempt(fx, prefill, decode[1 - first]));
    assert_ended(fx, req, RTR_OUTCOME_OK, 200, "hello");
    assert_at_rest(fx);
}

static void test_a_full_cluster_queues_then_429(void **state)
{
    fixture_t *fx = *state;
    rtr_request_t *first = NULL;
    node_t *decode = NULL;

    (void)add_node(fx, TD_ROLE_PREFILL, "p1");
    decode = add_node(fx, TD_ROLE_DECODE, "d1");
    first = rtr_request_ref(submit(fx, RTR_KIND_COMPLETION, WHOLE));
    answer_reserve(decode, &expect(fx, decode, TD_MSG_RESERVE)->u.work, TD_ERR_BUSY);
    while (!rtr_request_ended(first)) {
        td_msg_arena_t *arena = NULL;
        td_msg_t msg;
        spin(fx, decode);
        if (td_bus_recv(decode->bus, &msg, &arena) == TD_OK) {
            if (msg.type == TD_MSG_RESERVE) {
                answer_reserve(decode, &msg.u.work, TD_ERR_BUSY);
            }
            td_msg_arena_free(arena);
        }
    }
    assert_ended(fx, first, RTR_OUTCOME_REJECTED, 429, "came free in time");
    assert_true(first->retry_after_s > 0);
    rtr_request_unref(first);
    assert_at_rest(fx);
}

static void test_a_full_queue_refuses_at_once(void **state)
{
    fixture_t *fx = *state;
    rtr_request_t *waiting[2];
    rtr_request_t *req = NULL;
    node_t *decode = NULL;

    (void)add_node(fx, TD_ROLE_PREFILL, "p1");
    decode = add_node(fx, TD_ROLE_DECODE, "d1");
    for (uint32_t i = 0; i < 2; i++) {
        waiting[i] = rtr_request_ref(submit(fx, RTR_KIND_COMPLETION, WHOLE));
        while (rtr_tickets_queued(rtr_loop_tickets(fx->loop)) < i + 1) {
            answer_reserve(decode, &expect(fx, decode, TD_MSG_RESERVE)->u.work, TD_ERR_BUSY);
            spin(fx, NULL);
        }
    }
    req = submit(fx, RTR_KIND_COMPLETION, WHOLE);
    assert_ended(fx, req, RTR_OUTCOME_REJECTED, 429, "so is its queue");
    for (uint32_t i = 0; i < 2; i++) {
        assert_int_equal(atomic_load(&waiting[i]->outcome), -1);
        rtr_request_unref(waiting[i]);
    }
}

/* Submits, and lets the only decode node have no room for it: so many wait then. */
static rtr_request_t *submit_to_wait(fixture_t *fx, node_t *decode, uint32_t tenant,
                                     const char *body, uint32_t waiting)
{
    rtr_request_t *req = rtr_request_ref(submit_as(fx, tenant, body));

    while (rtr_tickets_queued(rtr_loop_tickets(fx->loop)) < waiting) {
        answer_reserve(decode, &expect(fx, decode, TD_MSG_RESERVE)->u.work, TD_ERR_BUSY);
        spin(fx, NULL);
    }
    return req;
}

static void test_a_full_queue_has_room_for_who_has_less_than_its_share(void **state)
{
    fixture_t *fx = *state;
    node_t *decode = NULL;
    rtr_request_t *waiting[2];
    rtr_request_t *other = NULL;

    (void)add_node(fx, TD_ROLE_PREFILL, "p1");
    decode = add_node(fx, TD_ROLE_DECODE, "d1");
    for (uint32_t i = 0; i < 2; i++) {
        waiting[i] = submit_to_wait(fx, decode, TENANT_A, WHOLE, i + 1);
    }
    other = rtr_request_ref(submit_as(fx, TENANT_B, WHOLE));
    assert_ended(fx, waiting[1], RTR_OUTCOME_REJECTED, 429, "so is its queue");
    assert_int_equal(rtr_tickets_queued(rtr_loop_tickets(fx->loop)), 2);
    assert_int_equal(atomic_load(&rtr_tenants_at(fx->tenants, TENANT_A)->queued), 1);
    assert_int_equal(atomic_load(&rtr_tenants_at(fx->tenants, TENANT_B)->queued), 1);
    wait_end(fx, submit_as(fx, TENANT_B, WHOLE)); /* both have their share: it is refused itself */
    wait_end(fx, submit_as(fx, TENANT_A, WHOLE));
    assert_int_equal(td_metric_get(fx->metrics.requests[RTR_OUTCOME_REJECTED]), 3);
    assert_int_equal(atomic_load(&waiting[0]->outcome), -1);
    assert_int_equal(atomic_load(&other->outcome), -1);
    rtr_loop_drain(fx->loop, 0);
    rtr_request_unref(waiting[0]);
    rtr_request_unref(waiting[1]);
    rtr_request_unref(other);
    assert_at_rest(fx);
}

#define LONG_PROMPT "{\"prompt\":[3,4,5,3,4,5,3,4,5,3,4,5,3,4,5,3,4,5,3,4],\"max_tokens\":5}"

/* The next that the node is asked for; of 18 tokens, or 20. */
static running_t expect_reserve(fixture_t *fx, node_t *decode, uint32_t *prompt_tokens_out)
{
    const td_msg_work_t *w = &expect(fx, decode, TD_MSG_RESERVE)->u.work;

    *prompt_tokens_out = w->prompt_tokens;
    return (running_t){.ticket = w->ticket, .attempt = w->attempt};
}

static void refuse_reserve(node_t *decode, running_t run)
{
    const td_msg_work_t w = {.ticket = run.ticket, .attempt = run.attempt};
    answer_reserve(decode, &w, TD_ERR_BUSY);
}

static void test_tenants_that_wait_take_turns(void **state)
{
    fixture_t *fx = *state;
    node_t *prefill = add_node(fx, TD_ROLE_PREFILL, "p1");
    node_t *decode = add_node(fx, TD_ROLE_DECODE, "d1");
    rtr_request_t *reqs[3];
    running_t asked[2];
    uint32_t tokens[2] = {0};

    /* What is placed without waiting counts: b's request came last, and is the next. */
    reqs[0] = rtr_request_ref(submit_as(fx, TENANT_A, WHOLE));
    (void)start_attempt(fx, prefill, decode);
    reqs[1] = submit_to_wait(fx, decode, TENANT_A, WHOLE, 1);
    reqs[2] = submit_to_wait(fx, decode, TENANT_B, LONG_PROMPT, 2);
    for (uint32_t i = 0; i < 2; i++) {
        asked[i] = expect_reserve(fx, decode, &tokens[i]);
    }
    assert_int_equal(tokens[0] + tokens[1], 18 + 20);
    refuse_reserve(decode, asked[tokens[0] == 20 ? 0 : 1]);
    refuse_reserve(decode, asked[tokens[0] == 20 ? 1 : 0]);
    (void)expect_reserve(fx, decode, &tokens[0]);
    (void)expect_reserve(fx, decode, &tokens[1]);
    assert_int_equal(tokens[0], 20);
    assert_int_equal(tokens[1], 18);
    rtr_loop_drain(fx->loop, 0);
    for (uint32_t i = 0; i < 3; i++) {
        rtr_request_unref(reqs[i]);
    }
    assert_at_rest(fx);
}

static void test_the_queue_moves_on_when_room_comes(void **state)
{
    fixture_t *fx = *state;
    node_t *prefill = add_node(fx, TD_ROLE_PREFILL, "p1");
    node_t *decode = add_node(fx, TD_ROLE_DECODE, "d1");
    rtr_request_t *req = submit(fx, RTR_KIND_COMPLETION, WHOLE);

    answer_reserve(decode, &expect(fx, decode, TD_MSG_RESERVE)->u.work, TD_ERR_BUSY);
    finish_well(prefill, decode, start_attempt(fx, prefill, decode));
    assert_ended(fx, req, RTR_OUTCOME_OK, 200, "hello");
    assert_at_rest(fx);
}

static void test_a_busy_prefill_node_is_no_failure(void **state)
{
    fixture_t *fx = *state;
    node_t *prefill = add_node(fx, TD_ROLE_PREFILL, "p1");
    node_t *decode = add_node(fx, TD_ROLE_DECODE, "d1");
    rtr_request_t *req = submit(fx, RTR_KIND_COMPLETION, WHOLE);

    for (uint32_t i = 0; i < 4; i++) { /* more often than there are retries */
        running_t run = start_attempt(fx, prefill, decode);
        send_end(prefill, run.ticket, run.attempt, TD_ERR_BUSY);
        expect_cancel(fx, decode, run);
    }
    finish_well(prefill, decode, start_attempt(fx, prefill, decode));
    assert_ended(fx, req, RTR_OUTCOME_OK, 200, "hello");
    assert_int_equal(td_metric_get(fx->metrics.retries), 0);
    assert_at_rest(fx);
}

static void test_a_failed_hand_off_is_tried_three_times_then_502(void **state)
{
    fixture_t *fx = *state;
    node_t *prefill = add_node(fx, TD_ROLE_PREFILL, "p1");
    node_t *decode = add_node(fx, TD_ROLE_DECODE, "d1");
    rtr_request_t *req = submit(fx, RTR_KIND_COMPLETION, STREAM);

    for (uint32_t i = 0; i < 3; i++) {
        running_t run = start_attempt(fx, prefill, decode);
        td_msg_t msg = {
            .type = TD_MSG_KV_FAILED,
            .u.ticket = {.ticket = run.ticket, .attempt = run.attempt, .status = TD_ERR_CORRUPT}};
        assert_int_equal(run.attempt, i + 1);
        send_to_router(decode, &msg);
        expect_cancel(fx, prefill, run);
        expect_cancel(fx, decode, run);
    }
    assert_ended(fx, req, RTR_OUTCOME_UPSTREAM_ERROR, 502, "failed on the nodes");
    assert_false(req->is_stream); /* a proper status, no stream */
    assert_int_equal(td_metric_get(fx->metrics.retries), 2);
    assert_at_rest(fx);
}

static void test_a_request_the_node_cannot_do_is_400(void **state)
{
    fixture_t *fx = *state;
    node_t *prefill = add_node(fx, TD_ROLE_PREFILL, "p1");
    node_t *decode = add_node(fx, TD_ROLE_DECODE, "d1");
    rtr_request_t *req = submit(fx, RTR_KIND_COMPLETION, WHOLE);
    running_t run = start_attempt(fx, prefill, decode);

    send_end(prefill, run.ticket, run.attempt, TD_ERR_INVALID);
    expect_cancel(fx, decode, run);
    assert_ended(fx, req, RTR_OUTCOME_BAD_REQUEST, 400, "cannot serve");
    assert_at_rest(fx);
}

static void test_a_decode_death_before_the_first_token_goes_unnoticed(void **state)
{
    fixture_t *fx = *state;
    node_t *prefill = add_node(fx, TD_ROLE_PREFILL, "p1");
    node_t *decode = add_node(fx, TD_ROLE_DECODE, "d1");
    rtr_request_t *req = submit(fx, RTR_KIND_COMPLETION, STREAM);
    running_t run = start_attempt(fx, prefill, decode);
    node_t *other = add_node(fx, TD_ROLE_DECODE, "d2");

    new_life(fx, decode);
    expect_cancel(fx, prefill, run);
    finish_well(prefill, other, start_attempt(fx, prefill, other)); /* not the one that died */
    assert_ended(fx, req, RTR_OUTCOME_OK, 200, "[DONE]");
    assert_int_equal(td_metric_get(fx->metrics.retries), 1);
    assert_at_rest(fx);
}

/* --- objectives ------------------------------------------------------------------------------- */

static void spin_for(fixture_t *fx, uint64_t ms)
{
    const uint64_t until_ns = td_now_ns() + ms * TD_NS_PER_MS;
    while (td_remaining_ns(until_ns) > 0) {
        spin(fx, NULL);
    }
}

static rtr_request_t *submit_with(fixture_t *fx, rtr_slo_t slo)
{
    rtr_request_unref(fx->req);
    fx->req = make_request(fx, RTR_KIND_COMPLETION,
                           "{\"prompt\":[3,4,5,3,4,5,3,4,5,3,4,5,3,4,5,3,4,5],\"max_tokens\":40}");
    fx->req->slo = slo;
    assert_int_equal(rtr_loop_submit(fx->loop, rtr_request_ref(fx->req)), TD_OK);
    return fx->req;
}

/* Before anything is known nothing is refused; then by what it took. */
static void test_a_request_that_would_miss_its_objective_is_refused(void **state)
{
    fixture_t *fx = *state;
    node_t *prefill = add_node(fx, TD_ROLE_PREFILL, "p1");
    node_t *decode = add_node(fx, TD_ROLE_DECODE, "d1");
    const rtr_slo_t tight[2] = {{.ttft_ms = 1}, {.tbt_ms = 1}};
    rtr_request_t *req = submit_with(fx, (rtr_slo_t){.ttft_ms = 1, .tbt_ms = 1});
    running_t run = start_attempt(fx, prefill, decode);

    spin_for(fx, 30);
    send_end(prefill, run.ticket, run.attempt, TD_OK);
    for (uint32_t i = 0; i < 40; i++) {
        send_token(decode, run.ticket, run.attempt, 0, i, "a",
                   i == 39 ? TD_FINISH_LENGTH : TD_FINISH_NONE);
        spin_for(fx, 4);
    }
    send_end(decode, run.ticket, run.attempt, TD_OK);
    assert_ended(fx, req, RTR_OUTCOME_OK, 200, "aaaa");
    for (uint32_t i = 0; i < 2; i++) {
        req = submit_with(fx, tight[i]);
        wait_end(fx, req);
        assert_int_equal(req->http_status, 429);
        assert_non_null(strstr(req->out.bytes, i == 0 ? "slo_ttft" : "slo_tbt"));
        assert_true(req->retry_after_s >= 1 && req->retry_after_s <= RTR_RETRY_AFTER_S_MAX);
    }
    assert_int_equal(td_metric_get(fx->metrics.slo_ttft), 1);
    assert_int_equal(td_metric_get(fx->metrics.slo_tbt), 1);
    req = submit_with(fx, (rtr_slo_t){.ttft_ms = 60000, .tbt_ms = 60000});
    finish_well(prefill, decode, start_attempt(fx, prefill, decode));
    wait_end(fx, req);
    assert_int_equal(req->http_status, 200);
    assert_at_rest(fx);
}

/* One prompt of two has given a token: the answer is under way, and is not refused over the other.
 */
static void test_i9_an_objective_ends_no_answer_that_has_begun(void **state)
{
    fixture_t *fx = *state;
    node_t *prefill = add_node(fx, TD_ROLE_PREFILL, "p1");
    node_t *decode = add_node(fx, TD_ROLE_DECODE, "d1");
    rtr_request_t *req = submit(fx, RTR_KIND_COMPLETION, WHOLE);
    td_msg_work_t waits;
    running_t run;

    finish_well(prefill, decode, start_attempt(fx, prefill, decode)); /* what it took is known */
    assert_ended(fx, req, RTR_OUTCOME_OK, 200, "hello");
    rtr_request_unref(fx->req);
    req = fx->req = make_request(fx, RTR_KIND_COMPLETION,
                                 "{\"prompt\":[[3,4,5,3,4,5,3,4,5,3,4,5,3,4,5,3,4,5],"
                                 "[4,4,5,3,4,5,3,4,5,3,4,5,3,4,5,3,4,5]],\"max_tokens\":5}");
    req->slo.ttft_ms = 30000;
    assert_int_equal(rtr_loop_submit(fx->loop, rtr_request_ref(req)), TD_OK);
    run = start_attempt(fx, prefill, decode);
    waits = expect(fx, decode, TD_MSG_RESERVE)->u.work;
    send_token(decode, run.ticket, run.attempt, 0, 0, "he", TD_FINISH_NONE);
    while (req->first_token_ns == 0) {
        spin(fx, NULL);
    }
    req->arrived_ns -= 60 * TD_NS_PER_S;
    answer_reserve(decode, &waits, TD_ERR_BUSY);
    finish_well(prefill, decode, start_attempt(fx, prefill, decode));
    send_token(decode, run.ticket, run.attempt, 0, 1, "llo", TD_FINISH_STOP);
    send_end(prefill, run.ticket, run.attempt, TD_OK);
    send_end(decode, run.ticket, run.attempt, TD_OK);
    wait_end(fx, req);
    assert_int_equal(req->http_status, 200);
    assert_int_equal(td_metric_get(fx->metrics.slo_ttft), 0);
    assert_at_rest(fx);
}

/* --- nodes that fail again and again -----------------------------------------------------------
 */

/* Which of two decode nodes a request was placed on. */
static node_t *placed_on(fixture_t *fx, node_t *decode, node_t *other)
{
    rtr_registry_t *reg = rtr_loop_registry(fx->loop);
    node_t *const nodes[2] = {decode, other};

    for (;;) {
        for (uint32_t i = 0; i < 2; i++) {
            const uint32_t slot =
                rtr_registry_find(reg, td_bus_id(nodes[i]->bus), td_bus_incarnation(nodes[i]->bus));
            if (rtr_registry_node(reg, slot)->sequences > 0) {
                return nodes[i];
            }
        }
        spin(fx, NULL);
    }
}

/* A whole request: one that fails at `decode`, where that is asked for, ends well at the other.
 * Answers where it was placed first. */
static node_t *try_one(fixture_t *fx, node_t *prefill, node_t *decode, node_t *other, bool fails)
{
    rtr_request_t *req = submit(fx, RTR_KIND_COMPLETION, WHOLE);
    node_t *first = placed_on(fx, decode, other);
    node_t *last = first;
    running_t run = start_attempt(fx, prefill, first);

    if (fails && first == decode) {
        send_end(decode, run.ticket, run.attempt, TD_ERR_NO_MEMORY);
        run = start_attempt(fx, prefill, other);
        last = other;
    }
    finish_well(prefill, last, run);
    wait_end(fx, req);
    assert_int_equal(req->http_status, 200);
    return first;
}

static void test_a_node_that_fails_again_and_again_is_left_alone(void **state)
{
    fixture_t *fx = *state;
    node_t *prefill = add_node(fx, TD_ROLE_PREFILL, "p1");
    node_t *decode = add_node(fx, TD_ROLE_DECODE, "d1");
    node_t *other = add_node(fx, TD_ROLE_DECODE, "d2");
    rtr_registry_t *reg = rtr_loop_registry(fx->loop);
    rtr_node_t *node =
        rtr_registry_node(reg, rtr_registry_find(reg, "d1", td_bus_incarnation(decode->bus)));

    rtr_tickets_set_policy(rtr_loop_tickets(fx->loop), RTR_POLICY_ROUND_ROBIN);
    while (td_metric_get(fx->metrics.breakers_opened) == 0) {
        (void)try_one(fx, prefill, decode, other, true);
    }
    assert_int_equal(node->breaker.failures, RTR_BREAKER_FAILURES);
    for (uint32_t i = 0; i < 4; i++) {
        assert_ptr_equal(try_one(fx, prefill, decode, other, false), other);
    }
    node->breaker.until_ns = td_now_ns(); /* the second is over: one request tries */
    while (node->breaker.failures > 0) {
        (void)try_one(fx, prefill, decode, other, false);
    }
    assert_false(rtr_breaker_is_open(&node->breaker, td_now_ns()));
    assert_at_rest(fx);
}

/* --- nodes that drain --------------------------------------------------------------------------
 */

static void drain(fixture_t *fx, node_t *node)
{
    rtr_registry_t *reg = rtr_loop_registry(fx->loop);
    const uint32_t slot =
        rtr_registry_find(reg, td_bus_id(node->bus), td_bus_incarnation(node->bus));
    td_msg_t msg = {.type = TD_MSG_HEARTBEAT,
                    .u.heartbeat = {.free_blocks = 1000, .total_blocks = 1000, .draining = true}};

    node->mute = true;
    send_to_router(node, &msg);
    while (!rtr_registry_node(reg, slot)->beat.draining) {
        spin(fx, NULL);
    }
}

static void test_a_draining_node_gets_nothing_new(void **state)
{
    fixture_t *fx = *state;
    node_t *prefill = add_node(fx, TD_ROLE_PREFILL, "p1");
    node_t *decode = add_node(fx, TD_ROLE_DECODE, "d1");
    node_t *other = add_node(fx, TD_ROLE_DECODE, "d2");
    rtr_request_t *req = NULL;

    drain(fx, decode);
    for (uint32_t i = 0; i < 4; i++) {
        req = submit(fx, RTR_KIND_COMPLETION, WHOLE);
        finish_well(prefill, other, start_attempt(fx, prefill, other));
        wait_end(fx, req);
    }
    drain(fx, other);
    req = submit(fx, RTR_KIND_COMPLETION, WHOLE);
    SPIN_UNTIL(fx, rtr_tickets_queued(rtr_loop_tickets(fx->loop)) > 0);
    assert_int_equal(rtr_tickets_queued(rtr_loop_tickets(fx->loop)), 1); /* for one that comes */
    new_life(fx, decode);
    finish_well(prefill, decode, start_attempt(fx, prefill, decode));
    wait_end(fx, req);
    assert_int_equal(td_metric_get(fx->metrics.requests[RTR_OUTCOME_OK]), 5);
    assert_at_rest(fx);
}

/* --- going on elsewhere (I9) -------------------------------------------------------------------
 */

static void wait_for_text(fixture_t *fx, const rtr_request_t *req, const char *text)
{
    SPIN_UNTIL(fx, req->out.bytes != NULL && strstr(req->out.bytes, text) != NULL);
}

static uint32_t count_of(const rtr_request_t *req, const char *text)
{
    uint32_t count = 0;
    for (const char *at = req->out.bytes; (at = strstr(at, text)) != NULL; at++) {
        count++;
    }
    return count;
}

static void test_i9_a_stream_goes_on_behind_a_decode_death(void **state)
{
    fixture_t *fx = *state;
    node_t *prefill = add_node(fx, TD_ROLE_PREFILL, "p1");
    node_t *decode = add_node(fx, TD_ROLE_DECODE, "d1");
    rtr_request_t *req = submit(fx, RTR_KIND_COMPLETION, STREAM);
    running_t run = start_attempt(fx, prefill, decode);
    node_t *other = add_node(fx, TD_ROLE_DECODE, "d2");

    assert_int_equal(fx->given_count, 0);
    send_token(decode, run.ticket, run.attempt, 0, 0, "he", TD_FINISH_NONE);
    send_token(decode, run.ticket, run.attempt, 0, 1, "l", TD_FINISH_NONE);
    send_end(prefill, run.ticket, run.attempt, TD_OK); /* three tokens of the prompt were cached */
    wait_for_text(fx, req, "\"text\":\"l\"");
    SPIN_UNTIL(fx, under_way(fx).prompts == 0);
    new_life(fx, decode);
    expect_cancel(fx, prefill, run);
    send_token(decode, run.ticket, run.attempt, 0, 2, "late", TD_FINISH_NONE);
    run = start_attempt(fx, prefill, other);
    assert_int_equal(fx->given_count, 1);
    assert_int_equal(fx->given[0].count, 2);
    assert_false(fx->given[0].ended);
    send_token(other, run.ticket, run.attempt, 0, 2, "lo", TD_FINISH_STOP);
    send_end(other, run.ticket, run.attempt, TD_OK);
    assert_ended(fx, req, RTR_OUTCOME_OK, 200, "data: [DONE]");
    assert_int_equal(count_of(req, "\"text\":\"he\""), 1);
    assert_int_equal(count_of(req, "\"text\":\"l\""), 1);
    assert_int_equal(count_of(req, "\"text\":\"lo\""), 1);
    assert_int_equal(count_of(req, "late"), 0);
    assert_int_equal(count_of(req, "\"completion_tokens\":3"), 1);
    assert_int_equal(count_of(req, "\"cached_tokens\":3"), 1);
    assert_int_equal(td_metric_get(fx->metrics.failovers), 1);
    assert_at_rest(fx);
}

static void test_i9_choices_that_ended_are_not_begun_again(void **state)
{
    fixture_t *fx = *state;
    node_t *prefill = add_node(fx, TD_ROLE_PREFILL, "p1");
    node_t *decode = add_node(fx, TD_ROLE_DECODE, "d1");
    rtr_request_t *req = submit(fx, RTR_KIND_COMPLETION, "{" PROMPT ",\"n\":3}");
    running_t run = start_attempt(fx, prefill, decode);

    send_token(decode, run.ticket, run.attempt, 1, 0, "ended", TD_FINISH_STOP);
    send_token(decode, run.ticket, run.attempt, 2, 0, "he", TD_FINISH_NONE);
    send_end(decode, run.ticket, run.attempt, TD_ERR_NO_MEMORY);
    expect_cancel(fx, prefill, run);
    run = start_attempt(fx, prefill, decode);
    assert_int_equal(fx->given_count, 3);
    assert_true(fx->given[0].count == 0 && !fx->given[0].ended);
    assert_true(fx->given[1].count == 0 && fx->given[1].ended);
    assert_true(fx->given[2].count == 1 && !fx->given[2].ended);
    send_token(decode, run.ticket, run.attempt, 2, 1, "llo", TD_FINISH_LENGTH);
    send_token(decode, run.ticket, run.attempt, 0, 0, "first", TD_FINISH_STOP);
    send_end(decode, run.ticket, run.attempt, TD_OK);
    assert_ended(fx, req, RTR_OUTCOME_OK, 200, "\"text\":\"first\"");
    assert_int_equal(count_of(req, "\"text\":\"ended\""), 1);
    assert_int_equal(count_of(req, "\"text\":\"hello\""), 1);
    assert_int_equal(count_of(req, "\"completion_tokens\":4"), 1);
    assert_at_rest(fx);
}

/* Of the attempt that goes on nothing had come yet: it is its prefill node that was missed. */
static void test_i9_a_successor_may_fail_as_well(void **state)
{
    fixture_t *fx = *state;
    node_t *prefill = add_node(fx, TD_ROLE_PREFILL, "p1");
    node_t *decode = add_node(fx, TD_ROLE_DECODE, "d1");
    rtr_request_t *req = submit(fx, RTR_KIND_COMPLETION, STREAM);
    running_t run = start_attempt(fx, prefill, decode);

    send_token(decode, run.ticket, run.attempt, 0, 0, "he", TD_FINISH_NONE);
    wait_for_text(fx, req, "he");
    new_life(fx, decode);
    (void)start_attempt(fx, prefill, decode);
    new_life(fx, prefill);
    (void)start_attempt(fx, prefill, decode);
    new_life(fx, decode);
    /* Three attempts in a row without a token. */
    assert_ended(fx, req, RTR_OUTCOME_UPSTREAM_ERROR, 200, "data: {\"error\":{");
    assert_int_equal(count_of(req, "[DONE]"), 0);
    assert_int_equal(td_metric_get(fx->metrics.failovers), 2);
    assert_at_rest(fx);
}

static void test_i9_a_token_ends_a_row_of_failures(void **state)
{
    fixture_t *fx = *state;
    node_t *prefill = add_node(fx, TD_ROLE_PREFILL, "p1");
    node_t *decode = add_node(fx, TD_ROLE_DECODE, "d1");
    rtr_request_t *req = submit(fx, RTR_KIND_COMPLETION, STREAM);
    running_t run = start_attempt(fx, prefill, decode);

    for (uint32_t i = 0; i < 4; i++) {
        const char texts[] = "a\0b\0c\0d";
        send_token(decode, run.ticket, run.attempt, 0, i, texts + 2 * i, TD_FINISH_NONE);
        wait_for_text(fx, req, texts + 2 * i);
        new_life(fx, decode);
        run = start_attempt(fx, prefill, decode);
        assert_int_equal(fx->given[0].count, i + 1);
    }
    send_token(decode, run.ticket, run.attempt, 0, 4, "e", TD_FINISH_LENGTH);
    send_end(decode, run.ticket, run.attempt, TD_OK);
    assert_ended(fx, req, RTR_OUTCOME_OK, 200, "data: [DONE]");
    assert_int_equal(td_metric_get(fx->metrics.failovers), 4);
    assert_at_rest(fx);
}

static void test_i5_a_stream_that_nobody_takes_over_ends_with_an_error_event(void **state)
{
    fixture_t *fx = *state;
    node_t *prefill = add_node(fx, TD_ROLE_PREFILL, "p1");
    node_t *decode = add_node(fx, TD_ROLE_DECODE, "d1");
    rtr_request_t *req = submit(fx, RTR_KIND_COMPLETION, STREAM);
    running_t run = start_attempt(fx, prefill, decode);

    send_token(decode, run.ticket, run.attempt, 0, 0, "he", TD_FINISH_NONE);
    wait_for_text(fx, req, "he");
    decode->mute = true; /* frozen; after two seconds it is dead, and there is no other */
    assert_ended(fx, req, RTR_OUTCOME_UPSTREAM_ERROR, 200, "no other took over");
    assert_int_equal(count_of(req, "[DONE]"), 0);
    assert_at_rest(fx);
}

/* The only node that is left says nothing at first. It is asked again, and the wait for room begins
 * when its silence has ended, not with the death before it. */
static void test_i9_a_stream_waits_for_a_successor_that_does_not_answer(void **state)
{
    fixture_t *fx = *state;
    node_t *prefill = add_node(fx, TD_ROLE_PREFILL, "p1");
    node_t *decode = add_node(fx, TD_ROLE_DECODE, "d1");
    rtr_request_t *req = submit(fx, RTR_KIND_COMPLETION, STREAM);
    running_t run = start_attempt(fx, prefill, decode);
    uint32_t asked = 0;

    send_token(decode, run.ticket, run.attempt, 0, 0, "he", TD_FINISH_NONE);
    wait_for_text(fx, req, "he");
    new_life(fx, decode);
    asked = expect(fx, decode, TD_MSG_RESERVE)->u.work.attempt;
    run = start_attempt(fx, prefill, decode);
    assert_true(run.attempt > asked);
    assert_int_equal(fx->given[0].count, 1);
    send_token(decode, run.ticket, run.attempt, 0, 1, "llo", TD_FINISH_STOP);
    send_end(decode, run.ticket, run.attempt, TD_OK);
    assert_ended(fx, req, RTR_OUTCOME_OK, 200, "data: [DONE]");
    assert_at_rest(fx);
}

/* It is too large for that node's memory only. */
static void test_i9_a_stream_passes_over_a_successor_that_cannot_serve_it(void **state)
{
    fixture_t *fx = *state;
    node_t *prefill = add_node(fx, TD_ROLE_PREFILL, "p1");
    node_t *decode = add_node(fx, TD_ROLE_DECODE, "d1");
    rtr_request_t *req = submit(fx, RTR_KIND_COMPLETION, STREAM);
    running_t run = start_attempt(fx, prefill, decode);
    node_t *small = add_node(fx, TD_ROLE_DECODE, "d2");
    node_t *other = NULL;
    td_msg_work_t asked;

    send_token(decode, run.ticket, run.attempt, 0, 0, "he", TD_FINISH_NONE);
    wait_for_text(fx, req, "he");
    new_life(fx, decode);
    asked = expect(fx, small, TD_MSG_RESERVE)->u.work;
    other = add_node(fx, TD_ROLE_DECODE, "d3");
    answer_reserve(small, &asked, TD_ERR_TOO_LARGE);
    run = start_attempt(fx, prefill, other);
    assert_int_equal(fx->given[0].count, 1);
    send_token(other, run.ticket, run.attempt, 0, 1, "llo", TD_FINISH_STOP);
    send_end(other, run.ticket, run.attempt, TD_OK);
    assert_ended(fx, req, RTR_OUTCOME_OK, 200, "data: [DONE]");
    assert_at_rest(fx);
}

static void test_i9_an_answer_is_whole_without_word_of_its_end(void **state)
{
    fixture_t *fx = *state;
    node_t *prefill = add_node(fx, TD_ROLE_PREFILL, "p1");
    node_t *decode = add_node(fx, TD_ROLE_DECODE, "d1");
    rtr_request_t *req = submit(fx, RTR_KIND_COMPLETION, STREAM);
    running_t run = start_attempt(fx, prefill, decode);

    send_token(decode, run.ticket, run.attempt, 0, 0, "he", TD_FINISH_STOP);
    wait_for_text(fx, req, "he");
    new_life(fx, decode);
    assert_ended(fx, req, RTR_OUTCOME_OK, 200, "data: [DONE]");
    assert_int_equal(count_of(req, "\"completion_tokens\":1"), 1);
    assert_int_equal(td_metric_get(fx->metrics.retries), 0);
    assert_at_rest(fx);
}

static void test_a_prefill_death_in_a_stream_goes_unnoticed(void **state)
{
    fixture_t *fx = *state;
    node_t *prefill = add_node(fx, TD_ROLE_PREFILL, "p1");
    node_t *decode = add_node(fx, TD_ROLE_DECODE, "d1");
    rtr_request_t *req = submit(fx, RTR_KIND_COMPLETION, STREAM);
    running_t run = start_attempt(fx, prefill, decode);

    send_token(decode, run.ticket, run.attempt, 0, 0, "he", TD_FINISH_NONE);
    while (!req->ready) {
        spin(fx, NULL);
    }
    new_life(fx, prefill); /* before it said that its leg is over */
    send_token(decode, run.ticket, run.attempt, 0, 1, "llo", TD_FINISH_LENGTH);
    send_end(decode, run.ticket, run.attempt, TD_OK);
    assert_ended(fx, req, RTR_OUTCOME_OK, 200, "data: [DONE]");
    assert_at_rest(fx);
}

static void test_i9_a_whole_answer_goes_on_behind_a_decode_death(void **state)
{
    fixture_t *fx = *state;
    node_t *prefill = add_node(fx, TD_ROLE_PREFILL, "p1");
    node_t *decode = add_node(fx, TD_ROLE_DECODE, "d1");
    rtr_request_t *req = submit(fx, RTR_KIND_COMPLETION, WHOLE);
    running_t run = start_attempt(fx, prefill, decode);

    send_token(decode, run.ticket, run.attempt, 0, 0, "kept ", TD_FINISH_NONE);
    send_end(prefill, run.ticket, run.attempt, TD_OK);
    SPIN_UNTIL(fx, under_way(fx).prompts == 0);
    new_life(fx, decode);
    run = start_attempt(fx, prefill, decode);
    send_token(decode, run.ticket, 1, 0, 1, "late", TD_FINISH_NONE); /* of the old attempt */
    send_token(decode, run.ticket, run.attempt, 0, 1, "too", TD_FINISH_STOP);
    send_end(prefill, run.ticket, run.attempt, TD_OK);
    send_end(decode, run.ticket, run.attempt, TD_OK);
    assert_ended(fx, req, RTR_OUTCOME_OK, 200, "\"text\":\"kept too\"");
    assert_non_null(strstr(req->out.bytes, "\"completion_tokens\":2"));
    assert_at_rest(fx);
}

static void test_a_prefill_death_before_its_leg_is_over_is_retried(void **state)
{
    fixture_t *fx = *state;
    node_t *prefill = add_node(fx, TD_ROLE_PREFILL, "p1");
    node_t *decode = add_node(fx, TD_ROLE_DECODE, "d1");
    rtr_request_t *req = submit(fx, RTR_KIND_COMPLETION, WHOLE);
    running_t run = start_attempt(fx, prefill, decode);

    new_life(fx, prefill);
    expect_cancel(fx, decode, run);
    run = start_attempt(fx, prefill, decode);
    send_end(prefill, run.ticket, run.attempt, TD_OK);
    SPIN_UNTIL(fx, under_way(fx).prompts == 0);
    new_life(fx, prefill); /* its work was done: nothing happens */
    send_token(decode, run.ticket, run.attempt, 0, 0, "hello", TD_FINISH_STOP);
    send_end(decode, run.ticket, run.attempt, TD_OK);
    assert_ended(fx, req, RTR_OUTCOME_OK, 200, "hello");
    assert_int_equal(td_metric_get(fx->metrics.retries), 1);
    assert_at_rest(fx);
}

static void test_a_silent_node_is_dead_and_must_begin_a_new_life(void **state)
{
    fixture_t *fx = *state;
    node_t *prefill = add_node(fx, TD_ROLE_PREFILL, "p1");
    node_t *decode = add_node(fx, TD_ROLE_DECODE, "d1");
    rtr_request_t *req = submit(fx, RTR_KIND_COMPLETION, WHOLE);
    const td_msg_registered_t *m = NULL;

    (void)start_attempt(fx, prefill, decode);
    decode->mute = true; /* frozen */
    assert_ended(fx, req, RTR_OUTCOME_UPSTREAM_ERROR, 503, "No decode node");
    decode->mute = false;
    m = &expect(fx, decode, TD_MSG_REGISTERED)->u.registered;
    assert_false(m->accepted);
    assert_string_equal(m->error, TD_DEAD_TEXT);
    register_node(fx, decode, "cpu/mixed/r1", false); /* the old life stays dead */
    assert_false(expect(fx, decode, TD_MSG_REGISTERED)->u.registered.accepted);
    new_life(fx, decode);
    assert_int_equal(rtr_registry_live(rtr_loop_registry(fx->loop), TD_ROLE_DECODE), 1);
    assert_at_rest(fx);
}

/* I5, I9: who slept longer than tickets live is told so by the nodes as they register again, and
 * goes on elsewhere; that is nobody's failure, however many nodes there are. */
static void test_i9_tickets_that_nodes_let_go_are_placed_again(void **state)
{
    fixture_t *fx = *state;
    node_t *prefill = add_node(fx, TD_ROLE_PREFILL, "p1");
    node_t *decode = add_node(fx, TD_ROLE_DECODE, "d1");
    rtr_request_t *req = submit(fx, RTR_KIND_COMPLETION, WHOLE);
    running_t run = start_attempt(fx, prefill, decode);

    register_node(fx, decode, "cpu/mixed/r1", false); /* again, of the same epoch: nothing */
    assert_true(expect(fx, decode, TD_MSG_REGISTERED)->u.registered.accepted);
    for (uint32_t i = 0; i < RTR_RETRIES_MAX + 2; i++) {
        node_t *node = i % 2 == 0 ? decode : prefill;
        node->ticket_epoch++;
        register_node(fx, node, "cpu/mixed/r1", false);
        assert_true(expect(fx, node, TD_MSG_REGISTERED)->u.registered.accepted);
        run = start_attempt(fx, prefill, decode);
    }
    send_token(decode, run.ticket, run.attempt, 0, 0, "hello", TD_FINISH_NONE);
    SPIN_UNTIL(fx, under_way(fx).decoding > 0);
    prefill->ticket_epoch++; /* its part is done */
    register_node(fx, prefill, "cpu/mixed/r1", false);
    assert_true(expect(fx, prefill, TD_MSG_REGISTERED)->u.registered.accepted);
    decode->ticket_epoch++;
    register_node(fx, decode, "cpu/mixed/r1", false);
    run = start_attempt(fx, prefill, decode);
    assert_int_equal(fx->given_count, 1);
    send_token(decode, run.ticket, run.attempt, 0, 1, " world", TD_FINISH_STOP);
    send_end(decode, run.ticket, run.attempt, TD_OK);
    assert_ended(fx, req, RTR_OUTCOME_OK, 200, "hello world");
    assert_int_equal(td_metric_get(fx->metrics.retries), 0);
    assert_int_equal(td_metric_get(fx->metrics.failovers), 1);
    assert_at_rest(fx);
}

static void test_tokens_out_of_order_end_the_attempt(void **state)
{
    fixture_t *fx = *state;
    node_t *prefill = add_node(fx, TD_ROLE_PREFILL, "p1");
    node_t *decode = add_node(fx, TD_ROLE_DECODE, "d1");
    rtr_request_t *req = submit(fx, RTR_KIND_COMPLETION, WHOLE);
    running_t run = start_attempt(fx, prefill, decode);

    send_token(decode, run.ticket, run.attempt, 0, 1, "gap", TD_FINISH_NONE);
    expect_cancel(fx, decode, run);
    run = start_attempt(fx, prefill, decode);
    send_end(decode, run.ticket, run.attempt, TD_OK); /* without a finish reason (F4) */
    expect_cancel(fx, prefill, run);
    finish_well(prefill, decode, start_attempt(fx, prefill, decode));
    assert_ended(fx, req, RTR_OUTCOME_OK, 200, "\"text\":\"hello\"");
    assert_at_rest(fx);
}

static void test_a_client_gone_cancels_both_legs(void **state)
{
    fixture_t *fx = *state;
    node_t *prefill = add_node(fx, TD_ROLE_PREFILL, "p1");
    node_t *decode = add_node(fx, TD_ROLE_DECODE, "d1");
    rtr_request_t *req = submit(fx, RTR_KIND_COMPLETION, WHOLE);
    running_t run = start_attempt(fx, prefill, decode);

    rtr_request_mark_gone(req);
    rtr_loop_wake_gone(fx->loop);
    expect_cancel(fx, prefill, run);
    expect_cancel(fx, decode, run);
    assert_int_equal(atomic_load(&req->outcome), RTR_OUTCOME_CLIENT_GONE);
    assert_true(req->torn);
    finish_well(prefill, decode, run); /* too late for anything */
    for (uint32_t i = 0; i < 10; i++) {
        spin(fx, NULL);
    }
    assert_int_equal(td_metric_get(fx->metrics.requests[RTR_OUTCOME_OK]), 0);
    assert_at_rest(fx);
}

/* How far the minute's tokens are from full, but for what time has brought back. */
static void assert_used(fixture_t *fx, uint32_t used, uint64_t began_ns)
{
    rtr_tenant_t *tenant = rtr_tenants_at(fx->tenants, TENANT_LIMITED);
    const uint32_t left = rtr_tenant_view(tenant, td_now_ns()).tokens_left;
    const uint64_t back = (td_now_ns() - began_ns) / (100 * TD_NS_PER_MS) + 1; /* 10 a second */

    assert_int_equal(atomic_load(&tenant->running), 0);
    assert_in_range(left, 600 - used, TD_MIN(600, 600 - used + back));
}

/* Each way out gives back the place, and of 18 + 5 tokens those that were not used: the prompt once
 * it was placed, and each token that came. */
static void test_i5_what_a_tenant_took_comes_back_on_every_way_out(void **state)
{
    fixture_t *fx = *state;
    node_t *prefill = add_node(fx, TD_ROLE_PREFILL, "p1");
    node_t *decode = add_node(fx, TD_ROLE_DECODE, "d1");
    const uint64_t began_ns = td_now_ns();
    rtr_request_t *req = rtr_request_ref(submit_as(fx, TENANT_LIMITED, WHOLE));
    rtr_request_t *over = NULL;
    running_t run = start_attempt(fx, prefill, decode);

    over = submit_as(fx, TENANT_LIMITED, WHOLE); /* one at a time */
    wait_end(fx, over);
    assert_int_equal(over->http_status, 429);
    assert_non_null(strstr(over->out.bytes, "rate_limit_exceeded"));
    assert_non_null(strstr(over->out.bytes, "1 requests at a time"));
    assert_true(over->retry_after_s > 0);
    finish_well(prefill, decode, run);
    assert_ended(fx, req, RTR_OUTCOME_OK, 200, "hello");
    assert_int_equal(req->limits.tokens, 600);
    assert_in_range(req->limits.tokens_left, 577, 578);
    rtr_request_unref(req);
    assert_used(fx, 20, began_ns);

    req = submit_as(fx, TENANT_LIMITED, WHOLE); /* a failure behind the prompt */
    run = start_attempt(fx, prefill, decode);
    send_end(decode, run.ticket, run.attempt, TD_ERR_INVALID);
    assert_ended(fx, req, RTR_OUTCOME_BAD_REQUEST, 400, "cannot serve");
    assert_used(fx, 20 + 18, began_ns);

    req = submit_as(fx, TENANT_LIMITED, WHOLE); /* refused before anything was computed */
    answer_reserve(decode, &expect(fx, decode, TD_MSG_RESERVE)->u.work, TD_ERR_TOO_LARGE);
    wait_end(fx, req);
    assert_used(fx, 20 + 18, began_ns);

    req = submit_as(fx, TENANT_LIMITED, WHOLE); /* the client has left */
    run = start_attempt(fx, prefill, decode);
    rtr_request_mark_gone(req);
    rtr_loop_wake_gone(fx->loop);
    expect_cancel(fx, decode, run);
    assert_used(fx, 20 + 18 + 18, began_ns);

    req =
        submit_as(fx, TENANT_LIMITED, "{\"prompt\":[3],\"max_tokens\":600}"); /* once it is full */
    wait_end(fx, req);
    assert_int_equal(req->http_status, 429);
    assert_non_null(strstr(req->out.bytes, "600 tokens a minute"));
    assert_used(fx, 20 + 18 + 18, began_ns);
    assert_at_rest(fx);
}

static void test_a_client_that_does_not_read_is_cut_off(void **state)
{
    fixture_t *fx = *state;
    node_t *prefill = add_node(fx, TD_ROLE_PREFILL, "p1");
    node_t *decode = add_node(fx, TD_ROLE_DECODE, "d1");
    rtr_request_t *req = submit(fx, RTR_KIND_COMPLETION, STREAM);
    running_t run = start_attempt(fx, prefill, decode);
    char *text = calloc(1, (1 << 20) + 1);

    memset(text, 'x', 1 << 20);
    for (uint32_t i = 0; i < 5; i++) {
        send_token(decode, run.ticket, run.attempt, 0, i, text, TD_FINISH_NONE);
    }
    expect_cancel(fx, decode, run);
    assert_int_equal(atomic_load(&req->outcome), RTR_OUTCOME_CLIENT_GONE);
    assert_true(req->torn);
    free(text);
    assert_at_rest(fx);
}

static void test_shutdown_ends_what_is_under_way(void **state)
{
    fixture_t *fx = *state;
    node_t *prefill = add_node(fx, TD_ROLE_PREFILL, "p1");
    node_t *decode = add_node(fx, TD_ROLE_DECODE, "d1");
    rtr_request_t *req = submit(fx, RTR_KIND_COMPLETION, WHOLE);
    running_t run = start_attempt(fx, prefill, decode);

    rtr_loop_drain(fx->loop, 50);
    assert_ended(fx, req, RTR_OUTCOME_SHUTDOWN, 503, "shutting down");
    expect_cancel(fx, prefill, run);
    assert_at_rest(fx);
}

static void test_an_overdue_request_is_504(void **state)
{
    fixture_t *fx = *state;
    node_t *prefill = add_node(fx, TD_ROLE_PREFILL, "p1");
    node_t *decode = add_node(fx, TD_ROLE_DECODE, "d1");
    rtr_request_t *req = submit(fx, RTR_KIND_COMPLETION, WHOLE);
    running_t run = start_attempt(fx, prefill, decode);

    req->deadline_ns = td_now_ns();
    expect_cancel(fx, decode, run);
    assert_ended(fx, req, RTR_OUTCOME_TIMEOUT, 504, "longer than");
    assert_at_rest(fx);
}

static void test_a_named_node_must_be_live(void **state)
{
    fixture_t *fx = *state;
    rtr_request_t *req = NULL;

    (void)add_node(fx, TD_ROLE_PREFILL, "p1");
    (void)add_node(fx, TD_ROLE_DECODE, "d1");
    req = submit(fx, RTR_KIND_COMPLETION, "{" PROMPT ",\"tandem\":{\"decode\":\"p1\"}}");
    assert_ended(fx, req, RTR_OUTCOME_BAD_REQUEST, 400, "not live");
    assert_at_rest(fx);
}

static void expect_refusal(fixture_t *fx, node_t *node, const char *says)
{
    const td_msg_registered_t *m = &expect(fx, node, TD_MSG_REGISTERED)->u.registered;
    assert_false(m->accepted);
    if (strstr(m->error, says) == NULL) {
        fail_msg("\"%s\" not in: %s", says, m->error);
    }
}

static void test_nodes_that_do_not_fit_are_refused(void **state)
{
    fixture_t *fx = *state;
    node_t *node = NULL;

    (void)add_node(fx, TD_ROLE_PREFILL, "p1");
    node = make_node(fx, TD_ROLE_DECODE, "d1");
    register_node(fx, node, "cpu/exact/r1", false);
    expect_refusal(fx, node, "numerics class is \"cpu/exact/r1\", the cluster's is");
    fx->fingerprint[3] ^= 1;
    register_node(fx, node, "cpu/mixed/r1", false);
    fx->fingerprint[3] ^= 1;
    /* The router reads the same array, so by now the node's copy differs. */
    expect_refusal(fx, node, "wrong model");
    fx->secret[3] ^= 1;
    register_node(fx, node, "cpu/mixed/r1", false);
    fx->secret[3] ^= 1;
    expect_refusal(fx, node, "secret or block size");
    register_node(fx, node, "cpu/mixed/r1", false);
    assert_true(expect(fx, node, TD_MSG_REGISTERED)->u.registered.accepted);
    assert_int_equal(td_metric_get(fx->metrics.registrations_refused), 3);
}

/* Blocks that a request is counted with on its decode node, of a cluster of this numerics class. */
static uint64_t promised_for_a_long_answer(fixture_t *fx, const char *numerics)
{
    rtr_registry_t *reg = rtr_loop_registry(fx->loop);
    node_t *prefill = make_node(fx, TD_ROLE_PREFILL, "p1");
    node_t *decode = make_node(fx, TD_ROLE_DECODE, "d1");
    rtr_request_t *req = NULL;
    running_t run;
    uint64_t promised = 0;

    register_node(fx, prefill, numerics, false);
    assert_true(expect(fx, prefill, TD_MSG_REGISTERED)->u.registered.accepted);
    prefill->mute = false;
    register_node(fx, decode, "cpu/mixed/r1/window:63", false);
    expect_refusal(fx, decode, "window:63");
    register_node(fx, decode, numerics, false);
    assert_true(expect(fx, decode, TD_MSG_REGISTERED)->u.registered.accepted);
    decode->mute = false;
    req = submit(fx, RTR_KIND_COMPLETION,
                 "{\"prompt\":[3,4,5,3,4,5,3,4,5,3,4,5,3,4,5,3,4,5],\"max_tokens\":2000}");
    run = start_attempt(fx, prefill, decode);
    for (uint32_t i = 0; i < rtr_registry_slots(reg); i++) {
        promised += rtr_registry_node(reg, i)->promised_blocks;
    }
    finish_well(prefill, decode, run);
    wait_end(fx, req);
    assert_at_rest(fx);
    return promised;
}

static void test_a_request_is_counted_with_what_its_mask_shows(void **state)
{
    const td_attention_mask_t window = {.kind = TD_ATTENTION_WINDOW, .local = 64};

    assert_int_equal(promised_for_a_long_answer(*state, "cpu/mixed/r1/window:64"),
                     td_attention_blocks_max(&window, BLOCK_TOKENS, 2018, 1));
}

static void test_a_request_is_counted_with_all_its_blocks(void **state)
{
    assert_int_equal(promised_for_a_long_answer(*state, "cpu/mixed/r1"), 2018 / BLOCK_TOKENS + 1);
}

static void test_nodes_of_another_kv_codec_are_refused(void **state)
{
    fixture_t *fx = *state;
    node_t *node = NULL;

    (void)add_node(fx, TD_ROLE_PREFILL, "p1");
    node = make_node(fx, TD_ROLE_DECODE, "d1");
    register_as(fx, node, "cpu/mixed/r1", false, "i8", "i8");
    expect_refusal(fx, node, "wrong KV codec: it is \"i8\", the cluster's is \"f16\"");
    register_as(fx, node, "cpu/mixed/r1", false, "f16", "i8"); /* its blocks' names would differ */
    expect_refusal(fx, node, "block keys differ");
    register_node(fx, node, "cpu/mixed/r1", false);
    assert_true(expect(fx, node, TD_MSG_REGISTERED)->u.registered.accepted);
}

static void test_a_store_with_another_secret_is_refused(void **state)
{
    fixture_t *fx = *state;
    node_t *store = make_node(fx, TD_ROLE_KVSTORE, "s1");

    fx->secret[3] ^= 1;
    register_node(fx, store, "", true);
    fx->secret[3] ^= 1;
    expect_refusal(fx, store, "wrong cluster secret");
    register_node(fx, store, "", true);
    assert_true(expect(fx, store, TD_MSG_REGISTERED)->u.registered.accepted);
}

static void test_an_id_in_use_is_refused(void **state)
{
    fixture_t *fx = *state;
    node_t *twin = NULL;

    (void)add_node(fx, TD_ROLE_PREFILL, "p1");
    twin = make_node(fx, TD_ROLE_PREFILL, "p1");
    register_node(fx, twin, "cpu/mixed/r1", false);
    expect_refusal(fx, twin, "in use");
    assert_int_equal(td_metric_get(fx->metrics.node_deaths), 0);
}

static const td_msg_peer_t *find_peer(const td_msg_t *msg, const char *id)
{
    for (uint32_t i = 0; i < msg->u.peers.count; i++) {
        if (strcmp(msg->u.peers.peers[i].id, id) == 0) {
            return &msg->u.peers.peers[i];
        }
    }
    return NULL;
}

static void test_peers_are_told_and_one_master_named(void **state)
{
    fixture_t *fx = *state;
    node_t *prefill = add_node(fx, TD_ROLE_PREFILL, "p1");
    node_t *stores[3] = {make_node(fx, TD_ROLE_KVSTORE, "s1"), make_node(fx, TD_ROLE_KVSTORE, "s2"),
                         make_node(fx, TD_ROLE_KVSTORE, "s3")};
    const td_msg_t *msg = NULL;

    for (uint32_t i = 0; i < 3; i++) { /* s3 is a segment without a region yet */
        register_node(fx, stores[i], "", i < 2);
        assert_true(expect(fx, stores[i], TD_MSG_REGISTERED)->u.registered.accepted);
    }
    do {
        msg = expect(fx, prefill, TD_MSG_PEERS);
    } while (find_peer(msg, "s2") == NULL);
    assert_non_null(find_peer(msg, "p1"));
    assert_true(find_peer(msg, "s1")->store_master);
    assert_false(find_peer(msg, "s2")->store_master);
    assert_null(find_peer(msg, "s3"));
    (void)expect(fx, prefill, TD_MSG_LEASE);
    for (uint32_t i = 1; i < 3; i++) {
        stores[i]->mute = false;
    }
    do { /* the first master falls silent: the next one is named */
        msg = expect(fx, prefill, TD_MSG_PEERS);
    } while (find_peer(msg, "s1") != NULL);
    assert_true(find_peer(msg, "s2")->store_master);
}

/* F9: of several that say they are the store's master the one with the highest term is, also when
 * it was another a moment ago. */
static void test_f9_master_with_the_highest_term_is_named(void **state)
{
    fixture_t *fx = *state;
    node_t *prefill = add_node(fx, TD_ROLE_PREFILL, "p1");
    node_t *stores[2] = {make_node(fx, TD_ROLE_KVSTORE, "s1"),
                         make_node(fx, TD_ROLE_KVSTORE, "s2")};
    const td_msg_t *msg = NULL;

    stores[0]->store_term = 5;
    stores[1]->store_term = 9;
    for (uint32_t i = 0; i < 2; i++) {
        register_node(fx, stores[i], "", true);
        (void)expect(fx, stores[i], TD_MSG_REGISTERED);
    }
    do {
        msg = expect(fx, prefill, TD_MSG_PEERS);
    } while (find_peer(msg, "s2") == NULL);
    assert_false(find_peer(msg, "s1")->store_master);
    assert_true(find_peer(msg, "s2")->store_master);
    assert_int_equal(find_peer(msg, "s2")->store_term, 9);
    stores[0]->store_term = 12;
    register_node(fx, stores[0], "", true);
    do {
        msg = expect(fx, prefill, TD_MSG_PEERS);
    } while (!find_peer(msg, "s1")->store_master);
    assert_false(find_peer(msg, "s2")->store_master);
    assert_int_equal(find_peer(msg, "s1")->store_term, 12);
}

/* --- placement -------------------------------------------------------------------------------- */

/* A request that ends well; answers the prefill node that it was given. */
static const char *place_and_finish(fixture_t *fx, node_t *prefills, node_t *decode)
{
    rtr_request_t *req = submit(fx, RTR_KIND_COMPLETION, WHOLE);
    const td_msg_work_t *w = &expect(fx, decode, TD_MSG_RESERVE)->u.work;
    const running_t run = {.ticket = w->ticket, .attempt = w->attempt};
    node_t *prefill = &prefills[strcmp(w->peer_id, td_bus_id(prefills[0].bus)) == 0 ? 0 : 1];

    answer_reserve(decode, w, TD_OK);
    (void)expect(fx, prefill, TD_MSG_START);
    finish_well(prefill, decode, run);
    wait_end(fx, req);
    assert_int_equal(req->http_status, 200);
    return td_bus_id(prefill->bus);
}

static void test_the_policy_may_change_while_running(void **state)
{
    fixture_t *fx = *state;
    rtr_tickets_t *tickets = rtr_loop_tickets(fx->loop);
    node_t *prefills = add_node(fx, TD_ROLE_PREFILL, "p1");
    node_t *second = add_node(fx, TD_ROLE_PREFILL, "p2");
    node_t *decode = add_node(fx, TD_ROLE_DECODE, "d1");
    rtr_request_t *held = make_request(fx, RTR_KIND_COMPLETION, WHOLE);
    running_t run;
    const char *first = NULL;

    assert_int_equal(rtr_tickets_policy(tickets), RTR_POLICY_KV_AWARE);
    assert_int_equal(rtr_loop_submit(fx->loop, rtr_request_ref(held)), TD_OK);
    run = start_attempt(fx, prefills, decode); /* it keeps p1 busy */
    assert_string_equal(place_and_finish(fx, prefills, decode), "p2");
    rtr_tickets_set_policy(tickets, RTR_POLICY_ROUND_ROBIN);
    assert_int_equal(rtr_tickets_policy(tickets), RTR_POLICY_ROUND_ROBIN);
    first = place_and_finish(fx, prefills, decode);
    assert_string_not_equal(place_and_finish(fx, prefills, decode), first);
    assert_string_equal(place_and_finish(fx, prefills, decode), first);
    finish_well(prefills, decode, run);
    wait_end(fx, held);
    rtr_request_unref(held);
    assert_non_null(second);
    assert_at_rest(fx);
}

static void test_what_legs_took_is_learned(void **state)
{
    fixture_t *fx = *state;
    node_t *prefill = add_node(fx, TD_ROLE_PREFILL, "p1");
    node_t *decode = add_node(fx, TD_ROLE_DECODE, "d1");
    const rtr_node_t *p = rtr_registry_node(rtr_loop_registry(fx->loop), 0);
    const rtr_node_t *d = rtr_registry_node(rtr_loop_registry(fx->loop), 1);
    rtr_request_t *req = submit(fx, RTR_KIND_COMPLETION, WHOLE);
    const uint64_t begin_ns = td_now_ns();
    const running_t run = start_attempt(fx, prefill, decode);
    td_msg_t end = {.type = TD_MSG_END,
                    .u.end = {.leg = TD_ROLE_PREFILL,
                              .usage = {.cached_local_tokens = 3},
                              .busy_ns = UINT64_MAX}}; /* more than it can have been */

    assert_int_equal(p->backlog.work.prompts, 1);
    assert_int_equal(p->backlog.work.tokens, 18);
    assert_int_equal(d->sequences, 1);
    assert_int_equal(d->decoding, 0);
    for (uint32_t i = 0; i < 17; i++) {
        send_token(decode, run.ticket, run.attempt, 0, i, "a", TD_FINISH_NONE);
    }
    end.u.end.ticket = run.ticket;
    end.u.end.attempt = run.attempt;
    send_to_router(prefill, &end);
    while (p->prefill_time.n < 1 || d->tbt.n < 1) {
        spin(fx, NULL);
    }
    assert_int_equal(d->decoding, 1);
    assert_true(d->tbt.n == 1);        /* the 16th token's */
    assert_true(d->tbt.xx[1][1] == 1); /* one sequence gave tokens */
    assert_true(p->prefill_time.n == 1);
    assert_true(p->prefill_time.xx[0][0] == 15 * 15); /* the node had three of the 18 */
    assert_true(p->prefill_time.weights[0] <= (double)(td_now_ns() - begin_ns));
    assert_int_equal(p->backlog.work.prompts, 0);
    send_token(decode, run.ticket, run.attempt, 0, 17, "b", TD_FINISH_STOP);
    send_end(decode, run.ticket, run.attempt, TD_OK);
    wait_end(fx, req);
    assert_at_rest(fx);
}

/* --- drafts ----------------------------------------------------------------------------------- */

#define TEXT_OF(n) "{\"prompt\":[" #n ",4,5,3],\"max_tokens\":5"

/* A request that ends well; of its drafts so many were accepted in every step. Answers what the
 * decode node was asked for. */
static td_msg_work_t serve(fixture_t *fx, const char *body, uint32_t accepted)
{
    node_t *prefill = &fx->nodes[0];
    node_t *decode = &fx->nodes[1];
    rtr_request_t *req = submit(fx, RTR_KIND_COMPLETION, body);
    const td_msg_work_t w = expect(fx, decode, TD_MSG_RESERVE)->u.work;
    td_msg_t end = {.type = TD_MSG_END,
                    .u.end = {.ticket = w.ticket, .attempt = w.attempt, .leg = TD_ROLE_DECODE}};
    td_msg_drafts_t *r = &end.u.end.drafts;

    answer_reserve(decode, &w, TD_OK);
    (void)expect(fx, prefill, TD_MSG_START);
    send_token(decode, w.ticket, w.attempt, 0, 0, "a", TD_FINISH_STOP);
    send_end(prefill, w.ticket, w.attempt, TD_OK);
    *r = (td_msg_drafts_t){.drafter = w.drafter, .k_max = w.k_max, .steps = 100, .tokens = 100};
    for (uint32_t i = 0; i < r->k_max; i++) {
        r->drafted[i] = 100;
        r->accepted[i] = i < accepted ? 100 : 0;
    }
    send_to_router(decode, &end);
    wait_end(fx, req);
    assert_int_equal(req->http_status, 200);
    assert_at_rest(fx);
    return w; /* borrowed parts of it are gone */
}

static void assert_drafts(td_msg_work_t got, uint32_t k_min, uint32_t k_max)
{
    assert_int_equal(got.drafter, TD_DRAFTER_MEMO);
    assert_int_equal(got.k_min, k_min);
    assert_int_equal(got.k_max, k_max);
}

static void open_drafts(fixture_t *fx)
{
    (void)add_node(fx, TD_ROLE_PREFILL, "p1");
    (void)add_node(fx, TD_ROLE_DECODE, "d1");
    fx->model.drafter_auto = true;
    fx->model.draft_max = TD_DRAFT_TOKENS_MAX;
}

static void test_drafts_are_chosen_by_what_they_were_worth(void **state)
{
    fixture_t *fx = *state;

    open_drafts(fx);
    assert_drafts(serve(fx, TEXT_OF(3) "}", 2), 0, 16);
    assert_drafts(serve(fx, TEXT_OF(4) "}", 0), 0, 2); /* that many were worth it */
    assert_drafts(serve(fx, TEXT_OF(5) ",\"cache_salt\":\"s\"}", 0), 0, 16);
    assert_drafts(serve(fx, TEXT_OF(6) ",\"cache_salt\":\"s\"}", 0), 0, 0);
    assert_drafts(serve(fx, TEXT_OF(6) ",\"cache_salt\":\"s\"}", 0), 0, 16); /* hot: unknown */
    assert_drafts(serve(fx, TEXT_OF(7) ",\"speculation\":{\"k\":5}}", 0), 5, 5);
    assert_string_equal(fx->req->draft, "memo k=5-5 learned plain");
    assert_drafts(serve(fx, TEXT_OF(8) ",\"speculation\":{\"drafter\":\"memo\"}}", 0), 0, 16);
    assert_string_equal(fx->req->draft, "memo k=0-16 asked plain");
}

/* A node's memory is a new router's; that of others, who cannot know, is not. */
static void test_drafts_of_the_past_are_remembered(void **state)
{
    fixture_t *fx = *state;
    td_msg_draft_past_t past = {
        .tenant = 77, .drafter = TD_DRAFTER_MEMO, .tokens = 1, .decode_s = 1};
    td_msg_t msg = {.type = TD_MSG_DRAFT_HISTORY, .u.draft_history = {.count = 1, .past = &past}};

    open_drafts(fx);
    for (uint32_t i = 0; i < TD_MSG_DRAFTS_MAX; i++) {
        past.steps[i] = past.drafted[i] = 80;
    }
    send_to_router(&fx->nodes[0], &msg); /* before what it sends of the request */
    assert_drafts(serve(fx, TEXT_OF(3) ",\"speculation\":{\"drafter\":\"auto\"}}", 16), 0, 16);
    past.tenant = serve(fx,
                        TEXT_OF(3) ",\"cache_salt\":\"s\","
                                   "\"speculation\":{\"drafter\":\"none\"}}",
                        0)
                      .tenant;
    assert_true(past.tenant != 0);
    for (uint32_t i = 0; i < TD_MSG_DRAFTS_MAX; i++) {
        past.steps[i] = past.drafted[i] = TD_DRAFT_STATS_STEPS;
    }
    assert_int_equal(td_metric_get(fx->metrics.drafts.entries), 1); /* the first request's */
    send_to_router(&fx->nodes[1], &msg);
    while (td_metric_get(fx->metrics.drafts.entries) < 2) {
        spin(fx, NULL);
    }
    assert_drafts(serve(fx, TEXT_OF(4) ",\"cache_salt\":\"s\"}", 0), 0, 0);
    assert_drafts(serve(fx, TEXT_OF(4) "}", 0), 0, 16);
}

int main(void)
{
#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        T(test_a_request_goes_through_both_legs),
        T(test_a_stream_begins_with_its_first_token),
        T(test_several_prompts_and_choices_have_one_answer),
        T(test_an_echo_with_logprobs_waits_for_the_prefill_node),
        T(test_without_nodes_503),
        T(test_a_busy_node_is_passed_over),
        T(test_a_full_cluster_queues_then_429),
        T(test_a_full_queue_refuses_at_once),
        T(test_a_full_queue_has_room_for_who_has_less_than_its_share),
        T(test_tenants_that_wait_take_turns),
        T(test_the_queue_moves_on_when_room_comes),
        T(test_a_busy_prefill_node_is_no_failure),
        T(test_a_failed_hand_off_is_tried_three_times_then_502),
        T(test_a_request_the_node_cannot_do_is_400),
        T(test_a_decode_death_before_the_first_token_goes_unnoticed),
        T(test_a_request_that_would_miss_its_objective_is_refused),
        T(test_a_node_that_fails_again_and_again_is_left_alone),
        T(test_i9_an_objective_ends_no_answer_that_has_begun),
        T(test_a_draining_node_gets_nothing_new),
        T(test_i9_a_stream_goes_on_behind_a_decode_death),
        T(test_i9_choices_that_ended_are_not_begun_again),
        T(test_i9_a_successor_may_fail_as_well),
        T(test_i9_a_token_ends_a_row_of_failures),
        T(test_i5_a_stream_that_nobody_takes_over_ends_with_an_error_event),
        T(test_i9_a_stream_waits_for_a_successor_that_does_not_answer),
        T(test_i9_a_stream_passes_over_a_successor_that_cannot_serve_it),
        T(test_i9_an_answer_is_whole_without_word_of_its_end),
        T(test_a_prefill_death_in_a_stream_goes_unnoticed),
        T(test_i9_a_whole_answer_goes_on_behind_a_decode_death),
        T(test_a_prefill_death_before_its_leg_is_over_is_retried),
        T(test_a_silent_node_is_dead_and_must_begin_a_new_life),
        T(test_i9_tickets_that_nodes_let_go_are_placed_again),
        T(test_tokens_out_of_order_end_the_attempt),
        T(test_a_client_gone_cancels_both_legs),
        T(test_i5_what_a_tenant_took_comes_back_on_every_way_out),
        T(test_a_client_that_does_not_read_is_cut_off),
        T(test_shutdown_ends_what_is_under_way),
        T(test_an_overdue_request_is_504),
        T(test_a_named_node_must_be_live),
        T(test_nodes_that_do_not_fit_are_refused),
        T(test_a_request_is_counted_with_what_its_mask_shows),
        T(test_a_request_is_counted_with_all_its_blocks),
        T(test_nodes_of_another_kv_codec_are_refused),
        T(test_a_store_with_another_secret_is_refused),
        T(test_an_id_in_use_is_refused),
        T(test_peers_are_told_and_one_master_named),
        T(test_f9_master_with_the_highest_term_is_named),
        T(test_the_policy_may_change_while_running),
        T(test_what_legs_took_is_learned),
        T(test_drafts_are_chosen_by_what_they_were_worth),
        T(test_drafts_of_the_past_are_remembered),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

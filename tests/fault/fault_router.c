/* Fails allocation 1, 2, 3... of everything between a body and its answer: each time the refusal
 * must say so, the answer must be untouched and nothing may leak. The JSON library allocates
 * through the same functions here. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_log.h"
#include "router/rtr_index.h"
#include "router/sim_sweep.h"
#include "router/rtr_request.h"
#include "router/rtr_tenants.h"
#include "tests/fuzz/gguf_build.h"

#define STEPS_MAX 20000u

typedef struct fixture {
    td_str_t file;
    td_gguf_t *gguf;
    td_tokenizer_t *tok;
    td_chat_t *chat;
    rtr_model_t model;
} fixture_t;

typedef td_status_t (*step_fn)(const fixture_t *fx);

static void sweep(const fixture_t *fx, step_fn step, uint64_t steps_min)
{
    td_status_t status = TD_ERR_NO_MEMORY;
    uint64_t nth = 0;

    while (status != TD_OK && nth < STEPS_MAX) {
        nth++;
        td_alloc_fail_at(nth);
        status = step(fx);
        td_alloc_fail_at(0);
        if (status != TD_OK) {
            assert_int_equal(status, TD_ERR_NO_MEMORY);
        }
    }
    assert_int_equal(status, TD_OK);
    assert_true(nth > steps_min);
}

static int setup(void **state)
{
    static fixture_t fx;

    fx = (fixture_t){0};
    *state = &fx;
    td_log_init("test", TD_LOG_LEVEL_ERROR);
    gb_tokenizer(&fx.file);
    if (td_gguf_open_bytes(fx.file.bytes, fx.file.len, &fx.gguf) != TD_OK ||
        td_tokenizer_create(fx.gguf, &fx.tok) != TD_OK ||
        td_chat_create(fx.gguf, &fx.chat) != TD_OK) {
        return -1;
    }
    fx.model = (rtr_model_t){.tok = fx.tok,
                             .chat = fx.chat,
                             .name = "tiny",
                             .fingerprint = "fp_1",
                             .context_max = 4096,
                             .allow_placement = true};
    return 0;
}

static int teardown(void **state)
{
    fixture_t *fx = *state;

    td_alloc_fail_at(0);
    td_chat_destroy(fx->chat);
    td_tokenizer_destroy(fx->tok);
    td_gguf_close(fx->gguf);
    td_str_fini(&fx->file);
    return 0;
}

static td_status_t parse(const fixture_t *fx, rtr_kind_t kind, const char *body)
{
    rtr_params_t params;
    rtr_error_t error;
    td_status_t status = TD_OK;

    status = rtr_api_parse(&fx->model, kind, body, strlen(body), &params, &error);
    if (status == TD_ERR_NO_MEMORY) {
        assert_int_equal(error.http, 500);
    }
    rtr_params_fini(&params);
    return status;
}

static td_status_t step_parse_chat(const fixture_t *fx)
{
    return parse(fx, RTR_KIND_CHAT,
                 "{\"messages\":[{\"role\":\"system\",\"content\":\"b\"},{\"role\":\"user\","
                 "\"content\":[{\"type\":\"text\",\"text\":\"a\"},{\"type\":\"text\",\"text\":"
                 "\"c\"}]}],\"stop\":[\"x\",\"y\"],\"logit_bias\":{\"3\":1},\"cache_salt\":\"s\"}");
}

static td_status_t step_parse_completion(const fixture_t *fx)
{
    return parse(fx, RTR_KIND_COMPLETION,
                 "{\"prompt\":[\"ab c\",[3,4,5]],\"echo\":true,\"logprobs\":2,\"stream\":true,"
                 "\"stream_options\":{\"include_usage\":true},\"tandem\":{\"decode\":\"d1\"}}");
}

static td_status_t step_parse_tokens(const fixture_t *fx)
{
    TD_TRY(parse(fx, RTR_KIND_TOKENIZE, "{\"prompt\":\"ab c\"}"));
    return parse(fx, RTR_KIND_DETOKENIZE, "{\"tokens\":[3,4,5,13]}");
}

static rtr_piece_t make_piece(void)
{
    static const uint32_t tokens[] = {GB_A, GB_B};
    static const float logprobs[] = {-1, -2};
    static const uint32_t counts[] = {1, 1};
    static const uint64_t hashes[] = {1, 2};

    return (rtr_piece_t){.tokens = tokens,
                         .count = 2,
                         .text = "ab",
                         .text_len = 2,
                         .logprobs = {.count = 2,
                                      .token_logprobs = logprobs,
                                      .top_counts = counts,
                                      .top_total = 2,
                                      .top_tokens = tokens,
                                      .top_logprobs = logprobs},
                         .hashes = hashes,
                         .hash_count = 2,
                         .finish = TD_FINISH_STOP};
}

/* What is there stays, and a failed part leaves no trace behind it. */
static td_status_t step_reply(const fixture_t *fx)
{
    rtr_head_t head = {.model = &fx->model,
                       .id = "x",
                       .want_logprobs = true,
                       .tandem = true,
                       .prefill_id = "p",
                       .decode_id = "d"};
    rtr_choice_view_t view = {.pieces = {make_piece()}, .piece_count = 1};
    td_msg_usage_t usage = {0};
    td_str_t out = {0};
    uint32_t offset = 0;
    td_status_t status = td_str_append_text(&out, "kept");

    if (status == TD_OK) {
        for (int kind = RTR_KIND_CHAT; status == TD_OK && kind <= RTR_KIND_COMPLETION; kind++) {
            size_t before = out.len;
            head.kind = (rtr_kind_t)kind;
            status = rtr_reply_full(&head, &view, 1, &usage, &out);
            assert_true(status == TD_OK || out.len == before);
        }
        if (status == TD_OK) {
            status = rtr_reply_chunk(&head, 0, false, view.pieces, 1, &offset, &out);
        }
        assert_memory_equal(out.bytes, "kept", 4);
        assert_int_equal(out.bytes[out.len], 0);
    }
    td_str_fini(&out);
    return status;
}

static td_status_t step_request(const fixture_t *fx)
{
    rtr_request_t *req = NULL;
    rtr_piece_t piece = make_piece();
    td_status_t status = rtr_request_create(RTR_KIND_CHAT, NULL, &req);
    (void)fx;

    assert_true((status == TD_OK) == (req != NULL));
    TD_TRY(status);
    req->params.prompt_count = 1;
    req->params.n = 2;
    status = rtr_request_open_choices(req);
    if (status == TD_OK) {
        status = rtr_choice_append(&req->choices[1], &piece);
    }
    if (status == TD_OK) {
        status = rtr_request_give(req, "data: x\n\n", 9);
        assert_true((status == TD_OK) == req->ready);
    }
    req->params.prompt_count = 1; /* the prompts themselves are none */
    rtr_request_unref(req);
    return status;
}

/* An answer that cannot be written still ends the request, once. */
static td_status_t step_request_fail(const fixture_t *fx)
{
    rtr_request_t *req = NULL;
    rtr_error_t error;
    td_status_t status = TD_OK;
    (void)fx;

    rtr_error_set(&error, 502, NULL, NULL, "x");
    TD_TRY(rtr_request_create(RTR_KIND_CHAT, NULL, &req));
    rtr_request_fail(req, RTR_OUTCOME_UPSTREAM_ERROR, &error, 0);
    assert_true(req->done && req->ready && rtr_request_ended(req));
    status = req->out.len > 0 ? TD_OK : TD_ERR_NO_MEMORY;
    rtr_request_unref(req);
    return status;
}

static td_status_t step_index(const fixture_t *fx)
{
    rtr_index_t *index = NULL;
    td_status_t status = rtr_index_create(16, 65, &index);
    (void)fx;

    assert_true((status == TD_OK) == (index != NULL));
    rtr_index_destroy(index);
    return status;
}

static td_status_t step_tenants(const fixture_t *fx)
{
    rtr_tenants_t *tenants = NULL;
    rtr_fair_t *fair = NULL;
    td_str_t text = {0};
    td_status_t status = rtr_tenants_create(&tenants);
    (void)fx;

    status = status == TD_OK ? rtr_tenants_queue(tenants, &fair) : status;
    status = status == TD_OK ? rtr_tenants_series(tenants, &text) : status;
    td_str_fini(&text);
    rtr_fair_destroy(fair);
    rtr_tenants_destroy(tenants);
    return status;
}

static td_status_t step_sim(const fixture_t *fx)
{
    static const char text[] =
        "{\"timestamp\":0,\"input_length\":9,\"output_length\":3,\"hash_ids\":[1,2,3]}\n"
        "{\"timestamp\":1,\"input_length\":9,\"output_length\":3,\"hash_ids\":[1,2,4]}\n";
    const sim_load_t load = {.rate_scale = 1};
    sim_config_t config = {
        .prefill_count = 2, .decode_count = 1, .node_cache_tokens = 8, .store_tokens = 8};
    sim_sweep_t sweep = {.prefill = {1, 2, 1}, .decode = {1, 1, 1}, .share = 0.5};
    sim_trace_t recorded = {0};
    sim_trace_t trace = {0};
    double bound = 0;
    char why[SIM_WHY_CHARS_MAX + 1] = "";
    td_status_t status = sim_trace_parse(text, strlen(text), 4, &recorded, why);
    (void)fx;

    assert_int_equal(sim_model_preset("smollm2-135m-2cores", &config.model), TD_OK);
    if (status == TD_OK) {
        status = sim_trace_shape(&recorded, &load, &trace);
    }
    if (status == TD_OK) {
        status = sim_trace_bound(&trace, &bound);
    }
    if (status == TD_OK) {
        status = sim_sweep_run(&sweep, &config, &trace, NULL, NULL);
    }
    assert_true(status == TD_OK || status == TD_ERR_NO_MEMORY);
    sim_sweep_fini(&sweep);
    sim_trace_fini(&trace);
    sim_trace_fini(&recorded);
    return status;
}

#define SWEEP(name, least)                                                                         \
    static void test_##name##_survives_lack_of_memory(void **state)                                \
    {                                                                                              \
        sweep(*state, step_##name, least);                                                         \
    }
SWEEP(parse_chat, 10)
SWEEP(parse_completion, 8)
SWEEP(parse_tokens, 6)
SWEEP(reply, 3)
SWEEP(request, 8)
SWEEP(request_fail, 1)
SWEEP(index, 10)
SWEEP(tenants, 4)
SWEEP(sim, 25)

int main(void)
{
#define T(name)                                                                                    \
    cmocka_unit_test_setup_teardown(test_##name##_survives_lack_of_memory, setup, teardown)
    const struct CMUnitTest tests[] = {
        T(parse_chat), T(parse_completion), T(parse_tokens), T(reply), T(request), T(request_fail),
        T(index),      T(tenants),          T(sim),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/td_base.h"
#include "router/rtr_api.h"
#include "tests/fuzz/gguf_build.h"

#define CONTEXT_MAX 64u

typedef struct fixture {
    td_str_t file;
    td_gguf_t *gguf;
    td_tokenizer_t *tok;
    td_chat_t *chat;
    rtr_model_t model;
    rtr_params_t params;
    rtr_error_t error;
} fixture_t;

static int setup(void **state)
{
    static fixture_t fx;

    fx = (fixture_t){0};
    *state = &fx;
    gb_tokenizer(&fx.file);
    if (td_gguf_open_bytes(fx.file.bytes, fx.file.len, &fx.gguf) != TD_OK ||
        td_tokenizer_create(fx.gguf, &fx.tok) != TD_OK ||
        td_chat_create(fx.gguf, &fx.chat) != TD_OK) {
        return -1;
    }
    fx.model =
        (rtr_model_t){.tok = fx.tok, .chat = fx.chat, .name = "tiny", .context_max = CONTEXT_MAX};
    return 0;
}

static int teardown(void **state)
{
    fixture_t *fx = *state;

    rtr_params_fini(&fx->params);
    td_chat_destroy(fx->chat);
    td_tokenizer_destroy(fx->tok);
    td_gguf_close(fx->gguf);
    td_str_fini(&fx->file);
    return 0;
}

static td_status_t parse(fixture_t *fx, rtr_kind_t kind, const char *body)
{
    rtr_params_fini(&fx->params);
    return rtr_api_parse(&fx->model, kind, body, strlen(body), &fx->params, &fx->error);
}

static rtr_params_t *accept(fixture_t *fx, rtr_kind_t kind, const char *body)
{
    if (parse(fx, kind, body) != TD_OK) {
        fail_msg("%s: %s", body, fx->error.message);
    }
    return &fx->params;
}

#define CHAT(rest) "{\"messages\":[{\"role\":\"user\",\"content\":\"ab c\"}]" rest "}"
#define TEXT(rest) "{\"prompt\":\"ab c\"" rest "}"

static void test_api_defaults(void **state)
{
    const rtr_params_t *p = accept(*state, RTR_KIND_CHAT, CHAT(""));

    assert_int_equal(p->prompt_count, 1);
    assert_true(p->prompts[0].count > 5);
    assert_int_equal(p->prompts[0].max_tokens, CONTEXT_MAX - p->prompts[0].count);
    assert_int_equal(p->n, 1);
    assert_true(p->temperature == 1 && p->top_p == 1 && p->min_p == 0);
    assert_true(p->repetition_penalty == 1 && p->top_k == 0);
    assert_true(p->skip_special && !p->stream && !p->want_logprobs && !p->ignore_eos);
}

static void test_api_reads_every_field(void **state)
{
    const rtr_params_t *p = accept(
        *state, RTR_KIND_COMPLETION,
        TEXT(",\"model\":\"tiny\",\"n\":3,\"max_tokens\":7,\"min_tokens\":2,\"priority\":-3,"
             "\"temperature\":0.5,"
             "\"top_p\":0.9,\"top_k\":40,\"min_p\":0.1,\"presence_penalty\":-1,"
             "\"frequency_penalty\":1.5,\"repetition_penalty\":1.25,\"logit_bias\":{\"3\":-100,"
             "\"4\":2.5},\"seed\":-3,\"stop\":[\"x\",\"yz\"],\"include_stop_str_in_output\":true,"
             "\"ignore_eos\":true,\"skip_special_tokens\":false,\"logprobs\":0,\"echo\":true,"
             "\"stream\":true,\"stream_options\":{\"include_usage\":true},\"cache_salt\":\"me\","
             "\"user\":\"u\",\"metadata\":{},\"store\":false,\"never_heard_of\":[1]"));

    assert_int_equal(p->n, 3);
    assert_int_equal(p->prompts[0].max_tokens, 7);
    assert_int_equal(p->min_tokens, 2);
    assert_int_equal(p->priority, -3);
    assert_true(p->temperature == 0.5f && p->top_p == 0.9f && p->top_k == 40);
    assert_true(p->min_p == 0.1f && p->presence_penalty == -1 && p->frequency_penalty == 1.5f);
    assert_true(p->repetition_penalty == 1.25f);
    assert_int_equal(p->bias_count, 2);
    assert_int_equal(p->bias_tokens[0], 3);
    assert_true(p->bias_values[0] == -100 && p->bias_values[1] == 2.5f);
    assert_true(p->seed == (uint64_t)-3);
    assert_int_equal(p->stop_count, 2);
    assert_memory_equal(p->stops[1].at, "yz", 2);
    assert_true(p->include_stop && p->ignore_eos && !p->skip_special);
    assert_true(p->want_logprobs && p->top_logprobs == 0 && p->echo);
    assert_true(p->stream && p->include_usage);
    assert_string_equal(p->cache_salt.bytes, "me");
    assert_string_equal(p->prompts[0].text.bytes, "ab c");
}

static void test_api_prompt_forms(void **state)
{
    const rtr_params_t *p = accept(*state, RTR_KIND_COMPLETION, "{\"prompt\":[\"ab\",\"c\"]}");

    assert_int_equal(p->prompt_count, 2);
    assert_int_equal(p->prompts[0].tokens[0], GB_AB);
    p = accept(*state, RTR_KIND_COMPLETION, "{\"prompt\":[3,4],\"echo\":true}");
    assert_int_equal(p->prompt_count, 1);
    assert_int_equal(p->prompts[0].count, 2);
    assert_string_equal(p->prompts[0].text.bytes, "ab");
    p = accept(*state, RTR_KIND_COMPLETION, "{\"prompt\":[[3],[4,5],[5]]}");
    assert_int_equal(p->prompt_count, 3);
    assert_int_equal(p->prompts[1].tokens[1], GB_C);
}

static void test_api_message_text_is_never_special(void **state)
{
    static const char body[] =
        "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"a\"},"
        "{\"type\":\"text\",\"text\":\"<|im_end|>\"}]},{\"role\":\"assistant\",\"content\":null},"
        "{\"role\":\"developer\",\"content\":\"b\"}]}";
    const rtr_params_t *p = accept(*state, RTR_KIND_CHAT, body);
    uint32_t ends = 0;

    for (uint32_t i = 0; i < p->prompts[0].count; i++) {
        ends += p->prompts[0].tokens[i] == GB_IM_END;
    }
    assert_int_equal(ends, 4); /* three messages and the template's default system message */
}

static void test_api_temperature_zero_and_null_fields(void **state)
{
    const rtr_params_t *p =
        accept(*state, RTR_KIND_CHAT,
               CHAT(",\"temperature\":0,\"max_completion_tokens\":5,\"stop\":null,\"n\":null,"
                    "\"tools\":[],\"response_format\":{\"type\":\"text\"},\"top_k\":-1,"
                    "\"logprobs\":true,\"top_logprobs\":20,\"max_tokens\":null,\"n\":1.0"));
    assert_true(p->temperature == 0);
    assert_int_equal(p->prompts[0].max_tokens, 5);
    assert_int_equal(p->top_logprobs, 20);
    p = accept(*state, RTR_KIND_CHAT, CHAT(",\"temperature\":1e-9"));
    assert_true(p->temperature == 0);
}

static void test_api_seeds_are_drawn_when_absent(void **state)
{
    uint64_t first = accept(*state, RTR_KIND_CHAT, CHAT(""))->seed;
    assert_true(first != accept(*state, RTR_KIND_CHAT, CHAT(""))->seed);
}

static void test_api_tokenize_and_detokenize(void **state)
{
    const rtr_params_t *p = accept(*state, RTR_KIND_TOKENIZE, "{\"prompt\":\"abc<|im_end|>\"}");

    assert_int_equal(p->prompts[0].count, 2);
    assert_int_equal(p->prompts[0].tokens[1], GB_IM_END);
    p = accept(*state, RTR_KIND_TOKENIZE, CHAT(",\"add_generation_prompt\":false"));
    assert_true(p->prompts[0].count > 5);
    p = accept(*state, RTR_KIND_DETOKENIZE, "{\"tokens\":[9,1]}");
    assert_string_equal(p->prompts[0].text.bytes, "abc<|im_end|>");
    p = accept(*state, RTR_KIND_DETOKENIZE, "{\"tokens\":[]}");
    assert_int_equal(p->prompts[0].text.len, 0);
}

typedef struct refusal {
    rtr_kind_t kind;
    const char *body;
    int http;
    const char *param;
    const char *says;
} refusal_t;

static const refusal_t refusals[] = {
    {RTR_KIND_CHAT, "", 400, "", "not valid JSON"},
    {RTR_KIND_CHAT, "{\"messages\":", 400, "", "line 1, column 12"},
    {RTR_KIND_CHAT, "[]", 400, "", "must be a JSON object, got an array"},
    {RTR_KIND_CHAT, "{}", 400, "messages", "missing"},
    {RTR_KIND_CHAT, "{\"messages\":[]}", 400, "messages", "got 0"},
    {RTR_KIND_CHAT, "{\"messages\":\"hi\"}", 400, "messages", "got a string"},
    {RTR_KIND_CHAT, "{\"messages\":[1]}", 400, "messages", "messages[0] must be an object"},
    {RTR_KIND_CHAT, "{\"messages\":[{\"content\":\"a\"}]}", 400, "messages", "role"},
    {RTR_KIND_CHAT, "{\"messages\":[{\"role\":\"boss\",\"content\":\"a\"}]}", 400, "messages",
     "got \"boss\""},
    {RTR_KIND_CHAT, "{\"messages\":[{\"role\":\"user\"}]}", 400, "messages", "got nothing"},
    {RTR_KIND_CHAT, "{\"messages\":[{\"role\":\"user\",\"content\":3}]}", 400, "messages",
     "got an integer"},
    {RTR_KIND_CHAT, "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"image_url\"}]}]}",
     400, "messages", "image_url"},
    {RTR_KIND_CHAT,
     "{\"messages\":[{\"role\":\"assistant\",\"content\":\"\",\"tool_calls\":[{}]}]}", 400,
     "messages", "tool_calls"},
    {RTR_KIND_CHAT, CHAT(",\"model\":\"gpt\""), 404, "model", "`gpt` does not exist"},
    {RTR_KIND_CHAT, CHAT(",\"model\":3"), 400, "model", "got an integer"},
    {RTR_KIND_CHAT, CHAT(",\"temperature\":\"hot\""), 400, "temperature", "got a string"},
    {RTR_KIND_CHAT, CHAT(",\"temperature\":2.5"), 400, "temperature", "got 2.5"},
    {RTR_KIND_CHAT, CHAT(",\"top_p\":0"), 400, "top_p", "above 0"},
    {RTR_KIND_CHAT, CHAT(",\"min_p\":1"), 400, "min_p", "below 1"},
    {RTR_KIND_CHAT, CHAT(",\"presence_penalty\":3"), 400, "presence_penalty", "got 3"},
    {RTR_KIND_CHAT, CHAT(",\"repetition_penalty\":0"), 400, "repetition_penalty", "above 0"},
    {RTR_KIND_CHAT, CHAT(",\"top_k\":-2"), 400, "top_k", "got -2"},
    {RTR_KIND_CHAT, CHAT(",\"n\":0"), 400, "n", "got 0"},
    {RTR_KIND_CHAT, CHAT(",\"n\":17"), 400, "n", "between 1 and 16"},
    {RTR_KIND_CHAT, CHAT(",\"n\":1.5"), 400, "n", "got a number"},
    {RTR_KIND_CHAT, CHAT(",\"max_tokens\":0"), 400, "max_tokens", "got 0"},
    {RTR_KIND_CHAT, CHAT(",\"max_completion_tokens\":-1"), 400, "max_completion_tokens", "got -1"},
    {RTR_KIND_CHAT, CHAT(",\"max_tokens\":2,\"min_tokens\":3"), 400, "min_tokens", "got 3"},
    {RTR_KIND_CHAT, CHAT(",\"min_tokens\":1000"), 400, "min_tokens", "context"},
    {RTR_KIND_CHAT, CHAT(",\"seed\":1.5"), 400, "seed", "an integer"},
    {RTR_KIND_CHAT, CHAT(",\"stream\":1"), 400, "stream", "a boolean"},
    {RTR_KIND_CHAT, CHAT(",\"stream_options\":{}"), 400, "stream_options", "stream to be true"},
    {RTR_KIND_CHAT, CHAT(",\"stream\":true,\"stream_options\":{\"include_usage\":1}"), 400,
     "include_usage", "a boolean"},
    {RTR_KIND_CHAT, CHAT(",\"stop\":3"), 400, "stop", "got an integer"},
    {RTR_KIND_CHAT, CHAT(",\"stop\":[\"a\",3]"), 400, "stop", "got an integer in it"},
    {RTR_KIND_CHAT, CHAT(",\"stop\":\"\""), 400, "stop", "got 0"},
    {RTR_KIND_CHAT,
     CHAT(",\"stop\":[\"a\",\"a\",\"a\",\"a\",\"a\",\"a\",\"a\",\"a\",\"a\",\"a\",\"a\",\"a\","
          "\"a\",\"a\",\"a\",\"a\",\"a\"]"),
     400, "stop", "at most 16"},
    {RTR_KIND_CHAT, CHAT(",\"logit_bias\":[]"), 400, "logit_bias", "got an array"},
    {RTR_KIND_CHAT, CHAT(",\"logit_bias\":{\"14\":1}"), 400, "logit_bias", "0 to 13"},
    {RTR_KIND_CHAT, CHAT(",\"logit_bias\":{\"x\":1}"), 400, "logit_bias", "got \"x\""},
    {RTR_KIND_CHAT, CHAT(",\"logit_bias\":{\"99999999999999999999\":1}"), 400, "logit_bias",
     "0 to 13"},
    {RTR_KIND_CHAT, CHAT(",\"logit_bias\":{\"1\":101}"), 400, "logit_bias", "got 101"},
    {RTR_KIND_CHAT, CHAT(",\"logit_bias\":{\"1\":\"a\"}"), 400, "logit_bias", "got a string"},
    {RTR_KIND_CHAT, CHAT(",\"logprobs\":1"), 400, "logprobs", "a boolean"},
    {RTR_KIND_CHAT, CHAT(",\"top_logprobs\":2"), 400, "top_logprobs", "logprobs to be true"},
    {RTR_KIND_CHAT, CHAT(",\"logprobs\":true,\"top_logprobs\":21"), 400, "top_logprobs", "21"},
    {RTR_KIND_CHAT, CHAT(",\"tools\":[{}]"), 400, "tools", "not supported"},
    {RTR_KIND_CHAT, CHAT(",\"functions\":[{}]"), 400, "functions", "not supported"},
    {RTR_KIND_CHAT, CHAT(",\"tool_choice\":\"required\""), 400, "tool_choice", "not supported"},
    {RTR_KIND_CHAT, CHAT(",\"response_format\":{\"type\":\"json_object\"}"), 400, "response_format",
     "not supported"},
    {RTR_KIND_CHAT, CHAT(",\"cache_salt\":1"), 400, "cache_salt", "a string"},
    {RTR_KIND_CHAT, CHAT(",\"tandem\":{}"), 400, "tandem", "--allow-placement"},
    {RTR_KIND_COMPLETION, "{}", 400, "prompt", "missing"},
    {RTR_KIND_COMPLETION, "{\"prompt\":3}", 400, "prompt", "got an integer"},
    {RTR_KIND_COMPLETION, "{\"prompt\":\"\"}", 400, "prompt", "no tokens"},
    {RTR_KIND_COMPLETION, "{\"prompt\":[]}", 400, "prompt", "empty array"},
    {RTR_KIND_COMPLETION, "{\"prompt\":[[]]}", 400, "prompt", "no tokens"},
    {RTR_KIND_COMPLETION, "{\"prompt\":[3,\"a\"]}", 400, "prompt", "got a string at index 1"},
    {RTR_KIND_COMPLETION, "{\"prompt\":[\"a\",3]}", 400, "prompt", "got an integer at index 1"},
    {RTR_KIND_COMPLETION, "{\"prompt\":[14]}", 400, "prompt", "0 to 13"},
    {RTR_KIND_COMPLETION, "{\"prompt\":[-1]}", 400, "prompt", "got -1"},
    {RTR_KIND_COMPLETION, TEXT(",\"logprobs\":true"), 400, "logprobs", "got a boolean"},
    {RTR_KIND_COMPLETION, TEXT(",\"logprobs\":21"), 400, "logprobs", "got 21"},
    {RTR_KIND_COMPLETION, TEXT(",\"suffix\":\"a\""), 400, "suffix", "not supported"},
    {RTR_KIND_COMPLETION, TEXT(",\"best_of\":2"), 400, "best_of", "got 2"},
    {RTR_KIND_COMPLETION, TEXT(",\"speculation\":3"), 400, "speculation", "an object"},
    {RTR_KIND_COMPLETION, TEXT(",\"speculation\":{\"drafter\":3}"), 400, "speculation",
     "must be a string"},
    {RTR_KIND_COMPLETION, TEXT(",\"speculation\":{\"drafter\":\"oracle\"}"), 400, "speculation",
     TD_DRAFTER_NAMES ", got \"oracle\""},
    {RTR_KIND_COMPLETION, TEXT(",\"speculation\":{\"k\":17}"), 400, "k", "got 17"},
    {RTR_KIND_CHAT, CHAT(",\"prediction\":\"ab\""), 400, "prediction", "must be {"},
    {RTR_KIND_CHAT, CHAT(",\"prediction\":{\"type\":\"content\",\"content\":[3]}"), 400,
     "prediction", "content[0] must be {"},
    {RTR_KIND_CHAT,
     CHAT(",\"prediction\":{\"type\":\"content\",\"content\":[{\"type\":\"image\",\"text\":"
          "\"ab\"}]}"),
     400, "prediction", "content[0] must be {"},
    {RTR_KIND_CHAT,
     "{\"messages\":[{\"role\":\"user\",\"content\":\"ab\",\"tool_calls\":{\"a\":1}}]}", 400,
     "messages", "tool_calls"},
    {RTR_KIND_COMPLETION, TEXT(",\"echo\":\"yes\""), 400, "echo", "a boolean"},
    {RTR_KIND_TOKENIZE, "{}", 400, "prompt", "prompt or messages"},
    {RTR_KIND_TOKENIZE, "{\"prompt\":[\"a\"]}", 400, "prompt", "got an array"},
    {RTR_KIND_DETOKENIZE, "{}", 400, "tokens", "missing"},
    {RTR_KIND_DETOKENIZE, "{\"tokens\":\"a\"}", 400, "tokens", "got a string"},
    {RTR_KIND_DETOKENIZE, "{\"tokens\":[14]}", 400, "tokens", "got 14"},
};

static void test_api_refusals_name_the_field_and_what_came(void **state)
{
    fixture_t *fx = *state;

    for (size_t i = 0; i < TD_ARRAY_LEN(refusals); i++) {
        const refusal_t *r = &refusals[i];
        td_status_t status = parse(fx, r->kind, r->body);
        if (status != TD_ERR_INVALID || fx->error.http != r->http ||
            strcmp(fx->error.param, r->param) != 0 || strstr(fx->error.message, r->says) == NULL) {
            fail_msg("%s -> %d %d \"%s\" \"%s\"", r->body, (int)status, fx->error.http,
                     fx->error.param, fx->error.message);
        }
        assert_string_equal(fx->error.type, "invalid_request_error");
    }
}

static void test_api_prompt_over_the_context_says_both_numbers(void **state)
{
    fixture_t *fx = *state;
    td_str_t body = {0};

    assert_int_equal(td_str_append_text(&body, "{\"prompt\":[3"), TD_OK);
    for (uint32_t i = 1; i < CONTEXT_MAX; i++) {
        assert_int_equal(td_str_append_text(&body, ",3"), TD_OK);
    }
    assert_int_equal(td_str_append_text(&body, "]}"), TD_OK);
    assert_int_equal(parse(fx, RTR_KIND_COMPLETION, body.bytes), TD_ERR_INVALID);
    assert_string_equal(fx->error.code, "context_length_exceeded");
    assert_non_null(strstr(fx->error.message, "is 64 tokens, and your prompt has 64"));
    td_str_fini(&body);
}

static void test_api_max_tokens_is_clamped_to_the_context(void **state)
{
    const rtr_params_t *p =
        accept(*state, RTR_KIND_COMPLETION, "{\"prompt\":[3,3,3,3],\"max_tokens\":100000}");
    assert_int_equal(p->prompts[0].max_tokens, CONTEXT_MAX - 4);
}

static void test_api_placement_needs_permission(void **state)
{
    fixture_t *fx = *state;
    const rtr_params_t *p = NULL;

    fx->model.allow_placement = true;
    p = accept(fx, RTR_KIND_CHAT, CHAT(",\"tandem\":{\"prefill\":\"p1\",\"decode\":\"d2\"}"));
    assert_string_equal(p->place_prefill, "p1");
    assert_string_equal(p->place_decode, "d2");
    assert_int_equal(parse(fx, RTR_KIND_CHAT, CHAT(",\"tandem\":{\"prefill\":3}")), TD_ERR_INVALID);
    assert_int_equal(parse(fx, RTR_KIND_CHAT, CHAT(",\"tandem\":[]")), TD_ERR_INVALID);
}

static void test_api_speculation_is_a_wish_within_limits(void **state)
{
    fixture_t *fx = *state;
    const rtr_params_t *p = NULL;

    p = accept(fx, RTR_KIND_CHAT, CHAT(",\"speculation\":{\"drafter\":\"prompt_lookup\"}"));
    assert_true(p->drafter == TD_DRAFTER_NONE && p->k_max == 0); /* the server allows no drafts */
    fx->model.draft_max = 6;
    p = accept(fx, RTR_KIND_CHAT, CHAT(""));
    assert_true(p->drafter == TD_DRAFTER_NONE && p->k_max == 0);
    fx->model.drafter = TD_DRAFTER_PROMPT_LOOKUP;
    p = accept(fx, RTR_KIND_CHAT, CHAT(""));
    assert_true(p->drafter == TD_DRAFTER_PROMPT_LOOKUP && p->k_min == 0 && p->k_max == 6);
    p = accept(fx, RTR_KIND_COMPLETION, TEXT(",\"speculation\":{\"k\":4}"));
    assert_true(p->drafter == TD_DRAFTER_PROMPT_LOOKUP && p->k_min == 4 && p->k_max == 4);
    p = accept(fx, RTR_KIND_COMPLETION, TEXT(",\"speculation\":{\"drafter\":\"auto\",\"k\":16}"));
    assert_true(p->k_min == 6 && p->k_max == 6);
    p = accept(fx, RTR_KIND_COMPLETION, TEXT(",\"speculation\":{\"drafter\":\"none\"}"));
    assert_true(p->drafter == TD_DRAFTER_NONE && p->k_max == 0);
    p = accept(fx, RTR_KIND_COMPLETION, TEXT(",\"speculation\":{\"k\":0}"));
    assert_true(p->drafter == TD_DRAFTER_NONE && p->k_max == 0);
    assert_int_equal(p->prediction_tokens, 0);
}

static void test_api_prediction_becomes_tokens(void **state)
{
    fixture_t *fx = *state;
    const rtr_params_t *p = NULL;

    p = accept(fx, RTR_KIND_CHAT,
               CHAT(",\"prediction\":{\"type\":\"content\",\"content\":\"ab\"}"));
    assert_int_equal(p->prediction_tokens, 1);
    assert_int_equal(p->prediction[0], GB_AB);
    p = accept(fx, RTR_KIND_CHAT,
               CHAT(",\"prediction\":{\"type\":\"content\",\"content\":[{\"type\":\"text\","
                    "\"text\":\"a\"},{\"type\":\"text\",\"text\":\"b\"}]}"));
    assert_int_equal(p->prediction_tokens, 1);
    assert_int_equal(p->prediction[0], GB_AB);
    p = accept(fx, RTR_KIND_CHAT, CHAT(",\"prediction\":{\"type\":\"content\",\"content\":\"\"}"));
    assert_int_equal(p->prediction_tokens, 0);
}

static void test_api_error_types_follow_the_status(void **state)
{
    rtr_error_t error;
    (void)state;

    rtr_error_set(&error, 401, NULL, NULL, "x");
    assert_string_equal(error.type, "authentication_error");
    rtr_error_set(&error, 429, NULL, NULL, "x");
    assert_string_equal(error.type, "rate_limit_error");
    rtr_error_set(&error, 502, NULL, NULL, "x");
    assert_string_equal(error.type, "server_error");
}

int main(void)
{
#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        T(test_api_defaults),
        T(test_api_reads_every_field),
        T(test_api_prompt_forms),
        T(test_api_message_text_is_never_special),
        T(test_api_temperature_zero_and_null_fields),
        T(test_api_seeds_are_drawn_when_absent),
        T(test_api_tokenize_and_detokenize),
        T(test_api_refusals_name_the_field_and_what_came),
        T(test_api_prompt_over_the_context_says_both_numbers),
        T(test_api_max_tokens_is_clamped_to_the_context),
        T(test_api_placement_needs_permission),
        T(test_api_speculation_is_a_wish_within_limits),
        T(test_api_prediction_becomes_tokens),
        T(test_api_error_types_follow_the_status),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

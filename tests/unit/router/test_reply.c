#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <jansson.h>
#include <math.h>
#include <string.h>

#include "router/rtr_reply.h"
#include "tests/fuzz/gguf_build.h"

typedef struct fixture {
    td_str_t file;
    td_gguf_t *gguf;
    td_tokenizer_t *tok;
    rtr_model_t model;
    rtr_head_t head;
    td_str_t out;
    json_t *json;
} fixture_t;

static int setup(void **state)
{
    static fixture_t fx;

    fx = (fixture_t){0};
    *state = &fx;
    gb_tokenizer(&fx.file);
    if (td_gguf_open_bytes(fx.file.bytes, fx.file.len, &fx.gguf) != TD_OK ||
        td_tokenizer_create(fx.gguf, &fx.tok) != TD_OK) {
        return -1;
    }
    fx.model = (rtr_model_t){
        .tok = fx.tok, .name = "tiny", .fingerprint = "fp_01", .context_max = 64, .created_s = 7};
    fx.head = (rtr_head_t){.model = &fx.model,
                           .kind = RTR_KIND_CHAT,
                           .id = "chatcmpl-1",
                           .created_s = 9,
                           .prefill_id = "p1",
                           .decode_id = "d1"};
    return 0;
}

static int teardown(void **state)
{
    fixture_t *fx = *state;
    json_decref(fx->json);
    td_str_fini(&fx->out);
    td_tokenizer_destroy(fx->tok);
    td_gguf_close(fx->gguf);
    td_str_fini(&fx->file);
    return 0;
}

/* Parses what was written, after `skip` bytes of event syntax. */
static const json_t *read_json(fixture_t *fx, size_t skip)
{
    json_error_t error;
    json_decref(fx->json);
    fx->json = json_loads(fx->out.bytes + skip, JSON_REJECT_DUPLICATES, &error);
    if (fx->json == NULL) {
        fail_msg("%s in %s", error.text, fx->out.bytes);
    }
    return fx->json;
}

static const json_t *at(const json_t *value, const char *path)
{
    char step[64];
    while (*path != '\0') {
        size_t len = strcspn(path, ".");
        memcpy(step, path, len);
        step[len] = '\0';
        value = json_is_array(value) ? json_array_get(value, (size_t)(step[0] - '0'))
                                     : json_object_get(value, step);
        path += len + (path[len] == '.');
    }
    return value;
}

static void assert_text(const json_t *value, const char *path, const char *want)
{
    if (json_string_value(at(value, path)) == NULL) {
        fail_msg("no text at %s", path);
    }
    assert_string_equal(json_string_value(at(value, path)), want);
}

static const uint32_t tokens[] = {GB_AB, GB_C3, GB_A9};
static const float logprobs[] = {-0.5f, -INFINITY, -2};
static const uint32_t top_counts[] = {2, 1, 2};
static const uint32_t top_tokens[] = {GB_AB, GB_A, GB_C3, GB_C3, GB_A9};
static const float top_logprobs[] = {-0.5f, -1, -0.25f, -1, -2};
static const uint64_t hashes[] = {1, 0xdeadbeefcafef00dull, 3};

static rtr_piece_t piece(void)
{
    return (rtr_piece_t){.tokens = tokens,
                         .count = 3,
                         .text = "ab\xc3\xa9",
                         .text_len = 4,
                         .logprobs = {.count = 3,
                                      .token_logprobs = logprobs,
                                      .top_counts = top_counts,
                                      .top_total = 5,
                                      .top_tokens = top_tokens,
                                      .top_logprobs = top_logprobs},
                         .hashes = hashes,
                         .hash_count = 3,
                         .finish = TD_FINISH_STOP};
}

static void test_reply_chat_full(void **state)
{
    fixture_t *fx = *state;
    rtr_choice_view_t view = {.pieces = {piece()}, .piece_count = 1};
    td_msg_usage_t usage = {.prompt_tokens = 5,
                            .completion_tokens = 3,
                            .cached_local_tokens = 2,
                            .cached_store_tokens = 1,
                            .accepted_draft_tokens = 2,
                            .rejected_draft_tokens = 9};
    const json_t *json = NULL;

    fx->head.want_logprobs = true;
    fx->head.tandem = true;
    assert_int_equal(rtr_reply_full(&fx->head, &view, 1, &usage, &fx->out), TD_OK);
    json = read_json(fx, 0);
    assert_text(json, "id", "chatcmpl-1");
    assert_text(json, "object", "chat.completion");
    assert_text(json, "model", "tiny");
    assert_text(json, "system_fingerprint", "fp_01");
    assert_text(json, "choices.0.message.role", "assistant");
    assert_text(json, "choices.0.message.content", "ab\xc3\xa9");
    assert_text(json, "choices.0.finish_reason", "stop");
    assert_text(json, "choices.0.logprobs.content.0.token", "ab");
    assert_int_equal(json_integer_value(at(json, "choices.0.logprobs.content.0.bytes.1")), 'b');
    assert_int_equal(json_array_size(at(json, "choices.0.logprobs.content.0.top_logprobs")), 2);
    assert_text(json, "choices.0.logprobs.content.1.token", "\xef\xbf\xbd");
    assert_int_equal(json_integer_value(at(json, "choices.0.logprobs.content.1.bytes.0")), 0xc3);
    assert_true(json_number_value(at(json, "choices.0.logprobs.content.1.logprob")) == -9999);
    assert_int_equal(json_integer_value(at(json, "usage.total_tokens")), 8);
    assert_int_equal(json_integer_value(at(json, "usage.prompt_tokens_details.cached_tokens")), 3);
    assert_int_equal(
        json_integer_value(at(json, "usage.completion_tokens_details.accepted_prediction_tokens")),
        2);
    assert_int_equal(
        json_integer_value(at(json, "usage.completion_tokens_details.rejected_prediction_tokens")),
        9);
    assert_text(json, "tandem.prefill", "p1");
    assert_text(json, "tandem.logits_xxh.0.1", "deadbeefcafef00d");
    assert_text(json, "tandem.logits_xxh.0.0", "0000000000000001");
}

static void test_reply_completion_with_echo_and_logprobs(void **state)
{
    static const uint32_t prompt[] = {GB_A, GB_SPACE_A};
    static const float prompt_logprobs[] = {-77, -3};
    fixture_t *fx = *state;
    rtr_piece_t echo = {.tokens = prompt,
                        .count = 2,
                        .text = "a a",
                        .text_len = 3,
                        .logprobs = {.count = 2, .token_logprobs = prompt_logprobs},
                        .is_prompt = true};
    rtr_choice_view_t views[2] = {{.pieces = {echo, piece()}, .piece_count = 2},
                                  {.pieces = {echo, piece()}, .piece_count = 2}};
    td_msg_usage_t usage = {0};
    const json_t *json = NULL;

    fx->head.kind = RTR_KIND_COMPLETION;
    fx->head.want_logprobs = true;
    views[1].pieces[1].finish = TD_FINISH_LENGTH;
    assert_int_equal(rtr_reply_full(&fx->head, views, 2, &usage, &fx->out), TD_OK);
    json = read_json(fx, 0);
    assert_text(json, "object", "text_completion");
    assert_text(json, "choices.0.text", "a aab\xc3\xa9");
    assert_text(json, "choices.1.finish_reason", "length");
    assert_int_equal(json_array_size(at(json, "choices.0.logprobs.tokens")), 5);
    assert_text(json, "choices.0.logprobs.tokens.1", " a");
    assert_true(json_is_null(at(json, "choices.0.logprobs.token_logprobs.0")));
    assert_true(json_is_null(at(json, "choices.0.logprobs.top_logprobs.0")));
    assert_true(json_number_value(at(json, "choices.0.logprobs.token_logprobs.1")) == -3);
    assert_true(json_number_value(at(json, "choices.0.logprobs.top_logprobs.2.ab")) == -0.5);
    assert_int_equal(json_object_size(at(json, "choices.0.logprobs.top_logprobs.4")), 1);
    assert_int_equal(json_integer_value(at(json, "choices.0.logprobs.text_offset.2")), 3);
    assert_int_equal(json_integer_value(at(json, "choices.0.logprobs.text_offset.3")), 5);
    assert_null(at(json, "tandem"));
}

static void test_reply_chunks(void **state)
{
    fixture_t *fx = *state;
    rtr_piece_t p = piece();
    uint32_t offset = 0;
    td_msg_usage_t usage = {.prompt_tokens = 1, .completion_tokens = 2};
    const json_t *json = NULL;
    td_str_t begin = {0};
    td_str_t again = {0};

    p.finish = TD_FINISH_NONE;
    fx->head.usage_null = true;
    fx->head.tandem = true;
    assert_int_equal(rtr_reply_chunk(&fx->head, 2, false, &p, 1, &offset, &fx->out), TD_OK);
    assert_memory_equal(fx->out.bytes, "data: {", 7);
    assert_string_equal(fx->out.bytes + fx->out.len - 3, "}\n\n");
    json = read_json(fx, 6);
    assert_text(json, "object", "chat.completion.chunk");
    assert_int_equal(json_integer_value(at(json, "choices.0.index")), 2);
    assert_text(json, "choices.0.delta.role", "assistant");
    assert_text(json, "choices.0.delta.content", "ab\xc3\xa9");
    assert_true(json_is_null(at(json, "choices.0.finish_reason")));
    assert_true(json_is_null(at(json, "choices.0.logprobs")));
    assert_true(json_is_null(at(json, "usage")));
    assert_text(json, "tandem.logits_xxh.2", "0000000000000003");

    td_str_clear(&fx->out);
    assert_int_equal(rtr_reply_chunk(&fx->head, 2, true, &p, 1, &offset, &fx->out), TD_OK);
    assert_null(at(read_json(fx, 6), "choices.0.delta.role"));

    /* The beginning that is made once is the one of each. */
    assert_int_equal(rtr_reply_chunk_head(&fx->head, &begin), TD_OK);
    fx->head.chunk_head = &begin;
    assert_int_equal(rtr_reply_chunk(&fx->head, 2, true, &p, 1, &offset, &again), TD_OK);
    assert_string_equal(again.bytes, fx->out.bytes);
    fx->head.chunk_head = NULL;
    td_str_fini(&begin);
    td_str_fini(&again);

    td_str_clear(&fx->out);
    assert_int_equal(rtr_reply_usage_chunk(&fx->head, &usage, &fx->out), TD_OK);
    json = read_json(fx, 6);
    assert_int_equal(json_array_size(at(json, "choices")), 0);
    assert_int_equal(json_integer_value(at(json, "usage.total_tokens")), 3);
}

static void test_reply_chunk_offsets_go_on(void **state)
{
    fixture_t *fx = *state;
    rtr_piece_t p = piece();
    uint32_t offset = 0;

    fx->head.kind = RTR_KIND_COMPLETION;
    fx->head.want_logprobs = true;
    p.count = 1;
    assert_int_equal(rtr_reply_chunk(&fx->head, 0, false, &p, 1, &offset, &fx->out), TD_OK);
    assert_int_equal(offset, 2);
    td_str_clear(&fx->out);
    assert_int_equal(rtr_reply_chunk(&fx->head, 0, true, &p, 1, &offset, &fx->out), TD_OK);
    assert_int_equal(json_integer_value(at(read_json(fx, 6), "choices.0.logprobs.text_offset.0")),
                     2);
}

static void test_reply_strings_are_always_valid(void **state)
{
    static const char bytes[] =
        "q\"b\\n\n\x01\x7f\xc3\xa9\xf0\x9f\x98\x80 \xff\xe2\x82 \xed\xa0\x80";
    static const char want[] = "q\"b\\n\n\x01\x7f\xc3\xa9\xf0\x9f\x98\x80 "
                               "\xef\xbf\xbd\xef\xbf\xbd \xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd";
    fixture_t *fx = *state;
    json_t *text = NULL;

    assert_int_equal(rtr_reply_string(bytes, sizeof(bytes) - 1, &fx->out), TD_OK);
    text = json_loads(fx->out.bytes, JSON_DECODE_ANY, NULL);
    assert_non_null(text);
    assert_string_equal(json_string_value(text), want);
    json_decref(text);
    td_str_clear(&fx->out);
    assert_int_equal(rtr_reply_string("a\0b", 3, &fx->out), TD_OK);
    assert_string_equal(fx->out.bytes, "\"a\\u0000b\"");
}

static void test_reply_errors(void **state)
{
    fixture_t *fx = *state;
    rtr_error_t error;
    const json_t *json = NULL;

    rtr_error_set(&error, 404, "model_not_found", "model", "no `%s`", "\"x\"");
    assert_int_equal(rtr_reply_error(&error, &fx->out), TD_OK);
    json = read_json(fx, 0);
    assert_text(json, "error.message", "no `\"x\"`");
    assert_text(json, "error.param", "model");
    assert_text(json, "error.code", "model_not_found");
    assert_text(json, "error.type", "invalid_request_error");
    td_str_clear(&fx->out);
    rtr_error_set(&error, 502, NULL, NULL, "gone");
    assert_int_equal(rtr_reply_error_event(&error, &fx->out), TD_OK);
    json = read_json(fx, 6);
    assert_true(json_is_null(at(json, "error.param")) && json_is_null(at(json, "error.code")));
}

static void test_reply_models_and_tokens(void **state)
{
    fixture_t *fx = *state;
    uint32_t ids[] = {1, 2};
    rtr_prompt_t prompt = {.tokens = ids, .count = 2};
    const json_t *json = NULL;

    assert_int_equal(rtr_reply_model(&fx->model, true, &fx->out), TD_OK);
    json = read_json(fx, 0);
    assert_text(json, "object", "list");
    assert_text(json, "data.0.id", "tiny");
    td_str_clear(&fx->out);
    assert_int_equal(rtr_reply_model(&fx->model, false, &fx->out), TD_OK);
    assert_text(read_json(fx, 0), "object", "model");
    td_str_clear(&fx->out);
    assert_int_equal(rtr_reply_tokenized(&fx->model, &prompt, &fx->out), TD_OK);
    json = read_json(fx, 0);
    assert_int_equal(json_integer_value(at(json, "count")), 2);
    assert_int_equal(json_integer_value(at(json, "tokens.1")), 2);
    assert_int_equal(json_integer_value(at(json, "max_model_len")), 64);
    td_str_clear(&fx->out);
    assert_int_equal(rtr_reply_detokenized(&prompt, &fx->out), TD_OK);
    assert_text(read_json(fx, 0), "prompt", "");
}

int main(void)
{
#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        T(test_reply_chat_full),
        T(test_reply_completion_with_echo_and_logprobs),
        T(test_reply_chunks),
        T(test_reply_chunk_offsets_go_on),
        T(test_reply_strings_are_always_valid),
        T(test_reply_errors),
        T(test_reply_models_and_tokens),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>

#include "common/base/td_clock.h"
#include "common/model/td_tokenizer.h"
#include "tests/fuzz/gguf_build.h"

#define MODEL_PATH "build/models/SmolLM2-135M-Instruct.Q4_1.gguf"
#define CASES_PATH "tests/data/tokenizer_smollm2.jsonl"
#define CASE_COUNT 400
#define LINE_BYTES_MAX (1u << 20)

static td_tokenizer_t *model_tok; /* of the real model */
static td_tokenizer_t *small_tok; /* of gb_tokenizer() */

static int group_setup(void **state)
{
    td_gguf_t *gguf = NULL;
    td_str_t file = {0};
    int failed = 0;
    (void)state;

    failed |= td_gguf_open(MODEL_PATH, &gguf) != TD_OK;
    failed |= failed || td_tokenizer_create(gguf, &model_tok) != TD_OK;
    td_gguf_close(gguf);
    gb_tokenizer(&file);
    failed |= failed || td_gguf_open_bytes(file.bytes, file.len, &gguf) != TD_OK;
    failed |= failed || td_tokenizer_create(gguf, &small_tok) != TD_OK;
    td_gguf_close(gguf);
    td_str_fini(&file);
    return failed;
}

static int group_teardown(void **state)
{
    (void)state;
    td_tokenizer_destroy(model_tok);
    td_tokenizer_destroy(small_tok);
    return 0;
}

static void decode(const td_tokenizer_t *tok, const uint32_t *ids, size_t count, td_str_t *out)
{
    td_detok_t detok = {0};
    for (size_t i = 0; i < count; i++) {
        assert_int_equal(td_detok_push(&detok, tok, ids[i], false, out), TD_OK);
    }
    assert_int_equal(td_detok_finish(&detok, out), TD_OK);
}

static void assert_ids(const td_tokenizer_t *tok, const char *text, size_t len, bool parse_special,
                       const uint32_t *want, size_t want_count)
{
    uint32_t *ids = NULL;
    size_t count = 0;

    assert_int_equal(td_tokenizer_encode(tok, text, len, parse_special, &ids, &count), TD_OK);
    assert_non_null(ids);
    assert_int_equal(count, want_count);
    if (count > 0) {
        assert_memory_equal(ids, want, count * sizeof(*ids));
    }
    td_free(ids);
}

/* 1 when the case is exact both ways. */
static int check_case(const char *line)
{
    json_t *root = json_loads(line, JSON_ALLOW_NUL, NULL);
    const json_t *text = json_object_get(root, "text");
    const json_t *want = json_object_get(root, "ids");
    td_str_t back = {0};
    uint32_t *ids = NULL;
    size_t count = 0;
    int good = 0;

    assert_true(json_is_string(text) && json_is_array(want));
    assert_int_equal(td_tokenizer_encode(model_tok, json_string_value(text),
                                         json_string_length(text), true, &ids, &count),
                     TD_OK);
    good = count == json_array_size(want);
    for (size_t i = 0; good && i < count; i++) {
        good = ids[i] == (uint32_t)json_integer_value(json_array_get(want, i));
    }
    decode(model_tok, ids, count, &back);
    good = good && back.len == json_string_length(text) &&
           (back.len == 0 || memcmp(back.bytes, json_string_value(text), back.len) == 0);
    if (!good) {
        print_error("case differs: %.200s\n", line);
    }
    td_str_fini(&back);
    td_free(ids);
    json_decref(root);
    return good;
}

static void test_tokenizer_matches_reference_and_decodes_back(void **state)
{
    FILE *file = fopen(CASES_PATH, "r");
    char *line = td_alloc(LINE_BYTES_MAX);
    int cases = 0;
    int good = 0;
    (void)state;

    assert_non_null(file);
    while (fgets(line, LINE_BYTES_MAX, file) != NULL) {
        cases++;
        good += check_case(line);
    }
    (void)fclose(file);
    td_free(line);
    assert_int_equal(cases, CASE_COUNT);
    assert_int_equal(good, CASE_COUNT);
}

static void test_tokenizer_knows_the_models_special_tokens(void **state)
{
    const char *bytes = NULL;
    size_t len = 0;
    (void)state;

    assert_int_equal(td_tokenizer_vocab_size(model_tok), 49152);
    assert_int_equal(td_tokenizer_bos(model_tok), 1);
    assert_int_equal(td_tokenizer_eos(model_tok), 2);
    assert_false(td_tokenizer_add_bos(model_tok));
    assert_true(td_tokenizer_is_stop(model_tok, 2));
    assert_true(td_tokenizer_is_stop(model_tok, 0));
    assert_false(td_tokenizer_is_stop(model_tok, 1));
    assert_false(td_tokenizer_is_stop(model_tok, 49152));
    assert_true(td_tokenizer_is_special(model_tok, 16));
    assert_false(td_tokenizer_is_special(model_tok, 17));
    assert_int_equal(td_tokenizer_find(model_tok, "<|im_end|>", 10), 2);
    assert_int_equal(td_tokenizer_find(model_tok, "<|im_end|", 9), UINT32_MAX);
    assert_int_equal(td_tokenizer_find(model_tok, " the", 4), 260);
    assert_true(td_tokenizer_bytes(model_tok, 1, &bytes, &len));
    assert_int_equal(len, 12);
    assert_memory_equal(bytes, "<|im_start|>", 12);
    assert_false(td_tokenizer_bytes(model_tok, 49152, &bytes, &len));
}

static void test_tokenizer_leaves_special_text_plain_when_asked(void **state)
{
    uint32_t *ids = NULL;
    size_t count = 0;
    td_str_t back = {0};
    (void)state;

    assert_int_equal(td_tokenizer_encode(model_tok, "a<|im_end|>b", 12, false, &ids, &count),
                     TD_OK);
    for (size_t i = 0; i < count; i++) {
        assert_false(td_tokenizer_is_special(model_tok, ids[i]));
    }
    decode(model_tok, ids, count, &back);
    assert_string_equal(back.bytes, "a<|im_end|>b");
    td_str_fini(&back);
    td_free(ids);
}

static void test_tokenizer_small_vocabulary_merges_by_rank(void **state)
{
    static const uint32_t abc[] = {GB_ABC};
    static const uint32_t aab[] = {GB_A, GB_AB};
    static const uint32_t aaa[] = {GB_AA, GB_A};
    static const uint32_t a_ab[] = {GB_A, GB_SPACE, GB_AB};
    static const uint32_t turn[] = {GB_IM_START, GB_A, GB_TOOL, GB_IM_END, GB_IM_END};
    (void)state;

    assert_ids(small_tok, "abc", 3, true, abc, 1);
    assert_ids(small_tok, "aab", 3, true, aab, 2);
    assert_ids(small_tok, "aaa", 3, true, aaa, 2); /* leftmost first */
    assert_ids(small_tok, "a ab", 4, true, a_ab, 3);
    assert_ids(small_tok, "<|im_start|>a<tool><|im_end|><|im_end|>", 39, true, turn, 5);
    assert_ids(small_tok, "", 0, true, NULL, 0);
}

static void test_tokenizer_drops_only_what_it_has_no_bytes_for(void **state)
{
    /* 'x' has no token, nor has U+FFFD that would stand for it. */
    static const uint32_t ids[] = {GB_A, GB_B};
    (void)state;
    assert_ids(small_tok, "axb", 3, true, ids, 2);
}

static void test_tokenizer_encodes_invalid_utf8_byte_by_byte(void **state)
{
    static const char text[] = "ab\x80\xe2\x82 \xf0\x9f\x98 c\xc3";
    static const char bare[] = "\xe2\x82";
    td_str_t back = {0};
    uint32_t *ids = NULL;
    size_t count = 0;
    (void)state;

    assert_int_equal(td_tokenizer_encode(model_tok, text, sizeof(text) - 1, true, &ids, &count),
                     TD_OK);
    for (size_t i = 0; i < count; i++) {
        const char *bytes = NULL;
        size_t len = 0;
        assert_true(td_tokenizer_bytes(model_tok, ids[i], &bytes, &len));
        assert_int_equal(td_str_append(&back, bytes, len), TD_OK);
    }
    assert_int_equal(back.len, sizeof(text) - 1);
    assert_memory_equal(back.bytes, text, back.len);
    td_str_clear(&back);
    td_free(ids);

    /* Two bytes that begin a character: one replacement. */
    assert_int_equal(td_tokenizer_encode(model_tok, bare, 2, true, &ids, &count), TD_OK);
    decode(model_tok, ids, count, &back);
    assert_string_equal(back.bytes, "\xef\xbf\xbd");
    td_free(ids);
    td_str_clear(&back);
    /* 0xff is no token of this vocabulary. */
    assert_int_equal(td_tokenizer_encode(model_tok, "a\xff", 2, true, &ids, &count), TD_OK);
    decode(model_tok, ids, count, &back);
    assert_string_equal(back.bytes, "a\xef\xbf\xbd");
    td_free(ids);
    td_str_fini(&back);
}

static void long_text(const char *unit, size_t bytes, bool parse_special)
{
    td_str_t text = {0};
    td_str_t back = {0};
    uint32_t *ids = NULL;
    size_t count = 0;
    uint64_t begin_ns = 0;

    while (text.len + strlen(unit) <= bytes) {
        assert_int_equal(td_str_append_text(&text, unit), TD_OK);
    }
    begin_ns = td_now_ns();
    assert_int_equal(
        td_tokenizer_encode(model_tok, text.bytes, text.len, parse_special, &ids, &count), TD_OK);
    print_message("%zu bytes of \"%s\": %llu ms\n", text.len, unit,
                  (unsigned long long)((td_now_ns() - begin_ns) / TD_NS_PER_MS));
    decode(model_tok, ids, count, &back);
    assert_int_equal(back.len, text.len);
    assert_memory_equal(back.bytes, text.bytes, text.len);
    td_str_fini(&back);
    td_str_fini(&text);
    td_free(ids);
}

/* A quadratic step anywhere takes minutes here; the runner's limit is the check. */
static void test_tokenizer_is_not_quadratic(void **state)
{
    (void)state;
    long_text("a", 1u << 20, true);
    long_text(" ", 1u << 20, true);
    long_text("ab", 1u << 20, true);
    long_text("<|im_start", 1u << 20, true);
    long_text("\xe4\xb8\xad", 1u << 20, false);
    long_text("7", 1u << 20, false);
}

static void test_tokenizer_refuses_too_long_text(void **state)
{
    uint32_t *ids = NULL;
    size_t count = 0;
    char *text = td_calloc(1, TD_TOKENIZER_TEXT_BYTES_MAX + 1);
    (void)state;

    assert_int_equal(
        td_tokenizer_encode(small_tok, text, TD_TOKENIZER_TEXT_BYTES_MAX + 1, true, &ids, &count),
        TD_ERR_TOO_LARGE);
    assert_null(ids);
    td_free(text);
}

static void push(td_detok_t *detok, uint32_t id, const char *want_all, td_str_t *text)
{
    assert_int_equal(td_detok_push(detok, small_tok, id, true, text), TD_OK);
    assert_string_equal(text->bytes == NULL ? "" : text->bytes, want_all);
}

static void test_detok_holds_back_incomplete_characters(void **state)
{
    td_detok_t detok = {0};
    td_str_t text = {0};
    (void)state;

    push(&detok, GB_C3, "", &text);
    push(&detok, GB_IM_END, "", &text); /* skipped */
    push(&detok, GB_A9, "\xc3\xa9", &text);
    push(&detok, GB_A9, "\xc3\xa9\xef\xbf\xbd", &text); /* can begin nothing */
    push(&detok, GB_C3, "\xc3\xa9\xef\xbf\xbd", &text);
    push(&detok, GB_AB,
         "\xc3\xa9\xef\xbf\xbd\xef\xbf\xbd"
         "ab",
         &text);
    push(&detok, GB_TOOL,
         "\xc3\xa9\xef\xbf\xbd\xef\xbf\xbd"
         "ab<tool>",
         &text);
    td_str_clear(&text);
    push(&detok, GB_C3, "", &text);
    push(&detok, GB_C3, "\xef\xbf\xbd", &text);
    assert_int_equal(td_detok_finish(&detok, &text), TD_OK);
    assert_string_equal(text.bytes, "\xef\xbf\xbd\xef\xbf\xbd");
    assert_int_equal(td_detok_finish(&detok, &text), TD_OK);
    assert_int_equal(text.len, 6);
    assert_int_equal(td_detok_push(&detok, small_tok, GB_VOCAB, true, &text), TD_ERR_INVALID);
    td_str_fini(&text);
}

typedef struct broken {
    const char *model;
    const char *pre;
    const char *merge;
    uint32_t eos;
    size_t type_count;
    td_status_t want;
} broken_t;

static void test_tokenizer_create_refuses_bad_vocabularies(void **state)
{
    static const broken_t cases[] = {
        {"gpt2", "smollm", "a b", 2, 3, TD_OK},
        {"gpt2", "smollm", "a b", 2, 0, TD_OK}, /* no types */
        {"llama", "smollm", "a b", 2, 3, TD_ERR_UNSUPPORTED},
        {"gpt2", "smollm2", "a b", 2, 3, TD_ERR_UNSUPPORTED},
        {"gpt2", "smollm", "ab", 2, 3, TD_ERR_INVALID},
        {"gpt2", "smollm", "b a", 2, 3, TD_ERR_INVALID},
        {"gpt2", "smollm", "a c", 2, 3, TD_ERR_INVALID},
        {"gpt2", "smollm", " ab", 2, 3, TD_ERR_INVALID},
        {"gpt2", "smollm", "\xff b", 2, 3, TD_ERR_INVALID},
        {"gpt2", "smollm", "a b", 3, 3, TD_ERR_INVALID},
        {"gpt2", "smollm", "a b", 2, 2, TD_ERR_INVALID},
    };
    static const char *const tokens[] = {"a", "b", "ab"};
    static const int32_t types[] = {1, 1, 1};
    (void)state;

    for (size_t i = 0; i < TD_ARRAY_LEN(cases); i++) {
        const broken_t *c = &cases[i];
        td_str_t file = {0};
        td_gguf_t *gguf = NULL;
        td_tokenizer_t *tok = NULL;
        gb_header(&file, 0, c->type_count > 0 ? 6 : 5);
        gb_kv_str(&file, "tokenizer.ggml.model", c->model);
        gb_kv_str(&file, "tokenizer.ggml.pre", c->pre);
        gb_kv_strs(&file, "tokenizer.ggml.tokens", tokens, 3);
        gb_kv_strs(&file, "tokenizer.ggml.merges", &c->merge, 1);
        gb_kv_u32(&file, "tokenizer.ggml.eos_token_id", c->eos);
        if (c->type_count > 0) {
            gb_kv_i32s(&file, "tokenizer.ggml.token_type", types, c->type_count);
        }
        assert_int_equal(td_gguf_open_bytes(file.bytes, file.len, &gguf), TD_OK);
        assert_int_equal(td_tokenizer_create(gguf, &tok), c->want);
        td_tokenizer_destroy(tok);
        td_gguf_close(gguf);
        td_str_fini(&file);
    }
}

/* "abc" is a token, and "bc" leads to it; but "a b" merges before. So it is never the word's,
 * however often it is asked for. */
static void test_tokenizer_a_word_that_merges_do_not_make(void **state)
{
    static const char *const tokens[] = {"a", "b", "c", "ab", "bc", "abc"};
    static const char *const merges[] = {"a b", "b c", "a bc"};
    static const int32_t types[] = {1, 1, 1, 1, 1, 1};
    static const uint32_t ab_c[] = {3, 2};
    static const uint32_t bc[] = {4};
    td_str_t file = {0};
    td_gguf_t *gguf = NULL;
    td_tokenizer_t *tok = NULL;
    (void)state;

    gb_header(&file, 0, 5);
    gb_kv_str(&file, "tokenizer.ggml.model", "gpt2");
    gb_kv_str(&file, "tokenizer.ggml.pre", "smollm");
    gb_kv_strs(&file, "tokenizer.ggml.tokens", tokens, TD_ARRAY_LEN(tokens));
    gb_kv_strs(&file, "tokenizer.ggml.merges", merges, TD_ARRAY_LEN(merges));
    gb_kv_i32s(&file, "tokenizer.ggml.token_type", types, TD_ARRAY_LEN(types));
    assert_int_equal(td_gguf_open_bytes(file.bytes, file.len, &gguf), TD_OK);
    assert_int_equal(td_tokenizer_create(gguf, &tok), TD_OK);
    for (uint32_t i = 0; i < 3; i++) {
        assert_ids(tok, "abc", 3, true, ab_c, 2);
        assert_ids(tok, "bc", 2, true, bc, 1);
    }
    td_tokenizer_destroy(tok);
    td_gguf_close(gguf);
    td_str_fini(&file);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tokenizer_matches_reference_and_decodes_back),
        cmocka_unit_test(test_tokenizer_knows_the_models_special_tokens),
        cmocka_unit_test(test_tokenizer_leaves_special_text_plain_when_asked),
        cmocka_unit_test(test_tokenizer_small_vocabulary_merges_by_rank),
        cmocka_unit_test(test_tokenizer_drops_only_what_it_has_no_bytes_for),
        cmocka_unit_test(test_tokenizer_encodes_invalid_utf8_byte_by_byte),
        cmocka_unit_test(test_tokenizer_is_not_quadratic),
        cmocka_unit_test(test_tokenizer_refuses_too_long_text),
        cmocka_unit_test(test_detok_holds_back_incomplete_characters),
        cmocka_unit_test(test_tokenizer_a_word_that_merges_do_not_make),
        cmocka_unit_test(test_tokenizer_create_refuses_bad_vocabularies),
    };
    return cmocka_run_group_tests(tests, group_setup, group_teardown);
}

/* Words and ids of random text against the rule as it is published: digits are cut out first, and
 * GPT-2's own pattern runs on what lies between. It is one pattern here, with words of ASCII
 * letters found without it. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/model/td_tokenizer_internal.h"

#define MODEL_PATH "build/models/SmolLM2-135M-Instruct.Q4_1.gguf"
#define TEXTS 20000u
#define PIECES_MAX 12u
#define TEXT_BYTES_MAX (PIECES_MAX * 8u)
#define IDS_EVERY 8u /* texts: merging takes longer than cutting */

/* \s as the tokenizer has it: PCRE2's own adds U+180E, which is not among the pieces. */
static const char gpt2[] = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|"
                           "\\s+(?!\\S)|\\s+";
static const char *const pieces[] = {"a",
                                     "B",
                                     "the",
                                     "Zq",
                                     " ",
                                     " ",
                                     " ",
                                     "  ",
                                     "\n",
                                     "\r\n",
                                     "\t",
                                     "'",
                                     "'s",
                                     "'S",
                                     "'re",
                                     "'ll",
                                     "'x",
                                     "0",
                                     "7",
                                     "42",
                                     ".",
                                     ",",
                                     "!?",
                                     "_",
                                     "{",
                                     "@",
                                     "[",
                                     "`",
                                     "\x7f",
                                     "\x01",
                                     "\xc3\xa9",
                                     "\xcc\x81",
                                     "\xc2\xa0",
                                     "\xc2\x85",
                                     "\xc2\xb2",
                                     "\xe2\x80\x89",
                                     "\xe3\x80",
                                     "\xe4\xb8\xad",
                                     "\xe2\x80\x8d",
                                     "\xf0\x9f\x98\x80",
                                     "\xf0\x9f",
                                     "\x80",
                                     "\xff",
                                     "\xc3",
                                     "\xef\xbc\xa1",
                                     "\xd9\xa3"};

typedef struct words {
    size_t lens[TEXT_BYTES_MAX];
    uint32_t count;
    const uint8_t *at; /* where the next one begins */
} words_t;

static uint64_t seed = 1;

/* xorshift64: the same texts in every run. */
static uint32_t draw(uint32_t below)
{
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return (uint32_t)(seed >> 32) % below;
}

static size_t random_text(uint8_t out[TEXT_BYTES_MAX])
{
    const uint32_t count = 1 + draw(PIECES_MAX);
    size_t len = 0;

    for (uint32_t i = 0; i < count; i++) {
        const char *piece = pieces[draw(TD_ARRAY_LEN(pieces))];
        memcpy(out + len, piece, strlen(piece));
        len += strlen(piece);
    }
    return len;
}

static td_status_t on_word(void *ctx, const uint8_t *word, size_t len)
{
    words_t *w = ctx;

    assert_ptr_equal(word, w->at);
    w->at += len;
    w->lens[w->count++] = len;
    return TD_OK;
}

static pcre2_code *compile(const char *pattern)
{
    PCRE2_SIZE at = 0;
    int error = 0;
    pcre2_code *code = pcre2_compile((PCRE2_SPTR)pattern, PCRE2_ZERO_TERMINATED,
                                     PCRE2_UTF | PCRE2_UCP, &error, &at, NULL);

    assert_non_null(code);
    return code;
}

/* All matches of a text that is a text of its own. */
static void cut(const pcre2_code *code, pcre2_match_data *match, const uint8_t *text, size_t len,
                words_t *w)
{
    const PCRE2_SIZE *range = pcre2_get_ovector_pointer(match);
    size_t pos = 0;

    while (pos < len) {
        assert_true(pcre2_match(code, text, len, pos, PCRE2_ANCHORED, match, NULL) > 0);
        w->lens[w->count++] = range[1] - pos;
        pos = range[1];
    }
}

/* Of valid text: each digit is a word, and so are the matches between two. */
static void cut_between_digits(const pcre2_code *digit, const pcre2_code *code,
                               pcre2_match_data *match, const uint8_t *text, size_t len, words_t *w)
{
    const PCRE2_SIZE *range = pcre2_get_ovector_pointer(match);
    size_t pos = 0;

    while (pos < len && pcre2_match(digit, text, len, pos, 0, match, NULL) > 0) {
        const size_t begin = range[0];
        const size_t end = range[1];
        cut(code, match, text + pos, begin - pos, w);
        w->lens[w->count++] = end - begin;
        pos = end;
    }
    cut(code, match, text + pos, len - pos, w);
}

/* Bytes that are not UTF-8 are words of one byte, and end the text before them. */
static void reference(const pcre2_code *digit, const pcre2_code *code, pcre2_match_data *match,
                      const uint8_t *text, size_t len, words_t *w)
{
    size_t begin = 0;
    size_t pos = 0;

    while (pos < len) {
        uint32_t bad = 0;
        const int chars = td_utf8_char(text + pos, len - pos, &bad);
        if (chars > 0) {
            pos += (size_t)chars;
            continue;
        }
        cut_between_digits(digit, code, match, text + begin, pos - begin, w);
        w->lens[w->count++] = 1;
        begin = ++pos;
    }
    cut_between_digits(digit, code, match, text + begin, pos - begin, w);
}

/* The ids of the text are those of its words, found out by a tokenizer that sees nothing else. */
static void assert_ids(const td_tokenizer_t *whole, const td_tokenizer_t *by_word,
                       const uint8_t *text, size_t len, const words_t *w)
{
    td_token_ids_t want = {0};
    td_token_ids_t got = {0};
    size_t pos = 0;

    for (uint32_t i = 0; i < w->count; i++) {
        assert_int_equal(
            td_tokenizer_encode_append(by_word, (const char *)text + pos, w->lens[i], false, &want),
            TD_OK);
        pos += w->lens[i];
    }
    for (uint32_t again = 0; again < 2; again++) { /* as merged, and as remembered */
        got.count = 0;
        assert_int_equal(td_tokenizer_encode_append(whole, (const char *)text, len, false, &got),
                         TD_OK);
        assert_int_equal(got.count, want.count);
        assert_memory_equal(got.ids, want.ids, want.count * sizeof(*want.ids));
    }
    td_token_ids_fini(&want);
    td_token_ids_fini(&got);
}

static td_tokenizer_t *open_tokenizer(void)
{
    td_gguf_t *gguf = NULL;
    td_tokenizer_t *tok = NULL;

    assert_int_equal(td_gguf_open(MODEL_PATH, &gguf), TD_OK);
    assert_int_equal(td_tokenizer_create(gguf, &tok), TD_OK);
    td_gguf_close(gguf);
    return tok;
}

static void test_random_text_is_cut_as_published(void **state)
{
    td_tokenizer_t *whole = open_tokenizer();
    td_tokenizer_t *by_word = open_tokenizer();
    pcre2_code *digit = compile("\\p{N}");
    pcre2_code *code = compile(gpt2);
    pcre2_match_data *match = pcre2_match_data_create(1, NULL);
    td_pretok_t *pretok = NULL;
    (void)state;

    assert_int_equal(td_pretok_create("smollm", 6, &pretok), TD_OK);
    for (uint32_t i = 0; i < TEXTS; i++) {
        uint8_t text[TEXT_BYTES_MAX];
        const size_t len = random_text(text);
        words_t got = {.at = text};
        words_t want = {.at = text};
        assert_int_equal(td_pretok_split(pretok, text, len, on_word, &got), TD_OK);
        reference(digit, code, match, text, len, &want);
        assert_int_equal(got.count, want.count);
        assert_memory_equal(got.lens, want.lens, want.count * sizeof(*want.lens));
        if (i % IDS_EVERY == 0) {
            assert_ids(whole, by_word, text, len, &want);
        }
    }
    td_pretok_destroy(pretok);
    pcre2_match_data_free(match);
    pcre2_code_free(code);
    pcre2_code_free(digit);
    td_tokenizer_destroy(by_word);
    td_tokenizer_destroy(whole);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_random_text_is_cut_as_published)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}

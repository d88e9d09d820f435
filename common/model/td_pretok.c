#define PCRE2_CODE_UNIT_WIDTH 8
#include "common/model/td_tokenizer_internal.h"

#include <pcre2.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_log.h"

/* \s as the reference tokenizers have it; PCRE2's own adds U+180E. */
#define SPACE                                                                                      \
    "\\x{09}-\\x{0d}\\x{20}\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}"  \
    "\\x{205f}\\x{3000}"

/* The digits are cut out first and the GPT-2 pattern runs on what lies between, so a digit ends the
 * text for the look-ahead; one pattern says the same. */
static const char smollm_pattern[] = "\\p{N}"
                                     "|'s|'t|'re|'ve|'m|'ll|'d"
                                     "| ?\\p{L}+"
                                     "| ?[^" SPACE "\\p{L}\\p{N}]+"
                                     "|[" SPACE "]+(?![^" SPACE "\\p{N}])"
                                     "|[" SPACE "]+";

typedef struct pretok_kind {
    const char *name; /* tokenizer.ggml.pre */
    const char *pattern;
} pretok_kind_t;

static const pretok_kind_t pretok_kinds[] = {{"smollm", smollm_pattern}};

struct td_pretok {
    pcre2_general_context *general; /* owned; sends PCRE2's allocations to td_alloc() */
    pcre2_code *code;               /* owned; immutable after creation */
};

static void *pcre_alloc(PCRE2_SIZE bytes, void *ctx)
{
    (void)ctx;
    return td_alloc(bytes);
}

static void pcre_free(void *ptr, void *ctx)
{
    (void)ctx;
    td_free(ptr);
}

static const char *pretok_pattern(const char *name, size_t name_len)
{
    for (size_t i = 0; i < TD_ARRAY_LEN(pretok_kinds); i++) {
        if (strlen(pretok_kinds[i].name) == name_len &&
            memcmp(pretok_kinds[i].name, name, name_len) == 0) {
            return pretok_kinds[i].pattern;
        }
    }
    return NULL;
}

td_status_t td_pretok_create(const char *name, size_t name_len, td_pretok_t **out)
{
    td_status_t status = TD_ERR_NO_MEMORY;
    const char *pattern = pretok_pattern(name, name_len);
    td_pretok_t *pretok = NULL;
    PCRE2_SIZE error_pos = 0;
    int error = 0;

    if (pattern == NULL) {
        TD_LOG_ERROR("pre-tokenizer unknown", "key=tokenizer.ggml.pre got=\"%.*s\" expected=smollm",
                     (int)TD_MIN(name_len, 64u), name);
        return TD_ERR_UNSUPPORTED;
    }
    pretok = td_calloc(1, sizeof(*pretok));
    if (pretok == NULL) {
        goto err;
    }
    pretok->general = pcre2_general_context_create(pcre_alloc, pcre_free, NULL);
    if (pretok->general == NULL) {
        goto err_destroy;
    }
    {
        pcre2_compile_context *compile = pcre2_compile_context_create(pretok->general);
        if (compile == NULL) {
            goto err_destroy;
        }
        pretok->code = pcre2_compile((PCRE2_SPTR)pattern, PCRE2_ZERO_TERMINATED,
                                     PCRE2_UTF | PCRE2_UCP, &error, &error_pos, compile);
        pcre2_compile_context_free(compile);
    }
    if (pretok->code == NULL) {
        status = error == PCRE2_ERROR_HEAP_FAILED ? TD_ERR_NO_MEMORY : TD_ERR_INTERNAL;
        goto err_destroy;
    }
    /* Without executable memory the interpreter finds the same words, only slower. */
    (void)pcre2_jit_compile(pretok->code, PCRE2_JIT_COMPLETE);
    *out = pretok;
    return TD_OK;

err_destroy:
    td_pretok_destroy(pretok);
err:
    TD_LOG_ERROR("pre-tokenizer not created", "status=%s pcre2_error=%d at=%zu",
                 td_status_name(status), error, (size_t)error_pos);
    return status;
}

void td_pretok_destroy(td_pretok_t *pretok)
{
    if (pretok == NULL) {
        return;
    }
    pcre2_code_free(pretok->code);
    pcre2_general_context_free(pretok->general);
    td_free(pretok);
}

int td_utf8_char(const uint8_t *bytes, size_t len, uint32_t *bad_out)
{
    uint8_t first = bytes[0];
    int need = first < 0x80 ? 1 : first < 0xc2 ? 0 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
    /* The second byte's range shuts out overlong forms, surrogates and what is above U+10FFFF. */
    uint8_t low = first == 0xe0 ? 0xa0 : first == 0xf0 ? 0x90 : 0x80;
    uint8_t high = first == 0xed ? 0x9f : first == 0xf4 ? 0x8f : 0xbf;

    *bad_out = 1;
    if (first > 0xf4) {
        need = 0;
    }
    for (int i = 1; i < need; i++) {
        if ((size_t)i == len) {
            return -i;
        }
        if (bytes[i] < low || bytes[i] > high) {
            *bad_out = (uint32_t)i;
            return 0;
        }
        low = 0x80;
        high = 0xbf;
    }
    return need;
}

/* The length of the valid UTF-8 at the start. */
static size_t valid_prefix(const uint8_t *text, size_t len)
{
    size_t pos = 0;

    while (pos < len) {
        uint32_t bad = 0;
        int n = text[pos] < 0x80 ? 1 : td_utf8_char(text + pos, len - pos, &bad);
        if (n <= 0) {
            break;
        }
        pos += (size_t)n;
    }
    return pos;
}

static bool is_ascii_letter(uint8_t byte)
{
    return (byte | 0x20) >= 'a' && (byte | 0x20) <= 'z';
}

/* Length of what the pattern's " ?\p{L}+" finds where it takes no table to see: letters of ASCII
 * up to something that is in ASCII too. Most words are of this kind. 0: it is not, or no word at
 * all. */
static size_t ascii_word(const uint8_t *text, size_t len)
{
    const size_t begin = text[0] == ' ';
    size_t end = begin;

    while (end < len && is_ascii_letter(text[end])) {
        end++;
    }
    return end == begin || (end < len && text[end] >= 0x80) ? 0 : end;
}

static td_status_t split_valid(const td_pretok_t *pretok, pcre2_match_data *match,
                               const uint8_t *text, size_t len, td_pretok_word_fn on_word,
                               void *ctx)
{
    const PCRE2_SIZE *range = pcre2_get_ovector_pointer(match);
    /* Checked above; PCRE2 would check all that is left again at every word. */
    uint32_t options = PCRE2_NO_UTF_CHECK | PCRE2_ANCHORED;
    size_t pos = 0;

    while (pos < len) {
        size_t letters = ascii_word(text + pos, len - pos);
        int rc = 0;
        if (letters > 0) {
            TD_TRY(on_word(ctx, text + pos, letters));
            pos += letters;
            continue;
        }
        rc = pcre2_match(pretok->code, text, len, pos, options, match, NULL);
        if (rc == PCRE2_ERROR_JIT_STACKLIMIT) {
            options |= PCRE2_NO_JIT;
            continue;
        }
        /* Every character starts some word, so no match is a fault as well. */
        if (rc < 0 || range[1] <= pos) {
            td_status_t status = rc == PCRE2_ERROR_NOMEMORY || rc == PCRE2_ERROR_HEAPLIMIT
                                     ? TD_ERR_NO_MEMORY
                                     : TD_ERR_INTERNAL;
            TD_LOG_ERROR("text not cut into words", "status=%s pcre2_error=%d",
                         td_status_name(status), rc);
            return status;
        }
        TD_TRY(on_word(ctx, text + pos, range[1] - pos));
        pos = range[1];
    }
    return TD_OK;
}

td_status_t td_pretok_split(const td_pretok_t *pretok, const uint8_t *text, size_t len,
                            td_pretok_word_fn on_word, void *ctx)
{
    td_status_t status = TD_OK;
    pcre2_match_data *match = pcre2_match_data_create(1, pretok->general);
    size_t pos = 0;

    if (match == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    while (status == TD_OK && pos < len) {
        size_t valid = valid_prefix(text + pos, len - pos);
        status = split_valid(pretok, match, text + pos, valid, on_word, ctx);
        pos += valid;
        if (status == TD_OK && pos < len) {
            status = on_word(ctx, text + pos, 1);
            pos++;
        }
    }
    pcre2_match_data_free(match);
    return status;
}

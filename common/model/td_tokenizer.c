#include "common/model/td_tokenizer.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_log.h"
#include "common/model/td_gguf_names_internal.h"
#include "common/model/td_tokenizer_internal.h"

#define KEY_MODEL "tokenizer.ggml.model"
#define KEY_PRE "tokenizer.ggml.pre"
#define KEY_TOKENS "tokenizer.ggml.tokens"
#define KEY_TYPES "tokenizer.ggml.token_type"
#define KEY_MERGES "tokenizer.ggml.merges"

/* The file's numbers; normal, unknown, unused and byte tokens are treated alike. */
enum token_type { TOKEN_CONTROL = 3, TOKEN_USER_DEFINED = 4 };

enum token_flag {
    FLAG_CONTROL = 1,
    FLAG_USER_DEFINED = 2,
    FLAG_STOP = 4,
    FLAG_PLAIN = 8 /* bytes are the bytes its text stands for, so merges may make it */
};

/* End-of-turn tokens of known chat formats; they stop generation even when eos is another. */
static const char *const stop_names[] = {"<|im_end|>", "<|endoftext|>",   "<|eot_id|>",
                                         "<|end|>",    "<|end_of_text|>", "<|eom_id|>"};

/* Whether merging a token's bytes gives that very token: found out once for each. */
enum token_whole { WHOLE_UNKNOWN = 0, WHOLE_YES, WHOLE_NO };

struct td_tokenizer {
    uint8_t *bytes;     /* owned; the tokens' bytes one after another */
    size_t *starts;     /* owned; [vocab_size + 1] in bytes */
    uint8_t *flags;     /* owned; [vocab_size] enum token_flag */
    uint32_t *specials; /* owned; [special_count] ids in the order of their bytes */
    uint32_t special_count;
    bool special_first[256];       /* bytes that a special token starts with */
    td_gguf_names_t plain_names;   /* bytes -> id of tokens that merges may make */
    td_gguf_names_t special_names; /* text -> id of special tokens */
    td_pretok_t *pretok;           /* owned */
    td_bpe_t *bpe;                 /* owned */
    atomic_uchar *whole;   /* owned; [vocab_size] enum token_whole. Relaxed: an entry says all there
                            * is to know, and threads that find it out at once find the same */
    uint32_t *unknown_ids; /* owned; U+FFFD, which stands for a byte that has no token */
    size_t unknown_count;
    uint32_t vocab_size;
    uint32_t bos; /* TD_TOKEN_NONE = none */
    uint32_t eos;
    bool add_bos;
};

/* --- GPT-2's printable stand-ins for bytes --------------------------------------------------- */

static bool is_own_stand_in(uint32_t byte)
{
    return (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
}

/* The byte that a code point stands for: itself when printable, else U+0100 onwards in order.
 * Source: GPT-2's bytes_to_unicode(). */
static bool stand_in_byte(uint32_t code_point, uint8_t *out)
{
    uint32_t n = 0x100;

    if (code_point < 0x100) {
        *out = (uint8_t)code_point;
        return is_own_stand_in(code_point);
    }
    for (uint32_t byte = 0; byte < 256; byte++) {
        if (!is_own_stand_in(byte) && n++ == code_point) {
            *out = (uint8_t)byte;
            return true;
        }
    }
    return false;
}

/* Writes the bytes a vocabulary text stands for, at most as many as the text has; false when it has
 * a character that stands for none. All stand-ins are below U+0800: one or two bytes of UTF-8. */
static bool stand_ins_to_bytes(const char *text, size_t len, uint8_t *out, size_t *len_out)
{
    size_t pos = 0;
    size_t n = 0;

    while (pos < len) {
        uint32_t bad = 0;
        const uint8_t *at = (const uint8_t *)text + pos;
        int char_bytes = td_utf8_char(at, len - pos, &bad);
        uint32_t code_point = at[0];
        if (char_bytes == 2) {
            code_point = (at[0] & 0x1fu) << 6 | (at[1] & 0x3fu);
        }
        if (char_bytes < 1 || char_bytes > 2 || !stand_in_byte(code_point, &out[n])) {
            return false;
        }
        n++;
        pos += (size_t)char_bytes;
    }
    *len_out = n;
    return true;
}

/* --- loading ---------------------------------------------------------------------------------- */

static td_status_t refuse(td_status_t status, const char *key, uint64_t idx, const char *expected)
{
    TD_LOG_ERROR("tokenizer not created", "status=%s key=%s at=%llu expected=\"%s\"",
                 td_status_name(status), key, (unsigned long long)idx, expected);
    return status;
}

static td_status_t no_memory(const char *key)
{
    return refuse(TD_ERR_NO_MEMORY, key, 0, "memory");
}

static td_status_t check_model(const td_gguf_t *gguf)
{
    const char *text = NULL;
    size_t len = 0;

    if (td_gguf_get_str(gguf, KEY_MODEL, &text, &len) != TD_OK) {
        return refuse(TD_ERR_INVALID, KEY_MODEL, 0, "a string");
    }
    if (len != 4 || memcmp(text, "gpt2", 4) != 0) {
        TD_LOG_ERROR("tokenizer model unknown", "key=%s got=\"%.*s\" expected=gpt2", KEY_MODEL,
                     (int)TD_MIN(len, 64u), text);
        return TD_ERR_UNSUPPORTED;
    }
    return TD_OK;
}

static td_status_t load_flags(const td_gguf_t *gguf, td_tokenizer_t *tok)
{
    uint32_t count = 0;
    td_status_t status = td_gguf_get_array_len(gguf, KEY_TYPES, &count);

    tok->flags = td_calloc(tok->vocab_size, sizeof(*tok->flags));
    if (tok->flags == NULL) {
        return no_memory(KEY_TYPES);
    }
    if (status == TD_ERR_NOT_FOUND) {
        return TD_OK; /* all are normal */
    }
    if (status != TD_OK || count != tok->vocab_size) {
        return refuse(TD_ERR_INVALID, KEY_TYPES, count, "one integer for each token");
    }
    for (uint32_t id = 0; id < count; id++) {
        int32_t type = 0;
        if (td_gguf_get_array_i32(gguf, KEY_TYPES, id, &type) != TD_OK) {
            return refuse(TD_ERR_INVALID, KEY_TYPES, id, "a 32-bit integer");
        }
        tok->flags[id] = type == TOKEN_CONTROL        ? FLAG_CONTROL
                         : type == TOKEN_USER_DEFINED ? FLAG_USER_DEFINED
                                                      : 0;
        tok->special_count += tok->flags[id] != 0;
    }
    return TD_OK;
}

static td_status_t load_token_bytes(const td_gguf_t *gguf, td_tokenizer_t *tok)
{
    size_t bytes_max = 0;
    size_t pos = 0;
    const char *text = NULL;
    size_t len = 0;

    for (uint32_t id = 0; id < tok->vocab_size; id++) {
        if (td_gguf_get_array_str(gguf, KEY_TOKENS, id, &text, &len) != TD_OK || len > UINT32_MAX ||
            !td_size_add(bytes_max, len, &bytes_max)) {
            return refuse(TD_ERR_INVALID, KEY_TOKENS, id, "a string of less than 4 GiB");
        }
    }
    tok->bytes = td_alloc(bytes_max);
    tok->starts = td_calloc((size_t)tok->vocab_size + 1, sizeof(*tok->starts));
    if (tok->bytes == NULL || tok->starts == NULL) {
        return no_memory(KEY_TOKENS);
    }
    for (uint32_t id = 0; id < tok->vocab_size; id++) {
        size_t n = 0;
        tok->starts[id] = pos;
        TD_TRY(td_gguf_get_array_str(gguf, KEY_TOKENS, id, &text, &len));
        /* A special token is its text; so is one that stands for no bytes, as some padding is. */
        if (!td_tokenizer_is_special(tok, id) &&
            stand_ins_to_bytes(text, len, tok->bytes + pos, &n)) {
            tok->flags[id] |= FLAG_PLAIN;
        } else {
            memcpy(tok->bytes + pos, text, len);
            n = len;
        }
        pos += n;
    }
    tok->starts[tok->vocab_size] = pos;
    return TD_OK;
}

static td_status_t index_tokens(td_tokenizer_t *tok)
{
    uint32_t special_count = 0;

    if (td_gguf_names_init(&tok->plain_names, tok->vocab_size) != TD_OK ||
        td_gguf_names_init(&tok->special_names, tok->special_count) != TD_OK) {
        return no_memory(KEY_TOKENS);
    }
    tok->specials = td_calloc(tok->special_count, sizeof(*tok->specials));
    if (tok->specials == NULL) {
        return no_memory(KEY_TYPES);
    }
    for (uint32_t id = 0; id < tok->vocab_size; id++) {
        const uint8_t *bytes = tok->bytes + tok->starts[id];
        uint32_t len = (uint32_t)(tok->starts[id + 1] - tok->starts[id]);
        /* Of two tokens with the same bytes the lower id is the one that encoding gives. */
        if (len == 0) {
            continue;
        }
        if ((tok->flags[id] & FLAG_PLAIN) != 0) {
            (void)td_gguf_names_put(&tok->plain_names, bytes, len, id);
        } else if (td_tokenizer_is_special(tok, id) &&
                   td_gguf_names_put(&tok->special_names, bytes, len, id)) {
            tok->specials[special_count++] = id;
            tok->special_first[bytes[0]] = true;
        }
    }
    tok->special_count = special_count;
    return TD_OK;
}

static int compare_specials(const void *a, const void *b, void *ctx)
{
    const td_tokenizer_t *tok = ctx;
    uint32_t x = *(const uint32_t *)a;
    uint32_t y = *(const uint32_t *)b;
    size_t x_len = tok->starts[x + 1] - tok->starts[x];
    size_t y_len = tok->starts[y + 1] - tok->starts[y];
    int order =
        memcmp(tok->bytes + tok->starts[x], tok->bytes + tok->starts[y], TD_MIN(x_len, y_len));

    return order != 0 ? order : (x_len > y_len) - (x_len < y_len);
}

/* One half of a merge, or both without the space between: the token of that text. */
static uint32_t find_merge_part(const td_tokenizer_t *tok, const uint8_t *bytes, size_t len)
{
    uint32_t id = td_gguf_names_find(&tok->plain_names, bytes, len);

    return len == 0 || id == TD_GGUF_NAMES_NONE ? TD_TOKEN_NONE : id;
}

static td_status_t add_merge(td_tokenizer_t *tok, uint32_t idx, const char *text, size_t len)
{
    uint8_t small[256];
    uint8_t *bytes = small;
    const char *space = memchr(text, ' ', len);
    size_t left_len = 0;
    size_t right_len = 0;
    uint32_t left = TD_TOKEN_NONE;
    uint32_t right = TD_TOKEN_NONE;
    uint32_t merged = TD_TOKEN_NONE;

    if (space == NULL) {
        return refuse(TD_ERR_INVALID, KEY_MERGES, idx, "two texts and a space between");
    }
    if (len > sizeof(small)) {
        bytes = td_alloc(len);
        if (bytes == NULL) {
            return no_memory(KEY_MERGES);
        }
    }
    if (stand_ins_to_bytes(text, (size_t)(space - text), bytes, &left_len) &&
        stand_ins_to_bytes(space + 1, len - (size_t)(space - text) - 1, bytes + left_len,
                           &right_len)) {
        left = find_merge_part(tok, bytes, left_len);
        right = find_merge_part(tok, bytes + left_len, right_len);
        merged = find_merge_part(tok, bytes, left_len + right_len);
    }
    if (bytes != small) {
        td_free(bytes);
    }
    if (left == TD_TOKEN_NONE || right == TD_TOKEN_NONE || merged == TD_TOKEN_NONE) {
        return refuse(TD_ERR_INVALID, KEY_MERGES, idx, "both halves and the whole as tokens");
    }
    if (!td_bpe_add(tok->bpe, left, right, merged)) {
        return refuse(TD_ERR_INVALID, KEY_MERGES, idx, "no merge twice");
    }
    return TD_OK;
}

static td_status_t load_merges(const td_gguf_t *gguf, td_tokenizer_t *tok)
{
    uint32_t byte_ids[256];
    uint32_t count = 0;
    td_status_t status = TD_OK;

    if (td_gguf_get_array_len(gguf, KEY_MERGES, &count) != TD_OK) {
        return refuse(TD_ERR_INVALID, KEY_MERGES, 0, "an array of strings");
    }
    for (uint32_t b = 0; b < 256; b++) {
        uint8_t byte = (uint8_t)b;
        byte_ids[b] = find_merge_part(tok, &byte, 1);
    }
    status = td_bpe_create(byte_ids, count, &tok->bpe);
    if (status != TD_OK) {
        return refuse(status, KEY_MERGES, count, "memory for the merges");
    }
    for (uint32_t i = 0; i < count; i++) {
        const char *text = NULL;
        size_t len = 0;
        if (td_gguf_get_array_str(gguf, KEY_MERGES, i, &text, &len) != TD_OK) {
            return refuse(TD_ERR_INVALID, KEY_MERGES, i, "a string");
        }
        TD_TRY(add_merge(tok, i, text, len));
    }
    return TD_OK;
}

static td_status_t load_id(const td_gguf_t *gguf, const td_tokenizer_t *tok, const char *key,
                           uint32_t *out)
{
    uint32_t id = 0;
    td_status_t status = td_gguf_get_u32(gguf, key, &id);

    *out = TD_TOKEN_NONE;
    if (status == TD_ERR_NOT_FOUND) {
        return TD_OK;
    }
    if (status != TD_OK || id >= tok->vocab_size) {
        return refuse(TD_ERR_INVALID, key, id, "an id of the vocabulary");
    }
    *out = id;
    return TD_OK;
}

static td_status_t load_special_ids(const td_gguf_t *gguf, td_tokenizer_t *tok)
{
    uint32_t eot = TD_TOKEN_NONE;
    td_status_t status = TD_OK;

    TD_TRY(load_id(gguf, tok, "tokenizer.ggml.bos_token_id", &tok->bos));
    TD_TRY(load_id(gguf, tok, "tokenizer.ggml.eos_token_id", &tok->eos));
    TD_TRY(load_id(gguf, tok, "tokenizer.ggml.eot_token_id", &eot));
    status = td_gguf_get_bool(gguf, "tokenizer.ggml.add_bos_token", &tok->add_bos);
    if (status != TD_OK && status != TD_ERR_NOT_FOUND) {
        return refuse(TD_ERR_INVALID, "tokenizer.ggml.add_bos_token", 0, "a bool");
    }
    if (tok->eos != TD_TOKEN_NONE) {
        tok->flags[tok->eos] |= FLAG_STOP;
    }
    if (eot != TD_TOKEN_NONE) {
        tok->flags[eot] |= FLAG_STOP;
    }
    for (size_t i = 0; i < TD_ARRAY_LEN(stop_names); i++) {
        uint32_t id = td_gguf_names_find(&tok->special_names, (const uint8_t *)stop_names[i],
                                         strlen(stop_names[i]));
        if (id != TD_GGUF_NAMES_NONE) {
            tok->flags[id] |= FLAG_STOP;
        }
    }
    return TD_OK;
}

/* What stands for a byte without a token; nothing when the vocabulary lacks even that. */
static td_status_t load_unknown(td_tokenizer_t *tok)
{
    td_bpe_scratch_t scratch = {0};
    td_token_ids_t ids = {0};
    td_status_t status =
        td_bpe_encode(tok->bpe, &scratch, (const uint8_t *)"\xef\xbf\xbd", 3, &ids);

    td_bpe_scratch_fini(&scratch);
    if (status != TD_OK) {
        td_token_ids_fini(&ids);
        return no_memory(KEY_TOKENS);
    }
    tok->unknown_ids = ids.ids;
    tok->unknown_count = ids.count;
    for (size_t i = 0; i < ids.count; i++) {
        if (ids.ids[i] == TD_TOKEN_NONE) {
            tok->unknown_count = 0;
        }
    }
    return TD_OK;
}

static td_status_t load(const td_gguf_t *gguf, td_tokenizer_t *tok)
{
    const char *pre = NULL;
    size_t pre_len = 0;

    TD_TRY(check_model(gguf));
    if (td_gguf_get_str(gguf, KEY_PRE, &pre, &pre_len) != TD_OK) {
        return refuse(TD_ERR_INVALID, KEY_PRE, 0, "a string");
    }
    TD_TRY(td_pretok_create(pre, pre_len, &tok->pretok));
    if (td_gguf_get_array_len(gguf, KEY_TOKENS, &tok->vocab_size) != TD_OK ||
        tok->vocab_size == 0 || tok->vocab_size > INT32_MAX) {
        return refuse(TD_ERR_INVALID, KEY_TOKENS, 0, "an array of 1 to 2^31 - 1 strings");
    }
    TD_TRY(load_flags(gguf, tok));
    TD_TRY(load_token_bytes(gguf, tok));
    TD_TRY(index_tokens(tok));
    qsort_r(tok->specials, tok->special_count, sizeof(*tok->specials), compare_specials, tok);
    TD_TRY(load_merges(gguf, tok));
    TD_TRY(load_special_ids(gguf, tok));
    tok->whole = td_calloc(tok->vocab_size, sizeof(*tok->whole));
    if (tok->whole == NULL) {
        return no_memory(KEY_TOKENS);
    }
    return load_unknown(tok);
}

td_status_t td_tokenizer_create(const td_gguf_t *gguf, td_tokenizer_t **out)
{
    td_status_t status = TD_OK;
    td_tokenizer_t *tok = NULL;

    TD_ASSERT(gguf != NULL && out != NULL);
    tok = td_calloc(1, sizeof(*tok));
    if (tok == NULL) {
        return no_memory(KEY_MODEL);
    }
    status = load(gguf, tok);
    if (status != TD_OK) {
        td_tokenizer_destroy(tok);
        return status;
    }
    *out = tok;
    return TD_OK;
}

void td_tokenizer_destroy(td_tokenizer_t *tok)
{
    if (tok == NULL) {
        return;
    }
    td_pretok_destroy(tok->pretok);
    td_bpe_destroy(tok->bpe);
    td_gguf_names_fini(&tok->plain_names);
    td_gguf_names_fini(&tok->special_names);
    td_free(tok->bytes);
    td_free(tok->starts);
    td_free(tok->flags);
    td_free(tok->specials);
    td_free(tok->unknown_ids);
    td_free(tok->whole);
    td_free(tok);
}

/* --- questions -------------------------------------------------------------------------------- */

uint32_t td_tokenizer_vocab_size(const td_tokenizer_t *tok)
{
    return tok->vocab_size;
}

uint32_t td_tokenizer_bos(const td_tokenizer_t *tok)
{
    return tok->bos;
}

uint32_t td_tokenizer_eos(const td_tokenizer_t *tok)
{
    return tok->eos;
}

bool td_tokenizer_add_bos(const td_tokenizer_t *tok)
{
    return tok->add_bos;
}

bool td_tokenizer_is_stop(const td_tokenizer_t *tok, uint32_t id)
{
    return id < tok->vocab_size && (tok->flags[id] & FLAG_STOP) != 0;
}

bool td_tokenizer_is_special(const td_tokenizer_t *tok, uint32_t id)
{
    return id < tok->vocab_size && (tok->flags[id] & (FLAG_CONTROL | FLAG_USER_DEFINED)) != 0;
}

bool td_tokenizer_is_control(const td_tokenizer_t *tok, uint32_t id)
{
    return id < tok->vocab_size && (tok->flags[id] & FLAG_CONTROL) != 0;
}

uint32_t td_tokenizer_find(const td_tokenizer_t *tok, const char *text, size_t len)
{
    uint32_t id = td_gguf_names_find(&tok->special_names, (const uint8_t *)text, len);

    if (id == TD_GGUF_NAMES_NONE) {
        id = td_gguf_names_find(&tok->plain_names, (const uint8_t *)text, len);
    }
    return id == TD_GGUF_NAMES_NONE ? TD_TOKEN_NONE : id;
}

bool td_tokenizer_bytes(const td_tokenizer_t *tok, uint32_t id, const char **bytes_out,
                        size_t *len_out)
{
    if (id >= tok->vocab_size) {
        return false;
    }
    *bytes_out = (const char *)tok->bytes + tok->starts[id];
    *len_out = tok->starts[id + 1] - tok->starts[id];
    return true;
}

/* --- encoding --------------------------------------------------------------------------------- */

typedef struct encoder {
    const td_tokenizer_t *tok;
    td_bpe_scratch_t scratch;
    td_token_ids_t word; /* of the word at hand */
    td_token_ids_t *out;
} encoder_t;

/* Most words are a token of their own: looking one up is ten times as fast as merging its bytes.
 * But merges need not lead to a token that has a word's bytes, so they are asked the first time. */
static td_status_t encode_word(void *ctx, const uint8_t *word, size_t len)
{
    encoder_t *enc = ctx;
    const td_tokenizer_t *tok = enc->tok;
    const uint32_t id = td_gguf_names_find(&tok->plain_names, word, len);
    uint8_t whole = WHOLE_NO;

    if (id != TD_GGUF_NAMES_NONE) {
        whole = atomic_load_explicit(&tok->whole[id], memory_order_relaxed);
    }
    if (whole == WHOLE_YES) {
        return td_token_ids_append(enc->out, &id, 1);
    }
    enc->word.count = 0;
    TD_TRY(td_bpe_encode(tok->bpe, &enc->scratch, word, len, &enc->word));
    if (whole == WHOLE_UNKNOWN) {
        whole = enc->word.count == 1 && enc->word.ids[0] == id ? WHOLE_YES : WHOLE_NO;
        atomic_store_explicit(&tok->whole[id], whole, memory_order_relaxed);
    }
    for (size_t i = 0; i < enc->word.count; i++) {
        if (enc->word.ids[i] == TD_TOKEN_NONE) {
            TD_TRY(td_token_ids_append(enc->out, enc->tok->unknown_ids, enc->tok->unknown_count));
        } else {
            TD_TRY(td_token_ids_append(enc->out, &enc->word.ids[i], 1));
        }
    }
    return TD_OK;
}

/* The byte at a depth of the n-th special token; -1 when it is no longer than that. */
static int special_byte(const td_tokenizer_t *tok, uint32_t n, size_t depth)
{
    uint32_t id = tok->specials[n];
    size_t at = tok->starts[id] + depth;

    return at < tok->starts[id + 1] ? tok->bytes[at] : -1;
}

/* The first special token in [lo, hi) whose byte at a depth is at least `byte`. */
static uint32_t special_lower_bound(const td_tokenizer_t *tok, uint32_t lo, uint32_t hi,
                                    size_t depth, int byte)
{
    while (lo < hi) {
        uint32_t mid = lo + (hi - lo) / 2;
        if (special_byte(tok, mid, depth) < byte) {
            lo = mid + 1;
        } else {
            hi = mid;
        }
    }
    return lo;
}

/* The longest special token at the start of the text, or TD_TOKEN_NONE: narrows the sorted list
 * byte by byte, so many tokens with the same beginning cost no more than a few. */
static uint32_t match_special(const td_tokenizer_t *tok, const char *text, size_t len)
{
    uint32_t found = TD_TOKEN_NONE;
    uint32_t lo = 0;
    uint32_t hi = tok->special_count;

    for (size_t depth = 0; lo < hi; depth++) {
        if (special_byte(tok, lo, depth) < 0) {
            found = tok->specials[lo];
            lo++;
        }
        if (depth == len) {
            break;
        }
        lo = special_lower_bound(tok, lo, hi, depth, (uint8_t)text[depth]);
        hi = special_lower_bound(tok, lo, hi, depth, (uint8_t)text[depth] + 1);
    }
    return found;
}

/* Finds the next special token; its position is len when there is none. */
static uint32_t next_special(const td_tokenizer_t *tok, const char *text, size_t len,
                             size_t *pos_out)
{
    for (size_t pos = 0; pos < len; pos++) {
        if (tok->special_first[(uint8_t)text[pos]]) {
            uint32_t id = match_special(tok, text + pos, len - pos);
            if (id != TD_TOKEN_NONE) {
                *pos_out = pos;
                return id;
            }
        }
    }
    *pos_out = len;
    return TD_TOKEN_NONE;
}

static td_status_t encode_text(encoder_t *enc, const char *text, size_t len, bool parse_special)
{
    const td_tokenizer_t *tok = enc->tok;

    while (len > 0) {
        uint32_t special = TD_TOKEN_NONE;
        size_t plain_len = len;
        if (parse_special) {
            special = next_special(tok, text, len, &plain_len);
        }
        TD_TRY(td_pretok_split(tok->pretok, (const uint8_t *)text, plain_len, encode_word, enc));
        text += plain_len;
        len -= plain_len;
        if (special != TD_TOKEN_NONE) {
            size_t special_len = tok->starts[special + 1] - tok->starts[special];
            TD_TRY(td_token_ids_append(enc->out, &special, 1));
            text += special_len;
            len -= special_len;
        }
    }
    return TD_OK;
}

td_status_t td_tokenizer_encode_append(const td_tokenizer_t *tok, const char *text, size_t len,
                                       bool parse_special, td_token_ids_t *out)
{
    encoder_t enc = {.tok = tok, .out = out};
    td_status_t status = TD_OK;

    if (len > TD_TOKENIZER_TEXT_BYTES_MAX) {
        TD_LOG_DEBUG("text too long", "bytes=%zu bytes_max=%u", len, TD_TOKENIZER_TEXT_BYTES_MAX);
        return TD_ERR_TOO_LARGE;
    }
    status = encode_text(&enc, text, len, parse_special);
    td_bpe_scratch_fini(&enc.scratch);
    td_token_ids_fini(&enc.word);
    return status;
}

td_status_t td_tokenizer_encode(const td_tokenizer_t *tok, const char *text, size_t len,
                                bool parse_special, uint32_t **ids_out, size_t *count_out)
{
    td_token_ids_t ids = {0};
    td_status_t status = td_tokenizer_encode_append(tok, text, len, parse_special, &ids);

    if (status == TD_OK && ids.ids == NULL) {
        ids.ids = td_alloc(sizeof(*ids.ids)); /* empty text: still something to free */
        status = ids.ids == NULL ? TD_ERR_NO_MEMORY : TD_OK;
    }
    if (status != TD_OK) {
        td_token_ids_fini(&ids);
        return status;
    }
    *ids_out = ids.ids;
    *count_out = ids.count;
    return TD_OK;
}

#include "router/rtr_auth.h"

#include <inttypes.h>
#include <sodium.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/base/td_base.h"
#include "common/base/td_config.h"
#include "common/base/td_file.h"
#include "common/base/td_log.h"
#include "common/base/td_names.h"
#include "common/wire/td_bus.h"

#define HASH_BYTES 32u
#define SPACES " \t"
#define BYTE_ORDER_MARK "\xef\xbb\xbf"

struct rtr_auth {
    rtr_tenants_t *tenants;
    const uint8_t *secret;
    uint32_t count;
    uint8_t hashes[RTR_KEYS_MAX][HASH_BYTES];
    rtr_tenant_t *owners[RTR_KEYS_MAX];
};

static void hash_key(const char *key, size_t len, uint8_t out[HASH_BYTES])
{
    (void)crypto_generichash(out, HASH_BYTES, (const uint8_t *)key, len, NULL, 0);
}

/* Of the first word of a line: a key, or its hash. False: it looks like a hash, and is none. */
static bool hash_word(const char *word, uint8_t out[HASH_BYTES])
{
    const size_t prefix = sizeof(RTR_KEY_HASH_PREFIX) - 1;
    const char *end = NULL;
    size_t len = 0;

    if (strncmp(word, RTR_KEY_HASH_PREFIX, prefix) != 0) {
        hash_key(word, strlen(word), out);
        return true;
    }
    return sodium_hex2bin(out, HASH_BYTES, word + prefix, strlen(word + prefix), NULL, &len,
                          &end) == 0 &&
           len == HASH_BYTES && *end == '\0';
}

/* --- a line of the file ----------------------------------------------------------------------- */

typedef struct line {
    const char *key;
    const char *name; /* NULL: it has none */
    bool has_terms;
    rtr_tenant_terms_t terms;
} line_t;

static bool read_number(const char *text, uint32_t most, uint32_t *out)
{
    const td_option_t rule = {.type = TD_OPTION_COUNT, .min = 1, .max = most};
    uint64_t value = 0;

    if (td_option_parse_u64(&rule, text, &value) != TD_OK) {
        return false;
    }
    *out = (uint32_t)value;
    return true;
}

/* `NAME=VALUE`. Answers what was expected in place of it, or NULL. */
static const char *read_attribute(char *text, line_t *out)
{
    const struct {
        const char *name;
        uint32_t most;
        uint32_t *value;
        const char *expected;
    } numbers[] = {
        {"weight", RTR_FAIR_WEIGHT_MAX, &out->terms.weight, "weight=1 to 1000"},
        {"requests", RTR_TENANT_LIMIT_MAX, &out->terms.requests, "requests=1 to 1000000000"},
        {"requests-per-minute", RTR_TENANT_LIMIT_MAX, &out->terms.requests_per_minute,
         "requests-per-minute=1 to 1000000000"},
        {"tokens-per-minute", RTR_TENANT_LIMIT_MAX, &out->terms.tokens_per_minute,
         "tokens-per-minute=1 to 1000000000"},
    };
    char *value = strchr(text, '=');

    if (value != NULL) {
        *value++ = '\0';
    }
    if (value != NULL && strcmp(text, "name") == 0) {
        const bool twice = out->name != NULL;
        out->name = value;
        return !twice && rtr_tenant_name_is_valid(value) ? NULL
                                                         : "one name= of " RTR_TENANT_NAME_EXPECTED;
    }
    if (value != NULL && strcmp(text, "cache") == 0) {
        const bool twice = out->terms.cache != RTR_CACHE_UNSAID;
        out->has_terms = true;
        out->terms.cache = strcmp(value, "shared") == 0 ? RTR_CACHE_SHARED
                           : strcmp(value, "own") == 0  ? RTR_CACHE_OWN
                                                        : RTR_CACHE_UNSAID;
        return !twice && out->terms.cache != RTR_CACHE_UNSAID ? NULL : "cache=own or cache=shared";
    }
    for (size_t i = 0; value != NULL && i < TD_ARRAY_LEN(numbers); i++) {
        if (strcmp(text, numbers[i].name) == 0) {
            const bool twice = *numbers[i].value != 0;
            out->has_terms = true;
            return !twice && read_number(value, numbers[i].most, numbers[i].value)
                       ? NULL
                       : numbers[i].expected;
        }
    }
    return "name=, weight=, requests=, requests-per-minute=, tokens-per-minute= or "
           "cache= behind the key, each once";
}

/* Cuts it into words. Answers what was expected, or NULL. */
static const char *read_line(char *text, line_t *out)
{
    char *rest = NULL;
    char *word = strtok_r(text, SPACES, &rest);

    *out = (line_t){.key = word};
    for (word = strtok_r(NULL, SPACES, &rest); word != NULL; word = strtok_r(NULL, SPACES, &rest)) {
        const char *expected = read_attribute(word, out);
        if (expected != NULL) {
            return expected;
        }
    }
    return NULL;
}

static bool same_terms(const rtr_tenant_terms_t *a, const rtr_tenant_terms_t *b)
{
    return a->weight == b->weight && a->requests == b->requests &&
           a->requests_per_minute == b->requests_per_minute &&
           a->tokens_per_minute == b->tokens_per_minute && a->cache == b->cache;
}

/* No name that a file gives has a colon. Keyed, so that nobody who sees it can try keys. */
static void name_by_hash(const rtr_auth_t *auth, const uint8_t key_hash[HASH_BYTES],
                         char out[RTR_TENANT_NAME_CHARS_MAX + 1])
{
    uint8_t hash[crypto_generichash_BYTES_MIN];
    uint64_t number = 0;

    (void)crypto_generichash(hash, sizeof(hash), key_hash, HASH_BYTES, auth->secret,
                             TD_CLUSTER_SECRET_BYTES);
    memcpy(&number, hash, sizeof(number));
    (void)snprintf(out, RTR_TENANT_NAME_CHARS_MAX + 1, "key:%012" PRIx64, number >> 16);
}

/* Answers what was expected, or NULL. */
static const char *take_line(rtr_auth_t *auth, const line_t *line)
{
    rtr_tenant_terms_t terms = line->terms;
    rtr_tenant_t *owner = line->name == NULL ? NULL : rtr_tenants_find(auth->tenants, line->name);
    uint8_t hash[HASH_BYTES];
    char name[RTR_TENANT_NAME_CHARS_MAX + 1];

    if (auth->count == RTR_KEYS_MAX) {
        return "at most 1024 keys";
    }
    if (!hash_word(line->key, hash)) {
        return "64 hexadecimal digits behind " RTR_KEY_HASH_PREFIX;
    }
    for (uint32_t i = 0; i < auth->count; i++) {
        if (memcmp(hash, auth->hashes[i], HASH_BYTES) == 0) {
            return "each key once";
        }
    }
    terms.weight = TD_MAX(terms.weight, 1);
    terms.cache = terms.cache == RTR_CACHE_UNSAID ? RTR_CACHE_OWN : terms.cache;
    if (owner != NULL && line->has_terms && !same_terms(&terms, &owner->terms)) {
        return "what the first key of that name has, or nothing";
    }
    name_by_hash(auth, hash, name);
    if (owner == NULL && rtr_tenants_add(auth->tenants, line->name == NULL ? name : line->name,
                                         &terms, &owner) != TD_OK) {
        return "a key of another hash";
    }
    memcpy(auth->hashes[auth->count], hash, HASH_BYTES);
    auth->owners[auth->count++] = owner;
    return NULL;
}

/* --- the file --------------------------------------------------------------------------------- */

/* Answers what was expected in place of a line, or NULL. text: ends with a NUL behind len bytes. */
static const char *take_text(rtr_auth_t *auth, char *text, size_t len, uint32_t number)
{
    line_t line;
    const char *expected = NULL;

    if (memchr(text, '\0', len) != NULL) {
        return "no NUL byte"; /* what is behind it would be passed over */
    }
    text[strcspn(text, "\r\n")] = '\0';
    if (strlen(text) > RTR_KEY_LINE_BYTES_MAX) {
        return "at most 1022 bytes";
    }
    if (number == 1 && strncmp(text, BYTE_ORDER_MARK, sizeof(BYTE_ORDER_MARK) - 1) == 0) {
        return "no byte order mark"; /* it would be part of the key */
    }
    if (text[0] == '#' || text[strspn(text, SPACES)] == '\0') {
        return NULL;
    }
    expected = read_line(text, &line);
    return expected != NULL ? expected : take_line(auth, &line);
}

static td_status_t read_keys(FILE *file, const char *path, rtr_auth_t *auth)
{
    const char *expected = NULL;
    uint32_t number = 0;
    char *text = NULL;
    size_t room = 0;
    ssize_t len = 0;

    while (expected == NULL && (len = getline(&text, &room, file)) >= 0) {
        expected = take_text(auth, text, (size_t)len, ++number);
    }
    if (text != NULL) {
        sodium_memzero(text, room);
    }
    free(text);
    if (expected == NULL && auth->count == 0) {
        TD_LOG_ERROR("api key file refused", "file=%s expected=\"one key a line\"", path);
        return TD_ERR_INVALID;
    }
    if (expected != NULL) {
        TD_LOG_ERROR("api key file refused", "file=%s line=%u expected=\"%s\"", path, number,
                     expected);
        return TD_ERR_INVALID;
    }
    return TD_OK;
}

td_status_t rtr_auth_load(const char *path, const uint8_t *secret, rtr_tenants_t *tenants,
                          rtr_auth_t **out)
{
    rtr_auth_t *auth = NULL;
    FILE *file = NULL;
    struct stat st;
    int fd = -1;
    td_status_t status = TD_ERR_NO_MEMORY;

    TD_TRY(td_file_open("API keys", path, true, &fd, &st));
    file = fdopen(fd, "r");
    if (file == NULL) {
        (void)close(fd);
        return TD_ERR_NO_MEMORY;
    }
    auth = td_calloc(1, sizeof(*auth));
    if (auth != NULL) {
        auth->tenants = tenants;
        auth->secret = secret;
        status = read_keys(file, path, auth);
    }
    (void)fclose(file);
    if (status != TD_OK) {
        td_free(auth);
        return status;
    }
    *out = auth;
    return TD_OK;
}

void rtr_auth_destroy(rtr_auth_t *auth)
{
    td_free(auth);
}

rtr_tenant_t *rtr_auth_check(const rtr_auth_t *auth, const char *header)
{
    static const char scheme[] = "Bearer ";
    uint8_t hash[HASH_BYTES];
    rtr_tenant_t *owner = NULL;

    if (header == NULL || strncasecmp(header, scheme, sizeof(scheme) - 1) != 0) {
        return NULL;
    }
    hash_key(header + sizeof(scheme) - 1, strlen(header + sizeof(scheme) - 1), hash);
    for (uint32_t i = 0; i < auth->count; i++) {
        owner = sodium_memcmp(hash, auth->hashes[i], HASH_BYTES) == 0 ? auth->owners[i] : owner;
    }
    return owner;
}

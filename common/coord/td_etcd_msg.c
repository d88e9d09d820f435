#include "common/coord/td_etcd_msg.h"

#include <inttypes.h>
#include <jansson.h>
#include <sodium.h>
#include <stdio.h>
#include <string.h>

#include "common/base/td_base.h"

#define KEY64_MAX (sodium_base64_ENCODED_LEN(TD_ETCD_KEY_CHARS_MAX, sodium_base64_VARIANT_ORIGINAL))

/* --- requests --------------------------------------------------------------------------------- */

static td_status_t encode64(const char *text, char out[KEY64_MAX])
{
    const size_t len = strlen(text);

    if (len > TD_ETCD_KEY_CHARS_MAX) {
        return TD_ERR_TOO_LARGE;
    }
    (void)sodium_bin2base64(out, KEY64_MAX, (const unsigned char *)text, len,
                            sodium_base64_VARIANT_ORIGINAL);
    return TD_OK;
}

td_status_t td_etcd_write_grant(td_str_t *out, uint64_t ttl_s)
{
    return td_str_printf(out, "{\"TTL\":\"%" PRIu64 "\"}", ttl_s);
}

td_status_t td_etcd_write_lease(td_str_t *out, uint64_t lease)
{
    return td_str_printf(out, "{\"ID\":\"%" PRIu64 "\"}", lease);
}

td_status_t td_etcd_write_range(td_str_t *out, const char *key)
{
    char key64[KEY64_MAX];

    TD_TRY(encode64(key, key64));
    return td_str_printf(out, "{\"key\":\"%s\"}", key64);
}

td_status_t td_etcd_write_list(td_str_t *out, const char *prefix)
{
    char key64[KEY64_MAX];
    char end64[KEY64_MAX];
    char end[TD_ETCD_KEY_CHARS_MAX + 1];
    const size_t len = strlen(prefix);

    TD_ASSERT(len > 0);
    TD_TRY(encode64(prefix, key64));
    (void)snprintf(end, sizeof(end), "%s", prefix);
    end[len - 1]++; /* the first key that doesn't begin so; prefixes end with a printable letter */
    TD_TRY(encode64(end, end64));
    return td_str_printf(out, "{\"key\":\"%s\",\"range_end\":\"%s\",\"limit\":\"%u\"}", key64,
                         end64, TD_ETCD_ENTRIES_MAX);
}

static td_status_t write_compare(td_str_t *out, const char *key64, uint64_t revision)
{
    return td_str_printf(out,
                         "{\"compare\":[{\"key\":\"%s\",\"target\":\"CREATE\",\"result\":\"EQUAL\","
                         "\"create_revision\":\"%" PRIu64 "\"}],",
                         key64, revision);
}

td_status_t td_etcd_write_campaign(td_str_t *out, const char *key, const char *value,
                                   uint64_t lease)
{
    char key64[KEY64_MAX];
    char value64[KEY64_MAX];

    TD_TRY(encode64(key, key64));
    TD_TRY(encode64(value, value64));
    TD_TRY(write_compare(out, key64, 0));
    return td_str_printf(out,
                         "\"success\":[{\"request_put\":{\"key\":\"%s\",\"value\":\"%s\","
                         "\"lease\":\"%" PRIu64 "\"}},{\"request_range\":{\"key\":\"%s\"}}],"
                         "\"failure\":[{\"request_range\":{\"key\":\"%s\"}}]}",
                         key64, value64, lease, key64, key64);
}

td_status_t td_etcd_write_confirm(td_str_t *out, const char *key, uint64_t revision)
{
    char key64[KEY64_MAX];

    TD_TRY(encode64(key, key64));
    TD_TRY(write_compare(out, key64, revision));
    return td_str_printf(out,
                         "\"success\":[{\"request_range\":{\"key\":\"%s\"}}],"
                         "\"failure\":[{\"request_range\":{\"key\":\"%s\"}}]}",
                         key64, key64);
}

td_status_t td_etcd_write_resign(td_str_t *out, const char *key, uint64_t revision)
{
    char key64[KEY64_MAX];

    TD_TRY(encode64(key, key64));
    TD_TRY(write_compare(out, key64, revision));
    return td_str_printf(out, "\"success\":[{\"request_delete_range\":{\"key\":\"%s\"}}]}", key64);
}

td_status_t td_etcd_write_authenticate(td_str_t *out, const char *user, const char *password)
{
    json_t *root = json_pack("{s:s,s:s}", "name", user, "password", password);
    char *text = root == NULL ? NULL : json_dumps(root, JSON_COMPACT);
    td_status_t status = TD_ERR_NO_MEMORY; /* or a text that is not UTF-8 */

    if (text != NULL) {
        status = td_str_append(out, text, strlen(text));
        sodium_memzero(text, strlen(text));
    }
    free(text);
    json_decref(root);
    return status;
}

/* --- answers ---------------------------------------------------------------------------------- */

/* An int64, which the gateway writes as a string. Absent: 0. */
static td_status_t read_number(const json_t *object, const char *name, uint64_t *out)
{
    const json_t *value = json_object_get(object, name);
    const char *text = NULL;
    uint64_t number = 0;

    *out = 0;
    if (value == NULL) {
        return TD_OK;
    }
    if (json_is_integer(value)) {
        if (json_integer_value(value) < 0) {
            return TD_ERR_PROTOCOL;
        }
        *out = (uint64_t)json_integer_value(value);
        return TD_OK;
    }
    text = json_string_value(value);
    if (text == NULL || text[0] == '\0' || strlen(text) > 19) {
        return TD_ERR_PROTOCOL;
    }
    for (; *text != '\0'; text++) {
        if (*text < '0' || *text > '9') {
            return TD_ERR_PROTOCOL;
        }
        number = number * 10 + (uint64_t)(*text - '0');
    }
    if (number > INT64_MAX) {
        return TD_ERR_PROTOCOL;
    }
    *out = number;
    return TD_OK;
}

/* A name that goes into logs: what is not printable becomes '?'. Absent: "". */
static td_status_t read_text(const json_t *kv, const char *name, char *out, size_t chars_max)
{
    const json_t *value = json_object_get(kv, name);
    unsigned char bytes[TD_ETCD_KEY_CHARS_MAX];
    size_t len = 0;

    TD_ASSERT(chars_max <= sizeof(bytes));
    out[0] = '\0';
    if (value == NULL) {
        return TD_OK;
    }
    if (!json_is_string(value) ||
        sodium_base642bin(bytes, chars_max, json_string_value(value), json_string_length(value),
                          NULL, &len, NULL, sodium_base64_VARIANT_ORIGINAL) != 0) {
        return TD_ERR_PROTOCOL;
    }
    for (size_t i = 0; i < len; i++) {
        out[i] = bytes[i] > 0x20 && bytes[i] < 0x7f ? (char)bytes[i] : '?';
    }
    out[len] = '\0';
    return TD_OK;
}

static td_status_t read_entries(const json_t *kvs, td_etcd_answer_t *a)
{
    const size_t count = TD_MIN(json_array_size(kvs), (size_t)TD_ETCD_ENTRIES_MAX);

    for (size_t i = 0; i < count; i++) {
        td_etcd_entry_t *entry = &a->entries[i];
        TD_TRY(read_text(json_array_get(kvs, i), "key", entry->key, TD_ETCD_KEY_CHARS_MAX));
        TD_TRY(read_text(json_array_get(kvs, i), "value", entry->value, TD_ETCD_VALUE_CHARS_MAX));
        a->entry_count++;
    }
    return TD_OK;
}

static td_status_t read_kvs(const json_t *range, td_etcd_answer_t *a)
{
    const json_t *kvs = json_object_get(range, "kvs");
    const json_t *kv = json_array_get(kvs, 0);

    if (a->has_key || kvs == NULL || (json_is_array(kvs) && kv == NULL)) {
        return TD_OK;
    }
    if (!json_is_object(kv)) {
        return TD_ERR_PROTOCOL;
    }
    a->has_key = true;
    TD_TRY(read_number(kv, "create_revision", &a->create_revision));
    TD_TRY(read_number(kv, "lease", &a->key_lease));
    if (a->create_revision == 0) {
        return TD_ERR_PROTOCOL;
    }
    return read_text(kv, "value", a->value, TD_ETCD_VALUE_CHARS_MAX);
}

/* The operations of a transaction that was carried out. */
static td_status_t read_responses(const json_t *body, td_etcd_answer_t *a)
{
    const json_t *list = json_object_get(body, "responses");

    if (list != NULL && !json_is_array(list)) {
        return TD_ERR_PROTOCOL;
    }
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *range = json_object_get(json_array_get(list, i), "response_range");
        if (range != NULL) {
            TD_TRY(read_kvs(range, a));
        }
    }
    return TD_OK;
}

static td_status_t read_body(const json_t *root, td_etcd_answer_t *a)
{
    const json_t *result = json_object_get(root, "result"); /* of a stream: keepalive */
    const json_t *body = result != NULL ? result : root;
    const json_t *succeeded = json_object_get(body, "succeeded");
    const json_t *token = json_object_get(body, "token");
    uint64_t revision = 0;

    TD_TRY(read_number(json_object_get(body, "header"), "revision", &revision));
    if (revision == 0 || (succeeded != NULL && !json_is_boolean(succeeded)) ||
        (token != NULL &&
         (!json_is_string(token) || json_string_length(token) > TD_ETCD_TOKEN_CHARS_MAX))) {
        return TD_ERR_PROTOCOL;
    }
    a->succeeded = json_is_true(succeeded);
    TD_TRY(read_number(body, "ID", &a->lease));
    TD_TRY(read_number(body, "TTL", &a->ttl_s));
    TD_TRY(read_responses(body, a));
    if (token != NULL) {
        (void)snprintf(a->token, sizeof(a->token), "%s", json_string_value(token));
        if (a->token[strspn(a->token, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                                      "0123456789-_.~+/=")] != '\0') {
            return TD_ERR_PROTOCOL; /* it becomes part of a header */
        }
    }
    TD_TRY(read_entries(json_object_get(body, "kvs"), a));
    return read_kvs(body, a);
}

td_status_t td_etcd_answer_decode(const char *bytes, size_t len, td_etcd_answer_t *out)
{
    td_etcd_answer_t answer = {0};
    td_status_t status = TD_ERR_PROTOCOL;
    json_t *root = NULL;
    json_error_t error;

    if (len > TD_ETCD_ANSWER_BYTES_MAX) {
        return TD_ERR_TOO_LARGE;
    }
    /* A stream's answer may be followed by more. */
    root = json_loadb(bytes, len, JSON_DISABLE_EOF_CHECK, &error);
    if (json_is_object(root)) {
        status = read_body(root, &answer);
    } else if (root == NULL && json_error_code(&error) == json_error_out_of_memory) {
        status = TD_ERR_NO_MEMORY;
    }
    json_decref(root);
    if (status == TD_OK) {
        *out = answer;
    }
    return status;
}

void td_etcd_error_text(const char *bytes, size_t len, char *out, size_t out_bytes)
{
    json_error_t error;
    json_t *root = len > TD_ETCD_ANSWER_BYTES_MAX
                       ? NULL
                       : json_loadb(bytes, len, JSON_DISABLE_EOF_CHECK, &error);
    const char *text = json_string_value(json_object_get(root, "message"));

    if (text == NULL) {
        text = json_string_value(json_object_get(root, "error"));
    }
    (void)snprintf(out, out_bytes, "%s", text == NULL ? "" : text);
    for (char *at = out; *at != '\0'; at++) {
        if (*at < 0x20 || *at > 0x7e || *at == '"') {
            *at = '?';
        }
    }
    json_decref(root);
}

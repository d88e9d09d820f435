/* td_etcd_msg.h - what is said to etcd's JSON gateway (v3) and what it answers, as text: no I/O.
 * int64 travel as strings, keys and values as base64; false, 0 and empty are absent.
 * Source: etcd 3.4, rpc.proto and kv.proto. Threads: any. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/td_buf.h"
#include "common/base/td_status.h"

#define TD_ETCD_ANSWER_BYTES_MAX 65536u
#define TD_ETCD_KEY_CHARS_MAX 255u
#define TD_ETCD_VALUE_CHARS_MAX 128u
#define TD_ETCD_TOKEN_CHARS_MAX 2047u
#define TD_ETCD_ENTRIES_MAX 16u /* of a range; what is behind them is not read */

typedef struct td_etcd_entry {
    char key[TD_ETCD_KEY_CHARS_MAX + 1];
    char value[TD_ETCD_VALUE_CHARS_MAX + 1];
} td_etcd_entry_t;

/** What an answer says; which of it must be there, the asker knows. */
typedef struct td_etcd_answer {
    uint64_t lease; /* 0: not named */
    uint64_t ttl_s; /* of that lease; 0: absent, the lease is over */
    bool succeeded; /* the comparison of a transaction */
    bool has_key;   /* the first key of the first range in it */
    uint64_t create_revision;
    uint64_t key_lease; /* 0: none */
    char value[TD_ETCD_VALUE_CHARS_MAX + 1];
    uint32_t entry_count; /* of a range that is the whole answer */
    td_etcd_entry_t entries[TD_ETCD_ENTRIES_MAX];
    char token[TD_ETCD_TOKEN_CHARS_MAX + 1];
} td_etcd_answer_t;

/** Reads untrusted bytes, at most TD_ETCD_ANSWER_BYTES_MAX. Every true answer has a header with a
 * revision, so that text which merely is JSON is never taken for a lease that is over.
 * Errors: TD_ERR_PROTOCOL, TD_ERR_TOO_LARGE, TD_ERR_NO_MEMORY. */
TD_MUST_CHECK td_status_t td_etcd_answer_decode(const char *bytes, size_t len,
                                                td_etcd_answer_t *out);
/** What an error answer says, printable and cut to fit; "" when it is none of etcd's. */
void td_etcd_error_text(const char *bytes, size_t len, char *out, size_t out_bytes);

/* Bodies of requests, appended. Errors: TD_ERR_NO_MEMORY, TD_ERR_TOO_LARGE (key or value). */
TD_MUST_CHECK td_status_t td_etcd_write_grant(td_str_t *out, uint64_t ttl_s);
TD_MUST_CHECK td_status_t td_etcd_write_lease(td_str_t *out, uint64_t lease);
TD_MUST_CHECK td_status_t td_etcd_write_range(td_str_t *out, const char *key);
/** All keys that begin so, in their order, TD_ETCD_ENTRIES_MAX at most. */
TD_MUST_CHECK td_status_t td_etcd_write_list(td_str_t *out, const char *prefix);
/** Creates the key under a lease, if it is not there; answers the key either way. */
TD_MUST_CHECK td_status_t td_etcd_write_campaign(td_str_t *out, const char *key, const char *value,
                                                 uint64_t lease);
/** Compares the key's create_revision; answers the key. */
TD_MUST_CHECK td_status_t td_etcd_write_confirm(td_str_t *out, const char *key, uint64_t revision);
/** Deletes the key if it is the one of that create_revision. */
TD_MUST_CHECK td_status_t td_etcd_write_resign(td_str_t *out, const char *key, uint64_t revision);
TD_MUST_CHECK td_status_t td_etcd_write_authenticate(td_str_t *out, const char *user,
                                                     const char *password);

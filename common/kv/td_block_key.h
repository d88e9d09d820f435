/* td_block_key.h - what names a KV block, and what proves its bytes. Source: design, section 3.
 * key = BLAKE2b-128(root; parent || tokens as u32 LE). root = BLAKE2b-256(cluster secret; canonical
 * text of everything that may change the block's bytes), each field length-prefixed (I8).
 * Threads: any. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/td_status.h"

#define TD_BLOCK_KEY_BYTES 16
#define TD_BLOCK_ROOT_BYTES 32
#define TD_CLUSTER_SECRET_BYTES 32
#define TD_CACHE_SALT_BYTES_MAX 256u
#define TD_KV_LAYOUT_VERSION 1u

typedef struct td_block_key {
    uint8_t bytes[TD_BLOCK_KEY_BYTES];
} td_block_key_t;

typedef struct td_block_root {
    uint8_t bytes[TD_BLOCK_ROOT_BYTES];
} td_block_root_t;

/** Everything a block's bytes depend on besides the tokens. Text is borrowed during the call. */
typedef struct td_block_root_fields {
    const uint8_t *fingerprint; /* [32], of the model file */
    const char *numerics_class;
    uint32_t layout_version;
    const char *codec; /* td_kv_codec_name() */
    uint32_t block_tokens;
    const char *adapter; /* "" = none */
    const char *salt;    /* tenant salt, "" = none */
    size_t salt_len;     /* bytes, <= TD_CACHE_SALT_BYTES_MAX */
} td_block_root_fields_t;

/** Reads the cluster secret: 32..4096 bytes of file, hashed to TD_CLUSTER_SECRET_BYTES. NULL path:
 * a fixed, public secret for a process that runs alone. Errors: TD_ERR_IO, TD_ERR_INVALID (shorter
 * than 32 bytes, or readable by others: mode & 077). */
TD_MUST_CHECK td_status_t td_cluster_secret_load(const char *path,
                                                 uint8_t out[TD_CLUSTER_SECRET_BYTES]);
void td_block_root_make(const uint8_t secret[TD_CLUSTER_SECRET_BYTES],
                        const td_block_root_fields_t *fields, td_block_root_t *out);
/** Key of a full block. parent NULL = the first block (16 zero bytes). */
void td_block_key_next(const td_block_root_t *root, const td_block_key_t *parent,
                       const uint32_t *tokens, uint32_t token_count, td_block_key_t *out);
/** Key of a partial last block: also over the token count, so it can never equal a full block's.
 * It only names a descriptor of the hand-off and is never indexed. */
void td_block_key_partial(const td_block_root_t *root, const td_block_key_t *parent,
                          const uint32_t *tokens, uint32_t token_count, td_block_key_t *out);
/** Keys of all full blocks of a prompt. Shape: out [tokens / block_tokens]. */
void td_block_keys(const td_block_root_t *root, const uint32_t *tokens, size_t token_count,
                   uint32_t block_tokens, td_block_key_t *out);
/** Key of a known prompt (tokens 0, 1, 2, ...): processes whose answers differ must not pair. */
void td_block_probe_key(const td_block_root_t *root, uint32_t block_tokens, td_block_key_t *out);
/** Proof of the cluster's secret by a process that has no model: a store. */
void td_block_probe_key_without_model(const uint8_t secret[TD_CLUSTER_SECRET_BYTES],
                                      td_block_key_t *out);
static inline bool td_block_key_equal(const td_block_key_t *a, const td_block_key_t *b)
{
    return __builtin_memcmp(a->bytes, b->bytes, TD_BLOCK_KEY_BYTES) == 0;
}

/** The first 8 bytes, little endian. Keys are outputs of a keyed hash: it stands for the key where
 * a chance of 2^-64 does no harm. */
static inline uint64_t td_block_key_word(const td_block_key_t *key)
{
    uint64_t word = 0;
    for (uint32_t i = 0; i < sizeof(word); i++) {
        word |= (uint64_t)key->bytes[i] << (8 * i);
    }
    return word;
}

/** XXH3-64 of a block's bytes: found once for each copy. */
uint64_t td_block_content_hash(const void *bytes, size_t len);
/** The checksum that travels: the content bound to its name and the allocation it was read from, so
 * that the right bytes under the wrong name, or of an earlier use of the memory, do not pass (I3).
 */
uint64_t td_block_checksum(uint64_t content_hash, const td_block_key_t *key, uint64_t epoch);

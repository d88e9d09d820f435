#include "common/kv/td_block_key.h"

#include <sodium.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include "common/base/td_base.h"
#include "common/base/td_file.h"
#include "common/kv/td_hash_avx2.h"
#include "common/base/td_log.h"

#define SECRET_FILE_BYTES_MIN 32
#define SECRET_FILE_BYTES_MAX 4096

static void hash_u32(crypto_generichash_state *state, uint32_t value)
{
    uint8_t le[4] = {(uint8_t)value, (uint8_t)(value >> 8), (uint8_t)(value >> 16),
                     (uint8_t)(value >> 24)};
    (void)crypto_generichash_update(state, le, sizeof(le));
}

/* Length first: "ab" + "c" and "a" + "bc" must not meet. */
static void hash_field(crypto_generichash_state *state, const void *bytes, size_t len)
{
    hash_u32(state, (uint32_t)len);
    (void)crypto_generichash_update(state, bytes, len);
}

static void hash_tokens(crypto_generichash_state *state, const uint32_t *tokens, uint32_t count)
{
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    (void)crypto_generichash_update(state, (const uint8_t *)tokens, (size_t)count * 4);
#else
    for (uint32_t i = 0; i < count; i++) {
        hash_u32(state, tokens[i]);
    }
#endif
}

td_status_t td_cluster_secret_load(const char *path, uint8_t out[TD_CLUSTER_SECRET_BYTES])
{
    static const char alone[] = "tandem: a process that runs alone has no cluster secret";
    uint8_t bytes[SECRET_FILE_BYTES_MAX];
    struct stat st;
    ssize_t got = 0;
    int fd = -1;

    if (path == NULL) {
        (void)crypto_generichash(out, TD_CLUSTER_SECRET_BYTES, (const uint8_t *)alone,
                                 sizeof(alone) - 1, NULL, 0);
        return TD_OK;
    }
    TD_TRY(td_file_open("cluster secret", path, true, &fd, &st));
    got = read(fd, bytes, sizeof(bytes));
    (void)close(fd);
    if (got < SECRET_FILE_BYTES_MIN) {
        TD_LOG_ERROR("file refused",
                     "what=\"cluster secret\" file=%s bytes=%zd expected=\"at least 32 bytes\"",
                     path, got);
        return TD_ERR_INVALID;
    }
    (void)crypto_generichash(out, TD_CLUSTER_SECRET_BYTES, bytes, (size_t)got, NULL, 0);
    sodium_memzero(bytes, sizeof(bytes));
    return TD_OK;
}

void td_block_root_make(const uint8_t secret[TD_CLUSTER_SECRET_BYTES],
                        const td_block_root_fields_t *f, td_block_root_t *out)
{
    crypto_generichash_state state;

    (void)crypto_generichash_init(&state, secret, TD_CLUSTER_SECRET_BYTES, TD_BLOCK_ROOT_BYTES);
    hash_field(&state, "tandem block root", strlen("tandem block root"));
    hash_field(&state, f->fingerprint, 32);
    hash_field(&state, f->numerics_class, strlen(f->numerics_class));
    hash_u32(&state, f->layout_version);
    hash_field(&state, f->codec, strlen(f->codec));
    hash_u32(&state, f->block_tokens);
    hash_field(&state, f->adapter, strlen(f->adapter));
    hash_field(&state, f->salt, f->salt_len);
    (void)crypto_generichash_final(&state, out->bytes, TD_BLOCK_ROOT_BYTES);
}

static void key_make(const td_block_root_t *root, const td_block_key_t *parent,
                     const uint32_t *tokens, uint32_t token_count, bool partial,
                     td_block_key_t *out)
{
    static const td_block_key_t zero;
    crypto_generichash_state state;

    (void)crypto_generichash_init(&state, root->bytes, TD_BLOCK_ROOT_BYTES, TD_BLOCK_KEY_BYTES);
    (void)crypto_generichash_update(&state, parent != NULL ? parent->bytes : zero.bytes,
                                    TD_BLOCK_KEY_BYTES);
    hash_tokens(&state, tokens, token_count);
    if (partial) {
        hash_u32(&state, token_count);
    }
    (void)crypto_generichash_final(&state, out->bytes, TD_BLOCK_KEY_BYTES);
}

void td_block_key_next(const td_block_root_t *root, const td_block_key_t *parent,
                       const uint32_t *tokens, uint32_t token_count, td_block_key_t *out)
{
    key_make(root, parent, tokens, token_count, false, out);
}

void td_block_key_partial(const td_block_root_t *root, const td_block_key_t *parent,
                          const uint32_t *tokens, uint32_t token_count, td_block_key_t *out)
{
    key_make(root, parent, tokens, token_count, true, out);
}

void td_block_keys(const td_block_root_t *root, const uint32_t *tokens, size_t token_count,
                   uint32_t block_tokens, td_block_key_t *out)
{
    size_t blocks = token_count / block_tokens;
    for (size_t i = 0; i < blocks; i++) {
        key_make(root, i == 0 ? NULL : &out[i - 1], tokens + i * block_tokens, block_tokens, false,
                 &out[i]);
    }
}

void td_block_probe_key(const td_block_root_t *root, uint32_t block_tokens, td_block_key_t *out)
{
    uint32_t tokens[1024];
    TD_ASSERT(block_tokens <= TD_ARRAY_LEN(tokens));
    for (uint32_t i = 0; i < block_tokens; i++) {
        tokens[i] = i;
    }
    key_make(root, NULL, tokens, block_tokens, false, out);
}

void td_block_probe_key_without_model(const uint8_t secret[TD_CLUSTER_SECRET_BYTES],
                                      td_block_key_t *out)
{
    static const uint8_t none[32];
    td_block_root_fields_t fields = {
        .fingerprint = none, .numerics_class = "store", .codec = "", .adapter = "", .salt = ""};
    td_block_root_t root;

    td_block_root_make(secret, &fields, &root);
    key_make(&root, NULL, NULL, 0, false, out);
}

uint64_t td_block_content_hash(const void *bytes, size_t len)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) {
        return td_hash_avx2(bytes, len);
    }
#endif
    return XXH3_64bits(bytes, len);
}

uint64_t td_block_checksum(uint64_t content_hash, const td_block_key_t *key, uint64_t epoch)
{
    uint8_t bound[TD_BLOCK_KEY_BYTES + 16];
    memcpy(bound, key->bytes, TD_BLOCK_KEY_BYTES);
    memcpy(bound + TD_BLOCK_KEY_BYTES, &content_hash, 8);
    memcpy(bound + TD_BLOCK_KEY_BYTES + 8, &epoch, 8);
    return XXH3_64bits(bound, sizeof(bound));
}

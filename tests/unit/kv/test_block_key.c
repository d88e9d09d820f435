#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/base/td_base.h"
#include "common/kv/td_block_key.h"

#define GOLDEN_ROOT "f26277de85c9159a8b5e2895c67f414f6d54dd14392cbed9a08f9fd0091a8dd5"
#define GOLDEN_KEY0 "c899ac37d8674b21b2b46dc067cef93d"
#define GOLDEN_KEY1 "3edffa79efc34d9111ea3ff5cf12c47c"
#define GOLDEN_PARTIAL "11a136eb3848fe07beeebb4cc1afb2e6"

static td_block_root_t root_of(const char *salt, const char *numerics, uint32_t block_tokens)
{
    uint8_t secret[TD_CLUSTER_SECRET_BYTES];
    uint8_t fingerprint[32];
    td_block_root_fields_t fields = {.fingerprint = fingerprint,
                                     .numerics_class = numerics,
                                     .layout_version = TD_KV_LAYOUT_VERSION,
                                     .codec = "f16",
                                     .block_tokens = block_tokens,
                                     .adapter = "",
                                     .salt = salt,
                                     .salt_len = strlen(salt)};
    td_block_root_t root;

    memset(secret, 7, sizeof(secret));
    memset(fingerprint, 9, sizeof(fingerprint));
    td_block_root_make(secret, &fields, &root);
    return root;
}

static void hex(const uint8_t *bytes, size_t len, char *out)
{
    for (size_t i = 0; i < len; i++) {
        (void)snprintf(out + 2 * i, 3, "%02x", bytes[i]);
    }
}

/* Made once by an independent program (Python's hashlib): a change of these strands every cached
 * block. */
static void test_f12_block_keys_are_the_same_in_every_process(void **state)
{
    td_block_root_t root = root_of("tenant-a", "cpu/mixed/r1", 16);
    uint32_t tokens[40];
    td_block_key_t keys[2];
    td_block_key_t partial;
    char text[65];
    (void)state;

    for (uint32_t i = 0; i < 40; i++) {
        tokens[i] = i * 1000003u;
    }
    hex(root.bytes, 32, text);
    assert_string_equal(text, GOLDEN_ROOT);
    td_block_keys(&root, tokens, 40, 16, keys);
    hex(keys[0].bytes, 16, text);
    assert_string_equal(text, GOLDEN_KEY0);
    hex(keys[1].bytes, 16, text);
    assert_string_equal(text, GOLDEN_KEY1);
    td_block_key_partial(&root, &keys[1], tokens + 32, 8, &partial);
    hex(partial.bytes, 16, text);
    assert_string_equal(text, GOLDEN_PARTIAL);
}

/* I8: different salts never share a key; nor do models, numerics classes or block sizes. */
static void test_i8_salts_never_share_a_block(void **state)
{
    td_block_root_t roots[4] = {root_of("a", "cpu/mixed/r1", 16), root_of("b", "cpu/mixed/r1", 16),
                                root_of("a", "cpu/exact/r1", 16), root_of("a", "cpu/mixed/r1", 32)};
    uint32_t tokens[16] = {1, 2, 3};
    td_block_key_t keys[4];
    (void)state;

    for (int i = 0; i < 4; i++) {
        td_block_key_next(&roots[i], NULL, tokens, 16, &keys[i]);
        for (int k = 0; k < i; k++) {
            assert_false(td_block_key_equal(&keys[i], &keys[k]));
        }
    }
}

static void test_block_key_chains_over_its_parent(void **state)
{
    td_block_root_t root = root_of("", "cpu/mixed/r1", 16);
    uint32_t a[32] = {1};
    uint32_t b[32] = {2}; /* differs in the first block only */
    td_block_key_t ka[2];
    td_block_key_t kb[2];
    (void)state;

    td_block_keys(&root, a, 32, 16, ka);
    td_block_keys(&root, b, 32, 16, kb);
    assert_false(td_block_key_equal(&ka[1], &kb[1]));
}

static void test_partial_key_differs_from_full_key(void **state)
{
    td_block_root_t root = root_of("", "cpu/mixed/r1", 16);
    uint32_t tokens[16] = {5};
    td_block_key_t full;
    td_block_key_t partial;
    (void)state;

    td_block_key_next(&root, NULL, tokens, 16, &full);
    td_block_key_partial(&root, NULL, tokens, 16, &partial);
    assert_false(td_block_key_equal(&full, &partial));
}

/* I3: right bytes under another name, or of another allocation, do not pass. */
static void test_i3_checksum_is_bound_to_key_and_epoch(void **state)
{
    td_block_key_t a = {{1}};
    td_block_key_t b = {{2}};
    uint64_t hash = td_block_content_hash("bytes", 5);
    (void)state;

    assert_int_not_equal(td_block_checksum(hash, &a, 1), td_block_checksum(hash, &b, 1));
    assert_int_not_equal(td_block_checksum(hash, &a, 1), td_block_checksum(hash, &a, 2));
    assert_int_not_equal(td_block_checksum(hash, &a, 1),
                         td_block_checksum(td_block_content_hash("bytez", 5), &a, 1));
    assert_int_equal(td_block_checksum(hash, &a, 1), td_block_checksum(hash, &a, 1));
}

/* Blocks are compared across machines: whatever instructions a CPU has, the hash is XXH3's. */
static void test_content_hash_is_xxh3_of_any_length(void **state)
{
    static uint8_t bytes[70000];
    (void)state;

    for (uint32_t i = 0; i < sizeof(bytes); i++) {
        bytes[i] = (uint8_t)(i * 2654435761u >> 13);
    }
    for (size_t len = 0; len < sizeof(bytes); len += 1 + len / 7) {
        assert_int_equal(td_block_content_hash(bytes + len % 64, len - TD_MIN(len, len % 64)),
                         XXH3_64bits(bytes + len % 64, len - TD_MIN(len, len % 64)));
    }
}

static void test_secret_file_must_be_private_and_long_enough(void **state)
{
    char path[] = "build/secret-test-XXXXXX";
    uint8_t out[TD_CLUSTER_SECRET_BYTES];
    int fd = mkstemp(path);
    (void)state;

    assert_true(fd >= 0);
    assert_int_equal(write(fd, "0123456789abcdef0123456789abcdef", 32), 32);
    assert_int_equal(td_cluster_secret_load(path, out), TD_OK);
    assert_int_equal(fchmod(fd, 0644), 0);
    assert_int_equal(td_cluster_secret_load(path, out), TD_ERR_INVALID);
    assert_int_equal(fchmod(fd, 0600), 0);
    assert_int_equal(ftruncate(fd, 31), 0);
    assert_int_equal(td_cluster_secret_load(path, out), TD_ERR_INVALID);
    (void)close(fd);
    (void)unlink(path);
    assert_int_equal(td_cluster_secret_load(path, out), TD_ERR_IO);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_content_hash_is_xxh3_of_any_length),
        cmocka_unit_test(test_f12_block_keys_are_the_same_in_every_process),
        cmocka_unit_test(test_i8_salts_never_share_a_block),
        cmocka_unit_test(test_block_key_chains_over_its_parent),
        cmocka_unit_test(test_partial_key_differs_from_full_key),
        cmocka_unit_test(test_i3_checksum_is_bound_to_key_and_epoch),
        cmocka_unit_test(test_secret_file_must_be_private_and_long_enough),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

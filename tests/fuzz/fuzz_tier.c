/* Reads any bytes as everything that the cold tier's decoders read from a disk: superblock, slot
 * header, index record. What decodes encodes again to the same bytes; bytes whose checksum was made
 * right, so that the checks behind it are reached too. Built with a fuzzing engine, or alone: then
 * it replays the corpus and changes of every byte of it. With the argument --make DIR it writes the
 * corpus. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/td_base.h"
#include "kvstore/kvs_tier_internal.h"
#include "tests/fuzz/fuzz_replay.h"

#define CORPUS_DIR "tests/fuzz/corpus/tier"
#define SUPER_BYTES 56u
#define SUPER_SUM_AT 48u
#define HEADER_SUM_AT 56u
#define RECORD_BYTES (TD_BLOCK_KEY_BYTES + KVS_TIER_RECORD_BYTES)
#define FILE_BYTES_MAX 4096u
#define SLOT_COUNT 1000u
#define BLOCK_BYTES 65536u

static void try_super(const uint8_t *bytes, size_t len)
{
    kvs_tier_super_t super = {0};
    uint8_t again[KVS_TIER_PAGE_BYTES];

    if (kvs_tier_super_decode(bytes, len, &super) == TD_OK) {
        kvs_tier_super_encode(&super, again);
        TD_ASSERT(len >= SUPER_BYTES && memcmp(again, bytes, SUPER_BYTES) == 0);
    }
}

static void try_header(const uint8_t *bytes, size_t len)
{
    kvs_tier_header_t header = {0};
    uint8_t again[KVS_TIER_HEADER_BYTES];

    if (kvs_tier_header_decode(bytes, len, &header) == TD_OK) {
        kvs_tier_header_encode(&header, again);
        TD_ASSERT(len >= sizeof(again) && memcmp(again, bytes, sizeof(again)) == 0);
        TD_ASSERT(header.generation > 0);
    }
}

static void try_record(const uint8_t *bytes, size_t len)
{
    size_t key_len = TD_MIN(len, (size_t)TD_BLOCK_KEY_BYTES);
    kvs_tier_record_t record = {0};
    uint8_t again[KVS_TIER_RECORD_BYTES];

    if (kvs_tier_record_decode(bytes, key_len, bytes + key_len, len - key_len, SLOT_COUNT,
                               BLOCK_BYTES, &record) == TD_OK) {
        kvs_tier_record_encode(&record, again);
        TD_ASSERT(len == RECORD_BYTES);
        TD_ASSERT(memcmp(again, bytes + TD_BLOCK_KEY_BYTES, sizeof(again)) == 0);
        TD_ASSERT(record.slot < SLOT_COUNT && record.length == BLOCK_BYTES);
    }
}

static void put_checksum(uint8_t *bytes, size_t at)
{
    uint64_t sum = td_block_content_hash(bytes, at);
    for (size_t i = 0; i < sizeof(sum); i++) {
        bytes[at + i] = (uint8_t)(sum >> (8 * i));
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    uint8_t sealed[KVS_TIER_HEADER_BYTES];

    try_super(data, size);
    try_header(data, size);
    try_record(data, size);
    if (size >= sizeof(sealed)) {
        memcpy(sealed, data, sizeof(sealed));
        put_checksum(sealed, SUPER_SUM_AT);
        try_super(sealed, sizeof(sealed));
        memcpy(sealed, data, sizeof(sealed));
        put_checksum(sealed, HEADER_SUM_AT);
        try_header(sealed, sizeof(sealed));
    }
    return 0;
}

#ifndef TD_FUZZ_ENGINE
static int write_file(const char *dir, const char *name, const uint8_t *bytes, size_t len)
{
    char path[4096];
    FILE *file = NULL;

    (void)snprintf(path, sizeof(path), "%s/%s", dir, name);
    file = fopen(path, "wb");
    if (file == NULL || fwrite(bytes, 1, len, file) != len || fclose(file) != 0) {
        (void)fprintf(stderr, "not written: %s\n", path);
        return 1;
    }
    return 0;
}

static int make_corpus(const char *dir)
{
    static const td_block_key_t key = {{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}};
    const kvs_tier_super_t super = {.block_bytes = BLOCK_BYTES,
                                    .slot_bytes = BLOCK_BYTES + KVS_TIER_PAGE_BYTES,
                                    .tier_id = 0x1122334455667788ull,
                                    .probe = key};
    const kvs_tier_header_t header = {.key = key,
                                      .generation = 77,
                                      .tier_id = super.tier_id,
                                      .content_hash = 0x99aabbccddeeff00ull,
                                      .length = BLOCK_BYTES};
    const kvs_tier_record_t record = {.key = key,
                                      .slot = 12,
                                      .length = BLOCK_BYTES,
                                      .generation = 77,
                                      .content_hash = header.content_hash,
                                      .used = 78};
    uint8_t bytes[KVS_TIER_PAGE_BYTES];
    int failed = 0;

    kvs_tier_super_encode(&super, bytes);
    failed += write_file(dir, "super", bytes, KVS_TIER_HEADER_BYTES); /* the rest is zeros */
    kvs_tier_header_encode(&header, bytes);
    failed += write_file(dir, "header", bytes, KVS_TIER_HEADER_BYTES);
    memcpy(bytes, key.bytes, TD_BLOCK_KEY_BYTES);
    kvs_tier_record_encode(&record, bytes + TD_BLOCK_KEY_BYTES);
    failed += write_file(dir, "record", bytes, RECORD_BYTES);
    return failed != 0;
}

/* The corpus itself is good: each file decodes as what it is named after. */
static bool decodes(const char *name, const uint8_t *bytes, size_t len)
{
    kvs_tier_super_t super;
    kvs_tier_header_t header;
    kvs_tier_record_t record;

    if (strcmp(name, "super") == 0) {
        return kvs_tier_super_decode(bytes, len, &super) == TD_OK;
    }
    if (strcmp(name, "header") == 0) {
        return kvs_tier_header_decode(bytes, len, &header) == TD_OK;
    }
    return len == RECORD_BYTES &&
           kvs_tier_record_decode(bytes, TD_BLOCK_KEY_BYTES, bytes + TD_BLOCK_KEY_BYTES,
                                  KVS_TIER_RECORD_BYTES, SLOT_COUNT, BLOCK_BYTES, &record) == TD_OK;
}

static bool replay_file(const char *dir, const char *name)
{
    static const uint8_t masks[FUZZ_MASKS] = {0x01, 0x04, 0x80, 0xff};
    static uint8_t bytes[FILE_BYTES_MAX];
    size_t len = 0;

    if (!fuzz_read(dir, name, bytes, sizeof(bytes), &len)) {
        return false;
    }
    TD_ASSERT(decodes(name, bytes, len));
    fuzz_replay(bytes, len, masks, 1);
    return true;
}

int main(int argc, char **argv)
{
    if (argc > 2 && strcmp(argv[1], "--make") == 0) {
        return make_corpus(argv[2]);
    }
    return fuzz_replay_folder(argc > 1 ? argv[1] : CORPUS_DIR, replay_file, false);
}
#endif

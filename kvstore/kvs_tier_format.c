#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_buf.h"
#include "kvstore/kvs_tier_internal.h"

#define SUPER_MAGIC 0x3152454954444e54ull /* "TNDTIER1" */
#define HEADER_MAGIC 0x31544f4cu          /* "LOT1" */
#define SUPER_CHECKED_BYTES 48u           /* its checksum follows */
#define HEADER_CHECKED_BYTES 56u

uint32_t kvs_tier_slot_bytes(uint32_t block_bytes)
{
    return (KVS_TIER_HEADER_BYTES + block_bytes + KVS_TIER_PAGE_BYTES - 1) / KVS_TIER_PAGE_BYTES *
           KVS_TIER_PAGE_BYTES;
}

uint32_t kvs_tier_slot_count(uint64_t file_bytes, uint32_t block_bytes)
{
    if (file_bytes < KVS_TIER_PAGE_BYTES) {
        return 0;
    }
    return (uint32_t)TD_MIN((file_bytes - KVS_TIER_PAGE_BYTES) / kvs_tier_slot_bytes(block_bytes),
                            (uint64_t)KVS_TIER_SLOTS_MAX);
}

static void put_u32(uint8_t *at, uint32_t value)
{
    for (uint32_t i = 0; i < 4; i++) {
        at[i] = (uint8_t)(value >> (8 * i));
    }
}

static void put_u64(uint8_t *at, uint64_t value)
{
    put_u32(at, (uint32_t)value);
    put_u32(at + 4, (uint32_t)(value >> 32));
}

static bool get_key(td_buf_t *buf, td_block_key_t *out)
{
    const uint8_t *bytes = NULL;
    if (!td_buf_get_bytes(buf, TD_BLOCK_KEY_BYTES, &bytes)) {
        return false;
    }
    memcpy(out->bytes, bytes, TD_BLOCK_KEY_BYTES);
    return true;
}

/* magic 8, version 4, block bytes 4, slot bytes 4, zero 4, tier id 8, probe 16, checksum 8 */
void kvs_tier_super_encode(const kvs_tier_super_t *super, uint8_t *out)
{
    memset(out, 0, KVS_TIER_PAGE_BYTES);
    put_u64(out, SUPER_MAGIC);
    put_u32(out + 8, KVS_TIER_VERSION);
    put_u32(out + 12, super->block_bytes);
    put_u32(out + 16, super->slot_bytes);
    put_u64(out + 24, super->tier_id);
    memcpy(out + 32, super->probe.bytes, TD_BLOCK_KEY_BYTES);
    put_u64(out + SUPER_CHECKED_BYTES, td_block_content_hash(out, SUPER_CHECKED_BYTES));
}

static bool all_zero(const uint8_t *bytes, size_t len)
{
    for (size_t i = 0; i < len; i++) {
        if (bytes[i] != 0) {
            return false;
        }
    }
    return true;
}

td_status_t kvs_tier_super_decode(const uint8_t *bytes, size_t len, kvs_tier_super_t *out)
{
    kvs_tier_super_t super = {0};
    uint64_t magic = 0;
    uint64_t checksum = 0;
    uint32_t version = 0;
    uint32_t zero = 0;
    td_buf_t buf;

    if (all_zero(bytes, len)) {
        return TD_ERR_NOT_FOUND;
    }
    td_buf_init(&buf, bytes, len);
    if (!td_buf_get_u64(&buf, &magic) || !td_buf_get_u32(&buf, &version) || magic != SUPER_MAGIC) {
        return TD_ERR_CORRUPT;
    }
    if (version != KVS_TIER_VERSION) {
        return TD_ERR_UNSUPPORTED;
    }
    if (!td_buf_get_u32(&buf, &super.block_bytes) || !td_buf_get_u32(&buf, &super.slot_bytes) ||
        !td_buf_get_u32(&buf, &zero) || !td_buf_get_u64(&buf, &super.tier_id) ||
        !get_key(&buf, &super.probe) || !td_buf_get_u64(&buf, &checksum) || zero != 0 ||
        checksum != td_block_content_hash(bytes, SUPER_CHECKED_BYTES)) {
        return TD_ERR_CORRUPT;
    }
    *out = super;
    return TD_OK;
}

/* magic 4, version 4, key 16, generation 8, tier id 8, content hash 8, length 4, zero 4,
 * checksum 8. The checksum is over all before it, so it binds the content to key, generation and
 * file. */
void kvs_tier_header_encode(const kvs_tier_header_t *header, uint8_t *out)
{
    put_u32(out, HEADER_MAGIC);
    put_u32(out + 4, KVS_TIER_VERSION);
    memcpy(out + 8, header->key.bytes, TD_BLOCK_KEY_BYTES);
    put_u64(out + 24, header->generation);
    put_u64(out + 32, header->tier_id);
    put_u64(out + 40, header->content_hash);
    put_u32(out + 48, header->length);
    put_u32(out + 52, 0);
    put_u64(out + HEADER_CHECKED_BYTES, td_block_content_hash(out, HEADER_CHECKED_BYTES));
}

td_status_t kvs_tier_header_decode(const uint8_t *bytes, size_t len, kvs_tier_header_t *out)
{
    kvs_tier_header_t header = {0};
    uint64_t checksum = 0;
    uint32_t magic = 0;
    uint32_t version = 0;
    uint32_t zero = 0;
    td_buf_t buf;

    td_buf_init(&buf, bytes, len);
    if (!td_buf_get_u32(&buf, &magic) || !td_buf_get_u32(&buf, &version) ||
        !get_key(&buf, &header.key) || !td_buf_get_u64(&buf, &header.generation) ||
        !td_buf_get_u64(&buf, &header.tier_id) || !td_buf_get_u64(&buf, &header.content_hash) ||
        !td_buf_get_u32(&buf, &header.length) || !td_buf_get_u32(&buf, &zero) ||
        !td_buf_get_u64(&buf, &checksum)) {
        return TD_ERR_CORRUPT;
    }
    if (magic != HEADER_MAGIC || version != KVS_TIER_VERSION || zero != 0 ||
        header.generation == 0 || header.generation > KVS_TIER_CLOCK_MAX ||
        checksum != td_block_content_hash(bytes, HEADER_CHECKED_BYTES)) {
        return TD_ERR_CORRUPT;
    }
    *out = header;
    return TD_OK;
}

/* slot 4, length 4, generation 8, content hash 8, last use 8 */
void kvs_tier_record_encode(const kvs_tier_record_t *record, uint8_t *out)
{
    put_u32(out, record->slot);
    put_u32(out + 4, record->length);
    put_u64(out + 8, record->generation);
    put_u64(out + 16, record->content_hash);
    put_u64(out + 24, record->used);
}

td_status_t kvs_tier_record_decode(const void *key, size_t key_len, const void *value,
                                   size_t value_len, uint32_t slot_count, uint32_t block_bytes,
                                   kvs_tier_record_t *out)
{
    kvs_tier_record_t record = {0};
    td_buf_t buf;

    td_buf_init(&buf, key, key_len);
    if (key_len != TD_BLOCK_KEY_BYTES || value_len != KVS_TIER_RECORD_BYTES ||
        !get_key(&buf, &record.key)) {
        return TD_ERR_CORRUPT;
    }
    td_buf_init(&buf, value, value_len);
    if (!td_buf_get_u32(&buf, &record.slot) || !td_buf_get_u32(&buf, &record.length) ||
        !td_buf_get_u64(&buf, &record.generation) || !td_buf_get_u64(&buf, &record.content_hash) ||
        !td_buf_get_u64(&buf, &record.used)) {
        return TD_ERR_CORRUPT;
    }
    if (record.slot >= slot_count || record.length != block_bytes || record.generation == 0 ||
        record.generation > KVS_TIER_CLOCK_MAX || record.used > KVS_TIER_CLOCK_MAX) {
        return TD_ERR_CORRUPT;
    }
    *out = record;
    return TD_OK;
}

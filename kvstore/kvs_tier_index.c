/* LMDB is used by one thread of one process at a time: the data file's lock sees to that, so the
 * index needs no lock file. A commit that a power cut takes back (MDB_NOMETASYNC) leaves records
 * that no longer fit their slots, which reading finds out. */
#include <errno.h>
#include <string.h>
#include <sys/stat.h>

#include "common/base/td_base.h"
#include "common/base/td_log.h"
#include "kvstore/kvs_tier_internal.h"

#define META_KEY "tier" /* shorter than a block key: no record */
#define META_BYTES 8u   /* the data file's tier id */
#define MAP_BYTES_MIN (16u << 20)
#define MAP_BYTES_PER_SLOT                                                                         \
    512u /* the largest it may become; pages are taken as they are needed                          \
          */

static td_status_t index_failed(const char *what, int rc)
{
    TD_LOG_WARN("cold tier's index failed", "call=%s error=%d what=\"%s\"", what, rc,
                mdb_strerror(rc));
    switch (rc) {
    case MDB_INVALID:
    case MDB_CORRUPTED:
    case MDB_PAGE_NOTFOUND:
    case MDB_VERSION_MISMATCH:
    case MDB_PANIC:
    case MDB_MAP_FULL:
    case MDB_BAD_TXN:
    case MDB_INCOMPATIBLE:
    case EINVAL:
        return TD_ERR_CORRUPT;
    default:
        return TD_ERR_IO;
    }
}

/* LMDB maps the file and would read past its end where it was cut. */
static td_status_t length_check(const kvs_tier_index_t *index, const char *path)
{
    MDB_envinfo info;
    MDB_stat stat;
    struct stat file;
    int rc = mdb_env_info(index->env, &info);

    rc = rc == 0 ? mdb_env_stat(index->env, &stat) : rc;
    if (rc != 0) {
        return index_failed("info", rc);
    }
    if (lstat(path, &file) != 0) {
        return index_failed("stat", errno);
    }
    if ((uint64_t)file.st_size / stat.ms_psize <= info.me_last_pgno) {
        TD_LOG_WARN("cold tier's index is cut short", "bytes=%lld pages=%zu",
                    (long long)file.st_size, info.me_last_pgno + 1);
        return TD_ERR_CORRUPT;
    }
    return TD_OK;
}

static td_status_t meta_check(kvs_tier_index_t *index, MDB_txn *txn, uint64_t tier_id,
                              bool *fresh_out)
{
    uint8_t want[META_BYTES];
    MDB_val key = {.mv_size = sizeof(META_KEY) - 1, .mv_data = (void *)META_KEY};
    MDB_val value = {0};
    int rc = mdb_get(txn, index->dbi, &key, &value);

    memcpy(want, &tier_id, sizeof(want));
    if (rc == MDB_NOTFOUND) {
        MDB_stat stat;
        rc = mdb_stat(txn, index->dbi, &stat);
        if (rc != 0 || stat.ms_entries > 0) {
            TD_LOG_WARN("cold tier's index is of no tier", "entries=%zu", stat.ms_entries);
            return TD_ERR_CORRUPT;
        }
        value = (MDB_val){.mv_size = sizeof(want), .mv_data = want};
        rc = mdb_put(txn, index->dbi, &key, &value, 0);
        *fresh_out = true;
        return rc == 0 ? TD_OK : index_failed("put", rc);
    }
    if (rc != 0) {
        return index_failed("get", rc);
    }
    if (value.mv_size != sizeof(want) || memcmp(value.mv_data, want, sizeof(want)) != 0) {
        TD_LOG_WARN("cold tier's index is another tier's", "bytes=%zu", value.mv_size);
        return TD_ERR_CORRUPT;
    }
    *fresh_out = false;
    return TD_OK;
}

static td_status_t walk(kvs_tier_index_t *index, MDB_txn *txn, uint32_t slot_count,
                        uint32_t block_bytes, kvs_tier_record_fn on_record, void *ctx)
{
    MDB_cursor *cursor = NULL;
    MDB_val key = {0};
    MDB_val value = {0};
    int rc = mdb_cursor_open(txn, index->dbi, &cursor);

    if (rc != 0) {
        return index_failed("cursor", rc);
    }
    while ((rc = mdb_cursor_get(cursor, &key, &value, MDB_NEXT)) == 0) {
        kvs_tier_record_t record;
        if (kvs_tier_record_decode(key.mv_data, key.mv_size, value.mv_data, value.mv_size,
                                   slot_count, block_bytes, &record) == TD_OK) {
            on_record(ctx, &record);
        }
    }
    mdb_cursor_close(cursor);
    return rc == MDB_NOTFOUND ? TD_OK : index_failed("walk", rc);
}

td_status_t kvs_tier_index_open(kvs_tier_index_t *index, const char *path, uint64_t tier_id,
                                uint32_t slot_count, uint32_t block_bytes,
                                kvs_tier_record_fn on_record, void *ctx, bool *fresh_out)
{
    size_t map_bytes = MAP_BYTES_MIN + (size_t)slot_count * MAP_BYTES_PER_SLOT;
    MDB_txn *txn = NULL;
    td_status_t status = TD_OK;
    int rc = mdb_env_create(&index->env);

    if (rc != 0) {
        index->env = NULL;
        return index_failed("create", rc);
    }
    rc = mdb_env_set_mapsize(index->env, map_bytes);
    if (rc == 0) {
        rc = mdb_env_open(index->env, path, MDB_NOSUBDIR | MDB_NOLOCK | MDB_NOMETASYNC, 0600);
    }
    status = rc == 0 ? length_check(index, path) : index_failed("open", rc);
    if (status != TD_OK) {
        goto err_close;
    }
    rc = mdb_txn_begin(index->env, NULL, 0, &txn);
    if (rc != 0) {
        status = index_failed("begin", rc);
        goto err_close;
    }
    rc = mdb_dbi_open(txn, NULL, 0, &index->dbi);
    status = rc == 0 ? meta_check(index, txn, tier_id, fresh_out) : index_failed("database", rc);
    if (status == TD_OK) {
        status = walk(index, txn, slot_count, block_bytes, on_record, ctx);
    }
    if (status != TD_OK) {
        mdb_txn_abort(txn);
        goto err_close;
    }
    rc = mdb_txn_commit(txn);
    if (rc != 0) {
        status = index_failed("commit", rc);
        goto err_close;
    }
    return TD_OK;

err_close:
    kvs_tier_index_close(index);
    return status;
}

void kvs_tier_index_close(kvs_tier_index_t *index)
{
    if (index->env != NULL) {
        mdb_env_close(index->env);
        index->env = NULL;
    }
}

static int write_records(kvs_tier_index_t *index, MDB_txn *txn, const td_block_key_t *removed,
                         uint32_t removed_count, const kvs_tier_record_t *records,
                         uint32_t record_count)
{
    int rc = 0;

    for (uint32_t i = 0; i < removed_count && rc == 0; i++) {
        MDB_val key = {.mv_size = TD_BLOCK_KEY_BYTES, .mv_data = (void *)removed[i].bytes};
        rc = mdb_del(txn, index->dbi, &key, NULL);
        rc = rc == MDB_NOTFOUND ? 0 : rc;
    }
    for (uint32_t i = 0; i < record_count && rc == 0; i++) {
        uint8_t bytes[KVS_TIER_RECORD_BYTES];
        MDB_val key = {.mv_size = TD_BLOCK_KEY_BYTES, .mv_data = (void *)records[i].key.bytes};
        MDB_val value = {.mv_size = sizeof(bytes), .mv_data = bytes};
        kvs_tier_record_encode(&records[i], bytes);
        rc = mdb_put(txn, index->dbi, &key, &value, 0);
    }
    return rc;
}

td_status_t kvs_tier_index_commit(kvs_tier_index_t *index, const td_block_key_t *removed,
                                  uint32_t removed_count, const kvs_tier_record_t *records,
                                  uint32_t record_count)
{
    MDB_txn *txn = NULL;
    int rc = mdb_txn_begin(index->env, NULL, 0, &txn);

    if (rc != 0) {
        return index_failed("begin", rc);
    }
    rc = write_records(index, txn, removed, removed_count, records, record_count);
    if (rc != 0) {
        mdb_txn_abort(txn);
        return index_failed("write", rc);
    }
    rc = mdb_txn_commit(txn);
    return rc == 0 ? TD_OK : index_failed("commit", rc);
}

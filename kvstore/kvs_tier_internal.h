/* kvs_tier_internal.h - the parts of the cold tier: formats, file, index, slots, disk.
 * Threads: owner (the tier's thread), and any for the formats, which are plain functions. */
#pragma once

#include <liburing.h>
#include <lmdb.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/td_clock.h"
#include "common/base/td_metrics.h"
#include "common/base/td_status.h"
#include "common/kv/td_block_key.h"
#include "common/kv/td_key_index.h"
#include "kvstore/kvs_tier.h"

#define KVS_TIER_VERSION 1u
#define KVS_TIER_PAGE_BYTES 4096u  /* alignment of O_DIRECT; the superblock is one page */
#define KVS_TIER_HEADER_BYTES 64u  /* of a slot; the block follows it at once */
#define KVS_TIER_RECORD_BYTES 32u  /* value of an index entry; its key is the block key */
#define KVS_TIER_PUT_BATCH_MAX 16u /* writes that share one sync and one index commit */
#define KVS_TIER_OPS_MAX 32u       /* reads or writes in one go */
#define KVS_TIER_TOUCHES_MAX 256u  /* last uses waiting to be written to the index */
#define KVS_TIER_RECORDS_MAX 4096u /* of one index commit */
#define KVS_TIER_BACKOFF_NS_MIN (100 * TD_NS_PER_MS)
#define KVS_TIER_BACKOFF_NS_MAX (30ull * TD_NS_PER_S)
#define KVS_TIER_CHECK_NS (2ull * TD_NS_PER_S)
#define KVS_TIER_NONE UINT32_MAX
#define KVS_TIER_CLOCK_MAX (1ull << 62) /* generations and uses; more is not of ours */

/* --- formats (kvs_tier_format.c): little endian, each with its own checksum or bounds ------------
 */

/** First page of the data file. */
typedef struct kvs_tier_super {
    uint32_t block_bytes;
    uint32_t slot_bytes;
    uint64_t tier_id; /* random, new with every wipe: ties slots and index to this file */
    td_block_key_t probe;
} kvs_tier_super_t;

/** First bytes of a slot. */
typedef struct kvs_tier_header {
    td_block_key_t key;
    uint64_t generation;
    uint64_t tier_id;
    uint64_t content_hash;
    uint32_t length; /* bytes of content */
} kvs_tier_header_t;

/** An entry of the index. */
typedef struct kvs_tier_record {
    td_block_key_t key;
    uint32_t slot;
    uint32_t length;
    uint64_t generation; /* > 0 */
    uint64_t content_hash;
    uint64_t used; /* last use, on the clock of generations */
} kvs_tier_record_t;

/** Header and block, rounded up to whole pages. Units: bytes. */
uint32_t kvs_tier_slot_bytes(uint32_t block_bytes);
/** Slots that fit into a data file, at most KVS_TIER_SLOTS_MAX. */
uint32_t kvs_tier_slot_count(uint64_t file_bytes, uint32_t block_bytes);

/** Shape: out [KVS_TIER_PAGE_BYTES]. */
void kvs_tier_super_encode(const kvs_tier_super_t *super, uint8_t *out);
/** Errors: TD_ERR_NOT_FOUND (all zero: a new file), TD_ERR_CORRUPT (not a superblock, or damaged),
 * TD_ERR_UNSUPPORTED (another format version). */
TD_MUST_CHECK td_status_t kvs_tier_super_decode(const uint8_t *bytes, size_t len,
                                                kvs_tier_super_t *out);
/** Shape: out [KVS_TIER_HEADER_BYTES]. */
void kvs_tier_header_encode(const kvs_tier_header_t *header, uint8_t *out);
/** Errors: TD_ERR_CORRUPT (no header, torn, or another version's). */
TD_MUST_CHECK td_status_t kvs_tier_header_decode(const uint8_t *bytes, size_t len,
                                                 kvs_tier_header_t *out);
/** Shape: out [KVS_TIER_RECORD_BYTES]. */
void kvs_tier_record_encode(const kvs_tier_record_t *record, uint8_t *out);
/** Errors: TD_ERR_CORRUPT (sizes, a slot past slot_count, another length, clocks). */
TD_MUST_CHECK td_status_t kvs_tier_record_decode(const void *key, size_t key_len, const void *value,
                                                 size_t value_len, uint32_t slot_count,
                                                 uint32_t block_bytes, kvs_tier_record_t *out);

/* --- file (kvs_tier_io.c) ------------------------------------------------------------------------
 */

typedef struct kvs_tier_op {
    uint64_t offset; /* of KVS_TIER_PAGE_BYTES, as len and the address of bytes */
    uint8_t *bytes;
    size_t len;
    bool is_write;
    int error; /* after the run: 0 or an errno; ENODATA: the file ends before */
} kvs_tier_op_t;

typedef struct kvs_tier_io {
    int fd; /* -1 = closed */
    bool direct;
    bool uring;
    struct io_uring ring;
} kvs_tier_io_t;

/** Opens (makes) and locks the data file. The first time, and after a change, it says how it reads
 * and writes. Errors: an errno; EWOULDBLOCK: another process has it. */
int kvs_tier_io_open(kvs_tier_io_t *io, const char *path, bool pread_only);
void kvs_tier_io_close(kvs_tier_io_t *io);
/** Gives the file its size, its space taken from the disk where that can be. 0 or an errno. */
int kvs_tier_io_resize(kvs_tier_io_t *io, uint64_t bytes);
/** Does them all; each says how it went. count <= KVS_TIER_OPS_MAX. */
void kvs_tier_io_run(kvs_tier_io_t *io, kvs_tier_op_t *ops, uint32_t count);
/** Brings what was written to the disk. 0 or an errno. */
int kvs_tier_io_sync(kvs_tier_io_t *io);
/** True when the file has been removed under us. */
bool kvs_tier_io_is_gone(const kvs_tier_io_t *io);

/* --- index (kvs_tier_index.c) --------------------------------------------------------------------
 */

typedef struct kvs_tier_index {
    MDB_env *env; /* NULL = closed */
    MDB_dbi dbi;
} kvs_tier_index_t;

typedef void (*kvs_tier_record_fn)(void *ctx, const kvs_tier_record_t *record);

/** Opens (makes) the index of the data file tier_id, and walks its records; those that do not
 * decode are passed over. fresh_out: it was made just now.
 * Errors: TD_ERR_CORRUPT (not an index, or another file's: remove it), TD_ERR_IO. Logged. */
TD_MUST_CHECK td_status_t kvs_tier_index_open(kvs_tier_index_t *index, const char *path,
                                              uint64_t tier_id, uint32_t slot_count,
                                              uint32_t block_bytes, kvs_tier_record_fn on_record,
                                              void *ctx, bool *fresh_out);
void kvs_tier_index_close(kvs_tier_index_t *index);
/** Removes and writes records, all or none. Errors: TD_ERR_IO (logged). */
TD_MUST_CHECK td_status_t kvs_tier_index_commit(kvs_tier_index_t *index,
                                                const td_block_key_t *removed,
                                                uint32_t removed_count,
                                                const kvs_tier_record_t *records,
                                                uint32_t record_count);

/* --- slots (kvs_tier_slots.c): what is where, in memory ------------------------------------------
 */

typedef struct kvs_tier_slot {
    td_block_key_t key;
    uint64_t generation; /* 0 = free, or being written */
    uint64_t used;       /* the index may know an older one */
    uint64_t content_hash;
    uint32_t older; /* list by last use */
    uint32_t newer;
} kvs_tier_slot_t;

typedef struct kvs_tier_slots {
    kvs_tier_slot_t *at; /* owned, [count] */
    uint32_t *free;      /* owned, stack */
    uint32_t free_count;
    uint32_t count;
    uint32_t used_count;
    uint32_t oldest;
    uint32_t newest;
    uint64_t clock; /* the newest generation or use given out */
    td_key_index_t index;
} kvs_tier_slots_t;

/** Errors: TD_ERR_NO_MEMORY; the slots are then as kvs_tier_slots_fini() leaves them. */
TD_MUST_CHECK td_status_t kvs_tier_slots_init(kvs_tier_slots_t *slots, uint32_t count);
void kvs_tier_slots_fini(kvs_tier_slots_t *slots);
/** Every slot is free afterwards. */
void kvs_tier_slots_clear(kvs_tier_slots_t *slots);
/** The slot of a key, or KVS_TIER_NONE. */
uint32_t kvs_tier_slots_find(const kvs_tier_slots_t *slots, const td_block_key_t *key);
/** Takes a free slot, or the one that was not used for longest, whose key is then forgotten and
 * told. KVS_TIER_NONE: all are being written. */
uint32_t kvs_tier_slots_take(kvs_tier_slots_t *slots, bool *evicted_out, td_block_key_t *key_out);
/** A taken slot is not written after all. */
void kvs_tier_slots_give_back(kvs_tier_slots_t *slots, uint32_t slot);
/** A taken slot holds a block. */
void kvs_tier_slots_fill(kvs_tier_slots_t *slots, const kvs_tier_record_t *record);
/** Forgets a block; its slot is free. */
void kvs_tier_slots_remove(kvs_tier_slots_t *slots, uint32_t slot);
void kvs_tier_slots_touch(kvs_tier_slots_t *slots, uint32_t slot);
/** While loading: fills a slot that is free, whatever the order of uses. Of two records of one slot
 * or one key the higher generation stays. False: the record was passed over. */
bool kvs_tier_slots_load(kvs_tier_slots_t *slots, const kvs_tier_record_t *record);
/** After loading: free stack and order of uses. Errors: TD_ERR_NO_MEMORY. */
TD_MUST_CHECK td_status_t kvs_tier_slots_loaded(kvs_tier_slots_t *slots);
void kvs_tier_slots_record(const kvs_tier_slots_t *slots, uint32_t slot, uint32_t block_bytes,
                           kvs_tier_record_t *out);

/* --- disk (kvs_tier_disk.c): file, index and slots together --------------------------------------
 */

typedef struct kvs_tier_metrics {
    td_metric_t *blocks;
    td_metric_t *capacity;
    td_metric_t *degraded;
    td_metric_t *uring;
    td_metric_t *direct;
    td_metric_t *stored;
    td_metric_t *dropped;
    td_metric_t *failed;
    td_metric_t *hits;
    td_metric_t *misses;
    td_metric_t *corrupt;
    td_metric_t *read_failed;
    td_metric_t *evicted;
    td_metric_t *stale;
    td_metric_t *bytes_written;
    td_metric_t *bytes_read;
    td_metric_t *write_seconds;
    td_metric_t *read_seconds;
} kvs_tier_metrics_t;

typedef struct kvs_tier_job { /* belongs to the loop or, from submit to done, to the thread */
    kvs_tier_done_t done;     /* first: what the loop sees of it */
    uint8_t *slot_bytes;      /* PUT, GET: owned, [slot_bytes]: header, block, zeros */
    uint32_t slot;            /* PUT, GET: while the disk works on it */
    uint32_t from;            /* LIST */
    uint64_t submitted_ns;
    struct kvs_tier_job *next;
} kvs_tier_job_t;

typedef struct kvs_tier_disk {
    char *dir; /* owned; of the paths below as well */
    char *data_path;
    char *index_path;
    char *mark_path; /* there while an index is read: found at a start, reading it was our end */
    uint32_t block_bytes;
    uint32_t slot_bytes;
    uint32_t slot_count;
    uint64_t file_bytes;
    bool pread_only;
    td_block_key_t probe;
    uint8_t *pages;             /* owned, [KVS_TIER_OPS_MAX][KVS_TIER_PAGE_BYTES]: headers */
    kvs_tier_record_t *records; /* owned, [KVS_TIER_RECORDS_MAX]: for one commit */
    td_block_key_t *removed;    /* owned, [KVS_TIER_RECORDS_MAX]: for one commit */
    uint64_t tier_id;
    kvs_tier_io_t io;
    kvs_tier_index_t index;
    kvs_tier_slots_t slots;
    uint32_t touched[KVS_TIER_TOUCHES_MAX];
    uint32_t touched_count;
    uint32_t record_count; /* of the index, while it is read */
    bool is_open;
    bool degraded;
    uint64_t retry_ns; /* degraded or closed: when it is tried again */
    uint64_t backoff_ns;
    uint64_t check_ns; /* when to look after the file and the touches again */
    kvs_tier_metrics_t metrics;
} kvs_tier_disk_t;

/** Errors: TD_ERR_NO_MEMORY; the disk is then as kvs_tier_disk_fini() leaves it. */
TD_MUST_CHECK td_status_t kvs_tier_disk_init(kvs_tier_disk_t *disk,
                                             const kvs_tier_config_t *config);
void kvs_tier_disk_fini(kvs_tier_disk_t *disk);
/** Opens file and index and checks them against each other. False: degraded, tried again later. */
bool kvs_tier_disk_open(kvs_tier_disk_t *disk);
/** True when a put is worth trying. */
bool kvs_tier_disk_is_writable(const kvs_tier_disk_t *disk, uint64_t now_ns);
/** Writes blocks: data, sync, then the index. Each job says how it ended.
 * Shape: jobs [count], count <= KVS_TIER_PUT_BATCH_MAX. */
void kvs_tier_disk_put(kvs_tier_disk_t *disk, kvs_tier_job_t **jobs, uint32_t count);
/** Reads and checks blocks. Shape: jobs [count], count <= KVS_TIER_OPS_MAX. */
void kvs_tier_disk_get(kvs_tier_disk_t *disk, kvs_tier_job_t **jobs, uint32_t count);
void kvs_tier_disk_drop(kvs_tier_disk_t *disk, const td_block_key_t *key);
/** Writes last uses, and looks whether the file is still there. */
void kvs_tier_disk_maintain(kvs_tier_disk_t *disk, uint64_t now_ns);

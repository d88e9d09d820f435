/* kvs_tier.h - the segment's cold tier: blocks that gave way in memory, kept on a local disk, over
 * restarts too. Design: section 5; kvstore/DESIGN.md, "Cold tier". Everything on the disk is a
 * hint: a block is handed out only after its header and the checksum of its content have been
 * checked over our own copy (I3), so a torn, stale, foreign or damaged one is a miss.
 * Threads: loop (the segment's). The disk is touched by the tier's own thread alone; the two share
 * bounded queues, and the bytes of a job belong to whoever has the job. No call waits for the disk,
 * and none after create allocates. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/td_metrics.h"
#include "common/base/td_status.h"
#include "common/kv/td_block_key.h"

#define KVS_TIER_PUTS_MAX 32u   /* writes queued or under way; fewer where blocks are large */
#define KVS_TIER_GETS_MAX 32u   /* the same for reads */
#define KVS_TIER_DROPS_MAX 256u /* removals under way */
#define KVS_TIER_LIST_MAX 1024u /* keys in one listing */
#define KVS_TIER_STAGING_BYTES_MAX (64u << 20) /* copies for writing, and as many for reading */
#define KVS_TIER_SLOTS_MAX (1u << 24)
#define KVS_TIER_BYTES_MAX (1ull << 46)
#define KVS_TIER_STOP_MS 2000u /* a stuck disk is waited for so long at the end */

typedef struct kvs_tier kvs_tier_t;

typedef struct kvs_tier_config {
    const char *dir; /* borrowed during create; made if it is not there */
    uint64_t bytes;  /* size of the data file; the index lies beside it */
    uint32_t block_bytes;
    bool pread_only;       /* no io_uring */
    td_block_key_t probe;  /* proves the cluster's secret: another cluster's tier is wiped */
    td_metrics_t *metrics; /* borrowed until destroy */
} kvs_tier_config_t;

typedef enum kvs_tier_kind {
    KVS_TIER_PUT,
    KVS_TIER_GET,
    KVS_TIER_DROP,
    KVS_TIER_LIST
} kvs_tier_kind_t;

/** How a job ended. PUT: TD_OK (on disk: data synced, index committed), TD_ERR_BUSY (dropped: the
 * tier is closed or degraded), TD_ERR_IO, TD_ERR_CORRUPT (the bytes were not those of the hash).
 * GET: TD_OK, TD_ERR_NOT_FOUND, TD_ERR_CORRUPT, TD_ERR_IO; after any failure the key is not here.
 * DROP and LIST: TD_OK. */
typedef struct kvs_tier_done {
    kvs_tier_kind_t kind;
    td_status_t status;
    td_block_key_t key;   /* not of LIST */
    uint64_t tag;         /* GET: the caller's */
    uint64_t hash;        /* GET, TD_OK: content hash */
    const uint8_t *bytes; /* GET, TD_OK: [block_bytes]; borrowed until kvs_tier_release() */
    bool has_evicted;     /* PUT: whatever its status, another block gave way */
    td_block_key_t evicted;
    uint32_t count;             /* LIST: keys in this part */
    const td_block_key_t *keys; /* LIST: borrowed until kvs_tier_release() */
    const uint64_t *hashes;     /* LIST: content hashes */
    uint32_t next;              /* LIST: where the next part begins; 0 = that was the last */
} kvs_tier_done_t;

/** Starts the tier; files are opened on its thread, and again, with back-off, whenever that fails.
 * Errors: TD_ERR_INVALID (sizes; logged), TD_ERR_NO_MEMORY, TD_ERR_IO (no thread). */
TD_MUST_CHECK td_status_t kvs_tier_create(const kvs_tier_config_t *config, kvs_tier_t **out);
/** NULL is allowed. Ends what is under way; queued jobs are forgotten. Waits for a stuck disk for
 * KVS_TIER_STOP_MS, then leaves its thread and memory to the end of the process. */
void kvs_tier_destroy(kvs_tier_t *tier);

/** Copies a block to be written. Errors: TD_ERR_BUSY (the queue is full, or the tier writes nothing
 * now): counted as dropped. Cost: one copy of block_bytes. */
TD_MUST_CHECK td_status_t kvs_tier_put(kvs_tier_t *tier, const td_block_key_t *key,
                                       uint64_t content_hash, const uint8_t *bytes);
/** Counts a block that was given up before it could be put. */
void kvs_tier_count_dropped(kvs_tier_t *tier);
/** True while a put would be taken. */
bool kvs_tier_can_put(const kvs_tier_t *tier);
/** Asks for a block. Errors: TD_ERR_BUSY. */
TD_MUST_CHECK td_status_t kvs_tier_get(kvs_tier_t *tier, const td_block_key_t *key, uint64_t tag);
/** Forgets a block for good; one whose put came before is forgotten too. Errors: TD_ERR_BUSY. */
TD_MUST_CHECK td_status_t kvs_tier_drop(kvs_tier_t *tier, const td_block_key_t *key);
/** Asks for a part of the keys that are here. from: 0, then the next of the part before. A block
 * that moves meanwhile may be missed or listed twice. Errors: TD_ERR_BUSY (one is under way). */
TD_MUST_CHECK td_status_t kvs_tier_list(kvs_tier_t *tier, uint32_t from);

/** Readable when a job has ended. */
int kvs_tier_fd(const kvs_tier_t *tier);
/** The next job that has ended, or NULL. Owner: the tier; give it back by kvs_tier_release(). */
const kvs_tier_done_t *kvs_tier_next(kvs_tier_t *tier);
void kvs_tier_release(kvs_tier_t *tier, const kvs_tier_done_t *done);
/** Counts how often the files were opened, 0 = not yet. After a change only what a listing or a put
 * has told since is here. */
uint64_t kvs_tier_life(const kvs_tier_t *tier);

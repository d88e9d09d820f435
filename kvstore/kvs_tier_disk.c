#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/base/td_base.h"
#include "common/base/td_fault.h"
#include "common/base/td_log.h"
#include "kvstore/kvs_tier_internal.h"

#define DATA_NAME "tier.data"
#define INDEX_NAME "tier.index"
#define MARK_NAME "tier.reading"

static char *path_of(const char *dir, const char *name)
{
    td_str_t text = {0};
    if (td_str_printf(&text, "%s/%s", dir, name) != TD_OK) {
        td_str_fini(&text);
        return NULL;
    }
    return text.bytes;
}

static void metrics_declare(kvs_tier_metrics_t *m, td_metrics_t *metrics)
{
    static const char puts[] = "tandem_kvstore_tier_puts_total";
    static const char puts_help[] = "blocks offered to the cold tier, by how it ended";
    static const char gets[] = "tandem_kvstore_tier_gets_total";
    static const char gets_help[] = "blocks asked of the cold tier, by how it ended";

    m->blocks = td_metrics_gauge(metrics, "tandem_kvstore_tier_blocks", NULL, "blocks on disk");
    m->capacity = td_metrics_gauge(metrics, "tandem_kvstore_tier_capacity_blocks", NULL,
                                   "blocks that fit on disk");
    m->degraded = td_metrics_gauge(metrics, "tandem_kvstore_tier_degraded", NULL,
                                   "1: the disk fails, blocks are not written");
    m->uring = td_metrics_gauge(metrics, "tandem_kvstore_tier_io_uring", NULL,
                                "1: io_uring, 0: pread and pwrite");
    m->direct = td_metrics_gauge(metrics, "tandem_kvstore_tier_direct_io", NULL,
                                 "1: O_DIRECT, 0: through the page cache");
    m->stored = td_metrics_counter(metrics, puts, "result=\"stored\"", puts_help);
    m->dropped = td_metrics_counter(metrics, puts, "result=\"dropped\"", puts_help);
    m->failed = td_metrics_counter(metrics, puts, "result=\"failed\"", puts_help);
    m->hits = td_metrics_counter(metrics, gets, "result=\"hit\"", gets_help);
    m->misses = td_metrics_counter(metrics, gets, "result=\"miss\"", gets_help);
    m->corrupt = td_metrics_counter(metrics, gets, "result=\"corrupt\"", gets_help);
    m->read_failed = td_metrics_counter(metrics, gets, "result=\"failed\"", gets_help);
    m->evicted = td_metrics_counter(metrics, "tandem_kvstore_tier_evictions_total", NULL,
                                    "blocks on disk that gave way to others");
    m->stale = td_metrics_counter(metrics, "tandem_kvstore_tier_stale_blocks_total", NULL,
                                  "blocks of the index whose slot was not theirs at a start");
    m->bytes_written = td_metrics_counter(metrics, "tandem_kvstore_tier_written_bytes_total", NULL,
                                          "bytes written to the data file");
    m->bytes_read = td_metrics_counter(metrics, "tandem_kvstore_tier_read_bytes_total", NULL,
                                       "bytes read from the data file");
    m->write_seconds = td_metrics_histogram(metrics, "tandem_kvstore_tier_write_seconds", NULL,
                                            "a batch written, synced and indexed");
    m->read_seconds = td_metrics_histogram(metrics, "tandem_kvstore_tier_read_seconds", NULL,
                                           "a batch read and checked");
}

td_status_t kvs_tier_disk_init(kvs_tier_disk_t *d, const kvs_tier_config_t *config)
{
    memset(d, 0, sizeof(*d));
    d->io.fd = -1;
    d->block_bytes = config->block_bytes;
    d->slot_bytes = kvs_tier_slot_bytes(config->block_bytes);
    d->slot_count = kvs_tier_slot_count(config->bytes, config->block_bytes);
    d->file_bytes = KVS_TIER_PAGE_BYTES + (uint64_t)d->slot_count * d->slot_bytes;
    d->pread_only = config->pread_only;
    d->probe = config->probe;
    d->backoff_ns = KVS_TIER_BACKOFF_NS_MIN;
    d->dir = td_strdup(config->dir);
    d->data_path = path_of(config->dir, DATA_NAME);
    d->index_path = path_of(config->dir, INDEX_NAME);
    d->mark_path = path_of(config->dir, MARK_NAME);
    d->pages =
        td_alloc_aligned(KVS_TIER_PAGE_BYTES, (size_t)KVS_TIER_OPS_MAX * KVS_TIER_PAGE_BYTES);
    d->records = td_calloc(KVS_TIER_RECORDS_MAX, sizeof(*d->records));
    d->removed = td_calloc(KVS_TIER_RECORDS_MAX, sizeof(*d->removed));
    if (d->dir == NULL || d->data_path == NULL || d->index_path == NULL || d->mark_path == NULL ||
        d->pages == NULL || d->records == NULL || d->removed == NULL ||
        kvs_tier_slots_init(&d->slots, d->slot_count) != TD_OK) {
        kvs_tier_disk_fini(d);
        return TD_ERR_NO_MEMORY;
    }
    metrics_declare(&d->metrics, config->metrics);
    td_metric_set(d->metrics.capacity, d->slot_count);
    return TD_OK;
}

/* What is not open knows of nothing. */
static void disk_close(kvs_tier_disk_t *d)
{
    kvs_tier_index_close(&d->index);
    kvs_tier_io_close(&d->io);
    kvs_tier_slots_clear(&d->slots);
    d->touched_count = 0;
    d->is_open = false;
}

void kvs_tier_disk_fini(kvs_tier_disk_t *d)
{
    kvs_tier_index_close(&d->index);
    kvs_tier_io_close(&d->io);
    kvs_tier_slots_fini(&d->slots);
    td_free(d->removed);
    td_free(d->records);
    td_free(d->pages);
    td_free(d->mark_path);
    td_free(d->index_path);
    td_free(d->data_path);
    td_free(d->dir);
}

/* Says so when it begins, and tries again later, ever later. */
static void degrade(kvs_tier_disk_t *d, const char *what, int error)
{
    if (!d->degraded) {
        TD_LOG_WARN("cold tier degraded", "dir=%s what=\"%s\" errno=%d why=\"%s\"", d->dir, what,
                    error, strerror(error));
        d->degraded = true;
        td_metric_set(d->metrics.degraded, 1);
    }
    d->retry_ns = td_now_ns() + d->backoff_ns;
    d->backoff_ns = TD_MIN(2 * d->backoff_ns, KVS_TIER_BACKOFF_NS_MAX);
}

static void recover(kvs_tier_disk_t *d)
{
    if (d->degraded) {
        TD_LOG_INFO("cold tier works again", "dir=%s", d->dir);
        d->degraded = false;
        td_metric_set(d->metrics.degraded, 0);
    }
}

/* --- opening ---------------------------------------------------------------------------------- */

static uint64_t slot_offset(const kvs_tier_disk_t *d, uint32_t slot)
{
    return KVS_TIER_PAGE_BYTES + (uint64_t)slot * d->slot_bytes;
}

static int remove_file(const char *path)
{
    return unlink(path) == 0 || errno == ENOENT ? 0 : errno;
}

/* Begins a new tier: nothing of what was in the files is used. 0 or an errno. */
static int wipe(kvs_tier_disk_t *d)
{
    kvs_tier_super_t super = {
        .block_bytes = d->block_bytes, .slot_bytes = d->slot_bytes, .probe = d->probe};
    kvs_tier_op_t op = {.bytes = d->pages, .len = KVS_TIER_PAGE_BYTES, .is_write = true};
    int error = remove_file(d->index_path);

    TD_FAULT_POINT("tier_wipe");
    if (error == 0 && ftruncate(d->io.fd, 0) != 0) {
        error = errno;
    }
    if (error != 0) {
        return error;
    }
    super.tier_id = td_random_u64();
    kvs_tier_super_encode(&super, d->pages);
    kvs_tier_io_run(&d->io, &op, 1);
    error = op.error != 0 ? op.error : kvs_tier_io_sync(&d->io);
    d->tier_id = super.tier_id;
    return error;
}

/* Reads the superblock; another format's, model's or cluster's tier is wiped. 0 or an errno. */
static int super_check(kvs_tier_disk_t *d)
{
    kvs_tier_op_t op = {.bytes = d->pages, .len = KVS_TIER_PAGE_BYTES};
    kvs_tier_super_t super = {0};
    const char *why = NULL;
    td_status_t status = TD_ERR_NOT_FOUND;

    memset(d->pages, 0, KVS_TIER_PAGE_BYTES);
    kvs_tier_io_run(&d->io, &op, 1);
    if (op.error != 0 && op.error != ENODATA) { /* ENODATA: empty, or not even a page */
        return op.error;
    }
    status = kvs_tier_super_decode(d->pages, KVS_TIER_PAGE_BYTES, &super);
    if (status == TD_ERR_NOT_FOUND) {
        return wipe(d);
    }
    if (status == TD_ERR_UNSUPPORTED) {
        why = "another format version";
    } else if (status != TD_OK) {
        why = "not a tier, or damaged";
    } else if (!td_block_key_equal(&super.probe, &d->probe)) {
        why = "another cluster's";
    } else if (super.block_bytes != d->block_bytes || super.slot_bytes != d->slot_bytes) {
        why = "other blocks";
    }
    if (why != NULL) {
        TD_LOG_WARN("cold tier wiped", "file=%s why=\"%s\"", d->data_path, why);
        return wipe(d);
    }
    d->tier_id = super.tier_id;
    return 0;
}

/* Reads the headers of up to KVS_TIER_OPS_MAX slots at once. */
static void read_headers(kvs_tier_disk_t *d, const uint32_t *at, uint32_t count, kvs_tier_op_t *ops)
{
    for (uint32_t i = 0; i < count; i++) {
        ops[i] = (kvs_tier_op_t){.offset = slot_offset(d, at[i]),
                                 .bytes = d->pages + (size_t)i * KVS_TIER_PAGE_BYTES,
                                 .len = KVS_TIER_PAGE_BYTES};
    }
    kvs_tier_io_run(&d->io, ops, count);
}

static bool header_is_ours(const kvs_tier_disk_t *d, const uint8_t *bytes, size_t len,
                           kvs_tier_header_t *out)
{
    return kvs_tier_header_decode(bytes, len, out) == TD_OK && out->tier_id == d->tier_id &&
           out->length == d->block_bytes;
}

static bool header_fits(const kvs_tier_disk_t *d, const uint8_t *bytes, size_t len,
                        const kvs_tier_slot_t *slot)
{
    kvs_tier_header_t header;
    return header_is_ours(d, bytes, len, &header) && td_block_key_equal(&header.key, &slot->key) &&
           header.generation == slot->generation && header.content_hash == slot->content_hash;
}

/* Slots whose header is not the one that the index speaks of were torn or written over: forgotten.
 */
static td_status_t check_slots(kvs_tier_disk_t *d, uint32_t *stale_out)
{
    uint32_t at[KVS_TIER_OPS_MAX];
    kvs_tier_op_t ops[KVS_TIER_OPS_MAX];
    uint32_t count = 0;
    uint32_t removed = 0;

    for (uint32_t slot = 0; slot < d->slot_count; slot++) {
        if (d->slots.at[slot].generation != 0) {
            at[count++] = slot;
        }
        if (count < KVS_TIER_OPS_MAX && slot + 1 < d->slot_count) {
            continue;
        }
        read_headers(d, at, count, ops);
        for (uint32_t i = 0; i < count; i++) {
            if (ops[i].error == 0 &&
                header_fits(d, ops[i].bytes, ops[i].len, &d->slots.at[at[i]])) {
                continue;
            }
            (*stale_out)++;
            d->removed[removed++] = d->slots.at[at[i]].key;
            kvs_tier_slots_remove(&d->slots, at[i]);
        }
        count = 0;
        if (removed + KVS_TIER_OPS_MAX > KVS_TIER_RECORDS_MAX) {
            TD_TRY(kvs_tier_index_commit(&d->index, d->removed, removed, NULL, 0));
            removed = 0;
        }
    }
    return removed == 0 ? TD_OK : kvs_tier_index_commit(&d->index, d->removed, removed, NULL, 0);
}

/* Finds what is there from the slots' own headers. */
static void scan_slots(kvs_tier_disk_t *d)
{
    uint32_t at[KVS_TIER_OPS_MAX];
    kvs_tier_op_t ops[KVS_TIER_OPS_MAX];

    for (uint32_t slot = 0; slot < d->slot_count;) {
        uint32_t count = TD_MIN(d->slot_count - slot, KVS_TIER_OPS_MAX);
        for (uint32_t i = 0; i < count; i++) {
            at[i] = slot++;
        }
        read_headers(d, at, count, ops);
        for (uint32_t i = 0; i < count; i++) {
            kvs_tier_header_t header;
            if (ops[i].error == 0 && header_is_ours(d, ops[i].bytes, ops[i].len, &header)) {
                kvs_tier_record_t record = {.key = header.key,
                                            .slot = at[i],
                                            .length = header.length,
                                            .generation = header.generation,
                                            .content_hash = header.content_hash,
                                            .used = header.generation};
                (void)kvs_tier_slots_load(&d->slots, &record);
            }
        }
    }
}

static td_status_t write_index(kvs_tier_disk_t *d)
{
    uint32_t count = 0;

    for (uint32_t slot = 0; slot < d->slot_count; slot++) {
        if (d->slots.at[slot].generation != 0) {
            kvs_tier_slots_record(&d->slots, slot, d->block_bytes, &d->records[count++]);
        }
        if (count == KVS_TIER_RECORDS_MAX) {
            TD_TRY(kvs_tier_index_commit(&d->index, NULL, 0, d->records, count));
            count = 0;
        }
    }
    return count == 0 ? TD_OK : kvs_tier_index_commit(&d->index, NULL, 0, d->records, count);
}

static void on_record(void *ctx, const kvs_tier_record_t *record)
{
    kvs_tier_disk_t *d = ctx;
    (void)kvs_tier_slots_load(&d->slots, record);
    d->record_count++;
}

/* Opens the index, a new one where it is lost or damaged: the slots know all that it knows but the
 * last uses. A damaged one may even end the process that reads it, which the next start sees by the
 * mark. */
static td_status_t load(kvs_tier_disk_t *d)
{
    int mark = open(d->mark_path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    bool fresh = false;
    uint32_t stale = 0;
    td_status_t status = TD_ERR_CORRUPT;

    if (mark < 0 && errno != EEXIST) {
        return TD_ERR_IO;
    }
    d->record_count = 0;
    if (mark >= 0) {
        (void)close(mark);
        status = kvs_tier_index_open(&d->index, d->index_path, d->tier_id, d->slot_count,
                                     d->block_bytes, on_record, d, &fresh);
    }
    TD_FAULT_POINT("tier_reading");
    if (status == TD_ERR_CORRUPT) {
        TD_LOG_WARN("cold tier's index is made anew from the slots", "dir=%s", d->dir);
        kvs_tier_slots_clear(&d->slots);
        if (remove_file(d->index_path) != 0) {
            return TD_ERR_IO;
        }
        status = kvs_tier_index_open(&d->index, d->index_path, d->tier_id, d->slot_count,
                                     d->block_bytes, on_record, d, &fresh);
    }
    if (status != TD_OK) {
        return status;
    }
    if (fresh) {
        scan_slots(d);
    }
    TD_TRY(kvs_tier_slots_loaded(&d->slots));
    stale = fresh ? 0 : d->record_count - d->slots.used_count; /* two of one slot */
    TD_TRY(fresh ? write_index(d) : check_slots(d, &stale));
    if (remove_file(d->mark_path) != 0) {
        return TD_ERR_IO;
    }
    td_metric_add(d->metrics.stale, stale);
    TD_LOG_INFO("cold tier open", "dir=%s blocks=%u of=%u stale=%u io=%s direct=%s", d->dir,
                d->slots.used_count, d->slot_count, stale, d->io.uring ? "io_uring" : "pread",
                d->io.direct ? "yes" : "no");
    return TD_OK;
}

bool kvs_tier_disk_open(kvs_tier_disk_t *d)
{
    const char *what = "mkdir";
    int error = mkdir(d->dir, 0700) == 0 || errno == EEXIST ? 0 : errno;

    TD_FAULT_POINT("tier_open");
    if (error == 0) {
        what = "open";
        error = kvs_tier_io_open(&d->io, d->data_path, d->pread_only);
        what = error == EWOULDBLOCK ? "another process uses it" : what;
    }
    if (error == 0) {
        what = "superblock";
        error = super_check(d);
    }
    if (error == 0) {
        what = "resize";
        error = kvs_tier_io_resize(&d->io, d->file_bytes);
    }
    if (error == 0 && load(d) != TD_OK) {
        what = "index";
        error = EIO;
    }
    if (error != 0) {
        disk_close(d);
        degrade(d, what, error);
        return false;
    }
    d->is_open = true;
    d->check_ns = td_now_ns() + KVS_TIER_CHECK_NS;
    td_metric_set(d->metrics.uring, d->io.uring);
    td_metric_set(d->metrics.direct, d->io.direct);
    td_metric_set(d->metrics.blocks, d->slots.used_count);
    recover(d);
    return true;
}

bool kvs_tier_disk_is_writable(const kvs_tier_disk_t *d, uint64_t now_ns)
{
    return d->is_open && (!d->degraded || now_ns >= d->retry_ns);
}

/* --- blocks ----------------------------------------------------------------------------------- */

/* The index cannot be trusted or written any more: all is read anew, from the slots. */
static void index_lost(kvs_tier_disk_t *d)
{
    disk_close(d);
    (void)remove_file(d->index_path);
    degrade(d, "index", EIO);
}

/* Adds the last uses that the index does not know to a commit. */
static uint32_t add_touched(kvs_tier_disk_t *d, uint32_t count)
{
    for (uint32_t i = 0; i < d->touched_count; i++) {
        if (d->slots.at[d->touched[i]].generation != 0) {
            kvs_tier_slots_record(&d->slots, d->touched[i], d->block_bytes, &d->records[count++]);
        }
    }
    d->touched_count = 0;
    return count;
}

static void touch(kvs_tier_disk_t *d, uint32_t slot)
{
    kvs_tier_slots_touch(&d->slots, slot);
    if (d->touched_count < KVS_TIER_TOUCHES_MAX) { /* past it the index learns of a later use */
        d->touched[d->touched_count++] = slot;
    }
}

static bool is_among(const kvs_tier_record_t *records, uint32_t count, const td_block_key_t *key)
{
    for (uint32_t i = 0; i < count; i++) {
        if (td_block_key_equal(&records[i].key, key)) {
            return true;
        }
    }
    return false;
}

/* Finds a slot and fills in the header and the record. TD_INPROGRESS: it is to be written. */
static td_status_t put_prepare(kvs_tier_disk_t *d, kvs_tier_job_t *job, uint32_t writing,
                               uint32_t *removed)
{
    kvs_tier_done_t *done = &job->done;
    uint32_t slot = kvs_tier_slots_find(&d->slots, &done->key);
    kvs_tier_header_t header = {.key = done->key,
                                .tier_id = d->tier_id,
                                .content_hash = done->hash,
                                .length = d->block_bytes};

    if (td_block_content_hash(job->slot_bytes + KVS_TIER_HEADER_BYTES, d->block_bytes) !=
        done->hash) {
        return TD_ERR_CORRUPT;
    }
    if (is_among(d->records, writing, &done->key)) {
        return TD_ERR_BUSY;
    }
    if (slot != KVS_TIER_NONE) {
        if (d->slots.at[slot].content_hash == done->hash) {
            touch(d, slot);
            return TD_OK;
        }
        d->removed[(*removed)++] = done->key;
        kvs_tier_slots_remove(&d->slots, slot);
    }
    job->slot = kvs_tier_slots_take(&d->slots, &done->has_evicted, &done->evicted);
    if (job->slot == KVS_TIER_NONE) {
        return TD_ERR_BUSY;
    }
    if (done->has_evicted) {
        d->removed[(*removed)++] = done->evicted;
        td_metric_add(d->metrics.evicted, 1);
    }
    header.generation = ++d->slots.clock;
    kvs_tier_header_encode(&header, job->slot_bytes);
    d->records[writing] = (kvs_tier_record_t){.key = done->key,
                                              .slot = job->slot,
                                              .length = d->block_bytes,
                                              .generation = header.generation,
                                              .content_hash = done->hash,
                                              .used = header.generation};
    return TD_INPROGRESS;
}

/* Writes and syncs. Records of what failed are taken out; returns how many are left. */
static uint32_t put_write(kvs_tier_disk_t *d, kvs_tier_job_t **writing, kvs_tier_op_t *ops,
                          uint32_t count)
{
    uint32_t written = 0;
    int sync_error = 0;

    TD_FAULT_POINT("tier_write");
    kvs_tier_io_run(&d->io, ops, count);
    TD_FAULT_POINT("tier_written");
    sync_error = kvs_tier_io_sync(&d->io);
    TD_FAULT_POINT("tier_synced");
    for (uint32_t i = 0; i < count; i++) {
        int error = ops[i].error != 0 ? ops[i].error : sync_error;
        if (error != 0) {
            writing[i]->done.status = TD_ERR_IO;
            kvs_tier_slots_give_back(&d->slots, writing[i]->slot);
            degrade(d, ops[i].error != 0 ? "write" : "sync", error);
            continue;
        }
        td_metric_add(d->metrics.bytes_written, ops[i].len);
        writing[written] = writing[i];
        d->records[written++] = d->records[i];
    }
    return written;
}

static void count_puts(const kvs_tier_disk_t *d, kvs_tier_job_t *const *jobs, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        td_status_t status = jobs[i]->done.status;
        td_metric_add(status == TD_OK         ? d->metrics.stored
                      : status == TD_ERR_BUSY ? d->metrics.dropped
                                              : d->metrics.failed,
                      1);
    }
}

void kvs_tier_disk_put(kvs_tier_disk_t *d, kvs_tier_job_t **jobs, uint32_t count)
{
    uint64_t began_ns = td_now_ns();
    kvs_tier_op_t ops[KVS_TIER_PUT_BATCH_MAX];
    kvs_tier_job_t *writing[KVS_TIER_PUT_BATCH_MAX];
    uint32_t n = 0;
    uint32_t removed = 0;
    td_status_t status = TD_OK;

    TD_ASSERT(count <= KVS_TIER_PUT_BATCH_MAX);
    for (uint32_t i = 0; i < count; i++) {
        jobs[i]->done.status = put_prepare(d, jobs[i], n, &removed);
        if (jobs[i]->done.status == TD_INPROGRESS) {
            ops[n] = (kvs_tier_op_t){.offset = slot_offset(d, jobs[i]->slot),
                                     .bytes = jobs[i]->slot_bytes,
                                     .len = d->slot_bytes,
                                     .is_write = true};
            writing[n++] = jobs[i];
        }
    }
    n = n > 0 ? put_write(d, writing, ops, n) : 0;
    if (n > 0 || removed > 0) {
        status =
            kvs_tier_index_commit(&d->index, d->removed, removed, d->records, add_touched(d, n));
    }
    TD_FAULT_POINT("tier_committed");
    for (uint32_t i = 0; i < n; i++) {
        writing[i]->done.status = status;
        if (status == TD_OK) {
            kvs_tier_slots_fill(&d->slots, &d->records[i]);
        }
    }
    if (status != TD_OK) {
        index_lost(d);
    } else if (n > 0) {
        d->backoff_ns = KVS_TIER_BACKOFF_NS_MIN;
        recover(d);
    }
    count_puts(d, jobs, count);
    td_metric_set(d->metrics.blocks, d->slots.used_count);
    td_metric_observe_ns(d->metrics.write_seconds, td_now_ns() - began_ns);
}

/* Forgets blocks and makes their headers unreadable, so that no scan finds them again. */
static void forget(kvs_tier_disk_t *d, uint32_t slot)
{
    kvs_tier_op_t op = {.offset = slot_offset(d, slot),
                        .bytes = d->pages,
                        .len = KVS_TIER_PAGE_BYTES,
                        .is_write = true};
    td_block_key_t key = d->slots.at[slot].key;

    kvs_tier_slots_remove(&d->slots, slot);
    memset(d->pages, 0, KVS_TIER_PAGE_BYTES);
    kvs_tier_io_run(&d->io, &op, 1);
    if (op.error != 0) {
        degrade(d, "write", op.error);
    }
    if (kvs_tier_index_commit(&d->index, &key, 1, NULL, 0) != TD_OK) {
        index_lost(d);
    }
    td_metric_set(d->metrics.blocks, d->slots.used_count);
}

void kvs_tier_disk_drop(kvs_tier_disk_t *d, const td_block_key_t *key)
{
    uint32_t slot = kvs_tier_slots_find(&d->slots, key);
    if (slot != KVS_TIER_NONE) {
        forget(d, slot);
    }
}

/* What was read, looked at: the header is the one we wrote last, and the content its own. */
static td_status_t get_check(kvs_tier_disk_t *d, kvs_tier_job_t *job, const kvs_tier_op_t *op)
{
    const kvs_tier_slot_t *slot = &d->slots.at[job->slot];
    const uint8_t *bytes = job->slot_bytes + KVS_TIER_HEADER_BYTES;

    if (op->error != 0) {
        degrade(d, "read", op->error);
        td_metric_add(d->metrics.read_failed, 1);
        return TD_ERR_IO;
    }
    td_metric_add(d->metrics.bytes_read, op->len);
    if (!header_fits(d, job->slot_bytes, d->slot_bytes, slot) ||
        td_block_content_hash(bytes, d->block_bytes) != slot->content_hash) {
        TD_LOG_WARN("a block of the cold tier is damaged", "slot=%u", job->slot);
        td_metric_add(d->metrics.corrupt, 1);
        return TD_ERR_CORRUPT;
    }
    td_metric_add(d->metrics.hits, 1);
    job->done.hash = slot->content_hash;
    job->done.bytes = bytes;
    return TD_OK;
}

void kvs_tier_disk_get(kvs_tier_disk_t *d, kvs_tier_job_t **jobs, uint32_t count)
{
    uint64_t began_ns = td_now_ns();
    kvs_tier_op_t ops[KVS_TIER_OPS_MAX];
    kvs_tier_job_t *reading[KVS_TIER_OPS_MAX];
    uint32_t n = 0;

    TD_ASSERT(count <= KVS_TIER_OPS_MAX);
    TD_FAULT_POINT("tier_read");
    for (uint32_t i = 0; i < count; i++) {
        jobs[i]->slot = kvs_tier_slots_find(&d->slots, &jobs[i]->done.key);
        if (jobs[i]->slot == KVS_TIER_NONE) {
            jobs[i]->done.status = TD_ERR_NOT_FOUND;
            td_metric_add(d->metrics.misses, 1);
            continue;
        }
        ops[n] = (kvs_tier_op_t){.offset = slot_offset(d, jobs[i]->slot),
                                 .bytes = jobs[i]->slot_bytes,
                                 .len = d->slot_bytes};
        reading[n++] = jobs[i];
    }
    if (n > 0) {
        kvs_tier_io_run(&d->io, ops, n);
        td_metric_observe_ns(d->metrics.read_seconds, td_now_ns() - began_ns);
    }
    for (uint32_t i = 0; i < n; i++) {
        reading[i]->done.status = get_check(d, reading[i], &ops[i]);
    }
    for (uint32_t i = 0; i < n; i++) { /* after all checks: a key may have been asked for twice */
        uint32_t slot = kvs_tier_slots_find(&d->slots, &reading[i]->done.key);
        if (slot == KVS_TIER_NONE) {
            continue;
        }
        if (reading[i]->done.status == TD_OK) {
            touch(d, slot);
        } else {
            forget(d, slot);
        }
    }
}

void kvs_tier_disk_maintain(kvs_tier_disk_t *d, uint64_t now_ns)
{
    if (!d->is_open || now_ns < d->check_ns) {
        return;
    }
    d->check_ns = now_ns + KVS_TIER_CHECK_NS;
    if (kvs_tier_io_is_gone(&d->io)) {
        disk_close(d);
        degrade(d, "the file was removed", ENOENT);
        td_metric_set(d->metrics.blocks, 0);
        return;
    }
    if (d->touched_count > 0 &&
        kvs_tier_index_commit(&d->index, NULL, 0, d->records, add_touched(d, 0)) != TD_OK) {
        index_lost(d);
    }
}

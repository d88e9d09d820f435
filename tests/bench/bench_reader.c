#include "tests/bench/bench_reader.h"

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/base/td_ring.h"
#include "common/node/td_node.h"
#include "common/node/td_verify.h"

#define READ_LIMIT_NS (60 * TD_NS_PER_S)

struct slot;

typedef struct slice { /* of a batch: what is fetched and then hashed at a time */
    struct slot *slot;
    bool fetched;
    td_fetch_t fetch;
    td_verify_job_t verify;
} slice_t;

typedef struct slot { /* one batch */
    bench_reader_t *reader;
    bool used;
    const td_block_key_t *keys; /* borrowed */
    uint32_t count;
    uint32_t left;            /* blocks that are not here, or not hashed */
    td_fetch_piece_t *pieces; /* owned, [batch], as the next two */
    uint64_t *checksums;
    uint64_t *hashes;
    slice_t *slices; /* owned, [slices_max] */
} slot_t;

struct bench_reader {
    bench_reader_config_t config;
    uint32_t slice_blocks;
    uint32_t slices_max; /* of a batch */
    td_verify_t *verify; /* owned */
    td_ring_t *inbox;    /* owned: slices that were fetched or hashed */
    slot_t slots[BENCH_READER_DEPTH];
    const td_block_key_t *keys; /* borrowed */
    uint32_t count;
    uint32_t next; /* key to look up */
    uint32_t done; /* keys whose blocks are here */
    td_status_t status;
};

static bool slot_init(bench_reader_t *r, uint32_t at)
{
    const bench_reader_config_t *c = &r->config;
    slot_t *s = &r->slots[at];

    s->reader = r;
    s->pieces = td_calloc(c->batch, sizeof(*s->pieces));
    s->checksums = td_calloc(c->batch, sizeof(*s->checksums));
    s->hashes = td_calloc(c->batch, sizeof(*s->hashes));
    s->slices = td_calloc(r->slices_max, sizeof(*s->slices));
    if (s->pieces == NULL || s->checksums == NULL || s->hashes == NULL || s->slices == NULL) {
        return false;
    }
    for (uint32_t i = 0; i < c->batch; i++) {
        s->pieces[i].bytes = (uint32_t)c->block_bytes;
        s->pieces[i].dest = c->into + ((size_t)at * c->batch + i) * c->block_bytes;
    }
    return true;
}

td_status_t bench_reader_create(const bench_reader_config_t *config, bench_reader_t **out)
{
    bench_reader_t *r = td_calloc(1, sizeof(*r));
    td_status_t status = TD_ERR_NO_MEMORY;
    bool ok = r != NULL;

    if (ok) {
        r->config = *config;
        r->slice_blocks = (uint32_t)TD_MAX(TD_NODE_FETCH_BYTES / config->block_bytes, 1u);
        r->slices_max = (config->batch + r->slice_blocks - 1) / r->slice_blocks;
    }
    for (uint32_t i = 0; ok && i < BENCH_READER_DEPTH; i++) {
        ok = slot_init(r, i);
    }
    if (ok) {
        status = td_ring_create(BENCH_READER_DEPTH * r->slices_max, &r->inbox);
    }
    if (status == TD_OK) {
        status =
            td_verify_create(BENCH_READER_DEPTH * r->slices_max, config->block_bytes, &r->verify);
    }
    if (status != TD_OK) {
        bench_reader_destroy(r);
        return status;
    }
    *out = r;
    return TD_OK;
}

void bench_reader_destroy(bench_reader_t *r)
{
    if (r == NULL) {
        return;
    }
    td_verify_destroy(r->verify);
    td_ring_destroy(r->inbox);
    for (uint32_t i = 0; i < BENCH_READER_DEPTH; i++) {
        td_free(r->slots[i].pieces);
        td_free(r->slots[i].checksums);
        td_free(r->slots[i].hashes);
        td_free(r->slots[i].slices);
    }
    td_free(r);
}

int bench_reader_fd(const bench_reader_t *r)
{
    return td_ring_fd(r->inbox);
}

void bench_reader_begin(bench_reader_t *r, const td_block_key_t *keys, uint32_t count)
{
    r->keys = keys;
    r->count = count;
    r->next = 0;
    r->done = 0;
    r->status = TD_OK;
}

static void fail(bench_reader_t *r, td_status_t status)
{
    if (r->status == TD_OK) {
        r->status = status;
    }
}

static void on_fetched(td_fetch_t *fetch)
{
    slice_t *slice = fetch->ctx;
    TD_ASSERT(td_ring_push(slice->slot->reader->inbox, slice) == TD_OK);
}

static void on_hashed(td_verify_job_t *verify)
{
    slice_t *slice = verify->ctx;
    TD_ASSERT(td_ring_push(slice->slot->reader->inbox, slice) == TD_OK);
}

static void slice_end(slice_t *slice, td_status_t status)
{
    slot_t *s = slice->slot;

    s->left -= slice->fetch.piece_count;
    s->used = s->left > 0;
    s->reader->done += slice->fetch.piece_count;
    fail(s->reader, status);
}

static void fetch_slice(slot_t *s, uint32_t first)
{
    slice_t *slice = &s->slices[first / s->reader->slice_blocks];
    td_status_t status = TD_OK;

    *slice = (slice_t){.slot = s};
    slice->fetch = (td_fetch_t){.peer = s->reader->config.segment,
                                .deadline_ns = td_now_ns() + READ_LIMIT_NS,
                                .complete = on_fetched,
                                .ctx = slice,
                                .pieces = s->pieces + first,
                                .piece_count = TD_MIN(s->reader->slice_blocks, s->count - first)};
    status = td_transfer_fetch(s->reader->config.transfer, &slice->fetch);
    if (status != TD_OK) {
        slice_end(slice, status);
    }
}

static void on_found(void *ctx, uint64_t tag, td_status_t status,
                     const td_msg_lookup_result_t *found)
{
    slot_t *s = ctx;
    bench_reader_t *r = s->reader;
    (void)tag;

    if (status != TD_OK || found->count != s->count) {
        s->used = false;
        fail(r, status == TD_OK ? TD_ERR_NOT_FOUND : status);
        return;
    }
    for (uint32_t i = 0; i < s->count; i++) {
        s->pieces[i].block = found->blocks[i];
        s->pieces[i].epoch = found->epochs[i];
        s->checksums[i] = found->checksums[i];
    }
    s->left = s->count;
    for (uint32_t first = 0; first < s->count; first += r->slice_blocks) {
        fetch_slice(s, first);
    }
}

static td_status_t compare(const slice_t *slice)
{
    const slot_t *s = slice->slot;
    const uint32_t first = (uint32_t)(slice->fetch.pieces - s->pieces);

    for (uint32_t i = first; i < first + slice->fetch.piece_count; i++) {
        if (td_block_checksum(s->hashes[i], &s->keys[i], s->pieces[i].epoch) != s->checksums[i]) {
            return TD_ERR_CORRUPT;
        }
    }
    return TD_OK;
}

static void hash_slice(bench_reader_t *r, slice_t *slice)
{
    const slot_t *s = slice->slot;

    slice->fetched = true;
    slice->verify = (td_verify_job_t){.pieces = slice->fetch.pieces,
                                      .piece_count = slice->fetch.piece_count,
                                      .hashes = s->hashes + (slice->fetch.pieces - s->pieces),
                                      .complete = on_hashed,
                                      .ctx = slice};
    td_verify_submit(r->verify, &slice->verify);
}

static void take_completed(bench_reader_t *r)
{
    void *item = NULL;

    td_ring_drain_fd(r->inbox);
    while (td_ring_pop(r->inbox, &item)) {
        slice_t *slice = item;
        if (!slice->fetched && slice->fetch.status == TD_OK) {
            hash_slice(r, slice);
        } else {
            slice_end(slice, slice->fetched ? compare(slice) : slice->fetch.status);
        }
    }
}

static void look_up_more(bench_reader_t *r)
{
    for (uint32_t i = 0; i < BENCH_READER_DEPTH; i++) {
        slot_t *s = &r->slots[i];
        if (s->used || r->next == r->count || r->status != TD_OK) {
            continue;
        }
        s->keys = r->keys + r->next;
        s->count = TD_MIN(r->config.batch, r->count - r->next);
        s->used = true;
        if (kvs_client_lookup(r->config.client, s->keys, s->count, on_found, s, 0) != TD_OK) {
            s->used = false;
            return; /* at the next step */
        }
        r->next += s->count;
    }
}

td_status_t bench_reader_step(bench_reader_t *r)
{
    bool waits = false;

    take_completed(r);
    look_up_more(r);
    for (uint32_t i = 0; i < BENCH_READER_DEPTH; i++) {
        waits |= r->slots[i].used;
    }
    if (waits) {
        return TD_INPROGRESS; /* a failure too: the slots' blocks are still written to */
    }
    return r->status != TD_OK || r->done == r->count ? r->status : TD_INPROGRESS;
}

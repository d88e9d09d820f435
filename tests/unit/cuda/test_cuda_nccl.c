/* Blocks from device to device: transfers over the NCCL carrier, its failures, and what is left of
 * them. Ends are transfers of one process, each with a device's copies of its own. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/td_clock.h"
#include "common/model/cuda/td_cuda_exchange.h"
#include "common/model/cuda/td_cuda_nccl.h"
#include "common/transfer/td_transfer.h"
#include "tests/emu/emu_nccl.h"
#include "tests/unit/cuda/test_cuda_rig.h"

#ifdef TD_CUDA_HAS_NCCL

enum { ENDS = 4, MEETING = 3, BLOCKS = 32, LAYERS = 6 };
#define LAYER_BYTES (16u * 1024u)
#define BLOCK_BYTES (LAYERS * LAYER_BYTES)
#define SLOT_BYTES ((size_t)4 * BLOCK_BYTES + 4096u) /* no whole blocks: pieces are cut */

typedef struct end {
    uint64_t incarnation;
    td_transfer_t *transfer;
    td_pool_t *pool;
    td_metrics_t *metrics;
    td_cuda_mirror_t *mirror;
    td_cuda_exchange_t *exchange;
    uint8_t *copies; /* on the device */
} end_t;

typedef struct rig {
    end_t ends[ENDS];
    uint32_t count;
    size_t block_bytes;
    size_t memory_before;
    bool met[ENDS][ENDS]; /* reader, owner: a fetch has ended */
} rig_t;

static pthread_mutex_t done_mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t done_cond = PTHREAD_COND_INITIALIZER;
static uint32_t done_count;
static uint32_t limit_ms = 5000; /* of a fetch */
static uint32_t open_ms = 400;   /* of a link */

static void on_complete(td_fetch_t *fetch)
{
    (void)fetch;
    (void)pthread_mutex_lock(&done_mutex);
    done_count++;
    (void)pthread_cond_signal(&done_cond);
    (void)pthread_mutex_unlock(&done_mutex);
}

static void wait_done(uint32_t count)
{
    (void)pthread_mutex_lock(&done_mutex);
    while (done_count < count) {
        (void)pthread_cond_wait(&done_cond, &done_mutex);
    }
    done_count -= count;
    (void)pthread_mutex_unlock(&done_mutex);
}

/* --- ends --------------------------------------------------------------------------------------
 */

static void end_open(end_t *e, uint32_t number, size_t block_bytes)
{
    char bus[16];
    td_transfer_config_t config = {.block_count = BLOCKS,
                                   .block_bytes = block_bytes,
                                   .incarnation = 11 * (number + 1),
                                   .name_prefix = "tandem_test",
                                   .nccl_slot_bytes = SLOT_BYTES,
                                   .nccl_deadline_ms = 200,
                                   .nccl_retry_ms = 20,
                                   .nccl_open_ms = open_ms};

    (void)snprintf(bus, sizeof(bus), "bus-%u", number);
    (void)setenv("EMU_BUS", bus, 1);
    e->incarnation = config.incarnation;
    assert_int_equal(td_metrics_create(&e->metrics), TD_OK);
    assert_int_equal(td_cuda_mirror_create(BLOCKS, BLOCKS, &e->mirror), TD_OK);
    assert_int_equal(cudaMalloc((void **)&e->copies, BLOCKS * block_bytes), cudaSuccess);
    assert_int_equal(td_cuda_exchange_create(0, e->copies, block_bytes, e->mirror, &e->exchange),
                     TD_OK);
    config.metrics = e->metrics;
    config.device = td_cuda_exchange_device(e->exchange);
    assert_int_equal(td_transfer_create(&config, &e->transfer), TD_OK);
    assert_int_equal(td_pool_create(td_transfer_memory(e->transfer), BLOCKS, block_bytes, &e->pool),
                     TD_OK);
    td_transfer_set_pool(e->transfer, e->pool);
    for (size_t i = 0; i < BLOCKS * block_bytes; i++) {
        td_pool_base(e->pool)[i] = (uint8_t)(i * 31 + i / 251 * (number + 1) + number);
    }
    assert_int_equal(
        cudaHostRegister(td_pool_base(e->pool), BLOCKS * block_bytes, cudaHostRegisterMapped),
        cudaSuccess);
}

static void end_meets(end_t *e, const end_t *other, size_t block_bytes)
{
    td_transfer_peer_t peer = {.incarnation = other->incarnation,
                               .block_count = BLOCKS,
                               .block_bytes = (uint32_t)block_bytes,
                               .device = td_transfer_device_name(other->transfer)};

    td_transfer_address(other->transfer, &peer.address, &peer.address_len, &peer.rkey,
                        &peer.rkey_len, &peer.base);
    assert_int_equal(td_transfer_peer_add(e->transfer, &peer), TD_OK);
}

static void end_close(end_t *e)
{
    td_transfer_stop(e->transfer);
    assert_int_equal(cudaHostUnregister(td_pool_base(e->pool)), cudaSuccess);
    td_transfer_destroy(e->transfer);
    assert_true(td_cuda_exchange_destroy(e->exchange));
    assert_int_equal(cudaFree(e->copies), cudaSuccess);
    td_cuda_mirror_destroy(e->mirror);
    td_pool_destroy(e->pool);
    td_metrics_destroy(e->metrics);
}

static void rig_open(rig_t *r, uint32_t count, size_t block_bytes)
{
    memset(r, 0, sizeof(*r));
    r->memory_before = emu_memory_used();
    r->count = count;
    r->block_bytes = block_bytes;
    done_count = 0;
    (void)setenv("UCX_TLS", "tcp", 1);
    for (uint32_t i = 0; i < count; i++) {
        end_open(&r->ends[i], i, block_bytes);
    }
    for (uint32_t i = 0; i < count * count; i++) {
        if (i / count != i % count) {
            end_meets(&r->ends[i / count], &r->ends[i % count], block_bytes);
        }
    }
}

/* Nothing may be left: communicators, device memory. */
static void rig_close(rig_t *r)
{
    for (uint32_t i = 0; i < r->count; i++) {
        end_close(&r->ends[i]);
    }
    assert_int_equal(emu_nccl_open(), 0);
    assert_int_equal(emu_memory_used(), r->memory_before);
}

static uint64_t metric(const end_t *e, const char *name)
{
    td_str_t text = {0};
    char wanted[128];
    const char *at = NULL;
    uint64_t value = 0;

    assert_int_equal(td_metrics_render(e->metrics, &text), TD_OK);
    (void)snprintf(wanted, sizeof(wanted), "\ntandem_test_%s ", name);
    at = strstr(text.bytes, wanted);
    assert_non_null(at);
    value = strtoull(at + strlen(wanted), NULL, 10);
    td_str_fini(&text);
    return value;
}

/* --- fetches ------------------------------------------------------------------------------------
 */

typedef struct job {
    td_fetch_t fetch;
    td_fetch_piece_t pieces[BLOCKS];
} job_t;

/* Layers [begin, end) of all of the owner's blocks, to the reader's in the opposite order. */
static void job_start(rig_t *r, job_t *job, uint32_t reader, uint32_t owner, uint32_t begin,
                      uint32_t end)
{
    const end_t *to = &r->ends[reader];
    const end_t *from = &r->ends[owner];
    const size_t layer = r->block_bytes / LAYERS;

    job->fetch = (td_fetch_t){.peer = from->incarnation,
                              .deadline_ns = td_now_ns() + limit_ms * TD_NS_PER_MS,
                              .complete = on_complete,
                              .pieces = job->pieces,
                              .piece_count = BLOCKS};
    for (uint32_t i = 0; i < BLOCKS; i++) {
        const size_t offset = begin * layer;
        const size_t bytes = end == LAYERS ? r->block_bytes - offset : (end - begin) * layer;
        job->pieces[i] = (td_fetch_piece_t){
            .epoch = td_pool_epoch(from->pool, i),
            .block = i,
            .offset = (uint32_t)offset,
            .bytes = (uint32_t)bytes,
            .dest = td_pool_bytes(to->pool, BLOCKS - 1 - i) + offset,
        };
    }
    assert_int_equal(td_transfer_fetch(to->transfer, &job->fetch), TD_OK);
}

/* Other bytes in all blocks, which the device's copies do not have. */
static void fill(const rig_t *r, uint32_t number, uint8_t byte)
{
    memset(td_pool_base(r->ends[number].pool), byte, BLOCKS * r->block_bytes);
    td_cuda_mirror_forget_all(r->ends[number].mirror);
}

static void clear(const rig_t *r, uint32_t reader)
{
    fill(r, reader, 0);
}

static void assert_same(const rig_t *r, uint32_t reader, uint32_t owner)
{
    for (uint32_t i = 0; i < BLOCKS; i++) {
        assert_memory_equal(td_pool_bytes(r->ends[reader].pool, BLOCKS - 1 - i),
                            td_pool_bytes(r->ends[owner].pool, i), r->block_bytes);
    }
}

/* All blocks. Two ends that connect to each other at the same moment may lose a first message (UCX
 * 1.13.1 by tcp, seen on a busy machine): that fetch times out, and the next one connects anew. */
static void run_job(rig_t *r, job_t *job, uint32_t reader, uint32_t owner)
{
    bool again = false;

    do {
        job_start(r, job, reader, owner, 0, LAYERS);
        wait_done(1);
        again = job->fetch.status == TD_ERR_TIMEOUT && !r->met[reader][owner];
        r->met[reader][owner] = true;
    } while (again);
    assert_int_equal(job->fetch.status, TD_OK);
}

/* They must come and be right, whichever way. */
static td_carrier_t fetch_all(rig_t *r, uint32_t reader, uint32_t owner)
{
    job_t job;

    clear(r, reader);
    run_job(r, &job, reader, owner);
    assert_int_equal(job.fetch.bytes, BLOCKS * r->block_bytes);
    assert_same(r, reader, owner);
    return job.fetch.carrier;
}

/* Until blocks go by NCCL: a link opens beside what another carrier does meanwhile. */
static void wait_linked(rig_t *r, uint32_t reader, uint32_t owner)
{
    const uint64_t deadline = td_now_ns() + 20 * TD_NS_PER_S;

    while (td_now_ns() < deadline) {
        job_t job;
        run_job(r, &job, reader, owner);
        if (job.fetch.carrier == TD_CARRIER_NCCL) {
            return;
        }
        sched_yield();
    }
    fail_msg("no link between %u and %u", reader, owner);
}

static void wait_metric(const end_t *e, const char *name, uint64_t wanted)
{
    const uint64_t deadline = td_now_ns() + 10 * TD_NS_PER_S;

    while (metric(e, name) != wanted) {
        if (td_now_ns() > deadline) {
            fail_msg("%s stays %llu", name, (unsigned long long)metric(e, name));
        }
        sched_yield();
    }
}

/* --- tests
 * ---------------------------------------------------------------------------------------- */

static void test_whole_blocks(void **state)
{
    rig_t r;

    (void)state;
    rig_open(&r, 2, BLOCK_BYTES);
    wait_linked(&r, 1, 0);
    assert_int_equal(fetch_all(&r, 1, 0), TD_CARRIER_NCCL);
    assert_int_equal(fetch_all(&r, 1, 0), TD_CARRIER_NCCL);
    assert_true(metric(&r.ends[1], "transfer_bytes_total{carrier=\"nccl\"}") >=
                2 * BLOCKS * BLOCK_BYTES);
    assert_true(metric(&r.ends[0], "nccl_sent_bytes_total") >= 2 * BLOCKS * BLOCK_BYTES);
    assert_int_equal(metric(&r.ends[1], "nccl_links"), 1);
    /* The same communicator carries the other direction, whose order rank 1 does not decide. */
    assert_int_equal(fetch_all(&r, 0, 1), TD_CARRIER_NCCL);
    assert_int_equal(metric(&r.ends[0], "nccl_opened_total"), 1);
    rig_close(&r);
}

static void test_sizes_that_do_not_suit_the_kernel(void **state)
{
    rig_t r;

    (void)state;
    rig_open(&r, 2, BLOCK_BYTES + 7);
    wait_linked(&r, 1, 0);
    assert_int_equal(fetch_all(&r, 1, 0), TD_CARRIER_NCCL);
    rig_close(&r);
}

static void test_layers_become_whole_copies(void **state)
{
    rig_t r;
    job_t job;
    uint32_t place = 0;
    uint8_t *bytes = NULL;

    (void)state;
    rig_open(&r, 2, BLOCK_BYTES);
    /* A link, without a copy of any block. */
    wait_linked(&r, 1, 0);
    clear(&r, 1);
    for (uint32_t layer = 0; layer < LAYERS; layer += 2) {
        assert_false(
            td_cuda_mirror_pin(r.ends[1].mirror, 3, td_pool_epoch(r.ends[1].pool, 3), &place));
        job_start(&r, &job, 1, 0, layer, layer + 2);
        wait_done(1);
        assert_int_equal(job.fetch.status, TD_OK);
        assert_int_equal(job.fetch.carrier, TD_CARRIER_NCCL);
    }
    assert_same(&r, 1, 0);
    /* Every block that a place could be kept for is on the device, byte by byte. */
    assert_true(td_cuda_mirror_pin(r.ends[1].mirror, BLOCKS - 1,
                                   td_pool_epoch(r.ends[1].pool, BLOCKS - 1), &place));
    bytes = test_malloc(BLOCK_BYTES);
    assert_int_equal(cudaMemcpyAsync(bytes, r.ends[1].copies + (size_t)place * BLOCK_BYTES,
                                     BLOCK_BYTES, cudaMemcpyDeviceToHost, NULL),
                     cudaSuccess);
    assert_memory_equal(bytes, td_pool_bytes(r.ends[1].pool, BLOCKS - 1), BLOCK_BYTES);
    test_free(bytes);
    td_cuda_mirror_unpin(r.ends[1].mirror, place);
    rig_close(&r);
}

static void test_copies_of_the_device_are_sent(void **state)
{
    rig_t r;
    job_t job;
    uint32_t place = 0;
    bool valid = false;
    end_t *owner = NULL;

    (void)state;
    rig_open(&r, 2, BLOCK_BYTES);
    wait_linked(&r, 1, 0);
    owner = &r.ends[0];
    /* Other bytes than the host's, to see which are sent. */
    td_cuda_mirror_begin(owner->mirror);
    assert_int_equal(
        td_cuda_mirror_take(owner->mirror, 5, td_pool_epoch(owner->pool, 5), &place, &valid),
        TD_OK);
    assert_int_equal(
        cudaMemsetAsync(owner->copies + (size_t)place * BLOCK_BYTES, 0x5a, BLOCK_BYTES, NULL),
        cudaSuccess);
    assert_int_equal(cudaStreamSynchronize(NULL), cudaSuccess);
    td_cuda_mirror_validate(owner->mirror, 5, true);
    for (uint32_t turn = 0; turn < 2; turn++) {
        const uint8_t *got = td_pool_bytes(r.ends[1].pool, BLOCKS - 1 - 5);
        clear(&r, 1);
        job_start(&r, &job, 1, 0, 0, LAYERS);
        wait_done(1);
        assert_int_equal(job.fetch.status, TD_OK);
        assert_int_equal(job.fetch.carrier, TD_CARRIER_NCCL);
        /* A pass that is not over may not have brought it there yet: the host's until then. */
        assert_int_equal(got[0], turn == 0 ? td_pool_bytes(owner->pool, 5)[0] : 0x5a);
        assert_int_equal(got[BLOCK_BYTES - 1],
                         turn == 0 ? td_pool_bytes(owner->pool, 5)[BLOCK_BYTES - 1] : 0x5a);
        td_cuda_mirror_end(owner->mirror);
    }
    rig_close(&r);
}

static void test_another_allocation_is_stale(void **state)
{
    rig_t r;
    job_t job;
    uint32_t block = 0;

    (void)state;
    rig_open(&r, 2, BLOCK_BYTES);
    wait_linked(&r, 1, 0);
    clear(&r, 1);
    assert_int_equal(td_pool_take(r.ends[0].pool, &block), TD_OK); /* a new epoch */
    job_start(&r, &job, 1, 0, 0, LAYERS);
    wait_done(1);
    assert_int_equal(job.fetch.status, TD_OK);
    td_pool_unref(r.ends[0].pool, block);
    job.pieces[block].epoch--;
    job.fetch.deadline_ns = td_now_ns() + 5 * TD_NS_PER_S;
    assert_int_equal(td_transfer_fetch(r.ends[1].transfer, &job.fetch), TD_OK);
    wait_done(1);
    assert_int_equal(job.fetch.status, TD_ERR_STALE);
    assert_int_equal(job.fetch.carrier, TD_CARRIER_NCCL);
    assert_int_equal(fetch_all(&r, 1, 0), TD_CARRIER_NCCL); /* the link has not suffered */
    rig_close(&r);
}

/* Everybody fetches from everybody at once, in pieces of layers. */
static void test_several_peers_in_both_directions(void **state)
{
    rig_t r;
    static job_t jobs[MEETING][MEETING][LAYERS];

    (void)state;
    rig_open(&r, MEETING, BLOCK_BYTES);
    for (uint32_t i = 0; i < MEETING * MEETING; i++) {
        if (i / MEETING != i % MEETING) {
            wait_linked(&r, i / MEETING, i % MEETING);
        }
    }
    for (uint32_t round = 0; round < 3; round++) {
        uint32_t started = 0;
        for (uint32_t i = 0; i < MEETING * MEETING * LAYERS; i++) {
            const uint32_t reader = i / LAYERS / MEETING;
            const uint32_t owner = i / LAYERS % MEETING;
            if (reader != owner) { /* the same blocks with the same bytes from each: no matter */
                job_start(&r, &jobs[reader][owner][i % LAYERS], reader, owner, i % LAYERS,
                          i % LAYERS + 1);
                started++;
            }
        }
        wait_done(started);
        for (uint32_t i = 0; i < MEETING * MEETING * LAYERS; i++) {
            const job_t *job = &jobs[i / LAYERS / MEETING][i / LAYERS % MEETING][i % LAYERS];
            if (i / LAYERS / MEETING != i / LAYERS % MEETING) {
                assert_int_equal(job->fetch.status, TD_OK);
                assert_int_equal(job->fetch.carrier, TD_CARRIER_NCCL);
            }
        }
    }
    rig_close(&r);
}

/* --- failures -----------------------------------------------------------------------------------
 */

static const struct {
    emu_nccl_fault_t fault;
    bool opening;
    const char *name;
} faults[] = {
    {EMU_NCCL_INIT_HANGS, true, "a communicator that does not come up"},
    {EMU_NCCL_INIT_FAILS, true, "a communicator that fails"},
    {EMU_NCCL_SEND_HANGS, false, "a send that hangs"},
    {EMU_NCCL_RECV_HANGS, false, "a receive that hangs"},
    {EMU_NCCL_SEND_BREAKS, false, "an error in the middle of a send"},
    {EMU_NCCL_POST_FAILS, false, "a call that fails"},
};

static void test_each_failure_ends_in_another_carrier_and_a_new_link(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof(faults) / sizeof(faults[0]); i++) {
        for (uint32_t reader = 0; reader < 2; reader++) {
            rig_t r;
            rig_open(&r, 2, BLOCK_BYTES);
            if (!faults[i].opening) {
                wait_linked(&r, reader, 1 - reader);
            }
            emu_nccl_fail(faults[i].fault, faults[i].opening ? 1 : 2);
            assert_int_equal(fetch_all(&r, reader, 1 - reader), TD_CARRIER_TCP);
            wait_linked(&r, reader, 1 - reader);
            assert_int_equal(fetch_all(&r, reader, 1 - reader), TD_CARRIER_NCCL);
            /* A link that does not open the other end may not have begun. */
            assert_true(
                metric(&r.ends[reader], "nccl_aborted_total") > 0 ||
                (faults[i].opening && metric(&r.ends[1 - reader], "nccl_aborted_total") > 0));
            wait_metric(&r.ends[0], "nccl_quarantined", 0);
            wait_metric(&r.ends[1], "nccl_quarantined", 0);
            rig_close(&r);
        }
    }
}

/* For a link's first chunk connections are made, which may take long: fetches do not wait for that,
 * nor for staging memory that such chunks have, but the links are good. */
static void test_slow_first_chunks_end_no_link(void **state)
{
    rig_t r;
    const uint32_t usual_ms = open_ms;
    const uint64_t deadline = td_now_ns() + 30 * TD_NS_PER_S;

    (void)state;
    open_ms = 60000;
    rig_open(&r, ENDS, BLOCK_BYTES);
    emu_nccl_fail(EMU_NCCL_POST_LAGS, 1);
    while (metric(&r.ends[0], "nccl_links") < ENDS - 1) {
        assert_true(td_now_ns() < deadline);
        for (uint32_t owner = 1; owner < ENDS; owner++) {
            assert_int_equal(fetch_all(&r, 0, owner), TD_CARRIER_TCP);
        }
    }
    for (uint32_t owner = 1; owner < ENDS; owner++) { /* at least the last one finds no slot */
        assert_int_equal(fetch_all(&r, 0, owner), TD_CARRIER_TCP);
    }
    emu_nccl_goes_on();
    for (uint32_t owner = 1; owner < ENDS; owner++) {
        wait_linked(&r, 0, owner);
        assert_int_equal(fetch_all(&r, 0, owner), TD_CARRIER_NCCL);
    }
    assert_int_equal(metric(&r.ends[0], "nccl_aborted_total"), 0);
    assert_int_equal(metric(&r.ends[0], "nccl_opened_total"), ENDS - 1);
    rig_close(&r);
    open_ms = usual_ms;
}

/* Another carrier brings the host's blocks anew, and only those are compared with a checksum. */
static void test_copies_of_a_fetch_that_fell_back_are_not_used(void **state)
{
    rig_t r;
    uint32_t place = 0;

    (void)state;
    rig_open(&r, 2, BLOCK_BYTES);
    wait_linked(&r, 1, 0);
    clear(&r, 1);
    emu_nccl_fail(EMU_NCCL_SEND_HANGS, 2); /* what came before has landed */
    assert_int_equal(fetch_all(&r, 1, 0), TD_CARRIER_TCP);
    for (uint32_t i = 0; i < BLOCKS; i++) {
        assert_false(
            td_cuda_mirror_pin(r.ends[1].mirror, i, td_pool_epoch(r.ends[1].pool, i), &place));
    }
    rig_close(&r);
}

/* What NCCL may still write into is nobody's before the abort has ended. */
static void test_staging_is_quarantined_until_the_abort_ends(void **state)
{
    rig_t r;

    (void)state;
    rig_open(&r, 2, BLOCK_BYTES);
    wait_linked(&r, 1, 0);
    emu_nccl_fail(EMU_NCCL_SEND_HANGS, 1);
    emu_nccl_fail(EMU_NCCL_ABORT_LAGS, 1);
    assert_int_equal(fetch_all(&r, 1, 0), TD_CARRIER_TCP);
    /* One of the two ends lags; it takes no part in another link meanwhile. */
    for (uint32_t i = 0; i < 5; i++) {
        assert_int_equal(fetch_all(&r, 1, 0), TD_CARRIER_TCP);
        assert_true(
            metric(&r.ends[0], "nccl_quarantined") + metric(&r.ends[1], "nccl_quarantined") > 0);
    }
    emu_nccl_goes_on();
    wait_linked(&r, 1, 0);
    assert_int_equal(fetch_all(&r, 1, 0), TD_CARRIER_NCCL);
    assert_int_equal(metric(&r.ends[0], "nccl_quarantined"), 0);
    assert_int_equal(metric(&r.ends[1], "nccl_quarantined"), 0);
    rig_close(&r);
}

/* A fetch that was taken back is over at once, and its destination is its owner's again. */
static void test_a_cancelled_fetch_writes_nothing_more(void **state)
{
    rig_t r;
    job_t job;

    (void)state;
    rig_open(&r, 2, BLOCK_BYTES);
    wait_linked(&r, 1, 0);
    for (uint32_t i = 0; i < 50; i++) {
        clear(&r, 1);
        job_start(&r, &job, 1, 0, 0, LAYERS);
        if (i % 2 == 0) {
            sched_yield();
        }
        td_transfer_cancel(r.ends[1].transfer, job.fetch.id);
        wait_done(1);
        assert_true(job.fetch.status == TD_ERR_CANCELLED || job.fetch.status == TD_OK);
        fill(&r, 1, 0x11);
        assert_int_equal(fetch_all(&r, 0, 1), TD_CARRIER_NCCL); /* what went on has ended */
        for (size_t at = 0; at < BLOCKS * BLOCK_BYTES; at += 512) {
            assert_int_equal(td_pool_base(r.ends[1].pool)[at], 0x11);
        }
    }
    rig_close(&r);
}

static void test_a_peer_that_ends_takes_nobody_along(void **state)
{
    rig_t r;
    job_t job;

    (void)state;
    for (uint32_t reader = 0; reader < 2; reader++) {
        rig_open(&r, 2, BLOCK_BYTES);
        wait_linked(&r, reader, 1 - reader);
        emu_nccl_fail(EMU_NCCL_SEND_HANGS, 1); /* so that it ends in the middle of it */
        job_start(&r, &job, reader, 1 - reader, 0, LAYERS);
        while (metric(&r.ends[reader], "nccl_links") == 0) {
            sched_yield();
        }
        td_transfer_peer_remove(r.ends[reader].transfer, r.ends[1 - reader].incarnation);
        wait_done(1);
        assert_int_equal(job.fetch.status, TD_ERR_PEER_DEAD);
        wait_metric(&r.ends[reader], "nccl_quarantined", 0);
        rig_close(&r);
        emu_nccl_fail(EMU_NCCL_SEND_HANGS, 0);
    }
}

static void test_one_device_is_not_linked_to_itself(void **state)
{
    rig_t r;

    (void)state;
    rig_open(&r, 1, BLOCK_BYTES);
    end_open(&r.ends[1], 0, BLOCK_BYTES);
    r.ends[1].incarnation = 11; /* a second life of the same device */
    assert_string_equal(td_transfer_device_name(r.ends[0].transfer),
                        td_transfer_device_name(r.ends[1].transfer));
    r.count = 2;
    rig_close(&r);
}

/* Every call of the runtime and of NCCL, and every allocation, fails in turn: blocks come all the
 * same, or memory is what is said to be missing; and nothing is left. */
static void test_every_call_and_allocation_fails_in_turn(void **state)
{
    (void)state;
    for (uint32_t nth = 1; nth <= 60; nth++) {
        const bool memory = nth % 2 == 0;
        rig_t r;
        rig_open(&r, 2, BLOCK_BYTES);
        wait_linked(&r, 1, 0);
        if (memory) {
            job_t job;
            limit_ms = 400;
            job_start(&r, &job, 1, 0, 0, LAYERS); /* what it allocates itself is here */
            limit_ms = 5000;
            td_alloc_fail_at(nth / 2);
            wait_done(1);
            td_alloc_fail_at(0);
            /* By tcp, an owner without memory says nothing. */
            assert_true(job.fetch.status == TD_OK || job.fetch.status == TD_ERR_NO_MEMORY ||
                        job.fetch.status == TD_ERR_TIMEOUT);
        } else {
            (void)emu_fail_at((nth + 1) / 2);
            (void)fetch_all(&r, 1, 0);
            (void)fetch_all(&r, 0, 1);
            (void)emu_fail_at(0);
        }
        (void)fetch_all(&r, 1, 0);
        rig_close(&r);
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_whole_blocks),
        cmocka_unit_test(test_sizes_that_do_not_suit_the_kernel),
        cmocka_unit_test(test_layers_become_whole_copies),
        cmocka_unit_test(test_copies_of_the_device_are_sent),
        cmocka_unit_test(test_another_allocation_is_stale),
        cmocka_unit_test(test_several_peers_in_both_directions),
        cmocka_unit_test(test_each_failure_ends_in_another_carrier_and_a_new_link),
        cmocka_unit_test(test_slow_first_chunks_end_no_link),
        cmocka_unit_test(test_copies_of_a_fetch_that_fell_back_are_not_used),
        cmocka_unit_test(test_staging_is_quarantined_until_the_abort_ends),
        cmocka_unit_test(test_a_cancelled_fetch_writes_nothing_more),
        cmocka_unit_test(test_a_peer_that_ends_takes_nobody_along),
        cmocka_unit_test(test_one_device_is_not_linked_to_itself),
        cmocka_unit_test(test_every_call_and_allocation_fails_in_turn),
    };
    if (argc > 1) {
        cmocka_set_test_filter(argv[1]);
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}

#else

int main(void)
{
    puts("[  SKIPPED ] nccl: built without nccl.h");
    return 0;
}

#endif

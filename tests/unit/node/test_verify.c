/* The verifier: hashes of whole blocks, found on its own thread, and its end. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/base/td_ring.h"
#include "common/kv/td_block_key.h"
#include "common/node/td_verify.h"

#define BLOCKS 64u
#define BLOCK_BYTES 8192u
#define JOBS 256u

typedef struct world {
    td_verify_t *verify;
    td_ring_t *done;
    uint8_t *memory;
} world_t;

static int setup(void **state)
{
    world_t *w = calloc(1, sizeof(*w));

    assert_non_null(w);
    assert_int_equal(td_verify_create(JOBS, BLOCK_BYTES, &w->verify), TD_OK);
    assert_int_equal(td_ring_create(JOBS, &w->done), TD_OK);
    w->memory = malloc((size_t)BLOCKS * BLOCK_BYTES);
    for (size_t i = 0; i < (size_t)BLOCKS * BLOCK_BYTES; i++) {
        w->memory[i] = (uint8_t)(i * 7 + i / BLOCK_BYTES);
    }
    *state = w;
    return 0;
}

static int teardown(void **state)
{
    world_t *w = *state;
    td_verify_destroy(w->verify);
    td_ring_destroy(w->done);
    free(w->memory);
    free(w);
    return 0;
}

static void on_complete(td_verify_job_t *job)
{
    TD_ASSERT(td_ring_push(job->ctx, job) == TD_OK);
}

static td_verify_job_t *next_done(world_t *w)
{
    uint64_t until = td_now_ns() + 10 * TD_NS_PER_S;
    void *item = NULL;

    while (!td_ring_pop(w->done, &item)) {
        assert_true(td_now_ns() < until);
        (void)sched_yield();
    }
    return item;
}

static uint64_t hash_of(const world_t *w, uint32_t block)
{
    return td_block_content_hash(w->memory + (size_t)block * BLOCK_BYTES, BLOCK_BYTES);
}

/* A piece stands for the whole block that it lies in; one without bytes for none. */
static void test_verify_hashes_the_whole_block_of_each_piece(void **state)
{
    world_t *w = *state;
    td_fetch_piece_t pieces[3] = {
        {.bytes = BLOCK_BYTES, .dest = w->memory},
        {.bytes = 0, .dest = w->memory + BLOCK_BYTES},
        {.bytes = 100, .offset = 4096, .dest = w->memory + 2 * BLOCK_BYTES + 4096}};
    uint64_t hashes[3] = {1, 2, 3};
    td_verify_job_t job = {.pieces = pieces,
                           .piece_count = 3,
                           .hashes = hashes,
                           .complete = on_complete,
                           .ctx = w->done};

    td_verify_submit(w->verify, &job);
    assert_ptr_equal(next_done(w), &job);
    assert_int_equal(job.status, TD_OK);
    assert_int_equal(hashes[0], hash_of(w, 0));
    assert_int_equal(hashes[1], 2);
    assert_int_equal(hashes[2], hash_of(w, 2));
}

typedef struct submitter {
    world_t *w;
    uint32_t first;
    td_fetch_piece_t pieces[BLOCKS];
    uint64_t hashes[BLOCKS];
    td_verify_job_t jobs[BLOCKS];
} submitter_t;

static void *submit_all(void *arg)
{
    submitter_t *s = arg;
    for (uint32_t i = 0; i < BLOCKS; i++) {
        s->pieces[i] =
            (td_fetch_piece_t){.bytes = 1, .dest = s->w->memory + (size_t)i * BLOCK_BYTES};
        s->jobs[i] = (td_verify_job_t){.pieces = &s->pieces[i],
                                       .piece_count = 1,
                                       .hashes = &s->hashes[i],
                                       .complete = on_complete,
                                       .ctx = s->w->done};
        td_verify_submit(s->w->verify, &s->jobs[i]);
    }
    return NULL;
}

static void test_verify_takes_jobs_of_many_threads(void **state)
{
    world_t *w = *state;
    submitter_t *s = calloc(3, sizeof(*s));
    pthread_t threads[3];

    for (uint32_t i = 0; i < 3; i++) {
        s[i].w = w;
        assert_int_equal(pthread_create(&threads[i], NULL, submit_all, &s[i]), 0);
    }
    for (uint32_t i = 0; i < 3 * BLOCKS; i++) {
        assert_int_equal(next_done(w)->status, TD_OK);
    }
    for (uint32_t i = 0; i < 3; i++) {
        assert_int_equal(pthread_join(threads[i], NULL), 0);
        for (uint32_t k = 0; k < BLOCKS; k++) {
            assert_int_equal(s[i].hashes[k], hash_of(w, k));
        }
    }
    free(s);
}

/* I5: whatever was submitted comes back, once, also when the verifier ends. */
static void test_i5_verify_end_completes_every_job(void **state)
{
    world_t *w = *state;
    submitter_t *s = calloc(1, sizeof(*s));
    void *item = NULL;

    s->w = w;
    (void)submit_all(s);
    td_verify_destroy(w->verify);
    w->verify = NULL;
    for (uint32_t i = 0; i < BLOCKS; i++) {
        td_verify_job_t *job = NULL;
        assert_true(td_ring_pop(w->done, &item));
        job = item;
        assert_ptr_equal(job, &s->jobs[i]);
        if (job->status == TD_OK) {
            assert_int_equal(s->hashes[i], hash_of(w, i));
        } else {
            assert_int_equal(job->status, TD_ERR_CANCELLED);
        }
    }
    assert_false(td_ring_pop(w->done, &item));
    free(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_verify_hashes_the_whole_block_of_each_piece, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_verify_takes_jobs_of_many_threads, setup, teardown),
        cmocka_unit_test_setup_teardown(test_i5_verify_end_completes_every_job, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

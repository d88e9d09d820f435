/* td_verify.h - finds the content hashes of blocks on a thread of its own, so that neither a loop
 * nor the transfer is held up by them: a prompt of 2,048 tokens is tens of megabytes. Whoever
 * submits keeps the blocks until the job has come back, as for a fetch (I2); what a hash means is
 * for the submitter to say (I3). Design: common/node/DESIGN.md, "Verifying". Threads: submit: any;
 * complete runs on the verifier's thread, which sleeps when there is nothing to do. No call after
 * create allocates. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "common/base/td_status.h"
#include "common/transfer/td_transfer.h"

typedef struct td_verify td_verify_t;
typedef struct td_verify_job td_verify_job_t;
/** Must only hand the job on. */
typedef void (*td_verify_fn)(td_verify_job_t *job);

/** Blocks to hash: those that the pieces of a finished fetch lie in. Belongs to the verifier from
 * submit until its complete is called. */
struct td_verify_job {
    const td_fetch_piece_t *pieces; /* borrowed; one of 0 bytes is passed over */
    uint32_t piece_count;
    uint64_t
        *hashes; /* borrowed, [piece_count]: written: content hash of the piece's whole block */
    td_verify_fn complete;
    void *ctx;
    td_status_t
        status; /* set before complete: OK; CANCELLED: the verifier ends, nothing was hashed */
};

/** Units: jobs_max: most jobs under way; more is the caller's mistake. block_bytes of every block.
 * Errors: TD_ERR_NO_MEMORY, TD_ERR_IO. */
TD_MUST_CHECK td_status_t td_verify_create(uint32_t jobs_max, size_t block_bytes,
                                           td_verify_t **out);
/** Completes every job, those that have not begun with TD_ERR_CANCELLED. NULL is allowed. */
void td_verify_destroy(td_verify_t *verify);
void td_verify_submit(td_verify_t *verify, td_verify_job_t *job);

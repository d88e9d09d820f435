/* bench_reader.h - reading blocks of the store as a node does: in batches that are looked up, and
 * then fetched and hashed by a thread of their own in slices (TD_NODE_FETCH_BYTES), so that while
 * one is hashed the next is fetched. Some batches at a time. Threads: one uses it. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/transfer/td_transfer.h"
#include "kvstore/kvs_client.h"

#define BENCH_READER_DEPTH 2u /* batches at a time */

typedef struct bench_reader bench_reader_t;

typedef struct bench_reader_config {
    kvs_client_t *client;    /* borrowed */
    td_transfer_t *transfer; /* borrowed; to be destroyed before the reader is */
    uint64_t segment;        /* incarnation of whom all blocks are read from */
    uint32_t batch;          /* blocks */
    size_t block_bytes;
    uint8_t *into; /* borrowed: transfer memory of BENCH_READER_DEPTH * batch blocks */
} bench_reader_config_t;

/** Errors: TD_ERR_NO_MEMORY, TD_ERR_IO. */
TD_MUST_CHECK td_status_t bench_reader_create(const bench_reader_config_t *config,
                                              bench_reader_t **out);
void bench_reader_destroy(bench_reader_t *reader);
/** Readable when there is something for bench_reader_step() to do. */
int bench_reader_fd(const bench_reader_t *reader);
/** Keys stay where they are until all is read. */
void bench_reader_begin(bench_reader_t *reader, const td_block_key_t *keys, uint32_t count);
/** Goes on where it can. TD_INPROGRESS: not done yet. Anything else but TD_OK: a block was not
 * found, or came wrong. */
td_status_t bench_reader_step(bench_reader_t *reader);

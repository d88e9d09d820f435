/* td_node.h - what a prefill and a decode node have in common: model, pool, transfer, membership
 * and the fetch jobs that fill blocks. Design: common/node/DESIGN.md. Threads: loop, except where
 * said otherwise. */
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <sys/queue.h>

#include "common/base/td_ring.h"
#include "common/base/td_worker.h"
#include "common/kv/td_pool.h"
#include "common/kv/td_seq.h"
#include "common/model/td_model.h"
#include "common/model/td_sampler.h"
#include "common/model/td_tokenizer.h"
#include "common/coord/td_coord_options.h"
#include "common/node/td_kv_feed.h"
#include "common/node/td_routers.h"
#include "common/node/td_verify.h"
#include "common/transfer/td_transfer.h"
#include "common/wire/td_member.h"
#include "common/wire/td_proc.h"

#define TD_NODE_TICK_MS 50u
#define TD_NODE_MESSAGES_PER_TICK 256u
#define TD_NODE_FETCHES_MAX 4096u
/* Of one job that fetches from the store: while it is hashed the next is fetched, and what is
 * hashed is still in a cache. */
#define TD_NODE_FETCH_BYTES (4u << 20)
#define TD_NODE_STOP_IDS_MAX 16u
#define TD_NODE_FORGOTTEN_MAX 4096u /* ended tickets remembered, so that late messages stay out */

#define TD_NODE_OPTIONS                                                                              \
    TD_ROUTERS_OPTION, TD_ETCD_OPTIONS,                                                              \
        {"donate", TD_OPTION_BYTES, "0", "memory given to the store, beside --kv-memory",            \
         0,        1ull << 46},                                                                      \
        {"model", TD_OPTION_TEXT, NULL, "GGUF model file"},                                          \
        {"precision", TD_OPTION_CHOICE,  "mixed", "arithmetic, one for the whole cluster", 0,        \
         0,           "fast|mixed|exact"},                                                           \
        {"backend", TD_OPTION_CHOICE, "cpu", "what runs the model; never changes a result", 0,       \
         0,         TD_BACKEND_NAMES},                                                               \
        {"device", TD_OPTION_TEXT, "0",                                                              \
         "cuda: which device; several (0,1,2,3) have a part of the model each"},                     \
        {"device-kv",                                                                                \
         TD_OPTION_BYTES,                                                                            \
         "0",                                                                                        \
         "cuda: memory of each device for copies of KV blocks, 0 = what is free after loading",      \
         0,                                                                                          \
         1ull << 46},                                                                                \
        {"nccl", TD_OPTION_CHOICE, "auto", "cuda: blocks from device to device, where both can", 0,  \
         0,      "auto|off"},                                                                        \
        {"threads", TD_OPTION_COUNT, "0", "compute threads, 0 = all CPUs", 0, TD_NODE_THREADS_MAX},  \
        {"block-tokens", TD_OPTION_COUNT, "16", "tokens of a KV block, a multiple of 16", 16, 1024}, \
        {"kv-codec",                                                                                 \
         TD_OPTION_CHOICE,                                                                           \
         TD_KV_CODEC_DEFAULT,                                                                        \
         "how KV is stored, one for the whole cluster",                                              \
         0,                                                                                          \
         0,                                                                                          \
         TD_KV_CODEC_NAMES},                                                                         \
        {"context-max",                                                                              \
         TD_OPTION_COUNT,                                                                            \
         "0",                                                                                        \
         "tokens of a request, 0 = the model's; longer ones need a mask (attention)",                \
         0,                                                                                          \
         1 << 20},                                                                                   \
        {"drain-ms", TD_OPTION_MS,                                                                   \
         "25000",    "for work under way after SIGTERM; a second one ends it",                       \
         0,          3600000},                                                                       \
    {                                                                                                \
        "attention", TD_OPTION_TEXT, NULL,                                                           \
            "what a token sees, one for the whole cluster [the model's]: " TD_ATTENTION_FORMS        \
    }
#define TD_NODE_THREADS_MAX 256

/** Blocks on their way from a peer into our pool, and then through the verifier. */
typedef struct td_node_fetch {
    td_fetch_t fetch;
    td_verify_job_t verify;
    struct td_node *node;
    uint64_t ticket;
    uint32_t attempt;
    uint32_t first;  /* the node's own: logical index of the first block */
    uint32_t layers; /* layers each piece brings */
    bool hashed;     /* the verifier has been there: hashes are those of our copy */
    LIST_ENTRY(td_node_fetch) link;
    uint64_t *hashes;          /* [fetch.piece_count], behind the pieces */
    td_fetch_piece_t pieces[]; /* [fetch.piece_count] */
} td_node_fetch_t;

typedef struct td_node {
    td_proc_t proc;
    td_gguf_t *gguf;
    td_tokenizer_t *tokenizer;
    td_model_t *model;
    const td_model_info_t *info;
    td_transfer_t *transfer;
    td_pool_t *pool;
    td_kv_events_t *kv_events; /* of the pool */
    td_kv_feed_t *feed;        /* tells routers of them */
    td_member_t *member;
    td_routers_t *routers;           /* NULL: they are named */
    td_worker_t *worker;             /* runs the forward passes */
    td_verify_t *verify;             /* hashes what was fetched */
    td_ring_t *fetched;              /* td_node_fetch_t that were fetched or hashed */
    uint32_t fetches;                /* under way: with the transfer, the verifier, or in fetched */
    LIST_HEAD(, td_node_fetch) jobs; /* submitted, and not freed yet */
    uint32_t stop_ids[TD_NODE_STOP_IDS_MAX];
    uint32_t stop_count;
    td_metric_t *kv_states[5];
    td_metric_t *checksum_failures;
    td_metric_t *indexed;                             /* blocks that can be found by their keys */
    uint64_t forgotten_ticket[TD_NODE_FORGOTTEN_MAX]; /* ring */
    uint32_t forgotten_attempt[TD_NODE_FORGOTTEN_MAX];
    uint32_t forgotten_next;
    td_member_events_t events; /* the node's own, called after ours */
    td_role_t role;
    uint32_t drafters; /* registered: a bit of each drafter that a decode node offers */
    bool draining;     /* takes no new work; told with heartbeats */
    uint64_t drain_begin_ns;
    bool failed; /* td_node_fail() */
} td_node_t;

typedef struct td_node_setup {
    td_role_t role;
    const char *metric_prefix; /* "tandem_prefill" */
    const char *kv_metric;     /* "tandem_prefill_kv_blocks" */
    const char *checksum_metric;
    const char *indexed_metric;
    uint32_t rows_max;
    uint32_t logit_rows_max;
    uint64_t kv_bytes;
    td_member_events_t events;
    /* Opens what the node has besides, once model and pool are there and before anybody knows of
     * it; NULL: nothing. It is given events.ctx. */
    td_status_t (*open_more)(void *ctx);
} td_node_setup_t;

/** Opens everything after td_proc_init() has filled node->proc; reports the KV size in the log.
 * Errors: each is logged where it happens. */
TD_MUST_CHECK td_status_t td_node_open(td_node_t *node, const td_node_setup_t *setup);
/** Speaks to the routers: call at least every TD_NODE_TICK_MS. */
void td_node_tick(td_node_t *node, const td_msg_heartbeat_t *load);
/** What the node needs to go on does not work any more: td_node_ends() says so next, and the
 * process ends with an error. Whoever is asked in its place goes on with what it had (I9). */
void td_node_fail(td_node_t *node);
/** Does the loop end? The first signal makes the node drain: it takes no new work, and ends once
 * nothing is under way and what it offered to the store has been fetched, at the next signal, or
 * after --drain-ms. Shape: work, requests under way; offers, blocks pinned for the store. */
bool td_node_ends(td_node_t *node, bool signalled, uint32_t work, uint32_t offers);
/** Stops the threads that could still touch the pool; call before the node's own state goes. */
void td_node_stop(td_node_t *node);
void td_node_close(td_node_t *node);
/** The node's own options of a model, without rows and attention. Errors: TD_ERR_INVALID. */
TD_MUST_CHECK td_status_t td_node_model_options(const td_node_t *node, td_model_options_t *out);
/** Root of block keys for a tenant's salt. */
void td_node_root(const td_node_t *node, const void *salt, size_t salt_len, td_block_root_t *out);
/** The same for the blocks of another model that the node has loaded. */
void td_node_root_of(const td_node_t *node, const td_model_info_t *info, const void *salt,
                     size_t salt_len, td_block_root_t *out);
const td_kv_layout_t *td_node_layout(const td_node_t *node);
const td_attention_mask_t *td_node_mask(const td_node_t *node);
void td_node_update_kv_metrics(td_node_t *node);

/** Remembers that a ticket's attempt and lower ones are over; tells whether a message comes too
 * late. */
void td_node_forget(td_node_t *node, uint64_t ticket, uint32_t attempt);
bool td_node_is_forgotten(const td_node_t *node, uint64_t ticket, uint32_t attempt);

/** Prepares a fetch job for piece_count pieces. NULL: no memory, or too many under way. */
td_node_fetch_t *td_node_fetch_new(td_node_t *node, uint64_t peer_incarnation,
                                   uint32_t piece_count);
/** Submits it; it comes back over node->fetched. Errors: TD_ERR_BUSY: the job has been freed. */
TD_MUST_CHECK td_status_t td_node_fetch_submit(td_node_fetch_t *job);
/** Ends a ticket's fetches early: nobody wants what they bring, and over a slow link they would
 * hold its blocks for as long as the peer sends. They come back all the same. */
void td_node_fetch_cancel(td_node_t *node, uint64_t ticket, uint32_t attempt);
/** Fetches blocks that a store has found, in jobs of up to TD_NODE_FETCH_BYTES on one segment, into
 * blocks by which seq grows. What no position behind them sees is skipped, not fetched; blocks
 * beyond its reservation are reserved, or nothing is fetched. job->first is the logical index of a
 * job's first block.
 * Shape:  sums_out [found->count]: the announced checksums.
 * Answers by how many entries, from the first, seq has grown; *jobs_out counts the jobs: none, and
 * seq is what it was. */
uint32_t td_node_fetch_found(td_node_t *node, td_seq_t *seq, uint64_t ticket, uint32_t attempt,
                             uint64_t deadline_ns, const td_msg_lookup_result_t *found,
                             uint64_t *sums_out, uint32_t *jobs_out);
/** After td_node_fetch_found() and the verifier: which of a job's blocks are the named ones.
 * Shape:  keys, sums and right by logical index; sums held the announced checksums and get the
 *         hashes of our copies. request_id: for the log. */
void td_node_fetch_compare(const td_node_fetch_t *job, const td_block_key_t *keys, uint64_t *sums,
                           bool *right, const char *request_id);
/** Indexes what came, from logical block `first` on; the first that is wrong or missing ends the
 * sequence, under a mask right at `first`: what lies before the wrong one was not fetched whole.
 * Answers how many entries were kept. */
uint32_t td_node_fetch_keep(td_node_t *node, td_seq_t *seq, uint32_t first,
                            const td_block_key_t *keys, const uint64_t *hashes, const bool *right);
/** Takes the next completed job; the caller frees it with td_node_fetch_free(), or sends it on with
 * td_node_fetch_verify(). NULL: none. */
td_node_fetch_t *td_node_fetch_next(td_node_t *node);
/** Sends a job that was just taken on to the verifier (before any other fetch is submitted): the
 * whole block of each piece that has any bytes is hashed. It comes back over node->fetched, hashed;
 * until then its blocks are read. */
void td_node_fetch_verify(td_node_fetch_t *job);
void td_node_fetch_free(td_node_fetch_t *job);

/** Sampling parameters of a message, for one choice. */
void td_node_sampling(const td_msg_work_t *work, uint32_t choice,
                      td_logit_bias_t bias[TD_LOGIT_BIAS_MAX], td_sampling_t *out);

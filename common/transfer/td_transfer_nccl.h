/* td_transfer_nccl.h - the NCCL carrier: blocks from device to device. Used by td_transfer.c alone.
 * Design: common/transfer/DESIGN.md, "NCCL".
 *
 * It knows of peers' devices, keeps a link to each that it fetches from or that fetches here, and
 * moves fetches in chunks of a staging slot. Messages travel with the transfer's own. A fetch that
 * it cannot finish goes back to the transfer, which has other carriers.
 * Threads: the transfer's, but for create, destroy and name. */
#pragma once

#include "common/kv/td_kv_device.h"
#include "common/transfer/td_transfer.h"

#define TD_NCCL_SLOTS 4u /* pieces of staging memory for sending, and as many for receiving */
#define TD_NCCL_SLOT_BYTES ((size_t)8 << 20)
#define TD_NCCL_SLOTS_OF_PEER 2u /* of each kind: a silent peer leaves the others room */
#define TD_NCCL_PARTS_MAX 1024u  /* of a chunk */
#define TD_NCCL_ASKS_MAX 256u    /* of one peer, waiting for a slot here */
#define TD_NCCL_DEADLINE_MS 1000u
#define TD_NCCL_OPEN_MS 10000u /* until both ends have opened a link */
#define TD_NCCL_RETRY_MS 1000u /* until a link is tried again; doubled by each failure in turn */
#define TD_NCCL_RETRY_MS_MAX 60000u

typedef struct td_nccl td_nccl_t;

typedef struct td_nccl_metrics { /* NULL: not counted */
    td_metric_t *links;
    td_metric_t *opened;
    td_metric_t *aborted;
    td_metric_t *quarantined;
    td_metric_t *sent_bytes;
} td_nccl_metrics_t;

/** Declares the series, also for a process without a device: they are zero there. */
void td_nccl_declare(td_metrics_t *metrics, const char *name_prefix, td_nccl_metrics_t *out);

/** What the carrier needs of its transfer. */
typedef struct td_nccl_config {
    td_kv_device_t *device; /* borrowed */
    size_t slot_bytes;      /* 0 = TD_NCCL_SLOT_BYTES */
    uint32_t deadline_ms;   /* of a chunk without a sign of life; 0 = TD_NCCL_DEADLINE_MS */
    uint32_t retry_ms;      /* 0 = TD_NCCL_RETRY_MS */
    uint32_t open_ms;       /* 0 = TD_NCCL_OPEN_MS */
    uint8_t *memory;        /* the pool's */
    size_t block_bytes;
    uint32_t block_count;
    td_nccl_metrics_t metrics;
    /** Sends a message, which is copied, to a peer's td_nccl_receive(). False: it cannot be. */
    bool (*send)(void *ctx, uint64_t peer, const void *message, size_t len);
    /** As of now: our incarnation. */
    uint64_t (*incarnation)(void *ctx);
    /** The pool whose epochs guard blocks; NULL: none. */
    const td_pool_t *(*pool)(void *ctx);
    void *ctx;
} td_nccl_config_t;

/** Errors: as td_kv_device_ops_t.start. */
TD_MUST_CHECK td_status_t td_nccl_create(const td_nccl_config_t *config, td_nccl_t **out);
/** Closes all links and waits some seconds for them to be gone; the transfer's thread has ended. */
void td_nccl_destroy(td_nccl_t *nccl);
/** What other ends must know of ours: td_kv_device_ops_t.name. */
const char *td_nccl_name(const td_nccl_t *nccl);

/** A peer, and the name of its device; one that ours cannot be linked to is passed over. */
void td_nccl_peer_add(td_nccl_t *nccl, uint64_t incarnation, const char *name);
void td_nccl_peer_remove(td_nccl_t *nccl, uint64_t incarnation);
/** The connection to a peer broke: whatever is under way with it ends. */
void td_nccl_peer_lost(td_nccl_t *nccl, uint64_t incarnation);

/** Can a fetch from this peer go this way now? Where a link is missing it begins to open one. */
bool td_nccl_wants(td_nccl_t *nccl, uint64_t peer);
/** Takes a fetch on, whose pieces fit the peer's pool; td_nccl_fetch() drives it. */
void td_nccl_take(td_nccl_t *nccl, td_fetch_t *fetch);
/** TD_INPROGRESS; TD_OK: all is in the host's blocks; TD_ERR_STALE: the owner says so. TD_ERR_BUSY:
 * it does not work out this way, and nothing writes into its destination: another carrier's. */
td_status_t td_nccl_fetch(td_nccl_t *nccl, td_fetch_t *fetch);
/** Nobody wants the fetch any more. False: the device still writes into its destination; to be
 * asked again. After true the carrier does not know the fetch. */
bool td_nccl_let_go(td_nccl_t *nccl, td_fetch_t *fetch);

/** A message of a peer. Only notes it. */
void td_nccl_receive(td_nccl_t *nccl, const void *message, size_t len);
/** One turn. Units: microseconds after which the next should come at the latest; UINT32_MAX: when
 * there is something new. */
uint32_t td_nccl_drive(td_nccl_t *nccl);

/* td_transfer.h - moving KV blocks: fetch(peer, descriptors) -> my blocks, by the owner of the
 * destination. Design: section 4; common/transfer/DESIGN.md.
 *
 * Three carriers, chosen for each peer and fetch:
 *   nccl both ends are devices with a communicator between them: sent from one to the other
 *   shm  the peer's pool is mapped here (ucp_rkey_ptr); this process's own copy
 *   tcp  an active message asks, eager active messages answer, this process copies what they bring
 * Nobody but this process ever writes into its pool (I2), so once a fetch has completed - in
 * whatever way - nothing writes into its destination any more. Whether the bytes are the right ones
 * is for the caller to check (checksum bound to key and epoch, I3).
 *
 * Threads: everything here is any-thread after create; completions run on the transfer's own thread
 * and must only hand the operation on. That thread sleeps on UCX's event descriptor when idle. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "common/base/td_metrics.h"
#include "common/base/td_status.h"
#include "common/kv/td_kv_device.h"
#include "common/kv/td_pool.h"

#define TD_TRANSFER_PEERS_MAX 1024u
#define TD_TRANSFER_OPS_MAX 4096u /* fetches under way */
#define TD_TRANSFER_PEER_OPS_MAX                                                                   \
    1024u /* of them from one peer: a silent one leaves the others room */
#define TD_TRANSFER_PIECES_MAX 65536u /* pieces of one fetch */
#define TD_TRANSFER_DEADLINE_MS 2000u
/* One answer. With its headers it fits into a segment of UCX (256 KiB), so it is handed to us where
 * it was received; longer messages are put together in memory of their own first. */
#define TD_TRANSFER_GATHER_BYTES (252u * 1024u)

typedef enum td_carrier {
    TD_CARRIER_NONE = 0, /* ended before one was chosen */
    TD_CARRIER_SHM,
    TD_CARRIER_TCP,
    TD_CARRIER_NCCL,
    TD_CARRIERS
} td_carrier_t;
const char *td_carrier_name(td_carrier_t carrier);

typedef struct td_transfer td_transfer_t;

typedef struct td_transfer_config {
    uint32_t block_count;
    size_t block_bytes;
    uint64_t incarnation;    /* ours: peers know us by it */
    td_metrics_t *metrics;   /* borrowed; NULL = none. Series are declared during create */
    const char *name_prefix; /* of the series, e.g. "tandem_decode" */
    /* borrowed until the transfer ends; NULL: none. Sends and receives blocks where it can. */
    td_kv_device_t *device;
    bool device_series; /* declares the series of NCCL also where there is no device */
    /* of NCCL, 0 = what common/transfer/td_transfer_nccl.h says */
    size_t nccl_slot_bytes;
    uint32_t nccl_deadline_ms;
    uint32_t nccl_retry_ms;
    uint32_t nccl_open_ms;
} td_transfer_config_t;

/** Starts UCX, allocates and touches the pool's memory so that processes on this host can map it,
 * and starts the thread. Errors: TD_ERR_IO (UCX: logged), TD_ERR_INVALID, TD_ERR_NO_MEMORY. */
TD_MUST_CHECK td_status_t td_transfer_create(const td_transfer_config_t *config,
                                             td_transfer_t **out);
/** Completes every operation (TD_ERR_CANCELLED) and joins the thread: nothing is read or written
 * any more, and the device is no longer used. Nothing may be asked of it afterwards. */
void td_transfer_stop(td_transfer_t *transfer);
/** Stops, and unmaps the memory. */
void td_transfer_destroy(td_transfer_t *transfer);
/** The pool's memory. Shape: [block_count][block_bytes]. Owner: the transfer. */
uint8_t *td_transfer_memory(const td_transfer_t *transfer);
/** Tells whose epochs guard replies: a piece asked for under another epoch is answered "stale".
 * Threads: init, before the first peer. */
void td_transfer_set_pool(td_transfer_t *transfer, const td_pool_t *pool);
/** What a peer needs to read our memory. Owner: the transfer. */
void td_transfer_address(const td_transfer_t *transfer, const void **address, size_t *address_len,
                         const void **rkey, size_t *rkey_len, uint64_t *base);
/** What a peer needs to know of our device; "": there is none. Owner: the transfer. */
const char *td_transfer_device_name(const td_transfer_t *transfer);
/** Our name towards peers after a new incarnation. */
void td_transfer_set_incarnation(td_transfer_t *transfer, uint64_t incarnation);

typedef struct td_transfer_peer {
    uint64_t incarnation;
    const void *address; /* borrowed during the call */
    size_t address_len;
    const void *rkey;
    size_t rkey_len;
    uint64_t base;
    uint32_t block_count;
    uint32_t block_bytes;
    const char *device; /* its td_transfer_device_name(); NULL or "": none */
} td_transfer_peer_t;

/** Adds a peer (connects in the background). Errors: TD_ERR_BUSY, TD_ERR_NO_MEMORY. */
TD_MUST_CHECK td_status_t td_transfer_peer_add(td_transfer_t *transfer,
                                               const td_transfer_peer_t *peer);
/** Forgets a peer; its operations end with TD_ERR_PEER_DEAD. */
void td_transfer_peer_remove(td_transfer_t *transfer, uint64_t incarnation);

typedef struct td_fetch_piece {
    uint64_t epoch;  /* of the peer's block */
    uint32_t block;  /* the peer's block index */
    uint32_t offset; /* bytes into that block */
    uint32_t bytes;
    uint8_t *dest;
} td_fetch_piece_t;

typedef struct td_fetch td_fetch_t;
typedef void (*td_fetch_fn)(td_fetch_t *fetch);

/** One fetch. Belongs to the transfer from submit until its complete is called. */
struct td_fetch {
    /* set by the caller */
    uint64_t peer;        /* incarnation */
    uint64_t deadline_ns; /* absolute */
    /* tcp, and alike each chunk of nccl; not 0: each answer of the peer to this fetch, or to one
     * that was asked before it, moves the deadline to so long after it at least. A slow link is no
     * dead peer. */
    uint64_t silence_ns;
    td_fetch_fn complete; /* on the transfer's thread */
    void *ctx;
    td_fetch_piece_t *pieces; /* owned by the caller, alive until complete */
    uint32_t piece_count;
    /* set by submit; names the operation for td_transfer_cancel() */
    uint64_t id;
    /* set before complete */
    td_status_t status; /* OK, PEER_DEAD, TIMEOUT, STALE, BUSY, CANCELLED, PROTOCOL, INVALID */
    td_carrier_t carrier;
    uint64_t bytes;
    /* the transfer's own */
    uint32_t next_piece;  /* shm: next to copy; tcp: pieces received */
    uint32_t next_offset; /* tcp: and bytes of the next one */
    bool asked;           /* tcp: the request has been sent */
    uint64_t begin_ns;
    struct {
        uint32_t asked;     /* chunks that are on their way */
        uint32_t landing;   /* of them, those that the device copies to the destination just now */
        td_status_t status; /* OK, or why the rest does not come */
        bool tried;         /* in vain: another carrier's now */
        uint64_t idle_ns;   /* since when nothing was on its way, where nothing is */
    } nccl;
    td_status_t ends; /* INPROGRESS, or how it ends once the device has let go of it */
    struct td_fetch *next;
};

/** Starts a fetch; complete is called exactly once, also for a submit that fails later.
 * Errors: TD_ERR_BUSY (queue full; complete is not called). */
TD_MUST_CHECK td_status_t td_transfer_fetch(td_transfer_t *transfer, td_fetch_t *fetch);
/** Asks for an early end (TD_ERR_CANCELLED); harmless when it has ended already. */
void td_transfer_cancel(td_transfer_t *transfer, uint64_t fetch_id);
/** KV bytes that were fetched well since create; 0 without metrics. */
uint64_t td_transfer_fetched_bytes(const td_transfer_t *transfer);

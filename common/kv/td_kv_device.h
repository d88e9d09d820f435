/* td_kv_device.h - what a device that keeps copies of KV blocks does for transfers: it gathers
 * blocks into staging memory of its own, sends that to another device over a link, and brings what
 * came to the host's blocks. The face that common/transfer sees of common/model/cuda. Design:
 * common/transfer/DESIGN.md, "NCCL".
 *
 * What others send goes into staging memory only, never into a block (I2). Nothing here waits: work
 * is begun, and poll() says when it is over.
 * Threads: start and stop: init; the rest: one thread at a time, the transfer's. Passes may run
 * beside it. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/td_status.h"
#include "common/kv/td_pool.h"

#define TD_KV_LINK_ID_BYTES 128u
#define TD_KV_DEVICE_NAME_MAX 96u /* bytes, with the final zero */

/** Bytes of a block, in order behind the other parts of a piece of staging memory. */
typedef struct td_kv_part {
    uint64_t epoch;  /* the block's */
    uint8_t *host;   /* borrowed until poll() says that it is over */
    uint32_t block;  /* of our pool; TD_POOL_NONE: not in one of its blocks */
    uint32_t offset; /* bytes, into the block */
    uint32_t bytes;
} td_kv_part_t;

typedef struct td_kv_device td_kv_device_t;
typedef struct td_kv_link td_kv_link_t; /* to one other device: two ranks, 0 and 1 */

typedef struct td_kv_device_ops {
    /** Takes staging memory: slots pieces of slot_bytes each, for at most parts_max parts.
     * Errors: TD_ERR_UNSUPPORTED (there is no library for links: a line says why),
     *         TD_ERR_NO_MEMORY, TD_ERR_IO. */
    td_status_t (*start)(td_kv_device_t *device, uint32_t slots, size_t slot_bytes,
                         uint32_t parts_max);
    /** Gives it back, after every link is gone. Harmless before start and twice. */
    void (*stop)(td_kv_device_t *device);
    /** After start: how it links and which device it is, "LIBRARY VERSION DEVICE", at most
     * TD_KV_DEVICE_NAME_MAX bytes. Two may be linked where all but the last word is the same and
     * the last is not. Owner: the device. */
    const char *(*name)(const td_kv_device_t *device);

    /** Begins to copy parts into a slot, from the device's copies where it has them. */
    td_status_t (*gather)(td_kv_device_t *device, uint32_t slot, const td_kv_part_t *parts,
                          uint32_t count);
    /** Begins to copy a slot to where parts are in the host's memory, and into the device's copies
     * of those blocks. Slots are scattered one after another, in the order asked for. */
    td_status_t (*scatter)(td_kv_device_t *device, uint32_t slot, const td_kv_part_t *parts,
                           uint32_t count);
    /** What was scattered into the device's copy of this block is not to be used: its host's block
     * comes another way, and that alone is checked. Nothing of it is under way any more. */
    void (*forget)(td_kv_device_t *device, uint32_t block);
    /** How far is what was begun last with this slot? TD_INPROGRESS; TD_OK: over. TD_ERR_IO: the
     * device or the link failed; of a gather or scatter nothing is under way any more, of a post
     * that is said by gone(). */
    td_status_t (*poll)(td_kv_device_t *device, uint32_t slot);

    /** Makes a name for a link, for both of its ranks. Errors: TD_ERR_IO. */
    td_status_t (*link_id)(td_kv_device_t *device, uint8_t id_out[TD_KV_LINK_ID_BYTES]);
    /** Begins to open it. Errors: TD_ERR_NO_MEMORY, TD_ERR_IO, TD_ERR_BUSY (too many).
     * Owner: the caller, until gone() has said so. */
    td_status_t (*link_open)(td_kv_device_t *device, const uint8_t id[TD_KV_LINK_ID_BYTES],
                             uint32_t rank, td_kv_link_t **out);
    /** TD_INPROGRESS: opening, or a post is on its way to the device; TD_OK: post() may be called;
     * TD_ERR_IO: it has failed and can only be closed. */
    td_status_t (*link_poll)(td_kv_link_t *link);
    /** Begins to send a slot's first bytes, or to receive into it. Both ranks post the same sizes
     * in the same order, one of them sending and one receiving. */
    td_status_t (*link_post)(td_kv_link_t *link, uint32_t slot, size_t bytes, bool send);
    /** Begins to end it and what was posted. */
    void (*link_close)(td_kv_link_t *link);
    /** After close: true once nothing of it writes or reads any slot; the link is freed then. */
    bool (*link_gone)(td_kv_link_t *link);
} td_kv_device_ops_t;

/** Whoever implements it has this first in a struct of its own. */
struct td_kv_device {
    const td_kv_device_ops_t *ops;
};

/* td_cuda_mirror.h - which blocks of the host's pool the device has copies of, and where. The
 * host's blocks are the ones that count; a copy goes when its place is needed, the least recently
 * used first. Only bookkeeping: who asks makes the copies. Design: common/model/cuda/DESIGN.md,
 * "KV". Threads: owner. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/td_status.h"

#define TD_CUDA_NO_PLACE UINT32_MAX

typedef struct td_cuda_mirror td_cuda_mirror_t;

/** Units:  places: blocks that the device holds; blocks: of the host's pool, at most.
 * Errors: TD_ERR_NO_MEMORY.
 * Owner:  the caller ends it with td_cuda_mirror_destroy(). */
TD_MUST_CHECK td_status_t td_cuda_mirror_create(uint32_t places, uint32_t blocks,
                                                td_cuda_mirror_t **out);
void td_cuda_mirror_destroy(td_cuda_mirror_t *mirror);
/** A new pass: what earlier ones used may go again. */
void td_cuda_mirror_begin(td_cuda_mirror_t *mirror);
/** A block's place, kept until the next pass begins. O(1).
 * Units:  epoch: the block's; valid_out: whether the copy there is the host's block of that epoch.
 * Errors: TD_ERR_NO_MEMORY (this pass uses all places). */
TD_MUST_CHECK td_status_t td_cuda_mirror_take(td_cuda_mirror_t *mirror, uint32_t block,
                                              uint64_t epoch, uint32_t *place_out, bool *valid_out);
/** The copy is the host's block from now on, while it has the epoch that it was taken with.
 * Units:  uploaded: by this pass, whole; else the pass writes what anybody reads of it, and the
 * rest is not the host's until td_cuda_mirror_filled(). */
void td_cuda_mirror_validate(td_cuda_mirror_t *mirror, uint32_t block, bool uploaded);
/** The pass writes the block's last token. */
void td_cuda_mirror_filled(td_cuda_mirror_t *mirror, uint32_t block);
/** What the pass has asked for is done. */
void td_cuda_mirror_end(td_cuda_mirror_t *mirror);

/** The place of a copy that has every byte of the host's block of that epoch, kept there until
 * td_cuda_mirror_unpin(); false: there is none, or too many are kept. Of a block that a pass writes
 * that is true of the layers it has announced. */
bool td_cuda_mirror_pin(td_cuda_mirror_t *mirror, uint32_t block, uint64_t epoch,
                        uint32_t *place_out);
/** A place for a copy of which bytes [offset, offset + bytes) come now, kept as above; false: the
 * copy would not become whole, or there is no place. */
bool td_cuda_mirror_pin_for(td_cuda_mirror_t *mirror, uint32_t block, uint64_t epoch,
                            uint32_t offset, uint32_t *place_out);
/** They have come, to copy and host; with its last byte the copy is whole. Lets go of the place.
 * Units:  bytes: 0: they have not come. */
void td_cuda_mirror_landed(td_cuda_mirror_t *mirror, uint32_t block, uint64_t epoch, uint32_t place,
                           uint32_t offset, uint32_t bytes, size_t block_bytes);
void td_cuda_mirror_unpin(td_cuda_mirror_t *mirror, uint32_t place);
/** The host's block has changed: the copy is of no use. */
void td_cuda_mirror_forget(td_cuda_mirror_t *mirror, uint32_t block);
void td_cuda_mirror_forget_all(td_cuda_mirror_t *mirror);

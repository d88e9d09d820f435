/* td_peers.h - between membership and transfer: what a process tells others of its memory, and what
 * it makes of what they tell. Threads: loop. */
#pragma once

#include <stdint.h>

#include "common/transfer/td_transfer.h"
#include "common/wire/td_msg.h"

/** What others need to read our memory. Owner: the transfer. */
void td_peers_describe(const td_transfer_t *transfer, uint32_t block_count, uint32_t block_bytes,
                       td_msg_region_t *out);
/** Connects to a peer that has memory; not to ourselves. A failure is logged: that peer's blocks
 * cannot be read. */
void td_peers_add(td_transfer_t *transfer, const char *own_id, const td_msg_peer_t *peer);

#include "common/node/td_peers.h"

#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_log.h"

void td_peers_describe(const td_transfer_t *transfer, uint32_t block_count, uint32_t block_bytes,
                       td_msg_region_t *out)
{
    const void *address = NULL;
    const void *rkey = NULL;

    td_transfer_address(transfer, &address, &out->ucx_address.len, &rkey, &out->ucx_rkey.len,
                        &out->base);
    out->ucx_address.at = address;
    out->ucx_rkey.at = rkey;
    out->block_count = block_count;
    out->block_bytes = block_bytes;
    out->device = td_transfer_device_name(transfer);
}

void td_peers_add(td_transfer_t *transfer, const char *own_id, const td_msg_peer_t *peer)
{
    const td_transfer_peer_t to = {.incarnation = peer->incarnation,
                                   .address = peer->region.ucx_address.at,
                                   .address_len = peer->region.ucx_address.len,
                                   .rkey = peer->region.ucx_rkey.at,
                                   .rkey_len = peer->region.ucx_rkey.len,
                                   .base = peer->region.base,
                                   .block_count = peer->region.block_count,
                                   .block_bytes = peer->region.block_bytes,
                                   .device = peer->region.device};

    if (to.address_len > 0 && strcmp(peer->id, own_id) != 0 &&
        td_transfer_peer_add(transfer, &to) != TD_OK) {
        TD_LOG_WARN("peer cannot be read", "peer=%s", peer->id);
    }
}

#include "common/kv/td_kv_layout.h"

#include "common/base/td_base.h"

td_status_t td_kv_layout_check(const td_kv_layout_t *l)
{
    if (l->layers == 0 || l->layers > TD_KV_LAYERS_MAX || l->kv_heads == 0 || l->kv_heads > 1024 ||
        l->head_dim == 0 || l->head_dim > 1024 || l->head_dim % 8 != 0 || l->block_tokens == 0 ||
        l->block_tokens > 1024 || l->block_tokens % 16 != 0 || (uint32_t)l->codec >= TD_KV_CODECS) {
        return TD_ERR_INVALID;
    }
    return td_kv_block_bytes(l) <= UINT32_MAX ? TD_OK : TD_ERR_INVALID;
}

#include "common/kv/td_kv_layout.h"

#include <string.h>

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

void td_kv_copy_tokens(const td_kv_layout_t *l, uint8_t *to, const uint8_t *from, uint32_t begin,
                       uint32_t end)
{
    const size_t values = (end - begin) * td_kv_row_bytes(l);
    const size_t scales = (end - begin) * td_kv_scale_bytes(l->codec);

    TD_ASSERT(begin <= end && end <= l->block_tokens);
    for (uint32_t half = 0; half < 2 * l->layers; half++) {
        for (uint32_t head = 0; head < l->kv_heads; head++) {
            const size_t at = td_kv_offset(l, half / 2, half % 2 != 0, head, begin);
            const size_t scale_at = td_kv_scale_offset(l, half / 2, half % 2 != 0, head, begin);
            memcpy(to + at, from + at, values);
            memcpy(to + scale_at, from + scale_at, scales);
        }
    }
}

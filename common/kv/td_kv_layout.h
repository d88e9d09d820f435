/* td_kv_layout.h - where each number of a KV block lies. Source: design, section 3.
 * A block is contiguous: [layer][K,V] halves, each [kv_head][token][head_dim] values and, unless
 * they are f16, [kv_head][token] f32 scales behind them. So a whole block is one transfer, and a
 * range of layers of a block is one contiguous piece. Values and scales of a half start at
 * multiples of 64 bytes of the block, whatever the codec.
 * Threads: any (plain values). */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/td_status.h"
#include "common/kv/td_kv_codec.h"

#define TD_KV_BLOCK_TOKENS_DEFAULT 16u
#define TD_KV_LAYERS_MAX 1024u

typedef struct td_kv_layout {
    uint32_t layers;
    uint32_t kv_heads;
    uint32_t head_dim;     /* elements, multiple of 8 */
    uint32_t block_tokens; /* tokens, 16 or a multiple of it */
    td_kv_codec_t codec;
} td_kv_layout_t;

/** Checks ranges and that every size below fits.
 * Errors: TD_ERR_INVALID. */
TD_MUST_CHECK td_status_t td_kv_layout_check(const td_kv_layout_t *layout);
/** Units: bytes of one head of one token, without its scale. */
static inline size_t td_kv_row_bytes(const td_kv_layout_t *l)
{
    return (size_t)l->head_dim * td_kv_value_bits(l->codec) / 8;
}
/** Units: bytes of the values of K or V of one layer; their scales come behind. */
static inline size_t td_kv_values_bytes(const td_kv_layout_t *l)
{
    return (size_t)l->kv_heads * l->block_tokens * td_kv_row_bytes(l);
}
/** Units: bytes of K or V of one layer, with scales. */
static inline size_t td_kv_half_bytes(const td_kv_layout_t *l)
{
    return td_kv_values_bytes(l) +
           (size_t)l->kv_heads * l->block_tokens * td_kv_scale_bytes(l->codec);
}
/** Units: bytes of one layer (K and V) of a block. */
static inline size_t td_kv_layer_bytes(const td_kv_layout_t *l)
{
    return 2 * td_kv_half_bytes(l);
}
/** Units: bytes of a whole block. */
static inline size_t td_kv_block_bytes(const td_kv_layout_t *l)
{
    return l->layers * td_kv_layer_bytes(l);
}
/** Units: bytes a token costs over all layers. */
static inline size_t td_kv_token_bytes(const td_kv_layout_t *l)
{
    return td_kv_block_bytes(l) / l->block_tokens;
}
/** Units: blocks needed for n tokens. */
static inline uint32_t td_kv_blocks_for(const td_kv_layout_t *l, uint32_t tokens)
{
    return (tokens + l->block_tokens - 1) / l->block_tokens;
}
/** Byte offset in a block of K or V of a layer. */
static inline size_t td_kv_half_offset(const td_kv_layout_t *l, uint32_t layer, bool is_v)
{
    return (size_t)layer * td_kv_layer_bytes(l) + (is_v ? td_kv_half_bytes(l) : 0);
}
/** Byte offset in a block of values [layer][is_v][head][token][0]. */
static inline size_t td_kv_offset(const td_kv_layout_t *l, uint32_t layer, bool is_v, uint32_t head,
                                  uint32_t token)
{
    return td_kv_half_offset(l, layer, is_v) +
           ((size_t)head * l->block_tokens + token) * td_kv_row_bytes(l);
}
/** Byte offset in a block of the scale of [layer][is_v][head][token]; of no meaning for f16. */
static inline size_t td_kv_scale_offset(const td_kv_layout_t *l, uint32_t layer, bool is_v,
                                        uint32_t head, uint32_t token)
{
    return td_kv_half_offset(l, layer, is_v) + td_kv_values_bytes(l) +
           ((size_t)head * l->block_tokens + token) * td_kv_scale_bytes(l->codec);
}
/** Copies tokens [begin, end) of a block into the same slots of another, all layers; the other
 * slots stay as they are. Cost: O(layers * kv_heads) runs, and the tokens' bytes. */
void td_kv_copy_tokens(const td_kv_layout_t *layout, uint8_t *to, const uint8_t *from,
                       uint32_t begin, uint32_t end);

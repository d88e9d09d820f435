/* td_attention_mask.h - which key positions a query position sees, as a pure function of absolute
 * positions, and so which KV blocks nobody will read any more. Design: common/kv/DESIGN.md,
 * "Masks".
 *
 *   full            q sees every p <= q
 *   window W, N     p <= q and (q - p < W or p < N)
 *   strided L, S, C p <= q and (q - p < L or p mod S >= S - C)
 *
 * What a query sees beyond its window (sinks, summaries) every later one sees too: such positions
 * are called lasting. So a block is needed while it lies in the window, and for good if it has a
 * lasting position.
 * Source: windows: Mistral 7B (Jiang et al. 2023, section 2); sinks: StreamingLLM (Xiao et al.
 * 2023, section 3.2); strided: Sparse Transformers (Child et al. 2019, section 4.3), see DESIGN.md.
 * Threads: any (plain values). */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/td_base.h"
#include "common/base/td_status.h"

#define TD_ATTENTION_POSITIONS_MAX (1u << 24) /* of a window, a stride, or sinks */
#define TD_ATTENTION_SUMMARY 16u              /* summary positions of a stride, unless told */
#define TD_ATTENTION_NONE UINT32_MAX          /* no position; as a query: one after all others */
#define TD_ATTENTION_TEXT_MAX 48u             /* bytes of a mask's name, with the final zero */
#define TD_ATTENTION_FORMS                                                                         \
    "full, window:W, window:W,SINKS, strided:LOCAL,STRIDE or "                                     \
    "strided:LOCAL,STRIDE,SUMMARY"

typedef enum td_attention_kind {
    TD_ATTENTION_FULL = 0, /* so that a zeroed mask is full */
    TD_ATTENTION_WINDOW,
    TD_ATTENTION_STRIDED
} td_attention_kind_t;

typedef struct td_attention_mask {
    td_attention_kind_t kind;
    uint32_t local;   /* positions of the window, the query's own included; >= 1 */
    uint32_t sinks;   /* window: first positions that all see; 0 = none */
    uint32_t stride;  /* strided: >= 2 */
    uint32_t summary; /* strided: last positions of each stride, which all see; 1..stride - 1 */
} td_attention_mask_t;

/** Reads TD_ATTENTION_FORMS. Errors: TD_ERR_INVALID. */
TD_MUST_CHECK td_status_t td_attention_mask_parse(const char *text, td_attention_mask_t *out);
/** The canonical text: equal masks have equal ones. */
void td_attention_mask_name(const td_attention_mask_t *mask, char out[TD_ATTENTION_TEXT_MAX]);

/** Where the window of a query position begins; 0 for full. */
static inline uint32_t td_attention_window(const td_attention_mask_t *mask, uint32_t query)
{
    return mask->kind == TD_ATTENTION_FULL || query < mask->local ? 0 : query - mask->local + 1;
}

/** Does position q see position p? */
static inline bool td_attention_sees(const td_attention_mask_t *mask, uint32_t q, uint32_t p)
{
    if (p > q) {
        return false;
    }
    return p >= td_attention_window(mask, q) || p < mask->sinks ||
           (mask->kind == TD_ATTENTION_STRIDED && p % mask->stride >= mask->stride - mask->summary);
}

/** The first position from `at` on that some query of [first, last] sees, or TD_ATTENTION_NONE.
 * O(1). */
static inline uint32_t td_attention_next(const td_attention_mask_t *mask, uint32_t first,
                                         uint32_t last, uint32_t at)
{
    const uint32_t window = td_attention_window(mask, first);
    uint32_t lasting = TD_ATTENTION_NONE;

    if (at < window && at >= mask->sinks) {
        if (mask->kind == TD_ATTENTION_STRIDED) {
            const uint32_t in_stride = at % mask->stride;
            const uint32_t summary = mask->stride - mask->summary;
            lasting = in_stride >= summary ? at : at + (summary - in_stride);
        }
        at = TD_MIN(lasting, window);
    }
    return at <= last ? at : TD_ATTENTION_NONE;
}

/** Does any position from `from` on see anything of [begin, end)? If not, what is stored there may
 * go. O(1). */
static inline bool td_attention_needs(const td_attention_mask_t *mask, uint32_t from,
                                      uint32_t begin, uint32_t end)
{
    return td_attention_next(mask, from, TD_ATTENTION_NONE - 1, begin) < end;
}

/** Is there a lasting position in [begin, end)? O(1). */
static inline bool td_attention_lasts(const td_attention_mask_t *mask, uint32_t begin, uint32_t end)
{
    return td_attention_needs(mask, TD_ATTENTION_NONE - 1, begin, end);
}

/** The positions of [tile, tile + 32) that q sees, position tile in the lowest bit. `lasting`:
 * td_attention_lasting_bits() of the tile. */
static inline uint32_t td_attention_bits(const td_attention_mask_t *mask, uint32_t q, uint32_t tile,
                                         uint32_t lasting)
{
    const uint32_t window = td_attention_window(mask, q);
    const uint32_t past = q < tile ? 0 : q - tile >= 31 ? UINT32_MAX : (2u << (q - tile)) - 1;
    const uint32_t before = window <= tile        ? 0
                            : window - tile >= 32 ? UINT32_MAX
                                                  : (1u << (window - tile)) - 1;
    return past & (~before | lasting);
}

/** The lasting positions of [tile, tile + 32), as bits. */
uint32_t td_attention_lasting_bits(const td_attention_mask_t *mask, uint32_t tile);

/** Blocks of positions [begin, end), the last one whole, that positions from `from` on need. begin
 * is a multiple of block_tokens. Cost: O(blocks), full O(1). */
uint32_t td_attention_blocks_needed(const td_attention_mask_t *mask, uint32_t block_tokens,
                                    uint32_t from, uint32_t begin, uint32_t end);
/** The most blocks that a sequence of up to `tokens` positions needs at once when it grows by up to
 * `rows` positions a pass and gives up what nobody needs after each. Cost: O(tokens /
 * block_tokens), full O(1). */
uint32_t td_attention_blocks_max(const td_attention_mask_t *mask, uint32_t block_tokens,
                                 uint32_t tokens, uint32_t rows);

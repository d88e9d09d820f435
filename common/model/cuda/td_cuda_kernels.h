/* td_cuda_kernels.h - the kernels, as plain C launches them: each takes one struct by value. All
 * addresses are the device's. What each computes, and in which order, is what td_cpu_ops.h says of
 * the operation of that name: a kernel gives its bits. Design: common/model/cuda/DESIGN.md. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#define TD_CUDA_KERNEL(name, params_t)
#else
/* Only its address is used, for cudaLaunchKernel(). */
#define TD_CUDA_KERNEL(name, params_t) void name(void)
#endif

#define TD_CUDA_GROUP 32u /* weights that share a scale */
#define TD_CUDA_PAIR 16u  /* outputs whose weights lie together */
#define TD_CUDA_CHUNK 4u  /* groups in flight together: rows of activations are padded to it */
#define TD_CUDA_NIBBLE_BYTES 320u
#define TD_CUDA_BYTE_BYTES 544u
#define TD_CUDA_ROW_TILE 8u    /* rows of a block of the product of few rows */
#define TD_CUDA_ROW_TILES 8u   /* such tiles in that of many */
#define TD_CUDA_FEW_QUERIES 8u /* of a block of the attention of few queries */
#define TD_CUDA_MANY_QUERIES 32u
#define TD_CUDA_TILE 32u         /* positions of an attention tile, a multiple of itself */
#define TD_CUDA_SPAN 512u        /* positions with a softmax of their own, a multiple of itself */
#define TD_CUDA_PART_ELEMENTS 4u /* of a part, before the head's: maximum, sum, unused */
#define TD_CUDA_HEAD_DIM_MAX 256u
#define TD_CUDA_RANKS_MAX 8u /* devices that run a model together */

/** How a matrix lies on the device. A pair is 16 outputs.
 * Shape: nibbles [pair][group]{ [16 outputs][4] words, word t holds k 4t.. in its low nibbles and k
 *        16 + 4t.. in its high ones; [16] scale and minimum, f16 }; bytes [pair][group]{ [2][16][4]
 *        words of k 16h + 4t..; [16] scale, f16 }; floats [pair][k][16]. */
typedef enum td_cuda_form {
    TD_CUDA_NIBBLE = 0,
    TD_CUDA_BYTE,
    TD_CUDA_F32,
    TD_CUDA_F16,
    TD_CUDA_BF16
} td_cuda_form_t;

typedef struct td_cuda_matrix {
    const uint8_t *bytes;
    size_t pair_bytes;
    uint32_t outputs;
    uint32_t inputs;
    uint32_t form;
    uint32_t wide; /* of quantised ones: multiplies int16 activations, not int8 */
} td_cuda_matrix_t;

/** Quantised activations of a pass. Shape: high, low [row][stride]; scale, sum [row][stride / 32];
 * an int16 activation is 256 * high + low, an int8 one is high alone. */
typedef struct td_cuda_acts {
    int8_t *high;
    uint8_t *low;
    float *scale;
    float *sum;
    uint32_t stride; /* elements, a multiple of TD_CUDA_CHUNK groups */
} td_cuda_acts_t;

#define TD_CUDA_PRODUCTS_MAX 3u
/** y[row][output] = sum over k of w[output][k] * x[row][k], of up to three matrices of one form,
 * which read the same rows. */
typedef struct td_cuda_product {
    td_cuda_matrix_t w[TD_CUDA_PRODUCTS_MAX];
    float *y[TD_CUDA_PRODUCTS_MAX];
    uint32_t count;
    uint32_t rows;
    td_cuda_acts_t acts;
    const float *f32; /* [row][f32_stride] of float forms */
    uint32_t f32_stride;
} td_cuda_product_t;

/** Which forms of quantised activations a kernel writes. */
typedef struct td_cuda_quantise {
    td_cuda_acts_t int8; /* high NULL: not wanted */
    td_cuda_acts_t int16;
    int32_t limit16; /* largest int16 activation */
} td_cuda_quantise_t;

/** x = embedding of each row's token; rows of tokens that w has not stay as they are. Grid: rows.
 */
typedef struct td_cuda_embed {
    td_cuda_matrix_t w; /* of tokens from `first` on */
    uint32_t first;
    const uint32_t *tokens;
    float *x; /* [row][inputs] */
} td_cuda_embed_t;

/** x += y, then RMS norm, then quantise. Grid: rows. Shared: dim + 8 floats. */
typedef struct td_cuda_norm {
    float *x;       /* [row][dim]; with y it gets the sum */
    const float *y; /* or NULL */
    const float *weight;
    const uint32_t *pick; /* NULL, or which row of x and y each row is */
    float *out;           /* [row][dim] */
    uint32_t dim;
    float eps;
    td_cuda_quantise_t quantise;
} td_cuda_norm_t;

/** gate = gate / (1 + exp(-gate)) * up, then quantise. Grid: rows, dim / 128 rounded up. */
typedef struct td_cuda_swiglu {
    float *gate; /* [row][dim]; gets the result */
    const float *up;
    uint32_t dim;
    td_cuda_quantise_t quantise;
} td_cuda_swiglu_t;

/** Where KV lies: td_kv_layout_t, with sizes worked out. */
typedef struct td_cuda_kv {
    uint8_t *pool;
    size_t block_bytes;
    size_t half_bytes;   /* K or V of a layer */
    size_t values_bytes; /* of it, before the scales */
    uint32_t row_bytes;
    uint32_t block_tokens;
    uint32_t head_dim;
    uint32_t kv_heads;
    uint32_t codec; /* td_kv_codec_t */
} td_cuda_kv_t;

/** Turns q and k to their positions, and stores k and v in the rows' blocks: in the device's copies
 * and, where it can write them, in the host's blocks. Grid: rows, (heads + 2 * kv_heads) / 4
 * rounded up. */
typedef struct td_cuda_place {
    td_cuda_kv_t kv;
    float *q;       /* [row][heads][head_dim] */
    const float *k; /* [row][kv_heads][head_dim] */
    const float *v;
    const float *rope;            /* [row][rope_dim / 2][cos, sin] */
    const uint32_t *slot;         /* [row]: token of its block */
    const uint32_t *blocks;       /* of all rows, row by row: its own and those of other paths */
    const uint32_t *blocks_begin; /* [row + 1] */
    td_cuda_kv_t host;            /* the host's blocks, mapped; pool NULL: not written */
    const uint32_t *host_blocks;  /* as blocks, the host's numbers */
    uint32_t host_head;           /* of the host's KV heads: this device's first */
    uint32_t layer;
    uint32_t heads;
    uint32_t rope_dim;
} td_cuda_place_t;

typedef struct td_cuda_mask {
    uint32_t kind; /* td_attention_kind_t */
    uint32_t local;
    uint32_t sinks;
    uint32_t stride;
    uint32_t summary;
} td_cuda_mask_t;

/** Consecutive positions of a sequence. */
typedef struct td_cuda_item {
    uint32_t row;
    uint32_t rows;
    uint32_t position; /* of the first row */
    uint32_t table;    /* where its block table begins */
    uint32_t begin;    /* positions looked at */
    uint32_t end;
    uint32_t part;        /* of the first row, in a split pass */
    uint32_t part_stride; /* parts between rows */
} td_cuda_item_t;

/** Grid: items, kv_heads. Shared: td_cuda_attention_shared(). */
typedef struct td_cuda_attention {
    td_cuda_kv_t kv;
    td_cuda_mask_t mask;
    const td_cuda_item_t *items;
    const uint32_t *tables; /* blocks of the pool */
    const float *q;         /* [row][heads][head_dim] */
    float *out;             /* as q */
    float *parts;           /* NULL, or [part][heads][TD_CUDA_PART_ELEMENTS + head_dim] */
    uint32_t layer;
    uint32_t heads;
    uint32_t group; /* heads of a KV head */
    float scale;
} td_cuda_attention_t;

/** Merges parts of split rows, then quantises all. Grid: rows. */
typedef struct td_cuda_merge {
    float *parts;               /* NULL: nothing to merge */
    const uint32_t *part_begin; /* [row] */
    const uint32_t *part_count; /* [row] */
    float *attn;                /* [row][heads][head_dim] */
    uint32_t heads;
    uint32_t head_dim;
    td_cuda_quantise_t quantise;
} td_cuda_merge_t;

/** What a device has of each row. Shape: [row][width], columns [begin, begin + width). */
typedef struct td_cuda_piece {
    const float *from;
    uint32_t begin;
    uint32_t width;
} td_cuda_piece_t;

/** Brings the rows' pieces together, then quantises them. Grid: rows, dim / 128 rounded up. */
typedef struct td_cuda_gather {
    td_cuda_piece_t pieces[TD_CUDA_RANKS_MAX];
    uint32_t count;
    uint32_t dim;
    const uint32_t *tokens; /* NULL; else a row is whole, [row][dim], in the piece among whose
                               columns its token is */
    float *out;             /* [row][dim], or NULL */
    td_cuda_quantise_t quantise;
} td_cuda_gather_t;

/** As td_cuda_piece_t, of quantised rows: groups are whole, and rows as long as they are wide. */
typedef struct td_cuda_acts_piece {
    td_cuda_acts_t acts; /* stride: the width */
    uint32_t begin;
} td_cuda_acts_piece_t;

/** Brings the rows' quantised pieces together. Grid: rows, dim / 512 rounded up. */
typedef struct td_cuda_gather_acts {
    td_cuda_acts_piece_t pieces[TD_CUDA_RANKS_MAX];
    uint32_t count;
    uint32_t dim;
    uint32_t wide; /* int16 */
    td_cuda_acts_t out;
} td_cuda_gather_acts_t;

/** Copies bytes [offset, offset + bytes) of blocks to a staging buffer, or back. Grid: blocks,
 * bytes / 4096 rounded up. All sizes multiples of 16. */
typedef struct td_cuda_move {
    uint8_t *pool;
    size_t block_bytes;
    const uint32_t *blocks; /* [grid] */
    uint8_t *staging;       /* [grid][bytes] */
    size_t offset;
    size_t bytes;
    uint32_t to_pool;
} td_cuda_move_t;

/** A row's token: td_sampler_pick() without bias, penalties, top_k and top_p. Grid: rows. */
typedef struct td_cuda_draw {
    const float *logits;      /* [row][vocab] */
    const float *temperature; /* [row]; 0 = argmax */
    const double *log_min_p;  /* [row]; -infinity = off */
    const uint64_t *key;      /* [row]: of the position's noise */
    uint32_t *token;          /* [row]; UINT32_MAX: NaN, +infinity or nothing finite */
    uint32_t vocab;
} td_cuda_draw_t;

TD_CUDA_KERNEL(td_cuda_embed, td_cuda_embed_t);
TD_CUDA_KERNEL(td_cuda_norm, td_cuda_norm_t);
TD_CUDA_KERNEL(td_cuda_swiglu, td_cuda_swiglu_t);
TD_CUDA_KERNEL(td_cuda_place, td_cuda_place_t);
TD_CUDA_KERNEL(td_cuda_merge, td_cuda_merge_t);
TD_CUDA_KERNEL(td_cuda_gather, td_cuda_gather_t);
TD_CUDA_KERNEL(td_cuda_gather_acts, td_cuda_gather_acts_t);
TD_CUDA_KERNEL(td_cuda_move, td_cuda_move_t);
TD_CUDA_KERNEL(td_cuda_draw, td_cuda_draw_t);

/* Products, for up to TD_CUDA_ROW_TILE rows a block or TD_CUDA_ROW_TILES times as many. Grid: pairs
 * of all matrices / warps, rows / rows of a block, both rounded up. */
#define TD_CUDA_FEW_WARPS 1u
#define TD_CUDA_MANY_WARPS 4u
TD_CUDA_KERNEL(td_cuda_product_nibble8_few, td_cuda_product_t);
TD_CUDA_KERNEL(td_cuda_product_nibble8_many, td_cuda_product_t);
TD_CUDA_KERNEL(td_cuda_product_nibble16_few, td_cuda_product_t);
TD_CUDA_KERNEL(td_cuda_product_nibble16_many, td_cuda_product_t);
TD_CUDA_KERNEL(td_cuda_product_byte_few, td_cuda_product_t);
TD_CUDA_KERNEL(td_cuda_product_byte_many, td_cuda_product_t);
TD_CUDA_KERNEL(td_cuda_product_f32_few, td_cuda_product_t);
TD_CUDA_KERNEL(td_cuda_product_f32_many, td_cuda_product_t);
TD_CUDA_KERNEL(td_cuda_product_f16_few, td_cuda_product_t);
TD_CUDA_KERNEL(td_cuda_product_f16_many, td_cuda_product_t);
TD_CUDA_KERNEL(td_cuda_product_bf16_few, td_cuda_product_t);
TD_CUDA_KERNEL(td_cuda_product_bf16_many, td_cuda_product_t);

/* Attention for each size of a head. */
#define TD_CUDA_FEW_THREADS 128u
#define TD_CUDA_MANY_THREADS 256u
#define TD_CUDA_HEAD_DIM_NAMES "16, 32, 64, 80, 96, 128, 256"
#define TD_CUDA_HEAD_DIMS(X) X(16) X(32) X(64) X(80) X(96) X(128) X(256)
#define TD_CUDA_ATTENTION_DECLARE(dim)                                                             \
    TD_CUDA_KERNEL(td_cuda_attention_few_##dim, td_cuda_attention_t);                              \
    TD_CUDA_KERNEL(td_cuda_attention_many_##dim, td_cuda_attention_t);
TD_CUDA_HEAD_DIMS(TD_CUDA_ATTENTION_DECLARE)

/** Units: bytes of shared memory of a product's block. */
static inline size_t td_cuda_product_shared(uint32_t form, uint32_t wide, uint32_t many)
{
    const size_t rows = TD_CUDA_ROW_TILE * (many ? TD_CUDA_ROW_TILES : 1u);
    const size_t warps = many ? TD_CUDA_MANY_WARPS : TD_CUDA_FEW_WARPS;
    const size_t stages = many ? 2 : 6;
    size_t stage = 0;

    if (form <= TD_CUDA_BYTE) {
        stage = warps * TD_CUDA_CHUNK *
                (form == TD_CUDA_BYTE ? TD_CUDA_BYTE_BYTES : TD_CUDA_NIBBLE_BYTES);
        stage += (wide ? 2u : 1u) * rows * (TD_CUDA_CHUNK * TD_CUDA_GROUP + 16) + 2 * rows * 16;
    } else {
        stage = warps * 32 * TD_CUDA_PAIR * (form == TD_CUDA_F32 ? 4u : 2u) + rows * 32 * 4;
    }
    return stages * stage;
}

/** Units: bytes of shared memory of an attention's block. */
static inline size_t td_cuda_attention_shared(uint32_t head_dim, uint32_t queries)
{
    return sizeof(float) *
           ((size_t)TD_CUDA_TILE * (head_dim + 4) + (size_t)TD_CUDA_TILE * head_dim +
            (size_t)queries * head_dim + (size_t)queries * TD_CUDA_TILE + (size_t)queries * 6);
}

#ifdef __cplusplus
}
#endif

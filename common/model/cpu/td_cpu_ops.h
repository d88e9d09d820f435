/* td_cpu_ops.h - the arithmetic of the forward pass, once in portable C and once for each
 * instruction set. Every implementation gives the same bits (I1); what fixes them is written at
 * each operation. Design: common/model/DESIGN.md, "Arithmetic".
 * Threads: the tables and packed matrices are immutable; a scratch belongs to one thread. */
#pragma once

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "common/base/td_arena.h"
#include "common/base/td_float.h"
#include "common/base/td_status.h"
#include "common/kv/td_attention_mask.h"
#include "common/kv/td_kv_layout.h"
#include "common/model/td_gguf.h"

#define TD_CPU_GROUP 32u /* weights that share a scale */
#define TD_CPU_PANEL 8u  /* output rows of a panel: one vector lane each */
#define TD_CPU_PAIR 16u  /* output rows of a pair of panels, which lies together */
/* A group of a pair: 256 nibble bytes, 16 f16 scales, 16 f16 minima. */
#define TD_CPU_NIBBLE_BYTES 320
#define TD_CPU_NIBBLE_SCALES 256
#define TD_CPU_NIBBLE_MINIMA 288
/* A group of a pair: 512 weight bytes, 16 f16 scales. */
#define TD_CPU_BYTE_BYTES 544
#define TD_CPU_BYTE_SCALES 512
#define TD_CPU_TILE_TOKENS 32u   /* an attention tile; starts at multiples of itself */
#define TD_CPU_SPAN_TOKENS 512u  /* a softmax of its own; starts at multiples of itself */
#define TD_CPU_TILE_ROWS 16u     /* rows of one sequence that share a tile */
#define TD_CPU_LANES_MAX 16u     /* of the longest vector */
#define TD_CPU_GROUPS_CHUNK 24u  /* groups unpacked at once: two panels in L1 */
#define TD_CPU_FLOATS_CHUNK 512u /* k of float panels converted at once: 32 KB */
#define TD_CPU_FEW_ROWS 16u      /* up to here weights are unpacked on the fly */
#define TD_CPU_INT8_MAX 127
#define TD_CPU_INT16_MAX 32767

/** How a matrix lies in memory, which also says what activations it multiplies. */
typedef enum td_cpu_form {
    TD_CPU_NIBBLE_A8 = 0, /* 4-bit weights, int8 activations */
    TD_CPU_NIBBLE_A16,    /* 4-bit weights, int16 activations */
    TD_CPU_BYTE_A16,      /* 8-bit weights, int16 activations */
    TD_CPU_F32,           /* float weights and activations */
    TD_CPU_F16,
    TD_CPU_BF16
} td_cpu_form_t;

/** A weight matrix in panels of 8 output rows, outputs padded with zero rows to whole pairs of
 * panels. Shape: [pair][group or k][16 rows], see DESIGN.md, "Weights". */
typedef struct td_cpu_matrix {
    td_cpu_form_t form;
    uint32_t outputs;  /* rows of the file's matrix */
    uint32_t inputs;   /* K */
    uint32_t panels;   /* even; panels * 8 >= outputs */
    size_t pair_bytes; /* of two panels */
    uint8_t *bytes;    /* borrowed from the arena it was packed into; 64-byte aligned */
} td_cpu_matrix_t;

/** Activations of a pass in the forms its products ask for. Shape: [row][inputs], scales
 * [row][inputs / 32]; a sum is the scale times the sum of the group's integers. */
typedef struct td_cpu_acts {
    float *f32;
    int8_t *q8;
    float *scale8;
    float *sum8;
    int16_t *q16;
    float *scale16;
    float *sum16;
    const uint8_t *prepared; /* borrowed: what prepare() made of them, or NULL */
} td_cpu_acts_t;

/** Working memory of one thread. */
typedef struct td_cpu_scratch {
    _Alignas(64) uint8_t panels8[TD_CPU_GROUPS_CHUNK * 8 * 2 * 32];
    _Alignas(64) uint8_t panels16[TD_CPU_GROUPS_CHUNK * 16 * 2 * 32];
    _Alignas(64) float panels32[TD_CPU_FLOATS_CHUNK * 16];
    _Alignas(64) float scales[TD_CPU_GROUPS_CHUNK * 16];
    _Alignas(64) float minima[TD_CPU_GROUPS_CHUNK * 16];
    /* What follows lies behind the struct. A lane is a query of a tile: TD_CPU_TILE_ROWS * group,
     * rounded up to whole vectors (td_cpu_query_lanes()). */
    float *keys;    /* [TD_CPU_TILE_TOKENS][head_dim] */
    float *values;  /* [TD_CPU_TILE_TOKENS][head_dim] */
    float *queries; /* scaled; [lane][head_dim], or [head_dim][lane] where a vector holds queries */
    float *outputs; /* [lane][td_cpu_output_stride()] */
    float *weights; /* [TD_CPU_TILE_TOKENS][lane]: scores, then weights */
    float *maxima;  /* [lane] */
    float *sums;    /* [lane] */
    float *rescale; /* [lane] */
    uint32_t *seen; /* [lane]: tokens of the tile it sees, as bits */
    float *totals;  /* [lane + 1][td_cpu_part_stride()]: merged spans */
    uint8_t *bytes; /* [TD_CPU_FEW_ROWS][inputs_max][2]: int16 activations as bytes */
} td_cpu_scratch_t;

/** A thread's scratch for these heads and products of up to inputs_max inputs; one allocation.
 * Errors: TD_ERR_NO_MEMORY.
 * Owner:  the caller frees it with td_free(). */
TD_MUST_CHECK td_status_t td_cpu_scratch_create(uint32_t head_dim, uint32_t group,
                                                uint32_t inputs_max, td_cpu_scratch_t **out);

/** One KV head's attention for up to TD_CPU_TILE_ROWS consecutive positions of a sequence. */
typedef struct td_cpu_attention {
    const uint8_t *pool;
    const td_kv_layout_t *kv;
    const uint32_t *blocks;
    uint32_t layer;
    uint32_t kv_head;
    uint32_t position; /* of the first row */
    uint32_t rows;
    uint32_t group; /* query heads that share the KV head; adjacent in q and out */
    td_attention_mask_t mask;
    float scale;    /* 1 / sqrt(head_dim) */
    const float *q; /* [row][q_stride], at the first query head of the group */
    float *out;     /* as q; unused with parts */
    size_t q_stride;
    uint32_t begin; /* positions looked at: [begin, end), begin a multiple of TD_CPU_SPAN_TOKENS */
    uint32_t end;   /* no more than one span with parts, else begin is 0 */
    /* NULL, or where one span's parts go instead of the result: [row][query head of the group],
     * rows part_row_stride floats apart, heads td_cpu_part_stride(). Rows before begin get none. */
    float *parts;
    size_t part_row_stride;
} td_cpu_attention_t;

/* A part: what a query has gathered in one span. */
#define TD_CPU_PART_MAXIMUM 0u
#define TD_CPU_PART_SUM 1u
#define TD_CPU_PART_ELEMENTS 16u /* of the head, from here on */

typedef struct td_cpu_ops {
    const char *name;
    /** y[row][output] = sum over k of w[output][k] * x[row][k], for panels [begin, end).
     * begin is even; end is even. Integer forms: exact sums in groups of 32, then one fp32 FMA
     * chain over ascending groups: acc = fma(sum, scale_w * scale_x, acc), then for 4-bit weights
     * acc = fma(minimum_w, sum_x, acc). Float forms: acc = fma(w, x, acc) over ascending k. */
    void (*product)(const td_cpu_matrix_t *w, const td_cpu_acts_t *x, uint32_t rows, float *y,
                    uint32_t panel_begin, uint32_t panel_end, td_cpu_scratch_t *scratch);
    /** What product() would make of these rows for itself in every call; the caller sets it as
     * their `prepared` for its calls with matrices of this form. It lies in the scratch, until the
     * next call with the same one. Answers NULL, or is NULL: there is nothing to make. */
    const uint8_t *(*prepare)(const td_cpu_matrix_t *w, const td_cpu_acts_t *x, uint32_t rows,
                              td_cpu_scratch_t *scratch);
    /** out = x * (1 / sqrt(mean of squares + eps)) * weight. Eight FMA chains (i mod 8), added in
     * ascending order. dim is a multiple of 8. */
    void (*rms_norm)(const float *x, const float *weight, uint32_t dim, float eps, float *out);
    /** Scales each group so that its largest magnitude becomes TD_CPU_INT8_MAX; ties to even.
     * dim is a multiple of 32. */
    void (*quantise8)(const float *x, uint32_t dim, int8_t *q, float *scale, float *sum);
    /** The same to int16, with the largest magnitude becoming limit. */
    void (*quantise16)(const float *x, uint32_t dim, int limit, int16_t *q, float *scale,
                       float *sum);
    /** x += y; n is a multiple of 8. */
    void (*add)(float *x, const float *y, uint32_t n);
    /** gate = gate / (1 + exp(-gate)) * up; n is a multiple of 8. */
    void (*swiglu)(float *gate, const float *up, uint32_t n);
    /** Turns pairs (2i, 2i + 1) of one head by an angle: x = fma(other, +-sin, x * cos).
     * table: cos and sin of each pair, side by side. n is a multiple of 8. */
    void (*rotate)(float *head, const float *table, uint32_t n);
    /** As td_kv_row_encode(). values and scale may be unaligned. */
    void (*kv_encode)(td_kv_codec_t codec, const float *src, uint32_t head_dim, uint8_t *values,
                      uint8_t *scale);
    /** Softmax attention over what the mask shows, online over tiles of TD_CPU_TILE_TOKENS absolute
     * positions, merged over spans; see DESIGN.md, "Attention". Reads no run of 16 tokens of which
     * nobody sees any: its block may be gone. */
    void (*attention)(const td_cpu_attention_t *job, td_cpu_scratch_t *scratch);
    /** Merges the parts of one query's spans, in ascending order and part_stride floats apart (one
     * is overwritten), and divides by the sum. Parts of which it sees nothing have a sum of zero
     * and are left out. Shape: out [head_dim]. */
    void (*merge)(float *parts, size_t part_stride, uint32_t count, uint32_t head_dim, float *out);
} td_cpu_ops_t;

extern const td_cpu_ops_t td_cpu_portable_ops;
#if defined(__x86_64__)
extern const td_cpu_ops_t td_cpu_avx2_ops;
extern const td_cpu_ops_t td_cpu_avx512_ops;
#endif

#define TD_CPU_OPS_BEST "auto"
/** An implementation by name ("portable", "avx2", "avx512"), or the best one. NULL: this CPU lacks
 * it, or there is none of that name. */
const td_cpu_ops_t *td_cpu_ops_find(const char *name);

/** Packs a checked two-dimensional tensor.
 * Units:  int8: 4-bit weights are laid out for int8 activations.
 * Errors: TD_ERR_UNSUPPORTED (type, or K not a multiple of 32 for a quantised one, or a scale that
 *         does not fit), TD_ERR_NO_MEMORY.
 * Owner:  the arena holds the bytes. */
TD_MUST_CHECK td_status_t td_cpu_pack(const td_gguf_tensor_t *tensor, bool int8, td_arena_t *arena,
                                      td_cpu_matrix_t *out);
/** Dequantises one output row (an embedding). Shape: out [inputs] f32. */
void td_cpu_unpack_row(const td_cpu_matrix_t *matrix, uint32_t row, float *out);

static inline float td_cpu_f32_from_bf16(uint16_t bits)
{
    return td_float_from_bits((uint32_t)bits << 16);
}

static inline uint16_t td_cpu_load_u16(const uint8_t *bytes)
{
    uint16_t value = 0;
    memcpy(&value, bytes, sizeof(value));
    return value;
}

/** The first tile (or span: size in tokens) from `at` on, a multiple of size, of which some row of
 * the job sees something; `end` or more: none before end. */
static inline uint32_t td_cpu_next_seen(const td_cpu_attention_t *job, uint32_t at, uint32_t size,
                                        uint32_t end)
{
    if (job->mask.kind == TD_ATTENTION_FULL || at >= end) {
        return at;
    }
    at = td_attention_next(&job->mask, job->position, job->position + job->rows - 1, at);
    return at == TD_ATTENTION_NONE ? end : at / size * size;
}

/** Of a tile: what its rows see, as bits. */
typedef struct td_cpu_tile_view {
    uint32_t lasting;
    uint32_t any; /* what some row sees */
    bool whole;   /* all rows see all of it, as under full attention nearly always */
} td_cpu_tile_view_t;

static inline uint32_t td_cpu_row_bits(const td_cpu_attention_t *job,
                                       const td_cpu_tile_view_t *view, uint32_t row, uint32_t tile)
{
    return view->whole ? UINT32_MAX
                       : td_attention_bits(&job->mask, job->position + row, tile, view->lasting);
}

/** As td_cpu_view_tile(), where the rows may see parts. */
td_cpu_tile_view_t td_cpu_view_part(const td_cpu_attention_t *job, uint32_t tile);

static inline td_cpu_tile_view_t td_cpu_view_tile(const td_cpu_attention_t *job, uint32_t tile)
{
    if (job->mask.kind == TD_ATTENTION_FULL && job->position >= tile + TD_CPU_TILE_TOKENS - 1) {
        return (td_cpu_tile_view_t){.any = UINT32_MAX, .whole = true};
    }
    return td_cpu_view_part(job, tile);
}

/** Does a set of tokens of a tile have any of the 16 from t on? */
static inline bool td_cpu_has_run(uint32_t bits, uint32_t t)
{
    return (bits >> t & 0xffffu) != 0;
}

/** Takes the first run of tokens out of a set that is not empty. */
static inline void td_cpu_take_run(uint32_t *bits, uint32_t *begin_out, uint32_t *end_out)
{
    const uint32_t begin = (uint32_t)__builtin_ctz(*bits);
    const uint32_t above = ~(*bits >> begin); /* what follows the run; 0: it fills the tile */

    *begin_out = begin;
    *end_out = above == 0 ? 32 : begin + (uint32_t)__builtin_ctz(above);
    *bits = *end_out == 32 ? 0 : *bits & UINT32_MAX << *end_out;
}

static inline size_t td_cpu_whole_vectors(size_t n)
{
    return (n + TD_CPU_LANES_MAX - 1) / TD_CPU_LANES_MAX * TD_CPU_LANES_MAX;
}

/** Floats between two queries' outputs: whole vectors, so that a head of any size ends in one. */
static inline size_t td_cpu_output_stride(uint32_t head_dim)
{
    return td_cpu_whole_vectors(head_dim);
}

/** Floats of a part. */
static inline size_t td_cpu_part_stride(uint32_t head_dim)
{
    return TD_CPU_PART_ELEMENTS + td_cpu_output_stride(head_dim);
}

/** Address of a token's K or V of one head. Positions are absolute. */
static inline const uint8_t *td_cpu_kv_at(const td_cpu_attention_t *job, bool is_v,
                                          uint32_t position)
{
    const td_kv_layout_t *kv = job->kv;
    size_t block = job->blocks[position / kv->block_tokens];
    return job->pool + block * td_kv_block_bytes(kv) +
           td_kv_offset(kv, job->layer, is_v, job->kv_head, position % kv->block_tokens);
}

/** Address of its scale; f16 has none. */
static inline const uint8_t *td_cpu_kv_scale_at(const td_cpu_attention_t *job, bool is_v,
                                                uint32_t position)
{
    const td_kv_layout_t *kv = job->kv;
    size_t block = job->blocks[position / kv->block_tokens];
    return job->pool + block * td_kv_block_bytes(kv) +
           td_kv_scale_offset(kv, job->layer, is_v, job->kv_head, position % kv->block_tokens);
}

/* Constants shared by the implementations, so that they cannot differ. */

#define TD_CPU_MASKED_SCORE (-1e30f)
/* A group whose largest magnitude is below counts as zero: its reciprocal would overflow. */
#define TD_CPU_TINY 1e-30f

/* exp(x) for x in [-87, 88]: 2^round(x log2 e) times a polynomial for the rest, Horner with FMA.
 * Coefficients ln(2)^n / n!, highest first. */
#define TD_CPU_EXP_MIN (-87.0f)
#define TD_CPU_EXP_MAX 88.0f
#define TD_CPU_LOG2_E 1.44269504f
#define TD_CPU_EXP_C6 1.5403530e-4f
#define TD_CPU_EXP_C5 1.3333558e-3f
#define TD_CPU_EXP_C4 9.6181291e-3f
#define TD_CPU_EXP_C3 5.5504109e-2f
#define TD_CPU_EXP_C2 2.4022651e-1f
#define TD_CPU_EXP_C1 6.9314718e-1f

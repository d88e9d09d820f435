/* td_model_internal.h - what loading and the forward pass share.
 * Threads: owner; inside a pass the workers write disjoint parts of the buffers. */
#pragma once

#include <stdatomic.h>

#include "common/kv/td_pool.h"
#include "common/model/cpu/td_cpu_ops.h"
#include "common/model/td_model.h"
#include "common/model/td_deal.h"
#include "common/model/td_threads.h"

typedef struct td_model_layer {
    td_cpu_matrix_t q;    /* [heads * head_dim][embed_dim] */
    td_cpu_matrix_t k;    /* [kv_heads * head_dim][embed_dim] */
    td_cpu_matrix_t v;    /* as k */
    td_cpu_matrix_t o;    /* [embed_dim][heads * head_dim] */
    td_cpu_matrix_t gate; /* [ff_dim][embed_dim] */
    td_cpu_matrix_t up;   /* as gate */
    td_cpu_matrix_t down; /* [embed_dim][ff_dim] */
    float *attn_norm;     /* owned; [embed_dim] */
    float *ffn_norm;      /* owned; [embed_dim] */
} td_model_layer_t;

typedef struct td_model_device td_model_device_t; /* td_model_device_internal.h */

#define TD_MODEL_PARTS_MAX 256u /* spans of rows that one pass can keep apart */

/** Consecutive positions of one sequence, at most TD_CPU_TILE_ROWS rows. */
typedef struct td_model_segment {
    uint32_t row;
    uint32_t rows;
    uint32_t spans; /* of which some row sees something */
    uint32_t part;  /* in a split pass: of its first row's first span; a row has `spans` of them */
} td_model_segment_t;

/** A piece of attention work, for each KV head: a segment, or one of its spans. */
typedef struct td_model_item {
    uint32_t segment;
    uint32_t begin; /* positions */
    uint32_t end;
    uint32_t part; /* which of the segment's spans it is */
} td_model_item_t;

/** One pass; written by td_model_forward() before the workers start. */
typedef struct td_model_pass {
    uint8_t *pool;              /* borrowed */
    const td_model_row_t *rows; /* borrowed */
    uint32_t row_count;
    uint32_t segment_count;
    uint32_t item_count;
    uint32_t whole; /* of item_count * kv_heads, dealt out whole; each further one is cut by rows */
    bool split;     /* items are spans, whose parts are merged afterwards */
    bool alone; /* no sequence has two segments or other paths, none is split or cut: items write
                   their own KV */
    uint32_t logit_count;
    uint32_t layers; /* that it runs, from the first */
    uint32_t layers_step;
    td_model_layers_fn on_layers;
    void *ctx;
} td_model_pass_t;

/** A thread's view of the only row of a pass. */
typedef struct td_model_own {
    float *x;           /* owned; [embed_dim] */
    float *normed;      /* owned; [embed_dim] */
    td_cpu_acts_t acts; /* owned; of normed */
} td_model_own_t;

struct td_model {
    td_model_info_t info;
    td_model_options_t options;
    const td_cpu_ops_t *ops;
    td_threads_t *threads;     /* owned */
    td_deal_t *deal;           /* owned; NULL where a device runs the passes */
    td_model_device_t *device; /* owned; NULL: the CPU runs the passes */
    const td_pool_t *pool;     /* borrowed; NULL: whoever changes blocks says so */

    /* weights, immutable after loading */
    td_arena_t *weights;         /* owned: the bytes of all matrices */
    td_cpu_matrix_t embed;       /* [vocab_size][embed_dim] */
    td_cpu_matrix_t head_own;    /* as embed; empty when the output head is tied to it */
    const td_cpu_matrix_t *head; /* embed or head_own */
    td_model_layer_t *layers;    /* owned; [kv.layers] */
    float *output_norm;          /* owned; [embed_dim] */
    float *rope;                 /* owned; [rope_positions][rope_dim / 2][cos, sin] */
    uint32_t rope_positions;     /* the rest of the context is computed for each pass */
    double *rope_steps;          /* owned; [rope_dim / 2]: radians a position */
    uint32_t rope_dim;           /* elements of a head that turn; the rest stay */
    uint32_t q_dim;              /* heads * head_dim */
    uint32_t kv_dim;             /* kv_heads * head_dim */
    float norm_eps;
    float attn_scale; /* 1 / sqrt(head_dim) */
    int limit16;      /* largest int16 activation */

    /* buffers of a pass, owned; rows are options.rows_max */
    float *x;                     /* [row][embed_dim]: the residual stream */
    float *normed;                /* [row][embed_dim] */
    float *y;                     /* [row][embed_dim]: what a block adds to x */
    float *q;                     /* [row][q_dim] */
    float *k;                     /* [row][kv_dim] */
    float *v;                     /* [row][kv_dim] */
    float *attn;                  /* [row][q_dim] */
    float *gate;                  /* [row][ff_dim] */
    float *up;                    /* [row][ff_dim] */
    float *rope_far;              /* as rope, [row]; NULL when the table holds the context */
    float *logits;                /* [logit row][vocab_size] */
    td_cpu_acts_t acts;           /* quantised forms; [row][widest input], f32 unused */
    td_cpu_acts_t acts_ff;        /* of down's input, written while others read acts */
    bool heads_are_groups;        /* a KV head's share of attn is whole groups */
    td_cpu_scratch_t **scratch;   /* owned; [threads] */
    td_model_own_t *own;          /* owned; [threads], of thread 0 empty */
    td_model_segment_t *segments; /* [row] */
    uint32_t *segment_of;         /* [row] */
    td_model_item_t *items;       /* [row + TD_MODEL_PARTS_MAX] */
    float *parts;                 /* [TD_MODEL_PARTS_MAX][head][td_cpu_part_stride()] */
    uint32_t *logit_rows;         /* [logit row]: its row */
    td_model_pass_t pass;
    /* Next attention item; layers take turns so that one can be reset while nobody reads it.
     * Relaxed: the barriers order everything, the counter only deals out numbers. */
    atomic_uint next_item[2];
};

/** cos and sin of a position, as they stand in the tables: angles in double, so that every machine
 * with a sound libm rounds to the same floats. Shape: out [rope_dim]. */
void td_model_rope_row(const td_model_t *model, uint32_t position, float *out);

/** The attention of a pass, of every layer and alone, for measuring it: queries are whatever the
 * last pass left, KV is read from the blocks, and the result goes nowhere. For chunks of a prompt
 * only: a pass whose sequences have one segment each would also write KV.
 *
 * Errors: as td_model_forward(). */
TD_MUST_CHECK td_status_t td_model_attention_only(td_model_t *model, uint8_t *pool_bytes,
                                                  const td_model_row_t *rows, uint32_t row_count);

/* td_model.h - a Llama-family decoder (RMSNorm, rotary, grouped-query attention, SwiGLU) over paged
 * KV. One forward pass serves prefill chunks and decode batches alike.
 * I1: a row's logits depend on its tokens' KV, its own token and position and nothing else, bit for
 * bit: not on the other rows, the chunking, the thread count or the instruction set.
 * Source: design, sections 2 (I1), 3 and 7.
 * Threads: owner (one pass at a time); the weights are immutable after loading. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/td_status.h"
#include "common/kv/td_attention_mask.h"
#include "common/kv/td_kv_device.h"
#include "common/kv/td_kv_layout.h"
#include "common/kv/td_pool.h"
#include "common/model/td_gguf.h"

#define TD_MODEL_ROWS_MAX 4096u   /* rows of one pass */
#define TD_MODEL_DEVICES_MAX 8u   /* that run a model together */
#define TD_MODEL_DEVICE_MAX 1023u /* the highest number of one */

typedef enum td_precision {
    TD_PRECISION_FAST = 0, /* int8 activations */
    TD_PRECISION_MIXED,    /* int8 for gate and up, int16 for the rest */
    TD_PRECISION_EXACT     /* int16 throughout */
} td_precision_t;

/** Instruction sets; all give the same bits, so the choice is never part of a result. */
typedef enum td_isa {
    TD_ISA_AUTO = 0, /* the best the CPU has */
    TD_ISA_PORTABLE, /* C with fmaf() */
    TD_ISA_AVX2,     /* AVX2 + FMA + F16C */
    TD_ISA_AVX512    /* AVX-512 F, BW, DQ, VL and VNNI */
} td_isa_t;

/** What runs the passes; all give the same bits. */
typedef enum td_backend {
    TD_BACKEND_CPU = 0,
    TD_BACKEND_CUDA /* only where the program is linked with it */
} td_backend_t;

/** Zero-initialised: device 0 alone. */
typedef struct td_devices {
    uint32_t ids[TD_MODEL_DEVICES_MAX];
    uint32_t count; /* 0 = device 0 alone */
} td_devices_t;

typedef struct td_model_options {
    td_backend_t backend;
    td_devices_t devices;     /* cuda: each has a share of the model */
    uint64_t device_kv_bytes; /* cuda: of each, for copies of KV blocks; 0 = what is free then */
    td_precision_t precision;
    td_isa_t isa;
    uint32_t threads;        /* 1..TD_THREADS_MAX */
    uint32_t rows_max;       /* rows of the largest pass, 1..TD_MODEL_ROWS_MAX */
    uint32_t logit_rows_max; /* rows that may want logits in one pass, <= rows_max */
    uint32_t context_max;    /* 0 = the model's own context length; longer only with a mask */
    uint32_t block_tokens;   /* tokens of a KV block */
    td_kv_codec_t kv_codec;
    const char *attention; /* borrowed; TD_ATTENTION_FORMS, NULL = what the model file says */
} td_model_options_t;

typedef struct td_model_info {
    uint32_t vocab_size;
    uint32_t context_max; /* tokens */
    uint32_t embed_dim;
    uint32_t ff_dim;
    uint32_t heads;
    td_kv_layout_t kv;
    td_attention_mask_t attention; /* of every layer */
    uint8_t fingerprint[32];       /* of the model file */
    char numerics_class[64];       /* what may change bits, e.g. "cpu/mixed/r2/window:512" (I1) */
    char name[64];                 /* general.name, printable */
} td_model_info_t;

/** One token of one sequence. Rows of a sequence stand together in ascending position.
 *
 * A tree of tokens is several sequences: each path from its root has a table of its own, which
 * shares with the others what is behind it and has other blocks where they part. A row that is on
 * several paths is one row; it writes its KV into its slot of all of their blocks, so each path
 * reads what a sequence without the others would have (I1). One path is the trunk, whose blocks
 * other paths' tables may hold as they are; rows that the trunk has not are marked. */
typedef struct td_model_row {
    uint32_t token;
    uint32_t position;      /* absolute */
    const uint32_t *blocks; /* borrowed: block i holds positions [i * block_tokens, ...); one that
                               no row of the pass needs (the mask) may be anything */
    const uint32_t *copies; /* borrowed, [copy_count]: blocks of other paths, written too */
    uint32_t copy_count;
    bool is_branch; /* of a tree's path that parts from the trunk, behind there */
    bool want_logits;
} td_model_row_t;

typedef struct td_model td_model_t;

/** Loads a model. Logs progress for long loads. The file may be closed afterwards.
 * Errors: TD_ERR_INVALID (options or file; a line says what), TD_ERR_UNSUPPORTED (architecture,
 *         tensor type, or a tensor the forward pass does not know), TD_ERR_NO_MEMORY, TD_ERR_BUSY
 *         (the system gives no more threads). */
TD_MUST_CHECK td_status_t td_model_load(const td_gguf_t *gguf, const td_model_options_t *options,
                                        td_model_t **out);
void td_model_destroy(td_model_t *model);
const td_model_info_t *td_model_info(const td_model_t *model);
/** "fast", "mixed" or "exact". Errors: TD_ERR_INVALID. */
TD_MUST_CHECK td_status_t td_precision_parse(const char *text, td_precision_t *out);

/** "auto", "portable", "avx2" or "avx512". Errors: TD_ERR_INVALID. */
TD_MUST_CHECK td_status_t td_isa_parse(const char *text, td_isa_t *out);

/** "cpu" or "cuda". Errors: TD_ERR_INVALID. */
TD_MUST_CHECK td_status_t td_backend_parse(const char *text, td_backend_t *out);
#define TD_BACKEND_NAMES "cpu|cuda" /* as TD_OPTION_CHOICE wants them */

/** A list of devices, "0" or "0,1,2,3". Errors: TD_ERR_INVALID (not such a list, more than
 * TD_MODEL_DEVICES_MAX, or one above TD_MODEL_DEVICE_MAX). */
TD_MUST_CHECK td_status_t td_devices_parse(const char *text, td_devices_t *out);

/** The pool whose memory passes will be given: a backend that keeps copies of blocks sees by a
 * block's epoch that it was given out anew, and then its copy is of no use.
 * Owner:  borrowed until another or NULL is given, which must be before its memory goes. */
void td_model_use_pool(td_model_t *model, const td_pool_t *pool);

/** Says that the bytes of a block are no longer those that passes have left there, though its epoch
 * is the same: tokens were copied into it. Not during a pass. */
void td_model_kv_changed(td_model_t *model, uint32_t block);

/** What transfers may use of the model's device, to send blocks to other devices and to receive
 * them; NULL: the CPU runs the passes, or the device is alone.
 * Owner:  the model; of no use once another pool or none is given, so transfers end before. */
td_kv_device_t *td_model_kv_device(td_model_t *model);

/** Called by the pass's own thread after layers [layer_begin, layer_end) of every row are written
 * to the blocks. Must be short: the pass waits. */
typedef void (*td_model_layers_fn)(void *ctx, uint32_t layer_begin, uint32_t layer_end);

/** Runs one pass: reads earlier positions' KV through the block tables, writes each row's own.
 *
 * Shape:  pool_bytes [block], as td_kv_layout.h has it, blocks td_kv_block_bytes() apart;
 *         logits_out [rows that want logits, in row order][vocab_size] f32, lent by the model until
 *         the next pass.
 *
 * Units:  layers_step in layers: on_layers is called about every so many; 0 = once, at the end.
 *
 * Errors: TD_ERR_INVALID (a token, position or count out of range; nothing was written), and of a
 *         device TD_ERR_NO_MEMORY (it does not hold the pass's blocks) and TD_ERR_IO (it fails, and
 *         will go on failing): then what the pass wrote is not to be used.
 *
 * Cost:   O(rows * weights + rows * context). */
TD_MUST_CHECK td_status_t td_model_forward(td_model_t *model, uint8_t *pool_bytes,
                                           const td_model_row_t *rows, uint32_t row_count,
                                           uint32_t layers_step, td_model_layers_fn on_layers,
                                           void *ctx, const float **logits_out);
/** The same pass through the first `layers` layers only: writes KV of those, with the bits of a
 * whole pass, and takes logits from there (output norm and head). 1 <= layers <= the model's. Cost:
 * in proportion to the layers, and the head. */
TD_MUST_CHECK td_status_t td_model_forward_first(td_model_t *model, uint32_t layers,
                                                 uint8_t *pool_bytes, const td_model_row_t *rows,
                                                 uint32_t row_count, const float **logits_out);
/** The hidden states of the last pass's rows that wanted logits, behind the output norm: what the
 * output head made the logits of.
 * Shape:  [rows that wanted logits, in row order][embed_dim] f32, lent until the next pass. */
const float *td_model_hidden(const td_model_t *model);
/** A token's embedding, as a pass begins with it. Shape: out [embed_dim]. token < vocab_size. */
void td_model_embedding(const td_model_t *model, uint32_t token, float *out);
/** The output head's weights of a token: its logit is their product with a hidden state, but for
 * how a pass rounds that. Shape: out [embed_dim]. token < vocab_size. */
void td_model_head_row(const td_model_t *model, uint32_t token, float *out);

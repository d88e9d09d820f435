/* td_heads.h - heads on a model's hidden state that guess the tokens behind the next one, one after
 * the other: Medusa's place, with the tokens drafted so far as a further input, as Hydra has it.
 * One small network serves every place of the chain: from the state before and the two newest
 * tokens it makes the state that the model would have there, and the model's own output head - the
 * rows of it that belong to a shortlist of tokens - says what comes next.
 *
 *   x = [state; embedding(newest); embedding(the one before)]
 *   state += out.weight * silu(in.weight * x + in.bias) + out.bias
 *   logits = head[tokens] * state
 *
 * File: safetensors with these tensors, F32, and "tokens" I32: the shortlist. Its metadata names
 * the model that it was made for by its fingerprint.
 * Source: Medusa (Cai et al., 2024), Hydra (Ankner et al., 2024); common/model/DESIGN.md, "Heads".
 * Threads: owner, the model's: a pass of it and a step of its heads never at once. */
#pragma once

#include <stdint.h>

#include "common/base/td_status.h"
#include "common/model/td_model.h"
#include "common/model/td_safetensors.h"

#define TD_HEADS_FORMAT "tandem-heads-1"
#define TD_HEADS_FORMAT_KEY "format"
#define TD_HEADS_FINGERPRINT_KEY "model_fingerprint" /* in hexadecimal */
#define TD_HEADS_SEED_KEY "seed"
#define TD_HEADS_ACCEPTANCE_KEY "acceptance" /* of each place, where those before were right */
#define TD_HEADS_HIDDEN_MAX 65536u
#define TD_HEADS_INPUTS 3u /* parts of x, each of embed_dim */

typedef struct td_heads td_heads_t;

/** What a file holds, checked against itself; borrows from it. */
typedef struct td_heads_file {
    uint32_t embed_dim;
    uint32_t hidden_dim;
    uint32_t token_count;
    uint8_t fingerprint[32];
    const td_safetensor_t *in_weight;  /* [hidden_dim][3 * embed_dim] */
    const td_safetensor_t *in_bias;    /* [hidden_dim] */
    const td_safetensor_t *out_weight; /* [embed_dim][hidden_dim] */
    const td_safetensor_t *out_bias;   /* [embed_dim] */
    const td_safetensor_t *tokens;     /* [token_count]; each once, ascending, from 0 on */
} td_heads_file_t;

/** Errors: TD_ERR_INVALID; a log line says what is wrong. */
TD_MUST_CHECK td_status_t td_heads_read(const td_safetensors_t *file, td_heads_file_t *out);

/** Loads heads for a model, which they borrow until destroyed.
 * Units:  rows_max in rows of a step.
 * Errors: TD_ERR_INVALID (malformed, or made for another model), TD_ERR_NO_MEMORY, and as
 *         td_safetensors_open().
 * Owner:  the caller ends *out with td_heads_destroy(), before the model. */
TD_MUST_CHECK td_status_t td_heads_load(const char *path, td_model_t *model, uint32_t rows_max,
                                        td_heads_t **out);
/** NULL is allowed. */
void td_heads_destroy(td_heads_t *heads);
/** The shortlist. Shape: [*count_out], ascending, lent until destroyed. */
const uint32_t *td_heads_tokens(const td_heads_t *heads, uint32_t *count_out);

/** One chain's next place. */
typedef struct td_heads_row {
    float *state;    /* [embed_dim]: first the hidden state (td_model_hidden()) that selected the
                        newest token, then what the step before has left here; written */
    uint32_t newest; /* token ids, < vocab_size */
    uint32_t before;
} td_heads_row_t;

/** One place of every row's chain. A row's numbers don't depend on the other rows.
 * Shape:  logits_out [row][shortlist] f32, lent until the next step.
 * Units:  count 1..rows_max. */
void td_heads_step(td_heads_t *heads, const td_heads_row_t *rows, uint32_t count,
                   const float **logits_out);

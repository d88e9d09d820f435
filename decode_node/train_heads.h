/* train_heads.h - tandem-train-heads: heads that draft from a model's hidden states, made from what
 * the model itself generates. Design: decode_node/DESIGN.md, "Training heads".
 * Threads: owner; the work inside is spread over threads. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/td_status.h"
#include "common/model/cpu/td_cpu_ops.h"
#include "common/model/td_gguf.h"
#include "common/model/td_heads.h"
#include "common/model/td_model.h"
#include "common/model/td_threads.h"

/** The number-th of a seed's random numbers (splitmix64): a training that goes on needs no more
 * state than how far it has come. */
static inline uint64_t train_random(uint64_t seed, uint64_t number)
{
    uint64_t z = seed + (number + 1) * 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

/* --- train_heads_text.c: prompts ---------------------------------------------------------------
 */

/** Prompts that there are: so many are for training, those behind them are held out. */
uint32_t train_prompts(bool held_out);
/** A prompt's text; is_chat: it is a user's turn, else the text that goes on.
 * Shape:  out [cap]; number is counted modulo the prompts that there are. */
void train_prompt(uint32_t number, bool held_out, char *out, size_t cap, bool *is_chat_out);

/* --- train_heads_data.c: what the model generates ----------------------------------------------
 */

/** Rows of decode passes: the token that went in, the hidden state that came out, and what followed
 * in the same text. */
typedef struct train_data {
    uint32_t embed_dim;
    uint32_t rows;
    uint32_t rows_max;
    int32_t *tokens;  /* owned, [rows] */
    int32_t *best;    /* owned, [rows]: the likeliest next token */
    int32_t *follow;  /* owned, [rows]: how many rows of the same text follow */
    uint16_t *hidden; /* owned, [rows][embed_dim] f16 */
} train_data_t;

typedef struct train_source {
    const td_gguf_t *gguf; /* borrowed */
    td_model_t *model;     /* borrowed */
    uint32_t sequences;    /* at once */
    uint32_t tokens_max;   /* of one text */
    uint64_t seed;
    /** Progress: rows so far. */
    void (*progress)(uint32_t rows, uint32_t rows_max);
} train_source_t;

/** Generates until there are so many rows. held_out: greedy, from prompts of their own; else at
 * several temperatures. Errors: TD_ERR_NO_MEMORY, and as the model's.
 * Owner:  the caller ends *out with train_data_fini(), also after a failure. */
TD_MUST_CHECK td_status_t train_generate(const train_source_t *source, bool held_out, uint32_t rows,
                                         train_data_t *out);
#define TRAIN_NAME_KEY "name" /* in the metadata of what a training goes on from */
/** Opens such a file, if it is there and has the name. Errors: TD_ERR_NOT_FOUND (else), and as
 * td_safetensors_open(). Owner: the caller ends it with td_safetensors_close(). */
TD_MUST_CHECK td_status_t train_file_open(const char *path, const char *name,
                                          td_safetensors_t **out);
/** As a tensor file, for who starts again. name: what the data depend on; under another one the
 * file is not read again. Errors: TD_ERR_IO, TD_ERR_NO_MEMORY. */
TD_MUST_CHECK td_status_t train_data_save(const char *path, const char *name,
                                          const train_data_t *data);
/** Errors: TD_ERR_NOT_FOUND (no such file, or of another name), TD_ERR_INVALID, TD_ERR_NO_MEMORY.
 * Owner:  as train_generate(). */
TD_MUST_CHECK td_status_t train_data_load(const char *path, const char *name, uint32_t embed_dim,
                                          train_data_t *out);
void train_data_fini(train_data_t *data);

/* --- train_heads_net.c, _batch.c, _file.c: the network, its steps, its files
 * ---------------------------------
 */

#define TRAIN_STEPS_MAX 8u /* drafts of a chain that are trained */

typedef struct train_options {
    uint32_t steps;      /* of a chain, 1..TRAIN_STEPS_MAX */
    uint32_t hidden_dim; /* a multiple of 32 */
    uint32_t shortlist;  /* tokens that can be drafted; a multiple of 16 */
    uint32_t candidates; /* of them, those that a batch's loss sees; a multiple of 16 */
    uint32_t batch;      /* positions of a batch, a multiple of TRAIN_RUN */
    uint32_t threads;
    uint64_t seed;
    double learning_rate;
    uint64_t batches; /* of the whole training: the rate falls over them */
} train_options_t;

#define TRAIN_RUN 16u /* positions of a batch that follow each other in one text */

typedef struct train_net train_net_t;

/** What a chain of drafts comes to. */
typedef struct train_score {
    uint64_t rows;
    uint64_t alive[TRAIN_STEPS_MAX]; /* all drafts before were right */
    uint64_t right[TRAIN_STEPS_MAX]; /* and this one too */
    uint64_t any[TRAIN_STEPS_MAX];   /* right where the tokens before were given */
} train_score_t;

/** A network that drafts nothing useful yet; its shortlist: the tokens that are most often in data.
 * Errors: TD_ERR_NO_MEMORY, TD_ERR_BUSY (no threads), TD_ERR_INVALID (fewer rows than a batch).
 * Owner:  the caller ends it with train_net_destroy(); model and data are borrowed until then. */
TD_MUST_CHECK td_status_t train_net_create(const td_model_t *model, const train_data_t *data,
                                           const train_options_t *options, train_net_t **out);
void train_net_destroy(train_net_t *net);
/** The means over a batch's chains and their places. */
typedef struct train_loss {
    double distribution; /* nats that it is away from the model's */
    double state;        /* of scaled states, Huber's with a width of 1 */
} train_loss_t;

/** The gradient of a batch, drawn by seed and number, of the sum of both losses. */
void train_net_gradient(train_net_t *net, uint64_t number, train_loss_t *out);
/** That, and a step of Adam: the number-th, from 0. */
void train_net_batch(train_net_t *net, uint64_t number, train_loss_t *out);
/** Weights, and the gradient of the last batch. Shape: both [*count_out], borrowed. */
float *train_net_weights(train_net_t *net, const float **gradient_out, size_t *count_out);
/** Drafts greedily behind every row of data that has steps rows behind it. */
void train_net_score(train_net_t *net, const train_data_t *data, train_score_t *out);
/** State of a training that can go on. name and errors: as train_data_save(). */
TD_MUST_CHECK td_status_t train_net_save(const train_net_t *net, const char *path, const char *name,
                                         uint64_t batches_done);
/** Errors: as train_data_load(). */
TD_MUST_CHECK td_status_t train_net_load(train_net_t *net, const char *path, const char *name,
                                         uint64_t *batches_done_out);
/** The heads, as td_heads_load() reads them, with what they were scored. Errors: as
 * train_data_save(). */
TD_MUST_CHECK td_status_t train_net_export(const train_net_t *net, const char *path,
                                           const uint8_t fingerprint[32],
                                           const train_score_t *score);

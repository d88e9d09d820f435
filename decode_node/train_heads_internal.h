/* train_heads_internal.h - the network of the heads while it is trained: what its files share.
 * States and embeddings are scaled to a mean square of one in here.
 * Threads: owner; inside a step threads write disjoint parts. */
#pragma once

#include "common/base/td_float.h"
#include "decode_node/train_heads.h"

#define TRAIN_NOT_LISTED UINT32_MAX

typedef struct train_params {
    float *in_weight;  /* [hidden_dim][3 * dim] */
    float *in_bias;    /* [hidden_dim] */
    float *out_weight; /* [dim][hidden_dim] */
    float *out_bias;   /* [dim] */
} train_params_t;

struct train_net {
    const td_model_t *model;
    const train_data_t *data;
    train_options_t o;
    uint32_t dim;
    uint32_t vocab;
    uint32_t teacher_rows; /* of a batch: positions whose states are goals */
    size_t param_count;
    float *memory[4]; /* owned, [param_count]: weights, gradient, mean, square */
    train_params_t w; /* in memory[0] */
    train_params_t g; /* in memory[1] */
    float state_scale;
    float embed_scale;
    uint32_t *tokens; /* owned, [shortlist], ascending */
    uint32_t *place;  /* owned, [vocab]: of a token in the shortlist, or NOT_LISTED */
    float *head;      /* owned, [shortlist][dim]: of scaled states */
    td_threads_t *threads;
    td_cpu_scratch_t **scratch; /* owned, [threads] */
    const td_cpu_ops_t *ops;
    float *packed;  /* owned: a product's matrix in panels */
    float *flipped; /* owned: its rows, columns first */
    /* of a batch; positions are steps * batch, a step's together */
    uint32_t *starts;     /* [batch]: rows of data */
    uint32_t *candidates; /* [candidates]: places in the shortlist */
    uint32_t forced;      /* of them, those that stand for themselves */
    float correction;     /* logarithm of how many others each of the rest stands for */
    uint8_t *taken;       /* [shortlist] */
    float *picked_head;   /* [candidates][dim] */
    float *teacher;       /* [teacher_rows][candidates]: probabilities */
    float *goals;         /* [teacher_rows][dim]: scaled states */
    float *x;             /* [position][3 * dim] */
    float *a;             /* [position][hidden_dim]: before silu */
    float *u;             /* [position][hidden_dim]: behind it; in the backward pass its gradient */
    float *z;             /* [position][dim]: states */
    float *dz;            /* [position][dim]: their gradient */
    float *da;            /* [position][hidden_dim] */
    float *dx;            /* [batch][dim]: of the state part of x */
    float *logits;        /* [batch][most of candidates and shortlist] */
    train_loss_t *losses; /* [batch] */
    bool *alive;          /* [batch]: every draft of the chain was right, while it is scored */
};

/** Where they lie in memory of [param_count]. */
static inline train_params_t train_params_in(const train_net_t *n, float *at)
{
    train_params_t p;

    p.in_weight = at;
    p.in_bias = p.in_weight + (size_t)n->o.hidden_dim * TD_HEADS_INPUTS * n->dim;
    p.out_weight = p.in_bias + n->o.hidden_dim;
    p.out_bias = p.out_weight + (size_t)n->dim * n->o.hidden_dim;
    return p;
}

/** A state's element, as the data have it. */
static inline float train_hidden(const train_data_t *d, size_t row, uint32_t i)
{
    return td_f32_from_f16(d->hidden[row * d->embed_dim + i]);
}

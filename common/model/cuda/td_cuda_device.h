/* td_cuda_device.h - the CUDA backend's own parts: memory, weights, the plan of a pass.
 * Threads: owner, the model's. */
#pragma once

#include <cuda_runtime_api.h>

#include "common/model/cuda/td_cuda_graphs.h"
#include "common/model/cuda/td_cuda_exchange.h"
#include "common/model/cuda/td_cuda_launch.h"
#include "common/model/cuda/td_cuda_mirror.h"
#include "common/model/td_model_device_internal.h"

#define TD_CUDA_STAGING_BYTES ((size_t)4 << 20) /* of weights on their way, twice */
#define TD_CUDA_PARTS_MAX 2048u                 /* spans of rows that a pass can keep apart */
#define TD_CUDA_TABLES_MAX (4u << 20)           /* blocks in all tables of a pass */
#define TD_CUDA_COPIES_MAX 65536u               /* blocks of other paths that a pass writes */
#define TD_CUDA_GRAPH_ROWS_MAX 64u              /* larger passes take longer than their launches */
#define TD_CUDA_LEFT_PERCENT 5u /* of the memory free after loading, not taken for KV */

typedef struct td_cuda_layer {
    td_cuda_matrix_t q, k, v, o, gate, up, down;
    const float *attn_norm;
    const float *ffn_norm;
} td_cuda_layer_t;

/** What the kernels read of a pass, host and device side; written anew for each. */
typedef struct td_cuda_pass {
    uint32_t *tokens;       /* [row] */
    uint32_t *slots;        /* [row] */
    uint32_t *part_begin;   /* [row] */
    uint32_t *part_count;   /* [row] */
    uint32_t *blocks_begin; /* [row + 1] */
    uint32_t *blocks;       /* [row + TD_CUDA_COPIES_MAX]: places */
    uint32_t *host_blocks;  /* as blocks */
    uint32_t *pick;         /* [logit row] */
    float *rope;            /* [row][rope_dim] */
    td_cuda_item_t *few;    /* [row + TD_CUDA_PARTS_MAX] */
    td_cuda_item_t *many;   /* as few */
    uint32_t *tables;       /* last, since it is the largest */
} td_cuda_pass_t;

struct td_model_device {
    int index;
    uint32_t multiprocessors;
    cudaStream_t compute;
    cudaStream_t out;        /* KV on its way to the host */
    cudaEvent_t computed[2]; /* layers whose KV may leave */
    cudaEvent_t left[2];     /* and has left */
    cudaEvent_t staged[2];   /* a staging buffer may be filled again */

    void **owned; /* owned; device addresses */
    uint32_t owned_count;
    uint32_t owned_max;
    uint8_t *staging[2];  /* owned, pinned */
    uint8_t *pass_host;   /* owned, pinned; holds host */
    uint8_t *pass_device; /* holds device */
    size_t pass_bytes;
    td_cuda_pass_t host;
    td_cuda_pass_t device;
    uint32_t tables_max; /* blocks */
    void *pinned[2];     /* the model's logits and hidden states; not owned, but pinned */

    td_cuda_layer_t *layers; /* owned */
    td_cuda_matrix_t embed;
    td_cuda_matrix_t head;
    const float *output_norm;

    float *x;
    float *normed;
    float *y;
    float *q;
    float *k;
    float *v;
    float *attn;
    float *gate;
    float *up;
    float *logits;
    float *parts;
    td_cuda_acts_t acts8;
    td_cuda_acts_t acts16;

    uint8_t *pool; /* [place][block] */
    uint32_t places;
    td_cuda_mirror_t *mirror;     /* owned */
    td_cuda_exchange_t *exchange; /* owned: copies to and from other devices */
    const uint8_t *host_pool;     /* borrowed: whose blocks the copies are of */
    uint8_t *mapped;              /* the host's pool where kernels can write it, else NULL */
    void *registered;             /* of the host's pool: what is to be given back */

    td_cuda_graphs_t graphs; /* of passes that decode */

    /* of the pass under way */
    uint32_t few_count;
    uint32_t many_count;
    bool split;
    uint32_t table_count;   /* blocks in all tables */
    uint32_t written_count; /* blocks, of all rows */
};

/** Plans a pass: maps blocks to places, uploads those that are not there, and fills the host side
 * of what kernels read. Errors: TD_ERR_NO_MEMORY, TD_ERR_IO. */
TD_MUST_CHECK td_status_t td_cuda_plan(td_model_device_t *d, const td_model_t *m);
/** As td_model_device_ops_t.forward. */
TD_MUST_CHECK td_status_t td_cuda_forward(td_model_device_t *d, td_model_t *m);
/** Computes a few rows of the first layer on the device and on the CPU and compares their bits:
 * what I1 rests on is how this device, and the compiler that made its code, round. The layer is
 * loaded on both. Errors: TD_ERR_UNSUPPORTED (they differ), TD_ERR_NO_MEMORY, TD_ERR_IO. */
TD_MUST_CHECK td_status_t td_cuda_self_test(td_model_device_t *d, const td_model_t *m);
/** What the products of these matrices read, each row `dim` wide. */
td_cuda_quantise_t td_cuda_quantise_for(const td_model_device_t *d, const td_model_t *m,
                                        uint32_t dim, const td_cuda_matrix_t *const *users,
                                        size_t count);
/** A pass's quantised rows of this width. */
td_cuda_acts_t td_cuda_acts_of(const td_cuda_acts_t *buffer, uint32_t dim);
/** Lays a pass's arrays out from base on; answers the bytes they take. */
size_t td_cuda_pass_lay(const td_model_t *m, uint32_t tables_max, uint8_t *base,
                        td_cuda_pass_t *out);

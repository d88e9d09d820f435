/* td_cuda_device.h - the CUDA backend's own parts: the devices that run a model together (ranks),
 * their memory and weights, the plan of a pass. Threads: owner, the model's. */
#pragma once

#include <cuda_runtime_api.h>

#include "common/model/cuda/td_cuda_graphs.h"
#include "common/model/cuda/td_cuda_exchange.h"
#include "common/model/cuda/td_cuda_launch.h"
#include "common/model/cuda/td_cuda_mirror.h"
#include "common/model/cuda/td_cuda_share.h"
#include "common/model/td_model_device_internal.h"

#define TD_CUDA_STAGING_BYTES ((size_t)4 << 20) /* of weights on their way, twice */
#define TD_CUDA_PARTS_MAX 2048u                 /* spans of rows that a pass can keep apart */
#define TD_CUDA_TABLES_MAX (4u << 20)           /* blocks in all tables of a pass */
#define TD_CUDA_COPIES_MAX 65536u               /* blocks of other paths that a pass writes */
#define TD_CUDA_GRAPH_ROWS_MAX 64u              /* larger passes take longer than their launches */
#define TD_CUDA_LEFT_PERCENT 5u /* of the memory free after loading, not taken for KV */

_Static_assert(TD_CUDA_RANKS_MAX == TD_MODEL_DEVICES_MAX, "pieces of a gather, one of each device");

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

/** One of the devices that run a model together. Own: of its share; whole: of all, after a gather
 * (the same memory where there is one device). */
typedef struct td_cuda_rank {
    int index; /* the device's */
    uint32_t multiprocessors;
    td_cuda_share_t share;
    td_kv_layout_t kv; /* of its KV heads */
    cudaStream_t compute;
    cudaStream_t out;        /* KV on its way to the host */
    cudaEvent_t computed[2]; /* layers whose KV may leave */
    cudaEvent_t left[2];     /* and has left */
    cudaEvent_t staged[2];   /* a staging buffer may be filled again */
    cudaEvent_t ready[2];    /* what others gather is there; phases take turns */
    cudaEvent_t joined[2];   /* all that was asked of compute so far; before and behind a graph */

    void **owned; /* owned; device addresses */
    uint32_t owned_count;
    uint32_t owned_max;
    uint8_t *staging[2];  /* owned, pinned */
    uint8_t *pass_device; /* holds pass */
    td_cuda_pass_t pass;

    td_cuda_layer_t *layers; /* owned; its outputs of each matrix */
    td_cuda_matrix_t embed;
    td_cuda_matrix_t head;
    const float *output_norm;

    float *x;        /* [row][embed_dim] */
    float *normed;   /* as x */
    float *y;        /* as x: whole */
    float *y_own;    /* [row][own], of o and down; [row][embed_dim] of embeddings it has */
    float *q;        /* [row][own] */
    float *k;        /* [row][own] */
    float *v;        /* [row][own] */
    float *attn;     /* [row][own] */
    float *attn_all; /* [row][q_dim] */
    float *gate;     /* [row][own] */
    float *gate_all; /* [row][ff_dim] */
    float *up;       /* [row][own] */
    float *logits;   /* [logit row][own] */
    float *parts;    /* [TD_CUDA_PARTS_MAX][own heads] */
    float
        *arrived[TD_CUDA_RANKS_MAX]; /* of others whose memory its kernels cannot read, else NULL */
    bool reads[TD_CUDA_RANKS_MAX];   /* others' memory */
    td_cuda_acts_t acts8;
    td_cuda_acts_t acts16;
    uint8_t *acts_own; /* of attn or gate, quantised for others; laid out anew for each pass */

    uint8_t *pool;   /* [place][block of its heads] */
    uint8_t *mapped; /* the host's pool where its kernels can write it, else NULL */
} td_cuda_rank_t;

struct td_model_device {
    td_cuda_rank_t *ranks; /* owned; [rank_count] */
    uint32_t rank_count;
    uint32_t turn;   /* of `ready` that the phase under way records */
    uint32_t phases; /* of the pass under way, so far */

    uint8_t *pass_host; /* owned, pinned; holds host */
    size_t pass_bytes;
    td_cuda_pass_t host;
    uint32_t tables_max; /* blocks */
    void *pinned[2];     /* the model's logits and hidden states; not owned, but pinned */

    uint32_t places;          /* blocks that each rank has room for, its heads of them */
    td_cuda_mirror_t *mirror; /* owned; of all ranks, which have the same blocks */
    /* owned: copies to and from other nodes' devices; NULL where it has several of its own */
    td_cuda_exchange_t *exchange;
    const uint8_t *host_pool; /* borrowed: whose blocks the copies are of */
    bool mapped;              /* every rank writes the host's pool itself */
    void *registered;         /* of the host's pool: what is to be given back */

    td_cuda_graphs_t graphs; /* of passes that decode */

    /* of the pass under way */
    uint32_t few_count;
    uint32_t many_count;
    bool split;
    uint32_t table_count;   /* blocks in all tables */
    uint32_t written_count; /* blocks, of all rows */
};

/* --- a rank: td_cuda_rank.c ------------------------------------------------------------------- */

/** Opens the rank's device and takes its buffers. What is there in spite of an error is given back
 * by td_cuda_rank_fini(). Errors: TD_ERR_UNSUPPORTED, TD_ERR_NO_MEMORY, TD_ERR_IO. */
TD_MUST_CHECK td_status_t td_cuda_rank_init(td_model_device_t *d, td_cuda_rank_t *rank,
                                            const td_model_t *m);
void td_cuda_rank_fini(td_cuda_rank_t *rank);
/** Takes memory of the rank's device, which is given back with the rank; none for 0 bytes. out: the
 * address of a pointer of any type. Errors: TD_ERR_NO_MEMORY (a line has device and numbers). */
TD_MUST_CHECK td_status_t td_cuda_take(td_cuda_rank_t *rank, size_t bytes, const char *what,
                                       void *out);
/** As td_model_device_ops_t.load, of the rank's share. */
TD_MUST_CHECK td_status_t td_cuda_rank_load(td_cuda_rank_t *rank, const td_model_t *m,
                                            uint32_t layer);
/** Launches go to this rank's device from now on: each thread of a process chooses its own anew. */
TD_MUST_CHECK td_status_t td_cuda_rank_choose(const td_cuda_rank_t *rank);

/* --- between ranks: td_cuda_gather.c ---------------------------------------------------------- */

/** Lets each rank's kernels read the others' memory where the machine has a way, and takes memory
 * for copies where it has none. Ranks are open. Errors: TD_ERR_NO_MEMORY, TD_ERR_IO. */
TD_MUST_CHECK td_status_t td_cuda_connect(td_model_device_t *d, const td_model_t *m);
typedef td_status_t (*td_cuda_phase_fn)(const td_model_device_t *d, td_cuda_rank_t *rank,
                                        const td_model_t *m, uint32_t layer);
/** A part of a pass between two gathers: fn() launches it for each rank in turn. On the devices it
 * begins when all ranks have done the phase before, whose results fn() may gather. What it gathers
 * from is not written again before the phase after the next (each phase waits for all ranks), so
 * two phases in a row may not write the same buffer, and no wait is needed behind a gather.
 * Errors: fn()'s, TD_ERR_IO. */
TD_MUST_CHECK td_status_t td_cuda_phase(td_model_device_t *d, const td_model_t *m,
                                        td_cuda_phase_fn fn, uint32_t layer);

/** The first rank's stream goes on when the others' have done all that they were asked. which: of
 * `joined`. Errors: TD_ERR_IO. */
TD_MUST_CHECK td_status_t td_cuda_join(td_model_device_t *d, uint32_t which);
/** The others' streams go on when the first one's has. Errors: TD_ERR_IO. */
TD_MUST_CHECK td_status_t td_cuda_fork(td_model_device_t *d);

typedef enum td_cuda_gathered {
    TD_CUDA_EMBEDDED = 0, /* rows of y_own, each from the rank that has its token */
    TD_CUDA_ATTENDED,     /* columns of attn */
    TD_CUDA_ADDED,        /* columns of y_own */
    TD_CUDA_GATED         /* columns of gate */
} td_cuda_gathered_t;
/** Brings all ranks' parts of the rows together: floats to out, unless it is NULL, and quantised.
 * Only within a phase, as all of these. With one rank there is nothing to do. Errors: TD_ERR_IO. */
TD_MUST_CHECK td_status_t td_cuda_gather_rows(const td_model_device_t *d,
                                              const td_cuda_rank_t *rank, const td_model_t *m,
                                              td_cuda_gathered_t what, uint32_t rows, float *out,
                                              const td_cuda_quantise_t *quantise);
/** The same for a product that comes next, in the form that its matrix takes: quantised in parts
 * where each rank has whole groups, which are fewer bytes than floats.
 * f32_out: the floats, if it takes those. Errors: TD_ERR_IO. */
TD_MUST_CHECK td_status_t td_cuda_gather_input(const td_model_device_t *d,
                                               const td_cuda_rank_t *rank, const td_model_t *m,
                                               td_cuda_gathered_t what,
                                               const td_cuda_matrix_t *user, float *f32_out);
/** Units: bytes of such a part of some rows. */
static inline size_t td_cuda_own_acts_bytes(size_t rows, size_t width, bool wide)
{
    return rows * width * (wide ? 2 : 1) + 2 * rows * (width / TD_CUDA_GROUP) * sizeof(float);
}
/** What the rank quantises of its part for td_cuda_gather_input(), or nothing; with one rank the
 * whole row for the product itself. */
td_cuda_quantise_t td_cuda_quantise_own(const td_model_device_t *d, const td_cuda_rank_t *rank,
                                        const td_model_t *m, td_cuda_gathered_t what,
                                        const td_cuda_matrix_t *user);

/* --- blocks: td_cuda_heads.c ------------------------------------------------------------------ */

/** Copies layers [begin, end) of the rank's heads of a block between the host's block and its place
 * on the device, on a stream of the rank's. Errors: TD_ERR_IO. */
TD_MUST_CHECK td_status_t td_cuda_copy_heads(const td_cuda_rank_t *rank,
                                             const td_kv_layout_t *whole, uint8_t *host_block,
                                             uint32_t place, uint32_t begin, uint32_t end,
                                             bool to_host, cudaStream_t stream);

/* --- passes ----------------------------------------------------------------------------------- */

/** Plans a pass: maps blocks to places, uploads those that are not there, and fills the host side
 * of what kernels read. Errors: TD_ERR_NO_MEMORY, TD_ERR_IO. */
TD_MUST_CHECK td_status_t td_cuda_plan(td_model_device_t *d, const td_model_t *m);
/** As td_model_device_ops_t.forward. */
TD_MUST_CHECK td_status_t td_cuda_forward(td_model_device_t *d, td_model_t *m);
/** Computes a few rows of the first layer on each device and on the CPU and compares their bits:
 * what I1 rests on is how these devices, and the compiler that made their code, round, and that
 * what one reads of another's memory is what is there. The layer is loaded on all.
 * Errors: TD_ERR_UNSUPPORTED (they differ), TD_ERR_NO_MEMORY, TD_ERR_IO. */
TD_MUST_CHECK td_status_t td_cuda_self_test(td_model_device_t *d, const td_model_t *m);
/** What the products of these matrices read, each row `dim` wide. */
td_cuda_quantise_t td_cuda_quantise_for(const td_cuda_rank_t *rank, const td_model_t *m,
                                        uint32_t dim, const td_cuda_matrix_t *const *users,
                                        size_t count);
/** A pass's quantised rows of this width. */
td_cuda_acts_t td_cuda_acts_of(const td_cuda_acts_t *buffer, uint32_t dim);
/** Lays a pass's arrays out from base on; answers the bytes they take. */
size_t td_cuda_pass_lay(const td_model_t *m, uint32_t tables_max, uint8_t *base,
                        td_cuda_pass_t *out);

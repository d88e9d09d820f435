#include "common/model/cuda/td_cuda_launch.h"

#include "common/base/td_base.h"
#include "common/base/td_log.h"
#include "common/model/cuda/td_cuda_pack.h"

#define ROW_THREADS 128u
#define DRAW_THREADS 256u
#define MOVE_BYTES 4096u
/* Up to here a block has a tile of 8 rows: the tiles of an output read its weights at about the
 * same time, so all but one from the cache, and there are enough blocks for every multiprocessor.
 */
#define FEW_ROWS_MAX 32u

typedef void (*kernel_t)(void); /* called through its address only */

typedef struct product_kernels {
    kernel_t few;
    kernel_t many;
} product_kernels_t;

/* By form, quantised ones by [wide] too. */
static const product_kernels_t nibbles[2] = {
    {td_cuda_product_nibble8_few, td_cuda_product_nibble8_many},
    {td_cuda_product_nibble16_few, td_cuda_product_nibble16_many},
};
static const product_kernels_t others[] = {
    [TD_CUDA_BYTE] = {td_cuda_product_byte_few, td_cuda_product_byte_many},
    [TD_CUDA_F32] = {td_cuda_product_f32_few, td_cuda_product_f32_many},
    [TD_CUDA_F16] = {td_cuda_product_f16_few, td_cuda_product_f16_many},
    [TD_CUDA_BF16] = {td_cuda_product_bf16_few, td_cuda_product_bf16_many},
};

typedef struct attention_kernels {
    uint32_t head_dim;
    kernel_t few;
    kernel_t many;
} attention_kernels_t;

#define ATTENTION_ENTRY(dim) {dim, td_cuda_attention_few_##dim, td_cuda_attention_many_##dim},
static const attention_kernels_t attentions[] = {TD_CUDA_HEAD_DIMS(ATTENTION_ENTRY)};

/* That have no shared memory of their launch's choosing. */
static const kernel_t plain[] = {
    td_cuda_embed,  td_cuda_swiglu,      td_cuda_place, td_cuda_merge,
    td_cuda_gather, td_cuda_gather_acts, td_cuda_move,  td_cuda_draw,
};

td_status_t td_cuda_check(cudaError_t error, const char *what)
{
    if (error == cudaSuccess) {
        return TD_OK;
    }
    (void)cudaGetLastError(); /* it would be told again by the next call that asks */
    TD_LOG_ERROR("device call failed", "call=%s error=%s text=\"%s\"", what,
                 cudaGetErrorName(error), cudaGetErrorString(error));
    return error == cudaErrorMemoryAllocation ? TD_ERR_NO_MEMORY : TD_ERR_IO;
}

static const void *address_of(kernel_t kernel)
{
    const void *address = NULL;
    memcpy(&address, &kernel, sizeof(address));
    return address;
}

static size_t norm_shared(uint32_t dim)
{
    return ((size_t)dim + 8) * sizeof(float);
}

static td_status_t allow_shared(kernel_t kernel, size_t bytes, int shared_max)
{
    if (bytes > (size_t)shared_max) {
        TD_LOG_ERROR("a kernel needs more shared memory than the device has",
                     "bytes=%zu device_bytes=%d", bytes, shared_max);
        return TD_ERR_UNSUPPORTED;
    }
    return td_cuda_check(cudaFuncSetAttribute(address_of(kernel),
                                              cudaFuncAttributeMaxDynamicSharedMemorySize,
                                              (int)bytes),
                         "cudaFuncSetAttribute");
}

static const attention_kernels_t *find_attention(uint32_t head_dim)
{
    for (size_t i = 0; i < TD_ARRAY_LEN(attentions); i++) {
        if (attentions[i].head_dim == head_dim) {
            return &attentions[i];
        }
    }
    return NULL;
}

td_status_t td_cuda_launch_init(int device, uint32_t head_dim, uint32_t embed_dim)
{
    const attention_kernels_t *a = find_attention(head_dim);
    int max = 0;

    TD_TRY(
        td_cuda_check(cudaDeviceGetAttribute(&max, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
                      "cudaDeviceGetAttribute"));
    for (uint32_t wide = 0; wide < 2; wide++) {
        TD_TRY(
            allow_shared(nibbles[wide].few, td_cuda_product_shared(TD_CUDA_NIBBLE, wide, 0), max));
        TD_TRY(
            allow_shared(nibbles[wide].many, td_cuda_product_shared(TD_CUDA_NIBBLE, wide, 1), max));
    }
    for (uint32_t form = TD_CUDA_BYTE; form <= TD_CUDA_BF16; form++) {
        TD_TRY(allow_shared(others[form].few, td_cuda_product_shared(form, 1, 0), max));
        TD_TRY(allow_shared(others[form].many, td_cuda_product_shared(form, 1, 1), max));
    }
    /* Also what needs none, so that it is loaded: a kernel's first launch may wait for all that the
     * device does, and a receive of NCCL whose other end has died does not end by itself. */
    for (size_t i = 0; i < TD_ARRAY_LEN(plain); i++) {
        TD_TRY(allow_shared(plain[i], 0, max));
    }
    TD_ASSERT(a != NULL);
    TD_TRY(allow_shared(td_cuda_norm, norm_shared(embed_dim), max));
    TD_TRY(allow_shared(a->few, td_cuda_attention_shared(head_dim, TD_CUDA_FEW_QUERIES), max));
    return allow_shared(a->many, td_cuda_attention_shared(head_dim, TD_CUDA_MANY_QUERIES), max);
}

bool td_cuda_attention_has(uint32_t head_dim, uint32_t group)
{
    return find_attention(head_dim) != NULL && group >= 1 && group <= TD_CUDA_MANY_QUERIES;
}

typedef struct shape {
    uint32_t grid_x;
    uint32_t grid_y;
    uint32_t threads;
    size_t shared_bytes;
} shape_t;

static td_status_t launch(cudaStream_t stream, kernel_t kernel, const void *params, shape_t shape)
{
    const dim3 grid = {shape.grid_x, shape.grid_y, 1};
    const dim3 block = {shape.threads, 1, 1};
    void *args[1];

    if (shape.grid_x == 0 || shape.grid_y == 0) {
        return TD_OK;
    }
    memcpy(args, &params, sizeof(params)); /* the runtime reads it before it returns */
    return td_cuda_check(
        cudaLaunchKernel(address_of(kernel), grid, block, args, shape.shared_bytes, stream),
        "cudaLaunchKernel");
}

td_status_t td_cuda_launch_embed(cudaStream_t stream, const td_cuda_embed_t *p, uint32_t rows)
{
    return launch(stream, td_cuda_embed, p, (shape_t){rows, 1, ROW_THREADS, 0});
}

td_status_t td_cuda_launch_norm(cudaStream_t stream, const td_cuda_norm_t *p, uint32_t rows)
{
    return launch(stream, td_cuda_norm, p, (shape_t){rows, 1, ROW_THREADS, norm_shared(p->dim)});
}

td_status_t td_cuda_launch_swiglu(cudaStream_t stream, const td_cuda_swiglu_t *p, uint32_t rows)
{
    return launch(stream, td_cuda_swiglu, p,
                  (shape_t){rows, (p->dim + ROW_THREADS - 1) / ROW_THREADS, ROW_THREADS, 0});
}

td_status_t td_cuda_launch_place(cudaStream_t stream, const td_cuda_place_t *p, uint32_t rows)
{
    const uint32_t warps = ROW_THREADS / 32;
    const uint32_t units = p->heads + 2 * p->kv.kv_heads;

    return launch(stream, td_cuda_place, p,
                  (shape_t){rows, (units + warps - 1) / warps, ROW_THREADS, 0});
}

td_status_t td_cuda_launch_merge(cudaStream_t stream, const td_cuda_merge_t *p, uint32_t rows)
{
    return launch(stream, td_cuda_merge, p, (shape_t){rows, 1, ROW_THREADS, 0});
}

td_status_t td_cuda_launch_gather(cudaStream_t stream, const td_cuda_gather_t *p, uint32_t rows)
{
    return launch(stream, td_cuda_gather, p,
                  (shape_t){rows, (p->dim + ROW_THREADS - 1) / ROW_THREADS, ROW_THREADS, 0});
}

td_status_t td_cuda_launch_gather_acts(cudaStream_t stream, const td_cuda_gather_acts_t *p,
                                       uint32_t rows)
{
    const uint32_t elements = ROW_THREADS * 4;

    return launch(stream, td_cuda_gather_acts, p,
                  (shape_t){rows, (p->dim + elements - 1) / elements, ROW_THREADS, 0});
}

td_status_t td_cuda_launch_attention(cudaStream_t stream, bool many, const td_cuda_attention_t *p,
                                     uint32_t items)
{
    const attention_kernels_t *kernels = find_attention(p->kv.head_dim);
    const uint32_t queries = many ? TD_CUDA_MANY_QUERIES : TD_CUDA_FEW_QUERIES;

    TD_ASSERT(kernels != NULL);
    return launch(stream, many ? kernels->many : kernels->few, p,
                  (shape_t){items, p->kv.kv_heads,
                            many ? TD_CUDA_MANY_THREADS : TD_CUDA_FEW_THREADS,
                            td_cuda_attention_shared(p->kv.head_dim, queries)});
}

td_status_t td_cuda_launch_product(cudaStream_t stream, const td_cuda_product_t *p)
{
    const td_cuda_matrix_t *w = &p->w[0];
    const product_kernels_t *kernels =
        w->form == TD_CUDA_NIBBLE ? &nibbles[w->wide] : &others[w->form];
    const bool many = p->rows > FEW_ROWS_MAX;
    const uint32_t rows = TD_CUDA_ROW_TILE * (many ? TD_CUDA_ROW_TILES : 1);
    const uint32_t warps = many ? TD_CUDA_MANY_WARPS : TD_CUDA_FEW_WARPS;
    uint32_t pairs = 0;

    for (uint32_t i = 0; i < p->count; i++) {
        TD_ASSERT(p->w[i].form == w->form && p->w[i].wide == w->wide &&
                  p->w[i].inputs == w->inputs);
        pairs += td_cuda_pairs(&p->w[i]);
    }
    return launch(stream, many ? kernels->many : kernels->few, p,
                  (shape_t){(pairs + warps - 1) / warps, (p->rows + rows - 1) / rows, warps * 32,
                            td_cuda_product_shared(w->form, w->wide, many)});
}

td_status_t td_cuda_launch_move(cudaStream_t stream, const td_cuda_move_t *p, uint32_t blocks)
{
    return launch(
        stream, td_cuda_move, p,
        (shape_t){blocks, (uint32_t)((p->bytes + MOVE_BYTES - 1) / MOVE_BYTES), ROW_THREADS, 0});
}

td_status_t td_cuda_launch_draw(cudaStream_t stream, const td_cuda_draw_t *p, uint32_t rows)
{
    return launch(stream, td_cuda_draw, p, (shape_t){rows, 1, DRAW_THREADS, 0});
}

td_cuda_kv_t td_cuda_kv_of(const td_kv_layout_t *l, uint8_t *pool)
{
    return (td_cuda_kv_t){
        .pool = pool,
        .block_bytes = td_kv_block_bytes(l),
        .half_bytes = td_kv_half_bytes(l),
        .values_bytes = td_kv_values_bytes(l),
        .row_bytes = (uint32_t)td_kv_row_bytes(l),
        .block_tokens = l->block_tokens,
        .head_dim = l->head_dim,
        .kv_heads = l->kv_heads,
        .codec = (uint32_t)l->codec,
    };
}

/* Runs kernels once over small shapes in a build that tells ThreadSanitizer about the device's
 * threads: what one thread writes and another touches without a barrier between is reported,
 * whatever order the threads ran in. Results are compared elsewhere.
 *
 * usage: race [KERNELS]: those whose name begins so. Exit code 0, or the sanitizer's */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cuda_runtime_api.h>

#include "common/base/td_base.h"
#include "common/model/cuda/td_cuda_launch.h"

enum { ROWS = 19, DIM = 160, OUTPUTS = 80, HEADS = 4, KV_HEADS = 2, BLOCKS = 8, BYTES = 1 << 20 };

static uint64_t seed = 1;

static void *device(size_t bytes, float scale)
{
    void *address = NULL;
    float *values = calloc(bytes / 4 + 1, sizeof(*values));

    TD_ASSERT(values != NULL && cudaMalloc(&address, bytes) == cudaSuccess);
    for (size_t i = 0; i < bytes / 4; i++) {
        seed = seed * 6364136223846793005ull + 1442695040888963407ull;
        values[i] = ((float)(seed >> 40) * 0x1p-23f - 1.0f) * scale;
    }
    TD_ASSERT(cudaMemcpyAsync(address, values, bytes, cudaMemcpyHostToDevice, NULL) == cudaSuccess);
    free(values);
    return address;
}

static uint32_t *indexes(const uint32_t *values, size_t count)
{
    uint32_t *address = device(count * sizeof(*address), 0);
    TD_ASSERT(cudaMemcpyAsync(address, values, count * sizeof(*values), cudaMemcpyHostToDevice,
                              NULL) == cudaSuccess);
    return address;
}

static td_cuda_acts_t acts(void)
{
    return (td_cuda_acts_t){.high = device(ROWS * 256, 1),
                            .low = device(ROWS * 256, 1),
                            .scale = device(ROWS * 256, 1),
                            .sum = device(ROWS * 256, 1),
                            .stride = 256};
}

static td_status_t race_product(void)
{
    for (uint32_t form = TD_CUDA_NIBBLE; form <= TD_CUDA_BF16; form++) {
        for (uint32_t wide = 0; wide < (form == TD_CUDA_NIBBLE ? 2u : 1u); wide++) {
            for (uint32_t rows = 3; rows <= ROWS; rows += 16) {
                td_cuda_product_t p = {.count = 1,
                                       .rows = rows,
                                       .acts = acts(),
                                       .f32 = device(sizeof(float) * ROWS * DIM, 1),
                                       .f32_stride = DIM};
                p.w[0] = (td_cuda_matrix_t){.bytes = device(BYTES, 1),
                                            .pair_bytes = form == TD_CUDA_NIBBLE ? 5 * 320
                                                          : form == TD_CUDA_BYTE ? 5 * 544
                                                          : form == TD_CUDA_F32  ? DIM * 64
                                                                                 : DIM * 32,
                                            .outputs = OUTPUTS,
                                            .inputs = DIM,
                                            .form = form,
                                            .wide = form == TD_CUDA_BYTE ? 1 : wide};
                p.y[0] = device(sizeof(float) * ROWS * OUTPUTS, 1);
                TD_TRY(td_cuda_launch_init(0, 64, 256));
                TD_TRY(td_cuda_launch_product(NULL, &p));
            }
        }
    }
    return TD_OK;
}

static td_status_t race_rows(void)
{
    const td_cuda_quantise_t quantise = {.int8 = acts(), .int16 = acts(), .limit16 = 32767};
    const size_t bytes = sizeof(float) * ROWS * DIM;
    const td_cuda_norm_t norm = {.x = device(bytes, 1),
                                 .y = device(bytes, 1),
                                 .weight = device(bytes, 1),
                                 .out = device(bytes, 1),
                                 .dim = DIM,
                                 .eps = 1e-5f,
                                 .quantise = quantise};
    const td_cuda_swiglu_t swiglu = {
        .gate = device(bytes, 1), .up = device(bytes, 1), .dim = DIM, .quantise = quantise};

    const td_cuda_gather_t gather = {
        .pieces = {{device(bytes, 1), 0, DIM / 2}, {device(bytes, 1), DIM / 2, DIM - DIM / 2}},
        .count = 2,
        .dim = DIM,
        .out = device(bytes, 1),
        .quantise = quantise};
    td_cuda_gather_acts_t parts = {
        .pieces = {{acts(), 0}}, .count = 1, .dim = DIM, .wide = 1, .out = acts()};

    parts.pieces[0].acts.stride = DIM;
    TD_TRY(td_cuda_launch_norm(NULL, &norm, ROWS));
    TD_TRY(td_cuda_launch_swiglu(NULL, &swiglu, ROWS));
    TD_TRY(td_cuda_launch_gather(NULL, &gather, ROWS));
    return td_cuda_launch_gather_acts(NULL, &parts, ROWS);
}

static td_status_t race_attention(void)
{
    static const uint32_t table[BLOCKS] = {3, 1, 7, 0, 2, 6, 5, 4};
    static const uint32_t rows[ROWS + 1] = {0, 1, 2, 3, 4, 5, 6, 7, 0, 1,
                                            2, 3, 4, 5, 6, 7, 0, 1, 2};
    static const uint32_t dims[] = {64, 80};
    uint32_t begin[ROWS + 1];
    uint32_t counts[ROWS];

    for (uint32_t i = 0; i <= ROWS; i++) {
        begin[i] = i;
    }
    for (uint32_t i = 0; i < ROWS; i++) {
        counts[i] = 2;
    }
    for (uint32_t d = 0; d < 2 * TD_ARRAY_LEN(dims); d++) {
        const bool many = d % 2 == 1;
        const td_kv_layout_t kv = {.layers = 1,
                                   .kv_heads = KV_HEADS,
                                   .head_dim = dims[d / 2],
                                   .block_tokens = 16,
                                   .codec = many ? TD_KV_I8 : TD_KV_F16};
        const size_t q_bytes = sizeof(float) * ROWS * HEADS * kv.head_dim;
        td_cuda_item_t item = {.rows = many ? 11 : 3, .position = 66, .end = UINT32_MAX};
        td_cuda_item_t *items = device(sizeof(item), 0);
        const td_cuda_place_t place = {.kv = td_cuda_kv_of(&kv, device(BYTES, 1e-3f)),
                                       .q = device(q_bytes, 1),
                                       .k = device(q_bytes, 1),
                                       .v = device(q_bytes, 1),
                                       .rope = device(q_bytes, 1),
                                       .slot = indexes(begin, ROWS),
                                       .blocks = indexes(rows, ROWS),
                                       .blocks_begin = indexes(begin, ROWS + 1),
                                       .heads = HEADS,
                                       .rope_dim = kv.head_dim};
        td_cuda_attention_t p = {.kv = place.kv,
                                 .items = items,
                                 .tables = indexes(table, BLOCKS),
                                 .q = place.q,
                                 .out = device(q_bytes, 1),
                                 .heads = HEADS,
                                 .group = HEADS / KV_HEADS,
                                 .scale = 0.1f};
        const td_cuda_merge_t merge = {.parts = device(2 * q_bytes + 4096, 1),
                                       .part_begin = indexes(begin, ROWS),
                                       .part_count = indexes(counts, ROWS),
                                       .attn = device(q_bytes, 1),
                                       .heads = HEADS,
                                       .head_dim = kv.head_dim,
                                       .quantise = {.int8 = {.high = device(BYTES, 1),
                                                             .low = device(BYTES, 1),
                                                             .scale = device(BYTES, 1),
                                                             .sum = device(BYTES, 1),
                                                             .stride = 512}}};
        TD_TRY(td_cuda_launch_init(0, kv.head_dim, 256));
        TD_TRY(td_cuda_launch_place(NULL, &place, 3));
        TD_ASSERT(cudaMemcpyAsync(items, &item, sizeof(item), cudaMemcpyHostToDevice, NULL) ==
                  cudaSuccess);
        TD_TRY(td_cuda_launch_attention(NULL, many, &p, 1));
        TD_TRY(td_cuda_launch_merge(NULL, &merge, 5));
    }
    return TD_OK;
}

static td_status_t race_blocks(void)
{
    static const uint32_t list[] = {2, 0, 5};
    const float temperatures[] = {0.0f, 1.0f};
    td_cuda_move_t move = {.pool = device(BYTES, 1),
                           .block_bytes = 4096 + 64,
                           .blocks = indexes(list, 3),
                           .staging = device(BYTES, 1),
                           .bytes = 4096 + 64};
    td_cuda_draw_t draw = {.logits = device(2 * 700 * sizeof(float), 1),
                           .temperature = device(sizeof(temperatures), 0),
                           .log_min_p = device(2 * sizeof(double), 0),
                           .key = device(2 * sizeof(uint64_t), 0),
                           .token = device(2 * sizeof(uint32_t), 0),
                           .vocab = 700};

    TD_TRY(td_cuda_launch_move(NULL, &move, 3));
    move.to_pool = 1;
    TD_TRY(td_cuda_launch_move(NULL, &move, 3));
    return td_cuda_launch_draw(NULL, &draw, 2);
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        td_status_t (*run)(void);
    } races[] = {
        {"products", race_product},
        {"rows", race_rows},
        {"attention", race_attention},
        {"blocks", race_blocks},
    };

    for (size_t i = 0; i < TD_ARRAY_LEN(races); i++) {
        if (argc > 1 && strncmp(races[i].name, argv[1], strlen(argv[1])) != 0) {
            continue;
        }
        if (races[i].run() != TD_OK || cudaStreamSynchronize(NULL) != cudaSuccess) {
            (void)printf("%s: not run\n", races[i].name);
            return 1;
        }
        (void)printf("%s: no race\n", races[i].name);
    }
    return 0;
}

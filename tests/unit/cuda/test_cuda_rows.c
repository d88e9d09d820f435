/* What the device computes row by row: the CPU's bits, in every order of a block's threads. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include "common/model/td_sampler.h"
#include "tests/unit/cuda/test_cuda_rig.h"

enum { DIM_MAX = 1536, ROWS = 5 };

/* Quantised rows of the device, and of the CPU. */
typedef struct acts {
    td_cuda_acts_t device;
    uint32_t dim;
} acts_t;

static void acts_init(acts_t *a, uint32_t dim)
{
    a->dim = dim;
    a->device.stride = (dim + 127) / 128 * 128;
    a->device.high = device_alloc((size_t)ROWS * a->device.stride);
    a->device.low = device_alloc((size_t)ROWS * a->device.stride);
    a->device.scale = device_alloc((size_t)ROWS * a->device.stride / 32 * 4);
    a->device.sum = device_alloc((size_t)ROWS * a->device.stride / 32 * 4);
}

static void acts_fini(acts_t *a)
{
    device_free(a->device.high);
    device_free(a->device.low);
    device_free(a->device.scale);
    device_free(a->device.sum);
}

static void assert_quantised(const acts_t *a, bool wide, const float *x)
{
    int8_t q8[DIM_MAX];
    int16_t q16[DIM_MAX];
    float scale[DIM_MAX / 32];
    float sum[DIM_MAX / 32];
    int8_t high[DIM_MAX];
    uint8_t low[DIM_MAX];
    float got[DIM_MAX / 32];

    for (uint32_t r = 0; r < ROWS; r++) {
        if (wide) {
            td_cpu_portable_ops.quantise16(x + (size_t)r * a->dim, a->dim, TD_CPU_INT16_MAX, q16,
                                           scale, sum);
        } else {
            td_cpu_portable_ops.quantise8(x + (size_t)r * a->dim, a->dim, q8, scale, sum);
        }
        device_get(high, a->device.high + (size_t)r * a->device.stride, a->dim);
        device_get(low, a->device.low + (size_t)r * a->device.stride, a->dim);
        for (uint32_t k = 0; k < a->dim; k++) {
            assert_int_equal(wide ? 256 * high[k] + low[k] : high[k], wide ? q16[k] : q8[k]);
        }
        device_get(got, a->device.scale + (size_t)r * (a->device.stride / 32), a->dim / 32 * 4);
        cuda_assert_same_bits(scale, got, a->dim / 32, "scale");
        device_get(got, a->device.sum + (size_t)r * (a->device.stride / 32), a->dim / 32 * 4);
        cuda_assert_same_bits(sum, got, a->dim / 32, "sum");
    }
}

static void fill(float *x, uint32_t dim, uint64_t seed)
{
    for (uint32_t i = 0; i < ROWS * dim; i++) {
        x[i] = i / 32 % 7 == 3 ? 0.0f : cuda_random(&seed, i / dim % 2 == 0 ? 1e-3f : 300.0f);
    }
}

static void check_norm(uint32_t dim)
{
    static float x[ROWS * DIM_MAX];
    static float y[ROWS * DIM_MAX];
    static float want[ROWS * DIM_MAX];
    static float got[ROWS * DIM_MAX];
    float weight[DIM_MAX];
    const size_t bytes = (size_t)ROWS * dim * sizeof(float);
    uint64_t seed = 4;
    acts_t a8;
    acts_t a16;

    fill(x, dim, 1);
    fill(y, dim, 2);
    for (uint32_t i = 0; i < dim; i++) {
        weight[i] = cuda_random(&seed, 2.0f);
    }
    acts_init(&a8, dim);
    acts_init(&a16, dim);
    for (uint32_t order = 0; order < cuda_orders(); order++) {
        td_cuda_norm_t p = {
            .x = device_copy(x, bytes),
            .y = device_copy(y, bytes),
            .weight = device_copy(weight, dim * sizeof(float)),
            .out = device_alloc(bytes),
            .dim = dim,
            .eps = 1e-5f,
            .quantise = {.int8 = a8.device, .int16 = a16.device, .limit16 = TD_CPU_INT16_MAX}};
        cuda_set_order(order);
        assert_int_equal(td_cuda_launch_norm(NULL, &p, ROWS), TD_OK);
        for (uint32_t r = 0; r < ROWS; r++) {
            memcpy(want + (size_t)r * dim, x + (size_t)r * dim, dim * sizeof(float));
            td_cpu_portable_ops.add(want + (size_t)r * dim, y + (size_t)r * dim, dim);
        }
        device_get(got, p.x, bytes);
        cuda_assert_same_bits(want, got, (size_t)ROWS * dim, "residual");
        for (uint32_t r = 0; r < ROWS; r++) {
            td_cpu_portable_ops.rms_norm(got + (size_t)r * dim, weight, dim, 1e-5f,
                                         want + (size_t)r * dim);
        }
        device_get(got, p.out, bytes);
        cuda_assert_same_bits(want, got, (size_t)ROWS * dim, "norm");
        assert_quantised(&a8, false, got);
        assert_quantised(&a16, true, got);
        device_free(p.x);
        device_free(p.y);
        device_free(p.weight);
        device_free(p.out);
    }
    acts_fini(&a8);
    acts_fini(&a16);
}

static void test_norm_adds_and_quantises_like_the_cpu(void **state)
{
    (void)state;
    check_norm(32);
    check_norm(576);
    check_norm(DIM_MAX);
}

/* The rows that want logits: any rows, without anything to add. */
static void test_norm_picks_rows(void **state)
{
    static const uint32_t pick[] = {3, 0};
    static float x[ROWS * 64];
    float weight[64];
    float want[64];
    float got[2 * 64];
    td_cuda_norm_t p = {.dim = 64, .eps = 1e-5f};

    (void)state;
    fill(x, 64, 9);
    for (int i = 0; i < 64; i++) {
        weight[i] = 1.0f + (float)i;
    }
    p.x = device_copy(x, sizeof(x));
    p.weight = device_copy(weight, sizeof(weight));
    p.pick = device_copy(pick, sizeof(pick));
    p.out = device_alloc(sizeof(got));
    assert_int_equal(td_cuda_launch_norm(NULL, &p, 2), TD_OK);
    device_get(got, p.out, sizeof(got));
    for (int i = 0; i < 2; i++) {
        td_cpu_portable_ops.rms_norm(x + (size_t)pick[i] * 64, weight, 64, 1e-5f, want);
        cuda_assert_same_bits(want, got + (size_t)i * 64, 64, "picked");
    }
    device_free(p.x);
    device_free(p.weight);
    device_free(p.pick);
    device_free(p.out);
}

static void check_swiglu(uint32_t dim, bool quantise)
{
    static float gate[ROWS * DIM_MAX];
    static float up[ROWS * DIM_MAX];
    static float got[ROWS * DIM_MAX];
    const size_t bytes = (size_t)ROWS * dim * sizeof(float);
    acts_t a = {.dim = 0};

    acts_init(&a, dim);
    for (uint32_t order = 0; order < cuda_orders(); order++) {
        td_cuda_swiglu_t p = {.dim = dim};
        fill(gate, dim, 5);
        fill(up, dim, 6);
        gate[0] = -200.0f; /* beyond what exp takes */
        gate[1] = 200.0f;
        p.gate = device_copy(gate, bytes);
        p.up = device_copy(up, bytes);
        if (quantise) {
            p.quantise = (td_cuda_quantise_t){.int16 = a.device, .limit16 = TD_CPU_INT16_MAX};
        }
        cuda_set_order(order);
        assert_int_equal(td_cuda_launch_swiglu(NULL, &p, ROWS), TD_OK);
        td_cpu_portable_ops.swiglu(gate, up, ROWS * dim);
        device_get(got, p.gate, bytes);
        cuda_assert_same_bits(gate, got, (size_t)ROWS * dim, "swiglu");
        if (quantise) {
            assert_quantised(&a, true, gate);
        }
        device_free(p.gate);
        device_free(p.up);
    }
    acts_fini(&a);
}

static void test_swiglu_has_the_bits_of_the_cpu(void **state)
{
    (void)state;
    check_swiglu(96, true);
    check_swiglu(DIM_MAX, true);
    check_swiglu(200, false); /* floats need no whole groups */
}

/* --- rotary and KV write ------------------------------------------------------------------------
 */

enum { HEADS = 6, KV_HEADS = 2, HEAD_DIM_MAX = 256, BLOCKS = 7, LAYERS = 2 };

static void check_place(td_kv_codec_t codec, uint32_t head_dim, uint32_t rope_dim,
                        uint32_t block_tokens)
{
    static float q[ROWS * HEADS * HEAD_DIM_MAX];
    static float k[ROWS * KV_HEADS * HEAD_DIM_MAX];
    static float v[ROWS * KV_HEADS * HEAD_DIM_MAX];
    static float got[ROWS * HEADS * HEAD_DIM_MAX];
    static float rope[ROWS * HEAD_DIM_MAX];
    /* Rows 1 and 3 are on several paths. */
    static const uint32_t begin[ROWS + 1] = {0, 1, 3, 4, 7, 8};
    static const uint32_t blocks[] = {2, 0, 5, 1, 3, 4, 6, 2};
    static const uint32_t host_blocks[] = {1, 6, 0, 3, 2, 5, 4, 1};
    static const uint32_t slot[ROWS] = {0, 7, 3, 5, 6};
    const td_kv_layout_t kv = {.layers = LAYERS,
                               .kv_heads = KV_HEADS,
                               .head_dim = head_dim,
                               .block_tokens = block_tokens,
                               .codec = codec};
    const size_t pool_bytes = BLOCKS * td_kv_block_bytes(&kv);
    uint8_t *want_pool = malloc(pool_bytes);
    uint8_t *got_pool = malloc(pool_bytes);
    /* The host's blocks have these heads among others. */
    const td_kv_layout_t whole = {.layers = LAYERS,
                                  .kv_heads = KV_HEADS + 3,
                                  .head_dim = head_dim,
                                  .block_tokens = block_tokens,
                                  .codec = codec};
    const size_t whole_bytes = BLOCKS * td_kv_block_bytes(&whole);
    uint8_t *want_whole = malloc(whole_bytes);
    uint8_t *got_whole = malloc(whole_bytes);
    uint64_t seed = 6;
    td_cuda_place_t p = {.layer = 1, .host_head = 2, .heads = HEADS, .rope_dim = rope_dim};

    for (uint32_t i = 0; i < ROWS * HEADS * head_dim; i++) {
        q[i] = cuda_random(&seed, 3.0f);
    }
    for (uint32_t i = 0; i < ROWS * KV_HEADS * head_dim; i++) {
        k[i] = cuda_random(&seed, i / head_dim % 3 == 1 ? 1e-4f : 30.0f);
        v[i] = i / head_dim == 2 ? 0.0f : cuda_random(&seed, 1.0f);
    }
    for (uint32_t i = 0; i < ROWS * rope_dim; i++) {
        rope[i] = cuda_random(&seed, 1.0f);
    }
    memset(want_pool, 0xff, pool_bytes);
    memset(want_whole, 0xff, whole_bytes);
    p.host = td_cuda_kv_of(&whole, device_alloc(whole_bytes));
    p.host_blocks = device_copy(host_blocks, sizeof(host_blocks));
    p.kv = td_cuda_kv_of(&kv, device_alloc(pool_bytes));
    p.q = device_copy(q, (size_t)ROWS * HEADS * head_dim * sizeof(float));
    p.k = device_copy(k, (size_t)ROWS * KV_HEADS * head_dim * sizeof(float));
    p.v = device_copy(v, (size_t)ROWS * KV_HEADS * head_dim * sizeof(float));
    p.rope = device_copy(rope, (size_t)ROWS * rope_dim * sizeof(float));
    p.slot = device_copy(slot, sizeof(slot));
    p.blocks = device_copy(blocks, sizeof(blocks));
    p.blocks_begin = device_copy(begin, sizeof(begin));
    assert_int_equal(td_cuda_launch_place(NULL, &p, ROWS), TD_OK);
    for (uint32_t r = 0; r < ROWS; r++) {
        for (uint32_t h = 0; h < HEADS + KV_HEADS; h++) {
            float *head = h < HEADS ? q + ((size_t)r * HEADS + h) * head_dim
                                    : k + ((size_t)r * KV_HEADS + h - HEADS) * head_dim;
            td_cpu_portable_ops.rotate(head, rope + (size_t)r * rope_dim, rope_dim);
        }
        for (uint32_t b = begin[r]; b < begin[r + 1]; b++) {
            for (uint32_t h = 0; h < 2 * KV_HEADS; h++) {
                uint8_t *block = want_pool + blocks[b] * td_kv_block_bytes(&kv);
                const float *row = (h % 2 == 0 ? k : v) + ((size_t)r * KV_HEADS + h / 2) * head_dim;
                td_cpu_portable_ops.kv_encode(
                    codec, row, head_dim, block + td_kv_offset(&kv, 1, h % 2 == 1, h / 2, slot[r]),
                    block + td_kv_scale_offset(&kv, 1, h % 2 == 1, h / 2, slot[r]));
                block = want_whole + host_blocks[b] * td_kv_block_bytes(&whole);
                td_cpu_portable_ops.kv_encode(
                    codec, row, head_dim,
                    block + td_kv_offset(&whole, 1, h % 2 == 1, 2 + h / 2, slot[r]),
                    block + td_kv_scale_offset(&whole, 1, h % 2 == 1, 2 + h / 2, slot[r]));
            }
        }
    }
    device_get(got, p.q, (size_t)ROWS * HEADS * head_dim * sizeof(float));
    cuda_assert_same_bits(q, got, (size_t)ROWS * HEADS * head_dim, "rotary");
    device_get(got_pool, p.kv.pool, pool_bytes);
    assert_memory_equal(want_pool, got_pool, pool_bytes);
    device_get(got_whole, p.host.pool, whole_bytes);
    assert_memory_equal(want_whole, got_whole, whole_bytes);
    device_free(p.kv.pool);
    device_free(p.host.pool);
    device_free(p.host_blocks);
    device_free(p.q);
    device_free(p.k);
    device_free(p.v);
    device_free(p.rope);
    device_free(p.slot);
    device_free(p.blocks);
    device_free(p.blocks_begin);
    free(want_pool);
    free(got_pool);
    free(want_whole);
    free(got_whole);
}

static void test_rotary_and_kv_write_have_the_bits_of_the_cpu(void **state)
{
    static const uint32_t head_dims[] = {16, 64, 80, 96, 128, 256};

    (void)state;
    for (uint32_t codec = 0; codec < TD_KV_CODECS; codec++) {
        for (size_t d = 0; d < TD_ARRAY_LEN(head_dims); d++) {
            for (uint32_t order = 0; order < cuda_orders(); order++) {
                cuda_set_order(order);
                check_place((td_kv_codec_t)codec, head_dims[d],
                            d % 2 == 0 ? head_dims[d] : head_dims[d] / 2, d % 3 == 0 ? 8 : 32);
            }
        }
    }
}

/* What is no number, too small or too large is stored as the CPU stores it. */
static void test_kv_write_of_what_is_no_number(void **state)
{
    static const float ends[] = {NAN, INFINITY, -INFINITY, 1e-31f, 3e38f, 0.0f};
    enum { DIM = 64 };
    const td_kv_layout_t layouts[] = {
        {.layers = 1, .kv_heads = 1, .head_dim = DIM, .block_tokens = 16, .codec = TD_KV_F8_E4M3},
        {.layers = 1, .kv_heads = 1, .head_dim = DIM, .block_tokens = 16, .codec = TD_KV_I8},
        {.layers = 1, .kv_heads = 1, .head_dim = DIM, .block_tokens = 16, .codec = TD_KV_F4_E2M1},
    };
    static const uint32_t zero[2] = {0, 1};

    (void)state;
    for (size_t l = 0; l < TD_ARRAY_LEN(layouts); l++) {
        const td_kv_layout_t *kv = &layouts[l];
        for (size_t e = 0; e < TD_ARRAY_LEN(ends); e++) {
            float row[DIM] = {0};
            uint8_t want[4096];
            uint8_t got[4096];
            td_cuda_place_t p = {.heads = 0, .rope_dim = 0};
            uint64_t seed = 8;
            for (int i = 0; i < DIM; i++) {
                row[i] = e == 3 ? 1e-32f : cuda_random(&seed, 1.0f);
            }
            row[37] = ends[e];
            memset(want, 0xff, sizeof(want));
            td_kv_row_encode(kv->codec, row, DIM, want + td_kv_offset(kv, 0, true, 0, 0),
                             want + td_kv_scale_offset(kv, 0, true, 0, 0));
            td_kv_row_encode(kv->codec, row, DIM, want + td_kv_offset(kv, 0, false, 0, 0),
                             want + td_kv_scale_offset(kv, 0, false, 0, 0));
            p.kv = td_cuda_kv_of(kv, device_alloc(td_kv_block_bytes(kv)));
            p.k = device_copy(row, sizeof(row));
            p.v = p.k;
            p.rope = p.k;
            p.slot = device_copy(zero, sizeof(zero));
            p.blocks = p.slot;
            p.blocks_begin = p.slot;
            assert_int_equal(td_cuda_launch_place(NULL, &p, 1), TD_OK);
            device_get(got, p.kv.pool, td_kv_block_bytes(kv));
            assert_memory_equal(want, got, td_kv_block_bytes(kv));
            device_free(p.kv.pool);
            device_free(p.k);
            device_free(p.slot);
        }
    }
}

/* --- embedding, moving, drawing ------------------------------------------------------------------
 */

static void test_embedding_is_the_files_numbers(void **state)
{
    static const td_gguf_type_t types[] = {TD_GGUF_F32,  TD_GGUF_F16,  TD_GGUF_BF16,
                                           TD_GGUF_Q8_0, TD_GGUF_Q4_0, TD_GGUF_Q4_1};
    enum { INPUTS = 96, TOKENS = 37 };
    static const uint32_t tokens[ROWS] = {0, 36, 15, 16, 17};

    (void)state;
    for (size_t i = 0; i < 2 * TD_ARRAY_LEN(types); i++) {
        tiny_t bytes = {.random = 31};
        double values[INPUTS * TOKENS];
        float want[INPUTS];
        float got[ROWS * INPUTS];
        uint8_t *packed = NULL;
        td_cpu_matrix_t host;
        td_arena_t *arena = td_arena_create();
        td_gguf_tensor_t tensor = {
            .name = "e", .dims = {INPUTS, TOKENS, 1, 1}, .type = types[i / 2]};
        td_cuda_embed_t p = {.x = device_alloc(sizeof(got))};
        for (size_t j = 0; j < TD_ARRAY_LEN(values); j++) {
            values[j] = tiny_random(&bytes);
        }
        tiny_put_values(&bytes, types[i / 2], values, TD_ARRAY_LEN(values));
        tensor.bytes = bytes.bytes;
        tensor.byte_count = bytes.len;
        assert_int_equal(td_cpu_pack(&tensor, i % 2 == 0, arena, &host), TD_OK);
        p.w = td_cuda_pack_plan(&host);
        packed = malloc(td_cuda_pairs(&p.w) * p.w.pair_bytes);
        td_cuda_pack_pairs(&host, &p.w, 0, td_cuda_pairs(&p.w), packed);
        p.w.bytes = device_copy(packed, td_cuda_pairs(&p.w) * p.w.pair_bytes);
        p.tokens = device_copy(tokens, sizeof(tokens));
        /* In two parts of the vocabulary, as devices that share it have them. */
        for (uint32_t part = 0; part < 2; part++) {
            td_cuda_embed_t own = p;
            own.first = part * 16;
            own.w.bytes = p.w.bytes + part * p.w.pair_bytes;
            own.w.outputs = part == 0 ? 16 : TOKENS - 16;
            assert_int_equal(td_cuda_launch_embed(NULL, &own, ROWS), TD_OK);
        }
        device_get(got, p.x, sizeof(got));
        for (int r = 0; r < ROWS; r++) {
            td_cpu_unpack_row(&host, tokens[r], want);
            cuda_assert_same_bits(want, got + (size_t)r * INPUTS, INPUTS, "embedding");
        }
        device_free(p.x);
        device_free(p.w.bytes);
        device_free(p.tokens);
        free(packed);
        free(bytes.bytes);
        td_arena_destroy(arena);
    }
}

static void test_blocks_move_out_and_back(void **state)
{
    enum { BLOCK = 3 * 4096 + 64, COUNT = 9, OFFSET = 1024, BYTES = 4096 + 4096 + 48 };
    static const uint32_t list[] = {7, 0, 3};
    static uint8_t pool[COUNT * BLOCK];
    static uint8_t got[COUNT * BLOCK];
    static uint8_t staged[3 * BYTES];
    td_cuda_move_t p = {.block_bytes = BLOCK, .offset = OFFSET, .bytes = BYTES};

    (void)state;
    for (size_t i = 0; i < sizeof(pool); i++) {
        pool[i] = (uint8_t)(i * 7 + i / 4096);
    }
    p.pool = device_copy(pool, sizeof(pool));
    p.blocks = device_copy(list, sizeof(list));
    p.staging = device_alloc(sizeof(staged));
    assert_int_equal(td_cuda_launch_move(NULL, &p, 3), TD_OK);
    device_get(staged, p.staging, sizeof(staged));
    for (int i = 0; i < 3; i++) {
        assert_memory_equal(staged + (size_t)i * BYTES, pool + (size_t)list[i] * BLOCK + OFFSET,
                            BYTES);
        memset(staged + (size_t)i * BYTES, 0x40 + i, BYTES);
        memset(pool + (size_t)list[i] * BLOCK + OFFSET, 0x40 + i, BYTES);
    }
    device_put(p.staging, staged, sizeof(staged));
    p.to_pool = 1;
    assert_int_equal(td_cuda_launch_move(NULL, &p, 3), TD_OK);
    device_get(got, p.pool, sizeof(got));
    assert_memory_equal(pool, got, sizeof(pool));
    device_free(p.pool);
    device_free(p.blocks);
    device_free(p.staging);
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_norm_adds_and_quantises_like_the_cpu),
    cmocka_unit_test(test_norm_picks_rows),
    cmocka_unit_test(test_swiglu_has_the_bits_of_the_cpu),
    cmocka_unit_test(test_rotary_and_kv_write_have_the_bits_of_the_cpu),
    cmocka_unit_test(test_kv_write_of_what_is_no_number),
    cmocka_unit_test(test_embedding_is_the_files_numbers),
    cmocka_unit_test(test_blocks_move_out_and_back),
};
CUDA_TEST_MAIN(tests)

/* Attention on the device: the CPU's bits for every size of a head, group, block, codec and mask,
 * and however rows are cut into items or contexts into parts. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include "tests/unit/cuda/test_cuda_rig.h"

enum {
    KV_HEADS = 2,
    TOKENS_MAX = 4112,
    GROUP_MAX = 8,
    ROWS_MAX = 40,
    DIM_MAX = 256,
    ITEMS_MAX = 512
};

typedef struct shape {
    uint32_t head_dim;
    uint32_t group;
    uint32_t block_tokens;
    td_kv_codec_t codec;
    td_attention_mask_t mask;
    uint32_t position; /* of the first row */
    uint32_t rows;
} shape_t;

/* A sequence's KV on both sides, queries, and what the CPU makes of them. */
typedef struct rig {
    shape_t s;
    td_kv_layout_t kv;
    uint32_t tokens;
    uint32_t block_count;
    uint32_t blocks[TOKENS_MAX / 8];
    uint8_t *pool;
    td_cuda_attention_t p;
    float *want;
    size_t floats; /* of q, want and out */
} rig_t;

/* What nobody may see is not a number, and blocks that nobody needs are not there. */
static void fill_pool(rig_t *r, uint64_t *seed)
{
    const td_attention_mask_t *mask = &r->s.mask;
    const uint32_t last = r->s.position + r->s.rows - 1;

    for (uint32_t t = 0; t < r->block_count * r->kv.block_tokens; t++) {
        const bool seen = td_attention_next(mask, r->s.position, last, t) == t;
        for (uint32_t h = 0; h < 2 * KV_HEADS; h++) {
            uint8_t *block =
                r->pool + r->blocks[t / r->kv.block_tokens] * td_kv_block_bytes(&r->kv);
            const uint32_t token = t % r->kv.block_tokens;
            float row[DIM_MAX];
            for (uint32_t d = 0; d < r->kv.head_dim; d++) {
                row[d] = seen ? cuda_random(seed, 2.0f) : NAN;
            }
            td_kv_row_encode(r->kv.codec, row, r->kv.head_dim,
                             block + td_kv_offset(&r->kv, 1, h % 2 == 1, h / 2, token),
                             block + td_kv_scale_offset(&r->kv, 1, h % 2 == 1, h / 2, token));
        }
    }
}

static void compute_want(const rig_t *r, const float *q)
{
    const size_t head = r->kv.head_dim;
    td_cpu_scratch_t *scratch = NULL;

    assert_int_equal(td_cpu_scratch_create(r->kv.head_dim, r->s.group, 0, &scratch), TD_OK);
    for (uint32_t h = 0; h < KV_HEADS; h++) {
        for (uint32_t row = 0; row < r->s.rows; row += TD_CPU_TILE_ROWS) {
            const size_t at = ((size_t)row * KV_HEADS + h) * r->s.group * head;
            const td_cpu_attention_t job = {
                .pool = r->pool,
                .kv = &r->kv,
                .blocks = r->blocks,
                .layer = 1,
                .kv_head = h,
                .position = r->s.position + row,
                .rows = TD_MIN(TD_CPU_TILE_ROWS, r->s.rows - row),
                .group = r->s.group,
                .mask = r->s.mask,
                .scale = r->p.scale,
                .q = q + at,
                .out = r->want + at,
                .q_stride = KV_HEADS * r->s.group * head,
                .end = UINT32_MAX,
            };
            td_cpu_portable_ops.attention(&job, scratch);
        }
    }
    td_free(scratch);
}

static void rig_init(rig_t *r, const shape_t *s)
{
    uint64_t seed = 3;
    float *q = NULL;

    *r = (rig_t){.s = *s,
                 .kv = {.layers = 2,
                        .kv_heads = KV_HEADS,
                        .head_dim = s->head_dim,
                        .block_tokens = s->block_tokens,
                        .codec = s->codec},
                 .tokens = s->position + s->rows};
    assert_true(r->tokens <= TOKENS_MAX && s->rows <= ROWS_MAX && s->group <= GROUP_MAX);
    r->block_count = td_kv_blocks_for(&r->kv, r->tokens);
    for (uint32_t i = 0; i < r->block_count; i++) {
        r->blocks[i] = (i * 7 + 3) % r->block_count;
    }
    if (r->block_count % 7 == 0) { /* not a permutation */
        for (uint32_t i = 0; i < r->block_count; i++) {
            r->blocks[i] = r->block_count - 1 - i;
        }
    }
    r->pool = calloc(r->block_count, td_kv_block_bytes(&r->kv));
    r->floats = (size_t)s->rows * KV_HEADS * s->group * s->head_dim;
    q = malloc(r->floats * sizeof(float));
    r->want = malloc(r->floats * sizeof(float));
    assert_true(r->pool != NULL && q != NULL && r->want != NULL);
    fill_pool(r, &seed);
    for (size_t i = 0; i < r->floats; i++) {
        q[i] = cuda_random(&seed, 4.0f);
    }
    r->p = (td_cuda_attention_t){
        .mask = {.kind = (uint32_t)s->mask.kind,
                 .local = s->mask.local,
                 .sinks = s->mask.sinks,
                 .stride = s->mask.stride,
                 .summary = s->mask.summary},
        .layer = 1,
        .heads = KV_HEADS * s->group,
        .group = s->group,
        .scale = 0.25f,
    };
    compute_want(r, q);
    for (uint32_t b = 0; b < r->block_count; b++) {
        if (!td_attention_needs(&s->mask, s->position, b * s->block_tokens,
                                (b + 1) * s->block_tokens)) {
            r->blocks[b] = 1u << 30; /* reading it ends the test */
        }
    }
    r->p.kv =
        td_cuda_kv_of(&r->kv, device_copy(r->pool, r->block_count * td_kv_block_bytes(&r->kv)));
    r->p.tables = device_copy(r->blocks, r->block_count * sizeof(*r->blocks));
    r->p.q = device_copy(q, r->floats * sizeof(float));
    r->p.out = device_alloc(r->floats * sizeof(float));
    free(q);
}

static void rig_fini(rig_t *r)
{
    device_free(r->p.kv.pool);
    device_free(r->p.tables);
    device_free(r->p.q);
    device_free(r->p.out);
    free(r->pool);
    free(r->want);
}

/* Rows cut into items of so many; the result against the CPU's. */
static void check_items(rig_t *r, uint32_t item_rows, bool many, const char *what)
{
    static td_cuda_item_t items[ITEMS_MAX];
    float *got = malloc(r->floats * sizeof(float));
    uint32_t count = 0;

    for (uint32_t row = 0; row < r->s.rows; row += item_rows) {
        items[count++] = (td_cuda_item_t){.row = row,
                                          .rows = TD_MIN(item_rows, r->s.rows - row),
                                          .position = r->s.position + row,
                                          .end = UINT32_MAX};
    }
    r->p.items = device_copy(items, count * sizeof(*items));
    assert_int_equal(td_cuda_launch_init(0, r->p.kv.head_dim, 64), TD_OK);
    assert_int_equal(td_cuda_launch_attention(NULL, many, &r->p, count), TD_OK);
    device_get(got, r->p.out, r->floats * sizeof(float));
    cuda_assert_same_bits(r->want, got, r->floats, what);
    device_free(r->p.items);
    free(got);
}

/* Each span an item of its own, the last one first, and merged afterwards. */
static void check_parts(rig_t *r, uint32_t item_rows, bool many)
{
    static td_cuda_item_t items[ITEMS_MAX];
    uint32_t begin[ROWS_MAX];
    uint32_t merged[ROWS_MAX];
    float *got = malloc(r->floats * sizeof(float));
    const size_t part_bytes =
        (size_t)r->p.heads * (TD_CUDA_PART_ELEMENTS + r->s.head_dim) * sizeof(float);
    uint32_t count = 0;
    uint32_t parts = 0;
    td_cuda_merge_t m = {.attn = r->p.out, .heads = r->p.heads, .head_dim = r->s.head_dim};

    for (uint32_t row = 0; row < r->s.rows; row += item_rows) {
        const uint32_t rows = TD_MIN(item_rows, r->s.rows - row);
        const uint32_t first = r->s.position + row;
        const uint32_t last = first + rows - 1;
        uint32_t spans = 0;
        uint32_t span = 0;
        const uint32_t item = count;
        for (uint32_t at = 0;; at = span + TD_CUDA_SPAN) {
            at = td_attention_next(&r->s.mask, first, last, at);
            if (at == TD_ATTENTION_NONE) {
                break;
            }
            span = at / TD_CUDA_SPAN * TD_CUDA_SPAN;
            assert_true(count < ITEMS_MAX);
            items[count++] = (td_cuda_item_t){.row = row,
                                              .rows = rows,
                                              .position = first,
                                              .begin = span,
                                              .end = span + TD_CUDA_SPAN,
                                              .part = parts + spans++};
        }
        for (uint32_t i = item; i < count; i++) {
            items[i].part_stride = spans;
        }
        for (uint32_t i = 0; i < rows; i++) {
            begin[row + i] = parts + i * spans;
            merged[row + i] = spans - (first + i < span ? 1 : 0);
        }
        parts += rows * spans;
    }
    for (uint32_t i = 0; i < count / 2; i++) {
        const td_cuda_item_t other = items[i];
        items[i] = items[count - 1 - i];
        items[count - 1 - i] = other;
    }
    r->p.items = device_copy(items, count * sizeof(*items));
    r->p.parts = device_alloc(parts * part_bytes);
    assert_int_equal(cudaMemsetAsync(r->p.out, 0xff, r->floats * sizeof(float), NULL), cudaSuccess);
    assert_int_equal(td_cuda_launch_init(0, r->p.kv.head_dim, 64), TD_OK);
    assert_int_equal(td_cuda_launch_attention(NULL, many, &r->p, count), TD_OK);
    m.parts = r->p.parts;
    m.part_begin = device_copy(begin, r->s.rows * sizeof(*begin));
    m.part_count = device_copy(merged, r->s.rows * sizeof(*merged));
    assert_int_equal(td_cuda_launch_merge(NULL, &m, r->s.rows), TD_OK);
    device_get(got, r->p.out, r->floats * sizeof(float));
    cuda_assert_same_bits(r->want, got, r->floats, "merged parts");
    device_free(r->p.items);
    device_free(r->p.parts);
    device_free(m.part_begin);
    device_free(m.part_count);
    r->p.parts = NULL;
    free(got);
}

/* Few queries a row at a time and as many as fit, and many: all the same bits. */
static void check_shape(const shape_t *s)
{
    rig_t r;

    rig_init(&r, s);
    check_items(&r, TD_CUDA_MANY_QUERIES / s->group, true, "many queries");
    check_items(&r, 1, false, "a row at a time");
    if (s->rows > 1) {
        check_items(&r, TD_CUDA_FEW_QUERIES / s->group, false, "few queries");
        check_items(&r, 3, true, "three rows of many");
    }
    if (s->position + s->rows > TD_CUDA_SPAN) {
        check_parts(&r, TD_CUDA_FEW_QUERIES / s->group, false);
    }
    rig_fini(&r);
}

static void test_every_head_size_and_group(void **state)
{
    static const uint32_t head_dims[] = {16, 32, 64, 80, 96, 128, 256};

    (void)state;
    for (size_t d = 0; d < TD_ARRAY_LEN(head_dims); d++) {
        for (uint32_t group = 1; group <= GROUP_MAX; group++) {
            const shape_t s = {.head_dim = head_dims[d],
                               .group = group,
                               .block_tokens = 8u << (group + d) % 4,
                               .codec = (td_kv_codec_t)((group + d / 2) % TD_KV_CODECS),
                               .position = (uint32_t)(group * 13 + d * 29),
                               .rows = group % 3 == 0 ? 5 : 2};
            cuda_set_order((uint32_t)(group + d) % cuda_orders());
            check_shape(&s);
        }
    }
}

static void test_every_codec_and_block_size(void **state)
{
    (void)state;
    for (uint32_t codec = 0; codec < TD_KV_CODECS; codec++) {
        for (uint32_t tokens = 8; tokens <= 64; tokens *= 2) {
            const shape_t s = {.head_dim = 64,
                               .group = 3,
                               .block_tokens = tokens,
                               .codec = (td_kv_codec_t)codec,
                               .position = 90,
                               .rows = 11};
            check_shape(&s);
        }
    }
}

/* Where tiles and spans begin and end. */
static void test_every_length_of_context(void **state)
{
    static const uint32_t positions[] = {0, 1, 15, 31, 32, 63, 127, 500, 511, 512, 1023, 1060};

    (void)state;
    for (size_t i = 0; i < TD_ARRAY_LEN(positions); i++) {
        const shape_t s = {.head_dim = i % 2 == 0 ? 64 : 80,
                           .group = i % 2 == 0 ? 3 : 4,
                           .block_tokens = 16,
                           .codec = i % 3 == 0 ? TD_KV_I8 : TD_KV_F16,
                           .position = positions[i],
                           .rows = positions[i] < 100 || i % 4 == 1 ? 17 : 1};
        cuda_set_order((uint32_t)i % cuda_orders());
        check_shape(&s);
    }
}

static void test_a_context_of_4096(void **state)
{
    const shape_t one = {
        .head_dim = 64, .group = 3, .block_tokens = 32, .position = 4095, .rows = 1};
    const shape_t rows = {.head_dim = 16,
                          .group = 2,
                          .block_tokens = 16,
                          .codec = TD_KV_F8_E4M3,
                          .position = 4090,
                          .rows = 6};

    (void)state;
    check_shape(&one);
    check_shape(&rows);
}

static void test_windows_and_strides(void **state)
{
    static const td_attention_mask_t masks[] = {
        {.kind = TD_ATTENTION_WINDOW, .local = 40},
        {.kind = TD_ATTENTION_WINDOW, .local = 1, .sinks = 4},
        {.kind = TD_ATTENTION_WINDOW, .local = 300, .sinks = 37},
        {.kind = TD_ATTENTION_STRIDED, .local = 33, .stride = 48, .summary = 5},
        {.kind = TD_ATTENTION_STRIDED, .local = 1, .stride = 700, .summary = 1},
    };
    static const uint32_t positions[] = {0, 45, 95, 530, 1300};

    (void)state;
    for (size_t m = 0; m < TD_ARRAY_LEN(masks); m++) {
        for (size_t i = 0; i < TD_ARRAY_LEN(positions); i++) {
            const shape_t s = {.head_dim = 32,
                               .group = 2,
                               .block_tokens = 16,
                               .codec = (m + i) % 2 == 0 ? TD_KV_F16 : TD_KV_F4_E2M1,
                               .mask = masks[m],
                               .position = positions[i],
                               .rows = 20};
            check_shape(&s);
        }
    }
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_every_head_size_and_group),
    cmocka_unit_test(test_every_codec_and_block_size),
    cmocka_unit_test(test_every_length_of_context),
    cmocka_unit_test(test_a_context_of_4096),
    cmocka_unit_test(test_windows_and_strides),
};
CUDA_TEST_MAIN(tests)

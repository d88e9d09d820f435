/* The arithmetic: every implementation that this CPU can run has the bits of the portable one (I1).
 */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include "tests/unit/model/test_model_tiny.h"

static const td_gguf_type_t all_types[] = {TD_GGUF_F32,  TD_GGUF_F16,  TD_GGUF_BF16,
                                           TD_GGUF_Q8_0, TD_GGUF_Q4_0, TD_GGUF_Q4_1};

/* Calls check(ops) for each vector implementation that runs here. */
static void for_each_vector_ops(void (*check)(const td_cpu_ops_t *ops))
{
    static const char *const names[] = {"avx2", "avx512"};
    bool any = false;

    for (size_t i = 0; i < TD_ARRAY_LEN(names); i++) {
        const td_cpu_ops_t *ops = td_cpu_ops_find(names[i]);
        if (ops == NULL) {
            print_message("%s: not on this CPU\n", names[i]);
            continue;
        }
        any = true;
        check(ops);
    }
    if (!any) {
        skip();
    }
}

static void assert_same_bits(const float *a, const float *b, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        if (memcmp(a + i, b + i, sizeof(*a)) != 0) {
            fail_msg("entry %zu differs: %.9g %.9g", i, (double)a[i], (double)b[i]);
        }
    }
}

static float random_float(uint64_t *state, float scale)
{
    *state = *state * 6364136223846793005ull + 1442695040888963407ull;
    return (float)((double)(*state >> 11) * 0x1p-52 - 1.0) * scale;
}

static void test_f16_conversion_is_exact_and_rounds_to_even(void **state)
{
    (void)state;
    for (uint32_t half = 0; half < 0x10000; half++) {
        float value = td_f32_from_f16((uint16_t)half);
        uint16_t back = td_f16_from_f32(value);
        if ((half & 0x7c00) == 0x7c00 && (half & 0x3ff) != 0) {
            assert_true(isnan(value));
            assert_int_equal(back, half | 0x200);
        } else {
            assert_int_equal(back, half);
        }
    }
    assert_int_equal(td_f16_from_f32(1.0f + 0x1p-11f), 0x3c00);     /* tie: down */
    assert_int_equal(td_f16_from_f32(1.0f + 3 * 0x1p-11f), 0x3c02); /* tie: up */
    assert_int_equal(td_f16_from_f32(1.0f + 0x1p-11f + 0x1p-20f), 0x3c01);
    assert_int_equal(td_f16_from_f32(0x1p-25f), 0); /* tie: to zero */
    assert_int_equal(td_f16_from_f32(0x1.8p-25f), 1);
    assert_int_equal(td_f16_from_f32(65519.0f), 0x7bff);
    assert_int_equal(td_f16_from_f32(65520.0f), 0x7c00);
    assert_int_equal(td_f16_from_f32(-1e30f), 0xfc00);
}

enum { ROW_FLOATS = 4096, K_WIDE = 1824, ROWS_WIDE = 37, OUTPUTS_WIDE = 53, HEAD_DIM_MAX = 128 };

static void row_operations_have_the_same_bits(const td_cpu_ops_t *v)
{
    static float x[ROW_FLOATS];
    static float w[ROW_FLOATS];
    static float a[ROW_FLOATS];
    static float b[ROW_FLOATS];
    static int16_t qa[ROW_FLOATS];
    static int16_t qb[ROW_FLOATS];
    static float scales[4][ROW_FLOATS / 32];
    const td_cpu_ops_t *p = &td_cpu_portable_ops;
    uint64_t seed = 1;

    for (int round = 0; round < 8; round++) {
        float scale = powf(10.0f, (float)(round * 3 - 12)); /* into subnormal halves and beyond */
        for (int i = 0; i < ROW_FLOATS; i++) {
            x[i] = i / 32 % 5 == 4 ? 0.0f : random_float(&seed, scale);
            w[i] = random_float(&seed, 1.0f);
        }
        p->rms_norm(x, w, ROW_FLOATS, 1e-5f, a);
        v->rms_norm(x, w, ROW_FLOATS, 1e-5f, b);
        assert_same_bits(a, b, ROW_FLOATS);
        memcpy(a, x, sizeof(a));
        memcpy(b, x, sizeof(b));
        p->swiglu(a, w, ROW_FLOATS);
        v->swiglu(b, w, ROW_FLOATS);
        assert_same_bits(a, b, ROW_FLOATS);
        p->rotate(a, w, ROW_FLOATS);
        v->rotate(b, w, ROW_FLOATS);
        assert_same_bits(a, b, ROW_FLOATS);
        p->add(a, w, ROW_FLOATS);
        v->add(b, w, ROW_FLOATS);
        assert_same_bits(a, b, ROW_FLOATS);
        p->quantise16(x, ROW_FLOATS, TD_CPU_INT16_MAX, qa, scales[0], scales[1]);
        v->quantise16(x, ROW_FLOATS, TD_CPU_INT16_MAX, qb, scales[2], scales[3]);
        assert_memory_equal(qa, qb, sizeof(qa));
        assert_memory_equal(scales[0], scales[2], 2 * sizeof(scales[0]));
        p->quantise8(x, ROW_FLOATS, (int8_t *)qa, scales[0], scales[1]);
        v->quantise8(x, ROW_FLOATS, (int8_t *)qb, scales[2], scales[3]);
        assert_memory_equal(qa, qb, ROW_FLOATS);
        assert_memory_equal(scales[0], scales[2], 2 * sizeof(scales[0]));
    }
}

/* Rows of every size into halves too small and too large, ties, and what is not finite. */
static void encoded_rows_have_the_same_bits(const td_cpu_ops_t *v)
{
    static const float ends[] = {0.0f, NAN, INFINITY, -INFINITY, 1e-31f, 3e38f};
    float x[HEAD_DIM_MAX];
    uint8_t a[2][2 * HEAD_DIM_MAX];
    uint8_t b[2][2 * HEAD_DIM_MAX];
    uint64_t seed = 5;

    for (uint32_t codec = 0; codec < TD_KV_CODECS; codec++) {
        for (int round = 0; round < 2000; round++) {
            const uint32_t head_dim = 8 * (1 + (uint32_t)round % 16);
            const float scale = powf(10.0f, (float)(round % 80 - 42));
            for (uint32_t i = 0; i < head_dim; i++) {
                x[i] = random_float(&seed, scale);
                if (round % 3 == 1) { /* the largest is the limit: the rest are ties or exact */
                    x[i] = (float)(int)(random_float(&seed, 255.0f)) * 0.25f;
                }
            }
            if (round % 3 == 1) {
                x[round % (int)head_dim] = codec == TD_KV_F8_E4M3 ? 448.0f
                                           : codec == TD_KV_I8    ? 127.0f
                                                                  : 96.0f;
            } else if (round % 50 == 0) {
                x[round % (int)head_dim] = ends[round / 50 % (int)TD_ARRAY_LEN(ends)];
            }
            memset(a, 0x55, sizeof(a));
            memset(b, 0x55, sizeof(b));
            td_cpu_portable_ops.kv_encode((td_kv_codec_t)codec, x, head_dim, a[0], a[1]);
            v->kv_encode((td_kv_codec_t)codec, x, head_dim, b[0], b[1]);
            assert_memory_equal(a, b, sizeof(a));
        }
    }
}

/* A product wide enough for several unpacked chunks, with narrow last panels. */
static void product_both(const td_cpu_ops_t *v, td_gguf_type_t type, bool int8)
{
    td_cpu_scratch_t *scratch = NULL;
    static float x[ROWS_WIDE * K_WIDE];
    static int8_t q8[ROWS_WIDE * K_WIDE];
    static int16_t q16[ROWS_WIDE * K_WIDE];
    static float scales[4][ROWS_WIDE * K_WIDE / 32];
    static float ya[ROWS_WIDE * OUTPUTS_WIDE];
    static float yb[ROWS_WIDE * OUTPUTS_WIDE];
    static const uint32_t row_counts[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 23, ROWS_WIDE};
    td_cpu_acts_t acts = {x, q8, scales[0], scales[1], q16, scales[2], scales[3]};
    tiny_t bytes = {.random = 7};
    double *values = calloc(K_WIDE * OUTPUTS_WIDE, sizeof(double));
    td_gguf_tensor_t tensor = {
        .name = "wide", .dim_count = 2, .dims = {K_WIDE, OUTPUTS_WIDE, 1, 1}, .type = type};
    td_arena_t *arena = td_arena_create();
    td_cpu_matrix_t w;

    assert_non_null(arena);
    assert_non_null(values);
    assert_int_equal(td_cpu_scratch_create(8, 1, K_WIDE, &scratch), TD_OK);
    for (size_t i = 0; i < (size_t)K_WIDE * OUTPUTS_WIDE; i++) {
        values[i] = tiny_random(&bytes);
    }
    tiny_put_values(&bytes, type, values, (size_t)K_WIDE * OUTPUTS_WIDE);
    tensor.bytes = bytes.bytes;
    tensor.byte_count = bytes.len;
    assert_int_equal(td_cpu_pack(&tensor, int8, arena, &w), TD_OK);
    for (int i = 0; i < ROWS_WIDE * K_WIDE; i++) {
        x[i] = random_float(&bytes.random, 3.0f);
    }
    td_cpu_portable_ops.quantise8(x, ROWS_WIDE * K_WIDE, q8, scales[0], scales[1]);
    td_cpu_portable_ops.quantise16(x, ROWS_WIDE * K_WIDE, TD_CPU_INT16_MAX, q16, scales[2],
                                   scales[3]);
    td_cpu_portable_ops.product(&w, &acts, ROWS_WIDE, ya, 0, w.panels, scratch);
    for (size_t i = 0; i < TD_ARRAY_LEN(row_counts); i++) {
        memset(yb, 0xff, sizeof(yb));
        v->product(&w, &acts, row_counts[i], yb, 0, 2, scratch);
        v->product(&w, &acts, row_counts[i], yb, 2, w.panels, scratch);
        assert_same_bits(ya, yb, row_counts[i] * OUTPUTS_WIDE);
    }
    for (uint32_t o = 0; o < OUTPUTS_WIDE; o++) { /* unpacking gives the file's numbers */
        td_cpu_unpack_row(&w, o, x);
        for (uint32_t k = 0; k < K_WIDE; k++) {
            double want = values[o * K_WIDE + k];
            assert_true(fabs((double)x[k] - want) <= 1e-6 * fabs(want) + 1e-7);
        }
    }
    td_free(scratch);
    td_arena_destroy(arena);
    free(values);
    free(bytes.bytes);
}

static void products_have_the_same_bits(const td_cpu_ops_t *v)
{
    for (size_t i = 0; i < TD_ARRAY_LEN(all_types); i++) {
        product_both(v, all_types[i], true);
        product_both(v, all_types[i], false);
    }
}

/* --- attention ---------------------------------------------------------------------------------
 */

enum { ATTENTION_TOKENS = 1200, GROUP_MAX = 9, ATTENTION_KV_HEADS = 2, SPANS_MAX = 3 };

/* Random keys and values in blocks out of order. What nobody may see is not a number, and the last
 * visible value is infinite: it must reach the rows that see it, and only them. */
static void fill_pool(const td_cpu_attention_t *job, uint8_t *pool, uint64_t *seed)
{
    const td_kv_layout_t *kv = job->kv;
    const uint32_t *blocks = job->blocks;
    const uint32_t visible = job->position + job->rows;

    for (uint32_t t = 0; t < ATTENTION_TOKENS; t++) {
        const bool seen =
            td_attention_next(&job->mask, job->position, job->position + job->rows - 1, t) == t;
        for (uint32_t h = 0; h < 2 * kv->kv_heads; h++) {
            const uint32_t token = t % kv->block_tokens;
            uint8_t *block = pool + blocks[t / kv->block_tokens] * td_kv_block_bytes(kv);
            float row[HEAD_DIM_MAX];
            for (uint32_t d = 0; d < kv->head_dim; d++) {
                row[d] = random_float(seed, 2.0f);
                row[d] = !seen ? NAN : t + 1 == visible && h % 2 == 1 ? INFINITY : row[d];
            }
            td_kv_row_encode(kv->codec, row, kv->head_dim,
                             block + td_kv_offset(kv, 1, h % 2 == 1, h / 2, token),
                             block + td_kv_scale_offset(kv, 1, h % 2 == 1, h / 2, token));
        }
    }
}

/* Every span of which some row sees something on its own, the last one first; then each query's are
 * merged. */
static void attention_in_parts(const td_cpu_ops_t *v, td_cpu_attention_t job,
                               td_cpu_scratch_t *scratch)
{
    static float parts[TD_CPU_TILE_ROWS * GROUP_MAX * SPANS_MAX * (HEAD_DIM_MAX + 16)];
    const size_t part = td_cpu_part_stride(job.kv->head_dim);
    const uint32_t last = job.position + job.rows - 1;
    uint32_t begins[SPANS_MAX];
    uint32_t spans = 0;

    for (uint32_t at = 0;; at = begins[spans++] + TD_CPU_SPAN_TOKENS) {
        at = td_attention_next(&job.mask, job.position, last, at);
        if (at == TD_ATTENTION_NONE) {
            break;
        }
        begins[spans] = at / TD_CPU_SPAN_TOKENS * TD_CPU_SPAN_TOKENS;
    }
    for (size_t i = 0; i < TD_ARRAY_LEN(parts); i++) {
        parts[i] = NAN; /* every part that is merged must have been written */
    }
    job.part_row_stride = spans * job.group * part;
    for (uint32_t s = spans; s-- > 0;) {
        job.begin = begins[s];
        job.end = job.begin + TD_CPU_SPAN_TOKENS;
        job.parts = parts + s * job.group * part;
        v->attention(&job, scratch);
    }
    for (uint32_t i = 0; i < job.rows * job.group; i++) {
        const uint32_t row = i / job.group;
        const bool behind = job.position + row < begins[spans - 1];
        v->merge(parts + row * job.part_row_stride + i % job.group * part, job.group * part,
                 spans - (behind ? 1 : 0), job.kv->head_dim,
                 job.out + row * job.q_stride + i % job.group * job.kv->head_dim);
    }
}

/* The textbook: softmax over what td_attention_sees() says, in double. */
static void naive_query(const td_cpu_attention_t *job, uint32_t row, uint32_t head, double *out)
{
    const uint32_t head_dim = job->kv->head_dim;
    const uint32_t position = job->position + row;
    const float *q = job->q + row * job->q_stride + (size_t)head * head_dim;
    double sum = 0;

    memset(out, 0, head_dim * sizeof(*out));
    for (uint32_t p = 0; p <= position; p++) {
        float k[HEAD_DIM_MAX];
        float v[HEAD_DIM_MAX];
        double dot = 0;
        if (!td_attention_sees(&job->mask, position, p)) {
            continue;
        }
        td_kv_row_decode(job->kv->codec, td_cpu_kv_at(job, false, p),
                         td_cpu_kv_scale_at(job, false, p), head_dim, k);
        td_kv_row_decode(job->kv->codec, td_cpu_kv_at(job, true, p),
                         td_cpu_kv_scale_at(job, true, p), head_dim, v);
        for (uint32_t d = 0; d < head_dim; d++) {
            dot += (double)q[d] * (double)k[d];
        }
        dot = exp(dot * (double)job->scale);
        sum += dot;
        for (uint32_t d = 0; d < head_dim; d++) {
            out[d] += dot * (double)v[d];
        }
    }
    for (uint32_t d = 0; d < head_dim; d++) {
        out[d] /= sum;
    }
}

static void assert_is_naive(const td_cpu_attention_t *job, const float *got)
{
    for (uint32_t i = 0; i < job->rows * job->group; i++) {
        double want[HEAD_DIM_MAX];
        naive_query(job, i / job->group, i % job->group, want);
        for (uint32_t d = 0; d < job->kv->head_dim; d++) {
            const double x = (double)got[i / job->group * job->q_stride +
                                         (size_t)(i % job->group) * job->kv->head_dim + d];
            assert_true(isfinite(want[d]) ? fabs(x - want[d]) < 1e-4 : !isfinite(x));
        }
    }
}

/* Where blocks of a table are gone that no row from the first of the job on needs. */
static void free_blocks(const td_cpu_attention_t *job, uint32_t *blocks, uint32_t block_count)
{
    const uint32_t tokens = job->kv->block_tokens;

    for (uint32_t b = 0; b < block_count; b++) {
        if (!td_attention_needs(&job->mask, job->position, b * tokens, (b + 1) * tokens)) {
            blocks[b] = UINT32_MAX; /* reading it ends the test */
        }
    }
}

static void attention_both(const td_cpu_ops_t *v, const td_kv_layout_t *kv, uint32_t group,
                           uint32_t rows, uint32_t position, const td_attention_mask_t *mask)
{
    static float q[TD_CPU_TILE_ROWS * GROUP_MAX * HEAD_DIM_MAX];
    static float a[TD_CPU_TILE_ROWS * GROUP_MAX * HEAD_DIM_MAX];
    static float b[TD_CPU_TILE_ROWS * GROUP_MAX * HEAD_DIM_MAX];
    const uint32_t block_count = (ATTENTION_TOKENS + kv->block_tokens - 1) / kv->block_tokens;
    const size_t stride = (size_t)group * kv->head_dim;
    uint8_t *pool = td_calloc(block_count, td_kv_block_bytes(kv));
    uint32_t blocks[ATTENTION_TOKENS / 16];
    td_cpu_scratch_t *scratch = NULL;
    uint64_t seed = 3;
    td_cpu_attention_t job = {.pool = pool,
                              .kv = kv,
                              .blocks = blocks,
                              .layer = 1,
                              .kv_head = 1,
                              .position = position,
                              .rows = rows,
                              .group = group,
                              .mask = *mask,
                              .scale = 0.25f,
                              .q = q,
                              .out = a,
                              .q_stride = stride,
                              .end = UINT32_MAX};

    assert_non_null(pool);
    assert_int_equal(td_cpu_scratch_create(kv->head_dim, group, 0, &scratch), TD_OK);
    for (uint32_t i = 0; i < block_count; i++) {
        blocks[i] = (i * 7 + 3) % block_count;
    }
    fill_pool(&job, pool, &seed);
    for (size_t i = 0; i < rows * stride; i++) {
        q[i] = random_float(&seed, 4.0f);
    }
    td_cpu_portable_ops.attention(&job, scratch);
    if (mask->kind != TD_ATTENTION_FULL && position < 600) {
        assert_is_naive(&job, a);
    }
    job.out = b;
    free_blocks(&job, blocks, block_count);
    v->attention(&job, scratch);
    assert_same_bits(a, b, rows * stride);
    for (size_t i = 0; i < (rows - 1) * stride; i++) {
        assert_true(isfinite(a[i]));
    }
    memset(b, 0xff, sizeof(b));
    attention_in_parts(v, job, scratch);
    assert_same_bits(a, b, rows * stride);
    td_free(scratch);
    td_free(pool);
}

static void attention_has_the_same_bits(const td_cpu_ops_t *v)
{
    static const uint32_t head_dims[] = {8, 16, 24, 64, 72, 128};
    static const uint32_t groups[] = {1, 3, 6, 8, 9};
    static const uint32_t row_counts[] = {1, 2, 3, 6, 11, 16};
    static const uint32_t positions[] = {0, 1, 15, 31, 32, 90, 200, 506, 512, 1023};
    static const td_attention_mask_t full = {0};
    td_kv_layout_t kv = {.layers = 2, .kv_heads = ATTENTION_KV_HEADS};

    for (size_t d = 0; d < TD_ARRAY_LEN(head_dims); d++) {
        kv.head_dim = head_dims[d];
        kv.block_tokens = d % 2 == 0 ? 16 : 48;
        for (size_t g = 0; g < TD_ARRAY_LEN(groups); g++) {
            for (size_t r = 0; r < TD_ARRAY_LEN(row_counts); r++) {
                for (size_t p = 0; p < TD_ARRAY_LEN(positions); p++) {
                    /* f16 has kernels of its own; the others differ from each other in what a
                     * tile is loaded by alone, and long contexts take long. */
                    const size_t turn = g + r + p + d;
                    kv.codec = TD_KV_F16;
                    if (positions[p] < 300 || (g + r + d) % 3 == 0) {
                        attention_both(v, &kv, groups[g], row_counts[r], positions[p], &full);
                    }
                    kv.codec = (td_kv_codec_t)(1 + turn % (TD_KV_CODECS - 1));
                    if (positions[p] < 300 || turn % 5 == 0) {
                        attention_both(v, &kv, groups[g], row_counts[r], positions[p], &full);
                    }
                }
            }
        }
    }
}

/* Windows that end within tiles, blocks and spans, with and without sinks, and summaries
 * everywhere, in every codec, over tables whose other blocks are gone. */
static void masked_attention_has_the_same_bits(const td_cpu_ops_t *v)
{
    static const td_attention_mask_t masks[] = {
        {.kind = TD_ATTENTION_WINDOW, .local = 1},
        {.kind = TD_ATTENTION_WINDOW, .local = 7},
        {.kind = TD_ATTENTION_WINDOW, .local = 33, .sinks = 3},
        {.kind = TD_ATTENTION_WINDOW, .local = 100},
        {.kind = TD_ATTENTION_WINDOW, .local = 513, .sinks = 20},
        {.kind = TD_ATTENTION_STRIDED, .local = 40, .stride = 128, .summary = 16},
        {.kind = TD_ATTENTION_STRIDED, .local = 3, .stride = 9, .summary = 2},
        {.kind = TD_ATTENTION_STRIDED, .local = 70, .stride = 700, .summary = 5},
    };
    static const uint32_t head_dims[] = {16, 24, 64};
    static const uint32_t row_counts[] = {1, 2, 5, 16};
    static const uint32_t positions[] = {0, 20, 31, 95, 506, 544, 1023};
    td_kv_layout_t kv = {.layers = 2, .kv_heads = ATTENTION_KV_HEADS};

    for (size_t m = 0; m < TD_ARRAY_LEN(masks); m++) {
        for (size_t r = 0; r < TD_ARRAY_LEN(row_counts); r++) {
            for (size_t p = 0; p < TD_ARRAY_LEN(positions); p++) {
                for (uint32_t codec = 0; codec < TD_KV_CODECS; codec++) {
                    const size_t turn = m + r + p + codec;
                    kv.codec = (td_kv_codec_t)codec;
                    kv.head_dim = head_dims[turn % TD_ARRAY_LEN(head_dims)];
                    kv.block_tokens = turn % 5 == 0 ? 48 : 16;
                    attention_both(v, &kv, turn % 2 == 0 ? 3 : 1, row_counts[r], positions[p],
                                   &masks[m]);
                }
            }
        }
    }
}

/* A query that sees one token gives back its value: every code, on the way of every kernel. */
static void codes_read_back_the_same(const td_cpu_ops_t *v)
{
    enum { GROUPS = 3 };
    static const uint32_t groups[GROUPS] = {1, 7, 16};
    static const uint32_t block = 0;
    static float q[16 * HEAD_DIM_MAX];
    static float out[16 * HEAD_DIM_MAX];
    static uint8_t pool[16 * 4 * (HEAD_DIM_MAX + TD_KV_SCALE_BYTES)];
    const float scale = 0.37f;
    float want[HEAD_DIM_MAX];
    td_cpu_scratch_t *scratch = NULL;
    td_kv_layout_t kv = {.layers = 1, .kv_heads = 1, .block_tokens = 16};

    for (uint32_t i = 0; i < (TD_KV_CODECS - 1) * GROUPS * 4; i++) {
        const uint32_t group = groups[i / 4 % GROUPS];
        td_cpu_attention_t job = {.pool = pool,
                                  .kv = &kv,
                                  .blocks = &block,
                                  .rows = 1,
                                  .group = group,
                                  .scale = 1.0f,
                                  .q = q,
                                  .out = out,
                                  .end = UINT32_MAX};
        uint8_t *values = NULL;

        kv.codec = (td_kv_codec_t)(1 + i / 4 / GROUPS);
        kv.head_dim = i % 2 == 0 ? HEAD_DIM_MAX : 72;
        job.q_stride = (size_t)group * kv.head_dim;
        values = pool + td_kv_offset(&kv, 0, true, 0, 0);
        for (uint32_t c = 0; c < td_kv_row_bytes(&kv); c++) {
            values[c] = (uint8_t)((i & 2) * 64 + c);
        }
        memcpy(pool + td_kv_scale_offset(&kv, 0, true, 0, 0), &scale, sizeof(scale));
        td_kv_row_decode(kv.codec, values, (const uint8_t *)&scale, kv.head_dim, want);
        assert_int_equal(td_cpu_scratch_create(kv.head_dim, group, 0, &scratch), TD_OK);
        v->attention(&job, scratch);
        td_free(scratch);
        for (uint32_t h = 0; h < group; h++) {
            for (uint32_t d = 0; d < kv.head_dim; d++) {
                want[d] += 0.0f; /* as a sum that begins at zero: -0 becomes 0 */
            }
            assert_same_bits(out + (size_t)h * kv.head_dim, want, kv.head_dim);
        }
    }
}

static void test_row_operations_have_the_same_bits(void **state)
{
    (void)state;
    for_each_vector_ops(row_operations_have_the_same_bits);
}

static void test_products_have_the_same_bits(void **state)
{
    (void)state;
    for_each_vector_ops(products_have_the_same_bits);
}

static void test_encoded_rows_have_the_same_bits(void **state)
{
    (void)state;
    for_each_vector_ops(encoded_rows_have_the_same_bits);
}

static void test_codes_read_back_the_same(void **state)
{
    (void)state;
    for_each_vector_ops(codes_read_back_the_same);
    codes_read_back_the_same(&td_cpu_portable_ops);
}

static void test_attention_has_the_same_bits(void **state)
{
    (void)state;
    for_each_vector_ops(attention_has_the_same_bits);
}

static void test_masked_attention_has_the_same_bits(void **state)
{
    (void)state;
    for_each_vector_ops(masked_attention_has_the_same_bits);
    masked_attention_has_the_same_bits(&td_cpu_portable_ops);
}

static void test_find_knows_its_names(void **state)
{
    (void)state;
    assert_ptr_equal(td_cpu_ops_find("portable"), &td_cpu_portable_ops);
    assert_non_null(td_cpu_ops_find(TD_CPU_OPS_BEST));
    assert_null(td_cpu_ops_find("sse9"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_f16_conversion_is_exact_and_rounds_to_even),
        cmocka_unit_test(test_find_knows_its_names),
        cmocka_unit_test(test_row_operations_have_the_same_bits),
        cmocka_unit_test(test_products_have_the_same_bits),
        cmocka_unit_test(test_encoded_rows_have_the_same_bits),
        cmocka_unit_test(test_codes_read_back_the_same),
        cmocka_unit_test(test_attention_has_the_same_bits),
        cmocka_unit_test(test_masked_attention_has_the_same_bits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

/* Matrix products for AVX-512 with VNNI. A lane is an output row, a vector two panels. VNNI adds
 * products to int32 sums exactly, so the integers, and with them every bit, are those of the other
 * implementations. As in td_cpu_avx2.c, functions are written for a constant number of rows and
 * inlined, so that accumulators are registers. */
#if defined(__x86_64__)
#include "common/model/cpu/td_cpu_avx512.h"

#include "common/base/td_base.h"

#define TILE_ROWS 8 /* 8 sums and 8 chains beside a vector of weights, or 8 of unpacked ones */
#define FLOAT_ROWS 12
#define BIG_ROWS_MIN (TD_CPU_FEW_ROWS + 1) /* from here on unpacking panels first pays */
#define PREFETCH_BYTES 4096                /* ahead of the one linear stream a thread reads */
/* Activations of a block of rows stay in the L2 cache while all panels pass. */
#define BLOCK_ACT_BYTES 589824u
#define BLOCK_ROWS_MIN 32u

/* Rows of quantised activations from some row and group on. */
typedef struct act_rows {
    const uint8_t *q; /* bytes of int8 or int16 */
    size_t q_stride;  /* bytes */
    const float *scale;
    const float *sum;
    size_t groups;
} act_rows_t;

ALWAYS_INLINE act_rows_t acts8(const product_job_t *job, size_t row, size_t group)
{
    return (act_rows_t){
        .q = (const uint8_t *)job->x->q8 + row * job->w->inputs + group * TD_CPU_GROUP,
        .q_stride = job->w->inputs,
        .scale = job->x->scale8 + row * job->groups + group,
        .sum = job->x->sum8 + row * job->groups + group,
        .groups = job->groups,
    };
}

ALWAYS_INLINE act_rows_t acts16(const product_job_t *job, size_t row, size_t group)
{
    return (act_rows_t){
        .q = (const uint8_t *)(job->x->q16 + row * job->w->inputs + group * TD_CPU_GROUP),
        .q_stride = (size_t)job->w->inputs * 2,
        .scale = job->x->scale16 + row * job->groups + group,
        .sum = job->x->sum16 + row * job->groups + group,
        .groups = job->groups,
    };
}

/* Outputs of a pair that exist: the last panels may be narrower. */
static inline __mmask16 pair_mask(const td_cpu_matrix_t *w, uint32_t panel)
{
    uint32_t begin = panel * TD_CPU_PANEL;
    uint32_t count = begin >= w->outputs ? 0 : TD_MIN(16u, w->outputs - begin);
    return (__mmask16)((1u << count) - 1);
}

/* Goes on with a chain by one group: sums times both scales. */
ALWAYS_INLINE __m512 chain_scaled(__m512i sums, __m512 scale_w, const float *scale_x, __m512 acc)
{
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums),
                           _mm512_mul_ps(scale_w, _mm512_set1_ps(*scale_x)), acc);
}

ALWAYS_INLINE __m512 chain_minimum(__m512 minimum, const float *sum_x, __m512 acc)
{
    return _mm512_fmadd_ps(minimum, _mm512_set1_ps(*sum_x), acc);
}

ALWAYS_INLINE void prefetch_group(const uint8_t *w, const uint32_t lines)
{
    UNROLL(9)
    for (uint32_t i = 0; i < lines; i++) {
        _mm_prefetch((const char *)w + PREFETCH_BYTES + i * 64, _MM_HINT_T0);
    }
}

ALWAYS_INLINE void store_rows(const product_job_t *job, uint32_t panel, uint32_t row,
                              const __m512 *acc, const uint32_t tile)
{
    const __mmask16 mask = pair_mask(job->w, panel);
    float *y = job->y + row * (size_t)job->w->outputs + panel * TD_CPU_PANEL;

    UNROLL(12)
    for (uint32_t m = 0; m < tile; m++) {
        _mm512_mask_storeu_ps(y + m * (size_t)job->w->outputs, mask, acc[m]);
    }
}

/* The chains of rows so far: zero before the first group or k. */
ALWAYS_INLINE void load_rows(const product_job_t *job, uint32_t panel, uint32_t row, uint32_t begin,
                             __m512 *acc, const uint32_t tile)
{
    const __mmask16 mask = begin == 0 ? 0 : pair_mask(job->w, panel);
    const float *y = job->y + row * (size_t)job->w->outputs + panel * TD_CPU_PANEL;

    UNROLL(12)
    for (uint32_t m = 0; m < tile; m++) {
        acc[m] = _mm512_maskz_loadu_ps(mask, y + m * (size_t)job->w->outputs);
    }
}

/* --- 4-bit weights ---------------------------------------------------------------------------- */

ALWAYS_INLINE void a8_small(const product_job_t *job, uint32_t panel, uint32_t row,
                            const uint32_t tile)
{
    const uint8_t *w = job->w->bytes + panel / 2 * job->w->pair_bytes;
    const act_rows_t x = acts8(job, row, 0);
    const __m512i low = _mm512_set1_epi8(15);
    __m512 acc[TILE_ROWS];

    UNROLL(8)
    for (uint32_t m = 0; m < tile; m++) {
        acc[m] = _mm512_setzero_ps();
    }
    for (size_t g = 0; g < x.groups; g++, w += TD_CPU_NIBBLE_BYTES) {
        __m512i u[8];
        prefetch_group(w, 5);
        UNROLL(4)
        for (uint32_t j = 0; j < 4; j++) {
            __m512i v = load_wide(w + 64 * j);
            u[j] = _mm512_and_si512(v, low);
            u[j + 4] = _mm512_and_si512(_mm512_srli_epi16(v, 4), low);
        }
        const __m512 scale_w = load_f16_wide(w + TD_CPU_NIBBLE_SCALES);
        const __m512 minimum = load_f16_wide(w + TD_CPU_NIBBLE_MINIMA);
        __m512i a[TILE_ROWS];
        UNROLL(8)
        for (uint32_t j = 0; j < 8; j++) { /* rows inside: their sums wait for nobody */
            UNROLL(8)
            for (uint32_t m = 0; m < tile; m++) {
                const uint8_t *q = x.q + m * x.q_stride + g * TD_CPU_GROUP;
                a[m] = _mm512_dpbusd_epi32(j == 0 ? _mm512_setzero_si512() : a[m], u[j],
                                           broadcast4_wide(q + 4 * j));
            }
        }
        UNROLL(8)
        for (uint32_t m = 0; m < tile; m++) {
            acc[m] = chain_scaled(a[m], scale_w, x.scale + m * x.groups + g, acc[m]);
            acc[m] = chain_minimum(minimum, x.sum + m * x.groups + g, acc[m]);
        }
    }
    store_rows(job, panel, row, acc, tile);
}

/* Unpacks groups [begin, end) of two panels. Shape: [group][vector][panel][32]. */
static void a8_unpack(const product_job_t *job, uint32_t panel, uint32_t begin, uint32_t end,
                      td_cpu_scratch_t *s)
{
    const __m512i low = _mm512_set1_epi8(15);
    const uint8_t *w =
        job->w->bytes + panel / 2 * job->w->pair_bytes + (size_t)begin * TD_CPU_NIBBLE_BYTES;

    for (uint32_t g = 0; g < end - begin; g++, w += TD_CPU_NIBBLE_BYTES) {
        uint8_t *out = s->panels8 + g * 512;
        prefetch_group(w, 5);
        UNROLL(4)
        for (uint32_t j = 0; j < 4; j++) {
            __m512i v = load_wide(w + 64 * j);
            _mm512_store_si512(out + j * 64, _mm512_and_si512(v, low));
            _mm512_store_si512(out + (j + 4) * 64, _mm512_and_si512(_mm512_srli_epi16(v, 4), low));
        }
        _mm512_store_ps(s->scales + g * 16, load_f16_wide(w + TD_CPU_NIBBLE_SCALES));
        _mm512_store_ps(s->minima + g * 16, load_f16_wide(w + TD_CPU_NIBBLE_MINIMA));
    }
}

/* Goes on with the chains of two panels over groups [begin, end). */
ALWAYS_INLINE void a8_big(const product_job_t *job, const td_cpu_scratch_t *s, uint32_t panel,
                          uint32_t begin, uint32_t end, uint32_t row, const uint32_t tile)
{
    const act_rows_t x = acts8(job, row, begin);
    __m512 acc[TILE_ROWS];

    load_rows(job, panel, row, begin, acc, tile);
    for (size_t g = 0; g < end - begin; g++) {
        const uint8_t *u = s->panels8 + g * 512;
        __m512i a[TILE_ROWS];
        UNROLL(8)
        for (uint32_t j = 0; j < 8; j++) {
            const __m512i w = load_wide(u + j * 64);
            UNROLL(8)
            for (uint32_t m = 0; m < tile; m++) {
                a[m] = _mm512_dpbusd_epi32(
                    j == 0 ? _mm512_setzero_si512() : a[m], w,
                    broadcast4_wide(x.q + m * x.q_stride + g * TD_CPU_GROUP + 4 * j));
            }
        }
        const __m512 scale_w = _mm512_load_ps(s->scales + g * 16);
        const __m512 minimum = _mm512_load_ps(s->minima + g * 16);
        UNROLL(8)
        for (uint32_t m = 0; m < tile; m++) {
            acc[m] = chain_scaled(a[m], scale_w, x.scale + m * x.groups + g, acc[m]);
            acc[m] = chain_minimum(minimum, x.sum + m * x.groups + g, acc[m]);
        }
    }
    store_rows(job, panel, row, acc, tile);
}

/* Int16 activations of few rows as high (signed) and low (unsigned) bytes, of each eight inputs in
 * the order in which a vector's low and high nibbles meet them: 0 4 1 5, then 2 6 3 7. A vector of
 * weights is then unpacked into two, not four. Shape: [row][group][4][high 0415, 2637, low ...]. */
static const uint8_t *a16_bytes(const td_cpu_matrix_t *w, const td_cpu_acts_t *x, uint32_t rows,
                                td_cpu_scratch_t *s)
{
    const __m512i order =
        _mm512_broadcast_i32x4(_mm_setr_epi8(1, 9, 3, 11, 5, 13, 7, 15, 0, 8, 2, 10, 4, 12, 6, 14));
    const size_t groups = (size_t)rows * w->inputs / TD_CPU_GROUP;

    for (size_t g = 0; g < groups; g++) {
        const __m512i q = _mm512_loadu_si512(x->q16 + g * TD_CPU_GROUP);
        _mm512_store_si512(s->bytes + g * 64, _mm512_shuffle_epi8(q, order));
    }
    return s->bytes;
}

ALWAYS_INLINE void a16_small(const product_job_t *job, uint32_t panel, uint32_t row,
                             const uint32_t tile)
{
    const uint8_t *w = job->w->bytes + panel / 2 * job->w->pair_bytes;
    const act_rows_t x = acts16(job, row, 0);
    const uint8_t *bytes = job->bytes + row * x.groups * 64;
    const __m512i low_nibbles = _mm512_set1_epi8(15);
    __m512 acc[TILE_ROWS];

    UNROLL(8)
    for (uint32_t m = 0; m < tile; m++) {
        acc[m] = _mm512_setzero_ps();
    }
    for (size_t g = 0; g < x.groups; g++, w += TD_CPU_NIBBLE_BYTES) {
        __m512i high[TILE_ROWS];
        __m512i low[TILE_ROWS];
        prefetch_group(w, 5);
        UNROLL(8)
        for (uint32_t j = 0; j < 8; j++) {
            const __m512i v = load_wide(w + 64 * (j / 2));
            const __m512i u =
                _mm512_and_si512(j % 2 == 0 ? v : _mm512_srli_epi16(v, 4), low_nibbles);
            UNROLL(8)
            for (uint32_t m = 0; m < tile; m++) {
                const uint8_t *q = bytes + (m * x.groups + g) * 64 + 16 * (j / 2) + 4 * (j % 2);
                high[m] = _mm512_dpbusd_epi32(j == 0 ? _mm512_setzero_si512() : high[m], u,
                                              broadcast4_wide(q));
                low[m] = _mm512_dpbusd_epi32(j == 0 ? _mm512_setzero_si512() : low[m],
                                             broadcast4_wide(q + 8), u);
            }
        }
        const __m512 scale_w = load_f16_wide(w + TD_CPU_NIBBLE_SCALES);
        const __m512 minimum = load_f16_wide(w + TD_CPU_NIBBLE_MINIMA);
        UNROLL(8)
        for (uint32_t m = 0; m < tile; m++) {
            const __m512i a = _mm512_add_epi32(_mm512_slli_epi32(high[m], 8), low[m]);
            acc[m] = chain_scaled(a, scale_w, x.scale + m * x.groups + g, acc[m]);
            acc[m] = chain_minimum(minimum, x.sum + m * x.groups + g, acc[m]);
        }
    }
    store_rows(job, panel, row, acc, tile);
}

static void a16_unpack(const product_job_t *job, uint32_t panel, uint32_t begin, uint32_t end,
                       td_cpu_scratch_t *s)
{
    const __m512i low = _mm512_set1_epi16(15);
    const uint8_t *w =
        job->w->bytes + panel / 2 * job->w->pair_bytes + (size_t)begin * TD_CPU_NIBBLE_BYTES;

    for (uint32_t g = 0; g < end - begin; g++, w += TD_CPU_NIBBLE_BYTES) {
        uint8_t *out = s->panels16 + g * 1024;
        prefetch_group(w, 5);
        UNROLL(4)
        for (uint32_t j = 0; j < 4; j++) {
            __m512i v = load_wide(w + 64 * j);
            UNROLL(4)
            for (uint32_t t = 0; t < 4; t++) {
                _mm512_store_si512(out + (j * 4 + t) * 64, _mm512_and_si512(v, low));
                v = _mm512_srli_epi16(v, 4);
            }
        }
        _mm512_store_ps(s->scales + g * 16, load_f16_wide(w + TD_CPU_NIBBLE_SCALES));
        _mm512_store_ps(s->minima + g * 16, load_f16_wide(w + TD_CPU_NIBBLE_MINIMA));
    }
}

ALWAYS_INLINE void a16_big(const product_job_t *job, const td_cpu_scratch_t *s, uint32_t panel,
                           uint32_t begin, uint32_t end, uint32_t row, const uint32_t tile)
{
    const act_rows_t x = acts16(job, row, begin);
    __m512 acc[TILE_ROWS];

    load_rows(job, panel, row, begin, acc, tile);
    for (size_t g = 0; g < end - begin; g++) {
        const uint8_t *u = s->panels16 + g * 1024;
        __m512i a[TILE_ROWS];
        UNROLL(16)
        for (uint32_t j = 0; j < 16; j++) {
            const __m512i w = load_wide(u + j * 64);
            UNROLL(8)
            for (uint32_t m = 0; m < tile; m++) {
                a[m] = _mm512_dpwssd_epi32(j == 0 ? _mm512_setzero_si512() : a[m], w,
                                           broadcast4_wide(x.q + m * x.q_stride + g * 64 + 4 * j));
            }
        }
        const __m512 scale_w = _mm512_load_ps(s->scales + g * 16);
        const __m512 minimum = _mm512_load_ps(s->minima + g * 16);
        UNROLL(8)
        for (uint32_t m = 0; m < tile; m++) {
            acc[m] = chain_scaled(a[m], scale_w, x.scale + m * x.groups + g, acc[m]);
            acc[m] = chain_minimum(minimum, x.sum + m * x.groups + g, acc[m]);
        }
    }
    store_rows(job, panel, row, acc, tile);
}

/* --- 8-bit weights, int16 activations --------------------------------------------------------- */

ALWAYS_INLINE void bytes_small(const product_job_t *job, uint32_t panel, uint32_t row,
                               const uint32_t tile)
{
    const uint8_t *w = job->w->bytes + panel / 2 * job->w->pair_bytes;
    const act_rows_t x = acts16(job, row, 0);
    __m512 acc[TILE_ROWS];

    UNROLL(8)
    for (uint32_t m = 0; m < tile; m++) {
        acc[m] = _mm512_setzero_ps();
    }
    for (size_t g = 0; g < x.groups; g++, w += TD_CPU_BYTE_BYTES) {
        __m512i even[TILE_ROWS]; /* two sums a row: one alone would wait for itself */
        __m512i odd[TILE_ROWS];
        prefetch_group(w, 9);
        UNROLL(16)
        for (uint32_t j = 0; j < 16; j++) {
            const __m512i u = _mm512_cvtepi8_epi16(load_i(w + 32 * j));
            UNROLL(8)
            for (uint32_t m = 0; m < tile; m++) {
                __m512i *sum = j % 2 == 0 ? &even[m] : &odd[m];
                *sum = _mm512_dpwssd_epi32(j < 2 ? _mm512_setzero_si512() : *sum, u,
                                           broadcast4_wide(x.q + m * x.q_stride + g * 64 + 4 * j));
            }
        }
        const __m512 scale_w = load_f16_wide(w + TD_CPU_BYTE_SCALES);
        UNROLL(8)
        for (uint32_t m = 0; m < tile; m++) {
            acc[m] = chain_scaled(_mm512_add_epi32(even[m], odd[m]), scale_w,
                                  x.scale + m * x.groups + g, acc[m]);
        }
    }
    store_rows(job, panel, row, acc, tile);
}

/* --- float weights and activations ------------------------------------------------------------ */

/* Converts k [begin, end) of two panels. Shape: [k][16]. */
ALWAYS_INLINE void float_unpack(const product_job_t *job, uint32_t panel, uint32_t begin,
                                uint32_t end, td_cpu_scratch_t *s, const td_cpu_form_t form)
{
    const uint8_t *w = job->w->bytes + panel / 2 * job->w->pair_bytes;

    for (size_t k = begin; k < end; k++) {
        __m512 value;
        if (form == TD_CPU_F32) {
            value = _mm512_load_ps(w + k * 64);
        } else if (form == TD_CPU_F16) {
            value = load_f16_wide(w + k * 32);
        } else {
            value = _mm512_castsi512_ps(
                _mm512_slli_epi32(_mm512_cvtepu16_epi32(load_i(w + k * 32)), 16));
        }
        _mm512_store_ps(s->panels32 + (k - begin) * 16, value);
    }
}

ALWAYS_INLINE void float_big(const product_job_t *job, const td_cpu_scratch_t *s, uint32_t panel,
                             uint32_t begin, uint32_t end, uint32_t row, const uint32_t tile)
{
    const size_t inputs = job->w->inputs;
    const float *x = job->x->f32 + row * inputs + begin;
    __m512 acc[FLOAT_ROWS];

    load_rows(job, panel, row, begin, acc, tile);
    for (size_t k = 0; k < end - begin; k++) {
        const __m512 w = _mm512_load_ps(s->panels32 + k * 16);
        UNROLL(12)
        for (uint32_t m = 0; m < tile; m++) {
            acc[m] = _mm512_fmadd_ps(w, _mm512_set1_ps(x[m * inputs + k]), acc[m]);
        }
    }
    store_rows(job, panel, row, acc, tile);
}

/* --- drivers: cut rows into tiles whose size is a constant ------------------------------------ */

/* Calls CALL(row, tile) for rows [0, rows) in tiles of 8, and the rest as one: weights are unpacked
 * once for each tile. */
#define SMALL_TILES(rows, CALL)                                                                    \
    do {                                                                                           \
        uint32_t row_ = 0;                                                                         \
        for (; row_ + TILE_ROWS <= (rows); row_ += TILE_ROWS) {                                    \
            CALL(row_, TILE_ROWS);                                                                 \
        }                                                                                          \
        switch ((rows)-row_) {                                                                     \
        case 1:                                                                                    \
            CALL(row_, 1);                                                                         \
            break;                                                                                 \
        case 2:                                                                                    \
            CALL(row_, 2);                                                                         \
            break;                                                                                 \
        case 3:                                                                                    \
            CALL(row_, 3);                                                                         \
            break;                                                                                 \
        case 4:                                                                                    \
            CALL(row_, 4);                                                                         \
            break;                                                                                 \
        case 5:                                                                                    \
            CALL(row_, 5);                                                                         \
            break;                                                                                 \
        case 6:                                                                                    \
            CALL(row_, 6);                                                                         \
            break;                                                                                 \
        case 7:                                                                                    \
            CALL(row_, 7);                                                                         \
            break;                                                                                 \
        default:                                                                                   \
            break;                                                                                 \
        }                                                                                          \
    } while (0)

/* Calls CALL(row, tile) for rows [begin, end) in tiles of TILE, 4, 2 and 1. */
#define BIG_TILES(begin, end, TILE, CALL)                                                          \
    do {                                                                                           \
        uint32_t row_ = (begin);                                                                   \
        for (; row_ + (TILE) <= (end); row_ += (TILE)) {                                           \
            CALL(row_, (TILE));                                                                    \
        }                                                                                          \
        for (; row_ + 4 <= (end); row_ += 4) {                                                     \
            CALL(row_, 4);                                                                         \
        }                                                                                          \
        if (row_ + 2 <= (end)) {                                                                   \
            CALL(row_, 2);                                                                         \
            row_ += 2;                                                                             \
        }                                                                                          \
        if (row_ < (end)) {                                                                        \
            CALL(row_, 1);                                                                         \
        }                                                                                          \
    } while (0)

#define SMALL_PANELS 2u /* of a small tile */
#define BIG_ROWS TILE_ROWS

#include "common/model/cpu/td_cpu_products.h"

const uint8_t *td_cpu_avx512_prepare(const td_cpu_matrix_t *w, const td_cpu_acts_t *x,
                                     uint32_t rows, td_cpu_scratch_t *scratch)
{
    return w->form == TD_CPU_NIBBLE_A16 && rows < BIG_ROWS_MIN ? a16_bytes(w, x, rows, scratch)
                                                               : NULL;
}

void td_cpu_avx512_product(const td_cpu_matrix_t *w, const td_cpu_acts_t *x, uint32_t rows,
                           float *y, uint32_t panel_begin, uint32_t panel_end,
                           td_cpu_scratch_t *scratch)
{
    product_job_t job = {.w = w, .x = x, .y = y, .groups = w->inputs / TD_CPU_GROUP};

    if (w->form >= TD_CPU_F32 && rows < BIG_ROWS_MIN) {
        /* A read of memory for each weight: wider vectors would win nothing. */
        td_cpu_avx2_product(w, x, rows, y, panel_begin, panel_end, scratch);
    } else {
        job.bytes = x->prepared != NULL ? x->prepared : td_cpu_avx512_prepare(w, x, rows, scratch);
        product_form(&job, rows, panel_begin, panel_end, scratch);
    }
}
#else
typedef int td_cpu_avx512_empty_t; /* a translation unit needs a declaration */
#endif

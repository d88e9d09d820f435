/* Matrix products for AVX2 + FMA + F16C; the rest is in td_cpu_avx2_rows.c.
 * A lane is an output row, so no sum ever runs across lanes. Every function here is written for a
 * constant number of rows (`tile`) and inlined, so that its accumulators are registers; arrays
 * have constant sizes because a size from a parameter would make them memory. The order of the
 * statements follows what gcc 12 compiles without spilling. */
#if defined(__x86_64__)
#include "common/model/cpu/td_cpu_avx2.h"

#include "common/base/td_base.h"

#define SMALL_ROWS 4 /* tile of the paths that unpack on the fly */
#define BIG_ROWS 3   /* tile of the paths over unpacked panels: 3 x 2 accumulators */
#define FLOAT_ROWS 6
#define BIG_ROWS_MIN 16u    /* from here on unpacking panels first pays */
#define PREFETCH_BYTES 2048 /* ahead of the one linear stream a thread reads */
/* Activations of a block of rows stay in the L2 cache while all panels pass. */
#define BLOCK_ACT_BYTES 294912u
#define BLOCK_ROWS_MIN 32u

/* Where a panel's first group or k lies: two panels alternate, vector by vector. */
static inline const uint8_t *panel_at(const td_cpu_matrix_t *w, uint32_t panel,
                                      uint32_t vector_bytes)
{
    return w->bytes + panel / 2 * w->pair_bytes + panel % 2 * vector_bytes;
}

/* Its scales or minima in a group. */
static inline __m256 load_panel_f16(const uint8_t *group, uint32_t panel, uint32_t vector_bytes,
                                    uint32_t at)
{
    return load_f16(group - panel % 2 * vector_bytes + at + panel % 2 * 16);
}

/* The last panels may be narrower than 8. */
static inline uint32_t panel_lanes(const td_cpu_matrix_t *w, uint32_t panel)
{
    uint32_t begin = panel * TD_CPU_PANEL;
    return begin >= w->outputs ? 0 : TD_MIN(TD_CPU_PANEL, w->outputs - begin);
}

ALWAYS_INLINE __m256 load_lanes(const float *y, uint32_t lanes)
{
    if (lanes == TD_CPU_PANEL) {
        return _mm256_loadu_ps(y);
    }
    return _mm256_maskload_ps(y, lane_mask(lanes));
}

ALWAYS_INLINE void store_lanes(float *y, uint32_t lanes, __m256 value)
{
    if (lanes == TD_CPU_PANEL) {
        _mm256_storeu_ps(y, value);
    } else {
        _mm256_maskstore_ps(y, lane_mask(lanes), value);
    }
}

ALWAYS_INLINE __m256 fma_scaled(__m256 sums, __m256 scale_w, const float *scale_x, __m256 acc)
{
    return _mm256_fmadd_ps(sums, _mm256_mul_ps(scale_w, _mm256_broadcast_ss(scale_x)), acc);
}

/* The second panel of a pair finds in the cache what was read with the first. */
ALWAYS_INLINE void prefetch_group(const uint8_t *w, const uint32_t lines)
{
    UNROLL(9)
    for (uint32_t i = 0; i < lines; i++) {
        _mm_prefetch((const char *)w + PREFETCH_BYTES + i * 64, _MM_HINT_T0);
    }
}

/* --- 4-bit weights, int8 activations --------------------------------------------------------
 * maddubs: eight times 15 * 127 * 2 stays below 2^15, so int16 sums are exact. */

ALWAYS_INLINE void a8_small(const product_job_t *job, uint32_t panel, uint32_t row,
                            const uint32_t tile)
{
    const uint8_t *w = panel_at(job->w, panel, 32);
    const size_t inputs = job->w->inputs;
    const size_t groups = job->groups;
    const int8_t *q = job->x->q8 + row * inputs;
    const float *scale = job->x->scale8 + row * groups;
    const float *sum = job->x->sum8 + row * groups;
    const __m256i low = _mm256_set1_epi8(15);
    const __m256i ones = _mm256_set1_epi16(1);
    const uint32_t lanes = panel_lanes(job->w, panel);
    __m256 acc[SMALL_ROWS];

    UNROLL(8)
    for (uint32_t m = 0; m < tile; m++) {
        acc[m] = _mm256_setzero_ps();
    }
    for (size_t g = 0; g < groups; g++, w += TD_CPU_NIBBLE_BYTES) {
        __m256i u[8];
        prefetch_group(w, 5);
        UNROLL(4)
        for (uint32_t j = 0; j < 4; j++) {
            __m256i v = load_i(w + 64 * j);
            u[j] = _mm256_and_si256(v, low);
            u[j + 4] = _mm256_and_si256(_mm256_srli_epi16(v, 4), low);
        }
        __m256 scale_w = load_panel_f16(w, panel, 32, TD_CPU_NIBBLE_SCALES);
        __m256 minimum = load_panel_f16(w, panel, 32, TD_CPU_NIBBLE_MINIMA);
        UNROLL(8)
        for (uint32_t m = 0; m < tile; m++) {
            const int8_t *qm = q + m * inputs + g * TD_CPU_GROUP;
            __m256i a = _mm256_maddubs_epi16(u[0], broadcast4(qm));
            UNROLL(8)
            for (uint32_t j = 1; j < 8; j++) {
                a = _mm256_add_epi16(a, _mm256_maddubs_epi16(u[j], broadcast4(qm + 4 * j)));
            }
            __m256 f = _mm256_cvtepi32_ps(_mm256_madd_epi16(a, ones));
            acc[m] = fma_scaled(f, scale_w, scale + m * groups + g, acc[m]);
            acc[m] = _mm256_fmadd_ps(minimum, _mm256_broadcast_ss(sum + m * groups + g), acc[m]);
        }
    }
    UNROLL(8)
    for (uint32_t m = 0; m < tile; m++) {
        store_lanes(job->y + (row + m) * (size_t)job->w->outputs + panel * TD_CPU_PANEL, lanes,
                    acc[m]);
    }
}

/* Unpacks groups [begin, end) of two panels. Shape: [group][vector][panel][32]. */
static void a8_unpack(const product_job_t *job, uint32_t panel, uint32_t begin, uint32_t end,
                      td_cpu_scratch_t *s)
{
    const __m256i low = _mm256_set1_epi8(15);

    for (uint32_t h = 0; h < 2; h++) {
        const uint8_t *w = panel_at(job->w, panel + h, 32) + (size_t)begin * TD_CPU_NIBBLE_BYTES;
        for (uint32_t g = 0; g < end - begin; g++, w += TD_CPU_NIBBLE_BYTES) {
            uint8_t *out = s->panels8 + (g * 16 + h) * 32;
            for (uint32_t j = 0; j < 4; j++) {
                __m256i v = load_i(w + 64 * j);
                store_i(out + j * 64, _mm256_and_si256(v, low));
                store_i(out + (j + 4) * 64, _mm256_and_si256(_mm256_srli_epi16(v, 4), low));
            }
            _mm256_store_ps(s->scales + g * 16 + h * 8,
                            load_panel_f16(w, h, 32, TD_CPU_NIBBLE_SCALES));
            _mm256_store_ps(s->minima + g * 16 + h * 8,
                            load_panel_f16(w, h, 32, TD_CPU_NIBBLE_MINIMA));
        }
    }
}

/* Goes on with the chains of two panels over groups [begin, end). */
ALWAYS_INLINE void a8_big(const product_job_t *job, const td_cpu_scratch_t *s, uint32_t panel,
                          uint32_t begin, uint32_t end, uint32_t row, const uint32_t tile)
{
    const size_t inputs = job->w->inputs;
    const size_t groups = job->groups;
    const int8_t *q = job->x->q8 + row * inputs + begin * TD_CPU_GROUP;
    const float *scale = job->x->scale8 + row * groups + begin;
    const float *sum = job->x->sum8 + row * groups + begin;
    const __m256i ones = _mm256_set1_epi16(1);
    float *y = job->y + row * (size_t)job->w->outputs + panel * TD_CPU_PANEL;
    const uint32_t lanes[2] = {panel_lanes(job->w, panel), panel_lanes(job->w, panel + 1)};
    __m256 acc[BIG_ROWS][2];

    UNROLL(8)
    for (uint32_t m = 0; m < tile; m++) {
        UNROLL(2)
        for (uint32_t h = 0; h < 2; h++) {
            acc[m][h] = begin == 0 ? _mm256_setzero_ps()
                                   : load_lanes(y + m * (size_t)job->w->outputs + 8 * h, lanes[h]);
        }
    }
    for (size_t g = 0; g < end - begin; g++) {
        const uint8_t *u = s->panels8 + g * 512;
        __m256i a[BIG_ROWS][2];
        UNROLL(8)
        for (uint32_t j = 0; j < 8; j++) {
            __m256i w0 = load_i(u + j * 64);
            __m256i w1 = load_i(u + j * 64 + 32);
            UNROLL(8)
            for (uint32_t m = 0; m < tile; m++) {
                __m256i qm = broadcast4(q + m * inputs + g * TD_CPU_GROUP + 4 * j);
                __m256i t0 = _mm256_maddubs_epi16(w0, qm);
                __m256i t1 = _mm256_maddubs_epi16(w1, qm);
                a[m][0] = j == 0 ? t0 : _mm256_add_epi16(a[m][0], t0);
                a[m][1] = j == 0 ? t1 : _mm256_add_epi16(a[m][1], t1);
            }
        }
        UNROLL(8)
        for (uint32_t m = 0; m < tile; m++) {
            UNROLL(2)
            for (uint32_t h = 0; h < 2; h++) {
                __m256 f = _mm256_cvtepi32_ps(_mm256_madd_epi16(a[m][h], ones));
                acc[m][h] = fma_scaled(f, _mm256_load_ps(s->scales + g * 16 + 8 * h),
                                       scale + m * groups + g, acc[m][h]);
                acc[m][h] = _mm256_fmadd_ps(_mm256_load_ps(s->minima + g * 16 + 8 * h),
                                            _mm256_broadcast_ss(sum + m * groups + g), acc[m][h]);
            }
        }
    }
    UNROLL(8)
    for (uint32_t m = 0; m < tile; m++) {
        UNROLL(2)
        for (uint32_t h = 0; h < 2; h++) {
            store_lanes(y + m * (size_t)job->w->outputs + 8 * h, lanes[h], acc[m][h]);
        }
    }
}

/* --- 4-bit weights, int16 activations: int32 sums, exact ------------------------------------ */

ALWAYS_INLINE void a16_small(const product_job_t *job, uint32_t panel, uint32_t row,
                             const uint32_t tile)
{
    const uint8_t *w = panel_at(job->w, panel, 32);
    const size_t inputs = job->w->inputs;
    const size_t groups = job->groups;
    const int16_t *q = job->x->q16 + row * inputs;
    const float *scale = job->x->scale16 + row * groups;
    const float *sum = job->x->sum16 + row * groups;
    const __m256i low = _mm256_set1_epi16(15);
    const uint32_t lanes = panel_lanes(job->w, panel);
    __m256 acc[SMALL_ROWS];

    UNROLL(8)
    for (uint32_t m = 0; m < tile; m++) {
        acc[m] = _mm256_setzero_ps();
    }
    for (size_t g = 0; g < groups; g++, w += TD_CPU_NIBBLE_BYTES) {
        __m256i a[SMALL_ROWS];
        prefetch_group(w, 5);
        UNROLL(4)
        for (uint32_t j = 0; j < 4; j++) {
            __m256i v = load_i(w + 64 * j);
            UNROLL(4)
            for (uint32_t t = 0; t < 4; t++) {
                __m256i u = t == 3 ? _mm256_srli_epi16(v, 12)
                                   : _mm256_and_si256(_mm256_srli_epi16(v, (int)(4 * t)), low);
                UNROLL(8)
                for (uint32_t m = 0; m < tile; m++) {
                    __m256i p = _mm256_madd_epi16(
                        u, broadcast4(q + m * inputs + g * TD_CPU_GROUP + 8 * j + 2 * t));
                    a[m] = (j | t) == 0 ? p : _mm256_add_epi32(a[m], p);
                }
            }
        }
        __m256 scale_w = load_panel_f16(w, panel, 32, TD_CPU_NIBBLE_SCALES);
        __m256 minimum = load_panel_f16(w, panel, 32, TD_CPU_NIBBLE_MINIMA);
        UNROLL(8)
        for (uint32_t m = 0; m < tile; m++) {
            acc[m] = fma_scaled(_mm256_cvtepi32_ps(a[m]), scale_w, scale + m * groups + g, acc[m]);
            acc[m] = _mm256_fmadd_ps(minimum, _mm256_broadcast_ss(sum + m * groups + g), acc[m]);
        }
    }
    UNROLL(8)
    for (uint32_t m = 0; m < tile; m++) {
        store_lanes(job->y + (row + m) * (size_t)job->w->outputs + panel * TD_CPU_PANEL, lanes,
                    acc[m]);
    }
}

static void a16_unpack(const product_job_t *job, uint32_t panel, uint32_t begin, uint32_t end,
                       td_cpu_scratch_t *s)
{
    const __m256i low = _mm256_set1_epi16(15);

    for (uint32_t h = 0; h < 2; h++) {
        const uint8_t *w = panel_at(job->w, panel + h, 32) + (size_t)begin * TD_CPU_NIBBLE_BYTES;
        for (uint32_t g = 0; g < end - begin; g++, w += TD_CPU_NIBBLE_BYTES) {
            uint8_t *out = s->panels16 + (g * 32 + h) * 32;
            for (uint32_t j = 0; j < 4; j++) {
                __m256i v = load_i(w + 64 * j);
                for (uint32_t t = 0; t < 4; t++) {
                    store_i(out + (j * 4 + t) * 64, _mm256_and_si256(v, low));
                    v = _mm256_srli_epi16(v, 4);
                }
            }
            _mm256_store_ps(s->scales + g * 16 + h * 8,
                            load_panel_f16(w, h, 32, TD_CPU_NIBBLE_SCALES));
            _mm256_store_ps(s->minima + g * 16 + h * 8,
                            load_panel_f16(w, h, 32, TD_CPU_NIBBLE_MINIMA));
        }
    }
}

ALWAYS_INLINE void a16_big(const product_job_t *job, const td_cpu_scratch_t *s, uint32_t panel,
                           uint32_t begin, uint32_t end, uint32_t row, const uint32_t tile)
{
    const size_t inputs = job->w->inputs;
    const size_t groups = job->groups;
    const int16_t *q = job->x->q16 + row * inputs + begin * TD_CPU_GROUP;
    const float *scale = job->x->scale16 + row * groups + begin;
    const float *sum = job->x->sum16 + row * groups + begin;
    float *y = job->y + row * (size_t)job->w->outputs + panel * TD_CPU_PANEL;
    const uint32_t lanes[2] = {panel_lanes(job->w, panel), panel_lanes(job->w, panel + 1)};
    __m256 acc[BIG_ROWS][2];

    UNROLL(8)
    for (uint32_t m = 0; m < tile; m++) {
        UNROLL(2)
        for (uint32_t h = 0; h < 2; h++) {
            acc[m][h] = begin == 0 ? _mm256_setzero_ps()
                                   : load_lanes(y + m * (size_t)job->w->outputs + 8 * h, lanes[h]);
        }
    }
    for (size_t g = 0; g < end - begin; g++) {
        const uint8_t *u = s->panels16 + g * 1024;
        __m256i a[BIG_ROWS][2];
        UNROLL(16)
        for (uint32_t j = 0; j < 16; j++) {
            __m256i w0 = load_i(u + j * 64);
            __m256i w1 = load_i(u + j * 64 + 32);
            UNROLL(8)
            for (uint32_t m = 0; m < tile; m++) {
                __m256i qm = broadcast4(q + m * inputs + g * TD_CPU_GROUP + 2 * j);
                __m256i t0 = _mm256_madd_epi16(w0, qm);
                __m256i t1 = _mm256_madd_epi16(w1, qm);
                a[m][0] = j == 0 ? t0 : _mm256_add_epi32(a[m][0], t0);
                a[m][1] = j == 0 ? t1 : _mm256_add_epi32(a[m][1], t1);
            }
        }
        UNROLL(8)
        for (uint32_t m = 0; m < tile; m++) {
            UNROLL(2)
            for (uint32_t h = 0; h < 2; h++) {
                acc[m][h] = fma_scaled(_mm256_cvtepi32_ps(a[m][h]),
                                       _mm256_load_ps(s->scales + g * 16 + 8 * h),
                                       scale + m * groups + g, acc[m][h]);
                acc[m][h] = _mm256_fmadd_ps(_mm256_load_ps(s->minima + g * 16 + 8 * h),
                                            _mm256_broadcast_ss(sum + m * groups + g), acc[m][h]);
            }
        }
    }
    UNROLL(8)
    for (uint32_t m = 0; m < tile; m++) {
        UNROLL(2)
        for (uint32_t h = 0; h < 2; h++) {
            store_lanes(y + m * (size_t)job->w->outputs + 8 * h, lanes[h], acc[m][h]);
        }
    }
}

/* --- 8-bit weights, int16 activations ------------------------------------------------------- */

ALWAYS_INLINE void bytes_small(const product_job_t *job, uint32_t panel, uint32_t row,
                               const uint32_t tile)
{
    const uint8_t *w = panel_at(job->w, panel, 16);
    const size_t inputs = job->w->inputs;
    const size_t groups = job->groups;
    const int16_t *q = job->x->q16 + row * inputs;
    const float *scale = job->x->scale16 + row * groups;
    const uint32_t lanes = panel_lanes(job->w, panel);
    __m256 acc[SMALL_ROWS];

    UNROLL(8)
    for (uint32_t m = 0; m < tile; m++) {
        acc[m] = _mm256_setzero_ps();
    }
    for (size_t g = 0; g < groups; g++, w += TD_CPU_BYTE_BYTES) {
        __m256i a[SMALL_ROWS];
        prefetch_group(w, 9);
        UNROLL(16)
        for (uint32_t j = 0; j < 16; j++) {
            __m256i u = _mm256_cvtepi8_epi16(_mm_load_si128((const __m128i *)(w + 32 * j)));
            UNROLL(8)
            for (uint32_t m = 0; m < tile; m++) {
                __m256i p =
                    _mm256_madd_epi16(u, broadcast4(q + m * inputs + g * TD_CPU_GROUP + 2 * j));
                a[m] = j == 0 ? p : _mm256_add_epi32(a[m], p);
            }
        }
        __m256 scale_w = load_panel_f16(w, panel, 16, TD_CPU_BYTE_SCALES);
        UNROLL(8)
        for (uint32_t m = 0; m < tile; m++) {
            acc[m] = fma_scaled(_mm256_cvtepi32_ps(a[m]), scale_w, scale + m * groups + g, acc[m]);
        }
    }
    UNROLL(8)
    for (uint32_t m = 0; m < tile; m++) {
        store_lanes(job->y + (row + m) * (size_t)job->w->outputs + panel * TD_CPU_PANEL, lanes,
                    acc[m]);
    }
}

/* --- float weights and activations ---------------------------------------------------------- */

/* Eight weights of one k: those of a pair's first panel (h 0) or second one (h 1). */
ALWAYS_INLINE __m256 load_float(const uint8_t *pair, size_t k, const uint32_t h,
                                const td_cpu_form_t form)
{
    if (form == TD_CPU_F32) {
        return _mm256_load_ps((const float *)(const void *)(pair + k * 64 + h * 32));
    }
    if (form == TD_CPU_F16) {
        return load_f16(pair + k * 32 + h * 16);
    }
    return _mm256_castsi256_ps(_mm256_slli_epi32(
        _mm256_cvtepu16_epi32(_mm_load_si128((const __m128i *)(pair + k * 32 + h * 16))), 16));
}

/* One chain a lane has a latency of 4 at each k, so two panels run side by side. */
ALWAYS_INLINE void float_small(const product_job_t *job, uint32_t panel, uint32_t row,
                               const uint32_t tile, const td_cpu_form_t form)
{
    const uint8_t *w = panel_at(job->w, panel, 0);
    const size_t inputs = job->w->inputs;
    const float *x = job->x->f32 + row * inputs;
    float *y = job->y + row * (size_t)job->w->outputs + panel * TD_CPU_PANEL;
    const uint32_t lanes[2] = {panel_lanes(job->w, panel), panel_lanes(job->w, panel + 1)};
    __m256 acc[SMALL_ROWS][2];

    UNROLL(8)
    for (uint32_t m = 0; m < tile; m++) {
        acc[m][0] = acc[m][1] = _mm256_setzero_ps();
    }
    for (size_t k = 0; k < inputs; k++) {
        __m256 f0 = load_float(w, k, 0, form);
        __m256 f1 = load_float(w, k, 1, form);
        UNROLL(8)
        for (uint32_t m = 0; m < tile; m++) {
            __m256 xm = _mm256_broadcast_ss(x + m * inputs + k);
            acc[m][0] = _mm256_fmadd_ps(f0, xm, acc[m][0]);
            acc[m][1] = _mm256_fmadd_ps(f1, xm, acc[m][1]);
        }
    }
    UNROLL(8)
    for (uint32_t m = 0; m < tile; m++) {
        UNROLL(2)
        for (uint32_t h = 0; h < 2; h++) {
            store_lanes(y + m * (size_t)job->w->outputs + 8 * h, lanes[h], acc[m][h]);
        }
    }
}

ALWAYS_INLINE void float_unpack(const product_job_t *job, uint32_t panel, uint32_t begin,
                                uint32_t end, td_cpu_scratch_t *s, const td_cpu_form_t form)
{
    for (uint32_t h = 0; h < 2; h++) {
        const uint8_t *w = panel_at(job->w, panel, 0);
        for (size_t k = begin; k < end; k++) {
            _mm256_store_ps(s->panels32 + (k - begin) * 16 + h * 8, load_float(w, k, h, form));
        }
    }
}

ALWAYS_INLINE void float_big(const product_job_t *job, const td_cpu_scratch_t *s, uint32_t panel,
                             uint32_t begin, uint32_t end, uint32_t row, const uint32_t tile)
{
    const size_t inputs = job->w->inputs;
    const float *x = job->x->f32 + row * inputs + begin;
    float *y = job->y + row * (size_t)job->w->outputs + panel * TD_CPU_PANEL;
    const uint32_t lanes[2] = {panel_lanes(job->w, panel), panel_lanes(job->w, panel + 1)};
    __m256 acc[FLOAT_ROWS][2];

    UNROLL(8)
    for (uint32_t m = 0; m < tile; m++) {
        UNROLL(2)
        for (uint32_t h = 0; h < 2; h++) {
            acc[m][h] = begin == 0 ? _mm256_setzero_ps()
                                   : load_lanes(y + m * (size_t)job->w->outputs + 8 * h, lanes[h]);
        }
    }
    for (size_t k = 0; k < end - begin; k++) {
        __m256 w0 = _mm256_load_ps(s->panels32 + k * 16);
        __m256 w1 = _mm256_load_ps(s->panels32 + k * 16 + 8);
        UNROLL(8)
        for (uint32_t m = 0; m < tile; m++) {
            __m256 xm = _mm256_broadcast_ss(x + m * inputs + k);
            acc[m][0] = _mm256_fmadd_ps(w0, xm, acc[m][0]);
            acc[m][1] = _mm256_fmadd_ps(w1, xm, acc[m][1]);
        }
    }
    UNROLL(8)
    for (uint32_t m = 0; m < tile; m++) {
        UNROLL(2)
        for (uint32_t h = 0; h < 2; h++) {
            store_lanes(y + m * (size_t)job->w->outputs + 8 * h, lanes[h], acc[m][h]);
        }
    }
}

/* --- drivers: cut rows into tiles whose size is a constant ----------------------------------- */

/* Calls CALL(row, tile) for rows [0, rows) in tiles of 4, and the rest as one. */
#define SMALL_TILES(rows, CALL)                                                                    \
    do {                                                                                           \
        uint32_t row_ = 0;                                                                         \
        for (; row_ + 4 <= (rows); row_ += 4) {                                                    \
            CALL(row_, 4);                                                                         \
        }                                                                                          \
        if (row_ + 3 == (rows)) {                                                                  \
            CALL(row_, 3);                                                                         \
        } else if (row_ + 2 == (rows)) {                                                           \
            CALL(row_, 2);                                                                         \
        } else if (row_ + 1 == (rows)) {                                                           \
            CALL(row_, 1);                                                                         \
        }                                                                                          \
    } while (0)

/* Calls CALL(row, tile) for rows [begin, end) in tiles of TILE, then 2 and 1. */
#define BIG_TILES(begin, end, TILE, CALL)                                                          \
    do {                                                                                           \
        uint32_t row_ = (begin);                                                                   \
        for (; row_ + (TILE) <= (end); row_ += (TILE)) {                                           \
            CALL(row_, (TILE));                                                                    \
        }                                                                                          \
        for (; row_ + 2 <= (end); row_ += 2) {                                                     \
            CALL(row_, 2);                                                                         \
        }                                                                                          \
        if (row_ < (end)) {                                                                        \
            CALL(row_, 1);                                                                         \
        }                                                                                          \
    } while (0)

#define SMALL_PANELS 1u /* of a small tile */

#include "common/model/cpu/td_cpu_products.h"

ALWAYS_INLINE void float_small_rows(const product_job_t *job, uint32_t rows, uint32_t panel_begin,
                                    uint32_t panel_end, const td_cpu_form_t form)
{
    for (uint32_t p = panel_begin; p < panel_end; p += 2) {
#define CALL(row, tile) float_small(job, p, row, tile, form)
        SMALL_TILES(rows, CALL);
#undef CALL
    }
}

static void product_float_small(const product_job_t *job, uint32_t rows, uint32_t panel_begin,
                                uint32_t panel_end)
{
    if (job->w->form == TD_CPU_F32) {
        float_small_rows(job, rows, panel_begin, panel_end, TD_CPU_F32);
    } else if (job->w->form == TD_CPU_F16) {
        float_small_rows(job, rows, panel_begin, panel_end, TD_CPU_F16);
    } else {
        float_small_rows(job, rows, panel_begin, panel_end, TD_CPU_BF16);
    }
}

void td_cpu_avx2_product(const td_cpu_matrix_t *w, const td_cpu_acts_t *x, uint32_t rows, float *y,
                         uint32_t panel_begin, uint32_t panel_end, td_cpu_scratch_t *scratch)
{
    const product_job_t job = {.w = w, .x = x, .y = y, .groups = w->inputs / TD_CPU_GROUP};

    if (w->form >= TD_CPU_F32 && rows < BIG_ROWS_MIN) {
        product_float_small(&job, rows, panel_begin, panel_end);
    } else {
        product_form(&job, rows, panel_begin, panel_end, scratch);
    }
}
#else
typedef int td_cpu_avx2_empty_t; /* a translation unit needs a declaration */
#endif

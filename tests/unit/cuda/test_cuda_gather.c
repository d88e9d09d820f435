/* Pieces of rows that lie apart come together, in every order of a block's threads: floats, whole
 * rows by their tokens, floats that are quantised then, and pieces that are quantised already. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include "tests/unit/cuda/test_cuda_rig.h"

enum { ROWS = 5, DIM = 704, PIECES = 5, STRIDE = 768, GROUPS = DIM / 32 };

/* Columns where a piece ends; one piece is empty. */
static const uint32_t ends[PIECES] = {32, 32, 160, 672, DIM};

static float rows[ROWS * DIM];

static void fill_rows(void)
{
    uint64_t seed = 3;

    for (uint32_t i = 0; i < ROWS * DIM; i++) {
        rows[i] = cuda_random(&seed, i % 7 == 0 ? 100.0f : 1.0f);
    }
}

static uint32_t begin_of(uint32_t piece)
{
    return piece == 0 ? 0 : ends[piece - 1];
}

/* [row][width] of the whole's columns. Owner: the caller frees it with device_free(). */
static void *piece_copy(const void *whole, size_t row_bytes, size_t begin, size_t end)
{
    unsigned char *bytes = malloc(ROWS * (end - begin) + 1);
    void *address = NULL;

    assert_non_null(bytes);
    for (size_t r = 0; r < ROWS; r++) {
        memcpy(bytes + r * (end - begin), (const unsigned char *)whole + r * row_bytes + begin,
               end - begin);
    }
    address = device_copy(bytes, ROWS * (end - begin));
    free(bytes);
    return address;
}

static td_cuda_acts_t acts_alloc(void)
{
    return (td_cuda_acts_t){.high = device_alloc((size_t)ROWS * STRIDE),
                            .low = device_alloc((size_t)ROWS * STRIDE),
                            .scale = device_alloc((size_t)ROWS * STRIDE / 32 * sizeof(float)),
                            .sum = device_alloc((size_t)ROWS * STRIDE / 32 * sizeof(float)),
                            .stride = STRIDE};
}

static void acts_free(const td_cuda_acts_t *a)
{
    device_free(a->high);
    device_free(a->low);
    device_free(a->scale);
    device_free(a->sum);
}

/* The CPU's quantised rows, in planes. */
typedef struct planes {
    int8_t high[ROWS * DIM];
    uint8_t low[ROWS * DIM];
    float scale[ROWS * GROUPS];
    float sum[ROWS * GROUPS];
} planes_t;

static void quantise_rows(planes_t *p, bool wide)
{
    for (size_t r = 0; r < ROWS; r++) {
        int8_t q8[DIM];
        int16_t q16[DIM];
        if (wide) {
            td_cpu_portable_ops.quantise16(rows + r * DIM, DIM, TD_CPU_INT16_MAX, q16,
                                           p->scale + r * GROUPS, p->sum + r * GROUPS);
        } else {
            td_cpu_portable_ops.quantise8(rows + r * DIM, DIM, q8, p->scale + r * GROUPS,
                                          p->sum + r * GROUPS);
        }
        for (size_t k = 0; k < DIM; k++) {
            p->high[r * DIM + k] = (int8_t)(wide ? q16[k] >> 8 : q8[k]);
            p->low[r * DIM + k] = (uint8_t)(wide ? q16[k] & 0xff : 0xff); /* as new memory */
        }
    }
}

static void assert_acts(const planes_t *want, const td_cuda_acts_t *got, bool wide)
{
    int8_t high[STRIDE];
    uint8_t low[STRIDE];
    float scale[STRIDE / 32];
    float sum[STRIDE / 32];

    for (size_t r = 0; r < ROWS; r++) {
        device_get(high, got->high + r * STRIDE, sizeof(high));
        device_get(low, got->low + r * STRIDE, sizeof(low));
        device_get(scale, got->scale + r * (STRIDE / 32), sizeof(scale));
        device_get(sum, got->sum + r * (STRIDE / 32), sizeof(sum));
        assert_memory_equal(high, want->high + r * DIM, DIM);
        if (wide) {
            assert_memory_equal(low, want->low + r * DIM, DIM);
        }
        assert_memory_equal(scale, want->scale + r * GROUPS, GROUPS * sizeof(float));
        assert_memory_equal(sum, want->sum + r * GROUPS, GROUPS * sizeof(float));
    }
}

static void test_floats_come_together_and_are_quantised(void **state)
{
    static planes_t want;
    static float got[ROWS * DIM];

    (void)state;
    fill_rows();
    for (uint32_t turn = 0; turn < 2 * cuda_orders(); turn++) {
        const bool wide = turn % 2 == 1;
        td_cuda_gather_t p = {.count = PIECES, .dim = DIM};
        const td_cuda_acts_t acts = acts_alloc();
        p.out = device_alloc(sizeof(rows));
        p.quantise.limit16 = TD_CPU_INT16_MAX;
        *(wide ? &p.quantise.int16 : &p.quantise.int8) = acts;
        for (uint32_t s = 0; s < PIECES; s++) {
            p.pieces[s] =
                (td_cuda_piece_t){piece_copy(rows, DIM * sizeof(float), begin_of(s) * sizeof(float),
                                             ends[s] * sizeof(float)),
                                  begin_of(s), ends[s] - begin_of(s)};
        }
        cuda_set_order(turn / 2);
        assert_int_equal(td_cuda_launch_gather(NULL, &p, ROWS), TD_OK);
        device_get(got, p.out, sizeof(got));
        cuda_assert_same_bits(rows, got, ROWS * DIM, "gathered");
        quantise_rows(&want, wide);
        assert_acts(&want, &acts, wide);
        for (uint32_t s = 0; s < PIECES; s++) {
            device_free(p.pieces[s].from);
        }
        device_free(p.out);
        acts_free(&acts);
    }
}

/* Each row whole, from who has its token; of the others' rows nobody has written anything. */
static void test_rows_come_from_who_has_their_token(void **state)
{
    static const uint32_t tokens[ROWS] = {0, 31, 32, 703, 159};
    static float got[ROWS * DIM];

    (void)state;
    fill_rows();
    for (uint32_t order = 0; order < cuda_orders(); order++) {
        td_cuda_gather_t p = {.count = PIECES, .dim = DIM, .out = device_alloc(sizeof(rows))};
        p.tokens = device_copy(tokens, sizeof(tokens));
        for (uint32_t s = 0; s < PIECES; s++) {
            float *mine = device_alloc(sizeof(rows));
            for (size_t r = 0; r < ROWS; r++) {
                if (tokens[r] >= begin_of(s) && tokens[r] < ends[s]) {
                    device_put(mine + r * DIM, rows + r * DIM, DIM * sizeof(float));
                }
            }
            p.pieces[s] = (td_cuda_piece_t){mine, begin_of(s), ends[s] - begin_of(s)};
        }
        cuda_set_order(order);
        assert_int_equal(td_cuda_launch_gather(NULL, &p, ROWS), TD_OK);
        device_get(got, p.out, sizeof(got));
        cuda_assert_same_bits(rows, got, ROWS * DIM, "rows of tokens");
        for (uint32_t s = 0; s < PIECES; s++) {
            device_free(p.pieces[s].from);
        }
        device_free(p.out);
        device_free(p.tokens);
    }
}

static void test_quantised_pieces_come_together(void **state)
{
    static planes_t want;

    (void)state;
    fill_rows();
    for (uint32_t turn = 0; turn < 2 * cuda_orders(); turn++) {
        const bool wide = turn % 2 == 1;
        td_cuda_gather_acts_t p = {
            .count = PIECES, .dim = DIM, .wide = wide ? 1 : 0, .out = acts_alloc()};
        quantise_rows(&want, wide);
        for (uint32_t s = 0; s < PIECES; s++) {
            const size_t begin = begin_of(s);
            const size_t first = begin / 32 * sizeof(float);
            const size_t last = ends[s] / 32 * sizeof(float);
            p.pieces[s] = (td_cuda_acts_piece_t){
                {.high = piece_copy(want.high, DIM, begin, ends[s]),
                 .low = piece_copy(want.low, DIM, begin, ends[s]),
                 .scale = piece_copy(want.scale, GROUPS * sizeof(float), first, last),
                 .sum = piece_copy(want.sum, GROUPS * sizeof(float), first, last),
                 .stride = (uint32_t)(ends[s] - begin)},
                (uint32_t)begin};
        }
        cuda_set_order(turn / 2);
        assert_int_equal(td_cuda_launch_gather_acts(NULL, &p, ROWS), TD_OK);
        assert_acts(&want, &p.out, wide);
        for (uint32_t s = 0; s < PIECES; s++) {
            acts_free(&p.pieces[s].acts);
        }
        acts_free(&p.out);
    }
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_floats_come_together_and_are_quantised),
    cmocka_unit_test(test_rows_come_from_who_has_their_token),
    cmocka_unit_test(test_quantised_pieces_come_together),
};
CUDA_TEST_MAIN(tests)

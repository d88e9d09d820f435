/* Products on the device: the CPU's bits in every form, for any number of rows, and whatever else
 * is in the launch. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include "tests/unit/cuda/test_cuda_rig.h"

enum { ROWS_MAX = 70, INPUTS_MAX = 1824, OUTPUTS_MAX = 100 };

static const td_gguf_type_t all_types[] = {TD_GGUF_F32,  TD_GGUF_F16,  TD_GGUF_BF16,
                                           TD_GGUF_Q8_0, TD_GGUF_Q4_0, TD_GGUF_Q4_1};

/* A matrix on both sides. */
typedef struct both {
    tiny_t bytes;
    td_arena_t *arena;
    td_cpu_matrix_t host;
    td_cuda_matrix_t device;
} both_t;

static void both_init(both_t *b, td_gguf_type_t type, bool int8, uint32_t inputs, uint32_t outputs,
                      uint64_t seed)
{
    const size_t count = (size_t)inputs * outputs;
    double *values = calloc(count, sizeof(*values));
    td_gguf_tensor_t tensor = {.name = "w", .dims = {inputs, outputs, 1, 1}, .type = type};
    uint8_t *packed = NULL;

    *b = (both_t){.bytes = {.random = seed}, .arena = td_arena_create()};
    for (size_t i = 0; i < count; i++) {
        values[i] = tiny_random(&b->bytes);
    }
    tiny_put_values(&b->bytes, type, values, count);
    tensor.bytes = b->bytes.bytes;
    tensor.byte_count = b->bytes.len;
    assert_int_equal(td_cpu_pack(&tensor, int8, b->arena, &b->host), TD_OK);
    b->device = td_cuda_pack_plan(&b->host);
    packed = malloc(td_cuda_pairs(&b->device) * b->device.pair_bytes);
    td_cuda_pack_pairs(&b->host, &b->device, 0, td_cuda_pairs(&b->device), packed);
    b->device.bytes = device_copy(packed, td_cuda_pairs(&b->device) * b->device.pair_bytes);
    free(packed);
    free(values);
}

static void both_fini(both_t *b)
{
    device_free(b->device.bytes);
    td_arena_destroy(b->arena);
    free(b->bytes.bytes);
}

/* Activations on both sides, in all forms. */
typedef struct acts {
    td_cpu_acts_t host;
    td_cuda_acts_t int8;
    td_cuda_acts_t int16;
    float *f32; /* of the device */
} acts_t;

static void device_acts_init(td_cuda_acts_t *a, uint32_t rows, uint32_t inputs)
{
    a->stride = (inputs + 127) / 128 * 128;
    a->high = device_alloc((size_t)rows * a->stride);
    a->low = device_alloc((size_t)rows * a->stride);
    a->scale = device_alloc((size_t)rows * a->stride / 32 * 4);
    a->sum = device_alloc((size_t)rows * a->stride / 32 * 4);
}

/* What the CPU has quantised, in the device's layout; wide: int16. */
static void put_acts(const td_cuda_acts_t *a, const td_cpu_acts_t *host, uint32_t rows,
                     uint32_t inputs, bool wide)
{
    const uint32_t groups = inputs / 32;

    for (uint32_t r = 0; r < rows; r++) {
        int8_t high[INPUTS_MAX];
        uint8_t low[INPUTS_MAX];
        for (uint32_t k = 0; k < inputs; k++) {
            const int32_t q =
                wide ? host->q16[(size_t)r * inputs + k] : host->q8[(size_t)r * inputs + k];
            high[k] = (int8_t)(wide ? q >> 8 : q);
            low[k] = (uint8_t)(q & 0xff);
        }
        device_put(a->high + (size_t)r * a->stride, high, inputs);
        device_put(a->low + (size_t)r * a->stride, low, inputs);
        device_put(a->scale + (size_t)r * (a->stride / 32),
                   (wide ? host->scale16 : host->scale8) + (size_t)r * groups, groups * 4);
        device_put(a->sum + (size_t)r * (a->stride / 32),
                   (wide ? host->sum16 : host->sum8) + (size_t)r * groups, groups * 4);
    }
}

static void acts_init(acts_t *a, uint32_t rows, uint32_t inputs)
{
    static float x[ROWS_MAX * INPUTS_MAX];
    static int8_t q8[ROWS_MAX * INPUTS_MAX];
    static int16_t q16[ROWS_MAX * INPUTS_MAX];
    static float scales[4][ROWS_MAX * INPUTS_MAX / 32];
    const uint32_t whole = inputs / 32 * 32;
    uint64_t seed = 11;

    a->host = (td_cpu_acts_t){.f32 = x,
                              .q8 = q8,
                              .scale8 = scales[0],
                              .sum8 = scales[1],
                              .q16 = q16,
                              .scale16 = scales[2],
                              .sum16 = scales[3]};
    for (size_t i = 0; i < (size_t)rows * inputs; i++) {
        x[i] = cuda_random(&seed, i / inputs % 3 == 1 ? 100.0f : 1.0f);
    }
    for (uint32_t r = 0; r < rows && whole == inputs; r++) {
        const size_t at = (size_t)r * inputs;
        td_cpu_portable_ops.quantise8(x + at, inputs, q8 + at, scales[0] + at / 32,
                                      scales[1] + at / 32);
        td_cpu_portable_ops.quantise16(x + at, inputs, TD_CPU_INT16_MAX, q16 + at,
                                       scales[2] + at / 32, scales[3] + at / 32);
    }
    device_acts_init(&a->int8, rows, inputs);
    device_acts_init(&a->int16, rows, inputs);
    put_acts(&a->int8, &a->host, rows, whole, false);
    put_acts(&a->int16, &a->host, rows, whole, true);
    a->f32 = device_copy(x, (size_t)rows * inputs * sizeof(float));
}

static void acts_fini(acts_t *a)
{
    const td_cuda_acts_t *const both[] = {&a->int8, &a->int16};

    for (size_t i = 0; i < TD_ARRAY_LEN(both); i++) {
        device_free(both[i]->high);
        device_free(both[i]->low);
        device_free(both[i]->scale);
        device_free(both[i]->sum);
    }
    device_free(a->f32);
}

static void run_product(const both_t *matrices, uint32_t count, const acts_t *a, uint32_t rows,
                        float *const *y)
{
    td_cuda_product_t p = {.count = count,
                           .rows = rows,
                           .acts = matrices[0].device.wide ? a->int16 : a->int8,
                           .f32 = a->f32,
                           .f32_stride = matrices[0].device.inputs};

    for (uint32_t i = 0; i < count; i++) {
        p.w[i] = matrices[i].device;
        p.y[i] = device_alloc((size_t)rows * matrices[i].device.outputs * sizeof(float));
    }
    assert_int_equal(td_cuda_launch_init(0, 64, 64), TD_OK);
    assert_int_equal(td_cuda_launch_product(NULL, &p), TD_OK);
    for (uint32_t i = 0; i < count; i++) {
        device_get(y[i], p.y[i], (size_t)rows * matrices[i].device.outputs * sizeof(float));
        device_free(p.y[i]);
    }
}

static void check_product(td_gguf_type_t type, bool int8, uint32_t inputs, uint32_t outputs)
{
    static const uint32_t row_counts[] = {1, 2, 7, 8, 9, 37, 70};
    static float want[ROWS_MAX * OUTPUTS_MAX];
    static float got[ROWS_MAX * OUTPUTS_MAX];
    float *const y[] = {got};
    both_t b;
    acts_t a;
    td_cpu_scratch_t *scratch = NULL;

    both_init(&b, type, int8, inputs, outputs, 5);
    acts_init(&a, ROWS_MAX, inputs);
    assert_int_equal(td_cpu_scratch_create(8, 1, inputs, &scratch), TD_OK);
    td_cpu_portable_ops.product(&b.host, &a.host, ROWS_MAX, want, 0, b.host.panels, scratch);
    for (size_t i = 0; i < TD_ARRAY_LEN(row_counts); i++) {
        for (uint32_t order = 0; order < cuda_orders(); order++) {
            cuda_set_order(order);
            run_product(&b, 1, &a, row_counts[i], y);
            cuda_assert_same_bits(want, got, (size_t)row_counts[i] * outputs, "product");
        }
    }
    td_free(scratch);
    acts_fini(&a);
    both_fini(&b);
}

static void test_products_have_the_bits_of_the_cpu(void **state)
{
    (void)state;
    for (size_t i = 0; i < TD_ARRAY_LEN(all_types); i++) {
        for (int int8 = 0; int8 < (i < 3 ? 1 : 2); int8++) {
            check_product(all_types[i], int8 != 0, 576, 48);
            check_product(all_types[i], int8 != 0, 32, 5);
            check_product(all_types[i], int8 != 0, 160, 100);
        }
    }
    check_product(TD_GGUF_F16, false, 72, 17); /* float forms know no groups */
    check_product(TD_GGUF_Q4_1, true, INPUTS_MAX, 33);
}

/* Three in a launch, of different sizes, as q, k and v are. */
static void test_products_of_one_launch_are_those_of_three(void **state)
{
    static float want[ROWS_MAX * OUTPUTS_MAX];
    static float got[3][ROWS_MAX * OUTPUTS_MAX];
    static const uint32_t outputs[] = {96, 40, 17};
    float *const all[] = {got[0], got[1], got[2]};
    float *const one[] = {want};
    both_t b[3];
    acts_t a;

    (void)state;
    for (uint32_t i = 0; i < 3; i++) {
        both_init(&b[i], TD_GGUF_Q4_0, false, 96, outputs[i], 20 + i);
    }
    acts_init(&a, ROWS_MAX, 96);
    for (uint32_t rows = 3; rows < ROWS_MAX; rows += 60) {
        run_product(b, 3, &a, rows, all);
        for (uint32_t i = 0; i < 3; i++) {
            run_product(&b[i], 1, &a, rows, one);
            cuda_assert_same_bits(want, got[i], (size_t)rows * outputs[i], "one of three");
        }
    }
    acts_fini(&a);
    for (uint32_t i = 0; i < 3; i++) {
        both_fini(&b[i]);
    }
}

/* The largest sums that can be: every integer at its limit. */
static void test_products_are_exact_at_the_limits(void **state)
{
    static float want[8 * 16];
    static float got[8 * 16];
    float *const y[] = {got};
    const struct {
        td_gguf_type_t type;
        uint8_t byte;
    } cases[] = {{TD_GGUF_Q4_1, 0xff}, {TD_GGUF_Q4_0, 0x00}, {TD_GGUF_Q8_0, 0x81}};

    (void)state;
    for (size_t c = 0; c < TD_ARRAY_LEN(cases); c++) {
        const size_t group = cases[c].type == TD_GGUF_Q8_0   ? 34
                             : cases[c].type == TD_GGUF_Q4_1 ? 20
                                                             : 18;
        for (int int8 = 0; int8 < 2; int8++) {
            both_t b;
            acts_t a;
            uint8_t *packed = NULL;
            td_gguf_tensor_t tensor = {.name = "w", .dims = {64, 16, 1, 1}, .type = cases[c].type};
            both_init(&b, cases[c].type, int8 != 0, 64, 16, 3);
            for (size_t g = 0; g < b.bytes.len / group; g++) {
                memset(b.bytes.bytes + (g + 1) * group - (group == 34 ? 32 : 16), cases[c].byte,
                       group == 34 ? 32 : 16);
            }
            tensor.bytes = b.bytes.bytes;
            tensor.byte_count = b.bytes.len;
            assert_int_equal(td_cpu_pack(&tensor, int8 != 0, b.arena, &b.host), TD_OK);
            packed = malloc(b.device.pair_bytes);
            td_cuda_pack_pairs(&b.host, &b.device, 0, 1, packed);
            device_free(b.device.bytes);
            b.device.bytes = device_copy(packed, b.device.pair_bytes);
            free(packed);
            acts_init(&a, 8, 64);
            for (size_t i = 0; i < (size_t)8 * 64; i++) {
                a.host.q8[i] = i / 64 % 2 == 0 ? -127 : 127;
                a.host.q16[i] = i / 64 % 2 == 0 ? -32767 : 32767;
            }
            put_acts(&a.int8, &a.host, 8, 64, false);
            put_acts(&a.int16, &a.host, 8, 64, true);
            td_cpu_portable_ops.product(&b.host, &a.host, 8, want, 0, b.host.panels, NULL);
            run_product(&b, 1, &a, 8, y);
            cuda_assert_same_bits(want, got, TD_ARRAY_LEN(want), "limits");
            acts_fini(&a);
            both_fini(&b);
        }
    }
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_products_have_the_bits_of_the_cpu),
    cmocka_unit_test(test_products_of_one_launch_are_those_of_three),
    cmocka_unit_test(test_products_are_exact_at_the_limits),
};
CUDA_TEST_MAIN(tests)

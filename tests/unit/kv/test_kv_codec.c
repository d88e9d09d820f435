/* What is stored is exactly defined: every code, every rounding, every row. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_float.h"
#include "common/kv/td_kv_codec.h"

enum { ROW = 64 };

static const float limits[TD_KV_CODECS] = {0, TD_KV_F8_MAX, TD_KV_I8_MAX, TD_KV_F4_MAX};

static void test_names_are_those_of_the_option(void **state)
{
    static const char *const wrong[] = {"", "F16", "f16 ", "f8", "i8|f16", "fp8"};
    char text[] = TD_KV_CODEC_NAMES;
    td_kv_codec_t codec = TD_KV_I8;
    uint32_t count = 0;
    (void)state;

    for (char *name = strtok(text, "|"); name != NULL; name = strtok(NULL, "|")) {
        assert_int_equal(td_kv_codec_parse(name, &codec), TD_OK);
        assert_int_equal(codec, count++);
        assert_string_equal(td_kv_codec_name(codec), name);
    }
    assert_int_equal(count, TD_KV_CODECS);
    assert_int_equal(td_kv_codec_parse(TD_KV_CODEC_DEFAULT, &codec), TD_OK);
    assert_int_equal(codec, TD_KV_F16);
    for (size_t i = 0; i < TD_ARRAY_LEN(wrong); i++) {
        assert_int_equal(td_kv_codec_parse(wrong[i], &codec), TD_ERR_INVALID);
        assert_int_equal(codec, TD_KV_F16);
    }
}

/* --- single values ---------------------------------------------------------------------------- */

static uint32_t f8_code(float value)
{
    return td_kv_f8_from_f32(value);
}
static float f8_value(uint32_t code)
{
    return td_kv_f32_from_f8((uint8_t)code);
}
static uint32_t f4_code(float value)
{
    return td_kv_f4_from_f32(value);
}
static float f4_value(uint32_t code)
{
    return td_kv_f32_from_f4((uint8_t)code);
}
static uint32_t i8_code(float value)
{
    return (uint32_t)td_kv_i8_from_f32(value);
}
static float i8_value(uint32_t code)
{
    return (float)(int32_t)code;
}

typedef uint32_t (*code_fn)(float value);
typedef float (*value_fn)(uint32_t code);

static void expect_code(code_fn code_of, float value, uint32_t code)
{
    if (code_of(value) != code) {
        fail_msg("%.9g: code %u, expected %u", (double)value, code_of(value), code);
    }
}

/* Between neighbours a < b >= 0: the nearer one, the even one in the middle; and so below zero,
 * where codes have sign_bit, or are those of -a and -b. */
static void expect_nearest(code_fn code_of, value_fn value_of, uint32_t largest, uint32_t sign_bit)
{
    for (uint32_t code = 0; code <= largest; code++) {
        const float a = value_of(code);
        const float b = value_of(code + 1);
        const float middle = a + (b - a) / 2; /* exact: both have few bits */
        const uint32_t sides[2] = {code, code + 1};
        expect_code(code_of, a, code);
        if (code == largest) {
            break;
        }
        assert_true(b > a);
        for (int sign = 0; sign < 2; sign++) {
            const float s = sign == 0 ? 1.0f : -1.0f;
            uint32_t want[3] = {sides[0], sides[code % 2], sides[1]};
            for (int i = 0; sign == 1 && i < 3; i++) {
                want[i] = sign_bit != 0 ? want[i] | sign_bit : (uint32_t) - (int32_t)want[i];
            }
            expect_code(code_of, s * nextafterf(middle, 0), want[0]);
            expect_code(code_of, s * middle, want[1]);
            expect_code(code_of, s * nextafterf(middle, INFINITY), want[2]);
        }
    }
}

static void test_f8_codes_are_the_ocp_format(void **state)
{
    (void)state;
    for (uint32_t code = 0; code < 256; code++) {
        const int exponent = (int)(code >> 3 & 15);
        const int mantissa = (int)(code & 7);
        const float magnitude = exponent == 0 ? ldexpf((float)mantissa, -9)
                                              : ldexpf((float)(8 + mantissa), exponent - 10);
        const float value = f8_value(code);

        assert_int_equal(signbit(value) != 0, code >> 7);
        if ((code & 0x7f) == 0x7f) {
            assert_true(isnan(value));
        } else {
            assert_true(fabsf(value) == magnitude);
        }
        assert_int_equal(f8_code(value), code);
    }
}

static void test_f8_rounds_to_nearest_even_and_saturates(void **state)
{
    static const float large[] = {448.0f, 449.0f, 464.0f, 480.0f, 1e30f, 3.4e38f, INFINITY};
    (void)state;

    expect_nearest(f8_code, f8_value, 0x7e, 0x80);
    for (size_t i = 0; i < TD_ARRAY_LEN(large); i++) {
        expect_code(f8_code, large[i], 0x7e);
        expect_code(f8_code, -large[i], 0xfe);
    }
    expect_code(f8_code, 1e-40f, 0);
    expect_code(f8_code, -1e-40f, 0x80);
    expect_code(f8_code, NAN, 0x7f);
    expect_code(f8_code, -NAN, 0xff);
}

static void test_f4_codes_round_to_nearest_even_and_saturate(void **state)
{
    static const float values[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    (void)state;

    for (uint32_t code = 0; code < 16; code++) {
        assert_true(fabsf(f4_value(code)) == values[code & 7]);
        assert_int_equal(signbit(f4_value(code)) != 0, code >> 3);
        assert_int_equal(f4_code(f4_value(code)), code);
        assert_true(f4_value(code | 0xf0) == f4_value(code)); /* a neighbour in the byte */
    }
    expect_nearest(f4_code, f4_value, 7, 8);
    expect_code(f4_code, 7.0f, 7);
    expect_code(f4_code, INFINITY, 7);
    expect_code(f4_code, -1e30f, 15);
    expect_code(f4_code, NAN, 0);
}

static void test_i8_rounds_to_nearest_even_and_saturates(void **state)
{
    (void)state;
    expect_nearest(i8_code, i8_value, 127, 0);
    expect_code(i8_code, 127.5f, 127);
    expect_code(i8_code, 128.0f, 127);
    expect_code(i8_code, INFINITY, 127);
    expect_code(i8_code, -127.5f, (uint32_t)-127);
    expect_code(i8_code, -1e30f, (uint32_t)-127);
    expect_code(i8_code, NAN, 0);
}

/* --- rows ------------------------------------------------------------------------------------- */

typedef struct stored {
    uint8_t values[2 * ROW];
    uint8_t scale[TD_KV_SCALE_BYTES];
    float scale_value;
    float back[ROW];
} stored_t;

static stored_t store(uint32_t codec, const float *row)
{
    stored_t s;

    memset(&s, 0x55, sizeof(s));
    td_kv_row_encode((td_kv_codec_t)codec, row, ROW, s.values, s.scale);
    memcpy(&s.scale_value, s.scale, sizeof(s.scale_value));
    td_kv_row_decode((td_kv_codec_t)codec, s.values, s.scale, ROW, s.back);
    return s;
}

static void fill_row(float *row, float largest)
{
    for (int i = 0; i < ROW; i++) {
        row[i] = largest * 0.99f * sinf((float)(i * i + 1));
    }
    row[ROW / 2 + 1] = -largest;
}

static void test_rows_come_back_within_half_a_step(void **state)
{
    static const float sizes[] = {1e-29f, 3e-5f, 1.0f, 217.3f, 1e6f, 3.3e38f};
    float row[ROW];
    (void)state;

    for (uint32_t codec = TD_KV_F8_E4M3; codec < TD_KV_CODECS; codec++) {
        for (size_t n = 0; n < TD_ARRAY_LEN(sizes); n++) {
            fill_row(row, sizes[n]);
            const stored_t s = store(codec, row);
            assert_true(s.scale_value == sizes[n] / limits[codec]);
            assert_true(fabsf(s.back[ROW / 2 + 1] + sizes[n]) <= 1e-6f * sizes[n]);
            for (int i = 0; i < ROW; i++) {
                const float x = fabsf(row[i]) / s.scale_value;
                /* Half the distance of neighbours: of integers, or by the power of two below. */
                const int low = codec == TD_KV_F8_E4M3 ? -6 : 0;
                const int bits = codec == TD_KV_F8_E4M3 ? 3 : 1;
                const int power = x > 0 ? (int)floorf(log2f(x)) : low;
                const float step =
                    codec == TD_KV_I8 ? 1.0f : ldexpf(1, (power > low ? power : low) - bits);
                assert_true(fabsf(row[i] - s.back[i]) <= 0.5001f * step * s.scale_value);
            }
            assert_memory_equal(store(codec, s.back).back, s.back, sizeof(s.back));
        }
    }
}

static void test_f16_rows_are_plain_halves(void **state)
{
    float row[ROW];
    stored_t s;
    (void)state;

    fill_row(row, 70000.0f); /* one becomes infinite */
    row[0] = 1.0f;
    s = store(TD_KV_F16, row);
    for (int i = 0; i < ROW; i++) {
        const uint16_t half = td_f16_from_f32(row[i]);
        assert_memory_equal(s.values + 2 * i, &half, sizeof(half));
        assert_true(s.back[i] == td_f32_from_f16(half));
    }
    assert_true(isinf(s.back[ROW / 2 + 1]));
    for (int i = 0; i < (int)TD_KV_SCALE_BYTES; i++) {
        assert_int_equal(s.scale[i], 0x55); /* not written */
    }
}

static void test_rows_of_integers_are_stored_as_they_are(void **state)
{
    float row[ROW] = {0};
    stored_t s;
    (void)state;

    for (int i = 0; i < ROW; i++) {
        row[i] = (float)(2 * i - 63);
    }
    row[5] = 127.0f;
    row[6] = 2.5f;
    row[7] = -3.5f;
    s = store(TD_KV_I8, row);
    assert_true(s.scale_value == 1.0f);
    for (int i = 0; i < ROW; i++) {
        assert_int_equal((int8_t)s.values[i], i == 6 ? 2 : i == 7 ? -4 : (int)row[i]);
    }
    memset(row, 0, sizeof(row));
    row[0] = 6.0f;
    row[1] = -0.5f;
    row[2] = 2.5f; /* in the middle of 2 and 3: code 4 is even */
    row[3] = 3.5f; /* of 3 and 4: code 6 */
    s = store(TD_KV_F4_E2M1, row);
    assert_int_equal(s.values[0], 0x97); /* the first value in the low half */
    assert_int_equal(s.values[1], 0x64);
    assert_int_equal(s.values[2], 0);
}

static void test_rows_without_size_are_zeros(void **state)
{
    float row[ROW];
    (void)state;

    for (uint32_t codec = TD_KV_F8_E4M3; codec < TD_KV_CODECS; codec++) {
        for (int round = 0; round < 3; round++) {
            for (int i = 0; i < ROW; i++) {
                row[i] = round == 0 ? 0.0f : round == 1 ? -0.0f : (i % 2 == 0 ? -9e-31f : 1e-40f);
            }
            const stored_t s = store(codec, row);
            assert_true(s.scale_value == 0 && !signbit(s.scale_value));
            for (size_t i = 0; i < (size_t)ROW * td_kv_value_bits((td_kv_codec_t)codec) / 8; i++) {
                assert_int_equal(s.values[i], 0);
            }
            for (int i = 0; i < ROW; i++) {
                assert_true(s.back[i] == 0 && !signbit(s.back[i]));
            }
        }
    }
}

static void test_rows_with_what_is_no_number_give_no_number(void **state)
{
    const float bad[] = {NAN, -NAN, INFINITY, -INFINITY};
    const uint32_t quiet = TD_KV_NOT_A_NUMBER;
    float row[ROW];
    (void)state;

    for (uint32_t codec = TD_KV_F8_E4M3; codec < TD_KV_CODECS; codec++) {
        for (size_t b = 0; b < TD_ARRAY_LEN(bad); b++) {
            fill_row(row, 3.0f);
            row[b] = bad[b];
            const stored_t s = store(codec, row);
            assert_memory_equal(s.scale, &quiet, sizeof(quiet));
            for (size_t i = 0; i < (size_t)ROW * td_kv_value_bits((td_kv_codec_t)codec) / 8; i++) {
                assert_int_equal(s.values[i], 0);
            }
            for (int i = 0; i < ROW; i++) {
                assert_true(isnan(s.back[i]));
            }
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_names_are_those_of_the_option),
        cmocka_unit_test(test_f8_codes_are_the_ocp_format),
        cmocka_unit_test(test_f8_rounds_to_nearest_even_and_saturates),
        cmocka_unit_test(test_f4_codes_round_to_nearest_even_and_saturate),
        cmocka_unit_test(test_i8_rounds_to_nearest_even_and_saturates),
        cmocka_unit_test(test_rows_come_back_within_half_a_step),
        cmocka_unit_test(test_f16_rows_are_plain_halves),
        cmocka_unit_test(test_rows_of_integers_are_stored_as_they_are),
        cmocka_unit_test(test_rows_without_size_are_zeros),
        cmocka_unit_test(test_rows_with_what_is_no_number_give_no_number),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

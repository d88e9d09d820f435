#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <fcntl.h>
#include <sodium.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "common/model/td_gguf.h"
#include "tests/fuzz/gguf_build.h"

#define MODEL_PATH "build/models/SmolLM2-135M-Instruct.Q4_1.gguf"
#define KV_COUNT 13

/* Refusals are logged; thousands of them in a row would hide everything else. */
static int quiet_begin(void)
{
    int saved = dup(STDERR_FILENO);
    int null = open("/dev/null", O_WRONLY | O_CLOEXEC);
    (void)dup2(null, STDERR_FILENO);
    (void)close(null);
    return saved;
}

static void quiet_end(int saved)
{
    (void)dup2(saved, STDERR_FILENO);
    (void)close(saved);
}

/* A file with every kind of value and three tensors. */
static void build_small(td_str_t *file)
{
    static const char *const words[] = {"one", "", "three"};
    static const int32_t ints[] = {-1, 0, 7};
    const uint64_t dims_f32[] = {4, 2};
    const uint64_t dims_q4[] = {64, 1, 1, 1};
    const uint64_t dims_q8[] = {32};
    const float pi = 3.25f;
    const double wide = 0.5;
    const int8_t small = -5;
    const uint64_t big = 1ull << 40;
    const int64_t fits = 77;
    const uint8_t yes = 1;
    uint8_t data[128];

    memset(data, 0x5a, sizeof(data));
    gb_header(file, 3, KV_COUNT);
    gb_kv_u32(file, "general.alignment", 16);
    gb_kv_str(file, "general.name", "tiny");
    gb_kv_scalar(file, "f32", GB_F32, &pi, sizeof(pi));
    gb_kv_scalar(file, "f64", GB_F64, &wide, sizeof(wide));
    gb_kv_scalar(file, "i8", GB_I8, &small, sizeof(small));
    gb_kv_scalar(file, "u64", GB_U64, &big, sizeof(big));
    gb_kv_scalar(file, "i64", GB_I64, &fits, sizeof(fits));
    gb_kv_scalar(file, "yes", GB_BOOL, &yes, sizeof(yes));
    gb_kv_strs(file, "words", words, TD_ARRAY_LEN(words));
    gb_kv_i32s(file, "ints", ints, TD_ARRAY_LEN(ints));
    gb_kv_strs(file, "none", NULL, 0);
    gb_str(file, "nested"); /* [[1, 1], [], [0]] of bools */
    gb_u32(file, GB_ARR);
    gb_u32(file, GB_ARR);
    gb_u64(file, 3);
    for (uint64_t n = 3; n > 0; n--) {
        gb_u32(file, GB_BOOL);
        gb_u64(file, n % 3);
        gb_bytes(file, "\1\1", n % 3);
    }
    gb_kv_u32(file, "last", 9);
    gb_tensor(file, "weights", 2, dims_f32, TD_GGUF_F32, 0);
    gb_tensor(file, "q4", 4, dims_q4, TD_GGUF_Q4_1, 32);
    gb_tensor(file, "q8", 1, dims_q8, TD_GGUF_Q8_0, 80);
    gb_pad(file, 16);
    gb_bytes(file, data, 80 + 34);
}

static int setup(void **state)
{
    static td_str_t file;
    file = (td_str_t){0};
    build_small(&file);
    *state = &file;
    return 0;
}

static int teardown(void **state)
{
    td_str_fini(*state);
    return 0;
}

static void test_gguf_reads_values_and_tensors(void **state)
{
    const td_str_t *file = *state;
    td_gguf_t *gguf = NULL;
    const td_gguf_tensor_t *tensor = NULL;
    uint32_t u32 = 0;
    int32_t i32 = 0;
    float f32 = 0;
    bool yes = false;
    const char *text = NULL;
    size_t len = 0;

    assert_int_equal(td_gguf_open_bytes(file->bytes, file->len, &gguf), TD_OK);
    assert_int_equal(td_gguf_get_u32(gguf, "general.alignment", &u32), TD_OK);
    assert_int_equal(u32, 16);
    assert_int_equal(td_gguf_get_u32(gguf, "i64", &u32), TD_OK);
    assert_int_equal(u32, 77);
    assert_int_equal(td_gguf_get_u32(gguf, "i8", &u32), TD_ERR_INVALID);
    assert_int_equal(td_gguf_get_u32(gguf, "u64", &u32), TD_ERR_INVALID);
    assert_int_equal(td_gguf_get_u32(gguf, "f32", &u32), TD_ERR_INVALID);
    assert_int_equal(td_gguf_get_u32(gguf, "absent", &u32), TD_ERR_NOT_FOUND);
    assert_int_equal(u32, 77);
    assert_int_equal(td_gguf_get_f32(gguf, "f32", &f32), TD_OK);
    assert_true(f32 == 3.25f);
    assert_int_equal(td_gguf_get_f32(gguf, "f64", &f32), TD_OK);
    assert_true(f32 == 0.5f);
    assert_int_equal(td_gguf_get_bool(gguf, "yes", &yes), TD_OK);
    assert_true(yes);
    assert_int_equal(td_gguf_get_bool(gguf, "i8", &yes), TD_ERR_INVALID);
    assert_int_equal(td_gguf_get_str(gguf, "general.name", &text, &len), TD_OK);
    assert_int_equal(len, 4);
    assert_memory_equal(text, "tiny", 4);
    assert_int_equal(td_gguf_get_array_len(gguf, "words", &u32), TD_OK);
    assert_int_equal(u32, 3);
    assert_int_equal(td_gguf_get_array_str(gguf, "words", 2, &text, &len), TD_OK);
    assert_int_equal(len, 5);
    assert_memory_equal(text, "three", 5);
    assert_int_equal(td_gguf_get_array_str(gguf, "words", 3, &text, &len), TD_ERR_INVALID);
    assert_int_equal(td_gguf_get_array_str(gguf, "ints", 0, &text, &len), TD_ERR_INVALID);
    assert_int_equal(td_gguf_get_array_i32(gguf, "ints", 0, &i32), TD_OK);
    assert_int_equal(i32, -1);
    assert_int_equal(td_gguf_get_array_i32(gguf, "ints", 3, &i32), TD_ERR_INVALID);
    assert_int_equal(td_gguf_get_array_len(gguf, "none", &u32), TD_OK);
    assert_int_equal(u32, 0);
    assert_int_equal(td_gguf_get_array_len(gguf, "nested", &u32), TD_ERR_INVALID);
    assert_int_equal(td_gguf_get_u32(gguf, "last", &u32), TD_OK);
    assert_int_equal(u32, 9);

    assert_int_equal(td_gguf_tensor_count(gguf), 3);
    assert_string_equal(td_gguf_tensor_at(gguf, 2)->name, "q8");
    assert_null(td_gguf_tensor_find(gguf, "weight"));
    tensor = td_gguf_tensor_find(gguf, "q4");
    assert_non_null(tensor);
    assert_int_equal(tensor->type, TD_GGUF_Q4_1);
    assert_int_equal(tensor->byte_count, 40);
    assert_ptr_equal(tensor->bytes, file->bytes + file->len - 80 - 34 + 32);
    assert_int_equal(td_gguf_tensor_find(gguf, "weights")->byte_count, 32);
    assert_int_equal(td_gguf_tensor_find(gguf, "weights")->dims[3], 1);
    td_gguf_close(gguf);
}

static void test_gguf_open_refuses_every_truncation(void **state)
{
    const td_str_t *file = *state;
    int saved = quiet_begin();
    size_t accepted = 0;

    for (size_t len = 0; len < file->len; len++) {
        td_gguf_t *gguf = NULL;
        /* A copy of just that size, so that a sanitizer sees one byte too many. */
        char *copy = td_alloc(len);
        memcpy(copy, file->bytes, len);
        if (td_gguf_open_bytes(copy, len, &gguf) != TD_ERR_INVALID || gguf != NULL) {
            accepted++;
        }
        td_free(copy);
    }
    quiet_end(saved);
    assert_int_equal(accepted, 0);
}

/* Whatever the bytes say, all that the file object lends lies inside the file. */
static size_t walk_outside(const td_gguf_t *gguf, const td_str_t *file)
{
    size_t outside = 0;
    uint8_t hash[32];

    for (uint32_t i = 0; i < td_gguf_tensor_count(gguf); i++) {
        const td_gguf_tensor_t *tensor = td_gguf_tensor_at(gguf, i);
        size_t at = (size_t)(tensor->bytes - (const uint8_t *)file->bytes);
        outside += at > file->len || tensor->byte_count > file->len - at;
        outside += td_gguf_tensor_find(gguf, tensor->name) != tensor;
    }
    td_gguf_fingerprint(gguf, hash);
    return outside;
}

static void test_gguf_open_survives_every_byte_flip(void **state)
{
    static const uint8_t masks[] = {0x01, 0x80, 0xff, 0x10};
    td_str_t *file = *state;
    int saved = quiet_begin();
    size_t outside = 0;
    size_t refused = 0;

    for (size_t i = 0; i < file->len; i++) {
        for (size_t m = 0; m < TD_ARRAY_LEN(masks); m++) {
            td_gguf_t *gguf = NULL;
            file->bytes[i] = (char)((uint8_t)file->bytes[i] ^ masks[m]);
            if (td_gguf_open_bytes(file->bytes, file->len, &gguf) == TD_OK) {
                outside += walk_outside(gguf, file);
                td_gguf_close(gguf);
            } else {
                refused++;
            }
            file->bytes[i] = (char)((uint8_t)file->bytes[i] ^ masks[m]);
        }
    }
    quiet_end(saved);
    assert_int_equal(outside, 0);
    assert_true(refused > file->len);
}

static td_status_t open_status(td_str_t *file)
{
    td_gguf_t *gguf = NULL;
    td_status_t status = td_gguf_open_bytes(file->bytes, file->len, &gguf);
    if (status == TD_OK) {
        td_gguf_close(gguf);
    } else {
        assert_null(gguf);
    }
    td_str_fini(file);
    return status;
}

static void test_gguf_open_refuses_bad_header(void **state)
{
    td_str_t file = {0};
    (void)state;

    gb_header(&file, 0, 0);
    assert_int_equal(open_status(&file), TD_OK);
    gb_header(&file, 0, 0);
    file.bytes[0] = 'g';
    assert_int_equal(open_status(&file), TD_ERR_INVALID);
    gb_header(&file, 0, 0);
    file.bytes[4] = 1;
    assert_int_equal(open_status(&file), TD_ERR_UNSUPPORTED);
    gb_header(&file, 0, 0);
    file.bytes[4] = 4;
    assert_int_equal(open_status(&file), TD_ERR_UNSUPPORTED);
    gb_header(&file, UINT64_MAX, 0);
    assert_int_equal(open_status(&file), TD_ERR_INVALID);
    gb_header(&file, 0, 1u << 30);
    assert_int_equal(open_status(&file), TD_ERR_INVALID);
}

static void test_gguf_open_refuses_duplicate_names(void **state)
{
    const uint64_t dims[] = {4};
    td_str_t file = {0};
    (void)state;

    gb_header(&file, 0, 2);
    gb_kv_u32(&file, "same", 1);
    gb_kv_u32(&file, "same", 1);
    assert_int_equal(open_status(&file), TD_ERR_INVALID);
    gb_header(&file, 2, 0);
    gb_tensor(&file, "same", 1, dims, TD_GGUF_F32, 0);
    gb_tensor(&file, "same", 1, dims, TD_GGUF_F32, 0);
    gb_pad(&file, 32);
    gb_bytes(&file, "0123456789abcdef", 16);
    assert_int_equal(open_status(&file), TD_ERR_INVALID);
}

static void test_gguf_open_refuses_bad_alignment(void **state)
{
    static const uint32_t bad[] = {0, 1, 4, 12, 24, 0x80000001u};
    td_str_t file = {0};
    (void)state;

    for (size_t i = 0; i < TD_ARRAY_LEN(bad); i++) {
        gb_header(&file, 0, 1);
        gb_kv_u32(&file, "general.alignment", bad[i]);
        assert_int_equal(open_status(&file), TD_ERR_INVALID);
    }
    gb_header(&file, 0, 1);
    gb_kv_u32(&file, "general.alignment", 0x80000000u);
    assert_int_equal(open_status(&file), TD_OK);
    gb_header(&file, 0, 1);
    gb_kv_str(&file, "general.alignment", "32");
    assert_int_equal(open_status(&file), TD_ERR_INVALID);
}

static td_status_t one_tensor(uint32_t dim_count, const uint64_t *dims, uint32_t type,
                              uint64_t offset)
{
    td_str_t file = {0};
    char data[64] = {0};

    gb_header(&file, 1, 0);
    gb_tensor(&file, "t", dim_count, dims, type, offset);
    gb_pad(&file, 32);
    gb_bytes(&file, data, sizeof(data));
    return open_status(&file);
}

static void test_gguf_open_refuses_bad_tensors(void **state)
{
    const uint64_t ok[] = {8, 2};
    const uint64_t five[] = {1, 1, 1, 1, 1};
    const uint64_t zero[] = {8, 0};
    const uint64_t wraps[] = {1ull << 32, 1ull << 32};
    const uint64_t wraps_bytes[] = {1ull << 31, 1ull << 31};
    const uint64_t ragged[] = {16, 2};
    const uint64_t q[] = {32};
    (void)state;

    assert_int_equal(one_tensor(2, ok, TD_GGUF_F32, 0), TD_OK);
    assert_int_equal(one_tensor(2, ok, TD_GGUF_F16, 32), TD_OK);
    assert_int_equal(one_tensor(2, ok, TD_GGUF_F32, 32), TD_ERR_INVALID);
    assert_int_equal(one_tensor(2, ok, TD_GGUF_F16, 16), TD_ERR_INVALID);
    assert_int_equal(one_tensor(2, ok, TD_GGUF_F16, UINT64_MAX - 31), TD_ERR_INVALID);
    assert_int_equal(one_tensor(0, ok, TD_GGUF_F32, 0), TD_ERR_INVALID);
    assert_int_equal(one_tensor(5, five, TD_GGUF_F32, 0), TD_ERR_INVALID);
    assert_int_equal(one_tensor(2, zero, TD_GGUF_F32, 0), TD_ERR_INVALID);
    assert_int_equal(one_tensor(2, wraps, TD_GGUF_F32, 0), TD_ERR_INVALID);
    assert_int_equal(one_tensor(2, wraps_bytes, TD_GGUF_F32, 0), TD_ERR_INVALID);
    assert_int_equal(one_tensor(2, ragged, TD_GGUF_Q4_0, 0), TD_ERR_INVALID);
    assert_int_equal(one_tensor(1, q, TD_GGUF_Q4_0, 0), TD_OK);
    assert_int_equal(one_tensor(1, q, 7, 0), TD_ERR_UNSUPPORTED);
}

static void test_gguf_open_refuses_bad_values(void **state)
{
    const uint8_t two = 2;
    td_str_t file = {0};
    (void)state;

    gb_header(&file, 0, 1);
    gb_kv_scalar(&file, "bool", GB_BOOL, &two, 1);
    assert_int_equal(open_status(&file), TD_ERR_INVALID);
    gb_header(&file, 0, 1);
    gb_kv_scalar(&file, "type", 13, "xxxxxxxx", 8);
    assert_int_equal(open_status(&file), TD_ERR_INVALID);
    gb_header(&file, 0, 1);
    gb_kv_u32(&file, "", 13);
    assert_int_equal(open_status(&file), TD_ERR_INVALID);
    gb_header(&file, 0, 1); /* a key with a zero byte in it */
    gb_u64(&file, 3);
    gb_bytes(&file, "a\0b", 3);
    gb_u32(&file, GB_U32);
    gb_u32(&file, 1);
    assert_int_equal(open_status(&file), TD_ERR_INVALID);
    gb_header(&file, 0, 1); /* an array longer than the file */
    gb_str(&file, "array");
    gb_u32(&file, GB_ARR);
    gb_u32(&file, GB_U64);
    gb_u64(&file, 1ull << 61);
    assert_int_equal(open_status(&file), TD_ERR_INVALID);
}

static td_status_t nested(uint32_t depth)
{
    td_str_t file = {0};

    gb_header(&file, 0, 1);
    gb_str(&file, "deep");
    gb_u32(&file, GB_ARR);
    for (uint32_t i = 1; i < depth; i++) {
        gb_u32(&file, GB_ARR);
        gb_u64(&file, 1);
    }
    gb_u32(&file, GB_STR);
    gb_u64(&file, 1);
    gb_str(&file, "x");
    return open_status(&file);
}

static void test_gguf_open_bounds_array_depth(void **state)
{
    (void)state;
    assert_int_equal(nested(1), TD_OK);
    assert_int_equal(nested(4), TD_OK);
    assert_int_equal(nested(5), TD_ERR_INVALID);
    assert_int_equal(nested(100000), TD_ERR_INVALID);
}

static void test_gguf_open_reports_io(void **state)
{
    td_gguf_t *gguf = NULL;
    (void)state;
    assert_int_equal(td_gguf_open("build/no-such-file.gguf", &gguf), TD_ERR_IO);
    assert_int_equal(td_gguf_open("tests", &gguf), TD_ERR_IO);
    assert_null(gguf);
}

static void test_gguf_fingerprint_is_blake2b_of_the_file(void **state)
{
    const td_str_t *file = *state;
    td_gguf_t *gguf = NULL;
    uint8_t got[32];
    uint8_t want[32];

    assert_int_equal(td_gguf_open_bytes(file->bytes, file->len, &gguf), TD_OK);
    td_gguf_fingerprint(gguf, got);
    assert_int_equal(crypto_generichash(want, 32, (const uint8_t *)file->bytes, file->len, NULL, 0),
                     0);
    assert_memory_equal(got, want, 32);
    td_gguf_close(gguf);
}

static void test_gguf_opens_the_model(void **state)
{
    td_gguf_t *gguf = NULL;
    const td_gguf_tensor_t *tensor = NULL;
    uint32_t n = 0;
    (void)state;

    assert_int_equal(td_gguf_open(MODEL_PATH, &gguf), TD_OK);
    assert_int_equal(td_gguf_tensor_count(gguf), 272);
    tensor = td_gguf_tensor_find(gguf, "token_embd.weight");
    assert_non_null(tensor);
    assert_int_equal(tensor->type, TD_GGUF_Q8_0);
    assert_int_equal(tensor->dims[0], 576);
    assert_int_equal(tensor->dims[1], 49152);
    assert_int_equal(td_gguf_get_array_len(gguf, "tokenizer.ggml.merges", &n), TD_OK);
    assert_int_equal(n, 48900);
    td_gguf_close(gguf);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_gguf_reads_values_and_tensors, setup, teardown),
        cmocka_unit_test_setup_teardown(test_gguf_open_refuses_every_truncation, setup, teardown),
        cmocka_unit_test_setup_teardown(test_gguf_open_survives_every_byte_flip, setup, teardown),
        cmocka_unit_test(test_gguf_open_refuses_bad_header),
        cmocka_unit_test(test_gguf_open_refuses_duplicate_names),
        cmocka_unit_test(test_gguf_open_refuses_bad_alignment),
        cmocka_unit_test(test_gguf_open_refuses_bad_tensors),
        cmocka_unit_test(test_gguf_open_refuses_bad_values),
        cmocka_unit_test(test_gguf_open_bounds_array_depth),
        cmocka_unit_test(test_gguf_open_reports_io),
        cmocka_unit_test_setup_teardown(test_gguf_fingerprint_is_blake2b_of_the_file, setup,
                                        teardown),
        cmocka_unit_test(test_gguf_opens_the_model),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

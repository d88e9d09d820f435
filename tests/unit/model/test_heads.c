/* Hidden states, tensor files and heads, on small models. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include "tests/unit/model/test_heads_file.h"
#include "tests/unit/model/test_model_rig.h"

#define TOKENS 24u

/* --- hidden states ---------------------------------------------------------------------------- */

static void test_logits_are_the_head_times_the_hidden_state(void **state)
{
    static const td_isa_t isas[] = {TD_ISA_PORTABLE, TD_ISA_AUTO};
    const tiny_spec_t specs[] = {{.type = TD_GGUF_F32}, {.type = TD_GGUF_F32, .untied = true}};
    (void)state;

    for (size_t s = 0; s < TD_ARRAY_LEN(specs) * TD_ARRAY_LEN(isas); s++) {
        td_model_options_t options = default_options();
        const float *logits = NULL;
        const float *hidden = NULL;
        td_gguf_t *gguf = NULL;
        tiny_t tiny;
        rig_t rig;

        tiny_init(&tiny, &specs[s / TD_ARRAY_LEN(isas)]);
        options.isa = isas[s % TD_ARRAY_LEN(isas)];
        assert_int_equal(td_gguf_open_bytes(tiny.bytes, tiny.len, &gguf), TD_OK);
        rig_init(&rig, gguf, &options, 1, TINY_CONTEXT);
        for (uint32_t i = 0; i < TOKENS; i++) {
            set_row(&rig, i, 0, i, i % 3 == 0);
        }
        assert_int_equal(
            td_model_forward(rig.model, rig.pool, rig.rows, TOKENS, 0, NULL, NULL, &logits), TD_OK);
        hidden = td_model_hidden(rig.model);
        for (uint32_t row = 0; row < TOKENS / 3; row++) {
            for (uint32_t token = 0; token < TINY_VOCAB; token++) {
                float weights[TINY_DIM];
                float sum = 0;
                td_model_head_row(rig.model, token, weights);
                for (uint32_t k = 0; k < TINY_DIM; k++) {
                    sum = fmaf(weights[k], hidden[row * TINY_DIM + k], sum);
                }
                assert_same_bits(&sum, &logits[row * TINY_VOCAB + token], 1);
            }
        }
        rig_fini(&rig);
        td_gguf_close(gguf);
        tiny_fini(&tiny);
    }
}

static void test_embedding_is_the_files(void **state)
{
    const td_model_options_t options = default_options();
    td_gguf_t *gguf = NULL;
    tiny_t tiny;
    rig_t rig;
    (void)state;

    tiny_init(&tiny, &(tiny_spec_t){.type = TD_GGUF_Q8_0, .untied = true});
    assert_int_equal(td_gguf_open_bytes(tiny.bytes, tiny.len, &gguf), TD_OK);
    rig_init(&rig, gguf, &options, 1, TINY_CONTEXT);
    for (uint32_t token = 0; token < TINY_VOCAB; token++) {
        const double *want = tiny_values(&tiny, "token_embd.weight") + token * TINY_DIM;
        const double *head = tiny_values(&tiny, "output.weight") + token * TINY_DIM;
        float got[TINY_DIM];
        td_model_embedding(rig.model, token, got);
        for (uint32_t k = 0; k < TINY_DIM; k++) {
            assert_true((double)got[k] == want[k]);
        }
        td_model_head_row(rig.model, token, got);
        for (uint32_t k = 0; k < TINY_DIM; k++) {
            assert_true((double)got[k] == head[k]);
        }
    }
    rig_fini(&rig);
    td_gguf_close(gguf);
    tiny_fini(&tiny);
}

/* --- tensor files ----------------------------------------------------------------------------- */

static void test_tensor_file_reads_as_written(void **state)
{
    static const float floats[] = {1, -2, 3.5f, 0, 7, 8};
    static const uint16_t halves[] = {0x3c00, 0xc000};
    static const int32_t numbers[] = {-1};
    const td_safetensor_t tensors[] = {
        {"a", TD_SAFETENSORS_F32, 2, {2, 3}, floats, 0},
        {"b.weight", TD_SAFETENSORS_F16, 1, {2}, halves, 0},
        {"none", TD_SAFETENSORS_F32, 2, {0, 4}, floats, 0},
        {"one", TD_SAFETENSORS_I32, 0, {0}, numbers, 0},
    };
    const td_safetensors_text_t texts[] = {{"k", "v \"quoted\""}, {"k2", ""}};
    const uint64_t dims[] = {0, 3};
    const uint64_t wrong[] = {3, 3};
    td_safetensors_t *file = NULL;
    const td_safetensor_t *t = NULL;
    char path[64];
    (void)state;

    temporary(path);
    assert_int_equal(td_safetensors_write(path, tensors, TD_ARRAY_LEN(tensors), texts, 2), TD_OK);
    assert_int_equal(td_safetensors_open(path, &file), TD_OK);
    assert_int_equal(td_safetensors_count(file), TD_ARRAY_LEN(tensors));
    assert_string_equal(td_safetensors_text(file, "k"), "v \"quoted\"");
    assert_string_equal(td_safetensors_text(file, "k2"), "");
    assert_null(td_safetensors_text(file, "k3"));
    assert_int_equal(td_safetensors_need(file, "a", TD_SAFETENSORS_F32, dims, 2, &t), TD_OK);
    assert_int_equal(t->byte_count, sizeof(floats));
    assert_memory_equal(t->bytes, floats, sizeof(floats));
    assert_int_equal(t->dims[0], 2);
    assert_int_equal(td_safetensors_need(file, "a", TD_SAFETENSORS_F32, wrong, 2, &t),
                     TD_ERR_INVALID);
    assert_int_equal(td_safetensors_need(file, "a", TD_SAFETENSORS_F16, dims, 2, &t),
                     TD_ERR_INVALID);
    assert_int_equal(td_safetensors_need(file, "a", TD_SAFETENSORS_F32, dims, 1, &t),
                     TD_ERR_INVALID);
    assert_int_equal(td_safetensors_need(file, "c", TD_SAFETENSORS_F32, dims, 1, &t),
                     TD_ERR_INVALID);
    t = td_safetensors_find(file, "b.weight");
    assert_non_null(t);
    assert_memory_equal(t->bytes, halves, sizeof(halves));
    t = td_safetensors_find(file, "none");
    assert_non_null(t);
    assert_int_equal(t->byte_count, 0);
    t = td_safetensors_find(file, "one");
    assert_non_null(t);
    assert_memory_equal(t->bytes, numbers, sizeof(numbers));
    td_safetensors_close(file);

    assert_int_equal(td_safetensors_write("/dev/null/x", tensors, 1, texts, 1), TD_ERR_IO);
    assert_int_equal(td_safetensors_open("/dev/null/x", &file), TD_ERR_IO);
    assert_int_equal(td_safetensors_open("/dev/null", &file), TD_ERR_IO);
    assert_int_equal(remove(path), 0);
}

static void test_tensor_file_refuses(void **state)
{
    static const struct {
        const char *header;
        td_status_t status;
    } cases[] = {
        {"{}", TD_OK},
        {"{\"__metadata__\": 7}", TD_OK},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", TD_OK},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[8,16]}}", TD_OK},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[9,17]}}", TD_ERR_INVALID},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[8,0]}}", TD_ERR_INVALID},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,7]}}", TD_ERR_INVALID},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[-2],\"data_offsets\":[0,8]}}", TD_ERR_INVALID},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2.5],\"data_offsets\":[0,8]}}", TD_ERR_INVALID},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":2,\"data_offsets\":[0,8]}}", TD_ERR_INVALID},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1,1,1,1,2],\"data_offsets\":[0,8]}}",
         TD_ERR_INVALID},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4611686018427387904,4],\"data_offsets\":[0,0]}}",
         TD_ERR_INVALID},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0]}}", TD_ERR_INVALID},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2]}}", TD_ERR_INVALID},
        {"{\"a\":{\"dtype\":\"F8\",\"shape\":[2],\"data_offsets\":[0,8]}}", TD_ERR_UNSUPPORTED},
        {"{\"a\":{\"shape\":[2],\"data_offsets\":[0,8]}}", TD_ERR_INVALID},
        {"{\"a\":7}", TD_ERR_INVALID},
        {"[]", TD_ERR_INVALID},
        {"{\"a\":", TD_ERR_INVALID},
        {"", TD_ERR_INVALID},
    };
    (void)state;

    for (size_t i = 0; i < TD_ARRAY_LEN(cases); i++) {
        const size_t len = strlen(cases[i].header);
        uint8_t bytes[256] = {(uint8_t)len};
        td_safetensors_t *file = NULL;
        memcpy(bytes + 8, cases[i].header, len);
        assert_int_equal(td_safetensors_open_bytes(bytes, 8 + len + 16, &file), cases[i].status);
        if (cases[i].status == TD_OK) {
            td_safetensors_close(file);
        }
        /* A header longer than the file, or than any. */
        bytes[0] = (uint8_t)(len + 17);
        assert_int_equal(td_safetensors_open_bytes(bytes, 8 + len + 16, &file), TD_ERR_INVALID);
        bytes[7] = 0x7f;
        assert_int_equal(td_safetensors_open_bytes(bytes, 8 + len + 16, &file), TD_ERR_INVALID);
        assert_int_equal(td_safetensors_open_bytes(bytes, 7, &file), TD_ERR_INVALID);
    }
}

/* --- heads ------------------------------------------------------------------------------------ */

static td_status_t load(const parts_t *p, td_model_t *model, uint32_t rows_max, td_heads_t **out)
{
    td_status_t status = TD_OK;
    char path[64];

    temporary(path);
    write_parts(p, path);
    status = td_heads_load(path, model, rows_max, out);
    assert_int_equal(remove(path), 0);
    return status;
}

/* A place as the formula has it, in double. */
static void textbook(const rig_t *rig, const parts_t *p, double *z, uint32_t newest,
                     uint32_t before, double *logits)
{
    double x[INPUTS];
    double u[HIDDEN];
    float row[TINY_DIM];

    memcpy(x, z, TINY_DIM * sizeof(*z));
    for (uint32_t part = 1; part < TD_HEADS_INPUTS; part++) {
        td_model_embedding(rig->model, part == 1 ? newest : before, row);
        for (uint32_t k = 0; k < TINY_DIM; k++) {
            x[part * TINY_DIM + k] = (double)row[k];
        }
    }
    for (uint32_t i = 0; i < HIDDEN; i++) {
        double a = (double)p->in_bias[i];
        for (uint32_t k = 0; k < INPUTS; k++) {
            a += (double)p->in_weight[i * INPUTS + k] * x[k];
        }
        u[i] = a / (1 + exp(-a));
    }
    for (uint32_t i = 0; i < TINY_DIM; i++) {
        z[i] += (double)p->out_bias[i];
        for (uint32_t k = 0; k < HIDDEN; k++) {
            z[i] += (double)p->out_weight[i * HIDDEN + k] * u[k];
        }
    }
    for (uint32_t i = 0; i < LISTED; i++) {
        td_model_head_row(rig->model, (uint32_t)p->tokens[i], row);
        logits[i] = 0;
        for (uint32_t k = 0; k < TINY_DIM; k++) {
            logits[i] += (double)row[k] * z[k];
        }
    }
}

#define CHAINS 5u
#define PLACES 3u

static void test_heads_match_the_textbook_in_any_batch(void **state)
{
    const td_model_options_t options = default_options();
    static parts_t parts;
    float states[2][CHAINS][TINY_DIM];
    double want_state[CHAINS][TINY_DIM];
    td_heads_t *heads = NULL;
    td_gguf_t *gguf = NULL;
    uint32_t seed = 9;
    uint32_t count = 0;
    tiny_t tiny;
    rig_t rig;
    (void)state;

    tiny_init(&tiny, &(tiny_spec_t){.type = TD_GGUF_Q8_0});
    assert_int_equal(td_gguf_open_bytes(tiny.bytes, tiny.len, &gguf), TD_OK);
    rig_init(&rig, gguf, &options, 1, TINY_CONTEXT);
    make_parts(rig.info, &parts);
    assert_int_equal(load(&parts, rig.model, CHAINS, &heads), TD_OK);
    assert_memory_equal(td_heads_tokens(heads, &count), parts.tokens, sizeof(parts.tokens));
    assert_int_equal(count, LISTED);
    for (uint32_t i = 0; i < CHAINS; i++) {
        for (uint32_t k = 0; k < TINY_DIM; k++) {
            states[0][i][k] = states[1][i][k] = noise(&seed);
            want_state[i][k] = (double)states[0][i][k];
        }
    }
    for (uint32_t place = 0; place < PLACES; place++) {
        td_heads_row_t rows[CHAINS];
        float together[CHAINS * LISTED];
        const float *logits = NULL;

        for (uint32_t i = 0; i < CHAINS; i++) {
            rows[i] = (td_heads_row_t){.state = states[0][i],
                                       .newest = (7 * i + place + 1) % TINY_VOCAB,
                                       .before = (7 * i + place) % TINY_VOCAB};
        }
        td_heads_step(heads, rows, CHAINS, &logits);
        memcpy(together, logits, sizeof(together));
        for (uint32_t i = 0; i < CHAINS; i++) {
            double want[LISTED];
            rows[i].state = states[1][i];
            td_heads_step(heads, &rows[i], 1, &logits);
            assert_same_bits(logits, together + i * LISTED, LISTED);
            assert_same_bits(states[1][i], states[0][i], TINY_DIM);
            textbook(&rig, &parts, want_state[i], rows[i].newest, rows[i].before, want);
            for (uint32_t k = 0; k < LISTED; k++) { /* weights have eight bits */
                assert_true(fabs((double)logits[k] - want[k]) < 0.08);
            }
        }
    }
    td_heads_destroy(heads);
    rig_fini(&rig);
    td_gguf_close(gguf);
    tiny_fini(&tiny);
}

static void test_heads_refuse(void **state)
{
    const td_model_options_t options = default_options();
    static parts_t parts;
    td_heads_t *heads = NULL;
    td_gguf_t *gguf = NULL;
    tiny_t tiny;
    rig_t rig;
    (void)state;

    tiny_init(&tiny, &(tiny_spec_t){.type = TD_GGUF_F32});
    assert_int_equal(td_gguf_open_bytes(tiny.bytes, tiny.len, &gguf), TD_OK);
    rig_init(&rig, gguf, &options, 1, TINY_CONTEXT);
#define REFUSED(change)                                                                            \
    do {                                                                                           \
        make_parts(rig.info, &parts);                                                              \
        change;                                                                                    \
        assert_int_equal(load(&parts, rig.model, 1, &heads), TD_ERR_INVALID);                      \
    } while (0)
    REFUSED(parts.texts[0].value = "tandem-heads-2");
    REFUSED(parts.texts[0].key = "x");
    REFUSED(parts.print[0] = parts.print[0] == '0' ? '1' : '0'); /* another model's */
    REFUSED(parts.print[63] = '\0');
    REFUSED(parts.print[5] = 'x');
    REFUSED(parts.texts[1].key = "x");
    for (uint32_t i = 0; i < TD_ARRAY_LEN(parts.tensors); i++) {
        REFUSED(parts.tensors[i].name = "x");
        REFUSED(parts.tensors[i].dims[0] -= 8; i == 4 ? parts.tensors[i].type = 0 : 0);
        REFUSED(parts.tensors[i].type = TD_SAFETENSORS_F16);
    }
    REFUSED(parts.tensors[4].dims[0] = 0);
    REFUSED(parts.tokens[3] = parts.tokens[2]);
    REFUSED(parts.tokens[0] = -1);
    REFUSED(parts.tokens[LISTED - 1] = TINY_VOCAB);
    REFUSED(parts.in_weight[7] = NAN);
    REFUSED(parts.out_bias[TINY_DIM - 1] = INFINITY);
#undef REFUSED
    make_parts(rig.info, &parts);
    assert_int_equal(load(&parts, rig.model, 1, &heads), TD_OK);
    td_heads_destroy(heads);
    rig_fini(&rig);
    td_gguf_close(gguf);
    tiny_fini(&tiny);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_logits_are_the_head_times_the_hidden_state),
        cmocka_unit_test(test_embedding_is_the_files),
        cmocka_unit_test(test_tensor_file_reads_as_written),
        cmocka_unit_test(test_tensor_file_refuses),
        cmocka_unit_test(test_heads_match_the_textbook_in_any_batch),
        cmocka_unit_test(test_heads_refuse),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

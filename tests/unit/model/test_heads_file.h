/* test_heads_file.h - heads of noise for a small model, as a file.
 * Include <cmocka.h> and what it needs first. Threads: owner. */
#pragma once

#include <unistd.h>

#include "common/model/td_heads.h"
#include "common/model/td_safetensors.h"
#include "tests/unit/model/test_model_tiny.h"

#define HIDDEN 32u
#define INPUTS (TD_HEADS_INPUTS * TINY_DIM)
#define LISTED 19u

typedef struct parts {
    float in_weight[HIDDEN * INPUTS];
    float in_bias[HIDDEN];
    float out_weight[TINY_DIM * HIDDEN];
    float out_bias[TINY_DIM];
    int32_t tokens[LISTED];
    char print[65];
    td_safetensor_t tensors[5];
    td_safetensors_text_t texts[2];
} parts_t;

static inline float noise(uint32_t *seed)
{
    *seed = *seed * 1664525u + 1013904223u;
    return (float)(*seed >> 8) * 0x1p-23f - 1;
}

static inline void make_parts(const td_model_info_t *info, parts_t *p)
{
    uint32_t seed = 5;

    memset(p, 0, sizeof(*p));
    for (size_t i = 0; i < TD_ARRAY_LEN(p->in_weight); i++) {
        p->in_weight[i] = 0.3f * noise(&seed);
    }
    for (size_t i = 0; i < TD_ARRAY_LEN(p->out_weight); i++) {
        p->out_weight[i] = 0.3f * noise(&seed);
    }
    for (size_t i = 0; i < HIDDEN; i++) {
        p->in_bias[i] = noise(&seed);
    }
    for (size_t i = 0; i < TINY_DIM; i++) {
        p->out_bias[i] = noise(&seed);
    }
    for (uint32_t i = 0; i < LISTED; i++) {
        p->tokens[i] = (int32_t)(2 * i + 1);
    }
    for (size_t i = 0; i < 32; i++) {
        (void)snprintf(p->print + 2 * i, 3, "%02x", info->fingerprint[i]);
    }
    p->tensors[0] =
        (td_safetensor_t){"in.weight", TD_SAFETENSORS_F32, 2, {HIDDEN, INPUTS}, p->in_weight, 0};
    p->tensors[1] = (td_safetensor_t){"in.bias", TD_SAFETENSORS_F32, 1, {HIDDEN}, p->in_bias, 0};
    p->tensors[2] = (td_safetensor_t){"out.weight",       TD_SAFETENSORS_F32, 2,
                                      {TINY_DIM, HIDDEN}, p->out_weight,      0};
    p->tensors[3] =
        (td_safetensor_t){"out.bias", TD_SAFETENSORS_F32, 1, {TINY_DIM}, p->out_bias, 0};
    p->tensors[4] = (td_safetensor_t){"tokens", TD_SAFETENSORS_I32, 1, {LISTED}, p->tokens, 0};
    p->texts[0] = (td_safetensors_text_t){TD_HEADS_FORMAT_KEY, TD_HEADS_FORMAT};
    p->texts[1] = (td_safetensors_text_t){TD_HEADS_FINGERPRINT_KEY, p->print};
}

static inline void temporary(char path[64])
{
    int fd = -1;

    (void)snprintf(path, 64, "%s", "/tmp/test-heads-XXXXXX");
    fd = mkstemp(path);
    assert_true(fd >= 0);
    assert_int_equal(close(fd), 0);
}

static inline void write_parts(const parts_t *p, const char *path)
{
    assert_int_equal(td_safetensors_write(path, p->tensors, TD_ARRAY_LEN(p->tensors), p->texts,
                                          TD_ARRAY_LEN(p->texts)),
                     TD_OK);
}

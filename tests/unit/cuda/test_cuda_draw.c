/* Drawing on the device picks what the sampler picks. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include "common/model/td_sampler_math_internal.h"
#include "tests/unit/cuda/test_cuda_rig.h"

enum { VOCAB = 1501, ROWS = 12 };

static void draw(const float *logits, const float *temperature, const double *log_min_p,
                 const uint64_t *key, uint32_t *tokens)
{
    td_cuda_draw_t p = {.vocab = VOCAB};

    p.logits = device_copy(logits, (size_t)ROWS * VOCAB * sizeof(*logits));
    p.temperature = device_copy(temperature, ROWS * sizeof(*temperature));
    p.log_min_p = device_copy(log_min_p, ROWS * sizeof(*log_min_p));
    p.key = device_copy(key, ROWS * sizeof(*key));
    p.token = device_alloc(ROWS * sizeof(*tokens));
    assert_int_equal(td_cuda_launch_draw(NULL, &p, ROWS), TD_OK);
    device_get(tokens, p.token, ROWS * sizeof(*tokens));
    device_free(p.logits);
    device_free(p.temperature);
    device_free(p.log_min_p);
    device_free(p.key);
    device_free(p.token);
}

static void test_the_device_draws_what_the_sampler_picks(void **state)
{
    static float logits[ROWS * VOCAB];
    static const float temperatures[] = {0.0f, 0.2f, 1.0f, 5.0f};
    static const float min_ps[] = {0.0f, 0.05f, 0.5f};
    uint64_t seed = 77;

    (void)state;
    for (uint32_t round = 0; round < 6; round++) {
        float temperature[ROWS];
        double log_min_p[ROWS];
        uint64_t key[ROWS];
        uint32_t want[ROWS];
        uint32_t got[ROWS];
        for (uint32_t r = 0; r < ROWS; r++) {
            td_sampling_t params;
            td_sampler_t *sampler = NULL;
            td_sampled_t sampled;
            float *row = logits + (size_t)r * VOCAB;
            td_sampling_init(&params);
            params.temperature = temperatures[r % TD_ARRAY_LEN(temperatures)];
            params.min_p = min_ps[r / 4];
            params.seed = 1000 * round + r;
            params.choice = r % 3;
            for (uint32_t i = 0; i < VOCAB; i++) {
                row[i] = cuda_random(&seed, 8.0f);
                if (i % 5 == 1) {
                    row[i] = i % 2 == 0 ? -INFINITY : 8.5f; /* banned ones, and ties at the top */
                }
            }
            assert_int_equal(td_sampler_create(&params, VOCAB, NULL, 0, &sampler), TD_OK);
            assert_int_equal(td_sampler_pick(sampler, row, round, NULL, 0, false, 0, &sampled),
                             TD_OK);
            want[r] = sampled.token;
            temperature[r] = params.temperature;
            log_min_p[r] =
                params.min_p > 0 ? td_sampler_log((double)params.min_p) : (double)-INFINITY;
            key[r] = td_sampler_token_key(&params, round);
            td_sampler_destroy(sampler);
        }
        cuda_set_order(round % cuda_orders());
        draw(logits, temperature, log_min_p, key, got);
        assert_memory_equal(want, got, sizeof(got));
    }
}

/* As td_sampler_pick() refuses them. */
static void test_broken_rows_give_no_token(void **state)
{
    static float logits[ROWS * VOCAB];
    float temperature[ROWS];
    double log_min_p[ROWS];
    uint64_t key[ROWS] = {0};
    uint32_t got[ROWS];

    (void)state;
    for (uint32_t r = 0; r < ROWS; r++) {
        temperature[r] = r % 2 == 0 ? 0.0f : 1.0f;
        log_min_p[r] = (double)-INFINITY;
        for (uint32_t i = 0; i < VOCAB; i++) {
            logits[(size_t)r * VOCAB + i] = r / 2 == 2 ? -INFINITY : 1.0f;
        }
        logits[(size_t)r * VOCAB + 700] = r / 2 == 0 ? NAN : r / 2 == 1 ? INFINITY : 1.0f;
        logits[(size_t)r * VOCAB + 700] = r / 2 == 2 ? -INFINITY : logits[(size_t)r * VOCAB + 700];
    }
    draw(logits, temperature, log_min_p, key, got);
    for (uint32_t r = 0; r < ROWS; r++) {
        assert_true(r < 6 ? got[r] == UINT32_MAX : got[r] < VOCAB);
    }
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(test_the_device_draws_what_the_sampler_picks),
    cmocka_unit_test(test_broken_rows_give_no_token),
};
CUDA_TEST_MAIN(tests)

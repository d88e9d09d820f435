/* test_cuda_rig.h - memory of the device, and kernels in every order of their threads. The tests
 * run in the emulator and, linked with the CUDA runtime instead, on a device: they see device
 * memory through copies only. Include <cmocka.h> first. Threads: owner. */
#pragma once

#include <cuda_runtime_api.h>

#include "common/model/cuda/td_cuda_launch.h"
#include "common/model/cuda/td_cuda_pack.h"
#include "tests/emu/emu_run.h"
#include "tests/unit/model/test_model_tiny.h"

/* On a device there is none. */
void emu_set_order(emu_order_t wanted, uint32_t seed) __attribute__((weak));

#define ORDERS 3u

/** How often a kernel is worth running: once for each order of its threads, once on a device. */
static inline uint32_t cuda_orders(void)
{
    return emu_set_order == NULL ? 1 : ORDERS;
}

static inline void cuda_set_order(uint32_t order)
{
    if (emu_set_order != NULL) {
        emu_set_order((emu_order_t)order, 7 + order);
    }
}

static inline void *device_alloc(size_t bytes)
{
    void *address = NULL;
    assert_int_equal(cudaMalloc(&address, bytes == 0 ? 16 : bytes), cudaSuccess);
    assert_int_equal(cudaMemsetAsync(address, 0xff, bytes == 0 ? 16 : bytes, NULL), cudaSuccess);
    return address;
}

/** Owner: the caller frees it with device_free(). */
static inline void *device_copy(const void *host, size_t bytes)
{
    void *address = device_alloc(bytes);
    assert_int_equal(cudaMemcpyAsync(address, host, bytes, cudaMemcpyHostToDevice, NULL),
                     cudaSuccess);
    assert_int_equal(cudaStreamSynchronize(NULL), cudaSuccess);
    return address;
}

static inline void device_put(void *to, const void *host, size_t bytes)
{
    assert_int_equal(cudaMemcpyAsync(to, host, bytes, cudaMemcpyHostToDevice, NULL), cudaSuccess);
    assert_int_equal(cudaStreamSynchronize(NULL), cudaSuccess);
}

/** Also waits for what was launched. */
static inline void device_get(void *host, const void *from, size_t bytes)
{
    assert_int_equal(cudaMemcpyAsync(host, from, bytes, cudaMemcpyDeviceToHost, NULL), cudaSuccess);
    assert_int_equal(cudaStreamSynchronize(NULL), cudaSuccess);
}

static inline void device_free(const void *address)
{
    void *mine = NULL;
    memcpy(&mine, &address, sizeof(mine));
    assert_int_equal(cudaFree(mine), cudaSuccess);
}

static inline void cuda_assert_same_bits(const float *a, const float *b, size_t count,
                                         const char *what)
{
    for (size_t i = 0; i < count; i++) {
        if (memcmp(a + i, b + i, sizeof(*a)) != 0 && !(isnan(a[i]) && isnan(b[i]))) {
            fail_msg("%s: entry %zu differs: %.9g %.9g", what, i, (double)a[i], (double)b[i]);
        }
    }
}

static inline float cuda_random(uint64_t *state, float scale)
{
    *state = *state * 6364136223846793005ull + 1442695040888963407ull;
    return (float)((double)(*state >> 11) * 0x1p-52 - 1.0) * scale;
}

/** Runs all tests of the table, or those whose name the first argument matches. */
#define CUDA_TEST_MAIN(tests)                                                                      \
    int main(int argc, char **argv)                                                                \
    {                                                                                              \
        if (argc > 1) {                                                                            \
            cmocka_set_test_filter(argv[1]);                                                       \
        }                                                                                          \
        return cmocka_run_group_tests(tests, NULL, NULL);                                          \
    }

/* test_cuda_model_rig.h - models on the device, beside those of test_model_rig.h. Include
 * <cmocka.h> first. Threads: owner. */
#pragma once

#include "common/kv/td_pool.h"
#include "tests/unit/cuda/test_cuda_rig.h"
#include "tests/unit/model/test_model_rig.h"

static inline td_model_options_t cuda_options(uint32_t rows_max, uint64_t device_kv_bytes)
{
    td_model_options_t options = default_options();

    options.backend = TD_BACKEND_CUDA;
    options.rows_max = rows_max;
    options.device_kv_bytes = device_kv_bytes;
    return options;
}

/** A pool over the rig's first blocks. Owner: the caller. */
static inline td_pool_t *rig_pool(const rig_t *rig, uint32_t blocks)
{
    td_pool_t *pool = NULL;

    assert_int_equal(td_pool_create(rig->pool, blocks, td_kv_block_bytes(&rig->info->kv), &pool),
                     TD_OK);
    return pool;
}

/** The same, given to the model as nodes give theirs. */
static inline td_pool_t *rig_use_pool(rig_t *rig, uint32_t blocks)
{
    td_pool_t *pool = rig_pool(rig, blocks);

    td_model_use_pool(rig->model, pool);
    return pool;
}

/** The model on this many devices. A machine that has fewer stands for several. */
static inline void rig_on_devices(td_model_options_t *options, uint32_t devices)
{
    int there = 0;

    assert_int_equal(cudaGetDeviceCount(&there), cudaSuccess);
    options->devices.count = devices;
    for (uint32_t i = 0; i < devices; i++) {
        options->devices.ids[i] = (devices - 1 - i) % (uint32_t)there; /* in no order of theirs */
    }
}

/* Tests that are run on one device, and once more on two. */
static uint32_t rig_devices __attribute__((unused)); /* just now */
void emu_set_streams(uint32_t seed) __attribute__((weak));
void emu_set_devices(int count, bool peers) __attribute__((weak));
void emu_set_memory(size_t bytes) __attribute__((weak));
void emu_set_memory_of(int device, size_t bytes) __attribute__((weak));
size_t emu_memory_used(void) __attribute__((weak));

static inline int rig_one_device(void **state)
{
    (void)state;
    rig_devices = 1;
    return 0;
}

/* Each does only what somebody waits for. */
static inline int rig_two_devices(void **state)
{
    (void)state;
    rig_devices = 2;
    return 0;
}

/* Neither can read the other's memory, and one or the other goes ahead. */
static inline int rig_two_apart(void **state)
{
    (void)state;
    rig_devices = 2;
    if (emu_set_streams != NULL) {
        emu_set_streams(11);
        emu_set_devices(EMU_DEVICES, false);
    }
    return 0;
}

static inline int rig_as_before(void **state)
{
    (void)state;
    if (emu_set_streams != NULL) {
        emu_set_streams(0);
        emu_set_devices(EMU_DEVICES, true);
    }
    return 0;
}

/* With every size of memory, of one device (-1: of all), loading works or says that there is too
 * little, and leaves nothing. Answers how often it was refused before it worked. Only in the
 * emulator. */
static inline uint32_t rig_load_with_growing_memory(const td_gguf_t *gguf,
                                                    const td_model_options_t *options, int device)
{
    uint32_t refused = 0;
    bool loaded = false;

    for (size_t bytes = 1024; !loaded; bytes = bytes * 5 / 4) {
        td_model_t *model = NULL;
        td_status_t status = TD_OK;
        assert_true(bytes < (64u << 20));
        device < 0 ? emu_set_memory(bytes) : emu_set_memory_of(device, bytes);
        status = td_model_load(gguf, options, &model);
        loaded = status == TD_OK;
        assert_true(loaded || status == TD_ERR_NO_MEMORY);
        refused += loaded ? 0 : 1;
        if (loaded) {
            td_model_destroy(model);
        }
        assert_int_equal(emu_memory_used(), 0);
    }
    emu_set_memory(0);
    return refused;
}

#define RIG_TEST(test, name, setup)                                                                \
    {                                                                                              \
        name, test, setup, rig_as_before, NULL                                                     \
    }
#define RIG_ON_DEVICES(test)                                                                       \
    RIG_TEST(test, #test, rig_one_device), RIG_TEST(test, #test "_on_two_devices", rig_two_devices)
#define RIG_ON_ONE_DEVICE(test) RIG_TEST(test, #test, rig_one_device)
/* And where they must have copies of each other's parts. */
#define RIG_ON_TWO_APART(test) RIG_TEST(test, #test "_on_two_apart", rig_two_apart)

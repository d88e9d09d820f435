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

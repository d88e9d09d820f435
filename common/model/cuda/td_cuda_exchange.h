/* td_cuda_exchange.h - blocks between this device and others: td_kv_device_ops_t over the copies
 * that the backend keeps, and NCCL. Design: common/model/cuda/DESIGN.md, "Other devices". Threads:
 * as td_kv_device_ops_t. */
#pragma once

#include "common/kv/td_kv_device.h"
#include "common/model/cuda/td_cuda_mirror.h"

typedef struct td_cuda_exchange td_cuda_exchange_t;

/** Units:  index: of the device; pool: its copies, [place][block_bytes].
 * Errors: TD_ERR_NO_MEMORY.
 * Owner:  the caller ends it with td_cuda_exchange_destroy(); mirror and pool are borrowed. */
TD_MUST_CHECK td_status_t td_cuda_exchange_create(int index, uint8_t *pool, size_t block_bytes,
                                                  td_cuda_mirror_t *mirror,
                                                  td_cuda_exchange_t **out);
/** False: a link has not ended, so what it may read or write, which is all of the device's memory
 * for what the runtime says, must stay until the process ends. */
TD_MUST_CHECK bool td_cuda_exchange_destroy(td_cuda_exchange_t *kv);
td_kv_device_t *td_cuda_exchange_device(td_cuda_exchange_t *kv);

/* td_model_device_internal.h - what the backend of a device, or of several that share a model, does
 * for it: it has its own weights and buffers and runs passes in place of the CPU's threads, with
 * the same bits (I1). The blocks of KV stay the host's: the device keeps copies of those it needs,
 * and what a pass writes is back in the host's before the pass says so. Design:
 * common/model/cuda/DESIGN.md. Threads: owner, the model's. */
#pragma once

#include "common/model/td_model_internal.h"

typedef struct td_model_device_ops {
    /** Opens the device. Everything but weights is allocated here; m has its sizes and tables.
     * Errors: TD_ERR_UNSUPPORTED (no such device, or a shape it has no kernel for),
     *         TD_ERR_NO_MEMORY, TD_ERR_IO (the device fails); a line says which. */
    td_status_t (*create)(const td_model_t *m, td_model_device_t **out);
    /** Takes copies of a layer's weights; TD_KV_LAYERS_MAX: of embedding, head and output norm. */
    td_status_t (*load)(td_model_device_t *device, const td_model_t *m, uint32_t layer);
    /** All weights are there: takes the memory for KV that the options name.
     * Errors: TD_ERR_NO_MEMORY (a line has the numbers). */
    td_status_t (*start)(td_model_device_t *device, const td_model_t *m);
    /** Runs m->pass, whose rows are checked and whose logit rows are listed. Logits and hidden
     * states go to m->logits and m->normed.
     * Errors: TD_ERR_NO_MEMORY (the pass needs more blocks at once than the device holds),
     *         TD_ERR_IO (the device fails: nothing of the pass may be used). */
    td_status_t (*forward)(td_model_device_t *device, td_model_t *m);
    /** The host's bytes of a block are no longer those that the last pass left. */
    void (*changed)(td_model_device_t *device, uint32_t block);
    /** The pool that passes will be given, or NULL: as td_model_use_pool(). */
    void (*use_pool)(td_model_device_t *device, const td_pool_t *pool);
    /** As td_model_kv_device(). */
    td_kv_device_t *(*kv_device)(td_model_device_t *device);
    void (*destroy)(td_model_device_t *device);
} td_model_device_ops_t;

/* Where a program is linked without it, its address is NULL. */
extern const td_model_device_ops_t td_cuda_device_ops __attribute__((weak));

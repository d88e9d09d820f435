#include "common/model/cuda/td_cuda_nccl.h"

#ifdef TD_CUDA_HAS_NCCL
#include <dlfcn.h>
#include <string.h>

#include "common/base/td_base.h"

#define LIBRARY "libnccl.so.2"

static td_cuda_nccl_t calls;

const td_cuda_nccl_t *td_cuda_nccl_load(const char **why_out)
{
    static const struct {
        const char *name;
        void *to; /* a pointer to a function */
    } wanted[] = {
        {"ncclGetVersion", &calls.get_version},
        {"ncclGetUniqueId", &calls.get_unique_id},
        {"ncclCommInitRankConfig", &calls.init_rank_config},
        {"ncclCommGetAsyncError", &calls.get_async_error},
        {"ncclCommAbort", &calls.abort},
        {"ncclSend", &calls.send},
        {"ncclRecv", &calls.recv},
        {"ncclGroupStart", &calls.group_start},
        {"ncclGroupEnd", &calls.group_end},
        {"ncclGetErrorString", &calls.get_error_string},
    };
    void *library = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL);

    if (library == NULL) {
        *why_out = dlerror();
        return NULL;
    }
    for (size_t i = 0; i < TD_ARRAY_LEN(wanted); i++) {
        void *address = dlsym(library, wanted[i].name);
        if (address == NULL) {
            *why_out = wanted[i].name;
            (void)dlclose(library);
            return NULL;
        }
        memcpy(wanted[i].to, &address, sizeof(address));
    }
    return &calls; /* the library stays */
}
#endif

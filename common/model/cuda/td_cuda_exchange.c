#include "common/model/cuda/td_cuda_exchange.h"

#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <cuda_runtime_api.h>

#include "common/base/td_base.h"
#include "common/base/td_log.h"
#include "common/model/cuda/td_cuda_launch.h"
#include "common/model/cuda/td_cuda_nccl.h"

#define LINKS_MAX 64u
#define LINK_CTAS_MAX                                                                              \
    4             /* multiprocessors that a link's kernels may take, of those that passes use */
#define ALIGN 16u /* of what the kernel copies */
#define LINK_NAP_NS 1000000
#define SLOTS_MAX 64u

typedef enum slot_use { SLOT_FREE = 0, SLOT_GATHERS, SLOT_SCATTERS, SLOT_POSTED } slot_use_t;

typedef struct slot {
    uint8_t *bytes;   /* on the device */
    cudaEvent_t done; /* of what was begun last */
    slot_use_t use;
    td_kv_link_t *link;  /* of a post; NULL once the device knows of it */
    td_kv_link_t *owner; /* of a post, until it is over or its link is gone */
    uint32_t part_count;
    td_kv_part_t *parts;     /* owned: [parts_max] */
    uint32_t *places;        /* owned, pinned: [parts_max], TD_CUDA_NO_PLACE: not on the device */
    uint32_t *device_places; /* on the device */
} slot_t;

struct td_cuda_exchange {
    td_kv_device_t face; /* first */
    int index;
    uint8_t *pool;
    size_t block_bytes;
    td_cuda_mirror_t *mirror;
    cudaStream_t gathering;
    cudaStream_t scattering;
    slot_t slots[SLOTS_MAX];
    uint32_t slot_count;
    uint32_t parts_max;
    uint32_t links; /* not gone yet */
    char name[TD_KV_DEVICE_NAME_MAX];
#ifdef TD_CUDA_HAS_NCCL
    const td_cuda_nccl_t *nccl;
#endif
};

td_kv_device_t *td_cuda_exchange_device(td_cuda_exchange_t *kv)
{
    return kv == NULL ? NULL : &kv->face;
}

#ifdef TD_CUDA_HAS_NCCL

static td_cuda_exchange_t *kv_of(td_kv_device_t *device)
{
    return (td_cuda_exchange_t *)device;
}

/* --- gathering and scattering ------------------------------------------------------------------
 */

static bool is_aligned(const td_cuda_exchange_t *kv, const td_kv_part_t *part, size_t at)
{
    return part->offset % ALIGN == 0 && part->bytes % ALIGN == 0 && at % ALIGN == 0 &&
           kv->block_bytes % ALIGN == 0;
}

/* Parts from this one on that one launch of the kernel can copy. */
static uint32_t count_run(const td_cuda_exchange_t *kv, const slot_t *s, uint32_t begin, size_t at)
{
    const td_kv_part_t *first = &s->parts[begin];
    uint32_t count = 0;

    while (begin + count < s->part_count && s->places[begin + count] != TD_CUDA_NO_PLACE &&
           first[count].offset == first->offset && first[count].bytes == first->bytes &&
           is_aligned(kv, first, at)) {
        count++;
    }
    return count;
}

/* Between the slot and the device's copies of blocks. */
static td_status_t move_run(const td_cuda_exchange_t *kv, const slot_t *s, uint32_t begin,
                            uint32_t count, size_t at, bool to_pool, cudaStream_t stream)
{
    const td_cuda_move_t p = {.pool = kv->pool,
                              .block_bytes = kv->block_bytes,
                              .blocks = s->device_places + begin,
                              .staging = s->bytes + at,
                              .offset = s->parts[begin].offset,
                              .bytes = s->parts[begin].bytes,
                              .to_pool = to_pool ? 1 : 0};

    return td_cuda_launch_move(stream, &p, count);
}

/* The same where sizes do not suit the kernel. */
static td_status_t move_odd(const td_cuda_exchange_t *kv, const slot_t *s, uint32_t i, size_t at,
                            bool to_pool, cudaStream_t stream)
{
    uint8_t *copy = kv->pool + s->places[i] * kv->block_bytes + s->parts[i].offset;
    uint8_t *staged = s->bytes + at;

    return td_cuda_check(cudaMemcpyAsync(to_pool ? copy : staged, to_pool ? staged : copy,
                                         s->parts[i].bytes, cudaMemcpyDeviceToDevice, stream),
                         "cudaMemcpyAsync");
}

static td_status_t move_places(const td_cuda_exchange_t *kv, slot_t *s, bool to_pool,
                               cudaStream_t stream)
{
    size_t at = 0;

    TD_TRY(td_cuda_check(cudaMemcpyAsync(s->device_places, s->places,
                                         s->part_count * sizeof(*s->places), cudaMemcpyHostToDevice,
                                         stream),
                         "cudaMemcpyAsync"));
    for (uint32_t i = 0; i < s->part_count;) {
        const uint32_t run = count_run(kv, s, i, at);
        if (run > 0) {
            TD_TRY(move_run(kv, s, i, run, at, to_pool, stream));
            at += (size_t)run * s->parts[i].bytes;
            i += run;
            continue;
        }
        if (s->places[i] != TD_CUDA_NO_PLACE) {
            TD_TRY(move_odd(kv, s, i, at, to_pool, stream));
        }
        at += s->parts[i++].bytes;
    }
    return TD_OK;
}

/* Blocks that the device has no copy of come from the host, and in the other direction all of them
 * go there. */
static td_status_t move_host(slot_t *s, bool to_host, cudaStream_t stream)
{
    size_t at = 0;

    for (uint32_t i = 0; i < s->part_count; i++) {
        const td_kv_part_t *part = &s->parts[i];
        if (to_host) {
            TD_TRY(td_cuda_check(cudaMemcpyAsync(part->host, s->bytes + at, part->bytes,
                                                 cudaMemcpyDeviceToHost, stream),
                                 "cudaMemcpyAsync"));
        } else if (s->places[i] == TD_CUDA_NO_PLACE) {
            TD_TRY(td_cuda_check(cudaMemcpyAsync(s->bytes + at, part->host, part->bytes,
                                                 cudaMemcpyHostToDevice, stream),
                                 "cudaMemcpyAsync"));
        }
        at += part->bytes;
    }
    return TD_OK;
}

/* Lets go of the copies. well: what was to come has come. */
static void slot_ends(const td_cuda_exchange_t *kv, slot_t *s, bool well)
{
    for (uint32_t i = 0; i < s->part_count; i++) {
        const td_kv_part_t *p = &s->parts[i];
        if (s->places[i] == TD_CUDA_NO_PLACE) {
            continue;
        }
        if (s->use == SLOT_SCATTERS) {
            td_cuda_mirror_landed(kv->mirror, p->block, p->epoch, s->places[i], p->offset,
                                  well ? p->bytes : 0, kv->block_bytes);
        } else {
            td_cuda_mirror_unpin(kv->mirror, s->places[i]);
        }
    }
    s->part_count = 0;
    s->use = SLOT_FREE;
}

static td_status_t begin(td_cuda_exchange_t *kv, slot_t *s, slot_use_t use, cudaStream_t stream)
{
    const bool scatters = use == SLOT_SCATTERS;
    td_status_t status = td_cuda_check(cudaSetDevice(kv->index), "cudaSetDevice");

    s->use = use;
    if (status == TD_OK) {
        status = move_places(kv, s, scatters, stream);
    }
    if (status == TD_OK) {
        status = move_host(s, scatters, stream);
    }
    if (status == TD_OK) {
        status = td_cuda_check(cudaEventRecord(s->done, stream), "cudaEventRecord");
    }
    if (status != TD_OK) {
        (void)cudaStreamSynchronize(stream); /* what was begun is let end */
        slot_ends(kv, s, false);
    }
    return status;
}

static slot_t *slot_at(td_cuda_exchange_t *kv, uint32_t slot)
{
    TD_ASSERT(slot < kv->slot_count && kv->slots[slot].use == SLOT_FREE);
    return &kv->slots[slot];
}

/* A free slot, for these parts. */
static slot_t *slot_for(td_cuda_exchange_t *kv, uint32_t slot, const td_kv_part_t *parts,
                        uint32_t count)
{
    slot_t *s = slot_at(kv, slot);

    TD_ASSERT(count <= kv->parts_max);
    memcpy(s->parts, parts, count * sizeof(*parts));
    s->part_count = count;
    return s;
}

static td_status_t kv_gather(td_kv_device_t *device, uint32_t slot, const td_kv_part_t *parts,
                             uint32_t count)
{
    td_cuda_exchange_t *kv = kv_of(device);
    slot_t *s = slot_for(kv, slot, parts, count);

    for (uint32_t i = 0; i < count; i++) {
        if (!td_cuda_mirror_pin(kv->mirror, parts[i].block, parts[i].epoch, &s->places[i])) {
            s->places[i] = TD_CUDA_NO_PLACE;
        }
    }
    return begin(kv, s, SLOT_GATHERS, kv->gathering);
}

static td_status_t kv_scatter(td_kv_device_t *device, uint32_t slot, const td_kv_part_t *parts,
                              uint32_t count)
{
    td_cuda_exchange_t *kv = kv_of(device);
    slot_t *s = slot_for(kv, slot, parts, count);

    for (uint32_t i = 0; i < count; i++) {
        if (!td_cuda_mirror_pin_for(kv->mirror, parts[i].block, parts[i].epoch, parts[i].offset,
                                    &s->places[i])) {
            s->places[i] = TD_CUDA_NO_PLACE;
        }
    }
    return begin(kv, s, SLOT_SCATTERS, kv->scattering);
}

/* --- links -------------------------------------------------------------------------------------
 */

/* A communicator and the thread that makes and ends it: those calls may wait for whatever they
 * like, all others return at once. */
struct td_kv_link {
    td_cuda_exchange_t *kv;
    ncclUniqueId id;
    int rank;
    ncclComm_t comm; /* the thread's until ready, and once more after `closing` */
    cudaStream_t stream;
    pthread_t thread;
    atomic_int status;   /* TD_INPROGRESS until opened; release by the thread, acquire by poll */
    atomic_bool closing; /* release by close, acquire by the thread */
    sem_t close;         /* posted with it: an open link's thread waits for nothing else */
    atomic_bool ended;   /* release by the thread: it touches nothing any more */
    slot_t *posting;     /* what the device does not know of yet */
};

static ncclResult_t async_error(const td_kv_link_t *l)
{
    ncclResult_t error = ncclInternalError;
    const ncclResult_t result = l->kv->nccl->get_async_error(l->comm, &error);

    return result == ncclSuccess ? error : result;
}

static void log_failure(const td_kv_link_t *l, const char *what, ncclResult_t result)
{
    TD_LOG_WARN("nccl call failed", "call=%s error=\"%s\"", what,
                l->kv->nccl->get_error_string(result));
}

/* Opens the communicator; until it is open, or somebody closes it. */
static ncclResult_t link_make(td_kv_link_t *l)
{
    const struct timespec nap = {.tv_nsec = LINK_NAP_NS};
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclResult_t result = ncclSuccess;

    config.blocking = 0;
    config.maxCTAs = LINK_CTAS_MAX;
    if (cudaSetDevice(l->kv->index) != cudaSuccess) {
        return ncclUnhandledCudaError;
    }
    result = l->kv->nccl->init_rank_config(&l->comm, 2, l->id, l->rank, &config);
    while (result == ncclInProgress && !atomic_load_explicit(&l->closing, memory_order_acquire)) {
        (void)nanosleep(&nap, NULL);
        result = async_error(l);
    }
    return result;
}

static void *link_main(void *arg)
{
    td_kv_link_t *l = arg;
    const ncclResult_t result = link_make(l);

    if (result != ncclSuccess && result != ncclInProgress) {
        log_failure(l, "ncclCommInitRankConfig", result);
    }
    atomic_store_explicit(&l->status, result == ncclSuccess ? TD_OK : TD_ERR_IO,
                          memory_order_release);
    while (sem_wait(&l->close) != 0) { /* a signal */
    }
    if (l->comm != NULL) {
        const ncclResult_t aborted = l->kv->nccl->abort(l->comm);
        if (aborted != ncclSuccess && aborted != ncclInProgress) {
            log_failure(l, "ncclCommAbort", aborted);
        }
    }
    atomic_store_explicit(&l->ended, true, memory_order_release);
    return NULL;
}

static td_status_t kv_link_id(td_kv_device_t *device, uint8_t id_out[TD_KV_LINK_ID_BYTES])
{
    td_cuda_exchange_t *kv = kv_of(device);
    ncclUniqueId id;
    ncclResult_t result = ncclSuccess;

    _Static_assert(sizeof(id) == TD_KV_LINK_ID_BYTES, "the name of a link is NCCL's");
    result = kv->nccl->get_unique_id(&id);
    if (result != ncclSuccess) {
        TD_LOG_WARN("nccl call failed", "call=ncclGetUniqueId error=\"%s\"",
                    kv->nccl->get_error_string(result));
        return TD_ERR_IO;
    }
    memcpy(id_out, &id, sizeof(id));
    return TD_OK;
}

static td_status_t kv_link_open(td_kv_device_t *device, const uint8_t id[TD_KV_LINK_ID_BYTES],
                                uint32_t rank, td_kv_link_t **out)
{
    td_cuda_exchange_t *kv = kv_of(device);
    td_kv_link_t *l = NULL;
    td_status_t status = TD_OK;

    if (kv->links >= LINKS_MAX) {
        return TD_ERR_BUSY;
    }
    l = td_calloc(1, sizeof(*l));
    if (l == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    l->kv = kv;
    l->rank = (int)rank;
    memcpy(&l->id, id, sizeof(l->id));
    atomic_init(&l->status, TD_INPROGRESS);
    status = td_cuda_check(cudaSetDevice(kv->index), "cudaSetDevice");
    if (status != TD_OK) {
        goto err_free;
    }
    status = td_cuda_check(cudaStreamCreateWithFlags(&l->stream, cudaStreamNonBlocking),
                           "cudaStreamCreate");
    if (status != TD_OK) {
        goto err_free;
    }
    if (sem_init(&l->close, 0, 0) != 0 || pthread_create(&l->thread, NULL, link_main, l) != 0) {
        status = TD_ERR_BUSY;
        goto err_destroy_stream;
    }
    kv->links++;
    *out = l;
    return TD_OK;

err_destroy_stream:
    (void)cudaStreamDestroy(l->stream);
err_free:
    td_free(l);
    return status;
}

static td_status_t link_failed(const td_kv_link_t *l, const char *what, ncclResult_t result)
{
    log_failure(l, what, result);
    return TD_ERR_IO;
}

/* How far NCCL is, and with that what was posted last. */
static td_status_t kv_link_poll(td_kv_link_t *l)
{
    const int opened = atomic_load_explicit(&l->status, memory_order_acquire);
    ncclResult_t error = ncclSuccess;

    if (opened != TD_OK) {
        return opened;
    }
    error = async_error(l);
    if (error == ncclInProgress) {
        return TD_INPROGRESS;
    }
    if (error != ncclSuccess) {
        return link_failed(l, "ncclCommGetAsyncError", error);
    }
    if (l->posting != NULL) {
        TD_TRY(td_cuda_check(cudaEventRecord(l->posting->done, l->stream), "cudaEventRecord"));
        l->posting->link = NULL;
        l->posting = NULL;
    }
    return TD_OK;
}

static td_status_t kv_link_post(td_kv_link_t *l, uint32_t slot, size_t bytes, bool send)
{
    const td_cuda_nccl_t *nccl = l->kv->nccl;
    slot_t *s = slot_at(l->kv, slot);
    ncclResult_t result = ncclSuccess;
    ncclResult_t ended = ncclSuccess;

    TD_ASSERT(l->posting == NULL);
    TD_TRY(td_cuda_check(cudaSetDevice(l->kv->index), "cudaSetDevice"));
    s->use = SLOT_POSTED;
    s->link = l;
    s->owner = l;
    l->posting = s;
    /* One call of each group: a chunk's blocks lie together in its slot. The group is what makes
     * the call return before the other end has come. */
    result = nccl->group_start();
    if (result != ncclSuccess) {
        return link_failed(l, "ncclGroupStart", result);
    }
    result = send ? nccl->send(s->bytes, bytes, ncclUint8, 1 - l->rank, l->comm, l->stream)
                  : nccl->recv(s->bytes, bytes, ncclUint8, 1 - l->rank, l->comm, l->stream);
    ended = nccl->group_end();
    if (result != ncclSuccess && result != ncclInProgress) {
        return link_failed(l, send ? "ncclSend" : "ncclRecv", result);
    }
    if (ended != ncclSuccess && ended != ncclInProgress) {
        return link_failed(l, "ncclGroupEnd", ended);
    }
    return TD_OK;
}

static void kv_link_close(td_kv_link_t *l)
{
    atomic_store_explicit(&l->closing, true, memory_order_release);
    (void)sem_post(&l->close);
}

static bool kv_link_gone(td_kv_link_t *l)
{
    td_cuda_exchange_t *kv = l->kv;

    /* Kernels of an aborted communicator leave soon, but not before they have left do they leave
     * its slots alone. A device that answers with an error runs nothing any more. */
    if (!atomic_load_explicit(&l->ended, memory_order_acquire) ||
        cudaStreamQuery(l->stream) == cudaErrorNotReady) {
        return false;
    }
    (void)pthread_join(l->thread, NULL);
    (void)sem_destroy(&l->close);
    (void)cudaStreamDestroy(l->stream);
    for (uint32_t i = 0; i < kv->slot_count; i++) {
        if (kv->slots[i].owner == l) {
            kv->slots[i].use = SLOT_FREE;
            kv->slots[i].owner = NULL;
            kv->slots[i].link = NULL;
        }
    }
    kv->links--;
    td_free(l);
    return true;
}

static td_status_t kv_poll(td_kv_device_t *device, uint32_t slot)
{
    td_cuda_exchange_t *kv = kv_of(device);
    slot_t *s = &kv->slots[slot];
    cudaError_t error = cudaSuccess;
    td_status_t status = TD_OK;

    TD_ASSERT(slot < kv->slot_count && s->use != SLOT_FREE);
    if (s->link != NULL) {
        status = kv_link_poll(s->link);
        if (status != TD_OK) {
            return status;
        }
    }
    error = cudaEventQuery(s->done);
    if (error == cudaErrorNotReady) {
        return TD_INPROGRESS;
    }
    status = td_cuda_check(error, "cudaEventQuery");
    if (s->use == SLOT_POSTED) {
        if (status == TD_OK) {
            s->use = SLOT_FREE;
            s->owner = NULL;
        }
        return status;
    }
    if (status != TD_OK) {
        (void)cudaStreamSynchronize(s->use == SLOT_GATHERS ? kv->gathering : kv->scattering);
    }
    slot_ends(kv, s, status == TD_OK);
    return status;
}

/* --- start and end ---------------------------------------------------------------------------- */

static td_status_t slot_take(slot_t *s, size_t bytes, uint32_t parts)
{
    void *address = NULL;

    s->parts = td_calloc(parts, sizeof(*s->parts));
    if (s->parts == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    TD_TRY(td_cuda_check(cudaMalloc(&address, bytes), "cudaMalloc"));
    s->bytes = address;
    TD_TRY(td_cuda_check(cudaMalloc(&address, parts * sizeof(uint32_t)), "cudaMalloc"));
    s->device_places = address;
    TD_TRY(td_cuda_check(cudaHostAlloc(&address, parts * sizeof(uint32_t), cudaHostAllocDefault),
                         "cudaHostAlloc"));
    s->places = address;
    return td_cuda_check(cudaEventCreateWithFlags(&s->done, cudaEventDisableTiming),
                         "cudaEventCreate");
}

/* Which device it is among all that may meet: the host's boot and the bus. */
static td_status_t name_device(td_cuda_exchange_t *kv)
{
    char bus[24] = "";
    char boot[48] = "";
    int version = 0;
    FILE *file = fopen("/proc/sys/kernel/random/boot_id", "re");

    if (file == NULL || fgets(boot, sizeof(boot), file) == NULL) {
        (void)gethostname(boot, sizeof(boot) - 1);
    }
    if (file != NULL) {
        (void)fclose(file);
    }
    boot[strcspn(boot, " \n")] = '\0';
    if (kv->nccl->get_version(&version) != ncclSuccess) {
        return TD_ERR_IO;
    }
    TD_TRY(
        td_cuda_check(cudaDeviceGetPCIBusId(bus, sizeof(bus), kv->index), "cudaDeviceGetPCIBusId"));
    (void)snprintf(kv->name, sizeof(kv->name), "nccl %d %s/%s", version, boot, bus);
    return TD_OK;
}

static void kv_stop(td_kv_device_t *device)
{
    td_cuda_exchange_t *kv = kv_of(device);

    (void)cudaSetDevice(kv->index);
    if (kv->gathering != NULL) {
        (void)cudaStreamSynchronize(kv->gathering);
        (void)cudaStreamDestroy(kv->gathering);
    }
    if (kv->scattering != NULL) {
        (void)cudaStreamSynchronize(kv->scattering);
        (void)cudaStreamDestroy(kv->scattering);
    }
    kv->gathering = NULL;
    kv->scattering = NULL;
    for (uint32_t i = 0; i < kv->slot_count; i++) {
        slot_t *s = &kv->slots[i];
        if (s->use == SLOT_GATHERS || s->use == SLOT_SCATTERS) {
            slot_ends(kv, s, false);
        }
        (void)cudaFree(s->bytes);
        (void)cudaFree(s->device_places);
        (void)cudaFreeHost(s->places);
        if (s->done != NULL) {
            (void)cudaEventDestroy(s->done);
        }
        td_free(s->parts);
        *s = (slot_t){0};
    }
    kv->slot_count = 0;
}

static td_status_t take_memory(td_cuda_exchange_t *kv, uint32_t slots, size_t slot_bytes,
                               uint32_t parts_max)
{
    TD_TRY(td_cuda_check(cudaSetDevice(kv->index), "cudaSetDevice"));
    TD_TRY(name_device(kv));
    TD_TRY(td_cuda_check(cudaStreamCreateWithFlags(&kv->gathering, cudaStreamNonBlocking),
                         "cudaStreamCreate"));
    TD_TRY(td_cuda_check(cudaStreamCreateWithFlags(&kv->scattering, cudaStreamNonBlocking),
                         "cudaStreamCreate"));
    while (kv->slot_count < slots) {
        TD_TRY(slot_take(&kv->slots[kv->slot_count++], slot_bytes, parts_max));
    }
    return TD_OK;
}

static td_status_t kv_start(td_kv_device_t *device, uint32_t slots, size_t slot_bytes,
                            uint32_t parts_max)
{
    td_cuda_exchange_t *kv = kv_of(device);
    const char *why = "";
    td_status_t status = TD_OK;

    TD_ASSERT(slots <= SLOTS_MAX);
    kv->nccl = td_cuda_nccl_load(&why);
    if (kv->nccl == NULL) {
        TD_LOG_INFO("no nccl", "why=\"%s\"", why);
        return TD_ERR_UNSUPPORTED;
    }
    kv->parts_max = parts_max;
    status = take_memory(kv, slots, slot_bytes, parts_max);
    if (status != TD_OK) {
        kv_stop(device);
        return status;
    }
    TD_LOG_INFO("nccl there", "name=\"%s\" staging_bytes=%zu", kv->name, slots * slot_bytes);
    return TD_OK;
}

static const char *kv_name(const td_kv_device_t *device)
{
    return ((const td_cuda_exchange_t *)device)->name;
}

static void kv_forget(td_kv_device_t *device, uint32_t block)
{
    td_cuda_mirror_forget(kv_of(device)->mirror, block);
}

static const td_kv_device_ops_t ops = {
    .start = kv_start,
    .stop = kv_stop,
    .name = kv_name,
    .gather = kv_gather,
    .scatter = kv_scatter,
    .forget = kv_forget,
    .poll = kv_poll,
    .link_id = kv_link_id,
    .link_open = kv_link_open,
    .link_poll = kv_link_poll,
    .link_post = kv_link_post,
    .link_close = kv_link_close,
    .link_gone = kv_link_gone,
};

td_status_t td_cuda_exchange_create(int index, uint8_t *pool, size_t block_bytes,
                                    td_cuda_mirror_t *mirror, td_cuda_exchange_t **out)
{
    td_cuda_exchange_t *kv = td_calloc(1, sizeof(*kv));

    if (kv == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    kv->face.ops = &ops;
    kv->index = index;
    kv->pool = pool;
    kv->block_bytes = block_bytes;
    kv->mirror = mirror;
    *out = kv;
    return TD_OK;
}

bool td_cuda_exchange_destroy(td_cuda_exchange_t *kv)
{
    if (kv != NULL && kv->links > 0) {
        TD_LOG_WARN("an nccl link does not end: its device's memory is left to the process's end",
                    "device=%d links=%u", kv->index, kv->links);
        return false;
    }
    if (kv != NULL) {
        kv_stop(&kv->face);
        td_free(kv);
    }
    return true;
}

#else /* built without NCCL's header */

td_status_t td_cuda_exchange_create(int index, uint8_t *pool, size_t block_bytes,
                                    td_cuda_mirror_t *mirror, td_cuda_exchange_t **out)
{
    (void)index;
    (void)pool;
    (void)block_bytes;
    (void)mirror;
    TD_LOG_INFO("no nccl", "why=\"built without nccl.h\"");
    *out = NULL;
    return TD_OK;
}

bool td_cuda_exchange_destroy(td_cuda_exchange_t *kv)
{
    (void)kv;
    return true;
}

#endif

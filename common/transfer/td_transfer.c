#include "common/transfer/td_transfer.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucp/api/ucp.h>
#include <ucs/config/global_opts.h>
#include <unistd.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/base/td_fault.h"
#include "common/base/td_log.h"
#include "common/base/td_ring.h"
#include "common/transfer/td_transfer_nccl.h"

#define AM_ASK 1u
#define AM_ANSWER 2u
#define AM_NCCL 3u
#define COMMANDS_MAX 16384u
#define ANSWERS_IN_FLIGHT_MAX 16u /* staging buffers */
#define ANSWERS_OF_PEER_MAX 4u    /* of those: a frozen asker must not hold up the others */
#define JOBS_MAX 4096u            /* asks waiting for a staging buffer */
#define SHM_BYTES_PER_TURN (8u << 20)
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14; older headers lack it */
#endif
#define PROGRESS_PER_TURN 256 /* so that a flood of answers cannot starve commands */
#define POLL_BUSY_MS 5
#define RECONNECT_MS 100u
#define POLL_IDLE_MS 500 /* a wake-up that got lost costs so much, not everything */

/* --- wire: little-endian structs over active messages, both ends of one build's layout ---------
 */

typedef struct ask_header {
    uint64_t asker; /* incarnation: whom to answer */
    uint64_t owner; /* incarnation that is asked: a new life must not answer for an old one */
    uint64_t fetch_id;
    uint32_t piece_count;
    uint32_t connection; /* the asker's: when it changes, the answerer's leads nowhere any more */
} ask_header_t;

typedef struct ask_piece {
    uint64_t epoch;
    uint32_t block;
    uint32_t offset;
    uint32_t bytes;
    uint32_t reserved;
} ask_piece_t;

typedef struct answer_header {
    uint64_t fetch_id;
    uint64_t owner;
    uint32_t piece; /* the bytes go on from here: a piece, and how far into it */
    uint32_t piece_offset;
    int32_t status;
    uint32_t reserved;
} answer_header_t;

_Static_assert(sizeof(ask_header_t) == 32 && sizeof(ask_piece_t) == 24 &&
                   sizeof(answer_header_t) == 32,
               "layout on the wire");

typedef struct peer { /* known until membership takes it away; its connection may come and go */
    uint64_t incarnation;
    struct command *info; /* owned: how to reach it */
    ucp_ep_h ep;          /* NULL: not connected now */
    uint64_t retry_ns;    /* not connected again before */
    ucp_rkey_h rkey;
    const uint8_t *mapped; /* the peer's pool in our address space, or NULL: tcp */
    uint32_t block_count;
    uint32_t block_bytes;
    uint32_t connection; /* names ours to the peer; a new one with each that is made */
    uint32_t asked_over; /* the peer's, of its last ask; 0: none has come */
    bool stale;          /* the peer has made a new one: ours is made anew before it is used */
    bool failed;
    struct peer *next;
} peer_t;

typedef struct job { /* an ask being answered */
    uint64_t asker;
    uint64_t fetch_id;
    uint32_t piece_count;
    uint32_t next_piece;
    uint32_t next_offset; /* in it */
    struct job *next;
    ask_piece_t pieces[];
} job_t;

typedef struct staging { /* one answer in flight */
    answer_header_t header;
    uint64_t asker;
    uint8_t *bytes; /* owned; [TD_TRANSFER_GATHER_BYTES] */
    bool busy;
} staging_t;

typedef struct ask_send { /* an ask in flight: UCX needs the memory until it is sent */
    struct td_transfer *transfer;
    ask_header_t header;
    ask_piece_t pieces[];
} ask_send_t;

typedef struct note_send { /* a message of the NCCL carrier in flight */
    struct td_transfer *transfer;
    uint8_t bytes[];
} note_send_t;

typedef enum command_kind { CMD_PEER_ADD, CMD_PEER_REMOVE, CMD_FETCH, CMD_CANCEL } command_kind_t;

typedef struct command {
    command_kind_t kind;
    uint64_t id; /* incarnation or fetch id */
    td_fetch_t *fetch;
    uint64_t base;
    uint32_t block_count;
    uint32_t block_bytes;
    size_t address_len;
    size_t rkey_len;
    char device[TD_KV_DEVICE_NAME_MAX];
    uint8_t bytes[]; /* address, then rkey */
} command_t;

struct td_transfer {
    ucp_context_h context;
    ucp_worker_h worker;
    ucp_mem_h memh;
    uint8_t *memory;
    uint32_t block_count;
    size_t block_bytes;
    ucp_address_t *address;
    size_t address_len;
    void *rkey;
    size_t rkey_len;
    int event_fd;
    td_ring_t *commands;
    pthread_t thread;
    bool thread_started;
    atomic_bool stop;                 /* release by destroy, acquire by the thread */
    atomic_uint_fast64_t incarnation; /* relaxed: a name */
    atomic_uint_fast64_t next_id;     /* relaxed: only uniqueness matters */
    const td_pool_t *pool;            /* borrowed; its epochs are read here */
    td_nccl_t *nccl;                  /* owned; NULL: no device, or none that can */

    /* the thread's own */
    peer_t *peers;
    td_fetch_t *fetches; /* list of those under way */
    uint32_t fetch_count;
    job_t *jobs; /* list, oldest first */
    job_t **jobs_tail;
    uint32_t job_count;
    staging_t staging[ANSWERS_IN_FLIGHT_MAX];
    uint32_t sends_in_flight;

    td_metric_t *bytes[TD_CARRIERS]; /* NULL of NONE, and without metrics */
    td_metric_t *seconds[TD_CARRIERS];
    td_metric_t *failures[TD_CARRIERS];
    td_metric_t *answered_bytes;
    td_nccl_metrics_t nccl_metrics;
};

const char *td_carrier_name(td_carrier_t carrier)
{
    static const char *const names[TD_CARRIERS] = {"none", "shm", "tcp", "nccl"};
    return names[carrier];
}

/* --- start and end --------------------------------------------------------------------------- */

static void set_ucx_global(const char *variable, const char *name, const char *value)
{
    if (getenv(variable) == NULL) {
        (void)ucs_global_opts_set_value(name, value);
    }
}

/* Defaults that make UCX fit for this use (DESIGN.md); the user's own settings win. */
static void set_ucx_environment(void)
{
    if (access("/sys/class/infiniband", F_OK) != 0) {
        (void)setenv("UCX_TLS", "tcp,posix,sysv", 0);
    }
    (void)setenv("UCX_MM_ERROR_HANDLING", "y", 0);
    /* UCX 1.13 answers a check of an endpoint that it has closed from inside the reception of that
     * check, over the very connection, and then falls over it. */
    (void)setenv("UCX_KEEPALIVE_INTERVAL", "inf", 0);
    (void)setenv("UCX_TCP_TX_SEG_SIZE", "256K", 0);
    (void)setenv("UCX_TCP_RX_SEG_SIZE", "256K", 0);
    /* These three are read when the library is loaded, so the environment would come too late. */
    set_ucx_global("UCX_HANDLE_ERRORS", "HANDLE_ERRORS", "none");
    set_ucx_global("UCX_LOG_LEVEL", "LOG_LEVEL", "fatal"); /* dead peers are logged by us */
    set_ucx_global("UCX_WARN_UNUSED_ENV_VARS", "WARN_UNUSED_ENV_VARS", "n");
}

static td_status_t ucx_status(ucs_status_t status, const char *what)
{
    if (status == UCS_OK) {
        return TD_OK;
    }
    TD_LOG_ERROR("ucx call failed", "call=%s err=\"%s\"", what, ucs_status_string(status));
    return TD_ERR_IO;
}

static td_status_t create_worker(td_transfer_t *t)
{
    ucp_config_t *config = NULL;
    ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_NAME,
                           .features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP,
                           .name = "tandem"};
    ucp_worker_params_t wp = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
                              .thread_mode = UCS_THREAD_MODE_SERIALIZED};
    ucs_status_t status = UCS_OK;

    set_ucx_environment();
    TD_TRY(ucx_status(ucp_config_read(NULL, NULL, &config), "ucp_config_read"));
    status = ucp_init(&params, config, &t->context);
    ucp_config_release(config);
    TD_TRY(ucx_status(status, "ucp_init"));
    TD_TRY(ucx_status(ucp_worker_create(t->context, &wp, &t->worker), "ucp_worker_create"));
    TD_TRY(ucx_status(ucp_worker_get_efd(t->worker, &t->event_fd), "ucp_worker_get_efd"));
    return ucx_status(ucp_worker_get_address(t->worker, &t->address, &t->address_len),
                      "ucp_worker_get_address");
}

static td_status_t map_memory(td_transfer_t *t)
{
    ucp_mem_map_params_t mp = {.field_mask =
                                   UCP_MEM_MAP_PARAM_FIELD_LENGTH | UCP_MEM_MAP_PARAM_FIELD_FLAGS,
                               .flags = UCP_MEM_MAP_ALLOCATE};
    ucp_mem_attr_t attr = {.field_mask = UCP_MEM_ATTR_FIELD_ADDRESS};
    size_t bytes = 0;

    if (t->block_count == 0 || t->block_bytes == 0 || t->block_bytes > UINT32_MAX ||
        !td_size_mul(t->block_count, t->block_bytes, &bytes)) {
        return TD_ERR_INVALID;
    }
    mp.length = bytes;
    TD_TRY(ucx_status(ucp_mem_map(t->context, &mp, &t->memh), "ucp_mem_map"));
    TD_TRY(ucx_status(ucp_mem_query(t->memh, &attr), "ucp_mem_query"));
    t->memory = attr.address;
    /* Page faults now, not in a request, and where the kernel can all in one call. Without shared
     * memory UCX takes the bytes from the heap, with whatever was there: they are cleared in any
     * case. */
    (void)madvise(t->memory, bytes & ~(size_t)4095, MADV_POPULATE_WRITE);
    memset(t->memory, 0, bytes);
    return ucx_status(ucp_rkey_pack(t->context, t->memh, &t->rkey, &t->rkey_len), "ucp_rkey_pack");
}

static ucs_status_t on_ask(void *arg, const void *header, size_t header_len, void *data, size_t len,
                           const ucp_am_recv_param_t *param);
static ucs_status_t on_answer(void *arg, const void *header, size_t header_len, void *data,
                              size_t len, const ucp_am_recv_param_t *param);
static ucs_status_t on_note(void *arg, const void *header, size_t header_len, void *data,
                            size_t len, const ucp_am_recv_param_t *param);
static void *transfer_main(void *arg);

static td_status_t set_handler(td_transfer_t *t, unsigned id, ucp_am_recv_callback_t callback)
{
    ucp_am_handler_param_t param = {
        .field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
                      UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG,
        .id = id,
        .flags = UCP_AM_FLAG_WHOLE_MSG,
        .cb = callback,
        .arg = t};
    return ucx_status(ucp_worker_set_am_recv_handler(t->worker, &param), "set_am_recv_handler");
}

static td_status_t alloc_staging(td_transfer_t *t)
{
    for (uint32_t i = 0; i < ANSWERS_IN_FLIGHT_MAX; i++) {
        t->staging[i].bytes = td_alloc(TD_TRANSFER_GATHER_BYTES);
        if (t->staging[i].bytes == NULL) {
            return TD_ERR_NO_MEMORY;
        }
    }
    return td_ring_create(COMMANDS_MAX, &t->commands);
}

static td_metric_t *declare(const td_transfer_config_t *c, const char *suffix, const char *labels,
                            const char *help)
{
    char name[128];
    (void)snprintf(name, sizeof(name), "%s%s", c->name_prefix, suffix);
    return td_metrics_counter(c->metrics, name, labels, help);
}

static void declare_metrics(td_transfer_t *t, const td_transfer_config_t *c)
{
    static const char *const labels[TD_CARRIERS] = {"carrier=\"none\"", "carrier=\"shm\"",
                                                    "carrier=\"tcp\"", "carrier=\"nccl\""};
    char name[128];

    if (c->metrics == NULL) {
        return;
    }
    for (uint32_t i = TD_CARRIER_SHM; i < TD_CARRIERS; i++) {
        t->bytes[i] = declare(c, "_transfer_bytes_total", labels[i], "KV bytes fetched");
    }
    for (uint32_t i = TD_CARRIER_SHM; i < TD_CARRIERS; i++) {
        (void)snprintf(name, sizeof(name), "%s%s", c->name_prefix, "_transfer_seconds_total");
        t->seconds[i] = td_metrics_seconds(c->metrics, name, labels[i],
                                           "time that fetches took from asking to the last byte");
    }
    t->answered_bytes = declare(c, "_transfer_answered_bytes_total", NULL, "KV bytes sent by tcp");
    for (uint32_t i = 0; i < TD_CARRIERS; i++) {
        t->failures[i] = declare(c, "_transfer_failures_total", labels[i],
                                 "fetches that did not succeed by the carrier");
    }
    if (c->device_series || c->device != NULL) {
        td_nccl_declare(c->metrics, c->name_prefix, &t->nccl_metrics);
    }
}

static bool send_note(void *ctx, uint64_t to, const void *message, size_t len);

static uint64_t own_incarnation(void *ctx)
{
    const td_transfer_t *t = ctx;
    return atomic_load_explicit(&t->incarnation, memory_order_relaxed);
}

static const td_pool_t *own_pool(void *ctx)
{
    const td_transfer_t *t = ctx;
    return t->pool;
}

/* Without it the other carriers serve; a line has said why. */
static td_status_t open_nccl(td_transfer_t *t, const td_transfer_config_t *c)
{
    const td_nccl_config_t config = {.device = c->device,
                                     .slot_bytes = c->nccl_slot_bytes,
                                     .deadline_ms = c->nccl_deadline_ms,
                                     .retry_ms = c->nccl_retry_ms,
                                     .open_ms = c->nccl_open_ms,
                                     .memory = t->memory,
                                     .block_bytes = t->block_bytes,
                                     .block_count = t->block_count,
                                     .metrics = t->nccl_metrics,
                                     .send = send_note,
                                     .incarnation = own_incarnation,
                                     .pool = own_pool,
                                     .ctx = t};
    const td_status_t status = td_nccl_create(&config, &t->nccl);

    if (status != TD_OK) {
        TD_LOG_WARN("no transfers by nccl", "status=%s", td_status_name(status));
        return TD_OK;
    }
    return set_handler(t, AM_NCCL, on_note);
}

td_status_t td_transfer_create(const td_transfer_config_t *config, td_transfer_t **out)
{
    td_status_t status = TD_OK;
    td_transfer_t *t = td_calloc(1, sizeof(*t));

    if (t == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    t->block_count = config->block_count;
    t->block_bytes = config->block_bytes;
    t->jobs_tail = &t->jobs;
    atomic_init(&t->incarnation, config->incarnation);
    declare_metrics(t, config);
    status = alloc_staging(t);
    if (status == TD_OK) {
        status = create_worker(t);
    }
    if (status == TD_OK) {
        status = map_memory(t);
    }
    if (status == TD_OK) {
        status = set_handler(t, AM_ASK, on_ask);
    }
    if (status == TD_OK) {
        status = set_handler(t, AM_ANSWER, on_answer);
    }
    if (status == TD_OK && config->device != NULL) {
        status = open_nccl(t, config);
    }
    if (status == TD_OK && pthread_create(&t->thread, NULL, transfer_main, t) != 0) {
        status = TD_ERR_IO;
    }
    if (status != TD_OK) {
        td_transfer_destroy(t);
        return status;
    }
    t->thread_started = true;
    *out = t;
    return TD_OK;
}

static void commands_drop(td_transfer_t *t)
{
    void *item = NULL;
    while (t->commands != NULL && td_ring_pop(t->commands, &item)) {
        command_t *c = item;
        if (c->kind == CMD_FETCH) {
            c->fetch->status = TD_ERR_CANCELLED;
            c->fetch->complete(c->fetch);
        }
        td_free(c);
    }
}

void td_transfer_stop(td_transfer_t *t)
{
    if (t == NULL) {
        return;
    }
    if (t->thread_started) {
        atomic_store_explicit(&t->stop, true, memory_order_release);
        td_ring_wake(t->commands);
        (void)pthread_join(t->thread, NULL);
        t->thread_started = false;
    }
    commands_drop(t);
    td_nccl_destroy(t->nccl);
    t->nccl = NULL;
}

void td_transfer_destroy(td_transfer_t *t)
{
    if (t == NULL) {
        return;
    }
    td_transfer_stop(t);
    if (t->rkey != NULL) {
        ucp_rkey_buffer_release(t->rkey);
    }
    if (t->address != NULL) {
        ucp_worker_release_address(t->worker, t->address);
    }
    if (t->worker != NULL) {
        ucp_worker_destroy(t->worker);
    }
    if (t->memh != NULL) {
        (void)ucp_mem_unmap(t->context, t->memh);
    }
    if (t->context != NULL) {
        ucp_cleanup(t->context);
    }
    for (uint32_t i = 0; i < ANSWERS_IN_FLIGHT_MAX; i++) {
        td_free(t->staging[i].bytes);
    }
    td_ring_destroy(t->commands);
    td_free(t);
}

uint8_t *td_transfer_memory(const td_transfer_t *t)
{
    return t->memory;
}

void td_transfer_set_pool(td_transfer_t *t, const td_pool_t *pool)
{
    t->pool = pool;
}

void td_transfer_set_incarnation(td_transfer_t *t, uint64_t incarnation)
{
    atomic_store_explicit(&t->incarnation, incarnation, memory_order_relaxed);
}

void td_transfer_address(const td_transfer_t *t, const void **address, size_t *address_len,
                         const void **rkey, size_t *rkey_len, uint64_t *base)
{
    *address = t->address;
    *address_len = t->address_len;
    *rkey = t->rkey;
    *rkey_len = t->rkey_len;
    *base = (uint64_t)(uintptr_t)t->memory;
}

const char *td_transfer_device_name(const td_transfer_t *t)
{
    return t->nccl == NULL ? "" : td_nccl_name(t->nccl);
}

/* --- commands from other threads -------------------------------------------------------------- */

static td_status_t command_push(td_transfer_t *t, command_t *command)
{
    td_status_t status = td_ring_push(t->commands, command);
    if (status != TD_OK) {
        td_free(command);
    }
    return status;
}

td_status_t td_transfer_peer_add(td_transfer_t *t, const td_transfer_peer_t *peer)
{
    command_t *c = td_calloc(1, sizeof(*c) + peer->address_len + peer->rkey_len);
    if (c == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    c->kind = CMD_PEER_ADD;
    c->id = peer->incarnation;
    c->base = peer->base;
    c->block_count = peer->block_count;
    c->block_bytes = peer->block_bytes;
    c->address_len = peer->address_len;
    c->rkey_len = peer->rkey_len;
    (void)snprintf(c->device, sizeof(c->device), "%s", peer->device == NULL ? "" : peer->device);
    memcpy(c->bytes, peer->address, peer->address_len);
    if (peer->rkey_len > 0) {
        memcpy(c->bytes + peer->address_len, peer->rkey, peer->rkey_len);
    }
    return command_push(t, c);
}

static td_status_t push_simple(td_transfer_t *t, command_kind_t kind, uint64_t id,
                               td_fetch_t *fetch)
{
    command_t *c = td_calloc(1, sizeof(*c));
    if (c == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    c->kind = kind;
    c->id = id;
    c->fetch = fetch;
    return command_push(t, c);
}

void td_transfer_peer_remove(td_transfer_t *t, uint64_t incarnation)
{
    if (push_simple(t, CMD_PEER_REMOVE, incarnation, NULL) != TD_OK) {
        TD_LOG_WARN("transfer peer not removed", "peer=%016llx", (unsigned long long)incarnation);
    }
}

td_status_t td_transfer_fetch(td_transfer_t *t, td_fetch_t *fetch)
{
    TD_ASSERT(fetch->piece_count > 0 && fetch->piece_count <= TD_TRANSFER_PIECES_MAX);
    fetch->id = atomic_fetch_add_explicit(&t->next_id, 1, memory_order_relaxed) + 1;
    fetch->status = TD_INPROGRESS;
    fetch->carrier = TD_CARRIER_NONE;
    fetch->bytes = 0;
    fetch->next_piece = 0;
    fetch->next_offset = 0;
    fetch->asked = false;
    fetch->begin_ns = td_now_ns();
    fetch->nccl.asked = 0;
    fetch->nccl.landing = 0;
    fetch->nccl.status = TD_OK;
    fetch->nccl.tried = false;
    fetch->ends = TD_INPROGRESS;
    fetch->next = NULL;
    return push_simple(t, CMD_FETCH, fetch->id, fetch);
}

void td_transfer_cancel(td_transfer_t *t, uint64_t fetch_id)
{
    if (push_simple(t, CMD_CANCEL, fetch_id, NULL) != TD_OK) {
        TD_LOG_WARN("fetch not cancelled early", "fetch=%llu", (unsigned long long)fetch_id);
    }
}

/* --- the thread: peers ------------------------------------------------------------------------ */

static peer_t *peer_find(td_transfer_t *t, uint64_t incarnation)
{
    for (peer_t *p = t->peers; p != NULL; p = p->next) {
        if (p->incarnation == incarnation) {
            return p;
        }
    }
    return NULL;
}

static void on_peer_error(void *arg, ucp_ep_h ep, ucs_status_t status)
{
    peer_t *peer = arg;
    (void)ep;
    TD_LOG_INFO("transfer peer lost", "peer=%016llx err=\"%s\"",
                (unsigned long long)peer->incarnation, ucs_status_string(status));
    peer->failed = true; /* its operations end in the next turn of the loop, not inside UCX */
}

/* Can the peer's memory be read here? Small /dev/shm and other hosts answer no; then tcp serves. */
static void try_map(peer_t *peer, const command_t *c)
{
    void *local = NULL;
    if (c->rkey_len == 0 ||
        ucp_ep_rkey_unpack(peer->ep, c->bytes + c->address_len, &peer->rkey) != UCS_OK) {
        peer->rkey = NULL;
        return;
    }
    if (ucp_rkey_ptr(peer->rkey, c->base, &local) == UCS_OK) {
        peer->mapped = local;
        /* Nobody but the owner writes (I2): here not even by mistake. */
        if (mprotect(local, (size_t)c->block_count * c->block_bytes, PROT_READ) != 0) {
            TD_LOG_DEBUG("peer memory stays writable", "peer=%016llx err=\"%m\"",
                         (unsigned long long)c->id);
        }
    }
}

/* Connects a peer, again after a failure: a cut that has healed leaves both processes as they were.
 */
static bool peer_connect(td_transfer_t *t, peer_t *peer)
{
    ucp_ep_params_t params = {
        .field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER,
        .address = (const ucp_address_t *)peer->info->bytes,
        .err_mode = UCP_ERR_HANDLING_MODE_PEER,
        .err_handler = {.cb = on_peer_error, .arg = peer},
    };
    ucs_status_t status = UCS_OK;

    if (peer->ep != NULL) {
        return !peer->failed;
    }
    if (td_now_ns() < peer->retry_ns) {
        return false;
    }
    peer->retry_ns = td_now_ns() + RECONNECT_MS * TD_NS_PER_MS;
    peer->failed = false;
    peer->stale = false;
    peer->connection = (uint32_t)td_random_u64() | 1;
    status = ucp_ep_create(t->worker, &params, &peer->ep);
    if (status != UCS_OK) {
        peer->ep = NULL;
        TD_LOG_WARN("transfer peer unreachable", "peer=%016llx err=\"%s\"",
                    (unsigned long long)peer->incarnation, ucs_status_string(status));
        return false;
    }
    try_map(peer, peer->info);
    TD_LOG_INFO("transfer peer connected", "peer=%016llx carrier=%s",
                (unsigned long long)peer->incarnation,
                td_carrier_name(peer->mapped != NULL ? TD_CARRIER_SHM : TD_CARRIER_TCP));
    return true;
}

/* Takes the command: it says how to connect, now and later. */
static void peer_add(td_transfer_t *t, command_t *c)
{
    peer_t *peer = peer_find(t, c->id);

    if (peer != NULL || (peer = td_calloc(1, sizeof(*peer))) == NULL) {
        td_free(c);
        return;
    }
    peer->incarnation = c->id;
    peer->block_count = c->block_count;
    peer->block_bytes = c->block_bytes;
    peer->info = c;
    peer->next = t->peers;
    t->peers = peer;
    (void)peer_connect(t, peer);
    if (t->nccl != NULL) {
        td_nccl_peer_add(t->nccl, c->id, c->device);
    }
}

/* Takes a fetch off the list and completes it. False: the device still writes into its destination;
 * drive_fetches() ends it, with this status, once that is over. */
static bool fetch_end(td_transfer_t *t, td_fetch_t **link, td_status_t status)
{
    td_fetch_t *fetch = *link;

    if (fetch->carrier == TD_CARRIER_NCCL && !td_nccl_let_go(t->nccl, fetch)) {
        fetch->ends = status;
        return false;
    }
    *link = fetch->next;
    fetch->next = NULL;
    t->fetch_count--;
    fetch->status = status;
    if (status == TD_OK) {
        td_metric_add(t->bytes[fetch->carrier], fetch->bytes);
        td_metric_add(t->seconds[fetch->carrier], td_now_ns() - fetch->begin_ns);
    } else {
        td_metric_add(t->failures[fetch->carrier], 1);
    }
    fetch->complete(fetch);
    return true;
}

static void jobs_drop_of(td_transfer_t *t, uint64_t asker)
{
    job_t **link = &t->jobs;
    while (*link != NULL) {
        job_t *job = *link;
        if (job->asker == asker) {
            *link = job->next;
            t->job_count--;
            td_free(job);
        } else {
            link = &job->next;
        }
    }
    t->jobs_tail = link;
}

static void peer_close(td_transfer_t *t, peer_t *peer)
{
    ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS,
                                 .flags = UCP_EP_CLOSE_FLAG_FORCE};
    void *request = NULL;

    peer->failed = false; /* that was the connection's; the next one starts afresh */
    if (peer->rkey != NULL) {
        ucp_rkey_destroy(peer->rkey); /* unmaps; no copy from it can be under way: one thread */
        peer->rkey = NULL;
        peer->mapped = NULL;
    }
    if (peer->ep == NULL) {
        return;
    }
    request = ucp_ep_close_nbx(peer->ep, &param);
    while (UCS_PTR_IS_PTR(request) && ucp_request_check_status(request) == UCS_INPROGRESS) {
        (void)ucp_worker_progress(t->worker); /* FORCE: ends at once, waits for no peer */
    }
    if (UCS_PTR_IS_PTR(request)) {
        ucp_request_free(request);
    }
    peer->ep = NULL;
}

/* Ends what is under way with a peer, and its connection. */
static void peer_disconnect(td_transfer_t *t, peer_t *peer)
{
    for (td_fetch_t **f = &t->fetches; *f != NULL;) {
        if ((*f)->peer != peer->incarnation || (*f)->ends != TD_INPROGRESS ||
            !fetch_end(t, f, TD_ERR_PEER_DEAD)) {
            f = &(*f)->next;
        }
    }
    if (t->nccl != NULL) {
        td_nccl_peer_lost(t->nccl, peer->incarnation);
    }
    jobs_drop_of(t, peer->incarnation);
    peer_close(t, peer);
}

static void peer_remove(td_transfer_t *t, uint64_t incarnation)
{
    peer_t **link = &t->peers;
    peer_t *peer = NULL;

    while (*link != NULL && (*link)->incarnation != incarnation) {
        link = &(*link)->next;
    }
    if (*link == NULL) {
        return;
    }
    peer = *link;
    peer_disconnect(t, peer);
    if (t->nccl != NULL) {
        td_nccl_peer_remove(t->nccl, incarnation);
    }
    /* Progress inside the disconnect runs callbacks, but none that changes the list of peers. */
    *link = peer->next;
    td_free(peer->info);
    td_free(peer);
}

static void disconnect_failed_peers(td_transfer_t *t)
{
    for (peer_t *p = t->peers; p != NULL; p = p->next) {
        if (p->failed && p->ep != NULL) {
            peer_disconnect(t, p);
        } else if (p->stale && p->ep != NULL) {
            peer_close(t, p); /* what it asks and what it is asked stays */
            p->retry_ns = 0;
        }
    }
}

/* --- the thread: fetching --------------------------------------------------------------------- */

static bool pieces_fit(const td_fetch_t *fetch, const peer_t *peer)
{
    for (uint32_t i = 0; i < fetch->piece_count; i++) {
        const td_fetch_piece_t *p = &fetch->pieces[i];
        if (p->block >= peer->block_count || p->bytes == 0 || p->bytes > peer->block_bytes ||
            p->offset > peer->block_bytes - p->bytes) {
            return false;
        }
    }
    return true;
}

static void on_ask_sent(void *request, ucs_status_t status, void *arg)
{
    ask_send_t *ask = arg;
    (void)status; /* a failed send shows as a failed peer, or at the deadline */
    ask->transfer->sends_in_flight--;
    td_free(ask);
    ucp_request_free(request);
}

static void on_note_sent(void *request, ucs_status_t status, void *arg)
{
    note_send_t *note = arg;
    (void)status;
    note->transfer->sends_in_flight--;
    td_free(note);
    ucp_request_free(request);
}

/* What the NCCL carrier has to say to a peer. */
static bool send_note(void *ctx, uint64_t to, const void *message, size_t len)
{
    td_transfer_t *t = ctx;
    peer_t *peer = peer_find(t, to);
    note_send_t *note = NULL;
    ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS |
                                                 UCP_OP_ATTR_FIELD_CALLBACK |
                                                 UCP_OP_ATTR_FIELD_USER_DATA,
                                 .flags = UCP_AM_SEND_FLAG_EAGER,
                                 .cb.send = on_note_sent};
    void *request = NULL;

    /* Of one that only answers nobody else connects a broken connection anew. */
    if (peer == NULL || peer->failed || (peer->ep == NULL && !peer_connect(t, peer))) {
        return false;
    }
    note = td_alloc(sizeof(*note) + len);
    if (note == NULL) {
        return false;
    }
    note->transfer = t;
    memcpy(note->bytes, message, len);
    param.user_data = note;
    request = ucp_am_send_nbx(peer->ep, AM_NCCL, NULL, 0, note->bytes, len, &param);
    if (UCS_PTR_IS_PTR(request)) {
        t->sends_in_flight++;
        return true;
    }
    td_free(note); /* sent at once, or not at all; the callback is not called */
    return request == NULL;
}

static ucs_status_t on_note(void *arg, const void *header, size_t header_len, void *data,
                            size_t len, const ucp_am_recv_param_t *param)
{
    const td_transfer_t *t = arg;

    (void)header;
    (void)header_len;
    if ((param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) == 0) {
        td_nccl_receive(t->nccl, data, len);
    }
    return UCS_OK;
}

static td_status_t send_ask(td_transfer_t *t, const peer_t *peer, td_fetch_t *fetch)
{
    size_t bytes = fetch->piece_count * sizeof(ask_piece_t);
    ask_send_t *ask = td_calloc(1, sizeof(*ask) + bytes);
    ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS |
                                                 UCP_OP_ATTR_FIELD_CALLBACK |
                                                 UCP_OP_ATTR_FIELD_USER_DATA,
                                 .flags = UCP_AM_SEND_FLAG_EAGER,
                                 .cb.send = on_ask_sent,
                                 .user_data = ask};
    void *request = NULL;

    if (ask == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    ask->transfer = t;
    ask->header = (ask_header_t){
        .asker = atomic_load_explicit(&t->incarnation, memory_order_relaxed),
        .owner = peer->incarnation,
        .fetch_id = fetch->id,
        .piece_count = fetch->piece_count,
        .connection = peer->connection,
    };
    for (uint32_t i = 0; i < fetch->piece_count; i++) {
        const td_fetch_piece_t *p = &fetch->pieces[i];
        ask->pieces[i] = (ask_piece_t){
            .epoch = p->epoch, .block = p->block, .offset = p->offset, .bytes = p->bytes};
    }
    request = ucp_am_send_nbx(peer->ep, AM_ASK, &ask->header, sizeof(ask->header), ask->pieces,
                              bytes, &param);
    if (UCS_PTR_IS_ERR(request)) {
        td_free(ask);
        return TD_ERR_PEER_DEAD;
    }
    if (request == NULL) {
        td_free(ask); /* sent at once; the callback is not called */
    } else {
        t->sends_in_flight++;
    }
    fetch->asked = true;
    return TD_OK;
}

/* Copies some pieces of a mapped peer. Returns true when the fetch is whole. */
static bool copy_pieces(td_fetch_t *fetch, const peer_t *peer, size_t *budget)
{
    while (fetch->next_piece<fetch->piece_count && * budget> 0) {
        const td_fetch_piece_t *p = &fetch->pieces[fetch->next_piece++];
        memcpy(p->dest, peer->mapped + (size_t)p->block * peer->block_bytes + p->offset, p->bytes);
        fetch->bytes += p->bytes;
        *budget -= TD_MIN(*budget, p->bytes);
        TD_FAULT_POINT("transfer_piece");
    }
    return fetch->next_piece == fetch->piece_count;
}

/* By NCCL, as far as it goes that way. What came so far is fetched again by another carrier. */
static td_status_t drive_nccl(td_transfer_t *t, td_fetch_t *fetch)
{
    const td_status_t status = td_nccl_fetch(t->nccl, fetch);

    if (status != TD_ERR_BUSY) {
        return status;
    }
    td_metric_add(t->failures[TD_CARRIER_NCCL], 1);
    fetch->carrier = TD_CARRIER_NONE;
    fetch->nccl.tried = true;
    if (fetch->silence_ns > 0) { /* nothing was asked of the other carrier yet */
        fetch->deadline_ns = TD_MAX(fetch->deadline_ns, td_now_ns() + fetch->silence_ns);
    }
    fetch->next_piece = 0;
    fetch->next_offset = 0;
    fetch->bytes = 0;
    return TD_INPROGRESS;
}

/* Which way a fetch goes whose pieces fit. */
static void choose_nccl(td_transfer_t *t, td_fetch_t *fetch)
{
    if (t->nccl != NULL && !fetch->nccl.tried && td_nccl_wants(t->nccl, fetch->peer)) {
        td_nccl_take(t->nccl, fetch);
    }
}

/* One turn over the fetches under way. Returns true when copying is left to do. */
static bool drive_fetches(td_transfer_t *t)
{
    uint64_t now = td_now_ns();
    size_t budget = SHM_BYTES_PER_TURN;
    bool left = false;

    for (td_fetch_t **link = &t->fetches; *link != NULL;) {
        td_fetch_t *fetch = *link;
        peer_t *peer = peer_find(t, fetch->peer);
        td_status_t status = TD_INPROGRESS;
        const bool ended = fetch->ends != TD_INPROGRESS;
        if (!ended && fetch->carrier == TD_CARRIER_NONE && peer != NULL && peer->ep != NULL &&
            !peer->failed && pieces_fit(fetch, peer)) {
            choose_nccl(t, fetch);
        }
        if (ended) {
            status = fetch->ends;
        } else if (peer == NULL || peer->failed || (peer->ep == NULL && !peer_connect(t, peer))) {
            status = TD_ERR_PEER_DEAD;
        } else if (now >= fetch->deadline_ns) {
            status = TD_ERR_TIMEOUT;
        } else if (fetch->carrier == TD_CARRIER_NONE && !pieces_fit(fetch, peer)) {
            status = TD_ERR_INVALID;
        } else if (fetch->carrier == TD_CARRIER_NCCL) {
            status = drive_nccl(t, fetch);
            left = left || fetch->carrier == TD_CARRIER_NONE;
        } else if (peer->mapped != NULL) {
            fetch->carrier = TD_CARRIER_SHM;
            if (budget > 0 && copy_pieces(fetch, peer, &budget)) {
                status = TD_OK;
            } else {
                left = true;
            }
        } else if (!fetch->asked) {
            fetch->carrier = TD_CARRIER_TCP;
            status = send_ask(t, peer, fetch);
            status = status == TD_OK ? TD_INPROGRESS : status;
        }
        if (status == TD_ERR_TIMEOUT && fetch->carrier == TD_CARRIER_TCP && fetch->bytes == 0) {
            /* Not one answer: after a cut UCX may keep a connection that leads nowhere, without a
             * word. The next fetch gets a new one. */
            peer->failed = true;
        }
        if (status == TD_INPROGRESS || !fetch_end(t, link, status)) {
            link = &fetch->next;
        }
    }
    return left;
}

static td_fetch_t **fetch_link(td_transfer_t *t, uint64_t id)
{
    for (td_fetch_t **link = &t->fetches; *link != NULL; link = &(*link)->next) {
        if ((*link)->id == id) {
            return link;
        }
    }
    return NULL;
}

/* A peer answers what one asks in the order of the asks: so an answer to an earlier fetch says that
 * this one's turn is coming, and one to a later fetch says nothing of it (its ask may be lost). */
static void heard(td_transfer_t *t, uint64_t owner, uint64_t fetch_id)
{
    const uint64_t now = td_now_ns();

    for (td_fetch_t *f = t->fetches; f != NULL; f = f->next) {
        if (f->peer == owner && f->id >= fetch_id && f->silence_ns > 0) {
            f->deadline_ns = TD_MAX(f->deadline_ns, now + f->silence_ns);
        }
    }
}

/* So many bytes further, of a piece of piece_bytes. */
static void step_piece(uint32_t *piece, uint32_t *offset, uint32_t bytes, uint32_t piece_bytes)
{
    *offset += bytes;
    if (*offset == piece_bytes) {
        *offset = 0;
        ++*piece;
    }
}

/* Copies an answer into the blocks; only for a fetch that is still under way. */
static ucs_status_t on_answer(void *arg, const void *header, size_t header_len, void *data,
                              size_t len, const ucp_am_recv_param_t *param)
{
    td_transfer_t *t = arg;
    answer_header_t h;
    td_fetch_t **link = NULL;
    td_fetch_t *fetch = NULL;
    const uint8_t *at = data;

    if (header_len != sizeof(h) || (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0) {
        return UCS_OK; /* not ours: dropped */
    }
    memcpy(&h, header, sizeof(h));
    heard(t, h.owner, h.fetch_id);
    link = fetch_link(t, h.fetch_id);
    if (link == NULL || (*link)->peer != h.owner || (*link)->carrier != TD_CARRIER_TCP) {
        return UCS_OK; /* late, of a fetch that has ended */
    }
    fetch = *link;
    if (h.status != TD_OK) {
        (void)fetch_end(t, link, h.status == TD_ERR_BUSY ? TD_ERR_BUSY : TD_ERR_STALE);
        return UCS_OK;
    }
    if (h.piece != fetch->next_piece || h.piece_offset != fetch->next_offset || len == 0) {
        (void)fetch_end(t, link, TD_ERR_PROTOCOL);
        return UCS_OK;
    }
    while (len > 0 && fetch->next_piece < fetch->piece_count) {
        const td_fetch_piece_t *p = &fetch->pieces[fetch->next_piece];
        const uint32_t bytes = (uint32_t)TD_MIN(len, (size_t)p->bytes - fetch->next_offset);
        memcpy(p->dest + fetch->next_offset, at, bytes);
        at += bytes;
        len -= bytes;
        fetch->bytes += bytes;
        step_piece(&fetch->next_piece, &fetch->next_offset, bytes, p->bytes);
    }
    TD_FAULT_POINT("transfer_piece");
    if (len > 0) {
        (void)fetch_end(t, link, TD_ERR_PROTOCOL);
    } else if (fetch->next_piece == fetch->piece_count) {
        (void)fetch_end(t, link, TD_OK);
    }
    return UCS_OK;
}

/* --- the thread: answering -------------------------------------------------------------------- */

static ucs_status_t on_ask(void *arg, const void *header, size_t header_len, void *data, size_t len,
                           const ucp_am_recv_param_t *param)
{
    td_transfer_t *t = arg;
    ask_header_t h;
    peer_t *peer = NULL;
    job_t *job = NULL;
    size_t bytes = 0;

    if (header_len != sizeof(h) || (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0) {
        return UCS_OK;
    }
    memcpy(&h, header, sizeof(h));
    peer = peer_find(t, h.asker);
    if (h.owner != atomic_load_explicit(&t->incarnation, memory_order_relaxed) || peer == NULL ||
        h.piece_count == 0 || h.piece_count > TD_TRANSFER_PIECES_MAX ||
        !td_size_mul(h.piece_count, sizeof(ask_piece_t), &bytes) || bytes != len ||
        t->job_count >= JOBS_MAX) {
        return UCS_OK; /* the asker's deadline ends it */
    }
    job = td_alloc(sizeof(*job) + bytes);
    if (job == NULL) {
        return UCS_OK;
    }
    peer->stale = peer->stale || (peer->asked_over != 0 && peer->asked_over != h.connection);
    peer->asked_over = h.connection;
    *job = (job_t){.asker = h.asker, .fetch_id = h.fetch_id, .piece_count = h.piece_count};
    memcpy(job->pieces, data, bytes);
    *t->jobs_tail = job;
    t->jobs_tail = &job->next;
    t->job_count++;
    return UCS_OK;
}

static void on_answer_sent(void *request, ucs_status_t status, void *arg)
{
    staging_t *staging = arg;
    (void)status;
    staging->busy = false;
    ucp_request_free(request);
}

static bool piece_is_live(const td_transfer_t *t, const ask_piece_t *p)
{
    return p->block < t->block_count && p->bytes > 0 && p->bytes <= t->block_bytes &&
           p->offset <= t->block_bytes - p->bytes &&
           (t->pool == NULL || td_pool_epoch(t->pool, p->block) == p->epoch);
}

/* Around a copy that messages through another process order behind the writes of a block, and its
 * next use behind the copy: ThreadSanitizer cannot see those. */
#ifdef __SANITIZE_THREAD__
void AnnotateIgnoreReadsBegin(const char *file, int line);
void AnnotateIgnoreReadsEnd(const char *file, int line);
#define ORDERED_ELSEWHERE_BEGIN() AnnotateIgnoreReadsBegin(__FILE__, __LINE__)
#define ORDERED_ELSEWHERE_END() AnnotateIgnoreReadsEnd(__FILE__, __LINE__)
#else
#define ORDERED_ELSEWHERE_BEGIN() ((void)0)
#define ORDERED_ELSEWHERE_END() ((void)0)
#endif

/* Gathers what comes next into a buffer, the end of one piece and the beginning of another if need
 * be. The epoch is checked before and after the copy, so bytes of another allocation do not leave
 * even when the block changed hands meanwhile; what comes later still is caught by the reader's
 * checksum. */
static td_status_t gather(const td_transfer_t *t, job_t *job, staging_t *staging, size_t *len_out)
{
    size_t len = 0;

    staging->header.piece = job->next_piece;
    staging->header.piece_offset = job->next_offset;
    while (job->next_piece < job->piece_count && len < TD_TRANSFER_GATHER_BYTES) {
        const ask_piece_t *p = &job->pieces[job->next_piece];
        uint32_t bytes = 0;
        if (!piece_is_live(t, p)) {
            return TD_ERR_STALE;
        }
        bytes =
            (uint32_t)TD_MIN(TD_TRANSFER_GATHER_BYTES - len, (size_t)p->bytes - job->next_offset);
        ORDERED_ELSEWHERE_BEGIN();
        memcpy(staging->bytes + len,
               t->memory + (size_t)p->block * t->block_bytes + p->offset + job->next_offset, bytes);
        ORDERED_ELSEWHERE_END();
        if (!piece_is_live(t, p)) {
            return TD_ERR_STALE;
        }
        len += bytes;
        step_piece(&job->next_piece, &job->next_offset, bytes, p->bytes);
    }
    *len_out = len;
    return TD_OK;
}

static void send_answer(td_transfer_t *t, const peer_t *peer, job_t *job, staging_t *staging)
{
    size_t len = 0;
    td_status_t status = TD_OK;
    ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS |
                                                 UCP_OP_ATTR_FIELD_CALLBACK |
                                                 UCP_OP_ATTR_FIELD_USER_DATA,
                                 .flags = UCP_AM_SEND_FLAG_EAGER,
                                 .cb.send = on_answer_sent,
                                 .user_data = staging};
    void *request = NULL;

    staging->header = (answer_header_t){
        .fetch_id = job->fetch_id,
        .owner = atomic_load_explicit(&t->incarnation, memory_order_relaxed),
    };
    status = gather(t, job, staging, &len);
    if (status != TD_OK) {
        staging->header.status = status;
        len = 0;
        job->next_piece = job->piece_count;
    }
    request = ucp_am_send_nbx(peer->ep, AM_ANSWER, &staging->header, sizeof(staging->header),
                              staging->bytes, len, &param);
    if (UCS_PTR_IS_ERR(request)) {
        job->next_piece = job->piece_count;
        return;
    }
    staging->busy = request != NULL;
    staging->asker = job->asker;
    td_metric_add(t->answered_bytes, len);
    TD_FAULT_POINT("transfer_answer");
}

/* A buffer for an answer to the asker, if one is free and it has not its share in flight. */
static staging_t *staging_for(td_transfer_t *t, uint64_t asker)
{
    staging_t *unused = NULL;
    uint32_t in_flight = 0;

    for (uint32_t i = 0; i < ANSWERS_IN_FLIGHT_MAX; i++) {
        if (!t->staging[i].busy) {
            unused = &t->staging[i];
        } else if (t->staging[i].asker == asker) {
            in_flight++;
        }
    }
    return in_flight < ANSWERS_OF_PEER_MAX ? unused : NULL;
}

/* Sends what there are buffers for; what is left goes on when an answer has been sent. */
static void drive_jobs(td_transfer_t *t)
{
    for (job_t **link = &t->jobs; *link != NULL;) {
        job_t *job = *link;
        peer_t *peer = peer_find(t, job->asker);
        staging_t *staging = NULL;
        if (peer == NULL || peer->failed || (peer->ep == NULL && !peer_connect(t, peer))) {
            job->next_piece = job->piece_count;
        }
        while (job->next_piece < job->piece_count &&
               (staging = staging_for(t, job->asker)) != NULL) {
            send_answer(t, peer, job, staging);
        }
        if (job->next_piece < job->piece_count) {
            link = &job->next;
            continue;
        }
        *link = job->next;
        if (*link == NULL) {
            t->jobs_tail = link;
        }
        t->job_count--;
        td_free(job);
    }
}

/* --- the thread: loop ------------------------------------------------------------------------- */

static void run_command(td_transfer_t *t, command_t *c)
{
    td_fetch_t **link = NULL;
    uint32_t of_peer = 0;

    switch (c->kind) {
    case CMD_PEER_ADD:
        peer_add(t, c);
        return; /* the peer keeps the command */
    case CMD_PEER_REMOVE:
        peer_remove(t, c->id);
        break;
    case CMD_FETCH:
        link = &t->fetches;
        while (*link != NULL) {
            of_peer += (*link)->peer == c->fetch->peer;
            link = &(*link)->next; /* oldest first */
        }
        if (t->fetch_count >= TD_TRANSFER_OPS_MAX || of_peer >= TD_TRANSFER_PEER_OPS_MAX) {
            c->fetch->status = TD_ERR_BUSY;
            c->fetch->complete(c->fetch);
            break;
        }
        *link = c->fetch;
        t->fetch_count++;
        break;
    case CMD_CANCEL:
        link = fetch_link(t, c->id);
        if (link != NULL && (*link)->ends == TD_INPROGRESS) {
            (void)fetch_end(t, link, TD_ERR_CANCELLED);
        }
        break;
    }
    td_free(c);
}

static void run_commands(td_transfer_t *t)
{
    void *item = NULL;
    while (td_ring_pop(t->commands, &item)) {
        run_command(t, item);
    }
}

static void sleep_until_event(td_transfer_t *t, uint32_t limit_us)
{
    struct pollfd fds[2] = {{.fd = t->event_fd, .events = POLLIN},
                            {.fd = td_ring_fd(t->commands), .events = POLLIN}};
    const uint64_t timeout_ms =
        t->fetch_count > 0 || t->job_count > 0 ? POLL_BUSY_MS : POLL_IDLE_MS;
    const uint64_t timeout_ns = TD_MIN(timeout_ms * TD_NS_PER_MS, (uint64_t)limit_us * 1000);
    const struct timespec timeout = {.tv_nsec = (long)timeout_ns};

    if (ucp_worker_arm(t->worker) != UCS_OK) {
        return; /* BUSY: there is something to progress */
    }
    (void)ppoll(fds, 2, &timeout, NULL);
    if ((fds[1].revents & POLLIN) != 0) {
        td_ring_drain_fd(t->commands);
    }
}

static void end_everything(td_transfer_t *t)
{
    uint64_t deadline = td_now_ns() + TD_NS_PER_S;

    /* What the device writes into the last ones' destinations takes no peer to end. */
    for (td_fetch_t **link = &t->fetches; *link != NULL;) {
        if (!fetch_end(t, link, TD_ERR_CANCELLED)) {
            (void)td_nccl_drive(t->nccl);
        }
    }
    while (t->peers != NULL) {
        peer_remove(t, t->peers->incarnation);
    }
    while (t->jobs != NULL) {
        job_t *next = t->jobs->next;
        td_free(t->jobs);
        t->jobs = next;
    }
    while (t->sends_in_flight > 0 && td_now_ns() < deadline) {
        (void)ucp_worker_progress(t->worker);
    }
}

static void *transfer_main(void *arg)
{
    td_transfer_t *t = arg;

    while (!atomic_load_explicit(&t->stop, memory_order_acquire)) {
        bool left = false;
        uint32_t next_us = UINT32_MAX;
        run_commands(t);
        for (int i = 0; i < PROGRESS_PER_TURN && ucp_worker_progress(t->worker) != 0; i++) {
        }
        disconnect_failed_peers(t);
        left = drive_fetches(t);
        drive_jobs(t);
        if (t->nccl != NULL) {
            next_us = td_nccl_drive(t->nccl);
        }
        if (!left) {
            sleep_until_event(t, next_us);
        }
    }
    end_everything(t);
    return NULL;
}

uint64_t td_transfer_fetched_bytes(const td_transfer_t *t)
{
    uint64_t bytes = 0;

    for (uint32_t i = TD_CARRIER_SHM; i < TD_CARRIERS; i++) {
        bytes += t->bytes[i] == NULL ? 0 : td_metric_get(t->bytes[i]);
    }
    return bytes;
}

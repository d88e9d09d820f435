#include "kvstore/kvs_donor.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/base/td_log.h"
#include "common/node/td_peers.h"
#include "kvstore/kvs_segment.h"

#define TICK_MS 100u
#define MESSAGES_PER_TICK 256u
#define SUFFIX ".donor"

struct kvs_donor {
    pthread_t thread;
    bool runs;
    int stop_fd;
    td_bus_t *bus;
    td_transfer_t *transfer;
    kvs_segment_t *segment;
    td_member_t *member;
    td_routers_t *routers; /* NULL: they are named */
    char id[TD_MSG_ID_CHARS_MAX + 1];
};

/* --- its thread ------------------------------------------------------------------------------- */

static void on_peer_up(void *ctx, const td_msg_peer_t *peer)
{
    kvs_donor_t *d = ctx;
    td_peers_add(d->transfer, d->id, peer);
}

static void on_peer_down(void *ctx, const char *id, uint64_t incarnation)
{
    kvs_donor_t *d = ctx;
    (void)id;
    td_transfer_peer_remove(d->transfer, incarnation);
}

static void on_fenced(void *ctx, const char *router, uint64_t incarnation)
{
    kvs_donor_t *d = ctx;
    (void)router;
    td_transfer_set_incarnation(d->transfer, incarnation);
}

static void *donor_main(void *arg)
{
    kvs_donor_t *d = arg;
    const td_msg_heartbeat_t load = {0};

    for (;;) {
        const int fds[2] = {d->stop_fd, kvs_segment_fd(d->segment)};
        bool readable[2] = {false, false};
        td_msg_arena_t *arena = NULL;
        td_msg_t msg;

        td_bus_wait(d->bus, fds, TD_ARRAY_LEN(fds), kvs_segment_wait_ms(d->segment, TICK_MS),
                    readable);
        if (readable[0]) {
            return NULL;
        }
        for (uint32_t i = 0; i < MESSAGES_PER_TICK && td_bus_recv(d->bus, &msg, &arena) == TD_OK;
             i++) {
            (void)(td_member_handle(d->member, &msg) || kvs_segment_handle(d->segment, &msg));
            td_msg_arena_free(arena);
        }
        kvs_segment_completions(d->segment);
        kvs_segment_tick(d->segment);
        td_routers_tick(d->routers, d->member);
        td_member_tick(d->member, &load);
    }
}

static td_status_t start_thread(kvs_donor_t *d)
{
    sigset_t all;
    sigset_t before;
    int rc = 0;

    (void)sigfillset(&all); /* signals are the node's */
    (void)pthread_sigmask(SIG_SETMASK, &all, &before);
    rc = pthread_create(&d->thread, NULL, donor_main, d);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    d->runs = rc == 0;
    return rc == 0 ? TD_OK : TD_ERR_IO;
}

/* --- beginning and end ------------------------------------------------------------------------ */

/* The node's own port is taken: any other of its address. */
static td_status_t open_bus(kvs_donor_t *d, const td_proc_t *proc)
{
    const char *listen = td_config_text(proc->config, "listen");
    const char *port = strrchr(listen, ':');
    char bind[256];
    const td_bus_config_t config = {.bind = bind,
                                    .advertise = td_config_text(proc->config, "advertise"),
                                    .id = d->id,
                                    .incarnation = td_random_u64() | 1,
                                    .secret = proc->secret,
                                    .curve = td_config_bool(proc->config, "curve")};

    if (port == NULL ||
        snprintf(bind, sizeof(bind), "%.*s:*", (int)(port - listen), listen) >= (int)sizeof(bind)) {
        TD_LOG_ERROR("no address for donated memory", "listen=%s expected=\"tcp://HOST:PORT\"",
                     listen);
        return TD_ERR_INVALID;
    }
    return td_bus_create(&config, &d->bus);
}

static td_status_t open_segment(kvs_donor_t *d, td_node_t *n, uint64_t bytes)
{
    const size_t block_bytes = td_pool_block_bytes(n->pool);
    const td_transfer_config_t config = {
        .block_count = (uint32_t)TD_MIN(bytes / block_bytes, (uint64_t)TD_POOL_BLOCKS_MAX),
        .block_bytes = block_bytes,
        .incarnation = td_bus_incarnation(d->bus)};

    if (config.block_count == 0) {
        TD_LOG_ERROR("donated memory below one block", "donate=%llu block_bytes=%zu",
                     (unsigned long long)bytes, block_bytes);
        return TD_ERR_INVALID;
    }
    TD_TRY(td_transfer_create(&config, &d->transfer));
    TD_TRY(kvs_segment_create(d->bus, d->transfer, n->proc.metrics, config.block_count, block_bytes,
                              &d->segment));
    TD_LOG_INFO("memory donated to the store", "segment=%s blocks=%u block_bytes=%zu", d->id,
                config.block_count, block_bytes);
    return TD_OK;
}

static td_status_t join(kvs_donor_t *d, const td_node_t *n)
{
    const td_member_events_t events = {
        .ctx = d, .peer_up = on_peer_up, .peer_down = on_peer_down, .fenced = on_fenced};
    td_block_key_t probe;
    td_msg_register_t self = {
        .self = {.id = d->id, .role = TD_ROLE_KVSTORE, .endpoint = td_bus_endpoint(d->bus)},
        .http = td_statusd_address(n->proc.statusd),
        .numerics_class = "",
        .version = TD_VERSION};

    td_block_probe_key_without_model(n->proc.secret, &probe);
    self.probe_key = (td_bytes_t){probe.bytes, sizeof(probe.bytes)};
    td_peers_describe(d->transfer, kvs_segment_blocks(d->segment),
                      (uint32_t)td_pool_block_bytes(n->pool), &self.self.region);
    return td_routers_open(n->proc.config, d->bus, &self, &events, &d->member, &d->routers);
}

static td_status_t open_all(kvs_donor_t *d, td_node_t *n, uint64_t bytes)
{
    if (snprintf(d->id, sizeof(d->id), "%s" SUFFIX, n->proc.id) >= (int)sizeof(d->id)) {
        TD_LOG_ERROR("id too long to donate memory", "id=%s limit=%zu", n->proc.id,
                     sizeof(d->id) - sizeof(SUFFIX));
        return TD_ERR_INVALID;
    }
    d->stop_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (d->stop_fd < 0) {
        return TD_ERR_IO;
    }
    TD_TRY(open_bus(d, &n->proc));
    TD_TRY(open_segment(d, n, bytes));
    TD_TRY(join(d, n));
    return start_thread(d);
}

td_status_t kvs_donor_create(td_node_t *n, kvs_donor_t **out)
{
    const uint64_t bytes = td_config_u64(n->proc.config, "donate");
    kvs_donor_t *d = NULL;
    td_status_t status = TD_OK;

    *out = NULL;
    if (bytes == 0) {
        return TD_OK;
    }
    d = td_calloc(1, sizeof(*d));
    if (d == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    d->stop_fd = -1;
    status = open_all(d, n, bytes);
    if (status != TD_OK) {
        kvs_donor_destroy(d);
        return status;
    }
    *out = d;
    return TD_OK;
}

void kvs_donor_destroy(kvs_donor_t *d)
{
    const uint64_t one = 1;

    if (d == NULL) {
        return;
    }
    if (d->runs) {
        TD_ASSERT(write(d->stop_fd, &one, sizeof(one)) == sizeof(one));
        (void)pthread_join(d->thread, NULL);
    }
    td_transfer_destroy(d->transfer);
    kvs_segment_destroy(d->segment);
    td_member_destroy(d->member);
    td_routers_destroy(d->routers);
    td_bus_destroy(d->bus);
    if (d->stop_fd >= 0) {
        (void)close(d->stop_fd);
    }
    td_free(d);
}

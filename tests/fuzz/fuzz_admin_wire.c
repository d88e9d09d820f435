/* Any bytes as a request of the admin RPC, to the loop of a router that has a store: each is
 * answered, once, by a Reply. The socket's place is taken here. Built with a fuzzing engine, or
 * alone: then it replays the corpus and changes of every byte of it. */
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/base/td_log.h"
#include "common/wire/td_member.h"
#include "proto/admin.pb-c.h"
#include "router/rtr_admin_socket.h"
#include "router/rtr_loop.h"
#include "tests/fuzz/fuzz_replay.h"
#include "tests/fuzz/gguf_build.h"

#define CORPUS_DIR "tests/fuzz/corpus/admin_wire"
#define PB(type) Tandem__Admin__V1__##type
#define BLOCK_TOKENS 16u
#define WAIT_MS 5000u
#define BEAT_NS (300 * TD_NS_PER_MS)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* --- the socket ------------------------------------------------------------------------------- */

static struct {
    const uint8_t *bytes;
    size_t len;
    bool waits; /* a request does */
    uint32_t replies;
} wire;

td_status_t rtr_admin_socket_open(const char *endpoint, const char *folder,
                                  rtr_admin_socket_t **out)
{
    (void)endpoint;
    (void)folder;
    *out = (rtr_admin_socket_t *)(void *)&wire; /* never looked into */
    return TD_OK;
}

void rtr_admin_socket_close(rtr_admin_socket_t *socket)
{
    (void)socket;
}

const char *rtr_admin_socket_endpoint(const rtr_admin_socket_t *socket)
{
    (void)socket;
    return "none";
}

int rtr_admin_socket_fd(const rtr_admin_socket_t *socket)
{
    static int fd = -1;
    (void)socket;

    fd = fd < 0 ? eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK) : fd;
    return fd;
}

td_status_t rtr_admin_socket_recv(rtr_admin_socket_t *socket, rtr_admin_name_t *from,
                                  td_str_t *body)
{
    (void)socket;
    if (!wire.waits) {
        return TD_ERR_NOT_FOUND;
    }
    wire.waits = false;
    *from = (rtr_admin_name_t){.bytes = {1}, .len = 1};
    td_str_clear(body);
    return td_str_append(body, (const char *)wire.bytes, wire.len);
}

td_status_t rtr_admin_socket_send(rtr_admin_socket_t *socket, const rtr_admin_name_t *to,
                                  const void *bytes, size_t len)
{
    PB(Reply) *reply = tandem__admin__v1__reply__unpack(NULL, len, bytes);
    (void)socket;

    TD_ASSERT(to->len == 1 && reply != NULL);
    TD_ASSERT(reply->code == TANDEM__ADMIN__V1__CODE__OK || reply->error[0] != '\0');
    tandem__admin__v1__reply__free_unpacked(reply, NULL);
    wire.replies++;
    return TD_OK;
}

/* --- a router with a store ------------------------------------------------------------------- */

static struct {
    td_bus_t *bus;
    td_bus_t *store;
    rtr_loop_t *loop;
    uint64_t beat_ns;
    uint8_t secret[TD_CLUSTER_SECRET_BYTES];
    uint8_t fingerprint[32];
} fx;

static void register_store(void)
{
    td_block_key_t probe;
    td_msg_t msg = {.type = TD_MSG_REGISTER};
    td_msg_register_t *r = &msg.u.reg;

    td_block_probe_key_without_model(fx.secret, &probe);
    r->self = (td_msg_peer_t){.id = td_bus_id(fx.store),
                              .role = TD_ROLE_KVSTORE,
                              .incarnation = td_bus_incarnation(fx.store),
                              .endpoint = td_bus_endpoint(fx.store),
                              .store_master = true,
                              .store_term = 1};
    r->http = "127.0.0.1:1";
    r->numerics_class = "";
    r->kv_codec = "";
    r->version = "0";
    r->probe_key = (td_bytes_t){probe.bytes, TD_BLOCK_KEY_BYTES};
    TD_ASSERT(td_bus_send(fx.store, TD_ROUTER_ID, &msg) == TD_OK);
}

static void step(void)
{
    td_msg_t msg = {.type = TD_MSG_HEARTBEAT, .u.heartbeat = {.free_blocks = 9, .total_blocks = 9}};
    td_msg_arena_t *arena = NULL;

    if (td_now_ns() - fx.beat_ns > BEAT_NS) {
        fx.beat_ns = td_now_ns();
        TD_ASSERT(td_bus_send(fx.store, TD_ROUTER_ID, &msg) == TD_OK);
    }
    (void)rtr_loop_step(fx.loop, -1, 0);
    td_bus_wait(fx.store, NULL, 0, 0, NULL);
    while (td_bus_recv(fx.store, &msg, &arena) == TD_OK) { /* its orders, which it never answers */
        td_msg_arena_free(arena);
    }
}

static bool has_store(void)
{
    rtr_node_view_t *views = NULL;
    uint32_t count = 0;
    bool found = false;

    TD_ASSERT(rtr_registry_views(rtr_loop_registry(fx.loop), &views, &count) == TD_OK);
    found = count > 0 && views[0].store_master;
    td_free(views);
    return found;
}

static void begin(void)
{
    static td_str_t file;
    static rtr_model_t model = {.name = "tiny", .context_max = 4096};
    static rtr_metrics_t metrics;
    static rtr_slo_live_t slo;
    td_bus_config_t bus = {.bind = "tcp://127.0.0.1:*", .id = TD_ROUTER_ID, .incarnation = 77};
    rtr_loop_config_t loop = {.block_tokens = BLOCK_TOKENS,
                              .block_bytes = 4096,
                              .kv_codec = "f16",
                              .queue_max = 2,
                              .queue_ms = 300,
                              .request_timeout_ms = 60000,
                              .admin_endpoint = "none",
                              .admin_keys = "none"};
    const rtr_tenant_terms_t terms = {.weight = 1};
    rtr_tenant_t *tenant = NULL;
    static td_gguf_t *gguf; /* as all of this: for the process's life */
    static td_tokenizer_t *tok;
    static td_metrics_t *registry;
    const uint64_t until_ns = td_now_ns() + WAIT_MS * TD_NS_PER_MS;

    td_log_init("fuzz", TD_LOG_LEVEL_ERROR);
    gb_tokenizer(&file);
    bus.secret = fx.secret;
    TD_ASSERT(td_gguf_open_bytes(file.bytes, file.len, &gguf) == TD_OK &&
              td_tokenizer_create(gguf, &tok) == TD_OK && td_metrics_create(&registry) == TD_OK &&
              td_bus_create(&bus, &fx.bus) == TD_OK && rtr_gone_create(8, &loop.gone) == TD_OK &&
              rtr_tenants_create(&loop.tenants) == TD_OK &&
              rtr_tenants_add(loop.tenants, "a", &terms, &tenant) == TD_OK);
    rtr_metrics_declare(registry, &metrics);
    model.tok = tok;
    loop.bus = fx.bus;
    loop.metrics = &metrics;
    loop.model = &model;
    loop.slo = &slo;
    loop.secret = fx.secret;
    loop.fingerprint = fx.fingerprint;
    TD_ASSERT(rtr_loop_create(&loop, &fx.loop) == TD_OK);
    bus.id = "store";
    bus.incarnation = 78;
    TD_ASSERT(td_bus_create(&bus, &fx.store) == TD_OK &&
              td_bus_connect(fx.store, TD_ROUTER_ID, td_bus_endpoint(fx.bus), 77) == TD_OK);
    register_store();
    while (!has_store()) {
        TD_ASSERT(td_remaining_ns(until_ns) > 0);
        step();
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (fx.loop == NULL) {
        begin();
    }
    step(); /* what subscribers are told, and orders that took too long */
    wire.bytes = data;
    wire.len = size;
    wire.replies = 0;
    wire.waits = true;
    step();
    /* An order to the store is answered by the store, or when that took too long. */
    TD_ASSERT(!wire.waits);
    return 0;
}

#ifndef TD_FUZZ_ENGINE
int main(int argc, char **argv)
{
    return fuzz_replay_folder(argc > 1 ? argv[1] : CORPUS_DIR, fuzz_replay_file, true);
}
#endif

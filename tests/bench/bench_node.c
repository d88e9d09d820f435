#include "tests/bench/bench_node.h"

#include "common/base/td_base.h"
#include "common/kv/td_block_key.h"
#include "common/kv/td_kv_layout.h"
#include "common/model/td_gguf.h"
#include "common/node/td_peers.h"

static void on_peer_up(void *ctx, const td_msg_peer_t *peer)
{
    bench_node_t *n = ctx;
    td_peers_add(n->transfer, td_bus_id(n->bus), peer);
}

static void on_peer_down(void *ctx, const char *id, uint64_t incarnation)
{
    bench_node_t *n = ctx;
    (void)id;
    td_transfer_peer_remove(n->transfer, incarnation);
}

static void on_fenced(void *ctx, const char *router, uint64_t incarnation)
{
    bench_node_t *n = ctx;
    (void)router;
    td_transfer_set_incarnation(n->transfer, incarnation);
}

static td_status_t join_members(const bench_node_config_t *config, bench_node_t *n)
{
    const td_member_events_t events = {
        .ctx = n, .peer_up = on_peer_up, .peer_down = on_peer_down, .fenced = on_fenced};
    td_block_root_fields_t fields = {.layout_version = TD_KV_LAYOUT_VERSION,
                                     .codec = config->kv_codec,
                                     .numerics_class = config->numerics,
                                     .block_tokens = BENCH_NODE_BLOCK_TOKENS,
                                     .adapter = "",
                                     .salt = ""};
    td_msg_register_t self = {.self = {.id = td_bus_id(config->bus),
                                       .role = TD_ROLE_PREFILL,
                                       .endpoint = td_bus_endpoint(config->bus)},
                              .http = config->http,
                              .numerics_class = config->numerics,
                              .kv_codec = config->kv_codec,
                              .context_max = BENCH_NODE_BLOCK_TOKENS,
                              .version = TD_VERSION};
    uint8_t fingerprint[32];
    td_gguf_t *gguf = NULL;
    td_block_root_t root;
    td_block_key_t probe;

    TD_TRY(td_gguf_open(config->model, &gguf));
    td_gguf_fingerprint(gguf, fingerprint);
    td_gguf_close(gguf);
    fields.fingerprint = fingerprint;
    td_block_root_make(config->secret, &fields, &root);
    td_block_probe_key(&root, BENCH_NODE_BLOCK_TOKENS, &probe);
    td_peers_describe(n->transfer, config->block_count, config->block_bytes, &self.self.region);
    self.fingerprint = (td_bytes_t){fingerprint, sizeof(fingerprint)};
    self.probe_key = (td_bytes_t){probe.bytes, sizeof(probe.bytes)};
    return td_member_create(config->bus, config->router, &self, &events, &n->member);
}

td_status_t bench_node_join(const bench_node_config_t *config, bench_node_t *n)
{
    const td_transfer_config_t transfer = {.block_count = config->block_count,
                                           .block_bytes = config->block_bytes,
                                           .incarnation = td_bus_incarnation(config->bus)};

    *n = (bench_node_t){.bus = config->bus};
    TD_TRY(td_transfer_create(&transfer, &n->transfer));
    TD_TRY(td_pool_create(td_transfer_memory(n->transfer), config->block_count, config->block_bytes,
                          &n->pool));
    td_transfer_set_pool(n->transfer, n->pool);
    TD_TRY(join_members(config, n));
    return kvs_client_create(n->bus, n->member, n->pool, &n->client);
}

void bench_node_leave(bench_node_t *n)
{
    td_transfer_destroy(n->transfer);
    kvs_client_destroy(n->client);
    td_pool_destroy(n->pool);
    td_member_destroy(n->member);
    *n = (bench_node_t){0};
}

bool bench_node_handle(bench_node_t *n, const td_msg_t *msg)
{
    return td_member_handle(n->member, msg) || kvs_client_handle(n->client, msg);
}

void bench_node_tick(bench_node_t *n)
{
    const td_msg_heartbeat_t load = {0};

    kvs_client_tick(n->client);
    td_member_tick(n->member, &load);
}

void bench_node_turn(bench_node_t *n, uint32_t timeout_ms)
{
    td_msg_arena_t *arena = NULL;
    td_msg_t msg;

    td_bus_wait(n->bus, NULL, 0, timeout_ms, NULL);
    while (td_bus_recv(n->bus, &msg, &arena) == TD_OK) {
        (void)bench_node_handle(n, &msg);
        td_msg_arena_free(arena);
    }
    bench_node_tick(n);
}

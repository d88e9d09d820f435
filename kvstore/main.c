/* tandem-kvstore: master, segment, or both. Of the processes that may be the master, the one that
 * coordination names is it (common/coord); without etcd there is but one. It tells the router, and
 * the router everybody. */
#include <stdlib.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/base/td_log.h"
#include "common/coord/td_coord_options.h"
#include "common/node/td_peers.h"
#include "common/node/td_routers.h"
#include "common/transfer/td_transfer.h"
#include "common/wire/td_member.h"
#include "common/wire/td_proc.h"
#include "kvstore/kvs_cold.h"
#include "kvstore/kvs_master.h"
#include "kvstore/kvs_memo.h"
#include "kvstore/kvs_segment.h"

#define TICK_MS 100u
#define MESSAGES_PER_TICK 256u
#define RESIGN_MS 1000u /* at the end: then a successor has to wait for the lease's */

typedef struct app {
    td_proc_t proc;
    td_member_t *member;
    td_routers_t *routers; /* NULL: they are named */
    td_transfer_t *transfer;
    td_coord_t *coord;      /* NULL: role segment */
    kvs_master_t *master;   /* NULL: role segment */
    uint64_t term;          /* that the master has, 0 = standby */
    uint64_t announced;     /* the term that the others know us by as the master, 0 = none */
    uint64_t highest;       /* term of anybody that was heard of */
    kvs_segment_t *segment; /* NULL until the router has told the block size; role master */
    bool is_segment;
    uint32_t block_count;
    uint32_t block_bytes;
    td_block_key_t probe; /* proves the secret */
} app_t;

static const td_option_t options[] = {
    TD_PROC_OPTIONS,
    TD_COORD_OPTIONS,
    TD_ROUTERS_OPTION,
    {"role", TD_OPTION_CHOICE, "both", "what this process is", 0, 0, "both|master|segment"},
    {"capacity", TD_OPTION_BYTES, "512M", "memory donated to the store", 1 << 20, 1ull << 46},
    {"keys-max", TD_OPTION_COUNT, "262144", "index entries of the master", 16, KVS_KEYS_MAX},
    {"lease-ms", TD_OPTION_COUNT, "10000", "a reader's hold on a block; eviction waits", 0,
     3600000},
    {"soft-pin-ms", TD_OPTION_COUNT, "1800000", "how long a soft pin holds", 0, 604800000},
    {"put-abandoned-ms", TD_OPTION_COUNT, "30000", "a put not finished by then is revoked", 100,
     3600000},
    {"evict-from-percent", TD_OPTION_COUNT, "90", "eviction begins when a segment is so full", 1,
     100},
    {"evict-percent", TD_OPTION_COUNT, "5", "and frees so much of it at a time", 1, 100},
    {"replicas", TD_OPTION_COUNT, "1", "copies of a new block, on different segments", 1,
     KVS_REPLICAS_MAX},
    {"hot-replicas", TD_OPTION_COUNT, "3", "copies of a block that is often read, at most", 1,
     KVS_REPLICAS_MAX},
    {"hot-hits", TD_OPTION_COUNT, "16", "lookups lately for each further copy", 1, UINT32_MAX},
    {"hot-half-ms", TD_OPTION_COUNT, "10000", "after so long half of the lookups are forgotten", 1,
     3600000},
    {"promote-ms", TD_OPTION_COUNT, "50", "a lookup waits for blocks on disk at most so long", 0,
     1000},
    {"cold-keys-max", TD_OPTION_COUNT, "1048576", "keys on disks that the master knows of", 1,
     KVS_COLD_KEYS_MAX},
    {"memo-memory", TD_OPTION_BYTES, "16M",
     "of answers that nodes remember for each other, 0 = none", 0, KVS_MEMO_BYTES_MAX},
    {"memo-max-age", TD_OPTION_MS, "86400s", "after which such an answer is forgotten", 1,
     UINT32_MAX},
    {"tier-dir", TD_OPTION_TEXT, NULL, "folder of the cold tier on a local disk"},
    {"tier-bytes", TD_OPTION_BYTES, "0", "size of the cold tier, 0 = none", 0, KVS_TIER_BYTES_MAX},
    {"tier-io", TD_OPTION_CHOICE, "uring", "how its file is used; uring falls back to pread", 0, 0,
     "uring|pread"},
};

static kvs_policy_t read_policy(const td_config_t *config)
{
    kvs_policy_t p = {
        .lease_ms = (uint32_t)td_config_u64(config, "lease-ms"),
        .soft_pin_ms = (uint32_t)td_config_u64(config, "soft-pin-ms"),
        .put_abandoned_ms = (uint32_t)td_config_u64(config, "put-abandoned-ms"),
        .evict_from_percent = (uint32_t)td_config_u64(config, "evict-from-percent"),
        .evict_percent = (uint32_t)td_config_u64(config, "evict-percent"),
        .replicas = (uint32_t)td_config_u64(config, "replicas"),
        .hot_replicas = (uint32_t)td_config_u64(config, "hot-replicas"),
        .hot_hits = (uint32_t)td_config_u64(config, "hot-hits"),
        .hot_half_ms = (uint32_t)td_config_u64(config, "hot-half-ms"),
        .promote_ms = (uint32_t)td_config_u64(config, "promote-ms"),
        .cold_keys_max = (uint32_t)td_config_u64(config, "cold-keys-max"),
        .memo_bytes = td_config_u64(config, "memo-memory"),
        .memo_age_ms = td_config_u64(config, "memo-max-age"),
    };
    p.hot_replicas = TD_MAX(p.hot_replicas, p.replicas);
    return p;
}

static void self_describe(const app_t *app, td_msg_register_t *self)
{
    memset(self, 0, sizeof(*self));
    self->self.id = app->proc.id;
    self->self.role = TD_ROLE_KVSTORE;
    self->self.endpoint = td_bus_endpoint(app->proc.bus);
    /* Not before its memory is there: peers learn a process once in its life, region included. */
    self->self.store_master = app->announced != 0 && (!app->is_segment || app->transfer != NULL);
    self->self.store_term = app->announced;
    self->http = td_statusd_address(app->proc.statusd);
    self->numerics_class = "";
    self->version = TD_VERSION;
    self->probe_key = (td_bytes_t){app->probe.bytes, sizeof(app->probe.bytes)};
    if (app->transfer != NULL) {
        td_peers_describe(app->transfer, app->block_count, app->block_bytes, &self->self.region);
    }
}

static void announce(app_t *app)
{
    td_msg_register_t self;

    self_describe(app, &self);
    if (td_member_update(app->member, &self) != TD_OK) {
        TD_LOG_WARN("change not announced", "announced_term=%llu",
                    (unsigned long long)app->announced);
    }
}

/* --- leadership ------------------------------------------------------------------------------- */

/* A master whose term is over goes on answering lookups, so the others know it as the master until
 * they know a later one. */
static uint64_t term_to_announce(const app_t *app)
{
    const td_member_peer_t *known =
        app->member == NULL ? NULL : td_member_store_master(app->member);

    if (app->term != 0) {
        return app->term;
    }
    return known != NULL && known->store_term > app->announced ? 0 : app->announced;
}

/* Segments refuse terms below one that they have seen. */
static void check_term(app_t *app, uint64_t term)
{
    const td_member_peer_t *known =
        app->member == NULL ? NULL : td_member_store_master(app->member);

    if (known != NULL) {
        app->highest = TD_MAX(app->highest, known->store_term);
    }
    if (term != 0 && term < app->highest && term != app->term) {
        TD_LOG_ERROR("term below an earlier one: etcd has lost its data",
                     "term=%llu earlier=%llu expected=\"a restart of the stores\"",
                     (unsigned long long)term, (unsigned long long)app->highest);
    }
    app->highest = TD_MAX(app->highest, term);
}

static void follow_coord(app_t *app)
{
    uint64_t term = 0;
    uint64_t announced = 0;

    td_coord_tick(app->coord);
    term = td_coord_term(app->coord);
    check_term(app, term);
    if (term != app->term) {
        app->term = term;
        if (term != 0) {
            kvs_master_lead(app->master, term);
        } else {
            kvs_master_follow(app->master);
        }
    }
    announced = term_to_announce(app);
    if (announced != app->announced) {
        TD_LOG_INFO(announced != 0 ? "store master" : "standby", "term=%llu",
                    (unsigned long long)announced);
        app->announced = announced;
        if (app->member != NULL) {
            announce(app);
        }
    }
}

/* --- segment ---------------------------------------------------------------------------------- */

static td_status_t open_tier(app_t *app, uint32_t block_bytes)
{
    const td_config_t *config = app->proc.config;
    kvs_tier_config_t tier = {.dir = td_config_text(config, "tier-dir"),
                              .bytes = td_config_u64(config, "tier-bytes"),
                              .block_bytes = block_bytes,
                              .pread_only = strcmp(td_config_text(config, "tier-io"), "pread") == 0,
                              .probe = app->probe,
                              .metrics = app->proc.metrics};

    return tier.bytes == 0 ? TD_OK : kvs_segment_open_tier(app->segment, &tier);
}

static td_status_t open_segment(app_t *app, uint32_t block_bytes)
{
    uint64_t capacity = td_config_u64(app->proc.config, "capacity");
    td_transfer_config_t config = {.incarnation = td_bus_incarnation(app->proc.bus),
                                   .metrics = app->proc.metrics,
                                   .name_prefix = "tandem_kvstore"};

    config.block_count = (uint32_t)TD_MIN(capacity / block_bytes, (uint64_t)TD_POOL_BLOCKS_MAX);
    config.block_bytes = block_bytes;
    if (config.block_count == 0) {
        TD_LOG_ERROR("capacity below one block", "capacity=%llu block_bytes=%u",
                     (unsigned long long)capacity, block_bytes);
        return TD_ERR_INVALID;
    }
    TD_LOG_INFO("segment memory", "blocks=%u block_bytes=%u", config.block_count, block_bytes);
    TD_TRY(td_transfer_create(&config, &app->transfer));
    app->block_count = config.block_count;
    app->block_bytes = block_bytes;
    TD_TRY(kvs_segment_create(app->proc.bus, app->transfer, app->proc.metrics, config.block_count,
                              block_bytes, &app->segment));
    TD_TRY(open_tier(app, block_bytes));
    announce(app);
    return TD_OK;
}

/* --- membership ------------------------------------------------------------------------------- */

static void on_registered(void *ctx, const td_msg_registered_t *info)
{
    app_t *app = ctx;
    if (app->is_segment && app->segment == NULL && info->block_bytes > 0 &&
        open_segment(app, info->block_bytes) != TD_OK) {
        TD_LOG_ERROR("segment not opened", "block_bytes=%u", info->block_bytes);
        exit(1);
    }
    if (app->coord != NULL) {
        td_coord_campaign(app->coord); /* whom the router does not know, nobody could ask */
    }
}

static void on_peer_up(void *ctx, const td_msg_peer_t *peer)
{
    app_t *app = ctx;

    if (app->transfer != NULL) {
        td_peers_add(app->transfer, app->proc.id, peer);
    }
    if (app->master != NULL && peer->role == TD_ROLE_KVSTORE && peer->region.block_count > 0) {
        kvs_master_segment_up(app->master, peer->id, peer->incarnation, peer->region.block_count);
    }
}

static void on_peer_down(void *ctx, const char *id, uint64_t incarnation)
{
    app_t *app = ctx;
    if (app->transfer != NULL) {
        td_transfer_peer_remove(app->transfer, incarnation);
    }
    if (app->master != NULL) {
        kvs_master_peer_down(app->master, id, incarnation);
    }
}

static void on_fenced(void *ctx, const char *router, uint64_t incarnation)
{
    app_t *app = ctx;
    if (app->transfer != NULL) {
        td_transfer_set_incarnation(app->transfer, incarnation);
    }
    if (app->coord != NULL && (router == NULL || td_member_registered(app->member) == 0)) {
        td_coord_resign(app->coord); /* until one knows us again */
    }
}

/* --- loop ------------------------------------------------------------------------------------- */

static void drain_messages(app_t *app)
{
    td_msg_arena_t *arena = NULL;
    td_msg_t msg;

    for (uint32_t i = 0; i < MESSAGES_PER_TICK; i++) {
        if (td_bus_recv(app->proc.bus, &msg, &arena) != TD_OK) {
            return;
        }
        if (!td_member_handle(app->member, &msg) &&
            !(app->master != NULL && kvs_master_handle(app->master, &msg)) &&
            !(app->segment != NULL && kvs_segment_handle(app->segment, &msg))) {
            TD_LOG_DEBUG("message not for a store", "type=%d from=%s", (int)msg.type,
                         msg.sender_id);
        }
        td_msg_arena_free(arena);
    }
}

static td_msg_heartbeat_t load_of(const app_t *app)
{
    td_msg_heartbeat_t load = {0};

    if (app->segment != NULL) {
        load.total_blocks = kvs_segment_blocks(app->segment);
        load.free_blocks = kvs_segment_free_blocks(app->segment);
        load.fetched_bytes = td_transfer_fetched_bytes(app->transfer);
    }
    return load;
}

static void run(app_t *app)
{
    for (;;) {
        td_msg_heartbeat_t load = {0};
        int fds[4] = {app->proc.signal_fd};
        bool readable[4] = {false};
        uint32_t count = 1;
        uint32_t wait_ms = TICK_MS;
        if (app->segment != NULL) {
            fds[count++] = kvs_segment_fd(app->segment);
            if (kvs_segment_cold_fd(app->segment) >= 0) {
                fds[count++] = kvs_segment_cold_fd(app->segment);
            }
            wait_ms = kvs_segment_wait_ms(app->segment, wait_ms);
        }
        if (app->coord != NULL) {
            if (td_coord_fd(app->coord) >= 0) {
                fds[count++] = td_coord_fd(app->coord);
            }
            wait_ms = td_coord_wait_ms(app->coord, kvs_master_wait_ms(app->master, wait_ms));
        }
        td_bus_wait(app->proc.bus, fds, count, wait_ms, readable);
        if (readable[0]) {
            TD_LOG_INFO("stopping", "why=signal");
            return;
        }
        drain_messages(app);
        if (app->segment != NULL) {
            kvs_segment_completions(app->segment);
            kvs_segment_tick(app->segment);
        }
        if (app->coord != NULL) {
            follow_coord(app);
            kvs_master_tick(app->master);
            kvs_master_tell(app->master, app->member);
        }
        td_routers_tick(app->routers, app->member);
        load = load_of(app);
        td_member_tick(app->member, &load);
    }
}

static td_status_t start(app_t *app)
{
    const char *role = td_config_text(app->proc.config, "role");
    td_member_events_t events = {.ctx = app,
                                 .registered = on_registered,
                                 .peer_up = on_peer_up,
                                 .peer_down = on_peer_down,
                                 .fenced = on_fenced};
    td_msg_register_t self;

    TD_TRY(td_proc_open(&app->proc, true));
    td_block_probe_key_without_model(app->proc.secret, &app->probe);
    app->is_segment = strcmp(role, "master") != 0;
    if (td_config_u64(app->proc.config, "tier-bytes") > 0 &&
        td_config_text(app->proc.config, "tier-dir") == NULL) {
        TD_LOG_ERROR("tier-bytes without tier-dir", "expected=\"--tier-dir FOLDER\"");
        return TD_ERR_INVALID;
    }
    if (strcmp(role, "segment") != 0) {
        const kvs_policy_t policy = read_policy(app->proc.config);
        TD_TRY(td_coord_open(app->proc.config, "store-master", app->proc.id, app->proc.metrics,
                             "tandem_kvstore", &app->coord));
        TD_TRY(kvs_master_create(app->proc.bus, app->proc.metrics,
                                 (uint32_t)td_config_u64(app->proc.config, "keys-max"), &policy,
                                 app->coord, &app->master));
        if (td_config_text(app->proc.config, "etcd") == NULL) {
            td_coord_campaign(app->coord); /* nobody to wait for */
            follow_coord(app);
        }
    }
    self_describe(app, &self);
    TD_TRY(td_routers_open(app->proc.config, app->proc.bus, &self, &events, &app->member,
                           &app->routers));
    td_proc_announce(&app->proc, td_statusd_address(app->proc.statusd));
    return TD_OK;
}

int main(int argc, char **argv)
{
    static app_t app;
    td_config_next_t next =
        td_proc_init(&app.proc, "tandem-kvstore", "kvstore",
                     "Tandem's global KV store: master (index) and segment (memory).", options,
                     TD_ARRAY_LEN(options), argc, argv);
    int rc = next == TD_CONFIG_EXIT_USAGE ? 2 : 0;

    if (next == TD_CONFIG_RUN) {
        rc = start(&app) == TD_OK ? 0 : 1;
        if (rc == 0) {
            run(&app);
        }
    }
    if (app.coord != NULL) {
        td_coord_resign_wait(app.coord, RESIGN_MS);
    }
    td_transfer_destroy(app.transfer);
    kvs_segment_destroy(app.segment);
    kvs_master_destroy(app.master);
    td_coord_destroy(app.coord);
    td_member_destroy(app.member);
    td_routers_destroy(app.routers);
    td_proc_fini(&app.proc);
    return rc;
}

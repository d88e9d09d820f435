#include "router/rtr_loop.h"

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/base/td_log.h"
#include "common/base/td_ring.h"
#include "router/rtr_admin.h"
#include "router/rtr_index_link.h"

#define CUT_MS 250u
#define MESSAGES_PER_STEP 512u
#define REQUESTS_PER_STEP 256u
#define BUSY_TICK_MS 20u
#define DRAIN_STEP_MS 20u

struct rtr_loop {
    rtr_loop_config_t config;
    td_ring_t *inbox;
    rtr_index_t *index;
    rtr_index_link_t blocks; /* of the index, to the nodes */
    rtr_registry_t *registry;
    rtr_drafters_t *drafters;
    rtr_tickets_t *tickets;
    rtr_events_t *events;
    rtr_trace_t *trace;
    rtr_admin_t *admin;  /* NULL: there is none */
    bool admin_waits;    /* its step was full: the next one comes at once */
    bool registry_waits; /* likewise: lists of peers */
    uint64_t next_cut_ns;
    atomic_bool gone_marked; /* release: a request's mark precedes it; acquire: the loop looks */
};

static td_status_t open_admin(rtr_loop_t *loop)
{
    const rtr_loop_config_t *c = &loop->config;
    const rtr_admin_config_t admin = {.endpoint = c->admin_endpoint,
                                      .folder = c->admin_keys,
                                      .bus = c->bus,
                                      .registry = loop->registry,
                                      .tickets = loop->tickets,
                                      .drafters = loop->drafters,
                                      .index = loop->index,
                                      .events = loop->events,
                                      .trace = loop->trace,
                                      .metrics = c->metrics,
                                      .tenants = c->tenants,
                                      .secret = c->secret,
                                      .model = c->model,
                                      .slo = c->slo,
                                      .block_bytes = c->block_bytes,
                                      .layers = c->layers,
                                      .kv_codec = c->kv_codec,
                                      .block_tokens = c->block_tokens};

    return c->admin_endpoint == NULL ? TD_OK : rtr_admin_create(&admin, &loop->admin);
}

static void on_node_down(void *ctx, uint32_t slot)
{
    rtr_loop_t *loop = ctx;
    rtr_tickets_node_down(loop->tickets, slot);
}

static void on_tickets_void(void *ctx, uint32_t slot)
{
    rtr_loop_t *loop = ctx;
    rtr_tickets_voided(loop->tickets, slot);
}

td_status_t rtr_loop_create(const rtr_loop_config_t *config, rtr_loop_t **out)
{
    rtr_loop_t *loop = td_calloc(1, sizeof(*loop));
    rtr_registry_config_t registry = {.bus = config->bus,
                                      .metrics = config->metrics,
                                      .secret = config->secret,
                                      .fingerprint = config->fingerprint,
                                      .block_tokens = config->block_tokens,
                                      .context_max = config->model->context_max,
                                      .kv_codec = config->kv_codec,
                                      .block_bytes = config->block_bytes,
                                      .ctx = loop,
                                      .node_down = on_node_down,
                                      .tickets_void = on_tickets_void};
    rtr_tickets_config_t tickets = {.bus = config->bus,
                                    .metrics = config->metrics,
                                    .tenants = config->tenants,
                                    .model = config->model,
                                    .secret = config->secret,
                                    .fingerprint = config->fingerprint,
                                    .block_tokens = config->block_tokens,
                                    .kv_codec = config->kv_codec,
                                    .policy = config->policy,
                                    .self_tokens_max = config->self_tokens_max,
                                    .queue_max = config->queue_max,
                                    .queue_ms = config->queue_ms,
                                    .request_timeout_ms = config->request_timeout_ms};
    const rtr_drafters_config_t drafters = {.metrics = config->metrics,
                                            .explore_percent = config->draft_explore_percent};
    td_status_t status = TD_ERR_NO_MEMORY;

    if (loop == NULL) {
        return status;
    }
    loop->config = *config;
    atomic_init(&loop->gone_marked, false);
    status = td_ring_create(RTR_INBOX_MAX, &loop->inbox);
    if (status == TD_OK) {
        td_ring_wake_once(loop->inbox);
        status = rtr_index_create(RTR_INDEX_BLOCKS_DEFAULT, RTR_SLOTS_MAX, &loop->index);
    }
    if (status == TD_OK && config->admin_endpoint != NULL) { /* nobody else asks for them */
        status = rtr_events_create(&loop->events);
        status = status == TD_OK ? rtr_trace_create(&loop->trace) : status;
    }
    if (status == TD_OK) {
        registry.events = loop->events;
        status = rtr_registry_create(&registry, &loop->registry);
    }
    if (status == TD_OK) {
        loop->blocks = (rtr_index_link_t){.index = loop->index,
                                          .registry = loop->registry,
                                          .bus = config->bus,
                                          .metrics = config->metrics};
        status = rtr_drafters_create(&drafters, &loop->drafters);
    }
    if (status == TD_OK) {
        tickets.drafters = loop->drafters;
        tickets.registry = loop->registry;
        tickets.index = loop->index;
        tickets.events = loop->events;
        tickets.trace = loop->trace;
        status = rtr_tickets_create(&tickets, &loop->tickets);
    }
    if (status == TD_OK) {
        status = open_admin(loop);
    }
    if (status != TD_OK) {
        rtr_loop_destroy(loop);
        return status;
    }
    *out = loop;
    return TD_OK;
}

static void drain_inbox(rtr_loop_t *loop, uint32_t limit)
{
    void *item = NULL;

    td_ring_drain_fd(loop->inbox);
    for (uint32_t i = 0; i < limit; i++) {
        if (!td_ring_pop(loop->inbox, &item)) {
            return;
        }
        rtr_tickets_submit(loop->tickets, item);
    }
    td_ring_wake(loop->inbox); /* there may be more */
}

void rtr_loop_destroy(rtr_loop_t *loop)
{
    if (loop == NULL) {
        return;
    }
    if (loop->tickets != NULL) {
        drain_inbox(loop, RTR_INBOX_MAX);
    }
    rtr_admin_destroy(loop->admin);
    rtr_tickets_destroy(loop->tickets);
    rtr_registry_destroy(loop->registry);
    rtr_drafters_destroy(loop->drafters);
    rtr_index_destroy(loop->index);
    rtr_events_destroy(loop->events);
    rtr_trace_destroy(loop->trace);
    if (loop->inbox != NULL) {
        td_ring_destroy(loop->inbox);
    }
    td_free(loop);
}

td_status_t rtr_loop_submit(rtr_loop_t *loop, rtr_request_t *req)
{
    return td_ring_push(loop->inbox, req);
}

void rtr_loop_wake_gone(rtr_loop_t *loop)
{
    atomic_store_explicit(&loop->gone_marked, true, memory_order_release);
    td_ring_wake(loop->inbox);
}

/* A node tells each life of the router once. */
static bool handle_history(rtr_loop_t *loop, const td_msg_t *msg)
{
    uint32_t slot = RTR_PLACE_NONE;

    if (msg->type != TD_MSG_DRAFT_HISTORY) {
        return false;
    }
    slot = rtr_registry_find(loop->registry, msg->sender_id, msg->sender_incarnation);
    if (slot != RTR_PLACE_NONE && rtr_registry_node(loop->registry, slot)->role == TD_ROLE_DECODE) {
        rtr_drafters_remember(loop->drafters, &msg->u.draft_history);
    }
    return true;
}

static void drain_messages(rtr_loop_t *loop)
{
    td_msg_arena_t *arena = NULL;
    td_msg_t msg;

    for (uint32_t i = 0; i < MESSAGES_PER_STEP; i++) {
        if (td_bus_recv(loop->config.bus, &msg, &arena) != TD_OK) {
            return;
        }
        if (!rtr_registry_handle(loop->registry, &msg) &&
            !rtr_tickets_handle(loop->tickets, &msg) &&
            !rtr_index_link_handle(&loop->blocks, &msg) && !handle_history(loop, &msg) &&
            !(loop->admin != NULL && rtr_admin_handle(loop->admin, &msg))) {
            TD_LOG_DEBUG("message not for a router", "type=%d from=%s", (int)msg.type,
                         msg.sender_id);
        }
        td_msg_arena_free(arena);
    }
}

/* Clients that take too long to say what they want. */
static void cut_slow(rtr_loop_t *loop)
{
    const uint64_t now = td_now_ns();
    uint32_t cut = 0;

    if (now < loop->next_cut_ns) {
        return;
    }
    loop->next_cut_ns = now + CUT_MS * TD_NS_PER_MS;
    cut = rtr_gone_cut_slow(loop->config.gone, now);
    if (cut > 0) {
        td_metric_add(loop->config.metrics->slow_clients, cut);
        TD_LOG_WARN("slow clients cut off", "connections=%u", cut);
    }
}

bool rtr_loop_step(rtr_loop_t *loop, int signal_fd, uint32_t timeout_ms)
{
    int fds[4] = {td_ring_fd(loop->inbox), rtr_gone_fd(loop->config.gone)};
    bool readable[4] = {false};
    uint32_t count = 2;
    bool gone = false;

    if (signal_fd >= 0) {
        fds[count++] = signal_fd;
    }
    if (loop->admin != NULL) {
        fds[count++] = rtr_admin_fd(loop->admin);
    }

    if (rtr_tickets_running(loop->tickets) > 0) {
        timeout_ms = TD_MIN(timeout_ms, BUSY_TICK_MS);
    }
    td_bus_wait(loop->config.bus, fds, count,
                loop->admin_waits || loop->registry_waits ? 0 : timeout_ms, readable);
    drain_messages(loop);
    if (readable[0]) {
        drain_inbox(loop, REQUESTS_PER_STEP);
    }
    gone = atomic_exchange_explicit(&loop->gone_marked, false, memory_order_acquire);
    if ((readable[1] && rtr_gone_collect(loop->config.gone) > 0) || gone) {
        rtr_tickets_drop_gone(loop->tickets);
    }
    cut_slow(loop);
    loop->registry_waits = rtr_registry_tick(loop->registry);
    rtr_index_link_tick(&loop->blocks);
    rtr_tickets_tick(loop->tickets);
    rtr_drafters_tick(loop->drafters);
    if (loop->admin != NULL) {
        loop->admin_waits = rtr_admin_step(loop->admin);
    }
    return signal_fd >= 0 && readable[2];
}

void rtr_loop_drain(rtr_loop_t *loop, uint32_t drain_ms)
{
    uint64_t deadline_ns = td_now_ns() + drain_ms * TD_NS_PER_MS;

    TD_LOG_INFO("draining", "requests=%u", rtr_tickets_running(loop->tickets));
    while (rtr_tickets_running(loop->tickets) > 0 && td_remaining_ns(deadline_ns) > 0) {
        (void)rtr_loop_step(loop, -1, DRAIN_STEP_MS);
    }
    drain_inbox(loop, RTR_INBOX_MAX);
    rtr_tickets_end_all(loop->tickets);
    (void)rtr_loop_step(loop, -1, 0); /* the cancels leave */
}

rtr_registry_t *rtr_loop_registry(rtr_loop_t *loop)
{
    return loop->registry;
}

rtr_tickets_t *rtr_loop_tickets(rtr_loop_t *loop)
{
    return loop->tickets;
}

rtr_drafters_t *rtr_loop_drafters(rtr_loop_t *loop)
{
    return loop->drafters;
}

const char *rtr_loop_admin_endpoint(const rtr_loop_t *loop)
{
    return loop->admin == NULL ? "" : rtr_admin_endpoint(loop->admin);
}

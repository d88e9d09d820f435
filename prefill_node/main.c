/* tandem-prefill: computes prompts and hands their KV to decode nodes. */
#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_log.h"
#include "prefill_node/pfn_node.h"

#define CHUNK_TOKENS_MAX 4096

static const td_option_t options[] = {
    TD_PROC_OPTIONS,
    TD_NODE_OPTIONS,
    {"kv-memory", TD_OPTION_BYTES, "512M", "memory of the KV pool", 1 << 20, 1ull << 46},
    {"chunk-tokens", TD_OPTION_COUNT, "256", "prompt tokens of one forward pass", 1,
     CHUNK_TOKENS_MAX},
};

static void on_peer_down(void *ctx, const char *id, uint64_t incarnation)
{
    pfn_node_t *p = ctx;
    pfn_request_t *next = NULL;
    (void)id;
    for (pfn_request_t *r = p->requests; r != NULL; r = next) {
        next = r->next;
        if (r->work.peer_incarnation == incarnation) {
            pfn_request_end(p, r, TD_ERR_PEER_DEAD);
        }
    }
}

static void on_fenced(void *ctx, const char *router, uint64_t incarnation)
{
    pfn_node_t *p = ctx;
    pfn_request_t *next = NULL;
    (void)incarnation;
    for (pfn_request_t *r = p->requests; r != NULL; r = next) {
        next = r->next;
        if (router == NULL || strcmp(r->router, router) == 0) {
            pfn_request_end(p, r, TD_ERR_STALE);
        }
    }
}

/* What other routers than this one have here. */
static void on_share(void *ctx, const char *router, td_msg_heartbeat_t *load)
{
    const pfn_node_t *p = ctx;

    for (const pfn_request_t *r = p->requests; r != NULL; r = r->next) {
        if (r->state < PFN_WAIT_ACK && strcmp(r->router, router) != 0) {
            load->other_requests++;
            load->other_tokens += r->work.prompt_tokens - r->done_tokens;
        }
    }
}

static void handle_cancel(pfn_node_t *p, const char *router, const td_msg_ticket_t *cancel)
{
    pfn_request_t *next = NULL;
    td_node_forget(&p->node, cancel->ticket, cancel->attempt); /* it may overtake its Start */
    for (pfn_request_t *r = p->requests; r != NULL; r = next) {
        next = r->next;
        if (r->ticket == cancel->ticket && r->attempt <= cancel->attempt &&
            strcmp(r->router, router) == 0) {
            pfn_request_end(p, r, TD_ERR_CANCELLED);
        }
    }
}

static void handle_answer(pfn_node_t *p, const td_msg_t *msg)
{
    const td_msg_ticket_t *t = &msg->u.ticket;
    pfn_request_t *r = pfn_request_find(p, t->ticket, t->attempt);

    if (r == NULL || msg->sender_incarnation != r->work.peer_incarnation) {
        return;
    }
    if (msg->type == TD_MSG_KV_ACK && r->state == PFN_WAIT_ACK) {
        pfn_request_end(p, r, TD_OK);
    } else if (msg->type == TD_MSG_KV_FAILED) {
        if (t->status == TD_ERR_CORRUPT && !r->computing) {
            pfn_prefix_drop_wrong(p, r);
        }
        pfn_request_end(p, r, t->status < 0 ? t->status : TD_ERR_PROTOCOL);
    }
}

static void handle(pfn_node_t *p, const td_msg_t *msg, td_msg_arena_t **arena)
{
    const bool from_router = td_member_is_router(p->node.member, msg->sender_id);

    if (td_member_handle(p->node.member, msg) || kvs_client_handle(p->store, msg) ||
        td_kv_feed_handle(p->node.feed, msg)) {
        return;
    }
    if (msg->type == TD_MSG_START && from_router) {
        pfn_request_start(p, msg, arena);
    } else if (msg->type == TD_MSG_CANCEL && from_router) {
        handle_cancel(p, msg->sender_id, &msg->u.ticket);
    } else if (msg->type == TD_MSG_KV_ACK || msg->type == TD_MSG_KV_FAILED) {
        handle_answer(p, msg);
    } else {
        TD_LOG_DEBUG("message not for a prefill node", "type=%d from=%s", (int)msg->type,
                     msg->sender_id);
    }
}

static void drain_messages(pfn_node_t *p)
{
    td_msg_arena_t *arena = NULL;
    td_msg_t msg;

    for (uint32_t i = 0; i < TD_NODE_MESSAGES_PER_TICK; i++) {
        if (td_bus_recv(p->node.proc.bus, &msg, &arena) != TD_OK) {
            return;
        }
        handle(p, &msg, &arena);
        td_msg_arena_free(arena);
    }
}

static td_msg_heartbeat_t load_of(const pfn_node_t *p)
{
    td_pool_counts_t c = td_pool_counts(p->node.pool);
    td_msg_heartbeat_t load = {.free_blocks = c.free + c.cached,
                               .total_blocks = c.total,
                               .tokens_per_s = p->tokens_per_s,
                               .fetched_bytes = td_transfer_fetched_bytes(p->node.transfer),
                               .draining = p->node.draining};
    for (const pfn_request_t *r = p->requests; r != NULL; r = r->next) {
        if (r->state < PFN_WAIT_ACK) {
            load.queued_requests++;
            load.queued_tokens += r->work.prompt_tokens - r->done_tokens;
        }
    }
    return load;
}

static void run(pfn_node_t *p)
{
    td_node_t *n = &p->node;
    for (;;) {
        int fds[3] = {n->proc.signal_fd, td_worker_fd(n->worker), td_ring_fd(n->fetched)};
        bool readable[3] = {false, false, false};
        td_node_fetch_t *job = NULL;
        td_msg_heartbeat_t load;

        td_bus_wait(n->proc.bus, fds, TD_ARRAY_LEN(fds),
                    td_kv_feed_wait_ms(n->feed, TD_NODE_TICK_MS), readable);
        if (td_node_ends(n, readable[0], p->request_count, kvs_client_pinned(p->store))) {
            return;
        }
        pfn_batch_progress(p);
        if (readable[2]) {
            td_ring_drain_fd(n->fetched);
        }
        while ((job = td_node_fetch_next(n)) != NULL) {
            pfn_prefix_fetched(p, job);
        }
        drain_messages(p);
        kvs_client_tick(p->store);
        pfn_request_tick(p);
        pfn_batch_schedule(p);
        td_node_update_kv_metrics(n);
        td_metric_set(p->running, p->request_count);
        load = load_of(p);
        td_node_tick(n, &load);
    }
}

static td_status_t start(pfn_node_t *p)
{
    const td_config_t *c = p->node.proc.config;
    td_node_setup_t setup = {
        .role = TD_ROLE_PREFILL,
        .metric_prefix = "tandem_prefill",
        .kv_metric = "tandem_prefill_kv_blocks",
        .checksum_metric = "tandem_prefill_checksum_failures_total",
        .indexed_metric = "tandem_prefill_kv_indexed_blocks",
        .rows_max = (uint32_t)td_config_u64(c, "chunk-tokens"),
        .kv_bytes = td_config_u64(c, "kv-memory"),
        .events = {.ctx = p, .peer_down = on_peer_down, .fenced = on_fenced, .share = on_share}};

    setup.logit_rows_max = TD_MIN(setup.rows_max, PFN_LOGIT_ROWS_MAX);
    p->chunk_tokens = setup.rows_max;
    p->batch.rows = td_calloc(p->chunk_tokens, sizeof(*p->batch.rows));
    p->scratch_blocks = td_calloc(TD_MSG_BLOCKS_MAX, sizeof(*p->scratch_blocks));
    p->scratch_epochs = td_calloc(TD_MSG_BLOCKS_MAX, sizeof(*p->scratch_epochs));
    p->scratch_sums = td_calloc(TD_MSG_BLOCKS_MAX, sizeof(*p->scratch_sums));
    p->scratch_keys = td_calloc(TD_MSG_BLOCKS_MAX, sizeof(*p->scratch_keys));
    if (p->batch.rows == NULL || p->scratch_blocks == NULL || p->scratch_epochs == NULL ||
        p->scratch_sums == NULL || p->scratch_keys == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    pfn_metrics_declare(p);
    TD_TRY(td_node_open(&p->node, &setup));
    TD_TRY(kvs_donor_create(&p->node, &p->donor));
    return kvs_client_create(p->node.proc.bus, p->node.member, p->node.pool, &p->store);
}

static void stop(pfn_node_t *p)
{
    kvs_donor_destroy(p->donor);
    td_node_stop(&p->node);
    while (p->requests != NULL) {
        pfn_request_t *r = p->requests;
        r->computing = false; /* the worker and the transfer have ended */
        r->fetches = 0;
        if (r->state == PFN_DRAIN) {
            pfn_request_settle(p, r);
        } else {
            pfn_request_end(p, r, TD_ERR_CANCELLED);
        }
    }
    kvs_client_destroy(p->store);
    td_free(p->batch.rows);
    td_free(p->scratch_blocks);
    td_free(p->scratch_epochs);
    td_free(p->scratch_sums);
    td_free(p->scratch_keys);
}

int main(int argc, char **argv)
{
    static pfn_node_t node;
    td_config_next_t next =
        td_proc_init(&node.node.proc, "tandem-prefill", "prefill",
                     "Tandem's prefill node: computes prompts, hands KV blocks to decode nodes.",
                     options, TD_ARRAY_LEN(options), argc, argv);
    int rc = next == TD_CONFIG_EXIT_USAGE ? 2 : 0;

    if (next == TD_CONFIG_RUN) {
        rc = start(&node) == TD_OK ? 0 : 1;
        if (rc == 0) {
            run(&node);
            rc = node.node.failed ? 1 : 0;
        }
        stop(&node);
    }
    td_node_close(&node.node);
    return rc;
}

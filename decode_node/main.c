/* tandem-decode: takes prompts' KV from prefill nodes and generates. */
#include <math.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/base/td_log.h"
#include "decode_node/dcn_node.h"

static const td_option_t options[] = {
    TD_PROC_OPTIONS,
    TD_NODE_OPTIONS,
    {"kv-memory", TD_OPTION_BYTES, "1G", "memory of the KV pool", 1 << 20, 1ull << 46},
    {"draft-model", TD_OPTION_TEXT, NULL,
     "GGUF file of a smaller model with the same vocabulary, for the drafter draft_model"},
    {"draft-kv-memory", TD_OPTION_BYTES, "256M", "memory of its KV pool", 1 << 16, 1ull << 46},
    {"medusa-heads", TD_OPTION_TEXT, NULL,
     "file of tandem-train-heads, made for the model, for the drafter medusa"},
    {"draft-confidence", TD_OPTION_COUNT, "40",
     "percent; drafts of a model end before a token that it finds less likely", 0, 100},
    {"medusa-confidence", TD_OPTION_COUNT, "0",
     "percent; the same for the drafts of medusa, which have to promise more than they cost "
     "besides",
     0, 100},
    {"draft-tree", TD_OPTION_CHOICE, "auto",
     "second choices of the drafter medusa that are verified beside its drafts: those that promise "
     "more than they cost, none, or all",
     0, 0, DCN_TREE_MODES},
    {"early-exit-layers", TD_OPTION_COUNT, "0",
     "layers of the drafter early_exit, 0 = a third of the model's", 0, TD_KV_LAYERS_MAX},
    {"batch-max", TD_OPTION_COUNT, "64", "sequences of one step", 1, DCN_BATCH_ROWS_MAX},
    {"memo-memory", TD_OPTION_BYTES, "32M", "of answers that the drafter memo remembers; 0 = none",
     0, TD_MEMO_BYTES_MAX},
    {"memo-max-age", TD_OPTION_MS, "86400s", "after which an answer is forgotten", 1,
     30ull * 86400000},
};

static void on_peer_down(void *ctx, const char *id, uint64_t incarnation)
{
    dcn_node_t *d = ctx;
    dcn_ticket_t *next = NULL;
    (void)id;
    for (dcn_ticket_t *t = d->tickets; t != NULL; t = next) {
        next = t->next;
        /* Once admitted a request needs its prefill node no more. */
        if (t->work.peer_incarnation == incarnation && t->state == DCN_FETCHING) {
            dcn_ticket_end(d, t, TD_ERR_PEER_DEAD);
        }
    }
}

static void on_fenced(void *ctx, const char *router, uint64_t incarnation)
{
    dcn_node_t *d = ctx;
    dcn_ticket_t *next = NULL;
    (void)incarnation;
    for (dcn_ticket_t *t = d->tickets; t != NULL; t = next) {
        next = t->next;
        if (router == NULL || strcmp(t->router, router) == 0) {
            dcn_ticket_end(d, t, TD_ERR_STALE);
        }
    }
}

/* What other routers than this one have here. */
static void on_share(void *ctx, const char *router, td_msg_heartbeat_t *load)
{
    const dcn_node_t *d = ctx;

    for (const dcn_ticket_t *t = d->tickets; t != NULL; t = t->next) {
        if (t->state != DCN_DRAIN && strcmp(t->router, router) != 0) {
            load->other_requests += t->work.n;
            load->other_tokens += t->state == DCN_RUNNING ? t->live : 0;
            load->other_blocks += dcn_ticket_promise(d, t);
        }
    }
}

static void handle_cancel(dcn_node_t *d, const char *router, const td_msg_ticket_t *cancel)
{
    dcn_ticket_t *next = NULL;
    td_node_forget(&d->node, cancel->ticket, cancel->attempt); /* it may overtake its Reserve */
    for (dcn_ticket_t *t = d->tickets; t != NULL; t = next) {
        next = t->next;
        if (t->ticket == cancel->ticket && t->attempt <= cancel->attempt &&
            strcmp(t->router, router) == 0) {
            dcn_ticket_end(d, t, TD_ERR_CANCELLED);
        }
    }
}

static void handle(dcn_node_t *d, const td_msg_t *msg, td_msg_arena_t **arena)
{
    const bool from_router = td_member_is_router(d->node.member, msg->sender_id);

    if (td_member_handle(d->node.member, msg)) {
        if (msg->type == TD_MSG_REGISTERED && msg->u.registered.accepted) {
            dcn_worth_tell(d, msg->sender_id, msg->sender_incarnation);
        }
        return;
    }
    if (kvs_client_handle(d->store, msg) || td_kv_feed_handle(d->node.feed, msg)) {
        return;
    }
    if (msg->type == TD_MSG_RESERVE && from_router) {
        dcn_ticket_reserve(d, msg, arena);
    } else if (msg->type == TD_MSG_CANCEL && from_router) {
        handle_cancel(d, msg->sender_id, &msg->u.ticket);
    } else if (msg->type == TD_MSG_MEMO_FOUND) {
        dcn_memo_told(d, &msg->u.memo);
    } else if (msg->type == TD_MSG_LAYERS_READY) {
        dcn_receive_layers(d, msg);
    } else if (msg->type == TD_MSG_KV_READY) {
        dcn_receive_ready(d, msg, arena);
    } else {
        TD_LOG_DEBUG("message not for a decode node", "type=%d from=%s", (int)msg->type,
                     msg->sender_id);
    }
}

static void drain_messages(dcn_node_t *d)
{
    td_msg_arena_t *arena = NULL;
    td_msg_t msg;

    for (uint32_t i = 0; i < TD_NODE_MESSAGES_PER_TICK; i++) {
        if (td_bus_recv(d->node.proc.bus, &msg, &arena) != TD_OK) {
            return;
        }
        handle(d, &msg, &arena);
        td_msg_arena_free(arena);
    }
}

static td_msg_heartbeat_t load_of(dcn_node_t *d)
{
    td_pool_counts_t c = td_pool_counts(d->node.pool);
    td_msg_heartbeat_t load = {.free_blocks = c.free + c.cached,
                               .total_blocks = c.total,
                               .tokens_per_s = d->tokens_per_s,
                               .fetched_bytes = td_transfer_fetched_bytes(d->node.transfer)};
    for (const dcn_ticket_t *t = d->tickets; t != NULL; t = t->next) {
        if (t->state == DCN_FETCHING || t->state == DCN_WAITING || t->state == DCN_RETURNING) {
            load.queued_requests++;
        } else if (t->state == DCN_RUNNING) {
            load.queued_tokens += t->live; /* sequences running */
        }
    }
    load.draining = d->node.draining;
    dcn_worth_costs(d, &load);
    return load;
}

static void run(dcn_node_t *d)
{
    td_node_t *n = &d->node;
    for (;;) {
        int fds[3] = {n->proc.signal_fd, td_worker_fd(n->worker), td_ring_fd(n->fetched)};
        bool readable[3] = {false, false, false};
        td_node_fetch_t *job = NULL;
        td_msg_heartbeat_t load;

        td_bus_wait(n->proc.bus, fds, TD_ARRAY_LEN(fds),
                    td_kv_feed_wait_ms(n->feed, TD_NODE_TICK_MS), readable);
        if (td_node_ends(n, readable[0], d->ticket_count, kvs_client_pinned(d->store))) {
            return;
        }
        dcn_batch_progress(d);
        if (readable[2]) {
            td_ring_drain_fd(n->fetched);
        }
        while ((job = td_node_fetch_next(n)) != NULL) {
            dcn_receive_fetched(d, job);
        }
        drain_messages(d);
        kvs_client_tick(d->store);
        dcn_ticket_tick(d);
        dcn_batch_schedule(d);
        td_node_update_kv_metrics(n);
        dcn_draft_model_update_metrics(d);
        td_metric_set(d->running, d->ticket_count);
        load = load_of(d);
        td_node_tick(n, &load);
    }
}

static td_status_t open_drafters(void *ctx)
{
    dcn_node_t *d = ctx;
    const uint64_t percent = td_config_u64(d->node.proc.config, "draft-confidence");

    d->draft_chance_min = (float)percent / 100;
    d->draft_logprob_min = percent == 0 ? -INFINITY : (float)log((double)percent / 100);
    TD_TRY(dcn_draft_exit_open(d));
    TD_TRY(dcn_draft_medusa_open(d));
    TD_TRY(dcn_draft_model_open(d));
    d->node.drafters = dcn_worth_drafters(d);
    return TD_OK;
}

static td_status_t start(dcn_node_t *d)
{
    const td_config_t *c = d->node.proc.config;
    td_node_setup_t setup = {
        .role = TD_ROLE_DECODE,
        .metric_prefix = "tandem_decode",
        .kv_metric = "tandem_decode_kv_blocks",
        .checksum_metric = "tandem_decode_checksum_failures_total",
        .indexed_metric = "tandem_decode_kv_indexed_blocks",
        .kv_bytes = td_config_u64(c, "kv-memory"),
        .open_more = open_drafters,
        .events = {.ctx = d, .peer_down = on_peer_down, .fenced = on_fenced, .share = on_share}};
    td_status_t status = TD_OK;

    d->batch_max = (uint32_t)td_config_u64(c, "batch-max");
    /* A ticket's choices stay together, so a step may hold more than batch_max. */
    d->rows_max = TD_MIN(DCN_BATCH_ROWS_MAX, d->batch_max + 128);
    setup.rows_max = setup.logit_rows_max = d->rows_max;
    dcn_metrics_declare(d);
    TD_TRY(td_draft_stats_create(DCN_DRAFT_PAST_MAX, &d->past));
    TD_TRY(td_node_open(&d->node, &setup));
    TD_TRY(kvs_donor_create(&d->node, &d->donor));
    if (td_config_u64(c, "memo-memory") > 0) {
        status =
            td_memo_create(td_config_u64(c, "memo-memory"), td_node_layout(&d->node)->block_tokens,
                           td_config_u64(c, "memo-max-age") * TD_NS_PER_MS, &d->memo);
        if (status != TD_OK) {
            TD_LOG_ERROR("memory of answers not made", "status=%s try=\"--memo-memory\"",
                         td_status_name(status));
            return status;
        }
    }
    return kvs_client_create(d->node.proc.bus, d->node.member, d->node.pool, &d->store);
}

static void stop(dcn_node_t *d)
{
    kvs_donor_destroy(d->donor);
    td_node_stop(&d->node);
    dcn_tree_release(d);
    while (d->tickets != NULL) {
        dcn_ticket_t *t = d->tickets;
        t->computing = false; /* the worker and the transfer have ended */
        t->fetches = 0;
        if (t->state == DCN_DRAIN) {
            dcn_ticket_settle(d, t);
        } else {
            dcn_ticket_end(d, t, TD_ERR_CANCELLED);
        }
    }
    kvs_client_destroy(d->store);
    td_memo_destroy(d->memo);
    td_free(d->chances);
    td_draft_stats_destroy(d->past);
    td_str_fini(&d->out.text);
    td_str_fini(&d->text);
    td_str_fini(&d->raw);
}

int main(int argc, char **argv)
{
    static dcn_node_t node;
    td_config_next_t next =
        td_proc_init(&node.node.proc, "tandem-decode", "decode",
                     "Tandem's decode node: fetches prompts' KV blocks and generates tokens.",
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
    dcn_tree_close(&node);
    dcn_draft_medusa_close(&node);
    dcn_draft_model_close(&node);
    td_node_close(&node.node);
    return rc;
}

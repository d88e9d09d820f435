#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/base/td_log.h"
#include "proto/admin.pb-c.h"
#include "router/rtr_admin.h"
#include "router/rtr_admin_socket.h"

#define PB(type) Tandem__Admin__V1__##type
#define CODE(name) TANDEM__ADMIN__V1__CODE__##name
#define REQUESTS_PER_STEP 32u
#define STEP_NS (5 * TD_NS_PER_MS) /* after that the router's own work comes first */
#define STORE_MS 2000u
#define LEASE_MS_MIN 1000u
#define LEASE_MS_MAX 600000u

/* An order that the store has been given. */
typedef struct ask {
    uint64_t request; /* names it to the store; 0: the place is free */
    uint64_t id;      /* the client's */
    rtr_admin_name_t from;
    uint64_t deadline_ns;
} ask_t;

typedef struct subscriber {
    uint64_t until_ns; /* 0: the place is free */
    uint64_t id;
    uint64_t next; /* number of the event that it gets next */
    rtr_admin_name_t from;
} subscriber_t;

struct rtr_admin {
    rtr_admin_config_t config;
    rtr_admin_socket_t *socket;
    uint64_t started_ns;
    uint64_t refused; /* requests that were none */
    uint64_t next_warning_ns;
    td_str_t body; /* scratch */
    ask_t asks[RTR_ADMIN_ASKS_MAX];
    subscriber_t subscribers[RTR_ADMIN_SUBSCRIBERS_MAX];
};

td_status_t rtr_admin_create(const rtr_admin_config_t *config, rtr_admin_t **out)
{
    rtr_admin_t *a = td_calloc(1, sizeof(*a));
    td_status_t status = TD_ERR_NO_MEMORY;

    if (a == NULL) {
        return status;
    }
    a->config = *config;
    a->started_ns = td_now_ns();
    status = rtr_admin_socket_open(config->endpoint, config->folder, &a->socket);
    if (status != TD_OK) {
        rtr_admin_destroy(a);
        return status;
    }
    *out = a;
    return TD_OK;
}

void rtr_admin_destroy(rtr_admin_t *a)
{
    if (a == NULL) {
        return;
    }
    rtr_admin_socket_close(a->socket);
    td_str_fini(&a->body);
    td_free(a);
}

const char *rtr_admin_endpoint(const rtr_admin_t *a)
{
    return rtr_admin_socket_endpoint(a->socket);
}

int rtr_admin_fd(const rtr_admin_t *a)
{
    return rtr_admin_socket_fd(a->socket);
}

/* --- replies ---------------------------------------------------------------------------------- */

/* protobuf-c has no const; it only reads what is packed. */
static char *lend(const char *text)
{
    return (char *)(uintptr_t)text;
}

/* False: the client is gone, or does not read. */
static bool send_reply(rtr_admin_t *a, const rtr_admin_name_t *to, PB(Reply) * reply)
{
    const size_t len = protobuf_c_message_get_packed_size(&reply->base);
    td_status_t status = TD_ERR_NO_MEMORY;
    uint8_t *bytes = td_calloc(1, len + 1);

    if (bytes != NULL) {
        (void)protobuf_c_message_pack(&reply->base, bytes);
        status = rtr_admin_socket_send(a->socket, to, bytes, len);
        td_free(bytes);
    }
    if (status != TD_OK) {
        TD_LOG_DEBUG("admin reply not sent", "status=%s bytes=%zu", td_status_name(status), len);
    }
    return status == TD_OK;
}

static void send_error(rtr_admin_t *a, const rtr_admin_name_t *to, uint64_t id, PB(Code) code,
                       const char *error)
{
    PB(Reply) reply = TANDEM__ADMIN__V1__REPLY__INIT;

    reply.id = id;
    reply.code = code;
    reply.error = lend(error);
    (void)send_reply(a, to, &reply);
}

static void send_done(rtr_admin_t *a, const rtr_admin_name_t *to, uint64_t id)
{
    send_error(a, to, id, CODE(OK), "");
}

/* --- status and nodes ------------------------------------------------------------------------- */

typedef struct count_list {
    PB(Count) counts[8];
    PB(Count) * list[8];
    uint32_t count;
} count_list_t;

static void count_add(count_list_t *l, const char *name, uint64_t count)
{
    TD_ASSERT(l->count < TD_ARRAY_LEN(l->counts));
    tandem__admin__v1__count__init(&l->counts[l->count]);
    l->counts[l->count].name = lend(name);
    l->counts[l->count].count = count;
    l->list[l->count] = &l->counts[l->count];
    l->count++;
}

static void fill_index(const rtr_admin_config_t *c, count_list_t *nodes, count_list_t *counts,
                       PB(Status) * s)
{
    const rtr_index_counts_t *of = rtr_index_counts(c->index);

    for (uint32_t i = RTR_INDEX_STATES; i > 0; i--) {
        count_add(nodes, rtr_index_state_name((rtr_index_state_t)(i - 1)),
                  td_metric_get(c->metrics->index_nodes[i - 1]));
    }
    count_add(counts, "events", of->events);
    count_add(counts, "gaps", of->gaps);
    count_add(counts, "replays", of->replays);
    count_add(counts, "snapshots", of->snapshots);
    count_add(counts, "mismatches", of->mismatches);
    count_add(counts, "dropped", of->dropped);
    s->n_index_nodes = nodes->count;
    s->index_nodes = nodes->list;
    s->n_index = counts->count;
    s->index = counts->list;
}

static void answer_status(rtr_admin_t *a, const rtr_admin_name_t *to, uint64_t id)
{
    const rtr_admin_config_t *c = &a->config;
    PB(Reply) reply = TANDEM__ADMIN__V1__REPLY__INIT;
    PB(Status) s = TANDEM__ADMIN__V1__STATUS__INIT;
    PB(Count) counts[RTR_OUTCOME_COUNT];
    count_list_t nodes = {.count = 0};
    count_list_t index = {.count = 0};
    PB(Count) * list[RTR_OUTCOME_COUNT];

    for (uint32_t i = 0; i < RTR_OUTCOME_COUNT; i++) {
        tandem__admin__v1__count__init(&counts[i]);
        counts[i].name = lend(rtr_outcome_name((rtr_outcome_t)i));
        counts[i].count = td_metric_get(c->metrics->requests[i]);
        list[i] = &counts[i];
    }
    s.version = lend(TD_VERSION);
    s.model = lend(c->model->name);
    s.numerics_class = lend(rtr_registry_numerics(c->registry));
    s.kv_codec = lend(c->kv_codec);
    s.block_tokens = c->block_tokens;
    s.context_max = c->model->context_max;
    s.uptime_ms = (td_now_ns() - a->started_ns) / TD_NS_PER_MS;
    s.requests_running = rtr_tickets_running(c->tickets);
    s.prompts_queued = rtr_tickets_queued(c->tickets);
    s.n_requests = RTR_OUTCOME_COUNT;
    s.requests = list;
    s.retries = td_metric_get(c->metrics->retries);
    s.failovers = td_metric_get(c->metrics->failovers);
    s.hint_blocks = rtr_index_blocks(c->index);
    fill_index(c, &nodes, &index, &s);
    s.prompt_tokens = td_metric_get(c->metrics->prompt_tokens);
    s.cached_tokens = td_metric_get(c->metrics->cached_tokens);
    s.completion_tokens = td_metric_get(c->metrics->completion_tokens);
    reply.id = id;
    reply.answer_case = TANDEM__ADMIN__V1__REPLY__ANSWER_STATUS;
    reply.status = &s;
    (void)send_reply(a, to, &reply);
}

typedef struct node_view {
    PB(Node) pb;
    char *drafters[TD_DRAFTER_KINDS];
} node_view_t;

static void fill_node(const rtr_node_t *n, bool is_master, const rtr_index_slot_t *index,
                      node_view_t *out)
{
    PB(Node) *pb = &out->pb;

    tandem__admin__v1__node__init(pb);
    pb->id = lend(n->id);
    pb->role = lend(td_role_name(n->role));
    pb->state = !n->live             ? TANDEM__ADMIN__V1__NODE_STATE__DEAD
                : rtr_node_drains(n) ? TANDEM__ADMIN__V1__NODE_STATE__DRAINING
                                     : TANDEM__ADMIN__V1__NODE_STATE__LIVE;
    pb->incarnation = n->incarnation;
    pb->endpoint = lend(n->endpoint);
    pb->http = lend(n->http);
    pb->silent_ms = (td_now_ns() - n->seen_ns) / TD_NS_PER_MS;
    pb->free_blocks = n->beat.free_blocks;
    pb->total_blocks = n->beat.total_blocks;
    pb->prefills = (uint32_t)TD_MIN(n->backlog.work.prompts, UINT32_MAX);
    pb->sequences = n->sequences;
    pb->ahead_tokens = n->backlog.work.tokens;
    pb->promised_blocks = n->promised_blocks;
    pb->tokens_per_s = n->beat.tokens_per_s;
    pb->drained = n->drained;
    pb->shunned = rtr_breaker_is_open(&n->breaker, td_now_ns());
    pb->store_master = is_master;
    if (n->live && (n->role != TD_ROLE_KVSTORE || is_master)) {
        pb->index = lend(rtr_index_state_name(index->state));
    }
    pb->index_blocks = index->blocks;
    pb->index_digest = index->digest;
    pb->index_gaps = index->gaps;
    pb->drafters = out->drafters;
    for (uint32_t i = 0; i < TD_DRAFTER_KINDS; i++) {
        if ((n->drafters & 1u << i) != 0) {
            out->drafters[pb->n_drafters++] = lend(td_drafter_name((td_drafter_t)i));
        }
    }
}

static void answer_nodes(rtr_admin_t *a, const rtr_admin_name_t *to, uint64_t id)
{
    rtr_registry_t *reg = a->config.registry;
    const uint32_t slots = rtr_registry_slots(reg);
    const rtr_node_t *master = rtr_registry_store_master(reg);
    PB(Reply) reply = TANDEM__ADMIN__V1__REPLY__INIT;
    PB(Nodes) nodes = TANDEM__ADMIN__V1__NODES__INIT;
    node_view_t *views = td_calloc(slots + 1, sizeof(*views));
    PB(Node) **list = td_calloc(slots + 1, sizeof(PB(Node) *));

    for (uint32_t i = 0; views != NULL && list != NULL && i < slots; i++) {
        const rtr_node_t *n = rtr_registry_node(reg, i);
        rtr_index_slot_t index;
        if (n->known) {
            rtr_index_look(a->config.index, i, td_now_ns(), &index);
            fill_node(n, n == master, &index, &views[nodes.n_nodes]);
            list[nodes.n_nodes] = &views[nodes.n_nodes].pb;
            nodes.n_nodes++;
        }
    }
    nodes.nodes = list;
    reply.id = id;
    reply.answer_case = TANDEM__ADMIN__V1__REPLY__ANSWER_NODES;
    reply.nodes = &nodes;
    if (views != NULL && list != NULL) {
        (void)send_reply(a, to, &reply);
    }
    td_free(views);
    td_free(list);
}

static void order_drain(rtr_admin_t *a, const rtr_admin_name_t *to, uint64_t id,
                        const PB(DrainRequest) * order)
{
    rtr_registry_t *reg = a->config.registry;

    for (uint32_t i = 0; i < rtr_registry_slots(reg); i++) {
        rtr_node_t *n = rtr_registry_node(reg, i);
        if (!n->known || strcmp(n->id, order->node) != 0) {
            continue;
        }
        if (n->role == TD_ROLE_KVSTORE) {
            send_error(a, to, id, CODE(INVALID), "a prefill or decode node is expected");
            return;
        }
        if (n->drained != order->drained) {
            n->drained = order->drained;
            TD_LOG_INFO(order->drained ? "node drained" : "node undrained", "node=%s", n->id);
            rtr_events_add(a->config.events,
                           order->drained ? RTR_EVENT_DRAINED : RTR_EVENT_UNDRAINED, n->id, "", "");
        }
        send_done(a, to, id);
        return;
    }
    send_error(a, to, id, CODE(NOT_FOUND), "no such node: `nodes` lists them");
}

/* --- the store -------------------------------------------------------------------------------- */

/* Full blocks of what the request names. Answers why not, or NULL. */
static const char *keys_of(rtr_admin_t *a, const PB(StoreRequest) * r, td_block_key_t **keys_out,
                           uint32_t *count_out)
{
    uint32_t *ids = NULL;
    const uint32_t *tokens = r->tokens;
    size_t count = r->n_tokens;
    const rtr_tenant_t *tenant = NULL;
    td_str_t salt = {0};
    td_block_key_t *keys = NULL;

    if (r->keys.len > 0) {
        count = r->keys.len / TD_BLOCK_KEY_BYTES;
        if (r->keys.len % TD_BLOCK_KEY_BYTES != 0 || count > RTR_ADMIN_KEYS_MAX) {
            return "keys: 16 bytes each, 4096 keys at most";
        }
        keys = td_calloc(count, sizeof(*keys));
        if (keys == NULL) {
            return "out of memory";
        }
        memcpy(keys, r->keys.data, r->keys.len);
        *keys_out = keys;
        *count_out = (uint32_t)count;
        return NULL;
    }
    if (r->cache_salt.len > TD_CACHE_SALT_BYTES_MAX) {
        return "cache_salt: 256 bytes at most";
    }
    if (r->tenant[0] != '\0') {
        tenant = a->config.tenants == NULL ? NULL : rtr_tenants_find(a->config.tenants, r->tenant);
        if (tenant == NULL) {
            return "tenant: one that `tenants` lists is expected";
        }
    }
    if (count == 0) {
        if (td_tokenizer_encode(a->config.model->tok, r->prompt, strlen(r->prompt), true, &ids,
                                &count) != TD_OK) {
            return "prompt: not tokenised";
        }
        tokens = ids;
    }
    count = TD_MIN(count / a->config.block_tokens, RTR_ADMIN_KEYS_MAX);
    keys = count == 0 ? NULL : td_calloc(count, sizeof(*keys));
    if (keys != NULL && (td_str_append(&salt, r->cache_salt.data, r->cache_salt.len) != TD_OK ||
                         rtr_tenant_salt(tenant, a->config.secret, &salt) != TD_OK)) {
        td_free(keys);
        keys = NULL;
    }
    if (keys != NULL) {
        td_block_root_t root;
        rtr_tickets_root(a->config.tickets, salt.bytes, salt.len, &root);
        td_block_keys(&root, tokens, count * a->config.block_tokens, a->config.block_tokens, keys);
    }
    td_str_fini(&salt);
    td_free(ids);
    *keys_out = keys;
    *count_out = (uint32_t)count;
    return keys != NULL ? NULL : "prompt, tokens or keys of at least one full block are expected";
}

static ask_t *free_ask(rtr_admin_t *a)
{
    for (uint32_t i = 0; i < RTR_ADMIN_ASKS_MAX; i++) {
        if (a->asks[i].request == 0) {
            return &a->asks[i];
        }
    }
    return NULL;
}

static td_status_t send_order(rtr_admin_t *a, const rtr_node_t *master, PB(StoreAction) action,
                              uint64_t request, const td_block_key_t *keys, uint32_t count)
{
    td_msg_t msg = {.type = action == TANDEM__ADMIN__V1__STORE_ACTION__EVICT ? TD_MSG_STORE_REMOVE
                                                                             : TD_MSG_STORE_PIN};

    msg.u.blocks = (td_msg_blocks_t){
        .request = request,
        .pin = action == TANDEM__ADMIN__V1__STORE_ACTION__PIN_SOFT   ? TD_MSG_PIN_SOFT
               : action == TANDEM__ADMIN__V1__STORE_ACTION__PIN_HARD ? TD_MSG_PIN_HARD
                                                                     : TD_MSG_PIN_NONE,
        .count = count,
        .keys = keys};
    return td_bus_send(a->config.bus, master->id, &msg);
}

static void order_store(rtr_admin_t *a, const rtr_admin_name_t *from, uint64_t id,
                        const PB(StoreRequest) * r)
{
    const rtr_node_t *master = rtr_registry_store_master(a->config.registry);
    ask_t *ask = free_ask(a);
    td_block_key_t *keys = NULL;
    const char *why = NULL;
    uint32_t count = 0;

    if (r->action <= TANDEM__ADMIN__V1__STORE_ACTION__STORE_UNSPECIFIED ||
        r->action > TANDEM__ADMIN__V1__STORE_ACTION__EVICT) {
        send_error(a, from, id, CODE(INVALID), "action: PIN_SOFT, PIN_HARD, UNPIN or EVICT");
        return;
    }
    if (master == NULL) {
        send_error(a, from, id, CODE(NOT_FOUND), "there is no store");
        return;
    }
    if (ask == NULL) {
        send_error(a, from, id, CODE(BUSY), "the store has enough orders to answer: later");
        return;
    }
    why = keys_of(a, r, &keys, &count);
    if (why != NULL) {
        send_error(a, from, id, CODE(INVALID), why);
        return;
    }
    *ask = (ask_t){.request = td_random_u64() | 1,
                   .id = id,
                   .from = *from,
                   .deadline_ns = td_now_ns() + STORE_MS * TD_NS_PER_MS};
    if (send_order(a, master, r->action, ask->request, keys, count) != TD_OK) {
        ask->request = 0;
        send_error(a, from, id, CODE(TIMEOUT), "the store takes no orders now");
    }
    td_free(keys);
}

bool rtr_admin_handle(rtr_admin_t *a, const td_msg_t *msg)
{
    const td_msg_blocks_t *m = &msg->u.blocks;

    if (msg->type != TD_MSG_STORE_RESULT) {
        return false;
    }
    for (uint32_t i = 0; i < RTR_ADMIN_ASKS_MAX; i++) {
        ask_t *ask = &a->asks[i];
        PB(Reply) reply = TANDEM__ADMIN__V1__REPLY__INIT;
        PB(StoreResult) r = TANDEM__ADMIN__V1__STORE_RESULT__INIT;
        if (ask->request == 0 || ask->request != m->request) {
            continue;
        }
        r.texts = td_calloc(m->count, sizeof(*r.texts));
        r.statuses = td_calloc(m->count, sizeof(*r.statuses));
        for (uint32_t k = 0; r.texts != NULL && r.statuses != NULL && k < m->count; k++) {
            r.statuses[k] = (int32_t)m->statuses[k];
            r.texts[k] = lend(td_status_name(m->statuses[k]));
            r.n_statuses = r.n_texts = m->count;
        }
        r.keys.data = (uint8_t *)(uintptr_t)m->keys;
        r.keys.len = m->count * sizeof(*m->keys);
        reply.id = ask->id;
        reply.answer_case = TANDEM__ADMIN__V1__REPLY__ANSWER_STORE;
        reply.store = &r;
        (void)send_reply(a, &ask->from, &reply);
        ask->request = 0;
        td_free(r.texts);
        td_free(r.statuses);
        break;
    }
    return true; /* or it came too late */
}

/* --- what drafts were worth ------------------------------------------------------------------- */

static void fill_entry(const td_draft_past_t *p, PB(DraftEntry) * pb)
{
    tandem__admin__v1__draft_entry__init(pb);
    pb->tenant = p->key.tenant;
    pb->prompt_class = lend(rtr_prompt_class_name(p->key.prompt_class));
    pb->drafter = lend(td_drafter_name((td_drafter_t)p->key.drafter));
    pb->tokens_per_step = p->steps[0] > 0 ? p->tokens / p->steps[0] : 0;
    pb->tokens_per_s = p->decode_s > 0 ? p->tokens / p->decode_s : 0;
    pb->steps = (double *)(uintptr_t)p->steps;
    pb->drafted = (double *)(uintptr_t)p->drafted;
    pb->accepted = (double *)(uintptr_t)p->accepted;
    pb->n_steps = pb->n_drafted = pb->n_accepted = TD_DRAFT_TOKENS_MAX;
}

static void answer_speculation(rtr_admin_t *a, const rtr_admin_name_t *to, uint64_t id,
                               const PB(SpeculationRequest) * r)
{
    rtr_drafters_t *ds = a->config.drafters;
    const td_draft_stats_t *stats = rtr_drafters_stats(ds);
    const uint32_t count = td_draft_stats_count(stats);
    const uint32_t skip = count - TD_MIN(count, RTR_ADMIN_ENTRIES_MAX);
    const td_draft_past_t *p = td_draft_stats_oldest(stats);
    PB(Reply) reply = TANDEM__ADMIN__V1__REPLY__INIT;
    PB(Speculation) s = TANDEM__ADMIN__V1__SPECULATION__INIT;
    PB(DraftEntry) *entries = NULL;
    PB(DraftEntry) **list = NULL;

    if (r->set && r->explore_percent > 100) {
        send_error(a, to, id, CODE(INVALID), "explore_percent: 0 to 100");
        return;
    }
    if (r->set) {
        rtr_drafters_set_explore(ds, r->explore_percent);
    }
    entries = td_calloc(RTR_ADMIN_ENTRIES_MAX, sizeof(*entries));
    list = td_calloc(RTR_ADMIN_ENTRIES_MAX, sizeof(PB(DraftEntry) *));
    for (uint32_t i = 0; entries != NULL && list != NULL && p != NULL; i++) {
        if (i >= skip) {
            fill_entry(p, &entries[s.n_entries]);
            list[s.n_entries] = &entries[s.n_entries];
            s.n_entries++;
        }
        p = td_draft_stats_newer(stats, p);
    }
    s.entries = list;
    s.explore_percent = rtr_drafters_explore(ds);
    s.reports = rtr_drafters_reports(ds);
    reply.id = id;
    reply.answer_case = TANDEM__ADMIN__V1__REPLY__ANSWER_SPECULATION;
    reply.speculation = &s;
    (void)send_reply(a, to, &reply);
    td_free(entries);
    td_free(list);
}

/* --- how prompts are placed ------------------------------------------------------------------- */

static void answer_policy(rtr_admin_t *a, const rtr_admin_name_t *to, uint64_t id,
                          const PB(PolicyRequest) * r)
{
    PB(Reply) reply = TANDEM__ADMIN__V1__REPLY__INIT;
    PB(Policy) pb = TANDEM__ADMIN__V1__POLICY__INIT;
    char *known[RTR_POLICIES];
    rtr_policy_t policy = RTR_POLICY_KV_AWARE;

    if (r->policy[0] != '\0') {
        if (rtr_policy_parse(r->policy, &policy) != TD_OK) {
            send_error(a, to, id, CODE(INVALID), "policy: " RTR_POLICY_NAMES);
            return;
        }
        rtr_tickets_set_policy(a->config.tickets, policy);
        rtr_events_add(a->config.events, RTR_EVENT_POLICY, "", "", rtr_policy_name(policy));
        TD_LOG_INFO("placement policy set", "policy=%s", rtr_policy_name(policy));
    }
    for (uint32_t i = 0; i < RTR_POLICIES; i++) {
        known[i] = lend(rtr_policy_name((rtr_policy_t)i));
    }
    pb.policy = lend(rtr_policy_name(rtr_tickets_policy(a->config.tickets)));
    pb.known = known;
    pb.n_known = RTR_POLICIES;
    reply.id = id;
    reply.answer_case = TANDEM__ADMIN__V1__REPLY__ANSWER_POLICY;
    reply.policy = &pb;
    (void)send_reply(a, to, &reply);
}

/* --- objectives ------------------------------------------------------------------------------- */

static void answer_slo(rtr_admin_t *a, const rtr_admin_name_t *to, uint64_t id,
                       const PB(SloRequest) * r)
{
    PB(Reply) reply = TANDEM__ADMIN__V1__REPLY__INIT;
    PB(Slo) pb = TANDEM__ADMIN__V1__SLO__INIT;
    rtr_slo_live_t *slo = a->config.slo;
    char text[64];

    if (r->ttft_ms > RTR_SLO_MS_MAX || r->tbt_ms > RTR_SLO_MS_MAX) {
        send_error(a, to, id, CODE(INVALID), "slo: 0 to 86400000 milliseconds are expected");
        return;
    }
    if (r->set_ttft) {
        atomic_store_explicit(&slo->ttft_ms, r->ttft_ms, memory_order_relaxed);
    }
    if (r->set_tbt) {
        atomic_store_explicit(&slo->tbt_ms, r->tbt_ms, memory_order_relaxed);
    }
    pb.ttft_ms = atomic_load_explicit(&slo->ttft_ms, memory_order_relaxed);
    pb.tbt_ms = atomic_load_explicit(&slo->tbt_ms, memory_order_relaxed);
    if (r->set_ttft || r->set_tbt) {
        (void)snprintf(text, sizeof(text), "slo ttft %u ms, tbt %u ms", pb.ttft_ms, pb.tbt_ms);
        rtr_events_add(a->config.events, RTR_EVENT_POLICY, "", "", text);
        TD_LOG_INFO("objectives set", "ttft_ms=%u tbt_ms=%u", pb.ttft_ms, pb.tbt_ms);
    }
    pb.refused_ttft = td_metric_get(a->config.metrics->slo_ttft);
    pb.refused_tbt = td_metric_get(a->config.metrics->slo_tbt);
    reply.id = id;
    reply.answer_case = TANDEM__ADMIN__V1__REPLY__ANSWER_SLO;
    reply.slo = &pb;
    (void)send_reply(a, to, &reply);
}

/* --- tenants ---------------------------------------------------------------------------------- */

typedef struct tenant_view {
    PB(Tenant) pb;
    count_list_t requests;
    count_list_t limited;
} tenant_view_t;

static void fill_tenant(rtr_tenant_t *t, tenant_view_t *out)
{
    const rtr_limits_view_t limits = rtr_tenant_view(t, td_now_ns());
    PB(Tenant) *pb = &out->pb;

    tandem__admin__v1__tenant__init(pb);
    for (uint32_t i = 0; i < RTR_OUTCOME_COUNT; i++) {
        count_add(&out->requests, rtr_outcome_name((rtr_outcome_t)i),
                  atomic_load_explicit(&t->ended[i], memory_order_relaxed));
    }
    for (uint32_t i = RTR_LIMIT_NONE + 1; i < RTR_LIMITS; i++) {
        count_add(&out->limited, rtr_limit_name((rtr_limit_t)i),
                  atomic_load_explicit(&t->limited[i], memory_order_relaxed));
    }
    pb->name = lend(t->name);
    pb->weight = t->terms.weight;
    pb->requests_max = t->terms.requests;
    pb->requests_per_minute = t->terms.requests_per_minute;
    pb->tokens_per_minute = t->terms.tokens_per_minute;
    pb->requests_left = limits.requests_left;
    pb->tokens_left = limits.tokens_left;
    pb->running = atomic_load_explicit(&t->running, memory_order_relaxed);
    pb->queued = atomic_load_explicit(&t->queued, memory_order_relaxed);
    pb->n_requests = out->requests.count;
    pb->requests = out->requests.list;
    pb->n_limited = out->limited.count;
    pb->limited = out->limited.list;
    pb->prompt_tokens = atomic_load_explicit(&t->prompt_tokens, memory_order_relaxed);
    pb->completion_tokens = atomic_load_explicit(&t->completion_tokens, memory_order_relaxed);
    pb->waits = atomic_load_explicit(&t->waits, memory_order_relaxed);
    pb->wait_ms = atomic_load_explicit(&t->wait_ns, memory_order_relaxed) / TD_NS_PER_MS;
}

static void answer_tenants(rtr_admin_t *a, const rtr_admin_name_t *to, uint64_t id)
{
    rtr_tenants_t *tenants = a->config.tenants;
    const uint32_t count = tenants == NULL ? 0 : rtr_tenants_count(tenants);
    PB(Reply) reply = TANDEM__ADMIN__V1__REPLY__INIT;
    PB(Tenants) pb = TANDEM__ADMIN__V1__TENANTS__INIT;
    tenant_view_t *views = td_calloc(count + 1, sizeof(*views));
    PB(Tenant) **list = td_calloc(count + 1, sizeof(PB(Tenant) *));

    for (uint32_t i = 0; views != NULL && list != NULL && i < count; i++) {
        fill_tenant(rtr_tenants_at(tenants, i), &views[i]);
        list[i] = &views[i].pb;
    }
    pb.n_tenants = count;
    pb.tenants = list;
    reply.id = id;
    reply.answer_case = TANDEM__ADMIN__V1__REPLY__ANSWER_TENANTS;
    reply.tenants = &pb;
    if (views != NULL && list != NULL) {
        (void)send_reply(a, to, &reply);
    }
    td_free(views);
    td_free(list);
}

/* --- how fast nodes are ----------------------------------------------------------------------- */

/* Blocks of KV that a live decode node has, in the mean. */
static double decode_blocks(const rtr_admin_t *a)
{
    double blocks = 0;
    uint32_t nodes = 0;

    for (uint32_t i = 0; i < rtr_registry_slots(a->config.registry); i++) {
        const rtr_node_t *n = rtr_registry_node(a->config.registry, i);
        if (n->live && n->role == TD_ROLE_DECODE) {
            blocks += n->block_count;
            nodes++;
        }
    }
    return nodes > 0 ? blocks / nodes : 0;
}

static void answer_calibration(rtr_admin_t *a, const rtr_admin_name_t *to, uint64_t id)
{
    const rtr_estimate_t *prefill = rtr_tickets_prefill_time(a->config.tickets);
    const rtr_estimate_t *tbt = rtr_tickets_tbt(a->config.tickets);
    PB(Reply) reply = TANDEM__ADMIN__V1__REPLY__INIT;
    PB(Calibration) pb = TANDEM__ADMIN__V1__CALIBRATION__INIT;

    pb.prefill_token_us = prefill->weights[RTR_WORK_TOKENS] / 1e3;
    pb.prefill_prompt_ms = prefill->weights[RTR_WORK_PROMPTS] / 1e6;
    pb.prefill_pair_ns = prefill->weights[RTR_WORK_PAIRS];
    pb.decode_step_ms = tbt->weights[RTR_TBT_STEPS] / 1e6;
    pb.decode_sequence_us = tbt->weights[RTR_TBT_SEQUENCES] / 1e3;
    pb.decode_kv_token_ns = tbt->weights[RTR_TBT_BLOCKS] / a->config.block_tokens;
    pb.decode_kv_tokens = decode_blocks(a) * a->config.block_tokens;
    pb.kv_token_bytes = (double)a->config.block_bytes / a->config.block_tokens;
    pb.layers = a->config.layers;
    pb.prefills = prefill->n;
    pb.decodes = tbt->n;
    reply.id = id;
    reply.answer_case = TANDEM__ADMIN__V1__REPLY__ANSWER_CALIBRATION;
    reply.calibration = &pb;
    (void)send_reply(a, to, &reply);
}

/* --- how requests were placed ----------------------------------------------------------------- */

typedef struct decision_view {
    PB(Decision) pb;
    PB(PrefillCandidate) prefills[RTR_TRACE_CANDIDATES_MAX];
    PB(PrefillCandidate) * prefill_list[RTR_TRACE_CANDIDATES_MAX];
    PB(DecodeCandidate) decodes[RTR_TRACE_CANDIDATES_MAX];
    PB(DecodeCandidate) * decode_list[RTR_TRACE_CANDIDATES_MAX];
} decision_view_t;

static double ms_of(double ns)
{
    return ns < 0 ? -1 : ns / (double)TD_NS_PER_MS;
}

static void fill_candidates(const rtr_trace_decision_t *d, decision_view_t *v)
{
    for (uint32_t i = 0; i < d->prefill_count; i++) {
        PB(PrefillCandidate) *p = &v->prefills[i];
        tandem__admin__v1__prefill_candidate__init(p);
        p->node = lend(d->prefills[i].node);
        p->score_ms = ms_of(d->prefills[i].why.score_ns);
        p->queue_ms = ms_of(d->prefills[i].why.queue_ns);
        p->ttft_ms = ms_of(d->prefills[i].why.ttft_ns);
        p->own_tokens = d->prefills[i].why.own_tokens;
        p->pulled_tokens = d->prefills[i].why.pulled_tokens;
        v->prefill_list[i] = p;
    }
    for (uint32_t i = 0; i < d->decode_count; i++) {
        PB(DecodeCandidate) *c = &v->decodes[i];
        tandem__admin__v1__decode_candidate__init(c);
        c->node = lend(d->decodes[i].node);
        c->score = d->decodes[i].why.score;
        c->tbt_ms = ms_of(d->decodes[i].why.tbt_ns);
        c->fits = d->decodes[i].why.fits;
        c->running = d->decodes[i].running;
        c->free_blocks = d->decodes[i].free_blocks;
        v->decode_list[i] = c;
    }
}

static void fill_decision(const rtr_trace_decision_t *d, decision_view_t *v)
{
    PB(Decision) *pb = &v->pb;

    tandem__admin__v1__decision__init(pb);
    pb->number = d->number;
    pb->time_ms = d->time_ms;
    pb->request = lend(d->request);
    pb->prompt = d->prompt;
    pb->attempt = d->attempt;
    pb->prompt_tokens = d->prompt_tokens;
    pb->generated_tokens = d->generated_tokens;
    pb->self_prefill = d->self_prefill;
    pb->policy = lend(rtr_policy_name(d->policy));
    pb->prefill_nodes = d->prefill_nodes;
    pb->decode_nodes = d->decode_nodes;
    fill_candidates(d, v);
    pb->prefills = v->prefill_list;
    pb->n_prefills = d->prefill_count;
    pb->decodes = v->decode_list;
    pb->n_decodes = d->decode_count;
    pb->drafter = lend(td_drafter_name(d->draft.drafter));
    pb->k_min = d->draft.k_min;
    pb->k_max = d->draft.k_max;
    pb->draft_why = lend(rtr_draft_why_name(d->draft.why));
    pb->prompt_class = lend(rtr_prompt_class_name(d->prompt_class));
    pb->end = lend(d->end);
    pb->took_ms = d->took_ms;
    pb->tokens = d->tokens;
}

static void answer_trace(rtr_admin_t *a, const rtr_admin_name_t *to, uint64_t id,
                         const PB(TraceRequest) * r)
{
    const uint32_t most =
        r->most == 0 ? RTR_ADMIN_DECISIONS_MAX : TD_MIN(r->most, RTR_ADMIN_DECISIONS_MAX);
    PB(Reply) reply = TANDEM__ADMIN__V1__REPLY__INIT;
    PB(Trace) trace = TANDEM__ADMIN__V1__TRACE__INIT;
    PB(Decision) * list[RTR_ADMIN_DECISIONS_MAX];
    decision_view_t *views = td_calloc(most, sizeof(*views));
    uint64_t number = rtr_trace_newest(a->config.trace);
    uint32_t at = most; /* filled from the end: the newest are looked at first */

    for (; views != NULL && at > 0; number--) {
        const rtr_trace_decision_t *d = rtr_trace_get(a->config.trace, number);
        if (d == NULL) {
            break;
        }
        if (r->request[0] == '\0' || strcmp(r->request, d->request) == 0) {
            at--;
            fill_decision(d, &views[at]);
            list[at] = &views[at].pb;
        }
    }
    trace.decisions = list + at;
    trace.n_decisions = most - at;
    reply.id = id;
    reply.answer_case = TANDEM__ADMIN__V1__REPLY__ANSWER_TRACE;
    reply.trace = &trace;
    if (views == NULL) {
        send_error(a, to, id, CODE(BUSY), "out of memory");
    } else if (trace.n_decisions == 0 && r->request[0] != '\0') {
        send_error(a, to, id, CODE(NOT_FOUND), "no decision about that request is kept");
    } else {
        (void)send_reply(a, to, &reply);
    }
    td_free(views);
}

/* --- events ----------------------------------------------------------------------------------- */

/* Those from *next on, as many as a reply has; *next moves on. False: the client is gone. */
static bool send_events(rtr_admin_t *a, const rtr_admin_name_t *to, uint64_t id, uint64_t *next)
{
    const rtr_events_t *events = a->config.events;
    const uint64_t oldest = rtr_events_oldest(events);
    PB(Reply) reply = TANDEM__ADMIN__V1__REPLY__INIT;
    PB(Events) pb = TANDEM__ADMIN__V1__EVENTS__INIT;
    PB(Event) list[RTR_ADMIN_EVENTS_MAX];
    PB(Event) * at[RTR_ADMIN_EVENTS_MAX];

    if (*next < oldest) {
        pb.missed = oldest - *next;
        *next = oldest;
    }
    while (*next <= rtr_events_newest(events) && pb.n_events < RTR_ADMIN_EVENTS_MAX) {
        const rtr_event_t *e = rtr_events_get(events, (*next)++);
        PB(Event) *out = &list[pb.n_events];
        tandem__admin__v1__event__init(out);
        out->number = e->number;
        out->time_ms = e->time_ms;
        out->kind = lend(rtr_event_kind_name(e->kind));
        out->node = lend(e->node);
        out->request = lend(e->request);
        out->text = lend(e->text);
        at[pb.n_events++] = out;
    }
    pb.events = at;
    reply.id = id;
    reply.answer_case = TANDEM__ADMIN__V1__REPLY__ANSWER_EVENTS;
    reply.events = &pb;
    return send_reply(a, to, &reply);
}

/* Where a client goes on. A number that is yet to come is of another life of the router: all that
 * is kept of this one is new to the client. */
static uint64_t next_of(const rtr_admin_t *a, uint64_t since)
{
    const uint64_t newest = rtr_events_newest(a->config.events);

    if (since == 0) {
        return newest + 1;
    }
    return since <= newest + 1 ? since : rtr_events_oldest(a->config.events);
}

/* The client's own place, if it asks again, or a free one. */
static subscriber_t *place_of(rtr_admin_t *a, const rtr_admin_name_t *from, uint64_t now)
{
    subscriber_t *free_one = NULL;

    for (uint32_t i = 0; i < RTR_ADMIN_SUBSCRIBERS_MAX; i++) {
        subscriber_t *s = &a->subscribers[i];
        if (s->until_ns <= now) {
            free_one = s;
        } else if (s->from.len == from->len && memcmp(s->from.bytes, from->bytes, from->len) == 0) {
            return s;
        }
    }
    return free_one;
}

static void subscribe(rtr_admin_t *a, const rtr_admin_name_t *from, uint64_t id,
                      const PB(SubscribeRequest) * r)
{
    const uint64_t now = td_now_ns();
    uint64_t next = next_of(a, r->since);
    subscriber_t *s = NULL;

    if (r->lease_ms != 0 && (r->lease_ms < LEASE_MS_MIN || r->lease_ms > LEASE_MS_MAX)) {
        send_error(a, from, id, CODE(INVALID), "lease_ms: 0, or 1000 to 600000");
        return;
    }
    s = r->lease_ms == 0 ? NULL : place_of(a, from, now);
    if (r->lease_ms != 0 && s == NULL) {
        send_error(a, from, id, CODE(BUSY), "there are enough subscribers: later");
        return;
    }
    if (!send_events(a, from, id, &next) || s == NULL) {
        return;
    }
    *s = (subscriber_t){
        .until_ns = now + r->lease_ms * TD_NS_PER_MS, .id = id, .next = next, .from = *from};
}

static void tell_subscribers(rtr_admin_t *a, uint64_t now)
{
    for (uint32_t i = 0; i < RTR_ADMIN_SUBSCRIBERS_MAX; i++) {
        subscriber_t *s = &a->subscribers[i];
        if (s->until_ns > now && s->next <= rtr_events_newest(a->config.events) &&
            !send_events(a, &s->from, s->id, &s->next)) {
            s->until_ns = 0;
        }
    }
}

/* --- requests --------------------------------------------------------------------------------- */

static void answer(rtr_admin_t *a, const rtr_admin_name_t *from, const PB(Request) * r)
{
    switch (r->command_case) {
    case TANDEM__ADMIN__V1__REQUEST__COMMAND_STATUS:
        answer_status(a, from, r->id);
        break;
    case TANDEM__ADMIN__V1__REQUEST__COMMAND_NODES:
        answer_nodes(a, from, r->id);
        break;
    case TANDEM__ADMIN__V1__REQUEST__COMMAND_DRAIN:
        order_drain(a, from, r->id, r->drain);
        break;
    case TANDEM__ADMIN__V1__REQUEST__COMMAND_STORE:
        order_store(a, from, r->id, r->store);
        break;
    case TANDEM__ADMIN__V1__REQUEST__COMMAND_SPECULATION:
        answer_speculation(a, from, r->id, r->speculation);
        break;
    case TANDEM__ADMIN__V1__REQUEST__COMMAND_SUBSCRIBE:
        subscribe(a, from, r->id, r->subscribe);
        break;
    case TANDEM__ADMIN__V1__REQUEST__COMMAND_POLICY:
        answer_policy(a, from, r->id, r->policy);
        break;
    case TANDEM__ADMIN__V1__REQUEST__COMMAND_SLO:
        answer_slo(a, from, r->id, r->slo);
        break;
    case TANDEM__ADMIN__V1__REQUEST__COMMAND_CALIBRATION:
        answer_calibration(a, from, r->id);
        break;
    case TANDEM__ADMIN__V1__REQUEST__COMMAND_TENANTS:
        answer_tenants(a, from, r->id);
        break;
    case TANDEM__ADMIN__V1__REQUEST__COMMAND_TRACE:
        answer_trace(a, from, r->id, r->trace);
        break;
    default:
        send_error(a, from, r->id, CODE(INVALID),
                   "no command that this router knows: a newer client's?");
        break;
    }
}

/* A flood of them is one line a second. */
static void note_refused(rtr_admin_t *a)
{
    const uint64_t now = td_now_ns();

    a->refused++;
    if (now >= a->next_warning_ns) {
        a->next_warning_ns = now + TD_NS_PER_S;
        TD_LOG_WARN("admin request refused",
                    "requests=%" PRIu64 " bytes=%zu expected=\"a Request in one part\"", a->refused,
                    a->body.len);
    }
}

/* True: there may be more. */
static bool take_requests(rtr_admin_t *a, uint64_t began_ns)
{
    rtr_admin_name_t from;

    for (uint32_t i = 0; i < REQUESTS_PER_STEP && td_now_ns() - began_ns < STEP_NS; i++) {
        PB(Request) *r = NULL;
        td_status_t status = rtr_admin_socket_recv(a->socket, &from, &a->body);
        if (status == TD_ERR_NOT_FOUND) {
            return false;
        }
        if (status == TD_OK) {
            r = tandem__admin__v1__request__unpack(NULL, a->body.len,
                                                   (const uint8_t *)a->body.bytes);
        }
        if (r == NULL) {
            note_refused(a);
            send_error(a, &from, 0, CODE(INVALID), "a Request in one part is expected");
            continue;
        }
        answer(a, &from, r);
        tandem__admin__v1__request__free_unpacked(r, NULL);
    }
    return true;
}

bool rtr_admin_step(rtr_admin_t *a)
{
    const uint64_t now = td_now_ns();
    const bool more = take_requests(a, now);

    for (uint32_t i = 0; i < RTR_ADMIN_ASKS_MAX; i++) {
        ask_t *ask = &a->asks[i];
        if (ask->request != 0 && now >= ask->deadline_ns) {
            ask->request = 0;
            send_error(a, &ask->from, ask->id, CODE(TIMEOUT), "the store did not answer");
        }
    }
    tell_subscribers(a, now);
    return more;
}

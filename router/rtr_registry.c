#include "router/rtr_registry.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/base/td_log.h"
#include "common/base/td_names.h"
#include "common/kv/td_block_key.h"
#include "common/wire/td_member.h"

#define REPLACE_AFTER_MS 750u /* silent so long, a life may be replaced by one from elsewhere */
#define REFUSALS_MAX 16u
#define REFUSAL_KEEP_MS 2000u /* the answer needs its connection until it has left */
#define STALL_MS 500u         /* of this very loop: the others' silence is then no proof */
#define SCAN_MS 5u            /* between two looks at all nodes */
#define PEERS_MS 20u          /* what changes within it is told at once */
#define PEERS_PER_TICK 64u    /* lists sent: other work comes in between */

_Static_assert(RTR_SLOTS_MAX <= TD_MSG_PEERS_MAX, "all nodes fit into a list of peers");

typedef struct refusal {
    char name[TD_MSG_ID_CHARS_MAX + 1]; /* of the bus connection; "" = free */
    uint64_t until_ns;
} refusal_t;

struct rtr_registry {
    rtr_registry_config_t config;
    rtr_node_t nodes[RTR_SLOTS_MAX];
    uint32_t slots;
    uint32_t of_role[TD_ROLE_KVSTORE + 1][RTR_SLOTS_MAX]; /* slots of live nodes */
    uint32_t role_counts[TD_ROLE_KVSTORE + 1];
    td_names_t names;       /* of known nodes, to their slots */
    uint64_t peers_version; /* counts changes of the list */
    uint64_t
        forgotten_version; /* who has an older list gets a whole one: a slot has another node */
    uint32_t master_slot;  /* found anew at every change; RTR_PLACE_NONE: none */
    uint64_t told_version; /* all that are live have this list */
    uint64_t next_peers_ns;
    uint64_t next_scan_ns;
    uint64_t next_views_ns;
    uint64_t last_tick_ns;
    char numerics[64];        /* of the live prefill and decode nodes */
    td_attention_mask_t mask; /* as it says */
    refusal_t refusals[REFUSALS_MAX];
    atomic_uint live[TD_ROLE_KVSTORE + 1]; /* relaxed: counts for other threads to look at */
    /* The changes since a version, as they were last listed. */
    td_msg_peers_t list;
    td_msg_peer_t list_peers[RTR_SLOTS_MAX];
    const char *list_gone[RTR_SLOTS_MAX];
    pthread_mutex_t views_mu; /* guards views; a leaf */
    rtr_node_view_t *views;   /* owned; what other threads see */
    uint32_t view_count;
};

td_status_t rtr_registry_create(const rtr_registry_config_t *config, rtr_registry_t **out)
{
    rtr_registry_t *reg = td_calloc(1, sizeof(*reg));
    if (reg == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    if (td_names_init(&reg->names, RTR_SLOTS_MAX) != TD_OK) {
        td_free(reg);
        return TD_ERR_NO_MEMORY;
    }
    reg->config = *config;
    reg->master_slot = RTR_PLACE_NONE;
    (void)pthread_mutex_init(&reg->views_mu, NULL);
    *out = reg;
    return TD_OK;
}

void rtr_registry_destroy(rtr_registry_t *reg)
{
    if (reg == NULL) {
        return;
    }
    for (uint32_t i = 0; i < reg->slots; i++) {
        td_str_fini(&reg->nodes[i].ucx_address);
        td_str_fini(&reg->nodes[i].ucx_rkey);
    }
    td_names_fini(&reg->names);
    td_free(reg->views);
    (void)pthread_mutex_destroy(&reg->views_mu);
    td_free(reg);
}

rtr_node_t *rtr_registry_node(rtr_registry_t *reg, uint32_t slot)
{
    TD_ASSERT(slot < reg->slots);
    return &reg->nodes[slot];
}

uint32_t rtr_registry_slot(const rtr_registry_t *reg, const rtr_node_t *node)
{
    return (uint32_t)(node - reg->nodes);
}

const uint32_t *rtr_registry_of_role(const rtr_registry_t *reg, td_role_t role, uint32_t *count_out)
{
    *count_out = reg->role_counts[role];
    return reg->of_role[role];
}

uint32_t rtr_registry_slots(const rtr_registry_t *reg)
{
    return reg->slots;
}

static uint32_t slot_of(const rtr_registry_t *reg, const char *id)
{
    const uint32_t slot = td_names_find(&reg->names, id);
    return slot == TD_NAMES_NONE ? RTR_PLACE_NONE : slot;
}

uint32_t rtr_registry_find_live(const rtr_registry_t *reg, const char *id)
{
    const uint32_t slot = slot_of(reg, id);

    return slot != RTR_PLACE_NONE && reg->nodes[slot].live ? slot : RTR_PLACE_NONE;
}

uint32_t rtr_registry_find(const rtr_registry_t *reg, const char *id, uint64_t incarnation)
{
    const uint32_t slot = rtr_registry_find_live(reg, id);

    return slot != RTR_PLACE_NONE && reg->nodes[slot].incarnation == incarnation ? slot
                                                                                 : RTR_PLACE_NONE;
}

const rtr_node_t *rtr_registry_store_master(const rtr_registry_t *reg)
{
    return reg->master_slot == RTR_PLACE_NONE ? NULL : &reg->nodes[reg->master_slot];
}

const td_attention_mask_t *rtr_registry_mask(const rtr_registry_t *reg)
{
    return &reg->mask;
}

const char *rtr_registry_numerics(const rtr_registry_t *reg)
{
    return reg->numerics;
}

uint32_t rtr_registry_live(const rtr_registry_t *reg, td_role_t role)
{
    return atomic_load_explicit(&reg->live[role], memory_order_relaxed);
}

/* --- the list of peers ------------------------------------------------------------------------ */

static void count_live(rtr_registry_t *reg)
{
    uint32_t *live = reg->role_counts;

    memset(live, 0, sizeof(reg->role_counts));
    for (uint32_t i = 0; i < reg->slots; i++) {
        const rtr_node_t *node = &reg->nodes[i];
        if (node->live) {
            reg->of_role[node->role][live[node->role]++] = i;
        }
    }
    for (uint32_t r = 0; r <= TD_ROLE_KVSTORE; r++) {
        atomic_store_explicit(&reg->live[r], live[r], memory_order_relaxed);
    }
    td_metric_set(reg->config.metrics->nodes_prefill, live[TD_ROLE_PREFILL]);
    td_metric_set(reg->config.metrics->nodes_decode, live[TD_ROLE_DECODE]);
    td_metric_set(reg->config.metrics->nodes_kvstore, live[TD_ROLE_KVSTORE]);
    if (live[TD_ROLE_PREFILL] + live[TD_ROLE_DECODE] == 0) {
        reg->numerics[0] = '\0'; /* the next to come decides */
    }
}

/* A store is shown once others can use it: members look at a peer's region only when it is new. */
static bool is_listed(const rtr_node_t *node)
{
    return node->live &&
           (node->role != TD_ROLE_KVSTORE || node->store_master || node->block_count > 0);
}

static uint32_t find_master(const rtr_registry_t *reg)
{
    uint32_t master = RTR_PLACE_NONE;

    for (uint32_t i = 0; i < reg->slots; i++) {
        const rtr_node_t *node = &reg->nodes[i];
        if (node->live && node->store_master &&
            (master == RTR_PLACE_NONE || node->store_term > reg->nodes[master].store_term)) {
            master = i;
        }
    }
    return master;
}

/* A node's entry in the list is another one from now on; a new master changes that of the old. */
static void note_change(rtr_registry_t *reg, uint32_t slot)
{
    const uint32_t master_slot = find_master(reg);

    count_live(reg);
    reg->peers_version++;
    reg->nodes[slot].listed_version = reg->peers_version;
    if (master_slot == reg->master_slot) {
        return;
    }
    if (reg->master_slot != RTR_PLACE_NONE) {
        reg->nodes[reg->master_slot].listed_version = reg->peers_version;
    }
    if (master_slot != RTR_PLACE_NONE) {
        reg->nodes[master_slot].listed_version = reg->peers_version;
    }
    reg->master_slot = master_slot;
}

static td_msg_peer_t entry_of(const rtr_registry_t *reg, uint32_t slot)
{
    const rtr_node_t *node = &reg->nodes[slot];

    return (td_msg_peer_t){
        .id = node->id,
        .role = node->role,
        .incarnation = node->incarnation,
        .endpoint = node->endpoint,
        .region = {.ucx_address = {(const uint8_t *)node->ucx_address.bytes, node->ucx_address.len},
                   .ucx_rkey = {(const uint8_t *)node->ucx_rkey.bytes, node->ucx_rkey.len},
                   .device = node->device,
                   .base = node->base,
                   .block_count = node->block_count,
                   .block_bytes = node->block_bytes},
        .store_master = slot == reg->master_slot,
        .store_term = node->store_term,
    };
}

/* Of version `since` on, into reg->list; 0: all there are. */
static void list_changes(rtr_registry_t *reg, uint64_t since)
{
    td_msg_peers_t list = {.version = reg->peers_version, .since = since};

    for (uint32_t i = 0; i < reg->slots; i++) {
        const rtr_node_t *node = &reg->nodes[i];
        if (!node->known || node->listed_version <= since) {
            continue;
        }
        if (is_listed(node)) {
            reg->list_peers[list.count++] = entry_of(reg, i);
        } else if (since != 0) {
            reg->list_gone[list.gone_count++] = node->id;
        }
    }
    list.peers = reg->list_peers;
    list.gone = reg->list_gone;
    reg->list = list;
}

static bool is_behind(const rtr_registry_t *reg, const rtr_node_t *node)
{
    return node->live && node->peers_version != reg->peers_version;
}

/* Most have the same version: what has changed since then is listed once for all of them. */
static void send_list(rtr_registry_t *reg, rtr_node_t *node)
{
    const bool changes = node->peer_changes && node->peers_version >= reg->forgotten_version;
    const uint64_t since = changes ? node->peers_version : 0;
    td_msg_t msg = {.type = TD_MSG_PEERS};

    if (reg->list.version != reg->peers_version || reg->list.since != since) {
        list_changes(reg, since);
    }
    msg.u.peers = reg->list;
    if (td_bus_send(reg->config.bus, node->id, &msg) == TD_OK) {
        node->peers_version = reg->peers_version; /* else again at the next tick */
    }
}

void rtr_registry_tell(rtr_registry_t *reg, uint32_t slot)
{
    if (is_behind(reg, &reg->nodes[slot])) {
        send_list(reg, &reg->nodes[slot]);
    }
}

/* To those whose list is old, either the ones that have none yet or the others, up to
 * PEERS_PER_TICK in all. False: there are more. */
static bool send_to(rtr_registry_t *reg, bool without_list, uint32_t *sent)
{
    for (uint32_t i = 0; i < reg->slots; i++) {
        rtr_node_t *node = &reg->nodes[i];
        if (!is_behind(reg, node) || (node->peers_version == 0) != without_list) {
            continue;
        }
        if (*sent == PEERS_PER_TICK) {
            return false;
        }
        send_list(reg, node);
        ++*sent;
    }
    return true;
}

/* To some of those whose list is old. True: there are more. Who is new gets its list last: whom it
 * then speaks to, the store's master for one, knows it, or would drop what it says. */
static bool send_lists(rtr_registry_t *reg, uint64_t now)
{
    uint32_t sent = 0;

    if (reg->told_version == reg->peers_version || now < reg->next_peers_ns) {
        return false;
    }
    if (!send_to(reg, false, &sent) || !send_to(reg, true, &sent)) {
        return true;
    }
    if (sent > 0) { /* whom it could not be sent to is found the next time */
        reg->next_peers_ns = now + PEERS_MS * TD_NS_PER_MS;
    } else {
        reg->told_version = reg->peers_version;
    }
    return false;
}

/* --- lives ------------------------------------------------------------------------------------ */

static void end_life(rtr_registry_t *reg, uint32_t slot, const char *why)
{
    rtr_node_t *node = &reg->nodes[slot];

    TD_LOG_WARN("node down", "node=%s role=%s why=\"%s\"", node->id, td_role_name(node->role), why);
    rtr_events_add(reg->config.events, RTR_EVENT_NODE_DOWN, node->id, "", why);
    node->live = false;
    td_metric_add(reg->config.metrics->node_deaths, 1);
    note_change(reg, slot);
    reg->config.node_down(reg->config.ctx, slot);
}

static td_status_t refuse(const td_msg_register_t *r, char *why, size_t why_len, const char *text)
{
    (void)snprintf(why, why_len, "%s", text);
    TD_LOG_WARN("registration refused", "node=%s why=\"%s\"", r->self.id, why);
    return TD_ERR_INVALID;
}

/* Would this node's blocks and numbers be ours? The texts tell the operator what differs. */
static td_status_t check_model(const rtr_registry_t *reg, const td_msg_register_t *r, char *why,
                               size_t why_len)
{
    td_block_root_fields_t fields = {.fingerprint = reg->config.fingerprint,
                                     .numerics_class = r->numerics_class,
                                     .layout_version = TD_KV_LAYOUT_VERSION,
                                     .codec = reg->config.kv_codec,
                                     .block_tokens = reg->config.block_tokens,
                                     .adapter = "",
                                     .salt = ""};
    td_block_root_t root;
    td_block_key_t probe;
    char text[256];

    if (r->fingerprint.len != 32 || memcmp(r->fingerprint.at, reg->config.fingerprint, 32) != 0) {
        return refuse(r, why, why_len, "wrong model: its file differs from the router's");
    }
    if (reg->numerics[0] != '\0' && strcmp(reg->numerics, r->numerics_class) != 0) {
        (void)snprintf(
            text, sizeof(text),
            "wrong precision, attention or backend: numerics class is \"%s\", the cluster's is "
            "\"%s\"",
            r->numerics_class, reg->numerics);
        return refuse(r, why, why_len, text);
    }
    if (strcmp(r->kv_codec, reg->config.kv_codec) != 0) {
        (void)snprintf(text, sizeof(text), "wrong KV codec: it is \"%s\", the cluster's is \"%s\"",
                       r->kv_codec, reg->config.kv_codec);
        return refuse(r, why, why_len, text);
    }
    td_block_root_make(reg->config.secret, &fields, &root);
    td_block_probe_key(&root, reg->config.block_tokens, &probe);
    if (r->probe_key.len != TD_BLOCK_KEY_BYTES ||
        memcmp(r->probe_key.at, probe.bytes, TD_BLOCK_KEY_BYTES) != 0) {
        (void)snprintf(text, sizeof(text),
                       "wrong cluster secret or block size: block keys differ (the cluster has %u "
                       "tokens a block)",
                       reg->config.block_tokens);
        return refuse(r, why, why_len, text);
    }
    return TD_OK;
}

/* A store has no model, but it is told where everybody's blocks are, and reads them. */
static td_status_t check_store(const rtr_registry_t *reg, const td_msg_register_t *r, char *why,
                               size_t why_len)
{
    td_block_key_t probe;

    td_block_probe_key_without_model(reg->config.secret, &probe);
    if (r->probe_key.len != TD_BLOCK_KEY_BYTES ||
        memcmp(r->probe_key.at, probe.bytes, TD_BLOCK_KEY_BYTES) != 0) {
        return refuse(r, why, why_len, "wrong cluster secret");
    }
    return TD_OK;
}

/* Printable ASCII that no header, page or JSON text takes for anything else. */
static bool is_plain(const char *text)
{
    for (; *text != '\0'; text++) {
        if (*text <= 0x20 || *text > 0x7e || strchr("<>&\"'\\", *text) != NULL) {
            return false;
        }
    }
    return true;
}

static td_status_t check_register(rtr_registry_t *reg, const td_msg_t *msg, char *why,
                                  size_t why_len)
{
    const td_msg_register_t *r = &msg->u.reg;
    uint32_t slot = slot_of(reg, r->self.id);
    const rtr_node_t *node = slot == RTR_PLACE_NONE ? NULL : &reg->nodes[slot];

    if (strcmp(r->self.id, msg->sender_id) != 0 || r->self.incarnation == 0 ||
        r->self.incarnation != msg->sender_incarnation || r->self.role == TD_ROLE_ROUTER ||
        strcmp(r->self.id, td_bus_id(reg->config.bus)) == 0) {
        return refuse(r, why, why_len, "the registration names another process or role");
    }
    if (!td_name_is_valid(r->self.id, TD_MSG_ID_CHARS_MAX) || !is_plain(r->self.endpoint) ||
        !is_plain(r->http)) { /* they go into headers and JSON */
        return refuse(r, why, why_len, "the id or endpoint has characters that are not allowed");
    }
    if (node != NULL && !node->live && node->incarnation == r->self.incarnation) {
        return refuse(r, why, why_len, TD_DEAD_TEXT);
    }
    if (node != NULL && node->live && node->incarnation != r->self.incarnation &&
        strcmp(node->endpoint, r->self.endpoint) != 0 &&
        td_now_ns() - node->seen_ns < REPLACE_AFTER_MS * TD_NS_PER_MS) {
        return refuse(r, why, why_len, "the id is in use by another live process");
    }
    return r->self.role == TD_ROLE_KVSTORE ? check_store(reg, r, why, why_len)
                                           : check_model(reg, r, why, why_len);
}

/* Answers over a connection of its own, since the id may be that of a live node. */
static void send_refusal(rtr_registry_t *reg, const td_msg_t *to, const char *why)
{
    td_msg_t msg = {.type = TD_MSG_REGISTERED, .u.registered = {.accepted = false, .error = why}};
    refusal_t *at = NULL;
    char name[sizeof(at->name)];

    (void)snprintf(name, sizeof(name), "!%.60s", to->u.reg.self.id);
    for (uint32_t i = 0; i < REFUSALS_MAX; i++) {
        refusal_t *r = &reg->refusals[i];
        if (strcmp(r->name, name) == 0 || (at == NULL && r->name[0] == '\0')) {
            at = r;
        }
    }
    td_metric_add(reg->config.metrics->registrations_refused, 1);
    if (at == NULL) {
        return; /* it asks again */
    }
    (void)snprintf(at->name, sizeof(at->name), "%s", name);
    at->until_ns = td_now_ns() + REFUSAL_KEEP_MS * TD_NS_PER_MS;
    if (td_bus_connect(reg->config.bus, name, to->u.reg.self.endpoint,
                       to->u.reg.self.incarnation) != TD_OK ||
        td_bus_send(reg->config.bus, name, &msg) != TD_OK) {
        TD_LOG_DEBUG("refusal not sent", "node=%s", to->u.reg.self.id);
    }
}

static uint32_t take_slot(rtr_registry_t *reg, const char *id)
{
    uint32_t slot = slot_of(reg, id);
    uint32_t oldest = RTR_PLACE_NONE;

    if (slot != RTR_PLACE_NONE) {
        return slot;
    }
    if (reg->slots < RTR_SLOTS_MAX) {
        return reg->slots++;
    }
    for (uint32_t i = 0; i < reg->slots; i++) {
        if (!reg->nodes[i].live &&
            (oldest == RTR_PLACE_NONE || reg->nodes[i].seen_ns < reg->nodes[oldest].seen_ns)) {
            oldest = i;
        }
    }
    if (oldest != RTR_PLACE_NONE) {
        td_bus_disconnect(reg->config.bus, reg->nodes[oldest].id);
        reg->forgotten_version = reg->peers_version + 1; /* nobody can be told of that one's end */
    }
    return oldest;
}

static td_status_t keep_register(rtr_node_t *node, const td_msg_register_t *r)
{
    td_str_t address = {0};
    td_str_t rkey = {0};

    if (td_str_append(&address, r->self.region.ucx_address.at, r->self.region.ucx_address.len) !=
            TD_OK ||
        td_str_append(&rkey, r->self.region.ucx_rkey.at, r->self.region.ucx_rkey.len) != TD_OK) {
        td_str_fini(&address);
        td_str_fini(&rkey);
        return TD_ERR_NO_MEMORY;
    }
    td_str_fini(&node->ucx_address);
    td_str_fini(&node->ucx_rkey);
    node->ucx_address = address;
    node->ucx_rkey = rkey;
    node->known = true;
    node->live = true;
    (void)snprintf(node->id, sizeof(node->id), "%s", r->self.id);
    (void)snprintf(node->endpoint, sizeof(node->endpoint), "%s", r->self.endpoint);
    (void)snprintf(node->http, sizeof(node->http), "%s", r->http != NULL ? r->http : "");
    node->role = r->self.role;
    node->incarnation = r->self.incarnation;
    node->base = r->self.region.base;
    (void)snprintf(node->device, sizeof(node->device), "%s",
                   r->self.region.device != NULL ? r->self.region.device : "");
    node->block_count = r->self.region.block_count;
    node->block_bytes = r->self.region.block_bytes;
    node->store_master = r->self.store_master;
    node->store_term = r->self.store_term;
    node->context_max = r->context_max;
    node->drafters = r->drafters;
    node->ticket_epoch = r->ticket_epoch;
    node->peer_changes = r->peer_changes;
    node->seen_ns = td_now_ns();
    node->beat.draining = false; /* a new life */
    node->peers_version = 0;
    node->next_lease_ns = 0;
    return TD_OK;
}

/* A numerics class ends with the mask that it has, if any. */
static td_attention_mask_t mask_of(const char *numerics_class)
{
    const char *last = strrchr(numerics_class, '/');
    td_attention_mask_t mask = {0};

    if (last == NULL || td_attention_mask_parse(last + 1, &mask) != TD_OK) {
        mask = (td_attention_mask_t){0};
    }
    return mask;
}

/* Before a slot is taken: who cannot be reached shall not use them up. The node of that name, if
 * there is one, has then lost its connection, and is not left without one. */
static td_status_t open_connection(rtr_registry_t *reg, const td_msg_register_t *r)
{
    const td_status_t status =
        td_bus_connect(reg->config.bus, r->self.id, r->self.endpoint, r->self.incarnation);
    const uint32_t slot = slot_of(reg, r->self.id);

    if (status != TD_OK && slot != RTR_PLACE_NONE && reg->nodes[slot].live) {
        end_life(reg, slot, "its endpoint cannot be connected to");
    }
    return status;
}

/* Gives a clean slot to a new life. One that it replaces (*replaced_out) is over, but its tickets
 * keep their counts until they are moved, which is when the new life is there to take them. */
static td_status_t accept_register(rtr_registry_t *reg, const td_msg_register_t *r,
                                   uint32_t *slot_out, bool *replaced_out, bool *void_out)
{
    uint32_t slot = RTR_PLACE_NONE;
    rtr_node_t *node = NULL;

    TD_TRY(open_connection(reg, r));
    slot = take_slot(reg, r->self.id);
    if (slot == RTR_PLACE_NONE) {
        TD_LOG_ERROR("node not registered", "node=%s limit=%u", r->self.id, RTR_SLOTS_MAX);
        td_bus_disconnect(reg->config.bus, r->self.id);
        return TD_ERR_BUSY;
    }
    node = &reg->nodes[slot];
    *slot_out = slot;
    *void_out = node->live && node->incarnation == r->self.incarnation &&
                node->ticket_epoch != r->ticket_epoch;
    if (node->incarnation != r->self.incarnation || strcmp(node->id, r->self.id) != 0) {
        if (node->known) {
            td_names_remove(&reg->names, node->id);
        }
        *replaced_out = node->live;
        td_str_fini(&node->ucx_address);
        td_str_fini(&node->ucx_rkey);
        *node = (rtr_node_t){.drained = node->drained && strcmp(node->id, r->self.id) == 0,
                             .backlog = node->backlog,
                             .sequences = node->sequences,
                             .decoding = node->decoding,
                             .promised_blocks = node->promised_blocks};
        TD_LOG_INFO("node up", "node=%s role=%s endpoint=%s replaces_live=%d", r->self.id,
                    td_role_name(r->self.role), r->self.endpoint, (int)*replaced_out);
        rtr_events_add(reg->config.events, RTR_EVENT_NODE_UP, r->self.id, "",
                       td_role_name(r->self.role));
    }
    TD_TRY(keep_register(node, r));
    td_names_set(&reg->names, node->id, slot);
    if (r->self.role != TD_ROLE_KVSTORE) {
        (void)snprintf(reg->numerics, sizeof(reg->numerics), "%s", r->numerics_class);
        reg->mask = mask_of(r->numerics_class);
        if (r->context_max < reg->config.context_max) {
            TD_LOG_WARN("node takes shorter requests than this router",
                        "node=%s context_max=%u "
                        "router=%u",
                        r->self.id, r->context_max, reg->config.context_max);
        }
    }
    return TD_OK;
}

static void handle_register(rtr_registry_t *reg, const td_msg_t *msg)
{
    td_msg_t answer = {.type = TD_MSG_REGISTERED,
                       .u.registered = {.accepted = true,
                                        .error = "",
                                        .heartbeat_ms = TD_HEARTBEAT_MS,
                                        .block_bytes = reg->config.block_bytes,
                                        .block_tokens = reg->config.block_tokens}};
    char why[256] = "the router is out of room for it";
    uint32_t slot = RTR_PLACE_NONE;
    bool replaced = false;
    bool voided = false;
    td_status_t status = check_register(reg, msg, why, sizeof(why));

    if (status == TD_OK) {
        status = accept_register(reg, &msg->u.reg, &slot, &replaced, &voided);
    }
    if (status != TD_OK) {
        send_refusal(reg, msg, why);
    } else if (td_bus_send(reg->config.bus, msg->u.reg.self.id, &answer) != TD_OK) {
        TD_LOG_WARN("registration not answered", "node=%s", msg->u.reg.self.id);
    }
    if (slot != RTR_PLACE_NONE) {
        note_change(reg, slot);
    }
    if (replaced) {
        td_metric_add(reg->config.metrics->node_deaths, 1);
        reg->config.node_down(reg->config.ctx, slot);
    } else if (voided) {
        TD_LOG_WARN("node has let go of its tickets", "node=%s", msg->sender_id);
        reg->config.tickets_void(reg->config.ctx, slot);
    }
}

/* Of a prompt that is computed, tokens see half of it. */
static rtr_work_t others_of(const td_msg_heartbeat_t *beat)
{
    const uint64_t each = beat->other_requests > 0 ? beat->other_tokens / beat->other_requests : 0;

    return (rtr_work_t){.prompts = beat->other_requests,
                        .tokens = beat->other_tokens,
                        .pairs = beat->other_tokens * each / 2};
}

static void handle_heartbeat(rtr_registry_t *reg, const td_msg_t *msg)
{
    td_msg_t answer = {.type = TD_MSG_REGISTERED,
                       .u.registered = {.accepted = false, .error = TD_DEAD_TEXT}};
    uint32_t slot = slot_of(reg, msg->sender_id);

    if (slot == RTR_PLACE_NONE || reg->nodes[slot].incarnation != msg->sender_incarnation) {
        return; /* an older life, or unknown: it finds out by our silence */
    }
    if (!reg->nodes[slot].live) {
        (void)!td_bus_send(reg->config.bus, msg->sender_id, &answer);
        return;
    }
    if (msg->u.heartbeat.draining && !reg->nodes[slot].beat.draining) {
        TD_LOG_INFO("node drains", "node=%s", msg->sender_id);
        rtr_events_add(reg->config.events, RTR_EVENT_NODE_DRAINS, msg->sender_id, "", "");
    }
    reg->nodes[slot].beat = msg->u.heartbeat;
    reg->nodes[slot].others = others_of(&msg->u.heartbeat);
    reg->nodes[slot].seen_ns = td_now_ns();
}

bool rtr_registry_handle(rtr_registry_t *reg, const td_msg_t *msg)
{
    switch (msg->type) {
    case TD_MSG_REGISTER:
        handle_register(reg, msg);
        return true;
    case TD_MSG_HEARTBEAT:
        handle_heartbeat(reg, msg);
        return true;
    default:
        return false;
    }
}

/* --- time ------------------------------------------------------------------------------------- */

static void send_lease(rtr_registry_t *reg, rtr_node_t *node, uint64_t now)
{
    td_msg_t msg = {.type = TD_MSG_LEASE, .u.lease = {.lease_ms = TD_TICKET_LEASE_MS}};

    node->next_lease_ns = now + TD_HEARTBEAT_MS * TD_NS_PER_MS;
    if (td_bus_send(reg->config.bus, node->id, &msg) != TD_OK) {
        TD_LOG_DEBUG("lease not sent", "node=%s", node->id);
    }
}

static rtr_node_view_t view_of(const rtr_node_t *n, bool is_master, uint64_t now)
{
    rtr_node_view_t view = {.role = n->role,
                            .state = !n->live             ? "dead"
                                     : rtr_node_drains(n) ? "draining"
                                                          : "live",
                            .incarnation = n->incarnation,
                            .silent_ms = (now - n->seen_ns) / TD_NS_PER_MS,
                            .free_blocks = n->beat.free_blocks,
                            .total_blocks = n->beat.total_blocks,
                            .prefills = n->backlog.work.prompts,
                            .sequences = n->sequences,
                            .ahead_tokens = n->backlog.work.tokens,
                            .promised_blocks = n->promised_blocks,
                            .tokens_per_s = n->beat.tokens_per_s,
                            .fetched_bytes = n->beat.fetched_bytes,
                            .shunned = rtr_breaker_is_open(&n->breaker, now),
                            .store_master = is_master};

    memcpy(view.id, n->id, sizeof(view.id));
    memcpy(view.endpoint, n->endpoint, sizeof(view.endpoint));
    return view;
}

/* How far off predictions are: the mean over nodes that something was predicted for. */
static uint64_t error_percent(const rtr_registry_t *reg, td_role_t role)
{
    double sum = 0;
    uint32_t known = 0;

    for (uint32_t i = 0; i < reg->slots; i++) {
        const rtr_node_t *n = &reg->nodes[i];
        const rtr_estimate_t *e = role == TD_ROLE_PREFILL ? &n->prefill_time : &n->tbt;
        if (n->live && n->role == role && e->n > 0) {
            sum += e->error;
            known++;
        }
    }
    return known > 0 ? (uint64_t)(100 * sum / known) : 0;
}

static void publish_views(rtr_registry_t *reg, uint64_t now)
{
    const rtr_node_t *master = rtr_registry_store_master(reg);
    rtr_node_view_t *views = td_calloc(TD_MAX(reg->slots, 1), sizeof(*views));
    rtr_node_view_t *old = NULL;

    if (views == NULL) {
        return; /* what was published stays a little longer */
    }
    for (uint32_t i = 0; i < reg->slots; i++) {
        views[i] = view_of(&reg->nodes[i], &reg->nodes[i] == master, now);
    }
    (void)pthread_mutex_lock(&reg->views_mu);
    old = reg->views;
    reg->views = views;
    reg->view_count = reg->slots;
    (void)pthread_mutex_unlock(&reg->views_mu);
    td_free(old);
}

td_status_t rtr_registry_views(rtr_registry_t *reg, rtr_node_view_t **out, uint32_t *count_out)
{
    rtr_node_view_t *copy = NULL;

    (void)pthread_mutex_lock(&reg->views_mu);
    copy = td_calloc(TD_MAX(reg->view_count, 1), sizeof(*copy));
    *count_out = reg->view_count;
    if (copy != NULL && reg->view_count > 0) {
        memcpy(copy, reg->views, reg->view_count * sizeof(*copy));
    }
    (void)pthread_mutex_unlock(&reg->views_mu);
    *out = copy;
    return copy == NULL ? TD_ERR_NO_MEMORY : TD_OK;
}

/* slept_ns: what this loop itself was away. */
static void scan_nodes(rtr_registry_t *reg, uint64_t now, uint64_t slept_ns)
{
    for (uint32_t i = 0; i < reg->slots; i++) {
        rtr_node_t *node = &reg->nodes[i];
        if (!node->live) {
            continue;
        }
        node->seen_ns = TD_MIN(now, node->seen_ns + slept_ns); /* we slept, not they */
        if (now - node->seen_ns > TD_PEER_DEAD_MS * TD_NS_PER_MS) {
            end_life(reg, i, "no heartbeat");
        } else if (now >= node->next_lease_ns) {
            send_lease(reg, node, now);
        }
    }
}

static void drop_refusals(rtr_registry_t *reg, uint64_t now)
{
    for (uint32_t i = 0; i < REFUSALS_MAX; i++) {
        if (reg->refusals[i].name[0] != '\0' && now > reg->refusals[i].until_ns) {
            td_bus_disconnect(reg->config.bus, reg->refusals[i].name);
            reg->refusals[i].name[0] = '\0';
        }
    }
}

bool rtr_registry_tick(rtr_registry_t *reg)
{
    const uint64_t now = td_now_ns();
    const uint64_t gap = reg->last_tick_ns == 0 ? 0 : now - reg->last_tick_ns;
    const bool slept = gap > STALL_MS * TD_NS_PER_MS;

    reg->last_tick_ns = now;
    if (now >= reg->next_scan_ns || slept) {
        reg->next_scan_ns = now + SCAN_MS * TD_NS_PER_MS;
        scan_nodes(reg, now, slept ? gap : 0);
        drop_refusals(reg, now);
    }
    if (now >= reg->next_views_ns) {
        reg->next_views_ns = now + TD_HEARTBEAT_MS * TD_NS_PER_MS;
        publish_views(reg, now);
        td_metric_set(reg->config.metrics->prefill_error, error_percent(reg, TD_ROLE_PREFILL));
        td_metric_set(reg->config.metrics->tbt_error, error_percent(reg, TD_ROLE_DECODE));
        td_metric_set(reg->config.metrics->bus_refused, td_bus_refused(reg->config.bus));
    }
    return send_lists(reg, now);
}

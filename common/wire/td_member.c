#include "common/wire/td_member.h"

#include <stdio.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/base/td_log.h"

#define ROUTER_SILENT_MS 2500u /* then register again; the lease says when tickets end */

struct td_member {
    td_bus_t *bus; /* borrowed */
    char router_endpoint[256];
    td_member_events_t events;
    td_str_t self_bytes; /* owned: our Register message, encoded once */
    td_msg_t self;       /* decoded from it: borrows from self_arena */
    td_msg_arena_t *self_arena;
    bool registered;
    bool fenced; /* reported already, until the next lease */
    uint64_t next_send_ns;
    bool told_draining;
    uint64_t last_lease_ns;
    uint32_t lease_ms;
    td_member_peer_t peers[TD_MSG_PEERS_MAX];
    uint32_t peer_count;
};

/* Keeps a deep copy by a trip through the encoding. */
static td_status_t self_copy(td_member_t *m, const td_msg_register_t *self)
{
    td_msg_t msg = {.type = TD_MSG_REGISTER, .sender_id = td_bus_id(m->bus), .u.reg = *self};
    td_msg_arena_t *arena = NULL;
    td_msg_t copy;

    td_str_clear(&m->self_bytes);
    TD_TRY(td_msg_encode(&msg, &m->self_bytes));
    TD_TRY(td_msg_decode(m->self_bytes.bytes, m->self_bytes.len, &copy, &arena));
    td_msg_arena_free(m->self_arena);
    m->self = copy;
    m->self_arena = arena;
    return TD_OK;
}

td_status_t td_member_create(td_bus_t *bus, const char *router_endpoint,
                             const td_msg_register_t *self, const td_member_events_t *events,
                             td_member_t **out)
{
    td_member_t *m = td_calloc(1, sizeof(*m));
    td_status_t status = TD_ERR_NO_MEMORY;

    if (m == NULL) {
        return status;
    }
    m->bus = bus;
    m->events = *events;
    m->lease_ms = TD_TICKET_LEASE_MS;
    m->fenced = true; /* no tickets yet */
    (void)snprintf(m->router_endpoint, sizeof(m->router_endpoint), "%s", router_endpoint);
    status = self_copy(m, self);
    if (status == TD_OK) {
        status = td_bus_connect(bus, TD_ROUTER_ID, router_endpoint, 0);
    }
    if (status != TD_OK) {
        td_member_destroy(m);
        return status;
    }
    *out = m;
    return TD_OK;
}

void td_member_destroy(td_member_t *m)
{
    if (m == NULL) {
        return;
    }
    td_msg_arena_free(m->self_arena);
    td_str_fini(&m->self_bytes);
    td_free(m);
}

td_status_t td_member_update(td_member_t *m, const td_msg_register_t *self)
{
    TD_TRY(self_copy(m, self));
    m->registered = false;
    m->next_send_ns = 0;
    return TD_OK;
}

static void send_register(td_member_t *m)
{
    td_msg_t msg = {.type = TD_MSG_REGISTER, .u.reg = m->self.u.reg};
    td_status_t status = TD_OK;

    msg.u.reg.self.incarnation = td_bus_incarnation(m->bus);
    msg.u.reg.self.endpoint = td_bus_endpoint(m->bus);
    status = td_bus_send(m->bus, TD_ROUTER_ID, &msg);
    if (status != TD_OK) {
        TD_LOG_WARN("registration not sent", "status=%s", td_status_name(status));
    }
}

static void fence(td_member_t *m, bool new_life)
{
    if (new_life) {
        td_bus_set_incarnation(m->bus, td_random_u64() | 1);
    }
    m->registered = false;
    if (!m->fenced || new_life) {
        m->fenced = true;
        if (m->events.fenced != NULL) {
            m->events.fenced(m->events.ctx, td_bus_incarnation(m->bus));
        }
    }
}

void td_member_tick(td_member_t *m, const td_msg_heartbeat_t *load)
{
    uint64_t now = td_now_ns();
    uint64_t silent_ms = m->last_lease_ns == 0 ? 0 : (now - m->last_lease_ns) / TD_NS_PER_MS;
    td_msg_t beat = {.type = TD_MSG_HEARTBEAT, .u.heartbeat = *load};

    if (m->last_lease_ns != 0 && silent_ms > m->lease_ms && !m->fenced) {
        TD_LOG_WARN("router silent for a ticket lease", "silent_ms=%llu",
                    (unsigned long long)silent_ms);
        fence(m, false);
    }
    if (m->registered && silent_ms > ROUTER_SILENT_MS) {
        /* One that came back has another incarnation and does not know us. One that only slept
         * shall get what was sent meanwhile, so the connection stays until it answers. */
        m->registered = false;
    }
    if (now < m->next_send_ns && load->draining == m->told_draining) {
        return;
    }
    m->told_draining = load->draining;
    m->next_send_ns = now + TD_HEARTBEAT_MS * TD_NS_PER_MS;
    if (!m->registered) {
        send_register(m);
    } else if (td_bus_send(m->bus, TD_ROUTER_ID, &beat) != TD_OK) {
        TD_LOG_DEBUG("heartbeat not sent", "router=%s", m->router_endpoint);
    }
}

static void handle_registered(td_member_t *m, const td_msg_t *msg)
{
    const td_msg_registered_t *r = &msg->u.registered;

    if (!r->accepted) {
        TD_LOG_WARN("router refused us", "why=\"%s\"", r->error);
        if (m->registered || strcmp(r->error, TD_DEAD_TEXT) == 0) {
            fence(m, true); /* it had declared us dead: start a new life */
            m->next_send_ns = 0;
        }
        return;
    }
    if (td_bus_connect(m->bus, TD_ROUTER_ID, m->router_endpoint, msg->sender_incarnation) !=
        TD_OK) {
        return;
    }
    m->registered = true;
    m->fenced = false;
    m->last_lease_ns = td_now_ns();
    if (m->events.registered != NULL) {
        m->events.registered(m->events.ctx, r);
    }
}

static td_member_peer_t *peer_find(td_member_t *m, const char *id)
{
    for (uint32_t i = 0; i < m->peer_count; i++) {
        if (strcmp(m->peers[i].id, id) == 0) {
            return &m->peers[i];
        }
    }
    return NULL;
}

static void peer_drop(td_member_t *m, uint32_t at)
{
    td_member_peer_t gone = m->peers[at];
    m->peers[at] = m->peers[--m->peer_count];
    td_bus_disconnect(m->bus, gone.id);
    TD_LOG_INFO("peer down", "peer=%s", gone.id);
    if (m->events.peer_down != NULL) {
        m->events.peer_down(m->events.ctx, gone.id, gone.incarnation);
    }
}

static void peer_apply(td_member_t *m, const td_msg_peer_t *p)
{
    td_member_peer_t *known = peer_find(m, p->id);

    if (known != NULL && known->incarnation != p->incarnation) {
        peer_drop(m, (uint32_t)(known - m->peers));
        known = NULL;
    }
    if (known == NULL && m->peer_count < TD_MSG_PEERS_MAX &&
        td_bus_connect(m->bus, p->id, p->endpoint, p->incarnation) == TD_OK) {
        known = &m->peers[m->peer_count++];
        (void)snprintf(known->id, sizeof(known->id), "%s", p->id);
        known->role = p->role;
        known->incarnation = p->incarnation;
        TD_LOG_INFO("peer up", "peer=%s role=%s", p->id, td_role_name(p->role));
        if (m->events.peer_up != NULL) {
            m->events.peer_up(m->events.ctx, p);
        }
    }
    if (known != NULL) {
        known->store_master = p->store_master;
        known->store_term = p->store_term;
        known->seen = true;
    }
}

static void handle_peers(td_member_t *m, const td_msg_peers_t *list)
{
    for (uint32_t i = 0; i < m->peer_count; i++) {
        m->peers[i].seen = false;
    }
    for (uint32_t i = 0; i < list->count; i++) {
        if (list->peers[i].role != TD_ROLE_ROUTER) {
            peer_apply(m, &list->peers[i]); /* ourselves too: a store is its own segment */
        }
    }
    for (uint32_t i = m->peer_count; i > 0; i--) {
        if (!m->peers[i - 1].seen) {
            peer_drop(m, i - 1);
        }
    }
}

bool td_member_handle(td_member_t *m, const td_msg_t *msg)
{
    if (strcmp(msg->sender_id, TD_ROUTER_ID) != 0) {
        return false;
    }
    switch (msg->type) {
    case TD_MSG_REGISTERED:
        handle_registered(m, msg);
        return true;
    case TD_MSG_PEERS:
        handle_peers(m, &msg->u.peers);
        return true;
    case TD_MSG_LEASE:
        m->last_lease_ns = td_now_ns();
        m->fenced = false;
        if (msg->u.lease.lease_ms > 0) {
            m->lease_ms = msg->u.lease.lease_ms;
        }
        return true;
    default:
        return false;
    }
}

const td_member_peer_t *td_member_find(const td_member_t *m, const char *id)
{
    for (uint32_t i = 0; i < m->peer_count; i++) {
        if (strcmp(m->peers[i].id, id) == 0) {
            return &m->peers[i];
        }
    }
    return NULL;
}

const td_member_peer_t *td_member_store_master(const td_member_t *m)
{
    const td_member_peer_t *best = NULL;

    for (uint32_t i = 0; i < m->peer_count; i++) {
        const td_member_peer_t *p = &m->peers[i];
        if (p->role == TD_ROLE_KVSTORE && p->store_master &&
            (best == NULL || p->store_term > best->store_term)) {
            best = p;
        }
    }
    return best;
}

bool td_member_is_registered(const td_member_t *m)
{
    return m->registered;
}

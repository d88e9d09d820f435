#include "common/wire/td_member.h"

#include <stdio.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/base/td_log.h"

#define ROUTER_SILENT_MS 2500u /* then register again; the lease says when tickets end */
#define PAST_MAX 256u

/* What we have with a router. Its index is its bit in td_member_peer_t.seen_by. */
typedef struct link {
    td_member_router_t router; /* id "": free */
    bool wanted;               /* there is such a router, as far as we know */
    bool registered;
    bool listed;           /* its list of peers came since */
    uint64_t list_version; /* of that list, with the changes that came */
    uint64_t life;         /* of the router that knows us, or did; 0: none yet */
    bool fenced;           /* reported already, until the next lease */
    uint64_t ticket_epoch; /* of the tickets we may have of it */
    bool told_draining;
    uint64_t next_send_ns;
    uint64_t last_lease_ns;
    uint32_t lease_ms;
} link_t;

struct td_member {
    td_bus_t *bus; /* borrowed */
    td_member_events_t events;
    td_str_t self_bytes; /* owned: our Register message, encoded once */
    td_msg_t self;       /* decoded from it: borrows from self_arena */
    td_msg_arena_t *self_arena;
    link_t links[TD_ROUTERS_MAX];
    td_member_peer_t peers[TD_MSG_PEERS_MAX];
    uint32_t peer_count;
    uint64_t past[PAST_MAX]; /* ring: lives that another one has followed */
    uint32_t past_next;
};

/* --- routers ---------------------------------------------------------------------------------- */

static td_status_t router_parse(const char *text, size_t len, td_member_router_t *out)
{
    const char *equals = memchr(text, '=', len);
    const char *endpoint = equals != NULL ? equals + 1 : text;
    const size_t endpoint_len = len - (size_t)(endpoint - text);
    const char *id = equals != NULL ? text : TD_ROUTER_ID;
    const size_t id_len = equals != NULL ? (size_t)(equals - text) : strlen(TD_ROUTER_ID);

    if (id_len == 0 || id_len > TD_MSG_ID_CHARS_MAX || endpoint_len == 0 ||
        endpoint_len >= sizeof(out->endpoint)) {
        return TD_ERR_INVALID;
    }
    (void)snprintf(out->id, sizeof(out->id), "%.*s", (int)id_len, id);
    (void)snprintf(out->endpoint, sizeof(out->endpoint), "%.*s", (int)endpoint_len, endpoint);
    return TD_OK;
}

td_status_t td_member_routers_parse(const char *text, td_member_router_t *out, uint32_t *count_out)
{
    uint32_t count = 0;

    for (;;) {
        const size_t len = strcspn(text, ",");
        if (count == TD_ROUTERS_MAX || router_parse(text, len, &out[count]) != TD_OK) {
            break;
        }
        for (uint32_t i = 0; i < count; i++) {
            if (strcmp(out[i].id, out[count].id) == 0) {
                TD_LOG_ERROR("two routers of one name", "router=\"%s\" expected=\"ID=ENDPOINT\"",
                             out[count].id);
                return TD_ERR_INVALID;
            }
        }
        count++;
        if (text[len] == '\0') {
            *count_out = count;
            return TD_OK;
        }
        text += len + 1;
    }
    TD_LOG_ERROR("bad list of routers",
                 "number=%u limit=%u expected=\"tcp://HOST:PORT, or ID=tcp://HOST:PORT by comma\"",
                 count + 1, TD_ROUTERS_MAX);
    return TD_ERR_INVALID;
}

/* TD_ROUTERS_MAX: it is no router. */
static uint32_t link_at(const td_member_t *m, const char *id)
{
    uint32_t at = 0;

    while (at < TD_ROUTERS_MAX &&
           (m->links[at].router.id[0] == '\0' || strcmp(m->links[at].router.id, id) != 0)) {
        at++;
    }
    return at;
}

static link_t *link_find(td_member_t *m, const char *id)
{
    const uint32_t at = link_at(m, id);

    return at < TD_ROUTERS_MAX ? &m->links[at] : NULL;
}

static uint32_t bit_of(const td_member_t *m, const link_t *link)
{
    return 1u << (uint32_t)(link - m->links);
}

static link_t *link_free(td_member_t *m)
{
    for (uint32_t i = 0; i < TD_ROUTERS_MAX; i++) {
        if (m->links[i].router.id[0] == '\0') {
            return &m->links[i];
        }
    }
    return NULL;
}

static td_status_t link_open(td_member_t *m, const td_member_router_t *router)
{
    link_t *link = link_find(m, router->id);
    const bool is_new = link == NULL;

    link = is_new ? link_free(m) : link;
    if (link == NULL) {
        TD_LOG_ERROR("router not joined", "router=%s limit=%u", router->id, TD_ROUTERS_MAX);
        return TD_ERR_BUSY;
    }
    if (!is_new && strcmp(link->router.endpoint, router->endpoint) == 0) {
        link->wanted = true;
        return TD_OK;
    }
    TD_TRY(td_bus_connect(m->bus, router->id, router->endpoint, 0));
    TD_LOG_INFO("router known", "router=%s endpoint=%s", router->id, router->endpoint);
    if (is_new) {
        *link = (link_t){.lease_ms = TD_TICKET_LEASE_MS,
                         .fenced = true, /* no tickets yet */
                         .ticket_epoch = td_random_u64() | 1};
    }
    link->router = *router;
    link->wanted = true;
    link->registered = false;
    link->next_send_ns = 0;
    return TD_OK;
}

void td_member_set_routers(td_member_t *m, const td_member_router_t *routers, uint32_t count)
{
    for (uint32_t i = 0; i < TD_ROUTERS_MAX; i++) {
        m->links[i].wanted = false;
    }
    for (uint32_t i = 0; i < count; i++) {
        (void)!link_open(m, &routers[i]); /* logged; the others are joined */
    }
}

bool td_member_is_router(const td_member_t *m, const char *id)
{
    return link_at(m, id) < TD_ROUTERS_MAX;
}

const char *td_member_router_at(const td_member_t *m, uint32_t at)
{
    return m->links[at].router.id;
}

uint32_t td_member_registered(const td_member_t *m)
{
    uint32_t count = 0;

    for (uint32_t i = 0; i < TD_ROUTERS_MAX; i++) {
        count += m->links[i].registered;
    }
    return count;
}

/* --- life ------------------------------------------------------------------------------------- */

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

static td_status_t open_links(td_member_t *m, const char *text)
{
    td_member_router_t routers[TD_ROUTERS_MAX];
    uint32_t count = 0;

    if (text == NULL) {
        return TD_OK;
    }
    TD_TRY(td_member_routers_parse(text, routers, &count));
    for (uint32_t i = 0; i < count; i++) {
        TD_TRY(link_open(m, &routers[i]));
    }
    return TD_OK;
}

td_status_t td_member_create(td_bus_t *bus, const char *routers, const td_msg_register_t *self,
                             const td_member_events_t *events, td_member_t **out)
{
    td_member_t *m = td_calloc(1, sizeof(*m));
    td_status_t status = TD_ERR_NO_MEMORY;

    if (m == NULL) {
        return status;
    }
    m->bus = bus;
    m->events = *events;
    status = self_copy(m, self);
    if (status == TD_OK) {
        status = open_links(m, routers);
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

/* At once, with all routers. */
static void register_anew(td_member_t *m)
{
    for (uint32_t i = 0; i < TD_ROUTERS_MAX; i++) {
        m->links[i].registered = false;
        m->links[i].next_send_ns = 0;
    }
}

td_status_t td_member_update(td_member_t *m, const td_msg_register_t *self)
{
    TD_TRY(self_copy(m, self));
    register_anew(m);
    return TD_OK;
}

/* --- peers ------------------------------------------------------------------------------------ */

static td_member_peer_t *peer_find(td_member_t *m, const char *id)
{
    const td_member_peer_t *peer = td_member_find(m, id);

    return peer == NULL ? NULL : &m->peers[peer - m->peers];
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

static bool is_past(const td_member_t *m, uint64_t incarnation)
{
    for (uint32_t i = 0; i < PAST_MAX; i++) {
        if (m->past[i] == incarnation) {
            return true;
        }
    }
    return false;
}

static void peer_apply(td_member_t *m, const td_msg_peer_t *p, uint32_t bit)
{
    td_member_peer_t *known = peer_find(m, p->id);

    if (is_past(m, p->incarnation)) {
        return; /* this router has not heard of its new life yet */
    }
    if (known != NULL && known->incarnation != p->incarnation) {
        m->past[m->past_next] = known->incarnation;
        m->past_next = (m->past_next + 1) % PAST_MAX;
        peer_drop(m, (uint32_t)(known - m->peers));
        known = NULL;
    }
    if (known == NULL && m->peer_count < TD_MSG_PEERS_MAX &&
        td_bus_connect(m->bus, p->id, p->endpoint, p->incarnation) == TD_OK) {
        known = &m->peers[m->peer_count++];
        *known = (td_member_peer_t){.role = p->role, .incarnation = p->incarnation};
        (void)snprintf(known->id, sizeof(known->id), "%s", p->id);
        TD_LOG_INFO("peer up", "peer=%s role=%s", p->id, td_role_name(p->role));
        if (m->events.peer_up != NULL) {
            m->events.peer_up(m->events.ctx, p);
        }
    }
    if (known != NULL) {
        known->store_master = p->store_master;
        known->store_term = p->store_term;
        known->seen_by |= bit;
    }
}

/* Of those that are on no list of a router that we hear. Hear we none, what was known stays. */
static void drop_unlisted(td_member_t *m)
{
    uint32_t heard = 0;

    for (uint32_t i = 0; i < TD_ROUTERS_MAX; i++) {
        heard |= m->links[i].listed ? 1u << i : 0;
    }
    for (uint32_t i = m->peer_count; heard != 0 && i > 0; i--) {
        if ((m->peers[i - 1].seen_by & heard) == 0) {
            peer_drop(m, i - 1);
        }
    }
}

/* What is not on its list any more: all, or those that it says are gone. */
static void unlist(td_member_t *m, const link_t *link, const td_msg_peers_t *list)
{
    for (uint32_t i = 0; list->since == 0 && i < m->peer_count; i++) {
        m->peers[i].seen_by &= ~bit_of(m, link);
    }
    for (uint32_t i = 0; i < list->gone_count; i++) {
        td_member_peer_t *known = peer_find(m, list->gone[i]);
        if (known != NULL) {
            known->seen_by &= ~bit_of(m, link);
        }
    }
}

static void handle_peers(td_member_t *m, link_t *link, const td_msg_peers_t *list)
{
    if (list->since != 0 && list->since != link->list_version) {
        link->registered = false; /* what came before was lost: who registers gets it all */
        link->next_send_ns = 0;
        return;
    }
    unlist(m, link, list);
    link->listed = true;
    link->list_version = list->version;
    for (uint32_t i = 0; i < list->count; i++) {
        if (list->peers[i].role != TD_ROLE_ROUTER) {
            peer_apply(m, &list->peers[i], bit_of(m, link)); /* ourselves too: a store is its own
                                                                segment */
        }
    }
    drop_unlisted(m);
}

/* --- time ------------------------------------------------------------------------------------- */

static void send_register(td_member_t *m, const link_t *link)
{
    td_msg_t msg = {.type = TD_MSG_REGISTER, .u.reg = m->self.u.reg};
    td_status_t status = TD_OK;

    msg.u.reg.self.incarnation = td_bus_incarnation(m->bus);
    msg.u.reg.self.endpoint = td_bus_endpoint(m->bus);
    msg.u.reg.ticket_epoch = link->ticket_epoch;
    msg.u.reg.peer_changes = true;
    status = td_bus_send(m->bus, link->router.id, &msg);
    if (status != TD_OK) {
        TD_LOG_WARN("registration not sent", "router=%s status=%s", link->router.id,
                    td_status_name(status));
    }
}

static void tell_fenced(td_member_t *m, const char *router)
{
    if (m->events.fenced != NULL) {
        m->events.fenced(m->events.ctx, router, td_bus_incarnation(m->bus));
    }
}

/* A router had declared us dead, or knows another process of our name. */
static void begin_new_life(td_member_t *m)
{
    td_bus_set_incarnation(m->bus, td_random_u64() | 1);
    register_anew(m);
    for (uint32_t i = 0; i < TD_ROUTERS_MAX; i++) {
        m->links[i].fenced = true;
    }
    tell_fenced(m, NULL);
}

static uint64_t silent_ms(const link_t *link, uint64_t now)
{
    return link->last_lease_ns == 0 ? 0 : (now - link->last_lease_ns) / TD_NS_PER_MS;
}

/* One that came back has another incarnation and does not know us. One that only slept shall get
 * what was sent meanwhile, so the connection stays until it answers. */
static void link_watch(td_member_t *m, link_t *link, uint64_t now)
{
    const uint64_t silent = silent_ms(link, now);

    if (silent > ROUTER_SILENT_MS) {
        link->registered = false;
        if (link->listed && td_member_registered(m) > 0) { /* now, or since one came back */
            link->listed = false;                          /* others say who is there */
            link->list_version = 0;
            drop_unlisted(m);
        }
    }
    if (silent > link->lease_ms && !link->fenced) {
        TD_LOG_WARN("router silent for a ticket lease", "router=%s silent_ms=%llu", link->router.id,
                    (unsigned long long)silent);
        link->fenced = true;
        link->ticket_epoch = td_random_u64() | 1;
        tell_fenced(m, link->router.id);
    }
    if (!link->wanted && link->fenced && !link->registered) {
        TD_LOG_INFO("router left", "router=%s", link->router.id);
        td_bus_disconnect(m->bus, link->router.id);
        *link = (link_t){0};
    }
}

static void link_send(td_member_t *m, link_t *link, const td_msg_heartbeat_t *load, uint64_t now)
{
    td_msg_t beat = {.type = TD_MSG_HEARTBEAT, .u.heartbeat = *load};

    if (now < link->next_send_ns && load->draining == link->told_draining) {
        return;
    }
    link->told_draining = load->draining;
    link->next_send_ns = now + TD_HEARTBEAT_MS * TD_NS_PER_MS;
    if (!link->registered) {
        send_register(m, link);
        return;
    }
    if (m->events.share != NULL && td_member_registered(m) > 1) {
        m->events.share(m->events.ctx, link->router.id, &beat.u.heartbeat);
    }
    if (td_bus_send(m->bus, link->router.id, &beat) != TD_OK) {
        TD_LOG_DEBUG("heartbeat not sent", "router=%s", link->router.id);
    }
}

void td_member_tick(td_member_t *m, const td_msg_heartbeat_t *load)
{
    const uint64_t now = td_now_ns();

    for (uint32_t i = 0; i < TD_ROUTERS_MAX; i++) {
        link_t *link = &m->links[i];
        if (link->router.id[0] != '\0') {
            link_watch(m, link, now);
        }
        if (link->router.id[0] != '\0') {
            link_send(m, link, load, now);
        }
    }
}

/* --- messages --------------------------------------------------------------------------------- */

/* Who came back sooner than a lease ends knows nothing of the tickets of its former life: nobody
 * would ever cancel them. It has sent us none yet, in this one. */
static void begin_link_life(td_member_t *m, link_t *link, uint64_t life)
{
    const bool is_over = link->life != 0 && link->life != life && !link->fenced;

    link->life = life;
    link->fenced = false;
    if (is_over) {
        TD_LOG_WARN("router has begun a new life", "router=%s", link->router.id);
        tell_fenced(m, link->router.id);
    }
}

static void handle_registered(td_member_t *m, link_t *link, const td_msg_t *msg)
{
    const td_msg_registered_t *r = &msg->u.registered;

    if (!r->accepted) {
        TD_LOG_WARN("router refused us", "router=%s why=\"%s\"", link->router.id, r->error);
        if (link->registered || strcmp(r->error, TD_DEAD_TEXT) == 0) {
            begin_new_life(m);
        }
        return;
    }
    if (td_bus_connect(m->bus, link->router.id, link->router.endpoint, msg->sender_incarnation) !=
        TD_OK) {
        return;
    }
    link->registered = true;
    link->last_lease_ns = td_now_ns();
    begin_link_life(m, link, msg->sender_incarnation);
    if (m->events.registered != NULL) {
        m->events.registered(m->events.ctx, r);
    }
}

bool td_member_handle(td_member_t *m, const td_msg_t *msg)
{
    link_t *link = link_find(m, msg->sender_id);

    if (link == NULL) {
        return false;
    }
    switch (msg->type) {
    case TD_MSG_REGISTERED:
        handle_registered(m, link, msg);
        return true;
    case TD_MSG_PEERS:
        handle_peers(m, link, &msg->u.peers);
        return true;
    case TD_MSG_LEASE:
        link->last_lease_ns = td_now_ns();
        link->fenced = false;
        if (msg->u.lease.lease_ms > 0) {
            link->lease_ms = msg->u.lease.lease_ms;
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

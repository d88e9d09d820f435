#include "common/wire/td_bus.h"

#include <errno.h>
#include <sodium.h>
#include <stdio.h>
#include <string.h>
#include <zmq.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/base/td_log.h"
#include "common/base/td_names.h"
#include "common/wire/td_zap.h"

#define HEARTBEAT_MS 500
#define HEARTBEAT_TIMEOUT_MS 2000
#define RECONNECT_MS 20
#define RECONNECT_MS_MAX 500
#define OUTBOX_POLL_MS 5u
#define ZAP_DOMAIN "tandem"
#define REFUSED_PER_RECV                                                                           \
    64u /* then the caller's loop goes on: a flood of garbage must not hold it */

typedef struct outbox_entry {
    struct outbox_entry *next;
    bool is_register;
    size_t len;
    uint8_t bytes[];
} outbox_entry_t;

typedef struct bus_peer {
    char id[TD_MSG_ID_CHARS_MAX + 1];
    char endpoint[256];
    uint64_t incarnation; /* 0 = not known */
    uint64_t sequence;    /* of the last message sent; see td_bus_connect() */
    uint64_t seen;        /* sequence of the last message received */
    void *dealer;         /* owned */
    outbox_entry_t *head; /* owned */
    outbox_entry_t *tail;
    uint32_t waiting;
} bus_peer_t;

struct td_bus_io {
    void *context; /* owned */
    td_zap_t *zap; /* owned; NULL until a bus has CURVE */
};

struct td_bus {
    td_bus_io_t *io;     /* borrowed */
    td_bus_io_t *own_io; /* owned; NULL where it is shared */
    void *router;        /* owned */
    int fd;              /* of the router's messages */
    char id[TD_MSG_ID_CHARS_MAX + 1];
    uint64_t incarnation;
    char endpoint[256];
    bool curve;
    uint8_t public_key[crypto_box_PUBLICKEYBYTES];
    uint8_t secret_key[crypto_box_SECRETKEYBYTES];
    bus_peer_t **peers; /* owned [TD_BUS_PEERS_MAX], dense */
    uint32_t peer_count;
    td_names_t names; /* of the peers, to their indexes */
    uint32_t waiting; /* over all outboxes */
    uint64_t refused;
    td_str_t scratch;
};

static bool endpoint_is_loopback(const char *endpoint)
{
    return strstr(endpoint, "://127.") != NULL || strstr(endpoint, "://localhost") != NULL ||
           strstr(endpoint, "://[::1]") != NULL || strncmp(endpoint, "ipc://", 6) == 0 ||
           strncmp(endpoint, "inproc://", 9) == 0;
}

static void derive_keys(td_bus_t *bus, const uint8_t *secret)
{
    static const char purpose[] = "tandem curve key pair";
    (void)crypto_generichash(bus->secret_key, sizeof(bus->secret_key), (const uint8_t *)purpose,
                             sizeof(purpose) - 1, secret, TD_CLUSTER_SECRET_BYTES);
    (void)crypto_scalarmult_base(bus->public_key, bus->secret_key);
}

static int set_int(void *socket, int option, int value)
{
    return zmq_setsockopt(socket, option, &value, sizeof(value));
}

/* The options every socket gets: the defaults drop silently or block. */
static int set_common(void *socket)
{
    int64_t size_max = TD_MSG_BYTES_MAX;
    int bad = set_int(socket, ZMQ_LINGER, 0);
    bad |= set_int(socket, ZMQ_SNDHWM, TD_BUS_HWM);
    bad |= set_int(socket, ZMQ_RCVHWM, TD_BUS_HWM);
    bad |= zmq_setsockopt(socket, ZMQ_MAXMSGSIZE, &size_max, sizeof(size_max));
    bad |= set_int(socket, ZMQ_HEARTBEAT_IVL, HEARTBEAT_MS);
    bad |= set_int(socket, ZMQ_HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS);
    return bad;
}

static int set_curve(const td_bus_t *bus, void *socket, bool server)
{
    int bad = 0;
    if (server) {
        bad |= set_int(socket, ZMQ_CURVE_SERVER, 1);
        bad |= zmq_setsockopt(socket, ZMQ_ZAP_DOMAIN, ZAP_DOMAIN, sizeof(ZAP_DOMAIN) - 1);
    } else {
        bad |= zmq_setsockopt(socket, ZMQ_CURVE_SERVERKEY, bus->public_key, 32);
        bad |= zmq_setsockopt(socket, ZMQ_CURVE_PUBLICKEY, bus->public_key, 32);
    }
    return bad | zmq_setsockopt(socket, ZMQ_CURVE_SECRETKEY, bus->secret_key, 32);
}

td_status_t td_bus_io_create(uint32_t threads, uint32_t sockets_max, td_bus_io_t **out)
{
    td_bus_io_t *io = td_calloc(1, sizeof(*io));

    if (io == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    io->context = zmq_ctx_new();
    if (io->context == NULL) {
        td_free(io);
        return TD_ERR_NO_MEMORY;
    }
    if (zmq_ctx_set(io->context, ZMQ_IO_THREADS, (int)threads) != 0 ||
        zmq_ctx_set(io->context, ZMQ_MAX_SOCKETS, (int)sockets_max) != 0) {
        TD_LOG_ERROR("bus cannot have so many sockets", "threads=%u sockets=%u", threads,
                     sockets_max);
        td_bus_io_destroy(io);
        return TD_ERR_INVALID;
    }
    *out = io;
    return TD_OK;
}

void td_bus_io_destroy(td_bus_io_t *io)
{
    if (io != NULL) {
        td_zap_destroy(io->zap);
        (void)zmq_ctx_term(io->context);
        td_free(io);
    }
}

/* Who knows the router's public key could make a connection; only who has the cluster's secret has
 * the private one, too. */
static td_status_t allow_own_key(td_bus_t *bus)
{
    if (!bus->curve) {
        return TD_OK;
    }
    if (bus->io->zap == NULL) {
        TD_TRY(td_zap_create(bus->io->context, ZAP_DOMAIN, &bus->io->zap));
    }
    return td_zap_allow(bus->io->zap, bus->public_key);
}

static td_status_t resolve_endpoint(td_bus_t *bus, const char *advertise)
{
    char bound[256];
    size_t len = sizeof(bound);
    const char *port = NULL;

    if (zmq_getsockopt(bus->router, ZMQ_LAST_ENDPOINT, bound, &len) != 0) {
        return TD_ERR_IO;
    }
    port = strrchr(bound, ':');
    if (advertise != NULL && strncmp(bound, "tcp://", 6) == 0 && port != NULL) {
        (void)snprintf(bus->endpoint, sizeof(bus->endpoint), "tcp://%s%s", advertise, port);
    } else {
        (void)snprintf(bus->endpoint, sizeof(bus->endpoint), "%s", bound);
    }
    return TD_OK;
}

static td_status_t open_router(td_bus_t *bus, const td_bus_config_t *config)
{
    size_t len = sizeof(bus->fd);

    bus->router = zmq_socket(bus->io->context, ZMQ_ROUTER);
    if (bus->router == NULL || set_common(bus->router) != 0 ||
        set_int(bus->router, ZMQ_ROUTER_MANDATORY, 1) != 0 ||
        (bus->curve && set_curve(bus, bus->router, true) != 0) ||
        zmq_bind(bus->router, config->bind) != 0 ||
        zmq_getsockopt(bus->router, ZMQ_FD, &bus->fd, &len) != 0) {
        TD_LOG_ERROR("bus cannot bind", "endpoint=%s err=\"%s\"", config->bind,
                     zmq_strerror(zmq_errno()));
        return TD_ERR_IO;
    }
    return resolve_endpoint(bus, config->advertise);
}

td_status_t td_bus_create(const td_bus_config_t *config, td_bus_t **out)
{
    td_status_t status = TD_ERR_NO_MEMORY;
    td_bus_t *bus = td_calloc(1, sizeof(*bus));

    if (bus == NULL) {
        return status;
    }
    (void)snprintf(bus->id, sizeof(bus->id), "%s", config->id);
    bus->incarnation = config->incarnation;
    bus->curve = config->curve || !endpoint_is_loopback(config->bind) ||
                 (config->advertise != NULL && strncmp(config->advertise, "127.", 4) != 0);
    derive_keys(bus, config->secret);
    bus->io = config->io;
    bus->peers = td_calloc(TD_BUS_PEERS_MAX, sizeof(*bus->peers));
    if (bus->peers != NULL) {
        status = td_names_init(&bus->names, TD_BUS_PEERS_MAX);
    }
    if (status == TD_OK && bus->io == NULL) {
        status = td_bus_io_create(1, 2 + TD_BUS_PEERS_MAX, &bus->own_io);
        bus->io = bus->own_io;
    }
    if (status == TD_OK) {
        status = allow_own_key(bus);
    }
    if (status == TD_OK) {
        status = open_router(bus, config);
    }
    if (status != TD_OK) {
        td_bus_destroy(bus);
        return status;
    }
    *out = bus;
    return TD_OK;
}

static void outbox_clear(td_bus_t *bus, bus_peer_t *peer)
{
    while (peer->head != NULL) {
        outbox_entry_t *next = peer->head->next;
        td_free(peer->head);
        peer->head = next;
        bus->waiting--;
    }
    peer->tail = NULL;
    peer->waiting = 0;
}

static void peer_free(td_bus_t *bus, bus_peer_t *peer)
{
    outbox_clear(bus, peer);
    if (peer->dealer != NULL) {
        (void)zmq_close(peer->dealer);
    }
    td_free(peer);
}

void td_bus_destroy(td_bus_t *bus)
{
    if (bus == NULL) {
        return;
    }
    for (uint32_t i = 0; i < bus->peer_count; i++) {
        peer_free(bus, bus->peers[i]);
    }
    if (bus->router != NULL) {
        (void)zmq_close(bus->router);
    }
    td_bus_io_destroy(bus->own_io);
    td_names_fini(&bus->names);
    td_free(bus->peers);
    td_str_fini(&bus->scratch);
    sodium_memzero(bus->secret_key, sizeof(bus->secret_key));
    td_free(bus);
}

void td_bus_linger(td_bus_t *bus, uint32_t ms)
{
    for (uint32_t i = 0; i < bus->peer_count; i++) {
        (void)set_int(bus->peers[i]->dealer, ZMQ_LINGER, (int)ms);
    }
}

const char *td_bus_endpoint(const td_bus_t *bus)
{
    return bus->endpoint;
}

const char *td_bus_id(const td_bus_t *bus)
{
    return bus->id;
}

uint64_t td_bus_incarnation(const td_bus_t *bus)
{
    return bus->incarnation;
}

void td_bus_set_incarnation(td_bus_t *bus, uint64_t incarnation)
{
    bus->incarnation = incarnation;
}

static uint32_t peer_find(const td_bus_t *bus, const char *id)
{
    return td_names_find(&bus->names, id);
}

uint64_t td_bus_peer_incarnation(const td_bus_t *bus, const char *id)
{
    uint32_t i = peer_find(bus, id);
    return i == TD_NAMES_NONE ? 0 : bus->peers[i]->incarnation;
}

td_status_t td_bus_connect(td_bus_t *bus, const char *id, const char *endpoint,
                           uint64_t incarnation)
{
    uint32_t at = peer_find(bus, id);
    bus_peer_t *peer = NULL;

    if (at != TD_NAMES_NONE) {
        peer = bus->peers[at];
        if (strcmp(peer->endpoint, endpoint) == 0 &&
            (peer->incarnation == incarnation || peer->incarnation == 0)) {
            peer->incarnation = incarnation;
            return TD_OK;
        }
        td_bus_disconnect(bus, id);
    }
    if (bus->peer_count == TD_BUS_PEERS_MAX) {
        return TD_ERR_BUSY;
    }
    peer = td_calloc(1, sizeof(*peer));
    if (peer == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    (void)snprintf(peer->id, sizeof(peer->id), "%s", id);
    (void)snprintf(peer->endpoint, sizeof(peer->endpoint), "%s", endpoint);
    peer->incarnation = incarnation;
    /* The other side may know us still, and what it has seen: a new connection of the same two
     * lives goes on above it. No bus sends a message a nanosecond. */
    peer->sequence = td_now_ns();
    peer->dealer = zmq_socket(bus->io->context, ZMQ_DEALER);
    if (peer->dealer == NULL || set_common(peer->dealer) != 0 ||
        set_int(peer->dealer, ZMQ_IMMEDIATE, 1) != 0 ||
        set_int(peer->dealer, ZMQ_RECONNECT_IVL, RECONNECT_MS) != 0 ||
        set_int(peer->dealer, ZMQ_RECONNECT_IVL_MAX, RECONNECT_MS_MAX) != 0 ||
        ((bus->curve || !endpoint_is_loopback(endpoint)) &&
         set_curve(bus, peer->dealer, false) != 0) ||
        zmq_connect(peer->dealer, endpoint) != 0) {
        TD_LOG_ERROR("bus cannot connect", "peer=%s endpoint=%s err=\"%s\"", id, endpoint,
                     zmq_strerror(zmq_errno()));
        peer_free(bus, peer);
        return TD_ERR_INVALID;
    }
    td_names_set(&bus->names, peer->id, bus->peer_count);
    bus->peers[bus->peer_count++] = peer;
    return TD_OK;
}

void td_bus_disconnect(td_bus_t *bus, const char *id)
{
    uint32_t at = peer_find(bus, id);
    if (at == TD_NAMES_NONE) {
        return;
    }
    td_names_remove(&bus->names, id);
    peer_free(bus, bus->peers[at]);
    bus->peers[at] = bus->peers[--bus->peer_count];
    if (at < bus->peer_count) {
        td_names_set(&bus->names, bus->peers[at]->id, at);
    }
}

static void flush_peer(td_bus_t *bus, bus_peer_t *peer)
{
    while (peer->head != NULL) {
        outbox_entry_t *entry = peer->head;
        if (zmq_send(peer->dealer, entry->bytes, entry->len, ZMQ_DONTWAIT) < 0) {
            return; /* EAGAIN: not connected, or its queue is full */
        }
        peer->head = entry->next;
        if (peer->head == NULL) {
            peer->tail = NULL;
        }
        peer->waiting--;
        bus->waiting--;
        td_free(entry);
    }
}

/* Only the newest registration counts; they must not pile up for a router that is away. */
static void drop_registers(td_bus_t *bus, bus_peer_t *peer)
{
    outbox_entry_t **link = &peer->head;

    peer->tail = NULL;
    while (*link != NULL) {
        outbox_entry_t *entry = *link;
        if (entry->is_register) {
            *link = entry->next;
            td_free(entry);
            peer->waiting--;
            bus->waiting--;
        } else {
            peer->tail = entry;
            link = &entry->next;
        }
    }
}

static td_status_t outbox_push(td_bus_t *bus, bus_peer_t *peer, const td_str_t *bytes,
                               bool is_register)
{
    outbox_entry_t *entry = NULL;

    if (peer->waiting >= TD_BUS_OUTBOX_MAX) {
        return TD_ERR_BUSY;
    }
    entry = td_alloc(sizeof(*entry) + bytes->len);
    if (entry == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    entry->next = NULL;
    entry->is_register = is_register;
    entry->len = bytes->len;
    memcpy(entry->bytes, bytes->bytes, bytes->len);
    if (peer->tail != NULL) {
        peer->tail->next = entry;
    } else {
        peer->head = entry;
    }
    peer->tail = entry;
    peer->waiting++;
    bus->waiting++;
    return TD_OK;
}

td_status_t td_bus_send(td_bus_t *bus, const char *id, td_msg_t *msg)
{
    uint32_t at = peer_find(bus, id);
    bus_peer_t *peer = NULL;

    if (at == TD_NAMES_NONE) {
        return TD_ERR_NOT_FOUND;
    }
    peer = bus->peers[at];
    msg->sender_id = bus->id;
    msg->sender_incarnation = bus->incarnation;
    msg->receiver_incarnation = msg->type == TD_MSG_REGISTER ? 0 : peer->incarnation;
    msg->sequence = peer->sequence + 1;
    td_str_clear(&bus->scratch);
    TD_TRY(td_msg_encode(msg, &bus->scratch));
    if (msg->type == TD_MSG_REGISTER) {
        drop_registers(bus, peer);
    }
    flush_peer(bus, peer);
    if (peer->head != NULL ||
        zmq_send(peer->dealer, bus->scratch.bytes, bus->scratch.len, ZMQ_DONTWAIT) < 0) {
        TD_TRY(outbox_push(bus, peer, &bus->scratch, msg->type == TD_MSG_REGISTER));
    }
    peer->sequence++; /* what never went out leaves no gap */
    return TD_OK;
}

int td_bus_fd(const td_bus_t *bus)
{
    return bus->fd;
}

void td_bus_flush(td_bus_t *bus)
{
    for (uint32_t i = 0; bus->waiting > 0 && i < bus->peer_count; i++) {
        flush_peer(bus, bus->peers[i]);
    }
}

void td_bus_wait(td_bus_t *bus, const int *fds, uint32_t fd_count, uint32_t timeout_ms,
                 bool *readable_out)
{
    zmq_pollitem_t items[1 + TD_BUS_WAIT_FDS_MAX];

    TD_ASSERT(fd_count <= TD_BUS_WAIT_FDS_MAX);
    td_bus_flush(bus);
    if (bus->waiting > 0) {
        timeout_ms = TD_MIN(timeout_ms, OUTBOX_POLL_MS);
    }
    items[0] = (zmq_pollitem_t){.socket = bus->router, .events = ZMQ_POLLIN};
    for (uint32_t i = 0; i < fd_count; i++) {
        items[i + 1] = (zmq_pollitem_t){.fd = fds[i], .events = ZMQ_POLLIN};
    }
    if (zmq_poll(items, (int)fd_count + 1, (long)timeout_ms) < 0) {
        for (uint32_t i = 0; i <= fd_count; i++) {
            items[i].revents = 0; /* EINTR */
        }
    }
    for (uint32_t i = 0; i < fd_count; i++) {
        readable_out[i] = (items[i + 1].revents & ZMQ_POLLIN) != 0;
    }
}

/* Is the message from, and for, the lives of the two processes that know each other? */
static bool envelope_is_live(td_bus_t *bus, td_msg_t *msg)
{
    uint32_t at = peer_find(bus, msg->sender_id);

    if (msg->type == TD_MSG_REGISTER || msg->type == TD_MSG_REGISTERED) {
        /* These make processes known to each other; the receiver checks what they say. */
        return msg->receiver_incarnation == 0 || msg->receiver_incarnation == bus->incarnation;
    }
    if (msg->receiver_incarnation != bus->incarnation) {
        return false;
    }
    if (at == TD_NAMES_NONE || (bus->peers[at]->incarnation != 0 &&
                                bus->peers[at]->incarnation != msg->sender_incarnation)) {
        /* A heartbeat of a process that was declared dead is let through: it must be told. */
        return msg->type == TD_MSG_HEARTBEAT;
    }
    if (msg->sequence <= bus->peers[at]->seen) {
        return false; /* a duplicate */
    }
    /* ZeroMQ reconnects by itself, and forgets what was on its way. */
    msg->gap = bus->peers[at]->seen != 0 && msg->sequence != bus->peers[at]->seen + 1;
    bus->peers[at]->seen = msg->sequence;
    return true;
}

static td_status_t recv_frame(td_bus_t *bus, zmq_msg_t *frame, bool *more)
{
    if (zmq_msg_recv(frame, bus->router, ZMQ_DONTWAIT) < 0) {
        return TD_ERR_NOT_FOUND;
    }
    *more = zmq_msg_more(frame) != 0;
    return TD_OK;
}

td_status_t td_bus_recv(td_bus_t *bus, td_msg_t *msg_out, td_msg_arena_t **arena_out)
{
    for (uint32_t refused = 0; refused < REFUSED_PER_RECV; refused++) {
        zmq_msg_t frame;
        bool more = true;
        uint32_t frames = 0;
        td_status_t status = TD_ERR_PROTOCOL;

        /* Identity, then exactly one frame of bytes; anything longer is read to its end and
         * dropped. */
        while (more) {
            (void)zmq_msg_init(&frame);
            if (recv_frame(bus, &frame, &more) != TD_OK) {
                (void)zmq_msg_close(&frame);
                return TD_ERR_NOT_FOUND;
            }
            frames++;
            if (frames == 2 && !more) {
                status =
                    td_msg_decode(zmq_msg_data(&frame), zmq_msg_size(&frame), msg_out, arena_out);
            }
            (void)zmq_msg_close(&frame);
        }
        if (status == TD_OK) {
            if (envelope_is_live(bus, msg_out)) {
                return TD_OK;
            }
            TD_LOG_DEBUG("stale message dropped", "from=%s type=%d", msg_out->sender_id,
                         (int)msg_out->type);
            td_msg_arena_free(*arena_out);
        }
        bus->refused++;
    }
    return TD_ERR_NOT_FOUND;
}

uint64_t td_bus_refused(const td_bus_t *bus)
{
    return bus->refused;
}

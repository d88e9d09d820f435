#include "common/transfer/td_transfer_nccl.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/queue.h>
#include <time.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/base/td_fault.h"
#include "common/base/td_log.h"

#define CLOSE_MS 3000u /* at the end, for links to be gone */
#define NO_SLOT UINT32_MAX
#define NEXT_SOON_US 50u    /* the device has something under way */
#define NEXT_LATER_US 5000u /* a link opens or closes */
#ifndef TAILQ_FOREACH_SAFE
#define TAILQ_FOREACH_SAFE(var, head, field, next)                                                 \
    for ((var) = TAILQ_FIRST(head); (var) != NULL && ((next) = TAILQ_NEXT(var, field), true);      \
         (var) = (next))
#endif

/* --- wire: as the transfer's own, both ends of one build's layout ------------------------------
 */

typedef enum message_kind {
    MSG_WANT = 1,   /* rank 1: open a link to me */
    MSG_OPEN,       /* rank 0: open it, by the name that follows */
    MSG_CLOSE,      /* it is over */
    MSG_ASK,        /* gather the parts that follow, and send them when it is their turn */
    MSG_READY,      /* owner, rank 1: they are gathered */
    MSG_GO_SEND,    /* rank 0: post your send, as number seq */
    MSG_GO_RECEIVE, /* rank 0: post your receive, as number seq */
    MSG_REFUSE      /* owner: it will not come */
} message_kind_t;

typedef struct message {
    uint64_t sender; /* incarnation */
    uint64_t receiver;
    uint64_t serial; /* of the link */
    uint64_t op;     /* the asker's */
    uint32_t kind;
    uint32_t count; /* parts that follow */
    uint32_t seq;
    int32_t status;
} message_t;

typedef struct message_part {
    uint64_t epoch;
    uint32_t block;
    uint32_t offset;
    uint32_t bytes;
    uint32_t reserved;
} message_part_t;

_Static_assert(sizeof(message_t) == 48 && sizeof(message_part_t) == 24, "layout on the wire");

/* --- state -------------------------------------------------------------------------------------
 */

typedef enum op_state {
    OP_ASKED,     /* receive: the owner was asked */
    OP_QUEUED,    /* send: waits for a slot */
    OP_GATHERING, /* send */
    OP_STAGED,    /* send: rank 0 knows that it may have its turn */
    OP_TURN,      /* its place in the order is known to both */
    OP_POSTED,    /* NCCL may read or write its slot */
    OP_LANDING    /* receive: on its way from the slot to the host's blocks */
} op_state_t;

typedef struct op { /* a chunk on its way, at one of its ends */
    uint64_t id;    /* the asker's */
    bool send;
    bool told; /* rank 0, receive: go is yet to be said */
    op_state_t state;
    uint32_t slot;
    uint64_t since_ns;       /* this state, or that of its link */
    uint64_t fetch_limit_ns; /* its fetch goes another way after so long without a sign of life */
    size_t bytes;
    td_fetch_t *fetch; /* receive: whose it is; NULL: nobody's any more */
    struct peer *peer; /* NULL once it does not depend on the link */
    TAILQ_ENTRY(op) link;
    TAILQ_ENTRY(op) turn;
    uint32_t part_count;
    td_kv_part_t parts[];
} op_t;

TAILQ_HEAD(op_list, op);

typedef enum peer_state { PEER_IDLE, PEER_OPENING, PEER_READY, PEER_CLOSING } peer_state_t;

typedef struct peer {
    uint64_t incarnation;
    peer_state_t state;
    uint32_t rank; /* ours */
    uint64_t serial;
    td_kv_link_t *link;
    uint32_t seq;         /* of the next turn */
    uint64_t deadline_ns; /* of opening */
    uint64_t retry_ns;    /* not opened, or asked for, before */
    uint64_t backoff_ns;
    uint64_t heard_ns; /* a chunk got across this link; 0: none has */
    bool offered;      /* by rank 0, while an older link was not gone yet */
    bool wanted;       /* by rank 1 */
    bool removed;
    uint64_t offered_serial;
    uint8_t offered_id[TD_KV_LINK_ID_BYTES];
    struct op_list ops;   /* oldest first, but for those below */
    struct op_list turns; /* of ops, those in the order that both know */
    struct op_list held;  /* a link that is not gone may still read or write their slots */
    uint32_t asks;        /* queued sends */
    uint32_t slots[2];    /* in use: receiving, sending */
    TAILQ_ENTRY(peer) peers;
} peer_t;

struct td_nccl {
    td_nccl_config_t config;
    td_kv_device_t *device;
    bool started;
    bool broken; /* the device failed: nothing is begun any more */
    bool news;   /* of a fetch, for who drives it */
    uint64_t next_op;
    bool busy[2][TD_NCCL_SLOTS]; /* receiving, sending */
    TAILQ_HEAD(, peer) peers;
    struct op_list landing;  /* in the order that they end */
    struct op_list draining; /* gathered for nobody */
};

/* --- slots and ops ---------------------------------------------------------------------------- */

static uint32_t slot_take(td_nccl_t *n, peer_t *peer, bool send)
{
    if (peer->slots[send] >= TD_NCCL_SLOTS_OF_PEER) {
        return NO_SLOT;
    }
    for (uint32_t i = 0; i < TD_NCCL_SLOTS; i++) {
        if (!n->busy[send][i]) {
            n->busy[send][i] = true;
            peer->slots[send]++;
            return i + (send ? TD_NCCL_SLOTS : 0);
        }
    }
    return NO_SLOT;
}

static void op_free(td_nccl_t *n, op_t *op)
{
    if (op->slot != NO_SLOT) {
        n->busy[op->send][op->slot % TD_NCCL_SLOTS] = false;
        if (op->peer != NULL) {
            op->peer->slots[op->send]--;
        }
    }
    td_free(op);
}

/* The link's end does not concern it any more. */
static void op_leave_peer(op_t *op)
{
    op->peer->slots[op->send]--;
    TAILQ_REMOVE(&op->peer->ops, op, link);
    op->peer = NULL;
}

static op_t *op_new(peer_t *peer, bool send, uint64_t id, uint32_t part_count)
{
    op_t *op = td_calloc(1, sizeof(*op) + part_count * sizeof(op->parts[0]));

    if (op != NULL) {
        op->id = id;
        op->send = send;
        op->state = send ? OP_QUEUED : OP_ASKED;
        op->slot = NO_SLOT;
        op->peer = peer;
        op->part_count = part_count;
        op->since_ns = td_now_ns();
    }
    return op;
}

static op_t *op_find(peer_t *peer, bool send, uint64_t id)
{
    op_t *op = NULL;

    TAILQ_FOREACH(op, &peer->ops, link)
    {
        if (op->send == send && op->id == id) {
            return op;
        }
    }
    return NULL;
}

static void fetch_fails(td_nccl_t *n, op_t *op, td_status_t status)
{
    if (op->fetch != NULL) {
        n->news = true;
        op->fetch->nccl.asked--;
        op->fetch->nccl.status = status;
        op->fetch = NULL;
    }
}

/* --- messages --------------------------------------------------------------------------------- */

static bool send_with(td_nccl_t *n, const peer_t *peer, message_t *m, const void *more, size_t len)
{
    uint8_t *bytes = td_alloc(sizeof(*m) + len);
    bool sent = false;

    if (bytes == NULL) {
        return false;
    }
    m->sender = n->config.incarnation(n->config.ctx);
    m->receiver = peer->incarnation;
    memcpy(bytes, m, sizeof(*m));
    if (len > 0) {
        memcpy(bytes + sizeof(*m), more, len);
    }
    sent = n->config.send(n->config.ctx, peer->incarnation, bytes, sizeof(*m) + len);
    td_free(bytes);
    return sent;
}

static bool send_plain(td_nccl_t *n, const peer_t *peer, message_kind_t kind, const op_t *op,
                       uint32_t seq, td_status_t status)
{
    message_t m = {.serial = peer->serial,
                   .op = op == NULL ? 0 : op->id,
                   .kind = (uint32_t)kind,
                   .seq = seq,
                   .status = status};

    return send_with(n, peer, &m, NULL, 0);
}

/* --- links ------------------------------------------------------------------------------------ */

static void count_links(td_nccl_t *n)
{
    const peer_t *p = NULL;
    const op_t *op = NULL;
    uint64_t ready = 0;
    uint64_t held = 0;

    TAILQ_FOREACH(p, &n->peers, peers)
    {
        ready += p->state == PEER_READY;
        TAILQ_FOREACH(op, &p->held, link)
        {
            held++;
        }
    }
    td_metric_set(n->config.metrics.links, ready);
    td_metric_set(n->config.metrics.quarantined, held);
}

static void wait_longer(peer_t *p)
{
    p->retry_ns = td_now_ns() + p->backoff_ns;
    p->backoff_ns = TD_MIN(p->backoff_ns * 2, TD_NCCL_RETRY_MS_MAX * TD_NS_PER_MS);
}

/* Everything under way with the peer ends; what NCCL may still touch waits until the link is gone.
 */
static void link_end(td_nccl_t *n, peer_t *p, const char *why)
{
    op_t *op = NULL;

    if (p->state != PEER_OPENING && p->state != PEER_READY) {
        return;
    }
    TD_LOG_WARN("nccl link ends", "peer=%016" PRIx64 " was=%s why=\"%s\" retry_ms=%llu",
                p->incarnation, p->state == PEER_READY ? "ready" : "opening", why,
                (unsigned long long)(p->backoff_ns / TD_NS_PER_MS));
    (void)send_plain(n, p, MSG_CLOSE, NULL, 0, TD_OK);
    n->device->ops->link_close(p->link);
    td_metric_add(n->config.metrics.aborted, 1);
    TAILQ_INIT(&p->turns);
    while ((op = TAILQ_FIRST(&p->ops)) != NULL) {
        fetch_fails(n, op, TD_ERR_BUSY);
        if (op->state == OP_POSTED) {
            TAILQ_REMOVE(&p->ops, op, link);
            TAILQ_INSERT_TAIL(&p->held, op, link);
        } else if (op->state == OP_GATHERING) {
            op_leave_peer(op);
            TAILQ_INSERT_TAIL(&n->draining, op, link);
        } else {
            TAILQ_REMOVE(&p->ops, op, link);
            op_free(n, op);
        }
    }
    p->asks = 0;
    p->state = PEER_CLOSING;
    p->wanted = false;
    wait_longer(p);
    count_links(n);
}

static void link_begin(td_nccl_t *n, peer_t *p, uint32_t rank, uint64_t serial,
                       const uint8_t id[TD_KV_LINK_ID_BYTES])
{
    const uint32_t limit_ms = n->config.open_ms;
    const td_status_t status = n->device->ops->link_open(n->device, id, rank, &p->link);

    p->rank = rank;
    p->serial = serial;
    if (status != TD_OK) {
        TD_LOG_WARN("nccl link not opened", "peer=%016" PRIx64 " status=%s", p->incarnation,
                    td_status_name(status));
        (void)send_plain(n, p, MSG_CLOSE, NULL, 0, TD_OK);
        wait_longer(p);
        return;
    }
    p->state = PEER_OPENING;
    p->seq = 0;
    p->heard_ns = 0;
    p->deadline_ns = td_now_ns() + limit_ms * TD_NS_PER_MS;
}

/* Rank 0 names a link and begins it; the other end is told the name. */
static void link_offer(td_nccl_t *n, peer_t *p)
{
    message_t m = {.kind = MSG_OPEN, .serial = td_random_u64()};
    uint8_t id[TD_KV_LINK_ID_BYTES];

    p->wanted = false;
    if (n->device->ops->link_id(n->device, id) != TD_OK) {
        wait_longer(p);
        return;
    }
    if (!send_with(n, p, &m, id, sizeof(id))) {
        wait_longer(p); /* a name costs the library a thread until both ends have come */
        return;
    }
    link_begin(n, p, 0, m.serial, id);
}

static bool is_first(const td_nccl_t *n, const peer_t *p)
{
    return n->config.incarnation(n->config.ctx) < p->incarnation;
}

static peer_t *peer_find(td_nccl_t *n, uint64_t incarnation)
{
    peer_t *p = NULL;

    TAILQ_FOREACH(p, &n->peers, peers)
    {
        if (p->incarnation == incarnation && !p->removed) {
            return p;
        }
    }
    return NULL;
}

/* All but the last word the same, and that not. */
static bool can_link(const char *own, const char *other)
{
    const char *own_device = strrchr(own, ' ');
    const char *other_device = strrchr(other, ' ');

    return own_device != NULL && other_device != NULL && own_device - own == other_device - other &&
           strncmp(own, other, (size_t)(own_device - own)) == 0 &&
           strcmp(own_device, other_device) != 0;
}

void td_nccl_peer_add(td_nccl_t *n, uint64_t incarnation, const char *name)
{
    peer_t *p = NULL;

    if (name == NULL || !can_link(td_nccl_name(n), name) || peer_find(n, incarnation) != NULL) {
        return;
    }
    p = td_calloc(1, sizeof(*p));
    if (p == NULL) {
        TD_LOG_WARN("no memory for a peer's device", "peer=%016" PRIx64, incarnation);
        return;
    }
    p->incarnation = incarnation;
    p->backoff_ns = n->config.retry_ms * TD_NS_PER_MS;
    TAILQ_INIT(&p->ops);
    TAILQ_INIT(&p->turns);
    TAILQ_INIT(&p->held);
    TAILQ_INSERT_TAIL(&n->peers, p, peers);
}

void td_nccl_peer_lost(td_nccl_t *n, uint64_t incarnation)
{
    peer_t *p = peer_find(n, incarnation);

    if (p != NULL) {
        link_end(n, p, "connection lost");
    }
}

void td_nccl_peer_remove(td_nccl_t *n, uint64_t incarnation)
{
    peer_t *p = peer_find(n, incarnation);

    if (p != NULL) {
        link_end(n, p, "peer gone");
        p->offered = false;
        p->wanted = false;
        p->removed = true; /* freed when its link is gone */
    }
}

bool td_nccl_wants(td_nccl_t *n, uint64_t incarnation)
{
    peer_t *p = peer_find(n, incarnation);

    if (p == NULL || n->broken) {
        return false;
    }
    if (p->state == PEER_IDLE && td_now_ns() >= p->retry_ns) {
        if (is_first(n, p)) {
            link_offer(n, p);
        } else {
            (void)send_plain(n, p, MSG_WANT, NULL, 0, TD_OK);
            p->retry_ns = td_now_ns() + n->config.retry_ms * TD_NS_PER_MS;
        }
    }
    /* Over a new link one fetch goes first, or one of the other end's: it may take long. */
    return p->state == PEER_READY && (p->heard_ns > 0 || TAILQ_EMPTY(&p->ops));
}

/* --- asking ----------------------------------------------------------------------------------- */

/* How many parts the next chunk of a fetch has. */
static uint32_t count_parts(const td_nccl_t *n, const td_fetch_t *fetch)
{
    size_t left = n->config.slot_bytes;
    uint32_t offset = fetch->next_offset;
    uint32_t count = 0;

    for (uint32_t i = fetch->next_piece; i < fetch->piece_count && left > 0; i++, offset = 0) {
        if (count == TD_NCCL_PARTS_MAX) {
            break;
        }
        left -= TD_MIN(left, (size_t)(fetch->pieces[i].bytes - offset));
        count++;
    }
    return count;
}

/* A part of the destination: which of our blocks it lies in. */
static td_kv_part_t destination(const td_nccl_t *n, uint8_t *to, uint32_t bytes)
{
    const td_pool_t *pool = n->config.pool(n->config.ctx);
    const size_t total = n->config.block_count * n->config.block_bytes;
    td_kv_part_t part = {.host = to, .bytes = bytes, .block = TD_POOL_NONE};

    if (pool != NULL && to >= n->config.memory && to < n->config.memory + total) {
        const size_t at = (size_t)(to - n->config.memory);
        part.block = (uint32_t)(at / n->config.block_bytes);
        part.offset = (uint32_t)(at % n->config.block_bytes);
        part.epoch = td_pool_epoch(pool, part.block);
    }
    return part;
}

/* How long a fetch may wait from then on: what is left of its time must do for another carrier. */
static uint64_t fetch_limit_ns(const td_nccl_t *n, const td_fetch_t *fetch, uint64_t since_ns)
{
    const uint64_t limit_ns = n->config.deadline_ms * TD_NS_PER_MS;

    return fetch->deadline_ns > since_ns ? TD_MIN(limit_ns, (fetch->deadline_ns - since_ns) / 2)
                                         : limit_ns;
}

/* Cuts the next chunk off; false: it must wait, or nothing is left. */
static bool ask_next(td_nccl_t *n, peer_t *p, td_fetch_t *fetch)
{
    const uint32_t count = count_parts(n, fetch);
    message_t m = {.serial = p->serial, .kind = MSG_ASK, .count = count};
    message_part_t *parts = NULL;
    size_t left = n->config.slot_bytes;
    op_t *op = NULL;
    bool sent = false;

    if (count == 0) {
        return false;
    }
    op = op_new(p, false, n->next_op + 1, count);
    parts = td_calloc(count, sizeof(*parts));
    if (op == NULL || parts == NULL || (op->slot = slot_take(n, p, false)) == NO_SLOT) {
        td_free(parts);
        td_free(op);
        return false;
    }
    for (uint32_t i = 0; i < count; i++) {
        const td_fetch_piece_t *piece = &fetch->pieces[fetch->next_piece];
        const uint32_t bytes = (uint32_t)TD_MIN(left, (size_t)piece->bytes - fetch->next_offset);
        parts[i] = (message_part_t){.epoch = piece->epoch,
                                    .block = piece->block,
                                    .offset = piece->offset + fetch->next_offset,
                                    .bytes = bytes};
        op->parts[i] = destination(n, piece->dest + fetch->next_offset, bytes);
        op->bytes += bytes;
        left -= bytes;
        fetch->next_offset += bytes;
        if (fetch->next_offset == piece->bytes) {
            fetch->next_offset = 0;
            fetch->next_piece++;
        }
    }
    m.op = op->id;
    op->fetch = fetch;
    op->fetch_limit_ns = fetch_limit_ns(n, fetch, op->since_ns);
    n->next_op++;
    fetch->nccl.asked++;
    TAILQ_INSERT_TAIL(&p->ops, op, link);
    sent = send_with(n, p, &m, parts, count * sizeof(*parts));
    td_free(parts);
    TD_FAULT_POINT("nccl_ask");
    if (!sent) {
        link_end(n, p, "ask not sent");
    }
    return sent;
}

void td_nccl_take(td_nccl_t *n, td_fetch_t *fetch)
{
    (void)n;
    fetch->carrier = TD_CARRIER_NCCL;
    fetch->nccl.status = TD_OK;
    fetch->nccl.asked = 0;
    fetch->nccl.landing = 0;
    fetch->nccl.idle_ns = td_now_ns();
}

/* Another carrier brings the host's blocks anew, and what the device has of them stays unchecked.
 */
static void forget_copies(const td_nccl_t *n, const td_fetch_t *fetch)
{
    for (size_t i = 0; i < fetch->piece_count; i++) {
        const td_kv_part_t part =
            destination(n, fetch->pieces[i].dest, (uint32_t)fetch->pieces[i].bytes);
        if (part.block != TD_POOL_NONE) {
            n->device->ops->forget(n->device, part.block);
        }
    }
}

td_status_t td_nccl_fetch(td_nccl_t *n, td_fetch_t *fetch)
{
    peer_t *p = peer_find(n, fetch->peer);

    if (fetch->nccl.status == TD_OK && (p == NULL || p->state != PEER_READY || n->broken) &&
        (fetch->next_piece < fetch->piece_count || fetch->nccl.asked > fetch->nccl.landing)) {
        fetch->nccl.status = TD_ERR_BUSY;
    }
    if (fetch->nccl.status != TD_OK) {
        if (!td_nccl_let_go(n, fetch)) {
            return TD_INPROGRESS;
        }
        forget_copies(n, fetch);
        return fetch->nccl.status;
    }
    while (fetch->nccl.status == TD_OK && p != NULL && ask_next(n, p, fetch)) {
    }
    if (fetch->nccl.asked == 0 && fetch->next_piece < fetch->piece_count &&
        td_now_ns() - fetch->nccl.idle_ns > fetch_limit_ns(n, fetch, fetch->nccl.idle_ns)) {
        fetch->nccl.status = TD_ERR_BUSY; /* others have all of the staging memory, for too long */
    }
    return fetch->nccl.status == TD_OK && fetch->next_piece == fetch->piece_count &&
                   fetch->nccl.asked == 0
               ? TD_OK
               : TD_INPROGRESS;
}

bool td_nccl_let_go(td_nccl_t *n, td_fetch_t *fetch)
{
    peer_t *p = NULL;
    op_t *op = NULL;

    TAILQ_FOREACH(p, &n->peers, peers)
    {
        TAILQ_FOREACH(op, &p->ops, link)
        {
            if (op->fetch == fetch) { /* both ends know of it: it goes on, for nobody */
                op->fetch = NULL;
                fetch->nccl.asked--;
            }
        }
    }
    return fetch->nccl.landing == 0;
}

/* --- answering -------------------------------------------------------------------------------- */

static bool part_fits(const td_nccl_t *n, const message_part_t *part)
{
    return part->block < n->config.block_count && part->bytes > 0 &&
           part->bytes <= n->config.block_bytes &&
           part->offset <= n->config.block_bytes - part->bytes;
}

static bool parts_are_live(const td_nccl_t *n, const op_t *op)
{
    const td_pool_t *pool = n->config.pool(n->config.ctx);

    for (uint32_t i = 0; pool != NULL && i < op->part_count; i++) {
        if (td_pool_epoch(pool, op->parts[i].block) != op->parts[i].epoch) {
            return false;
        }
    }
    return true;
}

/* What an ask says, as an op; NULL: it does not fit, or there is no room for it. */
static op_t *read_ask(const td_nccl_t *n, peer_t *p, const message_t *m, const uint8_t *parts,
                      size_t len)
{
    op_t *op = NULL;

    if (p->asks >= TD_NCCL_ASKS_MAX || m->count == 0 || m->count > TD_NCCL_PARTS_MAX ||
        len != m->count * sizeof(message_part_t) || op_find(p, true, m->op) != NULL) {
        return NULL;
    }
    op = op_new(p, true, m->op, m->count);
    for (uint32_t i = 0; op != NULL && i < m->count; i++) {
        message_part_t part;
        memcpy(&part, parts + i * sizeof(part), sizeof(part));
        if (!part_fits(n, &part) || part.bytes > n->config.slot_bytes - op->bytes) {
            td_free(op);
            return NULL;
        }
        op->bytes += part.bytes;
        op->parts[i] = (td_kv_part_t){.epoch = part.epoch,
                                      .host = n->config.memory +
                                              part.block * n->config.block_bytes + part.offset,
                                      .block = part.block,
                                      .offset = part.offset,
                                      .bytes = part.bytes};
    }
    return op;
}

static void on_ask(td_nccl_t *n, peer_t *p, const message_t *m, const uint8_t *parts, size_t len)
{
    op_t *op = read_ask(n, p, m, parts, len);

    if (op == NULL) {
        const op_t refused = {.id = m->op};
        (void)send_plain(n, p, MSG_REFUSE, &refused, 0, TD_ERR_BUSY);
        return;
    }
    TAILQ_INSERT_TAIL(&p->ops, op, link);
    p->asks++;
}

static void refuse(td_nccl_t *n, peer_t *p, op_t *op, td_status_t status)
{
    (void)send_plain(n, p, MSG_REFUSE, op, 0, status);
    TAILQ_REMOVE(&p->ops, op, link);
    op_free(n, op);
}

static void take_turn(peer_t *p, op_t *op)
{
    op->state = OP_TURN;
    op->since_ns = td_now_ns();
    TAILQ_INSERT_TAIL(&p->turns, op, turn);
}

/* What was gathered is the asked blocks' only if they had their epochs all the while. */
static void gathered(td_nccl_t *n, peer_t *p, op_t *op)
{
    if (!parts_are_live(n, op)) {
        refuse(n, p, op, TD_ERR_STALE);
        return;
    }
    TD_FAULT_POINT("nccl_gathered");
    op->since_ns = td_now_ns();
    op->state = OP_STAGED;
    if (p->rank == 0) {
        take_turn(p, op);
        if (!send_plain(n, p, MSG_GO_RECEIVE, op, p->seq++, TD_OK)) {
            link_end(n, p, "go not sent");
        }
    } else if (!send_plain(n, p, MSG_READY, op, 0, TD_OK)) {
        link_end(n, p, "ready not sent");
    }
}

static void drive_send(td_nccl_t *n, peer_t *p, op_t *op)
{
    td_status_t status = TD_OK;

    if (op->state == OP_QUEUED && n->broken) {
        p->asks--;
        status = TD_ERR_BUSY;
    } else if (op->state == OP_QUEUED) {
        op->slot = slot_take(n, p, true);
        if (op->slot == NO_SLOT) {
            return;
        }
        p->asks--;
        op->state = OP_GATHERING;
        status = parts_are_live(n, op)
                     ? n->device->ops->gather(n->device, op->slot, op->parts, op->part_count)
                     : TD_ERR_STALE;
    } else if (op->state == OP_GATHERING) {
        status = n->device->ops->poll(n->device, op->slot);
        if (status == TD_OK) {
            gathered(n, p, op);
            return;
        }
    }
    if (status < 0) {
        n->broken = n->broken || status == TD_ERR_IO;
        refuse(n, p, op, status == TD_ERR_STALE ? status : TD_ERR_BUSY);
    }
}

/* --- the order, and what is posted ------------------------------------------------------------ */

/* Rank 1 posts what rank 0 says, in the order in which it says so. */
static void on_go(td_nccl_t *n, peer_t *p, const message_t *m)
{
    const bool send = m->kind == MSG_GO_SEND;
    op_t *op = op_find(p, send, m->op);

    if (p->rank == 0 || m->seq != p->seq || op == NULL ||
        op->state != (send ? OP_STAGED : OP_ASKED)) {
        link_end(n, p, "a turn that does not fit");
        return;
    }
    p->seq++;
    take_turn(p, op);
}

static void on_ready(td_nccl_t *n, peer_t *p, const message_t *m)
{
    op_t *op = op_find(p, false, m->op);

    if (p->rank != 0 || op == NULL || op->state != OP_ASKED) {
        link_end(n, p, "a chunk that was not asked for");
        return;
    }
    op->told = true;
}

static void on_refuse(td_nccl_t *n, peer_t *p, const message_t *m)
{
    op_t *op = op_find(p, false, m->op);

    if (op == NULL || op->state != OP_ASKED || op->told) {
        link_end(n, p, "a refusal that does not fit");
        return;
    }
    fetch_fails(n, op, m->status == TD_ERR_STALE ? TD_ERR_STALE : TD_ERR_BUSY);
    TAILQ_REMOVE(&p->ops, op, link);
    op_free(n, op);
}

static void drive_receive(td_nccl_t *n, peer_t *p, op_t *op)
{
    if (op->told && op->state == OP_ASKED) {
        take_turn(p, op);
        if (!send_plain(n, p, MSG_GO_SEND, op, p->seq++, TD_OK)) {
            link_end(n, p, "go not sent");
        }
    }
}

/* It is in the slot: brought to the host's blocks, if anybody wants it. */
static void received(td_nccl_t *n, op_t *op)
{
    td_status_t status = TD_OK;

    op_leave_peer(op);
    if (op->fetch != NULL) {
        status = n->device->ops->scatter(n->device, op->slot, op->parts, op->part_count);
        if (status == TD_OK) {
            op->state = OP_LANDING;
            op->fetch->nccl.landing++;
            TAILQ_INSERT_TAIL(&n->landing, op, link);
            return;
        }
        n->broken = true;
        fetch_fails(n, op, TD_ERR_BUSY);
    }
    op_free(n, op);
}

static void posted_ends(td_nccl_t *n, peer_t *p, op_t *op)
{
    TAILQ_REMOVE(&p->turns, op, turn);
    p->heard_ns = td_now_ns();
    p->backoff_ns = n->config.retry_ms * TD_NS_PER_MS;
    if (!op->send) {
        received(n, op);
        return;
    }
    td_metric_add(n->config.metrics.sent_bytes, op->bytes);
    TAILQ_REMOVE(&p->ops, op, link);
    op_free(n, op);
}

/* Posts what may be, in the order of turns, and looks for what has ended. */
static void drive_turns(td_nccl_t *n, peer_t *p)
{
    op_t *op = NULL;
    op_t *next = NULL;

    TAILQ_FOREACH_SAFE(op, &p->turns, turn, next)
    {
        td_status_t status = TD_OK;
        if (op->state == OP_TURN) {
            if (n->device->ops->link_poll(p->link) != TD_OK) {
                return; /* the one before is not with the device yet */
            }
            status = n->device->ops->link_post(p->link, op->slot, op->bytes, op->send);
            op->state = OP_POSTED; /* also where it failed: who knows how far it came */
            op->since_ns = td_now_ns();
            TD_FAULT_POINT(op->send ? "nccl_send" : "nccl_receive");
        }
        if (status == TD_OK) {
            status = n->device->ops->poll(n->device, op->slot);
        }
        if (status < 0) {
            link_end(n, p, "chunk failed");
            return;
        }
        if (status == TD_OK) {
            posted_ends(n, p, op);
        }
    }
}

/* Nothing was heard for so long. What waits for our own device is no sign of the other end; its
 * deadline counts there. */
static bool is_late(const peer_t *p, const op_t *op, uint64_t now, uint64_t limit_ns)
{
    return op->state != OP_QUEUED && op->state != OP_GATHERING &&
           now > TD_MAX(op->since_ns, p->heard_ns) + limit_ns;
}

/* What the link may take for it. The first chunk's time is that of opening: the library connects
 * the two ends when it is posted, and others wait for that in their turn. */
static uint64_t link_limit_ns(const td_nccl_t *n, const peer_t *p, const op_t *op)
{
    const bool connects = p->heard_ns == 0 && (op->state == OP_TURN || op->state == OP_POSTED);

    return (connects ? TD_MAX(n->config.open_ms, n->config.deadline_ms) : n->config.deadline_ms) *
           TD_NS_PER_MS;
}

static void drive_ops(td_nccl_t *n, peer_t *p, uint64_t now)
{
    op_t *op = NULL;
    op_t *next = NULL;

    TAILQ_FOREACH_SAFE(op, &p->ops, link, next)
    {
        if (op->send) {
            drive_send(n, p, op);
        } else {
            drive_receive(n, p, op);
        }
        if (p->state == PEER_CLOSING) {
            return;
        }
    }
    if (p->state == PEER_READY) {
        drive_turns(n, p);
    }
    TAILQ_FOREACH(op, &p->ops, link)
    {
        if (is_late(p, op, now, link_limit_ns(n, p, op))) {
            link_end(n, p, "nothing heard in time");
            return;
        }
        /* One fetch in a hurry is none of the link's fault: its chunk goes on, for nobody. */
        if (op->fetch != NULL && is_late(p, op, now, op->fetch_limit_ns)) {
            fetch_fails(n, op, TD_ERR_BUSY);
        }
    }
}

/* --- turns of the loop ------------------------------------------------------------------------ */

static void link_is_gone(td_nccl_t *n, peer_t *p)
{
    op_t *op = NULL;

    while ((op = TAILQ_FIRST(&p->held)) != NULL) {
        TAILQ_REMOVE(&p->held, op, link);
        op_free(n, op);
    }
    p->link = NULL;
    p->state = PEER_IDLE;
    count_links(n);
}

static void drive_peer(td_nccl_t *n, peer_t *p, uint64_t now)
{
    td_status_t status = TD_OK;

    if (p->state == PEER_IDLE && p->offered) {
        p->offered = false;
        link_begin(n, p, 1, p->offered_serial, p->offered_id);
    } else if (p->state == PEER_IDLE && p->wanted && now >= p->retry_ns) {
        link_offer(n, p);
    } else if (p->state == PEER_CLOSING) {
        if (n->device->ops->link_gone(p->link)) {
            link_is_gone(n, p);
        }
        return;
    }
    if (p->state == PEER_IDLE) {
        return;
    }
    status = n->device->ops->link_poll(p->link);
    if (status < 0) {
        link_end(n, p, "link failed");
        return;
    }
    if (p->state == PEER_OPENING && status == TD_OK) {
        p->state = PEER_READY;
        td_metric_add(n->config.metrics.opened, 1);
        count_links(n);
        TD_LOG_INFO("nccl link ready", "peer=%016" PRIx64 " rank=%u", p->incarnation, p->rank);
    } else if (p->state == PEER_OPENING && now > p->deadline_ns) {
        link_end(n, p, "not opened in time");
        return;
    }
    drive_ops(n, p, now);
}

/* Whatever came is in the blocks. */
static void landed(td_nccl_t *n, op_t *op, td_status_t status)
{
    td_fetch_t *fetch = op->fetch;

    n->news = true;
    fetch->nccl.asked--;
    fetch->nccl.landing--;
    fetch->nccl.idle_ns = td_now_ns();
    if (status != TD_OK) {
        fetch->nccl.status = TD_ERR_BUSY;
        return;
    }
    fetch->bytes += op->bytes;
    if (fetch->silence_ns > 0) {
        fetch->deadline_ns = TD_MAX(fetch->deadline_ns, td_now_ns() + fetch->silence_ns);
    }
    TD_FAULT_POINT("nccl_landed");
}

static void drive_copies(td_nccl_t *n)
{
    op_t *op = NULL;
    op_t *next = NULL;
    td_status_t status = TD_OK;

    while ((op = TAILQ_FIRST(&n->landing)) != NULL) {
        status = n->device->ops->poll(n->device, op->slot);
        if (status == TD_INPROGRESS) {
            break;
        }
        n->broken = n->broken || status != TD_OK;
        landed(n, op, status);
        TAILQ_REMOVE(&n->landing, op, link);
        op_free(n, op);
    }
    TAILQ_FOREACH_SAFE(op, &n->draining, link, next)
    {
        if (n->device->ops->poll(n->device, op->slot) != TD_INPROGRESS) {
            TAILQ_REMOVE(&n->draining, op, link);
            op_free(n, op);
        }
    }
}

uint32_t td_nccl_drive(td_nccl_t *n)
{
    const uint64_t now = td_now_ns();
    peer_t *p = NULL;
    peer_t *next = NULL;
    bool busy = false;
    bool changing = false;

    drive_copies(n);
    TAILQ_FOREACH_SAFE(p, &n->peers, peers, next)
    {
        drive_peer(n, p, now);
        busy = busy || !TAILQ_EMPTY(&p->ops);
        changing = changing || p->state == PEER_OPENING || p->state == PEER_CLOSING || p->offered;
        if (p->removed && p->state == PEER_IDLE) {
            TAILQ_REMOVE(&n->peers, p, peers);
            td_free(p);
        }
    }
    if (n->news) {
        n->news = false;
        return 0;
    }
    if (busy || !TAILQ_EMPTY(&n->landing)) {
        return NEXT_SOON_US;
    }
    return changing || !TAILQ_EMPTY(&n->draining) ? NEXT_LATER_US : UINT32_MAX;
}

static void on_open(peer_t *p, const message_t *m, const uint8_t *id)
{
    p->offered = !p->removed; /* the next turn opens it, as soon as an older one is gone */
    p->offered_serial = m->serial;
    memcpy(p->offered_id, id, sizeof(p->offered_id));
}

void td_nccl_receive(td_nccl_t *n, const void *message, size_t len)
{
    message_t m;
    peer_t *p = NULL;
    const uint8_t *more = (const uint8_t *)message + sizeof(m);

    if (len < sizeof(m)) {
        return;
    }
    memcpy(&m, message, sizeof(m));
    p = peer_find(n, m.sender);
    if (p == NULL || m.receiver != n->config.incarnation(n->config.ctx)) {
        return;
    }
    len -= sizeof(m);
    if (m.kind == MSG_WANT && is_first(n, p)) {
        p->wanted = p->state == PEER_IDLE;
    } else if (m.kind == MSG_OPEN && len == TD_KV_LINK_ID_BYTES && !is_first(n, p)) {
        link_end(n, p, "the other end has another one");
        on_open(p, &m, more);
    } else if (m.serial != p->serial || (p->state != PEER_OPENING && p->state != PEER_READY)) {
        /* Of a link that is over. One that was offered and is not begun: it will not be. */
        p->offered = p->offered && !(m.kind == MSG_CLOSE && m.serial == p->offered_serial);
        if (m.kind == MSG_ASK) {
            const peer_t of = {.incarnation = p->incarnation, .serial = m.serial};
            (void)send_plain(n, &of, MSG_CLOSE, NULL, 0, TD_OK);
        }
    } else if (m.kind == MSG_CLOSE) {
        link_end(n, p, "the other end has closed it");
    } else if (m.kind == MSG_ASK) {
        on_ask(n, p, &m, more, len);
    } else if (m.kind == MSG_READY) {
        on_ready(n, p, &m);
    } else if (m.kind == MSG_GO_SEND || m.kind == MSG_GO_RECEIVE) {
        on_go(n, p, &m);
    } else if (m.kind == MSG_REFUSE) {
        on_refuse(n, p, &m);
    }
}

/* --- start and end ---------------------------------------------------------------------------- */

static td_metric_t *declare(td_metrics_t *metrics, const char *prefix, const char *suffix,
                            bool gauge, const char *help)
{
    char name[128];

    (void)snprintf(name, sizeof(name), "%s%s", prefix, suffix);
    return gauge ? td_metrics_gauge(metrics, name, NULL, help)
                 : td_metrics_counter(metrics, name, NULL, help);
}

void td_nccl_declare(td_metrics_t *metrics, const char *prefix, td_nccl_metrics_t *out)
{
    out->links =
        declare(metrics, prefix, "_nccl_links", true, "peers with an open communicator of NCCL");
    out->opened = declare(metrics, prefix, "_nccl_opened_total", false,
                          "communicators of NCCL that were opened");
    out->aborted = declare(metrics, prefix, "_nccl_aborted_total", false,
                           "communicators of NCCL that were given up, for whatever reason");
    out->quarantined = declare(metrics, prefix, "_nccl_quarantined", true,
                               "pieces of staging memory that wait for an abort to end");
    out->sent_bytes =
        declare(metrics, prefix, "_nccl_sent_bytes_total", false, "bytes of KV sent by NCCL");
}

td_status_t td_nccl_create(const td_nccl_config_t *config, td_nccl_t **out)
{
    td_nccl_t *n = td_calloc(1, sizeof(*n));
    td_nccl_config_t *c = NULL;
    td_status_t status = TD_OK;

    if (n == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    c = &n->config;
    *c = *config;
    c->slot_bytes = c->slot_bytes == 0 ? TD_NCCL_SLOT_BYTES : c->slot_bytes;
    c->deadline_ms = c->deadline_ms == 0 ? TD_NCCL_DEADLINE_MS : c->deadline_ms;
    c->retry_ms = c->retry_ms == 0 ? TD_NCCL_RETRY_MS : c->retry_ms;
    c->open_ms = c->open_ms == 0 ? TD_NCCL_OPEN_MS : c->open_ms;
    n->device = c->device;
    TAILQ_INIT(&n->peers);
    TAILQ_INIT(&n->landing);
    TAILQ_INIT(&n->draining);
    status = n->device->ops->start(n->device, 2 * TD_NCCL_SLOTS, c->slot_bytes, TD_NCCL_PARTS_MAX);
    if (status != TD_OK) {
        td_free(n);
        return status;
    }
    n->started = true;
    *out = n;
    return TD_OK;
}

void td_nccl_destroy(td_nccl_t *n)
{
    const struct timespec nap = {.tv_nsec = 1000000};
    const uint64_t deadline = td_now_ns() + CLOSE_MS * TD_NS_PER_MS;
    peer_t *p = NULL;

    if (n == NULL) {
        return;
    }
    TAILQ_FOREACH(p, &n->peers, peers)
    {
        link_end(n, p, "stopping");
        p->removed = true;
        p->offered = false;
        p->wanted = false;
    }
    while (td_nccl_drive(n) != UINT32_MAX && td_now_ns() < deadline) {
        (void)nanosleep(&nap, NULL);
    }
    if (!TAILQ_EMPTY(&n->peers)) {
        TD_LOG_WARN("nccl does not let go", "why=\"an abort has not ended\"");
        return; /* the process ends soon; its memory is left to that */
    }
    n->device->ops->stop(n->device);
    td_free(n);
}

const char *td_nccl_name(const td_nccl_t *n)
{
    return n->device->ops->name(n->device);
}

#include "router/rtr_gone.h"

#include <errno.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/base/td_log.h"

#define EVENTS_MAX 64
#define CUT_SLOTS 4096u /* looked at in a call */
#define LEFT_NS (100 * TD_NS_PER_MS)

typedef struct watch {
    rtr_request_t *req; /* borrowed until unwatch; NULL = none under way */
    int fd;
    uint64_t until_ns; /* of what the client has to send; 0: nothing is expected */
    bool left;         /* the client has, between two requests or before the first */
    bool open;
    uint32_t generation; /* an event of an earlier use of the entry is told by it */
    uint32_t next_free;
} watch_t;

struct rtr_gone {
    int epoll_fd;
    pthread_mutex_t mu; /* guards what follows */
    watch_t *watches;   /* owned [max] */
    uint32_t max;
    uint32_t first_free; /* max = none */
    uint32_t watched;
    uint32_t next_cut; /* where the next look for slow ones begins */
};

td_status_t rtr_gone_create(uint32_t connections_max, rtr_gone_t **out)
{
    rtr_gone_t *g = td_calloc(1, sizeof(*g));

    if (g == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    g->watches = td_calloc(connections_max, sizeof(*g->watches));
    if (g->watches == NULL) {
        td_free(g);
        return TD_ERR_NO_MEMORY;
    }
    g->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (g->epoll_fd < 0) {
        TD_LOG_ERROR("epoll set not created", "err=\"%m\"");
        td_free(g->watches);
        td_free(g);
        return TD_ERR_IO;
    }
    g->max = connections_max;
    for (uint32_t i = 0; i < connections_max; i++) {
        g->watches[i].next_free = i + 1;
    }
    (void)pthread_mutex_init(&g->mu, NULL);
    *out = g;
    return TD_OK;
}

void rtr_gone_destroy(rtr_gone_t *g)
{
    if (g == NULL) {
        return;
    }
    (void)close(g->epoll_fd);
    (void)pthread_mutex_destroy(&g->mu);
    td_free(g->watches);
    td_free(g);
}

td_status_t rtr_gone_open(rtr_gone_t *g, int fd, uint64_t until_ns, uint32_t *slot_out)
{
    struct epoll_event event = {.events = EPOLLRDHUP | EPOLLHUP | EPOLLERR | EPOLLONESHOT};
    td_status_t status = TD_ERR_BUSY;
    uint32_t slot = 0;

    (void)pthread_mutex_lock(&g->mu);
    slot = g->first_free;
    if (slot < g->max) {
        watch_t *w = &g->watches[slot];
        event.data.u64 = (uint64_t)w->generation << 32 | slot;
        status = TD_ERR_IO;
        if (epoll_ctl(g->epoll_fd, EPOLL_CTL_ADD, fd, &event) == 0) {
            g->first_free = w->next_free;
            w->req = NULL;
            w->fd = fd;
            w->left = false;
            w->open = true;
            w->until_ns = until_ns;
            *slot_out = slot;
            status = TD_OK;
        }
    }
    (void)pthread_mutex_unlock(&g->mu);
    if (status != TD_OK) {
        TD_LOG_WARN("client not watched", "status=%s errno=%d", td_status_name(status), errno);
    }
    return status;
}

void rtr_gone_close(rtr_gone_t *g, uint32_t slot)
{
    watch_t *w = &g->watches[slot];

    (void)pthread_mutex_lock(&g->mu);
    TD_ASSERT(w->req == NULL);
    (void)epoll_ctl(g->epoll_fd, EPOLL_CTL_DEL, w->fd, NULL);
    w->open = false;
    w->generation++;
    w->next_free = g->first_free;
    g->first_free = slot;
    (void)pthread_mutex_unlock(&g->mu);
}

/* Nothing more comes of a client that has left. MHD doesn't always see that, where the end came
 * together with half a request: it would wait for the rest. What is whole is taken until then. */
static uint64_t bound(const watch_t *w, uint64_t until_ns)
{
    return until_ns == 0 || !w->left ? until_ns : TD_MIN(until_ns, td_now_ns() + LEFT_NS);
}

void rtr_gone_expect(rtr_gone_t *g, uint32_t slot, uint64_t until_ns)
{
    (void)pthread_mutex_lock(&g->mu);
    g->watches[slot].until_ns = bound(&g->watches[slot], until_ns);
    (void)pthread_mutex_unlock(&g->mu);
}

void rtr_gone_has_asked(rtr_gone_t *g, uint32_t slot)
{
    rtr_gone_expect(g, slot, 0);
}

uint32_t rtr_gone_cut_slow(rtr_gone_t *g, uint64_t now_ns)
{
    uint32_t cut = 0;

    (void)pthread_mutex_lock(&g->mu);
    for (uint32_t i = 0; i < TD_MIN(g->max, CUT_SLOTS); i++) {
        watch_t *w = &g->watches[g->next_cut];
        g->next_cut = (g->next_cut + 1) % g->max;
        if (w->open && w->until_ns != 0 && now_ns > w->until_ns) {
            w->until_ns = 0;
            (void)shutdown(w->fd, SHUT_RDWR); /* MHD finds it closed, and closes it */
            cut += !w->left;
        }
    }
    (void)pthread_mutex_unlock(&g->mu);
    return cut;
}

void rtr_gone_watch(rtr_gone_t *g, uint32_t slot, rtr_request_t *req)
{
    watch_t *w = &g->watches[slot];

    (void)pthread_mutex_lock(&g->mu);
    TD_ASSERT(w->req == NULL);
    w->req = req;
    g->watched++;
    if (w->left) {
        rtr_request_mark_gone(req);
    }
    (void)pthread_mutex_unlock(&g->mu);
}

void rtr_gone_unwatch(rtr_gone_t *g, uint32_t slot)
{
    (void)pthread_mutex_lock(&g->mu);
    g->watches[slot].req = NULL;
    g->watched--;
    (void)pthread_mutex_unlock(&g->mu);
}

int rtr_gone_fd(const rtr_gone_t *g)
{
    return g->epoll_fd;
}

uint32_t rtr_gone_collect(rtr_gone_t *g)
{
    struct epoll_event events[EVENTS_MAX];
    int count = epoll_wait(g->epoll_fd, events, EVENTS_MAX, 0);
    uint32_t marked = 0;

    (void)pthread_mutex_lock(&g->mu);
    for (int i = 0; i < count; i++) {
        watch_t *w = &g->watches[(uint32_t)events[i].data.u64];
        if (w->generation != (uint32_t)(events[i].data.u64 >> 32)) {
            continue;
        }
        w->left = true; /* what it sent before it left is not answered either */
        w->until_ns = bound(w, w->until_ns);
        if (w->req != NULL) {
            rtr_request_mark_gone(w->req);
            marked++;
        }
    }
    (void)pthread_mutex_unlock(&g->mu);
    return marked;
}

uint32_t rtr_gone_wake_all(rtr_gone_t *g)
{
    uint32_t watched = 0;

    (void)pthread_mutex_lock(&g->mu);
    for (uint32_t i = 0; i < g->max; i++) {
        if (g->watches[i].req != NULL) {
            rtr_request_mark_gone(g->watches[i].req);
        }
    }
    watched = g->watched;
    (void)pthread_mutex_unlock(&g->mu);
    return watched;
}

uint32_t rtr_gone_watched(rtr_gone_t *g)
{
    uint32_t watched = 0;
    (void)pthread_mutex_lock(&g->mu);
    watched = g->watched;
    (void)pthread_mutex_unlock(&g->mu);
    return watched;
}

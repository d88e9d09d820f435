#include "common/wire/td_zap.h"

#include <errno.h>
#include <pthread.h>
#include <sodium.h>
#include <string.h>
#include <zmq.h>

#include "common/base/td_base.h"
#include "common/base/td_log.h"

#define ENDPOINT "inproc://zeromq.zap.01" /* the standard's */
#define FRAMES 7u /* version, request, domain, address, identity, mechanism, key */
#define FRAME_BYTES 256u

struct td_zap {
    void *context; /* borrowed */
    const char *domain;
    void *socket; /* the thread's, once it runs */
    pthread_t thread;
    pthread_mutex_t mu; /* guards the keys; a leaf */
    uint32_t count;
    uint8_t keys[TD_ZAP_KEYS_MAX][TD_ZAP_KEY_BYTES];
};

typedef struct frame {
    uint8_t bytes[FRAME_BYTES];
    size_t len;
} frame_t;

static bool is_text(const frame_t *frame, const char *text)
{
    return frame->len == strlen(text) && memcmp(frame->bytes, text, frame->len) == 0;
}

/* All the parts of a message; those behind the last expected are dropped. Answers how many there
 * were; 0: the context ends. */
static uint32_t recv_frames(void *socket, frame_t frames[FRAMES])
{
    uint32_t count = 0;
    int more = 1;

    while (more != 0) {
        frame_t dropped;
        frame_t *f = count < FRAMES ? &frames[count] : &dropped;
        size_t len = sizeof(more);
        int got = 0;
        do {
            got = zmq_recv(socket, f->bytes, sizeof(f->bytes), 0);
        } while (got < 0 && errno == EINTR);
        if (got < 0) {
            return 0;
        }
        f->len = TD_MIN((size_t)got, sizeof(f->bytes));
        count++;
        if (zmq_getsockopt(socket, ZMQ_RCVMORE, &more, &len) != 0) {
            return 0;
        }
    }
    return count;
}

static bool is_allowed(td_zap_t *z, const frame_t frames[FRAMES], uint32_t count)
{
    bool found = false;

    if (count != FRAMES || !is_text(&frames[2], z->domain) || !is_text(&frames[5], "CURVE") ||
        frames[6].len != TD_ZAP_KEY_BYTES) {
        return false;
    }
    (void)pthread_mutex_lock(&z->mu);
    for (uint32_t i = 0; i < z->count; i++) { /* all of them: how long it takes says nothing */
        found |= sodium_memcmp(frames[6].bytes, z->keys[i], TD_ZAP_KEY_BYTES) == 0;
    }
    (void)pthread_mutex_unlock(&z->mu);
    return found;
}

static void *serve(void *ctx)
{
    td_zap_t *z = ctx;
    frame_t frames[FRAMES];

    for (;;) {
        const uint32_t count = recv_frames(z->socket, frames);
        bool allowed = false;
        if (count == 0) {
            return NULL;
        }
        allowed = is_allowed(z, frames, count);
        if (!allowed) {
            TD_LOG_WARN("connection refused", "domain=%s from=%.*s expected=\"a key it knows\"",
                        z->domain, count > 3 ? (int)TD_MIN(frames[3].len, 64u) : 0,
                        (const char *)frames[3].bytes);
        }
        if (zmq_send(z->socket, "1.0", 3, ZMQ_SNDMORE) < 0 ||
            zmq_send(z->socket, frames[1].bytes, count > 1 ? frames[1].len : 0, ZMQ_SNDMORE) < 0 ||
            zmq_send(z->socket, allowed ? "200" : "400", 3, ZMQ_SNDMORE) < 0 ||
            zmq_send(z->socket, "", 0, ZMQ_SNDMORE) < 0 ||
            zmq_send(z->socket, z->domain, strlen(z->domain), ZMQ_SNDMORE) < 0 ||
            zmq_send(z->socket, "", 0, 0) < 0) {
            return NULL; /* nothing but the context's end does that */
        }
    }
}

td_status_t td_zap_create(void *context, const char *domain, td_zap_t **out)
{
    const int linger = 0;
    td_zap_t *z = td_calloc(1, sizeof(*z));

    if (z == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    z->context = context;
    z->domain = domain;
    (void)pthread_mutex_init(&z->mu, NULL);
    z->socket = zmq_socket(context, ZMQ_REP);
    if (z->socket == NULL || zmq_setsockopt(z->socket, ZMQ_LINGER, &linger, sizeof(linger)) != 0 ||
        zmq_bind(z->socket, ENDPOINT) != 0 || pthread_create(&z->thread, NULL, serve, z) != 0) {
        TD_LOG_ERROR("allow list not set up", "err=\"%s\"", zmq_strerror(zmq_errno()));
        if (z->socket != NULL) {
            (void)zmq_close(z->socket);
        }
        (void)pthread_mutex_destroy(&z->mu);
        td_free(z);
        return TD_ERR_IO;
    }
    *out = z;
    return TD_OK;
}

td_status_t td_zap_allow(td_zap_t *z, const uint8_t key[TD_ZAP_KEY_BYTES])
{
    td_status_t status = TD_ERR_NO_MEMORY;

    (void)pthread_mutex_lock(&z->mu);
    for (uint32_t i = 0; i < z->count && status != TD_OK; i++) {
        status = sodium_memcmp(z->keys[i], key, TD_ZAP_KEY_BYTES) == 0 ? TD_OK : status;
    }
    if (status != TD_OK && z->count < TD_ZAP_KEYS_MAX) {
        memcpy(z->keys[z->count++], key, TD_ZAP_KEY_BYTES);
        status = TD_OK;
    }
    (void)pthread_mutex_unlock(&z->mu);
    return status;
}

void td_zap_destroy(td_zap_t *z)
{
    if (z == NULL) {
        return;
    }
    (void)zmq_ctx_shutdown(z->context); /* what wakes the thread */
    (void)pthread_join(z->thread, NULL);
    (void)zmq_close(z->socket);
    (void)pthread_mutex_destroy(&z->mu);
    td_free(z);
}

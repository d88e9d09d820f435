#include "router/rtr_access.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "common/base/td_base.h"
#include "common/base/td_buf.h"
#include "common/base/td_clock.h"
#include "common/base/td_cond.h"
#include "common/base/td_log.h"

#define FLUSH_MS 200u
#define LINE_BYTES_MAX 1024u
#define LOOK_MS 100   /* how soon a writer that nobody reads notices the end */
#define LAST_MS 1000u /* what it then still has to get rid of its lines */

struct rtr_access {
    rtr_metrics_t *metrics; /* borrowed */
    const char *path;       /* borrowed; NULL: no log */
    pthread_t writer;
    bool has_writer;
    pthread_mutex_t mu; /* a leaf; guards what follows */
    pthread_cond_t more;
    bool stopping;
    td_str_t lines;
    uint64_t count; /* of generations; number n is at n modulo the size */
    rtr_access_entry_t recent[RTR_ACCESS_RECENT];
    /* The writer's own. */
    int fd;
    td_str_t writing;
    bool torn; /* the file ends in the middle of a line */
};

/* --- the file --------------------------------------------------------------------------------- */

static bool is_stdout(const rtr_access_t *a)
{
    return strcmp(a->path, "-") == 0;
}

/* A fifo that nobody reads is an error, not something to wait for. */
static int open_log(const char *path)
{
    return open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | O_NONBLOCK, 0640);
}

/* After a rotation the name is another file's, or nobody's. */
static void follow_name(rtr_access_t *a)
{
    struct stat named;
    struct stat held;
    int fd = -1;

    if (is_stdout(a) || (stat(a->path, &named) == 0 && fstat(a->fd, &held) == 0 &&
                         named.st_ino == held.st_ino && named.st_dev == held.st_dev)) {
        return;
    }
    fd = open_log(a->path);
    if (fd >= 0) { /* else the old one is better than none */
        (void)close(a->fd);
        a->fd = fd;
        a->torn = false;
    }
}

/* Whoever reads a pipe may be slow, which costs lines, or never read again, which must not keep the
 * router from ending. False: there is no more time. */
static bool wait_for_room(rtr_access_t *a, uint64_t *stop_by_ns)
{
    struct pollfd at = {.fd = a->fd, .events = POLLOUT};

    while (poll(&at, 1, LOOK_MS) <= 0) {
        (void)pthread_mutex_lock(&a->mu);
        if (a->stopping && *stop_by_ns == 0) {
            *stop_by_ns = td_now_ns() + LAST_MS * TD_NS_PER_MS;
        }
        (void)pthread_mutex_unlock(&a->mu);
        if (*stop_by_ns != 0 && td_remaining_ns(*stop_by_ns) == 0) {
            return false;
        }
    }
    return true;
}

/* Answers how many bytes went out: all of them, unless the disk is full or nobody reads. */
static size_t write_bytes(rtr_access_t *a, const char *bytes, size_t len, uint64_t *stop_by_ns)
{
    size_t done = 0;

    while (done < len && wait_for_room(a, stop_by_ns)) {
        /* So many a pipe that has room takes without blocking, ours or not. */
        const ssize_t n = write(a->fd, bytes + done, TD_MIN(len - done, (size_t)PIPE_BUF));
        if (n > 0) {
            done += (size_t)n;
        } else if (n == 0 || (errno != EAGAIN && errno != EINTR)) {
            break;
        }
    }
    return done;
}

static void write_out(rtr_access_t *a)
{
    const char *bytes = a->writing.bytes;
    const size_t len = a->writing.len;
    uint64_t stop_by_ns = 0;
    uint64_t dropped = 0;
    size_t done = 0;

    if (a->torn && write_bytes(a, "\n", 1, &stop_by_ns) == 1) {
        a->torn = false; /* what comes now is a line of its own */
    }
    if (!a->torn) {
        done = write_bytes(a, bytes, len, &stop_by_ns);
        a->torn = done > 0 && bytes[done - 1] != '\n';
    }
    for (size_t i = done; i < len; i++) {
        dropped += bytes[i] == '\n';
    }
    td_metric_add(a->metrics->access_dropped, dropped);
    td_str_clear(&a->writing);
}

static void *writer_main(void *ctx)
{
    rtr_access_t *a = ctx;
    bool stopping = false;

    while (!stopping) {
        td_str_t swap = {0};
        uint64_t until_ns = 0;
        bool early = true;

        (void)pthread_mutex_lock(&a->mu);
        while (!a->stopping && a->lines.len == 0) {
            (void)pthread_cond_wait(&a->more, &a->mu); /* an idle router wakes nobody */
        }
        until_ns = td_now_ns() + FLUSH_MS * TD_NS_PER_MS;
        while (!a->stopping && early && a->lines.len < RTR_ACCESS_BUFFER_MAX / 2) {
            early = td_cond_wait_until(&a->more, &a->mu, until_ns);
        }
        stopping = a->stopping;
        swap = a->lines;
        a->lines = a->writing;
        (void)pthread_mutex_unlock(&a->mu);
        a->writing = swap;
        if (a->writing.len > 0) {
            follow_name(a);
            write_out(a);
        }
    }
    return NULL;
}

/* --- entries ---------------------------------------------------------------------------------- */

static size_t format_line(const rtr_access_entry_t *e, char *out, size_t room)
{
    const time_t seconds = (time_t)(e->time_ms / 1000);
    struct tm utc;
    char when[32];
    int n = 0;
    int more = 0;

    (void)gmtime_r(&seconds, &utc);
    (void)strftime(when, sizeof(when), "%Y-%m-%dT%H:%M:%S", &utc);
    n = snprintf(
        out, room, "time=%s.%03uZ client=%s method=%s path=\"%s\" status=%d ms=%" PRIu64 ".%03u",
        when, (unsigned)(e->time_ms % 1000), e->client[0] == '\0' ? "-" : e->client, e->method,
        e->path, e->http_status, e->took_us / 1000, (unsigned)(e->took_us % 1000));
    if (e->is_generation && n > 0 && (size_t)n < room) {
        more = snprintf(
            out + n, room - (size_t)n,
            " req=%s tenant=%s outcome=%s stream=%d ttft_ms=%" PRIu64
            ".%03u prompt_tokens=%u cached_tokens=%u completion_tokens=%u accepted_drafts=%u "
            "rejected_drafts=%u prefill=%s decode=%s draft=\"%s\"",
            e->request, e->tenant == NULL ? "-" : e->tenant->name, rtr_outcome_name(e->outcome),
            e->is_stream ? 1 : 0, e->ttft_us / 1000, (unsigned)(e->ttft_us % 1000),
            e->usage.prompt_tokens, e->usage.cached_local_tokens + e->usage.cached_store_tokens,
            e->usage.completion_tokens, e->usage.accepted_draft_tokens,
            e->usage.rejected_draft_tokens, e->prefill[0] == '\0' ? "-" : e->prefill,
            e->decode[0] == '\0' ? "-" : e->decode, e->draft);
    }
    n = TD_MIN(TD_MAX(n, 0) + TD_MAX(more, 0), (int)room - 2);
    out[n] = '\n';
    return (size_t)n + 1;
}

static void clean(char *text)
{
    for (char *c = text; *c != '\0'; c++) {
        if (*c <= 0x20 || *c > 0x7e || *c == '"' || *c == '\\') {
            *c = '?'; /* a line stays one line, and its fields where they are */
        }
    }
}

void rtr_access_add(rtr_access_t *a, rtr_access_entry_t *entry)
{
    char line[LINE_BYTES_MAX];
    size_t len = 0;
    bool dropped = false;

    if (a == NULL) {
        return;
    }
    entry->time_ms = td_wall_ms();
    clean(entry->method);
    clean(entry->path);
    if (a->has_writer) {
        len = format_line(entry, line, sizeof(line));
    }
    (void)pthread_mutex_lock(&a->mu);
    if (entry->is_generation) {
        a->recent[a->count++ % RTR_ACCESS_RECENT] = *entry;
    }
    if (len > 0) {
        dropped = a->lines.len + len > RTR_ACCESS_BUFFER_MAX ||
                  td_str_append(&a->lines, line, len) != TD_OK;
        if (a->lines.len == len || a->lines.len > RTR_ACCESS_BUFFER_MAX / 2) {
            (void)pthread_cond_signal(&a->more);
        }
    }
    (void)pthread_mutex_unlock(&a->mu);
    if (dropped) {
        td_metric_add(a->metrics->access_dropped, 1);
    }
}

uint32_t rtr_access_recent(rtr_access_t *a, const rtr_tenant_t *tenant, rtr_access_entry_t *out)
{
    uint32_t n = 0;

    (void)pthread_mutex_lock(&a->mu);
    for (uint64_t i = 0; i < TD_MIN(a->count, RTR_ACCESS_RECENT); i++) {
        const rtr_access_entry_t *e = &a->recent[(a->count - 1 - i) % RTR_ACCESS_RECENT];
        if (tenant == NULL || e->tenant == tenant) {
            out[n++] = *e;
        }
    }
    (void)pthread_mutex_unlock(&a->mu);
    return n;
}

/* --- life ------------------------------------------------------------------------------------- */

static td_status_t start_writer(rtr_access_t *a)
{
    a->fd = is_stdout(a) ? STDOUT_FILENO : open_log(a->path);
    if (a->fd < 0) {
        TD_LOG_ERROR("access log cannot be opened", "file=%s err=\"%m\"", a->path);
        return TD_ERR_IO;
    }
    if (pthread_create(&a->writer, NULL, writer_main, a) != 0) {
        return TD_ERR_NO_MEMORY;
    }
    a->has_writer = true;
    return TD_OK;
}

td_status_t rtr_access_create(const char *path, rtr_metrics_t *metrics, rtr_access_t **out)
{
    rtr_access_t *a = td_calloc(1, sizeof(*a));
    td_status_t status = TD_OK;

    if (a == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    a->metrics = metrics;
    a->path = path;
    a->fd = -1;
    (void)pthread_mutex_init(&a->mu, NULL);
    td_cond_init(&a->more);
    status = path == NULL ? TD_OK : start_writer(a);
    if (status != TD_OK) {
        rtr_access_destroy(a);
        return status;
    }
    *out = a;
    return TD_OK;
}

void rtr_access_destroy(rtr_access_t *a)
{
    if (a == NULL) {
        return;
    }
    if (a->has_writer) {
        (void)pthread_mutex_lock(&a->mu);
        a->stopping = true;
        (void)pthread_cond_signal(&a->more);
        (void)pthread_mutex_unlock(&a->mu);
        (void)pthread_join(a->writer, NULL);
    }
    if (a->fd > STDERR_FILENO) {
        (void)close(a->fd);
    }
    (void)pthread_cond_destroy(&a->more);
    (void)pthread_mutex_destroy(&a->mu);
    td_str_fini(&a->lines);
    td_str_fini(&a->writing);
    td_free(a);
}

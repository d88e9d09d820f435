/* tandem-bench instant - an OpenAI-compatible back end that answers at once, with the same bytes:
 * for what a router in front of it costs. It looks at a request's path and for "stream":true, no
 * more. One thread, one epoll. */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "common/base/td_base.h"
#include "common/base/td_buf.h"
#include "tests/bench/bench.h"
#include "tests/bench/bench_http.h"
#include "tests/bench/bench_options.h"

#define CONNECTIONS_MAX 4096u
#define EVENTS_MAX 256
#define READ_BYTES 65536u

typedef struct instant_conn {
    int fd;
    td_str_t in;
    td_str_t out;
    size_t sent;
    bool wants_out; /* as epoll knows */
} instant_conn_t;

typedef struct instant {
    uint32_t port;
    uint32_t tokens;
    int listen_fd;
    int epoll_fd;
    td_str_t whole;  /* the answer, its head before it */
    td_str_t stream; /* likewise, an event a chunk */
    td_str_t models;
    td_str_t other;
    char scratch[READ_BYTES];
} instant_t;

static volatile sig_atomic_t stopped;

static void on_signal(int number)
{
    (void)number;
    stopped = 1;
}

static void print_help(void)
{
    (void)puts(
        "Usage: tandem-bench instant [options]\n"
        "\n"
        "Answers /v1/chat/completions at once, whole or as events, until it is stopped. Its\n"
        "address is printed when it listens.\n"
        "\n"
        "Options:\n"
        "  --port N    of 127.0.0.1, default 0: any\n"
        "  --tokens N  of an answer, an event each, default 16\n"
        "  --help      this text");
}

/* --- the answers ------------------------------------------------------------------------------ */

static td_status_t with_head(const char *type, const td_str_t *body, td_str_t *out)
{
    TD_TRY(td_str_printf(out, "HTTP/1.1 200 OK\r\nContent-Type: %s\r\nContent-Length: %zu\r\n\r\n",
                         type, body->len));
    return td_str_append(out, body->bytes, body->len);
}

static td_status_t write_whole(instant_t *s, td_str_t *body)
{
    TD_TRY(td_str_append_text(
        body,
        "{\"id\":\"chatcmpl-0123456789abcdef01234567\",\"object\":\"chat.completion\","
        "\"created\":1700000000,\"model\":\"mock\",\"system_fingerprint\":\"fp_0\",\"choices\":"
        "[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\""));
    for (uint32_t i = 0; i < s->tokens; i++) {
        TD_TRY(td_str_append_text(body, " token"));
    }
    TD_TRY(td_str_printf(body,
                         "\",\"refusal\":null},\"logprobs\":null,\"finish_reason\":\"length\"}],"
                         "\"usage\":{\"prompt_tokens\":100,\"completion_tokens\":%u,"
                         "\"total_tokens\":%u}}\n",
                         s->tokens, 100 + s->tokens));
    return with_head("application/json", body, &s->whole);
}

static td_status_t add_event(td_str_t *out, const char *delta, const char *finish)
{
    td_str_t event = {0};
    td_status_t status = td_str_printf(
        &event,
        "data: {\"id\":\"chatcmpl-0123456789abcdef01234567\",\"object\":\"chat.completion.chunk\","
        "\"created\":1700000000,\"model\":\"mock\",\"system_fingerprint\":\"fp_0\",\"choices\":[{"
        "\"index\":0,\"delta\":{%s\"content\":\" token\"},\"logprobs\":null,\"finish_reason\":%s}]"
        "}\n\n",
        delta, finish);

    if (status == TD_OK) {
        status = td_str_printf(out, "%zx\r\n%s\r\n", event.len, event.bytes);
    }
    td_str_fini(&event);
    return status;
}

static td_status_t write_stream(instant_t *s)
{
    TD_TRY(td_str_append_text(&s->stream, "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
                                          "Transfer-Encoding: chunked\r\n\r\n"));
    for (uint32_t i = 0; i < s->tokens; i++) {
        TD_TRY(add_event(&s->stream, i == 0 ? "\"role\":\"assistant\"," : "",
                         i + 1 == s->tokens ? "\"length\"" : "null"));
    }
    return td_str_append_text(&s->stream, "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n");
}

static td_status_t write_answers(instant_t *s)
{
    td_str_t body = {0};
    td_status_t status = write_whole(s, &body);

    td_str_clear(&body);
    if (status == TD_OK) {
        status = td_str_append_text(&body, "{\"object\":\"list\",\"data\":[{\"id\":\"mock\","
                                           "\"object\":\"model\",\"owned_by\":\"tandem\"}]}\n");
    }
    if (status == TD_OK) {
        status = with_head("application/json", &body, &s->models);
    }
    td_str_clear(&body);
    if (status == TD_OK) {
        status = td_str_append_text(&body, "{\"status\":\"ok\",\"model_path\":\"mock\"}\n");
    }
    if (status == TD_OK) {
        status = with_head("application/json", &body, &s->other);
    }
    td_str_fini(&body);
    return status == TD_OK ? write_stream(s) : status;
}

static const td_str_t *answer_of(const instant_t *s, const char *request,
                                 const bench_http_message_t *message)
{
    static const char streams[] = "\"stream\":true";

    if (strncmp(request, "GET /v1/models", 14) == 0) {
        return &s->models;
    }
    if (strncmp(request, "POST /v1/chat/completions", 25) != 0) {
        return &s->other; /* health, and what else routers ask their workers */
    }
    return memmem(request + message->head_bytes, message->bytes - message->head_bytes, streams,
                  sizeof(streams) - 1) != NULL
               ? &s->stream
               : &s->whole;
}

/* --- connections ------------------------------------------------------------------------------ */

static void close_conn(instant_conn_t *conn)
{
    (void)close(conn->fd);
    td_str_fini(&conn->in);
    td_str_fini(&conn->out);
    td_free(conn);
}

static void accept_all(instant_t *s)
{
    int fd = -1;

    while ((fd = accept4(s->listen_fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0) {
        instant_conn_t *conn = td_calloc(1, sizeof(*conn));
        struct epoll_event event = {.events = EPOLLIN, .data = {.ptr = conn}};
        if (conn == NULL || epoll_ctl(s->epoll_fd, EPOLL_CTL_ADD, fd, &event) != 0) {
            (void)close(fd);
            td_free(conn);
        } else {
            conn->fd = fd;
        }
    }
}

static void push(instant_t *s, instant_conn_t *conn)
{
    bool wants_out = false;

    while (conn->sent < conn->out.len) {
        const ssize_t n =
            send(conn->fd, conn->out.bytes + conn->sent, conn->out.len - conn->sent, MSG_NOSIGNAL);
        if (n < 0) {
            break;
        }
        conn->sent += (size_t)n;
    }
    if (conn->sent == conn->out.len) {
        td_str_clear(&conn->out);
        conn->sent = 0;
    }
    wants_out = conn->out.len > 0;
    if (wants_out != conn->wants_out) {
        struct epoll_event event = {.events = EPOLLIN | (wants_out ? EPOLLOUT : 0u),
                                    .data = {.ptr = conn}};
        conn->wants_out = wants_out;
        (void)epoll_ctl(s->epoll_fd, EPOLL_CTL_MOD, conn->fd, &event);
    }
}

/* False: the connection has ended. */
static bool pull(instant_t *s, instant_conn_t *conn)
{
    const ssize_t n = recv(conn->fd, s->scratch, sizeof(s->scratch), 0);
    bench_http_message_t message;
    td_status_t status = TD_OK;
    size_t taken = 0;

    if (n <= 0) {
        return n < 0 && (errno == EAGAIN || errno == EINTR);
    }
    if (td_str_append(&conn->in, s->scratch, (size_t)n) != TD_OK) {
        return false;
    }
    while ((status = bench_http_find(conn->in.bytes + taken, conn->in.len - taken, &message)) ==
           TD_OK) {
        const td_str_t *answer = answer_of(s, conn->in.bytes + taken, &message);
        taken += message.bytes;
        if (td_str_append(&conn->out, answer->bytes, answer->len) != TD_OK) {
            return false;
        }
    }
    td_str_consume(&conn->in, taken);
    push(s, conn);
    return status == TD_INPROGRESS;
}

static int serve(instant_t *s)
{
    struct epoll_event events[EVENTS_MAX];
    struct epoll_event listening = {.events = EPOLLIN, .data = {.ptr = NULL}};

    if (epoll_ctl(s->epoll_fd, EPOLL_CTL_ADD, s->listen_fd, &listening) != 0) {
        return bench_usage_error("cannot wait for connections: %s", strerror(errno));
    }
    (void)printf("http://127.0.0.1:%u\n", s->port);
    (void)fflush(stdout);
    while (!stopped) {
        const int count = epoll_wait(s->epoll_fd, events, EVENTS_MAX, -1);
        for (int i = 0; i < count; i++) {
            instant_conn_t *conn = events[i].data.ptr;
            if (conn == NULL) {
                accept_all(s);
                continue;
            }
            if ((events[i].events & EPOLLOUT) != 0) {
                push(s, conn);
            }
            if ((events[i].events & ~(unsigned)EPOLLOUT) != 0 && !pull(s, conn)) {
                close_conn(conn);
            }
        }
    }
    return BENCH_EXIT_OK;
}

int bench_instant(int argc, char **argv)
{
    static instant_t s = {.tokens = 16};
    const bench_option_t options[] = {
        {.name = "port", .kind = BENCH_NUMBER, .out = &s.port, .min = 0, .max = 65535},
        {.name = "tokens", .kind = BENCH_NUMBER, .out = &s.tokens, .min = 1, .max = 4096},
    };
    int rc = bench_parse_options(argc, argv, "instant", print_help, options, TD_ARRAY_LEN(options));

    if (rc != BENCH_EXIT_OK) {
        return rc < 0 ? BENCH_EXIT_OK : rc;
    }
    (void)signal(SIGINT, on_signal);
    (void)signal(SIGTERM, on_signal);
    if (write_answers(&s) != TD_OK) {
        return bench_usage_error("no memory");
    }
    s.listen_fd = bench_http_listen(s.port, &s.port);
    s.epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (s.listen_fd < 0 || s.epoll_fd < 0) {
        return bench_usage_error("cannot listen on port %u: %s", s.port, strerror(errno));
    }
    rc = serve(&s);
    (void)close(s.listen_fd);
    (void)close(s.epoll_fd);
    td_str_fini(&s.whole);
    td_str_fini(&s.stream);
    td_str_fini(&s.models);
    td_str_fini(&s.other);
    return rc;
}

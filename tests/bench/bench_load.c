/* tandem-bench load - as many short chats a second as a server answers, over kept connections.
 *
 * A closed loop: each connection sends its next request when the last answer is whole. One thread,
 * one epoll, nothing parsed but where an answer ends and its status, so that the server is what is
 * measured. Prompts are words drawn from the seed, no two alike, all of one length. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "common/base/td_base.h"
#include "common/base/td_buf.h"
#include "common/base/td_clock.h"
#include "tests/bench/bench.h"
#include "tests/bench/bench_http.h"
#include "tests/bench/bench_options.h"
#include "tests/bench/bench_samples.h"
#include "tests/bench/bench_words.h"

#define CONNECTIONS_MAX 4096u
#define EVENTS_MAX 256
#define READ_BYTES 65536u
#define STALL_NS (30 * TD_NS_PER_S) /* nothing came for so long: the server hangs */

typedef struct load_options {
    const char *url;
    const char *model;
    const char *key;
    uint32_t connections;
    uint32_t seconds;
    uint32_t requests; /* 0: until the time is over */
    uint32_t prompt_tokens;
    uint32_t max_tokens;
    uint32_t seed;
    bool stream;
    bool json;
} load_options_t;

typedef struct load_conn {
    int fd;
    td_str_t out;
    size_t sent;
    td_str_t in;
    uint64_t sent_ns;
    uint64_t first_ns; /* of the answer's first body byte; 0: not yet */
    bool wants_out;    /* as epoll knows */
    bool busy;
} load_conn_t;

typedef struct load {
    load_options_t options;
    load_conn_t *conns; /* [connections] */
    uint32_t open;
    uint32_t busy;
    int epoll_fd;
    uint64_t random;
    uint64_t begin_ns;
    uint64_t end_ns; /* of the last answer */
    uint64_t begun;
    uint64_t requests;
    uint64_t errors;
    uint64_t bytes;
    bool shown_error;
    bench_samples_t e2e;
    bench_samples_t ttfb;
    char scratch[READ_BYTES];
} load_t;

static void print_help(void)
{
    (void)puts(
        "Usage: tandem-bench load --url URL [options]\n"
        "\n"
        "Sends short chats (/v1/chat/completions) over kept connections, each when the one before\n"
        "it is answered, and reads answers to their ends without looking into them.\n"
        "\n"
        "Options:\n"
        "  --url URL          http://HOST:PORT, IPv4 (required)\n"
        "  --connections N    requests at once, default 64\n"
        "  --seconds S        default 5\n"
        "  --requests N       or until N are answered; default 0: as many as S seconds give\n"
        "  --prompt-tokens N  words of a message, a token each, default 80\n"
        "  --max-tokens N     default 16\n"
        "  --stream           answers come as events\n"
        "  --model NAME       default: none is named\n"
        "  --key KEY          API key\n"
        "  --seed N           default 1\n"
        "  --json             one JSON object instead of a table\n"
        "  --help             this text\n"
        "\n"
        "Exit code 1 if a request failed.");
}

static int parse_options(int argc, char **argv, load_options_t *o)
{
    const bench_option_t options[] = {
        {.name = "url", .kind = BENCH_TEXT, .out = &o->url, .required = true},
        {.name = "model", .kind = BENCH_TEXT, .out = &o->model},
        {.name = "key", .kind = BENCH_TEXT, .out = &o->key},
        {.name = "connections",
         .kind = BENCH_NUMBER,
         .out = &o->connections,
         .min = 1,
         .max = CONNECTIONS_MAX},
        {.name = "seconds", .kind = BENCH_NUMBER, .out = &o->seconds, .min = 1, .max = 1000000},
        {.name = "requests",
         .kind = BENCH_NUMBER,
         .out = &o->requests,
         .min = 0,
         .max = UINT32_MAX},
        {.name = "prompt-tokens",
         .kind = BENCH_NUMBER,
         .out = &o->prompt_tokens,
         .min = 1,
         .max = 100000},
        {.name = "max-tokens",
         .kind = BENCH_NUMBER,
         .out = &o->max_tokens,
         .min = 1,
         .max = 100000},
        {.name = "seed", .kind = BENCH_NUMBER, .out = &o->seed, .min = 0, .max = UINT32_MAX},
        {.name = "stream", .kind = BENCH_FLAG, .out = &o->stream},
        BENCH_JSON_OPTION(&o->json),
    };
    return bench_parse_options(argc, argv, "load", print_help, options, TD_ARRAY_LEN(options));
}

/* --- connections ------------------------------------------------------------------------------ */

static void watch(load_t *load, load_conn_t *conn, bool wants_out)
{
    struct epoll_event event = {.events = EPOLLIN | (wants_out ? EPOLLOUT : 0u),
                                .data = {.ptr = conn}};

    conn->wants_out = wants_out;
    (void)epoll_ctl(load->epoll_fd, EPOLL_CTL_MOD, conn->fd, &event);
}

static bool open_conn(load_t *load, load_conn_t *conn)
{
    struct epoll_event event = {.events = EPOLLIN, .data = {.ptr = conn}};

    conn->fd = bench_http_connect(load->options.url);
    if (conn->fd < 0 || epoll_ctl(load->epoll_fd, EPOLL_CTL_ADD, conn->fd, &event) != 0) {
        (void)bench_usage_error("cannot connect to \"%s\": %s", load->options.url, strerror(errno));
        return false;
    }
    load->open++;
    return true;
}

static void fail(load_t *load, load_conn_t *conn, const char *why)
{
    load->errors++;
    if (!load->shown_error) {
        load->shown_error = true;
        (void)fprintf(stderr, "tandem-bench: a request failed: %s: %.*s\n", why,
                      (int)TD_MIN(conn->in.len, (size_t)400),
                      conn->in.bytes == NULL ? "" : conn->in.bytes);
    }
}

static td_status_t write_request(load_t *load, load_conn_t *conn)
{
    const load_options_t *o = &load->options;
    json_t *message = bench_message_of_words("user", o->prompt_tokens, &load->random);
    const char *text = json_string_value(json_object_get(message, "content"));
    td_str_t body = {0};
    td_status_t status =
        text == NULL
            ? TD_ERR_NO_MEMORY
            : td_str_printf(&body,
                            "{%s%s%s\"messages\":[{\"role\":\"user\","
                            "\"content\":\"%s\"}],\"max_tokens\":%u,\"temperature\":0,"
                            "\"stream\":%s}",
                            o->model == NULL ? "" : "\"model\":\"",
                            o->model == NULL ? "" : o->model, o->model == NULL ? "" : "\",", text,
                            o->max_tokens, o->stream ? "true" : "false");
    json_decref(message);
    td_str_clear(&conn->out);
    if (status == TD_OK) {
        status =
            td_str_printf(&conn->out,
                          "POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\n"
                          "Content-Type: application/json\r\n%s%s%sContent-Length: %zu\r\n\r\n",
                          o->key == NULL ? "" : "Authorization: Bearer ",
                          o->key == NULL ? "" : o->key, o->key == NULL ? "" : "\r\n", body.len);
    }
    if (status == TD_OK) {
        status = td_str_append(&conn->out, body.bytes, body.len);
    }
    td_str_fini(&body);
    return status;
}

static void push(load_t *load, load_conn_t *conn)
{
    while (conn->sent < conn->out.len) {
        ssize_t n =
            send(conn->fd, conn->out.bytes + conn->sent, conn->out.len - conn->sent, MSG_NOSIGNAL);
        if (n < 0) {
            break; /* a broken connection is seen by the next read */
        }
        conn->sent += (size_t)n;
    }
    if (conn->wants_out != (conn->sent < conn->out.len)) {
        watch(load, conn, conn->sent < conn->out.len);
    }
}

static bool more_to_send(const load_t *load, uint64_t now_ns)
{
    const load_options_t *o = &load->options;

    return o->requests > 0 ? load->begun < o->requests
                           : now_ns < load->begin_ns + o->seconds * TD_NS_PER_S;
}

static bool begin(load_t *load, load_conn_t *conn)
{
    if (write_request(load, conn) != TD_OK) {
        return false;
    }
    td_str_clear(&conn->in);
    conn->sent = 0;
    conn->first_ns = 0;
    conn->busy = true;
    conn->sent_ns = td_now_ns();
    load->busy++;
    load->begun++;
    push(load, conn);
    return true;
}

/* --- answers ---------------------------------------------------------------------------------- */

static void end(load_t *load, load_conn_t *conn, uint64_t now_ns)
{
    conn->busy = false;
    load->busy--;
    load->end_ns = now_ns;
}

/* Takes what has come. False: this connection has ended. */
static bool pull(load_t *load, load_conn_t *conn)
{
    bench_http_message_t message;
    const ssize_t n = recv(conn->fd, load->scratch, sizeof(load->scratch), 0);
    const uint64_t now_ns = td_now_ns();
    td_status_t status = TD_INPROGRESS;

    if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
        return true;
    }
    if (n > 0 && conn->busy) {
        load->bytes += (uint64_t)n;
        status = td_str_append(&conn->in, load->scratch, (size_t)n);
    }
    if (n <= 0 || !conn->busy || status < 0) {
        if (conn->busy) {
            fail(load, conn, "the connection was closed");
            end(load, conn, now_ns);
        }
        return false;
    }
    status = bench_http_find(conn->in.bytes, conn->in.len, &message);
    if (conn->first_ns == 0 && status >= 0 && memmem(conn->in.bytes, conn->in.len, "\r\n\r\n", 4)) {
        conn->first_ns = now_ns;
    }
    if (status == TD_INPROGRESS) {
        return true;
    }
    end(load, conn, now_ns);
    if (status != TD_OK || message.status != 200 || message.bytes != conn->in.len) {
        fail(load, conn, "not a whole answer with status 200");
        return false;
    }
    load->requests++;
    bench_samples_add_ns(&load->e2e, now_ns - conn->sent_ns);
    bench_samples_add_ns(&load->ttfb, conn->first_ns - conn->sent_ns);
    return true;
}

static bool reopen(load_t *load, load_conn_t *conn)
{
    (void)close(conn->fd);
    load->open--;
    conn->wants_out = false;
    return open_conn(load, conn);
}

/* False when it cannot go on. */
static bool turn(load_t *load, uint64_t *heard_ns)
{
    struct epoll_event events[EVENTS_MAX];
    const int count = epoll_wait(load->epoll_fd, events, EVENTS_MAX, 100);
    const uint64_t now_ns = td_now_ns();

    for (int i = 0; i < count; i++) {
        load_conn_t *conn = events[i].data.ptr;
        if ((events[i].events & EPOLLOUT) != 0) {
            push(load, conn);
        }
        if ((events[i].events & ~(unsigned)EPOLLOUT) != 0 && !pull(load, conn) &&
            !reopen(load, conn)) {
            return false;
        }
        if (!conn->busy && more_to_send(load, now_ns) && !begin(load, conn)) {
            return false;
        }
    }
    *heard_ns = count > 0 ? now_ns : *heard_ns;
    if (now_ns - *heard_ns > STALL_NS) {
        (void)bench_usage_error("nothing came for %llu s",
                                (unsigned long long)(STALL_NS / TD_NS_PER_S));
        return false;
    }
    return true;
}

static bool run(load_t *load)
{
    uint64_t heard_ns = 0;

    load->begin_ns = td_now_ns();
    load->end_ns = load->begin_ns + 1;
    heard_ns = load->begin_ns;
    for (uint32_t i = 0; i < load->options.connections; i++) {
        if (!open_conn(load, &load->conns[i])) {
            return false;
        }
        if (more_to_send(load, load->begin_ns) && !begin(load, &load->conns[i])) {
            return false;
        }
    }
    while (load->busy > 0) {
        if (!turn(load, &heard_ns)) {
            return false;
        }
    }
    return true;
}

/* --- figures ---------------------------------------------------------------------------------- */

static double cpu_s(void)
{
    struct rusage usage;

    (void)getrusage(RUSAGE_SELF, &usage);
    return (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
           (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1e6;
}

static void report(load_t *load)
{
    static const uint32_t percents[] = {50, 90, 99, 0};
    const double wall_s = (double)(load->end_ns - load->begin_ns) / TD_NS_PER_S;
    json_t *figures = json_object();

    (void)json_object_set_new(figures, "requests", json_integer((json_int_t)load->requests));
    (void)json_object_set_new(figures, "errors", json_integer((json_int_t)load->errors));
    (void)json_object_set_new(figures, "wall_s", json_real(wall_s));
    (void)json_object_set_new(figures, "requests_s", json_real((double)load->requests / wall_s));
    (void)json_object_set_new(figures, "read_mb_s", json_real((double)load->bytes / 1e6 / wall_s));
    bench_samples_report(&load->e2e, "e2e_ms", percents, figures);
    bench_samples_report(&load->ttfb, "first_byte_ms", percents, figures);
    (void)json_object_set_new(figures, "own_cpu_share", json_real(cpu_s() / wall_s));
    bench_print_figures(figures, load->options.json);
    json_decref(figures);
}

int bench_load(int argc, char **argv)
{
    static load_t load = {
        .options = {
            .connections = 64, .seconds = 5, .prompt_tokens = 80, .max_tokens = 16, .seed = 1}};
    int rc = parse_options(argc, argv, &load.options);

    if (rc != BENCH_EXIT_OK) {
        return rc < 0 ? BENCH_EXIT_OK : rc;
    }
    load.random = load.options.seed;
    load.epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    load.conns = td_calloc(load.options.connections, sizeof(*load.conns));
    if (load.epoll_fd < 0 || load.conns == NULL) {
        return bench_usage_error("no memory");
    }
    rc = run(&load) ? BENCH_EXIT_OK : BENCH_EXIT_FAILED;
    if (rc == BENCH_EXIT_OK) {
        report(&load);
        rc = load.errors == 0 ? BENCH_EXIT_OK : BENCH_EXIT_FAILED;
    }
    for (uint32_t i = 0; i < load.options.connections; i++) {
        if (load.conns[i].fd > 0) {
            (void)close(load.conns[i].fd);
        }
        td_str_fini(&load.conns[i].out);
        td_str_fini(&load.conns[i].in);
    }
    td_free(load.conns);
    (void)close(load.epoll_fd);
    bench_samples_fini(&load.e2e);
    bench_samples_fini(&load.ttfb);
    return rc;
}

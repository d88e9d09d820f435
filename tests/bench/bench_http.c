#include "tests/bench/bench_http.h"

#include <arpa/inet.h>
#include <ctype.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <unistd.h>

#include "common/base/td_base.h"

#define BACKLOG 1024

/* The value of a header, or NULL. name: with its colon. */
static const char *header(const char *head, size_t len, const char *name)
{
    const size_t name_len = strlen(name);
    const char *at = memchr(head, '\n', len);

    while (at != NULL && (size_t)(at + 1 - head) + name_len < len) {
        at++;
        if (strncasecmp(at, name, name_len) == 0) {
            return at + name_len + strspn(at + name_len, " ");
        }
        at = memchr(at, '\n', len - (size_t)(at - head));
    }
    return NULL;
}

/* Digits before `end`; a number past the limit of a message is only known to be that. False: there
 * are none. (strtoul() skips line ends, and then reads what is no longer ours.) */
static bool read_number(const char *at, const char *end, int base, size_t *out)
{
    const char *from = at;
    size_t value = 0;

    for (; at < end && isxdigit((unsigned char)*at) && value <= BENCH_HTTP_MESSAGE_BYTES_MAX;
         at++) {
        const int digit = isdigit((unsigned char)*at) ? *at - '0' : (*at | 0x20) - 'a' + 10;
        if (digit >= base) {
            break;
        }
        value = value * (size_t)base + (size_t)digit;
    }
    *out = value;
    return at > from;
}

/* Of a chunked body: whether its last chunk is there, and where it ends. */
static td_status_t find_last_chunk(const char *bytes, size_t len, size_t at, size_t *end_out)
{
    for (;;) {
        const char *line_end = memchr(bytes + at, '\n', len - at);
        size_t size = 0;
        size_t data = 0;

        if (line_end == NULL) {
            return TD_INPROGRESS;
        }
        if (!read_number(bytes + at, line_end, 16, &size) || size > BENCH_HTTP_MESSAGE_BYTES_MAX) {
            return TD_ERR_PROTOCOL;
        }
        data = (size_t)(line_end + 1 - bytes);
        if (len - data < size + 2) {
            return TD_INPROGRESS;
        }
        at = data + size + 2;
        if (size == 0) {
            *end_out = at;
            return TD_OK;
        }
    }
}

td_status_t bench_http_find(const char *bytes, size_t len, bench_http_message_t *out)
{
    const char *head_end = memmem(bytes, len, "\r\n\r\n", 4);
    const char *length = NULL;
    const char *coding = NULL;
    const char *blank = NULL;
    size_t body = 0;
    size_t status = 0;

    if (head_end == NULL) {
        return len > BENCH_HTTP_MESSAGE_BYTES_MAX ? TD_ERR_TOO_LARGE : TD_INPROGRESS;
    }
    *out = (bench_http_message_t){.head_bytes = (size_t)(head_end - bytes) + 4};
    blank = memchr(bytes, ' ', (size_t)(head_end - bytes));
    if (strncmp(bytes, "HTTP/1.", 7) == 0 && blank != NULL &&
        read_number(blank + 1, head_end, 10, &status)) {
        out->status = (int)status;
    }
    length = header(bytes, out->head_bytes, "content-length:");
    coding = header(bytes, out->head_bytes, "transfer-encoding:");
    if (coding != NULL && strncasecmp(coding, "chunked", 7) == 0) {
        return find_last_chunk(bytes, len, out->head_bytes, &out->bytes);
    }
    if (length != NULL && !read_number(length, head_end, 10, &body)) {
        return TD_ERR_PROTOCOL;
    }
    if (body > BENCH_HTTP_MESSAGE_BYTES_MAX) {
        return TD_ERR_TOO_LARGE;
    }
    out->bytes = out->head_bytes + body;
    return len < out->bytes ? TD_INPROGRESS : TD_OK;
}

static int no_delay(int fd)
{
    const int one = 1;

    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
    return fd;
}

int bench_http_connect(const char *url)
{
    struct sockaddr_in to = {.sin_family = AF_INET};
    unsigned port = 80;
    char host[64] = "";
    int fd = -1;

    if (sscanf(url, "http://%63[^:/]:%u", host, &port) < 1 ||
        inet_pton(AF_INET, strcmp(host, "localhost") == 0 ? "127.0.0.1" : host, &to.sin_addr) !=
            1 ||
        port > 65535) {
        errno = EINVAL;
        return -1;
    }
    to.sin_port = htons((uint16_t)port);
    fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) {
        return -1;
    }
    if (connect(fd, (const struct sockaddr *)&to, sizeof(to)) != 0 && errno != EINPROGRESS) {
        (void)close(fd);
        return -1;
    }
    return no_delay(fd);
}

int bench_http_listen(unsigned port, unsigned *port_out)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    socklen_t len = sizeof(at);
    const int one = 1;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);

    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (fd < 0) {
        return -1;
    }
    (void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
    if (bind(fd, (const struct sockaddr *)&at, sizeof(at)) != 0 || listen(fd, BACKLOG) != 0 ||
        getsockname(fd, (struct sockaddr *)&at, &len) != 0) {
        (void)close(fd);
        return -1;
    }
    *port_out = ntohs(at.sin_port);
    return no_delay(fd); /* what it accepts has it too */
}

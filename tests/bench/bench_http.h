/* bench_http.h - just as much of HTTP/1.1 as a load generator and an instant back end need: whole
 * messages are found in a buffer, nothing else of them is looked at. Threads: any (plain values).
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "common/base/td_status.h"

#define BENCH_HTTP_MESSAGE_BYTES_MAX (16u << 20)

typedef struct bench_http_message {
    size_t head_bytes; /* with the empty line */
    size_t bytes;      /* of the whole message */
    int status;        /* of an answer; 0: a request */
} bench_http_message_t;

/** Finds the message that a buffer begins with.
 * Errors: TD_INPROGRESS (it is not all there), TD_ERR_PROTOCOL, TD_ERR_TOO_LARGE. */
TD_MUST_CHECK td_status_t bench_http_find(const char *bytes, size_t len, bench_http_message_t *out);
/** Host and port of "http://HOST:PORT" with or without a path; IPv4 alone. fd of a non-blocking
 * connection without Nagle's delays, or -1 with errno. */
int bench_http_connect(const char *url);
/** A listening, non-blocking socket on a port of loopback, or -1 with errno. 0: any; *port_out. */
int bench_http_listen(unsigned port, unsigned *port_out);

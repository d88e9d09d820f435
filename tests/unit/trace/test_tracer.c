/* The sender of spans, where the collector takes the connection and says nothing. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <sys/socket.h>
#include <unistd.h>

#include "common/base/td_clock.h"
#include "common/trace/td_tracer.h"

#define SPANS 1500u /* more than two batches */
#define WAIT_MS 5000
#define ENDS_MS 3000u /* 2 s, and a slow machine */

/* A socket that listens; nobody accepts. */
static int listen_on(char *url, size_t room)
{
    struct sockaddr_in addr = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof(addr);
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

    assert_true(fd >= 0);
    assert_int_equal(bind(fd, (const struct sockaddr *)&addr, sizeof(addr)), 0);
    assert_int_equal(listen(fd, 16), 0);
    assert_int_equal(getsockname(fd, (struct sockaddr *)&addr, &len), 0);
    (void)snprintf(url, room, "http://127.0.0.1:%u", (unsigned)ntohs(addr.sin_port));
    return fd;
}

static void
test_tracer_ends_in_its_time_and_counts_what_a_silent_collector_did_not_take(void **state)
{
    char url[64];
    const int fd = listen_on(url, sizeof(url));
    struct pollfd at = {.fd = fd, .events = POLLIN};
    td_metrics_t *metrics = NULL;
    td_tracer_config_t config = {.endpoint = url, .service = "test", .instance = "test-1"};
    td_tracer_t *tracer = NULL;
    td_trace_context_t above;
    uint64_t begun = 0;
    (void)state;

    assert_int_equal(td_metrics_create(&metrics), TD_OK);
    config.sent = td_metrics_counter(metrics, "sent_total", NULL, "sent");
    config.dropped = td_metrics_counter(metrics, "dropped_total", NULL, "dropped");
    assert_int_equal(td_tracer_create(&config, &tracer), TD_OK);
    td_trace_begin(&above, true);
    for (uint32_t i = 0; i < SPANS; i++) {
        td_span_t span;
        td_span_begin(&span, &above, "span", td_now_ns());
        td_tracer_end(tracer, &span, td_now_ns());
    }
    assert_int_equal(poll(&at, 1, WAIT_MS), 1); /* a batch is under way */
    begun = td_now_ns();
    td_tracer_destroy(tracer);
    assert_true(td_now_ns() - begun < ENDS_MS * TD_NS_PER_MS);
    assert_int_equal(td_metric_get(config.sent), 0);
    assert_int_equal(td_metric_get(config.dropped), SPANS);
    td_metrics_destroy(metrics);
    (void)close(fd);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(
            test_tracer_ends_in_its_time_and_counts_what_a_silent_collector_did_not_take),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

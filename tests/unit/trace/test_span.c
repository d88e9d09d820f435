#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/trace/td_tracer.h"

#define TRACE "4bf92f3577b34da6a3ce929d0e0e4736"
#define SPAN "00f067aa0ba902b7"

static void test_span_reads_traceparent_as_the_standard_says(void **state)
{
    static const char *const bad[] = {
        "",
        "00",
        "00-" TRACE "-" SPAN,
        "00-" TRACE "-" SPAN "-0",
        "00-" TRACE "-" SPAN "-01x",
        "00-" TRACE "-" SPAN "-01-more", /* this version has no more */
        "ff-" TRACE "-" SPAN "-01",
        "0g-" TRACE "-" SPAN "-01",
        "00-4BF92F3577B34DA6A3CE929D0E0E4736-" SPAN "-01", /* upper case is none */
        "00-00000000000000000000000000000000-" SPAN "-01",
        "00-" TRACE "-0000000000000000-01",
        "00_" TRACE "-" SPAN "-01",
        "01-" TRACE "-" SPAN "-01more",
    };
    td_trace_context_t c;
    (void)state;

    assert_true(td_trace_parse("00-" TRACE "-" SPAN "-01", &c));
    assert_true(c.sampled && c.trace_id[0] == 0x4b && c.trace_id[15] == 0x36 &&
                c.span_id[7] == 0xb7);
    assert_true(td_trace_parse("00-" TRACE "-" SPAN "-00", &c));
    assert_false(c.sampled);
    assert_true(td_trace_parse("00-" TRACE "-" SPAN "-03", &c) && c.sampled);
    assert_true(td_trace_parse("01-" TRACE "-" SPAN "-01-what.the-future-holds", &c) && c.sampled);
    assert_false(td_trace_parse(NULL, &c));
    for (size_t i = 0; i < TD_ARRAY_LEN(bad); i++) {
        assert_false(td_trace_parse(bad[i], &c));
        assert_false(c.sampled);
    }
}

static void test_span_stands_below_the_one_above(void **state)
{
    td_trace_context_t root;
    td_trace_context_t there;
    uint8_t wire[TD_TRACE_WIRE_BYTES];
    td_span_t span;
    td_span_t below;
    (void)state;

    td_trace_begin(&root, true);
    td_span_begin(&span, &root, "a", 5);
    td_trace_to_wire(&span.context, wire);
    td_trace_from_wire(wire, &there);
    td_span_begin(&below, &there, "b", 6);
    assert_memory_equal(below.context.trace_id, root.trace_id, TD_TRACE_ID_BYTES);
    assert_memory_equal(below.parent_id, span.context.span_id, TD_SPAN_ID_BYTES);
    assert_memory_not_equal(below.context.span_id, span.context.span_id, TD_SPAN_ID_BYTES);
    for (uint32_t i = 0; i < 2 * TD_SPAN_ATTRIBUTES_MAX; i++) {
        td_span_number(&below, "n", i);
    }
    assert_int_equal(below.attribute_count, TD_SPAN_ATTRIBUTES_MAX);

    td_trace_begin(&root, false);
    td_span_begin(&span, &root, "a", 5);
    assert_false(span.context.sampled);
    td_span_text(&span, "t", "ignored"); /* nothing of it was set up */
}

/* Nobody listens on port 1: what is ended is dropped and counted, and nobody waits for it. */
static void test_tracer_drops_what_nobody_takes(void **state)
{
    td_metrics_t *metrics = NULL;
    td_tracer_t *tracer = NULL;
    td_tracer_config_t config = {
        .endpoint = "http://127.0.0.1:1/", .service = "test", .instance = "t"};
    td_trace_context_t root;
    td_span_t span;
    (void)state;

    assert_int_equal(td_metrics_create(&metrics), TD_OK);
    config.sent = td_metrics_counter(metrics, "sent", NULL, "");
    config.dropped = td_metrics_counter(metrics, "dropped", NULL, "");
    assert_int_equal(td_tracer_create(&config, &tracer), TD_OK);
    td_trace_begin(&root, true);
    for (uint32_t i = 0; i < 3 * TD_TRACER_SPANS_MAX; i++) {
        td_span_begin(&span, &root, "x", td_now_ns());
        td_span_text(&span, "text", "\xff\xfe no UTF-8");
        td_tracer_end(tracer, &span, td_now_ns());
    }
    td_trace_begin(&root, false);
    td_span_begin(&span, &root, "x", td_now_ns());
    td_tracer_end(tracer, &span, td_now_ns()); /* not sampled: not counted either */
    td_tracer_end(NULL, &span, td_now_ns());
    td_tracer_destroy(tracer);
    assert_int_equal(td_metric_get(config.sent), 0);
    assert_int_equal(td_metric_get(config.dropped), 3 * TD_TRACER_SPANS_MAX);
    config.endpoint = "ftp://127.0.0.1";
    assert_int_equal(td_tracer_create(&config, &tracer), TD_ERR_INVALID);
    td_metrics_destroy(metrics);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_span_reads_traceparent_as_the_standard_says),
        cmocka_unit_test(test_span_stands_below_the_one_above),
        cmocka_unit_test(test_tracer_drops_what_nobody_takes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

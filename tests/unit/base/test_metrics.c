#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <string.h>

#include "common/base/td_metrics.h"

static void test_metrics_render_as_prometheus_text(void **state)
{
    td_metrics_t *metrics = NULL;
    td_str_t out = {0};
    td_metric_t *a = NULL;
    td_metric_t *b = NULL;
    td_metric_t *h = NULL;
    (void)state;

    assert_int_equal(td_metrics_create(&metrics), TD_OK);
    a = td_metrics_counter(metrics, "t_total", "k=\"a\"", "help");
    b = td_metrics_counter(metrics, "t_total", "k=\"b\"", "help");
    h = td_metrics_histogram(metrics, "t_seconds", NULL, "time");
    td_metric_add(td_metrics_seconds(metrics, "spent_seconds_total", NULL, "time"), 1500000000);
    td_metric_add(a, 3);
    td_metric_add(b, 4);
    td_metric_observe_ns(h, 1000000);     /* 1 ms */
    td_metric_observe_ns(h, 90000000000); /* past the last bucket */
    assert_int_equal(td_metrics_render(metrics, &out), TD_OK);
    assert_non_null(strstr(out.bytes, "# TYPE t_total counter\nt_total{k=\"a\"} 3\n"
                                      "t_total{k=\"b\"} 4\n"));
    assert_non_null(strstr(out.bytes, "t_seconds_bucket{le=\"0.0005\"} 0\n"));
    assert_non_null(strstr(out.bytes, "t_seconds_bucket{le=\"0.001\"} 1\n"));
    assert_non_null(strstr(out.bytes, "t_seconds_bucket{le=\"+Inf\"} 2\n"));
    assert_non_null(strstr(out.bytes, "t_seconds_sum 90.001"));
    assert_non_null(strstr(out.bytes, "t_seconds_count 2\n"));
    assert_non_null(strstr(out.bytes, "# TYPE spent_seconds_total counter\n"
                                      "spent_seconds_total 1.500000000\n"));
    td_str_fini(&out);
    td_metrics_destroy(metrics);
}

static void test_metrics_keep_names_of_their_own(void **state)
{
    td_metrics_t *metrics = NULL;
    td_str_t out = {0};
    char name[] = "made_up_total";
    (void)state;

    assert_int_equal(td_metrics_create(&metrics), TD_OK);
    (void)td_metrics_counter(metrics, name, NULL, "help");
    memset(name, 'x', sizeof(name) - 1);
    assert_int_equal(td_metrics_render(metrics, &out), TD_OK);
    assert_non_null(strstr(out.bytes, "made_up_total 0\n"));
    td_str_fini(&out);
    td_metrics_destroy(metrics);
}

static void test_metrics_past_the_limit_are_counted_but_not_shown(void **state)
{
    td_metrics_t *metrics = NULL;
    (void)state;

    assert_int_equal(td_metrics_create(&metrics), TD_OK);
    for (int i = 0; i < TD_METRICS_SERIES_MAX + 10; i++) {
        td_metric_t *m = td_metrics_gauge(metrics, "g", NULL, "help");
        assert_non_null(m);
        td_metric_set(m, 1);
    }
    td_metrics_destroy(metrics);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_metrics_render_as_prometheus_text),
        cmocka_unit_test(test_metrics_keep_names_of_their_own),
        cmocka_unit_test(test_metrics_past_the_limit_are_counted_but_not_shown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

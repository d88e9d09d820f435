/* Tenants: files of keys, and limits by the time that is passed in. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/base/td_clock.h"
#include "common/base/td_log.h"
#include "common/wire/td_bus.h"
#include "router/rtr_auth.h"

typedef struct fixture {
    rtr_tenants_t *tenants;
    rtr_tenant_t *tenant;
    rtr_auth_t *auth;
    char path[64];
    uint8_t secret[TD_CLUSTER_SECRET_BYTES];
} fixture_t;

static int setup(void **state)
{
    static fixture_t fx;

    fx = (fixture_t){.path = "/tmp/tandem-keys-XXXXXX"};
    *state = &fx;
    td_log_init("test", TD_LOG_LEVEL_ERROR);
    return rtr_tenants_create(&fx.tenants) == TD_OK && mkstemp(fx.path) >= 0 ? 0 : -1;
}

static int teardown(void **state)
{
    fixture_t *fx = *state;

    rtr_auth_destroy(fx->auth);
    rtr_tenants_destroy(fx->tenants);
    return unlink(fx->path);
}

static uint64_t ms(uint64_t value)
{
    return value * TD_NS_PER_MS;
}

static rtr_tenant_t *tenant(fixture_t *fx, rtr_tenant_terms_t terms)
{
    terms.weight = 1;
    assert_int_equal(rtr_tenants_add(fx->tenants, "one", &terms, &fx->tenant), TD_OK);
    return fx->tenant;
}

static rtr_limits_view_t admit(rtr_tenant_t *t, uint64_t tokens, uint64_t now_ns,
                               rtr_grant_t *grant)
{
    rtr_limits_view_t view;
    rtr_tenant_admit(t, tokens, now_ns, grant, &view);
    assert_int_equal(grant->held, view.refused_by == RTR_LIMIT_NONE);
    return view;
}

/* --- limits ----------------------------------------------------------------------------------- */

static void test_a_minutes_requests_come_back_one_by_one(void **state)
{
    rtr_tenant_t *t = tenant(*state, (rtr_tenant_terms_t){.requests_per_minute = 7});
    rtr_grant_t grant;
    rtr_limits_view_t view;

    for (uint32_t i = 0; i < 7; i++) {
        view = admit(t, 1, ms(5), &grant);
        assert_int_equal(view.requests, 7);
        assert_int_equal(view.requests_left, 6 - i);
        assert_int_equal(view.tokens, 0);
    }
    assert_int_equal(view.requests_reset_ms, 60000);
    view = admit(t, 1, ms(5), &grant);
    assert_int_equal(view.refused_by, RTR_LIMIT_REQUESTS_PER_MINUTE);
    assert_int_equal(view.retry_after_s, 9);        /* 60 / 7 = 8.6 */
    for (uint64_t now = 6; now < 5 + 8572; now++) { /* looked at often: no part of one is lost */
        assert_false(admit(t, 1, ms(now), &grant).refused_by == RTR_LIMIT_NONE);
    }
    assert_int_equal(admit(t, 1, ms(5 + 8572), &grant).refused_by, RTR_LIMIT_NONE);
    assert_int_equal(admit(t, 1, ms(5 + 8573), &grant).refused_by, RTR_LIMIT_REQUESTS_PER_MINUTE);
    assert_int_equal(rtr_tenant_view(t, ms(1000000000)).requests_left, 7); /* never more */
    assert_int_equal(admit(t, 1, ms(1000000000), &grant).requests_left, 6);
    assert_int_equal(rtr_tenant_view(t, ms(5)).requests_left, 6); /* time that goes back is none */
    assert_int_equal(rtr_tenant_view(t, ms(1000000000)).requests_left, 6);
}

static void test_tokens_that_were_not_used_come_back(void **state)
{
    rtr_tenant_t *t = tenant(*state, (rtr_tenant_terms_t){.tokens_per_minute = 1000});
    rtr_grant_t first;
    rtr_grant_t second;
    rtr_limits_view_t view = admit(t, 900, ms(1), &first);

    assert_int_equal(view.tokens_left, 100);
    view = admit(t, 101, ms(1), &second);
    assert_int_equal(view.refused_by, RTR_LIMIT_TOKENS_PER_MINUTE);
    assert_int_equal(view.tokens_left, 100); /* nothing was taken */
    assert_int_equal(view.retry_after_s, 1);
    rtr_tenant_release(t, &first, 300, ms(1));
    assert_int_equal(rtr_tenant_view(t, ms(1)).tokens_left, 700);
    rtr_tenant_release(t, &first, 0, ms(1)); /* once only */
    assert_int_equal(rtr_tenant_view(t, ms(1)).tokens_left, 700);
    rtr_tenant_release(t, &second, 0, ms(1)); /* it got nothing */
    assert_int_equal(rtr_tenant_view(t, ms(1)).tokens_left, 700);
    assert_int_equal(admit(t, 700, ms(1), &second).refused_by, RTR_LIMIT_NONE);
    rtr_tenant_release(t, &second, 5000, ms(1)); /* more than it was admitted with: not less */
    assert_int_equal(rtr_tenant_view(t, ms(1)).tokens_left, 0);
    assert_int_equal(atomic_load(&t->running), 0);
}

static void test_what_comes_back_late_fills_no_more_than_the_bucket(void **state)
{
    rtr_tenant_t *t = tenant(*state, (rtr_tenant_terms_t){.tokens_per_minute = 60});
    rtr_grant_t grant;

    (void)admit(t, 60, ms(0), &grant);
    rtr_tenant_release(t, &grant, 0, ms(60000)); /* full again by then */
    assert_int_equal(rtr_tenant_view(t, ms(60000)).tokens_left, 60);
    assert_int_equal(admit(t, 61, ms(60000), &grant).refused_by, RTR_LIMIT_NONE);
    assert_int_equal(admit(t, 1, ms(60000), &grant).refused_by, RTR_LIMIT_TOKENS_PER_MINUTE);
}

static void test_a_request_beyond_a_minutes_tokens_waits_for_a_full_bucket_and_is_owed(void **state)
{
    rtr_tenant_t *t = tenant(*state, (rtr_tenant_terms_t){.tokens_per_minute = 100});
    rtr_grant_t grant;
    rtr_limits_view_t view = admit(t, 1, ms(0), &grant);

    view = admit(t, 250, ms(0), &grant);
    assert_int_equal(view.refused_by, RTR_LIMIT_TOKENS_PER_MINUTE);
    assert_int_equal(view.retry_after_s, 1); /* 1 token is missing: 600 ms */
    view = admit(t, 250, ms(600), &grant);
    assert_int_equal(view.refused_by, RTR_LIMIT_NONE);
    assert_int_equal(view.tokens_left, 0);
    assert_int_equal(view.tokens_reset_ms, 150000);
    view = admit(t, 1, ms(600), &grant);
    assert_int_equal(view.retry_after_s, 91); /* 150 are owed: 90 s, and 0.6 s for one */
    assert_int_equal(admit(t, 1, ms(600 + 90599), &grant).refused_by, RTR_LIMIT_TOKENS_PER_MINUTE);
    assert_int_equal(admit(t, 1, ms(600 + 90600), &grant).refused_by, RTR_LIMIT_NONE);
}

static void test_i5_each_request_under_way_is_counted_once(void **state)
{
    rtr_tenant_t *t = tenant(*state, (rtr_tenant_terms_t){.requests = 2, .requests_per_minute = 9});
    rtr_grant_t a;
    rtr_grant_t b;
    rtr_grant_t c;

    assert_int_equal(admit(t, 1, ms(0), &a).refused_by, RTR_LIMIT_NONE);
    assert_int_equal(admit(t, 1, ms(0), &b).refused_by, RTR_LIMIT_NONE);
    assert_int_equal(admit(t, 1, ms(0), &c).refused_by, RTR_LIMIT_REQUESTS);
    assert_int_equal(rtr_tenant_view(t, ms(0)).requests_left,
                     7); /* of the minute's, too: nothing */
    rtr_tenant_release(t, &c, 0, ms(0));
    assert_int_equal(admit(t, 1, ms(0), &c).refused_by, RTR_LIMIT_REQUESTS);
    rtr_tenant_release(t, &a, 0, ms(0));
    rtr_tenant_release(t, &a, 0, ms(0));
    assert_int_equal(admit(t, 1, ms(0), &c).refused_by, RTR_LIMIT_NONE);
    assert_int_equal(admit(t, 1, ms(0), &a).refused_by, RTR_LIMIT_REQUESTS);
    assert_int_equal(atomic_load(&t->limited[RTR_LIMIT_REQUESTS]), 3);
    rtr_tenant_release(t, &b, 0, ms(0));
    rtr_tenant_release(t, &c, 0, ms(0));
    assert_int_equal(atomic_load(&t->running), 0);
}

/* Long at the limit: what was admitted is a minute's, and what came in since, to the token. */
static void test_the_rate_is_kept_to_the_token(void **state)
{
    rtr_tenant_t *t = tenant(*state, (rtr_tenant_terms_t){.tokens_per_minute = 999});
    rtr_grant_t grant;
    uint64_t used = 0;

    for (uint64_t now = 0; now <= 600000; now += 7) {
        const uint64_t tokens = 1 + now % 13;
        if (admit(t, tokens, ms(now), &grant).refused_by == RTR_LIMIT_NONE) {
            rtr_tenant_release(t, &grant, tokens - now % 2 % tokens, ms(now));
            used += tokens - now % 2 % tokens;
        }
    }
    assert_in_range(used, 999 * 11 - 14, 999 * 11);
}

static void test_series_of_many_tenants_are_bounded(void **state)
{
    fixture_t *fx = *state;
    const rtr_tenant_terms_t terms = {.weight = 1};
    td_str_t text = {0};
    char name[16];

    for (uint32_t i = 0; i < RTR_TENANTS_MAX; i++) {
        (void)snprintf(name, sizeof(name), "t%u", i);
        assert_int_equal(rtr_tenants_add(fx->tenants, name, &terms, &fx->tenant), TD_OK);
        rtr_tenant_count_end(fx->tenant, RTR_OUTCOME_OK);
    }
    assert_int_equal(rtr_tenants_add(fx->tenants, "more", &terms, &fx->tenant), TD_ERR_TOO_LARGE);
    assert_int_equal(rtr_tenants_series(fx->tenants, &text), TD_OK);
    assert_int_equal(td_str_append(&text, "", 1), TD_OK);
    assert_non_null(strstr(
        text.bytes, "tandem_router_tenant_requests_total{tenant=\"t31\",outcome=\"ok\"} 1\n"));
    assert_null(strstr(text.bytes, "\"t32\""));
    assert_non_null(strstr(
        text.bytes, "tandem_router_tenant_requests_total{tenant=\"other\",outcome=\"ok\"} 992\n"));
    td_str_fini(&text);
}

/* --- files of keys ---------------------------------------------------------------------------- */

static td_status_t load(fixture_t *fx, const char *text)
{
    FILE *file = fopen(fx->path, "we");

    assert_non_null(file);
    assert_true(fputs(text, file) >= 0);
    assert_int_equal(fclose(file), 0);
    assert_int_equal(chmod(fx->path, 0600), 0);
    rtr_auth_destroy(fx->auth);
    fx->auth = NULL;
    rtr_tenants_destroy(fx->tenants);
    assert_int_equal(rtr_tenants_create(&fx->tenants), TD_OK);
    return rtr_auth_load(fx->path, fx->secret, fx->tenants, &fx->auth);
}

static void test_a_file_says_who_has_which_key_and_what_they_may(void **state)
{
    fixture_t *fx = *state;
    rtr_tenant_t *bare = NULL;
    rtr_tenant_t *shop = NULL;

    assert_int_equal(load(fx,
                          "# keys\n\n  \nsk-bare\n"
                          "sk-shop name=shop weight=3 requests=4\trequests-per-minute=5 "
                          "tokens-per-minute=1000000000  \r\n"
                          "sk-shop-2 name=shop\n"
                          "sk-shop-3 name=shop tokens-per-minute=1000000000 weight=3 requests=4 "
                          "requests-per-minute=5\n"
                          "sk-last weight=1000"),
                     TD_OK);
    assert_int_equal(rtr_tenants_count(fx->tenants), 3);
    bare = rtr_auth_check(fx->auth, "Bearer sk-bare");
    shop = rtr_auth_check(fx->auth, "bearer sk-shop");
    assert_int_equal(bare->terms.weight, 1);
    assert_int_equal(
        bare->terms.requests + bare->terms.requests_per_minute + bare->terms.tokens_per_minute, 0);
    assert_null(strstr(bare->name, "bare"));
    assert_int_equal(strncmp(bare->name, "key:", 4), 0);
    assert_string_equal(shop->name, "shop");
    assert_int_equal(shop->terms.weight, 3);
    assert_int_equal(shop->terms.requests, 4);
    assert_int_equal(shop->terms.requests_per_minute, 5);
    assert_int_equal(shop->terms.tokens_per_minute, 1000000000);
    assert_ptr_equal(rtr_auth_check(fx->auth, "Bearer sk-shop-2"), shop);
    assert_ptr_equal(rtr_auth_check(fx->auth, "Bearer sk-shop-3"), shop);
    assert_int_equal(rtr_auth_check(fx->auth, "Bearer sk-last")->terms.weight, 1000);
    assert_null(rtr_auth_check(fx->auth, "Bearer sk-sho"));
    assert_null(rtr_auth_check(fx->auth, "Bearer sk-shop name=shop"));
    assert_null(rtr_auth_check(fx->auth, "Basic sk-shop"));
    assert_null(rtr_auth_check(fx->auth, NULL));
}

static void test_other_lines_are_refused(void **state)
{
    static const char *const lines[] = {
        "k weight=0",
        "k weight=1001",
        "k weight=-1",
        "k weight=1x",
        "k weight=",
        "k weight",
        "k weight=1 weight=1",
        "k requests=0",
        "k requests=1000000001",
        "k requests-per-minute=99999999999999999999",
        "k tokens-per-minute=1.5",
        "k color=red",
        "k another-key",
        "k name=",
        "k name=a:b",
        "k name=a name=b",
        "k name=other",
        "k name=abcdefghijklmnopqrstuvwxyz0123456",
        "# nobody",
        "",
        "k\nk",
        "k name=a\nk name=b",
        "k name=a\nl name=a weight=2",
        "k name=a weight=2\nl name=a requests=1",
    };
    char line[RTR_KEY_LINE_BYTES_MAX + 2];
    fixture_t *fx = *state;

    for (size_t i = 0; i < sizeof(lines) / sizeof(lines[0]); i++) {
        assert_int_equal(load(fx, lines[i]), TD_ERR_INVALID);
    }
    memset(line, 'k', sizeof(line) - 1);
    line[sizeof(line) - 1] = '\0';
    assert_int_equal(load(fx, line), TD_ERR_INVALID);
    line[sizeof(line) - 2] = '\0';
    assert_int_equal(load(fx, line), TD_OK);
}

static void test_a_file_that_others_read_is_refused(void **state)
{
    fixture_t *fx = *state;
    rtr_tenants_t *others = NULL;
    rtr_auth_t *auth = NULL;

    assert_int_equal(load(fx, "k"), TD_OK);
    assert_int_equal(rtr_tenants_create(&others), TD_OK);
    assert_int_equal(chmod(fx->path, 0604), 0);
    assert_int_equal(rtr_auth_load(fx->path, fx->secret, others, &auth), TD_ERR_INVALID);
    assert_int_equal(unlink(fx->path), 0);
    assert_int_equal(rtr_auth_load(fx->path, fx->secret, others, &auth), TD_ERR_IO);
    rtr_tenants_destroy(others);
    assert_int_equal(load(fx, "k"), TD_OK);
}

static void test_keys_have_a_limit(void **state)
{
    fixture_t *fx = *state;
    td_str_t text = {0};

    for (uint32_t i = 0; i < RTR_KEYS_MAX; i++) {
        assert_int_equal(td_str_printf(&text, "key-%u\n", i), TD_OK);
    }
    assert_int_equal(td_str_append(&text, "", 1), TD_OK);
    assert_int_equal(load(fx, text.bytes), TD_OK);
    assert_int_equal(rtr_tenants_count(fx->tenants), RTR_TENANTS_MAX);
    text.len--;
    assert_int_equal(td_str_append(&text, "one-more", 9), TD_OK);
    assert_int_equal(load(fx, text.bytes), TD_ERR_INVALID);
    td_str_fini(&text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_a_minutes_requests_come_back_one_by_one, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_tokens_that_were_not_used_come_back, setup, teardown),
        cmocka_unit_test_setup_teardown(test_what_comes_back_late_fills_no_more_than_the_bucket,
                                        setup, teardown),
        cmocka_unit_test_setup_teardown(
            test_a_request_beyond_a_minutes_tokens_waits_for_a_full_bucket_and_is_owed, setup,
            teardown),
        cmocka_unit_test_setup_teardown(test_i5_each_request_under_way_is_counted_once, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_the_rate_is_kept_to_the_token, setup, teardown),
        cmocka_unit_test_setup_teardown(test_series_of_many_tenants_are_bounded, setup, teardown),
        cmocka_unit_test_setup_teardown(test_a_file_says_who_has_which_key_and_what_they_may, setup,
                                        teardown),
        cmocka_unit_test_setup_teardown(test_other_lines_are_refused, setup, teardown),
        cmocka_unit_test_setup_teardown(test_a_file_that_others_read_is_refused, setup, teardown),
        cmocka_unit_test_setup_teardown(test_keys_have_a_limit, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

/* Elections: won, lost, given up, and with etcd frozen, killed, or its key deleted. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include "common/coord/td_coord_list.h"
#include "tests/unit/coord/test_etcd_process.h"

static void test_coord_embedded_leads_at_once(void **state)
{
    td_coord_t *c = candidate_at(NULL, "alone", "a", NULL, NULL);
    (void)state;

    assert_true(leads(c));
    assert_true(td_coord_term(c) > 0);
    assert_string_equal(td_coord_leader(c), "a");
    td_coord_resign(c);
    assert_true(leads(c)); /* there is nobody else */
    td_coord_destroy(c);
}

static void test_coord_refuses_bad_configuration(void **state)
{
    static const char *const endpoints[] = {"127.0.0.1:2379",       "ftp://a",       "http://",
                                            "http://user:secret@a", "http://a/path", "http://a,,"};
    (void)state;

    for (size_t i = 0; i < TD_ARRAY_LEN(endpoints); i++) {
        const td_coord_config_t config = {
            .etcd = endpoints[i], .cluster = "c", .election = "e", .id = "i", .lease_ms = LEASE_MS};
        td_coord_t *c = NULL;
        assert_int_equal(td_coord_create(&config, &c), TD_ERR_INVALID);
    }
    {
        td_coord_config_t config = {
            .etcd = "http://a", .cluster = "c/d", .election = "e", .id = "i", .lease_ms = LEASE_MS};
        td_coord_t *c = NULL;
        assert_int_equal(td_coord_create(&config, &c), TD_ERR_INVALID);
        config.cluster = "c";
        config.lease_ms = 100;
        assert_int_equal(td_coord_create(&config, &c), TD_ERR_INVALID);
    }
}

/* One leads, and keeps it by renewing; when it resigns, the other leads at once, with a higher
 * term. Candidates of another cluster are not in its way. */
static void test_coord_one_of_two_leads_until_it_resigns(void **state)
{
    td_coord_t *a = candidate("two", "a");
    td_coord_t *b = NULL;
    td_coord_t *other = candidate("two.b", "b");
    uint64_t term = 0;
    uint64_t began = 0;
    (void)state;

    DRIVE_UNTIL(a, other, leads(a) && leads(other));
    td_coord_destroy(other);
    term = td_coord_term(a);
    b = candidate("two", "b");
    DRIVE_UNTIL(a, b, strcmp(td_coord_leader(b), "a") == 0);
    began = td_now_ns();
    DRIVE_UNTIL(a, b, td_now_ns() - began > (LEASE_MS + 500) * TD_NS_PER_MS);
    assert_true(leads(a)); /* past its first lease */
    assert_int_equal(td_coord_term(a), term);
    assert_int_equal(td_coord_term(b), 0);
    began = td_now_ns();
    td_coord_resign(a);
    assert_false(td_coord_leads(a, term)); /* at once */
    DRIVE_UNTIL(a, b, leads(b));
    assert_true(td_now_ns() - began < LEASE_MS / 2 * TD_NS_PER_MS);
    assert_true(td_coord_term(b) > term);
    td_coord_campaign(a); /* it may stand again */
    DRIVE_UNTIL(a, b, strcmp(td_coord_leader(a), "b") == 0);
    td_coord_resign_wait(b, 2000);
    DRIVE_UNTIL(a, NULL, leads(a));
    td_coord_destroy(a);
    td_coord_destroy(b);
}

/* F9: a leader that is frozen past its lease is over by its own clock before another leads, and
 * finds that out when it wakes. */
static void test_f9_coord_frozen_leader_is_over_before_another_leads(void **state)
{
    td_coord_t *a = candidate("frozen", "a");
    td_coord_t *b = candidate("frozen", "b");
    uint64_t term = 0;
    (void)state;

    DRIVE_UNTIL(a, NULL, leads(a));
    term = td_coord_term(a);
    DRIVE_UNTIL(b, NULL, (assert_false(leads(a) && leads(b)), leads(b)));
    assert_int_equal(td_coord_term(a), term); /* it slept, and knows nothing yet */
    assert_false(td_coord_leads(a, term));    /* but its clock does */
    assert_true(td_coord_term(b) > term);
    DRIVE_UNTIL(a, b, td_coord_term(a) == 0 && strcmp(td_coord_leader(a), "b") == 0);
    assert_true(leads(b));
    td_coord_resign_wait(b, 2000);
    DRIVE_UNTIL(a, NULL, leads(a)); /* as a candidate like any other */
    assert_true(td_coord_term(a) > term);
    td_coord_destroy(a);
    td_coord_destroy(b);
}

/* F9: while etcd is frozen nobody leads, though nothing answers; afterwards one does. */
static void test_f9_coord_etcd_frozen(void **state)
{
    td_coord_t *a = candidate("stop", "a");
    td_coord_t *b = candidate("stop", "b");
    uint64_t term = 0;
    uint64_t began = 0;
    (void)state;

    DRIVE_UNTIL(a, b, leads(a) || leads(b));
    term = td_coord_term(a) + td_coord_term(b);
    assert_int_equal(kill(shared.pid, SIGSTOP), 0);
    began = td_now_ns();
    DRIVE_UNTIL(a, b, !leads(a) && !leads(b));
    assert_true(td_now_ns() - began < LEASE_MS * TD_NS_PER_MS);
    assert_int_equal(td_coord_term(a) + td_coord_term(b), term); /* it may still be there */
    DRIVE_UNTIL(a, b,
                (assert_false(leads(a) || leads(b)),
                 td_now_ns() - began > (LEASE_MS + LEASE_MS / 2) * TD_NS_PER_MS));
    assert_int_equal(kill(shared.pid, SIGCONT), 0);
    DRIVE_UNTIL(a, b, (assert_false(leads(a) && leads(b)), leads(a) || leads(b)));
    assert_true(td_coord_term(a) + td_coord_term(b) >= term);
    td_coord_destroy(a);
    td_coord_destroy(b);
}

/* F9: an etcd that was killed and comes back finds its leader, whose lease it has on disk. */
static void test_f9_coord_etcd_killed_and_started(void **state)
{
    td_coord_t *a = candidate("kill", "a");
    uint64_t term = 0;
    (void)state;

    DRIVE_UNTIL(a, NULL, leads(a));
    term = td_coord_term(a);
    assert_int_equal(kill(shared.pid, SIGKILL), 0);
    (void)waitpid(shared.pid, NULL, 0);
    DRIVE_UNTIL(a, NULL, !leads(a));
    launch(&shared);
    DRIVE_UNTIL(a, NULL, leads(a));
    assert_true(td_coord_term(a) >= term);
    td_coord_resign_wait(a, 2000);
    td_coord_destroy(a);
}

/* A key that somebody deletes is leadership lost, though the lease lives: the term is compared. */
static void test_coord_compares_its_term(void **state)
{
    td_coord_t *a = candidate("term", "a");
    td_etcd_t *etcd = client_of(shared.url);
    td_str_t body = {0};
    uint64_t term = 0;
    (void)state;

    DRIVE_UNTIL(a, NULL, leads(a));
    term = td_coord_term(a);
    assert_int_equal(
        td_etcd_write_resign(&body, "/tandem/term/leader/store-master", td_coord_term(a)), TD_OK);
    assert_true(post(etcd, "/v3/kv/txn", body.bytes).answer.succeeded);
    DRIVE_UNTIL(a, NULL, td_coord_term(a) != term);
    DRIVE_UNTIL(a, NULL, leads(a));
    assert_true(td_coord_term(a) > term);
    td_str_fini(&body);
    td_etcd_destroy(etcd);
    td_coord_destroy(a);
}

/* --- lists ------------------------------------------------------------------------------------ */

static td_coord_t *entry_at(const char *cluster, const char *name, const char *value)
{
    const td_coord_config_t config = {.etcd = shared.url,
                                      .cluster = cluster,
                                      .election = name,
                                      .id = name,
                                      .folder = "things",
                                      .value = value,
                                      .lease_ms = LEASE_MS};
    td_coord_t *c = NULL;

    assert_int_equal(td_coord_create(&config, &c), TD_OK);
    td_coord_campaign(c);
    return c;
}

/* What the list shows, as "name=value " of each. */
static const char *shown(td_coord_list_t *list)
{
    static char text[512];
    uint32_t count = 0;
    const td_coord_entry_t *entries = NULL;

    (void)td_coord_list_tick(list);
    entries = td_coord_list_entries(list, &count);
    text[0] = '\0';
    for (uint32_t i = 0; i < count; i++) {
        const size_t len = strlen(text);
        (void)snprintf(text + len, sizeof(text) - len, "%s=%s ", entries[i].name, entries[i].value);
    }
    return text;
}

static void put(td_etcd_t *etcd, const char *key, const char *value)
{
    char key64[128];
    char value64[128];
    char body[320];

    (void)sodium_bin2base64(key64, sizeof(key64), (const uint8_t *)key, strlen(key),
                            sodium_base64_VARIANT_ORIGINAL);
    (void)sodium_bin2base64(value64, sizeof(value64), (const uint8_t *)value, strlen(value),
                            sodium_base64_VARIANT_ORIGINAL);
    (void)snprintf(body, sizeof(body), "{\"key\":\"%s\",\"value\":\"%s\"}", key64, value64);
    assert_int_equal(post(etcd, "/v3/kv/put", body).status, TD_OK);
}

/* Who holds a key of a folder is listed, by its value, until it resigns or its lease is over; a
 * second process of a name waits. What is no name is left out. */
static void test_coord_list_shows_who_is_there(void **state)
{
    const td_etcd_config_t at = {.endpoints = shared.url};
    td_etcd_t *etcd = client_of(shared.url);
    td_coord_list_t *list = NULL;
    td_coord_t *a = entry_at("list", "a", "tcp://1:1");
    td_coord_t *b = entry_at("list", "b", "tcp://1:2");
    td_coord_t *twin = NULL;
    td_coord_t *other = entry_at("list2", "c", "elsewhere");
    (void)state;

    put(etcd, "/tandem/list/things/", "no name");
    put(etcd, "/tandem/list/things/d/e", "a path");
    put(etcd, "/tandem/list/thingsz", "another folder");
    assert_int_equal(td_coord_list_create(&at, "list", "things", &list), TD_OK);
    DRIVE_UNTIL(a, b, strcmp(shown(list), "a=tcp://1:1 b=tcp://1:2 ") == 0);
    DRIVE_UNTIL(other, b, leads(other));
    twin = entry_at("list", "a", "tcp://1:3");
    DRIVE_UNTIL(a, twin, strcmp(td_coord_leader(twin), "tcp://1:1") == 0);
    td_coord_resign_wait(a, 2000);
    td_coord_destroy(a);
    DRIVE_UNTIL(twin, b, strcmp(shown(list), "a=tcp://1:3 b=tcp://1:2 ") == 0);
    td_coord_destroy(b); /* it dies */
    DRIVE_UNTIL(twin, NULL, strcmp(shown(list), "a=tcp://1:3 ") == 0);
    assert_false(td_coord_list_tick(list)); /* said once */
    /* F9: what was known stays while etcd is away. */
    assert_int_equal(kill(shared.pid, SIGSTOP), 0);
    {
        const uint64_t began = td_now_ns();
        DRIVE_UNTIL(twin, NULL, td_now_ns() - began > 2 * TD_NS_PER_S);
    }
    assert_string_equal(shown(list), "a=tcp://1:3 ");
    assert_int_equal(kill(shared.pid, SIGCONT), 0);
    td_coord_list_destroy(list);
    td_coord_destroy(twin);
    td_coord_destroy(other);
    td_etcd_destroy(etcd);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_coord_embedded_leads_at_once),
        cmocka_unit_test(test_coord_refuses_bad_configuration),
        cmocka_unit_test(test_coord_one_of_two_leads_until_it_resigns),
        cmocka_unit_test(test_f9_coord_frozen_leader_is_over_before_another_leads),
        cmocka_unit_test(test_f9_coord_etcd_frozen),
        cmocka_unit_test(test_f9_coord_etcd_killed_and_started),
        cmocka_unit_test(test_coord_compares_its_term),
        cmocka_unit_test(test_coord_list_shows_who_is_there),
    };
    return cmocka_run_group_tests(tests, group_setup, group_teardown);
}

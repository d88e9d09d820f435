/* Every create function under failing allocations: the n-th fails, for n = 1, 2, 3, ... until the
 * call succeeds. Each time: a status, the output untouched, nothing leaked (ASan's leak check sees
 * that). */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_metrics.h"
#include "common/base/td_ring.h"
#include "common/base/td_worker.h"
#include "common/coord/td_coord.h"
#include "common/kv/td_pool.h"
#include "common/kv/td_seq.h"
#include "common/model/td_stop.h"
#include "common/transfer/td_transfer.h"
#include "common/wire/td_bus.h"
#include "common/wire/td_member.h"
#include "common/wire/td_statusd.h"
#include "kvstore/kvs_client.h"
#include "kvstore/kvs_master.h"
#include "kvstore/kvs_segment.h"

#define STEPS_MAX 400u

static uint8_t memory[4 * 64];
static uint8_t secret[TD_CLUSTER_SECRET_BYTES] = {3};

typedef struct parts { /* what later creates need, made once without faults */
    td_bus_t *bus;
    td_metrics_t *metrics;
    td_pool_t *pool;
    td_transfer_t *transfer;
    td_coord_t *coord;
} parts_t;

static parts_t parts;

static td_status_t make_pool(void **out)
{
    return td_pool_create(memory, 4, 64, (td_pool_t **)out);
}
static void end_pool(void *p)
{
    td_pool_destroy(p);
}

static td_status_t make_kv_events(void **out)
{
    return td_kv_events_create(8, (td_kv_events_t **)out);
}
static void end_kv_events(void *p)
{
    td_kv_events_destroy(p);
}

static td_status_t make_ring(void **out)
{
    return td_ring_create(4, (td_ring_t **)out);
}
static void end_ring(void *p)
{
    td_ring_destroy(p);
}

static td_status_t make_metrics(void **out)
{
    return td_metrics_create((td_metrics_t **)out);
}
static void end_metrics(void *p)
{
    td_metrics_destroy(p);
}

static td_status_t make_worker(void **out)
{
    return td_worker_create((td_worker_t **)out);
}
static void end_worker(void *p)
{
    td_worker_destroy(p);
}

static td_status_t make_bus(void **out)
{
    td_bus_config_t config = {
        .bind = "tcp://127.0.0.1:*", .id = "f", .incarnation = 1, .secret = secret};
    return td_bus_create(&config, (td_bus_t **)out);
}
static void end_bus(void *p)
{
    td_bus_destroy(p);
}

static td_status_t make_statusd(void **out)
{
    return td_statusd_create("127.0.0.1:0", parts.metrics, (td_statusd_t **)out);
}
static void end_statusd(void *p)
{
    td_statusd_destroy(p);
}

static td_status_t make_transfer(void **out)
{
    td_transfer_config_t config = {.block_count = 4, .block_bytes = 4096, .incarnation = 1};
    return td_transfer_create(&config, (td_transfer_t **)out);
}
static void end_transfer(void *p)
{
    td_transfer_destroy(p);
}

static td_status_t make_member(void **out)
{
    td_member_events_t events = {0};
    td_msg_register_t self = {.self = {.id = "f", .role = TD_ROLE_PREFILL, .endpoint = "e"},
                              .http = "",
                              .numerics_class = "",
                              .version = ""};
    return td_member_create(parts.bus, "tcp://127.0.0.1:9", &self, &events, (td_member_t **)out);
}
static void end_member(void *p)
{
    td_member_destroy(p);
    td_bus_disconnect(parts.bus, TD_ROUTER_ID);
}

static td_status_t make_coord_of(const char *etcd, void **out)
{
    const td_coord_config_t config = {.etcd = etcd,
                                      .cluster = "c",
                                      .election = "e",
                                      .id = "i",
                                      .lease_ms = TD_COORD_LEASE_MS_DEFAULT,
                                      .user = "u",
                                      .password = "p"};
    return td_coord_create(&config, (td_coord_t **)out);
}
static td_status_t make_embedded(void **out)
{
    return make_coord_of(NULL, out);
}
static td_status_t make_etcd(void **out)
{
    return make_coord_of("http://127.0.0.1:9,https://127.0.0.1:9", out);
}
static void end_coord(void *p)
{
    td_coord_destroy(p);
}

static td_status_t make_client(void **out)
{
    return kvs_client_create(parts.bus, NULL, parts.pool, (kvs_client_t **)out);
}
static void end_client(void *p)
{
    kvs_client_destroy(p);
}

static td_status_t make_master(void **out)
{
    const kvs_policy_t policy = kvs_policy_default();
    return kvs_master_create(parts.bus, parts.metrics, 16, &policy, parts.coord,
                             (kvs_master_t **)out);
}
static void end_master(void *p)
{
    kvs_master_destroy(p);
}

static td_status_t make_segment(void **out)
{
    return kvs_segment_create(parts.bus, parts.transfer, parts.metrics, 4, 4096,
                              (kvs_segment_t **)out);
}
static void end_segment(void *p)
{
    kvs_segment_destroy(p);
}

static void sweep(td_status_t (*make)(void **), void (*end)(void *))
{
    td_status_t status = TD_ERR_NO_MEMORY;

    for (uint64_t nth = 1; status != TD_OK; nth++) {
        void *made = NULL;
        assert_true(nth < STEPS_MAX);
        td_alloc_fail_at(nth);
        status = make(&made);
        td_alloc_fail_at(0);
        if (status == TD_OK) {
            assert_non_null(made);
            end(made);
        } else {
            assert_int_equal(status, TD_ERR_NO_MEMORY);
            assert_null(made);
        }
    }
}

static void test_fault_pool_create(void **state)
{
    (void)state;
    sweep(make_pool, end_pool);
}
static void test_fault_kv_events_create(void **state)
{
    (void)state;
    sweep(make_kv_events, end_kv_events);
}
static void test_fault_ring_create(void **state)
{
    (void)state;
    sweep(make_ring, end_ring);
}
static void test_fault_metrics_create(void **state)
{
    (void)state;
    sweep(make_metrics, end_metrics);
}
static void test_fault_worker_create(void **state)
{
    (void)state;
    sweep(make_worker, end_worker);
}
static void test_fault_bus_create(void **state)
{
    (void)state;
    sweep(make_bus, end_bus);
}
static void test_fault_statusd_create(void **state)
{
    (void)state;
    sweep(make_statusd, end_statusd);
}
static void test_fault_transfer_create(void **state)
{
    (void)state;
    sweep(make_transfer, end_transfer);
}
static void test_fault_member_create(void **state)
{
    (void)state;
    sweep(make_member, end_member);
}
static void test_fault_store_client_create(void **state)
{
    (void)state;
    sweep(make_client, end_client);
}
static void test_fault_store_master_create(void **state)
{
    (void)state;
    sweep(make_master, end_master);
}
static void test_fault_coord_create(void **state)
{
    (void)state;
    sweep(make_embedded, end_coord);
    sweep(make_etcd, end_coord);
}
static void test_fault_store_segment_create(void **state)
{
    (void)state;
    sweep(make_segment, end_segment);
}

static void test_fault_seq_init(void **state)
{
    static const td_attention_mask_t full_mask;
    static const td_kv_layout_t layout = {
        .layers = 1, .kv_heads = 1, .head_dim = 8, .block_tokens = 16};
    td_seq_t seq = {0};
    (void)state;

    td_alloc_fail_at(1);
    assert_int_equal(td_seq_init(&seq, parts.pool, &layout, &full_mask, 32), TD_ERR_NO_MEMORY);
    td_alloc_fail_at(0);
    assert_null(seq.blocks);
    td_seq_fini(&seq);
}

static void test_fault_stop_push(void **state)
{
    td_stop_t stop = {0};
    td_str_t out = {0};
    td_status_t status = TD_ERR_NO_MEMORY;
    (void)state;

    for (uint64_t nth = 1; status != TD_OK; nth++) {
        td_stop_fini(&stop);
        td_str_fini(&out);
        memset(&stop, 0, sizeof(stop));
        td_alloc_fail_at(nth);
        status = td_stop_push(&stop, "text", 4, true, &out);
        td_alloc_fail_at(0);
        assert_true(nth < STEPS_MAX);
    }
    assert_string_equal(out.bytes, "text");
    td_stop_fini(&stop);
    td_str_fini(&out);
}

static int setup(void **state)
{
    (void)state;
    assert_int_equal(make_bus((void **)&parts.bus), TD_OK);
    assert_int_equal(make_metrics((void **)&parts.metrics), TD_OK);
    assert_int_equal(make_pool((void **)&parts.pool), TD_OK);
    assert_int_equal(make_transfer((void **)&parts.transfer), TD_OK);
    assert_int_equal(make_embedded((void **)&parts.coord), TD_OK);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    td_coord_destroy(parts.coord);
    td_transfer_destroy(parts.transfer);
    td_pool_destroy(parts.pool);
    td_metrics_destroy(parts.metrics);
    td_bus_destroy(parts.bus);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_fault_pool_create),
        cmocka_unit_test(test_fault_kv_events_create),
        cmocka_unit_test(test_fault_ring_create),
        cmocka_unit_test(test_fault_metrics_create),
        cmocka_unit_test(test_fault_worker_create),
        cmocka_unit_test(test_fault_bus_create),
        cmocka_unit_test(test_fault_statusd_create),
        cmocka_unit_test(test_fault_transfer_create),
        cmocka_unit_test(test_fault_member_create),
        cmocka_unit_test(test_fault_store_client_create),
        cmocka_unit_test(test_fault_store_master_create),
        cmocka_unit_test(test_fault_store_segment_create),
        cmocka_unit_test(test_fault_coord_create),
        cmocka_unit_test(test_fault_seq_init),
        cmocka_unit_test(test_fault_stop_push),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}

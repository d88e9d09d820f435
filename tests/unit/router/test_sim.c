/* tandem-sim's parts: traces, caches, events, batches, and whole runs that can be counted by hand.
 */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_buf.h"
#include "router/sim_batch.h"
#include "router/sim_cache.h"
#include "router/sim_events.h"
#include "router/sim_report.h"
#include "router/sim_sweep.h"

#define BLOCK 4u

/* --- traces ----------------------------------------------------------------------------------- */

static sim_trace_t parse(const char *text)
{
    sim_trace_t trace = {0};
    char why[SIM_WHY_CHARS_MAX + 1] = "";

    if (sim_trace_parse(text, strlen(text), BLOCK, &trace, why) != TD_OK) {
        fail_msg("refused: %s", why);
    }
    return trace;
}

static void expect_refused(const char *text, const char *expected)
{
    sim_trace_t trace = {.count = 77};
    char why[SIM_WHY_CHARS_MAX + 1] = "";

    assert_int_equal(sim_trace_parse(text, strlen(text), BLOCK, &trace, why), TD_ERR_INVALID);
    assert_int_equal(trace.count, 77); /* untouched */
    if (strstr(why, expected) == NULL) {
        fail_msg("expected \"%s\", got \"%s\"", expected, why);
    }
}

#define LINE(t, in, out, ids)                                                                      \
    "{\"timestamp\": " #t ", \"input_length\": " #in ", \"output_length\": " #out                  \
    ", \"hash_ids\": " ids "}\n"
#define GOOD LINE(0, 5, 2, "[1, 2]")

static void test_trace_reads_lines(void **state)
{
    sim_trace_t t = parse(GOOD "\n  \r\n" LINE(1.5, 9, 1, "[1, 2, 3]"));
    (void)state;

    assert_int_equal(t.count, 2);
    assert_int_equal(t.requests[1].arrival_ns, 1500000);
    assert_int_equal(t.requests[1].input_tokens, 9);
    assert_int_equal(t.requests[1].first_block, 2);
    assert_int_equal(t.requests[1].block_count, 3);
    assert_int_equal(t.blocks[4], 3);
    sim_trace_fini(&t);
}

static void test_trace_says_which_line_and_field_is_wrong(void **state)
{
    (void)state;
    expect_refused("", "no request in it");
    expect_refused(GOOD "{\"timestamp\": 3", "line 2: not JSON");
    expect_refused(GOOD GOOD "[]", "line 3: an object is expected");
    expect_refused("{\"input_length\": 1}", "line 1: timestamp is missing");
    expect_refused(LINE("0", 5, 2, "[1, 2]"), "timestamp must be a number");
    expect_refused(LINE(-1, 5, 2, "[1, 2]"), "timestamp must be a number");
    expect_refused(LINE(9, 5, 2, "[1, 2]") GOOD, "line 2: timestamp is before");
    expect_refused(LINE(0, 0, 2, "[]"), "input_length must be a whole number of 1");
    expect_refused(LINE(0, 5.5, 2, "[1, 2]"), "input_length must be a whole number");
    expect_refused(LINE(0, 99999999999, 2, "[1, 2]"), "input_length must be a whole number");
    expect_refused(LINE(0, 5, -2, "[1, 2]"), "output_length must be a whole number");
    expect_refused(LINE(0, 5, 2, "[1]"), "hash_ids has 1 blocks, 5 tokens are 2 blocks of 4");
    expect_refused(LINE(0, 5, 2, "{}"), "hash_ids must be an array");
    expect_refused(LINE(0, 5, 2, "[1, \"2\"]"), "hash_ids[1] must be a whole number");
    expect_refused(LINE(0, 5, 2, "[1, 1099511627776]"), "hash_ids[1] must be a whole number");
    expect_refused("{\"timestamp\":0,\"input_length\":1,\"output_length\":1}",
                   "hash_ids is missing");
    expect_refused("{\"timestamp\":0,\"timestamp\":0}", "not JSON: duplicate");
}

static void test_trace_shapes_rate_repeats_and_arrivals(void **state)
{
    sim_trace_t t = parse(LINE(10, 5, 2, "[1, 2]") LINE(10, 5, 2, "[1, 3]") LINE(30, 1, 1, "[4]"));
    sim_load_t load = {.rate_scale = 2, .requests_max = 5};
    sim_trace_t shaped;
    sim_trace_t again;
    (void)state;

    assert_int_equal(sim_trace_shape(&t, &load, &shaped), TD_OK);
    assert_int_equal(shaped.count, 5);
    assert_int_equal(shaped.requests[0].arrival_ns, 0);
    assert_int_equal(shaped.requests[2].arrival_ns, 10000000);
    assert_true(shaped.requests[3].arrival_ns > 10000000);
    assert_true(shaped.blocks[shaped.requests[3].first_block] != 1); /* blocks of its own */
    assert_true(shaped.blocks[shaped.requests[3].first_block] ==
                shaped.blocks[shaped.requests[4].first_block]);
    sim_trace_fini(&shaped);

    load = (sim_load_t){.arrivals = SIM_ARRIVALS_SPREAD, .rate_scale = 1};
    assert_int_equal(sim_trace_shape(&t, &load, &shaped), TD_OK);
    assert_int_equal(shaped.requests[1].arrival_ns, 10000000); /* half of the way to the third */
    sim_trace_fini(&shaped);

    load = (sim_load_t){.arrivals = SIM_ARRIVALS_POISSON, .rate_scale = 1, .requests_max = 2000};
    assert_int_equal(sim_trace_shape(&t, &load, &shaped), TD_OK);
    assert_int_equal(sim_trace_shape(&t, &load, &again), TD_OK);
    for (uint32_t i = 0; i < shaped.count; i++) {
        assert_int_equal(shaped.requests[i].arrival_ns, again.requests[i].arrival_ns);
    }
    /* The same mean rate: 3 requests in 20 ms and a mean gap. */
    assert_in_range(shaped.requests[1999].arrival_ns / 2000, 8500000, 9300000);
    sim_trace_fini(&shaped);
    sim_trace_fini(&again);
    sim_trace_fini(&t);
}

static void test_trace_bound_is_that_of_a_cache_without_end(void **state)
{
    /* 2 of 3 full blocks hit; the last token of a prompt is always computed. */
    sim_trace_t t =
        parse(LINE(0, 8, 1, "[1, 2]") LINE(0, 9, 1, "[1, 2, 3]") LINE(0, 8, 1, "[1, 2]"));
    double rate = 0;
    (void)state;

    assert_int_equal(sim_trace_bound(&t, &rate), TD_OK);
    assert_true(fabs(rate - (0 + 2 + 1) / 7.0) < 1e-12);
    sim_trace_fini(&t);
}

/* --- parts ------------------------------------------------------------------------------------ */

static uint64_t evicted_block;
static uint32_t evicted_count;

static void on_evicted(void *ctx, uint32_t node, uint64_t block)
{
    (void)ctx;
    (void)node;
    evicted_block = block;
    evicted_count++;
}

static void test_cache_gives_up_what_was_used_least_recently(void **state)
{
    const sim_cache_config_t config = {.node_count = 2, .entries_max = 8, .evicted = on_evicted};
    const uint64_t a[] = {1, 2, 3};
    const uint64_t b[] = {7, 8};
    sim_cache_t *c = NULL;
    (void)state;

    evicted_count = 0;
    assert_int_equal(sim_cache_create(&config, &c), TD_OK);
    sim_cache_set_capacity(c, 0, 4);
    sim_cache_set_capacity(c, 1, 4);
    sim_cache_use(c, 0, a, 3);
    assert_int_equal(sim_cache_match(c, 0, a, 3, false), 3);
    assert_int_equal(sim_cache_match(c, 0, a, 3, true), 0);  /* not computed yet */
    assert_int_equal(sim_cache_match(c, 1, a, 3, false), 0); /* another node */
    sim_cache_set_ready(c, 0, a, 2);
    assert_int_equal(sim_cache_match(c, 0, a, 3, true), 2);
    sim_cache_use(c, 0, b, 2);
    assert_int_equal(evicted_count, 1);
    assert_int_equal(evicted_block, 3); /* the end of a chain goes before its begin */
    assert_int_equal(sim_cache_match(c, 0, a, 3, false), 2);
    sim_cache_use(c, 0, a, 1); /* used again: newer than all others */
    sim_cache_use(c, 0, a + 2, 1);
    assert_int_equal(evicted_block, 2);
    sim_cache_use(c, 0, (const uint64_t[]){9}, 1);
    assert_int_equal(evicted_block, 8);
    sim_cache_clear(c, 0);
    assert_int_equal(sim_cache_count(c, 0), 0);
    assert_int_equal(evicted_count, 3);
    sim_cache_use(c, 0, a, 3);
    sim_cache_use(c, 1, b, 2);
    assert_int_equal(sim_cache_count(c, 0) + sim_cache_count(c, 1), 5);
    sim_cache_destroy(c);
}

static void test_events_come_in_order_of_time_then_of_planning(void **state)
{
    static const uint64_t times[] = {50, 10, 30, 10, 90, 10, 30};
    static const uint32_t expected[] = {1, 3, 5, 2, 6, 0, 4};
    sim_events_t events = {0};
    uint64_t at = 0;
    (void)state;

    for (uint32_t i = 0; i < TD_ARRAY_LEN(times); i++) {
        assert_int_equal(sim_events_add(&events, (sim_event_t){.at_ns = times[i], .id = i}), TD_OK);
    }
    for (uint32_t i = 0; i < TD_ARRAY_LEN(times); i++) {
        assert_true(sim_events_next(&events, &at));
        assert_int_equal(at, times[expected[i]]);
        assert_int_equal(sim_events_take(&events).id, expected[i]);
    }
    assert_false(sim_events_next(&events, &at));
    sim_events_fini(&events);
}

/* Jumping over steps must be what taking them one by one is. */
static void test_batch_jumps_as_far_as_steps_go(void **state)
{
    const sim_model_t m = {
        .decode_step_ms = 10, .decode_sequence_us = 100, .decode_kv_token_ns = 1000};
    sim_batch_t jump = {0};
    sim_batch_t step = {0};
    uint64_t half = 0;
    (void)state;

    for (uint32_t i = 0; i < 3; i++) {
        assert_int_equal(sim_batch_add(&jump, i, 100 * i, 40 + i), TD_OK);
        assert_int_equal(sim_batch_add(&step, i, 100 * i, 40 + i), TD_OK);
    }
    assert_int_equal(sim_batch_until_end(&jump), 40);
    for (uint32_t i = 0; i < 40; i++) {
        half = i == 20 ? step.stamp_ns : half;
        sim_batch_advance(&step, &m, 1);
    }
    assert_int_equal(sim_batch_until(&jump, &m, half), 20);
    assert_int_equal(sim_batch_until(&jump, &m, half + 1), 21);
    assert_int_equal(sim_batch_until(&jump, &m, 0), 0);
    assert_int_equal(sim_batch_until(&jump, &m, half * 100), 40); /* not past an end */
    sim_batch_advance(&jump, &m, 40);
    assert_int_equal(jump.stamp_ns, step.stamp_ns);
    assert_int_equal(jump.context, step.context);
    assert_int_equal(jump.seqs[0].left, 0);
    assert_int_equal(sim_batch_remove(&jump, 0).given, 40);
    assert_int_equal(jump.context, 100 + 200 + 2 * 40);
    sim_batch_fini(&jump);
    sim_batch_fini(&step);
}

/* --- runs ------------------------------------------------------------------------------------- */

/* One ms for each computed token, 10 ms for each step; moving is nearly free. */
static sim_config_t config_of(rtr_policy_t policy, uint32_t prefill, uint32_t decode)
{
    return (sim_config_t){.model = {.prefill_token_us = 1000,
                                    .decode_step_ms = 10,
                                    .decode_kv_tokens = 1000,
                                    .kv_token_bytes = 1,
                                    .layers = 1,
                                    .link_gb_s = 1000},
                          .policy = policy,
                          .keep_local = 1,
                          .prefill_count = prefill,
                          .decode_count = decode,
                          .node_cache_tokens = 400,
                          .seed = 1};
}

static sim_result_t run(const sim_config_t *config, const char *text)
{
    sim_trace_t t = parse(text);
    sim_result_t result = {0};

    assert_int_equal(sim_run(config, &t, &result), TD_OK);
    assert_int_equal(result.completed + result.rejected + result.failed, result.requests);
    sim_trace_fini(&t);
    return result;
}

static bool is_near(double a, double b)
{
    return fabs(a - b) < 1e-6;
}

static void test_run_counts_hits_and_times(void **state)
{
    const sim_config_t config = config_of(RTR_POLICY_KV_AWARE, 1, 1);
    /* 9 tokens; then 8 of these and 4 more behind them: 4 are computed. */
    const sim_result_t r = run(&config, LINE(0, 9, 3, "[1, 2, 3]") LINE(100, 12, 3, "[1, 2, 4]"));
    (void)state;

    assert_int_equal(r.completed, 2);
    assert_true(is_near(r.hit_rate, 2 / 6.0));
    assert_true(is_near(r.hit_rate_pulled, 2 / 6.0));
    assert_true(is_near(r.ttft_mean_s, (0.009 + 0.004) / 2));
    assert_true(is_near(r.tbt_mean_s, 0.010));
    assert_true(is_near(r.load_max_over_mean, 1));
}

static void test_run_waits_behind_what_was_placed_before(void **state)
{
    const sim_config_t config = config_of(RTR_POLICY_LEAST_LOADED, 1, 1);
    const sim_result_t r = run(&config, LINE(0, 8, 1, "[1, 2]") LINE(0, 4, 1, "[9]"));
    (void)state;
    assert_true(is_near(r.ttft_mean_s, (0.008 + 0.012) / 2));
}

static void test_run_pulls_from_the_node_that_has_it(void **state)
{
    sim_config_t config = config_of(RTR_POLICY_KV_AWARE, 2, 1);
    /* The third finds the node of the first two busy, and the other one without its blocks. */
    static const char text[] =
        LINE(0, 9, 1, "[1, 2, 3]") LINE(1000, 52, 1, "[1,2,50,51,52,53,54,55,56,57,58,59,60]")
            LINE(1001, 13, 1, "[1, 2, 5, 6]");
    sim_result_t r;
    (void)state;

    config.keep_local = 0;
    r = run(&config, text);
    assert_true(is_near(r.hit_rate, 2 / 20.0));
    assert_true(is_near(r.hit_rate_pulled, 4 / 20.0));
    assert_true(is_near(r.ttft_mean_s, (0.009 + 0.044 + 0.005) / 3));
    config.keep_local = 100; /* it waits */
    r = run(&config, text);
    assert_true(is_near(r.hit_rate, 4 / 20.0));
    assert_true(is_near(r.hit_rate_pulled, r.hit_rate));
    config.policy = RTR_POLICY_LOCAL_AWARE; /* no pulling: each node for itself */
    r = run(&config, text);
    assert_true(is_near(r.hit_rate, 2 / 20.0));
    assert_true(is_near(r.hit_rate_pulled, r.hit_rate));
    config.store_tokens = 400; /* nodes look into the store whatever the policy */
    assert_true(is_near(run(&config, text).hit_rate_pulled, 4 / 20.0));
}

static void test_run_pooled_is_one_cache_of_the_total_size(void **state)
{
    sim_config_t config = config_of(RTR_POLICY_KV_AWARE, 2, 1);
    static const char text[] = LINE(0, 9, 1, "[1, 2, 3]") LINE(100, 9, 1, "[1, 2, 3]")
        LINE(200, 9, 1, "[1, 2, 3]") LINE(300, 9, 1, "[1, 2, 3]");
    sim_result_t r;
    (void)state;

    config.policy = RTR_POLICY_ROUND_ROBIN;
    assert_true(is_near(run(&config, text).hit_rate, 4 / 12.0)); /* each node learns it once */
    config.policy = RTR_POLICY_KV_AWARE;
    config.pooled = true;
    r = run(&config, text);
    assert_true(is_near(r.hit_rate, 6 / 12.0));
}

static void test_run_queues_until_there_is_room_for_kv(void **state)
{
    sim_config_t config = config_of(RTR_POLICY_KV_AWARE, 1, 1);
    /* Room for one of them: the second starts when the first has given its 11 tokens. */
    sim_result_t r;
    (void)state;

    config.model.decode_kv_tokens = 20;
    r = run(&config, LINE(0, 8, 11, "[1, 2]") LINE(0, 8, 11, "[3, 4]"));
    assert_int_equal(r.completed, 2);
    assert_true(is_near(r.ttft_mean_s, (0.008 + (0.008 + 0.100 + 0.008)) / 2));
    r = run(&config, LINE(0, 8, 11, "[1, 2]") LINE(0, 8, 13, "[3, 4]"));
    assert_int_equal(r.rejected, 1); /* it would never fit */
}

static void test_run_refuses_early_what_would_be_late(void **state)
{
    sim_config_t config = config_of(RTR_POLICY_KV_AWARE, 1, 1);
    static const char text[] = LINE(0, 10, 1, "[1, 2, 3]")
        LINE(100, 40, 1, "[10,11,12,13,14,15,16,17,18,19]") LINE(100, 10, 1, "[4, 5, 6]");
    sim_result_t r;
    (void)state;

    config.slo.ttft_ms = 45;
    r = run(&config, text);
    assert_int_equal(r.rejected, 0);
    assert_int_equal(r.good, 2); /* the last one waits for 40 ms */
    config.admission = true;
    r = run(&config, text);
    assert_int_equal(r.rejected, 1);
    assert_int_equal(r.good, 2);
    assert_true(is_near(r.retry_after_mean_s, 1));
}

static void test_run_goes_on_where_a_decode_node_died(void **state)
{
    const sim_fault_t fault = {.at_ns = 54000000, .up_ns = UINT64_MAX, .is_prefill = false};
    sim_config_t config = config_of(RTR_POLICY_ROUND_ROBIN, 1, 2);
    sim_result_t r;
    (void)state;

    config.faults = &fault;
    config.fault_count = 1;
    r = run(&config, LINE(0, 4, 20, "[1]"));
    assert_int_equal(r.completed, 1);
    assert_int_equal(r.moved, 1);
    assert_true(is_near(r.ttft_mean_s, 0.004)); /* its first token stays what it was */
    /* Six tokens are there; ten are computed, which gives the seventh at 64 ms, and 13 follow. */
    assert_true(is_near(r.tbt_mean_s, (0.064 + 0.130 - 0.004) / 19));
}

static void test_run_fails_what_has_no_node_left(void **state)
{
    sim_fault_t fault = {.at_ns = 1000000, .up_ns = UINT64_MAX, .is_prefill = true};
    sim_config_t config = config_of(RTR_POLICY_KV_AWARE, 1, 1);
    sim_result_t r;
    (void)state;

    config.faults = &fault;
    config.fault_count = 1;
    r = run(&config, LINE(0, 4, 2, "[1]") LINE(5, 4, 2, "[1]"));
    assert_int_equal(r.failed, 2);
    fault.up_ns = 50000000;
    r = run(&config, LINE(0, 4, 2, "[1]") LINE(5, 4, 2, "[1]"));
    assert_int_equal(r.completed, 2);
    assert_int_equal(r.moved, 1);
    fault.at_ns = 20000000; /* comes back with nothing in its cache */
    r = run(&config, LINE(0, 9, 1, "[1, 2, 3]") LINE(100, 9, 1, "[1, 2, 3]"));
    assert_true(is_near(r.hit_rate, 0));
    config.fault_count = 0;
    r = run(&config, LINE(0, 9, 1, "[1, 2, 3]") LINE(100, 9, 1, "[1, 2, 3]"));
    assert_true(is_near(r.hit_rate, 2 / 6.0));
}

static void test_run_is_the_same_for_the_same_seed(void **state)
{
    sim_config_t config = config_of(RTR_POLICY_RANDOM, 3, 2);
    char line[200];
    td_str_t text = {0};
    td_str_t json[3] = {{0}, {0}, {0}};
    (void)state;

    for (uint32_t i = 0; i < 60; i++) {
        (void)snprintf(line, sizeof(line),
                       "{\"timestamp\": %u, \"input_length\": 9, \"output_length\": 3, "
                       "\"hash_ids\": [1, %u, %u]}\n",
                       i * 7, i % 11 + 2, i + 100);
        assert_int_equal(td_str_append_text(&text, line), TD_OK);
    }
    for (uint32_t i = 0; i < 3; i++) {
        sim_row_t row = {.policy = "random"};
        config.seed = i < 2 ? 5 : 6;
        row.result = run(&config, text.bytes);
        assert_int_equal(sim_report_json(&row, false, &json[i]), TD_OK);
    }
    assert_string_equal(json[0].bytes, json[1].bytes);
    assert_string_not_equal(json[0].bytes, json[2].bytes);
    for (uint32_t i = 0; i < 3; i++) {
        td_str_fini(&json[i]);
    }
    td_str_fini(&text);
}

static void test_sweep_finds_the_fewest_nodes(void **state)
{
    sim_config_t config = config_of(RTR_POLICY_KV_AWARE, 1, 1);
    sim_sweep_t sweep = {.prefill = {1, 4, 1}, .decode = {1, 2, 1}, .share = 0.9};
    sim_trace_t t = parse(LINE(0, 8, 1, "[1, 2]") LINE(0, 8, 1, "[3, 4]") LINE(0, 8, 1, "[5, 6]"));
    td_str_t text = {0};
    (void)state;

    config.slo.ttft_ms = 10; /* nobody may wait for another */
    assert_int_equal(sim_sweep_run(&sweep, &config, &t, NULL, NULL), TD_OK);
    assert_int_equal(sweep.best_prefill, 3);
    assert_int_equal(sweep.best_decode, 1);
    assert_int_equal(sim_sweep_plot(&sweep, "x.png", &text), TD_OK);
    assert_non_null(strstr(text.bytes, "set output 'x.png'"));
    td_str_fini(&text);
    sim_sweep_fini(&sweep);
    sim_trace_fini(&t);
}

static void test_ranges_and_presets(void **state)
{
    sim_range_t range = {0};
    sim_model_t model = {0};
    char why[SIM_MODEL_WHY_CHARS_MAX + 1];
    (void)state;

    assert_int_equal(sim_range_parse("4", &range), TD_OK);
    assert_int_equal(sim_range_count(&range), 1);
    assert_int_equal(sim_range_parse("2:9:3", &range), TD_OK);
    assert_int_equal(sim_range_count(&range), 3);
    assert_int_equal(sim_range_parse("9:2", &range), TD_ERR_INVALID);
    assert_int_equal(sim_range_parse("0:2", &range), TD_ERR_INVALID);
    assert_int_equal(sim_range_parse("1:2:0", &range), TD_ERR_INVALID);
    assert_int_equal(sim_range_parse("1:2x", &range), TD_ERR_INVALID);
    assert_int_equal(sim_range_parse("-1", &range), TD_ERR_INVALID);
    assert_int_equal(sim_model_preset("llama70b-8xa800", &model), TD_OK);
    assert_true(model.kv_token_bytes == 327680);
    assert_int_equal(sim_model_preset("llama", &model), TD_ERR_INVALID);
    assert_int_equal(sim_model_set(&model, 1, NAN, why), TD_ERR_INVALID);
    assert_non_null(strstr(why, "prefill_token_us must be a number"));
    assert_int_equal(sim_model_set(&model, 1, 7, why), TD_OK);
    assert_true(model.prefill_token_us == 7);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_trace_reads_lines),
        cmocka_unit_test(test_trace_says_which_line_and_field_is_wrong),
        cmocka_unit_test(test_trace_shapes_rate_repeats_and_arrivals),
        cmocka_unit_test(test_trace_bound_is_that_of_a_cache_without_end),
        cmocka_unit_test(test_cache_gives_up_what_was_used_least_recently),
        cmocka_unit_test(test_events_come_in_order_of_time_then_of_planning),
        cmocka_unit_test(test_batch_jumps_as_far_as_steps_go),
        cmocka_unit_test(test_run_counts_hits_and_times),
        cmocka_unit_test(test_run_waits_behind_what_was_placed_before),
        cmocka_unit_test(test_run_pulls_from_the_node_that_has_it),
        cmocka_unit_test(test_run_pooled_is_one_cache_of_the_total_size),
        cmocka_unit_test(test_run_queues_until_there_is_room_for_kv),
        cmocka_unit_test(test_run_refuses_early_what_would_be_late),
        cmocka_unit_test(test_run_goes_on_where_a_decode_node_died),
        cmocka_unit_test(test_run_fails_what_has_no_node_left),
        cmocka_unit_test(test_run_is_the_same_for_the_same_seed),
        cmocka_unit_test(test_sweep_finds_the_fewest_nodes),
        cmocka_unit_test(test_ranges_and_presets),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <string.h>

#include "router/rtr_placement.h"

#define BLOCK 16u
#define NODES 4u

/* Nodes that took TOKEN_NS for each computed token, and pulled some. */
typedef struct fixture {
    rtr_prefill_view_t views[NODES];
    rtr_backlog_t backlogs[NODES];
    rtr_estimate_t estimates[NODES];
    rtr_estimate_t typical;
    rtr_place_ask_t ask;
} fixture_t;

static rtr_estimate_t estimate_of(double token_ns, double pulled_ns)
{
    return (rtr_estimate_t){.weights = {token_ns, 0, 0, pulled_ns}, .n = 50};
}

static fixture_t *fresh(void **state)
{
    static fixture_t fx;
    (void)state;

    fx = (fixture_t){.ask = {.prompt_tokens = 512, .granule_tokens = BLOCK, .keep_local = 1}};
    fx.ask.typical = &fx.typical;
    for (uint32_t i = 0; i < NODES; i++) {
        fx.estimates[i] = estimate_of(1000, 10);
        fx.views[i] = (rtr_prefill_view_t){
            .allowed = true, .backlog = &fx.backlogs[i], .estimate = &fx.estimates[i]};
    }
    return &fx;
}

static uint32_t place(const fixture_t *fx, uint32_t count)
{
    return rtr_place_prefill(&fx->ask, fx->views, count).node;
}

static void put_ahead(fixture_t *fx, uint32_t node, uint32_t tokens)
{
    const rtr_work_t work = rtr_work_of(tokens, 0, 0);
    rtr_backlog_add(&fx->backlogs[node], &work, fx->ask.now_ns);
}

static void test_policy_names_go_both_ways(void **state)
{
    rtr_policy_t policy = RTR_POLICY_RANDOM;
    (void)state;

    for (uint32_t i = 0; i < RTR_POLICIES; i++) {
        assert_int_equal(rtr_policy_parse(rtr_policy_name((rtr_policy_t)i), &policy), TD_OK);
        assert_int_equal(policy, i);
    }
    assert_int_equal(rtr_policy_parse("kv", &policy), TD_ERR_INVALID);
    assert_int_equal(policy, RTR_POLICY_RANDOM); /* untouched */
}

static void test_place_prefill_prefers_the_match_when_load_is_even(void **state)
{
    fixture_t *fx = fresh(state);

    fx->views[1].match_tokens = 480;
    fx->views[2].match_tokens = 160;
    assert_int_equal(place(fx, NODES), 1);
    assert_int_equal(rtr_place_prefill(&fx->ask, fx->views, NODES).cached_tokens, 480);
    assert_int_equal((uint64_t)rtr_place_prefill(&fx->ask, fx->views, NODES).ttft_ns, 32000);
}

static void test_place_prefill_always_computes_the_last_token(void **state)
{
    fixture_t *fx = fresh(state);

    fx->views[0].match_tokens = 512; /* all of it: the last block is computed again */
    assert_int_equal(rtr_place_prefill(&fx->ask, fx->views, 1).work.tokens, 16);
    fx->ask.prompt_tokens = 513;
    assert_int_equal(rtr_place_prefill(&fx->ask, fx->views, 1).work.tokens, 1);
    fx->ask.prompt_tokens = 0;
    assert_int_equal(rtr_place_prefill(&fx->ask, fx->views, 1).work.tokens, 0);
}

static void
test_f11_place_prefill_leaves_a_hot_node_when_its_queue_outweighs_the_match(void **state)
{
    fixture_t *fx = fresh(state);

    fx->views[0].match_tokens = 480;
    put_ahead(fx, 0, 300);
    assert_int_equal(place(fx, 2), 0);
    put_ahead(fx, 0, 300);
    assert_int_equal(place(fx, 2), 1);
    fx->ask.now_ns = 300000; /* half of what is under way must be done by now */
    assert_int_equal(place(fx, 2), 0);
    fx->ask.now_ns = 1500000; /* it should have ended long ago */
    assert_int_equal(place(fx, 2), 1);
}

/* All requests share a first block, as in public traces: they must not all go to one node. */
static void test_f11_a_shared_prefix_spreads_over_all_nodes(void **state)
{
    fixture_t *fx = fresh(state);
    uint32_t given[NODES] = {0};

    fx->ask.keep_local = RTR_KEEP_LOCAL_DEFAULT;
    for (uint32_t i = 0; i < 400; i++) {
        rtr_prefill_choice_t choice;
        fx->ask.turn = i;
        fx->ask.now_ns += 1000000; /* each is done before the next one comes: no queue says so */
        for (uint32_t k = 0; k < NODES; k++) {
            fx->views[k].lately = rtr_backlog_lately(&fx->backlogs[k], fx->ask.now_ns);
            fx->ask.pool_tokens = i > 0 ? BLOCK : 0;
        }
        choice = rtr_place_prefill(&fx->ask, fx->views, NODES);
        rtr_backlog_add(&fx->backlogs[choice.node], &choice.work, fx->ask.now_ns);
        rtr_backlog_remove(&fx->backlogs[choice.node], &choice.work);
        fx->views[choice.node].match_tokens = BLOCK;
        given[choice.node]++;
    }
    for (uint32_t k = 0; k < NODES; k++) {
        assert_in_range(given[k], 85, 115);
    }
}

static void test_f11_place_prefill_on_a_miss_takes_the_least_loaded(void **state)
{
    fixture_t *fx = fresh(state);

    memset(fx->estimates, 0, sizeof(fx->estimates)); /* nothing was ever observed */
    put_ahead(fx, 0, 900);
    put_ahead(fx, 1, 100);
    put_ahead(fx, 3, 400);
    fx->views[2].allowed = false;
    fx->ask.turn = 2;
    assert_int_equal(place(fx, NODES), 1);
    assert_true(rtr_place_prefill(&fx->ask, fx->views, NODES).ttft_ns < 0); /* not known */
}

static void test_place_prefill_knows_slow_nodes(void **state)
{
    fixture_t *fx = fresh(state);

    fx->estimates[0] = estimate_of(4000, 10);
    memset(&fx->estimates[2], 0, sizeof(fx->estimates[2])); /* taken for typical */
    fx->typical = estimate_of(2000, 10);
    put_ahead(fx, 1, 512);
    put_ahead(fx, 2, 512);
    assert_int_equal(place(fx, 3), 1);
    assert_true(rtr_place_prefill(&fx->ask, &fx->views[2], 1).ttft_ns == 2 * 512 * 2000.0);
}

static void test_place_prefill_pulls_where_that_is_faster(void **state)
{
    fixture_t *fx = fresh(state);
    rtr_prefill_choice_t choice;

    fx->views[0].match_tokens = 480;
    fx->ask.pool_tokens = 480;
    put_ahead(fx, 0, 2000);
    choice = rtr_place_prefill(&fx->ask, fx->views, 2);
    assert_int_equal(choice.node, 1);
    assert_int_equal(choice.work.pulled, 480);
    assert_int_equal(choice.work.tokens, 32);
    assert_true(choice.ttft_ns == 32 * 1000.0 + 480 * 10.0);
    fx->estimates[1] = estimate_of(1000, 1100); /* a slow network: computing is faster */
    choice = rtr_place_prefill(&fx->ask, fx->views, 2);
    assert_int_equal(choice.node, 1);
    assert_int_equal(choice.work.pulled, 0);
    assert_int_equal(choice.work.tokens, 512);
}

static void test_place_prefill_keeps_a_prompt_where_it_is_by_keep_local(void **state)
{
    fixture_t *fx = fresh(state);

    fx->views[0].match_tokens = 480;
    fx->ask.pool_tokens = 480;
    put_ahead(fx, 0, 1000); /* pulling would be much faster; the copy costs 480 tokens */
    fx->ask.keep_local = 0;
    assert_int_equal(place(fx, 2), 1);
    fx->ask.keep_local = 4;
    assert_int_equal(place(fx, 2), 0);
}

static void test_local_aware_counts_no_pulling(void **state)
{
    fixture_t *fx = fresh(state);
    rtr_prefill_choice_t choice;

    fx->ask.policy = RTR_POLICY_LOCAL_AWARE;
    fx->ask.pool_tokens = 480;
    fx->views[0].match_tokens = 480;
    put_ahead(fx, 0, 2000);
    choice = rtr_place_prefill(&fx->ask, fx->views, 2);
    assert_int_equal(choice.node, 1);
    assert_int_equal(choice.work.pulled, 0);
    assert_int_equal(choice.work.tokens, 512);
}

static void test_least_loaded_looks_at_queues_alone(void **state)
{
    fixture_t *fx = fresh(state);

    fx->ask.policy = RTR_POLICY_LEAST_LOADED;
    fx->views[0].match_tokens = 480;
    put_ahead(fx, 0, 10);
    assert_int_equal(place(fx, 2), 1);
    assert_int_equal(rtr_place_prefill(&fx->ask, fx->views, 1).cached_tokens, 480); /* if there */
}

static void test_round_robin_and_random_go_over_the_allowed_ones(void **state)
{
    fixture_t *fx = fresh(state);
    static const uint32_t expected[] = {0, 2, 3, 0, 2, 3};

    fx->views[1].allowed = false;
    put_ahead(fx, 0, 9000);
    for (uint32_t i = 0; i < 6; i++) {
        fx->ask.policy = RTR_POLICY_ROUND_ROBIN;
        fx->ask.turn = i;
        fx->ask.draw = 1;
        assert_int_equal(place(fx, NODES), expected[i]);
        fx->ask.policy = RTR_POLICY_RANDOM;
        fx->ask.turn = 1;
        fx->ask.draw = i;
        assert_int_equal(place(fx, NODES), expected[i]);
    }
}

static void test_place_prefill_rotates_over_equals_and_says_none(void **state)
{
    fixture_t *fx = fresh(state);

    for (uint32_t turn = 0; turn < 6; turn++) {
        fx->ask.turn = turn;
        assert_int_equal(place(fx, 3), turn % 3);
    }
    for (uint32_t i = 0; i < NODES; i++) {
        fx->views[i].allowed = false;
    }
    for (uint32_t policy = 0; policy < RTR_POLICIES; policy++) {
        fx->ask.policy = (rtr_policy_t)policy;
        assert_int_equal(place(fx, NODES), RTR_PLACE_NONE);
        assert_int_equal(place(fx, 0), RTR_PLACE_NONE);
    }
}

static rtr_decode_choice_t place_decode(const rtr_decode_view_t *views, uint32_t count,
                                        uint32_t need_blocks)
{
    const rtr_place_ask_t ask = {.sequences = 1, .need_blocks = need_blocks};
    return rtr_place_decode(&ask, views, count);
}

static void test_place_decode_takes_the_fewest_sequences(void **state)
{
    const rtr_decode_view_t views[] = {
        {.allowed = true, .running = 4, .free_blocks = 100, .total_blocks = 100},
        {.allowed = true, .running = 2, .free_blocks = 100, .total_blocks = 100},
        {.allowed = false, .running = 0, .free_blocks = 100, .total_blocks = 100},
    };
    (void)state;
    assert_int_equal(place_decode(views, 3, 4).node, 1);
    assert_true(place_decode(views, 3, 4).tbt_ns < 0);
}

static void test_place_decode_sees_growth(void **state)
{
    const rtr_decode_view_t views[] = {
        {.allowed = true, .running = 2, .promised = 95, .free_blocks = 60, .total_blocks = 100},
        {.allowed = true, .running = 6, .promised = 10, .free_blocks = 90, .total_blocks = 100},
    };
    (void)state;
    assert_int_equal(place_decode(views, 2, 10).node, 1); /* the first could not hold it */
    assert_int_equal(place_decode(views, 2, 4).node, 1);  /* nearly full counts as busy */
    assert_false(place_decode(views, 1, 10).fits);
    assert_int_equal(place_decode(views, 1, 10).node, 0); /* it is asked all the same */
    assert_true(place_decode(views, 1, 4).fits);
}

static void test_place_decode_prefers_a_match_among_equals(void **state)
{
    const rtr_decode_view_t views[] = {
        {.allowed = true, .running = 1, .free_blocks = 50, .total_blocks = 100},
        {.allowed = true, .running = 1, .free_blocks = 50, .total_blocks = 100, .match_blocks = 9},
    };
    (void)state;
    assert_int_equal(place_decode(views, 2, 4).node, 1);
}

static void test_place_decode_lets_a_match_outweigh_little(void **state)
{
    const rtr_estimate_t slow = {.weights = {107}, .n = 9};
    const rtr_estimate_t slower = {.weights = {120}, .n = 9};
    const rtr_estimate_t fast = {.weights = {100}, .n = 9};
    rtr_decode_view_t views[] = {{.allowed = true, .tbt = &fast},
                                 {.allowed = true, .match_blocks = 4, .tbt = &slow}};
    (void)state;
    assert_int_equal(place_decode(views, 2, 4).node, 1);  /* small errors of estimates */
    assert_int_equal(place_decode(views, 2, 40).node, 0); /* little of it is there */
    views[1].tbt = &slower;
    assert_int_equal(place_decode(views, 2, 4).node, 0);
}

static void test_place_decode_takes_the_least_predicted_time_between_tokens(void **state)
{
    const rtr_estimate_t slow = {.weights = {100, 10, 0.1}, .n = 9};
    const rtr_estimate_t fast = {.weights = {50, 5, 0.1}, .n = 9};
    rtr_decode_view_t views[] = {
        {.allowed = true, .running = 4, .promised = 100, .tbt = &slow},
        {.allowed = true, .running = 8, .promised = 100, .tbt = &fast},
    };
    (void)state;
    assert_int_equal(place_decode(views, 2, 10).node, 1);
    assert_true(place_decode(views, 2, 10).tbt_ns == 50 + 5 * 9 + 0.1 * 110);
    views[1].promised = 2000; /* long contexts there: each token reads more */
    assert_int_equal(place_decode(views, 2, 10).node, 0);
}

static void test_decode_policies_that_look_at_nothing(void **state)
{
    const rtr_decode_view_t views[] = {
        {.allowed = true, .running = 9}, {.allowed = false}, {.allowed = true, .running = 1}};
    rtr_place_ask_t ask = {.policy = RTR_POLICY_ROUND_ROBIN, .sequences = 1, .need_blocks = 1};
    (void)state;

    assert_int_equal(rtr_place_decode(&ask, views, 3).node, 0);
    ask.turn = 1;
    assert_int_equal(rtr_place_decode(&ask, views, 3).node, 2);
    ask = (rtr_place_ask_t){.policy = RTR_POLICY_RANDOM, .draw = 2};
    assert_int_equal(rtr_place_decode(&ask, views, 3).node, 0);
    ask.policy = RTR_POLICY_LEAST_LOADED;
    assert_int_equal(rtr_place_decode(&ask, views, 3).node, 2);
    assert_int_equal(rtr_place_decode(&ask, views, 0).node, RTR_PLACE_NONE);
}

static void test_admission_refuses_what_breaks_the_slo(void **state)
{
    rtr_admit_ask_t ask = {
        .slo = {.ttft_ms = 2000, .tbt_ms = 50}, .ttft_ns = 2e9, .tbt_ns = 50e6, .answer_ns = 20e9};
    uint32_t retry_s = 99;
    (void)state;

    assert_int_equal(rtr_admit(&ask, &retry_s), RTR_ADMIT);
    assert_int_equal(retry_s, 0);
    ask.ttft_ns = 4.5e9;
    assert_int_equal(rtr_admit(&ask, &retry_s), RTR_REFUSE_TTFT);
    assert_int_equal(retry_s, 3); /* when the queue is 2.5 s shorter */
    ask.ttft_ns = 1e9;
    ask.tbt_ns = 100e6;
    assert_int_equal(rtr_admit(&ask, &retry_s), RTR_REFUSE_TBT);
    assert_int_equal(retry_s, 10); /* when half of the answers have ended */
    ask.answer_ns = -1;
    assert_int_equal(rtr_admit(&ask, &retry_s), RTR_REFUSE_TBT);
    assert_int_equal(retry_s, 1);
    ask.ttft_ns = 1e15;
    assert_int_equal(rtr_admit(&ask, &retry_s), RTR_REFUSE_TTFT);
    assert_int_equal(retry_s, RTR_RETRY_AFTER_S_MAX);
}

static void test_admission_takes_what_has_no_limit_or_is_not_known(void **state)
{
    rtr_admit_ask_t ask = {.ttft_ns = 1e12, .tbt_ns = 1e12, .answer_ns = 1e9};
    uint32_t retry_s = 99;
    (void)state;

    assert_int_equal(rtr_admit(&ask, &retry_s), RTR_ADMIT);
    ask.slo = (rtr_slo_t){.ttft_ms = 1, .tbt_ms = 1};
    ask.ttft_ns = -1;
    ask.tbt_ns = -1;
    assert_int_equal(rtr_admit(&ask, &retry_s), RTR_ADMIT);
}

/* --- prompts that a decode node computes --------------------------------------------------------
 */

typedef struct self_fixture {
    rtr_decode_view_t views[3];
    rtr_estimate_t tbt;
    rtr_estimate_t self[3];
    rtr_estimate_t typical;
    rtr_estimate_t typical_self;
    rtr_place_ask_t ask;
    rtr_prefill_choice_t prefill;
    rtr_decode_choice_t decode;
} self_fixture_t;

/* Decode nodes that take 1000 ns for each token of a prompt; a prefill node that takes 100,000. */
static self_fixture_t *fresh_self(void)
{
    static self_fixture_t fx;

    fx = (self_fixture_t){.ask = {.prompt_tokens = 164,
                                  .granule_tokens = BLOCK,
                                  .draw = 1,
                                  .sequences = 1,
                                  .need_blocks = 12,
                                  .self_tokens_max = 64},
                          .prefill = {.node = 0, .ttft_ns = 100000},
                          .decode = {.node = 0, .fits = true, .tbt_ns = 50},
                          .tbt = {.weights = {50, 0, 0, 0}, .n = 50}};
    fx.ask.typical = &fx.typical;
    fx.ask.typical_self = &fx.typical_self;
    fx.ask.typical_tbt = &fx.tbt;
    for (uint32_t i = 0; i < 3; i++) {
        fx.self[i] = estimate_of(1000, 0);
        fx.views[i] = (rtr_decode_view_t){.allowed = true,
                                          .free_blocks = 100,
                                          .total_blocks = 100,
                                          .tbt = &fx.tbt,
                                          .self = &fx.self[i]};
    }
    return &fx;
}

static uint32_t place_self(const self_fixture_t *fx)
{
    return rtr_place_self(&fx->ask, fx->views, 3, &fx->prefill, &fx->decode).node;
}

static void test_place_self_wants_a_short_rest(void **state)
{
    self_fixture_t *fx = fresh_self();
    (void)state;

    assert_int_equal(place_self(fx), RTR_PLACE_NONE); /* 164 tokens */
    fx->views[1].match_blocks = 6;
    assert_int_equal(place_self(fx), RTR_PLACE_NONE); /* 68 of them */
    fx->views[2].match_blocks = 8;
    assert_int_equal(place_self(fx), 2); /* 36 */
    assert_int_equal(rtr_place_self(&fx->ask, fx->views, 3, &fx->prefill, &fx->decode).work.tokens,
                     36);
    fx->views[1].match_blocks = 10;
    assert_int_equal(place_self(fx), 1); /* 4 */
    fx->views[1].match_blocks = 100;     /* never the last one */
    assert_int_equal(rtr_place_self(&fx->ask, fx->views, 3, &fx->prefill, &fx->decode).work.tokens,
                     4);
    fx->ask.self_tokens_max = 0;
    assert_int_equal(place_self(fx), RTR_PLACE_NONE);
}

/* Also where the node was named, and what it takes is not compared. */
static void test_self_work_is_what_is_not_there(void **state)
{
    self_fixture_t *fx = fresh_self();
    (void)state;

    assert_int_equal(rtr_self_work(&fx->ask, &fx->views[1]).tokens, 164);
    fx->views[1].match_blocks = 6;
    assert_int_equal(rtr_self_work(&fx->ask, &fx->views[1]).tokens, 68);
    fx->views[1].match_blocks = UINT32_MAX;
    assert_int_equal(rtr_self_work(&fx->ask, &fx->views[1]).tokens, 4);
}

static void test_place_self_counts_who_would_wait_for_it(void **state)
{
    self_fixture_t *fx = fresh_self();
    (void)state;

    fx->views[1].match_blocks = 8;
    fx->views[1].running = 1; /* 36 us and as much for the other */
    assert_int_equal(place_self(fx), 1);
    fx->views[1].running = 3;
    assert_int_equal(place_self(fx), RTR_PLACE_NONE);
    fx->prefill.ttft_ns = 200000; /* there it would take as long */
    assert_int_equal(place_self(fx), 1);
    fx->views[2].match_blocks = 7; /* more to compute, but for nobody else to wait for */
    assert_int_equal(place_self(fx), 2);
}

static void test_place_self_goes_by_what_is_known(void **state)
{
    self_fixture_t *fx = fresh_self();
    (void)state;

    fx->views[1].match_blocks = 8;
    fx->prefill.ttft_ns = -1; /* nothing to compare with */
    assert_int_equal(place_self(fx), RTR_PLACE_NONE);
    fx->prefill.ttft_ns = 100000;
    fx->self[1] = (rtr_estimate_t){0};
    assert_int_equal(place_self(fx), RTR_PLACE_NONE);
    fx->typical = estimate_of(1000, 0); /* until it was tried: as fast as prefill nodes */
    assert_int_equal(place_self(fx), 1);
    fx->typical_self = estimate_of(5000, 0); /* others were slower */
    assert_int_equal(place_self(fx), RTR_PLACE_NONE);
    fx->ask.draw = 64; /* now and then it is tried all the same, */
    assert_int_equal(place_self(fx), 1);
    fx->typical_self = estimate_of(50000, 0); /* but not where it is far slower */
    assert_int_equal(place_self(fx), RTR_PLACE_NONE);
}

static void test_place_self_needs_room_and_a_node_that_is_not_crowded(void **state)
{
    self_fixture_t *fx = fresh_self();
    rtr_estimate_t slow = {.weights = {80, 0, 0, 0}, .n = 50};
    (void)state;

    fx->views[1].match_blocks = 8;
    fx->views[1].free_blocks = 11;
    assert_int_equal(place_self(fx), RTR_PLACE_NONE);
    fx->views[1].free_blocks = 12;
    assert_int_equal(place_self(fx), 1);
    fx->views[1].tbt = &slow;
    assert_int_equal(place_self(fx), RTR_PLACE_NONE);
    fx->views[1].tbt = &fx->tbt;
    fx->views[1].allowed = false;
    assert_int_equal(place_self(fx), RTR_PLACE_NONE);
    fx->views[1].allowed = true;
    fx->ask.policy = RTR_POLICY_ROUND_ROBIN;
    assert_int_equal(place_self(fx), RTR_PLACE_NONE);
}

static void test_place_prefill_counts_what_others_have_there(void **state)
{
    fixture_t *fx = fresh(state);
    const rtr_work_t others = rtr_work_of(400, 0, 0);

    for (uint32_t i = 0; i < NODES; i++) {
        fx->views[i].others = i == 2 ? NULL : &others;
    }
    assert_int_equal(place(fx, NODES), 2);
    put_ahead(fx, 2, 1000);
    assert_int_not_equal(place(fx, NODES), 2);
    assert_int_equal((uint64_t)rtr_place_prefill(&fx->ask, fx->views, NODES).ttft_ns, 912000);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_policy_names_go_both_ways),
        cmocka_unit_test(test_place_prefill_prefers_the_match_when_load_is_even),
        cmocka_unit_test(test_place_prefill_always_computes_the_last_token),
        cmocka_unit_test(
            test_f11_place_prefill_leaves_a_hot_node_when_its_queue_outweighs_the_match),
        cmocka_unit_test(test_f11_a_shared_prefix_spreads_over_all_nodes),
        cmocka_unit_test(test_f11_place_prefill_on_a_miss_takes_the_least_loaded),
        cmocka_unit_test(test_place_prefill_knows_slow_nodes),
        cmocka_unit_test(test_place_prefill_pulls_where_that_is_faster),
        cmocka_unit_test(test_place_prefill_keeps_a_prompt_where_it_is_by_keep_local),
        cmocka_unit_test(test_local_aware_counts_no_pulling),
        cmocka_unit_test(test_least_loaded_looks_at_queues_alone),
        cmocka_unit_test(test_round_robin_and_random_go_over_the_allowed_ones),
        cmocka_unit_test(test_place_prefill_rotates_over_equals_and_says_none),
        cmocka_unit_test(test_place_decode_takes_the_fewest_sequences),
        cmocka_unit_test(test_place_decode_sees_growth),
        cmocka_unit_test(test_place_decode_prefers_a_match_among_equals),
        cmocka_unit_test(test_place_decode_lets_a_match_outweigh_little),
        cmocka_unit_test(test_place_decode_takes_the_least_predicted_time_between_tokens),
        cmocka_unit_test(test_decode_policies_that_look_at_nothing),
        cmocka_unit_test(test_place_self_wants_a_short_rest),
        cmocka_unit_test(test_self_work_is_what_is_not_there),
        cmocka_unit_test(test_place_self_counts_who_would_wait_for_it),
        cmocka_unit_test(test_place_self_goes_by_what_is_known),
        cmocka_unit_test(test_place_self_needs_room_and_a_node_that_is_not_crowded),
        cmocka_unit_test(test_place_prefill_counts_what_others_have_there),
        cmocka_unit_test(test_admission_refuses_what_breaks_the_slo),
        cmocka_unit_test(test_admission_takes_what_has_no_limit_or_is_not_known),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

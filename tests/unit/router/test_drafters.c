/* What the router chooses for drafts, by what it was told of them; and the classes of prompts. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/kv/td_block_key.h"
#include "common/spec/td_spec_cost.h"
#include "router/rtr_drafters.h"
#include "tests/fuzz/gguf_build.h"

#define MODEL "build/models/SmolLM2-135M-Instruct.Q4_1.gguf"
#define BIT(drafter) (1u << (drafter))
#define ALL                                                                                        \
    (BIT(TD_DRAFTER_PROMPT_LOOKUP) | BIT(TD_DRAFTER_DRAFT_MODEL) | BIT(TD_DRAFTER_EARLY_EXIT) |    \
     BIT(TD_DRAFTER_MEMO))
#define TENANT 11u
#define EXPLORE_PERCENT 5u
#define NOT_EXPLORED 99u /* a ticket that does as it was learned */
#define ROW_COST 0.15

typedef struct fixture {
    td_metrics_t *registry;
    rtr_metrics_t metrics;
    rtr_drafters_t *ds;
    td_msg_heartbeat_t beat;
} fixture_t;

static int setup(void **state)
{
    static fixture_t fx;
    rtr_drafters_config_t config = {.metrics = &fx.metrics, .explore_percent = EXPLORE_PERCENT};

    fx = (fixture_t){0};
    *state = &fx;
    if (td_metrics_create(&fx.registry) != TD_OK) {
        return -1;
    }
    rtr_metrics_declare(fx.registry, &fx.metrics);
    fx.beat.step_cost_count = TD_DRAFT_TOKENS_MAX + 1;
    fx.beat.pass_cost_count = TD_DRAFTER_KINDS;
    for (uint32_t k = 0; k <= TD_DRAFT_TOKENS_MAX; k++) {
        fx.beat.step_costs[k] = (float)(1 + ROW_COST * k);
    }
    return rtr_drafters_create(&config, &fx.ds) == TD_OK ? 0 : -1;
}

static int teardown(void **state)
{
    fixture_t *fx = *state;
    rtr_drafters_destroy(fx->ds);
    td_metrics_destroy(fx->registry);
    return 0;
}

/* A request of 200 steps, each of which drafts k tokens of this acceptance. */
static td_msg_drafts_t report_of(td_drafter_t drafter, uint32_t k, double alpha)
{
    td_msg_drafts_t r = {.drafter = drafter,
                         .k_max = TD_DRAFT_TOKENS_MAX,
                         .steps = 200,
                         .tokens = 200,
                         .decode_ns = 1000000,
                         .saved_ns = 500};
    double accepted = r.steps;

    for (uint32_t i = 0; i < k; i++) {
        accepted *= alpha;
        r.drafted[i] = r.steps;
        r.accepted[i] = (uint32_t)(accepted + 0.5);
    }
    return r;
}

static void learn(fixture_t *fx, uint64_t tenant, uint32_t prompt_class, td_drafter_t drafter,
                  uint32_t k, double alpha)
{
    const td_msg_drafts_t r = report_of(drafter, k, alpha);
    rtr_drafters_answered(fx->ds, tenant, prompt_class, 1, &r);
}

static rtr_draft_choice_t choose(const fixture_t *fx, uint64_t tenant, uint32_t prompt_class,
                                 uint64_t ticket, uint32_t offered)
{
    const rtr_draft_ask_t ask = {.ticket = ticket,
                                 .tenant = tenant,
                                 .prompt_class = prompt_class,
                                 .is_auto = true,
                                 .drafter = TD_DRAFTER_MEMO,
                                 .k_max = TD_DRAFT_TOKENS_MAX};
    return rtr_drafters_choose(fx->ds, &ask, offered, &fx->beat);
}

static void assert_choice(rtr_draft_choice_t got, td_drafter_t drafter, uint32_t k_max,
                          rtr_draft_why_t why)
{
    assert_int_equal(got.drafter, drafter);
    assert_int_equal(got.k_min, 0);
    assert_int_equal(got.k_max, k_max);
    assert_int_equal(got.why, why);
}

static void test_unknown_is_left_to_the_node(void **state)
{
    fixture_t *fx = *state;
    static const uint32_t without_memo = BIT(TD_DRAFTER_PROMPT_LOOKUP) | BIT(TD_DRAFTER_EARLY_EXIT);

    assert_choice(choose(fx, TENANT, 0, NOT_EXPLORED, ALL), TD_DRAFTER_MEMO, 16, RTR_DRAFT_DEFAULT);
    assert_choice(choose(fx, TENANT, 0, NOT_EXPLORED, 0), TD_DRAFTER_MEMO, 16, RTR_DRAFT_DEFAULT);
    assert_choice(choose(fx, TENANT, 0, NOT_EXPLORED, without_memo), TD_DRAFTER_PROMPT_LOOKUP, 16,
                  RTR_DRAFT_DEFAULT);
    /* Others are known, the first isn't: it comes first. */
    learn(fx, TENANT, 0, TD_DRAFTER_EARLY_EXIT, 8, 1);
    assert_choice(choose(fx, TENANT, 0, NOT_EXPLORED, ALL), TD_DRAFTER_MEMO, 16, RTR_DRAFT_DEFAULT);
}

static uint32_t best_k(double alpha, double pass, double *most_out)
{
    uint32_t best = 0;

    *most_out = 0;
    for (uint32_t k = 0; k <= TD_DRAFT_TOKENS_MAX; k++) {
        const double worth = td_spec_expected_tokens(alpha, k) / (1 + (ROW_COST + pass) * k);
        best = worth >= *most_out ? k : best;
        *most_out = TD_MAX(*most_out, worth);
    }
    return best;
}

/* The most expected tokens for the cost, of all that was watched; what a pass costs decides too. */
static void test_the_best_of_the_known_is_chosen(void **state)
{
    static const double alphas[] = {0.1, 0.4, 0.6, 0.8, 0.95};
    static const double passes[] = {0.02, 0.3, 1};
    fixture_t *fx = *state;
    uint32_t won = 0;
    uint64_t tenant = 100;

    for (size_t memo = 0; memo < TD_ARRAY_LEN(alphas); memo++) {
        for (size_t model = 0; model < TD_ARRAY_LEN(alphas); model++) {
            tenant++;
            learn(fx, tenant, 0, TD_DRAFTER_MEMO, 16, alphas[memo]);
            learn(fx, tenant, 0, TD_DRAFTER_DRAFT_MODEL, 16, alphas[model]);
            for (size_t p = 0; p < TD_ARRAY_LEN(passes); p++) {
                double memo_worth = 0;
                double model_worth = 0;
                const uint32_t memo_k = best_k(alphas[memo], 0, &memo_worth);
                const uint32_t model_k = best_k(alphas[model], passes[p], &model_worth);
                const bool model_wins = model_worth > memo_worth;
                fx->beat.pass_costs[TD_DRAFTER_DRAFT_MODEL] = (float)passes[p];
                assert_choice(choose(fx, tenant, 0, NOT_EXPLORED, ALL),
                              model_wins ? TD_DRAFTER_DRAFT_MODEL : TD_DRAFTER_MEMO,
                              model_wins ? model_k : memo_k, RTR_DRAFT_LEARNED);
                won += model_wins;
                /* A node that doesn't offer it doesn't get it. */
                assert_choice(choose(fx, tenant, 0, NOT_EXPLORED, BIT(TD_DRAFTER_MEMO)),
                              TD_DRAFTER_MEMO, memo_k, RTR_DRAFT_LEARNED);
            }
        }
    }
    assert_in_range(won, 10, 40);
}

static void test_rows_that_cost_more_make_k_smaller(void **state)
{
    fixture_t *fx = *state;
    uint32_t before = TD_DRAFT_TOKENS_MAX;

    learn(fx, TENANT, 0, TD_DRAFTER_MEMO, 16, 0.8);
    for (double row = 0.05; row < 1.2; row += 0.25) {
        uint32_t k = 0;
        for (uint32_t i = 0; i <= TD_DRAFT_TOKENS_MAX; i++) {
            fx->beat.step_costs[i] = (float)(1 + row * i);
        }
        k = choose(fx, TENANT, 0, NOT_EXPLORED, ALL).k_max;
        assert_true(k <= before);
        before = k;
    }
    assert_int_equal(before, 0); /* a row that costs a step is never worth it */
}

static void test_what_was_asked_for_is_kept(void **state)
{
    fixture_t *fx = *state;
    rtr_draft_ask_t ask = {.ticket = NOT_EXPLORED,
                           .tenant = TENANT,
                           .drafter = TD_DRAFTER_MEMO,
                           .k_max = TD_DRAFT_TOKENS_MAX};

    learn(fx, TENANT, 0, TD_DRAFTER_MEMO, 16, 0);
    learn(fx, TENANT, 0, TD_DRAFTER_EARLY_EXIT, 16, 0.9);
    assert_choice(choose(fx, TENANT, 0, NOT_EXPLORED, BIT(TD_DRAFTER_MEMO)), TD_DRAFTER_MEMO, 0,
                  RTR_DRAFT_LEARNED);
    for (uint64_t ticket = 0; ticket < 100; ticket++) { /* those that would explore too */
        ask.ticket = ticket;
        assert_choice(rtr_drafters_choose(fx->ds, &ask, ALL, &fx->beat), TD_DRAFTER_MEMO, 16,
                      RTR_DRAFT_ASKED);
    }
    ask.is_auto = true; /* k is kept, the drafter is open */
    ask.has_k = true;
    ask.k_min = ask.k_max = 3;
    for (ask.ticket = 0; ask.ticket < 100; ask.ticket++) {
        const rtr_draft_choice_t got = rtr_drafters_choose(fx->ds, &ask, ALL, &fx->beat);
        assert_int_equal(got.drafter, TD_DRAFTER_EARLY_EXIT);
        assert_int_equal(got.k_min, 3);
        assert_int_equal(got.k_max, 3);
        assert_int_equal(got.why, RTR_DRAFT_LEARNED);
    }
    ask = (rtr_draft_ask_t){.tenant = TENANT, .drafter = TD_DRAFTER_NONE};
    assert_choice(rtr_drafters_choose(fx->ds, &ask, ALL, &fx->beat), TD_DRAFTER_NONE, 0,
                  RTR_DRAFT_ASKED);
}

/* Which tickets explore, and what, is known by their ids: a twentieth, all drafters alike, though
 * it was learned that nothing pays. */
static void test_a_known_share_explores(void **state)
{
    fixture_t *fx = *state;
    uint32_t explored[TD_DRAFTER_KINDS] = {0};

    learn(fx, TENANT, 0, TD_DRAFTER_MEMO, 16, 0);
    for (uint64_t ticket = 0; ticket < 60000; ticket++) {
        const rtr_draft_choice_t got = choose(fx, TENANT, 0, ticket, ALL);
        assert_true((got.why == RTR_DRAFT_EXPLORED) == (ticket % 100 < EXPLORE_PERCENT));
        if (got.why == RTR_DRAFT_EXPLORED) {
            explored[got.drafter]++;
            assert_int_equal(got.k_max, 16);
        } else {
            assert_choice(got, TD_DRAFTER_MEMO, 0, RTR_DRAFT_LEARNED);
        }
    }
    assert_int_equal(explored[TD_DRAFTER_MEMO], 1000);
    assert_int_equal(explored[TD_DRAFTER_DRAFT_MODEL], 1000);
    assert_int_equal(explored[TD_DRAFTER_EARLY_EXIT], 1000);
    assert_int_equal(explored[TD_DRAFTER_PROMPT_LOOKUP], 0); /* memo has it in it */
}

/* I8: nothing of a tenant's is seen in what another gets; classes are apart too. */
static void test_i8_tenants_and_classes_are_apart(void **state)
{
    fixture_t *fx = *state;
    static const uint8_t secret[TD_CLUSTER_SECRET_BYTES] = {1};
    static const uint8_t other[TD_CLUSTER_SECRET_BYTES] = {2};

    learn(fx, TENANT, RTR_PROMPT_PLAIN, TD_DRAFTER_MEMO, 16, 0);
    assert_choice(choose(fx, TENANT, RTR_PROMPT_PLAIN, NOT_EXPLORED, ALL), TD_DRAFTER_MEMO, 0,
                  RTR_DRAFT_LEARNED);
    assert_choice(choose(fx, TENANT, RTR_PROMPT_CODE, NOT_EXPLORED, ALL), TD_DRAFTER_MEMO, 16,
                  RTR_DRAFT_DEFAULT);
    assert_choice(choose(fx, TENANT + 1, RTR_PROMPT_PLAIN, NOT_EXPLORED, ALL), TD_DRAFTER_MEMO, 16,
                  RTR_DRAFT_DEFAULT);
    /* A prompt that was answered is hot for who asked. */
    assert_int_equal(rtr_drafters_class(fx->ds, TENANT, 1, RTR_PROMPT_CODE), RTR_PROMPT_HOT);
    assert_int_equal(rtr_drafters_class(fx->ds, TENANT, 2, RTR_PROMPT_CODE), RTR_PROMPT_CODE);
    assert_int_equal(rtr_drafters_class(fx->ds, TENANT + 1, 1, RTR_PROMPT_CODE), RTR_PROMPT_CODE);
    /* Names: by salt and secret. */
    assert_true(rtr_drafters_tenant(secret, "a", 1) == rtr_drafters_tenant(secret, "a", 1));
    assert_true(rtr_drafters_tenant(secret, "a", 1) != rtr_drafters_tenant(secret, "b", 1));
    assert_true(rtr_drafters_tenant(secret, "a", 1) != rtr_drafters_tenant(other, "a", 1));
    assert_int_equal(rtr_drafters_tenant(secret, NULL, 0), 0);
}

static void test_reports_are_counted_by_position(void **state)
{
    fixture_t *fx = *state;
    const rtr_draft_metrics_t *m = &fx->metrics.drafts;
    td_msg_drafts_t r = report_of(TD_DRAFTER_MEMO, 2, 0.5);

    rtr_drafters_answered(fx->ds, TENANT, 0, 1, &r);
    assert_int_equal(td_metric_get(m->steps[TD_DRAFTER_MEMO]), 200);
    assert_int_equal(td_metric_get(m->accepted[TD_DRAFTER_MEMO][0]), 100);
    assert_int_equal(td_metric_get(m->rejected[TD_DRAFTER_MEMO][0]), 100);
    assert_int_equal(td_metric_get(m->accepted[TD_DRAFTER_MEMO][1]), 50);
    assert_int_equal(td_metric_get(m->rejected[TD_DRAFTER_MEMO][1]), 150);
    assert_int_equal(td_metric_get(m->rejected[TD_DRAFTER_MEMO][2]), 0);
    assert_int_equal(td_metric_get(m->saved[TD_DRAFTER_MEMO]), 500);
    r.saved_ns = -70;
    rtr_drafters_answered(fx->ds, TENANT, 0, 1, &r);
    assert_int_equal(td_metric_get(m->saved[TD_DRAFTER_MEMO]), 500);
    assert_int_equal(td_metric_get(m->lost[TD_DRAFTER_MEMO]), 70);
    assert_int_equal(td_metric_get(m->entries), 1);
    r.drafter = TD_DRAFTER_KINDS; /* a newer node's */
    rtr_drafters_answered(fx->ds, TENANT, 0, 1, &r);
    assert_int_equal(td_metric_get(m->entries), 1);
}

static td_str_t shown(fixture_t *fx, td_status_t (*show)(rtr_drafters_t *, td_str_t *))
{
    td_str_t text = {0};

    while (text.len == 0) {
        rtr_drafters_tick(fx->ds);
        assert_int_equal(show(fx->ds, &text), TD_OK);
    }
    return text;
}

static uint32_t count_of(const char *text, const char *part)
{
    uint32_t count = 0;
    for (const char *at = strstr(text, part); at != NULL; at = strstr(at + 1, part)) {
        count++;
    }
    return count;
}

/* Series of tenants are few: of a hundred that ask once those two stay that ask often. */
static void test_only_the_busiest_tenants_have_series(void **state)
{
    fixture_t *fx = *state;
    char name[64];
    td_str_t text = {0};

    for (uint32_t i = 0; i < 100; i++) {
        learn(fx, 1000 + i, 0, TD_DRAFTER_MEMO, 2, 0.5);
        learn(fx, TENANT + i % 2, 0, TD_DRAFTER_MEMO, 2, 0.5);
    }
    text = shown(fx, rtr_drafters_series);
    assert_int_equal(count_of(text.bytes, "result=\"accepted\""), RTR_DRAFT_TENANTS_MAX);
    for (uint32_t i = 0; i < 2; i++) {
        (void)snprintf(name, sizeof(name), "{tenant=\"%016x\",result=\"accepted\"} %u\n",
                       TENANT + i, 50 * 150);
        assert_non_null(strstr(text.bytes, name));
    }
    td_str_fini(&text);
}

/* A router that begins anew shows what one that was there showed, by what the nodes remember. */
static void test_a_new_router_knows_what_nodes_remember(void **state)
{
    fixture_t *fx = *state;
    rtr_drafters_config_t config = {.metrics = &fx->metrics};
    rtr_drafters_t *old = fx->ds;
    td_draft_stats_t *node = NULL;
    td_msg_draft_past_t told[4] = {{0}};
    td_msg_draft_history_t history = {.past = told};
    td_str_t before = {0};
    td_str_t after = {0};

    assert_int_equal(td_draft_stats_create(8, &node), TD_OK);
    for (uint32_t i = 0; i < 6; i++) {
        const td_msg_drafts_t r =
            report_of(i % 2 ? TD_DRAFTER_MEMO : TD_DRAFTER_EARLY_EXIT, i, 0.7);
        const td_draft_key_t key = {TENANT, i % 2, r.drafter};
        td_draft_report_t report = {
            .k_max = r.k_max, .steps = r.steps, .tokens = r.tokens, .decode_ns = r.decode_ns};
        memcpy(report.drafted, r.drafted, sizeof(report.drafted));
        memcpy(report.accepted, r.accepted, sizeof(report.accepted));
        td_draft_stats_add(node, &key, &report);
        rtr_drafters_answered(old, TENANT, i % 2, i, &r);
    }
    for (const td_draft_past_t *p = td_draft_stats_oldest(node); p != NULL;
         p = td_draft_stats_newer(node, p)) {
        td_msg_draft_past_t *t = &told[history.count++];
        *t = (td_msg_draft_past_t){.tenant = p->key.tenant,
                                   .prompt_class = p->key.prompt_class,
                                   .drafter = p->key.drafter,
                                   .tokens = p->tokens,
                                   .decode_s = p->decode_s};
        memcpy(t->steps, p->steps, sizeof(t->steps));
        memcpy(t->drafted, p->drafted, sizeof(t->drafted));
        memcpy(t->accepted, p->accepted, sizeof(t->accepted));
    }
    told[history.count] = told[0];
    told[history.count++].drafter = TD_DRAFTER_KINDS; /* not ours: passed over */
    before = shown(fx, rtr_drafters_json);
    rtr_drafters_destroy(old);
    assert_int_equal(rtr_drafters_create(&config, &fx->ds), TD_OK);
    rtr_drafters_remember(fx->ds, &history);
    after = shown(fx, rtr_drafters_json);
    assert_int_equal(count_of(before.bytes, "\"class\""), 2);
    assert_string_equal(strstr(before.bytes, "\"entries\""), strstr(after.bytes, "\"entries\""));
    td_str_fini(&before);
    td_str_fini(&after);
    td_draft_stats_destroy(node);
}

static void test_every_drafter_has_series_of_its_own(void **state)
{
    fixture_t *fx = *state;
    td_str_t text = {0};

    assert_int_equal(td_metrics_render(fx->registry, &text), TD_OK);
    assert_int_equal(td_str_append(&text, "", 1), TD_OK);
    for (uint32_t d = TD_DRAFTER_NONE + 1; d < TD_DRAFTER_KINDS; d++) {
        char line[128];
        (void)snprintf(line, sizeof(line), "\ntandem_router_draft_steps_total{drafter=\"%s\"} 0\n",
                       td_drafter_name((td_drafter_t)d));
        assert_non_null(strstr(text.bytes, line));
    }
    td_str_fini(&text);
}

static void test_create_survives_every_failing_allocation(void **state)
{
    fixture_t *fx = *state;
    rtr_drafters_config_t config = {.metrics = &fx->metrics};
    td_status_t status = TD_ERR_NO_MEMORY;

    for (uint64_t nth = 1; status != TD_OK; nth++) {
        rtr_drafters_t *ds = NULL;
        assert_true(nth < 10);
        td_alloc_fail_at(nth);
        status = rtr_drafters_create(&config, &ds);
        td_alloc_fail_at(0);
        assert_true(status == TD_OK || (status == TD_ERR_NO_MEMORY && ds == NULL));
        rtr_drafters_destroy(ds);
    }
}

/* --- classes of prompts ------------------------------------------------------------------------
 */

static rtr_prompt_class_t class_of(const td_tokenizer_t *tok, const uint32_t *tokens,
                                   uint32_t count)
{
    return rtr_prompt_class_of(tok, tokens, count, false);
}

/* By the served model's own tokens. */
static void test_classes_of_texts(void **state)
{
    static const struct {
        rtr_prompt_class_t prompt_class;
        const char *text;
    } texts[] = {
        {RTR_PROMPT_PLAIN, "Tell me a story about a lighthouse (a small one) that nobody has "
                           "visited for a hundred years, until one day a boat came by."},
        {RTR_PROMPT_REPEATS,
         "The Anna carried salt to the north. The Berta carried coal to the east. Repeat the text "
         "above, word for word: The Anna carried salt to the north. The Berta carried coal"},
        {RTR_PROMPT_CODE, "static int sum(const int *v, size_t n)\n{\n    int s = 0;\n    for "
                          "(size_t i = 0; i < n; i++) {\n        s += v[i];\n    }\n    return "
                          "s;\n}\n"},
        {RTR_PROMPT_CODE, "{\"name\": \"Anna\", \"cargo\": [\"salt\", {\"tons\": 12}], "
                          "\"port\": {\"id\": 7}, \"ok\": true}"},
    };
    td_gguf_t *gguf = NULL;
    td_tokenizer_t *tok = NULL;
    (void)state;

    assert_int_equal(td_gguf_open(MODEL, &gguf), TD_OK);
    assert_int_equal(td_tokenizer_create(gguf, &tok), TD_OK);
    for (size_t i = 0; i < TD_ARRAY_LEN(texts); i++) {
        uint32_t *ids = NULL;
        size_t count = 0;
        assert_int_equal(
            td_tokenizer_encode(tok, texts[i].text, strlen(texts[i].text), true, &ids, &count),
            TD_OK);
        assert_int_equal(class_of(tok, ids, (uint32_t)count), texts[i].prompt_class);
        td_free(ids);
    }
    td_tokenizer_destroy(tok);
    td_gguf_close(gguf);
}

static void test_classes_of_prompts(void **state)
{
    td_str_t file = {0};
    td_gguf_t *gguf = NULL;
    td_tokenizer_t *tok = NULL;
    uint32_t tokens[3 * RTR_PROMPT_LOOKED_AT];
    (void)state;

    gb_tokenizer(&file);
    assert_int_equal(td_gguf_open_bytes(file.bytes, file.len, &gguf), TD_OK);
    assert_int_equal(td_tokenizer_create(gguf, &tok), TD_OK);
    for (uint32_t i = 0; i < TD_ARRAY_LEN(tokens); i++) {
        tokens[i] = 1000000 + i; /* no two alike, and none a sign of code */
    }
    assert_int_equal(class_of(tok, tokens, 1000), RTR_PROMPT_PLAIN);
    assert_int_equal(rtr_prompt_class_of(tok, tokens, 1000, true), RTR_PROMPT_PREDICTED);
    memcpy(tokens + 500, tokens, 60 * sizeof(*tokens)); /* too little of it */
    assert_int_equal(class_of(tok, tokens, 1000), RTR_PROMPT_PLAIN);
    memcpy(tokens + 600, tokens, 100 * sizeof(*tokens));
    assert_int_equal(class_of(tok, tokens, 1000), RTR_PROMPT_REPEATS);
    assert_int_equal(class_of(tok, tokens, 6000), RTR_PROMPT_PLAIN); /* it is long past */
    assert_int_equal(class_of(tok, tokens, 8), RTR_PROMPT_PLAIN);
    assert_true(rtr_prompt_hash(tokens, 9) == rtr_prompt_hash(tokens, 9));
    assert_true(rtr_prompt_hash(tokens, 9) != rtr_prompt_hash(tokens, 10));
    td_tokenizer_destroy(tok);
    td_gguf_close(gguf);
    td_str_fini(&file);
}

int main(void)
{
#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        T(test_unknown_is_left_to_the_node),
        T(test_the_best_of_the_known_is_chosen),
        T(test_rows_that_cost_more_make_k_smaller),
        T(test_what_was_asked_for_is_kept),
        T(test_a_known_share_explores),
        T(test_i8_tenants_and_classes_are_apart),
        T(test_reports_are_counted_by_position),
        T(test_only_the_busiest_tenants_have_series),
        T(test_a_new_router_knows_what_nodes_remember),
        T(test_every_drafter_has_series_of_its_own),
        T(test_create_survives_every_failing_allocation),
        T(test_classes_of_texts),
        T(test_classes_of_prompts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

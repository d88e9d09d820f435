#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/wire/td_msg.h"

static const uint32_t u32s[3] = {7, 8, 9};
static const uint64_t u64s[3] = {70, 80, 90};
static const float floats[3] = {0.5f, -1.5f, 2.0f};
static const td_block_key_t keys[3] = {{{1}}, {{2}}, {{3}}};
static const td_status_t statuses[3] = {TD_OK, TD_ERR_BUSY, TD_INPROGRESS};

static td_msg_t roundtrip(td_msg_t *msg, td_msg_arena_t **arena)
{
    td_str_t bytes = {0};
    td_msg_t out;

    msg->sender_id = "node-1";
    msg->sender_incarnation = 11;
    msg->receiver_incarnation = 22;
    msg->sequence = 33;
    assert_int_equal(td_msg_encode(msg, &bytes), TD_OK);
    assert_int_equal(td_msg_decode(bytes.bytes, bytes.len, &out, arena), TD_OK);
    td_str_fini(&bytes);
    assert_int_equal(out.type, msg->type);
    assert_string_equal(out.sender_id, "node-1");
    assert_int_equal(out.sender_incarnation, 11);
    assert_int_equal(out.receiver_incarnation, 22);
    assert_int_equal(out.sequence, 33);
    return out;
}

static void test_register_keeps_every_text(void **state)
{
    td_msg_t msg = {.type = TD_MSG_REGISTER,
                    .u.reg = {.self = {.id = "p1",
                                       .role = TD_ROLE_PREFILL,
                                       .incarnation = 4,
                                       .endpoint = "tcp://a:1",
                                       .region = {.device = "nccl 22809 boot/0000:01:00.0"}},
                              .http = "a:2",
                              .fingerprint = {keys[0].bytes, 0},
                              .numerics_class = "cpu/mixed/r2",
                              .kv_codec = "f8_e4m3",
                              .probe_key = {keys[1].bytes, TD_BLOCK_KEY_BYTES},
                              .context_max = 8192,
                              .version = "7",
                              .ticket_epoch = 9,
                              .drafters = 26}};
    td_msg_arena_t *arena = NULL;
    const td_msg_t got = roundtrip(&msg, &arena);
    (void)state;

    assert_string_equal(got.u.reg.self.id, "p1");
    assert_string_equal(got.u.reg.self.region.device, "nccl 22809 boot/0000:01:00.0");
    assert_string_equal(got.u.reg.http, "a:2");
    assert_string_equal(got.u.reg.numerics_class, "cpu/mixed/r2");
    assert_string_equal(got.u.reg.kv_codec, "f8_e4m3");
    assert_string_equal(got.u.reg.version, "7");
    assert_int_equal(got.u.reg.context_max, 8192);
    assert_int_equal(got.u.reg.drafters, 26);
    assert_int_equal(got.u.reg.ticket_epoch, 9);
    assert_memory_equal(got.u.reg.probe_key.at, keys[1].bytes, TD_BLOCK_KEY_BYTES);
    td_msg_arena_free(arena);
}

static td_msg_work_t sample_work(void)
{
    static const td_msg_generated_t generated[2] = {{.tokens = u32s, .count = 3}, {.ended = true}};
    static const td_bytes_t stops[2] = {{(const uint8_t *)"a", 1}, {(const uint8_t *)"\0b", 2}};
    return (td_msg_work_t){.ticket = 5,
                           .attempt = 2,
                           .budget_ms = 1000,
                           .prompt = u32s,
                           .prompt_tokens = 3,
                           .cache_salt = {(const uint8_t *)"s", 1},
                           .temperature = 0.5f,
                           .top_p = 0.9f,
                           .seed = UINT64_MAX,
                           .bias_count = 3,
                           .bias_tokens = u32s,
                           .bias_values = floats,
                           .n = 2,
                           .max_tokens = 10,
                           .priority = -7,
                           .drafter = 1,
                           .k_min = 2,
                           .k_max = 8,
                           .draft_rule = 1,
                           .prediction = u32s,
                           .prediction_tokens = 3,
                           .tenant = UINT64_MAX - 1,
                           .prompt_class = 4,
                           .stop_count = 2,
                           .stops = stops,
                           .peer_id = "decode-1",
                           .peer_incarnation = 99,
                           .request_id = "r-1",
                           .trace = {{1, 2, 3}, {4, 5}, true},
                           .generated_count = 2,
                           .generated = generated};
}

static void test_msg_work_survives_the_wire(void **state)
{
    td_msg_t msg = {.type = TD_MSG_RESERVE, .u.work = sample_work()};
    td_msg_arena_t *arena = NULL;
    td_msg_t out = roundtrip(&msg, &arena);
    (void)state;

    assert_int_equal(out.u.work.ticket, 5);
    assert_int_equal(out.u.work.prompt_tokens, 3);
    assert_memory_equal(out.u.work.prompt, u32s, sizeof(u32s));
    assert_memory_equal(out.u.work.bias_values, floats, sizeof(floats));
    assert_int_equal(out.u.work.priority, -7);
    assert_true(out.u.work.trace.sampled);
    assert_memory_equal(out.u.work.trace.trace_id, msg.u.work.trace.trace_id, TD_TRACE_ID_BYTES);
    assert_memory_equal(out.u.work.trace.span_id, msg.u.work.trace.span_id, TD_SPAN_ID_BYTES);
    assert_int_equal(out.u.work.drafter, 1);
    assert_int_equal(out.u.work.k_min, 2);
    assert_int_equal(out.u.work.k_max, 8);
    assert_int_equal(out.u.work.draft_rule, 1);
    assert_int_equal(out.u.work.prediction_tokens, 3);
    assert_memory_equal(out.u.work.prediction, u32s, sizeof(u32s));
    assert_true(out.u.work.tenant == UINT64_MAX - 1);
    assert_int_equal(out.u.work.prompt_class, 4);
    assert_int_equal(out.u.work.stop_count, 2);
    assert_int_equal(out.u.work.stops[1].len, 2);
    assert_memory_equal(out.u.work.stops[1].at, "\0b", 2);
    assert_true(out.u.work.seed == UINT64_MAX);
    assert_string_equal(out.u.work.peer_id, "decode-1");
    assert_int_equal(out.u.work.generated_count, 2);
    assert_int_equal(out.u.work.generated[0].count, 3);
    assert_memory_equal(out.u.work.generated[0].tokens, u32s, sizeof(u32s));
    assert_false(out.u.work.generated[0].ended);
    assert_int_equal(out.u.work.generated[1].count, 0);
    assert_true(out.u.work.generated[1].ended);
    td_msg_arena_free(arena);
}

static void test_msg_kv_ready_survives_the_wire(void **state)
{
    td_msg_t msg = {.type = TD_MSG_KV_READY};
    td_msg_arena_t *arena = NULL;
    td_msg_t out;
    (void)state;

    msg.u.kv_ready = (td_msg_kv_ready_t){
        .ticket = 5,
        .attempt = 1,
        .first_block = 4,
        .count = 3,
        .blocks = u32s,
        .epochs = u64s,
        .checksums = u64s,
        .keys = keys,
        .choice_count = 3,
        .first_tokens = u32s,
        .hash_count = 3,
        .hashes = u64s,
        .usage = {.computed_tokens = 12, .accepted_draft_tokens = 3, .rejected_draft_tokens = 4}};
    msg.u.kv_ready.logprobs = (td_msg_logprobs_t){.count = 3,
                                                  .token_logprobs = floats,
                                                  .top_counts = (const uint32_t[]){1, 0, 2},
                                                  .top_total = 3,
                                                  .top_tokens = u32s,
                                                  .top_logprobs = floats};
    out = roundtrip(&msg, &arena);
    assert_int_equal(out.u.kv_ready.count, 3);
    assert_memory_equal(out.u.kv_ready.keys, keys, sizeof(keys));
    assert_memory_equal(out.u.kv_ready.checksums, u64s, sizeof(u64s));
    assert_int_equal(out.u.kv_ready.logprobs.top_counts[2], 2);
    assert_int_equal(out.u.kv_ready.usage.computed_tokens, 12);
    assert_int_equal(out.u.kv_ready.usage.accepted_draft_tokens, 3);
    assert_int_equal(out.u.kv_ready.usage.rejected_draft_tokens, 4);
    td_msg_arena_free(arena);
}

/* Encodes and decodes; TD_OK: what came is in *out, to be freed with its arena. */
static td_status_t send_over(td_msg_t *msg, td_msg_t *out, td_msg_arena_t **arena)
{
    td_str_t bytes = {0};
    td_status_t status = TD_OK;

    msg->sender_id = "x";
    assert_int_equal(td_msg_encode(msg, &bytes), TD_OK);
    status = td_msg_decode(bytes.bytes, bytes.len, out, arena);
    td_str_fini(&bytes);
    return status;
}

static void test_msg_end_tells_what_drafts_were_worth(void **state)
{
    static const struct {
        td_msg_drafts_t drafts;
        td_status_t status;
    } cases[] = {
        {{.k_max = 0}, TD_OK},
        {{.drafter = 4, .k_max = 3, .steps = 9, .drafted = {9, 5, 2}, .accepted = {5, 5}}, TD_OK},
        {{.drafter = 4, .k_max = 16, .steps = 1, .drafted = {1}, .saved_ns = INT64_MIN}, TD_OK},
        {{.k_max = 2, .steps = 9, .drafted = {9, 10}}, TD_ERR_PROTOCOL}, /* more than steps */
        {{.k_max = 2, .steps = 9, .drafted = {2}, .accepted = {3}}, TD_ERR_PROTOCOL},
    };
    (void)state;

    for (size_t i = 0; i < TD_ARRAY_LEN(cases); i++) {
        td_msg_t msg = {.type = TD_MSG_END, .u.end = {.leg = TD_ROLE_DECODE, .busy_ns = 7}};
        td_msg_arena_t *arena = NULL;
        td_msg_t out;
        msg.u.end.drafts = cases[i].drafts;
        msg.u.end.drafts.tokens = cases[i].drafts.k_max;
        assert_int_equal(send_over(&msg, &out, &arena), cases[i].status);
        if (cases[i].status == TD_OK) {
            assert_int_equal(out.u.end.busy_ns, 7);
            assert_memory_equal(&out.u.end.drafts, &msg.u.end.drafts, sizeof(out.u.end.drafts));
            td_msg_arena_free(arena);
        }
    }
}

static void test_msg_heartbeat_tells_costs(void **state)
{
    static const float wrong[] = {-0.5f, 2 * TD_MSG_COST_MAX, NAN, INFINITY};
    td_msg_t msg = {.type = TD_MSG_HEARTBEAT,
                    .u.heartbeat = {.queued_tokens = 3,
                                    .other_requests = 4,
                                    .other_tokens = 5,
                                    .other_blocks = 6,
                                    .fetched_bytes = 1ull << 40,
                                    .step_cost_count = 3,
                                    .pass_cost_count = 2,
                                    .step_costs = {1, 1.25f, 1.5f},
                                    .pass_costs = {0, 0.25f}}};
    td_msg_arena_t *arena = NULL;
    td_msg_t out;
    (void)state;

    assert_int_equal(send_over(&msg, &out, &arena), TD_OK);
    assert_memory_equal(&out.u.heartbeat, &msg.u.heartbeat, sizeof(out.u.heartbeat));
    td_msg_arena_free(arena);
    for (size_t i = 0; i < TD_ARRAY_LEN(wrong); i++) {
        msg.u.heartbeat.pass_costs[1] = wrong[i];
        assert_int_equal(send_over(&msg, &out, &arena), TD_ERR_PROTOCOL);
    }
}

static void test_msg_draft_history_survives_the_wire(void **state)
{
    static td_msg_draft_past_t past[TD_MSG_DRAFT_PAST_MAX];
    td_msg_t msg = {.type = TD_MSG_DRAFT_HISTORY};
    td_msg_arena_t *arena = NULL;
    td_msg_t out;
    (void)state;

    for (uint32_t i = 0; i < TD_MSG_DRAFT_PAST_MAX; i++) {
        past[i] = (td_msg_draft_past_t){.tenant = UINT64_MAX - i,
                                        .prompt_class = i,
                                        .drafter = i % 5,
                                        .steps = {1.0 / 3, 2},
                                        .drafted = {0.25, 2},
                                        .accepted = {0.125},
                                        .tokens = 1e6 / 7,
                                        .decode_s = 0.1};
    }
    for (uint32_t count = 0; count <= TD_MSG_DRAFT_PAST_MAX; count += TD_MSG_DRAFT_PAST_MAX / 2) {
        msg.u.draft_history = (td_msg_draft_history_t){.count = count, .past = past};
        assert_int_equal(send_over(&msg, &out, &arena), TD_OK);
        assert_int_equal(out.u.draft_history.count, count);
        assert_memory_equal(out.u.draft_history.past, past, count * sizeof(*past));
        td_msg_arena_free(arena);
    }
    past[1].accepted[1] = 2.5; /* of two */
    assert_int_equal(send_over(&msg, &out, &arena), TD_ERR_PROTOCOL);
    past[1].accepted[1] = NAN;
    assert_int_equal(send_over(&msg, &out, &arena), TD_ERR_PROTOCOL);
    past[1].accepted[1] = 0;
    past[2].tokens = 2 * TD_MSG_DRAFT_WEIGHT_MAX;
    assert_int_equal(send_over(&msg, &out, &arena), TD_ERR_PROTOCOL);
}

static void test_msg_store_lists_survive_the_wire(void **state)
{
    const td_msg_type_t types[] = {TD_MSG_PUT_START,     TD_MSG_PUT_RESULT,     TD_MSG_STORE_ORDER,
                                   TD_MSG_STORE_DONE,    TD_MSG_EVICT_ORDER,    TD_MSG_LOOKUP,
                                   TD_MSG_STORE_PIN,     TD_MSG_STORE_REMOVE,   TD_MSG_STORE_RESULT,
                                   TD_MSG_PROMOTE_ORDER, TD_MSG_STORE_MANIFEST, TD_MSG_PIN_ORDER};
    (void)state;

    for (size_t i = 0; i < TD_ARRAY_LEN(types); i++) {
        td_msg_t msg = {.type = types[i]};
        td_msg_arena_t *arena = NULL;
        td_msg_t out;
        msg.u.blocks = (td_msg_blocks_t){.request = 1,
                                         .term = 2,
                                         .writer_id = "w",
                                         .writer_incarnation = 3,
                                         .pin = TD_MSG_PIN_MAX,
                                         .how = TD_MSG_MANIFEST_RESET,
                                         .count = 3,
                                         .keys = keys,
                                         .statuses = statuses,
                                         .blocks = u32s,
                                         .epochs = u64s,
                                         .checksums = u64s};
        out = roundtrip(&msg, &arena);
        assert_int_equal(out.u.blocks.count, 3);
        assert_memory_equal(out.u.blocks.keys, keys, sizeof(keys));
        assert_int_equal(
            out.u.blocks.pin,
            types[i] == TD_MSG_STORE_PIN || types[i] == TD_MSG_PIN_ORDER ? TD_MSG_PIN_MAX : 0);
        assert_int_equal(out.u.blocks.how,
                         types[i] == TD_MSG_STORE_MANIFEST || types[i] == TD_MSG_EVICT_ORDER
                             ? TD_MSG_MANIFEST_RESET
                             : 0);
        if (types[i] == TD_MSG_STORE_DONE || types[i] == TD_MSG_STORE_RESULT) {
            assert_memory_equal(out.u.blocks.statuses, statuses, sizeof(statuses));
        }
        td_msg_arena_free(arena);
    }
}

/* Only a reset manifest may be empty, none too long, and what is gone has no hashes. */
static void test_msg_mount_and_manifest(void **state)
{
    static td_block_key_t many[TD_MSG_MANIFEST_KEYS_MAX + 1];
    static uint64_t hashes[TD_MSG_MANIFEST_KEYS_MAX + 1];
    static uint32_t numbers[TD_MSG_MANIFEST_KEYS_MAX + 1];
    static const struct {
        td_msg_type_t type;
        uint32_t how;
        uint32_t count;
        td_status_t status;
    } cases[] = {
        {TD_MSG_MOUNT, 0, 0, TD_OK},
        {TD_MSG_STORE_MANIFEST, TD_MSG_MANIFEST_RESET, 0, TD_OK},
        {TD_MSG_STORE_MANIFEST, TD_MSG_MANIFEST_HERE, 0, TD_ERR_PROTOCOL},
        {TD_MSG_STORE_MANIFEST, TD_MSG_MANIFEST_GONE, 2, TD_OK},
        {TD_MSG_STORE_MANIFEST, TD_MSG_MANIFEST_MEMORY, 0, TD_OK},
        {TD_MSG_STORE_MANIFEST, TD_MSG_MANIFEST_MEMORY, TD_MSG_MANIFEST_KEYS_MAX, TD_OK},
        {TD_MSG_STORE_MANIFEST, TD_MSG_MANIFEST_MEMORY, TD_MSG_MANIFEST_KEYS_MAX + 1,
         TD_ERR_PROTOCOL},
        {TD_MSG_STORE_MANIFEST, TD_MSG_MANIFEST_LOST, 0, TD_OK},
        {TD_MSG_STORE_MANIFEST, TD_MSG_MANIFEST_LOST, 2, TD_ERR_PROTOCOL},
        {TD_MSG_STORE_MANIFEST, TD_MSG_MANIFEST_LOST + 1, 2, TD_ERR_PROTOCOL},
        {TD_MSG_STORE_MANIFEST, TD_MSG_MANIFEST_HERE, TD_MSG_MANIFEST_KEYS_MAX, TD_OK},
        {TD_MSG_STORE_MANIFEST, TD_MSG_MANIFEST_HERE, TD_MSG_MANIFEST_KEYS_MAX + 1,
         TD_ERR_PROTOCOL},
        {TD_MSG_EVICT_ORDER, TD_MSG_EVICT_REMOVE + 1, 2, TD_ERR_PROTOCOL},
    };
    (void)state;

    for (size_t i = 0; i < TD_ARRAY_LEN(cases); i++) {
        td_msg_t msg = {.type = cases[i].type, .sender_id = "x"};
        td_msg_arena_t *arena = NULL;
        td_str_t bytes = {0};
        td_msg_t out;
        msg.u.blocks = (td_msg_blocks_t){.term = 2,
                                         .mount = 5,
                                         .how = cases[i].how,
                                         .count = cases[i].count,
                                         .keys = many,
                                         .blocks = numbers,
                                         .epochs = hashes,
                                         .checksums = hashes,
                                         .is_last = true};
        assert_int_equal(td_msg_encode(&msg, &bytes), TD_OK);
        assert_int_equal(td_msg_decode(bytes.bytes, bytes.len, &out, &arena), cases[i].status);
        if (cases[i].status == TD_OK) {
            assert_int_equal(out.u.blocks.term, 2);
            assert_int_equal(out.u.blocks.mount, 5);
            assert_int_equal(out.u.blocks.count, cases[i].count);
            assert_int_equal(out.u.blocks.is_last, cases[i].how == TD_MSG_MANIFEST_MEMORY);
            td_msg_arena_free(arena);
        }
        td_str_fini(&bytes);
    }
}

static void test_msg_memo_survives_the_wire(void **state)
{
    static const td_msg_type_t types[] = {TD_MSG_MEMO_PUT, TD_MSG_MEMO_GET, TD_MSG_MEMO_FOUND};
    static uint32_t tokens[TD_MSG_MEMO_TOKENS_MAX + 1] = {7, 8, 9};
    const td_block_key_t key = {{1, 2, 3}};
    (void)state;

    for (size_t i = 0; i < TD_ARRAY_LEN(types); i++) {
        const uint32_t good = types[i] == TD_MSG_MEMO_GET ? 0 : TD_MSG_MEMO_TOKENS_MAX;
        const uint32_t counts[] = {good, good == 0 ? 1 : 0, good + 1};
        for (size_t c = 0; c < TD_ARRAY_LEN(counts); c++) {
            td_msg_t msg = {.type = types[i], .sender_id = "x"};
            td_str_t bytes = {0};
            td_msg_arena_t *arena = NULL;
            td_msg_t out;
            msg.u.memo =
                (td_msg_memo_t){.key = &key, .tag = 77, .count = counts[c], .tokens = tokens};
            assert_int_equal(td_msg_encode(&msg, &bytes), TD_OK);
            assert_int_equal(td_msg_decode(bytes.bytes, bytes.len, &out, &arena),
                             c == 0 ? TD_OK : TD_ERR_PROTOCOL);
            if (c == 0) {
                assert_int_equal(out.type, types[i]);
                assert_true(td_block_key_equal(out.u.memo.key, &key));
                assert_int_equal(out.u.memo.tag, 77);
                assert_int_equal(out.u.memo.count, good);
                assert_true(good == 0 ||
                            memcmp(out.u.memo.tokens, tokens, good * sizeof(*tokens)) == 0);
                td_msg_arena_free(arena);
            }
            td_str_fini(&bytes);
        }
    }
}

/* Where blocks lie in memory, with one place, epoch and checksum a key; pins may be left out. */
static void test_msg_manifest_of_memory(void **state)
{
    static const uint32_t blocks[3] = {7, 8, 9};
    static const uint64_t numbers[3] = {4, 5, 6};
    static uint32_t pins[3] = {0, TD_MSG_PIN_MAX, 0};
    (void)state;

    for (int round = 0; round < 4; round++) {
        td_msg_t msg = {.type = TD_MSG_STORE_MANIFEST, .sender_id = "x"};
        td_msg_arena_t *arena = NULL;
        td_str_t bytes = {0};
        td_msg_t out;
        msg.u.blocks = (td_msg_blocks_t){.how = TD_MSG_MANIFEST_MEMORY,
                                         .count = 3,
                                         .keys = keys,
                                         .blocks = round == 2 ? NULL : blocks,
                                         .epochs = numbers,
                                         .checksums = numbers,
                                         .pins = round == 0 ? NULL : pins};
        pins[1] = round == 3 ? TD_MSG_PIN_MAX + 1 : TD_MSG_PIN_MAX;
        assert_int_equal(td_msg_encode(&msg, &bytes), TD_OK);
        assert_int_equal(td_msg_decode(bytes.bytes, bytes.len, &out, &arena),
                         round < 2 ? TD_OK : TD_ERR_PROTOCOL);
        if (round < 2) {
            assert_memory_equal(out.u.blocks.blocks, blocks, sizeof(blocks));
            assert_memory_equal(out.u.blocks.epochs, numbers, sizeof(numbers));
            assert_memory_equal(out.u.blocks.checksums, numbers, sizeof(numbers));
            assert_true((out.u.blocks.pins != NULL) == (round == 1));
            assert_false(out.u.blocks.is_last);
            td_msg_arena_free(arena);
        }
        td_str_fini(&bytes);
    }
}

/* Events of blocks: runs that add up, keys only where they belong. */
static void test_msg_kv_events(void **state)
{
    static const td_block_key_t many[TD_MSG_KV_KEYS_MAX + 1];
    static const uint32_t all[] = {TD_MSG_KV_KEYS_MAX};
    static const uint32_t above[] = {TD_MSG_KV_KEYS_MAX + 1};
    static const uint32_t went[] = {0, 3};
    static const uint32_t mixed[] = {1, 1, 1};
    static const uint32_t hollow[] = {1, 0, 2};
    static const uint32_t short_of[] = {2};
    static const uint32_t wraps[] = {UINT32_MAX, 4};
    static const uint32_t empty[] = {0};
    static const struct {
        uint32_t kind;
        uint64_t first;
        uint32_t count;
        uint32_t run_count;
        const uint32_t *runs;
        td_status_t status;
    } cases[] = {
        {TD_MSG_KV_CHANGES, 1, 3, 2, went, TD_OK},
        {TD_MSG_KV_CHANGES, 1, 3, 3, mixed, TD_OK},
        {TD_MSG_KV_CHANGES, 9, 0, 0, NULL, TD_OK},
        {TD_MSG_KV_CHANGES, 9, TD_MSG_KV_KEYS_MAX, 1, all, TD_OK},
        {TD_MSG_KV_CLEARED, 9, 0, 0, NULL, TD_OK},
        {TD_MSG_KV_SNAPSHOT, 9, 0, 0, NULL, TD_OK},
        {TD_MSG_KV_PART, 9, 3, 0, NULL, TD_OK},
        {TD_MSG_KV_END, 9, 0, 0, NULL, TD_OK},
        {TD_MSG_KV_CHANGES, 0, 3, 3, mixed, TD_ERR_PROTOCOL},
        {TD_MSG_KV_CHANGES, UINT64_MAX, 3, 3, mixed, TD_ERR_PROTOCOL},
        {TD_MSG_KV_CHANGES, 1, 3, 3, hollow, TD_ERR_PROTOCOL},
        {TD_MSG_KV_CHANGES, 1, 3, 1, short_of, TD_ERR_PROTOCOL},
        {TD_MSG_KV_CHANGES, 1, 3, 2, wraps, TD_ERR_PROTOCOL},
        {TD_MSG_KV_CHANGES, 1, 0, 1, empty, TD_ERR_PROTOCOL},
        {TD_MSG_KV_CHANGES, 1, TD_MSG_KV_KEYS_MAX + 1, 1, above, TD_ERR_PROTOCOL},
        {TD_MSG_KV_CLEARED, 1, 3, 0, NULL, TD_ERR_PROTOCOL},
        {TD_MSG_KV_PART, 1, 3, 3, mixed, TD_ERR_PROTOCOL},
        {TD_MSG_KV_PART, 1, 0, 0, NULL, TD_ERR_PROTOCOL},
        {TD_MSG_KV_END, 1, 3, 0, NULL, TD_ERR_PROTOCOL},
        {TD_MSG_KV_END + 1, 1, 0, 0, NULL, TD_ERR_PROTOCOL},
    };
    (void)state;

    for (size_t i = 0; i < TD_ARRAY_LEN(cases); i++) {
        td_msg_t msg = {.type = TD_MSG_KV_EVENTS, .sender_id = "x"};
        td_msg_arena_t *arena = NULL;
        td_str_t bytes = {0};
        td_msg_t out;
        msg.u.kv_events = (td_msg_kv_events_t){.kind = cases[i].kind,
                                               .first = cases[i].first,
                                               .count = cases[i].count,
                                               .keys = cases[i].count == 3 ? keys : many,
                                               .run_count = cases[i].run_count,
                                               .runs = cases[i].runs,
                                               .snapshot = 4,
                                               .part = 5,
                                               .is_head = true,
                                               .blocks = 6,
                                               .digest = 7};
        assert_int_equal(td_msg_encode(&msg, &bytes), TD_OK);
        assert_int_equal(td_msg_decode(bytes.bytes, bytes.len, &out, &arena), cases[i].status);
        if (cases[i].status == TD_OK) {
            const td_msg_kv_events_t *m = &out.u.kv_events;
            assert_true(m->kind == cases[i].kind && m->first == cases[i].first);
            assert_true(m->count == cases[i].count && m->run_count == cases[i].run_count);
            assert_true(m->count != 3 || memcmp(m->keys, keys, sizeof(keys)) == 0);
            assert_true(m->run_count == 0 ||
                        memcmp(m->runs, cases[i].runs, m->run_count * sizeof(*m->runs)) == 0);
            assert_true(m->snapshot == 4 && m->part == 5 && m->is_head && m->blocks == 6 &&
                        m->digest == 7);
            td_msg_arena_free(arena);
        }
        td_str_fini(&bytes);
    }
}

static void test_msg_kv_replay(void **state)
{
    td_msg_t msg = {.type = TD_MSG_KV_REPLAY, .u.kv_replay = {.from = 12}};
    td_msg_arena_t *arena = NULL;
    const td_msg_t got = roundtrip(&msg, &arena);
    (void)state;

    assert_int_equal(got.u.kv_replay.from, 12);
    td_msg_arena_free(arena);
}

static void test_msg_decode_refuses_what_breaks_the_rules(void **state)
{
    td_str_t bytes = {0};
    td_msg_arena_t *arena = NULL;
    td_msg_t out;
    td_msg_t msg = {.type = TD_MSG_RESERVE, .sender_id = "x", .u.work = sample_work()};
    (void)state;

    msg.u.work.n = 0;
    assert_int_equal(td_msg_encode(&msg, &bytes), TD_OK);
    assert_int_equal(td_msg_decode(bytes.bytes, bytes.len, &out, &arena), TD_ERR_PROTOCOL);
    td_str_clear(&bytes);
    {
        td_msg_t pin = {.type = TD_MSG_STORE_PIN, .sender_id = "x"};
        pin.u.blocks =
            (td_msg_blocks_t){.request = 1, .pin = TD_MSG_PIN_MAX + 1, .count = 3, .keys = keys};
        assert_int_equal(td_msg_encode(&pin, &bytes), TD_OK);
        assert_int_equal(td_msg_decode(bytes.bytes, bytes.len, &out, &arena), TD_ERR_PROTOCOL);
        td_str_clear(&bytes);
    }
    msg.u.work = sample_work();
    msg.u.work.generated_count = 1; /* of two choices */
    assert_int_equal(td_msg_encode(&msg, &bytes), TD_OK);
    assert_int_equal(td_msg_decode(bytes.bytes, bytes.len, &out, &arena), TD_ERR_PROTOCOL);
    td_str_clear(&bytes);
    msg.u.work = sample_work();
    msg.u.work.max_tokens = 3; /* as many as were generated of a choice that goes on */
    assert_int_equal(td_msg_encode(&msg, &bytes), TD_OK);
    assert_int_equal(td_msg_decode(bytes.bytes, bytes.len, &out, &arena), TD_ERR_PROTOCOL);
    td_str_clear(&bytes);
    msg.u.work = sample_work();
    msg.u.work.prompt_tokens = 0;
    assert_int_equal(td_msg_encode(&msg, &bytes), TD_OK);
    assert_int_equal(td_msg_decode(bytes.bytes, bytes.len, &out, &arena), TD_ERR_PROTOCOL);
    td_str_clear(&bytes);
    msg.u.work = sample_work();
    msg.sender_id = "bad\nid";
    assert_int_equal(td_msg_encode(&msg, &bytes), TD_OK);
    assert_int_equal(td_msg_decode(bytes.bytes, bytes.len, &out, &arena), TD_ERR_PROTOCOL);
    assert_int_equal(td_msg_decode("", 0, &out, &arena), TD_ERR_PROTOCOL);
    assert_int_equal(td_msg_decode("\xff\xff\xff", 3, &out, &arena), TD_ERR_PROTOCOL);
    td_str_fini(&bytes);
}

/* Any single byte of a good message may be wrong: a status, never a crash. */
static void test_msg_decode_survives_every_flipped_byte(void **state)
{
    td_msg_t msg = {.type = TD_MSG_RESERVE, .sender_id = "x", .u.work = sample_work()};
    td_str_t bytes = {0};
    (void)state;

    assert_int_equal(td_msg_encode(&msg, &bytes), TD_OK);
    for (size_t at = 0; at < bytes.len; at++) {
        for (int bit = 0; bit < 8; bit++) {
            td_msg_arena_t *arena = NULL;
            td_msg_t out;
            bytes.bytes[at] = (char)(bytes.bytes[at] ^ (1 << bit));
            if (td_msg_decode(bytes.bytes, bytes.len, &out, &arena) == TD_OK) {
                td_msg_arena_free(arena);
            }
            bytes.bytes[at] = (char)(bytes.bytes[at] ^ (1 << bit));
        }
    }
    td_str_fini(&bytes);
}

static void test_msg_codec_survives_every_failing_allocation(void **state)
{
    td_msg_t msg = {.type = TD_MSG_RESERVE, .sender_id = "x", .u.work = sample_work()};
    td_str_t bytes = {0};
    td_status_t status = TD_ERR_NO_MEMORY;
    (void)state;

    assert_int_equal(td_msg_encode(&msg, &bytes), TD_OK);
    for (uint64_t nth = 1; status != TD_OK; nth++) {
        td_msg_arena_t *arena = NULL;
        td_msg_t out;
        td_alloc_fail_at(nth);
        status = td_msg_decode(bytes.bytes, bytes.len, &out, &arena);
        td_alloc_fail_at(0);
        if (status == TD_OK) {
            td_msg_arena_free(arena);
        } else {
            assert_null(arena);
        }
        assert_true(nth < 1000);
    }
    td_str_fini(&bytes);
}

/* I6: two bytes of a peer that says nothing are a struct of a hundred. */
static td_status_t decode_of(const td_msg_t *msg)
{
    td_str_t bytes = {0};
    td_msg_arena_t *arena = NULL;
    td_msg_t out;
    td_status_t status = TD_OK;

    assert_int_equal(td_msg_encode(msg, &bytes), TD_OK);
    status = td_msg_decode(bytes.bytes, bytes.len, &out, &arena);
    if (status == TD_OK) {
        td_msg_arena_free(arena);
    }
    td_str_fini(&bytes);
    return status;
}

static void test_msg_peers_tell_changes(void **state)
{
    const char *gone[2] = {"c", "d"};
    td_msg_peer_t peer = {.id = "a", .role = TD_ROLE_PREFILL, .endpoint = "tcp://a"};
    td_msg_t msg = {
        .type = TD_MSG_PEERS,
        .sender_id = "router",
        .u.peers = {
            .version = 9, .since = 8, .count = 1, .peers = &peer, .gone_count = 2, .gone = gone}};
    td_msg_arena_t *arena = NULL;
    td_msg_t out = roundtrip(&msg, &arena);
    (void)state;

    assert_int_equal(out.u.peers.version, 9);
    assert_int_equal(out.u.peers.since, 8);
    assert_int_equal(out.u.peers.count, 1);
    assert_int_equal(out.u.peers.gone_count, 2);
    assert_string_equal(out.u.peers.gone[0], "c");
    assert_string_equal(out.u.peers.gone[1], "d");
    td_msg_arena_free(arena);
    msg.u.peers.since = 10; /* later than what it leads to */
    assert_int_equal(decode_of(&msg), TD_ERR_PROTOCOL);
    msg.u.peers.since = 0; /* all there are, and some that are not */
    assert_int_equal(decode_of(&msg), TD_ERR_PROTOCOL);
    msg.u.peers.gone_count = 0;
    assert_int_equal(decode_of(&msg), TD_OK);
    msg.u.peers.since = 8;
    msg.u.peers.gone_count = 2;
    gone[1] = "with a\nline";
    assert_int_equal(decode_of(&msg), TD_ERR_PROTOCOL);
}

static void test_i6_msg_refuses_what_unpacks_to_far_more(void **state)
{
    td_msg_peer_t peers[2] = {{.id = "a", .role = TD_ROLE_PREFILL, .endpoint = "tcp://a"},
                              {.id = "b", .role = TD_ROLE_DECODE, .endpoint = "tcp://b"}};
    td_msg_t msg = {.type = TD_MSG_PEERS, .u.peers = {.count = 2, .peers = peers}};
    const size_t empty_peers = 100000;
    uint8_t *bytes = calloc(1, 2 * empty_peers + 16);
    td_msg_arena_t *arena = NULL;
    td_msg_t out = roundtrip(&msg, &arena);
    size_t len = 0;
    (void)state;

    assert_int_equal(out.u.peers.count, 2);
    td_msg_arena_free(arena);
    bytes[len++] = 12 << 3 | 2; /* Envelope.peers, with its length in four bytes */
    bytes[len++] = (uint8_t)(2 * empty_peers % 128 | 128);
    bytes[len++] = (uint8_t)(2 * empty_peers / 128 % 128 | 128);
    bytes[len++] = (uint8_t)(2 * empty_peers / 16384 % 128 | 128);
    bytes[len++] = 0;
    for (size_t i = 0; i < empty_peers; i++) {
        bytes[len++] = 2 << 3 | 2; /* Peers.peers: empty */
        bytes[len++] = 0;
    }
    assert_int_equal(td_msg_decode(bytes, len, &out, &arena), TD_ERR_TOO_LARGE);
    free(bytes);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_register_keeps_every_text),
        cmocka_unit_test(test_msg_work_survives_the_wire),
        cmocka_unit_test(test_msg_kv_ready_survives_the_wire),
        cmocka_unit_test(test_msg_end_tells_what_drafts_were_worth),
        cmocka_unit_test(test_msg_heartbeat_tells_costs),
        cmocka_unit_test(test_msg_memo_survives_the_wire),
        cmocka_unit_test(test_msg_kv_events),
        cmocka_unit_test(test_msg_kv_replay),
        cmocka_unit_test(test_msg_draft_history_survives_the_wire),
        cmocka_unit_test(test_msg_store_lists_survive_the_wire),
        cmocka_unit_test(test_msg_mount_and_manifest),
        cmocka_unit_test(test_msg_manifest_of_memory),
        cmocka_unit_test(test_msg_decode_refuses_what_breaks_the_rules),
        cmocka_unit_test(test_msg_decode_survives_every_flipped_byte),
        cmocka_unit_test(test_msg_codec_survives_every_failing_allocation),
        cmocka_unit_test(test_msg_peers_tell_changes),
        cmocka_unit_test(test_i6_msg_refuses_what_unpacks_to_far_more),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

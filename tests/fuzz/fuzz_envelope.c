/* Decodes any bytes as a message between processes; one that is accepted is encoded and decoded
 * again and must be the same. Built with a fuzzing engine, or alone: then it replays the corpus and
 * changes of every byte of it. With the argument --make DIR it writes the corpus. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/wire/td_msg.h"
#include "tests/fuzz/fuzz_replay.h"

#define CORPUS_DIR "tests/fuzz/corpus/envelope"
#define FILE_BYTES_MAX 65536u

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    td_msg_t msg;
    td_msg_t again;
    td_msg_arena_t *arena = NULL;
    td_msg_arena_t *arena_again = NULL;
    td_str_t first = {0};
    td_str_t second = {0};

    if (td_msg_decode(data, size, &msg, &arena) != TD_OK) {
        return 0;
    }
    TD_ASSERT(td_msg_encode(&msg, &first) == TD_OK);
    TD_ASSERT(td_msg_decode(first.bytes, first.len, &again, &arena_again) == TD_OK);
    TD_ASSERT(again.type == msg.type && again.sequence == msg.sequence);
    TD_ASSERT(td_msg_encode(&again, &second) == TD_OK);
    TD_ASSERT(first.len == second.len && memcmp(first.bytes, second.bytes, first.len) == 0);
    td_str_fini(&first);
    td_str_fini(&second);
    td_msg_arena_free(arena);
    td_msg_arena_free(arena_again);
    return 0;
}

#ifndef TD_FUZZ_ENGINE
static const uint32_t u32s[] = {1, 2, 300};
static const uint32_t runs[] = {1, 2};
static const uint32_t top_counts[] = {1, 0, 2};
static const uint32_t segment_of[] = {0, 1};
static const uint64_t u64s[] = {1, 2, 0xffffffffffffffff};
static const float floats[] = {-0.5f, -1, -2};
static const td_block_key_t keys[3] = {{{1}}, {{2}}, {{3}}};
static const td_msg_draft_past_t past[2] = {{.tenant = 1,
                                             .prompt_class = 2,
                                             .drafter = 4,
                                             .steps = {9, 8},
                                             .drafted = {4, 3},
                                             .accepted = {2.5, 0.5},
                                             .tokens = 40,
                                             .decode_s = 0.5},
                                            {.drafter = 2}};
static const td_status_t statuses[] = {TD_OK, TD_INPROGRESS, TD_ERR_BUSY};
static const char *const names[] = {"s1", "s2"};
static const td_bytes_t stops[] = {{(const uint8_t *)"x", 1}, {(const uint8_t *)"yz", 2}};

static void sample(td_msg_type_t type, td_msg_t *msg)
{
    static const td_msg_peer_t peers[] = {
        {.id = "p1", .role = TD_ROLE_PREFILL, .incarnation = 3, .endpoint = "tcp://127.0.0.1:9"},
        {.id = "s1",
         .role = TD_ROLE_KVSTORE,
         .incarnation = 4,
         .store_master = true,
         .store_term = 6}};
    td_msg_logprobs_t lp = {.count = 3,
                            .token_logprobs = floats,
                            .top_counts = top_counts,
                            .top_total = 3,
                            .top_tokens = u32s,
                            .top_logprobs = floats};

    *msg = (td_msg_t){.type = type,
                      .sender_id = "d1",
                      .sender_incarnation = 5,
                      .receiver_incarnation = 6,
                      .sequence = 7};
    switch (type) {
    case TD_MSG_REGISTER:
        msg->u.reg = (td_msg_register_t){.self = peers[0],
                                         .http = "127.0.0.1:1",
                                         .fingerprint = {keys[0].bytes, 32},
                                         .numerics_class = "cpu/mixed/r1",
                                         .probe_key = {keys[0].bytes, 16},
                                         .context_max = 8192,
                                         .version = "0",
                                         .kv_codec = "i8",
                                         .drafters = 26};
        msg->u.reg.self.region = (td_msg_region_t){.ucx_address = {keys[0].bytes, 8},
                                                   .ucx_rkey = {keys[1].bytes, 8},
                                                   .base = 4096,
                                                   .block_count = 2,
                                                   .block_bytes = 64};
        break;
    case TD_MSG_REGISTERED:
        msg->u.registered = (td_msg_registered_t){.error = "no", .heartbeat_ms = 500};
        break;
    case TD_MSG_PEERS:
        msg->u.peers = (td_msg_peers_t){.version = 2, .count = 2, .peers = peers};
        break;
    case TD_MSG_HEARTBEAT:
        msg->u.heartbeat = (td_msg_heartbeat_t){1, 2, 3, 4, 5, 2, 3, {1, 1.25f}, {0, 0, 0.5f}};
        break;
    case TD_MSG_LEASE:
        msg->u.lease.lease_ms = 5000;
        break;
    case TD_MSG_RESERVE:
    case TD_MSG_START:
        msg->u.work = (td_msg_work_t){.ticket = 1,
                                      .attempt = 1,
                                      .prompt = u32s,
                                      .prompt_tokens = 3,
                                      .temperature = 1,
                                      .bias_count = 2,
                                      .bias_tokens = u32s,
                                      .bias_values = floats,
                                      .n = 2,
                                      .max_tokens = 4,
                                      .tenant = 8,
                                      .prompt_class = 3,
                                      .stop_count = 2,
                                      .stops = stops,
                                      .peer_id = "p1",
                                      .request_id = "r"};
        break;
    case TD_MSG_RESERVED:
        msg->u.reserved = (td_msg_reserved_t){1, 1, TD_ERR_BUSY, 2};
        break;
    case TD_MSG_LAYERS_READY:
        msg->u.layers = (td_msg_layers_ready_t){
            .ticket = 1, .layer_end = 2, .count = 3, .blocks = u32s, .epochs = u64s};
        break;
    case TD_MSG_KV_READY:
        msg->u.kv_ready = (td_msg_kv_ready_t){.ticket = 1,
                                              .count = 3,
                                              .blocks = u32s,
                                              .epochs = u64s,
                                              .checksums = u64s,
                                              .keys = keys,
                                              .choice_count = 3,
                                              .first_tokens = u32s,
                                              .logprobs = lp,
                                              .hash_count = 3,
                                              .hashes = u64s};
        break;
    case TD_MSG_TOKENS:
        msg->u.tokens = (td_msg_tokens_t){.ticket = 1,
                                          .count = 3,
                                          .tokens = u32s,
                                          .text = stops[1],
                                          .finish = TD_FINISH_STOP,
                                          .logprobs = lp,
                                          .stop_match = stops[0]};
        break;
    case TD_MSG_END:
        msg->u.end = (td_msg_end_t){.ticket = 1, .leg = TD_ROLE_DECODE, .status = TD_ERR_BUSY};
        msg->u.end.drafts = (td_msg_drafts_t){.drafter = 4,
                                              .k_max = 3,
                                              .steps = 9,
                                              .drafted = {7, 5, 1},
                                              .accepted = {5, 1},
                                              .tokens = 15,
                                              .decode_ns = 1000,
                                              .saved_ns = -7};
        break;
    case TD_MSG_DRAFT_HISTORY:
        msg->u.draft_history = (td_msg_draft_history_t){.count = 2, .past = past};
        break;
    case TD_MSG_PUT_START:
    case TD_MSG_PUT_RESULT:
    case TD_MSG_STORE_ORDER:
    case TD_MSG_STORE_DONE:
    case TD_MSG_EVICT_ORDER:
    case TD_MSG_LOOKUP:
    case TD_MSG_STORE_PIN:
    case TD_MSG_STORE_REMOVE:
    case TD_MSG_STORE_RESULT:
    case TD_MSG_MOUNT:
    case TD_MSG_PROMOTE_ORDER:
    case TD_MSG_PIN_ORDER:
    case TD_MSG_STORE_MANIFEST:
        msg->u.blocks = (td_msg_blocks_t){.request = 1,
                                          .term = 2,
                                          .writer_id = "d1",
                                          .count = 3,
                                          .keys = keys,
                                          .statuses = statuses,
                                          .blocks = u32s,
                                          .epochs = u64s,
                                          .checksums = u64s};
        break;
    case TD_MSG_MEMO_PUT:
    case TD_MSG_MEMO_GET:
    case TD_MSG_MEMO_FOUND:
        msg->u.memo = (td_msg_memo_t){
            .key = keys, .tag = 5, .count = type == TD_MSG_MEMO_GET ? 0 : 3, .tokens = u32s};
        break;
    case TD_MSG_LOOKUP_RESULT:
        msg->u.found = (td_msg_lookup_result_t){.request = 1,
                                                .segment_count = 2,
                                                .segment_ids = names,
                                                .count = 2,
                                                .segment_of = segment_of,
                                                .blocks = u32s,
                                                .epochs = u64s,
                                                .checksums = u64s};
        break;
    case TD_MSG_KV_EVENTS:
        msg->u.kv_events = (td_msg_kv_events_t){.first = 9,
                                                .count = 3,
                                                .keys = keys,
                                                .run_count = 2,
                                                .runs = runs,
                                                .is_head = true,
                                                .blocks = 7,
                                                .digest = 77};
        break;
    case TD_MSG_KV_REPLAY:
        msg->u.kv_replay.from = 9;
        break;
    default:
        msg->u.ticket = (td_msg_ticket_t){.ticket = 1, .attempt = 1, .status = TD_ERR_CORRUPT};
        break;
    }
}

static const td_msg_type_t types[] = {
    TD_MSG_REGISTER,       TD_MSG_REGISTERED,   TD_MSG_PEERS,         TD_MSG_HEARTBEAT,
    TD_MSG_LEASE,          TD_MSG_RESERVE,      TD_MSG_RESERVED,      TD_MSG_START,
    TD_MSG_LAYERS_READY,   TD_MSG_KV_READY,     TD_MSG_KV_ACK,        TD_MSG_KV_FAILED,
    TD_MSG_DRAFT_HISTORY,  TD_MSG_CANCEL,       TD_MSG_TOKENS,        TD_MSG_END,
    TD_MSG_PUT_START,      TD_MSG_PUT_RESULT,   TD_MSG_STORE_ORDER,   TD_MSG_STORE_DONE,
    TD_MSG_EVICT_ORDER,    TD_MSG_LOOKUP,       TD_MSG_LOOKUP_RESULT, TD_MSG_STORE_PIN,
    TD_MSG_STORE_REMOVE,   TD_MSG_STORE_RESULT, TD_MSG_MOUNT,         TD_MSG_PROMOTE_ORDER,
    TD_MSG_STORE_MANIFEST, TD_MSG_PIN_ORDER,    TD_MSG_MEMO_PUT,      TD_MSG_MEMO_GET,
    TD_MSG_MEMO_FOUND,     TD_MSG_KV_EVENTS,    TD_MSG_KV_REPLAY};

static int make_corpus(const char *dir)
{
    static const uint32_t pins[3] = {0, 1, 2};

    static const struct {
        td_msg_type_t type;
        const char *suffix;
    } more[] = {{TD_MSG_STORE_MANIFEST, "_memory"}, {TD_MSG_KV_EVENTS, "_part"}};

    for (size_t i = 0; i < TD_ARRAY_LEN(types) + TD_ARRAY_LEN(more); i++) { /* in two forms */
        const size_t again = i < TD_ARRAY_LEN(types) ? 0 : i - TD_ARRAY_LEN(types) + 1;
        char path[4096];
        td_str_t bytes = {0};
        td_msg_t msg;
        FILE *file = NULL;
        sample(again > 0 ? more[again - 1].type : types[i], &msg);
        if (again == 1) {
            msg.u.blocks.how = TD_MSG_MANIFEST_MEMORY;
            msg.u.blocks.pins = pins;
            msg.u.blocks.is_last = true;
        } else if (again == 2) {
            msg.u.kv_events.kind = TD_MSG_KV_PART;
            msg.u.kv_events.run_count = 0;
            msg.u.kv_events.snapshot = 3;
            msg.u.kv_events.part = 1;
        }
        (void)snprintf(path, sizeof(path), "%s/type_%d%s", dir, (int)msg.type,
                       again > 0 ? more[again - 1].suffix : "");
        file = fopen(path, "wb");
        if (file == NULL || td_msg_encode(&msg, &bytes) != TD_OK ||
            fwrite(bytes.bytes, 1, bytes.len, file) != bytes.len || fclose(file) != 0) {
            (void)fprintf(stderr, "%s not written\n", path);
            return 1;
        }
        td_str_fini(&bytes);
    }
    return 0;
}

static bool replay_file(const char *dir, const char *name)
{
    static const uint8_t masks[FUZZ_MASKS] = {0x01, 0x08, 0x80, 0xff};
    static uint8_t bytes[FILE_BYTES_MAX];
    size_t len = 0;
    td_msg_arena_t *arena = NULL;
    td_msg_t msg;

    if (!fuzz_read(dir, name, bytes, sizeof(bytes), &len)) {
        return false;
    }
    TD_ASSERT(td_msg_decode(bytes, len, &msg, &arena) == TD_OK); /* the corpus itself is good */
    td_msg_arena_free(arena);
    fuzz_replay(bytes, len, masks, 1);
    return true;
}

int main(int argc, char **argv)
{
    if (argc > 2 && strcmp(argv[1], "--make") == 0) {
        return make_corpus(argv[2]);
    }
    return fuzz_replay_folder(argc > 1 ? argv[1] : CORPUS_DIR, replay_file, true);
}
#endif

/* td_msg.h - the messages between processes as plain C, and their bytes (proto/tandem.proto).
 * Encoding and decoding are in td_msg_wire.c, the only place that knows protobuf. A decoded message
 * is checked: parallel arrays have equal lengths, counts are within the limits below, enums are
 * known. Threads: any (plain values). */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/td_buf.h"
#include "common/base/td_status.h"
#include "common/kv/td_block_key.h"
#include "common/trace/td_span.h"

#define TD_WIRE_VERSION 1u
#define TD_MSG_BYTES_MAX (16u << 20)
#define TD_MSG_ID_CHARS_MAX 63u
#define TD_MSG_PROMPT_TOKENS_MAX (1u << 20)
#define TD_MSG_BLOCKS_MAX (1u << 17)
#define TD_MSG_CHOICES_MAX 128u
#define TD_MSG_DRAFTS_MAX 16u /* of one step */
#define TD_MSG_DRAFTERS_MAX 32u
#define TD_MSG_COST_MAX 1e6f        /* times a step without drafts */
#define TD_MSG_DRAFT_PAST_MAX 256u  /* of one message */
#define TD_MSG_DRAFT_WEIGHT_MAX 1e9 /* of a number in it */
#define TD_MSG_STOPS_MAX 16u
#define TD_MSG_STOP_BYTES_MAX 1024u
#define TD_MSG_PEERS_MAX 2048u

typedef enum td_msg_type {
    TD_MSG_NONE = 0,
    TD_MSG_REGISTER = 10,
    TD_MSG_REGISTERED = 11,
    TD_MSG_PEERS = 12,
    TD_MSG_HEARTBEAT = 13,
    TD_MSG_LEASE = 14,
    TD_MSG_RESERVE = 20,
    TD_MSG_RESERVED = 21,
    TD_MSG_START = 22,
    TD_MSG_LAYERS_READY = 23,
    TD_MSG_KV_READY = 24,
    TD_MSG_KV_ACK = 25,
    TD_MSG_KV_FAILED = 26,
    TD_MSG_CANCEL = 27,
    TD_MSG_TOKENS = 28,
    TD_MSG_END = 29,
    TD_MSG_DRAFT_HISTORY = 30,
    TD_MSG_PUT_START = 40,
    TD_MSG_PUT_RESULT = 41,
    TD_MSG_STORE_ORDER = 42,
    TD_MSG_STORE_DONE = 43,
    TD_MSG_EVICT_ORDER = 44,
    TD_MSG_LOOKUP = 45,
    TD_MSG_LOOKUP_RESULT = 46,
    TD_MSG_STORE_PIN = 47,
    TD_MSG_STORE_REMOVE = 48,
    TD_MSG_STORE_RESULT = 49,
    TD_MSG_MOUNT = 50,
    TD_MSG_PROMOTE_ORDER = 51,
    TD_MSG_STORE_MANIFEST = 52,
    TD_MSG_PIN_ORDER = 53,
    TD_MSG_MEMO_PUT = 54,
    TD_MSG_MEMO_GET = 55,
    TD_MSG_MEMO_FOUND = 56,
    TD_MSG_KV_EVENTS = 60,
    TD_MSG_KV_REPLAY = 61
} td_msg_type_t;

typedef enum td_role {
    TD_ROLE_NONE = 0,
    TD_ROLE_ROUTER,
    TD_ROLE_PREFILL,
    TD_ROLE_DECODE,
    TD_ROLE_KVSTORE
} td_role_t;
const char *td_role_name(td_role_t role); /* "router", "prefill", ... */

typedef enum td_finish { TD_FINISH_NONE = 0, TD_FINISH_STOP, TD_FINISH_LENGTH } td_finish_t;

typedef struct td_bytes {
    const uint8_t *at; /* borrowed */
    size_t len;
} td_bytes_t;

#define TD_MSG_DEVICE_CHARS_MAX 95u /* as TD_KV_DEVICE_NAME_MAX */

typedef struct td_msg_region {
    td_bytes_t ucx_address; /* empty: nothing to read here */
    td_bytes_t ucx_rkey;
    uint64_t base;
    uint32_t block_count;
    uint32_t block_bytes;
    const char *device; /* td_transfer_device_name(); "" or NULL: none */
} td_msg_region_t;

typedef struct td_msg_peer {
    const char *id;
    td_role_t role;
    uint64_t incarnation;
    const char *endpoint; /* ZeroMQ */
    td_msg_region_t region;
    bool store_master;
    uint64_t store_term; /* of a store's master */
} td_msg_peer_t;

typedef struct td_msg_register {
    td_msg_peer_t self;
    const char *http;
    td_bytes_t fingerprint; /* 32 bytes, or empty for a store */
    const char *numerics_class;
    const char *kv_codec; /* "" for a store */
    td_bytes_t probe_key;
    uint32_t context_max;
    const char *version;
    uint64_t ticket_epoch; /* another than before: all tickets of this router are void; 0: none */
    uint32_t drafters;     /* decode: bits of td_drafter_t that it offers */
    bool peer_changes;     /* it takes lists of peers that hold changes alone */
} td_msg_register_t;

typedef struct td_msg_registered {
    bool accepted;
    const char *error;
    uint32_t heartbeat_ms;
    uint32_t block_bytes;
    uint32_t block_tokens;
} td_msg_registered_t;

typedef struct td_msg_peers {
    uint64_t version;
    uint64_t since; /* 0: these are all; else what has changed since that version */
    uint32_t count;
    const td_msg_peer_t *peers;
    uint32_t gone_count; /* 0 where these are all */
    const char *const *gone;
} td_msg_peers_t;

typedef struct td_msg_heartbeat {
    uint32_t queued_requests;
    uint32_t queued_tokens;
    uint32_t free_blocks;
    uint32_t total_blocks;
    uint64_t tokens_per_s;
    /* Decode: a choice's share of a step by its drafts, relative to one without, at the batch of
     * now; and of a pass of each drafter, by td_drafter_t: 0 = it needs none. >= 0. */
    uint32_t step_cost_count; /* 0: nothing is said */
    uint32_t pass_cost_count;
    float step_costs[TD_MSG_DRAFTS_MAX + 1];
    float pass_costs[TD_MSG_DRAFTERS_MAX];
    bool draining; /* it takes no new work */
    /* For other routers than the one that is told. Prefill: prompts, their tokens not yet computed.
     * Decode: sequences, of them those that give tokens, blocks that they may grow to. */
    uint32_t other_requests;
    uint32_t other_tokens;
    uint32_t other_blocks;
    uint64_t fetched_bytes; /* KV, from others, in this life */
} td_msg_heartbeat_t;

typedef struct td_msg_lease {
    uint32_t lease_ms;
} td_msg_lease_t;

/** What an earlier attempt has given of a choice. */
typedef struct td_msg_generated {
    const uint32_t *tokens; /* [count] */
    uint32_t count;
    bool ended; /* there are no more */
} td_msg_generated_t;

typedef struct td_msg_work { /* RESERVE and START */
    uint64_t ticket;
    uint32_t attempt;
    uint32_t budget_ms;
    const uint32_t *prompt;
    uint32_t prompt_tokens;
    td_bytes_t cache_salt;
    float temperature;
    uint32_t top_k;
    float top_p;
    float min_p;
    float presence_penalty;
    float frequency_penalty;
    float repetition_penalty;
    uint64_t seed;
    uint32_t bias_count;
    const uint32_t *bias_tokens;
    const float *bias_values;
    uint32_t n;
    uint32_t max_tokens; /* >= 1, clamped to the context by the router */
    uint32_t min_tokens;
    int32_t priority; /* lower is served first */
    uint32_t drafter; /* td_drafter_t; 0 = none */
    uint32_t k_min;   /* drafts verified in a step, where there are so many */
    uint32_t k_max;
    bool self_prefill;          /* RESERVE: no other leg, the decode node computes the prompt */
    uint32_t draft_rule;        /* td_draft_rule_t */
    const uint32_t *prediction; /* [prediction_tokens]: what the client expects */
    uint32_t prediction_tokens;
    uint64_t tenant; /* what drafts were worth is kept by these two */
    uint32_t prompt_class;
    bool ignore_eos;
    bool want_logprobs;
    uint32_t top_logprobs;
    bool prompt_logprobs;
    bool want_hashes;
    uint32_t stop_count;
    const td_bytes_t *stops;
    bool include_stop;
    bool skip_special; /* special tokens give no text */
    const char *peer_id;
    uint64_t peer_incarnation;
    uint32_t have_blocks;
    const char *request_id;
    td_trace_context_t trace;            /* of the span above; not sampled: none */
    uint32_t generated_count;            /* RESERVE: 0, or n where the attempt goes on */
    const td_msg_generated_t *generated; /* [generated_count]: its first tokens, given already */
} td_msg_work_t;

typedef struct td_msg_reserved {
    uint64_t ticket;
    uint32_t attempt;
    td_status_t status;
    uint32_t have_blocks;
} td_msg_reserved_t;

typedef struct td_msg_layers_ready {
    uint64_t ticket;
    uint32_t attempt;
    uint32_t layer_begin;
    uint32_t layer_end;
    uint32_t first_block;
    uint32_t count;
    const uint32_t *blocks;
    const uint64_t *epochs;
} td_msg_layers_ready_t;

typedef struct td_msg_logprobs { /* all empty when not asked for */
    uint32_t count;              /* tokens */
    const float *token_logprobs;
    const uint32_t *top_counts;
    uint32_t top_total;
    const uint32_t *top_tokens;
    const float *top_logprobs;
} td_msg_logprobs_t;

typedef struct td_msg_usage { /* tokens */
    uint32_t prompt_tokens;
    uint32_t completion_tokens;
    uint32_t cached_local_tokens;
    uint32_t cached_store_tokens;
    uint32_t computed_tokens;
    uint32_t accepted_draft_tokens;
    uint32_t rejected_draft_tokens;
} td_msg_usage_t;

typedef struct td_msg_kv_ready {
    uint64_t ticket;
    uint32_t attempt;
    uint32_t first_block;
    uint32_t count;
    const uint32_t *blocks;
    const uint64_t *epochs;
    const uint64_t *checksums;
    const td_block_key_t *keys;
    uint32_t choice_count;
    const uint32_t *first_tokens;
    td_msg_logprobs_t logprobs;
    uint32_t hash_count; /* 0 or choice_count */
    const uint64_t *hashes;
    td_msg_usage_t usage;
} td_msg_kv_ready_t;

typedef struct td_msg_ticket { /* KV_ACK, KV_FAILED (status), CANCEL */
    uint64_t ticket;
    uint32_t attempt;
    td_status_t status;
} td_msg_ticket_t;

typedef struct td_msg_tokens {
    uint64_t ticket;
    uint32_t attempt;
    uint32_t choice;
    uint32_t offset;
    uint32_t count;
    const uint32_t *tokens;
    td_bytes_t text;
    td_finish_t finish;
    td_msg_logprobs_t logprobs;
    uint32_t hash_count; /* 0 or count */
    const uint64_t *hashes;
    bool is_prompt;
    td_bytes_t stop_match;
} td_msg_tokens_t;

/** What a request's drafts were worth, by position in the draft. */
typedef struct td_msg_drafts {
    uint32_t drafter; /* td_drafter_t */
    uint32_t k_max;   /* positions that a draft could have; 0: nothing is said */
    uint32_t steps;   /* of all choices, behind their first tokens */
    uint32_t drafted[TD_MSG_DRAFTS_MAX];
    uint32_t accepted[TD_MSG_DRAFTS_MAX];
    uint32_t tokens; /* that these steps gave */
    uint64_t decode_ns;
    int64_t saved_ns; /* estimated; below 0: steps without drafts would have been faster */
} td_msg_drafts_t;

typedef struct td_msg_end {
    uint64_t ticket;
    uint32_t attempt;
    td_role_t leg;
    td_status_t status;
    td_msg_usage_t usage;
    td_msg_drafts_t drafts;
    uint64_t busy_ns; /* prefill: since its begin, or the node's last end; 0: it doesn't say */
} td_msg_end_t;

/** What drafts were worth lately: as td_draft_past_t (common/spec). */
typedef struct td_msg_draft_past {
    uint64_t tenant;
    uint32_t prompt_class;
    uint32_t drafter;
    double steps[TD_MSG_DRAFTS_MAX];
    double drafted[TD_MSG_DRAFTS_MAX];
    double accepted[TD_MSG_DRAFTS_MAX];
    double tokens;
    double decode_s;
} td_msg_draft_past_t;

typedef struct td_msg_draft_history {
    uint32_t count; /* <= TD_MSG_DRAFT_PAST_MAX */
    const td_msg_draft_past_t *past;
} td_msg_draft_history_t;

#define TD_MSG_MEMO_TOKENS_MAX 2048u

/** MEMO_PUT, MEMO_GET (no tokens), MEMO_FOUND. */
typedef struct td_msg_memo {
    const td_block_key_t *key;
    uint64_t tag;   /* the asker's, of GET and FOUND */
    uint32_t count; /* <= TD_MSG_MEMO_TOKENS_MAX */
    const uint32_t *tokens;
} td_msg_memo_t;

#define TD_MSG_PIN_NONE 0u
#define TD_MSG_PIN_SOFT 1u
#define TD_MSG_PIN_HARD 2u
#define TD_MSG_PIN_MAX TD_MSG_PIN_HARD
#define TD_MSG_MANIFEST_KEYS_MAX 1024u

/** EVICT_ORDER. */
typedef enum td_msg_evict {
    TD_MSG_EVICT_DROP = 0, /* of memory only */
    TD_MSG_EVICT_DEMOTE,   /* for space: the cold tier may keep it */
    TD_MSG_EVICT_REMOVE    /* of memory and of the cold tier */
} td_msg_evict_t;

/** STORE_MANIFEST. */
typedef enum td_msg_manifest {
    TD_MSG_MANIFEST_HERE = 0,
    TD_MSG_MANIFEST_GONE,
    TD_MSG_MANIFEST_RESET,  /* what was told before is void; count may be 0 */
    TD_MSG_MANIFEST_MEMORY, /* readable in memory: where; count may be 0 */
    TD_MSG_MANIFEST_LOST    /* orders of the master did not arrive: count is 0 */
} td_msg_manifest_t;

/** PUT_START, PUT_RESULT, STORE_ORDER, STORE_DONE, EVICT_ORDER, LOOKUP, STORE_PIN, STORE_REMOVE,
 * STORE_RESULT, MOUNT, PROMOTE_ORDER, STORE_MANIFEST, PIN_ORDER: a list of blocks. Which arrays are
 * there follows from the type; the others are NULL. */
typedef struct td_msg_blocks {
    uint64_t request; /* or order */
    uint64_t term;
    uint64_t mount;        /* of all orders, MOUNT and STORE_MANIFEST */
    const char *writer_id; /* STORE_ORDER */
    uint64_t writer_incarnation;
    uint32_t pin; /* STORE_PIN, PIN_ORDER */
    uint32_t how; /* EVICT_ORDER: td_msg_evict_t; STORE_MANIFEST: td_msg_manifest_t */
    uint32_t count;
    const td_block_key_t *keys;
    const td_status_t *statuses;
    const uint32_t *blocks;
    const uint64_t *epochs;
    const uint64_t *checksums; /* STORE_MANIFEST: content hashes, NULL of what is gone; MEMORY:
                                * checksums */
    const uint32_t *pins;      /* STORE_MANIFEST, MEMORY; NULL: nothing is pinned */
    bool is_last;              /* STORE_MANIFEST, MEMORY */
} td_msg_blocks_t;

typedef struct td_msg_lookup_result {
    uint64_t request;
    td_status_t status;
    uint32_t lease_ms;
    uint32_t segment_count;
    const char *const *segment_ids;
    uint32_t count; /* longest prefix found, blocks */
    const uint32_t *segment_of;
    const uint32_t *blocks;
    const uint64_t *epochs;
    const uint64_t *checksums;
} td_msg_lookup_result_t;

#define TD_MSG_KV_KEYS_MAX 4096u /* of one KV_EVENTS */

typedef enum td_msg_kv_kind {
    TD_MSG_KV_CHANGES = 0,
    TD_MSG_KV_CLEARED,  /* one event: nothing is left */
    TD_MSG_KV_SNAPSHOT, /* begins: what was told before is void */
    TD_MSG_KV_PART,     /* of it: these blocks are here, as of the event before `first` */
    TD_MSG_KV_END       /* of it */
} td_msg_kv_kind_t;

/** KV_EVENTS: which blocks a node, or the store as a whole, has. */
typedef struct td_msg_kv_events {
    uint32_t kind;  /* td_msg_kv_kind_t */
    uint64_t first; /* number of the first event in it, >= 1; without one, of the next */
    uint32_t count;
    const td_block_key_t *keys; /* [count] */
    uint32_t run_count;
    const uint32_t *runs; /* CHANGES: keys that came, that went, came, went...; count in all */
    uint64_t snapshot;    /* which one; none of CHANGES and CLEARED */
    uint32_t part;        /* PART: 0, 1, 2...; END: how many there were */
    bool is_head;         /* the sender has told all, and holds: */
    uint32_t blocks;
    uint64_t digest; /* td_block_key_word() of all keys, by exclusive or */
} td_msg_kv_events_t;

/** KV_REPLAY: events from a number on, once more; 0: a snapshot. */
typedef struct td_msg_kv_replay {
    uint64_t from;
} td_msg_kv_replay_t;

typedef struct td_msg {
    td_msg_type_t type;
    const char *sender_id;
    uint64_t sender_incarnation;
    uint64_t receiver_incarnation;
    uint64_t sequence;
    bool gap; /* set on receipt: messages of the sender before this one did not arrive */
    union {
        td_msg_register_t reg;
        td_msg_registered_t registered;
        td_msg_peers_t peers;
        td_msg_heartbeat_t heartbeat;
        td_msg_lease_t lease;
        td_msg_work_t work;
        td_msg_reserved_t reserved;
        td_msg_layers_ready_t layers;
        td_msg_kv_ready_t kv_ready;
        td_msg_ticket_t ticket;
        td_msg_tokens_t tokens;
        td_msg_end_t end;
        td_msg_draft_history_t draft_history;
        td_msg_blocks_t blocks;
        td_msg_lookup_result_t found;
        td_msg_memo_t memo;
        td_msg_kv_events_t kv_events;
        td_msg_kv_replay_t kv_replay;
    } u;
} td_msg_t;

/** Appends a message's bytes to out. Errors: TD_ERR_NO_MEMORY, TD_ERR_TOO_LARGE. */
TD_MUST_CHECK td_status_t td_msg_encode(const td_msg_t *msg, td_str_t *out);

typedef struct td_msg_arena td_msg_arena_t; /* what a decoded message borrows from */
/** Decodes and checks untrusted bytes.
 * Errors: TD_ERR_PROTOCOL (logged: what was wrong), TD_ERR_TOO_LARGE, TD_ERR_NO_MEMORY.
 * Owner:  everything in *msg_out is borrowed from *arena_out; end it with td_msg_arena_free(). The
 *         bytes themselves may go at once. */
TD_MUST_CHECK td_status_t td_msg_decode(const void *bytes, size_t len, td_msg_t *msg_out,
                                        td_msg_arena_t **arena_out);
void td_msg_arena_free(td_msg_arena_t *arena);

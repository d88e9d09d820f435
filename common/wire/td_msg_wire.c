/* Plain messages to protobuf and back. Encoding lends the caller's arrays to protobuf's structs, so
 * nothing is copied but the bytes on the wire; decoding lends protobuf's arrays to the caller. */
#include "common/wire/td_msg.h"

#include <stdatomic.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/base/td_log.h"
#include "proto/tandem.pb-c.h"

#define PB(type) Tandem__V1__##type
/* protobuf-c has no const; nothing below writes through these. */
#define UNCONST(type, ptr) ((type *)(uintptr_t)(ptr))
/* Memory that a message may take: an honest one needs 4 bytes for a byte of packed numbers, a
 * dishonest one 50 and more for each empty string or peer of two bytes. */
#define UNPACKED_BYTES_MAX(len) (65536u + 8 * (len))
#define REFUSAL_LOG_MS 100u

/* A message is unpacked into one piece of memory, and further ones where it is not enough. Under
 * AddressSanitizer each array stands alone, so that reading past one is seen. */
#if defined(__SANITIZE_ADDRESS__)
#define PIECE_BYTES(len) ((size_t)0)
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define PIECE_BYTES(len) ((size_t)0)
#endif
#endif
#ifndef PIECE_BYTES
#define PIECE_BYTES(len) (1024u + 4 * (len))
#endif

typedef struct arena_piece {
    struct arena_piece *next;
    size_t cap; /* bytes */
    size_t used;
    _Alignas(max_align_t) uint8_t bytes[];
} arena_piece_t;

struct td_msg_arena {
    PB(Envelope) * envelope; /* in the pieces */
    void *extra;             /* owned, or NULL: arrays that have another form in C */
    arena_piece_t *pieces;   /* owned; the one in use first */
    size_t left;             /* bytes that may still be taken */
    /* Why unpacking answered NULL: bad bytes, or one of these. */
    bool too_large;
    bool no_memory;
};

const char *td_role_name(td_role_t role)
{
    static const char *const names[] = {"none", "router", "prefill", "decode", "kvstore"};
    return (size_t)role < TD_ARRAY_LEN(names) ? names[role] : "unknown";
}

static char *pb_text(const char *text)
{
    return UNCONST(char, text != NULL ? text : "");
}

static ProtobufCBinaryData pb_bytes(td_bytes_t bytes)
{
    return (ProtobufCBinaryData){.data = UNCONST(uint8_t, bytes.at), .len = bytes.len};
}

static ProtobufCBinaryData pb_keys(const td_block_key_t *keys, uint32_t count)
{
    return (ProtobufCBinaryData){.data = UNCONST(uint8_t, keys),
                                 .len = keys == NULL ? 0 : (size_t)count * TD_BLOCK_KEY_BYTES};
}

/* Sets pb.<field> and pb.n_<field> from an array that may be absent. */
#define PB_ARRAY(pb, field, type, ptr, count)                                                      \
    do {                                                                                           \
        (pb).field = UNCONST(type, ptr);                                                           \
        (pb).n_##field = (ptr) == NULL ? 0 : (count);                                              \
    } while (0)

/* --- encoding -------------------------------------------------------------------------------- */

static td_status_t pack(const td_msg_t *msg, PB(Envelope) * env, td_str_t *out)
{
    size_t bytes = 0;
    size_t before = out->len;

    env->version = TD_WIRE_VERSION;
    env->sender_id = pb_text(msg->sender_id);
    env->sender_incarnation = msg->sender_incarnation;
    env->receiver_incarnation = msg->receiver_incarnation;
    env->sequence = msg->sequence;
    bytes = tandem__v1__envelope__get_packed_size(env);
    if (bytes > TD_MSG_BYTES_MAX) {
        TD_LOG_ERROR("message not sent", "type=%d bytes=%zu limit=%u", (int)msg->type, bytes,
                     TD_MSG_BYTES_MAX);
        return TD_ERR_TOO_LARGE;
    }
    if (out->cap < before + bytes + 1) {
        char *grown = td_realloc(out->bytes, before + bytes + 1);
        if (grown == NULL) {
            return TD_ERR_NO_MEMORY;
        }
        out->bytes = grown;
        out->cap = before + bytes + 1;
    }
    out->len = before + tandem__v1__envelope__pack(env, (uint8_t *)out->bytes + before);
    out->bytes[out->len] = '\0';
    return TD_OK;
}

static void fill_region(const td_msg_region_t *region, PB(Region) * pb)
{
    tandem__v1__region__init(pb);
    pb->ucx_address = pb_bytes(region->ucx_address);
    pb->ucx_rkey = pb_bytes(region->ucx_rkey);
    pb->base_address = region->base;
    pb->block_count = region->block_count;
    pb->block_bytes = region->block_bytes;
    pb->device = pb_text(region->device);
}

static void fill_peer(const td_msg_peer_t *peer, PB(Peer) * pb, PB(Region) * region)
{
    tandem__v1__peer__init(pb);
    fill_region(&peer->region, region);
    pb->id = pb_text(peer->id);
    pb->role = (PB(Role))peer->role;
    pb->incarnation = peer->incarnation;
    pb->endpoint = pb_text(peer->endpoint);
    pb->region = region;
    pb->store_master = peer->store_master;
    pb->store_term = peer->store_term;
}

static void fill_usage(const td_msg_usage_t *usage, PB(Usage) * pb)
{
    tandem__v1__usage__init(pb);
    pb->prompt_tokens = usage->prompt_tokens;
    pb->completion_tokens = usage->completion_tokens;
    pb->cached_local_tokens = usage->cached_local_tokens;
    pb->cached_store_tokens = usage->cached_store_tokens;
    pb->accepted_draft_tokens = usage->accepted_draft_tokens;
    pb->rejected_draft_tokens = usage->rejected_draft_tokens;
    pb->computed_tokens = usage->computed_tokens;
}

static void fill_logprobs(const td_msg_logprobs_t *lp, PB(Logprobs) * pb)
{
    tandem__v1__logprobs__init(pb);
    PB_ARRAY(*pb, token_logprobs, float, lp->token_logprobs, lp->count);
    PB_ARRAY(*pb, top_counts, uint32_t, lp->top_counts, lp->count);
    PB_ARRAY(*pb, top_tokens, uint32_t, lp->top_tokens, lp->top_total);
    PB_ARRAY(*pb, top_logprobs, float, lp->top_logprobs, lp->top_total);
}

static td_status_t encode_register(const td_msg_t *msg, PB(Envelope) * env, td_str_t *out)
{
    const td_msg_register_t *m = &msg->u.reg;
    PB(Register) pb = TANDEM__V1__REGISTER__INIT;
    PB(Peer) self;
    PB(Region) region;

    fill_peer(&m->self, &self, &region);
    pb.self = &self;
    pb.http = pb_text(m->http);
    pb.fingerprint = pb_bytes(m->fingerprint);
    pb.numerics_class = pb_text(m->numerics_class);
    pb.kv_codec = pb_text(m->kv_codec);
    pb.probe_key = pb_bytes(m->probe_key);
    pb.context_max = m->context_max;
    pb.version = pb_text(m->version);
    pb.drafters = m->drafters;
    pb.ticket_epoch = m->ticket_epoch;
    pb.peer_changes = m->peer_changes;
    env->body_case = TANDEM__V1__ENVELOPE__BODY_REGISTER;
    env->register_ = &pb;
    return pack(msg, env, out);
}

static td_status_t encode_registered(const td_msg_t *msg, PB(Envelope) * env, td_str_t *out)
{
    const td_msg_registered_t *m = &msg->u.registered;
    PB(Registered) pb = TANDEM__V1__REGISTERED__INIT;

    pb.accepted = m->accepted;
    pb.error = pb_text(m->error);
    pb.heartbeat_ms = m->heartbeat_ms;
    pb.block_bytes = m->block_bytes;
    pb.block_tokens = m->block_tokens;
    env->body_case = TANDEM__V1__ENVELOPE__BODY_REGISTERED;
    env->registered = &pb;
    return pack(msg, env, out);
}

static td_status_t encode_peers(const td_msg_t *msg, PB(Envelope) * env, td_str_t *out)
{
    const td_msg_peers_t *m = &msg->u.peers;
    PB(Peers) pb = TANDEM__V1__PEERS__INIT;
    PB(Peer) *peers = td_calloc(m->count, sizeof(*peers));
    PB(Region) *regions = td_calloc(m->count, sizeof(*regions));
    PB(Peer) **list = td_calloc(m->count, sizeof(*list));
    td_status_t status = TD_ERR_NO_MEMORY;

    if (peers != NULL && regions != NULL && list != NULL) {
        for (uint32_t i = 0; i < m->count; i++) {
            fill_peer(&m->peers[i], &peers[i], &regions[i]);
            list[i] = &peers[i];
        }
        pb.version = m->version;
        pb.peers = list;
        pb.n_peers = m->count;
        pb.since = m->since;
        pb.gone = UNCONST(char *, m->gone);
        pb.n_gone = m->gone_count;
        env->body_case = TANDEM__V1__ENVELOPE__BODY_PEERS;
        env->peers = &pb;
        status = pack(msg, env, out);
    }
    td_free(list);
    td_free(regions);
    td_free(peers);
    return status;
}

static td_status_t encode_heartbeat(const td_msg_t *msg, PB(Envelope) * env, td_str_t *out)
{
    const td_msg_heartbeat_t *m = &msg->u.heartbeat;
    PB(Heartbeat) pb = TANDEM__V1__HEARTBEAT__INIT;

    pb.queued_requests = m->queued_requests;
    pb.queued_tokens = m->queued_tokens;
    pb.free_blocks = m->free_blocks;
    pb.total_blocks = m->total_blocks;
    pb.tokens_per_s = m->tokens_per_s;
    pb.draining = m->draining;
    pb.other_requests = m->other_requests;
    pb.other_tokens = m->other_tokens;
    pb.other_blocks = m->other_blocks;
    pb.fetched_bytes = m->fetched_bytes;
    TD_ASSERT(m->step_cost_count <= TD_MSG_DRAFTS_MAX + 1 &&
              m->pass_cost_count <= TD_MSG_DRAFTERS_MAX);
    PB_ARRAY(pb, step_costs, float, m->step_costs, m->step_cost_count);
    PB_ARRAY(pb, pass_costs, float, m->pass_costs, m->pass_cost_count);
    env->body_case = TANDEM__V1__ENVELOPE__BODY_HEARTBEAT;
    env->heartbeat = &pb;
    return pack(msg, env, out);
}

static td_status_t encode_lease(const td_msg_t *msg, PB(Envelope) * env, td_str_t *out)
{
    PB(Lease) pb = TANDEM__V1__LEASE__INIT;

    pb.lease_ms = msg->u.lease.lease_ms;
    env->body_case = TANDEM__V1__ENVELOPE__BODY_LEASE;
    env->lease = &pb;
    return pack(msg, env, out);
}

static void fill_sampling(const td_msg_work_t *m, PB(Sampling) * pb)
{
    tandem__v1__sampling__init(pb);
    pb->temperature = m->temperature;
    pb->top_k = m->top_k;
    pb->top_p = m->top_p;
    pb->min_p = m->min_p;
    pb->presence_penalty = m->presence_penalty;
    pb->frequency_penalty = m->frequency_penalty;
    pb->repetition_penalty = m->repetition_penalty;
    pb->seed = m->seed;
    PB_ARRAY(*pb, bias_tokens, uint32_t, m->bias_tokens, m->bias_count);
    PB_ARRAY(*pb, bias_values, float, m->bias_values, m->bias_count);
}

static void fill_generated(const td_msg_generated_t *m, PB(Generated) * pb)
{
    tandem__v1__generated__init(pb);
    PB_ARRAY(*pb, tokens, uint32_t, m->tokens, m->count);
    pb->ended = m->ended;
}

static td_status_t encode_work(const td_msg_t *msg, PB(Envelope) * env, td_str_t *out)
{
    const td_msg_work_t *m = &msg->u.work;
    PB(Work) pb = TANDEM__V1__WORK__INIT;
    PB(Sampling) sampling;
    ProtobufCBinaryData stops[TD_MSG_STOPS_MAX];
    PB(Generated) generated[TD_MSG_CHOICES_MAX];
    PB(Generated) * generated_at[TD_MSG_CHOICES_MAX];
    uint8_t trace[TD_TRACE_WIRE_BYTES];

    fill_sampling(m, &sampling);
    pb.ticket = m->ticket;
    pb.attempt = m->attempt;
    pb.budget_ms = m->budget_ms;
    PB_ARRAY(pb, prompt, uint32_t, m->prompt, m->prompt_tokens);
    pb.cache_salt = pb_bytes(m->cache_salt);
    pb.sampling = &sampling;
    pb.n = m->n;
    pb.max_tokens = m->max_tokens;
    pb.min_tokens = m->min_tokens;
    pb.priority = m->priority;
    pb.drafter = m->drafter;
    pb.k_min = m->k_min;
    pb.k_max = m->k_max;
    pb.draft_rule = m->draft_rule;
    PB_ARRAY(pb, prediction, uint32_t, m->prediction, m->prediction_tokens);
    pb.tenant = m->tenant;
    pb.prompt_class = m->prompt_class;
    pb.ignore_eos = m->ignore_eos;
    pb.want_logprobs = m->want_logprobs;
    pb.top_logprobs = m->top_logprobs;
    pb.prompt_logprobs = m->prompt_logprobs;
    pb.want_hashes = m->want_hashes;
    if (m->stop_count > TD_MSG_STOPS_MAX || m->generated_count > TD_MSG_CHOICES_MAX) {
        return TD_ERR_TOO_LARGE;
    }
    for (uint32_t i = 0; i < m->stop_count; i++) {
        stops[i] = pb_bytes(m->stops[i]);
    }
    pb.stop = stops;
    pb.n_stop = m->stop_count;
    for (uint32_t i = 0; i < m->generated_count; i++) {
        fill_generated(&m->generated[i], &generated[i]);
        generated_at[i] = &generated[i];
    }
    pb.generated = generated_at;
    pb.n_generated = m->generated_count;
    pb.self_prefill = m->self_prefill;
    pb.include_stop = m->include_stop;
    pb.skip_special = m->skip_special;
    pb.peer_id = pb_text(m->peer_id);
    pb.peer_incarnation = m->peer_incarnation;
    pb.have_blocks = m->have_blocks;
    pb.request_id = pb_text(m->request_id);
    if (m->trace.sampled) {
        td_trace_to_wire(&m->trace, trace);
        pb.trace.data = trace;
        pb.trace.len = sizeof(trace);
    }
    if (msg->type == TD_MSG_RESERVE) {
        env->body_case = TANDEM__V1__ENVELOPE__BODY_RESERVE;
        env->reserve = &pb;
    } else {
        env->body_case = TANDEM__V1__ENVELOPE__BODY_START;
        env->start = &pb;
    }
    return pack(msg, env, out);
}

static td_status_t encode_reserved(const td_msg_t *msg, PB(Envelope) * env, td_str_t *out)
{
    const td_msg_reserved_t *m = &msg->u.reserved;
    PB(Reserved) pb = TANDEM__V1__RESERVED__INIT;

    pb.ticket = m->ticket;
    pb.attempt = m->attempt;
    pb.status = (int32_t)m->status;
    pb.have_blocks = m->have_blocks;
    env->body_case = TANDEM__V1__ENVELOPE__BODY_RESERVED;
    env->reserved = &pb;
    return pack(msg, env, out);
}

static td_status_t encode_layers(const td_msg_t *msg, PB(Envelope) * env, td_str_t *out)
{
    const td_msg_layers_ready_t *m = &msg->u.layers;
    PB(LayersReady) pb = TANDEM__V1__LAYERS_READY__INIT;

    pb.ticket = m->ticket;
    pb.attempt = m->attempt;
    pb.layer_begin = m->layer_begin;
    pb.layer_end = m->layer_end;
    pb.first_block = m->first_block;
    PB_ARRAY(pb, blocks, uint32_t, m->blocks, m->count);
    PB_ARRAY(pb, epochs, uint64_t, m->epochs, m->count);
    env->body_case = TANDEM__V1__ENVELOPE__BODY_LAYERS_READY;
    env->layers_ready = &pb;
    return pack(msg, env, out);
}

static td_status_t encode_kv_ready(const td_msg_t *msg, PB(Envelope) * env, td_str_t *out)
{
    const td_msg_kv_ready_t *m = &msg->u.kv_ready;
    PB(KvReady) pb = TANDEM__V1__KV_READY__INIT;
    PB(Logprobs) logprobs;
    PB(Usage) usage;

    fill_logprobs(&m->logprobs, &logprobs);
    fill_usage(&m->usage, &usage);
    pb.ticket = m->ticket;
    pb.attempt = m->attempt;
    pb.first_block = m->first_block;
    PB_ARRAY(pb, blocks, uint32_t, m->blocks, m->count);
    PB_ARRAY(pb, epochs, uint64_t, m->epochs, m->count);
    PB_ARRAY(pb, checksums, uint64_t, m->checksums, m->count);
    pb.keys = pb_keys(m->keys, m->count);
    PB_ARRAY(pb, first_tokens, uint32_t, m->first_tokens, m->choice_count);
    PB_ARRAY(pb, hashes, uint64_t, m->hashes, m->hash_count);
    pb.logprobs = &logprobs;
    pb.usage = &usage;
    env->body_case = TANDEM__V1__ENVELOPE__BODY_KV_READY;
    env->kv_ready = &pb;
    return pack(msg, env, out);
}

static td_status_t encode_ticket(const td_msg_t *msg, PB(Envelope) * env, td_str_t *out)
{
    const td_msg_ticket_t *m = &msg->u.ticket;
    PB(KvAck) ack = TANDEM__V1__KV_ACK__INIT;
    PB(KvFailed) failed = TANDEM__V1__KV_FAILED__INIT;
    PB(Cancel) cancel = TANDEM__V1__CANCEL__INIT;

    ack.ticket = failed.ticket = cancel.ticket = m->ticket;
    ack.attempt = failed.attempt = cancel.attempt = m->attempt;
    failed.status = (int32_t)m->status;
    if (msg->type == TD_MSG_KV_ACK) {
        env->body_case = TANDEM__V1__ENVELOPE__BODY_KV_ACK;
        env->kv_ack = &ack;
    } else if (msg->type == TD_MSG_KV_FAILED) {
        env->body_case = TANDEM__V1__ENVELOPE__BODY_KV_FAILED;
        env->kv_failed = &failed;
    } else {
        env->body_case = TANDEM__V1__ENVELOPE__BODY_CANCEL;
        env->cancel = &cancel;
    }
    return pack(msg, env, out);
}

static td_status_t encode_tokens(const td_msg_t *msg, PB(Envelope) * env, td_str_t *out)
{
    const td_msg_tokens_t *m = &msg->u.tokens;
    PB(Tokens) pb = TANDEM__V1__TOKENS__INIT;
    PB(Logprobs) logprobs;

    fill_logprobs(&m->logprobs, &logprobs);
    pb.ticket = m->ticket;
    pb.attempt = m->attempt;
    pb.choice = m->choice;
    pb.offset = m->offset;
    PB_ARRAY(pb, tokens, uint32_t, m->tokens, m->count);
    pb.text = pb_bytes(m->text);
    pb.finish = (PB(Finish))m->finish;
    pb.logprobs = &logprobs;
    PB_ARRAY(pb, hashes, uint64_t, m->hashes, m->hash_count);
    pb.is_prompt = m->is_prompt;
    pb.stop_match = pb_bytes(m->stop_match);
    env->body_case = TANDEM__V1__ENVELOPE__BODY_TOKENS;
    env->tokens = &pb;
    return pack(msg, env, out);
}

static td_status_t encode_end(const td_msg_t *msg, PB(Envelope) * env, td_str_t *out)
{
    const td_msg_end_t *m = &msg->u.end;
    const td_msg_drafts_t *d = &m->drafts;
    PB(End) pb = TANDEM__V1__END__INIT;
    PB(Drafts) drafts = TANDEM__V1__DRAFTS__INIT;
    PB(Usage) usage;

    fill_usage(&m->usage, &usage);
    TD_ASSERT(d->k_max <= TD_MSG_DRAFTS_MAX);
    if (d->k_max > 0) {
        drafts.drafter = d->drafter;
        drafts.steps = d->steps;
        PB_ARRAY(drafts, drafted, uint32_t, d->drafted, d->k_max);
        PB_ARRAY(drafts, accepted, uint32_t, d->accepted, d->k_max);
        drafts.tokens = d->tokens;
        drafts.decode_ns = d->decode_ns;
        drafts.saved_ns = d->saved_ns;
        pb.drafts = &drafts;
    }
    pb.ticket = m->ticket;
    pb.attempt = m->attempt;
    pb.leg = (PB(Role))m->leg;
    pb.status = (int32_t)m->status;
    pb.usage = &usage;
    pb.busy_ns = m->busy_ns;
    env->body_case = TANDEM__V1__ENVELOPE__BODY_END;
    env->end = &pb;
    return pack(msg, env, out);
}

static void fill_past(const td_msg_draft_past_t *past, PB(DraftPast) * pb)
{
    tandem__v1__draft_past__init(pb);
    pb->tenant = past->tenant;
    pb->prompt_class = past->prompt_class;
    pb->drafter = past->drafter;
    PB_ARRAY(*pb, steps, double, past->steps, TD_MSG_DRAFTS_MAX);
    PB_ARRAY(*pb, drafted, double, past->drafted, TD_MSG_DRAFTS_MAX);
    PB_ARRAY(*pb, accepted, double, past->accepted, TD_MSG_DRAFTS_MAX);
    pb->tokens = past->tokens;
    pb->decode_s = past->decode_s;
}

static td_status_t encode_memo(const td_msg_t *msg, PB(Envelope) * env, td_str_t *out)
{
    const td_msg_memo_t *m = &msg->u.memo;
    PB(Memo) pb = TANDEM__V1__MEMO__INIT;

    pb.key = pb_keys(m->key, 1);
    pb.tag = m->tag;
    PB_ARRAY(pb, tokens, uint32_t, m->tokens, m->count);
    if (msg->type == TD_MSG_MEMO_PUT) {
        env->body_case = TANDEM__V1__ENVELOPE__BODY_MEMO_PUT;
        env->memo_put = &pb;
    } else if (msg->type == TD_MSG_MEMO_GET) {
        env->body_case = TANDEM__V1__ENVELOPE__BODY_MEMO_GET;
        env->memo_get = &pb;
    } else {
        env->body_case = TANDEM__V1__ENVELOPE__BODY_MEMO_FOUND;
        env->memo_found = &pb;
    }
    return pack(msg, env, out);
}

static td_status_t encode_kv_events(const td_msg_t *msg, PB(Envelope) * env, td_str_t *out)
{
    const td_msg_kv_events_t *m = &msg->u.kv_events;
    PB(KvEvents) pb = TANDEM__V1__KV_EVENTS__INIT;

    pb.kind = (PB(KvEventsKind))m->kind;
    pb.first = m->first;
    pb.keys = pb_keys(m->keys, m->count);
    PB_ARRAY(pb, runs, uint32_t, m->runs, m->run_count);
    pb.snapshot = m->snapshot;
    pb.part = m->part;
    pb.is_head = m->is_head;
    pb.blocks = m->blocks;
    pb.digest = m->digest;
    env->body_case = TANDEM__V1__ENVELOPE__BODY_KV_EVENTS;
    env->kv_events = &pb;
    return pack(msg, env, out);
}

static td_status_t encode_kv_replay(const td_msg_t *msg, PB(Envelope) * env, td_str_t *out)
{
    PB(KvReplay) pb = TANDEM__V1__KV_REPLAY__INIT;

    pb.from = msg->u.kv_replay.from;
    env->body_case = TANDEM__V1__ENVELOPE__BODY_KV_REPLAY;
    env->kv_replay = &pb;
    return pack(msg, env, out);
}

static td_status_t encode_draft_history(const td_msg_t *msg, PB(Envelope) * env, td_str_t *out)
{
    const td_msg_draft_history_t *m = &msg->u.draft_history;
    PB(DraftHistory) pb = TANDEM__V1__DRAFT_HISTORY__INIT;
    PB(DraftPast) past[TD_MSG_DRAFT_PAST_MAX];
    PB(DraftPast) * list[TD_MSG_DRAFT_PAST_MAX];

    if (m->count > TD_MSG_DRAFT_PAST_MAX) {
        return TD_ERR_TOO_LARGE;
    }
    for (uint32_t i = 0; i < m->count; i++) {
        fill_past(&m->past[i], &past[i]);
        list[i] = &past[i];
    }
    pb.past = list;
    pb.n_past = m->count;
    env->body_case = TANDEM__V1__ENVELOPE__BODY_DRAFT_HISTORY;
    env->draft_history = &pb;
    return pack(msg, env, out);
}

static td_status_t encode_blocks(const td_msg_t *msg, PB(Envelope) * env, td_str_t *out)
{
    const td_msg_blocks_t *m = &msg->u.blocks;
    PB(PutStart) put = TANDEM__V1__PUT_START__INIT;
    PB(PutResult) result = TANDEM__V1__PUT_RESULT__INIT;
    PB(StoreOrder) order = TANDEM__V1__STORE_ORDER__INIT;
    PB(StoreDone) done = TANDEM__V1__STORE_DONE__INIT;
    PB(EvictOrder) evict = TANDEM__V1__EVICT_ORDER__INIT;
    PB(Lookup) lookup = TANDEM__V1__LOOKUP__INIT;
    PB(StorePin) pin = TANDEM__V1__STORE_PIN__INIT;
    PB(StoreRemove) removal = TANDEM__V1__STORE_REMOVE__INIT;
    PB(Mount) mount = TANDEM__V1__MOUNT__INIT;
    PB(PromoteOrder) promote = TANDEM__V1__PROMOTE_ORDER__INIT;
    PB(PinOrder) pin_order = TANDEM__V1__PIN_ORDER__INIT;
    PB(StoreManifest) manifest = TANDEM__V1__STORE_MANIFEST__INIT;
    _Static_assert(sizeof(td_status_t) == sizeof(int32_t), "statuses travel as sint32");

    switch (msg->type) {
    case TD_MSG_PUT_START:
        put.request = m->request;
        put.keys = pb_keys(m->keys, m->count);
        PB_ARRAY(put, blocks, uint32_t, m->blocks, m->count);
        PB_ARRAY(put, epochs, uint64_t, m->epochs, m->count);
        PB_ARRAY(put, checksums, uint64_t, m->checksums, m->count);
        env->body_case = TANDEM__V1__ENVELOPE__BODY_PUT_START;
        env->put_start = &put;
        break;
    case TD_MSG_PUT_RESULT:
    case TD_MSG_STORE_RESULT:
        result.request = m->request;
        result.keys = pb_keys(m->keys, m->count);
        PB_ARRAY(result, statuses, int32_t, m->statuses, m->count);
        if (msg->type == TD_MSG_PUT_RESULT) {
            env->body_case = TANDEM__V1__ENVELOPE__BODY_PUT_RESULT;
            env->put_result = &result;
        } else {
            env->body_case = TANDEM__V1__ENVELOPE__BODY_STORE_RESULT;
            env->store_result = &result;
        }
        break;
    case TD_MSG_STORE_ORDER:
        order.order = m->request;
        order.term = m->term;
        order.mount = m->mount;
        order.writer_id = pb_text(m->writer_id);
        order.writer_incarnation = m->writer_incarnation;
        order.keys = pb_keys(m->keys, m->count);
        PB_ARRAY(order, blocks, uint32_t, m->blocks, m->count);
        PB_ARRAY(order, epochs, uint64_t, m->epochs, m->count);
        PB_ARRAY(order, checksums, uint64_t, m->checksums, m->count);
        env->body_case = TANDEM__V1__ENVELOPE__BODY_STORE_ORDER;
        env->store_order = &order;
        break;
    case TD_MSG_STORE_DONE:
        done.order = m->request;
        done.term = m->term;
        done.keys = pb_keys(m->keys, m->count);
        PB_ARRAY(done, statuses, int32_t, m->statuses, m->count);
        PB_ARRAY(done, blocks, uint32_t, m->blocks, m->count);
        PB_ARRAY(done, epochs, uint64_t, m->epochs, m->count);
        PB_ARRAY(done, checksums, uint64_t, m->checksums, m->count);
        env->body_case = TANDEM__V1__ENVELOPE__BODY_STORE_DONE;
        env->store_done = &done;
        break;
    case TD_MSG_EVICT_ORDER:
        evict.term = m->term;
        evict.mount = m->mount;
        evict.keys = pb_keys(m->keys, m->count);
        evict.how = (PB(Eviction))m->how;
        env->body_case = TANDEM__V1__ENVELOPE__BODY_EVICT_ORDER;
        env->evict_order = &evict;
        break;
    case TD_MSG_STORE_PIN:
        pin.request = m->request;
        pin.keys = pb_keys(m->keys, m->count);
        pin.pin = (PB(Pin))m->pin;
        env->body_case = TANDEM__V1__ENVELOPE__BODY_STORE_PIN;
        env->store_pin = &pin;
        break;
    case TD_MSG_STORE_REMOVE:
        removal.request = m->request;
        removal.keys = pb_keys(m->keys, m->count);
        env->body_case = TANDEM__V1__ENVELOPE__BODY_STORE_REMOVE;
        env->store_remove = &removal;
        break;
    case TD_MSG_MOUNT:
        mount.term = m->term;
        mount.mount = m->mount;
        env->body_case = TANDEM__V1__ENVELOPE__BODY_MOUNT;
        env->mount = &mount;
        break;
    case TD_MSG_PIN_ORDER:
        pin_order.term = m->term;
        pin_order.mount = m->mount;
        pin_order.keys = pb_keys(m->keys, m->count);
        pin_order.pin = (PB(Pin))m->pin;
        env->body_case = TANDEM__V1__ENVELOPE__BODY_PIN_ORDER;
        env->pin_order = &pin_order;
        break;
    case TD_MSG_PROMOTE_ORDER:
        promote.order = m->request;
        promote.term = m->term;
        promote.mount = m->mount;
        promote.keys = pb_keys(m->keys, m->count);
        env->body_case = TANDEM__V1__ENVELOPE__BODY_PROMOTE_ORDER;
        env->promote_order = &promote;
        break;
    case TD_MSG_STORE_MANIFEST:
        manifest.term = m->term;
        manifest.mount = m->mount;
        manifest.change = (PB(Manifest))m->how;
        manifest.keys = pb_keys(m->keys, m->count);
        if (m->how != TD_MSG_MANIFEST_GONE) {
            PB_ARRAY(manifest, hashes, uint64_t, m->checksums, m->count);
        }
        if (m->how == TD_MSG_MANIFEST_MEMORY) {
            PB_ARRAY(manifest, blocks, uint32_t, m->blocks, m->count);
            PB_ARRAY(manifest, epochs, uint64_t, m->epochs, m->count);
            PB_ARRAY(manifest, pins, uint32_t, m->pins, m->count);
            manifest.is_last = m->is_last;
        }
        env->body_case = TANDEM__V1__ENVELOPE__BODY_STORE_MANIFEST;
        env->store_manifest = &manifest;
        break;
    default:
        lookup.request = m->request;
        lookup.keys = pb_keys(m->keys, m->count);
        env->body_case = TANDEM__V1__ENVELOPE__BODY_LOOKUP;
        env->lookup = &lookup;
        break;
    }
    return pack(msg, env, out);
}

static td_status_t encode_lookup_result(const td_msg_t *msg, PB(Envelope) * env, td_str_t *out)
{
    const td_msg_lookup_result_t *m = &msg->u.found;
    PB(LookupResult) pb = TANDEM__V1__LOOKUP_RESULT__INIT;

    pb.request = m->request;
    pb.status = (int32_t)m->status;
    pb.lease_ms = m->lease_ms;
    pb.segment_ids = UNCONST(char *, m->segment_ids);
    pb.n_segment_ids = m->segment_count;
    PB_ARRAY(pb, segment_of, uint32_t, m->segment_of, m->count);
    PB_ARRAY(pb, blocks, uint32_t, m->blocks, m->count);
    PB_ARRAY(pb, epochs, uint64_t, m->epochs, m->count);
    PB_ARRAY(pb, checksums, uint64_t, m->checksums, m->count);
    env->body_case = TANDEM__V1__ENVELOPE__BODY_LOOKUP_RESULT;
    env->lookup_result = &pb;
    return pack(msg, env, out);
}

td_status_t td_msg_encode(const td_msg_t *msg, td_str_t *out)
{
    PB(Envelope) env = TANDEM__V1__ENVELOPE__INIT;

    switch (msg->type) {
    case TD_MSG_REGISTER:
        return encode_register(msg, &env, out);
    case TD_MSG_REGISTERED:
        return encode_registered(msg, &env, out);
    case TD_MSG_PEERS:
        return encode_peers(msg, &env, out);
    case TD_MSG_HEARTBEAT:
        return encode_heartbeat(msg, &env, out);
    case TD_MSG_LEASE:
        return encode_lease(msg, &env, out);
    case TD_MSG_RESERVE:
    case TD_MSG_START:
        return encode_work(msg, &env, out);
    case TD_MSG_RESERVED:
        return encode_reserved(msg, &env, out);
    case TD_MSG_LAYERS_READY:
        return encode_layers(msg, &env, out);
    case TD_MSG_KV_READY:
        return encode_kv_ready(msg, &env, out);
    case TD_MSG_KV_ACK:
    case TD_MSG_KV_FAILED:
    case TD_MSG_CANCEL:
        return encode_ticket(msg, &env, out);
    case TD_MSG_TOKENS:
        return encode_tokens(msg, &env, out);
    case TD_MSG_END:
        return encode_end(msg, &env, out);
    case TD_MSG_DRAFT_HISTORY:
        return encode_draft_history(msg, &env, out);
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
    case TD_MSG_PIN_ORDER:
    case TD_MSG_PROMOTE_ORDER:
    case TD_MSG_STORE_MANIFEST:
        return encode_blocks(msg, &env, out);
    case TD_MSG_LOOKUP_RESULT:
        return encode_lookup_result(msg, &env, out);
    case TD_MSG_MEMO_PUT:
    case TD_MSG_MEMO_GET:
    case TD_MSG_MEMO_FOUND:
        return encode_memo(msg, &env, out);
    case TD_MSG_KV_EVENTS:
        return encode_kv_events(msg, &env, out);
    case TD_MSG_KV_REPLAY:
        return encode_kv_replay(msg, &env, out);
    case TD_MSG_NONE:
        break;
    }
    TD_ASSERT(!"message type without an encoder");
    return TD_ERR_INTERNAL;
}

/* --- decoding -------------------------------------------------------------------------------- */

/* Garbage comes in floods; its log lines do not. */
static bool refusal_is_logged(void)
{
    static atomic_uint_fast64_t next_ns; /* relaxed: a line more or less */
    uint64_t now = td_now_ns();
    if (now < atomic_load_explicit(&next_ns, memory_order_relaxed)) {
        return false;
    }
    atomic_store_explicit(&next_ns, now + REFUSAL_LOG_MS * TD_NS_PER_MS, memory_order_relaxed);
    return true;
}

/* Every check reads as: what must hold, else the name of what was wrong goes into the log line. */
#define MUST(cond, what)                                                                           \
    do {                                                                                           \
        if (!(cond)) {                                                                             \
            if (refusal_is_logged()) {                                                             \
                TD_LOG_WARN("message refused", "why=\"%s\"", what);                                \
            }                                                                                      \
            return TD_ERR_PROTOCOL;                                                                \
        }                                                                                          \
    } while (0)

static td_bytes_t from_bytes(const ProtobufCBinaryData *pb)
{
    return (td_bytes_t){.at = pb->data, .len = pb->len};
}

static bool id_ok(const char *id)
{
    size_t len = strlen(id);
    for (size_t i = 0; i < len; i++) {
        if (id[i] <= 0x20 || id[i] > 0x7e) {
            return false; /* ids go into logs and headers */
        }
    }
    return len <= TD_MSG_ID_CHARS_MAX;
}

static td_status_t read_region(const PB(Region) * pb, td_msg_region_t *region)
{
    if (pb == NULL) {
        return TD_OK;
    }
    MUST(pb->ucx_address.len <= 4096 && pb->ucx_rkey.len <= 4096, "region address over 4096 bytes");
    MUST(pb->ucx_address.len == 0 || (pb->block_bytes > 0 && pb->block_count > 0),
         "region without blocks");
    MUST(strlen(pb->device) <= TD_MSG_DEVICE_CHARS_MAX, "device's name too long");
    region->ucx_address = from_bytes(&pb->ucx_address);
    region->ucx_rkey = from_bytes(&pb->ucx_rkey);
    region->base = pb->base_address;
    region->block_count = pb->block_count;
    region->block_bytes = pb->block_bytes;
    region->device = pb->device;
    return TD_OK;
}

static td_status_t read_peer(const PB(Peer) * pb, td_msg_peer_t *peer)
{
    MUST(pb != NULL && pb->id[0] != '\0' && id_ok(pb->id),
         "peer id empty, too long or unprintable");
    MUST(pb->role >= 1 && (int)pb->role <= TD_ROLE_KVSTORE, "peer role unknown");
    MUST(strlen(pb->endpoint) <= 255, "peer endpoint over 255 characters");
    peer->id = pb->id;
    peer->role = (td_role_t)pb->role;
    peer->incarnation = pb->incarnation;
    peer->endpoint = pb->endpoint;
    peer->store_master = pb->store_master;
    peer->store_term = pb->store_term;
    return read_region(pb->region, &peer->region);
}

static td_status_t read_register(const PB(Register) * pb, td_msg_register_t *m)
{
    TD_TRY(read_peer(pb->self, &m->self));
    MUST(pb->fingerprint.len == 0 || pb->fingerprint.len == 32, "fingerprint is not 32 bytes");
    MUST(strlen(pb->numerics_class) < 64 && strlen(pb->kv_codec) < 64 && strlen(pb->http) < 256 &&
             strlen(pb->version) < 64,
         "register text too long");
    m->http = pb->http;
    m->fingerprint = from_bytes(&pb->fingerprint);
    m->numerics_class = pb->numerics_class;
    m->kv_codec = pb->kv_codec;
    m->probe_key = from_bytes(&pb->probe_key);
    m->context_max = pb->context_max;
    m->version = pb->version;
    m->drafters = pb->drafters;
    m->ticket_epoch = pb->ticket_epoch;
    m->peer_changes = pb->peer_changes;
    return TD_OK;
}

static td_status_t read_costs(const float *costs, size_t count, size_t limit, float *out)
{
    MUST(count <= limit, "heartbeat: too many costs");
    for (size_t i = 0; i < count; i++) {
        MUST(costs[i] >= 0 && costs[i] <= TD_MSG_COST_MAX, "heartbeat: a cost that is none");
        out[i] = costs[i];
    }
    return TD_OK;
}

static td_status_t read_heartbeat(const PB(Heartbeat) * pb, td_msg_heartbeat_t *m)
{
    *m = (td_msg_heartbeat_t){
        .queued_requests = pb->queued_requests,
        .queued_tokens = pb->queued_tokens,
        .free_blocks = pb->free_blocks,
        .total_blocks = pb->total_blocks,
        .tokens_per_s = pb->tokens_per_s,
        .draining = pb->draining,
        .other_requests = pb->other_requests,
        .other_tokens = pb->other_tokens,
        .other_blocks = pb->other_blocks,
        .fetched_bytes = pb->fetched_bytes,
        .step_cost_count = (uint32_t)pb->n_step_costs,
        .pass_cost_count = (uint32_t)pb->n_pass_costs,
    };
    TD_TRY(
        read_costs(pb->step_costs, pb->n_step_costs, TD_ARRAY_LEN(m->step_costs), m->step_costs));
    return read_costs(pb->pass_costs, pb->n_pass_costs, TD_ARRAY_LEN(m->pass_costs), m->pass_costs);
}

static td_status_t read_peers(const PB(Peers) * pb, td_msg_peers_t *m, td_msg_arena_t *arena)
{
    td_msg_peer_t *peers = NULL;

    MUST(pb->n_peers <= TD_MSG_PEERS_MAX && pb->n_gone <= TD_MSG_PEERS_MAX, "too many peers");
    MUST(pb->since != 0 || pb->n_gone == 0, "peers gone of a whole list");
    MUST(pb->since <= pb->version, "changes since a later version");
    for (size_t i = 0; i < pb->n_gone; i++) {
        MUST(id_ok(pb->gone[i]), "id too long or unprintable");
    }
    peers = td_calloc(pb->n_peers, sizeof(*peers));
    if (peers == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    arena->extra = peers;
    for (size_t i = 0; i < pb->n_peers; i++) {
        TD_TRY(read_peer(pb->peers[i], &peers[i]));
    }
    m->version = pb->version;
    m->since = pb->since;
    m->count = (uint32_t)pb->n_peers;
    m->peers = peers;
    m->gone_count = (uint32_t)pb->n_gone;
    m->gone = (const char *const *)pb->gone;
    return TD_OK;
}

/* Of a choice that ended there is nothing to go on with, so its tokens may be left out. */
static td_status_t read_generated(const PB(Work) * pb, td_msg_generated_t *out)
{
    for (size_t i = 0; i < pb->n_generated; i++) {
        const PB(Generated) *g = pb->generated[i];
        MUST(g->n_tokens <= pb->max_tokens, "more generated than max_tokens");
        MUST(g->ended || g->n_tokens < pb->max_tokens, "max_tokens generated, yet not ended");
        out[i] = (td_msg_generated_t){
            .tokens = g->tokens, .count = (uint32_t)g->n_tokens, .ended = g->ended};
    }
    return TD_OK;
}

static td_status_t read_work(const PB(Work) * pb, td_msg_work_t *m, td_msg_arena_t *arena)
{
    const PB(Sampling) *s = pb->sampling;
    td_msg_generated_t *generated = NULL;
    td_bytes_t *stops = NULL;

    MUST(pb->n_prompt >= 1 && pb->n_prompt <= TD_MSG_PROMPT_TOKENS_MAX,
         "prompt empty or over the token limit");
    MUST(pb->cache_salt.len <= TD_CACHE_SALT_BYTES_MAX, "cache salt too long");
    MUST(s != NULL && s->n_bias_tokens == s->n_bias_values && s->n_bias_tokens <= 1024,
         "sampling absent, or logit_bias arrays differ");
    MUST(pb->n >= 1 && pb->n <= TD_MSG_CHOICES_MAX, "n out of range");
    MUST(pb->max_tokens >= 1, "max_tokens is 0");
    MUST(pb->top_logprobs <= 20, "top_logprobs over 20");
    MUST(pb->k_min <= pb->k_max && pb->k_max <= TD_MSG_DRAFTS_MAX, "draft lengths out of range");
    MUST(pb->n_prediction <= TD_MSG_PROMPT_TOKENS_MAX, "prediction over the token limit");
    MUST(pb->n_stop <= TD_MSG_STOPS_MAX, "too many stop strings");
    MUST(id_ok(pb->peer_id) && id_ok(pb->request_id), "id too long or unprintable");
    MUST(pb->trace.len == 0 || pb->trace.len == TD_TRACE_WIRE_BYTES, "trace is not 24 bytes");
    MUST(pb->n_generated == 0 || pb->n_generated == pb->n, "generated of some choices only");
    /* Both in one piece. */
    generated = td_calloc(1, pb->n_generated * sizeof(*generated) + pb->n_stop * sizeof(*stops));
    if (generated == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    arena->extra = generated;
    stops = (td_bytes_t *)(generated + pb->n_generated);
    TD_TRY(read_generated(pb, generated));
    for (size_t i = 0; i < pb->n_stop; i++) {
        MUST(pb->stop[i].len >= 1 && pb->stop[i].len <= TD_MSG_STOP_BYTES_MAX,
             "stop string empty or too long");
        stops[i] = from_bytes(&pb->stop[i]);
    }
    *m = (td_msg_work_t){
        .ticket = pb->ticket,
        .attempt = pb->attempt,
        .budget_ms = pb->budget_ms,
        .prompt = pb->prompt,
        .prompt_tokens = (uint32_t)pb->n_prompt,
        .cache_salt = from_bytes(&pb->cache_salt),
        .temperature = s->temperature,
        .top_k = s->top_k,
        .top_p = s->top_p,
        .min_p = s->min_p,
        .presence_penalty = s->presence_penalty,
        .frequency_penalty = s->frequency_penalty,
        .repetition_penalty = s->repetition_penalty,
        .seed = s->seed,
        .bias_count = (uint32_t)s->n_bias_tokens,
        .bias_tokens = s->bias_tokens,
        .bias_values = s->bias_values,
        .n = pb->n,
        .max_tokens = pb->max_tokens,
        .min_tokens = pb->min_tokens,
        .priority = pb->priority,
        .drafter = pb->drafter,
        .k_min = pb->k_min,
        .k_max = pb->k_max,
        .draft_rule = pb->draft_rule,
        .prediction = pb->prediction,
        .prediction_tokens = (uint32_t)pb->n_prediction,
        .tenant = pb->tenant,
        .prompt_class = pb->prompt_class,
        .ignore_eos = pb->ignore_eos,
        .want_logprobs = pb->want_logprobs,
        .top_logprobs = pb->top_logprobs,
        .prompt_logprobs = pb->prompt_logprobs,
        .want_hashes = pb->want_hashes,
        .stop_count = (uint32_t)pb->n_stop,
        .stops = stops,
        .self_prefill = pb->self_prefill,
        .include_stop = pb->include_stop,
        .skip_special = pb->skip_special,
        .peer_id = pb->peer_id,
        .peer_incarnation = pb->peer_incarnation,
        .have_blocks = pb->have_blocks,
        .request_id = pb->request_id,
        .generated_count = (uint32_t)pb->n_generated,
        .generated = generated,
    };
    if (pb->trace.len > 0) {
        td_trace_from_wire(pb->trace.data, &m->trace);
    }
    return TD_OK;
}

static td_status_t read_logprobs(const PB(Logprobs) * pb, size_t tokens, td_msg_logprobs_t *m)
{
    uint64_t total = 0;

    if (pb == NULL || pb->n_token_logprobs == 0) {
        return TD_OK;
    }
    MUST(pb->n_token_logprobs == tokens, "logprobs: one for each token expected");
    MUST(pb->n_top_counts == 0 || pb->n_top_counts == tokens, "logprobs: top_counts length");
    for (size_t i = 0; i < pb->n_top_counts; i++) {
        MUST(pb->top_counts[i] <= 20, "logprobs: more than 20 tops");
        total += pb->top_counts[i];
    }
    MUST(pb->n_top_tokens == total && pb->n_top_logprobs == total, "logprobs: top array lengths");
    m->count = (uint32_t)tokens;
    m->token_logprobs = pb->token_logprobs;
    m->top_counts = pb->n_top_counts == 0 ? NULL : pb->top_counts;
    m->top_total = (uint32_t)total;
    m->top_tokens = pb->top_tokens;
    m->top_logprobs = pb->top_logprobs;
    return TD_OK;
}

static void read_usage(const PB(Usage) * pb, td_msg_usage_t *m)
{
    if (pb != NULL) {
        m->prompt_tokens = pb->prompt_tokens;
        m->completion_tokens = pb->completion_tokens;
        m->cached_local_tokens = pb->cached_local_tokens;
        m->cached_store_tokens = pb->cached_store_tokens;
        m->computed_tokens = pb->computed_tokens;
        m->accepted_draft_tokens = pb->accepted_draft_tokens;
        m->rejected_draft_tokens = pb->rejected_draft_tokens;
    }
}

static td_status_t read_layers(const PB(LayersReady) * pb, td_msg_layers_ready_t *m)
{
    MUST(pb->n_blocks >= 1 && pb->n_blocks <= TD_MSG_BLOCKS_MAX && pb->n_epochs == pb->n_blocks,
         "layers_ready: array lengths");
    MUST(pb->layer_begin < pb->layer_end, "layers_ready: empty range of layers");
    MUST(pb->first_block <= TD_MSG_BLOCKS_MAX, "layers_ready: first_block");
    m->ticket = pb->ticket;
    m->attempt = pb->attempt;
    m->layer_begin = pb->layer_begin;
    m->layer_end = pb->layer_end;
    m->first_block = pb->first_block;
    m->count = (uint32_t)pb->n_blocks;
    m->blocks = pb->blocks;
    m->epochs = pb->epochs;
    return TD_OK;
}

static td_status_t read_kv_ready(const PB(KvReady) * pb, td_msg_kv_ready_t *m)
{
    size_t n = pb->n_blocks;

    MUST(n <= TD_MSG_BLOCKS_MAX && pb->n_epochs == n && pb->n_checksums == n &&
             pb->keys.len == n * TD_BLOCK_KEY_BYTES,
         "kv_ready: array lengths");
    MUST(pb->first_block <= TD_MSG_BLOCKS_MAX, "kv_ready: first_block");
    MUST(pb->n_first_tokens >= 1 && pb->n_first_tokens <= TD_MSG_CHOICES_MAX,
         "kv_ready: first token of each choice expected");
    MUST(pb->n_hashes == 0 || pb->n_hashes == pb->n_first_tokens, "kv_ready: hashes");
    m->ticket = pb->ticket;
    m->attempt = pb->attempt;
    m->first_block = pb->first_block;
    m->count = (uint32_t)n;
    m->blocks = pb->blocks;
    m->epochs = pb->epochs;
    m->checksums = pb->checksums;
    m->keys = (const td_block_key_t *)pb->keys.data;
    m->choice_count = (uint32_t)pb->n_first_tokens;
    m->first_tokens = pb->first_tokens;
    m->hash_count = (uint32_t)pb->n_hashes;
    m->hashes = pb->hashes;
    read_usage(pb->usage, &m->usage);
    return read_logprobs(pb->logprobs, pb->n_first_tokens, &m->logprobs);
}

static td_status_t read_tokens(const PB(Tokens) * pb, td_msg_tokens_t *m)
{
    MUST(pb->n_tokens <= TD_MSG_PROMPT_TOKENS_MAX, "tokens: too many");
    MUST(pb->choice < TD_MSG_CHOICES_MAX, "tokens: choice");
    MUST(pb->n_hashes == 0 || pb->n_hashes == pb->n_tokens, "tokens: hashes");
    MUST((int)pb->finish >= 0 && (int)pb->finish <= TD_FINISH_LENGTH, "tokens: finish reason");
    m->ticket = pb->ticket;
    m->attempt = pb->attempt;
    m->choice = pb->choice;
    m->offset = pb->offset;
    m->count = (uint32_t)pb->n_tokens;
    m->tokens = pb->tokens;
    m->text = from_bytes(&pb->text);
    m->finish = (td_finish_t)pb->finish;
    m->hash_count = (uint32_t)pb->n_hashes;
    m->hashes = pb->hashes;
    m->is_prompt = pb->is_prompt;
    m->stop_match = from_bytes(&pb->stop_match);
    return read_logprobs(pb->logprobs, pb->n_tokens, &m->logprobs);
}

static td_status_t read_drafts(const PB(Drafts) * pb, td_msg_drafts_t *m)
{
    MUST(pb->n_drafted >= 1 && pb->n_drafted <= TD_MSG_DRAFTS_MAX &&
             pb->n_accepted == pb->n_drafted,
         "end: lengths of drafts");
    for (size_t i = 0; i < pb->n_drafted; i++) {
        MUST(pb->accepted[i] <= pb->drafted[i] && pb->drafted[i] <= pb->steps,
             "end: more accepted than drafted, or drafted than steps");
        m->drafted[i] = pb->drafted[i];
        m->accepted[i] = pb->accepted[i];
    }
    m->drafter = pb->drafter;
    m->k_max = (uint32_t)pb->n_drafted;
    m->steps = pb->steps;
    m->tokens = pb->tokens;
    m->decode_ns = pb->decode_ns;
    m->saved_ns = pb->saved_ns;
    return TD_OK;
}

static td_status_t read_end(const PB(End) * pb, td_msg_end_t *m)
{
    MUST(pb->leg == TANDEM__V1__ROLE__ROLE_PREFILL || pb->leg == TANDEM__V1__ROLE__ROLE_DECODE,
         "end: leg");
    m->ticket = pb->ticket;
    m->attempt = pb->attempt;
    m->leg = (td_role_t)pb->leg;
    m->status = (td_status_t)pb->status;
    read_usage(pb->usage, &m->usage);
    m->busy_ns = pb->busy_ns;
    return pb->drafts == NULL ? TD_OK : read_drafts(pb->drafts, &m->drafts);
}

static bool is_weight(double value)
{
    return value >= 0 && value <= TD_MSG_DRAFT_WEIGHT_MAX; /* nor is it a NaN */
}

static td_status_t read_past(const PB(DraftPast) * pb, td_msg_draft_past_t *m)
{
    MUST(pb->n_steps == TD_MSG_DRAFTS_MAX && pb->n_drafted == TD_MSG_DRAFTS_MAX &&
             pb->n_accepted == TD_MSG_DRAFTS_MAX,
         "draft_history: array lengths");
    MUST(is_weight(pb->tokens) && is_weight(pb->decode_s), "draft_history: tokens or time");
    for (size_t i = 0; i < TD_MSG_DRAFTS_MAX; i++) {
        MUST(is_weight(pb->steps[i]) && is_weight(pb->drafted[i]) && is_weight(pb->accepted[i]) &&
                 pb->accepted[i] <= pb->drafted[i] && pb->drafted[i] <= pb->steps[i],
             "draft_history: more accepted than drafted, or drafted than steps");
    }
    m->tenant = pb->tenant;
    m->prompt_class = pb->prompt_class;
    m->drafter = pb->drafter;
    memcpy(m->steps, pb->steps, sizeof(m->steps));
    memcpy(m->drafted, pb->drafted, sizeof(m->drafted));
    memcpy(m->accepted, pb->accepted, sizeof(m->accepted));
    m->tokens = pb->tokens;
    m->decode_s = pb->decode_s;
    return TD_OK;
}

static td_status_t read_draft_history(const PB(DraftHistory) * pb, td_msg_draft_history_t *m,
                                      td_msg_arena_t *arena)
{
    td_msg_draft_past_t *past = NULL;

    MUST(pb->n_past <= TD_MSG_DRAFT_PAST_MAX, "draft_history: too many entries");
    past = td_calloc(pb->n_past, sizeof(*past));
    if (past == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    arena->extra = past;
    for (size_t i = 0; i < pb->n_past; i++) {
        TD_TRY(read_past(pb->past[i], &past[i]));
    }
    m->count = (uint32_t)pb->n_past;
    m->past = past;
    return TD_OK;
}

/* Keys, and which of the parallel arrays must be there with one entry a key. */
static td_status_t read_keys(const ProtobufCBinaryData *keys, td_msg_blocks_t *m)
{
    MUST(keys->len > 0 && keys->len % TD_BLOCK_KEY_BYTES == 0 &&
             keys->len / TD_BLOCK_KEY_BYTES <= TD_MSG_BLOCKS_MAX,
         "keys: a positive multiple of 16 bytes expected");
    m->count = (uint32_t)(keys->len / TD_BLOCK_KEY_BYTES);
    m->keys = (const td_block_key_t *)keys->data;
    return TD_OK;
}

static td_status_t read_manifest(const PB(StoreManifest) * pb, td_msg_blocks_t *m)
{
    MUST((uint32_t)pb->change <= TD_MSG_MANIFEST_LOST, "store_manifest: change");
    MUST(pb->change != TANDEM__V1__MANIFEST__MANIFEST_LOST || pb->keys.len == 0,
         "store_manifest: keys where orders were lost");
    if (pb->keys.len > 0 || pb->change == TANDEM__V1__MANIFEST__MANIFEST_HERE ||
        pb->change == TANDEM__V1__MANIFEST__MANIFEST_GONE) {
        TD_TRY(read_keys(&pb->keys, m));
    }
    MUST(m->count <= TD_MSG_MANIFEST_KEYS_MAX, "store_manifest: too many keys");
    MUST(pb->n_hashes == (pb->change == TANDEM__V1__MANIFEST__MANIFEST_GONE ? 0 : m->count),
         "store_manifest: array lengths");
    if (pb->change == TANDEM__V1__MANIFEST__MANIFEST_MEMORY) {
        MUST(pb->n_blocks == m->count && pb->n_epochs == m->count &&
                 (pb->n_pins == 0 || pb->n_pins == m->count),
             "store_manifest: array lengths");
        for (size_t i = 0; i < pb->n_pins; i++) {
            MUST(pb->pins[i] <= TD_MSG_PIN_MAX, "store_manifest: kind of pin");
        }
        m->blocks = pb->blocks;
        m->epochs = pb->epochs;
        m->pins = pb->n_pins > 0 ? pb->pins : NULL;
        m->is_last = pb->is_last;
    }
    m->term = pb->term;
    m->mount = pb->mount;
    m->how = (uint32_t)pb->change;
    m->checksums = pb->hashes;
    return TD_OK;
}

static td_status_t read_memo(const PB(Memo) * pb, bool has_tokens, td_msg_memo_t *m)
{
    MUST(pb->key.len == TD_BLOCK_KEY_BYTES, "memo: a key of 16 bytes expected");
    MUST(pb->n_tokens <= TD_MSG_MEMO_TOKENS_MAX, "memo: too many tokens");
    MUST((pb->n_tokens > 0) == has_tokens, "memo: tokens absent, or where none belong");
    m->key = (const td_block_key_t *)pb->key.data;
    m->tag = pb->tag;
    m->count = (uint32_t)pb->n_tokens;
    m->tokens = pb->tokens;
    return TD_OK;
}

/* CHANGES: runs that add up to the keys, none empty but the first. */
static td_status_t read_runs(const PB(KvEvents) * pb, td_msg_kv_events_t *m)
{
    uint64_t sum = 0;

    MUST(pb->n_runs <= m->count + (size_t)1, "kv_events: too many runs");
    for (size_t i = 0; i < pb->n_runs; i++) {
        MUST(pb->runs[i] > 0 || (i == 0 && pb->n_runs > 1), "kv_events: an empty run");
        sum += pb->runs[i];
    }
    MUST(sum == (pb->kind == TANDEM__V1__KV_EVENTS_KIND__KV_EVENTS_CHANGES ? m->count : 0),
         "kv_events: runs that do not add up to the keys");
    m->run_count = (uint32_t)pb->n_runs;
    m->runs = pb->runs;
    return TD_OK;
}

static td_status_t read_kv_events(const PB(KvEvents) * pb, td_msg_kv_events_t *m)
{
    const bool is_part = pb->kind == TANDEM__V1__KV_EVENTS_KIND__KV_EVENTS_PART;
    const bool has_keys = is_part || pb->kind == TANDEM__V1__KV_EVENTS_KIND__KV_EVENTS_CHANGES;

    MUST((uint32_t)pb->kind <= TD_MSG_KV_END, "kv_events: kind");
    MUST(pb->keys.len % TD_BLOCK_KEY_BYTES == 0 &&
             pb->keys.len / TD_BLOCK_KEY_BYTES <= TD_MSG_KV_KEYS_MAX &&
             (has_keys || pb->keys.len == 0) && (!is_part || pb->keys.len > 0),
         "kv_events: keys");
    /* Numbers of events never come near the end of their range. */
    MUST(pb->first > 0 && pb->first <= UINT64_MAX / 2, "kv_events: number of the first event");
    m->kind = (uint32_t)pb->kind;
    m->first = pb->first;
    m->count = (uint32_t)(pb->keys.len / TD_BLOCK_KEY_BYTES);
    m->keys = (const td_block_key_t *)pb->keys.data;
    m->snapshot = pb->snapshot;
    m->part = pb->part;
    m->is_head = pb->is_head;
    m->blocks = pb->blocks;
    m->digest = pb->digest;
    return read_runs(pb, m);
}

static td_status_t read_put_start(const PB(PutStart) * pb, td_msg_blocks_t *m)
{
    TD_TRY(read_keys(&pb->keys, m));
    MUST(pb->n_blocks == m->count && pb->n_epochs == m->count && pb->n_checksums == m->count,
         "put_start: array lengths");
    m->request = pb->request;
    m->blocks = pb->blocks;
    m->epochs = pb->epochs;
    m->checksums = pb->checksums;
    return TD_OK;
}

static td_status_t read_put_result(const PB(PutResult) * pb, td_msg_blocks_t *m)
{
    TD_TRY(read_keys(&pb->keys, m));
    MUST(pb->n_statuses == m->count, "put_result: array lengths");
    m->request = pb->request;
    m->statuses = (const td_status_t *)pb->statuses;
    return TD_OK;
}

static td_status_t read_store_order(const PB(StoreOrder) * pb, td_msg_blocks_t *m)
{
    TD_TRY(read_keys(&pb->keys, m));
    MUST(pb->n_blocks == m->count && pb->n_epochs == m->count && pb->n_checksums == m->count,
         "store_order: array lengths");
    MUST(id_ok(pb->writer_id), "store_order: writer id");
    m->request = pb->order;
    m->term = pb->term;
    m->mount = pb->mount;
    m->writer_id = pb->writer_id;
    m->writer_incarnation = pb->writer_incarnation;
    m->blocks = pb->blocks;
    m->epochs = pb->epochs;
    m->checksums = pb->checksums;
    return TD_OK;
}

static td_status_t read_store_done(const PB(StoreDone) * pb, td_msg_blocks_t *m)
{
    TD_TRY(read_keys(&pb->keys, m));
    MUST(pb->n_blocks == m->count && pb->n_epochs == m->count && pb->n_checksums == m->count &&
             pb->n_statuses == m->count,
         "store_done: array lengths");
    m->request = pb->order;
    m->term = pb->term;
    m->statuses = (const td_status_t *)pb->statuses;
    m->blocks = pb->blocks;
    m->epochs = pb->epochs;
    m->checksums = pb->checksums;
    return TD_OK;
}

static td_status_t read_lookup_result(const PB(LookupResult) * pb, td_msg_lookup_result_t *m)
{
    size_t n = pb->n_blocks;

    MUST(n <= TD_MSG_BLOCKS_MAX && pb->n_epochs == n && pb->n_checksums == n &&
             pb->n_segment_of == n && pb->n_segment_ids <= TD_MSG_PEERS_MAX,
         "lookup_result: array lengths");
    for (size_t i = 0; i < n; i++) {
        MUST(pb->segment_of[i] < pb->n_segment_ids, "lookup_result: segment index");
    }
    for (size_t i = 0; i < pb->n_segment_ids; i++) {
        MUST(id_ok(pb->segment_ids[i]), "lookup_result: segment id");
    }
    m->request = pb->request;
    m->status = (td_status_t)pb->status;
    m->lease_ms = pb->lease_ms;
    m->segment_count = (uint32_t)pb->n_segment_ids;
    m->segment_ids = (const char *const *)pb->segment_ids;
    m->count = (uint32_t)n;
    m->segment_of = pb->segment_of;
    m->blocks = pb->blocks;
    m->epochs = pb->epochs;
    m->checksums = pb->checksums;
    return TD_OK;
}

static td_status_t read_ticket(uint64_t ticket, uint32_t attempt, int32_t status,
                               td_msg_ticket_t *m)
{
    m->ticket = ticket;
    m->attempt = attempt;
    m->status = (td_status_t)status;
    return TD_OK;
}

static td_status_t read_body(const PB(Envelope) * env, td_msg_t *msg, td_msg_arena_t *arena)
{
    msg->type = (td_msg_type_t)env->body_case;
    switch (env->body_case) {
    case TANDEM__V1__ENVELOPE__BODY_REGISTER:
        return read_register(env->register_, &msg->u.reg);
    case TANDEM__V1__ENVELOPE__BODY_REGISTERED:
        msg->u.registered = (td_msg_registered_t){
            .accepted = env->registered->accepted,
            .error = env->registered->error,
            .heartbeat_ms = env->registered->heartbeat_ms,
            .block_bytes = env->registered->block_bytes,
            .block_tokens = env->registered->block_tokens,
        };
        return TD_OK;
    case TANDEM__V1__ENVELOPE__BODY_PEERS:
        return read_peers(env->peers, &msg->u.peers, arena);
    case TANDEM__V1__ENVELOPE__BODY_HEARTBEAT:
        return read_heartbeat(env->heartbeat, &msg->u.heartbeat);
    case TANDEM__V1__ENVELOPE__BODY_LEASE:
        msg->u.lease.lease_ms = env->lease->lease_ms;
        return TD_OK;
    case TANDEM__V1__ENVELOPE__BODY_RESERVE:
        return read_work(env->reserve, &msg->u.work, arena);
    case TANDEM__V1__ENVELOPE__BODY_START:
        return read_work(env->start, &msg->u.work, arena);
    case TANDEM__V1__ENVELOPE__BODY_RESERVED:
        msg->u.reserved = (td_msg_reserved_t){
            .ticket = env->reserved->ticket,
            .attempt = env->reserved->attempt,
            .status = (td_status_t)env->reserved->status,
            .have_blocks = env->reserved->have_blocks,
        };
        return TD_OK;
    case TANDEM__V1__ENVELOPE__BODY_LAYERS_READY:
        return read_layers(env->layers_ready, &msg->u.layers);
    case TANDEM__V1__ENVELOPE__BODY_KV_READY:
        return read_kv_ready(env->kv_ready, &msg->u.kv_ready);
    case TANDEM__V1__ENVELOPE__BODY_KV_ACK:
        return read_ticket(env->kv_ack->ticket, env->kv_ack->attempt, 0, &msg->u.ticket);
    case TANDEM__V1__ENVELOPE__BODY_KV_FAILED:
        return read_ticket(env->kv_failed->ticket, env->kv_failed->attempt, env->kv_failed->status,
                           &msg->u.ticket);
    case TANDEM__V1__ENVELOPE__BODY_CANCEL:
        return read_ticket(env->cancel->ticket, env->cancel->attempt, 0, &msg->u.ticket);
    case TANDEM__V1__ENVELOPE__BODY_TOKENS:
        return read_tokens(env->tokens, &msg->u.tokens);
    case TANDEM__V1__ENVELOPE__BODY_END:
        return read_end(env->end, &msg->u.end);
    case TANDEM__V1__ENVELOPE__BODY_DRAFT_HISTORY:
        return read_draft_history(env->draft_history, &msg->u.draft_history, arena);
    case TANDEM__V1__ENVELOPE__BODY_PUT_START:
        return read_put_start(env->put_start, &msg->u.blocks);
    case TANDEM__V1__ENVELOPE__BODY_PUT_RESULT:
        return read_put_result(env->put_result, &msg->u.blocks);
    case TANDEM__V1__ENVELOPE__BODY_STORE_ORDER:
        return read_store_order(env->store_order, &msg->u.blocks);
    case TANDEM__V1__ENVELOPE__BODY_STORE_DONE:
        return read_store_done(env->store_done, &msg->u.blocks);
    case TANDEM__V1__ENVELOPE__BODY_EVICT_ORDER:
        msg->u.blocks.term = env->evict_order->term;
        msg->u.blocks.mount = env->evict_order->mount;
        MUST((uint32_t)env->evict_order->how <= TD_MSG_EVICT_REMOVE, "evict_order: how");
        msg->u.blocks.how = (uint32_t)env->evict_order->how;
        return read_keys(&env->evict_order->keys, &msg->u.blocks);
    case TANDEM__V1__ENVELOPE__BODY_LOOKUP:
        msg->u.blocks.request = env->lookup->request;
        return read_keys(&env->lookup->keys, &msg->u.blocks);
    case TANDEM__V1__ENVELOPE__BODY_LOOKUP_RESULT:
        return read_lookup_result(env->lookup_result, &msg->u.found);
    case TANDEM__V1__ENVELOPE__BODY_STORE_PIN:
        MUST((uint32_t)env->store_pin->pin <= TD_MSG_PIN_MAX, "store_pin: kind of pin");
        msg->u.blocks.request = env->store_pin->request;
        msg->u.blocks.pin = (uint32_t)env->store_pin->pin;
        return read_keys(&env->store_pin->keys, &msg->u.blocks);
    case TANDEM__V1__ENVELOPE__BODY_STORE_REMOVE:
        msg->u.blocks.request = env->store_remove->request;
        return read_keys(&env->store_remove->keys, &msg->u.blocks);
    case TANDEM__V1__ENVELOPE__BODY_MOUNT:
        msg->u.blocks.term = env->mount->term;
        msg->u.blocks.mount = env->mount->mount;
        return TD_OK;
    case TANDEM__V1__ENVELOPE__BODY_PIN_ORDER:
        MUST((uint32_t)env->pin_order->pin <= TD_MSG_PIN_MAX, "pin_order: kind of pin");
        msg->u.blocks.term = env->pin_order->term;
        msg->u.blocks.mount = env->pin_order->mount;
        msg->u.blocks.pin = (uint32_t)env->pin_order->pin;
        return read_keys(&env->pin_order->keys, &msg->u.blocks);
    case TANDEM__V1__ENVELOPE__BODY_PROMOTE_ORDER:
        msg->u.blocks.request = env->promote_order->order;
        msg->u.blocks.term = env->promote_order->term;
        msg->u.blocks.mount = env->promote_order->mount;
        return read_keys(&env->promote_order->keys, &msg->u.blocks);
    case TANDEM__V1__ENVELOPE__BODY_STORE_MANIFEST:
        return read_manifest(env->store_manifest, &msg->u.blocks);
    case TANDEM__V1__ENVELOPE__BODY_MEMO_PUT:
        return read_memo(env->memo_put, true, &msg->u.memo);
    case TANDEM__V1__ENVELOPE__BODY_MEMO_GET:
        return read_memo(env->memo_get, false, &msg->u.memo);
    case TANDEM__V1__ENVELOPE__BODY_MEMO_FOUND:
        return read_memo(env->memo_found, true, &msg->u.memo);
    case TANDEM__V1__ENVELOPE__BODY_KV_EVENTS:
        return read_kv_events(env->kv_events, &msg->u.kv_events);
    case TANDEM__V1__ENVELOPE__BODY_KV_REPLAY:
        msg->u.kv_replay.from = env->kv_replay->from;
        return TD_OK;
    case TANDEM__V1__ENVELOPE__BODY_STORE_RESULT:
        return read_put_result(env->store_result, &msg->u.blocks);
    default:
        break;
    }
    MUST(false, "envelope without a known body");
    return TD_ERR_PROTOCOL;
}

static arena_piece_t *arena_grow(td_msg_arena_t *arena, size_t bytes)
{
    arena_piece_t *piece = td_alloc(sizeof(*piece) + bytes);

    if (piece == NULL) {
        arena->no_memory = true;
        return NULL;
    }
    *piece = (arena_piece_t){.next = arena->pieces, .cap = bytes};
    arena->pieces = piece;
    return piece;
}

static void *arena_alloc(void *ctx, size_t bytes)
{
    td_msg_arena_t *arena = ctx;
    arena_piece_t *piece = arena->pieces;
    const size_t need =
        (bytes + _Alignof(max_align_t) - 1) / _Alignof(max_align_t) * _Alignof(max_align_t);

    if (need > arena->left) {
        arena->too_large = true;
        return NULL;
    }
    arena->left -= need;
    if (piece == NULL || piece->cap - piece->used < need) {
        piece = arena_grow(arena, need);
    }
    if (piece == NULL) {
        return NULL;
    }
    piece->used += need;
    return piece->bytes + piece->used - need;
}

/* All goes at once, with the arena. */
static void arena_release(void *ctx, void *ptr)
{
    (void)ctx;
    (void)ptr;
}

static td_status_t read_envelope(const PB(Envelope) * env, td_msg_t *msg, td_msg_arena_t *arena)
{
    MUST(env->version == TD_WIRE_VERSION, "wire version differs");
    MUST(env->sender_id[0] != '\0' && id_ok(env->sender_id), "sender id");
    msg->sender_id = env->sender_id;
    msg->sender_incarnation = env->sender_incarnation;
    msg->receiver_incarnation = env->receiver_incarnation;
    msg->sequence = env->sequence;
    return read_body(env, msg, arena);
}

/* Why there is no envelope. */
static td_status_t not_unpacked(const td_msg_arena_t *arena, size_t len)
{
    if (arena->no_memory) {
        return TD_ERR_NO_MEMORY;
    }
    if (refusal_is_logged()) {
        TD_LOG_WARN("message refused", "why=\"%s\" bytes=%zu",
                    arena->too_large ? "too large unpacked" : "not an envelope", len);
    }
    return arena->too_large ? TD_ERR_TOO_LARGE : TD_ERR_PROTOCOL;
}

td_status_t td_msg_decode(const void *bytes, size_t len, td_msg_t *msg_out,
                          td_msg_arena_t **arena_out)
{
    ProtobufCAllocator allocator = {.alloc = arena_alloc, .free = arena_release};
    td_msg_arena_t *arena = NULL;
    td_status_t status = TD_OK;
    td_msg_t msg;

    if (len > TD_MSG_BYTES_MAX) {
        return TD_ERR_TOO_LARGE;
    }
    arena = td_calloc(1, sizeof(*arena));
    if (arena == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    memset(&msg, 0, sizeof(msg));
    arena->left = UNPACKED_BYTES_MAX(len);
    allocator.allocator_data = arena;
    if (PIECE_BYTES(len) == 0 || arena_grow(arena, PIECE_BYTES(len)) != NULL) {
        arena->envelope = tandem__v1__envelope__unpack(&allocator, len, bytes);
    }
    status = arena->envelope == NULL ? not_unpacked(arena, len)
                                     : read_envelope(arena->envelope, &msg, arena);
    if (status != TD_OK) {
        td_msg_arena_free(arena);
        return status;
    }
    *msg_out = msg;
    *arena_out = arena;
    return TD_OK;
}

void td_msg_arena_free(td_msg_arena_t *arena)
{
    if (arena == NULL) {
        return;
    }
    while (arena->pieces != NULL) {
        arena_piece_t *next = arena->pieces->next;
        td_free(arena->pieces);
        arena->pieces = next;
    }
    td_free(arena->extra);
    td_free(arena);
}

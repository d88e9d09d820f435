#include "common/node/td_node.h"

#include <string.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/base/td_log.h"
#include "common/node/td_peers.h"

#define OFFERS_MS 2000u /* after that the store may as well do without */
#define LINGER_MS 500u  /* for the last messages to leave */

td_status_t td_node_model_options(const td_node_t *n, td_model_options_t *out)
{
    const td_config_t *c = n->proc.config;
    td_model_options_t options = {
        .threads = (uint32_t)td_config_u64(c, "threads"),
        .block_tokens = (uint32_t)td_config_u64(c, "block-tokens"),
    };

    if (options.threads == 0) {
        long cpus = sysconf(_SC_NPROCESSORS_ONLN);
        options.threads = cpus > 0 ? (uint32_t)TD_MIN(cpus, (long)TD_NODE_THREADS_MAX) : 1;
    }
    TD_TRY(td_precision_parse(td_config_text(c, "precision"), &options.precision));
    TD_TRY(td_backend_parse(td_config_text(c, "backend"), &options.backend));
    if (td_devices_parse(td_config_text(c, "device"), &options.devices) != TD_OK) {
        TD_LOG_ERROR("devices not understood",
                     "got=\"%s\" expected=\"numbers up to %u with commas, at most %u\"",
                     td_config_text(c, "device"), TD_MODEL_DEVICE_MAX, TD_MODEL_DEVICES_MAX);
        return TD_ERR_INVALID;
    }
    options.device_kv_bytes = td_config_u64(c, "device-kv");
    TD_TRY(td_kv_codec_parse(td_config_text(c, "kv-codec"), &options.kv_codec));
    *out = options;
    return TD_OK;
}

static td_status_t open_model(td_node_t *n, const td_node_setup_t *setup)
{
    const td_config_t *c = n->proc.config;
    const char *path = td_config_text(c, "model");
    td_model_options_t options;

    if (path == NULL) {
        TD_LOG_ERROR("option missing", "expected=\"--model FILE\"");
        return TD_ERR_INVALID;
    }
    TD_TRY(td_node_model_options(n, &options));
    options.rows_max = setup->rows_max;
    options.logit_rows_max = setup->logit_rows_max;
    options.context_max = (uint32_t)td_config_u64(c, "context-max");
    options.attention = td_config_text(c, "attention");
    TD_TRY(td_gguf_open(path, &n->gguf));
    TD_TRY(td_tokenizer_create(n->gguf, &n->tokenizer));
    TD_TRY(td_model_load(n->gguf, &options, &n->model));
    n->info = td_model_info(n->model);
    for (uint32_t id = 0; id < n->info->vocab_size; id++) {
        if (td_tokenizer_is_stop(n->tokenizer, id) && n->stop_count < TD_NODE_STOP_IDS_MAX) {
            n->stop_ids[n->stop_count++] = id;
        }
    }
    return TD_OK;
}

static td_status_t open_pool(td_node_t *n, const td_node_setup_t *setup)
{
    const td_kv_layout_t *layout = td_node_layout(n);
    size_t block_bytes = td_kv_block_bytes(layout);
    uint64_t blocks = TD_MIN(setup->kv_bytes / block_bytes, (uint64_t)TD_POOL_BLOCKS_MAX);
    uint32_t context_blocks =
        td_attention_blocks_max(td_node_mask(n), layout->block_tokens, n->info->context_max,
                                setup->role == TD_ROLE_PREFILL ? setup->rows_max : 1);
    char attention[TD_ATTENTION_TEXT_MAX];
    const bool nccl = strcmp(td_config_text(n->proc.config, "nccl"), "off") != 0;
    td_transfer_config_t config = {.block_count = (uint32_t)blocks,
                                   .block_bytes = block_bytes,
                                   .incarnation = n->proc.incarnation,
                                   .metrics = n->proc.metrics,
                                   .name_prefix = setup->metric_prefix,
                                   .device_series = true,
                                   .device = nccl ? td_model_kv_device(n->model) : NULL};

    td_attention_mask_name(td_node_mask(n), attention);
    TD_LOG_INFO(
        "kv size",
        "codec=%s bytes_per_token=%zu block_tokens=%u block_bytes=%zu blocks=%llu tokens=%llu "
        "context_max=%u attention=%s requests_of_full_context=%llu",
        td_kv_codec_name(layout->codec), td_kv_token_bytes(layout), layout->block_tokens,
        block_bytes, (unsigned long long)blocks, (unsigned long long)blocks * layout->block_tokens,
        n->info->context_max, attention, (unsigned long long)(blocks / context_blocks));
    if (td_node_mask(n)->kind == TD_ATTENTION_STRIDED &&
        td_node_mask(n)->stride <= layout->block_tokens) {
        TD_LOG_WARN("no block can be given up before its request ends",
                    "attention=%s block_tokens=%u why=\"every block has a summary\"", attention,
                    layout->block_tokens);
    }
    if (blocks < context_blocks) {
        TD_LOG_WARN("kv memory holds no request of full context", "blocks=%llu needed=%u",
                    (unsigned long long)blocks, context_blocks);
    }
    if (blocks == 0) {
        TD_LOG_ERROR("kv memory below one block", "kv_bytes=%llu block_bytes=%zu",
                     (unsigned long long)setup->kv_bytes, block_bytes);
        return TD_ERR_INVALID;
    }
    TD_TRY(td_transfer_create(&config, &n->transfer));
    TD_TRY(
        td_pool_create(td_transfer_memory(n->transfer), (uint32_t)blocks, block_bytes, &n->pool));
    td_transfer_set_pool(n->transfer, n->pool);
    td_model_use_pool(n->model, n->pool);
    TD_TRY(td_kv_events_create(TD_KV_EVENTS_RING, &n->kv_events));
    td_pool_watch(n->pool, n->kv_events);
    TD_TRY(td_ring_create(TD_NODE_FETCHES_MAX, &n->fetched));
    return td_verify_create(TD_NODE_FETCHES_MAX, block_bytes, &n->verify);
}

static void declare_metrics(td_node_t *n, const td_node_setup_t *setup)
{
    static const char *const labels[] = {"state=\"free\"", "state=\"reserved\"", "state=\"cached\"",
                                         "state=\"active\"", "state=\"quarantined\""};
    for (uint32_t i = 0; i < TD_ARRAY_LEN(labels); i++) {
        n->kv_states[i] = td_metrics_gauge(n->proc.metrics, setup->kv_metric, labels[i],
                                           "KV blocks by state; they always add up to the pool");
    }
    n->checksum_failures = td_metrics_counter(n->proc.metrics, setup->checksum_metric, NULL,
                                              "fetched blocks whose bytes were not the named ones");
    n->indexed = td_metrics_gauge(n->proc.metrics, setup->indexed_metric, NULL,
                                  "KV blocks that requests can find, as routers are told");
}

void td_node_update_kv_metrics(td_node_t *n)
{
    td_pool_counts_t c = td_pool_counts(n->pool);
    td_metric_set(n->kv_states[0], c.free);
    td_metric_set(n->kv_states[1], c.reserved);
    td_metric_set(n->kv_states[2], c.cached);
    td_metric_set(n->kv_states[3], c.active);
    td_metric_set(n->kv_states[4], c.quarantined);
    td_metric_set(n->indexed, n->kv_events->blocks);
}

static void on_registered(void *ctx, const td_msg_registered_t *info)
{
    td_node_t *n = ctx;
    if (n->events.registered != NULL) {
        n->events.registered(n->events.ctx, info);
    }
}

static void on_peer_up(void *ctx, const td_msg_peer_t *peer)
{
    td_node_t *n = ctx;

    td_peers_add(n->transfer, n->proc.id, peer);
    if (n->events.peer_up != NULL) {
        n->events.peer_up(n->events.ctx, peer);
    }
}

static void on_peer_down(void *ctx, const char *id, uint64_t incarnation)
{
    td_node_t *n = ctx;
    td_transfer_peer_remove(n->transfer, incarnation);
    if (n->events.peer_down != NULL) {
        n->events.peer_down(n->events.ctx, id, incarnation);
    }
}

static void on_fenced(void *ctx, const char *router, uint64_t incarnation)
{
    td_node_t *n = ctx;
    td_transfer_set_incarnation(n->transfer, incarnation);
    if (n->events.fenced != NULL) {
        n->events.fenced(n->events.ctx, router, incarnation);
    }
}

static void on_share(void *ctx, const char *router, td_msg_heartbeat_t *load)
{
    td_node_t *n = ctx;
    n->events.share(n->events.ctx, router, load);
}

static uint32_t walk_pool(const void *ctx, uint32_t *cursor, uint32_t max, td_block_key_t *out)
{
    return td_pool_walk(ctx, cursor, max, out);
}

static td_status_t open_feed(td_node_t *n)
{
    const td_kv_feed_out_t to = td_kv_feed_over_bus(n->proc.bus);

    return td_kv_feed_create(&to, n->kv_events, walk_pool, n->pool, &n->feed);
}

static td_status_t open_membership(td_node_t *n)
{
    td_member_events_t events = {.ctx = n,
                                 .registered = on_registered,
                                 .peer_up = on_peer_up,
                                 .peer_down = on_peer_down,
                                 .fenced = on_fenced,
                                 .share = n->events.share == NULL ? NULL : on_share};
    td_msg_register_t self = {.http = td_statusd_address(n->proc.statusd),
                              .numerics_class = n->info->numerics_class,
                              .kv_codec = td_kv_codec_name(n->info->kv.codec),
                              .context_max = n->info->context_max,
                              .version = TD_VERSION,
                              .drafters = n->drafters};
    td_block_root_t root;
    td_block_key_t probe;

    td_node_root(n, "", 0, &root);
    td_block_probe_key(&root, td_node_layout(n)->block_tokens, &probe);
    td_peers_describe(n->transfer, td_pool_counts(n->pool).total,
                      (uint32_t)td_pool_block_bytes(n->pool), &self.self.region);
    self.self.id = n->proc.id;
    self.self.role = n->role;
    self.self.endpoint = td_bus_endpoint(n->proc.bus);
    self.fingerprint = (td_bytes_t){n->info->fingerprint, sizeof(n->info->fingerprint)};
    self.probe_key = (td_bytes_t){probe.bytes, sizeof(probe.bytes)};
    TD_TRY(td_routers_open(n->proc.config, n->proc.bus, &self, &events, &n->member, &n->routers));
    return open_feed(n);
}

td_status_t td_node_open(td_node_t *n, const td_node_setup_t *setup)
{
    n->role = setup->role;
    n->events = setup->events;
    declare_metrics(n, setup);
    TD_TRY(open_model(n, setup));
    TD_TRY(open_pool(n, setup));
    if (setup->open_more != NULL) {
        TD_TRY(setup->open_more(setup->events.ctx));
    }
    TD_TRY(td_worker_create(&n->worker));
    TD_TRY(td_proc_open(&n->proc, true));
    TD_TRY(open_membership(n));
    td_proc_announce(&n->proc, td_statusd_address(n->proc.statusd));
    return TD_OK;
}

void td_node_tick(td_node_t *n, const td_msg_heartbeat_t *load)
{
    td_routers_tick(n->routers, n->member);
    td_member_tick(n->member, load);
    td_kv_feed_tick(n->feed, n->member, td_now_ns());
}

/* Signals that came since the last look. */
static uint32_t take_signals(int fd)
{
    struct signalfd_siginfo info;
    uint32_t count = 0;

    while (read(fd, &info, sizeof(info)) == (ssize_t)sizeof(info)) {
        count++;
    }
    return count;
}

void td_node_fail(td_node_t *n)
{
    n->failed = true;
}

bool td_node_ends(td_node_t *n, bool signalled, uint32_t work, uint32_t offers)
{
    const uint64_t now = td_now_ns();
    uint32_t signals = signalled ? take_signals(n->proc.signal_fd) : 0;
    uint64_t past_ms = 0;

    if (signals > 0 && !n->draining) {
        TD_LOG_INFO("draining", "why=signal requests=%u offers=%u", work, offers);
        n->draining = true;
        n->drain_begin_ns = now;
        signals--;
    }
    if (n->failed) {
        TD_LOG_ERROR("stopping", "why=\"the device fails\" requests=%u", work);
        return true;
    }
    if (!n->draining) {
        return false;
    }
    past_ms = (now - n->drain_begin_ns) / TD_NS_PER_MS;
    if (signals == 0 && past_ms < td_config_u64(n->proc.config, "drain-ms") &&
        (work > 0 || (offers > 0 && past_ms < OFFERS_MS))) {
        return false;
    }
    TD_LOG_INFO("stopping", "why=%s requests=%u", work == 0 ? "drained" : "time", work);
    td_bus_linger(n->proc.bus, LINGER_MS);
    return true;
}

void td_node_stop(td_node_t *n)
{
    td_node_fetch_t *job = NULL;

    td_worker_destroy(n->worker);
    n->worker = NULL;
    td_transfer_stop(n->transfer); /* completes every fetch into the ring */
    if (n->model != NULL) {
        td_model_use_pool(n->model, NULL); /* its memory is the transfer's */
    }
    td_transfer_destroy(n->transfer);
    n->transfer = NULL;
    td_verify_destroy(n->verify); /* as well */
    n->verify = NULL;
    while (n->fetched != NULL && (job = td_node_fetch_next(n)) != NULL) {
        td_node_fetch_free(job);
    }
}

void td_node_close(td_node_t *n)
{
    td_node_stop(n);
    td_kv_feed_destroy(n->feed);
    td_pool_destroy(n->pool);
    td_kv_events_destroy(n->kv_events);
    td_ring_destroy(n->fetched);
    td_member_destroy(n->member);
    td_routers_destroy(n->routers);
    td_model_destroy(n->model);
    td_tokenizer_destroy(n->tokenizer);
    td_gguf_close(n->gguf);
    td_proc_fini(&n->proc);
}

void td_node_root_of(const td_node_t *n, const td_model_info_t *info, const void *salt,
                     size_t salt_len, td_block_root_t *out)
{
    td_block_root_fields_t fields = {.fingerprint = info->fingerprint,
                                     .numerics_class = info->numerics_class,
                                     .layout_version = TD_KV_LAYOUT_VERSION,
                                     .codec = td_kv_codec_name(info->kv.codec),
                                     .block_tokens = info->kv.block_tokens,
                                     .adapter = "",
                                     .salt = salt_len == 0 ? "" : salt,
                                     .salt_len = salt_len};
    td_block_root_make(n->proc.secret, &fields, out);
}

void td_node_root(const td_node_t *n, const void *salt, size_t salt_len, td_block_root_t *out)
{
    td_node_root_of(n, n->info, salt, salt_len, out);
}

const td_kv_layout_t *td_node_layout(const td_node_t *n)
{
    return &n->info->kv;
}

const td_attention_mask_t *td_node_mask(const td_node_t *n)
{
    return &n->info->attention;
}

void td_node_forget(td_node_t *n, uint64_t ticket, uint32_t attempt)
{
    n->forgotten_ticket[n->forgotten_next] = ticket;
    n->forgotten_attempt[n->forgotten_next] = attempt;
    n->forgotten_next = (n->forgotten_next + 1) % TD_NODE_FORGOTTEN_MAX;
}

bool td_node_is_forgotten(const td_node_t *n, uint64_t ticket, uint32_t attempt)
{
    for (uint32_t i = 0; i < TD_NODE_FORGOTTEN_MAX; i++) {
        if (n->forgotten_ticket[i] == ticket && attempt <= n->forgotten_attempt[i]) {
            return true;
        }
    }
    return false;
}

/* --- fetch jobs ------------------------------------------------------------------------------- */

static void on_fetch_complete(td_fetch_t *fetch)
{
    td_node_fetch_t *job = fetch->ctx;
    /* The ring holds as many as may be under way. */
    TD_ASSERT(td_ring_push(job->node->fetched, job) == TD_OK);
}

static void on_verify_complete(td_verify_job_t *verify)
{
    td_node_fetch_t *job = verify->ctx;
    if (verify->status == TD_OK) {
        job->hashed = true;
    } else {
        job->fetch.status = verify->status;
    }
    TD_ASSERT(td_ring_push(job->node->fetched, job) == TD_OK);
}

td_node_fetch_t *td_node_fetch_new(td_node_t *n, uint64_t peer_incarnation, uint32_t piece_count)
{
    td_node_fetch_t *job = NULL;

    if (n->fetches >= TD_NODE_FETCHES_MAX || piece_count > TD_TRANSFER_PIECES_MAX) {
        return NULL;
    }
    job = td_calloc(1,
                    sizeof(*job) + piece_count * (sizeof(job->pieces[0]) + sizeof(job->hashes[0])));
    if (job != NULL) {
        job->node = n;
        job->hashes = (uint64_t *)(job->pieces + piece_count);
        job->fetch.peer = peer_incarnation;
        job->fetch.piece_count = piece_count;
        job->fetch.pieces = job->pieces;
        job->fetch.complete = on_fetch_complete;
        job->fetch.ctx = job;
        job->fetch.silence_ns = TD_TRANSFER_DEADLINE_MS * TD_NS_PER_MS;
        job->fetch.deadline_ns = td_now_ns() + job->fetch.silence_ns;
    }
    return job;
}

td_status_t td_node_fetch_submit(td_node_fetch_t *job)
{
    td_status_t status = td_transfer_fetch(job->node->transfer, &job->fetch);
    if (status != TD_OK) {
        td_free(job);
        return status;
    }
    LIST_INSERT_HEAD(&job->node->jobs, job, link);
    job->node->fetches++;
    return TD_OK;
}

void td_node_fetch_cancel(td_node_t *n, uint64_t ticket, uint32_t attempt)
{
    const td_node_fetch_t *job = NULL;

    LIST_FOREACH(job, &n->jobs, link)
    {
        if (job->ticket == ticket && job->attempt == attempt) {
            td_transfer_cancel(n->transfer, job->fetch.id);
        }
    }
}

uint32_t td_node_fetch_found(td_node_t *n, td_seq_t *seq, uint64_t ticket, uint32_t attempt,
                             uint64_t deadline_ns, const td_msg_lookup_result_t *found,
                             uint64_t *sums_out, uint32_t *jobs_out)
{
    const uint32_t first = seq->block_count;
    const uint32_t behind = (first + found->count) * td_node_layout(n)->block_tokens;
    const uint32_t needed =
        td_attention_blocks_needed(td_node_mask(n), td_node_layout(n)->block_tokens, behind,
                                   first * td_node_layout(n)->block_tokens, behind);
    const uint32_t blocks_max =
        TD_MAX((uint32_t)(TD_NODE_FETCH_BYTES / td_pool_block_bytes(n->pool)), 1u);
    uint32_t at = 0;

    *jobs_out = 0;
    /* Under a mask what a shorter prefix needed is held until the longer one is here. */
    if (needed > seq->reserved && td_seq_reserve(seq, needed - seq->reserved) != TD_OK) {
        return 0;
    }
    while (at < found->count) {
        const char *segment = found->segment_ids[found->segment_of[at]];
        const td_member_peer_t *peer = td_member_find(n->member, segment);
        uint32_t end = at;
        td_node_fetch_t *job = NULL;
        if (!td_seq_needs(seq, behind, first + at)) {
            td_seq_skip(seq);
            at++;
            continue;
        }
        while (end < found->count && end - at < blocks_max &&
               found->segment_of[end] == found->segment_of[at] &&
               td_seq_needs(seq, behind, first + end)) {
            end++;
        }
        job = peer == NULL ? NULL : td_node_fetch_new(n, peer->incarnation, end - at);
        if (job == NULL) {
            break;
        }
        job->ticket = ticket;
        job->attempt = attempt;
        job->first = first + at;
        job->fetch.deadline_ns = deadline_ns;
        job->fetch.silence_ns = 0; /* computing is the other way */
        for (uint32_t i = at; i < end; i++) {
            uint32_t idx = td_seq_grow_raw(seq);
            sums_out[i] = found->checksums[i];
            job->pieces[i - at] =
                (td_fetch_piece_t){.epoch = found->epochs[i],
                                   .block = found->blocks[i],
                                   .bytes = (uint32_t)td_pool_block_bytes(n->pool),
                                   .dest = td_pool_bytes(n->pool, idx)};
        }
        if (td_node_fetch_submit(job) != TD_OK) {
            td_seq_truncate(seq, (first + at) * td_node_layout(n)->block_tokens);
            break;
        }
        ++*jobs_out;
        at = end;
    }
    if (*jobs_out == 0) {
        td_seq_truncate(seq, first * td_node_layout(n)->block_tokens);
        return 0;
    }
    return at;
}

void td_node_fetch_compare(const td_node_fetch_t *job, const td_block_key_t *keys, uint64_t *sums,
                           bool *right, const char *request_id)
{
    for (uint32_t i = 0; i < job->fetch.piece_count; i++) {
        const uint32_t at = job->first + i;
        /* A checksum is bound to the key and to the source's epoch. */
        right[at] = td_block_checksum(job->hashes[i], &keys[at], job->pieces[i].epoch) == sums[at];
        sums[at] = job->hashes[i];
        if (!right[at]) {
            td_metric_add(job->node->checksum_failures, 1);
            TD_LOG_WARN("store block dropped", "req=%s block=%u why=checksum", request_id, at);
        }
    }
}

uint32_t td_node_fetch_keep(td_node_t *n, td_seq_t *seq, uint32_t first, const td_block_key_t *keys,
                            const uint64_t *hashes, const bool *right)
{
    const uint32_t tokens = td_node_layout(n)->block_tokens;
    const uint32_t behind = seq->block_count * tokens;
    uint32_t at = first;

    for (; at < seq->block_count && (right[at] || !td_seq_needs(seq, behind, at)); at++) {
        if (seq->blocks[at] == TD_POOL_NONE) {
            continue;
        }
        /* Another request may have brought the same block meanwhile: then ours stays private. */
        (void)!td_seq_index(seq, at, at > 0 ? &keys[at - 1] : NULL, &keys[at], hashes[at]);
    }
    if (at < seq->block_count && td_node_mask(n)->kind != TD_ATTENTION_FULL) {
        at = first;
    }
    td_seq_truncate(seq, at * tokens);
    return at - first;
}

td_node_fetch_t *td_node_fetch_next(td_node_t *n)
{
    void *item = NULL;
    if (!td_ring_pop(n->fetched, &item)) {
        return NULL;
    }
    n->fetches--;
    return item;
}

void td_node_fetch_verify(td_node_fetch_t *job)
{
    job->verify = (td_verify_job_t){.pieces = job->pieces,
                                    .piece_count = job->fetch.piece_count,
                                    .hashes = job->hashes,
                                    .complete = on_verify_complete,
                                    .ctx = job};
    job->node->fetches++;
    td_verify_submit(job->node->verify, &job->verify);
}

void td_node_fetch_free(td_node_fetch_t *job)
{
    LIST_REMOVE(job, link);
    td_free(job);
}

void td_node_sampling(const td_msg_work_t *work, uint32_t choice,
                      td_logit_bias_t bias[TD_LOGIT_BIAS_MAX], td_sampling_t *out)
{
    td_sampling_init(out);
    out->temperature = work->temperature;
    out->top_k = work->top_k;
    out->top_p = work->top_p;
    out->min_p = work->min_p;
    out->presence_penalty = work->presence_penalty;
    out->frequency_penalty = work->frequency_penalty;
    out->repetition_penalty = work->repetition_penalty;
    out->seed = work->seed;
    out->choice = choice;
    out->logit_bias_count = TD_MIN(work->bias_count, TD_LOGIT_BIAS_MAX);
    for (uint32_t i = 0; i < out->logit_bias_count; i++) {
        bias[i] = (td_logit_bias_t){work->bias_tokens[i], work->bias_values[i]};
    }
    out->logit_bias = bias;
}

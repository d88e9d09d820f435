#include "router/sim_run.h"

#include <math.h>
#include <string.h>

#include "router/sim_internal.h"
#include "router/sim_random.h"

#define HINTS_MAX RTR_INDEX_BLOCKS_MAX
#define ANSWER_SMOOTH 0.02 /* of the mean time of an answer, the newest one's share */
#define PROGRESS_EVERY 1000u

void sim_fifo_put(sim_t *s, sim_fifo_t *q, uint32_t r)
{
    s->states[r].next = SIM_NONE;
    if (q->first == SIM_NONE) {
        q->first = r;
    } else {
        s->states[q->last].next = r;
    }
    q->last = r;
}

uint32_t sim_fifo_take(sim_t *s, sim_fifo_t *q)
{
    const uint32_t r = q->first;
    if (r != SIM_NONE) {
        q->first = s->states[r].next;
    }
    return r;
}

void sim_fifo_remove(sim_t *s, sim_fifo_t *q, uint32_t r)
{
    uint32_t before = SIM_NONE;

    for (uint32_t at = q->first; at != SIM_NONE; before = at, at = s->states[at].next) {
        if (at == r) {
            *(before == SIM_NONE ? &q->first : &s->states[before].next) = s->states[r].next;
            q->last = q->last == r ? before : q->last;
            return;
        }
    }
}

td_block_key_t sim_key_of(uint64_t block)
{
    uint64_t state = block;
    const uint64_t words[2] = {sim_random(&state), sim_random(&state)};
    td_block_key_t key;

    memcpy(key.bytes, words, sizeof(key.bytes));
    return key;
}

td_status_t sim_plan(sim_t *s, uint64_t at_ns, sim_event_kind_t kind, uint32_t id, uint32_t version)
{
    return sim_events_add(
        &s->events, (sim_event_t){.at_ns = at_ns, .kind = kind, .id = id, .version = version});
}

/* --- the ends of a request -------------------------------------------------------------------- */

void sim_prefill_release(sim_t *s, sim_state_t *t)
{
    if (t->prefill_held) {
        t->prefill_held = false;
        rtr_backlog_remove(&s->prefills[t->prefill].backlog, &t->counted);
    }
}

void sim_decode_release(sim_t *s, sim_state_t *t)
{
    sim_decode_t *d = &s->decodes[t->decode];

    if (t->decode_held) {
        t->decode_held = false;
        d->sequences--;
        d->promised -= t->need_blocks;
        d->decoding -= t->phase == SIM_PHASE_DECODE;
    }
}

void sim_request_end(sim_t *s, uint32_t r)
{
    sim_state_t *t = &s->states[r];

    sim_prefill_release(s, t);
    sim_decode_release(s, t);
    t->phase = SIM_PHASE_ENDED;
    s->ended++;
    if (s->config->progress != NULL && s->ended % PROGRESS_EVERY == 0) {
        s->config->progress(s->config->ctx, s->ended, s->trace->count);
    }
}

static bool is_good(const sim_t *s, double ttft_s, double tbt_s)
{
    const rtr_slo_t *slo = &s->config->slo;
    return (slo->ttft_ms == 0 || ttft_s * 1000 <= slo->ttft_ms) &&
           (slo->tbt_ms == 0 || tbt_s * 1000 <= slo->tbt_ms);
}

void sim_request_complete(sim_t *s, uint32_t r)
{
    const sim_state_t *t = &s->states[r];
    const sim_request_t *request = sim_request_of(s, r);
    const double answer_ns = (double)(s->now_ns - t->first_ns);
    const double ttft_s = (double)(t->first_ns - request->arrival_ns) / 1e9;
    const double tbt_s =
        request->output_tokens > 1 ? answer_ns / 1e9 / (request->output_tokens - 1) : 0;

    sim_samples_add(&s->ttft, ttft_s);
    if (request->output_tokens > 1) {
        sim_samples_add(&s->tbt, tbt_s);
    }
    s->answer_ns =
        s->answer_ns < 0 ? answer_ns : s->answer_ns + ANSWER_SMOOTH * (answer_ns - s->answer_ns);
    s->result->completed++;
    s->result->good += is_good(s, ttft_s, tbt_s);
    sim_request_end(s, r);
}

void sim_request_refuse(sim_t *s, uint32_t r, uint32_t retry_s)
{
    s->result->rejected++;
    s->refused += retry_s > 0;
    s->retry_s += retry_s;
    sim_request_end(s, r);
}

/* --- running ---------------------------------------------------------------------------------- */

static td_status_t handle(sim_t *s, const sim_event_t *e)
{
    switch ((sim_event_kind_t)e->kind) {
    case SIM_EVENT_PREFILLED:
        return s->prefills[e->id].service == e->version ? sim_prefill_done(s, e->id) : TD_OK;
    case SIM_EVENT_HANDED:
        return s->states[e->id].attempt == e->version ? sim_handed(s, e->id) : TD_OK;
    case SIM_EVENT_STEPS:
        return s->decodes[e->id].plan == e->version ? sim_decode_steps(s, e->id) : TD_OK;
    case SIM_EVENT_FAULT:
        return sim_node_down(s, e->id);
    default:
        return sim_node_up(s, e->id);
    }
}

static td_status_t run(sim_t *s)
{
    uint32_t next = 0;
    uint64_t at = 0;

    for (uint32_t i = 0; i < s->config->fault_count; i++) {
        TD_TRY(sim_plan(s, s->config->faults[i].at_ns, SIM_EVENT_FAULT, i, 0));
    }
    while (next < s->trace->count || sim_events_next(&s->events, &at)) {
        const bool planned = sim_events_next(&s->events, &at);
        if (next < s->trace->count && (!planned || sim_request_of(s, next)->arrival_ns <= at)) {
            s->now_ns = sim_request_of(s, next)->arrival_ns;
            TD_TRY(sim_arrive(s, next++));
        } else {
            const sim_event_t e = sim_events_take(&s->events);
            s->now_ns = e.at_ns;
            TD_TRY(handle(s, &e));
        }
        if (s->now_ns > (uint64_t)SIM_TIME_NS_MAX) {
            return TD_ERR_TOO_LARGE;
        }
    }
    for (; s->waiting.first != SIM_NONE; s->result->failed++) { /* nodes are down for ever */
        sim_request_end(s, sim_fifo_take(s, &s->waiting));
    }
    return TD_OK;
}

static void on_evicted(void *ctx, uint32_t node, uint64_t block)
{
    sim_t *s = ctx;
    const td_block_key_t key = sim_key_of(block);

    if (s->config->exact_index && !s->config->pooled) {
        rtr_index_removed(s->index, &key, node);
    }
}

static uint32_t blocks_in(uint64_t tokens, uint32_t block_tokens)
{
    return (uint32_t)TD_MIN(tokens / block_tokens, UINT32_MAX / 4);
}

static td_status_t open_index(sim_t *s)
{
    const sim_config_t *c = s->config;
    const uint32_t slots = c->prefill_count + 1;
    const uint32_t own = blocks_in(c->node_cache_tokens, s->trace->block_tokens);
    const uint32_t store = blocks_in(c->store_tokens, s->trace->block_tokens);
    const uint64_t total = (uint64_t)own * c->prefill_count + store;
    const uint64_t used = TD_MIN(total, s->trace->block_count * (SIM_ATTEMPTS_MAX + 1));
    const sim_cache_config_t cache = {.node_count = slots,
                                      .entries_max = (uint32_t)TD_MAX(used, 1),
                                      .ctx = s,
                                      .evicted = on_evicted};
    const uint64_t hints = c->hints_max > 0 ? c->hints_max : TD_MAX(TD_MIN(used, HINTS_MAX), 1);

    TD_TRY(sim_cache_create(&cache, &s->cache));
    for (uint32_t i = 0; i < c->prefill_count; i++) {
        sim_cache_set_capacity(s->cache, i, own);
    }
    if (c->pooled) {
        sim_cache_set_capacity(s->cache, 0, (uint32_t)TD_MIN(total, UINT32_MAX));
    } else {
        sim_cache_set_capacity(s->cache, sim_store_slot(s), store);
    }
    return rtr_index_create((uint32_t)TD_MIN(hints, HINTS_MAX), slots, &s->index);
}

static td_status_t open_samples(sim_t *s)
{
    const uint32_t count = s->trace->count;

    TD_TRY(sim_samples_create(count, &s->ttft));
    TD_TRY(sim_samples_create(count, &s->tbt));
    TD_TRY(sim_samples_create(count, &s->error));
    return sim_samples_create(s->config->timing ? count : 1, &s->place_us);
}

static td_status_t sim_open(sim_t *s)
{
    const sim_config_t *c = s->config;
    uint32_t longest = 1;

    for (uint32_t r = 0; r < s->trace->count; r++) {
        longest = TD_MAX(longest, sim_request_of(s, r)->block_count);
    }
    s->states = td_calloc(s->trace->count, sizeof(*s->states));
    s->prefills = td_calloc(c->prefill_count, sizeof(*s->prefills));
    s->decodes = td_calloc(c->decode_count, sizeof(*s->decodes));
    s->prefill_views = td_calloc(c->prefill_count, sizeof(*s->prefill_views));
    s->decode_views = td_calloc(c->decode_count, sizeof(*s->decode_views));
    s->match = td_calloc(c->prefill_count + 1, sizeof(*s->match));
    s->keys = td_calloc(longest, sizeof(*s->keys));
    if (s->states == NULL || s->prefills == NULL || s->decodes == NULL ||
        s->prefill_views == NULL || s->decode_views == NULL || s->match == NULL ||
        s->keys == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    for (uint32_t i = 0; i < c->prefill_count; i++) {
        s->prefills[i].up = true;
        s->prefills[i].current = SIM_NONE;
        s->prefills[i].queue.first = SIM_NONE;
    }
    for (uint32_t i = 0; i < c->decode_count; i++) {
        s->decodes[i].up = true;
        s->decodes[i].plan_ns = SIM_NEVER;
        s->decodes[i].joining.first = SIM_NONE;
    }
    s->waiting.first = SIM_NONE;
    s->random = c->seed;
    s->answer_ns = -1;
    TD_TRY(open_samples(s));
    return open_index(s);
}

static void sim_close(sim_t *s)
{
    for (uint32_t i = 0; s->decodes != NULL && i < s->config->decode_count; i++) {
        sim_batch_fini(&s->decodes[i].batch);
    }
    sim_events_fini(&s->events);
    td_free(s->states);
    td_free(s->prefills);
    td_free(s->decodes);
    td_free(s->prefill_views);
    td_free(s->decode_views);
    td_free(s->match);
    td_free(s->keys);
    sim_cache_destroy(s->cache);
    rtr_index_destroy(s->index);
    sim_samples_fini(&s->ttft);
    sim_samples_fini(&s->tbt);
    sim_samples_fini(&s->error);
    sim_samples_fini(&s->place_us);
}

static void count_prefill(const sim_t *s, sim_result_t *out)
{
    uint64_t sum = 0;
    uint64_t most = 0;
    uint64_t busy_ns = 0;

    for (uint32_t i = 0; i < s->config->prefill_count; i++) {
        sum += s->prefills[i].computed_tokens;
        most = TD_MAX(most, s->prefills[i].computed_tokens);
        busy_ns += s->prefills[i].busy_ns;
    }
    out->load_max_over_mean = sum > 0 ? (double)most * s->config->prefill_count / (double)sum : 0;
    out->prefill_busy =
        s->now_ns > 0 ? (double)busy_ns / (double)s->now_ns / s->config->prefill_count : 0;
}

static void count_all(sim_t *s, sim_result_t *out)
{
    const double blocks = (double)TD_MAX(s->blocks_total, 1);
    const uint64_t span_ns =
        sim_request_of(s, s->trace->count - 1)->arrival_ns - sim_request_of(s, 0)->arrival_ns;

    out->requests = s->trace->count;
    out->hit_rate = (double)s->blocks_local / blocks;
    out->hit_rate_pulled = (double)(s->blocks_local + s->blocks_pulled) / blocks;
    out->span_s = (double)span_ns / 1e9;
    out->goodput_rps = span_ns > 0 ? out->good / out->span_s : 0;
    out->pulled_gb = (double)s->pulled_bytes / 1e9;
    out->ttft_mean_s = sim_samples_mean(&s->ttft);
    out->ttft_p50_s = sim_samples_at(&s->ttft, 0.5);
    out->ttft_p90_s = sim_samples_at(&s->ttft, 0.9);
    out->ttft_p99_s = sim_samples_at(&s->ttft, 0.99);
    out->tbt_mean_s = sim_samples_mean(&s->tbt);
    out->tbt_p90_s = sim_samples_at(&s->tbt, 0.9);
    out->ttft_error = sim_samples_mean(&s->error);
    out->retry_after_mean_s = s->refused > 0 ? s->retry_s / s->refused : 0;
    out->place_us_p50 = sim_samples_at(&s->place_us, 0.5);
    out->place_us_p99 = sim_samples_at(&s->place_us, 0.99);
    count_prefill(s, out);
}

td_status_t sim_run(const sim_config_t *config, const sim_trace_t *trace, sim_result_t *out)
{
    sim_result_t result = {0};
    sim_t s = {.config = config, .trace = trace, .result = &result};
    td_status_t status = TD_OK;

    if (config->prefill_count == 0 || config->prefill_count > SIM_NODES_MAX ||
        config->decode_count == 0 || config->decode_count > SIM_NODES_MAX) {
        return TD_ERR_INVALID;
    }
    status = sim_open(&s);
    if (status == TD_OK) {
        status = run(&s);
    }
    if (status == TD_OK) {
        TD_ASSERT(s.ended == trace->count); /* every request ends once */
        count_all(&s, &result);
        *out = result;
    }
    sim_close(&s);
    return status;
}

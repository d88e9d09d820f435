#include "router/sim_run.h"

#include <math.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "router/rtr_hints.h"
#include "router/sim_batch.h"
#include "router/sim_cache.h"
#include "router/sim_events.h"
#include "router/sim_random.h"
#include "router/sim_stats.h"

#define NONE UINT32_MAX
#define NEVER UINT64_MAX
#define HINTS_MAX (1u << 24)
#define ANSWER_SMOOTH 0.02 /* of the mean time of an answer, the newest one's share */
#define PROGRESS_EVERY 1000u
/* What takes longer is cut, so that no sum of times overflows. */
#define LINK_NS_MAX 1e12
#define SERVICE_NS_MAX 1e15

typedef enum event_kind {
    EVENT_PREFILLED, /* id: prefill node; version: its service */
    EVENT_HANDED,    /* id: request; version: its attempt */
    EVENT_STEPS,     /* id: decode node; version: its plan */
    EVENT_FAULT,     /* id: of the schedule */
    EVENT_UP         /* the same */
} event_kind_t;

typedef enum phase {
    PHASE_NEW = 0,
    PHASE_WAITING, /* in the router's queue */
    PHASE_PREFILL, /* in a node's queue, or being computed */
    PHASE_HANDOFF,
    PHASE_DECODE,
    PHASE_ENDED
} phase_t;

typedef struct state {
    phase_t phase;
    uint32_t attempt;
    uint32_t prefill;
    uint32_t decode;
    uint32_t next;  /* in the queue that it is in */
    uint32_t given; /* tokens, of earlier attempts too */
    rtr_work_t counted;
    bool prefill_held;
    bool decode_held;
    uint32_t need_blocks;
    uint32_t cached_tokens; /* what the node found */
    uint32_t pulled_tokens;
    uint64_t placed_ns;
    uint64_t pulled_ns; /* when what is pulled has come */
    uint64_t first_ns;  /* of the first token; 0: not yet */
    double predicted_ns;
} state_t;

typedef struct fifo {
    uint32_t first;
    uint32_t last;
} fifo_t;

typedef struct prefill {
    bool up;
    uint32_t service; /* version of what is being computed */
    uint32_t current; /* request, or NONE */
    fifo_t queue;
    uint64_t egress_ns; /* its link is free from then on */
    uint64_t ingress_ns;
    uint64_t service_ns;
    uint64_t computed_tokens;
    uint64_t busy_ns;
    rtr_backlog_t backlog; /* as the router counts it */
    rtr_estimate_t estimate;
} prefill_t;

typedef struct decode {
    bool up;
    uint32_t plan; /* version of the next boundary that was planned */
    uint32_t plan_steps;
    uint64_t plan_ns; /* NEVER: none */
    fifo_t joining;
    uint64_t ingress_ns;
    sim_batch_t batch;
    uint32_t sequences; /* as the router counts it */
    uint32_t decoding;
    uint64_t promised;
    rtr_estimate_t tbt;
} decode_t;

typedef struct sim {
    const sim_config_t *config;
    const sim_trace_t *trace;
    uint64_t now_ns;
    sim_events_t events;
    state_t *states;     /* owned [trace->count] */
    prefill_t *prefills; /* owned [prefill_count] */
    decode_t *decodes;   /* owned [decode_count] */
    rtr_prefill_view_t *prefill_views;
    rtr_decode_view_t *decode_views;
    uint32_t *match;      /* owned [slots]: blocks */
    td_block_key_t *keys; /* owned [blocks of the longest prompt] */
    sim_cache_t *cache;
    rtr_hints_t *hints;
    rtr_estimate_t typical;
    rtr_estimate_t typical_tbt;
    fifo_t waiting;
    uint64_t store_egress_ns;
    uint64_t turn;
    uint64_t random;
    double answer_ns; /* mean, or negative */
    uint64_t blocks_total;
    uint64_t blocks_local;
    uint64_t blocks_pulled;
    uint64_t pulled_bytes;
    double retry_s;
    uint32_t refused;
    uint32_t ended;
    sim_samples_t ttft;
    sim_samples_t tbt;
    sim_samples_t error;
    sim_samples_t place_us;
    sim_result_t *result; /* borrowed */
} sim_t;

static const sim_request_t *request_of(const sim_t *s, uint32_t r)
{
    return &s->trace->requests[r];
}

static const uint64_t *blocks_of(const sim_t *s, uint32_t r)
{
    return &s->trace->blocks[request_of(s, r)->first_block];
}

static uint32_t full_blocks(const sim_t *s, uint32_t r)
{
    return request_of(s, r)->input_tokens / s->trace->block_tokens;
}

/* The store is one more holder of blocks; with a pooled cache the nodes are one. */
static uint32_t store_slot(const sim_t *s)
{
    return s->config->prefill_count;
}

static uint32_t cache_slot(const sim_t *s, uint32_t node)
{
    return s->config->pooled ? 0 : node;
}

static void fifo_put(sim_t *s, fifo_t *q, uint32_t r)
{
    s->states[r].next = NONE;
    if (q->first == NONE) {
        q->first = r;
    } else {
        s->states[q->last].next = r;
    }
    q->last = r;
}

static uint32_t fifo_take(sim_t *s, fifo_t *q)
{
    const uint32_t r = q->first;
    if (r != NONE) {
        q->first = s->states[r].next;
    }
    return r;
}

static void fifo_remove(sim_t *s, fifo_t *q, uint32_t r)
{
    uint32_t before = NONE;

    for (uint32_t at = q->first; at != NONE; before = at, at = s->states[at].next) {
        if (at == r) {
            *(before == NONE ? &q->first : &s->states[before].next) = s->states[r].next;
            q->last = q->last == r ? before : q->last;
            return;
        }
    }
}

/* The key that the router would see; any of its bits are as good as another's. */
static td_block_key_t key_of(uint64_t block)
{
    uint64_t state = block;
    const uint64_t words[2] = {sim_random(&state), sim_random(&state)};
    td_block_key_t key;

    memcpy(key.bytes, words, sizeof(key.bytes));
    return key;
}

static void on_evicted(void *ctx, uint32_t node, uint64_t block)
{
    sim_t *s = ctx;
    const td_block_key_t key = key_of(block);

    if (s->config->exact_index && !s->config->pooled) {
        rtr_hints_remove(s->hints, &key, node);
    }
}

static td_status_t plan(sim_t *s, uint64_t at_ns, event_kind_t kind, uint32_t id, uint32_t version)
{
    return sim_events_add(
        &s->events, (sim_event_t){.at_ns = at_ns, .kind = kind, .id = id, .version = version});
}

/* --- the ends of a request -------------------------------------------------------------------- */

static void prefill_release(sim_t *s, state_t *t)
{
    if (t->prefill_held) {
        t->prefill_held = false;
        rtr_backlog_remove(&s->prefills[t->prefill].backlog, &t->counted);
    }
}

static void decode_release(sim_t *s, state_t *t)
{
    decode_t *d = &s->decodes[t->decode];

    if (t->decode_held) {
        t->decode_held = false;
        d->sequences--;
        d->promised -= t->need_blocks;
        d->decoding -= t->phase == PHASE_DECODE;
    }
}

static void request_end(sim_t *s, uint32_t r)
{
    state_t *t = &s->states[r];

    prefill_release(s, t);
    decode_release(s, t);
    t->phase = PHASE_ENDED;
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

static void request_complete(sim_t *s, uint32_t r)
{
    const state_t *t = &s->states[r];
    const sim_request_t *request = request_of(s, r);
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
    request_end(s, r);
}

static void request_refuse(sim_t *s, uint32_t r, uint32_t retry_s)
{
    s->result->rejected++;
    s->refused += retry_s > 0;
    s->retry_s += retry_s;
    request_end(s, r);
}

/* --- prefill nodes ---------------------------------------------------------------------------- */

static uint64_t link_ns(const sim_t *s, double bytes)
{
    return (uint64_t)fmin(bytes / s->config->model.link_gb_s, LINK_NS_MAX); /* it is bytes a ns */
}

static double kv_bytes(const sim_t *s, uint64_t tokens)
{
    return (double)tokens * s->config->model.kv_token_bytes;
}

static double service_ns(const sim_t *s, const rtr_work_t *work)
{
    const sim_model_t *m = &s->config->model;
    const double ns = m->prefill_prompt_ms * 1e6 +
                      m->prefill_token_us * 1e3 * (double)work->tokens +
                      m->prefill_pair_ns * (double)work->pairs;
    return fmin(ns, SERVICE_NS_MAX);
}

static td_status_t prefill_begin(sim_t *s, uint32_t node)
{
    prefill_t *p = &s->prefills[node];
    const state_t *t = NULL;
    rtr_work_t work;
    uint64_t begin = 0;

    if (!p->up || p->current != NONE || p->queue.first == NONE) {
        return TD_OK;
    }
    p->current = fifo_take(s, &p->queue);
    t = &s->states[p->current];
    work = rtr_work_of(request_of(s, p->current)->input_tokens + t->given, t->cached_tokens, 0);
    begin = TD_MAX(s->now_ns, t->pulled_ns);
    p->service_ns = (uint64_t)service_ns(s, &work);
    p->computed_tokens += work.tokens;
    p->busy_ns += p->service_ns;
    return plan(s, begin + p->service_ns, EVENT_PREFILLED, node, ++p->service);
}

/* New blocks go to the store behind what the link has to do. */
static void store_offer(sim_t *s, uint32_t r, prefill_t *p)
{
    const uint64_t *blocks = blocks_of(s, r);
    const uint32_t full = full_blocks(s, r);
    uint32_t held = 0;

    if (s->config->store_tokens == 0 || s->config->pooled) {
        return;
    }
    held = sim_cache_match(s->cache, store_slot(s), blocks, full, false);
    sim_cache_use(s->cache, store_slot(s), blocks, full);
    sim_cache_set_ready(s->cache, store_slot(s), blocks, full);
    p->egress_ns = TD_MAX(p->egress_ns, s->now_ns) +
                   link_ns(s, kv_bytes(s, (uint64_t)(full - held) * s->trace->block_tokens));
}

/* Layers have left while the next ones were computed: at least the last one is still to go. */
static td_status_t prefill_done(sim_t *s, uint32_t node)
{
    prefill_t *p = &s->prefills[node];
    const uint32_t r = p->current;
    state_t *t = &s->states[r];
    decode_t *d = &s->decodes[t->decode];
    const uint64_t whole =
        link_ns(s, kv_bytes(s, (uint64_t)request_of(s, r)->input_tokens + t->given));
    const uint64_t last = (uint64_t)((double)whole / s->config->model.layers);
    const uint64_t tail = whole > p->service_ns + last ? whole - p->service_ns : last;
    const uint64_t end = TD_MAX(s->now_ns, TD_MAX(p->egress_ns, d->ingress_ns)) + tail;

    sim_cache_set_ready(s->cache, cache_slot(s, node), blocks_of(s, r), full_blocks(s, r));
    t->phase = PHASE_HANDOFF;
    p->egress_ns = end;
    d->ingress_ns = end;
    store_offer(s, r, p);
    p->current = NONE;
    TD_TRY(plan(s, end, EVENT_HANDED, r, t->attempt));
    return prefill_begin(s, node);
}

static void learn_prefill(sim_t *s, uint32_t r)
{
    const state_t *t = &s->states[r];
    prefill_t *p = &s->prefills[t->prefill];
    const rtr_work_t work =
        rtr_work_of(request_of(s, r)->input_tokens + t->given, t->cached_tokens, t->pulled_tokens);
    const double ns = (double)rtr_backlog_end(&p->backlog, t->placed_ns, s->now_ns);

    rtr_work_observe(&p->estimate, &s->typical, &work, ns);
    rtr_work_observe(&s->typical, NULL, &work, ns);
}

/* --- decode nodes ----------------------------------------------------------------------------- */

/* The next boundary at which something changes: a sequence begins, or the first one ends. */
static td_status_t decode_plan(sim_t *s, uint32_t node)
{
    decode_t *d = &s->decodes[node];
    const sim_model_t *m = &s->config->model;
    const uint32_t steps = d->joining.first != NONE ? sim_batch_until(&d->batch, m, s->now_ns)
                                                    : sim_batch_until_end(&d->batch);
    uint64_t at = 0;

    if (d->batch.count == 0) {
        d->batch.stamp_ns = s->now_ns; /* it was idle */
    }
    at = TD_MAX(d->batch.stamp_ns + sim_batch_steps_ns(&d->batch, m, steps), s->now_ns);
    if ((d->joining.first == NONE && d->batch.count == 0) || at >= d->plan_ns) {
        return TD_OK;
    }
    d->plan_ns = at;
    d->plan_steps = steps;
    return plan(s, at, EVENT_STEPS, node, ++d->plan);
}

static void learn_tbt(sim_t *s, decode_t *d)
{
    const double ns = sim_batch_step_ns(&d->batch, &s->config->model);
    const uint64_t blocks = d->sequences > 0 ? d->promised * d->decoding / d->sequences : 0;

    rtr_tbt_observe(&d->tbt, &s->typical_tbt, d->decoding, blocks, ns);
    rtr_tbt_observe(&s->typical_tbt, NULL, d->decoding, blocks, ns);
}

static td_status_t queue_probe(sim_t *s);

static td_status_t decode_steps(sim_t *s, uint32_t node)
{
    decode_t *d = &s->decodes[node];
    bool ended = false;

    d->plan_ns = NEVER;
    sim_batch_advance(&d->batch, &s->config->model, d->plan_steps);
    if (sim_batch_until_end(&d->batch) == 0 && d->batch.count > 0) {
        learn_tbt(s, d);
    }
    for (uint32_t i = 0; i < d->batch.count;) {
        if (d->batch.seqs[i].left == 0) {
            const sim_batch_seq_t seq = sim_batch_remove(&d->batch, i);
            s->states[seq.request].given += seq.given;
            request_complete(s, seq.request);
            ended = true;
        } else {
            i++;
        }
    }
    while (d->joining.first != NONE) {
        const uint32_t r = fifo_take(s, &d->joining);
        const state_t *t = &s->states[r];
        const sim_request_t *request = request_of(s, r);
        TD_TRY(sim_batch_add(&d->batch, r, (uint64_t)request->input_tokens + t->given,
                             request->output_tokens - t->given));
    }
    TD_TRY(decode_plan(s, node));
    return ended ? queue_probe(s) : TD_OK;
}

/* The decode node has the KV, and gives the first token, which the prefill node has drawn. */
static td_status_t handed(sim_t *s, uint32_t r)
{
    state_t *t = &s->states[r];
    decode_t *d = &s->decodes[t->decode];
    const sim_request_t *request = request_of(s, r);

    learn_prefill(s, r);
    prefill_release(s, t);
    t->given++;
    if (t->first_ns == 0) {
        t->first_ns = s->now_ns;
        if (t->predicted_ns >= 0) {
            const double actual = (double)(s->now_ns - t->placed_ns);
            sim_samples_add(&s->error, fabs(actual - t->predicted_ns) /
                                           fmax(fmax(actual, t->predicted_ns), 1));
        }
    }
    if (t->given >= request->output_tokens) {
        request_complete(s, r);
        return queue_probe(s);
    }
    t->phase = PHASE_DECODE;
    d->decoding++;
    fifo_put(s, &d->joining, r);
    return decode_plan(s, t->decode);
}

/* --- the router ------------------------------------------------------------------------------- */

static uint32_t match_of(sim_t *s, uint32_t r)
{
    const uint64_t *blocks = blocks_of(s, r);
    const uint32_t count = sim_request_reusable(request_of(s, r), s->trace->block_tokens);
    const bool has_store = s->config->store_tokens > 0;
    uint32_t best = 0;

    if (s->config->pooled) {
        best = sim_cache_match(s->cache, 0, blocks, count, false);
        for (uint32_t i = 0; i < s->config->prefill_count; i++) {
            s->match[i] = best;
        }
        return best;
    }
    for (uint32_t i = 0; i < full_blocks(s, r); i++) {
        s->keys[i] = key_of(blocks[i]);
    }
    best = rtr_hints_match(s->hints, s->keys, count, s->match);
    s->match[store_slot(s)] =
        has_store ? sim_cache_match(s->cache, store_slot(s), blocks, count, true) : 0;
    return TD_MAX(best, s->match[store_slot(s)]);
}

static rtr_place_ask_t ask_of(sim_t *s, uint32_t r, uint32_t best)
{
    const state_t *t = &s->states[r];
    const sim_request_t *request = request_of(s, r);

    return (rtr_place_ask_t){
        .policy = s->config->policy,
        .now_ns = s->now_ns,
        .turn = s->turn++,
        .draw = sim_random(&s->random),
        .prompt_tokens = request->input_tokens + t->given,
        .granule_tokens = 1,
        .pool_tokens = s->config->pooled ? 0 : best * s->trace->block_tokens,
        .keep_local = s->config->keep_local,
        .typical = &s->typical,
        .sequences = 1,
        .need_blocks = t->need_blocks,
        .typical_tbt = &s->typical_tbt,
    };
}

static void fill_views(sim_t *s)
{
    const uint32_t total =
        (uint32_t)fmin(s->config->model.decode_kv_tokens / s->trace->block_tokens, UINT32_MAX);

    for (uint32_t i = 0; i < s->config->prefill_count; i++) {
        const prefill_t *p = &s->prefills[i];
        s->prefill_views[i] =
            (rtr_prefill_view_t){.allowed = p->up,
                                 .match_tokens = s->match[i] * s->trace->block_tokens,
                                 .lately = rtr_backlog_lately(&p->backlog, s->now_ns),
                                 .backlog = &p->backlog,
                                 .estimate = &p->estimate};
    }
    for (uint32_t i = 0; i < s->config->decode_count; i++) {
        const decode_t *d = &s->decodes[i];
        s->decode_views[i] =
            (rtr_decode_view_t){.allowed = d->up,
                                .running = d->sequences,
                                .promised = d->promised,
                                .free_blocks = (uint32_t)(total - TD_MIN(d->promised, total)),
                                .total_blocks = total,
                                .tbt = &d->tbt};
    }
}

/* Who is asked for what is pulled: of those that should have it, the one whose link is free first.
 * NONE: nobody has more than the node itself. */
static uint32_t choose_source(const sim_t *s, uint32_t node, uint32_t blocks)
{
    uint32_t best = NONE;
    uint64_t best_ns = NEVER;

    for (uint32_t i = 0; i < s->config->prefill_count; i++) {
        const prefill_t *p = &s->prefills[i];
        if (i != node && p->up && s->match[i] >= blocks && p->egress_ns < best_ns) {
            best = i;
            best_ns = p->egress_ns;
        }
    }
    if (s->config->store_tokens > 0 && s->match[store_slot(s)] >= blocks &&
        s->store_egress_ns < best_ns) {
        best = store_slot(s);
    }
    return best;
}

/* Pulls what the source really has of the first `wanted` blocks, over both links. Answers blocks of
 * the prompt that are there then. */
static uint32_t pull(sim_t *s, uint32_t r, uint32_t node, uint32_t source, uint32_t own,
                     uint32_t wanted)
{
    state_t *t = &s->states[r];
    prefill_t *p = &s->prefills[node];
    const uint32_t there = sim_cache_match(s->cache, source, blocks_of(s, r), wanted, true);
    uint64_t *egress =
        source == store_slot(s) ? &s->store_egress_ns : &s->prefills[source].egress_ns;
    double bytes = 0;

    if (there <= own) {
        return own;
    }
    t->pulled_tokens = (there - own) * s->trace->block_tokens;
    bytes = kv_bytes(s, t->pulled_tokens);
    t->pulled_ns = TD_MAX(s->now_ns, TD_MAX(*egress, p->ingress_ns)) + link_ns(s, bytes);
    *egress = t->pulled_ns;
    p->ingress_ns = t->pulled_ns;
    s->pulled_bytes += (uint64_t)bytes;
    return there;
}

/* What a node finds in the store by itself is fetched where that is faster than computing it. */
static bool store_pays(const sim_t *s, uint32_t r, uint32_t node, uint32_t own, uint32_t there)
{
    const uint32_t bt = s->trace->block_tokens;
    const uint32_t tokens = request_of(s, r)->input_tokens;
    const rtr_work_t without = rtr_work_of(tokens, own * bt, 0);
    const rtr_work_t with = rtr_work_of(tokens, there * bt, 0);
    const uint64_t free_ns = TD_MAX(s->store_egress_ns, s->prefills[node].ingress_ns);
    const double waits = free_ns > s->now_ns ? (double)(free_ns - s->now_ns) : 0;

    return there > own && waits + (double)link_ns(s, kv_bytes(s, (uint64_t)(there - own) * bt)) <
                              service_ns(s, &without) - service_ns(s, &with);
}

/* Answers the blocks of the prompt that the node will have. */
static uint32_t fetch_prefix(sim_t *s, uint32_t r, const rtr_prefill_choice_t *choice, uint32_t own)
{
    const uint32_t wanted = choice->cached_tokens / s->trace->block_tokens;
    const uint32_t store = s->config->store_tokens > 0 ? s->match[store_slot(s)] : 0;
    uint32_t source = NONE;
    uint32_t cached = own;

    if (choice->work.pulled > 0) {
        source = choose_source(s, choice->node, wanted);
    }
    if (source != NONE) {
        cached = pull(s, r, choice->node, source, own, wanted);
    }
    if (cached == own && store_pays(s, r, choice->node, own, store)) {
        cached = pull(s, r, choice->node, store_slot(s), own, store);
    }
    return cached;
}

/* The node looks what it has, and pulls what the router counted on. */
static td_status_t dispatch(sim_t *s, uint32_t r, const rtr_prefill_choice_t *choice,
                            uint32_t decode)
{
    state_t *t = &s->states[r];
    prefill_t *p = &s->prefills[choice->node];
    decode_t *d = &s->decodes[decode];
    const uint64_t *blocks = blocks_of(s, r);
    const uint32_t reusable = sim_request_reusable(request_of(s, r), s->trace->block_tokens);
    const uint32_t slot = cache_slot(s, choice->node);
    const uint32_t own = sim_cache_match(s->cache, slot, blocks, reusable, false);
    uint32_t cached = 0;

    t->prefill = choice->node;
    t->decode = decode;
    t->counted = choice->work;
    t->placed_ns = s->now_ns;
    t->pulled_ns = s->now_ns;
    t->pulled_tokens = 0;
    cached = fetch_prefix(s, r, choice, own);
    t->cached_tokens = cached * s->trace->block_tokens;
    t->phase = PHASE_PREFILL;
    t->prefill_held = true;
    t->decode_held = true;
    rtr_backlog_add(&p->backlog, &t->counted, s->now_ns);
    d->sequences++;
    d->promised += t->need_blocks;
    s->blocks_local += t->attempt == 0 ? own : 0;
    s->blocks_pulled += t->attempt == 0 ? cached - own : 0;
    sim_cache_use(s->cache, slot, blocks, full_blocks(s, r));
    if (!s->config->pooled) {
        rtr_hints_add(s->hints, s->keys, full_blocks(s, r), choice->node);
    }
    fifo_put(s, &p->queue, r);
    return prefill_begin(s, choice->node);
}

/* Places a request, or refuses it. *waits_out: it finds no room now. */
static td_status_t place(sim_t *s, uint32_t r, bool *waits_out)
{
    state_t *t = &s->states[r];
    const uint64_t began = s->config->timing ? td_now_ns() : 0;
    const rtr_place_ask_t ask = ask_of(s, r, match_of(s, r));
    rtr_prefill_choice_t prefill;
    rtr_decode_choice_t decode;
    rtr_admit_ask_t admit = {.slo = s->config->slo, .answer_ns = s->answer_ns};
    uint32_t retry_s = 0;

    fill_views(s);
    prefill = rtr_place_prefill(&ask, s->prefill_views, s->config->prefill_count);
    decode = rtr_place_decode(&ask, s->decode_views, s->config->decode_count);
    if (s->config->timing) {
        sim_samples_add(&s->place_us, (double)(td_now_ns() - began) / 1000);
    }
    *waits_out = prefill.node == RTR_PLACE_NONE || decode.node == RTR_PLACE_NONE || !decode.fits;
    admit.ttft_ns = prefill.ttft_ns;
    admit.tbt_ns = decode.tbt_ns;
    if (s->config->admission && t->attempt == 0 && t->phase == PHASE_NEW) {
        if (*waits_out || rtr_admit(&admit, &retry_s) != RTR_ADMIT) {
            *waits_out = false;
            request_refuse(s, r, TD_MAX(retry_s, 1));
            return TD_OK;
        }
    }
    if (*waits_out) {
        return TD_OK;
    }
    t->predicted_ns = prefill.ttft_ns;
    return dispatch(s, r, &prefill, decode.node);
}

/* The first in the queue are placed until one finds no room. */
static td_status_t queue_probe(sim_t *s)
{
    bool waits = false;

    while (s->waiting.first != NONE && !waits) {
        const uint32_t r = s->waiting.first;
        const uint32_t next = s->states[r].next;
        TD_TRY(place(s, r, &waits));
        if (!waits) {
            s->waiting.first = next;
        }
    }
    return TD_OK;
}

static void wait_for_room(sim_t *s, uint32_t r)
{
    s->states[r].phase = PHASE_WAITING;
    fifo_put(s, &s->waiting, r);
}

static td_status_t arrive(sim_t *s, uint32_t r)
{
    const sim_request_t *request = request_of(s, r);
    const uint32_t bt = s->trace->block_tokens;
    const uint64_t need = ((uint64_t)request->input_tokens + request->output_tokens + bt - 1) / bt;
    bool waits = s->waiting.first != NONE;

    s->states[r].need_blocks = (uint32_t)need;
    s->blocks_total += request->block_count;
    if ((double)need * bt > s->config->model.decode_kv_tokens) {
        request_refuse(s, r, 0);
        return TD_OK;
    }
    if (!waits || s->config->admission) {
        TD_TRY(place(s, r, &waits));
    }
    if (waits) {
        wait_for_room(s, r);
    }
    return TD_OK;
}

/* --- failures --------------------------------------------------------------------------------- */

/* Takes an attempt back; what was given stays given, and the next node goes on behind it. */
static void attempt_undo(sim_t *s, uint32_t r)
{
    state_t *t = &s->states[r];
    prefill_t *p = &s->prefills[t->prefill];
    decode_t *d = &s->decodes[t->decode];

    if (t->phase == PHASE_PREFILL && p->current != r) {
        fifo_remove(s, &p->queue, r);
    } else if (t->phase == PHASE_PREFILL) {
        p->current = NONE;
        p->service++;
    } else if (t->phase == PHASE_DECODE) {
        fifo_remove(s, &d->joining, r);
    }
    for (uint32_t i = 0; i < d->batch.count; i++) {
        if (t->phase == PHASE_DECODE && d->batch.seqs[i].request == r) {
            t->given += sim_batch_remove(&d->batch, i).given;
            break;
        }
    }
    prefill_release(s, t);
    decode_release(s, t);
    t->attempt++;
    t->phase = PHASE_WAITING;
}

static td_status_t attempt_again(sim_t *s, uint32_t r)
{
    if (s->states[r].attempt >= SIM_ATTEMPTS_MAX) {
        s->result->failed++;
        request_end(s, r);
        return TD_OK;
    }
    s->result->moved++;
    wait_for_room(s, r);
    return TD_OK;
}

static bool is_on(const state_t *t, const sim_fault_t *f)
{
    const bool on_prefill = t->phase == PHASE_PREFILL || t->phase == PHASE_HANDOFF;

    if (f->is_prefill) {
        return on_prefill && t->prefill == f->node;
    }
    return (on_prefill || t->phase == PHASE_DECODE) && t->decode == f->node;
}

static void node_clear(sim_t *s, const sim_fault_t *f)
{
    if (f->is_prefill) {
        prefill_t *p = &s->prefills[f->node];
        p->up = false;
        p->estimate = (rtr_estimate_t){0};
        if (!s->config->pooled) {
            sim_cache_clear(s->cache, f->node);
            rtr_hints_purge(s->hints, f->node);
        }
    } else {
        decode_t *d = &s->decodes[f->node];
        if (d->batch.count > 0) { /* as far as it came */
            sim_batch_advance(&d->batch, &s->config->model,
                              sim_batch_until(&d->batch, &s->config->model, s->now_ns));
        }
        d->up = false;
        d->plan++;
        d->plan_ns = NEVER;
        d->tbt = (rtr_estimate_t){0};
    }
}

static td_status_t node_down(sim_t *s, uint32_t fault)
{
    const sim_fault_t *f = &s->config->faults[fault];

    node_clear(s, f);
    for (uint32_t r = 0; r < s->trace->count; r++) {
        const uint32_t prefill = s->states[r].prefill;
        if (is_on(&s->states[r], f)) {
            attempt_undo(s, r);
            TD_TRY(attempt_again(s, r));
            TD_TRY(prefill_begin(s, prefill));
        }
    }
    if (f->up_ns != NEVER) {
        TD_TRY(plan(s, f->up_ns, EVENT_UP, fault, 0));
    }
    return queue_probe(s);
}

static td_status_t node_up(sim_t *s, uint32_t fault)
{
    const sim_fault_t *f = &s->config->faults[fault];

    *(f->is_prefill ? &s->prefills[f->node].up : &s->decodes[f->node].up) = true;
    return queue_probe(s);
}

/* --- running ---------------------------------------------------------------------------------- */

static td_status_t handle(sim_t *s, const sim_event_t *e)
{
    switch ((event_kind_t)e->kind) {
    case EVENT_PREFILLED:
        return s->prefills[e->id].service == e->version ? prefill_done(s, e->id) : TD_OK;
    case EVENT_HANDED:
        return s->states[e->id].attempt == e->version ? handed(s, e->id) : TD_OK;
    case EVENT_STEPS:
        return s->decodes[e->id].plan == e->version ? decode_steps(s, e->id) : TD_OK;
    case EVENT_FAULT:
        return node_down(s, e->id);
    default:
        return node_up(s, e->id);
    }
}

static td_status_t run(sim_t *s)
{
    uint32_t next = 0;
    uint64_t at = 0;

    for (uint32_t i = 0; i < s->config->fault_count; i++) {
        TD_TRY(plan(s, s->config->faults[i].at_ns, EVENT_FAULT, i, 0));
    }
    while (next < s->trace->count || sim_events_next(&s->events, &at)) {
        const bool planned = sim_events_next(&s->events, &at);
        if (next < s->trace->count && (!planned || request_of(s, next)->arrival_ns <= at)) {
            s->now_ns = request_of(s, next)->arrival_ns;
            TD_TRY(arrive(s, next++));
        } else {
            const sim_event_t e = sim_events_take(&s->events);
            s->now_ns = e.at_ns;
            TD_TRY(handle(s, &e));
        }
        if (s->now_ns > (uint64_t)SIM_TIME_NS_MAX) {
            return TD_ERR_TOO_LARGE;
        }
    }
    for (; s->waiting.first != NONE; s->result->failed++) { /* nodes are down for ever */
        request_end(s, fifo_take(s, &s->waiting));
    }
    return TD_OK;
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
        sim_cache_set_capacity(s->cache, store_slot(s), store);
    }
    return rtr_hints_create((uint32_t)TD_MIN(hints, HINTS_MAX), slots, &s->hints);
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
        longest = TD_MAX(longest, request_of(s, r)->block_count);
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
        s->prefills[i].current = NONE;
        s->prefills[i].queue.first = NONE;
    }
    for (uint32_t i = 0; i < c->decode_count; i++) {
        s->decodes[i].up = true;
        s->decodes[i].plan_ns = NEVER;
        s->decodes[i].joining.first = NONE;
    }
    s->waiting.first = NONE;
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
    rtr_hints_destroy(s->hints);
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
        request_of(s, s->trace->count - 1)->arrival_ns - request_of(s, 0)->arrival_ns;

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

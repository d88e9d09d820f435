#include "router/sim_internal.h"

#include <math.h>

#include "common/base/td_clock.h"
#include "router/sim_random.h"

static uint32_t match_of(sim_t *s, uint32_t r)
{
    const uint64_t *blocks = sim_blocks_of(s, r);
    const uint32_t count = sim_request_reusable(sim_request_of(s, r), s->trace->block_tokens);
    const bool has_store = s->config->store_tokens > 0;
    uint32_t best = 0;

    if (s->config->pooled) {
        best = sim_cache_match(s->cache, 0, blocks, count, false);
        for (uint32_t i = 0; i < s->config->prefill_count; i++) {
            s->match[i] = best;
        }
        return best;
    }
    for (uint32_t i = 0; i < sim_full_blocks(s, r); i++) {
        s->keys[i] = sim_key_of(blocks[i]);
    }
    best = rtr_index_match(s->index, s->keys, count, s->match);
    s->match[sim_store_slot(s)] =
        has_store ? sim_cache_match(s->cache, sim_store_slot(s), blocks, count, true) : 0;
    return TD_MAX(best, s->match[sim_store_slot(s)]);
}

static rtr_place_ask_t ask_of(sim_t *s, uint32_t r, uint32_t best)
{
    const sim_state_t *t = &s->states[r];
    const sim_request_t *request = sim_request_of(s, r);

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
        const sim_prefill_t *p = &s->prefills[i];
        s->prefill_views[i] =
            (rtr_prefill_view_t){.allowed = p->up,
                                 .match_tokens = s->match[i] * s->trace->block_tokens,
                                 .lately = rtr_backlog_lately(&p->backlog, s->now_ns),
                                 .backlog = &p->backlog,
                                 .estimate = &p->estimate};
    }
    for (uint32_t i = 0; i < s->config->decode_count; i++) {
        const sim_decode_t *d = &s->decodes[i];
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
 * SIM_NONE: nobody has more than the node itself. */
static uint32_t choose_source(const sim_t *s, uint32_t node, uint32_t blocks)
{
    uint32_t best = SIM_NONE;
    uint64_t best_ns = SIM_NEVER;

    for (uint32_t i = 0; i < s->config->prefill_count; i++) {
        const sim_prefill_t *p = &s->prefills[i];
        if (i != node && p->up && s->match[i] >= blocks && p->egress_ns < best_ns) {
            best = i;
            best_ns = p->egress_ns;
        }
    }
    if (s->config->store_tokens > 0 && s->match[sim_store_slot(s)] >= blocks &&
        s->store_egress_ns < best_ns) {
        best = sim_store_slot(s);
    }
    return best;
}

/* Pulls what the source really has of the first `wanted` blocks, over both links. Answers blocks of
 * the prompt that are there then. */
static uint32_t pull(sim_t *s, uint32_t r, uint32_t node, uint32_t source, uint32_t own,
                     uint32_t wanted)
{
    sim_state_t *t = &s->states[r];
    sim_prefill_t *p = &s->prefills[node];
    const uint32_t there = sim_cache_match(s->cache, source, sim_blocks_of(s, r), wanted, true);
    uint64_t *egress =
        source == sim_store_slot(s) ? &s->store_egress_ns : &s->prefills[source].egress_ns;
    double bytes = 0;

    if (there <= own) {
        return own;
    }
    t->pulled_tokens = (there - own) * s->trace->block_tokens;
    bytes = sim_kv_bytes(s, t->pulled_tokens);
    t->pulled_ns = TD_MAX(s->now_ns, TD_MAX(*egress, p->ingress_ns)) + sim_link_ns(s, bytes);
    *egress = t->pulled_ns;
    p->ingress_ns = t->pulled_ns;
    s->pulled_bytes += (uint64_t)bytes;
    return there;
}

/* What a node finds in the store by itself is fetched where that is faster than computing it. */
static bool store_pays(const sim_t *s, uint32_t r, uint32_t node, uint32_t own, uint32_t there)
{
    const uint32_t bt = s->trace->block_tokens;
    const uint32_t tokens = sim_request_of(s, r)->input_tokens;
    const rtr_work_t without = rtr_work_of(tokens, own * bt, 0);
    const rtr_work_t with = rtr_work_of(tokens, there * bt, 0);
    const uint64_t free_ns = TD_MAX(s->store_egress_ns, s->prefills[node].ingress_ns);
    const double waits = free_ns > s->now_ns ? (double)(free_ns - s->now_ns) : 0;

    return there > own &&
           waits + (double)sim_link_ns(s, sim_kv_bytes(s, (uint64_t)(there - own) * bt)) <
               sim_service_ns(s, &without) - sim_service_ns(s, &with);
}

/* Answers the blocks of the prompt that the node will have. */
static uint32_t fetch_prefix(sim_t *s, uint32_t r, const rtr_prefill_choice_t *choice, uint32_t own)
{
    const uint32_t wanted = choice->cached_tokens / s->trace->block_tokens;
    const uint32_t store = s->config->store_tokens > 0 ? s->match[sim_store_slot(s)] : 0;
    uint32_t source = SIM_NONE;
    uint32_t cached = own;

    if (choice->work.pulled > 0) {
        source = choose_source(s, choice->node, wanted);
    }
    if (source != SIM_NONE) {
        cached = pull(s, r, choice->node, source, own, wanted);
    }
    if (cached == own && store_pays(s, r, choice->node, own, store)) {
        cached = pull(s, r, choice->node, sim_store_slot(s), own, store);
    }
    return cached;
}

/* The node looks what it has, and pulls what the router counted on. */
static td_status_t dispatch(sim_t *s, uint32_t r, const rtr_prefill_choice_t *choice,
                            uint32_t decode)
{
    sim_state_t *t = &s->states[r];
    sim_prefill_t *p = &s->prefills[choice->node];
    sim_decode_t *d = &s->decodes[decode];
    const uint64_t *blocks = sim_blocks_of(s, r);
    const uint32_t reusable = sim_request_reusable(sim_request_of(s, r), s->trace->block_tokens);
    const uint32_t slot = sim_cache_slot(s, choice->node);
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
    t->phase = SIM_PHASE_PREFILL;
    t->prefill_held = true;
    t->decode_held = true;
    rtr_backlog_add(&p->backlog, &t->counted, s->now_ns);
    d->sequences++;
    d->promised += t->need_blocks;
    s->blocks_local += t->attempt == 0 ? own : 0;
    s->blocks_pulled += t->attempt == 0 ? cached - own : 0;
    sim_cache_use(s->cache, slot, blocks, sim_full_blocks(s, r));
    if (!s->config->pooled) {
        (s->config->exact_index ? rtr_index_stored : rtr_index_expect)(
            s->index, s->keys, sim_full_blocks(s, r), choice->node);
    }
    sim_fifo_put(s, &p->queue, r);
    return sim_prefill_begin(s, choice->node);
}

/* Places a request, or refuses it. *waits_out: it finds no room now. */
static td_status_t place(sim_t *s, uint32_t r, bool *waits_out)
{
    sim_state_t *t = &s->states[r];
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
    if (s->config->admission && t->attempt == 0 && t->phase == SIM_PHASE_NEW) {
        if (*waits_out || rtr_admit(&admit, &retry_s) != RTR_ADMIT) {
            *waits_out = false;
            sim_request_refuse(s, r, TD_MAX(retry_s, 1));
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
td_status_t sim_queue_probe(sim_t *s)
{
    bool waits = false;

    while (s->waiting.first != SIM_NONE && !waits) {
        const uint32_t r = s->waiting.first;
        const uint32_t next = s->states[r].next;
        TD_TRY(place(s, r, &waits));
        if (!waits) {
            s->waiting.first = next;
        }
    }
    return TD_OK;
}

void sim_wait_for_room(sim_t *s, uint32_t r)
{
    s->states[r].phase = SIM_PHASE_WAITING;
    sim_fifo_put(s, &s->waiting, r);
}

td_status_t sim_arrive(sim_t *s, uint32_t r)
{
    const sim_request_t *request = sim_request_of(s, r);
    const uint32_t bt = s->trace->block_tokens;
    const uint64_t need = ((uint64_t)request->input_tokens + request->output_tokens + bt - 1) / bt;
    bool waits = s->waiting.first != SIM_NONE;

    s->states[r].need_blocks = (uint32_t)need;
    s->blocks_total += request->block_count;
    if ((double)need * bt > s->config->model.decode_kv_tokens) {
        sim_request_refuse(s, r, 0);
        return TD_OK;
    }
    if (!waits || s->config->admission) {
        TD_TRY(place(s, r, &waits));
    }
    if (waits) {
        sim_wait_for_room(s, r);
    }
    return TD_OK;
}

#include "router/sim_internal.h"

#include <math.h>

/* What takes longer is cut, so that no sum of times overflows. */
#define LINK_NS_MAX 1e12
#define SERVICE_NS_MAX 1e15

/* --- prefill nodes ---------------------------------------------------------------------------- */

uint64_t sim_link_ns(const sim_t *s, double bytes)
{
    return (uint64_t)fmin(bytes / s->config->model.link_gb_s, LINK_NS_MAX); /* it is bytes a ns */
}

double sim_kv_bytes(const sim_t *s, uint64_t tokens)
{
    return (double)tokens * s->config->model.kv_token_bytes;
}

double sim_service_ns(const sim_t *s, const rtr_work_t *work)
{
    const sim_model_t *m = &s->config->model;
    const double ns = m->prefill_prompt_ms * 1e6 +
                      m->prefill_token_us * 1e3 * (double)work->tokens +
                      m->prefill_pair_ns * (double)work->pairs;
    return fmin(ns, SERVICE_NS_MAX);
}

td_status_t sim_prefill_begin(sim_t *s, uint32_t node)
{
    sim_prefill_t *p = &s->prefills[node];
    const sim_state_t *t = NULL;
    rtr_work_t work;
    uint64_t begin = 0;

    if (!p->up || p->current != SIM_NONE || p->queue.first == SIM_NONE) {
        return TD_OK;
    }
    p->current = sim_fifo_take(s, &p->queue);
    t = &s->states[p->current];
    work = rtr_work_of(sim_request_of(s, p->current)->input_tokens + t->given, t->cached_tokens, 0);
    begin = TD_MAX(s->now_ns, t->pulled_ns);
    p->service_ns = (uint64_t)sim_service_ns(s, &work);
    p->computed_tokens += work.tokens;
    p->busy_ns += p->service_ns;
    return sim_plan(s, begin + p->service_ns, SIM_EVENT_PREFILLED, node, ++p->service);
}

/* New blocks go to the store behind what the link has to do. */
static void store_offer(sim_t *s, uint32_t r, sim_prefill_t *p)
{
    const uint64_t *blocks = sim_blocks_of(s, r);
    const uint32_t full = sim_full_blocks(s, r);
    uint32_t held = 0;

    if (s->config->store_tokens == 0 || s->config->pooled) {
        return;
    }
    held = sim_cache_match(s->cache, sim_store_slot(s), blocks, full, false);
    sim_cache_use(s->cache, sim_store_slot(s), blocks, full);
    sim_cache_set_ready(s->cache, sim_store_slot(s), blocks, full);
    p->egress_ns =
        TD_MAX(p->egress_ns, s->now_ns) +
        sim_link_ns(s, sim_kv_bytes(s, (uint64_t)(full - held) * s->trace->block_tokens));
}

/* Layers have left while the next ones were computed: at least the last one is still to go. */
td_status_t sim_prefill_done(sim_t *s, uint32_t node)
{
    sim_prefill_t *p = &s->prefills[node];
    const uint32_t r = p->current;
    sim_state_t *t = &s->states[r];
    sim_decode_t *d = &s->decodes[t->decode];
    const uint64_t whole =
        sim_link_ns(s, sim_kv_bytes(s, (uint64_t)sim_request_of(s, r)->input_tokens + t->given));
    const uint64_t last = (uint64_t)((double)whole / s->config->model.layers);
    const uint64_t tail = whole > p->service_ns + last ? whole - p->service_ns : last;
    const uint64_t end = TD_MAX(s->now_ns, TD_MAX(p->egress_ns, d->ingress_ns)) + tail;

    sim_cache_set_ready(s->cache, sim_cache_slot(s, node), sim_blocks_of(s, r),
                        sim_full_blocks(s, r));
    t->phase = SIM_PHASE_HANDOFF;
    p->egress_ns = end;
    d->ingress_ns = end;
    store_offer(s, r, p);
    p->current = SIM_NONE;
    TD_TRY(sim_plan(s, end, SIM_EVENT_HANDED, r, t->attempt));
    return sim_prefill_begin(s, node);
}

static void learn_prefill(sim_t *s, uint32_t r)
{
    const sim_state_t *t = &s->states[r];
    sim_prefill_t *p = &s->prefills[t->prefill];
    const rtr_work_t work = rtr_work_of(sim_request_of(s, r)->input_tokens + t->given,
                                        t->cached_tokens, t->pulled_tokens);
    const double ns = (double)rtr_backlog_end(&p->backlog, t->placed_ns, s->now_ns);

    rtr_work_observe(&p->estimate, &s->typical, &work, ns);
    rtr_work_observe(&s->typical, NULL, &work, ns);
}

/* --- decode nodes ----------------------------------------------------------------------------- */

/* The next boundary at which something changes: a sequence begins, or the first one ends. */
static td_status_t decode_plan(sim_t *s, uint32_t node)
{
    sim_decode_t *d = &s->decodes[node];
    const sim_model_t *m = &s->config->model;
    const uint32_t steps = d->joining.first != SIM_NONE ? sim_batch_until(&d->batch, m, s->now_ns)
                                                        : sim_batch_until_end(&d->batch);
    uint64_t at = 0;

    if (d->batch.count == 0) {
        d->batch.stamp_ns = s->now_ns; /* it was idle */
    }
    at = TD_MAX(d->batch.stamp_ns + sim_batch_steps_ns(&d->batch, m, steps), s->now_ns);
    if ((d->joining.first == SIM_NONE && d->batch.count == 0) || at >= d->plan_ns) {
        return TD_OK;
    }
    d->plan_ns = at;
    d->plan_steps = steps;
    return sim_plan(s, at, SIM_EVENT_STEPS, node, ++d->plan);
}

static void learn_tbt(sim_t *s, sim_decode_t *d)
{
    const double ns = sim_batch_step_ns(&d->batch, &s->config->model);
    const uint64_t blocks = d->sequences > 0 ? d->promised * d->decoding / d->sequences : 0;

    rtr_tbt_observe(&d->tbt, &s->typical_tbt, d->decoding, blocks, ns);
    rtr_tbt_observe(&s->typical_tbt, NULL, d->decoding, blocks, ns);
}

td_status_t sim_decode_steps(sim_t *s, uint32_t node)
{
    sim_decode_t *d = &s->decodes[node];
    bool ended = false;

    d->plan_ns = SIM_NEVER;
    sim_batch_advance(&d->batch, &s->config->model, d->plan_steps);
    if (sim_batch_until_end(&d->batch) == 0 && d->batch.count > 0) {
        learn_tbt(s, d);
    }
    for (uint32_t i = 0; i < d->batch.count;) {
        if (d->batch.seqs[i].left == 0) {
            const sim_batch_seq_t seq = sim_batch_remove(&d->batch, i);
            s->states[seq.request].given += seq.given;
            sim_request_complete(s, seq.request);
            ended = true;
        } else {
            i++;
        }
    }
    while (d->joining.first != SIM_NONE) {
        const uint32_t r = sim_fifo_take(s, &d->joining);
        const sim_state_t *t = &s->states[r];
        const sim_request_t *request = sim_request_of(s, r);
        TD_TRY(sim_batch_add(&d->batch, r, (uint64_t)request->input_tokens + t->given,
                             request->output_tokens - t->given));
    }
    TD_TRY(decode_plan(s, node));
    return ended ? sim_queue_probe(s) : TD_OK;
}

/* The decode node has the KV, and gives the first token, which the prefill node has drawn. */
td_status_t sim_handed(sim_t *s, uint32_t r)
{
    sim_state_t *t = &s->states[r];
    sim_decode_t *d = &s->decodes[t->decode];
    const sim_request_t *request = sim_request_of(s, r);

    learn_prefill(s, r);
    sim_prefill_release(s, t);
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
        sim_request_complete(s, r);
        return sim_queue_probe(s);
    }
    t->phase = SIM_PHASE_DECODE;
    d->decoding++;
    sim_fifo_put(s, &d->joining, r);
    return decode_plan(s, t->decode);
}

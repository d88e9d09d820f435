#include "router/sim_internal.h"

/* Takes an attempt back; what was given stays given, and the next node goes on behind it. */
static void attempt_undo(sim_t *s, uint32_t r)
{
    sim_state_t *t = &s->states[r];
    sim_prefill_t *p = &s->prefills[t->prefill];
    sim_decode_t *d = &s->decodes[t->decode];

    if (t->phase == SIM_PHASE_PREFILL && p->current != r) {
        sim_fifo_remove(s, &p->queue, r);
    } else if (t->phase == SIM_PHASE_PREFILL) {
        p->current = SIM_NONE;
        p->service++;
    } else if (t->phase == SIM_PHASE_DECODE) {
        sim_fifo_remove(s, &d->joining, r);
    }
    for (uint32_t i = 0; i < d->batch.count; i++) {
        if (t->phase == SIM_PHASE_DECODE && d->batch.seqs[i].request == r) {
            t->given += sim_batch_remove(&d->batch, i).given;
            break;
        }
    }
    sim_prefill_release(s, t);
    sim_decode_release(s, t);
    t->attempt++;
    t->phase = SIM_PHASE_WAITING;
}

static td_status_t attempt_again(sim_t *s, uint32_t r)
{
    if (s->states[r].attempt >= SIM_ATTEMPTS_MAX) {
        s->result->failed++;
        sim_request_end(s, r);
        return TD_OK;
    }
    s->result->moved++;
    sim_wait_for_room(s, r);
    return TD_OK;
}

static bool is_on(const sim_state_t *t, const sim_fault_t *f)
{
    const bool on_prefill = t->phase == SIM_PHASE_PREFILL || t->phase == SIM_PHASE_HANDOFF;

    if (f->is_prefill) {
        return on_prefill && t->prefill == f->node;
    }
    return (on_prefill || t->phase == SIM_PHASE_DECODE) && t->decode == f->node;
}

static void node_clear(sim_t *s, const sim_fault_t *f)
{
    if (f->is_prefill) {
        sim_prefill_t *p = &s->prefills[f->node];
        p->up = false;
        p->estimate = (rtr_estimate_t){0};
        if (!s->config->pooled) {
            sim_cache_clear(s->cache, f->node);
            rtr_index_purge(s->index, f->node);
        }
    } else {
        sim_decode_t *d = &s->decodes[f->node];
        if (d->batch.count > 0) { /* as far as it came */
            sim_batch_advance(&d->batch, &s->config->model,
                              sim_batch_until(&d->batch, &s->config->model, s->now_ns));
        }
        d->up = false;
        d->plan++;
        d->plan_ns = SIM_NEVER;
        d->tbt = (rtr_estimate_t){0};
    }
}

td_status_t sim_node_down(sim_t *s, uint32_t fault)
{
    const sim_fault_t *f = &s->config->faults[fault];

    node_clear(s, f);
    for (uint32_t r = 0; r < s->trace->count; r++) {
        const uint32_t prefill = s->states[r].prefill;
        if (is_on(&s->states[r], f)) {
            attempt_undo(s, r);
            TD_TRY(attempt_again(s, r));
            TD_TRY(sim_prefill_begin(s, prefill));
        }
    }
    if (f->up_ns != SIM_NEVER) {
        TD_TRY(sim_plan(s, f->up_ns, SIM_EVENT_UP, fault, 0));
    }
    return sim_queue_probe(s);
}

td_status_t sim_node_up(sim_t *s, uint32_t fault)
{
    const sim_fault_t *f = &s->config->faults[fault];

    *(f->is_prefill ? &s->prefills[f->node].up : &s->decodes[f->node].up) = true;
    return sim_queue_probe(s);
}

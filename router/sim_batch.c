#include "router/sim_batch.h"

#include <math.h>

#include "common/base/td_base.h"

#define STEPS_NS_MAX 1e15 /* eleven days: what takes longer is cut, so that no sum overflows */

double sim_batch_step_ns(const sim_batch_t *b, const sim_model_t *m)
{
    return m->decode_step_ms * 1e6 + m->decode_sequence_us * 1e3 * b->count +
           m->decode_kv_token_ns * (double)b->context;
}

uint64_t sim_batch_steps_ns(const sim_batch_t *b, const sim_model_t *m, uint32_t steps)
{
    const double n = steps;
    const double growth = m->decode_kv_token_ns * b->count;
    return (uint64_t)fmin(n * sim_batch_step_ns(b, m) + growth * n * (n - 1) / 2, STEPS_NS_MAX);
}

uint32_t sim_batch_until_end(const sim_batch_t *b)
{
    uint32_t least = UINT32_MAX;

    for (uint32_t i = 0; i < b->count; i++) {
        least = TD_MIN(least, b->seqs[i].left);
    }
    return b->count > 0 ? least : 0;
}

uint32_t sim_batch_until(const sim_batch_t *b, const sim_model_t *m, uint64_t now_ns)
{
    uint32_t low = 0;
    uint32_t high = sim_batch_until_end(b);

    while (low < high) {
        const uint32_t middle = low + (high - low) / 2;
        if (b->stamp_ns + sim_batch_steps_ns(b, m, middle) >= now_ns) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return low;
}

void sim_batch_advance(sim_batch_t *b, const sim_model_t *m, uint32_t steps)
{
    b->stamp_ns += sim_batch_steps_ns(b, m, steps);
    for (uint32_t i = 0; i < b->count; i++) {
        TD_ASSERT(b->seqs[i].left >= steps);
        b->seqs[i].left -= steps;
        b->seqs[i].given += steps;
    }
    b->context += (uint64_t)b->count * steps;
}

td_status_t sim_batch_add(sim_batch_t *b, uint32_t request, uint64_t context, uint32_t left)
{
    if (b->count == b->cap) {
        const uint32_t cap = b->cap * 2 + 16;
        sim_batch_seq_t *grown = td_realloc(b->seqs, cap * sizeof(*grown));
        if (grown == NULL) {
            return TD_ERR_NO_MEMORY;
        }
        b->seqs = grown;
        b->cap = cap;
    }
    b->seqs[b->count++] = (sim_batch_seq_t){.request = request, .left = left, .context = context};
    b->context += context;
    return TD_OK;
}

sim_batch_seq_t sim_batch_remove(sim_batch_t *b, uint32_t at)
{
    const sim_batch_seq_t seq = b->seqs[at];

    b->context -= seq.context + seq.given;
    b->seqs[at] = b->seqs[--b->count];
    return seq;
}

void sim_batch_fini(sim_batch_t *b)
{
    td_free(b->seqs);
    *b = (sim_batch_t){0};
}

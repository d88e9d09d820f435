#include "common/model/td_deal.h"

#include <stdatomic.h>

#include "common/base/td_base.h"
#include "common/model/td_threads.h"

/* What is left of a thread's share: [begin, end) as one number, begin in its upper half. Steps take
 * turns with two of them: one that is still in the step before meets only shares that are used up,
 * never those of the next. */
typedef struct share {
    _Alignas(2 * TD_CACHE_LINE_BYTES) atomic_uint_fast64_t left[2]; /* CPUs fetch lines in pairs */
    uint32_t step; /* its own thread's: how many there were */
} share_t;

struct td_deal {
    uint32_t threads;
    share_t *shares; /* owned; [threads] */
};

static uint64_t pack_range(uint32_t begin, uint32_t end)
{
    return (uint64_t)begin << 32 | end;
}

/* Relaxed throughout: the barriers order what the pieces read and write, the numbers only say whose
 * they are. */
void td_deal_next(td_deal_t *deal, uint32_t thread_idx, uint32_t count)
{
    share_t *own = &deal->shares[thread_idx];

    own->step++;
    atomic_store_explicit(&own->left[own->step % 2],
                          pack_range(td_threads_share(count, thread_idx, deal->threads),
                                     td_threads_share(count, thread_idx + 1, deal->threads)),
                          memory_order_relaxed);
}

/* Takes half of what is left, from the front or from the end: the first takes are long, and with
 * the last ones, of one piece, all finish at nearly the same time. */
static bool take_half(atomic_uint_fast64_t *left, bool front, uint32_t *begin, uint32_t *end)
{
    uint64_t seen = atomic_load_explicit(left, memory_order_relaxed);

    for (;;) {
        const uint32_t from = (uint32_t)(seen >> 32);
        const uint32_t to = (uint32_t)seen;
        const uint32_t count = (to - from + 1) / 2;
        if (from >= to) {
            return false;
        }
        *begin = front ? from : to - count;
        *end = *begin + count;
        if (atomic_compare_exchange_weak_explicit(
                left, &seen, front ? pack_range(*end, to) : pack_range(from, *begin),
                memory_order_relaxed, memory_order_relaxed)) {
            return true;
        }
    }
}

bool td_deal_take(td_deal_t *deal, uint32_t thread_idx, uint32_t *begin, uint32_t *end)
{
    const uint32_t turn = deal->shares[thread_idx].step % 2;
    bool took = take_half(&deal->shares[thread_idx].left[turn], true, begin, end);

    for (uint32_t i = 1; !took && i < deal->threads; i++) {
        share_t *other = &deal->shares[(thread_idx + i) % deal->threads];
        took = take_half(&other->left[turn], false, begin, end);
    }
    return took;
}

void td_deal_destroy(td_deal_t *deal)
{
    if (deal != NULL) {
        td_free(deal->shares);
        td_free(deal);
    }
}

td_status_t td_deal_create(uint32_t threads, td_deal_t **out)
{
    td_deal_t *deal = td_calloc(1, sizeof(*deal));

    TD_ASSERT(threads > 0 && threads <= TD_THREADS_MAX);
    if (deal != NULL) {
        deal->threads = threads;
        deal->shares = td_alloc_aligned(_Alignof(share_t), threads * sizeof(*deal->shares));
    }
    if (deal == NULL || deal->shares == NULL) {
        td_deal_destroy(deal);
        return TD_ERR_NO_MEMORY;
    }
    for (uint32_t i = 0; i < threads; i++) {
        deal->shares[i] = (share_t){.step = 0};
    }
    *out = deal;
    return TD_OK;
}

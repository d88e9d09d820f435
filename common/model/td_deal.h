/* td_deal.h - deals out the work of a pass's steps: every thread starts with an even share of what
 * a step has, so that it reads one linear stream, and one that is done goes on with the end of what
 * another has left. Two threads with equal shares do not finish together: they share the memory's
 * bandwidth by luck, and the machine with others. Source: guided self-scheduling (Polychronopoulos
 * and Kuck 1987), by halves of each share.
 *
 * Threads: each thread of a pool by its own index; a td_threads_barrier() ends each step. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "common/base/td_status.h"

typedef struct td_deal td_deal_t;

/** For this many threads. Owner: the caller destroys it. Errors: TD_ERR_NO_MEMORY. */
TD_MUST_CHECK td_status_t td_deal_create(uint32_t threads, td_deal_t **out);
void td_deal_destroy(td_deal_t *deal);
/** This thread's share of the next step, which has count pieces. Every thread calls it with the
 * same count, behind its last td_deal_take() of the step before. Where no barrier lies between this
 * and the first td_deal_take(), nobody takes from a thread that has not come yet. */
void td_deal_next(td_deal_t *deal, uint32_t thread_idx, uint32_t count);
/** Takes pieces [begin, end) of the step, at least one; false when nothing is left to take. */
bool td_deal_take(td_deal_t *deal, uint32_t thread_idx, uint32_t *begin, uint32_t *end);

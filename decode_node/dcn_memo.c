/* Answers that are remembered: by this node (td_memo, what the drafter memo copies from), and for
 * other nodes by the store's master, which is asked about a prompt that is new here while it is
 * still being computed elsewhere. Hints only: a wrong one costs time, no token (I1). */
#include "decode_node/dcn_node.h"

#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/base/td_log.h"

#define SHARED_MIN 8u /* tokens: a shorter answer is not worth a message */

td_memo_start_t dcn_memo_start(const dcn_node_t *d, const dcn_ticket_t *t)
{
    const td_msg_work_t *w = &t->work;
    td_memo_start_t start = {.root = &t->root,
                             .has_parent = t->full_blocks > 0,
                             .key = t->keys[t->blocks - 1],
                             .tail_tokens =
                                 w->prompt_tokens % td_node_layout(&d->node)->block_tokens};

    start.tail = w->prompt + w->prompt_tokens - start.tail_tokens;
    if (start.has_parent) {
        start.parent = t->keys[t->full_blocks - 1];
    }
    return start;
}

/* What is known here of a prompt's answer, from its beginning. */
static uint32_t known(dcn_node_t *d, const td_memo_start_t *start, uint32_t path[TD_MEMO_PATH_MAX])
{
    return td_memo_find(d->memo, &start->key, td_now_ns(), path);
}

void dcn_memo_ask(dcn_node_t *d, const dcn_ticket_t *t)
{
    uint32_t path[TD_MEMO_PATH_MAX];
    const td_memo_start_t start = dcn_memo_start(d, t);

    if (d->memo != NULL && t->work.drafter == TD_DRAFTER_MEMO && t->work.k_max > 0 &&
        known(d, &start, path) == 0) {
        kvs_client_memo_get(d->store, &start.key, t->ticket);
    }
}

void dcn_memo_told(dcn_node_t *d, const td_msg_memo_t *found)
{
    const dcn_ticket_t *t = d->tickets;
    td_memo_start_t start;

    while (t != NULL && t->ticket != found->tag) {
        t = t->next;
    }
    if (t == NULL || d->memo == NULL) {
        return; /* it has ended */
    }
    for (uint32_t i = 0; i < found->count; i++) {
        if (found->tokens[i] >= d->node.info->vocab_size) {
            TD_LOG_WARN("remembered answer refused", "req=%s token=%u vocab=%u", t->work.request_id,
                        found->tokens[i], d->node.info->vocab_size);
            return;
        }
    }
    start = dcn_memo_start(d, t);
    if (td_block_key_equal(&start.key, found->key)) {
        td_memo_learn(d->memo, &start, found->tokens, found->count, td_now_ns());
        td_metric_add(d->memo_told, 1);
        td_metric_set(d->memo_paths, td_memo_count(d->memo));
    }
}

/* What others have, or have told, goes out no second time. */
void dcn_memo_learn(dcn_node_t *d, const dcn_choice_t *c)
{
    uint32_t path[TD_MEMO_PATH_MAX];
    td_memo_start_t start;
    uint32_t before = 0;

    if (d->memo == NULL) {
        return;
    }
    start = dcn_memo_start(d, c->ticket);
    before = known(d, &start, path);
    if (c->given >= SHARED_MIN && (before == 0 || before > c->given ||
                                   memcmp(path, c->tokens, before * sizeof(*path)) != 0)) {
        kvs_client_memo_put(d->store, &start.key, c->tokens, c->given);
    }
    td_memo_learn(d->memo, &start, c->tokens, c->given, td_now_ns());
    td_metric_set(d->memo_paths, td_memo_count(d->memo));
}

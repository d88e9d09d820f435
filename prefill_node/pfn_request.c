/* A prefill request's life: how it begins, and its one end. */
#include "prefill_node/pfn_node.h"

#include <stdio.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/base/td_fault.h"
#include "common/base/td_log.h"

pfn_request_t *pfn_request_find(pfn_node_t *p, uint64_t ticket, uint32_t attempt)
{
    for (pfn_request_t *r = p->requests; r != NULL; r = r->next) {
        if (r->ticket == ticket && r->attempt == attempt) {
            return r;
        }
    }
    return NULL;
}

/* Prompts follow each other: the times since the last end add up to the time that we were busy. */
static uint64_t take_busy_ns(pfn_node_t *p, const pfn_request_t *r)
{
    const uint64_t now = td_now_ns();
    const uint64_t since = TD_MAX(r->start_ns, p->last_end_ns);

    p->last_end_ns = now;
    return now - since;
}

static void send_end(pfn_node_t *p, const pfn_request_t *r, td_status_t status)
{
    td_msg_t msg = {.type = TD_MSG_END};
    td_msg_end_t *m = &msg.u.end;
    uint32_t block_tokens = td_node_layout(&p->node)->block_tokens;

    *m = (td_msg_end_t){.ticket = r->ticket,
                        .attempt = r->attempt,
                        .leg = TD_ROLE_PREFILL,
                        .status = status,
                        .usage = {.prompt_tokens = r->work.prompt_tokens,
                                  .cached_local_tokens = r->local_blocks * block_tokens,
                                  .cached_store_tokens = r->store_blocks * block_tokens}};
    m->usage.computed_tokens =
        r->done_tokens -
        TD_MIN(r->done_tokens, m->usage.cached_local_tokens + m->usage.cached_store_tokens);
    m->busy_ns = status == TD_OK ? take_busy_ns(p, r) : 0;
    if (td_bus_send(p->node.proc.bus, r->router, &msg) != TD_OK) {
        TD_LOG_WARN("end not reported", "req=%s", r->work.request_id);
    }
}

static void request_free(pfn_node_t *p, pfn_request_t *r)
{
    pfn_request_t **link = &p->requests;
    while (*link != NULL && *link != r) {
        link = &(*link)->next;
    }
    if (*link == r) {
        *link = r->next;
        p->request_count--;
    }
    td_seq_fini(&r->seq);
    td_free(r->keys);
    td_free(r->hashes);
    td_free(r->verified);
    td_free(r->quarantined);
    td_free(r->first);
    td_free(r->prompt_top);
    td_free(r->prompt_logprob);
    td_free(r->prompt_top_count);
    td_msg_arena_free(r->arena);
    td_free(r);
}

void pfn_request_settle(pfn_node_t *p, pfn_request_t *r)
{
    if (r->state != PFN_DRAIN || r->computing || r->fetches > 0) {
        return;
    }
    for (uint32_t i = 0; i < r->quarantined_count; i++) {
        td_pool_release_quarantine(p->node.pool, r->quarantined[i]);
    }
    request_free(p, r);
}

static void end_span(pfn_node_t *p, pfn_request_t *r, td_status_t status)
{
    const uint32_t block_tokens = td_node_layout(&p->node)->block_tokens;

    td_span_text(&r->span, "tandem.request", r->work.request_id);
    td_span_number(&r->span, "tandem.attempt", r->attempt);
    td_span_text(&r->span, "tandem.decode", r->work.peer_id);
    td_span_number(&r->span, "tandem.prompt_tokens", r->work.prompt_tokens);
    td_span_number(&r->span, "tandem.local_tokens", (int64_t)r->local_blocks * block_tokens);
    td_span_number(&r->span, "tandem.store_tokens", (int64_t)r->store_blocks * block_tokens);
    td_span_text(&r->span, "tandem.status", td_status_name(status));
    r->span.failed = status != TD_OK;
    td_tracer_end(p->node.proc.tracer, &r->span, td_now_ns());
}

void pfn_request_end(pfn_node_t *p, pfn_request_t *r, td_status_t status)
{
    if (r->state == PFN_DRAIN) {
        return;
    }
    td_metric_add(status == TD_OK              ? p->requests_ok
                  : status == TD_ERR_CANCELLED ? p->requests_cancelled
                                               : p->requests_failed,
                  1);
    if (status != TD_OK && status != TD_ERR_CANCELLED) {
        TD_LOG_INFO("prefill failed", "req=%s attempt=%u status=%s", r->work.request_id, r->attempt,
                    td_status_name(status));
    }
    td_node_forget(&p->node, r->ticket, r->attempt);
    end_span(p, r, status);
    if (status !=
        TD_ERR_STALE) { /* else its router goes by another attempt, or is told by Register */
        send_end(p, r, status);
    }
    r->state = PFN_DRAIN;
    if (r->fetches > 0 || r->computing) {
        /* A pass or a transfer may still write into its blocks: nobody gets them before it is over.
         */
        r->quarantined_count = td_seq_fini_quarantine(&r->seq, r->quarantined);
    }
    pfn_request_settle(p, r);
}

bool pfn_request_needs(const pfn_request_t *r, uint32_t block)
{
    return td_seq_needs(&r->seq, r->work.prompt_tokens, block);
}

uint32_t pfn_request_blocks_max(const pfn_node_t *p, const td_msg_work_t *w)
{
    return td_attention_blocks_max(td_node_mask(&p->node), td_node_layout(&p->node)->block_tokens,
                                   w->prompt_tokens, p->chunk_tokens);
}

/* Why a request cannot be served, or TD_OK. */
static td_status_t check_work(const pfn_node_t *p, const td_msg_work_t *w)
{
    if (w->prompt_tokens > p->node.info->context_max || w->peer_id[0] == '\0' ||
        w->have_blocks > td_kv_blocks_for(td_node_layout(&p->node), w->prompt_tokens)) {
        return TD_ERR_INVALID;
    }
    for (uint32_t i = 0; i < w->prompt_tokens; i++) {
        if (w->prompt[i] >= p->node.info->vocab_size) {
            return TD_ERR_INVALID;
        }
    }
    if (pfn_request_blocks_max(p, w) > td_pool_counts(p->node.pool).total) {
        return TD_ERR_TOO_LARGE;
    }
    return TD_OK;
}

/* Does a request wait for blocks? Who comes later waits behind it, however little it needs: else a
 * long prompt would never find its blocks free together (F14). */
static bool blocks_are_awaited(const pfn_node_t *p, const pfn_request_t *by_other_than)
{
    for (const pfn_request_t *r = p->requests; r != NULL; r = r->next) {
        if (r != by_other_than && r->state == PFN_WAIT_BLOCKS) {
            return true;
        }
    }
    return false;
}

static td_status_t alloc_request(pfn_node_t *p, pfn_request_t *r)
{
    const td_kv_layout_t *layout = td_node_layout(&p->node);
    size_t prompt = r->work.prompt_tokens;
    td_block_root_t root;

    r->blocks = td_kv_blocks_for(layout, r->work.prompt_tokens);
    r->full_blocks = r->work.prompt_tokens / layout->block_tokens;
    r->keys = td_calloc(r->blocks, sizeof(*r->keys));
    r->hashes = td_calloc(r->blocks, sizeof(*r->hashes));
    r->verified = td_calloc(r->blocks, sizeof(*r->verified));
    r->quarantined = td_calloc(r->blocks, sizeof(*r->quarantined));
    r->first = td_calloc(r->work.n, sizeof(*r->first));
    if (r->keys == NULL || r->hashes == NULL || r->verified == NULL || r->quarantined == NULL ||
        r->first == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    if (r->work.prompt_logprobs) {
        r->prompt_top =
            td_calloc(prompt * TD_MAX(r->work.top_logprobs, 1u), sizeof(*r->prompt_top));
        r->prompt_logprob = td_calloc(prompt, sizeof(*r->prompt_logprob));
        r->prompt_top_count = td_calloc(prompt, sizeof(*r->prompt_top_count));
        if (r->prompt_top == NULL || r->prompt_logprob == NULL || r->prompt_top_count == NULL) {
            return TD_ERR_NO_MEMORY;
        }
    } else {
        /* The last position is always computed: its logits give the first token. */
        r->match_max = (r->work.prompt_tokens - 1) / layout->block_tokens;
    }
    td_node_root(&p->node, r->work.cache_salt.at, r->work.cache_salt.len, &root);
    td_block_keys(&root, r->work.prompt, prompt, layout->block_tokens, r->keys);
    if (r->blocks > r->full_blocks) {
        uint32_t start = r->full_blocks * layout->block_tokens;
        td_block_key_partial(&root, r->full_blocks > 0 ? &r->keys[r->full_blocks - 1] : NULL,
                             r->work.prompt + start, r->work.prompt_tokens - start,
                             &r->keys[r->full_blocks]);
    }
    return td_seq_init(&r->seq, p->node.pool, layout, td_node_mask(&p->node),
                       r->work.prompt_tokens);
}

void pfn_request_start(pfn_node_t *p, const td_msg_t *msg, td_msg_arena_t **arena)
{
    const td_msg_work_t *w = &msg->u.work;
    pfn_request_t *r = NULL;
    pfn_request_t **link = &p->requests;
    td_status_t status = TD_OK;

    if (td_node_is_forgotten(&p->node, w->ticket, w->attempt)) {
        return; /* cancelled before it came, or an older attempt */
    }
    for (r = p->requests; r != NULL; r = r->next) {
        if (r->ticket == w->ticket && r->state != PFN_DRAIN) {
            if (r->attempt >= w->attempt) {
                return; /* a duplicate */
            }
            pfn_request_end(p, r, TD_ERR_STALE);
            break;
        }
    }
    r = td_calloc(1, sizeof(*r));
    if (r == NULL) {
        return;
    }
    r->ticket = w->ticket;
    r->attempt = w->attempt;
    r->serial = ++p->next_serial;
    r->work = *w;
    (void)snprintf(r->router, sizeof(r->router), "%s", msg->sender_id);
    r->start_ns = td_now_ns();
    r->deadline_ns = r->start_ns + w->budget_ms * TD_NS_PER_MS;
    td_span_begin(&r->span, &r->work.trace, "prefill", r->start_ns);
    r->arena = *arena;
    *arena = NULL;
    while (*link != NULL) {
        link = &(*link)->next;
    }
    *link = r;
    p->request_count++;
    status = check_work(p, &r->work);
    if (status == TD_OK && (p->node.draining || p->request_count > PFN_REQUESTS_MAX)) {
        status = TD_ERR_BUSY;
    }
    if (status == TD_OK &&
        td_bus_peer_incarnation(p->node.proc.bus, r->work.peer_id) != r->work.peer_incarnation) {
        status = TD_ERR_PEER_DEAD;
    }
    if (status == TD_OK) {
        status = alloc_request(p, r);
    }
    if (status != TD_OK) {
        pfn_request_end(p, r, status);
        return;
    }
    TD_LOG_DEBUG("prefill started", "req=%s attempt=%u prompt_tokens=%u decode=%s",
                 r->work.request_id, r->attempt, r->work.prompt_tokens, r->work.peer_id);
    TD_FAULT_POINT("prefill_start");
    if (!blocks_are_awaited(p, r)) {
        pfn_prefix_begin(p, r);
    }
}

void pfn_request_tick(pfn_node_t *p)
{
    uint64_t now = td_now_ns();
    pfn_request_t *next = NULL;
    bool awaited = false;

    for (pfn_request_t *r = p->requests; r != NULL; r = next) {
        next = r->next;
        if (r->state == PFN_DRAIN) {
            continue;
        }
        if (now >= r->deadline_ns || (r->state == PFN_WAIT_ACK && now >= r->ack_deadline_ns)) {
            pfn_request_end(p, r, TD_ERR_TIMEOUT);
        } else if (r->state == PFN_WAIT_BLOCKS && !awaited) {
            pfn_prefix_begin(p, r);
            awaited = r->state == PFN_WAIT_BLOCKS;
        }
    }
}

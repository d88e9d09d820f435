/* What drafts were worth: counted for each request and told the router with its end; remembered,
 * for a router that begins anew; and what steps and passes cost here, for it to choose by. */
#include "decode_node/dcn_node.h"

#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/base/td_log.h"

#define TOLD_AT_ONCE 64u    /* entries of a message */
#define COSTS_EVERY_MS 250u /* a heartbeat shall not tell those of a batch long past */

_Static_assert(TD_MSG_DRAFTS_MAX == TD_DRAFT_TOKENS_MAX && TD_DRAFTER_KINDS <= TD_MSG_DRAFTERS_MAX,
               "what is told has room");
_Static_assert(TOLD_AT_ONCE <= TD_MSG_DRAFT_PAST_MAX, "a message has room");
_Static_assert(sizeof(((td_msg_draft_past_t *)0)->steps) == sizeof(((td_draft_past_t *)0)->steps),
               "weights travel as they are");

uint32_t dcn_worth_drafters(const dcn_node_t *d)
{
    uint32_t offered = 1u << TD_DRAFTER_PROMPT_LOOKUP | 1u << TD_DRAFTER_LOOKAHEAD;

    offered |= td_config_u64(d->node.proc.config, "memo-memory") > 0 ? 1u << TD_DRAFTER_MEMO : 0;
    offered |= d->draft_passes.model != NULL ? 1u << TD_DRAFTER_DRAFT_MODEL : 0;
    offered |= d->exit_passes.model != NULL ? 1u << TD_DRAFTER_EARLY_EXIT : 0;
    offered |= d->head_passes.model != NULL ? 1u << TD_DRAFTER_MEDUSA : 0;
    return offered;
}

/* --- of a request ----------------------------------------------------------------------------- */

void dcn_worth_begin(dcn_choice_t *c)
{
    dcn_ticket_t *t = c->ticket;

    if (c->drafter != TD_DRAFTER_NONE) {
        t->drafts.drafter = c->drafter;
        t->drafts.k_max = TD_MIN(t->work.k_max, TD_DRAFT_TOKENS_MAX);
    }
}

/* Against a step of the same rows without drafts. That the others' tokens wait too is in the time
 * of their own steps. */
static int64_t saved_by(const dcn_batch_t *b, const dcn_part_t *part, uint32_t tokens)
{
    if (part->drafts == 0 && part->job == NULL) {
        return 0;
    }
    return (int64_t)(b->plain_ns * tokens) - (int64_t)b->took_ns;
}

void dcn_worth_step(dcn_node_t *d, const dcn_part_t *part, uint32_t accepted)
{
    td_msg_drafts_t *r = &part->ticket->drafts;

    if (part->choice->drafter == TD_DRAFTER_NONE) {
        return;
    }
    r->steps++;
    part->ticket->sides += part->sides;
    r->tokens += accepted + 1;
    r->saved_ns += saved_by(&d->batch, part, accepted + 1);
    for (uint32_t i = 0; i < part->drafts; i++) {
        r->drafted[i]++;
        r->accepted[i] += i < accepted;
    }
}

void dcn_worth_end(dcn_node_t *d, dcn_ticket_t *t)
{
    td_msg_drafts_t *r = &t->drafts;
    const td_draft_key_t key = {
        .tenant = t->work.tenant, .prompt_class = t->work.prompt_class, .drafter = r->drafter};
    td_draft_report_t report = {.k_max = r->k_max, .steps = r->steps, .tokens = r->tokens};

    if (r->k_max == 0) {
        return;
    }
    r->decode_ns = td_now_ns() - t->running_ns;
    report.decode_ns = r->decode_ns;
    for (uint32_t i = 0; i < r->k_max; i++) {
        report.drafted[i] = r->drafted[i];
        report.accepted[i] = r->accepted[i];
    }
    if (d->past != NULL) {
        td_draft_stats_add(d->past, &key, &report);
    }
}

/* --- for a router that begins anew ------------------------------------------------------------ */

static void fill(const td_draft_past_t *past, td_msg_draft_past_t *out)
{
    *out = (td_msg_draft_past_t){.tenant = past->key.tenant,
                                 .prompt_class = past->key.prompt_class,
                                 .drafter = past->key.drafter,
                                 .tokens = past->tokens,
                                 .decode_s = past->decode_s};
    memcpy(out->steps, past->steps, sizeof(out->steps));
    memcpy(out->drafted, past->drafted, sizeof(out->drafted));
    memcpy(out->accepted, past->accepted, sizeof(out->accepted));
}

static void send_history(dcn_node_t *d, const char *router, const td_msg_draft_past_t *list,
                         uint32_t count)
{
    td_msg_t msg = {.type = TD_MSG_DRAFT_HISTORY,
                    .u.draft_history = {.count = count, .past = list}};

    if (count > 0 && td_bus_send(d->node.proc.bus, router, &msg) != TD_OK) {
        TD_LOG_WARN("what drafts were worth not told", "entries=%u", count);
    }
}

static bool was_told(const dcn_node_t *d, uint64_t incarnation)
{
    for (uint32_t i = 0; i < TD_ROUTERS_MAX; i++) {
        if (d->told_routers[i] == incarnation) {
            return true;
        }
    }
    return false;
}

/* In the order of their last report, so that the router's table is in that order too. */
void dcn_worth_tell(dcn_node_t *d, const char *router, uint64_t incarnation)
{
    td_msg_draft_past_t list[TOLD_AT_ONCE];
    const td_draft_past_t *past = NULL;
    uint32_t count = 0;

    if (d->past == NULL || was_told(d, incarnation)) {
        return;
    }
    d->told_routers[d->told_next] = incarnation;
    d->told_next = (d->told_next + 1) % TD_ROUTERS_MAX;
    past = td_draft_stats_oldest(d->past);
    while (past != NULL) {
        fill(past, &list[count++]);
        past = td_draft_stats_newer(d->past, past);
        if (count == TOLD_AT_ONCE || past == NULL) {
            send_history(d, router, list, count);
            count = 0;
        }
    }
}

/* --- what it costs ---------------------------------------------------------------------------- */

/* A choice's share of a step with some drafts, and of a drafter's pass, in shares of a step without
 * drafts: of as many rows as choices run now. */
static void measure(dcn_node_t *d, uint32_t running, td_msg_heartbeat_t *out)
{
    double curve[TD_STEP_COST_ROWS_MAX + 1];
    const uint32_t rows = TD_MAX(1u, TD_MIN(running, DCN_BATCH_ROWS_MAX - TD_DRAFT_TOKENS_MAX));

    td_step_cost_curve(&d->step_cost, rows + TD_DRAFT_TOKENS_MAX, curve);
    out->step_cost_count = TD_DRAFT_TOKENS_MAX + 1;
    for (uint32_t k = 0; k <= TD_DRAFT_TOKENS_MAX; k++) {
        const double more = (curve[rows + k] - curve[rows]) * rows / curve[rows];
        out->step_costs[k] = (float)TD_MIN(1 + more, TD_MSG_COST_MAX);
    }
    out->pass_cost_count = TD_DRAFTER_KINDS;
    for (uint32_t kind = 0; kind < TD_DRAFTER_KINDS; kind++) {
        const dcn_drafter_t *p = dcn_draft_passes(d, kind);
        const double pass = p == NULL ? 0 : td_step_cost_ns(&p->cost, rows) / curve[rows];
        out->pass_costs[kind] = (float)TD_MIN(pass, TD_MSG_COST_MAX);
    }
}

void dcn_worth_costs(dcn_node_t *d, td_msg_heartbeat_t *load)
{
    const uint64_t now = td_now_ns();
    td_msg_heartbeat_t *kept = &d->costs;

    if (now >= d->next_costs_ns) {
        d->next_costs_ns = now + COSTS_EVERY_MS * TD_NS_PER_MS;
        measure(d, load->queued_tokens, kept);
    }
    load->step_cost_count = kept->step_cost_count;
    load->pass_cost_count = kept->pass_cost_count;
    memcpy(load->step_costs, kept->step_costs, sizeof(load->step_costs));
    memcpy(load->pass_costs, kept->pass_costs, sizeof(load->pass_costs));
}

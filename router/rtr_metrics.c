#include "router/rtr_metrics.h"

#include <stddef.h>
#include <stdio.h>

#include "common/base/td_base.h"

typedef td_metric_t *(*declare_fn)(td_metrics_t *, const char *, const char *, const char *);

#define AT(field) offsetof(rtr_metrics_t, field)
#define OUTCOME(n) (offsetof(rtr_metrics_t, requests) + (n) * sizeof(td_metric_t *))
#define REQUESTS "tandem_router_requests_total"
#define REQUESTS_HELP "Generation requests by how they ended."
#define NODES "tandem_router_nodes"
#define INDEX_NODES "tandem_router_index_nodes"
#define INDEX_NODES_HELP "Nodes and store by how well their blocks are known."
#define ERRORS "tandem_router_estimate_error_percent"
#define ERRORS_HELP "Mean relative error of predicted prefill times and times between tokens."
#define NODES_HELP "Live processes by role."

static const struct {
    size_t at;
    declare_fn declare;
    const char *name;
    const char *labels;
    const char *help;
} table[] = {
    {OUTCOME(0), td_metrics_counter, REQUESTS, "outcome=\"ok\"", REQUESTS_HELP},
    {OUTCOME(1), td_metrics_counter, REQUESTS, "outcome=\"client_gone\"", REQUESTS_HELP},
    {OUTCOME(2), td_metrics_counter, REQUESTS, "outcome=\"rejected\"", REQUESTS_HELP},
    {OUTCOME(3), td_metrics_counter, REQUESTS, "outcome=\"bad_request\"", REQUESTS_HELP},
    {OUTCOME(4), td_metrics_counter, REQUESTS, "outcome=\"upstream_error\"", REQUESTS_HELP},
    {OUTCOME(5), td_metrics_counter, REQUESTS, "outcome=\"timeout\"", REQUESTS_HELP},
    {OUTCOME(6), td_metrics_counter, REQUESTS, "outcome=\"shutdown\"", REQUESTS_HELP},
    {AT(ttft), td_metrics_histogram, "tandem_router_time_to_first_token_seconds", NULL,
     "From the end of a request's body to its first token."},
    {AT(tbt), td_metrics_histogram, "tandem_router_time_between_tokens_seconds", NULL,
     "Between the tokens of one choice."},
    {AT(request_time), td_metrics_histogram, "tandem_router_request_seconds", NULL,
     "From the end of a request's body to its end."},
    {AT(place_time), td_metrics_histogram_fine, "tandem_router_place_seconds", NULL,
     "Of one decision where a prompt goes: matching its blocks, and comparing the nodes."},
    {AT(running), td_metrics_gauge, "tandem_router_requests_running", NULL,
     "Requests past tokenisation and not ended."},
    {AT(queued), td_metrics_gauge, "tandem_router_queue_tickets", NULL,
     "Prompts waiting for room on a node."},
    {AT(nodes_prefill), td_metrics_gauge, NODES, "role=\"prefill\"", NODES_HELP},
    {AT(nodes_decode), td_metrics_gauge, NODES, "role=\"decode\"", NODES_HELP},
    {AT(nodes_kvstore), td_metrics_gauge, NODES, "role=\"kvstore\"", NODES_HELP},
    {AT(node_deaths), td_metrics_counter, "tandem_router_node_deaths_total", NULL,
     "Processes declared dead."},
    {AT(registrations_refused), td_metrics_counter, "tandem_router_registrations_refused_total",
     NULL, "Registrations refused: other model, precision, secret or a name in use."},
    {AT(retries), td_metrics_counter, "tandem_router_retries_total", NULL,
     "New attempts after a failure on a node."},
    {AT(self_prefills), td_metrics_counter, "tandem_router_self_prefills_total", NULL,
     "Prompts whose rest the decode node computed."},
    {AT(failovers), td_metrics_counter, "tandem_router_failovers_total", NULL,
     "Of them, those that go on behind tokens that an earlier attempt gave."},
    {AT(breakers_opened), td_metrics_counter, "tandem_router_breakers_opened_total", NULL,
     "Times that a node had failed so often in a row that it was left alone for a while."},
    {AT(slo_ttft), td_metrics_counter, "tandem_router_slo_refusals_total", "slo=\"ttft\"",
     "Requests refused because they were predicted to miss their objective."},
    {AT(slo_tbt), td_metrics_counter, "tandem_router_slo_refusals_total", "slo=\"tbt\"", ""},
    {AT(prompt_tokens), td_metrics_counter, "tandem_router_prompt_tokens_total", NULL,
     "Prompt tokens of requests that ended well."},
    {AT(cached_tokens), td_metrics_counter, "tandem_router_cached_tokens_total", NULL,
     "Prompt tokens found in a cache."},
    {AT(completion_tokens), td_metrics_counter, "tandem_router_completion_tokens_total", NULL,
     "Tokens received from decode nodes."},
    {AT(index_blocks), td_metrics_gauge, "tandem_router_index_blocks", NULL,
     "Blocks of which the router knows who holds them, or will."},
    {AT(index_bytes), td_metrics_gauge, "tandem_router_index_bytes", NULL,
     "Memory that the index of blocks may use."},
    {AT(index_nodes[0]), td_metrics_gauge, INDEX_NODES, "state=\"fallback\"", INDEX_NODES_HELP},
    {AT(index_nodes[1]), td_metrics_gauge, INDEX_NODES, "state=\"degraded\"", ""},
    {AT(index_nodes[2]), td_metrics_gauge, INDEX_NODES, "state=\"exact\"", ""},
    {AT(index_events), td_metrics_counter, "tandem_router_index_events_total", NULL,
     "Blocks that nodes and the store said came or went."},
    {AT(index_gaps), td_metrics_counter, "tandem_router_index_gaps_total", NULL,
     "Times that events were found missing."},
    {AT(index_replays), td_metrics_counter, "tandem_router_index_replays_total", NULL,
     "Times that missing events were asked for."},
    {AT(index_snapshots), td_metrics_counter, "tandem_router_index_snapshots_total", NULL,
     "Times that all blocks of a node were asked for."},
    {AT(index_mismatches), td_metrics_counter, "tandem_router_index_mismatches_total", NULL,
     "Times that the index was not what the node said it has."},
    {AT(index_dropped), td_metrics_counter, "tandem_router_index_dropped_total", NULL,
     "Blocks of nodes that were forgotten for want of room."},
    {AT(index_stale), td_metrics_counter, "tandem_router_index_stale_total", NULL,
     "Messages of events that came from a life that is over, or from a store that is not asked."},
    {AT(prefill_error), td_metrics_gauge, ERRORS, "of=\"prefill\"", ERRORS_HELP},
    {AT(tbt_error), td_metrics_gauge, ERRORS, "of=\"token\"", ERRORS_HELP},
    {AT(bus_refused), td_metrics_gauge, "tandem_router_bus_refused", NULL,
     "Messages refused since start: stale, foreign or malformed."},
    {AT(access_dropped), td_metrics_counter, "tandem_router_access_log_dropped_total", NULL,
     "Lines that the access log had no time, or no disk, for."},
    {AT(slow_clients), td_metrics_counter, "tandem_router_slow_clients_total", NULL,
     "Connections cut off because a request took longer than --receive-ms to come."},
};
_Static_assert(TD_ARRAY_LEN(table) == offsetof(rtr_metrics_t, drafts) / sizeof(td_metric_t *),
               "every field has a row");

/* Labels are kept for ever, so they have a place for ever; equal ones, whoever declares.
 * position 0: not named; result NULL: not named either. */
static const char *draft_label(uint32_t drafter, uint32_t position, const char *result)
{
    static char labels[TD_DRAFTER_KINDS][TD_DRAFT_TOKENS_MAX + 1][3][80];
    char *label =
        labels[drafter][position][result == NULL ? 2 : result[0] == 'r' || result[0] == 'l'];

    if (result == NULL) {
        (void)snprintf(label, sizeof(labels[0][0][0]), "drafter=\"%s\"",
                       td_drafter_name((td_drafter_t)drafter));
    } else if (position == 0) {
        (void)snprintf(label, sizeof(labels[0][0][0]), "drafter=\"%s\",result=\"%s\"",
                       td_drafter_name((td_drafter_t)drafter), result);
    } else {
        (void)snprintf(label, sizeof(labels[0][0][0]),
                       "drafter=\"%s\",position=\"%u\",result=\"%s\"",
                       td_drafter_name((td_drafter_t)drafter), position, result);
    }
    return label;
}

/* Series of one name one after the other. */
static void declare_drafts(td_metrics_t *m, rtr_draft_metrics_t *out)
{
    static const char *const whys[RTR_DRAFT_WHYS] = {"why=\"asked\"", "why=\"default\"",
                                                     "why=\"learned\"", "why=\"explored\""};
    const char *tokens = "tandem_router_draft_tokens_total";
    const char *tokens_help = "Drafts that were verified, by drafter and position in the draft.";
    const char *time = "tandem_router_draft_seconds_total";
    const char *time_help = "Time of choices that steps with drafts saved, or lost, against as "
                            "many tokens without; estimated by the decode nodes.";

    for (uint32_t i = 0; i < RTR_DRAFT_WHYS; i++) {
        out->choices[i] = td_metrics_counter(m, "tandem_router_draft_choices_total", whys[i],
                                             "Prompts by how their drafter was chosen.");
    }
    out->entries = td_metrics_gauge(m, "tandem_router_draft_entries", NULL,
                                    "Tenants, classes and drafters that are learned from.");
    for (uint32_t d = TD_DRAFTER_NONE + 1; d < TD_DRAFTER_KINDS; d++) {
        out->steps[d] =
            td_metrics_counter(m, "tandem_router_draft_steps_total", draft_label(d, 0, NULL),
                               "Steps of choices that have this drafter, with drafts or without.");
    }
    for (uint32_t d = TD_DRAFTER_NONE + 1; d < TD_DRAFTER_KINDS; d++) {
        out->saved[d] = td_metrics_seconds(m, time, draft_label(d, 0, "saved"), time_help);
        out->lost[d] = td_metrics_seconds(m, time, draft_label(d, 0, "lost"), time_help);
    }
    for (uint32_t d = TD_DRAFTER_NONE + 1; d < TD_DRAFTER_KINDS; d++) {
        for (uint32_t i = 0; i < TD_DRAFT_TOKENS_MAX; i++) {
            out->accepted[d][i] =
                td_metrics_counter(m, tokens, draft_label(d, i + 1, "accepted"), tokens_help);
            out->rejected[d][i] =
                td_metrics_counter(m, tokens, draft_label(d, i + 1, "rejected"), tokens_help);
        }
    }
}

void rtr_metrics_declare(td_metrics_t *registry, rtr_metrics_t *out)
{
    for (size_t i = 0; i < TD_ARRAY_LEN(table); i++) {
        td_metric_t **field = (td_metric_t **)(void *)((char *)out + table[i].at);
        *field = table[i].declare(registry, table[i].name, table[i].labels, table[i].help);
    }
    declare_drafts(registry, &out->drafts);
}

const char *rtr_outcome_name(rtr_outcome_t outcome)
{
    static const char *const names[RTR_OUTCOME_COUNT] = {
        "ok", "client_gone", "rejected", "bad_request", "upstream_error", "timeout", "shutdown"};
    return names[outcome];
}

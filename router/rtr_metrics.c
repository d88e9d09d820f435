#include "router/rtr_metrics.h"

#include <stddef.h>

#include "common/base/td_base.h"

typedef td_metric_t *(*declare_fn)(td_metrics_t *, const char *, const char *, const char *);

#define AT(field) offsetof(rtr_metrics_t, field)
#define OUTCOME(n) (offsetof(rtr_metrics_t, requests) + (n) * sizeof(td_metric_t *))
#define REQUESTS "tandem_router_requests_total"
#define REQUESTS_HELP "Generation requests by how they ended."
#define NODES "tandem_router_nodes"
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
    {AT(prompt_tokens), td_metrics_counter, "tandem_router_prompt_tokens_total", NULL,
     "Prompt tokens of requests that ended well."},
    {AT(cached_tokens), td_metrics_counter, "tandem_router_cached_tokens_total", NULL,
     "Prompt tokens found in a cache."},
    {AT(completion_tokens), td_metrics_counter, "tandem_router_completion_tokens_total", NULL,
     "Tokens received from decode nodes."},
    {AT(hint_blocks), td_metrics_gauge, "tandem_router_hint_blocks", NULL,
     "Block keys in the prefix hints."},
    {AT(bus_refused), td_metrics_gauge, "tandem_router_bus_refused", NULL,
     "Messages refused since start: stale, foreign or malformed."},
};
_Static_assert(TD_ARRAY_LEN(table) == sizeof(rtr_metrics_t) / sizeof(td_metric_t *),
               "every field has a row");

void rtr_metrics_declare(td_metrics_t *registry, rtr_metrics_t *out)
{
    for (size_t i = 0; i < TD_ARRAY_LEN(table); i++) {
        td_metric_t **field = (td_metric_t **)(void *)((char *)out + table[i].at);
        *field = table[i].declare(registry, table[i].name, table[i].labels, table[i].help);
    }
}

const char *rtr_outcome_name(rtr_outcome_t outcome)
{
    static const char *const names[RTR_OUTCOME_COUNT] = {
        "ok", "client_gone", "rejected", "bad_request", "upstream_error", "timeout", "shutdown"};
    return names[outcome];
}

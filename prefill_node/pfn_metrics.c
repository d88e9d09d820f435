#include "prefill_node/pfn_node.h"

void pfn_metrics_declare(pfn_node_t *p)
{
    td_metrics_t *m = p->node.proc.metrics;
    const char *tokens = "tandem_prefill_prompt_tokens_total";
    const char *requests = "tandem_prefill_requests_total";
    const char *lookups = "tandem_prefill_store_lookups_total";

    p->tokens_computed = td_metrics_counter(m, tokens, "source=\"computed\"",
                                            "prompt tokens, by where KV came from");
    p->tokens_local = td_metrics_counter(m, tokens, "source=\"local\"", "");
    p->tokens_store = td_metrics_counter(m, tokens, "source=\"store\"", "");
    p->lookups_hit = td_metrics_counter(m, lookups, "outcome=\"hit\"",
                                        "prefixes that the store was, or was not, asked for");
    p->lookups_miss = td_metrics_counter(m, lookups, "outcome=\"miss\"", "");
    p->lookups_timeout = td_metrics_counter(m, lookups, "outcome=\"timeout\"", "");
    p->lookups_skipped = td_metrics_counter(m, lookups, "outcome=\"skipped\"", "");
    p->fetches_skipped =
        td_metrics_counter(m, "tandem_prefill_store_fetches_skipped_total", NULL,
                           "prefixes found in the store, but computed because that is faster");
    p->requests_ok = td_metrics_counter(m, requests, "outcome=\"ok\"", "prefill legs that ended");
    p->requests_failed = td_metrics_counter(m, requests, "outcome=\"failed\"", "");
    p->requests_cancelled = td_metrics_counter(m, requests, "outcome=\"cancelled\"", "");
    p->running = td_metrics_gauge(m, "tandem_prefill_requests_running", NULL,
                                  "prefill legs under way, with those that drain");
    p->batch_seconds = td_metrics_histogram(m, "tandem_prefill_batch_seconds", NULL,
                                            "time of a batch's forward pass");
}

#include "decode_node/dcn_node.h"

#include "common/base/td_base.h"

void dcn_metrics_declare(dcn_node_t *d)
{
    td_metrics_t *m = d->node.proc.metrics;
    const char *requests = "tandem_decode_requests_total";
    const char *bytes = "tandem_decode_handoff_bytes_total";
    const char *drafts = "tandem_decode_draft_tokens_total";
    const char *contexts = "tandem_decode_draft_context_tokens_total";
    static const char *const states[] = {"state=\"free\"", "state=\"reserved\"", "state=\"cached\"",
                                         "state=\"active\""};
    const char *returned = "tandem_decode_returned_tokens_total";

    d->tokens = td_metrics_counter(m, "tandem_decode_tokens_total", NULL, "tokens generated");
    d->requests_ok = td_metrics_counter(m, requests, "outcome=\"ok\"", "decode legs that ended");
    d->requests_failed = td_metrics_counter(m, requests, "outcome=\"failed\"", "");
    d->requests_cancelled = td_metrics_counter(m, requests, "outcome=\"cancelled\"", "");
    d->running = td_metrics_gauge(m, "tandem_decode_requests_running", NULL,
                                  "decode legs under way, with those that drain");
    d->batch_seconds = td_metrics_histogram(m, "tandem_decode_batch_seconds", NULL,
                                            "time of a step over the running batch");
    d->kv_failed = td_metrics_counter(m, "tandem_decode_handoff_failures_total", NULL,
                                      "hand-offs whose blocks did not arrive whole");
    d->bytes_early = td_metrics_counter(m, bytes, "when=\"early\"",
                                        "prompts' KV that was here (early) or not (late) when "
                                        "the prompt was ready");
    d->bytes_late = td_metrics_counter(m, bytes, "when=\"late\"", "");
    d->preemptions = td_metrics_counter(m, "tandem_decode_preemptions_total", NULL,
                                        "requests that gave their blocks to others for a while");
    d->returned_cached = td_metrics_counter(m, returned, "source=\"cache\"",
                                            "positions of requests that came back after that, by "
                                            "where their KV came from");
    d->returned_fetched = td_metrics_counter(m, returned, "source=\"store\"", "");
    d->drafts_accepted =
        td_metrics_counter(m, drafts, "result=\"accepted\"", "drafted tokens that were verified");
    d->drafts_rejected = td_metrics_counter(m, drafts, "result=\"rejected\"", "");
    for (size_t i = 0; i < TD_ARRAY_LEN(states); i++) {
        d->draft_kv_states[i] = td_metrics_gauge(m, "tandem_decode_draft_kv_blocks", states[i],
                                                 "KV blocks of the draft model by state");
    }
    d->draft_cached = td_metrics_counter(m, contexts, "source=\"cache\"",
                                         "positions of contexts in the draft model, by where their "
                                         "KV came from");
    d->draft_computed = td_metrics_counter(m, contexts, "source=\"computed\"", "");
    d->returned_computed = td_metrics_counter(m, returned, "source=\"computed\"", "");
}

#include "decode_node/dcn_node.h"

#include "common/base/td_base.h"

/* Labels are literals: the registry keeps what it is given. */
#define DRAFTER_LABELS(name)                                                                       \
    {                                                                                              \
        "drafter=\"" name "\"", "drafter=\"" name "\",result=\"accepted\"",                        \
            "drafter=\"" name "\",result=\"rejected\""                                             \
    }
static const char *const labels[TD_DRAFTER_KINDS][3] = {
    [TD_DRAFTER_PROMPT_LOOKUP] = DRAFTER_LABELS("prompt_lookup"),
    [TD_DRAFTER_DRAFT_MODEL] = DRAFTER_LABELS("draft_model"),
    [TD_DRAFTER_EARLY_EXIT] = DRAFTER_LABELS("early_exit"),
    [TD_DRAFTER_LOOKAHEAD] = DRAFTER_LABELS("lookahead"),
    [TD_DRAFTER_MEDUSA] = DRAFTER_LABELS("medusa"),
    [TD_DRAFTER_MEMO] = DRAFTER_LABELS("memo")};

static void declare_drafters(dcn_node_t *d)
{
    td_metrics_t *m = d->node.proc.metrics;
    const char *steps = "tandem_decode_drafter_steps_total";
    const char *tokens = "tandem_decode_drafter_tokens_total";
    const char *steps_help = "steps of a choice that verified drafts, by its drafter";
    const char *tokens_help = "drafted tokens that were verified, by drafter";

    for (uint32_t i = TD_DRAFTER_NONE + 1; i < TD_DRAFTER_KINDS; i++) {
        d->drafter_steps[i] = td_metrics_counter(m, steps, labels[i][0], steps_help);
        steps_help = "";
    }
    for (uint32_t i = TD_DRAFTER_NONE + 1; i < TD_DRAFTER_KINDS; i++) {
        d->drafter_accepted[i] = td_metrics_counter(m, tokens, labels[i][1], tokens_help);
        d->drafter_rejected[i] = td_metrics_counter(m, tokens, labels[i][2], "");
        tokens_help = "";
    }
}

void dcn_metrics_declare(dcn_node_t *d)
{
    td_metrics_t *m = d->node.proc.metrics;
    const char *requests = "tandem_decode_requests_total";
    const char *bytes = "tandem_decode_handoff_bytes_total";
    const char *drafts = "tandem_decode_draft_tokens_total";
    const char *sides = "tandem_decode_draft_side_tokens_total";
    const char *contexts = "tandem_decode_draft_context_tokens_total";
    static const char *const states[] = {"state=\"free\"", "state=\"reserved\"", "state=\"cached\"",
                                         "state=\"active\""};
    const char *returned = "tandem_decode_returned_tokens_total";
    const char *prompt = "tandem_decode_prompt_tokens_total";

    d->tokens = td_metrics_counter(m, "tandem_decode_tokens_total", NULL, "tokens generated");
    d->requests_ok = td_metrics_counter(m, requests, "outcome=\"ok\"", "decode legs that ended");
    d->requests_failed = td_metrics_counter(m, requests, "outcome=\"failed\"", "");
    d->requests_cancelled = td_metrics_counter(m, requests, "outcome=\"cancelled\"", "");
    d->running = td_metrics_gauge(m, "tandem_decode_requests_running", NULL,
                                  "decode legs under way, with those that drain");
    d->batch_seconds = td_metrics_histogram(m, "tandem_decode_batch_seconds", NULL,
                                            "time of a step over the running batch");
    d->overlapped = td_metrics_counter(m, "tandem_decode_overlapped_steps_total", NULL,
                                       "steps whose tokens became text and went out while the "
                                       "next one ran");
    d->kv_failed = td_metrics_counter(m, "tandem_decode_handoff_failures_total", NULL,
                                      "hand-offs whose blocks did not arrive whole");
    d->bytes_early = td_metrics_counter(m, bytes, "when=\"early\"",
                                        "prompts' KV that was here (early) or not (late) when "
                                        "the prompt was ready");
    d->bytes_late = td_metrics_counter(m, bytes, "when=\"late\"", "");
    d->continued = td_metrics_counter(m, "tandem_decode_continued_total", NULL,
                                      "requests that another node had begun, gone on with here");
    d->preemptions = td_metrics_counter(m, "tandem_decode_preemptions_total", NULL,
                                        "requests that gave their blocks to others for a while");
    d->returned_cached = td_metrics_counter(m, returned, "source=\"cache\"",
                                            "positions of requests that came back after that, by "
                                            "where their KV came from");
    d->returned_fetched = td_metrics_counter(m, returned, "source=\"store\"", "");
    d->drafts_accepted =
        td_metrics_counter(m, drafts, "result=\"accepted\"", "drafted tokens that were verified");
    d->drafts_rejected = td_metrics_counter(m, drafts, "result=\"rejected\"", "");
    d->sides_accepted =
        td_metrics_counter(m, sides, "result=\"accepted\"",
                           "of them, second choices that were verified beside a draft");
    d->sides_rejected = td_metrics_counter(m, sides, "result=\"rejected\"", "");
    for (size_t i = 0; i < TD_ARRAY_LEN(states); i++) {
        d->draft_kv_states[i] = td_metrics_gauge(m, "tandem_decode_draft_kv_blocks", states[i],
                                                 "KV blocks of the draft model by state");
    }
    d->draft_cached = td_metrics_counter(m, contexts, "source=\"cache\"",
                                         "positions of contexts in the draft model, by where their "
                                         "KV came from");
    d->draft_computed = td_metrics_counter(m, contexts, "source=\"computed\"", "");
    d->returned_computed = td_metrics_counter(m, returned, "source=\"computed\"", "");
    d->prompts_computed = td_metrics_counter(m, "tandem_decode_prompts_total", NULL,
                                             "prompts whose rest was computed here");
    d->prompt_cached =
        td_metrics_counter(m, prompt, "source=\"cache\"", "their tokens by where the KV came from");
    d->prompt_fetched = td_metrics_counter(m, prompt, "source=\"store\"", "");
    d->prompt_computed = td_metrics_counter(m, prompt, "source=\"computed\"", "");
    declare_drafters(d);
    d->memo_told = td_metrics_counter(m, "tandem_decode_memo_told_total", NULL,
                                      "answers that another node had remembered");
    d->memo_paths =
        td_metrics_gauge(m, "tandem_decode_memo_paths", NULL, "remembered continuations");
}

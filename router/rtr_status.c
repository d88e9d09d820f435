#include "router/rtr_status.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"

/* What could not be made is left out, and found missing by json_pack. */
static json_t *number(uint64_t value)
{
    return json_integer((json_int_t)TD_MIN(value, (uint64_t)INT64_MAX));
}

static json_t *drop(json_t *value)
{
    json_decref(value);
    return NULL;
}

static json_t *node_json(const rtr_node_view_t *v)
{
    char incarnation[17];

    (void)snprintf(incarnation, sizeof(incarnation), "%016" PRIx64, v->incarnation);
    return json_pack("{s:s, s:s, s:s, s:s, s:s, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:b, "
                     "s:b}",
                     "id", v->id, "role", td_role_name(v->role), "state", v->state, "incarnation",
                     incarnation, "endpoint", v->endpoint, "silent_ms", number(v->silent_ms),
                     "free_blocks", number(v->free_blocks), "total_blocks", number(v->total_blocks),
                     "prefills", number(v->prefills), "sequences", number(v->sequences),
                     "ahead_tokens", number(v->ahead_tokens), "promised_blocks",
                     number(v->promised_blocks), "tokens_per_s", number(v->tokens_per_s),
                     "fetched_bytes", number(v->fetched_bytes), "shunned", v->shunned,
                     "store_master", v->store_master);
}

static json_t *nodes_json(rtr_registry_t *registry)
{
    json_t *list = json_array();
    rtr_node_view_t *views = NULL;
    uint32_t count = 0;
    bool bad = list == NULL || rtr_registry_views(registry, &views, &count) != TD_OK;

    for (uint32_t i = 0; !bad && i < count; i++) {
        bad = json_array_append_new(list, node_json(&views[i])) != 0;
    }
    td_free(views);
    return bad ? drop(list) : list;
}

static json_t *request_json(const rtr_access_entry_t *e)
{
    return json_pack("{s:s, s:s, s:o, s:s, s:s, s:i, s:b, s:f, s:o, s:o, s:o, s:o, s:o, s:o, s:s, "
                     "s:s, s:s}",
                     "request", e->request, "tenant", e->tenant == NULL ? "" : e->tenant->name,
                     "time_ms", number(e->time_ms), "path", e->path, "outcome",
                     rtr_outcome_name(e->outcome), "status", e->http_status, "stream", e->is_stream,
                     "ms", (double)e->took_us / 1000, "ttft_ms",
                     e->ttft_us == 0 ? json_null() : json_real((double)e->ttft_us / 1000),
                     "prompt_tokens", number(e->usage.prompt_tokens), "cached_tokens",
                     number((uint64_t)e->usage.cached_local_tokens + e->usage.cached_store_tokens),
                     "completion_tokens", number(e->usage.completion_tokens), "accepted_drafts",
                     number(e->usage.accepted_draft_tokens), "rejected_drafts",
                     number(e->usage.rejected_draft_tokens), "prefill", e->prefill, "decode",
                     e->decode, "draft", e->draft);
}

static json_t *requests_json(rtr_access_t *access, const rtr_tenant_t *tenant)
{
    json_t *list = json_array();
    rtr_access_entry_t *entries = td_calloc(RTR_ACCESS_RECENT, sizeof(*entries));
    const uint32_t count = entries == NULL ? 0 : rtr_access_recent(access, tenant, entries);
    bool bad = list == NULL || entries == NULL;

    for (uint32_t i = 0; !bad && i < count; i++) {
        bad = json_array_append_new(list, request_json(&entries[i])) != 0;
    }
    td_free(entries);
    return bad ? drop(list) : list;
}

static json_t *drafters_json(const rtr_draft_metrics_t *m)
{
    json_t *list = json_array();
    bool bad = list == NULL;

    for (uint32_t d = TD_DRAFTER_NONE + 1; !bad && d < TD_DRAFTER_KINDS; d++) {
        uint64_t accepted = 0;
        uint64_t rejected = 0;
        for (uint32_t i = 0; i < TD_DRAFT_TOKENS_MAX; i++) {
            accepted += td_metric_get(m->accepted[d][i]);
            rejected += td_metric_get(m->rejected[d][i]);
        }
        bad =
            json_array_append_new(
                list, json_pack("{s:s, s:o, s:o, s:o}", "drafter", td_drafter_name((td_drafter_t)d),
                                "steps", number(td_metric_get(m->steps[d])), "accepted",
                                number(accepted), "rejected", number(rejected))) != 0;
    }
    return bad ? drop(list) : list;
}

static json_t *counts_json(const rtr_metrics_t *m)
{
    json_t *ended = json_object();
    bool bad = ended == NULL;

    for (uint32_t i = 0; !bad && i < RTR_OUTCOME_COUNT; i++) {
        bad = json_object_set_new(ended, rtr_outcome_name((rtr_outcome_t)i),
                                  number(td_metric_get(m->requests[i]))) != 0;
    }
    if (bad) {
        return drop(ended);
    }
    return json_pack("{s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o}", "running",
                     number(td_metric_get(m->running)), "queued", number(td_metric_get(m->queued)),
                     "ended", ended, "prompt_tokens", number(td_metric_get(m->prompt_tokens)),
                     "cached_tokens", number(td_metric_get(m->cached_tokens)), "completion_tokens",
                     number(td_metric_get(m->completion_tokens)), "retries",
                     number(td_metric_get(m->retries)), "failovers",
                     number(td_metric_get(m->failovers)), "self_prefills",
                     number(td_metric_get(m->self_prefills)));
}

td_status_t rtr_status_json(const rtr_status_t *s, td_str_t *out)
{
    json_t *root = json_pack(
        "{s:s, s:s, s:s, s:s, s:o, s:o, s:o, s:o, s:o, s:o}", "version", TD_VERSION, "router",
        s->router, "model", s->model->name, "state", s->state, "time_ms", number(td_wall_ms()),
        "uptime_ms", number(s->uptime_ms), "counts", counts_json(s->metrics), "nodes",
        nodes_json(s->registry), "drafters", drafters_json(&s->metrics->drafts), "requests",
        requests_json(s->access, s->tenant));
    char *text = root == NULL ? NULL : json_dumps(root, JSON_COMPACT);
    td_status_t status = text == NULL ? TD_ERR_NO_MEMORY : td_str_append_text(out, text);

    json_decref(root);
    free(text);
    return status;
}

#include <inttypes.h>
#include <jansson.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "proto/admin.pb-c.h"
#include "router/ctl.h"

#define PB(type) Tandem__Admin__V1__##type
#define COLUMNS_MAX 16
#define CELL_MAX 96

/* --- what is asked ---------------------------------------------------------------------------- */

static char *lend(const char *text)
{
    return (char *)(uintptr_t)text;
}

static void fill_store(const ctl_request_t *r, PB(StoreRequest) * pb)
{
    pb->action = r->command == CTL_UNPIN   ? TANDEM__ADMIN__V1__STORE_ACTION__UNPIN
                 : r->command == CTL_EVICT ? TANDEM__ADMIN__V1__STORE_ACTION__EVICT
                 : r->soft                 ? TANDEM__ADMIN__V1__STORE_ACTION__PIN_SOFT
                                           : TANDEM__ADMIN__V1__STORE_ACTION__PIN_HARD;
    if (r->prompt != NULL) {
        pb->prompt = lend(r->prompt);
    }
    if (r->salt != NULL) {
        pb->cache_salt.data = (uint8_t *)lend(r->salt);
        pb->cache_salt.len = strlen(r->salt);
    }
    if (r->tenant != NULL) {
        pb->tenant = lend(r->tenant);
    }
    pb->keys.data = (uint8_t *)(uintptr_t)r->keys;
    pb->keys.len = r->key_count * CTL_KEY_BYTES;
}

uint8_t *ctl_encode(const ctl_request_t *r, uint64_t id, size_t *len_out)
{
    PB(Request) pb = TANDEM__ADMIN__V1__REQUEST__INIT;
    PB(StatusRequest) status = TANDEM__ADMIN__V1__STATUS_REQUEST__INIT;
    PB(NodesRequest) nodes = TANDEM__ADMIN__V1__NODES_REQUEST__INIT;
    PB(DrainRequest) drain = TANDEM__ADMIN__V1__DRAIN_REQUEST__INIT;
    PB(StoreRequest) store = TANDEM__ADMIN__V1__STORE_REQUEST__INIT;
    PB(SpeculationRequest) speculation = TANDEM__ADMIN__V1__SPECULATION_REQUEST__INIT;
    PB(PolicyRequest) policy = TANDEM__ADMIN__V1__POLICY_REQUEST__INIT;
    PB(SloRequest) slo = TANDEM__ADMIN__V1__SLO_REQUEST__INIT;
    PB(TenantsRequest) tenants = TANDEM__ADMIN__V1__TENANTS_REQUEST__INIT;
    PB(CalibrationRequest) calibration = TANDEM__ADMIN__V1__CALIBRATION_REQUEST__INIT;
    PB(TraceRequest) trace = TANDEM__ADMIN__V1__TRACE_REQUEST__INIT;
    PB(SubscribeRequest) subscribe = TANDEM__ADMIN__V1__SUBSCRIBE_REQUEST__INIT;
    uint8_t *bytes = NULL;

    pb.id = id;
    switch (r->command) {
    case CTL_STATUS:
        pb.command_case = TANDEM__ADMIN__V1__REQUEST__COMMAND_STATUS;
        pb.status = &status;
        break;
    case CTL_NODES:
        pb.command_case = TANDEM__ADMIN__V1__REQUEST__COMMAND_NODES;
        pb.nodes = &nodes;
        break;
    case CTL_DRAIN:
    case CTL_UNDRAIN:
        drain.node = lend(r->node);
        drain.drained = r->command == CTL_DRAIN;
        pb.command_case = TANDEM__ADMIN__V1__REQUEST__COMMAND_DRAIN;
        pb.drain = &drain;
        break;
    case CTL_SPECULATION:
        speculation.set = r->set_explore;
        speculation.explore_percent = r->explore_percent;
        pb.command_case = TANDEM__ADMIN__V1__REQUEST__COMMAND_SPECULATION;
        pb.speculation = &speculation;
        break;
    case CTL_POLICY:
        policy.policy = r->node != NULL ? lend(r->node) : policy.policy;
        pb.command_case = TANDEM__ADMIN__V1__REQUEST__COMMAND_POLICY;
        pb.policy = &policy;
        break;
    case CTL_SLO:
        slo.set_ttft = r->set_ttft;
        slo.ttft_ms = r->ttft_ms;
        slo.set_tbt = r->set_tbt;
        slo.tbt_ms = r->tbt_ms;
        pb.command_case = TANDEM__ADMIN__V1__REQUEST__COMMAND_SLO;
        pb.slo = &slo;
        break;
    case CTL_TENANTS:
        pb.command_case = TANDEM__ADMIN__V1__REQUEST__COMMAND_TENANTS;
        pb.tenants = &tenants;
        break;
    case CTL_CALIBRATION:
        pb.command_case = TANDEM__ADMIN__V1__REQUEST__COMMAND_CALIBRATION;
        pb.calibration = &calibration;
        break;
    case CTL_TRACE:
        trace.request = r->node != NULL ? lend(r->node) : trace.request;
        pb.command_case = TANDEM__ADMIN__V1__REQUEST__COMMAND_TRACE;
        pb.trace = &trace;
        break;
    case CTL_EVENTS:
        subscribe.since = r->since;
        subscribe.lease_ms = r->lease_ms;
        pb.command_case = TANDEM__ADMIN__V1__REQUEST__COMMAND_SUBSCRIBE;
        pb.subscribe = &subscribe;
        break;
    default:
        fill_store(r, &store);
        pb.command_case = TANDEM__ADMIN__V1__REQUEST__COMMAND_STORE;
        pb.store = &store;
        break;
    }
    *len_out = protobuf_c_message_get_packed_size(&pb.base);
    bytes = malloc(*len_out + 1);
    if (bytes != NULL) {
        (void)protobuf_c_message_pack(&pb.base, bytes);
    }
    return bytes;
}

/* --- tables ----------------------------------------------------------------------------------- */

/* Cells of a table, printed once all widths are known. */
typedef struct table {
    char (*cells)[CELL_MAX];
    size_t columns;
    size_t count; /* cells; the first row is the heading */
    size_t room;
} table_t;

static void cell(table_t *t, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

static void cell(table_t *t, const char *fmt, ...)
{
    va_list args;

    if (t->count == t->room) {
        const size_t room = t->room == 0 ? 256 : 2 * t->room;
        void *cells = realloc(t->cells, room * sizeof(*t->cells));
        if (cells == NULL) {
            return; /* a shorter table */
        }
        t->cells = cells;
        t->room = room;
    }
    va_start(args, fmt);
    (void)vsnprintf(t->cells[t->count++], CELL_MAX, fmt, args);
    va_end(args);
}

static void head(table_t *t, const char *const *names)
{
    for (t->columns = 0; names[t->columns] != NULL; t->columns++) {
        cell(t, "%s", names[t->columns]);
    }
}

static void print_table(table_t *t, FILE *out)
{
    size_t widths[COLUMNS_MAX] = {0};

    for (size_t i = 0; i < t->count; i++) {
        const size_t len = strlen(t->cells[i]);
        size_t *width = &widths[i % t->columns];
        *width = len > *width ? len : *width;
    }
    for (size_t i = 0; i < t->count; i++) {
        const bool last = i % t->columns + 1 == t->columns;
        (void)fprintf(out, "%-*s%s", last ? 0 : (int)widths[i % t->columns], t->cells[i],
                      last ? "\n" : "  ");
    }
    free(t->cells);
}

/* --- JSON ------------------------------------------------------------------------------------- */

/* What an object could not take for want of memory is missing in it; jansson frees it. */
static void put(json_t *object, const char *name, json_t *value)
{
    (void)json_object_set_new(object, name, value);
}

static void put_text(json_t *object, const char *name, const char *text)
{
    put(object, name, json_string_nocheck(text));
}

static void put_count(json_t *object, const char *name, uint64_t count)
{
    put(object, name, json_integer((json_int_t)count));
}

/* As text: JSON readers lose digits of such numbers. */
static void put_hex(json_t *object, const char *name, uint64_t value)
{
    char text[17];
    (void)snprintf(text, sizeof(text), "%016" PRIx64, value);
    put_text(object, name, text);
}

static void put_reals(json_t *object, const char *name, const double *values, size_t count)
{
    json_t *array = json_array();
    for (size_t i = 0; i < count; i++) {
        (void)json_array_append_new(array, json_real(values[i]));
    }
    put(object, name, array);
}

static void print_json(json_t *object, FILE *out)
{
    char *text = json_dumps(object, JSON_COMPACT);
    if (text != NULL) {
        (void)fprintf(out, "%s\n", text);
        (void)fflush(out);
    }
    free(text);
    json_decref(object);
}

/* --- answers ---------------------------------------------------------------------------------- */

static void put_counts(json_t *object, const char *name, PB(Count) * *counts, size_t count)
{
    json_t *list = json_object();

    for (size_t i = 0; i < count; i++) {
        put_count(list, counts[i]->name, counts[i]->count);
    }
    put(object, name, list);
}

static void show_status(const PB(Status) * s, bool json, FILE *out)
{
    static const char *const names[] = {"what", "", NULL};
    json_t *object = json ? json_object() : NULL;
    table_t t = {0};

    if (json) {
        put_text(object, "version", s->version);
        put_text(object, "model", s->model);
        put_text(object, "numerics_class", s->numerics_class);
        put_text(object, "kv_codec", s->kv_codec);
        put_count(object, "block_tokens", s->block_tokens);
        put_count(object, "context_max", s->context_max);
        put_count(object, "uptime_ms", s->uptime_ms);
        put_count(object, "requests_running", s->requests_running);
        put_count(object, "prompts_queued", s->prompts_queued);
        put_counts(object, "requests", s->requests, s->n_requests);
        put_count(object, "retries", s->retries);
        put_count(object, "failovers", s->failovers);
        put_count(object, "hint_blocks", s->hint_blocks);
        put_counts(object, "index_nodes", s->index_nodes, s->n_index_nodes);
        put_counts(object, "index", s->index, s->n_index);
        put_count(object, "prompt_tokens", s->prompt_tokens);
        put_count(object, "cached_tokens", s->cached_tokens);
        put_count(object, "completion_tokens", s->completion_tokens);
        print_json(object, out);
        return;
    }
    head(&t, names);
    cell(&t, "version");
    cell(&t, "%s", s->version);
    cell(&t, "model");
    cell(&t, "%s", s->model);
    cell(&t, "numerics, codec");
    cell(&t, "%s, %s", s->numerics_class, s->kv_codec);
    cell(&t, "block, context");
    cell(&t, "%u, %u tokens", s->block_tokens, s->context_max);
    cell(&t, "up for");
    cell(&t, "%.1f s", (double)s->uptime_ms / 1000);
    cell(&t, "running, queued");
    cell(&t, "%u, %u", s->requests_running, s->prompts_queued);
    for (size_t i = 0; i < s->n_requests; i++) {
        if (s->requests[i]->count > 0) {
            cell(&t, "requests %s", s->requests[i]->name);
            cell(&t, "%" PRIu64, s->requests[i]->count);
        }
    }
    cell(&t, "retries, failovers");
    cell(&t, "%" PRIu64 ", %" PRIu64, s->retries, s->failovers);
    cell(&t, "blocks known of");
    cell(&t, "%" PRIu64, s->hint_blocks);
    for (size_t i = 0; i < s->n_index_nodes; i++) {
        cell(&t, "nodes known %s", s->index_nodes[i]->name);
        cell(&t, "%" PRIu64, s->index_nodes[i]->count);
    }
    for (size_t i = 0; i < s->n_index; i++) {
        if (s->index[i]->count > 0) {
            cell(&t, "index %s", s->index[i]->name);
            cell(&t, "%" PRIu64, s->index[i]->count);
        }
    }
    cell(&t, "prompt tokens");
    cell(&t, "%" PRIu64 " (%" PRIu64 " cached)", s->prompt_tokens, s->cached_tokens);
    cell(&t, "completion tokens");
    cell(&t, "%" PRIu64, s->completion_tokens);
    print_table(&t, out);
}

static const char *state_name(PB(NodeState) state)
{
    return state == TANDEM__ADMIN__V1__NODE_STATE__LIVE       ? "live"
           : state == TANDEM__ADMIN__V1__NODE_STATE__DRAINING ? "draining"
                                                              : "dead";
}

static json_t *node_json(const PB(Node) * n)
{
    json_t *o = json_object();
    json_t *drafters = json_array();

    put_text(o, "id", n->id);
    put_text(o, "role", n->role);
    put_text(o, "state", state_name(n->state));
    put(o, "drained", json_boolean(n->drained));
    put(o, "shunned", json_boolean(n->shunned));
    put_hex(o, "incarnation", n->incarnation);
    put_text(o, "endpoint", n->endpoint);
    put_text(o, "http", n->http);
    put_count(o, "silent_ms", n->silent_ms);
    put_count(o, "free_blocks", n->free_blocks);
    put_count(o, "total_blocks", n->total_blocks);
    put_count(o, "prefills", n->prefills);
    put_count(o, "sequences", n->sequences);
    put_count(o, "ahead_tokens", n->ahead_tokens);
    put_count(o, "promised_blocks", n->promised_blocks);
    put_count(o, "tokens_per_s", n->tokens_per_s);
    put(o, "store_master", json_boolean(n->store_master));
    put_text(o, "index", n->index);
    put_count(o, "index_blocks", n->index_blocks);
    put_hex(o, "index_digest", n->index_digest);
    put_count(o, "index_gaps", n->index_gaps);
    for (size_t i = 0; i < n->n_drafters; i++) {
        (void)json_array_append_new(drafters, json_string_nocheck(n->drafters[i]));
    }
    put(o, "drafters", drafters);
    return o;
}

static void show_nodes(const PB(Nodes) * nodes, bool json, FILE *out)
{
    static const char *const names[] = {"node",     "role",     "state",    "silent ms", "free",
                                        "blocks",   "prefills", "ahead",    "sequences", "promised",
                                        "tokens/s", "index",    "endpoint", NULL};
    json_t *object = json ? json_object() : NULL;
    json_t *array = json ? json_array() : NULL;
    table_t t = {0};

    head(&t, names);
    for (size_t i = 0; i < nodes->n_nodes; i++) {
        const PB(Node) *n = nodes->nodes[i];
        if (json) {
            (void)json_array_append_new(array, node_json(n));
            continue;
        }
        cell(&t, "%s", n->id);
        cell(&t, "%s%s", n->role, n->store_master ? " (master)" : "");
        cell(&t, "%s%s%s", state_name(n->state), n->drained ? " (by order)" : "",
             n->shunned ? ", shunned" : "");
        cell(&t, "%" PRIu64, n->silent_ms);
        cell(&t, "%u", n->free_blocks);
        cell(&t, "%u", n->total_blocks);
        cell(&t, "%u", n->prefills);
        cell(&t, "%" PRIu64, n->ahead_tokens);
        cell(&t, "%u", n->sequences);
        cell(&t, "%" PRIu64, n->promised_blocks);
        cell(&t, "%" PRIu64, n->tokens_per_s);
        cell(&t, "%s %u", n->index, n->index_blocks);
        cell(&t, "%s", n->endpoint);
    }
    if (json) {
        free(t.cells);
        put(object, "nodes", array);
        print_json(object, out);
        return;
    }
    print_table(&t, out);
}

static void show_store(const PB(StoreResult) * r, bool json, FILE *out)
{
    json_t *object = json ? json_object() : NULL;
    json_t *array = json ? json_array() : NULL;
    size_t done = 0;

    for (size_t i = 0; i < r->n_statuses; i++) {
        done += r->statuses[i] == 0;
        if (json) {
            json_t *o = json_object();
            char hex[2 * CTL_KEY_BYTES + 1] = "";
            for (size_t k = 0; k < CTL_KEY_BYTES && (i + 1) * CTL_KEY_BYTES <= r->keys.len; k++) {
                (void)snprintf(hex + 2 * k, 3, "%02x", r->keys.data[i * CTL_KEY_BYTES + k]);
            }
            put_text(o, "key", hex);
            put_text(o, "status", i < r->n_texts ? r->texts[i] : "");
            (void)json_array_append_new(array, o);
        }
    }
    if (json) {
        put_count(object, "done", done);
        put(object, "blocks", array);
        print_json(object, out);
        return;
    }
    (void)fprintf(out, "%zu of %zu blocks done\n", done, r->n_statuses);
    for (size_t i = 0; i < r->n_statuses && i < r->n_texts; i++) {
        if (r->statuses[i] != 0) {
            (void)fprintf(out, "block %zu: %s\n", i, r->texts[i]);
        }
    }
}

static void show_speculation(const PB(Speculation) * s, bool json, FILE *out)
{
    static const char *const names[] = {"tenant",   "class",        "drafter", "tokens/step",
                                        "tokens/s", "1st accepted", NULL};
    json_t *object = json ? json_object() : NULL;
    json_t *array = json ? json_array() : NULL;
    table_t t = {0};

    head(&t, names);
    for (size_t i = 0; i < s->n_entries; i++) {
        const PB(DraftEntry) *e = s->entries[i];
        const double first = e->n_drafted > 0 && e->n_accepted > 0 && e->drafted[0] > 0
                                 ? e->accepted[0] / e->drafted[0]
                                 : 0;
        if (json) {
            json_t *o = json_object();
            put_hex(o, "tenant", e->tenant);
            put_text(o, "class", e->prompt_class);
            put_text(o, "drafter", e->drafter);
            put(o, "tokens_per_step", json_real(e->tokens_per_step));
            put(o, "tokens_per_s", json_real(e->tokens_per_s));
            put_reals(o, "steps", e->steps, e->n_steps);
            put_reals(o, "drafted", e->drafted, e->n_drafted);
            put_reals(o, "accepted", e->accepted, e->n_accepted);
            (void)json_array_append_new(array, o);
            continue;
        }
        cell(&t, "%016" PRIx64, e->tenant);
        cell(&t, "%s", e->prompt_class);
        cell(&t, "%s", e->drafter);
        cell(&t, "%.2f", e->tokens_per_step);
        cell(&t, "%.1f", e->tokens_per_s);
        cell(&t, "%.0f %%", 100 * first);
    }
    if (json) {
        free(t.cells);
        put_count(object, "explore_percent", s->explore_percent);
        put_count(object, "reports", s->reports);
        put(object, "entries", array);
        print_json(object, out);
        return;
    }
    (void)fprintf(out, "explores %u %% of open requests; %" PRIu64 " reports\n", s->explore_percent,
                  s->reports);
    print_table(&t, out);
}

static void show_policy(const PB(Policy) * p, bool json, FILE *out)
{
    json_t *object = json ? json_object() : NULL;
    json_t *known = json ? json_array() : NULL;

    for (size_t i = 0; i < p->n_known; i++) {
        if (json) {
            (void)json_array_append_new(known, json_string_nocheck(p->known[i]));
        } else {
            const bool is_set = strcmp(p->known[i], p->policy) == 0;
            (void)fprintf(out, "%s %s\n", is_set ? "*" : " ", p->known[i]);
        }
    }
    if (json) {
        put_text(object, "policy", p->policy);
        put(object, "known", known);
        print_json(object, out);
    }
}

static void show_slo(const PB(Slo) * s, bool json, FILE *out)
{
    json_t *o = json ? json_object() : NULL;

    if (json) {
        put_count(o, "ttft_ms", s->ttft_ms);
        put_count(o, "tbt_ms", s->tbt_ms);
        put_count(o, "refused_ttft", s->refused_ttft);
        put_count(o, "refused_tbt", s->refused_tbt);
        print_json(o, out);
        return;
    }
    (void)fprintf(out, "first token within %u ms, tokens every %u ms (0: no such limit)\n",
                  s->ttft_ms, s->tbt_ms);
    (void)fprintf(out, "refused: %" PRIu64 " for the first, %" PRIu64 " for the second\n",
                  s->refused_ttft, s->refused_tbt);
}

static json_t *tenant_json(const PB(Tenant) * t)
{
    json_t *o = json_object();

    put_text(o, "name", t->name);
    put_count(o, "weight", t->weight);
    put_count(o, "requests_max", t->requests_max);
    put_count(o, "requests_per_minute", t->requests_per_minute);
    put_count(o, "tokens_per_minute", t->tokens_per_minute);
    put_count(o, "requests_left", t->requests_left);
    put_count(o, "tokens_left", t->tokens_left);
    put_count(o, "running", t->running);
    put_count(o, "queued", t->queued);
    put_counts(o, "requests", t->requests, t->n_requests);
    put_counts(o, "limited", t->limited, t->n_limited);
    put_count(o, "prompt_tokens", t->prompt_tokens);
    put_count(o, "completion_tokens", t->completion_tokens);
    put_count(o, "waits", t->waits);
    put_count(o, "wait_ms", t->wait_ms);
    return o;
}

/* What is left of a minute's. */
static void limit_cell(table_t *table, uint32_t limit, uint32_t left)
{
    if (limit == 0) {
        cell(table, "-");
    } else {
        cell(table, "%u of %u", left, limit);
    }
}

static void tenant_row(table_t *table, const PB(Tenant) * t)
{
    uint64_t ok = 0;
    uint64_t all = 0;
    uint64_t limited = 0;

    for (size_t i = 0; i < t->n_requests; i++) {
        all += t->requests[i]->count;
        ok += strcmp(t->requests[i]->name, "ok") == 0 ? t->requests[i]->count : 0;
    }
    for (size_t i = 0; i < t->n_limited; i++) {
        limited += t->limited[i]->count;
    }
    cell(table, "%s", t->name);
    cell(table, "%u", t->weight);
    if (t->requests_max > 0) {
        cell(table, "%u of %u", t->running, t->requests_max);
    } else {
        cell(table, "%u", t->running);
    }
    cell(table, "%u", t->queued);
    cell(table, "%" PRIu64, ok);
    cell(table, "%" PRIu64, limited);
    cell(table, "%" PRIu64, all - ok - limited);
    cell(table, "%" PRIu64, t->prompt_tokens);
    cell(table, "%" PRIu64, t->completion_tokens);
    cell(table, "%" PRIu64 " ms", t->waits == 0 ? 0 : t->wait_ms / t->waits);
    limit_cell(table, t->requests_per_minute, t->requests_left);
    limit_cell(table, t->tokens_per_minute, t->tokens_left);
}

static void show_tenants(const PB(Tenants) * tenants, bool json, FILE *out)
{
    static const char *const names[] = {
        "tenant", "weight",  "running", "queued",        "ok",          "limited", "failed",
        "prompt", "answers", "wait",    "requests left", "tokens left", NULL};
    json_t *object = json ? json_object() : NULL;
    json_t *list = json ? json_array() : NULL;
    table_t t = {0};

    if (!json) {
        head(&t, names);
    }
    for (size_t i = 0; i < tenants->n_tenants; i++) {
        if (json) {
            (void)json_array_append_new(list, tenant_json(tenants->tenants[i]));
        } else {
            tenant_row(&t, tenants->tenants[i]);
        }
    }
    if (json) {
        put(object, "tenants", list);
        print_json(object, out);
    } else {
        print_table(&t, out);
    }
}

/* What tandem-sim --calibration reads, with --json; only what is known. */
static void show_calibration(const PB(Calibration) * c, bool json, FILE *out)
{
    const struct {
        const char *name;
        double value;
        bool known;
    } rows[] = {
        {"prefill_prompt_ms", c->prefill_prompt_ms, c->prefills > 0},
        {"prefill_token_us", c->prefill_token_us, c->prefills > 0},
        {"prefill_pair_ns", c->prefill_pair_ns, c->prefills > 0},
        {"decode_step_ms", c->decode_step_ms, c->decodes > 0},
        {"decode_sequence_us", c->decode_sequence_us, c->decodes > 0},
        {"decode_kv_token_ns", c->decode_kv_token_ns, c->decodes > 0},
        {"decode_kv_tokens", c->decode_kv_tokens, c->decode_kv_tokens > 0},
        {"kv_token_bytes", c->kv_token_bytes, true},
        {"layers", c->layers, true},
    };
    json_t *o = json ? json_object() : NULL;

    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        if (!rows[i].known) {
            continue;
        }
        if (json) {
            put(o, rows[i].name, json_real(rows[i].value));
        } else {
            (void)fprintf(out, "%-20s %.6g\n", rows[i].name, rows[i].value);
        }
    }
    if (json) {
        print_json(o, out);
    } else {
        (void)fprintf(out, "of the last %.0f prompts and %.0f times between tokens\n", c->prefills,
                      c->decodes);
    }
}

static json_t *decision_json(const PB(Decision) * d)
{
    json_t *o = json_object();
    json_t *prefills = json_array();
    json_t *decodes = json_array();

    put_count(o, "number", d->number);
    put_count(o, "time_ms", d->time_ms);
    put_text(o, "request", d->request);
    put_count(o, "prompt", d->prompt);
    put_count(o, "attempt", d->attempt);
    put_count(o, "prompt_tokens", d->prompt_tokens);
    put_count(o, "generated_tokens", d->generated_tokens);
    put(o, "self_prefill", json_boolean(d->self_prefill));
    put_text(o, "policy", d->policy);
    put_count(o, "prefill_nodes", d->prefill_nodes);
    put_count(o, "decode_nodes", d->decode_nodes);
    for (size_t i = 0; i < d->n_prefills; i++) {
        json_t *p = json_object();
        put_text(p, "node", d->prefills[i]->node);
        put(p, "score_ms", json_real(d->prefills[i]->score_ms));
        put(p, "queue_ms", json_real(d->prefills[i]->queue_ms));
        put(p, "ttft_ms", json_real(d->prefills[i]->ttft_ms));
        put_count(p, "own_tokens", d->prefills[i]->own_tokens);
        put_count(p, "pulled_tokens", d->prefills[i]->pulled_tokens);
        (void)json_array_append_new(prefills, p);
    }
    put(o, "prefills", prefills);
    for (size_t i = 0; i < d->n_decodes; i++) {
        json_t *c = json_object();
        put_text(c, "node", d->decodes[i]->node);
        put(c, "score", json_real(d->decodes[i]->score));
        put(c, "tbt_ms", json_real(d->decodes[i]->tbt_ms));
        put(c, "fits", json_boolean(d->decodes[i]->fits));
        put_count(c, "running", d->decodes[i]->running);
        put_count(c, "free_blocks", d->decodes[i]->free_blocks);
        (void)json_array_append_new(decodes, c);
    }
    put(o, "decodes", decodes);
    put_text(o, "drafter", d->drafter);
    put_count(o, "k_min", d->k_min);
    put_count(o, "k_max", d->k_max);
    put_text(o, "draft_why", d->draft_why);
    put_text(o, "prompt_class", d->prompt_class);
    put_text(o, "end", d->end);
    put_count(o, "took_ms", d->took_ms);
    put_count(o, "tokens", d->tokens);
    return o;
}

/* For people: a line of the decision, then one for each candidate. */
static void print_decision(const PB(Decision) * d, FILE *out)
{
    (void)fprintf(out, "%s attempt %u: %u tokens, policy %s, %s k=%u-%u (%s, %s): %s", d->request,
                  d->attempt, d->prompt_tokens, d->policy, d->drafter, d->k_min, d->k_max,
                  d->draft_why, d->prompt_class, d->end[0] == '\0' ? "under way" : d->end);
    if (d->end[0] != '\0') {
        (void)fprintf(out, ", %u tokens in %" PRIu64 " ms", d->tokens, d->took_ms);
    }
    (void)fputs("\n", out);
    for (size_t i = 0; i < d->n_prefills; i++) {
        const PB(PrefillCandidate) *p = d->prefills[i];
        (void)fprintf(
            out, "  %c prefill %-16s score %.2f ms, queue %.2f, ttft %.2f, own %u, pulled %u\n",
            i == 0 && !d->self_prefill ? '*' : ' ', p->node, p->score_ms, p->queue_ms, p->ttft_ms,
            p->own_tokens, p->pulled_tokens);
    }
    for (size_t i = 0; i < d->n_decodes; i++) {
        const PB(DecodeCandidate) *c = d->decodes[i];
        (void)fprintf(out, "  %c decode  %-16s score %.4g, tbt %.2f ms, running %u, free %u%s%s\n",
                      i == 0 ? '*' : ' ', c->node, c->score, c->tbt_ms, c->running, c->free_blocks,
                      c->fits ? "" : ", does not fit",
                      i == 0 && d->self_prefill ? ", computes the prompt" : "");
    }
}

static void show_trace(const PB(Trace) * t, bool json, FILE *out)
{
    for (size_t i = 0; i < t->n_decisions; i++) {
        if (json) {
            print_json(decision_json(t->decisions[i]), out);
        } else {
            print_decision(t->decisions[i], out);
        }
    }
}

static void show_event(const PB(Event) * e, bool json, FILE *out)
{
    const time_t seconds = (time_t)(e->time_ms / 1000);
    struct tm utc;
    char when[32] = "";

    if (json) {
        json_t *o = json_object();
        put_count(o, "number", e->number);
        put_count(o, "time_ms", e->time_ms);
        put_text(o, "kind", e->kind);
        put_text(o, "node", e->node);
        put_text(o, "request", e->request);
        put_text(o, "text", e->text);
        print_json(o, out);
        return;
    }
    if (gmtime_r(&seconds, &utc) != NULL) {
        (void)strftime(when, sizeof(when), "%Y-%m-%dT%H:%M:%S", &utc);
    }
    (void)fprintf(out, "%6" PRIu64 "  %s.%03uZ  %-14s  %s%s%s  %s\n", e->number, when,
                  (unsigned)(e->time_ms % 1000), e->kind, e->node, e->node[0] != '\0' ? " " : "",
                  e->request, e->text);
    (void)fflush(out);
}

static uint64_t show_events(const PB(Events) * events, bool json, FILE *out, FILE *err)
{
    uint64_t newest = 0;

    if (events->missed > 0) {
        (void)fprintf(err, "%" PRIu64 " older events are not kept any more\n", events->missed);
    }
    for (size_t i = 0; i < events->n_events; i++) {
        show_event(events->events[i], json, out);
        newest = events->events[i]->number;
    }
    return newest;
}

ctl_shown_t ctl_show(const uint8_t *bytes, size_t len, bool json, FILE *out, FILE *err)
{
    PB(Reply) *reply = tandem__admin__v1__reply__unpack(NULL, len, bytes);
    ctl_shown_t shown = {0};

    if (reply == NULL) {
        (void)fprintf(err, "tandemctl: what came is no Reply: is this a router's admin RPC?\n");
        shown.exit_code = 1;
        return shown;
    }
    if (reply->code != TANDEM__ADMIN__V1__CODE__OK) {
        (void)fprintf(err, "tandemctl: %s\n", reply->error);
        shown.exit_code = 1;
    } else if (reply->answer_case == TANDEM__ADMIN__V1__REPLY__ANSWER_STATUS) {
        show_status(reply->status, json, out);
    } else if (reply->answer_case == TANDEM__ADMIN__V1__REPLY__ANSWER_NODES) {
        show_nodes(reply->nodes, json, out);
    } else if (reply->answer_case == TANDEM__ADMIN__V1__REPLY__ANSWER_STORE) {
        show_store(reply->store, json, out);
    } else if (reply->answer_case == TANDEM__ADMIN__V1__REPLY__ANSWER_SPECULATION) {
        show_speculation(reply->speculation, json, out);
    } else if (reply->answer_case == TANDEM__ADMIN__V1__REPLY__ANSWER_POLICY) {
        show_policy(reply->policy, json, out);
    } else if (reply->answer_case == TANDEM__ADMIN__V1__REPLY__ANSWER_SLO) {
        show_slo(reply->slo, json, out);
    } else if (reply->answer_case == TANDEM__ADMIN__V1__REPLY__ANSWER_TENANTS) {
        show_tenants(reply->tenants, json, out);
    } else if (reply->answer_case == TANDEM__ADMIN__V1__REPLY__ANSWER_CALIBRATION) {
        show_calibration(reply->calibration, json, out);
    } else if (reply->answer_case == TANDEM__ADMIN__V1__REPLY__ANSWER_TRACE) {
        show_trace(reply->trace, json, out);
    } else if (reply->answer_case == TANDEM__ADMIN__V1__REPLY__ANSWER_EVENTS) {
        shown.newest = show_events(reply->events, json, out, err);
    } else {
        (void)fputs(json ? "{}\n" : "done\n", out);
    }
    tandem__admin__v1__reply__free_unpacked(reply, NULL);
    return shown;
}

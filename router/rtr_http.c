#include "router/rtr_http.h"

#include <arpa/inet.h>
#include <microhttpd.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/base/td_config.h"
#include "common/base/td_log.h"
#include "common/wire/td_statusd.h"
#include "router/rtr_page.h"
#include "router/rtr_status.h"

#define IDLE_TIMEOUT_S 60u
#define CONNECTION_BYTES 36864u /* past 32 KiB MHD maps it, so that it goes back when it closes */
#define STREAM_BLOCK_BYTES 8192u
#define DISCARD_BYTES_MAX (64u << 20) /* of a body that is refused; more closes the connection */
#define STATUS_MS 100u /* how old /status may be: hundreds of nodes take milliseconds to write */
#define MODELS_PATH "/v1/models/"

struct rtr_http {
    rtr_http_config_t config;
    struct MHD_Daemon *daemon; /* owned */
    uint64_t begun_ns;
    atomic_bool draining; /* relaxed: a request sooner or later is refused */
    atomic_bool stopping; /* seq_cst, with the watch table's lock: see suspend_locked() */
    char address[64];
    /* The HTTP thread's: the last answer of /status. */
    td_str_t status_text;
    const rtr_tenant_t *status_tenant; /* borrowed; whose requests are in it */
    uint64_t status_ns;                /* 0: there is none */
};

struct conn;
typedef enum MHD_Result (*route_fn)(struct conn *conn);

typedef struct route {
    const char *method;
    const char *path;
    bool is_prefix;
    bool needs_key;
    rtr_kind_t kind; /* of POST routes */
    route_fn answer; /* NULL: a request for the workers */
} route_t;

/** One HTTP request on a connection. */
typedef struct conn {
    rtr_http_t *http;
    struct MHD_Connection *mhd;
    const char *url;    /* borrowed from MHD */
    const char *method; /* borrowed from MHD */
    td_str_t body;
    size_t discarded;     /* bytes of a body over the limit */
    rtr_tenant_t *tenant; /* whose key it came with */
    rtr_request_t *req;
    bool has_slot; /* of the watch table */
    bool watched;
    uint32_t watch_slot;
    uint64_t begun_ns;
    int status; /* answered; 0: nothing yet */
} conn_t;

/* --- answers ---------------------------------------------------------------------------------- */

static void add_header(struct MHD_Response *response, const char *name, const char *value)
{
    if (value[0] != '\0') {
        (void)MHD_add_response_header(response, name, value);
    }
}

/* "420ms", "7.500s", "1m12.000s": as OpenAI's API writes times. */
static void format_time(uint64_t ms, char *out, size_t room)
{
    if (ms < 1000) {
        (void)snprintf(out, room, "%llums", (unsigned long long)ms);
    } else if (ms < 60000) {
        (void)snprintf(out, room, "%llu.%03us", (unsigned long long)(ms / 1000),
                       (unsigned)(ms % 1000));
    } else {
        (void)snprintf(out, room, "%llum%u.%03us", (unsigned long long)(ms / 60000),
                       (unsigned)(ms / 1000 % 60), (unsigned)(ms % 1000));
    }
}

static void add_limit(struct MHD_Response *response, const char *of, uint32_t limit, uint32_t left,
                      uint64_t reset_ms)
{
    char name[64];
    char value[48];

    if (limit == 0) {
        return;
    }
    (void)snprintf(name, sizeof(name), "x-ratelimit-limit-%s", of);
    (void)snprintf(value, sizeof(value), "%u", limit);
    add_header(response, name, value);
    (void)snprintf(name, sizeof(name), "x-ratelimit-remaining-%s", of);
    (void)snprintf(value, sizeof(value), "%u", left);
    add_header(response, name, value);
    (void)snprintf(name, sizeof(name), "x-ratelimit-reset-%s", of);
    format_time(reset_ms, value, sizeof(value));
    add_header(response, name, value);
}

/* What is known of the request by now. */
static void add_request_headers(struct MHD_Response *response, const rtr_request_t *req)
{
    const rtr_limits_view_t *v = &req->limits;

    add_header(response, "x-request-id", req->request_id);
    add_header(response, "x-tandem-prefill", req->prefill_id);
    add_header(response, "x-tandem-decode", req->decode_id);
    add_header(response, "x-tandem-draft", req->draft);
    add_limit(response, "requests", v->requests, v->requests_left, v->requests_reset_ms);
    add_limit(response, "tokens", v->tokens, v->tokens_left, v->tokens_reset_ms);
}

/* Takes text over. retry_after_s: 0 = says nothing of it. */
static enum MHD_Result answer(conn_t *conn, int status, const char *type, td_str_t *text,
                              uint32_t retry_after_s, const char *allow)
{
    static char empty[1];
    char seconds[16];
    struct MHD_Response *response = NULL;
    enum MHD_Result result = MHD_NO;

    if (text->bytes == NULL) {
        response = MHD_create_response_from_buffer(0, empty, MHD_RESPMEM_PERSISTENT);
    } else {
        response =
            MHD_create_response_from_buffer_with_free_callback(text->len, text->bytes, td_free);
    }
    if (response == NULL) {
        td_str_fini(text);
        return MHD_NO;
    }
    *text = (td_str_t){0};
    add_header(response, "Content-Type", type);
    add_header(response, "Allow", allow);
    if (retry_after_s > 0) {
        (void)snprintf(seconds, sizeof(seconds), "%u", retry_after_s);
        add_header(response, "Retry-After", seconds);
    }
    if (status == 401) {
        add_header(response, "WWW-Authenticate", "Bearer");
    }
    if (conn->req != NULL) {
        add_request_headers(response, conn->req);
    }
    conn->status = status;
    result = MHD_queue_response(conn->mhd, (unsigned)status, response);
    MHD_destroy_response(response);
    return result;
}

static enum MHD_Result answer_error(conn_t *conn, const rtr_error_t *error, const char *allow)
{
    td_str_t text = {0};
    if (rtr_reply_error(error, &text) != TD_OK) {
        return MHD_NO;
    }
    return answer(conn, error->http, "application/json", &text, 0, allow);
}

static enum MHD_Result answer_json(conn_t *conn, td_status_t status, td_str_t *text)
{
    if (status != TD_OK) {
        td_str_fini(text);
        return MHD_NO;
    }
    return answer(conn, 200, "application/json", text, 0, "");
}

/* --- small routes ----------------------------------------------------------------------------- */

static enum MHD_Result get_models(conn_t *conn)
{
    td_str_t text = {0};
    return answer_json(conn, rtr_reply_model(conn->http->config.model, true, &text), &text);
}

static enum MHD_Result get_model(conn_t *conn)
{
    const char *name = conn->url + strlen(MODELS_PATH);
    td_str_t text = {0};
    rtr_error_t error;

    if (strcmp(name, conn->http->config.model->name) != 0) {
        rtr_error_set(&error, 404, "model_not_found", "model",
                      "The model `%.128s` does not exist; this server has `%s`.", name,
                      conn->http->config.model->name);
        return answer_error(conn, &error, "");
    }
    return answer_json(conn, rtr_reply_model(conn->http->config.model, false, &text), &text);
}

static enum MHD_Result get_health(conn_t *conn)
{
    td_str_t text = {0};
    return answer_json(conn, td_str_append_text(&text, "{\"status\":\"ok\"}\n"), &text);
}

static const char *state_of(const rtr_http_t *http)
{
    const rtr_registry_t *reg = rtr_loop_registry(http->config.loop);

    if (atomic_load_explicit(&http->draining, memory_order_relaxed)) {
        return "draining";
    }
    return rtr_registry_live(reg, TD_ROLE_PREFILL) > 0 && rtr_registry_live(reg, TD_ROLE_DECODE) > 0
               ? "ready"
               : "waiting";
}

static enum MHD_Result get_ready(conn_t *conn)
{
    const rtr_registry_t *reg = rtr_loop_registry(conn->http->config.loop);
    const bool prefill = rtr_registry_live(reg, TD_ROLE_PREFILL) > 0;
    const bool decode = rtr_registry_live(reg, TD_ROLE_DECODE) > 0;
    const char *state = state_of(conn->http);
    td_str_t text = {0};

    if (strcmp(state, "ready") == 0) {
        return answer_json(conn, td_str_append_text(&text, "{\"status\":\"ready\"}\n"), &text);
    }
    if (td_str_printf(&text, "{\"status\":\"%s\",\"missing\":[%s%s%s]}\n", state,
                      prefill ? "" : "\"prefill\"", prefill || decode ? "" : ",",
                      decode ? "" : "\"decode\"") != TD_OK) {
        return MHD_NO;
    }
    return answer(conn, 503, "application/json", &text, 1, "");
}

static enum MHD_Result get_metrics(conn_t *conn)
{
    td_str_t text = {0};
    if (td_metrics_render(conn->http->config.registry, &text) != TD_OK ||
        rtr_drafters_series(rtr_loop_drafters(conn->http->config.loop), &text) != TD_OK ||
        rtr_tenants_series(conn->http->config.tenants, &text) != TD_OK) {
        td_str_fini(&text);
        return MHD_NO;
    }
    return answer(conn, 200, "text/plain; version=0.0.4", &text, 0, "");
}

static enum MHD_Result get_drafters(conn_t *conn)
{
    td_str_t text = {0};
    return answer_json(conn, rtr_drafters_json(rtr_loop_drafters(conn->http->config.loop), &text),
                       &text);
}

/* Whoever asks all the time, or many pages at once, must not hold up streams. */
static td_status_t write_status(rtr_http_t *http, const rtr_tenant_t *tenant)
{
    const rtr_http_config_t *config = &http->config;
    const uint64_t now = td_now_ns();
    const rtr_status_t status = {.model = config->model,
                                 .metrics = config->metrics,
                                 .registry = rtr_loop_registry(config->loop),
                                 .access = config->access,
                                 .router = config->router,
                                 .tenant = tenant,
                                 .state = state_of(http),
                                 .uptime_ms = (now - http->begun_ns) / TD_NS_PER_MS};

    if (http->status_ns != 0 && tenant == http->status_tenant &&
        now - http->status_ns < STATUS_MS * TD_NS_PER_MS) {
        return TD_OK;
    }
    http->status_ns = 0;
    td_str_clear(&http->status_text);
    TD_TRY(rtr_status_json(&status, &http->status_text));
    http->status_tenant = tenant;
    http->status_ns = now;
    return TD_OK;
}

static enum MHD_Result get_status(conn_t *conn)
{
    rtr_http_t *http = conn->http;
    td_str_t text = {0};
    td_status_t status = write_status(http, http->config.auth == NULL ? NULL : conn->tenant);

    if (status == TD_OK) {
        status = td_str_append(&text, http->status_text.bytes, http->status_text.len);
    }
    return answer_json(conn, status, &text);
}

/* A file that is part of the program. policy: of what it may load; "": it is no page. */
static enum MHD_Result answer_file(conn_t *conn, const char *type, const char *bytes, size_t len,
                                   const char *policy)
{
    struct MHD_Response *response =
        MHD_create_response_from_buffer(len, (void *)(uintptr_t)bytes, MHD_RESPMEM_PERSISTENT);
    enum MHD_Result result = MHD_NO;

    if (response == NULL) {
        return MHD_NO;
    }
    add_header(response, "Content-Type", type);
    add_header(response, "Content-Security-Policy", policy);
    add_header(response, "X-Content-Type-Options", "nosniff");
    add_header(response, "Referrer-Policy", "no-referrer");
    add_header(response, "Cache-Control", "no-cache");
    conn->status = 200;
    result = MHD_queue_response(conn->mhd, 200, response);
    MHD_destroy_response(response);
    return result;
}

static enum MHD_Result get_page(conn_t *conn)
{
    return answer_file(conn, "text/html; charset=utf-8", rtr_page_html, rtr_page_bytes(),
                       rtr_page_policy());
}

static enum MHD_Result get_openapi(conn_t *conn)
{
    return answer_file(conn, "application/json", rtr_page_openapi, rtr_page_openapi_bytes(), "");
}

static const route_t routes[] = {
    {"POST", "/v1/chat/completions", false, true, RTR_KIND_CHAT, NULL},
    {"POST", "/v1/completions", false, true, RTR_KIND_COMPLETION, NULL},
    {"POST", "/tokenize", false, true, RTR_KIND_TOKENIZE, NULL},
    {"POST", "/detokenize", false, true, RTR_KIND_DETOKENIZE, NULL},
    {"GET", "/v1/models", false, true, RTR_KIND_CHAT, get_models},
    {"GET", MODELS_PATH, true, true, RTR_KIND_CHAT, get_model},
    {"GET", "/speculation", false, true, RTR_KIND_CHAT, get_drafters},
    {"GET", "/status", false, true, RTR_KIND_CHAT, get_status},
    {"GET", "/health", false, false, RTR_KIND_CHAT, get_health},
    {"GET", "/ready", false, false, RTR_KIND_CHAT, get_ready},
    {"GET", "/metrics", false, false, RTR_KIND_CHAT, get_metrics},
    {"GET", "/openapi.json", false, false, RTR_KIND_CHAT, get_openapi},
    {"GET", "/", false, false, RTR_KIND_CHAT, get_page},
};

/* --- requests for the workers ----------------------------------------------------------------- */

static void wake_connection(void *ctx)
{
    MHD_resume_connection(ctx);
}

static ssize_t read_stream(void *cls, uint64_t pos, char *out, size_t max)
{
    conn_t *conn = cls;
    rtr_request_t *req = conn->req;
    ssize_t result = 0;
    size_t left = 0;
    (void)pos;

    (void)pthread_mutex_lock(&req->mu);
    left = req->out.len - req->out_pos;
    if (req->torn) {
        result = MHD_CONTENT_READER_END_WITH_ERROR;
    } else if (left > 0) {
        size_t n = TD_MIN(left, max);
        memcpy(out, req->out.bytes + req->out_pos, n);
        req->out_pos += n;
        result = (ssize_t)n;
    } else if (req->done) {
        result = MHD_CONTENT_READER_END_OF_STREAM;
    } else if (atomic_load(&conn->http->stopping)) {
        result = MHD_CONTENT_READER_END_WITH_ERROR;
    } else {
        req->suspended = true;
        MHD_suspend_connection(conn->mhd);
    }
    (void)pthread_mutex_unlock(&req->mu);
    return result;
}

static enum MHD_Result answer_stream(conn_t *conn)
{
    struct MHD_Response *response = MHD_create_response_from_callback(
        MHD_SIZE_UNKNOWN, STREAM_BLOCK_BYTES, read_stream, conn, NULL);
    enum MHD_Result result = MHD_NO;

    if (response == NULL) {
        return MHD_NO;
    }
    add_header(response, "Content-Type", "text/event-stream; charset=utf-8");
    add_header(response, "Cache-Control", "no-cache");
    add_header(response, "X-Accel-Buffering", "no");
    add_request_headers(response, conn->req);
    result = MHD_queue_response(conn->mhd, 200, response);
    MHD_destroy_response(response);
    return result;
}

/* Answers when the headers are decided, else suspends. The request was put into the watch table
 * before, and rtr_http_stop() sets `stopping` before it walks the table: so either the walk finds
 * the request, or this finds the flag, and nothing stays suspended. */
static enum MHD_Result answer_or_suspend(conn_t *conn)
{
    rtr_request_t *req = conn->req;
    td_str_t text = {0};
    bool torn = false;
    bool is_stream = false;
    int http_status = 0;

    (void)pthread_mutex_lock(&req->mu);
    torn = req->torn;
    if (!req->ready && !torn) {
        if (atomic_load(&conn->http->stopping)) {
            (void)pthread_mutex_unlock(&req->mu);
            return MHD_NO;
        }
        req->suspended = true;
        MHD_suspend_connection(conn->mhd);
        (void)pthread_mutex_unlock(&req->mu);
        return MHD_YES;
    }
    is_stream = req->is_stream;
    http_status = req->http_status;
    if (!torn && !is_stream) {
        text = req->out;
        req->out = (td_str_t){0};
    }
    (void)pthread_mutex_unlock(&req->mu);
    if (torn) {
        return MHD_NO;
    }
    return is_stream ? answer_stream(conn)
                     : answer(conn, http_status, "application/json", &text, req->retry_after_s, "");
}

static void take_request_id(const conn_t *conn, rtr_request_t *req)
{
    const char *id = MHD_lookup_connection_value(conn->mhd, MHD_HEADER_KIND, "x-request-id");
    size_t len = id != NULL ? strlen(id) : 0;

    for (size_t i = 0; i < len; i++) {
        if (id[i] <= 0x20 || id[i] > 0x7e) {
            return;
        }
    }
    if (len >= 1 && len <= RTR_REQUEST_ID_CHARS_MAX) {
        (void)snprintf(req->request_id, sizeof(req->request_id), "%s", id);
    }
}

/* Of a header, in place of the server's own; 0: no limit. False: it is no such number. */
static bool take_slo(const conn_t *conn, const char *name, uint32_t *ms)
{
    const char *text = MHD_lookup_connection_value(conn->mhd, MHD_HEADER_KIND, name);
    const td_option_t rule = {.type = TD_OPTION_COUNT, .max = RTR_SLO_MS_MAX};
    uint64_t value = 0;

    if (text == NULL) {
        return true;
    }
    if (td_option_parse_u64(&rule, text, &value) != TD_OK) {
        return false;
    }
    *ms = (uint32_t)value;
    return true;
}

static bool is_generation(rtr_kind_t kind)
{
    return kind == RTR_KIND_CHAT || kind == RTR_KIND_COMPLETION;
}

/* Who asks for what, as far as HTTP says it. */
static void describe(const conn_t *conn, rtr_access_entry_t *out)
{
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(conn->mhd, MHD_CONNECTION_INFO_CLIENT_ADDRESS);

    if (info != NULL && info->client_addr->sa_family == AF_INET) {
        const struct sockaddr_in *in = (const void *)info->client_addr;
        (void)inet_ntop(AF_INET, &in->sin_addr, out->client, sizeof(out->client));
    }
    (void)snprintf(out->method, sizeof(out->method), "%s", conn->method);
    (void)snprintf(out->path, sizeof(out->path), "%s", conn->url);
}

static enum MHD_Result begin_request(conn_t *conn, const route_t *route)
{
    rtr_metrics_t *metrics = is_generation(route->kind) ? conn->http->config.metrics : NULL;
    rtr_request_t *req = NULL;
    rtr_error_t error;

    if (rtr_request_create(route->kind, metrics, &req) != TD_OK) {
        return MHD_NO;
    }
    conn->req = req;
    req->tenant = is_generation(route->kind) ? conn->tenant : NULL;
    req->access = conn->http->config.access;
    describe(conn, &req->entry);
    if (is_generation(route->kind)) {
        rtr_request_begin_trace(
            req, conn->http->config.tracer,
            MHD_lookup_connection_value(conn->mhd, MHD_HEADER_KIND, "traceparent"),
            conn->http->config.sample_percent);
    }
    take_request_id(conn, req);
    req->body = conn->body;
    conn->body = (td_str_t){0};
    req->wake = wake_connection;
    req->wake_ctx = conn->mhd;
    if (atomic_load_explicit(&conn->http->draining, memory_order_relaxed)) {
        rtr_error_set(&error, 503, "shutting_down", NULL, "The server is shutting down.");
        rtr_request_fail(req, RTR_OUTCOME_REJECTED, &error, 1);
        return answer_or_suspend(conn);
    }
    req->slo = (rtr_slo_t){
        .ttft_ms = atomic_load_explicit(&conn->http->config.slo->ttft_ms, memory_order_relaxed),
        .tbt_ms = atomic_load_explicit(&conn->http->config.slo->tbt_ms, memory_order_relaxed)};
    if (!take_slo(conn, "x-slo-ttft-ms", &req->slo.ttft_ms) ||
        !take_slo(conn, "x-slo-tbt-ms", &req->slo.tbt_ms)) {
        rtr_error_set(&error, 400, "invalid_slo", NULL,
                      "x-slo-ttft-ms and x-slo-tbt-ms: milliseconds from 0 to %u are expected.",
                      RTR_SLO_MS_MAX);
        rtr_request_fail(req, RTR_OUTCOME_BAD_REQUEST, &error, 0);
        return answer_or_suspend(conn);
    }
    if (!conn->has_slot) {
        rtr_error_set(&error, 503, "too_many_connections", NULL, "Too many connections.");
        rtr_request_fail(req, RTR_OUTCOME_REJECTED, &error, 1);
        return answer_or_suspend(conn);
    }
    conn->watched = true;
    rtr_gone_watch(conn->http->config.gone, conn->watch_slot, req);
    if (rtr_workers_submit(conn->http->config.workers, rtr_request_ref(req)) != TD_OK) {
        rtr_error_set(&error, 429, "too_many_requests", NULL,
                      "The server has too many requests under way. Try again later.");
        rtr_request_fail(req, RTR_OUTCOME_REJECTED, &error, 1);
        rtr_request_unref(req);
    }
    return answer_or_suspend(conn);
}

/* --- the way in ------------------------------------------------------------------------------- */

static void count_refused(const conn_t *conn, const route_t *route)
{
    if (route->answer == NULL && is_generation(route->kind)) {
        td_metric_add(conn->http->config.metrics->requests[RTR_OUTCOME_BAD_REQUEST], 1);
        rtr_tenant_count_end(conn->tenant, RTR_OUTCOME_BAD_REQUEST);
    }
}

static bool route_matches(const route_t *route, const char *url)
{
    return route->is_prefix ? strncmp(url, route->path, strlen(route->path)) == 0
                            : strcmp(url, route->path) == 0;
}

/* False: its key is nobody's. */
static bool find_tenant(conn_t *conn)
{
    const rtr_http_config_t *config = &conn->http->config;

    conn->tenant =
        config->auth == NULL
            ? rtr_tenants_at(config->tenants, 0)
            : rtr_auth_check(config->auth, MHD_lookup_connection_value(conn->mhd, MHD_HEADER_KIND,
                                                                       "Authorization"));
    return conn->tenant != NULL;
}

static enum MHD_Result dispatch(conn_t *conn)
{
    const rtr_http_config_t *config = &conn->http->config;
    const char *method = strcmp(conn->method, "HEAD") == 0 ? "GET" : conn->method;
    const route_t *route = NULL;
    rtr_error_t error;

    for (size_t i = 0; i < TD_ARRAY_LEN(routes) && route == NULL; i++) {
        route = route_matches(&routes[i], conn->url) ? &routes[i] : NULL;
    }
    if (route == NULL) {
        rtr_error_set(&error, 404, "not_found", NULL, "There is no %.128s here.", conn->url);
        return answer_error(conn, &error, "");
    }
    if (strcmp(method, route->method) != 0) {
        rtr_error_set(&error, 405, "method_not_allowed", NULL, "%.128s takes %s, got %.16s.",
                      conn->url, route->method, conn->method);
        return answer_error(conn, &error,
                            strcmp(route->method, "GET") == 0 ? "GET, HEAD" : route->method);
    }
    if (route->needs_key && !find_tenant(conn)) {
        count_refused(conn, route);
        rtr_error_set(&error, 401, "invalid_api_key", NULL,
                      "A valid key is needed: Authorization: Bearer KEY.");
        return answer_error(conn, &error, "");
    }
    if (conn->discarded > 0) {
        count_refused(conn, route);
        rtr_error_set(&error, 413, "body_too_large", NULL, "The body is over %llu bytes.",
                      (unsigned long long)config->body_bytes_max);
        return answer_error(conn, &error, "");
    }
    return route->answer != NULL ? route->answer(conn) : begin_request(conn, route);
}

static enum MHD_Result take_body(conn_t *conn, const char *bytes, size_t len)
{
    if (conn->discarded > 0 || conn->body.len + len > conn->http->config.body_bytes_max) {
        td_str_fini(&conn->body);
        conn->discarded += len;
        return conn->discarded <= DISCARD_BYTES_MAX ? MHD_YES : MHD_NO;
    }
    return td_str_append(&conn->body, bytes, len) == TD_OK ? MHD_YES : MHD_NO;
}

/* MHD's context of a connection is its slot of the watch table, counted from 1. */
static void find_slot(conn_t *conn)
{
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(conn->mhd, MHD_CONNECTION_INFO_SOCKET_CONTEXT);

    if (info != NULL && info->socket_context != NULL) {
        conn->watch_slot = (uint32_t)((uintptr_t)info->socket_context - 1);
        conn->has_slot = true;
    }
}

typedef struct framing {
    uint32_t said; /* how often it is said where the body ends */
    bool odd;
} framing_t;

static enum MHD_Result look_at_header(void *cls, enum MHD_ValueKind kind, const char *name,
                                      const char *value)
{
    framing_t *framing = cls;
    const bool is_coding = strcasecmp(name, "Transfer-Encoding") == 0;
    (void)kind;

    framing->said += is_coding || strcasecmp(name, "Content-Length") == 0;
    framing->odd = framing->odd || strpbrk(name, " \t") != NULL ||
                   (is_coding && (value == NULL || strcasecmp(value, "chunked") != 0));
    return MHD_YES;
}

/* False: a proxy before us may see other requests in the same bytes than we do, and let one through
 * that it should not (RFC 9112, 5.1 and 6.3). MHD takes the first of two lengths, waits for the end
 * of a coding that it doesn't know, and keeps the blank of "Content-Length : 5" in the name. */
static bool is_framed_clearly(struct MHD_Connection *connection)
{
    framing_t framing = {0};

    (void)MHD_get_connection_values(connection, MHD_HEADER_KIND, look_at_header, &framing);
    return framing.said <= 1 && !framing.odd;
}

/* A zero byte would end the path before its end: /health for us, but not for a proxy. */
static size_t unescape(void *cls, struct MHD_Connection *connection, char *text)
{
    (void)cls;
    (void)connection;
    return strstr(text, "%00") == NULL ? MHD_http_unescape(text) : strlen(text);
}

/* When what a client has to send now must be there. idle_s: that it may say nothing before. */
static uint64_t until(const rtr_http_t *http, uint32_t idle_s)
{
    return td_now_ns() + idle_s * TD_NS_PER_S + http->config.receive_ms * TD_NS_PER_MS;
}

static enum MHD_Result handle(void *cls, struct MHD_Connection *connection, const char *url,
                              const char *method, const char *version, const char *upload,
                              size_t *upload_len, void **state)
{
    conn_t *conn = *state;
    rtr_error_t error;
    (void)version;

    if (conn == NULL) {
        conn = td_calloc(1, sizeof(*conn));
        if (conn == NULL) {
            return MHD_NO;
        }
        *conn = (conn_t){
            .http = cls, .mhd = connection, .url = url, .method = method, .begun_ns = td_now_ns()};
        *state = conn;
        find_slot(conn);
        if (conn->has_slot) {
            rtr_gone_expect(conn->http->config.gone, conn->watch_slot, until(conn->http, 0));
        }
        if (!is_framed_clearly(connection)) {
            rtr_error_set(&error, 400, "ambiguous_framing", NULL,
                          "Content-Length or Transfer-Encoding: chunked is expected, once, and no "
                          "blank in a header's name.");
            return answer_error(conn, &error, "");
        }
        return MHD_YES; /* an answer in the first call closes the connection */
    }
    if (*upload_len > 0) {
        size_t len = *upload_len;
        *upload_len = 0;
        return take_body(conn, upload, len);
    }
    if (conn->req != NULL) {
        return answer_or_suspend(conn);
    }
    if (conn->has_slot) {
        rtr_gone_has_asked(conn->http->config.gone, conn->watch_slot);
    }
    return dispatch(conn);
}

/* Of what was no request for the workers: those tell it themselves, when all is known. */
static void tell_access(const conn_t *conn)
{
    rtr_access_entry_t entry = {.http_status =
                                    conn->status == 0 ? RTR_STATUS_CLIENT_GONE : conn->status,
                                .took_us = (td_now_ns() - conn->begun_ns) / 1000};

    describe(conn, &entry);
    rtr_access_add(conn->http->config.access, &entry);
}

static void on_completed(void *cls, struct MHD_Connection *connection, void **state,
                         enum MHD_RequestTerminationCode code)
{
    conn_t *conn = *state;
    rtr_http_t *http = cls;
    (void)connection;
    (void)code;

    if (conn == NULL) {
        return;
    }
    *state = NULL;
    if (conn->watched) {
        rtr_gone_unwatch(http->config.gone, conn->watch_slot);
    }
    if (conn->req != NULL) {
        (void)pthread_mutex_lock(&conn->req->mu);
        conn->req->suspended = false; /* the connection must not be touched any more */
        (void)pthread_mutex_unlock(&conn->req->mu);
        if (!rtr_request_ended(conn->req)) {
            rtr_request_mark_gone(conn->req);
            rtr_loop_wake_gone(http->config.loop);
        }
        rtr_request_unref(conn->req);
    } else {
        tell_access(conn);
    }
    if (conn->has_slot) {
        rtr_gone_expect(http->config.gone, conn->watch_slot, until(http, IDLE_TIMEOUT_S));
    }
    td_str_fini(&conn->body);
    td_free(conn);
}

/* One that finds no room in the table is told when it brings a request. */
static void on_connection(void *cls, struct MHD_Connection *connection, void **context,
                          enum MHD_ConnectionNotificationCode code)
{
    const rtr_http_t *http = cls;
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD);
    uint32_t slot = 0;

    if (code == MHD_CONNECTION_NOTIFY_STARTED && info != NULL &&
        rtr_gone_open(http->config.gone, info->connect_fd, until(http, 0), &slot) == TD_OK) {
        *context = (void *)((uintptr_t)slot + 1);
    } else if (code == MHD_CONNECTION_NOTIFY_CLOSED && *context != NULL) {
        rtr_gone_close(http->config.gone, (uint32_t)((uintptr_t)*context - 1));
        *context = NULL;
    }
}

td_status_t rtr_http_create(const rtr_http_config_t *config, rtr_http_t **out)
{
    rtr_http_t *http = NULL;
    const union MHD_DaemonInfo *info = NULL;
    struct sockaddr_in addr;
    char host[INET_ADDRSTRLEN] = "";
    struct MHD_OptionItem tls[] = {
        {MHD_OPTION_HTTPS_CERT_CALLBACK, 0, rtr_tls_callback()},
        {MHD_OPTION_HTTPS_PRIORITIES, 0, RTR_TLS_PRIORITIES},
        {MHD_OPTION_END, 0, NULL},
    };

    if (td_listen_parse(config->listen, &addr) != TD_OK) {
        TD_LOG_ERROR("http address refused", "got=\"%s\" expected=\"IPv4 address:port\"",
                     config->listen);
        return TD_ERR_INVALID;
    }
    http = td_calloc(1, sizeof(*http));
    if (http == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    if (config->tls == NULL) {
        tls[0].option = MHD_OPTION_END;
    }
    http->config = *config;
    http->begun_ns = td_now_ns();
    atomic_init(&http->draining, false);
    atomic_init(&http->stopping, false);
    http->daemon = MHD_start_daemon(
        MHD_USE_EPOLL_INTERNAL_THREAD | MHD_ALLOW_SUSPEND_RESUME |
            (config->tls == NULL ? 0 : MHD_USE_TLS),
        0, NULL, NULL, handle, http, MHD_OPTION_SOCK_ADDR, &addr, MHD_OPTION_CONNECTION_LIMIT,
        config->connections_max, MHD_OPTION_CONNECTION_TIMEOUT, IDLE_TIMEOUT_S,
        MHD_OPTION_CONNECTION_MEMORY_LIMIT, (size_t)CONNECTION_BYTES, MHD_OPTION_NOTIFY_COMPLETED,
        on_completed, http, MHD_OPTION_NOTIFY_CONNECTION, on_connection, http,
        MHD_OPTION_UNESCAPE_CALLBACK, unescape, NULL, MHD_OPTION_LISTEN_BACKLOG_SIZE, 1024u,
        MHD_OPTION_PER_IP_CONNECTION_LIMIT, config->connections_per_ip, MHD_OPTION_ARRAY, tls,
        MHD_OPTION_END);
    if (http->daemon == NULL) {
        TD_LOG_ERROR("http port cannot be opened", "listen=%s err=\"%m\"", config->listen);
        td_free(http);
        return TD_ERR_IO;
    }
    info = MHD_get_daemon_info(http->daemon, MHD_DAEMON_INFO_BIND_PORT);
    (void)inet_ntop(AF_INET, &addr.sin_addr, host, sizeof(host));
    (void)snprintf(http->address, sizeof(http->address), "%s:%u", host,
                   info != NULL ? info->port : 0u);
    *out = http;
    return TD_OK;
}

void rtr_http_drain(rtr_http_t *http)
{
    atomic_store_explicit(&http->draining, true, memory_order_relaxed);
}

void rtr_http_close_door(rtr_http_t *http)
{
    const MHD_socket door = MHD_quiesce_daemon(http->daemon);

    if (door != MHD_INVALID_SOCKET) {
        (void)close(door);
    }
}

void rtr_http_stop(rtr_http_t *http)
{
    if (http == NULL || http->daemon == NULL) {
        return;
    }
    rtr_http_drain(http);
    atomic_store(&http->stopping, true);
    (void)rtr_gone_wake_all(http->config.gone);
    MHD_stop_daemon(http->daemon);
    http->daemon = NULL;
}

void rtr_http_destroy(rtr_http_t *http)
{
    if (http == NULL) {
        return;
    }
    rtr_http_stop(http);
    td_str_fini(&http->status_text);
    td_free(http);
}

const char *rtr_http_address(const rtr_http_t *http)
{
    return http->address;
}

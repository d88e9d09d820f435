#include "common/trace/td_tracer.h"

#include <curl/curl.h>
#include <errno.h>
#include <jansson.h>
#include <pthread.h>
#include <sodium.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/base/td_cond.h"
#include "common/base/td_log.h"

#define GATHER_MS 500u
#define BATCH_MAX 512u
#define TIMEOUT_MS 2000u
#define FAILURE_LOG_MS 30000u /* one line for so long an outage */
#define URL_CHARS_MAX 511u

struct td_tracer {
    char url[URL_CHARS_MAX + 1];
    char service[64];
    char instance[64];
    td_metric_t *sent;
    td_metric_t *dropped;
    pthread_t thread;
    pthread_mutex_t mu; /* a leaf; guards what follows */
    pthread_cond_t more;
    bool stopping;
    uint64_t stop_by_ns; /* while stopping */
    uint32_t count;
    uint64_t first;  /* place of the oldest in the ring */
    td_span_t *ring; /* owned [TD_TRACER_SPANS_MAX] */
    /* The thread's own. */
    td_span_t *batch; /* owned [BATCH_MAX] */
    CURL *curl;
    int64_t to_wall_ns; /* what turns td_now_ns() into the time of day */
    uint64_t logged_ns;
};

/* --- JSON ------------------------------------------------------------------------------------- */

static json_t *hex_json(const uint8_t *bytes, size_t len)
{
    char text[2 * TD_TRACE_ID_BYTES + 1];

    return json_string(sodium_bin2hex(text, sizeof(text), bytes, len));
}

/* OTLP's 64-bit numbers are strings in JSON. */
static json_t *number_json(int64_t value)
{
    char text[24];

    (void)snprintf(text, sizeof(text), "%lld", (long long)value);
    return json_string(text);
}

static json_t *attribute_json(const char *key, json_t *value, const char *type)
{
    return json_pack("{s:s, s:{s:o}}", "key", key, "value", type, value);
}

static json_t *attributes_json(const td_span_t *span)
{
    json_t *list = json_array();

    for (uint32_t i = 0; list != NULL && i < span->attribute_count; i++) {
        const td_span_attribute_t *a = &span->attributes[i];
        (void)json_array_append_new(
            list, a->is_text ? attribute_json(a->key, json_string(a->text), "stringValue")
                             : attribute_json(a->key, number_json(a->number), "intValue"));
    }
    return list;
}

static json_t *span_json(const td_tracer_t *t, const td_span_t *s)
{
    static const uint8_t none[TD_SPAN_ID_BYTES];
    json_t *object = json_pack("{s:o, s:o, s:s, s:i, s:o, s:o, s:o, s:{s:i}}", "traceId",
                               hex_json(s->context.trace_id, TD_TRACE_ID_BYTES), "spanId",
                               hex_json(s->context.span_id, TD_SPAN_ID_BYTES), "name", s->name,
                               "kind", (int)s->kind, "startTimeUnixNano",
                               number_json((int64_t)s->begin_ns + t->to_wall_ns), "endTimeUnixNano",
                               number_json((int64_t)s->end_ns + t->to_wall_ns), "attributes",
                               attributes_json(s), "status", "code", s->failed ? 2 : 0);

    if (object != NULL && memcmp(s->parent_id, none, sizeof(none)) != 0) {
        (void)json_object_set_new(object, "parentSpanId", hex_json(s->parent_id, sizeof(none)));
    }
    return object;
}

/* An ExportTraceServiceRequest; free() it. NULL: no memory. */
static char *batch_json(const td_tracer_t *t, uint32_t count)
{
    json_t *spans = json_array();
    json_t *root = NULL;
    char *text = NULL;

    for (uint32_t i = 0; spans != NULL && i < count; i++) {
        (void)json_array_append_new(spans, span_json(t, &t->batch[i]));
    }
    root = json_pack(
        "{s:[{s:{s:[o, o, o]}, s:[{s:{s:s, s:s}, s:o}]}]}", "resourceSpans", "resource",
        "attributes", attribute_json("service.name", json_string(t->service), "stringValue"),
        attribute_json("service.instance.id", json_string(t->instance), "stringValue"),
        attribute_json("service.version", json_string(TD_VERSION), "stringValue"), "scopeSpans",
        "scope", "name", "tandem", "version", TD_VERSION, "spans", spans);
    text = root == NULL ? NULL : json_dumps(root, JSON_COMPACT);
    json_decref(root);
    return text;
}

/* --- sending ---------------------------------------------------------------------------------- */

static size_t swallow(char *bytes, size_t size, size_t count, void *ctx)
{
    (void)bytes;
    (void)ctx;
    return size * count;
}

static void send_batch(td_tracer_t *t, uint32_t count, uint64_t timeout_ms)
{
    const uint64_t now = td_now_ns();
    char *text = batch_json(t, count);
    long status = 0;
    CURLcode code = CURLE_OUT_OF_MEMORY;

    if (text != NULL) {
        (void)curl_easy_setopt(t->curl, CURLOPT_TIMEOUT_MS, (long)timeout_ms);
        (void)curl_easy_setopt(t->curl, CURLOPT_POSTFIELDS, text);
        (void)curl_easy_setopt(t->curl, CURLOPT_POSTFIELDSIZE, (long)strlen(text));
        code = curl_easy_perform(t->curl);
        (void)curl_easy_getinfo(t->curl, CURLINFO_RESPONSE_CODE, &status);
        free(text);
    }
    if (code == CURLE_OK && status >= 200 && status < 300) {
        td_metric_add(t->sent, count);
        return;
    }
    td_metric_add(t->dropped, count);
    if (t->logged_ns == 0 || now - t->logged_ns > FAILURE_LOG_MS * TD_NS_PER_MS) {
        t->logged_ns = now;
        TD_LOG_WARN("spans not taken by the collector", "url=%s status=%ld err=\"%s\"", t->url,
                    status, curl_easy_strerror(code));
    }
}

static void wait_locked(td_tracer_t *t)
{
    uint64_t until_ns = 0;
    bool early = true;

    while (!t->stopping && t->count == 0) {
        (void)pthread_cond_wait(&t->more, &t->mu); /* an idle process wakes nobody */
    }
    until_ns = td_now_ns() + GATHER_MS * TD_NS_PER_MS;
    while (!t->stopping && early && t->count < BATCH_MAX) {
        early = td_cond_wait_until(&t->more, &t->mu, until_ns);
    }
}

static void *sender_main(void *ctx)
{
    td_tracer_t *t = ctx;

    for (;;) {
        struct timespec wall;
        uint64_t left_ms = TIMEOUT_MS;
        uint32_t count = 0;
        (void)pthread_mutex_lock(&t->mu);
        wait_locked(t);
        if (t->stopping) {
            left_ms = td_remaining_ns(t->stop_by_ns) / TD_NS_PER_MS;
        }
        count = TD_MIN(t->count, BATCH_MAX);
        for (uint32_t i = 0; i < count; i++) {
            t->batch[i] = t->ring[(t->first + i) % TD_TRACER_SPANS_MAX];
        }
        t->first += count;
        t->count -= count;
        (void)pthread_mutex_unlock(&t->mu);
        if (count == 0) {
            return NULL; /* it ends, and nothing is left */
        }
        if (left_ms == 0) { /* it ends, and has no more time */
            td_metric_add(t->dropped, count);
            continue;
        }
        (void)clock_gettime(CLOCK_REALTIME, &wall);
        t->to_wall_ns =
            (int64_t)wall.tv_sec * (int64_t)TD_NS_PER_S + wall.tv_nsec - (int64_t)td_now_ns();
        send_batch(t, count, left_ms);
    }
}

void td_tracer_end(td_tracer_t *t, td_span_t *span, uint64_t end_ns)
{
    bool full = false;

    if (t == NULL || !span->context.sampled) {
        return;
    }
    span->end_ns = TD_MAX(end_ns, span->begin_ns);
    (void)pthread_mutex_lock(&t->mu);
    full = t->count == TD_TRACER_SPANS_MAX;
    if (!full) {
        t->ring[(t->first + t->count++) % TD_TRACER_SPANS_MAX] = *span;
        if (t->count == 1 || t->count == BATCH_MAX) {
            (void)pthread_cond_signal(&t->more);
        }
    }
    (void)pthread_mutex_unlock(&t->mu);
    if (full) {
        td_metric_add(t->dropped, 1);
    }
}

/* --- life ------------------------------------------------------------------------------------- */

static td_status_t open_curl(td_tracer_t *t)
{
    static struct curl_slist type = {.data = (char *)(uintptr_t) "Content-Type: application/json"};

    (void)curl_global_init(CURL_GLOBAL_DEFAULT);
    t->curl = curl_easy_init();
    if (t->curl == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    (void)curl_easy_setopt(t->curl, CURLOPT_NOSIGNAL, 1L);
    (void)curl_easy_setopt(t->curl, CURLOPT_HTTPHEADER, &type);
    (void)curl_easy_setopt(t->curl, CURLOPT_WRITEFUNCTION, swallow);
    (void)curl_easy_setopt(t->curl, CURLOPT_PROTOCOLS_STR, "http,https");
    (void)curl_easy_setopt(t->curl, CURLOPT_USERAGENT, "tandem/" TD_VERSION);
    (void)curl_easy_setopt(t->curl, CURLOPT_POST, 1L);
    return curl_easy_setopt(t->curl, CURLOPT_URL, t->url) == CURLE_OK ? TD_OK : TD_ERR_NO_MEMORY;
}

static td_status_t make_url(td_tracer_t *t, const char *endpoint)
{
    const size_t len = strlen(endpoint);
    const int slash = len > 0 && endpoint[len - 1] == '/';
    const int n = snprintf(t->url, sizeof(t->url), "%s%sv1/traces", endpoint, slash ? "" : "/");

    if ((strncmp(endpoint, "http://", 7) != 0 && strncmp(endpoint, "https://", 8) != 0) || n < 0 ||
        (size_t)n >= sizeof(t->url)) {
        TD_LOG_ERROR("collector refused", "got=\"%s\" expected=\"http://HOST:PORT or https://...\"",
                     endpoint);
        return TD_ERR_INVALID;
    }
    return TD_OK;
}

static void tracer_free(td_tracer_t *t)
{
    if (t->curl != NULL) {
        curl_easy_cleanup(t->curl);
    }
    (void)pthread_cond_destroy(&t->more);
    (void)pthread_mutex_destroy(&t->mu);
    td_free(t->ring);
    td_free(t->batch);
    td_free(t);
}

td_status_t td_tracer_create(const td_tracer_config_t *config, td_tracer_t **out)
{
    td_tracer_t *t = td_calloc(1, sizeof(*t));
    td_status_t status = TD_OK;

    if (t == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    (void)pthread_mutex_init(&t->mu, NULL);
    td_cond_init(&t->more);
    (void)snprintf(t->service, sizeof(t->service), "%s", config->service);
    (void)snprintf(t->instance, sizeof(t->instance), "%s", config->instance);
    t->sent = config->sent;
    t->dropped = config->dropped;
    t->ring = td_calloc(TD_TRACER_SPANS_MAX, sizeof(*t->ring));
    t->batch = td_calloc(BATCH_MAX, sizeof(*t->batch));
    status = t->ring == NULL || t->batch == NULL ? TD_ERR_NO_MEMORY : make_url(t, config->endpoint);
    if (status == TD_OK) {
        status = open_curl(t);
    }
    if (status == TD_OK && pthread_create(&t->thread, NULL, sender_main, t) != 0) {
        status = TD_ERR_NO_MEMORY;
    }
    if (status != TD_OK) {
        tracer_free(t);
        return status;
    }
    TD_LOG_INFO("spans are sent", "url=%s", t->url);
    *out = t;
    return TD_OK;
}

void td_tracer_destroy(td_tracer_t *t)
{
    if (t == NULL) {
        return;
    }
    (void)pthread_mutex_lock(&t->mu);
    t->stopping = true;
    t->stop_by_ns = td_now_ns() + (uint64_t)TIMEOUT_MS * TD_NS_PER_MS;
    (void)pthread_cond_signal(&t->more);
    (void)pthread_mutex_unlock(&t->mu);
    (void)pthread_join(t->thread, NULL);
    tracer_free(t);
}

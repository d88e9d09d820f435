#include "router/sim_trace.h"

#include <jansson.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "router/sim_cache.h"
#include "router/sim_random.h"

typedef struct reader {
    sim_trace_t *trace;
    uint32_t line; /* from 1 */
    char *why;     /* borrowed [SIM_WHY_CHARS_MAX + 1] */
} reader_t;

__attribute__((format(printf, 2, 3))) static td_status_t refuse(const reader_t *r, const char *fmt,
                                                                ...)
{
    int used = snprintf(r->why, SIM_WHY_CHARS_MAX + 1, "line %u: ", r->line);
    va_list args;

    va_start(args, fmt);
    (void)vsnprintf(r->why + used, SIM_WHY_CHARS_MAX + 1 - (size_t)used, fmt, args);
    va_end(args);
    for (char *at = r->why; *at != '\0'; at++) { /* a parser's message may quote the line */
        *at = *at >= 0x20 && *at < 0x7f ? *at : '?';
    }
    return TD_ERR_INVALID;
}

/* A whole number of a field. */
static td_status_t read_whole(const reader_t *r, const json_t *object, const char *name,
                              uint64_t min, uint64_t max, uint64_t *out)
{
    const json_t *value = json_object_get(object, name);
    const json_int_t number = json_integer_value(value);

    if (value == NULL) {
        return refuse(r, "%s is missing", name);
    }
    if (!json_is_integer(value) || number < 0 || (uint64_t)number < min || (uint64_t)number > max) {
        return refuse(r, "%s must be a whole number of %llu to %llu", name, (unsigned long long)min,
                      (unsigned long long)max);
    }
    *out = (uint64_t)number;
    return TD_OK;
}

static td_status_t read_time(const reader_t *r, const json_t *object, uint64_t *ns_out)
{
    const json_t *value = json_object_get(object, "timestamp");
    const double ms = json_number_value(value);

    if (value == NULL) {
        return refuse(r, "timestamp is missing");
    }
    if (!json_is_number(value) || !(ms >= 0 && ms <= SIM_TIME_MS_MAX)) {
        return refuse(r, "timestamp must be a number of milliseconds, 0 to %.0f", SIM_TIME_MS_MAX);
    }
    *ns_out = (uint64_t)(ms * (double)TD_NS_PER_MS);
    if (r->trace->count > 0 && *ns_out < r->trace->requests[r->trace->count - 1].arrival_ns) {
        return refuse(r, "timestamp is before that of the request above");
    }
    return TD_OK;
}

/* Room for one more request with so many blocks. */
static td_status_t trace_reserve(sim_trace_t *t, uint64_t blocks)
{
    if (t->count == t->requests_cap) {
        const uint32_t cap = t->requests_cap * 2 + 1024;
        sim_request_t *grown = td_realloc(t->requests, cap * sizeof(*grown));
        if (grown == NULL) {
            return TD_ERR_NO_MEMORY;
        }
        t->requests = grown;
        t->requests_cap = cap;
    }
    if (t->block_count + blocks > t->blocks_cap) {
        const uint64_t cap = t->blocks_cap * 2 + blocks + 4096;
        uint64_t *grown = td_realloc(t->blocks, cap * sizeof(*grown));
        if (grown == NULL) {
            return TD_ERR_NO_MEMORY;
        }
        t->blocks = grown;
        t->blocks_cap = cap;
    }
    return TD_OK;
}

static td_status_t read_blocks(const reader_t *r, const json_t *object, sim_request_t *request)
{
    const json_t *list = json_object_get(object, "hash_ids");
    const size_t count = json_array_size(list);
    const uint64_t need =
        (request->input_tokens + (uint64_t)r->trace->block_tokens - 1) / r->trace->block_tokens;

    if (list == NULL) {
        return refuse(r, "hash_ids is missing");
    }
    if (!json_is_array(list)) {
        return refuse(r, "hash_ids must be an array");
    }
    if (count != need) {
        return refuse(r, "hash_ids has %zu blocks, %u tokens are %llu blocks of %u", count,
                      request->input_tokens, (unsigned long long)need, r->trace->block_tokens);
    }
    TD_TRY(trace_reserve(r->trace, count));
    for (size_t i = 0; i < count; i++) {
        const json_t *value = json_array_get(list, i);
        const json_int_t id = json_integer_value(value);
        if (!json_is_integer(value) || id < 0 || id >= (json_int_t)1 << SIM_BLOCK_ID_BITS) {
            return refuse(r, "hash_ids[%zu] must be a whole number of 0 to 2^%d - 1", i,
                          SIM_BLOCK_ID_BITS);
        }
        r->trace->blocks[r->trace->block_count + i] = (uint64_t)id;
    }
    request->first_block = r->trace->block_count;
    request->block_count = (uint32_t)count;
    return TD_OK;
}

static td_status_t read_object(const reader_t *r, const json_t *object)
{
    sim_request_t request = {0};
    uint64_t input = 0;
    uint64_t output = 0;

    if (!json_is_object(object)) {
        return refuse(r, "an object is expected");
    }
    if (r->trace->count >= SIM_REQUESTS_MAX) {
        return refuse(r, "more than %u requests", SIM_REQUESTS_MAX);
    }
    TD_TRY(read_time(r, object, &request.arrival_ns));
    TD_TRY(read_whole(r, object, "input_length", 1, SIM_INPUT_TOKENS_MAX, &input));
    TD_TRY(read_whole(r, object, "output_length", 1, SIM_OUTPUT_TOKENS_MAX, &output));
    request.input_tokens = (uint32_t)input;
    request.output_tokens = (uint32_t)output;
    TD_TRY(read_blocks(r, object, &request));
    r->trace->requests[r->trace->count++] = request;
    r->trace->block_count += request.block_count;
    return TD_OK;
}

static bool is_blank(const char *bytes, size_t len)
{
    for (size_t i = 0; i < len; i++) {
        if (bytes[i] != ' ' && bytes[i] != '\t' && bytes[i] != '\r') {
            return false;
        }
    }
    return true;
}

static td_status_t read_line(const reader_t *r, const char *bytes, size_t len)
{
    json_error_t error = {0};
    json_t *object = NULL;
    td_status_t status = TD_OK;

    if (is_blank(bytes, len)) {
        return TD_OK;
    }
    if (len > SIM_LINE_BYTES_MAX) {
        return refuse(r, "longer than %u bytes", SIM_LINE_BYTES_MAX);
    }
    object = json_loadb(bytes, len, JSON_REJECT_DUPLICATES, &error);
    if (object == NULL) {
        return refuse(r, "not JSON: %.90s", error.text);
    }
    status = read_object(r, object);
    json_decref(object);
    return status;
}

td_status_t sim_trace_parse(const char *bytes, size_t len, uint32_t block_tokens, sim_trace_t *out,
                            char why[SIM_WHY_CHARS_MAX + 1])
{
    sim_trace_t trace = {.block_tokens = block_tokens};
    reader_t reader = {.trace = &trace, .why = why};
    td_status_t status = TD_OK;
    size_t at = 0;

    TD_ASSERT(block_tokens > 0);
    while (at < len && status == TD_OK) {
        const char *end = memchr(bytes + at, '\n', len - at);
        const size_t line_len = end != NULL ? (size_t)(end - bytes) - at : len - at;
        reader.line++;
        status = read_line(&reader, bytes + at, line_len);
        at += line_len + 1;
    }
    if (status == TD_OK && trace.count == 0) {
        (void)snprintf(why, SIM_WHY_CHARS_MAX + 1, "no request in it");
        status = TD_ERR_INVALID;
    }
    if (status == TD_ERR_NO_MEMORY) {
        (void)snprintf(why, SIM_WHY_CHARS_MAX + 1, "out of memory");
    }
    if (status != TD_OK) {
        sim_trace_fini(&trace);
        return status;
    }
    *out = trace;
    return TD_OK;
}

static td_status_t read_file(const char *path, char **bytes_out, size_t *len_out, char *why)
{
    FILE *file = fopen(path, "rb");
    td_status_t status = TD_ERR_IO;
    char *bytes = NULL;
    size_t len = 0;
    size_t cap = 1u << 20;
    size_t got = 1;

    (void)snprintf(why, SIM_WHY_CHARS_MAX + 1, "cannot be read: %m");
    if (file == NULL) {
        return status;
    }
    while (got > 0 && !ferror(file)) {
        char *grown = len == cap || bytes == NULL ? td_realloc(bytes, cap * 2) : bytes;
        if (grown == NULL || len > SIM_FILE_BYTES_MAX) {
            (void)snprintf(why, SIM_WHY_CHARS_MAX + 1, "too large");
            bytes = grown != NULL ? grown : bytes;
            status = TD_ERR_INVALID;
            goto err;
        }
        cap = grown != bytes ? cap * 2 : cap;
        bytes = grown;
        got = fread(bytes + len, 1, cap - len, file);
        len += got;
    }
    if (ferror(file)) {
        (void)snprintf(why, SIM_WHY_CHARS_MAX + 1, "cannot be read: %m");
        goto err;
    }
    (void)fclose(file);
    *bytes_out = bytes;
    *len_out = len;
    return TD_OK;

err:
    td_free(bytes);
    (void)fclose(file);
    return status;
}

td_status_t sim_trace_load(const char *path, uint32_t block_tokens, sim_trace_t *out,
                           char why[SIM_WHY_CHARS_MAX + 1])
{
    char *bytes = NULL;
    size_t len = 0;
    td_status_t status = read_file(path, &bytes, &len, why);

    if (status == TD_OK) {
        status = sim_trace_parse(bytes, len, block_tokens, out, why);
        td_free(bytes);
    }
    return status;
}

void sim_trace_fini(sim_trace_t *t)
{
    td_free(t->requests);
    td_free(t->blocks);
    *t = (sim_trace_t){0};
}

/* From the first arrival to the last, and one mean gap more: a repeat begins there. */
static uint64_t span_ns(const sim_trace_t *t)
{
    const uint64_t span = t->requests[t->count - 1].arrival_ns - t->requests[0].arrival_ns;
    return span + span / t->count + 1;
}

/* When a request of one instant comes, if those of the instant are spread until the next one. */
static uint64_t spread_ns(const sim_trace_t *t, uint32_t at)
{
    const uint64_t now = t->requests[at].arrival_ns;
    uint32_t first = at;
    uint32_t end = at;
    uint64_t next = 0;

    while (first > 0 && t->requests[first - 1].arrival_ns == now) {
        first--;
    }
    while (end < t->count && t->requests[end].arrival_ns == now) {
        end++;
    }
    next = end < t->count ? t->requests[end].arrival_ns : t->requests[0].arrival_ns + span_ns(t);
    return now + (next - now) / (end - first) * (at - first);
}

td_status_t sim_trace_shape(const sim_trace_t *t, const sim_load_t *load, sim_trace_t *out)
{
    const uint32_t count = load->requests_max > 0 ? load->requests_max : t->count;
    const double gap = (double)span_ns(t) / t->count / load->rate_scale;
    sim_trace_t shaped = {.block_tokens = t->block_tokens};
    uint64_t random = load->seed;
    double poisson_ns = 0;

    for (uint32_t i = 0; i < count; i++) {
        const uint32_t at = i % t->count;
        const uint64_t round = i / t->count;
        sim_request_t r = t->requests[at];
        const uint64_t *blocks = &t->blocks[r.first_block];
        const uint64_t first = t->requests[0].arrival_ns;
        const uint64_t recorded =
            (load->arrivals == SIM_ARRIVALS_SPREAD ? spread_ns(t, at) : r.arrival_ns) - first;
        const double repeated = (double)recorded + (double)round * (double)span_ns(t);
        double ns = repeated / load->rate_scale;
        td_status_t status = trace_reserve(&shaped, r.block_count);

        poisson_ns += gap * sim_random_exponential(&random);
        ns = load->arrivals == SIM_ARRIVALS_POISSON ? poisson_ns : ns;
        if (status == TD_OK && ns > SIM_TIME_NS_MAX) {
            status = TD_ERR_TOO_LARGE;
        }
        if (status != TD_OK) {
            sim_trace_fini(&shaped);
            return status;
        }
        r.arrival_ns = (uint64_t)ns;
        r.first_block = shaped.block_count;
        for (uint32_t k = 0; k < r.block_count; k++) {
            shaped.blocks[shaped.block_count++] = blocks[k] | round << SIM_BLOCK_ID_BITS;
        }
        shaped.requests[shaped.count++] = r;
    }
    *out = shaped;
    return TD_OK;
}

td_status_t sim_trace_bound(const sim_trace_t *t, double *hit_rate_out)
{
    const uint32_t room = (uint32_t)TD_MIN(t->block_count + 1, UINT32_MAX);
    const sim_cache_config_t config = {.node_count = 1, .entries_max = room};
    sim_cache_t *cache = NULL;
    uint64_t hits = 0;

    TD_TRY(sim_cache_create(&config, &cache));
    sim_cache_set_capacity(cache, 0, room);
    for (uint32_t i = 0; i < t->count; i++) {
        const sim_request_t *r = &t->requests[i];
        const uint64_t *blocks = &t->blocks[r->first_block];
        hits += sim_cache_match(cache, 0, blocks, sim_request_reusable(r, t->block_tokens), false);
        sim_cache_use(cache, 0, blocks, r->input_tokens / t->block_tokens);
    }
    sim_cache_destroy(cache);
    *hit_rate_out = (double)hits / (double)t->block_count;
    return TD_OK;
}

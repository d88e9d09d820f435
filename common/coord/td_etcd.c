#include "common/coord/td_etcd.h"

#include <curl/curl.h>
#include <pthread.h>
#include <sodium.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/base/td_log.h"

#define ENDPOINT_CHARS_MAX 255u
#define PATH_CHARS_MAX 63u
#define EVENTS_MAX 8
#define FAILURE_LOG_MS 10000u /* one line for so long an outage */

struct td_etcd {
    char endpoints[TD_ETCD_ENDPOINTS_MAX][ENDPOINT_CHARS_MAX + 1];
    uint32_t endpoint_count;
    uint32_t at; /* the endpoint in use */
    uint32_t timeout_ms;
    char *ca_file; /* owned, or NULL; so are the next */
    char *cert_file;
    char *key_file;
    char *user;
    char *password;
    char token[TD_ETCD_TOKEN_CHARS_MAX + 1]; /* of the user, "" = not authenticated yet */

    CURLM *multi;
    CURL *easy;
    struct curl_slist *headers; /* of the request under way */
    int epoll_fd;               /* all of libcurl's descriptors */
    uint64_t timer_ns;          /* libcurl's; UINT64_MAX = none */

    bool busy;
    bool authenticating; /* before the request itself */
    char path[PATH_CHARS_MAX + 1];
    td_str_t body;
    td_str_t auth_body;
    td_str_t answer;
    td_status_t answer_status; /* of taking the answer's bytes */
    td_etcd_fn on_done;
    void *ctx;

    bool failing;
    uint64_t logged_ns;
};

/* --- libcurl's callbacks ---------------------------------------------------------------------- */

static int on_socket(CURL *easy, curl_socket_t fd, int what, void *ctx, void *socket_ctx)
{
    td_etcd_t *e = ctx;
    struct epoll_event event = {.data.fd = fd};

    (void)easy;
    (void)socket_ctx;
    if (what == CURL_POLL_REMOVE) {
        (void)epoll_ctl(e->epoll_fd, EPOLL_CTL_DEL, fd, &event);
        return 0;
    }
    event.events = ((what & CURL_POLL_IN) != 0 ? (uint32_t)EPOLLIN : 0u) |
                   ((what & CURL_POLL_OUT) != 0 ? (uint32_t)EPOLLOUT : 0u);
    if (epoll_ctl(e->epoll_fd, EPOLL_CTL_MOD, fd, &event) != 0) {
        (void)epoll_ctl(e->epoll_fd, EPOLL_CTL_ADD, fd, &event);
    }
    return 0;
}

static int on_timer(CURLM *multi, long timeout_ms, void *ctx)
{
    td_etcd_t *e = ctx;

    (void)multi;
    e->timer_ns = timeout_ms < 0 ? UINT64_MAX : td_now_ns() + (uint64_t)timeout_ms * TD_NS_PER_MS;
    return 0;
}

static size_t on_bytes(char *bytes, size_t size, size_t count, void *ctx)
{
    td_etcd_t *e = ctx;
    const size_t len = size * count;

    if (len > TD_ETCD_ANSWER_BYTES_MAX - e->answer.len) {
        e->answer_status = TD_ERR_TOO_LARGE;
        return 0; /* ends the request */
    }
    e->answer_status = td_str_append(&e->answer, bytes, len);
    return e->answer_status == TD_OK ? len : 0;
}

/* --- life ------------------------------------------------------------------------------------- */

static td_status_t parse_endpoints(td_etcd_t *e, const char *text)
{
    while (*text != '\0') {
        size_t len = strcspn(text, ",");
        const size_t next = len + (text[len] == ',');
        const char *host = NULL;

        while (len > 0 && text[len - 1] == '/') {
            len--;
        }
        if (e->endpoint_count == TD_ETCD_ENDPOINTS_MAX || len > ENDPOINT_CHARS_MAX) {
            TD_LOG_ERROR("etcd endpoints refused", "limit=%u characters_each=%u",
                         TD_ETCD_ENDPOINTS_MAX, ENDPOINT_CHARS_MAX);
            return TD_ERR_INVALID;
        }
        memcpy(e->endpoints[e->endpoint_count], text, len);
        host = strstr(e->endpoints[e->endpoint_count], "://");
        /* A user name in a URL would end up in the log: there are options for it. */
        if ((strncmp(text, "http://", 7) != 0 && strncmp(text, "https://", 8) != 0) ||
            host == NULL || host[3] == '\0' || strpbrk(host + 3, "@/?# \"") != NULL) {
            TD_LOG_ERROR("etcd endpoint refused",
                         "expected=\"http://HOST:PORT or https://HOST:PORT, "
                         "by comma\" number=%u",
                         e->endpoint_count + 1);
            return TD_ERR_INVALID;
        }
        e->endpoint_count++;
        text += next;
    }
    return e->endpoint_count > 0 ? TD_OK : TD_ERR_INVALID;
}

static td_status_t copy_text(const char *text, char **out)
{
    if (text != NULL && text[0] != '\0') {
        *out = td_strdup(text);
        return *out != NULL ? TD_OK : TD_ERR_NO_MEMORY;
    }
    return TD_OK;
}

static td_status_t copy_config(td_etcd_t *e, const td_etcd_config_t *config)
{
    TD_TRY(parse_endpoints(e, config->endpoints));
    TD_TRY(copy_text(config->ca_file, &e->ca_file));
    TD_TRY(copy_text(config->cert_file, &e->cert_file));
    TD_TRY(copy_text(config->key_file, &e->key_file));
    TD_TRY(copy_text(config->user, &e->user));
    TD_TRY(copy_text(config->password, &e->password));
    e->timeout_ms = config->timeout_ms;
    if (e->user != NULL) {
        TD_TRY(td_etcd_write_authenticate(&e->auth_body, e->user,
                                          e->password == NULL ? "" : e->password));
    }
    e->at = (uint32_t)(td_random_u64() % e->endpoint_count); /* candidates spread over them */
    return TD_OK;
}

static void curl_init_once(void)
{
    (void)curl_global_init(CURL_GLOBAL_DEFAULT);
}

static td_status_t open_curl(td_etcd_t *e)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;

    (void)pthread_once(&once, curl_init_once);
    e->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (e->epoll_fd < 0) {
        TD_LOG_ERROR("epoll not created", "err=\"%m\"");
        return TD_ERR_IO;
    }
    e->multi = curl_multi_init();
    e->easy = curl_easy_init();
    if (e->multi == NULL || e->easy == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    if (curl_multi_setopt(e->multi, CURLMOPT_SOCKETFUNCTION, on_socket) != CURLM_OK ||
        curl_multi_setopt(e->multi, CURLMOPT_SOCKETDATA, e) != CURLM_OK ||
        curl_multi_setopt(e->multi, CURLMOPT_TIMERFUNCTION, on_timer) != CURLM_OK ||
        curl_multi_setopt(e->multi, CURLMOPT_TIMERDATA, e) != CURLM_OK) {
        return TD_ERR_IO;
    }
    return TD_OK;
}

td_status_t td_etcd_create(const td_etcd_config_t *config, td_etcd_t **out)
{
    td_etcd_t *e = td_calloc(1, sizeof(*e));
    td_status_t status = TD_ERR_NO_MEMORY;

    if (e == NULL) {
        return status;
    }
    e->epoll_fd = -1;
    e->timer_ns = UINT64_MAX;
    status = copy_config(e, config);
    if (status == TD_OK) {
        status = open_curl(e);
    }
    if (status != TD_OK) {
        td_etcd_destroy(e);
        return status;
    }
    *out = e;
    return TD_OK;
}

static void wipe(char *text)
{
    if (text != NULL) {
        sodium_memzero(text, strlen(text));
    }
    td_free(text);
}

void td_etcd_destroy(td_etcd_t *e)
{
    if (e == NULL) {
        return;
    }
    td_etcd_cancel(e);
    if (e->multi != NULL) {
        (void)curl_multi_cleanup(e->multi); /* calls on_socket for kept connections */
    }
    curl_easy_cleanup(e->easy);
    curl_slist_free_all(e->headers);
    if (e->epoll_fd >= 0) {
        (void)close(e->epoll_fd);
    }
    td_free(e->ca_file);
    td_free(e->cert_file);
    td_free(e->key_file);
    td_free(e->user);
    wipe(e->password);
    if (e->auth_body.bytes != NULL) {
        sodium_memzero(e->auth_body.bytes, e->auth_body.len);
    }
    sodium_memzero(e->token, sizeof(e->token));
    td_str_fini(&e->auth_body);
    td_str_fini(&e->body);
    td_str_fini(&e->answer);
    td_free(e);
}

/* --- requests --------------------------------------------------------------------------------- */

static bool add_header(td_etcd_t *e, const char *line)
{
    struct curl_slist *list = curl_slist_append(e->headers, line);

    if (list != NULL) {
        e->headers = list;
    }
    return list != NULL;
}

static bool set_headers(td_etcd_t *e)
{
    char line[sizeof(e->token) + 32];
    bool ok = false;

    curl_slist_free_all(e->headers);
    e->headers = NULL;
    ok = add_header(e, "Content-Type: application/json") && add_header(e, "Expect:");
    if (ok && e->token[0] != '\0' && !e->authenticating) {
        (void)snprintf(line, sizeof(line), "Authorization: %s", e->token);
        ok = add_header(e, line);
        sodium_memzero(line, sizeof(line));
    }
    return ok;
}

static bool set_text(CURL *easy, CURLoption option, const char *text)
{
    return text == NULL || curl_easy_setopt(easy, option, text) == CURLE_OK;
}

/* Hands what is to be sent (the authentication, or the request) to libcurl. */
static td_status_t transmit(td_etcd_t *e)
{
    const td_str_t *body = e->authenticating ? &e->auth_body : &e->body;
    char url[ENDPOINT_CHARS_MAX + PATH_CHARS_MAX + 1];

    (void)snprintf(url, sizeof(url), "%s%s", e->endpoints[e->at],
                   e->authenticating ? "/v3/auth/authenticate" : e->path);
    td_str_clear(&e->answer);
    e->answer_status = TD_OK;
    curl_easy_reset(e->easy); /* connections stay: they are the multi handle's */
    if (!set_headers(e) || curl_easy_setopt(e->easy, CURLOPT_URL, url) != CURLE_OK ||
        curl_easy_setopt(e->easy, CURLOPT_HTTPHEADER, e->headers) != CURLE_OK ||
        curl_easy_setopt(e->easy, CURLOPT_POST, 1L) != CURLE_OK ||
        curl_easy_setopt(e->easy, CURLOPT_POSTFIELDS, body->bytes) != CURLE_OK ||
        curl_easy_setopt(e->easy, CURLOPT_POSTFIELDSIZE, (long)body->len) != CURLE_OK ||
        curl_easy_setopt(e->easy, CURLOPT_WRITEFUNCTION, on_bytes) != CURLE_OK ||
        curl_easy_setopt(e->easy, CURLOPT_WRITEDATA, e) != CURLE_OK ||
        curl_easy_setopt(e->easy, CURLOPT_TIMEOUT_MS, (long)e->timeout_ms) != CURLE_OK ||
        curl_easy_setopt(e->easy, CURLOPT_NOSIGNAL, 1L) != CURLE_OK ||
        curl_easy_setopt(e->easy, CURLOPT_PROTOCOLS_STR, "http,https") != CURLE_OK ||
        curl_easy_setopt(e->easy, CURLOPT_HTTP_VERSION, (long)CURL_HTTP_VERSION_1_1) != CURLE_OK ||
        /* What the environment says of proxies is meant for the world outside. */
        curl_easy_setopt(e->easy, CURLOPT_NOPROXY, "*") != CURLE_OK ||
        !set_text(e->easy, CURLOPT_CAINFO, e->ca_file) ||
        !set_text(e->easy, CURLOPT_SSLCERT, e->cert_file) ||
        !set_text(e->easy, CURLOPT_SSLKEY, e->key_file) ||
        curl_multi_add_handle(e->multi, e->easy) != CURLM_OK) {
        return TD_ERR_NO_MEMORY;
    }
    return TD_OK;
}

td_status_t td_etcd_post(td_etcd_t *e, const char *path, const td_str_t *body, td_etcd_fn on_done,
                         void *ctx)
{
    TD_ASSERT(!e->busy);
    td_str_clear(&e->body);
    TD_TRY(td_str_append(&e->body, body->bytes, body->len));
    (void)snprintf(e->path, sizeof(e->path), "%s", path);
    e->authenticating = e->user != NULL && e->token[0] == '\0';
    TD_TRY(transmit(e));
    e->on_done = on_done;
    e->ctx = ctx;
    e->busy = true;
    return TD_OK;
}

void td_etcd_cancel(td_etcd_t *e)
{
    if (e->busy) {
        (void)curl_multi_remove_handle(e->multi, e->easy);
        e->busy = false;
    }
}

bool td_etcd_is_busy(const td_etcd_t *e)
{
    return e->busy;
}

/* --- answers ---------------------------------------------------------------------------------- */

/* Only etcd's own "not found" says that a lease is over; any web server has a 404. */
static td_status_t status_of_404(const td_etcd_t *e)
{
    char why[16] = "";

    if (e->answer.len > 0) {
        td_etcd_error_text(e->answer.bytes, e->answer.len, why, sizeof(why));
    }
    return why[0] != '\0' ? TD_ERR_NOT_FOUND : TD_ERR_PEER_DEAD;
}

static td_status_t status_of(const td_etcd_t *e, CURLcode code, long http)
{
    if (e->answer_status != TD_OK) {
        return e->answer_status;
    }
    if (code == CURLE_OPERATION_TIMEDOUT) {
        return TD_ERR_TIMEOUT;
    }
    if (code == CURLE_OUT_OF_MEMORY) {
        return TD_ERR_NO_MEMORY;
    }
    if (code != CURLE_OK) {
        return TD_ERR_PEER_DEAD;
    }
    switch (http) {
    case 200:
        return TD_OK;
    case 401:
    case 403:
        return TD_ERR_INVALID;
    case 404:
        return status_of_404(e);
    default:
        return TD_ERR_PEER_DEAD;
    }
}

/* One line when it begins, then one now and then, and one when it is over. */
static void log_outcome(td_etcd_t *e, td_status_t status, CURLcode code, long http)
{
    const uint64_t now = td_now_ns();
    char why[160] = "";

    if (status == TD_OK || status == TD_ERR_NOT_FOUND) {
        if (e->failing) {
            TD_LOG_INFO("etcd answers again", "endpoint=%s", e->endpoints[e->at]);
        }
        e->failing = false;
        return;
    }
    if (e->failing && now - e->logged_ns < FAILURE_LOG_MS * TD_NS_PER_MS) {
        return;
    }
    e->failing = true;
    e->logged_ns = now;
    if (e->answer.len > 0) {
        td_etcd_error_text(e->answer.bytes, e->answer.len, why, sizeof(why));
    }
    TD_LOG_WARN("etcd request failed",
                "endpoint=%s path=%s status=%s http=%ld curl=\"%s\" why=\"%s\"",
                e->endpoints[e->at], e->authenticating ? "/v3/auth/authenticate" : e->path,
                td_status_name(status), http, curl_easy_strerror(code), why);
}

static void complete(td_etcd_t *e, td_status_t status, const td_etcd_answer_t *answer)
{
    e->busy = false;
    e->on_done(e->ctx, status, status == TD_OK ? answer : NULL); /* which may post again */
}

static void finish(td_etcd_t *e, CURLcode code)
{
    td_etcd_answer_t answer = {0};
    td_status_t status = TD_OK;
    long http = 0;

    (void)curl_easy_getinfo(e->easy, CURLINFO_RESPONSE_CODE, &http);
    (void)curl_multi_remove_handle(e->multi, e->easy);
    status = status_of(e, code, http);
    if (status == TD_OK) {
        status =
            td_etcd_answer_decode(e->answer.len > 0 ? e->answer.bytes : "", e->answer.len, &answer);
    }
    if (status == TD_OK && e->authenticating && answer.token[0] == '\0') {
        status = TD_ERR_PROTOCOL;
    }
    log_outcome(e, status, code, http);
    if (status == TD_ERR_INVALID) {
        e->token[0] = '\0'; /* it may have run out: the next request begins with a new one */
    }
    if (status != TD_OK) {
        if (status != TD_ERR_NOT_FOUND) {
            e->at = (e->at + 1) % e->endpoint_count;
        }
        complete(e, status, NULL);
        return;
    }
    if (e->authenticating) {
        memcpy(e->token, answer.token, sizeof(e->token));
        sodium_memzero(e->answer.bytes, e->answer.len);
        e->authenticating = false;
        status = transmit(e);
        if (status != TD_OK) {
            complete(e, status, NULL);
        }
        return;
    }
    complete(e, TD_OK, &answer);
}

int td_etcd_fd(const td_etcd_t *e)
{
    return e->epoll_fd;
}

uint64_t td_etcd_due_ns(const td_etcd_t *e)
{
    return e->timer_ns;
}

void td_etcd_step(td_etcd_t *e)
{
    struct epoll_event events[EVENTS_MAX];
    const int count = epoll_wait(e->epoll_fd, events, EVENTS_MAX, 0);
    CURLMsg *msg = NULL;
    int running = 0;
    int left = 0;

    for (int i = 0; i < count; i++) {
        const int what = ((events[i].events & EPOLLIN) != 0 ? CURL_CSELECT_IN : 0) |
                         ((events[i].events & EPOLLOUT) != 0 ? CURL_CSELECT_OUT : 0) |
                         ((events[i].events & (EPOLLERR | EPOLLHUP)) != 0 ? CURL_CSELECT_ERR : 0);
        (void)curl_multi_socket_action(e->multi, events[i].data.fd, what, &running);
    }
    if (td_now_ns() >= e->timer_ns) {
        e->timer_ns = UINT64_MAX;
        (void)curl_multi_socket_action(e->multi, CURL_SOCKET_TIMEOUT, 0, &running);
    }
    while (e->busy && (msg = curl_multi_info_read(e->multi, &left)) != NULL) {
        if (msg->msg == CURLMSG_DONE) {
            finish(e, msg->data.result);
        }
    }
}

#include "common/wire/td_statusd.h"

#include <arpa/inet.h>
#include <microhttpd.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_log.h"

#define CONNECTIONS_MAX 64u

struct td_statusd {
    struct MHD_Daemon *daemon; /* owned */
    const td_metrics_t *metrics;
    char address[64];
};

static enum MHD_Result answer_text(struct MHD_Connection *connection, unsigned status,
                                   const char *type, const char *text, size_t len)
{
    struct MHD_Response *response =
        MHD_create_response_from_buffer(len, (void *)(uintptr_t)text, MHD_RESPMEM_MUST_COPY);
    enum MHD_Result result = MHD_NO;
    if (response != NULL) {
        (void)MHD_add_response_header(response, "Content-Type", type);
        result = MHD_queue_response(connection, status, response);
        MHD_destroy_response(response);
    }
    return result;
}

static enum MHD_Result answer_metrics(const td_statusd_t *statusd, struct MHD_Connection *conn)
{
    td_str_t text = {0};
    enum MHD_Result result = MHD_NO;
    if (td_metrics_render(statusd->metrics, &text) == TD_OK) {
        result = answer_text(conn, 200, "text/plain; version=0.0.4", text.bytes, text.len);
    }
    td_str_fini(&text);
    return result;
}

static enum MHD_Result handle(void *cls, struct MHD_Connection *connection, const char *url,
                              const char *method, const char *version, const char *upload,
                              size_t *upload_len, void **state)
{
    static int seen;
    (void)version;
    (void)upload;
    if (*state == NULL) {
        *state = &seen; /* a response in the first call would close the connection */
        return MHD_YES;
    }
    if (*upload_len > 0) {
        *upload_len = 0;
        return MHD_YES;
    }
    if (strcmp(method, "GET") == 0 && strcmp(url, "/metrics") == 0) {
        return answer_metrics(cls, connection);
    }
    if (strcmp(method, "GET") == 0 && strcmp(url, "/health") == 0) {
        return answer_text(connection, 200, "application/json", "{\"status\":\"ok\"}\n", 16);
    }
    return answer_text(connection, 404, "application/json", "{\"error\":\"not found\"}\n", 22);
}

td_status_t td_listen_parse(const char *listen, struct sockaddr_in *addr)
{
    char host[64];
    const char *colon = strrchr(listen, ':');
    unsigned long port = 0;

    if (colon == NULL || (size_t)(colon - listen) >= sizeof(host)) {
        return TD_ERR_INVALID;
    }
    memcpy(host, listen, (size_t)(colon - listen));
    host[colon - listen] = '\0';
    port = strtoul(colon + 1, NULL, 10);
    memset(addr, 0, sizeof(*addr));
    addr->sin_family = AF_INET;
    addr->sin_port = htons((uint16_t)port);
    return port <= 65535 && inet_pton(AF_INET, host, &addr->sin_addr) == 1 ? TD_OK : TD_ERR_INVALID;
}

td_status_t td_statusd_create(const char *listen, const td_metrics_t *metrics, td_statusd_t **out)
{
    td_statusd_t *statusd = NULL;
    const union MHD_DaemonInfo *info = NULL;
    struct sockaddr_in addr;
    char host[INET_ADDRSTRLEN] = "";

    if (td_listen_parse(listen, &addr) != TD_OK) {
        TD_LOG_ERROR("status address refused", "got=\"%s\" expected=\"IPv4 address:port\"", listen);
        return TD_ERR_INVALID;
    }
    statusd = td_calloc(1, sizeof(*statusd));
    if (statusd == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    statusd->metrics = metrics;
    statusd->daemon = MHD_start_daemon(
        MHD_USE_EPOLL_INTERNAL_THREAD, 0, NULL, NULL, handle, statusd, MHD_OPTION_SOCK_ADDR, &addr,
        MHD_OPTION_CONNECTION_LIMIT, CONNECTIONS_MAX, MHD_OPTION_CONNECTION_TIMEOUT, 30u,
        MHD_OPTION_CONNECTION_MEMORY_LIMIT, (size_t)32768, MHD_OPTION_END);
    if (statusd->daemon == NULL) {
        TD_LOG_ERROR("status port cannot be opened", "listen=%s err=\"%m\"", listen);
        td_free(statusd);
        return TD_ERR_IO;
    }
    info = MHD_get_daemon_info(statusd->daemon, MHD_DAEMON_INFO_BIND_PORT);
    (void)inet_ntop(AF_INET, &addr.sin_addr, host, sizeof(host));
    (void)snprintf(statusd->address, sizeof(statusd->address), "%s:%u", host,
                   info != NULL ? info->port : 0u);
    *out = statusd;
    return TD_OK;
}

void td_statusd_destroy(td_statusd_t *statusd)
{
    if (statusd == NULL) {
        return;
    }
    MHD_stop_daemon(statusd->daemon);
    td_free(statusd);
}

const char *td_statusd_address(const td_statusd_t *statusd)
{
    return statusd->address;
}

#include "router/rtr_admin_socket.h"

#include <errno.h>
#include <fcntl.h>
#include <sodium.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zmq.h>

#include "common/base/td_base.h"
#include "common/base/td_log.h"
#include "common/wire/td_zap.h"

#define Z85_CHARS 40u
#define KEY_BYTES 32u
#define HWM 256
#define HANDSHAKE_MS 2000
#define PATH_MAX_CHARS 1024u
#define DOMAIN "tandem-admin"

struct rtr_admin_socket {
    void *context; /* owned */
    td_zap_t *zap; /* owned */
    void *router;  /* owned */
    char endpoint[256];
    uint8_t allowed[RTR_ADMIN_CLIENTS_MAX][KEY_BYTES];
    uint32_t allowed_count;
};

/* --- keys ------------------------------------------------------------------------------------- */

static bool path_of(char *out, const char *folder, const char *name)
{
    const int len = snprintf(out, PATH_MAX_CHARS, "%s/%s", folder, name);
    return len > 0 && (uint32_t)len < PATH_MAX_CHARS;
}

static td_status_t write_file(const char *folder, const char *name, const char *text)
{
    char path[PATH_MAX_CHARS];
    FILE *file = NULL;
    bool bad = false;
    int fd = -1;

    if (!path_of(path, folder, name)) {
        return TD_ERR_INVALID;
    }
    fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0) {
        TD_LOG_ERROR("admin key not written", "file=%s err=\"%m\"", path);
        return TD_ERR_IO;
    }
    file = fdopen(fd, "w");
    bad = file == NULL || fprintf(file, "%s\n", text) < 0;
    bad = (file != NULL ? fclose(file) : close(fd)) != 0 || bad;
    if (bad) {
        TD_LOG_ERROR("admin key not written", "file=%s err=\"%m\"", path);
        (void)unlink(path);
        return TD_ERR_IO;
    }
    return TD_OK;
}

static void remove_file(const char *folder, const char *name)
{
    char path[PATH_MAX_CHARS];

    if (path_of(path, folder, name)) {
        (void)unlink(path);
    }
}

/* Keys of a new folder: the router's, and one client's who is on the list. All of them or none: of
 * some, the next start could not make the others. */
static td_status_t make_keys(const char *folder)
{
    char router_public[Z85_CHARS + 1];
    char router_secret[Z85_CHARS + 1];
    char client_public[Z85_CHARS + 1];
    char client_secret[Z85_CHARS + 1];
    const char *const files[][2] = {
        {"admin.key", client_secret},
        {"allow", client_public},
        {"router.pub", router_public},
        {"router.key", router_secret}, /* last: then all are there */
    };
    td_status_t status = TD_OK;
    uint32_t written = 0;

    if (zmq_curve_keypair(router_public, router_secret) != 0 ||
        zmq_curve_keypair(client_public, client_secret) != 0) {
        return TD_ERR_IO;
    }
    while (status == TD_OK && written < TD_ARRAY_LEN(files)) {
        status = write_file(folder, files[written][0], files[written][1]);
        written += status == TD_OK;
    }
    while (status != TD_OK && written > 0) {
        remove_file(folder, files[--written][0]);
    }
    sodium_memzero(router_secret, sizeof(router_secret));
    sodium_memzero(client_secret, sizeof(client_secret));
    return status;
}

/* Reads keys, one a line. Empty lines and comments are passed over. */
static td_status_t read_keys(const char *folder, const char *name, uint32_t most,
                             uint8_t keys[][KEY_BYTES], uint32_t *count_out)
{
    char path[PATH_MAX_CHARS];
    char line[256];
    struct stat info;
    FILE *file = NULL;
    td_status_t status = TD_OK;

    *count_out = 0;
    if (!path_of(path, folder, name)) {
        return TD_ERR_INVALID;
    }
    file = fopen(path, "re");
    if (file == NULL) {
        TD_LOG_ERROR("admin keys not opened", "file=%s err=\"%m\"", path);
        return TD_ERR_IO;
    }
    if (fstat(fileno(file), &info) != 0 || (info.st_mode & 077) != 0) {
        TD_LOG_ERROR("admin keys refused", "file=%s expected=\"mode 0600\"", path);
        status = TD_ERR_INVALID;
    }
    while (status == TD_OK && fgets(line, sizeof(line), file) != NULL) {
        line[strcspn(line, " \t\r\n")] = '\0';
        if (line[0] == '\0' || line[0] == '#') {
            continue;
        }
        if (strlen(line) != Z85_CHARS || *count_out == most ||
            zmq_z85_decode(keys[*count_out], line) == NULL) {
            TD_LOG_ERROR("admin keys refused", "file=%s expected=\"Z85 keys, %u at most\"", path,
                         most);
            status = TD_ERR_INVALID;
        } else {
            ++*count_out;
        }
    }
    sodium_memzero(line, sizeof(line));
    (void)fclose(file);
    return status;
}

static td_status_t open_keys(rtr_admin_socket_t *s, const char *folder,
                             uint8_t secret[1][KEY_BYTES])
{
    char path[PATH_MAX_CHARS];
    uint32_t count = 0;

    if (!path_of(path, folder, "router.key")) {
        TD_LOG_ERROR("admin keys refused", "folder=%s expected=\"a shorter path\"", folder);
        return TD_ERR_INVALID;
    }
    if (mkdir(folder, 0700) != 0 && errno != EEXIST) {
        TD_LOG_ERROR("admin keys not made", "folder=%s err=\"%m\"", folder);
        return TD_ERR_IO;
    }
    if (access(path, F_OK) != 0) {
        TD_TRY(make_keys(folder));
        TD_LOG_INFO("admin keys made", "folder=%s", folder);
    }
    TD_TRY(read_keys(folder, "allow", RTR_ADMIN_CLIENTS_MAX, s->allowed, &s->allowed_count));
    TD_TRY(read_keys(folder, "router.key", 1, secret, &count));
    if (count != 1) {
        TD_LOG_ERROR("admin keys refused", "file=%s expected=\"a Z85 key\"", path);
        return TD_ERR_INVALID;
    }
    return TD_OK;
}

/* --- sockets ---------------------------------------------------------------------------------- */

static int set_int(void *socket, int option, int value)
{
    return zmq_setsockopt(socket, option, &value, sizeof(value));
}

static int set_options(void *router, const uint8_t *secret)
{
    const int64_t size_max = RTR_ADMIN_REQUEST_BYTES_MAX;
    int bad = set_int(router, ZMQ_LINGER, 0);

    bad |= set_int(router, ZMQ_ROUTER_MANDATORY, 1);
    bad |= set_int(router, ZMQ_SNDHWM, HWM);
    bad |= set_int(router, ZMQ_RCVHWM, HWM);
    bad |= set_int(router, ZMQ_HANDSHAKE_IVL, HANDSHAKE_MS);
    bad |= set_int(router, ZMQ_HEARTBEAT_IVL, 1000);
    bad |= set_int(router, ZMQ_HEARTBEAT_TIMEOUT, 5000);
    bad |= zmq_setsockopt(router, ZMQ_MAXMSGSIZE, &size_max, sizeof(size_max));
    bad |= zmq_setsockopt(router, ZMQ_ZAP_DOMAIN, DOMAIN, sizeof(DOMAIN) - 1);
    bad |= set_int(router, ZMQ_CURVE_SERVER, 1);
    return bad | zmq_setsockopt(router, ZMQ_CURVE_SECRETKEY, secret, KEY_BYTES);
}

static td_status_t open_sockets(rtr_admin_socket_t *s, const char *endpoint, const uint8_t *secret)
{
    size_t len = sizeof(s->endpoint);

    s->context = zmq_ctx_new();
    s->router = s->context == NULL ? NULL : zmq_socket(s->context, ZMQ_ROUTER);
    if (s->router == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    /* Whom to let in is asked from the first handshake on. */
    TD_TRY(td_zap_create(s->context, DOMAIN, &s->zap));
    for (uint32_t i = 0; i < s->allowed_count; i++) {
        TD_TRY(td_zap_allow(s->zap, s->allowed[i]));
    }
    if (set_options(s->router, secret) != 0) {
        TD_LOG_ERROR("admin socket not set up", "err=\"%s\"", zmq_strerror(zmq_errno()));
        return TD_ERR_IO;
    }
    if (zmq_bind(s->router, endpoint) != 0 ||
        zmq_getsockopt(s->router, ZMQ_LAST_ENDPOINT, s->endpoint, &len) != 0) {
        TD_LOG_ERROR("admin socket not bound", "endpoint=%s err=\"%s\"", endpoint,
                     zmq_strerror(zmq_errno()));
        return TD_ERR_INVALID;
    }
    return TD_OK;
}

/* For clients on this machine: where it is. A file of an earlier life is replaced. */
static void tell_endpoint(const rtr_admin_socket_t *s, const char *folder)
{
    char path[PATH_MAX_CHARS];
    char temporary[PATH_MAX_CHARS];
    FILE *file = NULL;

    if (!path_of(path, folder, "endpoint") || !path_of(temporary, folder, "endpoint.new")) {
        return;
    }
    file = fopen(temporary, "we");
    if (file == NULL || fprintf(file, "%s\n", s->endpoint) < 0 || fclose(file) != 0 ||
        rename(temporary, path) != 0) {
        TD_LOG_WARN("admin endpoint not told", "file=%s err=\"%m\"", path);
    }
}

td_status_t rtr_admin_socket_open(const char *endpoint, const char *folder,
                                  rtr_admin_socket_t **out)
{
    rtr_admin_socket_t *s = td_calloc(1, sizeof(*s));
    uint8_t secret[1][KEY_BYTES] = {{0}};
    td_status_t status = TD_ERR_NO_MEMORY;

    if (s == NULL) {
        return status;
    }
    status = open_keys(s, folder, secret);
    if (status == TD_OK) {
        status = open_sockets(s, endpoint, secret[0]);
    }
    sodium_memzero(secret, sizeof(secret));
    if (status != TD_OK) {
        rtr_admin_socket_close(s);
        return status;
    }
    tell_endpoint(s, folder);
    *out = s;
    return TD_OK;
}

void rtr_admin_socket_close(rtr_admin_socket_t *s)
{
    if (s == NULL) {
        return;
    }
    if (s->router != NULL) {
        (void)zmq_close(s->router);
    }
    td_zap_destroy(s->zap);
    if (s->context != NULL) {
        (void)zmq_ctx_term(s->context);
    }
    td_free(s);
}

const char *rtr_admin_socket_endpoint(const rtr_admin_socket_t *s)
{
    return s->endpoint;
}

int rtr_admin_socket_fd(const rtr_admin_socket_t *s)
{
    int fd = -1;
    size_t len = sizeof(fd);

    (void)zmq_getsockopt(s->router, ZMQ_FD, &fd, &len);
    return fd;
}

/* --- requests and replies --------------------------------------------------------------------- */

static bool has_more(void *socket)
{
    int more = 0;
    size_t len = sizeof(more);
    return zmq_getsockopt(socket, ZMQ_RCVMORE, &more, &len) == 0 && more != 0;
}

/* From a DEALER: one part behind its name. */
td_status_t rtr_admin_socket_recv(rtr_admin_socket_t *s, rtr_admin_name_t *from, td_str_t *body)
{
    const int named = zmq_recv(s->router, from->bytes, sizeof(from->bytes), ZMQ_DONTWAIT);
    td_status_t status = TD_ERR_PROTOCOL;
    bool first = true;

    if (named < 0) {
        return TD_ERR_NOT_FOUND;
    }
    from->len = TD_MIN((size_t)named, sizeof(from->bytes));
    td_str_clear(body);
    while (has_more(s->router)) {
        zmq_msg_t part;
        if (zmq_msg_init(&part) != 0 || zmq_msg_recv(&part, s->router, ZMQ_DONTWAIT) < 0) {
            return TD_ERR_PROTOCOL;
        }
        if (first && zmq_msg_size(&part) > 0 && !zmq_msg_more(&part)) {
            status = td_str_append(body, zmq_msg_data(&part), zmq_msg_size(&part));
        }
        first = false;
        (void)zmq_msg_close(&part);
    }
    return status;
}

td_status_t rtr_admin_socket_send(rtr_admin_socket_t *s, const rtr_admin_name_t *to,
                                  const void *bytes, size_t len)
{
    if (zmq_send(s->router, to->bytes, to->len, ZMQ_SNDMORE | ZMQ_DONTWAIT) < 0 ||
        zmq_send(s->router, bytes, len, ZMQ_DONTWAIT) < 0) {
        return errno == EAGAIN ? TD_ERR_BUSY : errno == EHOSTUNREACH ? TD_ERR_NOT_FOUND : TD_ERR_IO;
    }
    return TD_OK;
}

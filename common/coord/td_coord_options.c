#include "common/coord/td_coord_options.h"

#include <sodium.h>
#include <string.h>
#include <unistd.h>

#include "common/base/td_base.h"
#include "common/base/td_file.h"
#include "common/base/td_log.h"
#include "common/coord/td_etcd.h"

#define PASSWORD_CHARS_MAX 1023u

/* The first line. */
static td_status_t read_password(const char *path, char out[PASSWORD_CHARS_MAX + 1])
{
    struct stat st;
    int fd = -1;
    ssize_t got = 0;

    TD_TRY(td_file_open("etcd password", path, true, &fd, &st));
    got = read(fd, out, PASSWORD_CHARS_MAX);
    (void)close(fd);
    if (got <= 0) {
        TD_LOG_ERROR("file refused", "what=\"etcd password\" file=%s expected=\"a line\"", path);
        return TD_ERR_INVALID;
    }
    out[got] = '\0';
    out[strcspn(out, "\r\n")] = '\0';
    return TD_OK;
}

/* password: lives as long as what is read. */
static td_status_t read_options(const td_config_t *config, char password[PASSWORD_CHARS_MAX + 1],
                                td_etcd_config_t *out)
{
    const char *file = td_config_text(config, "etcd-password-file");

    password[0] = '\0';
    *out = (td_etcd_config_t){.endpoints = td_config_text(config, "etcd"),
                              .ca_file = td_config_text(config, "etcd-ca"),
                              .cert_file = td_config_text(config, "etcd-cert"),
                              .key_file = td_config_text(config, "etcd-key"),
                              .user = td_config_text(config, "etcd-user"),
                              .password = password};
    return file == NULL ? TD_OK : read_password(file, password);
}

static td_status_t open_coord(const td_config_t *config, td_coord_config_t *coord, td_coord_t **out)
{
    char password[PASSWORD_CHARS_MAX + 1];
    td_etcd_config_t etcd;
    td_status_t status = TD_OK;

    TD_TRY(read_options(config, password, &etcd));
    coord->etcd = etcd.endpoints;
    coord->cluster = td_config_text(config, "cluster");
    coord->ca_file = etcd.ca_file;
    coord->cert_file = etcd.cert_file;
    coord->key_file = etcd.key_file;
    coord->user = etcd.user;
    coord->password = etcd.password;
    status = td_coord_create(coord, out);
    sodium_memzero(password, sizeof(password));
    return status;
}

td_status_t td_coord_open(const td_config_t *config, const char *election, const char *id,
                          td_metrics_t *metrics, const char *name_prefix, td_coord_t **out)
{
    td_coord_config_t coord = {.election = election,
                               .id = id,
                               .lease_ms = (uint32_t)td_config_u64(config, "leader-lease-ms"),
                               .metrics = metrics,
                               .name_prefix = name_prefix};

    return open_coord(config, &coord, out);
}

td_status_t td_coord_open_entry(const td_config_t *config, const char *folder, const char *name,
                                const char *value, td_coord_t **out)
{
    td_coord_config_t coord = {.election = name,
                               .id = name,
                               .folder = folder,
                               .value = value,
                               .lease_ms = TD_COORD_LEASE_MS_DEFAULT};

    return open_coord(config, &coord, out);
}

td_status_t td_coord_list_open(const td_config_t *config, const char *folder, td_coord_list_t **out)
{
    char password[PASSWORD_CHARS_MAX + 1];
    td_etcd_config_t etcd;
    td_status_t status = TD_OK;

    TD_TRY(read_options(config, password, &etcd));
    status = td_coord_list_create(&etcd, td_config_text(config, "cluster"), folder, out);
    sodium_memzero(password, sizeof(password));
    return status;
}

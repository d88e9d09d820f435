#include "common/coord/td_coord_options.h"

#include <sodium.h>
#include <stdio.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_log.h"

#define PASSWORD_CHARS_MAX 1023u

/* The first line. */
static td_status_t read_password(const char *path, char out[PASSWORD_CHARS_MAX + 1])
{
    FILE *file = fopen(path, "re");
    bool ok = false;

    if (file != NULL) {
        ok = fgets(out, PASSWORD_CHARS_MAX + 1, file) != NULL;
        (void)fclose(file);
    }
    if (!ok) {
        TD_LOG_ERROR("etcd password not read", "file=%s", path);
        return TD_ERR_INVALID;
    }
    out[strcspn(out, "\r\n")] = '\0';
    return TD_OK;
}

td_status_t td_coord_open(const td_config_t *config, const char *election, const char *id,
                          td_metrics_t *metrics, const char *name_prefix, td_coord_t **out)
{
    const char *password_file = td_config_text(config, "etcd-password-file");
    char password[PASSWORD_CHARS_MAX + 1] = "";
    const td_coord_config_t coord = {.etcd = td_config_text(config, "etcd"),
                                     .cluster = td_config_text(config, "cluster"),
                                     .election = election,
                                     .id = id,
                                     .lease_ms = (uint32_t)td_config_u64(config, "leader-lease-ms"),
                                     .ca_file = td_config_text(config, "etcd-ca"),
                                     .cert_file = td_config_text(config, "etcd-cert"),
                                     .key_file = td_config_text(config, "etcd-key"),
                                     .user = td_config_text(config, "etcd-user"),
                                     .password = password,
                                     .metrics = metrics,
                                     .name_prefix = name_prefix};
    td_status_t status = TD_OK;

    if (password_file != NULL) {
        TD_TRY(read_password(password_file, password));
    }
    status = td_coord_create(&coord, out);
    sodium_memzero(password, sizeof(password));
    return status;
}

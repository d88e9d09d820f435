#include "router/rtr_auth.h"

#include <sodium.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>

#include "common/base/td_base.h"
#include "common/base/td_log.h"

#define HASH_BYTES 32u
#define LINE_BYTES_MAX 1024

struct rtr_auth {
    uint32_t count;
    uint8_t hashes[RTR_KEYS_MAX][HASH_BYTES];
};

static void hash_key(const char *key, size_t len, uint8_t out[HASH_BYTES])
{
    (void)crypto_generichash(out, HASH_BYTES, (const uint8_t *)key, len, NULL, 0);
}

static td_status_t read_keys(FILE *file, const char *path, rtr_auth_t *auth)
{
    char line[LINE_BYTES_MAX];
    struct stat info;

    if (fstat(fileno(file), &info) != 0 || (info.st_mode & 077) != 0) {
        TD_LOG_ERROR("api key file refused", "file=%s expected=\"mode 0600\"", path);
        return TD_ERR_INVALID;
    }
    while (fgets(line, sizeof(line), file) != NULL) {
        size_t len = strcspn(line, "\r\n");
        if (len == 0 || line[0] == '#') {
            continue;
        }
        if (auth->count == RTR_KEYS_MAX || len == sizeof(line) - 1) {
            TD_LOG_ERROR("api key file refused", "file=%s expected=\"at most %u keys\"", path,
                         RTR_KEYS_MAX);
            return TD_ERR_INVALID;
        }
        hash_key(line, len, auth->hashes[auth->count++]);
    }
    sodium_memzero(line, sizeof(line));
    if (auth->count == 0) {
        TD_LOG_ERROR("api key file refused", "file=%s expected=\"one key a line\"", path);
        return TD_ERR_INVALID;
    }
    return TD_OK;
}

td_status_t rtr_auth_load(const char *path, rtr_auth_t **out)
{
    rtr_auth_t *auth = NULL;
    FILE *file = fopen(path, "re");
    td_status_t status = TD_ERR_NO_MEMORY;

    if (file == NULL) {
        TD_LOG_ERROR("api key file not opened", "file=%s err=\"%m\"", path);
        return TD_ERR_IO;
    }
    auth = td_calloc(1, sizeof(*auth));
    if (auth != NULL) {
        status = read_keys(file, path, auth);
    }
    (void)fclose(file);
    if (status != TD_OK) {
        td_free(auth);
        return status;
    }
    *out = auth;
    return TD_OK;
}

void rtr_auth_destroy(rtr_auth_t *auth)
{
    td_free(auth);
}

bool rtr_auth_check(const rtr_auth_t *auth, const char *header)
{
    static const char scheme[] = "Bearer ";
    uint8_t hash[HASH_BYTES];
    bool found = false;

    if (header == NULL || strncasecmp(header, scheme, sizeof(scheme) - 1) != 0) {
        return false;
    }
    hash_key(header + sizeof(scheme) - 1, strlen(header + sizeof(scheme) - 1), hash);
    for (uint32_t i = 0; i < auth->count; i++) {
        found |= sodium_memcmp(hash, auth->hashes[i], HASH_BYTES) == 0;
    }
    return found;
}

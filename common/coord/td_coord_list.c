#include "common/coord/td_coord_list.h"

#include <stdio.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/base/td_log.h"
#include "common/base/td_names.h"

#define TIMEOUT_MS 1500u

struct td_coord_list {
    td_etcd_t *etcd; /* owned */
    char prefix[TD_ETCD_KEY_CHARS_MAX + 1];
    td_coord_entry_t entries[TD_COORD_LIST_MAX];
    uint32_t count;
    bool changed; /* since the last tick said so */
    uint64_t next_ns;
    td_str_t body;
};

td_status_t td_coord_list_create(const td_etcd_config_t *config, const char *cluster,
                                 const char *folder, td_coord_list_t **out)
{
    td_etcd_config_t etcd = *config;
    td_coord_list_t *list = td_calloc(1, sizeof(*list));
    td_status_t status = TD_ERR_NO_MEMORY;

    if (list == NULL) {
        return status;
    }
    etcd.timeout_ms = TIMEOUT_MS;
    (void)snprintf(list->prefix, sizeof(list->prefix), "/tandem/%s/%s/", cluster, folder);
    status = td_etcd_create(&etcd, &list->etcd);
    if (status != TD_OK) {
        td_free(list);
        return status;
    }
    *out = list;
    return TD_OK;
}

void td_coord_list_destroy(td_coord_list_t *list)
{
    if (list == NULL) {
        return;
    }
    td_etcd_destroy(list->etcd);
    td_str_fini(&list->body);
    td_free(list);
}

/* What follows the folder's name; false: that is no name. */
static bool read_entry(const td_coord_list_t *list, const td_etcd_entry_t *from,
                       td_coord_entry_t *out)
{
    const size_t prefix = strlen(list->prefix);
    const char *name = from->key + prefix;

    if (strncmp(from->key, list->prefix, prefix) != 0 ||
        !td_name_is_valid(name, TD_COORD_NAME_CHARS_MAX)) {
        return false;
    }
    (void)snprintf(out->name, sizeof(out->name), "%s", name);
    (void)snprintf(out->value, sizeof(out->value), "%s", from->value);
    return true;
}

static void on_answer(void *ctx, td_status_t status, const td_etcd_answer_t *answer)
{
    td_coord_list_t *list = ctx;
    td_coord_entry_t entries[TD_COORD_LIST_MAX];
    uint32_t count = 0;

    if (status != TD_OK) {
        return; /* logged there; what was known stays */
    }
    memset(entries, 0, sizeof(entries));
    for (uint32_t i = 0; i < answer->entry_count; i++) {
        count += read_entry(list, &answer->entries[i], &entries[count]);
    }
    if (count != list->count || memcmp(entries, list->entries, sizeof(entries)) != 0) {
        memcpy(list->entries, entries, sizeof(entries));
        list->count = count;
        list->changed = true;
    }
}

bool td_coord_list_tick(td_coord_list_t *list)
{
    const uint64_t now = td_now_ns();
    bool changed = false;

    td_etcd_step(list->etcd);
    if (!td_etcd_is_busy(list->etcd) && now >= list->next_ns) {
        list->next_ns = now + TD_COORD_LIST_EVERY_MS * TD_NS_PER_MS;
        td_str_clear(&list->body);
        if (td_etcd_write_list(&list->body, list->prefix) != TD_OK ||
            td_etcd_post(list->etcd, "/v3/kv/range", &list->body, on_answer, list) != TD_OK) {
            TD_LOG_WARN("etcd not asked", "folder=%s", list->prefix);
        }
    }
    changed = list->changed;
    list->changed = false;
    return changed;
}

const td_coord_entry_t *td_coord_list_entries(const td_coord_list_t *list, uint32_t *count_out)
{
    *count_out = list->count;
    return list->entries;
}

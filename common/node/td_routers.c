#include "common/node/td_routers.h"

#include <stdio.h>

#include "common/base/td_base.h"
#include "common/base/td_log.h"
#include "common/coord/td_coord_options.h"

struct td_routers {
    td_coord_list_t *list; /* owned */
};

static td_status_t open_list(const td_config_t *config, td_routers_t **out)
{
    td_routers_t *r = td_calloc(1, sizeof(*r));
    td_status_t status = TD_ERR_NO_MEMORY;

    if (r == NULL) {
        return status;
    }
    status = td_coord_list_open(config, TD_ROUTERS_FOLDER, &r->list);
    if (status != TD_OK) {
        td_free(r);
        return status;
    }
    *out = r;
    return TD_OK;
}

td_status_t td_routers_open(const td_config_t *config, td_bus_t *bus, const td_msg_register_t *self,
                            const td_member_events_t *events, td_member_t **member_out,
                            td_routers_t **out)
{
    const char *named = td_config_text(config, "router");

    *out = NULL;
    if (named == NULL && td_config_text(config, "etcd") == NULL) {
        TD_LOG_ERROR("no router",
                     "expected=\"--router tcp://HOST:PORT, or --etcd http://HOST:PORT\"");
        return TD_ERR_INVALID;
    }
    TD_TRY(td_member_create(bus, named, self, events, member_out));
    return named != NULL ? TD_OK : open_list(config, out);
}

void td_routers_tick(td_routers_t *r, td_member_t *member)
{
    td_member_router_t routers[TD_ROUTERS_MAX];
    const td_coord_entry_t *entries = NULL;
    uint32_t count = 0;

    if (r == NULL || !td_coord_list_tick(r->list)) {
        return;
    }
    entries = td_coord_list_entries(r->list, &count);
    if (count > TD_ROUTERS_MAX) {
        TD_LOG_WARN("more routers in etcd than a node can join", "routers=%u limit=%u", count,
                    TD_ROUTERS_MAX);
        count = TD_ROUTERS_MAX;
    }
    for (uint32_t i = 0; i < count; i++) {
        (void)snprintf(routers[i].id, sizeof(routers[i].id), "%.63s", entries[i].name);
        (void)snprintf(routers[i].endpoint, sizeof(routers[i].endpoint), "%s", entries[i].value);
    }
    td_member_set_routers(member, routers, count);
}

void td_routers_destroy(td_routers_t *r)
{
    if (r == NULL) {
        return;
    }
    td_coord_list_destroy(r->list);
    td_free(r);
}

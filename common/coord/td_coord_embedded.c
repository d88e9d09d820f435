/* One machine, one candidate: it leads as soon as it wants to. A later process of this machine has
 * a higher term, by the clock. */
#include <stdio.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/coord/td_coord_internal.h"

typedef struct embedded {
    td_coord_t base; /* first */
    char id[TD_COORD_NAME_CHARS_MAX + 1];
} embedded_t;

static void destroy(td_coord_t *c)
{
    td_free((embedded_t *)c);
}

static void campaign(td_coord_t *c)
{
    if (c->term == 0) {
        c->term = td_wall_s();
        c->valid_until_ns = UINT64_MAX;
        (void)snprintf(c->leader, sizeof(c->leader), "%s", ((embedded_t *)c)->id);
    }
}

static void resign(td_coord_t *c)
{
    (void)c;
}

static bool is_resigned(const td_coord_t *c)
{
    (void)c;
    return true;
}

static int fd(const td_coord_t *c)
{
    (void)c;
    return -1;
}

static uint64_t due_ns(const td_coord_t *c)
{
    (void)c;
    return UINT64_MAX;
}

static void tick(td_coord_t *c)
{
    (void)c;
}

td_status_t td_coord_embedded_create(const td_coord_config_t *config, td_coord_t **out)
{
    static const td_coord_ops_t ops = {destroy, campaign, resign, is_resigned, fd, due_ns, tick};
    embedded_t *e = td_calloc(1, sizeof(*e));

    if (e == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    e->base.ops = &ops;
    (void)snprintf(e->id, sizeof(e->id), "%s", config->id);
    td_coord_declare(&e->base, config);
    *out = &e->base;
    return TD_OK;
}

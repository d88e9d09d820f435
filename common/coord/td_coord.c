#include "common/coord/td_coord.h"

#include <poll.h>
#include <stdio.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/base/td_log.h"
#include "common/base/td_names.h"
#include "common/coord/td_coord_internal.h"

static td_status_t check_name(const char *what, const char *name)
{
    if (name == NULL || !td_name_is_valid(name, TD_COORD_NAME_CHARS_MAX)) {
        TD_LOG_ERROR("bad name", "what=%s expected=\"1 to %u letters, digits, '-', '_' or '.'\"",
                     what, TD_COORD_NAME_CHARS_MAX);
        return TD_ERR_INVALID;
    }
    return TD_OK;
}

td_metric_t *td_coord_counter(const td_coord_config_t *config, const char *name, const char *labels,
                              const char *help)
{
    char full[128];

    if (config->metrics == NULL) {
        return NULL;
    }
    (void)snprintf(full, sizeof(full), "%s_%s", config->name_prefix, name);
    return td_metrics_counter(config->metrics, full, labels, help);
}

void td_coord_declare(td_coord_t *c, const td_coord_config_t *config)
{
    char full[128];

    if (config->metrics == NULL) {
        return;
    }
    (void)snprintf(full, sizeof(full), "%s_is_leader", config->name_prefix);
    c->is_leader =
        td_metrics_gauge(config->metrics, full, NULL, "1 while this process is the leader");
    (void)snprintf(full, sizeof(full), "%s_leader_term", config->name_prefix);
    c->term_shown = td_metrics_gauge(config->metrics, full, NULL, "term it leads with, 0 = none");
}

td_status_t td_coord_create(const td_coord_config_t *config, td_coord_t **out)
{
    TD_TRY(check_name("cluster", config->cluster));
    TD_TRY(check_name("election", config->election));
    TD_TRY(check_name("id", config->id));
    if (config->value != NULL && strlen(config->value) > TD_COORD_VALUE_CHARS_MAX) {
        TD_LOG_ERROR("value too long for etcd", "value=\"%s\" limit=%u", config->value,
                     TD_COORD_VALUE_CHARS_MAX);
        return TD_ERR_INVALID;
    }
    if (config->etcd == NULL || config->etcd[0] == '\0') {
        return td_coord_embedded_create(config, out);
    }
    if (config->lease_ms < TD_COORD_LEASE_MS_MIN || config->lease_ms > TD_COORD_LEASE_MS_MAX) {
        TD_LOG_ERROR("leader's lease out of range", "lease_ms=%u expected=%u..%u", config->lease_ms,
                     TD_COORD_LEASE_MS_MIN, TD_COORD_LEASE_MS_MAX);
        return TD_ERR_INVALID;
    }
    return td_coord_etcd_create(config, out);
}

void td_coord_destroy(td_coord_t *c)
{
    if (c != NULL) {
        c->ops->destroy(c);
    }
}

void td_coord_campaign(td_coord_t *c)
{
    c->ops->campaign(c);
}

void td_coord_resign(td_coord_t *c)
{
    c->ops->resign(c);
}

void td_coord_resign_wait(td_coord_t *c, uint32_t limit_ms)
{
    const uint64_t until_ns = td_now_ns() + limit_ms * TD_NS_PER_MS;

    td_coord_resign(c);
    while (!c->ops->is_resigned(c) && td_now_ns() < until_ns) {
        struct pollfd fd = {.fd = td_coord_fd(c), .events = POLLIN};
        const uint64_t left_ms = td_remaining_ns(until_ns) / TD_NS_PER_MS;
        (void)poll(&fd, 1, (int)td_coord_wait_ms(c, (uint32_t)left_ms));
        td_coord_tick(c);
    }
}

uint64_t td_coord_term(const td_coord_t *c)
{
    return c->term;
}

bool td_coord_leads(const td_coord_t *c, uint64_t term)
{
    return term != 0 && c->term == term && td_now_ns() < c->valid_until_ns;
}

const char *td_coord_leader(const td_coord_t *c)
{
    return c->leader;
}

int td_coord_fd(const td_coord_t *c)
{
    return c->ops->fd(c);
}

uint32_t td_coord_wait_ms(const td_coord_t *c, uint32_t most_ms)
{
    const uint64_t due_ns = c->ops->due_ns(c);
    const uint64_t left_ns = due_ns == UINT64_MAX ? UINT64_MAX : td_remaining_ns(due_ns);

    return (uint32_t)TD_MIN((uint64_t)most_ms,
                            left_ns / TD_NS_PER_MS + (left_ns % TD_NS_PER_MS != 0));
}

void td_coord_tick(td_coord_t *c)
{
    c->ops->tick(c);
    if (c->is_leader != NULL) {
        td_metric_set(c->is_leader, td_coord_leads(c, c->term));
        td_metric_set(c->term_shown, c->term);
    }
}

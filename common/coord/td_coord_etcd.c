/* One leader in the cluster: whoever's lease holds the key. DESIGN.md has the states. */
#include <stdio.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/base/td_clock.h"
#include "common/base/td_log.h"
#include "common/coord/td_coord_internal.h"
#include "common/coord/td_etcd.h"

#define RENEW_PART 3u   /* of the lease: a renewal, and the time-out of a request */
#define MARGIN_PART 10u /* of the lease: off its end, for clocks that run at other speeds */
#define LOOK_PART 20u   /* of the lease: between two looks at another's leadership */
#define BACKOFF_MS 50u  /* after the first failure, doubled by each further one */
#define BACKOFF_DOUBLINGS_MAX 4u
#define RESIGN_TRIES 3u /* then the lease ends by itself */

/* What is asked next, or is being asked. */
typedef enum step {
    STEP_IDLE = 0,
    STEP_LOOK,
    STEP_GRANT,
    STEP_CAMPAIGN,
    STEP_KEEPALIVE,
    STEP_CONFIRM,
    STEP_RESIGN,
    STEP_REVOKE
} step_t;

typedef struct coord_etcd {
    td_coord_t base; /* first */
    td_etcd_t *etcd; /* owned */
    char id[TD_COORD_NAME_CHARS_MAX + 1];
    char value[TD_ETCD_VALUE_CHARS_MAX + 1];
    char key[TD_ETCD_KEY_CHARS_MAX + 1];
    uint32_t ask_ms; /* the lease that is asked for */
    bool wanted;
    step_t step;
    uint64_t next_ns;  /* not before */
    uint32_t failures; /* in a row */
    uint64_t lease;    /* ours, 0 = none */
    uint64_t lease_ms; /* granted */
    uint64_t claim;    /* create_revision of the key under our lease, 0 = not ours */
    uint64_t sent_ns;  /* the grant or keepalive that the lease counts from */
    td_str_t body;
    td_metric_t *renewed; /* NULL: not declared; so are the next */
    td_metric_t *renew_failed;
    td_metric_t *elections;
    td_metric_t *lost;
} coord_etcd_t;

/* Between three quarters and all of it, so that candidates do not move in step. */
static uint64_t jitter_ns(uint64_t ms)
{
    const uint64_t ns = ms * TD_NS_PER_MS;
    return ns - (td_random_u64() % (ns / 4 + 1));
}

static void go(coord_etcd_t *c, step_t step, uint64_t next_ns)
{
    c->step = step;
    c->next_ns = next_ns;
}

static void name_leader(coord_etcd_t *c, const char *name)
{
    if (strcmp(c->base.leader, name) != 0) {
        TD_LOG_INFO("leader seen", "leader=\"%.64s\"", name);
    }
    (void)snprintf(c->base.leader, sizeof(c->base.leader), "%.64s", name);
}

/* --- leadership ------------------------------------------------------------------------------- */

static void extend(coord_etcd_t *c)
{
    const uint64_t margin_ms = c->lease_ms / MARGIN_PART;

    /* From when it was sent: etcd may have begun the lease's time no earlier than that. */
    c->base.valid_until_ns = c->sent_ns + (c->lease_ms - margin_ms) * TD_NS_PER_MS;
    if (c->base.term != c->claim) {
        c->base.term = c->claim;
        td_metric_add(c->elections, 1);
        TD_LOG_INFO("leader", "term=%llu lease_ms=%llu", (unsigned long long)c->claim,
                    (unsigned long long)c->lease_ms);
        name_leader(c, c->id);
    }
    go(c, STEP_KEEPALIVE, c->sent_ns + c->lease_ms * TD_NS_PER_MS / RENEW_PART);
}

/* It is over for certain: another may lead by now. */
static void lose(coord_etcd_t *c, const char *why)
{
    if (c->base.term != 0) {
        td_metric_add(c->lost, 1);
        TD_LOG_WARN("leadership lost", "term=%llu why=\"%s\"", (unsigned long long)c->base.term,
                    why);
        name_leader(c, "");
    }
    c->base.term = 0;
    c->base.valid_until_ns = 0;
    c->claim = 0;
    c->lease = 0;
    go(c, c->wanted ? STEP_LOOK : STEP_IDLE, 0);
}

/* --- answers ---------------------------------------------------------------------------------- */

static void on_look(coord_etcd_t *c, const td_etcd_answer_t *a)
{
    if (!a->has_key) {
        name_leader(c, "");
        go(c, STEP_GRANT, 0);
        return;
    }
    if (c->lease != 0 && a->key_lease == c->lease) {
        c->claim = a->create_revision; /* the campaign whose answer did not come was won */
        go(c, STEP_KEEPALIVE, 0);
        return;
    }
    name_leader(c, a->value);
    go(c, STEP_LOOK, td_now_ns() + jitter_ns(c->ask_ms / LOOK_PART));
}

static td_status_t on_grant(coord_etcd_t *c, const td_etcd_answer_t *a)
{
    if (a->lease == 0 || a->ttl_s == 0 || a->ttl_s > TD_COORD_LEASE_MS_MAX / 1000) {
        return TD_ERR_PROTOCOL;
    }
    c->lease = a->lease;
    c->lease_ms = a->ttl_s * 1000;
    go(c, STEP_CAMPAIGN, 0);
    return TD_OK;
}

static td_status_t on_campaign(coord_etcd_t *c, const td_etcd_answer_t *a)
{
    if (!a->has_key) {
        return TD_ERR_PROTOCOL;
    }
    if (a->succeeded && a->key_lease == c->lease) {
        c->claim = a->create_revision;
        extend(c);
        return TD_OK;
    }
    name_leader(c, a->value);
    go(c, STEP_REVOKE, 0);
    return TD_OK;
}

static td_status_t on_keepalive(coord_etcd_t *c, const td_etcd_answer_t *a)
{
    if (a->lease != c->lease) {
        return TD_ERR_PROTOCOL;
    }
    if (a->ttl_s == 0) {
        lose(c, "the lease is over");
        return TD_OK;
    }
    c->lease_ms = TD_MIN(c->lease_ms, a->ttl_s * 1000);
    go(c, STEP_CONFIRM, 0);
    return TD_OK;
}

static void on_confirm(coord_etcd_t *c, const td_etcd_answer_t *a)
{
    if (a->succeeded && a->has_key && a->create_revision == c->claim) {
        td_metric_add(c->renewed, 1);
        extend(c);
        return;
    }
    lose(c, "the key is not ours any more");
    if (a->has_key) {
        name_leader(c, a->value);
    }
}

static td_status_t on_ok(coord_etcd_t *c, const td_etcd_answer_t *a)
{
    switch (c->step) {
    case STEP_LOOK:
        on_look(c, a);
        return TD_OK;
    case STEP_GRANT:
        return on_grant(c, a);
    case STEP_CAMPAIGN:
        return on_campaign(c, a);
    case STEP_KEEPALIVE:
        return on_keepalive(c, a);
    case STEP_CONFIRM:
        on_confirm(c, a);
        return TD_OK;
    case STEP_RESIGN:
        c->claim = 0;
        go(c, STEP_REVOKE, 0);
        return TD_OK;
    case STEP_REVOKE:
        c->lease = 0;
        go(c, c->wanted ? STEP_LOOK : STEP_IDLE, td_now_ns() + jitter_ns(c->ask_ms / LOOK_PART));
        return TD_OK;
    default:
        return TD_ERR_PROTOCOL;
    }
}

static void on_failed(coord_etcd_t *c, td_status_t status)
{
    const uint32_t doublings = TD_MIN(c->failures, BACKOFF_DOUBLINGS_MAX);
    const uint64_t again_ns = td_now_ns() + jitter_ns((uint64_t)BACKOFF_MS << doublings);

    c->failures++;
    switch (c->step) {
    case STEP_KEEPALIVE:
    case STEP_CONFIRM:
        td_metric_add(c->renew_failed, 1);
        if (status == TD_ERR_NOT_FOUND) {
            lose(c, "etcd does not know the lease");
            return;
        }
        go(c, STEP_KEEPALIVE, again_ns); /* the whole renewal again */
        return;
    case STEP_RESIGN:
    case STEP_REVOKE:
        if (status == TD_ERR_NOT_FOUND || c->failures >= RESIGN_TRIES) {
            c->claim = 0; /* the lease ends by itself */
            c->lease = 0;
            go(c, c->wanted ? STEP_LOOK : STEP_IDLE, again_ns);
        } else {
            go(c, c->step, again_ns);
        }
        return;
    default:
        if (status == TD_ERR_NOT_FOUND) {
            c->lease = 0;
        }
        /* A campaign may have been won without our hearing of it: look. */
        go(c, c->wanted ? STEP_LOOK : STEP_IDLE, again_ns);
        return;
    }
}

static void on_answer(void *ctx, td_status_t status, const td_etcd_answer_t *answer)
{
    coord_etcd_t *c = ctx;
    const step_t asked = c->step;

    if (status == TD_OK) {
        status = on_ok(c, answer);
        if (status != TD_OK) {
            TD_LOG_WARN("etcd answered what it was not asked", "step=%d", (int)asked);
        }
    }
    if (status == TD_OK) {
        c->failures = 0;
    } else {
        on_failed(c, status);
    }
}

/* --- questions -------------------------------------------------------------------------------- */

static td_status_t write_body(coord_etcd_t *c, const char **path_out)
{
    td_str_clear(&c->body);
    switch (c->step) {
    case STEP_LOOK:
        *path_out = "/v3/kv/range";
        return td_etcd_write_range(&c->body, c->key);
    case STEP_GRANT:
        *path_out = "/v3/lease/grant";
        return td_etcd_write_grant(&c->body, (c->ask_ms + 999) / 1000);
    case STEP_CAMPAIGN:
        *path_out = "/v3/kv/txn";
        return td_etcd_write_campaign(&c->body, c->key, c->value, c->lease);
    case STEP_KEEPALIVE:
        *path_out = "/v3/lease/keepalive";
        return td_etcd_write_lease(&c->body, c->lease);
    case STEP_CONFIRM:
        *path_out = "/v3/kv/txn";
        return td_etcd_write_confirm(&c->body, c->key, c->claim);
    case STEP_RESIGN:
        *path_out = "/v3/kv/txn";
        return td_etcd_write_resign(&c->body, c->key, c->claim);
    case STEP_REVOKE:
        *path_out = "/v3/lease/revoke";
        return td_etcd_write_lease(&c->body, c->lease);
    default:
        return TD_ERR_INTERNAL;
    }
}

static void ask(coord_etcd_t *c)
{
    const char *path = NULL;
    td_status_t status = write_body(c, &path);

    if (c->step == STEP_GRANT || c->step == STEP_KEEPALIVE) {
        c->sent_ns = td_now_ns();
    }
    if (status == TD_OK) {
        status = td_etcd_post(c->etcd, path, &c->body, on_answer, c);
    }
    if (status != TD_OK) {
        on_failed(c, status);
    }
}

static void tick(td_coord_t *base)
{
    coord_etcd_t *c = (coord_etcd_t *)base;

    td_etcd_step(c->etcd);
    if (c->step != STEP_IDLE && !td_etcd_is_busy(c->etcd) && td_now_ns() >= c->next_ns) {
        ask(c);
    }
}

static int fd(const td_coord_t *base)
{
    return td_etcd_fd(((const coord_etcd_t *)base)->etcd);
}

static uint64_t due_ns(const td_coord_t *base)
{
    const coord_etcd_t *c = (const coord_etcd_t *)base;

    if (td_etcd_is_busy(c->etcd)) {
        return td_etcd_due_ns(c->etcd);
    }
    return c->step == STEP_IDLE ? UINT64_MAX : c->next_ns;
}

/* --- life ------------------------------------------------------------------------------------- */

static void campaign(td_coord_t *base)
{
    coord_etcd_t *c = (coord_etcd_t *)base;

    c->wanted = true;
    if (c->step == STEP_IDLE) {
        go(c, STEP_LOOK, 0);
    }
}

static void resign(td_coord_t *base)
{
    coord_etcd_t *c = (coord_etcd_t *)base;

    if (!c->wanted) {
        return;
    }
    c->wanted = false;
    if (base->term != 0) {
        TD_LOG_INFO("leadership given up", "term=%llu", (unsigned long long)base->term);
        name_leader(c, "");
    }
    base->term = 0;
    base->valid_until_ns = 0;
    c->failures = 0;
    td_etcd_cancel(c->etcd);
    go(c, c->claim != 0 ? STEP_RESIGN : c->lease != 0 ? STEP_REVOKE : STEP_IDLE, 0);
}

static bool is_resigned(const td_coord_t *base)
{
    const coord_etcd_t *c = (const coord_etcd_t *)base;
    return c->step == STEP_IDLE && !td_etcd_is_busy(c->etcd);
}

static void destroy(td_coord_t *base)
{
    coord_etcd_t *c = (coord_etcd_t *)base;

    td_etcd_destroy(c->etcd);
    td_str_fini(&c->body);
    td_free(c);
}

static void declare(coord_etcd_t *c, const td_coord_config_t *config)
{
    static const char *const renewals_help = "renewals of the leader's lease";

    td_coord_declare(&c->base, config);
    c->renewed = td_coord_counter(config, "leader_renewals_total", "result=\"ok\"", renewals_help);
    c->renew_failed =
        td_coord_counter(config, "leader_renewals_total", "result=\"failed\"", renewals_help);
    c->elections = td_coord_counter(config, "leader_elections_total", NULL, "elections won");
    c->lost = td_coord_counter(config, "leader_losses_total", NULL,
                               "leaderships that ended before they were given up");
}

td_status_t td_coord_etcd_create(const td_coord_config_t *config, td_coord_t **out)
{
    static const td_coord_ops_t ops = {destroy, campaign, resign, is_resigned, fd, due_ns, tick};
    const td_etcd_config_t etcd = {.endpoints = config->etcd,
                                   .timeout_ms = config->lease_ms / RENEW_PART,
                                   .ca_file = config->ca_file,
                                   .cert_file = config->cert_file,
                                   .key_file = config->key_file,
                                   .user = config->user,
                                   .password = config->password};
    coord_etcd_t *c = td_calloc(1, sizeof(*c));
    td_status_t status = TD_ERR_NO_MEMORY;

    if (c == NULL) {
        return status;
    }
    c->base.ops = &ops;
    c->ask_ms = config->lease_ms;
    (void)snprintf(c->id, sizeof(c->id), "%s", config->id);
    (void)snprintf(c->value, sizeof(c->value), "%s",
                   config->value != NULL ? config->value : config->id);
    (void)snprintf(c->key, sizeof(c->key), "/tandem/%s/%s/%s", config->cluster,
                   config->folder != NULL ? config->folder : "leader", config->election);
    status = td_etcd_create(&etcd, &c->etcd);
    if (status != TD_OK) {
        td_free(c);
        return status;
    }
    declare(c, config);
    *out = &c->base;
    return TD_OK;
}

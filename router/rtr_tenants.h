/* rtr_tenants.h - who asks, by API key: a name, a share, limits, and what was counted.
 * Limits are of this router alone. What a request may use is taken when it is admitted, and what it
 * did not use comes back when it is released: once, on every way out (I5). Time is passed in.
 * Threads: create, add: init; admit, release: loop; counts and what is read of a tenant: any.
 * Design: router/DESIGN.md, "Tenants". */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "common/base/td_buf.h"
#include "common/base/td_names.h"
#include "router/rtr_fair.h"
#include "router/rtr_metrics.h"

#define RTR_TENANTS_MAX 1024u
#define RTR_TENANT_NAME_CHARS_MAX 32u
#define RTR_TENANT_LIMIT_MAX 1000000000u
#define RTR_TENANTS_SHOWN 32u /* with series of their own; the others' are added up */
#define RTR_TENANT_EVERYBODY "all"
#define RTR_TENANT_REST "other" /* the series of those that have none of their own */
#define RTR_TENANT_NAME_EXPECTED                                                                   \
    "1 to 32 letters, digits, '.', '_' or '-', not '" RTR_TENANT_REST "'"

typedef enum rtr_cache {
    RTR_CACHE_UNSAID = 0, /* of one that has no key: as if shared */
    RTR_CACHE_OWN, /* no other tenant's prompts are found in the cache, nor its own by them */
    RTR_CACHE_SHARED
} rtr_cache_t;

/** What a tenant may have; 0: no such limit. */
typedef struct rtr_tenant_terms {
    uint32_t weight;   /* 1..RTR_FAIR_WEIGHT_MAX */
    uint32_t requests; /* under way */
    uint32_t requests_per_minute;
    uint32_t tokens_per_minute; /* of prompts and answers */
    rtr_cache_t cache;
} rtr_tenant_terms_t;

/** Full at first; a minute fills it. What was taken beyond it is owed. */
typedef struct rtr_bucket {
    uint32_t size;  /* units; 0: no limit */
    int64_t level;  /* 1/60000 units, at at_ms */
    uint64_t at_ms; /* of the clock that callers pass in ns */
} rtr_bucket_t;

static inline bool rtr_tenant_name_is_valid(const char *name)
{
    return td_name_is_valid(name, RTR_TENANT_NAME_CHARS_MAX) && strcmp(name, RTR_TENANT_REST) != 0;
}

typedef enum rtr_limit {
    RTR_LIMIT_NONE = 0,
    RTR_LIMIT_REQUESTS,
    RTR_LIMIT_REQUESTS_PER_MINUTE,
    RTR_LIMIT_TOKENS_PER_MINUTE,
    RTR_LIMITS
} rtr_limit_t;

typedef struct rtr_tenant {
    char name[RTR_TENANT_NAME_CHARS_MAX + 1];
    uint32_t index; /* its flow in the queue */
    rtr_tenant_terms_t terms;
    rtr_bucket_t requests; /* loop's */
    rtr_bucket_t tokens;   /* loop's */
    /* Counters, relaxed: no order with anything else. */
    atomic_uint running; /* admitted, not released */
    atomic_uint queued;  /* prompts */
    atomic_uint_fast64_t ended[RTR_OUTCOME_COUNT];
    atomic_uint_fast64_t limited[RTR_LIMITS];
    atomic_uint_fast64_t prompt_tokens; /* of prompts that were placed */
    atomic_uint_fast64_t completion_tokens;
    atomic_uint_fast64_t waits; /* prompts that waited for room */
    atomic_uint_fast64_t wait_ns;
} rtr_tenant_t;

/** What a request has taken. */
typedef struct rtr_grant {
    bool held;
    uint64_t tokens;
} rtr_grant_t;

/** How a tenant's limits stood, as the API tells it. */
typedef struct rtr_limits_view {
    rtr_limit_t refused_by; /* RTR_LIMIT_NONE: it was admitted */
    uint32_t retry_after_s;
    uint32_t requests; /* a minute; 0: no such limit */
    uint32_t requests_left;
    uint64_t requests_reset_ms; /* until the bucket is full */
    uint32_t tokens;            /* a minute; 0: no such limit */
    uint32_t tokens_left;
    uint64_t tokens_reset_ms;
} rtr_limits_view_t;

typedef struct rtr_tenants rtr_tenants_t;

/** Replaces the salt that a client gave (or none) by one that no other tenant can give, where the
 * tenant's cache is its own: a keyed hash of its name and the salt. The same on every router that
 * has the secret. tenant: NULL is allowed: nothing changes.
 * Shape:  secret [TD_CLUSTER_SECRET_BYTES]. Errors: TD_ERR_NO_MEMORY. */
TD_MUST_CHECK td_status_t rtr_tenant_salt(const rtr_tenant_t *tenant, const uint8_t *secret,
                                          td_str_t *salt);

/** With one tenant for all, RTR_TENANT_EVERYBODY, which the first rtr_tenants_add() replaces.
 * Errors: TD_ERR_NO_MEMORY. */
TD_MUST_CHECK td_status_t rtr_tenants_create(rtr_tenants_t **out);
void rtr_tenants_destroy(rtr_tenants_t *tenants); /* NULL is allowed */
/** Errors: TD_ERR_INVALID (name or terms out of range), TD_ERR_EXISTS (the name), TD_ERR_TOO_LARGE
 * (RTR_TENANTS_MAX). Owner: the tenant lives as long as the table. */
TD_MUST_CHECK td_status_t rtr_tenants_add(rtr_tenants_t *tenants, const char *name,
                                          const rtr_tenant_terms_t *terms, rtr_tenant_t **out);
/** NULL: there is none of that name. */
rtr_tenant_t *rtr_tenants_find(rtr_tenants_t *tenants, const char *name);
uint32_t rtr_tenants_count(const rtr_tenants_t *tenants);
rtr_tenant_t *rtr_tenants_at(rtr_tenants_t *tenants, uint32_t index);
/** The queue's flows: tenant i is flow i. Errors: as rtr_fair_create(). */
TD_MUST_CHECK td_status_t rtr_tenants_queue(const rtr_tenants_t *tenants, rtr_fair_t **out);

/** Takes a request's place and what it may use, or says which limit is in its way, and takes
 * nothing then. A request of more tokens than a minute's is taken when the bucket is full. */
void rtr_tenant_admit(rtr_tenant_t *tenant, uint64_t tokens, uint64_t now_ns,
                      rtr_grant_t *grant_out, rtr_limits_view_t *view_out);
/** Gives back the place, and the tokens beyond `used`. A grant that is not held: nothing. */
void rtr_tenant_release(rtr_tenant_t *tenant, rtr_grant_t *grant, uint64_t used, uint64_t now_ns);
/** How its limits stand. */
rtr_limits_view_t rtr_tenant_view(rtr_tenant_t *tenant, uint64_t now_ns);
/** Which limit a request of so many tokens has met, for its client. */
void rtr_limits_explain(const rtr_tenant_terms_t *terms, const rtr_limits_view_t *view,
                        uint64_t tokens, char *out, size_t room);
/** "requests", "requests-per-minute", ... */
const char *rtr_limit_name(rtr_limit_t limit);

/** A request of it has ended. NULL is allowed. Threads: any. */
void rtr_tenant_count_end(rtr_tenant_t *tenant, rtr_outcome_t outcome);
/** All series by tenant. Threads: any. */
TD_MUST_CHECK td_status_t rtr_tenants_series(rtr_tenants_t *tenants, td_str_t *out);

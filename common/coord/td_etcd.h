/* td_etcd.h - one request after the other to etcd's JSON gateway, over HTTP by libcurl, driven from
 * the loop: nothing here waits. Of several endpoints the next is used after one has failed.
 * Design: common/coord/DESIGN.md. Threads: loop. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "common/base/td_status.h"
#include "common/coord/td_etcd_msg.h"

#define TD_ETCD_ENDPOINTS_MAX 16u

typedef struct td_etcd td_etcd_t;

typedef struct td_etcd_config {
    const char *endpoints; /* "http://a:2379,http://b:2379" */
    uint32_t timeout_ms;   /* of each request */
    const char *ca_file;   /* https only; each NULL: libcurl's default */
    const char *cert_file;
    const char *key_file;
    const char *user; /* NULL: no authentication by etcd */
    const char *password;
} td_etcd_config_t;

/** How a request ended. answer: borrowed during the call; NULL unless status is TD_OK.
 * status: TD_ERR_NOT_FOUND (404: a lease that is over), TD_ERR_INVALID (401, 403: not allowed),
 * TD_ERR_TIMEOUT, TD_ERR_PEER_DEAD (no connection, or an error of the server's), TD_ERR_PROTOCOL,
 * TD_ERR_TOO_LARGE, TD_ERR_NO_MEMORY. A time-out says nothing of whether etcd has done it. */
typedef void (*td_etcd_fn)(void *ctx, td_status_t status, const td_etcd_answer_t *answer);

/** Errors: TD_ERR_INVALID (an endpoint: logged), TD_ERR_NO_MEMORY, TD_ERR_IO. Copies all texts. */
TD_MUST_CHECK td_status_t td_etcd_create(const td_etcd_config_t *config, td_etcd_t **out);
void td_etcd_destroy(td_etcd_t *etcd);
/** Starts a request; on_done is called by a later td_etcd_step(). None may be under way.
 * Errors: TD_ERR_NO_MEMORY: on_done is not called. */
TD_MUST_CHECK td_status_t td_etcd_post(td_etcd_t *etcd, const char *path, const td_str_t *body,
                                       td_etcd_fn on_done, void *ctx);
/** Forgets the request under way, if any; etcd may carry it out. on_done is not called. */
void td_etcd_cancel(td_etcd_t *etcd);
bool td_etcd_is_busy(const td_etcd_t *etcd);
int td_etcd_fd(const td_etcd_t *etcd);
/** When td_etcd_step() has something to do even if the descriptor says nothing; UINT64_MAX: never.
 */
uint64_t td_etcd_due_ns(const td_etcd_t *etcd);
void td_etcd_step(td_etcd_t *etcd);

/* td_statusd.h - the small HTTP face of every node: GET /metrics and GET /health.
 * Threads: init; its own thread serves, from the lock-free metrics only. */
#pragma once

#include <netinet/in.h>
#include <stdint.h>

#include "common/base/td_metrics.h"
#include "common/base/td_status.h"

typedef struct td_statusd td_statusd_t;

/** Listens on host:port ("127.0.0.1:0" = any free port).
 * Errors: TD_ERR_INVALID (address), TD_ERR_IO (port taken), TD_ERR_NO_MEMORY. */
TD_MUST_CHECK td_status_t td_statusd_create(const char *listen, const td_metrics_t *metrics,
                                            td_statusd_t **out);
void td_statusd_destroy(td_statusd_t *statusd);
/** "host:port" as bound. */
const char *td_statusd_address(const td_statusd_t *statusd);
/** Reads "a.b.c.d:port", port 0..65535. Errors: TD_ERR_INVALID. */
TD_MUST_CHECK td_status_t td_listen_parse(const char *listen, struct sockaddr_in *addr);

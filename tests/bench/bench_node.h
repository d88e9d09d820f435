/* bench_node.h - a node that computes nothing: it joins a real cluster as a prefill node, so that
 * its store can be put to, looked up and read as nodes do. Threads: owner. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "common/base/td_status.h"
#include "common/kv/td_pool.h"
#include "common/transfer/td_transfer.h"
#include "common/wire/td_bus.h"
#include "common/wire/td_member.h"
#include "kvstore/kvs_client.h"

#define BENCH_NODE_BLOCK_TOKENS 16u

typedef struct bench_node {
    td_bus_t *bus; /* borrowed */
    td_member_t *member;
    td_transfer_t *transfer;
    td_pool_t *pool;
    kvs_client_t *client;
} bench_node_t;

typedef struct bench_node_config {
    td_bus_t *bus; /* borrowed, until bench_node_leave() */
    const char *router;
    const uint8_t *secret; /* [TD_CLUSTER_SECRET_BYTES] */
    const char *http;      /* address of a status page, "" = none */
    const char *model;     /* the cluster's GGUF file */
    const char *numerics;  /* the cluster's numerics class, as its nodes log it */
    const char *kv_codec;  /* the cluster's */
    uint32_t block_bytes;  /* the cluster's */
    uint32_t block_count;  /* of this node's pool */
} bench_node_config_t;

/** Errors: as the parts' create functions; what went wrong is logged.
 * Owner: the caller ends it with bench_node_leave(), also after an error. */
TD_MUST_CHECK td_status_t bench_node_join(const bench_node_config_t *config, bench_node_t *node);
void bench_node_leave(bench_node_t *node);
/** Handles what is for the membership or the client. */
bool bench_node_handle(bench_node_t *node, const td_msg_t *msg);
/** Sends what is due. Call at least every 100 ms. */
void bench_node_tick(bench_node_t *node);
/** Takes every message there is, waiting at most timeout_ms for the first. */
void bench_node_turn(bench_node_t *node, uint32_t timeout_ms);

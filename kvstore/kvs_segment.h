/* kvs_segment.h - donated memory of the store: owns its blocks and their epochs, fetches what it is
 * told to store from the writer, checks it, keeps it. Design: section 5. Threads: loop; fetches
 * complete over an inbox the loop drains. */
#pragma once

#include <stdint.h>

#include "common/base/td_metrics.h"
#include "common/base/td_ring.h"
#include "common/base/td_status.h"
#include "common/kv/td_pool.h"
#include "common/transfer/td_transfer.h"
#include "common/wire/td_bus.h"
#include "kvstore/kvs_tier.h"

#define KVS_FETCHES_MAX 64u /* store orders being fetched; more wait */
#define KVS_WAITING_MAX 1024u

typedef struct kvs_segment kvs_segment_t;

/** Errors: TD_ERR_NO_MEMORY, TD_ERR_IO. The transfer's memory becomes the segment's. */
TD_MUST_CHECK td_status_t kvs_segment_create(td_bus_t *bus, td_transfer_t *transfer,
                                             td_metrics_t *metrics, uint32_t block_count,
                                             size_t block_bytes, kvs_segment_t **out);
/** Gives the segment a cold tier, before its first message. Errors: as kvs_tier_create(). */
TD_MUST_CHECK td_status_t kvs_segment_open_tier(kvs_segment_t *segment,
                                                const kvs_tier_config_t *config);
/** The transfer must have been destroyed before. */
void kvs_segment_destroy(kvs_segment_t *segment);
uint32_t kvs_segment_blocks(const kvs_segment_t *segment);
uint32_t kvs_segment_free_blocks(const kvs_segment_t *segment);
bool kvs_segment_handle(kvs_segment_t *segment, const td_msg_t *msg);
/** Descriptors to wait for, and what to call when one is readable. Without a tier -1. */
int kvs_segment_fd(const kvs_segment_t *segment);
int kvs_segment_cold_fd(const kvs_segment_t *segment);
void kvs_segment_completions(kvs_segment_t *segment);
/** How long the loop may sleep: most_ms, or less while a leader is being told what is here. */
uint32_t kvs_segment_wait_ms(const kvs_segment_t *segment, uint32_t most_ms);
void kvs_segment_tick(kvs_segment_t *segment);

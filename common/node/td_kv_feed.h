/* td_kv_feed.h - tells routers which blocks this process has: events as they happen, gathered;
 * those that a router missed once more; all of them, in parts, where that is not enough. Design:
 * section 2, I7; common/node/DESIGN.md, "Telling of blocks". Threads: loop. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "common/kv/td_kv_events.h"
#include "common/wire/td_bus.h"
#include "common/wire/td_member.h"

#define TD_KV_SUBSCRIBERS_MAX TD_ROUTERS_MAX
#define TD_KV_GATHER_MS 5u         /* between two messages of events, while there are few */
#define TD_KV_GATHER_KEYS 512u     /* of one; so many are not waited for */
#define TD_KV_MESSAGES_PER_TICK 8u /* to one subscriber */
#define TD_KV_BEAT_MS 1000u        /* then it is told how far events are, though there be none */

typedef struct td_kv_feed td_kv_feed_t;

/** Where messages go: td_kv_feed_over_bus(), or a test's. */
typedef struct td_kv_feed_out {
    void *ctx;
    uint64_t (*own_life)(void *ctx);
    uint64_t (*life)(void *ctx, const char *id); /* 0: not known, nothing can be sent */
    td_status_t (*send)(void *ctx, const char *id, td_msg_t *msg); /* as td_bus_send() */
} td_kv_feed_out_t;
td_kv_feed_out_t td_kv_feed_over_bus(td_bus_t *bus); /* borrowed */

/** events and walk (of ctx) are of the same index, and borrowed.
 * Errors: TD_ERR_NO_MEMORY. Owner: the caller. */
TD_MUST_CHECK td_status_t td_kv_feed_create(const td_kv_feed_out_t *to,
                                            const td_kv_events_t *events, td_kv_walk_t walk,
                                            const void *ctx, td_kv_feed_t **out);
void td_kv_feed_destroy(td_kv_feed_t *feed); /* NULL is allowed */
/** Tells a router from now on, whenever its life is known: each of its lives, and in each
 * of ours, from a snapshot on. at: its place, below TD_KV_SUBSCRIBERS_MAX; id "": nobody any more.
 */
void td_kv_feed_follow(td_kv_feed_t *feed, uint32_t at, const char *id);
/** True when the message was for the feed: a subscriber missed something. */
bool td_kv_feed_handle(td_kv_feed_t *feed, const td_msg_t *msg);
/** Sends what is due, a bounded part of it; what finds an outbox full waits. member: whose routers
 * are told; NULL: as td_kv_feed_follow() had it. */
void td_kv_feed_tick(td_kv_feed_t *feed, const td_member_t *member, uint64_t now_ns);
/** How long the loop may sleep: most_ms, or less while events wait. */
uint32_t td_kv_feed_wait_ms(const td_kv_feed_t *feed, uint32_t most_ms);

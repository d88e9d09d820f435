/* kvs_client.h - the store's face to the nodes: look up a prefix, offer new blocks.
 * Design: section 5. A miss, a dead master, "exists", "in progress" and "busy" are different
 * answers. Everything here may fail without failing a request: the caller computes instead.
 * Threads: loop (the bus's). */
#pragma once

#include <stdint.h>

#include "common/base/td_status.h"
#include "common/kv/td_pool.h"
#include "common/wire/td_bus.h"
#include "common/wire/td_member.h"

#define KVS_LOOKUP_MS 100u   /* then a miss, and the store counts as slow */
#define KVS_PROBE_MS 500u    /* a slow store is asked again this often */
#define KVS_PUT_MS 30000u    /* then the offer is given up and the pins end */
#define KVS_LOOKUPS_MAX 256u /* under way */
#define KVS_PUTS_MAX 256u
#define KVS_PUT_BLOCKS_MAX 1024u /* one offer */

typedef struct kvs_client kvs_client_t;

/** found: the longest prefix with where to read it (borrowed during the call), or NULL: a miss,
 * with the reason in status (TD_ERR_NOT_FOUND, TD_ERR_TIMEOUT, TD_ERR_PEER_DEAD). */
typedef void (*kvs_lookup_fn)(void *ctx, uint64_t tag, td_status_t status,
                              const td_msg_lookup_result_t *found);

TD_MUST_CHECK td_status_t kvs_client_create(td_bus_t *bus, const td_member_t *member,
                                            td_pool_t *pool, kvs_client_t **out);
/** Ends every pin. */
void kvs_client_destroy(kvs_client_t *client);
/** Asks for the longest prefix of keys. on_done is called exactly once, later; tag is the caller's.
 * After an answer that did not come in KVS_LOOKUP_MS nobody waits for this store any more, until it
 * has answered a probe in time.
 * Errors: TD_ERR_PEER_DEAD (the cluster has no store now), TD_ERR_TIMEOUT (it is slow),
 * TD_ERR_BUSY: on_done is not called. */
TD_MUST_CHECK td_status_t kvs_client_lookup(kvs_client_t *client, const td_block_key_t *keys,
                                            uint32_t count, kvs_lookup_fn on_done, void *ctx,
                                            uint64_t tag);
/** Offers indexed blocks of the pool; they stay pinned until the store has answered or is gone,
 * this process begins a new life (fenced), or KVS_PUT_MS are over. Errors: TD_ERR_PEER_DEAD,
 * TD_ERR_TIMEOUT (the store is slow), TD_ERR_BUSY, TD_ERR_NO_MEMORY: nothing pinned. */
TD_MUST_CHECK td_status_t kvs_client_put(kvs_client_t *client, const uint32_t *blocks,
                                         uint32_t count);
/** Remembers an answer for all nodes: what followed a whole prompt, of which more than
 * TD_MSG_MEMO_TOKENS_MAX tokens are cut off. Best effort: nobody hears how it went. */
void kvs_client_memo_put(kvs_client_t *client, const td_block_key_t *key, const uint32_t *tokens,
                         uint32_t count);
/** Asks for one: MEMO_FOUND with the tag comes if there is one, else nothing. Best effort. */
void kvs_client_memo_get(kvs_client_t *client, const td_block_key_t *key, uint64_t tag);
/** True when the message was an answer of the store. */
bool kvs_client_handle(kvs_client_t *client, const td_msg_t *msg);
/** Ends what is overdue or was asked of a master that is gone. */
void kvs_client_tick(kvs_client_t *client);
/** For a caller that needs so many blocks free or evictable: while the pool has fewer, gives up the
 * oldest offer, if the store has left it lying for KVS_LOOKUP_MS, so that its pins delay no
 * request. Whatever the store reads of them later is caught by epoch and checksum (I3). */
void kvs_client_make_room(kvs_client_t *client, uint32_t blocks);
/** Blocks pinned for offers under way. */
uint32_t kvs_client_pinned(const kvs_client_t *client);

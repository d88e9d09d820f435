/* kvs_donor.h - memory that a prefill or decode node gives to the store: a segment of its own
 * beside the node, in the same process. It has its own name ("<node>.donor"), bus, transfer and
 * loop, so it and the node meet as any two processes do, through messages. Design: section 5.
 * Threads: create and destroy: init; the segment runs on a thread of its own. */
#pragma once

#include "common/base/td_status.h"
#include "common/node/td_node.h"

typedef struct kvs_donor kvs_donor_t;

/** Reads the node's option "donate"; 0: *out is NULL. The node is open.
 * Errors: TD_ERR_INVALID (less than one block), and as the segment's parts; each is logged.
 * Owner:  the caller ends it with kvs_donor_destroy(), before the node is closed. */
TD_MUST_CHECK td_status_t kvs_donor_create(td_node_t *node, kvs_donor_t **out);
/** NULL is allowed. */
void kvs_donor_destroy(kvs_donor_t *donor);

/* rtr_index_internal.h - what rtr_index.c (entries and who holds them) and rtr_index_stream.c
 * (events of a slot, gaps, snapshots) share. Threads: loop. */
#pragma once

#include "common/base/td_lru.h"
#include "common/kv/td_key_index.h"
#include "router/rtr_index.h"

#define INDEX_NONE UINT32_MAX
#define INDEX_HOLDERS_INLINE 9u /* of an entry; past it a set of bits */

/** A lane is one account of what a slot holds. A purge gives the slot a new one and leaves the old
 * one to be swept out; a snapshot fills a second one and then takes the place of the first. */
typedef enum lane_state {
    LANE_FREE = 0,
    LANE_SHOWN,  /* matched */
    LANE_FILLED, /* by a snapshot under way */
    LANE_RETIRED /* its marks are being taken out of the entries */
} lane_state_t;

typedef struct lane {
    uint64_t digest; /* of the confirmed ones */
    uint32_t slot;
    uint32_t confirmed; /* blocks */
    uint32_t held;      /* and expected ones */
    uint8_t state;      /* lane_state_t */
    bool lossy;         /* something of it was dropped for want of room */
    bool swept;         /* RETIRED: a pass that began later is under way */
} lane_t;

/** A slot's stream of events, of its node's present life. */
typedef struct stream {
    uint32_t lane;     /* shown */
    uint32_t filled;   /* of the snapshot under way: the same one, another, or INDEX_NONE */
    uint64_t next;     /* number of the event to come; 0: nothing was told yet */
    uint64_t snapshot; /* the newest one that began */
    uint32_t parts;    /* of it, taken */
    uint64_t known;    /* there are events up to before this one: those from next on are missing */
    bool wants_all;    /* a snapshot is needed */
    bool doubted;      /* because the last one was not enough: not at once */
    uint64_t ended_ns; /* the last one; 0: none */
    bool asked;        /* lately */
    uint64_t asked_ns; /* when last */
    uint64_t heard_ns; /* last word of it; 0: none */
    uint64_t progress_ns; /* of the snapshot: its last part */
    uint32_t told_blocks; /* that the node holds, as it last said */
    uint64_t gaps;
} stream_t;

/* 48 bytes: a key, a list, and most often all who hold it. */
typedef struct entry {
    td_block_key_t key;
    td_lru_link_t use;
    uint32_t set;   /* more holders than fit: their bits; free: the next free one */
    uint16_t count; /* holders; 0: the entry is free */
    uint16_t holders[INDEX_HOLDERS_INLINE]; /* [count], unless there is a set: lane * 4 + mark */
} entry_t;

struct rtr_index {
    entry_t *entries; /* owned [entries_max] */
    uint32_t entries_max;
    uint32_t high; /* entries from here on were never used */
    uint32_t count;
    uint32_t free_first; /* INDEX_NONE: none below high */
    td_key_index_t keys; /* owned */
    td_lru_t use;
    uint64_t *bits;       /* owned [sets_max][3][words]: confirmed, expected lately, and before */
    uint32_t *set_epochs; /* owned [sets_max]: what lately is; of a free one, the next free one */
    uint32_t sets_max;
    uint32_t sets_high;
    uint32_t sets_free;
    uint32_t words;   /* of a set of lanes */
    lane_t *lanes;    /* owned [lanes_max] */
    uint64_t *shown;  /* owned [words]: lanes that are matched */
    uint64_t *keeps;  /* owned [words]: lanes whose expectations do not end */
    uint64_t *active; /* owned [words], of a match */
    uint32_t lanes_max;
    uint32_t lanes_free;
    uint32_t retired;  /* lanes */
    stream_t *streams; /* owned [slots_max] */
    uint32_t slots_max;
    uint32_t epoch; /* what was expected two epochs ago is over */
    uint64_t epoch_end_ns;
    bool sweeping;
    uint32_t sweep_at;
    rtr_index_counts_t counts;
};

/** Adds a block to a lane. False: there is no room for the mark; the lane is lossy. */
bool index_confirm(rtr_index_t *x, const td_block_key_t *key, uint32_t lane);
void index_drop(rtr_index_t *x, const td_block_key_t *key, uint32_t lane);
/** For a loop over keys: asks memory for those that come after the one at i. */
void index_ahead(const rtr_index_t *x, const td_block_key_t *keys, uint32_t count, uint32_t i);
/** A lane for a slot, SHOWN or FILLED; INDEX_NONE: none is free, and none retired. */
uint32_t index_lane_new(rtr_index_t *x, uint32_t slot, lane_state_t state);
/** Its marks are nobody's from now on. */
void index_lane_retire(rtr_index_t *x, uint32_t lane);
/** FILLED becomes SHOWN. */
void index_lane_show(rtr_index_t *x, uint32_t lane);
void index_lane_keep(rtr_index_t *x, uint32_t lane, bool keeps);
bool index_lane_keeps(const rtr_index_t *x, uint32_t lane);

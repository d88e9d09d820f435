/* td_names.h - from a short name to a number, O(1): whoever keeps a table of named things finds the
 * row without looking at the others. Names are borrowed, so they live in the table's own rows.
 * Threads: the table's. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/td_status.h"

#define TD_NAMES_NONE UINT32_MAX

typedef struct td_names_entry {
    const char *name; /* borrowed until td_names_remove(); NULL: free */
    uint32_t hash;
    uint32_t number;
} td_names_entry_t;

typedef struct td_names {
    td_names_entry_t *entries; /* owned [mask + 1], at most half of them in use */
    uint32_t mask;
    uint32_t count;
    uint32_t names_max;
} td_names_t;

/** All memory is taken here. Units: names_max, 1..2^24. Errors: TD_ERR_NO_MEMORY.
 * Owner: the caller ends it with td_names_fini(). */
TD_MUST_CHECK td_status_t td_names_init(td_names_t *names, uint32_t names_max);
void td_names_fini(td_names_t *names);
/** Sets a name's number, whether it had one or not. There must be room for a new one. */
void td_names_set(td_names_t *names, const char *name, uint32_t number);
/** Forgets a name; one that isn't there is no mistake. */
void td_names_remove(td_names_t *names, const char *name);
/** TD_NAMES_NONE: it isn't there. Cost: O(1), the name's length. */
uint32_t td_names_find(const td_names_t *names, const char *name);

/** Is it a name as processes, clusters and elections have: 1 to chars_max letters, digits, '-', '_'
 * or '.'? So it may stand in a header, a page, a metric or a key as it is. */
bool td_name_is_valid(const char *name, size_t chars_max);

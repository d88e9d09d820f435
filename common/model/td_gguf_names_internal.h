/* td_gguf_names_internal.h - a fixed-size hash table from byte strings to indexes, for keys, tensor
 * names and vocabularies. All memory is taken in td_gguf_names_init().
 * Threads: owner while filling, any afterwards. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/td_status.h"

#define TD_GGUF_NAMES_NONE UINT32_MAX

typedef struct td_gguf_name {
    const uint8_t *bytes; /* borrowed until fini; NULL = empty slot */
    uint32_t len;         /* bytes */
    uint32_t id;
} td_gguf_name_t;

typedef struct td_gguf_names {
    td_gguf_name_t *slots; /* owned; [mask + 1] */
    uint32_t mask;         /* power of two less one, at least twice as many slots as names */
} td_gguf_names_t;

/** Errors: TD_ERR_NO_MEMORY, TD_ERR_TOO_LARGE (over 2^30 names).
 * Owner:  the caller ends it with td_gguf_names_fini(). */
TD_MUST_CHECK td_status_t td_gguf_names_init(td_gguf_names_t *names, uint32_t count_max);
void td_gguf_names_fini(td_gguf_names_t *names);
/** Adds a name; false, changing nothing, when it is there already. At most count_max may be added.
 */
bool td_gguf_names_put(td_gguf_names_t *names, const uint8_t *bytes, uint32_t len, uint32_t id);
/** The name's id, or TD_GGUF_NAMES_NONE. Cost: O(len). */
uint32_t td_gguf_names_find(const td_gguf_names_t *names, const uint8_t *bytes, size_t len);

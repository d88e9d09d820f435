/* td_arena.h - memory that is taken piece by piece, given back all at once, and read from end to
 * end: in huge pages where the system has them, because walking tens of thousands of small ones
 * costs a pass over the weights a seventh of its time. Threads: owner. */
#pragma once

#include <stddef.h>

typedef struct td_arena td_arena_t;

/** NULL: no memory. */
td_arena_t *td_arena_create(void);
/** Gives back every piece. NULL is allowed. */
void td_arena_destroy(td_arena_t *arena);
/** Units: bytes; aligned to TD_CACHE_LINE_BYTES, not initialised. NULL: no memory.
 * Owner: the arena. */
void *td_arena_alloc(td_arena_t *arena, size_t bytes);

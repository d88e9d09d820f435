#include "common/base/td_arena.h"

#include <stdint.h>

#include "common/base/td_base.h"

#define CHUNK_BYTES ((size_t)32 << 20) /* address space: pages that nobody touches cost nothing */

typedef struct chunk {
    struct chunk *next; /* older */
    uint8_t *bytes;     /* owned */
    size_t size;
    size_t used;
} chunk_t;

struct td_arena {
    chunk_t *chunks; /* owned; the newest first */
};

td_arena_t *td_arena_create(void)
{
    return td_calloc(1, sizeof(td_arena_t));
}

static chunk_t *add_chunk(td_arena_t *arena, size_t bytes)
{
    chunk_t *chunk = td_calloc(1, sizeof(*chunk));
    size_t size = TD_MAX(bytes, CHUNK_BYTES);

    if (chunk == NULL) {
        return NULL;
    }
    chunk->bytes = td_alloc_large(size);
    if (chunk->bytes == NULL) {
        td_free(chunk);
        return NULL;
    }
    chunk->size = size;
    chunk->next = arena->chunks;
    arena->chunks = chunk;
    return chunk;
}

void *td_arena_alloc(td_arena_t *arena, size_t bytes)
{
    chunk_t *chunk = arena->chunks;
    size_t padded = 0;
    void *piece = NULL;

    if (!td_size_add(bytes, TD_CACHE_LINE_BYTES - 1, &padded)) {
        return NULL;
    }
    padded = padded / TD_CACHE_LINE_BYTES * TD_CACHE_LINE_BYTES;
    if (chunk == NULL || chunk->size - chunk->used < padded) {
        chunk = add_chunk(arena, padded);
    }
    if (chunk == NULL) {
        return NULL;
    }
    piece = chunk->bytes + chunk->used;
    chunk->used += padded;
    return piece;
}

void td_arena_destroy(td_arena_t *arena)
{
    if (arena == NULL) {
        return;
    }
    while (arena->chunks != NULL) {
        chunk_t *chunk = arena->chunks;
        arena->chunks = chunk->next;
        td_free(chunk->bytes);
        td_free(chunk);
    }
    td_free(arena);
}

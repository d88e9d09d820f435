#include "common/model/td_gguf_names_internal.h"

#include <string.h>
#include <xxhash.h>

#include "common/base/td_base.h"

#define NAMES_MAX (1u << 30)

td_status_t td_gguf_names_init(td_gguf_names_t *names, uint32_t count_max)
{
    uint32_t slot_count = 16;

    if (count_max > NAMES_MAX) {
        return TD_ERR_TOO_LARGE;
    }
    while (slot_count < 2 * count_max) {
        slot_count *= 2;
    }
    names->slots = td_calloc(slot_count, sizeof(*names->slots));
    if (names->slots == NULL) {
        return TD_ERR_NO_MEMORY;
    }
    names->mask = slot_count - 1;
    return TD_OK;
}

void td_gguf_names_fini(td_gguf_names_t *names)
{
    td_free(names->slots);
    names->slots = NULL;
    names->mask = 0;
}

/* The slot that holds the name, or the empty one where it belongs; ends because half are empty. */
static td_gguf_name_t *names_slot(const td_gguf_names_t *names, const uint8_t *bytes, size_t len)
{
    uint32_t at = (uint32_t)XXH3_64bits(bytes, len) & names->mask;

    for (;;) {
        td_gguf_name_t *slot = &names->slots[at];
        if (slot->bytes == NULL || (slot->len == len && memcmp(slot->bytes, bytes, len) == 0)) {
            return slot;
        }
        at = (at + 1) & names->mask;
    }
}

bool td_gguf_names_put(td_gguf_names_t *names, const uint8_t *bytes, uint32_t len, uint32_t id)
{
    td_gguf_name_t *slot = names_slot(names, bytes, len);

    if (slot->bytes != NULL) {
        return false;
    }
    slot->bytes = bytes;
    slot->len = len;
    slot->id = id;
    return true;
}

uint32_t td_gguf_names_find(const td_gguf_names_t *names, const uint8_t *bytes, size_t len)
{
    const td_gguf_name_t *slot = names_slot(names, bytes, len);

    return slot->bytes == NULL ? TD_GGUF_NAMES_NONE : slot->id;
}

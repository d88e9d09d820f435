#include "common/base/td_names.h"

#include <string.h>

#include "common/base/td_base.h"

#define NAMES_MAX (1u << 24)

/* FNV-1a, its high bits folded into the low ones, which choose the entry. */
static uint32_t hash_of(const char *name)
{
    uint32_t hash = 2166136261u;

    for (; *name != '\0'; name++) {
        hash = (hash ^ (uint8_t)*name) * 16777619u;
    }
    return hash ^ hash >> 15;
}

td_status_t td_names_init(td_names_t *names, uint32_t names_max)
{
    uint32_t entries = 2;

    TD_ASSERT(names_max >= 1 && names_max <= NAMES_MAX);
    while (entries < 2 * names_max) {
        entries *= 2;
    }
    *names = (td_names_t){.mask = entries - 1, .names_max = names_max};
    names->entries = td_calloc(entries, sizeof(*names->entries));
    return names->entries == NULL ? TD_ERR_NO_MEMORY : TD_OK;
}

void td_names_fini(td_names_t *names)
{
    td_free(names->entries);
    *names = (td_names_t){0};
}

/* Where the name is, or the free entry where it would be. */
static uint32_t entry_of(const td_names_t *names, const char *name, uint32_t hash)
{
    uint32_t at = hash & names->mask;

    while (names->entries[at].name != NULL &&
           (names->entries[at].hash != hash || strcmp(names->entries[at].name, name) != 0)) {
        at = (at + 1) & names->mask;
    }
    return at;
}

void td_names_set(td_names_t *names, const char *name, uint32_t number)
{
    const uint32_t hash = hash_of(name);
    td_names_entry_t *entry = &names->entries[entry_of(names, name, hash)];

    if (entry->name == NULL) {
        TD_ASSERT(names->count < names->names_max);
        names->count++;
    }
    *entry = (td_names_entry_t){.name = name, .hash = hash, .number = number};
}

void td_names_remove(td_names_t *names, const char *name)
{
    uint32_t hole = entry_of(names, name, hash_of(name));

    if (names->entries[hole].name == NULL) {
        return;
    }
    names->count--;
    /* What comes behind moves up where the hole lies between its own place and where it is: no
     * search ends early, and no tombstones pile up. */
    for (uint32_t at = (hole + 1) & names->mask; names->entries[at].name != NULL;
         at = (at + 1) & names->mask) {
        const uint32_t home = names->entries[at].hash & names->mask;
        if (((at - home) & names->mask) >= ((at - hole) & names->mask)) {
            names->entries[hole] = names->entries[at];
            hole = at;
        }
    }
    names->entries[hole] = (td_names_entry_t){0};
}

uint32_t td_names_find(const td_names_t *names, const char *name)
{
    const td_names_entry_t *entry = &names->entries[entry_of(names, name, hash_of(name))];
    return entry->name == NULL ? TD_NAMES_NONE : entry->number;
}

bool td_name_is_valid(const char *name, size_t chars_max)
{
    static const char chars[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.";
    const size_t len = strlen(name);

    return len > 0 && len <= chars_max && strspn(name, chars) == len;
}

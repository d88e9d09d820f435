/* td_coord_list.h - who is in a folder of etcd, as last seen: names with a value each, which their
 * processes hold by leases (td_coord with a folder). Looked at again and again, not watched: a
 * watch falls silent with a frozen etcd. Design: common/coord/DESIGN.md. Threads: loop. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "common/base/td_status.h"
#include "common/coord/td_coord.h"
#include "common/coord/td_etcd.h"

#define TD_COORD_LIST_MAX TD_ETCD_ENTRIES_MAX
#define TD_COORD_LIST_EVERY_MS 1000u

typedef struct td_coord_entry {
    char name[TD_COORD_NAME_CHARS_MAX + 1];
    char value[TD_COORD_VALUE_CHARS_MAX + 1];
} td_coord_entry_t;

typedef struct td_coord_list td_coord_list_t;

/** timeout_ms of the configuration does not count. Errors: as td_etcd_create(), TD_ERR_INVALID (a
 * name: logged). */
TD_MUST_CHECK td_status_t td_coord_list_create(const td_etcd_config_t *etcd, const char *cluster,
                                               const char *folder, td_coord_list_t **out);
void td_coord_list_destroy(td_coord_list_t *list);
/** Does what is due; call at least every 100 ms. True: the entries are others than before. While
 * etcd does not answer they stay as they were. */
bool td_coord_list_tick(td_coord_list_t *list);
/** Owner: the list, until the next tick. */
const td_coord_entry_t *td_coord_list_entries(const td_coord_list_t *list, uint32_t *count_out);

/* td_stop.h - stop strings over streamed text: nothing that may be the beginning of a stop string
 * is given out before it is certain (F15). A match may span tokens and ends the text before it.
 * Threads: owner. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/td_buf.h"
#include "common/base/td_status.h"

#define TD_STOP_STRINGS_MAX 16u

typedef struct td_stop_string {
    const uint8_t *at; /* borrowed */
    size_t len;        /* bytes, > 0 */
} td_stop_string_t;

/** Zero-initialise, then set strings and count. */
typedef struct td_stop {
    const td_stop_string_t *strings; /* borrowed */
    uint32_t count;
    bool include;  /* the matched string is part of the text */
    td_str_t held; /* owned */
    bool matched;
    uint32_t which; /* index of the match */
} td_stop_t;

void td_stop_fini(td_stop_t *stop);
/** Takes new text and appends to out what is safe now. With match false strings are not looked for
 * (the minimum length is not reached), and the text cannot match later either. Errors:
 * TD_ERR_NO_MEMORY. After matched is set nothing more comes out. */
TD_MUST_CHECK td_status_t td_stop_push(td_stop_t *stop, const void *text, size_t len, bool match,
                                       td_str_t *out);
/** Gives out what was held, at the end of generation. */
TD_MUST_CHECK td_status_t td_stop_finish(td_stop_t *stop, td_str_t *out);

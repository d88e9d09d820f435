#include "common/model/td_stop.h"

#include <string.h>

#include "common/base/td_base.h"

void td_stop_fini(td_stop_t *stop)
{
    td_str_fini(&stop->held);
}

/* Earliest match in held; the longest of those that start there. SIZE_MAX: none. */
static size_t find_match(const td_stop_t *stop, uint32_t *which_out)
{
    size_t best = SIZE_MAX;
    size_t best_len = 0;

    for (uint32_t i = 0; i < stop->count; i++) {
        const td_stop_string_t *s = &stop->strings[i];
        const char *at = stop->held.len < s->len
                             ? NULL
                             : memmem(stop->held.bytes, stop->held.len, s->at, s->len);
        size_t pos = at == NULL ? SIZE_MAX : (size_t)(at - stop->held.bytes);
        if (pos < best || (pos == best && pos != SIZE_MAX && s->len > best_len)) {
            best = pos;
            best_len = s->len;
            *which_out = i;
        }
    }
    return best;
}

/* Bytes at the end of held that may be the beginning of a stop string. */
static size_t risky_tail(const td_stop_t *stop)
{
    size_t longest = 0;

    for (uint32_t i = 0; i < stop->count; i++) {
        const td_stop_string_t *s = &stop->strings[i];
        size_t n = TD_MIN(s->len - 1, stop->held.len);
        while (n > longest && memcmp(stop->held.bytes + stop->held.len - n, s->at, n) != 0) {
            n--;
        }
        longest = TD_MAX(longest, n);
    }
    return longest;
}

td_status_t td_stop_push(td_stop_t *stop, const void *text, size_t len, bool match, td_str_t *out)
{
    size_t give = 0;

    if (stop->matched) {
        return TD_OK;
    }
    TD_TRY(td_str_append(&stop->held, text, len));
    if (stop->held.len == 0) {
        return TD_OK;
    }
    if (!match) {
        give = stop->held.len;
    } else {
        uint32_t which = 0;
        size_t at = find_match(stop, &which);
        if (at != SIZE_MAX) {
            stop->matched = true;
            stop->which = which;
            give = at + (stop->include ? stop->strings[which].len : 0);
        } else {
            give = stop->held.len - risky_tail(stop);
        }
    }
    TD_TRY(td_str_append(out, stop->held.bytes, give));
    td_str_consume(&stop->held, give);
    if (stop->matched) {
        td_str_clear(&stop->held);
    }
    return TD_OK;
}

td_status_t td_stop_finish(td_stop_t *stop, td_str_t *out)
{
    if (!stop->matched && stop->held.len > 0) {
        TD_TRY(td_str_append(out, stop->held.bytes, stop->held.len));
    }
    td_str_clear(&stop->held);
    return TD_OK;
}

/* td_base.h - assertions, checked sizes and allocation, for every folder.
 * Threads: any. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/td_status.h"

#define TD_ARRAY_LEN(a) (sizeof(a) / sizeof((a)[0]))
#define TD_MIN(a, b) ((a) < (b) ? (a) : (b))
#define TD_MAX(a, b) ((a) > (b) ? (a) : (b))
#define TD_CACHE_LINE_BYTES 64

/** Checks for our own mistakes; on in every build. Never for bytes from outside. */
#define TD_ASSERT(cond) ((cond) ? (void)0 : td_assert_failed(#cond, __FILE__, __LINE__))

/** Returns early with a failure; only where the function owns nothing. */
#define TD_TRY(call)                                                                               \
    do {                                                                                           \
        td_status_t td_try_status_ = (call);                                                       \
        if (td_try_status_ < 0) {                                                                  \
            return td_try_status_;                                                                 \
        }                                                                                          \
    } while (0)

/** Logs the broken condition and aborts. */
_Noreturn void td_assert_failed(const char *cond, const char *file, int line);

/** Multiplies or adds sizes; false (and *out untouched) when the result does not fit. */
TD_MUST_CHECK bool td_size_mul(size_t a, size_t b, size_t *out);
TD_MUST_CHECK bool td_size_add(size_t a, size_t b, size_t *out);

/** malloc, calloc, realloc and strdup with fault injection; NULL when memory is out.
 * A count of 0 gives a valid pointer of one byte.
 * Owner: the caller, who gives it back with td_free(). */
void *td_alloc(size_t bytes);
void *td_calloc(size_t count, size_t bytes);
void *td_realloc(void *ptr, size_t bytes);
void *td_alloc_aligned(size_t align_bytes, size_t bytes);
/** For memory that is read at random or from end to end: from 2 MiB on it lies in huge pages, where
 * the system has them, so that an access seldom costs a page walk as well. td_calloc_large()
 * touches it at once. */
void *td_alloc_large(size_t bytes);
void *td_calloc_large(size_t count, size_t bytes);
char *td_strdup(const char *text);
char *td_strndup(const char *text, size_t len);
void td_free(void *ptr);

/** Makes the n-th allocation from now on (1 = the next) and all after it fail; 0 switches the
 * fault off. For tests/fault only.
 * Threads: init. */
void td_alloc_fail_at(uint64_t nth);
/** Counts allocations since the process started (for tests that demand none). */
uint64_t td_alloc_count(void);

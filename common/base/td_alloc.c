#include "common/base/td_base.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "common/base/td_log.h"

#define HUGE_PAGE_BYTES ((size_t)2 << 20)

/* Relaxed everywhere: the counters order nothing, they are only counted. */
static atomic_uint_fast64_t alloc_count;
static atomic_uint_fast64_t alloc_fail_at; /* 0 = never */

_Noreturn void td_assert_failed(const char *cond, const char *file, int line)
{
    TD_LOG_ERROR("assertion failed", "cond=\"%s\" at=%s:%d", cond, file, line);
    abort();
}

bool td_size_mul(size_t a, size_t b, size_t *out)
{
    size_t product = 0;
    if (__builtin_mul_overflow(a, b, &product)) {
        return false;
    }
    *out = product;
    return true;
}

bool td_size_add(size_t a, size_t b, size_t *out)
{
    size_t sum = 0;
    if (__builtin_add_overflow(a, b, &sum)) {
        return false;
    }
    *out = sum;
    return true;
}

void td_alloc_fail_at(uint64_t nth)
{
    uint64_t now = atomic_load_explicit(&alloc_count, memory_order_relaxed);
    atomic_store_explicit(&alloc_fail_at, nth == 0 ? 0 : now + nth, memory_order_relaxed);
}

uint64_t td_alloc_count(void)
{
    return atomic_load_explicit(&alloc_count, memory_order_relaxed);
}

static bool alloc_should_fail(void)
{
    uint64_t mine = atomic_fetch_add_explicit(&alloc_count, 1, memory_order_relaxed) + 1;
    uint64_t fail_at = atomic_load_explicit(&alloc_fail_at, memory_order_relaxed);
    return fail_at != 0 && mine >= fail_at;
}

void *td_alloc(size_t bytes)
{
    if (alloc_should_fail()) {
        return NULL;
    }
    return malloc(bytes == 0 ? 1 : bytes);
}

void *td_calloc(size_t count, size_t bytes)
{
    if (alloc_should_fail()) {
        return NULL;
    }
    if (count == 0 || bytes == 0) {
        return calloc(1, 1);
    }
    return calloc(count, bytes);
}

void *td_realloc(void *ptr, size_t bytes)
{
    if (alloc_should_fail()) {
        return NULL;
    }
    return realloc(ptr, bytes == 0 ? 1 : bytes);
}

void *td_alloc_aligned(size_t align_bytes, size_t bytes)
{
    void *ptr = NULL;
    if (alloc_should_fail()) {
        return NULL;
    }
    if (posix_memalign(&ptr, align_bytes, bytes == 0 ? 1 : bytes) != 0) {
        return NULL;
    }
    return ptr;
}

void *td_alloc_large(size_t bytes)
{
    void *large = NULL;

    if (bytes < HUGE_PAGE_BYTES) {
        return td_alloc(bytes);
    }
    large = td_alloc_aligned(HUGE_PAGE_BYTES, bytes);
    if (large != NULL) {
        (void)madvise(large, bytes, MADV_HUGEPAGE); /* a wish: refused, it works all the same */
    }
    return large;
}

void *td_calloc_large(size_t count, size_t bytes)
{
    size_t size = 0;
    void *large = NULL;

    if (!td_size_mul(count, bytes, &size) || size < HUGE_PAGE_BYTES) {
        return td_calloc(count, bytes);
    }
    large = td_alloc_large(size);
    if (large != NULL) {
        memset(large, 0, size);
    }
    return large;
}

char *td_strndup(const char *text, size_t len)
{
    char *copy = td_alloc(len + 1);
    if (copy != NULL) {
        memcpy(copy, text, len);
        copy[len] = '\0';
    }
    return copy;
}

char *td_strdup(const char *text)
{
    return td_strndup(text, strlen(text));
}

void td_free(void *ptr)
{
    free(ptr);
}

#include "common/base/td_clock.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

#include "common/base/td_base.h"

uint64_t td_now_ns(void)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * TD_NS_PER_S + (uint64_t)now.tv_nsec;
}

uint64_t td_wall_s(void)
{
    return (uint64_t)time(NULL);
}

uint64_t td_wall_ms(void)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_REALTIME, &now);
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / TD_NS_PER_MS;
}

uint64_t td_remaining_ns(uint64_t deadline_ns)
{
    uint64_t now = td_now_ns();
    return deadline_ns > now ? deadline_ns - now : 0;
}

/* Ids are drawn for every request: a system call brings some at a time. Bytes are used once, and
 * wiped. A forked child must not draw what its parent draws: it begins with an empty store. */
#define RANDOM_STORE_BYTES 256u
#define RANDOM_SMALL_BYTES 32u

typedef struct random_store {
    uint32_t left;
    uint32_t generation;
    uint8_t bytes[RANDOM_STORE_BYTES];
} random_store_t;

static _Thread_local random_store_t store;
static uint32_t random_generation = 1; /* changed by a child alone, before it has threads */
static pthread_once_t random_once = PTHREAD_ONCE_INIT;

static void random_forked(void)
{
    random_generation++;
}

static void random_watch_forks(void)
{
    (void)pthread_atfork(NULL, NULL, random_forked);
}

static void random_ask(void *bytes, unsigned long len)
{
    uint8_t *at = bytes;
    while (len > 0) {
        ssize_t got = getrandom(at, len, 0);
        if (got < 0) {
            TD_ASSERT(errno == EINTR);
            continue;
        }
        at += got;
        len -= (unsigned long)got;
    }
}

void td_random_bytes(void *bytes, unsigned long len)
{
    uint8_t *at = NULL;

    if (len > RANDOM_SMALL_BYTES) {
        random_ask(bytes, len);
        return;
    }
    if (store.generation != random_generation || store.left < len) {
        (void)pthread_once(&random_once, random_watch_forks);
        random_ask(store.bytes, sizeof(store.bytes));
        store.left = sizeof(store.bytes);
        store.generation = random_generation;
    }
    store.left -= (uint32_t)len;
    at = store.bytes + store.left;
    memcpy(bytes, at, len);
    memset(at, 0, len);
}

uint64_t td_random_u64(void)
{
    uint64_t value = 0;
    td_random_bytes(&value, sizeof(value));
    return value;
}

/* td_clock.h - local time in nanoseconds. Deadlines are absolute and monotonic; what travels
 * between machines is the remaining time.
 * Threads: any. */
#pragma once

#include <stdint.h>

#define TD_NS_PER_US 1000ull
#define TD_NS_PER_MS 1000000ull
#define TD_NS_PER_S 1000000000ull

/** Monotonic time since an arbitrary start. Units: ns. */
uint64_t td_now_ns(void);
/** Wall-clock time. Units: seconds since 1970-01-01 UTC. */
uint64_t td_wall_s(void);
/** The same. Units: ms. */
uint64_t td_wall_ms(void);
/** Time left until a deadline, 0 when it has passed. Units: ns. */
uint64_t td_remaining_ns(uint64_t deadline_ns);
/** Fills a buffer from the kernel's random source (ids, incarnations, seeds). */
void td_random_bytes(void *bytes, unsigned long len);
uint64_t td_random_u64(void);

/* bench_recovery.h - how long a new leader of the store takes until it knows what a segment holds.
 * Threads: owner; call before the first thread (it forks). */
#pragma once

#include <stdbool.h>
#include <stdint.h>

/** A process with a segment of so many small blocks, stored under one leader; then another leads,
 * in a process of its own, and mounts the segment over the bus. Answers the median of `repeat`
 * times from the beginning of the term until every block is known and was looked up once; false
 * when anything went wrong. */
bool bench_recovery(uint32_t blocks, uint32_t repeat, double *seconds_out);

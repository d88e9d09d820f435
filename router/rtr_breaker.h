/* rtr_breaker.h - a node that fails one attempt after the other is left alone for a while, then
 * tried with one request at a time, and forgiven once one succeeds (Nygard, "Release It!", 2007,
 * "Circuit Breaker"). It goes on with what it has, and where there is no other it is asked all the
 * same. Pure: the time is passed in. Threads: any (plain values). */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#define RTR_BREAKER_FAILURES 5u /* in a row */
#define RTR_BREAKER_OPEN_MS 1000u
#define RTR_BREAKER_OPEN_MS_MAX 30000u
#define RTR_BREAKER_PROBE_MS 2000u /* for the one request: then another may try */

/** Zero-initialise. */
typedef struct rtr_breaker {
    uint32_t failures; /* in a row */
    uint64_t open_ms;  /* how long it was open for last; 0: never since it was forgiven */
    uint64_t until_ns; /* nothing is placed there before */
    bool probing;      /* one request is there to try */
} rtr_breaker_t;

bool rtr_breaker_is_open(const rtr_breaker_t *breaker, uint64_t now_ns);
/** An attempt has failed there. Answers whether that opened it. */
bool rtr_breaker_failed(rtr_breaker_t *breaker, uint64_t now_ns);
/** An attempt has succeeded there. Answers whether it had been open. */
bool rtr_breaker_succeeded(rtr_breaker_t *breaker);
/** Something is placed there: if that is a trial, others wait for what comes of it. */
void rtr_breaker_placed(rtr_breaker_t *breaker, uint64_t now_ns);

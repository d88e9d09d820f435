/* sim_random.h - numbers that a seed decides, the same on every machine. Threads: owner. */
#pragma once

#include <math.h>
#include <stdint.h>

/** 64 bits; state: any seed at first. Source: splitmix64 (Steele, Lea, Flood 2014). */
static inline uint64_t sim_random(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
}

/** Of mean 1. */
static inline double sim_random_exponential(uint64_t *state)
{
    return -log(((double)(sim_random(state) >> 11) + 0.5) / 9007199254740992.0);
}

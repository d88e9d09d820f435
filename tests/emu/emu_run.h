/* emu_run.h - the emulator as the doubles of the CUDA runtime and the tests see it; C and C++.
 * Threads: of emu_cudart.c any; what it calls runs one kernel at a time. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define EMU_DEVICES 8 /* at most, and unless something else is said */

#define EMU_EXIT_FAULT 3 /* of a process in which a kernel did what a device would not bear */

/* In which order threads of a block run between barriers. */
typedef enum emu_order {
    EMU_ORDER_ASCENDING = 0,
    EMU_ORDER_DESCENDING,
    EMU_ORDER_RANDOM
} emu_order_t;

void emu_set_order(emu_order_t wanted, uint32_t seed);

#define EMU_ERROR_KERNEL 1 /* no registered kernel has this address */
#define EMU_ERROR_SHAPE 2  /* more threads, blocks or shared memory than a device takes */
/** Can it be launched? 0, or one of the errors above. Units: param_bytes_out: of its parameter. */
int emu_check(const void *address, const unsigned grid[3], const unsigned block[3],
              size_t shared_bytes, size_t *param_bytes_out);
/** Runs a kernel, which was checked, to its end. */
void emu_launch(const void *address, const unsigned grid[3], const unsigned block[3], void *params,
                size_t shared_bytes);

/** The largest number of bytes that the doubles give out at once on each device, or on one; 0 = no
 * limit. For tests of what happens when memory runs out. */
void emu_set_memory(size_t bytes);
void emu_set_memory_of(int device, size_t bytes);
/** How many devices there are, at most EMU_DEVICES, and whether they can read each other's memory
 * once they are told to; what they were told is forgotten. Unless it is called the environment says
 * it (EMU_DEVICES, EMU_PEERS=0). */
void emu_set_devices(int count, bool peers);
/** 0: streams do only what somebody waits for; else others go on in a random order, too. */
void emu_set_streams(uint32_t seed);
/** The nth call from now on that can fail fails, and only that one; 0 = none. Answers how far away
 * the one was that the last call had asked for; 0: it was reached. For tests. */
uint32_t emu_fail_at(uint32_t nth);
/** Graphs launched since the process began. */
uint64_t emu_graphs(void);
/** Bytes given out and not freed, of all devices or of one. */
size_t emu_memory_used(void);
size_t emu_memory_used_of(int device);
/** Launches since the process began. */
uint64_t emu_launches(void);

struct CUstream_st;
/** Work of another library on a stream: run is called until it says that it is done, and the stream
 * goes no further before. It must not wait. drop is called once then, or when the stream ends. For
 * emu_nccl.c. Answers false where there is no memory; drop is not called then. */
bool emu_add_work(struct CUstream_st *stream, bool (*run)(void *ctx), void (*drop)(void *ctx),
                  void *ctx);
/** Is this the call that emu_fail_at() wants to fail? */
bool emu_fails(void);

#ifdef __cplusplus
}
#endif

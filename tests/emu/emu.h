/* emu.h - CUDA's device language on the host, for kernels that common/model/cuda/dev.h compiles
 * without nvcc: clang++ -include tests/emu/emu.h. The threads of a block are fibers of one thread
 * of the process; emu.cc runs them. What is not here does not compile, which is the point. Design:
 * tests/emu/DESIGN.md. Threads: one at a time in the process. */
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define EMU_THREADS_MAX 1024
#define EMU_WARPS_MAX (EMU_THREADS_MAX / 32)
#define EMU_SHARED_BYTES_MAX (227u * 1024)

struct emu_uint3 {
    unsigned x, y, z;
};

namespace emu
{
extern emu_uint3 thread_idx; /* of the thread that runs */
extern emu_uint3 block_idx;
extern emu_uint3 block_dim;
extern emu_uint3 grid_dim;
extern unsigned lane;
extern unsigned char *dynamic_shared;

void sync_block();
void sync_warp(unsigned mask);
/* What lane `from` of the warp has given. */
uint64_t exchange(unsigned mask, uint64_t value, unsigned from);
unsigned ballot(unsigned mask, bool value);
/* A warp's collective operation: the last lane to come runs it once for all 32. in and out are each
 * lane's own bytes, 64 at most. */
typedef void (*collective_fn)(const unsigned char (*in)[64], unsigned char (*out)[64]);
void collective(collective_fn run, const void *in, size_t in_bytes, void *out, size_t out_bytes);
/* Copies are made at the wait, so that what does not wait reads poison. */
void copy_async16(void *shared, const void *global);
void copy_commit();
void copy_wait(unsigned groups_left);

typedef void (*invoke_fn)(void **args);
struct registration {
    registration(const char *name, const void *kernel, invoke_fn invoke, size_t param_bytes);
};
template <class T> struct invoker;
template <class A> struct invoker<void (*)(A)> {
    static constexpr size_t param_bytes = sizeof(A);
    template <void (*K)(A)> static void call(void **args)
    {
        K(*static_cast<A *>(args[0]));
    }
};
template <auto K> void invoke(void **args)
{
    invoker<decltype(K)>::template call<K>(args);
}
template <auto K> constexpr size_t param_bytes = invoker<decltype(K)>::param_bytes;
template <class T> inline T shuffle(unsigned mask, T value, unsigned from)
{
    static_assert(sizeof(T) <= 8, "a shuffle moves 8 bytes at most");
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof(value));
    bits = exchange(mask, bits, from);
    memcpy(&value, &bits, sizeof(value));
    return value;
}
} // namespace emu

#define __global__
#define __device__
#define __launch_bounds__(...)
/* In a section of its own, so that it can be poisoned before every block. */
#define __shared__ static __attribute__((section("emu_shared")))
#define threadIdx (emu::thread_idx)
#define blockIdx (emu::block_idx)
#define blockDim (emu::block_dim)
#define gridDim (emu::grid_dim)
#define __syncthreads() emu::sync_block()
#define __syncwarp() emu::sync_warp(~0u)
#define __shfl_sync(mask, value, from) emu::shuffle((mask), (value), (unsigned)(from)&31u)
#define __shfl_xor_sync(mask, value, bits)                                                         \
    emu::shuffle((mask), (value), emu::lane ^ (unsigned)(bits))
#define __ballot_sync(mask, value) emu::ballot((mask), (value))

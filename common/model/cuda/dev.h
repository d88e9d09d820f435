/* dev.h - what kernels use of the device beyond plain C++: the only file with PTX, and with a twin
 * of each operation for hosts without a device (tests/emu/emu.h, which the command line includes).
 * Every operation has one result by its definition: integers are exact, fp32 operations are those
 * of IEEE 754, so what a kernel computes here is what it computes on any device. Source: PTX
 * ISA 8.5, "mma.sync" for fragments, "cp.async", and sections on rounding. */
#pragma once

#include <stdint.h>

#ifdef __CUDACC__

#include <cuda_fp16.h>

#define DEV static __device__ __forceinline__
#define DEV_KERNEL extern "C" __global__ void
#define DEV_REGISTER(name)
#define DEV_UNROLL _Pragma("unroll")
/* The block's dynamic shared memory, as an array of T. */
#define DEV_SHARED(T, name)                                                                        \
    extern __shared__ __align__(128) unsigned char dev_shared_bytes[];                             \
    T *const name = reinterpret_cast<T *>(dev_shared_bytes)

DEV unsigned dev_lane()
{
    return threadIdx.x & 31u;
}

/* Copies 16 bytes to shared memory; done when a wait says so. Both aligned to 16. */
DEV void dev_copy_async16(void *shared, const void *global)
{
    const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(at), "l"(global) : "memory");
}

DEV void dev_copy_commit()
{
    asm volatile("cp.async.commit_group;\n" ::: "memory");
}

/* This thread's copies are there, but for those of its last LEFT groups. */
template <int LEFT> DEV void dev_copy_wait()
{
    asm volatile("cp.async.wait_group %0;\n" ::"n"(LEFT) : "memory");
}

/* d[16][8] = a[16][32] * b[32][8], integers, exact; b signed or not. Of d a lane has rows lane / 4
 * and that + 8, columns 2 * (lane % 4) and that + 1; of a and b four k a register. */
template <bool B_SIGNED> DEV void dev_mma_s8(int32_t d[4], const uint32_t a[4], const uint32_t b[2])
{
    if (B_SIGNED) {
        asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, "
                     "{%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};\n"
                     : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(0));
    } else {
        asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 {%0,%1,%2,%3}, "
                     "{%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};\n"
                     : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(0));
    }
}

DEV float dev_float_from_bits(uint32_t bits)
{
    return __uint_as_float(bits);
}

DEV uint32_t dev_bits_from_float(float value)
{
    return __float_as_uint(value);
}

DEV uint64_t dev_bits_from_double(double value)
{
    return static_cast<uint64_t>(__double_as_longlong(value));
}

DEV double dev_double_from_bits(uint64_t bits)
{
    return __longlong_as_double(static_cast<long long>(bits));
}

/* Nearest, ties to even; too large becomes infinite; a NaN keeps the upper bits of its payload,
 * which the instruction would not. */
DEV uint16_t dev_half_from_float(float value)
{
    const uint32_t bits = __float_as_uint(value);

    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        return static_cast<uint16_t>((bits >> 16 & 0x8000u) | 0x7e00u | (bits >> 13 & 0x3ffu));
    }
    return __half_as_ushort(__float2half_rn(value));
}

DEV float dev_float_from_half(uint16_t half)
{
    return __half2float(__ushort_as_half(half));
}

/* Nearest integer, ties to even; a NaN gives the least, as the CPU's conversions do. */
DEV int32_t dev_round(float value)
{
    return value == value ? __float2int_rn(value) : INT32_MIN;
}

DEV unsigned dev_lowest_bit(uint32_t bits)
{
    return static_cast<unsigned>(__ffs(static_cast<int>(bits)) - 1);
}

DEV int dev_leading_zeros(uint64_t bits)
{
    return __clzll(static_cast<long long>(bits));
}

#else

#include "common/base/td_float.h"

#define DEV static inline
#define DEV_KERNEL extern "C" void
#define DEV_REGISTER(name)                                                                         \
    static const emu::registration emu_register_##name(                                            \
        #name, reinterpret_cast<const void *>(&name), &emu::invoke<&name>,                         \
        emu::param_bytes<&name>)
#define DEV_UNROLL
#define DEV_SHARED(T, name) T *const name = reinterpret_cast<T *>(emu::dynamic_shared)

struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};

DEV unsigned dev_lane()
{
    return emu::lane;
}

DEV void dev_copy_async16(void *shared, const void *global)
{
    emu::copy_async16(shared, global);
}

DEV void dev_copy_commit()
{
    emu::copy_commit();
}

template <int LEFT> DEV void dev_copy_wait()
{
    emu::copy_wait(LEFT);
}

/* The fragments of all lanes as matrices, and back. */
template <bool B_SIGNED>
static void dev_mma_s8_warp(const unsigned char (*in)[64], unsigned char (*out)[64])
{
    int32_t a[16][32];
    int32_t b[8][32];
    int32_t d[16][8];

    for (int lane = 0; lane < 32; lane++) {
        const int row = lane / 4;
        const int k = lane % 4 * 4;
        for (int i = 0; i < 4; i++) {
            a[row][k + i] = static_cast<int8_t>(in[lane][i]);
            a[row + 8][k + i] = static_cast<int8_t>(in[lane][4 + i]);
            a[row][k + 16 + i] = static_cast<int8_t>(in[lane][8 + i]);
            a[row + 8][k + 16 + i] = static_cast<int8_t>(in[lane][12 + i]);
            for (int half = 0; half < 2; half++) {
                const unsigned char byte = in[lane][16 + 4 * half + i];
                b[row][k + 16 * half + i] = B_SIGNED ? static_cast<int8_t>(byte) : byte;
            }
        }
    }
    for (int r = 0; r < 16; r++) {
        for (int c = 0; c < 8; c++) {
            int32_t sum = 0;
            for (int k = 0; k < 32; k++) {
                sum += a[r][k] * b[c][k];
            }
            d[r][c] = sum;
        }
    }
    for (int lane = 0; lane < 32; lane++) {
        const int r = lane / 4;
        const int c = lane % 4 * 2;
        const int32_t own[4] = {d[r][c], d[r][c + 1], d[r + 8][c], d[r + 8][c + 1]};
        memcpy(out[lane], own, sizeof(own));
    }
}

template <bool B_SIGNED> DEV void dev_mma_s8(int32_t d[4], const uint32_t a[4], const uint32_t b[2])
{
    uint32_t in[6] = {a[0], a[1], a[2], a[3], b[0], b[1]};
    emu::collective(dev_mma_s8_warp<B_SIGNED>, in, sizeof(in), d, 4 * sizeof(*d));
}

DEV float dev_float_from_bits(uint32_t bits)
{
    return td_float_from_bits(bits);
}

DEV uint32_t dev_bits_from_float(float value)
{
    return td_bits_from_float(value);
}

DEV uint64_t dev_bits_from_double(double value)
{
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

DEV double dev_double_from_bits(uint64_t bits)
{
    double value = 0;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

DEV uint16_t dev_half_from_float(float value)
{
    return td_f16_from_f32(value);
}

DEV float dev_float_from_half(uint16_t half)
{
    return td_f32_from_f16(half);
}

DEV int32_t dev_round(float value)
{
    return static_cast<int32_t>(lrintf(value));
}

DEV unsigned dev_lowest_bit(uint32_t bits)
{
    return static_cast<unsigned>(__builtin_ctz(bits));
}

DEV int dev_leading_zeros(uint64_t bits)
{
    return __builtin_clzll(bits);
}

#endif

#define DEV_ALL_LANES 0xffffffffu

DEV float dev_warp_max(float value)
{
    for (int bits = 16; bits > 0; bits >>= 1) {
        value = fmaxf(value, __shfl_xor_sync(DEV_ALL_LANES, value, bits));
    }
    return value;
}

DEV int32_t dev_warp_sum(int32_t value)
{
    for (int bits = 16; bits > 0; bits >>= 1) {
        value += __shfl_xor_sync(DEV_ALL_LANES, value, bits);
    }
    return value;
}

DEV uint32_t dev_warp_max_bits(uint32_t value)
{
    for (int bits = 16; bits > 0; bits >>= 1) {
        const uint32_t other = __shfl_xor_sync(DEV_ALL_LANES, value, bits);
        value = value > other ? value : other;
    }
    return value;
}

/* emu_cudart_internal.h - what the doubles of the CUDA runtime share: streams, with what they are
 * still to do (emu_streams.c), and devices with their memory and kernels (emu_cudart.c).
 * Threads: any. What is marked so is called with emu_lock(). */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cuda_runtime_api.h>

#include "tests/emu/emu_run.h"

typedef enum op_kind { OP_COPY, OP_SET, OP_LAUNCH, OP_RECORD, OP_WAIT, OP_WORK } op_kind_t;

typedef struct op {
    op_kind_t kind;
    struct op *next;
    struct CUstream_st *lane; /* in a graph: what it was asked of */
    unsigned devices;         /* whose memory it may touch, as bits */
    void *to;
    const void *from; /* of a launch: the kernel */
    size_t bytes;     /* of a launch: of shared memory; of a copy: of a row */
    size_t rows;      /* of a copy; [pitch] bytes apart */
    size_t to_pitch;
    size_t from_pitch;
    int value;
    unsigned grid[3];
    unsigned block[3];
    struct CUevent_st *event;
    uint64_t ticket;      /* of the record that is waited for */
    unsigned char *owned; /* what is copied from, or the kernel's parameter */
    size_t owned_bytes;
    bool (*run)(void *ctx); /* of another library */
    void (*drop)(void *ctx);
    void *ctx;
} op_t;

/** Guards all tables and lists of the doubles; held for no longer than a call. */
void emu_lock(void);
void emu_unlock(void);

/** Adds an op to what the stream is to do, or to the graph that is made of it.
 * Owner: op->owned is taken, also where it fails. */
cudaError_t emu_add_op(cudaStream_t stream, const op_t *op);
/** The stream, or the default one of the device that is chosen. */
struct CUstream_st *emu_stream_of(cudaStream_t stream);
int emu_stream_device(cudaStream_t stream);
bool emu_is_captured(cudaStream_t stream);
/** Does all that was asked of a stream, or of all of them. */
void emu_run_stream(struct CUstream_st *stream);
void emu_run_all(void);

cudaError_t emu_set_error(cudaError_t error);
/** Ends the process: nothing that goes on from here would be right. */
void emu_fault(const char *why);
/** The device that this thread has chosen. */
int emu_device(void);
/** Devices whose memory this one reaches, as bits. */
unsigned emu_access_of(int device);
/** Memory of these devices can be touched, and of others it cannot. */
void emu_open_memory(unsigned devices);
/** A copy that may touch the memory of these devices reads or writes at this address. */
void emu_check_reach(unsigned devices, const void *address);

/* emu_nccl.h - the double of NCCL, as tests see it. Threads: any. */
#pragma once

#include <stdint.h>

/* What goes wrong, once. EMU_NCCL_FAULT=KIND:N in the environment says so to a whole process. */
typedef enum emu_nccl_fault {
    EMU_NCCL_NONE = 0,
    EMU_NCCL_INIT_HANGS, /* the nth communicator never comes up */
    EMU_NCCL_INIT_FAILS,
    EMU_NCCL_SEND_HANGS,  /* the nth send never gets anywhere */
    EMU_NCCL_SEND_BREAKS, /* an asynchronous error in the middle of it */
    EMU_NCCL_RECV_HANGS,
    EMU_NCCL_POST_FAILS, /* the nth call of ncclSend or ncclRecv */
    EMU_NCCL_ABORT_LAGS, /* the nth abort takes until emu_nccl_goes_on() */
    EMU_NCCL_POST_LAGS,  /* the nth send or receive does, and all behind it */
    EMU_NCCL_FAULTS
} emu_nccl_fault_t;

/** nth: 1 = the next one. */
void emu_nccl_fail(emu_nccl_fault_t fault, uint32_t nth);
void emu_nccl_goes_on(void);
/** Communicators that were begun and not aborted. */
uint32_t emu_nccl_open(void);
/** Sends that were done. */
uint64_t emu_nccl_sent(void);

/* td_cuda_share.h - which part of a model each of several devices has (tensor parallelism). Every
 * matrix is cut by its outputs, never by its inputs, so each output is one chain of sums on one
 * device: the bits do not depend on how many there are. Design: common/model/cuda/DESIGN.md,
 * "Several devices". Threads: any. */
#pragma once

#include "common/model/td_model.h"

/** Outputs, heads or elements [begin, end); empty where there are fewer than devices. */
typedef struct td_cuda_range {
    uint32_t begin;
    uint32_t end;
} td_cuda_range_t;

/** One device's part. The units are what may not be cut: a KV head, a group of 32 elements of the
 * feed-forward (they share a scale), a pair of panels of 16 outputs. */
typedef struct td_cuda_share {
    td_cuda_range_t kv_heads;
    td_cuda_range_t heads; /* those of its KV heads */
    td_cuda_range_t ff;    /* elements of gate and up */
    td_cuda_range_t embed; /* outputs of o and down */
    td_cuda_range_t vocab; /* rows of embedding and head */
} td_cuda_share_t;

static inline uint32_t td_cuda_width(td_cuda_range_t range)
{
    return range.end - range.begin;
}

/** The share of device `rank` of `ranks`, 1 <= ranks <= KV heads. The last one has the most KV
 * heads. */
td_cuda_share_t td_cuda_share_of(const td_model_info_t *info, uint32_t rank, uint32_t ranks);

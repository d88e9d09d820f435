/* What several devices have of a row each, brought together on all of them: read from the others'
 * memory, or from copies of it where a device cannot read that. */
#include "common/model/cuda/td_cuda_math.cuh"

#define THREADS 128u

/* A thread is an element, a warp a group. */
DEV_KERNEL __launch_bounds__(THREADS, 1) td_cuda_gather(const td_cuda_gather_t p)
{
    const uint32_t row = blockIdx.x;
    const uint32_t i = blockIdx.y * THREADS + threadIdx.x;
    float value = 0;

    if (i < p.dim) {
        const uint32_t at = p.tokens == nullptr ? i : p.tokens[row];
        for (uint32_t s = 0; s < p.count; s++) {
            const td_cuda_piece_t &piece = p.pieces[s];
            const uint32_t inside = at - piece.begin; /* wraps around before it */
            if (inside < piece.width) {
                value = p.tokens == nullptr ? piece.from[(size_t)row * piece.width + inside]
                                            : piece.from[(size_t)row * p.dim + i];
            }
        }
        if (p.out != nullptr) {
            p.out[(size_t)row * p.dim + i] = value;
        }
    }
    /* Groups are whole wherever something is quantised. */
    if (is_quantised(p.quantise) && i / TD_CUDA_GROUP < p.dim / TD_CUDA_GROUP) {
        quantise_element(p.quantise, row, i / TD_CUDA_GROUP, value);
    }
}
DEV_REGISTER(td_cuda_gather);

#define WORD 4u /* elements of a thread */

/* A thread has four elements, and the scale and sum of a group that begins there. */
DEV_KERNEL __launch_bounds__(THREADS, 1) td_cuda_gather_acts(const td_cuda_gather_acts_t p)
{
    const uint32_t row = blockIdx.x;
    const uint32_t i = (blockIdx.y * THREADS + threadIdx.x) * WORD;
    const size_t to = (size_t)row * p.out.stride + i;

    if (i >= p.dim) {
        return;
    }
    for (uint32_t s = 0; s < p.count; s++) {
        const td_cuda_acts_t &acts = p.pieces[s].acts;
        const uint32_t inside = i - p.pieces[s].begin; /* wraps around before it */
        const size_t from = (size_t)row * acts.stride + inside;
        if (inside >= acts.stride) {
            continue;
        }
        *reinterpret_cast<uint32_t *>(p.out.high + to) =
            *reinterpret_cast<const uint32_t *>(acts.high + from);
        if (p.wide != 0) {
            *reinterpret_cast<uint32_t *>(p.out.low + to) =
                *reinterpret_cast<const uint32_t *>(acts.low + from);
        }
        if (i % TD_CUDA_GROUP == 0) {
            p.out.scale[to / TD_CUDA_GROUP] = acts.scale[from / TD_CUDA_GROUP];
            p.out.sum[to / TD_CUDA_GROUP] = acts.sum[from / TD_CUDA_GROUP];
        }
    }
}
DEV_REGISTER(td_cuda_gather_acts);

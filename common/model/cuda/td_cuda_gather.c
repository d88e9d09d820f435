/* Between the devices of a model: who waits for whom, and how one gets what the others have. A
 * phase of a pass ends with an event on every rank, and the next one begins behind all of them. */
#include "common/base/td_base.h"
#include "common/base/td_log.h"
#include "common/model/cuda/td_cuda_device.h"

/* --- connecting ------------------------------------------------------------------------------- */

/* Can kernels of this rank read the other's memory? */
static td_status_t connect(const td_cuda_rank_t *rank, const td_cuda_rank_t *peer, bool *reads_out)
{
    int can = 0;
    cudaError_t error = cudaSuccess;

    if (rank->index == peer->index) {
        *reads_out = true; /* it is its own */
        return TD_OK;
    }
    TD_TRY(td_cuda_check(cudaDeviceCanAccessPeer(&can, rank->index, peer->index),
                         "cudaDeviceCanAccessPeer"));
    if (can != 0) {
        error = cudaDeviceEnablePeerAccess(peer->index, 0);
        if (error == cudaErrorPeerAccessAlreadyEnabled) {
            (void)cudaGetLastError(); /* by a model that was loaded before */
            error = cudaSuccess;
        }
        TD_TRY(td_cuda_check(error, "cudaDeviceEnablePeerAccess"));
    }
    *reads_out = can != 0;
    return TD_OK;
}

static uint32_t widest_piece(const td_cuda_rank_t *peer, const td_model_t *m)
{
    return TD_MAX(TD_MAX(td_cuda_width(peer->share.heads) * m->info.kv.head_dim,
                         td_cuda_width(peer->share.ff)),
                  m->info.embed_dim);
}

td_status_t td_cuda_connect(td_model_device_t *d, const td_model_t *m)
{
    for (uint32_t r = 0; r < d->rank_count; r++) {
        td_cuda_rank_t *rank = &d->ranks[r];
        TD_TRY(td_cuda_rank_choose(rank));
        for (uint32_t s = 0; s < d->rank_count; s++) {
            const td_cuda_rank_t *peer = &d->ranks[s];
            TD_TRY(connect(rank, peer, &rank->reads[s]));
            if (!rank->reads[s]) {
                TD_LOG_WARN("a device cannot read another's memory: it gets copies",
                            "device=%d other=%d", rank->index, peer->index);
                TD_TRY(td_cuda_take(
                    rank, (size_t)m->options.rows_max * widest_piece(peer, m) * sizeof(float),
                    "copies of what another device has", &rank->arrived[s]));
            }
        }
    }
    return TD_OK;
}

/* --- phases ----------------------------------------------------------------------------------- */

td_status_t td_cuda_phase(td_model_device_t *d, const td_model_t *m, td_cuda_phase_fn fn,
                          uint32_t layer)
{
    const bool alone = d->rank_count == 1;

    for (uint32_t r = 0; r < d->rank_count; r++) {
        td_cuda_rank_t *rank = &d->ranks[r];
        if (!alone) {
            TD_TRY(td_cuda_rank_choose(rank));
        }
        for (uint32_t s = 0; d->phases > 0 && s < d->rank_count; s++) {
            if (s != r) {
                TD_TRY(td_cuda_check(
                    cudaStreamWaitEvent(rank->compute, d->ranks[s].ready[d->turn ^ 1], 0),
                    "cudaStreamWaitEvent"));
            }
        }
        TD_TRY(fn(d, rank, m, layer));
        if (!alone) {
            TD_TRY(td_cuda_check(cudaEventRecord(rank->ready[d->turn], rank->compute),
                                 "cudaEventRecord"));
        }
    }
    d->turn ^= 1;
    d->phases++;
    return TD_OK;
}

/* --- gathering -------------------------------------------------------------------------------- */

static td_cuda_piece_t piece_of(const td_cuda_rank_t *rank, const td_model_t *m,
                                td_cuda_gathered_t what)
{
    const td_cuda_share_t *share = &rank->share;
    const uint32_t head_dim = m->info.kv.head_dim;

    switch (what) {
    case TD_CUDA_EMBEDDED:
        return (td_cuda_piece_t){rank->y_own, share->vocab.begin, td_cuda_width(share->vocab)};
    case TD_CUDA_ATTENDED:
        return (td_cuda_piece_t){rank->attn, share->heads.begin * head_dim,
                                 td_cuda_width(share->heads) * head_dim};
    case TD_CUDA_ADDED:
        return (td_cuda_piece_t){rank->y_own, share->embed.begin, td_cuda_width(share->embed)};
    default:
        return (td_cuda_piece_t){rank->gate, share->ff.begin, td_cuda_width(share->ff)};
    }
}

td_status_t td_cuda_gather_rows(const td_model_device_t *d, const td_cuda_rank_t *rank,
                                const td_model_t *m, td_cuda_gathered_t what, uint32_t rows,
                                float *out, const td_cuda_quantise_t *quantise)
{
    td_cuda_gather_t p = {
        .count = d->rank_count,
        .dim = what == TD_CUDA_ATTENDED ? m->q_dim
               : what == TD_CUDA_GATED  ? m->info.ff_dim
                                        : m->info.embed_dim,
        .tokens = what == TD_CUDA_EMBEDDED ? rank->pass.tokens : NULL,
        .out = out,
    };

    if (d->rank_count == 1) {
        return TD_OK;
    }
    if (quantise != NULL) {
        p.quantise = *quantise;
    }
    for (uint32_t s = 0; s < d->rank_count; s++) {
        const td_cuda_rank_t *peer = &d->ranks[s];
        const size_t width = what == TD_CUDA_EMBEDDED ? p.dim : piece_of(peer, m, what).width;
        p.pieces[s] = piece_of(peer, m, what);
        if (rank->reads[s] || width == 0) {
            continue;
        }
        TD_TRY(td_cuda_check(cudaMemcpyPeerAsync(rank->arrived[s], rank->index, p.pieces[s].from,
                                                 peer->index, rows * width * sizeof(float),
                                                 rank->compute),
                             "cudaMemcpyPeerAsync"));
        p.pieces[s].from = rank->arrived[s];
    }
    return td_cuda_launch_gather(rank->compute, &p, rows);
}

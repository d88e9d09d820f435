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

td_status_t td_cuda_join(td_model_device_t *d, uint32_t which)
{
    for (uint32_t r = 1; r < d->rank_count; r++) {
        const td_cuda_rank_t *rank = &d->ranks[r];
        TD_TRY(
            td_cuda_check(cudaEventRecord(rank->joined[which], rank->compute), "cudaEventRecord"));
        TD_TRY(td_cuda_check(cudaStreamWaitEvent(d->ranks[0].compute, rank->joined[which], 0),
                             "cudaStreamWaitEvent"));
    }
    return TD_OK;
}

td_status_t td_cuda_fork(td_model_device_t *d)
{
    const td_cuda_rank_t *first = &d->ranks[0];

    if (d->rank_count > 1) {
        TD_TRY(td_cuda_check(cudaEventRecord(first->joined[0], first->compute), "cudaEventRecord"));
    }
    for (uint32_t r = 1; r < d->rank_count; r++) {
        TD_TRY(td_cuda_check(cudaStreamWaitEvent(d->ranks[r].compute, first->joined[0], 0),
                             "cudaStreamWaitEvent"));
    }
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

static uint32_t dim_of(const td_model_t *m, td_cuda_gathered_t what)
{
    return what == TD_CUDA_ATTENDED ? m->q_dim
           : what == TD_CUDA_GATED  ? m->info.ff_dim
                                    : m->info.embed_dim;
}

/* Bytes of another rank's memory: where kernels of this one can read them. */
static td_status_t reach(const td_model_device_t *d, const td_cuda_rank_t *rank, uint32_t peer,
                         const void *from, size_t bytes, const void **out)
{
    if (rank->reads[peer] || bytes == 0) {
        *out = from;
        return TD_OK;
    }
    *out = rank->arrived[peer];
    return td_cuda_check(cudaMemcpyPeerAsync(rank->arrived[peer], rank->index, from,
                                             d->ranks[peer].index, bytes, rank->compute),
                         "cudaMemcpyPeerAsync");
}

td_status_t td_cuda_gather_rows(const td_model_device_t *d, const td_cuda_rank_t *rank,
                                const td_model_t *m, td_cuda_gathered_t what, uint32_t rows,
                                float *out, const td_cuda_quantise_t *quantise)
{
    td_cuda_gather_t p = {
        .count = d->rank_count,
        .dim = dim_of(m, what),
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
        const td_cuda_piece_t piece = piece_of(&d->ranks[s], m, what);
        const size_t width = what == TD_CUDA_EMBEDDED && piece.width > 0 ? p.dim : piece.width;
        const void *from = NULL;
        TD_TRY(reach(d, rank, s, piece.from, rows * width * sizeof(float), &from));
        p.pieces[s] = piece;
        p.pieces[s].from = from;
    }
    return td_cuda_launch_gather(rank->compute, &p, rows);
}

/* A group of 32 has one scale: it must not be two ranks'. */
static bool has_whole_groups(const td_model_device_t *d, const td_model_t *m,
                             td_cuda_gathered_t what, const td_cuda_matrix_t *user)
{
    for (uint32_t s = 0; s < d->rank_count; s++) {
        const td_cuda_piece_t piece = piece_of(&d->ranks[s], m, what);
        if (piece.begin % TD_CUDA_GROUP != 0 || piece.width % TD_CUDA_GROUP != 0) {
            return false;
        }
    }
    return user->form <= TD_CUDA_BYTE;
}

/* Its part of the pass's rows, in the order of the planes: low bytes are last, since int8 ones have
 * none. */
static td_cuda_acts_t own_acts(uint8_t *base, uint32_t rows, uint32_t width)
{
    const size_t elements = (size_t)rows * width;
    const size_t groups = elements / TD_CUDA_GROUP;

    return (td_cuda_acts_t){
        .high = (int8_t *)base,
        .scale = (float *)(void *)(base + elements),
        .sum = (float *)(void *)(base + elements + groups * sizeof(float)),
        .low = base + elements + 2 * groups * sizeof(float),
        .stride = width,
    };
}

td_cuda_quantise_t td_cuda_quantise_own(const td_model_device_t *d, const td_cuda_rank_t *rank,
                                        const td_model_t *m, td_cuda_gathered_t what,
                                        const td_cuda_matrix_t *user)
{
    td_cuda_quantise_t to = {.limit16 = m->limit16};

    if (d->rank_count == 1) {
        return td_cuda_quantise_for(rank, m, user->inputs, &user, 1);
    }
    if (has_whole_groups(d, m, what, user)) {
        *(user->wide ? &to.int16 : &to.int8) =
            own_acts(rank->acts_own, m->pass.row_count, piece_of(rank, m, what).width);
    }
    return to;
}

td_status_t td_cuda_gather_input(const td_model_device_t *d, const td_cuda_rank_t *rank,
                                 const td_model_t *m, td_cuda_gathered_t what,
                                 const td_cuda_matrix_t *user, float *f32_out)
{
    const uint32_t rows = m->pass.row_count;
    td_cuda_gather_acts_t p = {
        .count = d->rank_count,
        .dim = dim_of(m, what),
        .wide = user->wide,
        .out = td_cuda_acts_of(user->wide ? &rank->acts16 : &rank->acts8, user->inputs),
    };

    if (d->rank_count == 1) {
        return TD_OK;
    }
    if (!has_whole_groups(d, m, what, user)) {
        const td_cuda_quantise_t quantise = td_cuda_quantise_for(rank, m, user->inputs, &user, 1);
        return td_cuda_gather_rows(d, rank, m, what, rows,
                                   user->form > TD_CUDA_BYTE ? f32_out : NULL, &quantise);
    }
    for (uint32_t s = 0; s < d->rank_count; s++) {
        const td_cuda_piece_t piece = piece_of(&d->ranks[s], m, what);
        const void *from = NULL;
        uint8_t *base = NULL;
        TD_TRY(reach(d, rank, s, d->ranks[s].acts_own,
                     td_cuda_own_acts_bytes(rows, piece.width, user->wide != 0), &from));
        memcpy(&base, &from, sizeof(from)); /* it is only read */
        p.pieces[s] = (td_cuda_acts_piece_t){own_acts(base, rows, piece.width), piece.begin};
    }
    return td_cuda_launch_gather_acts(rank->compute, &p, rows);
}

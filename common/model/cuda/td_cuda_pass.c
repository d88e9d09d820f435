/* A pass, top to bottom: what is launched, what travels, and who is told. */
#include "common/base/td_base.h"
#include "common/base/td_log.h"
#include "common/model/cuda/td_cuda_device.h"

td_cuda_acts_t td_cuda_acts_of(const td_cuda_acts_t *buffer, uint32_t dim)
{
    const uint32_t step = TD_CUDA_CHUNK * TD_CUDA_GROUP;
    td_cuda_acts_t acts = *buffer;

    acts.stride = (dim + step - 1) / step * step;
    return acts;
}

/* What the products of these matrices read. */
td_cuda_quantise_t td_cuda_quantise_for(const td_cuda_rank_t *rank, const td_model_t *m,
                                        uint32_t dim, const td_cuda_matrix_t *const *users,
                                        size_t count)
{
    td_cuda_quantise_t to = {.limit16 = m->limit16};

    for (size_t i = 0; i < count; i++) {
        if (users[i]->form > TD_CUDA_BYTE) {
            continue;
        }
        if (users[i]->wide) {
            to.int16 = td_cuda_acts_of(&rank->acts16, dim);
        } else {
            to.int8 = td_cuda_acts_of(&rank->acts8, dim);
        }
    }
    return to;
}

/* Products that read the same rows: one launch for each run of matrices of one form. */
static td_status_t products(const td_cuda_rank_t *rank, const td_cuda_matrix_t *const *matrices,
                            float *const *y, size_t count, const float *f32, uint32_t rows)
{
    for (size_t begin = 0; begin < count;) {
        td_cuda_product_t p = {.rows = rows, .f32 = f32, .f32_stride = matrices[begin]->inputs};
        p.acts = td_cuda_acts_of(matrices[begin]->wide ? &rank->acts16 : &rank->acts8,
                                 matrices[begin]->inputs);
        while (begin < count && p.count < TD_CUDA_PRODUCTS_MAX &&
               (p.count == 0 ||
                (matrices[begin]->form == p.w[0].form && matrices[begin]->wide == p.w[0].wide))) {
            p.w[p.count] = *matrices[begin];
            p.y[p.count++] = y[begin++];
        }
        TD_TRY(td_cuda_launch_product(rank->compute, &p));
    }
    return TD_OK;
}

/* --- phases: what each rank launches between two gathers ----------------------------------------
 */

static td_status_t norm(const td_cuda_rank_t *rank, const td_model_t *m, const float *weight,
                        bool add, const td_cuda_matrix_t *const *users, size_t count)
{
    const td_cuda_norm_t p = {
        .x = rank->x,
        .y = add ? rank->y : NULL,
        .weight = weight,
        .out = rank->normed,
        .dim = m->info.embed_dim,
        .eps = m->norm_eps,
        .quantise = td_cuda_quantise_for(rank, m, m->info.embed_dim, users, count),
    };
    return td_cuda_launch_norm(rank->compute, &p, m->pass.row_count);
}

static td_status_t attend(const td_model_device_t *d, const td_cuda_rank_t *rank,
                          const td_model_t *m, uint32_t layer)
{
    const td_attention_mask_t *mask = &m->info.attention;
    td_cuda_attention_t p = {
        .kv = td_cuda_kv_of(&rank->kv, rank->pool),
        .mask = {(uint32_t)mask->kind, mask->local, mask->sinks, mask->stride, mask->summary},
        .tables = rank->pass.tables,
        .q = rank->q,
        .out = rank->attn,
        .parts = d->split ? rank->parts : NULL,
        .layer = layer,
        .heads = td_cuda_width(rank->share.heads),
        .group = m->info.heads / m->info.kv.kv_heads,
        .scale = m->attn_scale,
    };
    const td_cuda_merge_t merge = {
        .parts = p.parts,
        .part_begin = rank->pass.part_begin,
        .part_count = rank->pass.part_count,
        .attn = rank->attn,
        .heads = p.heads,
        .head_dim = m->info.kv.head_dim,
        .quantise = td_cuda_quantise_own(d, rank, m, TD_CUDA_ATTENDED, &rank->layers[layer].o),
    };

    p.items = rank->pass.many;
    TD_TRY(td_cuda_launch_attention(rank->compute, true, &p, d->many_count));
    p.items = rank->pass.few;
    TD_TRY(td_cuda_launch_attention(rank->compute, false, &p, d->few_count));
    if (!d->split && merge.quantise.int8.high == NULL && merge.quantise.int16.high == NULL) {
        return TD_OK;
    }
    return td_cuda_launch_merge(rank->compute, &merge, m->pass.row_count);
}

static td_status_t embed(const td_model_device_t *d, td_cuda_rank_t *rank, const td_model_t *m,
                         uint32_t layer)
{
    const td_cuda_embed_t p = {
        .w = rank->embed,
        .first = rank->share.vocab.begin,
        .tokens = rank->pass.tokens,
        .x = d->rank_count == 1 ? rank->x : rank->y_own,
    };

    (void)layer;
    return td_cuda_launch_embed(rank->compute, &p, m->pass.row_count);
}

/* The residual stream of a block that ends, or the embeddings. */
static td_status_t gather_stream(const td_model_device_t *d, const td_cuda_rank_t *rank,
                                 const td_model_t *m, bool first)
{
    return td_cuda_gather_rows(d, rank, m, first ? TD_CUDA_EMBEDDED : TD_CUDA_ADDED,
                               m->pass.row_count, first ? rank->x : rank->y, NULL);
}

/* From the residual stream to the rank's heads of the attention's output. */
static td_status_t attention(const td_model_device_t *d, td_cuda_rank_t *rank, const td_model_t *m,
                             uint32_t layer)
{
    const td_cuda_layer_t *l = &rank->layers[layer];
    const td_cuda_matrix_t *const qkv[] = {&l->q, &l->k, &l->v};
    float *const out[] = {rank->q, rank->k, rank->v};
    const td_cuda_place_t place = {
        .kv = td_cuda_kv_of(&rank->kv, rank->pool),
        .q = rank->q,
        .k = rank->k,
        .v = rank->v,
        .rope = rank->pass.rope,
        .slot = rank->pass.slots,
        .blocks = rank->pass.blocks,
        .blocks_begin = rank->pass.blocks_begin,
        .host = td_cuda_kv_of(&m->info.kv, rank->mapped),
        .host_blocks = rank->pass.host_blocks,
        .host_head = rank->share.kv_heads.begin,
        .layer = layer,
        .heads = td_cuda_width(rank->share.heads),
        .rope_dim = m->rope_dim,
    };

    TD_TRY(gather_stream(d, rank, m, layer == 0));
    TD_TRY(norm(rank, m, l->attn_norm, layer > 0, qkv, TD_ARRAY_LEN(qkv)));
    TD_TRY(products(rank, qkv, out, TD_ARRAY_LEN(qkv), rank->normed, m->pass.row_count));
    TD_TRY(td_cuda_launch_place(rank->compute, &place, m->pass.row_count));
    return attend(d, rank, m, layer);
}

/* The rank's share of what a block adds to the residual stream, from what all have made. */
static td_status_t block_output(const td_model_device_t *d, td_cuda_rank_t *rank,
                                const td_model_t *m, td_cuda_gathered_t what,
                                const td_cuda_matrix_t *matrix, float *all)
{
    float *const y[] = {rank->y_own};

    TD_TRY(td_cuda_gather_input(d, rank, m, what, matrix, all));
    return products(rank, &matrix, y, 1, all, m->pass.row_count);
}

static td_status_t attention_output(const td_model_device_t *d, td_cuda_rank_t *rank,
                                    const td_model_t *m, uint32_t layer)
{
    return block_output(d, rank, m, TD_CUDA_ATTENDED, &rank->layers[layer].o, rank->attn_all);
}

/* From the residual stream to the rank's share of the feed-forward's elements. */
static td_status_t feed_forward(const td_model_device_t *d, td_cuda_rank_t *rank,
                                const td_model_t *m, uint32_t layer)
{
    const td_cuda_layer_t *l = &rank->layers[layer];
    const td_cuda_matrix_t *const users[] = {&l->gate, &l->up};
    float *const out[] = {rank->gate, rank->up};
    const td_cuda_swiglu_t swiglu = {
        .gate = rank->gate,
        .up = rank->up,
        .dim = td_cuda_width(rank->share.ff),
        .quantise = td_cuda_quantise_own(d, rank, m, TD_CUDA_GATED, &l->down),
    };

    TD_TRY(gather_stream(d, rank, m, false));
    TD_TRY(norm(rank, m, l->ffn_norm, true, users, TD_ARRAY_LEN(users)));
    TD_TRY(products(rank, users, out, TD_ARRAY_LEN(users), rank->normed, m->pass.row_count));
    return td_cuda_launch_swiglu(rank->compute, &swiglu, m->pass.row_count);
}

static td_status_t feed_forward_output(const td_model_device_t *d, td_cuda_rank_t *rank,
                                       const td_model_t *m, uint32_t layer)
{
    return block_output(d, rank, m, TD_CUDA_GATED, &rank->layers[layer].down, rank->gate_all);
}

/* Each rank has its part of the vocabulary; hidden states are the same on all. */
static td_status_t output_head(const td_model_device_t *d, td_cuda_rank_t *rank,
                               const td_model_t *m, uint32_t layer)
{
    const td_cuda_matrix_t *const head[] = {&rank->head};
    float *const logits[] = {rank->logits};
    const uint32_t count = m->pass.logit_count;
    const size_t width = td_cuda_width(rank->share.vocab) * sizeof(float);
    const td_cuda_norm_t p = {
        .x = rank->x,
        .y = rank->y,
        .weight = rank->output_norm,
        .pick = rank->pass.pick,
        .out = rank->normed,
        .dim = m->info.embed_dim,
        .eps = m->norm_eps,
        .quantise = td_cuda_quantise_for(rank, m, m->info.embed_dim, head, 1),
    };

    (void)layer;
    if (count == 0) {
        return TD_OK;
    }
    TD_TRY(gather_stream(d, rank, m, false));
    TD_TRY(td_cuda_launch_norm(rank->compute, &p, count));
    TD_TRY(products(rank, head, logits, 1, rank->normed, count));
    if (rank == d->ranks) {
        TD_TRY(td_cuda_check(cudaMemcpyAsync(m->normed, rank->normed,
                                             (size_t)count * m->info.embed_dim * sizeof(*m->normed),
                                             cudaMemcpyDeviceToHost, rank->compute),
                             "cudaMemcpyAsync"));
    }
    if (width == 0) {
        return TD_OK;
    }
    return td_cuda_check(cudaMemcpy2DAsync(m->logits + rank->share.vocab.begin,
                                           m->info.vocab_size * sizeof(*m->logits), rank->logits,
                                           width, width, count, cudaMemcpyDeviceToHost,
                                           rank->compute),
                         "cudaMemcpy2DAsync");
}

/* --- KV on its way to the host -----------------------------------------------------------------
 */

/* Layers [begin, end) of the blocks that the pass writes, to the host, once they are computed.
 * Where kernels write the host's blocks themselves they are there already. */
static td_status_t send_layers(const td_model_device_t *d, const td_cuda_rank_t *rank,
                               const td_model_t *m, uint32_t begin, uint32_t end, uint32_t turn)
{
    const td_kv_layout_t *kv = &m->info.kv;
    const uint32_t *blocks = d->host.host_blocks;

    TD_TRY(td_cuda_check(cudaEventRecord(rank->computed[turn], rank->compute), "cudaEventRecord"));
    TD_TRY(td_cuda_check(cudaStreamWaitEvent(rank->out, rank->computed[turn], 0),
                         "cudaStreamWaitEvent"));
    for (uint32_t i = 0; !d->mapped && i < d->written_count; i++) {
        if (i + 1 < d->written_count && blocks[i] == blocks[i + 1]) {
            continue; /* rows of a block follow each other: it is sent with the last one */
        }
        TD_TRY(td_cuda_copy_heads(rank, kv, m->pass.pool + blocks[i] * td_kv_block_bytes(kv),
                                  d->host.blocks[i], begin, end, true, rank->out));
    }
    return td_cuda_check(cudaEventRecord(rank->left[turn], rank->out), "cudaEventRecord");
}

static td_status_t report_layers(const td_model_device_t *d, const td_model_t *m, uint32_t begin,
                                 uint32_t end, uint32_t turn)
{
    for (uint32_t r = 0; r < d->rank_count; r++) {
        TD_TRY(td_cuda_check(cudaEventSynchronize(d->ranks[r].left[turn]), "cudaEventSynchronize"));
    }
    if (m->pass.on_layers != NULL) {
        m->pass.on_layers(m->pass.ctx, begin, end);
    }
    return TD_OK;
}

/* --- a pass ----------------------------------------------------------------------------------- */

/* The devices and the model that they run a pass of. */
typedef struct pass_launch {
    td_model_device_t *d;
    const td_model_t *m;
} pass_launch_t;

static td_status_t layers(td_model_device_t *d, const td_model_t *m, uint32_t begin, uint32_t end)
{
    for (uint32_t layer = begin; layer < end; layer++) {
        TD_TRY(td_cuda_phase(d, m, attention, layer));
        TD_TRY(td_cuda_phase(d, m, attention_output, layer));
        TD_TRY(td_cuda_phase(d, m, feed_forward, layer));
        TD_TRY(td_cuda_phase(d, m, feed_forward_output, layer));
    }
    return TD_OK;
}

/* The kernels of a whole pass, and what it hands out. It begins and ends on the first rank's
 * stream, so that all of it can be kept as one graph. */
static td_status_t launch_pass(void *ctx)
{
    const pass_launch_t *p = ctx;

    p->d->phases = 0;
    TD_TRY(td_cuda_fork(p->d));
    TD_TRY(td_cuda_phase(p->d, p->m, embed, 0));
    TD_TRY(layers(p->d, p->m, 0, p->m->pass.layers));
    TD_TRY(td_cuda_phase(p->d, p->m, output_head, 0));
    TD_TRY(td_cuda_join(p->d, 1));
    return p->d->rank_count == 1 ? TD_OK : td_cuda_rank_choose(&p->d->ranks[0]);
}

/* Nobody waits for layers, and nothing is copied behind them: all of it at once. */
static bool is_kept(const td_model_device_t *d, const td_model_t *m)
{
    return m->pass.on_layers == NULL && d->mapped && d->pinned[0] != NULL && d->pinned[1] != NULL &&
           m->pass.row_count <= TD_CUDA_GRAPH_ROWS_MAX;
}

/* A step of layers after the other; what is announced of one leaves while the next is computed. */
static td_status_t run_steps(td_model_device_t *d, const td_model_t *m)
{
    const td_model_pass_t *p = &m->pass;
    const uint32_t step = p->layers_step == 0 ? p->layers : p->layers_step;
    uint32_t turn = 0;
    uint32_t begin = 0;

    d->phases = 0;
    TD_TRY(td_cuda_phase(d, m, embed, 0));
    for (; begin < p->layers; begin += step, turn ^= 1) {
        const uint32_t end = TD_MIN(begin + step, p->layers);
        TD_TRY(layers(d, m, begin, end));
        for (uint32_t r = 0; r < d->rank_count; r++) {
            TD_TRY(send_layers(d, &d->ranks[r], m, begin, end, turn));
        }
        if (begin > 0) {
            TD_TRY(report_layers(d, m, begin - step, begin, turn ^ 1));
        }
    }
    TD_TRY(td_cuda_phase(d, m, output_head, 0));
    return report_layers(d, m, begin - step, p->layers, turn ^ 1);
}

static td_status_t run_pass(td_model_device_t *d, const td_model_t *m)
{
    /* The tables are last: only what there is of them. */
    const size_t bytes = (size_t)((uint8_t *)(d->host.tables + d->table_count) - d->pass_host);
    const td_cuda_shape_t shape = {
        .rows = m->pass.row_count,
        .few_items = d->few_count,
        .many_items = d->many_count,
        .logit_rows = m->pass.logit_count,
        .layers = m->pass.layers,
        .split = d->split ? 1 : 0,
    };
    pass_launch_t launch = {d, m};

    for (uint32_t r = 0; r < d->rank_count; r++) {
        TD_TRY(td_cuda_check(cudaMemcpyAsync(d->ranks[r].pass_device, d->pass_host, bytes,
                                             cudaMemcpyHostToDevice, d->ranks[r].compute),
                             "cudaMemcpyAsync"));
    }
    if (is_kept(d, m)) {
        TD_TRY(td_cuda_join(d, 0)); /* the plan is on every device */
        TD_TRY(td_cuda_graphs_run(&d->graphs, d->ranks[0].compute, &shape, launch_pass, &launch));
    } else {
        TD_TRY(run_steps(d, m));
    }
    for (uint32_t r = 0; r < d->rank_count; r++) {
        TD_TRY(td_cuda_check(cudaStreamSynchronize(d->ranks[r].compute), "cudaStreamSynchronize"));
    }
    return TD_OK;
}

/* What was under way is let end. Which device it is that fails shows here. */
static void settle(const td_cuda_rank_t *rank)
{
    const cudaStream_t streams[] = {rank->compute, rank->out};

    for (size_t i = 0; i < TD_ARRAY_LEN(streams); i++) {
        const cudaError_t error = cudaStreamSynchronize(streams[i]);
        if (error != cudaSuccess) {
            (void)cudaGetLastError();
            TD_LOG_ERROR("device failed", "device=%d error=%s", rank->index,
                         cudaGetErrorName(error));
            return;
        }
    }
}

td_status_t td_cuda_forward(td_model_device_t *d, td_model_t *m)
{
    td_status_t status = TD_OK;

    TD_TRY(td_cuda_rank_choose(&d->ranks[0]));
    status = td_cuda_plan(d, m);
    if (status == TD_OK) {
        status = run_pass(d, m);
    }
    if (status != TD_OK) {
        for (uint32_t r = 0; r < d->rank_count; r++) {
            settle(&d->ranks[r]);
        }
        td_cuda_mirror_forget_all(d->mirror); /* no copy is trusted */
    }
    td_cuda_mirror_end(d->mirror);
    return status;
}

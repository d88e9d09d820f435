/* A pass, top to bottom: what is launched, what travels, and who is told. */
#include "common/base/td_base.h"
#include "common/model/cuda/td_cuda_device.h"

td_cuda_acts_t td_cuda_acts_of(const td_cuda_acts_t *buffer, uint32_t dim)
{
    const uint32_t step = TD_CUDA_CHUNK * TD_CUDA_GROUP;
    td_cuda_acts_t acts = *buffer;

    acts.stride = (dim + step - 1) / step * step;
    return acts;
}

/* What the products of these matrices read. */
td_cuda_quantise_t td_cuda_quantise_for(const td_model_device_t *d, const td_model_t *m,
                                        uint32_t dim, const td_cuda_matrix_t *const *users,
                                        size_t count)
{
    td_cuda_quantise_t to = {.limit16 = m->limit16};

    for (size_t i = 0; i < count; i++) {
        if (users[i]->form > TD_CUDA_BYTE) {
            continue;
        }
        if (users[i]->wide) {
            to.int16 = td_cuda_acts_of(&d->acts16, dim);
        } else {
            to.int8 = td_cuda_acts_of(&d->acts8, dim);
        }
    }
    return to;
}

/* Products that read the same rows: one launch for each run of matrices of one form. */
static td_status_t products(const td_model_device_t *d, const td_cuda_matrix_t *const *matrices,
                            float *const *y, size_t count, const float *f32, uint32_t rows)
{
    for (size_t begin = 0; begin < count;) {
        td_cuda_product_t p = {.rows = rows, .f32 = f32, .f32_stride = matrices[begin]->inputs};
        p.acts = td_cuda_acts_of(matrices[begin]->wide ? &d->acts16 : &d->acts8,
                                 matrices[begin]->inputs);
        while (begin < count && p.count < TD_CUDA_PRODUCTS_MAX &&
               (p.count == 0 ||
                (matrices[begin]->form == p.w[0].form && matrices[begin]->wide == p.w[0].wide))) {
            p.w[p.count] = *matrices[begin];
            p.y[p.count++] = y[begin++];
        }
        TD_TRY(td_cuda_launch_product(d->compute, &p));
    }
    return TD_OK;
}

static td_status_t norm(const td_model_device_t *d, const td_model_t *m, const float *weight,
                        bool add, const td_cuda_matrix_t *const *users, size_t count)
{
    const td_cuda_norm_t p = {
        .x = d->x,
        .y = add ? d->y : NULL,
        .weight = weight,
        .out = d->normed,
        .dim = m->info.embed_dim,
        .eps = m->norm_eps,
        .quantise = td_cuda_quantise_for(d, m, m->info.embed_dim, users, count),
    };
    return td_cuda_launch_norm(d->compute, &p, m->pass.row_count);
}

static td_status_t attend(const td_model_device_t *d, const td_model_t *m, uint32_t layer)
{
    const td_attention_mask_t *mask = &m->info.attention;
    const td_cuda_matrix_t *const o[] = {&d->layers[layer].o};
    td_cuda_attention_t p = {
        .kv = td_cuda_kv_of(&m->info.kv, d->pool),
        .mask = {(uint32_t)mask->kind, mask->local, mask->sinks, mask->stride, mask->summary},
        .tables = d->device.tables,
        .q = d->q,
        .out = d->attn,
        .parts = d->split ? d->parts : NULL,
        .layer = layer,
        .heads = m->info.heads,
        .group = m->info.heads / m->info.kv.kv_heads,
        .scale = m->attn_scale,
    };
    const td_cuda_merge_t merge = {
        .parts = p.parts,
        .part_begin = d->device.part_begin,
        .part_count = d->device.part_count,
        .attn = d->attn,
        .heads = m->info.heads,
        .head_dim = m->info.kv.head_dim,
        .quantise = td_cuda_quantise_for(d, m, m->q_dim, o, 1),
    };

    p.items = d->device.many;
    TD_TRY(td_cuda_launch_attention(d->compute, true, &p, d->many_count));
    p.items = d->device.few;
    TD_TRY(td_cuda_launch_attention(d->compute, false, &p, d->few_count));
    return td_cuda_launch_merge(d->compute, &merge, m->pass.row_count);
}

static td_status_t attention_block(const td_model_device_t *d, const td_model_t *m, uint32_t layer)
{
    const td_cuda_layer_t *l = &d->layers[layer];
    const td_cuda_matrix_t *const qkv[] = {&l->q, &l->k, &l->v};
    const td_cuda_matrix_t *const o[] = {&l->o};
    float *const out[] = {d->q, d->k, d->v};
    float *const y[] = {d->y};
    const td_cuda_place_t place = {
        .kv = td_cuda_kv_of(&m->info.kv, d->pool),
        .q = d->q,
        .k = d->k,
        .v = d->v,
        .rope = d->device.rope,
        .slot = d->device.slots,
        .blocks = d->device.blocks,
        .blocks_begin = d->device.blocks_begin,
        .host_pool = d->mapped,
        .host_blocks = d->device.host_blocks,
        .layer = layer,
        .heads = m->info.heads,
        .rope_dim = m->rope_dim,
    };

    TD_TRY(norm(d, m, l->attn_norm, layer > 0, qkv, TD_ARRAY_LEN(qkv)));
    TD_TRY(products(d, qkv, out, TD_ARRAY_LEN(qkv), d->normed, m->pass.row_count));
    TD_TRY(td_cuda_launch_place(d->compute, &place, m->pass.row_count));
    TD_TRY(attend(d, m, layer));
    return products(d, o, y, 1, d->attn, m->pass.row_count);
}

static td_status_t feed_forward_block(const td_model_device_t *d, const td_model_t *m,
                                      uint32_t layer)
{
    const td_cuda_layer_t *l = &d->layers[layer];
    const td_cuda_matrix_t *const users[] = {&l->gate, &l->up};
    const td_cuda_matrix_t *const down[] = {&l->down};
    float *const out[] = {d->gate, d->up};
    float *const y[] = {d->y};
    const td_cuda_swiglu_t swiglu = {
        .gate = d->gate,
        .up = d->up,
        .dim = m->info.ff_dim,
        .quantise = td_cuda_quantise_for(d, m, m->info.ff_dim, down, 1),
    };

    TD_TRY(norm(d, m, l->ffn_norm, true, users, TD_ARRAY_LEN(users)));
    TD_TRY(products(d, users, out, TD_ARRAY_LEN(users), d->normed, m->pass.row_count));
    TD_TRY(td_cuda_launch_swiglu(d->compute, &swiglu, m->pass.row_count));
    return products(d, down, y, 1, d->gate, m->pass.row_count);
}

static td_status_t output_head(const td_model_device_t *d, const td_model_t *m)
{
    const td_cuda_matrix_t *const head[] = {&d->head};
    float *const logits[] = {d->logits};
    const uint32_t count = m->pass.logit_count;
    const td_cuda_norm_t p = {
        .x = d->x,
        .y = d->y,
        .weight = d->output_norm,
        .pick = d->device.pick,
        .out = d->normed,
        .dim = m->info.embed_dim,
        .eps = m->norm_eps,
        .quantise = td_cuda_quantise_for(d, m, m->info.embed_dim, head, 1),
    };

    if (count == 0) {
        return TD_OK;
    }
    TD_TRY(td_cuda_launch_norm(d->compute, &p, count));
    TD_TRY(products(d, head, logits, 1, d->normed, count));
    TD_TRY(td_cuda_check(cudaMemcpyAsync(m->normed, d->normed,
                                         (size_t)count * m->info.embed_dim * sizeof(*m->normed),
                                         cudaMemcpyDeviceToHost, d->compute),
                         "cudaMemcpyAsync"));
    return td_cuda_check(cudaMemcpyAsync(m->logits, d->logits,
                                         (size_t)count * m->info.vocab_size * sizeof(*m->logits),
                                         cudaMemcpyDeviceToHost, d->compute),
                         "cudaMemcpyAsync");
}

/* Layers [begin, end) of the blocks that the pass writes, to the host, once they are computed.
 * Where kernels write the host's blocks themselves they are there already. */
static td_status_t send_layers(td_model_device_t *d, const td_model_t *m, uint32_t begin,
                               uint32_t end, uint32_t turn)
{
    const size_t block_bytes = td_kv_block_bytes(&m->info.kv);
    const size_t layer_bytes = td_kv_layer_bytes(&m->info.kv);
    const uint32_t *blocks = d->host.host_blocks;

    TD_TRY(td_cuda_check(cudaEventRecord(d->computed[turn], d->compute), "cudaEventRecord"));
    TD_TRY(td_cuda_check(cudaStreamWaitEvent(d->out, d->computed[turn], 0), "cudaStreamWaitEvent"));
    for (uint32_t i = 0; d->mapped == NULL && i < d->written_count; i++) {
        if (i + 1 < d->written_count && blocks[i] == blocks[i + 1]) {
            continue; /* rows of a block follow each other: it is sent with the last one */
        }
        TD_TRY(td_cuda_check(
            cudaMemcpyAsync(m->pass.pool + blocks[i] * block_bytes + begin * layer_bytes,
                            d->pool + d->host.blocks[i] * block_bytes + begin * layer_bytes,
                            (end - begin) * layer_bytes, cudaMemcpyDeviceToHost, d->out),
            "cudaMemcpyAsync"));
    }
    return td_cuda_check(cudaEventRecord(d->left[turn], d->out), "cudaEventRecord");
}

static td_status_t report_layers(const td_model_device_t *d, const td_model_t *m, uint32_t begin,
                                 uint32_t end, uint32_t turn)
{
    TD_TRY(td_cuda_check(cudaEventSynchronize(d->left[turn]), "cudaEventSynchronize"));
    if (m->pass.on_layers != NULL) {
        m->pass.on_layers(m->pass.ctx, begin, end);
    }
    return TD_OK;
}

/* A device and the model that it runs a pass of. */
typedef struct pass_launch {
    td_model_device_t *d;
    const td_model_t *m;
} pass_launch_t;

static td_status_t embed(const td_model_device_t *d, const td_model_t *m)
{
    const td_cuda_embed_t p = {.w = d->embed, .tokens = d->device.tokens, .x = d->x};

    return td_cuda_launch_embed(d->compute, &p, m->pass.row_count);
}

static td_status_t layers(const td_model_device_t *d, const td_model_t *m, uint32_t begin,
                          uint32_t end)
{
    for (uint32_t layer = begin; layer < end; layer++) {
        TD_TRY(attention_block(d, m, layer));
        TD_TRY(feed_forward_block(d, m, layer));
    }
    return TD_OK;
}

/* The kernels of a whole pass, and what it hands out. */
static td_status_t launch_pass(void *ctx)
{
    const pass_launch_t *p = ctx;

    TD_TRY(embed(p->d, p->m));
    TD_TRY(layers(p->d, p->m, 0, p->m->pass.layers));
    return output_head(p->d, p->m);
}

/* Nobody waits for layers, and nothing is copied behind them: all of it at once. */
static bool is_kept(const td_model_device_t *d, const td_model_t *m)
{
    return m->pass.on_layers == NULL && d->mapped != NULL && d->pinned[0] != NULL &&
           d->pinned[1] != NULL && m->pass.row_count <= TD_CUDA_GRAPH_ROWS_MAX;
}

/* A step of layers after the other; what is announced of one leaves while the next is computed. */
static td_status_t run_steps(td_model_device_t *d, const td_model_t *m)
{
    const td_model_pass_t *p = &m->pass;
    const uint32_t step = p->layers_step == 0 ? p->layers : p->layers_step;
    uint32_t turn = 0;
    uint32_t begin = 0;

    TD_TRY(embed(d, m));
    for (; begin < p->layers; begin += step, turn ^= 1) {
        const uint32_t end = TD_MIN(begin + step, p->layers);
        TD_TRY(layers(d, m, begin, end));
        TD_TRY(send_layers(d, m, begin, end, turn));
        if (begin > 0) {
            TD_TRY(report_layers(d, m, begin - step, begin, turn ^ 1));
        }
    }
    TD_TRY(output_head(d, m));
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

    TD_TRY(td_cuda_check(
        cudaMemcpyAsync(d->pass_device, d->pass_host, bytes, cudaMemcpyHostToDevice, d->compute),
        "cudaMemcpyAsync"));
    TD_TRY(is_kept(d, m) ? td_cuda_graphs_run(&d->graphs, d->compute, &shape, launch_pass, &launch)
                         : run_steps(d, m));
    return td_cuda_check(cudaStreamSynchronize(d->compute), "cudaStreamSynchronize");
}

td_status_t td_cuda_forward(td_model_device_t *d, td_model_t *m)
{
    td_status_t status = TD_OK;

    /* Each thread of a process chooses its device anew. */
    TD_TRY(td_cuda_check(cudaSetDevice(d->index), "cudaSetDevice"));
    status = td_cuda_plan(d, m);
    if (status == TD_OK) {
        status = run_pass(d, m);
    }
    if (status != TD_OK) {
        /* What was under way is let end, and no copy is trusted. */
        (void)cudaStreamSynchronize(d->compute);
        (void)cudaStreamSynchronize(d->out);
        td_cuda_mirror_forget_all(d->mirror);
    }
    td_cuda_mirror_end(d->mirror);
    return status;
}

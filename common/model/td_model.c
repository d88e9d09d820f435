#include "common/model/td_model.h"

#include "common/base/td_base.h"
#include "common/base/td_log.h"
#include "common/model/td_deal.h"
#include "common/model/td_model_device_internal.h"
#include "common/model/td_model_internal.h"

/* Attention is split into spans when a thread would have fewer items than this. */
#define SPLIT_BELOW 8u

/* One thread's view of a pass. Work on rows is dealt out by rows, products by pairs of panels,
 * attention by (segment, KV head) or some rows of it; each number is computed by one thread from
 * its first to its last term, so how work is dealt out cannot change it.
 *
 * A pass of one row would have all threads wait for the one whose row it is. So each has a residual
 * stream of its own there, adds to it and norms it by itself, to the same numbers. */
typedef struct worker {
    td_model_t *m;
    uint32_t thread;
    uint32_t threads;
    uint32_t row_begin; /* this thread's rows: [row_begin, row_end) */
    uint32_t row_end;
    bool has_own;              /* x, normed and acts are its own, of the pass's only row */
    float *x;                  /* [row][embed_dim] */
    float *normed;             /* [row][embed_dim] */
    const td_cpu_acts_t *acts; /* of normed */
    uint32_t norm_begin;       /* rows of x that it adds to and norms */
    uint32_t norm_end;
} worker_t;

static void sync_threads(const worker_t *w)
{
    td_threads_barrier(w->m->threads, w->thread);
}

/* What a product reads: some rows, and of them some elements, as the input of these matrices. */
typedef struct act_range {
    uint32_t dim; /* of a row */
    uint32_t row_begin;
    uint32_t row_end;
    uint32_t begin; /* elements, multiples of TD_CPU_GROUP where something is quantised */
    uint32_t end;
} act_range_t;

static void quantise_range(const td_model_t *m, const td_cpu_acts_t *acts, const float *src,
                           const act_range_t *r, const td_cpu_matrix_t *const *users,
                           size_t user_count)
{
    const size_t groups = r->dim / TD_CPU_GROUP;
    const uint32_t count = r->end - r->begin;
    bool int8 = false;
    bool int16 = false;

    for (size_t i = 0; i < user_count; i++) {
        int8 = int8 || users[i]->form == TD_CPU_NIBBLE_A8;
        int16 = int16 || users[i]->form == TD_CPU_NIBBLE_A16 || users[i]->form == TD_CPU_BYTE_A16;
    }
    for (size_t row = r->row_begin; row < r->row_end; row++) {
        const size_t at = row * r->dim + r->begin;
        const size_t group = row * groups + r->begin / TD_CPU_GROUP;
        if (int8) {
            m->ops->quantise8(src + at, count, acts->q8 + at, acts->scale8 + group,
                              acts->sum8 + group);
        }
        if (int16) {
            m->ops->quantise16(src + at, count, m->limit16, acts->q16 + at, acts->scale16 + group,
                               acts->sum16 + group);
        }
    }
}

/* Matrices that multiply the same rows, and where their results go. Shape: y [row][outputs]. */
typedef struct product_job {
    const td_cpu_matrix_t *const *matrices;
    float *const *y;
    size_t count;
    td_cpu_acts_t acts;
    uint32_t rows;
} product_job_t;

static product_job_t begin_products(const worker_t *w, const td_cpu_matrix_t *const *matrices,
                                    float *const *y, size_t count, const td_cpu_acts_t *acts,
                                    float *src, uint32_t rows)
{
    const td_cpu_ops_t *ops = w->m->ops;
    product_job_t job = {.matrices = matrices, .y = y, .count = count, .acts = *acts, .rows = rows};

    job.acts.f32 = src;
    for (size_t i = 0; ops->prepare != NULL && job.acts.prepared == NULL && i < count; i++) {
        job.acts.prepared = ops->prepare(matrices[i], &job.acts, rows, w->m->scratch[w->thread]);
    }
    return job;
}

static uint32_t count_pairs(const td_cpu_matrix_t *const *matrices, size_t count)
{
    uint32_t pairs = 0;

    for (size_t i = 0; i < count; i++) {
        pairs += matrices[i]->panels / 2;
    }
    return pairs;
}

/* Pairs of panels [begin, end) of one matrix. */
static void multiply(const worker_t *w, const product_job_t *job, size_t i, uint32_t begin,
                     uint32_t end)
{
    w->m->ops->product(job->matrices[i], &job->acts, job->rows, job->y[i], begin * 2, end * 2,
                       w->m->scratch[w->thread]);
}

/* A step of products: td_deal_next() was called with their count_pairs(). */
static void products(const worker_t *w, const td_cpu_matrix_t *const *matrices, float *const *y,
                     size_t count, const td_cpu_acts_t *acts, float *src, uint32_t rows)
{
    const product_job_t job = begin_products(w, matrices, y, count, acts, src, rows);
    uint32_t begin = 0;
    uint32_t end = 0;

    while (td_deal_take(w->m->deal, w->thread, &begin, &end)) {
        uint32_t first = 0; /* pair of this matrix */
        for (size_t i = 0; i < count && first < end; i++) {
            const uint32_t pairs = matrices[i]->panels / 2;
            if (begin < first + pairs) {
                multiply(w, &job, i, TD_MAX(begin, first) - first,
                         TD_MIN(end, first + pairs) - first);
            }
            first += pairs;
        }
    }
}

static void embed_rows(const worker_t *w)
{
    td_model_t *m = w->m;
    for (size_t row = w->norm_begin; row < w->norm_end; row++) {
        td_cpu_unpack_row(&m->embed, m->pass.rows[row].token, w->x + row * m->info.embed_dim);
    }
    for (size_t row = w->row_begin; row < w->row_end; row++) {
        if (m->pass.rows[row].position >= m->rope_positions) {
            td_model_rope_row(m, m->pass.rows[row].position, m->rope_far + row * m->rope_dim);
        }
    }
}

/* Norms and quantises what these matrices multiply; everybody has everything behind it. */
static void norm_rows(const worker_t *w, const float *weight, const td_cpu_matrix_t *const *users,
                      size_t user_count)
{
    td_model_t *m = w->m;
    const uint32_t dim = m->info.embed_dim;
    const act_range_t range = {
        .dim = dim, .row_begin = w->norm_begin, .row_end = w->norm_end, .end = dim};

    for (size_t row = w->norm_begin; row < w->norm_end; row++) {
        m->ops->rms_norm(w->x + row * dim, weight, dim, m->norm_eps, w->normed + row * dim);
    }
    quantise_range(m, w->acts, w->normed, &range, users, user_count);
    if (!w->has_own) {
        sync_threads(w);
    }
}

static void add_rows(const worker_t *w)
{
    td_model_t *m = w->m;
    const uint32_t dim = m->info.embed_dim;
    for (size_t row = w->norm_begin; row < w->norm_end; row++) {
        m->ops->add(w->x + row * dim, m->y + row * dim, dim);
    }
}

static void write_head(const td_model_t *m, const td_model_row_t *r, uint32_t block_idx,
                       uint32_t layer, uint32_t kv_head, const float *k, const float *v)
{
    const td_kv_layout_t *kv = &m->info.kv;
    const uint32_t token = r->position % kv->block_tokens;
    uint8_t *block = m->pass.pool + (size_t)block_idx * td_kv_block_bytes(kv);

    m->ops->kv_encode(kv->codec, k, kv->head_dim,
                      block + td_kv_offset(kv, layer, false, kv_head, token),
                      block + td_kv_scale_offset(kv, layer, false, kv_head, token));
    m->ops->kv_encode(kv->codec, v, kv->head_dim,
                      block + td_kv_offset(kv, layer, true, kv_head, token),
                      block + td_kv_scale_offset(kv, layer, true, kv_head, token));
}

/* Turns a row's query heads of one KV head and its k to their position, and writes k and v into the
 * row's block, and into those of other paths of its tree. */
static void place_head(td_model_t *m, size_t row, uint32_t layer, uint32_t kv_head)
{
    const td_kv_layout_t *kv = &m->info.kv;
    const td_model_row_t *r = &m->pass.rows[row];
    const uint32_t group = m->info.heads / kv->kv_heads;
    const float *table = r->position < m->rope_positions
                             ? m->rope + (size_t)r->position * m->rope_dim
                             : m->rope_far + row * m->rope_dim;
    float *q = m->q + row * m->q_dim + (size_t)kv_head * group * kv->head_dim;
    float *k = m->k + row * m->kv_dim + (size_t)kv_head * kv->head_dim;
    const float *v = m->v + row * m->kv_dim + (size_t)kv_head * kv->head_dim;

    for (uint32_t h = 0; h < group; h++) {
        m->ops->rotate(q + (size_t)h * kv->head_dim, table, m->rope_dim);
    }
    m->ops->rotate(k, table, m->rope_dim);
    write_head(m, r, r->blocks[r->position / kv->block_tokens], layer, kv_head, k, v);
    for (uint32_t i = 0; i < r->copy_count; i++) {
        write_head(m, r, r->copies[i], layer, kv_head, k, v);
    }
}

/* A segment's rows see each other's keys only through its blocks, so where no other segment shares
 * them the same thread can write and read them. The same goes for quantising what it has gathered.
 */
static void attend_item(const worker_t *w, uint32_t layer, const td_model_item_t *item,
                        uint32_t kv_head, uint32_t part, uint32_t parts)
{
    td_model_t *m = w->m;
    const td_kv_layout_t *kv = &m->info.kv;
    const uint32_t group = m->info.heads / kv->kv_heads;
    const td_model_segment_t *segment = &m->segments[item->segment];
    const uint32_t begin = segment->row + td_threads_share(segment->rows, part, parts);
    const uint32_t end = segment->row + td_threads_share(segment->rows, part + 1, parts);
    const td_model_row_t *first = &m->pass.rows[begin];
    const size_t at = (size_t)begin * m->q_dim + (size_t)kv_head * group * kv->head_dim;
    const size_t part_stride = td_cpu_part_stride(kv->head_dim);
    td_cpu_attention_t job = {
        .pool = m->pass.pool,
        .kv = kv,
        .blocks = first->blocks,
        .layer = layer,
        .kv_head = kv_head,
        .position = first->position,
        .rows = end - begin,
        .group = group,
        .mask = m->info.attention,
        .scale = m->attn_scale,
        .q = m->q + at,
        .out = m->attn + at,
        .q_stride = m->q_dim,
        .begin = item->begin,
        .end = item->end,
    };

    if (begin == end) {
        return; /* fewer rows than pieces */
    }
    if (m->pass.split) {
        size_t place = segment->part + item->part;
        job.parts = m->parts + (place * m->info.heads + (size_t)kv_head * group) * part_stride;
        job.part_row_stride = segment->spans * m->info.heads * part_stride;
    }
    for (uint32_t row = begin; m->pass.alone && row < end; row++) {
        place_head(m, row, layer, kv_head);
    }
    m->ops->attention(&job, m->scratch[w->thread]);
    if (!m->pass.split && m->heads_are_groups) {
        const td_cpu_matrix_t *const o[] = {&m->layers[layer].o};
        const act_range_t range = {.dim = m->q_dim,
                                   .row_begin = begin,
                                   .row_end = end,
                                   .begin = kv_head * group * kv->head_dim,
                                   .end = (kv_head + 1) * group * kv->head_dim};
        quantise_range(m, &m->acts, m->attn, &range, o, 1);
    }
}

static void attend(const worker_t *w, uint32_t layer)
{
    td_model_t *m = w->m;
    const uint32_t kv_heads = m->info.kv.kv_heads;
    const uint32_t count = m->pass.item_count * kv_heads;
    const uint32_t cut = count - m->pass.whole;

    for (;;) {
        uint32_t taken =
            atomic_fetch_add_explicit(&m->next_item[layer % 2], 1, memory_order_relaxed);
        if (taken < m->pass.whole) {
            /* A chunk's last rows see most: longest first. */
            const uint32_t idx = count - 1 - taken;
            attend_item(w, layer, &m->items[idx / kv_heads], idx % kv_heads, 0, 1);
        } else if (taken - m->pass.whole < cut * w->threads) {
            const uint32_t idx = (taken - m->pass.whole) / w->threads;
            attend_item(w, layer, &m->items[idx / kv_heads], idx % kv_heads,
                        (taken - m->pass.whole) % w->threads, w->threads);
        } else {
            return;
        }
    }
}

/* After a split pass: the heads of a row from the parts of its spans. */
static void merge_row(td_model_t *m, size_t row)
{
    const td_model_segment_t *segment = &m->segments[m->segment_of[row]];
    const uint32_t head_dim = m->info.kv.head_dim;
    const size_t head_stride = td_cpu_part_stride(head_dim);
    const size_t span_stride = m->info.heads * head_stride;
    const size_t part = segment->part + (row - segment->row) * segment->spans;
    const td_model_row_t *last = &m->pass.rows[segment->row + segment->rows - 1];
    /* The segment's last span, which is the last row's own, may lie behind this row. */
    const bool behind =
        m->pass.rows[row].position / TD_CPU_SPAN_TOKENS < last->position / TD_CPU_SPAN_TOKENS;
    const uint32_t spans = segment->spans - (behind ? 1 : 0);

    for (uint32_t h = 0; h < m->info.heads; h++) {
        m->ops->merge(m->parts + part * span_stride + h * head_stride, span_stride, spans, head_dim,
                      m->attn + row * m->q_dim + (size_t)h * head_dim);
    }
}

/* Thread 0, after the barrier behind the KV writes of a layer. */
static void report_layer(const td_model_t *m, uint32_t layer)
{
    const td_model_pass_t *p = &m->pass;
    uint32_t end = layer + 1;
    uint32_t step = p->layers_step == 0 ? p->layers : p->layers_step;

    if (p->on_layers != NULL && (end % step == 0 || end == p->layers)) {
        p->on_layers(p->ctx, layer / step * step, end);
    }
}

/* From the products q, k, v to quantised attention outputs of all rows; ends behind a barrier. */
static void attention_rows(const worker_t *w, uint32_t layer)
{
    td_model_t *m = w->m;
    const td_cpu_matrix_t *const o[] = {&m->layers[layer].o};

    if (w->thread == 0) {
        atomic_store_explicit(&m->next_item[(layer + 1) % 2], 0, memory_order_relaxed);
    }
    if (!m->pass.alone) {
        for (size_t row = w->row_begin; row < w->row_end; row++) {
            for (uint32_t h = 0; h < m->info.kv.kv_heads; h++) {
                place_head(m, row, layer, h);
            }
        }
        sync_threads(w);
        if (w->thread == 0) {
            report_layer(m, layer);
        }
    }
    attend(w, layer);
    sync_threads(w);
    if (m->pass.alone && w->thread == 0) {
        report_layer(m, layer);
    }
    if (m->pass.split || !m->heads_are_groups) {
        const act_range_t range = {
            .dim = m->q_dim, .row_begin = w->row_begin, .row_end = w->row_end, .end = m->q_dim};
        for (size_t row = w->row_begin; m->pass.split && row < w->row_end; row++) {
            merge_row(m, row);
        }
        quantise_range(m, &m->acts, m->attn, &range, o, 1);
        sync_threads(w);
    }
}

static void deal_qkv(const worker_t *w, const td_model_layer_t *l)
{
    const td_cpu_matrix_t *const qkv[] = {&l->q, &l->k, &l->v};
    td_deal_next(w->m->deal, w->thread, count_pairs(qkv, TD_ARRAY_LEN(qkv)));
}

static void attention_block(const worker_t *w, uint32_t layer)
{
    td_model_t *m = w->m;
    td_model_layer_t *l = &m->layers[layer];
    const uint32_t rows = m->pass.row_count;
    const td_cpu_matrix_t *const qkv[] = {&l->q, &l->k, &l->v};
    float *const qkv_out[] = {m->q, m->k, m->v};
    const td_cpu_matrix_t *const o[] = {&l->o};

    norm_rows(w, l->attn_norm, qkv, TD_ARRAY_LEN(qkv));
    products(w, qkv, qkv_out, TD_ARRAY_LEN(qkv), w->acts, w->normed, rows);
    td_deal_next(m->deal, w->thread, count_pairs(o, 1));
    sync_threads(w);
    attention_rows(w, layer);
    products(w, o, &m->y, 1, &m->acts, m->attn, rows);
}

/* Feed-forward elements come in pieces of whole groups: whoever has gate and up of one can quantise
 * it alone. */
#define GROUP_PAIRS (TD_CPU_GROUP / TD_CPU_PAIR)
/* At one time: their activations stay near. */
#define GATE_UP_GROUPS 4u

static uint32_t count_ff_groups(const td_model_layer_t *l)
{
    return (l->gate.panels / 2 + GROUP_PAIRS - 1) / GROUP_PAIRS;
}

/* gate, up, SwiGLU and the quantised input of down, of groups [begin, end). */
static void gate_up_groups(const worker_t *w, const td_model_layer_t *l, const product_job_t *job,
                           uint32_t begin, uint32_t end)
{
    td_model_t *m = w->m;
    const uint32_t ff = m->info.ff_dim;
    const uint32_t pair_begin = begin * GROUP_PAIRS;
    const uint32_t pair_end = TD_MIN(end * GROUP_PAIRS, l->gate.panels / 2);
    const td_cpu_matrix_t *const down[] = {&l->down};
    const act_range_t range = {.dim = ff,
                               .row_end = job->rows,
                               .begin = TD_MIN(begin * TD_CPU_GROUP, ff),
                               .end = TD_MIN(end * TD_CPU_GROUP, ff)};

    multiply(w, job, 0, pair_begin, pair_end);
    multiply(w, job, 1, pair_begin, pair_end);
    for (size_t row = 0; row < job->rows; row++) {
        m->ops->swiglu(m->gate + row * ff + range.begin, m->up + row * ff + range.begin,
                       range.end - range.begin);
    }
    quantise_range(m, &m->acts_ff, m->gate, &range, down, 1);
}

static void gate_up(const worker_t *w, const td_model_layer_t *l)
{
    td_model_t *m = w->m;
    const td_cpu_matrix_t *const matrices[] = {&l->gate, &l->up};
    float *const y[] = {m->gate, m->up};
    const product_job_t job =
        begin_products(w, matrices, y, 2, w->acts, w->normed, m->pass.row_count);
    uint32_t begin = 0;
    uint32_t end = 0;

    while (td_deal_take(m->deal, w->thread, &begin, &end)) {
        for (; begin < end; begin = TD_MIN(begin + GATE_UP_GROUPS, end)) {
            gate_up_groups(w, l, &job, begin, TD_MIN(begin + GATE_UP_GROUPS, end));
        }
    }
}

static void feed_forward_block(const worker_t *w, uint32_t layer)
{
    td_model_t *m = w->m;
    td_model_layer_t *l = &m->layers[layer];
    const td_cpu_matrix_t *const users[] = {&l->gate, &l->up};
    const td_cpu_matrix_t *const down[] = {&l->down};

    td_deal_next(m->deal, w->thread, count_ff_groups(l));
    sync_threads(w);
    add_rows(w);
    norm_rows(w, l->ffn_norm, users, TD_ARRAY_LEN(users));
    gate_up(w, l);
    td_deal_next(m->deal, w->thread, count_pairs(down, 1));
    sync_threads(w);
    products(w, down, &m->y, 1, &m->acts_ff, m->gate, m->pass.row_count);
    if (layer + 1 < m->pass.layers) {
        deal_qkv(w, l + 1);
    } else if (m->pass.logit_count > 0) {
        td_deal_next(m->deal, w->thread, count_pairs(&m->head, 1));
    }
    sync_threads(w);
    add_rows(w);
}

/* The rows that want logits move to the front of `normed`. */
static void output_head(const worker_t *w)
{
    td_model_t *m = w->m;
    const uint32_t dim = m->info.embed_dim;
    const uint32_t count = m->pass.logit_count;
    const act_range_t range = {
        .dim = dim,
        .row_begin = w->has_own ? 0 : td_threads_share(count, w->thread, w->threads),
        .row_end = w->has_own ? count : td_threads_share(count, w->thread + 1, w->threads),
        .end = dim,
    };

    if (!w->has_own) {
        sync_threads(w); /* x is complete */
    }
    for (size_t i = range.row_begin; i < range.row_end; i++) {
        m->ops->rms_norm(w->x + (size_t)m->logit_rows[i] * dim, m->output_norm, dim, m->norm_eps,
                         w->normed + i * dim);
    }
    quantise_range(m, w->acts, w->normed, &range, &m->head, 1);
    if (!w->has_own) {
        sync_threads(w);
    }
    products(w, &m->head, &m->logits, 1, w->acts, w->normed, count);
}

static worker_t begin_worker(td_model_t *m, uint32_t thread, uint32_t threads)
{
    const uint32_t rows = m->pass.row_count;
    worker_t w = {
        .m = m,
        .thread = thread,
        .threads = threads,
        .row_begin = td_threads_share(rows, thread, threads),
        .row_end = td_threads_share(rows, thread + 1, threads),
        .has_own = rows == 1,
        .x = m->x,
        .normed = m->normed,
        .acts = &m->acts,
    };

    w.norm_begin = w.has_own ? 0 : w.row_begin;
    w.norm_end = w.has_own ? 1 : w.row_end;
    if (w.has_own && thread > 0) { /* thread 0 has those that td_model_hidden() lends */
        w.x = m->own[thread].x;
        w.normed = m->own[thread].normed;
        w.acts = &m->own[thread].acts;
    }
    return w;
}

static void forward_thread(void *ctx, uint32_t thread_idx, uint32_t thread_count)
{
    td_model_t *m = ctx;
    const worker_t w = begin_worker(m, thread_idx, thread_count);

    embed_rows(&w);
    deal_qkv(&w, m->layers);
    for (uint32_t layer = 0; layer < m->pass.layers; layer++) {
        attention_block(&w, layer);
        feed_forward_block(&w, layer);
    }
    if (m->pass.logit_count > 0) {
        output_head(&w);
    }
}

static td_status_t check_rows(const td_model_t *m, const td_model_row_t *rows, uint32_t row_count)
{
    uint32_t wanted = 0;

    if (row_count == 0 || row_count > m->options.rows_max) {
        TD_LOG_ERROR("pass has a bad number of rows", "rows=%u rows_max=%u", row_count,
                     m->options.rows_max);
        return TD_ERR_INVALID;
    }
    for (uint32_t i = 0; i < row_count; i++) {
        const td_model_row_t *r = &rows[i];
        bool ascending =
            i == 0 || r->blocks != rows[i - 1].blocks || r->position > rows[i - 1].position;
        if (r->token >= m->info.vocab_size || r->position >= m->info.context_max ||
            r->blocks == NULL || !ascending) {
            TD_LOG_ERROR("row out of range",
                         "row=%u token_in_vocab=%d position=%u context=%u blocks=%d ascending=%d",
                         i, r->token < m->info.vocab_size, r->position, m->info.context_max,
                         r->blocks != NULL, ascending);
            return TD_ERR_INVALID;
        }
        wanted += r->want_logits ? 1 : 0;
    }
    if (wanted > m->options.logit_rows_max) {
        TD_LOG_ERROR("pass wants too many logits", "rows=%u logit_rows_max=%u", wanted,
                     m->options.logit_rows_max);
        return TD_ERR_INVALID;
    }
    return TD_OK;
}

/* The next span from `at` on of which some row of the segment sees something; behind the last one
 * TD_ATTENTION_NONE. */
static uint32_t next_span(const td_model_t *m, const td_model_segment_t *segment, uint32_t at)
{
    const td_model_row_t *rows = m->pass.rows + segment->row;
    const uint32_t next = td_attention_next(&m->info.attention, rows[0].position,
                                            rows[segment->rows - 1].position, at);

    return next == TD_ATTENTION_NONE ? next : next / TD_CPU_SPAN_TOKENS * TD_CPU_SPAN_TOKENS;
}

static uint32_t count_spans(const td_model_t *m, const td_model_segment_t *segment)
{
    const td_model_row_t *last = &m->pass.rows[segment->row + segment->rows - 1];
    uint32_t count = 0;

    if (m->info.attention.kind == TD_ATTENTION_FULL) {
        return last->position / TD_CPU_SPAN_TOKENS + 1;
    }
    for (uint32_t span = next_span(m, segment, 0); span != TD_ATTENTION_NONE;
         span = next_span(m, segment, span + TD_CPU_SPAN_TOKENS)) {
        count++;
    }
    return count;
}

/* Cuts rows into runs of consecutive positions of a sequence. Where a run is cut changes speed
 * only: a row's attention depends on absolute tiles and spans. */
static void plan_segments(td_model_t *m)
{
    td_model_pass_t *p = &m->pass;
    td_model_segment_t *segment = NULL;

    p->segment_count = 0;
    p->alone = true;
    for (uint32_t i = 0; i < p->row_count; i++) {
        const td_model_row_t *r = &p->rows[i];
        if (segment == NULL || segment->rows == TD_CPU_TILE_ROWS ||
            r->blocks != p->rows[i - 1].blocks || r->position != p->rows[i - 1].position + 1) {
            p->alone = p->alone && (i == 0 || r->blocks != p->rows[i - 1].blocks);
            segment = &m->segments[p->segment_count++];
            *segment = (td_model_segment_t){.row = i};
        }
        p->alone = p->alone && !r->is_branch; /* its segment reads what others write */
        segment->rows++;
        m->segment_of[i] = p->segment_count - 1;
    }
}

/* Few segments with long contexts are split into their spans, so that every thread has work. Of few
 * items those that would leave threads idle are cut by rows instead. */
static void plan_items(td_model_t *m)
{
    td_model_pass_t *p = &m->pass;
    const uint32_t threads = m->options.threads;
    uint32_t parts = 0;
    uint32_t count = 0;
    uint32_t cut = 0;
    bool single = true; /* no segment has more than one span */

    for (uint32_t i = 0; i < p->segment_count; i++) {
        td_model_segment_t *segment = &m->segments[i];
        segment->spans = count_spans(m, segment);
        single = single && segment->spans == 1;
        segment->part = parts;
        parts = (uint32_t)TD_MIN((uint64_t)parts + (uint64_t)segment->rows * segment->spans,
                                 (uint64_t)TD_MODEL_PARTS_MAX + 1);
    }
    p->split = !single && parts <= TD_MODEL_PARTS_MAX &&
               p->segment_count * m->info.kv.kv_heads < SPLIT_BELOW * threads;
    p->item_count = 0;
    for (uint32_t i = 0; i < p->segment_count; i++) {
        uint32_t span = p->split ? next_span(m, &m->segments[i], 0) : 0;
        for (uint32_t s = 0; s < (p->split ? m->segments[i].spans : 1); s++) {
            m->items[p->item_count++] = (td_model_item_t){
                .segment = i,
                .begin = span,
                .end = p->split ? span + TD_CPU_SPAN_TOKENS : UINT32_MAX,
                .part = s,
            };
            span = p->split ? next_span(m, &m->segments[i], span + TD_CPU_SPAN_TOKENS) : 0;
        }
    }
    count = p->item_count * m->info.kv.kv_heads;
    cut = !p->split && count < SPLIT_BELOW * threads && m->segments[0].rows >= threads
              ? count % threads
              : 0;
    p->whole = count - cut;
    p->alone = p->alone && !p->split && cut == 0;
}

static void list_logit_rows(td_model_t *m)
{
    td_model_pass_t *p = &m->pass;

    p->logit_count = 0;
    for (uint32_t i = 0; i < p->row_count; i++) {
        if (p->rows[i].want_logits) {
            m->logit_rows[p->logit_count++] = i;
        }
    }
}

static void plan_pass(td_model_t *m)
{
    plan_segments(m);
    plan_items(m);
    list_logit_rows(m);
}

/* Of the pass only what differs from pass to pass, without the plan. */
static td_status_t forward(td_model_t *model, const td_model_pass_t *pass, const float **logits_out)
{
    TD_ASSERT(model != NULL && pass->pool != NULL && pass->rows != NULL && logits_out != NULL);
    TD_TRY(check_rows(model, pass->rows, pass->row_count));
    model->pass = *pass;
    if (model->device != NULL) {
        list_logit_rows(model);
        TD_TRY(td_cuda_device_ops.forward(model->device, model));
        *logits_out = model->logits;
        return TD_OK;
    }
    plan_pass(model);
    atomic_store_explicit(&model->next_item[0], 0, memory_order_relaxed);
    td_threads_run(model->threads, forward_thread, model);
    *logits_out = model->logits;
    return TD_OK;
}

td_status_t td_model_forward(td_model_t *model, uint8_t *pool_bytes, const td_model_row_t *rows,
                             uint32_t row_count, uint32_t layers_step, td_model_layers_fn on_layers,
                             void *ctx, const float **logits_out)
{
    const td_model_pass_t pass = {
        .pool = pool_bytes,
        .rows = rows,
        .row_count = row_count,
        .layers = model->info.kv.layers,
        .layers_step = layers_step,
        .on_layers = on_layers,
        .ctx = ctx,
    };
    return forward(model, &pass, logits_out);
}

td_status_t td_model_forward_first(td_model_t *model, uint32_t layers, uint8_t *pool_bytes,
                                   const td_model_row_t *rows, uint32_t row_count,
                                   const float **logits_out)
{
    const td_model_pass_t pass = {
        .pool = pool_bytes, .rows = rows, .row_count = row_count, .layers = layers};

    TD_ASSERT(layers > 0 && layers <= model->info.kv.layers);
    return forward(model, &pass, logits_out);
}

void td_model_use_pool(td_model_t *model, const td_pool_t *pool)
{
    model->pool = pool;
    if (model->device != NULL) {
        td_cuda_device_ops.use_pool(model->device, pool);
    }
}

void td_model_kv_changed(td_model_t *model, uint32_t block)
{
    if (model->device != NULL) {
        td_cuda_device_ops.changed(model->device, block);
    }
}

td_kv_device_t *td_model_kv_device(td_model_t *model)
{
    return model->device == NULL ? NULL : td_cuda_device_ops.kv_device(model->device);
}

const float *td_model_hidden(const td_model_t *model)
{
    return model->normed; /* output_head() has put them there, and nothing writes behind it */
}

void td_model_embedding(const td_model_t *model, uint32_t token, float *out)
{
    TD_ASSERT(token < model->info.vocab_size);
    td_cpu_unpack_row(&model->embed, token, out);
}

void td_model_head_row(const td_model_t *model, uint32_t token, float *out)
{
    TD_ASSERT(token < model->info.vocab_size);
    td_cpu_unpack_row(model->head, token, out);
}

static void attention_thread(void *ctx, uint32_t thread_idx, uint32_t thread_count)
{
    td_model_t *m = ctx;
    const worker_t w = {.m = m, .thread = thread_idx, .threads = thread_count};

    for (uint32_t layer = 0; layer < m->info.kv.layers; layer++) {
        attend(&w, layer);
        sync_threads(&w);
        if (w.thread == 0) { /* read again two layers on, behind the next barrier */
            atomic_store_explicit(&m->next_item[layer % 2], 0, memory_order_relaxed);
        }
    }
}

td_status_t td_model_attention_only(td_model_t *model, uint8_t *pool_bytes,
                                    const td_model_row_t *rows, uint32_t row_count)
{
    TD_ASSERT(model != NULL && pool_bytes != NULL && rows != NULL);
    if (model->device != NULL) {
        return TD_ERR_UNSUPPORTED; /* a measure of the CPU's threads */
    }
    TD_TRY(check_rows(model, rows, row_count));
    model->pass = (td_model_pass_t){.pool = pool_bytes, .rows = rows, .row_count = row_count};
    plan_pass(model);
    atomic_store_explicit(&model->next_item[0], 0, memory_order_relaxed);
    atomic_store_explicit(&model->next_item[1], 0, memory_order_relaxed);
    td_threads_run(model->threads, attention_thread, model);
    return TD_OK;
}

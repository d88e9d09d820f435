#include "common/base/td_base.h"
#include "common/base/td_log.h"
#include "common/kv/td_pool.h"
#include "common/model/cuda/td_cuda_device.h"

/* Attention is split into spans where it would leave multiprocessors without work. */
#define SPLIT_BELOW 2u

static uint8_t *lay(uint8_t **at, size_t count, size_t bytes)
{
    uint8_t *begin = *at;

    *at += (count * bytes + 63) / 64 * 64;
    return begin;
}

size_t td_cuda_pass_lay(const td_model_t *m, uint32_t tables_max, uint8_t *base,
                        td_cuda_pass_t *out)
{
    const size_t rows = m->options.rows_max;
    const size_t items = rows + TD_CUDA_PARTS_MAX;
    uint8_t *at = base;

    out->tokens = (uint32_t *)lay(&at, rows, sizeof(uint32_t));
    out->slots = (uint32_t *)lay(&at, rows, sizeof(uint32_t));
    out->part_begin = (uint32_t *)lay(&at, rows, sizeof(uint32_t));
    out->part_count = (uint32_t *)lay(&at, rows, sizeof(uint32_t));
    out->blocks_begin = (uint32_t *)lay(&at, rows + 1, sizeof(uint32_t));
    out->blocks = (uint32_t *)lay(&at, rows + TD_CUDA_COPIES_MAX, sizeof(uint32_t));
    out->host_blocks = (uint32_t *)lay(&at, rows + TD_CUDA_COPIES_MAX, sizeof(uint32_t));
    out->pick = (uint32_t *)lay(&at, m->options.logit_rows_max, sizeof(uint32_t));
    out->rope = (float *)lay(&at, rows, m->rope_dim * sizeof(float));
    out->few = (td_cuda_item_t *)lay(&at, items, sizeof(td_cuda_item_t));
    out->many = (td_cuda_item_t *)lay(&at, items, sizeof(td_cuda_item_t));
    out->tables = (uint32_t *)lay(&at, tables_max, sizeof(uint32_t));
    return (size_t)(at - base);
}

/* --- blocks ----------------------------------------------------------------------------------- */

/* The block's place, with the host's bytes in it where `fresh` does not say that the pass writes
 * all of it that anyone reads. Where whole blocks go back to the host, though, what another request
 * has left behind those tokens would go with them: the host's zeros travel, and have a checksum. */
static td_status_t place_block(td_model_device_t *d, const td_model_t *m, uint32_t block,
                               bool fresh, uint32_t *place_out)
{
    const td_kv_layout_t *kv = &m->info.kv;
    bool valid = false;
    /* A block that was given out anew holds what somebody else has put there. */
    const uint64_t epoch = m->pool == NULL ? 0 : td_pool_epoch(m->pool, block);
    td_status_t status = td_cuda_mirror_take(d->mirror, block, epoch, place_out, &valid);

    if (status != TD_OK) {
        TD_LOG_ERROR("pass needs more blocks at once than the device holds",
                     "device_blocks=%u block_bytes=%zu try=\"more --device-kv, or fewer rows\"",
                     d->places, td_kv_block_bytes(kv));
        return status;
    }
    const bool uploads = !valid && (!fresh || !d->mapped);
    for (uint32_t r = 0; uploads && r < d->rank_count; r++) {
        const td_cuda_rank_t *rank = &d->ranks[r];
        TD_TRY(td_cuda_copy_heads(rank, kv, m->pass.pool + block * td_kv_block_bytes(kv),
                                  *place_out, 0, kv->layers, false, rank->compute));
    }
    td_cuda_mirror_validate(d->mirror, block, uploads);
    return TD_OK;
}

/* Does one of the rows [begin, end) stand at this position? They ascend. */
static bool has_position(const td_model_row_t *rows, uint32_t begin, uint32_t end,
                         uint32_t position)
{
    while (begin < end) {
        const uint32_t middle = begin + (end - begin) / 2;
        if (rows[middle].position < position) {
            begin = middle + 1;
        } else if (rows[middle].position > position) {
            end = middle;
        } else {
            return true;
        }
    }
    return false;
}

/* The blocks of a table that its rows [begin, end) read or write. */
static td_status_t plan_table(td_model_device_t *d, const td_model_t *m, uint32_t begin,
                              uint32_t end)
{
    const td_model_row_t *rows = m->pass.rows;
    const uint32_t tokens = m->info.kv.block_tokens;
    const uint32_t last = rows[end - 1].position;
    const uint32_t count = last / tokens + 1;
    uint32_t *table = d->host.tables + d->table_count;

    if (count > d->tables_max - d->table_count) {
        TD_LOG_ERROR("pass has too many blocks in its tables", "blocks_max=%u", d->tables_max);
        return TD_ERR_NO_MEMORY;
    }
    for (uint32_t b = 0; b < count; b++) {
        const uint32_t next =
            td_attention_next(&m->info.attention, rows[begin].position, last, b * tokens);
        table[b] = TD_CUDA_NO_PLACE; /* whoever read it would be caught */
        if (next < (b + 1) * tokens) {
            TD_TRY(place_block(d, m, rows[begin].blocks[b],
                               has_position(rows, begin, end, b * tokens), &table[b]));
        }
    }
    d->table_count += count;
    return TD_OK;
}

static void add_written(td_model_device_t *d, uint32_t *count, uint32_t block, uint32_t place,
                        bool last)
{
    d->host.blocks[*count] = place;
    d->host.host_blocks[(*count)++] = block;
    if (last) {
        td_cuda_mirror_filled(d->mirror, block);
    }
}

/* Which places each row's KV goes to. table: of the row's run, planned. */
static td_status_t plan_row(td_model_device_t *d, const td_model_t *m, uint32_t row,
                            const uint32_t *table, uint32_t *count)
{
    const td_model_row_t *r = &m->pass.rows[row];
    const uint32_t b = r->position / m->info.kv.block_tokens;
    /* Its block has all tokens then, in all layers. */
    const bool last =
        (r->position + 1) % m->info.kv.block_tokens == 0 && m->pass.layers == m->info.kv.layers;

    d->host.blocks_begin[row] = *count;
    d->host.tokens[row] = r->token;
    d->host.slots[row] = r->position % m->info.kv.block_tokens;
    if (r->copy_count > TD_CUDA_COPIES_MAX || *count - row > TD_CUDA_COPIES_MAX - r->copy_count) {
        TD_LOG_ERROR("pass writes too many blocks of other paths", "max=%u", TD_CUDA_COPIES_MAX);
        return TD_ERR_NO_MEMORY;
    }
    add_written(d, count, r->blocks[b], table[b], last);
    for (uint32_t i = 0; i < r->copy_count; i++) {
        uint32_t place = 0;
        TD_TRY(place_block(d, m, r->copies[i], d->host.slots[row] == 0, &place));
        add_written(d, count, r->copies[i], place, last);
    }
    d->host.blocks_begin[row + 1] = *count;
    return TD_OK;
}

/* --- attention -------------------------------------------------------------------------------- */

static uint32_t next_span(const td_model_t *m, const td_cuda_item_t *item, uint32_t at)
{
    const uint32_t next =
        td_attention_next(&m->info.attention, item->position, item->position + item->rows - 1, at);

    return next == TD_ATTENTION_NONE ? next : next / TD_CUDA_SPAN * TD_CUDA_SPAN;
}

static uint32_t count_spans(const td_model_t *m, const td_cuda_item_t *item)
{
    uint32_t count = 0;

    for (uint32_t span = next_span(m, item, 0); span != TD_ATTENTION_NONE;
         span = next_span(m, item, span + TD_CUDA_SPAN)) {
        count++;
    }
    return count;
}

/* Cuts a run of consecutive positions into items: as large as they come, the rest small. */
static void plan_run(td_model_device_t *d, const td_model_t *m, uint32_t row, uint32_t rows,
                     uint32_t table)
{
    const uint32_t group = m->info.heads / m->info.kv.kv_heads;
    const uint32_t few_rows = TD_CUDA_FEW_QUERIES / group;
    const uint32_t many_rows = TD_CUDA_MANY_QUERIES / group;

    while (rows > 0) {
        const bool many = rows > few_rows;
        const uint32_t taken = TD_MIN(many ? many_rows : few_rows, rows);
        td_cuda_item_t *item = many ? &d->host.many[d->many_count++] : &d->host.few[d->few_count++];
        *item = (td_cuda_item_t){.row = row,
                                 .rows = taken,
                                 .position = m->pass.rows[row].position,
                                 .table = table,
                                 .end = UINT32_MAX};
        row += taken;
        rows -= taken;
    }
}

/* Replaces items by one for each of their spans, from the end, so that the list grows in place. */
static void split_items(td_model_device_t *d, const td_model_t *m, td_cuda_item_t *items,
                        uint32_t *count, uint32_t *parts)
{
    uint32_t total = 0;
    uint32_t at = 0;

    for (uint32_t i = 0; i < *count; i++) {
        total += count_spans(m, &items[i]);
    }
    at = total;
    for (uint32_t i = *count; i-- > 0;) {
        const td_cuda_item_t item = items[i];
        const uint32_t spans = count_spans(m, &item);
        uint32_t span = next_span(m, &item, 0);
        at -= spans;
        for (uint32_t s = 0; s < spans; s++) {
            items[at + s] = item;
            items[at + s].begin = span;
            items[at + s].end = span + TD_CUDA_SPAN;
            items[at + s].part = *parts + s;
            items[at + s].part_stride = spans;
            for (uint32_t r = 0; r < item.rows; r++) {
                d->host.part_begin[item.row + r] = *parts + r * spans;
                /* The last span may lie behind a row. */
                d->host.part_count[item.row + r] = item.position + r < span ? s : s + 1;
            }
            span = next_span(m, &item, span + TD_CUDA_SPAN);
        }
        *parts += item.rows * spans;
    }
    *count = total;
}

static void plan_split(td_model_device_t *d, const td_model_t *m)
{
    const td_cuda_item_t *const lists[] = {d->host.few, d->host.many};
    const uint32_t counts[] = {d->few_count, d->many_count};
    /* The last rank has the most work; where the work is cut is the same on all. */
    const td_cuda_rank_t *rank = &d->ranks[d->rank_count - 1];
    uint64_t parts = 0;
    bool single = true;

    for (size_t l = 0; l < TD_ARRAY_LEN(lists); l++) {
        for (uint32_t i = 0; i < counts[l]; i++) {
            const uint32_t spans = count_spans(m, &lists[l][i]);
            single = single && spans <= 1;
            parts += (uint64_t)spans * lists[l][i].rows;
        }
    }
    d->split =
        !single && parts <= TD_CUDA_PARTS_MAX &&
        (d->few_count + d->many_count) * rank->kv.kv_heads < SPLIT_BELOW * rank->multiprocessors;
    if (d->split) {
        uint32_t used = 0;
        split_items(d, m, d->host.few, &d->few_count, &used);
        split_items(d, m, d->host.many, &d->many_count, &used);
    }
}

td_status_t td_cuda_plan(td_model_device_t *d, const td_model_t *m)
{
    const td_model_pass_t *p = &m->pass;
    uint32_t blocks = 0;

    TD_ASSERT(!d->mapped || (const void *)p->pool == d->registered);
    d->few_count = 0;
    d->many_count = 0;
    d->table_count = 0;
    td_cuda_mirror_begin(d->mirror);
    if (d->host_pool != p->pool) {
        td_cuda_mirror_forget_all(d->mirror);
        d->host_pool = p->pool;
    }
    for (uint32_t begin = 0; begin < p->row_count;) {
        const uint32_t table = d->table_count;
        uint32_t end = begin + 1;
        uint32_t run = begin;
        while (end < p->row_count && p->rows[end].blocks == p->rows[begin].blocks) {
            end++;
        }
        TD_TRY(plan_table(d, m, begin, end));
        for (uint32_t row = begin; row < end; row++) {
            const td_model_row_t *r = &p->rows[row];
            float *rope = d->host.rope + (size_t)row * m->rope_dim;
            TD_TRY(plan_row(d, m, row, d->host.tables + table, &blocks));
            if (r->position < m->rope_positions) {
                memcpy(rope, m->rope + (size_t)r->position * m->rope_dim,
                       m->rope_dim * sizeof(*rope));
            } else {
                td_model_rope_row(m, r->position, rope);
            }
            if (row + 1 == end || r[1].position != r->position + 1) {
                plan_run(d, m, run, row + 1 - run, table);
                run = row + 1;
            }
        }
        begin = end;
    }
    d->written_count = blocks;
    plan_split(d, m);
    memcpy(d->host.pick, m->logit_rows, p->logit_count * sizeof(*d->host.pick));
    return TD_OK;
}

/* The reference for every other implementation: plain C, the same bits. Where vectors of eight
 * lanes fix an order of additions, this file keeps eight numbers. */
#include "common/model/cpu/td_cpu_ops.h"

#include "common/base/td_base.h"
#include "common/model/cpu/td_cpu_spans.h"

#define LANES 8u

/* Integers of a group of a pair of panels. Shape: [16 rows][32]. */
typedef struct group_weights {
    int16_t q[TD_CPU_PAIR][TD_CPU_GROUP];
    float scale[TD_CPU_PAIR];
    float minimum[TD_CPU_PAIR];
} group_weights_t;

static void load_scales(const uint8_t *bytes, float *out)
{
    for (uint32_t r = 0; r < TD_CPU_PAIR; r++) {
        out[r] = td_f32_from_f16(td_cpu_load_u16(bytes + 2 * r));
    }
}

/* Places as in td_cpu_pack.c, nibble_place(). */
static void load_group_a8(const uint8_t *group, group_weights_t *w)
{
    for (uint32_t r = 0; r < TD_CPU_PAIR; r++) {
        for (uint32_t k = 0; k < 16; k++) {
            uint8_t pair = group[k / 4 * 64 + r * 4 + k % 4];
            w->q[r][k] = pair & 15;
            w->q[r][k + 16] = pair >> 4;
        }
    }
    load_scales(group + TD_CPU_NIBBLE_SCALES, w->scale);
    load_scales(group + TD_CPU_NIBBLE_MINIMA, w->minimum);
}

static void load_group_a16(const uint8_t *group, group_weights_t *w)
{
    for (uint32_t r = 0; r < TD_CPU_PAIR; r++) {
        for (uint32_t k = 0; k < TD_CPU_GROUP; k++) {
            uint16_t half = td_cpu_load_u16(group + k / 8 * 64 + r * 4 + k % 2 * 2);
            w->q[r][k] = (int16_t)(half >> (k % 8 / 2 * 4) & 15);
        }
    }
    load_scales(group + TD_CPU_NIBBLE_SCALES, w->scale);
    load_scales(group + TD_CPU_NIBBLE_MINIMA, w->minimum);
}

static void load_group_bytes(const uint8_t *group, group_weights_t *w)
{
    for (uint32_t r = 0; r < TD_CPU_PAIR; r++) {
        for (uint32_t k = 0; k < TD_CPU_GROUP; k++) {
            w->q[r][k] = (int8_t)group[k / 2 * 32 + 2 * r + k % 2];
        }
    }
    load_scales(group + TD_CPU_BYTE_SCALES, w->scale);
}

static int32_t dot8(const int16_t *w, const int8_t *x)
{
    int32_t sum = 0;
    for (uint32_t k = 0; k < TD_CPU_GROUP; k++) {
        sum += w[k] * x[k];
    }
    return sum;
}

static int32_t dot16(const int16_t *w, const int16_t *x)
{
    int32_t sum = 0;
    for (uint32_t k = 0; k < TD_CPU_GROUP; k++) {
        sum += w[k] * x[k];
    }
    return sum;
}

/* Adds one group's part of every row to y, which holds the chains between groups. */
static void product_group(const td_cpu_matrix_t *m, const group_weights_t *w,
                          const td_cpu_acts_t *x, uint32_t rows, uint32_t g, float *y,
                          uint32_t lanes)
{
    size_t groups = m->inputs / TD_CPU_GROUP;

    for (uint32_t row = 0; row < rows; row++) {
        size_t q_at = (size_t)row * m->inputs + g * TD_CPU_GROUP;
        size_t scale_at = row * groups + g;
        bool int8 = m->form == TD_CPU_NIBBLE_A8;
        float scale_x = int8 ? x->scale8[scale_at] : x->scale16[scale_at];
        float *acc = y + (size_t)row * m->outputs;

        for (uint32_t r = 0; r < lanes; r++) {
            int32_t sum = int8 ? dot8(w->q[r], x->q8 + q_at) : dot16(w->q[r], x->q16 + q_at);
            acc[r] = fmaf((float)sum, w->scale[r] * scale_x, acc[r]);
            if (m->form != TD_CPU_BYTE_A16) {
                float sum_x = int8 ? x->sum8[scale_at] : x->sum16[scale_at];
                acc[r] = fmaf(w->minimum[r], sum_x, acc[r]);
            }
        }
    }
}

static void product_quantised(const td_cpu_matrix_t *m, const td_cpu_acts_t *x, uint32_t rows,
                              const uint8_t *pair, float *y, uint32_t lanes)
{
    group_weights_t w;

    for (uint32_t g = 0; g < m->inputs / TD_CPU_GROUP; g++) {
        if (m->form == TD_CPU_NIBBLE_A8) {
            load_group_a8(pair + (size_t)g * TD_CPU_NIBBLE_BYTES, &w);
        } else if (m->form == TD_CPU_NIBBLE_A16) {
            load_group_a16(pair + (size_t)g * TD_CPU_NIBBLE_BYTES, &w);
        } else {
            load_group_bytes(pair + (size_t)g * TD_CPU_BYTE_BYTES, &w);
        }
        product_group(m, &w, x, rows, g, y, lanes);
    }
}

static float load_float(td_cpu_form_t form, const uint8_t *pair, size_t idx)
{
    float value = 0;
    if (form == TD_CPU_F16) {
        return td_f32_from_f16(td_cpu_load_u16(pair + idx * 2));
    }
    if (form == TD_CPU_BF16) {
        return td_cpu_f32_from_bf16(td_cpu_load_u16(pair + idx * 2));
    }
    memcpy(&value, pair + idx * 4, sizeof(value));
    return value;
}

static void product_float(const td_cpu_matrix_t *m, const td_cpu_acts_t *x, uint32_t rows,
                          const uint8_t *pair, float *y, uint32_t lanes)
{
    for (uint32_t k = 0; k < m->inputs; k++) {
        for (uint32_t r = 0; r < lanes; r++) {
            float w = load_float(m->form, pair, (size_t)k * TD_CPU_PAIR + r);
            for (uint32_t row = 0; row < rows; row++) {
                float *acc = y + (size_t)row * m->outputs + r;
                *acc = fmaf(w, x->f32[(size_t)row * m->inputs + k], *acc);
            }
        }
    }
}

static void product(const td_cpu_matrix_t *w, const td_cpu_acts_t *x, uint32_t rows, float *y,
                    uint32_t panel_begin, uint32_t panel_end, td_cpu_scratch_t *scratch)
{
    (void)scratch;
    for (uint32_t p = panel_begin / 2; p < panel_end / 2 && p * TD_CPU_PAIR < w->outputs; p++) {
        const uint8_t *pair = w->bytes + p * w->pair_bytes;
        float *out = y + p * TD_CPU_PAIR;
        uint32_t lanes = TD_MIN(TD_CPU_PAIR, w->outputs - p * TD_CPU_PAIR);

        for (uint32_t row = 0; row < rows; row++) {
            memset(out + (size_t)row * w->outputs, 0, lanes * sizeof(*out));
        }
        if (w->form <= TD_CPU_BYTE_A16) {
            product_quantised(w, x, rows, pair, out, lanes);
        } else {
            product_float(w, x, rows, pair, out, lanes);
        }
    }
}

static float sum_lanes(const float *lanes)
{
    float sum = 0;
    for (uint32_t i = 0; i < LANES; i++) {
        sum += lanes[i];
    }
    return sum;
}

static void rms_norm(const float *x, const float *weight, uint32_t dim, float eps, float *out)
{
    float lanes[LANES] = {0};
    float inverse = 0;

    for (uint32_t i = 0; i < dim; i++) {
        lanes[i % LANES] = fmaf(x[i], x[i], lanes[i % LANES]);
    }
    inverse = 1.0f / sqrtf(sum_lanes(lanes) / (float)dim + eps);
    for (uint32_t i = 0; i < dim; i++) {
        out[i] = x[i] * inverse * weight[i];
    }
}

/* Writes the group's integers to q; answers its scale and sum. */
static void quantise_group(const float *x, int limit, int32_t *q, float *scale, float *sum)
{
    float largest = 0;
    float inverse = 0;
    int32_t total = 0;

    for (uint32_t i = 0; i < TD_CPU_GROUP; i++) {
        largest = fmaxf(largest, fabsf(x[i]));
    }
    *scale = 0;
    if (largest > TD_CPU_TINY) {
        inverse = (float)limit / largest;
        *scale = largest / (float)limit;
    }
    for (uint32_t i = 0; i < TD_CPU_GROUP; i++) {
        q[i] = (int32_t)lrintf(x[i] * inverse);
        total += q[i];
    }
    *sum = *scale * (float)total;
}

static void quantise8(const float *x, uint32_t dim, int8_t *q, float *scale, float *sum)
{
    int32_t group[TD_CPU_GROUP];

    for (uint32_t g = 0; g < dim / TD_CPU_GROUP; g++) {
        quantise_group(x + g * TD_CPU_GROUP, TD_CPU_INT8_MAX, group, scale + g, sum + g);
        for (uint32_t i = 0; i < TD_CPU_GROUP; i++) {
            q[g * TD_CPU_GROUP + i] = (int8_t)group[i];
        }
    }
}

static void quantise16(const float *x, uint32_t dim, int limit, int16_t *q, float *scale,
                       float *sum)
{
    int32_t group[TD_CPU_GROUP];

    for (uint32_t g = 0; g < dim / TD_CPU_GROUP; g++) {
        quantise_group(x + g * TD_CPU_GROUP, limit, group, scale + g, sum + g);
        for (uint32_t i = 0; i < TD_CPU_GROUP; i++) {
            q[g * TD_CPU_GROUP + i] = (int16_t)group[i];
        }
    }
}

static float exp_clamped(float x)
{
    float power = 0;
    float whole = 0;
    float rest = 0;
    float poly = TD_CPU_EXP_C6;

    x = x > TD_CPU_EXP_MIN ? x : TD_CPU_EXP_MIN; /* this way round also for NaN, as maxps */
    x = x < TD_CPU_EXP_MAX ? x : TD_CPU_EXP_MAX;
    power = x * TD_CPU_LOG2_E;
    whole = rintf(power);
    rest = power - whole;
    poly = fmaf(poly, rest, TD_CPU_EXP_C5);
    poly = fmaf(poly, rest, TD_CPU_EXP_C4);
    poly = fmaf(poly, rest, TD_CPU_EXP_C3);
    poly = fmaf(poly, rest, TD_CPU_EXP_C2);
    poly = fmaf(poly, rest, TD_CPU_EXP_C1);
    poly = fmaf(poly, rest, 1.0f);
    return poly * td_float_from_bits((uint32_t)((int32_t)whole + 127) << 23);
}

static void add(float *x, const float *y, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        x[i] += y[i];
    }
}

static void swiglu(float *gate, const float *up, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        gate[i] = gate[i] / (1.0f + exp_clamped(0.0f - gate[i])) * up[i];
    }
}

static void rotate(float *head, const float *table, uint32_t n)
{
    for (uint32_t i = 0; i < n; i += 2) {
        float even = head[i];
        float odd = head[i + 1];
        head[i] = fmaf(odd, -table[i + 1], even * table[i]);
        head[i + 1] = fmaf(even, table[i + 1], odd * table[i]);
    }
}

static void load_tile(const td_cpu_attention_t *job, bool is_v, uint32_t tile, uint32_t tokens,
                      uint32_t seen, float *out)
{
    for (uint32_t t = 0; t < tokens; t++) {
        if (!(seen >> t & 1)) {
            continue;
        }
        td_kv_row_decode(job->kv->codec, td_cpu_kv_at(job, is_v, tile + t),
                         td_cpu_kv_scale_at(job, is_v, tile + t), job->kv->head_dim,
                         out + (size_t)t * job->kv->head_dim);
    }
}

/* Eight chains over d (mod 8), added as a tree: ((0+1)+(2+3)) + ((4+5)+(6+7)). */
static float score(const float *q, const float *k, uint32_t head_dim)
{
    float l[LANES];

    for (uint32_t i = 0; i < LANES; i++) {
        l[i] = q[i] * k[i];
    }
    for (uint32_t d = LANES; d < head_dim; d++) {
        l[d % LANES] = fmaf(q[d], k[d], l[d % LANES]);
    }
    return ((l[0] + l[1]) + (l[2] + l[3])) + ((l[4] + l[5]) + (l[6] + l[7]));
}

/* Adds the tokens of the tile in the scratch that query i sees. */
static void attend_tile(td_cpu_scratch_t *s, uint32_t i, uint32_t head_dim, uint32_t seen)
{
    float weight[TD_CPU_TILE_TOKENS];
    uint8_t visible[TD_CPU_TILE_TOKENS];
    uint32_t count = 0;
    float lanes[LANES] = {0};
    float maximum = s->maxima[i];
    float rescale = 0;
    float *out = s->outputs + i * td_cpu_output_stride(head_dim);

    for (uint8_t t = 0; t < TD_CPU_TILE_TOKENS; t++) {
        if (seen >> t & 1) {
            visible[count++] = t;
        }
    }
    for (uint32_t k = 0; k < count; k++) {
        const size_t t = visible[k];
        weight[t] = score(s->queries + (size_t)i * head_dim, s->keys + t * head_dim, head_dim);
        maximum = weight[t] > maximum ? weight[t] : maximum;
    }
    rescale = exp_clamped(s->maxima[i] - maximum);
    for (uint32_t k = 0; k < count; k++) {
        const size_t t = visible[k];
        weight[t] = exp_clamped(weight[t] - maximum);
        lanes[t % LANES] += weight[t];
    }
    s->sums[i] = fmaf(s->sums[i], rescale, sum_lanes(lanes));
    s->maxima[i] = maximum;
    for (uint32_t d = 0; d < head_dim; d++) {
        float acc = out[d] * rescale;
        for (uint32_t k = 0; k < count; k++) {
            const size_t t = visible[k];
            acc = fmaf(weight[t], s->values[t * head_dim + d], acc);
        }
        out[d] = acc;
    }
}

static void begin_queries(const td_cpu_attention_t *job, td_cpu_scratch_t *s)
{
    uint32_t head_dim = job->kv->head_dim;

    for (uint32_t i = 0; i < job->rows * job->group; i++) {
        const float *q = job->q + i / job->group * job->q_stride + i % job->group * head_dim;
        for (uint32_t d = 0; d < head_dim; d++) {
            s->queries[(size_t)i * head_dim + d] = q[d] * job->scale;
        }
    }
}

static void attend(const td_cpu_attention_t *job, td_cpu_scratch_t *s, uint32_t begin, uint32_t end)
{
    for (uint32_t tile = td_cpu_next_seen(job, begin, TD_CPU_TILE_TOKENS, end); tile < end;
         tile = td_cpu_next_seen(job, tile + TD_CPU_TILE_TOKENS, TD_CPU_TILE_TOKENS, end)) {
        const uint32_t tokens = TD_MIN(TD_CPU_TILE_TOKENS, end - tile);
        const td_cpu_tile_view_t view = td_cpu_view_tile(job, tile);
        load_tile(job, false, tile, tokens, view.any, s->keys);
        load_tile(job, true, tile, tokens, view.any, s->values);
        for (uint32_t i = 0; i < job->rows * job->group; i++) {
            const uint32_t seen = td_cpu_row_bits(job, &view, i / job->group, tile);
            if (seen != 0) {
                attend_tile(s, i, job->kv->head_dim, seen);
            }
        }
    }
}

static void merge_part(float *total, const float *part, uint32_t head_dim)
{
    float before = total[TD_CPU_PART_MAXIMUM];
    float maximum = part[TD_CPU_PART_MAXIMUM] > before ? part[TD_CPU_PART_MAXIMUM] : before;
    float a = exp_clamped(before - maximum);
    float b = exp_clamped(part[TD_CPU_PART_MAXIMUM] - maximum);

    total[TD_CPU_PART_MAXIMUM] = maximum;
    total[TD_CPU_PART_SUM] = fmaf(total[TD_CPU_PART_SUM], a, part[TD_CPU_PART_SUM] * b);
    for (uint32_t d = TD_CPU_PART_ELEMENTS; d < TD_CPU_PART_ELEMENTS + head_dim; d++) {
        total[d] = fmaf(total[d], a, part[d] * b);
    }
}

static void finish(const float *elements, float sum, uint32_t head_dim, float *out)
{
    float inverse = 1.0f / sum;
    for (uint32_t d = 0; d < head_dim; d++) {
        out[d] = elements[d] * inverse;
    }
}

static const td_cpu_span_ops_t span_ops = {begin_queries, attend, merge_part, finish};

static void attention(const td_cpu_attention_t *job, td_cpu_scratch_t *s)
{
    td_cpu_attend_spans(&span_ops, job, s);
}

static void merge(float *parts, size_t part_stride, uint32_t count, uint32_t head_dim, float *out)
{
    td_cpu_merge_parts(&span_ops, parts, part_stride, count, head_dim, out);
}

const td_cpu_ops_t td_cpu_portable_ops = {
    .name = "portable",
    .product = product,
    .rms_norm = rms_norm,
    .quantise8 = quantise8,
    .quantise16 = quantise16,
    .add = add,
    .swiglu = swiglu,
    .rotate = rotate,
    .kv_encode = td_kv_row_encode,
    .attention = attention,
    .merge = merge,
};

/* td_cpu_spans.h - how attention over any context is cut into spans of TD_CPU_SPAN_TOKENS absolute
 * positions: each is a softmax of its own, and they are merged in ascending order. So one thread
 * can take all spans of a query or several can take some each, and the bits are the same. Source:
 * the merge is that of online softmax (Milakov and Gimelshein 2018, section 3.1). Threads: any; the
 * scratch belongs to one thread. */
#pragma once

#include "common/base/td_base.h"
#include "common/model/cpu/td_cpu_ops.h"

/** What an instruction set brings. */
typedef struct td_cpu_span_ops {
    /* Scales the queries into the scratch. */
    void (*begin)(const td_cpu_attention_t *job, td_cpu_scratch_t *s);
    /* Adds positions [begin, end) to maxima, sums and outputs of the queries. begin is a multiple
     * of TD_CPU_TILE_TOKENS. */
    void (*attend)(const td_cpu_attention_t *job, td_cpu_scratch_t *s, uint32_t begin,
                   uint32_t end);
    /* As td_cpu_ops_t.merge, for one part more. */
    void (*merge)(float *total, const float *part, uint32_t head_dim);
    /* out = elements of the head / sum. */
    void (*finish)(const float *elements, float sum, uint32_t head_dim, float *out);
} td_cpu_span_ops_t;

static inline float *td_cpu_total(const td_cpu_scratch_t *s, uint32_t i, uint32_t head_dim)
{
    return s->totals + i * td_cpu_part_stride(head_dim);
}

static inline void td_cpu_save_part(const td_cpu_scratch_t *s, uint32_t i, uint32_t head_dim,
                                    float *part)
{
    part[TD_CPU_PART_MAXIMUM] = s->maxima[i];
    part[TD_CPU_PART_SUM] = s->sums[i];
    memcpy(part + TD_CPU_PART_ELEMENTS, s->outputs + i * td_cpu_output_stride(head_dim),
           head_dim * sizeof(*part));
}

static inline void td_cpu_reset_queries(td_cpu_scratch_t *s, uint32_t queries, uint32_t head_dim)
{
    size_t lanes = td_cpu_whole_vectors(queries);

    for (size_t i = 0; i < lanes; i++) {
        s->maxima[i] = TD_CPU_MASKED_SCORE;
        s->sums[i] = 0;
    }
    memset(s->outputs, 0, queries * td_cpu_output_stride(head_dim) * sizeof(float));
}

/* The parts of one span, to the job's parts or to the totals. */
static inline void td_cpu_end_span(const td_cpu_span_ops_t *ops, const td_cpu_attention_t *job,
                                   td_cpu_scratch_t *s, uint32_t span)
{
    const uint32_t head_dim = job->kv->head_dim;

    for (uint32_t i = 0; i < job->rows * job->group; i++) {
        if (job->position + i / job->group < span) {
            continue; /* has no place for its part */
        }
        if (job->parts != NULL) {
            td_cpu_save_part(s, i, head_dim,
                             job->parts + i / job->group * job->part_row_stride +
                                 i % job->group * td_cpu_part_stride(head_dim));
        } else if (s->sums[i] == 0) {
            continue; /* sees nothing of it: of what it sees, the largest weighs 1 */
        } else if (td_cpu_total(s, i, head_dim)[TD_CPU_PART_SUM] == 0) {
            td_cpu_save_part(s, i, head_dim, td_cpu_total(s, i, head_dim));
        } else {
            float *part = td_cpu_total(s, job->rows * job->group, head_dim); /* one to spare */
            td_cpu_save_part(s, i, head_dim, part);
            ops->merge(td_cpu_total(s, i, head_dim), part, head_dim);
        }
    }
}

static inline void td_cpu_attend_spans(const td_cpu_span_ops_t *ops, const td_cpu_attention_t *job,
                                       td_cpu_scratch_t *s)
{
    const uint32_t head_dim = job->kv->head_dim;
    const uint32_t queries = job->rows * job->group;
    const uint32_t end = TD_MIN(job->position + job->rows, job->end);
    const bool single = end <= TD_CPU_SPAN_TOKENS && job->parts == NULL;

    ops->begin(job, s);
    for (uint32_t i = 0; !single && i < queries; i++) {
        td_cpu_total(s, i, head_dim)[TD_CPU_PART_SUM] = 0; /* nothing yet */
    }
    for (uint32_t span = td_cpu_next_seen(job, job->begin, TD_CPU_SPAN_TOKENS, end); span < end;
         span = td_cpu_next_seen(job, span + TD_CPU_SPAN_TOKENS, TD_CPU_SPAN_TOKENS, end)) {
        td_cpu_reset_queries(s, queries, head_dim);
        ops->attend(job, s, span, TD_MIN(span + TD_CPU_SPAN_TOKENS, end));
        if (!single) {
            td_cpu_end_span(ops, job, s, span);
        }
    }
    for (uint32_t i = 0; job->parts == NULL && i < queries; i++) {
        float *out = job->out + i / job->group * job->q_stride + i % job->group * head_dim;
        const float *total = td_cpu_total(s, i, head_dim);
        if (single) {
            ops->finish(s->outputs + i * td_cpu_output_stride(head_dim), s->sums[i], head_dim, out);
        } else {
            ops->finish(total + TD_CPU_PART_ELEMENTS, total[TD_CPU_PART_SUM], head_dim, out);
        }
    }
}

static inline void td_cpu_merge_parts(const td_cpu_span_ops_t *ops, float *parts,
                                      size_t part_stride, uint32_t count, uint32_t head_dim,
                                      float *out)
{
    float *total = parts;

    for (uint32_t i = 1; i < count; i++) {
        float *part = parts + i * part_stride;
        if (total[TD_CPU_PART_SUM] == 0) {
            total = part;
        } else if (part[TD_CPU_PART_SUM] != 0) {
            ops->merge(total, part, head_dim);
        }
    }
    ops->finish(total + TD_CPU_PART_ELEMENTS, total[TD_CPU_PART_SUM], head_dim, out);
}

/* Which implementations this CPU can run, and a thread's working memory. */
#include "common/model/cpu/td_cpu_ops.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "common/base/td_base.h"
#include "common/base/td_log.h"

#if defined(__x86_64__)
/* clang 14 does not know "f16c" by name, so it is asked of the CPU (leaf 1, ecx bit 29). */
static bool has_f16c(void)
{
    unsigned eax = 0;
    unsigned ebx = 0;
    unsigned ecx = 0;
    unsigned edx = 0;
    return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & (1u << 29)) != 0;
}

static bool has_avx2(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
}

static bool has_avx512(void)
{
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni");
}
#endif

static bool has_c(void)
{
    return true;
}

const td_cpu_ops_t *td_cpu_ops_find(const char *name)
{
    /* Best first. */
    static const struct {
        const td_cpu_ops_t *ops;
        bool (*runs_here)(void);
    } all[] = {
#if defined(__x86_64__)
        {&td_cpu_avx512_ops, has_avx512},
        {&td_cpu_avx2_ops, has_avx2},
#endif
        {&td_cpu_portable_ops, has_c},
    };

    for (size_t i = 0; i < TD_ARRAY_LEN(all); i++) {
        if ((strcmp(name, TD_CPU_OPS_BEST) == 0 || strcmp(name, all[i].ops->name) == 0) &&
            all[i].runs_here()) {
            return all[i].ops;
        }
    }
    return NULL;
}

td_status_t td_cpu_scratch_create(uint32_t head_dim, uint32_t group, uint32_t inputs_max,
                                  td_cpu_scratch_t **out)
{
    const size_t lanes = td_cpu_whole_vectors((size_t)TD_CPU_TILE_ROWS * group);
    /* A vector read at a row's end reaches into the next row, at the last row into what follows. */
    const size_t tile = td_cpu_whole_vectors((size_t)TD_CPU_TILE_TOKENS * head_dim);
    const size_t queries = lanes * td_cpu_output_stride(head_dim);
    const size_t totals = (lanes + 1) * td_cpu_part_stride(head_dim);
    const size_t floats = 2 * tile + 2 * queries + TD_CPU_TILE_TOKENS * lanes + 4 * lanes + totals;
    const size_t lines = (floats * sizeof(float) + TD_CACHE_LINE_BYTES - 1) / TD_CACHE_LINE_BYTES;
    const size_t bytes = (size_t)TD_CPU_FEW_ROWS * inputs_max * sizeof(int16_t);
    const size_t size = sizeof(td_cpu_scratch_t) + lines * TD_CACHE_LINE_BYTES + bytes;
    td_cpu_scratch_t *s = td_alloc_aligned(TD_CACHE_LINE_BYTES, size);

    if (s == NULL) {
        TD_LOG_ERROR("no memory for a thread's scratch", "bytes=%zu", size);
        return TD_ERR_NO_MEMORY;
    }
    memset(s, 0, size);
    s->keys = (float *)(void *)(s + 1);
    s->values = s->keys + tile;
    s->queries = s->values + tile;
    s->outputs = s->queries + queries;
    s->weights = s->outputs + queries;
    s->maxima = s->weights + TD_CPU_TILE_TOKENS * lanes;
    s->sums = s->maxima + lanes;
    s->rescale = s->sums + lanes;
    s->totals = s->rescale + lanes;
    s->seen = (uint32_t *)(void *)(s->totals + totals);
    s->bytes = (uint8_t *)(s + 1) + lines * TD_CACHE_LINE_BYTES;
    *out = s;
    return TD_OK;
}

td_cpu_tile_view_t td_cpu_view_part(const td_cpu_attention_t *job, uint32_t tile)
{
    td_cpu_tile_view_t view = {.lasting = td_attention_lasting_bits(&job->mask, tile)};

    for (uint32_t row = 0; row < job->rows; row++) {
        view.any |= td_cpu_row_bits(job, &view, row, tile);
    }
    return view;
}

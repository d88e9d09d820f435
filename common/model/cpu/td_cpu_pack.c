#include "common/model/cpu/td_cpu_ops.h"

#include "common/base/td_base.h"
#include "common/base/td_log.h"

#define Q4_0_BYTES 18 /* f16 scale, 16 nibble bytes: low nibbles are k 0..15, high 16..31 */
#define Q4_1_BYTES 20 /* f16 scale, f16 minimum, 16 nibble bytes */
#define Q8_0_BYTES 34 /* f16 scale, 32 int8 */
#define Q4_0_SCALE_MAX 8000.0f /* -8 * scale must stay finite in f16 */

/* Where k of a row lies in a group's 256 nibble bytes. Lane r (32 bits) of vector j belongs to row
 * r of the pair. For int8: bytes are k 4j..4j+3 in the low nibbles, k 16+4j.. in the high ones. For
 * int16: the low half holds k 8j, 8j+2, 8j+4, 8j+6 from its lowest nibble, the high half the odd
 * ones. */
typedef struct nibble_place {
    uint32_t byte_idx;
    uint32_t shift;
} nibble_place_t;

static nibble_place_t nibble_place(td_cpu_form_t form, uint32_t row, uint32_t k)
{
    nibble_place_t place;
    if (form == TD_CPU_NIBBLE_A8) {
        place.byte_idx = (k % 16 / 4) * 64 + row * 4 + k % 4;
        place.shift = k < 16 ? 0 : 4;
    } else {
        uint32_t nibble = (k % 8) / 2 + (k % 2) * 4;
        place.byte_idx = (k / 8) * 64 + row * 4 + nibble / 2;
        place.shift = (nibble % 2) * 4;
    }
    return place;
}

/* Puts one row of one group of 4-bit weights into its lane. */
static void pack_nibbles(td_cpu_form_t form, uint32_t row, const uint8_t *nibbles, uint8_t *group)
{
    if (form == TD_CPU_NIBBLE_A8) { /* the file's own nibble order, four bytes at a time */
        for (uint32_t j = 0; j < 4; j++) {
            memcpy(group + j * 64 + row * 4, nibbles + j * 4, 4);
        }
        return;
    }
    for (uint32_t j = 0; j < 4; j++) {
        uint32_t lane = 0;
        for (uint32_t t = 0; t < 4; t++) {
            uint32_t k = 8 * j + 2 * t;
            uint32_t shift = k < 16 ? 0 : 4;
            uint32_t even = nibbles[k % 16];
            uint32_t odd = nibbles[k % 16 + 1];
            lane |= (even >> shift & 15u) << (4 * t);
            lane |= (odd >> shift & 15u) << (16 + 4 * t);
        }
        memcpy(group + j * 64 + row * 4, &lane, 4);
    }
}

static bool pack_row_q4(td_cpu_matrix_t *m, bool has_minimum, uint32_t row, const uint8_t *src)
{
    uint8_t *group = m->bytes + row / TD_CPU_PAIR * m->pair_bytes;
    uint32_t lane = row % TD_CPU_PAIR;

    for (uint32_t g = 0; g < m->inputs / TD_CPU_GROUP; g++, group += TD_CPU_NIBBLE_BYTES) {
        memcpy(group + TD_CPU_NIBBLE_SCALES + 2 * lane, src, 2);
        if (has_minimum) {
            memcpy(group + TD_CPU_NIBBLE_MINIMA + 2 * lane, src + 2, 2);
            pack_nibbles(m->form, lane, src + 4, group);
            src += Q4_1_BYTES;
        } else { /* (q - 8) * d = q * d + (-8 * d), exactly */
            float scale = td_f32_from_f16(td_cpu_load_u16(src));
            uint16_t minimum = td_f16_from_f32(-8.0f * scale);
            if (!(fabsf(scale) <= Q4_0_SCALE_MAX)) {
                return false;
            }
            memcpy(group + TD_CPU_NIBBLE_MINIMA + 2 * lane, &minimum, 2);
            pack_nibbles(m->form, lane, src + 2, group);
            src += Q4_0_BYTES;
        }
    }
    return true;
}

/* 32-byte piece j holds k 2j and 2j+1 of the sixteen rows. */
static void pack_row_q8(td_cpu_matrix_t *m, uint32_t row, const uint8_t *src)
{
    uint8_t *group = m->bytes + row / TD_CPU_PAIR * m->pair_bytes;
    uint32_t lane = row % TD_CPU_PAIR;

    for (uint32_t g = 0; g < m->inputs / TD_CPU_GROUP; g++, group += TD_CPU_BYTE_BYTES) {
        memcpy(group + TD_CPU_BYTE_SCALES + 2 * lane, src, 2);
        for (uint32_t j = 0; j < 16; j++) {
            memcpy(group + j * 32 + 2 * lane, src + 2 + 2 * j, 2);
        }
        src += Q8_0_BYTES;
    }
}

static void pack_row_float(td_cpu_matrix_t *m, uint32_t row, const uint8_t *src, size_t width)
{
    uint8_t *dst = m->bytes + row / TD_CPU_PAIR * m->pair_bytes + row % TD_CPU_PAIR * width;

    for (uint32_t k = 0; k < m->inputs; k++) {
        memcpy(dst + (size_t)k * TD_CPU_PAIR * width, src + k * width, width);
    }
}

/* Chooses the layout and the bytes of a pair of panels. */
static bool matrix_plan(const td_gguf_tensor_t *tensor, bool int8, td_cpu_matrix_t *m)
{
    size_t groups = m->inputs / TD_CPU_GROUP;

    switch (tensor->type) {
    case TD_GGUF_Q4_0:
    case TD_GGUF_Q4_1:
        m->form = int8 ? TD_CPU_NIBBLE_A8 : TD_CPU_NIBBLE_A16;
        m->pair_bytes = groups * TD_CPU_NIBBLE_BYTES;
        return m->inputs % TD_CPU_GROUP == 0;
    case TD_GGUF_Q8_0:
        m->form = TD_CPU_BYTE_A16;
        m->pair_bytes = groups * TD_CPU_BYTE_BYTES;
        return m->inputs % TD_CPU_GROUP == 0;
    case TD_GGUF_F32:
        m->form = TD_CPU_F32;
        m->pair_bytes = (size_t)m->inputs * TD_CPU_PAIR * 4;
        return true;
    case TD_GGUF_F16:
    case TD_GGUF_BF16:
        m->form = tensor->type == TD_GGUF_F16 ? TD_CPU_F16 : TD_CPU_BF16;
        m->pair_bytes = (size_t)m->inputs * TD_CPU_PAIR * 2;
        return true;
    default:
        return false;
    }
}

static bool pack_row(td_cpu_matrix_t *m, const td_gguf_tensor_t *tensor, uint32_t row)
{
    size_t row_bytes = tensor->byte_count / m->outputs;
    const uint8_t *src = tensor->bytes + row * row_bytes;

    switch (m->form) {
    case TD_CPU_NIBBLE_A8:
    case TD_CPU_NIBBLE_A16:
        return pack_row_q4(m, tensor->type == TD_GGUF_Q4_1, row, src);
    case TD_CPU_BYTE_A16:
        pack_row_q8(m, row, src);
        return true;
    case TD_CPU_F32:
        pack_row_float(m, row, src, 4);
        return true;
    case TD_CPU_F16:
    case TD_CPU_BF16:
        pack_row_float(m, row, src, 2);
        return true;
    }
    return false;
}

/* Bytes of a tensor in the file, to check against the reader's count. */
static size_t tensor_row_bytes(td_gguf_type_t type, size_t inputs)
{
    switch (type) {
    case TD_GGUF_Q4_0:
        return inputs / TD_CPU_GROUP * Q4_0_BYTES;
    case TD_GGUF_Q4_1:
        return inputs / TD_CPU_GROUP * Q4_1_BYTES;
    case TD_GGUF_Q8_0:
        return inputs / TD_CPU_GROUP * Q8_0_BYTES;
    case TD_GGUF_F32:
        return inputs * 4;
    default:
        return inputs * 2;
    }
}

td_status_t td_cpu_pack(const td_gguf_tensor_t *tensor, bool int8, td_arena_t *arena,
                        td_cpu_matrix_t *out)
{
    td_cpu_matrix_t m = {0};
    size_t bytes = 0;

    if (tensor->dims[0] == 0 || tensor->dims[0] > INT32_MAX || tensor->dims[1] == 0 ||
        tensor->dims[1] > INT32_MAX) {
        TD_LOG_ERROR("matrix size out of range", "tensor=%s", tensor->name);
        return TD_ERR_UNSUPPORTED;
    }
    m.inputs = (uint32_t)tensor->dims[0];
    m.outputs = (uint32_t)tensor->dims[1];
    m.panels = (m.outputs + 2 * TD_CPU_PANEL - 1) / (2 * TD_CPU_PANEL) * 2;
    if (!matrix_plan(tensor, int8, &m)) {
        TD_LOG_ERROR("matrix type or width not supported",
                     "tensor=%s type=%d inputs=%u quantised_inputs_multiple_of=%u", tensor->name,
                     (int)tensor->type, m.inputs, TD_CPU_GROUP);
        return TD_ERR_UNSUPPORTED;
    }
    TD_ASSERT(tensor->byte_count == tensor_row_bytes(tensor->type, m.inputs) * m.outputs);
    if (!td_size_mul(m.panels / 2, m.pair_bytes, &bytes)) {
        return TD_ERR_UNSUPPORTED;
    }
    m.bytes = td_arena_alloc(arena, bytes);
    if (m.bytes == NULL) {
        TD_LOG_ERROR("no memory for a matrix", "tensor=%s bytes=%zu", tensor->name, bytes);
        return TD_ERR_NO_MEMORY;
    }
    if (m.outputs % TD_CPU_PAIR != 0) { /* the padding rows */
        memset(m.bytes + m.outputs / TD_CPU_PAIR * m.pair_bytes, 0, m.pair_bytes);
    }
    for (uint32_t row = 0; row < m.outputs; row++) {
        if (!pack_row(&m, tensor, row)) {
            TD_LOG_ERROR("weight scale out of range", "tensor=%s row=%u", tensor->name, row);
            return TD_ERR_UNSUPPORTED;
        }
    }
    *out = m;
    return TD_OK;
}

static void unpack_row_q4(const td_cpu_matrix_t *m, const uint8_t *group, uint32_t lane, float *out)
{
    for (uint32_t g = 0; g < m->inputs / TD_CPU_GROUP; g++, group += TD_CPU_NIBBLE_BYTES) {
        float scale = td_f32_from_f16(td_cpu_load_u16(group + TD_CPU_NIBBLE_SCALES + 2 * lane));
        float minimum = td_f32_from_f16(td_cpu_load_u16(group + TD_CPU_NIBBLE_MINIMA + 2 * lane));
        for (uint32_t k = 0; k < TD_CPU_GROUP; k++) {
            nibble_place_t place = nibble_place(m->form, lane, k);
            uint32_t byte = group[place.byte_idx];
            *out++ = fmaf((float)(byte >> place.shift & 15u), scale, minimum);
        }
    }
}

static void unpack_row_q8(const td_cpu_matrix_t *m, const uint8_t *group, uint32_t lane, float *out)
{
    for (uint32_t g = 0; g < m->inputs / TD_CPU_GROUP; g++, group += TD_CPU_BYTE_BYTES) {
        float scale = td_f32_from_f16(td_cpu_load_u16(group + TD_CPU_BYTE_SCALES + 2 * lane));
        for (uint32_t k = 0; k < TD_CPU_GROUP; k++) {
            *out++ = scale * (float)(int8_t)group[k / 2 * 32 + 2 * lane + k % 2];
        }
    }
}

void td_cpu_unpack_row(const td_cpu_matrix_t *matrix, uint32_t row, float *out)
{
    const uint8_t *pair = matrix->bytes + row / TD_CPU_PAIR * matrix->pair_bytes;
    uint32_t lane = row % TD_CPU_PAIR;

    TD_ASSERT(row < matrix->outputs);
    if (matrix->form == TD_CPU_NIBBLE_A8 || matrix->form == TD_CPU_NIBBLE_A16) {
        unpack_row_q4(matrix, pair, lane, out);
        return;
    }
    if (matrix->form == TD_CPU_BYTE_A16) {
        unpack_row_q8(matrix, pair, lane, out);
        return;
    }
    for (size_t k = 0; k < matrix->inputs; k++) {
        size_t at = k * TD_CPU_PAIR + lane;
        if (matrix->form == TD_CPU_F32) {
            memcpy(out + k, pair + at * 4, 4);
        } else if (matrix->form == TD_CPU_F16) {
            out[k] = td_f32_from_f16(td_cpu_load_u16(pair + at * 2));
        } else {
            out[k] = td_cpu_f32_from_bf16(td_cpu_load_u16(pair + at * 2));
        }
    }
}

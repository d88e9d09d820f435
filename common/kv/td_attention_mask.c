#include "common/kv/td_attention_mask.h"

#include <stdio.h>
#include <string.h>

/* Up to `max` numbers, parted by commas, and nothing else; answers how many, 0: not so. */
static uint32_t parse_numbers(const char *text, uint32_t *out, uint32_t max)
{
    uint32_t count = 0;

    for (;;) {
        uint64_t value = 0;
        if (*text < '0' || *text > '9' || count == max) {
            return 0;
        }
        for (; *text >= '0' && *text <= '9' && value <= TD_ATTENTION_POSITIONS_MAX; text++) {
            value = value * 10 + (uint64_t)(*text - '0');
        }
        if (value > TD_ATTENTION_POSITIONS_MAX) {
            return 0;
        }
        out[count++] = (uint32_t)value;
        if (*text == '\0') {
            return count;
        }
        if (*text++ != ',') {
            return 0;
        }
    }
}

static td_status_t parse_window(const char *text, td_attention_mask_t *out)
{
    uint32_t n[2] = {0};

    if (parse_numbers(text, n, 2) == 0 || n[0] == 0) {
        return TD_ERR_INVALID;
    }
    *out = (td_attention_mask_t){.kind = TD_ATTENTION_WINDOW, .local = n[0], .sinks = n[1]};
    return TD_OK;
}

static td_status_t parse_strided(const char *text, td_attention_mask_t *out)
{
    uint32_t n[3] = {0, 0, TD_ATTENTION_SUMMARY};

    if (parse_numbers(text, n, 3) < 2 || n[0] == 0 || n[2] == 0 || n[2] >= n[1]) {
        return TD_ERR_INVALID;
    }
    *out = (td_attention_mask_t){
        .kind = TD_ATTENTION_STRIDED, .local = n[0], .stride = n[1], .summary = n[2]};
    return TD_OK;
}

td_status_t td_attention_mask_parse(const char *text, td_attention_mask_t *out)
{
    static const char window[] = "window:";
    static const char strided[] = "strided:";

    if (strcmp(text, "full") == 0) {
        *out = (td_attention_mask_t){0};
        return TD_OK;
    }
    if (strncmp(text, window, sizeof(window) - 1) == 0) {
        return parse_window(text + sizeof(window) - 1, out);
    }
    if (strncmp(text, strided, sizeof(strided) - 1) == 0) {
        return parse_strided(text + sizeof(strided) - 1, out);
    }
    return TD_ERR_INVALID;
}

void td_attention_mask_name(const td_attention_mask_t *mask, char out[TD_ATTENTION_TEXT_MAX])
{
    if (mask->kind == TD_ATTENTION_STRIDED) {
        (void)snprintf(out, TD_ATTENTION_TEXT_MAX, "strided:%u,%u,%u", mask->local, mask->stride,
                       mask->summary);
    } else if (mask->kind == TD_ATTENTION_WINDOW && mask->sinks > 0) {
        (void)snprintf(out, TD_ATTENTION_TEXT_MAX, "window:%u,%u", mask->local, mask->sinks);
    } else if (mask->kind == TD_ATTENTION_WINDOW) {
        (void)snprintf(out, TD_ATTENTION_TEXT_MAX, "window:%u", mask->local);
    } else {
        (void)snprintf(out, TD_ATTENTION_TEXT_MAX, "full");
    }
}

uint32_t td_attention_lasting_bits(const td_attention_mask_t *mask, uint32_t tile)
{
    uint32_t bits = 0;

    if (mask->kind == TD_ATTENTION_STRIDED) {
        uint32_t in_stride = tile % mask->stride;
        for (uint32_t i = 0; i < 32; i++) {
            bits |= (uint32_t)(in_stride >= mask->stride - mask->summary) << i;
            in_stride = in_stride + 1 == mask->stride ? 0 : in_stride + 1;
        }
    } else if (mask->sinks > tile) {
        bits = mask->sinks - tile >= 32 ? UINT32_MAX : (1u << (mask->sinks - tile)) - 1;
    }
    return bits; /* full: none, the window has them all */
}

uint32_t td_attention_blocks_needed(const td_attention_mask_t *mask, uint32_t block_tokens,
                                    uint32_t from, uint32_t begin, uint32_t end)
{
    uint32_t count = 0;

    if (mask->kind == TD_ATTENTION_FULL) {
        return end <= begin ? 0 : (end - begin + block_tokens - 1) / block_tokens;
    }
    end = (end + block_tokens - 1) / block_tokens * block_tokens;
    for (uint32_t at = begin; at < end; count++) {
        at = td_attention_next(mask, from, TD_ATTENTION_NONE - 1, at);
        if (at >= end) {
            break;
        }
        at = (at / block_tokens + 1) * block_tokens;
    }
    return count;
}

uint32_t td_attention_blocks_max(const td_attention_mask_t *mask, uint32_t block_tokens,
                                 uint32_t tokens, uint32_t rows)
{
    const uint32_t all = (tokens + block_tokens - 1) / block_tokens;
    uint64_t window = 0;
    uint64_t lasting = 0;

    if (mask->kind == TD_ATTENTION_FULL) {
        return all;
    }
    /* So many positions in a row touch one block more than they fill, at worst. */
    window = ((uint64_t)mask->local + rows - 1 + block_tokens - 2) / block_tokens + 1;
    lasting = td_attention_blocks_needed(mask, block_tokens, TD_ATTENTION_NONE - 1, 0, tokens);
    return (uint32_t)TD_MIN(window + lasting, (uint64_t)all);
}

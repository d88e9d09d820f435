#include "common/model/td_tokenizer_internal.h"

#include <string.h>

#include "common/base/td_base.h"

#define REPLACEMENT "\xef\xbf\xbd" /* U+FFFD */

/* Nothing needs no memory, so a token that is held back cannot fail. */
static td_status_t append(td_str_t *text, const uint8_t *bytes, size_t len)
{
    return len == 0 ? TD_OK : td_str_append(text, bytes, len);
}

/* Moves what is decided out of pending into text; the rest (less than a character) stays. */
static td_status_t drain(const uint8_t *pending, size_t len, bool finish, td_str_t *text,
                         size_t *kept_out)
{
    size_t pos = 0;
    size_t plain = 0; /* [plain, pos) is valid and not yet given out */

    *kept_out = 0;
    while (pos < len) {
        uint32_t bad = 0;
        int n = td_utf8_char(pending + pos, len - pos, &bad);
        if (n > 0) {
            pos += (size_t)n;
            continue;
        }
        TD_TRY(append(text, pending + plain, pos - plain));
        if (n < 0 && !finish) {
            *kept_out = (size_t)-n;
            return TD_OK;
        }
        TD_TRY(td_str_append(text, REPLACEMENT, sizeof(REPLACEMENT) - 1));
        pos += n < 0 ? (size_t)-n : bad;
        plain = pos;
    }
    return append(text, pending + plain, pos - plain);
}

/* A failed append must leave no half a token behind. */
static void truncate_to(td_str_t *text, size_t len)
{
    text->len = len;
    if (text->bytes != NULL) {
        text->bytes[len] = '\0';
    }
}

td_status_t td_detok_push(td_detok_t *detok, const td_tokenizer_t *tok, uint32_t id,
                          bool skip_special, td_str_t *text)
{
    td_status_t status = TD_OK;
    const size_t old_len = text->len;
    const char *bytes = NULL;
    size_t len = 0;
    size_t kept = 0;
    /* The held bytes and enough of the token's to decide about them. */
    uint8_t seam[8];
    size_t seam_len = 0;
    size_t used = 0; /* bytes of the token that the seam took */

    if (!td_tokenizer_bytes(tok, id, &bytes, &len)) {
        return TD_ERR_INVALID;
    }
    if (len == 0 || (skip_special && td_tokenizer_is_control(tok, id))) {
        return TD_OK;
    }
    TD_ASSERT(detok->held_len < sizeof(detok->held));
    memcpy(seam, detok->held, detok->held_len);
    seam_len = detok->held_len;
    while (seam_len > 0 && used < len) {
        uint32_t bad = 0;
        int n = 0;
        seam[seam_len] = (uint8_t)bytes[used];
        n = td_utf8_char(seam, seam_len + 1, &bad);
        if (n == 0) {
            break; /* the held bytes can never become one; this byte starts afresh */
        }
        seam_len++;
        used++;
        if (n > 0) {
            break;
        }
    }
    /* An unfinished seam is still held when the token is used up, and broken when it is not. */
    status = drain(seam, seam_len, used < len, text, &kept);
    if (status == TD_OK && kept > 0) {
        memcpy(detok->held, seam + seam_len - kept, kept);
        detok->held_len = (uint32_t)kept;
        return TD_OK;
    }
    if (status == TD_OK) {
        status = drain((const uint8_t *)bytes + used, len - used, false, text, &kept);
    }
    if (status != TD_OK) {
        truncate_to(text, old_len);
        return status;
    }
    memcpy(detok->held, bytes + len - kept, kept);
    detok->held_len = (uint32_t)kept;
    return TD_OK;
}

td_status_t td_detok_finish(td_detok_t *detok, td_str_t *text)
{
    size_t kept = 0;

    if (detok->held_len > 0) {
        TD_TRY(drain(detok->held, detok->held_len, true, text, &kept));
    }
    detok->held_len = 0;
    return TD_OK;
}

/* fuzz_replay.h - a corpus replayed without a fuzzing engine: every file, each of its bytes changed
 * one at a time, and cut at every length. Copies have just the input's size, so that a sanitizer
 * sees one byte too many. Threads: owner. */
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "common/base/td_base.h"

#define FUZZ_MASKS 4

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t len);

/** masks: what each byte is changed by. cut_step: bytes between two lengths that are tried. */
static inline void fuzz_replay(const uint8_t *bytes, size_t len, const uint8_t masks[FUZZ_MASKS],
                               size_t cut_step)
{
    uint8_t *copy = td_alloc(len);

    TD_ASSERT(copy != NULL);
    memcpy(copy, bytes, len);
    (void)LLVMFuzzerTestOneInput(copy, len);
    for (size_t i = 0; i < len; i++) {
        for (size_t m = 0; m < FUZZ_MASKS; m++) {
            copy[i] = bytes[i] ^ masks[m];
            (void)LLVMFuzzerTestOneInput(copy, len);
        }
        copy[i] = bytes[i];
    }
    td_free(copy);
    for (size_t cut = 0; cut < len; cut += cut_step) {
        copy = td_alloc(cut);
        TD_ASSERT(copy != NULL);
        memcpy(copy, bytes, cut);
        (void)LLVMFuzzerTestOneInput(copy, cut);
        td_free(copy);
    }
}

/** Reads a file of a corpus, at most cap bytes of it. False when it cannot be opened. */
static inline bool fuzz_read(const char *dir, const char *name, uint8_t *bytes, size_t cap,
                             size_t *len_out)
{
    char path[4096];
    FILE *file = NULL;

    (void)snprintf(path, sizeof(path), "%s/%s", dir, name);
    file = fopen(path, "rb");
    if (file == NULL) {
        return false;
    }
    *len_out = fread(bytes, 1, cap, file);
    (void)fclose(file);
    return true;
}

/* fuzz_replay.h - a corpus replayed without a fuzzing engine: every file, each of its bytes changed
 * one at a time, and cut at every length. Copies have just the input's size, so that a sanitizer
 * sees one byte too many. Threads: owner. */
#pragma once

#include <dirent.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

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

/** How many files of a folder were replayed. */
static inline uint32_t fuzz_replay_files(const char *path,
                                         bool (*replay)(const char *dir, const char *name))
{
    DIR *dir = opendir(path);
    const struct dirent *entry = NULL;
    uint32_t files = 0;

    while (dir != NULL && (entry = readdir(dir)) != NULL) {
        files += entry->d_name[0] != '.' && replay(path, entry->d_name);
    }
    if (dir != NULL) {
        (void)closedir(dir);
    }
    return files;
}

/** Replays every file of a folder and says so, as cmocka would. replay: false where a file can't be
 * read. quietly: without what the code under test logs, a line for each refusal. Answers the exit
 * code. */
static inline int fuzz_replay_folder(const char *path,
                                     bool (*replay)(const char *dir, const char *name),
                                     bool quietly)
{
    const int saved = dup(STDERR_FILENO);
    const int null = open("/dev/null", O_WRONLY | O_CLOEXEC);
    uint32_t files = 0;

    if (saved < 0 || null < 0) {
        perror("standard error");
        return 1;
    }
    if (quietly && getenv("TD_FUZZ_LOG") == NULL) {
        (void)dup2(null, STDERR_FILENO);
    }
    files = fuzz_replay_files(path, replay);
    (void)dup2(saved, STDERR_FILENO);
    (void)close(null);
    (void)close(saved);
    if (files == 0) {
        (void)fprintf(stderr, "no corpus in %s\n", path);
        return 1;
    }
    printf("replayed %u files and changes of every byte\n", files);
    printf("[  PASSED  ] 1 test(s).\n");
    return 0;
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

#define FUZZ_FILE_BYTES_MAX 65536u

/** For fuzz_replay_folder(): a file of at most FUZZ_FILE_BYTES_MAX, long ones cut at some lengths.
 */
static inline bool fuzz_replay_file(const char *dir, const char *name)
{
    static const uint8_t masks[FUZZ_MASKS] = {0x01, 0x04, 0x80, 0xff};
    static uint8_t bytes[FUZZ_FILE_BYTES_MAX];
    size_t len = 0;

    if (!fuzz_read(dir, name, bytes, sizeof(bytes), &len)) {
        return false;
    }
    fuzz_replay(bytes, len, masks, 1 + len / 256);
    return true;
}

/** Reads every byte of what was promised. */
static inline void fuzz_touch(const void *bytes, size_t len)
{
    static volatile uint8_t sink; /* keeps the reads */
    const uint8_t *at = bytes;

    for (size_t i = 0; i < len; i++) {
        sink = (uint8_t)(sink ^ at[i]);
    }
}

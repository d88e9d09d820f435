/* Reads any bytes as an answer of etcd's JSON gateway. Built with a fuzzing engine, or alone: then
 * it replays the corpus (answers of an etcd 3.4) and changes of every byte of it. */
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "common/base/td_base.h"
#include "common/coord/td_etcd_msg.h"
#include "tests/fuzz/fuzz_replay.h"

#define CORPUS_DIR "tests/fuzz/corpus/etcd"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check_printable(const char *text, size_t chars_max)
{
    TD_ASSERT(strlen(text) <= chars_max);
    for (; *text != '\0'; text++) {
        TD_ASSERT(*text >= 0x20 && *text < 0x7f && *text != '"');
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    td_etcd_answer_t answer;
    td_etcd_answer_t untouched;
    td_status_t status = TD_OK;
    char why[40];

    memset(&answer, 0x5a, sizeof(answer));
    memset(&untouched, 0x5a, sizeof(untouched));
    status = td_etcd_answer_decode((const char *)data, size, &answer);
    if (status == TD_OK) {
        TD_ASSERT(!answer.has_key || answer.create_revision > 0);
        TD_ASSERT(answer.lease <= INT64_MAX && answer.ttl_s <= INT64_MAX);
        TD_ASSERT(strlen(answer.value) <= TD_ETCD_VALUE_CHARS_MAX);
        for (const char *at = answer.value; *at != '\0'; at++) {
            TD_ASSERT(*at > 0x20 && *at < 0x7f);
        }
        check_printable(answer.token, TD_ETCD_TOKEN_CHARS_MAX);
    } else {
        TD_ASSERT(status == TD_ERR_PROTOCOL || status == TD_ERR_TOO_LARGE);
        TD_ASSERT(memcmp(&answer, &untouched, sizeof(answer)) == 0);
    }
    td_etcd_error_text((const char *)data, size, why, sizeof(why));
    check_printable(why, sizeof(why) - 1);
    return 0;
}

#ifndef TD_FUZZ_ENGINE
static bool replay_file(const char *dir, const char *name)
{
    static const uint8_t masks[FUZZ_MASKS] = {0x01, 0x02, 0x10, 0x80};
    static uint8_t bytes[TD_ETCD_ANSWER_BYTES_MAX];
    size_t len = 0;

    if (!fuzz_read(dir, name, bytes, sizeof(bytes), &len)) {
        return false;
    }
    fuzz_replay(bytes, len, masks, 1);
    return true;
}

int main(int argc, char **argv)
{
    const char *dir_path = argc > 1 ? argv[1] : CORPUS_DIR;
    DIR *dir = opendir(dir_path);
    const struct dirent *entry = NULL;
    uint32_t files = 0;

    while (dir != NULL && (entry = readdir(dir)) != NULL) {
        files += entry->d_name[0] != '.' && replay_file(dir_path, entry->d_name);
    }
    if (dir != NULL) {
        (void)closedir(dir);
    }
    if (files == 0) {
        (void)fprintf(stderr, "no corpus in %s\n", dir_path);
        return 1;
    }
    printf("replayed %u files and changes of every byte\n", files);
    printf("[  PASSED  ] 1 test(s).\n");
    return 0;
}
#endif
